"""The first minutes on a GPU, the most telling first, with what is known so far always on disk:

    python -m tests.benchmarks.gpu --first --json first.json --budget 500
    python -m tests.benchmarks.gpu --first launch sweep --json more.json     # some of the steps

1. `launch`: each layout once, on poisoned memory, against NumPy in float64; tiles loaded by TMA and by pointers.
2. `graph`: a program of several products, and a scan over them, called again and again, as a training step is.
3. `test`: a sample of the tests marked `gpu`.
4. `measure`: the six shapes beside dense products and other libraries'.
5. `sweep`: three shapes in other tiles, stages, warps; the library's choice with other programs, bands, and no TMA.

A variant that crashes, hangs or breaks the device costs itself alone: see `watched`. Power and clocks are
sampled each second.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.benchmarks import gpu as bench  # sets what JAX reads when it is imported
from tests.benchmarks import report
from tests.benchmarks.watched import Child, Row, Step, is_broken_on_purpose, watch

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import ragged
from ragged.backends.gpu import call as triton_call
from ragged.backends.gpu import tiles
from ragged.product.config import GpuConfig
from tests import cases, gpu, oracle

KINDS = ("launch", "graph", "test", "measure", "sweep")
SAMPLE = "poison or (every_layout and bfloat16) or (gradients and bfloat16) or (twenty and bfloat16) or at_size"
QUIET = 90  # seconds: the longest compilation of a row takes a third of it
STUCK = 20  # of what is compiled already
SAMPLED = "timestamp,power.draw,clocks.sm,clocks.mem,temperature.gpu,utilization.gpu"


def plan(kinds: Sequence[str], dry: bool) -> list[Step]:
    """The steps, the most telling first."""
    shapes = [bench.TINY] if dry else bench.SHAPES
    found: dict[str, list[Step]] = {
        # The first two tell what is wrong with TMA from what is wrong with all.
        "launch": sorted(
            ({"layout": layout, "by": by} for by in ("tma", "pointers") for layout in cases.NAMES),
            key=lambda step: step["layout"] != "forward",
        ),
        "graph": [{"graphs": graphs} for graphs in ("on", "off")],
        "test": [{}],
        "measure": [{"product": product, "shape": shape} for shape in shapes for product in bench.OPERANDS],
        "sweep": [{"product": product, "shape": s} for product in ("forward", "wgrad", "fp8") for s in shapes[:3]],
    }
    return [
        {"name": " ".join([kind, *map(str, step.values())]), "kind": kind, "dry": dry, **step}
        for kind in kinds
        for step in found[kind]
    ]


def launch(step: Step) -> Iterator[Row]:
    """One layout, with whole tiles and none, and NaN in the tails."""
    extents: Any = {"capacity": 1024, "uniform": (144, 208, 272)} if not step["dry"] else {"capacity": 97}
    case = cases.make(step["layout"], dtype="bfloat16", kind="zipf", g=8, **extents)
    choose, (poisoned, names) = tiles.choose, gpu.poisoning()
    options: Any = {"backend": GpuConfig(interpret=step["dry"])}
    start = time.perf_counter()
    with (
        gpu.on("NVIDIA H200") if step["dry"] else nullcontext(),
        mock.patch.object(tiles, "choose", lambda *a: replace(choose(*a), tma=step["by"] == "tma")),
        mock.patch.object(triton_call.load(), "triton_call", poisoned),
    ):
        out = jax.block_until_ready(jax.jit(partial(ragged.matmul, **options))(case.lhs, case.rhs))
    row = {"layout": step["layout"], "by": step["by"], "seconds": time.perf_counter() - start, "kernels": names}
    assert step["dry"] or names, "no Triton kernel ran"
    yield row | judged(case, out)


def judged(case: cases.Case, out: Any) -> Row:
    """Whether a result in bfloat16 is right."""
    try:
        got = case.unpack(np.asarray(out.data).astype(np.float64))
        oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), *cases.TOLERANCE["bfloat16"])
        case.assert_tail_zero(out)
        return {"right": True}
    except AssertionError as error:
        return {"right": False, "error": str(error)[:500]}


def graph(step: Step) -> Iterator[Row]:
    """Several products in one program, and in a scan, whose later calls are of a CUDA graph; against XLA's own."""
    groups, rows, width = (8, 512, 256) if not step["dry"] else (3, 32, 16)
    data, matrices = jax.random.split(jax.random.key(0))
    sizes = jnp.full(groups, rows // (groups + 1), jnp.int32)
    w = jax.random.normal(matrices, (6, groups, width, width), jnp.bfloat16) / width**0.5

    def chain(x: Array, backend: str, scanned: bool) -> Array:
        def layer(x: Array, w: Array) -> tuple[Array, None]:
            interpret = step["dry"] and backend == "triton_gpu"
            return jnp.tanh(ragged.grouped_matmul(x, w, sizes, backend=backend, interpret=interpret)), None

        if scanned:
            return lax.scan(layer, x, w)[0]
        for each in w:
            x, _ = layer(x, each)
        return x

    options = {} if step["graphs"] == "on" or step["dry"] else {"xla_gpu_enable_command_buffer": ""}
    for scanned in (False, True):
        start, name = time.perf_counter(), "scan" if scanned else "chain"
        own = jax.jit(partial(chain, backend="triton_gpu", scanned=scanned), compiler_options=options)
        xla = jax.jit(partial(chain, backend="xla", scanned=scanned))
        for call in range(1 if step["dry"] else 4):
            x = jax.random.normal(jax.random.fold_in(data, call), (rows, width), jnp.bfloat16)
            got, want = (np.asarray(f(x).astype(jnp.float32)) for f in (own, xla))
            row = {"program": name, "call": call, "seconds": time.perf_counter() - start}
            yield row | {"right": bool(np.abs(got - want).max() < 0.1)}


def test(step: Step, child: Child) -> Iterator[Row]:
    """Pytest's closing line, and what failed."""
    selected = ["tests/backends/gpu/test_on_gpu.py", "-m", "gpu", "-k", SAMPLE]
    selected += ["-n", "4"] if not step["dry"] else []
    command = [sys.executable, "-m", "pytest", *selected, "-o", "addopts=", "-v", "-ra", "--maxfail=20", "--tb=short"]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for text in running.stdout or ():
            lines.append(text)
            child.say(event="line")  # it is alive
    output = "".join(lines)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", output, re.M)
    wrong = running.returncode not in (0, 5)  # 5: all deselected or skipped
    closing = lines[-1].strip() if lines else ""
    yield {"exit": running.returncode, "closing": closing, "failed": failed, "output": output[-20_000:] * wrong}


def sweep(chosen: GpuConfig, problem: tiles.Problem, on: tiles.Chip) -> list[GpuConfig]:
    """The library's choice with one thing changed; other tiles in all stages and warps that fit."""
    one = [
        replace(chosen, **{name: x})
        for name, values in {"programs": (1, 2), "band": (1, 4, 16), "tma": (False,)}.items()
        for x in values
    ]
    (depth,) = chosen.along(problem.letters[2])
    tried = itertools.product(((128, 128), (128, 256), (256, 128), (64, 256)), (4, 8), (4, 3, 5, 2))
    others = [
        config
        for (r, c), warps, stages in tried
        if tiles.shared(problem, config := problem.config(r, c, depth, warps=warps, stages=stages), on) <= on.shared
        and r * c * problem.sums // (32 * warps) <= tiles.MAX_SUM_REGISTERS
    ]
    return one + others


def do(step: Step, child: Child) -> Iterator[Row]:
    """The rows of a step."""

    def trying(name: str, compiled: bool) -> None:
        child.say(event="trying", variant=name, quiet=STUCK if compiled else None)
        is_broken_on_purpose(name)

    if step["kind"] in ("launch", "graph"):
        yield from {"launch": launch, "graph": graph}[step["kind"]](step)
        return
    if step["kind"] == "test":
        yield from test(step, child)
        return
    setting = (bench.DRY if step["dry"] else bench.QUICK)._replace(skip=step["skip"], trying=trying)
    if step["kind"] == "measure":
        yield from bench.measure(step["product"], tuple(step["shape"]), bench.PEERS, setting)
    else:
        yield bench.tuned(step["product"], tuple(step["shape"]), setting, sweep)


def line(row: Row) -> str:
    """A row as it is printed."""
    if "error" in row:
        return f"{row['step']}: {row.get('variant') or ''} {row['error']}"[:200]
    if "figures" in row:
        return bench.line(row)
    if "best" in row:
        return bench.tuned_line(row)
    if "closing" in row:
        return f"{row['step']}: {row['closing']}"
    return f"{row['step']}: {'WRONG' if is_wrong(row) else 'right'}, {row['seconds']:.1f} s"


def is_wrong(row: Row) -> bool:
    """Whether something of a row failed."""
    return "error" in row or row.get("exit", 0) not in (0, 5) or not row.get("right", True)


def sample(into: list[str]) -> subprocess.Popen[str] | None:
    """Appends what `nvidia-smi` says each second."""
    command = ["nvidia-smi", f"--query-gpu={SAMPLED}", "--format=csv,noheader,nounits", "-l", "1"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    threading.Thread(target=lambda: into.extend(map(str.strip, process.stdout or ())), daemon=True).start()
    return process


def run(kinds: Sequence[str], path: str | None, end: float, dry: bool) -> None:
    """All steps, until `end`; the results so far are written to `path` after each row."""
    # Triton's, where XLA finds no other that assembles a kernel.
    os.environ["PATH"] += f":{gpu.tools() / 'bin'}"
    # In a process of its own: this one never touches the device.
    about = subprocess.run([sys.executable, "-m", __name__, "machine"], capture_output=True, text=True)
    results: dict[str, Any] = {
        "machine": json.loads(about.stdout) if about.returncode == 0 else about.stderr[-500:],
        "sampled": SAMPLED,
        "samples": (samples := []),
        "rows": (rows := []),
    }

    def record(row: Row) -> None:
        rows.append(row)
        report.save(results, path)
        print(line(row), flush=True)

    sampler = sample(samples)
    try:
        left = watch([sys.executable, "-m", __name__], plan(kinds, dry), record, end=end, quiet=QUIET)
    finally:
        if sampler is not None:
            sampler.kill()
    results["left"] = [step["name"] for step in left]
    report.save(results, path)
    wrong = [row for row in rows if is_wrong(row)]
    print(f"{len(rows)} rows, {len(wrong)} with an error; not begun: {results['left'] or 'none'}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "machine":
        print(json.dumps(bench.machine()))
    else:
        said = Child(sys.argv[2])
        said.serve(json.loads(Path(sys.argv[1]).read_text()), partial(do, child=said), bench.is_well)
