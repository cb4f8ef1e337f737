"""`sliced`: the same slice of rows or columns from every group.

With `first_dims=[3, 1, 2]`, rows `-2:` of each group:

    data           a0 a1 a2 | b0   | c0 c1 | ? ?
    (begin, size)  (1, 2)   | (0, 1) | (0, 2)     the slice within each group
    result         a1 a2    | b0   | c0 c1 | ?    the buffer has two rows for each of the three groups
"""

from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from ragged.core.errors import Site, is_arraylike
from ragged.core.mesh import over_explicit_axes
from ragged.core.offsets import IN_BOUNDS, as_int32, group_ids, group_offsets, rows_from, take
from ragged.core.rows import spread_rows
from ragged.tensor.base import GroupedBase, check_has_groups, check_not_quantized, filled, with_fields


@over_explicit_axes
def sliced[T: GroupedBase](x: T, axis: int, start: Any, stop: Any) -> T:
    """Rows (`axis=-2`) or columns (-1) `start` to `stop` of each group: see `GroupedTensor.rows`."""
    check_not_quantized(x)
    check_has_groups(x)
    site = Site(f"GroupedTensor.{'rows' if axis == -2 else 'columns'}", {"x": x, "start": start, "stop": stop})
    for end in (start, stop):
        _check_end(site, end, x.num_groups)
    if not x.ragged[axis]:
        if not _are_static(start, stop):
            hint = "Pass ints or None: the shape of the result must be static."
            site.fail(ValueError, "arrays are given for a dim that isn't ragged.", hint)
        buffer_axis = -1 if axis == -1 else int(x.packed_axis is None)
        data = jnp.moveaxis(jnp.moveaxis(jnp.asarray(x.data), buffer_axis, 0)[start:stop], 0, buffer_axis)
        out = x.with_data(data)
        return out.with_data(filled(out, 0))
    if x.packed_axis == -1:
        return sliced(x.mT, -3 - axis, start, stop).mT  # This maps -2 to -1 and back.
    name = "first_dims" if axis == -2 else "last_dims"
    capacity = x.shape[0 if axis == -2 else -1]
    offsets = x.offsets
    begin, size = _within(
        jnp.diff(offsets) if axis == -2 else jnp.clip(as_int32(x.last_dims), 0, capacity), start, stop
    )
    extent = _extent(capacity, start, stop, x.num_groups if axis == -2 else 1)
    if axis == -2:
        data = _packed(jnp.asarray(x.data), offsets, begin, size, extent)
    else:  # Each row's columns move to the left.
        source = take(begin, x.group_ids, 0)[:, None] + jnp.arange(extent, dtype=jnp.int32)[None]
        source = source.reshape(x.capacity, *[1] * (x.ndim - 2), extent)
        source = jnp.minimum(source, max(capacity - 1, 0))
        data = jnp.take_along_axis(jnp.asarray(x.data), source, axis=-1, mode=IN_BOUNDS)
    out = with_fields(x, data=data, **{name: size})
    return out.with_data(filled(out, 0))


def _packed(data: Array, offsets: Int[Array, " g_plus_1"], begin: Array, size: Array, extent: int) -> Array:
    """The slices, `size[i]` rows of group `i` from its row `begin[i]` on, packed into a buffer of `extent` rows."""
    capacity, new_offsets = data.shape[0], group_offsets(size, extent)
    row, ids = jnp.arange(capacity, dtype=jnp.int32), group_ids(offsets, capacity)
    first = offsets[:-1] + begin  # (g,) the first row of each slice in `data`
    # (capacity,) each row's place in the result; `extent` for rows outside of the slices
    place = row - take(first - new_offsets[:-1], ids, 0)
    in_slice = (row >= take(first, ids, capacity)) & (row < take(first + size, ids, 0))
    place = jnp.where(in_slice, place, extent)
    source = rows_from(first, new_offsets, extent, capacity)
    rows = spread_rows(data.reshape(capacity, prod(data.shape[1:])), source, place[:, None])
    return rows.reshape(extent, *data.shape[1:])


def _within(sizes: Int[Array, " g"], start: Any, stop: Any) -> tuple[Int[Array, " g"], Int[Array, " g"]]:
    """`(begin, size)` of each group's slice."""

    def index_in_group(end: Any, default: Array) -> Array:
        if end is None:
            return default
        at = as_int32(end)
        return jnp.where(at < 0, jnp.maximum(sizes + at, 0), jnp.minimum(at, sizes))

    begin = index_in_group(start, jnp.zeros_like(sizes))
    return begin, jnp.maximum(index_in_group(stop, sizes) - begin, 0)


def _extent(capacity: Any, start: Any, stop: Any, groups: int) -> Any:
    """The extent of a buffer for the slices: `capacity`, or less if `start` and `stop` are ints that limit a slice.

    `groups`: how many slices are packed along the axis.
    """
    if not _are_static(start, stop) or not isinstance(capacity, int):
        return capacity
    first, end = int(start or 0), int(stop or 0)
    same_end = (first < 0) == (stop is None or end < 0)  # Both count from the start, or both from the end.
    return min(capacity, groups * max(end - first, 0)) if same_end and (start, stop) != (None, None) else capacity


def _are_static(*ends: Any) -> bool:
    return all(end is None or isinstance(end, int | np.integer) for end in ends)


def _check_end(site: Site, end: Any, groups: int) -> None:
    if is_arraylike(end):
        is_valid = jnp.issubdtype(end.dtype, jnp.integer) and end.shape in ((), (groups,))
    else:
        is_valid = _are_static(end) and not isinstance(end, bool)
    if not is_valid:
        problem = f"`start` and `stop` must be ints, None, or integer arrays of shape () or ({groups},)."
        site.fail(TypeError, problem, "They count within each group; negative values count from its end.")
