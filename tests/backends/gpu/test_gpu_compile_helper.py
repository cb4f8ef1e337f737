"""What `gpu` reports of kernels that are known to be good, or bad."""

# Triton's annotations are of what its language has once it is compiled.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from ragged.backends.gpu import call as triton_call
from tests import gpu

gpu.needs_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

M, K, N = 512, 2048, 1024
TILE = (128, 256, 64)


@triton.jit
def pointers(x, y, out, k: tl.constexpr, n: tl.constexpr, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr):
    """`out = x @ y.T`, from pointers."""
    rows = tl.program_id(0) * bm + tl.arange(0, bm)
    columns = tl.program_id(1) * bn + tl.arange(0, bn)
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros((bm, bn), kind)
    for start in range(0, k, bk):
        inner = start + tl.arange(0, bk)
        a = tl.load(x + rows[:, None] * k + inner[None, :])
        b = tl.load(y + columns[:, None] * k + inner[None, :])
        total = tl.dot(a, b.T, total, out_dtype=kind)
    tl.store(out + rows[:, None] * n + columns[None, :], total.to(out.dtype.element_ty))


@triton.jit
def descriptors(
    x,
    y,
    out,
    m: tl.constexpr,
    k: tl.constexpr,
    n: tl.constexpr,
    bm: tl.constexpr,
    bn: tl.constexpr,
    bk: tl.constexpr,
    specialised: tl.constexpr,
):
    """`out = x @ y.T`, by TMA; if `specialised`, warps load or multiply."""
    xs = tl.make_tensor_descriptor(x, shape=[m, k], strides=[k, 1], block_shape=[bm, bk])
    ys = tl.make_tensor_descriptor(y, shape=[n, k], strides=[k, 1], block_shape=[bn, bk])
    outs = tl.make_tensor_descriptor(out, shape=[m, n], strides=[n, 1], block_shape=[bm, bn])
    row, column = tl.program_id(0) * bm, tl.program_id(1) * bn
    total = tl.zeros((bm, bn), tl.float32)
    for start in tl.range(0, k, bk, warp_specialize=specialised):
        total = tl.dot(xs.load([row, start]), ys.load([column, start]).T, total)
    outs.store([row, column], total.to(out.dtype.element_ty))


