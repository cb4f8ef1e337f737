"""`gated_matmul`: two products of the same rows; the activation of the first multiplies the second."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from ragged.core.errors import Site, is_arraylike
from ragged.core.formats import AnyArray, accumulator_dtype, promote
from ragged.ops.activated import with_epilogue
from ragged.ops.epilogue import GATE, UP, check_bias, check_names, check_rows, check_save
from ragged.ops.matmul import request_of
from ragged.ops.request import Arguments, Request
from ragged.primitive.epilogue import split_columns
from ragged.product.config import Config, Configs
from ragged.product.function import function_of
from ragged.quant.recipe import Recipe
from ragged.quant.weights import QuantizedWeights
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import GroupedTensor

COLUMNS = ("halves", "interleaved")


def gated_matmul(
    x: GroupedTensor | Gathered | AnyArray,
    w_gate: GroupedTensor | QuantizedWeights | AnyArray,
    w_up: GroupedTensor | QuantizedWeights | AnyArray | None = None,
    *,
    columns: str | None = None,
    activation: str | Callable[[Array], Array] | Callable[[Array, Array], Array] | None = "silu",
    bias: tuple[Float[AnyArray, "*g n"] | None, Float[AnyArray, "*g n"] | None] | Float[AnyArray, "*g n"] | None = None,
    save: str = "pre",
    names: tuple[str, str] = (GATE, UP),
    recipe: Recipe | str | tuple[Recipe | str | None, Recipe | str | None] | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    group_offset: Int[AnyArray, ""] | int | None = None,
    capacity: int | None = None,
    backend: str | Config | Configs | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> GroupedTensor:
    """`activation(x @ w_gate) * (x @ w_up)`, group by group: the first half of a gated MLP (SwiGLU, GEGLU).

    Source: Shazeer, arXiv:2002.05202. Computed in float32 and rounded once.

    **Arguments:**

    - `x`: as `lhs` of `matmul`: ragged rows `[rows, k]`, uniform `[g, m, k]`, or ragged in both dims.
    - `w_gate`, `w_up`: as `rhs` of `matmul`, of the same shape, such as `[g, k, n]`, or `[k, n]` for all groups.
    - `columns`: for one weight `[g, k, 2 * n]` that holds both matrices; pass it as `w_gate`, without `w_up`. With
      `"halves"`, the first `n` columns are the gate's. With `"interleaved"`, the even columns are the gate's.
    - `activation`: as in `matmul`, or None for `(x @ w_gate) * (x @ w_up)`. Or an elementwise function of two
      arguments, `gate = x @ w_gate` and `up = x @ w_up`, that computes the whole result.
    - `bias`: a pair, one for each product: `(n,)`, `[groups, n]` or None. With `columns`, it may also be one array,
      `(2 * n,)` or `[groups, 2 * n]`, with the weight's columns.
    - `names`: the names of both pre-activations, the gate's first, in policies of `jax.checkpoint`.
    - `recipe`: as in `matmul`, for both products, or a pair, one for each. Recipes with a history must be a pair. A
      name builds a recipe for each product.
    - The rest: as in `matmul`, for both products.

    **Returns:** a tensor like `matmul(x, w_up)`, with zeros in the tail, in the common dtype of both products.

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
    not_of_matmul = ("x", "w_gate", "w_up", "columns", "names")
    options = {name: value for name, value in locals().items() if name not in (*not_of_matmul, "not_of_matmul")}
    return with_epilogue(gated_requests(x, w_gate, w_up, Arguments(**options), columns, names))


