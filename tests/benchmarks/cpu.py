"""How fast the products are on the CPU, as ratios to one dense matmul of the same FLOPs.

    python -m tests.benchmarks.cpu [--json out.json] [--seconds 20]

All variants of a row run in turn in one process; ratios are of medians. Freed memory is kept by the allocator, for all
sides alike: otherwise each call that returns 32 MB or more would pay for fresh pages, which no training step does.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any

ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**28),
}
if __name__ == "__main__" and any(os.environ.get(k) != v for k, v in ALLOCATOR.items()):
    os.execve(
        sys.executable, [sys.executable, "-m", "tests.benchmarks.cpu", *sys.argv[1:]], {**os.environ, **ALLOCATOR}
    )

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import Array  # noqa: E402

import ragged  # noqa: E402
from ragged import GroupedTensor  # noqa: E402

SHAPES = {"L": (4096, 1024, 1024, 16), "G": (4096, 256, 512, 64)}  # rows, k, n, groups
EXPERT_LAYER = (8192, 512, 1024, 64, 2)  # tokens, d, hidden, experts, top_k


def uniform_split(rng: np.random.Generator, g: int, total: int) -> np.ndarray:
    """Sizes between `g - 1` random cuts."""
    cuts = np.sort(rng.integers(0, total + 1, g - 1))
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int32)


def compiled(fn: Callable[..., Any], *args: Any) -> tuple[Callable[[], Any], dict[str, float]]:
    """A call of the compiled function, the seconds that tracing with lowering and compiling took, and its memory."""
    start = time.perf_counter()
    lowered = jax.jit(fn).lower(*args)
    middle = time.perf_counter()
    run = lowered.compile()
    end = time.perf_counter()
    memory = run.memory_analysis()
    temporary = memory.temp_size_in_bytes / 2**20 if memory is not None else float("nan")
    return lambda: run(*args), {"trace_s": middle - start, "compile_s": end - middle, "temporary_mib": temporary}


def interleave(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median seconds of each, taking turns for about `seconds`."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(taken.values()))) < 5:
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            taken[name].append(time.perf_counter() - start)
    return {name: float(np.median(times)) for name, times in taken.items()}


def products(shape: tuple[int, int, int, int], dtype: Any, seconds: float) -> dict[str, Any]:
    """Forward, dgrad, wgrad and a whole training step of one shape."""
    m, k, n, g = shape
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(uniform_split(rng, g, m))

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    x, w, dy, dense = normal(m, k), normal(g, k, n), normal(m, n), normal(k, n)

    def forward(x: Array, w: Array, s: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, s), w).data

    def step(x: Array, w: Array, dy: Array, s: Array) -> tuple[Array, tuple[Array, Array]]:
        out, pull = jax.vjp(lambda x, w: forward(x, w, s), x, w)
        return out, pull(dy)

    # What equal groups cost as one einsum: all weights are read, nothing is ragged.
    def even(spec: str, *operands: Array) -> Array:
        return jnp.einsum(spec, *(x.reshape(g, m // g, -1) if x.ndim == 2 else x for x in operands))

    variants = {
        "dense": compiled(lambda x, w: x @ w, x, dense),
        "even forward": compiled(lambda x, w: even("gmk,gkn->gmn", x, w), x, w),
        "even wgrad": compiled(lambda x, d: even("gmk,gmn->gkn", x, d), x, dy),
        "forward": compiled(forward, x, w, sizes),
        "dgrad": compiled(lambda d, w, s: ragged.matmul(GroupedTensor(d, s), GroupedTensor(w).mT).data, dy, w, sizes),
        "wgrad": compiled(
            lambda x, d, s: ragged.matmul(GroupedTensor(x, s).mT, GroupedTensor(d, s)).data, x, dy, sizes
        ),
        "forward + backward": compiled(step, x, w, dy, sizes),
    }
    times = interleave({name: run for name, (run, _) in variants.items()}, seconds)
    report = {
        name: {"ratio_to_dense": times[name] / times["dense"], "ms": times[name] * 1e3, **variants[name][1]}
        for name in variants
    }
    # Apart: it is so slow that it would crowd out the others' samples.
    peer = {"forward": variants["forward"][0], "ragged_dot": compiled(jax.lax.ragged_dot, x, w, sizes)[0]}
    times = interleave(peer, seconds / 2)
    report["lax.ragged_dot"] = {
        "times_as_long_as_forward": times["ragged_dot"] / times["forward"],
        "ms": times["ragged_dot"] * 1e3,
    }
    return report


def batched(seconds: float) -> dict[str, float]:
    """`vmap` over 4 elements, each with its own rows and sizes, one call of a single element for comparison."""
    m, k, n, g = SHAPES["L"]
    rng = np.random.default_rng(0)
    sizes = jnp.stack([jnp.asarray(uniform_split(rng, g, m)) for _ in range(4)])
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((4, m, k), (g, k, n)))

    def forward(x: Array, s: Array, w: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, s), w).data

    runs = {f"single {i}": compiled(forward, x[i], sizes[i], w)[0] for i in range(4)}
    runs["vmap"] = compiled(jax.vmap(forward, (0, 0, None)), x, sizes, w)[0]
    times = interleave(runs, seconds)
    single = float(np.mean([times[f"single {i}"] for i in range(4)]))
    return {"single_calls": times["vmap"] / single, "ms": times["vmap"] * 1e3}


def expert_layer(seconds: float) -> dict[str, Any]:
    """An expert layer without its router: what routing costs beside its two products, and beside `lax.ragged_dot`."""
    tokens, d, hidden, experts, top_k = EXPERT_LAYER
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    x, up, down = normal(tokens, d), normal(experts, d, hidden), normal(experts, hidden, d)
    weights = jnp.asarray(rng.random((tokens, top_k)), jnp.float32)
    ids = jnp.asarray(np.argsort(rng.random((tokens, experts)))[:, :top_k], jnp.int32)
    rows = jax.jit(lambda x, ids: ragged.route(ids, experts).dispatch(x))(x, ids)

    def dispatch_and_combine(x: Array, ids: Array, weights: Array) -> Array:
        route = ragged.route(ids, experts)
        return route.combine(route.dispatch(x), weights)

    def two_products(rows: Array, sizes: Array, up: Array, down: Array) -> Array:
        return ragged.matmul(ragged.matmul(GroupedTensor(rows, sizes), up), down).data

    def layer(x: Array, ids: Array, weights: Array, up: Array, down: Array) -> Array:
        route = ragged.route(ids, experts)
        hidden = ragged.matmul(route.dispatch(x), up).map(jax.nn.silu)
        return route.combine(ragged.matmul(hidden, down), weights)

    def on_ragged_dot(x: Array, ids: Array, weights: Array, up: Array, down: Array) -> Array:
        order = jnp.argsort(ids.reshape(-1))
        sizes = jnp.bincount(ids.reshape(-1), length=experts)
        hidden = jax.nn.silu(jax.lax.ragged_dot(x[order // top_k], up, sizes))
        out = jax.lax.ragged_dot(hidden, down, sizes) * weights.reshape(-1)[order][:, None]
        return jnp.zeros_like(x).at[order // top_k].add(out)

    args = x, ids, weights, up, down
    of = {
        "dispatch and combine": compiled(dispatch_and_combine, x, ids, weights)[0],
        "two products": compiled(two_products, rows.data, rows.first_dims, up, down)[0],
        "layer": compiled(layer, *args)[0],
    }
    peer = compiled(on_ragged_dot, *args)[0]
    np.testing.assert_allclose(of["layer"](), peer(), rtol=1e-3, atol=1e-2)
    times = interleave(of, seconds)
    both = interleave({"layer": of["layer"], "ragged_dot": peer}, seconds)
    return {
        "tokens, d, hidden, experts, top_k": EXPERT_LAYER,
        "ms": {name: each * 1e3 for name, each in times.items()},
        "dispatch_and_combine_of_two_products": times["dispatch and combine"] / times["two products"],
        "ragged_dot_times_as_long": both["ragged_dot"] / both["layer"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--seconds", type=float, default=20, help="for each row (default: %(default)s)")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "jax": jax.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(f"jax {jax.__version__}, {report['machine']}\n")
    for name, shape in SHAPES.items():
        for dtype in ("float32", "bfloat16"):
            rows = report[f"{name} {dtype}"] = {"m, k, n, g": shape, **products(shape, dtype, args.seconds)}
            print(f"{name} {shape} {dtype}: dense {rows['dense']['ms']:.2f} ms")
            for product in ("even forward", "even wgrad", "forward", "dgrad", "wgrad", "forward + backward"):
                row = rows[product]
                print(
                    f"  {product:<20}{row['ratio_to_dense']:6.2f} × dense   trace {row['trace_s']:.2f} s   "
                    f"compile {row['compile_s']:.2f} s   temporary {row['temporary_mib']:.1f} MiB"
                )
            print(
                f"  lax.ragged_dot      {rows['lax.ragged_dot']['times_as_long_as_forward']:6.1f} × forward", flush=True
            )
    report["vmap"] = batched(args.seconds)
    print(f"vmap over 4 elements: {report['vmap']['single_calls']:.2f} single calls")
    row = report["expert layer"] = expert_layer(args.seconds)
    part, slower = row["dispatch_and_combine_of_two_products"], row["ragged_dot_times_as_long"]
    print(f"expert layer {EXPERT_LAYER}: dispatch and combine are {part:.2f} of the two products;")
    print(f"  on lax.ragged_dot it takes {slower:.0f} times as long")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
