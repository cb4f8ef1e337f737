"""Asks the checks of `ragged.conformance` of peers' grouped products and of ours.

    python -m tests.benchmarks.conformance [--json docs/benchmarks/conformance.json] [--only torch tokamax]
    python -m ragged.conformance tests.benchmarks.conformance:megablox

Each function runs in a process of its own: a crash of one is told, and the others run. What isn't installed is left
out, and says so. `--page` alone writes the page anew from the file. On the CPU, in minutes.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ragged
from ragged.conformance import CHECKS, STATUSES
from tests.everywhere import INTERPRETED

from . import report
from .plots import DOCS, fill, table

PACKAGES = ("ragged", "jax", "jaxlib", "tokamax", "torch", "triton", "jax-triton", "numpy", "ml_dtypes")

# Adaptors: two lines for whoever has another signature.


def megablox(lhs: Any, rhs: Any, group_sizes: Any, preferred_element_type: Any = None) -> Any:
    """JAX's own, interpreted, in its tiles of 128; it gives float32 if nothing is asked for."""
    gmm = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.ops").gmm
    return gmm(lhs, rhs, group_sizes, preferred_element_type or lhs.dtype, interpret=True)


def tokamax(lhs: Any, rhs: Any, group_sizes: Any, preferred_element_type: Any = None) -> Any:
    """What it takes itself for where it is."""
    ragged_dot = importlib.import_module("tokamax").ragged_dot
    return ragged_dot(lhs, rhs, group_sizes, preferred_element_type=preferred_element_type)


def torch(lhs: np.ndarray, rhs: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """`torch._grouped_mm` on the CPU takes ends for sizes. NumPy's bfloat16 goes in and comes out as bits."""
    torch: Any = importlib.import_module("torch")

    def tensor(x: np.ndarray) -> Any:
        bits = torch.tensor(x.view(np.int16) if x.dtype == jnp.bfloat16 else x)
        values = bits.view(torch.bfloat16) if x.dtype == jnp.bfloat16 else bits
        return torch.empty(x.shape, dtype=values.dtype).copy_(values)  # NumPy's of no rows has strides of 0

    out = torch._grouped_mm(tensor(lhs), tensor(rhs), offs=torch.tensor(np.cumsum(group_sizes), dtype=torch.int32))
    return out.view(torch.int16).numpy().view(jnp.bfloat16) if out.dtype == torch.bfloat16 else out.numpy()


def pallas_tpu(lhs: Any, rhs: Any, group_sizes: Any, preferred_element_type: Any = None) -> Any:
    """Our TPU kernels, interpreted."""
    options: dict[str, Any] = {"backend": INTERPRETED["pallas_tpu"]}
    return ragged.grouped_matmul(lhs, rhs, group_sizes, preferred_element_type=preferred_element_type, **options)


def triton_gpu(lhs: Any, rhs: Any, group_sizes: Any, preferred_element_type: Any = None) -> Any:
    """Our GPU kernel, interpreted."""
    options: dict[str, Any] = {"backend": INTERPRETED["triton_gpu"]}
    return ragged.grouped_matmul(lhs, rhs, group_sizes, preferred_element_type=preferred_element_type, **options)


class Entry(NamedTuple):
    """A column of the page: a function, what it needs, and how it is asked."""

    function: str
    package: str
    framework: str = "jax"
    large: bool = True  # too much for interpreted kernels


HERE = "tests.benchmarks.conformance"
FUNCTIONS = {
    "ragged": Entry("ragged:grouped_matmul", "ragged"),
    "ragged, TPU kernels": Entry(f"{HERE}:pallas_tpu", "jax", large=False),
    "ragged, GPU kernel": Entry(f"{HERE}:triton_gpu", "jax-triton", large=False),
    "lax.ragged_dot": Entry("jax.lax:ragged_dot", "jax"),
    "megablox": Entry(f"{HERE}:megablox", "jax", large=False),
    "tokamax": Entry(f"{HERE}:tokamax", "tokamax"),
    "torch": Entry(f"{HERE}:torch", "torch", "numpy"),
}


def ask(entry: Entry) -> dict[str, Any]:
    """What a process of its own finds; `{"error": ...}` if it finds nothing."""
    if report.versions(entry.package)[entry.package] is None:
        return {"error": f"{entry.package} isn't installed"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "ragged.conformance", entry.function]
        command += ["--framework", entry.framework, "--json", str(path)]
        done = subprocess.run([*command, *["--large"] * entry.large], capture_output=True, text=True)
        if not path.exists():
            said = (done.stderr.strip().splitlines() or [""])[-1].strip()
            return {"error": f"it ended with exit status {done.returncode}: {said}"[:300]}
        found = json.loads(path.read_text())
    outcomes = {each["check"]: each for each in found["outcomes"]}
    return {
        "function": found["function"],
        "framework": found["framework"],
        "platform": found["platform"],
        "outcomes": {name: [each["status"], each["detail"]] for name, each in outcomes.items()},
    }


SIGNS = {"pass": "✓", "fail": "**✗**", "raises": "**!**", "refused": "–", "n/a": ""}


def tables(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What stands between `<!-- NAME -->` and `<!-- /NAME -->` in the page."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    yield "conformance", f"{results['device']}, {results['date']}; {versions}."
    found = {name: each["outcomes"] for name, each in results["functions"].items() if "outcomes" in each}

    def sign(name: str, check: str) -> str:
        status, _ = found[name].get(check, ("n/a", ""))
        return SIGNS[status]

    kinds = dict.fromkeys(check.kind for check in CHECKS)
    rows: list[list[str]] = []
    for kind in kinds:
        rows.append([f"**{kind}**", *[""] * len(found)])
        rows += [[check.name, *(sign(name, check.name) for name in found)] for check in CHECKS if check.kind == kind]
    total = ["pass / fail / raise"]
    for outcomes in found.values():
        counts = {status: sum(each[0] == status for each in outcomes.values()) for status in STATUSES}
        total.append(f"{counts['pass']} / {counts['fail']} / {counts['raises']}")
    yield "conformance-table", table(["", *found], [*rows, total])
    lines = []
    for name, outcomes in found.items():
        bad = [(check, *each) for check, each in outcomes.items() if each[0] not in ("pass", "n/a")]
        lines += (
            [f"- {name}", *(f"  - {check}, {status}: `` {detail} ``" for check, status, detail in bad)] if bad else []
        )
    left = [f"- {name}: {each['error']}" for name, each in results["functions"].items() if "error" in each]
    yield "conformance-details", "\n".join([*lines, *left])
    yield "conformance-checks", table(["check", "why"], ([check.name, check.why] for check in CHECKS))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there; those of other functions in it are kept")
    parser.add_argument("--only", nargs="+", choices=[*FUNCTIONS], default=[*FUNCTIONS], help="these functions alone")
    parser.add_argument("--page", type=Path, help="write the file's results into this page, without running anything")
    args = parser.parse_args(arguments)
    path = args.json or DOCS / "benchmarks" / "conformance.json"
    if args.page is not None:
        args.page.write_text(fill(args.page.read_text(), tables(json.loads(path.read_text()))))
        return
    results: dict[str, Any] = {
        "date": report.today(),
        "device": report.processor(),
        "versions": report.versions(*PACKAGES),
        "functions": json.loads(path.read_text())["functions"] if path.exists() else {},
    }
    for name in args.only:
        results["functions"][name] = ask(FUNCTIONS[name])
        found = results["functions"][name]
        print(name, found.get("error") or [each[0] for each in found["outcomes"].values()].count("pass"), flush=True)
        report.save(results, args.json)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
