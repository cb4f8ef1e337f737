"""`ragged.quantize` equals its definition, block by block, for any sizes, whatever lies outside of the groups.

For each block, `scale = amax / largest` of its finite elements, and `data = round(x / scale)`. A program quantises one
tensor in several ways; it is compiled once and runs on many draws.
"""

import itertools
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ragged
from ragged import GroupedTensor, Scaling, quantize
from tests.cases import split
from tests.contract.draws import size_table
from tests.contract.loop import Arrays, Place, Term, covered, places
from tests.contract.programs import runner

GROUPS, CAPACITY, WIDTH = 5, 60, 40
KINDS = {  # the ragged letters, the packed one, the shape of the buffer
    "uniform": ("", "", (GROUPS, 6, WIDTH)),
    "rows": ("m", "m", (CAPACITY, WIDTH)),
    "columns": ("n", "n", (WIDTH, CAPACITY)),
    "both": ("mn", "m", (CAPACITY, WIDTH)),
    "both, columns packed": ("mn", "n", (WIDTH, CAPACITY)),
    "no groups": ("m", "m", (CAPACITY, WIDTH)),
    "no rows": ("m", "m", (0, WIDTH)),
}
FORMATS = {  # bits of the mantissa, exponent of the least normal number, the largest one
    "float8_e4m3fn": (3, -6, 448.0),
    "float8_e5m2": (2, -14, 57344.0),
    "float4_e2m1fn": (1, 0, 6.0),
    "int8": (0, 0, 127.0),
    "int4": (0, 0, 7.0),
}
F32, E4M3, E8M0 = "float32", "float8_e4m3fn", "float8_e8m0fnu"
Block = tuple[int | None, int | None]
SCALINGS: list[tuple[Any, Block | None, str]] = [  # as it is passed, the block, the dtype of the scales
    ("row", (1, None), F32),
    ((8, 1), (8, 1), F32),
    ("nvfp4", (1, 16), E4M3),
    ("tensor", None, F32),
    ("mx", (1, 32), E8M0),
    ((None, 3), (None, 3), F32),
    ("group", (None, None), F32),
    (Scaling((4, 16), E4M3), (4, 16), E4M3),
    ("column", (None, 1), F32),
    ((1, 4), (1, 4), F32),
    (Scaling((4, None), E8M0), (4, None), E8M0),
    (Scaling(None, E4M3), None, E4M3),
]


