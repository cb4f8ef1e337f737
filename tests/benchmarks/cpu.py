"""How fast the products are on the CPU, beside torch's, `lax.ragged_dot`, loops over groups, and dense products.

    python -m tests.benchmarks.cpu [--json out.json] [--seconds 3] [--series] [--only 'L bfloat16' vmap]
    python -m tests.benchmarks.cpu --dry      # every path, tiny

A row is one product of one shape and dtype. Its variants take turns for `--seconds`, JAX's in this process and torch's
in another (`cpu_torch.py`), which idles meanwhile; both have all cores. In a turn a variant is called once without
being timed, as threads sleep between turns and another variant's data fills the caches, and then for 10 ms, at least
twice. The turn's figure is the median, and a row's the median of turns. Times are told as multiples of the
faster dense `[m, k] @ [k, n]` of the row, XLA's or torch's: the same FLOPs and dtype, all rows times one matrix.

A variant much slower than the others sits out turns, so as not to crowd them out; one whose first call takes longer
than the row isn't called again; the row says how many turns each had. It also says why a variant was left out: torch
isn't installed or lacks a kernel, a program wants more than 2 GiB beside its result, a loop has more than 64 groups
to compile, or its result isn't the product.

Freed memory is kept by the allocator, in both processes: otherwise each call that returns 32 MB or more would pay for
fresh pages, which no training step does.

All of it takes some twenty minutes on two idle cores, half of them for the series over groups, rows and skew. The file
is written after each row.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**28),
}
if __name__ == "__main__" and any(os.environ.get(k) != v for k, v in ENVIRONMENT.items()):
    os.execve(
        sys.executable, [sys.executable, "-m", "tests.benchmarks.cpu", *sys.argv[1:]], {**os.environ, **ENVIRONMENT}
    )

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import Array, lax  # noqa: E402

import ragged  # noqa: E402
from ragged import GroupedTensor  # noqa: E402
from tests import cases  # noqa: E402
from tests.benchmarks import cpu_torch, report  # noqa: E402
from tests.benchmarks.cpu_torch import Job, Shape  # noqa: E402
from tests.moe import clamped  # noqa: E402
from tests.moe import moe as layer_of  # noqa: E402

TURN = 0.01  # seconds
MOST_TEMPORARY = 2048  # MiB that a variant may take beside its result
MOST_UNROLLED = 64  # products of a loop over groups of static sizes
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}  # of sketches: both sum up in float32, but round the result
NO_TORCH = "torch isn't installed: `uv sync --group dev --group peers`"
Run = Callable[[], Any]


class Setting(NamedTuple):
    """What is measured."""

    dtypes: tuple[str, ...]
    shapes: dict[str, tuple[Shape, str]]  # with how the rows are spread among the groups
    series: dict[str, list[tuple[Shape, str]]]
    vmap: Shape
    gated_layer: tuple[int, int, int, int, int]  # tokens, d, hidden, experts, top_k
    gated_product: Shape


FULL = Setting(
    dtypes=("float32", "bfloat16"),
    shapes={
        "L": ((4096, 1024, 1024, 16), "random"),
        "S": ((1024, 512, 1024, 8), "random"),
        "G": ((4096, 256, 512, 64), "random"),
        "Z": ((4096, 256, 512, 128), "zipf"),
        "D": ((64, 512, 1024, 16), "random"),
        "B": ((8192, 512, 2048, 8), "random"),
    },
    series={
        "groups": [((4096, 256, 512, g), "random") for g in (1, 4, 16, 64, 128, 256, 512)],
        "rows": [((m, 256, 512, 16), "random") for m in (64, 256, 1024, 4096, 16384, 65536)],
        "skew": [((4096, 256, 512, 64), kind) for kind in ("even", "random", "zipf", "giant")],
    },
    vmap=(4096, 1024, 1024, 16),
    gated_layer=(512, 256, 512, 16, 2),
    gated_product=(1024, 512, 1024, 8),
)
DRY = Setting(
    dtypes=("bfloat16",),
    shapes={"T": ((48, 16, 32, 3), "random")},
    series={"skew": [((48, 16, 32, 3), kind) for kind in ("even", "giant")]},
    vmap=(48, 16, 32, 3),
    gated_layer=(32, 16, 32, 4, 2),
    gated_product=(48, 16, 32, 3),
)


def sizes_of(kind: str, shape: Shape) -> np.ndarray:
    """How the rows are spread: `random` cuts, `even`, by Zipf's law, or all in one group (`giant`)."""
    rng, (m, _, _, g) = np.random.default_rng(0), shape
    if kind != "random":
        return cases.spread(rng, kind, g, m)
    cuts = np.sort(rng.integers(0, m + 1, g - 1))
    return np.diff(np.concatenate([[0], cuts, [m]])).astype(np.int32)


