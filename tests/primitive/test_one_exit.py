"""All backends apply the linear epilogue in one function: no kernel, layout or derivative goes round it."""

import jax
import pytest

from ragged.backends import base
from ragged.backends.xla import backend as xla_backend
from tests import cases
from tests.contract import loop
from tests.contract.draws import draws
from tests.contract.programs import Program

EACH = cases.thinned(3, ("xla", "pallas_tpu", "triton_gpu"), cases.NAMES)


@pytest.mark.long
@pytest.mark.parametrize("backend, layout", EACH)
def test_every_kernel_has_one_exit(backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `apply_epilogue` doubles its sums, each product and both cotangents double: no kernel goes round it."""
    exact, product = base.apply_epilogue, loop.product
    for module in (base, xla_backend):
        monkeypatch.setattr(module, "apply_epilogue", lambda call, total, existing: exact(call, 2 * total, existing))
    monkeypatch.setattr(loop, "product", lambda *args: product(*args).plus(product(*args)))
    jax.clear_caches()  # programs of the exact function, now and afterwards
    try:
        program = Program(layout, backend=backend, capacity=64, m=16, k=16, n=16)
        program.check(draws(program, 2))
    finally:
        jax.clear_caches()
