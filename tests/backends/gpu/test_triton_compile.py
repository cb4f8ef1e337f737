"""Every product compiled for real GPUs, without one: registers, spills, shared memory, instructions."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from ragged import Recipe
from ragged.backends.base import Target
from ragged.backends.gpu import call as triton_call
from ragged.backends.gpu import tiles
from ragged.backends.gpu.backend import _loaded
from ragged.core.scales import Scales
from ragged.product.config import GpuConfig
from ragged.product.operands import KernelOperand, Operand
from tests import gpu, ones, products
from tests.backends.layers import (
    DEEP,
    LARGE,
    MANY,
    ODD,
    TINY,
    Shape,
    dequantized,
    product,
    sharded_gradients,
    train,
    trained_avals,
    with_weights,
)
from tests.cases import NAMES, split, thinned
from tests.contract.meshes import KINDS, moved, table

gpu.needs_triton()

A100, H200, B200 = gpu.ARCHITECTURES
TENSOR_CORES = {A100: ("HMMA", "IMMA"), H200: ("HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA"), B200: ("UTCHMMA", "UTCQMMA")}
FP8, FAST_FP8 = "float8_e4m3fn", "ANY_F8_ANY_F8_F32_FAST_ACCUM"
ADDS_TO_MEMORY = re.compile(r"^\s*(?:@!?%\w+\s+)?((?:atom|red|multimem|cp\.reduce)\.\S+)", re.M)
"""Instructions of PTX. Machine code has `ATOM` for other things too: a tensor map is stored by an exchange."""
Aval = jax.ShapeDtypeStruct


@pytest.fixture(autouse=True)
def no_atomics(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel that a test here compiles adds to memory in any order, which would vary its bits."""
    read, found = gpu._kernel, list[tuple[str, str]]()

    def noted(chip: str, payload: bytes) -> gpu.Kernel:
        kernel = read(chip, payload)
        found.extend((kernel.name, name) for name in ADDS_TO_MEMORY.findall(kernel.ptx))
        found.extend((kernel.name, name) for name in kernel.sass_counts if re.match("RED(?!UX)|UTMARED", name))
        return kernel

    monkeypatch.setattr(gpu, "_kernel", noted)
    yield
    assert not found


def kernels(chip: str, layout: str, shape: Shape, dtype: str) -> list[gpu.Kernel]:
    function, avals = product(layout, shape, jnp.dtype(dtype))
    found = gpu.compile_for(chip, function, *avals)
    assert len(found) == (1 if dtype == "int8" else 3)  # forward, and a derivative by each operand
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "layout, dtype",
    [("batched", FP8), ("forward", "bfloat16"), ("wgrad", FP8), ("inner_columns", "bfloat16")],
)
def test_hopper(layout: str, dtype: str) -> None:
    """No spills, nothing serialised, whole tiles by TMA, and Hopper's own tensor cores wherever a group has 64 rows."""
    found = kernels(H200, layout, LARGE, dtype)
    for kernel in found:
        assert kernel.spill_bytes == 0 and not kernel.remarks
        assert kernel.sass_counts["UTMALDG"]
        assert kernel.sass_counts["HGMMA"] + kernel.sass_counts["QGMMA"]
    assert dtype != FP8 or found[0].sass_counts["QGMMA"]


@pytest.mark.parametrize(
    "chip, layout, shape, dtype",
    split(
        [(H200, "forward", ODD, "float16")],
        [
            *((H200, layout, ODD, "bfloat16") for layout in NAMES[1::2]),
            (H200, "wgrad", ODD, "int8"),
            (H200, "forward", TINY, "bfloat16"),
            (H200, "wgrad", MANY, "bfloat16"),
            (H200, "forward", DEEP, FP8),
            (B200, "outer", LARGE, "bfloat16"),
            (B200, "forward", LARGE, FP8),
            (A100, "wgrad", ODD, "float32"),
        ],
    ),
)
def test_compiles(chip: str, layout: str, shape: Shape, dtype: str) -> None:
    """Within the chip's shared memory and registers; spills on no Hopper."""
    # Of groups of 143 rows, tiles have 32: fewer than Blackwell's own tensor cores take.
    names = (*TENSOR_CORES[chip], *(["HMMA"] if shape == ODD else []))
    for kernel in kernels(chip, layout, shape, dtype):
        assert any(kernel.sass_counts[name] for name in names)
        assert kernel.spill_bytes <= (0 if chip == H200 else 128)


