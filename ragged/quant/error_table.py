"""`error_table`: what each recipe costs in accuracy, for one product and its two derivatives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from ragged._errors import Site, is_concrete
from ragged._matmul import product_of
from ragged.product.operands import Call, Epilogue, Operand, Operands
from ragged.product.primitive import bind, derivative
from ragged.product.rows import dispatched
from ragged.product.shared import folded
from ragged.quant.formats import LARGEST
from ragged.quant.recipe import PRESETS, Cast, Pair, Recipe
from ragged.quant.training import as_tensor, casts_of, past_of, quantize_operand
from ragged.quant.weights import unquantized
from ragged.tensor.tensor import GroupedTensor

PRODUCTS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class ErrorTable:
    """Errors of recipes: arrays of one row a recipe and one column for each of forward, dgrad and wgrad. Prints as a
    table.

    - `recipes`: their names.
    - `relative_error`: ‖quantised - exact‖ / ‖exact‖, Frobenius norms over all groups; infinite if a group of either
      isn't finite.
    - `sqnr`: the signal-to-quantisation-noise ratio in decibels, -20 log₁₀ of the relative error.
    - `underflow`: percent of the operands' elements that aren't zero and become zero.
    - `overflow`: percent of the operands' elements that lie beyond what their scale can hold, and saturate.
    - `worst_group`: the group with the lowest SQNR; -1 where no group has a signal.
    - `group_sqnr`: each group's SQNR; -inf where its exact or its quantised product isn't finite; NaN where its exact
      product is zero (or empty).
    """

    recipes: tuple[str, ...]
    relative_error: Float[np.ndarray, "recipes products"]
    sqnr: Float[np.ndarray, "recipes products"]
    underflow: Float[np.ndarray, "recipes products"]
    overflow: Float[np.ndarray, "recipes products"]
    worst_group: Int[np.ndarray, "recipes products"]
    group_sqnr: Float[np.ndarray, "recipes products groups"]

    def __str__(self) -> str:
        width = max(len("recipe"), *map(len, self.recipes))
        lines = [f"{'recipe':<{width}}  product  relative error  SQNR (dB)  underflow %  overflow %  worst group (dB)"]
        for i, recipe in enumerate(self.recipes):
            for j, product in enumerate(PRODUCTS):
                worst = int(self.worst_group[i, j])
                group = f"{worst} ({self.group_sqnr[i, j, worst]:.1f})" if worst >= 0 else "none"
                lines.append(
                    f"{'' if j else recipe:<{width}}  {product:<7}  {self.relative_error[i, j]:14.2e}"
                    f"  {self.sqnr[i, j]:9.1f}  {self.underflow[i, j]:11.3f}  {self.overflow[i, j]:10.3f}  {group:>16}"
                )
        return "\n".join(lines)

    def plot(self, product: str = "forward", ax: Any = None) -> Any:
        """Draws each recipe's SQNR in each group as a heat map, and returns the matplotlib axes.

        `product`: `"forward"`, `"dgrad"` or `"wgrad"`. `ax`: where to draw; new axes by default. Needs matplotlib.
        """
        if product not in PRODUCTS:
            Site("ErrorTable.plot").fail(ValueError, f"{product!r} is no product.", f"Pass one of {PRODUCTS}.")
        try:
            from matplotlib import pyplot
        except ImportError:
            Site("ErrorTable.plot").fail(ImportError, "it needs matplotlib.", "Install it: `pip install matplotlib`.")
        values = self.group_sqnr[:, PRODUCTS.index(product)]
        # A group of one row may be all but exact. Colours are for the others: three deviations about the median.
        finite = values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)
        spread = 4.5 * np.median(np.abs(finite - np.median(finite))) or np.inf
        low, high = np.clip([finite.min(), finite.max()], np.median(finite) - spread, np.median(finite) + spread)
        if ax is None:
            size = min(2 + 0.5 * values.shape[1], 16), 1.4 + 0.4 * len(values)
            ax = pyplot.subplots(figsize=size, layout="constrained")[1]
        colours = pyplot.get_cmap("viridis").with_extremes(under="tab:red", over="gold", bad="white")
        shown = np.nan_to_num(values, nan=np.nan, neginf=low - 1, posinf=high + 1)
        image = ax.imshow(shown, aspect="auto", cmap=colours, vmin=low, vmax=high)
        ax.set(xlabel="group", title=f"{product}: SQNR (dB)")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_yticks(range(len(self.recipes)), self.recipes)
        below, above = (values < low).any(), (values > high).any()
        extend = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
        ax.figure.colorbar(image, ax=ax, extend=extend[bool(below), bool(above)])
        return ax


def error_table(
    x: GroupedTensor | Array | Any,
    w: GroupedTensor | Array | Any,
    recipes: Sequence[str | Recipe] | Any = tuple(PRESETS),
    *,
    dy: GroupedTensor | Array | Any = None,
) -> ErrorTable:
    """Compares recipes on `matmul(x, w)` and its derivatives with the exact products, in float32.

    **Arguments:**

    - `x`, `w`: as for `matmul`. If all groups share a matrix, they count as one.
    - `recipes`: names of presets, or `ragged.Recipe`s.
    - `dy`: the result's cotangent, a tensor like the result (checked as `matmul`'s `existing_out`); standard normal
      noise by default.

    **Returns:** an `ErrorTable`, of NumPy arrays. Needs concrete arrays.

    **Raises:** what `matmul` does, also for a `dy` that isn't like the result; `ValueError` without recipes,
    `TypeError` where values aren't known.

    !!! example
        ```python
        import jax, jax.numpy as jnp
        import ragged
        x = ragged.GroupedTensor(
            jax.random.normal(jax.random.key(0), (256, 512)), first_dims=jnp.array([100, 0, 156], jnp.int32)
        )
        w = jax.random.normal(jax.random.key(1), (3, 512, 64))
        table = ragged.error_table(x, w, recipes=["tensorwise", "blockwise"])
        print(table)
        assert table.sqnr.min() > 20
        ```
    """
    site, x, w = Site("ragged.error_table", {"x": x, "w": w}), unquantized(x), unquantized(w)
    if isinstance(recipes, str | Recipe):
        recipes = [recipes]
    if not isinstance(recipes, Sequence) or not recipes:
        site.fail(ValueError, f"`recipes` is {recipes!r}.", "Pass at least one: `['tensorwise']`.")
    recipes = [Recipe.of(each, site) for each in recipes]
    if not is_concrete(*(leaf for leaf in jax.tree.leaves((x, w, dy)))):
        problem = "it measures values, which aren't known here."
        site.fail(TypeError, problem, "Pass arrays, outside of `jit`.")
    if dy is not None:
        dy = dy.dequantize().astype(jnp.float32) if isinstance(dy, GroupedTensor) else jnp.asarray(dy, jnp.float32)
    # Any recipe will do: it only says that operands must be floats.
    product = product_of(
        x, w, preferred_element_type=jnp.float32, precision="highest", existing_out=dy, recipe=recipes[0]
    )
    operands, call, _ = folded(dispatched(product.operands), product.call)
    ct = jax.random.normal(jax.random.key(0), call.shape) if dy is None else operands.epilogue.existing
    operands = operands._replace(epilogue=Epilogue())
    left = call.product.ragged == "n"  # then `lhs` is the weight
    error, sqnr, underflow, overflow = (np.zeros((len(recipes), len(PRODUCTS))) for _ in range(4))
    worst_group = np.full(error.shape, -1)
    group_sqnr = np.full((*error.shape, operands.num_groups), np.nan)
    for j, wrt in enumerate((None, "rhs", "lhs") if left else (None, "lhs", "rhs")):
        of, its = operands, call
        if wrt is not None:
            of, its = derivative(wrt, ct, operands, call, getattr(operands, wrt).data)
        its = its._replace(dtype=jnp.float32, out_batch=False)
        lhs, rhs = (Operand(each.data.astype(jnp.float32)) for each in (of.lhs, of.rhs))
        exact = _product(of._replace(lhs=lhs, rhs=rhs), its)
        for i, recipe in enumerate(recipes):
            casts, history = casts_of(recipe, call)
            how = casts.forward if wrt is None else casts.derivative(wrt).forward
            past = history if wrt is None else past_of(wrt, history)
            rounded, counts = _rounded(of, its, how, past)
            powers = jax.device_get(_powers(exact, _product(rounded, its), of.sizes, its))
            signal, noise = (np.asarray(power, np.float64) for power in powers)
            with np.errstate(divide="ignore", invalid="ignore"):
                # What isn't finite is worse than any noise.
                noise = np.where(np.isfinite(signal) & np.isfinite(noise), noise, np.inf)
                signal = np.where(np.isnan(signal), np.inf, signal)
                decibels = np.where(np.isinf(noise), -np.inf, 10 * np.log10(signal / noise))
                group_sqnr[i, j] = np.where(signal > 0, decibels, np.nan)
                error[i, j] = np.inf if np.isinf(noise).any() else np.sqrt(noise.sum() / signal.sum())
                sqnr[i, j] = -20 * np.log10(error[i, j])
                lost, nonzero, over, count = counts
                underflow[i, j], overflow[i, j] = 100 * np.divide(lost, nonzero), 100 * np.divide(over, count)
            if not np.isnan(group_sqnr[i, j]).all():
                worst_group[i, j] = np.nanargmin(group_sqnr[i, j])
    names = tuple(recipe.name for recipe in recipes)
    return ErrorTable(names, error, sqnr, underflow, overflow, worst_group, group_sqnr)


@jax.jit(static_argnames="call")
def _product(operands: Operands, call: Call) -> Array:
    """The product in float32: one program for the exact operands and for those of every recipe."""
    return bind(operands, call)


@jax.jit(static_argnames="call")
def _powers(exact: Array, got: Array, sizes: dict[str, Array], call: Call) -> tuple[Array, Array]:
    """Each group's signal and noise power."""
    signal, noise = (
        GroupedTensor(jnp.square(z), *(sizes.get(letter) for letter in call.product.out)).sum()
        for z in (exact, got - exact)
    )
    return signal, noise


