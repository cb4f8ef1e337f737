"""Launch of a TPU kernel with one ragged letter or none."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ragged.backends import base
from ragged.backends.base import DEFAULT_TPU, Launch, kernel_metadata
from ragged.backends.schedule import Visits
from ragged.backends.tpu import scales as tpu_scales
from ragged.backends.tpu import tiles, units
from ragged.backends.tpu.pipeline import Input, Pipeline, buffered_pallas_call, in_place
from ragged.backends.tpu.scales import Blocks, RowBlocks
from ragged.backends.tpu.tiles import Problem
from ragged.product.config import TpuConfig
from ragged.product.function import names
from ragged.product.operands import Call


class Details(NamedTuple):
    """`Launch.details` of a kernel with one ragged letter or none."""

    tiled: Problem
    modes: tuple[str, str]  # see `scale_modes`
    lanes: int | None  # in the mode "step", extent of the scaled steps, a multiple or a divisor of 128; else None
    scaled: Any  # dtype in which tiles are multiplied by scales, in the mode "tile"
    cast: Any = None  # `Call.cast`, if the kernel applies it

    def config(self, tile: tuple[int, int, int], buffers: int) -> TpuConfig:
        """The configuration with a tile `(rows, a, b)`. `a` is rounded up to whole steps that are scaled."""
        rows, a, b = tile
        if self.lanes is not None and a < self.tiled.a:
            a = tiles.round_up(a, self.lanes)
        return TpuConfig(**dict(zip(self.tiled.letters, (rows, a, b), strict=True)), buffers=buffers)


class Grid(NamedTuple):
    """A kernel's grid and result."""

    dims: tuple[Any, ...]
    parallel: int  # number of leading dims that may run in any order
    shape: tuple[int, ...]  # of the result
    block: pl.BlockSpec  # of the result
    accumulators: int  # number of accumulators, each like a block of the result


class MatrixScales(NamedTuple):
    """The scales of a tile of the second operand: inputs when a kernel is launched, refs inside of it."""

    values: Any  # scales of blocks, or None
    zeros: Any  # their zero points, or None
    level: Any  # the second level of both operands' scales, or None


