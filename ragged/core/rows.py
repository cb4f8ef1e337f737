"""Gathers of rows. Their transposes are gathers too.

JAX transposes a gather into a scatter, which is slower and sums in the dtype of the rows.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax._src.dispatch import apply_primitive  # no public name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Float, Int, Shaped

from ragged.core.formats import accumulator_dtype, as_array
from ragged.core.mesh import axes_beyond, vary_over_reduced, vary_together, varying, with_mesh
from ragged.core.offsets import take


def flat_rows(x: Shaped[Array, "n *d"]) -> Shaped[Array, "n flat"]:
    """`[n, *d]` reshaped to `[n, prod(d)]`."""
    return x if x.ndim == 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))


def spread_rows(
    x: Shaped[Array, "*b n d"], source: Int[Array, "*c p"], places: Int[Array, "*c n k"], dtype: Any = None
) -> Shaped[Array, "*e p d"]:
    """`out[i] = x[source[i]]` in `dtype`, by default that of `x`; zeros where `source[i]` is out of range. Each array
    may have one leading batch axis.

    `places` is the inverse of `source`: row `t` of `x` goes to the rows `places[t]` of the result. Places out of range
    are unused.
    """
    return _bind(x, source, places, collect=False, dtype=dtype)


def collect_rows(
    y: Shaped[Array, "*b p d"], source: Int[Array, "*c p"], places: Int[Array, "*c n k"], dtype: Any = None
) -> Shaped[Array, "*e n d"]:
    """The transpose of `spread_rows`: `out[t] = sum_j y[places[t, j]]`, summed in the accumulator's dtype and rounded
    once to `dtype`, by default the dtype of `y`."""
    return _bind(y, source, places, collect=True, dtype=dtype)


def collect_weighted(
    y: Shaped[Array, "p d"],
    weights: Float[Array, "n k"],
    weight_index: Int[Array, " p"],
    places: Int[Array, "n k"],
    dtype: Any = None,
) -> Shaped[Array, "n d"]:
    """`out[t] = sum_j weights[t, j] * y[places[t, j]]` in `dtype`, by default that of `y`, computed in the weights'
    dtype, which must be the accumulator's.

    `weight_index[i]`: index `t * k + j` of the weight of row `i`; out of range for a row without a token. Such rows,
    and weights without a row, may hold anything. The derivative saves `y` and the weights, but no float32 copy of `y`.
    """
    return _weighted(jnp.dtype(dtype or y.dtype), y, weights, weight_index, places)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _weighted(dtype: Any, y: Array, weights: Array, weight_index: Array, places: Array) -> Array:
    """`collect_weighted`."""
    each = spread_rows(y, places.reshape(-1), weight_index[:, None]).astype(weights.dtype)
    weights = jnp.where(places < y.shape[0], weights, jnp.zeros((), weights.dtype))
    return jnp.sum(each.reshape(*places.shape, y.shape[1]) * weights[:, :, None], axis=1).astype(dtype)


@partial(_weighted.defjvp, symbolic_zeros=True)
def _(dtype: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The tangent is computed by row, in the order of `y`. So its transpose gathers the cotangent's rows once, and
    computes both gradients from them."""
    (y, weights, weight_index, places), (dy, dweights, _, _) = primals, tangents

    def by_row(y: Array, weights: Array) -> Array:
        of_row = spread_rows(weights.reshape(-1, 1), weight_index, places.reshape(-1, 1))  # [p, 1]
        # The transpose has a barrier too: it computes both gradients before either is used. Without it, XLA would
        # postpone the gradient of the weights, and keep `y` and the cotangent's rows until then.
        y, of_row = lax.optimization_barrier((y, of_row))
        source = weight_index // places.shape[1]
        return _bind(y.astype(weights.dtype) * of_row, source, places, collect=True, dtype=dtype)

    return _weighted(dtype, *primals), tangent_of(by_row, (y, weights), (dy, dweights))


