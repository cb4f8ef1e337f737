"""`python -m ragged.conformance`: checks a grouped product, from any library, against the contract.

    python -m ragged.conformance jax.lax:ragged_dot
    python -m ragged.conformance ragged:grouped_matmul --only "tail" "NaN in one group's matrix" --json out.json
    python -m ragged.conformance my.package:torch_product --framework numpy

The function is called as `function(lhs [m, k], rhs [g, k, n], group_sizes (g,) int32) -> [m, n]`. The reference is a
loop over groups in NumPy float64. bfloat16 represents all operands exactly, so float32 represents their products
exactly.

Exit codes: 0 if all checks pass; 1 if some fail or raise; 2 for a wrong command line, or if the function isn't found.
"""

import argparse
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from html import escape
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragged.core.errors import Site
from ragged.core.tables import html_table, text_table

FRAMEWORKS = ("jax", "numpy")
KINDS = ("values", "out of range", "gradients", "transformations")
PASS, FAIL, RAISES, REFUSED, NOT_APPLICABLE = "pass", "fail", "raises", "refused", "n/a"
STATUSES = (PASS, FAIL, RAISES, REFUSED, NOT_APPLICABLE)
_BAD = (FAIL, RAISES)
_REFUSALS = (TypeError, ValueError, NotImplementedError)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A requirement of the contract. `run` takes a `Subject`, and raises if it doesn't meet the requirement.

    - `kind`: one of `KINDS`. "out of range": the sizes don't fit the rows, or are negative.
    - `why`: why the requirement matters.
    - `large`: whether the check takes seconds or a GiB, and is run only on request.
    """

    name: str
    kind: str
    why: str
    run: Callable[["Subject"], None] = field(repr=False)
    large: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one check.

    - `check`, `kind`: name and kind of the check.
    - `status`: `"pass"`; `"fail"` if the result is wrong; `"raises"` if the function raises; `"refused"` if it raises
      where the contract allows an error; `"n/a"` if the check doesn't apply.
    - `detail`: the wrong result, the first line of the error, or why the check doesn't apply; `""` if it passes.
    """

    check: str
    kind: str
    status: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.status}: {self.detail}" if self.detail else self.status


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of `run`. Prints as a table, and as HTML in a notebook.

    - `function`: name of the function.
    - `framework`: `"jax"` or `"numpy"`.
    - `platform`: JAX's default platform; `"cpu"` for NumPy.
    - `outcomes`: an `Outcome` for each check that was run.
    """

    function: str
    framework: str
    platform: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Whether no check has the status `"fail"` or `"raises"`."""
        return not any(each.status in _BAD for each in self.outcomes)

    def outcome(self, check: str) -> Outcome:
        """The `Outcome` of one check.

        **Raises:** `KeyError` if it wasn't run.
        """
        return {each.check: each for each in self.outcomes}[check]

    def to_json(self) -> dict[str, Any]:
        """All fields, for `json.dumps`."""
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        notes = [f"{name}: {why}" for name, why in self._notes()]
        return "\n\n".join([self._head(), text_table(*self._table()), *(["\n".join(notes)] if notes else [])])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p><b>{escape(name)}</b>: {escape(why)}</p>" for name, why in self._notes())
        return html_table(self._head(), *self._table()) + notes

    def _head(self) -> str:
        counts = {status: sum(each.status == status for each in self.outcomes) for status in STATUSES}
        summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{self.function}, {self.framework} on {self.platform}: {summary or 'nothing was checked'}"

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        return ("", "check", "result"), [(each.kind, each.check, str(each)) for each in self.outcomes]

    def _notes(self) -> Iterator[tuple[str, str]]:
        """Each failed check, and why it matters."""
        whys = {check.name: check.why for check in CHECKS}
        yield from ((each.check, whys[each.check]) for each in self.outcomes if each.status in _BAD)


class _Wrong(Exception):
    """The function's result breaks the contract."""


class _Refused(Exception):
    """The function raises where the contract allows an error."""


class _NotApplicable(Exception):
    """The check doesn't apply to the function."""


