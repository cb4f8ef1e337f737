"""The backend in plain XLA: how it covers groups by tiles, and how few of them it compiles."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor, Scaling
from ragged.backends.xla import backend
from tests.cases import thinned


@pytest.fixture(autouse=True)
def in_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are multiplied as large ones."""
    monkeypatch.setattr(backend, "_SMALL", 0)


def forward(lhs: Array, rhs: Array, sizes: Array) -> Array:
    return ragged.grouped_matmul(lhs, rhs, sizes, backend="xla")


def wgrad(lhs: Array, rhs: Array, sizes: Array) -> Array:
    return ragged.transposed_grouped_matmul(lhs.T, rhs, sizes, backend="xla")


def dots(fn: Any, *shapes: tuple[int, ...], groups: int, dtype: Any = jnp.float32) -> list[str]:
    """The lines of the program, before XLA optimises it, that multiply."""
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    text = jax.jit(fn).lower(*args, jax.ShapeDtypeStruct((groups,), jnp.int32)).as_text()
    return re.findall(r".* stablehlo\.dot_general .*", text)


def test_only_small_groups_are_batched() -> None:
    """One dot for the first rows of all groups where the mean is at most 16 rows, or 64 of a wgrad: as many rows as the
    mean, and 8 at least, or 16 of a wgrad."""
    d, hidden = 32, 64
    for groups, first, rows in ((16, 8, 16), (8, 8, 16), (4, 16, 16), (2, 0, 32), (1, 0, 64)):
        batched = [x for x in dots(forward, (64, d), (groups, d, hidden), groups=groups) if "batching" in x]
        assert [f"tensor<{groups}x{first}x{d}xf32>" in x for x in batched] == [True] * (groups >= 4)
        (batched,) = [x for x in dots(wgrad, (64, d), (64, hidden), groups=groups) if "batching" in x]
        assert f"tensor<{groups}x{d}x{rows}xf32>" in batched
    assert not any("batching" in x for x in dots(wgrad, (130, d), (130, hidden), groups=2))


def test_small_products_have_few_heights() -> None:
    """Each height takes time to compile: a small product has 3, a large one 5. In a wgrad, each stands twice: in a
    group's first tile, and in a further tile, which is added. XLA compiles both once."""
    small = (1024, 256), (8, 256, 512), (1024, 512)
    assert len(dots(forward, *small[:2], groups=8)) == 3
    assert len(dots(wgrad, small[0], small[2], groups=8)) == 6
    # Few rows times matrices of 8 bits: a dot of four rows takes half the time of one of 16.
    assert len(dots(forward, (64, 256), (8, 256, 512), groups=8, dtype=jnp.float8_e4m3fn)) == 3  # a fourth has 64 rows
    assert len(dots(forward, (65, 256), (8, 256, 512), groups=8, dtype=jnp.float8_e4m3fn)) == 2
    large = (4096, 1024), (16, 1024, 1024)
    assert len(dots(forward, *large, groups=16)) == 5
    assert len(dots(wgrad, large[0], large[0], groups=16)) == 10


def tile_reads(fn: Any, *shapes: tuple[int, ...]) -> set[str]:
    """The compiled fusions that read a tile of rows from a float32 buffer, without their names."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = str(jax.jit(fn).lower(*args, jax.ShapeDtypeStruct((4,), jnp.int32)).compile().as_text())
    bodies = re.findall(r"^%fused_computation\S* \(\S+: f32.*?\n\}", text, re.DOTALL | re.MULTILINE)
    bodies = [body for body in bodies if "dynamic-slice(" in body and "dynamic-update-slice(" not in body]
    return {re.sub(r"%[\w.-]+|\S+: |, metadata=\{.*?\}", "", body) for body in bodies}


def test_products_share_compiled_reads() -> None:
    """A wgrad reads tiles of a buffer as the forward product does: XLA compiles equal fusions once."""
    x, w, dy = (1024, 64), (4, 64, 32), (1024, 32)
    of_forward, of_wgrad = tile_reads(forward, x, w), tile_reads(wgrad, x, dy)
    shared = [read for read in of_forward & of_wgrad if "f32[1024,64]" in read]
    assert len(shared) == 3 == sum("f32[1024,64]" in read for read in of_forward)


def test_small_products_have_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dot of all rows, which takes as long, and less to compile; where the call asks for tiles, these."""
    monkeypatch.undo()
    shapes = (64, 32), (4, 32, 16)
    assert len(dots(forward, *shapes, groups=4)) == len(dots(wgrad, (64, 32), (64, 16), groups=4)) == 1
    text = jax.jit(forward).lower(*(jnp.ones(shape) for shape in shapes), jnp.full(4, 9)).as_text()
    assert "stablehlo.while" not in text and "stablehlo.case" not in text
    with ragged.tuning.using(ragged.tuning.XlaConfig(m=(8, 16))):
        assert len(dots(forward, *shapes, groups=4)) == 2
    # Few rows of large matrices are multiplied by those that have some.
    assert len(dots(forward, (16, 1024), (64, 1024, 1024), groups=64)) == 2


