"""One backend's kernels for plain arrays, as the array level has them, without JAX's primitive."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ragged.backends.base import Launch, Target
from ragged.core.errors import Site
from ragged.core.scales import Scales
from ragged.primitive.lowering import BACKENDS, prepared
from ragged.product.config import in_context
from ragged.product.function import function_of
from ragged.product.layout import Product
from ragged.product.operands import Call, Epilogue, EpilogueSpec, Operand, Operands, Options

ANY_TARGET = Target()


def run(backend: str, x: Operands, call: Call, target: Target = ANY_TARGET) -> Any:
    """What `backend` computes. Fails if it doesn't."""
    module, x = BACKENDS[backend].load(), prepared(x, call)
    avals = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), x)
    launch = module.plan(call, avals, target)
    assert isinstance(launch, Launch), launch
    return module.run(launch, x)


def product(
    backend: str,
    lhs: Array,
    rhs: Array,
    sizes: dict[str, Array],
    axes: tuple[str, str, str],
    shape: tuple[int, ...],
    *,
    preferred_element_type: Any,
    precision: Any = None,
    tiling: tuple[int, int, int] | None = None,
    group_offset: Any = None,
    existing_out: Any = None,
    lhs_scales: Scales | None = None,
    rhs_scales: Scales | None = None,
    epilogue: EpilogueSpec | None = None,
    bias: Array | None = None,
    up: Operand | None = None,
    up_bias: Array | None = None,
    input_buffer_count: int = 2,
    sum_batch: bool = False,
    target: Target = ANY_TARGET,
) -> Any:
    """`axes` are the letters of `lhs`, `rhs` and the result, whose shape is `shape` without a batch axis.

    With an `epilogue`, a list of the arrays that it stores.
    """
    ragged = "".join(letter for letter in "mkn" if letter in sizes)
    options = Options(precision, backend, target.interpret, in_context().configs, "using", tiling=tiling)
    options = options._replace(buffers=input_buffer_count)
    dtype, keeps = jnp.dtype(preferred_element_type), not sum_batch
    call = Call(Product(*axes, ragged), shape, dtype, options, out_batch=keeps, epilogue=epilogue)
    operands, arrays = (Operand(lhs, lhs_scales), Operand(rhs, rhs_scales)), Epilogue(existing_out, bias, up, up_bias)
    return run(backend, Operands(*operands, sizes, group_offset, arrays), call, target)


def grouped_matmul(
    backend: str, lhs: Array, rhs: Array, sizes: Array, *, transpose_rhs: bool = False, **options: Any
) -> Any:
    """`[m, k] × [h, k, n] -> [m, n]`, or `[h, n, k]` with `transpose_rhs`."""
    axes = ("mk", "nk" if transpose_rhs else "kn", "mn")
    shape = (lhs.shape[-2], rhs.shape[-2 if transpose_rhs else -1])
    return product(backend, lhs, rhs, {"m": sizes}, axes, shape, **options)


def transposed_grouped_matmul(
    backend: str, lhs: Array, rhs: Array, sizes: Array, *, num_actual_groups: int | None = None, **options: Any
) -> Array:
    """`[k, m] × [k, n] -> [h, m, n]`."""
    held = sizes.shape[-1] if num_actual_groups is None else num_actual_groups
    return product(backend, lhs, rhs, {"k": sizes}, ("km", "kn", "mn"), (held, lhs.shape[-1], rhs.shape[-1]), **options)


def batched_matmul(backend: str, lhs: Array, rhs: Array, *, axes: tuple[str, str, str], **options: Any) -> Any:
    """`[g, m, k] × [g, k, n] -> [g, m, n]`, each as its axes say."""
    extent = dict(zip(axes[0] + axes[1], lhs.shape[-2:] + rhs.shape[-2:], strict=True))
    shape = (lhs.shape[-3], *(extent[letter] for letter in axes[2]))
    return product(backend, lhs, rhs, {}, axes, shape, **options)


def tiled_matmul(
    backend: str, lhs: Array, rhs: Array, sizes: dict[str, Array], *, axes: tuple[str, str, str], **options: Any
) -> Array:
    """Two or three letters ragged."""
    return product(backend, lhs, rhs, sizes, axes, options.pop("shape"), **options)


def epilogue_spec(activation: Any, stored: tuple[bool, ...]) -> EpilogueSpec:
    """What a kernel stores of float32 sums: of the result, and of each of the one or two products."""
    return EpilogueSpec(function_of(Site("test"), activation, len(stored) - 1, jnp.float32), stored)
