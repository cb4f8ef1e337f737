"""A Pallas call for TPUs whose inputs are buffered as deep as asked, and whose grid may end at run time."""

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
    """A function `(prefetch, *inputs) -> out` that runs `body` at each point of the grid.

    With at most two buffers for each input this is the compiler's own pipeline. With more it is Pallas's
    `emit_pipeline`, which fetches ahead of time as many blocks as there are buffers for.

    **Arguments:**

    - `body`: called as `body(ids, prefetch, *inputs, out, *scratch)`: the grid's indices, then the scalars, then refs.
    - `grid`: ints, and `()` int32 arrays known only at run time.
    - `in_specs`: a pytree of `pl.BlockSpec` for each input. An index map is called as `index_map(*ids, prefetch)`. A
      spec in memory space `pl.ANY` leaves its input in HBM; it has no buffers.
    - `out_specs`: the spec of the output, likewise.
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
    call = _Call(
        body,
        out_shape,
        grid,
        in_specs,
        out_specs,
        counts,
        list(scratch_shapes),
        tuple(dimension_semantics or ("arbitrary",) * len(grid)),
        vmem_limit_bytes,
        input_output_aliases or {},
        kwargs,
    )
    if all(count is None or count <= 2 for count in counts):
        return _blocked(call, interpret)
    return _emitted(call, use_lookahead, interpret, device)


class _Call(NamedTuple):
    """What is asked of `buffered_pallas_call`."""

    body: Callable[..., None]
    out_shape: Any
    grid: tuple[int | Array, ...]
    in_specs: Sequence[Any]
    out_specs: Any
    counts: list[int | None]
    scratch_shapes: list[Any]
    semantics: Any
    vmem_limit_bytes: int | None
    aliases: dict[int, int]
    kwargs: dict[str, Any]


def _blocked(call: _Call, interpret: Any) -> Callable[..., Any]:
    """By the compiler's own pipeline."""

    def step(prefetch: Any, *refs: Any) -> None:
        call.body(tuple(pl.program_id(i) for i in range(len(call.grid))), prefetch, *refs)

    blocks = [
        jax.tree.map(partial(_buffered, count=count), spec)
        for spec, count in zip(call.in_specs, call.counts, strict=True)
    ]
    return pl.pallas_call(
        step,
        call.out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=call.grid,
            in_specs=blocks,
            out_specs=call.out_specs,
            scratch_shapes=call.scratch_shapes,
        ),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=call.vmem_limit_bytes, dimension_semantics=call.semantics
        ),
        input_output_aliases=call.aliases,
        interpret=interpret,
        **call.kwargs,
    )


def _emitted(call: _Call, use_lookahead: bool, interpret: Any, device: tuple[str, int]) -> Callable[..., Any]:
    """By Pallas's `emit_pipeline`."""
    # The plain interpreter knows no copies of a size known only at run time, as those of partial blocks are.
    interpret = pltpu.InterpretParams(buffer_bounds="padded") if interpret is True else interpret
    # Extents known only at run time are scalars too. Two cores share the first dim: each has its own pipeline.
    grid, shared = call.grid, call.semantics[0] == "parallel" and device[1] > 1
    dynamic = [i for i, extent in enumerate(grid) if not isinstance(extent, int)]
    run_time = [jnp.asarray(grid[i], jnp.int32).reshape(1) for i in dynamic]
    specs, treedef = jax.tree.flatten(list(call.in_specs))
    counted = zip(call.in_specs, call.counts, strict=True)
    depths = jax.tree.leaves([jax.tree.map(lambda _, c=count: c or 0, spec) for spec, count in counted])
    streamed = [depth > 0 and spec.memory_space is not pl.ANY for spec, depth in zip(specs, depths, strict=True)]

    def outer(scalars: Any, *refs: Any) -> None:
        prefetch, extents = scalars
        flat, (out, *scratch) = jax.tree.leaves(refs[: len(call.in_specs)]), refs[len(call.in_specs) :]
        first = (pl.program_id(0),) if shared else ()
        inner_grid = [extents[dynamic.index(i)][0] if i in dynamic else n for i, n in enumerate(grid)][len(first) :]

        def bound(spec: Any, depth: int | None = None) -> Any:
            def index_map(*ids: Any) -> Any:
                return spec.index_map(*first, *ids, prefetch)

            return _buffered(dataclasses.replace(spec, index_map=index_map), depth, use_lookahead and (depth or 0) > 2)

        def step(*blocks: Any) -> None:
            ids = (*first, *(pl.program_id(i) for i in range(len(inner_grid))))
            *given, result = blocks
            both = iter(given)
            inputs = [next(both) if in_blocks else ref for ref, in_blocks in zip(flat, streamed, strict=True)]
            call.body(ids, prefetch, *jax.tree.unflatten(treedef, inputs), result, *scratch)

        pltpu.emit_pipeline(
            step,
            grid=tuple(inner_grid),
            in_specs=[bound(s, d) for s, d, use in zip(specs, depths, streamed, strict=True) if use],
            out_specs=[bound(call.out_specs)],
        )(*(ref for ref, use in zip(flat, streamed, strict=True) if use), out)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    emitted = pl.pallas_call(
        outer,
        call.out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(grid[0],) if shared else (),
            in_specs=treedef.unflatten(anywhere if use else spec for spec, use in zip(specs, streamed, strict=True)),
            out_specs=anywhere,
            scratch_shapes=call.scratch_shapes,
        ),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=call.vmem_limit_bytes, dimension_semantics=("parallel",) if shared else None
        ),
        input_output_aliases={place + len(run_time): to for place, to in call.aliases.items()},
        interpret=interpret,
        **call.kwargs,
    )

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
