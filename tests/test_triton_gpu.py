"""The GPU kernel's body, run on the CPU by Triton's interpreter, against the float64 oracle.

The interpreter's memory is checked: results begin as NaN, and whatever lies outside of an array can't be loaded.
"""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from ragged.backends.gpu import call as triton_call
from ragged.product import lowering

from . import cases, gpu, oracle, ran
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
    assert f"on cuda: grouped_matmul of xla ({sentence})" in ragged.explain(x, jnp.ones((2, 2, 3)))
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
