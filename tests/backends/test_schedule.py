"""`backends/schedule.py` against a plain Python listing of rows and tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged import GroupedTensor
from ragged.backends import schedule
from ragged.backends.tpu import tiled as tiled
from ragged.backends.tpu.tiles import chip
from ragged.core.offsets import as_int32, count_up_to, element_mask, group_ids, group_offsets, segments
from ragged.product.layout import Product
from ragged.product.operands import Call, Operand, Operands, Options
from tests import oracle
from tests.cases import split

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
    """The example at the top of `schedule.py`."""
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
    """A shared tile is visited once for each of its groups, a tile of the tail never."""
    offsets, visits, _ = run(sizes, m, tm)
    assert offsets.tolist() == np.cumsum([0, *sizes]).tolist()
    assert visits == list_visits(sizes, tm)


def test_bound_is_met() -> None:
    """The static length is not too long: these sizes need all of it."""
    _, visits, padding = run([1, 5, 1, 5], m=12, tm=4, empty=True)
    assert len(visits) == 3 + 4 - 1 and not padding


@pytest.mark.parametrize("sizes", [[0, 3, 0, 0, 5, 0], [0, 0, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 8]])
@pytest.mark.parametrize("tm", [3, 4, 8, 16])
def test_empty_groups_are_visited_when_asked(sizes: list[int], tm: int) -> None:
    """`visit_empty_groups` adds one visit for each empty group, in the groups' order, to a tile that exists."""
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
    """`start_group` and `num_nonzero_groups`; what lies outside the groups never wraps around into them."""
    sizes = [3, 0, 5, 1, 2]
    offsets, visits, _ = run(sizes, m=14, tm=4, start=start, count=count, empty=empty)
    assert offsets.tolist() == [0, 3, 3, 8, 9, 11]  # of all groups
    assert [v for v in visits if sizes[v[0]]] == list_visits(sizes, 4, start, count)
    asked = empty and start <= 1 < start + count
    assert [g for g, _ in visits if not sizes[g]] == ([1] if asked else [])


@given(st.sampled_from([(8, 4), (13, 4), (13, 16)]), st.sampled_from([1, 5]), st.booleans(), st.data())
@settings(max_examples=150)
def test_any_sizes(extent: tuple[int, int], g: int, empty: bool, data: st.DataObject) -> None:
    """Any sizes that fit, any shard."""
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
    """A negative size is 0, and nothing reaches past the capacity."""
    return [0, *(start + held for start, held in oracle.clipped(sizes, capacity))]


@given(st.lists(any_int32, min_size=5, max_size=5), st.sampled_from([0, 13]), st.sampled_from([1, 4]))
@settings(max_examples=100)
def test_wrong_sizes_stay_inside_the_buffer(sizes: list[int], capacity: int, tm: int) -> None:
    """Offsets and visits for negative sizes, sums above the capacity and sums that overflow int32."""
    offsets = group_offsets(jnp.array(sizes, jnp.int32), capacity)
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
    offsets = group_offsets(jnp.full((65,), INT32.max, jnp.int32), capacity)
    assert offsets.tolist() == [0] + [capacity] * 65


def test_batched_offsets() -> None:
    sizes = [[3, 0, 2], [9, -1, 1], [2**31 - 1, 2**31 - 1, 3]]
    offsets = group_offsets(jnp.array(sizes, jnp.int32), 8)
    assert offsets.tolist() == [sound_offsets(s, 8) for s in sizes]


def test_uint32_sizes() -> None:
    """Sizes may be uint32, as may the first group."""
    sizes = jnp.array([3, 0, 5], jnp.uint32)
    assert group_offsets(sizes, 9).tolist() == [0, 3, 3, 8]
    assert group_offsets(sizes, 9).dtype == jnp.int32
    for first in (0, 5):
        large = jnp.array([first, 2**32 - 3, 1], jnp.uint32)
        assert group_offsets(large, 9).tolist() == [0, first, 9, 9]
    for kind in (jnp.int32, jnp.uint32):
        (offsets, groups, tiles), n = schedule.make_group_metadata(
            group_sizes=sizes, m=9, tm=4, start_group=jnp.array(1, kind), num_nonzero_groups=2
        )
        assert (offsets.dtype, groups.dtype, tiles.dtype, n.dtype) == (jnp.int32,) * 4
        assert list(zip(groups[:n].tolist(), tiles[:n].tolist(), strict=True)) == [(2, 0), (2, 1)]