def tangent_of(function: Callable[..., Array], primals: Sequence[Array], tangents: Sequence[Any]) -> Array:
    """The tangent of `function(*primals)`. The backward pass saves only `primals`.

    A tangent that is zero is a `SymbolicZero`, or a pytree of them.
    """

    def is_zero(tangent: Any) -> bool:
        return all(isinstance(each, SymbolicZero) for each in jax.tree.leaves(tangent))

    nonzero = {i: d for i, d in enumerate(tangents) if not is_zero(d)}

    # The forward pass has none of the recomputed operations, so CSE can't merge them with it.
    @partial(jax.checkpoint, prevent_cse=False)
    def tangent(primals: Sequence[Array], nonzero: dict[int, Array]) -> Array:
        def of_replaced(replaced: dict[int, Array]) -> Array:
            return function(*(replaced.get(i, x) for i, x in enumerate(primals)))

        return jax.jvp(of_replaced, ({i: primals[i] for i in nonzero},), (nonzero,))[1]

    return tangent(primals, nonzero)


def _bind(*arrays: Array, collect: bool, dtype: Any = None) -> Array:
    """Binds the primitive to `(x, source, places)`, mapped over leading batch axes. `dtype`: as in `collect_rows`."""

    def bind(x: Array, *index: Array) -> Array:
        x = vary_over_reduced(as_array(x), index)
        return rows_p.bind(x, *vary_together(index, like=[x]), collect=collect, dtype=dtype or x.dtype)

    axes = tuple(0 if array.ndim > rank else None for array, rank in zip(arrays, (2, 1, 2), strict=True))
    return bind(*arrays) if axes == (None, None, None) else jax.vmap(bind, axes)(*arrays)


rows_p = Primitive("ragged_rows")


def _compute(x: Array, source: Array, places: Array, *, collect: bool, dtype: Any) -> Array:
    if not collect:
        return take(x, source, 0).astype(dtype)
    if places.shape[1] == 1:
        return take(x, places[:, 0], 0).astype(dtype)
    return jnp.sum(take(x, places, 0).astype(accumulator_dtype(x.dtype)), axis=1).astype(dtype)


@rows_p.def_abstract_eval
def _(x: Any, source: Any, places: Any, *, collect: bool, dtype: Any) -> Any:
    x = with_mesh(x, [source, places])
    manual = x.manual_axis_type.update(varying=varying([x, source, places]))
    shape = ((places if collect else source).shape[0], x.shape[1])
    return x.update(shape=shape, dtype=dtype, weak_type=False, manual_axis_type=manual)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    out, (dx, *_) = rows_p.bind(*primals, **params), tangents
    if isinstance(dx, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, rows_p.bind(dx, *vary_together(primals[1:], like=primals), **params)


def _transpose(ct: Any, x: Any, source: Any, places: Any, *, collect: bool, dtype: Any) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [None] * 3
    # The rows are replicated over these axes: cotangents are summed over them, then rounded.
    axes = axes_beyond(x.aval, [ct, source, places])
    dtype = accumulator_dtype(x.aval.dtype) if axes else x.aval.dtype
    back = rows_p.bind(*vary_together([ct, source, places]), collect=not collect, dtype=dtype)
    return [lax.psum(back, axes).astype(x.aval.dtype) if axes else back, None, None]


def _batch(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Array, int]:
    """If only `x` is batched, each row becomes `b` times as long. If indices are batched, there are `b` times as many
    rows."""
    (x, source, places), size = args, next(a.shape[d] for a, d in zip(args, axes, strict=True) if d is not None)
    if list(axes[1:]) == [None, None]:
        x = jnp.moveaxis(x, axes[0], 1)  # [n, b, d]
        out = rows_p.bind(x.reshape(x.shape[0], math.prod(x.shape[1:])), source, places, **params)
        return out.reshape(out.shape[0], size, x.shape[2]), 1
    x, source, places = (
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, axes, strict=True)
    )
    n, p, k = places.shape[1], source.shape[1], places.shape[2]
    first = jnp.arange(size, dtype=jnp.int32)
    source = jnp.where(source < n, source + first[:, None] * n, size * n).reshape(-1)
    places = jnp.where(places < p, places + first[:, None, None] * p, size * p).reshape(size * n, k)
    out = rows_p.bind(x.reshape(size * x.shape[1], x.shape[2]), source, places, **params)
    return out.reshape(size, n if params["collect"] else p, x.shape[2]), 0


rows_p.def_impl(partial(apply_primitive, rows_p))
ad.primitive_jvps[rows_p] = _jvp
ad.primitive_transposes[rows_p] = _transpose
batching.primitive_batchers[rows_p] = _batch
mlir.register_lowering(rows_p, mlir.lower_fun(_compute, multiple_results=False))
