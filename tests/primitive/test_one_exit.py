"""Each backend applies the linear epilogue in one function: no kernel, layout or derivative goes round it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged.backends import base
from ragged.backends.xla import backend as xla_backend
from tests import cases, gpu, ran

gpu.needs_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from ragged.backends.gpu import kernel  # noqa: E402
from tests.everywhere import INTERPRETED  # noqa: E402


@triton.jit
def twice(total, out, place, mask, ADDS: tl.constexpr):
    """Stands in for the Triton kernel's `_apply_epilogue`."""
    return 2 * total


ALL = [(backend, layout) for backend in ("xla", "pallas_tpu", "triton_gpu") for layout in cases.NAMES]
DEAR = [("pallas_tpu", layout) for layout in ("forward_left", "inner_rows", "inner_columns", "ragged")]


@pytest.mark.parametrize(
    "backend, layout", [pytest.param(*each, marks=[pytest.mark.long] * (each in DEAR)) for each in ALL]
)
def test_every_kernel_has_one_exit(backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `apply_epilogue` doubles its sums, each product and both cotangents double: no kernel goes round it."""
    case = cases.make(layout, capacity=64, uniform=(16, 16, 16), fill=0.0)
    options = {"backend": INTERPRETED[backend]}

    def results() -> Any:
        def product(lhs: Array, rhs: Array) -> Array:
            return ragged.matmul(case.lhs.with_data(lhs), case.rhs.with_data(rhs), **options).data

        @jax.jit
        def all_of_them(lhs: Array, rhs: Array) -> Any:
            out, pull = jax.vjp(product, lhs, rhs)
            return out, *pull(jnp.ones_like(out))

        return all_of_them(jnp.asarray(case.lhs.data), jnp.asarray(case.rhs.data))

    with ran.watch() as launches:
        once = results()
    assert backend == "xla" or {name for name, _ in launches} == {backend}
    exact = base.apply_epilogue
    for module in (base, xla_backend):
        monkeypatch.setattr(module, "apply_epilogue", lambda total, existing: exact(2 * total, existing))
    monkeypatch.setattr(kernel, "_apply_epilogue", twice)
    jax.clear_caches()
    for got, want in zip(results(), once, strict=True):
        np.testing.assert_allclose(got, 2 * np.asarray(want), rtol=1e-6, atol=1e-6)
        assert np.abs(np.asarray(want)).max() > 0.1
    jax.clear_caches()
