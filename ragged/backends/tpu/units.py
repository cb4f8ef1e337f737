"""Dots of a TPU's matrix units: the dtypes in which they multiply operands, and the dot.

These dtypes keep every value of an operand, and the product of two 8-bit values is exact in float32. For the rounding
of sums, see docs/tpu.md.

Instead of `float8_e4m3fn`, some generations have `float8_e4m3b11fnuz`, where the same bits mean a sixteenth of the
value, and other bits mean NaN:

    bits               0x01    0x38    0x7e    0x7f    0x80    0xff
    e4m3fn             2**-9   1       448     nan     -0      nan
    e4m3b11fnuz × 16   2**-9   1       448     480     nan     -480

TPUs don't have `float4_e2m1fn`. Its bits, moved up by one, are the bits of a `float8_e5m2` with the value divided by
2**14, which matrix units multiply, and vector units convert:

    value           0.5            1              6
    float4_e2m1fn   0 00 1         0 01 0         0 11 1
    float8_e5m2     0 00000 10     0 00001 00     0 00011 10

Beside floats, int4 is multiplied as `float8_e4m3fn`, whose bits without the sign, up to 16, are the value times 2**9.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

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
        factor = self.factor * _divisor(x, self.lhs) * _divisor(y, self.rhs)
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
        return total if factor == 1 else total * factor


def loaded(x: Array) -> Array:
    """The tile `x`. 4-bit floats are converted to float8_e5m2, divided by 2**14."""
    if x.dtype != _FP4:
        return x
    numbers = lax.bitcast_convert_type(x, jnp.int4).astype(jnp.int8)  # the upper five bits are the sign
    return _from_bytes(numbers, lambda fours: (fours << 1) & np.int32(0x8E8E8E8E - 2**32), jnp.float8_e5m2)


def _from_bytes(x: Array, function: Callable[[Array], Array], dtype: Any) -> Array:
    """Numbers of 8 bits whose bits are `function` of the bytes `x`. It gets int32 of four bytes, or of one, which it
    must not mix: vector units have operations of 32 bits."""
    if x.shape[0] % 4:
        return lax.bitcast_convert_type(function(x.astype(jnp.int32)).astype(jnp.int8), dtype)
    return lax.bitcast_convert_type(pltpu.bitcast(function(pltpu.bitcast(x, jnp.int32)), jnp.int8), dtype)


def _sign_and_magnitude(fours: Array) -> Array:
    """The bits of the float8_e4m3fn `x / 2**9` of int4 numbers `x`.

    Up to 16, numbers of float8_e4m3fn times 2**9 are equally far from one another.
    """
    sign = fours & np.int32(0x80808080 - 2**32)
    one = lax.shift_right_logical(sign, np.int32(7))
    return (fours ^ (sign - one)) + one


def dot(lhs: Any, rhs: Any, on: Chip, stored: tuple[Any, ...] = ()) -> Dot:
    """The dot for operands of these dtypes, which are `loaded` from arrays of the dtypes `stored`.

    If the matrix units support both dtypes together, no operand is cast. If they support `rhs` beside bfloat16, `lhs`
    is cast to it. Otherwise both are cast to a dtype that has all their values. Beside a float, int4 counts as
    float8_e4m3fn. If the matrix units don't support int8, the compiler multiplies it as bfloat16, and sums in float32,
    which is exact up to 2²⁴.
    """
    factor = 2.0 ** (14 * sum(dtype == _FP4 for dtype in stored or (lhs, rhs)))
    lhs, rhs = (jnp.dtype(jnp.float8_e5m2 if dtype == _FP4 else dtype) for dtype in (lhs, rhs))
    common = jnp.dtype(compute_dtype(lhs, rhs))
    pair = _native(lhs, rhs, on), _native(rhs, lhs, on)
    for first, second in (pair, (common, pair[1])):
        alike = lhs == rhs or (_is_narrow_float(first) and _is_narrow_float(second))
        if (alike and None not in (on.rate(first), on.rate(second))) or (first.name, second.name) in on.mixed:
            return Dot(first, second, factor=factor)
    if common == jnp.int8 and on.rate(common) is None:
        bits = sum(jax.dtypes.itemsize_bits(dtype) - 1 for dtype in (lhs, rhs))  # a product is at most 2**bits
        return Dot(common, common, 2 ** (24 - bits))
    return Dot(common, common, factor=factor)


def _native(dtype: Any, other: Any, on: Chip) -> Any:
    """The dtype of the matrix units for an operand, beside an operand of dtype `other`."""
    if dtype == jnp.float8_e4m3fn or (dtype == jnp.int4 and jnp.issubdtype(other, jnp.floating)):
        return _B11 if on.rate(jnp.float8_e4m3fn) is None else jnp.dtype(jnp.float8_e4m3fn)
    return dtype


def _is_narrow_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


def _divisor(x: Array, dtype: Any) -> float:
    """The number by which `_cast` divides `x`."""
    return (2.0**9 if x.dtype == jnp.int4 and _is_narrow_float(dtype) else 1.0) * (16.0 if dtype == _B11 else 1.0)


def _cast(x: Array, dtype: Any) -> Array:
    """`x` in `dtype`, divided by `_divisor`.

    `float8_e4m3b11fnuz` has the bits of `float8_e4m3fn`, except for -0 and NaN.
    """
    if x.dtype == dtype:
        return x
    if x.dtype == jnp.int4 and _is_narrow_float(dtype):
        return _from_bytes(x.astype(jnp.int8), _sign_and_magnitude, dtype)
    if dtype != _B11:
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.int8)
    is_nan = (bits & jnp.int8(0x7F)) == 0x7F
    bits = jnp.where(bits == -0x80, jnp.int8(0), jnp.where(is_nan, jnp.int8(-0x80), bits))
    return lax.bitcast_convert_type(bits, _B11)
