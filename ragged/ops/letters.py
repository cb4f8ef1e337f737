"""An einsum of two tensors as one grouped product: the role of each letter, and the order of their axes.

    "t h d, g d e -> t h e"        x [rows, heads, d], ragged along t;  w [groups, d, e]

    role   letters
    m      t h       in the product's lhs and the result: [(t h), d], whose groups have `heads` times as many rows
    k      d         contracted
    n      e         in the product's rhs and the result: [g, d, e]
    g                the groups' axis of a uniform operand or result

The product is mapped over batch letters, which are in both operands and the result. The letters of a role are merged
into one axis, a ragged letter first, so the product has only the letters `m`, `k` and `n`. If they aren't adjacent in
memory, an operand or the result is transposed. The letters have the order that transposes the fewest elements.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ragged.core.errors import MAX_ROWS, Site, is_arraylike, is_count, known_to_differ
from ragged.core.mesh import explicit_mesh, explicit_spec, resharded
from ragged.core.offsets import as_int32
from ragged.core.scaling import Scaling
from ragged.primitive.sharding import axes_of, spec_of
from ragged.quant.weights import QuantizedWeights, unquantized
from ragged.tensor.base import is_read_transposed, with_fields
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import GroupedTensor

Names = tuple[str, ...]


class EinsumOperand(NamedTuple):
    """An operand in storage order, the packed axis first, with the letter of each axis."""

    name: str
    x: Any  # a `GroupedTensor`, or an array
    letters: Names
    ragged: Names = ()  # the letter of the packed axis first
    group: Names = ()  # the letter of the groups' axis, if there is one
    given: Any = None  # the caller's `Gathered` or `QuantizedWeights`, from which `x` was computed

    @staticmethod
    def of(name: str, given: Any, letters: Names) -> "EinsumOperand":
        x = given.dispatch() if isinstance(given, Gathered) else unquantized(given)
        given = None if x is given else given
        if not isinstance(x, GroupedTensor):
            return EinsumOperand(name, x, letters, given=given)
        if is_read_transposed(x):
            x, letters = x.mT, (*letters[:-2], letters[-1], letters[-2])
        if x.packed_axis is None:
            return EinsumOperand(name, x, letters, group=letters[:1], given=given)
        both = x.last_dims is not None
        return EinsumOperand(name, x, letters, (letters[0], letters[-1]) if both else letters[:1], given=given)

    def dims(self, letter: str) -> Any:
        """The group sizes along a ragged letter."""
        return self.x.first_dims if letter == self.ragged[0] else self.x.last_dims

    @property
    def extents(self) -> dict[str, int]:
        return dict(zip(self.letters, self.x.shape, strict=True))


class Einsum(NamedTuple):
    """The letters of a product by role.

    `lhs` has the first of the result's letters that are in only one operand. So `lhs` and `rhs` may be the caller's
    operands swapped.
    """

    lhs: EinsumOperand
    rhs: EinsumOperand
    out: Names
    extents: dict[str, int]  # the extent of each letter; the capacity, if an operand packs the letter
    group: Names
    batch: Names
    m: Names
    k: Names
    n: Names
    is_mapped: bool  # whether the product is mapped over the batch letters; else they are merged into the groups

    @property
    def ragged(self) -> Names:
        """The ragged letters of the result."""
        return tuple(z for z in self.out if z in (*self.lhs.ragged, *self.rhs.ragged))

    @property
    def roles(self) -> dict[str, Names]:
        return {"m": self.m, "k": self.k, "n": self.n}

    def dims(self, letter: str) -> Any:
        return (self.lhs if letter in self.lhs.ragged else self.rhs).dims(letter)

    def sizes(self, role: Names) -> Any:
        """The groups' sizes of a role: sizes of its ragged letter times the extents of its other letters; None without
        a ragged letter.

        They are clipped only against overflow, not to a capacity: capacities differ between buffers.
        """
        if not role or role[0] not in self.lhs.ragged + self.rhs.ragged:
            return None
        dims, times = self.dims(role[0]), prod(self.extents[z] for z in role[1:])
        return dims if times == 1 else jnp.clip(as_int32(dims), 0, MAX_ROWS // (times or 1)) * times

    def roles_of(self, operand: EinsumOperand) -> tuple[Names, Names]:
        """The letters of the operand's two roles, in the order of its merged axes: first the role of a packed axis. An
        operand without a packed axis has the order that avoids a transpose, if there is one."""
        roles = (self.m, self.k) if operand is self.lhs else (self.k, self.n)
        swapped = roles[1], roles[0]
        if operand.ragged:
            return roles if operand.ragged[0] in roles[0] else swapped
        return swapped if self._is_as_stored(operand, swapped) else roles

    def leading(self, operand: EinsumOperand) -> tuple[Names, ...]:
        """The letters of each axis before the operand's two roles: mapped letters, groups."""
        if not self.is_mapped:
            return (self.group + self.batch,) if operand.group else ()
        return (self.batch, self.group) if operand.group else (self.batch,)

    def _is_as_stored(self, operand: EinsumOperand, roles: tuple[Names, Names]) -> bool:
        return operand.letters == sum((*self.leading(operand), *roles), ())

    @property
    def result(self) -> tuple[Names, ...]:
        """The letters of each axis of the product's buffer, in storage order."""
        groups = () if self.ragged else (self.group,) if self.is_mapped else (self.group + self.batch,)
        return (*((self.batch,) if self.is_mapped else ()), *groups, self.m, self.n)

    @property
    def moved(self) -> int:
        """Number of elements that are transposed; a symbolic extent counts as one."""
        operands = [each for each in (self.lhs, self.rhs) if not self._is_as_stored(each, self.roles_of(each))]
        shapes = [each.x.shape for each in operands]
        shapes += [] if self.out == sum(self.result, ()) else [[self.extents[z] for z in self.out]]
        return sum(prod(n for n in shape if isinstance(n, int)) for shape in shapes)

    def product(self, site: Site, multiply: Callable[..., GroupedTensor], arguments: Any) -> GroupedTensor:
        """The einsum's result. `multiply(lhs, rhs, arguments, site)` multiplies operands whose groups are matrices."""
        # Errors name the caller's operands, which `einsum_of` may have swapped.
        names = {"lhs": self.lhs.name, "rhs": self.rhs.name}
        inner = Site(site.call, {names[name]: x for name, x in site.operands.items()}, names)
        lhs, rhs = (_arranged(site, self, operand) for operand in (self.lhs, self.rhs))
        existing = None
        if arguments.existing_out is not None:
            existing = _merged(self._checked(site, arguments.existing_out), self.out, self.result)
        # The caller's extents are of one letter, the product's of all letters of the role, merged.
        packed = self.n if self.ragged and self.ragged[0] in self.n else self.m
        for name, role in (("capacity", packed), ("max_last", self.n)):
            if is_count(extent := getattr(arguments, name), 0):
                arguments = replace(arguments, **{name: extent * prod(self.extents[z] for z in role[1:])})

        def one(lhs: Any, rhs: Any, existing: Any) -> Array:
            lhs, rhs = self._for_matmul(lhs, self.lhs), self._for_matmul(rhs, self.rhs)
            return multiply(lhs, rhs, replace(arguments, existing_out=existing), inner).data

        given = lhs, rhs, existing
        if self.is_mapped:
            axes = (_mapped(lhs), _mapped(rhs), None if existing is None else 0)
            out = jax.vmap(one, axes)(*_split_alike(given, axes))
        else:
            out = one(*given)
        dims = {z: self.dims(z) for z in self.ragged}
        extents, order = dict(self.extents), sum(self.result, ())
        for extent, letters in zip(out.shape, self.result, strict=True):
            times = prod(extents[z] for z in letters[1:])
            if letters and times != 0:  # `capacity` or `max_last` may set another extent.
                extents[letters[0]] = extent // times
        out = transposed(_reshaped(out, tuple(extents[z] for z in order)), order, self.out)
        return GroupedTensor(out, dims.get(self.out[0]), dims.get(self.out[-1]))

    def _checked(self, site: Site, existing: Any) -> Array:
        """The buffer of `existing_out`. Raises unless it fits the result."""
        site = site.also(existing_out=existing)
        data = existing.data if isinstance(existing, GroupedTensor) else existing
        hint = "It must be a tensor like the result, or its buffer."
        if not is_arraylike(data) or getattr(existing, "is_quantized", False):
            site.fail(TypeError, "`existing_out` holds no array of values.", hint)
        if data.ndim != len(self.out):
            problem = f"`existing_out` has {data.ndim} dims, but the result has {len(self.out)}."
            site.fail(ValueError, problem, hint)
        for z, extent in zip(self.out, data.shape, strict=True):
            if z not in self.ragged + self.group and extent != self.extents[z]:
                problem = f"`existing_out` has the extent {extent} along {z!r}, but the result has {self.extents[z]}."
                site.fail(ValueError, problem, hint)
        if isinstance(existing, GroupedTensor):
            ragged = (self.out[0] in self.ragged, self.out[-1] in self.ragged)
            dims = [
                self.dims(z) if is_ragged else None
                for z, is_ragged in zip((self.out[0], self.out[-1]), ragged, strict=True)
            ]
            if existing.ragged != ragged or any(map(known_to_differ, (existing.first_dims, existing.last_dims), dims)):
                site.fail(ValueError, "`existing_out` has groups of other sizes than the result.", hint)
            if existing.kind == "ragged both" and existing.packed_axis == -1:
                site.fail(ValueError, "`existing_out` is packed along its columns, the result along its rows.", hint)
        return jnp.asarray(data)

    def _for_matmul(self, x: Any, operand: EinsumOperand) -> Any:
        """An arranged operand as `matmul` takes it: `[m, k]` for `lhs`, `[k, n]` for `rhs`."""
        return x if self.roles_of(operand)[0] == (self.m if operand is self.lhs else self.k) else x.mT


