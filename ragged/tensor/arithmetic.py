"""What can be done to a `GroupedTensor` element by element, row by row and group by group.

Nothing here lets the tail in or out: functions see ones where there is no element, results have zeros there, and both
are chosen by `select`, so that neither a value nor a gradient of the tail ever reaches anything.

Whatever is summed, values or cotangents, is summed in float32 and rounded once; along the packed axis in blocks, whose
sums are summed in blocks again (`_steps`), so that the error doesn't grow with a group's rows.
"""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Int, Shaped

from ragged._errors import Site
from ragged._mesh import over_explicit_axes
from ragged.backends import schedule
from ragged.quant.formats import accumulator_dtype

if TYPE_CHECKING:
    from ragged.tensor.tensor import GroupedTensor


class per_group(eqx.Module):
    """Wraps one value a group, to combine with a tensor: `x * per_group(v)`.

    `value`: `(g,)`, one value for all elements of a group; or for ragged rows also `(g, last)`, one row a group (for
    ragged columns `(g, first)`, one column a group; for a uniform tensor anything that broadcasts after the group
    axis).

    One row for all groups, `(last,)`, is none of these, and is taken for `(g,)` where `last` is `g`: that is
    `x.map(lambda rows: rows * v)`.
    """

    value: Array | Any


class per_row(eqx.Module):
    """Wraps one value a row of the buffer, to combine with a tensor: `x * per_row(v)`.

    `value`: `(rows,)`; for a uniform tensor `(g, first)`. What it holds in the tail never matters.
    """

    value: Array | Any


