"""Products with matrices in 8 or 4 bits, which are decoded a few columns at a time.

XLA's CPU backend would convert the matrices of all groups before a loop over groups. It would convert 8-bit floats and
4-bit numbers one at a time. Operations on their bits are vectorised, and take a tenth of the time. A few columns stay
in the cache.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ragged.core.formats import accumulator_dtype, compute_dtype
from ragged.core.scales import Scales, e8m0_values, spread

_COLUMN_BYTES = 1536
"""At most so many bytes of a row are decoded at a time: 768 columns in bfloat16, 384 in float32. They take 4 MiB for a
matrix with 2880 rows."""


class Matrices(NamedTuple):
    """Matrices in 8 or 4 bits, and how they are multiplied."""

    data: Array  # [h, p, q]
    scales: Scales | None  # [h or 1, ...]
    contracted: int  # axis of a matrix: 0 or 1
    dtype: Any  # in which they are multiplied
    scales_sums: bool = False  # whether the scales multiply the columns of a product, not the elements of a matrix

    @property
    def result(self) -> Any:
        """The dtype of a product."""
        return jnp.dtype(jnp.float32) if self.scales_sums else accumulator_dtype(self.dtype)


def matrices(data: Array, scales: Scales | None, contracted: int, lhs: Any, accumulator: Any) -> Matrices | None:
    """`data` `[..., p, q]` as `Matrices`. None for more than 8 bits, and if XLA can multiply it as it is.

    `lhs`: the dtype of the other operand. `accumulator`: the dtype in which elements are multiplied by scales.
    """
    data = data.reshape(-1, *data.shape[-2:])
    common = compute_dtype(lhs, data.dtype)
    if scales is None:
        is_wide = data.dtype.itemsize > 1 or data.dtype == common
        return None if is_wide else Matrices(data, None, contracted, common)
    axes = scales.values.shape[:-2]
    tensor = None if scales.tensor is None else jnp.broadcast_to(scales.tensor, (*axes, 1, 1)).reshape(-1, 1, 1)
    scales = replace(scales.map(lambda values: values.reshape(-1, *values.shape[-2:])), tensor=tensor)
    is_narrow = data.dtype.itemsize == 1 and common in (jnp.bfloat16, jnp.float32)
    scales_sums = is_narrow and scales.block[contracted] is None and scales.has_exact_differences(data.dtype)
    # An integer dtype holds no scaled elements.
    is_exact = scales_sums or (jnp.issubdtype(common, jnp.floating) and scales.are_exact(data.dtype))
    return Matrices(data, scales, contracted, common if is_exact else jnp.dtype(accumulator), scales_sums)


def multiply(by: Matrices, index: Array, times: Callable[[Array, Array], Array], x: Array) -> Array:
    """`x @ matrix`, `[rows, k] × [k, n] -> [rows, n]`.

    `index`: of the matrix. `times(part, columns)` multiplies columns of `x` by a part of the matrix, which is stored as
    the matrix is.
    """
    (*_, p, q), contracted = by.data.shape, by.contracted
    outer, n = 1 - contracted, q if contracted == 0 else p
    # Two numbers in a byte are neighbours along `q`. They become elements of two parts.
    count = 2 if jax.dtypes.itemsize_bits(by.data.dtype) == 4 and q % 2 == 0 else 1
    lhs = [x[:, i::count] if contracted == 1 else x for i in range(count)]
    steps = -(-n * by.dtype.itemsize // _COLUMN_BYTES) if isinstance(n, int) else 1
    size = n if steps == 1 else 2 * -(-n // (2 * steps))  # whole bytes
    extents = (size, q) if contracted == 1 else (p, size)
    # XLA loops over a row's blocks, and over the elements of each. With few elements in a block, this is slower.
    block = by.scales.block[1] or 0 if by.scales and contracted == 1 and isinstance(q, int) else 0
    in_blocks = block >= 16 * count and q % block == 0 and block % count == 0

    def columns(at: Array) -> Array:
        # The barrier keeps XLA from converting all matrices before the loop.
        stored, scales, which, at = lax.optimization_barrier((by.data, by.scales, index, at))
        stored = _cut(_bytes(stored, count), which, 1, 0)[0]
        stored = _cut(stored, at, size, 0) if outer == 0 else _cut(stored, at // count, size // count, 1)

        def of_elements(values: Array) -> Array:
            known = _numbers(_cut(_bytes(values), which, 1, 0)[0], values.dtype)
            known = _cut(spread(known, _only(outer, scales.block), (p, q)), at, size, outer)
            # The barrier makes XLA decode each scale once, and not again for each element.
            known = lax.optimization_barrier(known)
            return known[:, :, None] if in_blocks else spread(known, _only(contracted, scales.block), extents)

        elements = scales and scales.map(of_elements)
        products = []
        for i, rows in enumerate(lhs):
            # Scales of every second number along `q`, or the only one.
            each = elements and elements.map(
                lambda values, i=i: values if count == 1 or values.shape[-1] == 1 else values[:, i::count]
            )
            numbers = _numbers(stored, by.data.dtype, i if count == 2 else None)
            products.append(_product(times, rows, numbers, each, by))
        y = sum(products[1:], products[0]) if contracted == 1 else jnp.stack(products, -1).reshape(-1, size)
        return y if scales is None or scales.tensor is None else y * _cut(scales.tensor, which, 1, 0)[0]

    if steps == 1:
        return columns(jnp.int32(0))

    def step(i: Array, y: Array) -> Array:
        at = i * size  # XLA moves the last columns back, so that they end at `n`
        return lax.dynamic_update_slice_in_dim(y, columns(at), at, axis=1, allow_negative_indices=False)

    return lax.fori_loop(np.int32(0), np.int32(steps), step, jnp.zeros((x.shape[0], n), by.result))


def _product(
    times: Callable[[Array, Array], Array], rows: Array, numbers: Array, scales: Scales | None, by: Matrices
) -> Array:
    """`rows` times `numbers`, whose scales and zero points are `scales`, of elements or `[rows, blocks, 1]`."""
    shape = numbers.shape
    if scales is not None and scales.values.ndim == 3:
        numbers = numbers.reshape(shape[0], scales.values.shape[1], -1)
    if scales is not None and scales.zeros is not None:
        dtype = jnp.int16 if jnp.issubdtype(scales.zeros.dtype, jnp.integer) and by.scales_sums else by.dtype
        numbers = numbers.astype(dtype) - scales.zeros.astype(dtype)
    if scales is None:
        return times(_exactly(numbers, by.dtype), rows)
    values = scales.values.astype(by.result)
    if by.scales_sums:
        return times(_exactly(numbers, by.dtype), rows) * values.reshape(1, -1)
    matrix = _exactly(numbers.astype(by.result) * values, by.dtype)
    if matrix.ndim == 3:  # without the barrier, XLA wouldn't loop over the blocks
        matrix = lax.optimization_barrier(matrix).reshape(shape)
    return times(matrix, rows)


def _only(axis: int, block: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The extents of a block along one axis; 1 along the other."""
    return (block[0], 1) if axis == 0 else (1, block[1])