@pytest.mark.parametrize("m, tm, g", [(0, 4, 2), (4, 0, 2), (-1, 4, 2), (4, -4, 2), (4, 4, 0)])
def test_empty_buffer_is_refused(m: int, tm: int, g: int) -> None:
    with pytest.raises(ValueError) as error:
        schedule.make_group_metadata(group_sizes=jnp.zeros((g,), jnp.int32), m=m, tm=tm)
    assert str(error.value) == (
        f"`make_group_metadata`: there must be rows, tiles and groups. Got m={m}, tm={tm}, {g} groups.\n"
        "There are no tiles to visit: return zeros without a kernel."
    )


@pytest.mark.parametrize("first", split([2**70, np.int64(2**32 + 1)], [2**40, -(2**40), np.int64(-(2**32) + 1)]))
def test_integers_beyond_int32_stay_out_of_range(first: int | np.int64) -> None:
    """Python's and NumPy's integers, as the first group and as sizes."""
    kept = int(np.clip(int(first) if abs(int(first)) < 2**62 else 2**62, INT32.min, INT32.max))
    assert as_int32(first).dtype == jnp.int32 and int(as_int32(first)) == kept
    _, n = schedule.make_group_metadata(
        group_sizes=jnp.array([3, 4], jnp.int32), m=8, tm=4, start_group=first, num_nonzero_groups=2
    )
    assert int(n) == 0


def test_sizes_beyond_int32() -> None:
    """They reach past the capacity, and are cut off there."""
    assert as_int32(np.array([2**32 + 1, -(2**32)])).tolist() == [INT32.max, INT32.min]
    assert as_int32(np.array([2**64 - 1], np.uint64)).tolist() == [INT32.max]
    x = GroupedTensor.from_padded(np.ones((2, 3, 1), np.float32), np.array([2**32 + 1, 2]))
    assert x.first_dims.tolist() == [3, 2]


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 9))
@settings(max_examples=30)
def test_group_ids_of_any_offsets(ends: list[int], capacity: int) -> None:
    """Against a count of the groups that end at or before each row; no groups and no rows among them."""
    ends = sorted(min(end, capacity) for end in ends)
    ids = group_ids(jnp.array([0, *ends], jnp.int32), capacity)
    assert ids.dtype == jnp.int32 and ids.tolist() == [sum(end <= row for end in ends) for row in range(capacity)]


@given(st.lists(st.integers(-3, 9), max_size=12))
@settings(max_examples=30)
def test_count_up_to(values: list[int]) -> None:
    found = count_up_to(jnp.array(sorted(values), jnp.int32), jnp.arange(-4, 11, dtype=jnp.int32))
    assert found.dtype == jnp.int32
    assert found.tolist() == [sum(value <= bound for value in values) for bound in range(-4, 11)]


def test_group_ids() -> None:
    ids = group_ids(jnp.array([0, 0, 3, 3, 4], jnp.int32), 6)
    assert ids.dtype == jnp.int32
    assert ids.tolist() == [1, 1, 1, 3, 4, 4]  # 4, the number of groups, in the tail


@pytest.mark.parametrize("others", [None, [2, 1, 3], [-1, 0, 2**31 - 1]])
def test_element_mask(others: list[int] | None) -> None:
    sizes, rows, columns = [2, 0, 1], 4, 3
    expected = np.zeros((rows, columns), bool)
    expected[0:2, : columns if others is None else max(0, others[0])] = True
    expected[2:3, : columns if others is None else others[2]] = True
    given = None if others is None else jnp.array(others, jnp.int32)
    mask = element_mask(jnp.array(sizes, jnp.int32), given, rows, columns)
    assert np.array_equal(mask, expected)


