"""`ragged.conformance`: ours keeps the contract, and for each check there is a function that doesn't."""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.core import Tracer
from jax.experimental import io_callback

import ragged
from ragged import conformance
from ragged.conformance import CHECKS, Report, run
from tests import gpu
from tests.benchmarks import conformance as peers
from tests.benchmarks.plots import DOCS, fill
from tests.cases import check_error
from tests.contract.launches import only

long = pytest.mark.long
HERE = "tests.conformance.test_conformance"
ROOT = Path(__file__).parent.parent.parent
Function = Callable[..., Any]

# NumPy's products: a right one, and what is wrong with the others.


def loop(
    lhs: np.ndarray, rhs: np.ndarray, group_sizes: np.ndarray, preferred_element_type: Any = None, sums: Any = "float32"
) -> np.ndarray:
    """The product; `sums`: the dtype in which partial sums of 128 are added."""
    out = np.zeros((len(lhs), rhs.shape[2]), preferred_element_type or lhs.dtype)
    ends = np.minimum(np.cumsum(np.maximum(group_sizes, 0), dtype=np.int64), len(lhs))
    for matrix, start, end in zip(rhs, [0, *ends[:-1]], ends, strict=True):
        total = np.zeros((end - start, rhs.shape[2]), sums)
        for i in range(0, lhs.shape[1], 128):
            part = lhs[start:end, i : i + 128].astype(np.float32) @ matrix[i : i + 128].astype(np.float32)
            total = (total + part.astype(sums)).astype(sums)
        out[start:end] = total
    return out


def with_ends(ends: Callable[[np.ndarray], np.ndarray]) -> Function:
    return lambda lhs, rhs, sizes: loop(lhs, rhs, np.diff(np.clip(ends(sizes), 0, len(lhs)), prepend=0).clip(0))


def then(change: Callable[..., np.ndarray]) -> Function:
    """Changes the result, which is `loop`'s."""
    return lambda lhs, rhs, sizes: change(loop(lhs, rhs, sizes), lhs, rhs, sizes)


