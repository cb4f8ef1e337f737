"""The GPU kernel's body, run on the CPU by Triton's interpreter, against the float64 oracle.

The interpreter's memory is checked: results begin as NaN, and whatever lies outside of an array can't be loaded.
"""

import itertools
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from ragged.backends.base import Target
from ragged.backends.config import Configs, GpuConfig
from ragged.backends.gpu import call as triton_call
from ragged.backends.gpu import tiles
from ragged.product import lowering
from ragged.product.operands import Scales

from . import cases, gpu, oracle, products, ran
from .cases import NAMES, SPREADS, TOLERANCE
from .test_matmul import check
from .test_pallas_tpu import check_gradients

gpu.needs_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from ragged.backends.gpu import interpreter as triton_interpreter  # noqa: E402
from ragged.backends.gpu import kernel as triton_kernel  # noqa: E402

pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def launches() -> Iterator[ran.Launches]:
    with ran.watch() as launches:
        yield launches


@pytest.fixture
def nothing_but_the_kernels(launches: ran.Launches) -> Iterator[None]:
    """XLA's never stand in for them."""
    with ran.only("triton_gpu", launches):
        yield


interpreted = pytest.mark.usefixtures("nothing_but_the_kernels")


def matmul(lhs: Any, rhs: Any, **options: Any) -> GroupedTensor:
    return jax.jit(lambda lhs, rhs: ragged.matmul(lhs, rhs, backend="triton_gpu", interpret=True, **options))(lhs, rhs)


@pytest.mark.sampled(3)
@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_and_spread(layout: str, dtype: str) -> None:
    """K1, K3, K18, K19, K20, K21, K22, K26, K31, K35, B1, B4: nothing is a multiple of a tile; NaN tails."""
    for seed, (kind, slack) in enumerate(itertools.product(SPREADS, (False, True))):
        case = cases.make(
            layout, g=(1, 3, 8)[seed % 3], kind=kind, slack=slack, seed=seed, dtype=dtype, uniform=(37, 150, 140)
        )
        wide = jnp.float32 if dtype.startswith("float8") else None
        # The portable program, for any GPU since 8.0, has no float8_e4m3fn: XLA's would run.
        with gpu.on(gpu.FIRST_WITH_FP8) if wide else nullcontext():
            out = matmul(case.lhs, case.rhs, tiling=None if seed % 2 else (32, 16, 64), preferred_element_type=wide)
        check(case, out)


@triton.jit
def load_all(pointers, inside, rest, EDGE: tl.constexpr):
    """In place of a load that masks what lies beyond the buffer."""
    return tl.load(pointers)


@triton.jit
def fit_fewer(start, size, CAPACITY: tl.constexpr):
    """In place of what says how many rows a group has in a buffer: one fewer."""
    return start.to(tl.int32), tl.maximum(size, 1) - 1


