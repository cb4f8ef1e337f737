"""The GPU kernel's body, run on the CPU by Triton's interpreter, against the float64 oracle.

The interpreter's memory is checked: results begin as NaN, and whatever lies outside of an array can't be loaded.
"""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor, Scaling
from ragged.backends.base import Target
from ragged.backends.gpu import call as triton_call
from ragged.core.scales import Scales
from ragged.primitive import lowering
from ragged.product.config import GpuConfig
from tests import cases, four_bits, gpu, oracle, products
from tests.cases import check, normal, split
from tests.contract.launches import only

gpu.needs_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from ragged.backends.gpu import interpreter as triton_interpreter  # noqa: E402
from ragged.backends.gpu import kernel as triton_kernel  # noqa: E402
from tests.everywhere import INTERPRETED, everywhere  # noqa: E402


@pytest.fixture
def nothing_but_the_kernels() -> Iterator[None]:
    """XLA's never stand in for them."""
    with only("triton_gpu"):
        yield


interpreted = pytest.mark.usefixtures("nothing_but_the_kernels")
E4M3 = "float8_e4m3fn"
FAST_FP8 = "ANY_F8_ANY_F8_F32_FAST_ACCUM"


def matmul(lhs: Any, rhs: Any, tiles: Any = None, **options: Any) -> GroupedTensor:
    how = everywhere("triton_gpu", *tiles) if tiles else INTERPRETED["triton_gpu"]
    return jax.jit(lambda lhs, rhs: ragged.matmul(lhs, rhs, backend=how, **options))(lhs, rhs)


@triton.jit
def load_all(pointers, inside, rest, A: tl.constexpr):
    """In place of a load that masks what lies beyond the buffer."""
    return tl.load(pointers)


@triton.jit
def fit_fewer(start, size, CAPACITY: tl.constexpr):
    """In place of what says how many rows a group has in a buffer: one fewer."""
    return start.to(tl.int32), tl.maximum(size, 1) - 1