class Arithmetic(eqx.Module):
    """The element-by-element half of `GroupedTensor`."""

    data: eqx.AbstractVar[Any]
    first_dims: eqx.AbstractVar[Any]
    last_dims: eqx.AbstractVar[Any]

    # numpy and jax must not take it for an array and drop its raggedness.
    __array_ufunc__ = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        mend = "Take the buffer as `x.data`, the groups as `x.to_list()` or `x.to_padded(max_len)`."
        Site("numpy.asarray(GroupedTensor)", {"x": self}).fail(TypeError, "an array would drop its groups.", mend)

    def map(self, fn: Callable[[Array], Array], *, zero_tail: bool = True) -> "GroupedTensor":
        """Applies an elementwise or rowwise function to the buffer.

        `fn` is called once, with the whole buffer (ones where it holds no element). It may change the dtype, and along
        a dim that isn't ragged the extent: `x.map(lambda rows: rows @ w)`. It must treat rows (columns, if those are
        packed) apart from each other, and be finite, with its derivative, on a row of ones. It may hold arrays of its
        own, as in `x.map(lambda rows: rows + bias)`; their gradients are JAX's, which sums over the rows in the dtype
        that they are added in: in bfloat16, `(rows.astype(jnp.float32) + bias).astype(rows.dtype)` keeps them right.

        Of a cotangent, whose groups are unknown, `fn` must be elementwise: it is applied to all of the buffer.

        **Arguments:** `zero_tail`: False leaves what `fn` makes of the ones in the tail, and saves a pass.

        **Raises:** `ValueError` if the result's rank or its extent along a ragged axis is another.
        """
        x = _tensor(self)
        out = jnp.asarray(fn(self._filled(1)))
        kept = [axis for axis, is_ragged in ((-2, x.ragged[0]), (-1, x.ragged[1])) if is_ragged] or [-3]
        kept = list(range(-x.ndim, 0)) if x.is_cotangent else kept
        if out.ndim != x.ndim or any(out.shape[axis] != x.shape[axis] for axis in kept):
            problem = f"`fn` must keep the rank and the extent of axes {kept}."
            site = Site("GroupedTensor.map", {"x": x, "fn(x.data)": out})
            site.fail(ValueError, problem, "Only dims that aren't ragged may change.")
        out = x._replace_data(out)
        return out._replace_data(out._filled(0)) if zero_tail else out

    @over_explicit_axes
    def _filled(self, value: Any) -> Array:
        """The buffer, with `value` where it holds no element. That of a cotangent as it is."""
        x = _tensor(self)
        x.require_plain()
        data = jnp.asarray(x.data)
        if x.is_cotangent:
            return data
        x.require_groups()
        return data if x.packed_axis is None else jnp.where(x.mask, data, jnp.asarray(value, data.dtype))

    @over_explicit_axes
    def _combine(self, other: Any, fn: Callable[[Any, Any], Array], symbol: str, reflected: bool = False) -> Any:
        """`fn(self, other)`, or `fn(other, self)` if `reflected`."""
        x = _tensor(self)
        x.require_plain()
        if isinstance(other, per_group | per_row):
            other = _spread(x, other)
        elif isinstance(other, Arithmetic):
            other = _tensor(other)
            other.require_plain()
            if x.is_cotangent and not other.is_cotangent:  # the result is a tensor with the groups of `other`
                return other._combine(x, fn, symbol, not reflected)
            other = _same_structure(x, other, symbol)
        elif not isinstance(other, int | float | complex | np.generic | np.ndarray | Array):
            return NotImplemented
        elif jnp.ndim(other):
            site = Site(f"GroupedTensor {symbol} array", {"x": x, "array": other})
            mend = _mend(x, jnp.shape(other), symbol, reflected)
            site.fail(TypeError, "a plain array has no groups to match.", mend)
        elif isinstance(other, Array) and _wide(dtype := jnp.result_type(x.dtype, other)) != dtype:
            other = broadcast_wide(other, dtype, x.shape)
        return x.map(lambda data: fn(other, data) if reflected else fn(data, other))

    def __add__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.add, "+")

    def __radd__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.add, "+", reflected=True)

    def __sub__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.sub, "-")

    def __rsub__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.sub, "-", reflected=True)

    def __mul__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.mul, "*")

    def __rmul__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.mul, "*", reflected=True)

    def __truediv__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.truediv, "/")

    def __rtruediv__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.truediv, "/", reflected=True)

    def __neg__(self) -> "GroupedTensor":
        return self.map(operator.neg)

    def sum(self, axis: int | None = None, *, empty: Any = 0) -> Shaped[Array, "..."]:
        """Sum of each group.

        **Arguments:**

        - `axis`: None for all of a group's elements, -> `(g,)`. The packed axis (-2 for ragged rows, -1 for ragged
          columns) -> one row or column a group, `(g, last)` or `(g, first)`. The other axis -> one value a row (or
          column) of the buffer, `(rows,)`, with `empty` in the tail. Uniform tensors: as `jnp.sum` within each group.
        - `empty`: the value where there is nothing to reduce.

        Small floats are summed in float32, small integers in int32.
        """
        return self._reduce(axis, _sum_groups, jnp.sum, 0, empty)

    @over_explicit_axes
    def mean(self, axis: int | None = None, *, empty: Any = 0) -> Shaped[Array, "..."]:
        """Mean of each group. Arguments as for `sum`."""
        x = _tensor(self)
        x.require_plain()
        x.require_groups()
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
        wide = accumulator_dtype(dtype)
        count = x._replace_data(jnp.ones(x.shape, jnp.int32)).sum(axis).astype(wide)
        total = x.astype(wide).sum(axis)
        return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.asarray(empty, wide)).astype(dtype)

    def max(self, axis: int | None = None, *, empty: Any = None) -> Shaped[Array, "..."]:
        """Largest element of each group. Arguments as for `sum`; `empty` is the lowest value of the dtype by
        default."""
        dtype = _tensor(self).dtype
        if jnp.issubdtype(dtype, jnp.bool_):
            lowest = False
        elif jnp.issubdtype(dtype, jnp.integer):
            lowest = jnp.iinfo(dtype).min
        else:  # float8_e4m3fn has no infinity
            lowest = -jnp.inf if np.isinf(np.asarray(np.inf).astype(dtype)) else float(jnp.finfo(dtype).min)
        return self._reduce(axis, _max_groups, jnp.max, lowest, lowest if empty is None else empty)

    @over_explicit_axes
    def _reduce(self, axis: int | None, groups_fn: Any, dense_fn: Any, neutral: Any, empty: Any) -> Array:
        x = _tensor(self)
        x.require_plain()
        x.require_groups()
        if axis not in (None, -1, -2):
            mend = "It must be None, -2 (the groups' first dim) or -1 (the last)."
            Site("GroupedTensor").fail(ValueError, f"`axis` of a reduction is {axis!r}.", mend)
        if x.packed_axis is None:
            axes = (-2, -1) if axis is None else (axis,)
            out = dense_fn(x.data, axis=axes, initial=neutral)
            return out if all(x.shape[a] for a in axes) else jnp.full_like(out, empty)
        if x.packed_axis == -1:
            swapped = None if axis is None else -3 - axis
            return x.mT._reduce(swapped, groups_fn, dense_fn, neutral, empty)
        # Small integers are summed in int32, small floats in float32 and rounded once.
        dtype = jax.eval_shape(lambda d: dense_fn(d, axis=-1, initial=neutral), jnp.asarray(x.data)).dtype
        if axis != -1 and not x.num_groups:  # the gradient would gather from nothing
            return jnp.zeros((0, *x.shape[-1:])[: 1 if axis is None else 2], dtype)
        wide = accumulator_dtype(dtype)
        neutral, empty = jnp.asarray(neutral, wide), jnp.asarray(empty, wide)
        data = jnp.where(x.mask, x.data.astype(wide), neutral)  # [rows, last]
        some = x.mask
        if axis != -2:
            data, some = dense_fn(data, axis=-1, initial=neutral), jnp.any(some, axis=-1)  # (rows,)
        if axis != -1:
            data, columns = groups_fn(x, data), x.shape[-1]
            widths = columns if x.last_dims is None else jnp.minimum(x.last_dims, columns).astype(jnp.int32)
            widths = jnp.where(jnp.diff(x.offsets) > 0, widths, 0)  # (g,)
            some = widths > 0 if axis is None else jnp.arange(columns, dtype=jnp.int32)[None] < widths[:, None]
        return jnp.where(some, data, empty).astype(dtype)

    @over_explicit_axes
    def softmax(self) -> "GroupedTensor":
        """Softmax along the last dim of each group: over a row's real columns if the last dim is ragged.

        A row without columns, and the tail, are zero. Computed in float32 and rounded once.
        """
        x = _tensor(self)
        x.require_groups()
        if (wide := _wide(x.dtype)) != x.dtype:
            return x.astype(wide).softmax().astype(x.dtype)
        if x.kind == "uniform" or x.kind == "ragged rows":
            return x.map(lambda data: jax.nn.softmax(data, axis=-1))
        if x.packed_axis == -2:
            mask = x.mask
            # A row with no column at all would be 0 / 0.
            some = jnp.any(mask, axis=-1, keepdims=True)
            probabilities = jax.nn.softmax(x._filled(0), axis=-1, where=mask | ~some)
            return x._replace_data(jnp.where(mask, probabilities, 0))
        # Packed columns: a row of a group runs along the packed axis, which `mT` turns into the first.
        y = x.mT
        largest = y._replace_data(jax.lax.stop_gradient(jnp.asarray(y.data))).max(-2, empty=0)
        weights = (y - per_group(largest)).map(jnp.exp)
        return (weights / per_group(weights.sum(-2, empty=1))).mT