class LeftOut(Exception):
    """Why a variant isn't measured."""


class Program(NamedTuple):
    """A compiled function with its operands, and what it cost to compile."""

    run: Run
    facts: dict[str, float]


def compiled(fn: Callable[..., Any], *args: Any) -> Program:
    """Seconds of the clock for tracing with lowering, and for compiling; memory beside operands and results."""
    start = time.perf_counter()
    lowered = jax.jit(lambda *args: fn(*args)).lower(*args)  # a function of its own, with its own cache
    middle = time.perf_counter()
    program = lowered.compile()
    end = time.perf_counter()
    memory = program.memory_analysis()
    temporary = memory.temp_size_in_bytes / 2**20 if memory is not None else float("nan")
    facts = {"trace_s": middle - start, "compile_s": end - middle, "temporary_mib": temporary}
    return Program(lambda: jax.block_until_ready(program(*args)), facts)


class Torch:
    """The process that runs torch, begun when it is first asked, and anew after it has ended."""

    def __init__(self):
        self.missing = NO_TORCH if importlib.util.find_spec("torch") is None else None
        self._process: subprocess.Popen[str] | None = None

    def ask(self, **request: Any) -> dict[str, Any]:
        if self._process is None:
            command = [sys.executable, "-m", cpu_torch.__name__, str(report.threads())]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            pass  # as if it had said nothing
        if not answer:
            raise RuntimeError(f"torch's process ended with exit status {self.close()}")
        return json.loads(answer)

    def prepare(self, job: Job) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
        """The sketch of each variant's result, and why there is no other."""
        if self.missing is None:
            try:
                answer = self.ask(prepare=job._asdict())
                return answer["made"], answer["skipped"]
            except RuntimeError as error:
                return {}, {"torch": str(error)}
        return {}, {"torch": self.missing}

    def turn(self, name: str, calls: int) -> float:
        return self.ask(turn=name, calls=calls)["seconds"]

    def close(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(BrokenPipeError), process:  # closes its input, after which it ends
            pass
        return process.returncode


def interleave(turns: dict[str, Callable[[int], float]], seconds: float) -> dict[str, dict[str, Any]]:
    """Median seconds of each, taking turns for about `seconds`. `turns[name](calls)` is the median of some calls."""
    taken: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    for name, turn in turns.items():
        first = turn(1)
        if first > seconds:
            taken[name] = [first]
        else:
            taken[name], calls[name] = [], min(max(round(TURN / turn(1)), 2), 100)
    start, spent, rounds, names = time.perf_counter(), dict.fromkeys(calls, 0.0), 0, list(calls)
    while names and (time.perf_counter() < start + seconds or rounds < 3):
        for name in names[rounds % len(names) :] + names[: rounds % len(names)]:
            before = time.perf_counter()
            if not taken[name] or spent[name] < 2 / len(names) * (before - start):
                taken[name].append(turns[name](calls[name]))
                spent[name] += time.perf_counter() - before
        rounds += 1
    return {
        name: {
            "seconds": float(np.median(times)),
            "spread": float(np.subtract(*np.quantile(times, (0.75, 0.25))) / np.median(times)),
            "turns": len(times),
        }
        for name, times in taken.items()
    }


def in_turn(programs: dict[str, Program], seconds: float) -> dict[str, dict[str, Any]]:
    """`interleave` of programs in this process."""
    return interleave({name: functools.partial(cpu_torch.turn, p.run) for name, p in programs.items()}, seconds)


@functools.lru_cache(1)
def operands(shape: Shape, dtype: str) -> tuple[Array, Array, Array]:
    """`x`, `w`, `dy`."""
    x, w, dy = (jnp.asarray(a).astype(dtype) for a in cpu_torch.data(shape))
    return x, w, dy


def with_gradient(forward: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    """`forward(x, w)` and both derivatives, for a cotangent `dy`."""

    def step(x: Array, w: Array, dy: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(forward, x, w)
        return out, *pull(dy)

    return step


def ours(product: str, sizes: Array) -> Callable[..., Any]:
    def rows(x: Array) -> GroupedTensor:
        return GroupedTensor(x, sizes)

    def forward(x: Array, w: Array) -> Array:
        return ragged.matmul(rows(x), w).data

    return {
        "forward": lambda x, w, dy: forward(x, w),
        "dgrad": lambda x, w, dy: ragged.matmul(rows(dy), GroupedTensor(w).mT).data,
        "wgrad": lambda x, w, dy: ragged.matmul(rows(x).mT, rows(dy)).data,
        "forward + backward": with_gradient(forward),
    }[product]


def ragged_dot(product: str, sizes: Array) -> Callable[..., Any]:
    def general(lhs: Array, rhs: Array, contracting: Any, group: list[int]) -> Array:
        numbers = lax.RaggedDotDimensionNumbers((contracting, ((), ())), [0], group)
        return lax.ragged_dot_general(lhs, rhs, sizes, ragged_dot_dimension_numbers=numbers)

    return {
        "forward": lambda x, w, dy: lax.ragged_dot(x, w, sizes),
        "dgrad": lambda x, w, dy: general(dy, w, ((1,), (2,)), [0]),
        "wgrad": lambda x, w, dy: general(x, dy, ((0,), (0,)), []),
        "forward + backward": with_gradient(lambda x, w: lax.ragged_dot(x, w, sizes)),
    }[product]


def loop(product: str, sizes: np.ndarray) -> Callable[..., Any]:
    """One dense product a group, of sizes known when compiling."""
    cuts = np.cumsum(sizes)[:-1].tolist()

    def pairs(a: Array, b: Array) -> Iterator[tuple[Array, Array]]:
        """Each group's rows of `a`, with its rows of `b` or its matrix."""
        matrices = [x[0] for x in jnp.split(b, len(sizes))] if b.ndim == 3 else jnp.split(b, cuts)
        return zip(jnp.split(a, cuts), matrices, strict=True)  # `split`: its derivative is a concatenation, not a sum

    def forward(x: Array, w: Array) -> Array:
        return jnp.concatenate([a @ b for a, b in pairs(x, w)])

    return {
        "forward": lambda x, w, dy: forward(x, w),
        "dgrad": lambda x, w, dy: jnp.concatenate([a @ b.T for a, b in pairs(dy, w)]),
        "wgrad": lambda x, w, dy: jnp.stack([a.T @ b for a, b in pairs(x, dy)]),
        "forward + backward": with_gradient(forward),
    }[product]


def even(product: str, g: int) -> Callable[..., Any]:
    """What equal groups cost as one einsum: all weights are read, nothing is ragged. A yardstick, not the product."""

    def batched(x: Array) -> Array:
        return x.reshape(g, -1, x.shape[1])

    def forward(x: Array, w: Array) -> Array:
        return jnp.einsum("gmk,gkn->gmn", batched(x), w).reshape(x.shape[0], -1)

    return {
        "forward": lambda x, w, dy: forward(x, w),
        "dgrad": lambda x, w, dy: jnp.einsum("gmn,gkn->gmk", batched(dy), w),
        "wgrad": lambda x, w, dy: jnp.einsum("gmk,gmn->gkn", batched(x), batched(dy)),
        "forward + backward": with_gradient(forward),
    }[product]


def variants(job: Job) -> tuple[dict[str, Program], dict[str, str]]:
    """JAX's variants of a job, and why there is no other."""
    x, w, dy = operands(job.shape, job.dtype)
    sizes, g = np.asarray(job.sizes, np.int32), job.shape[3]

    def unrolled() -> Program:
        if g > MOST_UNROLLED:
            raise LeftOut(f"unrolled, more than {MOST_UNROLLED} products would be compiled")
        return compiled(loop(job.product, sizes), x, w, dy)

    def of_sizes(build: Callable[[str, Array], Callable[..., Any]]) -> Callable[[], Program]:
        return lambda: compiled(lambda x, w, dy, s: build(job.product, s)(x, w, dy), x, w, dy, jnp.asarray(sizes))

    makers: dict[str, Callable[[], Program]] = {
        "ragged": of_sizes(ours),
        "dense XLA": lambda: compiled(lambda x, w: x @ w, x, w[0]),
        "even": lambda: compiled(even(job.product, g), x, w, dy),
        "JAX loop": unrolled,
        "lax.ragged_dot": of_sizes(ragged_dot),
    }
    made, skipped = {}, {}
    for name, maker in makers.items():
        try:
            program = maker()
            if program.facts["temporary_mib"] > MOST_TEMPORARY:
                raise LeftOut(f"more than {MOST_TEMPORARY / 1024:g} GiB of temporary memory")
            made[name] = program
        except LeftOut as why:
            skipped[name] = str(why)
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {error}"[:300]
    return made, skipped


def sketch(program: Program) -> list[list[float]]:
    out = program.run()
    return cpu_torch.sketch([np.asarray(a) for a in (out if isinstance(out, tuple) else (out,))])


def measure(job: Job, seconds: float, torch: Torch) -> dict[str, Any]:
    """The seconds of each variant, and what follows from them."""
    made, skipped = variants(job)
    if "ragged" not in made:
        raise LeftOut(skipped["ragged"])
    theirs, missing = torch.prepare(job)
    skipped |= missing
    sketches = {name: sketch(made[name]) for name in made if name in ("ragged", "JAX loop", "lax.ragged_dot")} | theirs
    turns: dict[str, Callable[[int], float]] = {
        name: functools.partial(cpu_torch.turn, program.run) for name, program in made.items()
    } | {name: functools.partial(torch.turn, name) for name in theirs}
    for name in sketches.keys() - {"dense torch"}:
        off = cpu_torch.difference(sketches[name], sketches["ragged"])
        if not off < TOLERANCE[job.dtype]:
            skipped[name] = f"its result isn't ragged's: sums over it are off by {off:.2g}"
            del turns[name]
    figures = interleave(turns, seconds)
    dense = min((name for name in figures if name.startswith("dense")), key=lambda name: figures[name]["seconds"])
    for name, figure in figures.items():
        figure |= {"of_dense": figure["seconds"] / figures[dense]["seconds"]}
        figure |= made[name].facts if name in made else {}
    return {
        "m, k, n, g": job.shape,
        "dtype": job.dtype,
        "product": job.product,
        "dense": dense,
        "figures": figures,
        "skipped": skipped,
    }


def batched(shape: Shape, seconds: float) -> dict[str, float]:
    """`vmap` over 4 elements, each with its own rows and sizes, one call of a single element for comparison."""
    m, k, n, g = shape
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(np.diff(np.sort(rng.integers(0, m + 1, (4, g - 1))), prepend=0, append=m, axis=1), jnp.int32)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((4, m, k), (g, k, n)))

    def forward(x: Array, s: Array, w: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, s), w).data

    runs = {f"single {i}": compiled(forward, x[i], sizes[i], w) for i in range(4)}
    runs["vmap"] = compiled(jax.vmap(forward, (0, 0, None)), x, sizes, w)
    times = {name: row["seconds"] for name, row in in_turn(runs, seconds).items()}
    single = float(np.mean([times[f"single {i}"] for i in range(4)]))
    return {"single_calls": times["vmap"] / single, "ms": times["vmap"] * 1e3}


def on_ragged_dot(moe: ragged.nn.MoE, x: Array) -> Array:
    """What `moe(x)` computes, on `lax.ragged_dot`."""
    e = moe.experts
    top_k, experts = moe.router.top_k, len(e.up.weight)
    weights, chosen = lax.top_k(jax.nn.softmax(x @ moe.router.weight), top_k)
    weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=experts)
    rows = x[order // top_k]
    up = lax.ragged_dot(rows, e.up.weight, sizes)
    out = lax.ragged_dot(jax.nn.silu(lax.ragged_dot(rows, e.gate.weight, sizes)) * up, e.down.weight, sizes)
    return jnp.zeros_like(x).at[order // top_k].add(out * weights.reshape(-1)[order][:, None])


def trained(layer: Callable[..., Array]) -> Callable[..., Any]:
    """A layer's result and its gradients, by itself and by `x`."""

    def run(moe: ragged.nn.MoE, x: Array, dy: Array) -> Any:
        out, pull = jax.vjp(layer, moe, x)
        return out, pull(dy)

    return run


def gated_layer(extents: tuple[int, int, int, int, int], seconds: float) -> dict[str, Any]:
    """What `nn.MoE`, forward and backward, takes to trace and compile, and to run; and the same on `lax.ragged_dot`."""
    tokens, d, hidden, experts, top_k = extents
    moe = layer_of(d, hidden, experts, top_k, key=jax.random.key(0))
    x, dy = jax.random.normal(jax.random.key(1), (2, tokens, d))

    layers = {"ragged": trained(lambda moe, x: moe(x)[0]), "lax.ragged_dot": trained(on_ragged_dot)}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    lines, programs = {}, {}

    def build(name: str) -> Program:
        jax.clear_caches()
        cpu, clock = time.process_time(), time.perf_counter()
        lowered = jax.jit(layers[name]).lower(moe, x, dy)
        program = lowered.compile()
        spent[name].append((time.process_time() - cpu, time.perf_counter() - clock))
        lines[name] = lowered.as_text().count("\n")
        return Program(lambda: jax.block_until_ready(program(moe, x, dy)), {})

    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(spent["ragged"]) < 3:  # the first also loads what compiling needs
        programs = {name: build(name) for name in layers}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), *(programs[name].run() for name in layers)
    )
    times = in_turn(programs, seconds)
    figures = {
        name: {"compile_cpu_s": cpu, "compile_s": clock, "stablehlo_lines": lines[name], **times[name]}
        for name in layers
        for cpu, clock in [np.median(spent[name][1:], axis=0).tolist()]
    }
    ours, theirs = figures["ragged"], figures["lax.ragged_dot"]
    return {
        "tokens, d, hidden, experts, top_k": extents,
        "figures": figures,
        "compile_over_ragged_dot": ours["compile_cpu_s"] / theirs["compile_cpu_s"],
        "run_over_ragged_dot": ours["seconds"] / theirs["seconds"],
    }


