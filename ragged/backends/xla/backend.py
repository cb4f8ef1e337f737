"""Grouped products in plain XLA, on any platform, fast on the CPU."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import InconclusiveDimensionOperation

from ragged.backends.base import (
    Launch,
    Refusal,
    Target,
    Work,
    apply_epilogue,
    changes_sums,
    choice,
    cost,
    dot,
    is_empty,
    spans,
)
from ragged.backends.xla.narrow import matrices as narrow_matrices
from ragged.backends.xla.narrow import multiply as narrow_product
from ragged.core.formats import AnyArray, accumulator_dtype, compute_dtype
from ragged.core.offsets import IN_BOUNDS, group_offsets, segments
from ragged.core.scales import dequantized
from ragged.product.config import XlaConfig
from ragged.product.operands import Call, Operand, Operands


def plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    """Chooses kernel and configuration."""
    if is_empty(call, x):
        return Launch("xla", "zeros", call, target, config=XlaConfig(), source="model", **cost(call, x))
    chosen = choice(
        call,
        x,
        target,
        "xla",
        partial(_illegal, call, x),
        lambda tiling: XlaConfig(**_tile_sizes(call, x, tiling)),
        partial(_model, call, x),
    )
    if isinstance(chosen, Refusal):
        return chosen
    config, source = chosen
    return Launch("xla", call.product.kernel, call, target, config=config, source=source, **cost(call, x))


def candidates(launch: Launch, x: Operands) -> Iterator[XlaConfig]:
    """Other tile sizes to measure, and other numbers of batched rows."""
    current: XlaConfig = launch.config
    if launch.call.product.kernel == "tiled_matmul":
        for ratio in (0.5, 2.0, 0.25, 4.0):
            scaled = {z: tuple(max(8, int(tile * ratio)) for tile in current.along(z)[0]) for z in "mkn"}
            yield XlaConfig(m=scaled["m"], k=scaled["k"], n=scaled["n"])
        return
    yield from (replace(current, batched_rows=rows) for rows in dict.fromkeys((0, _batched_rows(launch.call, x), 16)))
    for letter, extent in _ragged_extents(launch.call, x).items():
        for tile_sizes in (*_TILE_SIZES, (8, 16, 32, 64), (32, 128, 512), (64, 256)):
            if fitting := tuple(tile for tile in tile_sizes if tile < extent):
                tiles: Any = {letter: fitting}
                yield XlaConfig(**tiles)


def run(launch: Launch, x: Operands) -> Array:
    """Computes the product."""
    kernel = {
        "zeros": _zeros,
        "batched_matmul": _batched,
        "grouped_matmul": _grouped,
        "transposed_grouped_matmul": _transposed_grouped,
        "tiled_matmul": _tiled,
    }[launch.kernel]
    if _is_one_dot(launch.call, launch.config):
        kernel = _one_dot
    # XLA must neither fold the loops' bitcasts of floats nor leave out roundings: see `formats.bits` and `as_rounded`.
    x = jax.tree.map(lambda z: z if _bits(z.dtype) is None else lax.optimization_barrier(z), x)
    return kernel(*_without_scales(launch, x))


def _without_scales(launch: Launch, x: Operands) -> tuple[Launch, Operands]:
    """`(launch, x)` with dequantised operands, except for matrices that the loop dequantises one by one."""
    call = launch.call
    if x.lhs.scales is None and x.rhs.scales is None:
        return launch, x
    dtype, is_single = call.accumulator(x), call.batch(x) in (None, 1)
    is_loop = launch.kernel == "grouped_matmul" and not _is_one_dot(call, launch.config)

    def times_scales(operand: Operand, letters: str) -> Operand:
        data, scales, _ = operand
        # The loop would dequantise a shared matrix once for each batch element.
        is_used_once = is_single or data.ndim == 4
        in_loop = is_loop and call.product.is_uniform(letters) and is_used_once
        # In the loop, each matrix has its own scales, or all share them.
        if scales is None or (in_loop and math.prod(scales.values.shape[:-2]) in (1, math.prod(data.shape[:-2]))):
            return operand
        return Operand(dequantized(data, scales.whole, x.sizes.get(letters[0]), dtype))

    lhs, rhs = times_scales(x.lhs, call.product.lhs), times_scales(x.rhs, call.product.rhs)
    # Dequantised operands need all bits of float32.
    options = call.options._replace(precision=call.options.precision or lax.Precision.HIGHEST)
    return replace(launch, call=call._replace(options=options)), x._replace(lhs=lhs, rhs=rhs)


def _illegal(call: Call, x: Operands, config: XlaConfig) -> Refusal | None:
    """`Refusal` if the product can't have this configuration, else None."""
    p, extents = call.product, _ragged_extents(call, x)
    is_one_dot = _is_one_dot(call, config) and extents.get(p.ragged) == config.batched_rows
    for letter in p.ragged:
        tile_sizes = config.along(letter)[0]
        allows_several = len(p.ragged) == 1
        if (not tile_sizes and not is_one_dot) or (len(tile_sizes) > 1 and not allows_several):
            what = "at least one tile size" if allows_several else "one tile size"
            dims = "one ragged dim" if allows_several else f"{len(p.ragged)} ragged dims"
            return Refusal(
                f"`XlaConfig.{letter}` is {tile_sizes} for a ragged dim, in a product with {dims}.",
                f"Give it {what}: `XlaConfig({letter}=(64,))`.",
            )
        if letter in extents and max(tile_sizes, default=0) > extents[letter]:
            problem = f"`XlaConfig.{letter}` is {tile_sizes} for a buffer of {extents[letter]}."
            return Refusal(problem, "Tile sizes must not exceed the buffer.")
    if rows := config.batched_rows:
        if not is_one_dot and not _can_batch(call, x):
            return Refusal(
                f"`XlaConfig.batched_rows` is {rows}, but one dot can't multiply rows of all groups in this product.",
                "Leave it 0.",
            )
        if rows > extents[p.ragged]:
            problem = f"`XlaConfig.batched_rows` is {rows} for a buffer of {extents[p.ragged]}."
            return Refusal(problem, "It must not exceed the buffer.")
    return None


