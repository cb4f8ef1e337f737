"""How a TPU kernel is launched: its tile, its dtypes, its accumulator, and the Pallas call."""

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

from ragged.backends.base import DEFAULT_TPU, Launch, Target, kernel_metadata
from ragged.backends.config import TpuConfig
from ragged.backends.schedule import Visits
from ragged.backends.tpu import scales as tpu_scales
from ragged.backends.tpu import tiles
from ragged.backends.tpu.pipeline import buffered_pallas_call, in_place
from ragged.backends.tpu.scales import Blocks
from ragged.backends.tpu.tiles import Chip, Problem
from ragged.quant.formats import accumulator_dtype


class Details(NamedTuple):
    """What a launch of a kernel with one ragged letter, or none, knows besides the call."""

    tiled: Problem
    ways: tuple[str, str]  # of the terms' scales: see `scale_ways`
    lanes: int | None  # extent of the contracted blocks whose products are scaled one by one, if they are


@dataclass(frozen=True)
class Kernel:
    """What a kernel with one ragged letter, or none, is built from."""

    launch: Launch  # with `Details`
    scales: tuple[Blocks | None, Blocks | None]

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

    def buffers(self, *arrays: Any) -> int:
        """Buffers of each operand. More than two only where all copies are of whole tiles of memory: Mosaic insists."""
        whole = all(x.shape[-1] % tiles.LANES == x.shape[-2] % tiles.sublanes(x.dtype) == 0 for x in arrays)
        return self.problem.buffers if whole else min(self.problem.buffers, 2)

    @property
    def accumulator(self) -> Any:
        is_scaled = self.lanes is not None or self.rescales_each
        return jnp.dtype(jnp.float32) if is_scaled else accumulator_dtype(self.problem.compute)

    @property
    def wide(self) -> Any:
        """The dtype in which the accumulator and what is already there are added."""
        return jnp.float32 if jnp.issubdtype(self.problem.dtypes[2], jnp.floating) else jnp.int32

    def dot(self, x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
        x, y = (z if z.dtype == self.problem.compute else z.astype(self.problem.compute) for z in (x, y))
        return lax.dot_general(
            x,
            y,
            (((x_axis,), (y_axis,)), ((), ())),
            precision=self.dot_precision,
            preferred_element_type=accumulator_dtype(self.problem.compute),
        )

    @property
    def dot_precision(self) -> Any:
        """What was asked for; of tiles that were multiplied by their scales, all bits count."""
        if self.problem.compute != jnp.float32:
            return lax.Precision.DEFAULT  # whatever `jax.default_matmul_precision` says: the operands are exact
        eight_bits = all(dtype.itemsize == 1 for dtype in self.problem.dtypes[:2])
        return lax.Precision.HIGHEST if eight_bits else self.launch.call.options.precision

    def multiply(self, x: Array, y: Array, x_axis: int, y_axis: int, x_scales: Any, y_scales: Any, begin: Any) -> Array:
        """The product of two tiles, with the scales that change along the contracted axis; tiles begin at `begin`."""

        def dot(a: Array, b: Array) -> Array:
            return self.dot(a, b, x_axis, y_axis)

        refs = (x_scales, y_scales)
        if self.lanes is not None:
            return tpu_scales.block_products(dot, (x, y), (x_axis, y_axis), refs, self.scales, self.lanes, begin)
        scaled = []
        for tile, axis, ref, blocks, along in zip((x, y), (x_axis, y_axis), refs, self.scales, (1, 0), strict=True):
            if blocks is not None and blocks.extent is not None:
                factor = tpu_scales.spread(ref, blocks.extent, begin, tile.shape[axis], along)
                tile = tile.astype(jnp.float32) * (factor if axis == along else factor.T)
            scaled.append(tile)
        return dot(*scaled)

    def rescale(self, total: Array, x_scales: Any, y_scales: Any) -> Array:
        """The accumulator times the scales that are the same all along the contracted axis."""
        for ref, blocks in zip((x_scales, y_scales), self.scales, strict=True):
            if blocks is not None and blocks.extent is None:
                total = total.astype(jnp.float32) * ref[...]
        return total

    def run(
        self,
        body: Any,
        visits: Visits | None,
        operands: tuple[Array, Array, Array | None],
        specs: tuple[pl.BlockSpec, pl.BlockSpec],
        scale_specs: tuple[pl.BlockSpec | None, pl.BlockSpec | None],
        out_block: pl.BlockSpec,
        shape: tuple[int, ...],
        grid: tuple[Any, ...],
        semantics: tuple[str, ...],
        accumulators: list[tuple[int, int]],
        *,
        name: str,
        axes: tuple[str, str],
    ) -> Array:
        """Launches `body`. `operands` are the two that stream through VMEM, and what the product is added to.

        `axes` are the letters of the two.
        """
        lhs, rhs, existing = operands
        launch, p, tile = self.launch, self.problem, "x".join(map(str, self.tile))
        by_letter = dict(zip("mkn", self.config.along("mkn"), strict=True))
        out = jax.ShapeDtypeStruct(shape, p.dtypes[2], manual_axis_type=ManualAxisType())
        num_groups = shape[1] if p.kind == "batched" else p.groups
        estimate = {"flops": launch.flops, "bytes_accessed": launch.bytes_accessed, "transcendentals": 0}
        scalars = jax.tree.leaves(visits)
        aliases = {} if existing is None else in_place(len(scalars) + 2, out, out_block, self.target.interpret)
        with jax.named_scope(f"ragged_{name}"):
            return buffered_pallas_call(
                body,
                out,
                grid=grid,
                in_specs=[*specs, None if existing is None else out_block, *scale_specs],
                out_specs=out_block,
                input_buffer_count=[self.buffers(lhs, rhs, out)] * 2 + [2] * 3,
                scratch_shapes=[pltpu.VMEM(shape, self.accumulator) for shape in accumulators],
                dimension_semantics=semantics,
                vmem_limit_bytes=None if self.target.device is None else self.chip.vmem * 6 // 5,
                input_output_aliases=aliases,
                interpret=self.target.interpret,
                device=self.target.device or DEFAULT_TPU,
                name=f"{name}_{tile}",
                cost_estimate=pl.CostEstimate(**estimate),
                metadata=kernel_metadata((*axes, launch.call.product.out), by_letter, p.dtypes, num_groups),
            )(visits, lhs, rhs, existing, *(s and s.values for s in self.scales))


def in_chunks(low: Any, high: Any, rows: int, visit: Callable[[Any], None]) -> None:
    """Visits the chunks of a tile's rows that hold any of `low..high`."""
    small = tiles.chunk(rows)
    if small == rows:
        pl.when(high > low)(lambda: visit(pl.ds(0, rows)))
        return

    def part(index: Any, carry: None) -> None:
        visit(pl.ds(pl.multiple_of(index * small, small), small))

    lax.fori_loop(low // small, pl.cdiv(high, small), part, None)


def accumulate(step: Any, steps: int, multiply: Any, store: Any, accumulator: Any = None, rows: Any = ...) -> None:
    """Adds up `multiply(is_last)` over the tiles of the contracted letter, and stores the sum at the last."""
    if steps == 1:
        store(multiply(True))
        return

    @pl.when(step == 0)
    def _() -> None:
        accumulator[rows] = multiply(False)

    @pl.when((step > 0) & (step < steps - 1))
    def _() -> None:
        accumulator[rows] += multiply(False)

    @pl.when(step == steps - 1)
    def _() -> None:
        store(accumulator[rows] + multiply(True))


def select_first(x: Array, count: int, axis: int) -> Array:
    """`x` with zeros from index `count` of `axis` on: what a partial tile holds there is undefined."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) < count, x, jnp.zeros_like(x))


def select_rows(x: Array, low: Any, high: Any) -> Array:
    """`x` with zeros outside of rows `low..high`."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((row >= low) & (row < high), x, jnp.zeros_like(x))


def with_batch(x: Array, ndim: int) -> Array:
    return x if x.ndim > ndim else x[None]