# Products and their reference results


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product `[m, k] × [g, k, n]`, with a cotangent `[m, n]`. Rows after the last group are the tail.

    - `suffix`: describes the product at the end of messages, such as `" with nan"`.
    - `is_per_group`: whether the tolerance is relative to each group's largest number, not to the largest of all.
    """

    lhs: np.ndarray
    rhs: np.ndarray
    sizes: np.ndarray
    dout: np.ndarray
    suffix: str = ""
    is_per_group: bool = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """`(start, end)` rows of each group. A negative size counts as 0; groups are cut where the rows end."""
        ends = np.minimum(np.cumsum(np.maximum(self.sizes, 0), dtype=np.int64), len(self.lhs))
        return list(pairwise([0, *ends.tolist()]))

    @property
    def tail_start(self) -> int:
        """The first row of the tail."""
        return self.spans[-1][1]

    def with_(self, **fields: Any) -> "Product":
        return replace(self, **fields)

    def out(self) -> np.ndarray:
        """`[m, n]`: `lhs @ rhs` in each group, zeros in the tail."""
        return _rows(self.lhs, self.rhs, self.spans)

    def d_lhs(self) -> np.ndarray:
        """`[m, k]`: `dout @ rhs.mT` in each group, zeros in the tail."""
        return _rows(self.dout, self.rhs.swapaxes(1, 2), self.spans)

    def d_rhs(self) -> np.ndarray:
        """`[g, k, n]`: `lhs.mT @ dout` in each group, zeros for empty groups."""
        return _matrices(self.lhs, self.dout, self.spans)


def _rows(a: np.ndarray, matrices: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    a, matrices = a.astype(np.float64), matrices.astype(np.float64)
    out = np.zeros((a.shape[0], matrices.shape[2]))
    with np.errstate(invalid="ignore"):
        for i, (start, end) in enumerate(spans):
            out[start:end] = a[start:end] @ matrices[i]
    return out


def _matrices(a: np.ndarray, b: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.stack([a[start:end].T @ b[start:end] for start, end in spans])


def _product(
    sizes: Sequence[int], rows: int | None = None, k: int = 128, n: int = 128, dtype: Any = "float32", seed: int = 0
) -> Product:
    """A product of standard normal numbers, rounded to bfloat16, also in the tail.

    `rows`: number of rows with the tail; by default the sum of `sizes`.
    """
    rng, m = np.random.default_rng(seed), sum(sizes) if rows is None else rows

    def values(*shape: int) -> np.ndarray:
        out = np.empty(shape, jnp.dtype(dtype))  # contiguous, also for empty shapes
        out[...] = rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)
        return out

    lhs, rhs, dout = values(m, k), values(len(sizes), k, n), values(m, n)
    return Product(lhs=lhs, rhs=rhs, sizes=np.array(sizes, np.int32), dout=dout)


# Most sizes are for 256 rows, two tiles of most kernels. Checks share shapes, because compiling takes most of the time.
EVEN = (128, 128)
UNALIGNED = (3, 90, 61, 102)
EMPTY = (57, 0, 120, 79)
EDGES = (128, 0, 128, 0), (0, 128, 0, 128), (64, 0, 64, 128)  # empty groups at the ends of tiles
SHORT = (50, 0, 101, 31)  # 182 of 256 rows
ROWS = 256
MANY = (*([0, 1, 3, 0, 2] * 60)[:299], 26)  # 300 groups, 384 rows


def _compare(what: str, got: np.ndarray, want: np.ndarray, dtype: Any = "float32") -> None:
    """Raises unless `got` equals `want` up to rounding. Where `want` isn't finite, `got` must not be finite either."""
    if got.shape != want.shape:
        raise _Wrong(f"{what} has shape {got.shape}, not {want.shape}")
    got = got.astype(np.float64)
    finite = np.isfinite(want)
    # Half a unit in the dtype's last place, and a margin for sums in float32.
    relative = {"bfloat16": 2**-8, "float16": 2**-10}.get(str(jnp.dtype(dtype)), 0.0)
    absolute = 1e-5 * np.max(np.abs(want[finite]), initial=0.0)
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= absolute + relative * np.abs(want)
    wrong = np.where(finite, ~near, np.isfinite(got))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise _Wrong(
            f"{what}: {wrong.sum()} of {wrong.size} elements are wrong, the first at {list(at)}: "
            f"{got[at]:.6g}, not {want[at]:.6g}"
        )


class Subject:
    """The function to check, called with products of NumPy arrays."""

    def __init__(self, function: Callable[..., Any], framework: str) -> None:
        self.function, self.framework = function, framework

    def array(self, x: np.ndarray) -> Any:
        return x if self.framework == "numpy" else jnp.asarray(x)

    def arrays(self, x: Product) -> tuple[Any, Any, Any]:
        return self.array(x.lhs), self.array(x.rhs), self.array(x.sizes)

    def __call__(self, x: Product) -> np.ndarray:
        return _numpy("the result", self.function(*self.arrays(x)))

    def pull(self, x: Product) -> tuple[np.ndarray, np.ndarray]:
        """The cotangents of `lhs` and `rhs`."""
        lhs, rhs, sizes = self.arrays(x)
        out, pull = jax.vjp(lambda lhs, rhs: self.function(lhs, rhs, sizes), lhs, rhs)
        d_lhs, d_rhs = pull(self.array(x.dout).astype(out.dtype))
        return _numpy("the cotangent of lhs", d_lhs), _numpy("the cotangent of rhs", d_rhs)

    def leave_nan(self, x: Product, call: Callable[[Product], Any]) -> None:
        """Calls with NaN operands of the same shapes: a later call that doesn't clear its memory may return this
        NaN."""
        sizes = np.array([len(x.lhs), *[0] * (len(x.sizes) - 1)], np.int32)
        nan = {name: np.full_like(getattr(x, name), np.nan) for name in ("lhs", "rhs", "dout")}
        for _ in range(3):
            call(x.with_(sizes=sizes, **nan))

    def check(self, *products: Product) -> None:
        """Raises unless the shape and the rows of groups are right."""
        for x in products:
            got = self(x)
            if got.shape != x.dout.shape:
                raise _Wrong(f"the result{x.suffix} has shape {got.shape}, not {x.dout.shape}")
            self._compare_rows("the result", x, got, x.out())

    def check_gradients(self, *products: Product) -> None:
        """Raises unless the cotangents of all matrices and of the rows of groups are right."""
        for x in products:
            d_lhs, d_rhs = self.pull(x)
            self._compare_rows("the cotangent of lhs", x, d_lhs, x.d_lhs())
            for i in range(len(x.sizes)) if x.is_per_group else [slice(None)]:
                _compare(f"the cotangent of rhs{x.suffix}", d_rhs[i], x.d_rhs()[i], x.rhs.dtype)

    def _compare_rows(self, what: str, x: Product, got: np.ndarray, want: np.ndarray) -> None:
        for start, end in x.spans if x.is_per_group else [(0, x.tail_start)]:
            _compare(f"{what}{x.suffix}", got[start:end], want[start:end], x.lhs.dtype)


