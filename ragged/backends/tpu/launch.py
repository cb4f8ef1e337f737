"""How a TPU kernel is launched: its tile, its dtypes, its accumulator, and the Pallas call."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ragged.backends.base import ACTIVATIONS, DEFAULT_TPU, Launch, Target, finish, kernel_metadata
from ragged.backends.config import TpuConfig
from ragged.backends.schedule import Visits
from ragged.backends.tpu import scales as tpu_scales
from ragged.backends.tpu import tiles
from ragged.backends.tpu.pipeline import buffered_pallas_call, in_place
from ragged.backends.tpu.scales import RowBlocks
from ragged.backends.tpu.tiles import Chip, Problem
from ragged.product.operands import Call


class Details(NamedTuple):
    """What a launch of a kernel with one ragged letter, or none, knows besides the call."""

    tiled: Problem
    ways: tuple[str, str]  # of the terms' scales: see `scale_ways`
    lanes: int | None  # extent of the contracted blocks whose products are scaled one by one, if they are

    def config(self, tile: tuple[int, int, int], buffers: int) -> TpuConfig:
        """One with a tile of the problem's rows, `a` and `b`; it ends where a block of scales does."""
        rows, a, b = tile
        if self.lanes is not None and a < self.tiled.a:
            a = tiles.round_up(a, self.lanes)
        return TpuConfig(**dict(zip(self.tiled.letters, (rows, a, b), strict=True)), buffers=buffers)