def gated_product(shape: Shape, dtype: str, seconds: float) -> dict[str, Any]:
    """A gated product and its gradients, beside two products and a map, and beside plain JAX on `lax.ragged_dot`."""
    x, w, _ = operands(shape, dtype)
    up, sizes = w[::-1], jnp.asarray(sizes_of("random", shape))

    def silu(gate: Array, up: Array) -> Array:
        return jax.nn.silu(gate) * up

    def mapped(function: Any, x: Array, w: Array, up: Array, sizes: Array) -> Array:
        rows = GroupedTensor(x, sizes)
        return ragged.matmul(rows, w).map(function, ragged.matmul(rows, up)).data

    def fused(function: Any, x: Array, w: Array, up: Array, sizes: Array) -> Array:
        return ragged.gated_matmul(GroupedTensor(x, sizes), w, up, activation=function).data

    def on_ragged_dot(function: Any, x: Array, w: Array, up: Array, sizes: Array) -> Array:
        return function(lax.ragged_dot(x, w, sizes), lax.ragged_dot(x, up, sizes))

    def with_gradients(layer: Callable[..., Array]) -> Callable[..., Any]:
        return lambda x, w, up, sizes: jax.grad(lambda *args: jnp.sum(layer(*args, sizes)), range(3))(x, w, up)

    layers = {"ragged": fused, "two products and a map": mapped, "lax.ragged_dot": on_ragged_dot}
    programs = {}
    for (name, layer), function in itertools.product(layers.items(), (silu, clamped)):
        of = functools.partial(layer, function)
        programs[f"{name}, {function.__name__}, forward"] = compiled(of, x, w, up, sizes)
        programs[f"{name}, {function.__name__}, gradients"] = compiled(with_gradients(of), x, w, up, sizes)
    for name, program in programs.items():
        same = programs["lax.ragged_dot, " + name.partition(", ")[2]]
        for got, want in zip(jax.tree.leaves(program.run()), jax.tree.leaves(same.run()), strict=True):
            most = float(jnp.abs(want).max())
            np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=TOLERANCE[dtype] * most)
    return {"m, k, n, g": shape, "dtype": dtype, "figures": in_turn(programs, seconds)}


