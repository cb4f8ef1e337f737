"""`python -m ragged.conformance`: does a grouped product keep the contract, whoever wrote it?

    python -m ragged.conformance jax.lax:ragged_dot
    python -m ragged.conformance ragged:grouped_matmul --only "tail" "NaN in one group's matrix" --json out.json
    python -m ragged.conformance my.package:torch_product --framework numpy

What is checked is any `function(lhs [m, k], rhs [g, k, n], group_sizes (g,) int32) -> [m, n]` of JAX arrays; or, with
`--framework numpy`, of NumPy's, of which values alone are checked. The reference is NumPy, float64, one group after
another. Operands are numbers that bfloat16 holds, so that products are exact wherever sums are of float32.

Exit codes: 0 if all checks pass; 1 if some fail or raise; 2 for a wrong command line, or no function of that name.
"""

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from html import escape
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragged._errors import Site
from ragged._tables import html_table, text_table

FRAMEWORKS = ("jax", "numpy")
PASS, FAIL, RAISES, REFUSED, NOT_APPLICABLE = "pass", "fail", "raises", "refused", "n/a"
STATUSES = (PASS, FAIL, RAISES, REFUSED, NOT_APPLICABLE)
_BAD = (FAIL, RAISES)
_REFUSALS = (TypeError, ValueError, NotImplementedError)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that is asked of a function.

    - `name`: as `only` and `--only` have it.
    - `kind`: `"values"`, `"gradients"` or `"transformations"`.
    - `why`: why it matters.
    - `run`: takes a `Subject`, and raises if it isn't so.
    - `large`: takes seconds or a GiB, and is run only if asked for.
    """

    name: str
    kind: str
    why: str
    run: Callable[["Subject"], None] = field(repr=False)
    large: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a check found.

    - `status`: `"pass"`; `"fail"`: the result is wrong; `"raises"`: there is none; `"refused"`: what a function may
      refuse, with an error; `"n/a"`: there is nothing to check.
    - `detail`: what is wrong, or the first line of the error; `""` if it passes.
    """

    check: str
    kind: str
    status: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.status}: {self.detail}" if self.detail else self.status


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `run` found. Prints as a table, and as HTML in a notebook.

    - `function`: its name.
    - `framework`: `"jax"` or `"numpy"`.
    - `platform`: JAX's, `"cpu"` for NumPy.
    - `outcomes`: in the order of `CHECKS`.
    """

    function: str
    framework: str
    platform: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Whether no check fails or raises."""
        return not any(each.status in _BAD for each in self.outcomes)

    def outcome(self, check: str) -> Outcome:
        """That of one check.

        **Raises:** `KeyError` if it wasn't run.
        """
        return {each.check: each for each in self.outcomes}[check]

    def to_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        notes = [f"{name}: {why}" for name, why in self._notes()]
        return "\n\n".join([self._head(), text_table(*self._table()), *(["\n".join(notes)] if notes else [])])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p><b>{escape(name)}</b>: {escape(why)}</p>" for name, why in self._notes())
        return html_table(self._head(), *self._table()) + notes

    def _head(self) -> str:
        counts = {status: sum(each.status == status for each in self.outcomes) for status in STATUSES}
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{self.function}, {self.framework} on {self.platform}: {said or 'nothing was checked'}"

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        return ("", "check", "result"), [(each.kind, each.check, str(each)) for each in self.outcomes]

    def _notes(self) -> Iterator[tuple[str, str]]:
        """Why those matter that aren't kept."""
        whys = {check.name: check.why for check in CHECKS}
        yield from ((each.check, whys[each.check]) for each in self.outcomes if each.status in _BAD)


class _Wrong(Exception):
    """What a function gives isn't what the contract says."""


class _Refused(Exception):
    """What a function may refuse, it refuses."""


class _NotApplicable(Exception):
    """There is nothing to check."""


# Products and what they are


