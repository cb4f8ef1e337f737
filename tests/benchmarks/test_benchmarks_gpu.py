"""The GPU benchmark, where there is no GPU: every path on tiny operands."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import gpu
from tests.benchmarks.gpu import OPERANDS, SPREADS, main
from tests.benchmarks.watched import watch
from tests.cases import NAMES

gpu.needs_triton()
pytestmark = pytest.mark.long  # a benchmark is run, and its dry run shows only that it can be


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dry", "--tune", "--series", "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    found = [(row["product"], row["sizes"]) for row in results["rows"] if "series" not in row]
    assert found == [(product, sizes) for product in OPERANDS for sizes in SPREADS]
    assert [(row["series"], row["at"], row["product"]) for row in results["rows"][len(found) :]] == [
        ("skew", "giant", "forward"),
        ("skew", "giant", "wgrad"),
    ]
    for row in results["rows"]:
        mine, is_fp8 = row["figures"]["ours"], row["product"] == "fp8"
        assert mine["seconds"] > 0 and mine["of_dense"] > 0
        # The others may not be installed.
        assert set(row["failed"]) - {"torch", "dense torch", "tokamax"} == ({"ragged_dot"} if is_fp8 else set())
        assert is_fp8 or row["differences"]["ragged_dot"] < 1e-2
    assert [row["product"] for row in results["tuned"]] == list(OPERANDS)
    assert all(row["best_over_default"] >= 1 and not row["failed"] for row in results["tuned"])
    assert "48, 64, 32, 3" in capsys.readouterr().out


def test_the_budget_is_kept(tmp_path: Path) -> None:
    main(["--dry", "--budget", "-1", "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["rows"] == [] and results["stopped"].startswith("before forward")


def test_the_first_minutes_outlive_what_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that ends its process, one that hangs and one that raises cost themselves alone."""
    broken = {"default": "exit", "m=16, k=32, n=32, warps=4, stages=4, programs=1": "hang", "dense": "raise"}
    monkeypatch.setenv("BREAK", ";".join(f"{name}:{how}" for name, how in broken.items()))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    main(["--dry", "--first", "launch", "measure", "sweep", "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    rows = [row for row in results["rows"] if "error" not in row]
    errors = [(row["variant"], row["error"][:13]) for row in results["rows"] if "error" in row]
    assert sorted(errors) == 3 * [("default", "exit status 9")] + [(list(broken)[1], "said nothing ")]
    assert results["left"] == [] and len(results["machine"]["device"]) > 0
    launched = [(row["layout"], row["by"]) for row in rows if "layout" in row]
    assert launched[:2] == [("forward", "tma"), ("forward", "pointers")]
    assert sorted(launched) == sorted((layout, by) for by in ("tma", "pointers") for layout in NAMES)
    assert all(row["right"] for row in rows if "layout" in row)
    measured = [row for row in rows if "figures" in row]
    assert [(row["product"], row["sizes"]) for row in measured] == [(p, s) for p in OPERANDS for s in SPREADS]
    assert all({"ours", "dense"} <= {*row["figures"], *row["failed"]} for row in measured)
    assert all("on purpose" in row["failed"]["dense"] for row in measured)
    swept = {row["product"]: row["seconds"] for row in rows if "best" in row}
    assert len(swept) == 3 and all(len(seconds) == 2 for seconds in swept.values())
    assert list(broken)[1] not in swept["forward"]


CHILD = """
import json, os, pathlib, subprocess, sys, time
from tests.benchmarks.watched import Child, is_broken_on_purpose

def do(step):
    for name in step["names"]:
        if name in step["skip"]:
            continue
        child.say(event="trying", variant=name, quiet=5)
        if name == "hang":
            child.say(event="row", row={"pid": subprocess.Popen(["sleep", "60"]).pid})
        is_broken_on_purpose(name)
        yield {"name": name}
    if step["names"] == ["stubborn"]:
        child.say(event="trying", variant="stubborn", quiet=None)
        os._exit(9)

child = Child(sys.argv[2])
child.serve(json.loads(pathlib.Path(sys.argv[1]).read_text()), do, lambda: True)
"""


def test_watched_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks isn't tried again; a step that breaks all the same is given up."""
    monkeypatch.setenv("BREAK", "a:exit;hang:hang;c:raise;stubborn:exit")
    steps = [
        {"name": "first", "names": ["a", "b", "hang"]},
        {"name": "second", "names": ["c", "d"]},
        {"name": "third", "names": ["stubborn"]},
        {"name": "fourth", "names": ["e"]},
    ]
    rows: list[dict[str, Any]] = []
    left = watch([sys.executable, "-c", CHILD], steps, rows.append, end=time.monotonic() + 60, quiet=20)
    assert left == []
    done = {(row["step"], row["name"]) for row in rows if "name" in row}
    assert done == {("first", "b"), ("fourth", "e")}
    failed = [(row["step"], row.get("variant"), row["error"][:12]) for row in rows if "error" in row]
    assert failed == [
        ("first", "a", "exit status "),
        ("first", "hang", "said nothing"),
        ("second", None, "RuntimeError"),  # and the others of the step that it ended
        ("third", "stubborn", "exit status "),
        ("third", "stubborn", "exit status "),
    ]
    (started,) = [row["pid"] for row in rows if "pid" in row]
    command = Path(f"/proc/{started}/cmdline")
    assert not command.exists() or "sleep" not in command.read_text()


def test_what_is_left_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    main(["--dry", "--first", "launch", "--budget", "-1", "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["rows"] == [] and len(results["left"]) == 2 * len(NAMES)
