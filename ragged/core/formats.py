"""Number formats: their ranges, the hardware that multiplies them, and the dtypes of products and sums."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ragged.core.errors import Site

AnyArray = Array | np.ndarray
"""An array of JAX or NumPy."""


def as_array(x: Any) -> Array:
    """`x` as a JAX array. `jnp.asarray` of a JAX array would trace an operation that changes nothing."""
    return x if isinstance(x, Array) else jnp.asarray(x)


# Converters of fields, for type checkers only: they let `__init__` accept NumPy arrays and shapes for a field of type
# `Array`.
def array_field(x: AnyArray | jax.ShapeDtypeStruct) -> Array:
    """`x`."""
    return cast(Array, x)


def optional_array_field(x: AnyArray | jax.ShapeDtypeStruct | None) -> Array | None:
    """`x`."""
    return cast(Array | None, x)


class Support(NamedTuple):
    """Support for a format in a platform's kernels and matrix units."""

    # The oldest generation that multiplies the format: for GPUs the compute capability, 89 for 8.9. 0: all generations.
    # None: kernels don't support it as an operand.
    operand: int | None = 0
    result: bool = True  # whether kernels can return results in this format
    needs_zeros: bool = False  # whether operands must have zero points: minus these, they are cast to floats


class Format(NamedTuple):
    """Properties of a number format."""

    # `quantize` scales a block's largest element to this value. None: it supports the format only with zero points, or
    # not at all.
    largest: float | None = None
    tpu: Support = Support(None, False)
    gpu: Support = Support(None, False)
    has_nan: bool = True


FORMATS = {
    "float64": Format(),
    "float32": Format(tpu=Support(), gpu=Support()),
    "bfloat16": Format(tpu=Support(), gpu=Support()),
    "float16": Format(gpu=Support()),
    "float8_e4m3fn": Format(448.0, tpu=Support(5), gpu=Support()),
    "float8_e5m2": Format(57344.0, tpu=Support(5), gpu=Support()),
    "int32": Format(tpu=Support(None), gpu=Support(None)),
    "float4_e2m1fn": Format(6.0, tpu=Support(5, result=False), gpu=Support(result=False), has_nan=False),
    "int8": Format(127.0, tpu=Support(5), gpu=Support(), has_nan=False),
    "int4": Format(7.0, tpu=Support(5, result=False), gpu=Support(result=False), has_nan=False),
    "uint8": Format(tpu=Support(5, False, True), gpu=Support(0, False, True), has_nan=False),
    "uint4": Format(tpu=Support(5, False, True), gpu=Support(0, False, True), has_nan=False),
}
"""Products of formats that a platform's kernels don't support run on XLA.

Symmetric quantisation to integers doesn't use -128 and -8.
"""

ASYMMETRIC = {"int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7), "uint4": (0, 15)}
"""The formats that `quantize` supports with zero points, each with its smallest and its largest value."""

LARGEST = {name: known.largest for name, known in FORMATS.items() if known.largest is not None}
"""The formats that `quantize` supports without zero points, each with its largest value."""


def float_dtype(site: Site, dtype: Any) -> Any:
    """`dtype` as a NumPy dtype. Raises unless it is a float dtype."""
    try:
        is_float = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_float = False
    if not is_float:
        site.fail(TypeError, f"`dtype` is {dtype!r}.", "It must be a float dtype, such as 'bfloat16' or 'float32'.")
    return jnp.dtype(dtype)


def has_derivative(dtype: Any) -> bool:
    """Whether products of operands or results of this dtype can be differentiated: floats of more than 8 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1


def promote(lhs: Any, rhs: Any) -> Any:
    """The common dtype of the operands, whatever the user's setting of `jax_numpy_dtype_promotion` is."""
    # JAX has no implicit promotion of integers of fewer than 8 bits.
    bytes_of = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
    lhs, rhs = (jnp.dtype(bytes_of.get(jnp.dtype(d).name, d)) for d in (lhs, rhs))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(lhs, rhs)


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype of accumulators: float32, or int32 for integers; dtypes of 32 or more bits stay unchanged."""
    if jnp.dtype(dtype).itemsize >= 4:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32)


def compute_dtype(lhs: Any, rhs: Any) -> Any:
    """The dtype to which the XLA backend casts both operands of a dot. The casts are exact, unless an integer beyond
    2²⁴ is multiplied by a float.

    XLA's dots on the CPU are fast in float32, bfloat16 and int8. bfloat16 represents all int8, fp8 and fp4 numbers, but
    not all of int16.
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


def bits(x: Array, dtype: Any) -> Array:
    """The bits of `x` as numbers of another dtype: `lax.bitcast_convert_type` of an optimisation barrier.

    Without the barrier, in jaxlib 0.11.1 to 0.12.0, XLA moves a bitcast out of a loop in a `shard_map`. If the operand
    is a transposed constant, XLA then folds the bitcast, and loses the transpose.
    """
    return lax.bitcast_convert_type(lax.optimization_barrier(x), dtype)


def as_rounded(x: Array) -> Array:
    """`x`, behind an optimisation barrier if it has floats of 8 bits or fewer.

    For a GPU, XLA leaves out float32 -> float8_e4m3fn -> float32, as if the numbers had never been rounded, unless
    `--xla_allow_excess_precision=false`. It keeps the two conversions if a barrier is between them.
    """
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits <= 8
    return lax.optimization_barrier(x) if is_narrow else x
