"""The contract by XLA."""

import jax
import pytest

from tests.cases import NAMES
from tests.contract import SUBSETS, Contract, check_vmap

pytestmark = pytest.mark.sampled


class TestXla(Contract):
    @pytest.mark.parametrize("mapped", SUBSETS, ids="+".join)
    @pytest.mark.parametrize("layout", NAMES)
    def test_vmap_of_any_subset(self, layout: str, mapped: tuple[str, ...]) -> None:
        """In float64, and every subset in every layout."""
        with jax.enable_x64(True):
            check_vmap(layout, mapped, "float64", 1e-12)
