"""Trains a mixture-of-experts character model on the help texts that ship with Python.

    python examples/quickstart.py               about a minute on two CPU cores
    python examples/quickstart.py --steps 100   a quick look

The model predicts the next character from the last 16, with two layers of 16 experts each. A router sends each token to
its two best experts, so the number of rows per expert changes from batch to batch: the rows are a `GroupedTensor`.
`matmul` multiplies the rows of each expert by the matrix of that expert. No row is padded, and none is dropped.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pydoc_data.topics import topics
from statistics import median

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ragged import GroupedTensor, Route, matmul, route

CONTEXT, BATCH, EXPERTS, TOP_K, D, HIDDEN = 16, 1024, 16, 2, 128, 256


class Experts(eqx.Module):
    """An MLP with one hidden layer per expert: group `i` of the rows is multiplied by matrix `i`."""

    up: Float[Array, "experts d hidden"]
    down: Float[Array, "experts hidden d"]

    def __call__(self, x: Float[GroupedTensor, "rows d"]) -> Float[GroupedTensor, "rows d"]:
        hidden: Float[GroupedTensor, "rows hidden"] = matmul(x, self.up).map(jax.nn.gelu)
        return matmul(hidden, self.down)


class MoE(eqx.Module):
    """Sends each token to its most probable experts, and adds their weighted results to the token."""

    router: Float[Array, "d experts"]
    experts: Experts

    def __init__(self, key: PRNGKeyArray) -> None:
        keys = jax.random.split(key, 3)
        self.router = normal(keys[0], D, EXPERTS)
        self.experts = Experts(normal(keys[1], EXPERTS, D, HIDDEN), normal(keys[2], EXPERTS, HIDDEN, D))

    def __call__(self, x: Float[Array, "tokens d"]) -> tuple[Float[Array, "tokens d"], Route, Float[Array, ""]]:
        inputs = normalize(x)
        probabilities = jax.nn.softmax(inputs @ self.router)
        weights, chosen = jax.lax.top_k(probabilities, TOP_K)  # both [tokens, TOP_K]
        to_experts = route(chosen, num_groups=EXPERTS)
        y = to_experts.combine(self.experts(to_experts.dispatch(inputs)), weights)
        share = to_experts.first_dims / chosen.size  # share of the rows per expert
        balance = EXPERTS * jnp.sum(share * jnp.mean(probabilities, axis=0))  # 1 if all experts get equal shares
        return x + y, to_experts, balance


class Model(eqx.Module):
    """Logits of the next character, from the last `CONTEXT` characters."""

    embedding: Float[Array, "vocabulary e"]
    mix: Float[Array, "context*e d"]
    layers: list[MoE]
    readout: Float[Array, "d vocabulary"]

    def __init__(self, vocabulary: int, key: PRNGKeyArray) -> None:
        keys = jax.random.split(key, 5)
        self.embedding = jax.random.normal(keys[0], (vocabulary, 16))
        self.mix = normal(keys[1], CONTEXT * 16, D)
        self.layers = [MoE(keys[2]), MoE(keys[3])]
        self.readout = normal(keys[4], D, vocabulary)

    def __call__(self, context: Int[Array, "tokens context"]) -> tuple[Array, list[Route], Float[Array, ""]]:
        x = self.embedding[context].reshape(len(context), -1) @ self.mix
        routes, balance = [], jnp.zeros(())
        for layer in self.layers:
            x, to_experts, layer_balance = layer(x)
            routes.append(to_experts)
            balance = balance + layer_balance
        return normalize(x) @ self.readout, routes, balance


def normal(key: PRNGKeyArray, *shape: int) -> Float[Array, "..."]:
    return jax.random.normal(key, shape) / np.sqrt(shape[-2])


def normalize(x: Float[Array, "tokens d"]) -> Float[Array, "tokens d"]:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def windows(text: Int[Array, " characters"], starts: Int[Array, " tokens"]) -> tuple[Array, Array]:
    """`(context, next)`: `CONTEXT` characters from each start on, and the character after them."""
    window = text[starts[:, None] + jnp.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


def cross_entropy(logits: Float[Array, "tokens vocabulary"], target: Int[Array, " tokens"]) -> Float[Array, ""]:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=1))


def gradient(model: Model, step: Array, text: Array) -> tuple[Model, Array]:
    """`(gradient, loss)` on `BATCH` random windows."""
    key = jax.random.fold_in(jax.random.key(1), step)
    context, target = windows(text, jax.random.randint(key, (BATCH,), 0, len(text) - CONTEXT))

    def objective(model: Model) -> tuple[Array, Array]:
        logits, _, balance = model(context)
        loss = cross_entropy(logits, target)
        return loss + 0.005 * balance, loss

    return jax.grad(objective, has_aux=True)(model)


def adam(model: Model, mean: Model, square: Model, grads: Model, step: Array, steps: Array) -> tuple:
    """One Adam step. `mean` and `square` are running averages of the gradient and its square."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, square, grads)
    rate = 3e-3 * jnp.minimum((step + 1) / 50, 1 - step / steps)

    def update(p: Array, m: Array, s: Array) -> Array:
        m, s = m / (1 - 0.9 ** (step + 1)), s / (1 - 0.99 ** (step + 1))
        return p - rate * m / (jnp.sqrt(s) + 1e-8)

    return jax.tree.map(update, model, mean, square), mean, square


@partial(jax.jit, donate_argnums=(0, 1, 2))
def train_step(model: Model, mean: Model, square: Model, step: Array, steps: Array, text: Array) -> tuple:
    grads, loss = gradient(model, step, text)
    return *adam(model, mean, square, grads, step, steps), loss


