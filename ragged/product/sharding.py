"""A product over several devices: which letters are sharded, what each device multiplies, and what is summed.

Besides `m`, `k` and `n`, a product has the letters `g`, the groups of a uniform term, and `b`, the batch. One rule is
for all, in the eight layouts:

- an extent that is the same in all groups is cut;
- a letter that is ragged is cut where its buffers are, whatever groups that meets: a device has what lies in its range
  of each group. (Where one term packs the letter and another one aligns it to the left, it stays whole.)
- of the groups of a uniform term a device has some; the rows of the others come out zero;
- what isn't in the result (`k`, often `g`) is summed over devices, in the accumulator's dtype, and then rounded.

If two operands want one mesh axis for different letters, the uniform one has it: weights stay where they are.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import gcd, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ragged._errors import Site
from ragged._mesh import resharded
from ragged.backends import schedule
from ragged.product import lowering
from ragged.product.operands import Call, Epilogue, Operand, Operands
from ragged.quant.formats import accumulator_dtype
from ragged.quant.scales import by_row

Axes = tuple[str, ...]
"""Names of mesh axes, the slowest first."""


class Dims(NamedTuple):
    """The letter of each axis of the terms; "." where each device has all of the axis."""

    lhs: str
    rhs: str
    out: str


class Sharding(NamedTuple):
    """How one product is sharded."""

    dims: Dims
    letters: dict[str, Axes]  # those of which each device has a part
    partial: tuple[Axes, ...]  # of each axis of the result, before it is summed over devices
    out: tuple[Axes, ...]  # and after
    summed: Axes  # the mesh axes over which it is


def dims(x: Operands, call: Call) -> Dims:
    """The letters of the terms, as these are in memory."""
    p = call.product
    # No cut suits two terms of which one packs a letter and the other aligns it, or holds less of it.
    shapes = x.lhs.data.shape[-2:], x.rhs.data.shape[-2:], call.shape[-2:]
    places: dict[str, set[tuple[bool, int]]] = {}
    for letters, shape in zip((p.lhs, p.rhs, p.out), shapes, strict=True):
        for axis, (z, n) in enumerate(zip(letters, shape, strict=True)):
            places.setdefault(z, set()).add((z in p.ragged and axis == 0, n))
    whole = {z for z, found in places.items() if len(found) > 1}

    def term(letters: str, ndim: int) -> str:
        own = "".join("." if z in whole else z for z in letters)
        # A matrix that all groups share has no axis for them.
        return "b" * (ndim > p.ndim(letters)) + "g" * (p.is_uniform(letters) and ndim > 2) + own

    rank = len(call.shape) + (call.out_batch and call.batch(x) is not None)
    return Dims(term(p.lhs, x.lhs.data.ndim), term(p.rhs, x.rhs.data.ndim), term(p.out, rank))


def resolve(x: Operands, call: Call, specs: Operands, wanted: PartitionSpec, mesh: Mapping[str, int]) -> Sharding:
    """The sharding of a product whose operands come as `specs`, and whose result had best be as `wanted`.

    `mesh` has the sizes of its axes. One that doesn't divide an extent isn't used; one that two letters want is the
    first one's. What then has another sharding than it came with is moved.
    """
    of, batch = dims(x, call), () if call.batch(x) is None or not call.out_batch else (call.batch(x),)
    result = _Sharded(of.out, axes_of(wanted, len(of.out)), (*batch, *call.shape), accumulator_dtype(call.dtype))
    operands = [
        _Sharded(letters, axes_of(spec, len(letters)), data.shape, data.dtype)
        for letters, spec, data in ((of.lhs, specs.lhs.data, x.lhs.data), (of.rhs, specs.rhs.data, x.rhs.data))
    ]
    operands.sort(key=lambda term: "g" not in term.letters)
    orders = [[*operands, result]]
    if "g" in of.out and "g" not in operands[0].letters:  # a gradient of weights: it stays, or the operands do
        orders.append([result, *operands])
    found = [_assigned(order, mesh) for order in orders]
    letters = min(found, key=lambda letters: _moved(operands, result, letters, mesh))
    summed = tuple(name for z, names in letters.items() if z not in of.out for name in names)
    partial = [letters.get(z, ()) for z in of.out]
    out = list(partial)
    for axis, names in enumerate(result.axes):
        # What is summed over devices and wanted in parts by the same: each sums its part.
        mine, more = names[: len(partial[axis])], names[len(partial[axis]) :]
        free = {*summed} - {name for other in out for name in other}
        if mine == partial[axis] and {*more} <= free and result.shape[axis] % _ways(names, mesh) == 0:
            out[axis] = names
    return Sharding(of, letters, tuple(partial), tuple(out), summed)


class _Sharded(NamedTuple):
    """A term."""

    letters: str
    axes: tuple[Axes, ...]
    shape: tuple[int, ...]
    dtype: Any

    def bytes_with(self, axes: Iterable[Axes], mesh: Mapping[str, int]) -> float:
        """What a device has of it."""
        return prod(self.shape) * jnp.dtype(self.dtype).itemsize / prod(_ways(names, mesh) for names in axes)


def _assigned(terms: list[_Sharded], mesh: Mapping[str, int]) -> dict[str, Axes]:
    """The mesh axes of each letter, where the first terms have theirs first."""
    found: dict[str, Axes] = {}
    for term in terms:
        for z, names, extent in zip(term.letters, term.axes, term.shape, strict=True):
            is_taken = z in found or {*names} & {name for others in found.values() for name in others}
            if names and z != "." and not is_taken and extent % _ways(names, mesh) == 0:
                found[z] = names
    return found


def _moved(operands: list[_Sharded], result: _Sharded, letters: Mapping[str, Axes], mesh: Mapping[str, int]) -> float:
    """Bytes that each device is sent, or sums over devices."""
    needed = [[letters.get(z, ()) for z in term.letters] for term in operands]
    gathered = [
        max(term.bytes_with(need, mesh) - term.bytes_with(term.axes, mesh), 0)
        for term, need in zip(operands, needed, strict=True)
    ]
    is_summed = any(z not in result.letters for z in letters)
    return sum(gathered) + is_summed * result.bytes_with([letters.get(z, ()) for z in result.letters], mesh)


def specs_of(x: Operands, sharding: Sharding, mesh: Mapping[str, int]) -> tuple[Operands, PartitionSpec]:
    """What each device has of the operands, and of the result."""
    letters, of = sharding.letters, sharding.dims

    def operand(operand: Operand, own: str) -> Operand:
        axes, scales = [letters.get(z, ()) for z in own], operand.scales
        if scales is not None:
            parts = [n // _ways(names, mesh) for n, names in zip(operand.data.shape, axes, strict=True)][-2:]
            last = [
                names if _is_cut(block, part, z in x.sizes and z == own[-2]) else ()
                for names, block, part, z in zip(axes[-2:], scales.block, parts, own[-2:], strict=True)
            ]
            batch = [letters.get("b", ())] * (scales.values.ndim - len(own.removeprefix("b")))
            groups = [letters.get("g", ())] * ("g" in own)
            level = None if scales.tensor is None else spec_of(batch)
            scales = replace(scales, values=spec_of([*batch, *groups, *last]), tensor=level)
        return Operand(spec_of(axes), scales)

    def batched(array: Any, rank: int) -> PartitionSpec:
        return spec_of([letters.get("b", ())] * (array.ndim - rank))

    out = spec_of(sharding.out)
    sizes, offset = ({z: batched(sizes, 1) for z, sizes in x.sizes.items()}, x.offset)
    offset = None if offset is None else batched(offset, 0)
    epilogue = jax.tree.map(lambda _: out, x.epilogue)
    return Operands(operand(x.lhs, of.lhs), operand(x.rhs, of.rhs), sizes, offset, epilogue), out


def _is_cut(block: int | None, part: int, is_packed: bool) -> bool:
    """Whether scales are cut with their operand's axis. Else each device has them all, and takes its own."""
    return block == 1 or (block is not None and part % block == 0 and not is_packed)


