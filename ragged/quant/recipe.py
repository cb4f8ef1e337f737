"""`Recipe`: how the forward product, dgrad and wgrad of training are quantised.

    forward   y = x w      dgrad   dx = dy wᵀ      wgrad   dw = xᵀ dy

Each of the three products quantises both of its operands along the contracted dim.
"""

from dataclasses import InitVar, dataclass, field, fields
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Float

from ragged.core.errors import Site, check_flag, describe, is_arraylike, is_count
from ragged.core.formats import LARGEST
from ragged.core.scaling import NAMED, Scaling
from ragged.quant.history import History
from ragged.quant.quantize import check_range, dtype_name


@dataclass(frozen=True)
class Cast:
    """How one operand of one product is quantised.

    - `dtype`: float8_e4m3fn, float8_e5m2, float4_e2m1fn, int8 or int4; None leaves the operand unquantised.
    - `scaling`: as for `ragged.quantize`, for the operand with the contracted dim last. `"row"` is one scale per row of
      contracted elements, `(1, 128)` one per 128 elements of a row, and `(128, 128)` one per 128 elements of 128 rows.
    - `power_of_two`: rounds scales up to powers of two.
    - `scale`: a given scale, such as a calibrated one, as for `ragged.quantize`: a number for all blocks, or a NumPy
      array that broadcasts to the scales. The largest values of the operand are then not computed. The scale is a
      constant of the program: for a traced one, pass `ragged.quantize(x, ..., scale=scale)` to the product.
    - `amax`: an alternative to `scale`: the absolute value that is mapped to the largest value of `dtype`, or, with
      float8_e4m3fn scales, to the largest value of `dtype` times the largest scale.

    Blocks along a ragged contracted dim, such as the tokens of a wgrad, begin at each group's first element. Along a
    ragged dim that isn't contracted, an extent above 1 becomes 1; if both dims are ragged, each row of contracted
    elements is one block (or each group, if the block has all rows).

    **Raises:** as `ragged.quantize`, and `ValueError` for one scale per element of the contracted dim, which tensor
    cores can't apply.
    """

    dtype: Any
    scaling: Any = NAMED["tensor"]
    power_of_two: bool = False
    scale: Any = field(default=None, kw_only=True)
    amax: InitVar[Any] = field(default=None, kw_only=True)

    def __post_init__(self, amax: Any) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype, "ragged.Cast"))
        scaling = Scaling.of(self.scaling)
        if scaling.block is not None and scaling.block[1] == 1:
            problem = f"the scaling {scaling} has one scale per element of the contracted dim."
            hint = "A block is (other dim, contracted dim): pass `(1, None)` or `'row'` for one scale per row. In a "
            hint += "wgrad, the rows are features, and tokens are contracted."
            Site("ragged.Cast").fail(ValueError, problem, hint)
        check_flag(Site("ragged.Cast"), "power_of_two", self.power_of_two)
        object.__setattr__(self, "scaling", scaling)
        if self.scale is not None or amax is not None:
            object.__setattr__(self, "scale", _given_scale(self, amax))
        object.__setattr__(self, "power_of_two", self.power_of_two or scaling.dtype == jnp.float8_e8m0fnu)

    def __str__(self) -> str:
        text = f"{self.dtype or 'no dtype'} by {self.scaling}{' with powers of two' * self.power_of_two}"
        if self.scale is None:
            return text
        return f"{text} with {'given scales' if self.has_array_of_scales else f'the scale {self.scale}'}"

    @property
    def given_scale(self) -> np.ndarray | None:
        """The given scale as an array, as `quantize` takes it."""
        return None if self.scale is None else np.array(self.scale, np.float32)

    @property
    def has_array_of_scales(self) -> bool:
        """Whether the given scales are an array, and not one number for all blocks."""
        return isinstance(self.scale, tuple)


