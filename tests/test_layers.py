"""Folders are layers: what may import what, and when. Functions are short, and take few arguments."""

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ragged.tuning import GpuConfig, TpuConfig, XlaConfig

ROOT = Path(__file__).parent.parent
LAYERS = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(file): file for file in (ROOT / "ragged").rglob("*.py")}
LAST = {name.rpartition(".")[2] for name in FILES}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imported(name: str) -> Iterator[str]:
    """The modules of `ragged` that a module imports, at its top or inside its functions."""
    for node in ast.walk(parsed(FILES[name])):
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
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                inside = [each for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom)]
                assert "ragged" not in " ".join(map(ast.unparse, inside)), name


TUPLES = {"_replace", "_asdict", "_fields"}  # public names of `typing.NamedTuple`


def test_no_module_uses_private_names_of_another() -> None:
    """An attribute `x._name`, or an import of `_name`, is of a name that the same file defines; JAX's are left out."""
    for name, file in FILES.items():
        nodes = list(ast.walk(parsed(file)))
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


BACKENDS = {each.backend for each in (XlaConfig, TpuConfig, GpuConfig)}
NAMES_BACKENDS = {"ragged.primitive.lowering", "ragged.product.config"}
"""Modules that name each backend at most once: the registry, and configurations."""


def test_only_the_registry_and_a_backend_itself_name_it() -> None:
    for module, file in FILES.items():
        if not module.startswith("ragged.backends."):
            constants = [node.value for node in ast.walk(parsed(file)) if isinstance(node, ast.Constant)]
            found = [each for each in constants if isinstance(each, str) and each in BACKENDS]
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


def test_functions_are_short_and_take_few_arguments() -> None:
    for name, function in itertools.chain(*(functions(parsed(file), module) for module, file in FILES.items())):
        if name not in KERNELS:
            assert lines(function) <= LINES, f"{name} has {lines(function)} lines: split it into steps with names"
        if name not in KERNELS | PUBLIC:
            count = parameters(function)
            assert count <= PARAMETERS, f"{name} has {count} parameters: pass the record that holds them"


def test_the_lists_of_exceptions_name_functions() -> None:
    trees = ((module, parsed(file)) for module, file in FILES.items())
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


UNITS = {"backends": ("core", "product", "backends", "primitive"), "product": ("core", "product")}
"""Folders of unit tests, whose arguments are made of what lies above in the chain: these layers."""
SEAMS = {
    "contract/executed.py": "what kernels and loops do each time that they run",
    "contract/launches.py": "which kernels a program has",
    "errors.py": "which places in the package raise an error of the page",
    "docs/test_hints.py": "the place and the hint of an error",
    "gpu.py": "what GPU kernels are compiled to, and their interpreter",
    "backends/layers.py": "derivatives of products whose dtype JAX doesn't differentiate",
    "ones.py": "a product and its derivatives, as `explain` has them",
    "ops/test_errors.py": "the form of all errors",
    "plain_backend.py": "a backend of two files",
    "primitive/test_constants.py": "bits, which XLA gets wrong without care",
    "primitive/test_lowered.py": "names of pipelined kernels",
    "primitive/test_one_exit.py": "the one function of each backend that ends a kernel",
    "product/test_function.py": "the operations that kernels have, to test each",
    "products.py": "one backend's kernels, without JAX's primitive",
    "ran.py": "which kernels ran",
    "support.py": "which backend would compute a product on a device that isn't here",
    "tools/test_explain.py": "the table of backends, with one more",
    "tuning/test_cache.py": "keys and files of the cache",
}
"""Other files that import what isn't public, and what for."""
TESTS = {str(file.relative_to(ROOT / "tests")): file for file in (ROOT / "tests").rglob("*.py")}
TOOLS = ("benchmarks", "mutation", "typing")
"""Folders without tests of the library."""
PUBLIC_MODULES = {"ragged", *map("ragged.{}".format, ("__main__", "conformance", "lax", "nn", "parallel", "tuning"))}
PUBLIC_CALLS = {"ragged.parallel.estimate"}  # a function, which hides the module of the same name


def used(file: Path) -> Iterator[str]:
    """The modules that a file imports, or gets as attributes of `ragged`."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in FILES and name not in PUBLIC_CALLS else str(node.module) for name in names)
        elif isinstance(node, ast.Attribute) and node.attr in LAST and ast.unparse(node) in FILES:
            yield ast.unparse(node)


def test_tests_use_public_names() -> None:
    """Moving what is private rewrites no test, but for unit tests in the folder of their own layer."""
    for name, file in TESTS.items():
        folder, names = name.partition("/")[0], set(used(file))
        allowed = UNITS.get(folder, (folder,))
        private = names & set(FILES) - PUBLIC_MODULES - PUBLIC_CALLS
        strange = sorted(each for each in private if each.split(".")[1] not in allowed)
        if folder not in TOOLS:
            assert bool(strange) == (name in SEAMS), f"{name} imports {strange}"
        others = sorted(each for each in names if re.search(r"^tests\b.*\.test_\w+$", each))
        assert not others, f"{name} imports {others}: what tests share is in a module of its own"
