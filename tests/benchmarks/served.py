"""A block of experts of gpt-oss's size on the CPU, with weights of few bits and in bfloat16: its memory and its time.

    uv run --group dev python -m tests.benchmarks.served [--turns 7] [--tokens 1 4] [--json served.json]

32 experts of 2880 and 2880 with biases, the clamped gate, four experts for each token, tokens in bfloat16. Prints, for
each format: the GiB of weights, scales and zero points; and for each number of tokens the MiB of temporary memory, the
median of milliseconds of a call, and the median ratio to bfloat16's. The formats take turns. bfloat16 has a second
turn, whose ratio says how noisy the machine is.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ragged import GroupedTensor, quantize
from ragged.nn import Experts, MoE, Router
from tests.benchmarks import report
from tests.moe import clamped
from tests.support import WEIGHTS

D, HIDDEN, EXPERTS, TOP_K = 2880, 2880, 32, 4
AGAIN = "bfloat16, again"


def blocks(d: int = D, hidden: int = HIDDEN) -> dict[str, MoE]:
    """The same block with weights `[out, in]`, in each format. `run` transposes them."""
    keys = jax.random.split(jax.random.key(0), 2)
    router = Router(d, EXPERTS, TOP_K, use_bias=True, key=keys[0])
    experts = Experts(d, hidden, EXPERTS, activation=clamped, use_bias=True, dtype=jnp.bfloat16, key=keys[1])

    block = MoE(router, experts)

    def with_weights(change: Callable[[Array], Any]) -> MoE:
        changed = [change(weight.mT) for weight in weights_of(experts)]
        return eqx.tree_at(lambda block: weights_of(block.experts), block, changed)

    found = {"bfloat16": with_weights(GroupedTensor)}
    for name, (dtype, scaling, symmetric) in WEIGHTS.items():
        change = jax.jit(lambda w, d=dtype, s=scaling, z=symmetric: quantize(w, d, s, symmetric=z))
        found[name] = with_weights(change)
    return found | {AGAIN: found["bfloat16"]}


def weights_of(experts: Experts) -> list[Any]:
    assert experts.gate is not None
    return [experts.gate.weight, experts.up.weight, experts.down.weight]


def run(block: MoE, x: Array) -> Array:
    transposed = [weight.mT for weight in weights_of(block.experts)]
    return eqx.tree_at(lambda block: weights_of(block.experts), block, transposed)(x)[0]


def measure(found: dict[str, MoE], tokens: int, turns: int) -> list[dict[str, Any]]:
    x = jax.random.normal(jax.random.key(1), (tokens, found["bfloat16"].router.weight.shape[0]), jnp.bfloat16)
    programs, rows = {}, []
    for name, block in found.items():
        arrays, static = eqx.partition(block, eqx.is_array)
        function = jax.jit(lambda arrays, x, static=static: run(eqx.combine(arrays, static), x))
        programs[name] = function.lower(arrays, x).compile(), arrays
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(1 + turns):
        for name, (program, arrays) in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(arrays, x))
            seconds[name].append(time.perf_counter() - began)
    for name, (program, arrays) in programs.items():
        _, *taken = seconds[name]
        ratio = median(ours / its for ours, its in zip(taken, seconds["bfloat16"][1:], strict=True))
        stored = sum(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) for leaf in jax.tree.leaves(arrays)) / 8
        row = {"weights": name, "tokens": tokens, "GiB": stored / 2**30, "ms": 1000 * median(taken), "ratio": ratio}
        rows.append(row | {"temporary MiB": program.memory_analysis().temp_size_in_bytes / 2**20})
        shown = (f"{key} {value:.2f}" for key, value in rows[-1].items() if key != "weights")
        print(f"{name:<50} {', '.join(shown)}", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 32, 512])
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--dry", action="store_true", help="a small block, to try the benchmark")
    options = parser.parse_args(arguments)
    found = blocks(64, 96) if options.dry else blocks()
    about = {
        "date": report.today(),
        "processor": report.processor(),
        "versions": report.versions("ragged", "jax", "jaxlib"),
    }
    rows = [row for tokens in options.tokens for row in measure(found, tokens, options.turns)]
    report.save(about | {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
