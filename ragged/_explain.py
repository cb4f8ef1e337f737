"""`explain`: what a product is and what would run, without running it."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ragged import _lowering
from ragged._lowering import Call, Operands
from ragged._matmul import Plan, matmul, plan_matmul
from ragged._recipe import casts_of, quantized
from ragged._shared import product_with_shared
from ragged._tensor import KINDS, GroupedTensor, describe
from ragged.kernels import Target


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
    plans: list[Plan] = []
    products: list[tuple[Operands, Call]] = []

    def trace(lhs: Any, rhs: Any) -> None:
        plan = plan_matmul(lhs, rhs, **options)
        plans.append(plan)
        if plan.recipe is None:
            products.append((plan.operands, plan.call))
            return

        def run(operands: Operands, call: Call) -> Array:
            casts, history = casts_of(recipe, call)
            products.append(quantized(casts.forward, operands, call, history))
            return jnp.zeros(call.shape, call.dtype)

        recipe = plan.recipe
        product_with_shared(run, plan.operands, plan.call)

    jax.eval_shape(trace, lhs, rhs)
    (plan,), ((operands, product),) = plans, products
    layout, call = plan.layout, plan.call
    shape = (*call.shape[:-2], call.shape[-1], call.shape[-2]) if plan.swapped else call.shape
    result = describe(jax.ShapeDtypeStruct(shape, call.dtype))
    lines = [
        f"{layout.name}: {KINDS[layout.lhs]} × {KINDS[layout.rhs]} -> {KINDS[layout.out]}, {result}",
        f"derivatives: by lhs {'none' if call.lhs_block else layout.dlhs}, "
        f"by rhs {'none' if call.rhs_block else layout.drhs}",
    ]
    if plan.recipe is not None:
        lines.append(f"quantised by {plan.recipe.name}, each product on its own")
    kernel = _lowering.kernel_name(product.product)
    for platform in _lowering.PLATFORMS:
        backend, why = _lowering.chosen_backend(platform, operands, product, Target())
        lines.append(f"on {platform}: {kernel} of {backend}" + (f" ({why})" if why else ""))
    return "\n".join(lines)