SHAPES = (8192, 4096, 14336, 8), (65536, 2048, 1408, 64), (64, 4096, 14336, 8)


@pytest.mark.long
@pytest.mark.parametrize("chip, shape", [*((H200, shape) for shape in SHAPES[:2]), (A100, SHAPES[2])], ids=str)
def test_what_is_measured(chip: str, shape: Shape) -> None:
    """The shapes of the benchmark, forward, dgrad and wgrad in bfloat16: no spills, nothing serialised."""
    rows, k, n, groups = shape

    def train(x: Array, w: Array, sizes: Array, dy: Array) -> Any:
        out, pull = jax.vjp(lambda x, w: ragged.grouped_matmul(x, w, sizes), x, w)
        return out, pull(dy)

    avals = (Aval(dims, jnp.bfloat16) for dims in ((rows, k), (groups, k, n), (rows, n)))
    x, w, dy = avals
    for kernel in gpu.compile_for(chip, train, x, w, Aval((groups,), jnp.int32), dy):
        assert kernel.spill_bytes == 0 and not kernel.remarks
        assert kernel.sass_counts["UTMALDG"] or chip == A100
        assert kernel.sass_counts["HGMMA"] or rows == 64  # 8 a group: fewer than HGMMA takes


@pytest.mark.long
def test_tensor_cores_add_up_fp8_only_if_asked() -> None:
    """By default each step's sum is added in float32, which takes the registers of half a tile. Neither spills."""
    m, k, n, g = SHAPES[0]
    avals = Aval((m, k), FP8), Aval((g, n, k), FP8), Aval((g,), jnp.int32)

    def compiled(precision: Any) -> gpu.Kernel:
        options: dict[str, Any] = {"transpose_rhs": True, "preferred_element_type": jnp.bfloat16}
        (kernel,) = gpu.compile_for(H200, partial(ragged.grouped_matmul, precision=precision, **options), *avals)
        assert kernel.sass_counts["QGMMA"] and kernel.spill_bytes == 0 and not kernel.remarks
        return kernel

    exact, fast = compiled(None), compiled(FAST_FP8)
    assert exact.sass_counts["FADD"] > 0 and fast.sass_counts["FADD"] == 0
    assert fast.shared_bytes > exact.shared_bytes


