"""Sums of many elements are computed in float32 (or float64) and rounded once; so are gradients of broadcasts."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor, per_column, per_group, per_row
from tests.tensor.examples import ints

# What is differentiated, by what, its cotangent's shape, and its gradient from the cotangent, in float64.
Way = tuple[Callable[[Array], Array], Array | float, tuple[int, ...], Callable[[np.ndarray], Any]]


def ways(sizes: list[int], rows: int, dtype: Any) -> dict[str, Way]:
    """Every place where one value reaches many elements, so that its gradient is a sum over them."""
    ends = np.cumsum([0, *sizes])
    along, last = [slice(a, b) for a, b in itertools.pairwise(ends.tolist())], ends[-1]
    dims, g, half = ints(*sizes), len(sizes), rows // 2
    packed = GroupedTensor(jnp.zeros((rows, 2), dtype), dims)
    uniform = GroupedTensor(jnp.zeros((2, half, 2), dtype))
    few = GroupedTensor(jnp.zeros((3, rows), dtype), ints(2))
    route = ragged.route(jnp.arange(8 * 16, dtype=jnp.int32).reshape(16, 8) % 3, 3)
    place = np.asarray(route.place)

    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, dtype)

    def of_groups(c: np.ndarray) -> list[Any]:
        return [c[a].sum(0) for a in along]

    def of_sinks(c: np.ndarray) -> np.ndarray:
        """Of the weights of `last` softmaxes of three logits, all zero: `-p sum(p c)`, with `p = 1 / 3`."""
        return -c[:last].sum((0, 1)) / 9

    return {
        "a group": (lambda v: (packed + per_group(v)).data, zeros(g), (rows, 2), lambda c: np.sum(of_groups(c), 1)),
        "a group's row": (lambda v: (packed + per_group(v)).data, zeros(g, 2), (rows, 2), of_groups),
        "a uniform group": (
            lambda v: (uniform + per_group(v)).data,
            zeros(2),
            (2, half, 2),
            lambda c: c.sum((1, 2)),
        ),
        "a uniform group's row": (
            lambda v: (uniform + per_group(v)).data,
            zeros(2, 2),
            (2, half, 2),
            lambda c: c.sum(1),
        ),
        "a row": (lambda v: (few + per_row(v)).data, zeros(3), (3, rows), lambda c: c.sum(1) * [1, 1, 0]),
        "a column": (lambda v: (packed + per_column(v)).data, zeros(2), (rows, 2), lambda c: c[:last].sum(0)),
        "a number": (lambda v: (packed + v).data, zeros(), (rows, 2), lambda c: c[:last].sum()),
        "a float": (lambda v: (packed + v).data, 0.0, (rows, 2), lambda c: c[:last].sum()),
        "a fill": (lambda v: few.to_padded(4, v), zeros(), (1, 4, rows), lambda c: c[0, 2:].sum()),
        "a head's sink": (lambda v: packed.softmax(sink=v).data, zeros(1), (rows, 2), of_sinks),
        "a token of eight rows": (
            lambda v: route.dispatch(v).data,
            zeros(16, 2),
            (128, 2),
            lambda c: c[place].sum(1),
        ),
    }


def check_sums(sizes: list[int], rows: int, dtype: Any, bias: float) -> None:
    table, rng = ways(sizes, rows, dtype), np.random.default_rng(0)
    # Of one sign, nearly: a serial sum in 16 bits stops growing.
    cotangents = {
        name: jnp.asarray(rng.standard_normal(shape) + bias, dtype) for name, (_, _, shape, _) in table.items()
    }
    backward = jax.jit(lambda cs: {name: jax.vjp(f, v)[1](cs[name])[0] for name, (f, v, _, _) in table.items()})
    exact = 1e-14 if dtype == jnp.float64 else 1e-6
    for name, got in backward(cotangents).items():
        c = np.asarray(cotangents[name], np.float64)
        want, scale = (np.asarray(table[name][3](each)) for each in (c, np.abs(c)))
        error = np.abs(np.asarray(got, np.float64) - want)
        bound = float(jnp.finfo(got.dtype).eps) / 2 * np.abs(want) + exact * np.abs(scale)
        assert np.all(error <= bound), name


@pytest.mark.long
def test_groups_of_more_elements_than_int32_can_count() -> None:
    """XLA doesn't store them: all are equal."""

    def results(s: Array) -> list[Array]:
        rows = GroupedTensor(jnp.broadcast_to(s, (2**11 + 1, 2**20)), ints(2**11, 1))
        uniform = GroupedTensor(jnp.broadcast_to(s, (1, 2**16, 2**15)))
        return [rows.mean(), uniform.mean(), uniform.var(empty=-1) + 1, uniform.max(empty=7)]

    tangent = jax.jit(lambda s: jax.jvp(lambda s: results(s)[-1], (s,), (s,))[1])
    for each in (*jax.jit(results)(jnp.float32(1)), tangent(jnp.float32(1))):
        np.testing.assert_array_equal(each, np.ones_like(each))