@dataclass(frozen=True)
class Kernel:
    """What a kernel with one ragged letter, or none, is built from."""

    launch: Launch  # with `Details`
    scales: tuple[Any, ...]  # `Blocks`, `RowBlocks` or None: of both operands, and of a gated product's second matrix

    @property
    def problem(self) -> Problem:
        return self.launch.details.tiled

    @property
    def lanes(self) -> int | None:
        return self.launch.details.lanes

    @property
    def target(self) -> Target:
        return self.launch.target

    @property
    def tile(self) -> tuple[int, int, int]:
        """Of the problem's rows, `a` and `b`."""
        rows, a, b = self.config.along(self.problem.letters)
        return rows, a, b

    @property
    def config(self) -> TpuConfig:
        return self.launch.config

    @cached_property
    def chip(self) -> Chip:
        return tiles.chip(self.target.device)

    @property
    def rescales_each(self) -> bool:
        """Whether each visit's product is scaled, not their sum."""
        return self.problem.kind == "groups" and "step" in self.launch.details.ways

    @property
    def scales_row_blocks(self) -> bool:
        """Whether the product of each block of rows is scaled."""
        by_block = any(isinstance(each, RowBlocks) for each in self.scales)
        return by_block and "tile" not in self.launch.details.ways

    def buffers(self, *arrays: Any) -> int:
        """Buffers of each operand. More than two only where all copies are of whole tiles of memory: Mosaic insists."""
        whole = all(x.shape[-1] % tiles.LANES == x.shape[-2] % tiles.sublanes(x.dtype) == 0 for x in arrays)
        return self.problem.buffers if whole else min(self.problem.buffers, 2)

    @property
    def accumulator(self) -> Any:
        is_scaled = self.lanes is not None or self.rescales_each
        return jnp.dtype(jnp.float32) if is_scaled else self.problem.dot.result

    @property
    def wide(self) -> Any:
        """The dtype in which the accumulator and what is already there are added."""
        return jnp.float32 if jnp.issubdtype(self.problem.dtypes[2], jnp.floating) else jnp.int32

    def dot(self, x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
        return self.problem.dot(x, y, x_axis, y_axis, self.dot_precision)

    @property
    def dot_precision(self) -> Any:
        """What was asked for; of tiles that were multiplied by their scales, all bits count."""
        eight_bits = all(dtype.itemsize == 1 for dtype in self.problem.dtypes[:2])
        return lax.Precision.HIGHEST if eight_bits else self.launch.call.options.precision

    def multiply(self, x: Array, y: Array, x_axis: int, y_axis: int, x_scales: Any, y_scales: Any, begin: Any) -> Array:
        """The product of two tiles, with the scales that change along the contracted axis; tiles begin at `begin`."""

        def dot(a: Array, b: Array) -> Array:
            return self.dot(a, b, x_axis, y_axis)

        refs = (x_scales, y_scales)
        if self.lanes is not None:
            blocks = self.scales[0], self.scales[1]
            return tpu_scales.block_products(dot, (x, y), (x_axis, y_axis), refs, blocks, self.lanes, begin)
        scaled = []
        for tile, axis, ref, blocks, along in zip((x, y), (x_axis, y_axis), refs, self.scales[:2], (1, 0), strict=True):
            if blocks is not None and blocks.extent is not None:
                wide, width = self.problem.dot.lhs, tile.shape[axis]
                factor = tpu_scales.repeated(ref, axis != along, blocks.extent, begin, width, axis, wide)
                tile = tile.astype(wide) * factor
            scaled.append(tile)
        return dot(*scaled)

    def rescale(self, total: Array, x_scales: Any, y_scales: Any) -> Array:
        """The accumulator times the scales that are the same all along the contracted axis."""
        for ref, blocks in zip((x_scales, y_scales), self.scales[:2], strict=True):
            if blocks is not None and blocks.extent is None:
                total = total.astype(jnp.float32) * ref[...]
        return total

    def ended(self, totals: list[Array], x_scales: Any, y_scales: Any, existing: Any, biases: Any) -> list[Array]:
        """What is stored of the accumulators, before it is rounded."""
        z, call = [], self.launch.call
        for total, scales, bias in zip(totals, y_scales, biases, strict=True):
            total = finish(self.rescale(total, x_scales, scales), existing, call)
            z.append(total if bias is None else total.astype(jnp.float32) + bias[...])
        return _ended(z, call)

    def run(
        self,
        body: Any,
        visits: Visits | None,
        operands: tuple[Any, Any],
        specs: tuple[Any, Any],
        existing: Array | None,
        others: tuple[Any, ...],
        other_specs: tuple[Any, ...],
        out_block: pl.BlockSpec,
        shape: tuple[int, ...],
        grid: tuple[Any, ...],
        semantics: tuple[str, ...],
        accumulators: list[tuple[int, int]],
        *,
        name: str,
        axes: tuple[str, str],
    ) -> Any:
        """Launches `body`. `operands` are the two that stream through VMEM, `others` scales and biases; all pytrees.

        `axes` are the letters of the two.
        """
        launch, p, tile = self.launch, self.problem, "x".join(map(str, self.tile))
        by_letter = dict(zip("mkn", self.config.along("mkn"), strict=True))
        out = jax.ShapeDtypeStruct(shape, p.dtypes[2], manual_axis_type=ManualAxisType())
        num_groups = shape[1] if p.kind == "batched" else p.groups
        estimate = {"flops": launch.flops, "bytes_accessed": launch.bytes_accessed, "transcendentals": 0}
        scalars = jax.tree.leaves(visits)
        streams = jax.tree.leaves(operands)
        place, is_ended = len(scalars) + len(streams), launch.call.ending is not None
        aliases = {} if existing is None else in_place(place, out, out_block, self.target.interpret)
        with jax.named_scope(f"ragged_{name}"):
            return buffered_pallas_call(
                body,
                [out] * p.results if is_ended else out,
                grid=grid,
                in_specs=[*specs, None if existing is None else out_block, *other_specs],
                out_specs=[out_block] * p.results if is_ended else out_block,
                input_buffer_count=[self.buffers(*streams, out)] * 2 + [2] * (1 + len(others)),
                scratch_shapes=[pltpu.VMEM(shape, self.accumulator) for shape in accumulators],
                dimension_semantics=semantics,
                vmem_limit_bytes=None if self.target.device is None else self.chip.vmem * 6 // 5,
                input_output_aliases=aliases,
                interpret=self.target.interpret,
                device=self.target.device or DEFAULT_TPU,
                name=f"{name}_{tile}",
                cost_estimate=pl.CostEstimate(**estimate),
                metadata=kernel_metadata((*axes, launch.call.product.out), by_letter, p.dtypes, num_groups),
            )(visits, *operands, existing, *others)


def _gelu(z: Array) -> Array:
    """By `erf`: Pallas has no `erfc` for TPUs. Off by at most half a unit of 1 times `z`."""
    return z * (lax.erf(z * math.sqrt(0.5)) + 1) / 2


def _ended(z: list[Array], call: Call) -> list[Array]:
    """What is stored, before it is rounded, of accumulators with their biases: see `product.operands.Ending`."""
    if call.ending is None:
        return z
    activation = (ACTIVATIONS | {"gelu": _gelu}).get(call.ending.activation or "", lambda z: z)
    results = math.prod(z[1:], start=activation(z[0])), *z
    return [each for each, is_stored in zip(results, call.ending.stored, strict=True) if is_stored]


def in_chunks(low: Any, high: Any, rows: int, visit: Callable[[Any], None]) -> None:
    """Visits the chunks of a tile's rows that hold any of `low..high`."""
    small = tiles.chunk(rows)
    if small == rows:
        pl.when(high > low)(lambda: visit(pl.ds(0, rows)))
        return

    def part(index: Any, carry: None) -> None:
        visit(pl.ds(pl.multiple_of(index * small, small), small))

    lax.fori_loop(low // small, pl.cdiv(high, small), part, None)


def accumulate(step: Any, steps: int, multiply: Any, store: Any, accumulators: Any, rows: Any = ...) -> None:
    """Adds up each of `multiply(is_last)` over the tiles of the contracted letter, and stores the sums at the last."""
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
    """`x` with zeros from index `count` of `axis` on: what a partial tile holds there is undefined."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) < count, x, jnp.zeros_like(x))


def select_rows(x: Array, low: Any, high: Any) -> Array:
    """`x` with zeros outside of rows `low..high`."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((row >= low) & (row < high), x, jnp.zeros_like(x))


def with_batch(x: Array, ndim: int) -> Array:
    return x if x.ndim > ndim else x[None]
