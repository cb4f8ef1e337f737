"""`Scaling`: which elements of a quantised tensor share a scale, and where that scale stands.

    value = data × scale

An element's scale is that of its block. Blocks tile each group from its first element on, so none straddles two groups:

    scaling      block          scales of ragged rows [m, k]   of uniform [g, k, n]
    "tensor"     everything     ()                             ()
    "group"      (None, None)   (g,)                           (g,)
    "row"        (1, None)      (m, 1)                         (g, k, 1)
    "column"     (None, 1)      (g, k)                         (g, 1, n)
    (1, 128)     (1, 128)       (m, ceil(k / 128))             (g, k, ceil(n / 128))
    "mx"         (1, 32)        (m, ceil(k / 32))              (g, k, ceil(n / 32))
    "nvfp4"      (1, 16)        (m, ceil(k / 16))              (g, k, ceil(n / 16))
    (32, 1)      (32, 1)        ((m + 31 g) // 32, k)          (g, ceil(k / 32), n)

None is a group's whole extent. Along a ragged dim, a group's last block ends with the group, and the next group's first
comes next: there are as many as `m` rows can have in `g` groups. Ragged columns have the transposes of these; tensors
that are ragged in both dims have those of ragged rows, with `k` the columns of the buffer.

More dims between a group's first and last have blocks of one: "row" gives `[m, heads, k]` scales `(m, heads, 1)`. But
"group" and "tensor" are for all dims.

Scales in float8_e4m3fn are of two levels: all are multiplied by one float32 more, the tensor's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import AbstractDtype

from ragged._errors import Site, is_count
from ragged.backends.schedule import most_blocks
from ragged.product.operands import Scales

SCALE_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float8_e8m0fnu), jnp.dtype(jnp.float8_e4m3fn))


if TYPE_CHECKING:
    from typing import Annotated as Float4e2m1fn
    from typing import Annotated as Float8e8m0fnu
else:

    class Float4e2m1fn(AbstractDtype):
        """Annotates arrays of 4-bit floats, as `Float4e2m1fn[GroupedTensor, "m k"]`. jaxtyping has none."""

        dtypes = ["float4_e2m1fn"]  # noqa: RUF012

    class Float8e8m0fnu(AbstractDtype):
        """Annotates arrays of power-of-two scales, as `Float8e8m0fnu[Array, "m blocks"]`. jaxtyping has none."""

        dtypes = ["float8_e8m0fnu"]  # noqa: RUF012


@dataclass(frozen=True)
class Scaling:
    """Which elements of a tensor share a scale. Static: it says shapes, and holds no arrays.

    - `block`: how many elements along a group's first and last dim share one, None for all of them within the group.
      `None` in place of the pair: all groups share one.
    - `dtype`: of the scales. float32; float8_e8m0fnu: 8 bits, powers of two from 2⁻¹²⁷ to 2¹²⁷; or float8_e4m3fn: 8
      bits, from 2⁻⁶ to 448, times one float32 for the whole tensor, `GroupedTensor.tensor_scale`.

    `Scaling.of` knows the common ones by name: `"tensor"`, `"group"`, `"row"`, `"column"`; `"mx"`, the blocks of 32
    with float8_e8m0fnu scales of the OCP Microscaling formats (v1.0, 2023); and `"nvfp4"`, the blocks of 16 with
    float8_e4m3fn scales of NVIDIA's NVFP4 (arXiv:2509.25149).

    **Raises:** `TypeError` or `ValueError` for what is no block or no dtype of scales.
    """

    block: tuple[int | None, int | None] | Any
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        block, dtype = self.block, self.dtype
        pair = isinstance(block, Sequence) and not isinstance(block, str) and len(block) == 2
        if block is not None and not (pair and all(b is None or is_count(b) for b in block)):
            mend = "It must be two extents, each a positive int, or None for a group's whole extent: `(1, 128)`, "
            mend += "`(1, None)`. Or None for one scale for all groups."
            Site("ragged.Scaling").fail(ValueError, f"`block` is {block!r}.", mend)
        try:
            dtype = jnp.dtype(dtype)
        except TypeError:
            dtype = None
        if dtype not in SCALE_DTYPES:
            mend = "They are float32, float8_e8m0fnu (powers of 2), or float8_e4m3fn (times one for the tensor)."
            Site("ragged.Scaling").fail(TypeError, f"scales of dtype {getattr(dtype, 'name', repr(self.dtype))}.", mend)
        if block is not None:
            object.__setattr__(self, "block", tuple(None if b is None else int(b) for b in block))
        object.__setattr__(self, "dtype", dtype)

    @classmethod
    def of(cls, scaling: "str | Sequence[int | None] | Scaling | Any") -> "Scaling":
        """The scaling of a name or of a block; a `Scaling` as it is."""
        if isinstance(scaling, Scaling):
            return scaling
        if isinstance(scaling, str) and scaling in NAMED:
            return NAMED[scaling]
        if isinstance(scaling, str) or scaling is None or not isinstance(scaling, Sequence):
            mend = f"Pass one of {', '.join(map(repr, NAMED))}, a block such as `(1, 128)`, or a `Scaling`."
            Site("ragged.Scaling").fail(ValueError, f"{scaling!r} is no scaling.", mend)
        return cls(scaling)

    @property
    def _has_tensor_scale(self) -> bool:
        """Whether there are two levels: one float32 for the whole tensor times the scales."""
        return self.dtype == jnp.float8_e4m3fn

    @property
    def mT(self) -> "Scaling":
        """That of the transposed groups."""
        return self if self.block is None else Scaling((self.block[1], self.block[0]), self.dtype)

    def __str__(self) -> str:
        for name, scaling in NAMED.items():
            if scaling == self:
                return name
        return f"{self.block}" if self.dtype == jnp.float32 else f"{self.block} of {self.dtype.name}"

    def shape(self, buffer: tuple[int, ...], packed_axis: int | None, num_groups: int) -> tuple[int, ...]:
        """The shape of the scales of a tensor whose buffer has this shape."""
        if self.block is None:
            return ()
        if self.block == (None, None):
            return (num_groups,)
        own = buffer[1:] if packed_axis is None else buffer
        block = self.block[0], *[1] * (len(own) - 2), self.block[1]
        extents = [1 if b is None else -(-n // b) for n, b in zip(own, block, strict=True)]
        if packed_axis is None:
            return (num_groups, *extents)
        along = block[packed_axis]
        extents[packed_axis] = num_groups if along is None else most_blocks(buffer[packed_axis], num_groups, along)
        return tuple(extents)

    def _for_kernels(
        self, scales: Array, of_tensor: Array | None, packed_axis: int | None, num_groups: int, flipped: bool
    ) -> Scales:
        """The scales as kernels take them: with all axes, and transposed where the buffer is `flipped`."""
        values, block = scales if self._has_tensor_scale else scales.astype(jnp.float32), self.block or (None, None)
        if block == (None, None):
            last = (1, 1) if packed_axis is None else (1,)
            column = values if values.ndim else jnp.broadcast_to(values, (num_groups,))
            values = column.reshape(num_groups, *last)
            values = values.mT if packed_axis == -1 else values
        level = None if of_tensor is None else of_tensor.reshape((1,) * values.ndim)
        given = Scales(values, block, self.dtype == jnp.float8_e8m0fnu, level)
        return given.mT if flipped else given


NAMED = {
    "tensor": Scaling(None),
    "group": Scaling((None, None)),
    "row": Scaling((1, None)),
    "column": Scaling((None, 1)),
    "mx": Scaling((1, 32), jnp.float8_e8m0fnu),
    "nvfp4": Scaling((1, 16), jnp.float8_e4m3fn),
}


def eight_bits_fixed(call: str, x: Any) -> Array:
    """`x`; if it holds floats of 8 or 4 bits, whose cotangent would have as few, with an error for who asks for one."""
    x = jnp.asarray(x)
    return not_differentiable(call, x) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1 else x


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def not_differentiable(call: str, x: Array) -> Array:
    """`x`, with an error for whoever differentiates with respect to it."""
    return x


@not_differentiable.defjvp
def _no_derivative(call: str, primals: Any, tangents: Any) -> Any:
    (x,) = primals
    Site(call, {"operand": x}).fail(
        TypeError,
        "it is differentiated with respect to a quantised operand.",
        "Rounding has no useful derivative. To train, pass what isn't quantised to `ragged.matmul` with `recipe=`: its "
        "gradient is straight-through. To hold it fixed, quantise `jax.lax.stop_gradient(x)`.",
    )