@pytest.mark.parametrize(
    "function, wrong, error, text",
    split(
        [("_load", load_all, jax.errors.JaxRuntimeError, "`grouped_product` loads element")],
        [("_fit", fit_fewer, AssertionError, "largest error nan")],
    ),
)
def test_memory_is_watched(function: str, wrong: Any, error: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What strays from an array is found, and so is what of the result nobody wrote."""
    case = cases.make("forward", g=2, slack=False, capacity=32, uniform=(8, 50, 20))
    check(case, matmul(case.lhs, case.rhs, tiles=(16, 16, 16)))
    monkeypatch.setattr(triton_kernel, function, wrong)
    with pytest.raises(error, match=text):
        check(case, matmul(case.lhs, case.rhs, tiles=(16, 16, 16)))


@triton.jit
def far_apart(out, STRIDE: tl.constexpr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    tl.store(out + index, triton_kernel._apart(index, STRIDE, TILE))


@pytest.mark.parametrize("stride", [7, 200_000_000, 35_000_000_000])
def test_rows_that_are_far_apart(stride: int) -> None:
    """Of rows of many elements, the offsets within a tile exceed int32."""
    out = np.zeros(16, np.int64)
    triton_interpreter.run(far_apart, (1,), {"out": out, "STRIDE": stride, "TILE": 16}, ["out"])
    np.testing.assert_array_equal(out, stride * np.arange(16))


@pytest.mark.long
def test_executed_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward's tiles are as many as the run-time sizes make, and a wgrad's steps. On an H200, where one loop runs
    over the steps of all tiles, a tile has one at least, also in a gap.

    A tile is stored twice: inside of its group and, as zeros, outside.
    """
    stored, multiplied = [], []
    builder = triton_interpreter._Builder
    store, dot = builder.create_masked_store, builder.create_dot
    monkeypatch.setattr(builder, "create_masked_store", lambda *x, **y: stored.append(1) or store(*x, **y))
    monkeypatch.setattr(builder, "create_dot", lambda *x, **y: multiplied.append(1) or dot(*x, **y))
    rows, tile = 128, 16
    x, dy = jnp.ones((2, rows, 32), jnp.bfloat16)  # two tiles of each of these columns
    w = jnp.ones((8, 32, 32), jnp.bfloat16)

    def tiles(size: int) -> int:
        return -(-size // tile)

    for sizes in ([128, *[0] * 7], [0] * 8, [1] * 8, [50, 0, 0, 40, 1, 1, 1, 1]):
        dims = jnp.array(sizes, jnp.int32)
        in_groups = sum(map(tiles, sizes))
        gaps = tiles(rows - sum(sizes))
        stored.clear()
        multiplied.clear()
        with gpu.on("NVIDIA H200", multiprocessors=1):
            jax.block_until_ready(matmul(GroupedTensor(x, dims), w, tiles=(tile, 16, 16)))
        assert len(stored) == 2 * 2 * (in_groups + gaps)
        assert len(multiplied) == 2 * (2 * in_groups + gaps)
        stored.clear()
        multiplied.clear()
        with gpu.on("NVIDIA H200", multiprocessors=1):
            jax.block_until_ready(matmul(GroupedTensor(x, dims).mT, GroupedTensor(dy, dims), tiles=(16, tile, 16)))
        assert len(stored) == 2 * 2 * 2 * len(sizes)
        assert len(multiplied) == 2 * 2 * sum(max(tiles(size), 1) for size in sizes)


@interpreted
def test_the_next_groups_scales(calls: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """A group's last step, of one block of 32 rows where two fit, has no scale of the next group, which is NaN."""
    rng, sizes = np.random.default_rng(0), [32, 64]
    x, y = (rng.integers(-4, 5, (96, 32)).astype(np.float32) for _ in range(2))
    values = np.exp2(rng.integers(-2, 3, (2, 3, 32))).astype(np.float32)
    want = (x[:32] * values[0, 0]).astype(np.float64).T @ (y[:32] * values[1, 0])
    values[:, 1:] = np.nan
    got = products.transposed_grouped_matmul(
        "triton_gpu",
        jnp.asarray(x, E4M3),
        jnp.asarray(y, E4M3),
        jnp.array(sizes, jnp.int32),
        lhs_scales=Scales(jnp.asarray(values[0]), (32, 1), e8m0=True),
        rhs_scales=Scales(jnp.asarray(values[1]), (32, 1), e8m0=True),
        preferred_element_type=jnp.float32,
        tiling=(32, 64, 32),
        target=Target(interpret=True, device=("NVIDIA B200", 148)),
    )
    np.testing.assert_array_equal(got[0], want)
    assert np.isnan(got[1]).all()
    ((_, static),) = calls
    assert static["A_SCALES"].applied_to == static["B_SCALES"].applied_to == "unit" and static["A"].tile_k == 64


def of_four_bits(
    x: GroupedTensor, groups: oracle.Groups, block: tuple[int, int]
) -> tuple[GroupedTensor, list[np.ndarray]]:
    """`x` in blocks of 16, where no group has anything 6 × NaN; and its groups in float64, by the tables of values."""
    q = ragged.quantize(x, "float4_e2m1fn", Scaling(block, E4M3))
    assert q.scales is not None
    mask = np.broadcast_to(q.mask, q.shape)
    rows = mask[..., :: block[0], :: block[1]]  # no block straddles two groups
    data = jnp.where(mask, q.data.astype(jnp.float32), 6).astype(q.dtype)
    scales = jnp.where(rows, q.scales.astype(jnp.float32), jnp.nan).astype(q.scales.dtype)
    level, of_blocks, values = four_bits.quantized(groups, block)
    wide = [level * scale * each for scale, each in zip(of_blocks, values, strict=True)]
    return eqx.tree_at(lambda q: (q.data, q.scales), q, (data, scales)), wide


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The arrays and the static parameters that the kernel is called with."""
    found = []
    call = triton_call.call
    monkeypatch.setattr(
        triton_call,
        "call",
        lambda *args, **kwargs: found.append((args[0], args[2])) or call(*args, **kwargs),
    )
    return found


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """As `calls`, of kernels that are neither compiled nor run."""
    found = []

    def call(arrays: dict[str, Any], outs: dict[str, Any], static: dict[str, Any], **options: Any) -> list[Array]:
        found.append((arrays, static))
        return [jnp.zeros(out.shape, out.dtype) for out in outs.values() if out is not None]

    monkeypatch.setattr(triton_call, "call", call)
    return found


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_each_number_of_8_bits(dtype: str) -> None:
    """On a GPU that can't convert float8_e4m3fn, the kernel decodes the bits."""
    w = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).view(jnp.float8_e4m3fn)
    one = GroupedTensor(jnp.eye(16, dtype=dtype), jnp.array([16], jnp.int32))
    values = np.asarray(w, np.float32)[0]
    numbers = jnp.asarray(np.where(np.isnan(values), 0, w), w.dtype)
    with gpu.on("NVIDIA A100"):
        got = matmul(one, numbers, preferred_element_type=jnp.float32).data
        lost = matmul(one, jnp.full((1, 16, 16), jnp.nan, w.dtype), preferred_element_type=jnp.float32).data
    np.testing.assert_array_equal(got, np.nan_to_num(values))
    assert np.isnan(lost).all()


@pytest.mark.long
@interpreted
@pytest.mark.parametrize(
    "layout, k, block",
    [
        ("forward", 96, (16, 1)),
        ("batched", 64, (1, 16)),
        ("batched", 288, (16, 1)),
        ("forward_left", 288, (1, 16)),
        ("outer", 151, (1, 16)),
        ("forward", 151, (16, 16)),
    ],
    ids=str,
)
def test_four_bits(layout: str, k: int, block: tuple[int, int], calls: list[Any]) -> None:
    """Blackwell's multiply 4 bits by scales of 16, two numbers a byte, `rhs` either way in memory."""
    case = cases.make(layout, g=3, kind="half_empty", seed=k, uniform=(40, k, 48), capacity=60)
    lhs, case.lhs_groups = of_four_bits(case.lhs, case.lhs_groups, (1, 16))
    if block == (16, 1):
        rhs, case.rhs_groups = of_four_bits(case.rhs, case.rhs_groups, block)
    else:
        rhs, by_column = of_four_bits(case.rhs.mT, [each.T for each in case.rhs_groups], block)
        rhs, case.rhs_groups = rhs.mT, [each.T for each in by_column]
    with gpu.on("NVIDIA B200"):
        tile_k = 64 if k < 256 else 256
        # The result's rows are 128 at a time: columns of a product from the left.
        tiles = (32, tile_k, 128) if layout == "forward_left" else (128, tile_k, 32)
        check(case, matmul(lhs, rhs, tiles=tiles, preferred_element_type=jnp.float32))
    ((arrays, static),) = calls
    assert (static["A_SCALES"].applied_to, static["B_SCALES"].applied_to) == ("unit", "unit")
    assert static["A"].tile_k == tile_k // 2
    assert {arrays[name].dtype.name for name in "ab"} == {"uint8"} and arrays["a"].shape[-1] == -(-k // 2)
    # A block's scale has a byte; what a whole tensor has in common stays apart.
    assert arrays["a_scales"].dtype == jnp.uint32 and arrays["a_tensor"].size == arrays["b_tensor"].size == 1
    assert bool(arrays["a_tiles"]) == (k % 32 == 0)


@pytest.mark.long
@pytest.mark.parametrize("rows", [32, 128])
def test_rows_of_four_bits(rows: int) -> None:
    """A tile of fewer rows than are scaled at once is an error."""
    x, w = rows_of_four_bits(0, 1.0)[0], matrices_of_four_bits(1, 1.0)[0]
    with gpu.on("NVIDIA B200"):
        config = GpuConfig(m=rows, k=64, n=32, warps=4, stages=3)
        plans = ragged.explain(x, w, backend=config).plans
    (runs,) = (plan.runs for plan in plans if plan.platform == "cuda")
    assert ("ValueError: tile_m=32 is too small for 4-bit operands." in runs) == (rows < 128)


def rows_of_four_bits(seed: int, factor: float) -> tuple[GroupedTensor, list[np.ndarray]]:
    """20 and 13 rows of 80, and a tail."""
    sizes = jnp.array([20, 13], jnp.int32)
    data = np.asarray(normal((40, 80), seed) * factor)
    return of_four_bits(GroupedTensor(jnp.asarray(data), sizes), np.split(data[:33], [20]), (1, 16))


def matrices_of_four_bits(seed: int, factor: float) -> tuple[GroupedTensor, list[np.ndarray]]:
    """Two `[80, 32]`."""
    data = np.asarray(normal((2, 32, 80), seed) * factor)
    q, wide = of_four_bits(GroupedTensor(jnp.asarray(data)), [*data], (1, 16))
    return q.mT, [each.T for each in wide]


@pytest.mark.parametrize("dtype", split(["float4_e2m1fn"], ["int4"]))
def test_an_odd_contracted_extent_of_pairs(dtype: str) -> None:
    """The number that fills the last byte of a row has no scale: neither the next row's, which is NaN, nor one beyond
    the array."""
    w = ragged.quantize(normal((3, 32, 3)), dtype, (32, 1))
    w = eqx.tree_at(lambda w: w.scales, w, w.scales.at[1].set(jnp.nan))
    dy = GroupedTensor(normal((16, 3), 1), jnp.array([6, 0, 10], jnp.int32))
    with only("triton_gpu"):
        out = np.asarray(ragged.matmul(dy, w.mT, backend=INTERPRETED["triton_gpu"]).data, np.float64)
    of_w, rows = np.asarray(w.dequantize().data, np.float64), np.asarray(dy.data, np.float64)
    np.testing.assert_allclose(out, np.concatenate([rows[:6] @ of_w[0].T, rows[6:] @ of_w[2].T]), rtol=2e-2, atol=2e-2)


@interpreted
@pytest.mark.long
def test_four_bits_of_a_map(calls: list[Any]) -> None:
    """Each element's tensor has a scale of its own; of the matrices, which aren't mapped, there is one."""
    (w, of_w), rows = matrices_of_four_bits(1, 0.1), [rows_of_four_bits(seed, 10.0**seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(x for x, _ in rows))
    with gpu.on("NVIDIA B200"):
        out = jax.vmap(lambda x: matmul(x, w, preferred_element_type=jnp.float32))(stacked)
    for got, (_, of_x) in zip(np.asarray(out.data), rows, strict=True):
        oracle.assert_close([got[:33]], [np.concatenate([a @ b for a, b in zip(of_x, of_w, strict=True)])], max=3e-6)
        assert not got[33:].any()
    ((arrays, static),) = calls
    assert arrays["a_tensor"].shape[0] == 3 and (
        static["A_SCALES"].tensor_stride,
        static["B_SCALES"].tensor_stride,
    ) == (1, 0)


@interpreted
@pytest.mark.long
def test_four_bits_of_gathered_rows(calls: list[Any]) -> None:
    """A token is quantised once, and its row read for each of its groups."""
    route = ragged.route(jnp.array([[0, 2], [2, 1], [1, 0], [2, -1], [0, 1]], jnp.int32), 3)
    x, w = normal((5, 64)), normal((3, 64, 32), 1)

    def product(x: Array, w: Array) -> Array:
        return ragged.matmul(route.gathered(x), w, recipe="nvfp4", backend=INTERPRETED["triton_gpu"]).data

    with gpu.on("NVIDIA B200"):
        out = np.asarray(jax.jit(product)(x, w))
    data, columns = np.asarray(x), np.asarray(w.mT)
    level, scales, values = four_bits.quantized([data], (1, 16))
    tokens = level * scales[0] * values[0]
    level, scales, values = four_bits.quantized([*columns], (1, 16))
    matrices, rows = [level * s * v for s, v in zip(scales, values, strict=True)], []
    for group, size in enumerate(np.asarray(route.first_dims)):
        for _ in range(size):
            rows.append(tokens[int(route.order[len(rows)]) // 2] @ matrices[group].T)
    oracle.assert_close([out[: len(rows)]], [np.stack(rows)], max=3e-6)
    ((arrays, _),) = calls
    assert arrays["a_source"] is not None and arrays["a"].shape == (5, 32) and arrays["a"].dtype == jnp.uint8


@pytest.mark.long
def test_a_recipe_of_four_bits(calls: list[Any]) -> None:
    """Forward and dgrad multiply by scales of 16; a wgrad, whose blocks are a group's tokens, is XLA's."""
    sizes, rng = [40, 0, 23], np.random.default_rng(0)
    x, w, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((80, 96), (3, 96, 64), (80, 64)))

    def product(x: Array, w: Array) -> Array:
        tensor = GroupedTensor(x, jnp.array(sizes, jnp.int32))
        return ragged.matmul(tensor, w, recipe="nvfp4", backend=INTERPRETED["triton_gpu"]).data

    tail = (np.arange(80) >= 63)[:, None]
    with gpu.on("NVIDIA B200"), only("triton_gpu", "xla"):
        out, pull = jax.vjp(jax.jit(product), jnp.where(tail, jnp.nan, x), jnp.asarray(w))
        dx, _ = pull(jnp.asarray(dy))

    def wide(groups: list[np.ndarray]) -> list[np.ndarray]:
        level, scales, values = four_bits.quantized(groups, (1, 16))
        return [level * scale * each for scale, each in zip(scales, values, strict=True)]

    rows, ct = ([each[:40], each[40:40], each[40:63]] for each in (x, dy))
    forward = [a @ b.T for a, b in zip(wide(rows), wide([*w.swapaxes(1, 2)]), strict=True)]
    dgrad = [a @ b.T for a, b in zip(wide(ct), wide([*w]), strict=True)]
    for got, want in ((out, forward), (dx, dgrad)):
        oracle.assert_close([np.asarray(got[:63])], [np.concatenate(want)], max=3e-6)
        assert not np.asarray(got[63:]).any()
    assert [static["A_SCALES"].applied_to for _, static in calls] == ["unit", "unit"]


@interpreted
@pytest.mark.long
def test_a_recipe_by_tensor_cores(calls: list[Any]) -> None:
    """Of `"mxfp8"`, all three multiply by scales of 32; a wgrad's are of tokens, from each group's first on."""
    sizes, rng = [40, 0, 23], np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((80, 96), (3, 96, 64), (80, 64)))
    dims, tail = jnp.array(sizes, jnp.int32), (np.arange(80) >= 63)[:, None]

    def product(x: Array, w: Array) -> Array:
        return ragged.matmul(
            GroupedTensor(x, dims), w, recipe="mxfp8", backend=everywhere("triton_gpu", 32, 32, 32)
        ).data

    with gpu.on("NVIDIA B200"):
        out, pull = jax.vjp(jax.jit(product), jnp.where(tail, jnp.nan, x), w)
        dx, dw = pull(dy)

    def wide(x: Array | GroupedTensor, scaling: Any = "mx") -> list[np.ndarray]:
        q = ragged.quantize(x, "float8_e4m3fn", scaling)
        return [np.asarray(group, np.float64) for group in q.dequantize().to_list()]

    of_x, of_dy = GroupedTensor(x, dims), GroupedTensor(dy, dims)
    by_token = Scaling((32, 1), "float8_e8m0fnu")
    forward = [a @ b.T for a, b in zip(wide(of_x), wide(w.mT), strict=True)]
    dgrad = [a @ b.T for a, b in zip(wide(of_dy), wide(w), strict=True)]
    wgrad = [a.T @ b for a, b in zip(wide(of_x, by_token), wide(of_dy, by_token), strict=True)]
    for got, want in ((out, np.concatenate(forward)), (dx, np.concatenate(dgrad))):
        oracle.assert_close([np.asarray(got[:63])], [want], max=3e-6)
        assert not np.asarray(got[63:]).any()
    oracle.assert_close(list(np.asarray(dw)), wgrad, max=3e-6)
    assert [static["A_SCALES"].applied_to for _, static in calls] == ["unit"] * 3


@pytest.mark.parametrize(
    "chip, lhs, rhs, ways",
    [
        ("NVIDIA B200", (E4M3, "mx"), ("float8_e5m2", "mx"), ("unit", "unit")),
        ("NVIDIA B300", (E4M3, "mx"), (E4M3, "mx"), ("unit", "unit")),
        ("NVIDIA H200", (E4M3, "mx"), (E4M3, "mx"), ("step", "step")),
        ("NVIDIA GeForce RTX 5090 12.0", (E4M3, "mx"), (E4M3, "mx"), ("step", "step")),
        ("NVIDIA B200", (E4M3, "mx"), (E4M3, (1, 32)), ("step", "step")),  # powers of two too, but nothing says so
        ("NVIDIA B200", (E4M3, Scaling((1, 64), "float8_e8m0fnu")), (E4M3, "mx"), ("step", "step")),
        ("NVIDIA B200", ("int8", "mx"), ("int8", "mx"), ("step", "step")),
        ("NVIDIA B200", (E4M3, "mx"), (E4M3, "row"), ("step", "total")),
        ("NVIDIA B200", (E4M3, "mx"), None, ("step", "")),
    ],
)
def test_which_scales_tensor_cores_take(
    chip: str, lhs: tuple[str, Any], rhs: Any, ways: tuple[str, str], planned: list[Any]
) -> None:
    """Both operands' or neither's; blocks of 32 of fp8, whose scales are of the type that holds powers of two."""

    def product(x: Array, w: Array, sizes: Array) -> Array:
        a = ragged.quantize(GroupedTensor(x, sizes), *lhs, power_of_two=True)
        b = ragged.quantize(w, *rhs, power_of_two=True).mT if rhs else GroupedTensor(w).mT
        return ragged.matmul(a, b).data

    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 160), (4, 64, 160))]
    with gpu.on(chip):
        jax.jit(product).trace(*avals, jax.ShapeDtypeStruct((4,), jnp.int32)).lower(lowering_platforms=("cuda",))
    ((arrays, static),) = planned
    assert (static["A_SCALES"].applied_to, static["B_SCALES"].applied_to) == ways
    if "unit" in ways:  # 160 are 5 blocks, of which four go in one number
        found = [(x.dtype.name, x.shape) for x in (arrays["a_scales"], arrays["b_scales"])]
        assert found == [("uint32", (256, 2)), ("uint32", (4, 64, 2))]


def test_the_longest_sum_of_fp8(planned: list[Any]) -> None:
    """Tensor cores add up 128 products in their few bits, and no more where a step has more."""

    def products(x: Array, w: Array, sizes: Array) -> list[Array]:
        options: dict[str, Any] = {"preferred_element_type": jnp.float32}
        both = [ragged.grouped_matmul(x, w, sizes, tiling=(64, k, 64), **options) for k in (128, 256)]
        wide = ragged.grouped_matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), sizes, tiling=(64, 256, 64))
        return [*both, wide]

    avals = [jax.ShapeDtypeStruct(shape, E4M3) for shape in ((256, 512), (4, 512, 64))]
    with gpu.on("NVIDIA H200"):
        jax.jit(products).trace(*avals, jax.ShapeDtypeStruct((4,), jnp.int32)).lower(lowering_platforms=("cuda",))
    found = [(static["A"].tile_k, static["DOT"].longest_sum) for _, static in planned]
    assert found == [(128, None), (256, 128), (256, None)]


