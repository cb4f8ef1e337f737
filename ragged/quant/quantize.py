"""`quantize`: converts a tensor to 8 or 4 bits, with scales.

For each block, `amax` is its largest absolute value, and `largest` the largest value that the dtype holds:

    scale = amax / largest        data = round(value / scale)        value ≈ data × scale

With zero points, a block's range is extended to 0: `lowest = min(elements, 0)`, `highest = max(elements, 0)`. The
dtype's smallest integer is `first`, its largest one `last`:

    scale = (highest - lowest) / (last - first)        zero = round(first - lowest / scale)
    data = round(value / scale) + zero                 value ≈ (data - zero) × scale

Scales in float8_e4m3fn are quantised too: with `tensor_scale = amax of all / (largest × 448)`, the stored scales are
`scale / tensor_scale`.

XLA may compute a division by a constant or by a broadcast scale as a product with the reciprocal, which may round a tie
differently. The functions here always multiply by float32 reciprocals: on the CPU, the bits are the same with and
without `jit`.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from ragged.core.errors import Site, broadcasts, check_flag, is_arraylike, is_concrete
from ragged.core.formats import ASYMMETRIC, FORMATS, LARGEST, AnyArray
from ragged.core.mesh import over_explicit_axes
from ragged.core.offsets import aligned_to_blocks
from ragged.core.rows import spread_rows
from ragged.core.scaling import Scaling, not_differentiable
from ragged.tensor.base import (
    check_has_groups,
    element_scales,
    element_zeros,
    float_scales,
    is_read_transposed,
    with_fields,
)
from ragged.tensor.tensor import GroupedTensor


@over_explicit_axes
def quantize(
    x: GroupedTensor | AnyArray,
    dtype: DTypeLike | None,
    scaling: Any,
    *,
    power_of_two: bool = False,
    scale: Float[AnyArray, "..."] | float | None = None,
    symmetric: bool = True,
) -> GroupedTensor:
    """Quantises a tensor to `dtype`, with one scale per block of elements.

    A scale is `amax / largest`: the largest absolute value in a block is mapped to the largest value of `dtype`. A
    block of zeros has the scale 1. The tail is ignored.

    **Arguments:**

    - `x`: a `GroupedTensor`, or a uniform array `[g, first, *more, last]`, of floats of 16 bits or more.
    - `dtype`: float8_e4m3fn, float8_e5m2, float4_e2m1fn, int8 or int4; uint8 or uint4 if not `symmetric`.
    - `scaling`: which elements share a scale: `"tensor"`, `"group"`, `"row"`, `"column"`, a block such as `(1, 128)`,
      `"mx"` (blocks of 32 with 8-bit power-of-two scales), `"nvfp4"` (blocks of 16 with float8_e4m3fn scales, and a
      float32 scale for the tensor) or a `Scaling`. Blocks of `"mx"` and `"nvfp4"` are along the last dim: if `matmul`
      contracts the first dim of `x`, as for `rhs`, quantise `x.mT` and pass the result's `mT`.
    - `power_of_two`: rounds scales up to powers of two, so that multiplying by them is exact and all elements stay in
      range (as in NVIDIA's MXFP8 recipe, arXiv:2506.08027; the OCP specification rounds down).
    - `scale`: given scales, such as calibrated ones: a number, or an array that broadcasts to the shape of the scales.
      With float8_e4m3fn scales, it is the scale of the whole tensor, `()`. Elements beyond ± `scale * largest`
      saturate. Scales are 2⁻¹²⁶ to 2¹²⁶. If a traced scale is outside of this range, its block becomes NaN.
      For a known largest absolute value `amax`, pass `amax / largest`, or with float8_e4m3fn scales
      `amax / (largest * 448)`: here `largest` is 448 for float8_e4m3fn, 57344 for float8_e5m2, 6 for float4_e2m1fn,
      127 for int8 and 7 for int4.
    - `symmetric`: if False, each block has a zero point, `GroupedTensor.zero_points`, in `dtype`. The range from the
      smallest to the largest element of a block, extended to 0, is then mapped to all values of `dtype`, an integer
      dtype, and 0 stays exact. The scales must be float32 or powers of two in float32, and can't be given.

    If `dtype` or `scaling` is None, `x` is returned unquantised, as a `GroupedTensor`.

    **Returns:** a `GroupedTensor` of `dtype` with `scales` and `scaling`, and zeros in the tail. Its `dequantize()`
    differs from `x` by at most half a unit in the last place of `dtype`, times the scale, except where elements
    saturate.

    Scales in float8_e4m3fn are rounded to the nearest value, as in NVIDIA's NVFP4 recipe: the largest elements of a
    block may then saturate, by up to a 16th of their size (in float4_e2m1fn, by less than half a unit). Scales below
    2⁻⁶, the smallest normal number, become 2⁻⁶.

    Only finite elements determine a scale. float8_e5m2 keeps infinity and NaN. In float8_e4m3fn, infinity becomes NaN.
    float4_e2m1fn and integers have neither: infinity or NaN makes the scale and its whole block NaN (with `"tensor"`,
    the whole tensor).

    **Raises:** `TypeError` if `x` is not a tensor of floats or `dtype` isn't supported, `ValueError` if `x` can't have
    the scaling. Differentiating it by `x` or `scale` raises a `TypeError`: see `recipe` in `ragged.matmul`.

    !!! example
        ```python
        import jax, jax.numpy as jnp
        import ragged
        w = jax.random.normal(jax.random.key(0), (4, 256, 128))
        q = ragged.quantize(w, jnp.float8_e4m3fn, (128, 128))
        assert q.scales.shape == (4, 2, 1)
        assert jnp.max(jnp.abs(q.dequantize().data - w)) < 0.2
        ```
    """
    site = Site("ragged.quantize", {"x": x})
    tensor = _operand(site, x)
    if dtype is None or scaling is None:
        return tensor
    check_flag(site, "symmetric", symmetric)
    name = dtype_name(dtype, "ragged.quantize", LARGEST if symmetric else ASYMMETRIC, ASYMMETRIC)
    scaling = Scaling.of(scaling)
    if tensor.is_quantized:
        site.fail(TypeError, "`x` is already quantised.", "Pass `x.dequantize()` to quantise it again.")
    check_floats(site, "x", tensor.data)
    check_flag(site, "power_of_two", power_of_two)
    if not symmetric and (scale is not None or scaling.dtype != jnp.float32):
        given = "`scale` is given" if scale is not None else f"the scales are {scaling.dtype.name}"
        hint = "Quantise with a scaling of float32. If scales and zero points are known, pass them to `GroupedTensor`."
        site.fail(ValueError, f"{given}, but `symmetric` is False.", hint)
    given = None if scale is None else not_differentiable(site.call, checked_scale(site, scale, tensor, scaling))
    if is_read_transposed(tensor):
        given = given.mT if given is not None and given.ndim > 1 else given
        return quantize(tensor.mT, name, scaling.mT, power_of_two=power_of_two, scale=given, symmetric=symmetric).mT
    tensor = tensor.with_data(not_differentiable(site.call, jnp.asarray(tensor.data)))
    if not symmetric:
        return _with_zero_points(tensor, name, scaling, power_of_two)
    return _rounded(tensor, given, name, scaling, power_of_two)


@jax.jit(static_argnums=(1, 2, 3), inline=True)
def _with_zero_points(x: GroupedTensor, name: str, scaling: Scaling, power_of_two: bool) -> GroupedTensor:
    data, (first, last) = jnp.asarray(x.data), ASYMMETRIC[name]
    below, above = (amax(x.with_data(bound(data, 0)), scaling) for bound in (jnp.minimum, jnp.maximum))
    # Half of the range: the whole may overflow.
    scales = scale_of(below / 2 + above / 2, (last - first) / 2, power_of_two)
    zeros = jnp.clip(jnp.round(first + below * (1 / scales)), first, last)
    return divided(x, name, scaling, scales, zeros=zeros)


@jax.jit(static_argnums=(2, 3, 4), inline=True)  # Outside of `jit`, XLA compiles one program instead of forty.
def _rounded(x: GroupedTensor, scale: Any, name: str, scaling: Scaling, power_of_two: bool) -> GroupedTensor:
    if scale is None or scaling.has_tensor_scale:
        return divided(x, name, scaling, *scales_of(amax(x, scaling), name, scaling, power_of_two, scale))
    rounded = _rounded_up(scale, power_of_two or scaling.dtype == jnp.float8_e8m0fnu)
    shape = scaling.shape(x.shape, x.packed_axis, x.num_groups)
    return divided(x, name, scaling, jnp.broadcast_to(rounded, shape))


def _rounded_up(scale: Array, power_of_two: bool) -> Array:
    """Given scales, with `power_of_two` rounded up to powers of two. NaN stays NaN."""
    return jnp.where(jnp.isnan(scale), jnp.nan, scale_of(scale, 1.0, power_of_two))


def checked_scale(site: Site, scale: Any, x: GroupedTensor, scaling: Scaling) -> Array:
    """A given `scale` in float32: a number, or an array with all axes of the scales of `x`. Raises unless it holds
    floats that broadcast to these.

    If a scale is out of range, this raises for concrete scales; traced ones become NaN.
    """
    if not is_arraylike(scale) and (isinstance(scale, bool) or not isinstance(scale, int | float | np.number)):
        hint = "Pass a number, or an array that broadcasts to the scales."
        site.also(scale=scale).fail(TypeError, "`scale` is not an array.", hint)
    if is_arraylike(scale) and not jnp.issubdtype(scale.dtype, jnp.floating):
        hint = "Cast it: `scale.astype(jnp.float32)`."
        site.also(scale=scale).fail(TypeError, f"`scale` has dtype {scale.dtype.name}.", hint)
    want = () if scaling.has_tensor_scale else scaling.shape(x.shape, x.packed_axis, x.num_groups)
    shape = jnp.shape(scale)
    if not broadcasts(shape, want):
        what = "scale of the tensor" if scaling.has_tensor_scale else "scales"
        problem = f"`scale` has shape {shape}, but the {what} of {scaling} {'has' if not want else 'have'} {want}."
        site.also(scale=scale).fail(ValueError, problem, "Pass a number, or an array that broadcasts to this shape.")
    if is_concrete(scale) or not is_arraylike(scale):
        check_range(site.also(scale=scale), "scale", scale, scaling)
    axes = (1,) * (len(want) - len(shape)) if shape else ()
    scale = jnp.asarray(scale, jnp.float32).reshape(*axes, *shape)
    return jnp.where((scale >= _lowest_scale(scaling)) & (scale <= 1 / _TINY), scale, jnp.nan)


def _lowest_scale(scaling: Scaling) -> float:
    """The lowest scale; or, of a tensor, the lowest whose product with the smallest scale is a normal number."""
    return _TINY / float(jnp.finfo(scaling.dtype).tiny) if scaling.has_tensor_scale else _TINY


def check_range(site: Site, name: str, scale: Any, scaling: Scaling) -> None:
    """Raises unless scales are in the range of `scaling`: they and their reciprocals are normal float32 numbers."""
    lowest = _lowest_scale(scaling)
    if not np.all((np.asarray(scale) >= lowest) & (np.asarray(scale) <= 1 / _TINY)):
        hint = f"Scales are {lowest:.1e} to {1 / _TINY:.1e}: they and their reciprocals are normal float32 numbers."
        site.fail(ValueError, f"`{name}` is out of range.", hint)


def check_floats(site: Site, name: str, x: Any) -> None:
    """Raises unless `x` is an array of floats of 16 bits or more. `name`: what an error calls it."""
    if not is_arraylike(x):
        site.fail(TypeError, f"`{name}` is not an array.", "Pass a `GroupedTensor` or an array.")
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.dtype(x.dtype).itemsize == 1:
        problem = f"`{name}` has dtype {jnp.dtype(x.dtype).name}."
        site.fail(TypeError, problem, "Cast it to a float dtype of 16 bits or more.")


def _operand(site: Site, x: GroupedTensor | AnyArray) -> GroupedTensor:
    """`x` as a `GroupedTensor`. Raises for a stack, an array of fewer than 3 dims, and anything but arrays."""
    if isinstance(x, GroupedTensor):
        if not all(is_arraylike(leaf) for leaf in jax.tree.leaves(x)) or x.data is None:
            site.fail(TypeError, "`x` holds no array.", "Pass a `GroupedTensor` of arrays.")
        if x.is_cotangent:
            check_has_groups(x)
        if x.is_stack:
            hint = 'Map over it, as in `jax.vmap(lambda x: ragged.quantize(x, "int8", "row"))(x)`.'
            site.fail(ValueError, "`x` has a batch axis.", hint)
        return x
    if not is_arraylike(x):
        site.fail(TypeError, "`x` is not an array.", "Pass a `GroupedTensor` or an array of 3 dims or more.")
    if x.ndim < 3:
        hint = "A plain array is uniform, [g, first, last]. A single matrix is one group: `x[None]`."
        site.fail(ValueError, f"`x` is a plain array with {x.ndim} dims.", hint)
    return GroupedTensor(jnp.asarray(x))


def dtype_name(
    dtype: Any, call: str, names: Collection[str] = tuple(LARGEST), if_asymmetric: Collection[str] = ()
) -> str:
    """The name of `dtype`; raises a `TypeError` unless it is one of `names`.

    `if_asymmetric`: names that the call allows with `symmetric=False`, for the hint.
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in names:
        hint = f"Pass one of {', '.join(names)}." + " Or `symmetric=False`." * (name in if_asymmetric)
        Site(call).fail(TypeError, f"can't quantise to {name}.", hint)
    return name


def amax(x: GroupedTensor, scaling: Scaling) -> Array:
    """The largest absolute value of each block's finite elements, float32, in the shape of the scales.

    With blocks of several rows or columns, `x` must not be `is_read_transposed`.
    """
    data = jnp.asarray(x.data)
    magnitude = jnp.where(jnp.isfinite(data), jnp.abs(data), 0)
    if data.dtype == jnp.float64:  # The cast below would make numbers beyond float32's range infinite.
        magnitude = jnp.minimum(magnitude, float(jnp.finfo(jnp.float32).max))
    if x.packed_axis is not None:
        magnitude = jnp.where(x.mask, magnitude, 0)
    magnitude = magnitude.astype(jnp.float32)
    if scaling.block is None:
        return jnp.max(magnitude, initial=0)
    return _max_of_blocks(magnitude, x, scaling.block).reshape(scaling.shape(x.shape, x.packed_axis, x.num_groups))


def _max_of_blocks(magnitude: Array, x: GroupedTensor, block: tuple[int | None, int | None]) -> Array:
    """The largest element of each block of `magnitude`: the absolute values of `x`, with zeros in the tail.

    Blocks don't extend over the dims between a group's first and last dim, unless a block is a whole group.
    """
    inner = 2 if x.packed_axis is None else 1
    if magnitude.ndim > inner + 1:
        if block == (None, None):
            return _max_of_blocks(jnp.max(magnitude, axis=inner, initial=0), x, block)
        return jax.vmap(partial(_max_of_blocks, x=x, block=block), inner, inner)(magnitude)
    first, last = block
    out = _block_max(magnitude, last, -1)
    if x.packed_axis is None:
        out = _block_max(out, first, -2)
    elif first is None:
        out = jax.ops.segment_max(out, x.group_ids, x.num_groups + 1, indices_are_sorted=True)[:-1]
        out = jnp.maximum(out, 0)  # The maximum of an empty group is -inf.
    elif first > 1:  # [rows, blocks of a row] -> [blocks of rows, blocks of a row]
        source, places, _ = aligned_to_blocks(x.packed_dims, out.shape[-2], first)
        out = _block_max(spread_rows(out, source, places), first, -2)
    return out


def _block_max(x: Array, block: int | None, axis: int) -> Array:
    """The largest element of each `block` elements along `axis`, or of the whole axis for None."""
    if block is None:
        return jnp.max(x, axis=axis, keepdims=True, initial=0)
    count = -(-x.shape[axis] // block)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, count * block - x.shape[axis])
    shape = list(x.shape)
    shape[axis : axis + 1 or None] = [count, block]  # `axis` is negative; for -1, the slice has no end.
    return jnp.max(jnp.pad(x, pad).reshape(shape), axis=axis, initial=0)


def scales_of(
    largest: Array, name: str, scaling: Scaling, power_of_two: bool, tensor_scale: Array | None = None
) -> tuple[Array, Array | None]:
    """`(scales, tensor_scale)` of blocks with these largest absolute values, in float32.

    `tensor_scale` is None if the scaling has no scale for the tensor. Otherwise it is the given one, or it is computed
    from the largest values.
    """
    if not scaling.has_tensor_scale:
        return scale_of(largest, LARGEST[name], power_of_two or scaling.dtype == jnp.float8_e8m0fnu), None
    smallest_scale = float(jnp.finfo(scaling.dtype).tiny)
    # The largest power of two in float8_e4m3fn, or its largest value.
    largest_scale = 256.0 if power_of_two else LARGEST[scaling.dtype.name]
    if tensor_scale is None:
        target = LARGEST[name] * largest_scale
        tensor_scale = scale_of(jnp.max(largest, initial=0), target, power_of_two, _lowest_scale(scaling))
    else:
        tensor_scale = _rounded_up(tensor_scale, power_of_two)
    scales = scale_of(largest * (1 / tensor_scale), LARGEST[name], power_of_two)
    return jnp.clip(scales, smallest_scale, largest_scale), tensor_scale


_TINY = float(jnp.finfo(jnp.float32).tiny)


def scale_of(largest: Array, target: float, power_of_two: bool, smallest_scale: float = _TINY) -> Array:
    """Scales that map these absolute values to `target`: float32, at least `smallest_scale`, and 1 for the value 0;
    with `power_of_two`, rounded up to powers of two."""
    scale = jnp.maximum(largest * np.float32(1 / target), np.float32(smallest_scale))
    if power_of_two:
        mantissa, exponent = jnp.frexp(scale)  # The mantissa is in [0.5, 1).
        scale = jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))
    return jnp.where(largest > 0, scale, 1)


