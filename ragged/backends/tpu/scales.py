"""Scales of quantised operands inside a TPU kernel: no operand is dequantised in memory.

`base.scale_modes` lists where kernels multiply by them; `backend._details` and `tiled` choose.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ragged.backends.base import dot
from ragged.backends.tpu.pipeline import Input
from ragged.backends.tpu.tiles import LANES, ScaleBlocks
from ragged.backends.tpu.units import loaded
from ragged.core.formats import bits
from ragged.core.scales import Scales, e8m0_values
from ragged.product.operands import KernelOperand


class Blocks(NamedTuple):
    """An operand's scales, arranged for a kernel.

    The outer axis, which isn't contracted, has a scale for each `width` elements, or one for all. The other axis has
    the blocks along the contracted axis.
    """

    # float32 [..., outer, blocks] for the first operand; [..., blocks, outer] for the second, or 8 bits: see `floats`.
    values: Array
    extent: int | None  # of a block along the contracted axis; None for the whole axis
    width: int = 1  # of a block along the outer axis


def arrange(
    scales: Scales | None, outer_axis: int, outer: int, first: bool, ndim: int, keeps_bits: bool = False
) -> Blocks | None:
    """Arranges scales `[..., p, q]` for a kernel. `outer_axis`: 0 for `p`, 1 for `q`. `outer`: its extent.

    `first`: whether they are of the kernel's first operand. `ndim`: number of axes of the result, with a batch axis in
    front. `keeps_bits`: whether scales of 8 bits for each block along the contracted axis stay as they are.
    """
    if scales is None:
        return None
    values, width, extent = scales.values, scales.block[outer_axis] or 1, scales.block[1 - outer_axis]
    if not keeps_bits or extent is None:
        values = values.astype(jnp.float32)
    elif values.dtype == jnp.float8_e8m0fnu:
        values = bits(values, jnp.uint8)
    values = values if outer_axis == 0 else values.mT  # [..., outer, blocks]
    if _repeats(width, extent, first):
        values, width = jnp.repeat(values, width, axis=-2)[..., :outer, :], 1
    values = values if values.ndim == ndim else values[None]
    return Blocks(values if first else values.mT, extent, width)


def floats(ref: Any) -> Any:
    """Scales in float32: the ref itself, or an array of those in 8 bits. uint8 are the bits of float8_e8m0fnu."""
    if ref.dtype == jnp.float32:
        return ref
    if ref.dtype != jnp.uint8:
        return ref[...].astype(jnp.float32)
    return e8m0_values(ref[...])


def in_vmem(operand: KernelOperand, outer: str, contracted: str, first: bool, along: int) -> list[ScaleBlocks]:
    """The blocks that `fetched` takes of an operand's scales, as `arrange` arranges them.

    `along`: which of the product's extents the letter `outer` is, 0 to 2.
    """
    if operand.scales is None:
        return []
    width, extent = operand.block(outer), operand.block(contracted)
    blocks, elements = 1 if extent is None else -(-operand.extent(contracted) // extent), operand.extent(outer)
    across: tuple[int, int | None] = (1, None) if width is None else (elements, along)
    if width and width > 1 and not _repeats(width, extent, first):
        across = -(-elements // width), None
    (n, i), count = across, 1 if operand.scales.zeros is None else 2
    return count * [ScaleBlocks((n, blocks), (i, None)) if first else ScaleBlocks((blocks, n), (None, i))]


def _repeats(width: int, extent: int | None, first: bool) -> bool:
    """Whether `arrange` repeats the scales of blocks with this width in memory.

    It doesn't if blocks are short along the contracted axis: repeated scales would take as many bytes as the operand,
    or more. Then the kernel repeats them.
    """
    return width > 1 and (first or extent is None or extent >= 32)


def fetched(blocks: Blocks | None, axis: int, width: int, index: Callable[..., Any]) -> Input | None:
    """Scales as a kernel's input, in blocks of `width` along `axis`, -2 or -1.

    `index(values, *ids)`: the index along each leading axis, then the block's index along `axis`.
    """
    if blocks is None:
        return None
    values = blocks.values
    shape = [values.shape[-2], values.shape[-1]]
    is_whole = values.shape[axis] == 1 or blocks.width > 1  # all share one scale, or the kernel repeats them
    shape[axis] = shape[axis] if is_whole else min(shape[axis], width)

    def index_map(*ids: Any) -> tuple[Any, ...]:
        *lead, block = index(values, *ids)
        block = 0 if is_whole else block
        return *lead, *((block, 0) if axis == -2 else (0, block))

    return Input(values, pl.BlockSpec((*[None] * (values.ndim - 2), *shape), index_map))


def repeated(ref: Any, transposed: bool, extent: int, start: Any, width: int, axis: int, dtype: Any) -> Array:
    """Scales of the elements `start, ..., start + width - 1` along `axis` of the result, in `dtype`.

    `ref`, which may be `transposed`, has one scale for each block of `extent` elements. `start` is a multiple of 128.
    Along lanes, scales are gathered from one register; along sublanes, they are repeated; otherwise, for example if
    tiles don't end with blocks, `spread` is used. `ref` may also be an array, of which a kernel can't read a part
    that begins at a run-time index.
    """
    blocks, outer = ref.shape if axis == int(transposed) else ref.shape[::-1]
    count, has_parts = -(-width // extent), isinstance(start, int) or not isinstance(ref, Array)

    def load(first: Any, count: int) -> Array:
        """Scales of `count` blocks: `[outer, count]` along lanes, `[count, outer]` along sublanes."""
        place = slice(first, first + count) if isinstance(first, int) else pl.ds(pl.multiple_of(first, count), count)
        values = ref[...] if count == blocks else ref[place, :] if axis == int(transposed) else ref[:, place]
        return values.T if transposed else values

    if extent == 1 and blocks % width == 0 and has_parts:
        return load(start, width).astype(dtype)
    if (
        axis == 1
        and LANES % extent == 0
        and outer % 8 == 0
        and (blocks <= LANES or (blocks % LANES == 0 and has_parts))
    ):
        lane, parts = lax.broadcasted_iota(jnp.int32, (outer, LANES), 1), []
        for at in range(0, width, LANES):  # the scales of these elements are in one register
            first = (start + at) // extent
            last = max(blocks // LANES - 1, 0)
            register = min(first // LANES, last) if isinstance(first, int) else jnp.minimum(first // LANES, last)
            values = load(register * LANES, min(blocks, LANES))
            values = jnp.pad(values, ((0, 0), (0, LANES - values.shape[1])))
            index = jnp.minimum(first - register * LANES + lane // extent, LANES - 1)
            parts.append(jnp.take_along_axis(values, index, axis=1, mode="promise_in_bounds"))
        return jnp.concatenate(parts, axis=1)[:, :width].astype(dtype)
    reads_part = width % (8 * extent) == 0 and blocks % count == 0 and has_parts
    # One tile has all blocks, or there is only one.
    has_all = count == blocks and (blocks == 1 or width >= blocks * extent or (isinstance(start, int) and start == 0))
    if axis == 0 and extent % 8 == 0 and (has_all or reads_part):
        values = load(start // extent, count)
        values = jnp.broadcast_to(values[:, None, :], (count, extent, outer))
        return values.reshape(count * extent, outer)[:width].astype(dtype)
    some = LANES // extent
    in_parts = axis == 0 and width % LANES == 0 and has_parts and not transposed
    if in_parts and some * extent == LANES and some % 8 == blocks % some == 0:
        # 128 elements at a time: all at once would be a product of as many columns as there are blocks.
        loaded = [load((start + at) // extent, some) for at in range(0, width, LANES)]
        return jnp.concatenate([spread(values, extent, 0, LANES, 0, dtype) for values in loaded], axis=0)
    return spread(load(0, blocks), extent, start, width, axis, dtype)


def spread(values: Array, extent: int, start: Any, width: int, axis: int, dtype: Any = jnp.float32) -> Array:
    """Scales of the elements `start, ..., start + width - 1` along `axis`, for any `start`.

    `values` has one scale for each block of `extent` elements. A product with zeros and ones, which is exact, copies
    them. Scales that aren't finite would reach all elements: they are replaced by 0, and their elements are NaN.
    """
    shape = (values.shape[axis], width) if axis == 1 else (width, values.shape[axis])
    block, element = (lax.broadcasted_iota(jnp.int32, shape, i) for i in ((0, 1) if axis == 1 else (1, 0)))
    place = start + element
    ones = jnp.where((place >= block * extent) & (place < (block + 1) * extent), 1.0, 0.0).astype(dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def copied(x: Array) -> Array:
        pair = (x.astype(dtype), ones) if axis == 1 else (ones, x.astype(dtype))
        return dot(*pair, (1, 0), precision, jnp.float32)

    is_finite = jnp.abs(values.astype(jnp.float32)) < jnp.inf
    found = copied(jnp.where(is_finite, values, jnp.zeros_like(values)))
    return jnp.where(copied(jnp.where(is_finite, 0.0, 1.0)) > 0, jnp.nan, found).astype(dtype)


def block_products(
    dot: Callable[[Array, Array], Array],
    tiles: tuple[Array, Array],
    axes: tuple[int, int],
    refs: tuple[Any, Any],
    blocks: tuple[Blocks | None, Blocks | None],
    lanes: int,
    start: Any,
) -> Array:
    """The product of two tiles, a sum of products of `lanes` elements along the contracted axes, each times its scales.

    `axes`: the tiles' contracted axes. `start`: the tiles' first element along them.

    A dot of fewer than 128 lanes wouldn't fill the matrix unit. So a dot of 128 multiplies several copies of the first
    tile, one below the other, each with zeros outside of the lanes of one step: [copies * rows, 128] @ [128, columns].
    """
    (x, y), total = tiles, None
    copies = max(LANES // lanes, 1)
    rows, extent = x.shape[1 - axes[0]], x.shape[axes[0]]
    for at in range(0, extent, copies * lanes):
        end = min(at + copies * lanes, extent)
        part = lax.slice_in_dim(x, at, end, axis=axes[0])
        if copies > 1:
            step = lax.broadcasted_iota(jnp.int32, part.shape, axes[0]) // lanes
            # The vector units of v5e have no bfloat16.
            wide = part.astype(jnp.float32) if part.dtype == jnp.bfloat16 else part
            each = [jnp.where(step == i, wide, jnp.zeros_like(wide)) for i in range(-(-(end - at) // lanes))]
            part = jnp.concatenate(each, axis=1 - axes[0]).astype(part.dtype)
        product = dot(part, lax.slice_in_dim(y, at, end, axis=axes[1])).astype(jnp.float32)
        for i in range(product.shape[0] // rows):
            scaled = lax.slice_in_dim(product, i * rows, (i + 1) * rows, axis=0)
            for ref, scales, axis in zip(refs, blocks, (1, 0), strict=True):
                if scales is not None and scales.extent is not None:
                    scaled *= _pick(ref, (start + at + i * lanes) // scales.extent, axis)
            total = scaled if total is None else total + scaled
    assert total is not None
    return total


def _pick(ref: Any, index: Any, axis: int) -> Array:
    """Entry `index` along `axis`, which remains with extent 1. The last one past the end, where a tile has zeros."""
    last = ref.shape[axis] - 1
    index = min(index, last) if isinstance(index, int) else jnp.minimum(index, last)
    if isinstance(index, int):
        return ref[index : index + 1, :] if axis == 0 else ref[:, index : index + 1]
    if axis == 0:
        return ref[pl.ds(index, 1), :]
    lane = lax.broadcasted_iota(jnp.int32, ref.shape, 1)
    return jnp.sum(jnp.where(lane == index, ref[...], 0.0), axis=1, keepdims=True)


def local_scales(scales: Scales, group_offset: Array | None, num_local: int) -> Scales:
    """Scales of the local groups: `[..., g, blocks] -> [..., h, 1, blocks]`."""
    values = scales.values
    first = jnp.int32(0) if group_offset is None else group_offset
    local = jnp.expand_dims(jnp.arange(num_local, dtype=jnp.int32), range(first.ndim))
    index = jnp.clip(first[..., None] + local, 0, values.shape[-2] - 1)
    if index.ndim > 1 or values.ndim > 2:
        batch = jnp.broadcast_shapes(index.shape[:-1], values.shape[:-2])
        values = jnp.broadcast_to(values, (*batch, *values.shape[-2:]))
        index = jnp.broadcast_to(index, (*batch, num_local))
    return Scales(jnp.take_along_axis(values, index[..., None], axis=-2)[..., None, :], scales.block)


class RowBlocks(NamedTuple):
    """A wgrad operand's scales by blocks of rows."""

    values: Array  # float32 [batch or 1, tiles, blocks, columns]; a tile's blocks are padded to a multiple of 8
    extent: int  # rows of a block


