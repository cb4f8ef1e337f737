"""Where XLA multiplies: each element's scale, from `Scales` that have one a block."""

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
        if axis == -2 and block is None and packed_sizes is not None:
            values = by_row(values, packed_sizes, shape[-2])
        elif block is not None and block > 1:
            values = lax.slice_in_dim(jnp.repeat(values, block, axis), 0, shape[axis], axis=values.ndim + axis)
    return values


def by_row(values: Shaped[Array, "*batch g blocks"], sizes: Int[Array, "*b g"], rows: int) -> Shaped[Array, "..."]:
    """The scales of each row's group, `[*batch, rows, blocks]`. Rows of the tail have the last group's."""
    if not values.shape[-2]:  # no groups: all is tail
        return jnp.ones((*values.shape[:-2], rows, values.shape[-1]), values.dtype)

    def of_rows(values: Array, sizes: Array) -> Array:
        return values.at[schedule.group_ids(schedule.group_offsets(sizes, rows), rows)].get(mode="clip")

    batched = values.ndim > 2 or sizes.ndim > 1
    axes = (0 if values.ndim > 2 else None, 0 if sizes.ndim > 1 else None)
    return (jax.vmap(of_rows, axes) if batched else of_rows)(values, sizes)
