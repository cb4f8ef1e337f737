"""A product quantised by a recipe, its derivatives, and the next history of delayed scaling.

Rounding counts as the identity for the gradient (straight-through): the derivatives are those of the product that isn't
quantised, each computed from operands that are quantised anew, from what isn't.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ragged._errors import Site
from ragged.product.operands import Call, Operand, Operands
from ragged.product.primitive import bind, check_cotangent, cotangents, vary_but_factors
from ragged.product.shared import folded
from ragged.quant.quantize import amax, cast, quantize, scale_of
from ragged.quant.recipe import Cast, Pair, Recipe
from ragged.quant.scaling import NAMED
from ragged.tensor.tensor import GroupedTensor


class Casts(NamedTuple):
    """A product's two casts, and those of its derivatives, each in the order of its operands.

    The derivative by `lhs` multiplies the cotangent, in place of `lhs`, with `rhs`.
    """

    forward: Pair
    by_lhs: Pair
    by_rhs: Pair

    def derivative(self, wrt: str) -> "Casts":
        """Those of the derivative, which is a product again: what it is of the three, and its own derivatives."""
        if wrt == "lhs":
            return Casts(self.by_lhs, self.forward, _swapped(self.by_rhs))
        return Casts(self.by_rhs, _swapped(self.by_lhs), self.forward)


def _swapped(pair: Pair) -> Pair:
    return pair[1], pair[0]


def casts_of(recipe: Recipe, call: Call) -> tuple[Casts, Any]:
    """A recipe's casts and history in the order of a product's operands: for `w x`, from the left, exchanged."""
    casts, history = Casts(recipe.forward, recipe.dgrad, recipe.wgrad), recipe.history
    if call.product.ragged != "n":
        return casts, history
    swapped = Casts(_swapped(casts.forward), _swapped(casts.by_rhs), _swapped(casts.by_lhs))
    return swapped, None if history is None else _rows(history, 1, 0, 2)


def past_of(wrt: str, history: Array | None) -> Array | None:
    """The history in the order of a derivative's operands."""
    if history is None:
        return None
    return _rows(history, 2, 1, 0) if wrt == "lhs" else _rows(history, 0, 2, 1)


def _rows(history: Array, *order: int) -> Array:
    return jnp.stack([history[i] for i in order])


def quantized_product(recipe: Recipe, operands: Operands, call: Call) -> Array:
    """The product of `operands`, quantised, with straight-through derivatives. The primitive's operands and result."""
    operands, call, restore = folded(operands, call)
    casts, history = casts_of(recipe, call)
    operands = vary_but_factors(operands, like=jax.tree.leaves(history))
    if history is not None:
        _check_axes_are_tracked()
    return restore(_product(casts, call, operands, history))


def _product(casts: Casts, call: Call, operands: Operands, history: Array | None) -> Array:
    floats = operands.lhs, operands.rhs, operands.epilogue
    (lhs, rhs, epilogue), history = jax.tree.map(_reverse_only, (floats, history))
    return _straight_through(casts, call, operands._replace(lhs=lhs, rhs=rhs, epilogue=epilogue), history)


reverse_only_p = Primitive("ragged_reverse_only")
"""The tangent of `_reverse_only`: it can be transposed, but not computed."""


@jax.custom_jvp
def _reverse_only(x: Array) -> Array:
    """`x`, with an error for whoever differentiates by it in forward mode. (`jax.custom_vjp`'s own names no mend.)"""
    return x


@_reverse_only.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _reverse_only(*primals), reverse_only_p.bind(*tangents)


def _refuse_forward_mode(*args: Any) -> NoReturn:
    mend = "Its derivative is straight-through: a rule for cotangents. Take `jax.grad` or `jax.vjp`, and "
    mend += "`jax.jacrev(jax.grad(f))` in place of `jax.hessian(f)`."
    problem = "a product with `recipe` can't be differentiated in forward mode."
    Site("ragged.matmul").fail(TypeError, problem, mend)


reverse_only_p.def_abstract_eval(lambda x: x)
reverse_only_p.def_impl(_refuse_forward_mode)
mlir.register_lowering(reverse_only_p, _refuse_forward_mode)
ad.deflinear2(reverse_only_p, lambda ct, x: [ct])
batching.defvectorized(reverse_only_p)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _straight_through(casts: Casts, call: Call, operands: Operands, history: Array | None) -> Array:
    return bind(*quantized(casts.forward, operands, call, history))


def _forward(casts: Casts, call: Call, operands: Operands, history: Array | None) -> tuple[Array, Any]:
    check_cotangent(call)
    return _straight_through(casts, call, operands, history), (operands, history)


