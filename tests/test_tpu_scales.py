"""Scales that are multiplied into a tile on a TPU: in bfloat16 where that is exact, each element's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental import pallas as pl

import ragged
from ragged import GroupedTensor, Scaling, quantize
from ragged._matmul import product_of
from ragged.backends.tpu import scales
from ragged.product import lowering

from . import ran, tpu

Aval = jax.ShapeDtypeStruct

CASES: dict[str, tuple[int, int, int, int, int]] = {  # extent, blocks, kept, width, start
    "whole": (32, 8, 16, 256, 0),
    "second tile": (32, 16, 16, 256, 256),
    "second register": (32, 256, 8, 1024, 5120),
    "past the end": (32, 128, 8, 768, 3840),
    "a rest": (32, 10, 8, 300, 0),
    "one row": (32, 8, 1, 256, 0),
    "of 48": (48, 6, 8, 288, 0),
    "of 16": (16, 16, 8, 256, 0),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_each_element_has_its_scale(case: str, axis: int, turned: bool) -> None:
    """F4: along sublanes and lanes, from where a step begins, known when it runs; zeros or any past the end."""
    extent, blocks, kept, width, start = CASES[case]
    values = np.exp2(np.random.default_rng(0).integers(-20, 20, (kept, blocks))).astype(np.float32)
    want = np.repeat(values, extent, axis=1)[:, start : start + width]
    stored = values if (axis == 1) != turned else values.T
    shape = (kept, width) if axis == 1 else (width, kept)

    def body(place: Any, ref: Any, out: Any) -> None:
        begin = 0 if width >= blocks * extent else pl.multiple_of(place[0], 128)
        out[...] = scales.repeated(ref, turned, extent, begin, width, axis, jnp.bfloat16)

    run = pl.pallas_call(body, Aval(shape, jnp.bfloat16), interpret=True)
    got = np.asarray(run(jnp.array([start], jnp.int32), jnp.asarray(stored)), np.float32)
    got = got if axis == 1 else got.T
    np.testing.assert_array_equal(got[:, : want.shape[1]], want)


def operands(k: int, n: int) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(0))
    sizes = jnp.array([5, 0, 11, 30], jnp.int32)
    return jax.random.normal(keys[0], (48, k)), jax.random.normal(keys[1], (4, k, n)), sizes


@pytest.mark.long
@pytest.mark.parametrize("block", [(1, 32), (128, 128)])
def test_powers_of_two_are_exact_in_bfloat16(block: tuple[int, int]) -> None:
    """F4: what such scales multiply on a TPU are bfloat16 tiles, and no bit of a number or a scale is lost."""
    x, w, sizes = operands(256, 128)
    of_rows, of_matrices = (Scaling(each, jnp.float8_e8m0fnu) for each in ((1, block[1]), block))
    qx = quantize(GroupedTensor(x * jnp.exp2(jnp.arange(48.0) - 20)[:, None], sizes), "float8_e4m3fn", of_rows)
    qw = quantize(GroupedTensor(w.mT), "float8_e4m3fn", of_matrices).mT
    with ran.interpreted("pallas_tpu") as launches:
        got = ragged.matmul(qx, qw, preferred_element_type=jnp.float32).data
        jax.block_until_ready(got)
        assert [name for name, _ in launches] == ["pallas_tpu"]
    _, given, call, *_ = product_of(qx, qw, preferred_element_type=jnp.float32)
    with lowering.target_of("tpu", call.options) as target:
        details = lowering.launch_of("tpu", given, call, target).details
        assert details.tiled.dot[:2] == (jnp.bfloat16, jnp.bfloat16) and details.ways == ("tile", "tile")
    rows, matrices = np.asarray(qx.dequantize().data, np.float64), np.asarray(qw.dequantize().data, np.float64)
    for row, group in enumerate(np.repeat(np.arange(4), sizes)):
        want = rows[row] @ matrices[group]
        np.testing.assert_allclose(
            got[row], want, rtol=0, atol=1e-6 * np.abs(rows[row]) @ np.abs(matrices[group]).max(1)
        )


@pytest.mark.parametrize(
    "generation",
    [
        pytest.param("tpu7x", marks=pytest.mark.long),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("v5e", "v5p", "v6e")),
    ],
)
def test_compiled(generation: str) -> None:
    """F4: forward and backward of `mxfp8`, with a contraction in several tiles, for real TPUs."""
    avals = Aval((512, 8192), jnp.bfloat16), Aval((4, 8192, 640), jnp.bfloat16), Aval((4,), jnp.int32)

    def step(x: Array, w: Array, s: Array) -> Any:
        def loss(x: Array, w: Array) -> Array:
            return jnp.sum(ragged.matmul(GroupedTensor(x, s), w, recipe="mxfp8").data.astype(jnp.float32))

        return jax.value_and_grad(loss, (0, 1))(x, w)

    assert len(tpu.compile_for(generation, step, *avals).kernels) == 3
