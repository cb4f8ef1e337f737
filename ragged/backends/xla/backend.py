"""Grouped products in plain XLA: no custom kernel, any platform, fast on the CPU."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import InconclusiveDimensionOperation

from ragged.backends import schedule
from ragged.backends.base import Launch, Refusal, Target, Work, choice, cost, finish, is_empty, spans
from ragged.backends.config import XlaConfig
from ragged.product.operands import Call, Operand, Operands
from ragged.quant.formats import accumulator_dtype, compute_dtype
from ragged.quant.scales import dequantized


def plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    """Every product has a kernel: see `ragged.backends.base`."""
    if is_empty(call, x):
        return Launch("xla", "zeros", call, target, config=XlaConfig(), source="model", **cost(call, x))
    try:
        found = choice(
            call,
            x,
            target,
            "xla",
            partial(_illegal, call, x),
            lambda tiling: XlaConfig(**_heights(call, x, tiling)),
            lambda: XlaConfig(**_heights(call, x, None), batched_rows=_batched_rows(call, x)),
        )
    except InconclusiveDimensionOperation:
        return Refusal(
            "the extent of a ragged dim is symbolic, and may be smaller than a tile.\n"
            f"Got lhs={x.lhs.data.shape}, rhs={x.rhs.data.shape}.",
            "Bound it, as in `jax.export.symbolic_shape('m', constraints=['m >= 513'])`, or leave the buffer's extent "
            "static: the sizes of the groups vary in any case.",
            NotImplementedError,
        )
    if isinstance(found, Refusal):
        return found
    config, source = found
    return Launch("xla", call.product.kernel, call, target, config=config, source=source, **cost(call, x))


def candidates(launch: Launch, x: Operands) -> Iterator[XlaConfig]:
    """Other heights to try in place of the launch's."""
    if launch.call.product.kernel == "tiled_matmul":
        chosen: XlaConfig = launch.config
        for factor in (0.5, 2.0, 0.25, 4.0):
            scaled = {z: tuple(max(8, int(height * factor)) for height in chosen.along(z)[0]) for z in "mkn"}
            yield XlaConfig(**scaled)
        return
    own: XlaConfig = launch.config
    yield from (replace(own, batched_rows=rows) for rows in dict.fromkeys((0, _batched_rows(launch.call, x), 16)))
    for letter, extent in _packed_extents(launch.call, x).items():
        for heights in (*_HEIGHTS[launch.kernel], (8, 16, 32, 64), (32, 128, 512), (64, 256)):
            if fitting := tuple(height for height in heights if height < extent):
                yield XlaConfig(**{letter: fitting})


def run(launch: Launch, x: Operands) -> Array:
    """The product. Operands with scales are dequantised: copies in memory, of a group's matrix where it is visited."""
    kernel = {
        "zeros": _zeros,
        "batched_matmul": _batched,
        "grouped_matmul": _grouped,
        "transposed_grouped_matmul": _transposed_grouped,
        "tiled_matmul": _tiled,
    }[launch.kernel]
    return kernel(*_without_scales(launch, x))


def _without_scales(launch: Launch, x: Operands) -> tuple[Launch, Operands]:
    """The same product of operands times their scales, but for matrices that the kernel multiplies with theirs."""
    call = launch.call
    if x.lhs.scales is None and x.rhs.scales is None:
        return launch, x
    wide, once = _accumulator(call, x), call.batch(x) in (None, 1)

    def times_scales(operand: Operand, letters: str) -> Operand:
        data, scales = operand
        in_loop = launch.kernel == "grouped_matmul" and call.product.is_uniform(letters) and (once or data.ndim == 4)
        if scales is None or (in_loop and math.prod(scales.values.shape[:-2]) in (1, math.prod(data.shape[:-2]))):
            return operand
        return Operand(dequantized(data, scales, x.sizes.get(letters[0]), wide))

    lhs, rhs = times_scales(x.lhs, call.product.lhs), times_scales(x.rhs, call.product.rhs)
    # A float32 operand's bits all count, whatever the platform's default precision is.
    options = call.options._replace(precision=call.options.precision or lax.Precision.HIGHEST)
    return replace(launch, call=call._replace(options=options)), x._replace(lhs=lhs, rhs=rhs)


