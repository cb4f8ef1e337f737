"""The backend for TPUs: grouped products as Pallas kernels.

All four kernels stream two operands through VMEM tile by tile, add up products in an accumulator, and store it to the
result. They differ in their grids (here without the dim of batch elements):

    grouped_matmul              columns n × visits × tiles of k     a visit: a tile of rows, for one group
    transposed_grouped_matmul   tiles of a × tiles of b × visits    consecutive visits of a group add up
    batched_matmul              groups × rows × columns × tiles of k
    tiled_matmul                visits of all ragged letters: see `tiled`

`schedule` lists the visits at run time, in a table for the scalar unit. A visit of a partial tile computes only chunks
with rows of the group (`tiles.chunk`), where rows of other groups are masked.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from ragged.backends import base, schedule
from ragged.backends.base import (
    KERNELS,
    Launch,
    Refusal,
    Target,
    Work,
    choice,
    cost,
    refuse,
    scale_modes,
    spans,
    too_old,
)
from ragged.backends.schedule import Visits
from ragged.backends.tpu import scales as tpu_scales
from ragged.backends.tpu import tiled, tiles, units
from ragged.backends.tpu.launch import (
    PRIMITIVES,
    Details,
    Grid,
    Kernel,
    MatrixScales,
    accumulate,
    in_chunks,
    with_batch,
)
from ragged.backends.tpu.pipeline import Input
from ragged.backends.tpu.tiles import Problem
from ragged.core.formats import FORMATS
from ragged.core.offsets import segments
from ragged.core.scales import zeros_of
from ragged.product.config import TpuConfig
from ragged.product.operands import Call, KernelOperand, Operand, Operands

_UNITS = {name: known.tpu for name, known in FORMATS.items()}
_TAKES = (*KERNELS, "scales", "offset", "batch", "existing", "bias", "up", "up_bias")
_TAKES += ("grouped_matmul with an epilogue", "batched_matmul with an epilogue")
_SMALL_BLOCK = 16
"""The extents of small blocks along the contracted letter are multiples of this."""
_CAST = {5: 1.3e-12, 6: 0.7e-12}
"""Seconds in which a kernel quantises an element to int8, in libtpu's simulator, keyed by generation."""
_PRECISIONS = ("none", "default", "high", "highest", "bfloat16", "float32", "fastest")


def plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    """Chooses kernel and configuration, and whether XLA applies `Call.cast` before the kernel, or the kernel itself.

    A kernel quantises a tile of rows again for each tile of columns.
    """
    if call.cast is not None:
        inside = _plan(call, x, target) if _may_cast(call, x, target) else None
        if isinstance(inside, Launch) and _saves_a_pass(inside, x.lhs.data, tiles.chip(target.device)):
            return inside
        x = jax.eval_shape(call.with_cast, x)
    return _plan(call, x, target)


def _may_cast(call: Call, x: Operands, target: Target) -> bool:
    """True if a kernel can apply `Call.cast`, which returns int8. The matrices must be int8, too, their scales must
    multiply the sums, and the matrix units must multiply int8."""
    b, chip = call.kernel_operands(x)[1], tiles.chip(target.device)
    if b.data.dtype != jnp.int8 or b.block(call.product.contracted) is not None:
        return False
    return chip.rate(jnp.int8) is not None and chip.generation in _CAST


