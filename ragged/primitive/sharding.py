"""A product over several devices: which letters are sharded, what each device multiplies, and what is summed.

A term is an operand or the result. Besides `m`, `k` and `n`, a product has the letters `g`, the groups of a uniform
term, and `b`, the batch. The rules:

- A uniform letter is split into equal shards.
- A ragged letter is split where its buffers are split, regardless of groups. If one term packs the letter and another
  one has it left-aligned, the letter isn't sharded.
- If `g` is sharded, each device has some groups of the uniform term. In its result, rows of other groups are zero.
- If a sharded letter isn't in the result (`k`, often `g`), the result is summed over devices in the accumulator's
  dtype, then rounded.

If operands claim the same mesh axis for different letters, the uniform operand keeps its sharding, so that weights
aren't moved.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from math import gcd, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ragged.backends import base
from ragged.core.errors import Site
from ragged.core.formats import accumulator_dtype
from ragged.core.mesh import resharded
from ragged.core.offsets import as_int32, group_offsets
from ragged.core.scales import of_rows
from ragged.primitive import lowering
from ragged.primitive.shared import merged
from ragged.product.operands import Call, Epilogue, Operand, Operands

Axes = tuple[str, ...]
"""The mesh axes that shard one axis of an array, from the slowest-varying to the fastest."""


class Dims(NamedTuple):
    """The letter of each axis of the terms; "." for an axis that is never sharded."""

    lhs: str
    rhs: str
    out: str


class Sharding(NamedTuple):
    """How one product is sharded."""

    dims: Dims
    letters: dict[str, Axes]  # the mesh axes of each sharded letter
    partial: tuple[Axes, ...]  # the mesh axes of each axis of the result, before the sum over devices
    out: tuple[Axes, ...]  # the mesh axes of each axis of the result, after the sum over devices
    summed: Axes  # the mesh axes over which the result is summed


def dims(x: Operands, call: Call) -> Dims:
    """The letters of the terms, in storage order."""
    p = call.product
    # A letter that one term packs and another one left-aligns can't be sharded, nor one with different extents.
    shapes = x.lhs.data.shape[-2:], x.rhs.data.shape[-2:], call.shape[-2:]
    uses: dict[str, set[tuple[bool, int]]] = {}  # for each letter: whether it is packed, and its extent
    for letters, shape in zip((p.lhs, p.rhs, p.out), shapes, strict=True):
        for axis, (z, n) in enumerate(zip(letters, shape, strict=True)):
            uses.setdefault(z, set()).add((z in p.ragged and axis == 0, n))
    unsharded = {z for z, found in uses.items() if len(found) > 1}

    def term(letters: str, ndim: int) -> str:
        last = "".join("." if z in unsharded else z for z in letters)
        # A shared matrix has no axis for the groups.
        return "b" * (ndim > p.ndim(letters)) + "g" * (p.is_uniform(letters) and ndim > 2) + last

    rank = len(call.shape) + (call.out_batch and call.batch(x) is not None)
    return Dims(term(p.lhs, x.lhs.data.ndim), term(p.rhs, x.rhs.data.ndim), term(p.out, rank))


def resolve(x: Operands, call: Call, specs: Operands, wanted: PartitionSpec, mesh: Mapping[str, int]) -> Sharding:
    """The sharding of a product whose operands have the shardings `specs`, and whose result should have `wanted`.

    `mesh`: the sizes of the mesh axes. A mesh axis that doesn't divide an extent isn't used. If two letters claim a
    mesh axis, only one gets it: see `_assigned`. So the sharding may differ from `specs` and `wanted`; then the caller
    reshards.
    """
    of = dims(x, call)
    batch = (call.batch(x),) if call.out_batch and call.batch(x) is not None else ()
    result = _Sharded(of.out, axes_of(wanted, len(of.out)), (*batch, *call.shape), accumulator_dtype(call.dtype))
    operands = [
        _Sharded(letters, axes_of(spec, len(letters)), data.shape, data.dtype)
        for letters, spec, data in ((of.lhs, specs.lhs.data, x.lhs.data), (of.rhs, specs.rhs.data, x.rhs.data))
    ]
    operands.sort(key=lambda term: "g" not in term.letters)  # A uniform operand claims axes first.
    orders = [[*operands, result]]
    # For a gradient of weights, the result or the operands keep their sharding, whichever moves fewer bytes.
    if "g" in of.out and "g" not in operands[0].letters:
        orders.append([result, *operands])
    found = [_assigned(order, mesh) for order in orders]
    letters = min(found, key=lambda letters: _moved(operands, result, letters, mesh))
    summed = tuple(name for z, names in letters.items() if z not in of.out for name in names)
    partial = [letters.get(z, ()) for z in of.out]
    out = list(partial)
    for axis, names in enumerate(result.axes):
        # If the result should be sharded over a mesh axis of the sum, each device sums only its shard.
        first, more = names[: len(partial[axis])], names[len(partial[axis]) :]
        free = {*summed} - {name for other in out for name in other}
        if first == partial[axis] and {*more} <= free and result.shape[axis] % _num_shards(names, mesh) == 0:
            out[axis] = names
    return Sharding(of, letters, tuple(partial), tuple(out), summed)


class _Sharded(NamedTuple):
    """A term with its sharding."""

    letters: str
    axes: tuple[Axes, ...]
    shape: tuple[int, ...]
    dtype: Any

    def bytes_with(self, axes: Iterable[Axes], mesh: Mapping[str, int]) -> float:
        """Bytes per device if the term is sharded over `axes`."""
        return prod(self.shape) * jnp.dtype(self.dtype).itemsize / prod(_num_shards(names, mesh) for names in axes)


def _assigned(terms: list[_Sharded], mesh: Mapping[str, int]) -> dict[str, Axes]:
    """The mesh axes of each sharded letter. If terms conflict, the earlier one keeps its sharding."""
    found: dict[str, Axes] = {}
    for term in terms:
        for z, names, extent in zip(term.letters, term.axes, term.shape, strict=True):
            is_taken = z in found or {*names} & {name for others in found.values() for name in others}
            if names and z != "." and not is_taken and extent % _num_shards(names, mesh) == 0:
                found[z] = names
    return found


def _moved(operands: list[_Sharded], result: _Sharded, letters: Mapping[str, Axes], mesh: Mapping[str, int]) -> float:
    """Bytes that each device receives to reshard the operands, plus the bytes of a result that is summed."""
    needed = [[letters.get(z, ()) for z in term.letters] for term in operands]
    gathered = [
        max(term.bytes_with(need, mesh) - term.bytes_with(term.axes, mesh), 0)
        for term, need in zip(operands, needed, strict=True)
    ]
    is_summed = any(z not in result.letters for z in letters)
    return sum(gathered) + is_summed * result.bytes_with([letters.get(z, ()) for z in result.letters], mesh)


def specs_of(x: Operands, sharding: Sharding, mesh: Mapping[str, int]) -> tuple[Operands, PartitionSpec]:
    """`(operands, result)`: the specs of all arrays of `x`, and of the result. `x` must have no index."""
    letters, of = sharding.letters, sharding.dims

    def specs_of_operand(operand: Operand, term: str) -> Operand:
        axes, scales = [letters.get(z, ()) for z in term], operand.scales
        if scales is not None:
            extents = [n // _num_shards(names, mesh) for n, names in zip(operand.data.shape, axes, strict=True)]
            last = [
                names if _is_sharded(block, extent, z in x.sizes and z == term[-2]) else ()
                for names, block, extent, z in zip(axes[-2:], scales.block, extents[-2:], term[-2:], strict=True)
            ]
            batch = [letters.get("b", ())] * (scales.values.ndim - len(term.removeprefix("b")))
            groups = [letters.get("g", ())] * ("g" in term)
            tensor = None if scales.tensor is None else spec_of([*batch, *groups * scales.is_by_group])
            scales = replace(scales.map(lambda _: spec_of([*batch, *groups, *last])), tensor=tensor)
        return Operand(spec_of(axes), scales)

    def batched(array: Any, rank: int) -> PartitionSpec:
        return spec_of([letters.get("b", ())] * (array.ndim - rank))

    out = spec_of(sharding.out)
    sizes = {z: batched(each, 1) for z, each in x.sizes.items()}
    offset = None if x.offset is None else batched(x.offset, 0)
    epilogue = jax.tree.map(lambda _: out, x.epilogue)
    return Operands(specs_of_operand(x.lhs, of.lhs), specs_of_operand(x.rhs, of.rhs), sizes, offset, epilogue), out


def _is_sharded(block: int | None, extent: int, is_packed: bool) -> bool:
    """Whether scales are sharded along with an axis of their operand, whose shards have this extent.

    Otherwise all devices get all scales, and `_with_scales` selects the shard's scales.
    """
    return block == 1 or (block is not None and extent % block == 0 and not is_packed)


def axes_of(spec: PartitionSpec, rank: int) -> tuple[Axes, ...]:
    """The mesh axes of each axis of an array, from its spec."""
    parts = [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec.partitions]
    return tuple(parts + [()] * (rank - len(parts)))


def spec_of(axes: Iterable[Axes]) -> PartitionSpec:
    """Inverse of `axes_of`."""
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in axes))


def _num_shards(names: Axes, mesh: Mapping[str, int]) -> int:
    return prod(mesh[name] for name in names)


def local(x: Operands, call: Call, sharding: Sharding, product: Callable[[Operands, Call], Array]) -> Array:
    """A device's shard of the result, from its shards of the operands. Called where the mesh axes are manual.

    `product(operands, call)` multiplies the shards. If all groups share a matrix, it gets one group.
    """

    def multiply(x: Operands, call: Call) -> Array:
        x, call, merge = merged(x, call)
        out = product(x, call)
        return out if merge is None else merge.undo(out)

    of, letters, _, _, summed = sharding
    num_batch_axes = len(of.out) - len(call.shape)

    # 1. The groups on this device, and their sizes in its shard.
    partial_shape = tuple(
        n // _size(names) for n, names in zip(call.shape, sharding.partial[num_batch_axes:], strict=True)
    )
    extents = {
        z: n
        for term, operand in ((of.lhs, x.lhs), (of.rhs, x.rhs))
        for z, n in zip(term, operand.data.shape, strict=True)
    }
    extents |= dict(zip(of.out[num_batch_axes:], partial_shape, strict=True))
    sizes = {z: _sizes(x.sizes[z], z, call, letters.get(z, ()), extents.get(z, 0)) for z in x.sizes}
    offset = x.offset
    if "g" in letters and x.sizes:
        first = lax.axis_index(letters["g"]) * extents["g"]
        # A sum that overflows is negative: `core.offsets.segments` clips it.
        offset = first + (0 if offset is None else as_int32(offset))

    # 2. The product of the shards.
    lhs, rhs = (_with_scales(each, term, letters, x.sizes) for each, term in ((x.lhs, of.lhs), (x.rhs, of.rhs)))
    shard = x._replace(lhs=lhs, rhs=rhs, sizes=sizes, offset=offset)
    if not summed:
        return multiply(shard, call._replace(shape=partial_shape))
    sum_call = call._replace(shape=partial_shape, dtype=call.sum_dtype(x))
    out = multiply(shard._replace(epilogue=Epilogue()), sum_call)

    # 3. The sum over devices, then `existing_out` and rounding.
    for axis, (before, after) in enumerate(zip(sharding.partial, sharding.out, strict=True)):
        if more := after[len(before) :]:
            out = lax.psum_scatter(out, more, scatter_dimension=axis, tiled=True)
            summed = tuple(name for name in summed if name not in more)
    out = lax.psum(out, summed) if summed else out
    existing = x.epilogue.existing
    if existing is not None:
        shard = x._replace(sizes=sizes_of_shard(x.sizes, call, sharding.out, out.shape))
        out = base.plus_existing(out, lowering.zero_tail(existing, shard, call))
    return out.astype(call.dtype)


def mapped(
    x: Operands,
    call: Call,
    product: Callable[[Operands, Call], Array],
    *,
    mesh: Any,
    over: Axes,
    specs: Operands,
) -> Array:
    """The product of operands with the shardings `specs`, in a `shard_map` over the axes `over` of `mesh`.

    The result is sharded as `call.out_spec`; by default, its letters are sharded as in the operands. Over an axis for
    which the spec is unreduced, the result isn't summed. `product`: as in `local`.
    """
    wanted, is_requested, found = planned(x, call, specs, mesh)
    call = call._replace(out_spec=None)
    needed, _ = specs_of(x, found, mesh.shape)
    unreduced = tuple(name for name in found.summed if name in wanted.unreduced)
    if missing := sorted(wanted.unreduced - {*unreduced}):
        problem = f"`out_sharding` is unreduced over {missing[0]!r}, but the product isn't summed over it."
        Site(call.options.name).fail(ValueError, problem, f"The product is summed over {found.summed}.")
    found = found._replace(summed=tuple(name for name in found.summed if name not in unreduced))
    leaves, tree = jax.tree.flatten(x)
    have, need = jax.tree.leaves(specs), jax.tree.leaves(needed)
    # Operands are gathered over the summed axes inside the `shard_map`: the transpose of such a gather is a
    # `psum_scatter` of the cotangent. The epilogue is resharded outside.
    inside = jax.tree.leaves(
        jax.tree.map(lambda _: True, x)._replace(epilogue=jax.tree.map(lambda _: False, x.epilogue))
    )
    in_specs = [
        h if is_inside and _gathers(axes_of(h, leaf.ndim), axes_of(n, leaf.ndim), found.summed) else n
        for leaf, h, n, is_inside in zip(leaves, have, need, inside, strict=True)
    ]

    def of_device(*leaves: Array) -> Array:
        shards = [
            _gathered(leaf, axes_of(h, leaf.ndim), axes_of(n, leaf.ndim))
            for leaf, h, n in zip(leaves, in_specs, need, strict=True)
        ]
        out = local(tree.unflatten(shards), call, found, product)
        return lax.pcast(out, unreduced, to="unreduced") if unreduced else out

    # An empty set means all mesh axes, except those that a `vmap` names.
    axis_names = {*over} if {*over} < {*mesh.axis_names} else frozenset()
    out_spec = PartitionSpec(*spec_of(found.out), unreduced=frozenset(unreduced))
    run = jax.shard_map(of_device, mesh=mesh, axis_names=axis_names, in_specs=tuple(in_specs), out_specs=out_spec)
    out = run(*(resharded(leaf, mesh, spec) for leaf, spec in zip(leaves, in_specs, strict=True)))
    requested = PartitionSpec(*spec_of(axes_of(wanted, out.ndim)), unreduced=wanted.unreduced)
    return resharded(out, mesh, requested) if is_requested and requested != out_spec else out


def planned(x: Operands, call: Call, specs: Operands, mesh: Any) -> tuple[PartitionSpec, bool, Sharding]:
    """`(wanted, is_requested, sharding)`: the result's spec, whether the caller requested it, and the product's
    sharding, whose result may differ."""
    wanted = _wanted(x, call, specs)
    return wanted, call.out_spec is not None, resolve(x, call, specs, wanted, mesh.shape)


def type_of(x: Operands, call: Call, specs: Operands, mesh: Any) -> PartitionSpec:
    """The spec of the result of `mapped`, for its type."""
    wanted, is_requested, found = planned(x, call, specs, mesh)
    return wanted if is_requested else spec_of(found.out)


def _wanted(x: Operands, call: Call, specs: Operands) -> PartitionSpec:
    """The requested spec of the result; without one, its letters are sharded as in the operands."""
    of, found = dims(x, call), dict[str, Axes]()
    terms = [(of.lhs, specs.lhs.data), (of.rhs, specs.rhs.data)]
    for letters, spec in terms + [(of.out, each) for each in jax.tree.leaves(specs.epilogue)]:
        for z, names in zip(letters, axes_of(spec, len(letters)), strict=True):
            if names and not {*names} & {name for others in found.values() for name in others}:
                found.setdefault(z, names)
    if call.out_spec is None:
        return spec_of(found.get(z, ()) for z in of.out)
    batch = [found.get("b", ())] * (len(of.out) - len(call.shape))
    requested = axes_of(call.out_spec, len(call.shape))
    return PartitionSpec(*spec_of([*batch, *requested]), unreduced=call.out_spec.unreduced)


def _gathers(have: tuple[Axes, ...], need: tuple[Axes, ...], over: Axes) -> bool:
    """Whether gathering over some of the axes `over` changes a sharding from `have` to `need`."""
    pairs = list(zip(have, need, strict=True))
    return all(h[: len(n)] == n and {*h[len(n) :]} <= {*over} for h, n in pairs)


def _gathered(x: Array, have: tuple[Axes, ...], need: tuple[Axes, ...]) -> Array:
    """The shard of an array with the sharding `need`, gathered from shards with the sharding `have`."""
    for axis, (h, n) in enumerate(zip(have, need, strict=True)):
        if more := h[len(n) :]:
            x = lax.all_gather(x, more, axis=axis, tiled=True)
    return x


def sizes_of_shard(
    sizes: dict[str, Array], call: Call, out: tuple[Axes, ...], shape: tuple[int, ...]
) -> dict[str, Array]:
    """Group sizes within a device's shard of the result, keyed by ragged letter. The shard has the shape `shape`; the
    result's axes are sharded over the mesh axes `out`."""
    axes = zip(call.product.out, out[-2:], shape[-2:], strict=True)
    return {z: _sizes(sizes[z], z, call, names, extent) for z, names, extent in axes if z in sizes}


