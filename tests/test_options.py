"""Dtypes and options of `ragged.matmul`, and NaN containment."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor

from . import cases, oracle
from .cases import LETTERS, NAMES, TOLERANCE

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize(
    "dtype, result",
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "float32"),
        ("int8", "int32"),
        ("uint8", "int32"),
        ("int16", "int32"),
        ("int32", "int32"),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "bfloat16"),
        ("int4", "int32"),
    ],
)
@pytest.mark.parametrize("layout", NAMES)
def test_dtypes(layout: str, dtype: str, result: str) -> None:
    """K22, K24, O11: what comes out of each dtype by default, and how exact it is."""
    if dtype in ("int16", "int32"):
        # Small values: sums of products over their full range leave int32, in any library.
        case = cases.make(layout, dtype="int8")
        case.lhs, case.rhs = case.lhs.astype(dtype), case.rhs.astype(dtype)
    else:
        case = cases.make(layout, dtype=dtype)
    out = ragged.matmul(case.lhs, case.rhs)
    assert out.dtype == jnp.dtype(result)
    worst, rms = TOLERANCE[result]
    got = case.unpack(np.asarray(out.data).astype(np.float64))
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=worst, rms=rms)
    case.assert_tail_zero(out)


@pytest.mark.long
def test_float64_under_x64() -> None:
    with jax.enable_x64(True):
        for layout in NAMES:
            case = cases.make(layout, dtype="float64")
            out = ragged.matmul(case.lhs, case.rhs)
            assert out.dtype == jnp.float64
            got = case.unpack(np.asarray(out.data))
            oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=1e-13)


@pytest.mark.parametrize(
    "lhs_dtype, rhs_dtype, result",
    [
        ("bfloat16", "int8", "bfloat16"),
        ("float8_e4m3fn", "float8_e5m2", "bfloat16"),
        ("bfloat16", "float8_e4m3fn", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("float32", "float8_e4m3fn", "float32"),
        ("int8", "float8_e4m3fn", "bfloat16"),
        ("int8", "uint8", "int32"),
        ("int8", "int2", "int32"),
        ("uint2", "int4", "int32"),
        ("float16", "bfloat16", "float32"),
    ],
)
@pytest.mark.parametrize("layout", ["forward", "wgrad", "outer"])
def test_mixed_dtypes(layout: str, lhs_dtype: str, rhs_dtype: str, result: str) -> None:
    left, right = cases.make(layout, dtype=lhs_dtype), cases.make(layout, dtype=rhs_dtype)
    out = ragged.matmul(left.lhs, right.rhs)
    assert out.dtype == jnp.dtype(result)
    worst, rms = TOLERANCE[result]
    got = left.unpack(np.asarray(out.data).astype(np.float64))
    oracle.assert_close(got, oracle.matmul(left.lhs_groups, right.rhs_groups), max=worst, rms=rms)


@pytest.mark.parametrize("layout", ["forward", "wgrad"])
def test_int8_is_exact_over_the_full_range(layout: str) -> None:
    """K22: k = 4000 products of -128..127, past 2**24, where float32 is no longer exact."""
    rng = np.random.default_rng(0)
    # All products of one sign, so that sums grow past 2**24; and odd, so that float32 can't hold them.
    lhs = rng.integers(-128, -100, (4000, 3)).astype(np.int8)
    rhs = rng.integers(-128, 128, (4000, 5)).astype(np.int8)
    rhs[:, 0] = -127
    lhs[0] += 1 - np.sum(lhs, axis=0, dtype=np.int64).astype(np.int8) % 2
    want = lhs.astype(np.int64).T @ rhs.astype(np.int64)
    assert (np.abs(want[:, 0]) > 2**24).all() and not np.array_equal(want.astype(np.float32).astype(np.int64), want)
    if layout == "forward":
        x = GroupedTensor(jnp.asarray(lhs.T), first_dims=jnp.array([1, 0, 2], jnp.int32))
        out = ragged.matmul(x, jnp.broadcast_to(jnp.asarray(rhs), (3, 4000, 5))).data
    else:
        dims = jnp.array([4000], jnp.int32)
        out = ragged.matmul(
            GroupedTensor(jnp.asarray(lhs.T), last_dims=dims), GroupedTensor(jnp.asarray(rhs), dims)
        ).data[0]
    assert out.dtype == jnp.int32
    assert np.array_equal(np.asarray(out), want)


@pytest.mark.parametrize("layout", NAMES)
def test_preferred_element_type(layout: str) -> None:
    """K24, K26: the accumulator is float32 whatever the operands are, and is rounded once."""
    case = cases.make(layout, dtype="bfloat16")
    out = ragged.matmul(case.lhs, case.rhs, preferred_element_type=jnp.float32)
    got = case.unpack(np.asarray(out.data))
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=2e-5)
    rounded = ragged.matmul(case.lhs, case.rhs)
    assert np.array_equal(np.asarray(out.data.astype(jnp.bfloat16)), np.asarray(rounded.data))


@pytest.mark.parametrize("layout", NAMES)
def test_existing_out(layout: str) -> None:
    """O7: added before rounding; its own tail, NaN here, comes out zero; its gradient is the identity on real
    elements."""
    case = cases.make(layout)
    product = ragged.matmul(case.lhs, case.rhs)
    rng = np.random.default_rng(5)
    existing = jnp.asarray(rng.standard_normal(product.shape), jnp.float32)
    poisoned = product._replace_data(jnp.where(product.mask, existing, jnp.nan))
    out = ragged.matmul(case.lhs, case.rhs, existing_out=poisoned)
    mask = np.asarray(product.mask)
    np.testing.assert_allclose(np.asarray(out.data), np.where(mask, product.data + existing, 0), atol=2e-5)
    case.assert_tail_zero(out)
    assert np.array_equal(np.asarray(ragged.matmul(case.lhs, case.rhs, existing_out=poisoned.data).data), out.data)

    def loss(lhs: Array, existing: Array) -> Array:
        x = GroupedTensor(lhs, case.lhs.first_dims, case.lhs.last_dims)
        return jnp.sum(jnp.sin(ragged.matmul(x, case.rhs, existing_out=existing).data))

    got = jax.grad(loss, argnums=(0, 1))(case.lhs.data, poisoned.data)
    np.testing.assert_allclose(got[1], np.where(mask, np.cos(out.data), 0), atol=1e-5)
    _, tangent = jax.jvp(lambda e: loss(case.lhs.data, e), (poisoned.data,), (jnp.ones_like(poisoned.data),))
    np.testing.assert_allclose(tangent, np.cos(out.data)[mask].sum(), rtol=1e-3, atol=1e-3)
    # Nor does a cotangent leave by the transpose rule for `existing_out` itself.
    zero = case.lhs._replace_data(jnp.zeros_like(case.lhs.data))
    (ct,) = jax.linear_transpose(lambda e: ragged.matmul(zero, case.rhs, existing_out=e).data, existing)(existing + 1)
    np.testing.assert_allclose(ct, np.where(mask, existing + 1, 0))
    batch = jnp.stack([existing, 2 * existing])
    mapped = jax.vmap(lambda e: ragged.matmul(case.lhs, case.rhs, existing_out=e).data)(batch)
    np.testing.assert_allclose(mapped[1], np.where(mask, product.data + 2 * existing, 0), atol=2e-5)


def test_existing_out_is_added_in_the_accumulator() -> None:
    """1 + 2**-9 is lost in bfloat16 if the product is rounded before it is added to."""
    x = GroupedTensor(jnp.full((4, 1), 1 + 2**-7, jnp.bfloat16), first_dims=jnp.array([4], jnp.int32))
    w = jnp.full((1, 1, 1), 1 + 2**-7, jnp.bfloat16)  # the product is 1 + 2**-6 + 2**-14
    existing = jnp.full((4, 1), 2**-8, jnp.bfloat16)
    out = ragged.matmul(x, w, existing_out=existing)
    want = np.float32((1 + 2**-7) ** 2 + 2**-8).astype(jnp.bfloat16)
    assert np.array_equal(np.asarray(out.data), np.full((4, 1), want))
    assert want != np.asarray((x.data * w[0]).astype(jnp.bfloat16) + existing)[0, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e5m2"])
@pytest.mark.parametrize("result", ["float8_e4m3fn", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["batched", "forward", "wgrad", "outer"])
def test_narrow_results_that_are_added_to(layout: str, result: str, dtype: str) -> None:
    """O7, O11: a result of any float dtype can be accumulated into, 8 bits included."""
    case = cases.make(layout, dtype=dtype)
    ones = (GroupedTensor(jnp.ones_like(x.data), x.first_dims, x.last_dims) for x in (case.lhs, case.rhs))
    lhs, rhs = ones
    bare = ragged.matmul(lhs, rhs, preferred_element_type=jnp.float32)
    existing = ragged.matmul(lhs, rhs, preferred_element_type=result)
    out = ragged.matmul(lhs, rhs, preferred_element_type=result, existing_out=existing)
    want = bare.data + existing.data.astype(jnp.float32)
    assert out.dtype == jnp.dtype(result)
    assert np.array_equal(np.asarray(out.data), np.asarray(want.astype(result)))


@pytest.mark.parametrize("layout", NAMES)
def test_a_float_that_integers_are_added_to(layout: str) -> None:
    """O7: halves survive the integer accumulator."""
    case = cases.make(layout, dtype="int8")
    bare = ragged.matmul(case.lhs, case.rhs, preferred_element_type=jnp.float32)
    halves = bare.map(lambda data: jnp.full_like(data, 0.5))
    out = ragged.matmul(case.lhs, case.rhs, preferred_element_type=jnp.float32, existing_out=halves)
    assert np.array_equal(np.asarray(out.data), np.asarray(bare.data) + np.asarray(halves.data))


@pytest.mark.parametrize("offset", [-9, -2, 0, 1, 3, 5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("layout", ["forward", "forward_left", "wgrad"])
def test_group_offset(layout: str, offset: int) -> None:
    """K11, K13, K14, O8: a shard of 3 of 5 groups; also offsets past either end, which hold fewer groups or none."""
    case = cases.make(layout, g=5, kind="even")
    held = [i if 0 <= i < 5 else None for i in range(offset, offset + 3)]
    whole = oracle.matmul(case.lhs_groups, case.rhs_groups)
    at = jnp.int32(offset)
    if layout == "wgrad":

        def wgrad(lhs: Array) -> Array:
            x = GroupedTensor(lhs, last_dims=case.lhs.last_dims)
            return ragged.matmul(x, case.rhs, group_offset=at, num_actual_groups=3).data

        out, pull = jax.vjp(wgrad, case.lhs.data)
        want = [np.zeros_like(whole[0]) if i is None else whole[i] for i in held]
        oracle.assert_close(list(np.asarray(out)), want, max=2e-5)
        # The cotangent of `lhs`: group `i` of the shard times `rhs[i].T`, zero in groups that the shard lacks.
        cts = np.random.default_rng(1).standard_normal(out.shape).astype(np.float32)
        (d_lhs,) = pull(jnp.asarray(cts))
        got = oracle.unpack(np.asarray(d_lhs), (False, True), case.sizes["m"].tolist(), case.sizes["k"].tolist())
        wanted = [
            cts[held.index(i)] @ b.T if i in held else 0 * a
            for i, (a, b) in enumerate(zip(case.lhs_groups, case.rhs_groups, strict=True))
        ]
        oracle.assert_close(got, wanted, max=2e-5)
        return
    uniform = case.rhs if layout == "forward" else case.lhs
    nans = np.full(uniform.shape[1:], np.nan, np.float32)
    shard = jnp.stack([jnp.asarray(nans) if i is None else uniform.data[i] for i in held])

    def product(shard: Array, ragged_data: Array) -> GroupedTensor:
        if layout == "forward":
            x = GroupedTensor(ragged_data, first_dims=case.lhs.first_dims)
            return ragged.matmul(x, shard, group_offset=at)
        return ragged.matmul(shard, GroupedTensor(ragged_data, last_dims=case.rhs.last_dims), group_offset=at)

    other = (case.lhs if layout == "forward" else case.rhs).data
    out = product(shard, other)
    want = [w if i in held else np.zeros_like(w) for i, w in enumerate(whole)]
    oracle.assert_close(case.unpack(np.asarray(out.data)), want, max=2e-5)
    case.assert_tail_zero(out)
    # The gradients see the same shard: an absent group's rows, and a matrix that stands for no group, get zeros.
    d_shard, d_other = jax.grad(lambda s, x: jnp.sum(product(s, x).data), argnums=(0, 1))(shard, other)
    assert not np.isnan(d_shard).any() and not np.isnan(d_other).any()
    for i, d in zip(held, d_shard, strict=True):
        assert (np.abs(d).max() > 0) == (i is not None)
    ids = np.asarray((case.lhs if layout == "forward" else case.rhs).group_ids)
    rows = np.asarray(d_other if layout == "forward" else d_other.T)
    assert np.array_equal(np.abs(rows).max(-1) > 0, np.isin(ids, [i for i in held if i is not None]))
    # Under vmap, each element may have an offset of its own.
    mapped = jax.vmap(lambda o: ragged.matmul(case.lhs, case.rhs, group_offset=o).data)(jnp.array([0, 2], jnp.int32))
    assert np.array_equal(mapped[0], ragged.matmul(case.lhs, case.rhs).data)


UNSIGNED = [np.uint32(2**32 - 1), np.uint32(2**32 - 2), np.uint32(2**31), np.uint8(255)]
BEYOND_INT32 = [np.int64(2**40), np.int64(-(2**32)), np.array(2**32 + 1), np.uint64(2**64 - 1), 2**40, -(2**70)]


@pytest.mark.parametrize("offset", [*map(jnp.asarray, UNSIGNED), *BEYOND_INT32], ids=repr)
def test_an_offset_never_wraps_around(offset: Any) -> None:
    """K11: far outside of the groups, in any dtype, NumPy's and Python's integers too, it meets none of them."""
    case = cases.make("forward", g=4, kind="even")
    out = ragged.matmul(case.lhs, case.rhs.data[:3], group_offset=offset)
    assert np.array_equal(np.asarray(out.data), np.zeros(out.shape))


@pytest.mark.parametrize("wide", ["int16", "int32"])
@pytest.mark.parametrize("narrow", ["float8_e4m3fn", "bfloat16", "float16"])
def test_wide_integers_with_narrow_floats(narrow: str, wide: str) -> None:
    """Neither fp8 nor bfloat16 holds an integer of about 1000: they meet in float32."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 5)).astype(jnp.dtype(narrow))
    w = rng.integers(900, 1100, (2, 5, 3)).astype(wide)
    dims = jnp.array([2, 4], jnp.int32)
    want = oracle.matmul(oracle.unpack(x, (True, False), [2, 4], [5, 5]), list(w))
    right = ragged.matmul(GroupedTensor(jnp.asarray(x), dims), jnp.asarray(w), preferred_element_type=jnp.float32).data
    columns = GroupedTensor(jnp.asarray(x.T), last_dims=dims)
    left = ragged.matmul(jnp.asarray(w).mT, columns, preferred_element_type=jnp.float32).data.T
    for out in (right, left):
        oracle.assert_close(oracle.unpack(np.asarray(out), (True, False), [2, 4], [3, 3]), want, max=1e-6)


