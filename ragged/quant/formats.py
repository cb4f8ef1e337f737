"""Number formats: what they hold, what multiplies them, and what they are multiplied and added in."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Units(NamedTuple):
    """What a platform's kernels do with numbers of a format."""

    operand: int | None = 0  # the least generation (GPUs: compute capability, 80 is 8.0) that multiplies them, if any
    result: bool = True  # whether they make results of it


class Format(NamedTuple):
    largest: float | None = None  # what the largest value of a block becomes when it is quantised to it, if it can be
    tpu: Units = Units(None, False)
    gpu: Units = Units(None, False)
    has_nan: bool = True  # whether it has a value for what isn't finite


FORMATS = {
    "float64": Format(),
    "float32": Format(tpu=Units(), gpu=Units()),
    "bfloat16": Format(tpu=Units(), gpu=Units()),
    "float16": Format(gpu=Units()),
    "float8_e4m3fn": Format(448.0, tpu=Units(5), gpu=Units(89)),
    "float8_e5m2": Format(57344.0, tpu=Units(5), gpu=Units()),
    "int32": Format(tpu=Units(None), gpu=Units(None)),
    "float4_e2m1fn": Format(6.0, gpu=Units(100, result=False), has_nan=False),
    "int8": Format(127.0, tpu=Units(5), gpu=Units(), has_nan=False),
    "int4": Format(7.0, tpu=Units(5, result=False), gpu=Units(result=False), has_nan=False),
}
"""What isn't listed is XLA's. Integers are symmetric when quantised to: -128 and -8 are not used."""

LARGEST = {name: known.largest for name, known in FORMATS.items() if known.largest is not None}
"""The formats to quantise to, and the largest value of each."""


def has_derivative(dtype: Any) -> bool:
    """Whether products of operands or results of this dtype can be differentiated: floats of more than 8 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1


def promote(lhs: Any, rhs: Any) -> Any:
    """The operands' common dtype, also where the user has made implicit promotion strict: here it is asked for."""
    bytes_of = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
    lhs, rhs = (jnp.dtype(bytes_of.get(jnp.dtype(d).name, d)) for d in (lhs, rhs))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(lhs, rhs)


def accumulator_dtype(dtype: Any) -> Any:
    """float32; int32 for integers; what is wider than that stays as it is."""
    if jnp.dtype(dtype).itemsize >= 4:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32)


def compute_dtype(lhs: Any, rhs: Any) -> Any:
    """What both operands of a dot are cast to, without loss (but for an integer beyond 2²⁴ that meets a float).

    XLA's dots on the CPU are fast in float32, bfloat16 and int8. The 8 bits of bfloat16's mantissa hold every int8, fp8
    and fp4, but no int16.
    """
    lhs, rhs = sorted((jnp.dtype(lhs), jnp.dtype(rhs)), key=lambda d: d.itemsize)
    integers = [jnp.issubdtype(d, jnp.integer) for d in (lhs, rhs)]
    if all(integers):
        signed_bytes = all(d.itemsize == 1 and jnp.issubdtype(d, jnp.signedinteger) for d in (lhs, rhs))
        return jnp.dtype(jnp.int8) if signed_bytes else accumulator_dtype(promote(lhs, rhs))
    if rhs.itemsize == 1:
        return jnp.dtype(jnp.bfloat16)
    if any(is_integer and d.itemsize > 1 for d, is_integer in zip((lhs, rhs), integers, strict=True)):
        return jnp.dtype(jnp.float64 if jnp.float64 in (lhs, rhs) else jnp.float32)
    common = rhs if lhs.itemsize == 1 else promote(lhs, rhs)
    return jnp.dtype(jnp.float32) if common == jnp.float16 else common
