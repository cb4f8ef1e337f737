"""What the first calls of a process cost, outside of `jit`, and the import, beside `jax.lax.ragged_dot`.

    python -m tests.benchmarks.calls [--json out.json] [--processes 5]

Each process imports JAX, Equinox and jaxtyping, then `ragged`, and computes a small product, then its gradients by both
operands, 30 times each. Processes of the two functions take turns. Figures are medians of processes.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from tests.benchmarks import report

CODE = """
import json, sys, time
import jax, jax.numpy as jnp, equinox, jaxtyping
found, name = {}, sys.argv[1]

def timed(key, function):
    began = time.perf_counter()
    jax.block_until_ready(function())
    found[key] = time.perf_counter() - began

def again(key, function):
    times = []
    for _ in range(30):
        timed(key, function)
        times.append(found[key])
    found[key] = sorted(times)[15]

def load():
    global ragged
    import ragged

if name == "ragged":
    timed("import", load)
x, w, sizes = jnp.ones((64, 32)), jnp.ones((4, 32, 16)), jnp.full(4, 16, jnp.int32)
jax.block_until_ready(jnp.sum(x + 1))

def product(x, w):
    if name == "ragged":
        return ragged.matmul(ragged.GroupedTensor(x, sizes), w).data
    return jax.lax.ragged_dot(x, w, sizes)

def gradients():
    return jax.grad(lambda x, w: jnp.sum(product(x, w)), (0, 1))(x, w)

timed("product", lambda: product(x, w))
again("product again", lambda: product(x, w))
timed("gradients", gradients)
again("gradients again", gradients)
print(json.dumps(found))
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=5, help="of each function")
    args = parser.parse_args(arguments)
    found: dict[str, list[dict[str, float]]] = {"ragged": [], "lax.ragged_dot": []}
    for _ in range(args.processes):
        for name, rows in found.items():
            command, variables = [sys.executable, "-c", CODE, name], {**os.environ, "JAX_PLATFORMS": "cpu"}
            printed = subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout
            rows.append(json.loads(printed.splitlines()[-1]))
    seconds = {name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()}
    for name, row in seconds.items():
        print(name, ", ".join(f"{key} {1e3 * value:.2f} ms" for key, value in row.items()))
    about = {
        "date": report.today(),
        "device": report.processor(),
        "versions": report.versions("ragged", "jax", "jaxlib"),
    }
    report.save({**about, "seconds": seconds}, args.json)


if __name__ == "__main__":
    main()