def _given_scale(cast: Cast, amax: Any) -> Any:
    """The given scale of a cast: a float, or nested tuples of floats, which can be hashed."""
    site, given = Site("ragged.Cast"), {"scale": cast.scale, "amax": amax}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1 or cast.dtype is None:
        problem = f"{' and '.join(f'`{name}`' for name in names)} {'are' if len(names) > 1 else 'is'} given"
        problem += "." if len(names) > 1 else ", but `dtype` is None."
        site.fail(ValueError, problem, "Pass a `dtype`, and one of `scale` and `amax`.")
    value = given[names[0]]
    if isinstance(value, tuple):  # `dataclasses.replace` passes the nested tuples of a cast
        value = np.array(value)
    if isinstance(value, Tracer):
        hint = "Quantise the operand before the product: `ragged.quantize` takes a traced scale."
        site.fail(TypeError, f"`{names[0]}` is traced, but casts are static.", hint)
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        site.fail(TypeError, f"`{names[0]}` is {describe(value)}.", "Pass a number or an array of numbers.")
    if isinstance(value, bool) or not array.size:
        site.fail(ValueError, f"`{names[0]}` is {describe(value)}.", "Pass a number or an array of numbers.")
    if names == ["amax"]:
        array = array / (LARGEST[cast.dtype] * (LARGEST["float8_e4m3fn"] if cast.scaling.has_tensor_scale else 1))
    check_range(site.also(**{names[0]: value}), names[0], array, cast.scaling)

    def nested(x: Any) -> Any:
        return tuple(map(nested, x)) if isinstance(x, list) else x

    return nested(array.tolist())


Pair = tuple[Cast, Cast]
UNQUANTIZED: Pair = Cast(None), Cast(None)


