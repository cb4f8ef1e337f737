"""Builds the sdist and the wheel, and checks them: their files, their metadata, and that each installs and runs.

python .ci/package.py           as CI does
python .ci/package.py FOLDER    keeps the two files in FOLDER, for a release
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "jax-ragged[cuda,plot,tune]", "jax-ragged[tpu]"


def run(*command: object, cwd: Path = ROOT) -> str:
    """What the command printed."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nThis command failed: {' '.join(map(str, command))}")
    return done.stdout


def check_files(sdist: Path, wheel: Path) -> None:
    """Both have the tracked files of the package, its licence and its metadata, and nothing else."""
    package = set(run("git", "ls-files", "ragged").splitlines())
    assert {"ragged/__init__.py", "ragged/py.typed"} <= package
    with tarfile.open(sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    others = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert found == package | others, found ^ (package | others)
    folder = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    others = {f"{folder}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    found = set(zipfile.ZipFile(wheel).namelist())
    assert found == package | others, found ^ (package | others)


def check_install(file: Path, folder: Path) -> None:
    """Installs one of the files in a new environment, and runs the README's first example from a different folder."""
    folder.mkdir()
    python = folder / "environment" / "bin" / "python"
    run("uv", "venv", "--quiet", "--python", "3.12", folder / "environment")
    run("uv", "pip", "install", "--quiet", "--python", python, file)
    for extras in EXTRAS:  # by name, as the hints of errors say
        run("uv", "pip", "install", "--quiet", "--dry-run", "--python", python, extras)
    readme = (ROOT / "README.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)[0]
    version = "import importlib.metadata\nassert importlib.metadata.version('jax-ragged') == ragged.__version__\n"
    where = f"assert ragged.__file__.startswith({str(folder)!r}), ragged.__file__\n"
    (folder / "example.py").write_text(code + version + where)
    print(run(python, "-I", folder / "example.py", cwd=folder))
    print(run(python, "-I", "-m", "ragged", "info", cwd=folder))


with tempfile.TemporaryDirectory() as name:
    work = Path(name)
    dist = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else work / "dist"
    if dist.exists() and any(dist.iterdir()):
        sys.exit(f"{dist} isn't empty.")
    run("uv", "build", "--quiet", "--no-create-gitignore", "--out-dir", dist)  # the wheel from the sdist
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    print(run("uvx", "--quiet", "twine", "check", "--strict", sdist, wheel))
    check_files(sdist, wheel)
    check_install(wheel, work / "wheel")
    check_install(sdist, work / "sdist")
