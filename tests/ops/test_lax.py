"""`ragged.lax`: the definition in NumPy, and second JAX's own results, on the cases of JAX's tests and on more."""

import re
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import DotAlgorithmPreset, RaggedDotDimensionNumbers
from jax.sharding import AxisType, PartitionSpec

import ragged
from tests.docs.context import jax_defaults

JAX: Any = lax
BASIC = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def dims(contracted: Any, batch: Any, ragged_dim: int, *group: int) -> RaggedDotDimensionNumbers:
    return RaggedDotDimensionNumbers((contracted, batch), (ragged_dim,), group)


NONE = ((), ())
# Shapes of lhs, rhs and group sizes, and dims. `x` are dims whose sizes the group sizes may depend on.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], RaggedDotDimensionNumbers]] = {
    "kept": ((11, 5), (3, 5, 7), (3,), BASIC),
    "kept, stored transposed": ((5, 11), (7, 5, 3), (3,), dims(((0,), (1,)), NONE, 1, 2)),
    "kept, batch": ((2, 11, 5), (2, 3, 5, 7), (2, 3), dims(((2,), (2,)), ((0,), (0,)), 1, 1)),
    "kept, batch, shared sizes": ((2, 11, 5), (2, 3, 5, 7), (3,), dims(((2,), (2,)), ((0,), (0,)), 1, 1)),
    "kept, batch and x": ((4, 6, 11, 5), (3, 4, 5, 7), (4, 6, 3), dims(((3,), (2,)), ((0,), (1,)), 2, 0)),
    "kept, x, shared sizes": ((4, 6, 11, 5), (3, 4, 5, 7), (3,), dims(((3,), (2,)), ((0,), (1,)), 2, 0)),
    "kept, many dims": ((6, 11, 5, 2, 4), (4, 8, 5, 3, 7), (4, 6, 3), dims(((2,), (2,)), ((4,), (0,)), 1, 3)),
    "kept, two batch dims": ((6, 11, 5, 4), (3, 6, 4, 7, 5), (4, 6, 3), dims(((2,), (4,)), ((3, 0), (2, 1)), 1, 0)),
    "kept, two contracted": ((11, 5, 2), (3, 2, 5, 7), (3,), dims(((1, 2), (2, 1)), NONE, 0, 0)),
    "kept, nothing contracted": ((11, 2), (3, 5), (3,), dims(NONE, NONE, 0, 0)),
    "kept, vectors": ((11,), (3,), (3,), dims(NONE, NONE, 0, 0)),
    "kept, no other dim of rhs": ((11, 5), (3, 5), (3,), dims(((1,), (1,)), NONE, 0, 0)),
    "contracted": ((11, 5), (11, 7), (3,), dims(((0,), (0,)), NONE, 0)),
    "contracted, batch": ((2, 5, 11), (2, 11, 7), (2, 3), dims(((2,), (1,)), ((0,), (0,)), 2)),
    "contracted, batch, shared sizes": ((2, 5, 11), (2, 11, 7), (3,), dims(((2,), (1,)), ((0,), (0,)), 2)),
    "contracted, x": ((4, 6, 11, 5), (4, 6, 11, 7), (4, 6, 3), dims(((1, 2), (1, 2)), ((0,), (0,)), 2)),
    "contracted, x, shared sizes": ((11, 5, 4, 6), (4, 11, 7, 6), (3,), dims(((3, 0), (3, 1)), ((2,), (0,)), 0)),
    "contracted, ragged first": ((11, 5, 2), (2, 5, 7), (3,), dims(((1, 2), (1, 0)), NONE, 1)),
    "contracted, two batch dims": ((6, 11, 5, 4), (6, 4, 7, 11), (6, 4, 3), dims(((1,), (3,)), ((0, 3), (0, 1)), 1)),
    "contracted, no other dim of lhs": ((2, 11), (11, 7, 2), (3,), dims(((1, 0), (0, 2)), NONE, 1)),
    "contracted, vectors": ((11,), (11,), (3,), dims(((0,), (0,)), NONE, 0)),
    "no rows": ((0, 5), (3, 5, 7), (3,), BASIC),
    "nothing to add": ((11, 0), (3, 0, 7), (3,), BASIC),
    "no groups": ((11, 5), (0, 5, 7), (0,), BASIC),
    "no groups, contracted": ((11, 5), (11, 7), (0,), dims(((0,), (0,)), NONE, 0)),
    "an empty batch": ((0, 11, 5), (0, 3, 5, 7), (0, 3), dims(((2,), (2,)), ((0,), (0,)), 1, 1)),
}
FAILS_IN_JAX = {"contracted, two batch dims"}  # in jax 0.12: an internal error of XLA's verifier
SHORT = ["contracted, x", "kept, vectors"]


