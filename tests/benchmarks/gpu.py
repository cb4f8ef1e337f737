"""How fast the products are on a GPU, beside dense products of the same FLOPs and other libraries' grouped ones.

    python -m tests.benchmarks.gpu [--json out.json] [--products forward] [--budget 540] [--tune]
    python -m tests.benchmarks.gpu --dry    # every path on the CPU, tiny and interpreted

All variants of a row take turns in one process, on the same random normal data, in rounds of a rotating order; a figure
is the median over the rounds. In a round each is called so often, without waiting in between, that the GPU is busy for
20 ms or more, then waited for: dispatch is hidden unless it is slower than the product, and `enqueue_s` says if it is.
Operands are larger than the second-level cache. "Dense" is the faster of XLA's cuBLAS and torch's, at the same dtype.

bfloat16, but for the product `fp8`: a forward of float8_e4m3fn into bfloat16, with a scale for each row of `lhs` and of
the stored `rhs [g, n, k]`; torch's has the same scales, XLA's dense one none. Nobody's tensor cores add up more than a
step; in `fp8_fast`, everybody's add up all products of a result. `fp8_blocks` has scales for 1 × 128 and 128 × 128
numbers. `gated` is `silu(x @ w) * (x @ up)`: one kernel of ours, of others two products and what follows.

The file is written after every row. What fails is noted in its row, and the others go on, unless the device is broken
or the time is over: then each other row says so, and the exit status is 1. The file keeps the rows of other products
and shapes that the same device and versions gave. So a loop over products, each in a process with a time limit,
survives what crashes or hangs.
"""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product as cartesian
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"  # dense: cuBLAS

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import ragged
from ragged.backends.base import Target
from ragged.backends.gpu import tiles as triton_tiling
from ragged.core.scales import Scales
from ragged.product.config import GpuConfig
from tests import gpu, products
from tests.benchmarks import report
from tests.cases import spread

SHAPES = [  # rows, k, n, groups: the most important first
    (8192, 4096, 14336, 8),
    (65536, 2048, 1408, 64),
    (64, 4096, 14336, 8),
    (131072, 7168, 2048, 256),
    (4096, 2048, 768, 128),
    (32768, 6144, 4096, 32),
]
TINY = (48, 64, 32, 3)
OPERANDS = {  # of `Data`; the most important first
    "forward": ("x", "w"),
    "wgrad": ("x", "dy"),
    "dgrad": ("dy", "w"),
    "gated": ("x", "w", "up"),
    "fp8_fast": ("x8", "w8", "x_scales", "w_scales"),
    "fp8": ("x8", "w8", "x_scales", "w_scales"),
    "fp8_blocks": ("x8", "w8", "x_blocks", "w_blocks"),
}
CONTRACTED = {"forward": (1, 0), "gated": (1, 0), "wgrad": (0, 0)}  # axes of dense operands; for others, (1, 1)
FP8 = {"fp8": "highest", "fp8_fast": "default", "fp8_blocks": "highest"}  # precisions of XLA's dense products
PEERS = ("dense", "ragged_dot", "torch", "tokamax")
SPREADS = ("even", "zipf")
BANDWIDTH = 4.8e12  # of an H200's memory, bytes a second, by its data sheet
BLOCK = 128  # of scales
MOST_TEMPORARY = 40 << 30  # bytes that a variant may take,
MOST_WASTE = 32  # and the FLOPs, as a multiple of those it needs
Shape = tuple[int, int, int, int]
Run = Callable[..., Any]


class Setting(NamedTuple):
    dry: bool
    rounds: int
    busy: float  # seconds a variant in a round


DRY, QUICK, FULL = Setting(True, 2, 0.0), Setting(False, 3, 0.02), Setting(False, 7, 0.02)