Measure = Callable[[float], dict[str, Any]]


def rows(setting: Setting, torch: Torch, with_series: bool) -> Iterator[tuple[str, Measure]]:
    """Each row's name, and what measures it in about so many seconds."""

    def product(product: str, dtype: str, shape: Shape, kind: str, where: dict[str, Any]) -> Measure:
        def row(seconds: float) -> dict[str, Any]:
            job = Job(product, dtype, shape, sizes_of(kind, shape).tolist())
            return where | {"sizes": kind} | measure(job, seconds / 3 if "series" in where else seconds, torch)

        return row

    yield "compile gated layer", functools.partial(gated_layer, setting.gated_layer)
    for name, (shape, kind) in setting.shapes.items():
        for dtype in setting.dtypes:
            for p in cpu_torch.PRODUCTS:
                yield f"{name} {dtype} {p}", product(p, dtype, shape, kind, {"shape": name})
    yield "vmap", functools.partial(batched, setting.vmap)
    for dtype in setting.dtypes:
        yield f"gated product {dtype}", functools.partial(gated_product, setting.gated_product, dtype)
    for name, points in setting.series.items() if with_series else ():
        for shape, kind in points:
            at = {"groups": shape[3], "rows": shape[0], "skew": kind}[name]
            for dtype in setting.dtypes:
                for p in ("forward", "wgrad"):
                    yield f"series {name} {at} {dtype} {p}", product(p, dtype, shape, kind, {"series": name, "at": at})


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    if "error" in row:
        return row["error"]
    if "skipped" in row:
        dense = row["figures"][row["dense"]]["seconds"]
        ratios = (f"{name} {f['of_dense']:.2f}" for name, f in row["figures"].items() if name != row["dense"])
        return f"{row['dense']} {dense * 1e3:.2f} ms; times it: {', '.join(ratios)}"
    return ", ".join(f"{name} {x:.3g}" for name, x in row.items() if isinstance(x, float))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--seconds", type=float, default=3, help="for each row (default: %(default)s), series a third")
    parser.add_argument("--series", action="store_true", help="also the series over groups, rows and skew")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose names contain one of these")
    parser.add_argument("--dry", action="store_true", help="tiny shapes")
    args = parser.parse_args(arguments)
    torch, begun = Torch(), time.monotonic()
    results: dict[str, Any] = {
        "date": report.today(),
        "device": report.processor(),
        "versions": report.versions("ragged", "jax", "jaxlib", "torch", "numpy"),
        "threads": report.threads(),
        "load": report.load(),
        "seconds": args.seconds,
        "rows": [],
    }
    print(f"{results['device']}, {results['versions']}", flush=True)
    if (load := results["load"] or 0) > results["threads"] / 4:
        print(f"Others use this machine (load {load:.1f}): torch's threads wait for each other, so it suffers most.")
    if torch.missing:
        print(f"{torch.missing}. Its figures are left out.", flush=True)
    wanted = [
        (name, measure)
        for name, measure in rows(DRY if args.dry else FULL, torch, args.series)
        if any(text in name for text in args.only)
    ]
    if not wanted:
        parser.error(f"no row's name contains {' or '.join(map(repr, args.only))}")
    told: set[str] = set()
    for name, measure_row in wanted:
        start = time.monotonic()
        try:
            row = measure_row(args.seconds)
        except Exception as error:
            row: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:500]}
        results["rows"].append({"name": name, "took_s": time.monotonic() - start} | row)
        results["minutes"] = (time.monotonic() - begun) / 60
        report.save(results, args.json)
        print(f"{name}: {line(row)}", flush=True)
        for variant, why in row.get("skipped", {}).items():
            if why not in told:
                print(f"  without {variant}: {why}", flush=True)
                told.add(why)
    torch.close()
    failed = sum("error" in row for row in results["rows"])
    print(f"{len(wanted)} rows in {results['minutes']:.1f} minutes, {failed} failed", flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
