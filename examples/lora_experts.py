"""LoRA on the experts of a mixture: each pair of an expert and an adapter has matrices of a rank of its own.

Rows are sorted by expert, and within an expert by adapter. So one buffer has two kinds of groups: experts and pairs.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import ragged
from ragged import GroupedTensor


class Lora(eqx.Module):
    """`x @ (w[e] + at[p].T @ b[p])` for the rows of expert `e` and pair `p`. Ranks are data, and may be 0."""

    w: Float[Array, "experts d_in d_out"]
    at: Float[GroupedTensor, "room d_in"]  # ragged rows: [ranks[p], d_in] in group p
    b: Float[GroupedTensor, "room d_out"]  # ragged rows: [ranks[p], d_out] in group p, times alpha / rank
    max_rank: int = eqx.field(static=True)

    def __call__(self, x: Float[GroupedTensor, "rows d_in"]) -> Float[GroupedTensor, "rows d_out"]:
        of_experts = GroupedTensor(x.data, x.packed_dims.reshape(len(self.w), -1).sum(axis=1, dtype=jnp.int32))
        low = ragged.matmul(x, self.at.mT, max_last=self.max_rank)  # ragged both [rows, max_rank]
        return ragged.matmul(low, self.b, existing_out=ragged.matmul(of_experts, self.w).data)


def moe(
    layers: tuple[Lora, Lora, Lora],
    x: Float[Array, "tokens d"],
    adapter: Int[Array, " tokens"],
    experts: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
) -> Float[Array, "tokens d"]:
    """A mixture of gated experts in which each token has an adapter, whose ranks may be 0."""
    (gate, up, down), pairs = layers, layers[0].b.num_groups
    route = ragged.route(experts * (pairs // len(gate.w)) + adapter[:, None], num_groups=pairs)
    rows = route.dispatch(x)
    return route.combine(down(gate(rows).map(jax.nn.silu) * up(rows)), weights)
