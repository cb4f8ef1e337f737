"""`kernels/schedule.py` against a plain Python listing of rows and tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged import GroupedTensor
from ragged.kernels import schedule

INT32 = np.iinfo(np.int32)

Visits = list[tuple[int, int]]


def list_visits(sizes: list[int], tm: int, start: int = 0, count: int | None = None) -> Visits:
    """(group, tile) of every tile that a row of a group lies in, group by group. Empty groups have none."""
    owner = [group for group, size in enumerate(sizes) for _ in range(size)]
    wanted = range(start, start + (len(sizes) if count is None else count))
    return sorted({(group, row // tm) for row, group in enumerate(owner) if group in wanted})


@functools.partial(jax.jit, static_argnames=("m", "tm", "num_nonzero_groups", "visit_empty_groups"))
def jitted(group_sizes, start_group, **kwargs):
    return schedule.make_group_metadata(group_sizes=group_sizes, start_group=start_group, **kwargs)


def run(
    sizes: list[int], m: int, tm: int, start: int = 0, count: int | None = None, empty: bool = False
) -> tuple[np.ndarray, Visits, Visits]:
    """The offsets, the visits that count, and those that pad."""
    (offsets, groups, tiles), num_tiles = jitted(
        jnp.array(sizes, jnp.int32), start, m=m, tm=tm, num_nonzero_groups=count, visit_empty_groups=empty
    )
    assert {a.dtype for a in (offsets, groups, tiles, num_tiles)} == {np.dtype(np.int32)}
    assert num_tiles.shape == () and offsets.shape == (len(sizes) + 1,)
    tiles_m = -(-m // tm)
    assert groups.shape == tiles.shape == (tiles_m + len(sizes) - 1,)
    assert 0 <= num_tiles <= len(groups)
    visits = list(zip(groups.tolist(), tiles.tolist(), strict=True))
    assert all(0 <= group < len(sizes) and 0 <= tile < tiles_m for group, tile in visits)
    n = int(num_tiles)
    return np.asarray(offsets), visits[:n], visits[n:]


def test_worked_example() -> None:
    """K15: the example at the top of `schedule.py`."""
    offsets, visits, padding = run([3, 5, 0, 4], m=16, tm=4)
    assert offsets.tolist() == [0, 3, 8, 8, 12]
    assert visits == [(0, 0), (1, 0), (1, 1), (3, 2)]
    assert len(padding) == 4 + 4 - 1 - 4


@pytest.mark.parametrize(
    "sizes, m, tm",
    [
        ([8], 8, 8),  # one group, one tile
        ([5], 8, 8),  # a tail within the tile
        ([0, 0, 8, 0], 8, 4),  # one giant group among empty ones
        ([4, 4, 4], 12, 4),  # every boundary on the tile
        ([1, 1, 1, 1, 1], 5, 8),  # all in one tile that is larger than the buffer
        ([3, 4, 6], 13, 5),  # m is no multiple of the tile: the last is partial
        ([3, 4, 2], 13, 5),  # the partial last tile is all tail
        ([1, 5, 1, 5], 12, 4),  # the bound is met: every boundary inside a tile
        ([0, 0, 0], 8, 4),  # all empty
    ],
)
def test_visits(sizes: list[int], m: int, tm: int) -> None:
    """K15, K17, K18, K25: a shared tile is visited once for each of its groups, a tile of the tail never."""
    offsets, visits, _ = run(sizes, m, tm)
    assert offsets.tolist() == np.cumsum([0, *sizes]).tolist()
    assert visits == list_visits(sizes, tm)


def test_bound_is_met() -> None:
    """K16: the static length is not too long: these sizes need all of it."""
    _, visits, padding = run([1, 5, 1, 5], m=12, tm=4, empty=True)
    assert len(visits) == 3 + 4 - 1 and not padding


@pytest.mark.parametrize("sizes", [[0, 3, 0, 0, 5, 0], [0, 0, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 8]])
@pytest.mark.parametrize("tm", [3, 4, 8, 16])
def test_empty_groups_are_visited_when_asked(sizes: list[int], tm: int) -> None:
    """K17: `visit_empty_groups` adds one visit for each empty group, in the groups' order, to a tile that exists."""
    _, visits, _ = run(sizes, m=8, tm=tm, empty=True)
    expected = list_visits(sizes, tm)
    assert [v for v in visits if sizes[v[0]]] == expected
    assert [g for g, _ in visits if not sizes[g]] == [g for g, size in enumerate(sizes) if not size]
    assert visits == sorted(visits)
    tiles = [tile for _, tile in visits]
    assert tiles == sorted(tiles)  # a kernel never comes back to a tile that it has left


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    "start, count",
    [(0, 9), (0, 2), (2, 2), (4, 2), (5, 2), (1, 0), (-1, 2), (-9, 2), (INT32.min, 2), (INT32.max, 2)],
)
def test_only_the_groups_of_a_shard(start: int, count: int, empty: bool) -> None:
    """K14, K15: `start_group` and `num_nonzero_groups`; what lies outside the groups never wraps around into them."""
    sizes = [3, 0, 5, 1, 2]
    offsets, visits, _ = run(sizes, m=14, tm=4, start=start, count=count, empty=empty)
    assert offsets.tolist() == [0, 3, 3, 8, 9, 11]  # of all groups
    assert [v for v in visits if sizes[v[0]]] == list_visits(sizes, 4, start, count)
    asked = empty and start <= 1 < start + count
    assert [g for g, _ in visits if not sizes[g]] == ([1] if asked else [])


