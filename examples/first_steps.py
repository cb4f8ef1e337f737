"""First steps: trains a gated expert layer with biases, in float32 and with a recipe that multiplies 8-bit floats.

uv run --with optax examples/first_steps.py    about ten seconds on two CPU cores
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import ragged

TOKENS, D, HIDDEN, EXPERTS, STEPS = 1024, 32, 64, 8, 100

Parameters = dict[str, Array]


def parameters(key: Array) -> Parameters:
    def normal(i: int, *shape: int) -> Array:
        return jax.random.normal(jax.random.fold_in(key, i), shape) * shape[-2] ** -0.5

    weights = {"router": normal(0, D, EXPERTS), "down": normal(1, EXPERTS, HIDDEN, D)}
    weights |= {"gate": normal(2, EXPERTS, D, HIDDEN), "up": normal(3, EXPERTS, D, HIDDEN)}
    sizes = {"gate_bias": HIDDEN, "up_bias": HIDDEN, "down_bias": D}
    return weights | {name: jnp.zeros((EXPERTS, size)) for name, size in sizes.items()}


def layer(p: Parameters, x: Float[Array, "tokens d"], recipe: str | None) -> Float[Array, "tokens d"]:
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)  # both [tokens, 2]
    route, biases = ragged.route(chosen, num_groups=EXPERTS), (p["gate_bias"], p["up_bias"])
    hidden = ragged.gated_matmul(route.gathered(x), p["gate"], p["up"], bias=biases, recipe=recipe)
    return route.combine(ragged.matmul(hidden, p["down"], bias=p["down_bias"], recipe=recipe), weights)


def train(recipe: str | None) -> Float[Array, " steps"]:
    """Losses while learning a function that differs between two half-spaces."""
    p, x = parameters(jax.random.key(0)), jax.random.normal(jax.random.key(1), (TOKENS, D))
    y, optimiser = jnp.where(x[:, :1] > 0, x[:, ::-1], jnp.roll(x, 1, axis=1)), optax.adam(1e-2)

    def step(carried: tuple[Parameters, optax.OptState], _: None) -> tuple[tuple[Parameters, optax.OptState], Array]:
        p, state = carried
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((layer(p, x, recipe) - y) ** 2))(p)
        updates, state = optimiser.update(grads, state, p)
        p = jax.tree.map(jnp.add, p, updates)
        return (p, state), loss

    return jax.lax.scan(step, (p, optimiser.init(p)), None, STEPS)[1]


if __name__ == "__main__":
    for recipe in (None, "blockwise"):
        losses = train(recipe)
        print(f"recipe {recipe}: first loss {losses[0]:.4f}, loss after {STEPS} steps {losses[-1]:.4f}")
