"""`grouped_matmul` and `transposed_grouped_matmul`: options, and XLA's programs."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
def test_they_are_matmul(shard: dict[str, Any]) -> None:
    """Of the tensors that the arrays stand for: the same program, so that gradients are the same."""
    lhs, rhs, dout, sizes = operands()
    dims, w = jnp.asarray(sizes.astype("uint32" if shard else "int32")), rhs[2:4] if shard else rhs
    held = {**shard, "num_actual_groups": 2} if shard else {}
    pairs: list[tuple[Any, Any, Any]] = [
        (ragged.grouped_matmul, lambda x, w, s: ragged.matmul(GroupedTensor(x, s), w, **shard).data, (lhs, w)),
        (
            lambda x, dy, s, **options: ragged.transposed_grouped_matmul(x.T, dy, s, **(options | held)),
            lambda x, dy, s: ragged.matmul(GroupedTensor(x, s).mT, GroupedTensor(dy, s), **held).data,
            (lhs, dout),
        ),
    ]
    for call, same, args in pairs:
        programs = [jax.make_jaxpr(each)(*args, dims) for each in (lambda *a, f=call: f(*a, **shard), same)]
        texts = [re.sub(r"id=\d+|name='ragged\.\w+'", "", str(program)) for program in programs]
        assert texts[0] == texts[1]
    # Of small integers, whose sums are exact in any order: XLA's dot of a transposed matrix may have another.
    lhs, w = np.rint(4 * lhs), np.rint(4 * w)
    transposed = jax.jit(partial(ragged.grouped_matmul, transpose_rhs=True, **shard))(lhs, np.swapaxes(w, 1, 2), dims)
    np.testing.assert_array_equal(transposed, ragged.grouped_matmul(jnp.asarray(lhs), jnp.asarray(w), dims, **shard))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["uint8", "int64", "uint64"])
def test_sizes_of_any_integer_dtype(dtype: str) -> None:
    """The same bits as by int32, from NumPy, from JAX, traced and with 64 bits. What int32 can't hold is an error."""
    lhs, rhs, dout, sizes = operands()
    # The sum of small integers is larger than they can hold.
    sizes = np.array([100, 27, 0, 100, 73], dtype) if dtype.endswith("8") else sizes.astype(dtype)
    lhs, dout = (np.concatenate([x[:60]] * 5) for x in (lhs, dout))
    for fn, args in ((ragged.grouped_matmul, (lhs, rhs)), (ragged.transposed_grouped_matmul, (lhs.T, dout))):
        want = fn(*args, sizes.astype(np.int32))
        np.testing.assert_array_equal(fn(*args, sizes), want)
        with jax.enable_x64(True):
            np.testing.assert_array_equal(fn(*args, jnp.asarray(sizes)), want)
            np.testing.assert_array_equal(jax.jit(fn)(*args, sizes), want)
            if dtype.endswith("64"):
                beyond = np.where(np.arange(5) == 3, 2**32 + 1, sizes).astype(dtype)  # its low 32 bits are 1
                for each in (beyond, jnp.asarray(beyond)):
                    with pytest.raises(ValueError, match=r"`group_sizes\[3\]` is 4294967297, which int32 can't hold"):
                        fn(*args, each)
                clipped = fn(*args, np.where(np.arange(5) == 3, 2**31 - 1, sizes))
                np.testing.assert_array_equal(jax.jit(fn)(*args, beyond), clipped)


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
    """It is the tallest tile of rows in the program."""
    lhs, rhs, _, sizes = map(jnp.asarray, operands())
    text = jax.jit(partial(ragged.grouped_matmul, tiling=(16, 999, 999))).lower(lhs, rhs, sizes).as_text()
    assert {int(height) for height in re.findall(r"tensor<(\d+)x9xf32>", text)} - {70, 9, 5} == {16}


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
