"""`exchange`: the rows of a route go to the devices that hold their groups, and back, for expert parallelism.

Inside `jax.shard_map`, over one mesh axis of `n` devices. Device `d` holds the groups `d * g // n, ...`, as
`P("expert")` shards an array `[g, ...]`. With two devices, four groups and a route on each:

    device                  0                        1
    rows by group           0: a b  1: c  2: d  3:   0: e  1:  2: f  3: g h
    sent to 0 | to 1        a b c | d                e | f g h
    what came (`dispatch`)  0: a b e  1: c           2: d f  3: g h

Within a group the rows stand in the order of the devices that they came from, and of their tokens.

Rows travel in slots: each device has as many for each other one as it may send, the first ones full.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Shaped

from ragged._errors import Site, is_count
from ragged._mesh import explicit_spec, over_manual_axes, refuse_explicit, vary_together
from ragged.backends import schedule
from ragged.quant.formats import accumulator_dtype
from ragged.quant.quantize import quantize
from ragged.quant.recipe import Cast, Recipe
from ragged.tensor.annotations import Rows
from ragged.tensor.route import Route, check_combined, check_tokens, check_weights, route
from ragged.tensor.rows import collect_rows, collect_weighted, spread_rows
from ragged.tensor.tensor import GroupedTensor

TRANSPORTS = ("dense", "ragged", "ring")


class Exchange(eqx.Module):
    """Where the rows of all devices' routes go. Made by `ragged.exchange`, on each device its own.

    **Fields:**

    - `sizes`: `(g / n,)` int32, the rows of each of this device's groups, from all devices.
    - `dropped`: `()` int32, how many of this device's own rows had no room.
    """

    sizes: Int[Array, " held"]
    dropped: Int[Array, ""]
    _slots: Int[Array, "tokens top_k"]  # of each token's rows; past the last for what goes nowhere
    _rows: Int[Array, " slots"]  # which of the tokens' rows, `token * top_k + j`, is in each slot; past the last: none
    _sent: Int[Array, " n"]  # how many rows go to each device, and come from it
    _came: Int[Array, " n"]
    _places: Int[Array, " slots"]  # in the buffer, of what comes in each slot; past the last for none
    _order: Int[Array, " slots"]  # the slot of each row of the buffer
    _chunks: tuple["Exchange", ...]  # of some of the tokens each, one after another; none: of all at once
    _shape: tuple[int, ...] = eqx.field(static=True)  # of the group ids
    _axis: str = eqx.field(static=True)
    _transport: str = eqx.field(static=True)
    _wire: Cast | None = eqx.field(static=True)

    @property
    def capacity(self) -> int:
        """The rows that this device has room for."""
        return self._rows.shape[0]

    @property
    def _tokens(self) -> tuple[Int[Array, " slots"], Int[Array, "tokens top_k"]]:
        """The token in each slot, and the slots of each token: for `spread_rows`."""
        return self._rows // self._slots.shape[1], self._slots

    @property
    def _arrangement(self) -> tuple[Int[Array, " slots"], Int[Array, "slots 1"]]:
        """Of the buffer, from the slots."""
        return self._order, self._places[:, None]

    def dispatch(self, x: Shaped[Array, "tokens d"] | Any) -> Rows[Shaped[GroupedTensor, "capacity ..."], "g"]:
        """Sends each token's row to the devices that hold the groups it goes to.

        **Returns:** ragged rows `[capacity, d]` of `x`'s dtype: this device's groups, zeros in the tail. Its gradient
        sums over a token's rows in float32.

        **Raises:** `TypeError` if `x` is no array, `ValueError` if it is not `[tokens, d]`.
        """
        return GroupedTensor(_dispatched(self._checked(x, "Exchange.dispatch(x)"), self), self.sizes)

    def _checked(self, x: Shaped[Array, "tokens d"] | Any, call: str) -> Shaped[Array, "tokens d"]:
        check_tokens(call, x, self._shape[0], most=2)
        x = jnp.asarray(x)
        if any((explicit_spec(x) or P())[:1]):
            refuse_explicit(call, x=x)
        return x

    def _travelled(self, x: Shaped[Array, "tokens d"]) -> Shaped[Array, "slots d"]:
        """The rows of this device's groups, of any dtype."""
        if self._transport == "ring":
            return spread_rows(self._gathered(x), *self._of_all()[:2])
        return spread_rows(self._moved(spread_rows(x, *self._tokens)), *self._arrangement)

    def combine(self, y: GroupedTensor | Any, weights: Float[Array, "tokens *top_k"] | Any = None) -> Array:
        """Sends rows back to where they came from and sums each token's: `[tokens, d]` of `y`'s dtype.

        As `Route.combine`, in float32, over what wasn't dropped.

        **Raises:** `TypeError` if `y` is no `GroupedTensor`, or for dtypes; `ValueError` for shapes and sizes.
        """
        groups, made_by = self.sizes.shape[0], "exchange.dispatch(x)"
        check_combined("Exchange", y, weights, (self.capacity, groups), self._shape, made_by, most=2)
        data = jnp.asarray(y.data)
        wide = accumulator_dtype(data.dtype)
        weights = None if weights is None else weights.astype(wide).reshape(-1, 1)  # [tokens * top_k, 1]
        if self._transport == "ring":
            source, places, rows = self._of_all()
            each = data.astype(wide)
            if weights is not None:
                each = each * spread_rows(self._gathered(weights), rows, places.reshape(-1, 1))
            summed = partial(lax.psum_scatter, axis_name=self._axis, tiled=True)
            return over_manual_axes(summed, collect_rows(each, source, places)).astype(data.dtype)
        back = self._moved(collect_rows(data, *self._arrangement), back=True)
        if weights is None:
            return collect_rows(back, *self._tokens)
        return collect_weighted(back, weights.reshape(self._slots.shape), self._rows, self._slots)

    def map(
        self,
        function: Callable[[GroupedTensor], GroupedTensor] | Any,
        x: Shaped[Array, "tokens d"] | Any,
        weights: Float[Array, "tokens *top_k"] | Any = None,
    ) -> Array:
        """`combine(function(dispatch(x)), weights)`, where `function` treats rows apart from each other.

        With `chunks`, one chunk of the tokens after another: the rows of one travel while `function` is at another's.
        The numbers are the same, but that the gradients of what `function` holds, such as matrices, are added up over
        chunks. On one device nothing travels, and there is one chunk.

        **Raises:** as `dispatch` and `combine` do; with chunks also `ValueError` if `function` is a pytree with an
        unsealed recipe: the largest values of chunks would be added up. In what else `function` holds it can't be seen.
        """
        if not self._chunks:
            return self.combine(function(self.dispatch(x)), weights)
        site, recipes = Site("Exchange.map(function, x, weights)"), jax.tree.leaves(function, is_leaf=_is_recipe)
        x = self._checked(x, site.call)
        if any(_is_recipe(each) and eqx.is_inexact_array(each.state) for each in recipes):
            problem = f"`function` has an unsealed recipe, whose next history would be the sum of {len(self._chunks)}."
            site.fail(ValueError, problem, "Take one chunk, or a recipe without a history.")
        of_tokens: list[Any] = [None] * len(self._chunks)
        ends = np.cumsum([chunk._shape[0] for chunk in self._chunks])[:-1]
        if weights is not None:
            check_weights(site.also(weights=weights), weights, self._shape)
            of_tokens = jnp.split(weights, ends)
        # All set out before the first `function` begins, which waits for its own rows only.
        rows = [chunk.dispatch(part) for chunk, part in zip(self._chunks, jnp.split(x, ends), strict=True)]
        back = zip(self._chunks, rows, of_tokens, strict=True)
        return jnp.concatenate([chunk.combine(function(each), part) for chunk, each, part in back])

    def _moved(self, slots: Array, back: bool = False) -> Array:
        """What comes from each device, of what goes to each."""
        if self._transport == "dense":
            return lax.all_to_all(slots, self._axis, 0, 0, tiled=True)
        n, sent, came = self._sent.shape[0], self._sent, self._came
        sent, came = (came, sent) if back else (sent, came)
        each = self.capacity // n
        firsts = jnp.arange(n, dtype=jnp.int32) * each + 0 * sent  # JAX maps sizes and offsets together
        mine = lax.axis_index(self._axis) * each + 0 * sent
        operands = vary_together([slots, jnp.zeros_like(slots), firsts, sent, mine, came])
        return lax.ragged_all_to_all(*operands, axis_name=self._axis)

    def _gathered(self, x: Array) -> Array:
        """The rows of all devices, one device's after another's."""
        x, _ = vary_together([x, lax.axis_index(self._axis)])
        return over_manual_axes(partial(lax.all_gather, axis_name=self._axis, tiled=True), x)

    def _of_all(self) -> tuple[Int[Array, " slots"], Int[Array, "all_tokens top_k"], Int[Array, " slots"]]:
        """Among all devices' tokens: that of each row of the buffer; the rows of each token; and of each row of the
        buffer, which of the tokens' rows it is."""
        (tokens, top_k), n, each = self._slots.shape, self._sent.shape[0], self.capacity // self._sent.shape[0]
        rows = lax.all_to_all(self._rows, self._axis, 0, 0, tiled=True)  # (slots,) as they come
        device = jnp.arange(self.capacity, dtype=jnp.int32) // each
        rows = jnp.where(rows < tokens * top_k, rows + device * tokens * top_k, n * tokens * top_k)
        rows = spread_rows(rows[:, None], *self._arrangement)[:, 0]
        filled = jnp.arange(self.capacity, dtype=jnp.int32) < jnp.sum(self.sizes, dtype=jnp.int32)
        rows = jnp.where(filled, rows, n * tokens * top_k)
        slots = self._gathered(self._slots)  # [n * tokens, top_k]
        device = jnp.arange(n * tokens, dtype=jnp.int32)[:, None] // tokens
        is_here = (slots < self.capacity) & (slots // each == lax.axis_index(self._axis))
        places = self._places[jnp.where(is_here, device * each + slots % each, 0)]
        return rows // top_k, jnp.where(is_here, places, self.capacity), rows


def _is_recipe(x: Any) -> bool:
    return isinstance(x, Recipe)


@jax.custom_jvp
def _dispatched(x: Shaped[Array, "tokens d"], exchange: Exchange) -> Shaped[Array, "slots d"]:
    if exchange._wire is None:
        return exchange._travelled(x)
    how: Any = exchange._wire
    sent = quantize(x[None], how.dtype, how.scaling, power_of_two=how.power_of_two)
    data, scales = (_as_bytes(z[0]) for z in (sent.data, sent.scales))  # [tokens, bytes] both
    came = jnp.split(exchange._travelled(jnp.concatenate([data, scales], axis=1)), [data.shape[1]], axis=1)
    data, scales = (_from_bytes(z, like)[None] for z, like in zip(came, (sent.data, sent.scales), strict=True))
    return sent._with(data=data, scales=scales).dequantize().data[0].astype(x.dtype)


@_dispatched.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The derivative is of rows that aren't quantised. That of `"ring"` is in float32, for its transpose is a sum."""
    (x, exchange), dx = primals, tangents[0]
    wide = accumulator_dtype(dx.dtype) if exchange._transport == "ring" else dx.dtype
    return _dispatched(x, exchange), exchange._travelled(dx.astype(wide)).astype(dx.dtype)


def _as_bytes(x: Shaped[Array, "rows d"]) -> Shaped[Array, "rows bytes"]:
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], x.shape[1] * x.dtype.itemsize)


