"""Offsets of groups, and the list of tiles that a kernel visits, computed on the device from the group sizes.

With sizes `[3, 5, 0, 4]` in a buffer of 16 rows and tiles of 4 rows:

    offsets           0 3 8 8 12          rows 12..15 are the tail
    tiles of a group  0: {0}  1: {0, 1}  2: {}  3: {2}
    visits            (group 0, tile 0) (group 1, tile 0) (group 1, tile 1) (group 3, tile 2)
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int, Integer

from ragged.core.offsets import as_int32, expand, group_offsets


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

    A tile that several groups share is visited once for each of them. Tiles of the tail aren't visited, except by
    an empty group's visit.

    **Arguments:**

    - `group_sizes`: `(g,)` int32 or uint32, rows of each group.
    - `m`: rows of the buffer. The last tile may be partial.
    - `tm`: rows of a tile.
    - `start_group`, `num_nonzero_groups`: only groups `start_group, ..., start_group + num_nonzero_groups - 1` are
      visited; by default all groups.
    - `visit_empty_groups`: whether an empty group gets one visit, for example to write zeros.

    **Returns:** `((group_offsets, group_ids, m_tile_ids), num_tiles)`: `(g+1,)` offsets; the group and the tile of each
    visit, both int32 of the static length `ceil(m / tm) + g - 1`; the number of visits, `()` int32. Entries past the
    first `num_tiles` are in range but have no meaning.

    **Raises:** `ValueError` if `tm` or `m` is not positive, or there are no groups.
    """
    num_groups = group_sizes.shape[0]
    if tm < 1 or m < 1 or not num_groups:
        raise ValueError(
            f"`make_group_metadata`: there must be rows, tiles and groups. Got m={m}, tm={tm}, {num_groups} groups.\n"
            "There are no tiles to visit: return zeros without a kernel."
        )
    tiles_m = -(-m // tm)
    # 1. A group of rows [start, end) touches the tiles floor(start / tm) .. ceil(end / tm) - 1.
    offsets = group_offsets(group_sizes, m)
    starts, ends = offsets[:-1], offsets[1:]
    #    An empty group may start at the buffer's end, after the last tile.
    first_tile = jnp.minimum(starts // tm, tiles_m - 1)
    visits = jnp.where(ends > starts, -(-ends // tm) - first_tile, int(visit_empty_groups))
    # 2. Groups of other shards are not visited.
    num_local = num_groups if num_nonzero_groups is None else num_nonzero_groups
    group = jnp.arange(num_groups, dtype=jnp.int32)
    # `start_group` is clipped, so that `group - start_group` can't wrap around into range.
    start_group = jnp.clip(as_int32(start_group), -num_local, num_groups)
    visits = jnp.where((group >= start_group) & (group - start_group < num_local), visits, 0)
    # 3. Consecutive non-empty groups share at most one tile, so e >= 1 non-empty groups have at most tiles_m + e - 1
    #    visits. Each of the g - e empty groups adds at most one. If all are empty, g <= tiles_m + g - 1.
    ids, tile_ids, num_tiles = expand(first_tile, visits, tiles_m + num_groups - 1)
    # 4. Entries past the last visit stay inside the buffer.
    return (offsets, ids, jnp.clip(tile_ids, 0, tiles_m - 1)), num_tiles


class Visits(NamedTuple):
    """The tiles that a kernel visits: tables for the TPU's scalar unit, all int32.

    A piece is the rows of one group in one batch element, or a gap: tiles without rows of a group. A gap's neighbour is
    the next piece with rows in its batch element, or the last one if none follows. The kernel multiplies nothing in a
    gap, but its pipeline loads operands in every visit. So a gap loads blocks that its neighbour's visits load anyway.

    Tables are `(v,)`, by visit, or `(p,)`, by piece. Entries past `count` are in range but have no meaning.
    """

    count: Any  # (1,) number of visits
    piece: Any  # (v,)
    tile: Any  # (v,) the tile of rows
    start: Any  # (p,) first row of the piece; a gap is empty
    end: Any  # (p,) the row after its last one
    batch: Any  # (p,) batch element
    matrix: Any  # (p,) index of the matrix of the uniform operand or result; for a gap, its neighbour's
    rest: Any  # (p,) where a gap rests: the tile of rows that its visits load, its neighbour's first; else -1


def row_visits(starts: Int[Array, "e s"], ends: Int[Array, "e s"], rows: int, tile: int) -> Visits:
    """Lists the visits of each tile of rows: one for each segment with rows in the tile, or one for a gap.

    Segment `i` of batch element `j`, a local group, has the rows `starts[j, i]:ends[j, i]`. Visits are ordered
    by batch element, then by tile. There are at most `e * (ceil(rows / tile) + s - 1)` visits.
    """
    elements, s = starts.shape
    tiles = -(-rows // tile)
    index = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (elements, s))
    present = ends > starts
    first = jnp.minimum(starts // tile, tiles - 1)
    # For each segment, the first tile after those with rows of this segment or of earlier ones.
    reached = lax.cummax(jnp.where(present, -(-ends // tile), 0), axis=1)
    reached = jnp.pad(reached, [(0, 0), (1, 0)])
    count = jnp.where(present, -(-ends // tile) - first, 0)
    gap = jnp.where(present, jnp.maximum(first - reached[:, :-1], 0), 0)
    last_gap = tiles - reached[:, -1:]
    # The segments that are the gaps' neighbours.
    last = jnp.max(jnp.where(present, index, 0), axis=1, keepdims=True)
    following = jnp.minimum(lax.cummin(jnp.where(present, index, s), axis=1, reverse=True), last)
    neighbour = jnp.concatenate([following, last], axis=1)
    resting = jnp.take_along_axis(first, neighbour, axis=1)

    def weave(gaps: Array, segments: Array) -> Array:
        """Flat array: gap 0, segment 0, gap 1, ..., segment s - 1, gap s, for each batch element."""
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
    """Lists the visits of each segment: one for each tile with rows of it. An empty segment has one, to write zeros.

    Visits are ordered by batch element, then by segment; with `sum_batch`, by segment, then by batch element. Segments
    and bound: see `row_visits`.
    """
    elements, s = starts.shape
    tiles = -(-rows // tile)
    index = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (elements, s))
    element = jnp.broadcast_to(jnp.arange(elements, dtype=jnp.int32)[:, None], (elements, s))
    first = jnp.minimum(starts // tile, tiles - 1)
    count = jnp.where(ends > starts, -(-ends // tile) - first, 1)

    def flat(x: Array) -> Array:
        return (x.T if sum_batch else x).reshape(-1).astype(jnp.int32)

    piece, tile_ids, total = expand(flat(first), flat(count), elements * (tiles + s - 1))
    return Visits(
        count=total[None],
        piece=piece,
        tile=jnp.clip(tile_ids, 0, tiles - 1),
        start=flat(starts),
        end=flat(ends),
        batch=flat(element),
        matrix=flat(index),
        rest=flat(-jnp.ones_like(index)),
    )