WEIGHTS = [  # an A100 can't convert float8_e4m3fn, so kernels decode it; uint4 and uint8 have zero points
    (A100, FP8, (128, 128), LARGE),
    *thinned(7, (A100, H200, B200), ("uint4", "uint8"), ((1, 128), "row"), (LARGE, TINY)),
    (H200, "float4_e2m1fn", "mx", LARGE),
    *(
        (chip, "int4" if scaling == (1, 128) else "float4_e2m1fn", scaling, shape)
        for chip, scaling, shape in thinned(5, (A100, H200, B200), ("mx", "nvfp4", (1, 128)), (LARGE, DEEP, TINY))
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("chip, dtype, scaling, shape", WEIGHTS)
def test_weights_of_few_bits(chip: str, dtype: str, scaling: Any, shape: Shape) -> None:
    """Forward and dgrad by tensor cores: decoded in registers, without spills; nothing is dequantised in memory."""
    run, avals = with_weights(dtype, scaling, shape, symmetric=not dtype.startswith("uint"))
    found = gpu.compile_for(chip, run, *avals)
    assert len(found) == 2 and not dequantized(gpu.lower_for(chip, run, *avals).as_text(), math.prod(shape[1:]))
    for kernel in found:
        assert kernel.spill_bytes == 0 and (dtype != "float4_e2m1fn" or "tf32" not in kernel.ptx)
        assert any(kernel.sass_counts[name] for name in (*TENSOR_CORES[chip], "HMMA"))


@pytest.mark.long
@pytest.mark.parametrize(
    "chip, dtype, scaling",
    [(H200, FP8, "row"), (A100, "uint4", (1, 128)), (A100, "int4", "row")],
)
def test_casts_of_weights_are_operations_on_bits(chip: str, dtype: str, scaling: Any) -> None:
    """Instructions that cast (`F2F`, `I2F`) have an eighth of the rate of others. Few are left, for zero points and
    divisions."""
    run, avals = with_weights(dtype, scaling, LARGE, symmetric=dtype != "uint4")
    forward, _ = gpu.compile_for(chip, run, *avals)
    assert not forward.sass_counts["F2F"] and forward.sass_counts["I2F"] <= 8


@pytest.mark.long
@pytest.mark.parametrize("dtype, scaling", [(FP8, (128, 128)), ("int8", "column")])
def test_weights_that_are_cast_run_ahead(dtype: str, scaling: Any) -> None:
    """On an A100, tiles in either stored order are copied to shared memory while others are multiplied. Loads into
    registers are of scales and sizes."""
    run, avals = with_weights(dtype, scaling, LARGE)
    for kernel in gpu.compile_for(A100, run, *avals):
        assert kernel.sass_counts["LDG"] < kernel.sass_counts["LDGSTS"]


@pytest.mark.long
@pytest.mark.parametrize("chip, dtype", [(H200, "bfloat16"), (A100, "int4"), (H200, "float4_e2m1fn"), (B200, FP8)])
def test_parts_of_the_contracted_dim(chip: str, dtype: str) -> None:
    """Of few rows and columns: one kernel without spills, whose sums one fusion adds up."""
    m, k, n, g = 32, 7168, 128, 2
    scaling = {"bfloat16": None, "int4": (128, 1), "float4_e2m1fn": "mx", FP8: (128, 128)}[dtype]
    w: Any = Aval((g, k, n), jnp.bfloat16)
    w = w if scaling is None else jax.eval_shape(lambda w: ragged.quantize(w, dtype, scaling), w)
    avals = ragged.GroupedTensor(Aval((m, k), jnp.bfloat16), Aval((g,), jnp.int32)), w

    def run(x: Any, w: Any) -> Array:
        return ragged.matmul(x, w).data

    config = ragged.explain(*avals, device=chip).plan().config
    assert isinstance(config, GpuConfig) and config.splits > 1
    (kernel,) = gpu.compile_for(chip, run, *avals)
    assert kernel.spill_bytes == 0 and any(kernel.sass_counts[name] for name in (*TENSOR_CORES[chip], "HMMA"))
    if dtype == "bfloat16":  # other weights, or their scales, get the kernel's order of storage
        text = gpu.compile_whole(run, *avals).as_text()
        assert text.count(" fusion(") == 1 and f"f32[{config.splits},{m},{n}]" in text


@pytest.mark.long
def test_without_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration can ask for pointers in place of TMA: the tensor cores are the same."""
    choose, function, avals = tiles.choose, *product("forward", LARGE, jnp.dtype(jnp.bfloat16))
    monkeypatch.setattr(tiles, "choose", lambda *args: replace(choose(*args), tma=False))
    for kernel in gpu.compile_for(H200, function, *avals):
        assert not kernel.sass_counts["UTMALDG"] and kernel.sass_counts["LDGSTS"] and kernel.sass_counts["HGMMA"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loads_without_tma_run_ahead(dtype: str) -> None:
    """Forward, dgrad and wgrad on an A100: tiles of both operands, in whichever order they are stored, are copied to
    shared memory 16 bytes at a time, while the tiles before them are multiplied."""
    m, k, n, g = SHAPES[0]
    sizes, threads, stages = Aval((g,), jnp.int32), 256, 4
    tile = 2 * 128 * 32 * jnp.dtype(dtype).itemsize  # bytes of both tiles of a step
    config = GpuConfig(m=128, k=32, n=128, warps=threads // 32, stages=stages)

    def train(x: Array, w: Array, dy: Array, sizes: Array) -> Any:
        y, to_w, to_dy = ragged.GroupedTensor(x, sizes), ragged.GroupedTensor(w), ragged.GroupedTensor(dy, sizes)
        pairs = (y, to_w), (to_dy, to_w.mT), (y.mT, to_dy)
        return [ragged.matmul(*pair, backend=config).data for pair in pairs]

    found = gpu.compile_for(A100, train, *(Aval(s, dtype) for s in ((m, k), (g, k, n), (m, n))), sizes)
    assert len(found) == 3
    for kernel in found:
        copied = re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (\w+), %r\d+;", kernel.ptx)
        assert {*copied} == {"0x10"} and len(copied) * 16 * threads == stages * tile
        assert kernel.threads == threads and kernel.spill_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "chip, recipe",
    [
        *((H200, each) for each in ("rowwise", "blockwise", "mxfp8")),
        (B200, "rowwise"),
    ],
)
def test_recipes(chip: str, recipe: str) -> None:
    """Forward, dgrad and wgrad of fp8 by the chip's own fp8 instructions, without spills. Nothing is dequantised in
    memory."""
    step, avals = partial(train, Recipe.preset(recipe)), trained_avals((8192, 2048, 1024, 8))
    found = gpu.compile_for(chip, step, *avals)
    assert len(found) == 3 and not dequantized(gpu.lower_for(chip, step, *avals).as_text(), 1024 * 2048)
    for kernel in found:
        assert kernel.sass_counts["QGMMA" if chip == H200 else "UTCQMMA"] and kernel.spill_bytes == 0
        if chip == H200:
            assert not kernel.remarks  # that the tensor cores' instructions are serialised, or wait for registers
            assert kernel.sass_counts["STS"] < 64  # no operand is turned tile by tile
            # 128 × 128 sums of a step, or their products with scales, are added up in float32, by 256 threads.
            assert len(re.findall(r"\b(?:add|fma)\S*\.f32\b", kernel.ptx)) >= 64


BY_SCALES = {"mxfp8": ("mxf8f6f4", "UTCQMMA"), "nvfp4": ("mxf4nvf4", "UTCOMMA")}


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe, shape",
    [
        *(("mxfp8", shape) for shape in (LARGE, MANY)),
        *(("nvfp4", shape) for shape in (ODD, SHAPES[2])),
    ],
    ids=str,
)
def test_scales_of_tensor_cores(recipe: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell's multiply by the scales themselves, which are fetched ahead, in all products but the
    wgrad of 4 bits; without spills, at the tiles that are the default for any shape, in the shared memory that is
    reckoned with.
    """
    choose, asked = tiles.choose, []
    monkeypatch.setattr(tiles, "choose", lambda *args: asked.append((args[0], choose(*args), args[1])) or asked[-1][1])
    found = gpu.compile_for(B200, partial(train, Recipe.preset(recipe)), *trained_avals(shape))
    assert len(found) >= 2
    for kernel, chosen in zip(found, asked, strict=True):
        assert kernel.spill_bytes == 0 and kernel.shared_bytes <= tiles.shared(*chosen)
    kind, instruction = BY_SCALES[recipe]
    for kernel in found[: 2 if recipe == "nvfp4" else 3]:
        assert {*re.findall(r"kind::(\w+)", kernel.ptx)} == {kind} and f"{kind}.block_scale" in kernel.ptx
        assert kernel.sass_counts[instruction] and kernel.sass_counts["LDGSTS"]


@pytest.mark.long
def test_scales_of_many_matrices() -> None:
    """The last matrix's scales are more than 2**31 elements after the first one's."""
    run, avals = with_weights("float4_e2m1fn", "nvfp4", (64, 8192, 4352, 1024))
    for kernel in gpu.compile_for(H200, run, *avals):
        products = [line for line in kernel.ptx.splitlines() if re.search(rf"\b{8192 * 4352 // 16};", line)]
        assert products and all("mul.wide" in line for line in products)


@pytest.mark.long
@pytest.mark.parametrize("recipe, gated", [("blockwise", True), ("mxfp8", True), ("nvfp4", False)])
def test_epilogue_kernels_on_blackwell(recipe: str, gated: bool) -> None:
    """One kernel of both products, without spills; two, where an older Triton shares no scales."""

    def hidden(x: Array, gate: Array, up: Array, sizes: Array) -> Array:
        rows = ragged.GroupedTensor(x, sizes)
        if gated:
            return ragged.gated_matmul(rows, gate, up, recipe=recipe).data
        return ragged.matmul(rows, gate, activation="gelu", recipe=recipe).data

    avals = (Aval(dims, jnp.bfloat16) for dims in ((8192, 2048), (8, 2048, 1024), (8, 2048, 1024)))
    found = gpu.compile_for(B200, hidden, *avals, Aval((8,), jnp.int32))
    assert len(found) == 2 - (not gated or recipe == "blockwise" or triton_call.shares_scales())
    for kernel in found:
        assert kernel.spill_bytes == 0 and kernel.sass_counts["UTCOMMA" if recipe == "nvfp4" else "UTCQMMA"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "int4"])
def test_four_bits_are_bytes_in_memory(dtype: str) -> None:
    """XLA for a GPU has two numbers in a byte, the first in the lower bits: no pass makes the kernel's operand."""

    def by_hand(x: Array) -> Array:
        codes = lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8).reshape(1024, 256, 2)
        return codes[..., 0] | codes[..., 1] << 4

    def loaded(x: Array) -> Array:
        return _loaded(KernelOperand(x.astype(dtype), "mk", None), "k", False, tiles.chip(None)).data

    text = gpu.compile_whole(loaded, Aval((1024, 512), jnp.float32)).as_text()
    entry = text[text.index("ENTRY") :]
    assert entry.count(" fusion(") == 1 and re.search(r"ROOT \S+ = u8\[1024,256\]\S* bitcast\(", entry)
    x = jnp.asarray(3 * np.random.default_rng(0).normal(size=(1024, 512)), dtype)
    np.testing.assert_array_equal(loaded(x), by_hand(x))


