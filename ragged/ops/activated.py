"""Products with biases, an activation or a gate: what is saved for the backward pass, and what it recomputes.

The functions take a tuple of requests: one, or for a gated product two, the gate's first.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from ragged.core.formats import accumulator_dtype
from ragged.core.mesh import vary_together
from ragged.core.rows import spread_rows
from ragged.ops.request import Request
from ragged.primitive import fused, same_rows
from ragged.primitive.epilogue import combined, split_columns, with_bias
from ragged.product.operands import Call, Epilogue, EpilogueSpec, Operand, Operands
from ragged.quant.training import quantized_rows
from ragged.tensor.tensor import GroupedTensor

Requests = tuple[Request, ...]

_FLOAT16 = float(jnp.finfo(jnp.float16).min), float(jnp.finfo(jnp.float16).max)


def with_epilogue(requests: Requests) -> GroupedTensor:
    """The result of the requests: the activation of their pre-activations, which are the products plus biases."""
    first, requests = requests[0], _with_one_lhs(requests)
    if first.save == "pre":
        return first.tensor(_result(requests))
    if first.operands.gather is None:
        return first.tensor(jax.checkpoint(_result)(requests))

    # Rows are gathered inside the checkpoint: the backward pass gathers them again, and no copy is saved.
    def gathered(requests: Requests) -> Array:
        lhs, index = requests[0].operands.lhs, requests[0].operands.gather
        assert index is not None
        return _result(_with_rows(requests, spread_rows(lhs.data, index.source, index.places)))

    return first.tensor(jax.checkpoint(gathered)(_with_rows(requests, None)))


def with_pre_activations(requests: Requests) -> tuple[GroupedTensor, tuple[Array, ...]]:
    """`(out, z)`: the result of `with_epilogue`, and the rounded pre-activations of each request."""
    out, z = _result_and_z(_with_one_lhs(requests))
    return requests[0].tensor(out), z


def _with_one_lhs(requests: Requests) -> Requests:
    """`requests` with `lhs` in the first one only, so that kernels add its cotangents. Unchanged unless all have the
    same `lhs`, without a recipe, on one device.

    It compares arrays by identity, which `jit` and `checkpoint` don't keep: call it outside of both.
    """
    first, *others = requests
    same = [[each.operands.lhs.data, *(each.operands.gather or ())] for each in requests]
    if any(x is not y for each in same[1:] for x, y in zip(each, same[0], strict=True)):
        return requests
    if first.call.options.calls_back or any(
        each.recipe or each.merge or each.operands.epilogue.existing is not None or not each.is_local
        for each in requests
    ):
        return requests
    return first, *(replace(each, operands=each.operands._replace(lhs=None, gather=None)) for each in others)


def _with_each_lhs(requests: Requests) -> Requests:
    """The inverse of `_with_one_lhs`."""
    lhs, gather = requests[0].operands.lhs, requests[0].operands.gather
    return tuple(
        replace(each, operands=each.operands._replace(lhs=lhs, gather=gather)) if each.operands.lhs is None else each
        for each in requests
    )


def _with_rows(requests: Requests, rows: Array | None) -> Requests:
    """`requests` with `rows` as the copy of the gathered rows: see `Index`."""

    def with_rows(x: Operands) -> Operands:
        return x if x.gather is None else x._replace(gather=x.gather._replace(rows=rows))

    return tuple(replace(each, operands=with_rows(each.operands)) for each in requests)


# JAX drops unused values and residuals only in jitted functions. So these two are jitted, for callers outside of `jit`.
@partial(jax.jit, inline=True)
def _result(requests: Requests) -> Array:
    return _result_and_z(requests)[0]


@partial(jax.jit, inline=True)
def _result_and_z(requests: Requests) -> tuple[Array, tuple[Array, ...]]:
    return _activated(_with_shared_rows(requests))


def _with_shared_rows(requests: Requests) -> Requests:
    """`requests` with rows that are quantised and saved once; unchanged unless all recipes quantise them in the same
    way."""
    first, recipes = requests[0], [each.recipe for each in requests if each.recipe is not None]
    if len(requests) < 2 or len(recipes) < len(requests) or first.operands.gather is not None:
        return requests
    casts = {(each.forward[0], each.wgrad[0]) for each in recipes}
    if len(casts) > 1 or any(each.history is not None or each.save != "quantized" for each in recipes):
        return requests
    rows = quantized_rows(recipes[0], first.operands, first.call)
    return tuple(replace(each, operands=each.operands._replace(lhs=rows)) for each in requests)


@jax.custom_jvp
def _activated(requests: Requests) -> tuple[Array, tuple[Array, ...]]:
    """`(out, z)`: the result and the pre-activations, each rounded once. One kernel computes all if possible."""
    requests = _with_each_lhs(requests)
    if (one := _one_product(requests)) is not None:
        out, *z = fused.bind(*one)
        return out, tuple(z)
    dtype = requests[0].call.dtype
    products = [_product(each, accumulator_dtype(dtype)) for each in requests]
    z = [
        with_bias(out, each.bias, each.operands, each.first_dims) for each, out in zip(requests, products, strict=True)
    ]
    return _combined(requests, z).astype(dtype), tuple(each.astype(dtype) for each in z)


def _product(request: Request, dtype: Any) -> Array:
    """The product plus `existing_out`, in `dtype`, without bias and activation."""
    x, call = request.operands, request.call._replace(dtype=jnp.dtype(dtype))
    if (existing := x.epilogue.existing) is not None:
        x = x._replace(epilogue=x.epilogue._replace(existing=existing.astype(dtype)))
    return replace(request, operands=x, call=call).product()


def _combined(requests: Requests, z: Any) -> Array:
    first = requests[0]
    return combined(first.function, z, first.operands, first.first_dims)


def _one_product(requests: Requests) -> tuple[Operands, Call] | None:
    """`(operands, call)` of one product of the rows with one or two matrices; None if no kernel supports it."""
    x, call = requests[0].operands, requests[0].call
    if any(each.merge is not None or not each.is_local for each in requests) or x.epilogue.existing is not None:
        return None
    if call.product.kernel not in fused.KERNELS or call.options.calls_back:
        return None
    recipes = [each.recipe for each in requests]
    if any(each is not None and each.history is not None for each in recipes):
        return None
    if len({each and each.forward[0] for each in recipes}) > 1:  # The recipes quantise the rows in different ways.
        return None
    (x, call), *others = (each.quantized() for each in requests)
    epilogue, both = Epilogue(None, requests[0].bias), requests[0].both
    if both is not None:
        x, epilogue = x._replace(rhs=Operand(both)), epilogue._replace(up_bias=requests[1].bias)
    elif others:
        (up, up_call), bias = others[0], requests[1].bias
        if up_call != call or _types(up.rhs) != _types(x.rhs):
            return None
        epilogue = Epilogue(None, requests[0].bias, up.rhs, bias)
    spec = EpilogueSpec(requests[0].function, (True,) * (1 + len(requests)), requests[0].columns)
    return x._replace(epilogue=epilogue), call._replace(epilogue=spec)


def _types(x: Operand) -> Operand:
    """`x` with `(shape, dtype)` in place of each array. A kernel needs these to be equal for gate and up."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), x)


