"""The code in the README, in `docs/` and in docstrings runs, and links lead somewhere."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[str]:
    return [textwrap.dedent(code) for _, code in BLOCK.findall(text)]


def docstrings() -> list[tuple[str, str]]:
    found = []
    for path in sorted((ROOT / "ragged").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                doc = ast.get_docstring(node) or ""
                name = getattr(node, "name", "module")
                found += [(f"{path.stem}.{name}", code) for code in blocks(doc)]
    return found


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] * (page.name == "quantisation.md"), id=page.name)
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


def test_the_readme_s_error_is_the_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    with jax_defaults():
        namespace: dict[str, object] = {}
        first, error = blocks((ROOT / "README.md").read_text())[:2]
        exec(first, namespace)
        capsys.readouterr()
        exec(error, namespace)
    claimed = [line.strip().removeprefix("# ") for line in error.splitlines() if line.strip().startswith("# ")]
    assert capsys.readouterr().out.splitlines() == claimed


DOCSTRINGS = docstrings()


@pytest.mark.parametrize("name, code", DOCSTRINGS, ids=[name for name, _ in DOCSTRINGS])
def test_docstrings_run(name: str, code: str) -> None:
    with jax_defaults():
        exec(compile(code, name, "exec"), {})


def test_there_are_examples_to_run() -> None:
    assert {name for name, _ in DOCSTRINGS} >= {"_matmul.matmul", "tensor.GroupedTensor", "route.route"}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


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


def test_the_design_page_lists_every_room() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    rooms = [p for p in (ROOT / "ragged").rglob("*.py") if p != ROOT / "ragged" / "__init__.py"]
    for room in rooms:
        assert f"`{room.relative_to(ROOT)}`" in text
    for named in re.findall(r"^\| `(ragged/[^`]+)`", text, re.MULTILINE):
        assert (ROOT / named).exists()


class jax_defaults:
    """Examples are for users, who have JAX's default promotion."""

    def __enter__(self) -> None:
        import jax

        self.contexts = [jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")]
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)
