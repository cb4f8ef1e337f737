"""Scales of quantised operands inside a TPU kernel: no operand is dequantised in memory.

A scale that is the same all along the contracted axis is a factor of the accumulator. One that changes along it is
multiplied into the tile, in bfloat16, where that holds every product, as of 8 bits and a power of two. Else it is a
factor of each block's own product, if blocks are of whole lanes, or is multiplied into the tile in float32.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ragged.backends.tpu.tiles import LANES
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


def repeated(ref: Any, turned: bool, extent: int, start: Any, width: int, axis: int, dtype: Any) -> Array:
    """The scales of elements `start, start + 1, ...` (`width` of them) of an axis that `ref` has by blocks, as `axis`.

    `start` is a multiple of whole lanes. `turned`: `ref` has the axis as the other one. Along lanes scales are gathered
    from a register of them, along sublanes repeated; or, where tiles don't end with blocks, `spread`.
    """
    blocks, kept = ref.shape if axis == int(turned) else ref.shape[::-1]
    count = -(-width // extent)

    def some(first: Any, count: int) -> Array:
        """Of `count` blocks, `[kept, count]` along lanes, `[count, kept]` along sublanes."""
        place = slice(first, first + count) if isinstance(first, int) else pl.ds(pl.multiple_of(first, count), count)
        values = ref[...] if count == blocks else ref[place, :] if axis == int(turned) else ref[:, place]
        return values.T if turned else values

    if axis == 1 and LANES % extent == 0 and kept % 8 == 0 and (blocks <= LANES or blocks % LANES == 0):
        lane, parts = lax.broadcasted_iota(jnp.int32, (kept, LANES), 1), []
        for at in range(0, width, LANES):  # the blocks of all of these lanes are in one register
            first = (start + at) // extent
            register = 0 if blocks <= LANES else jnp.minimum(first // LANES, blocks // LANES - 1)
            values = some(register * LANES, min(blocks, LANES))
            values = jnp.pad(values, ((0, 0), (0, LANES - values.shape[1])))
            index = jnp.minimum(first - register * LANES + lane // extent, LANES - 1)
            parts.append(jnp.take_along_axis(values, index, axis=1, mode="promise_in_bounds"))
        return jnp.concatenate(parts, axis=1)[:, :width].astype(dtype)
    if axis == 0 and extent % 16 == 0 and (count == blocks or (width % (8 * extent) == 0 and blocks % count == 0)):
        values = some(start // extent, count)
        values = jnp.broadcast_to(values[:, None, :], (count, extent, kept))
        return values.reshape(count * extent, kept)[:width].astype(dtype)
    return spread(some(0, blocks), extent, start, width, axis, dtype)


def spread(values: Array, extent: int, start: Any, width: int, axis: int, dtype: Any = jnp.float32) -> Array:
    """The same of an array, from any element on: a product with a matrix of zeros and ones.

    Each element gets one scale times one, so it is exact.
    """
    shape = (values.shape[axis], width) if axis == 1 else (width, values.shape[axis])
    block, element = (lax.broadcasted_iota(jnp.int32, shape, i) for i in ((0, 1) if axis == 1 else (1, 0)))
    place = start + element
    ones = jnp.where((place >= block * extent) & (place < (block + 1) * extent), 1.0, 0.0).astype(dtype)
    pair = (values.astype(dtype), ones) if axis == 1 else (ones, values.astype(dtype))
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.dot(*pair, precision=precision, preferred_element_type=jnp.float32).astype(dtype)


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


class RowBlocks(NamedTuple):
    """A wgrad operand's scales by blocks of rows, for each tile of rows: as many as Pallas fetches at a time."""

    values: Array  # [e, tiles, blocks of a tile or more, columns], float32
    extent: int  # rows of a block


def of_rows(
    scales: Scales | None, columns: int, first: bool, group_offset: Array | None, held: int, tile: int, in_tile: bool
) -> Blocks | RowBlocks | None:
    """A wgrad operand's scales: by row, `[e, m, blocks]`; by group, `[e, h, columns or 1, 1]`, `.mT` for `rhs`; or by
    block of rows. `in_tile`: they are multiplied into tiles of `tile` rows."""
    if scales is None:
        return None
    if scales.block[0] is None:
        blocks = arrange(held_scales(scales, group_offset, held), 1, columns, first, ndim=4)
        return None if blocks is None else blocks._replace(extent=None)
    values = scales.values.astype(jnp.float32)
    values = values if values.ndim == 3 else values[None]
    if scales.block[0] == 1:
        return Blocks(values, scales.block[1] or columns)
    # Where there would be fewer, or half of one, a tile has smaller blocks with the same scale.
    extent = math.gcd(scales.block[0], tile // 8 if in_tile and tile % 8 == 0 else tile)
    values = jnp.repeat(values, scales.block[0] // extent, axis=1)
    if scales.block[1] != 1:
        values = jnp.repeat(values, scales.block[1] or columns, axis=2)[..., :columns]
    count = tile // extent
    values = jnp.pad(values, ((0, 0), (0, -values.shape[1] % count), (0, 0)))
    values = values.reshape(values.shape[0], -1, count, columns)
    return RowBlocks(jnp.pad(values, ((0, 0), (0, 0), (0, -count % 8), (0, 0))), extent)


def scale_rows(
    operand: Any, rows: Any, scales: Any, blocks: Blocks | RowBlocks | None, start: Any, dtype: Any
) -> Array:
    """A wgrad's tile `rows` of an operand, times its rows' scales, if it has any, in `dtype`. `start`: its first
    column."""
    x = operand[rows, :]
    if blocks is None or blocks.extent is None:
        return x
    if isinstance(blocks, RowBlocks):
        return x.astype(dtype) * repeated(scales, False, blocks.extent, rows.start, rows.size, 0, dtype)
    return x.astype(dtype) * repeated(scales.at[rows, :], False, blocks.extent, start, x.shape[1], 1, dtype)


def row_block_products(
    dot: Callable[[Array, Array], Array],
    operands: tuple[Any, Any],
    rows: Any,
    refs: tuple[Any, Any],
    blocks: tuple[Any, Any],
    mask: Callable[[Array, Any], Array],
    is_mine: Callable[[Any], Any],
) -> Array:
    """A wgrad's product of the tiles `rows` of its operands: the sum of that of each block of rows, times its scales.

    `mask(x, first)`: of rows from `first` on, those of the group. `is_mine`: whether a block that begins there is its.
    """
    extent = math.gcd(rows.size, *(each.extent for each in blocks if isinstance(each, RowBlocks)))
    # The first operand's columns are the result's rows: [blocks, a] -> [a, blocks].
    turned = (
        jnp.pad(refs[0][...], ((0, -refs[0].shape[0] % LANES), (0, 0))).T if isinstance(blocks[0], RowBlocks) else None
    )
    total = None
    for at in range(0, rows.size, extent):
        first = rows.start + at
        some = pl.ds(first if isinstance(first, int) else pl.multiple_of(first, extent), extent)
        product = dot(*(mask(operand[some, :], first) for operand in operands)).astype(jnp.float32)
        if turned is not None:
            lane = lax.broadcasted_iota(jnp.int32, turned.shape, 1)
            mine = (lane == first // blocks[0].extent) & is_mine(first)
            product *= jnp.sum(jnp.where(mine, turned, 0.0), axis=1, keepdims=True)
        if isinstance(blocks[1], RowBlocks):
            product *= jnp.where(is_mine(first), refs[1][pl.ds(first // blocks[1].extent, 1), :], 0.0)
        total = product if total is None else total + product
    assert total is not None
    return total
