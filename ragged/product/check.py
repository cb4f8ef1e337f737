"""What every public product checks before it does anything."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from ragged._errors import Site, check_packed, describe, is_arraylike, is_count
from ragged._mesh import explicit_mesh
from ragged.backends.base import Refusal, Target
from ragged.backends.config import RECORDS, Configs, in_context
from ragged.backends.schedule import as_int32
from ragged.product import lowering
from ragged.product.operands import Call, Operand, Operands, Options
from ragged.product.sharding import axes_of, spec_of
from ragged.product.shared import folded
from ragged.quant.formats import accumulator_dtype, promote
from ragged.tensor.tensor import GroupedTensor

Tiling = tuple[int, int, int] | Callable[[int, int, int], tuple[int, int, int] | None] | None


def result_dtype(site: Site, lhs: Any, rhs: Any, preferred: Any, existing: Any) -> Any:
    """The result's dtype: asked for, or that of `existing_out`, or the operands' common one."""
    for name, dtype in (("lhs", lhs), ("rhs", rhs)):
        if jnp.issubdtype(dtype, jnp.complexfloating):
            site.fail(NotImplementedError, f"`{name}` is complex.", "Multiply the real and imaginary parts apart.")
        if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
            site.fail(TypeError, f"`{name}` has dtype {dtype}.", "Cast it to a float or an integer dtype.")
        if dtype == jnp.float8_e8m0fnu:
            site.fail(TypeError, f"`{name}` has dtype {dtype}, which has no zero.", "It is for scales: cast it.")
    lhs, rhs = jax.dtypes.canonicalize_dtype(lhs), jax.dtypes.canonicalize_dtype(rhs)
    floats = [d for d in (lhs, rhs) if jnp.issubdtype(d, jnp.floating)]
    asked = preferred is not None
    if not asked and existing is not None:
        preferred, site = existing.dtype, site.also(existing_out=existing)
    if preferred is not None:
        try:
            preferred = jax.dtypes.canonicalize_dtype(preferred)
            numeric = jnp.issubdtype(preferred, jnp.floating) or jnp.issubdtype(preferred, jnp.integer)
            numeric = numeric and preferred != jnp.float8_e8m0fnu  # it has no zero for the tail
        except TypeError:
            numeric = False
        if not numeric or (floats and jnp.issubdtype(preferred, jnp.integer)):
            site.fail(
                TypeError,
                f"`preferred_element_type` is {_name(preferred)}, which can't hold the product."
                if asked
                else f"`existing_out` has dtype {preferred}, which can't hold the product.",
                "Pass a real floating dtype (for integer operands, an integer dtype will do), or None.",
            )
        return jnp.dtype(preferred)
    if not floats:
        return accumulator_dtype(promote(lhs, rhs))
    wide = [d for d in floats if jnp.dtype(d).itemsize > 1]
    return promote(wide[0], wide[-1]) if wide else jnp.dtype(jnp.bfloat16)


def _name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else repr(dtype)


def check_options(
    site: Site,
    backend: Any,
    precision: Any,
    tiling: Any,
    interpret: Any,
    extents: tuple[Any, Any, Any],
    config: Any = None,
) -> Options:
    """The options of a call whose product is `extents = (m, k, n)`."""
    # Which looks for packages, so not for every call.
    refusals = {} if backend is None else {name: known.refusal for name, known in lowering.BACKENDS.items()}
    if backend is not None and (backend not in list(refusals) or refusals[backend]):
        available = ", ".join(repr(name) for name, refusal in refusals.items() if not refusal)
        missing = [f" Not available: {name!r} ({refusal.reason})." for name, refusal in refusals.items() if refusal]
        site.fail(
            ValueError,
            f"backend {backend!r} {'is not available here' if backend in list(refusals) else 'does not exist'}.",
            f"Available: {available}.{''.join(missing)}\n`backend=None` takes the platform's own.",
        )
    try:
        if precision is not None:
            one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
            jax.eval_shape(lambda x: jax.lax.dot(x, x, precision=precision), one)
    except (TypeError, ValueError):
        site.fail(ValueError, f"unknown `precision` {precision!r}.", "Pass what `jax.lax.dot_general` takes.")
    if not isinstance(interpret, bool) and not _is_interpret_params(interpret):
        site.fail(
            TypeError,
            f"`interpret` must be a bool, not {interpret!r}.",
            "Pass True or False; or, for TPU kernels, `pltpu.InterpretParams`.",
        )
    if callable(tiling):
        chosen = tiling(*extents)
        if chosen is None:
            site.fail(
                ValueError,
                f"no tuned tiling for (m, k, n) = {extents}.",
                "Have `tiling` return a tuple for it, or pass `tiling=None` for the library's own choice.",
            )
        tiling = chosen
    if tiling is not None:
        sound = isinstance(tiling, tuple | list) and len(tiling) == 3
        if not sound or not all(map(is_count, tiling)):
            site.fail(
                ValueError,
                f"`tiling` is {tiling!r}.",
                "It must be three positive ints (tile_m, tile_k, tile_n), a function of (m, k, n), or None.",
            )
        tiling = tuple(int(t) for t in tiling)
    precision = tuple(precision) if isinstance(precision, list) else precision
    configs, cached = in_context()
    if config is not None:
        if tiling is not None:
            site.fail(
                ValueError, "both `config` and `tiling` are given.", "Pass one of them: a configuration has tiles."
            )
        configs = Configs.checked(site, config)
        if backend is not None and configs.out and all(each.backend != backend for each in configs.out):
            problem = f"`config` is {configs.out[0]!r}, for backend {configs.out[0].backend!r}, not {backend!r}."
            site.fail(ValueError, problem, f"Pass a `{RECORDS[backend].__name__}`.")
    return Options(
        precision=precision,
        backend=backend,
        tiling=tiling,
        interpret=interpret,
        configs=configs,
        source="" if configs == Configs() else "using" if config is None else "config",
        cached=cached,
    )


def check_plan(site: Site, x: Operands, call: Call, casts: tuple[Any, Any] = (None, None)) -> None:
    """Whether rows can be counted, and kernels can do what was asked of them: of the backend that was named, or those
    that `config` is for.

    `casts`: of a recipe.
    """
    p = call.product
    for letters, shape in ((p.lhs, x.lhs_shape), (p.rhs, x.rhs.data.shape), (p.out, call.shape)):
        if letters[0] in p.ragged:
            check_packed(site, shape[-2])
    options = call.options
    asked = {each.backend for each in options.configs.out} if options.source == "config" else set[str]()
    names = asked if options.backend is None else {options.backend} - ({"xla"} - asked)
    if not names:
        return
    x, call, _ = folded(x, call)
    narrow = [
        Operand(jax.ShapeDtypeStruct(data.shape, getattr(cast, "dtype", None) or data.dtype))
        for (data, _), cast in zip((x.lhs, x.rhs), casts, strict=True)
    ]
    avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x._replace(lhs=narrow[0], rhs=narrow[1]))
    for name in names:
        found = lowering.ask(name, avals, call._replace(out_batch=True), Target(interpret=True))
        if isinstance(found, Refusal) and found.mend:
            site.fail(found.error, found.reason, found.mend)


def _is_interpret_params(x: Any) -> bool:
    from jax.experimental.pallas.tpu import InterpretParams  # which imports all of Pallas

    return isinstance(x, InterpretParams)


def check_offset(site: Site, group_offset: Any) -> Array | None:
    """`group_offset` as a `()` int32 array."""
    if group_offset is None:
        return None
    site = site.also(group_offset=group_offset)
    if isinstance(group_offset, int) and not isinstance(group_offset, bool):
        return as_int32(group_offset)
    own = isinstance(group_offset, jax.Array | np.ndarray | np.generic)
    try:
        offset: Any = group_offset if own else jnp.asarray(group_offset)
    except TypeError:
        site.fail(TypeError, "`group_offset` is not a number.", "Pass `jnp.int32(first)`.")
    if offset.ndim != 0:
        site.fail(
            ValueError,
            f"`group_offset` must have shape (), but has {offset.shape}.",
            "It is one number, the index of the first group held: `jnp.int32(first)`.",
        )
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        site.fail(TypeError, "`group_offset` must be an integer.", "Pass `jnp.int32(first)`.")
    return as_int32(offset)


def check_existing(site: Site, existing: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Whether the buffer `existing_out` fits the result's."""
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
    if num_actual_groups is not None and not is_count(num_actual_groups):
        site.fail(
            ValueError,
            f"`num_actual_groups` is {num_actual_groups!r}.",
            "It must be a positive int: how many groups the result holds.",
        )


