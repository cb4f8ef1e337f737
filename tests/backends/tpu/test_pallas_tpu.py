"""The TPU kernels' bodies, run on the CPU by both of Pallas's interpreters, against the float64 oracle.

`True` finds memory that nobody wrote; `InterpretParams` finds reads out of bounds too, and races between two cores,
which fail any test: see `conftest`.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.pallas import tpu as pltpu

import ragged
from ragged import GroupedTensor
from ragged.backends import schedule
from ragged.backends.tpu import launch as tpu_launch
from ragged.tuning import TpuConfig
from tests import cases, oracle, ran
from tests.cases import TOLERANCE, check, split
from tests.everywhere import INTERPRETED, everywhere
from tests.races import no_races

TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
MODES = {"plain": True, "two cores": TWO_CORES}


@pytest.fixture(scope="module")
def launches() -> Iterator[ran.Launches]:
    with ran.watch() as launches:
        yield launches


@pytest.fixture(autouse=True)
def nothing_but_the_kernels(launches: ran.Launches) -> Iterator[None]:
    """In every test here: XLA's never stand in for them."""
    with ran.only("pallas_tpu", launches):
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


@pytest.mark.parametrize("mode", split(["two cores"], ["plain"]))
def test_what_nobody_wrote_is_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its mask, a partial tile brings in what lies past the buffer's end, which is NaN."""
    monkeypatch.setattr(tpu_launch, "select_first", lambda x, count, axis: x)
    with pytest.raises(AssertionError, match="largest error nan"):
        contraction("forward", MODES[mode])


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
@pytest.mark.parametrize("buffers, transpose_rhs", [(1, True), (3, False)])
def test_buffers(buffers: int, transpose_rhs: bool) -> None:
    """With any number of buffers for each input the result is the same."""
    rng = np.random.default_rng(0)
    sizes = jnp.array([100, 3, 0, 128, 100], jnp.int32)
    lhs, rhs = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((400, 300), (5, 300, 260)))
    dout = jnp.asarray(rng.standard_normal((400, 260)), jnp.float32)
    options: dict[str, Any] = {"backend": INTERPRETED["pallas_tpu"], "tiling": (64, 128, 128)}

    def both(buffers: int) -> tuple[Array, Array]:
        forward = ragged.grouped_matmul(
            lhs,
            rhs.mT if transpose_rhs else rhs,
            sizes,
            transpose_rhs=transpose_rhs,
            input_buffer_count=buffers,
            **options,
        )
        wgrad = ragged.transposed_grouped_matmul(lhs.T, dout, sizes, input_buffer_count=buffers, **options)
        return forward, wgrad

    for got, want in zip(both(buffers), both(2), strict=True):
        assert np.array_equal(got, want)


