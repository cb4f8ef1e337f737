"""`Scales`, one per block, and their expansion to one per element for products on XLA."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int, Shaped

from ragged.core.formats import as_rounded
from ragged.core.offsets import IN_BOUNDS, aligned_to_blocks, group_ids, group_offsets


@partial(jax.tree_util.register_dataclass, data_fields=["values", "tensor", "zeros"], meta_fields=["block", "e8m0"])
@dataclass(frozen=True)
class Scales:
    """Scales of a quantised operand: value = data × scale, with one scale per block. If there are two levels, the value
    is also multiplied by `tensor`. With zero points, value = (data - zero) × scale.

    - `values`: float32; float8_e4m3fn with two levels; or float8_e8m0fnu, of a uniform operand or saved for a
      derivative. It has the operand's axes, with one entry per block.
    - `block`: the extents of a block along the operand's last two axes. None is the whole extent; along packed rows,
      all rows of a group. Along packed rows, each group begins with a new block: see `aligned_to_blocks`.
    - `e8m0`: whether float8_e8m0fnu can represent all values: powers of two, or NaN.
    - `tensor`: float32, with as many axes as `values`. All axes have extent 1, except a batch axis, and the group axis
      of a uniform operand if each of its groups has its own `tensor` scale.
    - `zeros`: like `values`, the zero points of the blocks: integers of 8 bits or more, or float32. None: all are 0.
    """

    values: Any
    block: tuple[int | None, int | None]
    e8m0: bool = False
    tensor: Any = None
    zeros: Any = None

    def map(self, function: Callable[[Any], Any], block: tuple[int | None, int | None] | None = None) -> "Scales":
        """The scales with `function` of `values`, and of `zeros` if given. `block` replaces the extents of a block."""
        zeros = None if self.zeros is None else function(self.zeros)
        return replace(self, values=function(self.values), zeros=zeros, block=block or self.block)

    @property
    def mT(self) -> "Scales":
        return self.map(lambda each: each.mT, (self.block[1], self.block[0]))

    @property
    def is_by_group(self) -> bool:
        """Whether each group of a uniform operand has its own `tensor`."""
        return self.tensor is not None and self.tensor.ndim > 2 and self.tensor.shape[-3] > 1

    @property
    def for_packed(self) -> "Scales":
        """The scales with `values` in a dtype for a packed operand. Its scales may be padded with zeros."""
        return self if self.tensor is not None else replace(self, values=self.values.astype(jnp.float32))

    def has_exact_differences(self, data: Any) -> bool:
        """True if bfloat16 can represent each number of dtype `data` minus each zero point."""
        if self.zeros is None or not jnp.issubdtype(self.zeros.dtype, jnp.integer):
            return self.zeros is None
        of_data, of_zeros = jnp.iinfo(data), jnp.iinfo(self.zeros.dtype)
        return max(of_data.max - of_zeros.min, of_zeros.max - of_data.min) <= 256

    def are_exact(self, data: Any) -> bool:
        """True if bfloat16, with eight significant bits, can represent each number of dtype `data` times each scale."""
        of_data = 8 if self.zeros is not None else _BITS.get(jnp.dtype(data).name, 8 * jnp.dtype(data).itemsize)
        of_values = 0 if self.e8m0 else _BITS.get(self.values.dtype.name, 24)  # a power of two adds no bit
        return self.has_exact_differences(data) and of_data + of_values <= 8

    @property
    def whole(self) -> "Scales":
        """The same scales in one level, in float32: `values` multiplied by `tensor`."""
        values = as_rounded(self.values).astype(jnp.float32)
        return replace(self, values=values if self.tensor is None else values * self.tensor, tensor=None)


_BITS = {"float4_e2m1fn": 2, "float8_e5m2": 3, "float8_e4m3fn": 4, "int4": 3, "uint4": 4}
"""Largest number of significant bits of a dtype's numbers."""


def e8m0_values(x: Array) -> Array:
    """The numbers in float32 whose bits in float8_e8m0fnu are the bytes `x`."""
    exponent = x.astype(jnp.int32)
    values = jnp.where(exponent == 255, _NAN, jnp.maximum(exponent << 23, _SMALLEST))
    return lax.bitcast_convert_type(values, jnp.float32)


_NAN, _SMALLEST = np.int32(0x7FC00000), np.int32(1 << 22)  # bits in float32; the smallest float8_e8m0fnu is 2**-127


def zeros_of(operand: Any) -> Any:
    """The zero points of an operand; None without them."""
    return None if operand.scales is None else operand.scales.zeros


def dequantized(x: Array, scales: Scales, packed_sizes: Array | None = None, dtype: Any = jnp.float32) -> Array:
    """`(x - zero points) × scales` in memory, for scales of one level."""
    each = scales.map(lambda values: spread(values, scales.block, x.shape, packed_sizes).astype(dtype))
    # Batched sizes give the scales a batch axis that the operand lacks.
    x = (x if x.ndim == each.values.ndim else x[None]).astype(dtype)
    return (x if each.zeros is None else x - each.zeros) * each.values


def spread(
    values: Array, block: tuple[int | None, int | None], shape: tuple[int, ...], packed_sizes: Array | None = None
) -> Array:
    """`values` (scales or zero points) repeated for each element of an operand of this shape. Along an axis with a
    single block, the result may have extent 1.

    `packed_sizes`: the group sizes if groups are packed along the operand's rows. The scales have the operand's leading
    batch axis, if any; the sizes may have one.
    """
    for axis, extent in zip((-2, -1), block, strict=True):
        if axis == -2 and extent != 1 and packed_sizes is not None:
            values = by_row(values, packed_sizes, shape[-2], extent)
        elif extent is not None and extent > 1:
            values = lax.slice_in_dim(jnp.repeat(values, extent, axis), 0, shape[axis], axis=values.ndim + axis)
    return values


def of_rows(scales: Scales, packed_sizes: Array, rows: int) -> Scales:
    """`scales` with one entry per packed row instead of one per group or block of rows."""
    if scales.block[0] == 1:
        return scales
    return scales.map(lambda values: by_row(values, packed_sizes, rows, scales.block[0]), (1, scales.block[1]))


def by_row(
    values: Shaped[Array, "*batch blocks columns"], sizes: Int[Array, "*b g"], rows: int, block: int | None
) -> Shaped[Array, "..."]:
    """The scale of each row's group, or of the row's block in its group, `[*batch, rows, columns]`; arbitrary in the
    tail."""
    if not values.shape[-2]:  # Without groups, all rows are in the tail.
        return jnp.ones((*values.shape[:-2], rows, values.shape[-1]), values.dtype)

    def unbatched(values: Array, sizes: Array) -> Array:
        if block is None:
            index = group_ids(group_offsets(sizes, rows), rows)
        else:
            _, places, _ = aligned_to_blocks(sizes, rows, block)  # In the aligned buffer, blocks don't cross groups.
            index = places[:, 0] // block
        return values.at[jnp.minimum(index, values.shape[0] - 1)].get(mode=IN_BOUNDS)

    batched = values.ndim > 2 or sizes.ndim > 1
    axes = (0 if values.ndim > 2 else None, 0 if sizes.ndim > 1 else None)
    return (jax.vmap(unbatched, axes) if batched else unbatched)(values, sizes)
