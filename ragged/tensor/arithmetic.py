"""What can be done to a `GroupedTensor` element by element, row by row and group by group.

Nothing here lets the tail in or out: functions see ones where there is no element, results have zeros there, and both
are chosen by `select`, so that neither a value nor a gradient of the tail ever reaches anything.

Whatever is summed, values or cotangents, is summed in float32 and rounded once; along the packed axis in blocks, whose
sums are summed in blocks again (`_steps`), so that the error doesn't grow with a group's rows.
"""

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Int, Shaped

from ragged._errors import Site, describe, is_arraylike, is_count
from ragged._mesh import over_explicit_axes
from ragged.backends import schedule
from ragged.backends.schedule import as_int32
from ragged.quant.formats import accumulator_dtype

if TYPE_CHECKING:
    from ragged.tensor.tensor import GroupedTensor


class per_group(eqx.Module):
    """Wraps one value a group, to combine with a tensor: `x * per_group(v)`.

    `value`: `(g,)`, one value for all elements of a group; or for ragged rows also `(g, *more, last)`, one row a group
    (for ragged columns `(g, first)`, one column a group; for a uniform tensor anything that broadcasts after the group
    axis).

    One row for all groups, `(last,)`, is none of these, and is taken for `(g,)` where `last` is `g`: that is
    `per_column(v)`.
    """

    value: Array | Any


class per_row(eqx.Module):
    """Wraps one value a row of the buffer, to combine with a tensor: `x * per_row(v)`.

    `value`: `(rows,)`; for a uniform tensor `(g, first)`. What it holds in the tail never matters. With more dims it
    may have those too, from the first on: `(rows, heads)` next to `[rows, heads, head_dim]`, or all, some of them 1.
    """

    value: Array | Any


class per_column(eqx.Module):
    """Wraps one value a column of the buffer, to combine with a tensor: `x + per_column(bias)`.

    `value`: `(last,)`, for ragged columns `(cols,)`. What it holds in the tail never matters.

    `x + bias` is the same where the last dim isn't ragged and `last` isn't `g`: there `(g,)` could mean one value a
    group, and the wrapper says which.
    """

    value: Array | Any


Wrapped = per_group | per_row | per_column
Window = int | Int[Array, ""] | tuple[Any, Any] | None | Any

_SCALARS = int | float | complex | np.generic | np.ndarray | Array


def _operators(fn: Callable[[Any, Any], Any], symbol: str) -> tuple[Any, Any]:
    """The methods of `x op other` and `other op x`."""

    def method(self: "Arithmetic", other: Any) -> "GroupedTensor":
        return self._combine(other, fn, symbol)

    def reflected(self: "Arithmetic", other: Any) -> "GroupedTensor":
        return self._combine(other, fn, symbol, reflected=True)

    return method, reflected


