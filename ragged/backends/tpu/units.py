"""What a TPU's matrix units multiply: in which dtypes a dot takes its operands, and the dot.

Whatever they are, no value of an operand is lost, NaN and infinities included, and the product of two values of 8 bits
is exact in float32. What sums such products rounds to is the hardware's: see docs/tpu.md.

Where the units' format of 4 bits of exponent and 3 of mantissa isn't `float8_e4m3fn` but `float8_e4m3b11fnuz`, the same
bits stand for a sixteenth, and others for what isn't a number:

    bits               0x01    0x38    0x7e    0x7f    0x80    0xff
    e4m3fn             2**-9   1       448     nan     -0      nan
    e4m3b11fnuz × 16   2**-9   1       448     480     nan     -480
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ragged.backends.tpu.tiles import Chip
from ragged.quant.formats import accumulator_dtype, compute_dtype

_B11 = jnp.dtype(jnp.float8_e4m3b11fnuz)


class Dot(NamedTuple):
    """How two tiles are multiplied."""

    lhs: Any  # the dtypes in which the units take the operands
    rhs: Any
    longest: int | None = None  # the most contracted elements that are summed exactly, if there is a most

    @property
    def result(self) -> Any:
        return accumulator_dtype(self.lhs)

    def __call__(self, x: Array, y: Array, x_axis: int, y_axis: int, precision: Any = lax.Precision.DEFAULT) -> Array:
        """The product, contracting these axes of two matrices, in `result`. `precision` is for tiles of float32."""
        x, y = _cast(x, self.lhs), _cast(y, self.rhs)
        extent, total = x.shape[x_axis], None
        for begin in range(0, extent, self.longest or extent):
            end = min(begin + (self.longest or extent), extent)
            part = lax.dot_general(
                lax.slice_in_dim(x, begin, end, axis=x_axis),
                lax.slice_in_dim(y, begin, end, axis=y_axis),
                (((x_axis,), (y_axis,)), ((), ())),
                precision=precision if self.lhs == jnp.float32 else lax.Precision.DEFAULT,
                preferred_element_type=self.result,
            )
            total = part if total is None else total + part
        assert total is not None
        sixteenths = (self.lhs, self.rhs).count(_B11)
        return total * 16.0**sixteenths if sixteenths else total


def dot(lhs: Any, rhs: Any, on: Chip) -> Dot:
    """How operands of these dtypes are multiplied.

    As they are if the units have the formats of both, and multiply them no slower than bfloat16; else both in a format
    that holds all their values. Integers that the units have no format for are multiplied as bfloat16, by the compiler,
    and summed in float32: up to 2²⁴ that is exact.
    """
    lhs, rhs = jnp.dtype(lhs), jnp.dtype(rhs)
    floats = all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1 for dtype in (lhs, rhs))
    if lhs == rhs or floats:
        own = [_B11 if d == jnp.float8_e4m3fn and on.rate(d) is None else d for d in (lhs, rhs)]
        if all(on.rate(dtype) is not None for dtype in own):
            return Dot(own[0], own[1])
    common = compute_dtype(lhs, rhs)
    if common == jnp.int8 and on.rate(common) is None:
        bits = sum(jax.dtypes.itemsize_bits(dtype) - 1 for dtype in (lhs, rhs))
        return Dot(common, common, 2 ** (24 - bits))
    return Dot(common, common)


def _cast(x: Array, dtype: Any) -> Array:
    if dtype != _B11:
        return x if x.dtype == dtype else x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.int8)
    no_number = (bits & jnp.int8(0x7F)) == 0x7F
    bits = jnp.where(bits == -0x80, jnp.int8(0), jnp.where(no_number, jnp.int8(-0x80), bits))
    return lax.bitcast_convert_type(bits, _B11)