def test_constant_sizes_keep_the_loop() -> None:
    """XLA unrolls no loop over groups where the sizes, of one group, are constants of the program."""
    lhs, rhs, sizes = jnp.ones((7, 16)), jnp.ones((1, 16, 24)), jnp.array([7], jnp.int32)
    given = jax.jit(forward).lower(lhs, rhs, sizes)
    constant = jax.jit(lambda lhs, rhs: forward(lhs, rhs, sizes)).lower(lhs, rhs)
    loops = [str(program.compile().as_text()).count(" while(") for program in (given, constant)]
    assert loops[0] == loops[1] > 0


@pytest.mark.parametrize("heights", [(16, 64, 256), (16, 32, 48, 64, 96, 128, 256, 512), (7,)])
def test_tiles_cover_a_group(heights: tuple[int, ...]) -> None:
    """The chosen tiles hold all rows, at no more than what any other choice of tiles costs."""
    first = backend._cover(heights)
    least = np.zeros(heights[-1] + 1)  # by exhaustion, from few rows to many
    for rows in range(1, heights[-1] + 1):
        least[rows] = min(tile + backend._OVERHEAD + least[max(rows - tile, 0)] for tile in heights)
        rest, cost = rows, 0
        while rest > 0:
            tile = heights[first[rest]]
            rest, cost = rest - tile, cost + tile + backend._OVERHEAD
        assert cost == least[rows]


def test_mean_tile() -> None:
    """A tile of two or three ragged letters is the mean group where that is a power of two, else the next one."""
    assert [backend._mean_tile(rows, 4) for rows in (8, 64, 68, 128, 132, 256, 4096)] == [16, 16, 32, 32, 64, 64, 256]


NARROW = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int8", "int4", "uint8", "uint4")


