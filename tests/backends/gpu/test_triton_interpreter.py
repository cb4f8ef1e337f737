"""The interpreter against plain NumPy, in a process in which the same kernels are compiled too."""

# Triton's types are stricter than its compiler.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

import inspect
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

from ragged.backends.gpu.interpreter import run

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
FACTOR = tl.constexpr(3)


@triton.jit
def scaled(x, by: tl.constexpr = FACTOR):
    return x * by


@triton.jit
def matmul(
    lhs, rhs, bias, out, sizes, K: tl.constexpr, N: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.load(sizes)
    n_tiles: tl.constexpr = N // TILE_N
    tile = tl.program_id(0)
    row = (tile // n_tiles * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)[:, None]
    col = (tile % n_tiles * TILE_N + tl.arange(0, TILE_N))[None, :]
    integers: tl.constexpr = lhs.dtype.element_ty == tl.int8
    acc_dtype: tl.constexpr = tl.int32 if integers else tl.float32
    acc = tl.zeros((TILE_M, TILE_N), dtype=acc_dtype)
    if bias is not None:
        acc += tl.load(bias + col).to(acc_dtype)
    for k in tl.range(0, tl.cdiv(K, TILE_K), num_stages=2):
        ks = k * TILE_K + tl.arange(0, TILE_K)
        a = tl.load(lhs + row * K + ks[None, :], mask=(row < rows) & (ks[None, :] < K), other=0.0)
        b = tl.load(rhs + ks[:, None] * N + col, mask=ks[:, None] < K, other=0.0)
        if PRECISION == "imprecise":
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=16)
        else:
            acc += tl.dot(a, b, input_precision=PRECISION, out_dtype=acc_dtype)
    tl.store(out + row * N + col, scaled(acc).to(out.dtype.element_ty), mask=row < rows)


def random(dtype: Any, *shape: int) -> np.ndarray:
    values = np.random.default_rng(sum(shape)).normal(size=shape)
    return np.round(values * 40).astype(dtype) if np.dtype(dtype) == np.int8 else values.astype(dtype)


def compiled() -> str:
    constexprs = {"K": 128, "N": 128, "TILE_M": 64, "TILE_N": 64, "TILE_K": 32, "PRECISION": "ieee"}
    signature = {"lhs": "*bf16", "rhs": "*bf16", "bias": "*fp32", "out": "*fp32", "sizes": "*i32"}
    source = ASTSource(matmul, {**signature, **dict.fromkeys(constexprs, "constexpr")}, constexprs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}).asm["ttir"]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "precision"),
    [
        (BF16, BF16, np.float32, "tf32"),
        (BF16, BF16, BF16, "tf32"),
        (np.float16, np.float16, np.float32, "ieee"),
        (np.float32, np.float32, np.float32, "ieee"),
        (E4M3, E4M3, np.float32, "imprecise"),
        (E4M3, E5M2, np.float32, "tf32"),
        (E5M2, E4M3, BF16, "imprecise"),
        (np.int8, np.int8, np.int32, "ieee"),
    ],
)
def test_matmul(lhs: Any, rhs: Any, out: Any, precision: str, with_bias: bool) -> None:
    m, k, n, rows = 128, 96, 64, 77
    a, b, bias = random(lhs, m, k), random(rhs, k, n), random(np.int8, n)
    c = np.zeros((m, n), out)
    tiles = {"TILE_M": 32, "TILE_N": 32, "TILE_K": 64, "PRECISION": precision}
    sizes = np.array([rows], np.int32)
    arguments = {"lhs": a, "rhs": b, "bias": bias if with_bias else None, "out": c, "sizes": sizes}
    run(matmul, (8,), {**arguments, "K": k, "N": n, **tiles}, ["out"])
    expected = 3 * (a.astype(np.float64) @ b.astype(np.float64) + bias.astype(np.float64) * with_bias)
    if out == np.int32:
        np.testing.assert_array_equal(c[:rows], expected[:rows])
        assert (c[rows:] == 0x55555555).all()
    else:
        rtol = 2**-8 if out == BF16 else 1e-6
        np.testing.assert_allclose(c[:rows].astype(np.float64), expected[:rows], rtol=rtol, atol=1e-4)
        assert np.isnan(c[rows:].astype(np.float32)).all()