def _tensor(x: Any) -> "GroupedTensor":
    return x


def _spread(x: "GroupedTensor", wrapped: per_group | per_row) -> Array:
    """The wrapped values along the buffer of `x`, broadcastable to it, with ones where it holds no element."""
    value = _along(x, wrapped)
    # A row without columns, or a column that no row of its group has, must not reach the gradient of `v` either.
    return value if x.packed_axis is None else jnp.where(x.mask, value, 1)


def _along(x: "GroupedTensor", wrapped: per_group | per_row) -> Array:
    x.require_groups()
    value, name = jnp.asarray(wrapped.value), type(wrapped).__name__
    axis = x.packed_axis
    if isinstance(wrapped, per_row):
        want = x.shape[:-1]
    else:
        columns = () if axis is None or value.ndim == 1 else (x.shape[-3 - axis],)
        want = (x.num_groups, *(value.shape[1:3] if axis is None else columns))
    if value.shape != want:
        mend = "One value a row of the buffer." if name == "per_row" else "One value a group, or one row a group."
        if value.shape == x.shape[-1:]:
            mend += " For one value a column: `x.map(lambda rows: rows * v)`, or `+`."
        Site(f"ragged.{name}(v)", {"v": value, "x": x}).fail(ValueError, f"`v` must have shape {want} here.", mend)
    if isinstance(wrapped, per_row):
        return broadcast_wide(value[..., None], value.dtype, x.shape)
    if axis is None:
        value = value.reshape(x.num_groups, *(1,) * (3 - value.ndim), *value.shape[1:])
        return broadcast_wide(value, value.dtype, x.shape)
    dtype, alone = value.dtype, value.ndim == 1
    value = value.astype(_wide(dtype)) if alone else value
    value = jnp.concatenate([value, jnp.ones((1, *value.shape[1:]), value.dtype)])  # the tail is one more group
    value = _take(value, x.offsets, x.group_ids)  # (capacity,) or [capacity, other]
    value = broadcast_wide(value[:, None], dtype, (x.capacity, x.shape[-3 - axis])) if alone else value
    return value if axis == -2 else value.mT


