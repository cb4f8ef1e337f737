"""A product quantised by a recipe, its derivatives, and the next history of delayed scaling.

The gradient is straight-through: it treats rounding as the identity. Each derivative is a product with casts of its
own: it doesn't multiply the copies that the forward product has quantised.

The forward pass saves `x` quantised for the wgrad, and `w` unquantised, because `w` stays in memory anyway. With
`save="operands"`, it saves `x` itself, and derivatives can be differentiated again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from ragged.core.errors import Site
from ragged.core.formats import LARGEST
from ragged.core.mesh import explicit_spec, is_of_one_device, resharded
from ragged.core.rows import spread_rows
from ragged.core.scaling import NAMED
from ragged.primitive.moved_rows import dispatched
from ragged.primitive.primitive import bind, check_cotangent, cotangents, rows_of, vary_except_data, without_rows
from ragged.product.layout import Product
from ragged.product.operands import Call, Epilogue, Operand, Operands
from ragged.quant.quantize import amax, divided, int8_rows, quantize, scale_of
from ragged.quant.recipe import Cast, Recipe, scaling_for
from ragged.tensor.base import buffer_scales, is_read_transposed, kernel_scales
from ragged.tensor.tensor import GroupedTensor


def quantized_product(recipe: Recipe, operands: Operands, call: Call) -> Array:
    """The product of the quantised `operands`, with straight-through derivatives. Operands and result have the
    primitive's layout."""
    recipe = recipe.unsealed()
    operands = vary_except_data(operands, like=jax.tree.leaves(recipe))
    if recipe.history is not None:
        _check_axes_are_tracked()
    return _product(recipe, operands, call)


def quantized_rows(recipe: Recipe, operands: Operands, call: Call) -> Operand:
    """`lhs` quantised for the product and for the derivative by `rhs`, so that several products can share it."""
    varying, by_letter = vary_except_data(operands), {}
    derivative = recipe.derivative("rhs"), call.product.derivative("rhs")
    for each, product in ((recipe, call.product), derivative):
        if product == call.product and _casts_rows(recipe.forward[0], operands, call):
            continue
        if (q := _quantized_operand("lhs", each, varying, product)) is not None:
            by_letter[product.contracted] = q
    return operands.lhs._replace(quantized=by_letter)


def _product(recipe: Recipe, operands: Operands, call: Call) -> Array:
    """`_straight_through`, with a hint in the error of forward mode."""
    lhs, rhs, index = operands.lhs, operands.rhs, operands.gather
    floats = lhs.data, rhs.data, operands.epilogue, None if index is None else index.rows
    (x, w, epilogue, rows), recipe = jax.tree.map(_reverse_only, (floats, recipe))
    index = None if index is None else index._replace(rows=rows)
    lhs, rhs = lhs._replace(data=x), rhs._replace(data=w)
    return _straight_through(call, recipe, operands._replace(lhs=lhs, rhs=rhs, epilogue=epilogue, gather=index))


reverse_only_p = Primitive("ragged_reverse_only")
"""The tangent of `_reverse_only`: it can be transposed, but not computed."""


@jax.custom_jvp
def _reverse_only(x: Array) -> Array:
    """`x`; raises when differentiated in forward mode. (The error of `jax.custom_vjp` has no hint.)"""
    return x


@_reverse_only.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # Return `x` itself: a loop would save the result of `_reverse_only(x)` as a second array.
    return *primals, reverse_only_p.bind(*tangents)


def _refuse_forward_mode(*args: Any) -> NoReturn:
    hint = "Its derivative is straight-through, a rule for cotangents. Use `jax.grad` or `jax.vjp`; instead of "
    hint += "`jax.hessian(f)`, use `jax.jacrev(jax.grad(f))` with a recipe such as "
    hint += "`ragged.Recipe.preset('rowwise', save='operands')`."
    problem = "a product with `recipe` can't be differentiated in forward mode."
    Site("ragged.matmul").fail(TypeError, problem, hint)