@given(st.sampled_from([(8, 4), (13, 4), (13, 16)]), st.sampled_from([1, 5]), st.booleans(), st.data())
@settings(deadline=None, max_examples=150)
def test_any_sizes(extent: tuple[int, int], g: int, empty: bool, data: st.DataObject) -> None:
    """K15, K16, K17: any sizes that fit, any shard."""
    m, tm = extent
    cuts = sorted(data.draw(st.lists(st.integers(0, m), min_size=g, max_size=g), label="ends"))
    sizes = np.diff([0, *cuts]).tolist()
    start = data.draw(st.integers(-2, g + 1), label="start_group")
    count = data.draw(st.sampled_from([None, 2]), label="num_nonzero_groups")
    offsets, visits, _ = run(sizes, m, tm, start, count, empty)
    assert offsets.tolist() == [0, *cuts]
    wanted = range(start, start + (g if count is None else count))
    nothing = [group for group, size in enumerate(sizes) if not size and group in wanted and empty]
    assert [v for v in visits if sizes[v[0]]] == list_visits(sizes, tm, start, count)
    assert [group for group, _ in visits if not sizes[group]] == nothing
    assert visits == sorted(visits)


any_int32 = st.one_of(st.integers(-3, 20), st.sampled_from([INT32.min, INT32.max, INT32.max - 7, 2**30, -(2**30)]))


def sound_offsets(sizes: list[int], capacity: int) -> list[int]:
    """Exact integers: a negative size is 0, and nothing reaches past the capacity."""
    offsets = [0]
    for size in sizes:
        offsets.append(min(offsets[-1] + max(size, 0), capacity))
    return offsets


@given(st.lists(any_int32, min_size=5, max_size=5), st.sampled_from([0, 13]), st.sampled_from([1, 4]))
@settings(deadline=None, max_examples=100)
def test_wrong_sizes_stay_inside_the_buffer(sizes: list[int], capacity: int, tm: int) -> None:
    """B4: offsets and visits for negative sizes, sums above the capacity and sums that overflow int32."""
    offsets = schedule.group_offsets(jnp.array(sizes, jnp.int32), capacity)
    assert offsets.dtype == jnp.int32
    assert offsets.tolist() == sound_offsets(sizes, capacity)
    if capacity:
        offsets, visits, _ = run(sizes, capacity, tm, empty=True)
        assert offsets.tolist() == sound_offsets(sizes, capacity)
        cut = np.diff(offsets).tolist()
        assert [v for v in visits if cut[v[0]]] == list_visits(cut, tm)


def test_many_large_sizes_do_not_wrap_around() -> None:
    """Sizes clipped to the capacity can still overflow together: 64 of them would come back to 0."""
    capacity = 2**26
    offsets = schedule.group_offsets(jnp.full((65,), INT32.max, jnp.int32), capacity)
    assert offsets.tolist() == [0] + [capacity] * 65


def test_batched_offsets() -> None:
    sizes = [[3, 0, 2], [9, -1, 1], [2**31 - 1, 2**31 - 1, 3]]
    offsets = schedule.group_offsets(jnp.array(sizes, jnp.int32), 8)
    assert offsets.tolist() == [sound_offsets(s, 8) for s in sizes]


def test_uint32_sizes() -> None:
    """K6: sizes may be uint32, as may the first group."""
    sizes = jnp.array([3, 0, 5], jnp.uint32)
    assert schedule.group_offsets(sizes, 9).tolist() == [0, 3, 3, 8]
    assert schedule.group_offsets(sizes, 9).dtype == jnp.int32
    for first in (0, 5):
        large = jnp.array([first, 2**32 - 3, 1], jnp.uint32)
        assert schedule.group_offsets(large, 9).tolist() == [0, first, 9, 9]
    for kind in (jnp.int32, jnp.uint32):
        (offsets, groups, tiles), n = schedule.make_group_metadata(
            group_sizes=sizes, m=9, tm=4, start_group=jnp.array(1, kind), num_nonzero_groups=2
        )
        assert (offsets.dtype, groups.dtype, tiles.dtype, n.dtype) == (jnp.int32,) * 4
        assert list(zip(groups[:n].tolist(), tiles[:n].tolist(), strict=True)) == [(2, 0), (2, 1)]


