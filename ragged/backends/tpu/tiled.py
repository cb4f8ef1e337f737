"""Grouped products with two or three ragged letters, as one Pallas kernel for TPUs.

Every term is a buffer `[packed, other]`. The kernel visits tiles of the result; each visit multiplies a tile of one
operand with a tile of the other. Tiles lie where the result has them:

- along the rows' letter, which the result packs: aligned tiles of the buffer, whatever groups they hold;
- along the columns' letter, if ragged: tiles counted from the group's own column 0;
- along the contracted letter, if ragged: aligned tiles of the buffers if both operands pack it, else tiles counted from
  the group's own element 0.

An operand that holds a letter the other way has such a tile at any offset, where no DMA can begin. So two neighbouring
blocks are fetched, and the tile is cut out of them in VMEM. An operand's scales are fetched and cut as it is.

    rows     columns    visits of row tile 1, which both groups share; the columns are ragged
    tile 0   00000...
    tile 1   0000....   column tile 0: group 0 (a visit for each contracted tile), then group 1
    tile 1   1111111.   column tile 1: group 1 alone; group 0 has no such columns
    tile 2   11111111   column tile 2: neither; one visit writes zeros
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ragged.backends import schedule
from ragged.backends.base import (
    Launch,
    Refusal,
    Target,
    Work,
    choice,
    cost,
    finish,
    kernel_metadata,
    scale_ways,
    spans,
)
from ragged.backends.config import TpuConfig
from ragged.backends.tpu import scales as tpu_scales
from ragged.backends.tpu import units
from ragged.backends.tpu.pipeline import in_place
from ragged.backends.tpu.tiles import LANES, SMEM, Chip, chip, round_up
from ragged.product.operands import Call, Operands, Scales
from ragged.quant.formats import compute_dtype

_LARGEST_TILE, _LARGEST_UNIFORM_TILE = 512, 2048
_VMEM = 12 << 20
"""Bytes that a kernel may take: within the 16 MiB that every generation's compiler allows."""
_LOADED = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
"""What a kernel loads; operands in other dtypes are cast before."""
_SUBLANES = 8
"""Rows of the smallest block of float32: as many times a group's scales are repeated."""


class _Side(NamedTuple):
    """One axis of an operand."""

    letter: str  # or "group", of scales by group; or "", of scales whose columns are all in one tile
    tile: int
    blocks: int  # in the buffer, of one tile each
    shift: str = ""  # its name in the tables, where a tile is cut out of two blocks

    @property
    def shifted(self) -> bool:
        return bool(self.shift)


class _Operand(NamedTuple):
    name: str
    dtype: Any
    wide: Any  # the dtype in which it is shifted and masked: the vector unit's own
    batched: bool
    sides: tuple[_Side, _Side]

    @property
    def window(self) -> tuple[int, int]:
        """Rows and columns of the blocks that hold a tile."""
        rows, columns = (side.tile * (1 + side.shifted) for side in self.sides)
        return rows, columns


class _Factor(NamedTuple):
    """What an operand's scales are multiplied into: its tile if they change along the contracted letter, else the sum.

    They are `[packed, blocks of columns]`, or by group `[8 * groups, columns]`, each group's row eight times.
    """

    source: _Operand
    by_row: bool
    extent: int | None  # of a block of columns; None for all columns
    in_tile: bool


class _Tables(NamedTuple):
    """What the scalar unit reads, all int32.

    A piece is what one group has of one tile of rows, or a tile of rows that no group has: the piece of a group `g`
    that has nothing of any letter.
    """

    visit: Any  # (v,) a word that `_Geometry.place` reads
    tile: Any  # (p,) tile of rows of each piece
    group: Any  # (p,) group of each piece
    begin: dict[str, Any]  # (g+1,) by ragged letter: where the group begins, in the coordinates of the tiles
    end: dict[str, Any]  # (g+1,) and where it ends
    block: dict[str, Any]  # (g+1,) by shifted side: the first of the two blocks that hold the group's tile 0
    offset: dict[str, Any]  # (g+1,) and where in it that tile begins


class _Place(NamedTuple):
    """Where a step of the grid is."""

    opens: Any  # whether it is the first piece of a tile of the result
    active: Any  # whether there is anything to multiply
    piece: Any
    tile: dict[str, Any]  # by letter


