"""`route`: sorts tokens by group; dispatches their rows to the groups and combines them again.

With `group_ids=[2, 0, 2, 0]` for four tokens `a b c d` and three groups:

    order        [1, 3, 0, 2]      row i of the grouped tensor is token order[i]
    place        [2, 0, 3, 1]      token t is in row place[t]
    first_dims   [2, 0, 2]
    dispatch     b d | | a c       combine puts them back: a b c d
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

from ragged.core.errors import MAX_ROWS, Site, check_packed, is_arraylike, is_count, known_to_differ
from ragged.core.formats import AnyArray, accumulator_dtype
from ragged.core.mesh import over_explicit_axes, vary_together
from ragged.core.offsets import IN_BOUNDS, as_int32, count_up_to
from ragged.core.rows import collect_rows, collect_weighted, flat_rows, spread_rows
from ragged.tensor import show
from ragged.tensor.annotations import Rows
from ragged.tensor.arithmetic import SCALARS, Operators, Wrapped, per_column, per_group, per_row
from ragged.tensor.base import with_fields
from ragged.tensor.tensor import GroupedTensor


class Gathered(Operators):
    """Ragged rows, `[rows, d]`, for the `lhs` of a product: see `Route.gathered`. GPU kernels can read them from
    the tokens, without a copy.

    **Operators**, comparisons, `map` and `astype` are applied to the tokens and return gathered rows again. The other
    operand may be a number, `per_column`, or a `(d,)` array if `d` isn't the number of groups; if `top_k` is 1, also
    `per_row(v)` and `per_group(v)` with one value per row or group. Other methods raise an `AttributeError`, other
    operations a `TypeError`: call `dispatch` first, which copies the rows into a `GroupedTensor`.

    **Fields:**

    - `data`: `[tokens, d]`.
    - `rows`: `[rows, d]`, the copied rows. Under `jit`, XLA drops the copy if no product needs it.
    - `source`: `(rows,)` int32. Row `i` is `data[source[i]]`; the number of tokens, out of range, for rows of no group.
    - `places`: `[tokens, top_k]` int32, the rows of each token; the number of rows, out of range, for rows of no group.
    - `first_dims`: `(g,)` int32, the number of rows of each group.

    !!! example
        ```python
        import jax.numpy as jnp
        import ragged
        route = ragged.route(jnp.array([1, 0]), num_groups=2)
        x = route.gathered(jnp.array([[1.0], [2.0]]))
        scaled = x * ragged.per_row(jnp.array([10.0, 100.0]))  # the rows of the groups: token 1, then token 0
        assert scaled.data[:, 0].tolist() == [100.0, 20.0]
        assert scaled.dispatch().data[:, 0].tolist() == [20.0, 100.0]
        ```
    """

    data: Shaped[Array, "tokens d"]
    rows: Shaped[Array, "rows d"]
    source: Int[Array, " rows"]
    places: Int[Array, "tokens top_k"]
    first_dims: Int[Array, " g"]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(rows, d)`."""
        return self.rows.shape

    @property
    def ndim(self) -> int:
        """Rank of the dispatched rows."""
        return self.rows.ndim

    @property
    def dtype(self) -> Any:
        """The tokens' dtype."""
        return self.data.dtype

    @property
    def num_groups(self) -> int:
        """Number of groups, including empty ones."""
        return self.first_dims.shape[-1]

    def dispatch(self) -> Rows[Shaped[GroupedTensor, "rows ..."], "g"]:
        """Copies the rows into a `GroupedTensor`, as `Route.dispatch` does."""
        return GroupedTensor(self.rows, first_dims=self.first_dims)

    def map(self, fn: Callable[..., Any], *others: Any) -> "Gathered":
        """Applies an elementwise or rowwise function to the tokens, and gathers the rows from the result.

        `fn` is called once, with the tokens `[tokens, d]` in their original order (ones for tokens of no group). It may
        change the dtype and `d`, and must treat each token independently.

        **Arguments:** `others`: operands as for operators. `fn` gets each as a number, or as an array that broadcasts
        to the tokens.

        **Raises:** `TypeError` if the rows of one token would get different values; `ValueError` if the result isn't
        `[tokens, e]`.
        """
        return self._mapped(fn, "map", *(None if each is self else each for each in others))

    def astype(self, dtype: DTypeLike) -> "Gathered":
        """The gathered rows, cast to `dtype`."""
        return self.with_data(self.data.astype(dtype))

    def _combine(self, other: Any, fn: Callable[[Any, Any], Any], symbol: str, reflected: bool = False) -> Any:
        if not isinstance(other, Operators | Wrapped | SCALARS):
            return NotImplemented
        ordered = (lambda x, y: fn(y, x)) if reflected else fn
        return self._mapped(ordered, symbol, None if other is self else other, reflected=reflected)

    @over_explicit_axes
    def _mapped(self, fn: Callable[..., Any], symbol: str, *others: Any, reflected: bool = False) -> "Gathered":
        """Gathered rows of `fn(tokens, *others)`. Each None in `others` stands for the tokens."""
        ones = jnp.ones((), self.dtype)
        data = jnp.where(self._is_used[..., None], self.data, ones)  # Tokens of no group must not affect gradients.

        def of_tokens(*args: Any) -> Array:
            # Remove the group axis, which numbers and values per column don't have.
            out = jnp.asarray(fn(*(each[0] if jnp.ndim(each) > 2 else each for each in args)))
            if out.ndim != data.ndim or out.shape[:-1] != data.shape[:-1]:
                problem = f"`fn` must return one row for each of {data.shape[-2]} tokens, as a matrix."
                hint = "To split rows into more dims, copy them first: `x.dispatch().map(fn)`."
                Site("Gathered.map", {"x": self, "fn(x.data)": out}).fail(ValueError, problem, hint)
            return out[None]

        tokens = GroupedTensor(data[None])  # one group, without a tail
        values = (tokens if each is None else self._of_tokens(each, symbol, reflected) for each in others)
        return self.with_data(tokens.map(of_tokens, *values).data[0])

    @property
    def _is_used(self) -> Bool[Array, "*tokens"]:
        return jnp.any(self.places < self.source.shape[-1], axis=-1)

    def _of_tokens(self, other: Any, symbol: str, reflected: bool) -> Any:
        """Converts `other`, an operand for the rows, to an operand for the tokens. Raises if that isn't possible."""
        shape = other.shape if is_arraylike(other) else None
        if isinstance(other, per_row | per_group) and self.places.shape[-1] == 1 and jnp.ndim(other.value) == 1:
            one_column = GroupedTensor(jnp.zeros((self.source.shape[-1], 1), self.dtype), self.first_dims)
            values = one_column.map(lambda _, values: values, other, zero_tail=False).data  # [rows, 1]
            values = collect_rows(values, self.source, self.places)[:, 0]
            return per_row(jnp.where(self._is_used, values, jnp.ones((), values.dtype))[None])
        if shape == self.shape[-1:] != (self.num_groups,):
            return per_column(jnp.asarray(other))
        if isinstance(other, per_column) or (isinstance(other, SCALARS) and not jnp.ndim(other)):
            return other
        x, y, name = self.dispatch(), other, "other"
        if isinstance(other, Gathered):
            y, name = other.dispatch(), "other.dispatch()"
        call, code = (_written(symbol, reflected, *each) for each in (("Gathered", "other"), ("x.dispatch()", name)))
        if shape == self.shape:
            code = f"x.dispatch().map(lambda data: {_written(symbol, reflected, 'data', 'other')})"
        elif symbol == "map":  # It raises if `other` doesn't fit the dispatched rows.
            x.map(lambda data, _: data, y)
        else:
            x._combine(y, lambda data, _: data, symbol, reflected)
        problem = "`other` has values for rows, which can't be applied to the tokens."
        Site(call, {"x": self, "other": other}).fail(TypeError, problem, f"Copy the rows first: `{code}`.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(GroupedTensor, name):
            raise AttributeError(f"'Gathered' object has no attribute {name!r}", name=name, obj=self)
        self._fail(f"Gathered.{name}", f"`x.dispatch().{name}`", AttributeError)

    def __getitem__(self, index: Any) -> NoReturn:
        self._fail("Gathered[index]", "`x.dispatch()[index]`, or index the tokens, `x.data[index]`", index=index)

    def __len__(self) -> int:
        self._fail("len(Gathered)", "`x.num_groups` or, for the number of rows, `x.shape[0]`")

    def __iter__(self) -> Iterator[Any]:
        self._fail("iter(Gathered)", "`x.dispatch().to_list()`")

    def __contains__(self, value: Any) -> bool:
        self._fail("v in Gathered", "`(x.dispatch() == v).data.any()`", v=value)

    def __bool__(self) -> bool:
        self._fail("bool(Gathered)", "`x.dispatch().data.any()`")

    def _refuse(self) -> NoReturn:
        hint = "`x.map(jax.nn.silu)`, if it is elementwise or rowwise; `x @ w` multiplies"
        self._fail("jnp.f(Gathered)", hint)

    def _fail(self, call: str, code: str, error: type[Exception] = TypeError, **operands: Any) -> NoReturn:
        problem = "rows that aren't copied yet have only products and elementwise operations."
        hint = f"Write {code}. `x.dispatch()` copies the rows into a `GroupedTensor`."
        Site(call, {**operands, "x": self}).fail(error, problem, hint)

    def __repr__(self) -> str:
        unchecked: Any = None
        rows = with_fields(GroupedTensor(unchecked), data=self.rows, first_dims=self.first_dims)
        return f"Gathered({', '.join(show.parts(rows))})"

    @over_explicit_axes
    def with_data(self, data: Array) -> "Gathered":
        """Gathered rows of the same route, read from `data`, `[tokens, d]`."""
        rows = spread_rows(data, self.source, self.places)
        return Gathered(data, rows, self.source, self.places, self.first_dims)


def _written(symbol: str, reflected: bool, x: str, other: str) -> str:
    """Code for an error: `"x + other"`, `"other + x"`, or a call of `map`."""
    if symbol == "map":
        return f"fn({x}, {other})" if x == "data" else "Gathered.map" if x == "Gathered" else f"{x}.map(fn, {other})"
    return f"{other} {symbol} {x}" if reflected else f"{x} {symbol} {other}"


class Route(eqx.Module):
    """Which row of a ragged-rows tensor each token goes to. Returned by `ragged.route`.

    **Fields:**

    - `order`: `(tokens * top_k,)` int32. Row `i` holds token `order[i] // top_k`.
    - `place`: `(tokens,)` or `[tokens, top_k]` int32, like `group_ids`: the rows of each token.
    - `first_dims`: `(g,)` int32, the number of rows of each group. Rows of no group are in the tail.
    """

    order: Int[Array, " rows"]
    place: Int[Array, "tokens *top_k"]
    first_dims: Int[Array, " g"]

    @property
    def top_k(self) -> int:
        """Number of groups that each token goes to."""
        return self.place.shape[1] if self.place.ndim == 2 else 1

    def dispatch(self, x: Shaped[AnyArray, "tokens *d"]) -> Rows[Shaped[GroupedTensor, "rows ..."], "g"]:
        """Copies each token's row to the groups it goes to.

        `out.data[i] = x[order[i] // top_k]`: ragged rows `[tokens * top_k, *d]` in the dtype of `x`. Within a group,
        rows are in the order of the tokens. The tail is zero.

        **Raises:** `TypeError` if `x` isn't an array; `ValueError` if it isn't `[tokens, *d]`, and if `jax.vmap` made
        a stack of routes.
        """
        self._check_is_one("dispatch", x=x)
        check_tokens("Route.dispatch(x)", x, self.place.shape[0])
        return self._dispatched(jnp.asarray(x))

    @over_explicit_axes
    def _dispatched(self, x: Shaped[Array, "tokens *d"]) -> GroupedTensor:
        rows = spread_rows(flat_rows(x), *self._indices())
        return GroupedTensor(rows.reshape(rows.shape[0], *x.shape[1:]), first_dims=self.first_dims)

    def gathered(self, x: Shaped[AnyArray, "tokens d"]) -> Gathered:
        """Like `dispatch`, but products read the rows from `x` without a copy: `matmul(route.gathered(x), w)`.

        Results and gradients equal those of `matmul(route.dispatch(x), w)`, bit for bit. Only GPU kernels read rows by
        their index, in the product and in the gradient of `w`. Otherwise, and in a product that XLA partitions over
        several devices, the rows are copied first.

        **Raises:** as `dispatch`, and a `ValueError` if `x` has more than two dims.
        """
        self._check_is_one("gathered", x=x)
        check_tokens("Route.gathered(x)", x, self.place.shape[0], max_ndim=2)
        return self._gathered(jnp.asarray(x))

    @over_explicit_axes
    def _gathered(self, x: Shaped[Array, "tokens d"]) -> Gathered:
        source, places = self._indices()
        return Gathered(x, spread_rows(x, source, places), source, places, self.first_dims)

    def _check_is_one(self, method: str, **operands: Any) -> None:
        """Raises for a stack of routes."""
        if self.order.ndim > 1:
            axes = [0 if getattr(x, "shape", ())[:1] == self.order.shape[:1] else None for x in operands.values()]
            in_axes = f", (0, {', '.join(map(str, axes))})" if None in axes else ""
            names = ", ".join(operands)
            hint = f"Map over it: `jax.vmap(ragged.Route.{method}{in_axes})(route, {names})`."
            problem = f"the route is a stack of routes, of shape {self.order.shape[:-1]}."
            Site(f"Route.{method}({names})", operands).fail(ValueError, problem, hint)

    def _indices(self) -> tuple[Int[Array, " rows"], Int[Array, "tokens top_k"]]:
        """`(source, places)`: the token of each row, and the rows of each token. For rows of no group, both are out of
        range: `tokens` and `rows`."""
        (tokens, *_), rows = self.place.shape, self.order.shape[0]
        in_groups = jnp.sum(self.first_dims, dtype=jnp.int32)  # number of rows before the tail
        source = jnp.where(jnp.arange(rows, dtype=jnp.int32) < in_groups, self.order // self.top_k, tokens)
        return source, jnp.where(self.place < in_groups, self.place, rows).reshape(tokens, self.top_k)

    def combine(self, y: GroupedTensor, weights: Float[AnyArray, "tokens *top_k"] | None = None) -> Array:
        """Sums the rows of each token, in the tokens' order.

        `out[t] = sum_j weights[t, j] * y.data[place[t, j]]`: `[tokens, *d]` in the dtype of `y`, computed in float32
        (float64 for float64, int32 for integers). It is zero for a token of no group.

        **Arguments:**

        - `y`: ragged rows with the rows and groups of `dispatch`'s result. Its tail may hold anything.
        - `weights`: floats in the shape of `group_ids`; by default ones.

        **Raises:** `TypeError` if `y` isn't a `GroupedTensor` or is quantised, and for wrong dtypes; `ValueError` for
        wrong shapes and sizes, and as `dispatch`.
        """
        self._check_is_one("combine", y=y, **({} if weights is None else {"weights": weights}))
        sizes = self.order.shape[0], self.first_dims.shape[0]
        check_combined("Route", y, weights, sizes, self.place.shape, "route.dispatch(x)")
        if known_to_differ(y.first_dims, self.first_dims):
            problem = f"the sizes of `y` differ from the route's, {np.asarray(self.first_dims).tolist()}."
            hint = "Pass `route.dispatch(x)`, or what you computed from it."
            Site("Route.combine(y, weights)", {"y": y}).fail(ValueError, problem, hint)
        return self._combined(y, weights)

    @over_explicit_axes
    def _combined(self, y: GroupedTensor, weights: Float[AnyArray, "tokens *top_k"] | None) -> Array:
        data, (source, places) = flat_rows(jnp.asarray(y.data)), self._indices()
        if weights is None:
            out = collect_rows(data, source, places)
        else:
            weights = jnp.asarray(weights, accumulator_dtype(data.dtype)).reshape(places.shape)
            out = collect_weighted(data, weights, self._weight_index(source, places), places)
        return out.reshape(out.shape[0], *y.shape[1:])

    def _weight_index(self, source: Int[Array, " rows"], places: Int[Array, "tokens top_k"]) -> Int[Array, " rows"]:
        """Each row's index into the flat weights (and group ids); out of range for rows of no group."""
        return jnp.where(source < places.shape[0], self.order, self.order.shape[0])


def check_combined(
    class_name: str,
    y: Any,
    weights: Any,
    sizes: tuple[int, int],
    shape: tuple[int, ...],
    dispatch: str,
    max_ndim: int | None = None,
) -> None:
    """Raises unless `y` has ragged rows, with the `(rows, groups)` in `sizes`, and at most `max_ndim` dims. Raises for
    `weights` that are neither None nor floats of this shape.

    `class_name`: the class whose `combine` is called. `dispatch`: the call that returns such a `y`, for hints.
    """
    site = Site(f"{class_name}.combine(y, weights)", {"y": y} if weights is None else {"y": y, "weights": weights})
    hint = f"Pass `{dispatch}`, or what you computed from it."
    if not isinstance(y, GroupedTensor):
        site.fail(TypeError, "`y` is not a `GroupedTensor`.", hint)
    if y.is_quantized:
        site.fail(TypeError, "`y` is quantised: its buffer means nothing without its scales.", "Pass `y.dequantize()`.")
    if y.kind != "ragged rows" or (y.capacity, y.num_groups) != sizes:
        site.fail(ValueError, f"`y` must have {sizes[0]} ragged rows in {sizes[1]} groups.", hint)
    if max_ndim is not None and y.ndim > max_ndim:
        site.fail(ValueError, f"`y` has {y.ndim} dims, more than {max_ndim}.", "Merge the dims after the rows.")
    if weights is not None:
        if not jnp.issubdtype(y.dtype, jnp.floating):
            site.fail(TypeError, "`weights` and `y` must be floating arrays.", "Cast them, or leave `weights` out.")
        check_weights(site, weights, shape)


def check_tokens(call: str, x: Any, tokens: int, max_ndim: int | None = None) -> None:
    """Raises unless `x` has one row per token, and at most `max_ndim` dims."""
    site, d = Site(call, {"x": x}), "d" if max_ndim == 2 else "*d"
    if not is_arraylike(x):
        site.fail(TypeError, "`x` is not an array.", f"Pass one row per token, as an array [tokens, {d}].")
    if x.ndim < 2 or x.ndim > (max_ndim or x.ndim) or x.shape[0] != tokens:
        problem = f"`x` must be [{tokens}, {d}], one row per token."
        hint = f"The route was made for {tokens} tokens."
        if x.shape == (tokens,):
            hint = "Make each value a row of one: `x[:, None]`."
        elif x.ndim > 2 and math.prod(x.shape[:-1]) == tokens:
            hint = "Flatten its leading axes: `x.reshape(-1, x.shape[-1])`."
        elif x.ndim > 2 and x.shape[0] == tokens:
            hint = "Merge the dims of a row: `x.reshape(x.shape[0], -1)`."
        site.fail(ValueError, problem, hint)


def check_weights(site: Site, weights: Any, shape: tuple[int, ...]) -> None:
    if not is_arraylike(weights) or not jnp.issubdtype(weights.dtype, jnp.floating):
        site.fail(TypeError, "`weights` and `y` must be floating arrays.", "Cast them, or leave `weights` out.")
    if weights.shape != shape:
        problem = f"`weights` must have shape {shape}, but has {weights.shape}."
        hint = "It needs one weight for each of `group_ids`."
        if math.prod(weights.shape) == math.prod(shape):
            hint = f"Flatten the token axes into one: `weights.reshape{shape}`."
        site.fail(ValueError, problem, hint)


def route(group_ids: Int[AnyArray, "tokens *top_k"], num_groups: int) -> Route:
    """Sorts tokens by group: returns the row that each token goes to, and the size of each group.

    The sort is stable: within a group, tokens keep their order.

    **Arguments:**

    - `group_ids`: `(tokens,)` or `[tokens, top_k]` integers, such as the experts chosen for each token. An id outside
      `0 .. num_groups - 1` means "no group": its row goes to the tail, and counts as zero in `combine`.
    - `num_groups`: number of groups, a static int.

    **Returns:** a `Route`, a pytree.

    **Raises:** `TypeError` if `group_ids` aren't integers, `ValueError` for a wrong rank or `num_groups`.

    !!! example
        ```python
        import jax.numpy as jnp
        import ragged
        route = ragged.route(jnp.array([2, 0, 2, 0]), num_groups=3)
        x = route.dispatch(jnp.array([[1.0], [2.0], [3.0], [4.0]]))
        assert route.first_dims.tolist() == [2, 0, 2]
        assert x.data[:, 0].tolist() == [2.0, 4.0, 1.0, 3.0]
        assert route.combine(x)[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
        ```
    """
    site = Site("ragged.route(group_ids, num_groups)", {"group_ids": group_ids})
    if not is_arraylike(group_ids) or not jnp.issubdtype(group_ids.dtype, jnp.integer):
        hint = "Pass the index of each token's group: `jnp.array([0, 2, 1], jnp.int32)`."
        site.fail(TypeError, "`group_ids` must be an integer array.", hint)
    if group_ids.ndim not in (1, 2):
        problem = f"`group_ids` must be (tokens,) or [tokens, top_k], but has {group_ids.ndim} dims."
        hint = "For a single token, add an axis: `group_ids[None]`."
        if group_ids.ndim > 2:
            flat = "`ragged.route(group_ids.reshape(-1, group_ids.shape[-1]), num_groups)`"
            hint = f"Flatten the token axes into one, {flat}, and those of `x` too: `x.reshape(-1, x.shape[-1])`."
        site.fail(ValueError, problem, hint)
    if not is_count(num_groups) or num_groups >= MAX_ROWS:  # The tail is one more group.
        hint = f"It must be a positive int below {MAX_ROWS}, known when tracing."
        site.fail(ValueError, f"`num_groups` is {num_groups!r}.", hint)
    check_packed(site, math.prod(group_ids.shape))
    return _sorted(as_int32(group_ids), int(num_groups))


@over_explicit_axes
def _sorted(group_ids: Int[Array, "tokens *top_k"], num_groups: int) -> Route:
    ids = group_ids.reshape(-1)
    ids = jnp.where((ids >= 0) & (ids < num_groups), ids, num_groups)
    order, place, offsets = _placed(ids, num_groups)
    return Route(order, place.reshape(group_ids.shape), jnp.diff(offsets))


@partial(jax.jit, static_argnums=1)
def _placed(ids: Int[Array, " rows"], groups: int) -> tuple[Array, Array, Array]:
    """`(order, place, offsets)`: the index into `ids` of each row, the row of each id, and `(groups + 1,)` offsets.

    `ids` are in `0 .. groups`; `groups` means "no group".
    """
    by_count, by_sort = (partial(f, groups=groups) for f in (_by_count, _by_sort))
    if isinstance(ids.shape[0], int) and not ids.shape[0]:  # `jax.disable_jit` can't scan over an empty array.
        return by_sort(ids)
    by_count = sequential_vmap(by_count)  # A batched scan would be slower than sorting.
    return lax.platform_dependent(ids, cpu=by_count, default=by_sort)


def _by_count(ids: Int[Array, " rows"], groups: int) -> tuple[Array, Array, Array]:
    """`_placed` by a counting sort, row by row: two to four times as fast as `lax.sort` on a CPU."""
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)
    counts = jnp.zeros(groups + 1, jnp.int32).at[ids].add(1, mode=IN_BOUNDS)[:-1]
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])

    def step(next_row: Int[Array, " all_groups"], group: Int[Array, ""]) -> tuple[Array, Array]:
        return next_row.at[group].add(1), next_row[group]

    _, place = lax.scan(step, vary_together([offsets], [ids])[0], ids)
    return _inverse(place, row), place, offsets


def _by_sort(ids: Int[Array, " rows"], groups: int) -> tuple[Array, Array, Array]:
    """`_placed` by `lax.sort`. Group `i` begins after all ids of at most `i - 1`."""
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)
    ids, order = lax.sort((ids, row), num_keys=1, is_stable=True)
    return order, _inverse(order, row), count_up_to(ids, jnp.arange(-1, groups, dtype=jnp.int32))


def _inverse(permutation: Int[Array, " rows"], row: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """`out[permutation[i]] = i`."""
    return jnp.zeros_like(permutation).at[permutation].set(row, unique_indices=True, mode=IN_BOUNDS)


@over_explicit_axes
def weights_of_rows(x: Route, weights: Float[Array, "tokens *top_k"]) -> Float[Array, " rows"]:
    """The weight of each row, zero for rows of no group."""
    source, places = x._indices()
    index = x._weight_index(source, places)
    return spread_rows(weights.reshape(-1, 1), index, places.reshape(-1, 1))[:, 0]