def matmul(
    x: Any, y: Any, *, kernel: Any = pointers, num_warps: int = 8, tile: Any = TILE, stages: int = 3, **more: Any
) -> Any:
    bm, bn, bk = tile
    return triton_call.load().triton_call(
        x,
        y,
        kernel=kernel,
        out_type=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
        grid=(M // bm, N // bn),
        num_warps=num_warps,
        num_stages=stages,
        backend_options=triton_call.backend_options(),
        **{"k": K, "n": N, "bm": bm, "bn": bn, "bk": bk, **more},
    )


def by_tma(x: Any, y: Any, *, specialised: bool = False, **options: Any) -> Any:
    return matmul(x, y, kernel=descriptors, m=M, specialised=specialised, **options)


def avals(dtype: Any) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((M, K), dtype), jax.ShapeDtypeStruct((N, K), dtype)


BF16 = avals(jnp.bfloat16)


def compile_one(chip: str, function: Callable[..., Any], *operands: Any) -> gpu.Kernel:
    [kernel] = gpu.compile_for(chip, function, *operands)
    return kernel


@pytest.mark.long
def test_hopper() -> None:
    kernel = compile_one("NVIDIA H200", matmul, *BF16)
    assert kernel.name == "pointers"
    assert kernel.threads == 256
    assert kernel.shared_bytes == 3 * (128 + 256) * 64 * 2  # the stages
    assert kernel.spill_bytes == 0
    assert 128 < kernel.registers < 200  # 128 of them accumulate
    assert kernel.remarks == ()
    # A warp group has 64 rows of the tile, and an instruction takes 16 of k. One k-tile is in the loop.
    assert kernel.sass_counts["HGMMA"] == 64 // 16
    assert kernel.sass_counts["LDGSTS"] > 0
    assert kernel.sass_counts["UTMALDG"] == kernel.sass_counts["HMMA"] == kernel.sass_counts["STL"] == 0


@pytest.mark.long
def test_too_few_registers_are_seen() -> None:
    kernel = compile_one("NVIDIA H200", partial(matmul, num_warps=4), *BF16)  # the accumulator is 256 a thread
    assert kernel.registers == 255
    assert kernel.spill_bytes > 1000
    assert kernel.sass_counts["STL"] > 0 and kernel.sass_counts["LDL"] > 0
    [remark] = kernel.remarks
    assert "wgmma.mma_async instructions are serialized" in remark


@pytest.mark.long
def test_too_much_shared_memory_is_seen() -> None:
    assert compile_one("NVIDIA H200", partial(matmul, stages=4), *BF16).shared_bytes == 4 * (128 + 256) * 64 * 2
    with pytest.raises(AssertionError, match="too many for NVIDIA A100"):
        compile_one("NVIDIA A100", partial(matmul, stages=6), *BF16)


def test_the_wrong_number_of_threads_is_seen() -> None:
    with pytest.raises(AssertionError, match=r"needs \d+ threads and jax-triton launches 256"):
        compile_one("NVIDIA B200", partial(by_tma, specialised=True, tile=(128, 128, 64)), *BF16)


def test_ptx_that_is_too_new_is_seen() -> None:
    triton_call.backend_options()  # cached with the real version: for the patched one, Triton can't compile
    with (
        mock.patch.object(triton_call, "newest_ptx", lambda: 70),
        pytest.raises(AssertionError, match=r"backend_options\(\)"),
    ):
        compile_one("NVIDIA H200", matmul, *BF16)


@pytest.mark.long
def test_whole_program() -> None:
    def program(x: Any, y: Any) -> Any:
        return jnp.sort(by_tma(jnp.tanh(x), y).astype(jnp.float32), axis=0)

    compiled = gpu.compile_whole(program, *BF16)
    assert compiled.as_text().count(f'custom_call_target="{triton_call.load().CUSTOM_CALL_TARGET_NAME}"') == 1
    assert compiled.memory_analysis().output_size_in_bytes == M * N * 4
    assert gpu.kernels_of(compiled) == [(f"bf16[{M},{N}]", compile_one("NVIDIA H200", program, *BF16))]


def test_skips_or_fails() -> None:
    with mock.patch.object(triton_call, "missing", lambda: "needs it"):
        with mock.patch.dict(os.environ, REQUIRE_TRITON="1"), pytest.raises(AssertionError, match="needs it"):
            gpu.compile_for("NVIDIA H200", matmul, *BF16)
        with mock.patch.dict(os.environ, REQUIRE_TRITON=""), pytest.raises(pytest.skip.Exception, match="needs it"):
            gpu.compile_for("NVIDIA H200", matmul, *BF16)


@pytest.mark.parametrize(
    "absent, names",
    [({"triton"}, "triton"), ({"jax_triton"}, "jax-triton"), ({"triton", "jax_triton"}, "triton and jax-triton")],
)
def test_missing(absent: set[str], names: str) -> None:
    find = triton_call.find_spec
    with mock.patch.object(triton_call, "find_spec", lambda name: None if name in absent else find(name)):
        assert triton_call.missing() == f"`ragged`'s Triton kernels need {names}: `pip install 'jax-ragged[cuda]'`."
        with pytest.raises(ImportError, match=names):
            triton_call.load.__wrapped__()
    assert triton_call.missing() == ""


def test_missing_plugin() -> None:
    with mock.patch.object(triton_call, "gpu_triton", object()):
        assert "need JAX's CUDA plugin:" in triton_call.missing()


def test_the_mends_are_needed() -> None:
    """Fails when one can go: once `ragged` requires the version that is mended."""
    from triton.backends.nvidia import driver

    rule = triton_call.load().triton_lib._triton_kernel_call_dce_rule
    assert len(inspect.signature(rule).parameters) == 2, "jax-triton follows jax 0.12: require it and drop the patch"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    assert ("TMA_TF32" in inspect.getsource(driver)) == (version >= (3, 8)), "the comment has the wrong versions"
