"""Rows of a product's operands, moved to where a backend's kernels take them."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ragged.backends import schedule
from ragged.product.layout import Product
from ragged.product.operands import Operand, Operands
from ragged.quant.scales import of_rows
from ragged.tensor.rows import spread_rows


def dispatched(x: Operands) -> Operands:
    """The same, with what rows an index says in the buffer of `lhs`."""
    if x.gather is None:
        return x
    source, places, rows = x.gather
    rows = spread_rows(x.lhs.data, source, places) if rows is None else rows
    return x._replace(lhs=x.lhs._replace(data=rows), gather=None)


def in_blocks(x: Operands, product: Product) -> Operands:
    """The same, with all blocks of scales where they would be if the buffer were one group.

    If the letter that they are of is contracted, and ragged alone, groups are moved apart to multiples of the blocks;
    what is between holds zeros. Else rows get scales of their own.
    """
    block = _block(x, product)
    if block == 1:
        return x
    if product.ragged != product.contracted:
        return x._replace(lhs=_by_row(x.lhs, product.lhs, x.sizes), rhs=_by_row(x.rhs, product.rhs, x.sizes))
    x = dispatched(x)
    sizes, rows = x.sizes[product.ragged], x.rhs.data.shape[-2]  # as many as `lhs` packs
    source, places, apart = schedule.in_blocks(sizes, rows, block)

    def moved(operand: Operand) -> Operand:
        data, scales = operand
        data = spread_rows(data, source, places)
        if scales is None or (own := scales.block[0]) is None:
            return same_batch(Operand(data, scales))
        values, count = scales.values, data.shape[-2] // own  # [..., blocks, columns]
        if own < block:  # these are to that as rows are to blocks
            its = -(-jnp.diff(schedule.group_offsets(sizes, rows)) // own)
            values = spread_rows(values, *schedule.in_blocks(its, values.shape[-2], block // own)[:2])
        more = max(count - values.shape[-2], 0)
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 2) + [(0, more), (0, 0)])
        return same_batch(Operand(data, replace(scales, values=values[..., :count, :])))

    return x._replace(lhs=moved(x.lhs), rhs=moved(x.rhs), sizes={product.ragged: apart})


def known_sizes(x: Operands, product: Product, sizes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The sizes of `in_blocks(x, product)`, of sizes that are known."""
    block = _block(x, product)
    if block == 1 or product.ragged != product.contracted:
        return sizes
    offsets = schedule.known_offsets(sizes[product.ragged], x.rhs.data.shape[-2])
    return {product.ragged: -(-np.diff(offsets) // block) * block}


def _block(x: Operands, product: Product) -> int:
    """Rows of which a block of the operands' scales is a part, where rows are packed: 1 without such blocks."""
    packed = [
        each.scales for each, z in ((x.lhs, product.lhs), (x.rhs, product.rhs)) if z[0] in x.sizes and each.scales
    ]
    return math.lcm(*(scales.block[0] or 1 for scales in packed))


def _by_row(operand: Operand, letters: str, sizes: dict[str, Any]) -> Operand:
    """With scales of each packed row, in place of blocks of several."""
    data, scales = operand
    if scales is None or letters[0] not in sizes or scales.block[0] in (None, 1):
        return operand
    return same_batch(Operand(data, of_rows(scales, sizes[letters[0]], data.shape[-2])))


def same_batch(operand: Operand) -> Operand:
    """All of an operand and its scales have the batch axis, or none has it."""
    longest = max(jax.tree.leaves(operand), key=jnp.ndim)

    def same(array: Array) -> Array:
        return array if array.ndim == longest.ndim else jnp.broadcast_to(array, (longest.shape[0], *array.shape))

    return jax.tree.map(same, operand)
