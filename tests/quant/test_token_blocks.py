"""Blocks of scales along a ragged dim: each group's begin with its first element, wherever in the buffer that is."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor, Scaling, matmul, quantize
from ragged.backends.gpu import call as triton_call
from ragged.core.offsets import aligned_to_blocks
from ragged.primitive import lowering
from ragged.tensor.base import with_fields
from tests import gpu, ran, tpu
from tests.everywhere import INTERPRETED, everywhere

Aval = jax.ShapeDtypeStruct
E4M3, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"
SIZES = (37, 0, 5, 64, 33, 1, 70)  # no group but the first two begins at a multiple of 32
ROWS, K, N = 250, 48, 80


def made(rows: int = ROWS, columns: int = K, seed: int = 0) -> np.ndarray:
    """Rows of very different magnitudes, NaN in the tail."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * np.exp(2 * rng.standard_normal((rows, 1)))
    x[sum(SIZES) :] = np.nan
    return x.astype(np.float32)


def tensor(x: np.ndarray) -> GroupedTensor:
    return GroupedTensor(jnp.asarray(x), jnp.array(SIZES, jnp.int32))


def groups(x: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(SIZES)
    return [x[end - size : end].astype(np.float64) for size, end in zip(SIZES, ends, strict=True)]


def rounded(x: np.ndarray, block: int, power_of_two: bool = True) -> list[np.ndarray]:
    """Each group in e4m3, `block` rows of a column with one scale: what the format's definition says."""
    found = groups(x)
    for group in found:
        for at in range(0, len(group), block):
            part = group[at : at + block]
            scale = np.abs(part).max(0) / 448
            scale = np.where(scale > 0, 2 ** np.ceil(np.log2(scale)) if power_of_two else scale, 1).astype(np.float32)
            group[at : at + block] = (part / scale).astype(np.float32).astype(jnp.dtype(E4M3)).astype(
                np.float64
            ) * scale
    return found


def test_values() -> None:
    """The scales of one group's blocks, then the next one's: as many as there can be. Either way round."""
    x = made()
    q = quantize(tensor(x), E4M3, Scaling((32, 1), E8M0))
    assert q.scales.shape == ((ROWS + 31 * len(SIZES)) // 32, K) and q.scales.dtype == E8M0
    turned = quantize(tensor(x).mT, E4M3, "mx")
    np.testing.assert_array_equal(turned.scales.astype(jnp.float32), q.scales.mT.astype(jnp.float32))
    for got in (q.dequantize().data, turned.dequantize().data.mT):
        for each, want in zip(groups(np.asarray(got)), rounded(x, 32), strict=True):
            np.testing.assert_array_equal(each, want)
        assert not np.asarray(got)[sum(SIZES) :].any()


@pytest.mark.parametrize("block", [pytest.param(1, marks=pytest.mark.long), 4, pytest.param(8, marks=pytest.mark.long)])
def test_where_rows_go(block: int) -> None:
    """There and back again; what is cut off, and the tail, goes nowhere."""
    rows = 16
    run = jax.jit(lambda sizes: aligned_to_blocks(sizes, rows, block))
    for sizes in ((0, 0), (3, 5), (8, 8), (1, 20), (-2, 4), (9, 9)):
        source, places, apart = map(np.asarray, run(np.array(sizes, np.int32)))
        ends = np.minimum(np.cumsum(np.clip(sizes, 0, None)), rows)
        begins, first = np.concatenate([[0], ends[:-1]]), 0
        want = np.full(len(source), rows)
        for begin, end, size in zip(begins, ends, apart, strict=True):
            assert size == -(-(end - begin) // block) * block
            want[first : first + end - begin] = np.arange(begin, end)
            first += size
        np.testing.assert_array_equal(source, want)
        back = np.full(rows, len(source))
        back[source[source < rows]] = np.flatnonzero(source < rows)
        np.testing.assert_array_equal(places[:, 0], back)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """How the Triton kernel applies the scales of both operands."""
    found, call = [], triton_call.call

    def noting(arrays: Any, outs: Any, static: Any, **options: Any) -> Any:
        found.append((static["A_SCALES"].applied_to, static["B_SCALES"].applied_to))
        return call(arrays, outs, static, **options)

    monkeypatch.setattr(triton_call, "call", noting)
    yield found


WAYS = {  # by both operands' blocks of rows: a wgrad's on Blackwell, and elsewhere
    (32, 32): (("unit", "unit"), ("step", "step")),
    (128, 128): (("step", "step"),) * 2,
    (32, 128): (("step", "step"),) * 2,
    (32, None): (("step", "total"),) * 2,
    (32, 1): (("step", "tile"),) * 2,
    (64, 0): (("step", ""),) * 2,
}


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("blocks", WAYS, ids=str)
@pytest.mark.parametrize(
    "chip, power_of_two",
    [("NVIDIA B200", True), ("NVIDIA B200", False), ("NVIDIA H200", True), ("NVIDIA H200", False), ("NVIDIA L4", True)],
)
def test_wgrad_on_gpus(blocks: Any, chip: str, power_of_two: bool, used: list[tuple[str, str]]) -> None:
    """In steps, with each step's scales; by Blackwell's tensor cores."""
    gpu.needs_triton()
    check_wgrad(blocks, power_of_two, chip, backend=everywhere("triton_gpu", 32, 32, 64))
    is_new = chip == "NVIDIA B200" and power_of_two
    assert used == [WAYS[blocks][0 if is_new else 1]]


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize(
    "blocks, power_of_two",
    [*((each, True) for each in WAYS), ((32, 32), False), ((128, 128), False), ((256, 256), False)],
)
@pytest.mark.parametrize("tile", [32, 96, 256])
def test_wgrad_on_tpus(blocks: Any, tile: int, power_of_two: bool) -> None:
    """Multiplied into tiles, or in steps; tiles of fewer rows than a block, or of no multiple."""
    with ran.watch() as launches, ran.only("pallas_tpu", launches):
        check_wgrad(blocks, power_of_two, None, backend=everywhere("pallas_tpu", 128, tile, 128))


@pytest.mark.long
@pytest.mark.parametrize("blocks", [pytest.param(each, marks=pytest.mark.long) for each in WAYS] + [(32, 8)], ids=str)
def test_wgrad_in_xla(blocks: Any) -> None:
    check_wgrad(blocks, True, None)


def check_wgrad(blocks: Any, power_of_two: bool, chip: str | None, **options: Any) -> None:
    operands, values = [], []
    for block, x in zip(blocks, (made(), made(ROWS, N, 1)), strict=True):
        if block == 0:  # not quantised
            operands.append(tensor(x))
            values.append(groups(x))
            continue
        q = quantize(tensor(x), E4M3, Scaling((block, 1), E8M0 if power_of_two else jnp.float32))
        operands.append(q)
        values.append(groups(np.asarray(q.dequantize().data)))
    lhs, rhs = operands
    with gpu.on(chip) if chip else jax.default_matmul_precision("highest"):
        out = matmul(lhs.mT, rhs, preferred_element_type=jnp.float32, **options).data
        jax.block_until_ready(out)
    for got, x, y in zip(np.asarray(out), *values, strict=True):
        np.testing.assert_allclose(got, x.T @ y, rtol=0, atol=2e-6 * float((np.abs(x).T @ np.abs(y)).max(initial=1)))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["xla", "pallas_tpu", "triton_gpu"])
def test_nan_stays_in_its_group(backend: str) -> None:
    """In a block of the one before and in its scales; a neighbour's block begins in the same tile."""
    x, y = made(), made(ROWS, N, 1)
    x[36], y[41] = np.nan, np.inf  # the first group's last row, the third's last
    lhs, rhs = (quantize(tensor(each), E4M3, (32, 1)) for each in (x, y))
    assert lhs.scales is not None
    lhs = with_fields(lhs, scales=lhs.scales.at[1].set(jnp.nan))
    options: dict[str, Any] = {"backend": INTERPRETED[backend]}
    out = np.asarray(matmul(lhs.mT, rhs, preferred_element_type=jnp.float32, **options).data)
    assert [bool(np.isnan(each).any()) for each in out] == [True, False, True, False, False, False, False]


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("backend", ["xla", "pallas_tpu", "triton_gpu"])
@pytest.mark.parametrize("layout", ["forward", "inner"])
def test_other_products(layout: str, backend: str) -> None:
    """Rows that are kept, and tokens that aren't the only ragged dim: scales by row."""
    rng, x = np.random.default_rng(2), made()
    q = quantize(tensor(x), E4M3, Scaling((32, 1), E8M0))
    values = groups(np.asarray(q.dequantize().data))
    if layout == "forward":
        w = rng.standard_normal((len(SIZES), K, N)).astype(np.float32)
        lhs, rhs, want = q, jnp.asarray(w), [a @ b for a, b in zip(values, w.astype(np.float64), strict=True)]
    else:
        firsts = (3, 2, 0, 7, 1, 4, 2)
        y = rng.standard_normal((24, 96)).astype(np.float32)
        lhs = GroupedTensor(jnp.asarray(y), jnp.array(firsts, jnp.int32), jnp.array(SIZES, jnp.int32))
        ends, rhs = np.cumsum(firsts), q
        wide = [y[e - n : e, :s].astype(np.float64) for e, n, s in zip(ends, firsts, SIZES, strict=True)]
        want = [a @ b for a, b in zip(wide, values, strict=True)]
    options: dict[str, Any] = {"backend": INTERPRETED[backend]}
    on = gpu.on("NVIDIA H200") if backend == "triton_gpu" else jax.default_matmul_precision("highest")
    with ran.watch() as launches, on:
        out = np.asarray(matmul(lhs, rhs, preferred_element_type=jnp.float32, **options).data)
        assert backend == "xla" or {name for name, _ in launches} == {backend}
    want = np.concatenate(want)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=2e-6 * np.abs(want).max() * 8)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["pallas_tpu", "triton_gpu"])
