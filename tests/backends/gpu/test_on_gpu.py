"""The Triton kernels on a real GPU, against NumPy in float64. In two minutes, with 12 processes:

    python -m pytest tests/backends/gpu/test_on_gpu.py -m gpu -n 12

Results are poisoned: see `gpu.poisoning`. If a kernel breaks the device, its process ends, and the test fails. Another
process runs the other tests.
"""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import ragged
from ragged import Scaling
from ragged.backends.base import Target
from ragged.backends.gpu import call as triton_call
from ragged.core.scales import Scales
from tests import cases, gpu, oracle, products
from tests.cases import NAMES, TOLERANCE
from tests.contract.draws import draws
from tests.contract.epilogues import ACTIVATIONS, Epilogue, epilogue_draws
from tests.contract.programs import Program, quantised
from tests.contract.recipes import PRESETS
from tests.everywhere import everywhere

pytestmark = pytest.mark.gpu
gpu.needs_triton()


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[tuple[str, int]]:
    """The GPU's kind and number of multiprocessors, as in `Target.device`."""
    found: Any = None
    try:
        (found, *_) = jax.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"needs a GPU, and `-m gpu`, which lets JAX have it: {str(error).splitlines()[0]}")
    jax.clear_caches()
    yield f"{found.device_kind} {found.compute_capability}", found.core_count
    jax.clear_caches()


