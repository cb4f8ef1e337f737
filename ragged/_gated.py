"""`gated_matmul`: two products of the same rows, one of which gates the other."""

from inspect import signature
from typing import Any

from jax import Array
from jaxtyping import Float

from ragged._activated import finished
from ragged._epilogue import check_names, check_rows
from ragged._errors import Site
from ragged._matmul import MatmulProduct, matmul, product_of
from ragged.quant.formats import promote
from ragged.quant.recipe import Recipe
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import GroupedTensor

OF_EACH = ("lhs", "rhs", "bias", "activation", "save", "recipe", "existing_out")
OPTIONS = tuple(name for name in signature(matmul).parameters if name not in OF_EACH)


def gated_matmul(
    x: GroupedTensor | Gathered | Array | Any,
    w_gate: GroupedTensor | Array | Any,
    w_up: GroupedTensor | Array | Any,
    *,
    activation: str | Any = "silu",
    bias: tuple[Float[Array, "*g n"] | Any, Float[Array, "*g n"] | Any] | Any = None,
    save: str | Any = "pre",
    recipe: Recipe | str | tuple[Recipe | str | Any, Recipe | str | Any] | Any = None,
    **options: Any,
) -> GroupedTensor:
    """`activation(x @ w_gate) * (x @ w_up)`, group by group: the first half of a gated MLP (SwiGLU, GEGLU).

    Both products are accumulated in float32, and so are the activation and the gate computed; the result is rounded
    once (Shazeer, arXiv:2002.05202).

    **Arguments:**

    - `x`: as `matmul`'s `lhs`: ragged rows `[rows, k]`, uniform `[g, m, k]`, or ragged in both dims.
    - `w_gate`, `w_up`: as its `rhs`, of one shape: `[g, k, n]`, or `[k, n]` for all groups.
    - `activation`: as in `matmul`; None for `(x @ w_gate) * (x @ w_up)`.
    - `bias`: a pair, of the gate and of the other product, each `(n,)`, `[groups, n]` or None.
    - `save`: what the derivative keeps besides the operands and the result: `"pre"`, both pre-activations, rounded to
      the result's dtype; or `"out"`, nothing, and it computes them again. `jax.checkpoint`'s policies know them as
      `"ragged_pre_activation"`.
    - `recipe`: as in `matmul`, for both products; or a pair. One with a history belongs to one product.
    - `options`: those of `matmul` for both products, but for `existing_out`.

    **Returns:** a tensor like `matmul(x, w_up)`, with zeros in the tail; of both weights' common dtype, if they differ.

    **Raises:** as `matmul` does; `ValueError` for weights of different shapes.

    !!! example
        ```python
        import jax.numpy as jnp
        import ragged
        x = ragged.GroupedTensor(jnp.ones((16, 4)), first_dims=jnp.array([3, 5, 0, 4], jnp.int32))
        w_gate, w_up = jnp.ones((4, 4, 8)), jnp.ones((4, 4, 8))
        assert ragged.gated_matmul(x, w_gate, w_up).shape == (16, 8)
        ```
    """
    how = {"activation": activation, "bias": bias, "save": save, "recipe": recipe}
    return finished(gated_products(x, w_gate, w_up, **how, **options))


def gated_products(
    x: Any, w_gate: Any, w_up: Any, activation: Any, bias: Any, save: Any, recipe: Any, **options: Any
) -> tuple[MatmulProduct, MatmulProduct]:
    """What a call of `gated_matmul` comes down to: the gate's product, and the other."""
    site = Site("ragged.gated_matmul(x, w_gate, w_up)", {"x": x, "w_gate": w_gate, "w_up": w_up})
    if "existing_out" in options:
        site.fail(ValueError, "`existing_out` is given, but a gated product is no sum.", "Add it to the result.")
    if unknown := sorted(options.keys() - OPTIONS):
        site.fail(TypeError, f"there is no option {unknown[0]!r}.", f"Options are {', '.join(OPTIONS)}.")
    check_names(site, activation, save, is_gated=True)
    if getattr(w_gate, "shape", None) != getattr(w_up, "shape", None):
        site.fail(ValueError, "`w_gate` and `w_up` have different shapes.", "Both are [groups, k, n].")
    if isinstance(recipe, Recipe) and recipe.history is not None:
        mend = "Pass a pair, one for each: `recipe=(for_gate, for_up)`."
        site.fail(ValueError, "`recipe` has a history, which belongs to one product.", mend)
    biases, recipes = (None, None) if bias is None else bias, recipe if isinstance(recipe, tuple) else (recipe, recipe)
    for name, pair in (("bias", biases), ("recipe", recipes)):
        if not isinstance(pair, tuple) or len(pair) != 2:
            site.fail(TypeError, f"`{name}` is not a pair.", "Pass two, of the gate and of the other product.")
    options |= {"activation": activation, "save": save}
    names = [{"lhs": "x", "rhs": name, "bias": f"bias[{i}]"} for i, name in enumerate(("w_gate", "w_up"))]
    gate, up = (
        product_of(x, w, bias=b, recipe=r, site=Site(site.call, names=n), **options)
        for w, b, r, n in zip((w_gate, w_up), biases, recipes, names, strict=True)
    )
    for each in (gate, up):
        check_rows(site, each, "a gate")
    dtype = promote(gate.call.dtype, up.call.dtype)
    return gate._replace(call=gate.call._replace(dtype=dtype)), up._replace(call=up.call._replace(dtype=dtype))
