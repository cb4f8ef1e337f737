"""`exchange`: sends the rows of a route to the devices that have their groups, and back, for expert parallelism.

With two devices, four groups and a route on each device:

    device                  0                        1
    rows by group           0: a b  1: c  2: d  3:   0: e  1:  2: f  3: g h
    sent to 0 | to 1        a b c | d                e | f g h
    received (`dispatch`)   0: a b e  1: c           2: d f  3: g h

Within a group, rows are sorted by the device that sent them, then by token.

Rows are sent in slots. Each device has a fixed number of slots for each device, and fills the first ones.
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

from ragged.core.errors import Site, is_count
from ragged.core.formats import AnyArray, accumulator_dtype, bits
from ragged.core.mesh import explicit_spec, over_manual_axes, refuse_explicit, vary_together
from ragged.core.offsets import IN_BOUNDS, group_ids, group_offsets
from ragged.core.rows import collect_rows, collect_weighted, spread_rows
from ragged.quant.quantize import quantize
from ragged.quant.recipe import Cast, Recipe
from ragged.tensor.annotations import Rows
from ragged.tensor.base import with_fields
from ragged.tensor.route import Route, check_combined, check_tokens, check_weights, route
from ragged.tensor.tensor import GroupedTensor

TRANSPORTS = ("dense", "ragged", "ring")


class Exchange(eqx.Module):
    """Which row of this device goes to which device. Returned by `ragged.exchange`; its values differ between devices.

    **Fields:**

    - `sizes`: `(g / n,)` int32, the number of rows, from all devices, of each of this device's groups.
    - `dropped`: `()` int32, how many of this device's rows exceeded the capacity, and aren't sent.
    """

    # Indices out of range mean "none".
    sizes: Int[Array, " local"]
    dropped: Int[Array, ""]
    _slots: Int[Array, "tokens top_k"]  # the slot in which each row of a token is sent
    _rows: Int[Array, " slots"]  # the row in each slot to send: `token * top_k + j`
    _sent: Int[Array, " n"]  # rows sent to each device
    _received: Int[Array, " n"]  # rows received from each device
    _places: Int[Array, " slots"]  # the row of the buffer for each received slot
    _order: Int[Array, " slots"]  # the received slot for each row of the buffer
    _chunks: tuple["Exchange", ...]  # one exchange for each chunk of tokens; empty without chunks
    _shape: tuple[int, ...] = eqx.field(static=True)  # the shape of the group ids
    _axis: str = eqx.field(static=True)
    _transport: str = eqx.field(static=True)
    _wire: Cast | None = eqx.field(static=True)

    @property
    def capacity(self) -> int:
        """Number of rows in this device's buffer."""
        return self._rows.shape[0]

    @property
    def _slot_indices(self) -> tuple[Int[Array, " slots"], Int[Array, "tokens top_k"]]:
        """`(source, places)` of the gather from tokens to slots."""
        return self._rows // self._slots.shape[1], self._slots

    @property
    def _buffer_indices(self) -> tuple[Int[Array, " slots"], Int[Array, "slots 1"]]:
        """`(source, places)` of the gather from received slots to the buffer."""
        return self._order, self._places[:, None]

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
            refuse_explicit(call, x=x)
        return x

    def _exchanged(self, x: Shaped[Array, "tokens d"]) -> Shaped[Array, "slots d"]:
        """The rows of this device's groups from all devices' `x`, of any dtype."""
        if self._transport == "ring":
            return spread_rows(self._all_gathered(x), *self._global_indices()[:2])
        return spread_rows(self._all_to_all(spread_rows(x, *self._slot_indices)), *self._buffer_indices)

    def combine(self, y: GroupedTensor, weights: Float[AnyArray, "tokens *top_k"] | None = None) -> Array:
        """Sends rows back to their tokens' devices and sums the rows of each token, in float32: `[tokens, d]` in the
        dtype of `y`.

        Dropped rows count as zero. Errors as for `Route.combine`.
        """
        groups, dispatch = self.sizes.shape[0], "exchange.dispatch(x)"
        check_combined("Exchange", y, weights, (self.capacity, groups), self._shape, dispatch, max_ndim=2)
        data = jnp.asarray(y.data)
        accumulator = accumulator_dtype(data.dtype)
        if weights is not None:
            weights = jnp.asarray(weights).astype(accumulator).reshape(-1, 1)  # [tokens * top_k, 1]
        if self._transport == "ring":
            source, places, rows = self._global_indices()
            each = data.astype(accumulator)
            if weights is not None:
                each = each * spread_rows(self._all_gathered(weights), rows, places.reshape(-1, 1))
            summed = partial(lax.psum_scatter, axis_name=self._axis, tiled=True)
            return over_manual_axes(summed, collect_rows(each, source, places)).astype(data.dtype)
        back = self._all_to_all(collect_rows(data, *self._buffer_indices), back=True)
        if weights is None:
            return collect_rows(back, *self._slot_indices)
        return collect_weighted(back, weights.reshape(self._slots.shape), self._rows, self._slots)

    def map(
        self,
        function: Callable[[GroupedTensor], GroupedTensor],
        x: Shaped[AnyArray, "tokens d"],
        weights: Float[AnyArray, "tokens *top_k"] | None = None,
    ) -> Array:
        """`combine(function(dispatch(x)), weights)`, where `function` must treat each row independently.

        With `chunks`, the rows of one chunk of tokens are sent while `function` computes another chunk. The results are
        the same. Gradients of arrays in `function`, such as matrices, are summed over the chunks, so they may be
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

    def _all_to_all(self, slots: Array, back: bool = False) -> Array:
        """Sends each device its slots and returns the received slots. `back`: in the direction of `combine`."""
        if self._transport == "dense":
            return lax.all_to_all(slots, self._axis, 0, 0, tiled=True)
        n, sent, received = self._sent.shape[0], self._sent, self._received
        sent, received = (received, sent) if back else (sent, received)
        per_device = self.capacity // n
        # `0 * sent` gives the offsets the batch axis of the sizes: JAX's batching rule maps them together.
        send_offsets = jnp.arange(n, dtype=jnp.int32) * per_device + 0 * sent
        receive_offsets = lax.axis_index(self._axis) * per_device + 0 * sent  # of this device's rows, on each receiver
        operands = vary_together([slots, jnp.zeros_like(slots), send_offsets, sent, receive_offsets, received])
        return lax.ragged_all_to_all(*operands, axis_name=self._axis)

    def _all_gathered(self, x: Array) -> Array:
        """`x` of all devices, concatenated along the first axis."""
        x, _ = vary_together([x, lax.axis_index(self._axis)])
        return over_manual_axes(partial(lax.all_gather, axis_name=self._axis, tiled=True), x)

    def _global_indices(self) -> tuple[Int[Array, " slots"], Int[Array, "all_tokens top_k"], Int[Array, " slots"]]:
        """`(source, places, rows)`, indices into the concatenated tokens of all devices. `source`: the token of each
        row of the buffer. `places`: the buffer's row for each row of a token. `rows`: each row of the buffer as
        `token * top_k + j`."""
        (tokens, top_k), n, per_device = self._slots.shape, self._sent.shape[0], self.capacity // self._sent.shape[0]
        rows = lax.all_to_all(self._rows, self._axis, 0, 0, tiled=True)  # (slots,) of the received slots
        device = jnp.arange(self.capacity, dtype=jnp.int32) // per_device
        rows = jnp.where(rows < tokens * top_k, rows + device * tokens * top_k, n * tokens * top_k)
        rows = spread_rows(rows[:, None], *self._buffer_indices)[:, 0]
        # `spread_rows` put zeros in the tail, but 0 is the first row of token 0.
        filled = jnp.arange(self.capacity, dtype=jnp.int32) < jnp.sum(self.sizes, dtype=jnp.int32)
        rows = jnp.where(filled, rows, n * tokens * top_k)
        slots = self._all_gathered(self._slots)  # [n * tokens, top_k]
        device = jnp.arange(n * tokens, dtype=jnp.int32)[:, None] // tokens
        is_here = (slots < self.capacity) & (slots // per_device == lax.axis_index(self._axis))
        # Slot `i` that `device` filled for this device is the received slot `device * per_device + i`.
        places = self._places[jnp.where(is_here, device * per_device + slots % per_device, 0)]
        return rows // top_k, jnp.where(is_here, places, self.capacity), rows


@jax.custom_jvp
def _dispatched(x: Shaped[Array, "tokens d"], exchange: Exchange) -> Shaped[Array, "slots d"]:
    """The rows of this device's groups. With a wire, they are quantised, sent as bytes and dequantised."""
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
    """The derivative ignores the quantisation. With `"ring"` it is in float32, because the transpose is a sum."""
    (x, exchange), dx = primals, tangents[0]
    dtype = accumulator_dtype(dx.dtype) if exchange._transport == "ring" else dx.dtype
    return _dispatched(x, exchange), exchange._exchanged(dx.astype(dtype)).astype(dx.dtype)


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
    - `transport`: the collective that sends rows. It changes results only by the order in which a token's rows are
      summed. `"dense"`: `lax.all_to_all` of all slots, also empty ones, `capacity` rows per device. `"ragged"`:
      `lax.ragged_all_to_all` of the filled slots, on TPUs and GPUs. `"ring"`: an all-gather of all devices' tokens,
      `n * tokens` rows, from which each device selects its rows; back, a reduce-scatter in float32. None: `"dense"` on
      CPUs, else `"ragged"`.
    - `capacity`: the number of rows in each device's buffer, a static int. A device may send `capacity // n` rows to
      each device. If it has more, it sends the rows of its first tokens; the others are counted in `dropped`, and count
      as zero in `combine`. The default, `n` times the rows of a device, drops no row.
    - `chunks`: the number of chunks into which `ex.map` splits this device's tokens, so that exchanges and products
      overlap. Each chunk may send `capacity // n // chunks` rows to each device. On one device there is one chunk.
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
    refuse_explicit(site.call, route=route)
    try:
        n = lax.axis_size(axis)
    except (NameError, TypeError, ValueError):
        hint = "Call it inside a `jax.shard_map` over that axis, with the route of each device's tokens."
        site.fail(ValueError, f"it isn't called inside a `shard_map` over a mesh axis {axis!r}.", hint)
    groups, rows = route.first_dims.shape[0], route.order.shape[0]
    if groups % n:
        hint = "Each device has the same number of groups: add empty groups, or use another axis."
        site.fail(ValueError, f"{groups} groups can't be divided among {n} devices over {axis!r}.", hint)
    if transport is None:
        transport = "dense" if _platform() == "cpu" else "ragged"
    if transport not in TRANSPORTS:
        site.fail(ValueError, f"`transport` is {transport!r}.", f"Pass one of {', '.join(TRANSPORTS)}, or None.")
    if capacity is not None and (not is_count(capacity) or capacity < n):
        hint = f"Pass at least {n}, one row from each device, as a static int, or None for the worst case."
        site.fail(ValueError, f"`capacity` is {capacity!r}.", hint)
    if not rows:
        transport = "dense"  # XLA can't gather empty arrays.
    tokens = route.place.shape[0]
    if not is_count(chunks) or chunks > max(tokens, 1):
        hint = f"Pass a static int, at most the {tokens} tokens of a device."
        site.fail(ValueError, f"`chunks` is {chunks!r}.", hint)
    chunks = 1 if n == 1 else int(chunks)
    if capacity is not None and capacity < n * chunks:
        hint = f"Pass at least {n * chunks}, one row from each device in each chunk."
        site.fail(ValueError, f"`capacity` is {capacity!r}, with {chunks} chunks.", hint)
    per_device = rows if capacity is None else int(capacity) // n // chunks  # a chunk's slots for each device
    ends = [tokens * i // chunks for i in range(chunks + 1)]
    options = axis, n, transport, None if wire is None else wire_cast(site, wire)
    limited = _within_capacity(route, n, per_device, ends) if per_device < rows else route
    dropped, route = jnp.sum(route.first_dims - limited.first_dims, dtype=jnp.int32), limited
    parts = [_of_tokens(route, slice(*pair)) for pair in itertools.pairwise(ends)] if chunks > 1 else []
    none = jnp.zeros((), jnp.int32)
    in_chunks = tuple(_prepared(part, min(per_device, part.order.shape[0]), none, (), *options) for part in parts)
    return _prepared(route, min(per_device * chunks, rows), dropped, in_chunks, *options)


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


def _prepared(
    routed: Route,
    per_device: int,
    dropped: Array,
    chunks: tuple[Exchange, ...],
    axis: str,
    n: int,
    transport: str,
    wire: Cast | None,
) -> Exchange:
    """The exchange of a route whose rows fit the slots.

    `per_device`: number of slots that a device has for each device.
    """
    place = routed.place.reshape(routed.place.shape[0], routed.top_k)
    (tokens, top_k), groups = place.shape, routed.first_dims.shape[0]
    rows, num_local = tokens * top_k, groups // n
    this_device, counts = lax.axis_index(axis), routed.first_dims
    counts, _ = vary_together([counts, this_device])

    # 1. Slots of the rows to send, [n, per_device].
    starts = group_offsets(counts, rows)  # (g + 1,)
    device = group_ids(starts, rows) // num_local  # (rows,) the device of each row, sorted by group; n in the tail
    first = starts[::num_local]  # (n + 1,)
    row = jnp.arange(rows, dtype=jnp.int32)
    slot = jnp.where(device < n, device * per_device + row - first[device], n * per_device)
    sent = jnp.diff(first)
    index = jnp.arange(per_device, dtype=jnp.int32)[None]  # [1, per_device]
    taken = jnp.minimum(first[:-1, None] + index, max(rows - 1, 0))  # [n, per_device]
    of_slot = jnp.where(index < sent[:, None], routed.order[taken] if rows else taken, rows).reshape(-1)

    # 2. Places of the received rows in the buffer. `received` has [n, local] counts.
    all_counts = lax.all_gather(counts, axis)  # [n, g]
    received = lax.dynamic_slice_in_dim(all_counts, this_device * num_local, num_local, axis=1)
    sizes = jnp.sum(received, axis=0, dtype=jnp.int32)
    begin = jnp.cumsum(received, axis=1, dtype=jnp.int32) - received  # first slot of each group, among a device's slots
    group = jnp.sum(index[..., None] >= (begin + received)[:, None, :], axis=2, dtype=jnp.int32)  # [n, per_device]
    is_full, group = group < num_local, jnp.minimum(group, num_local - 1)
    before = jnp.cumsum(received, axis=0, dtype=jnp.int32) - received  # rows of a group from earlier devices
    # A slot's row in the buffer is `base` of its group plus the slot's `index`.
    base = (jnp.cumsum(sizes, dtype=jnp.int32) - sizes)[None] + before - begin
    place_of = jnp.take_along_axis(base, group, axis=1) + index
    place_of = jnp.where(is_full, place_of, n * per_device).reshape(-1)
    order = jnp.full(n * per_device + 1, n * per_device, jnp.int32)
    order = order.at[place_of].set(jnp.arange(n * per_device, dtype=jnp.int32), mode=IN_BOUNDS)[:-1]
    return Exchange(
        sizes=sizes,
        dropped=dropped,
        _slots=slot[place] if rows else place,
        _rows=of_slot,
        _sent=sent,
        _received=jnp.sum(received, axis=1, dtype=jnp.int32),
        _places=place_of,
        _order=order,
        _chunks=chunks,
        _shape=routed.place.shape,
        _axis=axis,
        _transport=transport,
        _wire=wire,
    )


def _ids(routed: Route) -> Int[Array, "tokens *top_k"]:
    """Group ids of a route; `num_groups` for no group."""
    rows = routed.order.shape[0]
    return group_ids(group_offsets(routed.first_dims, rows), rows)[routed.place]


def _of_tokens(routed: Route, tokens: slice) -> Route:
    return route(_ids(routed)[tokens], routed.first_dims.shape[0])


def _within_capacity(routed: Route, n: int, per_device: int, ends: Sequence[int]) -> Route:
    """The route without the rows that exceed the capacity.

    Each chunk, from `ends[i]` to `ends[i + 1]`, keeps at most `per_device` rows for each device: the rows of its first
    tokens.
    """
    groups, rows, chunks, ids = routed.first_dims.shape[0], routed.order.shape[0], len(ends) - 1, _ids(routed)
    chunk = jnp.asarray(np.repeat(np.arange(chunks, dtype=np.int32), np.diff(ends)))  # (tokens,)
    chunk = chunk.reshape(-1, *[1] * (ids.ndim - 1))
    target = jnp.where(ids < groups, chunk * n + ids // (groups // n), chunks * n)  # a chunk's rows to one device
    by_target = route(target, chunks * n)  # Within a target, rows are in the order of the tokens.
    rank = by_target.place - group_offsets(by_target.first_dims, rows)[target]
    return route(jnp.where(rank < per_device, ids, groups), groups)