def _numpy(what: str, x: Any) -> np.ndarray:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise _Wrong(f"{what} is a {type(x).__name__}, not an array")
    return np.asarray(x)


CHECKS: list[Check] = []


def _add(kind: str, name: str, why: str, run: Callable[[Subject], None], large: bool = False) -> None:
    CHECKS.append(Check(name=name, kind=kind, why=" ".join(why.split()), run=run, large=large))


def _check(kind: str, name: str, large: bool = False) -> Callable[[Callable[[Subject], None]], None]:
    """Registers a function as a check. Its docstring is the check's `why`."""
    return lambda run: _add(kind, name, run.__doc__ or "", run, large)


def _products(name: str, products: Callable[[], Iterable[Product]], *, values: str = "", gradients: str = "") -> None:
    """Registers a check of the products' results, and one of their cotangents.

    `values`, `gradients`: the `why` of each check; a check without one isn't registered.
    """
    if values:
        _add("values", name, values, lambda f: f.check(*products()))
    if gradients:
        named = name if name.startswith("gradients") else f"gradients, {name}"
        _add("gradients", named, gradients, lambda f: f.check_gradients(*products()))


# Values and gradients


def _each(all_sizes: Iterable[Sequence[int]], **options: Any) -> Iterator[Product]:
    """A product for each of these sizes."""
    return (_product(sizes, **options).with_(suffix=f" of sizes {list(sizes)}") for sizes in all_sizes)


def _of(letter: str, *extents: int) -> Iterator[Product]:
    """A product for each extent of a letter, `"k"` or `"n"`."""
    return (_product(EMPTY, **{letter: extent}).with_(suffix=f" for {letter}={extent}") for extent in extents)


def _with_nan(array: str, at: Any, sizes: Sequence[int] = UNALIGNED) -> Iterator[Product]:
    """A product with NaN, and one with inf, in a part of an operand or of the cotangent."""
    for value in (np.nan, np.inf):
        x = _product(sizes, ROWS)
        getattr(x, array)[at] = value
        yield x.with_(suffix=f" with {value}")


def _tail_of_nan(array: str) -> Iterator[Product]:
    """A product with NaN in the tail of an operand or of the cotangent."""
    x = _product(SHORT, ROWS)
    getattr(x, array)[x.tail_start :] = np.nan
    yield x


def _float16() -> Iterator[Product]:
    """Two products: of normal numbers, and of numbers whose partial sums (over k, n or a group's rows) reach 524,288
    while the sums are 0."""
    x = _product(UNALIGNED, k=256, n=256, dtype="float16")
    yield x.with_(suffix=" of normal numbers")
    signs = np.where(np.arange(256) < 128, 64.0, -64.0).astype(np.float16)
    by_row = np.zeros((ROWS, 1), np.float16)
    for start, end in x.spans:
        half = (end - start) // 2
        by_row[start : start + half], by_row[end - half : end] = 64, -64
    full = {"lhs": signs, "rhs": signs, "dout": by_row}
    full = {name: np.broadcast_to(each, getattr(x, name).shape).copy() for name, each in full.items()}
    yield x.with_(suffix=" of sums that exceed 65,504", **full)


def _bfloat16_sums() -> Iterator[Product]:
    """Two products with long sums: of normal numbers, and of ones."""
    x = _product(**THOUSANDS_OF_K)
    yield x.with_(suffix=" of normal numbers")
    yield x.with_(suffix=" of ones", lhs=np.ones_like(x.lhs), rhs=np.ones_like(x.rhs))


def _one_large_group() -> Iterator[Product]:
    """A product in which the numbers of one group are a million times larger than the others."""
    x = _product(UNALIGNED).with_(suffix=" with large numbers in one group", is_per_group=True)
    for each in (x.lhs, x.dout):
        each[slice(*x.spans[1])] *= 2**20
    yield x


THOUSANDS_OF_K: dict[str, Any] = {"sizes": UNALIGNED, "k": 2048, "dtype": "bfloat16"}
THOUSANDS_OF_ROWS: dict[str, Any] = {"sizes": (960, 0, 1088), "n": 256, "dtype": "bfloat16"}
OF_ONE_GROUP = np.s_[UNALIGNED[0] : sum(UNALIGNED[:2]), 5]  # a column of the second group's rows

_products("values", lambda: [_product(EVEN)], values="Two groups of the same size, the simplest grouped product.")
_products(
    "unaligned groups",
    lambda: [_product(UNALIGNED)],
    values="Groups may end at any row, so that a tile of rows belongs to several groups.",
)
_products(
    "gradients",
    lambda: [_product(UNALIGNED)],
    gradients="Training needs both cotangents, for groups that end at any row.",
)
_products(
    "empty groups",
    lambda: _each(((0, 57, 199, 0), EMPTY, (57, 0, 0, 199), (100, 156, 0, 0), (128, 0, 128), *EDGES)),
    values="An expert without tokens must not shift the rows of others, wherever it is among the experts.",
)


