"""`quantize` and `dequantize`, against NumPy: every dtype, scaling and kind of tensor."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from jaxtyping import Float8e4m3fn, Int4, TypeCheckError, jaxtyped

from ragged import Float8e8m0fnu, GroupedTensor, Scaling, quantize
from ragged.tensor.base import with_fields
from tests import cases, oracle

DTYPES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int8", "int4")
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0, "int8": 127.0, "int4": 7.0}
SCALINGS = ("tensor", "group", "row", "column", (1, 4), (None, 3), "mx")
KINDS = {  # ragged first, ragged last, seen through `mT`
    "uniform": (False, False, False),
    "uniform mT": (False, False, True),
    "rows": (True, False, False),
    "columns": (False, True, False),
    "both": (True, True, False),
    "both mT": (True, True, True),
}


def make(kind: str, dtype: str = "float32", fill: float = np.nan) -> tuple[oracle.Groups, GroupedTensor]:
    """Five groups, one of them empty along its ragged dims, of very different magnitudes; `fill` in the tail."""
    first, last, flipped = KINDS[kind]
    rng = np.random.default_rng(0)
    firsts = [5, 0, 9, 1, 3] if first else [6] * 5
    lasts = [7, 4, 0, 2, 11] if last else [40] * 5
    groups = [
        (rng.standard_normal((m, n)) * 10.0 ** rng.integers(-4, 4, (m, 1))).astype(jnp.dtype(dtype))
        for m, n in zip(firsts, lasts, strict=True)
    ]
    widest = 13
    x = cases.tensor(groups, (first, last), 30, widest, packed_last=flipped and first, fill=fill)
    if flipped and not first:
        x = GroupedTensor(jnp.asarray(np.stack(groups)).mT.copy()).mT
    return groups, x


def unpack(kind: str, x: GroupedTensor, groups: oracle.Groups) -> oracle.Groups:
    first, last, flipped = KINDS[kind]
    data = np.asarray(x.data)
    if flipped and first:  # packed along its columns
        ends = np.cumsum([g.shape[1] for g in groups])
        return [data[: g.shape[0], end - g.shape[1] : end] for g, end in zip(groups, ends, strict=True)]
    return oracle.unpack(data, (first, last), [g.shape[0] for g in groups], [g.shape[1] for g in groups])


def expected_scales(groups: oracle.Groups, scaling: Any, dtype: str, power_of_two: bool) -> oracle.Groups:
    """Each element's scale, from its own block's amax, one block after another."""
    block = {"tensor": None, "group": (None, None), "row": (1, None), "column": (None, 1), "mx": (1, 32)}.get(
        scaling, scaling
    )
    scales = []
    everything = max(np.max(np.abs(g.astype(np.float64)), initial=0) for g in groups)
    for group in groups:
        wide, out = np.abs(group.astype(np.float64)), np.ones(group.shape)
        rows, columns = (n if b is None else b for n, b in zip(group.shape, block or (None, None), strict=True))
        for i, j in itertools.product(range(0, group.shape[0], rows or 1), range(0, group.shape[1], columns or 1)):
            own = np.s_[i : i + rows, j : j + columns]
            amax = everything if block is None else np.max(wide[own], initial=0)
            scale = amax / LARGEST[dtype]
            out[own] = 1 if amax == 0 else 2 ** np.ceil(np.log2(scale)) if power_of_two else scale
        scales.append(out)
    return scales


def half_a_unit(value: np.ndarray, dtype: str) -> np.ndarray:
    """Half the distance between `dtype`'s neighbours of each value."""
    if dtype.startswith("int"):
        return np.full(value.shape, 0.5)
    mantissa, smallest = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14), "float4_e2m1fn": (1, 0)}[dtype]
    exponent = np.floor(np.log2(np.maximum(np.abs(value), 2.0**smallest)))
    return 2.0 ** (exponent - mantissa - 1)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_half_a_unit_in_the_last_place(kind: str, dtype: str) -> None:
    """Every scaling: the scale is its block's, no block straddles two groups, NaN tails don't count."""
    for scaling, power_of_two in itertools.product(SCALINGS, (False, True)):
        groups, x = make(kind, fill=1e30 if power_of_two else np.nan)
        mx = scaling == "mx"
        q = quantize(x, dtype, scaling, power_of_two=power_of_two)
        assert q.dtype == jnp.dtype(dtype) and q.logical_dtype == jnp.float32
        assert q.scales.dtype == (jnp.float8_e8m0fnu if mx else jnp.float32)
        scales = expected_scales(groups, scaling, dtype, power_of_two or mx)
        assert_values(kind, q, groups, scales, dtype)
        for zero in (q.dequantize().data, q.data.astype(jnp.float32)):
            tail = np.asarray(zero)[~np.asarray(x.mask)]
            assert np.array_equal(tail, np.zeros_like(tail))


