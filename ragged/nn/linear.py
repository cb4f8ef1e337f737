"""`GroupedLinear`: a linear layer for each group."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Float, PRNGKeyArray

from ragged.core.errors import Site, is_count
from ragged.core.formats import float_dtype
from ragged.ops.matmul import matmul
from ragged.quant.recipe import Recipe
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import GroupedTensor


class GroupedLinear(eqx.Module):
    """`y[i] = x[i] @ weight[g] + bias[g]`, where row `i` is of group `g`.

    - `weight`: `[num_groups, in_features, out_features]`. `eqx.tree_at` can put a uniform `GroupedTensor` in its place:
      a quantised one, or for weights stored as `[num_groups, out, in]` `GroupedTensor(w).mT`. Inside the `jit` of the
      product, `mT` makes no copy.
    - `bias`: `[num_groups, out_features]`, or None.
    - `recipe`: a `ragged.Recipe` for the product and its derivatives, or None. A history is never shared with another
      layer: `__init__` copies it.
    """

    weight: Float[jax.Array, "g d_in d_out"]
    bias: Float[jax.Array, "g d_out"] | None
    recipe: Recipe | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_groups: int,
        use_bias: bool = True,
        recipe: Recipe | str | None = None,
        dtype: Any = None,
        *,
        key: PRNGKeyArray,
    ) -> None:
        """Initialises the parameters uniformly in `±in_features ** -0.5`, as `eqx.nn.Linear` does.

        **Arguments:**

        - `in_features`, `out_features`, `num_groups`: extents of the weight.
        - `use_bias`: whether there is a bias. (`Experts` and `Router` have none by default.)
        - `recipe`: a `ragged.Recipe`, its name, or None.
        - `dtype`: a floating dtype, by default float32.
        - `key`: a key of `jax.random`.

        **Raises:** `ValueError` for invalid extents; `TypeError` for another dtype; as `Recipe.preset` for an unknown
        recipe.
        """
        site = Site("ragged.nn.GroupedLinear(in_features, out_features, num_groups)")
        for name, n in (("in_features", in_features), ("out_features", out_features), ("num_groups", num_groups)):
            if not is_count(n):
                site.fail(ValueError, f"`{name}` is {n!r}.", "It must be a positive int.")
        limit, keys = in_features**-0.5, jax.random.split(key)
        dtype = float_dtype(site, jax.numpy.float32 if dtype is None else dtype)
        shapes = (num_groups, in_features, out_features), (num_groups, out_features)
        weight, bias = (jax.random.uniform(k, s, dtype, -limit, limit) for k, s in zip(keys, shapes, strict=True))
        self.weight, self.bias = weight, bias if use_bias else None
        # A copy for each layer: a history that two layers share can't be donated.
        self.recipe = None if recipe is None else jax.tree.map(jax.numpy.copy, Recipe.of(recipe, site))

    def __call__(self, x: GroupedTensor | Gathered) -> GroupedTensor:
        """Ragged rows `[rows, out_features]` in the common dtype of `x` and `weight`, zeros in the tail.

        **Raises:** as `ragged.matmul` does.
        """
        return matmul(x, self.weight, bias=self.bias, recipe=self.recipe)