def axes_of(spec: PartitionSpec, rank: int) -> tuple[Axes, ...]:
    """The mesh axes of each of an array's axes."""
    parts = [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec.partitions]
    return tuple(parts + [()] * (rank - len(parts)))


def spec_of(axes: Iterable[Axes]) -> PartitionSpec:
    """What `axes_of` undoes."""
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in axes))


def _ways(names: Axes, mesh: Mapping[str, int]) -> int:
    """How many parts they cut an extent into."""
    return prod(mesh[name] for name in names)


def local(x: Operands, call: Call, sharding: Sharding, product: Callable[[Operands, Call], Array]) -> Array:
    """One device's part of the result, from its parts of the operands, where the mesh's axes have names.

    `product(operands, call)` multiplies what it has.
    """
    of, letters, _, _, summed = sharding
    rank = len(of.out) - len(call.shape)  # 1 with a batch axis

    def shape(axes: tuple[Axes, ...]) -> tuple[int, ...]:
        return tuple(n // _size(names) for n, names in zip(call.shape, axes[rank:], strict=True))

    # 1. The groups that this device has, and what it has of each.
    mine = shape(sharding.partial)
    extents = {
        z: n
        for term, operand in ((of.lhs, x.lhs), (of.rhs, x.rhs))
        for z, n in zip(term, operand.data.shape, strict=True)
    }
    extents |= dict(zip(of.out[rank:], mine, strict=True))
    sizes = {z: _sizes(x.sizes[z], z, call, letters.get(z, ()), extents.get(z, 0)) for z in x.sizes}
    offset = x.offset
    if "g" in letters and x.sizes:
        held, first = extents["g"], lax.axis_index(letters["g"]) * extents["g"]
        # Clipped before it is added to: it can't wrap around into range.
        ends = -held * _size(letters["g"]), x.num_groups
        offset = first + (0 if offset is None else jnp.clip(schedule.as_int32(offset), *ends))

    # 2. Its product.
    lhs, rhs = (_with_scales(each, own, letters, x.sizes) for each, own in ((x.lhs, of.lhs), (x.rhs, of.rhs)))
    part = x._replace(lhs=lhs, rhs=rhs, sizes=sizes, offset=offset)
    if not summed:
        return product(part, call._replace(shape=mine))
    dtype = accumulator_dtype(call.dtype)
    out = product(part._replace(epilogue=Epilogue()), call._replace(shape=mine, dtype=dtype))

    # 3. The sum.
    for axis, (before, after) in enumerate(zip(sharding.partial, sharding.out, strict=True)):
        if more := after[len(before) :]:
            out = lax.psum_scatter(out, more, scatter_dimension=axis, tiled=True)
            summed = tuple(name for name in summed if name not in more)
    out = lax.psum(out, summed) if summed else out
    existing = x.epilogue.existing
    if existing is not None:
        part = x._replace(sizes=sizes_of_part(x, call, sharding, out.shape))
        out += lowering.zero_tail(existing, part, call).astype(dtype)
    return out.astype(call.dtype)


def mapped(
    x: Operands,
    call: Call,
    product: Callable[[Operands, Call], Array],
    *,
    mesh: Any,
    over: Axes,
    specs: Operands,
    check_vma: bool = True,
    finish: Callable[[Array, dict[str, Array]], Array] | None = None,
) -> Array:
    """The product by a `shard_map` over the axes `over` of `mesh`, of operands that are sharded as `specs` say.

    The result is sharded as `call.out_spec`; by default, as the operands have its letters. Over axes for which the spec
    says that it is unreduced, it isn't summed. `finish` makes of each device's part, and of what the groups have in it
    of each ragged letter, what is returned.
    """
    wanted, is_asked, found = planned(x, call, specs, mesh)
    call = call._replace(out_spec=None)
    needed, _ = specs_of(x, found, mesh.shape)
    left = tuple(name for name in found.summed if name in wanted.unreduced)
    if missing := sorted(wanted.unreduced - {*left}):
        problem = f"`out_sharding` leaves a sum over {missing[0]!r}, but nothing is summed over it."
        Site("ragged.matmul").fail(ValueError, problem, f"The product is summed over {found.summed}.")
    found = found._replace(summed=tuple(name for name in found.summed if name not in left))
    leaves, tree = jax.tree.flatten(x)
    have, need = jax.tree.leaves(specs), jax.tree.leaves(needed)
    # What is summed over an axis may be gathered over it inside, whose transpose is a sum in parts.
    inside = jax.tree.leaves(
        jax.tree.map(lambda _: True, x)._replace(epilogue=jax.tree.map(lambda _: False, x.epilogue))
    )
    given = [
        h if may and _gathers(axes_of(h, leaf.ndim), axes_of(n, leaf.ndim), found.summed) else n
        for leaf, h, n, may in zip(leaves, have, need, inside, strict=True)
    ]

    def of_device(*leaves: Array) -> Array:
        parts = [
            _gathered(leaf, axes_of(g, leaf.ndim), axes_of(n, leaf.ndim))
            for leaf, g, n in zip(leaves, given, need, strict=True)
        ]
        part = tree.unflatten(parts)
        out = local(part, call, found, product)
        if finish is not None:
            out = finish(out, sizes_of_part(part, call, found, out.shape))
        return lax.pcast(out, left, to="unreduced") if left else out

    # All axes, by default, are all but those of a `vmap`.
    some = {*over} if {*over} < {*mesh.axis_names} else frozenset()
    options: Any = {"mesh": mesh, "axis_names": some, "check_vma": check_vma}
    out_spec = PartitionSpec(*spec_of(found.out), unreduced=frozenset(left))
    run = jax.shard_map(of_device, in_specs=tuple(given), out_specs=out_spec, **options)
    out = run(*(resharded(leaf, mesh, spec) for leaf, spec in zip(leaves, given, strict=True)))
    asked = PartitionSpec(*spec_of(axes_of(wanted, out.ndim)), unreduced=wanted.unreduced)
    return resharded(out, mesh, asked) if is_asked and asked != out_spec else out


def planned(x: Operands, call: Call, specs: Operands, mesh: Any) -> tuple[PartitionSpec, bool, Sharding]:
    """The result's spec over explicit axes, whether it was asked for, and how it comes about."""
    wanted = _wanted(x, call, specs)
    return wanted, call.out_spec is not None, resolve(x, call, specs, wanted, mesh.shape)


def type_of(x: Operands, call: Call, specs: Operands, mesh: Any) -> PartitionSpec:
    """The spec in the result's type."""
    wanted, is_asked, found = planned(x, call, specs, mesh)
    return wanted if is_asked else spec_of(found.out)


def _wanted(x: Operands, call: Call, specs: Operands) -> PartitionSpec:
    """How the result is to be sharded: as asked; else, its letters are as the operands have them."""
    of, found = dims(x, call), dict[str, Axes]()
    terms = [(of.lhs, specs.lhs.data), (of.rhs, specs.rhs.data)]
    for letters, spec in terms + [(of.out, each) for each in jax.tree.leaves(specs.epilogue)]:
        for z, names in zip(letters, axes_of(spec, len(letters)), strict=True):
            if names and not {*names} & {name for others in found.values() for name in others}:
                found.setdefault(z, names)
    if call.out_spec is None:
        return spec_of(found.get(z, ()) for z in of.out)
    batch = [found.get("b", ())] * (len(of.out) - len(call.shape))
    asked = axes_of(call.out_spec, len(call.shape))
    return PartitionSpec(*spec_of([*batch, *asked]), unreduced=call.out_spec.unreduced)


def _gathers(have: tuple[Axes, ...], need: tuple[Axes, ...], over: Axes) -> bool:
    """Whether an array is brought from one sharding to the other by gathering it over some of these axes."""
    pairs = list(zip(have, need, strict=True))
    return all(h[: len(n)] == n and {*h[len(n) :]} <= {*over} for h, n in pairs)


def _gathered(x: Array, have: tuple[Axes, ...], need: tuple[Axes, ...]) -> Array:
    for axis, (h, n) in enumerate(zip(have, need, strict=True)):
        if more := h[len(n) :]:
            x = lax.all_gather(x, more, axis=axis, tiled=True)
    return x


def sizes_of_part(x: Operands, call: Call, sharding: Sharding, shape: tuple[int, ...]) -> dict[str, Array]:
    """What the groups have of each of the result's ragged letters in a device's part, of this shape."""
    after = zip(call.product.out, sharding.out[-2:], shape[-2:], strict=True)
    return {z: _sizes(x.sizes[z], z, call, names, extent) for z, names, extent in after if z in x.sizes}


def _size(names: Axes) -> int:
    return prod(lax.axis_size(name) for name in names)


def _sizes(sizes: Array, letter: str, call: Call, names: Axes, extent: int) -> Array:
    """What the groups have in the device's part of a ragged letter, `extent` of the buffer."""
    if not names:
        return sizes
    first = lax.axis_index(names) * extent
    p = call.product
    if any(term[1] == letter for term in (p.lhs, p.rhs, p.out)):  # each group begins at 0
        return jnp.clip(schedule.as_int32(sizes) - first, 0, extent)
    ends = schedule.group_offsets(sizes, extent * _size(names))
    return jnp.diff(jnp.clip(ends - first, 0, extent))


def _with_scales(operand: Operand, own: str, letters: Mapping[str, Axes], sizes: Mapping[str, Array]) -> Operand:
    """An operand's part with its own scales, where a cut goes through a block: the blocks are made smaller.

    `sizes`: of all groups, on all devices.
    """
    data, scales = operand
    if scales is None:
        return operand
    values, blocks = scales.values, list(scales.block)
    for i in (0, 1):
        names, block, part = letters.get(own[i - 2], ()), blocks[i], data.shape[i - 2]
        packed = sizes.get(own[-2]) if i == 0 else None
        if names and block is not None and not _is_cut(block, part, packed is not None):
            smaller, axis = 1 if packed is not None else gcd(block, part), values.ndim + i - 2
            if packed is not None:
                values = by_row(values, packed, part * _size(names), block)
            else:
                values = jnp.repeat(values, block // smaller, axis)
            blocks[i] = smaller
            values = lax.dynamic_slice_in_dim(values, lax.axis_index(names) * (part // smaller), part // smaller, axis)
    return Operand(data, replace(scales, values=values, block=(blocks[0], blocks[1])))


def rule(x: Operands, call: Call) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The letters in the notation of Shardy's rules, with which XLA decides what it isn't told: see
    `jax.experimental.custom_partitioning`. Sizes and scales have letters of their own."""
    of, own = dims(x, call), iter(range(1000))
    operands = Operands(
        Operand(of.lhs, jax.tree.map(lambda array: "." * array.ndim, x.lhs.scales)),
        Operand(of.rhs, jax.tree.map(lambda array: "." * array.ndim, x.rhs.scales)),
        {z: "." * sizes.ndim for z, sizes in x.sizes.items()},
        None if x.offset is None else "." * x.offset.ndim,
        jax.tree.map(lambda _: of.out, x.epilogue),
    )
    alone: list[str] = []

    def factors(letters: str) -> str:
        names = [f"w{next(own)}" if z == "." else z for z in letters]
        alone.extend(name for name in names if name[0] == "w")
        return " ".join(names)

    text = ", ".join(map(factors, jax.tree.leaves(operands))) + " -> " + factors(of.out)
    summed = tuple(z for z in dict.fromkeys(of.lhs + of.rhs) if z not in of.out + ".")
    return text, {"reduction_factors": summed, "need_replication_factors": tuple(alone)}
