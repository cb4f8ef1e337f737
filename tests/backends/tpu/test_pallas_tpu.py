"""The TPU kernels' bodies, run on the CPU by both of Pallas's interpreters, against the float64 oracle.

`True` finds memory that nobody wrote; `InterpretParams` finds reads out of bounds too, and races between two cores,
which fail any test: see `conftest`.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import ragged
from ragged import GroupedTensor
from ragged.backends import schedule
from ragged.backends.tpu import launch as tpu_launch
from ragged.tuning import TpuConfig
from tests import cases, oracle
from tests.cases import check
from tests.contract.launches import only
from tests.everywhere import everywhere
from tests.races import no_races

TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
MODES = {"plain": True, "two cores": TWO_CORES}


@pytest.fixture(autouse=True)
def nothing_but_the_kernels() -> Iterator[None]:
    """In every test here: XLA's never stand in for them."""
    with only("pallas_tpu"):
        yield


def matmul(lhs: Any, rhs: Any, interpret: Any = True, tiles: Any = None, **options: Any) -> GroupedTensor:
    how = everywhere("pallas_tpu", *tiles, interpret=interpret) if tiles else TpuConfig(interpret=interpret)
    return jax.jit(lambda lhs, rhs: ragged.matmul(lhs, rhs, backend=how, **options))(lhs, rhs)


def contraction(layout: str, interpret: Any) -> None:
    """A product whose contracted letter has a whole tile and a partial one, against the oracle."""
    case = cases.make(layout, g=1, capacity=32, uniform=(8, 150, 20))
    check(case, matmul(case.lhs, case.rhs, interpret, tiles=(128 if layout == "batched" else 32, 128, 128)))


@pytest.mark.long
def test_a_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid that lets two cores share the steps of a contraction, which add up, fails; as it is, it doesn't."""
    printed = {"on_race": "warn"} if "on_race" in TWO_CORES.__dataclass_fields__ else {}
    interpret = dataclasses.replace(TWO_CORES, **printed)
    with no_races():
        contraction("batched", interpret)
    call = tpu_launch.buffered_pallas_call

    def racy(body: Any, out: Any, pipeline: Any, **options: Any) -> Any:
        return call(body, out, pipeline._replace(dimension_semantics=("parallel",) * 5), **options)

    monkeypatch.setattr(tpu_launch, "buffered_pallas_call", racy)
    with pytest.raises(AssertionError, match="a kernel has a race"), no_races(), suppress(AssertionError):
        contraction("batched", interpret)  # its result may be right or wrong


@pytest.mark.long
@pytest.mark.parametrize("mode", ["two cores", "plain"])
def test_what_nobody_wrote_is_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its mask, a partial tile brings in what lies past the buffer's end, which is NaN."""
    monkeypatch.setattr(tpu_launch, "select_first", lambda x, count, axis: x)
    with pytest.raises(AssertionError, match="largest error nan"):
        contraction("forward", MODES[mode])


@pytest.mark.long
def test_a_read_out_of_bounds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that names a tile beyond the last."""
    visits = schedule.row_visits

    def beyond(*args: Any) -> schedule.Visits:
        return visits(*args)._replace(tile=visits(*args).tile + 3)

    contraction("forward", TWO_CORES)
    monkeypatch.setattr(schedule, "row_visits", beyond)
    with pytest.raises(jax.errors.JaxRuntimeError, match="IndexError"):
        contraction("forward", TWO_CORES)


@pytest.mark.long
@pytest.mark.parametrize("product", ["forward", "wgrad"])
def test_buffered_pipeline_without_races(product: str) -> None:
    """Deep buffers, watched by the interpreter that finds reads of what has not arrived."""
    rng, sizes = np.random.default_rng(0), jnp.array([100, 3, 0, 128, 100], jnp.int32)
    lhs, dout, rhs = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((384, 256), (384, 128), (5, 256, 128))
    )
    interpret = pltpu.InterpretParams(detect_races=True, buffer_bounds="padded")
    options: dict[str, Any] = {"interpret": interpret, "input_buffer_count": 4, "tiling": (64, 128, 128)}
    ends = np.cumsum(sizes)
    x, dy = ([np.asarray(z[end - size : end]) for size, end in zip(sizes, ends, strict=True)] for z in (lhs, dout))
    if product == "wgrad":
        got = np.asarray(ragged.transposed_grouped_matmul(lhs.T, dout, sizes, backend="pallas_tpu", **options))
        oracle.assert_close(list(got), oracle.matmul([each.T for each in x], dy), max=1e-5)
        return
    got = np.asarray(ragged.grouped_matmul(lhs, rhs, sizes, backend="pallas_tpu", **options))
    groups = oracle.unpack(got, (True, False), sizes.tolist(), [128] * 5)
    oracle.assert_close(groups, oracle.matmul(x, list(np.asarray(rhs))), max=1e-5)
    assert not np.any(got[ends[-1] :])
