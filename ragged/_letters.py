"""An einsum of two tensors as one grouped product: what its letters are to each other, and where their axes go.

    "t h d, g d e -> t h e"        x [rows, heads, d], ragged along t;  w [groups, d, e]

    m   t h     of the product's lhs and the result     [(t h), d], whose groups have `heads` times as many rows
    k   d       contracted
    n   e       of the product's rhs and the result     [g, d, e]
    g   the groups' axis of what isn't ragged

Letters of both operands and of the result are batch letters, over which the product is mapped. Letters of one role lie
side by side, a ragged one first, and are one axis; so a product has its letters `m`, `k`, `n`, whatever an einsum has.
Where letters don't lie side by side in memory, their operand, or the result, is transposed: whichever is smaller.
"""

from collections.abc import Callable, Iterable
from itertools import product as every
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ragged._errors import Site, is_arraylike, is_concrete, is_count
from ragged._mesh import explicit_mesh, explicit_spec
from ragged.backends.schedule import as_int32
from ragged.quant.scaling import Scaling
from ragged.quant.weights import QuantizedWeights, unquantized
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import GroupedTensor

Names = tuple[str, ...]


class Factor(NamedTuple):
    """An operand as it lies in memory, its packed axis first, and the letter of each axis."""

    name: str
    x: Any  # a `GroupedTensor`, or an array
    letters: Names
    ragged: Names = ()  # the packed one first
    group: Names = ()  # that of its groups, if they have an axis
    given: Any = None  # what was passed, where `x` is made of it

    @staticmethod
    def of(name: str, given: Any, letters: Names) -> "Factor":
        x = given.dispatch() if isinstance(given, Gathered) else unquantized(given)
        given = None if x is given else given
        if not isinstance(x, GroupedTensor):
            return Factor(name, x, letters, given=given)
        if x._is_flipped:
            x, letters = x.mT, (*letters[:-2], letters[-1], letters[-2])
        if x.packed_axis is None:
            return Factor(name, x, letters, group=letters[:1], given=given)
        both = x.last_dims is not None
        return Factor(name, x, letters, (letters[0], letters[-1]) if both else letters[:1], given=given)

    def dims(self, letter: str) -> Any:
        """The groups' sizes of a ragged letter."""
        return self.x.first_dims if letter == self.ragged[0] else self.x.last_dims

    @property
    def extents(self) -> dict[str, int]:
        return dict(zip(self.letters, self.x.shape, strict=True))


