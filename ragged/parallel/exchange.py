"""`exchange`: sends the rows of a route to the devices that have their groups, and back, for expert parallelism.

With two devices, four groups and a route on each device:

    device                  0                        1
    rows by group           0: a b  1: c  2: d  3:   0: e  1:  2: f  3: g h
    sent to 0 | to 1        a b c | d                e | f g h
    received (`dispatch`)   0: a b e  1: c           2: d f  3: g h

Within a group, rows are sorted by the device that sent them, then by token.

All devices know how many rows each device has of each group. So every transport computes the same ranges, one for each
sender and group: where the sender's rows of the group begin among all its rows, where they begin in the buffer of the
group's device, and how many of them the capacity admits. The admitted rows are always the first ones.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Shaped

from ragged.core.errors import Site, is_count
from ragged.core.formats import AnyArray, accumulator_dtype, bits
from ragged.core.mesh import check_not_explicit, explicit_spec, over_manual_axes, vary_together
from ragged.core.offsets import count_up_to, group_ids, group_offsets, take
from ragged.core.rows import collect_rows, collect_weighted, spread_rows, tangent_of
from ragged.quant.quantize import quantize
from ragged.quant.recipe import Cast, Recipe
from ragged.tensor.annotations import Rows
from ragged.tensor.base import with_fields
from ragged.tensor.route import Route, check_combined, check_tokens, check_weights
from ragged.tensor.route import route as route_of
from ragged.tensor.tensor import GroupedTensor

TRANSPORTS = ("dense", "ragged", "ring")


class Exchange(eqx.Module):
    """How a device exchanges the rows of a route with others. Returned by `ragged.exchange`. Values differ by device.

    **Fields:**

    - `sizes`: `(g / n,)` int32, the number of rows, from all devices, of each of this device's groups.
    - `dropped`: `()` int32, how many of this device's rows exceeded the capacity, and aren't sent.
    - `capacity`: number of rows in this device's buffer.
    """

    sizes: Int[Array, " local"]
    dropped: Int[Array, ""]
    capacity: int = eqx.field(static=True)
    # The gather from tokens to sent rows: row `i` is for place `j` of `token`, where `_rows[i] = token * top_k + j`.
    # `_places[token, j]` is `i`: a row of the route (`"ragged"`), a slot (`"dense"`), or a row of this device's buffer
    # (`"ring"`). With `"ring"`, tokens of all devices are numbered. Places without a row have an index out of range.
    _rows: Int[Array, " sent"]
    _places: Int[Array, "tokens top_k"]
    # `"dense"`: the received slot of each row of the buffer, and the row of each slot. `"ragged"`: three arrays for the
    # ranges of rows to send, then three for received rows: begin here, begin on the other device, number of rows.
    _moves: tuple[Int[Array, "..."], ...]
    _chunks: tuple["Exchange", ...]  # one exchange for each chunk of tokens; empty without chunks
    _shape: tuple[int, ...] = eqx.field(static=True)  # the shape of the group ids
    _axis: str = eqx.field(static=True)
    _transport: str = eqx.field(static=True)
    _wire: Cast | None = eqx.field(static=True)

    @property
    def _indices(self) -> tuple[Int[Array, " sent"], Int[Array, "tokens top_k"]]:
        """`(source, places)` of the gather from tokens to the rows that are sent."""
        return self._rows // self._places.shape[1], self._places

    def dispatch(self, x: Shaped[AnyArray, "tokens d"]) -> Rows[Shaped[GroupedTensor, "capacity ..."], "g"]:
        """Sends each token's row to the devices that have the token's groups.

        **Returns:** ragged rows `[capacity, d]` in the dtype of `x`: this device's groups, and zeros in the tail.

        **Raises:** `TypeError` if `x` isn't an array, `ValueError` if it isn't `[tokens, d]`.
        """
        return GroupedTensor(_dispatched(self._checked(x, "Exchange.dispatch(x)"), self), self.sizes)

    def _checked(self, x: Shaped[AnyArray, "tokens d"], call: str) -> Shaped[Array, "tokens d"]:
        """`x` as an array. Raises if it isn't `[tokens, d]`, or if its rows are sharded over an `Explicit` axis."""
        check_tokens(call, x, self._shape[0], max_ndim=2)
        x = jnp.asarray(x)
        if any((explicit_spec(x) or P())[:1]):
            check_not_explicit(call, x=x)
        return x

    def _exchanged(self, x: Shaped[Array, "tokens d"], dtype: Any = None) -> Shaped[Array, "capacity d"]:
        """The rows of this device's groups from all devices' `x`, which may have any dtype.

        `dtype`: dtype of the result; by default the dtype of `x`.
        """
        if self._transport == "ring":
            return spread_rows(self._all_gathered(x), *self._indices, dtype=dtype)
        rows = spread_rows(x, *self._indices, dtype=dtype)
        if self._transport == "ragged":
            return self._sent(rows, self.capacity)
        order, places = self._moves
        return spread_rows(self._all_to_all(rows), order, places[:, None])

    def combine(self, y: GroupedTensor, weights: Float[AnyArray, "tokens *top_k"] | None = None) -> Array:
        """Sends rows back to their tokens' devices and sums the rows of each token, in float32: `[tokens, d]` in the
        dtype of `y`.

        Dropped rows count as zero. Errors as for `Route.combine`.
        """
        groups, dispatch = self.sizes.shape[0], "exchange.dispatch(x)"
        check_combined("Exchange", y, weights, (self.capacity, groups), self._shape, dispatch, max_ndim=2)
        data = jnp.asarray(y.data)
        if weights is not None:
            weights = jnp.asarray(weights).astype(accumulator_dtype(data.dtype)).reshape(-1, self._places.shape[1])
        if self._transport == "ring":
            return _summed(data, None if weights is None else self._all_gathered(weights), self)
        if self._transport == "ragged":
            rows = self._sent(data, self._rows.shape[0], back=True)
        else:
            order, places = self._moves
            rows = self._all_to_all(collect_rows(data, order, places[:, None]))
        return self._collected(rows, weights, data.dtype)

    def _collected(self, rows: Shaped[Array, "sent d"], weights: Array | None, dtype: Any) -> Shaped[Array, "tokens d"]:
        """Sums the rows of each token in float32, and rounds the sums to `dtype`."""
        if weights is None:
            return collect_rows(rows, *self._indices, dtype=dtype)
        return collect_weighted(rows, weights, self._rows, self._places, dtype=dtype)

    def map(
        self,
        function: Callable[[GroupedTensor], GroupedTensor],
        x: Shaped[AnyArray, "tokens d"],
        weights: Float[AnyArray, "tokens *top_k"] | None = None,
    ) -> Array:
        """`combine(function(dispatch(x)), weights)`, where `function` must treat each row independently.

        With `chunks`, the rows of one chunk of tokens are sent while `function` computes another chunk. The results are
        the same, unless `function` quantises all rows with one scale (such as the recipe "tensorwise"): each chunk then
        has its own. Gradients of arrays in `function`, such as matrices, are summed over the chunks, so they may be
        rounded differently.

        **Raises:** as `dispatch` and `combine`.
        """
        if not self._chunks:
            return self.combine(function(self.dispatch(x)), weights)
        site = Site("Exchange.map(function, x, weights)")
        x = self._checked(x, site.call)
        weights_of_chunks: list[Any] = [None] * len(self._chunks)
        ends = np.cumsum([chunk._shape[0] for chunk in self._chunks])[:-1]
        if weights is not None:
            check_weights(site.also(weights=weights), weights, self._shape)
            weights_of_chunks = jnp.split(weights, ends)
        # Send all chunks before the first call of `function`, which waits only for its own chunk.
        rows = [chunk.dispatch(part) for chunk, part in zip(self._chunks, jnp.split(x, ends), strict=True)]
        chunks = zip(self._chunks, rows, weights_of_chunks, strict=True)
        return jnp.concatenate([chunk.combine(function(each), part) for chunk, each, part in chunks])

    def _all_to_all(self, slots: Array) -> Array:
        """Sends each device its slots and returns the received slots."""
        return lax.all_to_all(slots, self._axis, 0, 0, tiled=True)

    def _sent(self, rows: Array, capacity: int, back: bool = False) -> Array:
        """Sends each device its ranges of `rows` and returns the received rows, with zeros elsewhere. `back`: in the
        direction of `combine`."""
        to, from_ = self._moves[:3], self._moves[3:]
        (begin, arrive, sent), (*_, received) = (from_, to) if back else (to, from_)
        zeros = jnp.zeros((capacity, rows.shape[1]), rows.dtype)
        operands = vary_together([rows, zeros, begin, sent, arrive, received])
        return lax.ragged_all_to_all(*operands, axis_name=self._axis)

    def _all_gathered(self, x: Array) -> Array:
        """`x` of all devices, concatenated along the first axis."""
        x, _ = vary_together([x, lax.axis_index(self._axis)])
        return over_manual_axes(partial(lax.all_gather, axis_name=self._axis, tiled=True), x)