class Definition:
    """The product by its definition, for each index of the prefix (the axes of `group_sizes`) and for each group."""

    def __init__(self, lhs: Any, rhs: Any, sizes: Any, numbers: RaggedDotDimensionNumbers) -> None:
        (contract, r_contract), (batch, r_batch) = numbers.dot_dimension_numbers
        (self.axis,), group, new = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions, count(100)
        self.lhs = [*range(lhs.ndim)]
        pairs = dict(zip((*r_contract, *r_batch), (*contract, *batch), strict=True))
        self.rhs = [pairs.get(axis, -1 if axis in group else next(new)) for axis in range(rhs.ndim)]
        kept = [z for z in self.lhs if z not in (*contract, *batch)]
        self.out = [*batch, *kept, *(z for z in self.rhs if z >= 100)]
        self.out = self.out if group else [-1, *self.out]
        role = [*contract] if self.axis in contract else kept
        self.prefix = [*batch, *role[: role.index(self.axis)]]
        extents = dict(zip(self.rhs, rhs.shape, strict=True)) | dict(enumerate(lhs.shape)) | {-1: sizes.shape[-1]}
        self.shape = [extents[z] for z in self.out]
        counts = [extents[z] for z in self.prefix]
        self.sizes = np.broadcast_to(sizes, (*counts, sizes.shape[-1]))
        self.places = [
            {**{z: slice(i, i + 1) for z, i in zip(self.prefix, index, strict=True)}, -1: slice(group, group + 1)}
            | {self.axis: slice(end - self.sizes[index][group], end)}
            for index in np.ndindex(*counts)
            for group, end in enumerate(np.cumsum(self.sizes[index]))
        ]

    def __call__(self, lhs: Any, rhs: Any) -> np.ndarray:
        """In float64."""
        out, terms = np.zeros(self.shape), (self.lhs, self.rhs, self.out)
        names = {z: i for i, z in enumerate(dict.fromkeys((*self.lhs, *self.rhs, *self.out)))}
        for place in self.places:
            a, b, c = (tuple(place.get(z, slice(None)) for z in term) for term in terms)
            parts = np.asarray(lhs[a], np.float64), np.asarray(rhs[b], np.float64)
            # The axis of the group has one element; that of a sum has as many as rows.
            x, y = ([names[z] for z in term] for term in (self.lhs, self.rhs))
            kept = [names[z] for z in self.out if z in self.lhs or z in self.rhs]
            out[c] += np.einsum(parts[0], x, parts[1], y, kept).reshape(out[c].shape)
        return out

    def with_nan(self, x: np.ndarray, letters: list[int]) -> np.ndarray:
        """`x` with NaN in the rows of no group."""
        if self.axis not in letters:
            return x
        out = np.full_like(x, np.nan)
        for place in self.places:
            part = tuple(place.get(z, slice(None)) for z in letters)
            out[part] = x[part]
        return out