reverse_only_p.def_abstract_eval(lambda x: x)
reverse_only_p.def_impl(_refuse_forward_mode)
mlir.register_lowering(reverse_only_p, _refuse_forward_mode)
ad.deflinear2(reverse_only_p, lambda ct, x: [ct])
batching.defvectorized(reverse_only_p)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _straight_through(call: Call, recipe: Recipe, operands: Operands) -> Array:
    """The product of the quantised operands, with `_forward` and `_backward` as derivative rules."""
    return bind(*quantized(recipe, operands, call))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["recipe", "operands", "newest"],
    meta_fields=["lhs", "rhs", "epilogue", "has_rows"],
)
@dataclass(frozen=True)
class Residuals:
    """Arrays that the backward pass needs, and the types of all arrays that have cotangents, saved or not."""

    recipe: Recipe
    operands: Operands  # `data` is None if only the quantised copy is saved
    newest: Array | None  # `(2,)`, this step's largest values of `lhs` and `rhs`; None without a history
    lhs: Any  # type of the data of `lhs`
    rhs: Any  # type of the data of `rhs`
    epilogue: Epilogue  # of types
    has_rows: bool  # whether the gathered rows have a cotangent instead of the buffer of `lhs`


def _forward(call: Call, recipe: Recipe, operands: Operands) -> tuple[Array, Residuals]:
    check_cotangent(call)
    out, recipe, newest = _product(recipe, operands, call), lax.stop_gradient(recipe), None
    lhs, rhs, epilogue = jax.tree.map(jax.typeof, (operands.lhs.data, operands.rhs.data, operands.epilogue))
    if (history := recipe.history) is not None:
        x = as_tensor("lhs", operands, call.product)[0] if operands.gather is None else _tokens(operands)
        tensors = x, as_tensor("rhs", operands, call.product)[0]
        newest = jnp.stack([_common_amax(*each) for each in zip(tensors, history[:2], strict=True)])
    has_rows = operands.gather is not None and operands.gather.rows is not None
    operands = without_rows(operands)._replace(epilogue=Epilogue())
    if recipe.save == "quantized":
        operands = _saved(recipe, operands, call.product)
    return out, Residuals(recipe, operands, newest, lhs, rhs, epilogue, has_rows)


def _saved(recipe: Recipe, operands: Operands, product: Product) -> Operands:
    """The operands to save for the derivatives: `x` and pre-quantised operands only as quantised copies."""
    floats = operands.lhs.data, operands.rhs.data
    x = "rhs" if product.ragged == "n" else "lhs"  # the operand that `Recipe` calls `x`
    for name, wrt in (("lhs", "rhs"), ("rhs", "lhs")):
        operand, derivative = getattr(operands, name), product.derivative(wrt)
        # If an index gathers the rows of `lhs`, their unquantised source is saved.
        saves_quantized = name == x and (name == "rhs" or operands.gather is None)
        q = None
        if saves_quantized or derivative.contracted in (operand.quantized or {}):
            q = _quantized_operand(name, recipe.derivative(wrt), operands, derivative)
        if q is None:
            operand = Operand(operand.data)
        else:
            q = q._replace(scales=_not_twice_differentiable(q.scales, floats))
            operand = Operand(None, quantized={derivative.contracted: q})
        operands = operands._replace(**{name: operand})
    return operands


@jax.custom_jvp
def _not_twice_differentiable(x: Any, of: Any) -> Any:
    """`x`; raises when differentiated with respect to `x` or to `of`, the arrays that `x` was computed from."""
    return x


@_not_twice_differentiable.defjvp
def _(primals: Any, tangents: Any) -> NoReturn:
    problem = "a derivative of a product with `recipe` can't be differentiated: only quantised operands were saved."
    hint = "Build the recipe with `save='operands'`, as in `ragged.Recipe.preset('rowwise', save='operands')`, and "
    hint += "use `jax.jacrev(jax.grad(f))`."
    Site("ragged.matmul").fail(TypeError, problem, hint)


