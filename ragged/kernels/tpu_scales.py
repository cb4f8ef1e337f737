"""Scales of quantised operands inside a TPU kernel: no operand is dequantised in memory.

A scale that is the same all along the contracted axis is a factor of the accumulator. One that changes along it in
blocks of whole lanes is a factor of each block's own product. One that changes faster is multiplied into the tile.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ragged.kernels import Scales

LANES = 128


class Blocks(NamedTuple):
    """One operand's scales as a kernel takes them: an axis for its kept letter, by element or 1 for all, and an axis for
    the blocks along the contracted one. The kept axis comes first for the first operand, last for the second."""

    values: Array  # [..., kept, blocks] or [..., blocks, kept], float32
    extent: int | None  # of a block along the contracted axis; None for the whole of it


def arrange(scales: Scales | None, kept_axis: int, kept: int, first: bool) -> Blocks | None:
    """The scales of a uniform operand, `values [..., p, q]`, whose axis `kept_axis` (0 or 1 of the last two) is kept."""
    if scales is None:
        return None
    values, block = scales.values.astype(jnp.float32), scales.block[kept_axis]
    values = values if kept_axis == 0 else values.mT  # [..., kept, blocks]
    if block is not None and block > 1:
        values = jnp.repeat(values, block, axis=-2)[..., :kept, :]
    return Blocks(values if first else values.mT, scales.block[1 - kept_axis])


def by_lanes(*operands: Blocks | None) -> int | None:
    """The extent of the blocks whose products are scaled one by one; None where that isn't the way."""
    varying = [s.extent for s in operands if s is not None and s.extent is not None]
    return math.gcd(*varying) if varying and all(extent % LANES == 0 for extent in varying) else None


def dequantised(*operands: Blocks | None) -> bool:
    """Whether scales are multiplied into tiles: they change along the contracted axis, and not in blocks of lanes."""
    return by_lanes(*operands) is None and any(s is not None and s.extent is not None for s in operands)


def spread(ref: Any, extent: int, start: Any, width: int, axis: int) -> Array:
    """The scales of elements `start, start + 1, ...` (`width` of them) of the contracted axis, which is `axis` of `ref`.

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