def assert_values(kind: str, q: GroupedTensor, groups: oracle.Groups, scales: oracle.Groups, dtype: str) -> None:
    for got, stored, group, scale in zip(
        unpack(kind, q.dequantize(), groups), unpack(kind, q, groups), groups, scales, strict=True
    ):
        value = group.astype(np.float64) / scale
        assert np.max(np.abs(value), initial=0) <= LARGEST[dtype] * (1 + 1e-6)
        limit = half_a_unit(value, dtype) * scale * (1 + 1e-5)
        assert np.all(np.abs(got - group.astype(np.float64)) <= limit)
        # Bit for bit, but where a value lies on the edge between two, up to float32's rounding.
        rounded = np.round(value) if dtype.startswith("int") else value.astype(np.float32).astype(jnp.dtype(dtype))
        assert np.mean(stored.astype(np.float64) != rounded.astype(np.float64)) <= 0.02 if value.size else True


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_operands(dtype: str) -> None:
    groups, x = make("rows", dtype)
    q = quantize(x, "float8_e4m3fn", "row")
    scales = expected_scales(groups, "row", "float8_e4m3fn", False)
    assert_values("rows", q, groups, scales, "float8_e4m3fn")


SHAPES = [
    ("rows", "tensor", ()),
    ("rows", "group", (5,)),
    ("rows", "row", (30, 1)),
    ("rows", "column", (5, 40)),
    ("rows", (1, 16), (30, 3)),
    ("rows", "mx", (30, 2)),
    ("rows", (None, 16), (5, 3)),
    ("uniform", "tensor", ()),
    ("uniform", "group", (5,)),
    ("uniform", "row", (5, 6, 1)),
    ("uniform", "column", (5, 1, 40)),
    ("uniform", (4, 16), (5, 2, 3)),
    ("uniform", "mx", (5, 6, 2)),
    ("columns", "row", (40, 5)),
    ("columns", "column", (1, 30)),
    ("columns", (16, 1), (3, 30)),
    ("both", "column", (5, 13)),
    ("both", (1, 4), (30, 4)),
    ("both mT", "row", (13, 5)),
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind, scaling, shape", SHAPES, ids=str)
def test_shapes_of_scales_and_mT(kind: str, scaling: Any, shape: tuple[int, ...]) -> None:
    """The table of `Scaling`; `mT` moves scales along, and twice is nothing."""
    _, x = make(kind)
    if kind == "columns":
        x = GroupedTensor(jnp.ones((40, 30)), last_dims=x.last_dims)
    q = quantize(x, jnp.float8_e4m3fn, scaling)
    assert q.scales.shape == shape
    turned = q.mT
    assert turned.scaling == q.scaling.mT
    np.testing.assert_array_equal(turned.dequantize().data, q.dequantize().data.mT)
    GroupedTensor(turned.data, turned.first_dims, turned.last_dims, turned.scales, turned.scaling,
                  transposed=turned.transposed)  # fmt: skip
    assert eqx.tree_equal(turned.mT, q)
    other = quantize(x.mT, jnp.float8_e4m3fn, Scaling.of(scaling).mT)
    assert eqx.tree_equal(other, turned)


def test_a_block_of_zeros_has_scale_one() -> None:
    x = GroupedTensor(jnp.zeros((8, 64)).at[0].set(3.0), jnp.array([2, 0, 4], jnp.int32))
    for scaling in SCALINGS:
        q = quantize(x, jnp.float8_e4m3fn, scaling)
        scales = np.asarray(q.scales.astype(jnp.float32))
        if q.scales.ndim:
            assert np.array_equal(scales[1:], np.ones_like(scales[1:]))
        np.testing.assert_array_equal(np.asarray(q.dequantize().data)[1:], np.zeros((7, 64)))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_representable_values_are_exact(dtype: str, scaling: Any) -> None:
    """What is in the dtype already, times a scale a block, comes back bit for bit."""
    rng = np.random.default_rng(0)
    data = rng.uniform(-LARGEST[dtype], LARGEST[dtype], (4, 6, 64))
    data = np.round(data) if dtype.startswith("int") else data
    data = jnp.asarray(data).astype(jnp.float32).astype(dtype).astype(jnp.float32)
    data = data.at[:, :, ::3].set(LARGEST[dtype]).at[:, ::3, :].set(-LARGEST[dtype])  # each block has the largest
    q = quantize(data * 0.25, dtype, scaling)
    np.testing.assert_array_equal(q.data.astype(jnp.float32), data)
    np.testing.assert_array_equal(q.dequantize().data, data * 0.25)
    again = quantize(q.dequantize(), dtype, scaling)
    assert eqx.tree_equal(again, q)


def test_power_of_two_scales_never_saturate() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 50, 64)) * jnp.exp2(jnp.arange(50.0) - 25)[None, :, None]
    q = quantize(x, jnp.float8_e4m3fn, "row", power_of_two=True)
    mantissa, _ = np.frexp(np.asarray(q.scales))
    assert np.all(mantissa == 0.5)
    ratio = np.max(np.abs(x), axis=-1) / np.asarray(q.scales)[..., 0]
    assert np.all((ratio <= 448) & (ratio > 224))
    exact = quantize(jnp.full((1, 1, 4), 448.0 * 2**-7), jnp.float8_e4m3fn, "row", power_of_two=True)
    assert exact.scales.item() == 2**-7