@pytest.mark.parametrize(
    "function, wrong, error, text",
    [
        ("_load", load_all, jax.errors.JaxRuntimeError, "`grouped_product` loads element"),
        ("_fit", fit_fewer, AssertionError, "largest error nan"),
    ],
)
def test_memory_is_watched(function: str, wrong: Any, error: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What strays from an array is found, and so is what of the result nobody wrote."""
    case = cases.make("forward", g=2, slack=False, capacity=32, uniform=(8, 50, 20))
    check(case, matmul(case.lhs, case.rhs, tiling=(16, 16, 16)))
    monkeypatch.setattr(triton_kernel, function, wrong)
    with pytest.raises(error, match=text):
        check(case, matmul(case.lhs, case.rhs, tiling=(16, 16, 16)))


def test_executed_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    """K25: a forward's tiles are as many as the run-time sizes make, and a wgrad's steps; a gap has none."""
    stored, multiplied = [], []
    builder = triton_interpreter._Builder
    store, dot = builder.create_masked_store, builder.create_dot
    monkeypatch.setattr(builder, "create_masked_store", lambda *x, **y: stored.append(1) or store(*x, **y))
    monkeypatch.setattr(builder, "create_dot", lambda *x, **y: multiplied.append(1) or dot(*x, **y))
    rows, tile = 128, 16
    x, dy = jnp.ones((rows, 32)), jnp.ones((rows, 32))  # two tiles of each of these columns
    w = jnp.ones((8, 32, 32))

    def tiles(size: int) -> int:
        return -(-size // tile)

    for sizes in ([128, *[0] * 7], [0] * 8, [1] * 8, [50, 0, 0, 40, 1, 1, 1, 1]):
        dims = jnp.array(sizes, jnp.int32)
        in_groups = sum(map(tiles, sizes))
        stored.clear()
        multiplied.clear()
        jax.block_until_ready(matmul(GroupedTensor(x, dims), w, tiling=(tile, 16, 16)))
        assert len(stored) == 2 * (in_groups + tiles(rows - sum(sizes)))
        assert len(multiplied) == 2 * 2 * in_groups
        stored.clear()
        multiplied.clear()
        jax.block_until_ready(matmul(GroupedTensor(x, dims).mT, GroupedTensor(dy, dims), tiling=(16, tile, 16)))
        assert len(stored) == 2 * 2 * len(sizes)
        assert len(multiplied) == 2 * 2 * in_groups


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", NAMES)
def test_descriptors(layout: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K18, K19, B4: what a Hopper loads by TMA, which takes rows of whole 16 bytes, and what it loads otherwise."""
    used = []
    call = triton_call.call
    monkeypatch.setattr(triton_call, "call", lambda *args, **kwargs: used.append(args[2]) or call(*args, **kwargs))
    for seed, kind in enumerate(("giant", "zipf")):
        shape = {"uniform": (48, 160, 144), "aligned": 16}
        case = cases.make(layout, g=3, kind=kind, seed=seed, dtype=dtype, **shape)
        with gpu.on("NVIDIA H200"):
            check(case, matmul(case.lhs, case.rhs, tiling=(32, 32, 32), preferred_element_type=jnp.float32))
    assert used and all(static["A_TMA"] and static["B_TMA"] for static in used)


TILES = {"overlapped": (32, 32, 32), "specialised": (128, 32, 32)}  # rows, columns, contracted
VARIANTS = tuple(TILES)


def chosen(variant: str, problem: tiles.Problem, on: tiles.Chip) -> GpuConfig:
    """In place of `tiles.choose`."""
    return problem.config(*TILES[variant], warps=4, stages=3, band=2, variant=variant)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What stored each tile of a result: "pointers", or a half of it "TMA"."""
    found: list[str] = []
    builder = triton_interpreter._Builder
    by_pointers, by_tma = builder.create_masked_store, builder.create_descriptor_store

    def pointers(*args: Any, **options: Any) -> None:
        found.append("pointers")
        by_pointers(*args, **options)

    def tma(*args: Any, **options: Any) -> None:
        by_tma(*args, **options)  # by pointers, here
        found[-1] = "TMA"

    monkeypatch.setattr(builder, "create_masked_store", pointers)
    monkeypatch.setattr(builder, "create_descriptor_store", tma)
    return found


def configured(variant: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is lowered in here is for an H200, by a variant of the kernel."""
    monkeypatch.setattr(tiles, "choose", partial(chosen, variant))
    return gpu.on("NVIDIA H200")


@pytest.mark.sampled(4)
@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "variant, layout",
    [
        *(("overlapped", layout) for layout in NAMES),
        *(("specialised", layout) for layout in ("batched", "forward", "forward_left")),
    ],
)
def test_variants(variant: str, layout: str, dtype: str, stores: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """B4: what the default's results are: empty groups, partial tiles and bands, NaN tails, zeros where nobody is."""
    with configured(variant, monkeypatch):
        for slack, kind in enumerate(("half_empty", "zipf")):
            shape = {"uniform": (144, 96, 80), "aligned": 16, "capacity": 272}
            case = cases.make(layout, g=3, kind=kind, slack=bool(slack), dtype=dtype, **shape)
            check(case, matmul(case.lhs, case.rhs, preferred_element_type=jnp.float32))
    assert set(stores) == {"TMA" if variant == "overlapped" else "pointers"}


@pytest.mark.sampled(2)
@interpreted
@pytest.mark.parametrize("offset", [-2, 0, 1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_shard(variant: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """K11, O7: zeros in tiles of groups that aren't held, whatever is loaded there; batches; and what is added to."""
    sizes, rng = [130, 0, 70, 0], np.random.default_rng(0)
    held = [i if 0 <= i < 4 else None for i in range(offset, offset + 2)]
    x = jnp.asarray(rng.normal(size=(2, 272, 64)), jnp.bfloat16).at[:, 200:].set(jnp.nan)
    w = jnp.asarray(rng.normal(size=(2, 64, 48)), jnp.bfloat16)
    w = jnp.stack([a if i in (0, 2) else a * jnp.nan for i, a in zip(held, w, strict=True)])
    dims, existing = jnp.array(sizes, jnp.int32), jnp.ones((2, 272, 48), jnp.bfloat16)

    def product(x: Array, old: Array | None) -> Array:
        options: dict[str, Any] = {"group_offset": jnp.int32(offset), "backend": "triton_gpu", "interpret": True}
        options |= {} if old is None else {"existing_out": GroupedTensor(old, dims)}
        return ragged.matmul(GroupedTensor(x, dims), w, **options).data

    for old in (None, existing):
        with configured(variant, monkeypatch):
            out = np.asarray(jax.jit(jax.vmap(product, in_axes=(0, None if old is None else 0)))(x, old), np.float64)
        want = (
            np.zeros((2, 272, 48))
            if old is None
            else np.where(np.arange(272)[:, None] < 200, 1.0, np.zeros((2, 1, 48)))
        )
        for i, size in enumerate(sizes):
            rows = slice(sum(sizes[:i]), sum(sizes[: i + 1]))
            if i in held and size:
                want[:, rows] += np.asarray(x[:, rows], np.float64) @ np.asarray(w[held.index(i)], np.float64)
        np.testing.assert_allclose(out, want, rtol=2**-8, atol=1e-3)
        assert not out[:, 200:].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_with_scales(variant: str, stores: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """K23: by row; where a tile has no rows of a group they are NaN, and it has zeros."""
    rng, fp8 = np.random.default_rng(0), jnp.float8_e4m3fn
    x, w = jnp.asarray(rng.normal(size=(272, 64)), fp8), jnp.asarray(rng.normal(size=(2, 48, 64)), fp8)
    of_x, of_w = rng.uniform(0.5, 2, (272, 1)), rng.uniform(0.5, 2, (2, 48, 1))
    of_x[140:] = np.nan
    monkeypatch.setattr(tiles, "choose", partial(chosen, variant))
    out = products.grouped_matmul(
        "triton_gpu",
        x,
        w,
        jnp.array([140, 0], jnp.int32),
        transpose_rhs=True,
        lhs_scales=Scales(jnp.asarray(of_x, jnp.float32), (1, None)),
        rhs_scales=Scales(jnp.asarray(of_w, jnp.float32), (1, None)),
        preferred_element_type=jnp.float32,
        target=Target(interpret=True, device=("NVIDIA H200", 132)),
    )
    want = of_x[:140] * np.asarray(x, np.float64)[:140] @ (of_w[0] * np.asarray(w[0], np.float64)).T
    np.testing.assert_allclose(np.asarray(out[:140]), want, rtol=1e-5, atol=1e-4)
    assert not np.asarray(out[140:]).any()
    assert set(stores) == {"TMA" if variant == "overlapped" else "pointers"}


OVERLAPPED = GpuConfig(m=32, n=64, k=32, warps=4, stages=3, band=2, variant="overlapped")
SPECIALISED = replace(OVERLAPPED, m=128, variant="specialised")
SHAPE = {"m": 256, "k": 64, "n": 128, "dtype": "bfloat16", "chip": "NVIDIA H200", "wgrad": False, "batch": 2}


@pytest.mark.parametrize(
    "config, changed, needs",
    [
        (OVERLAPPED, {}, None),
        (SPECIALISED, {}, None),
        (OVERLAPPED, {"chip": "NVIDIA B200"}, "compute capability 9.0"),
        (OVERLAPPED, {"k": 36}, "operands whose rows begin at multiples of 16 bytes"),
        (OVERLAPPED, {"k": 80}, "a contraction that is ragged, or a multiple of its tile"),
        (OVERLAPPED, {"wgrad": True}, "a result for each batch element"),
        (replace(OVERLAPPED, m=128, n=256, k=128), {"k": 128}, "less shared memory"),
        (OVERLAPPED, {"n": 100}, "a result whose rows begin at multiples of 16 bytes"),
        (OVERLAPPED, {"m": 2**29 + 8}, "at most 2**30 rows of results"),
        (SPECIALISED, {"wgrad": True, "batch": 1}, "rows that alone are ragged, if any are"),
        (replace(SPECIALISED, warps=8), {}, "4 warps, and a tile of 128 rows"),
        (replace(SPECIALISED, m=64), {}, "4 warps, and a tile of 128 rows"),
        (SPECIALISED, {"dtype": "float32"}, "operands of the same 8 or 16 bits, and no scales but of rows"),
    ],
)
def test_variants_that_do_not_fit(config: GpuConfig, changed: dict[str, Any], needs: str | None) -> None:
    """T10: an error, lest another program be measured."""
    m, k, n, dtype, chip, wgrad, batch = (SHAPE | changed).values()
    x, w, sizes = ((batch, m, k), dtype), ((4, n, k), dtype), ((4,), "int32")
    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in (x, w, sizes)]

    def forward(x: Array, w: Array, sizes: Array) -> Array:
        options: dict[str, Any] = {"transpose_rhs": True, "backend": "triton_gpu"}
        return jax.vmap(lambda x: ragged.grouped_matmul(x, w, sizes, **options))(x)

    product = jax.grad(lambda *args: jnp.sum(forward(*args)), argnums=1) if wgrad else forward
    error = pytest.raises(ValueError, match=re.escape(f"the kernel's variant {config.variant!r} needs {needs}."))
    # The wgrad's result is `[n, k]`, and its rows are contracted.
    of_wgrad = replace(config, m=config.k, n=config.m, k=config.n)
    using = ragged.tuning.using(Configs(config, rhs=of_wgrad))
    with using, gpu.on(chip), error if needs else nullcontext():
        text = jax.jit(product).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
        assert "triton_kernel_call" in text


@pytest.mark.sampled(4)
@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", NAMES)
def test_gradients(layout: str, dtype: str) -> None:
    """O16: by each operand, `dout @ rhs.T` and `lhs.T @ dout` of each group; zeros where an operand has its tail."""
    check_gradients(cases.make(layout, g=3, dtype=dtype, uniform=(37, 150, 140), seed=3), dtype, matmul)


@interpreted
@pytest.mark.parametrize("layout", ["batched", "forward", "wgrad", "outer"])
def test_existing_out_in_place(layout: str) -> None:
    """O7: where the result begins as what is added to, each element is read and written once, and the tail is zero."""
    case = cases.make(layout, g=3, uniform=(37, 50, 40))
    product = matmul(case.lhs, case.rhs)
    existing = product._replace_data(jnp.where(product.mask, 2.0, jnp.nan))
    out = matmul(case.lhs, case.rhs, existing_out=existing)
    worst, rms = TOLERANCE["float32"]
    want = [x + 2 for x in oracle.matmul(case.lhs_groups, case.rhs_groups)]
    oracle.assert_close(case.unpack(np.asarray(out.data)), want, max=worst, rms=rms)
    case.assert_tail_zero(out)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("g", [1, 3, 8, 64])
@pytest.mark.parametrize("layout", NAMES)
def test_the_whole_case_table(layout: str, g: int, dtype: str) -> None:
    """B4, O16: every spread, with slack and without: values and gradients."""
    for seed, (kind, slack) in enumerate(itertools.product(SPREADS, (False, True))):
        case = cases.make(layout, g=g, kind=kind, slack=slack, seed=seed, dtype=dtype, uniform=(37, 150, 140))
        check_gradients(case, dtype, matmul)


def lowered(chip: str, *, backend: str | None = None, dtype: str = "bfloat16", groups: int = 4, **options: Any) -> str:
    """What a forward is lowered to for a chip."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in ((64, 32), (groups, 32, 16))]
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def forward(x: Array, w: Array, sizes: Array) -> Array:
        return ragged.grouped_matmul(x, w, sizes, backend=backend, **options)

    with gpu.on(chip):
        return jax.jit(forward).trace(*avals, sizes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "chip, options, is_kernel",
    [
        ("NVIDIA H200", {}, True),
        ("NVIDIA A100", {}, True),
        ("NVIDIA L4", {}, True),
        ("NVIDIA A100", {"dtype": "float8_e4m3fn"}, False),
        ("NVIDIA L4", {"dtype": "float8_e4m3fn"}, True),
        ("NVIDIA H200", {"dtype": "int16"}, False),
        ("NVIDIA H200", {"precision": "BF16_BF16_F32_X6"}, False),
        ("NVIDIA H200", {"groups": 5000}, False),
        ("Tesla T4 7.5", {}, False),
        ("NVIDIA Something 12.0", {}, True),
        ("NVIDIA Something", {}, True),
    ],
)
def test_what_has_no_kernel_runs_in_xla(chip: str, options: dict[str, Any], is_kernel: bool) -> None:
    """T10: never a traceback from inside Triton."""
    assert ("triton_kernel_call" in lowered(chip, **options)) == is_kernel


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """O2, T10: XLA runs in its place, and who asks for it is told what to install."""
    sentence = "`ragged`'s Triton kernels need jax-triton: `pip install ragged[cuda]`."
    monkeypatch.setattr(triton_call, "missing", lambda: sentence)
    assert "triton_kernel_call" not in lowered("NVIDIA H200")
    x = GroupedTensor(jnp.ones((4, 2)), jnp.array([1, 3], jnp.int32))
    assert f"on cuda: grouped_matmul of xla ({sentence})" in str(ragged.explain(x, jnp.ones((2, 2, 3))))
    monkeypatch.setattr(lowering, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="backend 'triton_gpu' is not available here") as error:
        ragged.matmul(x, jnp.ones((2, 2, 3)), backend="triton_gpu")
    assert "Not available: 'triton_gpu' (there is no Triton here: `pip install ragged[cuda]`)." in str(error.value)


def test_exports_take_the_kernel_only_if_asked() -> None:
    """B5: by default an export for a GPU holds XLA's product, which every reader of it accepts."""
    x, w, sizes = jnp.ones((8, 16)), jnp.ones((2, 16, 16)), jnp.array([3, 4], jnp.int32)

    def export(backend: str | None, **options: Any) -> str:
        forward = jax.jit(lambda x, w, sizes: ragged.grouped_matmul(x, w, sizes, backend=backend))
        return jax.export.export(forward, platforms=["cuda"], **options)(x, w, sizes).mlir_module()

    assert "triton_kernel_call" not in export(None)
    check = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")
    assert "triton_kernel_call" in export("triton_gpu", disabled_checks=[check])


@pytest.mark.parametrize("precision, way", [(None, "tf32"), ("high", "tf32x3"), (jax.lax.Precision.HIGHEST, "ieee")])
def test_precision(precision: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O10: a float32 dot is what XLA's would be."""
    seen = []
    call = triton_call.call
    monkeypatch.setattr(triton_call, "call", lambda *args, **kwargs: seen.append(args[2]) or call(*args, **kwargs))
    lowered("NVIDIA H200", dtype="float32", precision=precision)
    assert [static["PRECISION"] for static in seen] == [way]
