"""Operations of tensors. Each is written once, and runs on tensors in JAX and on one group's arrays in NumPy."""

# pyright: reportIncompatibleMethodOverride=false
# The methods of a group have the arguments of a tensor's, not of an array's.

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

INF = np.inf


class Group(np.ndarray):
    """The reference: a group in NumPy, `[*batch, first, *more, last]`, with the methods of a tensor.

    A complex group is a real one plus a small imaginary step. The imaginary part of a result is its derivative.
    """

    rank: int  # without the batch axes
    first: int  # the column that a softmax's first row is at

    def __array_finalize__(self, other: Any) -> None:
        self.rank, self.first = getattr(other, "rank", 2), getattr(other, "first", 0)

    def map(self, function: Callable[..., Any], *others: Any) -> Any:
        return function(self, *others)

    def __abs__(self) -> Any:
        return self * np.sign(np.real(self))

    def _reduced(self, function: Any, axis: int | None, keepdims: bool, empty: Any) -> Any:
        x, axes = self.view(np.ndarray), tuple(range(-self.rank, 0)) if axis is None else (axis,)
        if any(x.shape[a] == 0 for a in axes):
            out = np.full_like(np.sum(x, axes, keepdims=True), empty)
        else:
            out = np.expand_dims(function(x, axes), axes)
        out = (out if keepdims else np.squeeze(out, axes)).view(Group)
        out.rank = self.rank
        return out

    def sum(self, axis: Any = None, *, keepdims: Any = False, empty: Any = 0) -> Any:
        return self._reduced(np.sum, axis, keepdims, empty)

    def mean(self, axis: Any = None, *, keepdims: Any = False, empty: Any = 0) -> Any:
        return self._reduced(np.mean, axis, keepdims, empty)

    def var(self, axis: Any = None, *, keepdims: Any = False, empty: Any = 0) -> Any:
        def of(x: np.ndarray, axes: Any) -> Any:
            return np.mean((x - np.mean(x, axes, keepdims=True)) ** 2, axes)

        return self._reduced(of, axis, keepdims, empty)

    def max(self, axis: Any = None, *, keepdims: Any = False, empty: Any = -INF) -> Any:
        return self._reduced(np.max, axis, keepdims, empty)

    def min(self, axis: Any = None, *, keepdims: Any = False, empty: Any = INF) -> Any:
        return self._reduced(np.min, axis, keepdims, empty)

    def logsumexp(self, axis: Any = None, *, keepdims: Any = False, empty: Any = -INF) -> Any:
        def of(x: np.ndarray, axes: Any) -> Any:
            largest = np.max(np.real(x), axes, keepdims=True)
            largest = np.where(np.isfinite(largest), largest, 0)
            return np.log(np.sum(np.exp(x - largest), axes)) + np.squeeze(largest, axes)

        return self._reduced(of, axis, keepdims, empty)

    def softmax(self, axis: int = -1, *, causal: bool = False, window: Any = None, sink: Any = None) -> Any:
        x, n, m = self.view(np.ndarray), self.shape[-self.rank], self.shape[-1]
        ahead = np.arange(m) - self.first - np.arange(n).reshape(-1, *[1] * (self.rank - 1))
        left, right = window if isinstance(window, tuple) else (window, window)
        right = 0 if causal else right
        sees = (ahead >= (-INF if left is None else -left)) & (ahead <= (INF if right is None else right))
        largest = np.max(np.real(x), axis, keepdims=True, initial=-INF, where=sees)
        if sink is not None:
            sink = np.asarray(sink) if np.ndim(sink) == 0 else np.expand_dims(np.asarray(sink), axis)
            largest = np.maximum(largest, np.real(sink))
        weights = np.where(sees, np.exp(x - largest), 0)
        total = np.sum(weights, axis, keepdims=True) + (0 if sink is None else np.exp(sink - largest))
        return np.where(sees, weights / total, 0).view(Group)

    def rows(self, start: Any, stop: Any) -> Any:
        return self[(..., slice(start, stop), *[slice(None)] * (self.rank - 1))]

    def columns(self, start: Any, stop: Any) -> Any:
        return self[..., slice(start, stop)]


class Operation(NamedTuple):
    """`run` takes the inputs by name: `x`, a tensor; `y`, a tensor of positive values; positive values to combine with
    them: `v` one a group, `w` one row a group, `r` one a row, `c` one a column, `s` one number; `sink-1`, one a softmax
    along the last axis; `start`, an int for each group; and `np`, the functions of `numpy` or `jax.numpy`."""

    run: Callable[[Any], Any]
    axis: Any = "kept"  # the reduced axis, None for all; "kept" if the result is a tensor
    empty: float = 0  # the result where there are no elements
    selects: bool = False  # whether one element of many decides what the result is


COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
VALUES = {"v": "per_group", "w": "per_group of rows", "r": "per_row", "c": "per_column"}
MASKS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"window": 0},
    {"window": (1, 0)},
    {"window": (None, 1)},
    {"window": (0, 2)},
    {"window": (1, None), "causal": True},
)
ENDS = ((0, 2), (-2, None), (1, -1), (2, 1), (9, None))


