"""A Mixtral-like block of experts, forward and backward, on the CPU: by transformers, `jax.lax.ragged_dot`, `ragged`.

    uv run --group dev --group models python -m tests.benchmarks.block [--turns 15]

512 tokens of 256, 8 experts of 512, two a token, in float32. The gradients are those of the tokens, the router and the
experts' matrices. transformers runs in a process of its own, which idles while it isn't its turn. Prints the medians
of the turns' seconds, of turns in which each form runs some calls one after another.
"""

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from tests.benchmarks.cpu_torch import difference, sketch, turn

TOKENS, D, HIDDEN, EXPERTS, TOP_K, CALLS = 512, 256, 512, 8, 2, 5
Arrays = dict[str, np.ndarray]


def arrays() -> tuple[Arrays, np.ndarray, np.ndarray]:
    """Weights with the names of a checkpoint, matrices `[experts, out, in]`; tokens; a cotangent."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (EXPERTS, HIDDEN, D), "w2": (EXPERTS, D, HIDDEN), "w3": (EXPERTS, HIDDEN, D)}
    weights = {
        f"block_sparse_moe.experts.{{expert}}.{name}.weight": rng.standard_normal(s, np.float32) * s[2] ** -0.5
        for name, s in shapes.items()
    }
    weights["block_sparse_moe.gate.weight"] = rng.standard_normal((EXPERTS, D), np.float32)
    x, dy = rng.standard_normal((2, TOKENS, D), np.float32)
    return weights, x, dy


def of_transformers() -> Callable[[], Any]:
    torch: Any = importlib.import_module("torch")
    mixtral: Any = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    config = importlib.import_module("transformers").MixtralConfig(
        hidden_size=D, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    block = mixtral.MixtralSparseMoeBlock(config).float()
    weights, x, dy = arrays()
    w1, w2, w3, router = weights.values()
    with torch.no_grad():
        block.gate.weight.copy_(torch.tensor(router))
        block.experts.gate_up_proj.copy_(torch.tensor(np.concatenate([w1, w3], 1)))
        block.experts.down_proj.copy_(torch.tensor(w2))
    leaf, cotangent = torch.tensor(x)[None].requires_grad_(), torch.tensor(dy)[None]
    leaves = [leaf, *block.parameters()]

    def run() -> list[np.ndarray]:
        for each in leaves:
            each.grad = None
        y = block(leaf)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(cotangent)
        return [y.detach()[0].numpy(), leaf.grad[0].numpy(), block.experts.down_proj.grad.numpy()]

    return run


def of_jax() -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    from jax import Array, lax

    from tests.models.blocks import example

    weights, x, dy = jax.tree.map(jnp.asarray, arrays())
    config = {"num_experts_per_tok": TOP_K}

    def plain(w: dict[str, Array], x: Array) -> Array:
        prefix = "block_sparse_moe.experts.{expert}."
        w1, w2, w3 = (w[f"{prefix}{name}.weight"].mT for name in ("w1", "w2", "w3"))
        chances, chosen = lax.top_k(jax.nn.softmax(x @ w["block_sparse_moe.gate.weight"].T), TOP_K)
        chances = chances / chances.sum(1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1))
        rows, sizes = x[order // TOP_K], jnp.bincount(chosen.reshape(-1), length=EXPERTS)
        hidden = jax.nn.silu(lax.ragged_dot(rows, w1, sizes)) * lax.ragged_dot(rows, w3, sizes)
        y = lax.ragged_dot(hidden, w2, sizes)[jnp.argsort(order)]
        return jnp.einsum("tkd,tk->td", y.reshape(TOKENS, TOP_K, D), chances)

    def ours(w: dict[str, Array], x: Array) -> Array:
        return example("models").mixtral(config, w)(x)[0]

    def program(block: Callable[..., Array]) -> Callable[[], Any]:
        def both(w: dict[str, Array], x: Array, dy: Array) -> Any:
            y, pull = jax.vjp(block, w, x)
            dw, dx = pull(dy)
            return y, dx, dw

        run = jax.jit(both).lower(weights, x, dy).compile()

        def results() -> list[Any]:
            y, dx, dw = jax.block_until_ready(run(weights, x, dy))
            return [y, dx, dw["block_sparse_moe.experts.{expert}.w2.weight"]]

        return results

    return {"lax.ragged_dot": program(plain), "ragged": program(ours)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:  # a line of output for each line of input
        run = of_transformers()
        print(json.dumps(sketch(run())), flush=True)
        for _ in sys.stdin:
            print(json.dumps(turn(run, CALLS)), flush=True)
        return

    runs = of_jax()
    command = [sys.executable, "-m", "tests.benchmarks.block", "--child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        want = json.loads(child.stdout.readline())
        for name, run in runs.items():
            off = difference(sketch([np.asarray(x) for x in run()]), want)
            assert off < 1e-4, (name, off)
        seconds: dict[str, list[float]] = {"transformers": []} | {name: [] for name in runs}
        for _ in range(options.turns):
            print(file=child.stdin, flush=True)
            seconds["transformers"].append(json.loads(child.stdout.readline()))
            for name, run in runs.items():
                seconds[name].append(turn(run, CALLS))
        child.stdin.close()
    for name, taken in seconds.items():
        ratio = median(ours / each for ours, each in zip(seconds["ragged"], taken, strict=True))
        print(f"{name:<15} {1000 * median(taken):7.1f} ms   ragged / it: {ratio:.2f}")


if __name__ == "__main__":
    main()