def test_tiny_and_huge_values() -> None:
    for value in (1e-45, 1e-38, 1e-37, 1e-36, 1e-30, 1e38):
        for name, scaling in itertools.product(DTYPES, ("row", "mx")):
            q = quantize(jnp.full((1, 1, 4), value, jnp.float32), name, scaling)
            back = np.asarray(q.dequantize().data)
            assert np.all(np.isfinite(back))
            if value >= 1e-30:
                # Half a unit at the least value of a binade that the largest is mapped to.
                np.testing.assert_allclose(back, value, rtol=0.2 if name == "float4_e2m1fn" else 0.08)


@pytest.mark.long
def test_no_groups_and_no_elements() -> None:
    for scaling in SCALINGS:
        for x in (
            GroupedTensor(jnp.ones((4, 3)), jnp.zeros((0,), jnp.int32)),
            GroupedTensor(jnp.ones((0, 3)), jnp.zeros((2,), jnp.int32)),
            GroupedTensor(jnp.ones((2, 0, 3))),
        ):
            q = quantize(x, jnp.float8_e4m3fn, scaling)
            np.testing.assert_array_equal(q.dequantize().data, jnp.zeros(x.shape))


def test_float64_beyond_float32() -> None:
    """The element saturates; the others keep their place."""
    with jax.enable_x64(True):
        x = jnp.ones((2, 3, 4), jnp.float64).at[0, 0, 0].set(1e300)
        back = np.asarray(quantize(x, jnp.float8_e4m3fn, "row").dequantize().data)
    assert back[0, 0, 0] > 3e38
    np.testing.assert_array_equal(back[:, 1:], np.ones((2, 2, 4)))
    np.testing.assert_array_equal(back[1], np.ones((3, 4)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(bad: float) -> None:
    """NaN and infinity stay where they are in floats of 8 bits. Else they mark what shares their scale, which is
    never another group but with one scale for all."""
    x = jnp.ones((2, 3, 4)).at[0, 0, 0].set(bad)
    for scaling in ("tensor", "group", "row"):
        q = np.asarray(quantize(x, jnp.float8_e4m3fn, scaling).dequantize().data)
        assert np.isnan(q[0, 0, 0]) and np.isfinite(q).sum() == q.size - 1
        q = np.asarray(quantize(x, jnp.float8_e5m2, scaling).dequantize().data)
        np.testing.assert_array_equal(q[0, 0, 0], bad)
        assert np.isfinite(q).sum() == q.size - 1
        for dtype in (jnp.int8, jnp.float4_e2m1fn):
            q = np.asarray(quantize(x, dtype, scaling).dequantize().data)
            lost = {"tensor": 24, "group": 12, "row": 4}[scaling]
            assert np.isnan(q).sum() == lost and np.isnan(q[0, 0]).all()


def test_no_recipe_gives_the_plain_tensor_back() -> None:
    _, x = make("rows")
    assert quantize(x, None, None) is x and quantize(x, jnp.int8, None) is x
    assert x.dequantize() is x and x.logical_dtype == x.dtype
    array = jnp.ones((2, 3, 4))
    assert quantize(array, None, None).data is array


@pytest.mark.long
def test_under_transformations() -> None:
    """Jit, vmap, scan: scales are leaves, the scaling is static."""
    sizes = jnp.array([[3, 1], [0, 2]], jnp.int32)
    data = jax.random.normal(jax.random.key(0), (2, 5, 64))
    for scaling in SCALINGS:
        stacked = jax.jit(jax.vmap(lambda d, s, by=scaling: quantize(GroupedTensor(d, s), jnp.float8_e4m3fn, by)))(
            data, sizes
        )
        for i in range(2):
            one = quantize(GroupedTensor(data[i], sizes[i]), jnp.float8_e4m3fn, scaling)
            mine = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
            assert eqx.tree_equal(one, mine)
            np.testing.assert_array_equal(jax.vmap(lambda q: q.mT.dequantize().data)(stacked)[i],
                                          one.dequantize().data.T)  # fmt: skip
        _, out = jax.lax.scan(lambda c, q: (c, q.dequantize().data), 0, stacked)
        np.testing.assert_array_equal(out[0], quantize(GroupedTensor(data[0], sizes[0]), jnp.float8_e4m3fn,
                                                       scaling).dequantize().data)  # fmt: skip
        arrays, static = eqx.partition(stacked, eqx.is_array)
        assert eqx.tree_equal(eqx.combine(arrays, static), stacked)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_with_jit_and_without(dtype: str) -> None:
    """At ties too, where the last bit of a quotient decides: those of NumPy's float32."""
    rng = np.random.default_rng(0)
    largest = int(LARGEST[dtype])
    halves = rng.integers(-2 * largest, 2 * largest + 1, (3, 40, 64)) / 2  # of a step of the integers; fp8 has others
    x = (halves * rng.uniform(0.1, 9, (3, 40, 1))).astype(np.float32)
    x[..., 0] = largest * x[..., 1:].max(axis=-1) / halves[..., 1:].max(axis=-1)
    for scaling, axes in (((1, 16), -1), ("row", (-2, -1)), ("group", (1, 2, 3)), ("tensor", (0, 1, 2, 3))):
        amax = np.abs(x).reshape(3, 40, 4, 16).max(axis=axes, keepdims=True)
        scale = amax * np.float32(1 / LARGEST[dtype])
        inverse = np.broadcast_to(np.float32(1) / scale, (3, 40, 4, 16)).reshape(x.shape)
        data = np.clip(x * inverse, -largest, largest)
        data = (np.round(data) if dtype.startswith("int") else data).astype(jnp.dtype(dtype))
        eager = quantize(jnp.asarray(x), dtype, scaling)
        jitted = jax.jit(lambda x, by=scaling: quantize(x, dtype, by))(x)
        for q in (eager, jitted):
            np.testing.assert_array_equal(np.asarray(q.scales).ravel(), scale.ravel())
            np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32), data.astype(np.float32))