@pytest.mark.parametrize("dtype", NARROW)
def test_every_number_is_decoded(dtype: str) -> None:
    """A matrix with all numbers of a dtype, times one: NaN and infinities too."""
    numbers = every(dtype)
    one = GroupedTensor(jnp.ones((1, 1), jnp.bfloat16), jnp.array([1]))
    got = ragged.matmul(one, jnp.asarray(numbers)[None, None], preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(got.data[0], numbers.astype(np.float32))


def every(dtype: str) -> np.ndarray:
    if jax.dtypes.itemsize_bits(jnp.dtype(dtype)) == 8:
        return np.arange(256, dtype=np.uint8).view(dtype)
    if dtype == "float4_e2m1fn":
        halves = np.array([0, 1, 2, 3, 4, 6, 8, 12]) / 2
        return np.concatenate([halves, -halves]).astype(dtype)
    return np.arange(16).astype(dtype) if dtype == "uint4" else np.arange(-8, 8).astype(dtype)


def test_every_power_of_two_is_decoded() -> None:
    """Scales in float8_e8m0fnu. XLA's CPU backend takes the smallest, which is subnormal in float32, as 0."""
    scales = np.arange(256, dtype=np.uint8).view(jnp.float8_e8m0fnu)
    ones = GroupedTensor(
        jnp.ones((1, 1, 256), jnp.int8), scales=scales[None, None], scaling=Scaling((1, 1), scales.dtype)
    )
    one = GroupedTensor(jnp.ones((1, 1)), jnp.array([1]))
    got = np.asarray(ragged.matmul(one, ones).data[0])
    assert got[0] in (0, 2.0**-127)
    np.testing.assert_array_equal(got[1:], scales.astype(np.float32)[1:])


@pytest.mark.parametrize("dtype, scaling", thinned(2, NARROW, [None, (1, 32), "row"]))
def test_matrices_are_decoded_in_parts(dtype: str, scaling: Any) -> None:
    """No buffer holds all matrices in another dtype, nor one matrix in float32."""
    g, k, n = 6, 640, 4 * 768
    w = jax.ShapeDtypeStruct((g, n, k), jnp.dtype(dtype))
    if scaling is None:
        w = GroupedTensor(w)
    else:
        symmetric = not dtype.startswith("uint")
        w = jax.eval_shape(
            lambda w: ragged.quantize(w, dtype, scaling, symmetric=symmetric), w.update(dtype=jnp.float32)
        )
    x = GroupedTensor(jax.ShapeDtypeStruct((64, k), jnp.bfloat16), jax.ShapeDtypeStruct((g,), jnp.int32))
    program = jax.jit(lambda x, w: ragged.matmul(x, w.mT).data).lower(x, w).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * k * n


@pytest.mark.parametrize(
    "dtype, zero, scaling, scale",
    [
        ("uint8", np.int8(-127), Scaling.of("column"), np.float32(1)),  # the difference has nine bits
        ("int4", np.int8(100), Scaling((1, 1), "float8_e4m3fn"), jnp.float8_e4m3fn(1.875)),  # eight, and four
    ],
)
def test_zero_points_with_more_bits(dtype: str, zero: Any, scaling: Scaling, scale: Any) -> None:
    """Values with more bits than bfloat16 has are exact, too."""
    numbers = every(dtype)
    w = GroupedTensor(
        jnp.asarray(numbers)[None, None],
        scales=jnp.full((1, 1, numbers.size), scale),
        scaling=scaling,
        zero_points=jnp.full((1, 1, numbers.size), zero),
        tensor_scale=jnp.ones(()) if scaling.has_tensor_scale else None,
    )
    one = GroupedTensor(jnp.ones((1, 1), jnp.bfloat16), jnp.array([1]))
    got = ragged.matmul(one, w, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(got.data[0], (numbers.astype(np.float32) - float(zero)) * float(scale))


@pytest.mark.parametrize("dtype", [name for name in NARROW if not name.startswith("uint")])
def test_a_number_times_its_scale_is_exact(dtype: str) -> None:
    """Beside bfloat16, which has too few bits for the products of int8."""
    rng = np.random.default_rng(0)
    numbers = every(dtype)
    scales = rng.integers(9, 16, numbers.size).astype("float8_e4m3fn")  # of four bits
    data, of_data = (jnp.asarray(array)[None, None] for array in (numbers, scales))
    w = GroupedTensor(data, scales=of_data, scaling=Scaling((1, 1), scales.dtype), tensor_scale=jnp.ones(()))
    one = GroupedTensor(jnp.ones((1, 1), jnp.bfloat16), jnp.array([1]))
    got = ragged.matmul(one, w, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(got.data[0], numbers.astype(np.float32) * scales.astype(np.float32))


@pytest.mark.parametrize("k", [128, 72])
@pytest.mark.parametrize("dtype, zero", [("float4_e2m1fn", None), ("float8_e4m3fn", None), ("int4", 3), ("int4", None)])
def test_scales_of_blocks_along_rows(dtype: str, zero: int | None, k: int) -> None:
    """Of a matrix that is stored transposed. Its rows may end within a block. All sums are exact."""
    rng, n, g, rows, block = np.random.default_rng(0), 5, 2, 6, 32
    scaling = Scaling((1, block), "float8_e8m0fnu" if dtype == "float4_e2m1fn" else "float32")
    numbers = rng.integers(-4, 5, (g, n, k)).astype(dtype)
    scales = 2.0 ** rng.integers(-2, 3, (g, n, -(-k // block)))
    zeros = rng.integers(-zero, zero + 1, scales.shape) if zero else np.zeros_like(scales)
    w = GroupedTensor(
        jnp.asarray(numbers),
        scales=jnp.asarray(scales, scaling.dtype),
        scaling=scaling,
        zero_points=jnp.asarray(zeros, jnp.int8) if zero else None,
    )
    x = rng.integers(-3, 4, (rows, k))
    run = jax.jit(lambda x, w: ragged.matmul(x, w.mT, preferred_element_type=jnp.float32).data)
    got = run(GroupedTensor(jnp.asarray(x, jnp.bfloat16), jnp.array([2, 4])), w)
    scaled = (numbers.astype(np.float64) - zeros.repeat(block, 2)[..., :k]) * scales.repeat(block, 2)[..., :k]
    np.testing.assert_array_equal(got, [x[row] @ scaled[int(row >= 2)].T for row in range(rows)])


@pytest.mark.parametrize(
    "dtype, of_uniform, of_ragged",
    [("float32", ["1"], ["0"]), ("bfloat16", ["2"], ["0"]), ("float8_e4m3fn", ["2"], ["0"]), ("int8", ["2"], ["1"])],
)
def test_contracted_rows(dtype: str, of_uniform: list[str], of_ragged: list[str]) -> None:
    """Of the first operand of a dot: a fast dot contracts its last axis, so narrow operands are transposed first."""

    def contracted(lhs: GroupedTensor, rhs: GroupedTensor) -> list[str]:
        text = jax.jit(lambda x, y: ragged.matmul(x.mT, y).data).lower(lhs, rhs).as_text()
        return re.findall(r"contracting_dims = \[(\d)\] x \[\d\]", text)

    uniform = GroupedTensor(jnp.zeros((3, 40, 8), dtype))
    rows = GroupedTensor(jnp.zeros((40, 8), dtype), jnp.array([9, 20, 2]), jnp.array([3, 8, 1]))
    assert contracted(uniform, uniform) == of_uniform
    assert contracted(rows, GroupedTensor(rows.data, rows.first_dims)) == of_ragged


@pytest.mark.parametrize("dtype, of, old", [("int8", "int64", 2**40), ("float32", "float64", 1 + 2.0**-40)])
def test_old_values_of_64_bits(dtype: str, of: str, old: Any) -> None:
    """The sum has all their bits."""
    with jax.enable_x64(True):
        x = GroupedTensor(jnp.ones((6, 4), dtype), jnp.array([2, 4], jnp.int32))
        existing = jnp.full((6, 3), old, of)
        out = ragged.matmul(x, jnp.ones((2, 4, 3), dtype), preferred_element_type=of, existing_out=existing).data
        assert out.dtype == of and (np.asarray(out) == old + 4).all()
