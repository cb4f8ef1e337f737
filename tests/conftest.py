"""Options of the test run: platforms, devices, strict promotion."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

# Their failures show values, as those of test files do.
pytest.register_assert_rewrite("tests.contract.layers", "tests.contract.programs")


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on the CPU, also where JAX has a GPU; those marked `gpu` alone, with `-m gpu`, on the GPU."""
    on_gpu = config.option.markexpr == "gpu"
    jax.config.update("jax_platforms", "cuda,cpu" if on_gpu else "cpu")
    if on_gpu:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share its memory


os.environ["RAGGED_TUNING_CACHE"] = "off"  # whatever was measured on this machine
# One thread for NumPy's products, in xdist's workers: they inherit this before they import NumPy. Others would spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A collective waits as long for a device's thread on a busy machine. (By default, XLA ends the process after 40 s.)
# Programs run for milliseconds: LLVM need not optimise them. XLA's own passes stay. Flags that the caller gives win.
FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}"
hypothesis.settings.register_profile("ragged", derandomize=True, deadline=None, database=None)  # the same each time
hypothesis.settings.load_profile("ragged")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

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
