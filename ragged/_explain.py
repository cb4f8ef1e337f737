"""`explain`: what a product is and what would run, without running it."""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ragged._errors import describe
from ragged._matmul import matmul
from ragged.product import lowering
from ragged.product.layout import LAYOUTS
from ragged.product.operands import Call, Operands
from ragged.product.primitive import PRIMITIVES
from ragged.quant.recipe import Recipe
from ragged.tensor.tensor import KINDS, GroupedTensor


def explain(lhs: GroupedTensor | Array | Any, rhs: GroupedTensor | Array | Any, **options: Any) -> str:
    """Says what `matmul(lhs, rhs, **options)` is and which kernel runs it on each platform. Computes nothing.

    The operands' arrays may be `jax.ShapeDtypeStruct`s. Raises what `matmul` would, except for what only values tell.

    !!! example
        ```python
        import jax.numpy as jnp
        import ragged
        x = ragged.GroupedTensor(jnp.ones((16, 4)), first_dims=jnp.array([3, 5, 0, 4], jnp.int32))
        print(ragged.explain(x, jnp.ones((4, 4, 8))))
        ```
        prints
        ```text
        forward: ragged rows × uniform -> ragged rows, f32[16,8]
        derivatives: by lhs forward, by rhs wgrad
        on cpu: grouped_matmul of xla
        on cuda: grouped_matmul of triton_gpu
        on tpu: grouped_matmul of pallas_tpu
        ```
    """
    inspect.signature(matmul).bind(lhs, rhs, **options)
    jaxpr, out, _ = eqx.filter_make_jaxpr(matmul)(lhs, rhs, **options)
    (product,) = _products(jaxpr)
    call: Call = product.params["call"]
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in product.invars]
    operands: Operands = product.params["tree"].unflatten(avals)
    layout = LAYOUTS[call.product.ragged]
    by_lhs, by_rhs = (
        layout.derivative(wrt).name if _has_derivative(x.dtype) and _has_derivative(out.dtype) else "none"
        for wrt, x in (("lhs", lhs), ("rhs", rhs))
    )
    kinds = [KINDS[layout.kind(term)] for term in ("mk", "kn", "mn")]
    lines = [
        f"{layout.name}: {kinds[0]} × {kinds[1]} -> {kinds[2]}, {describe(out.data)}",
        f"derivatives: by lhs {by_lhs}, by rhs {by_rhs}",
    ]
    if (recipe := options.get("recipe")) is not None:
        lines.append(f"quantised by {Recipe.of(recipe).name}, each product on its own")
    return "\n".join(
        lines + [f"on {platform}: {_ran(platform, operands, call)}" for platform in sorted(lowering.PLATFORMS)]
    )


def _products(jaxpr: Any) -> list[Any]:
    """The products in a jaxpr, and in those that its equations hold."""
    found = [equation for equation in jaxpr.eqns if equation.primitive in PRIMITIVES]
    for equation in jaxpr.eqns:
        parameters = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns"))
        found += [product for inner in parameters if hasattr(inner, "eqns") for product in _products(inner)]
    return found


def _has_derivative(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1


def _ran(platform: str, operands: Operands, call: Call) -> str:
    """What is lowered for a platform, or the error in its place."""
    try:
        with lowering.target_of(platform, call.options) as target:
            return str(lowering.launch_of(platform, operands, call, target))
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0].removeprefix('`ragged.matmul`: ')}"
