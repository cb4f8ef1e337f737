"""The one JAX primitive under every grouped product: how it is typed, differentiated, batched and lowered.

Its operands are plain arrays: `lhs`, `rhs`, then the sizes `(g,)` of each ragged letter in the order `m`, `k`, `n`,
then the scales of `lhs` and `rhs`, `group_offset` and `existing_out` where there are any. `Call` holds all that is
static. Any operand may have one more leading axis, a batch axis. `Call.out_batch` says whether the result keeps it or
is summed over it.

    out[i] = existing_out[i] + lhs[i] @ rhs[i]        (bilinear in lhs and rhs, affine in existing_out)
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ragged import _lowering
from ragged._lowering import Call, Operands
from ragged._mesh import refuse_explicit, vary_together
from ragged.kernels import Target


def unflatten(args: Sequence[Any], call: Call) -> Operands:
    sizes_end = 2 + len(call.product.ragged)
    rest = iter(args[sizes_end:])
    given = (call.lhs_block is not None, call.rhs_block is not None, call.has_offset, call.has_existing)
    lhs_scales, rhs_scales, offset, existing = (next(rest) if each else None for each in given)
    return Operands(args[0], args[1], tuple(args[2:sizes_end]), offset, existing, lhs_scales, rhs_scales)


def bind(operands: Operands, call: Call) -> Array:
    """The product of `operands`. See the module's docstring."""
    call = call._replace(has_offset=operands.offset is not None, has_existing=operands.existing is not None)
    return ragged_matmul_p.bind(*vary_together(operands.flat()), call=call)


ragged_matmul_p = Primitive("ragged_matmul")


@ragged_matmul_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, call: Call) -> tuple[Any, frozenset[Any]]:
    operands = unflatten(avals, call)
    refuse_explicit("ragged.matmul", **operands._asdict())
    shape = (operands.batch_size(call), *call.shape) if call.out_batch else call.shape
    sharding = NamedSharding(avals[0].sharding.mesh, PartitionSpec(*[None] * len(shape)))
    out = avals[0].update(shape=shape, dtype=jnp.dtype(call.dtype), weak_type=False, sharding=sharding)
    return out, _interpreter_effects() if call.options.calls_back else frozenset()


@cache
def _interpreter_effects() -> frozenset[Any]:
    """Those of the ordered callbacks by which Pallas interprets a TPU's memory and copies."""
    return frozenset(jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects)


@partial(jax.jit, static_argnames="call")
def _eager(*args: Array, call: Call) -> Array:
    return ragged_matmul_p.bind(*args, call=call)


@ragged_matmul_p.def_impl
def _impl(*args: Array, call: Call) -> Array:
    with jax.disable_jit(False):  # or `_eager` would come back here
        return _eager(*args, call=call)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    """`d(lhs @ rhs) = dlhs @ rhs + lhs @ drhs`, and `existing_out`'s own tangent."""
    check_cotangent(call)
    out = bind(unflatten(primals, call), call)
    x, dx = unflatten(primals, call)._replace(existing=None), unflatten(tangents, call)
    terms = []
    if not isinstance(dx.lhs, ad.Zero):
        terms.append(bind(x._replace(lhs=dx.lhs), call))
    if not isinstance(dx.rhs, ad.Zero):
        terms.append(bind(x._replace(rhs=dx.rhs), call))
    if call.has_existing and not isinstance(dx.existing, ad.Zero):
        terms.append(_lowering.zero_tail(dx.existing, x.sizes, call.product))
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, sum(terms[1:], terms[0])


def check_cotangent(call: Call) -> None:
    """Raises a `TypeError` if the cotangent of a product's result would have 8 bits: too few without scales."""
    if jnp.dtype(call.dtype).itemsize == 1:
        raise TypeError(
            f"`ragged.matmul`: the result is {jnp.dtype(call.dtype).name}, and so would its cotangent be.\n"
            "Ask for `preferred_element_type=jnp.bfloat16`, and quantise or cast what comes of it."
        )


def _transpose(ct: Any, *args: Any, call: Call) -> list[Any]:
    """The cotangent of one operand is a product of the same kind: its term and `out` trade places."""
    x = unflatten(args, call)
    cts: list[Any] = [None] * len(args)
    if isinstance(ct, ad.Zero):
        return cts
    if ad.is_undefined_primal(x.lhs) and ad.is_undefined_primal(x.rhs):
        raise NotImplementedError(
            "`ragged.matmul`: a product is linear in each operand, not in both.\nTranspose it with respect to one."
        )

    def cotangent(wrt: str, aval: Any, operands: Operands) -> Array:
        product = call.product.derivative(wrt)
        ndim = product.ndim(product.out)
        batched = aval.ndim > ndim
        shape = aval.shape[aval.ndim - ndim :]
        return bind(operands, call._replace(product=product, shape=shape, dtype=aval.dtype, out_batch=batched))

    if ad.is_undefined_primal(x.lhs):
        cts[0] = cotangent("lhs", x.lhs.aval, x._replace(lhs=ct, existing=None))
    if ad.is_undefined_primal(x.rhs):
        cts[1] = cotangent("rhs", x.rhs.aval, x._replace(rhs=ct, existing=None))
    if call.has_existing and ad.is_undefined_primal(x.existing):
        cts[-1] = _lowering.zero_tail(ct, x.sizes, call.product).astype(x.existing.aval.dtype)
    return cts


