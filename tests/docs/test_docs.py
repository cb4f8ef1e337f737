"""The code in the README, in `docs/` and in docstrings runs, and links lead somewhere."""

import ast
import importlib.util
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ragged
from tests.docs.context import jax_defaults

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[str]:
    return [textwrap.dedent(code) for _, code in BLOCK.findall(text)]


def docstrings() -> list[tuple[str, str]]:
    found = []
    for path in sorted((ROOT / "ragged").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "```python" in text else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                doc = ast.get_docstring(node) or ""
                name = getattr(node, "name", "module")
                found += [(f"{path.stem}.{name}", code) for code in blocks(doc)]
    return found


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] * (page.name != "README.md"), id=page.name)
        for page in PAGES
        if blocks(page.read_text())
    ],
)
def test_pages_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of a page, one after another in one namespace. What `# ...` after a print claims, it prints."""
    with jax_defaults():
        namespace: dict[str, object] = {}
        for code in blocks(page.read_text()):
            exec(compile(code, str(page), "exec"), namespace)
            printed = capsys.readouterr().out
            for claimed in re.findall(r"print\(.*\)  # (\w.*)", code):
                assert claimed in printed


@pytest.mark.long
def test_nested_tensors_of_torch() -> None:
    """The guide's functions, there and back, with an empty group and a tail. Needs torch."""
    torch = pytest.importorskip("torch")
    import jax.numpy as jnp

    (code,) = (code for code in blocks((ROOT / "docs" / "guide.md").read_text()) if "def from_torch" in code)
    namespace = {"jnp": jnp, "torch": torch, "GroupedTensor": ragged.GroupedTensor}
    exec(code, namespace)
    from_torch, to_torch = (namespace[name] for name in ("from_torch", "to_torch"))
    for dtype in (torch.float32, torch.bfloat16):
        parts = [torch.arange(2.0 * rows).reshape(rows, 2).to(dtype) for rows in (3, 0, 2)]
        x = from_torch(torch.nested.nested_tensor(parts, layout=torch.jagged))
        assert x.offsets.tolist() == [0, 3, 3, 5] and x.dtype == str(dtype).removeprefix("torch.")
        assert [group.tolist() for group in x] == [part.tolist() for part in parts]
        tail = ragged.GroupedTensor(jnp.pad(x.data, ((0, 3), (0, 0))), first_dims=x.first_dims)
        back = to_torch(tail).unbind()
        assert [part.tolist() for part in back] == [part.tolist() for part in parts] and back[0].dtype == dtype


def test_the_readme_s_error_is_the_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    with jax_defaults():
        namespace: dict[str, object] = {}
        first, *others = blocks((ROOT / "README.md").read_text())
        (error,) = (code for code in others if "except ValueError" in code)
        exec(first, namespace)
        capsys.readouterr()
        exec(error, namespace)
    claimed = [line.strip().removeprefix("# ") for line in error.splitlines() if line.strip().startswith("# ")]
    assert capsys.readouterr().out.splitlines() == claimed


def test_the_readme_s_figures_are_those_of_the_benchmarks() -> None:
    read = {
        name: json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text()) for name in ("conformance", "cpu")
    }
    comparison = (ROOT / "README.md").read_text().partition("## Comparison\n")[2]
    rows = re.findall(r"^\| (.*) \|$", comparison, re.MULTILINE)
    cells = {(row := [cell.strip() for cell in line.split("|")])[0]: row[1:] for line in rows}
    functions = next(iter(cells.values()))
    outcomes = [read["conformance"]["functions"][name]["outcomes"] for name in functions]
    marks, checked = {"pass": "✓", "fail": "✗", "raises": "!", "n/a": ""}, 0
    for check in set(cells) & set(outcomes[0]):
        checked += 1
        assert cells[check] == [marks[of.get(check, ["n/a"])[0]] for of in outcomes], check
    counts = [
        [sum(of[0] == status for of in each.values()) for status in ("pass", "fail", "raises")] for each in outcomes
    ]
    assert cells["checks: pass / fail / raise"] == [" / ".join(map(str, count)) for count in counts]
    times = {(*row["m, k, n, g"], row["dtype"], row["product"]): row for row in read["cpu"]["rows"] if "shape" in row}
    for name, row in cells.items():
        if shape := re.fullmatch(r"(\d+)×(\d+)×(\d+), (\d+) groups, (\w+)", name):
            checked += 1
            found = [
                times[*map(int, shape.groups()[:4]), shape[5], of]["figures"]
                for of in ("forward", "forward + backward")
            ]
            for function, cell in zip(functions, row, strict=True):
                want = [each[function]["of_dense"] for each in found if function in each]
                assert cell == " · ".join(f"{x:.1f}" if x < 10 else f"{x:.0f}" for x in want), (name, function)
    assert checked > 8


