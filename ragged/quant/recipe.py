"""`Recipe`: how a product and its two derivatives are quantised while training.

    forward   y = x w      dgrad   dx = dy wᵀ      wgrad   dw = xᵀ dy

Each of the three quantises its own two operands, along the dim that it contracts.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import define_prng_impl
from jaxtyping import Float

from ragged._errors import Site, describe, is_arraylike, is_count
from ragged.quant.quantize import dtype_name
from ragged.quant.scaling import NAMED, Scaling


@dataclass(frozen=True)
class Cast:
    """How one operand of one product is quantised.

    - `dtype`: float8_e4m3fn, float8_e5m2, float4_e2m1fn, int8, int4; or None: it isn't.
    - `scaling`: as for `ragged.quantize`, of the operand with the contracted dim last: `"row"` is one scale for all
      that is contracted with each other, `(1, 128)` one for each 128 of it, `(128, 128)` one for 128 such rows too.
      Along a ragged dim that is contracted, as tokens are in a wgrad, blocks begin at each group's first element. Along
      one that isn't, an extent above 1 becomes 1; and if both are ragged, all that is contracted is one block.
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
            problem = f"the scaling {scaling} has a scale for each element of the dim that is contracted."
            mend = "A block is (kept, contracted): `(1, None)` or `'row'` for one scale a row, in a wgrad too, "
            mend += "where the rows are features and what is contracted are tokens."
            Site("ragged.Cast").fail(ValueError, problem, mend)
        if not isinstance(self.power_of_two, bool):
            Site("ragged.Cast").fail(TypeError, f"`power_of_two` is {self.power_of_two!r}.", "Pass True or False.")
        object.__setattr__(self, "scaling", scaling)
        object.__setattr__(self, "power_of_two", self.power_of_two or scaling.dtype == jnp.float8_e8m0fnu)

    def __str__(self) -> str:
        return f"{self.dtype or 'no dtype'} by {self.scaling}{' with powers of two' * self.power_of_two}"

    def _scaling_for(self, kept: bool, contracted: bool) -> Scaling:
        """The scaling for an operand that is ragged in these dims."""
        if self.scaling.block is None:
            return self.scaling
        first, last = self.scaling.block
        first = 1 if kept and first is not None else first
        return Scaling((first, None if kept and contracted else last), self.scaling.dtype)


Pair = tuple[Cast, Cast]
UNQUANTIZED: Pair = Cast(None), Cast(None)


