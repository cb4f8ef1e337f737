"""Checks of the arguments that all public products share."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from ragged.backends.base import Refusal, Target
from ragged.core.errors import (
    MAX_ROWS,
    Site,
    check_packed,
    describe,
    is_arraylike,
    is_concrete,
    is_count,
    is_extent,
    wrapped_array,
)
from ragged.core.formats import accumulator_dtype, as_array, promote
from ragged.core.mesh import explicit_mesh
from ragged.core.offsets import as_int32, clipped
from ragged.primitive import lowering
from ragged.primitive.sharding import axes_of, spec_of
from ragged.product.config import Configs, backend_of, in_context, is_interpret_params
from ragged.product.operands import Call, Operand, Operands, Options
from ragged.tensor.arithmetic import Operators
from ragged.tensor.base import check_has_groups
from ragged.tensor.tensor import GroupedTensor

Tiling = tuple[int, int, int] | Callable[[int, int, int], tuple[int, int, int] | None] | None


def result_dtype(site: Site, lhs: Any, rhs: Any, preferred: Any, existing: Any) -> Any:
    """The result's dtype, as `matmul` documents `preferred_element_type`. `existing`: the buffer of `existing_out`, or
    None."""
    for name, dtype in (("lhs", lhs), ("rhs", rhs)):
        if jnp.issubdtype(dtype, jnp.complexfloating):
            hint = "Multiply the real and the imaginary part separately."
            site.fail(NotImplementedError, f"`{name}` is complex.", hint)
        if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
            site.fail(TypeError, f"`{name}` has dtype {dtype}.", "Cast it to a float or an integer dtype.")
        if dtype == jnp.float8_e8m0fnu:
            hint = "This dtype is for scales only. Cast the operand."
            site.fail(TypeError, f"`{name}` has dtype {dtype}, which has no zero.", hint)
    lhs, rhs = jax.dtypes.canonicalize_dtype(lhs), jax.dtypes.canonicalize_dtype(rhs)
    floats = [d for d in (lhs, rhs) if jnp.issubdtype(d, jnp.floating)]
    is_requested = preferred is not None
    if not is_requested and existing is not None:
        preferred, site = existing.dtype, site.also(existing_out=existing)
    if preferred is not None:
        try:
            preferred = jax.dtypes.canonicalize_dtype(preferred)
            numeric = jnp.issubdtype(preferred, jnp.floating) or jnp.issubdtype(preferred, jnp.integer)
            numeric = numeric and preferred != jnp.float8_e8m0fnu  # It has no zero, which the tail needs.
        except TypeError:
            hint = "Pass a dtype such as `jnp.bfloat16`, or None."
            site.fail(TypeError, f"`preferred_element_type` is {_name(preferred)}, which isn't a dtype.", hint)
        if not numeric or (floats and jnp.issubdtype(preferred, jnp.integer)):
            site.fail(
                TypeError,
                f"`preferred_element_type` is {_name(preferred)}, which can't hold the product."
                if is_requested
                else f"`existing_out` has dtype {preferred}, which can't hold the product.",
                "Pass a real floating dtype (for integer operands, an integer dtype will do), or None.",
            )
        return jnp.dtype(preferred)
    if not floats:
        return accumulator_dtype(promote(lhs, rhs))
    wide = [d for d in floats if jnp.dtype(d).itemsize > 1]  # Integers and 8-bit floats don't widen the result.
    return promote(wide[0], wide[-1]) if wide else jnp.dtype(jnp.bfloat16)


def _name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else repr(dtype)


def check_options(site: Site, backend: Any, precision: Any) -> Options:
    """The options of a call: its precision, backend and configurations, which `ragged.tuning.using` may set.

    Raises a `ValueError` for an unknown backend or precision, or for a backend that isn't installed.
    """
    backend, interpret, configs = backend_of(site, backend)
    # A backend's `refusal` looks for installed packages, which is slow: read it only if needed.
    refusals = {} if backend is None else {name: known.refusal for name, known in lowering.BACKENDS.items()}
    exists = backend in list(refusals)  # a list, because `backend` may not be hashable
    if backend is not None and (not exists or refusals[backend]):
        available = ", ".join(repr(name) for name, refusal in refusals.items() if not refusal)
        missing = [f" Not available: {name!r} ({refusal.reason})." for name, refusal in refusals.items() if refusal]
        site.fail(
            ValueError,
            f"backend {backend!r} {'is not available here' if exists else 'does not exist'}.",
            f"Available: {available}.{''.join(missing)}\n`backend=None` uses the platform's own backend.",
        )
    try:
        if precision is not None:
            one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
            jax.eval_shape(lambda x: jax.lax.dot(x, x, precision=precision), one)
    except (TypeError, ValueError):
        site.fail(ValueError, f"unknown `precision` {precision!r}.", "Pass a precision of `jax.lax.dot_general`.")
    precision = tuple(precision) if isinstance(precision, list) else precision
    context = in_context()
    source = "backend" if configs != Configs() else "using" if context.configs != Configs() else ""
    return Options(
        precision=precision,
        backend=backend,
        interpret=interpret,
        configs=configs if source == "backend" else context.configs,
        source=source,
        cached=context.cached,
        name=site.call.partition("(")[0],
    )


def check_tiling(site: Site, options: Options, tiling: Any, buffers: Any, interpret: Any, extents: Any) -> Options:
    """`options` with the checked `tiling`, `buffers` (`input_buffer_count`) and `interpret` of `grouped_matmul` and
    `transposed_grouped_matmul`.

    `extents`: the `(m, k, n)` that a function `tiling` gets.
    """
    if not isinstance(interpret, bool) and not is_interpret_params(interpret):
        site.fail(
            TypeError,
            f"`interpret` must be a bool, not {interpret!r}.",
            "Pass True or False; or, for TPU kernels, `pltpu.InterpretParams`.",
        )
    if not is_count(buffers):
        site.fail(ValueError, f"`input_buffer_count` is {buffers!r}.", "It must be a positive int.")
    if callable(tiling):
        chosen = tiling(*extents)
        if chosen is None:
            site.fail(
                ValueError,
                f"no tuned tiling for (m, k, n) = {extents}.",
                "Let `tiling` return a tuple for these extents, or pass `tiling=None` for the library's choice.",
            )
        tiling = chosen
    if tiling is not None:
        is_triple = isinstance(tiling, tuple | list) and len(tiling) == 3
        if not is_triple or not all(map(is_count, tiling)):
            site.fail(
                ValueError,
                f"`tiling` is {tiling!r}.",
                "It must be three positive ints (tile_m, tile_k, tile_n), a function of (m, k, n), or None.",
            )
        tiling = tuple(int(t) for t in tiling)
        if options.source == "backend":
            hint = "Leave `tiling` out, and set the tiles in the configuration."
            site.fail(ValueError, "`tiling` is given, but `backend` is a configuration.", hint)
    return options._replace(tiling=tiling, buffers=int(buffers), interpret=options.interpret or interpret)


def check_plan(site: Site, x: Operands, call: Call, casts: tuple[Any, Any] = (None, None)) -> None:
    """Raises if int32 can't count the packed rows, or if the call names a backend that refuses the product with a hint.

    `casts`: a recipe's casts of `lhs` and `rhs`, or None. The backend plans for an interpreted kernel, because the
    platform isn't known yet.
    """
    p = call.product
    for letters, shape in call.buffers(x):
        if letters[0] in p.ragged:
            check_packed(site, shape[-2])
    name = call.options.backend
    if name is None:
        return
    lhs, rhs = (
        Operand(jax.ShapeDtypeStruct(data.shape, getattr(cast, "dtype", None) or data.dtype))
        for data, cast in zip((x.lhs.data, x.rhs.data), casts, strict=True)
    )
    avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x._replace(lhs=lhs, rhs=rhs))
    found = lowering.ask(name, avals, call._replace(out_batch=True), Target(interpret=True))
    if isinstance(found, Refusal) and found.hint:
        site.fail(found.error, found.reason, found.hint)


def check_size_range(site: Site, group_sizes: Any, lhs: Any) -> None:
    """Raises for a concrete size, an integer, that int32 can't hold."""
    if not is_concrete(group_sizes) or jnp.iinfo(group_sizes.dtype).max <= MAX_ROWS:
        return
    sizes = np.asarray(group_sizes)
    for place in np.argwhere(sizes != clipped(sizes))[:1].tolist():
        problem = f"`group_sizes{place}` is {sizes[tuple(place)]}, which int32 can't hold."
        site.fail(ValueError, problem, f"Pass the number of rows in each group. `lhs` has shape {lhs.shape}.")