def operand(site: Site, name: str, x: Any, more_dims: bool = False) -> GroupedTensor | Array:
    """An operand of `matmul`: a `GroupedTensor`, or an array of rank 2 (shared by all groups).

    `more_dims`: whether groups may have more than two.
    """
    if isinstance(x, GroupedTensor):
        for field, value in (("data", x.data), ("first_dims", x.first_dims), ("last_dims", x.last_dims)):
            if not is_arraylike(value) and (field == "data" or value is not None):
                problem = f"`{name}` is a GroupedTensor whose {field} is {describe(value)}, not an array."
                site.fail(TypeError, problem, "Pass a `GroupedTensor` of arrays.")
        if x.is_cotangent:
            x._require_groups()
        if x.is_stack:
            site.fail(ValueError, f"`{name}` has a batch axis.", "Map over it: `jax.vmap(ragged.matmul)(lhs, rhs)`.")
        if has_more_dims(x) and not more_dims:
            problem = f"the groups of `{name}` have more than two dims."
            site.fail(NotImplementedError, problem, "Merge them, or call `ragged.matmul` or `ragged.einsum`.")
        return x
    if not is_arraylike(x):
        site.fail(TypeError, f"`{name}` is not an array.", "Pass a `GroupedTensor` or an array.")
    if x.ndim < 2 or (x.ndim > 3 and not more_dims):
        mend = "A plain array is uniform with 3 dims [g, first, last], or one matrix shared by all groups with 2."
        if x.ndim > 3:  # what isn't contracted is one dim
            g, *_, k = x.shape
            merged = f"{g}, -1, {k}" if name == "lhs" else f"{g}, {x.shape[1]}, -1"
            mend += f"\nMerge the dims that aren't contracted: `{name}.reshape({merged})`."
        site.fail(ValueError, f"`{name}` is a plain array with {x.ndim} dims.", mend)
    return GroupedTensor(jnp.asarray(x)) if x.ndim > 2 else jnp.asarray(x)