@pytest.mark.long
def test_integers_and_8_bits() -> None:
    """Softmax and means of integers are computed in floats, with as many bits; sums of 8-bit floats in float32."""
    ways = [(axis, sink) for axis in (-1, -2) for sink in (None, 0.5)]

    @jax.jit
    def run(tensors: list[GroupedTensor]) -> list[list[Array]]:
        return [[x.softmax(axis, sink=sink).data.reshape(2, 2) for axis, sink in ways] for x in tensors]

    for dtype, offset in (("int8", 0), ("uint8", 128), ("bool", 0)):
        data = jnp.asarray(np.array([[-128, 127], [100, 0]]) + offset, dtype)
        exact = np.asarray(data, np.float64)
        rows, both = (GroupedTensor(data, ints(2), last) for last in (None, ints(2)))
        for results in run([rows, both, GroupedTensor(data.T, None, ints(2)).mT, GroupedTensor(data[None])]):
            for (axis, sink), got in zip(ways, results, strict=True):
                largest = exact.max(axis, keepdims=True)
                weights, rest = np.exp(exact - largest), 0 if sink is None else np.exp(sink - largest)
                want = weights / (weights.sum(axis, keepdims=True) + rest)
                assert got.dtype == jnp.float32
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-30)
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        ones = jnp.ones((1, 300, 1), dtype)
        want = np.float32(300).astype(dtype).astype(np.float32)
        for tensor in (GroupedTensor(ones), GroupedTensor(ones[0], ints(300))):
            assert tensor.sum().dtype == dtype and tensor.sum().astype(np.float32) == want
    with jax.enable_x64(True):
        large = jnp.array([[2**40], [2**40 + 2]], jnp.int64)
        for tensor in (GroupedTensor(large, ints(2)), GroupedTensor(large[None])):
            got = [tensor.mean()[0] - 2**40, tensor.var()[0], tensor.logsumexp()[0] - 2**40 - 2]
            np.testing.assert_allclose(np.array(got, np.float64), [1, 1, np.log1p(np.exp(-2))], atol=1e-3)


@pytest.mark.long
def test_gradients_are_summed_in_float32() -> None:
    check_sums([1, 0, 127, 128, 129, 1000, 2000], 4096, jnp.bfloat16, 1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes, dtype",
    [
        ([100_000], jnp.bfloat16),
        ([1, 2, 0, 40_000, 59_997], jnp.float32),
        ([10] * 10_000, jnp.float16),
        ([99_000], jnp.float64),
    ],
    ids=["bfloat16", "float32", "float16", "float64"],
)
def test_gradients_of_many_rows(sizes: list[int], dtype: Any) -> None:
    """From groups of ten rows to one group of all, with a tail and without."""
    with jax.enable_x64(dtype == jnp.float64):
        check_sums(sizes, 100_000, dtype, 0.25)


@pytest.mark.long
@pytest.mark.parametrize("dtype, rows", [(jnp.bfloat16, 2**17), (jnp.float32, 2**17), ("e", 2**20)])
def test_sums_do_not_drift(dtype: Any, rows: int) -> None:
    """A serial float32 sum of as many tenths is off by 1e-4."""
    data = np.full((rows, 1), 0.1).astype(jnp.dtype(dtype))
    rounded, one = float(jnp.finfo(data.dtype).eps), float(data[0, 0])

    @jax.jit
    def run(data: Array) -> list[list[Array]]:
        x = GroupedTensor(data, ints(rows - 1, 1))
        return [[t.mean(), t.max(), t.logsumexp(), t.sum(t.packed_axis).reshape(-1)] for t in (x, x.mT)]

    for results in run(data):
        mean, largest, log, total = (np.asarray(each, np.float64) for each in results)
        np.testing.assert_allclose(mean, [one, one], rtol=rounded + 3e-6)
        assert largest.tolist() == [one, one]
        np.testing.assert_allclose(log, one + np.log([rows - 1, 1]), rtol=rounded + 3e-6)
        if dtype != "e":  # whose largest is 65504
            np.testing.assert_allclose(total, [(rows - 1) * one, one], rtol=rounded + 3e-6)


def test_variance_of_large_means() -> None:
    """Two passes: `mean(x²) - mean(x)²` would have no digit right."""
    values = (4096 + np.random.default_rng(0).standard_normal((4000, 2))).astype(np.float32)
    var = jax.jit(lambda data: GroupedTensor(data, ints(1000, 0, 2900)).var(-2))(values)
    want = [values[:1000].astype(np.float64).var(0), np.zeros(2), values[1000:3900].astype(np.float64).var(0)]
    np.testing.assert_allclose(var, want, rtol=1e-4)


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_softmax_tangents_near_the_largest_float() -> None:
    """The derivative treats a row's largest value as a constant, so that large tangents of that row don't overflow."""
    data, tangent = np.array([[1.0, 0.0]], np.float32), np.array([[2e38, -2e38]], np.float32)
    packed_columns = jax.jit(lambda data: GroupedTensor(data, None, ints(2)).softmax().data)
    p = softmax(data)
    want = p * (tangent - np.sum(p * tangent, axis=-1, keepdims=True, dtype=np.float64))
    np.testing.assert_allclose(jax.jvp(packed_columns, (data,), (tangent,))[1], want, rtol=1e-5)