@pytest.fixture(autouse=True)
def launches(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Poisons every kernel's result, and lists the kernels that were lowered."""
    poisoned, names = gpu.poisoning()
    monkeypatch.setattr(triton_call.load(), "triton_call", poisoned)
    return names


@pytest.fixture(autouse=True)
def broken(device: Any) -> Iterator[None]:
    """After an illegal access, the device fails whatever this process asks for."""
    yield
    if not gpu.is_well() and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(1)


def test_the_poison_is_seen() -> None:
    """A kernel that writes nothing returns poison."""
    import triton

    @triton.jit
    def nothing(out):
        pass

    def call(dtype: Any) -> Array:
        out = jax.ShapeDtypeStruct((3, 1000), dtype)
        options = triton_call.backend_options()
        return triton_call.load().triton_call(kernel=nothing, out_type=out, grid=1, backend_options=options)

    assert np.isnan(jax.jit(partial(call, jnp.float32))()).all()
    assert (np.asarray(jax.jit(partial(call, jnp.int32))()) == 77).all()


HIGHEST = {"precision": lax.Precision.HIGHEST}
WIDE: dict[str, Any] = {"preferred_element_type": jnp.float32}
RECIPES: dict[str, tuple[str, dict[str, Any], float, float]] = {  # dtype, options, largest and rms error
    "float32 highest": ("float32", HIGHEST, *TOLERANCE["float32"]),
    # tf32 keeps 11 bits of each operand, and tensor cores cut off the others: up to 2**-9 of a product is lost.
    "float32": ("float32", {}, 2**-8, 2**-10),
    "bfloat16": ("bfloat16", {}, *TOLERANCE["bfloat16"]),
    "float16": ("float16", {}, *TOLERANCE["float16"]),
    "int8": ("int8", {}, *TOLERANCE["int32"]),
    # Hopper's tensor cores add up 128 products in about 14 bits before they are added in float32.
    "float8_e4m3fn": ("float8_e4m3fn", WIDE, 2**-8, 2**-10),
    "float8_e5m2": ("float8_e5m2", WIDE, 2**-8, 2**-10),
}
ALIGNED: dict[str, Any] = {"g": 8, "capacity": 1024, "uniform": (144, 208, 272)}  # rows of whole 16 bytes: TMA
ODD: dict[str, Any] = {"capacity": 97, "uniform": (37, 150, 141)}
CASES: list[dict[str, Any]] = [
    {**ALIGNED, "kind": "zipf"},
    {**ALIGNED, "kind": "giant", "slack": False},
    {**ODD, "kind": "half_empty", "g": 3},
    {**ODD, "kind": "even", "g": 1, "slack": False},
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_and_dtype(layout: str, recipe: str, launches: list[str]) -> None:
    """Whole tiles and none; NaN tails."""
    dtype, options, worst, rms = RECIPES[recipe]
    product = jax.jit(partial(ragged.matmul, **options))
    for seed, kwargs in enumerate(CASES):
        case = cases.make(layout, dtype=dtype, seed=seed, **kwargs)
        out = product(case.lhs, case.rhs)
        got = case.unpack(np.asarray(out.data).astype(np.float64))
        oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=worst, rms=rms)
        case.assert_tail_zero(out)
    assert launches, "XLA's kernels ran, not Triton's"


TILES = [(16, 16, 16), (32, 64, 256), (64, 32, 64), (128, 64, 128), (128, 64, 256), (256, 128, 64)]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("layout", ["forward", "wgrad", "outer"])
def test_tiles(layout: str, tiles: tuple[int, int, int]) -> None:
    """Tiles smaller and larger than groups."""
    case = cases.make(layout, dtype="bfloat16", **ALIGNED)
    cases.check(
        case,
        jax.jit(partial(ragged.matmul, backend=everywhere("triton_gpu", *tiles, interpret=False)))(case.lhs, case.rhs),
    )


SOME: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"order": 2}]
PROGRAMS = [
    *(Program(layout, **options) for layout in NAMES for options in SOME),
    *(Program(layout, "bfloat16", m=37, k=150, n=136, capacity=200, width=140) for layout in NAMES),
    *(Program(layout, packed_last="lhs rhs", swapped=True) for layout in ("forward", "wgrad", "ragged")),
    *(
        Program(layout, existing=True, out_dtype=out)
        for layout in ("forward", "wgrad", "ragged")
        for out in ("", "bfloat16")
    ),
    *(Program(layout, held=3, existing=True) for layout in ("forward", "forward_left", "wgrad")),
    Program("forward", held=3, size_dtype="uint32"),
    *(Program(layout, "int8", k=4000, capacity=4000, groups=2) for layout in ("forward", "wgrad")),
    *(Program(layout, "int8", "", "float32", existing=True) for layout in ("forward", "wgrad")),
    Program("forward", "bfloat16", splits=4, m=37, k=1000, n=136, capacity=200),
    Program("batched", splits=3, k=200),
    Program("forward", splits=4, k=150, held=3, existing=True),
    *(
        Program(layout, *dtypes)
        for layout in ("forward", "wgrad", "outer")
        for dtypes in (
            ("bfloat16", "", "float32"),
            ("bfloat16", "int8", ""),
            ("float32", "float8_e4m3fn", ""),
            ("float16", "bfloat16", ""),
        )
    ),
    *(
        Program(layout, mapped=mapped)
        for layout, mapped in (
            ("forward", "lhs"),
            ("forward", "lhs sizes rhs"),
            ("wgrad", "lhs sizes"),
            ("wgrad", "rhs"),
            ("outer", "sizes"),
            ("batched", "lhs"),
        )
    ),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_products(program: Program) -> None:
    """The contract of `tests/contract`, with the tolerances of exact float32."""
    with jax.default_matmul_precision("highest"):
        replace(program, backend="triton_gpu", interpret=False).check(draws(program, 60))


def check_scales(got: Any, want: np.ndarray) -> None:
    # The tolerance of fp8 above; blocks that no step over `k` has to itself are multiplied in float32.
    oracle.assert_close([np.asarray(got)], [want], max=2**-8, rms=2**-10)


SERVED: dict[str, Any] = {"backend": "triton_gpu", "out_dtype": "float32", "k": 192, "n": 136, "capacity": 200}
WEIGHTS = [  # of few bits, as models are served with
    *(
        Program("forward", dtype, rhs_cast=cast, packed_last=order, **SERVED)
        for order in ("", "rhs")
        for dtype, cast in (
            ("bfloat16", ("int4", (64, 1))),
            ("float16", ("int4", "column")),
            ("bfloat16", ("float4_e2m1fn", Scaling((32, 1), "float8_e8m0fnu"))),
            ("bfloat16", ("float4_e2m1fn", Scaling((16, 1), "float8_e4m3fn"))),
            ("bfloat16", ("uint4", (64, 1), "zeros")),
            ("float16", ("uint8", "column", "zeros")),
        )
    ),
    Program("forward", "bfloat16", rhs_cast=("int4", (64, 1)), splits=3, **SERVED),
]


@pytest.mark.parametrize(
    "program",
    [*(program for _, program in quantised("triton_gpu", 1, [*NAMES] * 4, step=11)), *WEIGHTS],
    ids=str,
)
def test_scaled(program: Program) -> None:
    """By group, row, column and contracted block, on either side or both."""
    # Hopper's tensor cores add up 128 products of fp8 in about 14 bits.
    with jax.default_matmul_precision("highest"):
        replace(program, interpret=False, chip="").check(draws(program, 20), bits=13)


@pytest.mark.parametrize("recipe", [name for name in PRESETS if name != "nvfp4"])  # which is XLA's, but on Blackwell
@pytest.mark.parametrize("layout", ["forward", "wgrad", "outer"])
def test_recipes(layout: str, recipe: str, launches: list[str]) -> None:
    """Value and gradients of a quantised product, against XLA's on the operands dequantised in float32."""
    case = cases.make(layout, **ALIGNED)

    def value(lhs: Array, rhs: Array, backend: str | None) -> Array:
        pair = case.lhs.with_data(lhs), case.rhs.with_data(rhs)
        return ragged.matmul(*pair, recipe=recipe, backend=backend, **WIDE).data

    @partial(jax.jit, static_argnames="backend")
    def products(lhs: Array, rhs: Array, ct: Array, backend: str | None) -> Any:
        out, pull = jax.vjp(partial(value, backend=backend), lhs, rhs)
        return out, *pull(ct)

    given = case.lhs.data, case.rhs.data
    shape = jax.eval_shape(partial(value, backend="xla"), *given).shape
    # Not a function of the result: what differs by an error of a sum may be rounded to different numbers in fp8.
    ct = jnp.cos(jnp.arange(math.prod(shape), dtype=jnp.float32)).reshape(shape)
    got = products(*given, ct, None)
    assert len(launches) == 3, "XLA's kernels ran, not Triton's"
    for x, want in zip(got, products(*given, ct, "xla"), strict=True):
        check_scales(x, np.asarray(want, np.float64))


@pytest.mark.parametrize(
    # The largest error of 2048 products that tensor cores add up was 0.022 on an H200, where torch's has the same bits.
    "precision, worst, rms",
    [(None, 2**-7, 2**-9), ("ANY_F8_ANY_F8_F32_FAST_ACCUM", 2**-5, 2**-7)],
    ids=["default", "fast"],
)
def test_scales_by_row_at_size(device: Any, precision: Any, worst: float, rms: float) -> None:
    """Fp8 with a scale for each row, of activations and of stored weights, in the tiles that are meant for it."""
    g, m, k, n = 4, 4096, 2048, 1536
    x, w = noise(0, (m, k), "float8_e4m3fn"), noise(1, (g, n, k), "float8_e4m3fn")
    x_scales, w_scales = (jnp.abs(noise(seed, s, "float32")) + 0.5 for seed, s in ((2, (m, 1)), (3, (g, n, 1))))
    sizes = cases.spread(np.random.default_rng(0), "zipf", g, m - 100)
    product = partial(
        products.grouped_matmul,
        "triton_gpu",
        precision=precision,
        preferred_element_type=jnp.bfloat16,
        transpose_rhs=True,
        lhs_scales=Scales(x_scales, (1, None)),
        rhs_scales=Scales(w_scales, (1, None)),
        target=Target(device=device),
    )
    out = np.asarray(jax.jit(product)(x, w, jnp.asarray(sizes)))
    left, right = (
        np.asarray(data).astype(np.float64) * np.asarray(scales, np.float64)
        for data, scales in ((x, x_scales), (w, w_scales))
    )
    *groups, tail = np.split(np.arange(m), np.cumsum(sizes))
    want = [left[rows] @ b.T for rows, b in zip(groups, right, strict=True)]
    oracle.assert_close([out[rows] for rows in groups], want, max=worst, rms=rms)
    assert not out[tail].any()


EPILOGUES = [
    Epilogue(layout, dtype, n=n, k=k, capacity=450, activation=activation, bias="each one", gate=gate, save=save)
    for activation, (gate, save) in itertools.product(ACTIVATIONS, ((True, "pre"), (True, "out"), (False, "pre")))
    for layout, dtype, k, n in (
        ("forward", "bfloat16", 144, 272),
        ("forward", "bfloat16", 150, 141),
        ("batched", "float32", 40, 48),
    )
    if gate or activation != "clamped"
]
ROWS: list[dict[str, Any]] = [{"columns": "halves"}, {"columns": "interleaved"}, {"top_k": 2}]
EPILOGUES += [
    Epilogue("forward", dtype, k=144, n=n, capacity=450, activation="silu", gate=True, bias="one each", **options)
    for dtype, n in (("bfloat16", 272), ("float32", 10))
    for options in ROWS
]
EPILOGUES += [
    Epilogue("forward", "bfloat16", top_k=2, k=144, n=272, capacity=450),
    Epilogue("forward", top_k=2, mapped="lhs sizes"),
    Epilogue("forward", "bfloat16", top_k=3, held=3, activation="tanh", bias="each", save="out"),
]


@pytest.mark.parametrize("program", EPILOGUES, ids=str)
def test_biases_activations_and_gates(program: Epilogue, launches: list[str]) -> None:
    """By TMA and by pointers, whatever a kernel stores. Exponentials are the hardware's approximations. Also gathered
    rows."""
    with jax.default_matmul_precision("highest"):
        replace(program, backend="triton_gpu", interpret=False).check(epilogue_draws(program, 20))


def test_the_portable_program(device: Any) -> None:
    """Where nothing says which GPU is lowered for, the program is for compute capability 8.0, and runs here too."""
    case = cases.make("forward", dtype="bfloat16", **ALIGNED)

    def product(target: Target) -> Array:
        x, w, sizes = case.lhs.data, case.rhs.data, jnp.asarray(case.sizes["m"])
        call = partial(products.grouped_matmul, "triton_gpu", preferred_element_type=jnp.bfloat16, target=target)
        return jax.jit(call)(x, w, sizes)

    for target in (Target(), Target(device=device)):
        cases.check(case, case.lhs.with_data(product(target)))


def forward(x: Array, w: Array, dy: Array, sizes: Array) -> Array:
    return ragged.grouped_matmul(x, w, sizes)


def dgrad(x: Array, w: Array, dy: Array, sizes: Array) -> Array:
    return ragged.grouped_matmul(dy, w, sizes, transpose_rhs=True)


def wgrad(x: Array, w: Array, dy: Array, sizes: Array) -> Array:
    return ragged.transposed_grouped_matmul(x.T, dy, sizes)


PRODUCTS = [forward, dgrad, wgrad]


@partial(jax.jit, static_argnums=(1, 2))
def noise(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Multiples of 1/64 from -2 to 2, a hash of their places: of any size, without temporaries."""
    bits = jnp.full(shape, seed, jnp.uint32)
    for axis in range(len(shape)):
        bits = (bits ^ lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(0x9E3779B1)
        bits = (bits ^ bits >> 15) * jnp.uint32(0x85EBCA77)
    return (((bits >> 24).astype(jnp.float32) - 128) / 64).astype(dtype)


def operands(m: int, k: int, n: int, g: int, dtype: str) -> tuple[tuple[Array, Array, Array, Array], np.ndarray]:
    """x [m, k], w [g, k, n] and dy [m, n], with NaN in the tail, and Zipf sizes."""
    sizes = cases.spread(np.random.default_rng(0), "zipf", g, m - 100)
    x, w, dy = noise(0, (m, k), dtype), noise(1, (g, k, n), dtype), noise(2, (m, n), dtype)
    x, dy = (jnp.where(jnp.arange(m)[:, None] < m - 100, z, jnp.full((), jnp.nan, z.dtype)) for z in (x, dy))
    return (x, w, dy, jnp.asarray(sizes)), sizes


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_the_same_bits_twenty_times(dtype: str, product: Any, launches: list[str]) -> None:
    """Whatever order the programs run in."""
    args, _ = operands(8192, 1024, 2048, 16, dtype)
    run = jax.jit(product)
    first = run(*args)
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[first.dtype.itemsize]
    same = jax.jit(lambda a, b: jnp.all(lax.bitcast_convert_type(a, bits) == lax.bitcast_convert_type(b, bits)))
    assert all(same(run(*args), first) for _ in range(19))
    text = run.lower(*args).compile().as_text() or ""
    assert triton_call.load().CUSTOM_CALL_TARGET_NAME in text and launches


HUGE = [  # m, k, n, g
    (8192, 4096, 14336, 8),
    (140_000, 16384, 256, 4),  # the rows, then the result, then the weights have more than 2**31 elements
    (140_000, 256, 16384, 4),
    (2048, 16384, 16384, 9),
]


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_called_again_and_again(graphs: str, launches: list[str]) -> None:
    """Several products in a program, and in a scan, which XLA makes a CUDA graph of from the second call on."""
    data, matrices = jax.random.split(jax.random.key(0))
    sizes, w = jnp.full(8, 56, jnp.int32), jax.random.normal(matrices, (6, 8, 256, 256), jnp.bfloat16) / 16

    def chain(x: Array, backend: str, scanned: bool) -> Array:
        def layer(x: Array, w: Array) -> tuple[Array, None]:
            return jnp.tanh(ragged.grouped_matmul(x, w, sizes, backend=backend)), None

        if scanned:
            return lax.scan(layer, x, w)[0]
        for each in w:
            x, _ = layer(x, each)
        return x

    options = {} if graphs == "on" else {"xla_gpu_enable_command_buffer": ""}
    for scanned in (False, True):
        own = jax.jit(partial(chain, backend="triton_gpu", scanned=scanned), compiler_options=options)
        xla = jax.jit(partial(chain, backend="xla", scanned=scanned))
        for call in range(4):
            x = jax.random.normal(jax.random.fold_in(data, call), (512, 256), jnp.bfloat16)
            got, want = (np.asarray(f(x).astype(jnp.float32)) for f in (own, xla))
            assert np.abs(got - want).max() < 0.1
    assert launches


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", HUGE, ids=str)
def test_huge(shape: tuple[int, int, int, int], product: Any) -> None:
    """First and last rows of each group, and some others, with some of the columns; all of it finite."""
    m, k, n, g = shape
    need = 2 * 3 * 2 * (m * k + g * k * n + m * n)  # bfloat16; as much again twice, for poison and other temporaries
    stats = jax.devices("cuda")[0].memory_stats() or {}
    if stats.get("bytes_limit", need) < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of GPU memory")
    args, sizes = operands(*shape, "bfloat16")
    x, w, dy, _ = args
    out = jax.jit(product)(*args)
    assert jnp.isfinite(out).all()
    rng, ends = np.random.default_rng(1), np.cumsum(sizes)
    starts = ends - sizes

    def host(z: Array) -> np.ndarray:
        return np.asarray(z).astype(np.float64)

    def some(extent: int) -> np.ndarray:
        return np.unique([0, extent - 1, *rng.integers(0, extent, 14)])

    if product is wgrad:
        a, b = some(k), some(n)
        left, right = host(x[:, a]), host(dy[:, b])
        want = [left[s:e].T @ right[s:e] for s, e in zip(starts, ends, strict=True)]
        got = list(host(out[:, a][:, :, b]))
    else:
        assert not jnp.any(out[ends[-1] :] != 0)
        some_rows = np.unique([*starts[sizes > 0], *ends[sizes > 0] - 1, *rng.integers(0, ends[-1], 16)])
        group, columns = np.searchsorted(ends, some_rows, side="right"), some(out.shape[1])
        rows = host((dy if product is dgrad else x)[some_rows])
        matrices = host(w[:, columns].mT if product is dgrad else w[:, :, columns])
        want = [row @ matrices[i] for row, i in zip(rows, group, strict=True)]
        got = list(host(out[some_rows][:, columns]))
    oracle.assert_close(got, want, *TOLERANCE["bfloat16"])