class Arithmetic(eqx.Module):
    """The element-by-element half of `GroupedTensor`.

    `+ - * / **`, `& | ^`, comparisons and `==`, `!=` combine a tensor with

    - a number, or an array of one;
    - a tensor of the same kind, shape and sizes. Sizes are compared where both are known; while tracing they can't be,
      and those of the left one count: `x.validate(like=y) + y` compares them at run time;
    - a tensor whose groups have 1 row or 1 column where the other's have more: `x - x.mean(-2, keepdims=True)`;
    - `per_group(v)`, `per_row(v)`, `per_column(v)`; a plain `(last,)` array meets every row, unless `last` is `g`.

    Comparisons give a tensor of bools, False in the tail. So does `==`: whether two are the same is asked of their
    groups. (Of a tensor of specs or shapes, with no array in it, `==` and `hash` are those of any Equinox module.)
    """

    data: eqx.AbstractVar[Any]
    first_dims: eqx.AbstractVar[Any]
    last_dims: eqx.AbstractVar[Any]

    __add__, __radd__ = _operators(operator.add, "+")
    __sub__, __rsub__ = _operators(operator.sub, "-")
    __mul__, __rmul__ = _operators(operator.mul, "*")
    __truediv__, __rtruediv__ = _operators(operator.truediv, "/")
    __pow__, __rpow__ = _operators(operator.pow, "**")
    __and__, __rand__ = _operators(operator.and_, "&")
    __or__, __ror__ = _operators(operator.or_, "|")
    __xor__, __rxor__ = _operators(operator.xor, "^")
    __lt__, _ = _operators(operator.lt, "<")
    __le__, _ = _operators(operator.le, "<=")
    __gt__, _ = _operators(operator.gt, ">")
    __ge__, _ = _operators(operator.ge, ">=")

    def __eq__(self, other: object) -> Any:
        return self._combine(other, operator.eq, "==") if _hold_arrays(self, other) else eqx.tree_equal(self, other)

    def __ne__(self, other: object) -> Any:
        return self._combine(other, operator.ne, "!=") if _hold_arrays(self, other) else not eqx.tree_equal(self, other)

    __hash__ = eqx.Module.__hash__  # arrays have none

    def __neg__(self) -> "GroupedTensor":
        return self.map(operator.neg)

    def __abs__(self) -> "GroupedTensor":
        return self.map(abs)

    def __invert__(self) -> "GroupedTensor":
        return self.map(operator.invert)

    def __matmul__(self, other: Any) -> "GroupedTensor":
        """`ragged.matmul(self, other)`."""
        return products["@"](self, other)

    def __rmatmul__(self, other: Any) -> "GroupedTensor":
        return products["@"](other, self)

    def __bool__(self) -> bool:
        mend = "Count by group, `(x > 0).sum()`. One bool of a tensor `c` of bools is `jnp.all(c.data | ~c.mask)`."
        Site("bool(GroupedTensor)", {"x": self}).fail(ValueError, "a tensor has many truth values.", mend)

    def __contains__(self, value: Any) -> bool:
        mend = "Whether any element is `v` is `(x == v).data.any()`, which is False in the tail."
        problem = "an element, a row or a group may be meant."
        Site("v in GroupedTensor", {"v": value, "x": self}).fail(ValueError, problem, mend)

    # NumPy and JAX must not take it for an array and drop its groups. NumPy's operators leave it alone:
    __array_ufunc__ = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        _refuse(self)

    def __array_function__(self, *_: Any) -> Any:
        _refuse(self)

    def __jax_array__(self) -> Any:
        return _NoArray(self)

    def map(self, fn: Callable[..., Any], *others: Any, zero_tail: bool = True) -> "GroupedTensor":
        """Applies an elementwise or rowwise function to the buffer, or to several: `x.map(jnp.maximum, y)`.

        `fn` is called once, with the whole buffer (ones where it holds no element). It may change the dtype, and along
        a dim that isn't ragged the extent: `x.map(lambda rows: rows @ w)`. Of ragged rows and of a uniform tensor, it
        may split dims or merge them: `x.map(lambda rows: rows.reshape(-1, heads, head_dim))`.

        It must treat rows (columns, if those are packed) apart from each other, and be finite, with its derivative, on
        a row of ones. It may hold arrays of its
        own, as in `x.map(lambda rows: rows + bias)`; their gradients are JAX's, which sums over the rows in the dtype
        that they are added in: in bfloat16, `(rows.astype(jnp.float32) + bias).astype(rows.dtype)` keeps them right.

        Of a cotangent, whose groups are unknown, `fn` must be elementwise: it is applied to all of the buffer.

        **Arguments:**

        - `others`: what else `fn` is called with, each as an operator takes it: a tensor of the same structure, a
          number, `per_group(v)`, `per_row(v)`, `per_column(v)`. Arrays reach `fn` along the buffer's axes.
        - `zero_tail`: False leaves what `fn` makes of the ones in the tail, and saves a pass.

        **Raises:** `TypeError` for a plain array, which `fn` itself may hold; `ValueError` if the result's extent along
        a ragged axis is another, its rank is none that such a tensor has, or another tensor has another structure.
        """
        for other in others:
            if not isinstance(other, Arithmetic | Wrapped | _SCALARS):
                problem = f"`fn` can't be called with a {type(other).__name__}."
                mend = "Pass tensors, numbers or wrapped arrays, and let `fn` hold what else it needs."
                Site("GroupedTensor.map", {"x": self, "other": other}).fail(TypeError, problem, mend)
        x = _host(self, *others)
        return x._mapped(fn(*(_aligned(x, each, "map") for each in (self, *others))), zero_tail)

    def _mapped(self, out: Any, zero_tail: bool = True) -> "GroupedTensor":
        """`out`, which a function made of the buffer, in place of it."""
        x, out = _tensor(self), jnp.asarray(out)
        columns = x.ragged[1] or x.is_cotangent
        kept = [-1] if x.ragged == (False, True) else [0, -1] if columns else [0]
        kept = list(range(x.ndim)) if x.is_cotangent else kept
        ranks_fit = out.ndim == x.ndim if columns else out.ndim >= (2 if x.ragged[0] else 3)
        if not ranks_fit or any(out.shape[axis] != x.shape[axis] for axis in kept):
            rank = "the rank" if columns else f"{2 if x.ragged[0] else 3} dims or more"
            problem = f"`fn` must keep {rank} and the extent of axes {kept}."
            site = Site("GroupedTensor.map", {"x": x, "fn(x.data)": out})
            site.fail(ValueError, problem, "Only dims that aren't ragged may change.")
        out = x._replace_data(out)
        return out._replace_data(out._filled(0)) if zero_tail else out

    @over_explicit_axes
    def _filled(self, value: Any) -> Array:
        """The buffer, with `value` where it holds no element. That of a cotangent as it is."""
        x = _tensor(self)
        x._require_plain()
        data = jnp.asarray(x.data)
        if x.is_cotangent:
            return data
        x._require_groups()
        return data if x.packed_axis is None else jnp.where(x.mask, data, jnp.asarray(value, data.dtype))

    @over_explicit_axes
    def _combine(self, other: Any, fn: Callable[[Any, Any], Array], symbol: str, reflected: bool = False) -> Any:
        """`fn(self, other)`, or `fn(other, self)` if `reflected`."""
        _tensor(self)._require_plain()
        if not isinstance(other, Arithmetic | Wrapped | _SCALARS):
            return NotImplemented
        x = _host(self, other)
        mine, its = _aligned(x, self, symbol), _aligned(x, other, symbol, reflected)
        return x._mapped(fn(its, mine) if reflected else fn(mine, its))

    def sum(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = 0) -> Shaped[Array, "..."] | Any:
        """Sum of each group.

        **Arguments:**

        - `axis`: None for all of a group's elements, -> `(g,)`. The packed axis (-2 for ragged rows, -3 with one more
          dim, ...; -1 for ragged columns) -> one row or column a group, `(g, *more, last)` or `(g, first)`. Another
          axis, counted from the last -> `(rows,)`, one value a row (or column) of the buffer, with `empty` in the tail;
          with more dims, those that are left. Uniform tensors: as `jnp.sum` within each group.
        - `keepdims`: keep what is reduced as a dim of 1, in a tensor that combines with this one, as in
          `x / x.sum(-2, keepdims=True)`: uniform `[g, 1, 1]`, `[g, 1, last]` or `[g, first, 1]`; along the other axis
          ragged rows `[rows, 1]` (or columns `[1, cols]`), with zeros in the tail.
        - `empty`: the value where there is nothing to reduce.

        Small floats are summed in float32, small integers in int32.
        """
        x = _tensor(self)
        if x.dtype in (jnp.int4, jnp.uint4, jnp.int2, jnp.uint2):  # `jnp.sum` has no dtype for their sums
            x = x.astype(jnp.int32)
        return x._kept(x._reduce(axis, _sum_groups, jnp.sum, 0, empty), axis, keepdims)

    @over_explicit_axes
    def mean(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = 0) -> Shaped[Array, "..."] | Any:
        """Mean of each group. Arguments as for `sum`."""
        x = _tensor(self)
        x._require_plain()
        x._require_groups()
        dtype = _mean_dtype(x.dtype)
        wide = accumulator_dtype(dtype)
        count = x._replace_data(jnp.ones(x.shape, jnp.int32)).sum(axis).astype(wide)
        total = x.astype(wide).sum(axis)
        mean = jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.asarray(empty, wide)).astype(dtype)
        return x._kept(mean, axis, keepdims)

    def var(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = 0) -> Shaped[Array, "..."] | Any:
        """Variance of each group, `mean((x - mean(x))²)`: in two passes, in float32. Arguments as for `sum`."""
        x = _tensor(self)
        x._require_plain()
        dtype = _mean_dtype(x.dtype)
        wide = x.astype(accumulator_dtype(dtype))
        centred = wide - wide.mean(axis, keepdims=True)
        squares = centred.map(lambda d: jnp.real(d * jnp.conj(d)))
        return squares.mean(axis, keepdims=keepdims, empty=empty).astype(jnp.finfo(dtype).dtype)

    def max(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = None) -> Shaped[Array, "..."] | Any:
        """Largest element of each group. Arguments as for `sum`; `empty` is the lowest value of the dtype by
        default."""
        lowest = _limits(_tensor(self).dtype)[0]
        empty = lowest if empty is None else empty
        return self._kept(self._reduce(axis, _max_groups, jnp.max, lowest, empty), axis, keepdims)

    def min(self, axis: int | None = None, *, keepdims: bool = False, empty: Any = None) -> Shaped[Array, "..."] | Any:
        """Smallest element of each group. Arguments as for `sum`; `empty` is the highest value of the dtype by
        default."""
        highest = _limits(_tensor(self).dtype)[1]
        empty = highest if empty is None else empty
        return self._kept(self._reduce(axis, _min_groups, jnp.min, highest, empty), axis, keepdims)

    def _kept(self, out: Array, axis: int | None, keepdims: bool) -> Any:
        """`out`, reduced along `axis`; with `keepdims` as a tensor whose groups have dims of 1 there."""
        if not keepdims:
            return out
        x = _tensor(self)
        rank = x.ndim - (x.packed_axis is None)  # of a group
        out = jnp.expand_dims(out, tuple(range(-rank, 0)) if axis is None else axis)
        if x.packed_axis is None or axis in (None, x.packed_axis):
            return x._with(data=out, first_dims=None, last_dims=None, transposed=False)
        gone = {"first_dims": None} if x.packed_axis == -1 else {"last_dims": None} if axis == -1 else {}
        rows = x._with(data=out, **gone)
        return rows._replace_data(rows._filled(0))

    @over_explicit_axes
    def _reduce(self, axis: int | None, groups_fn: Any, dense_fn: Any, neutral: Any, empty: Any) -> Array:
        x = _tensor(self)
        x._require_plain()
        x._require_groups()
        own = range(-x.ndim + (x.packed_axis is None), 0)  # the groups' axes
        if axis is not None and axis not in own:
            between = "".join(f", {each}" for each in own[1:-1])
            mend = f"It must be None, {own[0]} (the groups' first dim){between} or -1 (the last)."
            Site("GroupedTensor", {"x": x}).fail(ValueError, f"`axis` of a reduction is {axis!r}.", mend)
        if x.packed_axis is None:
            axes = tuple(own) if axis is None else (axis,)
            out = dense_fn(x.data, axis=axes, initial=neutral)
            return out if all(x.shape[a] for a in axes) else jnp.full_like(out, empty)
        if x.packed_axis == -1:
            swapped = None if axis is None else -3 - axis
            return x.mT._reduce(swapped, groups_fn, dense_fn, neutral, empty)
        # Small integers are summed in int32, small floats in float32 and rounded once.
        dtype = jax.eval_shape(lambda d: dense_fn(d, axis=-1, initial=neutral), jnp.asarray(x.data)).dtype
        by_group = axis is None or axis == x.packed_axis
        if by_group and not x.num_groups:  # the gradient would gather from nothing
            return jnp.zeros((0,) if axis is None else (0, *x.shape[1:]), dtype)
        wide = accumulator_dtype(dtype)
        neutral, empty = jnp.asarray(neutral, wide), jnp.asarray(empty, wide)
        data = jnp.where(x.mask, x.data.astype(wide), neutral)  # [rows, *more, last]
        some = x.mask
        if axis != x.packed_axis:
            axes = tuple(own[1:]) if axis is None else axis
            data, some = dense_fn(data, axis=axes, initial=neutral), jnp.any(some, axis=axes)  # (rows,)
        if by_group:
            data, columns = groups_fn(x, data), x.shape[-1]
            widths = columns if x.last_dims is None else jnp.minimum(x.last_dims, columns).astype(jnp.int32)
            widths = jnp.where(jnp.diff(x.offsets) > 0, widths, 0)  # (g,)
            some = jnp.arange(columns, dtype=jnp.int32)[None] < widths[:, None]  # [g, last]
            some = some.reshape(x.num_groups, *[1] * (x.ndim - 2), columns)
            if axis is None:
                some = (widths > 0) & bool(math.prod(x.shape[1:-1]))
        return jnp.where(some, data, empty).astype(dtype)

    @over_explicit_axes
    def softmax(self, *, causal: bool = False, window: Window = None) -> "GroupedTensor":
        """Softmax along the last dim of each group: over a row's real columns if the last dim is ragged.

        A row without columns, or of which nothing is visible, and the tail, are zero. Computed in float32 and rounded
        once.

        **Arguments:** which columns a row sees, for scores of queries (rows) and keys (columns). Where a group has `n`
        rows and `m` columns, its last row and its last column are aligned: row `i` stands at column `i + m - n`, as in
        flash-attention. Of a sequence with itself, that is column `i`; of its newest queries with all keys, the right
        one as well.

        - `causal`: none behind the one where it stands.
        - `window`: `(left, right)`, so many before and behind it besides; None for no limit. An int is both. Integers,
          or `()` arrays of them.

        **Raises:** `ValueError` for a window that isn't that.

        !!! example
            ```python
            import jax.numpy as jnp
            from ragged import GroupedTensor
            sizes = jnp.array([2, 1], jnp.int32)
            q = k = GroupedTensor(jnp.ones((4, 8)), first_dims=sizes)
            p = (q @ k.mT).softmax(causal=True)
            assert p[0].tolist() == [[1.0, 0.0], [0.5, 0.5]]
            ```
        """
        x = _tensor(self)
        left, right = _window(x, causal, window)
        x._require_plain()
        x._require_groups()
        if (wide := _wide(x.dtype)) != x.dtype:
            return x.astype(wide).softmax(causal=causal, window=window).astype(x.dtype)
        if not x.ragged[1] and left is None and right is None:
            return x.map(lambda data: jax.nn.softmax(data, axis=-1))
        visible = x.mask
        if left is not None or right is not None:
            ahead = _ahead(x)
            visible &= True if left is None else ahead >= -left
            visible &= True if right is None else ahead <= right
        if x.packed_axis != -1:
            # A row that sees no column at all would be 0 / 0.
            some = jnp.any(visible, axis=-1, keepdims=True)
            data = jnp.where(visible, x.data, 0)
            return x._replace_data(jnp.where(visible, jax.nn.softmax(data, axis=-1, where=visible | ~some), 0))
        # Packed columns: a row of a group runs along the packed axis, which `mT` turns into the first.
        y, visible = x.mT, visible.mT
        lowest = _limits(y.dtype)[0]
        seen = y._replace_data(jnp.where(visible, jax.lax.stop_gradient(jnp.asarray(y.data)), lowest))
        largest = seen.max(-2, empty=0)
        largest = jnp.where(largest > lowest, largest, 0)
        below = y._replace_data(jnp.where(visible, y.data, 0)) - per_group(largest)
        weights = below._replace_data(jnp.where(visible, jnp.exp(jnp.where(visible, below.data, 0)), 0))
        total = weights.sum(-2, empty=1)
        return (weights / per_group(jnp.where(total > 0, total, 1))).mT