@pytest.mark.parametrize("layout", ["outer", "inner_rows", "inner_columns", "ragged"])
def test_tiles_of_ragged_dims_are_honoured(layout: str) -> None:
    """K7: with a tile of 8 along each ragged dim, no dot in the program is larger than that along it."""
    case = cases.make(layout, uniform=(7, 5, 6))

    def largest(tiling: Any) -> int:
        text = jax.jit(lambda a, b: ragged.matmul(a, b, tiling=tiling).data).lower(case.lhs, case.rhs).as_text()
        dots = re.findall(r"stablehlo\.dot_general.*: \(tensor<(\d+)x(\d+)xf32>, tensor<(\d+)x(\d+)xf32>\)", text)
        assert dots
        return max(int(extent) for dot in dots for extent in dot)

    assert largest((8, 8, 8)) == 8
    assert largest(None) > 8


@pytest.mark.parametrize("layout", NAMES)
def test_precision(layout: str) -> None:
    """O10: what `lax.dot_general` takes is passed on to it."""
    case = cases.make(layout)

    def fn(lhs: Array) -> Array:
        x = GroupedTensor(lhs, case.lhs.first_dims, case.lhs.last_dims)
        return ragged.matmul(x, case.rhs, precision=jax.lax.Precision.HIGHEST).data

    assert "HIGHEST" in jax.jit(fn).lower(case.lhs.data).as_text()
    got = case.unpack(np.asarray(fn(case.lhs.data)))
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=2e-5)
    assert ragged.matmul(case.lhs, case.rhs, precision=["high", "default"]).dtype == jnp.float32


