"""What a TPU's matrix units multiply as it is: in which dtypes, that no value is lost, and that the kernels do it."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import ragged
from ragged import GroupedTensor
from ragged.backends.base import Target
from ragged.backends.tpu import tiles, units
from ragged.core.scales import Scales
from tests import oracle, products, tpu

Aval = jax.ShapeDtypeStruct
E4M3, E5M2, B11 = "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"
BF16, INTS = "bfloat16", ("int8", "int4")
FLOATS = (E4M3, E5M2)


def pair(lhs: str, rhs: str, generation: str) -> tuple[str, str]:
    """In which dtypes the units multiply."""
    if lhs in INTS and rhs in INTS:
        return (lhs, rhs) if lhs == rhs and generation not in ("unknown", "tpu7x") else ("int8", "int8")
    is_seventh, has_rate = generation == "tpu7x", generation in ("v6e", "tpu7x")
    fn = E4M3 if is_seventh else B11
    first, second = ({E4M3: fn, "int4": fn}.get(name, name) for name in (lhs, rhs))
    if generation == "unknown" or second in (BF16, "int8"):
        narrow = generation != "unknown" and not is_seventh and second == BF16 and first in (B11, E5M2)
        return (first if narrow else BF16), BF16
    return (first if has_rate and first in (fn, E5M2) else BF16), second


@pytest.mark.parametrize("generation", tpu.KINDS)
def test_dtypes_of_a_dot(generation: str) -> None:
    """Operands are taken as they are where the units have both formats; else as few of them as possible are cast."""
    chip = tiles.chip(tpu.KINDS[generation])
    for lhs, rhs in itertools.product((*FLOATS, *INTS, BF16), repeat=2):
        dot = units.dot(lhs, rhs, chip)
        assert (dot.lhs.name, dot.rhs.name) == pair(lhs, rhs, generation), (lhs, rhs)
    assert units.dot(BF16, "float32", chip)[:2] == (jnp.float32, jnp.float32)


def every(name: str) -> np.ndarray:
    """Numbers of a dtype: all of those of 8 and 4 bits, in a random order, once for each bit pattern of 8 bits."""
    order = np.random.default_rng(3).permutation(256).astype(np.uint8)
    if name == BF16:
        return np.concatenate([order.view(np.int8).astype(jnp.bfloat16)[:-2], np.array([np.nan, np.inf], jnp.bfloat16)])
    return (order % 16 - 8.0).astype(jnp.int4) if name == "int4" else order.view(jnp.dtype(name))


@pytest.mark.parametrize(
    "lhs, rhs",
    [*itertools.product(FLOATS, (*FLOATS, "int4")), ("int4", E5M2), (BF16, E4M3), (BF16, "int4"), (E5M2, BF16)],
)
@pytest.mark.parametrize("generation", tpu.KINDS)
def test_every_value(generation: str, lhs: str, rhs: str) -> None:
    """Each product of two numbers is exact: NaN, infinities, -0 and the smallest numbers too."""
    dot, x, y = units.dot(lhs, rhs, tiles.chip(tpu.KINDS[generation])), every(lhs)[:, None], every(rhs)[None]
    got = jax.jit(lambda x, y: dot(x, y, 1, 0))(x, y)
    assert got.dtype == dot.result
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, x.astype(np.float64) * y.astype(np.float64))


@pytest.mark.parametrize(
    "lhs, rhs, longest", [("int8", "int8", 1024), ("int8", "int4", 16384), ("int4", "int4", 2**18)]
)
def test_integers_without_units(lhs: str, rhs: str, longest: int) -> None:
    """Where the compiler sums integers in float32, no more of them than it holds exactly."""
    for generation, device in tpu.KINDS.items():
        dot = units.dot(lhs, rhs, tiles.chip(device))
        assert dot.longest == (longest if generation in ("unknown", "tpu7x") else None)
    least = [int(jnp.iinfo(dtype).min) for dtype in (lhs, rhs)]
    assert longest * least[0] * least[1] == 2**24
    dot = units.dot("int8", "int8", tiles.chip(tpu.KINDS["tpu7x"]))
    x, y = np.full((8, 2500), 127, np.int8), np.full((2500, 8), 127, np.int8)
    jaxpr: Any = jax.make_jaxpr(lambda x, y: dot(x, y, 1, 0))(x, y)
    extents = [each.invars[0].aval.shape[1] for each in jaxpr.eqns if each.primitive.name == "dot_general"]
    assert extents == [1024, 1024, 452]
    np.testing.assert_array_equal(dot(jnp.asarray(x), jnp.asarray(y), 1, 0), x.astype(np.int64) @ y.astype(np.int64))


@pytest.mark.parametrize("generation", tpu.KINDS)
@pytest.mark.parametrize("lhs, rhs", [(E4M3, E4M3), (E5M2, E4M3), ("int8", "int8"), ("bfloat16", "int4")])
def test_one_row_of_the_second_operand(lhs: str, rhs: str, generation: str) -> None:
    """Contracted along lanes, by no dot, for which Pallas has no lowering; exact, NaN and infinities too."""
    dot, bits = units.dot(lhs, rhs, tiles.chip(tpu.KINDS[generation])), np.arange(256, dtype=np.uint8)
    values = {"bfloat16": bits.astype(jnp.bfloat16), "int4": (bits % 16 - 8.0).astype(jnp.int4)}
    x, y = (values[name] if name in values else bits.view(jnp.dtype(name)) for name in (lhs, rhs))

    def products(x: Any, y: Any) -> Any:
        return jax.lax.map(lambda y: dot(x[:, None], y[None, None], 1, 1)[:, 0], y)

    assert "dot_general" not in str(jax.make_jaxpr(products)(x, y))
    got = jax.jit(products)(x, y)
    assert got.dtype == dot.result
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, y.astype(np.float64)[:, None] * x.astype(np.float64))


def all_kernels(lhs: Any, rhs: Any, weights: Any, sizes: Any) -> list[Any]:
    """Forward, dgrad, wgrad, batched and two ragged letters, of rows and weights in two dtypes."""
    x, y, w = GroupedTensor(lhs, sizes), GroupedTensor(rhs, sizes), GroupedTensor(weights)
    pairs: list[tuple[Any, Any]] = [(x, w), (x, w.mT), (x.mT, y), (GroupedTensor(weights.astype(lhs.dtype)), w)]
    options: dict[str, Any] = {"preferred_element_type": jnp.float32}
    outer = ragged.matmul(x, y.mT, max_last=128, **options)
    return [outer.data, *(ragged.matmul(a, b, **options).data for a, b in pairs)]


TYPES = {E4M3: "f8E4M3FN", E5M2: "f8E5M2", B11: "f8E4M3B11FNUZ", "bfloat16": "bf16"}


@pytest.mark.parametrize("generation", ["v5e", "v6e", "tpu7x"])
def test_kernels_multiply_it_as_it_is(generation: str) -> None:
    """The products in the code of every kernel, of two formats; in a masked tile as in a whole one."""
    rows, weights = (200, 128), (3, 128, 128)
    avals = (Aval(rows, E4M3), Aval(rows, E5M2), Aval(weights, E5M2), Aval((3,), jnp.int32))
    got = tpu.matmuls(generation, all_kernels, *avals)
    taken = pair(E4M3, E5M2, generation)
    # The kernel for two ragged letters casts both operands, or none.
    assert got == {tuple(TYPES[name] for name in each) for each in {taken, (BF16, BF16) if BF16 in taken else taken}}


def test_a_scale_in_the_tile_is_multiplied_in_float32() -> None:
    """Blocks of 32 along the contraction; blocks of 128 and whole rows leave the operands as they are."""
    sizes, device = Aval((2,), jnp.int32), tpu.KINDS["tpu7x"]

    def forward(x: Any, w: Any, sizes: Any, scales: Any, block: int | None) -> Any:
        options: dict[str, Any] = {"preferred_element_type": jnp.float32, "target": Target(device=device)}
        return products.grouped_matmul("pallas_tpu", x, w, sizes, lhs_scales=Scales(scales, (1, block)), **options)

    for block, wide in ((32, True), (128, False), (None, False)):
        scales = Aval((64, 256 // block if block else 1), jnp.float32)
        avals = Aval((64, 256), E4M3), Aval((2, 256, 128), E4M3), sizes, scales
        got = tpu.matmuls("tpu7x", partial(forward, block=block), *avals)
        assert ("f32", "f32") in got if wide else got == {(TYPES[E4M3], TYPES[E4M3])}


@pytest.mark.long
@pytest.mark.parametrize(
    "generation, interpret", [*itertools.product(("v6e", "tpu7x"), (True, pltpu.InterpretParams()))]
)
def test_values(generation: str, interpret: Any) -> None:
    """Forward, wgrad and two ragged letters equal float64; nothing of the tail or of another group's NaN."""
    rng, sizes, rows, k, n = np.random.default_rng(0), [40, 0, 46, 10], 128, 72, 136
    ends = np.cumsum(sizes)

    def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return rng.choice([-4.0, -1.5, -0.25, 0.0, 2**-6, 0.5, 1.0, 3.0], shape).astype(jnp.dtype(dtype))

    x, y, w = numbers((rows, k), E4M3), numbers((rows, n), E5M2), numbers((4, k, n), E5M2)
    x[ends[-1] :], y[ends[-1] :] = np.nan, np.nan  # the tail
    x[ends[1] + 5, 3], w[1] = np.nan, np.nan  # one row, and an empty group's matrix
    scales = 2.0 ** rng.integers(-3, 4, (rows, 1)).astype(np.float32)

    @jax.jit
    def kernels(x: Any, y: Any, w: Any, scales: Any, dims: Any) -> Any:
        target = Target(interpret=interpret, device=tpu.KINDS[generation])
        options: dict[str, Any] = {"preferred_element_type": jnp.float32, "target": target}
        letters, axes = {"m": dims, "n": dims}, ("mk", "nk", "mn")
        return (
            products.grouped_matmul("pallas_tpu", x, w, dims, lhs_scales=Scales(scales, (1, None)), **options),
            products.transposed_grouped_matmul("pallas_tpu", x, y, dims, **options),
            products.tiled_matmul("pallas_tpu", x, w[0].T, letters, axes=axes, shape=(rows, 128), **options),
        )

    with tpu.on(generation):
        forward, wgrad, outer = kernels(x, y, w, scales, jnp.array(sizes, jnp.int32))
    groups = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    xs, ys, columns = [x[s] for s in groups], [y[s] for s in groups], [w[0][:, s] for s in groups]
    for s, by_weights, by_columns in zip(groups, oracle.matmul(xs, list(w)), oracle.matmul(xs, columns), strict=True):
        np.testing.assert_array_equal(forward[s], by_weights * scales[s])
        np.testing.assert_array_equal(outer[s, : by_columns.shape[1]], by_columns)
    np.testing.assert_array_equal(wgrad, np.stack(oracle.matmul([x.T for x in xs], ys)))
    for result in (forward, outer):
        np.testing.assert_array_equal(result[ends[-1] :], 0)


def test_the_model_knows_the_rate() -> None:
    """Fp8 at twice bfloat16's rate takes half the time, where nothing else counts; integers as long as bfloat16."""

    def seconds(dtype: str, generation: str) -> float:
        chip, each = tiles.chip(tpu.KINDS[generation]), jnp.dtype(dtype)
        dtypes = (each, each, jnp.dtype(jnp.bfloat16))
        problem = tiles.Problem("rows", 2**22, 8192, 1024, 1, dtypes, units.dot(each, each, chip), 2)
        return tiles._seconds(problem, (512, 8192, 1024), chip)

    for generation, dtype, rate in (("tpu7x", E4M3, 2), ("v6e", E4M3, 1), ("v5e", "int8", 1)):
        assert seconds("bfloat16", generation) / seconds(dtype, generation) == pytest.approx(rate, rel=0.03)
