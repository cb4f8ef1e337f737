"""`quantize`: a tensor in 8 or 4 bits, with scales.

A block's scale maps its largest absolute value (amax) to the largest that the dtype holds:

    scale = amax / largest        data = round(value / scale)        value ≈ data × scale

Scales in float8_e4m3fn are quantised in turn, by tensor: with `tensor_scale = amax of all / (largest × 448)`, what is
stored is `scale / tensor_scale`.

XLA divides by constants and by broadcast scales as it likes: by a division, or by a product with the reciprocal, which
may round to the other side of a tie. Here both are products with float32 reciprocals, so that on the CPU the bits are
the same with `jit` and without.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ragged._errors import Site, is_arraylike
from ragged._mesh import over_explicit_axes
from ragged.backends import schedule
from ragged.quant.formats import FORMATS, LARGEST
from ragged.quant.scaling import Scaling, not_differentiable
from ragged.tensor.rows import spread_rows
from ragged.tensor.tensor import GroupedTensor


@over_explicit_axes
def quantize(
    x: GroupedTensor | Array | Any, dtype: Any, scaling: Any, *, power_of_two: bool | Any = False
) -> GroupedTensor:
    """Rounds a tensor to `dtype`, each block of it times a scale of its own.

    Scales are `amax / largest`: the largest absolute value of a block's elements becomes the largest one of `dtype`.
    The tail doesn't count, whatever it holds. A block of zeros has the scale 1.

    **Arguments:**

    - `x`: a `GroupedTensor`, or a uniform array `[g, first, *more, last]`, of floats.
    - `dtype`: float8_e4m3fn, float8_e5m2, float4_e2m1fn, int8 or int4.
    - `scaling`: which elements share a scale: `"tensor"`, `"group"`, `"row"`, `"column"`, a block such as `(1, 128)`,
      `"mx"` (blocks of 32 along the last dim with 8-bit power-of-two scales), `"nvfp4"` (blocks of 16 with
      float8_e4m3fn scales, and a float32 scale for the tensor) or a `Scaling`. Where `matmul` contracts `x`'s first
      dim, as it does `rhs`'s, quantise `x.mT` along its last dim and take the result's `mT`.
    - `power_of_two`: rounds scales up to powers of two, which are exact to multiply with. Up, so that no element leaves
      the dtype's range (as in NVIDIA's MXFP8 recipe, arXiv:2506.08027; the OCP specification rounds down).

    With None for `dtype` or `scaling` nothing is quantised: `x` comes back as a plain `GroupedTensor`.

    **Returns:** a `GroupedTensor` of `dtype` with `scales` and `scaling`, zeros in the tail. `x` is
    `dequantize()` of it, but for an error of at most half a unit in the last place of `dtype`, times the scale.

    Scales in float8_e4m3fn are rounded to the nearest, as NVIDIA's NVFP4 recipe has it, so that the largest elements of
    a block may saturate, by less than half a unit; and up to 2⁻⁶, the smallest that have all bits.

    Only finite elements count toward a scale. Infinity and NaN stay what they are in float8_e5m2; in float8_e4m3fn,
    which has no infinity, both are NaN. float4_e2m1fn and integers have neither: all of a block that holds one becomes
    NaN, by its scale, which with `"tensor"` are all groups.

    **Raises:** `TypeError` for what is no tensor of floats and for dtypes, `ValueError` for a scaling that `x` can't
    have. Differentiating it raises a `TypeError`: see `recipe` in `ragged.matmul` for training.

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
    name = dtype_name(dtype, "ragged.quantize")
    scaling = Scaling.of(scaling)
    if tensor.is_quantized:
        site.fail(TypeError, "`x` is quantised already.", "Take `x.dequantize()` to quantise it anew.")
    check_floats(site, "x", tensor.data)
    if not isinstance(power_of_two, bool):
        site.fail(TypeError, f"`power_of_two` is {power_of_two!r}.", "Pass True or False.")
    if tensor._is_flipped:
        return quantize(tensor.mT, name, scaling.mT, power_of_two=power_of_two).mT
    tensor = tensor._replace_data(not_differentiable("ragged.quantize", jnp.asarray(tensor.data)))
    return _rounded(tensor, name, scaling, power_of_two)


@jax.jit(static_argnums=(1, 2, 3), inline=True)  # one program where there would be forty
def _rounded(x: GroupedTensor, name: str, scaling: Scaling, power_of_two: bool) -> GroupedTensor:
    return cast(x, name, scaling, *scales_of(amax(x, scaling), name, scaling, power_of_two))


def check_floats(site: Site, name: str, x: Any) -> None:
    """Raises unless `x` is an array of floats of 16 bits or more."""
    if not is_arraylike(x):
        site.fail(TypeError, f"`{name}` is not an array.", "Pass a `GroupedTensor` or an array.")
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.dtype(x.dtype).itemsize == 1:
        problem = f"`{name}` has dtype {jnp.dtype(x.dtype).name}."
        site.fail(TypeError, problem, "Cast it to a float dtype of 16 bits or more.")


def _operand(site: Site, x: GroupedTensor | Array | Any) -> GroupedTensor:
    if isinstance(x, GroupedTensor):
        if not all(is_arraylike(leaf) for leaf in jax.tree.leaves(x)) or x.data is None:
            site.fail(TypeError, "`x` holds no array.", "Pass a `GroupedTensor` of arrays.")
        if x.is_cotangent:
            x._require_groups()
        if x.is_stack:
            mend = "Map over it: `jax.vmap(lambda x: ragged.quantize(x, dtype, scaling))(x)`."
            site.fail(ValueError, "`x` has a batch axis.", mend)
        return x
    if not is_arraylike(x):
        site.fail(TypeError, "`x` is not an array.", "Pass a `GroupedTensor` or an array of 3 dims or more.")
    if x.ndim < 3:
        mend = "A plain array is uniform, `[g, first, last]`. A single matrix is one group: `x[None]`."
        site.fail(ValueError, f"`x` is a plain array with {x.ndim} dims.", mend)
    return GroupedTensor(jnp.asarray(x))