@pytest.mark.parametrize("tiling", [(8, 8, 8), (1, 1, 1), (1000, 1000, 1000), (7, 13, 5), lambda m, k, n: (16, 8, 32)])
@pytest.mark.parametrize("layout", NAMES)
def test_tilings(layout: str, tiling: Any) -> None:
    """K7, K8, K18, O9: any tiling gives the same product, and so do its derivatives."""
    case = cases.make(layout)
    out = ragged.matmul(case.lhs, case.rhs, tiling=tiling)
    got = case.unpack(np.asarray(out.data))
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=2e-5)

    def loss(lhs: Array, tiling: Any) -> Array:
        x = GroupedTensor(lhs, case.lhs.first_dims, case.lhs.last_dims)
        return jnp.sum(jnp.sin(ragged.matmul(x, case.rhs, tiling=tiling).data))

    np.testing.assert_allclose(jax.grad(loss)(case.lhs.data, tiling), jax.grad(loss)(case.lhs.data, None), atol=1e-4)


def test_a_tiling_function_is_asked_with_the_extents() -> None:
    asked = []
    case = cases.make("forward", uniform=(0, 5, 6))
    ragged.matmul(case.lhs, case.rhs, tiling=lambda m, k, n: asked.append((m, k, n)) or (8, 8, 8))
    assert asked == [(96, 5, 6)]