@triton.jit
def dot_scaled(a, b, a_scales, b_scales, out):
    i, k, block = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :], tl.arange(0, 2)[None, :]
    x, y = tl.load(a + i * 64 + k), tl.load(b + i * 64 + k)
    x_scales, y_scales = tl.load(a_scales + i * 2 + block), tl.load(b_scales + i * 2 + block)
    one = tl.full((16, 16), 1, tl.float32)
    product = tl.dot_scaled(x, x_scales, "e4m3", tl.trans(y), y_scales, "e5m2", one)
    tl.store(out + i * 16 + tl.arange(0, 16)[None, :], product)


def test_scaled_dot() -> None:
    """Scales are exponents: 127 is 1, 0 is 2**-127, 255 is NaN."""
    a, b, out = random(E4M3, 16, 64), random(E5M2, 16, 64), np.empty((16, 16), np.float32)
    scales = np.random.default_rng(0).integers(120, 134, (2, 16, 2)).astype(np.uint8)
    scales[:, 3], scales[0, 5, 1], scales[1, 5, 1] = 0, 200, 255
    run(dot_scaled, (1,), {"a": a, "b": b, "a_scales": scales[0], "b_scales": scales[1], "out": out}, ["out"])
    factors = np.where(scales < 255, 2.0 ** (scales.astype(np.float64) - 127), np.nan).repeat(32, -1)
    expected = 1 + (a.astype(np.float64) * factors[0]) @ (b.astype(np.float64) * factors[1]).T
    assert np.isnan(expected[:, 5]).all() and np.isfinite(np.delete(expected, 5, 1)).all()
    sizes = 1 + (np.abs(a.astype(np.float64)) * factors[0]) @ (np.abs(b.astype(np.float64)) * factors[1]).T
    np.testing.assert_array_less(np.delete(np.abs(out - expected) / sizes, 5, 1), 1e-5)
    assert np.isnan(out[:, 5]).all()


@triton.jit
def dot_of_four_bits(a, b, a_scales, b_scales, out):
    i, k, block = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :], tl.arange(0, 2)[None, :]
    x, y = tl.load(a + i * 32 + tl.arange(0, 32)[None, :]), tl.load(b + i * 64 + k)
    x_scales, y_scales = tl.load(a_scales + i * 2 + block), tl.load(b_scales + i * 2 + block)
    product = tl.dot_scaled(x, x_scales, "e2m1", tl.trans(y), y_scales, "e4m3")
    tl.store(out + i * 16 + tl.arange(0, 16)[None, :], product)


def test_scaled_dot_of_four_bits() -> None:
    """Of two numbers in a byte, the first is in the lower bits."""
    rng = np.random.default_rng(0)
    codes, b = rng.integers(0, 16, (16, 64)).astype(np.uint8), random(E4M3, 16, 64)
    scales, out = rng.integers(125, 130, (2, 16, 2)).astype(np.uint8), np.empty((16, 16), np.float32)
    packed = codes[:, ::2] + 16 * codes[:, 1::2]
    arrays = {"a": packed, "b": b, "a_scales": scales[0], "b_scales": scales[1], "out": out}
    run(dot_of_four_bits, (1,), arrays, ["out"])
    a = np.where(codes < 8, 1, -1) * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8]
    factors = 2.0 ** (scales.astype(np.float64) - 127).repeat(32, -1)
    np.testing.assert_allclose(out, (a * factors[0]) @ (b.astype(np.float64) * factors[1]).T, rtol=1e-5, atol=1e-4)


@triton.jit
def cast(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def all_of(dtype: Any) -> np.ndarray:
    return np.arange(1 << 8 * np.dtype(dtype).itemsize).astype(f"u{np.dtype(dtype).itemsize}").view(dtype)


@pytest.mark.parametrize("to", [BF16, np.float16, E4M3, E5M2])
def test_casts_round_to_nearest_even(to: Any) -> None:
    values = all_of(to).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:].astype(np.float64) + values[:-1]) / 2  # the hardest: half-way
    x = np.concatenate([values, middles.astype(np.float32), np.nextafter(middles, np.inf, dtype=np.float32)])
    x = np.concatenate([x, [np.nan]]).astype(np.float32)
    x = np.resize(x, 1 << (x.size - 1).bit_length())
    out = np.empty(x.shape, to)
    run(cast, (1,), {"x": x, "out": out, "N": x.size}, ["out"])
    np.testing.assert_array_equal(out.view(f"u{out.itemsize}"), x.astype(to).view(f"u{out.itemsize}"))