@_check("gradients", "gradients of empty groups")
def _(f: Subject) -> None:
    """An expert without tokens has a gradient of zero, not old memory, and shifts no other gradients."""
    x = _product(EMPTY)
    f.leave_nan(x, f.pull)
    _compare("the cotangent of the empty group's matrix", f.pull(x)[1][1], np.zeros((128, 128)))
    f.check_gradients(*_each(EDGES[:2]))


@_check("values", "all groups empty")
def _(f: Subject) -> None:
    """A shard whose experts have no tokens still runs. All its rows are the tail, and zero."""
    x = _product((0, 0, 0), ROWS)
    f.leave_nan(x, f)
    _compare("the result", f(x), x.out())


@_check("gradients", "gradients, all groups empty")
def _(f: Subject) -> None:
    """A shard whose experts have no tokens still runs the backward pass. All its gradients are zero."""
    x = _product((0, 0, 0, 0), ROWS)
    for what, got, want in zip(("lhs", "rhs"), f.pull(x), (x.d_lhs(), x.d_rhs()), strict=True):
        _compare(f"the cotangent of {what}", got, want)


@_check("values", "tail")
def _(f: Subject) -> None:
    """Rows after the last group are zero: other values there reach the loss by `0 * NaN` or a sum over rows."""
    x = _product(SHORT, ROWS)
    f.leave_nan(x, f)
    _compare("the tail", f(x)[x.tail_start :], np.zeros((ROWS - x.tail_start, 128)))


@_check("gradients", "gradients in the tail")
def _(f: Subject) -> None:
    """Rows outside of groups have a gradient of zero. Other values would reach the layers before."""
    x = _product(SHORT, ROWS)
    f.leave_nan(x, f.pull)
    _compare("the tail of the cotangent of lhs", f.pull(x)[0][x.tail_start :], np.zeros((ROWS - x.tail_start, 128)))


_products(
    "NaN in the tail",
    lambda: _tail_of_nan("lhs"),
    values="Buffers often have an uninitialised tail. Its values must not reach any group's rows.",
)
_products(
    "NaN in the tail of lhs",
    lambda: _tail_of_nan("lhs"),
    gradients="Values in the tail must not reach any group's gradient.",
)
_products(
    "NaN in the tail of the cotangent",
    lambda: _tail_of_nan("dout"),
    gradients="Later layers may produce NaN in the tail, like a norm of zeros. It must not reach any group's gradient.",
)
_products(
    "NaN in one group's rows",
    lambda: _with_nan("lhs", OF_ONE_GROUP),
    values="NaN and inf in one group's rows show in these rows, and only there.",
    gradients="NaN and inf in one group's rows reach only the gradient of its matrix.",
)
_products(
    "NaN in one group's cotangent",
    lambda: _with_nan("dout", OF_ONE_GROUP),
    gradients="NaN and inf in one group's cotangent reach only the gradients of its rows and its matrix.",
)
_products(
    "NaN in one group's matrix",
    lambda: _with_nan("rhs", np.s_[2, 7]),
    values="NaN and inf in one group's matrix show in its rows, and only there: one bad expert spoils no other.",
)
_products(
    "NaN in one group's matrix",
    lambda: [*_with_nan("rhs", np.s_[2, 7]), *_with_nan("rhs", np.s_[1, 7], EMPTY)],
    gradients="NaN and inf in one group's matrix reach only the gradients of its rows, or none if it is empty.",
)
_products(
    "NaN in an empty group's matrix",
    lambda: _with_nan("rhs", np.s_[1], EMPTY),
    values="No row uses this matrix; masks that multiply by zero let its NaN through.",
)
_products(
    "one group's numbers are large",
    _one_large_group,
    values="The other groups must keep their precision. Differences between running sums lose it.",
    gradients="The other groups' gradients must keep their precision. Differences between running sums lose it.",
)
_products(
    "one group has all rows",
    lambda: _each(((2049, 1, 0, 2174), (0, 0, 70_016, 0)), k=8, n=8),
    values="Routers may collapse. 70,016 rows are more than bfloat16, float16 or 16-bit integers can count.",
)
_products(
    "one group has all rows",
    lambda: _each(((0, 0, 4224, 0), (2049, 1, 0, 2174)), k=8, n=8),
    gradients="Routers may collapse in training: one matrix gets the gradient of all rows, the others zero.",
)
_products(
    "groups of one row",
    lambda: [_product((1,) * 128, k=8, n=8)],
    values="In decoding, each row may be a group of its own.",
)
_products(
    "more than 128 groups",
    lambda: [_product(MANY, k=8, n=8)],
    values="Models have hundreds of experts: 300 groups are more than a tile of 128 or an 8-bit index can count.",
    gradients="Models with hundreds of experts are trained: each of 300 matrices has a separate gradient.",
)
_products(
    "no rows",
    lambda: [_product((0, 0, 0))],
    values="A shard may have no rows. Then the result has no rows.",
    gradients="A shard may have no rows. Then the gradients of its matrices are zero.",
)
_products(
    "one group",
    lambda: [_product((ROWS,))],
    values="One group is a plain matrix product, and must not need a special case.",
    gradients="The gradients of one group are the gradients of a plain matrix product.",
)
_products(
    "any number of rows",
    lambda: _each(((3, 90, 110), (1,))),
    values="The number of tokens isn't a multiple of a tile.",
)
_products(
    "k not a multiple of 128",
    lambda: _of("k", 200, 131),
    values="Elements of a tile beyond k must add nothing to a sum.",
)
_products(
    "k not a multiple of 128",
    lambda: _of("k", 131),
    gradients="The gradient of lhs has k columns, and each matrix's has k rows, although tiles extend further.",
)
_products(
    "k of 1",
    lambda: _of("k", 1),
    values="The shortest possible sum.",
    gradients="The gradient of each row is one number, and the gradient of each matrix is one row.",
)
_products(
    "n not a multiple of 128",
    lambda: _of("n", 200, 131),
    values="Elements of a tile beyond n must not be stored.",
)
_products(
    "n not a multiple of 128",
    lambda: _of("n", 131),
    gradients="The gradient of lhs sums over n: columns of a tile beyond n must add nothing to it.",
)
_products(
    "n of 1",
    lambda: _of("n", 1),
    values="Each group's matrix is a single column.",
    gradients="The gradient of each group's column is a column.",
)
_products(
    "float32 sums of bfloat16",
    _bfloat16_sums,
    values="A bfloat16 sum of ones stops growing at 256, and any bfloat16 sum rounds at each step.",
)
_products(
    "float32 sums of bfloat16",
    lambda: [_product(**THOUSANDS_OF_ROWS)],
    gradients="The gradient of a matrix sums over its group's rows, the gradient of lhs over n, both in float32.",
)
_products(
    "float16",
    _float16,
    values="float16 is summed in float32 too: partial sums in float16 may overflow although the sum is small.",
    gradients="Gradients of float16 operands are summed in float32 too, over n and over rows.",
)


