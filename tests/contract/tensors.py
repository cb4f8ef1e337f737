"""A kind of tensor, and programs that run operations on tensors of that kind: compiled once, to run on many draws."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ragged import GroupedTensor, per_column, per_group, per_row
from tests.contract import loop
from tests.contract.draws import size_table
from tests.contract.loop import Arrays, Place, Sum, Term, covered
from tests.contract.operations import Group, Operation, dtype_of, operations

BATCH = 2
APART = 1e-5  # half the distance of second differences
STEP = 1e-40
"""Of complex-step derivatives. Its products vanish, so that they are exact."""
FILLS = (np.nan, np.inf, 0.0, -3.0)
SPECIAL = (np.nan, np.inf, -np.inf)


class Input(NamedTuple):
    """An input of operations: of its buffer's shape, the part that each group uses, and that part's shape there."""

    shape: tuple[int, ...]
    places: list[Place]
    shapes: list[tuple[int, ...]]


class Given(NamedTuple):
    """What a program is called with."""

    arrays: Any  # by the names of `Kind.inputs`, and "start"
    sizes: Any  # by letter
    cotangents: Any  # by operation
    tangents: Any  # by the names of `Kind.inputs`


class Results(NamedTuple):
    out: Any
    gradients: Any = None  # by input
    seconds: Any = None  # the tangents of the gradients


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

    @cache  # noqa: B019
    def traced(self, name: str) -> tuple[Any, list[str]]:
        """An operation's result, as shapes, and the inputs that it uses."""
        sizes = {z: np.zeros(self.groups, np.int32) for z in self.ragged}
        arrays: Arrays = {name: np.zeros(its.shape, self.dtype) for name, its in self.inputs(sizes).items()}
        arrays["start"] = np.zeros(self.groups, np.int32)
        used: list[str] = []

        def run(arrays: Any, sizes: Any) -> Any:
            values = self.values(arrays, sizes)
            out = self.operations[name].run(values)
            used.extend(values.used)
            return out

        return jax.eval_shape(run, arrays, sizes), used

    @property
    def differentiable(self) -> list[str]:
        """The operations whose results are floats."""
        return [name for name in self.operations if self.traced(name)[0].dtype == self.dtype]

    def compute(
        self, names: Sequence[str], differentiated: Sequence[str], order: int, draw: "Given"
    ) -> dict[str, Results]:
        """Of each operation, the result; of some, also derivatives up to this order, by the inputs that they use."""
        found = {}
        for name in names:
            run = self.operations[name].run
            if name not in differentiated:
                found[name] = Results(run(self.values(draw.arrays, draw.sizes)))
                continue

            def of_used(used: dict[str, Array], run: Any = run) -> tuple[Array, Any]:
                out = run(self.values({**draw.arrays, **used}, draw.sizes))
                return jax.tree.leaves(out)[0], out

            def gradients(used: dict[str, Array], name: str = name, of: Any = of_used) -> tuple[dict[str, Array], Any]:
                _, pull, out = jax.vjp(of, used, has_aux=True)
                return pull(draw.cotangents[name])[0], out

            used = {each: draw.arrays[each] for each in self.traced(name)[1]}
            if order == 1:
                of_first, out = gradients(used)
                found[name] = Results(out, of_first)
            else:
                tangents = {each: draw.tangents[each] for each in used}
                of_first, of_second, out = jax.jvp(gradients, (used,), (tangents,), has_aux=True)
                found[name] = Results(out, of_first, of_second)
        return found

    def program(self, names: Sequence[str], differentiated: Sequence[str], order: int) -> Callable[..., Any]:
        compute = partial(self.compute, names, differentiated, order)
        if not self.mapped:
            return jax.jit(compute)
        data, sizes = (0 if each in self.mapped.split() else None for each in ("data", "sizes"))
        return jax.jit(jax.vmap(compute, (Given(data, sizes, 0, data),)))

    # What it computes it of.

    def draws(
        self, count: int, differentiated: Sequence[str], order: int, seed: int = 0
    ) -> Iterator[tuple[Given, "Reference"]]:
        """Every pattern of sizes in turn. NaN or infinities around the groups; in every third draw in a group, too. The
        elements of a map share what isn't mapped."""
        rng = np.random.default_rng(seed)
        table = size_table(self.groups, self.capacity, 4, rng, count)
        times = 1 + count // len(table)
        rows = {z: itertools.chain.from_iterable(_order(rng, len(table)) for _ in range(times)) for z in self.ragged}
        sizes: Arrays = {}
        arrays, clean, tangents = {}, {}, {}
        for number in range(count):
            is_first = not self.mapped or number % BATCH == 0
            if is_first or "sizes" in self.mapped:
                sizes = {z: self._sizes(z, table[next(each)]) for z, each in rows.items()}
            fill = FILLS[number % 4] if jnp.issubdtype(self.dtype, jnp.floating) else 99
            if is_first or "data" in self.mapped:
                inputs = self.inputs(sizes)
                arrays, clean = self._arrays(rng, inputs, fill, number)
                tangents = {name: self._random(rng, "x", its.shape) for name, its in inputs.items() if order == 2}
            reference = Reference(self, arrays, clean, sizes, tangents)
            yield Given(arrays, sizes, self._cotangents(rng, reference, differentiated, fill), tangents), reference

    def _sizes(self, letter: str, sizes: np.ndarray) -> np.ndarray:
        if self.packed == (-1 if letter == "n" else -self.rank):
            return sizes
        return np.where(sizes > 2 * self.width, sizes % 9, sizes).astype(np.int32)  # around the width of the buffer

    def _arrays(self, rng: Any, inputs: Mapping[str, Input], fill: float, number: int) -> tuple[Arrays, Arrays]:
        """By name; and the same without NaN or infinities in any group."""
        clean: Arrays = {"start": rng.integers(-3, 4, self.groups).astype(np.int32)}
        for name, its in inputs.items():
            values = self._random(rng, name, its.shape)
            inside = np.ones(its.shape, bool) if self.mapped == "sizes" else covered(its.shape, its.places)
            clean[name] = np.where(inside, values, np.asarray(fill, values.dtype))
        arrays = {name: each.copy() for name, each in clean.items()}
        if number % 3 == 1 and self.groups and jnp.issubdtype(self.dtype, jnp.floating):
            name, group = "xxxy"[rng.integers(4)], rng.integers(self.groups)
            part = arrays[name][inputs[name].places[group]]  # a view
            of_column = np.arange(part.shape[-1]) == rng.integers(max(self.extent, 1))
            of_row = np.arange(len(part)).reshape(-1, *[1] * (part.ndim - 1)) == rng.integers(max(self.extent, 1))
            where = (True, of_column, of_row, rng.random(part.shape) < 0.4)[number // 3 % 4]
            part[np.broadcast_to(where, part.shape)] = SPECIAL[rng.integers(3 if name == "x" else 2)]
        return arrays, clean

    def _cotangents(self, rng: Any, reference: "Reference", names: Sequence[str], fill: float) -> Arrays:
        """Random ones, with `fill` where a result has no group."""
        found = {}
        for name in names:
            out, operation = self.traced(name)[0], self.operations[name]
            with np.errstate(all="ignore"):
                values = reference.results(operation)
            inside = covered(out.shape, reference.places(operation, values, out))
            found[name] = np.where(inside, rng.standard_normal(out.shape), fill).astype(jnp.dtype(self.dtype))
        return found

    def _random(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if not jnp.issubdtype(self.dtype, jnp.floating):
            most = min(int(jnp.iinfo(self.dtype).max) // 2, 1000)  # sums of two don't overflow, sums of a group do
            least = 0 if jnp.issubdtype(self.dtype, jnp.unsignedinteger) else -most
            values = rng.integers(least if name == "x" else 1, most, shape)
        elif name == "x" or name.startswith("sink"):
            values = rng.standard_normal(shape)
        else:
            values = rng.uniform(0.5, 2, shape)
        return np.asarray(values).astype(jnp.dtype(self.dtype))


def _order(rng: np.random.Generator, count: int) -> Iterator[int]:
    """Rows of a table of sizes. Every third is one of the last seven, which are wrong or past the capacity."""
    for number, row in enumerate(rng.permutation(count)):
        yield row if number % 3 else count - 1 - int(rng.integers(7))


def _with_starts(place: Place) -> Place:
    return tuple(slice(at.start or 0, at.stop) if isinstance(at, slice) else at for at in place)


class Reference:
    """What NumPy computes of a draw, in float64, one group after another."""

    def __init__(self, kind: Kind, arrays: Arrays, clean: Arrays, sizes: Arrays, tangents: Arrays) -> None:
        self.kind, self.inputs = kind, kind.inputs(sizes)
        # As in flash-attention: the first of `n` rows is at column `m - n` of `m`, also if a buffer cuts the group off.
        extents = np.reshape([(shape[0], shape[-1]) for shape in self.inputs["x"].shapes], (-1, 2)).T
        m, n = (np.maximum(sizes[z], 0).tolist() if z in sizes else each for z, each in zip("mn", extents, strict=True))
        self.first = np.subtract(n, m).tolist()
        self.values = [self._values(arrays, i) for i in range(kind.groups)]
        self.clean = [self._values(clean, i) for i in range(kind.groups)]
        self.stepped: dict[tuple[str, ...], list[tuple[Values, np.ndarray, np.ndarray]]] = {}
        self.moved: list[Reference] = []  # along the tangents, and back
        for step in (APART, -APART) if tangents else ():
            there = {name: clean[name].astype(np.float64) + step * each for name, each in tangents.items()}
            self.moved.append(Reference(kind, arrays, {**clean, **there}, sizes, {}))

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

    def results(self, operation: Operation) -> list[np.ndarray]:
        """Of each group."""
        return [np.asarray(operation.run(values)) for values in self.values]

    def jacobians(self, operation: Operation, used: Sequence[str]) -> list[Any]:
        """Of each group: the derivative by each of the `p` elements of the used inputs, `[p, *result]`, if these are
        finite; the elements, `(p,)`; and which of them aren't finite in the draw."""
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
                place[packed] = slice(start, start + value.shape[packed])
                start += value.shape[packed]
            found.append((*([i] if packed is None else []), *place))
        return found

    def mismatch(self, name: str, got: Results, cotangent: Any, roundings: int) -> str:
        """How a result and its derivatives differ, or ""."""
        kind, operation, used = self.kind, self.kind.operations[name], self.kind.traced(name)[1]
        values, jacobians = self.results(operation), self.jacobians(operation, used)
        places = self.places(operation, values, got.out)
        terms = max(kind.capacity, kind.width) * max(kind.extent, kind.width)
        fill = operation.empty if operation.axis != "kept" or not any(got.out.ragged) else 0
        want = Sum(np.full(got.out.shape, fill, np.float64), np.zeros(got.out.shape))
        for at, value, (jacobian, elements, _) in zip(places, values, jacobians, strict=True):
            want.value[at] = value
            if value.dtype.kind == "f" and value.size:
                size = np.tensordot(np.abs(elements), np.abs(jacobian), 1)
                size += "logsumexp" in name  # a logarithm near 1 has an absolute error
                want.sizes[at] = np.where(np.isfinite(value), np.abs(value), 0) + size
        data = jax.tree.leaves(got.out)[0]
        dtype = dtype_of(name, values[0], kind.dtype) if values else str(data.dtype)
        if jnp.issubdtype(dtype, jnp.integer):  # the least and the largest value stand for infinities
            np.clip(want.value, jnp.iinfo(dtype).min, jnp.iinfo(dtype).max, out=want.value)
        wrong = loop.mismatch(data, want, dtype, terms, roundings)
        if wrong or got.gradients is None:
            return wrong
        assert sorted(got.gradients) == sorted(used)
        found = {each: np.zeros((5, *self.inputs[each].shape)) for each in used}
        ahead, back = ([each[0] for each in of.jacobians(operation, used)] for of in self.moved or (self, self))
        for i, (at, (jacobian, elements, special)) in enumerate(zip(places, jacobians, strict=True)):
            if not elements.size:
                continue
            jacobian, ct = jacobian.reshape(len(elements), -1), cotangent[at].astype(np.float64).reshape(-1)
            reaches = np.ones_like(jacobian, bool) if operation.selects else jacobian != 0
            is_bad = reaches[:, reaches[special].any(0)].any(1) | special
            second = (ahead[i] - back[i]).reshape(jacobian.shape) @ ct / (2 * APART)
            scale, begin = np.abs(jacobian) @ np.abs(ct), 0
            if name.startswith("softmax"):  # of a softmax near 1, it is the small difference of two larger terms
                assert used[0] == "x"
                scale[: ct.size] += 2 * np.nan_to_num(values[i]).reshape(-1) * np.abs(ct).max(initial=0)
            every = np.stack([is_bad, jacobian @ ct, scale, second, scale + np.abs(second)])
            for each in used:
                its = self.inputs[each]
                part = every[:, begin : begin + int(np.prod(its.shapes[i]))]
                begin += part.shape[1]
                if part.size:  # an entry may be the difference of terms as large as the others'
                    part[2::2] += np.where(part[2::2] > 0, part[2::2].mean(1, keepdims=True), 0)
                    index = (slice(None), *its.places[i])
                    found[each][index] += part.reshape(found[each][index].shape)
        for each, (is_bad, *sums) in found.items():
            for order, gradients in enumerate((got.gradients, got.seconds)):
                if gradients is not None:
                    want = Sum(*sums[2 * order : 2 * order + 2])
                    its = np.where(is_bad > 0, want.value, gradients[each]).astype(gradients[each].dtype)
                    if wrong := loop.mismatch(its, want, kind.dtype, terms, roundings):
                        return f"derivative {order + 1} by {each}: {wrong}"
        return ""


def check(
    kind: Kind, count: int, names: Sequence[str], differentiated: Sequence[str], order: int = 1, roundings: int = 4
) -> None:
    """That each operation's result and derivatives are NumPy's, group by group."""
    program, many = kind.program(names, differentiated, order), BATCH if kind.mapped else 1
    for number, some in enumerate(itertools.batched(kind.draws(count * many, differentiated, order), many)):
        given = some[0][0]
        if kind.mapped:
            given = jax.tree.map(lambda *x: np.stack(x), *(each for each, _ in some))
            shared = {
                f for f, of in (("arrays", "data"), ("tangents", "data"), ("sizes", "sizes")) if of not in kind.mapped
            }
            given = given._replace(**{f: getattr(some[0][0], f) for f in shared})
        results = jax.tree.map(np.asarray, program(given))
        for i, (draw, reference) in enumerate(some):
            for name, result in results.items():
                its = jax.tree.map(lambda x, i=i: x[i], result) if kind.mapped else result
                with np.errstate(all="ignore"):
                    wrong = reference.mismatch(name, its, draw.cotangents.get(name), roundings)
                assert not wrong, f"{name!r} of draw {number}: {wrong}\nsizes: {draw.sizes}"