def test_buffered_pipeline_without_races() -> None:
    """Deep buffers, watched by the interpreter that finds reads of what has not arrived."""
    rng = np.random.default_rng(0)
    sizes = jnp.array([100, 3, 0, 128, 100], jnp.int32)
    lhs, rhs = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((384, 256), (5, 256, 128)))
    interpret = pltpu.InterpretParams(detect_races=True, buffer_bounds="padded")
    got = ragged.grouped_matmul(
        lhs,
        rhs,
        sizes,
        backend="pallas_tpu",
        interpret=interpret,
        input_buffer_count=4,
        tiling=(64, 128, 128),
    )
    ends = np.cumsum(sizes)
    groups = [lhs[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    want = oracle.matmul([np.asarray(x) for x in groups], list(np.asarray(rhs)))
    oracle.assert_close(oracle.unpack(np.asarray(got), (True, False), sizes.tolist(), [128] * 5), want, max=1e-5)
    assert not np.any(np.asarray(got)[ends[-1] :])


@pytest.mark.long
# A tile of 512 rows is computed in chunks of 128, where groups begin and end anywhere in them.
@pytest.mark.parametrize("sizes", [[130, 500, 0, 255, 139], [512, 512], [1, 1023], [0, 0], [3] * 7, [1024]], ids=str)
def test_chunks_of_a_tile(sizes: list[int]) -> None:
    """A neighbour's rows of a tile are neither written nor added up; full tiles take the short way."""
    rng = np.random.default_rng(0)
    lhs, dout = (rng.standard_normal((1024, 128)).astype(np.float32) for _ in range(2))
    rhs = rng.standard_normal((len(sizes), 128, 128)).astype(np.float32)
    dims = jnp.array(sizes, jnp.int32)
    x, dy = (GroupedTensor(jnp.asarray(z), dims) for z in (lhs, dout))
    ends = np.cumsum(sizes)
    lhs_groups, dout_groups = ([z[e - s : e] for s, e in zip(sizes, ends, strict=True)] for z in (lhs, dout))
    worst, rms = TOLERANCE["float32"]
    forward = matmul(x, rhs, tiles=(512, 128, 128))
    got = oracle.unpack(np.asarray(forward.data), (True, False), sizes, [128] * len(sizes))
    oracle.assert_close(got, oracle.matmul(lhs_groups, list(rhs)), max=worst, rms=rms)
    assert not np.any(np.asarray(forward.data)[ends[-1] :])
    wgrad = matmul(x.mT, dy, tiles=(128, 512, 128))
    want = oracle.matmul([z.T for z in lhs_groups], dout_groups)
    oracle.assert_close(list(np.asarray(wgrad.data)), want, max=worst, rms=rms)


@pytest.mark.long
def test_executed_visits_are_those_of_the_schedule() -> None:
    """The grid ends where the run-time sizes do, however skewed; not at the static worst case."""
    visited: list[tuple[int, ...]] = []

    def record(token: Any, point: Any, core: Any) -> Any:
        visited.append(tuple(map(int, point)))
        return token

    interpret = pltpu.InterpretParams(grid_point_recorder=record)
    lhs, rhs = jnp.ones((512, 128)), jnp.ones((16, 128, 128))
    product = jax.jit(lambda dims: matmul(GroupedTensor(lhs, dims), rhs, interpret, tiles=(64, 128, 128)))
    for sizes in ([512, *[0] * 15], [0] * 16, [1] * 16, [100, 0, 0, 200, *[1] * 12]):
        dims = jnp.array(sizes, jnp.int32)
        visited.clear()
        jax.block_until_ready(product(dims))
        _, in_groups = schedule.make_group_metadata(group_sizes=dims, m=512, tm=64)
        untouched = 512 // 64 - -(-sum(sizes) // 64)  # tiles of nothing but tail are written once, as zeros
        assert len(set(visited)) == int(in_groups) + untouched


@pytest.mark.long
def test_executed_visits_of_a_wgrad() -> None:
    """Each tile of rows once for each group in it, and an empty group once, for its zeros; the tail never."""
    visited: list[tuple[int, ...]] = []

    def record(token: Any, point: Any, core: Any) -> Any:
        visited.append(tuple(map(int, point)))
        return token

    interpret, tiles = pltpu.InterpretParams(grid_point_recorder=record), (128, 32, 128)
    x = jnp.ones((256, 128))
    wgrad = jax.jit(lambda dims: matmul(GroupedTensor(x, dims).mT, GroupedTensor(x, dims), interpret, tiles))
    for sizes in ([256, *[0] * 7], [0] * 8, [1] * 8, [50, 0, 0, 100, *[1] * 4]):
        visited.clear()
        jax.block_until_ready(wgrad(jnp.array(sizes, jnp.int32)))
        ends = np.cumsum(sizes)
        tiles = [-(-end // 32) - (end - size) // 32 if size else 1 for size, end in zip(sizes, ends, strict=True)]
        assert len(set(visited)) == sum(tiles)


@pytest.mark.long
def test_executed_visits_of_two_ragged_letters() -> None:
    """A tile of the result is visited for each group that has a part of it; first to write zeros, if the first
    group in its rows has none."""
    visited: list[tuple[int, ...]] = []

    def record(token: Any, point: Any, core: Any) -> Any:
        visited.append(tuple(map(int, point)))
        return token

    rows, columns = [100, 300, 0, 112], [130, 0, 7, 500]
    lhs = GroupedTensor(jnp.ones((512, 128)), jnp.array(rows, jnp.int32))
    rhs = GroupedTensor(jnp.ones((128, 640)), None, jnp.array(columns, jnp.int32))
    interpret = pltpu.InterpretParams(grid_point_recorder=record)
    jax.block_until_ready(matmul(lhs, rhs, interpret, tiles=(128, 128, 128), max_last=512))
    ends = np.cumsum(rows)
    expected = 0
    for i, j in itertools.product(range(4), range(4)):
        present = [
            width > j * 128
            for size, end, width in zip(rows, ends, columns, strict=True)
            if size > 0 and end > i * 128 and end - size < (i + 1) * 128
        ]
        expected += sum(present) + (not present[0])
    assert len(set(visited)) == expected < 16 * len(rows)
