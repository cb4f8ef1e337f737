"""`error_table`: accuracy of recipes on a product and its two derivatives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from ragged.core.errors import Site, is_concrete
from ragged.core.formats import LARGEST, AnyArray
from ragged.ops.matmul import request_of
from ragged.ops.request import Arguments
from ragged.primitive.moved_rows import dispatched
from ragged.primitive.primitive import bind, derivative
from ragged.product.operands import Call, Epilogue, Operand, Operands
from ragged.quant.recipe import PRESETS, Cast, Recipe
from ragged.quant.training import as_tensor, quantize_operand
from ragged.quant.weights import QuantizedWeights, unquantized
from ragged.tensor.base import element_scales
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import GroupedTensor

PRODUCTS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class ErrorTable:
    """Errors of recipes. Prints as a table.

    Arrays have one row per recipe, and three columns: forward, dgrad and wgrad. `group_sqnr` has a third axis.

    - `recipes`: names of the recipes.
    - `relative_error`: ‖quantised - exact‖ / ‖exact‖, Frobenius norms over all groups; infinite if a group's exact or
      quantised product isn't finite.
    - `sqnr`: the signal-to-quantisation-noise ratio in decibels, -20 log₁₀ of the relative error.
    - `underflow`: percentage of the operands' nonzero elements that become zero.
    - `overflow`: percentage of the operands' elements that exceed the range of their scale and saturate.
    - `worst_group`: the group with the lowest SQNR; -1 if all exact products are zero.
    - `group_sqnr`: SQNR of each group; -inf if its exact or quantised product isn't finite; NaN if its exact product is
      zero or empty.
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

        `product`: `"forward"`, `"dgrad"` or `"wgrad"`. `ax`: where to draw; new axes by default.

        **Raises:** `ValueError` for another product, `ImportError` without matplotlib.
        """
        if product not in PRODUCTS:
            Site("ErrorTable.plot").fail(ValueError, f"{product!r} is not a product.", f"Pass one of {PRODUCTS}.")
        try:
            from matplotlib import pyplot
        except ImportError:
            Site("ErrorTable.plot").fail(ImportError, "it needs matplotlib.", "Install it: `pip install matplotlib`.")
        values = self.group_sqnr[:, PRODUCTS.index(product)]
        # The colours span three standard deviations about the median, estimated from the median absolute deviation:
        # outliers, such as an almost exact group of one row, must not widen the range.
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
    x: GroupedTensor | Gathered | AnyArray,
    w: GroupedTensor | QuantizedWeights | AnyArray,
    recipes: Sequence[str | Recipe] = tuple(PRESETS),
    *,
    dy: GroupedTensor | AnyArray | None = None,
) -> ErrorTable:
    """Compares `matmul(x, w)` and its derivatives under each recipe with the exact products in float32.

    **Arguments:**

    - `x`, `w`: concrete operands of `matmul`. Groups that share one matrix count as one group.
    - `recipes`: names of presets, or `ragged.Recipe`s.
    - `dy`: the result's cotangent, a tensor like the result; standard normal noise by default.

    **Raises:** what `matmul` raises, with `dy` checked like its `existing_out`; `ValueError` without recipes,
    `TypeError` for traced values.

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
        site.fail(ValueError, f"`recipes` is {recipes!r}.", "Pass at least one recipe, such as `['tensorwise']`.")
    recipes = [Recipe.of(each, site) for each in recipes]
    if not is_concrete(*jax.tree.leaves((x, w, dy))):
        problem = "it measures values, but they aren't known here."
        site.fail(TypeError, problem, "Pass arrays, outside of `jit`.")
    if dy is not None:
        dy = dy.dequantize().astype(jnp.float32) if isinstance(dy, GroupedTensor) else jnp.asarray(dy, jnp.float32)
    # A recipe is passed only for its checks, such as that operands are floats. Any recipe will do.
    options = {"preferred_element_type": jnp.float32, "precision": "highest", "existing_out": dy, "recipe": recipes[0]}
    product = request_of(x, w, Arguments(**options))
    operands, call = dispatched(product.operands), product.call
    ct = jax.random.normal(jax.random.key(0), call.shape) if dy is None else operands.epilogue.existing
    operands = operands._replace(epilogue=Epilogue())
    is_weight_lhs = call.product.ragged == "n"
    error, sqnr, underflow, overflow = (np.zeros((len(recipes), len(PRODUCTS))) for _ in range(4))
    worst_group = np.full(error.shape, -1)
    group_sqnr = np.full((*error.shape, operands.num_groups), np.nan)
    for j, wrt in enumerate((None, "rhs", "lhs") if is_weight_lhs else (None, "lhs", "rhs")):
        product_operands, product_call = operands, call
        if wrt is not None:
            product_operands, product_call = derivative(wrt, ct, operands, call, getattr(operands, wrt).data)
        product_call = product_call._replace(dtype=jnp.float32, out_batch=False)
        lhs, rhs = (Operand(each.data.astype(jnp.float32)) for each in (product_operands.lhs, product_operands.rhs))
        exact = _product(product_operands._replace(lhs=lhs, rhs=rhs), product_call)
        for i, recipe in enumerate(recipes):
            recipe = recipe.transposed if is_weight_lhs else recipe
            cast_recipe = recipe if wrt is None else recipe.derivative(wrt)
            rounded, counts = _rounded(product_operands, product_call, cast_recipe)
            quantized = _product(rounded, product_call)
            powers = jax.device_get(_powers(exact, quantized, product_operands.sizes, product_call))
            signal, noise = (np.asarray(power, np.float64) for power in powers)
            with np.errstate(divide="ignore", invalid="ignore"):
                # A group that isn't finite has infinite noise. A NaN signal becomes inf, so that it is positive.
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
    """The product in float32. Exact and rounded operands share one compiled program."""
    return bind(operands, call)


