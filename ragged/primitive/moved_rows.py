"""Moves the rows of a product's operands to the places that a backend's kernels need."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ragged.core.offsets import aligned_to_blocks, group_offsets, known_offsets
from ragged.core.rows import spread_rows
from ragged.core.scales import of_rows
from ragged.product.layout import Product
from ragged.product.operands import Operand, Operands


def dispatched(x: Operands) -> Operands:
    """`x` with the gathered rows copied into `lhs`, without an index."""
    if x.gather is None:
        return x
    source, places, rows = x.gather
    rows = spread_rows(x.lhs.data, source, places) if rows is None else rows
    return x._replace(lhs=x.lhs._replace(data=rows), gather=None)


def in_blocks(x: Operands, product: Product) -> Operands:
    """`x` with blocks of scales that tile the buffer from its first row on, instead of each group.

    If only the contracted letter is ragged, groups are moved to multiples of the blocks, with zeros between them.
    Otherwise each packed row gets its own scales.
    """
    block = _block(x, product)
    if block == 1:
        return x
    if product.ragged != product.contracted:
        return x._replace(lhs=_by_row(x.lhs, product.lhs, x.sizes), rhs=_by_row(x.rhs, product.rhs, x.sizes))
    x = dispatched(x)
    sizes, rows = x.sizes[product.ragged], x.rhs.data.shape[-2]  # `lhs` packs as many rows.
    source, places, aligned = aligned_to_blocks(sizes, rows, block)

    def moved(operand: Operand) -> Operand:
        data, scales, _ = operand
        data = spread_rows(data, source, places)
        if scales is None or (scale_block := scales.block[0]) is None:
            return same_batch(Operand(data, scales))
        values, count = scales.values, data.shape[-2] // scale_block  # [..., blocks, columns]
        if scale_block < block:  # `block` spans several of this operand's blocks: align its scales like the rows.
            num_scales = -(-jnp.diff(group_offsets(sizes, rows)) // scale_block)
            values = spread_rows(values, *aligned_to_blocks(num_scales, values.shape[-2], block // scale_block)[:2])
        # One scale per block of the moved rows: drop scales past the end, or add zeros.
        more = max(count - values.shape[-2], 0)
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 2) + [(0, more), (0, 0)])
        return same_batch(Operand(data, replace(scales, values=values[..., :count, :])))

    return x._replace(lhs=moved(x.lhs), rhs=moved(x.rhs), sizes={product.ragged: aligned})


def known_sizes(x: Operands, product: Product, sizes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The group sizes of `in_blocks(x, product)`, from concrete `sizes` of `x`: the same dict if unchanged."""
    block = _block(x, product)
    if block == 1 or product.ragged != product.contracted:
        return sizes
    offsets = known_offsets(sizes[product.ragged], x.rhs.data.shape[-2])
    return {product.ragged: -(-np.diff(offsets) // block) * block}


def _block(x: Operands, product: Product) -> int:
    """The least common multiple of the blocks of scales along packed rows; 1 without such blocks."""
    operands = (x.lhs, product.lhs), (x.rhs, product.rhs)
    packed = [each.scales for each, letters in operands if letters[0] in x.sizes and each.scales]
    return math.lcm(*(scales.block[0] or 1 for scales in packed))


def _by_row(operand: Operand, letters: str, sizes: dict[str, Any]) -> Operand:
    """`operand` with scales for each packed row, in place of blocks of rows."""
    data, scales, _ = operand
    if scales is None or letters[0] not in sizes or scales.block[0] in (None, 1):
        return operand
    return same_batch(Operand(data, of_rows(scales, sizes[letters[0]], data.shape[-2])))


def same_batch(operand: Operand) -> Operand:
    """`operand` with a batch axis in its data and scales, if any of them has one."""
    longest = max(jax.tree.leaves(operand), key=jnp.ndim)

    def with_batch(array: Array) -> Array:
        return array if array.ndim == longest.ndim else jnp.broadcast_to(array, (longest.shape[0], *array.shape))

    return jax.tree.map(with_batch, operand)