@pytest.mark.long
def test_the_tutorial_shows_what_it_says() -> None:
    """Its outputs are those of a run. To make them again: `python docs/site/notebook.py docs/tutorial.ipynb`."""
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())
    with jax_defaults():
        ran = script("notebook").executed(notebook)
    assert sum(bool(cell.get("outputs")) for cell in ran["cells"]) > 8
    for got, stored in zip(ran["cells"], notebook["cells"], strict=True):
        assert got == stored


def test_the_pictures_are_those_of_the_script() -> None:
    """To draw them again: `python docs/site/pictures.py`."""
    drawn = script("pictures").pictures()
    assert {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").iterdir()} == drawn


DOCSTRINGS = docstrings()


@pytest.mark.long
@pytest.mark.parametrize("name, code", [pytest.param(name, code, id=name) for name, code in DOCSTRINGS])
def test_docstrings_run(name: str, code: str) -> None:
    with jax_defaults():
        exec(compile(code, name, "exec"), {})


def test_there_are_examples_to_run() -> None:
    assert {name for name, _ in DOCSTRINGS} >= {"matmul.matmul", "tensor.GroupedTensor", "route.route"}


def test_links_lead_somewhere() -> None:
    for page in (*PAGES, *(ROOT / "docs" / "api").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), (page.name, target)


def test_capabilities_name_their_tests() -> None:
    """Each row of the table in `docs/verification.md` names files, and functions in them, that exist."""
    page = (ROOT / "docs" / "verification.md").read_text().partition("## Capabilities")[2]
    rows = re.findall(r"^\| ([A-Z]\d+) \| .* \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) > 90 and len({id for id, _ in rows}) == len(rows) == page.count("\n| ") - page.count("\n| id")
    for id, cell in rows:
        for file, functions in re.findall(r"`((?:\w+/)?test_\w+)`(?:: ((?:`\w+`(?:, )?)+))?", cell):
            (path,) = (ROOT / "tests").rglob(f"{file}.py")
            text = path.read_text()
            missing = [name for name in re.findall(r"\w+", functions) if f"def test_{name}(" not in text]
            assert not missing, (id, file, missing)


def test_the_main_path_is_what_the_code_says() -> None:
    """Each line that the design page quotes is in the file that it names."""
    page = (ROOT / "docs" / "design.md").read_text()
    (quoted,) = re.findall(r"## The main path\n.*?```text\n(.*?)```", page, re.DOTALL)
    file, count = set[str](), 0
    for line in filter(None, map(str.strip, quoted.splitlines())):
        if named := re.match(r"# (ragged/[\w/]+\.py)", line):
            file = {x.strip() for x in (ROOT / named[1]).read_text().splitlines()}
        else:
            assert line in file, line
            count += 1
    assert 10 < count < 40


PUBLIC = ("ragged", "ragged.lax", "ragged.nn", "ragged.parallel", "ragged.tuning")


def public_names() -> Iterator[tuple[str, Any]]:
    """Everything that a user may write, with its name: `ragged.matmul`, `ragged.nn.MoE`, …."""
    for module in PUBLIC:
        names = vars(importlib.import_module(module))
        for name, value in names.items():
            if (
                not name.startswith("_")
                and not inspect.ismodule(value)
                and (isinstance(value, type) or callable(value))
            ):
                yield f"{module}.{name}", value


def undocumented(name: str, value: Any) -> Iterator[str]:
    """What of a class or a function has no docstring: itself, its public methods and properties."""
    own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    if not own or own.startswith(f"{value.__name__}("):  # as dataclasses make them
        yield name
    for owner in value.__mro__ if isinstance(value, type) else ():
        if not owner.__module__.startswith("ragged"):
            continue
        for member, what in vars(owner).items():
            function = what.fget if isinstance(what, property) else getattr(what, "__func__", what)
            if not member.startswith("_") and inspect.isfunction(function) and not function.__doc__:
                yield f"{name}.{member}"


def test_every_public_name_is_documented() -> None:
    """By a docstring, and on a page of the reference."""
    names = dict(public_names())
    assert len(names) > 40
    assert not [missing for name, value in names.items() for missing in undocumented(name, value)]
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = re.findall(r"^::: (?!ragged\.conformance)(.+)$", pages, re.MULTILINE)
    # A function that lies in a module of its name has both names there.
    assert {re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in listed} == set(names)


def test_every_public_name_is_at_a_glance() -> None:
    """Each public name, and each public member of the classes that users call methods of, is on `docs/glance.md`."""
    page = (ROOT / "docs" / "glance.md").read_text()
    names = dict(public_names())
    missing = [name for name in names if not re.search(rf"{re.escape(name)}\b", page)]
    for owner in (ragged.GroupedTensor, ragged.Route, ragged.Exchange):
        members = {member for member in dir(owner) if not member.startswith("_")} | set(owner.__annotations__)
        missing += [
            f"{owner.__name__}.{member}"
            for member in sorted(members)
            if not member.startswith("_") and not re.search(rf"\.{member}\b|{member}=", page)
        ]
    assert not missing


@pytest.mark.long
def test_calls_that_a_type_checker_accepts_run() -> None:
    """And each public function has a wrong call, which pyright flags (see `tests/typing/calls.py`)."""
    from tests.typing import calls

    with jax_defaults():
        calls.right()
    wrong = inspect.getsource(calls.wrong)
    functions = {name for name, value in public_names() if inspect.isfunction(value)}
    never_wrong = {"ragged.tuning.cache_entries", "ragged.tuning.cache_path"}  # they take no arguments
    assert not [name for name in functions - never_wrong if f"    {name}(" not in wrong]


def test_the_derivatives_layouts_are_as_the_page_says() -> None:
    import jax.numpy as jnp

    page = (ROOT / "docs" / "transformations.md").read_text()
    rows = ragged.GroupedTensor(jnp.ones((4, 3)), jnp.array([2, 1], jnp.int32))
    both = ragged.GroupedTensor(jnp.ones((4, 2)), rows.first_dims, rows.first_dims)
    kinds = {"uniform": ragged.GroupedTensor(jnp.ones((2, 3, 3))), "rows": rows, "columns": rows.mT, "both": both}
    operands = re.findall(r"^!\[(\w+) @ (\w+) = \w+\]", (ROOT / "docs" / "layouts.md").read_text(), re.MULTILINE)
    found = []
    for lhs, rhs in operands:
        plans = ragged.explain(kinds[lhs], kinds[rhs], platform="cpu").plans
        found.append(tuple(plan.layout for plan in plans))
    assert len(found) == 8
    assert found == re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \|$", page, re.MULTILINE)


def claims(page: str, *sentences: str) -> None:
    """That a page has these sentences, in lines of any length."""
    text = " ".join((ROOT / page).read_text().split())
    for sentence in sentences:
        assert sentence in text


def test_shapes_that_the_pages_state() -> None:
    """The default of `max_last`, and a layer's lines."""
    import jax
    import jax.numpy as jnp

    claims("README.md", "By default it is the number of columns of the right operand's buffer")
    x, y = (ragged.GroupedTensor(jnp.ones((rows, 3)), jnp.array([2, 1], jnp.int32)) for rows in (4, 7))
    both = [ragged.GroupedTensor(jnp.ones((4, n)), x.first_dims, x.first_dims) for n in (2, 3)]
    for lhs, rhs in ((x, y.mT), (y, x.mT), both, (both[0].mT, both[1]), (both[1], both[0].mT)):
        out = jax.eval_shape(lambda lhs, rhs: ragged.matmul(lhs, rhs, capacity=4 if lhs.transposed else None), lhs, rhs)
        assert out.kind == "ragged both" and out.shape[1] == rhs.shape[1]

    claims("README.md", "a mixture of experts in 24 lines")
    claims("docs/experts.md", "has 24 lines")
    example = (ROOT / "examples" / "moe_layer.py").read_text()
    assert "layer in 24 lines" in example
    (layer,) = (node for node in ast.parse(example).body if isinstance(node, ast.ClassDef) and node.name == "MoE")
    assert layer.end_lineno and layer.end_lineno - layer.lineno + 1 == 24


def script(name: str) -> Any:
    """A module of `docs/site`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    assert spec and spec.loader
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module