def _illegal(call: Call, x: Operands, config: XlaConfig) -> Refusal | None:
    """Why a product can't have these heights."""
    p, extents = call.product, _packed_extents(call, x)
    for letter in p.ragged:
        heights = config.along(letter)[0]
        several = len(p.ragged) == 1
        if not heights or (len(heights) > 1 and not several):
            what = "at least one height" if several else "one height"
            return Refusal(
                f"`XlaConfig.{letter}` is {heights} for a ragged dim of a product with {len(p.ragged)} of them.",
                f"Give it {what}: `XlaConfig({letter}=(64,))`.",
            )
        if heights[-1] > extents[letter]:
            problem = f"`XlaConfig.{letter}` is {heights} for a buffer of {extents[letter]}."
            return Refusal(problem, "Heights must fit it.")
    if rows := config.batched_rows:
        if not _can_batch(call, x):
            return Refusal(
                f"`XlaConfig.batched_rows` is {rows} for a product that has no dot for all groups.", "Leave it 0."
            )
        if rows > extents[p.ragged]:
            problem = f"`XlaConfig.batched_rows` is {rows} for a buffer of {extents[p.ragged]}."
            return Refusal(problem, "They must fit it.")
    return None


def _packed_extents(call: Call, x: Operands) -> dict[str, Any]:
    """The least extent of the buffers along each ragged letter."""
    p, extents = call.product, {}
    for letters, shape in ((p.lhs, x.lhs.data.shape), (p.rhs, x.rhs.data.shape), (p.out, call.shape)):
        for letter, n in zip(letters, shape[-2:], strict=True):
            if letter in x.sizes:
                extents[letter] = min(extents.get(letter, n), n)
    return extents


def _heights(call: Call, x: Operands, tiling: dict[str, int] | None) -> dict[str, tuple[int, ...]]:
    p, (a, _) = call.product, call.terms(x)
    if len(p.ragged) == 1:
        m, tallest = a.extent(p.ragged), tiling[p.ragged] if tiling else None
        small, large = _HEIGHTS[p.kernel]
        flops = cost(call, x)["flops"]
        heights = small if flops is not None and flops < 2**29 else large
        # A tile as tall as the buffer would have its dot hoisted out of its loop, where there is more than one.
        several = tuple(t for t in heights if t < m and t <= (tallest or t))
        return {p.ragged: several or (min(m, tallest or m),)}
    tiles: dict[str, Any] = {}
    for (packed, other), shape in ((p.lhs, x.lhs.data.shape), (p.rhs, x.rhs.data.shape), (p.out, call.shape)):
        rows, columns = shape[-2:]
        if packed in x.sizes:
            tile = tiling[packed] if tiling else _mean_tile(rows, x.num_groups)
            tiles[packed] = min(tiles.get(packed, rows), rows, tile)
        if other in x.sizes:
            tiles[other] = min(tiles.get(other, columns), columns, tiling[other] if tiling else 256)
    return {letter: (tile,) for letter, tile in tiles.items()}


def _batched_rows(call: Call, x: Operands) -> int:
    """The mean group, where groups are so small that the tiles of a loop would mostly wait for each other."""
    rows = _packed_extents(call, x).get(call.product.ragged)
    if not _can_batch(call, x) or rows is None or rows > _BATCHED[call.product.kernel][0] * x.num_groups:
        return 0
    return min(max(_mean_group(rows, x.num_groups), 16), rows)


def _batched_dtype(call: Call, common: Any) -> Any:
    """Of the dot for all groups, whose result is written once and read again, all of it.

    A bfloat16 one is rounded by the dot itself, from the same float32 sum.
    """
    return common if common == call.dtype == jnp.bfloat16 else accumulator_dtype(common)