def _size(names: Axes) -> int:
    return prod(lax.axis_size(name) for name in names)


def _sizes(sizes: Array, letter: str, call: Call, names: Axes, extent: int) -> Array:
    """Group sizes within the device's shard of a letter. `names`: its mesh axes. `extent`: the shard's extent."""
    if not names:
        return sizes
    first = lax.axis_index(names) * extent
    p = call.product
    if any(term[1] == letter for term in (p.lhs, p.rhs, p.out)):  # Left-aligned: each group begins at 0.
        return jnp.clip(as_int32(sizes), first, first + extent) - first  # `sizes - first` could leave int32
    ends = group_offsets(sizes, extent * _size(names))
    return jnp.diff(jnp.clip(ends - first, 0, extent))


def _with_scales(operand: Operand, term: str, letters: Mapping[str, Axes], sizes: Mapping[str, Array]) -> Operand:
    """An operand's shard with the shard's scales. If shards split blocks of scales, blocks are made smaller.

    `sizes`: the sizes of all groups, on all devices.
    """
    data, scales, _ = operand
    if scales is None:
        return operand
    for i in (0, 1):
        names, block, extent = letters.get(term[i - 2], ()), scales.block[i], data.shape[i - 2]
        packed = sizes.get(term[-2]) if i == 0 else None
        if names and block is not None and not _is_sharded(block, extent, packed is not None):
            if packed is not None:
                scales = of_rows(scales, packed, extent * _size(names))
            else:
                smaller = gcd(block, extent)
                each = partial(jnp.repeat, repeats=block // smaller, axis=i - 2)
                scales = scales.map(each, (smaller, scales.block[1]) if i == 0 else (scales.block[0], smaller))
            num_blocks = extent // (scales.block[i] or 1)
            start = lax.axis_index(names) * num_blocks
            scales = scales.map(partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=num_blocks, axis=i - 2))
    return Operand(data, scales)


