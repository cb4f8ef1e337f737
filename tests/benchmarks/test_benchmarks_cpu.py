"""The CPU's benchmark on tiny operands, the process that it takes turns with, and what is drawn from its figures."""

import importlib.util
import io
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks import cpu, cpu_torch, plots, tpu
from tests.benchmarks.cpu_torch import Job

pytestmark = pytest.mark.long  # a benchmark is run, and its dry run shows only that it can be

DOCS = Path(__file__).parent.parent.parent / "docs"
JOB = Job("forward", "float32", (48, 16, 32, 3), [20, 0, 28])

# In torch's place: loops in NumPy, one of them wrong in its last group, and one that fails.
STAND_IN = textwrap.dedent("""
    import sys

    import numpy as np

    from tests.benchmarks import cpu_torch

    def make(job):
        x, w, _ = cpu_torch.data(job.shape)
        cuts = np.cumsum(job.sizes)[:-1]

        def loop(w):
            return (np.concatenate([a @ b for a, b in zip(np.split(x, cuts), w)]),)

        return {
            "dense torch": lambda: (x @ w[0],),
            "torch": lambda: loop(w),
            "torch loop": lambda: loop(w[[0, 1, 1]]),
            "torch broken": lambda: loop(None),
        }

    requests = (line for line in sys.stdin if "die" not in line or sys.exit(3))
    cpu_torch.serve(requests, sys.stdout, make, list)
""")


@pytest.fixture
def torch() -> Iterator[cpu.Torch]:
    process = cpu.Torch([sys.executable, "-c", STAND_IN])
    yield process
    process.close()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package look as if it weren't installed."""
    find = importlib.util.find_spec

    def hide(package: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))

    return hide


def test_without_torch(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    without: Callable[[str], None],
) -> None:
    """The other figures are measured, and the reason is told once on the screen and in each row of the file."""
    without("torch")
    monkeypatch.setattr("os.getloadavg", lambda: (5.25, 0, 0))
    only = "T bfloat16 dgrad", "skew giant bfloat16 wgrad"
    cpu.main(["--dry", "--series", "--seconds", "0.1", "--json", str(tmp_path / "out.json"), "--only", *only])
    results = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in results["rows"]] == [only[0], f"series {only[1]}"]
    assert {"date", "device", "threads"} <= results.keys() and results["versions"]["jax"]
    for row in results["rows"]:
        assert row["skipped"] == {"torch": cpu.NO_TORCH}
        figures = row["figures"]
        assert set(figures) == {"ragged", "dense XLA", "even", "JAX loop", "lax.ragged_dot"}
        assert row["dense"] == "dense XLA" and figures["dense XLA"]["of_dense"] == 1
        assert figures["ragged"]["of_dense"] == figures["ragged"]["seconds"] / figures["dense XLA"]["seconds"]
        assert set(row["ragged_over"]) == {"JAX loop", "lax.ragged_dot"}
        assert all(figure["turns"] >= 1 and figure["compile_s"] > 0 for figure in figures.values())
    giant = results["rows"][1]
    assert giant["largest, smallest group"] == [48, 0] and giant["at"] == "giant"
    said = capsys.readouterr().out
    assert results["load"] == 5.25 and "Others use this machine (load 5.2)" in said
    assert f"{cpu.NO_TORCH}. Its figures are left out." in said and said.count("  without torch: ") == 1