def read_text() -> tuple[np.ndarray, np.ndarray, int]:
    """`(train, held_out, vocabulary size)`: characters as numbers. Every tenth topic is held out."""
    names = sorted(topics)
    held_names = names[::10]
    alphabet = {c: i for i, c in enumerate(sorted(set("".join(topics.values()))))}
    train, held_out = (
        np.array([alphabet[c] for name in names if (name in held_names) == held for c in topics[name]])
        for held in (False, True)
    )
    print(f"text: {len(names) - len(held_names)} topics of Python's help, {len(train):,} characters")
    print(f"held out: {len(held_names)} more topics, {len(held_out):,} characters")
    return train, held_out, len(alphabet)


@jax.jit
def evaluate(model: Model, text: Array, starts: Array) -> tuple[Array, list[Route]]:
    context, target = windows(text, starts)
    logits, routes, _ = model(context)
    return cross_entropy(logits, target), routes


def held_out_loss(model: Model, held_out: np.ndarray) -> tuple[float, list[Route], int]:
    """`(loss, routes, count)`: mean loss, routes of the last batch, number of predicted characters."""
    text = jnp.asarray(held_out, jnp.int32)
    batches = [np.arange(i, i + BATCH) for i in range(0, len(held_out) - CONTEXT - BATCH + 1, BATCH)]
    results = [evaluate(model, text, starts) for starts in batches]
    return float(np.mean([loss for loss, _ in results])), results[-1][1], len(batches) * BATCH


def counting_losses(train: np.ndarray, held_out: np.ndarray, vocabulary: int) -> tuple[float, float]:
    """Held-out losses of a unigram model (each count plus 1) and a bigram model (plus 100 times the unigram)."""
    unigram = np.bincount(train, minlength=vocabulary) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(train[:-1] * vocabulary + train[1:], minlength=vocabulary**2)
    bigram = pairs.reshape(vocabulary, vocabulary) + 100 * unigram
    bigram /= bigram.sum(axis=1, keepdims=True)
    before, target = held_out[CONTEXT - 1 : -1], held_out[CONTEXT:]
    return -np.log(unigram[target]).mean(), -np.log(bigram[before, target]).mean()


def ragged_dot_experts(experts: Experts, x: GroupedTensor) -> GroupedTensor:
    """`experts(x)`, computed with `jax.lax.ragged_dot`."""
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x.data, experts.up, x.packed_dims))
    return GroupedTensor(jax.lax.ragged_dot(hidden, experts.down, x.packed_dims), x.packed_dims)


def compare_speed(experts: Experts, x: GroupedTensor, runs: int = 15) -> tuple[float, float]:
    """Median seconds of a forward and backward pass with `matmul` and `jax.lax.ragged_dot`. The two take turns."""

    def passes(layer: Callable[[Experts, GroupedTensor], GroupedTensor]) -> Callable:
        return eqx.filter_jit(eqx.filter_grad(lambda both: jnp.sum(layer(*both).data ** 2)))

    seconds = {run: [] for run in (passes(Experts.__call__), passes(ragged_dot_experts))}
    for _ in range(runs + 1):
        for run, taken in seconds.items():
            start = time.perf_counter()
            jax.block_until_ready(run((experts, x)))
            taken.append(time.perf_counter() - start)
    ours, theirs = (median(taken[1:]) for taken in seconds.values())  # the first run compiles
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="training steps (default: %(default)s)")
    steps = parser.parse_args().steps
    began = time.perf_counter()

    train, held_out, vocabulary = read_text()
    model = Model(vocabulary, jax.random.key(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(model))
    print(f"model: {len(model.layers)} layers of {EXPERTS} experts, {TOP_K} per token; {size:,} parameters\n")

    mean, square = (jax.tree.map(jnp.zeros_like, model) for _ in range(2))
    text = jnp.asarray(train, jnp.int32)
    shown, losses = began, []
    for step in range(steps):
        model, mean, square, loss = train_step(model, mean, square, step, steps, text)
        losses.append(float(loss))
        if time.perf_counter() - shown > 5 or step == steps - 1:
            shown = time.perf_counter()
            average = np.mean(losses[-100:])
            print(f"{shown - began:6.1f} s   step {step + 1:5,}   training loss {average:.3f} nats", flush=True)

    mixture, routes, count = held_out_loss(model, held_out)
    unigram, bigram = counting_losses(train, held_out[: count + CONTEXT], vocabulary)
    print("\nheld-out loss            nats  bits / character")
    for name, loss in (("unigram", unigram), ("bigram", bigram), ("mixture of experts", mixture)):
        print(f"    {name:<19}{loss:6.3f}{loss / np.log(2):18.3f}")

    print("\nrows per expert in the last held-out batch")
    for i, to_experts in enumerate(routes):
        print(f"    layer {i}  {to_experts.first_dims.tolist()}")

    x = routes[0].dispatch(jax.random.normal(jax.random.key(2), (BATCH, D)))
    ours, theirs = compare_speed(model.layers[0].experts, x)
    print("\nspeed of the experts of layer 0 on this batch, forward and backward")
    print(f"    ragged.matmul       {ours * 1e3:6.1f} ms")
    print(f"    jax.lax.ragged_dot  {theirs * 1e3:6.1f} ms   {theirs / ours:.1f} times the time")
    print(f"\n{time.perf_counter() - began:.0f} s in total")


if __name__ == "__main__":
    main()
