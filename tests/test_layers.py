"""Folders are layers: what may import what, and when. Functions are short, and take few arguments."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ragged.primitive import lowering

ROOT = Path(__file__).parent.parent
LAYERS = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(file): file for file in (ROOT / "ragged").rglob("*.py")}


def imported(name: str) -> Iterator[str]:
    """The modules of `ragged` that a module imports, at its top or inside its functions."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "ragged")
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").partition(".")[0] == "ragged"):
            assert not node.level, f"{name} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else str(node.module)


def layer_of(name: str) -> int | None:
    folder = name.split(".")[1] if "." in name else ""
    return LAYERS.index(folder) if folder in LAYERS else None


def test_every_folder_is_a_layer() -> None:
    found = {path.name for path in (ROOT / "ragged").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert len(LAYERS) == 12 and found == set(LAYERS)
    loose = {path.name for path in (ROOT / "ragged").iterdir() if path.is_file()}
    assert loose == {"__init__.py", "__main__.py", "lax.py", "py.typed"}


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_from_those_above_it(folder: str) -> None:
    """Nothing in a layer imports from `ragged` itself either, which imports all layers."""
    names = [name for name in FILES if name.split(".")[1:2] == [folder]]
    assert names
    for name in names:
        for other in imported(name):
            layer = layer_of(other)
            assert layer is not None and layer <= LAYERS.index(folder), f"{name} imports {other}"


def test_files_import_each_other_without_circles() -> None:
    graph = {name: {other for other in imported(name) if other != name} for name in FILES}
    assert sum(map(len, graph.values())) > 300
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' -> '.join(error.args[1])}")


def test_no_import_is_for_annotations_alone() -> None:
    """An import of `ragged` below `if TYPE_CHECKING:` would hide an arrow between layers."""
    for name, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                inside = [each for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom)]
                assert "ragged" not in " ".join(map(ast.unparse, inside)), name


TUPLES = {"_replace", "_asdict", "_fields"}  # public names of `typing.NamedTuple`


@pytest.mark.parametrize("name", FILES)
def test_no_module_uses_private_names_of_another(name: str) -> None:
    """An attribute `x._name`, or an import of `_name`, is of a name that the same file defines; JAX's are left out."""
    tree = ast.parse(FILES[name].read_text())
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    foreign = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            if "ragged" in (getattr(node, "module", None) or ast.unparse(node)):
                assert not [each for each in names if each.startswith("_") and not each.startswith("__")], name
            else:
                foreign |= names
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            is_foreign = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & foreign
            assert node.attr in own | TUPLES | {"_hlo_sharding"} or is_foreign, f"{name}: {ast.unparse(node)}"


NAMES_BACKENDS = {"ragged.primitive.lowering", "ragged.product.config"}
"""Modules that name each backend at most once: the registry, and configurations."""


def test_only_the_registry_and_a_backend_itself_name_it() -> None:
    for module, file in FILES.items():
        if not module.startswith("ragged.backends."):
            constants = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
            found = [each for each in constants if isinstance(each, str) and each in lowering.BACKENDS]
            assert len(found) == (len({*found}) if module in NAMES_BACKENDS else 0), f"{module} names {found}"


LINES, PARAMETERS = 80, 10
KERNELS = {
    "ragged.backends.gpu.kernel.grouped_product",
    "ragged.backends.gpu.kernel._add",
    "ragged.backends.gpu.kernel._pointers",
    "ragged.backends.tpu.tiled._body",
}
"""Bodies of kernels, and what Triton inlines into them."""
PUBLIC = {
    "ragged.nn.moe.MoE.__init__",
    "ragged.nn.router.Router.__init__",
    "ragged.ops.einsum.einsum",
    "ragged.ops.gated.gated_matmul",
    "ragged.ops.grouped.grouped_matmul",
    "ragged.ops.grouped.transposed_grouped_matmul",
    "ragged.ops.matmul.matmul",
    "ragged.parallel.estimate.estimate",
}
"""Public calls with many options."""


def functions(node: ast.AST, outer: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods in a tree, also those within others, by their dotted names."""
    for child in ast.iter_child_nodes(node):
        name = f"{outer}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else outer
        if isinstance(child, ast.FunctionDef):
            yield name, child
        yield from functions(child, name)


def lines(function: ast.FunctionDef) -> int:
    """Without the docstring, if the function is public."""
    first, last = function.body[0], function.end_lineno or 0
    is_public = not function.name.startswith("_") and ast.get_docstring(function) is not None
    return last - function.lineno + 1 - is_public * ((first.end_lineno or 0) - first.lineno + 1)


def parameters(function: ast.FunctionDef) -> int:
    """Without `self`."""
    given = function.args
    names = [
        each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if each
    ]
    return len([name for name in names if name != "self"])


@pytest.mark.parametrize("module", FILES)
def test_functions_are_short_and_take_few_arguments(module: str) -> None:
    for name, function in functions(ast.parse(FILES[module].read_text()), module):
        if name not in KERNELS:
            assert lines(function) <= LINES, f"{name} has {lines(function)} lines: split it into steps with names"
        if name not in KERNELS | PUBLIC:
            count = parameters(function)
            assert count <= PARAMETERS, f"{name} has {count} parameters: pass the record that holds them"


def test_the_lists_of_exceptions_name_functions() -> None:
    trees = ((module, ast.parse(file.read_text())) for module, file in FILES.items())
    names = {name for module, tree in trees for name, _ in functions(tree, module)}
    assert names >= KERNELS | PUBLIC


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
