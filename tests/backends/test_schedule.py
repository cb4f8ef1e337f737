"""`backends/schedule.py` against a plain Python listing of rows and tiles."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged.backends import schedule
from ragged.backends.tpu import tiled as tiled
from ragged.backends.tpu.tiles import chip
from ragged.core.offsets import group_offsets, segments
from ragged.product.layout import Product
from ragged.product.operands import Call, Operand, Operands, Options
from tests import oracle
from tests.contract.draws import size_table

INT32 = np.iinfo(np.int32)

Visits = list[tuple[int, int]]


def list_visits(sizes: list[int], tm: int, start: int = 0, count: int | None = None) -> Visits:
    """(group, tile) of every tile that a row of a group lies in, group by group. Empty groups have none."""
    owner = [group for group, size in enumerate(sizes) for _ in range(size)]
    wanted = range(start, start + (len(sizes) if count is None else count))
    return sorted({(group, row // tm) for row, group in enumerate(owner) if group in wanted})


@pytest.mark.parametrize("m, tm", [(8, 4), (7, 3), (5, 8)])  # whole tiles; a partial one; one larger than the buffer
def test_visits(m: int, tm: int) -> None:
    """Of all sizes of four groups that fit, of some that don't, and of any shard: every tile that has a row of a group,
    group by group, and an empty group once if asked. The static length is enough, and not too long."""
    rng, g, tiles, most = np.random.default_rng(0), 4, -(-m // tm), 0
    fitting = [sizes for sizes in itertools.product(range(m + 1), repeat=g) if sum(sizes) <= m]
    every = np.concatenate([np.array(fitting, np.int32), size_table(g, m, tm, rng)])
    ways = [*itertools.product((False, True), (None, 0, 2, 9))]
    first = rng.choice(np.array([0, 0, 0, 1, 3, 4, -1, -9, INT32.min, INT32.max], np.int32), (len(ways), len(every)))
    # What is negative is too large in uint32.
    given = [
        (every.astype(np.uint32 if count == 9 else np.int32), starts)
        for (_, count), starts in zip(ways, first, strict=True)
    ]

    def metadata(empty: bool, count: int | None, sizes: jax.Array, start: jax.Array) -> Any:
        options: dict[str, Any] = {"start_group": start, "num_nonzero_groups": count, "visit_empty_groups": empty}
        return schedule.make_group_metadata(group_sizes=sizes, m=m, tm=tm, **options)

    @jax.jit
    def run(given: Any) -> Any:
        return [jax.vmap(functools.partial(metadata, *way))(*each) for way, each in zip(ways, given, strict=True)]

    for (empty, count), (sizes, starts), found in zip(ways, given, run(given), strict=True):
        (offsets, groups, at), counts = jax.tree.map(np.asarray, found)
        assert {x.dtype for x in (offsets, groups, at, counts)} == {np.dtype(np.int32)}
        # Entries that pad the lists are in range, too.
        assert groups.shape == at.shape == (len(every), tiles + g - 1)
        assert groups.min() >= 0 and groups.max() < g and at.min() >= 0 and at.max() < tiles
        for row, (start, n) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            clipped = oracle.clipped(sizes[row].tolist(), m)
            held, wanted = [size for _, size in clipped], range(start, start + (g if count is None else count))
            visits = [*zip(groups[row, :n].tolist(), at[row, :n].tolist(), strict=True)]
            assert offsets[row].tolist() == [0, *(begin + size for begin, size in clipped)]
            assert [visit for visit in visits if held[visit[0]]] == list_visits(held, tm, start, count)
            nothing = [i for i in range(g) if empty and not held[i] and i in wanted]
            assert [i for i, _ in visits if not held[i]] == nothing
            # In order; and a kernel never comes back to a tile that it has left.
            assert visits == sorted(visits) and [x for _, x in visits] == sorted(x for _, x in visits)
            most = max(most, n)
    assert most == tiles + g - 1


def test_a_first_group_beyond_int32() -> None:
    """A Python integer doesn't wrap around into range."""
    options: dict[str, Any] = {"m": 8, "tm": 4, "start_group": 2**32, "num_nonzero_groups": 2}
    run = jax.jit(lambda sizes: schedule.make_group_metadata(group_sizes=sizes, **options)[1])
    assert int(run(np.array([3, 4], np.int32))) == 0


def test_many_large_sizes_do_not_wrap_around() -> None:
    """Sizes clipped to the capacity can still overflow together: 64 of them would come back to 0."""
    capacity = 2**26
    offsets = group_offsets(jnp.full((65,), INT32.max, jnp.int32), capacity)
    assert offsets.tolist() == [0] + [capacity] * 65


@pytest.mark.parametrize("m, tm, g", [(0, 4, 2), (4, 0, 2), (-1, 4, 2), (4, -4, 2), (4, 4, 0)])
def test_empty_buffer_is_refused(m: int, tm: int, g: int) -> None:
    with pytest.raises(ValueError) as error:
        schedule.make_group_metadata(group_sizes=jnp.zeros((g,), jnp.int32), m=m, tm=tm)
    assert str(error.value) == (
        f"`make_group_metadata`: there must be rows, tiles and groups. Got m={m}, tm={tm}, {g} groups.\n"
        "There are no tiles to visit: return zeros without a kernel."
    )


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


@pytest.mark.long
@pytest.mark.parametrize("letters, axes", STORED, ids=str)
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
