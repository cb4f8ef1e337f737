"""Scales of either operand inside the TPU's and the GPU's kernels, against NumPy on operands dequantised in float64."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragged.backends.base import Target
from ragged.core.scales import Scales
from tests import gpu, oracle, products
from tests.backends.tpu.test_pallas_tpu import MODES

pytestmark = pytest.mark.sampled(default=False)

Block = tuple[int | None, int | None]

M, K, N, SIZES = 200, 300, 140, [70, 0, 90]
G, TAIL = len(SIZES), M - sum(SIZES)
ENDS = np.cumsum(SIZES)
TARGET = {
    "pallas_tpu": Target(interpret=True),
    "triton_gpu": Target(interpret=True, device=(gpu.FIRST_WITH_FP8, 0)),  # the portable program lacks it
}
BACKENDS = pytest.mark.parametrize("kernels", ["pallas_tpu", "triton_gpu"])
ROW_BLOCKS: list[Block | None] = [None, (None, None), (1, None), (None, 1), (1, 128), (1, 32)]
UNIFORM_BLOCKS: list[Block | None] = [None, (None, None), (1, None), (None, 1), (1, 128), (128, 128), (32, 1)]
# Every block on either side, each with some of the other side's; all pairs are in `test_quantized_matmul.py`.
PAIRS = [pair for i, pair in enumerate(itertools.product(ROW_BLOCKS, UNIFORM_BLOCKS)) if i % 5 == 0]
ROW_PAIRS = [pair for i, pair in enumerate(itertools.product(ROW_BLOCKS, ROW_BLOCKS)) if i % 5 == 0]
UNIFORM_PAIRS = [pair for i, pair in enumerate(itertools.product(UNIFORM_BLOCKS, UNIFORM_BLOCKS)) if i % 5 == 0]
# Two or three ragged letters: every way to store the terms, each with some pairs of blocks.
STORED = [
    (letters, (lhs, rhs, out))
    for letters, *terms in (
        ("mn", ("mk",), ("nk",), ("mn", "nm")),
        ("mk", ("mk", "km"), ("kn",), ("mn",)),
        ("kn", ("km",), ("kn", "nk"), ("nm",)),
        ("mkn", ("mk", "km"), ("kn", "nk"), ("mn", "nm")),
    )
    for lhs, rhs, out in itertools.product(*terms)
]
TILED = [
    (*stored, *pair)
    for i, stored in enumerate(STORED)
    for j, pair in enumerate(itertools.product(ROW_BLOCKS, ROW_BLOCKS))
    if (i + j) % 11 == 0
]


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
def test_rows(kernels: str, lhs_block: Block | None, rhs_block: Block | None) -> None:
    """By group, row, column and contracted block, on either side or both; both orientations of `rhs`."""
    rng = np.random.default_rng(0)
    lhs, rhs = fp8(rng, M, K), fp8(rng, G, K, N)
    lhs_scales, x = scaled_rows(rng, lhs_block, lhs)
    rhs_scales, w = scaled_uniform(rng, rhs_block, rhs)
    want = np.zeros((M, N))
    for i, end in enumerate(ENDS):
        want[end - SIZES[i] : end] = x[end - SIZES[i] : end] @ w[i]
    lhs[M - TAIL :] = np.nan
    for transpose, tiling in ((False, None), (True, (32, 128, 128))):
        got = products.grouped_matmul(
            kernels,
            jnp.asarray(lhs),
            jnp.asarray(rhs).mT if transpose else jnp.asarray(rhs),
            jnp.array(SIZES, jnp.int32),
            preferred_element_type=jnp.float32,
            transpose_rhs=transpose,
            tiling=tiling,
            lhs_scales=lhs_scales,
            rhs_scales=transposed(rhs_scales) if transpose else rhs_scales,
            target=TARGET[kernels],
        )
        check(got, want)


@BACKENDS
@pytest.mark.parametrize("lhs_block, rhs_block", ROW_PAIRS, ids=str)
def test_groups(kernels: str, lhs_block: Block | None, rhs_block: Block | None) -> None:
    """In a wgrad rows are contracted, so scales by row change along the contraction and scales by group don't."""
    rng = np.random.default_rng(0)
    lhs, rhs = fp8(rng, M, K), fp8(rng, M, N)
    lhs_scales, x = scaled_rows(rng, lhs_block, lhs)
    rhs_scales, y = scaled_rows(rng, rhs_block, rhs)
    want = np.stack([x[e - s : e].T @ y[e - s : e] for s, e in zip(SIZES, ENDS, strict=True)])
    lhs[M - TAIL :] = rhs[M - TAIL :] = np.nan
    for tiling in (None, (128, 32, 128)):
        got = products.transposed_grouped_matmul(
            kernels,
            jnp.asarray(lhs),
            jnp.asarray(rhs),
            jnp.array(SIZES, jnp.int32),
            preferred_element_type=jnp.float32,
            tiling=tiling,
            lhs_scales=lhs_scales,
            rhs_scales=rhs_scales,
            target=TARGET[kernels],
        )
        check(got, want)


