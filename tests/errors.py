"""`docs/errors.md`: calls that raise, each with the error that it prints. The page is their only list: its first block
runs before them, and a new call is a new block with `>>> call`.

python -m tests.errors      writes anew what the calls print
"""

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import equinox as eqx
import jax

from ragged.core import errors

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"

UNREACHED = {
    "tuning/search.py:autotune": "one needs a program of several processes",
    "tools/explanation.py:plot": "one needs a machine without matplotlib",
    "tools/error_table.py:plot": "one needs a machine without matplotlib",
}
"""Where `fail` is called and the page shows no call, and why."""


type Place = tuple[str, int]  # file, first line of a call of `fail`, or of a check that calls it


def places() -> dict[Place, str]:
    """Every call of `Site.fail` in the package, with `file:function`. The command lines' own have pages of theirs."""
    found: dict[Place, str] = {}
    for path in sorted((ROOT / "ragged").rglob("*.py")):
        file = str(path.relative_to(ROOT / "ragged"))
        if file in ("core/errors.py", "__main__.py", "conformance/__init__.py"):
            continue

        def visit(node: ast.AST, function: str, file: str = file) -> None:
            if isinstance(node, ast.FunctionDef):
                function = node.name
            called = node.func if isinstance(node, ast.Call) else None
            fails = isinstance(called, ast.Attribute) and called.attr in ("fail", "text")
            checks = isinstance(called, ast.Name) and called.id in ("check_fill", "check_flag")
            if called is not None and (fails or checks):
                found[file, called.lineno] = f"{file}:{function}"
            for child in ast.iter_child_nodes(node):
                visit(child, function)

        visit(ast.parse(path.read_text()), "")
    return found


@contextmanager
def seen() -> Iterator[set[tuple[str, int]]]:
    """The lines from which errors were made."""
    lines: set[tuple[str, int]] = set()
    text = errors.Site.text

    def noted(self: Any, problem: str, hint: str) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # past `fail`, and what checks annotations
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(ROOT / "ragged") and file.name != "errors.py":
                lines.add((str(file.relative_to(ROOT / "ragged")), frame.f_lineno))
                break
            frame = frame.f_back
        return text(self, problem, hint)

    with patch.object(errors.Site, "text", noted):
        yield lines


def raised(code: str, names: dict[str, Any]) -> Exception | None:
    try:
        exec(compile(code, "<error>", "exec"), names)
    except Exception as error:
        return error
    return None


def told(error: Exception) -> str:
    """The error as a page shows it; of a run-time error only the message, which Equinox prints after a stack."""
    text = str(error)
    name = type(error).__name__
    if isinstance(error, eqx.EquinoxRuntimeError):
        text = text.split("equinox.EquinoxRuntimeError: ")[-1].split("\n\n")[0].split("\n---")[0]
    return f"{name}: {text}".strip()


def setup() -> dict[str, Any]:
    """What the page's first block makes."""
    found, names = re.search(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL), dict[str, Any]()
    assert found is not None
    exec(compile(found[1], "<setup>", "exec"), names)
    return names


def page() -> tuple[str, set[tuple[str, int]]]:
    """The page with what its calls print now, and the lines that these errors come from."""
    names = setup()

    def block(found: re.Match[str]) -> str:
        before = jax.sharding.get_mesh()
        error = raised(found[1], names)
        if jax.sharding.get_mesh() != before:
            jax.set_mesh(before)
        return f"```text\n>>> {found[1]}\n{'nothing' if error is None else told(error)}\n```"

    with seen() as lines:
        return re.sub(r"```text\n>>> ([^\n]*)\n.*?```", block, PAGE.read_text(), flags=re.DOTALL), lines


if __name__ == "__main__":
    import os

    os.environ.setdefault("RAGGED_TUNING_CACHE", "off")
    jax.config.update("jax_num_cpu_devices", 8)
    text, lines = page()
    PAGE.write_text(text)
    unreached = {at: where for at, where in places().items() if at not in lines}
    sys.stdout.write("\n".join(f"{at} {where}" for at, where in unreached.items()) + "\n")
