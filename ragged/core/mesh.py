"""Mesh helpers: operands that vary over the same manual axes, results that are sharded over explicit axes."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray, Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from ragged.core.errors import Site, is_concrete
from ragged.core.formats import accumulator_dtype, as_array, has_derivative


def vary_together(args: Sequence[Any], like: Sequence[Any] = ()) -> list[Array]:
    """`args` as arrays that all vary over every mesh axis over which any of `args` or `like` varies. In a `shard_map`,
    a primitive requires this of its operands."""
    args = [as_array(x) for x in args]
    together = [*args, *like]
    return [_varied(x, axes) if (axes := axes_beyond(x, together)) else x for x in args]


def _varied(x: Array, axes: tuple[str, ...]) -> Array:
    """`x` made to vary over these axes. Its cotangent is summed over them in the accumulator's dtype."""
    dtype = accumulator_dtype(x.dtype) if has_derivative(x.dtype) else x.dtype
    return lax.pcast(x.astype(dtype), axes, to="varying").astype(x.dtype)


def vary_over_reduced(x: Array, others: Iterable[Any]) -> Array:
    """`x`, made to vary over the mesh axes over which `others` vary and for which the type of `x` is `reduced`.

    Over a `reduced` axis, `x` is replicated, and its cotangent must stay `unreduced`: it is not summed.
    """
    unreduced = jax.typeof(x).manual_axis_type.reduced & {*axes_beyond(x, others)}
    return lax.pcast(x, tuple(sorted(unreduced)), to="varying") if unreduced else x


def varying(xs: Iterable[Any]) -> frozenset[str]:
    """The manual mesh axes over which any of these arrays or avals varies."""
    avals = (x if isinstance(x, ShapedArray) else jax.typeof(x) for x in xs)
    return frozenset().union(*(aval.manual_axis_type.varying for aval in avals))


def with_mesh(aval: ShapedArray, others: Iterable[ShapedArray]) -> ShapedArray:
    """`aval` with the mesh of `others`, if it has none. The avals of constants may have none in a `shard_map`."""
    meshes = [other.sharding.mesh for other in others if not other.sharding.mesh.empty]
    if not aval.sharding.mesh.empty or not meshes:
        return aval
    return aval.update(sharding=NamedSharding(meshes[0], PartitionSpec(*[None] * aval.ndim)))


def axes_beyond(x: Any, others: Iterable[Any]) -> tuple[str, ...]:
    """Mesh axes over which some of `others` varies but `x` doesn't."""
    return tuple(sorted(varying(others) - varying([x]), key=str))


def check_not_explicit(call: str, **operands: Any) -> None:
    """Raises `NotImplementedError` if any array in `operands` is sharded over an `Explicit` mesh axis."""
    if not any(map(_is_explicit, jax.tree.leaves(operands))):
        return
    path, x = next((path, x) for path, x in jax.tree_util.tree_leaves_with_path(operands) if _is_explicit(x))
    name, aval = keystr(path, simple=True, separator="."), x if isinstance(x, ShapedArray) else jax.typeof(x)
    problem = f"`{name}` is sharded over a mesh axis of type `Explicit`."
    hint = "Call it inside `jax.shard_map`, or make that mesh axis `Auto`."
    Site(call, {name: aval}).fail(NotImplementedError, problem, hint)


def _is_explicit(x: Any) -> bool:
    """Whether `x` is an array or aval that is sharded over an `Explicit` axis. Raises `ValueError` if it is
    unreduced."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    if not isinstance(aval, ShapedArray):
        return False
    if aval.sharding.spec.unreduced:
        hint = "Sum it first: `jax.sharding.reshard(x, spec)`."
        Site("GroupedTensor", {"x": aval}).fail(ValueError, "an operand is unreduced: not summed over devices.", hint)
    return any(axis is not None for axis in aval.sharding.spec.partitions)


def explicit_spec(x: Any) -> PartitionSpec | None:
    """The spec of an array or aval on a mesh with `Explicit` axes; None on any other mesh."""
    sharding = (x if isinstance(x, ShapedArray) else jax.typeof(x)).sharding
    return sharding.spec if sharding.mesh.explicit_axes else None


def explicit_mesh(leaves: Sequence[Any], requested: PartitionSpec | None = None) -> Any:
    """The mesh with `Explicit` axes, if an array is sharded over one of them, or if the `requested` spec shards the
    result or leaves it unreduced; else None."""
    avals = [x if isinstance(x, ShapedArray) else jax.typeof(x) for x in leaves]
    if requested is None or not (any(requested.partitions) or requested.unreduced):
        avals = [aval for aval in avals if _is_explicit(aval)]
    return next((aval.sharding.mesh for aval in avals if aval.sharding.mesh.explicit_axes), None)


def partially_manual_mesh(leaves: Sequence[Any], requested: PartitionSpec | None = None) -> Any:
    """The mesh of a `shard_map` over only some mesh axes. None without one, or if `explicit_mesh` finds a mesh."""
    meshes = (jax.typeof(x).sharding.mesh for x in leaves)
    partial = (mesh for mesh in meshes if mesh.manual_axes and len(mesh.manual_axes) < len(mesh.axis_names))
    return None if explicit_mesh(leaves, requested) is not None else next(partial, None)


def automatic_meshes(leaves: Sequence[Any]) -> list[Any]:
    """The meshes in the arrays' types that have several devices and only `Auto` axes."""
    meshes = [mesh for x in leaves if not (mesh := jax.typeof(x).sharding.mesh).empty]
    return [mesh for mesh in meshes if mesh.size > 1 and not (mesh.manual_axes or mesh.explicit_axes)]