@pytest.mark.long
@pytest.mark.parametrize(
    "rows, columns, k, warps", [(64, 128, 128, 4), (128, 256, 128, 8), (128, 128, 256, 8)], ids=str
)
def test_scales_at_any_tile(rows: int, columns: int, k: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a tile has fewer rows than tensor cores scale: within the shared memory reckoned."""
    asked = []

    def choose(problem: tiles.Problem, on: tiles.Chip) -> GpuConfig:
        asked.append((problem, problem.config(rows, columns, k, warps=warps, stages=3), on))
        return asked[-1][1]

    def forward(x: Array, w: Array, sizes: Array, of_x: Array, of_w: Array) -> Array:
        options: dict[str, Any] = {"target": Target(device=(B200, 148)), "preferred_element_type": jnp.bfloat16}
        scales = {"lhs_scales": Scales(of_x, (1, 32), True), "rhs_scales": Scales(of_w, (1, 32), True)}
        return products.grouped_matmul("triton_gpu", x, w, sizes, transpose_rhs=True, **scales, **options)

    monkeypatch.setattr(tiles, "choose", choose)
    m, d, n, g = LARGE
    shapes = (m, d), (g, n, d), (m, d // 32), (g, n, d // 32)
    x, w, of_x, of_w = (Aval(shape, FP8 if i < 2 else jnp.float32) for i, shape in enumerate(shapes))
    (kernel,) = gpu.compile_for(B200, forward, x, w, Aval((g,), jnp.int32), of_x, of_w)
    # The first, which no model chooses, stores one register, and loads it once.
    assert kernel.spill_bytes <= 8 * (rows == 64) and kernel.shared_bytes <= tiles.shared(*asked[0])
    assert ("block_scale" in kernel.ptx) == (rows == 128)


WITH_EPILOGUE = [  # layout; rows, k, n, groups; dtype; scales; activation; which are stored
    ("batched", SHAPES[1], "bfloat16", "", "gelu_tanh", (True, True, True)),
    ("forward", SHAPES[2], "bfloat16", "", "silu", (True, True, True)),
    ("forward", (1000, 1000, 1000, 7), "bfloat16", "", "tanh", (True, True)),
    ("forward", SHAPES[0], "float16", "", "sigmoid", (True, True, True)),
    ("batched", SHAPES[0], "float32", "", "gelu", (True, True, True)),
    ("batched", SHAPES[0], FP8, "", "silu", (True, True, True)),
    ("forward", SHAPES[0], FP8, "tensorwise", "silu", (True, True, True)),
    ("batched", SHAPES[0], FP8, "blockwise", "gelu", (True, True)),
    ("batched", SHAPES[1], FP8, "rowwise", "relu", (True, False, False)),
]


@pytest.mark.long
@pytest.mark.parametrize("layout, shape, dtype, way, activation, stored", WITH_EPILOGUE, ids=str)
def test_epilogue_kernels(
    layout: str, shape: Shape, dtype: str, way: str, activation: str, stored: tuple[bool, ...]
) -> None:
    """One kernel, without spills, whose tensor cores wait for nothing; biases of both products."""
    (m, k, n, g), fp8, gated, f32 = shape, dtype == FP8, len(stored) > 2, jnp.float32
    batched, m = layout == "batched", m // shape[3] if layout == "batched" else m
    lead, matrix = ((g,) if batched else ()), ((g, n, k) if fp8 else (g, k, n))
    scales, blocks = {  # the operand's with rows `[*lead, m, k]`, and the matrices' `[g, n, k]`
        "": ([], [(None, None)] * 2),
        "rowwise": ([(*lead, m, 1), (g, n, 1)], [(1, None)] * 2),
        "tensorwise": ([(g, 1, 1) if batched else (g, 1), (g, 1, 1)], [(None, None)] * 2),
        "blockwise": ([(*lead, m, k // 128), (g, n // 128, k // 128)], [(1, 128), (128, 128)]),
    }[way]

    def product(x: Array, w: Array, up: Array, bias: Array, sizes: Array, *values: Array) -> list[Array]:
        found = [Scales(*each) for each in zip(values, blocks, strict=True)] if values else [None, None]
        options: dict[str, Any] = {"target": Target(device=(H200, 132)), "preferred_element_type": jnp.bfloat16}
        options |= {
            "lhs_scales": found[0],
            "rhs_scales": found[1],
            "epilogue": products.epilogue_spec(activation, stored),
            "bias": bias,
        }
        options |= {"up": Operand(up, found[1]), "up_bias": bias} if gated else {}
        if batched:
            axes = ("mk", "nk" if fp8 else "kn", "mn")
            return products.batched_matmul("triton_gpu", x, w, axes=axes, **options)
        return products.grouped_matmul("triton_gpu", x, w, sizes, transpose_rhs=fp8, **options)

    w, of = Aval(matrix, jnp.dtype(dtype)), [Aval(dims, f32) for dims in scales]
    x = Aval((*lead, m, k), jnp.dtype(dtype))
    (kernel,) = gpu.compile_for(H200, product, x, w, w, Aval((g, n), f32), Aval((g,), jnp.int32), *of)
    assert kernel.spill_bytes == 0
    assert not [remark for remark in kernel.remarks if "serialized" in remark]
    # Tiles of one operand and of two matrices; each step multiplies twice.
    assert kernel.sass_counts["UTMALDG"] % (3 if gated else 2) == 0 != kernel.sass_counts["UTMALDG"]
    if m // (1 if batched else g) >= 64:
        assert kernel.sass_counts["QGMMA" if fp8 else "HGMMA"]


@pytest.mark.long
def test_roundings_to_narrow_floats_are_kept() -> None:
    """XLA leaves out a conversion to fp4 or fp8 that is undone in the same program, unless a barrier is between them.

    Otherwise the products that XLA computes with a recipe, and what `dequantize` returns, would not be of the quantised
    numbers, and numbers would be divided by other scales than those stored.
    """
    x, w, sizes = Aval((64, 32), jnp.float32), Aval((4, 32, 48), jnp.float32), Aval((4,), jnp.int32)
    stored, scales = Aval((4, 32, 48), jnp.float4_e2m1fn), Aval((4, 2, 48), jnp.float32)
    scaling = ragged.Scaling((16, 1), jnp.float8_e4m3fn)

    def quantized(w: Array) -> ragged.GroupedTensor:
        return ragged.quantize(w, "float4_e2m1fn", scaling)

    def numbers(w: Array) -> Array:
        return quantized(w).data

    def values(w: Array) -> Array:
        return quantized(w).dequantize().data

    def values_by(stored: Array, scales: Array) -> Array:
        given: dict[str, Any] = {"scales": scales.astype("float8_e4m3fn"), "tensor_scale": jnp.float32(2)}
        return ragged.GroupedTensor(stored, **given, scaling=scaling).dequantize().data

    def product(x: Array, sizes: Array, w: Array) -> Array:
        return ragged.matmul(ragged.GroupedTensor(x, sizes), w, recipe="nvfp4", backend="xla").data

    of_w = {"f4e2m1fn[4,32,48]", "f8e4m3fn[4,2,48]"}
    of_both = {"f4e2m1fn[64,32]", "f8e4m3fn[64,2]", "f4e2m1fn[4,48,32]", "f8e4m3fn[4,48,2]"}
    for function, avals, expected in (
        (numbers, (w,), of_w),
        (values, (w,), of_w),
        (values_by, (stored, scales), {"f8e4m3fn[4,2,48]"}),
        (product, (x, sizes, w), of_both),
    ):
        text = gpu.compile_whole(function, *avals).as_text()
        assert expected <= {*re.findall(r"= (\w+\[\S+\])\S* convert\(", text)}, function.__name__


def check_ones(case: ones.Case, chip: str) -> None:
    """That a product and its derivatives are compiled to kernels where `explain` says that they run."""
    avals = case.avals
    plans = ragged.explain(*avals, device=chip, **case.options).plans
    expected = sum(plan.backend == "triton_gpu" for plan in plans)
    found = gpu.payloads(gpu.lower_for(chip, case.product, *avals))
    assert min(expected, 1) <= len(found) <= expected


def test_one_in_each_letter() -> None:
    """Extents of 1, for Hopper."""
    check_ones(ones.Case("`int8`", "forward", (1, 1, 1, 2), (False, True)), H200)


@pytest.mark.long
@pytest.mark.parametrize("number, format", [*enumerate(ones.FORMATS_WITH_ONES)][1::4])
def test_extents_of_one(number: int, format: str) -> None:
    """1, 2 and 3 in any letter: a chip, a layout and an order of storage each."""
    (case,) = ones.cases(format, 1)
    check_ones(case, [*gpu.ARCHITECTURES][number % 3])


@pytest.mark.long
def test_operands_are_turned_as_they_are_made() -> None:
    """The pass that quantises `x` and the cotangent writes what the wgrad takes, and reads them once for both.

    All three kernels are left."""
    m, k, n, g = 8192, 2048, 1024, 8
    text = gpu.compile_whole(partial(train, Recipe.preset("rowwise")), *trained_avals((m, k, n, g))).as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 3
    for width in (k, n):
        assert len(re.findall(rf"= \(f8\w+\[{width},{m}\]\S*, f8\w+\[{m},{width}\]\S*\) fusion\(", text)) == 1
        assert not re.findall(rf"= (?:bf16|f32|pred)\[{width},{m}\]\S* (?:fusion|copy|transpose)\(", text)


@pytest.mark.long
@pytest.mark.parametrize("layout", NAMES[1::2])
def test_the_whole_program(layout: str) -> None:
    """Forward and backward as XLA compiles them for an H200; ragged rows are never transposed in memory."""
    function, avals = product(layout, LARGE, jnp.bfloat16)
    text = gpu.compile_whole(function, *avals).as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 3
    if "columns" in layout or layout in ("forward_left", "wgrad", "outer"):
        return  # their ragged columns come as a buffer of columns, not as rows seen through `mT`
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    assert not [dims for dims in moved if math.prod(map(int, dims.split(","))) >= 2**20]


# --- eight H200s ------------------------------------------------------------------------------------------------------


def eight(kind: str, **axes: int) -> Mesh:
    devices = np.array(gpu.h200s(8)).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(KINDS[kind],) * len(axes))


def check_kernels(program: Any, *results: str) -> None:
    """Those inside have these results on one device, and are as one device's would be; no matrix is gathered."""
    assert not any(re.search(r"\[\d+,\d+,\d+\]", types) for name, types in moved(program) if name == "all-gather")
    found = gpu.kernels_of(program)
    assert sorted(result for result, _ in found) == sorted(results)
    for _, kernel in found:
        assert kernel.spill_bytes == 0 and kernel.sass_counts["HGMMA"] and kernel.sass_counts["UTMALDG"]


EIGHT = [  # x, w; the letters that are sharded; each kernel's result on one device, and MiB of temporaries there
    (P("a"), P(None, None, "b"), "mn", "bf16[4096,256] f32[4096,2048] f32[16,2048,256]", 64),
    (P("a"), P("b"), "mg", "f32[4096,1024] f32[4096,2048] f32[4,2048,1024]", 64),
    # Both want "b": rows are gathered, and each device has the sum of its own.
    (P("b"), P("b"), "", "f32[8192,1024] f32[8192,2048] bf16[4,2048,1024]", 128),
]


@pytest.mark.long
@pytest.mark.parametrize("x, w, letters, results, mib", EIGHT, ids=str)
def test_gradients_over_eight_gpus(x: P, w: P, letters: str, results: str, mib: int) -> None:
    """Three kernels in the partitioned program, and the collectives of the table; no matrix is gathered."""
    kind = "explicit" if letters == "mn" else "auto"
    gradients, avals = sharded_gradients(eight(kind, a=2, b=4), x, w)
    # Over `Auto` axes a result is sharded as it is used.
    options: Any = {"out_shardings": tuple(aval.sharding for aval in avals[:2])} if kind == "auto" else {}
    program = gpu.compile_sharded(gradients, *avals, **options)
    check_kernels(program, *results.split())
    found = Counter(name for name, _ in moved(program))
    if letters:
        assert found == Counter(filter(None, (cell for z in letters for cell in table()["forward", z])))
    else:
        assert {*found} == {"all-gather", "reduce-scatter"}
    assert program.memory_analysis().temp_size_in_bytes <= (mib + 1) << 20


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_matmul_over_eight_gpus(kind: str) -> None:
    """Kernels around a function of each device's part; gradients are summed in float32."""
    x, w, _, results, mib = EIGHT[0]
    mesh = eight(kind, a=2, b=4)
    _, avals = sharded_gradients(mesh, x, w)
    options: dict[str, Any] = {"mesh": mesh, "in_specs": (x, w), "out_specs": P("a", "b")}

    def loss(x: Array, w: Array, sizes: Array) -> Array:
        tensor, silu = ragged.GroupedTensor(x, sizes), lambda part: part.map(jax.nn.silu)
        y = ragged.sharded_matmul(tensor, w, **options, out_shard_callback=silu)
        return jnp.sum(y.data.astype(jnp.float32))

    program = gpu.compile_sharded(jax.grad(loss, (0, 1)), *avals)
    check_kernels(program, *results.split())
    assert {name for name, _ in moved(program)} == {"all-reduce"}
    assert not any("bf16" in types for _, types in moved(program))
    assert program.memory_analysis().temp_size_in_bytes <= (mib + 1) << 20


@pytest.mark.long
def test_exchange_over_eight_gpus() -> None:
    """Rows of an expert-parallel layer travel by `ragged-all-to-all`, the default there; kernels do the rest."""
    mesh, (tokens, d, f, groups) = eight("auto", expert=8), (8192, 2048, 1024, 16)

    def local(x: Array, ids: Array, weights: Array, up: Array, down: Array) -> Array:
        ex = ragged.exchange(ragged.route(ids, groups))
        hidden = ragged.matmul(ex.dispatch(x), up).map(jax.nn.silu)
        return ex.combine(ragged.matmul(hidden, down), weights)

    def loss(*args: Array) -> Array:
        layer = jax.shard_map(local, mesh=mesh, in_specs=(P("expert"),) * 5, out_specs=P("expert"))
        return jnp.sum(layer(*args).astype(jnp.float32))

    float_, shapes = jnp.bfloat16, ((tokens, d), (tokens, 2), (tokens, 2), (groups, d, f), (groups, f, d))
    types = zip(shapes, (float_, jnp.int32, float_, float_, float_), strict=True)
    avals = [Aval(shape, dtype, sharding=NamedSharding(mesh, P("expert"))) for shape, dtype in types]
    program = gpu.compile_sharded(jax.grad(loss, (0, 2, 3, 4)), *avals)
    # A device has 1024 tokens, 2 matrices of each, and room for the 16384 rows of all tokens.
    check_kernels(program, *["bf16[16384,1024]", "bf16[16384,2048]"] * 2, "bf16[2,2048,1024]", "bf16[2,1024,2048]")
    rows = [types for name, types in moved(program) if name == "ragged-all-to-all"]
    extents = [re.findall(r"bf16\[(\d+),2048\]", types)[-1] for types in rows]  # of the results
    assert sorted(extents) == ["16384", "16384", "2048", "2048"]  # into buffers and back, forward and backward
    # Of what else travels, sizes and offsets, nothing is a float.
    others = [types for name, types in moved(program) if name != "ragged-all-to-all"]
    assert len(others) == 5 and all("s32[" in types and "f" not in types for types in others)
    buffers = program.memory_analysis().temp_size_in_bytes / (16384 * d * 2)
    assert buffers < 4.2