def _backward(casts: Casts, call: Call, residuals: tuple[Operands, Any], ct: Array) -> tuple[Operands, Any]:
    operands, history = residuals
    history = lax.stop_gradient(history)

    def product(wrt: str, operands: Operands, call: Call) -> Array:
        return _product(casts.derivative(wrt), call, operands, past_of(wrt, history))

    cts = cotangents(ct, operands, call, operands, product)
    return cts, None if history is None else _next(history, operands, call, ct)


_straight_through.defvjp(_forward, _backward)


def quantized(casts: Pair, operands: Operands, call: Call, history: Array | None = None) -> tuple[Operands, Call]:
    """The same product of quantised operands. Operands of whole matrices are stored with the contracted dim last, the
    one order in which Hopper's tensor cores multiply 8 bits."""
    product = call.product
    for i, (name, how) in enumerate(zip(("lhs", "rhs"), casts, strict=True)):
        if how.dtype is None:
            continue
        x, letters = as_tensor(name, operands, call)
        q = quantize_operand(x, how, None if history is None else history[i])
        stored = q if x.packed_axis is None or not x.is_flipped else q.mT
        letters = letters if stored is q else letters[::-1]
        scales = stored.kernel_scales()
        assert scales is not None
        operands = operands._replace(**{name: Operand(stored.data, scales)})
        product = product._replace(**{name: letters})
    return operands, call._replace(product=product)


def as_tensor(name: str, operands: Operands, call: Call) -> tuple[GroupedTensor, str]:
    """An operand of the primitive as a tensor with the contracted dim last, and its letters."""
    buffer, letters = getattr(operands, name).data, getattr(call.product, name)
    x = GroupedTensor(buffer, operands.sizes.get(letters[0]), operands.sizes.get(letters[1]))
    if letters[1] == call.product.contracted:
        return x, letters
    return (GroupedTensor(buffer.mT) if x.packed_axis is None else x.mT), letters[::-1]


def quantize_operand(x: GroupedTensor, how: Cast, past: Array | None) -> GroupedTensor:
    """`past`: the operand's largest values in past steps, `(length,)`, for delayed scaling."""
    scaling = how.scaling_for(*x.ragged)
    if past is None:
        return quantize(x, how.dtype, scaling, power_of_two=how.power_of_two)
    own = _common_amax(x, past)
    before = jnp.max(past, initial=0)
    scale = scale_of(jnp.where(before > 0, before, own), how.dtype, how.power_of_two)
    return cast(x, how.dtype, scaling, scale)


def _next(history: Array, operands: Operands, call: Call, ct: Array) -> Array:
    """The history one step later: `[3, length]`."""
    result = operands._replace(lhs=Operand(ct))  # the cotangent is stored as the operand of a dgrad
    tensors = [
        as_tensor("lhs", operands, call)[0],
        as_tensor("rhs", operands, call)[0],
        as_tensor("lhs", result, call._replace(product=call.product.derivative("lhs")))[0],
    ]
    newest = jnp.stack([_common_amax(x, past) for x, past in zip(tensors, history, strict=True)])
    return jnp.concatenate([newest[:, None], history[:, :-1]], axis=1)


def _common_amax(x: GroupedTensor, past: Array) -> Array:
    """The largest absolute value, over all devices and all elements of a `vmap` that share the history."""
    own = amax(lax.stop_gradient(x), NAMED["tensor"])
    axes = jax.typeof(own).manual_axis_type.varying - jax.typeof(past).manual_axis_type.varying
    return _over_batch(lax.pmax(own, tuple(sorted(axes, key=str))) if axes else own, past)


def _check_axes_are_tracked() -> None:
    """Raises a `NotImplementedError` in a `shard_map` that doesn't know what varies over its axes, and so would add up
    the devices' next histories."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and not jax.typeof(lax.axis_index(axes[0])).manual_axis_type.varying:
        problem = "delayed scaling in a `jax.shard_map` with `check_vma=False`."
        mend = "The next history is a cotangent, which would be added up over devices. Pass `check_vma=True`."
        Site("ragged.matmul").fail(NotImplementedError, problem, mend)


@custom_vmap
def _over_batch(own: Array, past: Array) -> Array:
    return own


@_over_batch.def_vmap
def _(axis_size: int, batched: Sequence[bool], own: Array, past: Array) -> tuple[Array, bool]:
    if batched[1]:  # each element has a history of its own
        return own if batched[0] else jnp.broadcast_to(own, (axis_size,)), True
    return _over_batch(jnp.max(own, axis=0) if batched[0] else own, past), False
