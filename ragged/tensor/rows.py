"""Rows moved by index, and back: a gather whose transpose is a gather.

Left to itself, JAX transposes a gather into a scatter, which is slower, and adds up in a narrow dtype.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Float, Int, Shaped

from ragged._mesh import vary_together
from ragged.quant.formats import accumulator_dtype


def flat_rows(x: Shaped[Array, "n *d"]) -> Shaped[Array, "n flat"]:
    """`[n, *d]` with all but the rows in one dim."""
    return x if x.ndim == 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))


def spread_rows(
    x: Shaped[Array, "*b n d"], source: Int[Array, "*c p"], places: Int[Array, "*c n k"]
) -> Shaped[Array, "*e p d"]:
    """`out[i] = x[source[i]]`, zeros where `source[i]` is no row. Each may have one batch axis in front.

    `places` says the same the other way round: row `t` goes to the rows `places[t]`, but for those past the last.
    """
    return _moved(x, source, places, collect=False)


def collect_rows(
    y: Shaped[Array, "*b p d"], source: Int[Array, "*c p"], places: Int[Array, "*c n k"]
) -> Shaped[Array, "*e n d"]:
    """The transpose: `out[t] = sum_j y[places[t, j]]`, summed in float32 and rounded once."""
    return _moved(y, source, places, collect=True)


def collect_weighted(
    y: Shaped[Array, "p d"], weights: Float[Array, "n k"], which: Int[Array, " p"], places: Int[Array, "n k"]
) -> Shaped[Array, "n d"]:
    """`out[t] = sum_j weights[t, j] * y[places[t, j]]`, of `y`'s dtype, computed in the weights', which is wide.

    `which[i]`: the weight of row `i`, as `token * k + j`; of no token where that is past the end. Rows of no token, and
    weights of no row, may be anything. The derivative keeps `y` and the weights, nothing wide.
    """
    return _weighted(y, weights, which, places)


@jax.custom_jvp
def _weighted(y: Array, weights: Array, which: Array, places: Array) -> Array:
    each = spread_rows(y, places.reshape(-1), which[:, None]).astype(weights.dtype)
    weights = jnp.where(places < y.shape[0], weights, jnp.zeros((), weights.dtype))
    return jnp.sum(each.reshape(*places.shape, y.shape[1]) * weights[:, :, None], axis=1).astype(y.dtype)


@partial(_weighted.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """By row, not by token: the transpose reads each row of the cotangent where `y`'s is, and makes both of it."""
    (y, weights, which, places), (*moving, _, _) = primals, tangents

    def by_row(y: Array, weights: Array) -> Array:
        of_row = spread_rows(weights.reshape(-1, 1), which, places.reshape(-1, 1))  # [p, 1]
        return _moved(y.astype(weights.dtype) * of_row, which // places.shape[1], places, collect=True, dtype=y.dtype)

    return _weighted(*primals), tangent_of(by_row, (y, weights), moving)


def tangent_of(function: Callable[..., Array], primals: Sequence[Array], tangents: Sequence[Any]) -> Array:
    """That of `function(*primals)`, for tangents some of which may be a `SymbolicZero`; keeps nothing but `primals`."""
    moving = {i: d for i, d in enumerate(tangents) if not isinstance(d, SymbolicZero)}

    @partial(jax.checkpoint, prevent_cse=False)  # nothing of it is in the forward pass
    def tangent(primals: Sequence[Array], moving: dict[int, Array]) -> Array:
        def of_moved(moved: dict[int, Array]) -> Array:
            return function(*(moved.get(i, x) for i, x in enumerate(primals)))

        return jax.jvp(of_moved, ({i: primals[i] for i in moving},), (moving,))[1]

    return tangent(primals, moving)


def _moved(*arrays: Array, collect: bool, dtype: Any = None) -> Array:
    """`dtype`: of the result, if another than the rows'."""

    def move(*arrays: Array) -> Array:
        return rows_p.bind(*vary_together(arrays), collect=collect, dtype=dtype or arrays[0].dtype)

    axes = tuple(0 if array.ndim > rank else None for array, rank in zip(arrays, (2, 1, 2), strict=True))
    return move(*arrays) if axes == (None, None, None) else jax.vmap(move, axes)(*arrays)


rows_p = Primitive("ragged_rows")


def _take(x: Array, index: Array) -> Array:
    """`x[index]`, zeros past the end; the index is never negative."""
    if isinstance(x.shape[0], int) and not x.shape[0]:
        return jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
    return x.at[index].get(mode="fill", fill_value=0)


def _compute(x: Array, source: Array, places: Array, *, collect: bool, dtype: Any) -> Array:
    if not collect:
        return _take(x, source).astype(dtype)
    if places.shape[1] == 1:
        return _take(x, places[:, 0]).astype(dtype)
    return jnp.sum(_take(x, places).astype(accumulator_dtype(x.dtype)), axis=1).astype(dtype)


@rows_p.def_abstract_eval
def _(x: Any, source: Any, places: Any, *, collect: bool, dtype: Any) -> Any:
    return x.update(shape=((places if collect else source).shape[0], x.shape[1]), dtype=dtype, weak_type=False)


@rows_p.def_impl
def _(*args: Array, **how: Any) -> Array:
    return jax.jit(_compute, static_argnames=("collect", "dtype"))(*args, **how)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> tuple[Any, Any]:
    out, (dx, *_) = rows_p.bind(*primals, **how), tangents
    if isinstance(dx, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, rows_p.bind(*vary_together([dx, *primals[1:]]), **how)


def _transpose(ct: Any, x: Any, source: Any, places: Any, *, collect: bool, dtype: Any) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [None] * 3
    return [rows_p.bind(*vary_together([ct, source, places]), collect=not collect, dtype=x.aval.dtype), None, None]


def _batch(args: Sequence[Any], axes: Sequence[Any], **how: Any) -> tuple[Array, int]:
    """A batch of rows is one of longer rows; batches of indices are one of more rows."""
    (x, source, places), size = args, next(a.shape[d] for a, d in zip(args, axes, strict=True) if d is not None)
    if list(axes[1:]) == [None, None]:
        x = jnp.moveaxis(x, axes[0], 1)  # [n, b, d]
        out = rows_p.bind(x.reshape(x.shape[0], math.prod(x.shape[1:])), source, places, **how)
        return out.reshape(out.shape[0], size, x.shape[2]), 1
    x, source, places = (
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, axes, strict=True)
    )
    n, p, k = places.shape[1], source.shape[1], places.shape[2]
    first = jnp.arange(size, dtype=jnp.int32)
    source = jnp.where(source < n, source + first[:, None] * n, size * n).reshape(-1)
    places = jnp.where(places < p, places + first[:, None, None] * p, size * p).reshape(size * n, k)
    out = rows_p.bind(x.reshape(size * x.shape[1], x.shape[2]), source, places, **how)
    return out.reshape(size, n if how["collect"] else p, x.shape[2]), 0


ad.primitive_jvps[rows_p] = _jvp
ad.primitive_transposes[rows_p] = _transpose
batching.primitive_batchers[rows_p] = _batch
mlir.register_lowering(rows_p, mlir.lower_fun(_compute, multiple_results=False))