@BACKENDS
@pytest.mark.parametrize("block", [(None, None), (None, 1), (1, None)], ids=str)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_a_sum_over_elements_with_scales_of_their_own(kernels: str, block: Block, dtype: str) -> None:
    """The gradient of a matrix that batch elements share adds up what each element's scales make of it."""
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.integers(-8, 8, (3, M, n)).astype(np.float32) for n in (K, N))
    shape = (3, M if block[0] else G, 1 if block[1] is None else K)
    scales = (rng.uniform(0.5, 2, shape) * [[[1]], [[10]], [[100]]]).astype(np.float32)
    of_rows = scales if block[0] else np.repeat(np.pad(scales, [(0, 0), (0, 1), (0, 0)]), [*SIZES, TAIL], axis=1)
    x = lhs * of_rows.astype(np.float64)
    want = np.stack(
        [
            sum(x[e, end - s : end].T @ rhs[e, end - s : end] for e in range(3))
            for s, end in zip(SIZES, ENDS, strict=True)
        ]
    )
    got = products.transposed_grouped_matmul(
        kernels,
        jnp.asarray(lhs, dtype),
        jnp.asarray(rhs, dtype),
        jnp.array(SIZES, jnp.int32),
        preferred_element_type=jnp.float32,
        lhs_scales=Scales(jnp.asarray(scales), block),
        sum_batch=True,
        target=TARGET[kernels],
    )
    check(got, want)


@BACKENDS
@pytest.mark.parametrize("lhs_block, rhs_block", UNIFORM_PAIRS, ids=str)
def test_batched(kernels: str, lhs_block: Block | None, rhs_block: Block | None) -> None:
    """Uniform operands, stored either way round."""
    rng = np.random.default_rng(0)
    lhs, rhs = fp8(rng, G, 60, K), fp8(rng, G, K, N)
    lhs_scales, x = scaled_uniform(rng, lhs_block, lhs)
    rhs_scales, w = scaled_uniform(rng, rhs_block, rhs)
    options: dict[str, Any] = {"preferred_element_type": jnp.float32, "target": TARGET[kernels]}
    got = products.batched_matmul(
        kernels,
        jnp.asarray(lhs),
        jnp.asarray(rhs),
        axes=("mk", "kn", "mn"),
        lhs_scales=lhs_scales,
        rhs_scales=rhs_scales,
        **options,
    )
    check(got, x @ w)
    got = products.batched_matmul(
        kernels,
        jnp.asarray(lhs).mT,
        jnp.asarray(rhs),
        axes=("km", "kn", "nm"),
        tiling=(128, 128, 128),
        lhs_scales=transposed(lhs_scales),
        rhs_scales=rhs_scales,
        **options,
    )
    check(got, (x @ w).swapaxes(1, 2))


