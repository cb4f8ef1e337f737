"""Grouped products with two or three ragged letters, as one Pallas kernel for TPUs.

Both operands and the result are buffers `[packed, other]`. Each visit multiplies a tile of one operand with a tile of
the other. The tiles are:

- along the rows' letter, which the result packs: tiles of the buffer that begin at multiples of the tile size (aligned
  tiles), and may have rows of several groups;
- along the columns' letter, if ragged: tiles counted from the group's column 0;
- along the contracted letter, if ragged: aligned tiles of the buffers if both operands pack it, else tiles counted from
  the group's element 0.

In two cases, a tile can begin anywhere in an operand's buffer: if the operand packs a letter whose tiles are counted
from the group, or doesn't pack a letter whose tiles are aligned. A DMA can't begin anywhere. So two neighbouring blocks
are fetched, and the tile is cut out of them in VMEM, like the tile's scales.

For example, if the columns are ragged, and two groups share row tile 1:

    rows     columns
    tile 0   000. .... ....
    tile 1   000. .... ....
    tile 1   1111 111. ....
    tile 2   1111 111. ....

    column tile   visits of row tile 1
    0             group 0 (one for each contracted tile), then group 1
    1             one that writes zeros, then group 1
    2             one that writes zeros
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

from ragged.backends import base, schedule
from ragged.backends.base import Launch, Refusal, Target, Work, choice, cost, kernel_metadata, scale_modes, spans
from ragged.backends.tpu import scales as tpu_scales
from ragged.backends.tpu import units
from ragged.backends.tpu.pipeline import Pipeline, buffered_pallas_call, in_place
from ragged.backends.tpu.tiles import LANES, SMEM, Chip, chip, round_up
from ragged.core.formats import compute_dtype
from ragged.core.offsets import expand, group_offsets
from ragged.core.scales import Scales
from ragged.product.config import TpuConfig
from ragged.product.operands import Call, Operands

_LARGEST_TILE, _LARGEST_UNIFORM_TILE = 512, 2048
_VMEM = 12 << 20
"""Bytes of VMEM that a kernel may use: less than 16 MiB, which every generation's compiler allows."""
_LOADED = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that the kernel loads. Other operands are cast before."""
_SUBLANES = 8
"""Rows of the smallest block of float32: each group's scales are repeated this many times."""


class _Side(NamedTuple):
    """One axis of an operand or of its scales."""

    letter: str  # "group" for the rows of scales by group; "" for scales with all columns in one tile
    tile: int
    blocks: int  # number of tiles in the buffer
    shift: str = ""  # if a tile is cut out of two blocks, key of `block` and `offset` in the tables; else ""

    @property
    def shifted(self) -> bool:
        return bool(self.shift)


class _Operand(NamedTuple):
    """An array that the kernel fetches: an operand or its scales."""

    name: str
    dtype: Any
    vector_dtype: Any  # the 32-bit dtype in which the vector unit shifts and masks it
    batched: bool
    sides: tuple[_Side, _Side]

    @property
    def window(self) -> tuple[int, int]:
        """`(rows, columns)` of all blocks that a tile is cut out of."""
        rows, columns = (side.tile * (1 + side.shifted) for side in self.sides)
        return rows, columns


class _OperandScales(NamedTuple):
    """An operand's scales: `[packed, blocks of columns]`, or by group `[8 * groups, columns]`, each row eight times."""

    source: _Operand
    by_row: bool
    extent: int | None  # of a block of columns; None for all columns
    in_tile: bool  # whether they multiply the tile (they change along the contracted letter) or the sum


class _Tables(NamedTuple):
    """Tables for the scalar unit, all int32.

    A piece is the rows of one group in one tile of rows. A tile without a group is a piece of an empty group, `g`.
    """

    visit: Any  # (v,) a word for `_Geometry.place`
    tile: Any  # (p,) tile of rows of each piece
    group: Any  # (p,) group of each piece
    begin: dict[str, Any]  # keyed by ragged letter, (g+1,): each group's first element, or 0 if tiles aren't aligned
    end: dict[str, Any]  # keyed by ragged letter, (g+1,): where groups end
    block: dict[str, Any]  # keyed by `_Side.shift`, (g+1,): the first of two blocks with the group's tile 0
    offset: dict[str, Any]  # keyed by `_Side.shift`, (g+1,): where tile 0 begins in this block


