"""Elementwise operations, reductions and softmax of a `GroupedTensor`.

Functions see ones in the tail, and results have zeros there. `filled` inserts both, and gives the tail a gradient of
zero. So the tail affects no result and no gradient.

Values and cotangents are summed in float32 and rounded once. Along the packed axis, blocks of rows are summed first,
then their sums (`_steps`), so that the error doesn't grow with the size of a group.
"""

import math
import operator
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Int, Shaped

from ragged.core.errors import (
    Site,
    broadcasts,
    check_fill,
    check_flag,
    describe,
    is_arraylike,
    is_concrete,
    is_count,
    wrapped_array,
)
from ragged.core.formats import AnyArray, accumulator_dtype, array_field
from ragged.core.mesh import over_explicit_axes
from ragged.core.offsets import IN_BOUNDS, as_int32, group_ids, take
from ragged.tensor.base import GroupedBase, check_has_groups, check_not_quantized, filled, with_fields


class _Wrapper(eqx.Module):
    """Values to combine with a tensor. The tensor implements the operators, including `==` and `!=`."""

    def __eq__(self, other: object) -> Any:
        return NotImplemented if isinstance(other, Operators) else eqx.tree_equal(self, other)

    __hash__ = eqx.Module.__hash__


Operated = TypeVar("Operated", bound="Operators")
Tensor = TypeVar("Tensor", bound="Arithmetic")  # `typing.Self` works with beartype only in decorated classes.


class per_group(_Wrapper):
    """Wraps one value per group, to combine with a tensor: `x * per_group(v)`.

    `value`: `(g,)`, one value for all elements of a group. For ragged rows also `(g, *more, last)`, one row per group;
    for ragged columns `(g, first)`, one column per group; for a uniform tensor, any shape `(g, ...)` whose axes after
    the first one broadcast to a group's.

    One row that all groups share, `(last,)`, is `per_column(v)`.
    """

    value: Array = eqx.field(converter=array_field)


class per_row(_Wrapper):
    """Wraps one value per row of the buffer, to combine with a tensor: `x * per_row(v)`.

    `value`: `(rows,)`; for a uniform tensor `(g, first)`. It may have further dims, in the order of the buffer's, each
    equal to the buffer's or 1: for `[rows, heads, head_dim]`, `(rows, heads)` is one value per head. Values in the tail
    affect no result.
    """

    value: Array = eqx.field(converter=array_field)


class per_column(_Wrapper):
    """Wraps one value per column of the buffer, to combine with a tensor: `x + per_column(bias)`.

    `value`: `(last,)`, for ragged columns `(cols,)`. Its values in the tail affect no result.

    `x + bias` is the same. It raises if the last dim is ragged or `last` equals `g`: then `bias` could be one value per
    group.
    """

    value: Array = eqx.field(converter=array_field)


Wrapped = per_group | per_row | per_column
Side = int | Int[AnyArray, ""] | None
Window = Side | tuple[Side, Side]
Sink = float | AnyArray | None

# Numbers and plain arrays. An array without dims is a number; a `(last,)` array is combined with every row.
SCALARS = int | float | complex | np.generic | np.ndarray | Array


def _operator(
    fn: Callable[[Any, Any], Any], symbol: str, reflected: bool = False
) -> Callable[[Operated, Any], Operated]:

    def method(self: Operated, other: Any) -> Operated:
        return self._combine(other, fn, symbol, reflected=reflected)

    return method


