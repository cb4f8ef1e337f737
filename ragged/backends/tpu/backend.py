"""Grouped products as Pallas kernels for TPUs.

Four kernels, one shape: two operands stream through VMEM tile by tile, their product goes to a float32 accumulator,
and the accumulator to the result. They differ in what a step of the grid is.

    grouped_matmul              columns n × visits × tiles of k     a visit: a tile of rows, for one group
    transposed_grouped_matmul   tiles of a × tiles of b × visits    consecutive visits of a group add up
    batched_matmul              groups × rows × columns × tiles of k
    tiled_matmul                visits of all ragged letters: see `tiled`

The visits are listed by `schedule`: the scalar unit reads them, and there are as many as the run-time sizes need. A
visit's rows that are not the group's are never multiplied, a chunk at a time, or are masked.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from ragged.backends import schedule
from ragged.backends.base import (
    KERNELS,
    Launch,
    Refusal,
    Target,
    Work,
    choice,
    cost,
    finish,
    refuse,
    scale_ways,
    spans,
    too_old,
)
from ragged.backends.config import TpuConfig
from ragged.backends.schedule import Visits
from ragged.backends.tpu import scales as tpu_scales
from ragged.backends.tpu import tiled, tiles, units
from ragged.backends.tpu.launch import (
    Details,
    Kernel,
    accumulate,
    in_chunks,
    select_first,
    select_rows,
    with_batch,
)
from ragged.backends.tpu.tiles import Problem
from ragged.product.operands import Call, Operand, Operands, Term
from ragged.quant.formats import FORMATS

_UNITS = {name: known.tpu for name, known in FORMATS.items()}
_TAKES = (*KERNELS, "scales", "offset", "batch", "existing", "bias", "up", "up_bias")
_TAKES += ("grouped_matmul with an ending", "batched_matmul with an ending")
_PRECISIONS = ("none", "default", "high", "highest", "bfloat16", "float32", "fastest")


def plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    """How a kernel runs a product: see `ragged.backends.base`."""
    if refusal := _refuse(call, x, target):
        return refusal
    if call.product.kernel == "tiled_matmul":
        return tiled.plan(call, x, target)
    chip = tiles.chip(target.device)
    if target.interpret:  # on the CPU, where XLA multiplies no int4
        chip = chip._replace(narrow=tuple(each for each in chip.narrow if each[0] != "int4"))
    details = _details(call, x, chip)
    tiled_ = details.tiled

    def config(tile: Any) -> TpuConfig:
        return details.config(tiles.fit(tiled_, tile, chip), tiled_.buffers)

    found = choice(
        call,
        x,
        target,
        "pallas_tpu",
        legal=lambda config: _illegal(config, details, chip, call, x, target),
        tiled=lambda asked: config(tuple(asked[letter] for letter in tiled_.letters)),
        model=lambda: config(tiles.choose(tiled_, chip)),
    )
    if isinstance(found, Refusal):
        return found
    (rows, a, b), source = found[0].along(tiled_.letters), found[1]
    tiled_ = tiled_._replace(buffers=found[0].buffers)
    if tiles.vmem(tiled_, (rows, a, b)) > chip.vmem:
        return Refusal(
            f"`input_buffer_count` is {tiled_.buffers}: so many buffers don't fit into a TPU's VMEM.",
            "Take fewer: 2 is the default, 3 or 4 hide more latency.",
        )
    if tiles.smem(tiled_, (rows, a, b)) > tiles.SMEM:
        return Refusal(f"{tiled_.groups} groups in {tiled_.rows} rows: more than a TPU's scalar memory can list")
    heights = -(-tiled_.rows // rows)
    is_batched = tiled_.kind == "batched"
    visits = tiled_.groups * heights if is_batched else tiled_.elements * (heights + tiled_.groups - 1)
    return Launch(
        "pallas_tpu",
        call.product.kernel,
        call,
        target,
        config=found[0],
        source=source,
        visits=visits * -(-tiled_.a // a) * -(-tiled_.b // b),
        details=details._replace(tiled=tiled_),
        **cost(call, x),
    )


def candidates(launch: Launch, x: Operands) -> Iterator[TpuConfig]:
    """Configurations to try in place of the launch's, best by the model first."""
    if launch.kernel == "tiled_matmul":
        yield from tiled.candidates(launch)
        return
    for tile in tiles.ranked(launch.details.tiled, tiles.chip(launch.target.device)):
        for buffers in (2, 3):
            yield launch.details.config(tile, buffers)


