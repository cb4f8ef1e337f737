"""Number formats of quantised tensors: tables of values, rounding of halves, special values, bytes."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# Wrong calls are made on purpose.

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jax import Array
from jaxtyping import Float8e4m3fn, Int4, TypeCheckError, jaxtyped

from ragged import Float4e2m1fn, Float8e8m0fnu, GroupedTensor, Scaling, quantize
from tests.four_bits import E2M1_VALUES, E4M3_VALUES, nearest

F4, E4M3, E5M2, E8M0 = "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
VALUES = {  # all that aren't negative, by their codes
    F4: E2M1_VALUES,
    E4M3: E4M3_VALUES,
    E5M2: np.arange(0x7C, dtype=np.uint8).view(jnp.dtype(E5M2)).astype(np.float64),
    "int8": np.arange(128.0),
    "int4": np.arange(8.0),
}
X = GroupedTensor(jnp.ones((8, 64)), jnp.array([3, 5], jnp.int32))


def test_tables() -> None:
    np.testing.assert_array_equal(np.arange(8, dtype=np.uint8).view(jnp.dtype(F4)).astype(np.float64), E2M1_VALUES)
    np.testing.assert_array_equal(np.arange(127, dtype=np.uint8).view(jnp.dtype(E4M3)).astype(np.float64), E4M3_VALUES)


@pytest.mark.parametrize("scaling", ["row", Scaling((1, None), E8M0)], ids=str)
def test_halves_go_to_even(scaling: Any) -> None:
    """Values of the format, and halves between two: with a power of two as scale, so that quotients are exact."""
    inputs = {}
    for dtype, values in VALUES.items():
        points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
        inputs[dtype] = np.stack([points, -points])[None] * 2.0**-7
    made = jax.jit(lambda xs: {dtype: quantize(x, dtype, scaling) for dtype, x in xs.items()})(
        {dtype: x.astype(np.float32) for dtype, x in inputs.items()}
    )
    for dtype, x in inputs.items():
        np.testing.assert_array_equal(made[dtype].scales.astype(jnp.float32), np.full((1, 2, 1), 2.0**-7))
        np.testing.assert_array_equal(
            np.asarray(made[dtype].data).astype(np.float64), nearest(x * 2**7, VALUES[dtype]), err_msg=dtype
        )


@pytest.mark.long
def test_tiny_and_huge_values() -> None:
    """Nothing overflows, however small or large all values are."""
    ways = [(dtype, scaling) for dtype in VALUES for scaling in ("row", "mx", "nvfp4")]
    run = jax.jit(lambda x: [quantize(x, *way).dequantize().data for way in ways])
    for value in (1e-45, 1e-38, 1e-37, 1e-36, 1e-30, 1.0, 1e38):
        for (dtype, scaling), back in zip(ways, run(np.full((1, 2, 4), value, np.float32)), strict=True):
            assert np.isfinite(back).all(), (value, dtype, scaling)
            if value >= 1e-30:  # at most half a unit at the least value of a binade: scales are powers of two
                half = {F4: 2**-2, E4M3: 2**-4, E5M2: 2**-3, "int8": 2**-7, "int4": 2**-3}[dtype]
                np.testing.assert_allclose(
                    back, value, rtol=2**-20 if scaling != "mx" and dtype != E5M2 else half, err_msg=str(value)
                )


def test_float64_beyond_float32() -> None:
    """The element saturates; the others keep their place."""
    with jax.enable_x64(True):
        x = np.ones((2, 3, 4))
        x[0, 0, 0] = 1e300
        back = np.asarray(quantize(x, E4M3, "row").dequantize().data)
    assert back[0, 0, 0] > 3e38
    np.testing.assert_array_equal(back[:, 1:], np.ones((2, 2, 4)))
    np.testing.assert_array_equal(back[1], np.ones((3, 4)))


@pytest.mark.parametrize(
    "dtype", [E4M3, "int8", *(pytest.param(name, marks=pytest.mark.long) for name in (E5M2, F4, "int4"))]
)
def test_the_same_bits_with_jit_and_without(dtype: str) -> None:
    """Where the last bit of a quotient decides, too: the bits of NumPy's float32."""
    rng, largest = np.random.default_rng(0), int(VALUES[dtype][-1])
    halves = rng.integers(-2 * largest, 2 * largest + 1, (3, 40, 64)) / 2
    x = (halves * rng.uniform(0.1, 9, (3, 40, 1))).astype(np.float32)
    x[..., 0] = largest * x[..., 1:].max(axis=-1) / halves[..., 1:].max(axis=-1)
    scale = np.abs(x).reshape(3, 40, 4, 16).max(axis=-1) * np.float32(1 / largest)
    data = np.clip(x * np.repeat(np.float32(1) / scale, 16, axis=-1), -largest, largest)
    data = (np.round(data) if dtype.startswith("int") else data).astype(jnp.dtype(dtype))
    for q in (quantize(x, dtype, (1, 16)), jax.jit(lambda x: quantize(x, dtype, (1, 16)))(x)):
        np.testing.assert_array_equal(q.scales, scale)
        np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32), data.astype(np.float32))


def test_annotations() -> None:
    """jaxtyping reads the stored dtype; it has no annotations for the dtypes of 4 bits, nor for scales of 8 bits."""

    @jaxtyped(typechecker=beartype)
    def f(x: Float8e4m3fn[GroupedTensor, "m k"], scales: Float8e8m0fnu[Array, "m blocks"]) -> None:
        pass

    @jaxtyped(typechecker=beartype)
    def g(x: Int4[GroupedTensor, "g m k"], y: Float4e2m1fn[GroupedTensor, "g m k"]) -> None:
        pass

    q, other = quantize(X, E4M3, "mx"), quantize(X, E5M2, "mx")
    integers, floats = quantize(jnp.ones((1, 2, 3)), jnp.int4, "row"), quantize(jnp.ones((1, 2, 3)), F4, "nvfp4")
    f(q, q.scales)
    g(integers, floats)
    for function, *wrong in (
        (f, q, q.scales.astype(jnp.float32)),
        (f, other, q.scales),
        (g, floats, floats),
        (g, integers, integers),
    ):
        with pytest.raises(TypeCheckError):
            function(*wrong)


def test_repr_and_plain_tensors() -> None:
    """The repr has the scaling. Without a dtype or a scaling, the tensor stays as it is."""
    q = quantize(X, E4M3, "row")
    assert "scales=f32[8,1] by row" in repr(q) and "by (1, 16)" in repr(quantize(X, jnp.int8, (1, 16)))
    assert "scales=f8_e4m3fn[8,4] by nvfp4" in repr(quantize(X, F4, "nvfp4"))
    assert str(Scaling((1, 16), jnp.float8_e8m0fnu)) == "(1, 16) of float8_e8m0fnu"
    assert quantize(X, None, None) is X and quantize(X, jnp.int8, None) is X
    assert X.dequantize() is X and X.logical_dtype == X.dtype and q.logical_dtype == jnp.float32
    array = jnp.ones((2, 3, 4))
    assert quantize(array, None, None).data is array