@pytest.mark.parametrize(("to", "largest"), [(E4M3, 448), (E5M2, 57344)])
def test_float8_saturates(to: Any, largest: float) -> None:
    x = np.array([1e6, -1e6, np.inf, -np.inf], np.float32)
    out = np.empty(4, to)
    run(cast, (1,), {"x": x, "out": out, "N": 4}, ["out"])
    np.testing.assert_array_equal(out.astype(np.float32), [largest, -largest, largest, -largest])


@pytest.mark.parametrize(
    ("of", "to"),
    [
        (np.int8, BF16), (np.uint8, BF16), (np.int8, np.float32), (E4M3, BF16), (E5M2, BF16), (E4M3, np.float32),
        (E5M2, np.float32), (E5M2, np.float16), (BF16, np.float32), (np.int8, np.int64), (np.uint8, np.int32),
        (np.int16, np.uint8), (np.int8, bool),
    ],
)  # fmt: skip
def test_casts_exactly(of: Any, to: Any) -> None:
    x = all_of(of)
    out = np.empty(x.shape, to)
    run(cast, (1,), {"x": x, "out": out, "N": x.size}, ["out"])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out.astype(np.float64), x.astype(to).astype(np.float64))


@triton.jit
def narrow_arithmetic(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    half = tl.full((N,), 0.5, tl.bfloat16)
    tl.store(out + at, tl.where(a < b, a + b, -a * tl.minimum(tl.maximum(b, half), float("nan")).to(tl.bfloat16)))


def test_arithmetic_of_bfloat16() -> None:  # and a number wins over NaN
    x, y, out = random(BF16, 32), random(BF16, 32)[::-1].copy(), np.empty(32, BF16)
    run(narrow_arithmetic, (1,), {"x": x, "y": y, "out": out, "N": 32}, ["out"])
    expected = np.where(x < y, x + y, -x * np.maximum(y, BF16(0.5)))
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), rtol=2**-8)


@triton.jit
def wider(a, b):
    return tl.maximum(a, b)


