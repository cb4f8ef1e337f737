"""From group sizes to where each group lies, and to the list of tiles that a kernel visits. Plain `jnp`.

With sizes `[3, 5, 0, 4]` in a buffer of 16 rows and tiles of 4 rows:

    offsets           0 3 8 8 12          rows 12..15 are the tail
    tiles of a group  0: {0}  1: {0, 1}  2: {}  3: {2}
    visits            (group 0, tile 0) (group 1, tile 0) (group 1, tile 1) (group 3, tile 2)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int, Integer, Shaped

from ragged._errors import Site, describe


def as_int32(x: Any) -> Int[Array, "..."]:
    """Integers as int32. What that can't hold becomes its nearest end: it doesn't wrap around into range."""
    if getattr(x, "dtype", None) == jnp.int32:
        return jnp.asarray(x)
    # Python's and NumPy's are clipped before JAX would wrap them around.
    xp = jnp if isinstance(x, Array) else np
    x = x if hasattr(x, "dtype") else np.int64(min(max(x, -(2**63)), 2**63 - 1))
    check_integers(x)
    ends, own = jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
    return jnp.asarray(xp.clip(x, max(ends.min, own.min), min(ends.max, own.max)).astype(jnp.int32))


def check_integers(sizes: Any) -> None:
    """Raises if sizes have become something else since their tensor was made."""
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        mend = "A cast or an average of all leaves of a tree takes sizes too: take `eqx.is_inexact_array` leaves alone."
        Site("GroupedTensor").fail(TypeError, f"sizes are {describe(sizes)}, not integers.", mend)


def group_offsets(group_sizes: Integer[Array, "*batch g"], capacity: int) -> Int[Array, "*batch g+1"]:
    """Where each group begins and ends: `(g+1,)` int32, a leading 0, then the running sum of the sizes.

    Every entry lies in `[0, capacity]` and none is below the one before it, whatever the sizes are: a negative size
    counts as 0, and what would reach past the capacity is cut off there. Sound sizes are not changed by this.
    """
    sizes = jnp.clip(as_int32(group_sizes), 0, capacity)
    ends = jnp.cumsum(sizes, axis=-1, dtype=jnp.int32)
    # Sizes are at most the capacity, so a sum first leaves [0, capacity] before it can wrap around and come back.
    left = lax.cummax(((ends > capacity) | (ends < 0)).astype(jnp.int32), axis=sizes.ndim - 1)
    ends = jnp.where(left == 1, capacity, ends)
    return jnp.concatenate([jnp.zeros((*ends.shape[:-1], 1), jnp.int32), ends], axis=-1)


def known_offsets(group_sizes: Any, capacity: int) -> np.ndarray:
    """`group_offsets` of sizes that are known, `(g,)`, in NumPy: nothing is traced, and nothing runs on a device."""
    sizes = np.clip(np.asarray(group_sizes).astype(np.int64), 0, capacity)
    return np.minimum(np.concatenate([[0], np.cumsum(sizes)]), capacity)


def group_ids(offsets: Int[Array, " g_plus_1"], capacity: int) -> Int[Array, " capacity"]:
    """The group of each row, int32; `g` in the tail."""
    # How many groups have ended by each row.
    ended = jnp.zeros(capacity, jnp.int32).at[offsets[1:]].add(1, indices_are_sorted=True, mode="drop")
    return jnp.cumsum(ended, dtype=jnp.int32)


def most_blocks(rows: Any, num_groups: Any, block: int) -> Any:
    """How many blocks of rows there are at most, where each group begins with one. `rows`: of all groups."""
    return (rows + num_groups * (block - 1)) // block


def in_blocks(
    group_sizes: Integer[Array, "*batch g"], rows: int, block: int
) -> tuple[Int[Array, "*batch p"], Int[Array, "*batch rows 1"], Int[Array, "*batch g"]]:
    """Where `rows` rows go, so that each group begins at a multiple of `block`: to a buffer with all its blocks whole.

    Which row each row of that buffer is, past the last where it is none; where each row goes, past the last if it is of
    no group; and the sizes of the groups there.
    """
    if group_sizes.ndim > 1:
        return jax.vmap(lambda sizes: in_blocks(sizes, rows, block))(group_sizes)
    offsets, capacity = group_offsets(group_sizes, rows), most_blocks(rows, group_sizes.shape[0], block) * block
    sizes = -(-jnp.diff(offsets) // block) * block
    begins = group_offsets(sizes, capacity)
    there, here = jnp.arange(capacity, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    ids, its = group_ids(begins, capacity), group_ids(offsets, rows)
    source = there - of_groups(begins[:-1] - offsets[:-1], ids, 0)
    source = jnp.where(source < of_groups(offsets[1:], ids, 0), source, rows)
    places = jnp.where(here < offsets[-1], here + of_groups(begins[:-1] - offsets[:-1], its, 0), capacity)
    return source, places[:, None], sizes


@jax.jit
def count_up_to(values: Int[Array, " n"], bounds: Int[Array, " p"]) -> Int[Array, " p"]:
    """How many of the sorted `values` are at most each bound: a binary search.

    As `jnp.searchsorted(values, bounds, side="right")`, which fails in a `shard_map` over some axes of a mesh.
    """
    n = values.shape[0]
    found = jnp.zeros(bounds.shape, jnp.int32)
    bits = n.bit_length() if isinstance(n, int) else 31  # symbolic, under `jax.export`
    for bit in reversed(range(bits)):
        ahead = found + 2**bit
        fits = values.at[jnp.minimum(ahead, n) - 1].get(mode="promise_in_bounds") <= bounds
        found = jnp.where((ahead <= n) & fits, ahead, found)
    return found


def of_groups(values: Shaped[Array, "g *each"], ids: Int[Array, " rows"], fill: Any) -> Shaped[Array, "rows *each"]:
    """What each row's group has, `fill` in the tail: `values[ids]`, also where there are no groups to gather from."""
    if not values.shape[0]:
        return jnp.full((*ids.shape, *values.shape[1:]), fill, values.dtype)
    return values.at[ids].get(mode="fill", fill_value=fill)