@_check("values", "dtype of the result")
def _(f: Subject) -> None:
    """The result has the operands' dtype, like any product."""
    for x in (_product(UNALIGNED), _product(**THOUSANDS_OF_K)):
        if (got := f(x).dtype) != x.lhs.dtype:
            raise _Wrong(f"the result of {x.lhs.dtype} operands is {got}")


@_check("gradients", "dtype of the gradients")
def _(f: Subject) -> None:
    """Each cotangent has its operand's dtype."""
    for x in (_product(UNALIGNED), _product(**THOUSANDS_OF_ROWS)):
        for name, got in zip(("lhs", "rhs"), f.pull(x), strict=True):
            if got.dtype != x.lhs.dtype:
                raise _Wrong(f"{name} is {x.lhs.dtype}, but its cotangent is {got.dtype}")


@_check("values", "preferred_element_type")
def _(f: Subject) -> None:
    """A float32 result of bfloat16 operands is the float32 sum, not a sum that was rounded to bfloat16 first."""
    try:
        parameters = inspect.signature(f.function).parameters
    except (TypeError, ValueError):
        parameters = {}
    if "preferred_element_type" not in parameters:
        raise _NotApplicable("the function has no such parameter")
    x = _product(UNALIGNED, dtype="bfloat16")
    got = Subject(partial(f.function, preferred_element_type=jnp.float32), f.framework)(x)
    if got.dtype != jnp.float32:
        raise _Wrong(f"float32 is requested, but the result is {got.dtype}")
    _compare("the result", got, x.out())


@_check("gradients", "gradients of one operand")
def _(f: Subject) -> None:
    """Frozen experts, or a first layer, need a single cotangent. It equals the one computed with both."""
    x = _product(UNALIGNED)
    lhs, rhs, sizes = f.arrays(x)
    (d_lhs,) = jax.vjp(lambda lhs: f.function(lhs, rhs, sizes), lhs)[1](f.array(x.dout))
    (d_rhs,) = jax.vjp(lambda rhs: f.function(lhs, rhs, sizes), rhs)[1](f.array(x.dout))
    for name, got, want in (("lhs", d_lhs, x.d_lhs()), ("rhs", d_rhs, x.d_rhs())):
        _compare(f"the cotangent of {name}", _numpy("the cotangent", got), want)


@_check("values", "the same bits")
def _(f: Subject) -> None:
    """Equal calls give equal bits. Otherwise no run can be reproduced, and no test can compare two runs."""
    x = _product(UNALIGNED)
    _check_bits("the result", lambda: [f(x)])


@_check("gradients", "gradients, the same bits")
def _(f: Subject) -> None:
    """Equal calls give bitwise equal gradients. Sums by atomic additions are not reproducible."""
    x = _product(UNALIGNED)
    _check_bits("a cotangent", lambda: f.pull(x))


def _check_bits(what: str, call: Callable[[], Sequence[np.ndarray]]) -> None:
    first = [each.tobytes() for each in call()]
    for count in (2, 3):
        if [each.tobytes() for each in call()] != first:
            raise _Wrong(f"{what} differs in bits between call 1 and call {count}")


@_check("values", "operands stay as they are")
def _(f: Subject) -> None:
    """The caller needs the operands again, for the gradient or the next layer."""
    x = _product(SHORT, ROWS)
    operands = dict(zip(("lhs", "rhs", "group_sizes"), f.arrays(x), strict=True))
    before = {name: np.array(each) for name, each in operands.items()}
    f.function(*operands.values())
    for name, each in operands.items():
        if np.asarray(each).tobytes() != before[name].tobytes():
            raise _Wrong(f"{name} has changed after the call")