class Operators(eqx.Module):
    """Operators of `GroupedTensor` and `Gathered`, through `_combine` and `map`. NumPy's and JAX's functions raise."""

    data: eqx.AbstractVar[Any]

    __add__ = _operator(operator.add, "+")
    __radd__ = _operator(operator.add, "+", reflected=True)
    __sub__ = _operator(operator.sub, "-")
    __rsub__ = _operator(operator.sub, "-", reflected=True)
    __mul__ = _operator(operator.mul, "*")
    __rmul__ = _operator(operator.mul, "*", reflected=True)
    __truediv__ = _operator(operator.truediv, "/")
    __rtruediv__ = _operator(operator.truediv, "/", reflected=True)
    __pow__ = _operator(operator.pow, "**")
    __rpow__ = _operator(operator.pow, "**", reflected=True)
    __and__ = _operator(operator.and_, "&")
    __rand__ = _operator(operator.and_, "&", reflected=True)
    __or__ = _operator(operator.or_, "|")
    __ror__ = _operator(operator.or_, "|", reflected=True)
    __xor__ = _operator(operator.xor, "^")
    __rxor__ = _operator(operator.xor, "^", reflected=True)
    __lt__ = _operator(operator.lt, "<")
    __le__ = _operator(operator.le, "<=")
    __gt__ = _operator(operator.gt, ">")
    __ge__ = _operator(operator.ge, ">=")

    def __eq__(self, other: object) -> Any:
        return self._combine(other, operator.eq, "==") if _hold_arrays(self, other) else eqx.tree_equal(self, other)

    def __ne__(self, other: object) -> Any:
        return self._combine(other, operator.ne, "!=") if _hold_arrays(self, other) else not eqx.tree_equal(self, other)

    def __hash__(self) -> int:
        return eqx.Module.__hash__(self)  # It raises if a field is an array.

    def __neg__(self: Operated) -> Operated:
        return self.map(operator.neg)

    def __abs__(self: Operated) -> Operated:
        return self.map(abs)

    def __invert__(self: Operated) -> Operated:
        return self.map(operator.invert)

    def __matmul__(self, other: Any) -> Any:
        return products["@"](self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return products["@"](other, self)

    # NumPy and JAX must not convert the tensor to an array, which would drop its groups. With `__array_ufunc__ = None`,
    # operators of NumPy arrays return `NotImplemented`, so the reflected operators above run.
    __array_ufunc__ = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._refuse()

    def __array_function__(self, *_: Any) -> Any:
        self._refuse()

    def __jax_array__(self) -> Any:
        return _NoArray(self)

    @abstractmethod
    def _combine(self, other: Any, fn: Callable[[Any, Any], Any], symbol: str, reflected: bool = False) -> Any:
        """`fn(self, other)`, or `fn(other, self)` if `reflected`."""

    @abstractmethod
    def map(self, fn: Callable[..., Any], *others: Any) -> Any:
        """`fn` applied to the rows, or to the rows of several tensors."""

    @abstractmethod
    def _refuse(self) -> Any:
        """Raises the error of `jnp.f(self)`."""


class Arithmetic(GroupedBase, Operators):
    """The operators, `map`, reductions and softmax of `GroupedTensor`.

    If a tensor has specs or shapes in place of arrays, `==` and `hash` work as in any Equinox module.
    """

    def __bool__(self) -> bool:
        of = "x" if self.dtype == bool else "(x != 0)"
        hint = f"`{of}.sum()` counts the true elements of each group. `{of}.data.any()` tests whether any element is "
        hint += f"true, `({of}.data | ~x.mask).all()` whether all are."
        Site("bool(GroupedTensor)", {"x": self}).fail(ValueError, "a tensor has many truth values.", hint)

    def __contains__(self, value: Any) -> bool:
        hint = "`(x == v).data.any()` tests whether any element equals `v`; the tail never counts."
        problem = "it is ambiguous: `v` may be an element, a row or a group."
        Site("v in GroupedTensor", {"v": value, "x": self}).fail(ValueError, problem, hint)

    def _refuse(self) -> NoReturn:
        hint = "" if any(self.ragged) else "`x.data` is an ordinary array, as this tensor is uniform. "
        hint += "`x.map(jax.nn.silu)` applies an elementwise or rowwise function, `x.map(jnp.zeros_like)` gives zeros; "
        hint += "`x.sum()`, `mean`, `var`, `min`, `max` and `logsumexp` reduce each group, `x @ w` multiplies. "
        hint += _softmax_hint(self)
        hint += "`ragged.concat([x, x])` joins tensors. The buffer is `x.data`, the groups are `x.to_list()`"
        hint += " or `x.to_padded(max_len)`." if any(self.ragged) else "."
        problem = "functions of NumPy and JAX take arrays, which have no groups."
        Site("jnp.f(GroupedTensor)", {"x": self}).fail(TypeError, problem, hint)

    def map(self: Tensor, fn: Callable[..., Any], *others: Any, zero_tail: bool = True) -> Tensor:
        """Applies an elementwise or rowwise function to the buffer, or to several buffers: `x.map(jnp.maximum, y)`.

        `fn` is called once, with the whole buffer (ones outside of the groups). It must treat each row (each column, if
        columns are packed; each element, if both dims are ragged) independently; on a row of ones, `fn` and its
        derivative must be finite. It may change the dtype, and dims that aren't ragged: `x.map(lambda rows: rows @ w)`.
        For ragged rows and uniform tensors, it may also split or merge dims:
        `x.map(lambda rows: rows.reshape(-1, heads, head_dim))`. For a cotangent, whose groups are unknown, `fn` must be
        elementwise.

        `fn` may close over arrays: `x.map(lambda rows: rows + bias)`. JAX sums their gradients over the rows in the
        dtype of the operation. For accurate gradients in bfloat16, write
        `(rows.astype(jnp.float32) + bias).astype(rows.dtype)`.

        **Arguments:**

        - `others`: further arguments of `fn`: tensors of the same structure, numbers, `per_group(v)`, `per_row(v)`,
          `per_column(v)`. `fn` gets numbers, or arrays that broadcast to the buffer.
        - `zero_tail`: False leaves in the tail what `fn` returns for ones, which saves a pass over the buffer.

        **Raises:** `TypeError` if a plain array is passed (let `fn` close over it), or if `fn` returns several arrays.
        `ValueError` if `fn` changes the extent of a ragged axis or returns a rank that the tensor can't have, or if
        another tensor has a different structure.
        """
        for other in others:
            if not isinstance(other, Arithmetic | Wrapped | SCALARS):
                problem = f"`fn` can't be called with a {type(other).__name__}."
                hint = "Pass tensors, numbers or wrapped arrays, and let `fn` close over other arrays."
                if isinstance(other, Operators):
                    hint = "Copy the rows first: `x.map(fn, other.dispatch())`."
                Site("GroupedTensor.map", {"x": self, "other": other}).fail(TypeError, problem, hint)
        x = _template(self, *others)
        out = fn(*(_aligned(x, each, "map") for each in (self, *others)))
        if isinstance(out, tuple | list):
            hint = "Call `map` once for each array."
            Site("GroupedTensor.map", {"x": self}).fail(TypeError, f"`fn` returns a {type(out).__name__}.", hint)
        return x._mapped(out, zero_tail)

    def _mapped(self: Tensor, out: Any, zero_tail: bool = True) -> Tensor:
        """The tensor with the buffer `out`, the result of a function of its own buffer. Raises if the shape doesn't
        fit."""
        x, out = self, jnp.asarray(out)
        columns = x.ragged[1] or x.is_cotangent
        fixed = [-1] if x.ragged == (False, True) else [0, -1] if columns else [0]
        fixed = list(range(x.ndim)) if x.is_cotangent else fixed
        ranks_fit = out.ndim == x.ndim if columns else out.ndim >= (2 if x.ragged[0] else 3)
        if not ranks_fit or any(out.shape[axis] != x.shape[axis] for axis in fixed):
            rank = "the rank" if columns else f"{2 if x.ragged[0] else 3} dims or more"
            problem = f"`fn` must keep {rank} and the extent of axes {fixed}."
            site = Site("GroupedTensor.map", {"x": x, "fn(x.data)": out})
            site.fail(ValueError, problem, "Only dims that aren't ragged may change.")
        out = x.with_data(out)
        return out.with_data(filled(out, 0)) if zero_tail else out

    @over_explicit_axes
    def _combine(self, other: Any, fn: Callable[[Any, Any], Array], symbol: str, reflected: bool = False) -> Any:
        check_not_quantized(self)
        if not isinstance(other, Arithmetic | Wrapped | SCALARS):
            if wrapped_array("v", other):
                site = Site(f"GroupedTensor {symbol} array", {"x": self, "v": other})
                site.fail(TypeError, "`v` is not an array.", "Pass an array.")
            return NotImplemented
        x = _template(self, other)
        own_values, values = _aligned(x, self, symbol), _aligned(x, other, symbol, reflected)
        return x._mapped(fn(values, own_values) if reflected else fn(own_values, values))

    def sum(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = 0) -> Shaped[Array, "..."]:
        """Sum of each group.

        **Arguments:**

        - `axis`: negative, counted from the last axis; or None for all elements of a group.
        - `keepdims`: return a tensor whose reduced dims are 1 and which combines with this one:
          `x / x.sum(-2, keepdims=True)`. For None and the packed axis it is uniform, such as `[g, 1, last]`. For
          another axis it is packed like this tensor: `[rows, 1]` or `[1, cols]`, with zeros in the tail.
        - `empty`: the result where there are no elements. The default is 0 for `sum`, `mean` and `var`, the lowest
          value of the dtype for `logsumexp` and `max`, and the highest for `min` (-inf and inf, if the dtype has them).
          A number that the result's dtype holds, or an array of them that broadcasts to the result without `keepdims`.

        **Returns:** for a uniform tensor, `jnp.sum` of each group. For a ragged one:

        - `axis=None`, all elements of a group: `(g,)`.
        - The packed axis (-2 for ragged rows, -3 with one more dim, ...; -1 for ragged columns): one row or column per
          group, `(g, *more, last)` or `(g, first)`.
        - Another axis: one value per row (or column) of the buffer, `(rows,)` (or `(cols,)`), with `empty` in the tail.
          With more dims, the result has the remaining ones too.

        Floats of fewer than 32 bits are summed in float32 and rounded. Integers of fewer than 32 bits give int32; uint8
        and uint16 give uint32. (With `jax_enable_x64`, these have 64 bits, as in `jnp.sum`.)

        In all reductions, NaN and infinities propagate as in NumPy, but never to another group (or row, or column) or
        its gradient.

        **Raises:** `ValueError` for another `axis`, or an `empty` of another shape or that the dtype can't hold (a
        traced one becomes another number); `TypeError` for other types of arguments.
        """
        x = self
        if x.dtype in (jnp.int4, jnp.uint4, jnp.int2, jnp.uint2):  # `jnp.sum` doesn't support these dtypes.
            x = x.astype(jnp.int32)
        return x._with_kept_dims(x._reduce(axis, _sum_groups, jnp.sum, 0, empty), axis, keepdims)

    @over_explicit_axes
    def mean(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = 0) -> Shaped[Array, "..."]:
        """Mean of each group. Arguments as for `sum`."""
        self._check_axis(axis)
        dtype = _mean_dtype(self.dtype)
        accumulator = accumulator_dtype(dtype)
        count, total = _count(self, axis, accumulator), self.astype(accumulator).sum(axis)
        self._check_empty(empty, dtype, total.shape)
        mean = jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.asarray(empty, accumulator)).astype(dtype)
        return self._with_kept_dims(mean, axis, keepdims)

    def var(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = 0) -> Shaped[Array, "..."]:
        """Variance of each group, `mean((x - mean(x))²)`, computed in two passes in float32. Arguments as for `sum`."""
        self._check_axis(axis)
        dtype = _mean_dtype(self.dtype)
        self._check_empty(empty, jnp.finfo(dtype).dtype, None)
        x = self.astype(accumulator_dtype(dtype))
        centred = x - x.mean(axis, keepdims=True)
        squares = centred.map(lambda d: jnp.real(d * jnp.conj(d)))
        return squares.mean(axis, keepdims=keepdims, empty=empty).astype(jnp.finfo(dtype).dtype)

    def max(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = None) -> Shaped[Array, "..."]:
        """Largest element of each group. Arguments as for `sum`; by default, `empty` is the lowest value of the
        dtype."""
        return self._extreme("max", axis, keepdims, empty)

    def min(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = None) -> Shaped[Array, "..."]:
        """Smallest element of each group. Arguments as for `sum`; by default, `empty` is the highest value of the
        dtype."""
        return self._extreme("min", axis, keepdims, empty)

    @over_explicit_axes
    def logsumexp(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = None) -> Shaped[Array, "..."]:
        """`log(sum(exp(x)))` of each group, without overflow. Arguments as for `sum`; by default, `empty` is -inf.

        Computed in float32 and rounded once. If all elements are -inf, the result is -inf, and its gradient is zero.

        !!! example
            ```python
            import jax.numpy as jnp
            from ragged import GroupedTensor
            x = GroupedTensor(jnp.array([[0.0], [0.0], [1000.0]]), first_dims=jnp.array([2, 1, 0], jnp.int32))
            assert jnp.isclose(x.logsumexp()[0], jnp.log(2.0))
            assert x.logsumexp()[1:].tolist() == [1000.0, -jnp.inf]
            ```
        """
        check_not_quantized(self)
        check_has_groups(self)
        dtype = _mean_dtype(self.dtype)
        x = self.astype(accumulator_dtype(dtype))
        largest = x.with_data(jax.lax.stop_gradient(x.data)).max(axis)
        largest = jnp.where(jnp.isfinite(largest), largest, 0)
        shift = x._with_kept_dims(largest, axis, keepdims=True)
        total = x.map(lambda each, shift: jnp.exp(each - shift), shift, zero_tail=False).sum(axis)
        is_zero = total == 0  # no elements, or all are -inf
        lowest = _limits(dtype)[0]  # -inf, if the dtype has it
        out = jnp.where(is_zero, lowest, jnp.log(jnp.where(is_zero, 1, total)) + largest).astype(dtype)
        return self._with_kept_dims(self._or_empty(out, axis, empty), axis, keepdims)

    @over_explicit_axes
    def _extreme(self, name: str, axis: int | None, keepdims: bool, empty: Any) -> Any:
        out = (_extreme if jnp.issubdtype(self.dtype, jnp.inexact) else _extreme_value)(self, name, axis)
        return self._with_kept_dims(self._or_empty(out, axis, empty), axis, keepdims)

    def _or_empty(self, out: Array, axis: int | None, empty: Any) -> Array:
        """`out`, a reduction along `axis`, with `empty` where there are no elements; unchanged if `empty` is None."""
        if empty is None:
            return out
        self._check_empty(empty, out.dtype, out.shape)
        has_any = self.with_data(jnp.ones(self.shape, bool)).max(axis)
        return jnp.where(has_any, out, jnp.asarray(empty, out.dtype))

    def _with_kept_dims(self, out: Array, axis: int | None, keepdims: bool) -> Any:
        """`out`, a reduction along `axis`; with `keepdims`, as the tensor that `sum` documents."""
        check_flag(Site("GroupedTensor", {"x": self}), "keepdims", keepdims)
        if not keepdims:
            return out
        rank = self.ndim - (self.packed_axis is None)  # of a group
        out = jnp.expand_dims(out, tuple(range(-rank, 0)) if axis is None else axis)
        if self.packed_axis is None or axis in (None, self.packed_axis):
            return with_fields(self, data=out, first_dims=None, last_dims=None, transposed=False)
        reduced = {"first_dims": None} if self.packed_axis == -1 else {"last_dims": None} if axis == -1 else {}
        rows = with_fields(self, data=out, **reduced)
        return rows.with_data(filled(rows, 0))

    def _check_axis(self, axis: Any) -> None:
        """Raises unless the tensor can be reduced along this axis."""
        check_not_quantized(self)
        check_has_groups(self)
        if axis is not None and not (is_count(axis, -self.ndim) and axis in self._group_axes):
            hint = f"It must be None, {_names_of(self._group_axes)}."
            Site("GroupedTensor", {"x": self}).fail(ValueError, f"`axis` of a reduction is {describe(axis)}.", hint)

    def _check_empty(self, empty: Any, dtype: Any, shape: tuple[int, ...] | None) -> None:
        """Raises unless `empty` can fill a reduction of this dtype and shape (any shape, for None)."""
        check_fill(Site("GroupedTensor", {"x": self}), "empty", empty, dtype, shape)

    @over_explicit_axes
    def _reduce(self, axis: int | None, groups_fn: Any, dense_fn: Any, neutral: Any, empty: Any) -> Array:
        """The reduction along `axis`, as `sum` documents it, without `keepdims`.

        `groups_fn(x, rows)` reduces the rows of each group. `dense_fn` reduces axes of an array, like `jnp.sum`.
        `neutral` replaces masked elements; `empty` is the result where there is no element.
        """
        self._check_axis(axis)
        group_axes = self._group_axes
        if self.packed_axis == -1:
            other = None if axis is None else -3 - axis  # -1 for -2, and -2 for -1
            return self.mT._reduce(other, groups_fn, dense_fn, neutral, empty)
        # The dtype of `jnp.sum`, which widens small integers. Sums of small floats are accumulated in float32, then
        # rounded.
        dtype = jax.eval_shape(lambda d: dense_fn(d, axis=-1, initial=neutral), jnp.asarray(self.data)).dtype
        by_group = self.packed_axis is not None and axis in (None, self.packed_axis)
        if by_group and not self.num_groups:  # The gradient can't gather from an empty array.
            return jnp.zeros((0,) if axis is None else (0, *self.shape[1:]), dtype)
        accumulator = accumulator_dtype(dtype)
        neutral = jnp.asarray(neutral, accumulator)
        data = jnp.asarray(self.data).astype(accumulator)
        if self.packed_axis is None:
            axes = tuple(group_axes) if axis is None else (axis,)
            out = dense_fn(data, axis=axes, initial=neutral)
            self._check_empty(empty, dtype, out.shape)
            return (out if all(self.shape[a] for a in axes) else jnp.full_like(out, empty)).astype(dtype)
        data = jnp.where(self.mask, data, neutral)  # [rows, *more, last]
        has_any = self.mask  # where there is an element to reduce
        if axis != self.packed_axis:
            axes = tuple(group_axes[1:]) if axis is None else axis
            data, has_any = dense_fn(data, axis=axes, initial=neutral), jnp.any(has_any, axis=axes)  # (rows,)
        if by_group:
            data, columns = groups_fn(self, data), self.shape[-1]
            widths = columns if self.last_dims is None else jnp.minimum(self.last_dims, columns).astype(jnp.int32)
            widths = jnp.where(jnp.diff(self.offsets) > 0, widths, 0)  # (g,)
            has_any = jnp.arange(columns, dtype=jnp.int32)[None] < widths[:, None]  # [g, last]
            has_any = has_any.reshape(self.num_groups, *[1] * (self.ndim - 2), columns)
            if axis is None:
                has_any = (widths > 0) & bool(math.prod(self.shape[1:-1]))
        self._check_empty(empty, dtype, data.shape)
        return jnp.where(has_any, data, jnp.asarray(empty, accumulator)).astype(dtype)

    @over_explicit_axes
    def softmax(
        self: Tensor, axis: int = -1, *, causal: bool = False, window: Window = None, sink: Sink = None
    ) -> Tensor:
        """Softmax of each group along one of its dims; elements outside of the groups don't take part.

        The tail is zero, and so are rows without visible elements. As in `jax.nn.softmax`, a row with a visible NaN or
        inf, or whose visible elements are all -inf, is NaN in its visible elements, and so is its gradient; other rows
        aren't affected. (A row is what one softmax runs over: with `axis=-2`, a column of a group.) Computed in float32
        and rounded once; of integers, the result is float32.

        **Arguments:**

        - `axis`: counted from the last axis. -1: over the columns of each row. -2 (-3 with one more dim, ...): over
          the rows of each column. The number of the last axis also means -1, as in JAX.
        - `causal` and `window` limit the visible columns of a row, for scores of queries (rows) and keys (columns). In
          a group with `n` rows and `m` columns, the position of row `i` is column `i + m - n`, as in flash-attention:
          the last row is at the last column.
            - `causal`: no column after the row's position is visible.
            - `window`: `(left, right)`: at most this many columns before and after the row's position are visible; None
              for no limit. A single value sets both. Values are ints or `()` integer arrays. A traced value below 0
              counts as 0.
        - `sink`: one more logit for each softmax. Its weight is not part of the result, so the weights add up to less
          than 1. A number, or an array that broadcasts to the shape of `x.max(axis)`: for attention scores
          `[rows, heads, max_last]`, `(heads,)`. A row whose elements are all -inf is then zero.

        **Raises:** `ValueError` for another `axis` or `window`, or a `sink` of another shape; `TypeError` if `causal`
        isn't a bool, or is traced.

        !!! example
            ```python
            import jax.numpy as jnp
            from ragged import GroupedTensor
            sizes = jnp.array([2, 1], jnp.int32)
            q = k = GroupedTensor(jnp.ones((4, 8)), first_dims=sizes)
            p = (q @ k.mT).softmax(causal=True)
            assert p[0].tolist() == [[1.0, 0.0], [0.5, 0.5]]
            assert q.softmax(axis=-2)[0].tolist() == [[0.5] * 8] * 2
            ```
        """
        check_not_quantized(self)
        check_has_groups(self)
        axes = self._group_axes
        if is_count(axis) and axis == self.ndim - 1:
            axis = -1
        if not (is_count(axis, -self.ndim) and axis in axes):
            hint = f"It must be {_names_of(axes)}."
            if isinstance(axis, bool):
                hint = f"Write `causal={axis}`. {hint}"
            Site("GroupedTensor.softmax(axis)", {"x": self}).fail(ValueError, f"`axis` is {describe(axis)}.", hint)
        left, right = _window(self, causal, window)
        dtype = _mean_dtype(self.dtype)
        if (wide := _sum_dtype(dtype)) != self.dtype:
            return self.astype(wide).softmax(axis, causal=causal, window=window, sink=sink).astype(dtype)
        is_ragged = {axes[0]: self.ragged[0], -1: self.ragged[1]}.get(axis, False)
        if not is_ragged and left is None and right is None and sink is None:
            return self.map(lambda data: jax.nn.softmax(data, axis=axis))
        visible = self.mask
        if left is not None or right is not None:
            ahead = _ahead(self)
            visible &= True if left is None else ahead >= -left
            visible &= True if right is None else ahead <= right
        if axis != self.packed_axis and sink is None:
            # A row without visible elements would be 0 / 0.
            has_any = jnp.any(visible, axis=axis, keepdims=True)
            data = jnp.where(visible, self.data, 0)
            return self.with_data(jnp.where(visible, jax.nn.softmax(data, axis=axis, where=visible | ~has_any), 0))
        return self._softmax_of(visible, axis, sink)

    def _softmax_of(self: Tensor, visible: Array, axis: int, sink: Sink) -> Tensor:
        """Softmax of the `visible` elements along `axis`, by reductions of each group; zeros elsewhere."""
        # Softmax doesn't depend on the maximum that is subtracted, so the maximum needs no derivative.
        lowest = _limits(self.dtype)[0]
        scores = self.with_data(jnp.where(visible, jax.lax.stop_gradient(jnp.asarray(self.data)), lowest))
        largest: Any = scores.max(axis, empty=0, keepdims=True)
        sinks: Any = None
        if sink is not None:
            sinks = self._with_kept_dims(_sinks(self, visible, axis, sink), axis, keepdims=True)
            largest = largest.map(jnp.maximum, sinks.with_data(jax.lax.stop_gradient(sinks.data)))
        # NaN and infinities aren't masked: they make their whole row NaN.
        shifted = self.with_data(jnp.where(visible, self.data, 0)) - largest
        weights = shifted.with_data(jnp.where(visible, jnp.exp(jnp.where(visible, shifted.data, 0)), 0))
        total: Any = weights.sum(axis, empty=1, keepdims=True)
        if sinks is not None:
            total += (sinks - largest).map(jnp.exp)
        out = weights / total.map(lambda each: jnp.where(each == 0, 1, each))
        return out.with_data(jnp.where(visible, out.data, 0))

    @property
    def _group_axes(self) -> range:
        """The axes of a group, from the first (-2 for matrices) to the last (-1)."""
        return range(-self.ndim + (self.packed_axis is None), 0)


