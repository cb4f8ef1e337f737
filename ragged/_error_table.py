"""`error_table`: what each recipe costs in accuracy, for one product and its two derivatives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from ragged._lowering import Call, Operands
from ragged._matmul import plan_matmul
from ragged._primitive import bind
from ragged._quantize import LARGEST
from ragged._recipe import (
    PRESETS,
    Cast,
    Recipe,
    as_tensor,
    casts_of,
    derivative_of,
    past_of,
    quantize_operand,
    quantized,
)
from ragged._shared import product_with_shared
from ragged._tensor import GroupedTensor, describe, is_concrete

PRODUCTS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class ErrorTable:
    """Errors of recipes: arrays of one row a recipe and one column for each of forward, dgrad and wgrad. Prints as a
    table.

    - `recipes`: their names.
    - `relative_error`: ‖quantised - exact‖ / ‖exact‖, Frobenius norms over all groups.
    - `sqnr`: the signal-to-quantisation-noise ratio in decibels, -20 log₁₀ of the relative error.
    - `underflow`: percent of the operands' elements that aren't zero and become zero.
    - `overflow`: percent of the operands' elements that lie beyond what their scale can hold, and saturate.
    - `worst_group`: the group with the lowest SQNR; -1 where no group has a signal.
    - `group_sqnr`: each group's SQNR, NaN where its exact product is zero (or empty).
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
            raise ValueError(f"`ErrorTable.plot`: {product!r} is no product.\nPass one of {PRODUCTS}.")
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError(
                "`ErrorTable.plot` draws with matplotlib.\nInstall it: `pip install matplotlib`."
            ) from error
        values = self.group_sqnr[:, PRODUCTS.index(product)]
        ax = pyplot.subplots(figsize=(2 + 0.5 * values.shape[1], 1.2 + 0.4 * len(values)))[1] if ax is None else ax
        image = ax.imshow(values, aspect="auto")
        ax.set(xlabel="group", title=f"{product}: SQNR (dB)", xticks=range(values.shape[1]))
        ax.set_yticks(range(len(self.recipes)), self.recipes)
        ax.figure.colorbar(image, ax=ax)
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
    if isinstance(recipes, str | Recipe):
        recipes = [recipes]
    if not isinstance(recipes, Sequence) or not recipes:
        raise ValueError(f"`ragged.error_table`: `recipes` is {recipes!r}.\nPass at least one: `['tensorwise']`.")
    recipes = [Recipe.of(each) for each in recipes]
    if not is_concrete(*(leaf for leaf in jax.tree.leaves((x, w, dy)))):
        raise TypeError(
            "`ragged.error_table`: it measures values, which aren't known here.\n"
            f"Got x={describe(x)}, w={describe(w)}.\nPass arrays, outside of `jit`."
        )
    if dy is not None:
        dy = dy.dequantize().astype(jnp.float32) if isinstance(dy, GroupedTensor) else jnp.asarray(dy, jnp.float32)
    # Any recipe will do: it only says that operands must be floats.
    plan = plan_matmul(
        x, w, preferred_element_type=jnp.float32, precision="highest", existing_out=dy, recipe=recipes[0]
    )
    products: list[tuple[Operands, Call]] = []

    def run(operands: Operands, call: Call) -> Array:
        products.append((operands, call))
        return jnp.zeros(call.shape, call.dtype)

    product_with_shared(run, plan.operands, plan.call)
    (operands, call), *_ = products
    ct = jax.random.normal(jax.random.key(0), call.shape) if dy is None else operands.existing
    operands = operands._replace(existing=None)
    error, sqnr, underflow, overflow = (np.zeros((len(recipes), len(PRODUCTS))) for _ in range(4))
    worst_group = np.full(error.shape, -1)
    group_sqnr = np.full((*error.shape, _num_groups(operands)), np.nan)
    for i, recipe in enumerate(recipes):
        for j, (signal, noise, lost, nonzero, over, count) in enumerate(
            jax.device_get(_measure(recipe, operands, ct, call))
        ):
            with np.errstate(divide="ignore", invalid="ignore"):
                group_sqnr[i, j] = np.where(signal > 0, 10 * np.log10(signal / noise), np.nan)
                error[i, j] = np.sqrt(noise.sum() / signal.sum())
                sqnr[i, j] = -20 * np.log10(error[i, j])
                underflow[i, j], overflow[i, j] = 100 * lost / nonzero, 100 * over / count
            if not np.isnan(group_sqnr[i, j]).all():
                worst_group[i, j] = np.nanargmin(group_sqnr[i, j])
    names = tuple(recipe.name for recipe in recipes)
    return ErrorTable(names, error, sqnr, underflow, overflow, worst_group, group_sqnr)


def _num_groups(operands: Operands) -> int:
    return operands.sizes[0].shape[0] if operands.sizes else operands.lhs.shape[0]


@jax.jit(static_argnames="call")
def _measure(recipe: Recipe, operands: Operands, ct: Array, call: Call) -> list[tuple[Array, ...]]:
    """For each product: each group's signal and noise power; how many elements underflow, of how many that aren't zero;
    how many saturate, of how many."""
    casts, history = casts_of(recipe, call)
    left = call.product.ragged == "n"  # then `lhs` is the weight
    dgrad, wgrad = ("rhs", "lhs") if left else ("lhs", "rhs")
    out = []
    for wrt in (None, dgrad, wgrad):
        if wrt is None:
            x, c, how, past = operands, call, casts.forward, history
        else:
            x, c = derivative_of(wrt, operands, call, ct)
            how = casts.derivative(wrt).forward
            past = past_of(wrt, history)
            c = c._replace(dtype=jnp.float32)
        exact, got = bind(x, c), bind(*quantized(how, x, c, past))
        of = dict(zip(c.product.ragged, x.sizes, strict=True))
        sizes = [of.get(letter) for letter in c.product.out]
        powers = [GroupedTensor(jnp.square(z), *sizes).sum() for z in (exact, got - exact)]
        counts = [
            _counts(as_tensor(name, x, c)[0], cast, None if past is None else past[i])
            for i, (name, cast) in enumerate(zip(("lhs", "rhs"), how, strict=True))
        ]
        out.append((*powers, *(a + b for a, b in zip(*counts, strict=True))))
    return out


def _counts(x: GroupedTensor, how: Cast, past: Array | None) -> tuple[Array, ...]:
    """Elements that become zero, that aren't zero, that saturate, and all."""
    data = jnp.where(x.mask, jnp.asarray(x.data).astype(jnp.float32), 0)
    nonzero, count = jnp.sum(data != 0), jnp.sum(x.mask)
    if how.dtype is None:
        return jnp.zeros((), nonzero.dtype), nonzero, jnp.zeros((), nonzero.dtype), count
    q = quantize_operand(x, how, past)
    lost = jnp.sum((data != 0) & (q.data == 0))
    # Beyond what rounding alone could carry past the largest value.
    over = jnp.sum(jnp.abs(data) > q.element_scales() * LARGEST[how.dtype] * (1 + 1e-6))
    return lost, nonzero, over, count