def test_one_scale_for_several_tiles() -> None:
    """By the interpreter that finds blocks out of bounds."""
    rng = np.random.default_rng(0)
    lhs, rhs = fp8(rng, 1, 200, K), fp8(rng, 1, K, 200)
    (lhs_scales, x), (rhs_scales, w) = (scaled_uniform(rng, (None, None), z) for z in (lhs, rhs))
    got = products.batched_matmul(
        "pallas_tpu",
        jnp.asarray(lhs),
        jnp.asarray(rhs),
        axes=("mk", "kn", "mn"),
        preferred_element_type=jnp.float32,
        tiling=(128, 128, 128),
        lhs_scales=lhs_scales,
        rhs_scales=rhs_scales,
        target=Target(interpret=MODES["two cores"]),
    )
    check(got, x @ w)


def packed(
    rng: np.random.Generator, sizes: list[int], widths: list[int], columns: int, block: Block | None, dtype: str
) -> tuple[jnp.ndarray, Scales | None, oracle.Groups]:
    """A buffer `[M, columns]` of groups, left-aligned; its scales; the groups times them. NaN wherever no group is."""
    values = fp8(rng, M, columns) if dtype == "float8_e4m3fn" else rng.integers(-128, 128, (M, columns), np.int8)
    ends = np.cumsum(sizes)
    spans = [(slice(e - s, e), slice(w)) for s, e, w in zip(sizes, ends, widths, strict=True)]
    data = oracle.pack([values[span] for span in spans], (True, True), (M, columns))
    scaled = [values[span].astype(np.float64) for span in spans]
    if block is None:
        return jnp.asarray(data), None, scaled
    column = blocks(columns, block[1])
    scales = np.full((M if block[0] else G, column[-1] + 1), np.nan, np.float32)
    for i, (rows, width) in enumerate(spans):
        rows = rows if block[0] else slice(i, i + 1)
        own = scales[rows, : column[width][-1] + 1 if width.stop else 0]
        own[...] = rng.uniform(0.5, 2, own.shape)
        scaled[i] *= scales[rows][:, column[width]]
    return jnp.asarray(data), Scales(jnp.asarray(scales), block), scaled


MODES_OF = (("pallas_tpu", "plain", 1), ("pallas_tpu", "two cores", 5), ("triton_gpu", "plain", 1))
"""Kernels, how they are interpreted, and of how many cases each one."""