products: dict[str, Callable[[Any, Any], Any]] = {}
"""What `@` is: `ragged.matmul`, which comes later in the order of imports, and enters itself."""


class _NoArray:
    """What JAX's functions get that ask a tensor for its array. Operators leave it alone, and the tensor answers;
    whoever looks into it is refused."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        _refuse(self._tensor)

    def __str__(self) -> str:
        _refuse(self._tensor)


def _refuse(x: Any) -> NoReturn:
    mend = "" if any(x.ragged) else "`x.data` is an ordinary array, as this tensor is uniform. "
    mend += "An elementwise or rowwise function is `x.map(jax.nn.silu)`, zeros are `x.map(jnp.zeros_like)`; `x.sum()`, "
    mend += "`mean`, `var`, `min`, `max` and `softmax` are by group, `x @ w` multiplies. "
    mend += "The buffer is `x.data`, the groups are `x.to_list()` or `x.to_padded(max_len)`."
    problem = "functions of NumPy and JAX take arrays, which have no groups."
    Site("jnp.f(GroupedTensor)", {"x": x}).fail(TypeError, problem, mend)


def _tensor(x: Any) -> "GroupedTensor":
    return x


def _hold_arrays(*operands: Any) -> bool:
    """Whether all that are tensors hold arrays, not specs or shapes."""
    return all(is_arraylike(each.data) for each in operands if isinstance(each, Arithmetic))


def _host(self: Any, *others: Any) -> "GroupedTensor":
    """The operand whose structure the result has: the first, if no other has groups where it has none, or is larger."""
    host = _tensor(self)
    for other in others:
        if isinstance(other, Arithmetic) and (other := _tensor(other)) is not host:
            gains = _is_cotangent(host, other) and not other.is_cotangent
            host = other if gains or _stretched(other, host) is not None else host
    return host


@over_explicit_axes
def _aligned(x: "GroupedTensor", other: Any, symbol: str, reflected: bool = False) -> Any:
    """`other` as what combines with the buffer of `x`, with ones where `x` has no element."""
    if isinstance(other, Arithmetic):
        other = _tensor(other)
        if other is x:
            return x._filled(1)
        other._require_plain()
        stretched = _stretched(x, other)
        return _same_structure(x, other, symbol) if stretched is None else _spread(x, stretched)
    if not isinstance(other, Wrapped):
        if not jnp.ndim(other):
            if isinstance(other, Array) and _wide(dtype := jnp.result_type(x.dtype, other)) != dtype:
                other = broadcast_wide(other, dtype, x.shape)
            return other
        shape = jnp.shape(other)
        if x.is_cotangent or x.ragged[1] or shape != x.shape[-1:] or shape == (x.num_groups,):
            site = Site("GroupedTensor.map" if symbol == "map" else f"GroupedTensor {symbol} array", {"x": x})
            mend = _mend(x, shape, symbol, reflected)
            site.also(array=other).fail(TypeError, "a plain array has no groups to match.", mend)
        other = per_column(other)
    return _spread(x, other)


def _stretched(x: "GroupedTensor", other: "GroupedTensor") -> Wrapped | None:
    """`other` as one value (or row, or column) a group, a row or a column, if its groups have 1 where `x` has more."""
    if any(each.is_cotangent or each.is_stack or not is_arraylike(each.data) for each in (x, other)):
        return None
    axis, data = x.packed_axis, other.data
    rank = x.ndim - (axis is None)  # of a group
    if x.num_groups != other.num_groups or x.shape == other.shape or other.ndim - (other.packed_axis is None) != rank:
        return None
    if any(data.shape[a] not in (1, x.shape[a]) for a in range(-rank, 0) if a != axis):
        return None
    if other.packed_axis is None:
        if axis is None:
            return per_group(data)
        if data.shape[axis] != 1:
            return None
        value, shape = jnp.squeeze(data, axis), (x.num_groups, *_others(x))
        alone = all(n == 1 for n in value.shape[1:])
        return per_group(value.reshape(-1) if alone else broadcast_wide(value, value.dtype, shape))
    if axis is None or (other.packed_axis, other.capacity) != (axis, x.capacity):
        return None
    if other.kind == "ragged both" and not (x.kind == other.kind and _may_be_equal(x.last_dims, other.last_dims)):
        return None
    if not _may_be_equal(x.packed_dims, other.packed_dims):
        return None
    return per_row(data) if axis != -1 else per_column(data[0])


def _others(x: "GroupedTensor") -> tuple[int, ...]:
    """The extents of a packed buffer's other axes."""
    return x.shape[:1] if x.packed_axis == -1 else x.shape[1:]


