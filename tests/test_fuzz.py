"""The fuzzer: its programs agree with NumPy, and it reports a function that doesn't, as a script that shows it."""

import re
from typing import Any

import pytest

import ragged
from tests.fuzz.__main__ import fuzz
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.program import RUNS, Program

BY_DEFAULT = ("matmul, forward", "reduction", "route")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in BY_DEFAULT)) for name in OPERATIONS]
)
def test_a_program_of_each_operation(name: str) -> None:
    """One program in `jit`, with some sizes and values."""
    program = Program(OPERATIONS[name].build, name, "xla", 13, "jit")
    for _ in range(3):
        assert program.run(None) is None


def test_a_wrong_function_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A product with 1 too much in a row of one group. The reproducer is a script that prints the two values."""
    right = ragged.matmul

    def wrong(*args: Any, **options: Any) -> ragged.GroupedTensor:
        out = right(*args, **options)
        return out.with_data(out.data.at[out.offsets[1] - 1].add(1))  # the last row of the first group

    monkeypatch.setattr(ragged, "matmul", wrong)
    monkeypatch.setitem(RUNS, "xla", 50)
    assert fuzz("matmul, forward", "xla", 20, None)["mismatches"] == 1
    script = capsys.readouterr().out
    assert len(script.strip().splitlines()) < 25
    for is_wrong in (True, False):
        if not is_wrong:
            monkeypatch.undo()
        exec(script, {})
        printed = re.fullmatch(r"got (\S+) expected (\S+) within (\S+)\n", capsys.readouterr().out)
        assert printed, script
        got, want, error = map(float, printed.groups())
        assert (abs(got - want) > error) == is_wrong