def run(launch: Launch, x: Operands) -> Any:
    """Runs the kernel of a product: see `ragged.backends.base`."""
    kernel = {
        "batched_matmul": _batched,
        "grouped_matmul": _grouped,
        "transposed_grouped_matmul": _transposed_grouped,
        "tiled_matmul": tiled.run,
    }[launch.kernel]
    return kernel(launch, x)


def work(launch: Launch, x: Operands) -> Work:
    """What `schedule.row_visits` and `group_visits` list, and what of each tile is multiplied."""
    if launch.kernel == "tiled_matmul":
        return tiled.work(launch, x)
    problem = launch.details.tiled
    tile, a, b = launch.config.along(problem.letters)
    tiles_a, tiles_b, heights = (-(-n // t) for n, t in ((problem.a, a), (problem.b, b), (problem.rows, tile)))
    each = tiles_a * tiles_b
    if problem.kind == "batched":
        visits = problem.groups * heights * each
        return Work(visits, 0, 2 * visits * tile * a * b * problem.products)
    letter, small = problem.letters[0], tiles.chunk(tile)
    listed, rows, empty = [], 0, 0
    for group, (first, end) in enumerate(zip(*spans(launch.call, x)[letter], strict=True), int(x.offset or 0)):
        if first == end:
            empty += 1
            # For an empty group, a wgrad visits a tile, and multiplies the chunk that the group's place cuts, if any.
            rows += small * (problem.kind == "groups" and small < tile and first % small > 0)
        for at in range(first // tile * tile, end if end > first else 0, tile):
            low, high = max(first - at, 0), min(end - at, tile)
            # A tile that isn't full is multiplied in chunks: those with a row of the group.
            rows += tile if (low, high) == (0, tile) else (-(-high // small) - low // small) * small
            listed.append((group, int(at), tile))
    gaps = heights - len(np.unique([at for _, at, _ in listed]))
    idle = empty * each if problem.kind == "groups" else gaps * tiles_b
    flops = int(2 * rows * each * a * b) * problem.products
    return Work(len(listed) * each, int(idle), flops, letter, tuple(listed))


def _refuse(call: Call, x: Operands, target: Target) -> Refusal | None:
    """Why there is no kernel for such a product, or not with such tiles."""
    if len(x.sizes) > 1 and any(call.batched(x).sizes.values()):
        return Refusal("pallas_tpu has no tiled_matmul for sizes that differ between batch elements")
    if refusal := refuse("pallas_tpu", _UNITS, _TAKES, _PRECISIONS, call, x, target):
        return refusal
    generation = tiles.chip(target.device).generation
    if name := too_old(_UNITS, x, generation):
        return Refusal(f"TPUs of generation {generation} have no matrix units for {name}")
    return None if call.options.tiles is None else _wrong_units(call.options.tiles, call, x)


def _wrong_units(asked: dict[str, int], call: Call, x: Operands) -> Refusal | None:
    """Which tile isn't whole tiles of memory."""
    p, lhs, rhs = call.product, x.lhs.data, x.rhs.data
    extents = dict.fromkeys("mkn", 0)
    for letters, shape in ((p.lhs, lhs.shape), (p.rhs, rhs.shape), (p.out, call.shape)):
        extents |= {letter: max(extents[letter], n) for letter, n in zip(letters, shape[-2:], strict=True)}
    dtypes = (jnp.dtype(lhs.dtype), jnp.dtype(rhs.dtype), jnp.dtype(call.dtype))
    return tiles.refuse(asked, extents, p.ragged, dtypes)


def _illegal(
    config: TpuConfig, of: Details, chip: tiles.Chip, call: Call, x: Operands, target: Target
) -> Refusal | None:
    """Why a kernel can't have this configuration."""
    asked = dict(zip("mkn", config.along("mkn"), strict=True))
    if refusal := _wrong_units(asked, call, x):
        return refusal
    problem = of.tiled._replace(buffers=config.buffers)
    rows, a, b = config.along(problem.letters)
    for letter, tile, extent in zip(problem.letters, (rows, a, b), (problem.rows, problem.a, problem.b), strict=True):
        if tile > tiles.round_up(extent, tiles.LANES):
            return Refusal(f"tile_{letter}={tile} of an extent of {extent}.", "No tile is larger than its extent.")
    if of.lanes is not None and a < problem.a and a % of.lanes:
        letter = problem.letters[1]
        return Refusal(f"tile_{letter}={a} cuts a block of scales, {of.lanes}.", "A tile ends where a block does.")
    taken = tiles.vmem(problem, (rows, a, b))
    if not tiles.fits(problem, (rows, a, b), chip):
        # An error, lest another program be measured; but not before it is known which TPU it is for.
        mend = "Take smaller tiles or fewer buffers." if target.device is not None else ""
        return Refusal(f"{config} takes {taken} bytes of VMEM, of {chip.vmem}, or too long to compile.", mend)
    return None


def _details(call: Call, x: Operands, chip: tiles.Chip) -> Details:
    """What is to be tiled."""
    p, (a, b), batched, batch = call.product, call.terms(x), call.batched(x), call.batch(x) or 1
    (r, c), k = p.out, p.contracted
    kind = {"grouped_matmul": "rows", "transposed_grouped_matmul": "groups", "batched_matmul": "batched"}[p.kernel]
    # Blocks of whole lanes, in a wgrad of as many rows, have steps of their own.
    ways = scale_ways(call, x, tiles.LANES)
    wide = _scaled_dtype(a, b, ways)
    if wide == jnp.bfloat16:  # tiles hold them, which takes less than sums of steps
        ways = scale_ways(call, x, None)
    steps = [] if kind == "groups" or "tile" in ways else [term.block(k) or 0 for term in (a, b)]
    multiplied = (wide, wide) if "tile" in ways else (a.data.dtype, b.data.dtype)
    held = b.data.shape[-3] if kind == "rows" else call.shape[0]
    is_listed = any(batched.sizes.values()) or bool(batched.offset) or (kind == "groups" and not call.out_batch)
    order, extent = k + r + c if kind == "groups" else r + k + c, {r: call.shape[-2], c: call.shape[-1], k: a.extent(k)}
    tiled_ = Problem(
        kind,
        *(extent[letter] for letter in order),
        groups=held * batch if kind == "batched" else held,
        dtypes=(jnp.dtype(a.data.dtype), jnp.dtype(b.data.dtype), jnp.dtype(call.dtype)),
        dot=units.dot(*multiplied, chip),
        buffers=call.options.input_buffer_count,
        has_existing=x.epilogue.existing is not None,
        elements=batch if is_listed and kind != "batched" else 1,
        letters=order,
        products=call.num_products,
        results=call.num_stored,
    )
    return Details(tiled_, ways, math.gcd(*steps) or None)


def _scaled_dtype(a: Term, b: Term, ways: tuple[str, str]) -> Any:
    """What holds the tiles that scales are multiplied into, and the other operand's."""
    narrow = all(term.data.dtype.itemsize == 1 or term.data.dtype == jnp.bfloat16 for term in (a, b))
    scaled = [term for term, way in zip((a, b), ways, strict=True) if way in ("tile", "step")]
    exact = all(term.data.dtype.itemsize == 1 and term.scales and term.scales.e8m0 for term in scaled)
    return jnp.bfloat16 if narrow and exact else jnp.float32


def _grouped(launch: Launch, x: Operands) -> Any:
    """The result packs the ragged letter: `[m, k] × [h, k, n] -> [m, n]`, or `[h, n, k]`, read in place."""
    call, (a, b), problem = launch.call, launch.call.terms(x), launch.details.tiled
    (letter, contracted), batch = a.letters, call.batch(x)
    m, n, held = problem.rows, problem.b, problem.groups
    starts, ends = schedule.segments(x.sizes[letter], m, x.offset, held)
    by_row, a_scales = a.block(letter) is not None, a.scales
    if a_scales is not None and not by_row:
        a_scales = tpu_scales.held_scales(a_scales, x.offset, held)
    matrices = _matrices(b, x)
    scales = (
        tpu_scales.arrange(a_scales, 0, m, first=True, ndim=3 if by_row else 4),
        *(tpu_scales.arrange(each.scales, 1 - b.axis(contracted), n, first=False, ndim=4) for each in matrices),
    )
    kernel = Kernel(launch, scales)
    out = multiply_rows(
        with_batch(a.data, 2),
        tuple(with_batch(each.data, 3) for each in matrices),
        schedule.row_visits(jnp.atleast_2d(starts), jnp.atleast_2d(ends), m, kernel.tile[0]),
        None if x.epilogue.existing is None else with_batch(x.epilogue.existing, 2),
        _biases(x, len(matrices)),
        kernel=kernel,
        batch=batch or 1,
        by_visit=starts.ndim == 2,
        axes=(a.letters, b.letters),
    )
    return out if batch is not None else jax.tree.map(lambda each: each[0], out)


def _matrices(term: Term, x: Operands) -> list[Operand]:
    """Those that rows are multiplied with."""
    up = x.epilogue.up
    return [Operand(term.data, term.scales), *([] if up is None else [up])]


def _biases(x: Operands, count: int) -> tuple[Array | None, ...]:
    """A bias of each product, `[h, 1, n]` or `[1, 1, n]` float32."""
    return tuple(
        None if bias is None else bias.astype(jnp.float32).reshape(-1, 1, bias.shape[-1])
        for bias in (x.epilogue.bias, x.epilogue.up_bias)[:count]
    )


def multiply_rows(
    lhs: Array,
    rhs: tuple[Array, ...],
    visits: Visits,
    existing: Array | None,
    biases: tuple[Array | None, ...],
    *,
    kernel: Kernel,
    batch: int,
    by_visit: bool,
    axes: tuple[str, str],
) -> Any:
    """`[e, m, k] × [e, h, k, n] -> [e, m, n]`; an operand's `e` is `batch`, or 1. `axes` are the operands' letters.

    `rhs` and `biases` are one, or a gated product's two. `by_visit`: visits name the element; else each element has all
    of them. Long, as the kernel's body and the index maps of its blocks read the same visits.
    """
    axis = axes[1].index(axes[0][1])  # of a matrix of `rhs`: the contracted one
    m, k, n = kernel.problem.rows, kernel.problem.a, kernel.problem.b
    tm, tk, tn = kernel.tile
    steps, rest = -(-k // tk), k % tk
    grid = (-(-n // tn), 1 if by_visit else batch, visits.count[0], steps)

    def element(x: Array, b: Any, piece: Any, v: Visits) -> Any:
        return 0 if x.shape[0] == 1 else v.batch[piece] if by_visit else b

    def lhs_index(j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        piece = v.piece[at]
        resting = v.rest[piece] >= 0
        row = jnp.where(resting, v.rest[piece], v.tile[at])
        return element(lhs, b, piece, v), row, jnp.where(resting, 0, step)

    def rhs_index(j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        piece = v.piece[at]
        step = jnp.where(v.rest[piece] >= 0, 0, step)
        return element(rhs[0], b, piece, v), v.matrix[piece], *((j, step) if axis == 1 else (step, j))

    def out_index(j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        return (v.batch[v.piece[at]] if by_visit else b), v.tile[at], j

    def scale_index(values: Array, j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        # [e, m, blocks] or [e, h, 1, blocks]; [e, h, blocks, n] or [e, h, blocks, 1]
        lead = element(values, b, v.piece[at], v)
        if values.ndim == 3:
            return lead, lhs_index(j, b, at, step, v)[1]
        return lead, v.matrix[v.piece[at]], j

    def bias_index(rows: int, j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        return 0 if rows == 1 else v.matrix[v.piece[at]], 0, j

    def body(
        ids: Any,
        v: Visits,
        lhs: Any,
        rhs: Any,
        existing: Any,
        lhs_scales: Any,
        rhs_scales: Any,
        biases: Any,
        *refs: Any,
    ) -> None:
        outs, scratch = refs[: kernel.problem.results], refs[kernel.problem.results :]
        _, _, at, step = ids
        piece, before = v.piece[at], jnp.maximum(at - 1, 0)
        low, high = (jnp.clip(edge[piece] - v.tile[at] * tm, 0, tm) for edge in (v.start, v.end))
        is_full = (low == 0) & (high == tm)
        is_new = (at == 0) | (v.tile[before] != v.tile[at])
        if by_visit:
            is_new |= v.batch[v.piece[before]] != v.batch[piece]

        def multiply(rows: Any, is_last: bool) -> Iterator[Array]:
            x, begin = lhs[rows, :], 0 if steps == 1 else step * tk
            x = select_first(x, rest, 1) if is_last and rest else x
            for matrix, scales in zip(rhs, rhs_scales, strict=True):
                y = matrix[...]
                y = select_first(y, rest, axis) if is_last and rest else y
                yield kernel.multiply(x, y, 1, axis, row_scales(rows), scales, begin)

        def row_scales(rows: Any) -> Any:
            if lhs_scales is None or lhs_scales.shape[0] < tm:
                return lhs_scales
            return lhs_scales.at[rows, :]

        def store(rows: Any, masked: bool, totals: list[Array]) -> None:
            # What is there already: `existing`; where others have been, zeros or a neighbour's rows too.
            there = None if existing is None else (outs[0] if masked else existing)[rows, :]
            for out, total in zip(outs, kernel.ended(totals, row_scales(rows), rhs_scales, there, biases), strict=True):
                if masked:
                    row = rows.start + lax.broadcasted_iota(jnp.int32, total.shape, 0)
                    mine, wide = (row >= low) & (row < high), kernel.wide
                    total = jnp.where(mine, total.astype(wide), out[rows, :].astype(wide))
                out[rows, :] = total.astype(out.dtype)

        def visit(rows: Any, masked: bool) -> None:
            accumulate(step, steps, partial(multiply, rows), partial(store, rows, masked), scratch, rows)

        @pl.when(is_full)
        def _() -> None:
            visit(pl.ds(0, tm), False)

        @pl.when(jnp.logical_not(is_full))
        def _() -> None:
            @pl.when(is_new & (step == 0))
            def _() -> None:
                for out in outs:
                    out[...] = jnp.zeros_like(out) if existing is None else existing[...]

            in_chunks(low, high, tm, lambda rows: visit(rows, True))

    matrix = pl.BlockSpec((None, None, tn, tk) if axis == 1 else (None, None, tk, tn), rhs_index)
    lhs_scales, *rhs_scales = kernel.scales
    return kernel.run(
        body,
        visits,
        (lhs, rhs),
        (pl.BlockSpec((None, tm, tk), lhs_index), (matrix,) * len(rhs)),
        existing,
        (lhs_scales and lhs_scales.values, tuple(each and each.values for each in rhs_scales), biases),
        (
            tpu_scales.spec(lhs_scales, -2, tm, scale_index),
            tuple(tpu_scales.spec(each, -1, tn, scale_index) for each in rhs_scales),
            tuple(None if z is None else pl.BlockSpec((None, 1, tn), partial(bias_index, z.shape[0])) for z in biases),
        ),
        pl.BlockSpec((None, tm, tn), out_index),
        (batch, m, n),
        grid,
        ("parallel", "arbitrary", "arbitrary", "arbitrary"),
        [(tm, tn)] * len(rhs) if steps > 1 else [],
        name="grouped_matmul" + "_transposed" * axis,
        axes=axes,
    )


def _transposed_grouped(launch: Launch, x: Operands) -> Array:
    """The ragged letter is contracted: `[k, m] × [k, n] -> [h, m, n]`."""
    call, (a, b), problem = launch.call, launch.call.terms(x), launch.details.tiled
    letter, batch, held = a.letters[0], call.batch(x), problem.groups
    starts, ends = schedule.segments(x.sizes[letter], problem.rows, x.offset, held)
    starts, ends = (jnp.broadcast_to(z, (problem.elements, held)) for z in (starts, ends))
    tile, in_tile = launch.config.along(problem.letters)[0], "tile" in launch.details.ways
    scales = (
        tpu_scales.of_rows(a.scales, problem.a, True, x.offset, held, tile, in_tile),
        tpu_scales.of_rows(b.scales, problem.b, False, x.offset, held, tile, in_tile),
    )
    kernel, keeps_batch = Kernel(launch, scales), call.out_batch and batch is not None
    out = multiply_groups(
        with_batch(a.data, 2),
        with_batch(b.data, 2),
        schedule.group_visits(starts, ends, problem.rows, kernel.tile[0], not call.out_batch),
        None if x.epilogue.existing is None else with_batch(x.epilogue.existing, 3),
        kernel=kernel,
        batch=(batch or 1) if keeps_batch else 1,
        by_visit=problem.elements > 1,
        axes=(a.letters, b.letters),
    )
    return out if keeps_batch else out[0]


def multiply_groups(
    lhs: Array,
    rhs: Array,
    visits: Visits,
    existing: Array | None,
    *,
    kernel: Kernel,
    batch: int,
    by_visit: bool,
    axes: tuple[str, str],
) -> Array:
    """`[e, m, a], [e, m, b] -> [e, h, a, b]`, contracting each group's rows; the operands' `e` is the elements', or 1.

    `by_visit`: visits name the operands' element; the result's too, unless it has only one, which sums over them. Long
    for the same reason as `multiply_rows`.
    """
    a, b = kernel.problem.a, kernel.problem.b
    tm, ta, tb = kernel.tile
    grid = (-(-a // ta), -(-b // tb), 1 if by_visit else batch, visits.count[0])

    def element(extent: int, e: Any, piece: Any, v: Visits) -> Any:
        return 0 if extent == 1 else v.batch[piece] if by_visit else e

    def lhs_index(i: Any, j: Any, e: Any, at: Any, v: Visits) -> Any:
        return element(lhs.shape[0], e, v.piece[at], v), v.tile[at], i

    def rhs_index(i: Any, j: Any, e: Any, at: Any, v: Visits) -> Any:
        return element(rhs.shape[0], e, v.piece[at], v), v.tile[at], j

    def out_index(i: Any, j: Any, e: Any, at: Any, v: Visits) -> Any:
        piece = v.piece[at]
        return element(batch, e, piece, v), v.matrix[piece], i, j

    def scale_spec(which: int) -> pl.BlockSpec | None:
        def index(values: Array, i: Any, j: Any, e: Any, at: Any, v: Visits) -> Any:
            lead = element(values.shape[0], e, v.piece[at], v)
            return (lead, v.tile[at]) if by_row else (lead, v.matrix[v.piece[at]], (i, j)[which])

        def block_index(i: Any, j: Any, e: Any, at: Any, v: Visits) -> Any:
            return element(scales.values.shape[0], e, v.piece[at], v), v.tile[at], 0, (i, j)[which]

        # [e, m, blocks], by row; [e, h, a, 1] and [e, h, 1, b], by group; [e, tiles, blocks, a or b], by block of rows
        scales = kernel.scales[which]
        if isinstance(scales, tpu_scales.RowBlocks):
            return pl.BlockSpec((None, None, scales.values.shape[2], (ta, tb)[which]), block_index)
        by_row = scales is not None and scales.values.ndim == 3
        return tpu_scales.spec(scales, -2 if by_row else which - 2, tm if by_row else (ta, tb)[which], index)

    def body(
        ids: Any,
        v: Visits,
        lhs: Any,
        rhs: Any,
        existing: Any,
        lhs_scales: Any,
        rhs_scales: Any,
        out: Any,
        accumulator: Any,
    ) -> None:
        at = ids[3]
        piece = v.piece[at]
        low, high = (jnp.clip(edge[piece] - v.tile[at] * tm, 0, tm) for edge in (v.start, v.end))
        is_full = (low == 0) & (high == tm)

        def begins(other: Any) -> Any:
            """Whether another visit is for another matrix of the result."""
            differs = v.matrix[v.piece[other]] != v.matrix[piece]
            return differs | (v.batch[v.piece[other]] != v.batch[piece]) if by_visit and batch > 1 else differs

        is_first = (at == 0) | begins(jnp.maximum(at - 1, 0))
        end = v.count[0] - 1
        is_last = (at == end) | begins(jnp.minimum(at + 1, end))

        def mine(z: Array, first: Any, masked: bool) -> Array:
            return select_rows(z, low - first, high - first) if masked else z

        def multiply(rows: Any, masked: bool) -> Array:
            if kernel.scales_row_blocks:
                total = tpu_scales.row_block_products(
                    lambda x, y: kernel.dot(x, y, 0, 0),
                    (lhs, rhs),
                    rows,
                    (lhs_scales, rhs_scales),
                    (kernel.scales[0], kernel.scales[1]),
                    partial(mine, masked=masked),
                    lambda first: (first >= low) & (first < high) if masked else True,
                )
                return kernel.rescale(total, lhs_scales, rhs_scales)
            x, y = (
                tpu_scales.scale_rows(operand, rows, ref, blocks, start, kernel.problem.dot.lhs)
                for operand, ref, blocks, start in (
                    (lhs, lhs_scales, kernel.scales[0], ids[0] * ta),
                    (rhs, rhs_scales, kernel.scales[1], ids[1] * tb),
                )
            )
            total = kernel.dot(mine(x, rows.start, masked), mine(y, rows.start, masked), 0, 0)
            return kernel.rescale(total, lhs_scales, rhs_scales) if kernel.rescales_each else total

        def store(total: Array) -> None:
            total = total if kernel.rescales_each else kernel.rescale(total, lhs_scales, rhs_scales)
            total = finish(total, None if existing is None else existing[...], kernel.launch.call)
            out[...] = total.astype(out.dtype)

        is_alone = is_full & is_first & is_last

        @pl.when(is_alone)
        def _() -> None:
            store(multiply(pl.ds(0, tm), False))

        @pl.when(jnp.logical_not(is_alone))
        def _() -> None:
            @pl.when(is_first)
            def _() -> None:
                accumulator[...] = jnp.zeros_like(accumulator)

            @pl.when(is_full)
            def _() -> None:
                accumulator[...] += multiply(pl.ds(0, tm), False)

            @pl.when(jnp.logical_not(is_full))
            def _() -> None:
                def add(rows: Any) -> None:
                    accumulator[...] += multiply(rows, True)

                in_chunks(low, high, tm, add)

            @pl.when(is_last)
            def _() -> None:
                store(accumulator[...])

    return kernel.run(
        body,
        visits,
        (lhs, rhs),
        (pl.BlockSpec((None, tm, ta), lhs_index), pl.BlockSpec((None, tm, tb), rhs_index)),
        existing,
        tuple(each and each.values for each in kernel.scales),
        (scale_spec(0), scale_spec(1)),
        pl.BlockSpec((None, None, ta, tb), out_index),
        (batch, kernel.problem.groups, a, b),
        grid,
        ("parallel", "arbitrary", "arbitrary", "arbitrary"),
        [(ta, tb)],
        name="transposed_grouped_matmul",
        axes=axes,
    )


def _batched(launch: Launch, operands: Operands) -> Any:
    """No letter ragged: groups and elements of the batch alike. Operands are read as they are stored."""
    call, (x_term, y_term), existing = launch.call, launch.call.terms(operands), operands.epilogue.existing
    (row, column), contracted = call.product.out, call.product.contracted
    (x_letters, y_letters), leading = (x_term.letters, y_term.letters), call.batch(operands)
    matrices = _matrices(y_term, operands)
    x, ys = with_batch(x_term.data, 3), tuple(with_batch(each.data, 3) for each in matrices)
    extent = dict(zip(x_letters + y_letters, x.shape[2:] + ys[0].shape[2:], strict=True))
    elements, groups = leading or 1, call.shape[0]
    columns = y_term.axis(column), extent[column]
    scales = (
        tpu_scales.arrange(x_term.scales, x_term.axis(row), extent[row], first=True, ndim=4),
        *(tpu_scales.arrange(each.scales, *columns, first=False, ndim=4) for each in matrices),
    )
    kernel, biases = Kernel(launch, scales), _biases(operands, len(matrices))
    tile = dict(zip("mkn", kernel.config.along("mkn"), strict=True))
    steps, rest = -(-extent[contracted] // tile[contracted]), extent[contracted] % tile[contracted]
    axis_x, axis_y = x_letters.index(contracted), y_letters.index(contracted)

    def index(letters: str, z: Array) -> Any:
        def index_map(g: Any, e: Any, i: Any, j: Any, step: Any, _: Any) -> Any:
            at = {row: i, column: j, contracted: step}
            lead = [0 if extent == 1 else place for extent, place in zip(z.shape[:2], (e, g), strict=True)]
            return *lead, *(at[letter] for letter in letters)

        return index_map

    def scale_spec(which: int) -> pl.BlockSpec | None:
        def index(values: Array, g: Any, e: Any, i: Any, j: Any, step: Any, _: Any) -> Any:
            # [e, g, rows or 1, blocks]; [e, g, blocks, columns or 1]
            lead = [0 if extent == 1 else place for extent, place in zip(values.shape[:2], (e, g), strict=True)]
            return *lead, j if which else i

        return tpu_scales.spec(scales[which], -1 if which else -2, tile[column if which else row], index)

    def bias_index(rows: int, g: Any, e: Any, i: Any, j: Any, step: Any, _: Any) -> Any:
        return 0 if rows == 1 else g, 0, j

    def body(
        ids: Any, _: Any, x: Any, ys: Any, existing: Any, x_scales: Any, y_scales: Any, biases: Any, *refs: Any
    ) -> None:
        step, outs, scratch = ids[-1], refs[: kernel.problem.results], refs[kernel.problem.results :]

        def multiply(is_last: bool) -> Iterator[Array]:
            a, begin = x[...], 0 if steps == 1 else step * tile[contracted]
            a = select_first(a, rest, axis_x) if is_last and rest else a
            for y, its in zip(ys, y_scales, strict=True):
                b = y[...]
                b = select_first(b, rest, axis_y) if is_last and rest else b
                yield kernel.multiply(a, b, axis_x, axis_y, x_scales, its, begin)

        def store(totals: list[Array]) -> None:
            there = None if existing is None else existing[...]
            for out, total in zip(outs, kernel.ended(totals, x_scales, y_scales, there, biases), strict=True):
                out[...] = total.astype(out.dtype)

        accumulate(step, steps, multiply, store, scratch)

    def block(letters: str) -> tuple[Any, ...]:
        return None, None, *(tile[letter] for letter in letters)

    matrix = pl.BlockSpec(block(y_letters), index(y_letters, ys[0]))
    out = kernel.run(
        body,
        None,
        (x, ys),
        (pl.BlockSpec(block(x_letters), index(x_letters, x)), (matrix,) * len(ys)),
        None if existing is None else existing.reshape(elements, groups, *existing.shape[-2:]),
        (scales[0] and scales[0].values, tuple(each and each.values for each in scales[1:]), biases),
        (
            scale_spec(0),
            tuple(scale_spec(which) for which in range(1, len(scales))),
            tuple(
                None if z is None else pl.BlockSpec((None, 1, tile[column]), partial(bias_index, z.shape[0]))
                for z in biases
            ),
        ),
        pl.BlockSpec(block(row + column), lambda g, e, i, j, step, _: (e, g, i, j)),
        (elements, groups, extent[row], extent[column]),
        (groups, elements, -(-extent[row] // tile[row]), -(-extent[column] // tile[column]), steps),
        ("parallel", "parallel", "parallel", "parallel", "arbitrary"),
        [(tile[row], tile[column])] * len(ys) if steps > 1 else [],
        name="batched_matmul",
        axes=(x_letters, y_letters),
    )
    return out if leading is not None else jax.tree.map(lambda each: each[0], out)