@jax.jit(static_argnames="call")
def _powers(exact: Array, got: Array, sizes: dict[str, Array], call: Call) -> tuple[Array, Array]:
    """`(signal, noise)`: the power of each group's exact product and of its error, both times one factor."""
    # The factor is a power of two that brings the largest value near 1, so that no square overflows.
    largest = jnp.max(jnp.where(jnp.isfinite(exact), jnp.abs(exact), 0), initial=0)
    exponent = jnp.frexp(largest)[1]
    for part in (exponent // 2, exponent - exponent // 2):  # In one step, the factor might not be a normal number.
        exact, got = (z * jnp.ldexp(jnp.float32(1), -part) for z in (exact, got))
    signal, noise = (
        GroupedTensor(jnp.square(z), sizes.get(call.product.out[0]), sizes.get(call.product.out[1])).sum()
        for z in (exact, got - exact)
    )
    return signal, noise


def _rounded(operands: Operands, call: Call, recipe: Recipe) -> tuple[Operands, np.ndarray]:
    """`(operands, counts)`: the operands quantised and dequantised, and the sums of the counts of `_quantized`."""
    total, history = np.zeros(4), recipe.history
    for i, (name, cast) in enumerate(zip(("lhs", "rhs"), recipe.forward, strict=True)):
        x, letters = as_tensor(name, operands, call.product)
        data, counts = _quantized(x, cast, None if history is None else history[i])
        is_transposed = letters != getattr(call.product, name)
        operands = operands._replace(**{name: Operand(data.mT if is_transposed else data)})
        total += np.array(jax.device_get(counts), np.float64)
    return operands, total


@jax.jit(static_argnames="cast")
def _quantized(x: GroupedTensor, cast: Cast, history: Array | None) -> tuple[Array, tuple[Array, ...]]:
    """`(data, counts)`: an operand quantised and dequantised to float32, and the numbers of elements that become zero,
    of nonzero elements, of elements that saturate, and of all elements."""
    data = jnp.where(x.mask, jnp.asarray(x.data).astype(jnp.float32), 0)
    nonzero, count = jnp.sum(data != 0), jnp.sum(x.mask)
    if cast.dtype is None:
        return data, (jnp.zeros((), nonzero.dtype), nonzero, jnp.zeros((), nonzero.dtype), count)
    q = quantize_operand(x, cast, history)
    values = jnp.asarray(q.dequantize().data)
    lost = jnp.sum((data != 0) & (values == 0))
    # The margin excludes the largest elements, which exceed the range only by rounding of their scale.
    over = jnp.sum(jnp.abs(data) > element_scales(q) * LARGEST[cast.dtype] * (1 + 1e-6))
    return values, (lost, nonzero, over, count)