def _no_key(*args: Any) -> NoReturn:
    Site("ragged.Recipe").fail(TypeError, "a sealed history is no random key.", "Read it as `recipe.history`.")


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
    - `dgrad`: those of the result's cotangent and of `w`; by default neither is quantised.
    - `wgrad`: those of `x` and of the result's cotangent; by default neither is quantised.
    - `history`: None; or `(3, length)` float32, for delayed scaling: the largest absolute values that `x`, `w` and the
      cotangent had in the last steps, newest first, 0 where there was none. Scales are those for the largest of them.
    - `name`: what tables call it.
    - `save`: what derivatives keep of `x`. `"quantized"`: what the wgrad multiplies, of 8 or 4 bits, and not `x`; or
      `"operands"`: `x`, as derivatives need that are differentiated in turn, by `jax.jacrev(jax.grad(f))`.

    In a product from the left, of uniform and ragged columns, `x` is the ragged operand and `w` the uniform one. In all
    others `x` is `lhs` and `w` is `rhs`, whatever they are.

    `Recipe.preset` makes the well-known ones:

    | name           | scales of `x`, gradient | of `w`    | gradient in | as in                                  |
    |----------------|-------------------------|-----------|-------------|----------------------------------------|
    | `"tensorwise"` | one                     | one       | e5m2        | torchao's tensorwise                   |
    | `"rowwise"`    | one a row, powers of 2  | the same  | e4m3        | torchao's rowwise                      |
    | `"blockwise"`  | 1 × 128                 | 128 × 128 | e4m3        | DeepSeek-V3 (arXiv:2412.19437)         |
    | `"mxfp8"`      | 1 × 32, e8m0            | the same  | e4m3        | OCP MX v1.0, NVIDIA (arXiv:2506.08027) |
    | `"nvfp4"`      | 1 × 16, e4m3 × one      | the same  | e2m1        | the format of NVIDIA (arXiv:2509.25149) |
    | `"delayed"`    | one, of past steps      | the same  | e5m2        | NVIDIA's Transformer Engine            |

    Activations and weights are e4m3, in `"nvfp4"` e2m1. A row runs along what is contracted; in a wgrad that are a
    group's tokens, whose blocks begin with each group.

    `"nvfp4"` is the number format alone. Of what the paper adds to train in it, there are no Hadamard transforms and no
    stochastic rounding, and weights have blocks of 1 × 16, not 16 × 16, unless a recipe of its own says so.

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
    save: str = eqx.field(static=True)

    def __init__(
        self,
        forward: Pair | Any,
        dgrad: Pair | Any = UNQUANTIZED,
        wgrad: Pair | Any = UNQUANTIZED,
        history: Any = None,
        *,
        name: str = "custom",
        save: str | Any = "quantized",
    ) -> None:
        self.forward, self.dgrad, self.wgrad = forward, dgrad, wgrad
        self.state, self.name, self.save = _sealed(history), name, save

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
        if self.save not in SAVES:
            mend = "Pass 'quantized', to keep less, or 'operands', to differentiate a derivative."
            Site("ragged.Recipe").fail(ValueError, f"`save` is {self.save!r}.", mend)
        for name in ("forward", "dgrad", "wgrad"):
            pair = getattr(self, name)
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, Cast) for each in pair)):
                mend = "It must be the `ragged.Cast`s of its two operands, a tuple."
                Site("ragged.Recipe").fail(TypeError, f"`{name}` is {pair!r}.", mend)
            delayed = Scaling(None), Scaling(None, jnp.float8_e8m0fnu)
            if self.state is not None and any(each.dtype and each.scaling not in delayed for each in pair):
                problem = f"`history` with a scaling of `{name}` other than 'tensor': {pair[0]} and {pair[1]}."
                mend = "Delayed scaling knows one largest value of each tensor."
                Site("ragged.Recipe").fail(ValueError, problem, mend)
        if is_arraylike(self.state):
            self._check_history()

    def _check_history(self) -> None:
        """Raises unless `history` is None or an array `(3, length)`, float32."""
        history = self.history
        if history is None:
            return
        if not is_arraylike(history) or history.dtype != jnp.float32:
            mend = "It must be a float32 array: `Recipe.preset('delayed').history`."
            Site("ragged.Recipe").fail(TypeError, f"`history` is {describe(history)}.", mend)
        if history.ndim != 2 or history.shape[0] != 3 or not history.shape[1]:
            mend = "It must be (3, length), a row each for `x`, `w` and the cotangent. One a call: map or scan over it."
            Site("ragged.Recipe").fail(ValueError, f"`history` is {describe(history)}.", mend)

    @classmethod
    def preset(
        cls,
        name: str | Any,
        *,
        gradients: Any = None,
        scales: Any = None,
        length: int | Any = 16,
        save: str | Any = "quantized",
    ) -> "Recipe":
        """A well-known recipe: `"tensorwise"`, `"rowwise"`, `"blockwise"`, `"mxfp8"`, `"nvfp4"` or `"delayed"`.

        `gradients`, `scales`: the dtypes of cotangents and of scales, if not the usual ones. With
        `scales="float8_e8m0fnu"`, those of `"blockwise"` are powers of two, which TPUs apply in half the time.
        `length`: of the history of `"delayed"`, in steps. `save`: as in a `Recipe`.
        """
        site = Site("ragged.Recipe.preset")
        if not is_count(length):
            site.fail(ValueError, f"`length` is {length!r}.", "It must be a positive int, in steps.")
        if not isinstance(name, str) or name not in PRESETS:
            mend = f"Pass one of {', '.join(map(repr, PRESETS))}, or build a `ragged.Recipe`."
            site.fail(ValueError, f"{name!r} is no recipe.", mend)
        dtype, activations, weights, power_of_two, usual = PRESETS[name]
        if scales is not None:
            activations, weights = (Scaling(Scaling.of(each).block, scales) for each in (activations, weights))
        x, w = (Cast(dtype, scaling, power_of_two) for scaling in (activations, weights))
        dy = Cast(usual if gradients is None else gradients, activations, power_of_two)
        history = jnp.zeros((3, length), jnp.float32) if name == "delayed" else None
        return cls((x, w), (dy, w), (x, dy), history, name=name, save=save)

    @classmethod
    def of(cls, recipe: "str | Recipe | Any", site: Site | None = None) -> "Recipe":
        """The preset of a name; a `Recipe` as it is. `site`: where an error is seen, if not here."""
        if isinstance(recipe, Recipe):
            return recipe
        if not isinstance(recipe, str) or recipe not in PRESETS:
            mend = f"Pass a `ragged.Recipe` or one of {', '.join(map(repr, PRESETS))}."
            error = ValueError if isinstance(recipe, str) else TypeError
            (site or Site("ragged.Recipe")).fail(error, f"{recipe!r} is no recipe.", mend)
        return cls.preset(recipe)


SAVES = ("quantized", "operands")

PRESETS: dict[str, tuple[str, Any, Any, bool, str]] = {
    "tensorwise": ("float8_e4m3fn", "tensor", "tensor", False, "float8_e5m2"),
    "rowwise": ("float8_e4m3fn", "row", "row", True, "float8_e4m3fn"),
    "blockwise": ("float8_e4m3fn", (1, 128), (128, 128), False, "float8_e4m3fn"),
    "mxfp8": ("float8_e4m3fn", "mx", "mx", True, "float8_e4m3fn"),
    "nvfp4": ("float4_e2m1fn", "nvfp4", "nvfp4", False, "float4_e2m1fn"),
    "delayed": ("float8_e4m3fn", "tensor", "tensor", False, "float8_e5m2"),
}
"""The dtype of `x` and `w`, the scaling of activations and gradients, of weights, whether scales are powers of two, the
gradients' dtype."""
