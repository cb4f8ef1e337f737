"""The primitive of products whose kernel makes of its accumulators all that is stored: with biases, activation, gate.

It binds the leaves of `Operands`, and gives what its call's `Ending` says is stored. It is lowered to a kernel where a
backend has one, else to the products that `ragged._epilogue` composes it of. It is never differentiated: derivatives
are those of `ragged._activated`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.interpreters import partial_eval as pe

from ragged._epilogue import How, Inputs, composed
from ragged._mesh import explicit_mesh, is_of_one_device, vary_together
from ragged.backends.base import Target
from ragged.product import lowering
from ragged.product.operands import Call, Ending, Epilogue, Operand, Operands
from ragged.product.primitive import abstract_eval, eagerly, lowering_rule
from ragged.quant.recipe import Cast, Recipe
from ragged.quant.training import Made, casts_of, quantized

KERNELS = ("grouped_matmul", "batched_matmul")

fused_p = Primitive("ragged_fused_matmul")
fused_p.multiple_results = True


def bind(how: How, x: Inputs) -> list[Array] | None:
    """The result and the pre-activations, rounded; None where there is no one kernel to compute them."""
    found = _one_product(how, x)
    if found is None:
        return None
    leaves, tree = jax.tree.flatten(found[0])
    call = found[1]
    if explicit_mesh(leaves, call.out_spec) is not None or not is_of_one_device(leaves):
        return None
    return fused_p.bind(*vary_together(leaves), tree=tree, call=call)


def _one_product(how: How, x: Inputs) -> tuple[Operands, Call] | None:
    """The products as one of the same rows with one matrix or two; None if they aren't."""
    p, first = how.calls[0].product, x.operands[0]
    is_shared = any(each.lhs.data.ndim < p.ndim(p.lhs) or each.rhs.data.ndim < p.ndim(p.rhs) for each in x.operands)
    if p.kernel not in KERNELS or is_shared or first.epilogue.existing is not None:
        return None
    if how.calls[0].options.calls_back or any(recipe and recipe.history is not None for recipe in x.recipes):
        return None
    found = [_quantized(*each) for each in zip(x.recipes, x.operands, how.calls, x.made, strict=True)]
    operands, cast, call = found[0]
    epilogue = Epilogue(None, x.biases[0])
    if len(found) > 1:
        up, its_cast, its_call = found[1]
        if (its_cast, its_call) != (cast, call) or _kind(up.rhs) != _kind(operands.rhs):
            return None
        epilogue = Epilogue(None, x.biases[0], up.rhs, x.biases[1])
    ending = Ending(how.activation, (True,) * (1 + len(found)))
    return operands._replace(epilogue=epilogue), call._replace(ending=ending)


def _kind(x: Operand) -> Any:
    """What a kernel asks of a matrix."""
    leaves, tree = jax.tree.flatten(x)
    return tree, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _quantized(recipe: Recipe | None, x: Operands, call: Call, made: Made) -> tuple[Operands, Cast | None, Call]:
    """The operands as a recipe casts them, and how it casts the rows."""
    if recipe is None:
        return x, None, call
    casts = casts_of(recipe, call)[0].forward
    x, call = quantized(casts, x, call, None, made)
    return x, casts[0], call


def _composed(x: Operands, call: Call) -> list[Array]:
    """What is stored, where there is no kernel."""
    ending = call.ending
    assert ending is not None
    if call.out_batch:
        leaves, tree = jax.tree.flatten(x)
        axes = [0 if is_mapped else None for is_mapped in jax.tree.leaves(call.batched(x))]
        of_element = call._replace(out_batch=False)
        return jax.vmap(lambda *leaves: _composed(tree.unflatten(leaves), of_element), in_axes=axes)(*leaves)
    count, plain = call.num_products, x._replace(epilogue=Epilogue())
    how = How((call._replace(ending=None),) * count, ending.activation)
    inputs = Inputs(
        (plain, plain._replace(rhs=x.epilogue.up))[:count],
        (None,) * count,
        ({},) * count,
        (x.epilogue.bias, x.epilogue.up_bias)[:count],
        x.sizes.get(call.product.out[0]),
    )
    out, z = composed(how, inputs)
    return _stored([out, *z], ending.stored)


def _stored(results: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [each for each, is_stored in zip(results, which, strict=True) if is_stored]


def _abstract_eval(*avals: Any, tree: Any, call: Call) -> tuple[list[Any], frozenset[Any]]:
    out, effects = abstract_eval(*avals, tree=tree, call=call)
    return [out] * call.num_stored, effects


def _batch(args: Sequence[Any], dims: Sequence[Any], *, tree: Any, call: Call) -> tuple[list[Array], list[int]]:
    """Rows and sizes may have one batch axis. Where there is another, or matrices are mapped, there is no kernel."""
    mapped: Operands = tree.unflatten([d is not None for d in dims])
    if call.out_batch or any(jax.tree.leaves((mapped.rhs, mapped.epilogue, mapped.gather))):
        out = jax.vmap(lambda *args: _composed(tree.unflatten(args), call), in_axes=tuple(dims))(*args)
    else:
        args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        out = fused_p.bind(*args, tree=tree, call=call._replace(out_batch=True))
    return out, [0] * len(out)


def _without_unused(used: list[bool], *more: Any) -> tuple[list[bool], Any]:
    """What nobody reads isn't stored. (`more`: in jax 0.12 which operands live, and the equation.)"""
    equation, call = more[-1], more[-1].params["call"]
    if not any(used):
        return [False] * len(equation.invars), None
    kept = iter(used)
    stored = tuple(is_stored and next(kept) for is_stored in call.ending.stored)
    params = equation.params | {"call": call._replace(ending=call.ending._replace(stored=stored))}
    outvars = [var for var, is_used in zip(equation.outvars, used, strict=True) if is_used]
    return [True] * len(equation.invars), equation.replace(outvars=outvars, params=params)


def _compute(platform: str, *args: Array, tree: Any, call: Call, target: Target) -> list[Array]:
    return [*lowering.compute(platform, tree.unflatten(args), call, target, _composed)]


fused_p.def_effectful_abstract_eval(_abstract_eval)
fused_p.def_impl(eagerly(fused_p))
batching.primitive_batchers[fused_p] = _batch
pe.dce_rules[fused_p] = _without_unused
for _platform in (None, *lowering.PLATFORMS):
    mlir.register_lowering(fused_p, lowering_rule(_platform or "any", _compute, True), platform=_platform)