def test_what_would_take_too_long_or_too_much_is_left_out(
    monkeypatch: pytest.MonkeyPatch, without: Callable[[str], None]
) -> None:
    without("torch")
    monkeypatch.setattr(cpu, "MOST_UNROLLED", 2)
    monkeypatch.setattr(cpu, "MOST_TEMPORARY", 0.125)
    job = JOB._replace(shape=(256, 16, 32, 16), sizes=[16] * 16)  # on which `ragged_dot` takes 0.25 MiB
    row = cpu.measure(job, 0.01, cpu.Torch())
    assert row["skipped"] == {
        "lax.ragged_dot": "more than 0.00012207 GiB of temporary memory",
        "JAX loop": "unrolled, more than 2 products would be compiled",
        "torch": cpu.NO_TORCH,
    }
    assert set(row["figures"]) == {"ragged", "dense XLA", "even"}
    monkeypatch.setattr(cpu, "MOST_TEMPORARY", 0)
    with pytest.raises(cpu.LeftOut, match="more than 0 GiB of temporary memory"):
        cpu.measure(job, 0.01, cpu.Torch())


def test_no_row_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu.main(["--dry", "--only", "T float64"])
    assert "no row's name contains 'T float64'" in capsys.readouterr().err


def test_dry_run(tmp_path: Path) -> None:
    """Every row is measured; with torch too, where it is installed."""
    cpu.main(["--dry", "--series", "--seconds", "0.1", "--json", str(tmp_path / "cpu.json")])
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert not [row["name"] for row in results["rows"] if "error" in row]
    products = [row for row in results["rows"] if "product" in row]
    assert len(products) == 4 + 2 * 2 and len(results["rows"]) == len(products) + 3
    assert all(row["skipped"] == ({} if cpu.Torch().missing is None else {"torch": cpu.NO_TORCH}) for row in products)
    (tmp_path / "page.md").write_text((DOCS / "benchmarks.md").read_text())
    plots.main(["--folder", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert {path.name for path in tmp_path.glob("*.svg")} == {"cpu-products.svg", "cpu-series.svg"}


def test_two_processes(torch: cpu.Torch) -> None:
    """The other process's variants are timed there; one whose result is another product isn't, nor one that fails."""
    row = cpu.measure(JOB, 0.1, torch)
    assert {"ragged", "torch", "dense torch", "dense XLA"} <= row["figures"].keys()
    assert not {"torch loop", "torch broken"} & row["figures"].keys()
    assert row["skipped"]["torch loop"].startswith("its result isn't ragged's: sums over it are off by 0.")
    assert row["skipped"]["torch broken"] == "TypeError: 'NoneType' object is not iterable"
    seconds = {name: figure["seconds"] for name, figure in row["figures"].items()}
    assert row["ragged_over"]["torch"] == seconds["ragged"] / seconds["torch"]
    assert seconds[row["dense"]] == min(seconds["dense XLA"], seconds["dense torch"])


def test_a_process_that_ends_is_begun_again(torch: cpu.Torch) -> None:
    with pytest.raises(RuntimeError, match="torch's process ended with exit status 3"):
        torch.ask(die=True)
    assert set(torch.prepare(JOB)[0]) == {"dense torch", "torch", "torch loop"}
    assert torch.turn("torch", 2) > 0
    assert torch.prepare(JOB._replace(product="die")) == ({}, {"torch": "torch's process ended with exit status 3"})


def test_a_process_that_ends_before_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    popen, torch = subprocess.Popen, cpu.Torch([sys.executable, "-c", "raise SystemExit(5)"])

    def ended(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", ended)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="torch's process ended with exit status 5"):
            torch.ask(turn="torch")


def test_the_requests_of_the_other_process() -> None:
    calls: list[Job] = []

    def make(job: Job) -> dict[str, Callable[[], Any]]:
        return {"torch": lambda: calls.append(job) or [np.ones((2, 2), np.float32)]}

    answers, requests = io.StringIO(), [{"prepare": JOB._asdict()}, {"turn": "torch", "calls": 3}, {"stop": 1}]
    with pytest.raises(ValueError, match=re.escape("no such request: {'stop': 1}")):
        cpu_torch.serve(map(json.dumps, requests), answers, make, list)
    prepared, turned = map(json.loads, answers.getvalue().splitlines())
    assert prepared["skipped"] == {} and np.shape(prepared["made"]["torch"]) == (1, 4)
    assert turned["seconds"] >= 0 and calls == [JOB] * 5  # once for the sketch, and once to warm up


def test_a_sketch_shows_one_wrong_group_of_many() -> None:
    rng = np.random.default_rng(2)
    out = rng.standard_normal((512, 8, 16), np.float32)
    wrong = out.copy()
    wrong[300] = rng.standard_normal((8, 16))
    limit = cpu.TOLERANCE["bfloat16"]
    right, rounded = cpu_torch.sketch([out]), cpu_torch.sketch([out * (1 + 2**-9 * rng.choice([-1, 1], out.shape))])
    assert cpu_torch.difference(right, rounded) < limit < cpu_torch.difference(right, cpu_torch.sketch([wrong]))


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow variant has fewer turns, one slower than the whole row none after its first call."""
    clock, seconds = [0.0], {"fast": 0.001, "near": 0.004, "slow": 0.5, "slower": 3.0}
    calls: dict[str, list[int]] = {name: [] for name in seconds}

    def turn(name: str) -> Callable[[int], float]:
        def run(count: int) -> float:
            calls[name].append(count)
            clock[0] += count * seconds[name]
            return seconds[name]

        return run

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    figures = cpu.interleave({name: turn(name) for name in seconds}, 2.0)
    assert {name: figure["seconds"] for name, figure in figures.items()} == seconds
    assert calls["slower"] == [1] and figures["slower"]["turns"] == 1
    assert calls["fast"][:3] == [1, 1, 10] and calls["near"][:3] == [1, 1, 2]  # about 10 ms
    assert cpu.interleave({"slower": turn("slower")}, 2.0)["slower"]["turns"] == 1
    assert figures["fast"]["turns"] == figures["near"]["turns"] > 5 * figures["slow"]["turns"] > 0


def a_report() -> dict[str, Any]:
    def figures(factor: float) -> dict[str, Any]:
        names = {"ragged": 1.5, "torch": 3.0, "dense XLA": 1.0}
        return {name: {"seconds": factor * x / 1e3, "of_dense": x, "temporary_mib": 2} for name, x in names.items()}

    row = {"dense": "dense XLA", "dtype": "float32", "m, k, n, g": [4, 8, 8, 2], "skipped": {}}
    return {
        "date": "2026-01-01",
        "device": "a processor",
        "versions": {"jax": "0.0.1", "torch": None},
        "threads": 2,
        "load": 0.25,
        "rows": [
            {"name": "T", "shape": "T", "product": "forward", "figures": figures(2.0), **row},
            {"name": "U", "shape": "U", "product": "wgrad", "figures": figures(4.0), **row}
            | {"skipped": {"torch loop": "it is late"}},
            {"name": "s 1", "series": "groups", "at": 1, "product": "forward", "figures": figures(1.0), **row},
            {"name": "s 2", "series": "groups", "at": 16, "product": "forward", "figures": figures(1.0), **row},
            {"name": "vmap", "error": "it broke"},
        ],
    }


def a_gpu_report() -> dict[str, Any]:
    row = {"shape": [64, 8, 8, 2], "sizes": "zipf", "product": "forward"}
    row |= {"figures": {"ours": {"of_dense": 0.75}, "tokamax": {"of_dense": 0.5}, "torch": {"error": "no"}}}
    return {
        "rows": [row, row | {"series": "rows", "at": 64}, {"product": "wgrad", "shape": [1, 1, 1, 1], "error": "no"}]
    }


def page(*names: str) -> str:
    return "\n".join(f"before\n<!-- {name} -->\n<!-- /{name} -->\nafter\n" for name in names)


NAMES = [name for name, _ in plots.tables(a_report())]


def test_plots(tmp_path: Path) -> None:
    """Each plot that there are figures for; the same bytes each time, and no date."""
    (tmp_path / "cpu.json").write_text(json.dumps(a_report()))
    (tmp_path / "tpu.json").write_text((DOCS / "benchmarks" / "tpu.json").read_text())
    (tmp_path / "gpu.json").write_text(json.dumps(a_gpu_report()))
    (tmp_path / "page.md").write_text(page(*NAMES))
    arguments = ["--folder", str(tmp_path), "--page", str(tmp_path / "page.md")]
    plots.main(arguments)
    first = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {name for name in first if name.endswith(".svg")} == {f"{name}.svg" for name in plots.PLOTS}
    for name in ("tpu", "gpu"):
        (tmp_path / f"{name}.json").unlink()
        del first[f"{name}.json"]
    plots.main(arguments)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == first
    for name in ("cpu-products.svg", "cpu-series.svg"):
        assert "<dc:date>" not in first[name] and ">torch<" in first[name] and ">ragged<" in first[name]
        assert ">JAX loop<" not in first[name]
        assert plots.MARKS["torch"][0] in first[name]
    assert ">16<" in first["cpu-series.svg"] and ">megablox<" in first["tpu.svg"]
    assert all(">tokamax<" in first[name] and ">torch<" not in first[name] for name in ("gpu.svg", "gpu-series.svg"))


def test_tables() -> None:
    texts = dict(plots.tables(a_report()))
    assert texts["cpu"] == "a processor, 2026-01-01; jax 0.0.1; 2 threads on both sides; load before it began: 0.2."
    assert "| T 4×8×8 g2 · float32 | 2.00 ms, XLA | 1.50 · 3.00 | – · – | – · – | – · – |" in texts["cpu-products"]
    assert "| U 4×8×8 g2 · float32 | – · 1.50 | – · – |" in texts["cpu-others"]
    assert "| – | – | 2.0 MiB | – | – |" in texts["cpu-cost"]
    assert texts["cpu-layers"] == "" and texts["cpu-skipped"] == "- torch loop: it is late (U)"
    filled = plots.fill(page(*texts), texts.items())
    assert plots.fill(filled, texts.items()) == filled and filled.count("after") == len(texts)
    with pytest.raises(ValueError, match="the page has 0 places `<!-- cpu-others -->`, not one"):
        plots.fill(page("cpu", "cpu-products"), texts.items())


def test_the_page_has_the_file_s_figures() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    figures = json.loads((DOCS / "benchmarks" / "cpu.json").read_text())
    assert plots.fill(text, plots.tables(figures)) == text


def test_without_matplotlib(tmp_path: Path, without: Callable[[str], None]) -> None:
    """The tables are filled all the same."""
    without("matplotlib")
    (tmp_path / "cpu.json").write_text(json.dumps(a_report()))
    (tmp_path / "page.md").write_text(page(*NAMES))
    with pytest.raises(SystemExit, match=r"matplotlib isn't installed: `uv sync --group dev`\. No plots were drawn\."):
        plots.main(["--folder", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert "a processor" in (tmp_path / "page.md").read_text() and not [*tmp_path.glob("*.svg")]


def test_a_folder_without_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plots.main(["--folder", str(tmp_path)])
    assert "has none of cpu.json, tpu.json, gpu.json" in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["MXU", "MATMUL"])
def test_the_simulator_s_units_are_called_alike(tmp_path: Path, unit: str) -> None:
    """Versions of libtpu call the matrix unit's slots by two names."""
    bundles = ["0x1 : > { %1 = vmatmul.bf16 %2 }", "0x2 : > { %3 = vmatmul.bf16 %4 }", "0x3 : > { %5 = vadd %6 }"]
    (tmp_path / "1-call-2-final_bundles.txt").write_text("\n".join(bundles))
    use = [f"{unit}, VALU", "1 4", "-", "1 0", "1 0", "0 2"]
    (tmp_path / "1-call-2-final_hlo-static-per-bundle-utilization.txt").write_text("\n".join(["-", *use]))
    assert tpu.hot_block(tmp_path, "call") == {"bundles": 3, "MATMUL": 2 / 3, "VALU": 1 / 6}
