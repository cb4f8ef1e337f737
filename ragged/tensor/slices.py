"""The same slice of every group: its rows, or its columns, from one place to another.

With `first_dims=[3, 1, 2]`, rows `-2:` of each group:

    data         a0 a1 a2 | b0 | c0 c1 | ? ?
    begin, size      1  2    0 1   0   2      within each group
    result       a1 a2 | b0 | c0 c1 | ?       a buffer for two rows of each of the three
"""

from math import prod
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from ragged._errors import Site, is_arraylike
from ragged._mesh import over_explicit_axes
from ragged.backends import schedule
from ragged.backends.schedule import as_int32
from ragged.tensor.rows import spread_rows

if TYPE_CHECKING:
    from ragged.tensor.tensor import GroupedTensor


@over_explicit_axes
def sliced(x: "GroupedTensor", axis: int, start: Any, stop: Any) -> "GroupedTensor":
    """Each group's rows (`axis=-2`) or columns (-1) from `start` to `stop`, as `GroupedTensor.rows` says."""
    x._require_plain()
    x._require_groups()
    site = Site(f"GroupedTensor.{'rows' if axis == -2 else 'columns'}", {"x": x, "start": start, "stop": stop})
    for end in (start, stop):
        _check_end(site, end, x.num_groups)
    if not x.ragged[axis]:
        if not _are_static(start, stop):
            mend = "Pass ints, or None: the result's shape must be known."
            site.fail(ValueError, "that dim isn't ragged, and has one extent for all groups.", mend)
        end = -1 if axis == -1 else int(x.packed_axis is None)
        data = jnp.moveaxis(jnp.moveaxis(jnp.asarray(x.data), end, 0)[start:stop], 0, end)
        out = x._replace_data(data)
        return out._replace_data(out._filled(0))
    if x.packed_axis == -1:
        return sliced(x.mT, -3 - axis, start, stop).mT
    name = "first_dims" if axis == -2 else "last_dims"
    capacity = x.shape[0 if axis == -2 else -1]
    offsets = x.offsets
    begin, size = _within(
        jnp.diff(offsets) if axis == -2 else jnp.clip(as_int32(x.last_dims), 0, capacity), start, stop
    )
    extent = _extent(capacity, start, stop, x.num_groups if axis == -2 else 1)
    if axis == -2:
        data = _packed(jnp.asarray(x.data), offsets, begin, size, extent)
    else:  # each row's columns move to the left
        moved = schedule.of_groups(begin, x.group_ids, 0)[:, None] + jnp.arange(extent, dtype=jnp.int32)[None]
        moved = moved.reshape(x.capacity, *[1] * (x.ndim - 2), extent)
        data = jnp.take_along_axis(jnp.asarray(x.data), moved, axis=-1, mode="fill", fill_value=0)
    out = x._with(data=data, **{name: size})
    return out._replace_data(out._filled(0))


def _packed(data: Array, offsets: Int[Array, " g_plus_1"], begin: Array, size: Array, extent: int) -> Array:
    """`size[i]` rows of each group from its row `begin[i]` on, side by side in a buffer of `extent` rows."""
    capacity, ends = data.shape[0], schedule.group_offsets(size, extent)
    ids, its = schedule.group_ids(ends, extent), schedule.group_ids(offsets, capacity)
    there, here = jnp.arange(extent, dtype=jnp.int32), jnp.arange(capacity, dtype=jnp.int32)
    first = offsets[:-1] + begin  # (g,) the row of `data` that each group's first is
    source = jnp.where(there < ends[-1], there + schedule.of_groups(first - ends[:-1], ids, 0), capacity)
    place = here - schedule.of_groups(first - ends[:-1], its, 0)
    kept = (here >= schedule.of_groups(first, its, capacity)) & (here < schedule.of_groups(first + size, its, 0))
    place = jnp.where(kept, place, extent)
    rows = spread_rows(data.reshape(capacity, prod(data.shape[1:])), source, place[:, None])
    return rows.reshape(extent, *data.shape[1:])


def _within(sizes: Int[Array, " g"], start: Any, stop: Any) -> tuple[Int[Array, " g"], Int[Array, " g"]]:
    """Where the slice of each group begins, and its size: as Python's, counted from a group's end if negative."""

    def place(end: Any, otherwise: Array) -> Array:
        if end is None:
            return otherwise
        at = as_int32(end)
        return jnp.where(at < 0, jnp.maximum(sizes + at, 0), jnp.minimum(at, sizes))

    low = place(start, jnp.zeros_like(sizes))
    return low, jnp.maximum(place(stop, sizes) - low, 0)


def _extent(capacity: Any, start: Any, stop: Any, groups: int) -> Any:
    """The extent of a buffer for the slices: that of the whole one, or less where ints say how long one can be."""
    if not _are_static(start, stop) or not isinstance(capacity, int):
        return capacity
    first, end = int(start or 0), int(stop or 0)
    counted_alike = (first < 0) == (stop is None or end < 0)
    return min(capacity, groups * max(end - first, 0)) if counted_alike and (start, stop) != (None, None) else capacity


def _are_static(*ends: Any) -> bool:
    return all(end is None or isinstance(end, int | np.integer) for end in ends)


def _check_end(site: Site, end: Any, groups: int) -> None:
    if is_arraylike(end):
        sound = jnp.issubdtype(end.dtype, jnp.integer) and end.shape in ((), (groups,))
    else:
        sound = _are_static(end) and not isinstance(end, bool)
    if not sound:
        problem = f"`start` and `stop` must be ints, None, or integer arrays of shape () or ({groups},)."
        site.fail(TypeError, problem, "They are counted within each group; from its end if negative.")
