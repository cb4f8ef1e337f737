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
