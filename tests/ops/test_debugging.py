"""JAX's tools for debugging tell the truth: `jax.debug_nans` names the product that made a NaN, and no check of
`checkify` fails in a right program, although group ids of the tail are past the last group."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.experimental import checkify

import ragged
from ragged import GroupedTensor
from tests.cases import normal, split

SIZES = jnp.array([3, 0, 5, 2], jnp.int32)  # of 16 rows
DATA, W = normal((16, 8)), normal((4, 8, 6), 1)
IDS = jnp.array([[0, 1], [3, 2], [9, 1], [2, -1]], jnp.int32)  # two of them are no group's


def rows(data: Array) -> GroupedTensor:
    return GroupedTensor(data, SIZES)


def loss(data: Array, w: Array) -> Array:
    return jnp.sum(ragged.matmul(rows(data), w).data)


@pytest.mark.parametrize(
    "call",
    split(
        [
            lambda data: ragged.matmul(rows(data), W),
            lambda data: ragged.grouped_matmul(data, W, SIZES),
            lambda data: jax.grad(loss, 1)(data, W),
        ],
        [
            lambda data: ragged.gated_matmul(rows(data), W, W),
            lambda data: ragged.route(jnp.repeat(SIZES, 4), 6).dispatch(data),
        ],
    ),
    ids=["matmul", "grouped_matmul", "gradient", "gated_matmul", "dispatch"],
)
@pytest.mark.parametrize("is_compiled", split([True], [False]))
def test_debug_nans_names_the_operation(call: Callable[[Array], Any], is_compiled: bool) -> None:
    """As JAX does for its own. With an eager rule that compiles itself, it recurses without an end instead."""
    data = DATA.at[0, 0].set(jnp.nan)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) encountered in ragged_\w+"):
        (jax.jit(call) if is_compiled else call)(data)


def of_tensors(data: Array, w: Array) -> Any:
    """Gathers and scatters by group ids, rows of groups and columns, and their derivatives."""

    def parts(data: Array) -> Any:
        x, tokens, route = rows(data), data[:4], ragged.route(IDS, 4)
        padded = GroupedTensor.from_padded(data.reshape(4, 4, 8), jnp.minimum(SIZES, 2), capacity=12)
        parts = x.rows(1, 3), ragged.concat([x, padded]), x * ragged.per_group(tokens[:, 0]), x.max(axis=-2)
        return parts, route.combine(route.dispatch(tokens), data[:4, :2]), ragged.matmul(route.gathered(tokens), w)

    def total(data: Array) -> Array:
        leaves = (leaf for leaf in jax.tree.leaves(parts(data)) if leaf.dtype == data.dtype)
        return sum((jnp.sum(leaf) for leaf in leaves), jnp.zeros(()))

    return jax.grad(total)(data), parts(data)


def of_quantised(data: Array, w: Array) -> Any:
    """Scales of groups, columns and blocks of rows, softmax, and derivatives of recipes."""

    def loss(data: Array, recipe: str) -> Array:
        return jnp.sum(ragged.matmul(rows(data), w, recipe=recipe).data)

    x = rows(data)
    quantised = [ragged.quantize(x, "float8_e4m3fn", scaling) for scaling in ("group", "column", (4, 4))]
    scores = ragged.matmul(x, x.mT, max_last=6)
    return (
        (quantised, [q.dequantize() for q in quantised], [ragged.matmul(q, w) for q in quantised]),
        (scores, x.to_padded(6), scores.softmax(causal=True), x.softmax(axis=-2), scores.sum(axis=-1)),
        [jax.grad(loss)(data, recipe) for recipe in ("rowwise", "blockwise", "delayed")],
    )


def of_arithmetic(data: Array, w: Array) -> Any:
    """Derivatives where groups are empty, rows have no columns, and the tail is zero."""

    def total(data: Array) -> Array:
        both = GroupedTensor(data, SIZES, jnp.array([2, 3, 0, 8], jnp.int32))
        total = jnp.zeros(())
        for x in (rows(data), both):
            total += jnp.sum((x / ragged.per_group(x.sum())).data) + jnp.sum(x.map(jnp.log).data)
            total += sum(jnp.sum(x.softmax(axis, sink=1).data) for axis in (-1, -2)) + jnp.sum(x.softmax().data)
            total += sum(jnp.sum(x.mean(axis)) for axis in (None, -1, -2))
            total += jnp.sum(x.max(empty=0) + x.min(-2, empty=0)[:, 0] + x.logsumexp(empty=0))
        return total

    return jax.grad(total)(jnp.where(rows(data).mask, jnp.abs(data), 0))


@pytest.mark.long
@pytest.mark.parametrize("function", [of_tensors, of_arithmetic, of_quantised])
def test_checkify_raises_no_false_alarm(function: Callable[[Array, Array], Any]) -> None:
    """No index is out of range, nothing is NaN, and nothing is divided by zero."""
    errors = checkify.nan_checks | checkify.div_checks | checkify.index_checks
    error, _ = jax.jit(checkify.checkify(function, errors=errors))(DATA, W)
    assert error.get() is None