def _cut(x: Array, at: Array, size: Any, axis: int) -> Array:
    """`size` elements along an axis, from `at`; all of `x` if it has only one there, which all share."""
    return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, at, size, axis, allow_negative_indices=False)


def _bytes(x: Array, count: int = 1) -> Array:
    """`x` as bytes of `count` numbers, if `_numbers` decodes these."""
    if count == 2:
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), jnp.uint8)
    is_decoded = x.dtype.name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
    return lax.bitcast_convert_type(x, jnp.uint8) if is_decoded else x


def _numbers(x: Array, dtype: Any, half: int | None = None) -> Array:
    """The numbers whose `_bytes` are `x`, in a dtype that is fast to convert. `half`: which numbers of the bytes."""
    if dtype == jnp.float8_e8m0fnu:
        return e8m0_values(x)
    if half is not None and dtype == jnp.int4:
        return lax.bitcast_convert_type(x if half else x << 4, jnp.int8) >> 4
    if half is not None:
        x = x >> 4 if half else x & 15
    return _wider(x, dtype) if x.dtype == jnp.uint8 and jnp.issubdtype(dtype, jnp.floating) else x


def _wider(x: Array, dtype: Any) -> Array:
    """The floats whose bits are `x`, in float32. Conversion by float16 would take up to four times as long."""
    of = jnp.finfo(dtype)
    bits = x.astype(jnp.uint32)
    sign = 1 << (of.bits - 1)
    magnitude = bits & (sign - 1)
    bias = (126 + of.minexp) << 23  # the smallest normal number has the exponent 1 in both dtypes
    normal = lax.bitcast_convert_type((magnitude << (23 - of.nmant)) + bias, jnp.float32)
    subnormal = magnitude.astype(jnp.float32) * float(of.smallest_subnormal)
    known = jnp.where(magnitude < 1 << of.nmant, subnormal, normal)
    if dtype == jnp.float8_e4m3fn:
        known = jnp.where(magnitude == 0x7F, jnp.nan, known)
    if dtype == jnp.float8_e5m2:
        known = jnp.where(magnitude == 0x7C, jnp.inf, jnp.where(magnitude > 0x7C, jnp.nan, known))
    wide = lax.bitcast_convert_type(known, jnp.uint32) | (bits & sign) << (32 - of.bits)
    return lax.bitcast_convert_type(wide, jnp.float32)


def _exactly(x: Array, dtype: Any) -> Array:
    """`x` in a dtype that has all its numbers. To bfloat16, without the slow rounding."""
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    upper = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) >> 16
    return lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