def operands(name: str, seed: int = 0) -> tuple[Any, Any, Any]:
    """lhs, rhs and int32 sizes, some of them zero, which leave a tail."""
    rng = np.random.default_rng(seed)
    lhs, rhs, sizes, numbers = CASES[name]
    rows = lhs[numbers.lhs_ragged_dimensions[0]]
    groups = rng.integers(0, rows // max(sizes[-1], 1) + 1, sizes)
    groups[..., seed % 3 : seed % 3 + 1] = 0
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (lhs, rhs))
    return x, w, groups.astype(np.int32)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in CASES]
)
def test_equals_the_definition(name: str) -> None:
    """And JAX's result. NaN in the tails stays there; the tail of the result is zero. A product is linear in each
    operand, so derivatives are products by other operands: `<d lhs, a> = <cotangent, product(a, rhs)>`."""
    numbers = CASES[name][3]
    multiply = partial(ragged.lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers)

    @jax.jit
    def run(lhs: Any, rhs: Any, sizes: Any, cotangent: Any, tangents: Any) -> Any:
        out = multiply(lhs, rhs, sizes)
        gradient = jax.grad(lambda lhs, rhs: jnp.vdot(multiply(lhs, rhs, sizes), cotangent), (0, 1))
        return out, *jax.jvp(gradient, (lhs, rhs), tangents)

    lhs, rhs, sizes = operands(name)
    for seed in range(6):
        (lhs, rhs, sizes), (a, b, _) = operands(name, seed), operands(name, seed + 10)
        definition = Definition(lhs, rhs, sizes, numbers)
        with_nan = definition.with_nan(lhs, definition.lhs), definition.with_nan(rhs, definition.rhs)
        cotangent = np.random.default_rng(2).standard_normal(definition.shape).astype(np.float32)
        out, gradients, second = run(*with_nan, sizes, cotangent, (a, b))
        np.testing.assert_allclose(out, definition(lhs, rhs), atol=2e-5)
        for got, direction, want in (
            (gradients[0], a, definition(a, rhs)),
            (gradients[1], b, definition(lhs, b)),
            (second[0], a, definition(a, b)),
            (second[1], b, definition(a, b)),
        ):
            assert got.shape == direction.shape and got.dtype == direction.dtype
            np.testing.assert_allclose(np.vdot(got, direction), np.vdot(cotangent, want), rtol=1e-4, atol=1e-4)
        assert not np.asarray(gradients[0])[np.isnan(with_nan[0])].any()
        if name not in FAILS_IN_JAX:
            theirs = JAX.ragged_dot_general(lhs, rhs, sizes, numbers)
            assert (out.shape, out.dtype, out.weak_type) == (theirs.shape, theirs.dtype, theirs.weak_type)
            np.testing.assert_allclose(out, theirs, atol=2e-5)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_ragged_batch_dim_changes_nothing(batch: tuple[int, ...]) -> None:
    rng, i = np.random.default_rng(0), len(batch)
    lhs, rhs = (rng.standard_normal((*batch, *shape)).astype(np.float32) for shape in ((4, 6, 5), (4, 5, 7)))
    axes = tuple(range(i + 1))
    numbers = dims(((i + 2,), (i + 1,)), (axes, axes), i)
    out = ragged.lax.ragged_dot_general(lhs, rhs, np.ones((*batch, 3), np.int32), numbers)
    np.testing.assert_allclose(out, np.asarray(lhs, np.float64) @ rhs, atol=2e-5)


