"""The primitive of products with an `EpilogueSpec`: biases, an activation, a gate.

It takes the leaves of `Operands`, and returns the arrays that the call's `EpilogueSpec` stores. It is lowered to one
kernel if a backend has one; otherwise to `ragged_matmul_p` and XLA operations. It is never differentiated:
`ragged.ops.activated` has the derivatives.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.dispatch import apply_primitive  # no public name
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.interpreters import partial_eval as pe

from ragged.backends.base import Target
from ragged.core.formats import accumulator_dtype
from ragged.core.mesh import vary_together
from ragged.primitive import lowering, primitive
from ragged.primitive.epilogue import combined, split_columns, with_bias
from ragged.primitive.primitive import abstract_eval, lowering_rule
from ragged.product.operands import Call, Epilogue, Operand, Operands

# The kernels that can apply an `EpilogueSpec` on some backend.
KERNELS = ("grouped_matmul", "batched_matmul")

fused_p = Primitive("ragged_fused_matmul")
fused_p.multiple_results = True


def bind(x: Operands, call: Call) -> list[Array]:
    """The arrays that the call's `EpilogueSpec` stores. All operands are of one device: see `is_of_one_device`."""
    leaves, tree = jax.tree.flatten(x)
    return fused_p.bind(*vary_together(leaves), tree=tree, call=call)


def separate(x: Operands, call: Call) -> tuple[Operands, Call]:
    """`(operands, call)` of the product without the epilogue; of a gated product, the gate's."""
    return x._replace(epilogue=Epilogue()), call._replace(epilogue=None, dtype=jnp.dtype(accumulator_dtype(call.dtype)))


def _unfused(x: Operands, call: Call) -> list[Array]:
    """The arrays that the call stores, from separate products and the epilogue in XLA."""
    epilogue = call.epilogue
    assert epilogue is not None
    if epilogue.columns:  # Bind again with two matrices, which a kernel may support.
        gate, up = map(Operand, split_columns(x.rhs.data, epilogue.columns))
        leaves, tree = jax.tree.flatten(x._replace(rhs=gate, epilogue=x.epilogue._replace(up=up)))
        return fused_p.bind(*leaves, tree=tree, call=call._replace(epilogue=epilogue._replace(columns="")))
    if call.out_batch:
        leaves, tree = jax.tree.flatten(x)
        axes = [0 if is_mapped else None for is_mapped in jax.tree.leaves(call.batched(x))]
        element_call = call._replace(out_batch=False)
        return jax.vmap(lambda *leaves: _unfused(tree.unflatten(leaves), element_call), in_axes=axes)(*leaves)
    first_dims = x.sizes.get(call.product.out[0])
    gate, linear = separate(x, call)
    z = [with_bias(primitive.bind(gate, linear), x.epilogue.bias, gate, first_dims)]
    if call.num_products > 1:
        up = gate._replace(rhs=x.epilogue.up)
        z.append(with_bias(primitive.bind(up, linear), x.epilogue.up_bias, up, first_dims))
    out = combined(epilogue.function, z, gate, first_dims)
    return [each.astype(call.dtype) for each in _stored([out, *z], epilogue.stored)]


def _stored(results: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [each for each, is_stored in zip(results, which, strict=True) if is_stored]


def _abstract_eval(*avals: Any, tree: Any, call: Call) -> tuple[list[Any], frozenset[Any]]:
    out, effects = abstract_eval(*avals, tree=tree, call=call)
    return [out] * call.num_stored, effects


def _batch(args: Sequence[Any], dims: Sequence[Any], *, tree: Any, call: Call) -> tuple[list[Array], list[int]]:
    """The primitive allows one batch axis, on rows, sizes and the offset only. In other cases, XLA applies the
    epilogue."""
    mapped: Operands = tree.unflatten([d is not None for d in dims])
    if call.out_batch or any(jax.tree.leaves((mapped.rhs, mapped.epilogue, mapped.gather))):
        out = jax.vmap(lambda *args: _unfused(tree.unflatten(args), call), in_axes=tuple(dims))(*args)
    else:
        args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        out = fused_p.bind(*args, tree=tree, call=call._replace(out_batch=True))
    return out, [0] * len(out)


def _without_unused(used: list[bool], *more: Any) -> tuple[list[bool], Any]:
    """A rule of dead-code elimination: unused outputs are not stored. The last argument is the equation; jax 0.12 also
    passes which operands are live."""
    equation, call = more[-1], more[-1].params["call"]
    if not any(used):
        return [False] * len(equation.invars), None
    is_used = iter(used)
    stored = tuple(is_stored and next(is_used) for is_stored in call.epilogue.stored)
    params = equation.params | {"call": call._replace(epilogue=call.epilogue._replace(stored=stored))}
    outvars = [var for var, keep in zip(equation.outvars, used, strict=True) if keep]
    return [True] * len(equation.invars), equation.replace(outvars=outvars, params=params)


def _compute(platform: str, *args: Array, tree: Any, call: Call, target: Target) -> list[Array]:
    return [*lowering.compute(platform, tree.unflatten(args), call, target, _unfused)]


fused_p.def_effectful_abstract_eval(_abstract_eval)
fused_p.def_impl(partial(apply_primitive, fused_p))
batching.primitive_batchers[fused_p] = _batch
pe.dce_rules[fused_p] = _without_unused
for _platform in (None, *lowering.PLATFORMS):
    mlir.register_lowering(fused_p, lowering_rule(_platform or "any", _compute, True), platform=_platform)
