"""A mixture-of-experts layer in 24 lines: router, SwiGLU experts, load balancing. No token is padded or dropped.

    uv run --with optax examples/moe_layer.py    about twenty seconds on two CPU cores

The layer learns a function that is a different linear map in each of 16 regions. For comparison, a dense SwiGLU layer
learns the same function with the same FLOPs per token, except for the router. The mixture has more parameters.
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

import ragged

D, HIDDEN, EXPERTS, TOP_K, BATCH, STEPS = 32, 64, 16, 2, 1024, 400


def swiglu(rows: Float[Array, "rows two_hidden"]) -> Float[Array, "rows hidden"]:
    gate, value = jnp.split(rows, 2, axis=-1)
    return jax.nn.silu(gate) * value


class MoE(eqx.Module):
    """Each token goes to the `top_k` most probable experts. The result is the weighted sum of their results."""

    router: Float[Array, "d experts"]
    up: Float[Array, "experts d two_hidden"]  # the gate's columns, then the value's
    down: Float[Array, "experts hidden d"]
    top_k: int = eqx.field(static=True)

    def __init__(self, d: int, hidden: int, experts: int, top_k: int, key: PRNGKeyArray) -> None:
        keys = jax.random.split(key, 3)
        self.router = jax.random.normal(keys[0], (d, experts)) * d**-0.5
        self.up = jax.random.normal(keys[1], (experts, d, 2 * hidden)) * d**-0.5
        self.down = jax.random.normal(keys[2], (experts, hidden, d)) * hidden**-0.5
        self.top_k = top_k

    def __call__(self, x: Float[Array, "tokens d"]) -> tuple[Array, Array, Int[Array, " experts"]]:
        """`(y, balance, rows)`: result `[tokens, d]`, load-balance loss (1 for equal shares), rows per expert."""
        probabilities = jax.nn.softmax(x @ self.router)  # [tokens, experts]
        weights, chosen = jax.lax.top_k(probabilities, self.top_k)  # both [tokens, top_k]
        route = ragged.route(chosen, num_groups=len(self.up))
        hidden = ragged.matmul(route.dispatch(x), self.up).map(swiglu)  # ragged rows [tokens * top_k, hidden]
        y = route.combine(ragged.matmul(hidden, self.down), weights / jnp.sum(weights, axis=-1, keepdims=True))
        share = route.first_dims / chosen.size  # share of the rows; it has no gradient
        return y, len(self.up) * jnp.sum(share * jnp.mean(probabilities, axis=0)), route.first_dims


class Dense(eqx.Module):
    """One SwiGLU layer for all tokens, with the signature of `MoE`."""

    up: Float[Array, "d two_hidden"]
    down: Float[Array, "hidden d"]

    def __init__(self, d: int, hidden: int, key: PRNGKeyArray) -> None:
        keys = jax.random.split(key)
        self.up = jax.random.normal(keys[0], (d, 2 * hidden)) * d**-0.5
        self.down = jax.random.normal(keys[1], (hidden, d)) * hidden**-0.5

    def __call__(self, x: Float[Array, "tokens d"]) -> tuple[Array, Array, Int[Array, " one"]]:
        return swiglu(x @ self.up) @ self.down, jnp.ones(()), jnp.array([len(x)])


def batch(key: PRNGKeyArray, tokens: int = BATCH) -> tuple[Float[Array, "tokens d"], Float[Array, "tokens d"]]:
    """`(x, target)`: points around 16 centres, the last centres rarer, times the matrix of their centre."""
    centres, maps = (jax.random.normal(jax.random.key(i), (16, D, n)) for i, n in ((100, 1), (101, D)))
    keys = jax.random.split(key)
    region = jax.random.categorical(keys[0], -0.15 * jnp.arange(16.0), shape=(tokens,))  # (tokens,)
    x = centres[region, :, 0] + 0.5 * jax.random.normal(keys[1], (tokens, D))
    return x, jnp.einsum("td,tde->te", x, maps[region]) * D**-0.5


def losses(model: MoE | Dense, x: Float[Array, "tokens d"], target: Float[Array, "tokens d"]) -> tuple:
    """`(error, balance, rows)`: squared error / variance of the target, load-balance loss, rows per expert."""
    y, balance, rows = model(x)
    return jnp.mean((y - target) ** 2) / jnp.var(target), balance, rows


def train(model: MoE | Dense, steps: int) -> MoE | Dense:
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    def objective(model: MoE | Dense, x: Array, target: Array) -> Float[Array, ""]:
        error, balance, _ = losses(model, x, target)
        return error + 0.01 * balance

    @eqx.filter_jit(donate="all")
    def train_step(model: MoE | Dense, state: optax.OptState, step: Array) -> tuple[MoE | Dense, optax.OptState]:
        grads = eqx.filter_grad(objective)(model, *batch(jax.random.fold_in(jax.random.key(1), step)))
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state

    state = optimiser.init(eqx.filter(model, eqx.is_array))
    for step in range(steps):
        model, state = train_step(model, state, jnp.asarray(step))
    return model


def main() -> None:
    key = jax.random.key(0)
    x, target = batch(jax.random.key(2), 4 * BATCH)  # points that training doesn't use
    print(f"squared error / variance on new points after {STEPS} steps")
    for model in (Dense(D, TOP_K * HIDDEN, key), MoE(D, HIDDEN, EXPERTS, TOP_K, key)):
        began = time.perf_counter()
        model = train(model, STEPS)
        error, balance, rows = eqx.filter_jit(losses)(model, x, target)
        size = sum(leaf.size for leaf in jax.tree.leaves(model))
        name, seconds = type(model).__name__, time.perf_counter() - began
        print(f"    {name:<7}{error:7.4f}   {size:6,} parameters   {seconds:5.1f} s, including compilation")
    print(f"rows per expert: {rows.tolist()}; load-balance loss {balance:.3f}")


if __name__ == "__main__":
    main()
