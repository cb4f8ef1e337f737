"""A product quantised by a recipe, its derivatives, and the next history of delayed scaling.

Rounding counts as the identity for the gradient (straight-through): the derivatives are those of the product that isn't
quantised, each computed from operands that are quantised from what isn't.

Of `x`, the forward pass makes what the wgrad multiplies, and keeps that. (Of `w`, which is in memory as it is, it keeps
nothing: the dgrad's operand is made anew.) Or it keeps `x`, for a derivative that is differentiated in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ragged._errors import Site
from ragged.product.operands import Call, Epilogue, Operand, Operands
from ragged.product.primitive import bind, check_cotangent, cotangents, rows_of, vary_but_factors, without_rows
from ragged.product.rows import dispatched
from ragged.product.shared import folded
from ragged.quant.formats import LARGEST
from ragged.quant.quantize import amax, cast, quantize, scale_of
from ragged.quant.recipe import Cast, Pair, Recipe
from ragged.quant.scaling import NAMED
from ragged.tensor.rows import spread_rows
from ragged.tensor.tensor import GroupedTensor


class Casts(NamedTuple):
    """A product's two casts, and those of its derivatives, each in the order of its operands.

    The derivative by `lhs` multiplies the cotangent, in place of `lhs`, with `rhs`.

    `kept`: the names of the operands that are kept quantised. With any, the derivative has none itself.
    """

    forward: Pair
    by_lhs: Pair
    by_rhs: Pair
    kept: tuple[str, ...] = ()

    def derivative(self, wrt: str) -> "Casts":
        """Those of the derivative, which is a product again: what it is of the three, and its own derivatives."""
        if wrt == "lhs":
            return Casts(self.by_lhs, self.forward, _swapped(self.by_rhs))
        return Casts(self.by_rhs, _swapped(self.by_lhs), self.forward)


def _swapped(pair: Pair) -> Pair:
    return pair[1], pair[0]


def casts_of(recipe: Recipe, call: Call) -> tuple[Casts, Any]:
    """A recipe's casts and history in the order of a product's operands: for `w x`, from the left, exchanged."""
    kept = ("lhs",) if recipe.save == "quantized" else ()
    casts, history = Casts(recipe.forward, recipe.dgrad, recipe.wgrad, kept), recipe.history
    if call.product.ragged != "n":
        return casts, history
    kept = tuple(_OTHER[name] for name in kept)
    swapped = Casts(_swapped(casts.forward), _swapped(casts.by_rhs), _swapped(casts.by_lhs), kept)
    return swapped, None if history is None else _rows(history, 1, 0, 2)


_OTHER = {"lhs": "rhs", "rhs": "lhs"}


def past_of(wrt: str, history: Array | None) -> Array | None:
    """The history in the order of a derivative's operands."""
    if history is None:
        return None
    return _rows(history, 2, 1, 0) if wrt == "lhs" else _rows(history, 0, 2, 1)


def _rows(history: Array, *order: int) -> Array:
    return jnp.stack([history[i] for i in order])


Made = dict[str, dict[str, GroupedTensor]]
"""Operands that are quantised already, by name, and by the letter that is contracted. Uniform ones have it last."""


def quantized_product(recipe: Recipe, operands: Operands, call: Call, made: Made) -> Array:
    """The product of `operands`, quantised, with straight-through derivatives. The primitive's operands and result."""
    operands, call, restore = folded(operands, call)
    casts, history = casts_of(recipe, call)
    operands = vary_but_factors(operands, like=jax.tree.leaves(history))
    if history is not None:
        _check_axes_are_tracked()
    return restore(_product(casts, call, operands, history, made))


def made_of_lhs(recipes: Sequence[Recipe | None], operands: Operands, call: Call) -> Made:
    """What products of the same `lhs` make of it, for the forward and to keep; nothing, if they don't make the same."""
    hows = set()
    if operands.gather is not None:
        return {}
    for recipe in recipes:
        if recipe is None or recipe.history is not None or "lhs" not in (casts := casts_of(recipe, call)[0]).kept:
            return {}
        hows.add((casts.forward[0], casts.by_rhs[0]))
    if len(hows) > 1:
        return {}
    operands, call, _ = folded(operands, call)
    operands, made = lax.stop_gradient(vary_but_factors(operands)), {}
    for how, product in zip(hows.pop(), (call.product, call.product.derivative("rhs")), strict=True):
        if how.dtype is not None:
            x = as_tensor("lhs", operands, call._replace(product=product))[0]
            made[product.contracted] = _as_stored(quantize_operand(x, how, None))
    return {"lhs": made}


def _product(casts: Casts, call: Call, operands: Operands, history: Array | None, made: Made) -> Array:
    index = operands.gather
    floats = operands.lhs, operands.rhs, operands.epilogue, None if index is None else index.rows
    (lhs, rhs, epilogue, rows), history = jax.tree.map(_reverse_only, (floats, history))
    index = None if index is None else index._replace(rows=rows)
    operands = operands._replace(lhs=lhs, rhs=rhs, epilogue=epilogue, gather=index)
    return _straight_through(casts, call, operands, history, made)


