"""Scales that are multiplied into a tile on a TPU: in bfloat16 where that is exact, each element's own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental import pallas as pl

import ragged
from ragged import GroupedTensor, Scaling, quantize
from ragged.backends.base import Target
from ragged.backends.tpu import scales
from ragged.core.scales import Scales
from ragged.tuning import TpuConfig
from tests import products, tpu
from tests.cases import check_error, normal, split
from tests.contract.launches import equations, interpreted

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
    "of 8, second tile": (8, 64, 8, 256, 256),
    "of 4, second tile": (4, 128, 8, 256, 256),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_each_element_has_its_scale(case: str, axis: int, turned: bool) -> None:
    """Along sublanes and lanes, from where a step begins, known when it runs; zeros or any past the end."""
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


def test_small_blocks_are_repeated_in_parts() -> None:
    """Products of the 32 scales that 128 elements have: one of all 512 takes Mosaic minutes."""

    def body(ref: Any, out: Any) -> None:
        out[...] = scales.repeated(ref, False, 4, 0, 2048, 0, jnp.float32)

    call = pl.pallas_call(body, Aval((2048, 128), jnp.float32))
    jaxpr: Any = jax.make_jaxpr(call)(Aval((512, 128), jnp.float32))
    assert {dot.invars[0].aval.shape for dot in equations(jaxpr.jaxpr, "dot_general")} == {(128, 32)}


FP8_UNIT = "f8E4M3B11FNUZ"  # how a TPU's matrix unit takes float8_e4m3fn


def operands(k: int, n: int) -> tuple[Array, Array, Array]:
    sizes = jnp.array([5, 0, 11, 30], jnp.int32)
    return normal((48, k)), normal((4, k, n), 1), sizes


@pytest.mark.long
@pytest.mark.parametrize("block", [(1, 32), (128, 128)])
def test_powers_of_two_are_exact_in_bfloat16(block: tuple[int, int]) -> None:
    """Such scales multiply tiles in bfloat16, or block products of 8-bit floats; no bit of a number or a scale is
    lost."""
    x, w, sizes = operands(256, 128)
    of_rows, of_matrices = (Scaling(each, jnp.float8_e8m0fnu) for each in ((1, block[1]), block))
    qx = quantize(GroupedTensor(x * jnp.exp2(jnp.arange(48.0) - 20)[:, None], sizes), "float8_e4m3fn", of_rows)
    qw = quantize(GroupedTensor(w.mT), "float8_e4m3fn", of_matrices).mT
    with interpreted("pallas_tpu"):
        got = ragged.matmul(qx, qw, preferred_element_type=jnp.float32).data
    multiply = partial(ragged.matmul, preferred_element_type=jnp.float32)
    multiplied = tpu.matmuls("v5e", lambda *x: multiply(*x).data, qx, qw)
    assert {first for first, _ in multiplied} == {"bf16"} and {second for _, second in multiplied} <= {"bf16", FP8_UNIT}
    rows, matrices = np.asarray(qx.dequantize().data, np.float64), np.asarray(qw.dequantize().data, np.float64)
    for row, group in enumerate(np.repeat(np.arange(4), sizes)):
        want = rows[row] @ matrices[group]
        np.testing.assert_allclose(
            got[row], want, rtol=0, atol=1e-6 * np.abs(rows[row]) @ np.abs(matrices[group]).max(1)
        )


def test_scales_and_scaled_tiles_keep_all_bits() -> None:
    """Blocks of 48, which no tile ends with: the product that repeats their scales, and that of the tiles which
    are multiplied by them, are of float32 at the highest precision."""

    def forward(x: Array, w: Array, sizes: Array, values: Array) -> Array:
        options: dict[str, Any] = {"preferred_element_type": jnp.float32, "lhs_scales": Scales(values, (1, 48))}
        return products.grouped_matmul("pallas_tpu", x, w, sizes, **options)

    fp8 = jnp.float8_e4m3fn
    avals = Aval((64, 240), fp8), Aval((2, 240, 128), fp8), Aval((2,), jnp.int32), Aval((64, 5), jnp.float32)
    jaxpr: Any = jax.make_jaxpr(forward)(*avals)
    dots = equations(jaxpr.jaxpr, "dot_general")
    assert {x.aval.dtype.name for dot in dots for x in dot.invars} == {"float32"}
    assert {dot.params["precision"] for dot in dots} == {(jax.lax.Precision.HIGHEST,) * 2}
    assert {dot.invars[0].aval.shape[1] for dot in dots} == {5, 240}  # blocks, and elements


@pytest.mark.parametrize("tile", split([192], [256]))  # of three and of two blocks of scales
def test_scales_of_a_group_that_begins_in_a_tile(tile: int) -> None:
    """It takes its own scales, and the group in front of it none of them: they may be NaN."""
    rng, sizes = np.random.default_rng(0), jnp.array([128, 128], jnp.int32)
    x, y = (rng.integers(-4, 5, (256, 128)).astype(np.float64) for _ in range(2))
    a, b = (np.exp2(rng.integers(-3, 4, (2, 128))).astype(np.float32) for _ in range(2))

    @jax.jit
    def wgrad(x: Array, y: Array, a: Array, b: Array) -> Array:
        options: dict[str, Any] = {"preferred_element_type": jnp.float32, "tiling": (128, tile, 128)}
        options |= {"lhs_scales": Scales(a, (128, 1)), "rhs_scales": Scales(b, (128, 1))}
        return products.transposed_grouped_matmul("pallas_tpu", x, y, sizes, target=Target(interpret=True), **options)

    rows = [jnp.asarray(each, jnp.float8_e4m3fn) for each in (x, y)]
    left, right = x * np.repeat(a, 128, axis=0), y * np.repeat(b, 128, axis=0)
    want = [left[:128].T @ right[:128], left[128:].T @ right[128:]]
    np.testing.assert_allclose(wgrad(*rows, a, b), want, rtol=1e-6, atol=1e-3)
    out = wgrad(*rows, np.stack([a[0], np.full(128, np.nan, np.float32)]), b)
    np.testing.assert_allclose(out[0], want[0], rtol=1e-6, atol=1e-3)
    assert np.isnan(out[1]).all()


def test_a_tile_ends_with_a_block() -> None:
    """Another one is an error, not a wrong scale."""
    how: dict[str, Any] = {"backend": TpuConfig(m=48, k=128, n=128, interpret=True)}

    def forward(x: Array, w: Array, sizes: Array) -> Array:
        return ragged.matmul(quantize(GroupedTensor(x, sizes), "float8_e4m3fn", (1, 256)), w, **how).data

    avals = Aval((48, 512), jnp.float32), Aval((4, 512, 128), jnp.float32), Aval((4,), jnp.int32)
    check_error(lambda: jax.jit(forward).lower(*avals), ValueError, "tile_k=128 cuts a block of scales, 256.")


def test_scales_need_vmem() -> None:
    """Those of the contracted letter's elements, one for each, take a register's lane: an error instead of a kernel
    that a TPU's compiler refuses."""
    x, w = Aval((432, 28672), jnp.bfloat16), Aval((2, 28672, 8192), jnp.bfloat16)

    def forward(x: Array, w: Array, sizes: Array, *, scaling: str) -> Array:
        how, tensor = TpuConfig(m=432, k=128, n=8192), GroupedTensor(x, sizes)
        return ragged.matmul(tensor, quantize(w, "int8", scaling), backend=how).data

    def text(scaling: str) -> str:
        traced = jax.jit(partial(forward, scaling=scaling)).trace(x, w, Aval((2,), jnp.int32))
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    with tpu.on("tpu7x"):
        assert "tpu_custom_call" in text("column")
        check_error(lambda: text("row"), ValueError, "bytes of VMEM, of 50331648")