class Einsum(NamedTuple):
    """A product's letters by their role. `lhs` is the factor with the result's first letter that isn't mapped."""

    lhs: Factor
    rhs: Factor
    out: Names
    extents: dict[str, int]  # of a ragged letter, where it is packed if it is
    group: Names
    batch: Names
    m: Names
    k: Names
    n: Names
    is_mapped: bool  # whether the batch letters are mapped; else they are more groups

    @property
    def ragged(self) -> Names:
        """The ragged letters of the result."""
        return tuple(z for z in self.out if z in (*self.lhs.ragged, *self.rhs.ragged))

    @property
    def roles(self) -> dict[str, Names]:
        """`m`, `k`, `n` and their letters."""
        return {"m": self.m, "k": self.k, "n": self.n}

    def dims(self, letter: str) -> Any:
        """The groups' sizes of a ragged letter; those of `lhs` count."""
        return (self.lhs if letter in self.lhs.ragged else self.rhs).dims(letter)

    def sizes(self, role: Names, factor: Factor | None = None) -> Any:
        """The groups' sizes of a role: those of its ragged letter, times the extents of the others; None without."""
        ragged = self.lhs.ragged + self.rhs.ragged
        if not role or role[0] not in ragged:
            return None
        letter, times = role[0], prod(self.extents[z] for z in role[1:])
        dims = self.dims(letter) if factor is None else factor.dims(letter)
        extent = self.extents[letter] if factor is None else factor.extents[letter]
        return dims if times == 1 else jnp.clip(as_int32(dims), 0, extent) * times

    def own(self, factor: Factor) -> tuple[Names, Names]:
        """The roles of a factor's letters, that of its packed axis first, or the one that lies in memory so."""
        roles = (self.m, self.k) if factor is self.lhs else (self.k, self.n)
        turned = roles[1], roles[0]
        if factor.ragged:
            return roles if factor.ragged[0] in roles[0] else turned
        return turned if self._is_as_stored(factor, turned) else roles

    def leading(self, factor: Factor) -> tuple[Names, ...]:
        """What is in front of a factor's roles, an axis each: the mapped letters, the groups'."""
        if not self.is_mapped:
            return (self.group + self.batch,) if factor.group else ()
        return (self.batch, self.group) if factor.group else (self.batch,)

    def _is_as_stored(self, factor: Factor, roles: tuple[Names, Names]) -> bool:
        return factor.letters == sum((*self.leading(factor), *roles), ())

    @property
    def result(self) -> tuple[Names, ...]:
        """The letters of the product's result as it is stored, axis by axis."""
        groups = () if self.ragged else (self.group,) if self.is_mapped else (self.group + self.batch,)
        return (*((self.batch,) if self.is_mapped else ()), *groups, self.m, self.n)

    @property
    def moved(self) -> int:
        """How many elements are transposed; a symbolic extent counts as one."""
        shapes = [f.x.shape for f in (self.lhs, self.rhs) if not self._is_as_stored(f, self.own(f))]
        shapes += [] if self.out == sum(self.result, ()) else [[self.extents[z] for z in self.out]]
        return sum(prod(n for n in shape if isinstance(n, int)) for shape in shapes)

    def product(
        self, site: Site, multiply: Callable[..., GroupedTensor], options: dict[str, Any], existing: Any
    ) -> GroupedTensor:
        """The einsum, by `multiply(lhs, rhs, site=, **options)` of groups that are matrices."""
        names = {"lhs": self.lhs.name, "rhs": self.rhs.name}
        inner = Site(site.call, {names[name]: x for name, x in site.operands.items()}, names)
        lhs, rhs = (_arranged(site, self, factor) for factor in (self.lhs, self.rhs))
        if existing is not None:
            existing = _merged(self._checked(site, existing), self.out, self.result)
        packed = self.n if {*self.ragged[:1]} & {*self.n} else self.m
        for name, role in (("capacity", packed), ("max_last", self.n)):
            if is_count(options.get(name), 0):
                options = options | {name: options[name] * prod(self.extents[z] for z in role[1:])}

        def one(lhs: Any, rhs: Any, existing: Any) -> Array:
            more = options if existing is None else options | {"existing_out": existing}
            lhs, rhs = self._turned(lhs, self.lhs), self._turned(rhs, self.rhs)
            return multiply(lhs, rhs, site=inner, **more).data

        axes = (_mapped(lhs), _mapped(rhs), None if existing is None else 0)
        out = (jax.vmap(one, axes) if self.is_mapped else one)(lhs, rhs, existing)
        dims = {z: self.dims(z) for z in self.ragged}
        extents, order = dict(self.extents), sum(self.result, ())
        for extent, letters in zip(out.shape, self.result, strict=True):
            times = prod(extents[z] for z in letters[1:])
            if letters and times != 0:  # options may say another than the operands'
                extents[letters[0]] = extent // times
        out = _transposed(_reshaped(out, tuple(extents[z] for z in order)), order, self.out)
        return GroupedTensor(out, dims.get(self.out[0]), dims.get(self.out[-1]))

    def _checked(self, site: Site, existing: Any) -> Array:
        """The buffer of `existing_out`."""
        site = site.also(existing_out=existing)
        data = existing.data if isinstance(existing, GroupedTensor) else existing
        mend = "It must be a tensor like the result, or its buffer."
        if not is_arraylike(data) or getattr(existing, "is_quantized", False):
            site.fail(TypeError, "`existing_out` holds no array of values.", mend)
        if data.ndim != len(self.out):
            site.fail(ValueError, f"`existing_out` has {data.ndim} dims, the result {len(self.out)}.", mend)
        for z, extent in zip(self.out, data.shape, strict=True):
            if z not in self.ragged + self.group and extent != self.extents[z]:
                problem = f"`existing_out` has the extent {extent} along {z!r}, which is {self.extents[z]}."
                site.fail(ValueError, problem, mend)
        if isinstance(existing, GroupedTensor):
            ragged = (self.out[0] in self.ragged, self.out[-1] in self.ragged)
            dims = [
                self.dims(z) if is_ragged else None
                for z, is_ragged in zip((self.out[0], self.out[-1]), ragged, strict=True)
            ]
            if existing.ragged != ragged or any(map(known_to_differ, (existing.first_dims, existing.last_dims), dims)):
                site.fail(ValueError, "`existing_out` has other groups than the result.", mend)
        return jnp.asarray(data)

    def _turned(self, x: Any, factor: Factor) -> Any:
        """An operand with the product's rows first."""
        return x if self.own(factor)[0] == (self.m if factor is self.lhs else self.k) else x.mT