def _rounded(operands: Operands, call: Call, how: Pair, past: Array | None) -> tuple[Operands, np.ndarray]:
    """The operands, quantised and dequantised; how many of their elements become zero, of how many that weren't, and
    how many saturate, of how many."""
    total = np.zeros(4)
    for i, (name, cast) in enumerate(zip(("lhs", "rhs"), how, strict=True)):
        x, letters = as_tensor(name, operands, call)
        data, counts = _quantized(x, cast, None if past is None else past[i])
        turned = letters != getattr(call.product, name)
        operands = operands._replace(**{name: Operand(data.mT if turned else data)})
        total += np.array(jax.device_get(counts), np.float64)
    return operands, total


@jax.jit(static_argnames="how")
def _quantized(x: GroupedTensor, how: Cast, past: Array | None) -> tuple[Array, tuple[Array, ...]]:
    """What an operand becomes, in float32; elements that become zero, that aren't zero, that saturate, and all."""
    data = jnp.where(x.mask, jnp.asarray(x.data).astype(jnp.float32), 0)
    nonzero, count = jnp.sum(data != 0), jnp.sum(x.mask)
    if how.dtype is None:
        return data, (jnp.zeros((), nonzero.dtype), nonzero, jnp.zeros((), nonzero.dtype), count)
    q = quantize_operand(x, how, past)
    lost = jnp.sum((data != 0) & (q.data == 0))
    # Beyond what rounding alone could carry past the largest value.
    over = jnp.sum(jnp.abs(data) > q._element_scales() * LARGEST[how.dtype] * (1 + 1e-6))
    return jnp.asarray(q.dequantize().data), (lost, nonzero, over, count)