def _ragged_extents(call: Call, x: Operands) -> dict[str, int]:
    """The smallest extent of the buffers along each ragged letter, without symbolic extents."""
    extents: dict[str, int] = {}
    for letters, shape in call.buffers(x):
        for letter, n in zip(letters, shape[-2:], strict=True):
            if letter in x.sizes and isinstance(n, int):
                extents[letter] = min(extents.get(letter, n), n)
    return extents


def _model(call: Call, x: Operands) -> XlaConfig:
    """One dot for small products, otherwise tiles."""
    if _is_small(call, x):
        return XlaConfig(batched_rows=_ragged_extents(call, x)[call.product.ragged])
    return XlaConfig(**_tile_sizes(call, x, None), batched_rows=_batched_rows(call, x))


def _tile_sizes(call: Call, x: Operands, tiling: dict[str, int] | None) -> dict[str, Any]:
    """Tile sizes of each ragged letter, at most those of `tiling`."""
    p, (a, b) = call.product, call.kernel_operands(x)
    if len(p.ragged) == 1:
        m, largest = a.extent(p.ragged), tiling[p.ragged] if tiling else None
        flops, small_product, small_groups, large_groups = cost(call, x)["flops"], *_TILE_SIZES
        is_known = isinstance(m, int) and isinstance(x.num_groups, int)  # else symbolic, under `jax.export`
        tile_sizes = large_groups
        if is_known and m <= 8 * x.num_groups and b.data.dtype.itemsize == 1:
            tile_sizes = _FEW_ROWS
        elif flops is not None and flops < 2**29:
            tile_sizes = small_product
        elif is_known and m <= 64 * x.num_groups:
            tile_sizes = small_groups
        if not isinstance(m, int):  # symbolic, under `jax.export`: `_padding` pads the buffer
            return {p.ragged: tuple(t for t in tile_sizes if t <= (largest or t)) or (largest or tile_sizes[0],)}
        # A tile as large as the buffer must be the only one: its dot doesn't depend on the position, so XLA would hoist
        # it out of the loop and always compute it.
        fitting = tuple(t for t in tile_sizes if t < m and t <= (largest or t))
        return {p.ragged: fitting or (min(m, largest or m),)}
    tiles: dict[str, int] = {}
    for (packed, other), shape in call.buffers(x):
        rows, columns = shape[-2:]
        for letter, extent, tile in ((packed, rows, _mean_tile(rows, x.num_groups)), (other, columns, 256)):
            if letter in x.sizes:
                known = [extent] if isinstance(extent, int) else []  # symbolic: `padded` adds a tile
                tile = tiling[letter] if tiling else tile
                tiles[letter] = min(tiles.get(letter, tile), tile, *known)
    return {letter: (tile,) for letter, tile in tiles.items()}


def _batched_rows(call: Call, x: Operands) -> int:
    """Rows of each group that one dot multiplies: the mean group's if groups are small, else 0.

    For small groups, one dot is faster than a loop over small tiles, which wait for each other.
    """
    rows = _ragged_extents(call, x).get(call.product.ragged)
    if not _can_batch(call, x) or rows is None or rows > _BATCHED[call.product.kernel][0] * x.num_groups:
        return 0
    return min(max(_mean_group(rows, x.num_groups), _BATCHED[call.product.kernel][2]), rows)


def _batched_dtype(call: Call, common: Any, existing: Array | None) -> Any:
    """Result dtype of the dot for all groups: the accumulator's, or bfloat16, which is faster to store and read again.

    bfloat16 only if operands and result are bfloat16 and nothing is added to the sums, because the dot rounds them
    itself.
    """
    is_rounded = common == call.dtype == jnp.bfloat16 and not changes_sums(call, existing)
    return common if is_rounded else accumulator_dtype(common)


def _can_batch(call: Call, x: Operands) -> bool:
    """Whether one dot can multiply the first rows of all groups."""
    p, (a, b), batch = call.product, call.kernel_operands(x), call.batch(x)
    if p.kernel == "grouped_matmul":
        # The dot reads a matrix for each segment in place: none is cast, scaled, or shared by batch elements.
        is_unchanged = b.scales is None and b.data.dtype == compute_dtype(a.data.dtype, b.data.dtype)
        fits = is_unchanged and (batch in (None, 1) or b.data.ndim == 4)
    elif p.kernel == "transposed_grouped_matmul":  # each matrix must be one segment's sum
        fits = x.epilogue.existing is None and (batch in (None, 1) or call.out_batch)
    else:
        return False
    return fits and all(isinstance(extent, int) for extent in (*a.data.shape, x.num_groups, batch or 1))


def _is_small(call: Call, x: Operands) -> bool:
    """True if multiplying all rows by the matrices of all groups takes at most `_SMALL` FLOPs."""
    flops = cost(call, x)["flops"]
    return len(call.product.ragged) == 1 and flops is not None and flops * call.num_local_groups(x) <= _SMALL


def _is_one_dot(call: Call, config: XlaConfig) -> bool:
    """True if `_one_dot` computes the product: the configuration has batched rows and no tiles."""
    return config.batched_rows > 0 and config.along(call.product.ragged) == ((),)


def _zeros(launch: Launch, x: Operands) -> Array:
    """Result of an empty product: `existing`, or zeros."""
    call, existing = launch.call, x.epilogue.existing
    return jnp.zeros(_shape(call, x), call.dtype) if existing is None else existing


def _shape(call: Call, x: Operands) -> tuple[Any, ...]:
    """Shape of the result, with its batch axis."""
    batch = call.batch(x)
    return (batch, *call.shape) if batch is not None and call.out_batch else call.shape