def element_mask(
    packed_sizes: Int[Array, " g"], other_sizes: Int[Array, " g"] | None, rows: int, columns: int
) -> Bool[Array, "rows columns"]:
    """Which elements of a `[rows, columns]` buffer, packed along its rows, belong to a group.

    `other_sizes` are the groups' columns, left-aligned, where those are ragged too.
    """
    offsets = group_offsets(packed_sizes, rows)
    if other_sizes is None:
        return jnp.broadcast_to((jnp.arange(rows, dtype=jnp.int32) < offsets[-1])[:, None], (rows, columns))
    widths = of_groups(other_sizes, group_ids(offsets, rows), 0)
    return jnp.arange(columns, dtype=jnp.int32)[None] < widths[:, None]


def segments(
    group_sizes: Integer[Array, "*batch g"],
    capacity: int,
    group_offset: Int[Array, "*offset_batch"] | None = None,
    held: int | None = None,
) -> tuple[Int[Array, "*out held"], Int[Array, "*out held"]]:
    """First row and end row of each group; or of the `held` groups from `group_offset` on, where an absent one is
    empty.

    The sizes, the offset or both may have a batch axis.
    """
    offsets = group_offsets(group_sizes, capacity)
    starts, ends = offsets[..., :-1], offsets[..., 1:]
    num_groups = group_sizes.shape[-1]
    held = num_groups if held is None else held
    if group_offset is None and held == num_groups:
        return starts, ends
    # Clipped before it is added to, so that no offset can wrap around into range.
    first = jnp.int32(0) if group_offset is None else jnp.clip(as_int32(group_offset), -held, num_groups)
    index = jnp.expand_dims(first, -1) + jnp.arange(held, dtype=jnp.int32).reshape((1,) * first.ndim + (held,))
    batch = (1,) * (max(index.ndim, starts.ndim) - 1)
    index, starts, ends = (x if x.ndim > len(batch) else x.reshape(*batch, x.shape[-1]) for x in (index, starts, ends))
    exists = (index >= 0) & (index < num_groups)
    index = jnp.clip(index, 0, max(num_groups - 1, 0))
    starts = jnp.take_along_axis(starts, index, axis=-1)
    return starts, jnp.where(exists, jnp.take_along_axis(ends, index, axis=-1), starts)