def _may_be_equal(mine: Any, theirs: Any) -> bool:
    """Whether sizes are equal, or not known yet."""
    if mine is theirs or isinstance(mine, Tracer) or isinstance(theirs, Tracer):
        return True
    return np.array_equal(mine, theirs)


def _spread(x: "GroupedTensor", wrapped: Wrapped) -> Array:
    """The wrapped values along the buffer of `x`, broadcastable to it, with ones where it holds no element."""
    value = _along(x, wrapped)
    # A row without columns, or a column that no row of its group has, must not reach the gradient of `v` either.
    return value if x.packed_axis is None else jnp.where(x.mask, value, 1)


def _along(x: "GroupedTensor", wrapped: Wrapped) -> Array:
    x._require_groups()
    value, name = jnp.asarray(wrapped.value), type(wrapped).__name__
    axis = x.packed_axis
    if isinstance(wrapped, per_row):
        least = 2 if axis is None else 1
        given = (*x.shape[:least], *value.shape[least:])
        want = tuple(n if m != 1 else 1 for m, n in zip(given, x.shape, strict=False))
        mend = "One value a row of the buffer."
    elif isinstance(wrapped, per_column):
        want, mend = x.shape[-1:], "One value a column of the buffer."
    else:
        columns = () if value.ndim == 1 else _others(x)
        if axis is None:  # what broadcasts along the last axes
            last = x.shape[max(1, x.ndim - value.ndim + 1) :]
            columns = tuple(1 if own == 1 else n for own, n in zip(value.shape[1:], last, strict=False))
        want = (x.num_groups, *columns)
        mend = "One value a group, or one row a group."
    if value.shape != want:
        if value.shape == x.shape[-1:]:
            mend += " One value a column is `ragged.per_column(v)`."
        Site(f"ragged.{name}(v)", {"v": value, "x": x}).fail(ValueError, f"`v` must have shape {want} here.", mend)
    if isinstance(wrapped, per_row):
        value = value.reshape(*want, *(1,) * (x.ndim - len(want)))
    if not isinstance(wrapped, per_group):
        return broadcast_wide(value, value.dtype, x.shape)
    if axis is None:
        value = value.reshape(x.num_groups, *(1,) * (x.ndim - value.ndim), *value.shape[1:])
        return broadcast_wide(value, value.dtype, x.shape)
    dtype, alone = value.dtype, value.ndim == 1
    value = value.astype(_wide(dtype)) if alone else value
    value = jnp.concatenate([value, jnp.ones((1, *value.shape[1:]), value.dtype)])  # the tail is one more group
    value = _take(value, x.offsets, x.group_ids)  # (capacity,) or [capacity, *other]
    if alone:
        shape = (x.capacity, *_others(x))
        value = broadcast_wide(value.reshape(x.capacity, *(1,) * (len(shape) - 1)), dtype, shape)
    return value.mT if axis == -1 else value


