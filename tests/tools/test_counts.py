"""The tiles that `explain` counts are those that run, for any sizes; some of them are counted by hand."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from ragged.tuning import TpuConfig, XlaConfig
from tests import gpu
from tests.cases import LETTERS
from tests.contract.draws import draws
from tests.contract.executed import executed
from tests.contract.programs import Program
from tests.everywhere import everywhere

EXTENTS: dict[str, Any] = {"capacity": 200, "width": 72, "m": 40, "k": 48, "n": 80}


@pytest.fixture(scope="module")
def counts() -> Iterator[Counter[str]]:
    with executed() as found:
        yield found


def check(counts: Counter[str], program: Program, number: int) -> None:
    """For a product and both derivatives, each compiled once. Of groups that aren't held, rows are as the tail."""

    def explained(data: Any, sizes: Any, first: Any) -> Any:
        operands, options = program.operands(data, sizes), program.options("out", first)
        return ragged.explain(*operands.values(), platform="cpu", **options).plans

    def derivative(name: str) -> Any:
        def run(data: Any, sizes: Any, first: Any) -> Array:
            return jax.vjp(lambda x: program.multiply(data | {name: x}, sizes, first), data[name])[1](data["out"])[0]

        return jax.jit(run)

    run = {"forward": jax.jit(program.multiply)} | {f"by {name}": derivative(name) for name in ("lhs", "rhs")}
    for draw in draws(program, number, is_poisoned=False):
        unknown = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), draw)
        bounds, plans = explained(*unknown), explained(*draw)
        assert [plan.product for plan in plans] == [*run]
        for plan, bound in zip(plans, bounds, strict=True):
            counts.clear()
            jax.block_until_ready(run[plan.product](*draw))
            where = f"{plan.product}: {draw.sizes}"
            assert plan.is_exact and plan.backend == program.backend
            assert plan.multiplied == counts["flops"], where
            assert plan.visits is not None and plan.idle is not None
            if program.backend == "pallas_tpu":
                assert plan.visits + plan.idle == counts["steps"], where
            else:
                assert (plan.visits, plan.idle) == (counts["dots"], counts["idle"]), where
            if bound.layout != "batched":
                assert not bound.is_exact and bound.idle is bound.multiplied is None
                assert bound.visits is None or plan.visits + plan.idle <= bound.visits, where
                assert plan.flops is not None and bound.flops is not None
                assert len(LETTERS[bound.layout]) > 1 or plan.flops <= bound.flops


# XLA would hoist the dots of one tile as wide as its operand. Of two ragged letters, a TPU's tiles are of 128.
def case(backend: str, layout: str, number: int, *marks: Any, tiles: Any = "small", **others: Any) -> Any:
    letters, several = LETTERS[layout], len(LETTERS[layout]) > 1
    own = tuple((128 if several and backend == "pallas_tpu" else 32) if z in letters else 128 for z in "mkn")
    tiles = tiles if tiles != "small" else (16, 32, 64) if backend == "triton_gpu" else own
    program = Program(layout, backend=backend, tiles=tiles, **EXTENTS | others)
    return pytest.param(program, number if letters else 1, marks=marks, id=str(program))


@pytest.mark.parametrize(
    "program, number",
    [
        case("xla", "outer", 20, pytest.mark.long),
        # One dot for the first rows of all groups, and tiles for what it doesn't hold; one dot for all rows.
        case("xla", "wgrad", 20, pytest.mark.long, tiles=None, groups=6, capacity=40, k=64, n=64),
        case("xla", "wgrad", 3, tiles=None, groups=6, capacity=40, k=16, n=32),
        case("xla", "forward", 20, held=2),
        case("pallas_tpu", "forward", 10, pytest.mark.long, held=2),
        case("triton_gpu", "forward", 4, pytest.mark.long, held=2),
        *(case("xla", layout, 20, pytest.mark.long) for layout in ("batched", "forward_left", "inner_columns")),
        *(case("pallas_tpu", layout, 12, pytest.mark.long) for layout in ("wgrad", "outer", "inner_rows", "ragged")),
        *(case("triton_gpu", layout, 3, pytest.mark.long) for layout in ("wgrad", "inner_columns", "ragged")),
        # Tiles that groups share are multiplied in chunks on a TPU; several steps of what is contracted.
        case("pallas_tpu", "forward", 8, pytest.mark.long, tiles=(256, 128, 128), capacity=600),
        case("triton_gpu", "forward", 3, pytest.mark.long, tiles=(128, 32, 16), capacity=600, k=40, n=24),
        # Parts of one step: two of them in the product have none, and of the dgrad's one. Then of two steps.
        *(case("triton_gpu", "forward", 2, pytest.mark.long, held=2, splits=4, k=k) for k in (48, 160)),
    ],
)
def test_counts(program: Program, number: int, counts: Counter[str]) -> None:
    """Products of tiles, tiles that only get zeros, and FLOP of whole tiles; and the bounds of unknown sizes."""
    if program.backend == "triton_gpu":
        gpu.needs_triton()
    check(counts, program, number)