@jax.custom_jvp
def _summed(y: Shaped[Array, "capacity d"], weights: Array | None, exchange: Exchange) -> Shaped[Array, "tokens d"]:
    """`"ring"`: the sums of each token's rows on all devices, added over the devices in float32 and then rounded.

    `weights`: `[n * tokens, top_k]`, of all devices.
    """
    return _scattered(exchange._collected(y, weights, accumulator_dtype(y.dtype)), exchange).astype(y.dtype)


@partial(_summed.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Tangents are rounded before they are added over the devices, so that cotangents are sent in the rows' dtype."""
    (y, weights, exchange), given = primals, tangents[:2]

    def rounded_first(y: Array, weights: Array | None = None) -> Array:
        return _scattered(exchange._collected(y, weights, y.dtype), exchange)

    given = [(x, dx) for x, dx in zip((y, weights), given, strict=True) if x is not None]
    return _summed(*primals), tangent_of(rounded_first, *zip(*given, strict=True))


def _scattered(sums: Shaped[Array, "all_tokens d"], exchange: Exchange) -> Shaped[Array, "tokens d"]:
    """Adds the sums of all devices; each device gets the sums of its own tokens."""
    return over_manual_axes(partial(lax.psum_scatter, axis_name=exchange._axis, tiled=True), sums)


@jax.custom_jvp
def _dispatched(x: Shaped[Array, "tokens d"], exchange: Exchange) -> Shaped[Array, "capacity d"]:
    """The rows of this device's groups. If the exchange has a `wire`, they are sent quantised, as bytes."""
    if exchange._wire is None:
        return exchange._exchanged(x)
    cast: Any = exchange._wire
    sent = quantize(x[None], cast.dtype, cast.scaling, power_of_two=cast.power_of_two, scale=cast.given_scale)
    data, scales = (_as_bytes(jnp.asarray(z)[0]) for z in (sent.data, sent.scales))  # [tokens, bytes] both
    received = jnp.split(exchange._exchanged(jnp.concatenate([data, scales], axis=1)), [data.shape[1]], axis=1)
    data, scales = (_from_bytes(z, like)[None] for z, like in zip(received, (sent.data, sent.scales), strict=True))
    return with_fields(sent, data=data, scales=scales).dequantize().data[0].astype(x.dtype)


@_dispatched.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The derivative ignores the quantisation. With `"ring"`, it sends tokens in float32: the transpose sums them."""
    (x, exchange), dx = primals, tangents[0]
    dtype = accumulator_dtype(dx.dtype) if exchange._transport == "ring" else dx.dtype
    return _dispatched(x, exchange), exchange._exchanged(dx.astype(dtype), dx.dtype)


def _as_bytes(x: Shaped[Array, "rows d"]) -> Shaped[Array, "rows bytes"]:
    return bits(x, jnp.uint8).reshape(x.shape[0], x.shape[1] * x.dtype.itemsize)


def _from_bytes(x: Shaped[Array, "rows bytes"], like: Any) -> Shaped[Array, "rows d"]:
    size = like.dtype.itemsize
    return bits(x if size == 1 else x.reshape(x.shape[0], x.shape[1] // size, size), like.dtype)


def exchange(
    route: Route,
    axis: str = "expert",
    transport: str | None = None,
    capacity: int | None = None,
    chunks: int = 1,
    wire: str | Cast | None = None,
) -> Exchange:
    """Prepares an exchange: sending rows to the devices that have their groups, and back. Call it inside
    `jax.shard_map`, on every device of `axis`.

    Device `d` of `n` has the groups `d * g // n` to `(d + 1) * g // n - 1`, as `PartitionSpec(axis)` shards their
    matrices. The call itself exchanges the groups' sizes, `(g,)` int32 per device.

    **Arguments:**

    - `route`: a route from this device's tokens to all `g` groups. `n` must divide `g`.
    - `axis`: the name of the mesh axis.
    - `transport`: the collective that sends rows. Results differ only in the order in which a token's rows are
      summed and, with `"dense"`, in the rows that a capacity drops. `"dense"`: `lax.all_to_all` of slots, the same
      number for each device; empty slots are sent too. `"ragged"`: `lax.ragged_all_to_all` of the route's rows, on TPUs
      and GPUs. `"ring"`: an all-gather of all devices' tokens, `n * tokens` rows, from which each device selects its
      rows; back, a reduce-scatter in float32. None: `"dense"` on CPUs, else `"ragged"`.
    - `capacity`: the number of rows in each device's buffer, a static int. The buffer is filled in rounds: first the
      first row of each group from each device, then the second row of each, and so on until it is full. The last round
      goes by group, then by device. The first rows of a group are those of the first tokens. Other rows aren't sent:
      they are counted in `dropped` on the device that has the token, and count as zero in `combine`. With `"dense"`,
      each pair of devices has the same number of slots, so a device takes at most `capacity // n` rows from each
      device, in the same order. The default, `n` times the rows of a device, drops no row.
    - `chunks`: the number of chunks into which `ex.map` splits this device's tokens, so that exchanges and products
      overlap. Each chunk has the capacity `capacity // chunks`. On one device there is one chunk.
    - `wire`: quantises the rows that `dispatch` sends: a `Cast` with at least one scale per row, or the name of a
      recipe, `"mxfp8"`, `"blockwise"` or `"rowwise"`, whose cast of `x` is used. The received rows are
      `quantize(x, ...).dequantize()` in the dtype of `x`. Rows that `combine` sends, and derivatives, are never
      quantised.

    **Returns:** an `Exchange`. `ex.dispatch(x)` is this device's shard of `route.dispatch(x)` over the tokens of all
    devices.

    **Raises:** `TypeError` if `route` isn't a `Route`; `ValueError` outside of a `shard_map` over the axis, and for an
    invalid number of groups, transport, capacity, number of chunks or scaling.
    """
    site = Site("ragged.exchange(route, axis)", {"route": route, "axis": axis})
    if not isinstance(route, Route):
        site.fail(TypeError, "`route` is not a `Route`.", "Pass `ragged.route(group_ids, num_groups)`.")
    check_not_explicit(site.call, route=route)
    try:
        n = lax.axis_size(axis)
    except (NameError, TypeError, ValueError):
        hint = "Call it inside a `jax.shard_map` over that axis, with the route of each device's tokens."
        site.fail(ValueError, f"it isn't called inside a `shard_map` over a mesh axis {axis!r}.", hint)
    groups, rows = route.first_dims.shape[0], route.order.shape[0]
    if groups % n:
        hint = "`route` counts the groups of all devices, which have equally many: add empty ones, or use another axis."
        site.fail(ValueError, f"{groups} groups can't be divided among {n} devices over {axis!r}.", hint)
    cast = check_options(site, transport, capacity, chunks, wire)
    if transport is None:
        transport = "dense" if _platform() == "cpu" else "ragged"
    is_dense = transport == "dense" or not rows  # XLA can't gather empty arrays.
    transport = "dense" if is_dense else transport
    tokens = route.place.shape[0]
    if chunks > max(tokens, 1):
        site.fail(ValueError, f"`chunks` is {chunks!r}.", f"Pass at most the {tokens} tokens of a device.")
    chunks = 1 if n == 1 else int(chunks)
    least = min_capacity(n, transport, chunks)
    if capacity is not None and capacity < least:
        each = "one row from each device" if is_dense else "one row"
        in_chunks = f" in each of {chunks} chunks" if chunks > 1 else ""
        hint = f"Pass at least {least}, {each}{in_chunks}, or None for the worst case."
        site.fail(ValueError, f"`capacity` is {capacity!r}.", hint)
    ends = [tokens * i // chunks for i in range(chunks + 1)]
    capacities = chunk_capacities(n, transport, [(b - a) * route.top_k for a, b in itertools.pairwise(ends)], capacity)
    options = axis, n, transport, cast

    def prepared(route: Route, capacity: int) -> tuple[Exchange, Int[Array, "n g"]]:
        """The exchange of a route without chunks, and how many rows of each device and group it sends."""
        counts = _counts(route, axis)
        kept = _kept(counts, n, transport, capacity) if capacity < n * route.order.shape[0] else counts
        return _prepared(route, counts, kept, capacity, (), *options), kept

    if chunks == 1:
        return prepared(route, capacities[0])[0]
    ids = _ids(route)
    parts, all_kept, in_groups = [], [], []
    for (begin, end), each in zip(itertools.pairwise(ends), capacities, strict=True):
        part = route_of(ids[begin:end], groups)
        of_part, kept = prepared(part, each)
        parts.append(of_part)
        all_kept.append(kept)
        rank = part.place - take(group_offsets(part.first_dims, part.order.shape[0]), ids[begin:end], 0)
        in_groups.append(jnp.where(rank < take(kept[lax.axis_index(axis)], ids[begin:end], 0), ids[begin:end], groups))
    # For `dispatch` and `combine` without `map`: one exchange of all rows that the chunks send.
    kept = sum(all_kept[1:], all_kept[0])
    whole = _prepared(route_of(jnp.concatenate(in_groups), groups), kept, kept, sum(capacities), tuple(parts), *options)
    return replace(whole, dropped=sum((part.dropped for part in parts[1:]), parts[0].dropped))


def min_capacity(n: int, transport: str, chunks: int) -> int:
    """The smallest valid capacity: in each chunk one row, or with `"dense"` one row from each device."""
    return chunks * (n if transport == "dense" else 1)


def chunk_capacities(n: int, transport: str, rows: Sequence[int], capacity: int | None) -> list[int]:
    """The capacity of each chunk. `rows`: how many rows a device has in each chunk."""
    if capacity is None:
        return [n * each for each in rows]
    limit = int(capacity) // len(rows)
    return [min(n * each, limit // n * n if transport == "dense" else limit) for each in rows]


def check_options(site: Site, transport: Any, capacity: Any, chunks: Any, wire: Any) -> Cast | None:
    """The cast of `wire`, or None. Raises if an option is invalid for any route and any number of devices."""
    if transport is not None and transport not in TRANSPORTS:
        site.fail(ValueError, f"`transport` is {transport!r}.", f"Pass one of {', '.join(TRANSPORTS)}, or None.")
    for name, value in {"chunks": chunks, "capacity": capacity}.items():
        if not is_count(value) and (name == "chunks" or value is not None):
            default = ", or None for the worst case" if name == "capacity" else ""
            site.fail(ValueError, f"`{name}` is {value!r}.", f"Pass a static int, 1 or more{default}.")
    return None if wire is None else wire_cast(site, wire)


def wire_cast(site: Site, wire: str | Cast) -> Cast:
    """The cast that quantises the rows to send. Raises unless it has an 8-bit dtype and scales for each row."""
    cast = wire if isinstance(wire, Cast) else Recipe.of(wire, site).forward[0]
    if cast.dtype is None or cast.dtype in ("int4", "float4_e2m1fn"):
        site.fail(ValueError, f"`wire` has no 8-bit dtype: {cast!r}.", "Pass `ragged.Cast('float8_e4m3fn', 'row')`.")
    if cast.scaling.block is None or cast.scaling.block[0] != 1 or cast.scaling.has_tensor_scale:
        hint = "Each row must have its own scales: `(1, 128)`, `'row'`, `'mx'`."
        site.fail(ValueError, f"`wire` has the scaling {cast.scaling}.", hint)
    return cast


def _platform() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.platform if device is not None and device.platform else None) or jax.default_backend()


def _counts(routed: Route, axis: str) -> Int[Array, "n g"]:
    """Number of rows that each device has for each group."""
    counts, _ = vary_together([routed.first_dims, lax.axis_index(axis)])
    return lax.all_gather(counts, axis)


def _kept(counts: Int[Array, "n g"], n: int, transport: str, capacity: int) -> Int[Array, "n g"]:
    """How many rows of each device and group the capacity admits. The first ones of each are sent."""
    local = counts.shape[1] // n
    if transport == "dense":  # each pair of devices has its own slots
        return _admitted(counts.reshape(n * n, local), capacity // n).reshape(counts.shape)
    pools = counts.T.reshape(n, local * n)  # a receiver's rows by group, then by sender
    return _admitted(pools, capacity).reshape(counts.shape[::-1]).T


def _admitted(sizes: Int[Array, "pools m"], capacity: int) -> Int[Array, "pools m"]:
    """How much of each size is admitted, if the sizes of a pool (a row) share a capacity.

    It is `min(size, level)` for the largest level whose sum fits the capacity. The first sizes above the level get one
    more, until the capacity is reached.
    """
    ordered, m = jnp.sort(sizes, axis=1), sizes.shape[1]
    # The admitted sum is at most `before[i] + (m - i) * level` for every `i`; it is equal if exactly the `i` smallest
    # sizes are below the level.
    before = group_offsets(ordered, capacity)[:, :-1]
    above = m - jnp.arange(m, dtype=jnp.int32)[None]
    level = jnp.max((capacity - before) // above, axis=1, keepdims=True)
    admitted = jnp.minimum(sizes, level)
    left = capacity - jnp.sum(admitted, axis=1, keepdims=True, dtype=jnp.int32)
    is_above = sizes > level
    is_more = is_above & (jnp.cumsum(is_above, axis=1, dtype=jnp.int32) <= left)
    return admitted + is_more.astype(jnp.int32)


def _prepared(
    routed: Route,
    counts: Int[Array, "n g"],
    kept: Int[Array, "n g"],
    capacity: int,
    chunks: tuple[Exchange, ...],
    axis: str,
    n: int,
    transport: str,
    wire: Cast | None,
) -> Exchange:
    """The exchange of a route. `counts`: the rows of each device and group; `kept`: how many of them are sent."""
    order, place, rows = routed.order, routed.place.reshape(-1), routed.order.shape[0]
    this_device, groups = lax.axis_index(axis), routed.first_dims.shape[0]
    local = groups // n

    def of_received(x: Int[Array, "n g"]) -> Int[Array, "n local"]:  # all devices' numbers for this device's groups
        return lax.dynamic_slice_in_dim(x, this_device * local, local, axis=1)

    def of_sent(x: Int[Array, "n g"]) -> Int[Array, " g"]:  # this device's numbers for all groups
        return lax.dynamic_index_in_dim(x, this_device, keepdims=False)

    # For each device and group: the first row among the device's rows, and in the buffer of the group's device.
    begin = _before(counts)
    arrive = _before(kept.T.reshape(n, local * n)).reshape(groups, n).T
    # [n, local]: where the ranges of received rows begin in this device's buffer, and how many rows they have.
    places_here, received = of_received(arrive), of_received(kept)
    device, moves = jnp.arange(n, dtype=jnp.int32)[:, None], ()
    if transport == "ring":
        indices = lax.all_gather(jnp.stack(vary_together([order, place, this_device])[:2]), axis)  # [n, 2, rows]
        source = _moved(places_here.T, (of_received(begin) + device * rows).T, received.T, capacity, n * rows)
        sent_rows = take((indices[:, 0] + device * rows).reshape(-1), source, n * rows)
        in_buffer = jax.vmap(partial(_moved, rows=rows, absent=capacity))(of_received(begin), places_here, received)
        places = jnp.take_along_axis(in_buffer, indices[:, 1], axis=1)
    else:
        first, sent = of_sent(begin), of_sent(kept)
        to, length = first, rows  # where the ranges begin among the sent rows, and the number of sent rows
        if transport == "ragged":
            moves = first, of_sent(arrive), sent, *(x.reshape(-1) for x in (places_here, of_received(begin), received))
        else:
            per_device, length = capacity // n, capacity
            within = _before(kept.reshape(n * n, local)).reshape(n, groups)  # the place among a device's slots
            to = of_sent(within) + jnp.arange(groups, dtype=jnp.int32) // local * per_device
            slots = of_received(within) + device * per_device  # [n, local], of the received slots
            moves = (
                _moved(places_here.T, slots.T, received.T, capacity, capacity),
                _moved(slots, places_here, received, capacity, capacity),
            )
        sent_rows = take(order, _moved(to, first, sent, length, rows), rows)
        places = take(_moved(first, to, sent, rows, length), place, length)
    return Exchange(
        sizes=jnp.sum(received, axis=0, dtype=jnp.int32),
        dropped=jnp.sum(of_sent(counts - kept), dtype=jnp.int32),
        capacity=capacity,
        _rows=sent_rows,
        _places=places.reshape(-1, routed.top_k),
        _moves=moves,
        _chunks=chunks,
        _shape=routed.place.shape,
        _axis=axis,
        _transport=transport,
        _wire=wire,
    )


def _before(sizes: Int[Array, "b m"]) -> Int[Array, "b m"]:
    """The sum of the earlier sizes."""
    return jnp.cumsum(sizes, axis=1, dtype=jnp.int32) - sizes


def _moved(
    begin: Int[Array, "*m"], to: Int[Array, "*m"], sizes: Int[Array, "*m"], rows: int, absent: int
) -> Int[Array, " rows"]:
    """The place of each of `rows` rows in another buffer, or `absent`. Range `i` moves `sizes[i]` rows, those from
    `begin[i]` on, to the rows from `to[i]` on. `begin`, read row by row, must be sorted."""
    begin, to, sizes = (x.reshape(-1) for x in (begin, to, sizes))
    row = jnp.arange(rows, dtype=jnp.int32)
    i = count_up_to(begin, row) - 1
    index = jnp.maximum(i, 0)
    rank = row - begin[index]
    return jnp.where((i >= 0) & (rank < sizes[index]), to[index] + rank, absent)


def _ids(routed: Route) -> Int[Array, "tokens *top_k"]:
    """Group ids of a route; `num_groups` for no group."""
    rows = routed.order.shape[0]
    return group_ids(group_offsets(routed.first_dims, rows), rows)[routed.place]
