"""Each operation of tensors equals NumPy's, group by group, for any sizes, whatever lies outside of the groups.

Each case is a program of many operations, which is compiled once and runs on many draws of sizes and contents: results,
zeros around them, and derivatives by all inputs.
"""

from collections.abc import Iterator

import pytest

from tests.cases import named
from tests.contract.operations import ARITHMETIC
from tests.contract.tensors import Kind, check

# Whose derivatives are this library's own code.
VALUES = ["x / per_group", "per_group of rows - x", "x / per_row", "x / per_column"]
BROADCASTS = [*VALUES, "a number / y", "map", "1 / log"]
REDUCTIONS = ["sum None * x", "x - mean -2", "x - mean -1", "max None", "max -2", "logsumexp -2"]
SOFTMAXES = ["softmax -1 sink", "softmax -2", "softmax causal=True"]
SLICES = ["rows -2 None", "columns 1 -1"]
OWN = [*BROADCASTS, *REDUCTIONS, *SOFTMAXES, *SLICES]
MORE = [
    *("x + y", "3 - y", "x < y", "values | mask", "masks", "count", "sum -1", "sum -2", "mean None", "min None"),
    *("min -1", "min -2", "logsumexp", "max -1", "softmax -1", "softmax window=(1, 0)", "softmax -2 causal"),
    "rows 9 None",
]
ROUNDED_ONCE = [
    *(f"x {symbol} y" for symbol in ARITHMETIC),
    *(f"{name} {axis}" for name in ("sum", "mean", "var", "max", "logsumexp") for axis in (None, -1, -2)),
    *("softmax -1", "softmax -2", "softmax causal=True", "softmax -2 sink"),
]
"""Computed in float32 and rounded once, if the dtype is smaller."""
OF_INTEGERS = [
    *("x + y", "x * 2", "abs", "maximum", "x / per_group", "x < y", "masks", "count", "min", "min -1"),
    *(f"{name} {axis}" for name in ("sum", "mean", "max", "logsumexp") for axis in (None, -1, -2)),
    *("var -2", "rows -2 None", "columns 1 -1"),
]
SUMS = ["x / per_group", "per_group of rows - x", "sum None", "sum -2", "max -2", "softmax -2 sink"]
Case = tuple[Kind, int, list[str], list[str]]  # how many draws, which operations, and which of them differentiated
ALL, EVEN, ODD = ["all"], ["even"], ["odd"]  # every operation of the kind, or every other one


def by_default() -> Iterator[Case]:
    yield Kind("m"), 16, [*OWN, *MORE, "rows by arrays"], [*OWN, "rows by arrays"]
    yield Kind("", extent=0), 1, ROUNDED_ONCE, []
    yield Kind("mn", groups=0), 1, OWN, SLICES


def long() -> Iterator[Case]:
    """All operations of each kind; half of them with each variation; the other programs with one kind each or two."""
    for i, kind in enumerate(("", "m", "n", "mn")):
        yield Kind(kind), 40, ALL, ALL
        yield Kind(kind, ("float16", "bfloat16")[i % 2]), 20, ROUNDED_ONCE, []
        yield Kind(kind, ("int32", "uint8", "int8")[i % 3]), 12, OF_INTEGERS, []
        yield Kind(kind, mapped=("data", "sizes", "data sizes", "sizes")[i]), 6, (EVEN, ODD)[i % 2], OWN
        if kind:
            yield Kind(kind, capacity=300, extent=1, width=1), 20, SUMS, SUMS
    for dtype in ("float16", "bfloat16"):
        yield Kind("m", dtype), 20, ROUNDED_ONCE, []
    yield Kind("n", turned=True), 10, ODD, OWN
    yield Kind("m", extent=0, width=0), 3, EVEN, OWN
    yield Kind("mn", capacity=0), 2, ODD, ALL
    yield Kind("m", more=(2,)), 12, EVEN, OWN
    yield Kind("mn", more=(2,)), 12, [*OWN, "x - mean -3", "max -3", "softmax -3 sink"], ["x / per_row", "max -3"]
    yield Kind("", more=(2, 3)), 6, ODD, OWN
    yield Kind("n", groups=0), 1, ALL, ALL
    yield Kind("mn", packed_last=True), 40, ALL, ALL
    yield Kind("mn", packed_last=True, turned=True), 10, EVEN, OWN


def run(kind: Kind, count: int, names: list[str], differentiated: list[str], order: int = 1) -> None:
    differentiated = kind.differentiable if differentiated == ALL else differentiated
    if names in (ALL, EVEN, ODD):
        names = [*kind.operations][1 if names == ODD else 0 :: 1 if names == ALL else 2]
        differentiated = [name for name in differentiated if name in names]
    check(kind, count, names, differentiated, order, roundings=1 if names is ROUNDED_ONCE else 4)


@pytest.mark.parametrize("kind, count, names, differentiated", named(by_default(), 0))
def test_operations(kind: Kind, count: int, names: list[str], differentiated: list[str]) -> None:
    run(kind, count, names, differentiated)


@pytest.mark.long
@pytest.mark.parametrize("kind, count, names, differentiated", named(long(), 0))
def test_more_operations(kind: Kind, count: int, names: list[str], differentiated: list[str]) -> None:
    run(kind, count, names, differentiated)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Kind("m"), Kind("mn", packed_last=True)], ids=str)
def test_second_derivatives(kind: Kind) -> None:
    names = [name for name in kind.differentiable if "large" not in name]  # of which float32 has few digits left
    run(kind, 12, names, names, order=2)
