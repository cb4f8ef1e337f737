"""Compares recipes: trains the model of `quickstart.py` in float32, in bfloat16 and with each recipe.

All runs have the same data and the same seed. The experts are gated: `gelu(x @ gate) * (x @ up)`.

    python examples/fp8_recipes.py               about five minutes on two CPU cores
    python examples/fp8_recipes.py --steps 40    a quick look

With a recipe, `matmul` quantises its operands, in the forward pass and in both derivatives. On a CPU this shows the
loss of accuracy, not a gain in speed.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from quickstart import BATCH, CONTEXT, D, Model, adam, gradient, held_out_loss, normal, normalize, read_text

from ragged import GroupedTensor, Recipe, error_table, gated_matmul, matmul

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "delayed")


class QuantizedExperts(eqx.Module):
    """Gated experts with a recipe for each of the three products. With delayed scaling, each recipe has a history."""

    gate: Float[Array, "experts d hidden"]
    up: Float[Array, "experts d hidden"]
    down: Float[Array, "experts hidden d"]
    recipes: tuple[Recipe | None, Recipe | None, Recipe | None]
    dtype: str = eqx.field(static=True)

    def __call__(self, x: Float[GroupedTensor, "rows d"]) -> Float[GroupedTensor, "rows d"]:
        gate, up, down = (w.astype(self.dtype) for w in (self.gate, self.up, self.down))
        hidden = gated_matmul(x.astype(self.dtype), gate, up, activation="gelu_tanh", recipe=self.recipes[:2])
        return matmul(hidden, down, recipe=self.recipes[2]).astype(x.dtype)


def each_recipe(change: Callable[[Recipe], Recipe], model: Model) -> Model:
    def is_recipe(x: object) -> bool:
        return isinstance(x, Recipe)

    return jax.tree.map(lambda x: change(x) if is_recipe(x) else x, model, is_leaf=is_recipe)


@partial(jax.jit, donate_argnums=(0, 1, 2))
def train_step(model: Model, mean: Model, square: Model, step: Array, steps: Array, text: Array) -> tuple:
    grads, loss = gradient(each_recipe(Recipe.unsealed, model), step, text)
    # The "gradient" of a recipe is its next state. Sealed recipes aren't parameters, so Adam doesn't update them.
    grads, recipes = eqx.partition(each_recipe(Recipe.sealed, grads), eqx.is_inexact_array)
    params, mean, square = adam(eqx.filter(model, eqx.is_inexact_array), mean, square, grads, step, steps)
    return eqx.combine(params, recipes), mean, square, loss


def train(name: str, steps: int, text: Array, vocabulary: int) -> Model:
    recipe = Recipe.preset(name) if name in RECIPES else None
    dtype = "float32" if name == "float32" else "bfloat16"
    model = Model(vocabulary, jax.random.key(0))
    gates = (normal(key, *model.layers[0].experts.up.shape) for key in jax.random.split(jax.random.key(2)))
    experts = [
        QuantizedExperts(gate, layer.experts.up, layer.experts.down, (recipe, recipe, recipe), dtype)
        for gate, layer in zip(gates, model.layers, strict=True)
    ]
    model = eqx.tree_at(lambda m: [layer.experts for layer in m.layers], model, experts)
    model = jax.tree.map(jnp.copy, model)  # one array per recipe, so that `train_step` can donate them
    mean, square = (jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array)) for _ in range(2))
    for step in range(steps):
        model, mean, square, _ = train_step(model, mean, square, step, steps, text)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps of each run (default: %(default)s)")
    steps = parser.parse_args().steps

    text, held_out, vocabulary = read_text()
    print(f"\nheld-out loss after {steps} steps (nats)")
    losses, models = {}, {}
    for name in ("float32", "bfloat16", *RECIPES):
        began = time.perf_counter()
        models[name] = train(name, steps, jnp.asarray(text, jnp.int32), vocabulary)
        losses[name], *_ = held_out_loss(models[name], held_out)
        change = f"{losses[name] / losses['bfloat16'] - 1:+8.2%}" if "bfloat16" in losses else " " * 8
        print(f"    {name:<11}{losses[name]:7.4f} {change}   {time.perf_counter() - began:4.0f} s", flush=True)

    model = models["bfloat16"]
    windows = np.arange(BATCH)[:, None] + np.arange(CONTEXT)
    inputs = normalize(model.embedding[held_out[windows]].reshape(BATCH, -1) @ model.mix)
    layer = model.layers[0]
    _, to_experts, _ = layer(inputs)
    print(f"\nerrors of the first product of layer 0, [{D} -> hidden], on held-out text\n")
    print(error_table(to_experts.dispatch(inputs), layer.experts.up, RECIPES))


if __name__ == "__main__":
    main()