products: dict[str, Callable[[Any, Any], Any]] = {}
"""The function that `@` calls: `ragged.matmul`, registered by its module, which is imported later."""


class _NoArray:
    """Returned by `__jax_array__`: raises when a JAX function uses it. Operators of JAX arrays return `NotImplemented`
    for it, so the tensor's reflected operators run."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        self._tensor._refuse()

    def __str__(self) -> str:  # JAX puts this text into its error for an invalid argument; this error replaces it.
        return self._tensor._refuse()


def _softmax_hint(x: Arithmetic) -> str:
    """Hint for `jax.nn.softmax(x)`."""
    if x.is_cotangent or x.is_stack:
        return ""
    columns = "`x.softmax()` is the softmax along each group's last dim, the default of `jax.nn.softmax`"
    return f"{columns}; along a group's rows it is `x.softmax({x._group_axes[0]})`. "


def _names_of(axes: range) -> str:
    between = "".join(f", {each}" for each in axes[1:-1])
    return f"{axes[0]} (the groups' first dim){between} or -1 (the last)"


def _sinks(x: Arithmetic, visible: Array, axis: int, sink: float | AnyArray) -> Array:
    """The sink of each softmax of `x` along `axis`, in the shape of `x.max(axis)`; 0 where nothing is visible."""
    has_any = x.with_data(visible).max(axis)
    site, want = Site("GroupedTensor.softmax", {"x": x, "sink": sink}), has_any.shape
    is_complex = isinstance(sink, complex) or jnp.issubdtype(getattr(sink, "dtype", jnp.float32), jnp.complexfloating)
    if not isinstance(sink, SCALARS) or (is_complex and not jnp.issubdtype(x.dtype, jnp.complexfloating)):
        hint = f"An array must broadcast to {want} here, the shape of `x.max({axis})`."
        site.fail(TypeError, "`sink` must be a number or an array, and real if the tensor is.", hint)
    given = jnp.shape(sink)
    if not broadcasts(given, want):
        hint = "A number is the same for all softmaxes. An array may have fewer dims, or dims of 1."
        site.fail(ValueError, f"`sink` must broadcast to {want} here, the shape of `x.max({axis})`.", hint)
    value = broadcast_accumulated(jnp.asarray(sink).astype(x.dtype), x.dtype, want)
    return jnp.where(has_any, value, 0)


def _hold_arrays(*operands: Any) -> bool:
    return all(is_arraylike(each.data) for each in operands if isinstance(each, Operators))


def _template(self: Arithmetic, *others: Any) -> Any:
    """The operand whose structure the result has: `self`, unless it is a cotangent of another operand, or is stretched
    to another operand's size."""
    template = self
    for other in others:
        if isinstance(other, Arithmetic) and other is not template:
            adds_groups = _is_cotangent(template, other) and not other.is_cotangent
            template = other if adds_groups or _stretched(other, template) is not None else template
    return template


