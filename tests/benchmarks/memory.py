"""Temporary memory of a training step of expert layers, as compiled. Needs `libtpu` or Triton, but no TPU nor GPU.

    python -m tests.benchmarks.memory [--chips v5e H200] [--only pre rowwise]

Four `nn.MoE` layers in a `scan`, in bfloat16: 8192 tokens of 1024, 16 experts of 2048, two a token, gated; the
gradients by their matrices. In MiB, what XLA sets aside besides arguments and results; and what the loop stacks for
the derivatives, a layer.

Of a TPU, `hbm` is that in HBM: all that is allocated there, less arguments and results. `temp_size_in_bytes` is more,
for it counts VMEM too.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ragged.nn import MoE
from tests import gpu, tpu
from tests.moe import moe as layer_of

LAYERS, TOKENS, D, HIDDEN, EXPERTS, TOP_K = 4, 8192, 1024, 2048, 16, 2
CASES: dict[str, dict[str, Any]] = {
    "pre": {},
    "out": {"save": "out"},
    "nothing": {"save": "nothing"},
    "tensorwise": {"recipe": "tensorwise"},
    "rowwise": {"recipe": "rowwise"},
    "blockwise": {"recipe": "blockwise"},
    "delayed": {"recipe": "delayed"},
    "out, rowwise": {"save": "out", "recipe": "rowwise"},
}


def step_of(**options: Any) -> tuple[Callable[..., Any], Any, Any]:
    """A training step, and types of its arguments."""

    def make(key: Array) -> MoE:
        return layer_of(D, HIDDEN, EXPERTS, TOP_K, dtype=jnp.bfloat16, key=key, **options)

    keys = jax.ShapeDtypeStruct((LAYERS,), jax.eval_shape(lambda: jax.random.key(0)).dtype)
    made = eqx.filter_eval_shape(eqx.filter_vmap(make), keys)
    arrays, static = eqx.partition(made, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(arrays: Any, x: Array) -> Array:
        y, _ = jax.lax.scan(lambda x, layer: (eqx.combine(layer, static)(x)[0], None), x, arrays)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.grad(loss), arrays, jax.ShapeDtypeStruct((TOKENS, D), jnp.bfloat16)


def temporaries(chip: str, function: Callable[..., Any], *avals: Any) -> dict[str, float]:
    """MiB, by what is counted."""
    if chip == "H200":
        return {"H200": gpu.compile_whole(function, *avals).memory_analysis().temp_size_in_bytes / 2**20}
    return of_tpu(chip, tpu.compile_for(chip, function, *avals).memory)


def of_tpu(chip: str, memory: Any) -> dict[str, float]:
    others = memory.argument_size_in_bytes + memory.output_size_in_bytes
    hbm = memory.total_allocation_bytes - others + memory.alias_size_in_bytes
    return {f"{chip} hbm": hbm / 2**20, f"{chip} temp": memory.temp_size_in_bytes / 2**20}


def stacked(function: Callable[..., Any], *avals: Any) -> list[tuple[str, float]]:
    """What the first loop stacks for the derivatives, and the MiB a layer of each."""
    loop = next(_loops(jax.make_jaxpr(function)(*avals).jaxpr))
    carries = {var.aval.shape for var in loop.invars} - {aval.shape for aval in jax.tree.leaves(avals)[:-1]}
    types = [var.aval for var in loop.outvars if var.aval.shape[:1] == (LAYERS,) and var.aval.shape not in carries]
    found = [(aval.str_short(), aval.size * aval.dtype.itemsize / LAYERS / 2**20) for aval in types]
    return sorted(found, key=lambda each: -each[1])


def _loops(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=lambda each: hasattr(each, "jaxpr")):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from _loops(inner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["v5e", "H200"], choices=[*tpu.TOPOLOGIES, "H200"])
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES])
    options = parser.parse_args()
    for name in options.only:
        function, *avals = step_of(**CASES[name])
        kept = stacked(function, *avals)
        found = [temporaries(chip, function, *avals) for chip in options.chips]
        sizes = ", ".join(f"{what} {mib:.0f}" for each in found for what, mib in each.items())
        print(f"{name}: {sizes} MiB; stacked {sum(mib for _, mib in kept):.0f} a layer:", flush=True)
        print("   ", ", ".join(f"{what} {mib:.0f}" for what, mib in kept if mib >= 1), flush=True)


if __name__ == "__main__":
    main()
