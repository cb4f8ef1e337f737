"""Operands of random programs, as Python text: shapes and dtypes are fixed, sizes and values come from a seed."""

from collections.abc import Sequence
from random import Random
from types import EllipsisType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tests import oracle

from .approx import Approx, Result

Arrays = dict[str, np.ndarray]
Place = tuple[int | slice | EllipsisType, ...]
SPECIAL = ("np.nan", "np.inf", "-np.inf", "0.0", "-0.0", "1e-20", "64.0")


class Sizes(NamedTuple):
    """`(groups,)` int32 sizes. Their sum is at most `capacity`, and each is at most `widest`."""

    groups: int
    capacity: int
    widest: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return (self.groups,)

    def draw(self, r: Random) -> list[int]:
        """Sizes that fill the capacity or leave a tail: all in one group, equal, with many empty groups, or any."""
        total = r.choice([self.capacity, r.randint(0, self.capacity)])
        kind = r.choice(["one", "equal", "half empty", "any", "any"])
        weights = [r.expovariate(1) for _ in range(self.groups)]
        if kind == "half empty":
            weights = [r.choice([0.0, weight]) for weight in weights]
        if kind == "one" or not any(weights):
            weights = [0.0] * self.groups
            weights[r.randrange(self.groups)] = 1.0
        ends = np.floor(np.cumsum(weights) / sum(weights) * total + 1e-9).astype(int)
        sizes = [total // self.groups] * self.groups if kind == "equal" else np.diff(ends, prepend=0).tolist()
        return [min(size, self.widest) for size in sizes]


class Data(NamedTuple):
    """A buffer. `first` and `last` name the sizes of its ragged axes; the first ragged axis is packed.

    `low` and `high`: integers lie between them. `special`: some runs put NaN, infinity or a tiny number into a group.
    """

    shape: tuple[int, ...]
    dtype: str
    first: str | None = None
    last: str | None = None
    low: int = -128
    high: int = 127
    special: bool = True

    def places(self, arrays: Arrays) -> list[Place]:
        """The index of each group."""
        first, last = (arrays.get(name or "") for name in (self.first, self.last))
        if first is None and last is None:
            return [(i,) for i in range(self.shape[0])]
        if first is None:
            spans = oracle.clipped(np.asarray(last).tolist(), self.shape[-1])
            return [(slice(None), slice(start, start + size)) for start, size in spans]
        widths = [self.shape[-1]] * len(first) if last is None else last.tolist()
        spans = oracle.clipped(first.tolist(), self.shape[0])
        return [(slice(a, a + n), ..., slice(0, width)) for (a, n), width in zip(spans, widths, strict=True)]

    def groups(self, name: str, arrays: Arrays) -> list[np.ndarray]:
        """The groups of the array `name`, in float64."""
        return [arrays[name][place].astype(np.float64) for place in self.places(arrays)]

    def result(self, parts: Sequence[Approx], arrays: Arrays) -> Result:
        """A result with a part for each group, as far as it fits, and zeros elsewhere."""
        value, error = np.zeros(self.shape), np.zeros(self.shape)
        for place, part in zip(self.places(arrays), parts, strict=True):
            fits = tuple(slice(n) for n in value[place].shape)
            value[place], error[place] = part.value[fits], part.error[fits]
        return Result(Approx(value, error), self.dtype)

    def values(self, name: str, r: Random, count: int | None) -> list[str]:
        """Statements that make the array `name`; with `count`, a stack of as many arrays."""
        shape = self.shape if count is None else (count, *self.shape)
        rng, dtype = f"np.random.default_rng({r.randrange(10**6)})", f"jnp.{self.dtype}"
        if not jnp.issubdtype(self.dtype, jnp.floating):
            return [f"{name} = {rng}.integers({self.low}, {self.high + 1}, {shape}).astype({dtype})"]
        made = [f"{name} = {rng}.standard_normal({shape}).astype({dtype})"]
        for _ in range(r.choice([0, 0, 0, 0, 1, 3]) * (self.special and all(shape))):
            at = ", ".join(str(r.randrange(n)) for n in shape)
            made.append(f"{name}[{at}] = {r.choice(SPECIAL)}")
        return made

    def tails(self, name: str, r: Random, arrays: Arrays, count: int | None) -> list[str]:
        """Statements that fill what belongs to no group; if one buffer meets a stack of sizes, to none of its groups.

        They take the places of a stack in turn.
        """
        sizes = {z: arrays[z] for z in (self.first, self.last) if z is not None}
        if not sizes:
            return []
        is_float = jnp.issubdtype(self.dtype, jnp.floating)
        fill = r.choice(["np.nan", "np.nan", "np.inf", "1e4"]) if is_float else str(self.high)
        axes, capacity = ("", self.shape[0]) if self.first else ("..., ", self.shape[-1])
        ends = sizes[self.first or self.last or ""].sum(-1)
        if count is None:
            made = [f"{name}[{axes}{np.max(ends)}:] = {fill}"] if np.max(ends) < capacity else []
        else:
            ends = np.broadcast_to(ends, (count,)).tolist()
            made = [f"{name}[{i}, {axes}{end}:] = {fill}" for i, end in enumerate(ends) if end < capacity]
        if len(sizes) == 1 or (count is None and any(each.ndim > 1 for each in sizes.values())):
            return made
        first, last = (np.broadcast_to(each, (count or 1, each.shape[-1])).tolist() for each in sizes.values())
        for i, (rows, widths) in enumerate(zip(first, last, strict=True)):
            starts, at = np.cumsum([0, *rows]).tolist(), "" if count is None else f"{i}, "
            spans = [(a, a + n, width) for a, n, width in zip(starts, rows, widths, strict=False) if n]
            made.append(f"for a, b, width in {spans}: {name}[{at}a:b, ..., width:] = {fill}")
        return made


Operand = Sizes | Data


def draw(
    operands: dict[str, Operand], r: Random, counts: dict[str, int], arrays: Arrays, moving: set[str]
) -> list[str]:
    """Statements that make new operands. Adds the sizes among them to `arrays`.

    `counts`: how many arrays a stacked operand has. `moving`: sizes that change while the operands stay. Such operands
    have values everywhere, as they have no tail of their own.
    """
    made: list[str] = []
    for name, of in operands.items():
        if isinstance(of, Sizes):
            drawn = [of.draw(r) for _ in range(counts.get(name, 1))]
            arrays[name] = np.array(drawn if name in counts else drawn[0], np.int32)
            made.append(f"{name} = np.array({arrays[name].tolist()}, np.int32)")
    for name, of in operands.items():
        if isinstance(of, Data):
            made += of.values(name, r, counts.get(name))
            if not {of.first, of.last} & moving:
                made += of.tails(name, r, arrays, counts.get(name))
    return made