@over_explicit_axes
def _aligned(x: Arithmetic, other: Any, symbol: str, reflected: bool = False) -> Any:
    """`other` as a number, or as an array that broadcasts to the buffer of `x`, with ones outside of the groups."""
    if isinstance(other, Arithmetic):
        if other is x:
            return filled(x, 1)
        check_not_quantized(other)
        stretched = _stretched(x, other)
        return _same_structure(x, other, symbol) if stretched is None else _spread(x, stretched)
    if not isinstance(other, Wrapped):
        if not jnp.ndim(other):
            if isinstance(other, Tracer) and jnp.issubdtype(other.dtype, jnp.inexact):
                # Ones in the tail, because 0 times an infinite derivative would be NaN there.
                dtype = jnp.result_type(x.data, other)
                return filled(with_fields(x, data=broadcast_accumulated(other, dtype, x.shape)), 1)
            return other
        shape = jnp.shape(other)
        if symbol == "map" or x.is_cotangent or x.ragged[1] or shape != x.shape[-1:] or shape == (x.num_groups,):
            site = Site("GroupedTensor.map" if symbol == "map" else f"GroupedTensor {symbol} array", {"x": x})
            hint = _hint(x, shape, symbol, reflected)
            site.also(v=other).fail(TypeError, "a plain array has no groups to match.", hint)
        other = per_column(other)
    return _spread(x, other)


