"""The reference: NumPy, float64, one group after another. It knows nothing of the library."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
Place = tuple[Any, ...]  # an index of a buffer

TERMS = {"out": "mn", "lhs": "mk", "rhs": "kn"}
PRODUCTS: dict[str, tuple[str, str, Callable[[Any, Any], Any]]] = {
    "out": ("lhs", "rhs", lambda lhs, rhs: lhs @ rhs),
    "lhs": ("out", "rhs", lambda out, rhs: out @ rhs.T),
    "rhs": ("lhs", "out", lambda lhs, out: lhs.T @ out),
}
"""Each term as a product of the two others: the product itself, and its cotangents."""


class Term(NamedTuple):
    """A term of `lhs @ rhs = out`, and the buffer of its groups."""

    letters: str  # of its axes: "mk"
    ragged: str  # those of its letters that are ragged
    packed: str  # the ragged letter along which groups follow one another, or ""
    shape: tuple[int, ...]  # of the buffer: an axis for each letter; before them the groups, if none is ragged


def places(terms: Mapping[str, Term], sizes: Arrays, groups: int, first: int = 0) -> dict[str, list[Place | None]]:
    """Where each group lies in the buffer of each term.

    Groups are where their sizes say. A packed buffer cuts off what is past its capacity, another ragged one what is
    past its width; of a letter that several buffers hold, the least is left. A buffer of matrices has those of the
    groups from `first` on: other groups have no place in any buffer, nor a product. A single matrix is every group's.
    """
    starts: dict[tuple[str, str], list[int]] = {}
    held: dict[str, list[list[int]]] = {}
    for name, term in terms.items():
        for letter, extent in zip(term.letters, term.shape[-len(term.letters) :], strict=True):
            start, size = [0] * groups, [extent] * groups
            if letter in term.ragged:
                size = [min(max(each, 0), extent) for each in sizes[letter].tolist()]
            if letter == term.packed:
                ends = [min(end, extent) for end in itertools.accumulate(size)]
                start = [0, *ends][:groups]
                size = [end - begin for begin, end in zip(start, ends, strict=True)]
            starts[name, letter] = start
            held.setdefault(letter, []).append(size)
    least = {letter: list(map(min, zip(*each, strict=True))) for letter, each in held.items()}

    def place(name: str, term: Term, group: int) -> Place | None:
        begin = {letter: starts[name, letter][group] for letter in term.letters}
        cut = tuple(slice(begin[letter], begin[letter] + least[letter][group]) for letter in term.letters)
        if len(term.shape) == len(term.letters):
            return cut
        return (group - first, *cut) if 0 <= group - first < term.shape[0] else None

    found: dict[str, list[Place | None]] = {name: [] for name in terms}
    for group in range(groups):
        its = {name: place(name, term, group) for name, term in terms.items()}
        for name, at in its.items():
            found[name].append(None if None in its.values() else at)
    return found


def covered(shape: tuple[int, ...], where: Iterable[Place | None]) -> np.ndarray:
    """Where any group is."""
    found = np.zeros(shape, bool)
    for at in where:
        if at is not None:
            found[at] = True
    return found


class Sum(NamedTuple):
    """What float64 gives, and the sum of the sizes of all that was added up, which bounds the error of a result."""

    value: np.ndarray
    sizes: np.ndarray

    def plus(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value, self.sizes + other.sizes)


def product(name: str, x: np.ndarray, y: np.ndarray, shape: Sequence[int], where: Mapping[str, Sequence[Any]]) -> Sum:
    """The term `name`, whose buffer has this `shape`, as the product of the two others; zero outside of groups."""
    first, second, multiply = PRODUCTS[name]
    found = Sum(np.zeros(shape), np.zeros(shape))
    for at, of_x, of_y in zip(where[name], where[first], where[second], strict=True):
        if at is not None:
            a, b = x[of_x].astype(np.float64), y[of_y].astype(np.float64)
            found.value[at] += multiply(a, b)
            found.sizes[at] += multiply(np.abs(a), np.abs(b))
    return found


ROUNDING = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float8_e4m3fn": 2.0**-4,
}
"""The relative error of one rounding. Integers are exact."""
UNDERFLOW = {"float16": 2.0**-25, "float8_e4m3fn": 2.0**-10}
"""Half of the least positive number."""


def mismatch(got: Any, want: Sum, dtype: str, terms: int, roundings: int = 1, bits: int = 24) -> str:
    """Where `got` is wrong, or "".

    It must be finite exactly where `want` is, and 0 where nothing is added up. The error of an element is at most that
    of a sum of this many `terms` with so many `bits`, and of `roundings` to `dtype`: a sum in bfloat16, a second
    rounding, or a row of another group is beyond it.
    """
    one = ROUNDING.get(dtype, 0.0)
    summed = (terms + 10) * (one if dtype == "float64" else 2.0**-bits if one else 0.0)
    with np.errstate(invalid="ignore"):
        bound = roundings * one * np.abs(want.value) + (1 + roundings * one) * summed * want.sizes
        bound += UNDERFLOW.get(dtype, 0.0) * (want.sizes > 0)
    return beyond(got, want.value, bound, dtype)


def beyond(got: Any, want: np.ndarray, bound: np.ndarray, dtype: str) -> str:
    """Where `got` differs from `want` by more than `bound`, or isn't finite exactly where `want` isn't; or ""."""
    assert got.dtype == dtype and got.shape == want.shape, (got.dtype, got.shape)
    values, finite = np.asarray(got).astype(np.float64), np.isfinite(want)
    with np.errstate(invalid="ignore"):
        is_near = np.abs(values - want) <= bound
    wrong = np.argwhere(np.where(finite, ~is_near, np.isfinite(values)))
    told = [f"{[*map(int, at)]}: {values[tuple(at)]:.8g}, not {want[tuple(at)]:.8g}" for at in wrong[:3]]
    return f"{len(wrong)} of {values.size} elements are wrong: at {'; '.join(told)}" if told else ""