def test_tiles_are_counted_as_they_run(backend: str) -> None:
    """`explain`'s, of groups that a kernel has moved apart."""
    lhs, rhs = (quantize(tensor(made(seed=i)), E4M3, (32, 1)) for i in (0, 1))
    with gpu.on("NVIDIA H200") if backend == "triton_gpu" else jax.default_matmul_precision("highest"):
        plans = ragged.explain(lhs.mT, rhs, backend=INTERPRETED[backend]).plans
    (plan,) = [plan for plan in plans if plan.product == "forward" and plan.platform == "cpu"]
    assert plan.backend == backend and plan.is_exact and plan.visits
    whole = -(-np.array(SIZES) // 32) * 32
    if backend == "triton_gpu":  # a group's steps begin with it
        want = [
            (group, int(first + at), 32)
            for group, (first, size) in enumerate(zip(np.cumsum(SIZES) - SIZES, whole, strict=True))
            for at in range(0, size, 32)
        ]
        assert list(plan.tiles) == want


@pytest.mark.long
@pytest.mark.parametrize("backend", ["xla", "pallas_tpu", "triton_gpu"])
def test_vmap(backend: str) -> None:
    """Over sizes, over data, over both."""
    x, y = made(), made(ROWS, N, 1)
    options: dict[str, Any] = {"backend": INTERPRETED[backend]}
    sizes = jnp.array([SIZES, SIZES[::-1]], jnp.int32)
    x, y = np.nan_to_num(np.stack([x, x[::-1]])), np.nan_to_num(y)

    def run(x: Array, y: Array, sizes: Array) -> Array:
        lhs, rhs = (quantize(GroupedTensor(each, sizes), E4M3, Scaling((32, 1), E8M0)) for each in (x, y))
        return matmul(lhs.mT, rhs, preferred_element_type=jnp.float32, **options).data

    for axes in ((0, None, None), (None, None, 0), (0, None, 0)):
        given = [each[0] if axis is None and each.ndim == rank else each for each, axis, rank in
                 zip((x, y, sizes), axes, (3, 3, 2), strict=True)]  # fmt: skip
        got = jax.vmap(run, axes)(*map(jnp.asarray, given))
        for i in range(2):
            one = [each[i] if axis == 0 else each for each, axis in zip(given, axes, strict=True)]
            np.testing.assert_allclose(got[i], run(*map(jnp.asarray, one)), rtol=1e-5, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_rows_over_devices(kind: AxisType) -> None:
    """What a device has of a block is scaled as the whole."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    lhs, rhs = (quantize(tensor(np.nan_to_num(made(seed=i))), E4M3, (32, 1)) for i in (0, 1))
    want = matmul(lhs.mT, rhs, preferred_element_type=jnp.float32).data

    def run(x: Array, y: Array) -> Array:
        a, b = with_fields(lhs, data=x), with_fields(rhs, data=y)
        return matmul(a.mT, b, preferred_element_type=jnp.float32).data

    data = [jax.device_put(each.data, NamedSharding(mesh, P("a"))) for each in (lhs, rhs)]
    with jax.set_mesh(mesh):
        got = jax.jit(run)(*data)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("backend", ["xla", "pallas_tpu", "triton_gpu"])
@pytest.mark.parametrize("recipe, block", [("mxfp8", 32), ("blockwise", 128)])
def test_recipes(recipe: str, block: int, backend: str) -> None:
    """A recipe's wgrad has its blocks of tokens, bit for bit those of the definition."""
    x, dy, rng = made(), made(ROWS, N, 1), np.random.default_rng(3)
    w = jnp.asarray(rng.standard_normal((len(SIZES), K, N)), jnp.float32)
    options: dict[str, Any] = {"backend": INTERPRETED[backend]}

    def product(w: Array) -> Array:
        return matmul(tensor(x), w, recipe=recipe, **options).data

    with gpu.on("NVIDIA H200") if backend == "triton_gpu" else jax.default_matmul_precision("highest"):
        dw = np.asarray(jax.vjp(jax.jit(product), w)[1](jnp.asarray(dy))[0])
    pairs = zip(rounded(x, block, recipe == "mxfp8"), rounded(dy, block, recipe == "mxfp8"), strict=True)
    for got, (a, b) in zip(dw, pairs, strict=True):
        np.testing.assert_allclose(got, a.T @ b, rtol=0, atol=1e-3 * np.abs(a.T @ b).max(initial=1))


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
@pytest.mark.parametrize("generation", ["v5e", "v6e", "tpu7x"])
def test_compiled_for_tpus(generation: str, recipe: str) -> None:
    avals = Aval((500, 640), jnp.bfloat16), Aval((500, 384), jnp.bfloat16), Aval((5, 384, 640), jnp.bfloat16)

    def dw(dy: Array, x: Array, w: Array, sizes: Array) -> Array:
        return jax.vjp(lambda w: matmul(GroupedTensor(x, sizes), w, recipe=recipe).data, w)[1](dy)[0]

    compiled = tpu.compile_for(generation, dw, *avals, Aval((5,), jnp.int32))
    assert len(compiled.kernels) == 1 and compiled.kernels[0].startswith("transposed_grouped_matmul")


def test_a_kernel_reads_groups_apart() -> None:
    """Its sizes are multiples of the blocks."""
    lhs, rhs = (quantize(tensor(made(seed=i)), E4M3, (32, 1)) for i in (0, 1))
    jaxpr = jax.make_jaxpr(lambda: matmul(lhs.mT, rhs))()
    (equation,) = [each for each in jaxpr.eqns if each.primitive.name == "ragged_matmul"]
    x = equation.params["tree"].unflatten([each.aval for each in equation.invars])
    avals = jax.tree.map(lambda each: Aval(each.shape, each.dtype), x)
    taken = jax.eval_shape(lambda x: lowering.taken_by("pallas_tpu", equation.params["call"], x), avals)
    assert taken.lhs.data.shape == ((ROWS + 31 * len(SIZES)) // 32 * 32, K)
    assert taken.lhs.scales.values.shape == ((ROWS + 31 * len(SIZES)) // 32, K)
