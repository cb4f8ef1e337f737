"""Causal attention over packed sequences of different lengths, without padding.

    uv run examples/varlen_attention.py    about fifteen seconds on two CPU cores

One product multiplies the queries of each sequence by its own keys. The scores are ragged in both dims. A second
product computes the weighted sum of the values. Both are mapped over the heads. Windows, sinks, and heads that share
keys and values are options. The script compares this with padding to the longest sequence. Both methods also compute
the masked half of the scores.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import ragged
from ragged import GroupedTensor

SEQUENCES, LONGEST, HEADS, HEAD_DIM = 32, 512, 4, 64


def attention(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    lengths: Int[Array, " sequences"],
    longest: int,
    window: int | Int[Array, ""] | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """Sequence `i` has `lengths[i]` rows, at most `longest`. The result is zero after the last sequence.

    - `kv_heads`: consecutive query heads share a head of keys and values.
    - `window`: a query sees its own key and `window - 1` earlier ones. May differ in each layer of a `scan`.
    - `sinks`: a further logit of each head, whose weight is dropped.

    Memory: scores `[rows, heads, longest]`, in the dtype of `q`, and their softmax, which the backward pass needs.
    """
    (rows, _, size), shared_by = q.shape, q.shape[1] // k.shape[1]
    queries = GroupedTensor(q.reshape(rows, -1, shared_by, size) * size**-0.5, first_dims=lengths)
    keys, values = (GroupedTensor(x, first_dims=lengths) for x in (k, v))
    # Ragged both: one row per query, one column per key of its sequence.
    scores = ragged.einsum("q kv head d, k kv d -> q kv head k", queries, keys, max_last=longest)
    weights = scores.softmax(
        causal=True,
        window=None if window is None else (window - 1, 0),
        sink=None if sinks is None else sinks.reshape(-1, shared_by),
    )
    return ragged.einsum("q kv head k, k kv d -> q kv head d", weights, values).data.reshape(q.shape)


def padded_attention(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "rows heads head_dim"],
    v: Float[Array, "rows heads head_dim"],
    lengths: Int[Array, " sequences"],
    longest: int,
) -> Float[Array, "rows heads head_dim"]:
    """`attention` of padded sequences. Padding follows the sequence, so the causal mask hides it."""

    def padded(x: Array) -> Float[Array, "sequences longest heads head_dim"]:
        return GroupedTensor(x, first_dims=lengths).to_padded(longest)

    out = jax.nn.dot_product_attention(padded(q), padded(k), padded(v), is_causal=True)
    return GroupedTensor.from_padded(out, lengths, capacity=len(q)).data


def with_gradients(attend: Callable[..., Array]) -> Callable[..., tuple]:
    """`(result, gradients)` of `attend`, with respect to `q`, `k` and `v` for the cotangent `dy`."""

    def both(dy: Array, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(dy)

    return both


def median_seconds(calls: dict[str, Callable[[], tuple]], runs: int = 9) -> dict[str, float]:
    """Median seconds of each call. The calls take turns."""
    seconds = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - began)
    return {name: median(taken) for name, taken in seconds.items()}


def main() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(mean=4.5, sigma=0.8, size=SEQUENCES).astype(np.int32) + 1, LONGEST)
    lengths[0] = LONGEST
    rows = -(-int(sum(lengths)) // 256) * 256  # rounded up: the last rows are the tail
    q, k, v, dy = jnp.asarray(rng.normal(size=(4, rows, HEADS, HEAD_DIM)), jnp.float32)
    print(f"{SEQUENCES} sequences of {min(lengths)} to {max(lengths)} rows, {sum(lengths)} rows in total")
    print(f"{HEADS} heads of {HEAD_DIM}; forward and backward\n")

    programs, results = {}, {}
    for name, attend in (("padded", padded_attention), ("ragged", attention)):
        fn = with_gradients(partial(attend, lengths=jnp.asarray(lengths), longest=LONGEST))
        programs[name] = jax.jit(fn).lower(dy, q, k, v).compile()
        results[name] = programs[name](dy, q, k, v)
    seconds = median_seconds({name: partial(program, dy, q, k, v) for name, program in programs.items()})

    scores = {"padded": SEQUENCES * LONGEST**2, "ragged": sum(n**2 for n in lengths.tolist())}  # of one head
    held = {"padded": SEQUENCES * LONGEST**2, "ragged": rows * LONGEST}  # elements of the buffer
    print(f"{'':8}{'ms':>8}{'GFLOP':>9}{'MiB of scores':>16}{'MiB of all buffers':>24}")
    for name, program in programs.items():
        flops = 6 * 2 * HEADS * HEAD_DIM * scores[name]  # two products forward, four backward
        buffers = program.memory_analysis().temp_size_in_bytes
        mib = (4 * HEADS * held[name] / 2**20, buffers / 2**20)
        print(f"{name:8}{1e3 * seconds[name]:8.0f}{flops / 1e9:9.1f}{mib[0]:16.1f}{mib[1]:24.1f}")
    pairs = zip(*map(jax.tree.leaves, results.values()), strict=True)
    print(f"largest difference of results and gradients: {max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs):.1e}")


if __name__ == "__main__":
    main()
