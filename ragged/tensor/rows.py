"""Rows moved by index, and back: a gather whose transpose is a gather.

Left to itself, JAX transposes a gather into a scatter, which is slower, and adds up in a narrow dtype.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Int, Shaped

from ragged._mesh import vary_together
from ragged.quant.formats import accumulator_dtype


def spread_rows(x: Shaped[Array, "n d"], source: Int[Array, " p"], places: Int[Array, "n k"]) -> Shaped[Array, "p d"]:
    """`out[i] = x[source[i]]`, zeros where `source[i]` is no row.

    `places` says the same the other way round: row `t` goes to the rows `places[t]`, but for those past the last.
    """
    return rows_p.bind(*vary_together([x, source, places]), collect=False)


def collect_rows(y: Shaped[Array, "p d"], source: Int[Array, " p"], places: Int[Array, "n k"]) -> Shaped[Array, "n d"]:
    """The transpose: `out[t] = sum_j y[places[t, j]]`, summed in float32 and rounded once."""
    return rows_p.bind(*vary_together([y, source, places]), collect=True)


rows_p = Primitive("ragged_rows")


def _take(x: Array, index: Array) -> Array:
    """`x[index]`, zeros past the end; the index is never negative."""
    return x.at[index].get(mode="fill", fill_value=0)


def _compute(x: Array, source: Array, places: Array, *, collect: bool) -> Array:
    if not collect:
        return _take(x, source)
    if places.shape[1] == 1:
        return _take(x, places[:, 0])
    return jnp.sum(_take(x, places).astype(accumulator_dtype(x.dtype)), axis=1).astype(x.dtype)


@rows_p.def_abstract_eval
def _(x: Any, source: Any, places: Any, *, collect: bool) -> Any:
    return x.update(shape=((places if collect else source).shape[0], x.shape[1]), weak_type=False)


@rows_p.def_impl
def _(*args: Array, collect: bool) -> Array:
    return jax.jit(_compute, static_argnames="collect")(*args, collect=collect)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, collect: bool) -> tuple[Any, Any]:
    out, (dx, *_) = rows_p.bind(*primals, collect=collect), tangents
    if isinstance(dx, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, rows_p.bind(*vary_together([dx, *primals[1:]]), collect=collect)


def _transpose(ct: Any, x: Any, source: Any, places: Any, *, collect: bool) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [None] * 3
    return [rows_p.bind(*vary_together([ct, source, places]), collect=not collect), None, None]


def _batch(args: Sequence[Any], axes: Sequence[Any], *, collect: bool) -> tuple[Array, int]:
    """A batch of rows is one of longer rows; batches of indices are one of more rows."""
    (x, source, places), size = args, next(a.shape[d] for a, d in zip(args, axes, strict=True) if d is not None)
    if list(axes[1:]) == [None, None]:
        x = jnp.moveaxis(x, axes[0], 1)  # [n, b, d]
        out = rows_p.bind(x.reshape(x.shape[0], -1), source, places, collect=collect)
        return out.reshape(out.shape[0], size, x.shape[2]), 1
    x, source, places = (
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, axes, strict=True)
    )
    n, p, k = places.shape[1], source.shape[1], places.shape[2]
    first = jnp.arange(size, dtype=jnp.int32)
    source = jnp.where(source < n, source + first[:, None] * n, size * n).reshape(-1)
    places = jnp.where(places < p, places + first[:, None, None] * p, size * p).reshape(-1, k)
    out = rows_p.bind(x.reshape(-1, x.shape[-1]), source, places, collect=collect)
    return out.reshape(size, -1, x.shape[-1]), 0


ad.primitive_jvps[rows_p] = _jvp
ad.primitive_transposes[rows_p] = _transpose
batching.primitive_batchers[rows_p] = _batch
mlir.register_lowering(rows_p, mlir.lower_fun(_compute, multiple_results=False))
