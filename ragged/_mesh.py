"""What a mesh asks of values: to vary over the same manual axes; and what explicit axes ask of results."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray, Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from ragged._errors import Site


def vary_together(args: Sequence[Any], like: Sequence[Any] = ()) -> list[Array]:
    """`args` as arrays that all vary over the same mesh axes, as a `shard_map`'s operands must; `like`'s too."""
    args = [jnp.asarray(x) for x in args]
    together = [*args, *like]
    return [lax.pcast(x, axes, to="varying") if (axes := axes_beyond(x, together)) else x for x in args]


def varying(xs: Iterable[Any]) -> frozenset[str]:
    """The manual mesh axes over which any of these arrays or avals varies."""
    avals = (x if isinstance(x, ShapedArray) else jax.typeof(x) for x in xs)
    return frozenset().union(*(aval.manual_axis_type.varying for aval in avals))


def axes_beyond(x: Any, others: Iterable[Any]) -> tuple[str, ...]:
    """Those over which any of the others varies, and `x` doesn't."""
    return tuple(sorted(varying(others) - varying([x]), key=str))


def refuse_explicit(call: str, **operands: Any) -> None:
    """Raises a `NotImplementedError` if an array in `operands` is sharded over a mesh axis of type `Explicit`."""
    if not any(map(_is_explicit, jax.tree.leaves(operands))):
        return
    path, x = next((path, x) for path, x in jax.tree_util.tree_leaves_with_path(operands) if _is_explicit(x))
    name, aval = keystr(path, simple=True, separator="."), x if isinstance(x, ShapedArray) else jax.typeof(x)
    problem = f"`{name}` is sharded over a mesh axis of type `Explicit`."
    mend = "Call it inside `jax.shard_map`, or make that mesh axis `Auto`."
    Site(call, {name: aval}).fail(NotImplementedError, problem, mend)


def _is_explicit(x: Any) -> bool:
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    if not isinstance(aval, ShapedArray):
        return False
    if aval.sharding.spec.unreduced:
        mend = "Sum it first: `jax.sharding.reshard(x, spec)`."
        Site("GroupedTensor", {"x": aval}).fail(ValueError, "an operand is not yet summed over devices.", mend)
    return any(axis is not None for axis in aval.sharding.spec.partitions)


def explicit_spec(x: Any) -> PartitionSpec | None:
    """How an array or aval is sharded over a mesh with `Explicit` axes; None over any other mesh."""
    sharding = (x if isinstance(x, ShapedArray) else jax.typeof(x)).sharding
    return sharding.spec if sharding.mesh.explicit_axes else None


def explicit_mesh(leaves: Sequence[Any], asked: PartitionSpec | None = None) -> Any:
    """The mesh over whose `Explicit` axes an array is sharded, or is `asked` to be, if any is."""
    avals = [x if isinstance(x, ShapedArray) else jax.typeof(x) for x in leaves]
    if asked is None or not (any(asked.partitions) or asked.unreduced):
        avals = [aval for aval in avals if _is_explicit(aval)]
    return next((aval.sharding.mesh for aval in avals if aval.sharding.mesh.explicit_axes), None)


def half_manual_mesh(leaves: Sequence[Any], asked: PartitionSpec | None = None) -> Any:
    """The mesh of a `shard_map` over some of its axes, if no operand is sharded over another `Explicit` one, nor is
    `asked` to be."""
    meshes = (jax.typeof(x).sharding.mesh for x in leaves)
    half = (mesh for mesh in meshes if mesh.manual_axes and len(mesh.manual_axes) < len(mesh.axis_names))
    return None if explicit_mesh(leaves, asked) is not None else next(half, None)


def is_of_one_device(leaves: Sequence[Any]) -> bool:
    """Whether arrays are each device's own: no mesh of theirs has an axis that isn't manual and shares them."""
    meshes = [mesh for x in leaves if not (mesh := jax.typeof(x).sharding.mesh).empty]
    shared = any(mesh.size > 1 and not (mesh.manual_axes or mesh.explicit_axes) for mesh in meshes)
    return not shared and explicit_mesh(leaves) is None and half_manual_mesh(leaves) is None


def over_explicit_axes[F: Callable[..., Any]](function: F) -> F:
    """`function`, also of arrays that are sharded over `Explicit` axes: XLA partitions it, as over `Auto` ones.

    The results are sharded as the first such array is: along an axis that is as long, counted from the last; and along
    the first axis (of rows) also if one has a multiple of the other's.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        first = next(filter(_is_explicit, leaves), None)
        if first is None:
            return function(*args, **kwargs)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        like = jax.typeof(first)

        def of_arrays(*arrays: Array) -> Any:
            given = list(leaves)
            for i, array in zip(at, arrays, strict=True):
                given[i] = array
            args, kwargs = jax.tree.unflatten(tree, given)
            return function(*args, **kwargs)

        arrays, mesh = [leaves[i] for i in at], like.sharding.mesh
        avals = jax.eval_shape(of_arrays, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
        shardings = jax.tree.map(lambda out: NamedSharding(mesh, _like(like, out)), avals)
        run = jax.sharding.auto_axes(of_arrays, axes=mesh.explicit_axes, out_sharding=shardings)
        # Outside of `jit`, what is sharded nowhere needs devices too.
        return (run if any(isinstance(x, Tracer) for x in arrays) else jax.jit(run))(*arrays)

    return cast(F, wrapper)


def over_manual_axes(collective: Callable[[Array], Array], x: Array) -> Array:
    """`collective(x)` inside of a `shard_map`, where other axes may be `Explicit`: the result is sharded over those as
    `x` is.

    Next to such, JAX doesn't lower `psum_scatter`, nor so the derivative of `all_gather`; next to `Auto` ones it does.
    """
    sharding = jax.typeof(x).sharding
    if not (axes := sharding.mesh.explicit_axes):
        return collective(x)
    like = NamedSharding(sharding.mesh, sharding.spec)
    run: Any = jax.sharding.auto_axes(collective, axes=axes, out_sharding=like)
    return run(x)


def _like(x: Any, out: Any) -> PartitionSpec:
    """The spec of a result of an operand of type `x`."""
    spec = [*x.sharding.spec] + [None] * (x.ndim - len(x.sharding.spec))
    if out.ndim == 1:  # one value a row; sizes are everywhere
        of_rows = out.shape[0] == x.shape[0] and not jnp.issubdtype(out.dtype, jnp.integer)
        return PartitionSpec(spec[0] if of_rows else None)
    found: list[Any] = [None] * out.ndim
    for i in range(1, min(out.ndim, x.ndim) + 1):
        names = spec[-i] if isinstance(spec[-i], tuple) else (spec[-i],) if spec[-i] else ()
        least, most = sorted((out.shape[-i], x.shape[-i]))
        fits = least == most or (i == out.ndim == x.ndim and least and most % least == 0)
        if fits and out.shape[-i] % prod(x.sharding.mesh.shape[name] for name in names) == 0:
            found[-i] = spec[-i]
    return PartitionSpec(*found)


def resharded(x: Array, mesh: Any, spec: PartitionSpec) -> Array:
    """`x` sharded as `spec`."""
    sharding = NamedSharding(mesh, spec)
    return jax.sharding.reshard(x, sharding) if mesh.explicit_axes else lax.with_sharding_constraint(x, sharding)
