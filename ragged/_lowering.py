"""From a product to the kernel that computes it: the eight layouts come down to four kernels.

ragged letters            kernel
none                      `lax.dot_general`, on every platform
one, kept                 `grouped_matmul` (forward, dgrad, and both from the left)
the contracted one        `transposed_grouped_matmul` (wgrad)
two or three              `tiled_matmul`
"""

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ragged._layout import Product
from ragged.kernels import schedule, xla


class Options(NamedTuple):
    """How a product is computed. `tiling` has one entry for each of `m`, `k`, `n`."""

    precision: Any = None
    backend: str | None = None
    tiling: tuple[int, int, int] | None = None
    interpret: bool = False


BACKENDS: dict[str, ModuleType | str] = {
    "xla": xla,
    "pallas_tpu": "this version of ragged has no TPU kernels yet",
    "triton_gpu": "this version of ragged has no GPU kernels yet",
}
"""Each backend's module, or why there is none."""


def check_backend(name: str | None, call: str) -> None:
    """Raises a `ValueError` unless `name` is None or an available backend."""
    if name is None or isinstance(BACKENDS.get(name), ModuleType):
        return
    available = [repr(n) for n, module in BACKENDS.items() if isinstance(module, ModuleType)]
    missing = [f"{n!r} ({why})" for n, why in BACKENDS.items() if isinstance(why, str)]
    problem = "is not available here" if name in BACKENDS else "does not exist"
    raise ValueError(
        f"`{call}`: backend {name!r} {problem}.\n"
        f"Available: {', '.join(available)}. Not available: {', '.join(missing)}.\n"
        "`backend=None` takes the platform's own."
    )


def compute(
    backend: str,
    lhs: Array,
    rhs: Array,
    sizes: tuple[Array, ...],
    offset: Array | None,
    existing: Array | None,
    *,
    product: Product,
    shape: tuple[int, ...],
    dtype: Any,
    out_batch: bool,
    options: Options,
) -> Array:
    """The product on one backend. Operands and result as in `_primitive`."""
    module = BACKENDS[backend]
    assert isinstance(module, ModuleType)
    p = product
    contracted = next(letter for letter in "mkn" if letter not in p.out)
    batched = lhs.ndim > p.ndim(p.lhs) or rhs.ndim > p.ndim(p.rhs) or any(s.ndim > 1 for s in sizes)
    batch = _batch_size(lhs, rhs, sizes, p) if batched else None
    if 0 in lhs.shape or 0 in rhs.shape or 0 in shape or any(s.shape[-1] == 0 for s in sizes):
        zeros = jnp.zeros((batch, *shape) if out_batch else shape, dtype)
        return zeros if existing is None else zeros + zero_tail(existing, sizes, p)
    if existing is not None:
        existing = zero_tail(existing, sizes, p)
    common: dict[str, Any] = {"existing_out": existing, "precision": options.precision}

    if p.ragged == contracted:
        # lhs [k, a], rhs [k, b] -> [g, a, b]
        a, b = lhs, rhs
        tile_a, tile_b = p.lhs[1], p.rhs[1]
        if p.out[0] != p.lhs[1]:
            a, b, tile_a, tile_b = rhs, lhs, tile_b, tile_a
        return module.transposed_grouped_matmul(
            a.mT,
            b,
            sizes[0],
            group_offset=offset,
            num_actual_groups=shape[0],
            sum_batch=batched and not out_batch,
            tiling=_tiling(options, (contracted, tile_a, tile_b)),
            preferred_element_type=dtype,
            **common,
        )
    if batched and not out_batch:
        wide = xla.accumulator_dtype(dtype)
        out = compute(
            backend,
            lhs,
            rhs,
            sizes,
            offset,
            None,
            product=p,
            shape=shape,
            dtype=wide,
            out_batch=True,
            options=options,
        )
        return sum_batch(out, axis=0).astype(dtype)
    if not p.ragged:
        return _batched(lhs, rhs, p, contracted, dtype, batch, **common)
    if len(p.ragged) == 1:
        # a [m, k] ragged, b [g, k, n] or [g, n, k] -> [m, n]
        a, b, b_letters = (lhs, rhs, p.rhs) if p.ragged in p.lhs else (rhs, lhs, p.lhs)
        free = b_letters.replace(contracted, "")
        return module.grouped_matmul(
            a,
            b,
            sizes[0],
            group_offset=offset,
            transpose_rhs=b_letters[0] != contracted,
            tiling=_tiling(options, (p.ragged, contracted, free)),
            preferred_element_type=dtype,
            **common,
        )
    tiled = getattr(module, "tiled_matmul", xla.tiled_matmul)
    return tiled(
        lhs,
        rhs,
        dict(zip(p.ragged, sizes, strict=True)),
        axes=(p.lhs, p.rhs, p.out),
        shape=shape,
        tiling=None if options.tiling is None else dict(zip("mkn", options.tiling, strict=True)),
        preferred_element_type=dtype,
        **common,
    )


def _tiling(options: Options, letters: tuple[str, str, str]) -> tuple[int, int, int] | None:
    if options.tiling is None:
        return None
    of = dict(zip("mkn", options.tiling, strict=True))
    return of[letters[0]], of[letters[1]], of[letters[2]]


def _batch_size(lhs: Array, rhs: Array, sizes: tuple[Array, ...], p: Product) -> int:
    for x, ndim in ((lhs, p.ndim(p.lhs)), (rhs, p.ndim(p.rhs)), *((s, 1) for s in sizes)):
        if x.ndim > ndim:
            return x.shape[0]
    raise AssertionError("no operand has a batch axis")


def _batched(
    lhs: Array,
    rhs: Array,
    p: Product,
    contracted: str,
    dtype: Any,
    batch: int | None,
    *,
    existing_out: Array | None,
    precision: Any,
) -> Array:
    """Uniform × uniform: one `einsum` over the group axis and, where there is one, the batch axis."""
    compute_dtype = xla.compute_dtype(lhs.dtype, rhs.dtype)
    terms = [("b" if x.ndim == 4 else "") + "g" + letters for x, letters in ((lhs, p.lhs), (rhs, p.rhs))]
    out = ("g" if batch is None else "bg") + p.out
    result = jnp.einsum(
        f"{terms[0]},{terms[1]}->{out}",
        lhs.astype(compute_dtype),
        rhs.astype(compute_dtype),
        precision=precision,
        preferred_element_type=xla.accumulator_dtype(compute_dtype),
    )
    return result.astype(dtype) if existing_out is None else (result + existing_out.astype(result.dtype)).astype(dtype)


def zero_tail(x: Array, sizes: tuple[Array, ...], product: Product) -> Array:
    """`x`, a buffer of the product's result, with zeros wherever no group has an element."""
    of = dict(zip(product.ragged, sizes, strict=True))
    packed, other = product.out
    if packed not in of:
        return x
    mask = partial(schedule.element_mask, rows=x.shape[-2], columns=x.shape[-1])
    if any(s.ndim > 1 for s in sizes):
        mask = jax.vmap(mask, in_axes=(0, None if of.get(other) is None else 0))
    return jnp.where(mask(of[packed], of.get(other)), x, jnp.zeros((), x.dtype))


def sum_batch(x: Array, axis: int) -> Array:
    """Sum over a batch axis, in the accumulator's dtype."""
    return jnp.sum(x, axis=axis, dtype=xla.accumulator_dtype(x.dtype)).astype(x.dtype)
