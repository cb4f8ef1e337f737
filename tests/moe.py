"""MoE layers of tests and benchmarks, and the gate of one."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ragged.nn import Experts, MoE, Router

OF_ROUTERS = ("score", "use_selection_bias", "normalize", "epsilon", "scale", "groups")
OF_EXPERTS = ("gated", "activation", "use_bias", "save", "recipe")


def clamped(gate: Array, up: Array) -> Array:
    """The gate of gpt-oss."""
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def moe(d: int, hidden: int, num_experts: int, top_k: int, *, key: Array, **options: Any) -> MoE:
    """A layer. `options`: of `Router`, `Experts` and `MoE`; `num_shared`: the shared expert is `num_shared * hidden`
    wide, and there is none by default; `router`: another router."""
    keys, num_shared, router = jax.random.split(key, 3), options.pop("num_shared", 0), options.pop("router", None)
    of_both = {name: options.pop(name) for name in ("dtype",) if name in options}
    of_router, of_experts = (
        of_both | {name: options.pop(name) for name in names if name in options} for names in (OF_ROUTERS, OF_EXPERTS)
    )
    router = Router(d, num_experts, top_k, key=keys[0], **of_router) if router is None else router
    experts = Experts(d, hidden, num_experts, key=keys[1], **of_experts)
    shared = Experts(d, num_shared * hidden, key=keys[2], **of_experts) if num_shared else None
    return MoE(router, experts, shared, **options)
