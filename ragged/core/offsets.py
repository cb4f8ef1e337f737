"""Offsets, group ids and masks, computed from the sizes of groups."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int, Integer, Shaped

from ragged.core.errors import Site, check_packed, describe
from ragged.core.formats import as_array

IN_BOUNDS = "promise_in_bounds"
"""Mode of gathers and scatters whose indices are in range. Other modes fail under `checkify.index_checks`."""


def take(values: Shaped[Array, "n *each"], index: Int[Array, "*p"], fill: Any) -> Shaped[Array, "..."]:
    """`values[index]`, `[*p, *each]`; `fill` where `index` is past the end. Indices must not be negative."""
    n = values.shape[0]
    if isinstance(n, int) and not n:
        return jnp.full((*index.shape, *values.shape[1:]), fill, values.dtype)
    found = values.at[jnp.minimum(index, n - 1)].get(mode=IN_BOUNDS)
    exists = jnp.reshape(index < n, (*index.shape, *[1] * (values.ndim - 1)))
    return jnp.where(exists, found, jnp.asarray(fill, values.dtype))


def as_int32(x: Any) -> Int[Array, "..."]:
    """Integers as int32. Values out of range are clipped."""
    if getattr(x, "dtype", None) == jnp.int32:
        return as_array(x)
    # JAX would wrap Python ints and NumPy arrays around, so they are clipped before they are converted.
    x = x if hasattr(x, "dtype") else np.int64(min(max(x, -(2**63)), 2**63 - 1))
    return jnp.asarray(clipped(x))


def clipped(x: Any) -> Any:
    """An array of integers as int32, in NumPy if it is NumPy's. Values out of range are clipped."""
    check_integers(x)
    xp, int32, given = jnp if isinstance(x, Array) else np, jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
    return xp.clip(x, max(int32.min, given.min), min(int32.max, given.max)).astype(jnp.int32)


def check_integers(sizes: Any) -> None:
    """Raises `TypeError` unless sizes are integers: a `tree_map` may have changed them after their tensor was
    created."""
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        hint = "A function was probably applied to all leaves of a tree, including sizes. Select leaves with "
        hint += "`eqx.is_inexact_array`."
        Site("GroupedTensor").fail(TypeError, f"sizes are {describe(sizes)}, not integers.", hint)


@jax.jit(static_argnums=1, inline=True)  # Outside of `jit`, one program instead of six.
def group_offsets(group_sizes: Integer[Array, "*batch g"], capacity: int) -> Int[Array, "*batch g+1"]:
    """Offsets of the groups, `(g + 1,)` int32: 0, then the running sum of the sizes.

    Negative sizes count as 0, and groups are truncated at the capacity. So offsets never decrease, and are in
    `[0, capacity]`.
    """
    sizes = jnp.clip(as_int32(group_sizes), 0, capacity)
    ends = jnp.cumsum(sizes, axis=-1, dtype=jnp.int32)
    zero = jnp.zeros((*ends.shape[:-1], 1), jnp.int32)
    largest = capacity * sizes.shape[-1]
    if isinstance(largest, int) and largest <= jnp.iinfo(jnp.int32).max:  # no sum wraps around
        return jnp.concatenate([zero, jnp.minimum(ends, capacity)], axis=-1)
    # Each size is at most the capacity. So a sum that leaves [0, capacity] is out of range at least once before it can
    # wrap around into range.
    exceeded = lax.cummax(((ends > capacity) | (ends < 0)).astype(jnp.int32), axis=sizes.ndim - 1)
    ends = jnp.where(exceeded == 1, capacity, ends)
    return jnp.concatenate([zero, ends], axis=-1)


def may_be_offsets(group_sizes: Any, capacity: int) -> bool:
    """True if concrete sizes `(g,)` look like offsets: they begin with 0, don't decrease, and end within `capacity`."""
    sizes = np.asarray(group_sizes).astype(np.int64)
    return bool(sizes.size and sizes[0] == 0 and np.all(np.diff(sizes) >= 0) and sizes[-1] <= capacity)


def known_offsets(group_sizes: Any, capacity: int) -> np.ndarray:
    """`group_offsets` of concrete sizes `(g,)`, in NumPy, without tracing."""
    sizes = np.clip(np.asarray(group_sizes).astype(np.int64), 0, capacity)
    return np.minimum(np.concatenate([[0], np.cumsum(sizes)]), capacity)


@jax.jit(static_argnums=1, inline=True)  # as `group_offsets`
def group_ids(offsets: Int[Array, " g_plus_1"], capacity: int) -> Int[Array, " capacity"]:
    """The group of each row, int32; `g` in the tail."""
    # A row's id is the number of `offsets[1:]` that are at most the row.
    if isinstance(capacity, int) and not capacity:
        return jnp.zeros(0, jnp.int32)
    ends, num_ends = offsets[1:], jnp.zeros(capacity, jnp.int32)
    row, count = jnp.minimum(ends, capacity - 1), (ends < capacity).astype(jnp.int32)
    return jnp.cumsum(num_ends.at[row].add(count, indices_are_sorted=True, mode=IN_BOUNDS), dtype=jnp.int32)


def max_blocks(rows: Any, num_groups: Any, block: int) -> Any:
    """Upper bound on the number of blocks in `rows` rows, if each group begins with a new block."""
    return (rows + num_groups * (block - 1)) // block