def check_offset(site: Site, group_offset: Any) -> Array | None:
    """`group_offset` as a `()` int32 array, or None."""
    if group_offset is None:
        return None
    site = site.also(group_offset=group_offset)
    if isinstance(group_offset, int) and not isinstance(group_offset, bool):
        return as_int32(group_offset)
    is_array = isinstance(group_offset, jax.Array | np.ndarray | np.generic)
    try:
        offset: Any = group_offset if is_array else jnp.asarray(group_offset)
    except TypeError:
        site.fail(TypeError, "`group_offset` is not a number.", "Pass `jnp.int32(first)`.")
    if offset.ndim != 0:
        site.fail(
            ValueError,
            f"`group_offset` must have shape (), but has {offset.shape}.",
            "It is one number, the index of the uniform operand's first group: `jnp.int32(first)`.",
        )
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        site.fail(TypeError, "`group_offset` must be an integer.", "Pass `jnp.int32(first)`.")
    return as_int32(offset)


def check_existing(site: Site, existing: Any, shape: tuple[int, ...], dtype: Any) -> None:
    site = site.also(existing_out=existing)
    if existing.shape != shape:
        site.fail(
            ValueError,
            f"`existing_out` has shape {existing.shape} but the result has {shape}.",
            "It must be a tensor like the result.",
        )
    if jax.dtypes.canonicalize_dtype(existing.dtype) != dtype:
        site.fail(
            TypeError,
            f"`existing_out` has dtype {existing.dtype.name} but the result has {jnp.dtype(dtype).name}.",
            "Cast one to the other, or leave `preferred_element_type` out.",
        )