@pytest.mark.parametrize(
    "kernels, mode, index",
    [(kernels, mode, i) for kernels, mode, few in MODES_OF for i in range(0, len(TILED), few)],
)
def test_tiled(kernels: str, index: int, mode: str) -> None:
    """Two or three ragged letters: by group, row, column and block, whatever is contracted, shifted or packed."""
    letters, axes, lhs_block, rhs_block = TILED[index]
    dtype, tiling = ("int8", "float8_e4m3fn")[index % 2], (None, (128, 128, 128))[index // 2 % 2]
    rng = np.random.default_rng(0)
    widest = dict(zip("mkn", (140, 300, 140), strict=True))
    ragged = {"m": [70, 0, 90], "k": [30, 0, 150], "n": [0, 60, 135]}
    extents = {x: ragged[x] if x in letters else [widest[x]] * G for x in "mkn"}
    columns = {x: max(ragged[x]) + 5 if x in letters else widest[x] for x in "mkn"}
    lhs, rhs = (
        packed(rng, extents[row], extents[column], columns[column], block, dtype)
        for (row, column), block in zip(axes[:2], (lhs_block, rhs_block), strict=True)
    )
    x, y = (
        [z if term == stored else z.T for z in groups]
        for term, stored, (*_, groups) in zip(("mk", "kn"), axes[:2], (lhs, rhs), strict=True)
    )
    groups = [z if axes[2] == "mn" else z.T for z in oracle.matmul(x, y)]
    want = oracle.pack(groups, (True, True), (M, columns[axes[2][1]]), fill=0.0)
    got = products.tiled_matmul(
        kernels,
        lhs[0],
        rhs[0],
        {x: jnp.array(extents[x], jnp.int32) for x in letters},
        axes=axes,
        shape=want.shape,
        preferred_element_type=jnp.float32,
        tiling=tiling,
        lhs_scales=lhs[1],
        rhs_scales=rhs[1],
        target=TARGET[kernels]._replace(interpret=MODES[mode]),
    )
    check(got, want)


@BACKENDS
def test_tiled_batch(kernels: str) -> None:
    """Each batch element has its own scales, or all have the same."""
    rng = np.random.default_rng(0)
    x, y = fp8(rng, 2, M, K), fp8(rng, M, N)
    by_column, by_row = rng.uniform(0.5, 2, (2, G, K)), rng.uniform(0.5, 2, (M, 1))
    dims = [jnp.array(sizes, jnp.int32) for sizes in (SIZES, [K, 0, 200])]
    got = products.tiled_matmul(
        kernels,
        jnp.asarray(x),
        jnp.asarray(y),
        dict(zip("km", dims, strict=True)),
        axes=("km", "kn", "mn"),
        shape=(600, N),
        preferred_element_type=jnp.float32,
        lhs_scales=Scales(jnp.asarray(by_column, jnp.float32), (None, 1)),
        rhs_scales=Scales(jnp.asarray(by_row, jnp.float32), (1, None)),
        target=TARGET[kernels],
    )
    want, wide = np.zeros((2, 600, N)), (y * by_row.astype(np.float32)).astype(np.float64)
    for e in range(2):
        want[e, :K] = (x[e, :70].astype(np.float64) * by_column[e, 0].astype(np.float32)).T @ wide[:70]
        scaled = x[e, 70:160, :200].astype(np.float64) * by_column[e, 2, :200].astype(np.float32)
        want[e, K : K + 200] = scaled.T @ wide[70:160]
    check(got, want)


@pytest.mark.parametrize("block, precision", [((1, None), "HIGHEST"), ((None, 1), "DEFAULT")])
def test_tiled_precision(block: Block, precision: str) -> None:
    """All bits of what was multiplied by its scales count; 8 bits alone are exact in a single pass."""
    x, dims = jnp.ones((M, N), jnp.float8_e4m3fn), jnp.array(SIZES, jnp.int32)
    values = jnp.ones((M, 1) if block[0] else (G, N))

    def product(values: jnp.ndarray) -> jnp.ndarray:
        return products.tiled_matmul(
            "pallas_tpu",
            x,
            x,
            {"k": dims, "m": dims},
            axes=("km", "kn", "mn"),
            shape=(M, N),
            preferred_element_type=jnp.float32,
            lhs_scales=Scales(values, block),
            target=TARGET["pallas_tpu"],
        )

    found = set(re.findall(r"Precision\.(\w+)", str(jax.make_jaxpr(product)(values))))
    assert found == {precision}


@BACKENDS
def test_a_shard_takes_its_own_groups_scales(kernels: str) -> None:
    """Scales by group are those of the groups that `rhs` holds."""
    rng = np.random.default_rng(0)
    lhs, rhs = fp8(rng, M, K), fp8(rng, 1, K, N)
    scales, x = scaled_rows(rng, (None, None), lhs)
    got = products.grouped_matmul(
        kernels,
        jnp.asarray(lhs),
        jnp.asarray(rhs),
        jnp.array(SIZES, jnp.int32),
        preferred_element_type=jnp.float32,
        group_offset=jnp.int32(2),
        lhs_scales=scales,
        target=TARGET[kernels],
    )
    want = np.zeros((M, N))
    want[70:160] = x[70:160] @ rhs[0].astype(np.float64)
    check(got, want)