def _reshaped(x: Array, shape: tuple[int, ...]) -> Array:
    return x if x.shape == shape else x.reshape(shape)


def transposed(x: Array, letters: Names, order: Names) -> Array:
    return x if letters == order else jnp.transpose(x, [letters.index(z) for z in order])


def _merged(x: Array, letters: Names, parts: tuple[Names, ...]) -> Array:
    """`x` transposed to the order of `parts`, with the letters of each part merged into one axis."""
    extents = dict(zip(letters, x.shape, strict=True))
    return _reshaped(transposed(x, letters, sum(parts, ())), tuple(prod(extents[z] for z in part) for part in parts))


def _mapped(x: Any) -> Any:
    """`in_axes` of an arranged operand: 0 for leaves with a batch axis, else None."""
    if not isinstance(x, GroupedTensor):
        return 0
    by_block = x.scaling is not None and x.scaling.block not in (None, (None, None))
    axis = 0 if by_block else None
    zeros = None if x.zero_points is None else axis
    return with_fields(x, data=0, first_dims=None, last_dims=None, scales=axis, tensor_scale=None, zero_points=zeros)


def _split_alike(operands: tuple[Any, ...], axes: tuple[Any, ...]) -> Any:
    """The operands of a map over `axes`. If a mapped axis is sharded over `Explicit` mesh axes, so are all others, like
    the first of them, and no other axis is sharded over these: JAX requires this of a map."""

    def each(axis: int | None, x: Any) -> Any:
        return jax.tree.map(lambda _: axis is not None, x)

    leaves, tree = jax.tree.flatten(operands)
    is_mapped = jax.tree.leaves(jax.tree.map(each, axes, operands, is_leaf=lambda axis: axis is None))
    specs = [axes_of(explicit_spec(x) or PartitionSpec(), jnp.ndim(x)) for x in leaves]
    split = [i for i, mapped in enumerate(is_mapped) if mapped and specs[i][0]]
    if not split:
        return operands
    first, mesh = specs[split[0]][0], jax.typeof(leaves[split[0]]).sharding.mesh
    for i, (mapped, spec) in enumerate(zip(is_mapped, specs, strict=True)):
        free = [() if {*names} & {*first} else names for names in spec]
        wanted = (first, *free[1:]) if mapped else (*free,)
        leaves[i] = leaves[i] if wanted == spec else resharded(leaves[i], mesh, spec_of(wanted))
    return tree.unflatten(leaves)


