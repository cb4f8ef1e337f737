"""A pytest plugin. With `$REACH`, the lines of `ragged` that each test runs are written to this file; tests that are in
it already aren't run again. With `$TESTS`, only the tests that this file lists run, in its order, and none starts after
`$BUDGET` seconds.
"""

import json
import os
import sys
import time
from collections.abc import Generator
from functools import _lru_cache_wrapper
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import pytest

REACH, TESTS = os.environ.get("REACH"), os.environ.get("TESTS")
END = time.monotonic() + float(os.environ.get("BUDGET", "inf"))
ROOT, TOOL, LINE = f"{Path.cwd()}/", sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE
reached: dict[str, set[int]] = {}


def _record(code: CodeType, line: int) -> Any:
    if code.co_filename.startswith(f"{ROOT}ragged/"):
        reached.setdefault(code.co_filename.removeprefix(ROOT), set()).add(line)
    return sys.monitoring.DISABLE  # this line, until `restart_events`


def _clear_caches() -> None:
    """A test that finds a traced program in a cache doesn't run the lines that traced it."""
    jax.clear_caches()
    modules = [module for name, module in sys.modules.items() if name.startswith("ragged")]
    for value in [value for module in modules for value in vars(module).values()]:
        if isinstance(value, _lru_cache_wrapper):
            value.cache_clear()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if TESTS:
        named = {item.nodeid: item for item in items}
        items[:] = [named[name] for name in Path(TESTS).read_text().splitlines() if name in named]
    if REACH:
        known = {json.loads(line)["test"] for line in Path(REACH).read_text().splitlines()}
        items[:] = [item for item in items if item.nodeid not in known]
        sys.monitoring.use_tool_id(TOOL, "reach")
        sys.monitoring.register_callback(TOOL, LINE, _record)
        sys.monitoring.set_events(TOOL, LINE)


def pytest_sessionfinish() -> None:
    if REACH:
        sys.monitoring.free_tool_id(TOOL)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    if not REACH:
        return (yield)
    _clear_caches()
    reached.clear()
    sys.monitoring.restart_events()
    start = time.monotonic()
    ran = yield
    lines = {file: sorted(numbers) for file, numbers in reached.items()}
    row = {"test": item.nodeid, "seconds": round(time.monotonic() - start, 2), "lines": lines}
    with open(REACH, "a") as out:
        print(json.dumps(row), file=out)
    return ran


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.monotonic() > END:
        pytest.skip("The time is spent.")