def _check_dtype(sizes: Sequence[int], dtype: str, f: Subject) -> None:
    with jax.enable_x64(dtype == "int64" or jax.config.jax_enable_x64), _may_refuse():
        x = _product(sizes)
        f.check(x.with_(sizes=x.sizes.astype(dtype)))


for dtype, sizes, why in (
    ("int64", EMPTY, "NumPy and torch count in int64. An error is allowed."),
    ("uint32", EMPTY, "Counts are often unsigned, and their differences must not wrap. An error is allowed."),
    (
        "uint8",
        (100, 90, 66),
        "Sums of sizes exceed the sizes' dtype: 256 rows must not become 0. An error is allowed.",
    ),
):
    _add("values", f"sizes in {dtype}", why, partial(_check_dtype, sizes, dtype))


@_check("values", "more than 2**24 rows", large=True)
def _(f: Subject) -> None:
    """Rows must be counted in integers: float32 can't count beyond 2**24."""
    sizes = (2**24 + 1, 3, 2, 0, 2)
    lhs = np.ones((sum(sizes) + 120, 1), jnp.bfloat16)
    rhs = np.arange(1.0, 6).astype(jnp.bfloat16).reshape(5, 1, 1)
    got = f(Product(lhs=lhs, rhs=rhs, sizes=np.array(sizes, np.int32), dout=lhs))
    want = np.repeat([1, 2, 3, 5, 0], [2**24 + 1, 3, 2, 2, 120]).astype(jnp.bfloat16)[:, None]
    if got.shape != want.shape:
        raise _Wrong(f"the result has shape {got.shape}, not {want.shape}")
    wrong = np.flatnonzero(got[:, 0] != want[:, 0])
    if wrong.size:
        at = int(wrong[0])
        raise _Wrong(f"{wrong.size} rows are wrong, the first is row {at}: {float(got[at, 0])}, not {want[at, 0]}")


# Out of range: groups past the rows, and negative sizes, whose results `lax.ragged_dot` doesn't document


def _check_out_of_range(all_sizes: Iterable[Sequence[int]], f: Subject) -> None:
    with _may_refuse():
        for sizes in all_sizes:
            x = _product(EMPTY).with_(sizes=np.array(sizes, np.int32), suffix=f" of sizes {list(sizes)}")
            f.check(x)
            if f.framework == "jax":
                f.check_gradients(x)


for name, all_sizes, why in (
    (
        "sizes past the rows",
        [(100, 0, 120, 79), (57, 300, 5, 0)],
        "A router may choose more rows than a buffer has: groups are cut where the rows end. An error is allowed.",
    ),
    (
        "sizes past int32",
        [(100, 2**31 - 1, 2**31 - 1, 20)],
        "Uninitialised sizes may be anything: a running sum must not wrap to earlier rows. An error is allowed.",
    ),
    (
        "negative sizes",
        [(57, -1, 120, 79), (-100, 57, 120, 79)],
        "A negative size counts as 0, and must not move the groups after it. An error is allowed.",
    ),
):
    _add("out of range", name, why, partial(_check_out_of_range, all_sizes))


# Transformations


@_check("transformations", "jit")
def _(f: Subject) -> None:
    """Sizes are traced, because a router in the same program computes them."""
    Subject(jax.jit(lambda lhs, rhs, sizes: f.function(lhs, rhs, sizes)), "jax").check(_product(UNALIGNED))


@_check("transformations", "other sizes compile nothing")
def _(f: Subject) -> None:
    """Sizes change at each step. A function that compiles for new sizes compiles at each step."""
    first, *others = (_product(sizes, ROWS) for sizes in (EMPTY, UNALIGNED, SHORT))
    for _ in range(2):
        f(first)
    with _compilations() as compiled:
        for x in others:
            f(x)
    if compiled:
        raise _Wrong(f"{len(compiled)} programs are compiled for {len(others)} calls with new sizes")


OPERANDS = ("lhs", "rhs", "sizes")


def _batch() -> list[Product]:
    return [_product(sizes, ROWS, seed=i) for i, sizes in enumerate((UNALIGNED, EMPTY, SHORT))]


def _check_vmap(axes: tuple[int | None, ...], f: Subject) -> None:
    """Raises unless `jax.vmap` over these axes is right. An operand with the axis None is shared."""
    xs = _batch()
    shared = {name: getattr(xs[0], name) for name, axis in zip(OPERANDS, axes, strict=True) if axis is None}
    operands = (
        f.array(shared[name] if axis is None else np.stack([getattr(x, name) for x in xs], axis))
        for name, axis in zip(OPERANDS, axes, strict=True)
    )
    out = _numpy("the result", jax.vmap(f.function, axes)(*operands))
    for i, (x, got) in enumerate(zip((x.with_(**shared) for x in xs), out, strict=True)):
        _compare(f"element {i}", got[: x.tail_start], x.out()[: x.tail_start])


for name, axes, why in (
    ("vmap", (0, 0, 0), "All operands are mapped, so that each element of the batch has different groups."),
    (
        "vmap with shared matrices",
        (0, None, 0),
        "The sequences of a batch have different groups, and share one set of experts.",
    ),
    ("vmap over the matrices alone", (None, 0, None), "An ensemble of models gets the same tokens."),
    ("vmap over the sizes alone", (None, None, 0), "The same rows are routed in several ways."),
    ("vmap over other axes", (1, 2, 1), "The batch needn't be the first axis."),
):
    _add("transformations", name, why, partial(_check_vmap, axes))