@pytest.mark.parametrize("layout", NAMES)
def test_interpret_and_backend_xla(layout: str) -> None:
    """O6: XLA has nothing to interpret; naming it changes nothing on the CPU."""
    case = cases.make(layout)
    want = ragged.matmul(case.lhs, case.rhs).data
    assert np.array_equal(ragged.matmul(case.lhs, case.rhs, interpret=True, backend="xla").data, want)


@pytest.mark.parametrize("layout", NAMES)
def test_same_bits_every_time(layout: str) -> None:
    """B7"""
    case = cases.make(layout, g=8, capacity=640, uniform=(130, 140, 150))
    want = np.asarray(ragged.matmul(case.lhs, case.rhs).data)
    for _ in range(3):
        jax.clear_caches()
        assert np.array_equal(np.asarray(ragged.matmul(case.lhs, case.rhs).data), want)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("layout", NAMES)
def test_what_is_not_finite_stays_in_its_group(layout: str, value: float) -> None:
    """B4, K19, K20, K21: poison one group of one operand; other groups' results and gradients keep their bits."""
    case = cases.make(layout, g=4, kind="even")
    poisoned_group = 1

    def run(lhs_groups: oracle.Groups, rhs_groups: oracle.Groups) -> tuple[oracle.Groups, oracle.Groups, oracle.Groups]:
        letters = LETTERS[layout]
        lhs = cases.tensor(lhs_groups, ("m" in letters, "k" in letters), 96, 30)
        rhs = cases.tensor(rhs_groups, ("k" in letters, "n" in letters), 96, 30)

        def product(a: Array, b: Array) -> Array:
            x, y = GroupedTensor(a, lhs.first_dims, lhs.last_dims), GroupedTensor(b, rhs.first_dims, rhs.last_dims)
            return ragged.matmul(x, y).data

        out, pull = jax.vjp(product, lhs.data, rhs.data)
        d_lhs, d_rhs = pull(jnp.ones_like(out))
        sizes = {letter: case.sizes[letter].tolist() for letter in "mkn"}
        return (
            case.unpack(np.asarray(out)),
            oracle.unpack(np.asarray(d_lhs), lhs.ragged, sizes["m"], sizes["k"]),
            oracle.unpack(np.asarray(d_rhs), rhs.ragged, sizes["k"], sizes["n"]),
        )

    clean = run(case.lhs_groups, case.rhs_groups)
    for side in (0, 1):
        groups = [[g.copy() for g in case.lhs_groups], [g.copy() for g in case.rhs_groups]]
        groups[side][poisoned_group][...] = value
        for got, want in zip(run(*groups), clean, strict=True):
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                if i != poisoned_group:
                    assert np.array_equal(a, b)
        assert not np.isfinite(run(*groups)[0][poisoned_group]).any(), "the poison must show where it belongs"


