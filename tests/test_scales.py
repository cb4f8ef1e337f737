"""Scales of either operand inside the TPU's and the GPU's kernels, against NumPy on operands dequantised in float64."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ragged.kernels import Scales, Target, pallas_tpu, triton_gpu

from . import oracle

Block = tuple[int | None, int | None]

M, K, N, SIZES = 200, 300, 140, [70, 0, 90]
G, TAIL = len(SIZES), M - sum(SIZES)
ENDS = np.cumsum(SIZES)
TARGET = Target(interpret=True)
BACKENDS = pytest.mark.parametrize("kernels", [pallas_tpu, triton_gpu], ids=lambda module: module.__name__[15:])
ROW_BLOCKS: list[Block | None] = [None, (None, None), (1, None), (None, 1), (1, 128), (1, 32)]
UNIFORM_BLOCKS: list[Block | None] = [None, (None, None), (1, None), (None, 1), (1, 128), (128, 128), (32, 1)]
# Every block on either side, each with some of the other side's.
PAIRS = [pair for i, pair in enumerate(itertools.product(ROW_BLOCKS, UNIFORM_BLOCKS)) if i % 3 == 0]
ROW_PAIRS = [pair for i, pair in enumerate(itertools.product(ROW_BLOCKS, ROW_BLOCKS)) if i % 3 == 0]
UNIFORM_PAIRS = [pair for i, pair in enumerate(itertools.product(UNIFORM_BLOCKS, UNIFORM_BLOCKS)) if i % 4 == 0]


def fp8(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(jnp.float8_e4m3fn)


def blocks(extent: int, block: int | None) -> np.ndarray:
    """Which block each element is in."""
    return np.arange(extent) // (block or extent)


def scaled_rows(rng: np.random.Generator, block: Block | None, x: np.ndarray) -> tuple[Scales | None, np.ndarray]:
    """Scales of a ragged operand `[rows, columns]`, NaN in its tail; and the operand times them."""
    wide = x.astype(np.float64)
    if block is None:
        return None, wide
    columns = blocks(x.shape[1], block[1])
    values = rng.uniform(0.5, 2, (M if block[0] else G, columns[-1] + 1)).astype(np.float32)
    row = np.arange(M) if block[0] else np.repeat([*range(G), 0], [*SIZES, TAIL])
    wide = wide * values[row][:, columns]
    if block[0]:
        values[M - TAIL :] = np.nan
    return Scales(jnp.asarray(values), block), wide


def scaled_uniform(rng: np.random.Generator, block: Block | None, x: np.ndarray) -> tuple[Scales | None, np.ndarray]:
    wide = x.astype(np.float64)
    if block is None:
        return None, wide
    rows, columns = (blocks(extent, b) for extent, b in zip(x.shape[1:], block, strict=True))
    values = rng.uniform(0.5, 2, (len(x), rows[-1] + 1, columns[-1] + 1)).astype(np.float32)
    return Scales(jnp.asarray(values), block), wide * values[:, rows][:, :, columns]


def transposed(scales: Scales | None) -> Scales | None:
    return None if scales is None else Scales(scales.values.mT, (scales.block[1], scales.block[0]))


def check(got: Any, want: np.ndarray) -> None:
    oracle.assert_close([np.asarray(got)], [want], max=3e-6)


@BACKENDS
@pytest.mark.parametrize("lhs_block, rhs_block", PAIRS, ids=str)
def test_rows(kernels: Any, lhs_block: Block | None, rhs_block: Block | None) -> None:
    """K23: by group, row, column and contracted block, on either side or both; both orientations of `rhs`."""
    rng = np.random.default_rng(0)
    lhs, rhs = fp8(rng, M, K), fp8(rng, G, K, N)
    lhs_scales, x = scaled_rows(rng, lhs_block, lhs)
    rhs_scales, w = scaled_uniform(rng, rhs_block, rhs)
    want = np.zeros((M, N))
    for i, end in enumerate(ENDS):
        want[end - SIZES[i] : end] = x[end - SIZES[i] : end] @ w[i]
    lhs[M - TAIL :] = np.nan
    for transpose, tiling in ((False, None), (True, (32, 128, 128))):
        got = kernels.grouped_matmul(
            jnp.asarray(lhs),
            jnp.asarray(rhs).mT if transpose else jnp.asarray(rhs),
            jnp.array(SIZES, jnp.int32),
            preferred_element_type=jnp.float32,
            transpose_rhs=transpose,
            tiling=tiling,
            lhs_scales=lhs_scales,
            rhs_scales=transposed(rhs_scales) if transpose else rhs_scales,
            target=TARGET,
        )
        check(got, want)


@BACKENDS
@pytest.mark.parametrize("lhs_block, rhs_block", ROW_PAIRS, ids=str)
def test_groups(kernels: Any, lhs_block: Block | None, rhs_block: Block | None) -> None:
    """K23: in a wgrad rows are contracted, so scales by row change along the contraction and scales by group don't."""
    rng = np.random.default_rng(0)
    lhs, rhs = fp8(rng, M, K), fp8(rng, M, N)
    lhs_scales, x = scaled_rows(rng, lhs_block, lhs)
    rhs_scales, y = scaled_rows(rng, rhs_block, rhs)
    want = np.stack([x[e - s : e].T @ y[e - s : e] for s, e in zip(SIZES, ENDS, strict=True)])
    lhs[M - TAIL :] = rhs[M - TAIL :] = np.nan
    for tiling in (None, (32, 128, 128)):
        got = kernels.transposed_grouped_matmul(
            jnp.asarray(lhs).T,
            jnp.asarray(rhs),
            jnp.array(SIZES, jnp.int32),
            preferred_element_type=jnp.float32,
            tiling=tiling,
            lhs_scales=lhs_scales,
            rhs_scales=rhs_scales,
            target=TARGET,
        )
        check(got, want)