def rule(x: Operands, call: Call) -> tuple[str, dict[str, tuple[str, ...]]]:
    """`(text, factors)`: the product as a sharding rule of Shardy, from which XLA infers shardings that aren't given.

    See `jax.experimental.custom_partitioning`. Each axis of sizes and scales, and each axis that is never sharded
    ("."), gets a name of its own. `x` must have no index.
    """
    of, counter = dims(x, call), count()
    operands = Operands(
        Operand(of.lhs, jax.tree.map(lambda array: "." * array.ndim, x.lhs.scales)),
        Operand(of.rhs, jax.tree.map(lambda array: "." * array.ndim, x.rhs.scales)),
        {z: "." * sizes.ndim for z, sizes in x.sizes.items()},
        None if x.offset is None else "." * x.offset.ndim,
        jax.tree.map(lambda _: of.out, x.epilogue),
    )
    replicated: list[str] = []

    def factors(letters: str) -> str:
        names = [f"w{next(counter)}" if z == "." else z for z in letters]
        replicated.extend(name for name in names if name[0] == "w")
        return " ".join(names)

    text = ", ".join(map(factors, jax.tree.leaves(operands))) + " -> " + factors(of.out)
    summed = tuple(z for z in dict.fromkeys(of.lhs + of.rhs) if z not in of.out + ".")
    return text, {"reduction_factors": summed, "need_replication_factors": tuple(replicated)}