def _is_cotangent(g: "GroupedTensor", x: "GroupedTensor") -> bool:
    """Whether `g` can be a cotangent of `x`. With more than two dims, one whose dims are None looks uniform."""
    return g.is_cotangent or (g.kind == "uniform" and x.ndim > 2 and x.kind not in ("uniform", "cotangent"))


def _same_structure(x: "GroupedTensor", other: "GroupedTensor", symbol: str) -> Array:
    """The buffer of `other`, with ones in its tail. Of a cotangent only the buffer is compared."""
    same_groups = False
    if _is_cotangent(other, x):
        same = (x.shape, x.transposed) == (other.shape, other.transposed)
    else:
        mine, its = ((t.kind, t.packed_axis, t.num_groups) for t in (x, other))
        same_groups = mine == its and _may_be_equal(x.first_dims, other.first_dims)
        same_groups = same_groups and _may_be_equal(x.last_dims, other.last_dims)
        same = same_groups and x.shape == other.shape
    if not same:
        call = "GroupedTensor.map" if symbol == "map" else f"GroupedTensor {symbol} GroupedTensor"
        problem = "the two are ragged in different ways."
        if same_groups and x.shape != other.shape:
            problem = f"the two have buffers of different shapes, {x.shape} and {other.shape}."
        Site(call, {"x": x, "other": other}).fail(ValueError, problem, "Both need the same kind, shape and dims.")
    if x.is_cotangent:
        return jnp.asarray(other.data)
    return x._replace_data(jnp.asarray(other.data))._filled(1)


