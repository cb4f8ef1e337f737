"""Dots of a TPU's matrix units: the dtypes in which they multiply operands, and the dot.

These dtypes keep every value of an operand, and the product of two 8-bit values is exact in float32. For the rounding
of sums, see docs/tpu.md.

Instead of `float8_e4m3fn`, some generations have `float8_e4m3b11fnuz`, where the same bits mean a sixteenth of the
value, and other bits mean NaN:

    bits               0x01    0x38    0x7e    0x7f    0x80    0xff
    e4m3fn             2**-9   1       448     nan     -0      nan
    e4m3b11fnuz × 16   2**-9   1       448     480     nan     -480

The vector units don't have `float4_e2m1fn`. Its bits, moved up by one, are the bits of a `float8_e5m2` with the value
divided by 2**14, which the vector units convert to bfloat16:

    value           0.5            1              6
    float4_e2m1fn   0 00 1         0 01 0         0 11 1
    float8_e5m2     0 00000 10     0 00001 00     0 00011 10
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ragged.backends import base
from ragged.backends.tpu.tiles import Chip
from ragged.core.formats import accumulator_dtype, compute_dtype

_B11 = jnp.dtype(jnp.float8_e4m3b11fnuz)
_FP4 = jnp.dtype(jnp.float4_e2m1fn)


class Dot(NamedTuple):
    """How two tiles are multiplied."""

    lhs: Any  # dtype in which `lhs` is multiplied
    rhs: Any
    longest: int | None = None  # largest number of products whose sum is exact; None for no limit
    factor: float = 1.0  # by which sums are multiplied, because `loaded` divides 4-bit floats

    @property
    def result(self) -> Any:
        return accumulator_dtype(self.lhs)

    def __call__(self, x: Array, y: Array, x_axis: int, y_axis: int, precision: Any = lax.Precision.DEFAULT) -> Array:
        """The product of two tiles in the dtype `result`, contracting `x_axis` with `y_axis`.

        `precision` applies only to float32.
        """
        if x_axis == y_axis == 1 and y.shape[0] == 1:  # Pallas doesn't lower such a dot for narrow operands
            total = jnp.sum(x.astype(self.result) * y.astype(self.result), axis=1, keepdims=True)
            return total if self.factor == 1 else total * self.factor
        x, y = _cast(x, self.lhs), _cast(y, self.rhs)
        extent, total = x.shape[x_axis], None
        for begin in range(0, extent, self.longest or extent):
            end = min(begin + (self.longest or extent), extent)
            pair = lax.slice_in_dim(x, begin, end, axis=x_axis), lax.slice_in_dim(y, begin, end, axis=y_axis)
            part = base.dot(
                *pair, (x_axis, y_axis), precision if self.lhs == jnp.float32 else lax.Precision.DEFAULT, self.result
            )
            total = part if total is None else total + part
        assert total is not None
        factor = self.factor * 16.0 ** (self.lhs, self.rhs).count(_B11)
        return total if factor == 1 else total * factor


def loaded(x: Array) -> Array:
    """The tile `x`. 4-bit floats are converted to bfloat16, divided by 2**14."""
    if x.dtype != _FP4:
        return x
    bits = lax.bitcast_convert_type(x, jnp.int4).astype(jnp.int8)  # the upper five bits are the sign
    bits = ((bits & jnp.int8(7)) << jnp.int8(1)) | (bits & jnp.int8(-128))
    return lax.bitcast_convert_type(bits, jnp.float8_e5m2).astype(jnp.bfloat16)


def dot(lhs: Any, rhs: Any, on: Chip, stored: tuple[Any, ...] = ()) -> Dot:
    """The dot for operands of these dtypes, which are `loaded` from arrays of the dtypes `stored`.

    Operands of the same dtype, or two 8-bit floats, aren't cast if the matrix units support them. Otherwise both are
    cast to a dtype that has all their values. If the matrix units don't support int8, the compiler multiplies it as
    bfloat16, and sums in float32, which is exact up to 2²⁴.
    """
    factor = 2.0 ** (14 * sum(dtype == _FP4 for dtype in stored or (lhs, rhs)))
    lhs, rhs = (jnp.dtype(jnp.bfloat16 if dtype == _FP4 else dtype) for dtype in (lhs, rhs))
    floats = all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1 for dtype in (lhs, rhs))
    if lhs == rhs or floats:
        native = [_B11 if d == jnp.float8_e4m3fn and on.rate(d) is None else d for d in (lhs, rhs)]
        if all(on.rate(dtype) is not None for dtype in native):
            return Dot(native[0], native[1], factor=factor)
    common = compute_dtype(lhs, rhs)
    if common == jnp.int8 and on.rate(common) is None:
        bits = sum(jax.dtypes.itemsize_bits(dtype) - 1 for dtype in (lhs, rhs))  # a product is at most 2**bits
        return Dot(common, common, 2 ** (24 - bits))
    return Dot(common, common, factor=factor)


def _cast(x: Array, dtype: Any) -> Array:
    """`x` in `dtype`. For `float8_e4m3b11fnuz`, `x / 16`: the same bits as `float8_e4m3fn`, except for -0 and NaN."""
    if dtype != _B11:
        return x if x.dtype == dtype else x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.int8)
    is_nan = (bits & jnp.int8(0x7F)) == 0x7F
    bits = jnp.where(bits == -0x80, jnp.int8(0), jnp.where(is_nan, jnp.int8(-0x80), bits))
    return lax.bitcast_convert_type(bits, _B11)
