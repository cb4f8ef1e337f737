"""A kind of tensor, and programs that run operations on tensors of that kind: compiled once, to run on many draws."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ragged import GroupedTensor, per_column, per_group, per_row
from tests.contract import loop
from tests.contract.draws import size_table
from tests.contract.loop import Arrays, Place, Sum, Term
from tests.contract.operations import Group, Operation, operations

BATCH = 2
STEP = 1e-40
"""Of complex-step derivatives. Its products vanish, so that they are exact."""
FILLS = (np.nan, np.inf, 0.0, -3.0)
SPECIAL = (np.nan, np.inf, -np.inf)


class Input(NamedTuple):
    """An input of operations: of its buffer's shape, the part that each group uses, and that part's shape there."""

    shape: tuple[int, ...]
    places: list[Place]
    shapes: list[tuple[int, ...]]


class Draw(NamedTuple):
    arrays: Arrays  # by the names of `Kind.inputs`, and "start"
    sizes: Arrays  # by letter
    cotangents: Arrays  # by operation
    reference: "Reference"

    @property
    def given(self) -> tuple[Arrays, Arrays, Arrays]:
        return self.arrays, self.sizes, self.cotangents


class Values(dict[str, Any]):
    """What an operation runs on. Notes which are used."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.used: list[str] = []

    def __getitem__(self, name: str) -> Any:
        if name not in (*self.used, "np", "start"):
            self.used.append(name)
        return super().__getitem__(name)

    __getattr__ = __getitem__


