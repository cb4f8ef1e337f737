"""The smallest backend that there can be: forwards by a mask and an einsum, in float32. It has no configuration."""

from collections.abc import Iterable

import jax.numpy as jnp
from jax import Array

from ragged.backends.base import Launch, Refusal, Target, Work, apply_epilogue, cost
from ragged.core.offsets import segments
from ragged.product.config import Config
from ragged.product.operands import Call, Operands


def plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    scaled = x.lhs.scales is not None or x.rhs.scales is not None
    if call.product.kernel != "grouped_matmul" or scaled or call.batch(x) is not None:
        return Refusal("plain multiplies rows of one product, without scales")
    return Launch("plain", call.product.kernel, call, target, **cost(call, x))


def run(launch: Launch, x: Operands) -> Array:
    """`[m, n]` from rows `[m, k]` and matrices `[g, k, n]`, in the order of letters that `call.product` has."""
    call, p = launch.call, launch.call.product
    (rows, matrices), m = call.kernel_operands(x), call.shape[0]
    starts, ends = segments(x.sizes[p.ragged], m, x.offset, call.num_local_groups(x))
    at = jnp.arange(m)[None, :]
    mine = (at >= starts[:, None]) & (at < ends[:, None])  # [g, m]
    every = jnp.einsum(
        f"{rows.letters},g{matrices.letters}->g{p.out}", rows.data, matrices.data, preferred_element_type=jnp.float32
    )
    total = jnp.sum(jnp.where(mine[:, :, None], every, 0), axis=0)
    return apply_epilogue(launch.call, total, x.epilogue.existing).astype(call.dtype)


def candidates(launch: Launch, x: Operands) -> Iterable[Config]:
    return ()


def work(launch: Launch, x: Operands) -> Work:
    return Work()