@pytest.mark.parametrize("offset", [0, 1, 3, 4, 9, -1, -9, INT32.min, INT32.max])
@pytest.mark.parametrize("held", [1, 2, 6])
def test_segments_of_a_shard(offset: int, held: int) -> None:
    """The rows of the groups that a shard holds; a group that doesn't exist has no rows."""
    sizes = [3, 0, 2, 4]
    ends = np.cumsum(sizes).tolist()
    starts, stops = segments(jnp.array(sizes, jnp.int32), 12, jnp.array(offset, jnp.int32), held)
    assert starts.shape == stops.shape == (held,)
    for i, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        group = offset + i
        if 0 <= group < len(sizes):
            assert (start, stop) == (ends[group] - sizes[group], ends[group])
        else:
            assert start == stop and 0 <= start <= 12


def test_segments_of_all_groups() -> None:
    sizes = jnp.array([[3, 0, 2], [1, 1, 1]], jnp.int32)
    starts, stops = segments(sizes, 6)
    assert starts.tolist() == [[0, 3, 3], [0, 1, 2]] and stops.tolist() == [[3, 3, 5], [1, 2, 3]]
    starts, stops = segments(sizes, 6, num_local=2)
    assert starts.tolist() == [[0, 3], [0, 1]] and stops.tolist() == [[3, 3], [1, 2]]