@pytest.mark.parametrize("layout", ["forward", "forward_left"])
def test_nan_weights_of_an_empty_group(layout: str) -> None:
    """B4: nothing reads them, and they get a zero gradient."""
    case = cases.make(layout, g=4, kind="half_empty")
    letter = LETTERS[layout]
    empty = np.flatnonzero(case.sizes[letter] == 0)
    assert empty.size
    uniform = (case.rhs if layout == "forward" else case.lhs).data.at[empty].set(jnp.nan)

    def product(uniform: Array) -> Array:
        if layout == "forward":
            return ragged.matmul(case.lhs, uniform).data
        return ragged.matmul(uniform, case.rhs).data

    oracle.assert_close(
        case.unpack(np.asarray(product(uniform))), oracle.matmul(case.lhs_groups, case.rhs_groups), max=2e-5
    )
    grad = np.asarray(jax.grad(lambda w: jnp.sum(product(w) ** 2))(uniform))
    assert np.array_equal(grad[empty], np.zeros_like(grad[empty]))
    assert np.isfinite(grad).all()


@pytest.mark.parametrize(
    "dims", [[3, -2, 4], [5, 100, 2], [2**31 - 1, 2**31 - 1, 5], [-5, -5, -5], [0, 0, 0], [2, 30, -(2**31)]]
)
@pytest.mark.parametrize("layout", [name for name in NAMES if name != "batched"])
def test_wrong_sizes_never_leave_the_buffers(layout: str, dims: list[int]) -> None:
    """B4: a negative size counts as 0; what is past a buffer's capacity, or wider than it, is cut off. Of a letter
    that several buffers hold, the least is left. Groups are where their sizes say, whatever other groups are."""
    letters, (rows, width, uniform) = LETTERS[layout], (24, 9, {"m": 7, "k": 5, "n": 6})
    of = {letter: [*dims[at:], *dims[:at]] for at, letter in enumerate(letters)}  # another size in each letter
    rng = np.random.default_rng(0)
    begin: dict[tuple[str, int], list[int]] = {}
    length = {letter: [[rows] * 3] if letter in letters else [[uniform[letter]] * 3] for letter in "mkn"}

    def buffer(term: str) -> np.ndarray:
        """Random; where its groups begin and how much of them it holds is noted by the way."""
        packed = next((axis for axis in (0, 1) if term[axis] in letters), None)
        shape = [uniform[letter] for letter in term]
        for axis in range(2) if packed is not None else ():
            begin[term, axis], held = [0] * 3, [shape[axis]] * 3
            if axis == packed:
                shape[axis] = rows
                begin[term, axis], held = map(list, zip(*oracle.clipped(of[term[axis]], rows), strict=True))
            elif term[axis] in letters:
                shape[axis] = width
                held = [min(max(size, 0), width) for size in of[term[axis]]]
            length[term[axis]].append(held)
        if packed is None:
            begin[term, 0] = begin[term, 1] = [0] * 3
        return rng.standard_normal(shape if packed is not None else (3, *shape)).astype(np.float32)

    lhs, rhs, old = (buffer(term) for term in ("mk", "kn", "mn"))
    held = {letter: np.min(each, axis=0) for letter, each in length.items()}

    def part(data: np.ndarray, term: str, i: int) -> np.ndarray:
        data = data if data.ndim == 2 else data[i]
        first, second = (slice(begin[term, axis][i], begin[term, axis][i] + held[x][i]) for axis, x in enumerate(term))
        return data[first, second]

    want = np.zeros(old.shape)
    for i in range(3):
        part(want, "mn", i)[...] = part(lhs, "mk", i).astype(np.float64) @ part(rhs, "kn", i)
    dims_of = {letter: jnp.array(sizes, jnp.int32) for letter, sizes in of.items()}
    x = GroupedTensor(jnp.asarray(lhs), dims_of.get("m"), dims_of.get("k"))
    y = GroupedTensor(jnp.asarray(rhs), dims_of.get("k"), dims_of.get("n"))
    options: dict[str, Any] = {}
    if layout in ("outer", "ragged"):
        options["max_last"] = width
    if layout == "inner_columns":
        options["capacity"] = rows
    out = ragged.matmul(x, y, **options)
    assert out.shape == want.shape
    oracle.assert_close([np.asarray(out.data)], [want], max=2e-5)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
