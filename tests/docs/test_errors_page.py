"""`docs/errors.md`: what each call prints, and that no place that raises is forgotten."""

import re
from pathlib import Path

import pytest

from tests import errors, gpu
from tests.docs.context import jax_defaults


@pytest.mark.long
def test_the_page_is_what_calls_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write it anew: `python -m tests.errors`."""
    monkeypatch.chdir(errors.ROOT)
    gpu.needs_triton()  # which backends there are is in a message
    with jax_defaults():
        text, lines = errors.page()
    assert text == errors.PAGE.read_text()
    unreached = {where for at, where in errors.places().items() if at not in lines}
    assert unreached == set(errors.UNREACHED)


def test_every_message_has_the_form() -> None:
    """The call and the problem, which ends in a stop; what came; the hint."""
    entries = re.findall(r"```text\n>>> (.*)\n((?:.*\n)+?)```", errors.PAGE.read_text())
    assert len(entries) > 200
    for call, message in entries:
        assert re.fullmatch(r"\w+: `[^`]+`: (.+[.]\n)+(?!Got ).+[.?]\n", message), (call, message)


def test_calls_on_the_page_are_those_of_the_table() -> None:
    calls = [line for block in errors.CALLS.values() for line in block.strip().splitlines()]
    assert re.findall(r"^>>> (.*)$", Path(errors.PAGE).read_text(), re.MULTILINE) == calls
