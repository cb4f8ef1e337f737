"""`route`: sort rows by group, dispatch, combine.

With `group_ids=[2, 0, 2, 0]` for four tokens `a b c d` and three groups:

    order        [1, 3, 0, 2]      row i of the grouped tensor is token order[i]
    place        [2, 0, 3, 1]      token t stands in row place[t]; one is the other's inverse
    first_dims   [2, 0, 2]
    dispatch     b d | | a c       combine puts them back: a b c d
"""

import math
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Float, Int, Shaped

from ragged._errors import MOST_ROWS, Site, check_packed, is_arraylike, is_concrete, is_count
from ragged._mesh import over_explicit_axes, vary_together
from ragged.backends.schedule import as_int32, count_up_to
from ragged.quant.formats import accumulator_dtype
from ragged.tensor.annotations import Rows
from ragged.tensor.rows import collect_rows, collect_weighted, flat_rows, spread_rows
from ragged.tensor.tensor import GroupedTensor


class Gathered(eqx.Module):
    """What `Route.dispatch` would make of tokens, left where they are. Made by `Route.gathered`.

    Ragged rows `[rows, d]` that `ragged.matmul` and `ragged.gated_matmul` take in place of a `GroupedTensor`.

    **Fields:**

    - `data`: `[tokens, d]`.
    - `rows`: `[rows, d]`, the copy. Under `jit` there is none where no product needs it.
    - `source`: `(rows,)` int32. Row `i` is `data[source[i]]`; those of no group have `tokens`, past the end.
    - `places`: `[tokens, top_k]` int32, the rows of each token; `rows`, past the end, for those of no group.
    - `first_dims`: `(g,)` int32, how many rows each group has.
    """

    data: Shaped[Array, "tokens d"] | Any
    rows: Shaped[Array, "rows d"] | Any
    source: Int[Array, " rows"] | Any
    places: Int[Array, "tokens top_k"] | Any
    first_dims: Int[Array, " g"] | Any

    @property
    def shape(self) -> tuple[int, ...]:
        """`(rows, d)`: that of the dispatched rows."""
        return self.rows.shape

    @property
    def dtype(self) -> Any:
        """The tokens' dtype."""
        return self.data.dtype

    @property
    def num_groups(self) -> int:
        """How many groups there are, empty ones included."""
        return self.first_dims.shape[-1]

    def dispatch(self) -> Rows[Shaped[GroupedTensor, "rows ..."], "g"]:
        """The copy, which is what `Route.dispatch` returns."""
        return GroupedTensor(self.rows, first_dims=self.first_dims)

    @over_explicit_axes
    def _replace_data(self, data: Array) -> "Gathered":
        rows = spread_rows(data, self.source, self.places)
        return Gathered(data, rows, self.source, self.places, self.first_dims)