def _same_structure(x: "GroupedTensor", other: "GroupedTensor", symbol: str) -> Array:
    """The buffer of `other`, with ones in its tail. Of a cotangent only the buffer is compared."""
    if other.is_cotangent:
        same = (x.shape, x.transposed) == (other.shape, other.transposed)
    else:
        same = (x.kind, x.packed_axis, x.shape, x.num_groups) == (
            other.kind,
            other.packed_axis,
            other.shape,
            other.num_groups,
        )
        for mine, theirs in ((x.first_dims, other.first_dims), (x.last_dims, other.last_dims)):
            if same and mine is not theirs and not isinstance(mine, Tracer) and not isinstance(theirs, Tracer):
                same = np.array_equal(mine, theirs)
    if not same:
        Site(f"GroupedTensor {symbol} GroupedTensor", {"x": x, "other": other}).fail(
            ValueError, "the two are ragged in different ways.", "Both need the same kind, shape and dims."
        )
    if x.is_cotangent:
        return jnp.asarray(other.data)
    return x._replace_data(jnp.asarray(other.data))._filled(1)


def _mend(x: "GroupedTensor", shape: tuple[int, ...], symbol: str, reflected: bool) -> str:
    """What to write in place of `x + v`, by the shape of `v`."""
    row, data = (f"v {symbol} {name}" if reflected else f"{name} {symbol} v" for name in ("rows", "data"))
    axis = None if x.is_cotangent else x.packed_axis
    of: dict[tuple[int, ...], str] = {}
    if not x.is_cotangent:
        of[x.num_groups,] = "One value a group is `ragged.per_group(v)`."
    if axis is not None:
        name = "row" if axis == -2 else "column"
        of[x.num_groups, x.shape[-3 - axis]] = f"One {name} a group is `ragged.per_group(v)`."
    mends = [of[shape]] if shape in of else []
    if shape == x.shape[:-1] and not x.is_cotangent:
        mends.append("One value a row is `ragged.per_row(v)`.")
    if shape == x.shape[-1:]:
        mends.append(f"One value a column is `x.map(lambda rows: {row})`.")
    elif shape == x.shape:
        mends.append(f"A value for each element is `x.map(lambda data: {data})`.")
    return " ".join(mends) or (
        "Wrap it: `ragged.per_group(v)` for one value a group, `ragged.per_row(v)` for one a row. "
        f"Or reach the whole buffer, as in `x.map(lambda data: {data})`."
    )