def make_group_metadata(
    *,
    group_sizes: Integer[Array, " g"],
    m: int,
    tm: int,
    start_group: Integer[Array, ""] | np.integer | int = 0,
    num_nonzero_groups: int | None = None,
    visit_empty_groups: bool = False,
) -> tuple[tuple[Int[Array, " g+1"], Int[Array, " visits"], Int[Array, " visits"]], Int[Array, ""]]:
    """Lists the tiles of `tm` rows that a kernel visits, group by group.

    A tile that two groups share is visited once for each of them, a tile of the tail never.

    **Arguments:**

    - `group_sizes`: `(g,)` int32 or uint32, rows of each group.
    - `m`: rows of the buffer. Need not be a multiple of `tm`: the last tile may be partial.
    - `tm`: rows of a tile.
    - `start_group`, `num_nonzero_groups`: only groups `start_group, ..., start_group + num_nonzero_groups - 1` are
      visited; all of them by default.
    - `visit_empty_groups`: whether an empty group gets one visit (a product that must write zeros for it needs one).

    **Returns:** `((group_offsets, group_ids, m_tile_ids), num_tiles)`: `(g+1,)` offsets; the group and the tile of each
    visit, both int32 of the static length `ceil(m / tm) + g - 1`, of which the first `num_tiles` (a `()` int32) count
    and the rest repeat in-range values.

    **Raises:** `ValueError` if `tm` or `m` is not positive.
    """
    if tm < 1 or m < 1:
        raise ValueError(
            f"`make_group_metadata`: `m` and `tm` must be positive. Got m={m}, tm={tm}.\n"
            "An empty buffer has no tiles to visit: return zeros without a kernel."
        )
    num_groups = group_sizes.shape[0]
    tiles_m = -(-m // tm)
    # 1. A group of rows [start, end) touches the tiles floor(start / tm) .. ceil(end / tm) - 1.
    offsets = group_offsets(group_sizes, m)
    starts, ends = offsets[:-1], offsets[1:]
    first_tile = jnp.minimum(starts // tm, tiles_m - 1)
    visits = jnp.where(ends > starts, -(-ends // tm) - first_tile, int(visit_empty_groups))
    # 2. Groups of other shards are not visited.
    held = num_groups if num_nonzero_groups is None else num_nonzero_groups
    group = jnp.arange(num_groups, dtype=jnp.int32)
    # Clipped before it is subtracted from, so that it can't wrap around into range.
    start_group = jnp.clip(as_int32(start_group), -held, num_groups)
    visits = jnp.where((group >= start_group) & (group - start_group < held), visits, 0)
    # 3. Consecutive non-empty groups share at most one tile, so e >= 1 non-empty groups make at most tiles_m + e - 1
    #    visits; each of the g - e empty ones adds at most one; and if all are empty, g <= tiles_m + g - 1.
    ids, tile_ids, num_tiles = expand(first_tile, visits, tiles_m + num_groups - 1)
    # 4. Past the last visit, stay inside the buffer.
    return (offsets, ids, jnp.clip(tile_ids, 0, tiles_m - 1)), num_tiles


def expand(
    first: Int[Array, " p"], counts: Int[Array, " p"], bound: int
) -> tuple[Int[Array, " bound"], Int[Array, " bound"], Int[Array, ""]]:
    """Lists `first[p], first[p] + 1, ...`, `counts[p]` of them, for each piece `p` in turn.

    **Returns:** the piece and the number of each entry, `bound` of them, and how many of these count; the rest belongs
    to the last piece.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    entry = jnp.arange(bound, dtype=jnp.int32)
    piece = jnp.minimum(jnp.searchsorted(ends, entry, side="right"), counts.shape[0] - 1).astype(jnp.int32)
    return piece, first[piece] + entry - (ends - counts)[piece], ends[-1]


class Visits(NamedTuple):
    """What a kernel visits, tile by tile. A piece is what one group has of one batch element's rows, or a gap.

    Tables for the scalar unit: `(v,)` by visit, or `(p,)` by piece, all int32. Entries past `count` are in range and
    mean nothing.
    """

    count: Any  # (1,) how many visits there are
    piece: Any  # (v,)
    tile: Any  # (v,) the tile of rows
    start: Any  # (p,) first row of the piece; a gap is empty
    end: Any  # (p,) end row
    batch: Any  # (p,) batch element
    matrix: Any  # (p,) which of the uniform term's matrices; for a gap, that of a neighbour, so that none is fetched
    rest: Any  # (p,) a tile of rows to hold on to where the piece has none to read; -1 where it has


def row_visits(starts: Int[Array, "e s"], ends: Int[Array, "e s"], rows: int, tile: int) -> Visits:
    """Every tile of `rows` rows, once for each segment in it, or once if there is none: then it is part of a gap.

    `e` batch elements of `s` segments, each of `rows` rows. The order is by tile. At most
    `e * (ceil(rows / tile) + s - 1)` visits.
    """
    elements, s = starts.shape
    tiles = -(-rows // tile)
    index = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (elements, s))
    present = ends > starts
    first = jnp.minimum(starts // tile, tiles - 1)
    # The first tile that no segment up to this one reaches. Tiles are reached in order.
    reached = lax.cummax(jnp.where(present, -(-ends // tile), 0), axis=1)
    reached = jnp.pad(reached, [(0, 0), (1, 0)])
    count = jnp.where(present, -(-ends // tile) - first, 0)
    gap = jnp.where(present, jnp.maximum(first - reached[:, :-1], 0), 0)
    last_gap = tiles - reached[:, -1:]
    # In a gap, what the next segment needs is fetched; after the last, what the last one had is kept.
    last = jnp.max(jnp.where(present, index, 0), axis=1, keepdims=True)
    following = jnp.minimum(lax.cummin(jnp.where(present, index, s), axis=1, reverse=True), last)
    neighbour = jnp.concatenate([following, last], axis=1)
    resting = jnp.take_along_axis(first, neighbour, axis=1)

    def weave(gaps: Array, segments: Array) -> Array:
        """Gap 0, segment 0, gap 1, ..., segment s - 1, gap s, of each element; all in one line."""
        pairs = jnp.stack([gaps[:, :-1], segments], axis=2).reshape(elements, 2 * s)
        return jnp.concatenate([pairs, gaps[:, -1:]], axis=1).reshape(-1).astype(jnp.int32)

    nothing = jnp.zeros((elements, s + 1), jnp.int32)
    gaps = jnp.concatenate([gap, last_gap], axis=1)
    piece, tile_ids, total = expand(weave(reached, first), weave(gaps, count), elements * (tiles + s - 1))
    return Visits(
        count=total[None],
        piece=piece,
        tile=jnp.clip(tile_ids, 0, tiles - 1),
        start=weave(nothing, starts),
        end=weave(nothing, ends),
        batch=jnp.repeat(jnp.arange(elements, dtype=jnp.int32), 2 * s + 1),
        matrix=weave(neighbour, index),
        rest=weave(resting, -jnp.ones_like(index)),
    )


def group_visits(starts: Int[Array, "e s"], ends: Int[Array, "e s"], rows: int, tile: int, sum_batch: bool) -> Visits:
    """Every tile of each segment, segment by segment; an empty segment once, so that zeros are written for it.

    The order is by element and then by segment; with `sum_batch`, by segment and then by element. At most
    `e * (ceil(rows / tile) + s - 1)` visits.
    """
    elements, s = starts.shape
    tiles = -(-rows // tile)
    index = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (elements, s))
    element = jnp.broadcast_to(jnp.arange(elements, dtype=jnp.int32)[:, None], (elements, s))
    first = jnp.minimum(starts // tile, tiles - 1)
    count = jnp.where(ends > starts, -(-ends // tile) - first, 1)

    def line(x: Array) -> Array:
        return (x.T if sum_batch else x).reshape(-1).astype(jnp.int32)

    piece, tile_ids, total = expand(line(first), line(count), elements * (tiles + s - 1))
    return Visits(
        count=total[None],
        piece=piece,
        tile=jnp.clip(tile_ids, 0, tiles - 1),
        start=line(starts),
        end=line(ends),
        batch=line(element),
        matrix=line(index),
        rest=line(-jnp.ones_like(index)),
    )
