"""`python -m tests.fuzz`: random programs for some minutes, a reproducer for each mismatch, and a table."""

import argparse
import sys
import time
from collections import Counter
from contextlib import ExitStack

import jax

from tests import conftest, ran

from .operations import OPERATIONS
from .program import RUNS, Program


def fuzz(name: str, backend: str, seed: int, launches: ran.Launches | None, end: float = float("inf")) -> Counter[str]:
    """Runs a program until a time, or until a result is wrong: then it prints a reproducer. Returns counts."""
    began, counts = time.monotonic(), Counter(programs=1)
    program = Program(OPERATIONS[name].build, name, backend, seed)
    while counts["runs"] < RUNS[backend] and not counts["mismatches"] and time.monotonic() < end:
        counts["runs"] += 1
        if wrong := program.run(None if backend == "xla" else launches):
            counts["mismatches"] += 1
            print(f"\n{wrong}\n", flush=True)
    counts["milliseconds"] = round(1000 * (time.monotonic() - began))
    return counts


def main() -> int:
    """Runs programs of each operation and backend in turn. Returns 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first program of each operation")
    parser.add_argument("--only", default="", help="operations whose names contain this text")
    parser.add_argument("--backend", choices=list(RUNS))
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    chosen = [
        (name, backend)
        for name, operation in OPERATIONS.items()
        for backend in operation.backends
        if arguments.only in name and arguments.backend in (None, backend)
    ]
    end, seed, counts = time.monotonic() + 60 * arguments.minutes, arguments.seed, {}
    with ExitStack() as stack:
        launches = stack.enter_context(ran.watch()) if any(backend != "xla" for _, backend in chosen) else None
        while chosen and time.monotonic() < end:
            for each in chosen:
                if time.monotonic() < end:
                    counts[each] = counts.get(each, Counter()) + fuzz(*each, seed, launches, end)
                    conftest.drop_programs_if_many()
            seed += 1
    print(f"{'operation':24}{'backend':12}{'programs':>9}{'runs':>9}{'mismatches':>12}{'seconds':>9}")
    for (name, backend), count in counts.items():
        row = f"{name:24}{backend:12}{count['programs']:9}{count['runs']:9}{count['mismatches']:12}"
        print(f"{row}{count['milliseconds'] / 1000:9.1f}")
    return int(any(count["mismatches"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
