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

None is a group's whole extent. Ragged columns have the transposes of these; tensors that are ragged in both dims have
those of ragged rows, with `k` the columns of the buffer.
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
from ragged.product.operands import Scales

SCALE_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float8_e8m0fnu))


if TYPE_CHECKING:
    from typing import Annotated as Float8e8m0fnu
else:

    class Float8e8m0fnu(AbstractDtype):
        """Annotates arrays of power-of-two scales, as `Float8e8m0fnu[Array, "m blocks"]`. jaxtyping has none."""

        dtypes = ["float8_e8m0fnu"]  # noqa: RUF012


@dataclass(frozen=True)
class Scaling:
    """Which elements of a tensor share a scale. Static: it says shapes, and holds no arrays.

    - `block`: how many elements along a group's first and last dim share one, None for all of them within the group.
      `None` in place of the pair: all groups share one.
    - `dtype`: of the scales. float32, or float8_e8m0fnu: 8 bits, powers of two from 2⁻¹²⁷ to 2¹²⁷.

    `Scaling.of` knows the common ones by name: `"tensor"`, `"group"`, `"row"`, `"column"`, and `"mx"`, the blocks of 32
    with float8_e8m0fnu scales of the OCP Microscaling formats (v1.0, 2023).

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
            mend = "They are float32, or float8_e8m0fnu (powers of 2)."
            Site("ragged.Scaling").fail(TypeError, f"scales of dtype {self.dtype!r}.", mend)
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
    def mT(self) -> "Scaling":
        """That of the transposed groups."""
        return self if self.block is None else Scaling((self.block[1], self.block[0]), self.dtype)

    def __str__(self) -> str:
        for name, scaling in NAMED.items():
            if scaling == self:
                return name
        return f"{self.block}" if self.dtype == jnp.float32 else f"{self.block} of {self.dtype.name}"

    def problem(self, packed_axis: int | None) -> str:
        """Why groups that are packed along `packed_axis` can't have such scales; "" if they can."""
        extent = None if packed_axis is None or self.block is None else self.block[packed_axis]
        if extent in (None, 1):
            return ""
        which = "first" if packed_axis == -2 else "last"
        return f"a block of {extent} along the {which} dim, which is ragged, would straddle two groups"

    def shape(self, buffer: tuple[int, ...], packed_axis: int | None, num_groups: int) -> tuple[int, ...]:
        """The shape of the scales of a tensor whose buffer has this shape."""
        if self.block is None:
            return ()
        if self.block == (None, None):
            return (num_groups,)
        extents = [1 if b is None else -(-n // b) for n, b in zip(buffer[-2:], self.block, strict=True)]
        if packed_axis is None:
            return (num_groups, *extents)
        if self.block[packed_axis] is None:
            extents[packed_axis] = num_groups
        return tuple(extents)

    def for_kernels(self, scales: Array, packed_axis: int | None, num_groups: int, flipped: bool) -> Scales:
        """The scales, float32, as kernels take them: with all axes, and transposed where the buffer is `flipped`."""
        values, block = jnp.asarray(scales).astype(jnp.float32), self.block or (None, None)
        if block == (None, None):
            last = (1, 1) if packed_axis is None else (1,)
            column = values if values.ndim else jnp.broadcast_to(values, (num_groups,))
            values = column.reshape(num_groups, *last)
            values = values.mT if packed_axis == -1 else values
        given = Scales(values, block)
        return given.mT if flipped else given


NAMED = {
    "tensor": Scaling(None),
    "group": Scaling((None, None)),
    "row": Scaling((1, None)),
    "column": Scaling((None, 1)),
    "mx": Scaling((1, 32), jnp.float8_e8m0fnu),
}


def eight_bits_fixed(call: str, x: Any) -> Array:
    """`x`; if it holds floats of 8 bits, whose cotangent would have 8 bits too, with an error for who asks for one."""
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
        "differentiated with respect to a quantised operand.",
        "Rounding has no useful derivative. To train, pass what isn't quantised to `ragged.matmul` with `recipe=`: its "
        "gradient is straight-through. To hold it fixed, quantise `jax.lax.stop_gradient(x)`.",
    )