def _arranged(site: Site, e: Einsum, operand: EinsumOperand) -> Any:
    """An operand with merged axes: the mapped axis, the groups, and the two roles as in `Einsum.roles_of`."""
    x, roles = operand.x, e.roles_of(operand)
    parts = (*e.leading(operand), *roles)
    if explicit_mesh(leaves := jax.tree.leaves(x)) is not None:
        axes = dict(zip(operand.letters, explicit_spec(leaves[0]) or (), strict=False))
        for part in parts:
            if sharded := [z for z in part[1:] if axes.get(z)]:
                problem = f"the letters '{' '.join(part)}' of `{operand.name}` have to be merged into one axis, but "
                problem += f"{sharded[0]!r} is sharded over an `Explicit` mesh axis."
                hint = f"Shard {part[0]!r} instead, or make that mesh axis `Auto`."
                site.fail(NotImplementedError, problem, hint)
    is_as_given = parts == tuple((z,) for z in operand.letters)
    if isinstance(operand.given, QuantizedWeights) and not is_as_given:
        problem = f"`{operand.name}` is quantised, but its axes have to be merged or transposed."
        site.fail(NotImplementedError, problem, f"Pass `{operand.name}.weights`.")
    # A `Gathered` has no transpose, so it is passed on only if none is needed.
    if operand.given is not None and is_as_given and (roles[0] == e.m or not isinstance(operand.given, Gathered)):
        return operand.given
    if not isinstance(x, GroupedTensor):
        data = _merged(jnp.asarray(x), operand.letters, parts)
        return GroupedTensor(data) if operand.group else data
    if is_as_given:
        return x
    first, last = (e.sizes(role) if set(role) & set(operand.ragged) else None for role in roles)
    scales, scaling, zeros = x.scales, x.scaling, x.zero_points
    if x.is_quantized:
        scales, scaling = _scales(site, e, operand, parts, x.scales)
        zeros = None if zeros is None else _scales(site, e, operand, parts, zeros)[0]
    data = _merged(jnp.asarray(x.data), operand.letters, parts)
    # Batch letters that aren't mapped become groups, and each group needs a scale.
    scale, repeats = x.tensor_scale, 1 if e.is_mapped else prod(e.extents[z] for z in e.batch)
    if scale is not None and scale.ndim:
        scale = jnp.repeat(jnp.asarray(scale), repeats)
    more = {"scales": scales, "scaling": scaling, "tensor_scale": scale, "zero_points": zeros}
    return with_fields(x, data=data, first_dims=first, last_dims=last, **more, transposed=False)


