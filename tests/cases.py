"""The case table: every layout, numbers of groups, ways to spread sizes, with slack or without, NaN in the tails."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from ragged import Cast, GroupedTensor, Recipe
from tests import oracle

LETTERS = {
    "batched": "",
    "forward": "m",
    "forward_left": "n",
    "wgrad": "k",
    "outer": "mn",
    "inner_rows": "mk",
    "inner_columns": "kn",
    "ragged": "mkn",
}
"""The ragged letters of each layout."""
NAMES = [*LETTERS]
INT8_ROWS = Recipe(*[(Cast("int8", "row"), Cast("int8", "row"))] * 3)
"""Of whose forward product a TPU's kernel may quantise the rows."""

# Largest and rms error, relative to the largest element, by the dtype of the result.
TOLERANCE = {
    "float64": (1e-13, 1e-14),  # a few units in the last place of sums of up to 128 products
    "float32": (2e-5, 2e-6),
    "bfloat16": (2**-8, 2**-9),  # half a unit in the last place, and the operands are exact
    "float16": (2**-11, 2**-12),
    "int32": (0, 0),
}


def split(by_default: Iterable[Any], long: Iterable[Any]) -> list[Any]:
    """Parameters of a test: those that run by default, then those that are `long`. A tuple is of several parameters."""
    rest = (each if isinstance(each, tuple) else (each,) for each in long)
    return [*by_default, *(pytest.param(*each, marks=pytest.mark.long) for each in rest)]


def named(found: Iterable[tuple[Any, ...]], by: int = 1) -> list[Any]:
    """Parameters of a test, each called by its `by`-th value."""
    return [pytest.param(*each, id=str(each[by])) for each in found]


def thinned(of: int, *values: Iterable[Any]) -> list[Any]:
    """Every `of`-th combination, such that a value of one list meets those of the others."""
    lists = [[*enumerate(each)] for each in values]
    every = itertools.product(*lists)
    return [tuple(x for _, x in each) for each in every if sum(i for i, _ in each) % of == 0]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """What JAX compiles meanwhile."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def normal(shape: tuple[int, ...], seed: int = 0, dtype: Any = jnp.float32) -> Array:
    """Random numbers. (`jax.random.normal` compiles a program for each shape.)"""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def spread(rng: np.random.Generator, kind: str, g: int, total: int) -> np.ndarray:
    """`g` sizes that sum to `total`."""
    if kind == "even":
        weights = np.ones(g)
    elif kind == "zipf":
        weights = rng.permutation(1 / np.arange(1, g + 1) ** 1.2)
    elif kind == "half_empty":
        weights = rng.permutation(np.arange(g) % 2 == 0) * 1.0
    else:
        weights = np.zeros(g)
        weights[rng.integers(g)] = 1
    ends = np.round(np.cumsum(weights) / weights.sum() * total)
    return np.diff(ends, prepend=0).astype(np.int32)


@dataclass
class Case:
    """A product: the groups as NumPy matrices, and the operands as tensors whose tails hold NaN."""

    layout: str
    sizes: dict[str, np.ndarray]
    lhs_groups: oracle.Groups
    rhs_groups: oracle.Groups
    lhs: GroupedTensor
    rhs: GroupedTensor

    @property
    def out_ragged(self) -> tuple[bool, bool]:
        return "m" in LETTERS[self.layout], "n" in LETTERS[self.layout]

    def unpack(self, data: np.ndarray) -> oracle.Groups:
        """The groups in a buffer of the result."""
        return oracle.unpack(np.asarray(data), self.out_ragged, self.sizes["m"].tolist(), self.sizes["n"].tolist())

    def assert_tail_zero(self, out: GroupedTensor) -> None:
        groups = self.unpack(np.asarray(out.data).astype(np.float64))
        inside = oracle.pack([np.ones_like(g) for g in groups], self.out_ragged, out.shape, fill=0.0)
        tail = np.asarray(out.data).astype(np.float64)[inside == 0]
        assert np.array_equal(tail, np.zeros_like(tail)), "the tail of the result must be zero"


def tensor(
    groups: oracle.Groups, ragged: tuple[bool, bool], capacity: int, widest: int, fill: float = np.nan
) -> GroupedTensor:
    """A `GroupedTensor` of `groups`."""
    first, last = groups[0].shape
    shape = {
        (False, False): (len(groups), first, last),
        (True, False): (capacity, last),
        (False, True): (first, capacity),
        (True, True): (capacity, widest),
    }[ragged]
    firsts = jnp.array([g.shape[0] for g in groups], jnp.int32) if ragged[0] else None
    lasts = jnp.array([g.shape[1] for g in groups], jnp.int32) if ragged[1] else None
    return GroupedTensor(jnp.asarray(oracle.pack(groups, ragged, shape, fill)), firsts, lasts)


def make(
    layout: str,
    *,
    g: int = 4,
    kind: str = "zipf",
    slack: bool = True,
    dtype: str = "float32",
    capacity: int = 96,
    uniform: tuple[int, int, int] = (7, 5, 6),
    seed: int = 0,
    fill: float = np.nan,
) -> Case:
    """Random operands for a layout. Ragged letters have sizes that sum to the capacity, or to less with `slack`."""
    rng = np.random.default_rng(seed)
    letters = LETTERS[layout]
    sizes = {}
    for letter, extent in zip("mkn", uniform, strict=True):
        total = capacity - (capacity // 5 if slack else 0)
        sizes[letter] = spread(rng, kind, g, total) if letter in letters else np.full(g, extent, np.int32)

    def values(shape: tuple[int, int]) -> np.ndarray:
        if np.issubdtype(jnp.dtype(dtype), np.integer):
            info = jnp.iinfo(dtype)
            return rng.integers(info.min, info.max + 1, shape).astype(jnp.dtype(dtype))
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    def flags(term: str) -> tuple[bool, bool]:
        return term[0] in letters, term[1] in letters

    lhs_groups = [values((m, k)) for m, k in zip(sizes["m"], sizes["k"], strict=True)]
    rhs_groups = [values((k, n)) for k, n in zip(sizes["k"], sizes["n"], strict=True)]
    # A ragged-both buffer is wider than its widest group.
    lhs = tensor(lhs_groups, flags("mk"), capacity, int(max(sizes["k"])) + 3, fill)
    rhs = tensor(rhs_groups, flags("kn"), capacity, int(max(sizes["n"])) + 2, fill)
    return Case(layout, sizes, lhs_groups, rhs_groups, lhs, rhs)


def small(layout: str, dtype: str = "float32") -> Case:
    """A case of few elements, to differentiate and to map."""
    return make(layout, g=3, capacity=12, uniform=(4, 3, 2), dtype=dtype)


def check(case: Case, out: GroupedTensor) -> None:
    """That `out` is the product of the case's operands, with zeros in the tail."""
    assert out.ragged == case.out_ragged
    worst, rms = TOLERANCE[out.dtype.name]
    got = case.unpack(np.asarray(out.data).astype(np.float64))
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=worst, rms=rms)
    case.assert_tail_zero(out)


def check_error(call: Callable[[], Any], error: type[Exception] | tuple[type[Exception], ...], text: str) -> None:
    """That `call` raises `error`, which says `text`, in the one form: the call and the problem; what came; the hint."""
    with pytest.raises(error) as caught:
        call()
    got = str(caught.value)
    assert text in got
    assert re.fullmatch(r"`[^`]+`: (.+[.]\n)+(?!Got ).+[.?]", got) and ". Got " not in got, got
