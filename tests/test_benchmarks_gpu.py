"""The GPU benchmark, where there is no GPU: every path on tiny operands."""

import json
from pathlib import Path

import pytest

from . import gpu
from .benchmarks.gpu import OPERANDS, SPREADS, main

gpu.needs_triton()


@pytest.mark.long
def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dry", "--tune", "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    found = [(row["product"], row["sizes"]) for row in results["rows"]]
    assert found == [(product, sizes) for product in OPERANDS for sizes in SPREADS]
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
