"""The contract by a GPU's kernels, interpreted."""

import pytest

from tests.contract import Contract
from tests.ops import test_epilogue

pytestmark = pytest.mark.sampled(default=False)


@pytest.mark.parametrize("kernels", ["triton_gpu"], indirect=True)
@pytest.mark.usefixtures("nothing_but_the_kernels")
class TestGpu(Contract):
    @pytest.mark.parametrize("form", ["gated, pre", "ungated"])
    def test_transformations_of_epilogues(self, form: str) -> None:
        """Forward mode, Hessian-vector products, maps, gradients of maps, remat."""
        test_epilogue.test_transformations(form)