@pytest.mark.long
def test_scales_fit_every_tpu() -> None:
    """With the default tiles of a TPU that isn't known."""
    x, sizes = Aval((4096, 7168), jnp.float8_e4m3fn), Aval((8,), jnp.int32)
    w, scales = Aval((8, 7168, 512), jnp.float8_e4m3fn), Aval((8, 7168, 1), jnp.float32)

    def forward(x: Array, w: Array, scales: Array, sizes: Array) -> Array:
        matrices = GroupedTensor(w, scales=scales, scaling=Scaling.of("row"))
        return ragged.matmul(GroupedTensor(x, sizes), matrices).data

    assert tpu.compile_for("v5e", forward, x, w, scales, sizes, known=False).kernels


def test_infinite_matrices_beside_rows_of_small_blocks() -> None:
    """They aren't multiplied by zeros, as finite ones are where groups have few rows."""
    rng = np.random.default_rng(0)
    x = GroupedTensor(jnp.asarray(rng.uniform(0.5, 1, (16, 256)), jnp.float32), jnp.array([7, 9], jnp.int32))
    w = np.ones((2, 128, 256), np.float32)
    w[0, 5, 3] = np.inf
    rows, matrices = quantize(x, "float8_e4m3fn", (1, 32)), GroupedTensor(jnp.asarray(w, jnp.bfloat16))
    y = jax.jit(lambda x, w: ragged.matmul(x, w.mT, backend=TpuConfig(interpret=True)).data)(rows, matrices)
    assert (y[:7, 5] == jnp.inf).all() and jnp.isfinite(y).sum() == 16 * 128 - 7


@pytest.mark.long
@pytest.mark.parametrize("dtype, k", [("float8_e5m2", 64), ("float4_e2m1fn", 200)])
def test_few_rows_keep_infinities_and_nan(dtype: str, k: int) -> None:
    """As in decoding, where scales multiply the products of small blocks, with `k` in two tiles: an infinite weight, a
    scale that is NaN, and the smallest scale."""
    g, n = 3, 128
    rng = np.random.default_rng(0)
    w = quantize(jnp.asarray(rng.standard_normal((g, n, k))), dtype, "mx")
    data, scales_ = w.data, w.scales
    assert scales_ is not None
    if dtype == "float8_e5m2":
        data = data.at[0, 3, 5].set(jnp.inf)
    codes = jax.lax.bitcast_convert_type(scales_, jnp.uint8).at[1, 7, 1].set(255).at[2, 9].set(0)
    w = GroupedTensor(data, scales=codes.view(jnp.float8_e8m0fnu), scaling=w.scaling)
    sizes = np.array([2, 3, 1])
    x = GroupedTensor(jnp.asarray(rng.uniform(1, 2, (6, k)), jnp.bfloat16), jnp.asarray(sizes))
    multiply = partial(ragged.matmul, preferred_element_type=jnp.float32)
    config = TpuConfig(k=128, interpret=True) if k > 128 else TpuConfig(interpret=True)
    with tpu.on("v5e"), interpreted("pallas_tpu"):
        got = np.asarray(jax.jit(lambda x, w: multiply(x, w.mT, backend=config).data)(x, w))
    of_group = np.repeat(np.arange(g), sizes)
    want = np.einsum(
        "ik,ink->in", np.asarray(x.data, np.float64), np.asarray(w.dequantize().data, np.float64)[of_group]
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
