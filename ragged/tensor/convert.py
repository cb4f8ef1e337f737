"""Conversions between packed buffers and lists of matrices or padded arrays."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Shaped

from ragged.core.errors import Site, check_fill, check_packed, describe, is_arraylike, is_concrete, is_count
from ragged.core.formats import AnyArray
from ragged.core.mesh import check_not_explicit, on_device, on_host, over_explicit_axes
from ragged.core.offsets import as_int32, clipped, group_offsets, known_offsets, rows_from, take
from ragged.tensor.arithmetic import broadcast_accumulated
from ragged.tensor.base import GroupedBase, check_not_quantized, require_packed
from ragged.tensor.validate import size_problem


def from_list(
    groups: Iterable[AnyArray], ragged: Any, capacity: Any
) -> tuple[Array, Int[Array, " g"] | None, Int[Array, " g"] | None]:
    """`(data, first_dims, last_dims)` of a tensor with these groups."""
    site = Site("GroupedTensor.from_list")
    if ragged not in ("first", "last", "both"):
        site.fail(ValueError, f"`ragged` is {ragged!r}.", "It must be 'first', 'last' or 'both'.")
    given = list(groups) if isinstance(groups, Iterable) else [groups]
    check_not_explicit(site.call, groups=given)
    are_matrices = bool(given) and all(is_arraylike(a) and a.ndim >= 2 for a in given)
    if not are_matrices or len({a.dtype for a in given}) > 1:
        problem = "needs at least one matrix, all of one dtype."
        site.also(groups=given).fail(ValueError, problem, "Pass a list of arrays [first, last].")
    _check_numbers(site, "groups", given)
    placed = {frozenset(a.devices()) for a in given if is_concrete(a) and isinstance(a, Array) and a.committed}
    if len(placed) > 1:
        hint = "Move them to one: `jax.device_put(groups, jax.devices()[0])`."
        site.also(groups=given).fail(ValueError, "the groups are on different devices.", hint)
    if ragged == "last" and any(a.ndim > 2 for a in given):
        problem = "groups that are packed along columns must be matrices."
        site.also(groups=given).fail(ValueError, problem, 'Pack them along rows: `ragged="first"`.')
    if capacity is not None:
        _check_extent(site, "capacity", capacity)
    firsts, lasts = [a.shape[0] for a in given], [a.shape[-1] for a in given]
    if len({a.shape[1:-1] for a in given}) > 1:
        problem = f"the groups' inner dims differ: {[a.shape[1:-1] for a in given]}."
        site.fail(ValueError, problem, "Only the first and the last dim can be ragged.")
    if ragged == "last" and len(set(firsts)) > 1:
        hint = 'Pass `ragged="first"` if only the first dims differ, `ragged="both"` if the last dims differ too.'
        site.fail(ValueError, f"the groups' first dims differ: {firsts}.", hint)
    if ragged == "first" and len(set(lasts)) > 1:
        hint = 'Pass `ragged="last"` if only the last dims differ, `ragged="both"` if the first dims differ too.'
        site.fail(ValueError, f"the groups' last dims differ: {lasts}.", hint)
    sizes, total = (lasts, sum(lasts)) if ragged == "last" else (firsts, sum(firsts))
    capacity = total if capacity is None else int(capacity)
    if capacity < total:
        hint = f"Pass at least {total}, or leave `capacity` out."
        site.fail(ValueError, f"`capacity` is {capacity}, but the groups need {total}.", hint)
    # Packed by NumPy if possible: JAX would compile a program for each list of shapes.
    arrays, like = on_host(given, copy=True), given
    if arrays is None:
        data, like = _packed(jnp, [jnp.asarray(a) for a in given], ragged, capacity - total), ()
    else:
        data = on_device(_packed(np, arrays, ragged, capacity - total), like)
    dims, last_dims = (on_device(np.array(each, np.int32), like) for each in (sizes, lasts))
    return (data, None, dims) if ragged == "last" else (data, dims, last_dims if ragged == "both" else None)


def _packed(xp: Any, groups: Sequence[AnyArray], ragged: str, tail: int) -> Any:
    """The buffer of these groups, with a tail of zeros. `xp`: `numpy` or `jax.numpy`."""
    if ragged == "last":
        return xp.concatenate([*groups, xp.zeros((groups[0].shape[0], tail), groups[0].dtype)], axis=1)
    widest = max(a.shape[-1] for a in groups)
    rows = [xp.pad(a, [*[(0, 0)] * (a.ndim - 1), (0, widest - a.shape[-1])]) for a in groups]
    return xp.concatenate([*rows, xp.zeros((tail, *rows[0].shape[1:]), groups[0].dtype)])


@over_explicit_axes
def from_padded(
    padded: Any, first_dims: Any, capacity: Any
) -> tuple[Shaped[Array, "rows *more last"], Int[Array, " g"]]:
    """`(data, first_dims)` of a tensor with the groups in `[g, max_first, *more, last]`."""
    site = Site("GroupedTensor.from_padded", {"padded": padded, "first_dims": first_dims})
    padded, first_dims = _as_array(site, "padded", padded), _as_array(site, "first_dims", first_dims)
    if padded.ndim < 3:
        problem = f"`padded` must be [g, max_first, *more, last], but has {padded.ndim} dims."
        site.fail(ValueError, problem, "Pass an array as `to_padded` returns it.")
    _check_numbers(site, "padded", [padded])
    g, longest, *inner = padded.shape
    if not jnp.issubdtype(first_dims.dtype, jnp.integer):
        hint = "Cast them: `first_dims.astype(jnp.int32)`."
        if first_dims.dtype == bool:
            hint = "If this is a mask with the padding at the end of each group, pass `first_dims.sum(axis=-1)`."
        site.fail(TypeError, "`first_dims` must be integers.", hint)
    if capacity is not None:
        _check_extent(site, "capacity", capacity)
    if first_dims.shape != (g,):
        problem = f"`padded` has {g} groups but `first_dims` has shape {first_dims.shape}."
        site.fail(ValueError, problem, "`first_dims` needs one size per group, including empty groups.")
    capacity = g * longest if capacity is None else int(capacity)
    if (found := on_host((padded, first_dims))) is None:
        return _unpadded(jnp.asarray(padded), as_int32(first_dims), capacity)
    given, sizes = found[1], np.diff(known_offsets(np.minimum(clipped(found[1]), longest), capacity))
    if np.any(given != sizes):
        group = int(np.argmax(given != sizes))
        is_long = given[group] > longest
        problem = size_problem("first_dims", group, given[group], longest if is_long else capacity, not is_long)
        site.fail(ValueError, problem, "Pass sizes that fit, or a larger `capacity`.")
    rows = found[0][np.arange(longest) < sizes[:, None]]
    data = np.concatenate([rows, np.zeros((capacity - len(rows), *inner), padded.dtype)])
    like = padded, first_dims
    return on_device(data, like), on_device(sizes.astype(np.int32), like)


@partial(jax.jit, inline=True, static_argnums=2)
def _unpadded(padded: Array, first_dims: Array, capacity: int) -> tuple[Array, Array]:
    g, longest, *inner = padded.shape
    offsets = group_offsets(jnp.clip(as_int32(first_dims), 0, longest), capacity)
    source = rows_from(jnp.arange(g, dtype=jnp.int32) * longest, offsets, capacity, g * longest)
    return take(padded.reshape(g * longest, *inner), source, 0), jnp.diff(offsets)


@over_explicit_axes
def to_padded(x: GroupedBase, max_len: Any, fill_value: Any) -> Shaped[Array, "g first *more last"]:
    site = Site("GroupedTensor.to_padded", {"x": x})
    axis = require_packed(x, "to_padded")
    check_not_quantized(x)
    _check_extent(site, "max_len", max_len)
    check_fill(site, "fill_value", fill_value, x.dtype)
    if axis == -1:
        return to_padded(x.mT, max_len, fill_value).mT
    starts, ends = x.offsets[:-1, None], x.offsets[1:, None]
    rows = starts + jnp.arange(max_len, dtype=jnp.int32)[None, :]  # [g, max_len]
    inside = (rows < ends)[..., None]
    if x.last_dims is not None:
        columns = jnp.arange(x.shape[-1], dtype=jnp.int32)
        inside = inside & (columns[None, :] < as_int32(x.last_dims)[:, None])[:, None, :]
    inside = inside.reshape(*inside.shape[:2], *[1] * (x.ndim - 2), inside.shape[-1])
    if not x.capacity:
        return jnp.full((x.num_groups, max_len, *x.shape[1:]), fill_value, x.dtype)
    padded = take(jnp.asarray(x.data), rows, 0)
    fill = broadcast_accumulated(jnp.asarray(fill_value, x.dtype), x.dtype, padded.shape)
    return jnp.where(inside, padded, fill)


def _as_array(site: Site, name: str, x: Any) -> Any:
    """`x`, an array or nested lists of numbers, as an array."""
    try:
        return x if is_arraylike(x) else jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):  # such as a tensor, None, or lists of different lengths
        hint = "Pass an array. For a list of groups, use `GroupedTensor.from_list`."
        site.fail(TypeError, f"`{name}` is not an array.", hint)


def _check_numbers(site: Site, name: str, arrays: Sequence[Any]) -> None:
    """Raises for NumPy's arrays that JAX doesn't support: masked arrays, and arrays of objects or text."""
    for x in arrays:
        if isinstance(x, np.ma.MaskedArray):
            problem = f"`{name}` has a masked array, whose mask would be lost."
            site.fail(TypeError, problem, "Pass arrays without masks, such as `masked.filled(0)`.")
        if isinstance(x, np.ndarray) and not jnp.issubdtype(x.dtype, jnp.number) and x.dtype != bool:
            site.fail(TypeError, f"`{name}` has dtype {x.dtype}.", "Pass arrays of numbers or booleans.")


def _check_extent(site: Site, name: str, value: Any) -> None:
    if not is_count(value, 0):
        shown, hint = repr(value), "It must be an int, 0 or more."
        if is_arraylike(value):
            shown, hint = describe(value), f"{hint} Under `jax.jit`, list the argument in `static_argnames`."
        site.fail(ValueError, f"`{name}` is {shown}.", hint)
    check_packed(site, value, name)