def test_annotations() -> None:
    """jaxtyping reads the stored dtype; `Float8e8m0fnu` is here, jaxtyping has none."""

    @jaxtyped(typechecker=beartype)
    def f(x: Float8e4m3fn[GroupedTensor, "m k"], scales: Float8e8m0fnu[Array, "m blocks"]) -> None:
        pass

    q = quantize(make("rows")[1], jnp.float8_e4m3fn, "mx")
    f(q, q.scales)
    with pytest.raises(TypeCheckError):
        f(q, q.scales.astype(jnp.float32))
    with pytest.raises(TypeCheckError):
        f(with_fields(q, data=q.data.astype(jnp.float8_e5m2)), q.scales)

    @jaxtyped(typechecker=beartype)
    def g(x: Int4[GroupedTensor, "g m k"]) -> None:
        pass

    g(quantize(jnp.ones((1, 2, 3)), jnp.int4, "row"))


X = GroupedTensor(jnp.ones((8, 64)), jnp.array([3, 5], jnp.int32))
Q = quantize(X, jnp.float8_e4m3fn, "row")


def test_repr_says_the_scaling() -> None:
    assert "scales=f32[8,1] by row" in repr(Q)
    assert "by (1, 16)" in repr(quantize(X, jnp.int8, (1, 16)))
    assert str(Scaling((1, 16), jnp.float8_e8m0fnu)) == "(1, 16) of float8_e8m0fnu"