class Data(NamedTuple):
    x: Array  # [m, k]
    w: Array  # [g, k, n]
    dy: Array  # [m, n]
    up: Array  # [g, k, n]
    x8: Array
    w8: Array  # [g, n, k]
    x_scales: Array  # [m, 1]
    w_scales: Array  # [g, n, 1]
    x_blocks: Array  # [m, k / 128]
    w_blocks: Array  # [g, n / 128, k / 128]

    @property
    def flops(self) -> float:
        return 2.0 * self.x.size * self.dy.shape[1]


@partial(jax.jit, static_argnums=0)
def make(shape: Shape) -> Data:
    m, k, n, g = shape
    keys = iter(jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 8))
    x, w, dy, up = (jax.random.normal(next(keys), s, jnp.bfloat16) for s in ((m, k), (g, k, n), (m, n), (g, k, n)))
    of_rows, of_blocks = ((m, 1), (g, n, 1)), ((m, -(-k // BLOCK)), (g, -(-n // BLOCK), -(-k // BLOCK)))
    scales = [jax.random.uniform(next(keys), s, minval=0.5) for s in (*of_rows, *of_blocks)]
    return Data(x, w, dy, up, x.astype(jnp.float8_e4m3fn), w.mT.astype(jnp.float8_e4m3fn), *scales)


class Variant(NamedTuple):
    """One competitor, ready to be called with the groups' sizes in its own form."""

    run: Run
    wait: Callable[[Any], Any]
    sizes: Callable[[np.ndarray], Any]
    temporary: int | None = None  # bytes of memory, besides operands and results


def compiled(function: Run, operands: Sequence[Array], sizes: np.ndarray, flops: float) -> Variant:
    """A JAX function of the operands and sizes."""
    run = jax.jit(lambda *args: function(*args))  # a function of its own, with its own cache
    program = run.lower(*operands, jnp.asarray(sizes)).compile()
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    if memory is not None and memory.temp_size_in_bytes > MOST_TEMPORARY:
        raise MemoryError(f"{memory.temp_size_in_bytes / 2**30:.0f} GiB of temporaries")
    if (waste := cost.get("flops", 0) / flops) > MOST_WASTE:
        raise MemoryError(f"{waste:.0f} times the FLOPs")
    temporary = None if memory is None else memory.temp_size_in_bytes
    return Variant(partial(run, *operands), jax.block_until_ready, jnp.asarray, temporary)


def ours(product: str, dry: bool, config: GpuConfig | None = None) -> Run:
    """`ragged`'s kernel, in the library's choice of tiles or in another configuration."""
    config = replace(config or GpuConfig(), interpret=dry)
    options: dict[str, Any] = {"backend": config}
    if product == "wgrad":
        return lambda x, dy, sizes: ragged.transposed_grouped_matmul(x.T, dy, sizes, **options)
    if product == "gated":
        return lambda x, w, up, sizes: (
            ragged.gated_matmul(ragged.GroupedTensor(x, first_dims=sizes), w, up, **options).data
        )
    if product not in FP8:
        return partial(ragged.grouped_matmul, transpose_rhs=product == "dgrad", **options)
    device: Any = jax.devices()[0]  # told to the kernel as the lowering rule does
    kind = (f"{device.device_kind} {device.compute_capability}", device.core_count) if not dry else ("NVIDIA L4", 0)

    blocks = ((1, BLOCK), (BLOCK, BLOCK)) if product == "fp8_blocks" else ((1, None), (1, None))

    def fp8(x: Array, w: Array, x_scales: Array, w_scales: Array, sizes: Array) -> Array:
        with ragged.tuning.using(replace(config, interpret=False), cached=False):
            return products.grouped_matmul(
                "triton_gpu",
                x,
                w,
                sizes,
                precision="ANY_F8_ANY_F8_F32_FAST_ACCUM" if product == "fp8_fast" else None,
                preferred_element_type=jnp.bfloat16,
                transpose_rhs=True,
                lhs_scales=Scales(x_scales, blocks[0]),
                rhs_scales=Scales(w_scales, blocks[1]),
                target=Target(interpret=dry, device=kind),
            )

    return fp8


def dense(product: str) -> Run:
    """One product of the same FLOPs."""
    a, b = CONTRACTED.get(product, (1, 1))
    options: dict[str, Any] = {"precision": FP8.get(product), "preferred_element_type": jnp.bfloat16}

    def dot(lhs: Array, rhs: Array, *more: Array) -> Array:
        return lax.dot_general(lhs, rhs, (((a,), (b,)), ((), ())), **options)

    return gated(dot) if product == "gated" else dot


def gated(product: Run) -> Run:
    """`silu(x @ w) * (x @ up)` by two products."""
    return lambda x, w, up, sizes: jax.nn.silu(product(x, w, sizes)) * product(x, up, sizes)


def ragged_dot(module: str, product: str, data: Data) -> Run:
    """That of `jax.lax`, or of another module with its interface."""
    lib: Any = importlib.import_module(module)
    if product in FP8:
        raise NotImplementedError("no scales")
    # XLA multiplies a masked copy of the rows for each group; it would try that out before it says what it takes.
    if module == "jax.lax" and (len(data.w) > MOST_WASTE or data.x.nbytes * len(data.w) > MOST_TEMPORARY):
        raise MemoryError(f"{len(data.w)} copies of the rows, masked")
    if product == "wgrad":
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return partial(lib.ragged_dot_general, ragged_dot_dimension_numbers=numbers)
    if product == "gated":
        return gated(lib.ragged_dot)
    return lib.ragged_dot if product == "forward" else lambda dy, w, sizes: lib.ragged_dot(dy, w.mT, sizes)


def torch_variant(product: str, operands: Sequence[Array], grouped: bool) -> Variant:
    """Torch's grouped product, which is given the ends of the groups, or its dense one; on the same memory."""
    torch: Any = importlib.import_module("torch")
    if product == "fp8_blocks":
        raise NotImplementedError("no blocks of scales on Hopper")

    def take(x: Array) -> Any:
        if x.dtype != jnp.float8_e4m3fn:
            return torch.from_dlpack(jax.block_until_ready(x))
        return torch.from_dlpack(jax.block_until_ready(x.view(jnp.uint8))).view(torch.float8_e4m3fn)

    a, b, *more = map(take, operands)
    a = a.t() if product == "wgrad" else a
    b = b.transpose(-2, -1) if product not in CONTRACTED else b
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": product == "fp8_fast"}

    def multiply(b: Any, ends: Any) -> Any:
        return torch._grouped_mm(a, b, offs=ends) if grouped else torch.mm(a, b if product == "wgrad" else b[0])

    def run(ends: Any) -> Any:
        if product == "gated":
            return torch.nn.functional.silu(multiply(b, ends)) * multiply(more[0], ends)
        if product not in FP8:
            return multiply(b, ends)
        x_scales, w_scales = (scale[..., 0] for scale in more)  # (m,), [g, n]
        if grouped:
            return torch._scaled_grouped_mm(a, b, x_scales, w_scales, offs=ends, **options)
        return torch._scaled_mm(a, b[0], x_scales[:, None], w_scales[:1], **options)

    def ends(sizes: np.ndarray) -> Any:
        return torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")

    return Variant(run, lambda _: torch.cuda.synchronize(), ends)


def variants(
    product: str, data: Data, sizes: np.ndarray, peers: Sequence[str], setting: Setting
) -> tuple[dict[str, Variant], dict[str, str]]:
    """All competitors that there are for a product, and why there is no other."""
    operands = [getattr(data, name) for name in OPERANDS[product]]
    matrices = [each if product == "wgrad" or each.ndim < 3 else each[0] for each in operands]
    matrices = matrices if product == "gated" else matrices[:2]
    build = partial(compiled, sizes=sizes, flops=data.flops)
    makers: dict[str, Callable[[], Variant]] = {
        "ours": lambda: build(ours(product, setting.dry), operands),
        "dense": lambda: build(dense(product), matrices),
        "dense torch": lambda: torch_variant(product, operands, grouped=False),
        "torch": lambda: torch_variant(product, operands, grouped=True),
        "ragged_dot": lambda: build(ragged_dot("jax.lax", product, data), operands),
        "tokamax": lambda: build(ragged_dot("tokamax", product, data), operands),
    }
    made, failed = {}, {}
    for name, maker in makers.items():
        if name == "ours" or name.split()[0] in peers:
            try:
                variant = maker()
                variant.wait(variant.run(variant.sizes(sizes)))
                made[name] = variant
            except Exception as error:
                failed[name] = reason(error)
    return made, failed


def reason(error: Exception) -> str:
    """In a sentence. Raises the error again if the device is broken: nothing that follows would be true."""
    if not gpu.is_well():
        raise error
    return sentence(error)


def sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def interleave(runs: dict[str, Variant], sizes: np.ndarray, setting: Setting) -> dict[str, dict[str, Any]]:
    """Median seconds of each."""
    given = {name: variant.sizes(sizes) for name, variant in runs.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    calls = dict.fromkeys(runs, 0)
    failed: dict[str, dict[str, Any]] = {}

    def burst(name: str, calls: int) -> tuple[float, float]:
        """Seconds a call, until it is enqueued and until it is done."""
        out, start = None, time.perf_counter()
        for _ in range(calls):
            out = runs[name].run(given[name])
        middle = time.perf_counter()
        runs[name].wait(out)
        return (middle - start) / calls, (time.perf_counter() - start) / calls

    names = list(runs)
    for i in range(1 + setting.rounds if runs else 0):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            try:
                if name in failed:
                    continue
                if i == 0:  # how many it takes, once warm
                    burst(name, 1)
                    calls[name] = 1 + int(setting.busy / burst(name, 1 if setting.dry else 3)[1])
                else:
                    taken[name].append(burst(name, calls[name]))
            except Exception as error:
                failed[name] = {"error": reason(error)}
    medians = {name: np.median(taken[name], axis=0).tolist() for name in names if name not in failed}
    return {
        name: {"seconds": done, "enqueue_s": enqueued, "temporary_bytes": runs[name].temporary}
        for name, (enqueued, done) in medians.items()
    } | failed


def add_ratios(product: str, shape: Shape, sizes: np.ndarray, figures: dict[str, dict[str, Any]]) -> None:
    """Adds to the seconds what follows from them."""
    m, k, n, g = shape
    size, held = 1 if product in FP8 else 2, int(np.count_nonzero(sizes))  # nobody reads an empty group's matrix
    count = 2 if product == "gated" else 1  # products
    moved = 2 * (m * k + m * n + g * k * n) if product == "wgrad" else size * (m * k + count * held * k * n) + 2 * m * n
    seconds = {name: row["seconds"] for name, row in figures.items() if "seconds" in row}
    whole = min((s for name, s in seconds.items() if "dense" in name), default=None)
    for name, s in seconds.items():
        figures[name]["tflops"] = 2 * count * m * k * n / s / 1e12
        if "dense" in name:
            continue
        figures[name] |= {"gb_per_s": moved / s / 1e9, "of_memory_roofline": moved / s / BANDWIDTH}
        if whole:
            figures[name]["of_dense"] = whole / s
    if "ours" in seconds:
        figures["ours"]["speed_over"] = {name: s / seconds["ours"] for name, s in seconds.items() if name != "ours"}


def differences(runs: dict[str, Variant], sizes: np.ndarray) -> dict[str, float | str]:
    """How far other grouped products are from ours, ‖theirs - ours‖ / ‖ours‖: all must be the same product."""

    @jax.jit
    def distance(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))

    def result(name: str) -> Array:
        out = runs[name].run(runs[name].sizes(sizes))
        runs[name].wait(out)
        return out if isinstance(out, Array) else jnp.from_dlpack(out)

    found: dict[str, float | str] = {}
    for name in runs:
        if name != "ours" and "dense" not in name:
            try:
                found[name] = float(distance(result(name), result("ours")))
            except Exception as error:
                found[name] = reason(error)
    return found


@contextmanager
def problems() -> Iterator[list[tuple[triton_tiling.Problem, triton_tiling.Chip]]]:
    """The problems that tiles are chosen for in here."""
    found, choose = [], triton_tiling.choose
    with mock.patch.object(triton_tiling, "choose", lambda *problem: found.append(problem) or choose(*problem)):
        yield found


def others(chosen: GpuConfig, problem: triton_tiling.Problem, on: triton_tiling.Chip) -> list[GpuConfig]:
    """What is tried beside the library's choice."""
    found = [replace(chosen, band=band) for band in (1, 4, 16)] + triton_tiling.ranked(problem, on)[1:]
    return found[:72]


def tune(product: str, shape: Shape, setting: Setting) -> dict[str, Any]:
    """A row: the seconds of the default configuration, and of others, on sizes that fall off by Zipf's law."""
    sizes, data = spread(np.random.default_rng(0), "zipf", shape[3], shape[0]), make(shape)
    operands = [getattr(data, name) for name in OPERANDS[product]]

    def attempt(config: GpuConfig | None) -> Variant | str:
        try:
            return compiled(ours(product, setting.dry, config), operands, sizes, data.flops)
        except Exception as error:
            return reason(error)

    with problems() as asked:
        first = attempt(None)
    assert asked, first
    problem = asked[-1]  # those before it are of checks at the call, which don't know the device
    chosen = triton_tiling.choose(*problem)
    configs = {str(config): config for config in others(chosen, *problem)[: 2 if setting.dry else None]}
    with ThreadPoolExecutor(12) as pool:
        made = {"default": first, **dict(zip(configs, pool.map(attempt, configs.values()), strict=True))}
    runs = {name: variant for name, variant in made.items() if isinstance(variant, Variant)}
    figures = interleave(runs, sizes, setting._replace(rounds=min(3, setting.rounds), busy=setting.busy / 2))
    seconds = {name: row["seconds"] for name, row in figures.items() if "seconds" in row}
    best = min(seconds, key=lambda name: seconds[name], default=None)
    return {
        "product": product,
        "shape": shape,
        "problem": problem[0]._asdict(),
        "default": str(chosen),
        "best": best,
        "best_over_default": seconds["default"] / seconds[best] if best and "default" in seconds else None,
        "seconds": dict(sorted(seconds.items(), key=lambda item: item[1])),
        "failed": {name: error for name, error in made.items() if isinstance(error, str)}
        | {name: row["error"] for name, row in figures.items() if "error" in row},
    }


def said(*command: str) -> str | None:
    """What a command prints; None without it."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def clocks() -> str | None:
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu"
    return said("nvidia-smi", "--format=csv,noheader", query)


def line(row: dict[str, Any]) -> str:
    """A row of the table that is printed: as ours, then how many times as long each other takes."""
    mine, head = row["figures"].get("ours", {}), f"{row['product']:<11}{tuple(row['shape'])!s:<26}{row['sizes']:<5}"
    if "seconds" not in mine:
        return head + str(mine.get("error", row["failed"].get("ours")))[:90]
    distant = {name: each for name, each in row["differences"].items() if isinstance(each, str) or not each < 1e-2}
    others = ", ".join(
        f"{name} {ratio:.2f}" + (f" (DIFFERS: {str(distant[name])[:20]})" if name in distant else "")
        for name, ratio in mine["speed_over"].items()
    )
    return (
        f"{head}{mine['seconds'] * 1e6:9.1f} µs {mine['tflops']:6.1f} TFLOP/s {mine.get('of_dense', 0):5.2f} of dense "
        f"{mine['of_memory_roofline']:5.2f} of memory | {others}"
    )


def measure(product: str, shape: Shape, peers: Sequence[str], setting: Setting) -> Iterator[dict[str, Any]]:
    """A row for each way to spread the sizes."""
    rng, data = np.random.default_rng(0), jax.block_until_ready(make(shape))
    sizes = {kind: spread(rng, kind, shape[3], shape[0]) for kind in SPREADS}
    with problems() as asked:
        runs, failed = variants(product, data, sizes[SPREADS[-1]], peers, setting)
    model_s = None
    if asked:  # of even sizes
        problem, chip = asked[-1]
        model_s, _ = triton_tiling.seconds(problem, triton_tiling.choose(problem, chip), chip)
    for kind in SPREADS:
        figures = interleave(runs, sizes[kind], setting)
        add_ratios(product, shape, sizes[kind], figures)
        row = {"product": product, "shape": shape, "sizes": kind, "figures": figures, "failed": failed}
        row["model_s"] = model_s
        yield row | {"clocks": clocks(), "differences": differences(runs, sizes[kind])}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "date": time.strftime("%F %H:%M"),
        "device": jax.devices()[0].device_kind,
        "versions": report.versions("ragged", "jax", "jaxlib", "triton", "jax-triton", "torch", "tokamax"),
        "commit": said("git", "describe", "--always", "--dirty"),
        "clocks": clocks(),
        "ptxas": shutil.which("ptxas"),
    }


def tuned_line(row: dict[str, Any]) -> str:
    ratio = row["best_over_default"]
    best = f"best {row['best']}" + (f", {ratio:.2f} times as fast" if ratio else ", nothing to compare it with")
    return f"{row['product']:<11}{tuple(row['shape'])!s:<26}default {row['default']}; {best}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--shapes", nargs="+", metavar="ROWS,K,N,GROUPS", help="in this order (default: six)")
    parser.add_argument("--products", nargs="+", choices=OPERANDS, default=list(OPERANDS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--quick", action="store_true", help="three rounds in place of seven")
    parser.add_argument("--tune", action="store_true", help="also try other configurations than the library's choice")
    parser.add_argument("--budget", type=float, default=540, help="begin no row after these seconds (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, interpreted on the CPU")
    args = parser.parse_args(arguments)
    end = time.monotonic() + args.budget
    shapes: list[Any] = [tuple(map(int, shape.split(","))) for shape in args.shapes or []] or SHAPES
    shapes = [TINY] if args.dry else shapes
    setting = DRY if args.dry else QUICK if args.quick else FULL
    results: dict[str, Any] = machine() | {"rows": [], "tuned": []}
    chosen = list(cartesian(args.products, shapes))
    if args.json and os.path.exists(args.json):
        before = json.loads(Path(args.json).read_text())
        if all(before.get(name) == results[name] for name in ("device", "versions", "commit")):
            for name in ("rows", "tuned") if args.tune else ("rows",):
                before[name] = [row for row in before[name] if (row["product"], tuple(row["shape"])) not in chosen]
            results |= {name: before[name] for name in ("rows", "tuned")}
        report.save(results, args.json)
    print(results["device"], results["versions"], results["clocks"], flush=True)

    def measure_one(product: str, shape: Shape) -> None:
        for row in measure(product, shape, args.peers, setting):
            results["rows"].append(row)
            report.save(results, args.json)
            print(line(row), flush=True)

    def tune_one(product: str, shape: Shape) -> None:
        results["tuned"].append(row := tune(product, shape, setting))
        print(tuned_line(row), flush=True)

    steps = [(measure_one, *each) for each in chosen] + [(tune_one, *each) for each in chosen if args.tune]
    stopped = ""
    for step, product, shape in steps:
        stopped = stopped or ("the time is over" if time.monotonic() > end else "")
        failed = {"product": product, "shape": shape, "error": stopped}
        try:
            if not stopped:
                step(product, shape)
        except Exception as error:
            failed["error"] = sentence(error)
            stopped = "" if gpu.is_well() else "the device is broken"
            print(product, shape, failed["error"], flush=True)
        if failed["error"]:
            results["tuned" if step is tune_one else "rows"].append(failed)
        report.save(results, args.json)
    if stopped:
        raise SystemExit(stopped)


if __name__ == "__main__":
    main()