@dataclass(frozen=True)
class Product:
    """`[m, k] × [g, k, n]`, with a cotangent `[m, n]`; what lies past `sum(sizes)` is the tail."""

    lhs: np.ndarray
    rhs: np.ndarray
    sizes: np.ndarray
    dout: np.ndarray

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first row and the end of each group."""
        return list(pairwise(np.cumsum([0, *self.sizes.tolist()]).tolist()))

    @property
    def held(self) -> int:
        """Rows before the tail."""
        return int(self.sizes.sum())

    def with_(self, **arrays: np.ndarray) -> "Product":
        return Product(**{name: getattr(self, name) for name in ("lhs", "rhs", "sizes", "dout")} | arrays)

    def out(self) -> np.ndarray:
        """`[m, n]`: the rows of group `i` times matrix `i`, zeros in the tail."""
        return _rows(self.lhs, self.rhs, self.spans)

    def d_lhs(self) -> np.ndarray:
        """`[m, k]`: the cotangent's rows of group `i` times matrix `i` transposed, zeros in the tail."""
        return _rows(self.dout, self.rhs.swapaxes(1, 2), self.spans)

    def d_rhs(self) -> np.ndarray:
        """`[g, k, n]`: the rows of group `i` transposed times the cotangent's, zeros for empty groups."""
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
    """Standard normal numbers, rounded to bfloat16, in the tail as well; `rows` are as many as the groups', or more."""
    rng, m = np.random.default_rng(seed), sum(sizes) if rows is None else rows

    def values(*shape: int) -> np.ndarray:
        out = np.empty(shape, jnp.dtype(dtype))  # contiguous, also where it is empty
        out[...] = rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)
        return out

    return Product(values(m, k), values(len(sizes), k, n), np.array(sizes, np.int32), values(m, n))


# Sizes of 256 rows, or of fewer. 128 is a tile of most kernels.
EVEN = (128, 128)
UNALIGNED = (3, 90, 61, 102)
EMPTY = (57, 0, 120, 79)
SHORT = (50, 0, 101, 31)  # 182 of 256 rows
ROWS = 256


