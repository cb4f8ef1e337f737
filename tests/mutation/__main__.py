"""Runs tests on mutants, and writes the report `docs/mutations.md`. Needs `cosmic-ray` and the group `dev`.

    python -m tests.mutation --count 200 --seed 0    # a random sample of the core
    python -m tests.mutation --kernels               # the hand-picked mutants of the kernels
    python -m tests.mutation --count 0               # only the report

Mutants are made in a worktree of `HEAD` in `--folder`. Results are there, too, and a further run continues from them;
and the map of the lines that each test reaches. Delete `reach.jsonl` if the library or its tests have changed.
"""

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.mutation import report
from tests.mutation.mutants import Mutant, Reach, hand_picked, sample

ROOT = Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--hypothesis-seed=0", "-p", "tests.mutation.plugin"]
# Programs that were compiled for a TPU can be written to the cache of compiled programs, but not read.
PYTEST += ["-W", "ignore:Error reading persistent compilation cache"]
BUDGETS = {"first": 60, "default": 80, "long": 40}  # seconds of each batch of tests
FILES, TESTS = 6, 30  # in the first batch, in which most mutants die


def prepare(folder: Path) -> tuple[Reach, dict[str, float], list[str]]:
    """`(reach, seconds, long)`: the tests that reach each line, their durations, and the long tests."""
    tree, reached, long = (folder / name for name in ("tree", "reach.jsonl", "long.txt"))
    folder.mkdir(exist_ok=True)
    if not tree.exists():
        subprocess.run(["git", "worktree", "add", "--detach", tree], cwd=ROOT, check=True)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    # Compiled programs are kept from mutant to mutant. A program that a mutant changes isn't among them.
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": f"{folder / 'cache'}",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if not long.exists():
        reached.touch()
        subprocess.run(PYTEST, env=os.environ | {"REACH": str(reached)}, check=True)
        collected = subprocess.run([*PYTEST, "--collect-only", "-m", "long"], stdout=subprocess.PIPE, check=True)
        long.write_bytes(collected.stdout)
    reach: Reach = defaultdict(lambda: defaultdict(list))
    rows = [json.loads(line) for line in reached.read_text().splitlines()]
    for row in rows:
        for file, lines in row["lines"].items():
            for line in lines:
                reach[file][line].append(row["test"])
    tests = [line for line in long.read_text().splitlines() if "::" in line]
    return reach, {row["test"]: row["seconds"] for row in rows}, tests


def batches(mutant: Mutant, reach: Reach, seconds: dict[str, float], long: list[str]) -> dict[str, list[str]]:
    """Tests to run: cheap ones of some files, the others that reach the mutant, and long tests of the same files."""
    lines = reach[mutant.file]
    tests = {test for row in ([row for row in mutant.rows if row in lines] or lines) for test in lines[row]}
    found = sorted(tests, key=seconds.__getitem__)
    files, rank = Counter(map(_file, found)), dict.fromkeys(found, 0)
    seen = Counter[str]()
    for test in found:
        rank[test] = seen[_file(test)]
        seen[_file(test)] += 1
    in_turn = sorted(found, key=rank.__getitem__)  # the cheapest of each file, then the second of each, and so on
    most = {file for file, _ in files.most_common(FILES)}
    first = [test for test in in_turn if _file(test) in most][:TESTS]
    functions = {test.partition("[")[0] for test in found}
    beside = sorted(
        (test for test in long if _file(test) in files), key=lambda test: test.partition("[")[0] not in functions
    )
    return {"first": first, "default": [test for test in in_turn if test not in first], "long": beside}


def _file(test: str) -> str:
    return test.partition("::")[0]


def result(mutant: Mutant, tests: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    """What the tests say about a mutant: the batch and the test that killed it, or how many tests it survived."""
    run_tests = importlib.import_module("cosmic_ray.testing").run_tests
    row = {field: getattr(mutant, field) for field in ("name", "folder", "file", "row", "before", "after")}
    row |= {"killed": None, "ran": {}, "tests": {batch: len(names) for batch, names in tests.items()}}
    path, start = Path(mutant.file), time.monotonic()
    original = path.read_text()
    try:
        path.write_text(mutant.source)
        for batch, names in tests.items():
            if names:
                (folder / "tests.txt").write_text("\n".join(names))
                os.environ |= {"TESTS": str(folder / "tests.txt"), "BUDGET": str(BUDGETS[batch])}
                options = ["-x", "-o", "addopts=", "--tb=line", "-rfE", *dict.fromkeys(map(_file, names))]
                outcome, output = run_tests(shlex.join([*PYTEST, *options]), BUDGETS[batch] + 300)
                passed = re.search(r"(\d+) passed", output)
                row["ran"][batch] = int(passed[1]) if passed else 0
                if outcome.value == "killed":
                    failed = re.search(r"^(FAILED|ERROR) .*", output, re.MULTILINE)
                    row |= {"killed": batch, "by": failed[0] if failed else output[-300:]}
                    break
    finally:
        path.write_text(original)
    return row | {"seconds": round(time.monotonic() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "ragged-mutation")
    given = parser.parse_args()
    reach, seconds, long = prepare(given.folder)
    results = given.folder / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    known, picked = {row["name"] for row in rows}, list(hand_picked())
    mutants = picked if given.kernels else sample(given.count, given.seed, reach)
    for mutant in mutants:
        if mutant.name not in known:
            rows.append(result(mutant, batches(mutant, reach, seconds, long), given.folder))
            print(json.dumps(rows[-1]), flush=True)
            with results.open("a") as out:
                print(json.dumps(rows[-1]), file=out)
    names = {mutant.name for mutant in [*mutants, *picked]}
    report.write(ROOT / "docs" / "mutations.md", [row for row in rows if row["name"] in names])


if __name__ == "__main__":
    main()
