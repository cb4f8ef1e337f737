"""`concat`: the groups of several tensors in one."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import jax.numpy as jnp

from ragged._errors import Site
from ragged._mesh import over_explicit_axes
from ragged.backends import schedule
from ragged.backends.schedule import as_int32
from ragged.tensor.tensor import GroupedTensor


@over_explicit_axes
def concat(tensors: Iterable[GroupedTensor] | Any) -> GroupedTensor:
    """One tensor with the groups of all `tensors`, in order.

    All must be of one kind, dtype and non-ragged extent; those that are ragged in both dims, packed along one axis. In
    which order their buffers lie in memory (`transposed`) makes no other difference. The result's capacity is the sum
    of theirs; its groups are packed without gaps, and its tail is zero. Works under `jit`.

    **Raises:** `TypeError` for what isn't a sequence of tensors, `ValueError` if they can't be joined.
    """
    tensors = list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, GroupedTensor) else [tensors]
    if not all(isinstance(t, GroupedTensor) for t in tensors) or not tensors:
        mend = "Pass at least one `GroupedTensor`, in a list."
        Site("ragged.concat", {"tensors": tensors}).fail(TypeError, "needs a sequence of tensors.", mend)
    for tensor in tensors:
        tensor._require_plain()
        tensor._require_groups()
    head = tensors[0]
    for i, other in enumerate(tensors):
        same = (
            other.kind == head.kind
            and other.packed_axis == head.packed_axis
            and other.dtype == head.dtype
            and (other.shape[0] == head.shape[0] if head.packed_axis == -1 else other.shape[1:] == head.shape[1:])
        )
        if not same:
            site = Site("ragged.concat", {"tensors[0]": head, f"tensors[{i}]": other})
            mend = "All must be of one kind, dtype and non-ragged extent."
            site.fail(ValueError, f"tensor {i} doesn't fit tensor 0.", mend)
    if head.packed_axis is None:
        return GroupedTensor(jnp.concatenate([t.data for t in tensors]), transposed=head.transposed)
    if head.packed_axis == -1:
        joined = concat([t.mT for t in tensors])
        return joined.mT if head.transposed else joined._untransposed_mT()
    # Where each group's rows stand in the buffers laid end to end, tails and all.
    *bases, capacity = accumulate((t.capacity for t in tensors), initial=0)  # symbolic ones too, under `jax.export`
    starts = [jnp.asarray(base, jnp.int32) + t.offsets[:-1] for base, t in zip(bases, tensors, strict=True)]
    sizes = jnp.concatenate([jnp.diff(t.offsets) for t in tensors])
    offsets = schedule.group_offsets(sizes, capacity)
    ids = schedule.group_ids(offsets, capacity)
    # How far above its place in the result a row stands; out of range in the tail, whose group id is the last.
    shifts = jnp.concatenate([jnp.concatenate(starts) - offsets[:-1], jnp.full((1,), capacity, jnp.int32)])
    source = jnp.arange(capacity, dtype=jnp.int32) + shifts[ids]
    data = jnp.concatenate([t.data for t in tensors]).at[source].get(mode="fill", fill_value=0)
    last_dims = None
    if head.last_dims is not None:
        last_dims = jnp.concatenate([as_int32(t.last_dims) for t in tensors])
    joined = GroupedTensor(data, sizes.astype(jnp.int32), last_dims)
    return joined if last_dims is None else joined._replace_data(joined._filled(0))