def _stretched(x: Arithmetic, other: Arithmetic) -> Wrapped | None:
    """`other` as wrapped values per group, row or column; None unless its groups have dims of 1 where `x` has more."""
    if any(each.is_cotangent or each.is_stack or not is_arraylike(each.data) for each in (x, other)):
        return None
    axis, data = x.packed_axis, other.data
    rank = x.ndim - (axis is None)  # of a group
    same_shape = (x.kind, x.shape) == (other.kind, other.shape)
    if x.num_groups != other.num_groups or same_shape or other.ndim - (other.packed_axis is None) != rank:
        return None
    if any(data.shape[a] not in (1, x.shape[a]) for a in range(-rank, 0) if a != axis):
        return None
    if other.packed_axis is None:
        if axis is None:
            return per_group(data)
        if data.shape[axis] != 1:
            return None
        value, shape = jnp.squeeze(data, axis), (x.num_groups, *_unpacked_shape(x))
        is_scalar = all(n == 1 for n in value.shape[1:])
        return per_group(value.reshape(-1) if is_scalar else broadcast_accumulated(value, value.dtype, shape))
    if axis is None or (other.packed_axis, other.capacity) != (axis, x.capacity):
        return None
    if other.kind == "ragged both" and x.kind != other.kind:
        return None
    if other.kind != x.kind and data.shape[-2 if axis == -1 else -1] != 1:
        return None
    dims = (x.first_dims, other.first_dims), (x.last_dims, other.last_dims)
    if not all(others is None or _may_be_equal(own, others) for own, others in dims):
        return None
    return per_row(data) if axis != -1 else per_column(data[0])  # one value per row or column of the buffer