def _from_bytes(x: Shaped[Array, "rows bytes"], like: Any) -> Shaped[Array, "rows d"]:
    size = like.dtype.itemsize
    return lax.bitcast_convert_type(x if size == 1 else x.reshape(x.shape[0], x.shape[1] // size, size), like.dtype)


def exchange(
    route: Route | Any,
    axis: str | Any = "expert",
    transport: str | Any = None,
    capacity: int | Any = None,
    chunks: int | Any = 1,
    wire: str | Cast | Any = None,
) -> Exchange:
    """Prepares to send rows to the devices that hold their groups. Inside `jax.shard_map`, on every device of `axis`.

    Device `d` of `n` holds the groups `d * g // n` to `(d + 1) * g // n - 1`, as `PartitionSpec(axis)` gives it their
    matrices. What is communicated at once is how many rows each group gets from each device: `(g,)` int32 a device.

    **Arguments:**

    - `route`: of this device's tokens to all `g` groups, which `n` must divide.
    - `axis`: the name of the mesh axis.
    - `transport`: how rows travel. The numbers are the same, but for the order in which a token's rows are added up.
      `"dense"`: `lax.all_to_all` of all slots, full or not: `capacity` rows a device. `"ragged"`:
      `lax.ragged_all_to_all` of the full ones, on TPUs and GPUs. `"ring"`: all devices' tokens to every device, which
      takes its own: `n * tokens` rows; back, a sum in parts, in float32. None is `"ragged"` where it runs, else
      `"dense"`.
    - `capacity`: the rows that each device has room for, a static int. By default the worst case, `n` times a device's
      rows: then nothing is ever dropped. A device may send `capacity // n` rows to each other one; of more, those of
      its first tokens go, and `dropped` counts the rest, which count as zero when they are combined.
    - `chunks`: into how many parts `ex.map` cuts this device's tokens, so that exchanges and products overlap. Each has
      its share of the capacity: of each chunk's rows, `capacity // n // chunks` may go to each device.
    - `wire`: how dispatched rows travel, if not as they are: a `Cast` with a scale a row or finer, or the name of a
      recipe, `"mxfp8"`, `"blockwise"` or `"rowwise"`, for its cast of `x`. What comes is
      `quantize(x, ...).dequantize()` in `x`'s dtype, with the error that `ragged.quantize` states. What is combined,
      and derivatives, travel as they are.

    **Returns:** an `Exchange`: `ex.dispatch(x)` is this device's part of what `route.dispatch(x)` would be of all
    tokens, `ex.combine(y, weights)` sends it back.

    **Raises:** `TypeError` if `route` is no `Route`, `ValueError` outside of a `shard_map` over the axis, and for
    groups, transports, capacities, chunks and scalings.
    """
    site = Site("ragged.exchange(route, axis)", {"route": route, "axis": axis})
    if not isinstance(route, Route):
        site.fail(TypeError, "`route` is not a `Route`.", "Pass `ragged.route(group_ids, num_groups)`.")
    refuse_explicit(site.call, route=route)
    try:
        n = lax.axis_size(axis)
    except (NameError, TypeError, ValueError):
        mend = "Call it inside `jax.shard_map(..., axis_names={axis})`, on what each device has."
        site.fail(ValueError, f"there is no mesh axis {axis!r} here to exchange over.", mend)
    groups, rows = route.first_dims.shape[0], route.order.shape[0]
    if groups % n:
        mend = "Each device holds as many groups: add empty ones, or take another axis."
        site.fail(ValueError, f"{n} devices over {axis!r} don't divide {groups} groups.", mend)
    if transport is None:
        transport = "dense" if _platform() == "cpu" else "ragged"
    if transport not in TRANSPORTS:
        site.fail(ValueError, f"`transport` is {transport!r}.", f"Pass one of {', '.join(TRANSPORTS)}, or None.")
    if capacity is not None and (not is_count(capacity) or capacity < n):
        mend = f"Pass at least {n}, one row from each device, as a static int, or None for the worst case."
        site.fail(ValueError, f"`capacity` is {capacity!r}.", mend)
    if not rows:
        transport = "dense"  # XLA gathers no empty arrays
    tokens = route.place.shape[0]
    if not is_count(chunks) or chunks > max(tokens, 1):
        mend = f"Pass a static int, at most the {tokens} tokens of a device."
        site.fail(ValueError, f"`chunks` is {chunks!r}.", mend)
    chunks = 1 if n == 1 else int(chunks)
    if capacity is not None and capacity < n * chunks:
        mend = f"Pass at least {n * chunks}, one row from each device in each chunk."
        site.fail(ValueError, f"`capacity` is {capacity!r}, with {chunks} chunks.", mend)
    each = rows if capacity is None else int(capacity) // n // chunks  # of one chunk
    ends = [tokens * i // chunks for i in range(chunks + 1)]
    options = axis, n, transport, None if wire is None else wire_cast(site, wire)
    kept = _with_room(route, n, each, ends) if each < rows else route
    dropped, route = jnp.sum(route.first_dims - kept.first_dims, dtype=jnp.int32), kept
    parts = [_of_tokens(route, slice(*pair)) for pair in itertools.pairwise(ends)] if chunks > 1 else []
    none = jnp.zeros((), jnp.int32)
    in_chunks = tuple(_prepared(part, min(each, part.order.shape[0]), none, (), *options) for part in parts)
    return _prepared(route, min(each * chunks, rows), dropped, in_chunks, *options)


def wire_cast(site: Site, wire: str | Cast | Any) -> Cast:
    """How rows travel."""
    how = wire if isinstance(wire, Cast) else Recipe.of(wire, site).forward[0]
    if how.dtype is None or how.dtype in ("int4", "float4_e2m1fn"):
        site.fail(ValueError, f"`wire` has no dtype of 8 bits: {how!r}.", "Pass `ragged.Cast('float8_e4m3fn', 'row')`.")
    if how.scaling.block is None or how.scaling.block[0] != 1 or how.scaling._has_tensor_scale:
        mend = "Each row must have scales of its own: `(1, 128)`, `'row'`, `'mx'`."
        site.fail(ValueError, f"`wire` has the scaling {how.scaling}.", mend)
    return how


def _platform() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.platform if device is not None and device.platform else None) or jax.default_backend()


def _prepared(
    routed: Route,
    each: int,
    dropped: Array,
    chunks: tuple[Exchange, ...],
    axis: str,
    n: int,
    transport: str,
    wire: Cast | None,
) -> Exchange:
    """`each`: slots of a device for each other one, enough."""
    place = routed.place.reshape(routed.place.shape[0], routed.top_k)
    (tokens, top_k), groups = place.shape, routed.first_dims.shape[0]
    rows, held = tokens * top_k, groups // n
    me, counts = lax.axis_index(axis), routed.first_dims
    counts, _ = vary_together([counts, me])

    # 1. Slots of this device's rows: (n, each), the rows to one device side by side.
    starts = schedule.group_offsets(counts, rows)  # (g + 1,)
    device = schedule.group_ids(starts, rows) // held  # (rows,) by group; n in the tail
    first = starts[::held]  # (n + 1,)
    row = jnp.arange(rows, dtype=jnp.int32)
    slot = jnp.where(device < n, device * each + row - first[device], n * each)
    sent = jnp.diff(first)
    index = jnp.arange(each, dtype=jnp.int32)[None]  # [1, each]
    taken = jnp.minimum(first[:-1, None] + index, max(rows - 1, 0))  # [n, each]
    of_slot = jnp.where(index < sent[:, None], routed.order[taken] if rows else taken, rows).reshape(-1)

    # 2. The rows that come: of each device, those of this device's groups.
    came = lax.dynamic_slice_in_dim(lax.all_gather(counts, axis), me * held, held, axis=1)  # [n, held]
    sizes = jnp.sum(came, axis=0, dtype=jnp.int32)
    begin = jnp.cumsum(came, axis=1, dtype=jnp.int32) - came  # in the slots of a device
    group = jnp.sum(index[..., None] >= (begin + came)[:, None, :], axis=2, dtype=jnp.int32)  # [n, each]
    is_full, group = group < held, jnp.minimum(group, held - 1)
    base = (jnp.cumsum(sizes, dtype=jnp.int32) - sizes)[None] + jnp.cumsum(came, axis=0, dtype=jnp.int32) - came - begin
    place_of = jnp.take_along_axis(base, group, axis=1) + index
    place_of = jnp.where(is_full, place_of, n * each).reshape(-1)
    order = jnp.full(n * each, n * each, jnp.int32)
    order = order.at[place_of].set(jnp.arange(n * each, dtype=jnp.int32), mode="drop")
    return Exchange(
        sizes=sizes,
        dropped=dropped,
        _slots=slot[place] if rows else place,
        _rows=of_slot,
        _sent=sent,
        _came=jnp.sum(came, axis=1, dtype=jnp.int32),
        _places=place_of,
        _order=order,
        _chunks=chunks,
        _shape=routed.place.shape,
        _axis=axis,
        _transport=transport,
        _wire=wire,
    )


def _ids(routed: Route) -> Int[Array, "tokens *top_k"]:
    """The groups that a route is of; as many as there are groups for none."""
    rows = routed.order.shape[0]
    return schedule.group_ids(schedule.group_offsets(routed.first_dims, rows), rows)[routed.place]


def _of_tokens(routed: Route, tokens: slice) -> Route:
    return route(_ids(routed)[tokens], routed.first_dims.shape[0])


def _with_room(routed: Route, n: int, each: int, ends: Sequence[int]) -> Route:
    """The same without the rows that have no slot: of a chunk's to one device, all but the first tokens' `each`.

    `ends`: where chunks of tokens begin and end.
    """
    groups, rows, chunks, ids = routed.first_dims.shape[0], routed.order.shape[0], len(ends) - 1, _ids(routed)
    chunk = jnp.asarray(np.repeat(np.arange(chunks, dtype=np.int32), np.diff(ends)))  # (tokens,)
    chunk = chunk.reshape(-1, *[1] * (ids.ndim - 1))
    to = jnp.where(ids < groups, chunk * n + ids // (groups // n), chunks * n)
    in_order = route(to, chunks * n)  # of tokens
    rank = in_order.place - schedule.group_offsets(in_order.first_dims, rows)[to]
    return route(jnp.where(rank < each, ids, groups), groups)