def _backward(call: Call, residuals: Residuals, ct: Array) -> tuple[Recipe, Operands]:
    """`(next_recipe, cotangents)`: the recipe with the next history, and the operands' cotangents."""
    recipe, operands = residuals.recipe, residuals.operands
    if (spec := explicit_spec(ct)) is not None and spec.reduced:  # `ct` is the cotangent of an unreduced result.
        ct = resharded(ct, jax.typeof(ct).sharding.mesh, PartitionSpec(*spec.partitions))
    if recipe.save == "quantized":
        operands, ct = _not_twice_differentiable((operands, ct), ())

    def product(wrt: str, operands: Operands, call: Call) -> Array:
        derivative = recipe.derivative(wrt)
        if recipe.save == "quantized":
            return bind(*quantized(derivative, operands, call))
        return _product(derivative, operands, call)

    lhs, rhs, index = Operand(residuals.lhs), Operand(residuals.rhs), operands.gather
    types = operands._replace(lhs=lhs, rhs=rhs, epilogue=residuals.epilogue)
    if residuals.has_rows and index is not None:
        types = types._replace(gather=index._replace(rows=rows_of(lhs.data, index)))
    cts = cotangents(ct, operands, call, types, product)
    cts = cts._replace(lhs=cts.lhs._replace(quantized=None), rhs=cts.rhs._replace(quantized=None))
    # The history is the recipe's only leaf. Its "cotangent" is the next history.
    return jax.tree.map(lambda history: _next(history, residuals.newest, operands, call, ct), recipe), cts


_straight_through.defvjp(_forward, _backward)


def quantized(recipe: Recipe, operands: Operands, call: Call) -> tuple[Operands, Call]:
    """`(operands, call)` of the same product with quantised operands.

    The contracted dim of uniform operands is stored last: Hopper's tensor cores multiply 8 bits only in this order.
    """
    product, cast = call.product, recipe.forward[0]
    if operands.gather is not None and cast.dtype is not None:
        operands = without_rows(operands) if _is_in_place(cast, product) else dispatched(operands)
    casts_rows = _casts_rows(cast, operands, call)
    call = call._replace(cast=int8_rows if casts_rows else None)
    for name in ("lhs", "rhs"):
        is_whole, letters = name == "lhs" and casts_rows, getattr(product, name)
        operand = None if is_whole else _quantized_operand(name, recipe, operands, call.product)
        if operand is None:
            operand = Operand(getattr(operands, name).data)
        else:
            assert operand.scales is not None
            operand = operand._replace(scales=operand.scales.for_packed)
            if product.is_uniform(letters) and letters[1] != product.contracted:
                letters = letters[::-1]
        operands = operands._replace(**{name: operand})
        product = product._replace(**{name: letters})
    return operands, call._replace(product=product)


def _casts_rows(cast: Cast, operands: Operands, call: Call) -> bool:
    """True if the backend quantises the rows of `lhs`, by `Call.cast`. The recipe must cast them to int8 by row, and
    all operands must be on one device."""
    p, lhs = call.product, operands.lhs
    is_row = p.lhs == "mk" and p.out == "mn" and p.contracted == "k" and p.ragged in ("", "m")
    if not is_row or operands.gather is not None or cast != Cast("int8", "row") or "k" in (lhs.quantized or {}):
        return False
    return jnp.dtype(lhs.data.dtype).itemsize <= 4 and is_of_one_device(jax.tree.leaves(operands))


def _quantized_operand(name: str, recipe: Recipe, operands: Operands, product: Product) -> Operand | None:
    """The quantised operand `name` of `product`; None if the recipe doesn't quantise it.

    A pre-quantised operand is returned as it is.
    """
    i, operand = ("lhs", "rhs").index(name), getattr(operands, name)
    cast, history = recipe.forward[i], None if recipe.history is None else recipe.history[i]
    if cast.dtype is None:
        return None
    if product.contracted in (operand.quantized or {}):
        return operand.quantized[product.contracted]
    operands = operands._replace(**{name: Operand(lax.stop_gradient(operand.data))})
    if name == "lhs" and operands.gather is not None:
        return _quantized_in_place(cast, operands, history)
    return as_operand(quantize_operand(as_tensor(name, operands, product)[0], cast, history))


def as_operand(x: GroupedTensor) -> Operand:
    """A quantised tensor as an operand of the primitive, with the packed axis first."""
    x = x.mT if x.packed_axis is not None and is_read_transposed(x) else x
    return Operand(jnp.asarray(x.data), buffer_scales(x))


def _is_in_place(cast: Cast, product: Product) -> bool:
    """Whether `lhs` is quantised before its rows are gathered. It is unless a scale is shared by several rows, but not
    by the whole tensor."""
    if cast.has_array_of_scales:
        return False
    if cast.scaling.block is None:
        return True
    block = scaling_for(cast, True, False).block
    return product.contracted != product.lhs[0] and block is not None and block[0] == 1