class Recipe(eqx.Module):
    """How `matmul(x, w, recipe=recipe)` quantises: a pytree whose only leaf is the history of delayed scaling.

    - `forward`: the casts of `x` and of `w`.
    - `dgrad`: the casts of the result's cotangent and of `w`; by default neither is quantised.
    - `wgrad`: the casts of `x` and of the result's cotangent; by default neither is quantised.
    - `history`: None; or `(3, length)` float32, for delayed scaling: the largest absolute values of `x`, `w` and the
      cotangent in the last steps, newest first, and 0 for missing steps. Scales are computed from the largest of them.
    - `name`: the recipe's name in tables.
    - `save`: the form in which `x` is saved for the backward pass. `"quantized"`: only a copy quantised for the wgrad,
      in 8 or 4 bits. `"operands"`: `x` itself, which second derivatives need, as in `jax.jacrev(jax.grad(f))`.

    If `lhs` is uniform and `rhs` has ragged columns, `x` is `rhs` and `w` is `lhs`. In all other products, `x` is `lhs`
    and `w` is `rhs`. If all groups share one matrix, they count as one group, for scales too.

    `Recipe.preset` builds these recipes:

    | name           | scales of `x`, gradient  | of `w`    | gradient in | source                                 |
    |----------------|--------------------------|-----------|-------------|----------------------------------------|
    | `"tensorwise"` | one                      | one       | e5m2        | torchao's tensorwise                   |
    | `"rowwise"`    | one per row, powers of 2 | the same  | e4m3        | torchao's rowwise                      |
    | `"blockwise"`  | 1 × 128                  | 128 × 128 | e4m3        | DeepSeek-V3 (arXiv:2412.19437)         |
    | `"mxfp8"`      | 1 × 32, e8m0             | the same  | e4m3        | OCP MX v1.0, NVIDIA (arXiv:2506.08027) |
    | `"nvfp4"`      | 1 × 16 e4m3, and one     | the same  | e2m1        | NVIDIA's format (arXiv:2509.25149)     |
    | `"delayed"`    | one, from past steps     | the same  | e5m2        | NVIDIA's Transformer Engine            |

    Activations and weights are e4m3, or e2m1 with `"nvfp4"`. A row runs along the contracted dim: in a wgrad, along a
    group's tokens. `"nvfp4"` is only the number format, without the paper's Hadamard transforms, stochastic rounding
    and 16 × 16 blocks of weights.

    **Delayed scaling** carries its state explicitly: the "gradient" with respect to the recipe is the next recipe. The
    first step has no history and uses the largest values of the current operands.

        grads, recipe = jax.grad(loss, argnums=(0, 1))(params, recipe.unsealed())
        recipe = recipe.sealed()

    A new recipe is sealed: arithmetic on its leaf raises an error, and `eqx.is_inexact_array` doesn't select it. So no
    optimiser can change the history. An `unsealed` recipe holds floats, for `jax.grad` and for checkpoints. `matmul`
    accepts both. Sealing a history in a function that is differentiated by it raises a `TypeError`: its next history
    would be lost.

    If several products share a recipe, or a product is computed several times, as in a loop over microbatches, the next
    history has the largest values of all of them. If the loss doesn't depend on a product, its next history is zero, as
    if there were no past steps. Values above the largest value in the history saturate. `recipe="delayed"` stands for a
    recipe with an empty history.
    """

    forward: Pair = eqx.field(static=True)
    dgrad: Pair = eqx.field(static=True)
    wgrad: Pair = eqx.field(static=True)
    state: History | None  # the pytree node that holds the array `history`, sealed or unsealed
    name: str = eqx.field(static=True)
    save: str = eqx.field(static=True)

    def __init__(
        self,
        forward: Pair,
        dgrad: Pair = UNQUANTIZED,
        wgrad: Pair = UNQUANTIZED,
        history: Any = None,
        *,
        state: History | None = None,
        name: str = "custom",
        save: str = "quantized",
    ) -> None:
        self.forward, self.dgrad, self.wgrad = forward, dgrad, wgrad
        # `dataclasses.replace` passes the `state` of the recipe that it copies.
        self.state = state if history is None else History(history).sealed()
        self.name, self.save = name, save

    @property
    def history(self) -> Float[Array, "*stacked 3 length"] | None:
        """Largest absolute values of past steps, float32; None without delayed scaling."""
        return None if self.state is None else self.state.floats

    def unsealed(self) -> "Recipe":
        """The recipe with its history as floats, for `jax.grad` and for checkpoints."""
        return self._with_state(None if self.state is None else self.state.unsealed())

    def sealed(self) -> "Recipe":
        """The recipe with its history in a dtype that rejects arithmetic."""
        return self._with_state(None if self.state is None else self.state.sealed())

    @property
    def transposed(self) -> "Recipe":
        """The recipe of the transposed product, `wᵀ xᵀ`."""
        casts = _swapped(self.forward), _swapped(self.wgrad), _swapped(self.dgrad)
        return self._derived(casts, (1, 0, 2), self.save)

    def derivative(self, wrt: str) -> "Recipe":
        """The recipe of the product that computes the cotangent of `wrt`, `"lhs"` or `"rhs"`.

        The result's cotangent takes the place of `wrt`. `save` is `"operands"`, so that the product can be
        differentiated again.
        """
        if wrt == "lhs":
            return self._derived((self.dgrad, self.forward, _swapped(self.wgrad)), (2, 1, 0), "operands")
        return self._derived((self.wgrad, _swapped(self.dgrad), self.forward), (0, 2, 1), "operands")

    def _derived(self, casts: tuple[Pair, Pair, Pair], rows: tuple[int, int, int], save: str) -> "Recipe":
        """A recipe with other casts of forward, dgrad and wgrad, and with the rows of the history in another order.

        Row `i` of the new history is row `rows[i]` of this one. The history stays sealed or unsealed.
        """
        return self._with_state(None if self.state is None else self.state.rows(rows), *casts, save=save)

    def _with_state(self, state: History | None, *casts: Pair, save: str | None = None) -> "Recipe":
        """A copy with the history `state`, sealed or not. (`__init__` would seal it.)"""
        new = object.__new__(Recipe)
        casts = casts or (self.forward, self.dgrad, self.wgrad)
        for each, value in zip(fields(Recipe), (*casts, state, self.name, save or self.save), strict=True):
            object.__setattr__(new, each.name, value)
        return new

    def __check_init__(self) -> None:
        if self.save not in SAVES:
            hint = "Pass 'quantized' to use less memory, or 'operands' to differentiate a derivative."
            Site("ragged.Recipe").fail(ValueError, f"`save` is {self.save!r}.", hint)
        for name in ("forward", "dgrad", "wgrad"):
            pair = getattr(self, name)
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, Cast) for each in pair)):
                hint = "It must be a tuple of two `ragged.Cast`s, one for each operand."
                Site("ragged.Recipe").fail(TypeError, f"`{name}` is {pair!r}.", hint)
            if self.state is not None and any(each.scale is not None for each in pair):
                hint = "Scales are either given or of past steps: leave one of the two out."
                Site("ragged.Recipe").fail(ValueError, f"`history` is given, but `{name}` has given scales.", hint)
            allowed = Scaling(None), Scaling(None, jnp.float8_e8m0fnu)
            if self.state is not None and any(each.dtype and each.scaling not in allowed for each in pair):
                problem = f"`history` needs the scaling 'tensor', but `{name}` has {pair[0]} and {pair[1]}."
                hint = "The history of delayed scaling has one largest value per tensor and step."
                Site("ragged.Recipe").fail(ValueError, problem, hint)
        if self.state is not None and is_arraylike(self.state.leaf):
            check_history(self)

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        gradients: Any = None,
        scales: Any = None,
        length: int | None = None,
        save: str = "quantized",
    ) -> "Recipe":
        """Builds a recipe by name: see `Recipe`.

        `gradients`, `scales`: dtypes of the cotangents (see `Cast`) and scales (see `Scaling`); None for the preset's.
        With `scales="float8_e8m0fnu"`, scales of `"blockwise"` are powers of two, which TPUs apply in half the time.
        `length`: number of steps in the history of `"delayed"`, 16 by default. `save`: as in `Recipe`.

        **Raises:** `ValueError` for an unknown name, an invalid `length`, and a `length` without a history.
        """
        site = Site("ragged.Recipe.preset")
        if length is not None and not is_count(length):
            site.fail(ValueError, f"`length` is {length!r}.", "It must be a positive int, a number of steps.")
        if not isinstance(name, str) or name not in PRESETS:
            hint = f"Pass one of {', '.join(map(repr, PRESETS))}, or build a `ragged.Recipe`."
            site.fail(ValueError, f"{name!r} is not a recipe.", hint)
        if length is not None and name != "delayed":
            site.fail(ValueError, f"`length` is {length!r}, but {name!r} has no history.", "Leave it out.")
        dtype, activations, weights, power_of_two, gradient_dtype = PRESETS[name]
        if scales is not None:
            activations, weights = (Scaling(Scaling.of(each).block, scales) for each in (activations, weights))
        x, w = (Cast(dtype, scaling, power_of_two) for scaling in (activations, weights))
        dy = Cast(gradient_dtype if gradients is None else gradients, activations, power_of_two)
        history = jnp.zeros((3, length or 16), jnp.float32) if name == "delayed" else None
        return cls((x, w), (dy, w), (x, dy), history, name=name, save=save)

    @classmethod
    def of(cls, recipe: "str | Recipe", site: Site | None = None) -> "Recipe":
        """`recipe` itself, or the preset of this name. `site`: the public call that an error names."""
        if isinstance(recipe, Recipe):
            return recipe
        if not isinstance(recipe, str) or recipe not in PRESETS:
            hint = f"Pass a `ragged.Recipe` or one of {', '.join(map(repr, PRESETS))}."
            error = ValueError if isinstance(recipe, str) else TypeError
            (site or Site("ragged.Recipe")).fail(error, f"{recipe!r} is not a recipe.", hint)
        return cls.preset(recipe)