class _Geometry(NamedTuple):
    """Where a product's letters lie, and how they are tiled."""

    row: str
    column: str
    contracted: str
    extent: dict[str, int]  # by letter: of the coordinates that its tiles are counted in
    capacity: dict[str, int]  # by letter that is packed: the least extent of the terms that pack it
    tile: dict[str, int]
    ragged: frozenset[str]
    num_groups: int
    operands: tuple[_Operand, _Operand]  # the one with the result's rows first
    factors: tuple[_Factor | None, _Factor | None]  # of the operands
    dtype: Any  # of the result
    has_existing: bool
    dot: units.Dot
    precision: Any

    @property
    def inputs(self) -> list[_Operand]:
        """What is fetched: the operands, then their scales."""
        return [*self.operands, *(factor.source for factor in self.factors if factor)]

    def tiles(self, letter: str) -> int:
        return -(-self.extent[letter] // self.tile[letter])

    @property
    def radix(self) -> tuple[int, int, int]:
        """How many contracted tiles, pieces and column tiles a visit can name; letters that aren't ragged have none."""
        steps, columns = (self.tiles(x) if x in self.ragged else 1 for x in (self.contracted, self.column))
        return steps, self.tiles(self.row) + self.num_groups - 1, columns

    @property
    def visits(self) -> int:
        """The most visits that there can be.

        A group with `1 + e` tiles of a letter has `e` of them on top of its first. Where the letter is packed, these
        add up to at most `E` over all groups, so the products `(1 + e) * (1 + e')` add up to at most
        `(1 + E) * (1 + E') + g - 1`. And each tile of the result may have a visit that writes its zeros.
        """
        steps, pieces, columns = self.radix
        packed, others = 1, 1
        for letter in self.ragged:
            if letter in self.capacity:
                packed *= 1 + self.capacity[letter] // self.tile[letter]
            else:
                others *= self.tiles(letter)
        zeros = self.tiles(self.row) * columns
        return min(steps * pieces * columns, others * (packed + self.num_groups - 1) + zeros)

    @property
    def smem(self) -> int:
        """How many bytes the tables take; more than there are if a visit doesn't fit its word."""
        if 2 + sum(count.bit_length() for count in self.radix) > 31:
            return 2 * SMEM
        by_group = len(self.ragged) + sum(side.shifted for operand in self.operands for side in operand.sides)
        return 4 * (self.visits + 2 * self.radix[1] + 2 * by_group * (self.num_groups + 1))

    @property
    def vmem(self) -> int:
        """How many bytes a kernel takes, about: two buffers of each block, scratch, and what is rotated."""
        result = 2 * (1 + self.has_existing) * self.dtype.itemsize
        total = self.tile[self.row] * self.tile[self.column] * (result + 4)
        for operand in self.inputs:
            (rows, columns), height = operand.window, operand.sides[0].tile
            total += rows * columns * (2 * operand.dtype.itemsize + 4 * operand.sides[0].shifted)
            total += height * columns * 4 * operand.sides[1].shifted
        for operand, factor in zip(self.operands, self.factors, strict=True):
            if factor and factor.in_tile:
                total += 8 * operand.sides[0].tile * operand.sides[1].tile
        return total

    def pack(self, opens: Array, active: Array, column: Array, piece: Array, step: Array) -> Array:
        """A visit's word. The step has the lowest bits, so that words of consecutive steps are consecutive."""
        steps, pieces, columns = (count.bit_length() for count in self.radix)
        word = (active.astype(jnp.int32) << 1) + opens.astype(jnp.int32)
        return (((word << columns) + column << pieces) + piece << steps) + step

    def place(self, ids: Sequence[Any], tables: _Tables) -> _Place:
        column_id, _, visit, step_id = ids
        word, fields = tables.visit[visit], []
        for count in self.radix:
            fields.append(word & ((1 << count.bit_length()) - 1))
            word = word >> count.bit_length()
        step, piece, column = fields
        tile = {
            self.row: tables.tile[piece],
            self.column: column if self.column in self.ragged else column_id,
            self.contracted: step if self.contracted in self.ragged else step_id,
        }
        return _Place(opens=(word & 1) == 1, active=word >= 2, piece=piece, tile=tile)

    def span(self, letter: str, group: Any, tables: _Tables) -> tuple[Any, Any]:
        """Where a group begins and ends along a letter."""
        if letter not in self.ragged:
            return 0, self.extent[letter]
        return tables.begin[letter][group], tables.end[letter][group]


def plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    """How the kernel runs a product: see `ragged.backends.base`. Tiles fit every generation.

    `input_buffer_count` is 2 here: only the kernels for one ragged letter let one ask for more.
    """
    room = _room(call, x, chip(target.device))
    found = choice(
        call,
        x,
        target,
        "pallas_tpu",
        legal=room.illegal,
        tiled=lambda asked: room.config(room.fitted(asked)),
        model=lambda: room.config(room.chosen()),
    )
    if isinstance(found, Refusal):
        return found
    config, source = found
    column, contracted = call.product.out[1], call.product.contracted
    problem = room.build(dict(zip("mkn", config.along("mkn"), strict=True)))
    if problem.smem > SMEM:
        return Refusal(f"up to {problem.visits} visits: more than a TPU's scalar memory can list")
    return Launch(
        "pallas_tpu",
        "tiled_matmul",
        call,
        target,
        config=config,
        source=source,
        visits=problem.visits * math.prod(problem.tiles(x) for x in {column, contracted} - problem.ragged),
        details=problem,
        **cost(call, x),
    )


def candidates(launch: Launch) -> Iterator[TpuConfig]:
    """Tiles of half and of twice the height along some letters."""
    chosen: TpuConfig = launch.config
    for factors in itertools.product((1.0, 0.5, 2.0), repeat=3):
        sides = zip("mkn", chosen.along("mkn"), factors, strict=True)
        yield TpuConfig(**{letter: _round_up(int(tile * factor)) for letter, tile, factor in sides})


def run(launch: Launch, x: Operands) -> Array:
    """Two or three letters ragged. A batch axis is a dim of the grid; all its elements have the same sizes.

    Scales of an operand `[packed, other]` with a group's element in row `i`, column `j` of it are `values[i, j // c]`
    for `block=(1, c)`, and `values[group, j // c]` for `block=(None, c)`; `c=None` means all columns, and one column of
    values. A group's columns begin at 0, whether they are ragged or not, so no block straddles two groups. No value of
    the tail matters.
    """
    call, problem, existing, batch = launch.call, launch.details, x.epilogue.existing, launch.call.batch(x)
    p, shapes = call.product, (x.lhs.data.shape, x.rhs.data.shape, call.shape)
    operands, scales = _inputs(x)
    out = jax.ShapeDtypeStruct((batch or 1, *call.shape), problem.dtype, manual_axis_type=ManualAxisType())
    with jax.named_scope("ragged_tiled_matmul"):
        tables, visits = _tables(problem, x.sizes, (p.lhs, p.rhs, p.out), shapes)
        inputs = operands | {f"{name} scales": given.values for name, given in scales.items()}
        given = None if existing is None else existing.reshape(out.shape)
        product = _launch(launch, tables, visits, inputs, given, out)
    return product if batch is not None else product[0]


def _inputs(x: Operands) -> tuple[dict[str, Array], dict[str, Scales]]:
    """The operands as they are fetched, `[e, packed, other]`, and their scales; by name."""
    common = compute_dtype(x.lhs.data.dtype, x.rhs.data.dtype)
    operands, scales = {}, {}
    for name, (data, given) in (("lhs", x.lhs), ("rhs", x.rhs)):
        data = data if data.dtype.name in _LOADED else data.astype(common)
        operands[name] = data if data.ndim == 3 else data[None]
        if given is not None:
            scales[name] = _arranged(given, data.shape[-1])
    return operands, scales


def _arranged(scales: Scales, columns: int) -> Scales:
    """Scales as they are fetched, float32: `[e, packed, blocks]`; by group, `[e, 8 * g, columns]`, or one column."""
    values, (row, column) = scales.values.astype(jnp.float32), scales.block
    values = values if values.ndim == 3 else values[None]
    if row is None:
        values = jnp.repeat(values, _SUBLANES, axis=1)
        if column is not None:
            values, column = jnp.repeat(values, column, axis=2)[:, :, :columns], 1
    return Scales(values, (row, column))


def _room(call: Call, x: Operands, on: Chip) -> "_Room":
    """What there is to be tiled."""
    operands, scales = jax.eval_shape(_inputs, x)
    product, shape, sizes, precision = call.product, call.shape, x.sizes, call.options.precision
    axes, (row, column), contracted = (product.lhs, product.rhs, product.out), product.out, product.contracted
    in_tile = [
        term.letters for term, way in zip(call.terms(x), scale_ways(call, x, None), strict=True) if way == "tile"
    ]
    terms = [(name, letters, operands[name]) for name, letters in (("lhs", product.lhs), ("rhs", product.rhs))]
    terms.sort(key=lambda term: row not in term[1])
    aligned = _aligned(axes)
    extent = {row: shape[0], column: shape[1]}
    extent[contracted] = min(x.shape[1 + letters.index(contracted)] for _, letters, x in terms)
    capacity = {}
    for letters, rows in zip(axes, (operands["lhs"].shape[1], operands["rhs"].shape[1], shape[0]), strict=True):
        capacity[letters[0]] = min(rows, capacity.get(letters[0], rows))
    first, second = (jnp.dtype(jnp.float32) if in_tile else x.dtype for _, _, x in terms)
    dot = units.dot(first, second, on)
    if in_tile and all(x.dtype.itemsize == 1 for x in operands.values()):
        precision = lax.Precision.HIGHEST  # of tiles that were multiplied by their scales, all bits count
    # Numbers that stay in 8 bits are moved as they are.
    wide = jnp.int32 if dot.lhs.itemsize == 1 else jnp.float32

    def build(tile: dict[str, int]) -> _Geometry:
        def side(name: str, letters: str, x: Array, axis: int) -> _Side:
            letter = letters[axis]
            shifted = letter in sizes and (axis == 0) != (letter in aligned)
            shift = f"{name} {letter}" if shifted else ""
            return _Side(letter, tile[letter], -(-x.shape[1 + axis] // tile[letter]), shift)

        def factor(operand: _Operand, letters: str) -> _Factor | None:
            if operand.name not in scales:
                return None
            values, (row, extent) = scales[operand.name].values, scales[operand.name].block
            rows = _Side("group", _SUBLANES, x.num_groups) if row is None else operand.sides[0]
            columns = operand.sides[1] if extent == 1 else _Side("", _round_up(values.shape[2]), 1)
            source = _Operand(f"{operand.name} scales", values.dtype, jnp.float32, values.shape[0] > 1, (rows, columns))
            return _Factor(source, row is not None, extent, letters in in_tile)

        first, second = (
            _Operand(name, x.dtype, wide, x.shape[0] > 1, (side(name, letters, x, 0), side(name, letters, x, 1)))
            for name, letters, x in terms
        )
        return _Geometry(
            row=row,
            column=column,
            contracted=contracted,
            extent=extent,
            capacity=capacity,
            tile=tile,
            ragged=frozenset(sizes),
            num_groups=x.num_groups,
            operands=(first, second),
            factors=(factor(first, terms[0][1]), factor(second, terms[1][1])),
            dtype=jnp.dtype(call.dtype),
            has_existing=x.epilogue.existing is not None,
            dot=dot,
            precision=precision,
        )

    return _Room(build, extent, capacity, frozenset(sizes), x.num_groups, len(aligned))


class _Room(NamedTuple):
    """What a product's tiles are chosen by."""

    build: Callable[[dict[str, int]], _Geometry]
    extent: dict[str, int]
    capacity: dict[str, int]
    ragged: frozenset[str]
    num_groups: int
    aligned: int  # letters

    @property
    def whole(self) -> dict[str, int]:
        """The largest tiles there are."""
        return {letter: _round_up(size) for letter, size in self.extent.items()}

    def config(self, problem: _Geometry) -> TpuConfig:
        return TpuConfig(**problem.tile)

    def illegal(self, config: TpuConfig) -> Refusal | None:
        """Why the kernel can't have this configuration."""
        tile = dict(zip("mkn", config.along("mkn"), strict=True))
        near = {x: min(_round_up(t), self.whole[x]) for x, t in tile.items()}
        if near != tile:
            wrong = next(x for x in tile if near[x] != tile[x])
            problem = (
                f"tile_{wrong}={tile[wrong]} must be a multiple of {LANES}, at most {self.whole[wrong]}, on a TPU."
            )
            return Refusal(problem, f"The nearest legal tiling is {tuple(near[letter] for letter in 'mkn')}.")
        if config.buffers != 2:
            problem = f"{config.buffers} buffers for a product with {len(self.ragged)} ragged dims."
            return Refusal(problem, "Its kernel has 2 of each operand.")
        if (taken := self.build(tile).vmem) > _VMEM:
            return Refusal(f"{config} takes {taken} bytes of VMEM, of {_VMEM}.", "Take smaller tiles.")
        return None

    def fitted(self, tile: dict[str, int]) -> _Geometry:
        """With this tile, rounded up to a legal one, and halved along its longest side until it fits into VMEM."""
        tile = {letter: min(_round_up(tile[letter]), self.whole[letter]) for letter in "mkn"}
        while (found := self.build(tile)).vmem > _VMEM:
            longest = max("mkn", key=lambda letter: tile[letter])
            tile = tile | {longest: _round_up(tile[longest] // 2)}
        return found

    def chosen(self) -> _Geometry:
        """About the mean group, of what is packed somewhere; the next power of two.

        Half of it where two letters' tiles are aligned: a group shares tiles with its neighbours along both, and each
        is multiplied as a whole.
        """
        mean = self.extent | {
            x: min(self.extent[x], rows // self.num_groups // self.aligned) for x, rows in self.capacity.items()
        }
        largest = {x: min(_LARGEST_TILE if x in self.ragged else _LARGEST_UNIFORM_TILE, self.whole[x]) for x in "mkn"}
        tile = {x: min(largest[x], LANES << (_round_up(mean[x]) // LANES - 1).bit_length()) for x in "mkn"}
        found = self.fitted(tile)
        # Where there are too many tiles to list, larger ones, as long as they fit.
        while found.smem > SMEM:
            tile = found.tile
            larger = [
                tile | {x: min(2 * tile[x], largest[x])}
                for x in sorted(filter(self.ragged.__contains__, "mkn"), key=lambda x: tile[x])
            ]
            fitting = [p for t in larger if t != tile and (p := self.build(t)).vmem <= _VMEM]
            if not fitting:
                break
            found = fitting[0]
        return found


def _round_up(extent: int) -> int:
    return round_up(max(extent, 1), LANES)


def _aligned(axes: tuple[str, str, str]) -> set[str]:
    """The letters whose tiles are aligned in the terms that pack them: the result's rows, and what both operands pack.

    Other letters' tiles are aligned in the terms that don't pack them.
    """
    lhs, rhs, out = axes
    return {out[0], *(lhs[0] if lhs[0] == rhs[0] else "")}


def _tables(
    p: _Geometry, sizes: dict[str, Array], axes: tuple[str, str, str], shapes: tuple[tuple[int, ...], ...]
) -> tuple[_Tables, Array]:
    """What the scalar unit reads, and how many visits there are."""
    # 1. Where each group starts in each term, and sizes that fit all buffers. A group that two terms pack starts at the
    #    same place in both, unless it is cut to nothing.
    length = {letter: jnp.maximum(size, 0).astype(jnp.int32) for letter, size in sizes.items()}
    starts = {}
    for name, (packed, other), shape in zip(("lhs", "rhs", "out"), axes, shapes, strict=True):
        offsets = schedule.group_offsets(sizes[packed], shape[-2])
        starts[name] = offsets[:-1]
        length[packed] = jnp.minimum(length[packed], offsets[1:] - offsets[:-1])
        if other in sizes:
            length[other] = jnp.minimum(length[other], shape[-1])

    # 2. The same in the coordinates of the tiles, with a last group that has nothing.
    def with_gap(x: Array) -> Array:
        return jnp.pad(x, (0, 1))

    begin = {letter: jnp.zeros_like(size) for letter, size in length.items()}
    begin |= {
        letters[0]: starts[name] for name, letters in zip(starts, axes, strict=True) if letters[0] in _aligned(axes)
    }
    end = {letter: with_gap(begin[letter] + size) for letter, size in length.items()}
    block, offset = {}, {}
    for operand in p.operands:
        for axis, side in enumerate(operand.sides):
            if side.shifted:
                # The group's element 0 lies at its start where the operand packs it, else at 0.
                shift = with_gap((starts[operand.name] if axis == 0 else 0) - begin[side.letter])
                block[side.shift], offset[side.shift] = shift // side.tile, shift % side.tile
    begin = {letter: with_gap(x) for letter, x in begin.items()}

    # 3. Pieces, in the order of their tiles. `row_visits` numbers its own 2 * group + 1, and those of no group evenly.
    rows = schedule.row_visits(begin[p.row][None, :-1], end[p.row][None, :-1], p.extent[p.row], p.tile[p.row])
    piece = jnp.arange(rows.piece.shape[0], dtype=jnp.int32)
    group = jnp.where(rows.piece % 2 == 1, rows.piece // 2, p.num_groups)
    exists = piece < jnp.reshape(rows.count, ())
    opens = exists & ((piece == 0) | (rows.tile != jnp.roll(rows.tile, 1)))

    # 4. Visits: for each tile of columns, for each piece that has any, the tiles of the contracted letter. The first
    #    piece of a tile is visited in any case, to write the zeros.
    real = jnp.arange(p.num_groups + 1, dtype=jnp.int32) < p.num_groups

    def tiles(letter: str) -> tuple[Array, Array]:
        """The first tile of each group, and how many it has."""
        if letter not in p.ragged:
            return jnp.zeros_like(real, jnp.int32), real.astype(jnp.int32)
        first = begin[letter] // p.tile[letter]
        return first, jnp.where(end[letter] > begin[letter], -(-end[letter] // p.tile[letter]) - first, 0)

    _, columns = tiles(p.column)
    first_step, steps = tiles(p.contracted)
    # By tile of columns, and by piece.
    column = jnp.arange(p.radix[2], dtype=jnp.int32)[:, None]
    exists, opens, piece = exists[None], opens[None], piece[None]
    columns, first_step, steps = (x[group][None] for x in (columns, first_step, steps))
    active = exists & (column < columns) & (steps > 0)
    word = p.pack(opens, active, column, piece, jnp.where(active, first_step, 0))
    count = jnp.where(active, steps, opens.astype(jnp.int32))
    _, visit, total = schedule.expand(word.reshape(-1), count.reshape(-1), p.visits)
    return _Tables(visit, rows.tile, group, begin, end, block, offset), total


def work(launch: Launch, x: Operands) -> Work:
    """What `_tables` lists: see `ragged.backends.base`."""
    p, product, found = launch.details, launch.call.product, spans(launch.call, x)
    aligned = _aligned((product.lhs, product.rhs, product.out))
    first, count = {}, {}  # by letter: each group's first tile, and how many it has
    for letter, (begin, end) in found.items():
        begin, size = (begin if letter in aligned else 0 * begin), end - begin
        first[letter] = begin // p.tile[letter]
        reached = np.where(size > 0, -(-(begin + size) // p.tile[letter]), first[letter])
        count[letter] = reached - first[letter]
    # A tile of the result is opened by the first group in its rows, which is idle if it has none of the columns.
    columns, idle = p.tiles(p.column), 0
    has = np.where(count[p.contracted] > 0, count[p.column], 0)
    reached = 0
    for begin, size, own in zip(first[p.row], count[p.row], has, strict=True):
        if size:
            idle += (max(begin - reached, 0)) * columns + (begin + size - max(begin, reached)) * (columns - own)
            reached = begin + size
    idle += (p.tiles(p.row) - reached) * columns
    visits = int(sum(count["m"] * count["k"] * count["n"]))
    tiles = [
        (group, int(at) * p.tile[p.row], p.tile[p.row])
        for group, (begin, size) in enumerate(zip(first[p.row], count[p.row], strict=True))
        for at in range(begin, begin + size)
    ]
    return Work(visits, int(idle), 2 * visits * math.prod(p.tile.values()), p.row, tuple(tiles))


def _launch(
    launch: Launch,
    tables: _Tables,
    visits: Array,
    inputs: dict[str, Array],
    existing: Array | None,
    out: jax.ShapeDtypeStruct,
) -> Array:
    """Runs the kernel: `[e, packed, other] × [e, packed, other] -> [e, rows, columns]`, where an `e` may be 1.

    `inputs`: by name, the operands and their scales.
    """
    p, interpret = launch.details, launch.target.interpret
    scalars, tree = jax.tree.flatten(tables)
    grid = (
        1 if p.column in p.ragged else p.tiles(p.column),  # first: two cores share only a first dim
        out.shape[0],
        visits,
        1 if p.contracted in p.ragged else p.tiles(p.contracted),
    )

    def block_spec(operand: _Operand, neighbour: tuple[int, int]) -> pl.BlockSpec:
        def index_map(*args: Any) -> tuple[Any, ...]:
            ids, t = args[:4], tree.unflatten(args[4:])
            place = p.place(ids, t)
            index = [ids[1] if operand.batched else 0]
            for axis, side in enumerate(operand.sides):
                at = t.group[place.piece] if side.letter == "group" else place.tile.get(side.letter, 0)
                if side.shifted:
                    # A neighbour outside the buffer holds nothing of the group.
                    at = at + t.block[side.shift][t.group[place.piece]] + neighbour[axis]
                    at = jnp.clip(at, 0, side.blocks - 1)
                index.append(jnp.where(place.active, at, 0))
            return tuple(index)

        return pl.BlockSpec((None, *(side.tile for side in operand.sides)), index_map)

    def out_index(*args: Any) -> tuple[Any, ...]:
        tile = p.place(args[:4], tree.unflatten(args[4:])).tile
        return args[1], tile[p.row], tile[p.column]

    out_spec = pl.BlockSpec((None, p.tile[p.row], p.tile[p.column]), out_index)
    neighbours = {operand: _neighbours(operand) for operand in p.inputs}
    specs = [block_spec(operand, n) for operand, near in neighbours.items() for n in near]
    arrays = [inputs[operand.name] for operand, near in neighbours.items() for _ in near]
    shifted = [operand for operand in p.inputs if operand.sides[0].shifted]

    def kernel(*refs: Any) -> None:
        t, rest = tree.unflatten(refs[: len(scalars)]), iter(refs[len(scalars) :])
        blocks = {operand.name: {n: next(rest) for n in near} for operand, near in neighbours.items()}
        existing_ref = None if existing is None else next(rest)
        out_ref, accumulator, *scratch = rest
        windows = {operand.name: window for operand, window in zip(shifted, scratch, strict=True)}
        place = p.place([pl.program_id(i) for i in range(4)], t)
        _body(p, t, place, blocks, windows, existing_ref, out_ref, accumulator, launch.call)

    tile = "x".join(str(p.tile[letter]) for letter in "mkn")
    first, second = ("".join(side.letter for side in operand.sides) for operand in p.operands)
    dtypes = (*(operand.dtype for operand in p.operands), p.dtype)
    estimate = {"flops": launch.flops, "bytes_accessed": launch.bytes_accessed, "transcendentals": 0}
    given = [*scalars, *arrays, *([] if existing is None else [existing])]
    return pl.pallas_call(
        kernel,
        out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=specs if existing is None else [*specs, out_spec],
            out_specs=out_spec,
            scratch_shapes=[
                pltpu.VMEM((p.tile[p.row], p.tile[p.column]), p.dot.result),
                *(pltpu.VMEM(_by_lanes(operand.window), operand.wide) for operand in shifted),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        ),
        cost_estimate=pl.CostEstimate(**estimate),
        input_output_aliases={} if existing is None else in_place(len(given) - 1, out, out_spec, interpret),
        interpret=interpret,
        name=f"tiled_matmul_{tile}",
        metadata=kernel_metadata((first, second, p.row + p.column), p.tile, dtypes, p.num_groups),
    )(*given)


def _neighbours(operand: _Operand) -> list[tuple[int, int]]:
    """The blocks that hold a tile, by row and column, counted from the first."""
    rows, columns = (range(1 + side.shifted) for side in operand.sides)
    return [(i, j) for i in rows for j in columns]


def _by_lanes(shape: tuple[int, int]) -> tuple[int, int, int]:
    """`[rows, columns]` cut into columns of lanes: `[columns // 128, rows, 128]`."""
    rows, columns = shape
    return columns // LANES, rows, LANES


def _body(
    p: _Geometry,
    t: _Tables,
    place: _Place,
    blocks: dict[str, dict[tuple[int, int], Any]],
    windows: dict[str, Any],
    existing: Any,
    out: Any,
    accumulator: Any,
    call: Call,
) -> None:
    """One step of the grid: a tile of each operand. `blocks` are the refs of each input, by neighbour.

    Long, as every part reads where the step is.
    """
    group = t.group[place.piece]
    begin, end = p.span(p.contracted, group, t)
    low = place.tile[p.contracted] * p.tile[p.contracted]
    high = low + p.tile[p.contracted]
    is_first, is_last = low <= begin, high >= end

    @pl.when(place.opens & is_first)
    def _() -> None:
        out[...] = jnp.zeros_like(out) if existing is None else existing[...]

    @pl.when(place.active & is_first)
    def _() -> None:
        accumulator[...] = jnp.zeros_like(accumulator)

    def load(operand: _Operand) -> Array:
        offsets = [t.offset[side.shift][group] if side.shifted else 0 for side in operand.sides]
        return _cut(operand, blocks[operand.name], windows.get(operand.name), offsets)

    def scales(operand: _Operand, factor: _Factor, turned: bool = False) -> Array:
        """Those of a tile `[packed, other]`, an extent 1 where they don't change; its transpose if `turned`."""
        x, side = load(factor.source), operand.sides[1]
        if factor.extent not in (None, 1):
            first, end = p.span(side.letter, group, t)
            column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
            x = jnp.where(column * factor.extent < end - first, x, 0.0)  # the rest is undefined
            start = place.tile[side.letter] * side.tile - first
            x = tpu_scales.spread(x, factor.extent, start, side.tile, 1)
        kept = slice(None if factor.by_row else 1), slice(None if factor.extent else 1)
        return x.T[kept[::-1]] if turned else x[kept]

    def multiply(masked: bool) -> None:
        given = []
        for operand, factor in zip(p.operands, p.factors, strict=True):
            x = load(operand)
            axis = [side.letter for side in operand.sides].index(p.contracted)
            if factor is not None and factor.in_tile:
                x = x.astype(jnp.float32) * scales(operand, factor)
            if masked:
                at = low + lax.broadcasted_iota(jnp.int32, x.shape, axis)
                x = jnp.where((at >= begin) & (at < end), _widened(x, operand), jnp.zeros((), operand.wide))
            given.append((_narrowed(x, operand), axis))
        (x, x_axis), (y, y_axis) = given
        accumulator[...] += p.dot(x, y, x_axis, y_axis, p.precision)

    # What lies outside the group, or outside the buffer, is undefined.
    if p.contracted in p.ragged or p.extent[p.contracted] % p.tile[p.contracted]:
        whole = (low >= begin) & (high <= end)
        pl.when(place.active & whole)(partial(multiply, masked=False))
        pl.when(place.active & jnp.logical_not(whole))(partial(multiply, masked=True))
    else:
        pl.when(place.active)(partial(multiply, masked=False))

    @pl.when(place.active & is_last)
    def _() -> None:
        wide = jnp.float32 if jnp.issubdtype(out.dtype, jnp.floating) else jnp.int32
        total = accumulator[...]
        for operand, factor, axis in zip(p.operands, p.factors, (0, 1), strict=True):
            if factor is not None and not factor.in_tile:
                # The kept letter is this axis of the sum.
                turned = operand.sides[axis].letter == p.contracted
                total = total.astype(jnp.float32) * scales(operand, factor, turned)
        total = finish(total, None if existing is None else existing[...], call).astype(wide)
        mine = jnp.ones((1, 1), bool)
        for axis, letter in enumerate((p.row, p.column)):
            if letter in p.ragged:
                at = place.tile[letter] * p.tile[letter] + lax.broadcasted_iota(jnp.int32, total.shape, axis)
                begin, end = p.span(letter, group, t)
                mine = mine & (at >= begin) & (at < end)
        out[...] = jnp.where(mine, total, out[...].astype(wide)).astype(out.dtype)


def _cut(operand: _Operand, blocks: dict[tuple[int, int], Any], window: Any, offsets: list[Any]) -> Array:
    """The tile that begins at `offsets` in the blocks."""
    (rows, columns), (_, width) = (side.tile for side in operand.sides), operand.window
    if window is None:
        parts = [blocks[0, j][...] for j in range(width // columns)]
    else:
        # Rows are read from any row on, but only 128 lanes at a time: each column of lanes has a window of its own.
        for (i, j), block in blocks.items():
            for lane in range(0, columns, LANES):
                part = _widened(block[:, lane : lane + LANES], operand)
                window[(j * columns + lane) // LANES, pl.ds(i * rows, rows), :] = part
        parts = [window[column, pl.ds(offsets[0], rows), :] for column in range(width // LANES)]
    x = jnp.concatenate(parts, axis=1)
    if width > columns:
        # To the left by the offset: a rotation goes to the right.
        x = pltpu.roll(_widened(x, operand), jnp.where(offsets[1] == 0, 0, width - offsets[1]), 1)[:, :columns]
    return x


def _widened(x: Array, operand: _Operand) -> Array:
    """As the vector unit shifts and masks it: the bits of 8-bit floats, if they are to be multiplied as they are."""
    if operand.wide == jnp.int32 and jnp.issubdtype(x.dtype, jnp.floating):
        x = lax.bitcast_convert_type(x, jnp.int8)
    return x.astype(operand.wide)


def _narrowed(x: Array, operand: _Operand) -> Array:
    """What was widened to its bits, as it was."""
    if x.dtype == jnp.int32:
        return lax.bitcast_convert_type(x.astype(jnp.int8), operand.dtype)
    return x