def _saves_a_pass(launch: Launch, rows: Any, chip: tiles.Chip) -> bool:
    """True if casts in the kernel take less time than XLA's pass that reads `rows` and writes them in 8 bits.

    XLA's other pass, for each row's largest value, isn't counted. It may be fused with the operation that computes
    `rows`.
    """
    k, n = launch.config.along("kn")
    casts, moved = -(-launch.call.shape[-1] // n), rows.dtype.itemsize + 1  # bytes
    of_core = math.ceil(casts / chip.cores)
    return k >= rows.shape[-1] and of_core * _CAST[chip.generation] <= moved / (chip.cores * chip.bandwidth)


def _plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    """The launch of a kernel that applies `Call.cast` if `lhs` has no scales."""
    x = jax.eval_shape(partial(_with_levels, call), x)
    if refusal := _refuse(call, x, target):
        return refusal
    if call.product.kernel == "tiled_matmul":
        return tiled.plan(call, x, target)
    chip = tiles.chip(target.device)
    if target.interpret:  # XLA's CPU backend can't multiply int4
        chip = chip._replace(narrow=tuple(rate for rate in chip.narrow if rate[0] != "int4"))
    details = _details(call, x, chip)
    problem = details.tiled

    def config(tile: Any) -> TpuConfig:
        return details.config(tiles.fit(problem, tile, chip), problem.buffers)

    chosen = choice(
        call,
        x,
        target,
        "pallas_tpu",
        illegal=lambda config: _illegal(config, details, chip, call, x, target),
        tiled=lambda tile: config(tuple(tile[letter] for letter in problem.letters)),
        model=lambda: config(tiles.choose(problem, chip)),
    )
    if isinstance(chosen, Refusal):
        return chosen
    requested, source = chosen
    rows, a, b = requested.along(problem.letters)
    # A tile may be larger than the extent: rounded up to whole sublanes or lanes.
    rows, a, b = min(rows, problem.rows), min(a, problem.a), min(b, problem.b)
    final = details.config((rows, a, b), requested.buffers)
    problem = problem._replace(buffers=requested.buffers)
    if tiles.vmem(problem, (rows, a, b)) > chip.vmem:
        if problem.buffers <= 2:
            return Refusal("the scales and the smallest tiles don't fit into a TPU's VMEM")
        return Refusal(
            f"{problem.buffers} buffers of each streamed operand don't fit into a TPU's VMEM.",
            "Take fewer buffers: 2 is the default; 3 or 4 hide more latency.",
        )
    if tiles.smem(problem, (rows, a, b)) > tiles.SMEM:
        return Refusal(f"{problem.groups} groups in {problem.rows} rows: more than a TPU's scalar memory can list")
    row_tiles = -(-problem.rows // rows)
    is_batched = problem.kind == "batched"
    visits = problem.groups * row_tiles if is_batched else problem.elements * (row_tiles + problem.groups - 1)
    return Launch(
        "pallas_tpu",
        call.product.kernel,
        call,
        target,
        config=final,
        source=source,
        visits=visits * -(-problem.a // a) * -(-problem.b // b),
        details=details._replace(tiled=problem),
        **cost(call, x),
    )


def candidates(launch: Launch, x: Operands) -> Iterator[TpuConfig]:
    """Other configurations to measure, the fastest by the model first."""
    if launch.kernel == "tiled_matmul":
        yield from tiled.candidates(launch)
        return
    for tile in tiles.ranked(launch.details.tiled, tiles.chip(launch.target.device)):
        for buffers in (2, 3):
            yield launch.details.config(tile, buffers)


def run(launch: Launch, x: Operands) -> Any:
    """Computes the product."""
    kernel = {
        "batched_matmul": _batched,
        "grouped_matmul": _grouped,
        "transposed_grouped_matmul": _transposed_grouped,
        "tiled_matmul": tiled.run,
    }[launch.kernel]
    x = x if launch.call.cast is None or launch.details.cast is not None else launch.call.with_cast(x)
    return kernel(launch, _with_levels(launch.call, x))


def _with_levels(call: Call, x: Operands) -> Operands:
    """`x`, with scales in float32 and in one level, unless the kernel reads 8 bits, and multiplies sums by the second
    level.

    It does so if the contracted dim isn't ragged; with two levels, for 4-bit floats. Times the first level, these are
    exact in bfloat16.
    """

    def merged(operand: Any) -> Any:
        if operand is None or operand.scales is None:
            return operand
        is_fp4 = operand.data.dtype == jnp.float4_e2m1fn
        is_kept = (is_fp4 or operand.scales.tensor is None) and call.product.kernel in has_levels
        return operand if is_kept else operand._replace(scales=operand.scales.whole)

    has_levels = "grouped_matmul", "batched_matmul"
    epilogue = x.epilogue._replace(up=merged(x.epilogue.up))
    return x._replace(lhs=merged(x.lhs), rhs=merged(x.rhs), epilogue=epilogue)


def work(launch: Launch, x: Operands) -> Work:
    """Counts the visits that `schedule` lists, and their FLOPs."""
    if launch.kernel == "tiled_matmul":
        return tiled.work(launch, x)
    problem = launch.details.tiled
    tile, a, b = launch.config.along(problem.letters)
    tiles_a, tiles_b, row_tiles = (-(-n // t) for n, t in ((problem.a, a), (problem.b, b), (problem.rows, tile)))
    each = tiles_a * tiles_b
    if problem.kind == "batched":
        visits = problem.groups * row_tiles * each
        return Work(visits, 0, 2 * visits * tile * a * b * problem.products)
    letter, small = problem.letters[0], tiles.chunk(tile)
    listed, rows, empty = [], 0, 0
    for group, (first, end) in enumerate(zip(*spans(launch.call, x)[letter], strict=True), int(x.offset or 0)):
        if first == end:
            empty += 1
            # A wgrad's visit for an empty group multiplies a chunk if the group begins inside the chunk.
            rows += small * (problem.kind == "groups" and small < tile and first % small > 0)
        for at in range(first // tile * tile, end if end > first else 0, tile):
            low, high = max(first - at, 0), min(end - at, tile)
            # Of a partial tile, the chunks with rows of the group are multiplied.
            rows += tile if (low, high) == (0, tile) else (-(-high // small) - low // small) * small
            listed.append((group, int(at), tile))
    gaps = row_tiles - len(np.unique([at for _, at, _ in listed]))
    idle = empty * each if problem.kind == "groups" else gaps * tiles_b
    flops = int(2 * rows * each * a * b) * problem.products
    return Work(len(listed) * each, int(idle), flops, letter, tuple(listed))


def _refuse(call: Call, x: Operands, target: Target) -> Refusal | None:
    """`Refusal` if no kernel supports the product or its tiling, else None."""
    if len(x.sizes) > 1 and any(call.batched(x).sizes.values()):
        return Refusal("pallas_tpu has no kernels for tiled_matmul if sizes differ between batch elements")
    if refusal := refuse("pallas_tpu", _UNITS, _TAKES, _PRECISIONS, call, x, target, PRIMITIVES):
        return refusal
    generation = tiles.chip(target.device).generation
    if name := too_old(_UNITS, x, generation):
        return Refusal(f"TPUs of generation {generation} have no matrix units for {name}")
    columns = call.columns
    if columns and not x.sizes:
        return Refusal("pallas_tpu reads one weight for gate and up only for ragged rows")
    if columns == "halves" and call.shape[-1] % tiles.LANES:
        return Refusal(f"pallas_tpu reads halves of multiples of {tiles.LANES} columns")
    if columns == "interleaved" and call.shape[-1] < tiles.LANES:
        return Refusal(f"pallas_tpu reads at least {2 * tiles.LANES} interleaved columns")
    return None if call.options.tiles is None else _misaligned(call.options.tiles, call, x)


def _misaligned(tile: dict[str, int], call: Call, x: Operands) -> Refusal | None:
    """`Refusal` if a tile size doesn't fit the memory's tiles, else None."""
    p, lhs, rhs = call.product, x.lhs.data, x.rhs.data
    extents = dict.fromkeys("mkn", 0)
    for letters, shape in call.buffers(x):
        extents |= {letter: max(extents[letter], n) for letter, n in zip(letters, shape[-2:], strict=True)}
    if call.columns:  # The matrices' buffer has the columns of both products.
        extents[p.out[1]] = call.shape[-1]
    arrays = (p.lhs, lhs.dtype), (p.rhs, rhs.dtype), (p.out, call.dtype)
    dtypes = {x: tuple(jnp.dtype(dtype) for letters, dtype in arrays if x in letters) for x in p.ragged}
    return tiles.refuse(tile, extents, dtypes)


def _illegal(
    config: TpuConfig, details: Details, chip: tiles.Chip, call: Call, x: Operands, target: Target
) -> Refusal | None:
    """`Refusal` if the kernel can't have this configuration, else None."""
    requested = dict(zip("mkn", config.along("mkn"), strict=True))
    if refusal := _misaligned(requested, call, x):
        return refusal
    problem = details.tiled._replace(buffers=config.buffers)
    rows, a, b = config.along(problem.letters)
    for letter, tile, extent in zip(problem.letters, (rows, a, b), (problem.rows, problem.a, problem.b), strict=True):
        if tile > tiles.round_up(extent, tiles.LANES):
            return Refusal(f"tile_{letter}={tile} of an extent of {extent}.", "A tile can't be larger than its extent.")
    if details.lanes is not None and a < problem.a and a % details.lanes:
        letter = problem.letters[1]
        reason = f"tile_{letter}={a} cuts a block of scales, {details.lanes}."
        return Refusal(reason, f"It must be a multiple of {details.lanes}.")
    if not tiles.splits(problem, min(b, problem.b)):
        if problem.columns == "halves":
            reason = f"tile_{problem.letters[2]}={b} doesn't divide a half of the weight, {problem.b} columns."
            return Refusal(reason, f"It must divide {problem.b}.")
        reason = f"tile_{problem.letters[2]}={b} isn't a part of {problem.b} interleaved columns in whole lanes."
        whole = problem.b - problem.b % tiles.LANES
        return Refusal(reason, f"It must be a multiple of {tiles.LANES}, at most {whole}.")
    vmem = tiles.vmem(problem, (rows, a, b))
    if not tiles.fits(problem, (rows, a, b), chip):
        # An error if the TPU is known: if XLA ran the product, the caller would measure another program.
        hint = "Take smaller tiles or fewer buffers." if target.device is not None else ""
        return Refusal(f"{config} takes {vmem} bytes of VMEM, of {chip.vmem}, or too long to compile.", hint)
    return None


def _details(call: Call, x: Operands, chip: tiles.Chip) -> Details:
    """The tiling problem of a product, and its scale modes."""
    p, (a, b), batched, batch = call.product, call.kernel_operands(x), call.batched(x), call.batch(x) or 1
    (r, c), k = p.out, p.contracted
    kind = {"grouped_matmul": "rows", "transposed_grouped_matmul": "groups", "batched_matmul": "batched"}[p.kernel]
    # The mode "step" requires blocks of a multiple of 128 lanes (in a wgrad, rows).
    modes = scale_modes(call, x, tiles.LANES)
    scaled_dtype = _scaled_dtype(a, b, modes)
    has_few_rows = kind == "rows" and _has_few_rows(call, x)
    if has_few_rows and b.letters[1] == k and _has_small_blocks(a, b, k):
        modes = scale_modes(call, x, _SMALL_BLOCK)
    elif scaled_dtype == jnp.bfloat16:  # scaling tiles in bfloat16 is faster than scaling each step's product
        modes = scale_modes(call, x, None)
    blocks = [] if kind == "groups" or "tile" in modes else [operand.block(k) or 0 for operand in (a, b)]
    # Integers of 8 bits minus zero points of 8 bits are exact in bfloat16.
    b_dtype = b.data.dtype if zeros_of(b) is None else jnp.dtype(jnp.bfloat16)
    cast = call.cast if a.scales is None else None
    a_dtype = a.data.dtype if cast is None else jnp.int8
    multiplied = (scaled_dtype, scaled_dtype) if "tile" in modes else (a_dtype, b_dtype)
    num_local = b.data.shape[-3] if kind == "rows" else call.shape[0]
    # Visits list batch elements if their sizes or offsets differ, or a wgrad is summed over them.
    is_listed = any(batched.sizes.values()) or bool(batched.offset) or (kind == "groups" and not call.out_batch)
    requested: Any = call.options.configs.of(p.out, TpuConfig.backend)
    order, extent = k + r + c if kind == "groups" else r + k + c, {r: call.shape[-2], c: call.shape[-1], k: a.extent(k)}
    problem = Problem(
        kind,
        *(extent[letter] for letter in order),
        groups=num_local * batch if kind == "batched" else num_local,
        dtypes=(jnp.dtype(a.data.dtype), jnp.dtype(b.data.dtype), jnp.dtype(call.dtype)),
        dot=units.dot(*multiplied, chip, (a.data.dtype, b.data.dtype)),
        buffers=requested.buffers if requested else call.options.buffers,
        has_existing=x.epilogue.existing is not None,
        elements=batch if is_listed and kind != "batched" else 1,
        letters=order,
        products=call.num_products,
        results=call.num_stored,
        instructions=call.epilogue.instructions if call.epilogue else 0,
        columns=call.columns,
        scales=_scales_in_vmem(call, x, order),
    )
    # Before v6e, vector units have no bfloat16. It is slower there, except in a loop over many rows.
    scaled = jnp.dtype(jnp.float32) if has_few_rows and chip.generation < 6 else problem.dot.lhs
    return Details(problem, modes, math.gcd(*blocks) or None, scaled, cast)


def _scales_in_vmem(call: Call, x: Operands, order: str) -> tuple[tiles.ScaleBlocks, ...]:
    """The scales and zero points that the kernel fetches. `order`: the letters of the problem's extents."""
    (a, b), k, (r, c) = call.kernel_operands(x), call.product.contracted, call.product.out
    if order[0] == k:
        return *tpu_scales.in_vmem_of_rows(a, order.index(r)), *tpu_scales.in_vmem_of_rows(b, order.index(c))
    of_matrix = tpu_scales.in_vmem(b, c, k, False, order.index(c))
    return *tpu_scales.in_vmem(a, r, k, True, order.index(r)), *call.num_products * of_matrix


def _has_few_rows(call: Call, x: Operands) -> bool:
    """True if groups have, on average, at most as many rows as the smallest tile, as in decoding.

    Then scaling the products of small blocks takes less time than scaling matrices whose blocks lie along lanes: see
    `tpu_scales.block_products`.
    """
    a, b = call.kernel_operands(x)
    return call.shape[-2] <= tiles.sublanes(a.data.dtype, call.dtype) * b.data.shape[-3]


def _has_small_blocks(a: KernelOperand, b: KernelOperand, contracted: str) -> bool:
    """Whether `tpu_scales.block_products` supports the scales: one per row or column of a block of a fitting extent."""

    def is_small(operand: KernelOperand) -> bool:
        (outer,) = (letter for letter in operand.letters if letter != contracted)
        extent = operand.block(contracted) or 1
        fills = extent % _SMALL_BLOCK == 0 and (tiles.LANES % extent == 0 or extent % tiles.LANES == 0)
        return operand.block(outer) == 1 and fills

    scaled = [each for each in (a, b) if each.scales is not None and each.block(contracted) is not None]
    # Rows with zeros outside of a block would be multiplied by infinities there.
    is_finite = b.data.dtype.itemsize == 1 and b.data.dtype != jnp.float8_e5m2
    return bool(scaled) and is_finite and all(map(is_small, scaled))


def _scaled_dtype(a: KernelOperand, b: KernelOperand, modes: tuple[str, str]) -> Any:
    """Dtype of both tiles in the mode "tile": bfloat16 if all scaled values are exact in it, else float32."""
    narrow = all(operand.data.dtype.itemsize == 1 or operand.data.dtype == jnp.bfloat16 for operand in (a, b))
    scaled = [operand for operand, mode in zip((a, b), modes, strict=True) if mode in ("tile", "step")]

    def is_exact(operand: KernelOperand) -> bool:
        return operand.scales is not None and operand.scales.are_exact(operand.data.dtype)

    return jnp.bfloat16 if narrow and all(map(is_exact, scaled)) else jnp.float32


def _grouped(launch: Launch, x: Operands) -> Any:
    """A product whose result packs the ragged letter: `[m, k] × [h, k, n] -> [m, n]`, or `× [h, n, k]`."""
    call, (a, b), problem = launch.call, launch.call.kernel_operands(x), launch.details.tiled
    (letter, contracted), batch = a.letters, call.batch(x)
    m, n, num_local = problem.rows, problem.b, problem.groups
    starts, ends = segments(x.sizes[letter], m, x.offset, num_local)
    by_row, a_scales = a.block(letter) is not None, a.scales
    is_whole = launch.config.along(problem.letters)[1] >= problem.a
    if a_scales is not None and not by_row:
        a_scales = tpu_scales.local_scales(a_scales, x.offset, num_local)
    matrices = _matrices(b, x, call.num_products)
    scales = (
        tpu_scales.arrange(a_scales, 0, m, True, ndim=3 if by_row else 4),
        *(tpu_scales.arrange(each.scales, 1 - b.axis(contracted), n, False, 4, is_whole) for each in matrices),
    )
    zeros = tuple(_zeros(each, 1 - b.axis(contracted), n) for each in matrices)
    kernel = Kernel(launch, scales, zeros[0])
    out = multiply_rows(
        with_batch(a.data, 2),
        tuple(with_batch(each.data, 3) for each in matrices),
        schedule.row_visits(jnp.atleast_2d(starts), jnp.atleast_2d(ends), m, kernel.tile[0]),
        None if x.epilogue.existing is None else with_batch(x.epilogue.existing, 2),
        _biases(x, len(matrices)),
        _levels(a, matrices, 3),
        zeros,
        kernel=kernel,
        batch=batch or 1,
        by_visit=starts.ndim == 2,
    )
    return out if batch is not None else jax.tree.map(lambda each: each[0], out)


def _matrices(operand: KernelOperand, x: Operands, count: int) -> list[Operand]:
    """The `count` arrays of matrices that rows are multiplied with; one array twice if it has both matrices."""
    up, matrix = x.epilogue.up, Operand(operand.data, operand.scales)
    return [matrix] * count if up is None else [matrix, up]


def _levels(operand: KernelOperand, matrices: list[Operand], ndim: int) -> tuple[Array | None, ...]:
    """For each product, the factor of sums by the second level of both operands' scales: `[e, h, 1, 1]`, or None."""

    def level(scales: Any, ndim: int) -> Array | None:
        if scales is None or scales.tensor is None:
            return None
        tensor = scales.tensor if scales.tensor.ndim == ndim else scales.tensor[None]
        return tensor.reshape(*tensor.shape[: ndim - 2], *[1] * (6 - ndim))

    first, *others = level(operand.scales, ndim), *(level(each.scales, 4) for each in matrices)
    return tuple(each if first is None else first if each is None else first * each for each in others)


def _fetched_scales(
    scales: Sequence[Any], zeros: Sequence[Any], levels: Sequence[Any], width: int, index: Any, level_index: Any
) -> tuple[MatrixScales, ...]:
    """For each product, the inputs that have the matrix's scales, in blocks of `width` columns.

    `index` as for `tpu_scales.fetched`. `level_index(level, *ids)`: a block's index along the leading axes.
    """

    def fetched_level(level: Array | None) -> Input | None:
        if level is None:
            return None
        return Input(level, pl.BlockSpec((None, None, 1, 1), lambda *ids: (*level_index(level, *ids), 0, 0)))

    fetched = partial(tpu_scales.fetched, axis=-1, width=width, index=index)
    parts = map(fetched, scales), map(fetched, zeros), map(fetched_level, levels)
    return tuple(MatrixScales(*each) for each in zip(*parts, strict=True))


def _zeros(matrix: Operand, outer_axis: int, outer: int) -> tpu_scales.Blocks | None:
    """Zero points of matrices, arranged as `arrange` does scales."""
    scales = matrix.scales
    zeros = None if scales is None or scales.zeros is None else replace(scales, values=scales.zeros)
    return tpu_scales.arrange(zeros, outer_axis, outer, False, 4)


def _biases(x: Operands, count: int) -> tuple[Array | None, ...]:
    """The bias of each product, `[h, 1, n]` or `[1, 1, n]` float32, or None."""
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
    levels: tuple[Array | None, ...],
    zeros: tuple[tpu_scales.Blocks | None, ...],
    *,
    kernel: Kernel,
    batch: int,
    by_visit: bool,
) -> Any:
    """Builds and runs a kernel: `[e, m, k] × [e, h, k, n] -> [e, m, n]`, where an operand's `e` is `batch` or 1.

    `rhs`, `biases`, `levels` and `zeros` have one entry, or two for a gated product. `by_visit`: whether each visit is
    for one batch element; else all batch elements have the same visits.
    """
    (m, n), (tm, tk, tn) = (kernel.problem.rows, kernel.problem.b), kernel.tile
    is_transposed = kernel.contracted[1] == 1

    def element(x: Array, b: Any, piece: Any, v: Visits) -> Any:
        return 0 if x.shape[0] == 1 else v.batch[piece] if by_visit else b

    def lhs_index(j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        piece = v.piece[at]
        resting = v.rest[piece] >= 0
        row = jnp.where(resting, v.rest[piece], v.tile[at])
        return element(lhs, b, piece, v), row, jnp.where(resting, 0, step)

    def rhs_index(which: int, j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        piece, j = v.piece[at], tiles.column_block(kernel.problem, tn, which, j)
        step = jnp.where(v.rest[piece] >= 0, 0, step)
        return element(rhs[0], b, piece, v), v.matrix[piece], *((j, step) if is_transposed else (step, j))

    def out_index(j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        return (v.batch[v.piece[at]] if by_visit else b), v.tile[at], j

    def scale_index(values: Array, j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        # Of lhs: [e, m, blocks] or [e, h, 1, blocks]. Of rhs: [e, h, blocks, n] or [e, h, blocks, 1].
        lead = element(values, b, v.piece[at], v)
        if values.ndim == 3:
            return lead, lhs_index(j, b, at, step, v)[1]
        return lead, v.matrix[v.piece[at]], j

    def bias_index(j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        return v.matrix[v.piece[at]], 0, j

    def level_index(values: Array, j: Any, b: Any, at: Any, step: Any, v: Visits) -> Any:
        return element(values, b, v.piece[at], v), 0 if values.shape[1] == 1 else v.matrix[v.piece[at]]

    def matrix(array: Array, which: int) -> Input:
        block = (None, None, tn, tk) if is_transposed else (None, None, tk, tn)
        return Input(array, pl.BlockSpec(block, partial(rhs_index, which)))

    lhs_scales, *rhs_scales = kernel.scales
    return kernel.run(
        _rows_body(kernel, by_visit),
        Grid(
            dims=(-(-n // tn), 1 if by_visit else batch, visits.count[0], kernel.steps),
            parallel=1,
            shape=(batch, m, n),
            block=pl.BlockSpec((None, tm, tn), out_index),
            accumulators=len(rhs) if kernel.steps > 1 else 0,
        ),
        visits,
        (Input(lhs, pl.BlockSpec((None, tm, tk), lhs_index)), tuple(map(matrix, rhs, range(len(rhs))))),
        existing,
        (
            tpu_scales.fetched(lhs_scales, -2, tm, scale_index),
            _fetched_scales(rhs_scales, zeros, levels, tn, scale_index, level_index),
            _fetched_biases(biases, tn, bias_index),
        ),
    )


def _rows_body(kernel: Kernel, by_visit: bool) -> Any:
    """The kernel of `multiply_rows`, for one visit and one tile of the contracted letter.

    1. Multiply a full tile of rows as a whole, with a tile of each matrix.
    2. At the first visit of a partial tile, store `existing` or zeros.
    3. Multiply the chunks of a partial tile that have rows of the group.
    4. At the last tile of the contracted letter, apply the epilogue and store the group's rows.
    """
    tm, steps = kernel.tile[0], kernel.steps

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
        column, _, at, step = ids
        piece, before = v.piece[at], jnp.maximum(at - 1, 0)
        low, high = (jnp.clip(edge[piece] - v.tile[at] * tm, 0, tm) for edge in (v.start, v.end))
        is_full = (low == 0) & (high == tm)
        is_new = (at == 0) | (v.tile[before] != v.tile[at])
        if by_visit:
            is_new |= v.batch[v.piece[before]] != v.batch[piece]

        def row_scales(rows: Any) -> Any:
            if lhs_scales is None or lhs_scales.shape[0] < tm:
                return lhs_scales  # None, or the same for all rows
            return lhs_scales.at[rows, :]

        def multiply(rows: Any, is_last: bool) -> Iterator[Array]:
            return kernel.products(lhs[rows, :], rhs, row_scales(rows), rhs_scales, column, step, is_last)

        def store(rows: Any, masked: bool, totals: list[Array]) -> None:
            # A partial tile of the result already has `existing`, and rows of other groups.
            old = None if existing is None else (outs[0] if masked else existing)[rows, :]
            stored = kernel.with_epilogue(totals, row_scales(rows), rhs_scales, old, biases)
            for out, total in zip(outs, stored, strict=True):
                if masked:
                    row = rows.start + lax.broadcasted_iota(jnp.int32, total.shape, 0)
                    in_group, dtype = (row >= low) & (row < high), kernel.store_dtype
                    total = jnp.where(in_group, total.astype(dtype), out[rows, :].astype(dtype))
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

    return body


def _fetched_biases(biases: tuple[Array | None, ...], width: int, index: Any) -> tuple[Input | None, ...]:
    """Biases as inputs of a kernel. `index(*ids)`: a block's index, beginning with the group."""

    def fetched(bias: Array) -> Input:
        def index_map(*ids: Any) -> tuple[Any, ...]:
            group, *others = index(*ids)
            return 0 if bias.shape[0] == 1 else group, *others

        return Input(bias, pl.BlockSpec((None, 1, width), index_map))

    return tuple(None if bias is None else fetched(bias) for bias in biases)


def _transposed_grouped(launch: Launch, x: Operands) -> Array:
    """A product that contracts the ragged letter, such as a wgrad: `[k, m] × [k, n] -> [h, m, n]`."""
    call, (a, b), problem = launch.call, launch.call.kernel_operands(x), launch.details.tiled
    letter, batch, num_local = a.letters[0], call.batch(x), problem.groups
    starts, ends = segments(x.sizes[letter], problem.rows, x.offset, num_local)
    starts, ends = (jnp.broadcast_to(z, (problem.elements, num_local)) for z in (starts, ends))
    tile, in_tile = launch.config.along(problem.letters)[0], "tile" in launch.details.modes
    scales = (
        tpu_scales.of_rows(a.scales, problem.a, x.offset, num_local, tile, in_tile),
        tpu_scales.of_rows(b.scales, problem.b, x.offset, num_local, tile, in_tile),
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
) -> Array:
    """Builds and runs a kernel that contracts each group's rows: `[e, m, a] × [e, m, b] -> [e, h, a, b]`.

    An operand's `e` is 1 if batch elements share it. The result's `e` is `batch`, which is 1 if it is a sum over batch
    elements. `by_visit`: see `multiply_rows`.
    """
    a, b = kernel.problem.a, kernel.problem.b
    tm, ta, tb = kernel.tile

    def element(extent: int, e: Any, piece: Any, v: Visits) -> Any:
        return 0 if extent == 1 else v.batch[piece] if by_visit else e

    def lhs_index(i: Any, j: Any, e: Any, at: Any, v: Visits) -> Any:
        return element(lhs.shape[0], e, v.piece[at], v), v.tile[at], i

    def rhs_index(i: Any, j: Any, e: Any, at: Any, v: Visits) -> Any:
        return element(rhs.shape[0], e, v.piece[at], v), v.tile[at], j

    def out_index(i: Any, j: Any, e: Any, at: Any, v: Visits) -> Any:
        piece = v.piece[at]
        return element(batch, e, piece, v), v.matrix[piece], i, j

    def fetched_scales(which: int) -> Input | None:
        def index(values: Array, i: Any, j: Any, e: Any, at: Any, v: Visits) -> Any:
            lead = element(values.shape[0], e, v.piece[at], v)
            return (lead, v.tile[at]) if by_row else (lead, v.matrix[v.piece[at]], (i, j)[which])

        def block_index(i: Any, j: Any, e: Any, at: Any, v: Visits) -> Any:
            return element(scales.values.shape[0], e, v.piece[at], v), v.tile[at], 0, (i, j)[which]

        # by row [e, m, blocks]; by group [e, h, 1, a or b]; by block of rows [e, tiles, blocks, a or b]
        scales = kernel.scales[which]
        if isinstance(scales, tpu_scales.RowBlocks):
            spec = pl.BlockSpec((None, None, scales.values.shape[2], (ta, tb)[which]), block_index)
            return Input(scales.values, spec)
        by_row = scales is not None and scales.values.ndim == 3
        return tpu_scales.fetched(scales, -2 if by_row else -1, tm if by_row else (ta, tb)[which], index)

    return kernel.run(
        _groups_body(kernel, by_visit and batch > 1),
        Grid(
            dims=(-(-a // ta), -(-b // tb), 1 if by_visit else batch, visits.count[0]),
            parallel=1,
            shape=(batch, kernel.problem.groups, a, b),
            block=pl.BlockSpec((None, None, ta, tb), out_index),
            accumulators=1,
        ),
        visits,
        (Input(lhs, pl.BlockSpec((None, tm, ta), lhs_index)), Input(rhs, pl.BlockSpec((None, tm, tb), rhs_index))),
        existing,
        (fetched_scales(0), fetched_scales(1)),
    )


def _groups_body(kernel: Kernel, by_element: bool) -> Any:
    """The kernel of `multiply_groups`, for one visit. `by_element`: whether `out` has the visits' batch elements.

    1. If it is the group's only visit, and its tile is full, multiply the tile and store the product.
    2. Else, at the group's first visit, set the accumulator to zeros.
    3. Add the product of a full tile, or of the chunks of a partial tile, with rows of other groups masked.
    4. At the group's last visit, apply scales and epilogue, and store the result.
    """
    tm, ta, tb = kernel.tile

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
            """Whether the visit `other` is for another matrix of the result."""
            differs = v.matrix[v.piece[other]] != v.matrix[piece]
            return differs | (v.batch[v.piece[other]] != v.batch[piece]) if by_element else differs

        is_first = (at == 0) | begins(jnp.maximum(at - 1, 0))
        end = v.count[0] - 1
        is_last = (at == end) | begins(jnp.minimum(at + 1, end))

        def multiply(rows: Any, span: tuple[Any, Any] | None) -> Array:
            return kernel.product_of_rows((lhs, rhs), (lhs_scales, rhs_scales), (ids[0] * ta, ids[1] * tb), rows, span)

        def store(total: Array) -> None:
            if not kernel.rescales_each:
                total = kernel.rescale(total, lhs_scales, rhs_scales, v.end[piece] > v.start[piece])
            total = base.apply_epilogue(kernel.launch.call, total, None if existing is None else existing[...])
            out[...] = total.astype(out.dtype)

        is_alone = is_full & is_first & is_last

        @pl.when(is_alone)
        def _() -> None:
            store(multiply(pl.ds(0, tm), None))

        @pl.when(jnp.logical_not(is_alone))
        def _() -> None:
            @pl.when(is_first)
            def _() -> None:
                accumulator[...] = jnp.zeros_like(accumulator)

            @pl.when(is_full)
            def _() -> None:
                accumulator[...] += multiply(pl.ds(0, tm), None)

            @pl.when(jnp.logical_not(is_full))
            def _() -> None:
                def add(rows: Any) -> None:
                    accumulator[...] += multiply(rows, (low, high))

                in_chunks(low, high, tm, add)

            @pl.when(is_last)
            def _() -> None:
                store(accumulator[...])

    return body


def _batched(launch: Launch, operands: Operands) -> Any:
    """A product without a ragged letter. Groups and batch elements are dims of the grid."""
    call, existing = launch.call, operands.epilogue.existing
    x_operand, y_operand = call.kernel_operands(operands)
    (row, column), contracted, leading = call.product.out, call.product.contracted, call.batch(operands)
    matrices, problem = _matrices(y_operand, operands, call.num_products), launch.details.tiled
    is_whole = launch.config.along(problem.letters)[1] >= problem.a
    scales = (
        tpu_scales.arrange(x_operand.scales, x_operand.axis(row), problem.rows, True, 4),
        *(tpu_scales.arrange(y.scales, y_operand.axis(column), problem.b, False, 4, is_whole) for y in matrices),
    )
    zeros = tuple(_zeros(each, y_operand.axis(column), problem.b) for each in matrices)
    kernel = Kernel(launch, scales, zeros[0])
    levels = _levels(x_operand, matrices, 4)
    tile, shape = dict(zip(problem.letters, kernel.tile, strict=True)), (leading or 1, *call.shape)

    def lead(z: Array, g: Any, e: Any) -> list[Any]:
        return [0 if extent == 1 else place for extent, place in zip(z.shape[:2], (e, g), strict=True)]

    def fetched(z: Array, letters: str) -> Input:
        def index(g: Any, e: Any, i: Any, j: Any, step: Any, _: Any) -> Any:
            at = {row: i, column: j, contracted: step}
            return *lead(z, g, e), *(at[letter] for letter in letters)

        return Input(z, pl.BlockSpec((None, None, *(tile[letter] for letter in letters)), index))

    # [e, g, rows or 1, blocks]; [e, g, blocks, columns or 1]
    def x_scale_index(values: Array, g: Any, e: Any, i: Any, j: Any, step: Any, _: Any) -> Any:
        return *lead(values, g, e), i

    def y_scale_index(values: Array, g: Any, e: Any, i: Any, j: Any, step: Any, _: Any) -> Any:
        return *lead(values, g, e), j

    def level_index(values: Array, g: Any, e: Any, *_: Any) -> Any:
        return lead(values, g, e)

    out = kernel.run(
        _batched_body(kernel),
        Grid(
            dims=(shape[1], shape[0], -(-shape[2] // tile[row]), -(-shape[3] // tile[column]), kernel.steps),
            parallel=4,
            shape=shape,
            block=pl.BlockSpec((None, None, tile[row], tile[column]), lambda g, e, i, j, step, _: (e, g, i, j)),
            accumulators=len(matrices) if kernel.steps > 1 else 0,
        ),
        None,
        (
            fetched(with_batch(x_operand.data, 3), x_operand.letters),
            tuple(fetched(with_batch(y.data, 3), y_operand.letters) for y in matrices),
        ),
        None if existing is None else existing.reshape(shape),
        (
            tpu_scales.fetched(scales[0], -2, tile[row], x_scale_index),
            _fetched_scales(scales[1:], zeros, levels, tile[column], y_scale_index, level_index),
            _fetched_biases(_biases(operands, len(matrices)), tile[column], lambda g, e, i, j, step, _: (g, 0, j)),
        ),
    )
    return out if leading is not None else jax.tree.map(lambda each: each[0], out)


def _batched_body(kernel: Kernel) -> Any:
    """The kernel of `_batched`, for a tile of rows and a tile of each matrix.

    1. Add up the products along the contracted letter.
    2. At its last tile, apply the epilogue, round and store.
    """

    def body(
        ids: Any,
        _: Any,
        x: Any,
        ys: Any,
        existing: Any,
        x_scales: Any,
        y_scales: Any,
        biases: Any,
        *refs: Any,
    ) -> None:
        outs, scratch = refs[: kernel.problem.results], refs[kernel.problem.results :]

        def multiply(is_last: bool) -> Iterator[Array]:
            return kernel.products(x[...], ys, x_scales, y_scales, ids[3], ids[4], is_last)

        def store(totals: list[Array]) -> None:
            old = None if existing is None else existing[...]
            stored = kernel.with_epilogue(totals, x_scales, y_scales, old, biases)
            for out, total in zip(outs, stored, strict=True):
                out[...] = total.astype(out.dtype)

        accumulate(ids[-1], kernel.steps, multiply, store, scratch)

    return body
