"""Grouped products in plain XLA: no custom kernel, any platform, fast on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Int, Shaped

from ragged.kernels import ANY_TARGET, Scales, Target, schedule


def promote(lhs: Any, rhs: Any) -> Any:
    """The operands' common dtype, also where the user has made implicit promotion strict: here it is asked for."""
    bytes_of = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
    lhs, rhs = (jnp.dtype(bytes_of.get(jnp.dtype(d).name, d)) for d in (lhs, rhs))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(lhs, rhs)


def accumulator_dtype(dtype: Any) -> Any:
    """float32; int32 for integers; what is wider than that stays as it is."""
    if jnp.dtype(dtype).itemsize >= 4:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32)


def add_wide(total: Array, old: Array) -> Array:
    """An accumulator plus what it is added to, which may be a float where the accumulator is an integer."""
    floats = jnp.issubdtype(old.dtype, jnp.floating) and jnp.issubdtype(total.dtype, jnp.integer)
    wide = accumulator_dtype(old.dtype) if floats else total.dtype
    return total.astype(wide) + old.astype(wide)


def compute_dtype(lhs: Any, rhs: Any) -> Any:
    """What both operands of a dot are cast to, without loss (but for an integer beyond 2²⁴ that meets a float).

    XLA's dots on the CPU are fast in float32, bfloat16 and int8. The 8 bits of bfloat16's mantissa hold every int8 and
    fp8, but no int16.
    """
    lhs, rhs = sorted((jnp.dtype(lhs), jnp.dtype(rhs)), key=lambda d: d.itemsize)
    integers = [jnp.issubdtype(d, jnp.integer) for d in (lhs, rhs)]
    if all(integers):
        signed_bytes = all(d.itemsize == 1 and jnp.issubdtype(d, jnp.signedinteger) for d in (lhs, rhs))
        return jnp.dtype(jnp.int8) if signed_bytes else accumulator_dtype(promote(lhs, rhs))
    if rhs.itemsize == 1:
        return jnp.dtype(jnp.bfloat16)
    if any(is_integer and d.itemsize > 1 for d, is_integer in zip((lhs, rhs), integers, strict=True)):
        return jnp.dtype(jnp.float64 if jnp.float64 in (lhs, rhs) else jnp.float32)
    common = rhs if lhs.itemsize == 1 else promote(lhs, rhs)
    return jnp.dtype(jnp.float32) if common == jnp.float16 else common


def dequantized(x: Array, scales: Scales, packed_sizes: Array | None = None, dtype: Any = jnp.float32) -> Array:
    """An operand times its scales: a copy in memory, which TPU and GPU kernels do without."""
    values = spread(scales, x.shape, packed_sizes).astype(dtype)
    x = x if x.ndim == values.ndim else x[None]  # sizes of its own alone give each batch element scales of its own
    return x.astype(dtype) * values


def spread(scales: Scales, shape: tuple[int, ...], packed_sizes: Array | None = None) -> Array:
    """Each element's scale, or what broadcasts to it, for an operand of this shape.

    `packed_sizes`: of the groups that are packed along its rows, if any are. The scales have a batch axis in front if
    the operand has one; the sizes may have it too.
    """
    values = scales.values
    for axis, block in zip((-2, -1), scales.block, strict=True):
        if axis == -2 and block is None and packed_sizes is not None:
            values = by_row(values, packed_sizes, shape[-2])
        elif block is not None and block > 1:
            values = lax.slice_in_dim(jnp.repeat(values, block, axis), 0, shape[axis], axis=values.ndim + axis)
    return values


def by_row(values: Shaped[Array, "*batch g blocks"], sizes: Int[Array, "*b g"], rows: int) -> Shaped[Array, "..."]:
    """The scales of each row's group, `[*batch, rows, blocks]`. Rows of the tail have the last group's."""
    if not values.shape[-2]:  # no groups: all is tail
        return jnp.ones((*values.shape[:-2], rows, values.shape[-1]), values.dtype)

    def of_rows(values: Array, sizes: Array) -> Array:
        return values.at[schedule.group_ids(schedule.group_offsets(sizes, rows), rows)].get(mode="clip")

    batched = values.ndim > 2 or sizes.ndim > 1
    axes = (0 if values.ndim > 2 else None, 0 if sizes.ndim > 1 else None)
    return (jax.vmap(of_rows, axes) if batched else of_rows)(values, sizes)


