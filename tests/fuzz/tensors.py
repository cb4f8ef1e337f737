"""Builders of random programs without products: arithmetic, reductions, slices, conversions, routes, quantisation."""

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from .approx import Approx, Result, U
from .operands import Arrays, Data, Operand, Sizes
from .program import Spec

KINDS = {"uniform": (False, False), "rows": (True, False), "columns": (False, True), "both": (True, True)}
FORMATS = {  # the largest value; half a unit in the last place, relative to a value, and of the smallest values
    "float8_e4m3fn": (448, 2**-4, 2**-10),
    "float8_e5m2": (57344, 2**-3, 2**-17),
    "int8": (127, 0, 0.5),
    "float4_e2m1fn": (6, 0.25, 0.25),
    "int4": (7, 0, 0.5),
}


class Tensor:
    """A random tensor: `data` describes its buffer, `axis` is the packed axis of matrices, `text` makes it."""

    def __init__(self, r: Random, *dtypes: str, kinds: tuple[str, ...] = tuple(KINDS), more: bool = False) -> None:
        self.kind, self.count = r.choice(kinds), r.choice([1, 2, 3, 5, 9])
        long, short = r.choice([1, 5, 16, 40, 300]), r.choice([1, 4, 7, 16])
        first, last = (
            name if is_ragged else None for name, is_ragged in zip(("first", "last"), KINDS[self.kind], strict=True)
        )
        sizes = {"first": Sizes(self.count, long, long), "last": Sizes(self.count, long, long)}
        if self.kind == "both":
            sizes["last"] = Sizes(self.count, short * self.count, short)
        inner = [r.choice([1, 2, 3])] * (more and self.kind != "columns" and r.random() < 0.3)
        shape = [short, long] if self.kind == "columns" else [long, *inner, short]
        shape = [self.count, *shape] if self.kind == "uniform" else shape
        self.axis = {"uniform": None, "columns": -1}.get(self.kind, -2)
        self.data = Data(tuple(shape), r.choice(dtypes), first, last)
        self.operands: dict[str, Operand] = {name: sizes[name] for name in (first, last) if name}
        self.operands["data"] = self.data
        self.text = f"GroupedTensor(data, {first}, {last})"
        self.other = self.text.replace("data", "other")


ARITHMETIC = {  # of groups in NumPy, if it differs
    "x + y": "",
    "x - y": "",
    "x * y": "",
    "x > y": "",
    "x == y": "",
    "2 * x": "",
    "1 - x": "",
    "-x": "",
    "abs(x)": "",
    "x.map(lambda rows: rows * rows)": "x * x",
    "x.map(jnp.maximum, y)": "np.maximum(x, y)",
    "x * ragged.per_group(v)": "",
    "x + ragged.per_row(v)": "",
    "x - ragged.per_column(v)": "",
}


def arithmetic(r: Random, _: str) -> Spec:
    """One operator, `map` or broadcast."""
    x, text = Tensor(r, "float32", "bfloat16", "int32", more=True), r.choice(list(ARITHMETIC))
    shape = x.data.shape
    shapes = {"group": (x.count,), "row": shape[: 2 if x.kind == "uniform" else 1], "column": shape[-1:]}
    along = next((name for name in shapes if name in text), None)
    operands = x.operands | ({"other": x.data} if "y" in text else {})
    operands |= {"v": Data(shapes[along], x.data.dtype, special=False)} if along else {}
    out = x.data._replace(dtype="bool") if text in ("x > y", "x == y") else x.data

    def expected(arrays: Arrays) -> list[Result]:
        parts, v = [], arrays.get("v", np.zeros(())).astype(np.float64)
        rows = np.broadcast_to(v.reshape(v.shape + (1,) * (len(shape) - v.ndim)), shape) if along == "row" else v
        columns = np.broadcast_to(v, shape) if along == "column" else v
        others = x.data.groups("other" if "y" in text else "data", arrays)
        for i, (place, a, b) in enumerate(
            zip(x.data.places(arrays), x.data.groups("data", arrays), others, strict=True)
        ):
            per = {"per_group": lambda v, i=i: v[i], "per_row": lambda _, at=place: rows[at]}
            per["per_column"] = lambda _, at=place: columns[at]
            scope = {"x": a, "y": b, "v": v, "np": np, "ragged": SimpleNamespace(**per)}
            value = eval(ARITHMETIC[text] or text, scope)
            parts.append(Approx(value, 2 * U * np.abs(value)))
        return [out.result(parts, arrays)]

    y = f"y = {x.other}\n" if "y" in text else ""
    return Spec(operands, f"x = {x.text}\n{y}return [({text}).data]", expected)