class Route(eqx.Module):
    """Which row of a ragged-rows tensor each token goes to. Made by `ragged.route`.

    **Fields:**

    - `order`: `(rows,)` int32, where `rows = tokens * top_k`. Row `i` holds token `order[i] // top_k`.
    - `place`: `(tokens,)` or `[tokens, top_k]` int32, as `group_ids` was. The row where each token stands.
    - `first_dims`: `(g,)` int32, how many rows each group got. What went to no group stands behind them, in the tail.
    """

    order: Int[Array, " rows"] | Any
    place: Int[Array, "tokens *top_k"] | Any
    first_dims: Int[Array, " g"] | Any

    @property
    def top_k(self) -> int:
        """To how many groups each token goes."""
        return self.place.shape[1] if self.place.ndim == 2 else 1

    def dispatch(self, x: Shaped[Array, "tokens *d"] | Any) -> Rows[Shaped[GroupedTensor, "rows ..."], "g"]:
        """Copies each token's row to the groups it goes to.

        `out.data[i] = x[order[i] // top_k]`: ragged rows `[tokens * top_k, *d]` of `x`'s dtype, within a group in the
        order of the tokens, and zero in the tail. The gradient is a gather and a sum over `top_k`.

        **Raises:** `TypeError` if `x` is no array, `ValueError` if it is not `[tokens, *d]`.
        """
        check_tokens("Route.dispatch(x)", x, self.place.shape[0])
        return self._dispatched(jnp.asarray(x))

    @over_explicit_axes
    def _dispatched(self, x: Shaped[Array, "tokens *d"]) -> GroupedTensor:
        rows = spread_rows(flat_rows(x), *self._indices())
        return GroupedTensor(rows.reshape(rows.shape[0], *x.shape[1:]), first_dims=self.first_dims)

    def gathered(self, x: Shaped[Array, "tokens d"] | Any) -> Gathered:
        """`dispatch`, for products that read rows where they are: `matmul(route.gathered(x), w)`.

        The numbers and gradients of `matmul(route.dispatch(x), w)`, bit for bit. GPU kernels read each row through the
        route's order, in the product and in its derivative by `w`, so that there is no copy of `x` for each of
        `top_k`. Elsewhere, and where several devices share a product that isn't mapped, the rows are copied first.

        **Raises:** as `dispatch` does, and for more than two dims.
        """
        check_tokens("Route.gathered(x)", x, self.place.shape[0], most=2)
        return self._gathered(jnp.asarray(x))

    @over_explicit_axes
    def _gathered(self, x: Shaped[Array, "tokens d"]) -> Gathered:
        source, places = self._indices()
        return Gathered(x, spread_rows(x, source, places), source, places, self.first_dims)

    def _indices(self) -> tuple[Int[Array, " rows"], Int[Array, "tokens top_k"]]:
        """The token of each row, and the rows of each token; past the end for rows of no group."""
        (tokens, *_), rows = self.place.shape, self.order.shape[0]
        held = jnp.sum(self.first_dims, dtype=jnp.int32)
        source = jnp.where(jnp.arange(rows, dtype=jnp.int32) < held, self.order // self.top_k, tokens)
        return source, jnp.where(self.place < held, self.place, rows).reshape(tokens, self.top_k)

    def combine(self, y: GroupedTensor | Any, weights: Float[Array, "tokens *top_k"] | Any = None) -> Array:
        """Puts each token's rows back and sums them.

        `out[t] = sum_j weights[t, j] * y.data[place[t, j]]`: `[tokens, *d]` of `y`'s dtype, computed in float32
        (float64 for float64, int32 for integers). A token that went to no group gets zero. Without `weights` they are
        one.

        **Arguments:**

        - `y`: ragged rows, as many as `dispatch` made and in the same groups. Its tail may hold anything.
        - `weights`: a float for each of `group_ids`, in its shape. For ids that are no group it may be anything.

        **Raises:** `TypeError` if `y` is no `GroupedTensor`, or for dtypes; `ValueError` for shapes and sizes.
        """
        sizes = self.order.shape[0], self.first_dims.shape[0]
        check_combined("Route", y, weights, sizes, self.place.shape, "route.dispatch(x)")
        if is_concrete(y.first_dims, self.first_dims) and not np.array_equal(y.first_dims, self.first_dims):
            problem = f"the sizes of `y` are not the route's, {np.asarray(self.first_dims).tolist()}."
            mend = "Pass what became of `route.dispatch(x)`."
            Site("Route.combine(y, weights)", {"y": y}).fail(ValueError, problem, mend)
        return self._combined(y, weights)

    @over_explicit_axes
    def _combined(self, y: GroupedTensor, weights: Float[Array, "tokens *top_k"] | Any) -> Array:
        data, (source, places) = flat_rows(jnp.asarray(y.data)), self._indices()
        if weights is None:
            out = collect_rows(data, source, places)
        else:
            weights = jnp.asarray(weights, accumulator_dtype(data.dtype)).reshape(places.shape)
            out = collect_weighted(data, weights, self._which(source, places), places)
        return out.reshape(out.shape[0], *y.shape[1:])

    def _which(self, source: Int[Array, " rows"], places: Int[Array, "tokens top_k"]) -> Int[Array, " rows"]:
        """Of each row, which of the group ids it is of, counted along tokens; past the end for rows of no group."""
        return jnp.where(source < places.shape[0], self.order, self.order.shape[0])

    @over_explicit_axes
    def _of_rows(self, weights: Float[Array, "tokens *top_k"]) -> Float[Array, " rows"]:
        """The weight of each row, zero for rows of no group."""
        source, places = self._indices()
        which = self._which(source, places)
        return spread_rows(weights.reshape(-1, 1), which, places.reshape(-1, 1))[:, 0]


def check_combined(
    of: str,
    y: Any,
    weights: Any,
    sizes: tuple[int, int],
    shape: tuple[int, ...],
    made_by: str,
    most: int | None = None,
) -> None:
    """Raises unless `y` has these many rows and groups, and `weights`, if any, one value for each of `shape`.

    `most`: how many dims `y` may have.
    """
    site = Site(f"{of}.combine(y, weights)", {"y": y} if weights is None else {"y": y, "weights": weights})
    mend = f"Pass what became of `{made_by}`."
    if not isinstance(y, GroupedTensor):
        site.fail(TypeError, "`y` is not a `GroupedTensor`.", mend)
    if y.kind != "ragged rows" or (y.capacity, y.num_groups) != sizes:
        site.fail(ValueError, f"`y` must have ragged rows, {sizes[0]} of them in {sizes[1]} groups.", mend)
    if most is not None and y.ndim > most:
        site.fail(ValueError, f"`y` has {y.ndim} dims, more than {most}.", "Merge those after the rows.")
    if weights is not None:
        if not jnp.issubdtype(y.dtype, jnp.floating):
            site.fail(TypeError, "`weights` and `y` must be floating arrays.", "Cast them, or leave `weights` out.")
        check_weights(site, weights, shape)


def check_tokens(call: str, x: Any, tokens: int, most: int | None = None) -> None:
    """Raises unless `x` has a row for each token, and `most` dims or fewer."""
    site, d = Site(call, {"x": x}), "d" if most == 2 else "*d"
    if not is_arraylike(x):
        site.fail(TypeError, "`x` is not an array.", f"Pass one row a token, as an array [tokens, {d}].")
    if x.ndim < 2 or x.ndim > (most or x.ndim) or x.shape[0] != tokens:
        problem = f"`x` must be [{tokens}, {d}], one row a token."
        mend = "One value a token is a row of one: `x[:, None]`." if x.shape == (tokens,) else ""
        site.fail(ValueError, problem, mend or f"The route was made for {tokens} tokens.")


def check_weights(site: Site, weights: Any, shape: tuple[int, ...]) -> None:
    """Raises unless there is a float for each of the group ids, which have this shape."""
    if not is_arraylike(weights) or not jnp.issubdtype(weights.dtype, jnp.floating):
        site.fail(TypeError, "`weights` and `y` must be floating arrays.", "Cast them, or leave `weights` out.")
    if weights.shape != shape:
        problem = f"`weights` must have shape {shape}, but has {weights.shape}."
        site.fail(ValueError, problem, "It needs one weight for each of `group_ids`.")


def route(group_ids: Int[Array, "tokens *top_k"] | Any, num_groups: int | Any) -> Route:
    """Sorts rows by group: where each token goes, and how many each group gets.

    The sort is stable: within a group, tokens keep their order. For a mixture of experts, `group_ids` are the experts
    that the router chose for each token.

    **Arguments:**

    - `group_ids`: `(tokens,)` or `[tokens, top_k]` integers. An id outside `0 .. num_groups - 1` means "to no group":
      that row goes to the tail, and counts as zero when combined.
    - `num_groups`: how many groups there are, a static int.

    **Returns:** a `Route`, a pytree: `route.dispatch(x)` makes the `GroupedTensor`, `route.combine(y)` undoes it.

    **Raises:** `TypeError` if `group_ids` are not integers, `ValueError` for their rank and for `num_groups`.

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
        site.fail(TypeError, "`group_ids` must be an integer array.", "Pass the index of each token's group, int32.")
    if group_ids.ndim not in (1, 2):
        problem = f"`group_ids` must be (tokens,) or [tokens, top_k], but has {group_ids.ndim} dims."
        site.fail(ValueError, problem, "Flatten the tokens' axes into one, those of `x` too.")
    if not is_count(num_groups) or num_groups >= MOST_ROWS:  # the tail counts as one more
        mend = f"It must be a positive int below {MOST_ROWS}, known when tracing."
        site.fail(ValueError, f"`num_groups` is {num_groups!r}.", mend)
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
    """Which of `ids` (0 .. groups) stands in each row, the row of each, and where the groups begin: `(groups + 1,)`."""
    by_count, by_sort = (partial(f, groups=groups) for f in (_by_count, _by_sort))
    if isinstance(ids.shape[0], int) and not ids.shape[0]:  # `jax.disable_jit` has no scan of nothing
        return by_sort(ids)
    by_count = sequential_vmap(by_count)  # of scalars: a loop of small arrays is slower than to sort
    return lax.platform_dependent(ids, cpu=by_count, default=by_sort)


def _by_count(ids: Int[Array, " rows"], groups: int) -> tuple[Array, Array, Array]:
    """A counting sort, one row after another: on a CPU two to four times as fast as `lax.sort`."""
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)
    counts = jnp.zeros(groups, jnp.int32).at[ids].add(1, mode="drop")
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])

    def step(free: Int[Array, " all_groups"], group: Int[Array, ""]) -> tuple[Array, Array]:
        return free.at[group].add(1), free[group]

    _, place = lax.scan(step, vary_together([offsets], [ids])[0], ids)
    return _inverse(place, row), place, offsets


def _by_sort(ids: Int[Array, " rows"], groups: int) -> tuple[Array, Array, Array]:
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)
    ids, order = lax.sort((ids, row), num_keys=1, is_stable=True)
    return order, _inverse(order, row), count_up_to(ids, jnp.arange(-1, groups, dtype=jnp.int32))


def _inverse(permutation: Int[Array, " rows"], row: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """`out[permutation[i]] = i`."""
    return jnp.zeros_like(permutation).at[permutation].set(row, unique_indices=True, mode="promise_in_bounds")