@triton.jit
def language(x, out, sums, flag, count, N: tl.constexpr):
    at, n = tl.arange(0, N), tl.load(count)
    values = tl.load(x + at, mask=at < n, other=0)
    ends = tl.cumsum(values, 0)
    tl.store(out + at, ends)
    tl.store(sums + 0, tl.sum(values))
    tl.store(sums + 1, values.sum(axis=0))
    tl.store(sums + 2, tl.max(values, 0))
    tl.store(sums + 3, tl.reduce(values, 0, wider))
    tl.store(sums + 4, tl.sum(tl.where(ends <= 10, 1, 0)))
    tl.store(sums + 5, min(n, 5) + max(2, 1) + tl.minimum(n, 6).to(tl.int64))
    tl.store(sums + 6, tl.num_programs(0) * 100 + tl.cdiv(n, 5))
    square = tl.reshape(values, (4, N // 4))
    tl.store(sums + 7, tl.sum(tl.sum(tl.trans(square) * square.T * square.reshape(N // 4, 4), 1), 0))
    total = n * 0
    for i in range(tl.load(x), n, 2):
        total += i.to(tl.int32)
    for i in tl.static_range(3):
        total += i
    if total > 3 and not n < 0:
        tl.store(sums + 8, total)
    else:
        tl.store(sums + 8, -1)
    if flag or n > 100:
        tl.store(sums + 9, total if flag else 7)
    tl.store(sums + 10, tl.sum(tl.where((at > 3) and not (at > 5), 1, 0)))
    tl.store(sums + 11, tl.sum(min(values, 2)))
    tl.store(sums + 12, (n - 13).to(tl.uint8).to(tl.int32))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_language(dtype: Any) -> None:
    x = np.arange(1, 17).astype(dtype)
    out, sums = np.empty(16, dtype), np.empty(13, dtype)
    arguments = {"x": x, "out": out, "sums": sums, "flag": True, "count": np.array([12], np.int32), "N": 16}
    run(language, (2,), arguments, ["out", "sums"])
    values = np.where(np.arange(16) < 12, x, 0)
    np.testing.assert_array_equal(out, np.cumsum(values))
    square = values.reshape(4, 4)
    total = sum(range(1, 12, 2)) + 3
    np.testing.assert_array_equal(
        sums,
        [78, 78, 12, 12, 4, 13, 203, (square.T * square.T * square).sum(), total, total, 2, 23, 255],
    )


@triton.jit
def overruns(x, out, N: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    values = tl.load(x + at + SHIFT, mask=at < LIMIT)
    tl.store(out + at, values, mask=at < LIMIT)


def test_masked_lanes_may_point_anywhere() -> None:
    x, out = random(np.float32, 20), np.empty(24, np.float32)
    run(overruns, (2,), {"x": x, "out": out, "N": 16, "LIMIT": 20, "SHIFT": 0}, ["out"])
    np.testing.assert_array_equal(out[:20], x)
    assert np.isnan(out[20:]).all()


@pytest.mark.parametrize(
    ("size", "limit", "shift", "message"),
    [
        (24, 21, 0, r"`overruns` loads element 20 of `x`, which has 20\.\n.*program \(1, 0, 0\)"),
        (24, 20, -3, r"`overruns` loads element -3 of `x`, which has 20\."),
        (19, 20, 0, r"`overruns` stores element 19 of `out`, which has 19\."),
    ],
)
def test_stray_accesses_raise(size: int, limit: int, shift: int, message: str) -> None:
    # As slices of one buffer: an access that strays from one lands in the other.
    x, out = np.zeros(4096, np.float32)[2048:2068], np.zeros(4096, np.float32)[:size]
    with pytest.raises(IndexError, match=message):
        run(overruns, (2,), {"x": x, "out": out, "N": 16, "LIMIT": limit, "SHIFT": shift}, ["out"])


def test_storing_to_an_input_raises() -> None:
    x, out = random(np.float32, 16), np.empty(16, np.float32)
    with pytest.raises(IndexError, match="`overruns` stores element 0 of `out`, which isn't an output"):
        run(overruns, (1,), {"x": x, "out": out, "N": 16, "LIMIT": 16, "SHIFT": 0}, ["x"])


def test_bad_arguments_raise() -> None:
    arguments = {"x": random(np.float32, 8, 4).T, "out": np.empty(16, np.float32), "N": 16, "LIMIT": 16, "SHIFT": 0}
    with pytest.raises(ValueError, match="`x` isn't contiguous"):
        run(overruns, (1,), arguments, ["out"])
    with pytest.raises(ValueError, match="outputs \\['y'\\]"):
        run(overruns, (1,), arguments, ["y"])


@triton.jit
def described_by_the_host(x, x_tiles, out, M: tl.constexpr, N: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    tl.store(out + rows[:, None] * N + tl.arange(0, N)[None, :], x_tiles.load([tl.program_id(0) * M, 0]))


def test_descriptors_of_the_host() -> None:
    """Made before any program runs, so an error names none, not even the last of the run before."""
    x, out = random(BF16, 40, 32), np.empty((48, 32), BF16)
    arguments = {"x": x, "out": out, "M": 16, "N": 32}

    def described(rows: int) -> None:
        run(described_by_the_host, (3,), {**arguments, "x_tiles": ("x", (rows, 32), (32, 1), (16, 32))}, ["out"])

    described(40)
    np.testing.assert_array_equal(out[:40], x)
    assert not out[40:].astype(np.float32).any()
    with pytest.raises(IndexError, match=r"describes element 1311 of `x`, which has 1280\.\nThis is on the host"):
        described(41)


@triton.jit
def described_matrices(x, x_tiles, out, M: tl.constexpr, N: tl.constexpr):
    block = x_tiles.load([1, -1, 0]).reshape(M, N)
    tl.store(out + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], block)


@pytest.mark.parametrize("dtype", [BF16, E4M3, E5M2, np.float32, np.int8])
def test_descriptors_of_three_dims(dtype: Any) -> None:
    """Zeros outside of a matrix, in front of its first row and behind its last."""
    x, out = random(dtype, 3, 6, 32), np.empty((8, 32), dtype)
    tiles = ("x", (3, 6, 32), (6 * 32, 32, 1), (1, 8, 32))
    run(described_matrices, (1,), {"x": x, "x_tiles": tiles, "out": out, "M": 8, "N": 32}, ["out"])
    np.testing.assert_array_equal(out, np.pad(x[1].astype(np.float32), ((1, 1), (0, 0))).astype(dtype))


@triton.jit
def branches_on_block(x, out):
    if tl.load(x + tl.arange(0, 2)) > 0:
        tl.store(out, 1)


def test_a_block_has_no_truth_value() -> None:
    with pytest.raises(ValueError, match="no truth value"):
        run(branches_on_block, (1,), {"x": np.array([3, 4]), "out": np.array([0])}, ["out"])


@triton.jit
def adds(x, out):
    at = tl.arange(0, 4)
    tl.store(out + at, tl.load(out + at) + tl.load(x + at))


def test_what_is_updated_keeps_its_values() -> None:
    x = np.arange(4, dtype=np.float32)
    run(adds, (1,), {"x": x, "out": (out := np.ones(4, np.float32))}, [], ["out"])
    np.testing.assert_array_equal(out, x + 1)
    run(adds, (1,), {"x": x, "out": out}, ["out"])
    assert np.isnan(out).all()


@triton.jit
def warns(x, out):
    at = tl.arange(0, 4)
    values = tl.load(x + at)
    tl.store(out + at, tl.exp(values * 1e30) / 0.0 + tl.max(values, 0))
    tl.store(out + 4 + at, values.to(tl.int32))


def test_no_warning_escapes() -> None:
    x = np.full(4, np.nan, np.float32)
    with np.errstate(all="raise"):
        run(warns, (1,), {"x": x, "out": np.zeros(8, np.float32)}, ["out"])


def test_a_replaced_device_function_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = np.ones((16, 16), np.float32), np.empty((16, 16), np.float32)
    arguments = {"lhs": x, "rhs": x, "bias": None, "out": out, "sizes": np.array([16], np.int32), "K": 16, "N": 16}
    arguments |= {"TILE_M": 16, "TILE_N": 16, "TILE_K": 16, "PRECISION": "ieee"}
    run(matmul, (1,), arguments, ["out"])
    assert (out == 48).all()
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(5))
    monkeypatch.setitem(globals(), "scaled", unscaled)
    run(matmul, (1,), arguments, ["out"])
    assert (out == 16).all()


@triton.jit
def masked(x, out):
    at = tl.arange(0, 4)
    tl.store(out + at, tl.load(x + at, mask=at < 2))


def test_masked_lanes_are_undefined() -> None:
    x, out = np.zeros(2, BF16), np.empty(4, BF16)
    run(masked, (1,), {"x": x, "out": out}, ["out"])
    assert np.isnan(out.astype(np.float32)).tolist() == [False, False, True, True]


def test_a_kernel_may_be_a_closure() -> None:
    offset, out = tl.constexpr(7), np.empty(1, np.int32)

    @triton.jit
    def closure(out):
        tl.store(out, unscaled(offset))

    run(closure, (1,), {"out": out}, ["out"])
    assert out == 7


@triton.jit
def unscaled(x):
    return x


@pytest.mark.long
def test_nothing_stays_replaced(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "1"))
    before, names = compiled(), set(globals())
    state = [dict(vars(x)) for x in (tl, tl.core, tl.math, tl.tensor, tl.dtype, interpreter)]
    test_matmul(BF16, BF16, BF16, "ieee", True)
    test_language(np.int32)
    test_stray_accesses_raise(24, 21, 0, "loads element 20")
    after = [dict(vars(x)) for x in (tl, tl.core, tl.math, tl.tensor, tl.dtype, interpreter)]
    assert state == after
    assert names == set(globals())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "2"))
    assert compiled() == before


@pytest.mark.long
def test_interprets_while_another_thread_compiles(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    expected, failures, done = compiled(), [], threading.Event()
    originals = interpreter._get_np_dtype, tl.dtype.to_ir

    def interpret() -> None:
        try:
            while not done.is_set():
                test_matmul(BF16, BF16, BF16, "ieee", True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=interpret) for _ in range(2)]
    for thread in threads:
        thread.start()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "2"))
    assert compiled() == expected
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert originals == (interpreter._get_np_dtype, tl.dtype.to_ir)


def test_traceback_names_the_kernels_line() -> None:
    arguments = {"x": np.zeros(3), "out": np.zeros(16), "N": 16, "LIMIT": 16, "SHIFT": 0}
    with pytest.raises(IndexError) as info:
        run(overruns, (1,), arguments, ["out"])
    lines, start = inspect.getsourcelines(overruns.fn)
    numbers = {entry.lineno + 1 for entry in info.traceback if str(entry.path) == __file__}
    assert start + next(i for i, line in enumerate(lines) if "tl.load" in line) in numbers
