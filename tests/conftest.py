"""Options of the test run: platforms, devices, strict promotion, which cases of a test run by default."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

pytest.register_assert_rewrite("tests.contract.programs")  # its failures show values, as those of test files do
DEFAULT_CASES, LONG_CASES = (Path(__file__).with_name(f"{name}_cases.txt") for name in ("default", "long"))


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on the CPU, also where JAX has a GPU; those marked `gpu` alone, with `-m gpu`, on the GPU."""
    on_gpu = config.option.markexpr == "gpu"
    jax.config.update("jax_platforms", "cuda,cpu" if on_gpu else "cpu")
    if on_gpu:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share its memory


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases of each `sampled` test: those of `long_cases.txt` as `long`, those of neither list as `slow`.

    Together, the cases that the two lists name have every value of each parameter. The only case of a test isn't
    listed: it runs by default, or with `-m long` if the test is `sampled(default=False)`, of which no case runs by
    default.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    default, long = (set(path.read_text().splitlines()) for path in (DEFAULT_CASES, LONG_CASES))
    is_whole = "::" not in "".join(config.args)  # whether all cases of each file are collected
    for test, cases in tests.items():
        runs_by_default = next(cases[0].iter_markers("sampled")).kwargs.get("default", True)
        short = [item for item in cases if runs_by_default and not item.get_closest_marker("long")]
        if len(cases) == 1:
            if not runs_by_default:
                cases[0].add_marker("long")
            continue
        for item in cases:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "long"]
            if item.nodeid not in default:
                item.add_marker("long" if item.nodeid in long else "slow")
        if is_whole and short and default.isdisjoint(item.nodeid for item in short):
            raise pytest.UsageError(f"List in {DEFAULT_CASES} which cases of {test} run by default.")
        listed = (item for item in cases if item.nodeid in default | long)
        if is_whole and (unseen := set().union(*map(_values, cases)).difference(*map(_values, listed))):
            best = max(cases, key=lambda item: len(_values(item) & unseen))
            raise pytest.UsageError(f"No case of {test} has {sorted(unseen)}. List one in {LONG_CASES}: {best.nodeid}")
    collected = {item.nodeid for item in items}
    files = {name.partition("::")[0] for name in collected if is_whole}
    if unknown := {name for name in (default | long) - collected if name.partition("::")[0] in files}:
        raise pytest.UsageError(f"{DEFAULT_CASES} or {LONG_CASES} list cases that don't exist: {sorted(unknown)}")


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    """The name and the value of each parameter."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}  # pyright: ignore[reportAttributeAccessIssue]
    return {(name, repr(value)) for name, value in parameters.items()}


os.environ["RAGGED_TUNING_CACHE"] = "off"  # whatever was measured on this machine
# A collective waits as long for a device's thread on a busy machine. (By default, XLA ends the process after 40 s.)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=600"
hypothesis.settings.register_profile("ragged", derandomize=True, deadline=None, database=None)  # the same each time
hypothesis.settings.load_profile("ragged")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

from tests import gpu, ran  # noqa: E402
from tests.races import no_races  # noqa: E402

MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def races() -> Iterator[None]:
    """No interpreted kernel of any test has a race, if the interpreter looks for them."""
    with no_races():
        yield


@pytest.fixture(autouse=True)
def drop_programs() -> Iterator[None]:
    """Drops compiled programs after each test, if there are many."""
    yield
    drop_programs_if_many()


def drop_programs_if_many() -> None:
    """Each compiled program holds a few memory maps, of which Linux allows a process 65530; then XLA crashes."""
    if MAPS.exists() and MAPS.read_text().count("\n") > 30_000:
        jax.clear_caches()


@pytest.fixture(scope="module", params=["pallas_tpu", "triton_gpu"])
def kernels(request: pytest.FixtureRequest) -> Iterator[tuple[str, ran.Launches]]:
    """On the CPU, another platform's kernels are its own, and are interpreted: the backend, and what ran."""
    if request.param == "triton_gpu":
        gpu.needs_triton()
    with ran.interpreted(request.param) as launches:
        yield request.param, launches
