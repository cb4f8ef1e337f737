"""The experts of haliax, the library of named axes that levanter's models are written in, and the same by `ragged`.

    uv run --with "haliax>=1.4.dev453" examples/haliax_experts.py    about twenty seconds on two CPU cores

The layers and their weights stay haliax's. Only the three products change: `MoELinear` calls
`jax.lax.ragged_dot_general` for each. `ragged` takes the arrays of the named arrays. It also does what stands around
the products in a model: it sorts rows by expert, activates the gate inside the product, and sums the rows of a token.

Prints the largest difference of the result and of each gradient, relative to the largest number in it, and of both
forms the memory of the compiled program and its time.
"""

import time
from statistics import median
from typing import Any

import haliax as hax  # pyright: ignore[reportMissingImports]: not needed to work on `ragged`
import jax
import jax.numpy as jnp
from haliax.nn import MoELinear  # pyright: ignore[reportMissingImports]
from jax import Array

import ragged

Tokens, Embed, Mlp = hax.make_axes(tokens=512, embed=256, mlp=512)
Experts, TopK = hax.make_axes(experts=16, top_k=2)
Rows = hax.Axis("rows", Tokens.size * TopK.size)


def init(key: Array) -> dict[str, MoELinear]:
    keys = jax.random.split(key, 3)
    axes = {"gate": (Embed, Mlp), "up": (Embed, Mlp), "down": (Mlp, Embed)}
    return {
        name: MoELinear.init(Experts, *each, key=key, use_bias=False)
        for key, (name, each) in zip(keys, axes.items(), strict=True)
    }


def theirs(layers: dict[str, MoELinear], x: Array, chosen: Array, weights: Array) -> Array:
    """`x: [tokens, embed]`, `chosen` and `weights: [tokens, top_k]` -> `[tokens, embed]`, by haliax's layers."""
    order = jnp.argsort(chosen.reshape(-1))
    rows = hax.named(x[order // TopK.size], (Rows, Embed))
    sizes = hax.named(jnp.bincount(chosen.reshape(-1), length=Experts.size), Experts)
    hidden = hax.nn.silu(layers["gate"](rows, sizes)) * layers["up"](rows, sizes)
    y = layers["down"](hidden, sizes).array[jnp.argsort(order)]
    return jnp.einsum("tke,tk->te", y.reshape(*chosen.shape, -1), weights)


def ours(layers: dict[str, MoELinear], x: Array, chosen: Array, weights: Array) -> Array:
    """The same, by `ragged`."""
    gate, up, down = (layers[name].weight.array for name in ("gate", "up", "down"))
    route = ragged.route(chosen, Experts.size)
    hidden = ragged.gated_matmul(route.gathered(x), gate, up)
    return route.combine(ragged.matmul(hidden, down), weights)


def compiled(form: Any, *args: Any) -> Any:
    """A program for the result, and for the gradients of the layers, the tokens and the weights."""

    def loss(layers: Any, x: Array, chosen: Array, weights: Array) -> tuple[Array, Array]:
        y = form(layers, x, chosen, weights)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.grad(loss, (0, 1, 3), has_aux=True)).lower(*args).compile()


def named(gradients: Any, result: Array) -> dict[str, Array]:
    layers, x, weights = gradients
    arrays = {f"gradient of {name}": layers[name].weight.array for name in ("gate", "up", "down")}
    return {"result": result, "gradient of tokens": x, "gradient of weights": weights} | arrays


def seconds(program: Any, *args: Any) -> float:
    began = time.perf_counter()
    jax.block_until_ready(program(*args))
    return time.perf_counter() - began


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[1], (Tokens.size, Embed.size))
    logits = jax.random.normal(keys[2], (Tokens.size, Experts.size))
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), TopK.size)
    args = init(keys[3]), x, chosen, weights

    programs = {"haliax": compiled(theirs, *args), "ragged": compiled(ours, *args)}
    want, got = (named(*program(*args)) for program in programs.values())
    for name in want:
        difference = jnp.max(jnp.abs(want[name] - got[name])) / jnp.max(jnp.abs(want[name]))
        print(f"{name:<24} differs by {difference:.0e}")

    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(11):  # taking turns: other work on the machine slows both
        for name, program in programs.items():
            times[name].append(seconds(program, *args))
    for name, program in programs.items():
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name}: {memory:.0f} MiB of temporaries, {1000 * median(times[name]):.0f} ms")


if __name__ == "__main__":
    main()
