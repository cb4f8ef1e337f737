"""Checks of `GroupedTensor.validate`: concrete sizes are checked at once, traced sizes at run time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool

from ragged.core.errors import Site, is_concrete
from ragged.core.mesh import check_not_explicit
from ragged.core.offsets import as_int32, check_integers, may_be_offsets
from ragged.tensor.base import GroupedBase, check_has_groups, with_fields

_SITE = Site("GroupedTensor.validate")
_SIZES_HINT = "Correct the sizes, or make the buffer larger."
_LIKE_HINT = "Both tensors must have the same groups."


def validated[T: GroupedBase](x: T, like: Any) -> T:
    """`x`, with its sizes checked. Traced dims are replaced by dims that depend on the run-time check."""
    for each in (x, like):
        if isinstance(each, type(x)):
            check_has_groups(each)
    site = _SITE if like is None else _SITE.also(x=x, like=like)
    if like is not None and (getattr(like, "ragged", None), getattr(like, "num_groups", None)) != (
        x.ragged,
        x.num_groups,
    ):
        hint = "`like` must be a tensor with the same number of groups and the same ragged dims."
        site.fail(ValueError, "`like` has another structure.", hint)
    checked: dict[str, Any] = {"first_dims": x.first_dims, "last_dims": x.last_dims}
    for name, axis in (("first_dims", 0), ("last_dims", -1)):
        if (dims := checked[name]) is None:
            continue
        check_integers(dims)
        extent, packed = x.data.shape[axis], (axis == -1) == (x.packed_axis == -1)
        if is_concrete(dims):
            sizes = np.asarray(dims).astype(np.int64)
            ends = np.cumsum(sizes) if packed else sizes
            bad = np.flatnonzero((sizes < 0) | (ends > extent))
            if bad.size:
                problem = size_problem(name, int(bad[0]), int(sizes[bad[0]]), extent, packed)
                hint = _SIZES_HINT
                if may_be_offsets(sizes, extent):
                    hint = f"If these are offsets, pass sizes: `jnp.diff(x.{name})`."
                _SITE.also(x=x).fail(ValueError, problem, hint)
        elif x.num_groups:
            checked[name] = _checked_at_run_time(dims, _Problems(name, extent, packed, x.num_groups))
        if like is None:
            continue
        problems, like_dims = _Differences(name, x.num_groups), getattr(like, name)
        if not is_concrete(dims, like_dims):
            differ = as_int32(dims) != as_int32(like_dims)
            checked[name] = _with_run_time_error(checked[name], differ, jnp.argmax(differ).astype(jnp.int32), problems)
        elif not np.array_equal(dims, like_dims):
            group = int(np.argmax(np.asarray(dims) != np.asarray(like_dims)))
            site.fail(ValueError, problems.problem(group), _LIKE_HINT)
    return with_fields(x, **checked)


def size_problem(name: str, group: int, size: int, extent: int, packed: bool, max_size: int | None = None) -> str:
    """The problem with the size of a group. With `max_size`, `size` was clipped to `-1 .. max_size`."""
    above = f"the sum of the sizes up to it is above the capacity of {extent}"
    above = above if packed else f"it is above the buffer's extent of {extent}"
    problem = "is negative" if size < 0 else f"is too large: {above}"
    clipped = {} if max_size is None else {-1: "size", max_size: f"size, {max_size} or more,"}
    return f"the {clipped.get(size, f'size {size}')} of group {group} in `{name}` {problem}."


@dataclass(frozen=True)
class _Problems(Sequence[str]):
    """The run-time messages, one for each group and each size from -1 to `max_size`. They are built on access."""

    name: str
    extent: int
    packed: bool
    groups: int

    @property
    def max_size(self) -> int:
        """The largest size with its own message. Larger sizes get this message too.

        It is above the extent, unless int32 couldn't count the messages.
        """
        return max(min(self.extent + 1, np.iinfo(np.int32).max // self.groups - 2), 0)

    def code(self, group: Array, size: Array) -> Array:
        """The index of the message for this size of this group."""
        return group * (self.max_size + 2) + jnp.minimum(size, self.max_size) + 1

    def __len__(self) -> int:
        return self.groups * (self.max_size + 2)

    def __getitem__(self, code: Any) -> str:
        group, size = divmod(code, self.max_size + 2)
        return _SITE.text(
            size_problem(self.name, group, size - 1, self.extent, self.packed, self.max_size), _SIZES_HINT
        )


@dataclass(frozen=True)
class _Differences(Sequence[str]):
    """The run-time messages for sizes that differ from `like`, one for each group."""

    name: str
    groups: int

    def problem(self, group: int) -> str:
        return f"the size of group {group} in `{self.name}` differs from the size in `like`."

    def __len__(self) -> int:
        return self.groups

    def __getitem__(self, group: Any) -> str:
        return _SITE.text(self.problem(group), _LIKE_HINT)


def _checked_at_run_time(dims: Array, problems: _Problems) -> Array:
    """`dims`, with a run-time error that names the first bad group."""
    extent, sizes = problems.extent, jnp.maximum(as_int32(dims), -1)
    # Before the first bad group no sum exceeds the capacity, so int32 can't wrap around.
    left = extent - (jnp.cumsum(sizes) - sizes) if problems.packed else jnp.full_like(sizes, extent)
    bad = (sizes < 0) | (sizes > left)
    group = jnp.argmax(bad).astype(jnp.int32)
    return _with_run_time_error(dims, bad, problems.code(group, sizes[group]), problems)


def _with_run_time_error(dims: Array, bad: Bool[Array, " g"], code: Array, problems: Any) -> Array:
    """`dims`, with the run-time error `problems[code]` if any group is bad."""
    check_not_explicit(_SITE.call, **{problems.name: dims})
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and set(mesh.manual_axes) != set(mesh.axis_names):
        axes = f"{tuple(mesh.manual_axes)} of {mesh.axis_names}"
        _SITE.fail(
            NotImplementedError,  # Run-time errors are callbacks, which JAX supports only if all axes are manual.
            f"JAX has no run-time errors in a `jax.shard_map` over only some axes of a mesh, {axes}.",
            "Validate outside of the `jax.shard_map`, or map over all axes of the mesh.",
        )
    code = jnp.where(jnp.any(bad), code, 0)
    # The error is attached to a zero, which is added to the dims so that XLA keeps the check. It can't be attached to
    # the dims themselves, because they may vary over mesh axes.
    return dims + eqx.branched_error_if(jnp.zeros((), dims.dtype), jnp.any(bad), code, problems)
