"""`buffered_pallas_call` by itself, and how a launch names its kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ragged.backends.tpu.pipeline import Pipeline, buffered_pallas_call
from tests import products
from tests.contract.launches import equations


def gather_and_scale(rows: Any, table: Any, count: int, scale: Any, buffers: Any, **options: Any) -> Any:
    """`out[i] = (data + more)[rows[i]] * scale` for `i < count`; rows are scalars, the count is known at run time."""

    def body(ids: Any, prefetch: Any, table: Any, scale: Any, out: Any, scratch: Any) -> None:
        at, part = ids
        scratch[...] = table["data"][...] + table["more"][...]
        out[...] = jnp.where(prefetch["rows"][at] >= 0, scratch[...] * scale[part], 0.0)

    def block(at: Any, part: Any, prefetch: Any) -> Any:
        return prefetch["rows"][at], 0, part

    spec = pl.BlockSpec((None, 8, 128), block)
    call = buffered_pallas_call(
        body,
        jax.ShapeDtypeStruct((8, 8, 256), jnp.float32),
        Pipeline(
            grid=(jnp.int32(count), 2),
            in_specs=[{"data": spec, "more": spec}, pl.BlockSpec(memory_space=pltpu.SMEM)],
            out_specs=pl.BlockSpec((None, 8, 128), lambda at, part, _: (at, 0, part)),
            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
            input_buffer_count=buffers,
        ),
        interpret=pltpu.InterpretParams(detect_races=True),
        **options,
    )
    return call({"rows": rows}, table, scale)


@pytest.mark.long
@pytest.mark.parametrize("buffers, count", [([4, None], 1), (1, 8), (2, 8), (3, 5)], ids=str)
def test_any_number_of_buffers(buffers: Any, count: int) -> None:
    """Scalars in index maps, static and dynamic dims, pytrees of specs, scratch, kwargs, lookahead."""
    rng = np.random.default_rng(0)
    data, more = (rng.standard_normal((6, 8, 256)).astype(np.float32) for _ in range(2))
    rows = np.array([3, 3, 0, 5, 5, 5, 1, 3], np.int32)
    buffers = [buffers, None] if isinstance(buffers, int) and buffers > 2 else buffers
    out = gather_and_scale(
        jnp.asarray(rows),
        {"data": jnp.asarray(data), "more": jnp.asarray(more)},
        count,
        jnp.array([2.0, 3.0]),
        buffers,
        name="gather_and_scale",
    )
    want = (data + more)[rows] * np.repeat([2.0, 3.0], 128).astype(np.float32)
    np.testing.assert_allclose(out[:count], want[:count], rtol=1e-6)


@pytest.mark.parametrize("buffers", [pytest.param(2, marks=pytest.mark.long), [3, None]], ids=str)
def test_an_operand_left_in_hbm(buffers: Any) -> None:
    """One that no pipeline brings, beside one that is streamed; the body copies what it wants of it."""

    def body(ids: Any, prefetch: Any, x: Any, table: Any, out: Any, scratch: Any) -> None:
        pltpu.sync_copy(table.at[prefetch["rows"][ids[0]]], scratch)
        out[...] = x[...] + scratch[...]

    block = pl.BlockSpec((None, 8, 128), lambda at, _: (at, 0, 0))
    call = buffered_pallas_call(
        body,
        jax.ShapeDtypeStruct((4, 8, 128), jnp.float32),
        Pipeline(
            grid=(4,),
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
            input_buffer_count=buffers,
        ),
        interpret=pltpu.InterpretParams(detect_races=True),
    )
    rng, rows = np.random.default_rng(0), np.array([2, 0, 2, 1], np.int32)
    x, table = (rng.standard_normal((n, 8, 128)).astype(np.float32) for n in (4, 3))
    out = call({"rows": jnp.asarray(rows)}, jnp.asarray(x), jnp.asarray(table))
    np.testing.assert_allclose(out, x + table[rows], rtol=1e-6)


@pytest.mark.parametrize(
    "counts, text",
    [
        ([2], "`buffered_pallas_call`: 1 buffer counts for 2 inputs.\n`input_buffer_count` is one int for all inputs"),
        ([2, 0], "`buffered_pallas_call`: `input_buffer_count` is [2, 0].\nEach must be at least 1."),
    ],
)
def test_buffer_counts_that_make_no_sense(counts: list[int], text: str) -> None:
    """As many counts as inputs, each at least 1."""
    table = dict.fromkeys(("data", "more"), jnp.zeros((6, 8, 256)))
    with pytest.raises(ValueError) as caught:
        gather_and_scale(jnp.zeros(8, jnp.int32), table, 8, jnp.ones(2), counts)
    assert text in str(caught.value)


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_names(transpose_rhs: bool) -> None:
    """A name with tile and transposition, a scope."""
    lhs, sizes = jnp.ones((256, 384), jnp.bfloat16), jnp.array([100, 50], jnp.int32)
    rhs = jnp.ones((2, 128, 384) if transpose_rhs else (2, 384, 128), jnp.bfloat16)

    def product(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return products.grouped_matmul(
            "pallas_tpu",
            lhs,
            rhs,
            sizes,
            preferred_element_type=jnp.bfloat16,
            tiling=(64, 128, 128),
            transpose_rhs=transpose_rhs,
        )

    (call,) = equations(jax.make_jaxpr(product)(lhs, rhs, sizes).jaxpr, "pallas_call")
    assert call.params["name"] == f"grouped_matmul{'_transposed' if transpose_rhs else ''}_64x128x128"
    assert "ragged_grouped_matmul" in str(call.source_info.name_stack)


@pytest.mark.parametrize("kind, cores, grid", [("TPU v5", 2, (8,)), ("TPU v5 lite", 1, ())])
def test_cores_share_the_first_dim(kind: str, cores: int, grid: tuple[int, ...]) -> None:
    """With more than two buffers, each of two cores has a pipeline of its own part of the first dim."""
    spec = pl.BlockSpec((None, 8, 128), lambda at, part, _: (at, 0, part))

    def body(ids: Any, prefetch: Any, x: Any, out: Any) -> None:
        out[...] = x[...]

    call = buffered_pallas_call(
        body,
        jax.ShapeDtypeStruct((8, 8, 256), jnp.float32),
        Pipeline((8, 2), [spec], spec, input_buffer_count=3, dimension_semantics=("parallel", "arbitrary")),
        device=(kind, cores),
    )
    (found,) = equations(jax.make_jaxpr(call)({}, jnp.zeros((8, 8, 256))).jaxpr, "pallas_call")
    assert found.params["grid_mapping"].grid == grid
    assert found.params["compiler_params"].dimension_semantics == (("parallel",) if grid else None)


@pytest.mark.parametrize("buffers", [2, 3])
def test_the_result_takes_the_place_of_existing_out(buffers: int) -> None:
    """With any number of buffers, and none of another operand's."""
    lhs, rhs, existing = (jnp.ones(shape) for shape in ((256, 384), (2, 384, 128), (256, 128)))

    def product(lhs: Any, rhs: Any, sizes: Any, existing: Any) -> Any:
        options: dict[str, Any] = {"preferred_element_type": jnp.float32, "input_buffer_count": buffers}
        return products.grouped_matmul("pallas_tpu", lhs, rhs, sizes, existing_out=existing, **options)

    jaxpr: Any = jax.make_jaxpr(product)(lhs, rhs, jnp.array([100, 50], jnp.int32), existing)
    (call,) = equations(jaxpr.jaxpr, "pallas_call")
    ((operand, out),) = call.params["input_output_aliases"]
    of_grid = call.params["grid_mapping"].num_dynamic_grid_bounds
    assert call.invars[of_grid + operand].aval.shape == call.outvars[out].aval.shape == (1, 256, 128)
