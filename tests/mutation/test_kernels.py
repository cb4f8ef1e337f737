"""The tables of hand-picked mutants and of verdicts are up to date."""

import re
from pathlib import Path

from tests.mutation.kernels import GPU, TPU
from tests.mutation.verdicts import VERDICTS

ROOT = Path(__file__).parents[2]
BACKENDS = ROOT / "ragged" / "backends"


def test_each_mutation_has_one_place() -> None:
    """So that a change of a kernel changes the table, too."""
    assert len(TPU) == len(GPU) == 30
    for backend, table in (("tpu", TPU), ("gpu", GPU)):
        texts = {name: (BACKENDS / backend / f"{name}.py").read_text() for name, _, _ in table}
        for name, old, new in table:
            assert texts[name].count(old) == 1 and old != new, (backend, name, old)


def test_verdicts_name_tests_that_exist() -> None:
    """Those of the page, too, which a test that is deleted or renamed would leave behind."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    said = [*VERDICTS.values(), (ROOT / "docs" / "mutations.md").read_text()]
    named = {name for text in said for name in re.findall(r"`(test_\w+)`", text)}
    assert named and not [name for name in named if f"def {name}(" not in tests]