def test_counts_of_one_dot_for_all_groups() -> None:
    """By hand: XLA's dot for the first 8 rows of all groups, and tiles for the rest; tiles alone for few groups."""
    for sizes, visits in (([5, 6, 7, 6, 5, 4], 6), ([3, 4, 25, 0, 2, 1], 6 + 2), ([0, 0, 0, 37, 0, 0], 3)):
        x = GroupedTensor(jax.ShapeDtypeStruct((40, 64), jnp.float32), jnp.array(sizes, jnp.int32))
        plan = ragged.explain(x, jax.ShapeDtypeStruct((6, 64, 64), jnp.float32), platform="cpu").plan()
        assert isinstance(plan.config, XlaConfig) and plan.config.batched_rows == 8
        assert plan.visits == visits
    x = GroupedTensor(jax.ShapeDtypeStruct((40, 16), jnp.float32), jnp.array(sizes, jnp.int32))
    plan = ragged.explain(x, jax.ShapeDtypeStruct((6, 16, 32), jnp.float32), platform="cpu").plan()
    assert plan.tiles == tuple((group, 0, 40) for group in range(6))  # of a small product, all rows by each matrix


def test_counts_of_a_group_in_the_middle() -> None:
    """By hand, with several tiles of each letter: rows in front of the group, and behind it, get zeros once."""
    x = GroupedTensor(jax.ShapeDtypeStruct((200, 256), jnp.float32), jnp.array([50, 0, 70, 20], jnp.int32))
    w = jax.ShapeDtypeStruct((1, 256, 192), jnp.float32)
    for backend, tiles, counts in (
        # Rows 50 to 119 are the group's: 5 tiles from its first row on; of the others 4 in front of it, 5 behind it.
        ("triton_gpu", (16, 64, 64), (5 * 4 * 3, (4 + 5) * 3)),
        # They lie in 3 of the 7 tiles that the buffer is cut into.
        ("pallas_tpu", (32, 128, 128), (3 * 2 * 2, (7 - 3) * 2)),
    ):
        if backend != "triton_gpu" or gpu.triton_call.missing() == "":
            plan = ragged.explain(x, w, platform="cpu", backend=everywhere(backend, *tiles), group_offset=2).plan()
            assert (plan.visits, plan.idle, plan.flops) == (*counts, 2 * 70 * 256 * 192)


def test_counts_of_the_tail_of_two_ragged_letters() -> None:
    """By hand. One of 5 tiles of rows holds both groups, the second of which has 2 tiles of columns."""
    x = GroupedTensor(jax.ShapeDtypeStruct((600, 16), jnp.float32), jnp.array([50, 0, 50], jnp.int32))
    y = GroupedTensor(jax.ShapeDtypeStruct((300, 16), jnp.float32), jnp.array([40, 0, 200], jnp.int32))
    plan = ragged.explain(x, y.mT, platform="tpu", max_last=256, backend=TpuConfig(m=128, k=128, n=128)).plan()
    assert plan.backend == "pallas_tpu"
    assert (plan.visits, plan.idle) == (1 + 2, 1 + (5 - 1) * 2)


def test_tiles_of_groups_that_are_moved_apart() -> None:
    """Where a kernel moves groups to multiples of a block of scales, here of 32 tokens from 0, 3 and 64 to 0, 32 and
    96, tiles are where their rows are in the buffer."""
    x = GroupedTensor(jax.ShapeDtypeStruct((128, 64), jnp.float32), jnp.array([3, 0, 61, 40], jnp.int32))
    w, backend = jax.ShapeDtypeStruct((4, 64, 32), jnp.float32), TpuConfig(m=64, k=64, n=32)
    plan = ragged.explain(x, w, platform="tpu", recipe="mxfp8", backend=backend).plan("by rhs")
    assert plan.tiles == ((0, 0, 64), (2, 0 - 29, 64), (2, 64 - 29, 64), (3, 64 - 32, 64), (3, 128 - 32, 64))
    assert (plan.backend, plan.visits, plan.multiplied) == ("pallas_tpu", 5, 2 * 5 * 64 * 64 * 32)


def test_counts_of_a_shared_matrix() -> None:
    """It makes the groups one."""
    x = GroupedTensor(jax.ShapeDtypeStruct((100, 16), jnp.float32), jnp.array([30, 0, 41], jnp.int32))
    w, backend = jax.ShapeDtypeStruct((16, 32), jnp.float32), everywhere("xla", 32, 128, 128)
    found = ragged.explain(x, w, backend=backend, platform="cpu")
    assert {plan.flops for plan in found.plans} == {2 * 71 * 16 * 32}
    assert (found.plan().visits, found.num_groups) == (3, 3)
