"""Products with one matrix that all groups share: the other operand's groups are as good as one."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from ragged._lowering import Call, Operands
from ragged._primitive import bind
from ragged.kernels import Scales, schedule
from ragged.kernels.xla import by_row, spread

Run = Callable[[Operands, Call], Array]


def product_with_shared(run: Run | None, operands: Operands, call: Call) -> Array:
    """The product by `run`, or by the primitive. An operand without a group axis is shared by all groups."""
    product = call.product
    shared = [name for name in ("lhs", "rhs") if getattr(operands, name).ndim < product.ndim(getattr(product, name))]
    if not shared:
        return (run or bind)(operands, call)
    name, other = ("lhs", "rhs") if shared == ["lhs"] else ("rhs", "lhs")
    scales = operands.scales(call).get(f"{other}_scales")
    operands = operands._replace(**{name: getattr(operands, name)[None]})
    as_one_group = _ragged if operands.sizes else _uniform
    return as_one_group(run or bind, other, scales, operands, call)


def _ragged(run: Run, name: str, scales: Scales | None, operands: Operands, call: Call) -> Array:
    """All rows of the ragged operand `name` are those of one group."""
    (sizes,), rows = operands.sizes, getattr(operands, name).shape[0]
    if scales is not None and scales.block[0] is None:  # a group's scales are its rows'
        scales = Scales(by_row(scales.values, sizes, rows), (1, scales.block[1]))
    total = schedule.group_offsets(sizes, rows)[-1:]
    return run(*_with_scales(name, scales, operands._replace(sizes=(total,)), call))


def _uniform(run: Run, name: str, scales: Scales | None, operands: Operands, call: Call) -> Array:
    """Groups `[g, kept, contracted]` of the operand `name` become one, `[1, g * kept, contracted]`."""
    product, existing, shape = call.product, operands.existing, call.shape[1:]
    groups, letters = getattr(operands, name), getattr(product, name)
    if letters[0] == product.contracted:
        groups, letters, scales = groups.mT, letters[::-1], None if scales is None else scales.mT
    turned = product.out[0] != letters[0]
    if turned:
        product, shape = product._replace(out=product.out[::-1]), shape[::-1]
        existing = None if existing is None else existing.mT
    g, kept, contracted = groups.shape
    if scales is not None:
        rows = spread(Scales(scales.values, (scales.block[0], None)), groups.shape)  # [g, kept or 1, blocks]
        blocks = rows.shape[-1]
        scales = Scales(jnp.broadcast_to(rows, (g, kept, blocks)).reshape(1, g * kept, blocks), (1, scales.block[1]))
    existing = None if existing is None else existing.reshape(1, g * kept, shape[1])
    operands = operands._replace(existing=existing, **{name: groups.reshape(1, g * kept, contracted)})
    call = call._replace(product=product._replace(**{name: letters}), shape=(1, g * kept, shape[1]))
    out = run(*_with_scales(name, scales, operands, call)).reshape(g, *shape)
    return out.mT if turned else out


def _with_scales(name: str, scales: Scales | None, operands: Operands, call: Call) -> tuple[Operands, Call]:
    if scales is None:
        return operands, call
    return operands._replace(**{f"{name}_scales": scales.values}), call._replace(**{f"{name}_block": scales.block})