def check_num_actual_groups(site: Site, num_actual_groups: Any) -> None:
    if num_actual_groups is not None and not is_extent(num_actual_groups):
        site.fail(
            ValueError,
            f"`num_actual_groups` is {num_actual_groups!r}.",
            "It must be a positive int, the number of groups in the result.",
        )


def operand(site: Site, name: str, x: Any, more_dims: bool = False) -> GroupedTensor | Array:
    """An operand of `matmul`, checked: a `GroupedTensor`, or a 2-D array, which all groups share.

    `more_dims`: whether groups may have more than two dims.
    """
    if isinstance(x, GroupedTensor):
        for field, value in (("data", x.data), ("first_dims", x.first_dims), ("last_dims", x.last_dims)):
            if not is_arraylike(value) and (field == "data" or value is not None):
                problem = f"`{name}` is a GroupedTensor whose {field} is {describe(value)}, not an array."
                hint = "Pass a `GroupedTensor` of arrays."
                if array := wrapped_array(f"{name}.{field}", value):
                    problem, hint = f"`{name}.{field}` is not an array.", f"Build the tensor from `{array}`."
                site.fail(TypeError, problem, hint)
        if x.is_cotangent:
            check_has_groups(x)
        if x.is_stack:
            operands = site.operands.items()
            stacks = ", ".join(each for each, of in operands if isinstance(of, GroupedTensor) and of.is_stack)
            hint = f"Map over it: `jax.vmap(lambda {stacks}: {site.call})({stacks})`."
            site.fail(ValueError, f"`{name}` has a batch axis.", hint)
        if has_more_dims(x) and not more_dims:
            problem = f"the groups of `{name}` have more than two dims."
            site.fail(NotImplementedError, problem, "Merge the dims, or call `ragged.matmul` or `ragged.einsum`.")
        return x
    if not is_arraylike(x):
        hint = "Pass a `GroupedTensor` or an array."
        if isinstance(x, Operators):  # a `Gathered`
            hint = f"Only `lhs` may be rows that aren't gathered yet. Gather them first: `{name}.dispatch()`."
        site.fail(TypeError, f"`{name}` is not an array.", hint)
    if x.ndim < 2 or (x.ndim > 3 and not more_dims):
        hint = "A plain array has 3 dims [g, first, last], or 2 dims: one matrix that all groups share."
        if x.ndim > 3:  # Merge all dims that aren't contracted.
            g, *_, k = x.shape
            merged = f"{g}, -1, {k}" if name == "lhs" else f"{g}, {x.shape[1]}, -1"
            hint += f"\nMerge the dims that aren't contracted: `{name}.reshape({merged})`."
        site.fail(ValueError, f"`{name}` is a plain array with {x.ndim} dims.", hint)
    return GroupedTensor(as_array(x)) if x.ndim > 2 else as_array(x)