@pytest.mark.long
def test_shard_map_and_explicit_axes() -> None:
    """`out_sharding` may be left out. With batch dims, sizes follow the sharding of `lhs`."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    spec = PartitionSpec("a")
    lhs, rhs, sizes = operands("kept, batch")
    numbers = CASES["kept, batch"][3]
    want = Definition(lhs, rhs, sizes, numbers)(lhs, rhs)
    fn = partial(ragged.lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers)
    with jax.set_mesh(mesh):
        given = jax.device_put(lhs, spec), jax.device_put(rhs, spec), sizes
        out = jax.jit(fn)(*given)
        assert jax.typeof(out).sharding.spec == PartitionSpec("a", None, None)
        np.testing.assert_allclose(out, want, atol=2e-5)
        assert jax.typeof(fn(*given, out_sharding=PartitionSpec())).sharding.spec == PartitionSpec(None, None, None)
        x, w = lhs[0, :10], jax.device_put(rhs[0], PartitionSpec(None, None, None))
        out = ragged.lax.ragged_dot(x, w, sizes[0], out_sharding=PartitionSpec("a", None))
        assert jax.typeof(out).sharding.spec == PartitionSpec("a", None)
        out = jax.shard_map(fn, in_specs=(spec, spec, spec), out_specs=spec)(*given[:2], jax.device_put(sizes, spec))
        np.testing.assert_allclose(out, want, atol=2e-5)


def test_the_program_is_that_of_the_grouped_product() -> None:
    """With no operation beside it, but for its name in errors. A transposed `rhs`, `[g, n, k]`, isn't copied. The
    precision reaches it."""
    x, w, sizes = jnp.ones((11, 5)), jnp.ones((3, 7, 5)), jnp.array([3, 0, 6], jnp.int32)
    ours, theirs = (jax.make_jaxpr(fn)(x, w.mT, sizes) for fn in (ragged.lax.ragged_dot, ragged.grouped_matmul))
    assert str(ours).replace("ragged.lax.ragged_dot", "ragged.grouped_matmul") == str(theirs)
    fn = jax.jit(partial(ragged.lax.ragged_dot_general, ragged_dot_dimension_numbers=dims(((1,), (2,)), NONE, 0, 0)))
    text = fn.lower(x, w, sizes).compile().as_text()
    assert text and not [line for line in text.splitlines() if re.search(r"= f32\[3,.*(transpose|copy)\(", line)]
    precise = jax.jit(partial(ragged.lax.ragged_dot, precision=DotAlgorithmPreset.BF16_BF16_F32))
    assert "lhs_precision_type = bf16" in precise.lower(x, w.mT, sizes).as_text()


@pytest.mark.long
def test_sizes_of_any_integer_dtype() -> None:
    """Their sum may be out of range of the dtype, which in JAX wraps around. Negative sizes count as 0; a group is cut
    off at the last row."""
    rhs = np.arange(1, 4, dtype=np.float32)[:, None, None] * np.ones((3, 2, 4), np.float32)
    for dtype in ("int4", "uint4", *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64))):
        sizes = np.array([6, 0, 7] if "t4" in dtype else [100, 0, 100]).astype(dtype)
        lhs = np.random.default_rng(0).standard_normal((300, 2)).astype(np.float32)
        first, held = int(sizes[0]), int(sizes.astype(int).sum())
        want = (
            lhs.astype(float) @ rhs[0].astype(float) * np.repeat([1, 3, 0], [first, held - first, 300 - held])[:, None]
        )
        lhs[held:] = np.nan
        out = ragged.lax.ragged_dot(lhs, rhs, sizes if "64" in dtype else jnp.asarray(sizes))
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5, err_msg=dtype)
    out = ragged.lax.ragged_dot(jnp.ones((8, 2)), rhs, jnp.array([3, -2, 100], jnp.int8))
    assert out[:, 0].tolist() == [2.0] * 3 + [6.0] * 5
    for beyond in (np.array([3, 2**31, 0], np.uint32), np.array([3, 2**32 + 1, 0])):
        with pytest.raises(ValueError, match=r"`group_sizes\[1\]` is \d+, which int32 can't hold"):
            ragged.lax.ragged_dot(jnp.ones((8, 2)), rhs, beyond)


DTYPES = ["bool", "int4", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "complex64"]
SHORT_PAIRS = [
    ("bool", "bool", None),
    ("uint8", "int8", None),
    ("int8", "int8", "int32"),
    ("float32", "complex64", None),
    ("float32", "float32", "int32"),
    ("float16", "bfloat16", None),
    ("float8_e4m3fn", "float8_e5m2", None),
]


def numbers_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Whole numbers that the dtype represents, whose products wrap around in 8 bits."""
    most = {"bool": 2, "int4": 7, "int8": 50, "uint8": 200, "float4_e2m1fn": 3}.get(dtype, 4)
    x = jnp.asarray(rng.integers(0, most, shape)).astype(dtype)
    return x * (1 + 2j) + jnp.conj(x[::-1]) if dtype == "complex64" else x


def check_dtypes(a: str, b: str, out: str | None) -> None:
    """They are those of JAX, and so are values, and which dtypes raise. Values equal the definition, too. JAX rounds
    operands or sums to floats of 8 and 4 bits first, so its values for them aren't compared."""
    rng = np.random.default_rng(0)
    with jax_defaults():
        args = numbers_of(rng, (9, 3), a), numbers_of(rng, (2, 3, 4), b), jnp.array([3, 4], jnp.int32)
        try:
            theirs = JAX.ragged_dot(*args, preferred_element_type=out)
        except TypeError:
            with pytest.raises(TypeError):
                ragged.lax.ragged_dot(*args, preferred_element_type=out)
            return
        except jax.errors.JaxRuntimeError:  # XLA for CPUs fails to compile `jax.lax.ragged_dot` of these dtypes
            return
        if out == "float4_e2m1fn" and a in ("bool", "int4"):  # XLA for CPUs fails to compile the cast of the result
            return
        ours = ragged.lax.ragged_dot(*args, preferred_element_type=out)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        rounds_first = any("float8" in each or "float4" in each for each in (a, b, out) if each)
        wants = [converted(np.asarray(args[0]), np.asarray(args[1]), ours.dtype), *([] if rounds_first else [theirs])]
        wide = np.complex64 if ours.dtype == np.complex64 else np.float32
        for want in wants:
            np.testing.assert_array_equal(np.asarray(ours.astype(wide)), np.asarray(want.astype(wide)))