@pytest.mark.parametrize("m, tm", [(0, 4), (4, 0), (-1, 4), (4, -4)])
def test_empty_buffer_is_refused(m: int, tm: int) -> None:
    """B9"""
    with pytest.raises(ValueError) as error:
        schedule.make_group_metadata(group_sizes=jnp.zeros((2,), jnp.int32), m=m, tm=tm)
    assert str(error.value) == (
        f"`make_group_metadata`: `m` and `tm` must be positive. Got m={m}, tm={tm}.\n"
        "An empty buffer has no tiles to visit: return zeros without a kernel."
    )


@pytest.mark.parametrize("first", [2**40, -(2**40), 2**70, np.int64(2**32 + 1), np.int64(-(2**32) + 1)])
def test_integers_beyond_int32_stay_out_of_range(first: int | np.int64) -> None:
    """K14, K15: Python's and NumPy's integers, as the first group and as sizes."""
    kept = int(np.clip(int(first) if abs(int(first)) < 2**62 else 2**62, INT32.min, INT32.max))
    assert schedule.as_int32(first).dtype == jnp.int32 and int(schedule.as_int32(first)) == kept
    _, n = schedule.make_group_metadata(
        group_sizes=jnp.array([3, 4], jnp.int32), m=8, tm=4, start_group=first, num_nonzero_groups=2
    )
    assert int(n) == 0


def test_sizes_beyond_int32() -> None:
    """B4: they reach past the capacity, and are cut off there."""
    assert schedule.as_int32(np.array([2**32 + 1, -(2**32)])).tolist() == [INT32.max, INT32.min]
    assert schedule.as_int32(np.array([2**64 - 1], np.uint64)).tolist() == [INT32.max]
    x = GroupedTensor.from_padded(np.ones((2, 3, 1), np.float32), np.array([2**32 + 1, 2]))
    assert x.first_dims.tolist() == [3, 2]


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_group_ids_of_any_offsets(ends: list[int], capacity: int) -> None:
    """Against a count of the groups that end at or before each row; no groups and no rows among them."""
    ends = sorted(min(end, capacity) for end in ends)
    ids = schedule.group_ids(jnp.array([0, *ends], jnp.int32), capacity)
    assert ids.dtype == jnp.int32 and ids.tolist() == [sum(end <= row for end in ends) for row in range(capacity)]


@given(st.lists(st.integers(-3, 9), max_size=12))
@settings(deadline=None, max_examples=30)
def test_count_up_to(values: list[int]) -> None:
    found = schedule.count_up_to(jnp.array(sorted(values), jnp.int32), jnp.arange(-4, 11, dtype=jnp.int32))
    assert found.dtype == jnp.int32
    assert found.tolist() == [sum(value <= bound for value in values) for bound in range(-4, 11)]


def test_group_ids() -> None:
    ids = schedule.group_ids(jnp.array([0, 0, 3, 3, 4], jnp.int32), 6)
    assert ids.dtype == jnp.int32
    assert ids.tolist() == [1, 1, 1, 3, 4, 4]  # 4, the number of groups, in the tail


@pytest.mark.parametrize("others", [None, [2, 1, 3], [-1, 0, 2**31 - 1]])
def test_element_mask(others: list[int] | None) -> None:
    sizes, rows, columns = [2, 0, 1], 4, 3
    expected = np.zeros((rows, columns), bool)
    expected[0:2, : columns if others is None else max(0, others[0])] = True
    expected[2:3, : columns if others is None else others[2]] = True
    given = None if others is None else jnp.array(others, jnp.int32)
    mask = schedule.element_mask(jnp.array(sizes, jnp.int32), given, rows, columns)
    assert np.array_equal(mask, expected)


@pytest.mark.parametrize("offset", [0, 1, 3, 4, 9, -1, -9, INT32.min, INT32.max])
@pytest.mark.parametrize("held", [1, 2, 6])
def test_segments_of_a_shard(offset: int, held: int) -> None:
    """K11, K14: the rows of the groups that a shard holds; a group that doesn't exist has no rows."""
    sizes = [3, 0, 2, 4]
    ends = np.cumsum(sizes).tolist()
    starts, stops = schedule.segments(jnp.array(sizes, jnp.int32), 12, jnp.array(offset, jnp.int32), held)
    assert starts.shape == stops.shape == (held,)
    for i, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        group = offset + i
        if 0 <= group < len(sizes):
            assert (start, stop) == (ends[group] - sizes[group], ends[group])
        else:
            assert start == stop and 0 <= start <= 12


def test_segments_of_all_groups() -> None:
    sizes = jnp.array([[3, 0, 2], [1, 1, 1]], jnp.int32)
    starts, stops = schedule.segments(sizes, 6)
    assert starts.tolist() == [[0, 3, 3], [0, 1, 2]] and stops.tolist() == [[3, 3, 5], [1, 2, 3]]
    starts, stops = schedule.segments(sizes, 6, held=2)
    assert starts.tolist() == [[0, 3], [0, 1]] and stops.tolist() == [[3, 3], [1, 2]]