def _reshaped(x: Array, shape: tuple[int, ...]) -> Array:
    return x if x.shape == shape else x.reshape(shape)


def _transposed(x: Array, letters: Names, order: Names) -> Array:
    return x if letters == order else jnp.transpose(x, [letters.index(z) for z in order])


def _merged(x: Array, letters: Names, parts: tuple[Names, ...]) -> Array:
    """The axes of `x` in the order of `parts`, each of which is one axis."""
    extents = dict(zip(letters, x.shape, strict=True))
    return _reshaped(_transposed(x, letters, sum(parts, ())), tuple(prod(extents[z] for z in part) for part in parts))


def _mapped(x: Any) -> Any:
    """Which leaves of an arranged operand have a batch axis."""
    if not isinstance(x, GroupedTensor):
        return 0
    by_block = x.is_quantized and x.scaling.block not in (None, (None, None))
    return x._with(data=0, first_dims=None, last_dims=None, scales=0 if by_block else None, tensor_scale=None)


def _arranged(site: Site, e: Einsum, factor: Factor) -> Any:
    """An operand as matrices, or as one for all groups: mapped axis, groups, and the two roles in the order of
    `Einsum.own`."""
    x, own = factor.x, e.own(factor)
    parts = (*e.leading(factor), *own)
    if explicit_mesh(leaves := jax.tree.leaves(x)) is not None:
        axes = dict(zip(factor.letters, explicit_spec(leaves[0]) or (), strict=False))
        for part in parts:
            if sharded := [z for z in part[1:] if axes.get(z)]:
                problem = (
                    f"the letters '{' '.join(part)}' of `{factor.name}` become one, and {sharded[0]!r} is sharded "
                )
                mend = f"Shard {part[0]!r} instead, or make that mesh axis `Auto`."
                site.fail(NotImplementedError, problem + "over an `Explicit` mesh axis.", mend)
    is_as_given = parts == tuple((z,) for z in factor.letters)
    if isinstance(factor.given, QuantizedWeights) and not is_as_given:
        mend = f"Pass `{factor.name}.weights`."
        site.fail(NotImplementedError, f"`{factor.name}` is quantised, and has to be merged or transposed.", mend)
    if factor.given is not None and is_as_given and (own[0] == e.m or not isinstance(factor.given, Gathered)):
        return factor.given
    if not isinstance(x, GroupedTensor):
        data = _merged(jnp.asarray(x), factor.letters, parts)
        return GroupedTensor(data) if factor.group else data
    first, last = (e.sizes(role, factor) if set(role) & set(factor.ragged) else None for role in own)
    if is_as_given:
        return x
    scales, scaling = (x.scales, x.scaling) if not x.is_quantized else _scales(site, e, factor, parts)
    data = _merged(jnp.asarray(x.data), factor.letters, parts)
    return x._with(data=data, first_dims=first, last_dims=last, scales=scales, scaling=scaling, transposed=False)


