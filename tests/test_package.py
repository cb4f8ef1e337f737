"""What installers read agrees with the code: the version, the extras, the oldest supported versions.

`.ci/package.py` builds the package, and installs and runs it.
"""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import ragged

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_stated_once() -> None:
    """In `ragged/core/version.py`; the changelog begins with it."""
    assert PYPROJECT["project"]["dynamic"] == ["version"] and "version" not in PYPROJECT["project"]
    file = ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]
    stated = [path for path in (ROOT / "ragged").rglob("*.py") if f'"{ragged.__version__}"' in path.read_text()]
    assert stated == [file]
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == ragged.__version__


def test_the_installed_version() -> None:
    """Metadata of the installed package. `uv run` installs it; tests also run without."""
    try:
        installed = importlib.metadata.version("jax-ragged")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jax-ragged isn't installed")
    assert installed == ragged.__version__


def test_extras_exist() -> None:
    """Each extra that an error or a page names."""
    texts = [
        path.read_text()
        for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "ragged").rglob("*.py"))
    ]
    named = {extra for text in texts for extra in re.findall(r"pip install '(?:\.|jax-ragged)\[(\w+)\]'", text)}
    assert {"cuda", "tpu"} <= named <= set(PYPROJECT["project"]["optional-dependencies"])


def test_the_oldest_versions_that_the_pages_state() -> None:
    python = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    (jax,) = (name.removeprefix("jax>=") for name in PYPROJECT["project"]["dependencies"] if name.startswith("jax>="))
    for page in ("README.md", "docs/start.md", "CHANGELOG.md"):
        assert f"Python {python} and jax {jax}, or newer".lower() in (ROOT / page).read_text().lower()