def of_rows(
    scales: Scales | None,
    columns: int,
    group_offset: Array | None,
    num_local: int,
    tile: int,
    in_tile: bool,
) -> Blocks | RowBlocks | None:
    """Arranges a wgrad operand's scales.

    - Scales by row: `Blocks` of `[batch or 1, m, blocks]`, with the extent of a block along columns.
    - Scales by group: `Blocks` of `[batch or 1, local groups, 1, columns or 1]`, of both operands. In memory, a column
      would take 128 times as many bytes.
    - Scales by block of rows: `RowBlocks`.

    `in_tile`: whether the scales multiply tiles of `tile` rows.
    """
    if scales is None:
        return None
    if scales.block[0] is None:
        blocks = arrange(local_scales(scales, group_offset, num_local), 1, columns, False, ndim=4)
        return None if blocks is None else blocks._replace(extent=None)
    values = scales.values.astype(jnp.float32)
    values = values if values.ndim == 3 else values[None]
    if scales.block[0] == 1:
        return Blocks(values, scales.block[1] or columns)
    # Blocks are divided, so that a tile has whole blocks; with `in_tile`, 8 or more.
    extent = math.gcd(scales.block[0], tile // 8 if in_tile and tile % 8 == 0 else tile)
    values = jnp.repeat(values, scales.block[0] // extent, axis=1)
    if scales.block[1] != 1:
        values = jnp.repeat(values, scales.block[1] or columns, axis=2)[..., :columns]
    count = tile // extent
    values = jnp.pad(values, ((0, 0), (0, -values.shape[1] % count), (0, 0)))
    values = values.reshape(values.shape[0], -1, count, columns)
    return RowBlocks(jnp.pad(values, ((0, 0), (0, 0), (0, -count % 8), (0, 0))), extent)


def in_vmem_of_rows(operand: KernelOperand, along: int) -> list[ScaleBlocks]:
    """The blocks that a wgrad's kernel takes of an operand's scales, as `of_rows` arranges them.

    `along`: which of the product's extents the operand's columns are, 1 or 2.
    """
    if operand.scales is None:
        return []
    (rows, width), (m, columns) = operand.scales.block, map(operand.extent, operand.letters)
    if rows is None:
        return [ScaleBlocks((1, 1 if width is None else columns), (None, along))]
    if rows > 1:
        return [ScaleBlocks((m, columns), (0, along), rows)]
    blocks = 1 if width is None else -(-columns // width)
    found = [ScaleBlocks((m, blocks), (0, None))]
    if width and (LANES % width or (blocks > LANES and blocks % LANES)):  # `spread` makes a matrix of zeros and ones
        found += 2 * [ScaleBlocks((blocks, columns), (None, along))]
    return found


def scale_rows(
    operand: Any, rows: Any, scales: Any, blocks: Blocks | RowBlocks | None, start: Any, dtype: Any
) -> Array:
    """`rows` of a wgrad's operand, multiplied in `dtype` by scales that change with the row.

    `start`: the tile's first column.
    """
    x = loaded(operand[rows, :])
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
    is_in_group: Callable[[Any], Any],
) -> Array:
    """A wgrad's product of `rows` of its operands. The product of each block of rows is multiplied by its scales.

    - `mask(x, first)`: `x`, which begins at the tile's row `first`, with zeros outside of the group.
    - `is_in_group(first)`: whether the block that begins at this row belongs to the group.
    """
    extent = math.gcd(rows.size, *(each.extent for each in blocks if isinstance(each, RowBlocks)))
    # The first operand's columns are the result's rows: [blocks, a] -> [a, blocks].
    transposed = (
        jnp.pad(refs[0][...], ((0, -refs[0].shape[0] % LANES), (0, 0))).T if isinstance(blocks[0], RowBlocks) else None
    )
    total = None
    for at in range(0, rows.size, extent):
        first = rows.start + at
        block = pl.ds(first if isinstance(first, int) else pl.multiple_of(first, extent), extent)
        product = dot(*(mask(loaded(operand[block, :]), first) for operand in operands)).astype(jnp.float32)
        if transposed is not None:
            lane = lax.broadcasted_iota(jnp.int32, transposed.shape, 1)
            in_group = (lane == first // blocks[0].extent) & is_in_group(first)
            product *= jnp.sum(jnp.where(in_group, transposed, 0.0), axis=1, keepdims=True)
        if isinstance(blocks[1], RowBlocks):
            product *= jnp.where(is_in_group(first), refs[1][pl.ds(first // blocks[1].extent, 1), :], 0.0)
        total = product if total is None else total + product
    assert total is not None
    return total