def _unpacked_shape(x: Arithmetic) -> tuple[int, ...]:
    """The shape of the buffer without its packed axis; of a uniform tensor, without the group axis."""
    return x.shape[:1] if x.packed_axis == -1 else x.shape[1:]


def _may_be_equal(sizes: Any, others: Any) -> bool:
    """Whether two arrays of sizes are equal; True if one is traced."""
    if sizes is others or isinstance(sizes, Tracer) or isinstance(others, Tracer):
        return True
    return np.array_equal(sizes, others)


def _spread(x: Arithmetic, wrapped: Wrapped) -> Array:
    """Wrapped values as an array that broadcasts to the buffer of `x`, with ones outside of the groups."""
    value = _broadcast(x, wrapped)
    # `filled` excludes all elements outside of the groups from the gradient of the wrapped values.
    return value if x.packed_axis is None else filled(x.with_data(value), 1)


def _broadcast(x: Arithmetic, wrapped: Wrapped) -> Array:
    """Wrapped values as an array that broadcasts to the buffer of `x`. Raises unless they have a valid shape."""
    check_has_groups(x)
    value, name = jnp.asarray(wrapped.value), type(wrapped).__name__
    axis = x.packed_axis
    if isinstance(wrapped, per_row):
        # After the row axes, the value may have more dims, each equal to the dim of `x` or 1.
        num_row_axes = 2 if axis is None else 1
        given = (*x.shape[:num_row_axes], *value.shape[num_row_axes:])
        want = tuple(n if m != 1 else 1 for m, n in zip(given, x.shape, strict=False))
        hint = "It needs one value per row of the buffer."
    elif isinstance(wrapped, per_column):
        want, hint = x.shape[-1:], "It needs one value per column of the buffer."
    else:
        columns = () if value.ndim == 1 else _unpacked_shape(x)
        if axis is None:  # The value may broadcast along the last axes.
            last = x.shape[max(1, x.ndim - value.ndim + 1) :]
            columns = tuple(1 if m == 1 else n for m, n in zip(value.shape[1:], last, strict=False))
        want = (x.num_groups, *columns)
        hint = "It needs one value per group, or one row per group."
    if value.shape != want:
        if value.shape == x.shape[-1:]:
            hint += " One value per column is `ragged.per_column(v)`."
        shapes = f"({want[0]},) or {want}" if isinstance(wrapped, per_group) and len(want) > 1 else str(want)
        Site(f"ragged.{name}(v)", {"v": value, "x": x}).fail(ValueError, f"`v` must have shape {shapes} here.", hint)
    if isinstance(wrapped, per_row):
        value = value.reshape(*want, *(1,) * (x.ndim - len(want)))
    if not isinstance(wrapped, per_group):
        return broadcast_accumulated(value, value.dtype, x.shape)
    if axis is None:
        value = value.reshape(x.num_groups, *(1,) * (x.ndim - value.ndim), *value.shape[1:])
        return broadcast_accumulated(value, value.dtype, x.shape)
    dtype, is_scalar = value.dtype, value.ndim == 1  # one scalar per group, or one row
    value = _cast(value, _sum_dtype(dtype)) if is_scalar else value
    value = jnp.pad(value, [(0, 1), *[(0, 0)] * (value.ndim - 1)], constant_values=1)  # The tail is one more group.
    value = _take(value, x.offsets, x.group_ids)  # (capacity,) or [capacity, *other]
    if is_scalar:
        shape = (x.capacity, *_unpacked_shape(x))
        value = broadcast_accumulated(value.reshape(x.capacity, *(1,) * (len(shape) - 1)), dtype, shape)
    return value.mT if axis == -1 else value