def has_more_dims(x: Any) -> bool:
    if not isinstance(x, GroupedTensor):
        return getattr(x, "ndim", 0) > 3
    return not x.is_cotangent and not x.is_stack and getattr(x.data, "ndim", 0) > (2 if any(x.ragged) else 3)


def check_out_sharding(site: Site, out_sharding: Any, operands: Operands, shape: tuple[int, ...]) -> Any:
    """`out_sharding` as the `PartitionSpec` of a result of this shape; None stays None."""
    if out_sharding is None:
        return None
    spec = getattr(out_sharding, "spec", out_sharding)
    if not isinstance(spec, PartitionSpec):
        site.fail(TypeError, f"`out_sharding` is {out_sharding!r}.", "Pass a `PartitionSpec` or a `NamedSharding`.")
    mesh = explicit_mesh(jax.tree.leaves(operands))
    if mesh is None:
        hint = "Shard an operand over one. Over `Auto` axes, use `jax.lax.with_sharding_constraint` on the result."
        site.fail(ValueError, "`out_sharding` is given, but no operand is sharded over an `Explicit` axis.", hint)
    if PartitionSpec.UNCONSTRAINED in spec.partitions or spec.reduced:
        hint = "Give each dim mesh axes or None. A result may be unreduced, but not reduced."
        site.fail(ValueError, f"`out_sharding` is {spec}.", hint)
    sizes = getattr(getattr(out_sharding, "mesh", None), "shape", None)
    if sizes is not None and dict(sizes) != dict(mesh.shape):
        problem = f"`out_sharding` has the mesh {dict(sizes)}, but the operands have the mesh {dict(mesh.shape)}."
        site.fail(ValueError, problem, "Shard both over the same mesh.")
    axes = axes_of(spec, len(shape))
    names = [name for each in axes for name in each] + [*spec.unreduced]
    if len({*names}) < len(names):
        hint = "Name each mesh axis at most once."
        site.fail(ValueError, f"`out_sharding` is {spec}, which names a mesh axis twice.", hint)
    if unknown := [name for name in names if name not in mesh.explicit_axes]:
        problem = f"`out_sharding` is {spec}, but the operands' mesh has no explicit axis {unknown[0]!r}."
        site.fail(ValueError, problem, f"Its explicit axes are {tuple(mesh.explicit_axes)}.")
    if len(axes) != len(shape):
        hint = "Give each axis of the result's buffer at most one entry."
        site.fail(ValueError, f"`out_sharding` is {spec} for a result of shape {shape}.", hint)
    for extent, each in zip(shape, axes, strict=True):
        if extent % (shards := math.prod(mesh.shape[name] for name in each)):
            problem = f"`out_sharding` is {spec}, which splits an axis of extent {extent} into {shards} shards."
            site.fail(ValueError, problem, "The number of shards must divide the extent.")
    if spec.unreduced and jax.tree.leaves(operands.epilogue):
        hint = "Sum the result over the devices first, then add `existing_out`."
        site.fail(ValueError, "`existing_out` is given, but the result is unreduced: each device would add it.", hint)
    return PartitionSpec(*spec_of(axes), unreduced=spec.unreduced)