def _reduced(name: str, group: np.ndarray, axis: tuple[int, ...]) -> Approx:
    """A reduction of a group that has elements. A variance is computed in two passes."""
    if name in ("max", "min"):
        return Approx(getattr(np, name)(group, axis))
    total = Approx(group).sum(axis)
    if name == "sum":
        return total
    share = Approx(total.value.size / group.size)
    mean = total * share
    if name == "mean":
        return mean
    centred = group - np.expand_dims(mean.value, axis)
    far = Approx(centred, np.expand_dims(mean.error, axis) + 2 * U * np.abs(centred))
    return (far * far).sum(axis) * share


def reduction(r: Random, _: str) -> Spec:
    """`sum`, `mean`, `var`, `max` or `min` of groups, of rows or columns of groups, or of rows or columns."""
    x, is_kept = Tensor(r, "float32", "bfloat16", "int32"), r.random() < 0.3
    name = r.choice(["sum", "mean", "var", "max", "min"])
    axis, is_int = r.choice([None, -1, -2]), x.data.dtype == "int32"
    axes = (-2, -1) if axis is None else (axis,)
    dtype = "float32" if is_int and name in ("mean", "var") else x.data.dtype
    lowest, highest = (-(2.0**31), 2.0**31 - 1) if is_int else (-np.inf, np.inf)
    empty = {"max": lowest, "min": highest}.get(name, 0.0)
    by_group = axis in (None, x.axis) or x.axis is None
    rest = [x.data.shape[a] for a in (-2, -1) if a not in axes]

    def expected(arrays: Arrays) -> list[Result]:
        out = np.full([x.count, *rest] if by_group else rest, empty)
        error, inside = np.zeros(out.shape), np.zeros(out.shape, bool)
        for i, (place, group) in enumerate(zip(x.data.places(arrays), x.data.groups("data", arrays), strict=True)):
            at: Any = i if by_group else place[x.axis or 0] if x.axis == -1 else place[0]
            inside[at] = True
            if group.size:
                found = _reduced(name, group, axes)
                at = (i, *(slice(n) for n in found.value.shape)) if by_group else at
                out[at], error[at] = found.value, found.error
        if is_kept:  # a tensor, whose tail is zero
            out = np.where(inside | by_group, out, 0)
            out, error = (np.expand_dims(each, axes) for each in (out, error))
        return [Result(Approx(out, error), dtype)]

    return Spec(x.operands, f"return [{x.text}.{name}({axis}, keepdims={is_kept}){'.data' * is_kept}]", expected)


def softmax(r: Random, _: str) -> Spec:
    """The softmax of each row of a group, with and without masks of attention."""
    x, causal, window = Tensor(r, "float32", "bfloat16"), r.random() < 0.3, r.choice([None, (1, None), (0, 1), 2])
    left, right = window if isinstance(window, tuple) else (window, window)

    def expected(arrays: Arrays) -> list[Result]:
        parts = []
        for group in x.data.groups("data", arrays):
            n, m = group.shape
            ahead = np.arange(m) - (np.arange(n)[:, None] + m - n)
            visible = (ahead <= (0 if causal else m + n)) & (ahead <= (m + n if right is None else right))
            visible &= ahead >= -(m + n if left is None else left)
            shifted = group - np.max(group, -1, keepdims=True, where=visible, initial=-np.inf)
            weights = np.where(visible, np.exp(shifted), 0)
            value = np.where(visible, weights / weights.sum(-1, keepdims=True), 0)
            # `exp(s)` has the relative error of `s`, which is at most |s| units, and its own.
            spread = np.max(np.abs(shifted), -1, keepdims=True, where=visible & np.isfinite(shifted), initial=0)
            parts.append(Approx(value, (m + 32 + 2 * spread) * U * value))
        return [x.data.result(parts, arrays)]

    return Spec(x.operands, f"return [{x.text}.softmax(causal={causal}, window={window}).data]", expected)


