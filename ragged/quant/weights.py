"""`quantize_weights`: quantises weights once for several products with the same recipe.

forward   y = x w       contracts the first dim of w, and quantises w along it
dgrad     dx = dy wᵀ    contracts the last dim of w, and quantises w along it
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from ragged.core.errors import Site, describe
from ragged.core.formats import AnyArray
from ragged.product.operands import Call, Operands
from ragged.quant.quantize import check_floats
from ragged.quant.recipe import Cast, Recipe
from ragged.quant.training import as_operand, quantize_operand
from ragged.tensor.base import with_fields
from ragged.tensor.tensor import GroupedTensor


class QuantizedWeights(eqx.Module):
    """Weights with their quantised copies, built by `ragged.quantize_weights` for `ragged.matmul`.

    - `weights`: the weights as passed. The same field of a gradient holds the gradient of the weights.
    - `by_first`: `[g, last, first]`, quantised along the first dim for the forward product; or None.
    - `by_last`: `[g, first, last]`, quantised along the last dim for the dgrad; or None.
    - `casts`: the casts of `by_first` and `by_last`. Static. A copy is None if its cast doesn't quantise.
    """

    weights: GroupedTensor | Float[AnyArray, "*g first last"]
    by_first: GroupedTensor | None
    by_last: GroupedTensor | None
    casts: tuple[Cast, Cast] = eqx.field(static=True)

    @property
    def mT(self) -> "QuantizedWeights":
        """The quantised weights for the transposed `weights`."""
        first, last = self.casts
        return QuantizedWeights(self.weights.mT, self.by_last, self.by_first, (last, first))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `weights`."""
        return self.weights.shape

    @property
    def dtype(self) -> Any:
        """Dtype of `weights`."""
        return self.weights.dtype

    def __repr__(self) -> str:
        return f"QuantizedWeights({describe(self.weights)})"


def quantize_weights(w: GroupedTensor | AnyArray, recipe: Recipe | str) -> QuantizedWeights:
    """Quantises weights once for several forward products and dgrads of a recipe, such as those of microbatches.

    `matmul(x, quantize_weights(w, recipe), recipe=recipe)` equals `matmul(x, w, recipe=recipe)` bit for bit, and so do
    its gradients; the gradient of `w` is straight-through. Both orientations are stored, in addition to `w`.

    **Arguments:**

    - `w`: `[g, k, n]`, or `[k, n]` for all groups; an array or a uniform `GroupedTensor`, of floats of 16 bits or more.
      For a product with the weights as `lhs`, `matmul(w, x)`, pass `quantize_weights(w.mT, recipe).mT`.
    - `recipe`: a `ragged.Recipe` or the name of a preset, without a history.

    **Returns:** a `QuantizedWeights`, a pytree. For a separate gradient per microbatch, differentiate with respect to
    it: `eqx.filter_grad(loss)(quantized).weights`. The other fields of that gradient are zero.

    **Raises:** `TypeError` unless `w` is an array of floats; `ValueError` if it is ragged, already quantised or of
    another rank; `NotImplementedError` for delayed scaling. `matmul` raises a `ValueError` if its recipe has other
    casts.

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
        problem = "delayed scaling takes scales from the history, which belongs to a single product."
        site.fail(NotImplementedError, problem, "Pass the unquantised weights to `matmul`.")
    data = w.data if isinstance(w, GroupedTensor) else w
    if isinstance(w, GroupedTensor) and w.packed_axis is not None:
        site.fail(ValueError, "`w` is ragged.", "Weights are uniform: pass [g, k, n], one matrix per group.")
    if isinstance(w, GroupedTensor) and w.is_quantized:
        site.fail(ValueError, "`w` is already quantised.", "Pass `w.dequantize()`, or pass `w` itself to `matmul`.")
    check_floats(site, "w", data)
    if data.ndim not in (2, 3):
        site.fail(ValueError, f"`w` has {data.ndim} dims.", "Pass [g, k, n], or [k, n] for all groups.")
    data = lax.stop_gradient(jnp.asarray(data))
    data = data if data.ndim == 3 else data[None]
    casts = recipe.forward[1], recipe.dgrad[1]
    by_first = _along_last(data.mT, casts[0])
    same_cast = replace(casts[1], scaling=casts[0].scaling) == casts[0] and casts[1].scaling.mT == casts[0].scaling
    if by_first is not None and same_cast and not casts[0].has_array_of_scales:
        # If `transposed` were True, `as_operand` would transpose the scales, but not the data.
        return QuantizedWeights(w, by_first, with_fields(by_first.mT, transposed=False), casts)
    return QuantizedWeights(w, by_first, _along_last(data, casts[1]), casts)


def _along_last(data: Array, cast: Cast) -> GroupedTensor | None:
    """`[g, first, last]`, quantised along the last dim; None if the cast doesn't quantise."""
    return None if cast.dtype is None else quantize_operand(GroupedTensor(data), cast, None)


def _listed(casts: Iterable[Cast]) -> str:
    return " and ".join(map(str, casts))


def unquantized(x: Any) -> Any:
    """`x.weights` for `QuantizedWeights`; any other `x` unchanged."""
    return x.weights if isinstance(x, QuantizedWeights) else x


def with_quantized_weights(recipe: Recipe | None, operands: Operands, call: Call, lhs: Any, rhs: Any) -> Operands:
    """`operands`, with the quantised copies of `lhs` and of `rhs` if these are `QuantizedWeights`.

    Raises if they were quantised for a different recipe.
    """
    for i, (name, x) in enumerate((("lhs", lhs), ("rhs", rhs))):
        if not isinstance(x, QuantizedWeights):
            continue
        site = Site("ragged.matmul(lhs, rhs)", {"lhs": lhs, "rhs": rhs})
        if recipe is None:
            hint = f"Pass the `recipe` that `{name}` was quantised for, or `{name}.weights`."
            site.fail(ValueError, f"`{name}` is quantised for a recipe, but `recipe` is None.", hint)
        if recipe.history is not None:
            hint = f"Pass `{name}.weights`."
            site.fail(ValueError, f"`{name}` is pre-quantised, but `recipe` has delayed scaling.", hint)
        other = getattr(operands, ("rhs", "lhs")[i]).data
        if x.weights.ndim == 3 and other.ndim == 2 and not operands.sizes:
            hint = f"Pass `{name}.weights`, or give the matrix a group axis."
            problem = f"`{name}` is pre-quantised, but the other operand is one matrix for all groups."
            site.fail(NotImplementedError, problem, hint)
        along = {"lhs": "mk", "rhs": "kn"}[name]  # Letters of the first and the last dim.
        derivative = recipe.derivative(("rhs", "lhs")[i])
        expected = [(recipe if letter == call.product.contracted else derivative).forward[i] for letter in along]
        if expected != list(x.casts):
            code = f"ragged.quantize_weights({name}.weights, recipe)"
            code = code if name == "rhs" else f"ragged.quantize_weights({name}.weights.mT, recipe).mT"
            hint = f"Quantise the weights for this recipe: `{code}`."
            problem = f"`{name}` has the casts {_listed(x.casts)}, but `recipe` has {_listed(expected)}."
            site.fail(ValueError, problem, hint)
        both = zip(along, (x.by_first, x.by_last), strict=True)
        found = {letter: as_operand(q) for letter, q in both if q is not None}
        operands = operands._replace(**{name: getattr(operands, name)._replace(quantized=found)})
    return operands
