"""A mixture of experts as a module of Flax's `nnx`, whose products and routes are `ragged`'s.

    uv run --with "flax>=0.12" --with optax examples/nnx_experts.py    about ten seconds on two CPU cores

The weights are `nnx.Param`s, so Flax's optimisers, filters and checkpoints know them. `ragged` takes the arrays that
they hold: `param[...]`.

The layer learns a function that is a different linear map in each of 8 regions. Prints the largest differences from a
loop over experts, of the result and of each gradient, relative to the largest number in it; and the loss before and
after training.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx  # pyright: ignore[reportMissingImports]: not needed to work on `ragged`
from jax import Array

import ragged

D, HIDDEN, EXPERTS, TOP_K, BATCH, STEPS = 16, 32, 8, 2, 512, 200


class MoE(nnx.Module):
    """Each token goes to the `TOP_K` most probable experts. The result is the weighted sum of their results."""

    def __init__(self, rngs: Any) -> None:
        self.router = nnx.Linear(D, EXPERTS, use_bias=False, rngs=rngs)
        self.gate, self.up, self.down = (
            nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, *shape)) * shape[0] ** -0.5)
            for shape in ((D, HIDDEN), (D, HIDDEN), (HIDDEN, D))
        )

    def route(self, x: Array) -> tuple[Array, Array]:
        """`(weights, chosen)`, both `[tokens, TOP_K]`."""
        weights, chosen = jax.lax.top_k(jax.nn.softmax(self.router(x)), TOP_K)
        return weights / jnp.sum(weights, axis=1, keepdims=True), chosen

    def __call__(self, x: Array) -> Array:  # [tokens, D] -> [tokens, D]
        weights, chosen = self.route(x)
        route = ragged.route(chosen, EXPERTS)
        hidden = ragged.gated_matmul(route.gathered(x), self.gate[...], self.up[...])
        return route.combine(ragged.matmul(hidden, self.down[...]), weights)

    def loop(self, x: Array) -> Array:
        """The same, by a loop over experts that computes all tokens."""
        weights, chosen = self.route(x)
        y = jnp.zeros_like(x)
        for e in range(EXPERTS):
            rows = jax.nn.silu(x @ self.gate[e]) * (x @ self.up[e]) @ self.down[e]
            y = y + rows * jnp.sum(jnp.where(chosen == e, weights, 0), axis=1, keepdims=True)
        return y


def loss(model: MoE, x: Array, y: Array) -> Array:
    return jnp.mean((model(x) - y) ** 2)


@nnx.jit
def train_step(model: MoE, optimizer: Any, x: Array, y: Array) -> Array:
    value, grads = nnx.value_and_grad(loss)(model, x, y)
    optimizer.update(model, grads)
    return value


def numbers(form: Any, model: MoE, x: Array) -> dict[str, Array]:
    """The result of `form(model, x)`, and the gradients of all parameters."""
    grads = nnx.to_flat_state(nnx.grad(lambda model: jnp.sum(jnp.sin(form(model, x))))(model))
    return {"result": form(model, x)} | {f"gradient of {path[0]}": grad[...] for path, grad in grads}


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    regions, maps = jax.random.normal(keys[0], (D, EXPERTS)), jax.random.normal(keys[1], (EXPERTS, D, D)) * D**-0.5
    model = MoE(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = []
    for key in jax.random.split(keys[2], STEPS):
        x = jax.random.normal(key, (BATCH, D))
        y = jnp.einsum("td,tde->te", x, maps[jnp.argmax(x @ regions, axis=1)])
        losses.append(train_step(model, optimizer, x, y))
    x = jax.random.normal(keys[2], (BATCH, D))
    for name, want in numbers(MoE.loop, model, x).items():
        difference = jnp.max(jnp.abs(numbers(MoE.__call__, model, x)[name] - want)) / jnp.max(jnp.abs(want))
        print(f"{name:<20} differs by {difference:.0e}")
    print(f"loss before training: {losses[0]:.3f}, after: {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