def slices(r: Random, _: str) -> Spec:
    """`rows` or `columns`: a slice of each group."""
    x, name = Tensor(r, "float32", "int32", more=True), r.choice(["rows", "columns"])
    start, stop = (r.choice([None, 0, 1, 2, 5, -1, -3]) for _ in range(2))
    axis = -1 if name == "columns" else int(x.kind == "uniform")
    sizes = x.data.last if name == "columns" else x.data.first
    extent = len(range(x.data.shape[axis])[start:stop])
    if sizes:  # The buffer is shorter if the slice of every group is limited.
        extent, both_ends = x.data.shape[axis], (start or 0) < 0 or (stop is not None and stop >= 0)
        is_limited = both_ends and ((start or 0) < 0) == (stop is None or stop < 0)
        slices = 1 if x.kind == "both" and name == "columns" else x.count
        extent = min(extent, slices * max(0, (stop or 0) - (start or 0))) if is_limited else extent
    shape = list(x.data.shape)
    shape[axis] = extent
    out = x.data._replace(shape=tuple(shape))

    def expected(arrays: Arrays) -> list[Result]:
        groups = x.data.groups("data", arrays)
        parts = [each[start:stop] if name == "rows" else each[..., start:stop] for each in groups]
        if not sizes:
            return [out.result([Approx(part) for part in parts], arrays)]
        new = np.array([part.shape[0 if name == "rows" else -1] for part in parts])
        return [out.result([Approx(part) for part in parts], {**arrays, sizes: new}), Result(Approx(new), "int32")]

    more = f", out.{sizes}_dims" if sizes else ""
    return Spec(x.operands, f"out = {x.text}.{name}({start}, {stop})\nreturn [out.data{more}]", expected)


def concat(r: Random, _: str) -> Spec:
    """The groups of two tensors in one."""
    x = Tensor(r, "float32", "bfloat16", "int32", more=True)
    shape = list(x.data.shape)
    shape[-1 if x.kind == "columns" else 0] *= 2
    out = x.data._replace(shape=tuple(shape))

    def expected(arrays: Arrays) -> list[Result]:
        parts = [Approx(each) for name in ("data", "other") for each in x.data.groups(name, arrays)]
        return [out.result(parts, {name: np.tile(arrays[name], 2) for name in ("first", "last") if name in arrays})]

    operands = {**x.operands, "other": x.data}
    return Spec(operands, f"return [ragged.concat([{x.text}, {x.other}]).data]", expected)


def padded(r: Random, _: str) -> Spec:
    """`to_padded` of a tensor, and `from_padded` of the result, in which longer groups are cut off."""
    x, longest, capacity = (
        Tensor(r, "float32", "int32", kinds=("rows",), more=True),
        r.choice([1, 3, 20]),
        r.choice([1, 10, 50]),
    )
    out = x.data._replace(shape=(capacity, *x.data.shape[1:]))

    def expected(arrays: Arrays) -> list[Result]:
        table = np.full((x.count, longest, *x.data.shape[1:]), 7.0)
        parts = [Approx(each[:longest]) for each in x.data.groups("data", arrays)]
        for i, part in enumerate(parts):
            table[i, : len(part.value)] = part.value
        sizes = np.minimum(arrays["first"], longest)
        return [Result(Approx(table), out.dtype), out.result(parts, {"first": sizes})]

    body = f"""\
table = {x.text}.to_padded({longest}, 7)
return [table, GroupedTensor.from_padded(table, first, capacity={capacity}).data]"""
    return Spec(x.operands, body, expected)