class _Place(NamedTuple):
    """Position of a step of the grid."""

    opens: Any  # whether it is for the first piece of a tile of the result
    active: Any  # whether it multiplies; else it only writes zeros
    piece: Any
    tile: dict[str, Any]  # keyed by letter


class _Geometry(NamedTuple):
    """A product's letters, extents and tiles, and the arrays that the kernel fetches."""

    row: str
    column: str
    contracted: str
    extent: dict[str, int]  # keyed by letter: of the buffer or group in which its tiles are counted
    capacity: dict[str, int]  # keyed by packed letter: the smallest extent of the buffers that pack it
    tile: dict[str, int]  # keyed by letter
    ragged: frozenset[str]
    num_groups: int
    operands: tuple[_Operand, _Operand]  # the one with the result's rows first
    scales: tuple[_OperandScales | None, _OperandScales | None]  # of the operands
    dtype: Any  # of the result
    has_existing: bool
    dot: units.Dot
    precision: Any

    @property
    def inputs(self) -> list[_Operand]:
        return [*self.operands, *(scales.source for scales in self.scales if scales)]

    def tiles(self, letter: str) -> int:
        return -(-self.extent[letter] // self.tile[letter])

    @property
    def radix(self) -> tuple[int, int, int]:
        """Numbers of contracted tiles, pieces and column tiles in visits; 1 for a letter that is a dim of the grid."""
        steps, columns = (self.tiles(x) if x in self.ragged else 1 for x in (self.contracted, self.column))
        return steps, self.tiles(self.row) + self.num_groups - 1, columns

    @property
    def visits(self) -> int:
        """Upper bound on the number of visits.

        Let a group have `1 + e` tiles of a letter. If the letter is packed, the `e` of all groups add up to at most
        `E = capacity // tile`. With two packed letters, the products `(1 + e) * (1 + e')` then add up to at most
        `(1 + E) * (1 + E') + g - 1`. Each tile of the result may have one more visit, which writes zeros.
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
        """Bytes of the tables; `2 * SMEM` if a visit doesn't fit into a 32-bit word."""
        if 2 + sum(count.bit_length() for count in self.radix) > 31:
            return 2 * SMEM
        by_group = len(self.ragged) + sum(side.shifted for operand in self.operands for side in operand.sides)
        return 4 * (self.visits + 2 * self.radix[1] + 2 * by_group * (self.num_groups + 1))

    @property
    def vmem(self) -> int:
        """Approximate bytes of VMEM: two buffers of each block, scratch memory, rotated copies, repeated scales."""
        result = 2 * (1 + self.has_existing) * self.dtype.itemsize
        total = self.tile[self.row] * self.tile[self.column] * (result + 4)
        for operand in self.inputs:
            (rows, columns), tile_rows = operand.window, operand.sides[0].tile
            total += rows * columns * (2 * operand.dtype.itemsize + 4 * operand.sides[0].shifted)
            total += tile_rows * columns * 4 * operand.sides[1].shifted
        for operand, scales in zip(self.operands, self.scales, strict=True):
            if scales and scales.in_tile:
                total += 8 * operand.sides[0].tile * operand.sides[1].tile
            if scales and scales.extent not in (None, 1):  # matrices of zeros and ones, in `tpu_scales.spread`
                total += 16 * scales.source.window[1] * operand.sides[1].tile
        return total

    def pack(self, opens: Array, active: Array, column: Array, piece: Array, step: Array) -> Array:
        """The word of a visit. The step has the lowest bits, because `expand` counts up from the first step's word."""
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
        """`(begin, end)` of a group along a letter, in the coordinates of the tiles."""
        if letter not in self.ragged:
            return 0, self.extent[letter]
        return tables.begin[letter][group], tables.end[letter][group]


def plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    """Chooses the configuration. Its tiles fit every TPU generation."""
    problem = _tiling_problem(call, x, chip(target.device))
    chosen = choice(
        call,
        x,
        target,
        "pallas_tpu",
        illegal=problem.illegal,
        tiled=lambda tile: problem.config(problem.fitted(tile)),
        model=lambda: problem.config(problem.chosen()),
    )
    if isinstance(chosen, Refusal):
        return chosen
    config, source = chosen
    column, contracted = call.product.out[1], call.product.contracted
    geometry = problem.build(dict(zip("mkn", config.along("mkn"), strict=True)))
    if geometry.smem > SMEM:
        return Refusal(f"up to {geometry.visits} visits: more than a TPU's scalar memory can list")
    return Launch(
        "pallas_tpu",
        "tiled_matmul",
        call,
        target,
        config=config,
        source=source,
        visits=geometry.visits * math.prod(geometry.tiles(x) for x in {column, contracted} - geometry.ragged),
        details=geometry,
        **cost(call, x),
    )


def candidates(launch: Launch) -> Iterator[TpuConfig]:
    """Configurations with the current tile size, half and twice of it, along each letter."""
    current: TpuConfig = launch.config
    for ratios in itertools.product((1.0, 0.5, 2.0), repeat=3):
        sides = zip("mkn", current.along("mkn"), ratios, strict=True)
        yield TpuConfig(**{letter: _round_up(int(tile * ratio)) for letter, tile, ratio in sides})


def run(launch: Launch, x: Operands) -> Array:
    """Computes a product with two or three ragged letters. Batch elements share sizes.

    Blocks of scales are `(1, c)` or `(None, c)`. A group's columns begin at 0, so no block has elements of two groups.
    """
    call, geometry, existing, batch = launch.call, launch.details, x.epilogue.existing, launch.call.batch(x)
    p, shapes = call.product, (x.lhs.data.shape, x.rhs.data.shape, call.shape)
    operands, scales = _inputs(x)
    out = jax.ShapeDtypeStruct((batch or 1, *call.shape), geometry.dtype, manual_axis_type=ManualAxisType())
    with jax.named_scope("ragged_tiled_matmul"):
        tables, visits = _tables(geometry, x.sizes, (p.lhs, p.rhs, p.out), shapes)
        inputs = operands | {f"{name} scales": each.values for name, each in scales.items()}
        existing = None if existing is None else existing.reshape(out.shape)
        product = _launch(launch, tables, visits, inputs, existing, out)
    return product if batch is not None else product[0]


def _inputs(x: Operands) -> tuple[dict[str, Array], dict[str, Scales]]:
    """`(operands, scales)` as the kernel fetches them, keyed by name. Operands are `[batch or 1, packed, other]`."""
    common = compute_dtype(x.lhs.data.dtype, x.rhs.data.dtype)
    operands, scales = {}, {}
    for name, operand in (("lhs", x.lhs), ("rhs", x.rhs)):
        data = operand.data if operand.data.dtype.name in _LOADED else operand.data.astype(common)
        operands[name] = data if data.ndim == 3 else data[None]
        if operand.scales is not None:
            scales[name] = _arranged(operand.scales, data.shape[-1])
    return operands, scales


def _arranged(scales: Scales, columns: int) -> Scales:
    """Float32 scales as fetched: `[batch or 1, packed, blocks]`; by group, `[…, 8 * g, columns or 1]`."""
    values, (row, column) = scales.values.astype(jnp.float32), scales.block
    values = values if values.ndim == 3 else values[None]
    if row is None:
        values = jnp.repeat(values, _SUBLANES, axis=1)
        if column is not None:
            values, column = jnp.repeat(values, column, axis=2)[:, :, :columns], 1
    return Scales(values, (row, column))


def _tiling_problem(call: Call, x: Operands, on: Chip) -> "_TilingProblem":
    """The tiling problem of a product."""
    operands, scales = jax.eval_shape(_inputs, x)
    product, shape, sizes, precision = call.product, call.shape, x.sizes, call.options.precision
    axes, (row, column), contracted = (product.lhs, product.rhs, product.out), product.out, product.contracted
    in_tile = [
        operand.letters
        for operand, mode in zip(call.kernel_operands(x), scale_modes(call, x, None), strict=True)
        if mode == "tile"
    ]
    pair = [(name, letters, operands[name]) for name, letters in (("lhs", product.lhs), ("rhs", product.rhs))]
    pair.sort(key=lambda operand: row not in operand[1])
    aligned = _aligned(axes)
    extent = {row: shape[0], column: shape[1]}
    extent[contracted] = min(x.shape[1 + letters.index(contracted)] for _, letters, x in pair)
    capacity = {}
    for letters, rows in zip(axes, (operands["lhs"].shape[1], operands["rhs"].shape[1], shape[0]), strict=True):
        capacity[letters[0]] = min(rows, capacity.get(letters[0], rows))
    first, second = (jnp.dtype(jnp.float32) if in_tile else x.dtype for _, _, x in pair)
    dot = units.dot(first, second, on._replace(mixed=()))  # tiles are shifted in float32, or all as integers
    if in_tile and all(x.dtype.itemsize == 1 for x in operands.values()):
        precision = lax.Precision.HIGHEST  # scaled tiles need all bits of float32
    # 8-bit operands of the dot are shifted as integers, which keeps their bits.
    vector_dtype = jnp.int32 if dot.lhs.itemsize == 1 else jnp.float32

    def build(tile: dict[str, int]) -> _Geometry:
        def side(name: str, letters: str, x: Array, axis: int) -> _Side:
            letter = letters[axis]
            shifted = letter in sizes and (axis == 0) != (letter in aligned)
            shift = f"{name} {letter}" if shifted else ""
            return _Side(letter, tile[letter], -(-x.shape[1 + axis] // tile[letter]), shift)

        def operand_scales(operand: _Operand, letters: str) -> _OperandScales | None:
            if operand.name not in scales:
                return None
            values, (row, extent) = scales[operand.name].values, scales[operand.name].block
            rows = _Side("group", _SUBLANES, x.num_groups) if row is None else operand.sides[0]
            columns = operand.sides[1] if extent == 1 else _Side("", _round_up(values.shape[2]), 1)
            source = _Operand(f"{operand.name} scales", values.dtype, jnp.float32, values.shape[0] > 1, (rows, columns))
            return _OperandScales(source, row is not None, extent, letters in in_tile)

        def fetched(name: str, letters: str, x: Array) -> _Operand:
            sides = (side(name, letters, x, 0), side(name, letters, x, 1))
            return _Operand(name, x.dtype, vector_dtype, x.shape[0] > 1, sides)

        first, second = (fetched(*operand) for operand in pair)
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
            scales=(operand_scales(first, pair[0][1]), operand_scales(second, pair[1][1])),
            dtype=jnp.dtype(call.dtype),
            has_existing=x.epilogue.existing is not None,
            dot=dot,
            precision=precision,
        )

    return _TilingProblem(build, extent, capacity, frozenset(sizes), x.num_groups, len(aligned))


class _TilingProblem(NamedTuple):
    """A product to choose tiles for."""

    build: Callable[[dict[str, int]], _Geometry]  # from tiles, keyed by letter
    extent: dict[str, int]
    capacity: dict[str, int]
    ragged: frozenset[str]
    num_groups: int
    aligned: int  # number of letters in `_aligned`

    @property
    def whole(self) -> dict[str, int]:
        """The largest tile of each letter."""
        return {letter: _round_up(size) for letter, size in self.extent.items()}

    def config(self, geometry: _Geometry) -> TpuConfig:
        return TpuConfig(**geometry.tile)

    def illegal(self, config: TpuConfig) -> Refusal | None:
        """`Refusal` if the kernel can't have this configuration, else None."""
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
            return Refusal(problem, "Its kernel has 2 buffers of each operand.")
        if (vmem := self.build(tile).vmem) > _VMEM:
            return Refusal(f"{config} takes {vmem} bytes of VMEM, of {_VMEM}.", "Take smaller tiles.")
        return None

    def fitted(self, tile: dict[str, int]) -> _Geometry:
        """The geometry with this tile, made legal, then halved along its longest side until it fits."""
        tile = {letter: min(_round_up(tile[letter]), self.whole[letter]) for letter in "mkn"}
        while (geometry := self.build(tile)).vmem > _VMEM:
            longest = max("mkn", key=lambda letter: tile[letter])
            tile = tile | {longest: _round_up(tile[longest] // 2)}
        return geometry

    def chosen(self) -> _Geometry:
        """The geometry with the default tile: along a packed letter, the mean group, rounded up to a power of two.

        If tiles of two letters are aligned, half of it, because a group then shares tiles along both letters.
        """
        mean = self.extent | {
            x: min(self.extent[x], rows // self.num_groups // self.aligned) for x, rows in self.capacity.items()
        }
        largest = {x: min(_LARGEST_TILE if x in self.ragged else _LARGEST_UNIFORM_TILE, self.whole[x]) for x in "mkn"}
        tile = {x: min(largest[x], LANES << (_round_up(mean[x]) // LANES - 1).bit_length()) for x in "mkn"}
        geometry = self.fitted(tile)
        # Larger tiles, as long as they fit into VMEM, make the table of visits smaller.
        while geometry.smem > SMEM:
            tile = geometry.tile
            larger = [
                tile | {x: min(2 * tile[x], largest[x])}
                for x in sorted(filter(self.ragged.__contains__, "mkn"), key=lambda x: tile[x])
            ]
            fitting = [p for t in larger if t != tile and (p := self.build(t)).vmem <= _VMEM]
            if not fitting:
                break
            geometry = fitting[0]
        return geometry


def _round_up(extent: int) -> int:
    return round_up(max(extent, 1), LANES)


def _aligned(axes: tuple[str, str, str]) -> set[str]:
    """Letters with tiles aligned in the buffers that pack them: the rows' letter, and one that both operands pack."""
    lhs, rhs, out = axes
    return {out[0], *(lhs[0] if lhs[0] == rhs[0] else "")}


def _tables(
    p: _Geometry, sizes: dict[str, Array], axes: tuple[str, str, str], shapes: tuple[tuple[int, ...], ...]
) -> tuple[_Tables, Array]:
    """`(tables, number of visits)`."""
    # 1. Each group's start in each buffer, and its size, clipped to all buffers. If two buffers pack a letter, the
    #    group's starts in them are equal, unless it is clipped to nothing.
    length = {letter: jnp.maximum(size, 0).astype(jnp.int32) for letter, size in sizes.items()}
    starts = {}
    for name, (packed, other), shape in zip(("lhs", "rhs", "out"), axes, shapes, strict=True):
        offsets = group_offsets(sizes[packed], shape[-2])
        starts[name] = offsets[:-1]
        length[packed] = jnp.minimum(length[packed], offsets[1:] - offsets[:-1])
        if other in sizes:
            length[other] = jnp.minimum(length[other], shape[-1])

    # 2. `begin` and `end` of `_Tables`, with an empty group appended.
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
                # The group's element 0 is at `begin` for tiles; in the operand, at the group's start, or at 0.
                shift = with_gap((starts[operand.name] if axis == 0 else 0) - begin[side.letter])
                block[side.shift], offset[side.shift] = shift // side.tile, shift % side.tile
    begin = {letter: with_gap(x) for letter, x in begin.items()}

    # 3. Pieces, ordered by tile. In `row_visits`, a group's piece is 2 * group + 1; even numbers are gaps.
    rows = schedule.row_visits(begin[p.row][None, :-1], end[p.row][None, :-1], p.extent[p.row], p.tile[p.row])
    piece = jnp.arange(rows.piece.shape[0], dtype=jnp.int32)
    group = jnp.where(rows.piece % 2 == 1, rows.piece // 2, p.num_groups)
    exists = piece < jnp.reshape(rows.count, ())
    opens = exists & ((piece == 0) | (rows.tile != jnp.roll(rows.tile, 1)))

    # 4. Visits: for each tile of columns and each piece with such columns, the tiles of the contracted letter. A tile's
    #    first piece is always visited, to write zeros.
    is_group = jnp.arange(p.num_groups + 1, dtype=jnp.int32) < p.num_groups

    def tiles(letter: str) -> tuple[Array, Array]:
        """`(first, count)`: the first tile of each group, and its number of tiles."""
        if letter not in p.ragged:
            return jnp.zeros_like(is_group, jnp.int32), is_group.astype(jnp.int32)
        first = begin[letter] // p.tile[letter]
        return first, jnp.where(end[letter] > begin[letter], -(-end[letter] // p.tile[letter]) - first, 0)

    _, columns = tiles(p.column)
    first_step, steps = tiles(p.contracted)
    # The arrays below are [column tiles, pieces].
    column = jnp.arange(p.radix[2], dtype=jnp.int32)[:, None]
    exists, opens, piece = exists[None], opens[None], piece[None]
    columns, first_step, steps = (x[group][None] for x in (columns, first_step, steps))
    active = exists & (column < columns) & (steps > 0)
    word = p.pack(opens, active, column, piece, jnp.where(active, first_step, 0))
    count = jnp.where(active, steps, opens.astype(jnp.int32))
    _, visit, total = expand(word.reshape(-1), count.reshape(-1), p.visits)
    return _Tables(visit, rows.tile, group, begin, end, block, offset), total


def work(launch: Launch, x: Operands) -> Work:
    """Counts the visits of `_tables`."""
    p, product = launch.details, launch.call.product
    aligned = _aligned((product.lhs, product.rhs, product.out))
    first, count = {}, {}  # keyed by letter: each group's first tile, and its number of tiles
    for letter, (begin, end) in spans(launch.call, x).items():
        begin, size = (begin if letter in aligned else 0 * begin), end - begin
        first[letter] = begin // p.tile[letter]
        reached = np.where(size > 0, -(-(begin + size) // p.tile[letter]), first[letter])
        count[letter] = reached - first[letter]
    # The first group in a tile's rows opens it, with an idle visit if the group has none of the tile's columns.
    columns, idle = p.tiles(p.column), 0
    group_columns = np.where(count[p.contracted] > 0, count[p.column], 0)
    reached = 0
    for begin, size, active in zip(first[p.row], count[p.row], group_columns, strict=True):
        if size:
            idle += (max(begin - reached, 0)) * columns + (begin + size - max(begin, reached)) * (columns - active)
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
    """Runs the kernel: `[e, packed, other] × [e, packed, other] -> [e, rows, columns]`; an operand's `e` may be 1."""
    p, interpret = launch.details, launch.target.interpret

    def block_spec(operand: _Operand, neighbour: tuple[int, int]) -> pl.BlockSpec:
        def index_map(*args: Any) -> tuple[Any, ...]:
            *ids, t = args
            place = p.place(ids, t)
            index = [ids[1] if operand.batched else 0]
            for axis, side in enumerate(operand.sides):
                at = t.group[place.piece] if side.letter == "group" else place.tile.get(side.letter, 0)
                if side.shifted:
                    # Outside of the buffer, the group has no elements, so any block will do.
                    at = at + t.block[side.shift][t.group[place.piece]] + neighbour[axis]
                    at = jnp.clip(at, 0, side.blocks - 1)
                index.append(jnp.where(place.active, at, 0))
            return tuple(index)

        return pl.BlockSpec((None, *(side.tile for side in operand.sides)), index_map)

    def out_index(*args: Any) -> tuple[Any, ...]:
        *ids, t = args
        tile = p.place(ids, t).tile
        return ids[1], tile[p.row], tile[p.column]

    out_spec = pl.BlockSpec((None, p.tile[p.row], p.tile[p.column]), out_index)
    arrays = [dict.fromkeys(_neighbours(operand), inputs[operand.name]) for operand in p.inputs]
    specs = [{near: block_spec(operand, near) for near in _neighbours(operand)} for operand in p.inputs]
    shifted = [operand for operand in p.inputs if operand.sides[0].shifted]

    def body(ids: Any, t: _Tables, refs: Any, existing: Any, out: Any, accumulator: Any, *scratch: Any) -> None:
        blocks = {operand.name: each for operand, each in zip(p.inputs, refs, strict=True)}
        windows = {operand.name: window for operand, window in zip(shifted, scratch, strict=True)}
        _body(launch, t, p.place(ids, t), blocks, windows, existing, out, accumulator)

    pipeline = Pipeline(
        grid=(
            1 if p.column in p.ragged else p.tiles(p.column),  # first: the dim that two cores can share
            out.shape[0],
            visits,
            1 if p.contracted in p.ragged else p.tiles(p.contracted),
        ),
        in_specs=[specs, None if existing is None else out_spec],
        out_specs=out_spec,
        scratch_shapes=[
            pltpu.VMEM((p.tile[p.row], p.tile[p.column]), p.dot.result),
            *(pltpu.VMEM(_by_lanes(operand.window), operand.vector_dtype) for operand in shifted),
        ],
        dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
    )
    first, second = ("".join(side.letter for side in operand.sides) for operand in p.operands)
    dtypes = (*(operand.dtype for operand in p.operands), p.dtype)
    estimate = {"flops": launch.flops, "bytes_accessed": launch.bytes_accessed, "transcendentals": 0}
    existing_index = len(jax.tree.leaves((tables, arrays)))  # of all inputs
    return buffered_pallas_call(
        body,
        out,
        pipeline,
        input_output_aliases={} if existing is None else in_place(existing_index, out, out_spec, interpret),
        interpret=interpret,
        name=f"tiled_matmul_{'x'.join(str(p.tile[letter]) for letter in 'mkn')}",
        cost_estimate=pl.CostEstimate(**estimate),
        metadata=kernel_metadata((first, second, p.row + p.column), p.tile, dtypes, p.num_groups),
    )(tables, arrays, existing)


def _neighbours(operand: _Operand) -> list[tuple[int, int]]:
    """`(row, column)` of the blocks that a tile is cut out of, relative to the first."""
    rows, columns = (range(1 + side.shifted) for side in operand.sides)
    return [(i, j) for i in rows for j in columns]


def _by_lanes(shape: tuple[int, int]) -> tuple[int, int, int]:
    """The shape `[columns // 128, rows, 128]` for `[rows, columns]`."""
    rows, columns = shape
    return columns // LANES, rows, LANES


def _body(
    launch: Launch,
    t: _Tables,
    place: _Place,
    blocks: dict[str, dict[tuple[int, int], Any]],
    windows: dict[str, Any],
    existing: Any,
    out: Any,
    accumulator: Any,
) -> None:
    """The kernel, for one step of the grid. `blocks`: refs of each input, keyed by `_neighbours`.

    1. The first visit of a tile of the result writes `existing`, or zeros, to it.
    2. The first step of a piece sets the accumulator to zeros.
    3. A step cuts both operands' tiles out of their blocks, applies scales that change along the contracted letter,
       masks elements outside of the group along it, and adds the product to the accumulator.
    4. The last step of a piece applies the other scales and the epilogue, and stores the group's elements.
    """
    p: _Geometry = launch.details
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

    def load_scales(operand: _Operand, scales: _OperandScales, transposed: bool = False) -> Array:
        """Scales of a tile, or of its transpose. An axis has extent 1 if they are constant along it."""
        x, side = load(scales.source), operand.sides[1]
        if scales.extent not in (None, 1):
            first, end = p.span(side.letter, group, t)
            column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
            # Undefined past the group's end. One near float32's largest number would be infinite in bfloat16, and so
            # reach all elements in `spread`, whose product a TPU makes of bfloat16 parts.
            x = jnp.where(column * scales.extent < end - first, x, 0.0)
            start = place.tile[side.letter] * side.tile - first
            x = tpu_scales.spread(x, scales.extent, start, side.tile, 1)
        index = slice(None if scales.by_row else 1), slice(None if scales.extent else 1)
        return x.T[index[::-1]] if transposed else x[index]

    def multiply(masked: bool) -> None:
        tiles = []
        for operand, scales in zip(p.operands, p.scales, strict=True):
            x = load(operand)
            axis = [side.letter for side in operand.sides].index(p.contracted)
            if scales is not None and scales.in_tile:
                x = x.astype(jnp.float32) * load_scales(operand, scales)
            if masked:
                at = low + lax.broadcasted_iota(jnp.int32, x.shape, axis)
                x = jnp.where((at >= begin) & (at < end), _widened(x, operand), jnp.zeros((), operand.vector_dtype))
            tiles.append((_narrowed(x, operand), axis))
        (x, x_axis), (y, y_axis) = tiles
        accumulator[...] += p.dot(x, y, x_axis, y_axis, p.precision)

    # Mask tiles with undefined elements, outside of the group or the buffer.
    if p.contracted in p.ragged or p.extent[p.contracted] % p.tile[p.contracted]:
        whole = (low >= begin) & (high <= end)
        pl.when(place.active & whole)(partial(multiply, masked=False))
        pl.when(place.active & jnp.logical_not(whole))(partial(multiply, masked=True))
    else:
        pl.when(place.active)(partial(multiply, masked=False))

    @pl.when(place.active & is_last)
    def _() -> None:
        store_dtype = jnp.float32 if jnp.issubdtype(out.dtype, jnp.floating) else jnp.int32
        total = accumulator[...]
        for operand, scales, axis in zip(p.operands, p.scales, (0, 1), strict=True):
            if scales is not None and not scales.in_tile:
                # `axis` of the sum is the operand's axis that isn't contracted.
                transposed = operand.sides[axis].letter == p.contracted
                total = total.astype(jnp.float32) * load_scales(operand, scales, transposed)
        total = base.apply_epilogue(launch.call, total, None if existing is None else existing[...])
        total = total.astype(store_dtype)
        in_group = jnp.ones((1, 1), bool)
        for axis, letter in enumerate((p.row, p.column)):
            if letter in p.ragged:
                at = place.tile[letter] * p.tile[letter] + lax.broadcasted_iota(jnp.int32, total.shape, axis)
                begin, end = p.span(letter, group, t)
                in_group = in_group & (at >= begin) & (at < end)
        out[...] = jnp.where(in_group, total, out[...].astype(store_dtype)).astype(out.dtype)


def _cut(operand: _Operand, blocks: dict[tuple[int, int], Any], window: Any, offsets: list[Any]) -> Array:
    """The tile that begins at `offsets` in its blocks."""
    (rows, columns), (_, width) = (side.tile for side in operand.sides), operand.window
    if window is None:
        parts = [blocks[0, j][...] for j in range(width // columns)]
    else:
        # Only loads of 128 lanes may begin at any row, so each 128 lanes have a separate window.
        for (i, j), block in blocks.items():
            for lane in range(0, columns, LANES):
                part = _widened(block[:, lane : lane + LANES], operand)
                window[(j * columns + lane) // LANES, pl.ds(i * rows, rows), :] = part
        parts = [window[column, pl.ds(offsets[0], rows), :] for column in range(width // LANES)]
    x = jnp.concatenate(parts, axis=1)
    if width > columns:
        # A shift to the left, as a rotation to the right.
        x = pltpu.roll(_widened(x, operand), jnp.where(offsets[1] == 0, 0, width - offsets[1]), 1)[:, :columns]
    return x


def _widened(x: Array, operand: _Operand) -> Array:
    """`x` in `vector_dtype`. If this is int32, 8-bit floats keep their bits."""
    if operand.vector_dtype == jnp.int32 and jnp.issubdtype(x.dtype, jnp.floating):
        x = lax.bitcast_convert_type(x, jnp.int8)
    return x.astype(operand.vector_dtype)


def _narrowed(x: Array, operand: _Operand) -> Array:
    """Inverse of `_widened` if `x` is int32; otherwise `x`."""
    if x.dtype == jnp.int32:
        return lax.bitcast_convert_type(x.astype(jnp.int8), operand.dtype)
    return x
