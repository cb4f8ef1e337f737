"""Blocks of scales along a ragged dim: each group's begin with its first element, wherever in the buffer that is."""

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
from ragged.core.offsets import aligned_to_blocks
from ragged.primitive import lowering
from ragged.tensor.base import with_fields
from tests import gpu, tpu
from tests.everywhere import INTERPRETED

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
