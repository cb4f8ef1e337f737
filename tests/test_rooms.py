"""The rooms of the house: what may import what, and when."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = re.findall(r"^\| `(ragged/[^`]+)`", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)


def module_of(room: str) -> str:
    return room.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(room: str) -> set[str]:
    """The modules of `ragged` that a module imports, at its top or in its functions, but not for annotations alone."""
    found, modules = set[str](), set(map(module_of, ROOMS))
    tree = ast.parse((ROOT / room).read_text())
    tree.body = [x for x in tree.body if not (isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "ragged"}
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "ragged":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_imports_from_further_down(room: str) -> None:
    """The design page lists the modules in the order of imports, so there is no circle of them."""
    before = {module_of(other) for other in ROOMS[: ROOMS.index(room)]}
    assert imported(room) <= before, f"{room} imports {imported(room) - before}"


def test_platforms_are_imported_when_they_are_lowered_for() -> None:
    """`import ragged` takes in no Pallas, Triton, matplotlib or command line; a product on the CPU neither."""
    code = """
import sys
import jax.numpy as jnp
import ragged
def loaded():
    backends = ("ragged.backends.tpu.backend", "ragged.backends.gpu.backend")
    others = ("jax.experimental.pallas", "triton", "jax_triton", "matplotlib", "ragged.__main__", "ragged.conformance")
    return [name for name in (*others, *backends) if name in sys.modules]
assert not loaded(), loaded()
ragged.grouped_matmul(jnp.ones((4, 2)), jnp.ones((1, 2, 3)), jnp.array([3], jnp.int32)).block_until_ready()
assert not loaded(), loaded()
"""
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