def lowered(chip: str, *, backend: str | None = None, dtype: str = "bfloat16", groups: int = 4, **options: Any) -> str:
    """What a forward is lowered to for a chip."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in ((64, 32), (groups, 32, 16))]
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def forward(x: Array, w: Array, sizes: Array) -> Array:
        return ragged.grouped_matmul(x, w, sizes, backend=backend, **options)

    with gpu.on(chip):
        return jax.jit(forward).trace(*avals, sizes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "chip, options, is_kernel",
    [
        ("NVIDIA H200", {}, True),
        ("NVIDIA A100", {}, True),
        ("NVIDIA L4", {}, True),
        ("NVIDIA A100", {"dtype": "float8_e4m3fn"}, True),
        ("NVIDIA L4", {"dtype": "float8_e4m3fn"}, True),
        ("NVIDIA H200", {"dtype": "int16"}, False),
        ("NVIDIA H200", {"precision": "BF16_BF16_F32_X6"}, False),
        ("NVIDIA H200", {"precision": FAST_FP8, "dtype": "float8_e4m3fn"}, True),
        ("NVIDIA L4", {"precision": FAST_FP8, "dtype": "float8_e5m2"}, True),
        ("NVIDIA A100", {"precision": FAST_FP8, "dtype": "float8_e5m2"}, True),
        ("NVIDIA H200", {"groups": 5000}, False),
        ("Tesla T4 7.5", {}, False),
        ("NVIDIA Something 12.0", {}, True),
        ("NVIDIA Something", {}, True),
    ],
)
def test_what_has_no_kernel_runs_in_xla(chip: str, options: dict[str, Any], is_kernel: bool) -> None:
    """Never a traceback from inside Triton."""
    assert ("triton_kernel_call" in lowered(chip, **options)) == is_kernel


def test_the_precision_of_fp8_is_of_no_other_dtype() -> None:
    with pytest.raises(ValueError, match="requires both inputs to have float8 dtypes"):
        lowered("NVIDIA H200", precision=FAST_FP8)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA runs in its place, and who asks for it is told what to install."""
    sentence = "`ragged`'s Triton kernels need jax-triton: `pip install 'jax-ragged[cuda]'`."
    monkeypatch.setattr(triton_call, "missing", lambda: sentence)
    assert "triton_kernel_call" not in lowered("NVIDIA H200")
    x = GroupedTensor(jnp.ones((4, 2)), jnp.array([1, 3], jnp.int32))
    assert f"on cuda: grouped_matmul of xla ({sentence})" in str(ragged.explain(x, jnp.ones((2, 2, 3))))
    monkeypatch.setattr(lowering, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="backend 'triton_gpu' is not available here") as error:
        ragged.matmul(x, jnp.ones((2, 2, 3)), backend="triton_gpu")
    assert "Not available: 'triton_gpu' (Triton is not installed: `pip install 'jax-ragged[cuda]'`)." in str(
        error.value
    )


def test_exports_take_the_kernel_only_if_asked() -> None:
    """By default an export for a GPU holds XLA's product, which every reader of it accepts."""
    x, w, sizes = jnp.ones((8, 16)), jnp.ones((2, 16, 16)), jnp.array([3, 4], jnp.int32)

    def export(backend: str | None, **options: Any) -> str:
        forward = jax.jit(lambda x, w, sizes: ragged.grouped_matmul(x, w, sizes, backend=backend))
        return jax.export.export(forward, platforms=["cuda"], **options)(x, w, sizes).mlir_module()

    assert "triton_kernel_call" not in export(None)
    check = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")
    assert "triton_kernel_call" in export("triton_gpu", disabled_checks=[check])


@pytest.mark.parametrize("precision, way", [(None, "tf32"), ("high", "tf32x3"), (jax.lax.Precision.HIGHEST, "ieee")])
def test_precision(precision: Any, way: str, planned: list[Any]) -> None:
    """A float32 dot is what XLA's would be."""
    lowered("NVIDIA H200", dtype="float32", precision=precision)
    assert [static["DOT"].precision for _, static in planned] == [way]
