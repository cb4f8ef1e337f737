"""`Scaling`: which elements of a quantised tensor share a scale, and the shape of the scales.

    value = data × scale, or (data - zero point) × scale

Each block of elements has one scale. Blocks tile each group from its first element on. So, except with "tensor", all
elements of a block belong to one group:

    scaling      block          scales of ragged rows [m, k]   of uniform [g, k, n]
    "tensor"     everything     ()                             ()
    "group"      (None, None)   (g,)                           (g,)
    "row"        (1, None)      (m, 1)                         (g, k, 1)
    "column"     (None, 1)      (g, k)                         (g, 1, n)
    (1, 128)     (1, 128)       (m, ceil(k / 128))             (g, k, ceil(n / 128))
    "mx"         (1, 32)        (m, ceil(k / 32))              (g, k, ceil(n / 32))
    "nvfp4"      (1, 16)        (m, ceil(k / 16))              (g, k, ceil(n / 16))
    (32, 1)      (32, 1)        ((m + 31 g) // 32, k)          (g, ceil(k / 32), n)

None is a group's whole extent. Along a ragged dim, the last block of a group ends with the group, and the number of
scales is the maximum number of blocks that `m` rows can form in `g` groups. For ragged columns, blocks and shapes are
transposed. If both dims are ragged, shapes are as if only the packed dim were.

Along dims between a group's first and last dim, blocks have extent 1, except with "group" and "tensor", whose blocks
contain these dims: with "row", the scales of `[m, heads, k]` are `(m, heads, 1)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import AbstractDtype

from ragged.core.errors import Site, is_count
from ragged.core.formats import as_array
from ragged.core.offsets import max_blocks
from ragged.core.scales import Scales

SCALE_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float8_e8m0fnu), jnp.dtype(jnp.float8_e4m3fn))


if TYPE_CHECKING:
    from typing import Annotated as Float4e2m1fn
    from typing import Annotated as Float8e8m0fnu
else:

    class Float4e2m1fn(AbstractDtype):
        """Annotates arrays of 4-bit floats, as `Float4e2m1fn[GroupedTensor, "m k"]`."""

        dtypes = ["float4_e2m1fn"]  # noqa: RUF012

    class Float8e8m0fnu(AbstractDtype):
        """Annotates arrays of power-of-two scales, as `Float8e8m0fnu[Array, "m blocks"]`."""

        dtypes = ["float8_e8m0fnu"]  # noqa: RUF012


@dataclass(frozen=True)
class Scaling:
    """Which elements of a tensor share a scale.

    - `block`: a pair, the extents of a block along a group's first and last dim. None in the pair is the group's whole
      extent; None in place of the pair means one scale for all groups.
    - `dtype`: the dtype of the scales. float32; float8_e8m0fnu (8 bits, powers of two from 2⁻¹²⁷ to 2¹²⁷); or
      float8_e4m3fn (8 bits, from 2⁻⁶ to 448), whose scales are multiplied by one float32 scale for the whole tensor,
      `GroupedTensor.tensor_scale`.

    `Scaling.of` has the names `"tensor"`, `"group"`, `"row"`, `"column"`; `"mx"`, blocks of 32 with float8_e8m0fnu
    scales (OCP Microscaling formats v1.0, 2023); and `"nvfp4"`, blocks of 16 with float8_e4m3fn scales (NVIDIA's NVFP4,
    arXiv:2509.25149).

    **Raises:** `ValueError` for an invalid block, `TypeError` for an invalid dtype.
    """

    block: tuple[int | None, int | None] | None
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        block, dtype = self.block, self.dtype
        is_pair = isinstance(block, Sequence) and not isinstance(block, str) and len(block) == 2
        if block is not None and not (is_pair and all(b is None or is_count(b) for b in block)):
            hint = "It must be a pair of extents, such as `(1, 128)` or `(1, None)`. Each is a positive int, or None "
            hint += "for a group's whole extent. `None` in place of the pair means one scale for all groups."
            Site("ragged.Scaling").fail(ValueError, f"`block` is {block!r}.", hint)
        try:
            dtype = jnp.dtype(dtype)
        except TypeError:
            dtype = None
        if dtype not in SCALE_DTYPES:
            hint = "Pass float32, float8_e8m0fnu (powers of 2), or float8_e4m3fn (with a float32 tensor scale)."
            problem = f"scales can't have the dtype {getattr(dtype, 'name', repr(self.dtype))}."
            Site("ragged.Scaling").fail(TypeError, problem, hint)
        if block is not None:
            object.__setattr__(self, "block", tuple(None if b is None else int(b) for b in block))
        object.__setattr__(self, "dtype", dtype)

    @classmethod
    def of(cls, scaling: "str | Sequence[int | None] | Scaling") -> "Scaling":
        """The `Scaling` with this name or block; a `Scaling` unchanged."""
        if isinstance(scaling, Scaling):
            return scaling
        if isinstance(scaling, str) and scaling in NAMED:
            return NAMED[scaling]
        if isinstance(scaling, str) or not isinstance(scaling, Sequence):
            hint = f"Pass one of {', '.join(map(repr, NAMED))}, a block such as `(1, 128)`, or a `Scaling`."
            Site("ragged.Scaling").fail(ValueError, f"{scaling!r} isn't a scaling.", hint)
        return cls(tuple(scaling))  # pyright: ignore[reportArgumentType]: checked to be a pair

    @property
    def has_tensor_scale(self) -> bool:
        """Whether there is also one scale for the whole tensor."""
        return self.dtype == jnp.float8_e4m3fn

    @property
    def mT(self) -> "Scaling":
        """The scaling of the transposed groups."""
        return self if self.block is None else Scaling((self.block[1], self.block[0]), self.dtype)

    def __str__(self) -> str:
        for name, scaling in NAMED.items():
            if scaling == self:
                return name
        return f"{self.block}" if self.dtype == jnp.float32 else f"{self.block} of {self.dtype.name}"

    def shape(self, buffer: tuple[int, ...], packed_axis: int | None, num_groups: int) -> tuple[int, ...]:
        """The shape of the scales of a tensor whose buffer has the shape `buffer`."""
        if self.block is None:
            return ()
        if self.block == (None, None):
            return (num_groups,)
        group = buffer[1:] if packed_axis is None else buffer
        block = self.block[0], *[1] * (len(group) - 2), self.block[1]
        extents = [1 if b is None else -(-n // b) for n, b in zip(group, block, strict=True)]
        if packed_axis is None:
            return (num_groups, *extents)
        rows = block[packed_axis]  # columns of a block, if columns are packed
        extents[packed_axis] = num_groups if rows is None else max_blocks(buffer[packed_axis], num_groups, rows)
        return tuple(extents)


NAMED = {
    "tensor": Scaling(None),
    "group": Scaling((None, None)),
    "row": Scaling((1, None)),
    "column": Scaling((None, 1)),
    "mx": Scaling((1, 32), jnp.float8_e8m0fnu),
    "nvfp4": Scaling((1, 16), jnp.float8_e4m3fn),
}


def not_differentiable_8_bits(call: str, x: Any) -> Array:
    """`x`. Differentiating it raises if it holds 8- or 4-bit floats: cotangents would have as few bits."""
    x = as_array(x)
    return not_differentiable(call, x) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1 else x


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def not_differentiable(call: str, x: Array) -> Array:
    """`x`. Differentiating with respect to it raises."""
    return x


@not_differentiable.defjvp
def _no_derivative(call: str, primals: Any, tangents: Any) -> Any:
    (x,) = primals
    Site(call, {"operand": x}).fail(
        TypeError,
        "it is differentiated with respect to a quantised operand or its scales.",
        "Rounding has no useful derivative. To train, pass the operand unquantised to `ragged.matmul` with a `recipe`: "
        "then the gradient is straight-through. To keep it constant, quantise `jax.lax.stop_gradient(x)`.",
    )


def stored_scales(
    scaling: Scaling,
    scales: Array,
    tensor_scale: Array | None,
    zero_points: Array | None,
    packed_axis: int | None,
    num_groups: int,
    is_read_transposed: bool,
) -> Scales:
    """The `Scales` of a tensor's stored buffer, in the dtype of `scales`. Zero points of 4 bits become 8 bits.

    One scale per group, or one for all groups, becomes `[g, 1]`, or `[g, 1, 1]` for a uniform tensor. If
    `is_read_transposed`, the buffer is stored transposed, and so are the scales.
    """
    block = scaling.block or (None, None)

    def with_axes(values: Array) -> Array:
        if block != (None, None):
            return values
        last = (1, 1) if packed_axis is None else (1,)
        column = values if values.ndim else jnp.broadcast_to(values, (num_groups,))
        values = column.reshape(num_groups, *last)
        return values.mT if packed_axis == -1 else values

    zeros = zero_points
    if zeros is not None and jnp.issubdtype(zeros.dtype, jnp.floating):
        zeros = zeros.astype(jnp.float32)
    elif zeros is not None and jnp.iinfo(zeros.dtype).bits < 8:
        zeros = zeros.astype(jnp.int8 if jnp.issubdtype(zeros.dtype, jnp.signedinteger) else jnp.uint8)
    out = Scales(scales, block, scaling.dtype == jnp.float8_e8m0fnu, zeros=zeros).map(with_axes)
    tensor = None if tensor_scale is None else tensor_scale.reshape(-1, *[1] * (out.values.ndim - 1))
    out = replace(out, tensor=tensor)
    return out.mT if is_read_transposed else out