# How many rows are summed one after another. A quarter of it was slower where there are many columns, on a CPU.
_BLOCK = 128


def _steps(offsets: Int[Array, " g_plus_1"], ids: Int[Array, " capacity"]) -> list[tuple[Array, int]]:
    """From rows to groups by way of blocks: where each entry goes in each step, and how many there are after it.

    A piece is what a group has of a block of rows. Rows are sorted by group, so `row // block + group` rises from piece
    to piece, and the pieces of each group lie side by side again, from `offset // block + group` on. With blocks of 2:

        rows      a a a | b b | ? ?        offsets  0 3 5      the tail is one more group
        block     0 0 1   1 2   2 3
        group     0 0 0   1 1   2 2
        piece     0 0 1   2 3   4 5        offsets  0 2 4

    As many steps as leave a group at most `_BLOCK` pieces; the last step goes to the `g + 1` groups, tail included.
    """
    g, steps = offsets.shape[0] - 1, []
    group = jnp.arange(g + 1, dtype=jnp.int32)
    entries = ids.shape[0]
    most = entries if isinstance(entries, int) else np.iinfo(np.int32).max  # symbolic, under `jax.export`
    while most > _BLOCK:
        pieces = -(-entries // _BLOCK) + g
        steps.append((jnp.arange(entries, dtype=jnp.int32) // _BLOCK + ids, pieces))
        offsets, entries, most = offsets // _BLOCK + group, pieces, -(-most // _BLOCK) + 1
        ids = schedule.group_ids(offsets, entries)
    return [*steps, (ids, g + 1)]


def _sum_groups(x: "GroupedTensor", data: Shaped[Array, "rows *last"]) -> Shaped[Array, "g *last"]:
    """The sum of each group's rows. The tail's go nowhere."""
    for index, count in _steps(x.offsets, x.group_ids):
        data = jax.ops.segment_sum(data, index, count, indices_are_sorted=True, mode="promise_in_bounds")
    return data[:-1]


def _max_groups(x: "GroupedTensor", data: Shaped[Array, "rows *last"]) -> Shaped[Array, "g *last"]:
    """The largest of each group's rows."""
    return jax.ops.segment_max(data, x.group_ids, x.num_groups, indices_are_sorted=True)


@jax.custom_jvp
def _take(values: Array, offsets: Int[Array, " g_plus_1"], ids: Int[Array, " capacity"]) -> Array:
    """`values[ids]`: those of each row's group, `g + 1` of them with the tail's.

    JAX's own transpose adds row after row in the values' dtype. This one's is a sum in blocks, in float32.
    """
    return values.at[ids].get(mode="promise_in_bounds", indices_are_sorted=True)


@_take.defjvp
def _(primals: tuple[Array, Array, Array], tangents: tuple[Any, Any, Any]) -> tuple[Array, Any]:
    values, offsets, ids = primals
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        out = _take(values, offsets, ids)
        return out, np.zeros(out.shape, jax.dtypes.float0)
    tangent = tangents[0].astype(_wide(values.dtype))
    for index, _ in reversed(_steps(offsets, ids)):
        tangent = tangent.at[index].get(mode="promise_in_bounds", indices_are_sorted=True)
    return _take(values, offsets, ids), tangent.astype(values.dtype)


def _wide(dtype: Any) -> Any:
    """What floats of this dtype are summed in: float32, or their own."""
    return accumulator_dtype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(dtype)


def broadcast_wide(value: Array, dtype: Any, shape: tuple[int, ...]) -> Array:
    """`value` in `dtype`, broadcast to `shape` such that its cotangent is summed in float32."""
    wide = _wide(dtype)
    return jnp.broadcast_to(value.astype(wide), shape).astype(dtype)