def _compare(what: str, got: np.ndarray, want: np.ndarray, dtype: Any = "float32") -> None:
    """That `got` is `want` but for rounding, and isn't finite where `want` isn't."""
    if got.shape != want.shape:
        raise _Wrong(f"{what} has shape {got.shape}, not {want.shape}")
    got = got.astype(np.float64)
    finite = np.isfinite(want)
    # Half a unit in the last place of the dtype, and a margin; sums in float32.
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
    """A function that is checked, and its products as NumPy's arrays."""

    def __init__(self, function: Callable[..., Any], framework: str) -> None:
        self.function, self.framework = function, framework

    def array(self, x: np.ndarray) -> Any:
        return x if self.framework == "numpy" else jnp.asarray(x)

    def arrays(self, x: Product) -> tuple[Any, Any, Any]:
        return self.array(x.lhs), self.array(x.rhs), self.array(x.sizes)

    def __call__(self, x: Product, **options: Any) -> np.ndarray:
        return _numpy("the result", self.function(*self.arrays(x), **options))

    def pull(self, x: Product, function: Callable[..., Any] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The cotangents of `lhs` and `rhs`."""
        lhs, rhs, sizes = self.arrays(x)
        out, pull = jax.vjp(lambda lhs, rhs: (function or self.function)(lhs, rhs, sizes), lhs, rhs)
        d_lhs, d_rhs = pull(self.array(x.dout).astype(out.dtype))
        return _numpy("the cotangent of lhs", d_lhs), _numpy("the cotangent of rhs", d_rhs)

    def leave_nan(self, x: Product, call: Callable[[Product], Any]) -> None:
        """Calls with operands of NaN in the same shapes: who allocates without filling is likely to find them again."""
        sizes = np.array([len(x.lhs), *[0] * (len(x.sizes) - 1)], np.int32)
        nan = {name: np.full_like(getattr(x, name), np.nan) for name in ("lhs", "rhs", "dout")}
        for _ in range(3):
            call(x.with_(sizes=sizes, **nan))

    def check(self, x: Product, what: str = "the result", **options: Any) -> None:
        """That the groups' rows are right."""
        got = self(x, **options)
        if got.shape != x.dout.shape:
            raise _Wrong(f"{what} has shape {got.shape}, not {x.dout.shape}")
        _compare(what, got[: x.held], x.out()[: x.held], x.lhs.dtype)

    def check_gradients(self, x: Product, function: Callable[..., Any] | None = None) -> None:
        """That the cotangents are right: of all matrices, and of the groups' rows."""
        d_lhs, d_rhs = self.pull(x, function)
        _compare("the cotangent of lhs", d_lhs[: x.held], x.d_lhs()[: x.held], x.lhs.dtype)
        _compare("the cotangent of rhs", d_rhs, x.d_rhs(), x.rhs.dtype)


def _numpy(what: str, x: Any) -> np.ndarray:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise _Wrong(f"{what} is a {type(x).__name__}, not an array")
    return np.asarray(x)


CHECKS: list[Check] = []


def _check(kind: str, name: str, large: bool = False) -> Callable[[Callable[[Subject], None]], None]:
    """Registers a check. Its docstring says why it matters."""

    def register(run: Callable[[Subject], None]) -> None:
        why = " ".join((run.__doc__ or "").split())
        CHECKS.append(Check(name=name, kind=kind, why=why, run=run, large=large))

    return register


# Values


@_check("values", "values")
def _(f: Subject) -> None:
    """Two groups of one size: what any grouped product must get right."""
    f.check(_product(EVEN))


@_check("values", "unaligned groups")
def _(f: Subject) -> None:
    """Groups end anywhere: a tile of rows belongs to several of them."""
    f.check(_product(UNALIGNED))


@_check("values", "empty groups")
def _(f: Subject) -> None:
    """An expert that no token chose shifts nobody's rows, be it the first, one between, or the last."""
    for sizes in ((0, 57, 199), EMPTY, (57, 0, 0, 199), (100, 156, 0, 0)):
        f.check(_product(sizes), f"the result of sizes {list(sizes)}")


@_check("values", "all groups empty")
def _(f: Subject) -> None:
    """A shard whose experts no token chose still runs: all rows are tail, and zero."""
    x = _product((0, 0, 0), ROWS)
    f.leave_nan(x, f)
    _compare("the result", f(x), x.out())


@_check("values", "tail")
def _(f: Subject) -> None:
    """Rows past the last group are zero: garbage there is one `0 * NaN`, or one sum over rows, from every number."""
    x = _product(SHORT, ROWS)
    f.leave_nan(x, f)
    _compare("the tail", f(x)[x.held :], np.zeros((ROWS - x.held, 128)))


@_check("values", "NaN in the tail")
def _(f: Subject) -> None:
    """Buffers have room to spare, which nobody fills: what is there reaches no group's rows."""
    x = _product(SHORT, ROWS)
    x.lhs[x.held :] = np.nan
    f.check(x)


@_check("values", "NaN in one group's rows")
def _(f: Subject) -> None:
    """NaN and inf of one group's rows stay in these rows, and are seen there."""
    for value in (np.nan, np.inf):
        x = _product(UNALIGNED)
        start, end = x.spans[1]
        x.lhs[start:end, 5] = value
        f.check(x, f"with {value}, the result")


@_check("values", "NaN in one group's matrix")
def _(f: Subject) -> None:
    """NaN and inf of one group's matrix stay in its rows, and are seen there: one expert that diverges isn't all."""
    for value in (np.nan, np.inf):
        x = _product(UNALIGNED)
        x.rhs[2, 7] = value
        f.check(x, f"with {value}, the result")


@_check("values", "NaN in an empty group's matrix")
def _(f: Subject) -> None:
    """No row meets it, so nothing shows it: masks that multiply by zero do."""
    x = _product(EMPTY)
    x.rhs[1] = np.nan
    f.check(x)


@_check("values", "one group has all rows")
def _(f: Subject) -> None:
    """Routers collapse. 4,224 rows: more than bfloat16 or float16 count."""
    f.check(_product((0, 0, 4224, 0), k=8, n=8))
    f.check(_product((2049, 1, 2174), k=8, n=8))


@_check("values", "groups of one row")
def _(f: Subject) -> None:
    """Decoding: as many groups as rows."""
    f.check(_product((1,) * 128, k=8, n=8))


@_check("values", "no rows")
def _(f: Subject) -> None:
    """A shard may have none: the result has none."""
    f.check(_product((0, 0, 0)))


@_check("values", "one group")
def _(f: Subject) -> None:
    """It is a matrix product, and no special case."""
    f.check(_product((ROWS,)))


@_check("values", "any number of rows")
def _(f: Subject) -> None:
    """Tokens come as they come: not in multiples of a tile."""
    for sizes in ((3, 90, 110), (1,)):
        f.check(_product(sizes), f"the result of {sum(sizes)} rows")


@_check("values", "k not a multiple of 128")
def _(f: Subject) -> None:
    """What a tile has beyond k must add nothing to a sum."""
    for k in (200, 131):
        f.check(_product(EMPTY, k=k), f"the result for k={k}")


@_check("values", "k of 1")
def _(f: Subject) -> None:
    """The least that there is to sum."""
    f.check(_product(EMPTY, k=1))


@_check("values", "n not a multiple of 128")
def _(f: Subject) -> None:
    """What a tile has beyond n must not be stored."""
    for n in (200, 131):
        f.check(_product(EMPTY, n=n), f"the result for n={n}")


@_check("values", "n of 1")
def _(f: Subject) -> None:
    """A vector for each group."""
    f.check(_product(EMPTY, n=1))


@_check("values", "float32 sums of bfloat16")
def _(f: Subject) -> None:
    """A sum of thousands in bfloat16 stops growing at 256 ones, and one of few rounds at each step."""
    x = _product(UNALIGNED, k=2048, dtype="bfloat16")
    f.check(x, "of normal numbers, the result")
    ones = {name: np.ones_like(getattr(x, name)) for name in ("lhs", "rhs")}
    f.check(x.with_(**ones), "of ones, the result")


@_check("values", "float16")
def _(f: Subject) -> None:
    """Summed in float32 too: a sum in float16 overflows on its way to a small one."""
    x = _product(UNALIGNED, k=512, dtype="float16")
    f.check(x, "of normal numbers, the result")
    signs = np.where(np.arange(512) < 256, 32.0, -32.0).astype(np.float16)  # sums to 0, by 262,144
    x = x.with_(lhs=np.broadcast_to(signs, x.lhs.shape).copy(), rhs=np.full_like(x.rhs, 32.0))
    f.check(x, "of sums that pass 262,144, the result")


@_check("values", "dtype of the result")
def _(f: Subject) -> None:
    """It is the operands', as that of any product is."""
    for dtype in ("float32", "bfloat16"):
        got = f(_product(EVEN, dtype=dtype)).dtype
        if got != jnp.dtype(dtype):
            raise _Wrong(f"of {dtype} operands, the result is {got}")


@_check("values", "preferred_element_type")
def _(f: Subject) -> None:
    """Who asks for float32 of bfloat16 gets what was summed, not what was rounded to bfloat16 first."""
    try:
        parameters = inspect.signature(f.function).parameters
    except (TypeError, ValueError):
        parameters = {}
    if "preferred_element_type" not in parameters:
        raise _NotApplicable("it takes none")
    x = _product(UNALIGNED, dtype="bfloat16")
    got = f(x, preferred_element_type=jnp.float32)
    if got.dtype != jnp.float32:
        raise _Wrong(f"float32 is asked for, and the result is {got.dtype}")
    _compare("the result", got, x.out())


@_check("values", "sizes in int64")
def _(f: Subject) -> None:
    """What NumPy and torch count in. It may be refused."""
    with jax.enable_x64(True), _may_refuse():
        x = _product(EMPTY)
        f.check(x.with_(sizes=x.sizes.astype(np.int64)))


@_check("values", "sizes in uint8")
def _(f: Subject) -> None:
    """Sums of sizes pass what the sizes' own dtype holds. It may be refused, but 256 rows aren't 0."""
    with _may_refuse():
        x = _product((100, 90, 66))
        f.check(x.with_(sizes=x.sizes.astype(np.uint8)))


@_check("values", "more than 2**24 rows", large=True)
def _(f: Subject) -> None:
    """Rows are counted in integers: float32 counts no further."""
    sizes = (2**24 + 1, 3, 2, 0, 2)
    lhs = np.ones((sum(sizes) + 120, 1), jnp.bfloat16)
    rhs = np.arange(1.0, 6).astype(jnp.bfloat16).reshape(5, 1, 1)
    got = f(Product(lhs, rhs, np.array(sizes, np.int32), lhs))
    want = np.repeat([1, 2, 3, 5, 0], [2**24 + 1, 3, 2, 2, 120]).astype(jnp.bfloat16)[:, None]
    if got.shape != want.shape:
        raise _Wrong(f"the result has shape {got.shape}, not {want.shape}")
    wrong = np.flatnonzero(got[:, 0] != want[:, 0])
    if wrong.size:
        at = int(wrong[0])
        raise _Wrong(f"{wrong.size} rows are wrong, the first is row {at}: {float(got[at, 0])}, not {want[at, 0]}")


# Gradients


@_check("gradients", "gradients")
def _(f: Subject) -> None:
    """Layers are trained: both cotangents, of groups that end anywhere."""
    f.check_gradients(_product(UNALIGNED))


@_check("gradients", "gradients of empty groups")
def _(f: Subject) -> None:
    """An expert without tokens has a gradient of zero, not what the memory held."""
    x = _product(EMPTY)
    f.leave_nan(x, f.pull)
    _compare("the cotangent of the empty group's matrix", f.pull(x)[1][1], np.zeros((128, 128)))


@_check("gradients", "gradients in the tail")
def _(f: Subject) -> None:
    """The gradient of rows that are in no group is zero: it goes on, to what made these rows."""
    x = _product(SHORT, ROWS)
    f.leave_nan(x, f.pull)
    _compare("the tail of the cotangent of lhs", f.pull(x)[0][x.held :], np.zeros((ROWS - x.held, 128)))


@_check("gradients", "gradients, NaN in the tail of lhs")
def _(f: Subject) -> None:
    """What lies in the tail reaches no group's gradient."""
    x = _product(SHORT, ROWS)
    x.lhs[x.held :] = np.nan
    f.check_gradients(x)


@_check("gradients", "gradients, NaN in the tail of the cotangent")
def _(f: Subject) -> None:
    """What comes next may make NaN of the tail, as a norm of zeros does: it reaches no group's gradient."""
    x = _product(SHORT, ROWS)
    x.dout[x.held :] = np.nan
    f.check_gradients(x)


@_check("gradients", "gradients, NaN in one group's rows")
def _(f: Subject) -> None:
    """NaN and inf of one group's rows reach the gradient of its matrix alone."""
    for value in (np.nan, np.inf):
        x = _product(UNALIGNED)
        start, end = x.spans[1]
        x.lhs[start:end, 5] = value
        f.check_gradients(x)


@_check("gradients", "gradients, NaN in one group's matrix")
def _(f: Subject) -> None:
    """NaN and inf of one group's matrix reach the gradients of its rows alone; an empty group's reach none."""
    for sizes, group in ((UNALIGNED, 2), (EMPTY, 1)):
        for value in (np.nan, np.inf):
            x = _product(sizes)
            x.rhs[group, 7] = value
            f.check_gradients(x)


@_check("gradients", "gradients, float32 sums of bfloat16")
def _(f: Subject) -> None:
    """The gradient of a matrix sums over all rows of its group: thousands."""
    f.check_gradients(_product((1984, 0, 2112), k=128, n=128, dtype="bfloat16"))


@_check("gradients", "dtype of the gradients")
def _(f: Subject) -> None:
    """They are the operands'."""
    for dtype in ("float32", "bfloat16"):
        for name, each in zip(("lhs", "rhs"), f.pull(_product(EVEN, dtype=dtype)), strict=True):
            if each.dtype != jnp.dtype(dtype):
                raise _Wrong(f"{name} is {dtype}, and its cotangent {each.dtype}")


# Transformations


@_check("transformations", "jit")
def _(f: Subject) -> None:
    """Sizes are traced: they come from a router, in the same program."""
    Subject(jax.jit(lambda lhs, rhs, sizes: f.function(lhs, rhs, sizes)), "jax").check(_product(UNALIGNED))


@_check("transformations", "other sizes compile nothing")
def _(f: Subject) -> None:
    """Sizes are others at each step: what compiles for each never ends compiling."""
    first, *others = (_product(sizes, ROWS) for sizes in (EMPTY, UNALIGNED, SHORT))
    for _ in range(2):
        f(first)
    with _compilations() as compiled:
        for x in others:
            f(x)
    if compiled:
        raise _Wrong(f"{len(compiled)} programs are compiled for {len(others)} calls with other sizes")


@_check("transformations", "vmap")
def _(f: Subject) -> None:
    """Of all operands: each element of the batch has its own groups."""
    xs = [_product(sizes, ROWS, seed=i) for i, sizes in enumerate((UNALIGNED, EMPTY, SHORT))]
    operands = (f.array(np.stack([getattr(x, name) for x in xs])) for name in ("lhs", "rhs", "sizes"))
    for i, (x, got) in enumerate(zip(xs, _numpy("the result", jax.vmap(f.function)(*operands)), strict=True)):
        _compare(f"element {i}", got[: x.held], x.out()[: x.held])


@_check("transformations", "vmap with shared matrices")
def _(f: Subject) -> None:
    """Sequences of a batch, each with its own groups, and one set of experts."""
    xs = [_product(sizes, ROWS, seed=i) for i, sizes in enumerate((UNALIGNED, EMPTY, SHORT))]
    lhs, sizes = (f.array(np.stack([getattr(x, name) for x in xs])) for name in ("lhs", "sizes"))
    out = jax.vmap(f.function, (0, None, 0))(lhs, f.array(xs[0].rhs), sizes)
    for i, (x, got) in enumerate(zip(xs, _numpy("the result", out), strict=True)):
        _compare(f"element {i}", got[: x.held], x.with_(rhs=xs[0].rhs).out()[: x.held])


@_check("transformations", "forward mode")
def _(f: Subject) -> None:
    """`jax.jvp`, `jax.linearize`, Hessian-vector products, forward Laplacians."""
    x, tangent = _product(UNALIGNED), _product(UNALIGNED, seed=1)
    (lhs, rhs, sizes), (d_lhs, d_rhs, _) = f.arrays(x), f.arrays(tangent)
    _, got = jax.jvp(lambda lhs, rhs: f.function(lhs, rhs, sizes), (lhs, rhs), (d_lhs, d_rhs))
    _compare("the tangent", _numpy("the tangent", got), x.with_(lhs=tangent.lhs).out() + x.with_(rhs=tangent.rhs).out())


@_check("transformations", "second derivative")
def _(f: Subject) -> None:
    """The gradient of a gradient, in reverse mode: gradient penalties, implicit layers."""
    x, tangent = _product(EMPTY), _product(EMPTY, seed=1)
    (lhs, rhs, sizes), (dout, weight) = f.arrays(x), (f.array(each) for each in (x.dout, tangent.rhs))

    def by_rhs(lhs: Any) -> Any:
        """Of the inner product of a weight with the cotangent of `rhs`."""
        (d_rhs,) = jax.vjp(lambda rhs: f.function(lhs, rhs, sizes), rhs)[1](dout)
        return jnp.sum(d_rhs * weight)

    _compare("the cotangent of lhs", _numpy("it", jax.grad(by_rhs)(lhs)), x.with_(rhs=tangent.rhs).d_lhs())


@_check("transformations", "checkpoint")
def _(f: Subject) -> None:
    """`jax.checkpoint` computes it again for the gradient, to save memory."""
    f.check_gradients(_product(EMPTY), jax.checkpoint(lambda lhs, rhs, sizes: f.function(lhs, rhs, sizes)))


@_check("transformations", "scan")
def _(f: Subject) -> None:
    """Layers are scanned, forward and backward: one program for all of them."""
    x, more = _product(EMPTY), _product(EMPTY, seed=1)
    weights = f.array(np.stack([x.rhs, more.rhs]))

    def layers(lhs: Any, rhs: Any, sizes: Any) -> Any:
        """The sum of the products with `rhs` and, twice, with fixed weights."""
        scanned = jax.lax.scan(lambda out, w: (out + f.function(lhs, w, sizes), None), jnp.zeros_like(lhs), weights)[0]
        return scanned + f.function(lhs, rhs, sizes)

    d_lhs, d_rhs = f.pull(x, layers)
    _compare("the cotangent of lhs", d_lhs, x.with_(rhs=2.0 * x.rhs + more.rhs).d_lhs())
    _compare("the cotangent of rhs", d_rhs, x.d_rhs())


@contextmanager
def _may_refuse() -> Iterator[None]:
    try:
        yield
    except _REFUSALS as error:
        raise _Refused(_first_line(error)) from error


@contextmanager
def _compilations() -> Iterator[list[str]]:
    """The programs that XLA compiles meanwhile."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


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

    - `function`: takes `lhs` `[m, k]`, `rhs` `[g, k, n]` and `group_sizes` `(g,)` int32, and returns `[m, n]`. float32,
      bfloat16 and float16. If it has a parameter `preferred_element_type`, that is checked too.
    - `name`: what to call it; its own name by default.
    - `framework`: `"jax"`, or `"numpy"` for a function of NumPy arrays (bfloat16 is `ml_dtypes`'): then gradients and
      transformations are `"n/a"`.
    - `only`: names of checks; a large one that is named is run.
    - `large`: also those that take seconds or a GiB.

    **Returns:** a `Report`. What a function raises is in it.

    **Raises:** `TypeError` if `function` can't be called; `ValueError` for a framework or check of another name.
    """
    site = Site("ragged.conformance.run(function)", {"function": function})
    if not callable(function):
        site.fail(TypeError, "`function` can't be called.", "Pass a function of `lhs`, `rhs` and `group_sizes`.")
    if framework not in FRAMEWORKS:
        site.fail(ValueError, f"there is no framework {framework!r}.", f"There are {', '.join(FRAMEWORKS)}.")
    names = None if only is None else {only} if isinstance(only, str) else set(only)
    if unknown := sorted((names or set()) - {check.name for check in CHECKS}):
        there = ", ".join(repr(check.name) for check in CHECKS)
        site.fail(ValueError, f"there is no check {unknown[0]!r}.", f"There are {there}.")
    chosen = [check for check in CHECKS if (large or not check.large if names is None else check.name in names)]
    subject = Subject(function, framework)
    own = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__name__
    platform = jax.default_backend() if framework == "jax" else "cpu"
    outcomes = tuple(_outcome(check, subject) for check in chosen)
    return Report(function=name or own, framework=framework, platform=platform, outcomes=outcomes)


def _outcome(check: Check, subject: Subject) -> Outcome:
    outcome = partial(Outcome, check=check.name, kind=check.kind)
    if subject.framework != "jax" and check.kind != "values":
        return outcome(status=NOT_APPLICABLE, detail="not applicable: it isn't traced by JAX")
    try:
        check.run(subject)
    except _Wrong as wrong:
        return outcome(status=FAIL, detail=str(wrong))
    except _Refused as refused:
        return outcome(status=REFUSED, detail=str(refused))
    except _NotApplicable as why:
        return outcome(status=NOT_APPLICABLE, detail=f"not applicable: {why}")
    except Exception as error:  # whatever the function, JAX or a compiler says
        return outcome(status=RAISES, detail=_first_line(error))
    return outcome(status=PASS)


def _first_line(error: BaseException) -> str:
    """`TypeError: ...`, in a line. Of a group, the last: what was tried last."""
    if isinstance(error, BaseExceptionGroup):
        return _first_line(error.exceptions[-1])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 160 else f"{text[:159]}…"


# The command line


class _Usage(Exception):
    """A wrong command line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks on a function that is named, prints the table, and returns the exit code."""
    parser = argparse.ArgumentParser("python -m ragged.conformance", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("function", nargs="?", help="of `lhs`, `rhs`, `group_sizes`: some.module:function")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="jax", help="whose arrays it takes: %(default)s")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="these checks alone")
    parser.add_argument("--large", action="store_true", help="also checks that take seconds or a GiB")
    parser.add_argument("--json", metavar="FILE", help="write what was found there")
    parser.add_argument("--list", action="store_true", help="print the checks, and why they matter")
    args = parser.parse_args(arguments)
    if args.list:
        print(text_table(("", "check", "why"), [(x.kind, x.name, x.why) for x in CHECKS]))
        return 0
    try:
        if args.function is None:
            raise _Usage("which function? Name it as some.module:function.")
        function = _named(args.function)
        for name in args.only or ():
            if name not in {check.name for check in CHECKS}:
                raise _Usage(f"there is no check {name!r}: `--list` prints them.")
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
    """The function of a name such as `some.module:function` or `some.module:object.method`."""
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise _Usage(f"{name!r} names no function: write some.module:function.")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # a module that is there may raise anything
        mend = "Is it installed, and is its folder the current one or in PYTHONPATH?"
        raise _Usage(f"{module!r} can't be imported: {_first_line(error)}. {mend}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            public = [x for x in dir(found) if not x.startswith("_") and callable(getattr(found, x, None))]
            what = f"a {type(found).__name__}" if not inspect.ismodule(found) else f"{module!r}"
            raise _Usage(f"{what} has no {part!r}. It has {', '.join(public[:12]) or 'no function'}.")
        found = getattr(found, part)
    if not callable(found):
        raise _Usage(f"{name!r} is a {type(found).__name__}, which can't be called: name a function.")
    return found


if __name__ == "__main__":
    sys.exit(main())