@_check("transformations", "vmap of vmap")
def _(f: Subject) -> None:
    """An ensemble of models gets a batch: there are two mapped axes, and an operand may have only one of them."""
    x, other = _product(UNALIGNED, ROWS), _product(EMPTY, ROWS, seed=1)
    lhs, rhs, sizes = (f.array(np.stack([getattr(each, name) for each in (x, other)])) for name in OPERANDS)
    out = jax.vmap(jax.vmap(f.function, (0, None, 0)), (None, 0, None))(lhs, rhs, sizes)
    for i, row in enumerate(_numpy("the result", out)):
        for j, got in enumerate(row):
            want = (x, other)[j].with_(rhs=(x, other)[i].rhs)
            _compare(f"element {i}, {j}", got, want.out())


@_check("transformations", "vmap of the gradients")
def _(f: Subject) -> None:
    """Gradients per example: in the backward pass too, each element of the batch has different groups."""
    xs = _batch()
    operands = (f.array(np.stack([getattr(x, name) for x in xs])) for name in (*OPERANDS, "dout"))

    def pull(lhs: Any, rhs: Any, sizes: Any, dout: Any) -> Any:
        return jax.vjp(lambda lhs, rhs: f.function(lhs, rhs, sizes), lhs, rhs)[1](dout)

    for i, (x, d_lhs, d_rhs) in enumerate(zip(xs, *jax.vmap(pull)(*operands), strict=True)):
        _compare(
            f"the cotangent of lhs, element {i}",
            _numpy("the cotangent", d_lhs)[: x.tail_start],
            x.d_lhs()[: x.tail_start],
        )
        _compare(f"the cotangent of rhs, element {i}", _numpy("the cotangent", d_rhs), x.d_rhs())


@_check("transformations", "forward mode")
def _(f: Subject) -> None:
    """`jax.jvp`, `jax.linearize`, Hessian-vector products and forward Laplacians need forward mode."""
    x, tangent = _product(UNALIGNED), _product(UNALIGNED, seed=1)
    (lhs, rhs, sizes), (d_lhs, d_rhs, _) = f.arrays(x), f.arrays(tangent)
    _, got = jax.jvp(lambda lhs, rhs: f.function(lhs, rhs, sizes), (lhs, rhs), (d_lhs, d_rhs))
    _compare("the tangent", _numpy("the tangent", got), x.with_(lhs=tangent.lhs).out() + x.with_(rhs=tangent.rhs).out())


@_check("transformations", "second derivative")
def _(f: Subject) -> None:
    """Gradient penalties and implicit layers need the gradient of a gradient, in reverse mode."""
    x, tangent = _product(EMPTY), _product(EMPTY, seed=1)
    (lhs, rhs, sizes), (dout, weight) = f.arrays(x), (f.array(each) for each in (x.dout, tangent.rhs))

    def by_rhs(lhs: Any) -> Any:
        """The inner product of a weight with the cotangent of `rhs`."""
        (d_rhs,) = jax.vjp(lambda rhs: f.function(lhs, rhs, sizes), rhs)[1](dout)
        return jnp.sum(d_rhs * weight)

    _compare("the cotangent of lhs", _numpy("the cotangent", jax.grad(by_rhs)(lhs)), x.with_(rhs=tangent.rhs).d_lhs())


@_check("transformations", "checkpoint")
def _(f: Subject) -> None:
    """To save memory, `jax.checkpoint` computes the product again for the gradient."""
    again = jax.checkpoint(lambda lhs, rhs, sizes: f.function(lhs, rhs, sizes))
    Subject(again, "jax").check_gradients(_product(EMPTY))


@_check("transformations", "scan")
def _(f: Subject) -> None:
    """Layers are scanned, forward and backward, so that all of them share one program."""
    x, more = _product(EMPTY), _product(EMPTY, seed=1)
    weights = f.array(np.stack([x.rhs, more.rhs]))

    def layers(lhs: Any, rhs: Any, sizes: Any) -> Any:
        """The sum of the products with `rhs` and, twice, with fixed weights."""
        scanned = jax.lax.scan(lambda out, w: (out + f.function(lhs, w, sizes), None), jnp.zeros_like(lhs), weights)[0]
        return scanned + f.function(lhs, rhs, sizes)

    d_lhs, d_rhs = Subject(layers, "jax").pull(x)
    _compare("the cotangent of lhs", d_lhs, x.with_(rhs=2.0 * x.rhs + more.rhs).d_lhs())
    _compare("the cotangent of rhs", d_rhs, x.d_rhs())


@contextmanager
def _may_refuse() -> Iterator[None]:
    """A context in which errors about types, values and missing features count as `"refused"`."""
    try:
        yield
    except _REFUSALS as error:
        raise _Refused(_first_line(error)) from error