def int8_rows(x: Array) -> tuple[Array, Array]:
    """`(data, scales)` of `quantize(x, "int8", "row")` for rows `[..., rows, k]` of at most 32 bits, in few operations:
    kernels also call it."""
    x = x.astype(jnp.float32)
    # As integers, the bits of absolute values have the values' order, with infinity and NaN above all numbers.
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    largest = lax.bitcast_convert_type(jnp.max(bits, axis=-1, keepdims=True, initial=0), jnp.float32)
    scales = jnp.where(jnp.isfinite(largest), scale_of(largest, LARGEST["int8"], False), jnp.nan)
    return jnp.round(x * (1 / scales)).astype(jnp.int8), scales


def divided(
    x: GroupedTensor,
    name: str,
    scaling: Scaling,
    scales: Array,
    tensor_scale: Array | None = None,
    zeros: Array | None = None,
) -> GroupedTensor:
    """`x / scales + zeros` in the dtype `name`. Finite values out of its range become its largest or smallest value."""
    data = jnp.asarray(x.data)
    if not FORMATS[name].has_nan:  # The dtype can't hold NaN, so the block's scale becomes NaN.
        has_nonfinite = amax(x.with_data((~jnp.isfinite(data)).astype(jnp.float32)), scaling)
        scales = jnp.where(has_nonfinite > 0, jnp.nan, scales)
    zero_points = None if zeros is None else zeros.astype(name)
    fields = {"scaling": scaling, "tensor_scale": tensor_scale, "zero_points": zero_points}
    quantized = with_fields(x, scales=scales.astype(scaling.dtype), **fields)
    dtype = jnp.float64 if data.dtype == jnp.float64 else jnp.float32
    # `element_scales` repeats the reciprocals for each element.
    inverse = with_fields(x, scales=1 / float_scales(quantized), scaling=Scaling(scaling.block))
    data = data.astype(dtype) * element_scales(inverse).astype(dtype)
    if name in ASYMMETRIC:
        data = jnp.round(data)
    first, last = (-LARGEST[name], LARGEST[name]) if zeros is None else ASYMMETRIC[name]
    if zeros is not None:
        data = data + element_zeros(quantized).astype(dtype)
    data = jnp.where(jnp.isfinite(data), jnp.clip(data, first, last), data)
    if x.packed_axis is not None:
        data = jnp.where(x.mask, data, 0)
    return quantized.with_data(data.astype(name))
