"""Serves LoRA adapters of different ranks in one batch: one base matrix, plus `x @ A[i] @ B[i]` for each adapter `i`.

    uv run examples/lora_serving.py    about ten seconds on two CPU cores

Tokens and ranks are both ragged. The rows of adapter `i` are multiplied by `A[i]`, which has `ranks[i]` columns. The
result is ragged in both dims, and is multiplied by `B[i]`, which has `ranks[i]` rows. The script compares this with the
usual method, which pads each adapter to the largest rank. Ranks are data: adapters with different ranks run without a
recompilation.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import ragged
from ragged import GroupedTensor

D, D_OUT, TOKENS = 1024, 1024, 1024
RANKS = (*[8] * 20, *[16] * 8, *[64] * 3, 256)  # many small adapters and a large one
MAX_RANK, ROOM = 256, 1024  # capacity: the sum of all ranks is at most ROOM


class Adapters(eqx.Module):
    """Adapter `i` adds `x @ at[i].T @ b[i]`. `b` includes LoRA's factor, alpha / rank."""

    at: Float[GroupedTensor, "room d"]  # ragged rows, [ranks[i], d] in group i
    b: Float[GroupedTensor, "room d_out"]  # ragged rows, [ranks[i], d_out] in group i

    def __call__(
        self, x: Float[Array, "tokens d"], adapter: Int[Array, " tokens"], max_rank: int = MAX_RANK
    ) -> Float[Array, "tokens d_out"]:
        """The term that each token's adapter adds. The adapter -1 means none, and adds zero."""
        route = ragged.route(adapter, num_groups=self.b.num_groups)
        rows = route.dispatch(x)  # ragged rows [tokens, d]
        low = ragged.matmul(rows, self.at.mT, max_last=max_rank)  # ragged both [tokens, max_rank]
        return route.combine(ragged.matmul(low, self.b))


class PaddedAdapters(eqx.Module):
    """Adapters that are padded with zeros to the largest rank."""

    a: Float[Array, "adapters d max_rank"]
    b: Float[Array, "adapters max_rank d_out"]

    def __call__(self, x: Float[Array, "tokens d"], adapter: Int[Array, " tokens"]) -> Float[Array, "tokens d_out"]:
        route = ragged.route(adapter, num_groups=len(self.a))
        low = ragged.matmul(route.dispatch(x), self.a)  # ragged rows [tokens, max_rank]
        return route.combine(ragged.matmul(low, self.b))


@jax.jit
def serve(
    base: Float[Array, "d d_out"],
    adapters: Adapters | PaddedAdapters | None,
    x: Float[Array, "tokens d"],
    adapter: Int[Array, " tokens"],
) -> Float[Array, "tokens d_out"]:
    return x @ base if adapters is None else x @ base + adapters(x, adapter)


def random_adapters(ranks: Sequence[int], d: int, d_out: int, room: int, rng: np.random.Generator) -> Adapters:
    at = [rng.normal(size=(rank, d), scale=d**-0.5).astype(np.float32) for rank in ranks]
    b = [rng.normal(size=(rank, d_out), scale=d_out**-0.5).astype(np.float32) for rank in ranks]
    return Adapters(GroupedTensor.from_list(at, capacity=room), GroupedTensor.from_list(b, capacity=room))


def padded(adapters: Adapters, max_rank: int) -> PaddedAdapters:
    return PaddedAdapters(adapters.at.to_padded(max_rank).mT, adapters.b.to_padded(max_rank))


def median_seconds(calls: dict[str, Callable[[], Array]], runs: int = 30) -> dict[str, float]:
    """Median seconds of each call. The calls take turns."""
    seconds = {name: [] for name in calls}
    for _ in range(runs + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - began)
    return {name: median(taken[1:]) for name, taken in seconds.items()}  # the first call compiles


def main() -> None:
    rng = np.random.default_rng(0)
    base = jnp.asarray(rng.normal(size=(D, D_OUT), scale=D**-0.5), jnp.float32)
    x = jnp.asarray(rng.normal(size=(TOKENS, D)), jnp.float32)
    popularity = 1 / np.arange(1, len(RANKS) + 2)  # the most popular adapter has a quarter of the tokens
    chosen = rng.choice([*rng.permutation(len(RANKS)), -1], size=TOKENS, p=popularity / popularity.sum())
    adapter = jnp.asarray(chosen, jnp.int32)
    packed = random_adapters(RANKS, D, D_OUT, ROOM, rng)
    ways = {"base alone": None, "padded ranks": padded(packed, MAX_RANK), "ragged ranks": packed}
    seconds = median_seconds({name: partial(serve, base, way, x, adapter) for name, way in ways.items()})

    ranks = np.array(RANKS)[chosen[chosen >= 0]]  # ranks of the tokens that have an adapter
    work = {"base alone": 0, "padded ranks": len(ranks) * MAX_RANK, "ragged ranks": sum(ranks)}
    print(f"{TOKENS} tokens, {len(RANKS)} adapters of ranks {min(RANKS)} to {max(RANKS)}, {ranks.mean():.0f} per token")
    print(f"{'':14}{'ms':>6}{'GFLOP of adapters':>20}{'MiB of adapters':>18}")
    for name, way in ways.items():
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(way)) / 2**20
        print(f"{name:14}{1e3 * seconds[name]:6.1f}{2e-9 * (D + D_OUT) * work[name]:20.3f}{size:18.1f}")
    outs = [serve(base, ways[name], x, adapter) for name in ("padded ranks", "ragged ranks")]
    print(f"largest difference between padded and ragged: {jnp.max(jnp.abs(outs[0] - outs[1])):.1e}")

    others = random_adapters(rng.permutation(RANKS).tolist(), D, D_OUT, ROOM, rng)
    began = time.perf_counter()
    jax.block_until_ready(serve(base, others, x, adapter))
    print(f"first call with different ranks in the same buffers: {1e3 * (time.perf_counter() - began):.1f} ms")


if __name__ == "__main__":
    main()
