"""Backends of products of quantised operands."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests import gpu, ran


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Its name. If it has kernels, they must run. Triton's are for a GPU with fp8: the portable program lacks it."""
    if request.param == "xla":
        yield request.param
        return
    with ran.watch() as launches, gpu.on(gpu.FIRST_WITH_FP8) if request.param == "triton_gpu" else nullcontext():
        yield request.param
    assert request.param in {name for name, _ in launches}, "XLA's kernels ran"