def _is_cotangent(g: Arithmetic, x: Arithmetic) -> bool:
    """Whether `g` can be a cotangent of `x`. With more than two dims, a cotangent whose dims are None looks uniform."""
    return g.is_cotangent or (g.kind == "uniform" and x.ndim > 2 and x.kind not in ("uniform", "cotangent"))


def _same_structure(x: Arithmetic, other: Arithmetic, symbol: str) -> Array:
    """The buffer of `other`, with ones outside of the groups. Raises unless both structures are equal; of a cotangent,
    only the buffer is compared."""
    same_groups = False
    if _is_cotangent(other, x):
        same = (x.shape, x.transposed) == (other.shape, other.transposed)
    else:
        x_kind, other_kind = ((t.kind, t.packed_axis, t.num_groups) for t in (x, other))
        same_groups = x_kind == other_kind and _may_be_equal(x.first_dims, other.first_dims)
        same_groups = same_groups and _may_be_equal(x.last_dims, other.last_dims)
        same = same_groups and x.shape == other.shape
    if not same:
        call = "GroupedTensor.map" if symbol == "map" else f"GroupedTensor {symbol} GroupedTensor"
        problem = "the tensors have different structures."
        if same_groups and x.shape != other.shape:
            problem = f"the tensors have buffers of different shapes, {x.shape} and {other.shape}."
        Site(call, {"x": x, "other": other}).fail(ValueError, problem, "Both need the same kind, shape and dims.")
    if x.is_cotangent:
        return jnp.asarray(other.data)
    return filled(x.with_data(jnp.asarray(other.data)), 1)


def _hint(x: Arithmetic, shape: tuple[int, ...], symbol: str, reflected: bool) -> str:
    """Hint for `x + v` with a plain array `v`: replacements that fit the shape of `v`."""
    data = f"v {symbol} data" if reflected else f"data {symbol} v"
    data = "fn(data, v)" if symbol == "map" else data
    axis = None if x.is_cotangent else x.packed_axis
    of: dict[tuple[int, ...], str] = {}  # keyed by shape: what such an array has for each group
    if not x.is_cotangent:
        of[x.num_groups,] = "value"
    if axis is not None:
        of[x.num_groups, *_unpacked_shape(x)] = "column" if axis == -1 else "row"

    def hints(shape: tuple[int, ...], v: str) -> str:
        found = [f"One {of[shape]} per group is `ragged.per_group({v})`."] if shape in of else []
        # A uniform tensor has the group axis first.
        if shape == x.shape[: len(shape)] and (axis is None) < len(shape) < x.ndim and not x.is_cotangent:
            found.append(f"One value per row is `ragged.per_row({v})`.")
        if shape == x.shape[-1:]:
            found.append(f"One value per column is `ragged.per_column({v})`.")
        elif shape == x.shape:
            found.append(f"One value per element is `x.map(lambda data: {data})`.")
        return " ".join(found)

    without_ones = tuple(n for n in shape if n != 1)  # `bias[:, None]` is meant as `bias`.
    return (
        hints(shape, "v")
        or hints(without_ones, f"v.reshape({', '.join(map(str, without_ones))})")
        or "Wrap it: `ragged.per_group(v)` for one value per group, `ragged.per_row(v)` for one per row, "
        "`ragged.per_column(v)` for one per column. "
        "Or pass a function that closes over it to `x.map`."
    )


# Number of rows that are summed one after another. 32 was slower on a CPU for many columns.
_BLOCK = 128


