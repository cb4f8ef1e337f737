"""Grouped products as Pallas kernels for TPUs.

Four kernels, one shape: two operands stream through VMEM tile by tile, their product goes to a float32 accumulator,
and the accumulator to the result. They differ in what a step of the grid is.

    grouped_matmul              columns n × visits × tiles of k     a visit: a tile of rows, for one group
    transposed_grouped_matmul   tiles of a × tiles of b × visits    consecutive visits of a group add up
    batched_matmul              groups × rows × columns × tiles of k
    tiled_matmul                visits of all ragged letters: see `pallas_tpu_tiled`

The visits are listed by `schedule`: the scalar unit reads them, and there are as many as the run-time sizes need. A
visit's rows that are not the group's are never multiplied, a chunk at a time, or are masked.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ragged.kernels import ANY_TARGET, Known, Scales, Target, lacking, schedule, tpu_scales, tpu_tiling
from ragged.kernels.pallas_tpu_tiled import tiled_matmul as tiled_matmul
from ragged.kernels.schedule import Visits
from ragged.kernels.tpu_launch import (
    Launch,
    accumulate,
    dtypes_of,
    in_chunks,
    select_first,
    select_rows,
    with_batch,
)
from ragged.kernels.tpu_tiling import Problem
from ragged.kernels.xla import add_wide, batch_size

_KNOWN = Known(
    operands=("bfloat16", "float32", "int8", "int4", "float8_e4m3fn", "float8_e5m2"),
    results=("bfloat16", "float32", "int32", "int8", "float8_e4m3fn", "float8_e5m2"),
    precisions=("none", "default", "high", "highest", "bfloat16", "float32", "fastest"),
)


def lacks(kernel: str, lhs: Any, rhs: Any, sizes: tuple[Any, ...], out: Any, precision: Any, target: Target) -> str:
    """Why this backend has no kernel for such a product; "" if it has one. `out` is an aval, the others may be."""
    if kernel == "tiled_matmul" and any(dims.ndim > 1 for dims in sizes):
        return "pallas_tpu has no tiled_matmul for sizes that differ between batch elements"
    if target.automatic:
        return "XLA partitions no Pallas kernels over devices; inside a `jax.shard_map` over all mesh axes there is one"
    if why := lacking("pallas_tpu", _KNOWN, lhs, rhs, sizes, out, precision):
        return why
    generation = tpu_tiling.chip(target.device).generation
    bytes_ = [jnp.dtype(x.dtype).name for x in (lhs, rhs) if jnp.dtype(x.dtype).itemsize == 1]
    if generation < 5 and bytes_:
        return f"TPUs of generation {generation} have no matrix units for {bytes_[0]}"
    return ""


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
    lhs_scales: Scales | None = None,
    rhs_scales: Scales | None = None,
    target: Target = ANY_TARGET,
) -> Array:
    """`[m, k] × [h, k, n] -> [m, n]`: see the contract in `ragged.kernels`."""
    (m, k), held = lhs.shape[-2:], rhs.shape[-3]
    n = rhs.shape[-2 if transpose_rhs else -1]
    starts, ends = schedule.segments(group_sizes, m, group_offset, held)
    by_visit = starts.ndim == 2
    by_row = lhs_scales is not None and lhs_scales.block[0] is not None
    if lhs_scales is not None and not by_row:
        lhs_scales = tpu_scales.held_scales(lhs_scales, group_offset, held)
    scales = (
        tpu_scales.arrange(lhs_scales, 0, m, first=True, ndim=3 if by_row else 4),
        tpu_scales.arrange(rhs_scales, 0 if transpose_rhs else 1, n, first=False, ndim=4),
    )
    dtypes = dtypes_of(lhs, rhs, preferred_element_type, tpu_scales.dequantized(*scales))
    starts, ends = jnp.atleast_2d(starts), jnp.atleast_2d(ends)
    elements = starts.shape[0]
    problem = Problem("rows", m, k, n, held, *dtypes, target.input_buffer_count, existing_out is not None, elements)
    call = Launch(problem, tiling, target, precision, scales)
    call.check_length()
    visits = schedule.row_visits(starts, ends, m, call.tile[0])
    batch = batch_size((lhs, 2), (rhs, 3), (starts, 1 if by_visit else 2))
    out = multiply_rows(
        with_batch(lhs, 2),
        with_batch(rhs, 3),
        visits,
        None if existing_out is None else with_batch(existing_out, 2),
        call=call,
        batch=batch or 1,
        by_visit=by_visit,
        transpose_rhs=transpose_rhs,
    )
    return out if batch is not None else out[0]


def multiply_rows(
    lhs: Array,
    rhs: Array,
    visits: Visits,
    existing: Array | None,
    *,
    call: Launch,
    batch: int,
    by_visit: bool,
    transpose_rhs: bool,
) -> Array:
    """`[e, m, k] × [e, h, k, n] -> [e, m, n]`; an operand's `e` is `batch`, or 1.

    `by_visit`: visits name the element; else each element has all of them.
    """
    m, k, n = call.problem.rows, call.problem.a, call.problem.b
    tm, tk, tn = call.tile
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
        return element(rhs, b, piece, v), v.matrix[piece], *((j, step) if transpose_rhs else (step, j))

    def out_index(j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        return (v.batch[v.piece[at]] if by_visit else b), v.tile[at], j

    def scale_index(values: Array, j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        # [e, m, blocks] or [e, h, 1, blocks]; [e, h, blocks, n] or [e, h, blocks, 1]
        lead = element(values, b, v.piece[at], v)
        if values.ndim == 3:
            return lead, lhs_index(j, b, at, step, v)[1]
        return lead, v.matrix[v.piece[at]], j

    def body(
        ids: Any,
        v: Visits,
        lhs: Any,
        rhs: Any,
        existing: Any,
        lhs_scales: Any,
        rhs_scales: Any,
        out: Any,
        *scratch: Any,
    ) -> None:
        _, _, at, step = ids
        piece, before = v.piece[at], jnp.maximum(at - 1, 0)
        low, high = (jnp.clip(edge[piece] - v.tile[at] * tm, 0, tm) for edge in (v.start, v.end))
        is_full = (low == 0) & (high == tm)
        is_new = (at == 0) | (v.tile[before] != v.tile[at])
        if by_visit:
            is_new |= v.batch[v.piece[before]] != v.batch[piece]

        def multiply(rows: Any, is_last: bool) -> Array:
            x, y = lhs[rows, :], rhs[...]
            if is_last and rest:
                x, y = select_first(x, rest, 1), select_first(y, rest, 1 if transpose_rhs else 0)
            begin = 0 if steps == 1 else step * tk
            return call.multiply(x, y, 1, 1 if transpose_rhs else 0, row_scales(rows), rhs_scales, begin)

        def row_scales(rows: Any) -> Any:
            if lhs_scales is None or lhs_scales.shape[0] < tm:
                return lhs_scales
            return lhs_scales.at[rows, :]

        def store(rows: Any, masked: bool, total: Array) -> None:
            total = call.rescale(total, row_scales(rows), rhs_scales)
            if masked:
                # What is there already: `existing`, zeros, or a neighbour's rows.
                base = out[rows, :].astype(call.wide)
                total = total.astype(call.wide)
                row = rows.start + lax.broadcasted_iota(jnp.int32, total.shape, 0)
                mine = (row >= low) & (row < high)
                total = jnp.where(mine, total if existing is None else base + total, base)
            elif existing is not None:
                total = add_wide(total, existing[rows, :])
            out[rows, :] = total.astype(out.dtype)

        def visit(rows: Any, masked: bool) -> None:
            accumulate(step, steps, partial(multiply, rows), partial(store, rows, masked), *scratch, rows=rows)

        @pl.when(is_full)
        def _() -> None:
            visit(pl.ds(0, tm), False)

        @pl.when(jnp.logical_not(is_full))
        def _() -> None:
            @pl.when(is_new & (step == 0))
            def _() -> None:
                out[...] = jnp.zeros_like(out) if existing is None else existing[...]

            in_chunks(low, high, tm, lambda rows: visit(rows, True))

    out_block = pl.BlockSpec((None, tm, tn), out_index)
    return call.run(
        body,
        visits,
        (lhs, rhs, existing),
        (
            pl.BlockSpec((None, tm, tk), lhs_index),
            pl.BlockSpec((None, None, tn, tk) if transpose_rhs else (None, None, tk, tn), rhs_index),
        ),
        (
            tpu_scales.spec(call.scales[0], -2, tm, scale_index),
            tpu_scales.spec(call.scales[1], -1, tn, scale_index),
        ),
        out_block,
        (batch, m, n),
        grid,
        ("parallel", "arbitrary", "arbitrary", "arbitrary"),
        [(tm, tn)] if steps > 1 else [],
        name=f"grouped_matmul{'_transposed' if transpose_rhs else ''}",
        axes=("mk", "nk" if transpose_rhs else "kn", "mn"),
        letters="mkn",
    )


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
    lhs_scales: Scales | None = None,
    rhs_scales: Scales | None = None,
    target: Target = ANY_TARGET,
) -> Array:
    """`[a, m] × [m, b] -> [h, a, b]`: see the contract in `ragged.kernels`."""
    lhs = lhs.mT  # [m, a]; cancels where the caller's was an `mT`
    (m, a), b = lhs.shape[-2:], rhs.shape[-1]
    held = group_sizes.shape[-1] if num_actual_groups is None else num_actual_groups
    starts, ends = schedule.segments(group_sizes, m, group_offset, held)
    batch = batch_size((lhs, 2), (rhs, 2), (starts, 1))
    elements = batch if sum_batch and batch is not None else 1
    elements = max(elements, jnp.atleast_2d(starts).shape[0])
    starts, ends = (jnp.broadcast_to(x, (elements, held)) for x in (starts, ends))
    scales = (
        tpu_scales.of_rows(lhs_scales, a, True, group_offset, held),
        tpu_scales.of_rows(rhs_scales, b, False, group_offset, held),
    )
    dtypes = dtypes_of(lhs, rhs, preferred_element_type, any(s is not None and s.extent is not None for s in scales))
    problem = Problem("groups", m, a, b, held, *dtypes, target.input_buffer_count, existing_out is not None, elements)
    call = Launch(problem, tiling, target, precision, scales)
    call.check_length()
    keeps_batch = batch is not None and not sum_batch
    out = multiply_groups(
        with_batch(lhs, 2),
        with_batch(rhs, 2),
        schedule.group_visits(starts, ends, m, call.tile[0], sum_batch),
        None if existing_out is None else with_batch(existing_out, 3),
        call=call,
        batch=(batch or 1) if keeps_batch else 1,
        by_visit=elements > 1,
    )
    return out if keeps_batch else out[0]


def multiply_groups(
    lhs: Array, rhs: Array, visits: Visits, existing: Array | None, *, call: Launch, batch: int, by_visit: bool
) -> Array:
    """`[e, m, a], [e, m, b] -> [e, h, a, b]`, contracting each group's rows; the operands' `e` is the elements', or 1.

    `by_visit`: visits name the operands' element; the result's too, unless it has only one, which sums over them.
    """
    a, b = call.problem.a, call.problem.b
    tm, ta, tb = call.tile
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

        scales = call.scales[which]  # [e, m, blocks], by row; or [e, h, a, 1] and [e, h, 1, b], by group
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

        def multiply(rows: Any, masked: bool) -> Array:
            x, y = (
                tpu_scales.scale_rows(operand, rows, *scales)
                for operand, *scales in (
                    (lhs, lhs_scales, call.scales[0], ids[0] * ta),
                    (rhs, rhs_scales, call.scales[1], ids[1] * tb),
                )
            )
            if masked:
                x, y = (select_rows(z, low - rows.start, high - rows.start) for z in (x, y))
            return call.dot(x, y, 0, 0)

        def store(total: Array) -> None:
            total = call.rescale(total, lhs_scales, rhs_scales)
            if existing is not None:
                total = add_wide(total, existing[...])
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

    return call.run(
        body,
        visits,
        (lhs, rhs, existing),
        (pl.BlockSpec((None, tm, ta), lhs_index), pl.BlockSpec((None, tm, tb), rhs_index)),
        (scale_spec(0), scale_spec(1)),
        pl.BlockSpec((None, None, ta, tb), out_index),
        (batch, call.problem.groups, a, b),
        grid,
        ("parallel", "arbitrary", "arbitrary", "arbitrary"),
        [(ta, tb)],
        name="transposed_grouped_matmul",
        axes=("km", "kn", "mn"),
        letters="kmn",
    )


def batched_matmul(
    lhs: Array,
    rhs: Array,
    *,
    axes: tuple[str, str, str],
    preferred_element_type: Any,
    precision: Any = None,
    tiling: dict[str, int] | None = None,
    existing_out: Array | None = None,
    lhs_scales: Scales | None = None,
    rhs_scales: Scales | None = None,
    target: Target = ANY_TARGET,
) -> Array:
    """Uniform × uniform: see the contract in `ragged.kernels`. Operands are read as they are stored."""
    leading = max(lhs.shape[:-2], rhs.shape[:-2], key=len)
    x, y = (with_batch(z[None] if z.ndim == 2 else z, 3) for z in (lhs, rhs))
    x_letters, y_letters, (row, column) = axes
    if row not in x_letters:
        x, y, x_letters, y_letters = y, x, y_letters, x_letters
        lhs_scales, rhs_scales = rhs_scales, lhs_scales
    contracted = x_letters.replace(row, "")
    extent = dict(zip(x_letters + y_letters, x.shape[2:] + y.shape[2:], strict=True))
    elements, groups = (max(p, q) for p, q in zip(x.shape[:2], y.shape[:2], strict=True))
    scales = (
        tpu_scales.arrange(lhs_scales, x_letters.index(row), extent[row], first=True, ndim=4),
        tpu_scales.arrange(rhs_scales, y_letters.index(column), extent[column], first=False, ndim=4),
    )
    problem = Problem(
        "batched",
        extent[row],
        extent[contracted],
        extent[column],
        elements * groups,
        *dtypes_of(x, y, preferred_element_type, tpu_scales.dequantized(*scales)),
        target.input_buffer_count,
        existing_out is not None,
    )
    asked = None if tiling is None else (tiling[row], tiling[contracted], tiling[column])
    call = Launch(problem, asked, target, precision, scales)
    tile = dict(zip((row, contracted, column), call.tile, strict=True))
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
            return *lead, (i, j)[which]

        return tpu_scales.spec(scales[which], which - 2, tile[column if which else row], index)

    def body(
        ids: Any, _: Any, x: Any, y: Any, existing: Any, x_scales: Any, y_scales: Any, out: Any, *scratch: Any
    ) -> None:
        step = ids[-1]

        def multiply(is_last: bool) -> Array:
            a, b = x[...], y[...]
            if is_last and rest:
                a, b = select_first(a, rest, axis_x), select_first(b, rest, axis_y)
            begin = 0 if steps == 1 else step * tile[contracted]
            return call.multiply(a, b, axis_x, axis_y, x_scales, y_scales, begin)

        def store(total: Array) -> None:
            total = call.rescale(total, x_scales, y_scales)
            if existing is not None:
                total = add_wide(total, existing[...])
            out[...] = total.astype(out.dtype)

        accumulate(step, steps, multiply, store, *scratch)

    def block(letters: str) -> tuple[Any, ...]:
        return None, None, *(tile[letter] for letter in letters)

    out = call.run(
        body,
        None,
        (x, y, None if existing_out is None else existing_out.reshape(elements, groups, *existing_out.shape[-2:])),
        (pl.BlockSpec(block(x_letters), index(x_letters, x)), pl.BlockSpec(block(y_letters), index(y_letters, y))),
        (scale_spec(0), scale_spec(1)),
        pl.BlockSpec(block(axes[2]), lambda g, e, i, j, step, _: (e, g, i, j)),
        (elements, groups, extent[row], extent[column]),
        (groups, elements, -(-extent[row] // tile[row]), -(-extent[column] // tile[column]), steps),
        ("parallel", "parallel", "parallel", "parallel", "arbitrary"),
        [(tile[row], tile[column])] if steps > 1 else [],
        name="batched_matmul",
        axes=(x_letters, y_letters, axes[2]),
        letters=row + contracted + column,
    )
    return out.reshape(*leading, *out.shape[2:])
