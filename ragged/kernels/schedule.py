"""From group sizes to where each group lies, and to the list of tiles that a kernel visits. Plain `jnp`.

With sizes `[3, 5, 0, 4]` in a buffer of 16 rows and tiles of 4 rows:

    offsets           0 3 8 8 12          rows 12..15 are the tail
    tiles of a group  0: {0}  1: {0, 1}  2: {}  3: {2}
    visits            (group 0, tile 0) (group 1, tile 0) (group 1, tile 1) (group 3, tile 2)
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, Integer


def group_offsets(group_sizes: Integer[Array, "*batch g"], capacity: int) -> Int[Array, "*batch g+1"]:
    """Where each group begins and ends: `(g+1,)` int32, a leading 0, then the running sum of the sizes.

    Every entry lies in `[0, capacity]` and none is below the one before it, whatever the sizes are: a negative size
    counts as 0, and what would reach past the capacity is cut off there. Sound sizes are not changed by this.
    """
    sizes = jnp.clip(group_sizes, 0, capacity).astype(jnp.int32)
    ends = jnp.cumsum(sizes, axis=-1, dtype=jnp.int32)
    # Sizes are at most the capacity, so a sum first leaves [0, capacity] before it can wrap around and come back.
    left = lax.cummax(((ends > capacity) | (ends < 0)).astype(jnp.int32), axis=sizes.ndim - 1)
    ends = jnp.where(left == 1, capacity, ends)
    return jnp.concatenate([jnp.zeros((*ends.shape[:-1], 1), jnp.int32), ends], axis=-1)


def group_ids(offsets: Int[Array, " g_plus_1"], capacity: int) -> Int[Array, " capacity"]:
    """The group of each row, int32; `g` in the tail."""
    return jnp.searchsorted(offsets[1:], jnp.arange(capacity, dtype=jnp.int32), side="right").astype(jnp.int32)


def element_mask(
    packed_sizes: Int[Array, " g"], other_sizes: Int[Array, " g"] | None, rows: int, columns: int
) -> Bool[Array, "rows columns"]:
    """Which elements of a `[rows, columns]` buffer, packed along its rows, belong to a group.

    `other_sizes` are the groups' columns, left-aligned, where those are ragged too.
    """
    offsets = group_offsets(packed_sizes, rows)
    if other_sizes is None:
        return jnp.broadcast_to((jnp.arange(rows, dtype=jnp.int32) < offsets[-1])[:, None], (rows, columns))
    widths = other_sizes.at[group_ids(offsets, rows)].get(mode="fill", fill_value=0)
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
    first = jnp.int32(0) if group_offset is None else jnp.clip(group_offset.astype(jnp.int32), -held, num_groups)
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
    start_group: Integer[Array, ""] | int = 0,
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
    start_group = jnp.clip(jnp.asarray(start_group, jnp.int32), -held, num_groups)
    visits = jnp.where((group >= start_group) & (group - start_group < held), visits, 0)
    # 3. Consecutive non-empty groups share at most one tile, so e >= 1 non-empty groups make at most tiles_m + e - 1
    #    visits; each of the g - e empty ones adds at most one; and if all are empty, g <= tiles_m + g - 1.
    bound = tiles_m + num_groups - 1
    ends_of_visits = jnp.cumsum(visits, dtype=jnp.int32)
    visit = jnp.arange(bound, dtype=jnp.int32)
    ids = jnp.minimum(jnp.searchsorted(ends_of_visits, visit, side="right"), num_groups - 1).astype(jnp.int32)
    # 4. The j-th visit of a group is to its j-th tile; past the last visit, stay inside the buffer.
    tile_ids = first_tile[ids] + visit - (ends_of_visits - visits)[ids]
    tile_ids = jnp.clip(tile_ids, 0, tiles_m - 1).astype(jnp.int32)
    return (offsets, ids, tile_ids), ends_of_visits[-1]
