"""Products with one matrix that all groups share: the other operand's groups are as good as one."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from ragged._mesh import over_explicit_axes, resharded
from ragged.backends import schedule
from ragged.product.operands import Call, Operand, Operands
from ragged.quant.scales import of_rows, spread

Folded = tuple[Operands, Call, Callable[[Array], Array]]
"""A product of operands that all have groups, and what makes of its result that of the original."""


def folded(x: Operands, call: Call) -> Folded:
    """The product to compute where an operand without a group axis is shared by all groups; the same one elsewhere."""
    p = call.product
    if x.lhs.data.ndim < p.ndim(p.lhs):
        name, shared, letters, groups = "rhs", "lhs", p.rhs, x.rhs
    elif x.rhs.data.ndim < p.ndim(p.rhs):
        name, shared, letters, groups = "lhs", "rhs", p.lhs, x.lhs
    else:
        return x, call, lambda out: out
    x = x._replace(**{shared: getattr(x, shared)._replace(data=getattr(x, shared).data[None])})
    if x.sizes:
        one, sizes = _rows(groups, x.sizes[p.ragged])
        return x._replace(**{name: one}, sizes={p.ragged: sizes}), call, lambda out: out

    # Groups `[g, kept, contracted]` become one, `[1, g * kept, contracted]`.
    shape, existing = call.shape[1:], x.epilogue.existing
    if letters[0] == p.contracted:
        letters = letters[::-1]
        groups = Operand(groups.data.mT, None if groups.scales is None else groups.scales.mT)
    turned = p.out[0] != letters[0]
    if turned:
        p, shape = p._replace(out=p.out[::-1]), shape[::-1]
        existing = None if existing is None else existing.mT
    g, kept = groups.data.shape[:2]
    whole, asked = (1, g * kept, shape[1]), call.out_spec
    epilogue = x.epilogue._replace(existing=None if existing is None else _reshaped(existing, whole))
    x = x._replace(epilogue=epilogue, **{name: _one(groups)})

    def restore(out: Array) -> Array:
        out = _reshaped(out, (g, *shape))
        out = out.mT if turned else out
        return out if asked is None else resharded(out, jax.typeof(out).sharding.mesh, asked)

    return x, call._replace(product=p._replace(**{name: letters}), shape=whole, out_spec=None), restore


@over_explicit_axes
def _reshaped(x: Array, shape: tuple[int, ...]) -> Array:
    return x.reshape(shape)


def _rows(ragged: Operand, sizes: Array) -> tuple[Operand, Array]:
    """All rows of a ragged operand are those of one group; its size."""
    scales, rows = ragged.scales, ragged.data.shape[0]
    scales = None if scales is None else of_rows(scales, sizes, rows)  # a group's are its rows'
    return Operand(ragged.data, scales), schedule.group_offsets(sizes, rows)[-1:]


def _one(groups: Operand) -> Operand:
    """`[g, kept, contracted]` as `[1, g * kept, contracted]`."""
    data, scales = groups
    g, kept, contracted = data.shape
    if scales is not None:
        rows = spread(replace(scales, block=(scales.block[0], None)), data.shape)  # [g, kept or 1, blocks]
        blocks = rows.shape[-1]
        values = jnp.broadcast_to(rows, (g, kept, blocks)).reshape(1, g * kept, blocks)
        scales = replace(scales, values=values, block=(1, scales.block[1]))
    return Operand(_reshaped(data, (1, g * kept, contracted)), scales)
