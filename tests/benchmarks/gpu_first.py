"""The first minutes on a GPU, the most telling first, with what is known so far always on disk:

    python -m tests.benchmarks.gpu --first --json first.json --budget 500
    python -m tests.benchmarks.gpu --first launch sweep --json more.json     # some of the steps

1. `launch`: each layout once, on poisoned memory, against NumPy in float64; tiles loaded by TMA and by pointers.
2. `test`: a sample of the tests marked `gpu`.
3. `measure`: the six shapes beside dense products and other libraries'.
4. `sweep`: three shapes in other tiles, stages, warps; the library's choice with other programs, bands, and no TMA.

A variant that crashes, hangs or breaks the device costs itself alone: see `watched`. Power and clocks are sampled each
second.
"""

import itertools
import json
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
import numpy as np

import ragged
from ragged.backends.config import GpuConfig
from ragged.backends.gpu import call as triton_call
from ragged.backends.gpu import tiles
from tests import cases, gpu, oracle

KINDS = ("launch", "test", "measure", "sweep")
SAMPLE = "poison or (every_layout and bfloat16) or (gradients and bfloat16) or (twenty and bfloat16) or at_size"
QUIET = 90  # seconds: the longest compilation of a row takes a third of it
SAMPLED = "timestamp,power.draw,clocks.sm,clocks.mem,temperature.gpu,utilization.gpu"


def plan(kinds: Sequence[str], dry: bool) -> list[Step]:
    """The steps, the most telling first."""
    shapes = [bench.TINY] if dry else bench.SHAPES
    found: dict[str, list[Step]] = {
        "launch": [{"layout": layout, "by": by} for by in ("tma", "pointers") for layout in cases.NAMES],
        "test": [{}],
        "measure": [{"product": product, "shape": shape} for product in bench.OPERANDS for shape in shapes],
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
    options: Any = {"backend": "triton_gpu", "interpret": step["dry"]}
    start = time.perf_counter()
    with (
        gpu.on("NVIDIA H200") if step["dry"] else nullcontext(),
        mock.patch.object(tiles, "choose", lambda *a: replace(choose(*a), tma=step["by"] == "tma")),
        mock.patch.object(triton_call.load(), "triton_call", poisoned),
    ):
        out = jax.block_until_ready(jax.jit(partial(ragged.matmul, **options))(case.lhs, case.rhs))
    row = {"layout": step["layout"], "by": step["by"], "seconds": time.perf_counter() - start, "kernels": names}
    assert step["dry"] or names, "no Triton kernel ran"
    try:
        got = case.unpack(np.asarray(out.data).astype(np.float64))
        oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), *cases.TOLERANCE["bfloat16"])
        case.assert_tail_zero(out)
        yield row | {"right": True}
    except AssertionError as error:
        yield row | {"right": False, "error": str(error)[:500]}


def test(step: Step) -> Iterator[Row]:
    """Pytest's closing line, and what failed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_on_gpu.py",
        "-o",
        "addopts=",
        "-m",
        "gpu",
        "-q",
        "-k",
        SAMPLE,
    ]
    done = subprocess.run([*command, "-ra", "--maxfail=20", "--tb=short"], capture_output=True, text=True)
    *_, closing = done.stdout.strip().splitlines() or [done.stderr[-500:]]
    failed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M)
    # 5: all deselected or skipped.
    yield {
        "exit": done.returncode,
        "closing": closing,
        "failed": failed,
        "output": done.stdout[-20_000:] * bool(failed),
    }


def sweep(chosen: GpuConfig, problem: tiles.Problem, on: tiles.Chip) -> list[GpuConfig]:
    """The library's choice with one thing changed, the kernel's variants, other tiles in all stages and warps that
    fit."""
    one = [
        replace(chosen, **{name: x})
        for name, values in {"programs": (1, 2), "band": (1, 4, 16), "tma": (False,)}.items()
        for x in values
    ]
    (depth,) = chosen.along(problem.letters[2])
    tried = itertools.product(((128, 128), (128, 256), (256, 128), (64, 256)), (4, 8), (4, 3, 5, 2))
    return (
        one
        + bench.variants_of_the_kernel(problem, on)
        + [
            config
            for (r, c), warps, stages in tried
            if tiles.shared(problem, config := problem.config(r, c, depth, warps=warps, stages=stages), on) <= on.shared
            and r * c * (2 if problem.wide else 1) // (32 * warps) <= 128  # registers of a thread
        ]
    )


def do(step: Step, child: Child) -> Iterator[Row]:
    """The rows of a step."""

    def trying(name: str) -> None:
        child.say(event="trying", variant=name)
        is_broken_on_purpose(name)

    if step["kind"] in ("launch", "test"):
        yield from {"launch": launch, "test": test}[step["kind"]](step)
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
    return f"{row['step']}: " + (row["closing"] if "closing" in row else f"right, {row['seconds']:.1f} s")


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
        left = watch([sys.executable, "-m", __name__], plan(kinds, dry), record, end=end, quiet=20 if dry else QUIET)
    finally:
        if sampler is not None:
            sampler.kill()
    results["left"] = [step["name"] for step in left]
    report.save(results, path)
    wrong = [row for row in rows if "error" in row or row.get("exit", 0) not in (0, 5)]
    print(f"{len(rows)} rows, {len(wrong)} with an error; not begun: {results['left'] or 'none'}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "machine":
        print(json.dumps(bench.machine()))
    else:
        said = Child(sys.argv[2])
        said.serve(json.loads(Path(sys.argv[1]).read_text()), partial(do, child=said), bench.is_well)