def aligned_to_blocks(
    group_sizes: Integer[Array, "*batch g"], rows: int, block: int
) -> tuple[Int[Array, "*batch p"], Int[Array, "*batch rows 1"], Int[Array, "*batch g"]]:
    """`(source, places, sizes)` of an aligned buffer, in which each group is padded to whole blocks of rows.

    - `source`: the original row of each aligned row; `rows` in padding and in the tail.
    - `places`: the aligned row of each original row; out of range in the tail.
    - `sizes`: the sizes of the padded groups.
    """
    if group_sizes.ndim > 1:
        return jax.vmap(lambda sizes: aligned_to_blocks(sizes, rows, block))(group_sizes)
    offsets, capacity = group_offsets(group_sizes, rows), max_blocks(rows, group_sizes.shape[0], block) * block
    check_packed(Site("groups aligned to blocks"), capacity)
    sizes = -(-jnp.diff(offsets) // block) * block
    aligned = group_offsets(sizes, capacity)
    row, ids = jnp.arange(capacity, dtype=jnp.int32), group_ids(aligned, capacity)
    source = row - take(aligned[:-1] - offsets[:-1], ids, 0)
    source = jnp.where(source < take(offsets[1:], ids, 0), source, rows)
    return source, rows_from(aligned[:-1], offsets, rows, capacity)[:, None], sizes


@jax.jit
def count_up_to(values: Int[Array, " n"], bounds: Int[Array, " p"]) -> Int[Array, " p"]:
    """Number of the sorted `values` that are at most each bound, by binary search.

    Replaces `jnp.searchsorted(values, bounds, side="right")`, which fails in a `shard_map` over only some mesh axes.
    """
    n = values.shape[0]
    count = jnp.zeros(bounds.shape, jnp.int32)
    bits = n.bit_length() if isinstance(n, int) else 31  # `n` is a symbol under `jax.export`.
    for bit in reversed(range(bits)):
        candidate = count + 2**bit
        fits = values.at[jnp.minimum(candidate, n) - 1].get(mode=IN_BOUNDS) <= bounds
        count = jnp.where((candidate <= n) & fits, candidate, count)
    return count


def rows_from(
    starts: Int[Array, " g"], offsets: Int[Array, " g_plus_1"], rows: int, absent: Any
) -> Int[Array, " rows"]:
    """For each row, its index in another buffer, where group `i` has the rows `starts[i], starts[i] + 1, ...`; `absent`
    in the tail.

    `offsets`: the offsets of the groups in the result.
    """
    row = jnp.arange(rows, dtype=jnp.int32)
    source = row + take(starts - offsets[:-1], group_ids(offsets, rows), 0)
    return jnp.where(row < offsets[-1], source, absent)


@jax.jit(static_argnums=(2, 3), inline=True)  # as `group_offsets`
def element_mask(
    packed_sizes: Int[Array, " g"], other_sizes: Int[Array, " g"] | None, rows: int, columns: int
) -> Bool[Array, "rows columns"]:
    """Whether each element of a `[rows, columns]` buffer, packed along its rows, belongs to a group.

    `other_sizes`: the number of columns of each group if these are ragged too, else None.
    """
    offsets = group_offsets(packed_sizes, rows)
    if other_sizes is None:
        return jnp.broadcast_to((jnp.arange(rows, dtype=jnp.int32) < offsets[-1])[:, None], (rows, columns))
    widths = take(other_sizes, group_ids(offsets, rows), 0)
    return jnp.arange(columns, dtype=jnp.int32)[None] < widths[:, None]


def segments(
    group_sizes: Integer[Array, "*batch g"],
    capacity: int,
    group_offset: Int[Array, "*offset_batch"] | None = None,
    num_local: int | None = None,
) -> tuple[Int[Array, "*out local"], Int[Array, "*out local"]]:
    """`(starts, ends)`: the first row of each group, and the row after its last one.

    `group_offset`, `num_local`: only the `num_local` groups from `group_offset` on. Groups that don't exist are empty.
    The sizes, the offset or both may have a batch axis.
    """
    offsets = group_offsets(group_sizes, capacity)
    starts, ends = offsets[..., :-1], offsets[..., 1:]
    num_groups = group_sizes.shape[-1]
    num_local = num_groups if num_local is None else num_local
    if group_offset is None and num_local == num_groups:
        return starts, ends
    # Clipped before the addition, so that the sum can't wrap around into range.
    first = jnp.int32(0) if group_offset is None else jnp.clip(as_int32(group_offset), -num_local, num_groups)
    index = jnp.expand_dims(first, -1) + jnp.arange(num_local, dtype=jnp.int32).reshape(
        (1,) * first.ndim + (num_local,)
    )
    batch = (1,) * (max(index.ndim, starts.ndim) - 1)
    index, starts, ends = (x if x.ndim > len(batch) else x.reshape(*batch, x.shape[-1]) for x in (index, starts, ends))
    exists = (index >= 0) & (index < num_groups)
    index = jnp.clip(index, 0, max(num_groups - 1, 0))
    starts = jnp.take_along_axis(starts, index, axis=-1)
    return starts, jnp.where(exists, jnp.take_along_axis(ends, index, axis=-1), starts)


def expand(
    first: Int[Array, " p"], counts: Int[Array, " p"], bound: int
) -> tuple[Int[Array, " bound"], Int[Array, " bound"], Int[Array, ""]]:
    """Lists `counts[p]` consecutive numbers `first[p], first[p] + 1, ...` for each piece `p`, one piece after another.

    **Returns:** `(piece, number, count)`: for each of `bound` entries, its piece and the listed number; and how many
    entries are valid. The entries after these belong to the last piece.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    entry = jnp.arange(bound, dtype=jnp.int32)
    piece = jnp.minimum(jnp.searchsorted(ends, entry, side="right"), counts.shape[0] - 1).astype(jnp.int32)
    return piece, first[piece] + entry - (ends - counts)[piece], ends[-1]
