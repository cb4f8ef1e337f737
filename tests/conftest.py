"""Every test runs with the whole of `ragged` under jaxtyping's import hook, so annotations are checked at run time."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from zlib import crc32

import jax
import pytest
from jaxtyping import install_import_hook


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on the CPU, also where JAX has a GPU; those marked `gpu` alone, with `-m gpu`, on the GPU."""
    on_gpu = config.option.markexpr == "gpu"
    jax.config.update("jax_platforms", "cuda,cpu" if on_gpu else "cpu")
    if on_gpu:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share its memory


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which cases of a `sampled` test run when: by default one, or none of a `sampled(0)` test; as `long` those that
    show every other value of each parameter; the other combinations as `slow`. A case that is itself marked `long` is
    none of the first.
    """
    tests: dict[str, dict[pytest.Item, set[tuple[str, str]]]] = {}
    most: dict[str, int] = {}
    for item in items:
        sampled, test = item.get_closest_marker("sampled"), item.nodeid.partition("[")[0]
        if sampled and not item.get_closest_marker("slow"):
            most[test] = sampled.args[0] if sampled.args else 1
            values = item.callspec.params if hasattr(item, "callspec") else {"": ""}  # pyright: ignore
            tests.setdefault(test, {})[item] = {(name, repr(value)) for name, value in values.items()}
    for test, cases in tests.items():
        unseen = set[tuple[str, str]]().union(*cases.values())
        short = [item for item in cases if not item.get_closest_marker("long")]
        for _ in range(min(most[test], len(short))):
            chosen = _that_shows_most(short, cases, unseen)
            short.remove(chosen)
            unseen -= cases.pop(chosen)
        while unseen:
            chosen = _that_shows_most(cases, cases, unseen)
            unseen -= cases.pop(chosen)
            chosen.add_marker("long")
        for item in cases:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "long"]
            item.add_marker("slow")


def _that_shows_most(
    items: Iterable[pytest.Item], cases: dict[pytest.Item, set[tuple[str, str]]], unseen: set[tuple[str, str]]
) -> pytest.Item:
    """Of those that show the most, any: the layouts of one test are not those of another."""
    return max(items, key=lambda item: (len(cases[item] & unseen), crc32(item.nodeid.encode())))


os.environ["RAGGED_TUNING_CACHE"] = "off"  # whatever was measured on this machine
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

with install_import_hook("ragged", "beartype.beartype"):
    import ragged  # noqa: F401

from . import gpu, ran  # noqa: E402
from .races import no_races  # noqa: E402

MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def races() -> Iterator[None]:
    """No interpreted kernel of any test has a race, if the interpreter looks for them."""
    with no_races():
        yield


@pytest.fixture(autouse=True)
def drop_programs() -> Iterator[None]:
    """Each compiled program holds a few memory maps, of which Linux allows a process 65530; then XLA crashes."""
    yield
    if MAPS.exists() and MAPS.read_text().count("\n") > 30_000:
        jax.clear_caches()


@pytest.fixture(scope="module", params=["pallas_tpu", "triton_gpu"])
def kernels(request: pytest.FixtureRequest) -> Iterator[tuple[str, ran.Launches]]:
    """On the CPU, another platform's kernels are its own, and are interpreted: the backend, and what ran."""
    if request.param == "triton_gpu":
        gpu.needs_triton()
    with ran.interpreted(request.param) as launches:
        yield request.param, launches
