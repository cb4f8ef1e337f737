"""What `mkdocs build` asks of us: pages made of files that lie elsewhere, and that nothing is fetched by a reader."""

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
BESIDE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
REFERENCE = re.findall(
    r"^::: (.*)$", "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md")), re.MULTILINE
)
# As they are in the repository, and where they are on the site.
LINKS = [
    (r"\]\((?:\.\./)?examples/(\w+)\.py\)", r"](examples/\1.md)"),
    (r"\]\((?:\.\./)?CHANGELOG\.md", "](changelog.md"),
    (r"\]\((?:\.\./)?CONTRIBUTING\.md", "](contributing.md"),
    (r"\]\(\.\./README\.md", "](index.md"),
    (r"\]\(docs/", "]("),
    (r"\]\(([\w./-]+)\.ipynb", r"](\1.md"),
]
# A script, a style, a font or a picture of another host; not a link, which a reader follows by choice.
FETCHED = re.compile(
    r"""(?:\bsrc="|<link rel="(?:stylesheet|preconnect|icon)" href="|url\(["']?)(?:https?:)?//[^"')\s]*"""
)


def on_files(files: Files, config: Any) -> Files:
    made = {page: (ROOT / path).read_text() for page, path in BESIDE.items()}
    made |= {f"examples/{path.stem}.md": example(path) for path in sorted((ROOT / "examples").glob("*.py"))}
    for file in [each for each in files if each.src_uri.endswith(".ipynb")]:
        made[file.src_uri.removesuffix(".ipynb") + ".md"] = notebook(json.loads(Path(file.abs_src_path).read_text()))
        files.remove(file)
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are on the site, and one to the reference from each public name."""
    up = "../" * page.file.src_uri.count("/")
    for written, there in LINKS:
        markdown = re.sub(written, there.replace("](", f"]({up}"), markdown)
    outside = re.split(r"(^ *```.*?^ *```$|^#[^\n]*$|`` .*? ``)", markdown, flags=re.DOTALL | re.MULTILINE)
    outside[::2] = [re.sub(r"(?<!\[)(`(ragged(?:\.\w+)+)(?:\([^`]*\))?`)", named, text) for text in outside[::2]]
    return "".join(outside)


def named(found: re.Match[str]) -> str:
    """A link to what `found` names. A function may lie in a module of its name, which would be found first."""
    function = f"{found[2]}.{found[2].rpartition('.')[2]}"
    target = next((each for each in (function, found[2]) if each in REFERENCE), None)
    return f"[{found[1]}][{target}]" if target else found[1]


def on_post_build(config: Any) -> None:
    for path in Path(config["site_dir"]).rglob("*"):
        if path.suffix in (".html", ".css", ".svg") and (found := FETCHED.search(path.read_text())):
            raise PluginError(f"{path} fetches {found[0]}")


def example(path: Path) -> str:
    """A script as a page: what it says of itself, and its code."""
    tree = ast.parse(source := path.read_text())
    first, _, rest = (ast.get_docstring(tree) or "").partition("\n")
    lines = [re.sub(r"^(    )?(\S.*)$", r"\1\2", line) for line in rest.splitlines()]
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
    return f"# {path.stem}\n\n{first}\n" + "\n".join(lines) + f"\n\n```python\n{code}\n```\n"


def notebook(cells: Any) -> str:
    """A notebook as a page, with the outputs that are stored in it."""
    text = ""
    for cell in cells["cells"]:
        source = "".join(cell["source"])
        text += f"{source}\n\n" if cell["cell_type"] == "markdown" else f"```python\n{source}\n```\n\n"
        for output in cell.get("outputs", []):
            shown = output.get("data", {"text/plain": output.get("text", [])})
            if "text/html" in shown:
                text += f'<div class="output">{"".join(shown["text/html"])}</div>\n\n'
            else:
                text += f"```text\n{''.join(shown['text/plain']).rstrip()}\n```\n\n"
    return text
