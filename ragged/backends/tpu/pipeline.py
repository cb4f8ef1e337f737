"""A Pallas call for TPUs whose inputs are buffered as deep as asked, and whose grid may end at run time."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh


def buffered_pallas_call(
    body: Callable[..., None],
    out_shape: Any,
    *,
    grid: tuple[int | Array, ...],
    in_specs: Sequence[Any],
    out_specs: Any,
    input_buffer_count: int | Sequence[int | None] = 2,
    use_lookahead: bool = True,
    scratch_shapes: Sequence[Any] = (),
    dimension_semantics: Sequence[str] | None = None,
    vmem_limit_bytes: int | None = None,
    input_output_aliases: dict[int, int] | None = None,
    interpret: Any = False,
    device: tuple[str, int] = ("TPU v5 lite", 1),
    **kwargs: Any,
) -> Callable[..., Any]:
    """A function `(prefetch, *inputs) -> out`, or a list of them, that runs `body` at each point of the grid.

    With at most two buffers for each input this is the compiler's own pipeline. With more it is Pallas's
    `emit_pipeline`, which fetches ahead of time as many blocks as there are buffers for.

    **Arguments:**

    - `body`: called as `body(ids, prefetch, *inputs, *outs, *scratch)`: the grid's indices, then the scalars, then
      refs.
    - `out_shape`: of the output, or a list.
    - `grid`: ints, and `()` int32 arrays known only at run time.
    - `in_specs`: a pytree of `pl.BlockSpec` for each input. An index map is called as `index_map(*ids, prefetch)`. A
      spec in memory space `pl.ANY` leaves its input in HBM; it has no buffers.
    - `out_specs`: the spec of the output, likewise, or a list.
    - `input_buffer_count`: how many buffers each input has, one int for all or one for each (a pytree's blocks share
      it); None for one that is there as a whole, in HBM or scalar memory.
    - `use_lookahead`: with more than two buffers, fetch the next *other* block as soon as a buffer is free, however
      many steps ahead it is used.
    - `dimension_semantics`: "parallel" or "arbitrary" for each dim of the grid. Two cores share only a first dim.
    - `input_output_aliases`: from an input's position among the leaves of `(prefetch, *inputs)` to the output's.
    - `interpret`: as in `pl.pallas_call`.
    - `device`: kind and number of cores of the TPU that this is for; `emit_pipeline` asks.
    - `kwargs`: the rest, handed to `pl.pallas_call`: `name`, `cost_estimate`, `metadata`, ...

    **Raises:** `ValueError` if there are not as many buffer counts as inputs, or one is below 1.
    """
    counts: list[int | None] = (
        [input_buffer_count] * len(in_specs) if isinstance(input_buffer_count, int) else list(input_buffer_count)
    )
    if len(counts) != len(in_specs):
        raise ValueError(
            f"`buffered_pallas_call`: {len(counts)} buffer counts for {len(in_specs)} inputs.\n"
            "`input_buffer_count` is one int for all inputs, or one entry for each."
        )
    if any(count is not None and count < 1 for count in counts):
        raise ValueError(f"`buffered_pallas_call`: `input_buffer_count` is {counts}.\nEach must be at least 1.")
    semantics: Any = tuple(dimension_semantics or ("arbitrary",) * len(grid))
    aliases, specs = input_output_aliases or {}, list(in_specs)
    call = partial(_call, out_shape, list(scratch_shapes), vmem_limit_bytes, **kwargs)
    if any(count is not None and count > 2 for count in counts):
        shared = semantics[0] == "parallel" and device[1] > 1
        return _emitted(call, body, grid, specs, counts, out_specs, aliases, shared, use_lookahead, interpret, device)

    def step(prefetch: Any, *refs: Any) -> None:
        body(tuple(pl.program_id(i) for i in range(len(grid))), prefetch, *refs)

    blocks = [jax.tree.map(partial(_buffered, count=count), spec) for spec, count in zip(specs, counts, strict=True)]
    return call(step, grid, blocks, out_specs, semantics, aliases, interpret)


def _call(
    out_shape: Any,
    scratch_shapes: list[Any],
    vmem_limit_bytes: int | None,
    body: Callable[..., None],
    grid: tuple[Any, ...],
    in_specs: list[Any],
    out_specs: Any,
    semantics: Any,
    aliases: dict[int, int],
    interpret: Any,
    **kwargs: Any,
) -> Callable[..., Any]:
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch_shapes
    )
    params = pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes, dimension_semantics=semantics)
    options: dict[str, Any] = {"input_output_aliases": aliases, "interpret": interpret, **kwargs}
    return pl.pallas_call(body, out_shape, grid_spec=spec, compiler_params=params, **options)


def _emitted(
    call: Callable[..., Any],
    body: Callable[..., None],
    grid: tuple[Any, ...],
    in_specs: list[Any],
    counts: list[int | None],
    out_specs: Any,
    aliases: dict[int, int],
    shared: bool,
    use_lookahead: bool,
    interpret: Any,
    device: tuple[str, int],
) -> Callable[..., Any]:
    """By Pallas's `emit_pipeline`. `shared`: two cores share the first dim, each with a pipeline of its own."""
    # The plain interpreter knows no copies of a size known only at run time, as those of partial blocks are.
    interpret = pltpu.InterpretParams(buffer_bounds="padded") if interpret is True else interpret
    # Extents known only at run time are scalars too.
    dynamic = [i for i, extent in enumerate(grid) if not isinstance(extent, int)]
    run_time = [jnp.asarray(grid[i], jnp.int32).reshape(1) for i in dynamic]
    (specs, treedef), out_blocks = jax.tree.flatten(in_specs), jax.tree.leaves(out_specs)
    depths = jax.tree.leaves([jax.tree.map(lambda _, c=c: c or 0, s) for s, c in zip(in_specs, counts, strict=True)])
    streamed = [depth > 0 and spec.memory_space is not pl.ANY for spec, depth in zip(specs, depths, strict=True)]

    def outer(scalars: Any, *refs: Any) -> None:
        prefetch, extents = scalars
        flat, results = jax.tree.leaves(refs[: len(in_specs)]), refs[len(in_specs) :]
        outs, scratch = results[: len(out_blocks)], results[len(out_blocks) :]
        first = (pl.program_id(0),) if shared else ()
        inner_grid = [extents[dynamic.index(i)][0] if i in dynamic else n for i, n in enumerate(grid)][len(first) :]

        def bound(spec: Any, depth: int | None = None) -> Any:
            def index_map(*ids: Any) -> Any:
                return spec.index_map(*first, *ids, prefetch)

            return _buffered(dataclasses.replace(spec, index_map=index_map), depth, use_lookahead and (depth or 0) > 2)

        def step(*blocks: Any) -> None:
            ids = (*first, *(pl.program_id(i) for i in range(len(inner_grid))))
            both, stored = iter(blocks), blocks[len(blocks) - len(outs) :]
            inputs = [next(both) if in_blocks else ref for ref, in_blocks in zip(flat, streamed, strict=True)]
            body(ids, prefetch, *jax.tree.unflatten(treedef, inputs), *stored, *scratch)

        pltpu.emit_pipeline(
            step,
            grid=tuple(inner_grid),
            in_specs=[bound(s, d) for s, d, use in zip(specs, depths, streamed, strict=True) if use],
            out_specs=[bound(spec) for spec in out_blocks],
        )(*(ref for ref, use in zip(flat, streamed, strict=True) if use), *outs)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    places = treedef.unflatten(anywhere if use else spec for spec, use in zip(specs, streamed, strict=True))
    own_grid, semantics = ((grid[0],), ("parallel",)) if shared else ((), None)
    aliases = {place + len(run_time): to for place, to in aliases.items()}
    out_places = jax.tree.map(lambda _: anywhere, out_specs)
    emitted = call(outer, own_grid, places, out_places, semantics, aliases, interpret)

    def run(prefetch: Any, *inputs: Any) -> Any:
        # `emit_pipeline` asks which TPU it is for; here that may be one that isn't in the machine.
        kind = AbstractDevice(*device, "tpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            return emitted((prefetch, run_time), *inputs)

    return run


def in_place(operand: int, out: jax.ShapeDtypeStruct, block: pl.BlockSpec, interpret: Any) -> dict[int, int]:
    """`input_output_aliases` for an operand whose place the result takes.

    Of what is aliased, `pltpu.InterpretParams` (jax 0.11 and 0.12) returns whole blocks, also where the result ends in
    part of one: there they are two arrays.
    """
    shape: Any = block.block_shape
    whole = all(size is None or extent % size == 0 for extent, size in zip(out.shape, shape, strict=True))
    return {operand: 0} if whole or not isinstance(interpret, pltpu.InterpretParams) else {}


def _buffered(spec: Any, count: int | None, use_lookahead: bool = False) -> Any:
    """`spec` with `count` buffers. Two are what it has by itself."""
    if count is None or count == 2 or spec.memory_space is pl.ANY:
        return spec
    return dataclasses.replace(spec, pipeline_mode=pl.Buffered(count, use_lookahead=use_lookahead))