@pytest.mark.parametrize("kind", ["uniform", "ragged"])
def test_a_matrix_shared_by_all_groups(side: str, kind: str) -> None:
    """A 2-D array multiplies every group; its gradient is the sum over groups."""
    layout = {("rhs", "uniform"): "batched", ("lhs", "uniform"): "batched", ("rhs", "ragged"): "forward"}.get(
        (side, kind), "forward_left"
    )
    case = cases.make(layout, g=4)
    shared = (case.lhs_groups if side == "lhs" else case.rhs_groups)[0]
    tensor = case.rhs if side == "lhs" else case.lhs
    groups = case.rhs_groups if side == "lhs" else case.lhs_groups

    def product(matrix: Array, data: Array, **options: Any) -> GroupedTensor:
        x = GroupedTensor(data, tensor.first_dims, tensor.last_dims)
        return ragged.matmul(*((matrix, x) if side == "lhs" else (x, matrix)), **options)

    matrix = jnp.asarray(shared)
    out = product(matrix, tensor.data)
    want = [shared.astype(np.float64) @ b if side == "lhs" else b @ shared.astype(np.float64) for b in groups]
    oracle.assert_close(case.unpack(np.asarray(out.data)), want, max=2e-5)
    case.assert_tail_zero(out)
    twice = product(matrix, tensor.data, existing_out=out)
    oracle.assert_close(case.unpack(np.asarray(twice.data)), [2 * w for w in want], max=2e-5)
    grad = np.asarray(jax.grad(lambda m: jnp.sum(product(m, tensor.data).data))(matrix), np.float64)
    ones = [np.ones_like(w) for w in want]
    sums = [o @ b.T if side == "lhs" else b.T @ o for b, o in zip(groups, ones, strict=True)]
    oracle.assert_close([grad], [np.sum(sums, axis=0)], max=2e-5)
    assert np.isfinite(jax.grad(lambda d: jnp.sum(product(matrix, d).data))(tensor.data)).all()
    # A result of 8 bits has no gradient, with respect to the matrix and to the groups.
    eight_bits = partial(product, preferred_element_type=jnp.float8_e4m3fn)
    for which in (0, 1):
        with pytest.raises(TypeError, match="the result is float8_e4m3fn, and so would its cotangent be"):
            jax.grad(lambda *args: jnp.sum(eight_bits(*args).data.astype(jnp.float32)), which)(matrix, tensor.data)