def _can_batch(call: Call, x: Operands) -> bool:
    """Whether one dot can multiply the first rows of all groups."""
    p, (a, b), batch = call.product, call.terms(x), call.batch(x)
    if p.kernel == "grouped_matmul":  # every segment's matrix is read where it lies
        is_plain = b.scales is None and b.data.dtype == compute_dtype(a.data.dtype, b.data.dtype)
        fits = is_plain and (batch in (None, 1) or b.data.ndim == 4)
    elif p.kernel == "transposed_grouped_matmul":  # every matrix is written once, and is the sum over one segment
        fits = x.epilogue.existing is None and (batch in (None, 1) or call.out_batch)
    else:
        return False
    return fits and all(isinstance(extent, int) for extent in (*a.data.shape, x.num_groups, batch or 1))


def _zeros(launch: Launch, x: Operands) -> Array:
    """There is nothing to multiply."""
    call, batch, existing = launch.call, launch.call.batch(x), x.epilogue.existing
    shape = (batch, *call.shape) if batch is not None and call.out_batch else call.shape
    return jnp.zeros(shape, call.dtype) if existing is None else existing


def _tiled(launch: Launch, x: Operands) -> Array:
    """Two or three letters ragged, tile by tile.

    Every term holds a ragged letter, so every buffer is `[packed, other]`, with a batch axis or without. A tile spans
    the whole of a letter that isn't ragged. FLOPs: what the groups need, rounded up to whole tiles along ragged
    letters. Long, as it is the body of three loops, which share where the group lies.
    """
    call, p, sizes, existing = launch.call, launch.call.product, x.sizes, x.epilogue.existing
    lhs, rhs, batch, num_groups = x.lhs.data, x.rhs.data, call.batch(x), x.num_groups
    tiles: dict[str, int] = {letter: launch.config.along(letter)[0][0] for letter in p.ragged}
    terms: dict[str, str] = {"lhs": p.lhs, "rhs": p.rhs, "out": p.out}
    shapes: dict[str, tuple[int, ...]] = {"lhs": lhs.shape, "rhs": rhs.shape, "out": call.shape}
    batched: dict[str, bool] = {"lhs": lhs.ndim == 3, "rhs": rhs.ndim == 3, "out": batch is not None}
    contracted = p.contracted

    # A batch element is `num_groups` further groups: sizes that fit every buffer, and where each group starts in each
    # buffer, both `[batch * g]`.
    def flat(x: Array) -> Array:
        return jnp.broadcast_to(x, (batch or 1, num_groups)).reshape(-1).astype(jnp.int32)

    length = {letter: flat(jnp.maximum(size, 0)) for letter, size in sizes.items()}
    starts = {}
    for term, (packed, other) in terms.items():
        rows, columns = shapes[term][-2:]
        if packed in sizes:
            offsets = schedule.group_offsets(sizes[packed], rows)
            begin = offsets[..., :-1]
            length[packed] = jnp.minimum(length[packed], flat(offsets[..., 1:] - begin))
            if batched[term]:
                begin = begin.reshape(-1, num_groups) + (rows * jnp.arange(batch or 1, dtype=jnp.int32))[:, None]
            starts[term] = flat(begin)
        if other in sizes:
            length[other] = jnp.minimum(length[other], columns)

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
            *operands,
            dimension_numbers=(contract, ((), ())),
            precision=call.options.precision,
            preferred_element_type=accumulator,
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
        new = finish(total, None if existing is None else old, call).astype(call.dtype)
        new = jnp.where(inside("out", terms["out"], group, at), new, old)
        return lax.dynamic_update_slice(out, new, begin)

    def all_tiles(group: Array, out: Array) -> Array:
        count = {letter: -(-length[letter][group] // tiles[letter]) for letter in sizes}
        visits = jnp.prod(jnp.stack([count[letter] for letter in kept]))
        return lax.fori_loop(0, visits, partial(visit, group, count), out)

    full = call.shape if batch is None else (batch, *call.shape)
    out = padded(jnp.zeros(full, call.dtype) if existing is None else existing, terms["out"])
    out = lax.fori_loop(0, (batch or 1) * num_groups, all_tiles, out)
    return out[: out.shape[0] - tiles[terms["out"][0]], : call.shape[-1]].reshape(full)


def _mean_tile(rows: int | Any, num_groups: int) -> int:
    """About the mean group, a power of two in 16..256."""
    if not (isinstance(rows, int) and isinstance(num_groups, int)):  # symbolic, under `jax.export`
        return 256
    return int(np.clip(_mean_group(rows, num_groups), 16, 256))


def _mean_group(rows: int, num_groups: int) -> int:
    """The rows of a mean group, rounded up to a power of two."""
    return 1 << (max(rows // max(num_groups, 1), 1) - 1).bit_length()


def _grouped(launch: Launch, x: Operands) -> Array:
    """The result packs the ragged letter: `[m, k] × [h, k, n] -> [m, n]`, or `[h, n, k]`, read in place.

    Rows `starts[i]:ends[i]` of an element times `rhs[index[i]]`, all `base[i]` rows further down; other rows are zero.
    """
    call, (a, b), existing, batch = launch.call, launch.call.terms(x), x.epilogue.existing, launch.call.batch(x)
    letter, contracted = a.letters
    m, n, held, elements = a.extent(letter), call.shape[-1], b.data.shape[-3], 1 if batch is None else batch
    starts, ends = schedule.segments(x.sizes[letter], m, x.offset, held)
    # A batch element is `held` further segments of operands that are read in place, mapped or not.
    element = jnp.arange(elements, dtype=jnp.int32)[:, None]
    index = jnp.arange(held, dtype=jnp.int32)[None] + (held * element if b.data.ndim == 4 else 0)
    starts, ends, index, base = (
        jnp.broadcast_to(z, (elements, held)).reshape(-1) for z in (starts, ends, index, m * element)
    )
    lhs, rhs, is_stacked = a.data.reshape(-1, a.data.shape[-1]), b.data.reshape(-1, *b.data.shape[-2:]), a.data.ndim > 2
    weight_dtype = rhs.dtype if b.scales is None else _accumulator(call, x)
    common = compute_dtype(lhs.dtype, weight_dtype)
    accumulator, heights = accumulator_dtype(common), launch.config.along(letter)[0]
    dims, cover = (((1,), (b.axis(contracted),)), ((), ())), _cover(heights)

    def put(y: Array, at: Array, mine: Array, out: Array) -> Array:
        old = _slice(out, at, y.shape[0])
        y = finish(y, None if existing is None else _from_carry(old, call.dtype), call).astype(call.dtype)
        return _put(out, jnp.where(mine, _to_carry(y), old), at)  # a neighbour's rows stay

    def matrix(which: Array) -> Array:
        weight = _slice(rhs, which, 1)
        if b.scales is not None:
            values = b.scales.values.reshape(-1, *b.scales.values.shape[-2:])
            own = replace(b.scales, values=values if values.shape[0] == 1 else _slice(values, which, 1))
            weight = dequantized(weight, own, dtype=weight_dtype)
        return weight[0].astype(common)

    def segment(start: Array, end: Array, which: Array, base: Array, out: Array) -> Array:
        weight = matrix(which)

        def visit(height: int, start: Array, out: Array) -> Array:
            at, mine = _window(m, height, start, end)
            x = _slice(lhs, at + base if is_stacked else at, height).astype(common)
            y = lax.dot_general(x, weight, dims, call.options.precision, accumulator)
            return put(y, at + base, mine, out)

        def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            start, out = carry
            choice = _slice(cover, jnp.minimum(end - start, heights[-1]), 1)[0]
            out = lax.switch(choice, [partial(visit, height) for height in heights], start, out)
            return start + _slice(np.asarray(heights, np.int32), choice, 1)[0], out

        return lax.while_loop(lambda carry: carry[0] < end, step, (start, out))[1]

    out = jnp.zeros((elements * m, n), call.dtype) if existing is None else existing.reshape(elements * m, n)
    out = _to_carry(out)
    if rows := launch.config.batched_rows:
        result = accumulator if existing is not None else _batched_dtype(call, common)

        def first_rows(starts: Array) -> Array:
            at = jnp.minimum(starts, m - rows)
            x = _slices(lhs, at + base if is_stacked else at, rows).astype(common)
            ((kept,), (other,)), _ = dims
            batched = ((kept + 1,), (other + 1,)), ((0,), (0,))
            return lax.dot_general(x, rhs, batched, call.options.precision, result)

        def store(start: Array, end: Array, which: Array, base: Array, out: Array) -> Array:
            at, mine = _window(m, rows, start, end)
            return put(_slice(y, which, 1)[0], at + base, mine, out)

        batch_them = _is_worth(launch, x, ends - starts)
        zeros = jnp.zeros((elements * held, rows, n), result)
        y = lax.cond(batch_them, first_rows, lambda _: zeros, starts)
        rest = jnp.minimum(ends, starts + jnp.where(batch_them, rows, 0))
        out = _for_each(rest > starts, (starts, rest, index, base), store, out)
        starts = rest
    out = _for_each(ends > starts, (starts, ends, index, base), segment, out)
    out = _from_carry(out, call.dtype)
    return out if batch is None else out.reshape(batch, m, n)


def _transposed_grouped(launch: Launch, x: Operands) -> Array:
    """The ragged letter is contracted: `[k, m] × [k, n] -> [h, m, n]`.

    `out[i]` is the sum over `e` of `lhs[rows].T @ rhs[rows]`, where the rows are `starts[e, i]:ends[e, i]`. In an
    operand with a batch axis they lie `base[e, i]` rows further down.
    """
    call, terms, existing, batch = launch.call, launch.call.terms(x), x.epilogue.existing, launch.call.batch(x)
    letter, held = terms[0].letters[0], call.shape[0]
    k, elements, keeps_batch = (
        terms[0].extent(letter),
        1 if batch is None else batch,
        call.out_batch and batch is not None,
    )
    starts, ends = schedule.segments(x.sizes[letter], k, x.offset, held)
    base = k * jnp.arange(elements, dtype=jnp.int32)[:, None]
    starts, ends, base = (jnp.broadcast_to(z, (elements, held)) for z in (starts, ends, base))
    if keeps_batch:  # a batch element is `held` further matrices
        starts, ends, base = (z.reshape(1, -1) for z in (starts, ends, base))
    operands = [(term.data.reshape(-1, term.data.shape[-1]), term.data.ndim > 2) for term in terms]
    common = compute_dtype(operands[0][0].dtype, operands[1][0].dtype)
    accumulator, heights, (summed, h) = accumulator_dtype(common), launch.config.along(letter)[0], starts.shape

    # The index of the least height that holds so many rows.
    least = np.searchsorted(heights, np.arange(heights[-1] + 1)).astype(np.int32)

    def tile(height: int, start: Array, end: Array, base: Array) -> Array:
        at, mine = _window(k, height, start, end)
        slices = [_slice(z, at + base if is_stacked else at, height) for z, is_stacked in operands]
        left, right = (jnp.where(mine, z, jnp.zeros((), z.dtype)).astype(common) for z in slices)
        left = _transposed(left, launch.target.portable)
        return lax.dot_general(left, right, (((1,), (0,)), ((), ())), call.options.precision, accumulator)

    def segment(start: Array, end: Array, base: Array) -> Array:
        # The partial tile comes first and starts the sum, so most groups need no addition.
        full = jnp.maximum(end - start - 1, 0) // heights[-1]
        middle = end - full * heights[-1]
        last = _slice(least, middle - start, 1)[0]
        total = lax.switch(last, [partial(tile, height) for height in heights], start, middle, base)

        def add(step: Array, total: Array) -> Array:
            return total + tile(heights[-1], middle + step * heights[-1], end, base)

        return lax.fori_loop(_ZERO, full, add, total)

    def group(i: Array, out: Array) -> Array:
        if isinstance(summed, int) and summed == 1:  # it may be symbolic, under `jax.export`
            total = segment(starts[0, i], ends[0, i], base[0, i])
        else:

            def add(e: Array, total: Array) -> Array:
                return total + segment(starts[e, i], ends[e, i], base[e, i])

            zeros = jnp.zeros(call.shape[1:], accumulator)
            total = lax.fori_loop(_ZERO, jnp.asarray(summed, jnp.int32), add, zeros)
        old = None
        if is_added or existing is not None:
            old = _from_carry(_slice(out, i, 1)[0], call.dtype)
        total = finish(total, old, call).astype(call.dtype)
        return _put(out, _to_carry(total)[None], i)

    shape = (h, *call.shape[1:])
    is_added = bool(launch.config.batched_rows) and _in_two_parts(launch, x)
    if rows := launch.config.batched_rows:
        result = _batched_dtype(call, common)

        def first_rows(starts: Array) -> Array:
            at, mine = jax.vmap(partial(_window, k, rows))(starts, ends[0])
            slices = [_slices(z, at + base[0] if is_stacked else at, rows) for z, is_stacked in operands]
            left, right = (jnp.where(mine, z, jnp.zeros((), z.dtype)).astype(common) for z in slices)
            left = _transposed(left, launch.target.portable)
            dims = (((2,), (1,)), ((0,), (0,)))
            return lax.dot_general(left, right, dims, call.options.precision, result).astype(call.dtype)

        batch_them = _is_worth(launch, x, ends[0] - starts[0])
        out = lax.cond(batch_them, first_rows, lambda _: jnp.zeros(shape, call.dtype), starts[0])
        done = jnp.where(batch_them, rows, 0)
        chosen = ends[0] - starts[0] > done
        if is_added:
            starts = jnp.minimum(ends, starts + done)
    else:
        out = jnp.zeros(shape, call.dtype) if existing is None else existing.reshape(shape)
        chosen = jnp.any(ends > starts, axis=0)
    out = _for_each(chosen, (jnp.arange(h, dtype=jnp.int32),), group, _to_carry(out))
    out = _from_carry(out, call.dtype)
    return out.reshape(batch, held, *call.shape[1:]) if keeps_batch else out


_HEIGHTS = {
    "grouped_matmul": ((16, 64, 256), (16, 32, 48, 64, 96, 128, 160, 192, 256, 512)),
    "transposed_grouped_matmul": (
        (32, 64, 128, 256),
        (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512),
    ),
}
"""Tile heights of small products and of large ones.

Each takes about 40 ms to compile. Without the further ones, a product takes 5 to 10 % longer to run.
"""

_OVERHEAD = 24
"""What a tile costs beyond its rows, in rows: 20 to 40 were measured."""

_BATCHED = {"grouped_matmul": (16, 24), "transposed_grouped_matmul": (64, 128)}
"""Up to which mean group one dot multiplies the first rows of all; what a group costs more in the loop, in rows.

Measured with random, Zipf and even sizes at means of 4 to 128, float32 and bfloat16. A wgrad's loop zeroes the result
first, and copies each sum into it.
"""

_ZERO = np.int32(0)  # loops from it count in int32, under x64 too


@cache
def _cover(heights: tuple[int, ...]) -> np.ndarray:
    """Which of the heights the first tile of `0, 1, ..., heights[-1]` remaining rows has, `(heights[-1] + 1,)`.

    It covers them at the least cost, where a tile costs its rows and `_OVERHEAD` more; more rows than that begin with a
    tile of the tallest height.
    """
    cost, first = np.zeros(heights[-1] + 1), np.zeros(heights[-1] + 1, np.int32)
    for rows in range(1, heights[-1] + 1):
        costs = [height + _OVERHEAD + cost[max(rows - height, 0)] for height in heights]
        first[rows] = np.argmin(costs)
        cost[rows] = costs[first[rows]]
    return first


def _covered(heights: tuple[int, ...], first: int, end: int, is_contracted: bool) -> list[tuple[int, int]]:
    """The tiles of a group whose size is known: where each begins, and its height."""
    tiles = []
    if is_contracted:  # the partial tile comes first
        rest = first + (end - first - 1) % heights[-1] + 1 if end > first else end
        tiles = [(first, heights[np.searchsorted(heights, rest - first)])] if end > first else []
        return tiles + [(at, heights[-1]) for at in range(rest, end, heights[-1])]
    while first < end:
        tiles.append((first, heights[_cover(heights)[min(end - first, heights[-1])]]))
        first += tiles[-1][1]
    return tiles


def work(launch: Launch, x: Operands) -> Work:
    """What the loops come to: see `ragged.backends.base`."""
    p, groups = launch.call.product, spans(launch.call, x)
    size = {letter: end - first for letter, (first, end) in groups.items()}
    if not p.ragged:
        return Work(len(size["m"]), 0, 2 * int(sum(size["m"] * size["k"] * size["n"])))
    tile = {z: launch.config.along(z)[0][-1] if z in p.ragged else int(size[z][0]) for z in "mkn"}
    letter = p.ragged if len(p.ragged) == 1 else p.out[0]
    tiles, rows = [], launch.config.batched_rows
    is_batched = rows and bool(_is_worth(launch, x, size[letter], np))
    in_two_parts = _in_two_parts(launch, x)
    for group, (first, end) in enumerate(zip(*groups[letter], strict=True), int(x.offset or 0)):
        if is_batched:  # of each group that is held, empty or not
            tiles.append((group, int(first), rows))
            first = min(first + rows, end) if in_two_parts or end - first <= rows else first
        if len(p.ragged) > 1:
            covered = [(at, tile[letter]) for at in range(first, end, tile[letter])]
        else:
            covered = _covered(launch.config.along(letter)[0], first, end, letter == p.contracted)
        tiles += [(group, int(at), int(height)) for at, height in covered]
    if len(p.ragged) == 1:
        multiplied = sum(height for *_, height in tiles)
        return Work(
            len(tiles), 0, 2 * multiplied * math.prod(tile[z] for z in "mkn" if z != letter), letter, tuple(tiles)
        )
    visits = int(np.sum(np.prod([-(-size[z] // tile[z]) for z in "mkn"], axis=0)))
    return Work(visits, 0, 2 * visits * math.prod(tile.values()), letter, tuple(tiles))


def _window(m: Any, height: int, start: Array, end: Array) -> tuple[Array, Array]:
    """Where to slice `height` rows from `start` on, moved up to fit the buffer; which of them are in `[start, end)`."""
    at = jnp.minimum(start, m - height)
    row = lax.iota(jnp.int32, height) - (start - at)
    # As unsigned numbers, rows before the start are past the end too.
    return at, (row.astype(jnp.uint32) < (end - start).astype(jnp.uint32))[:, None]


def _is_worth(launch: Launch, x: Operands, sizes: Any, numpy: Any = jnp) -> Any:
    """Whether one dot for the first `batched_rows` rows of all groups costs less than the tiles that it saves."""
    rows, overhead = launch.config.batched_rows, _BATCHED[launch.kernel][1]
    longer = rows if _in_two_parts(launch, x) else 0
    saved = numpy.where(sizes > rows, longer, numpy.where(sizes > 0, sizes + overhead, 0))
    return numpy.sum(saved, dtype=np.int32) > np.int32(rows * saved.shape[0])


def _in_two_parts(launch: Launch, x: Operands) -> bool:
    """Whether a group with more than `batched_rows` rows is multiplied in two parts: those rows, and the others.

    A wgrad is their sum. Where the result's dtype would round that twice, such a group is multiplied as a whole.
    """
    return launch.kernel == "grouped_matmul" or launch.call.dtype == _accumulator(launch.call, x)


def _accumulator(call: Call, x: Operands) -> Any:
    """The dtype of the sums."""
    if x.lhs.scales is None and x.rhs.scales is None:
        return accumulator_dtype(compute_dtype(x.lhs.data.dtype, x.rhs.data.dtype))
    # Operands with scales are dequantised to it.
    return jnp.float64 if jnp.float64 in (x.lhs.data.dtype, x.rhs.data.dtype, call.dtype) else jnp.float32


def _slice(x: Array | Any, at: Any, size: int) -> Array:
    rows = lax.dynamic_slice_in_dim(_to_carry(x), at, size, allow_negative_indices=False)
    return _from_carry(rows, x.dtype)


_slices = jax.vmap(_slice, in_axes=(None, 0, None))
_put = partial(lax.dynamic_update_slice_in_dim, axis=0, allow_negative_indices=False)


def _for_each(chosen: Array, columns: tuple[Array, ...], body: Callable[..., Array], out: Array) -> Array:
    """`out = body(*row, out)`, in place, for each row of the table of `columns` that is chosen."""
    count = jnp.asarray(chosen.shape[0], jnp.int32)
    # The first chosen row from each one on; `count` where there is none.
    following = lax.cummin(jnp.where(chosen, jnp.arange(chosen.shape[0], dtype=jnp.int32), count), reverse=True)
    following = jnp.concatenate([following, count[None]])
    # Sizes that are constants of the program would have XLA fold the loop away, and with it the form of a bfloat16 dot
    # that its CPU backend can run. What comes before the barrier is computed once for all products of the same groups.
    following, columns = lax.optimization_barrier((following, columns))

    def visit(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        number, out = carry
        out = body(*(_slice(column, number, 1)[0] for column in columns), out)
        return _slice(following, number + 1, 1)[0], out

    return lax.while_loop(lambda carry: carry[0] < count, visit, (following[0], out))[1]


def _transposed(x: Array, portable: bool) -> Array:
    """`x.T`, row by row in memory, as the fast dot wants it: behind a barrier, or XLA folds it into a slow dot.

    What pins the order in memory is a custom call that `jax.export` refuses. `portable` is slower without it.
    """
    if portable:
        return lax.optimization_barrier(x.mT)
    return with_layout_constraint(lax.optimization_barrier(x).mT, Layout(tuple(range(x.ndim))))


# XLA's CPU backend converts a whole array of 8-bit floats that a loop slices or carries, at each trip; before jaxlib
# 0.12 one of 16-bit floats too. From there on, the bits of these would only cost a copy of the result at the end.
_AS_BITS = {8: jnp.uint8, 4: jnp.uint4} | ({16: jnp.uint16} if jax.__version_info__ < (0, 12) else {})


def _to_carry(x: Array) -> Array:
    bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else None
    return lax.bitcast_convert_type(x, _AS_BITS[bits]) if bits in _AS_BITS else x


def _from_carry(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _batched(launch: Launch, x: Operands) -> Array:
    """No letter ragged: one `einsum` over the group axis.

    A batch axis of both operands is folded into the group axis, one of a single operand into the letter that it keeps.
    So a dot has three letters besides the groups: XLA's CPU backend can't run every other one in bfloat16.
    """
    call, p, existing = launch.call, launch.call.product, x.epilogue.existing
    common = compute_dtype(x.lhs.data.dtype, x.rhs.data.dtype)

    def dot(lhs: Array, rhs: Array, axes: tuple[str, str, str]) -> Array:
        return jnp.einsum(
            f"g{axes[0]},g{axes[1]}->g{axes[2]}",
            lhs,
            rhs,
            precision=call.options.precision,
            preferred_element_type=accumulator_dtype(common),
        )

    lhs, rhs = x.lhs.data.astype(common), x.rhs.data.astype(common)
    if lhs.ndim == rhs.ndim:
        out = dot(lhs.reshape(-1, *lhs.shape[-2:]), rhs.reshape(-1, *rhs.shape[-2:]), (p.lhs, p.rhs, p.out))
        out = out.reshape(*lhs.shape[:-2], *out.shape[-2:])
    else:
        (mapped, letters), (other, other_letters) = sorted(((lhs, p.lhs), (rhs, p.rhs)), key=lambda term: -term[0].ndim)
        kept, contracted = sorted(letters, key=lambda letter: letter not in p.out)
        new = p.out.replace(kept, "")
        rows = jnp.einsum(f"bg{letters}->gb{kept}{contracted}", mapped)
        folded = rows.reshape(rows.shape[0], -1, rows.shape[-1])
        out = dot(folded, other, (kept + contracted, other_letters, kept + new))
        out = jnp.einsum(f"gb{kept}{new}->bg{p.out}", out.reshape(*rows.shape[:-1], out.shape[-1]))
    return finish(out, existing, call).astype(call.dtype)
