"""Runs the cells of a notebook, and writes down what they show: `python docs/site/notebook.py docs/tutorial.ipynb`.

A cell shows what it prints, and its last expression: by `_repr_html_`, which pages and notebooks draw, and by `repr`.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def outputs(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell of code shows, in the notebooks' format."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace) if last else None
    found: list[dict[str, Any]] = []
    if text := printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        found.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return found


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of a run from top to bottom."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [dict(cell) for cell in notebook["cells"]]
    for cell in cells:
        if cell["cell_type"] == "code":
            cell["outputs"] = outputs("".join(cell["source"]), namespace)
    return notebook | {"cells": cells}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(json.dumps(executed(json.loads(path.read_text())), indent=1, ensure_ascii=False) + "\n")