@dataclass(frozen=True)
class Kind:
    """A kind of tensor, of letters `m` (rows) and `n` (columns)."""

    ragged: str  # which of the letters are ragged
    dtype: str = "float32"
    more: tuple[int, ...] = ()  # extents of further dims of a group, between its rows and columns
    packed_last: bool = False  # whether a tensor that is ragged in both dims is packed along its columns
    turned: bool = False  # whether it is the `mT` of the other kind
    mapped: str = ""  # which of "data sizes" have a batch axis
    groups: int = 5
    capacity: int = 20
    width: int = 5  # of the buffer, along a ragged dim that isn't packed
    extent: int = 3  # of dims that aren't ragged

    def __str__(self) -> str:
        name = {"": "uniform", "m": "rows", "n": "columns", "mn": "both"}[self.ragged]
        others = (f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) != f.default)
        return "-".join((name, *others)).replace(" ", "+")

    @property
    def rank(self) -> int:
        return 2 + len(self.more)

    @property
    def packed(self) -> int | None:
        """The packed axis."""
        if not self.ragged:
            return None
        return -1 if self.ragged == "n" or self.packed_last else -self.rank

    @cached_property
    def operations(self) -> dict[str, Operation]:
        return operations(self.rank, self.packed)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the buffer."""
        m, n = (
            self.capacity if self.packed == axis else self.width if z in self.ragged else self.extent
            for z, axis in (("m", -self.rank), ("n", -1))
        )
        return (*(() if self.ragged else (self.groups,)), m, *self.more, n)

    def places(self, sizes: Arrays) -> list[Place]:
        """Where each group is in the buffer."""
        letter = {None: "", -1: "n"}.get(self.packed, "m")
        shape = self.shape[: len(self.shape) - self.rank + 1] + self.shape[-1:]
        found = loop.places({"x": Term("mn", self.ragged, letter, shape)}, sizes, self.groups)["x"]
        assert None not in found
        return [(*at[:-1], *[slice(n) for n in self.more], at[-1]) for at in found if at is not None]

    def tensor(self, data: Array, sizes: Mapping[str, Array]) -> GroupedTensor:
        m, n = sizes.get("m"), sizes.get("n")
        if self.turned:
            return GroupedTensor(data.mT, n, m, transposed=self.packed_last ^ (self.ragged == "mn")).mT
        return GroupedTensor(data, m, n, transposed=self.packed_last)

    def reduced(self, group: int, place: Place, axis: int | None) -> Place:
        """Where a group is in the result of a reduction along `axis`."""
        if axis is None:
            return (group,)
        others = [at for i, at in enumerate(place) if i != len(place) + axis]
        return (group, *others) if axis == self.packed else tuple(others)

    def reduced_shape(self, axis: int | None) -> tuple[int, ...]:
        if axis is None:
            return (self.groups,)
        others = [n for i, n in enumerate(self.shape) if i != len(self.shape) + axis]
        return (self.groups, *others) if axis == self.packed else tuple(others)

    def inputs(self, sizes: Arrays) -> dict[str, Input]:
        places = self.places(sizes)
        groups = [tuple(at.stop - at.start for at in place[-self.rank :]) for place in map(_with_starts, places)]
        first = -self.rank if self.packed is None else self.packed

        def each(shape: Sequence[int], place: Callable[..., Place], own: Callable[..., Any]) -> Input:
            return Input(tuple(shape), [place(i, at) for i, at in enumerate(places)], [own(g) for g in groups])

        def along(*axes: int) -> Callable[..., Any]:
            """A group's shape with 1 in all but these axes."""
            return lambda group: tuple(n if i - self.rank in axes else 1 for i, n in enumerate(group))

        def without(axis: int, shape: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(n for i, n in enumerate(shape) if i != len(shape) + axis)

        row, others = len(self.shape) - self.rank + 1, [a for a in range(-self.rank, 0) if a != first]
        found = {name: each(self.shape, lambda i, at: at, lambda group: group) for name in ("x", "y")}
        found["v"] = each((self.groups,), lambda i, at: (i,), along())
        found["w"] = each(
            (self.groups, *without(first, self.shape[-self.rank :])),
            lambda i, at: (i, *without(first, at[-self.rank :])),
            along(*others),
        )
        found["r"] = each(self.shape[:row], lambda i, at: at[:row], along(-self.rank))
        found["c"] = each(self.shape[-1:], lambda i, at: at[-1:], along(-1))
        found["s"] = each((), lambda i, at: (), along())
        for axis in range(-self.rank, 0):
            found[f"sink{axis}"] = each(
                self.reduced_shape(axis),
                lambda i, at, a=axis: self.reduced(i, at, a),
                lambda group, a=axis: without(a, group),
            )
        return found

    # What JAX computes.

    def values(self, arrays: Mapping[str, Array], sizes: Mapping[str, Array]) -> Values:
        found: dict[str, Any] = {"np": jnp, **arrays}
        found |= {name: self.tensor(arrays[name], sizes) for name in ("x", "y")}
        wrappers = {"v": per_group, "w": per_group, "r": per_row, "c": per_column}
        return Values(found | {name: wrap(arrays[name]) for name, wrap in wrappers.items()})

    def compute(
        self, names: Sequence[str], differentiated: Sequence[str], arrays: Any, sizes: Any, cotangents: Any
    ) -> tuple[dict[str, Any], dict[str, dict[str, Array]]]:
        """The results of operations, and the derivatives of some by the inputs that they use."""
        results, gradients = {}, {}
        for name in names:
            run = self.operations[name].run
            values = self.values(arrays, sizes)
            if name not in differentiated:
                results[name] = run(values)
                continue
            jax.eval_shape(lambda run=run, values=values: run(values))
            used = {each: arrays[each] for each in values.used}

            def of_used(used: dict[str, Array], run: Any = run) -> tuple[Array, Any]:
                out = run(self.values({**arrays, **used}, sizes))
                return jax.tree.leaves(out)[0], out

            _, pull, results[name] = jax.vjp(of_used, used, has_aux=True)
            gradients[name] = pull(cotangents[name])[0]
        return results, gradients

    def program(self, names: Sequence[str], differentiated: Sequence[str]) -> Callable[..., Any]:
        def compute(arrays: Any, sizes: Any, cotangents: Any) -> Any:
            return self.compute(names, differentiated, arrays, sizes, cotangents)

        if not self.mapped:
            return jax.jit(compute)
        axes = tuple(0 if each in self.mapped.split() else None for each in ("data", "sizes"))
        return jax.jit(jax.vmap(compute, (*axes, 0)))

    @property
    def differentiable(self) -> list[str]:
        """The operations whose results are floats."""
        return [name for name, out in self.avals.items() if out.dtype == self.dtype]

    # What it computes it of.

    def draws(self, count: int, differentiated: Sequence[str], seed: int = 0) -> Iterator[Draw]:
        """Every pattern of sizes in turn; around the groups, and in every third draw in a group, NaN or infinities. Of a
        map, all elements share what isn't mapped."""
        rng = np.random.default_rng(seed)
        table = size_table(self.groups, self.capacity, 4, rng)
        rows = {z: itertools.chain.from_iterable(rng.permutation(len(table)) for _ in range(9)) for z in self.ragged}
        sizes: Arrays = {}
        given: tuple[Arrays, Arrays] = {}, {}
        for number in range(count):
            is_first = not self.mapped or number % BATCH == 0
            if is_first or "sizes" in self.mapped:
                sizes = {z: self._sizes(z, table[next(order)]) for z, order in rows.items()}
            fill = FILLS[number % 4] if jnp.issubdtype(self.dtype, jnp.floating) else 99
            if is_first or "data" in self.mapped:
                given = self._arrays(rng, self.inputs(sizes), fill, number)
            reference = Reference(self, *given, sizes)
            yield Draw(given[0], sizes, self._cotangents(rng, reference, differentiated, fill), reference)

    def _sizes(self, letter: str, sizes: np.ndarray) -> np.ndarray:
        if self.packed == (-1 if letter == "n" else -self.rank):
            return sizes
        return np.where(sizes > 2 * self.width, sizes % 9, sizes).astype(np.int32)  # around the width of the buffer

    def _arrays(self, rng: Any, inputs: Mapping[str, Input], fill: float, number: int) -> tuple[Arrays, Arrays]:
        """By name; and the same without NaN or infinities in any group."""
        clean: Arrays = {"start": rng.integers(-3, 4, self.groups).astype(np.int32)}
        for name, its in inputs.items():
            values = self._random(rng, name, its.shape)
            covered = np.ones(its.shape, bool) if self.mapped == "sizes" else _covered(its.shape, its.places)
            clean[name] = np.where(covered, values, np.asarray(fill, values.dtype))
        arrays = {name: each.copy() for name, each in clean.items()}
        if number % 3 == 1 and self.groups and jnp.issubdtype(self.dtype, jnp.floating):
            name, group = "xxxy"[rng.integers(4)], rng.integers(self.groups)
            part = arrays[name][inputs[name].places[group]]  # a view
            of_column = np.arange(part.shape[-1]) == rng.integers(self.extent)
            of_row = np.arange(len(part)).reshape(-1, *[1] * (part.ndim - 1)) == rng.integers(self.extent)
            where = (True, of_column, of_row, rng.random(part.shape) < 0.4)[number // 3 % 4]
            part[np.broadcast_to(where, part.shape)] = SPECIAL[rng.integers(3 if name == "x" else 2)]
        return arrays, clean

    def _cotangents(self, rng: Any, reference: "Reference", names: Sequence[str], fill: float) -> Arrays:
        """Random ones, with `fill` where a result has no group."""
        found = {}
        for name in names:
            out, operation = self.avals[name], self.operations[name]
            with np.errstate(all="ignore"):
                values = reference.results(operation)[0]
            covered = _covered(out.shape, reference.places(operation, values, out))
            found[name] = np.where(covered, rng.standard_normal(out.shape), fill).astype(jnp.dtype(self.dtype))
        return found

    def _random(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if not jnp.issubdtype(self.dtype, jnp.floating):
            low = max(int(jnp.iinfo(self.dtype).min), -1000)
            values = rng.integers(low if name == "x" else 1, min(int(jnp.iinfo(self.dtype).max), 1000), shape)
        elif name == "x" or name.startswith("sink"):
            values = rng.standard_normal(shape)
        else:
            values = rng.uniform(0.5, 2, shape)
        return np.asarray(values).astype(jnp.dtype(self.dtype))

    def result_places(self, operation: Operation, values: Sequence[np.ndarray], inputs: Any, out: Any) -> list[Place]:
        """Where each group's values are in a result."""
        if operation.axis != "kept":
            return [self.reduced(i, place, operation.axis) for i, place in enumerate(inputs["x"].places)]
        packed, found, start = (out.packed_axis if any(out.ragged) else None), [], 0
        for i, value in enumerate(values):
            place = [slice(0, n) for n in value.shape]
            if packed is not None:
                n = value.shape[packed]
                place[packed] = slice(start, start + n)
                start += n
            found.append((*([i] if packed is None else []), *place))
        return found

    @cached_property
    def avals(self) -> dict[str, Any]:
        """The result of each operation, as shapes."""
        sizes = {z: np.zeros(self.groups, np.int32) for z in self.ragged}
        arrays: Arrays = {name: np.zeros(its.shape, self.dtype) for name, its in self.inputs(sizes).items()}
        arrays["start"] = np.zeros(self.groups, np.int32)
        found = {}
        for name, operation in self.operations.items():
            found[name] = jax.eval_shape(lambda a, s, run=operation.run: run(self.values(a, s)), arrays, sizes)
        return found


def _with_starts(place: Place) -> Place:
    return tuple(slice(at.start or 0, at.stop) if isinstance(at, slice) else at for at in place)


def _covered(shape: tuple[int, ...], places: Sequence[Place]) -> np.ndarray:
    """Where any group is."""
    found = np.zeros(shape, bool)
    for at in places:
        found[at] = True
    return found


class Reference:
    """What NumPy computes of a draw, in float64, one group after another."""

    def __init__(self, kind: Kind, arrays: Arrays, clean: Arrays, sizes: Arrays) -> None:
        self.kind, self.inputs = kind, kind.inputs(sizes)
        # As in flash-attention: the first of `n` rows is at column `m - n` of `m`, also if a buffer cuts the group off.
        m, n = (np.maximum(sizes[z].astype(np.int64), 0) if z in sizes else None for z in "mn")
        self.first = [0] * kind.groups
        for i, shape in enumerate(self.inputs["x"].shapes):
            is_cut = kind.ragged == "mn"
            self.first[i] = int(n[i] - m[i]) if is_cut and m is not None and n is not None else shape[-1] - shape[0]
        self.values = [self._values(arrays, i) for i in range(kind.groups)]
        self.clean = [self._values(clean, i) for i in range(kind.groups)]
        self.stepped: dict[tuple[str, ...], list[tuple[Values, np.ndarray, np.ndarray]]] = {}

    def _values(self, arrays: Arrays, group: int) -> Values:
        found: dict[str, Any] = {"np": np, "start": int(arrays["start"][group])}
        for name, its in self.inputs.items():
            values = np.asarray(arrays[name][its.places[group]]).astype(np.float64)
            found[name] = self._as_group(values.reshape(its.shapes[group]), group)
        return Values(found)

    def _as_group(self, values: np.ndarray, group: int) -> Group:
        out = values.view(Group)
        out.rank, out.first = self.kind.rank, self.first[group]
        return out

    def results(self, operation: Operation) -> tuple[list[np.ndarray], list[str]]:
        """Of each group; and the inputs that the operation uses."""
        for values in self.values:
            values.used.clear()
        return [np.asarray(operation.run(values)) for values in self.values], self.values[0].used

    def jacobians(self, operation: Operation, used: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each group, the derivative by each of the `p` elements of the inputs that are used, `[p, *result]`, without
        NaN or infinities in any input; these elements, `(p,)`; and which of them aren't finite in the draw."""
        if tuple(used) not in self.stepped:
            self.stepped[tuple(used)] = [self._stepped(i, used) for i in range(self.kind.groups)]
        return [(np.imag(operation.run(values)) / STEP, *more) for values, *more in self.stepped[tuple(used)]]

    def _stepped(self, group: int, used: Sequence[str]) -> tuple[Values, np.ndarray, np.ndarray]:
        values, given = Values(self.clean[group]), self.values[group]
        elements, special = (np.concatenate([each[name].reshape(-1) for name in used]) for each in (values, given))
        steps, begin = np.eye(len(elements)) * 1j * STEP, 0
        for name in used:
            own = np.asarray(values[name])
            step = steps[:, begin : begin + own.size].reshape(len(elements), *own.shape)
            values[name], begin = self._as_group(own + step, group), begin + own.size
        return values, np.asarray(elements), ~np.isfinite(np.asarray(special))

    def places(self, operation: Operation, values: Sequence[np.ndarray], out: Any) -> list[Place]:
        """Where each group's values are in a result."""
        if operation.axis != "kept":
            return [self.kind.reduced(i, place, operation.axis) for i, place in enumerate(self.inputs["x"].places)]
        packed, found, start = (out.packed_axis if any(out.ragged) else None), [], 0
        for i, value in enumerate(values):
            place = [slice(0, n) for n in value.shape]
            if packed is not None:
                n = value.shape[packed]
                place[packed] = slice(start, start + n)
                start += n
            found.append((*([i] if packed is None else []), *place))
        return found

    def mismatch(self, operation: Operation, out: Any, gradients: Any, cotangent: Any, roundings: int) -> str:
        """How a result and its derivatives differ, or ""."""
        kind, (values, used) = self.kind, self.results(operation)
        jacobians, places = self.jacobians(operation, used), self.places(operation, values, out)
        terms = max(kind.capacity, kind.width) * max(kind.extent, kind.width)
        fill = operation.empty if operation.axis != "kept" or not any(out.ragged) else 0
        want = Sum(np.full(out.shape, fill, np.float64), np.zeros(out.shape))
        for at, value, (jacobian, elements, _) in zip(places, values, jacobians, strict=True):
            want.value[at] = value
            if value.dtype.kind == "f" and value.size:
                size = np.tensordot(np.abs(elements), np.abs(jacobian), 1)
                want.sizes[at] = np.where(np.isfinite(value), np.abs(value), 0) + size
        data = jax.tree.leaves(out)[0]
        wrong = loop.mismatch(data, want, str(data.dtype), terms, roundings)
        if wrong or gradients is None:
            return wrong
        assert sorted(gradients) == sorted(used)
        found = {each: np.zeros((3, *self.inputs[each].shape)) for each in used}
        for i, (at, (jacobian, elements, special)) in enumerate(zip(places, jacobians, strict=True)):
            if not elements.size:
                continue
            jacobian, ct = jacobian.reshape(len(elements), -1), cotangent[at].astype(np.float64).reshape(-1)
            reaches = np.ones_like(jacobian, bool) if operation.selects else jacobian != 0
            is_bad = reaches[:, reaches[special].any(0)].any(1) | special
            scale, begin = np.abs(jacobian) @ np.abs(ct), 0
            every = np.stack([jacobian @ ct, scale, is_bad])
            for each in used:
                its = self.inputs[each]
                part = every[:, begin : begin + int(np.prod(its.shapes[i]))]
                begin += part.shape[1]
                if part.size:  # an entry may be the difference of terms as large as the others'
                    part[1] += np.where(part[1] > 0, part[1].mean(), 0)
                    own = found[each][(slice(None), *its.places[i])]
                    own += part.reshape(own.shape)
                    found[each][(slice(None), *its.places[i])] = own
        for each, (value, sizes, bad) in found.items():
            got = np.where(bad > 0, value, gradients[each]).astype(gradients[each].dtype)
            if wrong := loop.mismatch(got, Sum(value, sizes), kind.dtype, terms, roundings):
                return f"derivative by {each}: {wrong}"
        return ""


def check(kind: Kind, count: int, names: Sequence[str], differentiated: Sequence[str], roundings: int = 4) -> None:
    """That each operation's result and derivatives are NumPy's, group by group."""
    program, many = kind.program(names, differentiated), BATCH if kind.mapped else 1
    for number, some in enumerate(itertools.batched(kind.draws(count * many, differentiated), many)):
        if kind.mapped:
            arrays, sizes, cotangents = jax.tree.map(lambda *x: np.stack(x), *[draw.given for draw in some])
            arrays = arrays if "data" in kind.mapped else some[0].arrays
            sizes = sizes if "sizes" in kind.mapped else some[0].sizes
            found = jax.tree.map(np.asarray, program(arrays, sizes, cotangents))
            each = [jax.tree.map(lambda x, i=i: x[i], found) for i in range(many)]
        else:
            each = [jax.tree.map(np.asarray, program(*some[0].given))]
        for draw, (results, gradients) in zip(some, each, strict=True):
            for name in names:
                given = results[name], gradients.get(name), draw.cotangents.get(name), roundings
                with np.errstate(all="ignore"):
                    wrong = draw.reference.mismatch(kind.operations[name], *given)
                assert not wrong, f"{name!r} of draw {number}: {wrong}\nsizes: {draw.sizes}"
