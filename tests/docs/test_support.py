"""`docs/support.md` says what is planned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import support


@pytest.mark.long
def test_the_page_is_what_is_planned(tmp_path: Path) -> None:
    """What runs on which device; written anew and compared. Mend it with `python -m tests.support`."""
    pages = support.PAGE, support.WEIGHTS_PAGE
    written = [tmp_path / page.name for page in pages]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-m", "tests.support", *map(str, written)], env=environment, check=True)
    assert [each.read_text() for each in written] == [page.read_text() for page in pages]