reverse_only_p = Primitive("ragged_reverse_only")
"""The tangent of `_reverse_only`: it can be transposed, but not computed."""


@jax.custom_jvp
def _reverse_only(x: Array) -> Array:
    """`x`, with an error for whoever differentiates by it in forward mode. (`jax.custom_vjp`'s own names no mend.)"""
    return x


@_reverse_only.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # Not `_reverse_only` of it again, another array: a loop would stack what it was given.
    return *primals, reverse_only_p.bind(*tangents)


def _refuse_forward_mode(*args: Any) -> NoReturn:
    mend = "Its derivative is straight-through: a rule for cotangents. Take `jax.grad` or `jax.vjp`; and in place of "
    mend += "`jax.hessian(f)`, `jax.jacrev(jax.grad(f))` with a recipe that is made with `save='operands'`."
    problem = "a product with `recipe` can't be differentiated in forward mode."
    Site("ragged.matmul").fail(TypeError, problem, mend)


reverse_only_p.def_abstract_eval(lambda x: x)
reverse_only_p.def_impl(_refuse_forward_mode)
mlir.register_lowering(reverse_only_p, _refuse_forward_mode)
ad.deflinear2(reverse_only_p, lambda ct, x: [ct])
batching.defvectorized(reverse_only_p)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _straight_through(casts: Casts, call: Call, operands: Operands, history: Array | None, made: Made) -> Array:
    return bind(*quantized(casts.forward, operands, call, history, made))


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["lhs", "rhs", "epilogue", "has_rows"])
@dataclass(frozen=True)
class Avals:
    """Types of the arrays that have cotangents, which need not be kept."""

    lhs: Any
    rhs: Any
    epilogue: Epilogue
    has_rows: bool  # whether rows that an index gathers have a cotangent, in place of the buffer


class Residuals(NamedTuple):
    """What the backward pass has: the operands, but for the data that `made` has for the derivatives."""

    operands: Operands
    made: Made
    past: tuple[Array, Array] | None  # the history, and its newest values of `lhs` and `rhs`, `(2,)`
    avals: Avals


def _forward(
    casts: Casts, call: Call, operands: Operands, history: Array | None, made: Made
) -> tuple[Array, Residuals]:
    check_cotangent(call)
    out, history = _product(casts, call, operands, history, made), lax.stop_gradient(history)
    lhs, rhs, epilogue = jax.tree.map(jax.typeof, (operands.lhs.data, operands.rhs.data, operands.epilogue))
    past = None
    if history is not None:
        x = as_tensor("lhs", operands, call)[0] if operands.gather is None else _tokens(operands)
        tensors = x, as_tensor("rhs", operands, call)[0]
        past = history, jnp.stack([_common_amax(*each) for each in zip(tensors, history[:2], strict=True)])
    has_rows = operands.gather is not None and operands.gather.rows is not None
    operands = without_rows(operands)._replace(epilogue=Epilogue())
    if casts.kept:
        operands, made = _kept(casts, call, operands, history, made)
    return out, Residuals(operands, made, past, Avals(lhs, rhs, epilogue, has_rows))


def _kept(casts: Casts, call: Call, operands: Operands, history: Array | None, made: Made) -> tuple[Operands, Made]:
    """What the derivatives multiply with the cotangent, quantised; and the operands that it isn't made of."""
    kept, floats = {}, (operands.lhs, operands.rhs)
    for i, (name, wrt) in enumerate((("lhs", "rhs"), ("rhs", "lhs"))):
        how, its = casts.derivative(wrt).forward[i], call._replace(product=call.product.derivative(wrt))
        q = made.get(name, {}).get(its.product.contracted)
        # Rows that an index gathers are kept as what they are gathered from.
        keeps = name in casts.kept and (name != "lhs" or operands.gather is None)
        if how.dtype is not None and q is None and keeps:
            x = as_tensor(name, lax.stop_gradient(operands), its)[0]
            q = _as_stored(quantize_operand(x, how, None if history is None else history[i]))
        if q is not None:
            kept[name] = {its.product.contracted: q._with(scales=_only_once(q.scales, floats))}
            operands = operands._replace(**{name: Operand(None)})
    return operands, kept


@jax.custom_jvp
def _only_once(x: Any, of: Any) -> Any:
    """`x`, with an error for whoever differentiates it, as a function of `of` or otherwise."""
    return x


@_only_once.defjvp
def _(primals: Any, tangents: Any) -> NoReturn:
    problem = "a derivative of a product with `recipe` can't be differentiated: quantised operands were kept for it."
    mend = "Make the recipe with `save='operands'`, and take `jax.jacrev(jax.grad(f))`."
    Site("ragged.matmul").fail(TypeError, problem, mend)