ad.primitive_jvps[ragged_matmul_p] = _jvp
ad.primitive_transposes[ragged_matmul_p] = _transpose


def _batch(args: Sequence[Any], dims: Sequence[Any], *, call: Call) -> tuple[Array, int]:
    """One batch axis is the primitive's own. A second one is merged with the first, or looped over."""
    mapped = [d is not None for d in dims]
    # The rank of a mapped operand counts the new axis; leave it out to see the one that was there before.
    ndims = [jnp.ndim(x) - is_mapped for x, is_mapped in zip(args, mapped, strict=True)]
    bare = unflatten([jax.ShapeDtypeStruct((0,) * n, jnp.float32) for n in ndims], call)
    has_inner = bare.has_batch_axis(call)
    args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]

    if any(has_inner) and (not call.out_batch or has_inner[:2] != mapped[:2]):
        # Merged axes would need a copy of a matrix for each element of the axis that it lacks, or all terms of a sum.
        def element(slices: list[Array]) -> Array:
            rest = iter(slices)
            each = [next(rest) if is_mapped else x for x, is_mapped in zip(args, mapped, strict=True)]
            return bind(unflatten(each, call), call)

        return lax.map(element, [x for x, is_mapped in zip(args, mapped, strict=True) if is_mapped]), 0

    outer = next(x.shape[0] for x, is_mapped in zip(args, mapped, strict=True) if is_mapped)
    inner = next((x.shape[m] for x, m, has in zip(args, mapped, has_inner, strict=True) if has), None)

    def lead(x: Array, is_mapped: bool, has: bool, keep: bool) -> Array:
        """`x` as `[outer * inner, ...]`; as it is where it has neither axis and need not have (`keep`)."""
        if not (is_mapped or has or keep):
            return x
        x = x if is_mapped else jnp.broadcast_to(x, (outer, *x.shape))
        if inner is None:
            return x
        x = x if has else jnp.broadcast_to(x[:, None], (outer, inner, *x.shape[1:]))
        return x.reshape(outer * inner, *x.shape[2:])

    # `existing_out` has the result's axes, always; and it is never the only one that has them.
    keep = [False] * len(args)
    if call.has_existing:
        keep[-1] = True
        keep[0] = not any(mapped[:-1])
    merged = [lead(*each) for each in zip(args, mapped, has_inner, keep, strict=True)]
    out = bind(unflatten(merged, call), call._replace(out_batch=True))
    return (out if inner is None else out.reshape(outer, inner, *out.shape[1:])), 0


batching.primitive_batchers[ragged_matmul_p] = _batch


def _rule(platform: str) -> Callable[..., Any]:
    def compute(*args: Array, call: Call, target: Target) -> Array:
        return _lowering.compute(platform, unflatten(args, call), call, target)

    lower = mlir.lower_fun(compute, multiple_results=False)

    def rule(ctx: Any, *args: Any, call: Call) -> Any:
        # Over which mesh axes a value varies has been checked by now; a kernel's loops need not carry it along.
        plain = [[ShapedArray(aval.shape, aval.dtype) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)]
        inner, program = ctx.replace(avals_in=plain[0], avals_out=plain[1]), ctx.module_context
        portable, automatic = program.lowering_parameters.for_export, _is_automatic(program.axis_context)
        with _lowering.target_of(platform, call.options, portable=portable, automatic=automatic) as target:
            out = lower(inner, *args, call=call, target=target)
        if call.options.calls_back:
            ctx.set_tokens_out(inner.tokens_out)
        return out

    return rule


def _is_automatic(axis_context: Any) -> bool:
    """Whether XLA partitions the program over several devices: not one device's, nor that of a full `shard_map`."""
    mesh = getattr(axis_context, "mesh", None)
    if mesh is None:
        return getattr(axis_context, "num_devices", 1) != 1
    manual = frozenset(axis_context.manual_axes) | frozenset(mesh.manual_axes)
    return bool(axis_context.manual_axes) and manual != frozenset(mesh.axis_names)


mlir.register_lowering(ragged_matmul_p, _rule("any"))
for _platform in _lowering.PLATFORMS:
    mlir.register_lowering(ragged_matmul_p, _rule(_platform), platform=_platform)
