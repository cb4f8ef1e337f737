"""Scales of quantised operands inside a TPU kernel: no operand is dequantised in memory.

A scale that is the same all along the contracted axis is a factor of the accumulator. One that changes along it in
blocks of whole lanes is a factor of each block's own product. One that changes faster is multiplied into the tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ragged.product.operands import Scales


class Blocks(NamedTuple):
    """One operand's scales as a kernel takes them.

    An axis is that of its kept letter, by element or 1 for all; the other that of the blocks along the contracted one.
    The kept axis comes first for the first operand, last for the second.
    """

    values: Array  # [..., kept, blocks] or [..., blocks, kept], float32
    extent: int | None  # of a block along the contracted axis; None for the whole of it


def arrange(scales: Scales | None, kept_axis: int, kept: int, first: bool, ndim: int) -> Blocks | None:
    """The scales `[..., p, q]` of an operand whose axis `kept_axis` of these two is kept, and has extent `kept`.

    The result has `ndim` axes: a batch axis of 1 in front if there was none.
    """
    if scales is None:
        return None
    values, block = scales.values.astype(jnp.float32), scales.block[kept_axis]
    values = values if kept_axis == 0 else values.mT  # [..., kept, blocks]
    if block is not None and block > 1:
        values = jnp.repeat(values, block, axis=-2)[..., :kept, :]
    values = values if values.ndim == ndim else values[None]
    return Blocks(values if first else values.mT, scales.block[1 - kept_axis])


def spec(blocks: Blocks | None, axis: int, width: int, index: Callable[..., Any]) -> pl.BlockSpec | None:
    """How scales are fetched: tiles of `width` along `axis`, -2 or -1, and all of the other of these two.

    `index(values, *ids)`: which tile it is, and before it the place along each leading axis.
    """
    if blocks is None:
        return None
    values = blocks.values
    shape = [values.shape[-2], values.shape[-1]]
    shape[axis] = min(shape[axis], width)

    def index_map(*ids: Any) -> tuple[Any, ...]:
        *lead, place = index(values, *ids)
        place = 0 if values.shape[axis] == 1 else place  # one scale for all
        return *lead, *((place, 0) if axis == -2 else (0, place))

    return pl.BlockSpec((*[None] * (values.ndim - 2), *shape), index_map)


def spread(ref: Any, extent: int, start: Any, width: int, axis: int) -> Array:
    """The scales of elements `start, start + 1, ...` (`width` of them) of an axis that `ref` has by blocks, as `axis`.

    A product with a matrix of zeros and ones: each element gets one scale times one, so it is exact.
    """
    values = ref[...]
    shape = (values.shape[axis], width) if axis == 1 else (width, values.shape[axis])
    block, element = (lax.broadcasted_iota(jnp.int32, shape, i) for i in ((0, 1) if axis == 1 else (1, 0)))
    place = start + element
    ones = jnp.where((place >= block * extent) & (place < (block + 1) * extent), 1.0, 0.0)
    pair = (values, ones) if axis == 1 else (ones, values)
    return jnp.dot(*pair, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def block_products(
    dot: Callable[[Array, Array], Array],
    tiles: tuple[Array, Array],
    axes: tuple[int, int],
    refs: tuple[Any, Any],
    blocks: tuple[Blocks | None, Blocks | None],
    lanes: int,
    start: Any,
) -> Array:
    """The sum of the products of each block of `lanes`, each times its scales. `start`: where the tile begins."""
    total = None
    for at in range(0, tiles[0].shape[axes[0]], lanes):
        parts = (lax.slice_in_dim(x, at, min(at + lanes, x.shape[i]), axis=i) for x, i in zip(tiles, axes, strict=True))
        product = dot(*parts).astype(jnp.float32)
        for ref, scales, axis in zip(refs, blocks, (1, 0), strict=True):
            if scales is not None and scales.extent is not None:
                product *= _pick(ref, (start + at) // scales.extent, axis)
        total = product if total is None else total + product
    assert total is not None
    return total


def _pick(ref: Any, index: Any, axis: int) -> Array:
    """Entry `index` along `axis`, which stays with extent 1."""
    if axis == 0:
        return ref[pl.ds(index, 1), :]
    if isinstance(index, int):
        return ref[:, index : index + 1]
    lane = lax.broadcasted_iota(jnp.int32, ref.shape, 1)
    return jnp.sum(jnp.where(lane == index, ref[...], 0.0), axis=1, keepdims=True)


def held_scales(scales: Scales, group_offset: Array | None, held: int) -> Scales:
    """Scales by group, `[..., g, blocks]`, as `[..., h, 1, blocks]` for the groups that the uniform term holds."""
    values = scales.values
    first = jnp.int32(0) if group_offset is None else group_offset
    index = jnp.clip(first[..., None] + jnp.arange(held, dtype=jnp.int32), 0, values.shape[-2] - 1)
    if index.ndim > 1 or values.ndim > 2:
        batch = jnp.broadcast_shapes(index.shape[:-1], values.shape[:-2])
        values = jnp.broadcast_to(values, (*batch, *values.shape[-2:]))
        index = jnp.broadcast_to(index, (*batch, held))
    return Scales(jnp.take_along_axis(values, index[..., None], axis=-2)[..., None, :], scales.block)


def of_rows(scales: Scales | None, columns: int, first: bool, group_offset: Array | None, held: int) -> Blocks | None:
    """A wgrad operand's scales: by row, `[e, m, blocks]`; or by group, `[e, h, columns or 1, 1]`, `.mT` for `rhs`."""
    if scales is None:
        return None
    if scales.block[0] is not None:
        values = scales.values.astype(jnp.float32)
        return Blocks(values if values.ndim == 3 else values[None], scales.block[1] or columns)
    blocks = arrange(held_scales(scales, group_offset, held), 1, columns, first, ndim=4)
    return None if blocks is None else blocks._replace(extent=None)


def scale_rows(operand: Any, rows: Any, scales: Any, blocks: Blocks | None, start: Any) -> Array:
    """A wgrad's tile `rows` of an operand, times its rows' scales, if it has any. `start`: its first column."""
    x = operand[rows, :]
    if blocks is None or blocks.extent is None:
        return x
    return x.astype(jnp.float32) * spread(scales.at[rows, :], blocks.extent, start, x.shape[1], 1)
