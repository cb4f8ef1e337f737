"""`docs/errors.md`: what each call prints, and that no place that raises is forgotten."""

import re

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
    unreached = sorted(where for at, where in errors.places().items() if at not in lines)
    assert unreached == sorted(errors.UNREACHED)  # a function may have several


def test_every_message_has_the_form() -> None:
    """The call and the problem, which ends in a stop; what came; the hint."""
    entries = re.findall(r"```text\n>>> (.*)\n((?:.*\n)+?)```", errors.PAGE.read_text())
    assert len(entries) > 470
    for call, message in entries:
        assert re.fullmatch(r"\w+: `[^`]+`: (.+[.]\n)+(?!Got ).+[.?]\n", message), (call, message)
