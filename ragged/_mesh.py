"""What a mesh asks of values: to vary over the same manual axes, and, so far, not to be sharded over explicit ones."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray
from jax.tree_util import keystr

from ragged._errors import Site


def vary_together(args: Sequence[Any], like: Sequence[Any] = ()) -> list[Array]:
    """`args` as arrays that all vary over the same mesh axes, as a `shard_map`'s operands must; `like`'s too."""
    args = [jnp.asarray(x) for x in args]
    varying = [jax.typeof(x).manual_axis_type.varying for x in args]
    everywhere = frozenset().union(*varying, *(jax.typeof(x).manual_axis_type.varying for x in like))
    return [
        lax.pcast(x, tuple(sorted(everywhere - axes, key=str)), to="varying") if everywhere - axes else x
        for x, axes in zip(args, varying, strict=True)
    ]


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
    return isinstance(aval, ShapedArray) and any(axis is not None for axis in aval.sharding.spec)