def _steps(offsets: Int[Array, " g_plus_1"], ids: Int[Array, " capacity"]) -> list[tuple[Array, int]]:
    """Steps of a segmented sum from rows to groups. Each step is `(index, count)`: the output entry that each input
    entry is added to, and the number of output entries.

    A piece is the part of a block of rows that belongs to one group. Rows are sorted by group, so
    `row // block + group` increases from piece to piece. The pieces of a group are contiguous, from
    `offset // block + group` on. With blocks of 2:

        rows      a a a | b b | ? ?        offsets  0 3 5      the tail is one more group
        block     0 0 1   1 2   2 3
        group     0 0 0   1 1   2 2
        piece     0 0 1   2 3   4 5        offsets  0 2 4

    Steps are added until each group has at most `_BLOCK` pieces. The last step adds to the `g + 1` groups, tail
    included.
    """
    g, steps = offsets.shape[0] - 1, []
    group = jnp.arange(g + 1, dtype=jnp.int32)
    entries = ids.shape[0]
    max_size = entries if isinstance(entries, int) else np.iinfo(np.int32).max  # a symbol under `jax.export`
    while max_size > _BLOCK:
        pieces = -(-entries // _BLOCK) + g
        steps.append((jnp.arange(entries, dtype=jnp.int32) // _BLOCK + ids, pieces))
        offsets, entries, max_size = offsets // _BLOCK + group, pieces, -(-max_size // _BLOCK) + 1
        ids = group_ids(offsets, entries)
    return [*steps, (ids, g + 1)]


def _sum_groups(x: Arithmetic, data: Shaped[Array, "rows *last"]) -> Shaped[Array, "g *last"]:
    for index, count in _steps(x.offsets, x.group_ids):
        data = jax.ops.segment_sum(data, index, count, indices_are_sorted=True, mode=IN_BOUNDS)
    return data[:-1]


def _count(x: Arithmetic, axis: int | None, dtype: Any) -> Array:
    """Number of elements that a reduction along `axis` reduces, in its result's shape.

    Extents are multiplied in `dtype`, the dtype of sums: int32 can't count the elements of a large group.
    """
    if axis is not None:
        return x.with_data(jnp.ones(x.shape, jnp.int32)).sum(axis).astype(dtype)
    if x.packed_axis == -1:
        return _count(x.mT, axis, dtype)
    static, count = x.shape[1:], jnp.ones(x.num_groups, dtype)
    if x.packed_axis is not None:
        count = jnp.diff(x.offsets).astype(dtype)
    if x.last_dims is not None:
        count *= jnp.clip(as_int32(x.last_dims), 0, x.shape[-1]).astype(dtype)
        static = static[:-1]
    for extent in static:  # may be symbolic
        count *= jnp.asarray(extent).astype(dtype)
    return count


def _extreme_value(x: Arithmetic, name: str, axis: int | None) -> Array:
    """The largest or the smallest element of each group; for empty groups, the dtype's lowest or highest value."""
    lowest, highest = _limits(x.dtype)
    segment_fn, dense_fn, neutral = {
        "max": (jax.ops.segment_max, jnp.max, lowest),
        "min": (jax.ops.segment_min, jnp.min, highest),
    }[name]

    def groups_fn(x: Arithmetic, data: Shaped[Array, "rows *last"]) -> Shaped[Array, "g *last"]:
        return segment_fn(data, x.group_ids, x.num_groups + 1, indices_are_sorted=True)[:-1]

    return x._reduce(axis, groups_fn, dense_fn, neutral, neutral)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme(x: Arithmetic, name: str, axis: int | None) -> Array:
    """`_extreme_value` of floats with the derivative of `jnp.max`: the mean over all largest elements, or NaN if the
    result is NaN.

    JAX's derivative of `segment_max` would also count the values that replace masked elements, and would be 0 for NaN.
    """
    return _extreme_value(x, name, axis)


@_extreme.defjvp
def _(name: str, axis: int | None, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
    x, out = primals[0], _extreme(primals[0], name, axis)
    best = x._with_kept_dims(out, axis, keepdims=True)
    chosen = x.map(lambda each, best: (each == best) | jnp.isnan(best), best)
    tangent = x.with_data(tangents[0].data).map(lambda each, chosen: jnp.where(chosen, each, 0), chosen)
    dtype = _sum_dtype(x.dtype)
    # int32 can count the elements along one axis, but not all elements of a large group.
    count = chosen.sum(axis) if axis is not None else chosen.sum(-1, keepdims=True).astype(dtype).sum()
    share = jnp.where(jnp.isnan(out), out.astype(dtype), 1 / jnp.maximum(count, 1).astype(dtype))
    return out, (tangent.astype(dtype).sum(axis) * share).astype(out.dtype)


def _limits(dtype: Any) -> tuple[Any, Any]:
    if jnp.issubdtype(dtype, jnp.bool_):
        return False, True
    if jnp.issubdtype(dtype, jnp.integer):
        return np.array(jnp.iinfo(dtype).min, dtype), np.array(jnp.iinfo(dtype).max, dtype)
    if np.isinf(np.asarray(np.inf).astype(dtype)):
        return -jnp.inf, jnp.inf
    return float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)  # float8_e4m3fn, for example, has no infinity.


def _mean_dtype(dtype: Any) -> Any:
    """Dtype of a mean, as `jnp.mean` has it."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype).itemsize == 8 else jnp.float32)


def _window(x: Arithmetic, causal: bool, window: Any) -> tuple[Any, Any]:
    """`(left, right)`: how many columns before and after a row's position are visible; None for no limit."""
    check_flag(Site("GroupedTensor.softmax", {"x": x}), "causal", causal)
    both = window if isinstance(window, tuple) else (window, window)

    def is_width(n: Any) -> bool:
        if is_arraylike(n):
            return n.ndim == 0 and jnp.issubdtype(n.dtype, jnp.integer) and not (is_concrete(n) and int(n) < 0)
        return n is None or is_count(n, minimum=0)

    if len(both) != 2 or not all(map(is_width, both)):
        hint = "It is (left, right), how many columns before and after a row's own position are visible; None for no "
        hint += "limit."
        Site("GroupedTensor.softmax", {"x": x}).fail(ValueError, f"`window` is {describe(window)}.", hint)
    left, right = (None if n is None else jnp.maximum(as_int32(n), 0) for n in both)
    return left, jnp.int32(0) if causal else right


def _ahead(x: Arithmetic) -> Int[Array, "..."]:
    """For each element, in the buffer's shape: its column within the group, minus the position of its row."""
    if x.packed_axis == -1:
        return -_ahead(x.mT).mT
    last = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    if x.packed_axis is None:
        return last - jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) - (x.shape[-1] - x.shape[1])
    # Dims aren't clipped: if the buffer cuts off a group's last rows or columns, the others keep their positions.
    n = jnp.maximum(as_int32(x.first_dims), 0)
    m = x.shape[-1] if x.last_dims is None else jnp.maximum(as_int32(x.last_dims), 0)
    position = take(m - n, x.group_ids, 0) + x.positions  # each row's position, a column of its group
    return last - position.reshape(-1, *(1,) * (x.ndim - 1))


@jax.custom_jvp
def _take(values: Array, offsets: Int[Array, " g_plus_1"], ids: Int[Array, " capacity"]) -> Array:
    """`values[ids]`: each row's value, from `g + 1` values of the groups and the tail.

    JAX's transpose of this gather would add row after row in the dtype of `values`. This one sums in blocks, in
    float32.
    """
    return values.at[ids].get(mode=IN_BOUNDS, indices_are_sorted=True)


@_take.defjvp
def _(primals: tuple[Array, Array, Array], tangents: tuple[Any, Any, Any]) -> tuple[Array, Any]:
    values, offsets, ids = primals
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        out = _take(values, offsets, ids)
        return out, np.zeros(out.shape, jax.dtypes.float0)
    tangent = tangents[0].astype(_sum_dtype(values.dtype))
    # The same gather in steps: the transpose of each step is one step of the sum.
    for index, _ in reversed(_steps(offsets, ids)):
        tangent = tangent.at[index].get(mode=IN_BOUNDS, indices_are_sorted=True)
    return _take(values, offsets, ids), tangent.astype(values.dtype)


def _sum_dtype(dtype: Any) -> Any:
    """Dtype in which values are summed: at least float32 for floats, else `dtype`."""
    return accumulator_dtype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(dtype)


def broadcast_accumulated(value: Array, dtype: Any, shape: tuple[int, ...]) -> Array:
    """`value` in `dtype`, broadcast to `shape` such that its cotangent is summed in float32."""
    return _cast(jnp.broadcast_to(_cast(value, _sum_dtype(dtype)), shape), dtype)


def _cast(value: Array, dtype: Any) -> Array:
    return value if value.dtype == dtype else value.astype(dtype)