@pytest.mark.long
@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from([*SCALINGS, (1, 1), (1, 5)]),
    st.booleans(),
    st.integers(0, 2**31 - 1),
)
def test_any_sizes(sizes: list[int], dtype: str, scaling: Any, power_of_two: bool, seed: int) -> None:
    """Sizes that end before the capacity, or reach it; tails of NaN."""
    rng = np.random.default_rng(seed)
    groups = [rng.standard_normal((m, 7)).astype(np.float32) * 10.0 ** rng.integers(-5, 5) for m in sizes]
    x = cases.tensor([g.astype(np.float32) for g in groups], (True, False), sum(sizes) + seed % 3 + 1, 7)
    q = quantize(x, dtype, scaling, power_of_two=power_of_two)
    scales = expected_scales(groups, scaling, dtype, power_of_two or scaling == "mx")
    for got, group, scale in zip(q.dequantize().to_list(), groups, scales, strict=True):
        limit = half_a_unit(group / scale, dtype) * scale * (1 + 1e-5)
        assert np.all(np.abs(np.asarray(got) - group) <= limit)


def test_bytes_of_a_checkpoint() -> None:
    """The hints' `.view` gives the numbers that the bytes stand for: `2 ** (byte - 127)`, and the low half first."""
    rng, mx = np.random.default_rng(0), Scaling.of("mx")
    codes, exponents = rng.integers(0, 256, (2, 8, 32), np.uint8), rng.integers(100, 150, (2, 8, 2), np.uint8)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(2, 8, 64)
    want = np.where(halves & 8, -1, 1) * e2m1[halves & 7] * np.repeat(2.0 ** (exponents - 127.0), 32, axis=-1)
    data, scales = jnp.asarray(codes), jnp.asarray(exponents)
    with pytest.raises(ValueError, match=r"`x.scales.view\(jnp.float8_e8m0fnu\)`"):
        GroupedTensor(data.view(jnp.float4_e2m1fn), scales=scales, scaling=mx)
    scales = scales.view(jnp.float8_e8m0fnu)
    with pytest.raises(TypeError, match=r"`x.data.view\(jnp.float4_e2m1fn\)` for two numbers a byte"):
        GroupedTensor(jnp.repeat(data, 2, axis=-1), scales=scales, scaling=mx)
    x = GroupedTensor(data.view(jnp.float4_e2m1fn), scales=scales, scaling=mx)
    np.testing.assert_array_equal(np.asarray(x.dequantize().data, np.float64), want)