class Cast(NamedTuple):
    dtype: str
    scaling: Any
    block: Block | None
    scales: str
    power_of_two: bool

    def shape(self, packed: int | None, buffer: tuple[int, ...], groups: int) -> tuple[int, ...]:
        """Of the scales: as many along a packed axis as there can be."""
        if self.block in (None, (None, None)):
            return () if self.block is None else (groups,)
        counts = [1 if b is None else -(-n // b) for n, b in zip(buffer[-2:], self.block or (), strict=True)]
        if packed is not None:
            extent = self.block[packed] if self.block else None
            counts[packed] = groups if extent is None else (buffer[packed] + (extent - 1) * groups) // extent
        return (*buffer[:-2], *counts)


def casts(first: int, step: int = 1) -> list[Cast]:
    """Scalings, each with one of the dtypes; half of them with scales that are powers of two."""
    dtypes = itertools.cycle([*FORMATS])
    every = [Cast(next(dtypes), *scaling, (i + first) % 4 > 1) for i, scaling in enumerate(SCALINGS, first % 5)]
    return every[first % step :: step]


def contents(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, number: int) -> np.ndarray:
    """Rows and columns of very different magnitudes, some of them zero; in some draws all are tiny, huge or zero."""
    x = rng.standard_normal(shape)
    for axis in (-1, -2):
        factors = np.exp2(rng.integers(-5, 6, shape[axis])) * (rng.random(shape[axis]) > 0.1)
        x *= factors if axis == -1 else factors[:, None]
    limit = 0 if dtype == "float16" else 90
    return (x * (0.0 if number % 16 == 9 else 2.0 ** (limit * (number % 3 - 1)))).astype(jnp.dtype(dtype))


CASES = [  # kind, whether it is seen through `mT`, dtype, number of scalings, where it is called
    ("rows", False, "float32", 6, "jit"),
]
LONG = [
    ("uniform", True, "bfloat16", 3, "jit"),
    ("uniform", True, "float16", 12, "jit"),
    ("rows", False, "bfloat16", 12, "jit"),
    ("columns", False, "float32", 12, "jit"),
    ("both", False, "float32", 12, "jit"),
    ("both, columns packed", True, "float32", 12, "jit"),
    ("rows", False, "float64", 12, "jit"),
    ("no groups", False, "float32", 3, "jit"),
    ("no rows", False, "float32", 3, "jit"),
    ("rows", False, "float32", 6, "vmap"),
    ("rows", False, "float32", 3, "export"),
    ("columns", False, "float32", 3, "eager"),
]


@pytest.mark.parametrize(
    "number, case", [*enumerate(CASES), *(pytest.param(*each, marks=pytest.mark.long) for each in enumerate(LONG))]
)
def test_definition(number: int, case: tuple[str, bool, str, int, str]) -> None:
    """Scales in the documented places, values within half a unit in the last place, zeros in the tail."""
    kind, transposed, dtype, count, context = case
    ragged, packed, shape = KINDS[kind]
    groups, axis = 0 if kind == "no groups" else GROUPS, "mn".index(packed) if packed else None
    rng, ways = np.random.default_rng(0), casts(number, len(SCALINGS) // count)
    rows = {z: rng.permutation(size_table(groups, CAPACITY, 16, rng)) for z in ragged}

    def run(data: Any, sizes: Arrays) -> list[Any]:
        x, found = GroupedTensor(data, sizes.get("m"), sizes.get("n"), transposed=transposed), []
        for way in ways:
            q = quantize(x, way.dtype, way.scaling, power_of_two=way.power_of_two)
            assert (q.dtype, q.scales.dtype) == (way.dtype, way.scales)  # pyright: ignore[reportOptionalMemberAccess]
            assert q.mT.scaling == Scaling.of(way.scaling).mT and q.mT.mT.scaling == q.scaling
            found.append((q.data, q.scales, q.tensor_scale, q.dequantize().data))
        return found

    def inputs(number: int) -> tuple[np.ndarray, Arrays]:
        x = contents(rng, shape, dtype, number)
        if number % 4 == 3:  # elements that aren't finite
            x = np.where(rng.random(shape) < 0.01, rng.choice([np.nan, np.inf, -np.inf], shape), x).astype(x.dtype)
        sizes = {z: table[number] for z, table in rows.items()}
        at = places({"": Term("mn", ragged, packed, shape)}, sizes, groups)[""]
        x[~covered(shape, at)] = (np.nan, 1e4)[number % 2]
        return x, sizes

    with jax.enable_x64(True) if dtype == "float64" else nullcontext():
        call, at_once = runner(context, run)
        draws = map(inputs, range(min(map(len, rows.values()), default=30) // at_once * at_once))
        for some in itertools.batched(draws, at_once):
            for (x, sizes), found in zip(some, call(some), strict=True):
                at: list[Any] = places({"": Term("mn", ragged, packed, shape)}, sizes, groups)[""]
                outside = ~covered(shape, at)
                for way, got in zip(ways, found, strict=True):
                    told = f"{way}, {sizes}"
                    arrays = [np.asarray(1 if each is None else each).astype(np.float64) for each in got]
                    assert arrays[1].shape == way.shape(axis, shape, groups), told
                    check(way, axis, x.astype(np.float64), at, arrays, told)
                    assert not arrays[0][outside].any() and not arrays[3][outside].any(), told


def check(way: Cast, packed: int | None, x: np.ndarray, at: list[Place], got: list[np.ndarray], told: str) -> None:
    """That `(data, scales, tensor_scale, dequantised)` is what the definition says of each group's blocks."""
    mantissa, least, largest = FORMATS[way.dtype]
    data, scales, level, dequantised = got
    is_power, two_levels = way.power_of_two or way.scales == E8M0, way.scales == E4M3
    block, begin = way.block or (None, None), 0
    maxima, spoiled = zip(*(maxima_of(x[place], block) for place in at), strict=True) if at else ((), ())
    top = max((each.max(initial=0) for each in maxima), default=0.0)
    if way.block is None:
        maxima = [np.full((1, 1), top)] * len(at)
        spoiled = [np.full((1, 1), any(each.any() for each in spoiled))] * len(at)
    if two_levels:
        close(level, scale_of(top, largest * (256 if way.power_of_two else 448), is_power), is_power, told)
    for group, (place, amax, bad) in enumerate(zip(at, maxima, spoiled, strict=True)):
        stored = of_group(scales, way.block, packed, group, begin, amax.shape)
        begin += 0 if packed is None else amax.shape[packed]
        lost = bad & (way.dtype in ("int8", "int4", "float4_e2m1fn"))  # these hold no NaN
        assert np.array_equal(np.isnan(stored), lost), told
        if not two_levels:
            close(stored[~lost], scale_of(amax, largest, is_power)[~lost], is_power, told)
        else:
            most = 256.0 if way.power_of_two else 448.0
            want = np.clip(scale_of(amax / level, largest, is_power), 2.0**-6, most)
            unit = 0 if is_power else 2.0 ** (np.floor(np.log2(want)) - 3)
            assert (np.abs(stored - want)[~lost] <= (unit * (0.5 + 1e-5) * np.ones_like(want))[~lost]).all(), told
        every = spread(stored, block, x[place].shape) * level
        with np.errstate(invalid="ignore"):
            quotient, held = x[place] / every, data[place]
        fine = np.isfinite(quotient)
        # A scale in float8_e4m3fn may be rounded down, by a part of 16; the largest elements then saturate.
        size, slack = np.abs(quotient[fine]), 1 + (2.0**-4 if two_levels and not is_power else 0) + 2.0**-21
        assert (size <= largest * slack).all(), told
        exponent = np.floor(np.log2(np.clip(size, 2.0**least, largest)))
        unit = np.where(way.dtype.startswith("int"), 1.0, 2.0 ** (exponent - mantissa))
        limit = unit / 2 + size * 2.0**-21 + np.maximum(size - largest, 0)
        assert (np.abs(held[fine] - quotient[fine]) <= limit).all(), told
        if way.dtype.startswith("float8"):
            bad_x = x[place][~fine]
            kept = np.where(np.isinf(bad_x) & (way.dtype == "float8_e5m2"), bad_x, np.nan)
            assert np.array_equal(held[~fine], kept, equal_nan=True), told
        with np.errstate(invalid="ignore"):
            want = np.where(spread(lost, block, x[place].shape), np.nan, held * every)
        np.testing.assert_allclose(dequantised[place], want, rtol=2.0**-22, err_msg=told)


def of_group(
    values: np.ndarray, block: Block | None, packed: int | None, group: int, begin: int, counts: tuple[int, ...]
) -> np.ndarray:
    """The scales, or zero points, of a group's blocks, of which there are `counts`. Along a packed axis, those of one
    group follow those of the group before it: `begin` is their number."""
    if block is None:
        return values.reshape(1, 1)
    if block == (None, None):
        return values[group].reshape(1, 1)
    index = [np.arange(n) for n in counts]
    if packed is None:
        return values[group][np.ix_(*index)]
    index[packed] += group if block[packed] is None else begin
    return values[np.ix_(*index)]


INTEGERS = {"uint4": (0, 15), "int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7)}


OF_BOTH = [("both", False), ("both, columns packed", True)]


@pytest.mark.parametrize(
    "kind, transposed",
    split(
        [("uniform", True)],
        [("rows", False), ("columns", True), *OF_BOTH],
    ),
)
def test_zero_points(kind: str, transposed: bool) -> None:
    """Each block's range, extended to 0, is mapped to all integers of the dtype, and 0 to an integer."""
    ragged, packed, shape = KINDS[kind]
    axis, rng = "mn".index(packed) if packed else None, np.random.default_rng(0)
    rows = {z: rng.permutation(size_table(GROUPS, CAPACITY, 16, rng))[:40] for z in ragged}
    ways = [(*each, i % 3 == 2) for i, each in enumerate(s for s in SCALINGS if s[2] == F32)]
    every = [(dtype, *way) for dtype, way in zip(itertools.cycle(INTEGERS), ways, strict=False)]

    @jax.jit
    def run(data: Any, sizes: Arrays) -> list[Any]:
        x = GroupedTensor(data, sizes.get("m"), sizes.get("n"), transposed=transposed)
        found = [quantize(x, dtype, way, power_of_two=power, symmetric=False) for dtype, way, *_, power in every]
        assert [q.zero_points.dtype for q in found] == [dtype for dtype, *_ in every]  # pyright: ignore
        return [(q.data, q.scales, q.zero_points, q.dequantize().data) for q in found]

    for number in range(40 if ragged else 12):
        x = contents(rng, shape, "float32", number) + np.float32(number % 5 - 2)
        sizes = {z: table[number] for z, table in rows.items()}
        if number % 4 == 3:
            x = np.where(rng.random(shape) < 0.01, rng.choice([np.nan, np.inf, -np.inf], shape), x).astype(x.dtype)
        at: list[Any] = places({"": Term("mn", ragged, packed, shape)}, sizes, GROUPS)[""]
        outside = ~covered(shape, at)
        x[outside] = np.nan
        for (dtype, _, block, _, power), arrays in zip(every, run(x, sizes), strict=True):
            told, (first, last) = f"{dtype}, {block}, {sizes}", INTEGERS[dtype]
            data, scales, zeros, values = (np.asarray(each).astype(np.float64) for each in arrays)
            assert zeros.shape == scales.shape and not data[outside].any() and not values[outside].any(), told
            wide, begin, blocks = x.astype(np.float64), 0, block or (None, None)
            parts = np.maximum(wide, 0), np.maximum(-wide, 0), wide
            found = [
                [maxima_of(part[place], blocks)[i] for place in at] for part, i in zip(parts, (0, 0, 1), strict=True)
            ]
            if block is None:
                found = [[np.full((1, 1), max(each.max() for each in side))] * len(at) for side in found]
            for group, (place, high, low, bad) in enumerate(zip(at, *found, strict=True)):
                counts = high.shape
                scale, zero = (of_group(z, block, axis, group, begin, counts) for z in (scales, zeros))
                begin += 0 if axis is None else counts[axis]
                assert np.array_equal(np.isnan(scale), np.broadcast_to(bad, counts)), told
                good = ~np.isnan(scale)
                np.testing.assert_allclose(
                    scale[good],
                    scale_of(high + low, last - first, power)[good],
                    rtol=0 if power else 2e-6,
                    err_msg=told,
                )
                # Rounding may go either way next to a tie.
                assert (np.abs(zero - (first + low / scale))[~bad] <= 0.5 + 1e-3).all(), told
                each, none = spread(scale, blocks, x[place].shape), spread(zero, blocks, x[place].shape)
                fine = np.isfinite(each) & np.isfinite(x[place])
                assert (data[place] >= first).all() and (data[place] <= last).all(), told
                with np.errstate(invalid="ignore"):
                    error = np.abs(data[place] - none - wide[place] / each)
                    assert (error[fine] <= 0.5 + 1e-3).all(), told
                    np.testing.assert_allclose(values[place], (data[place] - none) * each, rtol=1e-6, err_msg=told)


def maxima_of(x: np.ndarray, block: tuple[int | None, int | None]) -> tuple[np.ndarray, np.ndarray]:
    """Of each block: the largest absolute value of its finite elements, and whether all are finite. `[rows, columns]`
    of blocks."""
    extents = [max(n, 1) if b is None else b for n, b in zip(x.shape, block, strict=True)]
    counts = [1 if b is None else -(-n // b) for n, b in zip(x.shape, block, strict=True)]
    padded = np.zeros([n * b for n, b in zip(counts, extents, strict=True)])
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.reshape(counts[0], extents[0], counts[1], extents[1])
    finite = np.isfinite(blocks)
    sizes = np.minimum(np.abs(np.where(finite, blocks, 0)), np.finfo(np.float32).max)
    return sizes.max(axis=(1, 3), initial=0), ~finite.all(axis=(1, 3))


def spread(x: np.ndarray, block: tuple[int | None, int | None], shape: tuple[int, ...]) -> np.ndarray:
    """The value of each element's block."""
    index = [np.arange(n) // (max(n, 1) if b is None else b) for n, b in zip(shape, block, strict=True)]
    return x[np.ix_(*index)]


def scale_of(amax: Any, largest: float, is_power: bool) -> np.ndarray:
    scale = np.maximum(np.where(np.asarray(amax) > 0, amax, largest) / largest, np.finfo(np.float32).tiny)
    return 2 ** np.ceil(np.log2(scale)) if is_power else scale


def close(got: np.ndarray, want: np.ndarray, is_power: bool, told: str) -> None:
    np.testing.assert_allclose(got, want, rtol=0 if is_power else 2.0**-22, err_msg=told)


GIVEN: list[tuple[str, Any, Any]] = [  # the dtype, the scaling, the shape of the given scales
    ("float8_e4m3fn", "row", (60, 1)),
    ("int8", "tensor", ()),
    ("float8_e5m2", (None, 8), (5, 3)),
    ("float8_e4m3fn", (4, 8), (1, 3)),  # broadcast along the rows
    ("float8_e4m3fn", "mx", (60, 1)),
]


@pytest.mark.parametrize("dtype, scaling, shape", split(GIVEN[:1], GIVEN[1:]))
def test_given_scales(dtype: str, scaling: Any, shape: tuple[int, ...]) -> None:
    """Elements are divided by the given scales, and saturate. Floats need no pass over the data for them."""
    rng, sizes = np.random.default_rng(0), np.array([9, 0, 21, 13, 7], np.int32)
    data, scale = rng.standard_normal((60, 24)).astype(np.float32), np.exp2(rng.integers(-9, -5, shape))
    x = GroupedTensor(jnp.asarray(data), jnp.asarray(sizes))
    run = jax.jit(lambda x, scale: quantize(x, dtype, scaling, scale=scale))
    given = jnp.asarray(scale, jnp.float32)
    q, turned = run(x, given), quantize(x.mT, dtype, Scaling.of(scaling).mT, scale=given.mT if shape else given)
    ids, rows = np.repeat(np.arange(5), sizes), 50
    if shape == (5, 3):
        each = np.repeat(scale[ids], 8, axis=1)
    else:
        each = np.broadcast_to(np.repeat(scale, 8, axis=1) if shape == (1, 3) else scale, (60, 24))[:rows]
    largest = 127 if dtype == "int8" else float(jnp.finfo(dtype).max)
    wide = np.clip(data[:rows].astype(np.float64) / each, -largest, largest)
    want = (np.round(wide) if dtype == "int8" else wide).astype(np.float32).astype(q.dtype)
    assert (np.abs(wide) == largest).any() == (dtype != "float8_e5m2")
    for got in (q.data, turned.data.mT):
        np.testing.assert_array_equal(np.asarray(got)[:rows].astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(q.dequantize().data[:rows], want.astype(np.float32) * each.astype(np.float32))
    program = str(jax.make_jaxpr(run)(x, given))
    assert ("reduce_max" in program) == (dtype == "int8")  # which looks for NaN


@pytest.mark.long
@pytest.mark.parametrize("scaling", [(2, 2), "column"])
def test_given_scales_of_one_axis(scaling: Any) -> None:
    """They broadcast from the right, as in NumPy, however a tensor is stored."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 4)), jnp.float32)
    scale = jnp.exp2(jnp.arange(-9.0, -7.0 if scaling == (2, 2) else -5.0))
    want = quantize(w, "float8_e4m3fn", scaling, scale=scale)
    got = quantize(GroupedTensor(w.mT).mT, "float8_e4m3fn", scaling, scale=scale)
    for each, other in ((got.scales, want.scales), (got.dequantize().data, want.dequantize().data)):
        np.testing.assert_array_equal(each, other)
    assert want.scales is not None
    np.testing.assert_array_equal(want.scales, jnp.broadcast_to(scale, want.scales.shape))


@pytest.mark.parametrize(
    "dtype, scaling", [("float8_e4m3fn", "row"), ("int8", "row"), ("float8_e5m2", "mx"), ("float4_e2m1fn", "nvfp4")]
)
def test_given_scales_out_of_range(dtype: str, scaling: str) -> None:
    """A traced scale that isn't positive, or that float32 flushes to 0, makes its own block NaN; a known one raises."""
    # The product of a tensor's scale and the smallest scale of a block is a normal number.
    least = 2.0**-121 if scaling == "nvfp4" else 1e-38
    wrong = np.array([0, -1, 1e-40, least, 1e38, np.inf, np.nan, -0.0], np.float32)
    x = np.random.default_rng(0).standard_normal((1, 16, 32)).astype(np.float32)
    run = jax.jit(lambda x, scale: quantize(x, dtype, scaling, scale=scale).dequantize().data)
    if scaling == "nvfp4":
        assert all(np.isnan(run(x, scale)).all() for scale in wrong) and not np.isnan(run(x, np.float32(0.01))).any()
    else:
        got = run(x, np.stack([wrong, np.full(8, 2.0**-6)], axis=1).reshape(1, 16, 1).astype(np.float32))
        assert np.isnan(got[:, ::2]).all()
        np.testing.assert_array_equal(got[:, 1::2], run(x, np.float32(2.0**-6))[:, 1::2])
        assert not np.isnan(run(x, np.float32(2.0**126))).any()  # the highest scale
    for scale in wrong:
        for call in (
            lambda scale=scale: quantize(x, dtype, scaling, scale=scale),
            lambda scale=scale: ragged.Cast(dtype, scaling, scale=scale),
        ):
            with pytest.raises(ValueError, match="`scale` is out of range"):
                call()


def test_a_given_scale_of_nvfp4() -> None:
    """It is the tensor's; blocks have their own."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 32)), jnp.float32)
    own = quantize(x, "float4_e2m1fn", "nvfp4")
    scale: Any = own.tensor_scale
    same, other = (quantize(x, "float4_e2m1fn", "nvfp4", scale=scale * s) for s in (1, 2))
    np.testing.assert_array_equal(same.dequantize().data, own.dequantize().data)
    assert other.tensor_scale == 2 * scale
    power = quantize(x, "float4_e2m1fn", "nvfp4", scale=0.3, power_of_two=True).tensor_scale
    assert power == 0.5
    for_blocks = [np.asarray(q.scales).astype(np.float32) for q in (other, own)]
    np.testing.assert_array_equal(2 * for_blocks[0], for_blocks[1])


LARGEST = {"int8": 127, "int4": 7, "float8_e4m3fn": 448, "float8_e5m2": 57344, "float4_e2m1fn": 6, "nvfp4": 6 * 448}


def test_a_given_largest_value() -> None:
    """It is mapped to the largest value of the dtype, or, of nvfp4, of the dtype and its scales."""
    for name, largest in LARGEST.items():
        form: Any = ("float4_e2m1fn", "nvfp4") if name == "nvfp4" else (name, "tensor")
        assert ragged.Cast(*form, amax=3.0).scale == 3.0 / largest