def _backward(casts: Casts, call: Call, residuals: Residuals, ct: Array) -> tuple[Operands, Any, None]:
    operands, made, past, avals = residuals
    if casts.kept:
        operands, ct = _only_once((operands, ct), ())

    def product(wrt: str, operands: Operands, call: Call) -> Array:
        its, history = casts.derivative(wrt), None if past is None else past_of(wrt, past[0])
        others = {name: each for name, each in made.items() if name != wrt}  # in its place is the cotangent
        if casts.kept:
            return bind(*quantized(its.forward, operands, call, history, others))
        return _product(its, call, operands, history, others)

    data, index = avals.lhs, operands.gather
    of = operands._replace(lhs=Operand(data), rhs=Operand(avals.rhs), epilogue=avals.epilogue)
    if avals.has_rows:
        of = of._replace(gather=index._replace(rows=rows_of(data, index)))
    cts = cotangents(ct, operands, call, of, product)
    return cts, None if past is None else _next(*past, operands, call, ct), None


_straight_through.defvjp(_forward, _backward)


def quantized(casts: Pair, operands: Operands, call: Call, history: Array | None, made: Made) -> tuple[Operands, Call]:
    """The same product of quantised operands. Operands of whole matrices are stored with the contracted dim last, the
    one order in which Hopper's tensor cores multiply 8 bits."""
    product = call.product
    for i, (name, how) in enumerate(zip(("lhs", "rhs"), casts, strict=True)):
        if how.dtype is None:
            continue
        past = None if history is None else history[i]
        if name == "lhs" and operands.gather is not None:
            if _is_in_place(how, call):
                operands = without_rows(operands)._replace(lhs=_quantized_in_place(how, operands, past))
                continue
            operands = dispatched(operands)
        q = made.get(name, {}).get(product.contracted)
        if q is None:
            q = quantize_operand(as_tensor(name, operands, call)[0], how, past)
        letters, q = getattr(product, name), _as_stored(q)
        if q.packed_axis is None and letters[1] != product.contracted:
            letters = letters[::-1]
        scales = q._kernel_scales()
        assert scales is not None
        operands = operands._replace(**{name: Operand(q.data, scales)})
        product = product._replace(**{name: letters})
    return operands, call._replace(product=product)


def _as_stored(x: GroupedTensor) -> GroupedTensor:
    """With the packed axis first; uniform ones as they are, with the contracted dim last."""
    return x.mT if x.packed_axis is not None and x._is_flipped else x


def _is_in_place(how: Cast, call: Call) -> bool:
    """Whether rows that an index gathers are quantised to the same numbers in whatever group they are: scales are of
    parts of a row, or of the whole tensor."""
    if how.scaling.block is None:
        return True
    kept = call.product.contracted != call.product.lhs[0]
    return kept and how._scaling_for(True, False).block[0] == 1


def _quantized_in_place(how: Cast, operands: Operands, past: Array | None) -> Operand:
    """The buffer of `lhs` quantised before an index gathers its rows, with the scales of the rows."""
    q = quantize_operand(_tokens(operands), how, past)
    scales = q._kernel_scales()
    assert scales is not None
    if scales.block[0] is None:  # of the tensor, for each group
        values = jnp.broadcast_to(scales.values, (operands.num_groups, 1))
    else:
        values = spread_rows(scales.values, *operands.gather[:2])
    return Operand(jnp.asarray(q.data), replace(scales, values=values))


def _tokens(operands: Operands) -> GroupedTensor:
    """The rows that an index gathers, each once, as one group; zeros for those that it doesn't."""
    data, (source, places, _) = operands.lhs.data, operands.gather
    is_used = jnp.any(places < source.shape[0], axis=1)
    used = jnp.where(is_used[:, None], data, jnp.zeros((), data.dtype))
    return GroupedTensor(used, jnp.full(1, data.shape[0], jnp.int32))


def as_tensor(name: str, operands: Operands, call: Call) -> tuple[GroupedTensor, str]:
    """An operand of the primitive as a tensor with the contracted dim last, and its letters."""
    buffer, letters = getattr(operands, name).data, getattr(call.product, name)
    x = GroupedTensor(buffer, operands.sizes.get(letters[0]), operands.sizes.get(letters[1]))
    if letters[1] == call.product.contracted:
        return x, letters
    return (GroupedTensor(buffer.mT) if x.packed_axis is None else x.mT), letters[::-1]


def quantize_operand(x: GroupedTensor, how: Cast, past: Array | None) -> GroupedTensor:
    """`past`: the operand's largest values in past steps, `(length,)`, for delayed scaling."""
    scaling = how._scaling_for(*x.ragged)
    if past is None:
        return quantize(x, how.dtype, scaling, power_of_two=how.power_of_two)
    own = _common_amax(x, past)
    before = jnp.max(past, initial=0)
    scale = scale_of(jnp.where(before > 0, before, own), LARGEST[how.dtype], how.power_of_two)
    return cast(x, how.dtype, scaling, scale)


def _next(history: Array, newest: Array, operands: Operands, call: Call, ct: Array) -> Array:
    """The history one step later: `[3, length]`."""
    result = operands._replace(lhs=Operand(ct), gather=None)  # the cotangent is stored as the operand of a dgrad
    dy = as_tensor("lhs", result, call._replace(product=call.product.derivative("lhs")))[0]
    newest = jnp.concatenate([newest, _common_amax(dy, history[2])[None]])
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
        problem = "delayed scaling doesn't work in a `jax.shard_map` with `check_vma=False`."
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
