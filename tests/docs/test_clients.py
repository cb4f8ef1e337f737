"""Libraries that use this one: the provider for qwix in `docs/migration.md`, arrays and a module of Flax, experts of
haliax.

The provider's errors are about those of qwix, and products keep nothing of qwix. Needs flax, haliax and qwix.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ragged
from tests.docs.context import jax_defaults

qwix, linen = pytest.importorskip("qwix"), pytest.importorskip("flax.linen")
pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "migration.md"
SIZES = jnp.array([10, 0, 30, 24], jnp.int32)


class Experts(linen.Module):
    """`[64, 32] × [4, 32, 16]`, by `ragged.grouped_matmul` or by `jax.lax.ragged_dot`."""

    is_ragged: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", linen.initializers.normal(1.0), (4, 32, 16))
        return ragged.grouped_matmul(x, w, SIZES) if self.is_ragged else jax.lax.ragged_dot(x, w, SIZES)


def results(model: Any, is_compiled: bool) -> list[np.ndarray]:
    """The result, `dx` and `dw`."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"params": {"w": jax.random.normal(keys[0], (4, 32, 16))}}

    def run(params: Any, x: Any, ct: Any) -> Any:
        y, pull = jax.vjp(model.apply, params, x)
        dw, dx = pull(ct)
        return y, dx, dw["params"]["w"]

    arrays = jax.random.normal(keys[1], (64, 32)), jax.random.normal(keys[2], (64, 16))
    return [np.asarray(x, np.float64) for x in (jax.jit(run) if is_compiled else run)(params, *arrays)]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("dtype, gradients", [("int8", "int8"), ("float8_e4m3fn", "float8_e4m3fn"), ("int4", None)])
def test_provider(dtype: str, gradients: str | None, is_compiled: bool) -> None:
    with jax_defaults():  # qwix promotes dtypes
        check(dtype, gradients, is_compiled)


def check(dtype: str, gradients: str | None, is_compiled: bool) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    page = {"qwix": qwix, "ragged": ragged, "GroupedTensor": ragged.GroupedTensor}
    exec(code.partition("\n\nrules = ")[0], page)
    rules = [qwix.QtRule(module_path=".*", weight_qtype=dtype, act_qtype=dtype, bwd_qtype=gradients)]
    # Products that are compiled while qwix calls a model are as if it weren't there; and so are they later.
    jax.clear_caches()
    unknown = results(qwix.quantize_model(Experts(True), qwix.QtProvider(rules)), is_compiled)
    plain = results(Experts(True), is_compiled)
    for got, want in zip(unknown, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    exact = results(Experts(False), is_compiled)

    def errors(is_ragged: bool, provider: Any) -> list[float]:
        found = results(qwix.quantize_model(Experts(is_ragged), provider), is_compiled)
        return [np.linalg.norm(got - want) / np.linalg.norm(want) for got, want in zip(found, exact, strict=True)]

    ours, theirs = errors(True, page["RaggedProvider"](rules)), errors(False, qwix.QtProvider(rules))
    print(dtype, " ".join(f"{x:.4f}" for x in theirs), "|", " ".join(f"{x:.4f}" for x in ours))
    assert all(0.5 * y < x < 1.3 * y for x, y in zip(ours, theirs, strict=True)), (ours, theirs)


def test_params() -> None:
    """Errors name the array in an `nnx.Param`, and what they name runs."""
    nnx: Any = pytest.importorskip("flax.nnx")
    x, param = ragged.GroupedTensor(jnp.ones((64, 32)), SIZES), nnx.Param(jnp.ones((4, 32, 16)))
    for call in (lambda w: x @ w, lambda w: ragged.grouped_matmul(x.data, w, SIZES)):
        with pytest.raises(TypeError, match=re.escape("Pass the wrapped array: `rhs[...]`.")):
            call(param)
        call(param[...])
    with pytest.raises(TypeError, match=re.escape("Pass the wrapped array: `v[...]`.")):
        _ = x + nnx.Param(jnp.ones(32))


def test_experts_of_haliax() -> None:
    """The example prints differences of a few roundings of float32, for the result and five gradients."""
    pytest.importorskip("haliax")
    command = [sys.executable, "-W", "ignore", ROOT / "examples" / "haliax_experts.py"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(printed)
    differences = [float(x) for x in re.findall(r"differs by (\S+)", printed)]
    assert len(differences) == 6 and max(differences) < 5e-6


def test_experts_of_nnx() -> None:
    """A module of Flax's `nnx` equals a loop over experts, with four gradients, and is trained."""
    command = [sys.executable, "-W", "ignore", ROOT / "examples" / "nnx_experts.py"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(printed)
    differences = [float(x) for x in re.findall(r"differs by (\S+)", printed)]
    assert len(differences) == 5 and max(differences) < 5e-6
    before, after = re.findall(r"training: (\S+), after: (\S+)", printed)[0]
    assert float(after) < 0.3 * float(before)