@dataclass(frozen=True)
class _Tiles:
    """Tiles and buffers, `[packed, other]`, of a product with two or three ragged letters.

    A tile has the whole extent of letters that aren't ragged. Groups are ordered by batch element. Buffers are named
    `"lhs"`, `"rhs"` and `"out"`.
    """

    call: Call
    tile: dict[str, int]  # keyed by ragged letter
    columns: dict[str, int]  # keyed by buffer
    length: dict[str, Array]  # keyed by ragged letter, `(batch * g,)`: group sizes, clipped to all buffers
    starts: dict[str, Array]  # keyed by buffer, `(batch * g,)`: first row of each group
    operands: dict[str, Array]  # keyed by "lhs" and "rhs", padded
    portable: bool  # of the target

    def letters(self, name: str) -> str:
        letters: str = getattr(self.call.product, name)
        return letters

    def padded(self, x: Array, letters: str) -> Array:
        """`x`, padded so that every tile that begins inside a group fits the buffer.

        Groups begin at any row, and at column 0.
        """
        packed, other = letters
        x = x.reshape(-1, x.shape[-1])
        columns, tile = x.shape[1], self.tile.get(other, 1)
        more = -columns % tile if isinstance(columns, int) else tile - 1  # symbolic
        return jnp.pad(x, [(0, self.tile[packed]), (0, more)])

    def window(self, name: str, group: Array, at: dict[str, Array]) -> tuple[list[Array], list[int]]:
        """`(begin, extent)` of a buffer's tile, by axis. `at`: see `dot`."""
        packed, other = self.letters(name)
        begin = [self.starts[name][group] + at[packed], at.get(other, jnp.int32(0))]
        return begin, [self.tile[packed], self.tile[other] if other in self.tile else self.columns[name]]

    def inside(self, name: str, letters: str, group: Array, at: dict[str, Array]) -> Array:
        """Mask of a tile's elements inside the group along `letters`."""
        mask = jnp.ones((1, 1), bool)
        for axis, letter in enumerate(self.letters(name)):
            if letter in self.length and letter in letters:
                place = at[letter] + lax.iota(jnp.int32, self.tile[letter])
                mask = mask & jnp.expand_dims(place < self.length[letter][group], 1 - axis)
        return mask

    def dot(self, group: Array, at: dict[str, Array]) -> Array:
        """The product of a tile of each operand. `at`: where tiles begin in the group, keyed by ragged letter."""
        p = self.call.product

        def tile(name: str) -> Array:
            x = lax.dynamic_slice(self.operands[name], *self.window(name, group, at))
            return jnp.where(self.inside(name, p.contracted, group, at), x, jnp.zeros((), x.dtype))

        first, second = ("lhs", "rhs") if p.out[0] in p.lhs else ("rhs", "lhs")
        contract = self.letters(first).index(p.contracted), self.letters(second).index(p.contracted)
        x, y = tile(first), tile(second)
        if contract[0] == 0 and x.dtype.itemsize == 1:  # Otherwise, a transposed tile takes longer than the slower dot.
            x, contract = _transposed(x, self.portable), (1, contract[1])
        x = _untransposed(x, self.starts["out"].shape[0])
        return dot(x, y, contract, self.call.options.precision, accumulator_dtype(x.dtype))

    def total(self, group: Array, count: dict[str, Array], at: dict[str, Array], extent: list[int]) -> Array:
        """A tile of the result, unrounded, of the shape `extent`. `count`: numbers of tiles, keyed by ragged letter."""
        contracted = self.call.product.contracted
        if contracted not in self.length:
            return self.dot(group, at)

        def add(step: Array, total: Array) -> Array:
            return total + self.dot(group, at | {contracted: step * self.tile[contracted]})

        zeros = jnp.zeros(extent, accumulator_dtype(self.operands["lhs"].dtype))
        return lax.fori_loop(0, count[contracted], add, zeros)


def _tiles(launch: Launch, x: Operands) -> _Tiles:
    """The `_Tiles` of a product, with operands cast to the dtype of the dot."""
    call, p, batch, num_groups = launch.call, launch.call.product, launch.call.batch(x), x.num_groups
    shapes: dict[str, tuple[Any, ...]] = {"lhs": x.lhs.data.shape, "rhs": x.rhs.data.shape, "out": call.shape}
    batched = {"lhs": x.lhs.data.ndim == 3, "rhs": x.rhs.data.ndim == 3, "out": batch is not None}

    def flat(x: Array) -> Array:
        return jnp.broadcast_to(x, (batch or 1, num_groups)).reshape(-1).astype(jnp.int32)

    length = {letter: flat(jnp.maximum(size, 0)) for letter, size in x.sizes.items()}
    starts = {}
    for name, (packed, other) in (("lhs", p.lhs), ("rhs", p.rhs), ("out", p.out)):
        rows, columns = shapes[name][-2:]
        if packed in x.sizes:
            offsets = group_offsets(x.sizes[packed], rows)
            begin = offsets[..., :-1]
            length[packed] = jnp.minimum(length[packed], flat(offsets[..., 1:] - begin))
            if batched[name]:
                begin = begin.reshape(-1, num_groups) + (rows * jnp.arange(batch, dtype=jnp.int32))[:, None]
            starts[name] = flat(begin)
        if other in x.sizes:
            length[other] = jnp.minimum(length[other], columns)
    tile_sizes = {letter: launch.config.along(letter)[0][0] for letter in p.ragged}
    columns = {name: shape[-1] for name, shape in shapes.items()}
    tiles = _Tiles(call, tile_sizes, columns, length, starts, {}, launch.target.portable)
    common = compute_dtype(x.lhs.data.dtype, x.rhs.data.dtype)
    lhs, rhs = (tiles.padded(z.data.astype(common), letters) for z, letters in ((x.lhs, p.lhs), (x.rhs, p.rhs)))
    return replace(tiles, operands={"lhs": lhs, "rhs": rhs})


