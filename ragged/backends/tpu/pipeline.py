"""A Pallas call for TPUs with any number of buffers for each input. The grid's extents may be run-time values."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh


class Input(NamedTuple):
    """An array that a kernel reads, and its block for each point of the grid."""

    array: Array
    spec: pl.BlockSpec


class Pipeline(NamedTuple):
    """The grid of a Pallas call, and the blocks that are fetched and stored at each of its points.

    - `grid`: ints, and `()` int32 arrays for run-time extents.
    - `in_specs`: a pytree of `pl.BlockSpec` for each input. An index map is called as `index_map(*ids, prefetch)`. With
      the memory space `pl.ANY`, the input stays in HBM.
    - `out_specs`, `scratch_shapes`: as in `pl.pallas_call`.
    - `input_buffer_count`: number of buffers, for all inputs or for each; None for an input that isn't streamed.
    - `use_lookahead`: with more than two buffers, fetch the next *different* block as soon as a buffer is free.
    - `dimension_semantics`: "parallel" or "arbitrary" for each dim of the grid. Two cores can share only the first dim.
    """

    grid: tuple[int | Array, ...]
    in_specs: Sequence[Any]
    out_specs: Any
    scratch_shapes: Sequence[Any] = ()
    input_buffer_count: int | Sequence[int | None] = 2
    use_lookahead: bool = True
    dimension_semantics: Sequence[str] | None = None

    @property
    def counts(self) -> list[int | None]:
        count = self.input_buffer_count
        return [count] * len(self.in_specs) if isinstance(count, int) else list(count)


def buffered_pallas_call(
    body: Callable[..., None],
    out_shape: Any,
    pipeline: Pipeline,
    *,
    input_output_aliases: dict[int, int] | None = None,
    interpret: Any = False,
    device: tuple[str, int] = ("TPU v5 lite", 1),
    **options: Any,
) -> Callable[..., Any]:
    """A function `(prefetch, *inputs) -> out` that runs `body` at each point of the grid; `out` may be a list.

    With at most two buffers for each input, the compiler's pipeline is used, with more Pallas's `emit_pipeline`.

    **Arguments:**

    - `body`: called as `body(ids, prefetch, *inputs, *outs, *scratch)`: the grid's indices, the scalars, then refs.
    - `out_shape`: shape of the output, or a list of shapes.
    - `input_output_aliases`: maps an input's position among the leaves of `(prefetch, *inputs)` to an output's.
    - `interpret`: as in `pl.pallas_call`.
    - `device`: kind and number of cores of the TPU, for `emit_pipeline`.
    - `options`: `vmem_limit_bytes`, and options of `pl.pallas_call`: `name`, `cost_estimate`, `metadata`, ...

    **Raises:** `ValueError` if the number of buffer counts isn't the number of inputs, or a count is below 1.
    """
    counts, grid = pipeline.counts, pipeline.grid
    if len(counts) != len(pipeline.in_specs):
        raise ValueError(
            f"`buffered_pallas_call`: {len(counts)} buffer counts for {len(pipeline.in_specs)} inputs.\n"
            "`input_buffer_count` is one int for all inputs, or one entry for each."
        )
    if any(count is not None and count < 1 for count in counts):
        raise ValueError(f"`buffered_pallas_call`: `input_buffer_count` is {counts}.\nEach must be at least 1.")
    semantics = tuple(pipeline.dimension_semantics or ("arbitrary",) * len(grid))
    call = partial(_call, out_shape, interpret=interpret, **options)
    aliases = input_output_aliases or {}
    if any(count is not None and count > 2 for count in counts):
        shared = semantics[0] == "parallel" and device[1] > 1
        return _emitted(call, body, pipeline, aliases, shared, interpret, device)

    def step(prefetch: Any, *refs: Any) -> None:
        body(tuple(pl.program_id(i) for i in range(len(grid))), prefetch, *refs)

    blocks = [
        jax.tree.map(partial(_buffered, count=count), spec)
        for spec, count in zip(pipeline.in_specs, counts, strict=True)
    ]
    return call(step, pipeline._replace(in_specs=blocks, dimension_semantics=semantics), aliases)


def _call(
    out_shape: Any,
    body: Callable[..., None],
    pipeline: Pipeline,
    aliases: dict[int, int],
    *,
    vmem_limit_bytes: int | None = None,
    **options: Any,
) -> Callable[..., Any]:
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=pipeline.grid,
        in_specs=pipeline.in_specs,
        out_specs=pipeline.out_specs,
        scratch_shapes=pipeline.scratch_shapes,
    )
    semantics: Any = pipeline.dimension_semantics
    params = pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes, dimension_semantics=semantics)
    return pl.pallas_call(
        body, out_shape, grid_spec=spec, compiler_params=params, input_output_aliases=aliases, **options
    )


def _emitted(
    call: Callable[..., Any],
    body: Callable[..., None],
    pipeline: Pipeline,
    aliases: dict[int, int],
    shared: bool,
    interpret: Any,
    device: tuple[str, int],
) -> Callable[..., Any]:
    """The function of `buffered_pallas_call`, with `emit_pipeline`.

    1. The outer Pallas call leaves all streamed arrays in HBM. If `shared`, its grid is the first dim, which two cores
       share; else it has no grid.
    2. The outer body runs `emit_pipeline` over the other dims.
    3. `body` gets blocks of the streamed inputs, and refs of the others, in the order of the inputs.
    """
    grid, in_specs, out_specs, counts = pipeline.grid, pipeline.in_specs, pipeline.out_specs, pipeline.counts
    # The plain interpreter doesn't support copies of partial blocks, whose sizes are run-time values.
    interpret = pltpu.InterpretParams(buffer_bounds="padded") if interpret is True else interpret
    dynamic = [i for i, extent in enumerate(grid) if not isinstance(extent, int)]
    run_time = [jnp.asarray(grid[i], jnp.int32).reshape(1) for i in dynamic]
    (specs, treedef), out_blocks = jax.tree.flatten(in_specs), jax.tree.leaves(out_specs)
    depths = jax.tree.leaves([jax.tree.map(lambda _, c=c: c or 0, s) for s, c in zip(in_specs, counts, strict=True)])
    is_streamed = [depth > 0 and spec.memory_space is not pl.ANY for spec, depth in zip(specs, depths, strict=True)]

    def outer(scalars: Any, *refs: Any) -> None:
        prefetch, extents = scalars
        flat, results = jax.tree.leaves(refs[: len(in_specs)]), refs[len(in_specs) :]
        outs, scratch = results[: len(out_blocks)], results[len(out_blocks) :]
        first = (pl.program_id(0),) if shared else ()
        inner_grid = [extents[dynamic.index(i)][0] if i in dynamic else n for i, n in enumerate(grid)][len(first) :]

        def bound(spec: Any, depth: int | None = None) -> Any:
            def index_map(*ids: Any) -> Any:
                return spec.index_map(*first, *ids, prefetch)

            ahead = pipeline.use_lookahead and (depth or 0) > 2
            return _buffered(dataclasses.replace(spec, index_map=index_map), depth, ahead)

        def step(*blocks: Any) -> None:
            ids = (*first, *(pl.program_id(i) for i in range(len(inner_grid))))
            streamed, stored = iter(blocks), blocks[len(blocks) - len(outs) :]
            inputs = [next(streamed) if in_blocks else ref for ref, in_blocks in zip(flat, is_streamed, strict=True)]
            body(ids, prefetch, *jax.tree.unflatten(treedef, inputs), *stored, *scratch)

        pltpu.emit_pipeline(
            step,
            grid=tuple(inner_grid),
            in_specs=[bound(s, d) for s, d, use in zip(specs, depths, is_streamed, strict=True) if use],
            out_specs=[bound(spec) for spec in out_blocks],
        )(*(ref for ref, use in zip(flat, is_streamed, strict=True) if use), *outs)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    outer_in_specs = treedef.unflatten(in_hbm if use else spec for spec, use in zip(specs, is_streamed, strict=True))
    outer_grid, semantics = ((grid[0],), ("parallel",)) if shared else ((), None)
    aliases = {position + len(run_time): to for position, to in aliases.items()}
    outer_out_specs = jax.tree.map(lambda _: in_hbm, out_specs)
    outer_pipeline = Pipeline(
        outer_grid, outer_in_specs, outer_out_specs, pipeline.scratch_shapes, dimension_semantics=semantics
    )
    emitted = call(outer, outer_pipeline, aliases, interpret=interpret)

    def run(prefetch: Any, *inputs: Any) -> Any:
        # `emit_pipeline` reads the TPU's kind from the mesh in context.
        kind = AbstractDevice(*device, "tpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            return emitted((prefetch, run_time), *inputs)

    return run


def in_place(operand: int, out: jax.ShapeDtypeStruct, block: pl.BlockSpec, interpret: Any) -> dict[int, int]:
    """`input_output_aliases` for an operand whose buffer becomes the result.

    Empty for a result that ends in a partial block, if `interpret` is `pltpu.InterpretParams`: in jax 0.11 and 0.12, it
    returns whole blocks of an aliased array.
    """
    shape: Any = block.block_shape
    whole = all(size is None or extent % size == 0 for extent, size in zip(out.shape, shape, strict=True))
    return {operand: 0} if whole or not isinstance(interpret, pltpu.InterpretParams) else {}


def _buffered(spec: Any, count: int | None, use_lookahead: bool = False) -> Any:
    if count is None or count == 2 or spec.memory_space is pl.ANY:
        return spec
    return dataclasses.replace(spec, pipeline_mode=pl.Buffered(count, use_lookahead=use_lookahead))