@BACKENDS
@pytest.mark.parametrize("lhs_block, rhs_block", UNIFORM_PAIRS, ids=str)
def test_batched(kernels: Any, lhs_block: Block | None, rhs_block: Block | None) -> None:
    """K23: uniform operands, stored either way round."""
    rng = np.random.default_rng(0)
    lhs, rhs = fp8(rng, G, 60, K), fp8(rng, G, K, N)
    lhs_scales, x = scaled_uniform(rng, lhs_block, lhs)
    rhs_scales, w = scaled_uniform(rng, rhs_block, rhs)
    options: dict[str, Any] = {"preferred_element_type": jnp.float32, "target": TARGET}
    got = kernels.batched_matmul(
        jnp.asarray(lhs),
        jnp.asarray(rhs),
        axes=("mk", "kn", "mn"),
        lhs_scales=lhs_scales,
        rhs_scales=rhs_scales,
        **options,
    )
    check(got, x @ w)
    got = kernels.batched_matmul(
        jnp.asarray(lhs).mT,
        jnp.asarray(rhs),
        axes=("km", "kn", "nm"),
        tiling={"m": 128, "k": 128, "n": 128},
        lhs_scales=transposed(lhs_scales),
        rhs_scales=rhs_scales,
        **options,
    )
    check(got, (x @ w).swapaxes(1, 2))


@BACKENDS
def test_a_shard_takes_its_own_groups_scales(kernels: Any) -> None:
    """K14, K23: scales by group are those of the groups that `rhs` holds."""
    rng = np.random.default_rng(0)
    lhs, rhs = fp8(rng, M, K), fp8(rng, 1, K, N)
    scales, x = scaled_rows(rng, (None, None), lhs)
    got = kernels.grouped_matmul(
        jnp.asarray(lhs),
        jnp.asarray(rhs),
        jnp.array(SIZES, jnp.int32),
        preferred_element_type=jnp.float32,
        group_offset=jnp.int32(2),
        lhs_scales=scales,
        target=TARGET,
    )
    want = np.zeros((M, N))
    want[70:160] = x[70:160] @ rhs[0].astype(np.float64)
    check(got, want)
