"""`quantize_weights`: what a recipe makes of weights, once for all the products that they are in.

forward   y = x w       quantises w along its first dim, which is contracted
dgrad     dx = dy wᵀ    along its last
"""

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from ragged._errors import Site, describe
from ragged.product.operands import Call, Operands
from ragged.quant.quantize import check_floats
from ragged.quant.recipe import Cast, Recipe
from ragged.quant.training import Made, casts_of, quantize_operand
from ragged.tensor.tensor import GroupedTensor


class QuantizedWeights(eqx.Module):
    """Weights with what a recipe makes of them. Made by `ragged.quantize_weights`, taken by `ragged.matmul`.

    - `weights`: as they were given, and what a gradient is of.
    - `by_first`: `[g, last, first]`, quantised along the first dim of each group; or None, if the recipe leaves it.
    - `by_last`: `[g, first, last]`, quantised along the last dim; or None.
    - `casts`: the casts of the two. Static.
    """

    weights: GroupedTensor | Float[Array, "*g first last"] | Any
    by_first: GroupedTensor | Any
    by_last: GroupedTensor | Any
    casts: tuple[Cast, Cast] | Any = eqx.field(static=True)

    @property
    def mT(self) -> "QuantizedWeights":
        """Those of the transposed weights."""
        return QuantizedWeights(self.weights.mT, self.by_last, self.by_first, self.casts[::-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The weights'."""
        return self.weights.shape

    @property
    def dtype(self) -> Any:
        """The weights'."""
        return self.weights.dtype

    def __repr__(self) -> str:
        return f"QuantizedWeights({describe(self.weights)})"


def quantize_weights(w: GroupedTensor | Array | Any, recipe: Recipe | str | Any) -> QuantizedWeights:
    """Quantises weights for a recipe's forward products and dgrads: once for many of them, as for microbatches.

    `matmul(x, quantize_weights(w, recipe), recipe=recipe)` is `matmul(x, w, recipe=recipe)`, bit for bit, and has its
    gradients: that of `w` is straight-through. But the weights aren't quantised anew by each product.

    The weights are read once if the recipe's two casts of them make the same numbers (as with `"tensorwise"` and
    `"blockwise"`, whose blocks are squares), else twice. In memory are both orientations, next to `w`.

    **Arguments:**

    - `w`: `[g, k, n]`, or `[k, n]` for all groups; an array or a uniform `GroupedTensor`, of floats of 16 bits or more.
      For a product from the left, `matmul(w, x)`, take `quantize_weights(w.mT, recipe).mT`.
    - `recipe`: a `ragged.Recipe` or the name of a preset, without a history.

    **Returns:** a `QuantizedWeights`, a pytree. Where each microbatch has a gradient of its own, take it by these:
    `eqx.filter_grad(loss)(quantized).weights`. All else in that gradient is zero.

    **Raises:** `TypeError` for what is no array of floats, `ValueError` if it is ragged or quantised already or for its
    rank, `NotImplementedError` for delayed scaling, whose scales are of each step. `matmul` raises a `ValueError` for
    other casts than its recipe has.

    !!! example
        ```python
        import jax, jax.numpy as jnp
        import ragged
        w, sizes = jax.random.normal(jax.random.key(0), (2, 32, 16)), jnp.array([5, 3], jnp.int32)
        batches = jax.random.normal(jax.random.key(1), (4, 8, 32))  # four microbatches

        def loss(w):
            quantized = ragged.quantize_weights(w, "mxfp8")
            def add(total, x):
                y = ragged.matmul(ragged.GroupedTensor(x, sizes), quantized, recipe="mxfp8")
                return total + jnp.sum(y.data**2), None
            return jax.lax.scan(add, 0.0, batches)[0]

        assert jax.grad(loss)(w).shape == w.shape
        ```
    """
    site = Site("ragged.quantize_weights", {"w": w})
    recipe = Recipe.of(recipe, site)
    if recipe.history is not None:
        problem = "delayed scaling takes scales from the history, which belongs to one product."
        site.fail(NotImplementedError, problem, "Pass the weights themselves to `matmul`.")
    data = w.data if isinstance(w, GroupedTensor) else w
    if isinstance(w, GroupedTensor) and w.packed_axis is not None:
        site.fail(ValueError, "weights are uniform.", "Pass `[g, k, n]`, one matrix a group.")
    if isinstance(w, GroupedTensor) and w.is_quantized:
        site.fail(ValueError, "`w` is quantised already.", "Take `w.dequantize()`, or give it to `matmul` as it is.")
    check_floats(site, "w", data)
    if data.ndim not in (2, 3):
        site.fail(ValueError, f"`w` has {data.ndim} dims.", "Pass `[g, k, n]`, or `[k, n]` for all groups.")
    data = lax.stop_gradient(jnp.asarray(data))
    data = data if data.ndim == 3 else data[None]
    casts = recipe.forward[1], recipe.dgrad[1]
    by_first = _along_last(data.mT, casts[0])
    same = (casts[1].dtype, casts[1].scaling.mT, casts[1].power_of_two)
    if by_first is not None and same == (casts[0].dtype, casts[0].scaling, casts[0].power_of_two):
        return QuantizedWeights(w, by_first, by_first.mT._with(transposed=False), casts)
    return QuantizedWeights(w, by_first, _along_last(data, casts[1]), casts)


def _along_last(data: Array, how: Cast) -> GroupedTensor | None:
    return None if how.dtype is None else quantize_operand(GroupedTensor(data), how, None)


def _listed(casts: Iterable[Cast]) -> str:
    return " and ".join(map(str, casts))


def unquantized(x: Any) -> Any:
    """The weights of `QuantizedWeights`; anything else as it is."""
    return x.weights if isinstance(x, QuantizedWeights) else x


def made_for(recipe: Recipe | None, operands: Operands, call: Call, lhs: Any, rhs: Any) -> Made:
    """What of a product's operands is quantised already. Raises unless it is as the recipe would have it."""
    made, product = {}, call.product
    for i, (name, x) in enumerate((("lhs", lhs), ("rhs", rhs))):
        if not isinstance(x, QuantizedWeights):
            continue
        site = Site("ragged.matmul(lhs, rhs)", {"lhs": lhs, "rhs": rhs})
        if recipe is None:
            mend = f"Pass the `recipe` that they were quantised for, or `{name}.weights`."
            site.fail(ValueError, f"`{name}` is quantised for a recipe, and there is none.", mend)
        if recipe.history is not None:
            mend = f"Pass `{name}.weights`."
            site.fail(ValueError, f"`{name}` is quantised, and `recipe` has delayed scaling.", mend)
        other = getattr(operands, ("rhs", "lhs")[i]).data
        if x.weights.ndim == 3 and other.ndim == 2 and not operands.sizes:
            mend = f"Pass `{name}.weights`, or give the matrix a group axis."
            site.fail(NotImplementedError, f"`{name}` is quantised, next to a matrix that all its groups share.", mend)
        casts, _ = casts_of(recipe, call)
        along = {"lhs": "mk", "rhs": "kn"}[name]  # letters of its first and last dim
        of_derivative = casts.derivative(("rhs", "lhs")[i])
        want = [(casts if letter == product.contracted else of_derivative).forward[i] for letter in along]
        if want != list(x.casts):
            mend = "Quantise them for this recipe: `quantize_weights(w, recipe)`; "
            mend += "for a product from the left, `quantize_weights(w.mT, recipe).mT`."
            site.fail(ValueError, f"`{name}` has the casts {_listed(x.casts)}, and `recipe` has {_listed(want)}.", mend)
        found = zip(along, (x.by_first, x.by_last), strict=True)
        made[name] = {letter: q for letter, q in found if q is not None}
    return made
