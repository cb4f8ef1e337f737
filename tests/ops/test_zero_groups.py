"""No groups at all, in buffers that have room: everything is tail. Results are empty or zero, gradients are zero."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor, per_group, per_row

pytestmark = pytest.mark.sampled(default=False)  # by default, others stand for these

NONE = jnp.zeros((0,), jnp.int32)


def full(*shape: int) -> Array:
    return jnp.full(shape, jnp.nan)


TENSORS = {
    "ragged rows": GroupedTensor(full(5, 3), NONE),
    "ragged columns": GroupedTensor(full(3, 5), None, NONE),
    "ragged both": GroupedTensor(full(5, 3), NONE, NONE),
    "ragged both, packed columns": GroupedTensor(full(3, 5), NONE, NONE, transposed=True),
}
OPERATIONS: dict[str, Callable[[GroupedTensor], GroupedTensor | Array]] = {
    "map": lambda x: x.map(jnp.cos),
    "x - x": lambda x: x - x,
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(-1),
    "mean of columns": lambda x: x.mean(-2),
    "max": lambda x: x.max(empty=0),
    "max of rows": lambda x: x.max(-1, empty=0),
    "logsumexp of rows": lambda x: x.logsumexp(-1, empty=0),
    "per_row": lambda x: x * per_row(full(x.shape[0])),
    "to_padded": lambda x: x.to_padded(4),
    "concat": lambda x: ragged.concat([x, x]),
}
BY_GROUP: dict[str, Callable[[GroupedTensor], GroupedTensor | Array]] = {
    "per_group": lambda x: x * per_group(jnp.ones((0,))),
    "softmax": lambda x: x.softmax(),  # of packed columns: the largest and the sum of each group
    "softmax of columns": lambda x: x.softmax(-2),
    "softmax with a sink": lambda x: x.softmax(-2, sink=1),
    "logsumexp": lambda x: x.logsumexp(-2, empty=0),
}


def is_zero(x: Any) -> bool:
    return all(not np.any(np.asarray(leaf).astype(np.float64)) for leaf in jax.tree.leaves(x))


def buffer(x: GroupedTensor | Array) -> Array:
    return x.data if isinstance(x, GroupedTensor) else x


@pytest.mark.parametrize("operations", [OPERATIONS, BY_GROUP], ids=["any", "by group"])
@pytest.mark.parametrize("kind", TENSORS)
def test_arithmetic(kind: str, operations: dict[str, Any]) -> None:
    """Values and gradients are zero, whatever lies in the buffer."""
    x = TENSORS[kind]

    @jax.jit
    def run(data: Array) -> dict[str, tuple[Array, Array]]:
        def value_and_gradient(operation: Callable[[GroupedTensor], Any]) -> tuple[Array, Array]:
            out, pull = jax.vjp(lambda data: buffer(operation(x.with_data(data))), data)
            return out, *pull(jnp.ones_like(out))

        return {name: value_and_gradient(operation) for name, operation in operations.items()}

    assert [name for name, results in run(x.data).items() if not is_zero(results)] == []


@pytest.mark.parametrize("kind", TENSORS)
def test_quantize(kind: str) -> None:
    """A quantised tensor of nothing is zero."""
    values = jax.jit(
        lambda x: [
            ragged.quantize(x, jnp.int8, scaling).dequantize().data for scaling in ("tensor", "group", "row", "column")
        ]
    )(TENSORS[kind])
    assert len(values) == 4 and is_zero(values)


PAIRS = {
    "forward": ("ragged rows", np.ones((0, 3, 4), np.float32)),
    "forward_left": (np.ones((0, 4, 3), np.float32), "ragged columns"),
    "wgrad": ("ragged columns", "ragged rows"),
    "outer": ("ragged rows", "ragged columns"),
    "inner_rows": ("ragged both", "ragged rows"),
    "inner_columns": ("ragged columns", "ragged both"),
    "ragged": ("ragged both", "ragged both, packed columns"),
}


@pytest.mark.parametrize("layout", PAIRS)
def test_products(layout: str) -> None:
    """Values, gradients, and what is added to `existing_out`, whose tail doesn't count."""
    lhs, rhs = (TENSORS[x] if isinstance(x, str) else GroupedTensor(x) for x in PAIRS[layout])

    @jax.jit
    def run(a: Array, b: Array) -> list[Any]:
        x, y = lhs.with_data(a), rhs.with_data(b)
        out = ragged.matmul(x, y)
        added = ragged.matmul(x, y, existing_out=full(*out.shape))
        quantised = ragged.matmul(ragged.quantize(x, jnp.int8, "row"), y)
        results: list[Any] = [out.data, added.data, quantised.data]
        for recipe in (None, "blockwise"):

            def total(a: Array, b: Array, recipe: Any = recipe) -> Array:
                return ragged.matmul(lhs.with_data(a), rhs.with_data(b), recipe=recipe).data.sum()

            results.append(jax.grad(total, (0, 1))(a, b))
        return results

    assert is_zero(run(lhs.data, jnp.asarray(rhs.data)))