def has_more_dims(x: Any) -> bool:
    """Whether an operand's groups have more than two dims."""
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
        mend = "Shard an operand over one; over `Auto` axes, `jax.lax.with_sharding_constraint` the result."
        site.fail(ValueError, "`out_sharding` is given, but no operand is sharded over an `Explicit` axis.", mend)
    if PartitionSpec.UNCONSTRAINED in spec.partitions or spec.reduced:
        site.fail(ValueError, f"`out_sharding` is {spec}.", "Give each axis mesh axes or None; unreduced ones too.")
    of_mesh = getattr(getattr(out_sharding, "mesh", None), "shape", None)
    if of_mesh is not None and dict(of_mesh) != dict(mesh.shape):
        problem = f"`out_sharding` is over a mesh of {dict(of_mesh)}, the operands over one of {dict(mesh.shape)}."
        site.fail(ValueError, problem, "Shard both over one mesh.")
    axes = axes_of(spec, len(shape))
    names = [name for each in axes for name in each] + [*spec.unreduced]
    if len({*names}) < len(names):
        site.fail(ValueError, f"`out_sharding` is {spec}, which names a mesh axis twice.", "Name each at most once.")
    if unknown := [name for name in names if name not in mesh.explicit_axes]:
        problem = f"`out_sharding` is {spec}, but the operands' mesh has no explicit axis {unknown[0]!r}."
        site.fail(ValueError, problem, f"Its explicit axes are {tuple(mesh.explicit_axes)}.")
    if len(axes) != len(shape):
        mend = "Give each axis of the result's buffer at most one entry."
        site.fail(ValueError, f"`out_sharding` is {spec} for a result of shape {shape}.", mend)
    for extent, each in zip(shape, axes, strict=True):
        if extent % (ways := math.prod(mesh.shape[name] for name in each)):
            problem = f"`out_sharding` is {spec}, which cuts an axis of {extent} into {ways}."
            site.fail(ValueError, problem, "The mesh axes must divide the extent that they shard.")
    if spec.unreduced and jax.tree.leaves(operands.epilogue):
        mend = "Add it once the result is summed."
        site.fail(ValueError, "`existing_out` is given, but the result is unreduced: each device would add it.", mend)
    return PartitionSpec(*spec_of(axes), unreduced=spec.unreduced)