def converted(lhs: np.ndarray, rhs: np.ndarray, dtype: Any) -> jax.Array:
    """The exact product for the sizes 3 and 4, in this dtype."""
    is_exact = all(jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool for x in (lhs, rhs))
    lhs, rhs = lhs.astype(np.complex128), rhs.astype(np.complex128)
    out = np.concatenate([lhs[:3] @ rhs[0], lhs[3:7] @ rhs[1], np.zeros((2, 4))])
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray(out, dtype)
    kind = np.int32 if is_exact and jnp.issubdtype(dtype, jnp.integer) else np.float32
    return jnp.asarray(out.real.astype(kind)).astype(dtype)


@pytest.mark.parametrize("dtypes", SHORT_PAIRS, ids=str)
def test_dtypes_are_those_of_jax(dtypes: tuple[str, str, str | None]) -> None:
    check_dtypes(*dtypes)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_are_those_of_jax(dtype: str) -> None:
    for other in DTYPES[DTYPES.index(dtype) % 4 :: 4]:
        check_dtypes(dtype, other, None)
        check_dtypes(dtype, dtype, other)


PRECISIONS = [None, "highest", ("default", "highest"), DotAlgorithmPreset.F32_F32_F32, DotAlgorithmPreset.F16_F16_F32]
MORE = ["high", lax.Precision.HIGH, *DotAlgorithmPreset]


@pytest.mark.parametrize("precisions", [PRECISIONS, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "all"])
def test_precisions_are_those_of_jax(precisions: list[Any]) -> None:
    """In values, and in which presets a CPU refuses."""
    lhs, rhs, sizes = operands("kept")
    for precision in precisions:
        try:
            theirs = JAX.ragged_dot(lhs, rhs, sizes, precision)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                ragged.lax.ragged_dot(lhs, rhs, sizes, precision)
            continue
        ours = ragged.lax.ragged_dot(lhs, rhs, sizes, precision)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_bfloat16_sums_over_dims_of_sizes_are_rounded_once() -> None:
    *given, sizes = operands("contracted, x")
    lhs, rhs = (jnp.asarray(x, jnp.bfloat16) for x in given)
    numbers = CASES["contracted, x"][3]
    out = ragged.lax.ragged_dot_general(lhs, rhs, sizes, numbers)
    want = Definition(np.asarray(lhs), np.asarray(rhs), sizes, numbers)(np.asarray(lhs), np.asarray(rhs))
    np.testing.assert_allclose(out.astype(jnp.float32), want, rtol=2**-8, atol=1e-5)


def test_group_offset() -> None:
    """`rhs` has two of the three groups; rows of the others are zero. Of a sum, the result begins with that group."""
    forward, numbers = jax.jit(ragged.lax.ragged_dot), CASES["contracted"][3]
    total = jax.jit(partial(ragged.lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers))
    for offset in (-1, 0, 1, 2, 3):
        lhs, rhs, sizes = operands("kept", seed=1)
        sizes[:] = 3, 2, 4
        every = np.zeros_like(rhs)
        for i in range(3):
            every[i] = rhs[i - offset] if 0 <= i - offset < 2 else 0
        want, whole = Definition(lhs, every, sizes, BASIC)(lhs, every), Definition(lhs, lhs, sizes, numbers)(lhs, lhs)
        np.testing.assert_allclose(forward(lhs, rhs[:2], sizes, group_offset=np.int32(offset)), want, atol=2e-5)
        out = total(lhs, lhs, sizes, group_offset=np.int32(offset))
        for i in range(3):
            np.testing.assert_allclose(out[i], whole[i + offset] if 0 <= i + offset < 3 else 0, atol=2e-5)