@partial(_activated.defjvp, symbolic_zeros=True)
def _(primals: tuple[Requests], tangents: tuple[Requests]) -> tuple[Any, Any]:
    (requests,) = primals
    dtype = requests[0].call.dtype
    out, z = _activated(requests)
    z = tuple(checkpoint_name(each, request.name) for each, request in zip(z, requests, strict=True))
    # Nonzero tangents: `dleaves`, keyed by the index of a leaf; below, `dbiases`, keyed by the index of a request.
    leaves, tree = jax.tree.flatten(requests)
    dleaves = {i: d for i, d in enumerate(tree.flatten_up_to(tangents[0])) if not isinstance(d, SymbolicZero)}
    has_one_lhs, requests = requests[-1].operands.lhs is None, _with_each_lhs(requests)

    def products(replaced: dict[int, Array]) -> tuple[Array, ...]:
        new_requests = tree.unflatten([replaced.get(i, leaf) for i, leaf in enumerate(leaves)])
        first = new_requests[0]
        if first.both is None and has_one_lhs:
            matrices = [each.operands.rhs for each in new_requests]
            calls = [each.call._replace(dtype=jnp.dtype(dtype)) for each in new_requests]
            return tuple(same_rows.products(first.operands, matrices, calls))
        if first.both is None:
            return tuple(_product(each, dtype) for each in new_requests)
        # One product with one weight, so that derivatives read it, and write its gradient, in place.
        x, shape = first.operands._replace(rhs=Operand(first.both)), (*first.call.shape[:-1], first.both.shape[-1])
        one_request = replace(first, operands=x, call=first.call._replace(shape=shape))
        return split_columns(_product(one_request, dtype), first.columns)

    def biased(found: tuple[Array, ...], biases: dict[int, Array]) -> tuple[Array, ...]:
        parts = enumerate(zip(requests, found, strict=True))
        return tuple(
            with_bias(out, biases.get(i, each.bias), each.operands, each.first_dims) for i, (each, out) in parts
        )

    def result(z: tuple[Array, ...]) -> Array:
        return _combined(requests, [each.astype(accumulator_dtype(dtype)) for each in z]).astype(dtype)

    # The backward pass recomputes elementwise values from the saved pre-activations. `prevent_cse=False` leaves out a
    # barrier, which would make XLA copy pre-activations that a loop has stacked. No barrier is needed: the forward pass
    # computes none of these values, so XLA can't merge them with it.
    @partial(jax.checkpoint, prevent_cse=False)
    def elementwise(z: tuple[Array, ...], dproducts: Any, dbiases: dict[int, Array]) -> tuple[Array, tuple[Array, ...]]:
        # `biased` is affine, so its derivative at `z` is its derivative at the products. The transpose of `with_bias`
        # sums the cotangent of a bias over the rows in float32.
        _, dz = jax.jvp(biased, (z, {i: requests[i].bias for i in dbiases}), (dproducts, dbiases))
        # In float16, large pre-activations were rounded to infinity, where derivatives of activations are NaN.
        if dtype == jnp.float16:
            z = tuple(jnp.clip(each, *_FLOAT16) for each in z)
        return jax.jvp(result, (z,), (dz,))[1], dz

    _, dproducts = jax.jvp(products, ({i: leaves[i] for i in dleaves},), (dleaves,))
    biases = enumerate(each.bias for each in tangents[0])
    dbiases = {i: each for i, each in biases if not isinstance(each, (type(None), SymbolicZero))}
    # Results of one kernel vary over all mesh axes over which some operand varies. So must tangents.
    dproducts = tuple(vary_together(dproducts, like=z))
    dout, dz = elementwise(z, dproducts, dbiases)
    dout, *dz = vary_together([dout, *dz], like=[out, *z])
    return (out, z), (dout, tuple(dz))