def _scales(site: Site, e: Einsum, factor: Factor, parts: tuple[Names, ...]) -> tuple[Array, Scaling]:
    """The scales of a quantised operand whose letters are arranged as `parts`, if they are by blocks again."""
    x, letters = factor.x, factor.letters
    if x.scaling.block in (None, (None, None)):
        more = 1 if e.is_mapped or x.scaling.block is None else prod(e.extents[z] for z in e.batch)
        return (x.scales if more == 1 else jnp.repeat(jnp.asarray(x.scales), more)), x.scaling  # more groups
    rest = len(letters) - len(factor.group) - 2
    first, last = x.scaling.block
    blocks = dict(zip(letters, [*[1] * len(factor.group), first, *[1] * rest, last], strict=True))
    scales, leading = jnp.asarray(x.scales), sum(parts[:-2], ())
    for axis, z in enumerate(letters):
        if z in leading and blocks[z] is None:  # all that are mapped have the same
            blocks[z] = 1
            scales = jnp.repeat(scales, e.extents[z], axis, total_repeat_length=e.extents[z])
    merged = []
    for part in parts:
        *outer, inner = part or ("",)
        block, extent = blocks.get(inner, 1), e.extents.get(inner, 1)
        if outer:
            block = extent if block is None else block
            if extent % block or any(blocks[z] != 1 for z in outer):
                problem = f"the letters '{' '.join(part)}' of `{factor.name}` become one, which blocks of its scaling, "
                mend = f'Quantise it by "row", "group" or "tensor", or take `{factor.name}.dequantize()`.'
                site.fail(NotImplementedError, f"{problem}{x.scaling}, would not tile.", mend)
        merged.append(block)
    if any(block != 1 for block in merged[:-2]):
        problem = f"`{factor.name}` has the scaling {x.scaling}, of several of the letters '{' '.join(e.batch)}'."
        mend = f'Quantise it by "group" or "tensor", or take `{factor.name}.dequantize()`.'
        site.fail(NotImplementedError, problem, mend)
    return _merged(scales, letters, parts), Scaling((merged[-2], merged[-1]), x.scaling.dtype)


def einsum_of(lhs: Factor, rhs: Factor, out: Names, group: Names = ()) -> Einsum:
    """The product that letters come to, those of each role in the order that moves least."""
    extents = rhs.extents | lhs.extents
    for factor in (lhs, rhs):
        extents |= {z: factor.extents[z] for z in factor.ragged[:1]}
        extents |= {z: factor.x.num_groups for z in group if factor.ragged}
    roles: dict[str, list[str]] = {"batch": [], "m": [], "k": [], "n": []}
    mine, theirs = set(lhs.letters) - set(group), set(rhs.letters) - set(group)
    kept = [z for z in out if (z in mine) != (z in theirs)]
    if kept and kept[0] in theirs:
        return einsum_of(rhs, lhs, out, group)
    for z in dict.fromkeys(lhs.letters + rhs.letters):
        if z in mine or z in theirs:
            of_operand = "m" if z in mine else "n"
            roles["k" if z not in out else "batch" if z in mine and z in theirs else of_operand].append(z)
    batch = tuple(roles["batch"])
    if not lhs.ragged and not rhs.ragged:  # a plain array may share the other's groups
        lhs, rhs = (f._replace(group=group if set(group) <= set(f.letters) else ()) for f in (lhs, rhs))
    is_mapped = bool(batch) and bool(lhs.ragged or rhs.ragged or not (lhs.group and rhs.group))
    m, k, n = (tuple(roles[name]) for name in "mkn")
    one = Einsum(lhs, rhs, out, extents, group, batch, m, k, n, is_mapped)
    ragged = lhs.ragged + rhs.ragged

    def orders(letters: list[str], *terms: Names) -> Iterable[Names]:
        """A role's letters in the order of each term, a ragged one first."""
        found = (tuple(sorted(letters, key=lambda z: (z not in ragged, term.index(z)))) for term in terms)
        return dict.fromkeys(found)

    candidates = every(
        orders(roles["batch"], lhs.letters, rhs.letters, out),
        orders(roles["m"], lhs.letters, out),
        orders(roles["k"], lhs.letters, rhs.letters),
        orders(roles["n"], rhs.letters, out),
    )
    return min((one._replace(batch=b, m=m, k=k, n=n) for b, m, k, n in candidates), key=lambda e: e.moved)


def known_to_differ(one: Any, other: Any) -> bool:
    """Whether two arrays of sizes are known, and not equal."""
    return is_concrete(one, other) and not np.array_equal(one, other)