def _mend(x: "GroupedTensor", shape: tuple[int, ...], symbol: str, reflected: bool) -> str:
    """What to write in place of `x + v`, by the shape of `v`."""
    data = f"v {symbol} data" if reflected else f"data {symbol} v"
    data = "fn(data, v)" if symbol == "map" else data
    axis = None if x.is_cotangent else x.packed_axis
    of: dict[tuple[int, ...], str] = {}
    if not x.is_cotangent:
        of[x.num_groups,] = "One value a group is `ragged.per_group(v)`."
    if axis is not None:
        name = "column" if axis == -1 else "row"
        of[x.num_groups, *_others(x)] = f"One {name} a group is `ragged.per_group(v)`."
    mends = [of[shape]] if shape in of else []
    if shape == x.shape[: len(shape)] and (axis is None) < len(shape) < x.ndim and not x.is_cotangent:
        mends.append("One value a row is `ragged.per_row(v)`.")
    if shape == x.shape[-1:]:
        mends.append("One value a column is `ragged.per_column(v)`.")
    elif shape == x.shape:
        mends.append(f"A value for each element is `x.map(lambda data: {data})`.")
    return " ".join(mends) or (
        "Wrap it: `ragged.per_group(v)` for one value a group, `ragged.per_row(v)` for one a row, "
        "`ragged.per_column(v)` for one a column. "
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


def _with_tail(function: Any, x: "GroupedTensor", data: Array) -> Array:
    """By group, with the tail as one more: the derivative by a row of no group would be 0 / 0, and then dropped."""
    return function(data, x.group_ids, x.num_groups + 1, indices_are_sorted=True)[:-1]


def _max_groups(x: "GroupedTensor", data: Shaped[Array, "rows *last"]) -> Shaped[Array, "g *last"]:
    """The largest of each group's rows."""
    return _with_tail(jax.ops.segment_max, x, data)


def _min_groups(x: "GroupedTensor", data: Shaped[Array, "rows *last"]) -> Shaped[Array, "g *last"]:
    """The smallest of each group's rows."""
    return _with_tail(jax.ops.segment_min, x, data)


def _limits(dtype: Any) -> tuple[Any, Any]:
    """The lowest and the highest value of a dtype."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return False, True
    if jnp.issubdtype(dtype, jnp.integer):
        return np.array(jnp.iinfo(dtype).min, dtype), np.array(jnp.iinfo(dtype).max, dtype)
    if np.isinf(np.asarray(np.inf).astype(dtype)):
        return -jnp.inf, jnp.inf
    return float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)  # float8_e4m3fn has no infinity


def _mean_dtype(dtype: Any) -> Any:
    """Of a mean: float32 for integers."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(jnp.float32)


def _window(x: "GroupedTensor", causal: bool, window: Any) -> tuple[Any, Any]:
    """How many columns a row sees before and behind where it stands; None for no limit."""
    both = window if isinstance(window, tuple) else (window, window)

    def is_width(n: Any) -> bool:
        traced = is_arraylike(n) and n.ndim == 0 and jnp.issubdtype(n.dtype, jnp.integer)
        return n is None or is_count(n, least=0) or traced

    if len(both) != 2 or not all(map(is_width, both)):
        mend = "It is (left, right), how many columns before and behind the one where a row stands; None for no limit."
        Site("GroupedTensor.softmax", {"x": x}).fail(ValueError, f"`window` is {describe(window)}.", mend)
    left, right = (None if n is None else as_int32(n) for n in both)
    return left, jnp.int32(0) if causal else right


def _ahead(x: "GroupedTensor") -> Int[Array, "..."]:
    """How far each column is behind the one where the row stands, each counted in its group. The buffer's shape."""
    if x.packed_axis == -1:
        return -_ahead(x.mT).mT
    last = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    if x.packed_axis is None:
        return last - jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) - (x.shape[-1] - x.shape[1])
    if x.last_dims is None:
        n = jnp.diff(x.offsets)
        m = jnp.full_like(n, x.shape[-1])
    else:  # as given: where a group is cut off, as in `s @ s.mT`, its last rows and columns are gone, and none moves
        n, m = (jnp.maximum(as_int32(dims), 0) for dims in (x.first_dims, x.last_dims))
    of_row = schedule.of_groups(m - n, x.group_ids, 0) + x.positions  # where each row stands
    return last - of_row.reshape(-1, *(1,) * (x.ndim - 1))


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
