"""`python -m ragged`: its commands, their JSON, and their exit codes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ragged
from ragged.__main__ import main
from tests.cases import LETTERS

ROOT = Path(__file__).parent.parent
SMALL = ["--m", "96", "--k", "64", "--n", "48", "--groups", "4"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints; to stderr, if it fails. Usage is argparse's to exit by."""
    capsys.readouterr()
    if code == 2:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    else:
        assert main(arguments) == code
    out, err = capsys.readouterr()
    assert bool(out) == (code == 0)
    return err if code else out


BLOCKED = """
import sys, runpy
for name in ("triton", "jax_triton", "libtpu", "matplotlib", "tqdm"):
    sys.modules[name] = None
import importlib.metadata
version = importlib.metadata.version
def without(name):
    if name.partition("-")[0] in ("triton", "libtpu", "matplotlib") or "cuda" in name or name == "jax-triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = without
sys.argv[0] = "ragged"
runpy.run_module("ragged", run_name="__main__")
"""


def bare(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process that can import no Triton, no libtpu and no matplotlib."""
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": "/nowhere"}
    command = [sys.executable, "-W", "error", "-c", BLOCKED, *arguments]
    return subprocess.run(command, env=variables | environment, capture_output=True, text=True)


@pytest.mark.long
def test_info_on_a_bare_machine(tmp_path: Path) -> None:
    """Without TPU, GPU, Triton and matplotlib; what isn't there, and why."""
    found = bare("info", RAGGED_TUNING_CACHE=str(tmp_path / "none.json"))
    assert (found.returncode, found.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in found.stdout.splitlines()]
    for line in (
        f"ragged {ragged.__version__}",
        f"jax {jax.__version__}",
        "triton not installed",
        "libtpu not installed",
        "matplotlib not installed",
        "device cpu: cpu × 1",
        "xla runs here",
        "pallas_tpu lowers for tpu, which isn't here; runs interpreted, with `interpret=True` in its configuration",
        "triton_gpu not available: Triton is not installed: `pip install 'jax-ragged[cuda]'`",
        f"tuning cache {tmp_path / 'none.json'}",
        "0 configurations",
    ):
        assert line in lines, found.stdout

    # A plot names what to install.
    failed = bare("explain", *SMALL, "--plot", "/nowhere/plot.png")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "it needs matplotlib.\nInstall it: `pip install matplotlib`." in failed.stderr


@pytest.mark.long
def test_a_pipe_that_is_closed() -> None:
    """As by `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ragged", "info"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writing)
    assert done.returncode == 0 and "BrokenPipeError" not in done.stderr


def test_info(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there; the cache's entries, and why one is not read."""
    file = tmp_path / "tuning.json"
    monkeypatch.setenv("RAGGED_TUNING_CACHE", str(file))
    found = json.loads(run(capsys, "info", "--json"))
    assert found["versions"]["ragged"] == ragged.__version__ and found["versions"]["jax"] == jax.__version__
    assert found["devices"] == ["cpu: cpu"] * jax.device_count()
    assert [*found["backends"]] == ["xla", "pallas_tpu", "triton_gpu"] and found["backends"]["xla"] == "runs here"
    assert found["tuning_cache"]["path"] == str(file) and found["tuning_cache"]["problems"] == []
    before = found["tuning_cache"]["entries"]
    config = {"backend": "xla", "m": [16], "k": [], "n": []}
    entry = {"config": config, "seconds": 1.0, "default_seconds": 2.0, "sizes": "even", "date": "2026-01-01"}
    file.write_text(json.dumps({"format": 1, "found": {"a device": {"a product": entry, "another": entry}}}))
    found = json.loads(run(capsys, "info", "--json"))["tuning_cache"]
    assert found["entries"] == before + 2 and "a device" in found["devices"]
    file.write_text("no cache at all")
    assert f"the tuning cache {file} is ignored: it is not a tuning cache." in run(capsys, "info")
    monkeypatch.setenv("RAGGED_TUNING_CACHE", "off")
    assert "none: `RAGGED_TUNING_CACHE` disables it" in run(capsys, "info")
    monkeypatch.delenv("RAGGED_TUNING_CACHE")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    none = "none: `RAGGED_TUNING_CACHE` is not set, and there is no home directory"
    assert none in run(capsys, "info")


@pytest.mark.parametrize("layout", ["ragged", "inner_columns"])
def test_explain_of_a_layout(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Shapes and sizes on the command line, as JSON."""
    found = json.loads(run(capsys, "explain", "--layout", layout, *SMALL, "--sizes", "zipf", "--json"))
    assert found["layout"] == layout and found["num_groups"] == 4
    extent = {"m": 96, "k": 64, "n": 48}
    sizes = {z: ragged.tuning.sample_sizes("zipf", 4, extent[z]).tolist() for z in LETTERS[layout]}
    assert found["sizes"] == sizes and not any(found["tail"].values())
    flops = sum(2 * math.prod(sizes[z][group] if z in sizes else extent[z] for z in "mkn") for group in range(4))
    assert {plan["flops"] for plan in found["plans"]} == {flops}
    assert {plan["platform"] for plan in found["plans"]} == {"cpu", "cuda", "tpu"}


def test_explain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As `ragged.explain` has it; a list of sizes, a recipe, a device, a plot."""
    product = ["explain", *SMALL, "--sizes", "30,0,50,7", "--recipe", "rowwise", "--device", "TPU v6 lite"]
    said = run(capsys, *product, "--dtype", "float32", "--plot", str(tmp_path / "plot.svg"))
    x = ragged.GroupedTensor(jnp.ones((96, 64)), jnp.array([30, 0, 50, 7], jnp.int32))
    want = ragged.explain(x, jnp.ones((4, 64, 48)), recipe="rowwise", device="TPU v6 lite")
    assert said == f"{want}\n" and "4 groups, 1 empty: m 0 to 50, 87 of 96 in all" in said
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    xla = json.loads(run(capsys, "explain", *SMALL, "--backend", "xla", "--platform", "tpu", "--json"))
    assert {plan["backend"] for plan in xla["plans"]} == {"xla"}


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing, or is not what an argument takes."""
    calls = [
        ([], "the following arguments are required: command"),
        (["explain", "--m", "8"], "the following arguments are required: --k, --n, --groups"),
        (["explain", *SMALL, "--m", "0"], "argument --m: '0' is not an int of at least 1"),
        (["explain", *SMALL, "--seed", "-1"], "argument --seed: '-1' is not an int of at least 0"),
        (["explain", *SMALL, "--layout", "gmm"], "argument --layout: invalid choice: 'gmm'"),
        (["explain", *SMALL, "--sizes", "pareto"], "'pareto' is not a list of ints or one of even, random, zipf, one"),
        (["explain", *SMALL, "--sizes", "1,2,3"], "--sizes must list 4 sizes, at most 96 in total, for --m"),
        (["explain", *SMALL, "--sizes", "90,2,3,4"], "--sizes must list 4 sizes, at most 96 in total, for --m"),
        (["explain", *SMALL, "--sizes", "90,-2,3,4"], "--sizes must list 4 sizes, at most 96 in total, for --m"),
        (["explain", *SMALL, "--dtype", "float3"], "--dtype 'float3' is not a dtype"),
        (["bench", *SMALL, "--seconds", "nan"], "argument --seconds: 'nan' is not a positive number"),
        (["tune", *SMALL, "--seconds", "-3"], "argument --seconds: '-3' is not a positive number"),
        # Float64 isn't measured as float32.
        (["bench", *SMALL, "--dtype", "float64"], "--dtype 'float64' needs `JAX_ENABLE_X64=1`"),
    ]
    for arguments, text in calls:
        assert text in run(capsys, *arguments, code=2)


def test_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """The library's error, without a traceback."""
    said = run(capsys, "bench", *SMALL, "--backend", "pallas_tpu", "--seconds", "0.01", code=1)
    assert "ragged bench: ValueError: " in said and "backend 'pallas_tpu' does not run on cpu." in said
    assert "Traceback" not in said
    said = run(capsys, "explain", *SMALL, "--m", str(2**33), code=1)  # no sizes that wrapped around
    assert "a total that int32 holds" in said
    said = run(capsys, "explain", *SMALL, "--device", "abacus", code=1)
    assert "`device` is 'abacus', neither a TPU nor an NVIDIA GPU." in said
    said = run(capsys, "explain", *SMALL, "--dtype", "int8", "--recipe", "rowwise", code=1)
    assert "TypeError" in said and "A recipe quantises floats of 16 bits or more." in said


@pytest.mark.long
def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    """Medians of the product, of both derivatives, and of `ragged_dot` where it is the same product."""
    product = ["bench", *SMALL, "--dtype", "float32", "--seconds", "0.01"]
    found = json.loads(run(capsys, *product, "--json"))
    assert found["device"]["platform"] == "cpu" and found["rounds"] >= 3
    assert [*found["seconds"]] == ["forward", "by lhs", "by rhs"]
    for product_, each in found["seconds"].items():
        assert [*each] == ["ragged", "ragged_dot"] and all(seconds > 0 for seconds in each.values())
        assert found["flops"][product_] == 2 * 96 * 64 * 48
    of_wgrad = json.loads(run(capsys, "bench", "--layout", "wgrad", *SMALL, "--seconds", "0.01", "--json"))
    assert [[*each] for each in of_wgrad["seconds"].values()] == [["ragged"]] * 3
    lines = run(capsys, *product, "--dtype", "int8").splitlines()  # which has no derivatives
    assert lines[0].startswith("forward m=96 k=64 n=48, 4 groups, sizes even, int8 on cpu (cpu), median of ")
    assert lines[1].split() == ["ragged", "GFLOP/s"]
    assert [line.split()[0] for line in lines[2:]] == ["forward"]


def test_tune(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line hands to `autotune`, and what it prints of it."""
    given: list[Any] = []

    class Found:
        def __str__(self) -> str:
            return "found"

        def to_json(self) -> dict[str, Any]:
            return {"products": []}

    def autotune(lhs: Any, rhs: Any, **options: Any) -> Found:
        given.append((lhs, rhs, options))
        return Found()

    monkeypatch.setattr(ragged.tuning, "autotune", autotune)
    assert run(capsys, "tune", *SMALL, "--sizes", "zipf", "--seconds", "2", "--recipe", "rowwise") == "found\n"
    assert json.loads(run(capsys, "tune", *SMALL, "--sizes", "9,8,7,6", "--dtype", "int8", "--json")) == {
        "products": []
    }
    (lhs, rhs, options), (integers, _, own) = given
    assert (lhs.shape, rhs.shape, lhs.dtype) == ((96, 64), (4, 64, 48), jnp.bfloat16)
    assert lhs.first_dims.tolist() == ragged.tuning.sample_sizes("zipf", 4, 96).tolist()
    assert options == {"sizes": "zipf", "seconds": 2.0, "progress": False, "recipe": "rowwise"}
    assert integers.dtype == jnp.int8 and integers.first_dims.tolist() == [9, 8, 7, 6]
    assert own == {"sizes": None, "seconds": 60.0, "progress": False}


@pytest.mark.long
def test_tune_measures(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is in the cache, of which `info` tells."""
    monkeypatch.setenv("RAGGED_TUNING_CACHE", str(tmp_path / "tuning.json"))
    before = json.loads(run(capsys, "info", "--json"))["tuning_cache"]["entries"]
    found = json.loads(run(capsys, "tune", *SMALL, "--dtype", "float32", "--seconds", "0.05", "--json"))
    assert len(found["products"]) == 3
    assert json.loads(run(capsys, "info", "--json"))["tuning_cache"]["entries"] == before + 3
