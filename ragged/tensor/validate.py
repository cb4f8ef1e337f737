"""What `GroupedTensor.validate` checks: sizes, at once where they are known, else at run time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool

from ragged._errors import Site, is_concrete
from ragged._mesh import refuse_explicit
from ragged.backends.schedule import as_int32, check_integers

if TYPE_CHECKING:
    from ragged.tensor.tensor import GroupedTensor

_SITE = Site("GroupedTensor.validate")
_MEND = "Correct the sizes, or make the buffer larger."
_SAME = "What is combined with it must have the same groups."


def validated(x: "GroupedTensor", like: Any) -> "GroupedTensor":
    """`x`, once its sizes are checked; if they are traced, with dims that the check depends on."""
    for each in (x, like):
        if isinstance(each, type(x)):
            each._require_groups()
    site = _SITE if like is None else _SITE.also(x=x, like=like)
    if like is not None and (getattr(like, "ragged", None), getattr(like, "num_groups", None)) != (
        x.ragged,
        x.num_groups,
    ):
        site.fail(ValueError, "`like` is ragged in another way.", "It must be a tensor with as many groups.")
    checked = {"first_dims": x.first_dims, "last_dims": x.last_dims}
    for name, axis in (("first_dims", 0), ("last_dims", -1)):
        dims = checked[name]
        if dims is None:
            continue
        check_integers(dims)
        extent, packed = x.data.shape[axis], (axis == -1) == (x.packed_axis == -1)
        if is_concrete(dims):
            sizes = np.asarray(dims).astype(np.int64)
            reach = np.cumsum(sizes) if packed else sizes
            bad = np.flatnonzero((sizes < 0) | (reach > extent))
            if bad.size:
                problem = _problem(name, int(bad[0]), int(sizes[bad[0]]), extent, packed)
                _SITE.also(x=x).fail(ValueError, problem, _MEND)
        elif x.num_groups:
            checked[name] = _checked_at_run_time(dims, _Problems(name, extent, packed, x.num_groups))
        if like is None:
            continue
        problems, theirs = _Differences(name, x.num_groups), getattr(like, name)
        if not is_concrete(dims, theirs):
            differ = as_int32(dims) != as_int32(theirs)
            checked[name] = _failing(checked[name], differ, jnp.argmax(differ).astype(jnp.int32), problems)
        elif not np.array_equal(dims, theirs):
            site.fail(ValueError, problems.problem(int(np.argmax(np.asarray(dims) != np.asarray(theirs)))), _SAME)
    return x._with(**checked)


def _problem(name: str, group: int, size: int, extent: int, packed: bool, most: int | None = None) -> str:
    """What is wrong with the size of a group. A size of -1 or `most` may stand for any that is less, or more."""
    above = f"the sum of the sizes up to it is above the capacity of {extent}"
    above = above if packed else f"it is above the buffer's extent of {extent}"
    problem = "is negative" if size < 0 else f"is too large: {above}"
    said = {} if most is None else {-1: "size", most: f"size, {most} or more,"}
    return f"the {said.get(size, f'size {size}')} of group {group} in `{name}` {problem}."


@dataclass(frozen=True)
class _Problems(Sequence[str]):
    """The run-time messages, made when asked for: one for each group and size, up to `most`."""

    name: str
    extent: int
    packed: bool
    groups: int

    @property
    def most(self) -> int:
        """The largest size that is told apart from those above: what is beyond the buffer, or int32 codes."""
        return max(min(self.extent + 1, np.iinfo(np.int32).max // self.groups - 2), 0)

    def code(self, group: Array, size: Array) -> Array:
        return group * (self.most + 2) + jnp.minimum(size, self.most) + 1

    def __len__(self) -> int:
        return self.groups * (self.most + 2)

    def __getitem__(self, code: Any) -> str:
        group, size = divmod(code, self.most + 2)
        return _SITE.text(_problem(self.name, group, size - 1, self.extent, self.packed, self.most), _MEND)


@dataclass(frozen=True)
class _Differences(Sequence[str]):
    """The run-time messages of sizes that aren't those of another tensor, by group."""

    name: str
    groups: int

    def problem(self, group: int) -> str:
        return f"the size of group {group} in `{self.name}` is not that of `like`."

    def __len__(self) -> int:
        return self.groups

    def __getitem__(self, group: Any) -> str:
        return _SITE.text(self.problem(group), _SAME)


def _checked_at_run_time(dims: Array, problems: _Problems) -> Array:
    """`dims`, with a run-time error that names the first bad group."""
    # Capped sizes: their sum leaves the capacity before it can wrap around.
    extent = problems.extent
    capped = jnp.clip(as_int32(dims), -1, extent + 1)
    left = extent - (jnp.cumsum(capped) - capped) if problems.packed else jnp.full_like(capped, extent)
    bad = (capped < 0) | (capped > left)
    group = jnp.argmax(bad).astype(jnp.int32)
    return _failing(dims, bad, problems.code(group, capped[group]), problems)


def _failing(dims: Array, bad: Bool[Array, " g"], code: Array, problems: Any) -> Array:
    """`dims`, with the run-time error `problems[code]` if any group is bad."""
    refuse_explicit(_SITE.call, **{problems.name: dims})
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and set(mesh.manual_axes) != set(mesh.axis_names):
        some = f"{tuple(mesh.manual_axes)} of {mesh.axis_names}"
        _SITE.fail(
            NotImplementedError,  # run-time errors are callbacks
            f"JAX has no run-time errors in a `jax.shard_map` over some axes of a mesh only, {some}.",
            "Validate outside of it, or map over all axes of the mesh.",
        )
    code = jnp.where(jnp.any(bad), code, 0)
    # Added to the dims, so that it can't be dropped; not made of them, as they may vary over mesh axes.
    return dims + eqx.branched_error_if(jnp.zeros((), dims.dtype), jnp.any(bad), code, problems)