def _tiled(launch: Launch, x: Operands) -> Array:
    """A product with two or three ragged letters: `[packed, other] × [packed, other] -> [packed, other]`.

    For each group and each tile of its result:

    1. multiply tiles of the operands, and add up along the contracted letter;
    2. apply the epilogue and round;
    3. write the elements inside the group.
    """
    call, out_letters, existing, batch = launch.call, launch.call.product.out, x.epilogue.existing, launch.call.batch(x)
    tiles = _tiles(launch, x)
    ragged = [letter for letter in out_letters if letter in x.sizes]

    def visit(group: Array, count: dict[str, Array], index: Array, out: Array) -> Array:
        at = {}  # `index` counts the tiles of the group's result row by row
        for letter in reversed(ragged):
            at[letter] = index % count[letter] * tiles.tile[letter]
            index = index // count[letter]
        begin, extent = tiles.window("out", group, at)
        total = tiles.total(group, count, at, extent)
        old = lax.dynamic_slice(out, begin, extent)
        new = apply_epilogue(call, total, None if existing is None else old).astype(call.dtype)
        new = jnp.where(tiles.inside("out", out_letters, group, at), new, old)
        return lax.dynamic_update_slice(out, new, begin)

    def all_tiles(group: Array, out: Array) -> Array:
        count = {letter: -(-tiles.length[letter][group] // tiles.tile[letter]) for letter in x.sizes}
        visits = jnp.prod(jnp.stack([count[letter] for letter in ragged]))
        return lax.fori_loop(0, visits, partial(visit, group, count), out)

    full = call.shape if batch is None else (batch, *call.shape)
    out = tiles.padded(jnp.zeros(full, call.dtype) if existing is None else existing, out_letters)
    out = lax.fori_loop(0, (batch or 1) * x.num_groups, all_tiles, out)
    return out[: out.shape[0] - tiles.tile[out_letters[0]], : call.shape[-1]].reshape(full)


def _mean_tile(rows: int, num_groups: int) -> int:
    """Tile size near the mean group: a power of two from 16 to 256."""
    if not (isinstance(rows, int) and isinstance(num_groups, int)):  # symbolic
        return 256
    return int(np.clip(_mean_group(rows, num_groups), 16, 256))


def _mean_group(rows: int, num_groups: int) -> int:
    """Rows of the mean group, rounded up to a power of two."""
    return 1 << (max(rows // max(num_groups, 1), 1) - 1).bit_length()


def _grouped(launch: Launch, x: Operands) -> Array:
    """A product whose result packs the ragged letter: `[m, k] × [h, k, n] -> [m, n]`, or `× [h, n, k]`.

    Segment `i` is one group of one batch element: rows `starts[i]:ends[i]` of the element, which begins at row
    `base[i]`. They are multiplied by `rhs[index[i]]`. Rows of no segment are zero, or `existing`.

    1. If groups are small, one dot multiplies the first `batched_rows` rows of all segments, and a gather stores them.
    2. A loop over segments with further rows multiplies tiles of static sizes. Both steps apply the epilogue.
    3. A tile that would reach past the buffer begins earlier. A stored tile keeps old values outside of the segment.
    """
    call, existing, batch = launch.call, x.epilogue.existing, launch.call.batch(x)
    a, b = call.kernel_operands(x)
    letter, contracted = a.letters
    m, n, num_local, elements = a.extent(letter), call.shape[-1], b.data.shape[-3], 1 if batch is None else batch
    starts, ends, base = (z.reshape(-1) for z in _all_segments(x, letter, m, (elements, num_local)))
    first = num_local * jnp.arange(elements, dtype=jnp.int32)[:, None] if b.data.ndim == 4 else 0
    index = jnp.broadcast_to(jnp.arange(num_local, dtype=jnp.int32)[None] + first, (elements, num_local)).reshape(-1)
    tile_sizes = launch.config.along(letter)[0]
    rhs, is_stacked, padding = b.data.reshape(-1, *b.data.shape[-2:]), a.data.ndim > 2, _padding(m, tile_sizes)
    lhs = _padded(a.data.reshape(-1, a.data.shape[-1]), padding)
    common, matrix_product = _matrix_product(call, x, rhs)

    def put(y: Array, at: Array, in_group: Array, out: Array) -> Array:
        old = _slice(out, at, y.shape[0])
        y = apply_epilogue(call, y, None if existing is None else _from_carry(old, call.dtype)).astype(call.dtype)
        return _put(out, lax.select(jnp.broadcast_to(in_group, y.shape), _to_carry(y), old), at)

    def segment(start: Array, end: Array, matrix: Array, base: Array, out: Array) -> Array:
        multiply = matrix_product(matrix)

        def visit(tile: int, start: Array, out: Array) -> Array:
            at, in_group = _window(m + padding, tile, start, end)
            x = _masked(_slice(lhs, at + base if is_stacked else at, tile), in_group).astype(common)
            x = _untransposed(x, elements * num_local)
            return put(multiply(x), at + base, in_group, out)

        def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            start, out = carry
            return _next_tile(tile_sizes, visit, start, end, out)

        return lax.while_loop(lambda carry: carry[0] < end, step, (start, out))[1]

    out = jnp.zeros((elements * m, n), call.dtype) if existing is None else existing.reshape(elements * m, n)
    out = _to_carry(_padded(out, padding))
    if rows := launch.config.batched_rows:
        at, result = jnp.minimum(starts, m - rows), _batched_dtype(call, common, existing)
        # Outside of the branch, so that XLA computes it once for all products of the same groups.
        which, place = _places(starts + base, jnp.minimum(ends - starts, rows), out.shape[0])
        source = jnp.where(place < 0, -1, which * rows + (starts - at)[which] + place)

        def first_rows(out: Array) -> Array:
            x = _slices(lhs, at + base if is_stacked else at, rows).astype(common)
            x = _untransposed(x, elements * num_local)
            # `_can_batch` requires a matrix for each segment.
            y = dot(x, rhs, (2, b.axis(contracted) + 1), call.options.precision, result, batch=1).reshape(-1, n)
            y = y.at[jnp.maximum(source, 0)].get(mode=IN_BOUNDS)
            y = apply_epilogue(call, y, None if existing is None else _from_carry(out, call.dtype)).astype(call.dtype)
            return lax.select(jnp.broadcast_to(source[:, None] >= 0, y.shape), _to_carry(y), out)

        batch_them = _is_worth(launch, x, ends - starts)
        out = lax.cond(batch_them, first_rows, lambda out: out, out)
        starts = jnp.where(batch_them, starts + rows, starts)
    # Without a batch, `index` is the segment's number and `base` is 0: columns would only take time to compile.
    columns = (starts, ends) if batch is None else (starts, ends, index, base)

    def visit_number(number: Array, start: Array, end: Array, *rest: Array) -> Array:
        matrix, row, out = rest if batch is not None else (number, jnp.int32(0), *rest)
        return segment(start, end, matrix, row, out)

    out = _for_each(ends > starts, columns, visit_number, out)
    out = _from_carry(out[: elements * m] if padding else out, call.dtype)
    return out if batch is None else out.reshape(batch, m, n)


def _matrix_product(call: Call, x: Operands, rhs: Array) -> tuple[Any, Callable[[Array], Callable[[Array], Array]]]:
    """The dtype in which rows are multiplied; and a function of an index, which returns the product with that matrix.

    `rhs`: all matrices, `[h, k, n]` or `[h, n, k]`.
    """
    a, b = call.kernel_operands(x)
    axis = b.axis(call.product.contracted)
    narrow = narrow_matrices(b.data, b.scales, axis, a.data.dtype, call.accumulator(x))
    common = compute_dtype(a.data.dtype, rhs.dtype) if narrow is None else narrow.dtype

    def times(matrix: Array, rows: Array) -> Array:
        return dot(rows, matrix, (1, axis), call.options.precision, accumulator_dtype(common))

    def product(index: Array) -> Callable[[Array], Array]:
        if narrow is None:
            return partial(times, _slice(rhs, index, 1)[0].astype(common))
        return partial(narrow_product, narrow, index, times)

    return common, product


def _all_segments(x: Operands, letter: str, extent: int, shape: tuple[int, int]) -> list[Array]:
    """For all segments, `shape` = `[elements, h]`: `starts`, `ends` and `base`, the first row of the batch element."""
    starts, ends = segments(x.sizes[letter], extent, x.offset, shape[1])
    base = extent * jnp.arange(shape[0], dtype=jnp.int32)[:, None]
    return [jnp.broadcast_to(z, shape) for z in (starts, ends, base)]


def _transposed_grouped(launch: Launch, x: Operands) -> Array:
    """A product that contracts the ragged letter, such as a wgrad: `[k, m] × [k, n] -> [h, m, n]`.

    `out[i]` is `lhs[rows].T @ rhs[rows]` for `rows = starts[e, i]:ends[e, i]`, summed over `e` unless `call.out_batch`.

    1. If groups are small, one dot multiplies the first `batched_rows` rows of all groups.
    2. A loop over groups with further rows adds up products of tiles, and applies the epilogue.
    """
    call, existing, batch = launch.call, x.epilogue.existing, launch.call.batch(x)
    pair = call.kernel_operands(x)
    letter, num_local, keeps_batch = pair[0].letters[0], call.shape[0], call.out_batch and batch is not None
    k, elements = pair[0].extent(letter), 1 if batch is None else batch
    starts, ends, base = _all_segments(x, letter, k, (elements, num_local))
    if keeps_batch:  # each batch element adds `num_local` matrices
        starts, ends, base = (z.reshape(1, -1) for z in (starts, ends, base))
    is_single = isinstance(starts.shape[0], int) and starts.shape[0] == 1  # may be symbolic
    if is_single:
        starts, ends, base = starts[0], ends[0], base[0]
    padding = _padding(k, tile_sizes := launch.config.along(letter)[0])
    operands = [(_padded(z.data.reshape(-1, z.data.shape[-1]), padding), z.data.ndim > 2) for z in pair]
    common = compute_dtype(operands[0][0].dtype, operands[1][0].dtype)
    accumulator, h = accumulator_dtype(common), starts.shape[-1]

    def product(tile: int, start: Array, end: Array, base: Array) -> Array:
        at, in_group = _window(k + padding, tile, start, end)
        slices = [_slice(z, at + base if is_stacked else at, tile) for z, is_stacked in operands]
        return _product_of_rows(launch, slices, in_group, common, accumulator)

    def segment(start: Array, end: Array, base: Array) -> Array:
        next_tile = partial(_next_tile, tile_sizes, product)

        def add(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            start, total = carry
            start, more = next_tile(start, end, end, base)
            return start, total + more

        # The first tile's product needs no addition.
        return lax.while_loop(lambda carry: carry[0] < end, add, next_tile(start, end, end, base))[1]

    def group(i: Array, *rest: Array) -> Array:
        *place, out = rest
        if place:
            total = segment(*place, *([] if keeps_batch else [jnp.int32(0)]))
        else:

            def add(e: Array, total: Array) -> Array:
                return total + segment(starts[e, i], ends[e, i], base[e, i])

            zeros = jnp.zeros(call.shape[1:], accumulator)
            total = lax.fori_loop(_ZERO, jnp.asarray(starts.shape[0], jnp.int32), add, zeros)
        old = _from_carry(_slice(out, i, 1)[0], call.dtype)
        total = apply_epilogue(call, total, None if existing is None else old)
        if in_two_parts:  # `old` is the first rows' product, with the epilogue
            total = total + old.astype(total.dtype)
        return _put(out, _to_carry(total.astype(call.dtype))[None], i)

    shape = (h, *call.shape[1:])
    in_two_parts = bool(launch.config.batched_rows) and _in_two_parts(launch, x)
    if rows := launch.config.batched_rows:
        result = _batched_dtype(call, common, None)  # `_can_batch` excludes sums over a batch, and `existing`

        def first_rows(starts: Array) -> Array:
            at, in_group = jax.vmap(partial(_window, k, rows))(starts, ends)
            slices = [_slices(z, at + base if is_stacked else at, rows) for z, is_stacked in operands]
            out = _product_of_rows(launch, slices, in_group, common, result)
            return apply_epilogue(call, out, None).astype(call.dtype)

        batch_them = _is_worth(launch, x, ends - starts)
        out = lax.cond(batch_them, first_rows, lambda _: jnp.zeros(shape, call.dtype), starts)
        done = jnp.where(batch_them, rows, 0)
        chosen = ends - starts > done
        if in_two_parts:
            starts = jnp.minimum(ends, starts + done)  # `group` multiplies only the further rows
    else:
        out = jnp.zeros(shape, call.dtype) if existing is None else existing.reshape(shape)
        chosen = ends > starts if is_single else jnp.any(ends > starts, axis=0)
    columns = (starts, ends, base) if keeps_batch else (starts, ends) if is_single else ()
    out = _for_each(chosen, columns, group, _to_carry(out))
    out = _from_carry(out, call.dtype)
    return out.reshape(batch, num_local, *call.shape[1:]) if keeps_batch else out


def _one_dot(launch: Launch, x: Operands) -> Array:
    """A product with one ragged letter: one batched dot of all rows and the matrices of all groups, without a loop.

    It compiles fast, and is for small products.
    """
    call, is_wgrad = launch.call, launch.kernel == "transposed_grouped_matmul"
    a, b = call.kernel_operands(x)
    letter, num_local, elements = call.product.ragged, call.num_local_groups(x), call.batch(x) or 1
    extent, common = a.extent(letter), compute_dtype(a.data.dtype, b.data.dtype)
    starts, ends, _ = (z.reshape(-1) for z in _all_segments(x, letter, extent, (elements, num_local)))
    _, in_group = jax.vmap(partial(_window, extent, extent))(starts, ends)  # [e * h, rows, 1]

    def of_segments(z: Array) -> Array:
        """A matrix for each segment, `[e * h, _, _]`."""
        return jnp.broadcast_to(z, (elements, num_local, *z.shape[-2:])).reshape(-1, *z.shape[-2:])

    def rows(z: Array) -> Array:
        return of_segments(z.reshape(-1, 1, *z.shape[-2:]))

    if is_wgrad:
        out = _product_of_rows(launch, [rows(a.data), rows(b.data)], in_group, common, accumulator_dtype(common))
    else:
        left = _untransposed(rows(a.data.astype(common)), elements * num_local)
        right, axes = of_segments(b.data.astype(common)), (2, b.axis(call.product.contracted) + 1)
        out = dot(left, right, axes, call.options.precision, accumulator_dtype(common), batch=1)
        out = _masked(out, in_group)
    out = out.reshape(elements, num_local, *out.shape[1:])
    if not (is_wgrad and call.out_batch):  # sums a wgrad over the batch; otherwise over groups: a row is in one at most
        out = jnp.sum(out, axis=0 if is_wgrad else 1, dtype=out.dtype)
    return apply_epilogue(call, out.reshape(_shape(call, x)), x.epilogue.existing).astype(call.dtype)


def _untransposed(x: Array, num_matrices: Any) -> Array:
    """`x`, with a barrier that keeps XLA from folding a transpose of `x` into a dot, where necessary.

    `x` is an operand of a dot, or of a loop over dots, with `num_matrices` matrices in all. XLA folds transposes only
    for a single matrix. On CPUs (jaxlib up to 0.12.0) it then can't run the dot in bfloat16, or adds up in bfloat16.
    """
    is_single = isinstance(num_matrices, int) and num_matrices == 1
    return lax.optimization_barrier(x) if is_single and x.dtype == jnp.bfloat16 else x


def _product_of_rows(launch: Launch, rows: list[Array], in_group: Array, common: Any, dtype: Any) -> Array:
    """`[..., rows, m], [..., rows, n] -> [..., m, n]` in `dtype`, multiplied in `common`; rows not `in_group` are 0."""
    left, right = (_masked(z, in_group).astype(common) for z in rows)
    # Without a barrier, XLA may transpose `right` if there is one group, which changes the last bits of the sums.
    right = lax.optimization_barrier(right)
    left, batch = _transposed(left, launch.target.portable), left.ndim - 2
    return dot(left, right, (batch + 1, batch), launch.call.options.precision, dtype, batch=batch)


_TILE_SIZES = (16, 64, 256), (16, 32, 64, 128, 256), (32, 64, 128, 256, 512)
"""Tile sizes of products with fewer than 2**29 FLOPs; of larger ones with up to 64 rows per group; of all others.

In a layer of experts, forward and backward, each size takes about 70 ms to compile. Twice as many sizes would make
large products up to 5 % faster.
"""

_FEW_ROWS = 4, 8, 16, 64
"""Tile sizes of products with matrices of at most 8 bits, and up to 8 rows per group."""

_OVERHEAD = 24
"""Fixed cost of a tile, in rows. Measured: 20 to 40."""

_BATCHED = {"grouped_matmul": (16, 24, 8), "transposed_grouped_matmul": (64, 128, 16)}
"""`(largest mean group, loop overhead, fewest rows)`, in rows, keyed by kernel.

Up to the largest mean group, one dot multiplies the first rows of all groups: as many as the mean group has, but not
fewer than the fewest. In the loop, a group costs its rows plus the overhead. A wgrad's loop also zeroes the result, and
copies each sum into it. Measured in float32 and bfloat16, with random and even sizes at means of 1 to 128, and with
Zipf's at 4 to 128.
"""

_SMALL = 2**20
"""The most FLOPs of one dot that multiplies all rows by the matrices of all groups.

Measured: it compiles in a quarter of a loop's time, and runs as fast, or up to 75 µs longer with both gradients.
"""

_ZERO = np.int32(0)  # loops from it count in int32, even with x64 enabled


@cache
def _cover(tile_sizes: tuple[int, ...]) -> np.ndarray:
    """`(tile_sizes[-1] + 1,)`: for each number of remaining rows of a group, the index of the next tile's size.

    The tiles cover the rows at the lowest cost: a tile costs its rows plus `_OVERHEAD`. For more rows, use the largest.
    """
    cost, first = np.zeros(tile_sizes[-1] + 1), np.zeros(tile_sizes[-1] + 1, np.int32)
    for rows in range(1, tile_sizes[-1] + 1):
        costs = [tile + _OVERHEAD + cost[max(rows - tile, 0)] for tile in tile_sizes]
        first[rows] = np.argmin(costs)
        cost[rows] = costs[first[rows]]
    return first


def _covered(tile_sizes: tuple[int, ...], first: int, end: int) -> list[tuple[int, int]]:
    """`(first row, tile size)` of each tile of a group."""
    tiles = []
    while first < end:
        tiles.append((first, tile_sizes[_cover(tile_sizes)[min(end - first, tile_sizes[-1])]]))
        first += tiles[-1][1]
    return tiles


def work(launch: Launch, x: Operands) -> Work:
    """Tiles and FLOPs of the product."""
    p, groups = launch.call.product, spans(launch.call, x)
    size = {letter: end - first for letter, (first, end) in groups.items()}
    if not p.ragged:
        return Work(len(size["m"]), 0, 2 * int(sum(size["m"] * size["k"] * size["n"])))
    tile = {z: max(launch.config.along(z)[0], default=0) if z in p.ragged else int(size[z][0]) for z in "mkn"}
    letter = p.ragged if len(p.ragged) == 1 else p.out[0]
    tiles, rows = [], launch.config.batched_rows
    is_one_dot = _is_one_dot(launch.call, launch.config)
    is_batched = rows and not is_one_dot and bool(_is_worth(launch, x, size[letter], np))
    in_two_parts = _in_two_parts(launch, x)
    for group, (first, end) in enumerate(zip(*groups[letter], strict=True), int(x.offset or 0)):
        if is_one_dot:
            tiles.append((group, 0, rows))
            continue
        if is_batched:  # the dot multiplies `batched_rows` rows of every group, even if it is empty
            tiles.append((group, int(first), rows))
            first = min(first + rows, end) if in_two_parts or end - first <= rows else first
        if len(p.ragged) > 1:
            covered = [(at, tile[letter]) for at in range(first, end, tile[letter])]
        else:
            covered = _covered(launch.config.along(letter)[0], first, end)
        tiles += [(group, int(at), int(tile)) for at, tile in covered]
    if len(p.ragged) == 1:
        multiplied = sum(tile for *_, tile in tiles)
        return Work(
            len(tiles), 0, 2 * multiplied * math.prod(tile[z] for z in "mkn" if z != letter), letter, tuple(tiles)
        )
    visits = int(np.sum(np.prod([-(-size[z] // tile[z]) for z in "mkn"], axis=0)))
    return Work(visits, 0, 2 * visits * math.prod(tile.values()), letter, tuple(tiles))


def _window(m: Any, tile: int, start: Array, end: Array) -> tuple[Array, Array]:
    """`(at, in_group)`: the first of `tile` rows, and the mask `[tile, 1]` of the rows in `[start, end)`.

    `at` is `start`, or less if the tile would reach past the end of the buffer of `m` rows.
    """
    at = jnp.minimum(start, m - tile)
    row = lax.iota(jnp.int32, tile) - (start - at)
    # As unsigned numbers, rows before the start are large, so one comparison is enough.
    return at, (row.astype(jnp.uint32) < (end - start).astype(jnp.uint32))[:, None]


def _places(starts: Array, sizes: Array, rows: int) -> tuple[Array, Array]:
    """`(segment, place)` of each of `rows` rows: the number of its segment, and its place there, `[rows]`.

    `starts`, `sizes`: of the segments, in order; where empty ones begin doesn't matter. The place of a row of none is
    negative.
    """
    number = jnp.arange(starts.shape[0], dtype=jnp.int32)
    first = jnp.zeros(rows, jnp.int32).at[jnp.where(sizes > 0, starts, rows)].max(number, mode="drop")
    segment = lax.cummax(first)
    place = jnp.arange(rows, dtype=jnp.int32) - starts[segment]
    return segment, jnp.where(place < sizes[segment], place, -1)


def _masked(rows: Array, in_group: Array) -> Array:
    """`rows`, zero where they are not in the group. All products mask in this way: XLA compiles equal fusions once."""
    return lax.select(jnp.broadcast_to(in_group, rows.shape), rows, lax.full_like(rows, 0))


def _next_tile(
    tile_sizes: tuple[int, ...], visit: Callable[..., Any], start: Array, end: Array, *args: Any
) -> tuple[Array, Any]:
    """`(start of the next tile, visit(tile, start, *args))`, with the size `tile` that `_cover` chooses."""
    index = _slice(_cover(tile_sizes), jnp.minimum(end - start, tile_sizes[-1]), 1)[0]
    out = lax.switch(index, [partial(visit, tile) for tile in tile_sizes], start, *args)
    return start + _slice(np.asarray(tile_sizes, np.int32), index, 1)[0], out


def _padding(extent: Any, tile_sizes: tuple[int, ...]) -> int:
    """Rows to append to a buffer so that every tile fits: 0 if the buffer is known to be large enough."""
    try:
        return 0 if extent >= tile_sizes[-1] else tile_sizes[-1]
    except InconclusiveDimensionOperation:  # symbolic
        return tile_sizes[-1]


def _padded(x: Array, padding: int) -> Array:
    return jnp.pad(x, [(0, padding), (0, 0)]) if padding else x


def _is_worth(launch: Launch, x: Operands, sizes: Any, numpy: Any = jnp) -> Any:
    """Whether one dot for the first `batched_rows` rows of all groups costs less than the tiles that it saves.

    `numpy`: the module of `sizes`.
    """
    rows, overhead = launch.config.batched_rows, _BATCHED[launch.kernel][1]
    # The loop skips groups of up to `rows` rows. It visits longer ones anyway, with fewer rows if they have two parts.
    saved_of_long = rows if _in_two_parts(launch, x) else 0
    saved = numpy.where(sizes > rows, saved_of_long, numpy.where(sizes > 0, sizes + overhead, 0))
    return numpy.sum(saved, dtype=np.int32) > np.int32(rows * saved.shape[0])


def _in_two_parts(launch: Launch, x: Operands) -> bool:
    """Whether a group with more than `batched_rows` rows is multiplied in two parts: by the dot and by the loop.

    A wgrad is the sum of both parts. If its dtype would round this sum twice, the loop multiplies all rows.
    """
    return launch.kernel == "grouped_matmul" or launch.call.dtype == launch.call.accumulator(x)


def _slice(x: AnyArray, at: Any, size: int) -> Array:
    """`x[at : at + size]`, sliced in the dtype of `_to_carry`."""
    rows = lax.dynamic_slice_in_dim(_to_carry(jnp.asarray(x)), at, size, allow_negative_indices=False)
    return _from_carry(rows, x.dtype)


_slices = jax.vmap(_slice, in_axes=(None, 0, None))
_put = partial(lax.dynamic_update_slice_in_dim, axis=0, allow_negative_indices=False)


def _for_each(chosen: Array, columns: tuple[Array, ...], body: Callable[..., Array], out: Array) -> Array:
    """Loops over the chosen rows of a table of `columns`: `out = body(number, *row, out)`, in place."""
    count = jnp.asarray(chosen.shape[0], jnp.int32)
    # For each row, the first chosen row from it on; `count` if there is none.
    following = lax.cummin(jnp.where(chosen, jnp.arange(chosen.shape[0], dtype=jnp.int32), count), reverse=True)
    following = jnp.concatenate([following, count[None]])
    # Without the barrier, XLA would fold a loop over constant sizes, and leave a bfloat16 dot that its CPU backend
    # can't run. The barrier follows the table, so that XLA computes the table once for all products of the same groups.
    following, columns = lax.optimization_barrier((following, columns))

    def visit(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        number, out = carry
        out = body(number, *(_slice(column, number, 1)[0] for column in columns), out)
        return _slice(following, number + 1, 1)[0], out

    return lax.while_loop(lambda carry: carry[0] < count, visit, (following[0], out))[1]


def _transposed(x: Array, portable: bool) -> Array:
    """`x.mT`, stored row by row, as the fast dot requires. Without a barrier, XLA folds the transpose into a slow dot.

    In float32, the slow dot is as fast. It converts bfloat16 to float32, and int8 to int32, which takes ten times as
    long.

    The constraint is a custom call, which `jax.export` rejects: with `portable`, the slower dot runs without it.
    """
    if portable:
        return lax.optimization_barrier(x.mT)
    return with_layout_constraint(lax.optimization_barrier(x).mT, Layout(tuple(range(x.ndim))))


# If a loop slices or carries an array of floats of 8 bits or fewer (before jax 0.12, of 16 too), XLA's CPU backend
# converts the whole array in each iteration. So such arrays become integers.
_AS_BITS = {8: jnp.uint8, 4: jnp.uint4} | ({16: jnp.uint16} if jax.__version_info__ < (0, 12) else {})


def _bits(dtype: Any) -> Any:
    """The integer dtype in which a loop carries arrays of `dtype`; None if it doesn't convert them."""
    return _AS_BITS.get(jnp.finfo(dtype).bits) if jnp.issubdtype(dtype, jnp.floating) else None


def _to_carry(x: Array) -> Array:
    return x if _bits(x.dtype) is None else lax.bitcast_convert_type(x, _bits(x.dtype))


def _from_carry(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _batched(launch: Launch, x: Operands) -> Array:
    """A product without a ragged letter: one dot over the group axis.

    If both operands have a batch axis, it is folded into the group axis. If only one has it, it is folded into that
    operand's letter that isn't contracted. So the dot has four axes: with more, XLA's CPU backend can't run every dot
    in bfloat16.
    """
    call, p, existing = launch.call, launch.call.product, x.epilogue.existing
    common = compute_dtype(x.lhs.data.dtype, x.rhs.data.dtype)

    def product(lhs: Array, rhs: Array, letters: tuple[str, str, str]) -> Array:
        """The einsum of two letters each, over the leading group axis."""
        of_lhs, of_rhs, of_out = letters
        (contracted,) = set(of_lhs) & set(of_rhs)
        axes = of_lhs.index(contracted) + 1, of_rhs.index(contracted) + 1
        lhs, rhs = _untransposed(lhs, lhs.shape[0]), _untransposed(rhs, rhs.shape[0])
        if of_out[0] in of_rhs:
            lhs, rhs, axes = rhs, lhs, (axes[1], axes[0])
        if axes[0] == 1 and common.itemsize < 4:
            lhs, axes = _transposed(lhs, launch.target.portable), (2, axes[1])
        return dot(lhs, rhs, axes, call.options.precision, accumulator_dtype(common), batch=1)

    lhs, rhs = x.lhs.data.astype(common), x.rhs.data.astype(common)
    if lhs.ndim == rhs.ndim:
        out = product(lhs.reshape(-1, *lhs.shape[-2:]), rhs.reshape(-1, *rhs.shape[-2:]), (p.lhs, p.rhs, p.out))
        out = out.reshape(*lhs.shape[:-2], *out.shape[-2:])
    else:
        pair = ((lhs, p.lhs), (rhs, p.rhs))
        (mapped, letters), (other, other_letters) = sorted(pair, key=lambda operand: -operand[0].ndim)
        outer, contracted = sorted(letters, key=lambda letter: letter not in p.out)
        other_outer = p.out.replace(outer, "")
        rows = jnp.transpose(mapped, (1, 0, 2 + letters.index(outer), 2 + letters.index(contracted)))
        folded = rows.reshape(rows.shape[0], -1, rows.shape[-1])
        out = product(folded, other, (outer + contracted, other_letters, outer + other_outer))
        order = (1, 0, 2, 3) if p.out[0] == outer else (1, 0, 3, 2)
        out = jnp.transpose(out.reshape(*rows.shape[:-1], out.shape[-1]), order)
    return apply_epilogue(call, out, existing).astype(call.dtype)