def indices(r: Random, _: str) -> Spec:
    """`offsets`, `group_ids`, `positions` and `mask`, and a transpose."""
    x = Tensor(r, "float32", kinds=("rows", "columns", "both"))
    extent = x.data.shape[x.axis or 0]

    def expected(arrays: Arrays) -> list[Result]:
        runs: list[Any] = [place[-1 if x.axis == -1 else 0] for place in x.data.places(arrays)]
        offsets, ids = np.array([0, *(run.stop for run in runs)]), np.full(extent, x.count)
        for i, run in enumerate(runs):
            ids[run] = i
        groups = x.data.groups("data", arrays)
        mask = x.data.result([Approx(np.ones(each.shape)) for each in groups], arrays).want
        turned = x.data.result([Approx(2 * each) for each in groups], arrays).want.T
        integers = [Result(Approx(each), "int32") for each in (offsets, ids, np.arange(extent) - offsets[ids])]
        return [*integers, Result(mask, "bool"), Result(turned, "float32")]

    body = f"x = {x.text}\nreturn [x.offsets, x.group_ids, x.positions, x.mask, (x.mT * 2).data]"
    return Spec(x.operands, body, expected)


def route(r: Random, _: str) -> Spec:
    """Tokens to groups and back: `dispatch`, `combine`, and a product of gathered rows. Some tokens have no group."""
    tokens, top_k, count, d = r.choice([1, 5, 16]), r.choice([None, 1, 2, 3]), r.choice([1, 3, 6]), r.choice([1, 4, 8])
    dtype, shape = r.choice(["float32", "bfloat16"]), (tokens,) if top_k is None else (tokens, top_k)
    operands: dict[str, Operand] = {
        "ids": Data(shape, "int32", low=r.choice([0, -1]), high=count - r.choice([0, 1])),
        "x": Data((tokens, d), dtype),
        "w": Data((count, d, 3), dtype),
        "weights": Data(shape, "float32", special=False),
    }
    rows, out = (Data((tokens * (top_k or 1), n), dtype, "sizes") for n in (d, 3))

    def expected(arrays: Arrays) -> list[Result]:
        x, w, weights = (arrays[name].astype(np.float64) for name in ("x", "w", "weights"))
        sent, total, bound = [], np.zeros((tokens, d)), np.zeros((tokens, d))
        for group in range(count):
            chosen = np.argwhere(arrays["ids"].reshape(tokens, -1) == group)
            sent.append(Approx(x[chosen[:, 0]]))
            for token, j in chosen:
                term = x[token] * weights.reshape(tokens, -1)[token, j]
                total[token] += term
                bound[token] += 6 * U * np.abs(term)  # a sum of three terms
        sizes = np.array([len(each.value) for each in sent])
        products = [a @ Approx(b) for a, b in zip(sent, w, strict=True)]
        both = [rows.result(sent, {"sizes": sizes}), out.result(products, {"sizes": sizes})]
        return [Result(Approx(sizes), "int32"), Result(Approx(total, bound), dtype), *both]

    body = f"""\
route = ragged.route(ids, {count})
rows = route.dispatch(x)
out = ragged.matmul(route.gathered(x), w)
return [route.first_dims, route.combine(rows, weights), rows.data, out.data]"""
    return Spec(operands, body, expected)


def quantize(r: Random, _: str) -> Spec:
    """`quantize` and `dequantize`: within half a unit in the last place, at the scale of the block's largest element.

    A block in a row has at most the scale of the row. Powers of two are at most twice as large.
    """
    x, dtype = Tensor(r, "float32", "bfloat16"), r.choice(list(FORMATS))
    scaling, power = r.choice(["tensor", "group", "row", "column", (1, 4), "mx"]), r.random() < 0.3
    largest, relative, absolute = FORMATS[dtype]
    operands = {n: of._replace(special=False) if isinstance(of, Data) else of for n, of in x.operands.items()}
    axis = {"tensor": None, "group": None, "column": 0}.get(str(scaling), 1)

    def expected(arrays: Arrays) -> list[Result]:
        groups, parts = x.data.groups("data", arrays), []
        everything = max(np.max(np.abs(each), initial=0) for each in groups)
        for group in groups:
            amax: Any = everything if scaling == "tensor" else np.max(np.abs(group), axis, keepdims=True, initial=0)
            unit = absolute * (2 if power or scaling == "mx" else 1) * amax / largest
            parts.append(Approx(group, np.maximum(relative * np.abs(group), unit) * (1 + 1e-5)))
        return [Result(x.data.result(parts, arrays).want, "float32")]

    call = f"ragged.quantize({x.text}, jnp.{dtype}, {scaling!r}, power_of_two={power})"
    return Spec(operands, f"return [{call}.dequantize().data]", expected)
