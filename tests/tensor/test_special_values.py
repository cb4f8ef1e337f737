"""Derivatives where a group holds NaN, infinities or ties; reductions of dtypes without infinities.

That NaN and infinities reach no other group, and what they make of a result, is in `tests/contract/test_tensors.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from ragged import GroupedTensor

NAN, INF = np.nan, np.inf
# Groups: a row that is ordinary and one with NaN; all -inf; with a tie; none.
DATA = np.array([[1, 3], [NAN, 2], [-INF, -INF], [5, 5], [2, 5], [9, 9]], np.float32)
SIZES = jnp.array([2, 1, 2, 0], jnp.int32)


def gradient(function: Callable[[GroupedTensor], Array]) -> np.ndarray:
    """Of the sum of a function, weighted."""

    def loss(data: Array) -> Array:
        out = function(GroupedTensor(data, SIZES))
        return jnp.sum(jnp.where(jnp.isfinite(out), out, 0)) if out.ndim == 1 else jnp.sum(out * jnp.cos(out))

    return np.asarray(jax.jit(jax.grad(loss))(DATA))


def test_gradients_of_largest_values() -> None:
    """NaN in all of a group that holds NaN; a tie is shared by all that are the largest, and by nothing masked."""
    widths = jnp.array([2, 1, 2], jnp.int32)
    data = np.array([[1, NAN, 9], [-INF, 9, 9], [5, 5, 9], [2, 5, 9]], np.float32)
    sizes = jnp.array([1, 1, 2], jnp.int32)
    want = np.array([[NAN, NAN, 0], [1, 0, 0], [1 / 3, 1 / 3, 0], [0, 1 / 3, 0]], np.float32)
    for name, sign in (("max", 1), ("min", -1)):

        def loss(data: Array, name: str = name) -> Array:
            return jnp.sum(getattr(GroupedTensor(data, sizes, widths), name)())

        np.testing.assert_allclose(jax.jit(jax.grad(loss))(sign * data), want, rtol=1e-6)


def test_gradients_of_softmax() -> None:
    """NaN in a row with NaN, or of -inf alone, and in no other row. With `axis=-2`, the same for columns."""
    got = np.isnan(gradient(lambda x: x.softmax(-1).data))
    assert got[[1, 2]].any(1).all() and not np.delete(got, [1, 2], 0).any()
    got = np.isnan(gradient(lambda x: x.softmax(-2).data))
    assert got[:2].tolist() == [[True, False]] * 2 and got[2].all() and not got[3:].any()


@pytest.mark.parametrize("axis", [-1, -2])
def test_softmax_of_large_values(axis: int) -> None:
    """The largest is subtracted first."""
    x = GroupedTensor(jnp.full((3, 2), 1000.0), jnp.array([2], jnp.int32))
    assert jax.jit(lambda x: x.softmax(axis).data)(x).tolist() == [[0.5, 0.5], [0.5, 0.5], [0, 0]]


def test_gradients_of_logsumexp() -> None:
    """The softmax; zero where all elements are -inf."""
    got = gradient(lambda x: x.logsumexp(-1))
    weights = np.exp(DATA - np.where(DATA == -INF, 0, DATA).max(1, keepdims=True))
    want = weights / np.maximum(weights.sum(1, keepdims=True), 1)
    want[5] = 0
    want[1] = got[1]  # NaN or zero, as `jnp.where` has it
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.long
def test_a_low_sink_makes_masked_groups_zero() -> None:
    """A group whose elements are all -inf is zero with any finite sink. No gradient is NaN then."""
    data = np.array([[1.0], [2.0], [-INF], [-INF], [NAN]], np.float32)

    def weights(data: Array) -> Array:
        return GroupedTensor(data, jnp.array([2, 2, 0], jnp.int32)).softmax(-2, sink=-1e30).data

    p = np.exp([-1, 0]) / np.exp([-1, 0]).sum()
    out, pull = jax.vjp(jax.jit(weights), data)
    np.testing.assert_allclose(out[:, 0], [*p, 0, 0, 0], rtol=1e-6)
    of_first = pull(jnp.zeros((5, 1)).at[0].set(1))[0]
    np.testing.assert_allclose(of_first[:, 0], [p[0] * p[1], -p[0] * p[1], 0, 0, 0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "dtype, data, largest, smallest",
    [
        (jnp.float8_e4m3fn, [-2, -3, NAN], [-2, -448], [-3, 448]),
        (jnp.uint32, [3, 2**32 - 1, 7], [2**32 - 1, 0], [3, 2**32 - 1]),
        (jnp.bool_, [True, False, True], [True, False], [False, True]),
    ],
)
def test_extremes_without_infinities(dtype: Any, data: list[Any], largest: list[Any], smallest: list[Any]) -> None:
    """The lowest value of the dtype stands for -inf, the highest for inf."""

    @jax.jit
    def run(data: Array) -> list[Array]:
        x = GroupedTensor(data, jnp.array([2, 0], jnp.int32))
        return [x.max(), x.min(), x.logsumexp() if jnp.issubdtype(dtype, jnp.floating) else x.max()]

    *got, total = run(np.array(data)[:, None].astype(dtype))
    assert [np.asarray(each).astype(np.float64).tolist() for each in got] == [largest, smallest]
    assert float(total[1]) == largest[1]


@pytest.mark.parametrize(
    "dtype, held, others",
    [
        (jnp.int8, [-128, 127.0, True, np.int64(5), jnp.uint8(3)], [128, np.int64(-129), 0.5, NAN, -INF, 2**70, 1j]),
        (jnp.uint8, [0, 255], [256, -1, np.int64(-1), jnp.int32(300)]),
        (jnp.int4, [-8, 7], [8, -9]),
        (jnp.int32, [np.array(-3, jnp.int4), np.float64(2.0)], [2**31, -1.0 - 2**31, np.float32(2.0**31)]),
        (jnp.bool_, [True, 0, 1.0], [2, -1, 0.5, NAN]),
        (jnp.float32, [NAN, -INF, 2**70, jnp.bfloat16(1)], [1j, 10**400]),
        (jnp.float16, [jnp.float32(1e10)], []),  # becomes infinity
        (jnp.bfloat16, [jnp.finfo(jnp.bfloat16).min, np.float64(0.1)], []),
        (jnp.float8_e4m3fn, [NAN, 448, -0.3], [INF, 1e10]),
        (jnp.float4_e2m1fn, [6.0, -0.5], [NAN, -INF, 100.0]),
        (jnp.float8_e8m0fnu, [2, 0.25], []),
        (jnp.complex64, [1j, INF], []),
    ],
)
def test_what_fills_empty_places(dtype: Any, held: list[Any], others: list[Any]) -> None:
    """Numbers that the dtype holds, but for rounding. Others raise, instead of becoming another number."""
    x = GroupedTensor(jnp.ones((3, 2), dtype), jnp.array([1, 0], jnp.int32))
    assert x.to_padded(1).dtype == dtype and x.sum().shape == (2,)  # with zeros, which float8_e8m0fnu lacks
    for value in held:
        with np.errstate(over="ignore"):
            want = np.asarray(value).astype(dtype)
        for got in (x.to_padded(1, value)[1, 0, 0], x.min(-2, empty=value)[1, 0]):
            np.testing.assert_array_equal(np.asarray(got).astype(np.complex64), want.astype(np.complex64))
    for value in others:
        for fill in (lambda value: x.to_padded(1, value), lambda value: x.min(empty=value)):
            with pytest.raises(ValueError, match=r"can't hold|Pass a real number"):
                fill(value)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
def test_sums_of_four_bits(dtype: Any) -> None:
    """In int32, like those of other small integers."""

    @jax.jit
    def run(rows: Array, uniform: Array) -> list[Array]:
        return [GroupedTensor(rows, jnp.array([2, 9], jnp.int32)).sum(), GroupedTensor(uniform).sum(-1)]

    sums = run(np.full((12, 2), 7, dtype), np.full((2, 3, 4), 7, dtype))
    assert [each.dtype for each in sums] == [jnp.int32] * 2
    assert [each.tolist() for each in sums] == [[28, 126], [[28] * 3] * 2]