def dtype_name(dtype: Any, call: str) -> str:
    """The name of a dtype to quantise to."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in LARGEST:
        Site(call).fail(TypeError, f"no quantising to {name}.", f"Pass one of {', '.join(LARGEST)}.")
    return name


def amax(x: GroupedTensor, scaling: Scaling) -> Array:
    """The largest absolute value of each block's finite elements, float32, in the shape of the scales.

    Blocks of several rows or columns only of a tensor that isn't flipped.
    """
    data = jnp.asarray(x.data)
    magnitude = jnp.where(jnp.isfinite(data), jnp.abs(data), 0)
    if data.dtype == jnp.float64:  # which may hold more than float32's largest
        magnitude = jnp.minimum(magnitude, float(jnp.finfo(jnp.float32).max))
    if x.packed_axis is not None:
        magnitude = jnp.where(x.mask, magnitude, 0)
    magnitude = magnitude.astype(jnp.float32)
    if scaling.block is None:
        return jnp.max(magnitude, initial=0)
    return _of_blocks(magnitude, x, scaling.block).reshape(scaling.shape(x.shape, x.packed_axis, x.num_groups))


def _of_blocks(magnitude: Array, x: GroupedTensor, block: tuple[int | None, int | None]) -> Array:
    """The largest of each block of `x`, all of which count. Dims between a group's first and last have blocks of
    their own, unless a block is the whole group."""
    inner = 2 if x.packed_axis is None else 1
    if magnitude.ndim > inner + 1:
        if block == (None, None):
            return _of_blocks(jnp.max(magnitude, axis=inner, initial=0), x, block)
        return jax.vmap(partial(_of_blocks, x=x, block=block), inner, inner)(magnitude)
    first, last = block
    out = _block_max(magnitude, last, -1)
    if x.packed_axis is None:
        out = _block_max(out, first, -2)
    elif first is None:
        ids, groups = x.group_ids, x.num_groups
        out = jax.ops.segment_max(out, ids, groups, indices_are_sorted=True)
        out = jnp.maximum(out, 0)  # an empty group's is -inf
    elif first > 1:  # [rows, blocks] -> [blocks, first, blocks]
        source, places, _ = schedule.in_blocks(x.packed_dims, out.shape[-2], first)
        out = _block_max(spread_rows(out, source, places), first, -2)
    return out


def _block_max(x: Array, block: int | None, axis: int) -> Array:
    """The largest of each block along an axis; the last block may be partial."""
    if block is None:
        return jnp.max(x, axis=axis, keepdims=True, initial=0)
    count = -(-x.shape[axis] // block)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, count * block - x.shape[axis])
    shape = list(x.shape)
    shape[axis : axis + 1 or None] = [count, block]
    return jnp.max(jnp.pad(x, pad).reshape(shape), axis=axis, initial=0)


def scales_of(largest: Array, name: str, scaling: Scaling, power_of_two: bool) -> tuple[Array, Array | None]:
    """The scales of blocks with these largest absolute values, and the tensor's, if there are two levels. float32."""
    if not scaling._has_tensor_scale:
        return scale_of(largest, LARGEST[name], power_of_two or scaling.dtype == jnp.float8_e8m0fnu), None
    least, most = float(jnp.finfo(scaling.dtype).tiny), 256.0 if power_of_two else LARGEST[scaling.dtype.name]
    # The tensor's is so large that its product with the least scale is a normal number.
    of_tensor = scale_of(jnp.max(largest, initial=0), LARGEST[name] * most, power_of_two, _TINY / least)
    scales = scale_of(largest * (1 / of_tensor), LARGEST[name], power_of_two)
    return jnp.clip(scales, least, most), of_tensor


_TINY = float(jnp.finfo(jnp.float32).tiny)


def scale_of(largest: Array, most: float, power_of_two: bool, least: float = _TINY) -> Array:
    """What maps these absolute values to `most`, or the next power of two; 1 for 0. float32, not below `least`."""
    scale = jnp.maximum(largest * np.float32(1 / most), np.float32(least))
    if power_of_two:
        mantissa, exponent = jnp.frexp(scale)  # the mantissa is in [0.5, 1)
        scale = jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))
    return jnp.where(largest > 0, scale, 1)


def cast(
    x: GroupedTensor, name: str, scaling: Scaling, scales: Array, tensor_scale: Array | None = None
) -> GroupedTensor:
    """`x / scales` in the dtype `name`. What is out of its range becomes the largest value, unless it is infinite."""
    data = jnp.asarray(x.data)
    if not FORMATS[name].has_nan:  # its scale has
        lost = amax(x._replace_data((~jnp.isfinite(data)).astype(jnp.float32)), scaling)
        scales = jnp.where(lost > 0, jnp.nan, scales)
    quantized = x._with(scales=scales.astype(scaling.dtype), scaling=scaling, tensor_scale=tensor_scale)
    wide = jnp.float64 if data.dtype == jnp.float64 else jnp.float32
    inverse = x._with(scales=1 / quantized._float_scales, scaling=Scaling(scaling.block))
    data = data.astype(wide) * inverse._element_scales().astype(wide)
    if name.startswith("int"):
        data = jnp.round(data)
    data = jnp.where(jnp.isfinite(data), jnp.clip(data, -LARGEST[name], LARGEST[name]), data)
    if x.packed_axis is not None:
        data = jnp.where(x.mask, data, 0)
    return quantized._replace_data(data.astype(name))
