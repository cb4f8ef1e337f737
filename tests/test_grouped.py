"""The array level: `grouped_matmul` and `transposed_grouped_matmul`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged

from . import oracle
from .cases import SPREADS, spread


def operands(
    g: int = 5, m: int = 70, k: int = 9, n: int = 11, kind: str = "zipf", total: int = 60, dtype: Any = np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """lhs [m, k] and dout [m, n] with NaN tails, rhs [g, k, n], sizes (g,)."""
    rng = np.random.default_rng(0)
    lhs, dout = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((m, n)).astype(dtype)
    lhs[total:], dout[total:] = np.nan, np.nan
    return lhs, rng.standard_normal((g, k, n)).astype(dtype), dout, spread(rng, kind, g, total)


def rows(x: np.ndarray, sizes: np.ndarray) -> oracle.Groups:
    return oracle.unpack(np.asarray(x), (True, False), sizes.tolist(), [x.shape[1]] * len(sizes))


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("kind", SPREADS)
def test_grouped_matmul(kind: str, transpose_rhs: bool, unsigned: bool) -> None:
    """K1, K2, K6, K18: either orientation of rhs; int32 and uint32 sizes; the tail comes out zero."""
    lhs, rhs, _, sizes = operands(kind=kind)
    group_sizes = jnp.asarray(sizes, jnp.uint32 if unsigned else jnp.int32)
    given = jnp.asarray(rhs.swapaxes(1, 2) if transpose_rhs else rhs)
    out = np.asarray(ragged.grouped_matmul(jnp.asarray(lhs), given, group_sizes, transpose_rhs=transpose_rhs))
    oracle.assert_close(rows(out, sizes), oracle.matmul(rows(lhs, sizes), list(rhs)), max=2e-5)
    assert np.array_equal(out[60:], np.zeros((10, 11)))


@pytest.mark.parametrize("kind", SPREADS)
def test_transposed_grouped_matmul(kind: str) -> None:
    """K3, K21: an empty group gives zeros."""
    lhs, _, dout, sizes = operands(kind=kind)
    out = ragged.transposed_grouped_matmul(jnp.asarray(lhs.T), jnp.asarray(dout), jnp.asarray(sizes))
    want = oracle.matmul([x.T for x in rows(lhs, sizes)], rows(dout, sizes))
    oracle.assert_close(list(np.asarray(out)), want, max=2e-5)
    assert np.array_equal(np.asarray(out)[sizes == 0], np.zeros((int((sizes == 0).sum()), 9, 11)))


def test_fewer_matrices_than_sizes_are_a_shard() -> None:
    """K11, K13, K14: without an offset the first groups; rows of the others are zero."""
    lhs, rhs, dout, sizes = operands(kind="even")
    out = np.asarray(ragged.grouped_matmul(jnp.asarray(lhs), jnp.asarray(rhs[:2]), jnp.asarray(sizes)))
    want = oracle.matmul(rows(lhs, sizes), [w if i < 2 else 0 * w for i, w in enumerate(rhs)])
    oracle.assert_close(rows(out, sizes), want, max=2e-5)
    out = np.asarray(
        ragged.grouped_matmul(jnp.asarray(lhs), jnp.asarray(rhs[2:4]), jnp.asarray(sizes), group_offset=jnp.int32(2))
    )
    want = oracle.matmul(rows(lhs, sizes), [w if i in (2, 3) else 0 * w for i, w in enumerate(rhs)])
    oracle.assert_close(rows(out, sizes), want, max=2e-5)
    out = ragged.transposed_grouped_matmul(
        jnp.asarray(lhs.T), jnp.asarray(dout), jnp.asarray(sizes), group_offset=jnp.int32(1), num_actual_groups=3
    )
    want = oracle.matmul([x.T for x in rows(lhs, sizes)], rows(dout, sizes))[1:4]
    oracle.assert_close(list(np.asarray(out)), want, max=2e-5)


def test_options_reach_the_product() -> None:
    """K7, K8, K24, O7: dtype, existing_out, tiling in this function's letters."""
    lhs, rhs, dout, sizes = operands()
    args = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes)
    out = ragged.grouped_matmul(*args)
    again = ragged.grouped_matmul(*args, existing_out=jnp.full_like(out, 2), backend="xla")
    np.testing.assert_allclose(again[:60], out[:60] + 2, atol=1e-5)
    assert np.array_equal(again[60:], np.zeros((10, 11)))
    assert ragged.grouped_matmul(*args, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
    asked = []
    transposed = jnp.asarray(lhs.T), jnp.asarray(dout), jnp.asarray(sizes)

    def tiling(m: int, k: int, n: int) -> tuple[int, int, int]:
        asked.append((m, k, n))
        return 16, 8, 8

    want = ragged.transposed_grouped_matmul(*transposed)
    got = ragged.transposed_grouped_matmul(*transposed, tiling=tiling, existing_out=jnp.ones_like(want))
    np.testing.assert_allclose(got, want + 1, atol=1e-5)
    ragged.grouped_matmul(*args, tiling=tiling)
    assert asked == [(70, 9, 11), (70, 9, 11)]


def test_tile_of_the_ragged_axis_is_honoured() -> None:
    """K7: the entry of the ragged axis, `tile_m` in both functions, is the tallest tile of rows in the program."""
    lhs, rhs, dout, sizes = (jnp.asarray(x) for x in operands())

    def heights(fn: Any, *args: Array, **options: Any) -> set[int]:
        import re

        text = jax.jit(lambda *xs: fn(*xs, **options)).lower(*args).as_text()
        return {int(h) for h in re.findall(r"tensor<(\d+)x9xf32>", text)} - {70}

    assert heights(ragged.grouped_matmul, lhs, rhs, sizes, tiling=(16, 999, 999)) - {9, 5} == {16}
    assert max(heights(ragged.transposed_grouped_matmul, lhs.T, dout, sizes, tiling=(16, 999, 999)) - {9}) == 16


def test_gradients_equal_the_definition() -> None:
    """O16: by both operands, of both functions."""
    lhs, rhs, dout, sizes = operands()
    group_sizes = jnp.asarray(sizes)
    _, pull = jax.vjp(lambda a, b: ragged.grouped_matmul(a, b, group_sizes), jnp.asarray(lhs), jnp.asarray(rhs))
    d_lhs, d_rhs = pull(jnp.asarray(dout))
    oracle.assert_close(rows(np.asarray(d_lhs), sizes), oracle.matmul(rows(dout, sizes), [w.T for w in rhs]), max=2e-5)
    oracle.assert_close(
        list(np.asarray(d_rhs)), oracle.matmul([x.T for x in rows(lhs, sizes)], rows(dout, sizes)), max=2e-5
    )
    assert np.array_equal(np.asarray(d_lhs)[60:], np.zeros((10, 9)))
    _, pull = jax.vjp(
        lambda a, b: ragged.transposed_grouped_matmul(a, b, group_sizes), jnp.asarray(lhs.T), jnp.asarray(dout)
    )
    d_lhs, d_rhs = pull(jnp.asarray(rhs))
    oracle.assert_close(
        rows(np.asarray(d_lhs).T, sizes), oracle.matmul(rows(dout, sizes), [w.T for w in rhs]), max=2e-5
    )
    oracle.assert_close(rows(np.asarray(d_rhs), sizes), oracle.matmul(rows(lhs, sizes), list(rhs)), max=2e-5)
    assert np.array_equal(np.asarray(d_lhs).T[60:], np.zeros((10, 9)))


def test_no_transposed_copy_of_lhs_or_rhs_under_jit() -> None:
    """K2, K3, T5: what is given as a transpose of something is read as that something."""
    lhs, rhs, dout, sizes = (jnp.asarray(x) for x in operands())
    forward = jax.jit(lambda a, w, s: ragged.grouped_matmul(a, w.mT, s, transpose_rhs=True))
    wgrad = jax.jit(lambda a, b, s: ragged.transposed_grouped_matmul(a.T, b, s))
    tensor = jax.jit(lambda a, w, s: ragged.matmul(ragged.GroupedTensor(a, s), ragged.GroupedTensor(w).mT.mT).data)
    dgrad = jax.jit(lambda b, w, s: ragged.matmul(ragged.GroupedTensor(b, s), ragged.GroupedTensor(w).mT).data)
    for fn, args, whole in (
        (forward, (lhs, rhs, sizes), "f32[5,9,11]"),
        (tensor, (lhs, rhs, sizes), "f32[5,9,11]"),
        (dgrad, (dout, rhs, sizes), "f32[5,11,9]"),
        (wgrad, (lhs, dout, sizes), "f32[9,70]"),
    ):
        text = fn.lower(*args).compile().as_text() or ""
        made = [line for line in text.splitlines() if f"= {whole}" in line and ("transpose" in line or "copy" in line)]
        assert not made, made