def is_of_one_device(leaves: Sequence[Any]) -> bool:
    """Whether no device needs data of another one to multiply the arrays. They are on one device, replicated over
    `Explicit` axes, or in a `shard_map` over all mesh axes."""
    if all(jax.typeof(x).sharding.mesh.empty for x in leaves):
        return True
    return explicit_mesh(leaves) is None and partially_manual_mesh(leaves) is None and not automatic_meshes(leaves)


def on_host(arrays: Sequence[Any], copy: bool = False) -> list[np.ndarray] | None:
    """The arrays in NumPy. None if one is traced, if they are on several devices, or, without `copy`, if they are on an
    accelerator."""
    if not is_concrete(*arrays):
        return None
    devices = {device for x in arrays if isinstance(x, Array) for device in x.devices()}
    if len(devices) > 1 or not (copy or all(device.platform == "cpu" for device in devices)):
        return None
    return [np.asarray(x) for x in arrays]


def on_device(x: np.ndarray, like: Sequence[Any]) -> Array:
    """`x` as an array of JAX: on the device of the first committed array in `like`, else on the default device.
    `jnp.asarray` would compile a program for each shape."""
    committed = [each for each in like if isinstance(each, Array) and each.committed]
    return jax.device_put(x, *committed[0].devices()) if committed else jax.device_put(x)


def over_explicit_axes[F: Callable[..., Any]](function: F) -> F:
    """Decorates `function`, so that it also takes arrays that are sharded over `Explicit` axes. XLA then partitions it
    as over `Auto` axes. `_like` defines how results are sharded."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        first = next(filter(_is_explicit, leaves), None)
        if first is None:
            return function(*args, **kwargs)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        like = jax.typeof(first)

        def of_arrays(*arrays: Array) -> Any:
            replaced = list(leaves)
            for i, array in zip(at, arrays, strict=True):
                replaced[i] = array
            args, kwargs = jax.tree.unflatten(tree, replaced)
            return function(*args, **kwargs)

        arrays, mesh = [leaves[i] for i in at], like.sharding.mesh
        avals = jax.eval_shape(of_arrays, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
        shardings = jax.tree.map(lambda out: NamedSharding(mesh, _like(like, out)), avals)
        run = jax.sharding.auto_axes(of_arrays, axes=mesh.explicit_axes, out_sharding=shardings)
        # Under `jit`, replicated arrays are placed on the mesh's devices too.
        return (run if any(isinstance(x, Tracer) for x in arrays) else jax.jit(run))(*arrays)

    return cast(F, wrapper)


def over_manual_axes(collective: Callable[[Array], Array], x: Array) -> Array:
    """`collective(x)` inside a `shard_map` in which other mesh axes may be `Explicit`. Over these, the result is
    sharded as `x` is.

    JAX lowers `psum_scatter`, the derivative of `all_gather`, only if other axes are `Auto`.
    """
    sharding = jax.typeof(x).sharding
    if not (axes := sharding.mesh.explicit_axes):
        return collective(x)
    like = NamedSharding(sharding.mesh, sharding.spec)
    run: Any = jax.sharding.auto_axes(collective, axes=axes, out_sharding=like)
    return run(x)


def _like(x: Any, out: Any) -> PartitionSpec:
    """The spec of a result with the aval `out`, from the aval `x` of the first explicitly sharded operand.

    Each axis of `out`, counted from the last, is sharded like the same axis of `x` if their extents are equal and the
    number of shards divides them. For the first axis (the rows), if the ranks are equal, one extent may also be a
    multiple of the other.
    """
    spec = [*x.sharding.spec] + [None] * (x.ndim - len(x.sharding.spec))
    if out.ndim == 1:  # `out` holds one value per row, or sizes, which are replicated.
        of_rows = out.shape[0] == x.shape[0] and not jnp.issubdtype(out.dtype, jnp.integer)
        return PartitionSpec(spec[0] if of_rows else None)
    found: list[Any] = [None] * out.ndim
    for i in range(1, min(out.ndim, x.ndim) + 1):
        names = spec[-i] if isinstance(spec[-i], tuple) else (spec[-i],) if spec[-i] else ()
        smaller, larger = sorted((out.shape[-i], x.shape[-i]))
        fits = smaller == larger or (i == out.ndim == x.ndim and smaller and larger % smaller == 0)
        if fits and out.shape[-i] % prod(x.sharding.mesh.shape[name] for name in names) == 0:
            found[-i] = spec[-i]
    return PartitionSpec(*found)


def resharded(x: Array, mesh: Any, spec: PartitionSpec) -> Array:
    """`x`, sharded with this spec over a mesh with or without `Explicit` axes."""
    sharding = NamedSharding(mesh, spec)
    if mesh.explicit_axes:
        return jax.sharding.reshard(x, sharding)
    if mesh == jax.sharding.get_abstract_mesh():
        x = jax.device_put(x, spec)  # outside of `jit`, a constraint over it fails for an array on one device
    return lax.with_sharding_constraint(x, sharding)