def tiled_matmul(
    lhs: Array,
    rhs: Array,
    sizes: dict[str, Array],
    *,
    axes: tuple[str, str, str],
    shape: tuple[int, ...],
    preferred_element_type: Any,
    precision: Any = None,
    tiling: dict[str, int] | None = None,
    existing_out: Array | None = None,
    target: Target = ANY_TARGET,
) -> Array:
    """The product where two or three letters are ragged, tile by tile.

    Every term holds a ragged letter, so every buffer is `[packed, other]`, with a batch axis or without. A tile spans
    the whole of a letter that isn't ragged. FLOPs: what the groups need, rounded up to whole tiles along ragged
    letters.
    """
    terms: dict[str, str] = dict(zip(("lhs", "rhs", "out"), axes, strict=True))
    shapes: dict[str, tuple[int, ...]] = {"lhs": lhs.shape, "rhs": rhs.shape, "out": shape}
    contracted = next(letter for letter in "mkn" if letter not in terms["out"])
    batch = next((x.shape[0] for x in (lhs, rhs) if x.ndim == 3), None)
    batch = next((x.shape[0] for x in sizes.values() if x.ndim == 2), batch)
    batched: dict[str, bool] = {"lhs": lhs.ndim == 3, "rhs": rhs.ndim == 3, "out": batch is not None}
    num_groups = next(iter(sizes.values())).shape[-1]

    # A batch element is `num_groups` further groups: sizes that fit every buffer, where each group starts in each
    # buffer (both `[batch * g]`), and the tiles.
    def flat(x: Array) -> Array:
        return jnp.broadcast_to(x, (batch or 1, num_groups)).reshape(-1).astype(jnp.int32)

    length = {letter: flat(jnp.maximum(size, 0)) for letter, size in sizes.items()}
    starts, tiles = {}, {}
    for term, (packed, other) in terms.items():
        rows, columns = shapes[term][-2:]
        if packed in sizes:
            offsets = schedule.group_offsets(sizes[packed], rows)
            begin = offsets[..., :-1]
            length[packed] = jnp.minimum(length[packed], flat(offsets[..., 1:] - begin))
            if batched[term]:
                begin = begin.reshape(-1, num_groups) + (rows * jnp.arange(batch or 1, dtype=jnp.int32))[:, None]
            starts[term] = flat(begin)
            tile = tiling[packed] if tiling else _mean_tile(rows, num_groups)
            tiles[packed] = min(tiles.get(packed, rows), rows, tile)
        if other in sizes:
            length[other] = jnp.minimum(length[other], columns)
            tiles[other] = min(tiles.get(other, columns), columns, tiling[other] if tiling else 256)

    # Padded so that a tile which begins inside a group never has to be moved to fit the buffer: packed groups begin
    # anywhere, left-aligned ones at 0.
    def padded(x: Array, letters: str) -> Array:
        packed, other = letters
        x = x.reshape(-1, x.shape[-1])
        return jnp.pad(x, [(0, tiles[packed]), (0, -x.shape[1] % tiles.get(other, 1))])

    common = compute_dtype(lhs.dtype, rhs.dtype)
    accumulator = accumulator_dtype(common)
    buffers = {"lhs": padded(lhs.astype(common), terms["lhs"]), "rhs": padded(rhs.astype(common), terms["rhs"])}
    first, second = ("lhs", "rhs") if terms["out"][0] in terms["lhs"] else ("rhs", "lhs")
    contract = (terms[first].index(contracted),), (terms[second].index(contracted),)

    def window(term: str, group: Array, at: dict[str, Array]) -> tuple[list[Array], list[int]]:
        """First index and extent of a tile of `term`."""
        packed, other = terms[term]
        begin = [starts[term][group] + at[packed], at.get(other, jnp.int32(0))]
        return begin, [tiles[packed], tiles.get(other, shapes[term][-1])]

    def inside(term: str, letters: str, group: Array, at: dict[str, Array]) -> Array:
        """Which elements of a tile of `term` lie inside the group, along `letters`."""
        mask = jnp.ones((1, 1), bool)
        for axis, letter in enumerate(terms[term]):
            if letter in sizes and letter in letters:
                place = at[letter] + lax.iota(jnp.int32, tiles[letter])
                mask = mask & jnp.expand_dims(place < length[letter][group], 1 - axis)
        return mask

    def dot(group: Array, at: dict[str, Array]) -> Array:
        operands = []
        for term in (first, second):
            tile = lax.dynamic_slice(buffers[term], *window(term, group, at))
            operands.append(jnp.where(inside(term, contracted, group, at), tile, jnp.zeros((), common)))
        return lax.dot_general(
            *operands, dimension_numbers=(contract, ((), ())), precision=precision, preferred_element_type=accumulator
        )

    kept = [letter for letter in terms["out"] if letter in sizes]

    def visit(group: Array, count: dict[str, Array], index: Array, out: Array) -> Array:
        at = {}
        for letter in reversed(kept):
            at[letter] = index % count[letter] * tiles[letter]
            index = index // count[letter]
        begin, extent = window("out", group, at)
        if contracted in sizes:

            def add(step: Array, total: Array) -> Array:
                return total + dot(group, at | {contracted: step * tiles[contracted]})

            total = lax.fori_loop(0, count[contracted], add, jnp.zeros(extent, accumulator))
        else:
            total = dot(group, at)
        old = lax.dynamic_slice(out, begin, extent)
        new = total if existing_out is None else add_wide(total, old)
        new = jnp.where(inside("out", terms["out"], group, at), new.astype(out.dtype), old)
        return lax.dynamic_update_slice(out, new, begin)

    def all_tiles(group: Array, out: Array) -> Array:
        count = {letter: -(-length[letter][group] // tiles[letter]) for letter in sizes}
        visits = jnp.prod(jnp.stack([count[letter] for letter in kept]))
        return lax.fori_loop(0, visits, partial(visit, group, count), out)

    full = shape if batch is None else (batch, *shape)
    start = jnp.zeros(full, preferred_element_type) if existing_out is None else existing_out
    out = padded(start.astype(preferred_element_type), terms["out"])
    out = lax.fori_loop(0, (batch or 1) * num_groups, all_tiles, out)
    return out[: out.shape[0] - tiles[terms["out"][0]], : shape[-1]].reshape(full)


def _mean_tile(rows: int | Any, num_groups: int) -> int:
    """About the mean group, a power of two in 16..256."""
    if not (isinstance(rows, int) and isinstance(num_groups, int)):  # symbolic, under `jax.export`
        return 256
    return int(np.clip(1 << (rows // max(num_groups, 1)).bit_length(), 16, 256))


def grouped_matmul(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    preferred_element_type: Any,
    precision: Any = None,
    tiling: tuple[int, int, int] | None = None,
    group_offset: Array | None = None,
    existing_out: Array | None = None,
    transpose_rhs: bool = False,
    target: Target = ANY_TARGET,
) -> Array:
    """`[m, k] × [h, k, n] -> [m, n]`: see the contract in `ragged.kernels`."""
    m, held = lhs.shape[-2], rhs.shape[-3]
    # Sizes that are constants of the program would have XLA fold the loop away, and with it the form of a bfloat16 dot
    # that its CPU backend can run.
    group_sizes = lax.optimization_barrier(group_sizes)
    starts, ends = schedule.segments(group_sizes, m, group_offset, held)
    batch = batch_size((lhs, 2), (rhs, 3), (starts, 1))
    elements = 1 if batch is None else batch
    # A batch element is `held` further segments of operands that are read in place, mapped or not.
    element = jnp.arange(elements, dtype=jnp.int32)[:, None]
    index = jnp.arange(held, dtype=jnp.int32)[None] + (held * element if rhs.ndim == 4 else 0)
    starts, ends, index, base = (jnp.broadcast_to(x, (elements, held)) for x in (starts, ends, index, m * element))
    out = _forward(
        lhs,
        rhs.reshape(-1, *rhs.shape[-2:]),
        *(x.reshape(-1) for x in (starts, ends, index, base)),
        rows=elements * m,
        transpose_rhs=transpose_rhs,
        dtype=preferred_element_type,
        precision=precision,
        tallest=tiling[0] if tiling else None,
        existing_out=None if existing_out is None else existing_out.reshape(elements * m, -1),
    )
    return out if batch is None else out.reshape(batch, m, -1)


def transposed_grouped_matmul(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    preferred_element_type: Any,
    precision: Any = None,
    tiling: tuple[int, int, int] | None = None,
    group_offset: Array | None = None,
    num_actual_groups: int | None = None,
    existing_out: Array | None = None,
    sum_batch: bool = False,
    target: Target = ANY_TARGET,
) -> Array:
    """`[a, m] × [m, b] -> [h, a, b]`: see the contract in `ragged.kernels`."""
    lhs = lhs.mT  # [m, a]; cancels where the caller's was an `mT`
    m = lhs.shape[-2]
    held = group_sizes.shape[-1] if num_actual_groups is None else num_actual_groups
    starts, ends = schedule.segments(group_sizes, m, group_offset, held)
    batch = batch_size((lhs, 2), (rhs, 2), (starts, 1))
    elements = 1 if batch is None else batch
    base = m * jnp.arange(elements, dtype=jnp.int32)[:, None]
    starts, ends, base = (jnp.broadcast_to(x, (elements, held)) for x in (starts, ends, base))
    if batch is not None and not sum_batch:
        starts, ends, base = (x.reshape(1, -1) for x in (starts, ends, base))
        existing_out = None if existing_out is None else existing_out.reshape(-1, *existing_out.shape[-2:])
    out = _wgrad(
        lhs,
        rhs,
        starts,
        ends,
        base,
        dtype=preferred_element_type,
        precision=precision,
        tallest=tiling[0] if tiling else None,
        existing_out=existing_out,
        portable=target.portable,
    )
    return out if batch is None or sum_batch else out.reshape(batch, held, *out.shape[-2:])


def batch_size(*operands: tuple[Array, int]) -> Any:
    """The batch axis's extent, from arrays and the ranks they have without it; None if there is none."""
    return next((x.shape[0] for x, ndim in operands if x.ndim > ndim), None)


def _forward(
    lhs: Shaped[Array, "*e m k"],
    rhs: Shaped[Array, "h _ _"],
    starts: Int[Array, " s"],
    ends: Int[Array, " s"],
    index: Int[Array, " s"],
    base: Int[Array, " s"],
    *,
    rows: Any,
    transpose_rhs: bool,
    dtype: Any,
    precision: Any,
    tallest: int | None,
    existing_out: Shaped[Array, "rows n"] | None,
) -> Shaped[Array, "rows n"]:
    """Rows `starts[i]:ends[i]` of `lhs` times `rhs[index[i]]`, `base[i]` rows further down; other rows are zero.

    Where `lhs` has a batch axis, they are read `base[i]` rows further down too.
    """
    common = compute_dtype(lhs.dtype, rhs.dtype)
    accumulator = accumulator_dtype(common)
    m, n = lhs.shape[-2], rhs.shape[1 if transpose_rhs else 2]
    lhs, is_stacked = lhs.reshape(-1, lhs.shape[-1]), lhs.ndim > 2
    dims = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
    heights, full, _, last = _tiles(m, ends - starts, tallest)

    def segment(start: Array, end: Array, which: Array, base: Array, full: Array, last: Array, out: Array) -> Array:
        weight = lax.dynamic_index_in_dim(rhs, which, 0, keepdims=False).astype(common)

        def visit(height: int, start: Array, out: Array) -> Array:
            at, mine = _window(m, height, start, end)
            x = lax.dynamic_slice_in_dim(lhs, at + base if is_stacked else at, height).astype(common)
            at = at + base
            y = lax.dot_general(x, weight, dims, precision=precision, preferred_element_type=accumulator)
            old = lax.dynamic_slice_in_dim(out, at, height)
            if existing_out is not None:
                y = add_wide(y, _from_carry(old, dtype))
            y = jnp.where(mine, _to_carry(y.astype(dtype)), old)  # a neighbour's rows stay
            return lax.dynamic_update_slice_in_dim(out, y, at, 0)

        # The start depends on the loop's variable, or XLA would hoist the dot and run it even where there is no trip.
        out = lax.fori_loop(_ZERO, full, lambda step, out: visit(heights[-1], start + step * heights[-1], out), out)
        return lax.switch(last, [partial(visit, height) for height in heights], start + full * heights[-1], out)

    out = jnp.zeros((rows, n), dtype) if existing_out is None else existing_out
    out = _for_each(ends > starts, (starts, ends, index, base, full, last), segment, _to_carry(out))
    return _from_carry(out, dtype)


def _wgrad(
    lhs: Shaped[Array, "*_ m a"],
    rhs: Shaped[Array, "*_ m b"],
    starts: Int[Array, "e h"],
    ends: Int[Array, "e h"],
    base: Int[Array, "e h"],
    *,
    dtype: Any,
    precision: Any,
    tallest: int | None,
    existing_out: Shaped[Array, "h a b"] | None,
    portable: bool,
) -> Shaped[Array, "h a b"]:
    """`out[i]` is the sum over `e` of `lhs[rows].T @ rhs[rows]`, where the rows are `starts[e, i]:ends[e, i]`.

    In an operand with a batch axis, they lie `base[e, i]` rows further down.
    """
    common = compute_dtype(lhs.dtype, rhs.dtype)
    accumulator = accumulator_dtype(common)
    (m, a), b, (elements, h) = lhs.shape[-2:], rhs.shape[-1], starts.shape
    operands = [(x.reshape(-1, x.shape[-1]), x.ndim > 2) for x in (lhs, rhs)]

    def tile(height: int, start: Array, end: Array, base: Array) -> Array:
        at, mine = _window(m, height, start, end)
        slices = [lax.dynamic_slice_in_dim(x, at + base if is_stacked else at, height) for x, is_stacked in operands]
        x, y = (jnp.where(mine, z, jnp.zeros((), z.dtype)).astype(common) for z in slices)
        return lax.dot_general(
            _transposed(x, portable),
            y,
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=accumulator,
        )

    def segment(start: Array, end: Array, base: Array) -> Array:
        # The partial tile comes first and starts the sum, so most groups need no addition.
        heights, full, rest, last = _tiles(m, end - start, tallest)
        middle = start + rest
        total = lax.switch(last, [partial(tile, height) for height in heights], start, middle, base)

        def add(step: Array, total: Array) -> Array:
            return total + tile(heights[-1], middle + step * heights[-1], end, base)

        return lax.fori_loop(_ZERO, full, add, total)

    def group(i: Array, out: Array) -> Array:
        if isinstance(elements, int) and elements == 1:  # it may be symbolic, under `jax.export`
            total = segment(starts[0, i], ends[0, i], base[0, i])
        else:

            def add(e: Array, total: Array) -> Array:
                return total + segment(starts[e, i], ends[e, i], base[e, i])

            total = lax.fori_loop(_ZERO, jnp.asarray(elements, jnp.int32), add, jnp.zeros((a, b), accumulator))
        if existing_out is not None:
            old = lax.dynamic_index_in_dim(out, i, 0, keepdims=False)
            total = add_wide(total, _from_carry(old, dtype))
        return lax.dynamic_update_index_in_dim(out, _to_carry(total.astype(dtype)), i, 0)

    out = jnp.zeros((h, a, b), dtype) if existing_out is None else existing_out
    out = _for_each(jnp.any(ends > starts, axis=0), (jnp.arange(h, dtype=jnp.int32),), group, _to_carry(out))
    return _from_carry(out, dtype)


_HEIGHTS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Tile heights. Powers of two alone were 7-10 % slower, finer steps no faster."""

_ZERO = np.int32(0)  # loops from it count in int32, under x64 too


def _tiles(m: Any, size: Array, tallest: int | None) -> tuple[list[int], Array, Array, Array]:
    """How `size` rows are covered: `full` tiles of the tallest height, and one more, the least that holds what remains.

    Returns the heights, `full`, the remaining rows (1 up to the tallest height), and the index of their tile's height.
    """
    # A tile as tall as the buffer would have its dot hoisted out of its loop, where there is more than one.
    heights = [t for t in _HEIGHTS if t < m and t <= (tallest or t)] or [min(m, tallest or m)]
    full = jnp.maximum(size - 1, 0) // heights[-1]
    rest = size - full * heights[-1]
    return heights, full, rest, jnp.asarray(np.searchsorted(heights, np.arange(heights[-1] + 1)), jnp.int32)[rest]


def _window(m: Any, height: int, start: Array, end: Array) -> tuple[Array, Array]:
    """Where to slice `height` rows from `start` on, moved up to fit the buffer; which of them are in `[start, end)`."""
    at = jnp.minimum(start, m - height)
    row = at + lax.iota(jnp.int32, height)
    return at, ((row >= start) & (row < end))[:, None]


def _for_each(chosen: Array, columns: tuple[Array, ...], body: Callable[..., Array], out: Array) -> Array:
    """`out = body(*row, out)`, in place, for each row of the table of `columns` that is chosen."""
    table = jnp.stack(columns, axis=1)[jnp.argsort(~chosen, stable=True)]

    def visit(number: Array, out: Array) -> Array:
        row = lax.dynamic_index_in_dim(table, number, 0, keepdims=False)
        return body(*(row[i] for i in range(len(columns))), out)

    return lax.fori_loop(_ZERO, jnp.sum(chosen, dtype=jnp.int32), visit, out)


def _transposed(x: Array, portable: bool) -> Array:
    """`x.T`, row by row in memory, as the fast dot wants it: behind a barrier, or XLA folds it into a slow dot.

    What pins the order in memory is a custom call that `jax.export` refuses. `portable` is slower without it.
    """
    if portable:
        return lax.optimization_barrier(x.T)
    return with_layout_constraint(lax.optimization_barrier(x).T, Layout((0, 1)))


# XLA before jaxlib 0.12 converts a whole 2-byte float array that a loop carries, at each trip. There, its bits are
# carried; from 0.12 on that would only cost a copy of the result at the end.
_CARRY_BITS = jax.__version_info__ < (0, 12)


def _to_carry(x: Array) -> Array:
    bits = _CARRY_BITS and x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating)
    return lax.bitcast_convert_type(x, jnp.uint16) if bits else x


def _from_carry(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def batched_matmul(
    lhs: Array,
    rhs: Array,
    *,
    axes: tuple[str, str, str],
    preferred_element_type: Any,
    precision: Any = None,
    tiling: dict[str, int] | None = None,
    existing_out: Array | None = None,
    target: Target = ANY_TARGET,
) -> Array:
    """Uniform × uniform: one `einsum` over the group axis.

    A batch axis of both operands is folded into the group axis, one of a single operand into the letter that it keeps.
    So a dot has three letters besides the groups: XLA's CPU backend can't run every other one in bfloat16.
    """
    common = compute_dtype(lhs.dtype, rhs.dtype)

    def dot(x: Array, y: Array, axes: tuple[str, str, str]) -> Array:
        return jnp.einsum(
            f"g{axes[0]},g{axes[1]}->g{axes[2]}",
            x,
            y,
            precision=precision,
            preferred_element_type=accumulator_dtype(common),
        )

    lhs, rhs = lhs.astype(common), rhs.astype(common)
    if lhs.ndim == rhs.ndim:
        out = dot(lhs.reshape(-1, *lhs.shape[-2:]), rhs.reshape(-1, *rhs.shape[-2:]), axes)
        out = out.reshape(*lhs.shape[:-2], *out.shape[-2:])
    else:
        (mapped, letters), (other, other_letters) = sorted(
            zip((lhs, rhs), axes, strict=False), key=lambda x: -x[0].ndim
        )
        kept, contracted = sorted(letters, key=lambda letter: letter not in axes[2])
        new = axes[2].replace(kept, "")
        rows = jnp.einsum(f"bg{letters}->gb{kept}{contracted}", mapped)
        folded = rows.reshape(rows.shape[0], -1, rows.shape[-1])
        out = dot(folded, other, (kept + contracted, other_letters, kept + new))
        out = jnp.einsum(f"gb{kept}{new}->bg{axes[2]}", out.reshape(*rows.shape[:-1], out.shape[-1]))
    out = out if existing_out is None else add_wide(out, existing_out)
    return out.astype(preferred_element_type)
