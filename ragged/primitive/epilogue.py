"""Biases, activations and gates in XLA, in float32: for derivatives, and for products whose kernel lacks them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from ragged.core.formats import accumulator_dtype, as_array
from ragged.core.offsets import take
from ragged.product.function import Function
from ragged.product.operands import Operands
from ragged.tensor.arithmetic import per_group
from ragged.tensor.tensor import GroupedTensor


def split_columns(x: Any, columns: str) -> tuple[Array, Array]:
    """`(gate, up)`: the two matrices in one array `[..., 2 * n]`, whose columns are "halves" or "interleaved"."""
    if columns == "halves":
        first, second = jnp.split(x, 2, axis=-1)
    else:  # not `x[..., ::2]`, whose derivative XLA needs minutes to compile for a TPU
        first, second = (each[..., 0] for each in jnp.split(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), 2, axis=-1))
    return first, second


def with_bias(out: Array, bias: Array | None, x: Operands, first_dims: Array | None) -> Array:
    """`out + bias` in the rows of groups. `bias`: `(n,)`, or `[h, n]`, a row for each of the `h`
    groups of the uniform operand."""
    if bias is None:
        return out
    accumulator = accumulator_dtype(out.dtype)  # The bias's gradient is summed in this dtype, too.
    z, rows = GroupedTensor(out.astype(accumulator), first_dims), bias.astype(accumulator)
    if rows.ndim == 1 and x.offset is None:
        z = z.map(lambda data: data + jnp.broadcast_to(rows, data.shape))
    elif x.offset is None:
        z = z + per_group(rows)
    else:  # Rows of other shards' groups stay zero: they get no bias.
        index, is_local = _local_index(z, x)
        if rows.ndim == 1:
            rows = jnp.where(is_local[:, None], rows[None], 0)
        else:
            rows = take(rows, jnp.where(is_local, index, rows.shape[0]), 0)
        z = z + per_group(rows)
    return z.data.astype(out.dtype)


def combined(function: Function | None, z: Sequence[Array], x: Operands, first_dims: Array | None) -> Array:
    """`function(*z)` of pre-activations, with zeros in rows of other shards' groups; `z[0]` without a function."""
    if function is None:
        return z[0]
    if x.offset is None:
        return as_array(activated(function, z, first_dims).data)

    def of_local(gate: Array, local: Array) -> Array:
        # `function` gets 1 in other rows: its derivative by what stands there, perhaps `existing_out`, may be infinite.
        out = function.call(*(jnp.where(local, each, 1) for each in (gate, *z[1:])))
        return jnp.where(local, out, 0)

    rows = GroupedTensor(z[0], first_dims)
    return as_array(rows.map(of_local, per_group(_local_index(rows, x)[1])).data)


def activated(function: Function, z: Sequence[Array], first_dims: Array | None) -> GroupedTensor:
    """`function(*z)` for pre-activations `[rows, n]`, or `[g, m, n]` without `first_dims`."""
    return GroupedTensor(z[0], first_dims).map(lambda gate: function.call(gate, *z[1:]))


def _local_index(z: GroupedTensor, x: Operands) -> tuple[Array, Array]:
    """`(index, is_local)`, both `(g,)`: each group's index in the uniform operand, which begins at the group
    `x.offset`; and whether the operand has this group."""
    index, count = jnp.arange(z.num_groups, dtype=jnp.int32) - x.offset, x.rhs.data.shape[-3]
    return index, (index >= 0) & (index < count)
