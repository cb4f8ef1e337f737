"""Products with one matrix that all groups share: the other operand's groups are merged into one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ragged.core.mesh import over_explicit_axes, resharded
from ragged.core.offsets import group_offsets
from ragged.core.scales import of_rows, spread
from ragged.product.operands import Call, Operand, Operands


class Merge(NamedTuple):
    """How the result of a product whose groups were merged becomes the original product's result."""

    shape: tuple[Any, ...] | None = None  # `[g, rows, columns]`; None if the results are the same
    is_transposed: bool = False
    spec: PartitionSpec | None = None  # `Call.out_spec` of the original product

    def undo(self, out: Array) -> Array:
        """The original product's result."""
        if self.shape is None:
            return out
        out = _reshaped(out, self.shape)
        out = out.mT if self.is_transposed else out
        return out if self.spec is None else resharded(out, jax.typeof(out).sharding.mesh, self.spec)


def merged(x: Operands, call: Call) -> tuple[Operands, Call, Merge | None]:
    """`(operands, call, merge)`: the product with all groups merged into one if they share one matrix; otherwise the
    same product, and None."""
    p = call.product
    # The operand that isn't shared: its name, letters and value.
    if x.lhs.data.ndim < p.ndim(p.lhs):
        shared, other, letters, groups = "lhs", "rhs", p.rhs, x.rhs
    elif x.rhs.data.ndim < p.ndim(p.rhs):
        shared, other, letters, groups = "rhs", "lhs", p.lhs, x.lhs
    else:
        return x, call, None
    x = x._replace(**{shared: getattr(x, shared)._replace(data=getattr(x, shared).data[None])})
    if x.sizes:
        one, sizes = _one_ragged_group(groups, x.sizes[p.ragged])
        return x._replace(**{other: one}, sizes={p.ragged: sizes}), call, Merge()

    # Groups `[g, rows, contracted]` become one, `[1, g * rows, contracted]`.
    shape, existing = call.shape[1:], x.epilogue.existing
    if letters[0] == p.contracted:
        letters = letters[::-1]
        groups = groups._replace(data=groups.data.mT, scales=None if groups.scales is None else groups.scales.mT)
    is_transposed = p.out[0] != letters[0]
    if is_transposed:
        p, shape = p._replace(out=p.out[::-1]), shape[::-1]
        existing = None if existing is None else existing.mT
    g, rows = groups.data.shape[:2]
    one_group, merge = (1, g * rows, shape[1]), Merge((g, *shape), is_transposed, call.out_spec)
    epilogue = x.epilogue._replace(existing=None if existing is None else _reshaped(existing, one_group))
    x = x._replace(epilogue=epilogue, **{other: _one_uniform_group(groups)})
    return x, call._replace(product=p._replace(**{other: letters}), shape=one_group, out_spec=None), merge


@over_explicit_axes
def _reshaped(x: Array, shape: tuple[int, ...]) -> Array:
    return x.reshape(shape)


def _one_ragged_group(ragged: Operand, sizes: Array) -> tuple[Operand, Array]:
    """`(operand, size)`: a ragged operand with all rows as one group, and the `(1,)` size of the group."""
    scales, rows = ragged.scales, ragged.data.shape[0]
    scales = None if scales is None else of_rows(scales, sizes, rows)
    return ragged._replace(scales=scales), group_offsets(sizes, rows)[-1:]


def _one_uniform_group(groups: Operand) -> Operand:
    """The operand `[g, rows, contracted]` as `[1, g * rows, contracted]`."""
    data, scales, _ = groups
    g, rows, contracted = data.shape
    if scales is not None:
        scales = scales.whole if scales.is_by_group else scales
        # A block of rows could span two merged groups. So each row gets its own scales: [g, rows or 1, blocks].
        first, last = scales.block

        def by_row(values: Array) -> Array:
            values = spread(values, (first, None), data.shape)
            return jnp.broadcast_to(values, (g, rows, values.shape[-1])).reshape(1, g * rows, -1)

        scales = scales.map(by_row, (1, last))
    return groups._replace(data=_reshaped(data, (1, g * rows, contracted)), scales=scales)
