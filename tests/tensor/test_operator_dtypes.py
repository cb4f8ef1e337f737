"""The dtype of every operator, with whatever a tensor combines with, is `jnp`'s of plain arrays: weak types too.

Where `jnp` raises, the tensor raises the same. Nothing is computed: shapes and dtypes alone.
"""

import itertools
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from ragged import GroupedTensor, per_column, per_group, per_row
from tests.tensor.test_array import COMPARISONS
from tests.tensor.test_tensor import KINDS, example

pytestmark = pytest.mark.sampled

OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    **COMPARISONS,
}
UNARY: dict[str, Callable[..., Any]] = {"-": operator.neg, "~": operator.invert, "abs": abs}
DTYPES = ("bool", "int8", "uint8", "int32", "bfloat16", "float16", "float32", "weak int32", "weak float32")
SCALARS = (True, 3, 2.5)


def zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Weakly typed ones are of Python's scalars."""
    if dtype.startswith("weak"):
        return jnp.full(shape, 0 if "int" in dtype else 0.0)
    return jnp.zeros(shape, dtype)


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """The dtype of the result and whether it is weakly typed; or the type of the error."""
    try:
        out = function(*args)
    except (TypeError, ValueError, OverflowError) as error:
        return type(error)
    out = out if isinstance(out, Array) else jnp.asarray(out.data)
    return out.dtype.name, out.dtype != bool and jax.typeof(out).weak_type  # which means nothing of bools


@cache
def of_jnp(function: Callable[..., Any], promotion: str, *operands: str | bool | int | float) -> Any:
    """The outcome for plain arrays, given by their dtypes, and for Python's scalars."""
    assert jax.config.jax_numpy_dtype_promotion == promotion  # pyright: ignore
    return outcome(function, *(zeros((1,), each) if isinstance(each, str) else each for each in operands))


def others(x: GroupedTensor) -> dict[str, Any]:
    """Whatever combines with a tensor like `x` and has the dtype of `x`."""
    g, data = x.num_groups, jnp.asarray(x.data)
    found = {
        "tensor": x,
        "scalar": data.reshape(-1)[0],
        "per_group": per_group(data.reshape(-1)[:g]),
        "per_row": per_row(data[..., 0] if x.packed_axis is None else data[:, 0]),
        "per_column": per_column(data.reshape(-1, data.shape[-1])[0]),
        "one for each group": x.max(keepdims=True),
        "one row for each group": x.max(-2, keepdims=True),
        "one column for each group": x.max(-1, keepdims=True),
    }
    if x.packed_axis is not None:
        found["per_group of vectors"] = per_group((data if x.packed_axis == -2 else data.T)[:g])
    return found


def traced(function: Callable[[GroupedTensor], None], kind: str, dtype: str) -> None:
    """Calls `function` with a tensor, of which nothing is computed."""
    x = example(kind).tensor
    jax.eval_shape(lambda: function(x.with_data(zeros(x.shape, dtype))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_functions_get_the_dtypes(kind: str, dtype: str) -> None:
    """All operands of `map`, and so of the operators, reach the function in the dtype that they have."""

    def check(x: GroupedTensor) -> None:
        for name, other in others(x).items():
            its = jax.typeof(jax.tree.leaves(other)[0])
            seen: list[Any] = []
            x.map(lambda *arrays, seen=seen: seen.extend(map(jax.typeof, arrays)) or arrays[0], other)
            got = [(each.dtype.name, each.weak_type) for each in seen]
            assert got == [(each.dtype.name, each.weak_type) for each in (jax.typeof(x.data), its)], name

    traced(check, kind, dtype)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("promotion", ["strict", "standard"])
@pytest.mark.parametrize("its", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_operators(kind: str, dtype: str, its: str, promotion: str) -> None:
    """Every operator, from both sides, with operands of every dtype; errors too."""

    def check(x: GroupedTensor) -> None:
        for name, other in others(x.with_data(zeros(x.shape, its))).items():
            strong = its.removeprefix("weak ") if "each" in name else its  # as `jnp.max` makes it
            for symbol, op in OPERATORS.items():
                case = symbol, name
                assert outcome(op, x, other) == of_jnp(op, promotion, dtype, strong), case
                assert outcome(op, other, x) == of_jnp(op, promotion, strong, dtype), case

    with jax.numpy_dtype_promotion(promotion):
        traced(check, kind, dtype)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("promotion", ["strict", "standard"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_one_tensor(kind: str, dtype: str, promotion: str) -> None:
    """Alone, and with Python's scalars."""

    def check(x: GroupedTensor) -> None:
        for symbol, op in UNARY.items():
            assert outcome(op, x) == of_jnp(op, promotion, dtype), symbol
        for scalar, (symbol, op) in itertools.product(SCALARS, OPERATORS.items()):
            assert outcome(op, x, scalar) == of_jnp(op, promotion, dtype, scalar), (symbol, scalar)
            assert outcome(op, scalar, x) == of_jnp(op, promotion, scalar, dtype), (symbol, scalar)

    with jax.numpy_dtype_promotion(promotion):
        traced(check, kind, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_bools_stay_bools(kind: str) -> None:
    """`~` of a tensor of bools is a complement, whatever it was combined with; False in the tail."""
    e = example(kind)
    large = [g > 1 for g in e.groups]
    chosen = np.array([True, False, True, True])
    rows = np.arange(np.prod(e.tensor.shape[:-1])).reshape(e.tensor.shape[:-1]) % 2 == 0
    columns = np.arange(e.tensor.shape[-1]) % 2 == 0

    @jax.jit
    def run(x: GroupedTensor, *values: Array) -> list[GroupedTensor]:
        of_group, of_row, of_column = values
        x = x > 1
        any_of_row = x.max(-1, keepdims=True)
        return [~(x & per_group(of_group)), ~(x | per_row(of_row)), ~(x ^ per_column(of_column)), ~(x & any_of_row)]

    spread = [np.full(e.tensor.shape, False) for _ in range(3)]
    for i, place in enumerate(e.places):
        spread[0][place] = chosen[i]
    spread[1][:] = rows[..., None]
    spread[2][:] = columns
    any_of_row = [np.broadcast_to(g.any(-1, keepdims=True), g.shape) for g in large]
    operands = (*map(e.unpack, spread), any_of_row)
    got = run(e.tensor, chosen, rows, columns)
    for op, values, out in zip((operator.and_, operator.or_, operator.xor, operator.and_), operands, got, strict=True):
        assert out.dtype == bool
        np.testing.assert_array_equal(out.data, e.pack([~op(g, v) for g, v in zip(large, values, strict=True)]))
