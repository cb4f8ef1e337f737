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
import pytest
from jax import Array

from ragged import GroupedTensor, per_column, per_group, per_row
from tests.cases import split
from tests.contract.operations import ARITHMETIC, COMPARISONS
from tests.contract.tensors import Kind

LOGICAL = {"&": operator.and_, "|": operator.or_, "^": operator.xor}
OPERATORS: dict[str, Callable[..., Any]] = {**ARITHMETIC, "**": operator.pow, **LOGICAL, **COMPARISONS}
UNARY: dict[str, Callable[..., Any]] = {"-": operator.neg, "~": operator.invert, "abs": abs}
DTYPES = ("bool", "int8", "uint8", "int32", "bfloat16", "float16", "float32", "weak int32", "weak float32")
KINDS = [Kind(""), Kind("m"), Kind("n"), Kind("mn"), Kind("mn", packed_last=True)]


def zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Weakly typed ones are of Python's scalars."""
    if dtype.startswith("weak"):
        return jnp.full(shape, 0 if "int" in dtype else 0.0)
    return jnp.zeros(shape, dtype)


def tensor(kind: Kind, dtype: str) -> GroupedTensor:
    return kind.tensor(zeros(kind.shape, dtype), {z: jnp.zeros(kind.groups, jnp.int32) for z in kind.ragged})


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


def check(kind: Kind, dtype: str, others_dtypes: tuple[str, ...], promotion: str) -> None:
    def of_all() -> None:
        x = tensor(kind, dtype)
        for symbol, op in UNARY.items():
            assert outcome(op, x) == of_jnp(op, promotion, dtype), symbol
        for scalar, (symbol, op) in itertools.product((True, 3, 2.5), OPERATORS.items()):
            assert outcome(op, x, scalar) == of_jnp(op, promotion, dtype, scalar), (symbol, scalar)
            assert outcome(op, scalar, x) == of_jnp(op, promotion, scalar, dtype), (symbol, scalar)
        for its in others_dtypes:
            for name, other in others(tensor(kind, its)).items():
                strong = its.removeprefix("weak ") if "each" in name else its  # as `jnp.max` makes it
                for symbol, op in OPERATORS.items():
                    case = symbol, name, its
                    assert outcome(op, x, other) == of_jnp(op, promotion, dtype, strong), case
                    assert outcome(op, other, x) == of_jnp(op, promotion, strong, dtype), case

    with jax.numpy_dtype_promotion(promotion):
        jax.eval_shape(of_all)


@pytest.mark.parametrize(
    "kind, dtype, others_dtypes, promotion",
    split([(KINDS[3], "bfloat16", ("weak float32",), "strict")], [(KINDS[1], "int8", ("float16",), "standard")]),
)
def test_operators(kind: Kind, dtype: str, others_dtypes: tuple[str, ...], promotion: str) -> None:
    """Every operator, from both sides, errors too."""
    check(kind, dtype, others_dtypes, promotion)


@pytest.mark.long
def test_operators_of_more_dtypes() -> None:
    """Each dtype with another, of a kind."""
    for i, dtype in enumerate(DTYPES):
        check(KINDS[i % 5], dtype, (DTYPES[(i + 2) % 9],), ("strict", "standard")[i % 2])


@pytest.mark.parametrize("kind", split([KINDS[1]], [KINDS[0], *KINDS[2:]]), ids=str)
def test_functions_get_the_dtypes(kind: Kind) -> None:
    """All operands of `map`, and so of the operators, reach the function in the dtype that they have; its result keeps
    the function's."""

    def check() -> None:
        for dtype in DTYPES:
            x = tensor(kind, dtype)
            for name, other in others(x).items():
                its, own = (jax.typeof(each) for each in (jax.tree.leaves(other)[0], x.data))
                seen: list[Any] = []
                out = x.map(lambda *arrays, seen=seen: seen.extend(map(jax.typeof, arrays)) or arrays[0], other)
                got = [(each.dtype.name, each.weak_type) for each in (*seen, jax.typeof(out.data))]
                assert got == [(each.dtype.name, each.weak_type) for each in (own, its, own)], name

    jax.eval_shape(check)
