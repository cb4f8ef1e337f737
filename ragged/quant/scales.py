"""Where XLA multiplies: each element's scale, from `Scales` that have one a block."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, Shaped

from ragged.backends import schedule
from ragged.product.operands import Scales


def dequantized(x: Array, scales: Scales, packed_sizes: Array | None = None, dtype: Any = jnp.float32) -> Array:
    """An operand times its scales: a copy in memory, which TPU and GPU kernels do without."""
    values = spread(scales, x.shape, packed_sizes).astype(dtype)
    x = x if x.ndim == values.ndim else x[None]  # sizes of its own alone give each batch element scales of its own
    return x.astype(dtype) * values


def spread(scales: Scales, shape: tuple[int, ...], packed_sizes: Array | None = None) -> Array:
    """Each element's scale, or what broadcasts to it, for an operand of this shape.

    `packed_sizes`: of the groups that are packed along its rows, if any are. The scales have a batch axis in front if
    the operand has one; the sizes may have it too.
    """
    values = scales.values
    for axis, block in zip((-2, -1), scales.block, strict=True):
        if axis == -2 and block != 1 and packed_sizes is not None:
            values = by_row(values, packed_sizes, shape[-2], block)
        elif block is not None and block > 1:
            values = lax.slice_in_dim(jnp.repeat(values, block, axis), 0, shape[axis], axis=values.ndim + axis)
    return values


def of_rows(scales: Scales, packed_sizes: Array, rows: int) -> Scales:
    """The same with scales of each packed row, in place of groups' or of blocks'."""
    if scales.block[0] == 1:
        return scales
    values = by_row(scales.values, packed_sizes, rows, scales.block[0])
    return replace(scales, values=values, block=(1, scales.block[1]))


def by_row(
    values: Shaped[Array, "*batch blocks columns"], sizes: Int[Array, "*b g"], rows: int, block: int | None
) -> Shaped[Array, "..."]:
    """The scales of each row's group, or of its block in that, `[*batch, rows, columns]`. The tail has any."""
    if not values.shape[-2]:  # no groups: all is tail
        return jnp.ones((*values.shape[:-2], rows, values.shape[-1]), values.dtype)

    def of_rows(values: Array, sizes: Array) -> Array:
        if block is None:
            index = schedule.group_ids(schedule.group_offsets(sizes, rows), rows)
        else:
            index = schedule.in_blocks(sizes, rows, block)[1][:, 0] // block
        return values.at[index].get(mode="clip")

    batched = values.ndim > 2 or sizes.ndim > 1
    axes = (0 if values.ndim > 2 else None, 0 if sizes.ndim > 1 else None)
    return (jax.vmap(of_rows, axes) if batched else of_rows)(values, sizes)
