"""What can be done to a `GroupedTensor` element by element, row by row and group by group.

Nothing here lets the tail in or out: functions see ones where there is no element, results have zeros there, and both
are chosen by `select`, so that neither a value nor a gradient of the tail ever reaches anything.
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
from jaxtyping import Shaped

from ragged._mesh import refuse_explicit
from ragged.kernels.xla import accumulator_dtype

if TYPE_CHECKING:
    from ragged._tensor import GroupedTensor


class per_group(eqx.Module):
    """Wraps one value a group, to combine with a tensor: `x * per_group(v)`.

    `value`: `(g,)`, or for ragged rows also `(g, last)`, one row a group (for ragged columns `(g, first)`, one column a
    group; for a uniform tensor anything that broadcasts after the group axis).
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
        raise TypeError(
            f"`numpy.asarray(GroupedTensor)`: an array would drop its groups.\nGot {self!r}.\n"
            "Take the buffer as `x.data`, the groups as `x.to_list()` or `x.to_padded(max_len)`."
        )

    def map(self, fn: Callable[[Array], Array], *, zero_tail: bool = True) -> "GroupedTensor":
        """Applies an elementwise or rowwise function to the buffer.

        `fn` is called once, with the whole buffer (ones where it holds no element). It may change the dtype, and along
        a dim that isn't ragged the extent: `x.map(lambda rows: rows @ w)`. It must treat rows (columns, if those are
        packed) apart from each other, and be finite, with its derivative, on a row of ones.

        **Arguments:** `zero_tail`: False leaves what `fn` makes of the ones in the tail, and saves a pass.

        **Raises:** `ValueError` if the result's rank or its extent along a ragged axis is another.
        """
        refuse_explicit("GroupedTensor.map", x=self)
        x = _tensor(self)
        out = jnp.asarray(fn(self._filled(1)))
        kept = [axis for axis, is_ragged in ((-2, x.ragged[0]), (-1, x.ragged[1])) if is_ragged] or [-3]
        if out.ndim != x.ndim or any(out.shape[axis] != x.shape[axis] for axis in kept):
            raise ValueError(
                f"`GroupedTensor.map`: `fn` must keep the rank and the extent of axes {kept}.\n"
                f"Got {x.shape} -> {out.shape} for {x!r}.\nOnly dims that aren't ragged may change."
            )
        out = x._replace_data(out)
        return out._replace_data(out._filled(0)) if zero_tail else out

    def _filled(self, value: Any) -> Array:
        """The buffer, with `value` where it holds no element."""
        x = _tensor(self)
        x.require_plain()
        data = jnp.asarray(x.data)
        return data if x.packed_axis is None else jnp.where(x.mask, data, jnp.asarray(value, data.dtype))

    def _combine(self, other: Any, fn: Callable[[Any, Any], Array], symbol: str) -> Any:
        refuse_explicit(f"GroupedTensor {symbol}", x=self, other=other)
        x = _tensor(self)
        if isinstance(other, per_group | per_row):
            other = _spread(x, other)
        elif isinstance(other, Arithmetic):
            other = _same_structure(x, _tensor(other), symbol)
        elif not isinstance(other, int | float | complex | np.number | np.ndarray | Array):
            return NotImplemented
        elif jnp.ndim(other):
            raise TypeError(
                f"`GroupedTensor {symbol} array`: a plain array has no groups to match.\n"
                f"Got {x!r} and an array of shape {jnp.shape(other)}.\n"
                "Wrap it: `ragged.per_group(v)` for one value a group, `ragged.per_row(v)` for one a row. "
                "Or reach the whole buffer, as in `x.map(lambda data: data * v)`."
            )
        return x.map(lambda data: fn(data, other))

    def __add__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.add, "+")

    def __radd__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, lambda a, b: b + a, "+")

    def __sub__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.sub, "-")

    def __rsub__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, lambda a, b: b - a, "-")

    def __mul__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.mul, "*")

    def __rmul__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, lambda a, b: b * a, "*")

    def __truediv__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, operator.truediv, "/")

    def __rtruediv__(self, other: Any) -> "GroupedTensor":
        return self._combine(other, lambda a, b: b / a, "/")

    def __neg__(self) -> "GroupedTensor":
        return self.map(operator.neg)

    def sum(self, axis: int | None = None, *, empty: Any = 0) -> Shaped[Array, "..."]:
        """Sum of each group.

        **Arguments:**

        - `axis`: None for all of a group's elements, -> `(g,)`. The packed axis (-2 for ragged rows, -1 for ragged
          columns) -> one row or column a group, `(g, last)` or `(g, first)`. The other axis -> one value a row (or
          column) of the buffer, `(rows,)`, with `empty` in the tail. Uniform tensors: as `jnp.sum` within each group.
        - `empty`: the value where there is nothing to reduce.

        Along the packed axis it adds row to row, in float32: the error grows with a group's rows.
        """
        refuse_explicit("GroupedTensor.sum", x=self)
        return self._reduce(axis, jax.ops.segment_sum, jnp.sum, 0, empty)

    def mean(self, axis: int | None = None, *, empty: Any = 0) -> Shaped[Array, "..."]:
        """Mean of each group. Arguments as for `sum`."""
        refuse_explicit("GroupedTensor.mean", x=self)
        x = _tensor(self)
        x.require_plain()
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
        wide = accumulator_dtype(dtype)
        count = x._replace_data(jnp.ones(x.shape, jnp.int32)).sum(axis).astype(wide)
        total = x.astype(wide).sum(axis)
        return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.asarray(empty, wide)).astype(dtype)

    def max(self, axis: int | None = None, *, empty: Any = None) -> Shaped[Array, "..."]:
        """Largest element of each group. Arguments as for `sum`; `empty` is the lowest value of the dtype by
        default."""
        refuse_explicit("GroupedTensor.max", x=self)
        dtype = _tensor(self).dtype
        if jnp.issubdtype(dtype, jnp.bool_):
            lowest = False
        elif jnp.issubdtype(dtype, jnp.integer):
            lowest = jnp.iinfo(dtype).min
        else:  # float8_e4m3fn has no infinity
            lowest = -jnp.inf if np.isinf(np.asarray(np.inf).astype(dtype)) else float(jnp.finfo(dtype).min)
        return self._reduce(axis, jax.ops.segment_max, jnp.max, lowest, lowest if empty is None else empty)

    def _reduce(self, axis: int | None, segment_fn: Any, dense_fn: Any, neutral: Any, empty: Any) -> Array:
        x = _tensor(self)
        x.require_plain()
        if axis not in (None, -1, -2):
            raise ValueError(
                "`GroupedTensor` reductions: `axis` must be None, -2 (the groups' first dim) or -1 (the last). "
                f"Got {axis!r}."
            )
        if x.packed_axis is None:
            axes = (-2, -1) if axis is None else (axis,)
            out = dense_fn(x.data, axis=axes, initial=neutral)
            return out if all(x.shape[a] for a in axes) else jnp.full_like(out, empty)
        if x.packed_axis == -1:
            swapped = None if axis is None else -3 - axis
            return x.mT._reduce(swapped, segment_fn, dense_fn, neutral, empty)
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
            ids = x.group_ids  # in the tail `g`, which no segment has
            data = segment_fn(data, ids, num_segments=x.num_groups, indices_are_sorted=True)
            some = jax.ops.segment_max(some.astype(jnp.int32), ids, x.num_groups, indices_are_sorted=True) > 0
        return jnp.where(some, data, empty).astype(dtype)

    def softmax(self) -> "GroupedTensor":
        """Softmax along the last dim of each group: over a row's real columns if the last dim is ragged.

        A row without columns, and the tail, are zero.
        """
        refuse_explicit("GroupedTensor.softmax", x=self)
        x = _tensor(self)
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
    value, name = jnp.asarray(wrapped.value), type(wrapped).__name__
    axis = x.packed_axis
    if isinstance(wrapped, per_row):
        want = x.shape[:-1]
    else:
        columns = () if axis is None or value.ndim == 1 else (x.shape[-3 - axis],)
        want = (x.num_groups, *(value.shape[1:3] if axis is None else columns))
    if value.shape != want:
        raise ValueError(
            f"`ragged.{name}(v)`: `v` must have shape {want} here.\nGot v of shape {value.shape} for {x!r}.\n"
            + ("One value a row of the buffer." if name == "per_row" else "One value a group, or one row a group.")
        )
    if isinstance(wrapped, per_row):
        return value[..., None]
    if axis is None:
        return value.reshape(x.num_groups, *(1,) * (3 - value.ndim), *value.shape[1:])
    value = value.at[x.group_ids].get(mode="fill", fill_value=1)  # (capacity,) or [capacity, other]
    value = value[:, None] if value.ndim == 1 else value
    return value if axis == -2 else value.mT


def _same_structure(x: "GroupedTensor", other: "GroupedTensor", symbol: str) -> Array:
    """The buffer of `other`, with ones in its tail."""
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
        raise ValueError(
            f"`GroupedTensor {symbol} GroupedTensor`: the two are ragged in different ways.\nGot {x!r} and {other!r}.\n"
            "Both need the same kind, shape and dims."
        )
    return other._filled(1)