def tiles_with(start: int, end: int, tile: int) -> list[int]:
    """The tiles that a row of `start..end - 1` lies in."""
    return sorted({row // tile for row in range(start, end)})


ROWS, TILE, SEGMENTS = 13, 4, 4


@st.composite
def spans(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """First and end rows `[2, s]` of segments in order, with gaps between them; an empty one begins anywhere."""
    cuts = [sorted(draw(st.lists(st.integers(0, ROWS), min_size=8, max_size=8))) for _ in range(2)]
    starts, ends = (np.array([cut[first::2] for cut in cuts], np.int32) for first in (0, 1))
    anywhere = np.array(draw(st.lists(st.integers(0, ROWS), min_size=8, max_size=8)), np.int32).reshape(2, SEGMENTS)
    return np.where(starts == ends, anywhere, starts), np.where(starts == ends, anywhere, ends)


def read(visits: schedule.Visits, bound: int) -> list[tuple[int, int, int, int, int, int]]:
    """(element, tile, start, end, matrix, rest) of each visit that counts."""
    v = schedule.Visits(*(np.asarray(x) for x in visits))
    assert all(x.dtype == np.int32 for x in v)
    assert len(v.piece) == len(v.tile) == bound and v.count.shape == (1,) and v.count[0] <= bound
    # Those that don't count are in range, too: they are read ahead of time.
    assert v.piece.min() >= 0 and v.piece.max() < len(v.start) and v.tile.min() >= 0 and v.tile.max() < -(-ROWS // TILE)
    assert v.matrix.min() >= 0 and v.matrix.max() < SEGMENTS and v.rest.min() >= -1
    by_piece = [v.batch, v.start, v.end, v.matrix, v.rest]
    columns = [by_piece[0][v.piece], v.tile, *(x[v.piece] for x in by_piece[1:])]
    return list(zip(*(x[: v.count[0]].tolist() for x in columns), strict=True))


row_visits = jax.jit(functools.partial(schedule.row_visits, rows=ROWS, tile=TILE))
group_visits = jax.jit(functools.partial(schedule.group_visits, rows=ROWS, tile=TILE), static_argnames="sum_batch")


@given(spans())
@settings(max_examples=40)
def test_visits_of_rows(given: tuple[np.ndarray, np.ndarray]) -> None:
    """Each tile of rows in turn: once for each segment that has a row in it, or once if none has any."""
    starts, ends = given
    found = iter(read(row_visits(*map(jnp.asarray, given)), bound=2 * (4 + SEGMENTS - 1)))
    for element in range(2):
        tiles_of = [tiles_with(*span, TILE) for span in zip(starts[element], ends[element], strict=True)]
        present = [segment for segment, tiles in enumerate(tiles_of) if tiles]
        for tile in range(4):
            for segment in [segment for segment in present if tile in tiles_of[segment]]:
                span = int(starts[element, segment]), int(ends[element, segment])
                assert next(found) == (element, tile, *span, segment, -1)
            if any(tile in tiles for tiles in tiles_of):
                continue
            got_element, got_tile, start, end, matrix, rest = next(found)
            assert (got_element, got_tile) == (element, tile) and start == end
            # Meanwhile the next segment's matrix and first tile are fetched, or the last one's stay.
            later = [segment for segment in present if tiles_of[segment][0] > tile]
            if present:
                assert matrix == (later or present[-1:])[0]
                assert rest in (tiles_of[matrix][:1] if later else tiles_of[matrix])
            assert 0 <= rest < 4
    assert not list(found)


@pytest.mark.parametrize(
    "sizes", split([[3, 5, 0, 4]], [[9, 0, 9, 9], [0, 0, 0, 0], [16, 0, 0, 0], [1, 1, 1, 1], [4, 4, 4, 4]])
)
def test_kernels_visit_what_the_metadata_lists(sizes: list[int]) -> None:
    """The schedules of the TPU's kernels, but for gaps, against that for those who write their own."""
    dims = jnp.array(sizes, jnp.int32)
    starts, ends = segments(dims, ROWS)
    for is_wgrad in (False, True):
        (_, ids, tiles), count = schedule.make_group_metadata(
            group_sizes=dims, m=ROWS, tm=TILE, visit_empty_groups=is_wgrad
        )
        want = sorted(zip(np.asarray(ids)[:count].tolist(), np.asarray(tiles)[:count].tolist(), strict=True))
        one = starts[None], ends[None]
        visits = group_visits(*one, sum_batch=False) if is_wgrad else row_visits(*one)
        table = {name: np.asarray(x) for name, x in visits._asdict().items()}
        pieces = table["piece"][: int(table["count"][0])]
        listed = [
            (int(table["matrix"][p]), int(t))
            for p, t in zip(pieces, table["tile"], strict=False)
            if table["rest"][p] < 0
        ]
        assert sorted(listed) == want


@pytest.mark.parametrize("sum_batch", [False, True])
@given(spans())
@settings(max_examples=40)
def test_visits_of_groups(sum_batch: bool, given: tuple[np.ndarray, np.ndarray]) -> None:
    """Each segment in turn: once for each tile that it has a row in; an empty one once, of no row."""
    starts, ends = given
    found = iter(read(group_visits(*map(jnp.asarray, given), sum_batch=sum_batch), bound=2 * (4 + SEGMENTS - 1)))
    order = [(element, segment) for element in range(2) for segment in range(SEGMENTS)]
    for element, segment in sorted(order, key=lambda both: both[::-1]) if sum_batch else order:
        start, end = int(starts[element, segment]), int(ends[element, segment])
        for tile in tiles_with(start, end, TILE) or [None]:
            got_element, got_tile, *got_span, matrix, rest = next(found)
            assert (got_element, matrix, rest) == (element, segment, -1)
            assert got_span == [start, end] and tile in (got_tile, None)
    assert not list(found)


STORED = [  # the ragged letters; how lhs, rhs and the result are stored: the packed letter first
    ("mn", ("mk", "nk", "mn")),
    ("mn", ("mk", "nk", "nm")),
    ("mk", ("mk", "kn", "mn")),
    ("mk", ("km", "kn", "mn")),
    ("kn", ("km", "kn", "nm")),
    ("kn", ("km", "nk", "nm")),
    ("mkn", ("mk", "kn", "mn")),
    ("mkn", ("mk", "nk", "nm")),
    ("mkn", ("km", "kn", "mn")),
    ("mkn", ("km", "nk", "nm")),
]
SIZES = {  # sound ones; empty groups and whole tiles; too large, negative
    "sound": {"m": [200, 0, 70, 20], "k": [10, 150, 128, 0], "n": [3, 129, 0, 140]},
    "aligned": {"m": [128, 128, 0, 0], "k": [0, 128, 128, 0], "n": [128, 0, 0, 128]},
    "wrong": {"m": [100, -5, 2**31 - 1, 8], "k": [2**31 - 1, 40, 200, 7], "n": [150, 400, -(2**31), 9]},
    "none": {"m": [0] * 4, "k": [0] * 4, "n": [-1] * 4},
}


@pytest.mark.parametrize("letters, axes", split(STORED[-1:], STORED[:-1]), ids=str)
def test_tables_of_the_tiled_kernel(letters: str, axes: tuple[str, str, str]) -> None:
    """What the TPU's kernel for several ragged letters visits, and where in its buffers each group lies."""
    for sizes in SIZES.values():
        check_tables(letters, axes, sizes)


def check_tables(letters: str, axes: tuple[str, str, str], sizes: dict[str, list[int]]) -> None:
    rows, width, tile = {"lhs": 300, "rhs": 290, "out": 310}, {"m": 135, "k": 260, "n": 140}, 128
    terms = dict(zip(rows, axes, strict=True))
    of = {letter: sizes[letter] for letter in letters}
    groups = range(4)
    # 1. By the definition: where each group begins in each buffer, and how much of it all buffers hold.
    start = {(term, packed): oracle.clipped(of[packed], rows[term]) for term, (packed, _) in terms.items()}
    length = {letter: [width[letter]] * 4 for letter in "mkn"}
    for letter in letters:
        held = [[h for _, h in start[term, letter]] for term, (packed, _) in terms.items() if packed == letter]
        cut = [[min(max(s, 0), width[letter]) for s in of[letter]]] * any(other == letter for _, other in axes)
        length[letter] = [min(each) for each in zip(*held, *cut, strict=True)]

    # 2. The tables.
    shapes = {term: (rows[term], width[other]) for term, (_, other) in terms.items()}
    operands = [Operand(jax.ShapeDtypeStruct(shapes[term], jnp.float32)) for term in ("lhs", "rhs")]
    call = Call(Product(*axes, letters), shapes["out"], jnp.dtype("float32"), Options(), out_batch=True)
    p = tiled._tiling_problem(call, Operands(operands[0], operands[1], of_arrays(of)), chip(None)).fitted(
        dict.fromkeys("mkn", tile)
    )
    assert p.tile == dict.fromkeys("mkn", tile)
    tables, count = jax.tree.map(np.asarray, tiled._tables(p, of_arrays(of), axes, tuple(shapes.values())))
    assert count <= p.visits == len(tables.visit)

    # 3. Each group's elements are where the definition says. A tile's place in a buffer is its own, shifted.
    row, column = axes[2]
    contracted = p.contracted
    whole = [g for g in groups if all(length[letter][g] for letter in "mkn")]
    for g in whole:
        for operand in p.operands:
            for axis, side in enumerate(operand.sides):
                if side.letter in letters:
                    shift = tables.block[side.shift][g] * tile + tables.offset[side.shift][g] if side.shifted else 0
                    want = start[operand.name, side.letter][g][0] if axis == 0 else 0
                    assert tables.begin[side.letter][g] + shift == want
        assert tables.begin[row][g] == start["out", row][g][0] and (
            column not in letters or tables.begin[column][g] == 0
        )
        assert all(tables.end[x][g] - tables.begin[x][g] == length[x][g] for x in letters)

    # 4. What is multiplied: for each tile of the result, for each group with elements in it, all that is contracted.
    def tiles(letter: str, g: int) -> list[int]:
        if letter not in letters:
            return [0]
        begin = int(tables.begin[letter][g])
        return tiles_with(begin, begin + length[letter][g], tile)

    grid = [(j, i) for j in range(p.tiles(column) if column in letters else 1) for i in range(p.tiles(row))]
    want = [
        (j, i, g, step)
        for j, i in grid
        for g in whole
        if i in tiles(row, g) and j in tiles(column, g)
        for step in tiles(contracted, g)
    ]
    places = [p.place((0, 0, visit, 0), tables) for visit in range(count)]
    visits = [
        (int(at.tile[column]), int(at.tile[row]), int(tables.group[at.piece]), int(at.tile[contracted]))
        for at in places
    ]
    assert [visit for visit, at in zip(visits, places, strict=True) if at.active] == want
    # 5. Every tile of the result is visited, and opened by the first of its visits, which writes its zeros.
    opened = [(visit, bool(at.active)) for visit, at in zip(visits, places, strict=True) if at.opens]
    firsts = [next(visit for visit in visits if visit[:2] == both) for both in grid]
    assert list(dict.fromkeys(visit[:3] for visit, _ in opened)) == [visit[:3] for visit in firsts]
    assert list(dict.fromkeys(visit[:2] for visit in visits)) == grid


def of_arrays(sizes: dict[str, list[int]]) -> dict[str, jax.Array]:
    return {letter: jnp.array(of, jnp.int32) for letter, of in sizes.items()}
