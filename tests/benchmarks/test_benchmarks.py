"""The benchmarks run on tiny operands, and the page has the figures of their files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import gpu
from tests.benchmarks import clients, cpu, plots, served
from tests.benchmarks import gpu as on_gpu

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.long
def test_on_a_cpu(tmp_path: Path) -> None:
    """Every row is measured, and what lacks a figure says why; plots and tables are made of them."""
    cpu.main(["--dry", "--series", "--seconds", "0.1", "--json", str(tmp_path / "cpu.json")])
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert not [row["name"] for row in results["rows"] if "error" in row]
    products = [row for row in results["rows"] if "product" in row]
    assert len(products) == 4 + 2 * 2 and len(results["rows"]) == len(products) + 3
    missing = {} if cpu.Torch().missing is None else {"torch": cpu.NO_TORCH}
    for row in products:
        figures = row["figures"]
        assert row["skipped"] == missing and figures[row["dense"]]["of_dense"] == 1
        assert figures["ragged"]["of_dense"] == figures["ragged"]["seconds"] / figures[row["dense"]]["seconds"]
    (tmp_path / "page.md").write_text((DOCS / "benchmarks.md").read_text())
    plots.main(["--folder", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert {path.name for path in tmp_path.glob("*.svg")} == {"cpu-products.svg", "cpu-series.svg"}


@pytest.mark.long
def test_a_wrong_result_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant whose result is another product isn't timed."""
    job = cpu.Job("forward", "float32", (48, 16, 32, 3), [20, 0, 28])
    right, factors = cpu.sketch, iter(range(1, 9))
    monkeypatch.setattr(cpu, "sketch", lambda program: (next(factors) * np.asarray(right(program))).tolist())
    row = cpu.measure(job, 0.1, cpu.Torch())
    assert "its result isn't ragged's" in str(row["skipped"])


def test_the_page_has_the_figures_of_the_files() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    for file, texts in plots.TABLES.items():
        figures = json.loads((DOCS / "benchmarks" / f"{file}.json").read_text())
        assert plots.fill(text, texts(figures)) == text


@pytest.mark.long
def test_on_a_gpu(tmp_path: Path) -> None:
    """The kernel is interpreted, and so is each variant that tuning tries."""
    gpu.needs_triton()
    on_gpu.main(["--dry", "--tune", "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    found = [(row["product"], row["sizes"]) for row in results["rows"]]
    assert found == [(product, sizes) for product in on_gpu.OPERANDS for sizes in on_gpu.SPREADS]
    for row in results["rows"]:
        mine, is_fp8 = row["figures"]["ours"], row["product"] in on_gpu.FP8
        assert mine["seconds"] > 0 and mine["of_dense"] > 0
        # The others may not be installed.
        assert set(row["failed"]) - {"torch", "dense torch", "tokamax"} == ({"ragged_dot"} if is_fp8 else set())
        assert is_fp8 or row["differences"]["ragged_dot"] < 1e-2
    assert [row["product"] for row in results["tuned"]] == list(on_gpu.OPERANDS)
    assert all(row["best_over_default"] >= 1 and not row["failed"] for row in results["tuned"])
    (first, *_) = results["rows"]
    assert "DIFFERS" not in on_gpu.line(first)
    assert "ragged_dot" in first["differences"] and "DIFFERS: 0.5" in on_gpu.line(
        first | {"differences": {"ragged_dot": 0.5}}
    )


@pytest.mark.long
def test_a_broken_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error is in the file, beside the rows of another process."""

    def breaks(*_: Any) -> Any:
        raise RuntimeError("an illegal address")

    gpu.needs_triton()
    path = tmp_path / "out.json"
    on_gpu.main(["--dry", "--products", "dgrad", "--peers", "--json", str(path)])
    before = json.loads(path.read_text())["rows"]
    monkeypatch.setattr(on_gpu, "make", breaks)
    monkeypatch.setattr(gpu, "is_well", lambda: False)
    errors = {"forward": "RuntimeError: an illegal address", "wgrad": "the device is broken"}
    failed = [{"product": name, "shape": [*on_gpu.TINY], "error": error} for name, error in errors.items()]
    for _ in range(2):  # the second run replaces the rows of the first
        with pytest.raises(SystemExit, match="the device is broken"):
            on_gpu.main(["--dry", "--products", "forward", "wgrad", "--json", str(path)])
        assert before and json.loads(path.read_text())["rows"] == [*before, *failed]
    with pytest.raises(SystemExit, match="the time is over"):
        on_gpu.main(["--dry", "--products", "gated", "--budget", "-1", "--json", str(path)])
    failed.append({"product": "gated", "shape": [*on_gpu.TINY], "error": "the time is over"})
    assert json.loads(path.read_text())["rows"] == [*before, *failed]
    monkeypatch.setattr(on_gpu.report, "versions", lambda *_: {"jax": "another"})
    with pytest.raises(SystemExit):
        on_gpu.main(["--dry", "--products", "gated", "--budget", "-1", "--json", str(path)])
    assert json.loads(path.read_text())["rows"] == failed[-1:]


@pytest.mark.long
def test_of_a_product_that_nobody_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each row says why."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("not this one")

    monkeypatch.setattr(on_gpu, "compiled", refuses)
    on_gpu.main(["--dry", "--products", "forward", "--peers", "--json", str(tmp_path / "out.json")])
    for row in json.loads((tmp_path / "out.json").read_text())["rows"]:
        assert row["failed"] == {"ours": "NotImplementedError: not this one"} and "not this one" in on_gpu.line(row)


@pytest.mark.long
def test_weights_of_few_bits(tmp_path: Path) -> None:
    """All formats have figures, and take less memory."""
    served.main(["--dry", "--tokens", "3", "--turns", "1", "--json", str(tmp_path / "served.json")])
    first, *others, again = json.loads((tmp_path / "served.json").read_text())["rows"]
    assert first["GiB"] == again["GiB"] and len(others) == 7
    assert all(row["GiB"] < 0.6 * first["GiB"] and row["ms"] > 0 for row in others)


@pytest.mark.long
def test_rows_that_a_capacity_drops() -> None:
    """A pooled capacity drops a small part of what slots drop."""
    found = clients.dropped(8, 1.0)
    assert 3 * found["pooled"] < found["slots"] and found["slots"] > 0.05
