"""`grouped_matmul` and `transposed_grouped_matmul`: options, and XLA's programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor

SIZES = np.array([7, 0, 31, 2, 20], np.int32)


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """lhs [m, k] and dout [m, n] with NaN tails, rhs [g, k, n], sizes (g,)."""
    rng = np.random.default_rng(0)
    lhs, dout, rhs = (rng.standard_normal(shape).astype(np.float32) for shape in ((70, 9), (70, 11), (5, 9, 11)))
    lhs[60:], dout[60:] = np.nan, np.nan
    return lhs, rhs, dout, SIZES


@pytest.mark.parametrize("shard", [{}, {"group_offset": 2}], ids=["all groups", "some groups"])
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_they_are_matmul(dtype: str, shard: dict[str, Any]) -> None:
    """Of the tensors that the arrays stand for, gradients too."""
    lhs, rhs, dout, sizes = operands()
    dims, x, dy, w = map(jnp.asarray, (sizes.astype(dtype), lhs, dout, rhs[2:4] if shard else rhs))
    held = {**shard, "num_actual_groups": 2} if shard else {}

    def forward(x: Array, w: Array) -> Array:
        return ragged.grouped_matmul(x, w, dims, **shard)

    def transposed(x: Array, w: Array) -> Array:
        return ragged.grouped_matmul(x, w.mT, dims, transpose_rhs=True, **shard)

    def wgrad(x: Array, dy: Array) -> Array:
        return ragged.transposed_grouped_matmul(x.T, dy, dims, **held)

    def matmul(x: Array, w: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, dims), w, **shard).data

    def matmul_wgrad(x: Array, dy: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, dims).mT, GroupedTensor(dy, dims), **held).data

    for call, same, args in ((forward, matmul, (x, w)), (transposed, matmul, (x, w)), (wgrad, matmul_wgrad, (x, dy))):
        (got, pull), (want, pull_same) = jax.vjp(call, *args), jax.vjp(same, *args)
        ct = jnp.cos(jnp.arange(want.size, dtype=jnp.float32)).reshape(want.shape)
        jax.tree.map(np.testing.assert_array_equal, (got, pull(ct)), (want, pull_same(ct)))


def test_options_reach_the_product() -> None:
    """Dtype, existing_out, tiling in this function's letters."""
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
    """The entry of the ragged axis, `tile_m` in both functions, is the tallest tile of rows in the program."""
    lhs, rhs, dout, sizes = (jnp.asarray(x) for x in operands())

    def heights(fn: Any, *args: Array, **options: Any) -> set[int]:
        import re

        text = jax.jit(lambda *xs: fn(*xs, **options)).lower(*args).as_text()
        return {int(h) for h in re.findall(r"tensor<(\d+)x9xf32>", text)} - {70}

    assert heights(ragged.grouped_matmul, lhs, rhs, sizes, tiling=(16, 999, 999)) - {9, 5} == {16}
    assert max(heights(ragged.transposed_grouped_matmul, lhs.T, dout, sizes, tiling=(16, 999, 999)) - {9}) == 16


def test_no_transposed_copy_of_lhs_or_rhs_under_jit() -> None:
    """What is given as a transpose of something is read as that something."""
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