@dataclass(frozen=True)
class Kernel:
    """A kernel with one ragged letter or none."""

    launch: Launch  # with `Details`
    scales: tuple[Any, ...]  # `Blocks`, `RowBlocks` or None, of both operands and of a second matrix
    zeros: Blocks | None = None  # zero points of the second operand; a second matrix has the same blocks

    @property
    def problem(self) -> Problem:
        return self.launch.details.tiled

    @property
    def letters(self) -> tuple[str, str]:
        """The operands' letters, in the order of `Call.kernel_operands`."""
        p = self.launch.call.product
        return (p.lhs, p.rhs) if p.out[0] in p.lhs else (p.rhs, p.lhs)

    @property
    def contracted(self) -> tuple[int, int]:
        """The contracted axis of each operand's tiles, 0 or 1."""
        first, second = (letters.index(self.launch.call.product.contracted) for letters in self.letters)
        return first, second

    @property
    def name(self) -> str:
        """The kernel's name in profilers, without the tile."""
        is_transposed = self.problem.kind == "rows" and self.contracted[1] == 1
        return self.launch.kernel + "_transposed" * is_transposed

    @property
    def lanes(self) -> int | None:
        return self.launch.details.lanes

    @property
    def tile(self) -> tuple[int, int, int]:
        """`(rows, a, b)`: see `Problem`."""
        rows, a, b = self.launch.config.along(self.problem.letters)
        return rows, a, b

    @property
    def steps(self) -> int:
        """Number of tiles of the contracted letter, if it isn't ragged."""
        return -(-self.problem.a // self.tile[1])

    @property
    def rescales_each(self) -> bool:
        """Whether the product of each visit is scaled, instead of the sum over visits."""
        return self.problem.kind == "groups" and "step" in self.launch.details.modes

    @property
    def scales_row_blocks(self) -> bool:
        """Whether the product of each block of rows is scaled."""
        by_block = any(isinstance(each, RowBlocks) for each in self.scales)
        return by_block and "tile" not in self.launch.details.modes

    def buffers(self, *arrays: Any) -> int:
        """Buffers of each operand. Mosaic supports more than two only if copies are whole tiles of memory."""
        whole = all(x.shape[-1] % tiles.LANES == x.shape[-2] % tiles.sublanes(x.dtype) == 0 for x in arrays)
        return self.problem.buffers if whole else min(self.problem.buffers, 2)

    @property
    def accumulator(self) -> Any:
        is_scaled = self.lanes is not None or self.rescales_each
        return jnp.dtype(jnp.float32) if is_scaled else self.problem.dot.result

    @property
    def store_dtype(self) -> Any:
        """The dtype in which a store selects between new and old rows."""
        return jnp.float32 if jnp.issubdtype(self.problem.dtypes[2], jnp.floating) else jnp.int32

    def dot(self, x: Array, y: Array) -> Array:
        return self.problem.dot(x, y, *self.contracted, self.dot_precision)

    @property
    def dot_precision(self) -> Any:
        """The call's precision; "highest" for 8-bit operands, whose scaled tiles need all bits of float32."""
        eight_bits = all(dtype.itemsize == 1 for dtype in self.problem.dtypes[:2])
        return lax.Precision.HIGHEST if eight_bits else self.launch.call.options.precision

    def products(
        self,
        x: Array,
        ys: Sequence[Any],
        x_scales: Any,
        y_scales: Sequence[MatrixScales],
        column: Any,
        step: Any,
        is_last: bool,
    ) -> Iterator[Array]:
        """Products of the tile `x` with the tiles in the refs `ys`. `column` and `step`: indices of the tiles of the
        result's columns and of the contracted letter.

        Past the extent, the last tile of `x` is zero. The last tile of `y` is zero too, or minus its zero points.
        """
        begin, rest = 0 if self.steps == 1 else step * self.tile[1], self.problem.a % self.tile[1]

        def inside(tile: Array, axis: int) -> Array:
            return select_first(tile, rest, axis) if is_last and rest else tile

        x, of_rows = inside(units.loaded(x), self.contracted[0]), None
        if self.launch.details.cast is not None:
            x, of_rows = self.launch.details.cast(x)
        for y, scales in zip(ys, y_scales, strict=True):
            tile = inside(units.loaded(y[...]), self.contracted[1])
            if self.zeros is not None:
                dtype = self.problem.dot.rhs
                tile = tile.astype(dtype) - self.of_tile(scales.zeros, 1, self.zeros, column, begin, tile, dtype)
            values = None if scales.values is None else tpu_scales.floats(scales.values)
            total = self.multiply(x, tile, x_scales, values, column, begin)
            yield total if of_rows is None else total.astype(jnp.float32) * of_rows

    def of_tile(
        self, ref: Any, operand: int, blocks: Blocks, column: Any, begin: Any, tile: Array, dtype: Any
    ) -> Array:
        """The scales, or zero points, in `ref` for the elements of an operand's tile, in `dtype`. `operand`: 0 or 1."""
        axis = self.contracted[operand]
        # Only of the second operand: [blocks, blocks of columns] -> [blocks, columns]
        if blocks.width > 1 and blocks.extent:
            columns, count = self.tile[2], tile.shape[axis] // blocks.extent
            is_whole = count * blocks.extent == tile.shape[axis] and count % 8 == ref.shape[0] % count == 0
            if is_whole and self.steps > 1:  # `repeated` returns an array, which has no parts: read this tile's blocks.
                ref, begin = ref.at[pl.ds(pl.multiple_of(begin // blocks.extent, count), count), :], 0
            ref = tpu_scales.repeated(ref, False, blocks.width, column * columns, columns, 1, jnp.float32)
        # The axis of blocks is 1 for the first operand, 0 for the second: see `tpu_scales.Blocks`.
        is_transposed = axis != 1 - operand
        if blocks.extent is None:
            return (ref[...].T if is_transposed else ref[...]).astype(dtype)
        return tpu_scales.repeated(ref, is_transposed, blocks.extent, begin, tile.shape[axis], axis, dtype)

    def multiply(self, x: Array, y: Array, x_scales: Any, y_scales: Any, column: Any, begin: Any) -> Array:
        """The product of two tiles, with the scales that change along the contracted axis.

        `begin`: the tiles' first element along it.
        """
        refs, axes, blocks = (x_scales, y_scales), self.contracted, (self.scales[0], self.scales[1])
        if self.lanes is not None:
            return tpu_scales.block_products(self.dot, (x, y), axes, refs, blocks, self.lanes, begin)
        scaled, dtype = [], self.launch.details.scaled
        for operand, (tile, ref, each) in enumerate(zip((x, y), refs, blocks, strict=True)):
            if each is not None and each.extent is not None:
                tile = tile.astype(dtype) * self.of_tile(ref, operand, each, column, begin, tile, dtype)
            scaled.append(tile)
        return self.dot(*scaled)

    def product_of_rows(
        self, operands: tuple[Any, Any], refs: Any, starts: tuple[Any, Any], rows: Any, span: tuple[Any, Any] | None
    ) -> Array:
        """A wgrad's product of `rows` of both operands' tiles, masked to `span` unless it is None.

        `refs`: refs of the scales. `starts`: the tiles' first columns.
        """

        def in_group(x: Array, first: Any) -> Array:
            return x if span is None else select_rows(x, span[0] - first, span[1] - first)

        has_rows = True if span is None else span[1] > span[0]

        if self.scales_row_blocks:
            total = tpu_scales.row_block_products(
                self.dot,
                operands,
                rows,
                refs,
                (self.scales[0], self.scales[1]),
                in_group,
                lambda first: True if span is None else (first >= span[0]) & (first < span[1]),
            )
            return self.rescale(total, *refs, has_rows=has_rows)
        x, y = (
            tpu_scales.scale_rows(operand, rows, ref, blocks, start, self.launch.details.scaled)
            for operand, ref, blocks, start in zip(operands, refs, self.scales, starts, strict=True)
        )
        total = self.dot(in_group(x, rows.start), in_group(y, rows.start))
        return self.rescale(total, *refs, has_rows=has_rows) if self.rescales_each else total

    def rescale(self, total: Array, x_scales: Any, y_scales: Any, has_rows: Any = True) -> Array:
        """`total` times the scales that are constant along the contracted axis. In a wgrad, both operands' are rows.

        An empty group's scales may be NaN, so they count as zero without `has_rows`.
        """
        for operand, (ref, blocks) in enumerate(zip((x_scales, y_scales), self.scales[:2], strict=True)):
            if blocks is not None and blocks.extent is None:
                scales = ref[...] if has_rows is True else jnp.where(has_rows, ref[...], 0)
                scales = scales.T if self.problem.kind == "groups" and not operand else scales
                total = total.astype(jnp.float32) * scales
        return total

    def with_epilogue(
        self, totals: list[Array], x_scales: Any, y_scales: Sequence[MatrixScales], existing: Any, biases: Any
    ) -> list[Array]:
        """Arrays to store, unrounded: `totals` after scales and epilogue."""
        totals = split_interleaved(*totals) if self.problem.columns == "interleaved" else totals
        z = []
        for total, scales, bias in zip(totals, y_scales, biases, strict=True):
            total = total if scales.level is None else total * scales.level[...]
            total = base.apply_epilogue(self.launch.call, self.rescale(total, x_scales, scales.values), existing)
            z.append(total if bias is None else total.astype(jnp.float32) + bias[...])
        return _activated(z, self.launch.call)

    def run(
        self,
        body: Any,
        grid: Grid,
        visits: Visits | None,
        operands: tuple[Any, Any],
        existing: Array | None,
        others: tuple[Any, ...],
    ) -> Any:
        """Launches `body`. `operands` and `others`, scales and biases, are pytrees of `Input`."""
        launch, p, target = self.launch, self.problem, self.launch.target
        out = jax.ShapeDtypeStruct(grid.shape, p.dtypes[2], manual_axis_type=ManualAxisType())
        inputs = [*operands, None if existing is None else Input(existing, grid.block), *others]
        arrays, specs = (
            jax.tree.map(itemgetter(field), inputs, is_leaf=lambda x: isinstance(x, Input)) for field in (0, 1)
        )
        streams = jax.tree.leaves(arrays[:2])
        existing_index = len(jax.tree.leaves(visits)) + len(streams)  # of all inputs
        has_epilogue = launch.call.epilogue is not None
        block: Any = grid.block.block_shape
        pipeline = Pipeline(
            grid.dims,
            specs,
            [grid.block] * p.results if has_epilogue else grid.block,
            [pltpu.VMEM(block[-2:], self.accumulator)] * grid.accumulators,
            input_buffer_count=[self.buffers(*streams, out)] * 2 + [2] * (1 + len(others)),
            dimension_semantics=["parallel"] * grid.parallel + ["arbitrary"] * (len(grid.dims) - grid.parallel),
        )
        by_letter = dict(zip("mkn", launch.config.along("mkn"), strict=True))
        num_groups = grid.shape[1] if p.kind == "batched" else p.groups
        function = launch.call.epilogue and launch.call.epilogue.function
        transcendentals = function.transcendentals * math.prod(grid.shape) if function else 0
        estimate = {"flops": launch.flops, "bytes_accessed": launch.bytes_accessed, "transcendentals": transcendentals}
        with jax.named_scope(f"ragged_{self.name}"):
            return buffered_pallas_call(
                body,
                [out] * p.results if has_epilogue else out,
                pipeline,
                # A fifth more than the tiles' limit, for scales and the compiler: see `tiles.chip`.
                vmem_limit_bytes=None if target.device is None else tiles.chip(target.device).vmem * 6 // 5,
                input_output_aliases={}
                if existing is None
                else in_place(existing_index, out, grid.block, target.interpret),
                interpret=target.interpret,
                device=target.device or DEFAULT_TPU,
                name=f"{self.name}_{'x'.join(map(str, self.tile))}",
                cost_estimate=pl.CostEstimate(**estimate),
                metadata=kernel_metadata((*self.letters, launch.call.product.out), by_letter, p.dtypes, num_groups),
            )(visits, *arrays)


FORMULAS: dict[str, Callable[..., Array]] = {
    "add_any": lax.add,
    "erfc": lambda x, **_: 1 - lax.erf(x),  # the absolute error is at most half a unit in the last place of 1
    "expm1": lambda x, **_: lax.tanh(0.5 * x) * (lax.exp(x) + 1),
    "name": lambda x, **_: x,
}
"""Formulas for primitives that Pallas can't lower for TPUs."""

PRIMITIVES = {*FORMULAS} | names(
    "abs add and atan2 ceil clamp convert_element_type cos div eq erf erf_inv exp exp2 floor ge gt integer_pow "
    "is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow reduce_precision rem round rsqrt "
    "select_n sign sin sqrt square stop_gradient sub tan tanh xor"
)
"""JAX's elementwise primitives that kernels can compute on every generation."""


def _activated(z: list[Array], call: Call) -> list[Array]:
    """Arrays to store, unrounded: see `EpilogueSpec`. `z`: the pre-activations."""
    if call.epilogue is None:
        return z
    function = call.epilogue.function
    results = z[0] if function is None else function.compute(*z, formulas=FORMULAS), *z
    return [each for each, is_stored in zip(results, call.epilogue.stored, strict=True) if is_stored]


def split_interleaved(first: Array, second: Array) -> list[Array]:
    """`[even, odd]`: the even and the odd columns of `[first, second]`, whose widths are equal multiples of 128.

    Each register of 128 columns is permuted, so that every value is moved as it is, also NaN.
    """
    lanes, rows = tiles.LANES, first.shape[0]
    if rows == 1:  # Pallas can't permute a single row.
        first, second = (jnp.broadcast_to(x, (8, x.shape[1])) for x in (first, second))
    registers = [x[:, i : i + lanes] for x in (first, second) for i in range(0, x.shape[1], lanes)]
    lane = lax.broadcasted_iota(jnp.int32, registers[0].shape, 1)
    is_low = lane < lanes // 2
    even_first = jnp.where(is_low, 2 * lane, 2 * lane - lanes + 1)
    odd_first = jnp.where(is_low, 2 * lane + 1, 2 * lane - lanes)
    even, odd = [], []
    for left, right in zip(registers[::2], registers[1::2], strict=True):
        left, right = (jnp.take_along_axis(x, at, 1) for x, at in ((left, even_first), (right, odd_first)))
        even.append(jnp.where(is_low, left, right))
        odd.append(pltpu.roll(jnp.where(is_low, right, left), lanes // 2, 1))
    return [jnp.concatenate(each, 1)[:rows] for each in (even, odd)]


def in_chunks(low: Any, high: Any, rows: int, visit: Callable[[Any], None]) -> None:
    """Calls `visit(slice)` for each chunk of a tile of `rows` that overlaps rows `low..high`."""
    size = tiles.chunk(rows)
    if size == rows:
        pl.when(high > low)(lambda: visit(pl.ds(0, rows)))
        return

    def part(index: Any, carry: None) -> None:
        visit(pl.ds(pl.multiple_of(index * size, size), size))

    lax.fori_loop(low // size, pl.cdiv(high, size), part, None)


def accumulate(step: Any, steps: int, multiply: Any, store: Any, accumulators: Any, rows: Any = ...) -> None:
    """Adds the products of `multiply(is_last)` to the accumulators; at the last step, calls `store` with the sums."""
    if steps == 1:
        store(list(multiply(True)))
        return

    @pl.when(step == 0)
    def _() -> None:
        for total, part in zip(accumulators, multiply(False), strict=True):
            total[rows] = part

    @pl.when((step > 0) & (step < steps - 1))
    def _() -> None:
        for total, part in zip(accumulators, multiply(False), strict=True):
            total[rows] += part

    @pl.when(step == steps - 1)
    def _() -> None:
        store([total[rows] + part for total, part in zip(accumulators, multiply(True), strict=True)])


def select_first(x: Array, count: int, axis: int) -> Array:
    """`x` with zeros from index `count` of `axis` on, where a partial tile is undefined."""
    if axis == 1:
        # Mosaic can't mask fewer than 8 rows of 8 or 16 bits past the first 128 columns.
        return jnp.concatenate([x[:, :count], jnp.zeros_like(x[:, count:])], 1)
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) < count, x, jnp.zeros_like(x))


def select_rows(x: Array, low: Any, high: Any) -> Array:
    """`x` with zeros outside of rows `low..high`."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((row >= low) & (row < high), x, jnp.zeros_like(x))


def with_batch(x: Array, ndim: int) -> Array:
    """`x` with a batch axis, of extent 1 if it has none. `ndim`: the rank without it."""
    return x if x.ndim > ndim else x[None]