@contextmanager
def _compilations() -> Iterator[list[str]]:
    """Yields a list with an entry for each program that XLA compiles in the context."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


CHECKS.sort(key=lambda check: KINDS.index(check.kind))


# The runner


def run(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    framework: str = "jax",
    only: Iterable[str] | None = None,
    large: bool = False,
) -> Report:
    """Runs the checks on a grouped product.

    **Arguments:**

    - `function`: takes `lhs` `[m, k]`, `rhs` `[g, k, n]` and `group_sizes` `(g,)` int32, and returns `[m, n]`. It is
      called with float32, bfloat16 and float16. A parameter `preferred_element_type` is also checked, if there is one.
    - `name`: the function's name in the report; by default `function.__qualname__`.
    - `framework`: `"jax"`, or `"numpy"` for a function of NumPy arrays (with bfloat16 from `ml_dtypes`). With NumPy,
      gradients and transformations are `"n/a"`.
    - `only`: names of the checks to run, large ones too; None for all.
    - `large`: whether to also run checks that take seconds or a GiB.

    **Returns:** a `Report`, which includes the errors that the function raises.

    **Raises:** `TypeError` if `function` can't be called; `ValueError` for an unknown framework or check.
    """
    site = Site("ragged.conformance.run(function)", {"function": function})
    if not callable(function):
        site.fail(TypeError, "`function` can't be called.", "Pass a function of `lhs`, `rhs` and `group_sizes`.")
    if framework not in FRAMEWORKS:
        site.fail(ValueError, f"there is no framework {framework!r}.", f"Pass one of {', '.join(FRAMEWORKS)}.")
    names = None if only is None else {only} if isinstance(only, str) else set(only)
    if unknown := sorted((names or set()) - {check.name for check in CHECKS}):
        known = ", ".join(repr(check.name) for check in CHECKS)
        site.fail(ValueError, f"there is no check {unknown[0]!r}.", f"The checks are {known}.")
    chosen = [check for check in CHECKS if (large or not check.large if names is None else check.name in names)]
    subject = Subject(function, framework)
    default = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__name__
    platform = jax.default_backend() if framework == "jax" else "cpu"
    outcomes = tuple(_outcome(check, subject) for check in chosen)
    return Report(function=name or default, framework=framework, platform=platform, outcomes=outcomes)


def _outcome(check: Check, subject: Subject) -> Outcome:
    outcome = partial(Outcome, check=check.name, kind=check.kind)
    if subject.framework != "jax" and check.kind in ("gradients", "transformations"):
        return outcome(status=NOT_APPLICABLE, detail="not applicable: JAX doesn't trace the function")
    try:
        check.run(subject)
    except _Wrong as wrong:
        return outcome(status=FAIL, detail=str(wrong))
    except _Refused as refused:
        return outcome(status=REFUSED, detail=str(refused))
    except _NotApplicable as why:
        return outcome(status=NOT_APPLICABLE, detail=f"not applicable: {why}")
    except Exception as error:  # The function, JAX or a compiler may raise anything.
        return outcome(status=RAISES, detail=_first_line(error))
    return outcome(status=PASS)


def _first_line(error: BaseException) -> str:
    """Type and first line of the error, or of an exception group's last error: `"TypeError: ..."`."""
    if isinstance(error, BaseExceptionGroup):
        return _first_line(error.exceptions[-1])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 160 else f"{text[:159]}…"


# The command line


class _Usage(Exception):
    """A wrong command line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the function named on the command line, prints the table, and returns the exit code."""
    parser = argparse.ArgumentParser("python -m ragged.conformance", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("function", nargs="?", help="the function to check, as some.module:function")
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, default="jax", help="framework of its arrays (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="run only these checks")
    parser.add_argument("--large", action="store_true", help="also run the checks that take seconds or a GiB")
    parser.add_argument("--json", metavar="FILE", help="write the report to this file")
    parser.add_argument("--list", action="store_true", help="print the checks and why they matter")
    args = parser.parse_args(arguments)
    if args.list:
        print(text_table(("", "check", "why"), [(x.kind, x.name, x.why) for x in CHECKS]))
        return 0
    try:
        if args.function is None:
            raise _Usage("no function is named. Pass it as some.module:function.")
        function = _named(args.function)
        for name in args.only or ():
            if name not in {check.name for check in CHECKS}:
                raise _Usage(f"there is no check {name!r}: `--list` prints all checks.")
    except _Usage as error:
        parser.error(str(error))
    options = {"framework": args.framework, "only": args.only, "large": args.large}
    report = run(function, name=args.function, **options)
    print(report, flush=True)
    if args.json:
        try:
            with open(args.json, "w") as file:
                file.write(json.dumps(report.to_json(), indent=1) + "\n")
        except OSError as error:
            parser.error(f"--json: {error}")
    return 0 if report.passed else 1


def _named(name: str) -> Callable[..., Any]:
    """The function with a name such as `some.module:function` or `some.module:object.method`."""
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise _Usage(f"{name!r} doesn't name a function. Pass some.module:function.")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # The module may raise anything.
        hint = "Is it installed, and is its folder the current one or in PYTHONPATH?"
        raise _Usage(f"{module!r} can't be imported: {_first_line(error)}. {hint}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            public = [x for x in dir(found) if not x.startswith("_") and callable(getattr(found, x, None))]
            what = f"a {type(found).__name__}" if not inspect.ismodule(found) else f"{module!r}"
            raise _Usage(f"{what} has no {part!r}. It has {', '.join(public[:12]) or 'no function'}.")
        found = getattr(found, part)
    if not callable(found):
        raise _Usage(f"{name!r} has the type {type(found).__name__}, which can't be called. Pass a function.")
    return found
