"""`Recipe`: how a product and its two derivatives are quantised while training.

    forward   y = x w      dgrad   dx = dy wᵀ      wgrad   dw = xᵀ dy

Each of the three quantises its own two operands, from what isn't quantised, along the dim that it contracts. Rounding
counts as the identity for the gradient (straight-through): the derivatives are those of the product that isn't
quantised, computed from quantised operands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.extend.random import define_prng_impl
from jax.interpreters import ad, batching, mlir
from jaxtyping import Float

from ragged._mesh import vary_together
from ragged.product.operands import Call, Operand, Operands
from ragged.product.primitive import bind, check_cotangent, cotangents
from ragged.quant.quantize import amax, cast, dtype_name, quantize, scale_of
from ragged.quant.scaling import NAMED, Scaling, is_count
from ragged.tensor.tensor import GroupedTensor, describe, is_arraylike


@dataclass(frozen=True)
class Cast:
    """How one operand of one product is quantised.

    - `dtype`: float8_e4m3fn, float8_e5m2, int8, int4; or None: it isn't.
    - `scaling`: as for `ragged.quantize`, of the operand with the contracted dim last: `"row"` is one scale for all
      that is contracted with each other, `(1, 128)` one for each 128 of it, `(128, 128)` one for 128 such rows too.
      Along a ragged dim, where a block would straddle groups, an extent above 1 becomes the whole group if that dim is
      contracted, and 1 if it isn't.
    - `power_of_two`: rounds scales up to powers of two.

    **Raises:** what `ragged.quantize` does, and `ValueError` for a scale for each element of the contracted dim, which
    no tensor core could apply.
    """

    dtype: Any
    scaling: Any = NAMED["tensor"]
    power_of_two: bool | Any = False

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype, "ragged.Cast"))
        scaling = Scaling.of(self.scaling)
        if scaling.block is not None and scaling.block[1] == 1:
            raise ValueError(
                f"`ragged.Cast`: the scaling {scaling} has a scale for each element of the dim that is contracted.\n"
                "A block is (kept, contracted): `(1, None)` or `'row'` for one scale a row, in a wgrad too, "
                "where the rows are features and what is contracted are tokens."
            )
        if not isinstance(self.power_of_two, bool):
            raise TypeError(f"`ragged.Cast`: `power_of_two` is {self.power_of_two!r}.\nPass True or False.")
        object.__setattr__(self, "scaling", scaling)
        object.__setattr__(self, "power_of_two", self.power_of_two or scaling.dtype != jnp.float32)

    def scaling_for(self, kept: bool, contracted: bool) -> Scaling:
        """The scaling for an operand that is ragged in these dims."""
        if self.scaling.block is None:
            return self.scaling
        first, last = self.scaling.block
        first = 1 if kept and first is not None else first
        return Scaling((first, None if contracted else last), self.scaling.dtype)


Pair = tuple[Cast, Cast]


def _no_key(*args: Any) -> NoReturn:
    raise TypeError("`ragged.Recipe`: a sealed history is no random key.\nRead it as `recipe.history`.")


# The dtype of JAX's that no arithmetic takes and every transformation does is that of random keys, of whatever kind.
_SEAL = define_prng_impl(
    key_shape=(1,),
    seed=_no_key,
    split=_no_key,
    random_bits=_no_key,
    fold_in=_no_key,
    name="ragged_history",
    tag="Recipe.history",
)


def _sealed(history: Array | Any) -> Array | Any:
    """float32 as what no arithmetic takes; anything else as it is."""
    if not is_arraylike(history) or history.dtype != jnp.float32:
        return history
    return jax.random.wrap_key_data(lax.bitcast_convert_type(jnp.asarray(history), jnp.uint32)[..., None], impl=_SEAL)


def _unsealed(state: Array | Any) -> Array | Any:
    """The float32 of `_sealed`; anything else as it is."""
    if not is_arraylike(state) or not jnp.issubdtype(state.dtype, jax.dtypes.prng_key):
        return state
    return lax.bitcast_convert_type(jax.random.key_data(state)[..., 0], jnp.float32)


class Recipe(eqx.Module):
    """How `matmul(x, w, recipe=recipe)` quantises: a pytree whose only leaf is the history of delayed scaling.

    - `forward`: the casts of `x` and of `w`.
    - `dgrad`: those of the result's cotangent and of `w`.
    - `wgrad`: those of `x` and of the result's cotangent.
    - `history`: None; or `(3, length)` float32, for delayed scaling: the largest absolute values that `x`, `w` and the
      cotangent had in the last steps, newest first, 0 where there was none. Scales are those for the largest of them.
    - `name`: what tables call it.

    In a product from the left, of uniform and ragged columns, `x` is the ragged operand and `w` the uniform one. In all
    others `x` is `lhs` and `w` is `rhs`, whatever they are.

    `Recipe.preset` makes the well-known ones:

    | name           | scales of `x`, gradient | of `w`    | gradient in | as in                                  |
    |----------------|-------------------------|-----------|-------------|----------------------------------------|
    | `"tensorwise"` | one                     | one       | e5m2        | torchao's tensorwise                   |
    | `"rowwise"`    | one a row, powers of 2  | the same  | e4m3        | torchao's rowwise                      |
    | `"blockwise"`  | 1 × 128                 | 128 × 128 | e4m3        | DeepSeek-V3 (arXiv:2412.19437)         |
    | `"mxfp8"`      | 1 × 32, e8m0            | the same  | e4m3        | OCP MX v1.0, NVIDIA (arXiv:2506.08027) |
    | `"delayed"`    | one, of past steps      | the same  | e5m2        | NVIDIA's Transformer Engine            |

    All else is e4m3. A row runs along what is contracted; in a wgrad that are a group's tokens, whose blocks are whole
    groups.

    **Delayed scaling** carries its state explicitly: the "gradient" with respect to the recipe is the next recipe.
    The first step, without a history, uses the operands' own largest values.

        grads, recipe = jax.grad(loss, argnums=(0, 1))(params, recipe.unsealed())
        recipe = recipe.sealed()

    A recipe is sealed when it is made: its leaf is of a dtype of its own, that `jnp`, `optax` and `jax.grad` refuse and
    `eqx.is_inexact_array` leaves out, so that no optimiser, norm or sum takes the history for a parameter. Only
    `unsealed`, for `jax.grad` and for checkpoints, does it have floats. `matmul` takes both.

    Each `matmul` needs a recipe of its own: cotangents of one that is used twice would add up. Under `vmap` and
    `shard_map` one recipe for all elements or devices gets the largest values of all of them. Where the loss doesn't
    depend on a product, the next recipe is zeros, as its gradient is: the step after that begins anew. Values above the
    largest of the past saturate. The name `"delayed"` alone stands for a history that is always empty.

    A matrix that all groups share makes them one group, for scales too.
    """

    forward: Pair | Any = eqx.field(static=True)
    dgrad: Pair | Any = eqx.field(static=True)
    wgrad: Pair | Any = eqx.field(static=True)
    state: Any  # `history`, sealed or not
    name: str = eqx.field(static=True)

    def __init__(
        self, forward: Pair | Any, dgrad: Pair | Any, wgrad: Pair | Any, history: Any = None, *, name: str = "custom"
    ) -> None:
        self.forward, self.dgrad, self.wgrad = forward, dgrad, wgrad
        self.state, self.name = _sealed(history), name

    @property
    def history(self) -> Float[Array, "*stacked 3 length"] | Any:
        """The largest values of past steps, float32; None without delayed scaling."""
        return _unsealed(self.state)

    def unsealed(self) -> "Recipe":
        """The same recipe with its history as floats: what `jax.grad` takes, and what can be saved."""
        return jax.tree.map(_unsealed, self)

    def sealed(self) -> "Recipe":
        """The same recipe with a history that no arithmetic takes."""
        return jax.tree.map(_sealed, self)

    def __check_init__(self) -> None:
        for name in ("forward", "dgrad", "wgrad"):
            pair = getattr(self, name)
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, Cast) for each in pair)):
                raise TypeError(
                    f"`ragged.Recipe`: `{name}` is {pair!r}.\n"
                    "It must be the `ragged.Cast`s of its two operands, a tuple."
                )
            if self.state is not None and any(each.dtype and each.scaling.block is not None for each in pair):
                raise ValueError(
                    f"`ragged.Recipe`: `history` with a scaling of `{name}` other than 'tensor'.\nGot {pair!r}.\n"
                    "Delayed scaling knows one largest value of each tensor."
                )
        if is_arraylike(self.state):
            self.check_history()

    def check_history(self) -> None:
        """Raises unless `history` is None or an array `(3, length)`, float32."""
        history = self.history
        if history is None:
            return
        if not is_arraylike(history) or history.dtype != jnp.float32:
            raise TypeError(
                f"`ragged.Recipe`: `history` is {describe(history)}.\n"
                "It must be a float32 array: `Recipe.preset('delayed').history`."
            )
        if history.ndim != 2 or history.shape[0] != 3 or not history.shape[1]:
            raise ValueError(
                f"`ragged.Recipe`: `history` is {describe(history)}.\n"
                "It must be (3, length), a row each for `x`, `w` and the cotangent. One a call: map or scan over it."
            )

    @classmethod
    def preset(cls, name: str | Any, *, gradients: Any = None, length: int | Any = 16) -> "Recipe":
        """A well-known recipe: `"tensorwise"`, `"rowwise"`, `"blockwise"`, `"mxfp8"` or `"delayed"`.

        `gradients`: the dtype of cotangents, if not the usual one. `length`: of the history of `"delayed"`, in steps.
        """
        if not is_count(length):
            raise ValueError(f"`ragged.Recipe.preset`: `length` is {length!r}.\nIt must be a positive int, in steps.")
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(
                f"`ragged.Recipe.preset`: {name!r} is no recipe.\nPass one of {', '.join(map(repr, PRESETS))}, "
                "or build a `ragged.Recipe`."
            )
        activations, weights, power_of_two, usual = PRESETS[name]
        x, w = (Cast("float8_e4m3fn", scaling, power_of_two) for scaling in (activations, weights))
        dy = Cast(usual if gradients is None else gradients, activations, power_of_two)
        history = jnp.zeros((3, length), jnp.float32) if name == "delayed" else None
        return cls((x, w), (dy, w), (x, dy), history, name=name)

    @classmethod
    def of(cls, recipe: "str | Recipe | Any") -> "Recipe":
        """The preset of a name; a `Recipe` as it is."""
        if isinstance(recipe, Recipe):
            return recipe
        if not isinstance(recipe, str):
            raise TypeError(
                f"`ragged.Recipe`: {recipe!r} is no recipe.\nPass a `ragged.Recipe` or one of "
                f"{', '.join(map(repr, PRESETS))}."
            )
        return cls.preset(recipe)


PRESETS: dict[str, tuple[Any, Any, bool, str]] = {
    "tensorwise": ("tensor", "tensor", False, "float8_e5m2"),
    "rowwise": ("row", "row", True, "float8_e4m3fn"),
    "blockwise": ((1, 128), (128, 128), False, "float8_e4m3fn"),
    "mxfp8": ("mx", "mx", True, "float8_e4m3fn"),
    "delayed": ("tensor", "tensor", False, "float8_e5m2"),
}
"""Scaling of activations and gradients, of weights, whether scales are powers of two, the gradients' dtype."""


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
    casts, history = casts_of(recipe, call)
    leaves, tree = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(tree, vary_together(leaves, like=jax.tree.leaves(history)))
    if history is not None:
        _check_axes_are_tracked()
    return _product(casts, call, operands, history)


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
    raise TypeError(
        "`ragged.matmul`: a product with `recipe` can't be differentiated in forward mode.\n"
        "Its derivative is straight-through: a rule for cotangents. Take `jax.grad` or `jax.vjp`, and "
        "`jax.jacrev(jax.grad(f))` in place of `jax.hessian(f)`."
    )


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
        raise NotImplementedError(
            "`ragged.matmul`: delayed scaling in a `jax.shard_map` with `check_vma=False`.\n"
            "The next history is a cotangent, which would be added up over devices. Pass `check_vma=True`."
        )


@custom_vmap
def _over_batch(own: Array, past: Array) -> Array:
    return own


@_over_batch.def_vmap
def _(axis_size: int, batched: Sequence[bool], own: Array, past: Array) -> tuple[Array, bool]:
    if batched[1]:  # each element has a history of its own
        return own if batched[0] else jnp.broadcast_to(own, (axis_size,)), True
    return _over_batch(jnp.max(own, axis=0) if batched[0] else own, past), False
