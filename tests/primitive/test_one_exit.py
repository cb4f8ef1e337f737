"""All backends apply the linear epilogue in one function: no kernel, layout or derivative goes round it."""

from collections.abc import Iterator
from contextlib import contextmanager
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

from tests.everywhere import INTERPRETED  # noqa: E402


@contextmanager
def sums_doubled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In here, `apply_epilogue` doubles its sums."""
    exact = base.apply_epilogue
    with monkeypatch.context() as patch:
        for module in (base, xla_backend):
            patch.setattr(module, "apply_epilogue", lambda call, total, existing: exact(call, 2 * total, existing))
        jax.clear_caches()
        yield
    jax.clear_caches()


ALL = [(backend, layout) for backend in ("xla", "pallas_tpu", "triton_gpu") for layout in cases.NAMES]
SOME = [("xla", "forward"), ("triton_gpu", "outer")]


@pytest.mark.parametrize("backend, layout", cases.split(SOME, (each for each in ALL if each not in SOME)))
def test_every_kernel_has_one_exit(backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `apply_epilogue` doubles its sums, each product and both cotangents double: no kernel goes round it."""
    monkeypatch.setattr(xla_backend, "_SMALL", 0)  # small products are multiplied as large ones
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
    with sums_doubled(monkeypatch):
        twice = results()
    for got, want in zip(twice, once, strict=True):
        np.testing.assert_allclose(got, 2 * np.asarray(want), rtol=1e-6, atol=1e-6)
        assert np.abs(np.asarray(want)).max() > 0.1


@pytest.mark.parametrize("layout", cases.split(["forward"], ["batched"]))
@pytest.mark.parametrize("backend", cases.split(["xla", "triton_gpu"], ["pallas_tpu"]))
def test_kernels_of_two_products_have_it_too(backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubled sums make the product of a gate and another product four times as large."""
    case = cases.make(layout, capacity=64, uniform=(16, 16, 16), fill=0.0)

    def result() -> Any:
        with ran.watch() as launches:
            options: Any = {"activation": None, "backend": INTERPRETED[backend]}
            out = jax.jit(lambda x, w: ragged.gated_matmul(x, w, w + 1, **options).data)(case.lhs, case.rhs)
        return np.asarray(out), launches

    once, launches = result()
    assert backend == "xla" or len(launches) == 1, launches
    with sums_doubled(monkeypatch):
        np.testing.assert_allclose(result()[0], 4 * once, rtol=1e-6, atol=1e-6)
    assert np.abs(once).max() > 0.1
