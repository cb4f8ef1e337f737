"""`concat`: joins the groups of several tensors."""

from collections.abc import Iterable
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np

from ragged.core.errors import Site
from ragged.core.mesh import on_device, on_host, over_explicit_axes
from ragged.core.offsets import as_int32, clipped, group_offsets, known_offsets, rows_from, take
from ragged.tensor.base import check_has_groups, check_not_quantized, filled, with_fields
from ragged.tensor.tensor import GroupedTensor


@over_explicit_axes
def concat(tensors: Iterable[GroupedTensor]) -> GroupedTensor:
    """One tensor with the groups of all `tensors`, in order.

    All must have the same kind, dtype and non-ragged extents. Ragged-both tensors must also have the same packed axis,
    and the same extent along the other. Other tensors may differ in `transposed`. The result's capacity is the sum of
    the capacities; its tail is zero. Outside of `jit`, tensors of NumPy's arrays or on the CPU are joined on the host,
    without a compiled program; other tensors by one program for each list of shapes.

    **Raises:** `TypeError` unless `tensors` is a sequence of tensors, `ValueError` if they can't be joined.
    """
    tensors = list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, GroupedTensor) else [tensors]
    if not all(isinstance(t, GroupedTensor) for t in tensors) or not tensors:
        hint = "Pass at least one `GroupedTensor`, in a list."
        Site("ragged.concat", {"tensors": tensors}).fail(TypeError, "needs a sequence of tensors.", hint)
    for tensor in tensors:
        check_not_quantized(tensor)
        check_has_groups(tensor)
    head = tensors[0]
    for i, other in enumerate(tensors[1:], 1):
        same = (
            other.kind == head.kind
            and other.packed_axis == head.packed_axis
            and other.dtype == head.dtype
            and (other.shape[0] == head.shape[0] if head.packed_axis == -1 else other.shape[1:] == head.shape[1:])
        )
        if not same:
            site = Site("ragged.concat", {"tensors[0]": head, f"tensors[{i}]": other})
            hint = "All must have the same kind, dtype and non-ragged extents. "
            hint += "Ragged-both tensors must also have the same packed axis, and the same extent along the other."
            site.fail(ValueError, f"tensor {i} doesn't fit tensor 0.", hint)
    leaves = jax.tree.leaves(tensors)
    if (found := on_host(leaves)) is None:
        return _joined(tensors)
    joined = _joined_on_host(jax.tree.unflatten(jax.tree.structure(tensors), found))
    return jax.tree.map(lambda x: on_device(x, leaves), joined)


@partial(jax.jit, inline=True)
def _joined(tensors: list[GroupedTensor]) -> GroupedTensor:
    head = tensors[0]
    if head.packed_axis is None:
        return GroupedTensor(jnp.concatenate([t.data for t in tensors]), transposed=head.transposed)
    if head.packed_axis == -1:
        joined = _joined([t.mT for t in tensors])
        return joined.mT if head.transposed else GroupedTensor(joined.data.mT, joined.last_dims, joined.first_dims)
    # Rows are gathered from the concatenated buffers, tails included: buffer `i` begins at row `bases[i]`, group `j` at
    # row `starts[j]`. Under `jax.export`, capacities may be symbols.
    *bases, capacity = accumulate((t.capacity for t in tensors), initial=0)
    starts = [jnp.asarray(base, jnp.int32) + t.offsets[:-1] for base, t in zip(bases, tensors, strict=True)]
    sizes = jnp.concatenate([jnp.diff(t.offsets) for t in tensors])
    offsets = group_offsets(sizes, capacity)
    source = rows_from(jnp.concatenate(starts), offsets, capacity, capacity)
    data = take(jnp.concatenate([t.data for t in tensors]), source, 0)
    last_dims = None
    if head.last_dims is not None:
        last_dims = jnp.concatenate([as_int32(t.last_dims) for t in tensors])
    joined = GroupedTensor(data, sizes, last_dims)
    return joined if last_dims is None else joined.with_data(filled(joined, 0))


def _joined_on_host(tensors: list[GroupedTensor]) -> GroupedTensor:
    """`_joined` of tensors in NumPy, without a compiled program."""
    head = tensors[0]
    if head.packed_axis is None:
        return with_fields(head, data=np.concatenate([t.data for t in tensors]))
    if head.packed_axis == -1:
        joined = _joined_on_host([t.mT for t in tensors])
        first, last = joined.last_dims, joined.first_dims
        return with_fields(head, data=joined.data.mT, first_dims=first, last_dims=last)
    offsets = [known_offsets(clipped(t.first_dims), t.capacity) for t in tensors]
    used, capacity = sum(each[-1] for each in offsets), sum(t.capacity for t in tensors)
    rows = [t.data[: each[-1]] for t, each in zip(tensors, offsets, strict=True)]
    data = np.concatenate([*rows, np.zeros((capacity - used, *head.shape[1:]), head.dtype)])
    sizes, last_dims = np.concatenate([np.diff(each) for each in offsets]).astype(np.int32), None
    if head.last_dims is not None:
        last_dims = np.concatenate([clipped(t.last_dims) for t in tensors])
        outside = np.arange(head.shape[-1]) >= np.repeat(last_dims, sizes)[:, None]
        np.moveaxis(data, -1, 1)[:used][outside] = 0
    return with_fields(head, data=data, first_dims=sizes, last_dims=last_dims, transposed=False)