def _quantized_in_place(cast: Cast, operands: Operands, history: Array | None) -> Operand:
    """The buffer of `lhs`, quantised before the index gathers its rows, with the scales of the gathered rows."""
    q = quantize_operand(_tokens(operands), cast, history)
    scales = kernel_scales(q)
    assert scales is not None
    if scales.block[0] is None:  # Repeat the tensor's scale for each group.
        values = jnp.broadcast_to(scales.values, (operands.num_groups, 1))
    else:
        assert operands.gather is not None
        values = spread_rows(scales.values, *operands.gather[:2])
    return Operand(jnp.asarray(q.data), replace(scales, values=values))


def _tokens(operands: Operands) -> GroupedTensor:
    """The buffer of `lhs` as one group, with zeros in the rows that the index doesn't gather."""
    assert operands.gather is not None
    data, (source, places, _) = operands.lhs.data, operands.gather
    is_used = jnp.any(places < source.shape[0], axis=1)
    used = jnp.where(is_used[:, None], data, jnp.zeros((), data.dtype))
    return GroupedTensor(used, jnp.full(1, data.shape[0], jnp.int32))


def as_tensor(name: str, operands: Operands, product: Product) -> tuple[GroupedTensor, str]:
    """`(x, letters)`: an operand of the primitive as a tensor with the contracted dim last, and the letters of `x`."""
    buffer, letters = getattr(operands, name).data, getattr(product, name)
    x = GroupedTensor(buffer, operands.sizes.get(letters[0]), operands.sizes.get(letters[1]))
    if letters[1] == product.contracted:
        return x, letters
    return (GroupedTensor(buffer.mT) if x.packed_axis is None else x.mT), letters[::-1]


def quantize_operand(x: GroupedTensor, cast: Cast, history: Array | None) -> GroupedTensor:
    """`x` quantised by `cast`.

    `history`: for delayed scaling, `(length,)`: the operand's largest absolute values in past steps.
    """
    scaling = scaling_for(cast, *x.ragged)
    if history is None:
        return quantize(x, cast.dtype, scaling, power_of_two=cast.power_of_two, scale=cast.given_scale)
    current, past = _common_amax(x, history), jnp.max(history, initial=0)
    scale = scale_of(jnp.where(past > 0, past, current), LARGEST[cast.dtype], cast.power_of_two)
    return divided(x, cast.dtype, scaling, scale)


def _next(history: Array, newest: Array | None, operands: Operands, call: Call, ct: Array) -> Array:
    """The history after this step, `[3, length]`."""
    assert newest is not None
    result = operands._replace(lhs=Operand(ct), gather=None)  # The cotangent has the layout of a dgrad's `lhs`.
    dy = as_tensor("lhs", result, call.product.derivative("lhs"))[0]
    newest = jnp.concatenate([newest, _common_amax(dy, history[2])[None]])
    return jnp.concatenate([newest[:, None], history[:, :-1]], axis=1)


def _common_amax(x: GroupedTensor, history: Array) -> Array:
    """Largest absolute value of `x`, over all devices and elements of a `vmap` that share the history."""
    largest = amax(lax.stop_gradient(x), NAMED["tensor"])
    axes = jax.typeof(largest).manual_axis_type.varying - jax.typeof(history).manual_axis_type.varying
    return _over_batch(lax.pmax(largest, tuple(sorted(axes, key=str))) if axes else largest, history)


def _check_axes_are_tracked() -> None:
    """Raises in a `shard_map` with `check_vma=False`, which would add the next histories of all devices."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and not jax.typeof(lax.axis_index(axes[0])).manual_axis_type.varying:
        problem = "delayed scaling doesn't work in a `jax.shard_map` with `check_vma=False`."
        hint = "The next history is a cotangent, and would be summed over devices. Pass "
        hint += "`check_vma=True` to `jax.shard_map`."
        Site("ragged.matmul").fail(NotImplementedError, problem, hint)


@custom_vmap
def _over_batch(largest: Array, history: Array) -> Array:
    """`largest`; under a `vmap` that shares the history, its maximum over the batch."""
    return largest


@_over_batch.def_vmap
def _(axis_size: int, batched: Sequence[bool], largest: Array, history: Array) -> tuple[Array, bool]:
    if batched[1]:  # Each element of the batch has a history.
        return largest if batched[0] else jnp.broadcast_to(largest, (axis_size,)), True
    return _over_batch(jnp.max(largest, axis=0) if batched[0] else largest, history), False