def _scales(
    site: Site, e: Einsum, operand: EinsumOperand, parts: tuple[Names, ...], scales: Any
) -> tuple[Array, Scaling]:
    """`(scales, scaling)` of a quantised operand whose axes are merged to `parts`; `scales` may be zero points. Raises
    if the merged axes would split a block."""
    x, letters = operand.x, operand.letters
    if x.scaling.block in (None, (None, None)):
        # Unmapped batch letters become groups, and each needs a scale.
        repeats = 1 if e.is_mapped or x.scaling.block is None else prod(e.extents[z] for z in e.batch)
        return (scales if repeats == 1 else jnp.repeat(jnp.asarray(scales), repeats)), x.scaling
    rest = len(letters) - len(operand.group) - 2
    first, last = x.scaling.block
    blocks = dict(zip(letters, [*[1] * len(operand.group), first, *[1] * rest, last], strict=True))
    scales, leading = jnp.asarray(scales), sum(parts[:-2], ())
    for axis, z in enumerate(letters):
        if z in leading and blocks[z] is None:  # One scale for the whole axis: each mapped element gets a copy.
            blocks[z] = 1
            scales = jnp.repeat(scales, e.extents[z], axis, total_repeat_length=e.extents[z])
    merged = []
    for part in parts:
        *outer, inner = part or ("",)
        block, extent = blocks.get(inner, 1), e.extents.get(inner, 1)
        if outer:
            block = extent if block is None else block
            if extent % block or any(blocks[z] != 1 for z in outer):
                problem = f"the letters '{' '.join(part)}' of `{operand.name}` have to be merged into one axis, but "
                problem += f"blocks of its scaling, {x.scaling}, don't tile that axis."
                hint = f'Quantise it by "row", "group" or "tensor", or pass `{operand.name}.dequantize()`.'
                site.fail(NotImplementedError, problem, hint)
        merged.append(block)
    if any(block != 1 for block in merged[:-2]):
        problem = (
            f"`{operand.name}` has the scaling {x.scaling}, whose blocks span several elements of the batch letters "
        )
        hint = f'Quantise it by "group" or "tensor", or pass `{operand.name}.dequantize()`.'
        site.fail(NotImplementedError, f"{problem}'{' '.join(e.batch)}'.", hint)
    return _merged(scales, letters, parts), Scaling((merged[-2], merged[-1]), x.scaling.dtype)