def elementwise() -> Iterator[tuple[str, Operation]]:
    for symbol, op in ARITHMETIC.items():
        yield f"x {symbol} y", Operation(lambda t, op=op: op(t.x, t.y))
        yield f"x {symbol} 2", Operation(lambda t, op=op: op(t.x, 2))
        yield f"3 {symbol} y", Operation(lambda t, op=op: op(3, t.y))
    for name, of in VALUES.items():
        yield f"x / {of}", Operation(lambda t, name=name: t.x / t[name])
        yield f"{of} - x", Operation(lambda t, name=name: t[name] - t.x)
    yield "a number / y", Operation(lambda t: t.s / t.y)
    yield "-x", Operation(lambda t: -t.x)
    yield "abs", Operation(lambda t: abs(t.x))
    yield "y ** 1.5", Operation(lambda t: t.y**1.5)
    yield "2 ** x", Operation(lambda t: 2.0**t.x)
    yield "y ** x", Operation(lambda t: t.y**t.x)
    yield "exp", Operation(lambda t: t.x.map(t.np.exp))
    yield "1 / log", Operation(lambda t: 1 / (t.y + t.y).map(t.np.log1p))  # infinite where there are zeros in the tail
    yield "maximum", Operation(lambda t: t.x.map(t.np.maximum, t.y), selects=True)
    yield "map", Operation(lambda t: t.x.map(lambda a, b, c, d: a / b + c * d, t.y, t.v, 2))


def comparisons() -> Iterator[tuple[str, Operation]]:
    for symbol, op in COMPARISONS.items():
        yield f"x {symbol} y", Operation(lambda t, op=op: op(t.x, t.y) ^ op(1, t.x))
    yield "masks", Operation(lambda t: ~((t.x > 0) & (t.y < 1) | (t.x < t.v)) ^ (t.x >= t.r))
    yield "values | mask", Operation(lambda t: ~((t.v > t.x) | (t.x > 0)))
    yield "count", Operation(lambda t: (t.x > 0).sum(), None)


def reductions(axes: Sequence[int]) -> Iterator[tuple[str, Operation]]:
    for axis in (None, *axes):
        yield f"sum {axis}", Operation(lambda t, a=axis: t.x.sum(a), axis)
        yield f"mean {axis}", Operation(lambda t, a=axis: t.x.mean(a, empty=7), axis, 7)
        yield f"var {axis}", Operation(lambda t, a=axis: t.x.var(a), axis)
        yield f"max {axis}", Operation(lambda t, a=axis: t.x.max(a), axis, -INF, True)
        yield f"min {axis}", Operation(lambda t, a=axis: t.x.min(a, keepdims=True), "kept", INF, True)
        yield f"logsumexp {axis}", Operation(lambda t, a=axis: t.x.logsumexp(a, empty=7), axis, 7)
        yield f"x - mean {axis}", Operation(lambda t, a=axis: t.x - t.x.mean(a, keepdims=True))
        yield f"sum {axis} * x", Operation(lambda t, a=axis: t.y.sum(a, keepdims=True) * t.x)
    yield "logsumexp large", Operation(lambda t: (t.x * 300).logsumexp(), None, -INF, True)
    yield "min", Operation(lambda t: t.x.min(empty=7), None, 7, True)
    yield "logsumexp", Operation(lambda t: t.x.logsumexp(), None, -INF)


def softmaxes(axes: Sequence[int]) -> Iterator[tuple[str, Operation]]:
    for axis in axes:
        yield f"softmax {axis}", Operation(lambda t, a=axis: t.x.softmax(a))
        yield f"softmax {axis} sink", Operation(lambda t, a=axis: t.x.softmax(a, sink=t[f"sink{a}"]))
    yield "softmax sink=1", Operation(lambda t: t.x.softmax(sink=1))
    yield "softmax -2 causal", Operation(lambda t: t.x.softmax(-2, causal=True, sink=t["sink-2"]))
    for mask in MASKS:
        name = " ".join(f"{key}={value}" for key, value in mask.items())
        yield f"softmax {name}", Operation(lambda t, mask=mask: t.x.softmax(**mask))


def slices(packed: int | None) -> Iterator[tuple[str, Operation]]:
    for a, b in ENDS:
        yield f"rows {a} {b}", Operation(lambda t, a=a, b=b: t.x.rows(a, b))
        yield f"columns {a} {b}", Operation(lambda t, a=a, b=b: t.x.columns(a, b))
    if packed == -1:
        yield "columns by arrays", Operation(lambda t: t.x.columns(t.start, 3))
    elif packed is not None:
        yield "rows by arrays", Operation(lambda t: t.x.rows(t.start, 3))


def dtype_of(name: str, values: np.ndarray, dtype: str) -> str:
    """Of an operation's result, if its operands have this `dtype`."""
    if values.dtype == bool:
        return "bool"
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype if values.dtype.kind == "f" else "int32"
    if "mean" in name or "/" in name or name.startswith(("var", "logsumexp")):
        return "float32"
    if name.startswith(("sum", "count")):
        return "uint32" if dtype.startswith("u") and name != "count" else "int32"
    return dtype


def operations(rank: int, packed: int | None) -> dict[str, Operation]:
    """Of tensors whose groups have this rank and are packed along this axis."""
    axes = range(-rank, 0)
    every = (elementwise(), comparisons(), reductions(axes), softmaxes(axes), slices(packed))
    return dict(itertools.chain(*every))