def test_a_shape_alone_groups_nothing() -> None:
    """T12: a matrix with as many rows as there are groups is one matrix of all groups; two have no groups at all."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 4), (4, 3)))
    out = ragged.matmul(GroupedTensor(x, jnp.ones((4,), jnp.int32)), w)
    assert out.kind == "ragged rows" and out.num_groups == 4
    oracle.assert_close([np.asarray(out.data)], [np.asarray(x, np.float64) @ w], max=2e-6)
    with pytest.raises(ValueError, match="there are no groups"):
        ragged.matmul(x, w)


@pytest.mark.parametrize("layout", NAMES)
def test_no_rows_no_columns_nothing_to_contract(layout: str) -> None:
    """Extents of zero give zeros, forward and backward."""
    for uniform in [(0, 3, 2), (4, 0, 2), (4, 3, 0)]:
        for capacity in (0, 12):
            if capacity and set(LETTERS[layout]) == set("mkn"):
                continue
            case = cases.make(layout, g=3, capacity=capacity, uniform=uniform, slack=False)
            out = ragged.matmul(case.lhs, case.rhs)
            want = oracle.matmul(case.lhs_groups, case.rhs_groups)
            oracle.assert_close(case.unpack(np.asarray(out.data)), want, max=2e-5)
            grad = jax.grad(lambda d, case=case: jnp.sum(ragged.matmul(case.lhs._replace_data(d), case.rhs).data))
            assert grad(case.lhs.data).shape == case.lhs.shape


@pytest.mark.parametrize("layout", NAMES)
def test_no_groups(layout: str) -> None:
    letters = LETTERS[layout]
    none = jnp.zeros((0,), jnp.int32)
    of = {letter: none if letter in letters else None for letter in "mkn"}
    lhs = GroupedTensor(jnp.ones((0, 4, 4) if not set("mk") & set(letters) else (4, 4)), of["m"], of["k"])
    rhs = GroupedTensor(jnp.ones((0, 4, 4) if not set("kn") & set(letters) else (4, 4)), of["k"], of["n"])
    out = ragged.matmul(lhs, rhs)
    assert out.num_groups == 0
    assert np.array_equal(np.asarray(out.data), np.zeros(out.shape))


def test_capacity_and_max_last() -> None:
    """The result's buffer where the operands don't tell how large it must be."""
    outer = cases.make("outer", g=4, kind="even")
    widest = int(outer.sizes["n"].max())
    assert ragged.matmul(outer.lhs, outer.rhs).shape == (96, 96)
    out = ragged.matmul(outer.lhs, outer.rhs, max_last=widest)
    assert out.shape == (96, widest)
    want = oracle.matmul(outer.lhs_groups, outer.rhs_groups)
    oracle.assert_close(outer.unpack(np.asarray(out.data)), want, max=2e-5)
    cut = ragged.matmul(outer.lhs, outer.rhs, max_last=3)
    for got, w in zip(cut.to_list(), want, strict=True):
        oracle.assert_close([np.asarray(got)], [w[:, :3]], max=2e-5)

    inner = cases.make("inner_columns", g=4, kind="even")
    assert ragged.matmul(inner.lhs, inner.rhs).shape == (7, 4 * inner.rhs.shape[-1])
    out = ragged.matmul(inner.lhs, inner.rhs, capacity=90)
    assert out.shape == (7, 90)
    oracle.assert_close(inner.unpack(np.asarray(out.data)), oracle.matmul(inner.lhs_groups, inner.rhs_groups), max=2e-5)


@pytest.mark.long
def test_attention_forward_and_backward() -> None:
    """The layouts at work together: softmax(q kᵀ) v for sequences of different lengths, against a loop."""
    rng = np.random.default_rng(0)
    dims = jnp.array([5, 0, 9, 2], jnp.int32)
    q, k, v = (jnp.asarray(rng.standard_normal((20, 4)), jnp.float32).at[16:].set(jnp.nan) for _ in range(3))

    def attention(q: Array, k: Array, v: Array) -> Array:
        queries, keys, values = (GroupedTensor(x, first_dims=dims) for x in (q, k, v))
        weights = ragged.matmul(queries, keys.mT, max_last=9).softmax()
        return ragged.matmul(weights, values).data

    def loop(q: Array, k: Array, v: Array) -> Array:
        rows, start = [], 0
        for size in (5, 0, 9, 2):
            a, b, c = (x[start : start + size] for x in (q, k, v))
            rows.append(jax.nn.softmax(a @ b.T, axis=-1) @ c)
            start += size
        return jnp.concatenate([*rows, jnp.zeros((4, 4))])

    np.testing.assert_allclose(attention(q, k, v), loop(q, k, v), atol=1e-5)

    def grads(fn: Callable[..., Array]) -> Any:
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(fn(*xs))), argnums=(0, 1, 2))(q, k, v)

    for got, want in zip(grads(attention), grads(loop), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("g", [1, 3])
@pytest.mark.parametrize("layout", NAMES)
def test_sizes_that_are_constants_of_the_program(layout: str, g: int) -> None:
    """XLA folds what it knows; its CPU backend can't run every bfloat16 dot that is left then."""
    case = cases.make(layout, g=g, dtype="bfloat16", uniform=(100, 7, 130))

    @jax.jit
    def product(lhs: Array, rhs: Array) -> Array:
        sides = (
            GroupedTensor(data, x.first_dims, x.last_dims, transposed=x.transposed)
            for data, x in ((lhs, case.lhs), (rhs, case.rhs))
        )
        return ragged.matmul(*sides).data

    out = product(case.lhs.data, case.rhs.data)
    want = oracle.matmul(case.lhs_groups, case.rhs_groups)
    worst, rms = TOLERANCE["bfloat16"]
    oracle.assert_close(case.unpack(np.asarray(out).astype(np.float64)), want, max=worst, rms=rms)