def without(where: Callable[..., Any]) -> Function:
    """Loses a part of the result."""

    def lose(out: np.ndarray, lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        out[where(lhs, rhs, sizes)] = 0
        return out

    return then(lose)


def squeezed(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    matrices = [np.squeeze(matrix) for matrix in rhs]
    spans = np.split(lhs, np.cumsum(sizes)[:-1])
    return np.concatenate([rows @ matrix for rows, matrix in zip(spans, matrices, strict=True)])


def masked(by: str) -> Function:
    """All rows times all matrices, of which those of other groups are multiplied by zero."""

    def product(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        out, start = np.zeros((len(lhs), rhs.shape[2]), np.float32), 0
        for matrix, size in zip(rhs, sizes, strict=True):
            own = ((np.arange(len(lhs)) >= start) & (np.arange(len(lhs)) < start + size))[:, None]
            out += (lhs * own if by == "times" else np.where(own, lhs, 0)) @ matrix
            start += size
        return out.astype(lhs.dtype)

    return product


def rounds_first(lhs: Any, rhs: Any, sizes: Any, preferred_element_type: Any = None) -> np.ndarray:
    return loop(lhs, rhs, sizes).astype(preferred_element_type or lhs.dtype)


def skips_empty(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The matrices of the first groups, though some of these are empty."""
    some = sizes[sizes > 0]
    return loop(lhs, rhs[: len(some)], some)


def clears_the_tail(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Of its operand, in place."""
    if isinstance(lhs, np.ndarray):
        lhs[sizes.sum() :] = 0
    return loop(lhs, rhs, sizes)


calls = count()


def jitter() -> np.float32:
    """1, or the next number, in turn."""
    return np.float32(1 + next(calls) % 2 * 2**-22)


VALUES: dict[str, Function] = {
    "values": lambda lhs, rhs, sizes: loop(lhs, rhs[::-1], sizes),
    "unaligned groups": with_ends(lambda sizes: (np.cumsum(sizes) + 4) // 8 * 8),
    "empty groups": skips_empty,
    "all groups empty": lambda lhs, rhs, sizes: loop(lhs, rhs, sizes if sizes.any() else sizes + 1),
    "tail": then(lambda out, lhs, rhs, sizes: np.where(np.arange(len(out))[:, None] < sizes.sum(), out, 1)),
    "NaN in the tail": then(lambda out, lhs, rhs, sizes: out + 0 * lhs.sum(0)),
    "NaN in one group's rows": masked("times"),
    "NaN in one group's matrix": then(lambda out, *_: np.nan_to_num(out)),
    "NaN in an empty group's matrix": masked("where"),
    "one group's numbers are large": then(lambda out, *_: out + (big := np.abs(out).max(initial=0)) - big),
    "one group has all rows": with_ends(lambda sizes: np.cumsum(sizes.astype(np.uint16), dtype=np.uint16)),
    "groups of one row": lambda lhs, rhs, sizes: loop(lhs, rhs[np.minimum(np.arange(len(rhs)), 63)], sizes),
    "more than 128 groups": lambda lhs, rhs, sizes: loop(lhs, rhs[np.arange(len(rhs)).astype(np.int8)], sizes),
    "no rows": lambda lhs, rhs, sizes: loop(lhs if len(lhs) else np.zeros((1, lhs.shape[1])), rhs, sizes),
    "one group": then(lambda out, lhs, rhs, sizes: out[None] if len(rhs) == 1 else out),
    "any number of rows": without(lambda lhs, rhs, sizes: np.s_[len(lhs) // 128 * 128 :]),
    "k not a multiple of 128": lambda lhs, rhs, sizes: loop(lhs[:, : lhs.shape[1] // 128 * 128], rhs, sizes),
    "k of 1": squeezed,
    "n not a multiple of 128": without(lambda lhs, rhs, sizes: np.s_[:, rhs.shape[2] // 128 * 128 :]),
    "n of 1": then(lambda out, *_: np.squeeze(out)),
    "float32 sums of bfloat16": lambda lhs, rhs, sizes: loop(lhs, rhs, sizes, sums=lhs.dtype),
    "float16": lambda lhs, rhs, sizes: loop(lhs, rhs, sizes, sums=lhs.dtype),
    "dtype of the result": lambda lhs, rhs, sizes: loop(lhs, rhs, sizes, np.float32),
    "preferred_element_type": rounds_first,
    "the same bits": then(lambda out, *_: out * jitter()),
    "operands stay as they are": clears_the_tail,
    "sizes in int64": lambda lhs, rhs, sizes: loop(lhs, rhs, np.frombuffer(sizes.tobytes(), np.int32)[: len(sizes)]),
    "sizes in uint32": with_ends(lambda sizes: np.cumsum(sizes - 1).astype(np.int64) + 1 + np.arange(len(sizes))),
    "sizes in uint8": with_ends(lambda sizes: np.cumsum(sizes, dtype=sizes.dtype)),
    "more than 2**24 rows": with_ends(lambda sizes: np.cumsum(sizes.astype(np.float32)).astype(np.int64)),
}


# JAX's products: ours, with another backward, or without one transformation.


def ours(lhs: Array, rhs: Array, sizes: Array) -> Array:
    return ragged.grouped_matmul(lhs, rhs, sizes)


def pull(lhs: Array, rhs: Array, sizes: Array, dout: Array) -> tuple[Array, Array]:
    return jax.vjp(lambda lhs, rhs: ours(lhs, rhs, sizes), lhs, rhs)[1](dout)


def with_backward(back: Callable[..., tuple[Array, Array]]) -> Function:
    """Ours, whose cotangents are those that `back(lhs, rhs, sizes, dout)` returns."""
    product = jax.custom_vjp(ours)
    product.defvjp(
        lambda a, b, sizes: (ours(a, b, sizes), (a, b, sizes)), lambda args, dout: (*back(*args, dout), None)
    )
    return product


def altered(change: Callable[..., tuple[Array, Array]]) -> Function:
    """Ours, whose cotangents are changed."""
    return with_backward(lambda *args: change(*pull(*args), *args))


def summed_in_parts(lhs: Array, rhs: Array, sizes: Array, dout: Array) -> tuple[Array, Array]:
    """A matrix' cotangent as a sum of parts, each rounded."""
    part = jnp.arange(len(lhs))[:, None] * 16 // len(lhs)
    parts = [pull(lhs, rhs, sizes, jnp.where(part == i, dout, 0))[1] for i in range(16)]
    return pull(lhs, rhs, sizes, dout)[0], sum(parts[1:], parts[0])


def fixed(lhs: Array, rhs: Array, sizes: Array, dout: Array) -> tuple[Array, Array]:
    return pull(jax.lax.stop_gradient(lhs), jax.lax.stop_gradient(rhs), sizes, dout)


def mapped(rule: Callable[..., Any], function: Function = ours) -> Function:
    """A function that `vmap` maps by `rule(axes, *args)`."""
    product = jax.custom_batching.custom_vmap(function)

    def by_rule(size: int, batched: list[bool], *args: Array) -> Any:
        out = rule(tuple(0 if each else None for each in batched), *args)
        return out, jax.tree.map(lambda _: True, out)

    product.def_vmap(by_rule)
    return product


def mapped_once(*wrong: int | None) -> Function:
    """Ours, which takes the first of each batched operand for all, if these axes are mapped."""

    def rule(axes: tuple[int | None, ...], *args: Array) -> Array:
        if axes == wrong:
            args = tuple(x if axis is None else x[:1].repeat(len(x), 0) for x, axis in zip(args, axes, strict=True))
        return jax.vmap(ours, axes)(*args)

    return mapped(rule)


def not_nested() -> Function:
    """Ours, of which `vmap` of `vmap` takes the first element of the outer batch for all."""

    def rule(axes: tuple[int | None, ...], *args: Array) -> Array:
        inner = jax.vmap(ours, axes)

        def outer(axes: tuple[int | None, ...], *args: Array) -> Array:
            (size,) = {len(x) for x, axis in zip(args, axes, strict=True) if axis == 0}
            return jnp.stack([inner(*(x if axis is None else x[0] for x, axis in zip(args, axes, strict=True)))] * size)

        return mapped(outer, inner)(*args)

    return mapped(rule)


def one_alone(lhs: Array, rhs: Array, sizes: Array) -> Array:
    """Without a gradient of `lhs` where `rhs` is a constant."""
    return ours(lhs if isinstance(rhs, Tracer) else jax.lax.stop_gradient(lhs), rhs, sizes)


def drops_what_does_not_fit(lhs: Array, rhs: Array, sizes: Array) -> Array:
    """Groups of which a row doesn't fit."""
    return ours(lhs, rhs, jnp.where(jnp.cumsum(sizes) > len(lhs), 0, sizes))


def from_a_running_sum(lhs: Array, rhs: Array, sizes: Array) -> Array:
    """Ends are clipped, whatever was added up before them."""
    ends = jnp.clip(jnp.cumsum(sizes), 0, len(lhs))
    return ours(lhs, rhs, jnp.diff(ends, prepend=0).clip(0))


def static(lhs: Array, rhs: Array, sizes: Array) -> Array:
    """A program for each list of sizes."""
    return jax.jit(lambda lhs, rhs, sizes: ours(lhs, rhs, jnp.array(sizes)), static_argnums=2)(
        lhs, rhs, tuple(sizes.tolist())
    )


def tells(lhs: Array, rhs: Array, sizes: Array) -> Array:
    """Tells the host the sizes, in order."""
    io_callback(lambda sizes: None, None, sizes, ordered=True)
    return ours(lhs, rhs, sizes)


def caching() -> Function:
    """Keeps the last call's sizes, whatever trace they are of."""
    kept: dict[tuple[int, ...], Array] = {}

    def product(lhs: Array, rhs: Array, sizes: Array) -> Array:
        before = kept.get(sizes.shape, sizes)
        kept[sizes.shape] = sizes * 1
        return ours(lhs, rhs, sizes + 0 * before)

    return product


def rows(x: Array) -> Array:
    return jnp.arange(len(x))[:, None]


def column(x: Array) -> Array:
    return jnp.arange(x.shape[1])[None]


def whole(extent: int) -> int:
    """Without the last tile, if there is a part of it alone."""
    return extent // 128 * 128


OTHERS: dict[str, Function] = {
    "sizes past the rows": drops_what_does_not_fit,
    "sizes past int32": from_a_running_sum,
    "negative sizes": from_a_running_sum,
    "gradients": altered(lambda da, db, *_: (da, db[::-1])),
    "gradients of empty groups": altered(
        lambda da, db, a, b, sizes, _: (da, jnp.where(sizes[:, None, None] > 0, db, 1))
    ),
    "gradients, all groups empty": altered(lambda da, db, a, b, sizes, _: (da, jnp.where(sizes.any(), db, 1))),
    "gradients in the tail": altered(lambda da, db, a, b, sizes, _: (jnp.where(rows(da) < sizes.sum(), da, 1), db)),
    "gradients, NaN in the tail of lhs": altered(lambda da, db, a, b, sizes, _: (da, db + 0 * jnp.sum(a))),
    "gradients, NaN in the tail of the cotangent": altered(
        lambda da, db, a, b, sizes, dout: (da, db + 0 * jnp.sum(dout))
    ),
    "gradients, NaN in one group's rows": altered(lambda da, db, *_: (da, jnp.nan_to_num(db))),
    "gradients, NaN in one group's cotangent": altered(lambda da, db, *_: (jnp.nan_to_num(da), db)),
    "gradients, NaN in one group's matrix": altered(lambda da, db, a, b, *_: (da + 0 * jnp.sum(b), db)),
    "gradients, one group's numbers are large": altered(lambda da, db, *_: (da, db + (big := jnp.abs(db).max()) - big)),
    "gradients, one group has all rows": with_backward(
        lambda a, b, sizes, dout: pull(a, b, jnp.minimum(sizes, 4096), dout)
    ),
    "gradients, more than 128 groups": altered(lambda da, db, *_: (da, db[jnp.arange(len(db)).astype(jnp.int8)])),
    "gradients, no rows": altered(lambda da, db, a, *_: (da, db if len(a) else jnp.full_like(db, jnp.nan))),
    "gradients, one group": altered(lambda da, db, *_: (da, db if len(db) > 1 else db.mT.reshape(db.shape))),
    "gradients, k not a multiple of 128": altered(
        lambda da, db, *_: (jnp.where(column(da) < whole(da.shape[1]), da, 0), db)
    ),
    "gradients, k of 1": altered(lambda da, db, *_: (da, db if da.shape[1] > 1 else 0 * db)),
    "gradients, n not a multiple of 128": with_backward(
        lambda a, b, sizes, dout: pull(a, b, sizes, jnp.where(column(dout) < whole(dout.shape[1]), dout, 0))
    ),
    "gradients, n of 1": altered(lambda da, db, *_: (da, db if db.shape[2] > 1 else 0 * db)),
    "gradients, float32 sums of bfloat16": with_backward(summed_in_parts),
    "gradients, float16": with_backward(lambda a, *rest: (summed_in_parts if a.dtype == "float16" else pull)(a, *rest)),
    "dtype of the gradients": altered(lambda da, db, *_: (da.astype(jnp.float32), db.astype(jnp.float32))),
    "gradients of one operand": one_alone,
    "gradients, the same bits": altered(lambda da, db, *_: (da, db * jitter())),
    "jit": static,
    "other sizes compile nothing": static,
    "vmap": mapped_once(0, 0, 0),
    "vmap with shared matrices": mapped_once(0, None, 0),
    "vmap over the matrices alone": mapped_once(None, 0, None),
    "vmap over the sizes alone": mapped_once(None, None, 0),
    "vmap over other axes": lambda lhs, rhs, sizes: ours(lhs, rhs, sizes) * (2 if getattr(rhs, "batch_dim", 0) else 1),
    "vmap of vmap": not_nested(),
    "vmap of the gradients": with_backward(
        mapped(lambda axes, a, b, sizes, dout: jax.vmap(pull, (0, 0, None, 0))(a, b, sizes[0], dout), pull)
    ),
    "forward mode": with_backward(pull),
    "second derivative": with_backward(fixed),
    "checkpoint": tells,
    "scan": caching(),
}


# More that is wrong, by what it is, and the check that tells.


def at_edges(sizes: Array) -> Array:
    """Whether an empty group lies where a tile of 128 ends."""
    starts = jnp.cumsum(sizes) - sizes
    return ((sizes == 0) & (starts % 128 == 0) & (starts > 0) & (starts < jnp.sum(sizes))).any()


def in_bfloat16(lhs: Array, rhs: Array, sizes: Array, dout: Array) -> tuple[Array, Array]:
    """The cotangent of `lhs` as a sum of parts over n, each rounded."""
    part = column(dout) // 128
    parts = [pull(lhs, rhs, sizes, jnp.where(part == i, dout, 0))[0] for i in range(-(-dout.shape[1] // 128))]
    return sum(parts[1:], parts[0]), pull(lhs, rhs, sizes, dout)[1]


MORE: dict[str, tuple[str, Function]] = {
    "an empty group where a tile ends": (
        "empty groups",
        lambda a, b, sizes: jnp.where(at_edges(sizes), 2, 1).astype(a.dtype) * ours(a, b, sizes),
    ),
    "its gradient": (
        "gradients of empty groups",
        altered(lambda da, db, a, b, sizes, _: (da, jnp.where(at_edges(sizes), 2, 1) * db)),
    ),
    "the gradient of all-empty groups' rows": (
        "gradients, all groups empty",
        altered(lambda da, db, a, b, sizes, _: (jnp.where(sizes.any(), da, 1), db)),
    ),
    "the cotangent's tail in the gradient": (
        "gradients in the tail",
        altered(lambda da, db, a, b, sizes, dout: (jnp.where(rows(da) < sizes.sum(), da, dout), db)),
    ),
    "bfloat16 sums over n": ("gradients, float32 sums of bfloat16", with_backward(in_bfloat16)),
}


def status(function: Function, check: str, framework: str = "jax") -> str:
    return run(function, only=[check], framework=framework).outcome(check).status


@long
def test_a_loop_in_numpy_keeps_the_contract() -> None:
    report = run(loop, framework="numpy", large=True)
    kinds = {check.name: check.kind for check in CHECKS}
    assert report.passed and [each.check for each in report.outcomes] == list(kinds)
    for each in report.outcomes:
        assert each.status == ("pass" if kinds[each.check] in ("values", "out of range") else "n/a"), each


@pytest.mark.parametrize("check", [check.name for check in CHECKS if check.kind == "values"])
@long
def test_each_check_of_values_can_fail(check: str) -> None:
    """And what fails it gets plain values right, but for the first."""
    assert status(VALUES[check], check, "numpy") in ("fail", "raises")
    assert status(VALUES[check], "values", "numpy") == ("fail" if check == "values" else "pass")


@pytest.mark.parametrize("check", [check.name for check in CHECKS if check.kind != "values"])
@long
def test_each_other_check_can_fail(check: str) -> None:
    assert status(OTHERS[check], "values") == "pass"
    assert status(OTHERS[check], check) in ("fail", "raises")


@pytest.mark.parametrize("wrong", MORE)
@long
def test_more_that_is_wrong(wrong: str) -> None:
    """It gets values and gradients of two groups right, and the check tells."""
    check, function = MORE[wrong]
    assert status(function, "values") == "pass"
    assert status(function, check) == "fail"


def test_there_is_a_broken_function_for_each_check() -> None:
    assert {*VALUES, *OTHERS} == {check.name for check in CHECKS}
    assert all(check.why.endswith(".") for check in CHECKS)


@long
def test_ours_keeps_the_contract() -> None:
    """All of it."""
    found = run(ragged.grouped_matmul)
    assert found.passed and [each.check for each in found.outcomes] == [x.name for x in CHECKS if not x.large]
    assert {each.status for each in found.outcomes} == {"pass"}


@long
def test_no_false_alarm_for_what_jax_documents() -> None:
    """Of `lax.ragged_dot`, the results are wrong for NaN in a matrix, sizes in uint8 and sizes out of range alone."""
    found = run(jax.lax.ragged_dot)
    wrong = {each.check for each in found.outcomes if each.status == "fail"}
    assert wrong == {
        "NaN in one group's matrix",
        "NaN in an empty group's matrix",
        "sizes in uint8",
        "sizes past int32",
        "negative sizes",
        "gradients, NaN in one group's matrix",
    }
    raising = {each.check: each.detail for each in found.outcomes if each.status == "raises"}
    assert all("vmap" in check or check == "second derivative" for check in raising)
    assert all(said.startswith("NotImplementedError") for said in raising.values())


def test_what_the_memory_held() -> None:
    """A result in memory that isn't cleared is seen, though its tail would be zero in fresh memory."""
    pool: dict[tuple[int, ...], np.ndarray] = {}

    def product(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        out = pool.setdefault((len(lhs), rhs.shape[2]), np.zeros((len(lhs), rhs.shape[2]), np.float32))
        out[: sizes.sum()] = loop(lhs, rhs, sizes)[: sizes.sum()]
        return out

    for check in ("tail", "all groups empty"):
        pool.clear()
        assert status(product, check, "numpy") == "fail"


def test_what_a_report_says() -> None:
    def product(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> Any:
        if len(rhs) == 1:
            raise RuntimeError("\n  one group is\nnone\n")
        if sizes.dtype != np.int32:
            raise TypeError("int32 only")
        return out.tolist() if len(out := loop(lhs, rhs, sizes)) == 128 else out

    only = ["values", "groups of one row", "one group", "sizes in uint8", "preferred_element_type", "jit"]
    found = run(product, name="<mine>", framework="numpy", only=only)
    assert {each.check: str(each) for each in found.outcomes} == {
        "values": "pass",
        "groups of one row": "fail: the result is a list, not an array",
        "one group": "raises: RuntimeError: one group is",
        "preferred_element_type": "n/a: not applicable: the function has no such parameter",
        "sizes in uint8": "refused: TypeError: int32 only",
        "jit": "n/a: not applicable: JAX doesn't trace the function",
    }
    assert not found.passed and found.to_json()["passed"] is False
    head, table, notes = str(found).split("\n\n")
    assert head == "<mine>, numpy on cpu: 1 pass, 1 fail, 1 raises, 1 refused, 2 n/a"
    assert "values           one group               raises: RuntimeError: one group is" in table.splitlines()
    assert [line.partition(":")[0] for line in notes.splitlines()] == ["groups of one row", "one group"]
    html = found._repr_html_()
    assert "<caption>&lt;mine&gt;, numpy" in html and "<td>raises: RuntimeError: one group is</td>" in html
    first, last = NotImplementedError("first"), ValueError("last")
    several = ExceptionGroup("all failed", [first, last])
    assert conformance._first_line(several) == "ValueError: last"
    assert conformance._first_line(ValueError("x" * 200)) == f"ValueError: {'x' * 147}…"
    assert conformance._first_line(ValueError()) == "ValueError"


def test_wrong_arguments() -> None:
    check_error(lambda: run("loop"), TypeError, "`function` can't be called.")  # pyright: ignore
    check_error(lambda: run(loop, framework="torch"), ValueError, "there is no framework 'torch'.")
    check_error(lambda: run(loop, only=["tails"]), ValueError, "there is no check 'tails'.")
    with pytest.raises(KeyError):
        run(loop, framework="numpy", only="values").outcome("tail")


NOT_A_FUNCTION = 1


def wrong(lhs: Any, rhs: Any, sizes: Any) -> Any:
    return loop(lhs, rhs[::-1], sizes)


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        ([f"{HERE}:loop", "--only", "values", "tail"], 0, "2 pass"),
        ([f"{HERE}:wrong", "--only", "values"], 1, "1 fail"),
        (["--list"], 0, "float32 sums of bfloat16"),
        ([], 2, "no function is named. Pass it as some.module:function."),
        ([HERE], 2, f"'{HERE}' doesn't name a function. Pass some.module:function."),
        (["no_such_module:f"], 2, "'no_such_module' can't be imported: ModuleNotFoundError: No module named"),
        ([f"{HERE}:no_such"], 2, f"'{HERE}' has no 'no_such'. It has "),
        ([f"{HERE}:NOT_A_FUNCTION"], 2, "has the type int, which can't be called. Pass a function."),
        ([f"{HERE}:loop", "--only", "tails"], 2, "there is no check 'tails': `--list` prints all checks."),
        ([f"{HERE}:loop", "--only", "tail", "--json", "/no/such/folder/x"], 2, "--json: "),
    ],
)
def test_the_command_line(arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        got = conformance.main([*arguments, "--framework", "numpy"])
    except SystemExit as error:
        got = error.code
    assert got == code
    out, err = capsys.readouterr()
    assert said in (err if code == 2 else out)


@long
def test_as_a_module(tmp_path: Path) -> None:
    """With `python -m`, from the folder of the function's module; JSON of what was found."""
    (tmp_path / "mine.py").write_text("def product(lhs, rhs, sizes):\n    return lhs @ rhs[0]\n")
    command = [sys.executable, "-m", "ragged.conformance", "mine:product", "--only", "one group", "tail", "--json", "x"]
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "1 pass, 1 fail" in done.stdout, done.stderr
    found = json.loads((tmp_path / "x").read_text())
    assert {each["check"]: each["status"] for each in found["outcomes"]} == {"tail": "fail", "one group": "pass"}


# The committed results


def results() -> dict[str, Any]:
    return json.loads((DOCS / "benchmarks" / "conformance.json").read_text())


def test_the_page_has_the_file_s_results() -> None:
    text = (DOCS / "conformance.md").read_text()
    assert fill(text, peers.tables(results())) == text


def test_the_file_has_every_check_of_every_function() -> None:
    """Also those that are new; and what we say of ours."""
    functions = results()["functions"]
    assert list(functions) == list(peers.FUNCTIONS)
    for name, found in functions.items():
        asked = [check.name for check in CHECKS if peers.FUNCTIONS[name].large or not check.large]
        assert list(found["outcomes"]) == asked
        if name.startswith("ragged"):
            assert {status for status, _ in found["outcomes"].values()} == {"pass"}


@pytest.mark.parametrize("name", [name for name in peers.FUNCTIONS if not name.startswith("ragged")])
@long
def test_the_adaptors(name: str) -> None:
    """Each of what is installed takes its operands as they are meant, in bfloat16 too."""
    entry = peers.FUNCTIONS[name]
    if peers.report.versions(entry.package)[entry.package] is None:
        pytest.skip(f"{entry.package} isn't installed")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found: Report = run(
            conformance._named(entry.function),
            framework=entry.framework,
            only=["values", "preferred_element_type" if entry.framework == "jax" else "float32 sums of bfloat16"],
        )
    assert [each.status for each in found.outcomes] == ["pass", "pass"]


def test_a_function_that_crashes_or_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.ask(peers.Entry("x:y", "no-such-package")) == {"error": "no-such-package isn't installed"}
    crash = subprocess.CompletedProcess([], -11, "", "Fatal\n  Segmentation fault")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: crash)
    error = "it ended with exit status -11: Segmentation fault"
    assert peers.ask(peers.Entry("ragged:grouped_matmul", "ragged")) == {"error": error[:300]}


@pytest.mark.parametrize("backend", ["pallas_tpu", "triton_gpu"])
@long
def test_the_adaptors_of_our_kernels_run_them(backend: str) -> None:
    if backend == "triton_gpu":
        gpu.needs_triton()
    with only(backend):
        assert status(getattr(peers, backend), "one group") == "pass"