def einsum_of(lhs: EinsumOperand, rhs: EinsumOperand, out: Names, group: Names = ()) -> Einsum:
    """The einsum of these letters, in the order that transposes the fewest elements.

    `out`: the letters of the result. `group`: the letter of the groups, if any.
    """
    extents = rhs.extents | lhs.extents
    for operand in (lhs, rhs):
        extents |= {z: operand.extents[z] for z in operand.ragged[:1]}
        extents |= {z: operand.x.num_groups for z in group if operand.ragged}
    roles: dict[str, list[str]] = {"batch": [], "m": [], "k": [], "n": []}
    in_lhs, in_rhs = set(lhs.letters) - set(group), set(rhs.letters) - set(group)
    uncontracted = [z for z in out if (z in in_lhs) != (z in in_rhs)]
    if uncontracted and uncontracted[0] in in_rhs:
        return einsum_of(rhs, lhs, out, group)
    for z in dict.fromkeys(lhs.letters + rhs.letters):
        if z in in_lhs and z in in_rhs:
            roles["batch" if z in out else "k"].append(z)
        elif z in in_lhs or z in in_rhs:
            roles["k" if z not in out else "m" if z in in_lhs else "n"].append(z)
    batch = tuple(roles["batch"])
    if not lhs.ragged and not rhs.ragged:  # The letter of the groups may be in a plain array.
        lhs, rhs = (each._replace(group=group if set(group) <= set(each.letters) else ()) for each in (lhs, rhs))
    # Batch letters can be merged into the groups only if both operands have a group axis.
    is_mapped = bool(batch) and not (lhs.group and rhs.group)
    m, k, n = (tuple(roles[name]) for name in "mkn")
    one = Einsum(lhs, rhs, out, extents, group, batch, m, k, n, is_mapped)
    ragged = lhs.ragged + rhs.ragged

    def orders(letters: list[str], *terms: Names) -> Iterable[Names]:
        """Orders of a role's letters: the order of each of `terms`, but with a ragged letter first."""
        found = (tuple(sorted(letters, key=lambda z: (z not in ragged, term.index(z)))) for term in terms)
        return dict.fromkeys(found)

    candidates = itertools.product(
        orders(roles["batch"], lhs.letters, rhs.letters, out),
        orders(roles["m"], lhs.letters, out),
        orders(roles["k"], lhs.letters, rhs.letters),
        orders(roles["n"], rhs.letters, out),
    )
    return min((one._replace(batch=b, m=m, k=k, n=n) for b, m, k, n in candidates), key=lambda e: e.moved)