def gated_requests(
    x: Any, w_gate: Any, w_up: Any, arguments: Arguments, columns: Any = None, names: Any = (GATE, UP)
) -> tuple[Request, ...]:
    """`(gate, up)`: the checked requests of the two products of `gated_matmul`.

    `arguments.bias` is a pair, or with `columns` one array; `arguments.recipe` is a pair, or one recipe for both.
    """
    both, weight_names = None, ("w_gate", "w_up")
    site = Site("ragged.gated_matmul(x, w_gate, w_up)", {"x": x, "w_gate": w_gate, "w_up": w_up})
    if columns is not None:
        site = Site("ragged.gated_matmul(x, w)", {"x": x, "w": w_gate})
        both = _both(site, w_gate, w_up, columns)
        w_gate, w_up = split_columns(both, columns)
        n = w_up.shape[-1]
        names_of = {"halves": (f"w[..., :{n}]", f"w[..., {n}:]"), "interleaved": ("w[..., ::2]", "w[..., 1::2]")}
        weight_names = names_of[columns]
        if not isinstance(arguments.bias, tuple | list | type(None)):
            num_groups = (
                both.shape[0] if both.ndim == 3 else x.shape[0] if is_arraylike(x) else getattr(x, "num_groups", 0)
            )
            check_bias(site, arguments.bias, num_groups, both.shape[-1], "`w`")
            arguments = replace(arguments, bias=split_columns(arguments.bias, columns))
    bias, recipe = arguments.bias, arguments.recipe
    check_save(site, arguments.save)
    if w_up is None:
        site.fail(TypeError, "`w_up` is missing.", _how_to_split(w_gate))
    if getattr(w_gate, "shape", None) != getattr(w_up, "shape", None):
        site.fail(ValueError, "`w_gate` and `w_up` have different shapes.", "Both must be [groups, k, n].")
    if isinstance(recipe, Recipe) and recipe.history is not None:
        one = "ragged.Recipe.preset('delayed')"
        hint = f"Pass a pair, a recipe for each product, as in `recipe=({one}, {one})`."
        site.fail(ValueError, "`recipe` has a history, which belongs to one product.", hint)
    biases = (None, None) if bias is None else bias
    recipes = recipe if isinstance(recipe, tuple) else (recipe, recipe)
    for name, pair in (("bias", biases), ("recipe", recipes), ("names", names)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            hint = f"Pass a pair, first the gate's: `{name}=(..., ...)`."
            site.also(**{name: pair}).fail(TypeError, f"`{name}` is not a pair.", hint)
    if tuple(names) != (GATE, UP):
        check_names(site, {f"names[{i}]": name for i, name in enumerate(names)}, arguments.save)
    outer = [{"lhs": "x", "rhs": name, "bias": f"bias[{i}]"} for i, name in enumerate(weight_names)]
    gate, up = (
        request_of(x, w, replace(arguments, bias=b, recipe=r, activation=None), Site(site.call, names=n))
        for w, b, r, n in zip((w_gate, w_up), biases, recipes, outer, strict=True)
    )
    gate, up = (replace(each, name=name) for each, name in zip((gate, up), names, strict=True))
    for each in (gate, up):
        check_rows(site, each, "a gate")
    dtype = promote(gate.call.dtype, up.call.dtype)
    function = function_of(site, arguments.activation, 2, accumulator_dtype(dtype))
    gate, up = (replace(each, call=each.call._replace(dtype=dtype), function=function) for each in (gate, up))
    if both is None or recipes != (None, None) or gate.merge is not None or not gate.is_local:
        return gate, up
    # Kernels and derivatives read the one weight in place. Products that can't do so read the two matrices.
    return replace(gate, both=both, columns=columns), up


def _both(site: Site, w: Any, w_up: Any, columns: Any) -> Array:
    """The array of `w`, one weight that holds both matrices, checked."""
    if columns not in COLUMNS:
        site.fail(ValueError, f"unknown `columns` {columns!r}.", "Pass 'halves' or 'interleaved'.")
    if w_up is not None:
        problem = "`columns` is for one weight that holds both matrices, but there are two weights."
        site.fail(TypeError, problem, "Leave `columns` out.")
    if isinstance(w, GroupedTensor) and w.kind == "uniform" and not w.is_quantized:
        w = jnp.asarray(w.data)
    if not is_arraylike(w) or w.ndim not in (2, 3) or w.shape[-1] % 2:
        hint = "With `columns`, the weight must be one array [groups, k, 2 * n] that isn't quantised."
        error = ValueError if is_arraylike(w) else TypeError
        site.fail(error, "`w` doesn't have the columns of two matrices.", hint)
    return jnp.asarray(w)


def _how_to_split(w: Any) -> str:
    """Hint for a call without `w_up`."""
    name = "w_gate"
    if isinstance(w, QuantizedWeights):
        name, w = "w_gate.weights", w.weights
    elif isinstance(w, GroupedTensor):
        name = "w_gate.dequantize().data" if w.is_quantized else "w_gate.data"
    if len(shape := getattr(w, "shape", ())) < 2 or shape[-1] % 2:
        return "Pass two weights of the same shape, [groups, k, n]."
    halves, interleaved = (f"`ragged.gated_matmul(x, {name}, columns={each!r})`" for each in COLUMNS)
    return (
        f"If one weight holds both matrices, the gate's columns first, call {halves}. If their columns alternate, call "
        f"{interleaved}."
    )