def _swapped(pair: Pair) -> Pair:
    return pair[1], pair[0]


SAVES = ("quantized", "operands")

PRESETS: dict[str, tuple[str, Any, Any, bool, str]] = {
    "tensorwise": ("float8_e4m3fn", "tensor", "tensor", False, "float8_e5m2"),
    "rowwise": ("float8_e4m3fn", "row", "row", True, "float8_e4m3fn"),
    "blockwise": ("float8_e4m3fn", (1, 128), (128, 128), False, "float8_e4m3fn"),
    "mxfp8": ("float8_e4m3fn", "mx", "mx", True, "float8_e4m3fn"),
    "nvfp4": ("float4_e2m1fn", "nvfp4", "nvfp4", False, "float4_e2m1fn"),
    "delayed": ("float8_e4m3fn", "tensor", "tensor", False, "float8_e5m2"),
}
"""`(dtype, activations, weights, power_of_two, gradient_dtype)` of each preset.

`dtype` is for `x` and `w`; `activations` is the scaling of `x` and of gradients, `weights` the scaling of `w`.
"""


def scaling_for(cast: Cast, is_first_ragged: bool, is_last_ragged: bool) -> Scaling:
    """The cast's scaling for an operand whose last dim is contracted, adapted to its ragged dims as `Cast` says."""
    if cast.scaling.block is None:
        return cast.scaling
    first, last = cast.scaling.block
    first = 1 if is_first_ragged and first is not None else first
    return Scaling((first, None if is_first_ragged and is_last_ragged else last), cast.scaling.dtype)


def check_history(recipe: Recipe) -> None:
    """Raises unless the recipe has no history, or a float32 one of the shape `(3, length)`."""
    history = recipe.history
    if history is None:
        return
    if not is_arraylike(history) or history.dtype != jnp.float32:
        hint = "It must be a float32 array: `ragged.Recipe.preset('delayed').history`."
        Site("ragged.Recipe").fail(TypeError, f"`history` is {describe(history)}.", hint)
    if history.ndim != 2 or history.shape[0] != 3 or not history.shape[1]:
        hint = "It must be (3, length), one row each for `x`, `w` and the cotangent. "
        hint += "Map or scan over a stack of histories: each call takes one."
        Site("ragged.Recipe").fail(ValueError, f"`history` is {describe(history)}.", hint)
