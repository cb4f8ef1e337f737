"""The contract that all backends share. Each backend's `test_contract.py` has a subclass, which runs these tests.

The backend is the one that the platform's products run on: no test names one.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from tests import cases, oracle
from tests.cases import LETTERS, NAMES, SPREADS, TOLERANCE, check, small, spread

UNSIGNED = [np.uint32(2**32 - 1), np.uint32(2**32 - 2), np.uint32(2**31), np.uint8(255)]
BEYOND_INT32 = [np.int64(2**40), np.int64(-(2**32)), np.array(2**32 + 1), np.uint64(2**64 - 1), 2**40, -(2**70)]

SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(("lhs", "dims", "rhs"), n)]
MAPPED = [
    *itertools.product(["forward", "wgrad"], SUBSETS),
    *(("outer", mapped) for mapped in (("lhs",), ("dims",), ("lhs", "rhs"))),
    *((layout, ("lhs",)) for layout in NAMES if layout not in ("forward", "wgrad", "outer")),
]


def operands(
    g: int = 5, m: int = 70, k: int = 9, n: int = 11, kind: str = "zipf", total: int = 60, dtype: Any = np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """lhs [m, k] and dout [m, n] with NaN tails, rhs [g, k, n], sizes (g,)."""
    rng = np.random.default_rng(0)
    lhs, dout = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((m, n)).astype(dtype)
    lhs[total:], dout[total:] = np.nan, np.nan
    return lhs, rng.standard_normal((g, k, n)).astype(dtype), dout, spread(rng, kind, g, total)


def rows(x: np.ndarray, sizes: np.ndarray) -> oracle.Groups:
    return oracle.unpack(np.asarray(x), (True, False), sizes.tolist(), [x.shape[1]] * len(sizes))


def check_vmap(layout: str, mapped: tuple[str, ...], dtype: str, atol: float) -> None:
    """`Contract.test_vmap_of_any_subset`, in any precision."""
    batch = [small(layout, seed=seed, dtype=dtype) for seed in range(3)]
    widest = {side: [max(getattr(c, side).shape[axis] for c in batch) for axis in (-2, -1)] for side in ("lhs", "rhs")}

    def pad(x: GroupedTensor, side: str) -> Array:
        # Ragged-both operands are as wide as their own widest group: bring them to one shape.
        (rows, columns), data = widest[side], x.data
        padding = [(0, 0)] * (data.ndim - 2) + [(0, rows - data.shape[-2]), (0, columns - data.shape[-1])]
        return jnp.pad(data, padding, constant_values=jnp.nan)

    def pick(what: str, get: Callable[[cases.Case], Any]) -> tuple[Any, int | None]:
        """The mapped values stacked, or the first one's."""
        values = [get(case) for case in batch]
        if what not in mapped or values[0] is None:
            return values[0], None
        return jnp.stack(values), 0

    letters = LETTERS[layout]
    if not letters and "dims" in mapped:
        pytest.skip("the batched layout has no dims to map")
    inputs, axes = zip(
        pick("lhs", lambda c: pad(c.lhs, "lhs")),
        pick("rhs", lambda c: pad(c.rhs, "rhs")),
        *[pick("dims", lambda c, letter=letter: jnp.asarray(c.sizes[letter])) for letter in letters],
        strict=True,
    )

    def product(lhs: Array, rhs: Array, *dims: Array) -> Array:
        of = dict(zip(letters, dims, strict=True))
        x, y = GroupedTensor(lhs, of.get("m"), of.get("k")), GroupedTensor(rhs, of.get("k"), of.get("n"))
        return jnp.sin(ragged.matmul(x, y).data)

    def loss(*args: Array) -> Array:
        out = product(*args)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    def element(i: int) -> list[Array]:
        return [x if axis is None else x[i] for x, axis in zip(inputs, axes, strict=True)]

    got = jax.vmap(product, in_axes=axes)(*inputs)
    want = jnp.stack([product(*element(i)) for i in range(3)])
    np.testing.assert_allclose(got, want, atol=atol / 10)

    inside = jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=axes)(*inputs)
    outside = jax.grad(lambda lhs, rhs: jax.vmap(loss, in_axes=axes)(lhs, rhs, *inputs[2:]).sum(), argnums=(0, 1))(
        inputs[0], inputs[1]
    )
    loop = [jax.grad(loss, argnums=(0, 1))(*element(i)) for i in range(3)]
    for which in (0, 1):
        each = jnp.stack([g[which] for g in loop])
        np.testing.assert_allclose(inside[which], each, atol=atol)
        np.testing.assert_allclose(outside[which], each if axes[which] == 0 else each.sum(0), atol=atol)


class Contract:
    """Products of `ragged.matmul` and of the functions of plain arrays, on one backend."""

    @pytest.mark.parametrize("unsigned", [False, True])
    @pytest.mark.parametrize("transpose_rhs", [False, True])
    @pytest.mark.parametrize("kind", SPREADS)
    def test_grouped_matmul(self, kind: str, transpose_rhs: bool, unsigned: bool) -> None:
        """Either orientation of rhs; int32 and uint32 sizes; the tail comes out zero."""
        lhs, rhs, _, sizes = operands(kind=kind)
        group_sizes = jnp.asarray(sizes, jnp.uint32 if unsigned else jnp.int32)
        given = jnp.asarray(rhs.swapaxes(1, 2) if transpose_rhs else rhs)
        out = np.asarray(ragged.grouped_matmul(jnp.asarray(lhs), given, group_sizes, transpose_rhs=transpose_rhs))
        oracle.assert_close(rows(out, sizes), oracle.matmul(rows(lhs, sizes), list(rhs)), max=2e-5)
        assert np.array_equal(out[60:], np.zeros((10, 11)))

    @pytest.mark.parametrize("kind", SPREADS)
    def test_transposed_grouped_matmul(self, kind: str) -> None:
        """An empty group gives zeros."""
        lhs, _, dout, sizes = operands(kind=kind)
        out = ragged.transposed_grouped_matmul(jnp.asarray(lhs.T), jnp.asarray(dout), jnp.asarray(sizes))
        want = oracle.matmul([x.T for x in rows(lhs, sizes)], rows(dout, sizes))
        oracle.assert_close(list(np.asarray(out)), want, max=2e-5)
        assert np.array_equal(np.asarray(out)[sizes == 0], np.zeros((int((sizes == 0).sum()), 9, 11)))

    def test_fewer_matrices_than_sizes_are_a_shard(self) -> None:
        """Without an offset the first groups; rows of the others are zero."""
        lhs, rhs, dout, sizes = operands(kind="even")
        x, w, dy, group_sizes = map(jnp.asarray, (lhs, rhs, dout, sizes))
        out = np.asarray(ragged.grouped_matmul(x, w[:2], group_sizes))
        want = oracle.matmul(rows(lhs, sizes), [w if i < 2 else 0 * w for i, w in enumerate(rhs)])
        oracle.assert_close(rows(out, sizes), want, max=2e-5)
        out = np.asarray(ragged.grouped_matmul(x, w[2:4], group_sizes, group_offset=jnp.int32(2)))
        want = oracle.matmul(rows(lhs, sizes), [w if i in (2, 3) else 0 * w for i, w in enumerate(rhs)])
        oracle.assert_close(rows(out, sizes), want, max=2e-5)
        shard: dict[str, Any] = {"group_offset": jnp.int32(1), "num_actual_groups": 3}
        out = ragged.transposed_grouped_matmul(x.T, dy, group_sizes, **shard)
        want = oracle.matmul([x.T for x in rows(lhs, sizes)], rows(dout, sizes))[1:4]
        oracle.assert_close(list(np.asarray(out)), want, max=2e-5)

    def test_gradients_equal_the_definition(self) -> None:
        """By both operands, of both functions."""
        lhs, rhs, dout, sizes = operands()
        x, w, dy, group_sizes = map(jnp.asarray, (lhs, rhs, dout, sizes))
        forward = oracle.matmul(rows(lhs, sizes), list(rhs))
        dgrad = oracle.matmul(rows(dout, sizes), [w.T for w in rhs])
        wgrad = oracle.matmul([x.T for x in rows(lhs, sizes)], rows(dout, sizes))
        _, pull = jax.vjp(lambda a, b: ragged.grouped_matmul(a, b, group_sizes), x, w)
        d_lhs, d_rhs = map(np.asarray, pull(dy))
        oracle.assert_close(rows(d_lhs, sizes), dgrad, max=2e-5)
        oracle.assert_close(list(d_rhs), wgrad, max=2e-5)
        assert np.array_equal(d_lhs[60:], np.zeros((10, 9)))
        _, pull = jax.vjp(lambda a, b: ragged.transposed_grouped_matmul(a, b, group_sizes), x.T, dy)
        d_lhs, d_rhs = map(np.asarray, pull(w))
        oracle.assert_close(rows(d_lhs.T, sizes), dgrad, max=2e-5)
        oracle.assert_close(rows(d_rhs, sizes), forward, max=2e-5)
        assert np.array_equal(d_lhs.T[60:], np.zeros((10, 9)))

    @pytest.mark.parametrize("lhs_last, rhs_last", [(True, False), (False, True), (True, True)])
    @pytest.mark.parametrize("layout", NAMES)
    def test_operands_seen_through_mT(self, layout: str, lhs_last: bool, rhs_last: bool) -> None:
        """The transpose of an operand is part of its type; a ragged-both operand may be packed along either axis."""
        case = cases.make(layout, g=5, lhs_packed_last=lhs_last, rhs_packed_last=rhs_last)
        out = ragged.matmul(case.lhs, case.rhs)
        check(case, out)
        # (a b).mT = b.mT a.mT
        swapped = ragged.matmul(case.rhs.mT, case.lhs.mT).mT
        got = [np.asarray(group) for group in swapped.to_list()]
        worst, rms = TOLERANCE["float32"]
        oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=worst, rms=rms)

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
    def test_dtypes(self, layout: str, dtype: str, result: str) -> None:
        """What comes out of each dtype by default, and how exact it is."""
        if dtype in ("int16", "int32"):
            # Small values: sums of products over their full range leave int32, in any library.
            case = cases.make(layout, dtype="int8")
            case.lhs, case.rhs = case.lhs.astype(dtype), case.rhs.astype(dtype)
        else:
            case = cases.make(layout, dtype=dtype)
        out = ragged.matmul(case.lhs, case.rhs)
        assert out.dtype == jnp.dtype(result)
        check(case, out)

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
    def test_mixed_dtypes(self, layout: str, lhs_dtype: str, rhs_dtype: str, result: str) -> None:
        left, right = cases.make(layout, dtype=lhs_dtype), cases.make(layout, dtype=rhs_dtype)
        out = ragged.matmul(left.lhs, right.rhs)
        assert out.dtype == jnp.dtype(result)
        worst, rms = TOLERANCE[result]
        got = left.unpack(np.asarray(out.data).astype(np.float64))
        oracle.assert_close(got, oracle.matmul(left.lhs_groups, right.rhs_groups), max=worst, rms=rms)

    @pytest.mark.parametrize("layout", ["forward", "wgrad"])
    def test_int8_is_exact_over_the_full_range(self, layout: str) -> None:
        """K = 4000 products of -128..127, past 2**24, where float32 is no longer exact."""
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
            x, y = GroupedTensor(jnp.asarray(lhs.T), last_dims=dims), GroupedTensor(jnp.asarray(rhs), dims)
            out = ragged.matmul(x, y).data[0]
        assert out.dtype == jnp.int32
        assert np.array_equal(np.asarray(out), want)

    @pytest.mark.parametrize("layout", NAMES)
    def test_preferred_element_type(self, layout: str) -> None:
        """The accumulator is float32 whatever the operands are, and is rounded once."""
        case = cases.make(layout, dtype="bfloat16")
        out = ragged.matmul(case.lhs, case.rhs, preferred_element_type=jnp.float32)
        got = case.unpack(np.asarray(out.data))
        oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=2e-5)
        rounded = ragged.matmul(case.lhs, case.rhs)
        assert np.array_equal(np.asarray(out.data.astype(jnp.bfloat16)), np.asarray(rounded.data))

    @pytest.mark.parametrize("layout", NAMES)
    def test_existing_out(self, layout: str) -> None:
        """Added before rounding; its own tail, NaN here, comes out zero; its gradient is the identity on real
        elements."""
        case = cases.make(layout)
        product = ragged.matmul(case.lhs, case.rhs)
        rng = np.random.default_rng(5)
        existing = jnp.asarray(rng.standard_normal(product.shape), jnp.float32)
        poisoned = product.with_data(jnp.where(product.mask, existing, jnp.nan))
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
        zero = case.lhs.with_data(jnp.zeros_like(case.lhs.data))
        pull = jax.linear_transpose(lambda e: ragged.matmul(zero, case.rhs, existing_out=e).data, existing)
        (ct,) = pull(existing + 1)
        np.testing.assert_allclose(ct, np.where(mask, existing + 1, 0))
        batch = jnp.stack([existing, 2 * existing])
        mapped = jax.vmap(lambda e: ragged.matmul(case.lhs, case.rhs, existing_out=e).data)(batch)
        np.testing.assert_allclose(mapped[1], np.where(mask, product.data + 2 * existing, 0), atol=2e-5)

    def test_existing_out_is_added_in_the_accumulator(self) -> None:
        """1 + 2**-9 is lost in bfloat16 if the product is rounded before it is added to."""
        x = GroupedTensor(jnp.full((4, 1), 1 + 2**-7, jnp.bfloat16), first_dims=jnp.array([4], jnp.int32))
        w = jnp.full((1, 1, 1), 1 + 2**-7, jnp.bfloat16)  # the product is 1 + 2**-6 + 2**-14
        existing = jnp.full((4, 1), 2**-8, jnp.bfloat16)
        out = ragged.matmul(x, w, existing_out=existing)
        want = np.float32((1 + 2**-7) ** 2 + 2**-8).astype(jnp.bfloat16)
        assert np.array_equal(np.asarray(out.data), np.full((4, 1), want))
        assert want != np.asarray((x.data * w[0]).astype(jnp.bfloat16) + existing)[0, 0]

    @pytest.mark.parametrize("layout", NAMES)
    def test_a_float_that_integers_are_added_to(self, layout: str) -> None:
        """Halves survive the integer accumulator."""
        case = cases.make(layout, dtype="int8")
        bare = ragged.matmul(case.lhs, case.rhs, preferred_element_type=jnp.float32)
        halves = bare.map(lambda data: jnp.full_like(data, 0.5))
        out = ragged.matmul(case.lhs, case.rhs, preferred_element_type=jnp.float32, existing_out=halves)
        assert np.array_equal(np.asarray(out.data), np.asarray(bare.data) + np.asarray(halves.data))

    @pytest.mark.parametrize("offset", [-9, -2, 0, 1, 3, 5, 2**31 - 1, -(2**31)])
    @pytest.mark.parametrize("layout", ["forward", "forward_left", "wgrad"])
    def test_group_offset(self, layout: str, offset: int) -> None:
        """A shard of 3 of 5 groups; also offsets past either end, which hold fewer groups or none."""
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
        offsets = jnp.array([0, 2], jnp.int32)
        mapped = jax.vmap(lambda o: ragged.matmul(case.lhs, case.rhs, group_offset=o).data)(offsets)
        assert np.array_equal(mapped[0], ragged.matmul(case.lhs, case.rhs).data)

    @pytest.mark.parametrize("offset", [*map(jnp.asarray, UNSIGNED), *BEYOND_INT32], ids=repr)
    def test_an_offset_never_wraps_around(self, offset: Any) -> None:
        """Far outside of the groups, in any dtype, NumPy's and Python's integers too, it meets none of them."""
        case = cases.make("forward", g=4, kind="even")
        out = ragged.matmul(case.lhs, case.rhs.data[:3], group_offset=offset)
        assert np.array_equal(np.asarray(out.data), np.zeros(out.shape))

    @pytest.mark.parametrize("layout", NAMES)
    def test_same_bits_every_time(self, layout: str) -> None:
        case = cases.make(layout, g=8, capacity=640, uniform=(130, 140, 150))
        want = np.asarray(ragged.matmul(case.lhs, case.rhs).data)
        for _ in range(3):
            jax.clear_caches()
            assert np.array_equal(np.asarray(ragged.matmul(case.lhs, case.rhs).data), want)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("layout", NAMES)
    def test_what_is_not_finite_stays_in_its_group(self, layout: str, value: float) -> None:
        """Poison one group of one operand; other groups' results and gradients keep their bits."""
        case = cases.make(layout, g=4, kind="even")
        poisoned_group = 1

        def run(lhs_groups: oracle.Groups, rhs_groups: oracle.Groups) -> list[oracle.Groups]:
            letters = LETTERS[layout]
            lhs = cases.tensor(lhs_groups, ("m" in letters, "k" in letters), 96, 30)
            rhs = cases.tensor(rhs_groups, ("k" in letters, "n" in letters), 96, 30)

            def product(a: Array, b: Array) -> Array:
                x, y = GroupedTensor(a, lhs.first_dims, lhs.last_dims), GroupedTensor(b, rhs.first_dims, rhs.last_dims)
                return ragged.matmul(x, y).data

            out, pull = jax.vjp(product, lhs.data, rhs.data)
            d_lhs, d_rhs = pull(jnp.ones_like(out))
            sizes = {letter: case.sizes[letter].tolist() for letter in "mkn"}
            return [
                case.unpack(np.asarray(out)),
                oracle.unpack(np.asarray(d_lhs), lhs.ragged, sizes["m"], sizes["k"]),
                oracle.unpack(np.asarray(d_rhs), rhs.ragged, sizes["k"], sizes["n"]),
            ]

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
    def test_nan_weights_of_an_empty_group(self, layout: str) -> None:
        """Nothing reads them, and they get a zero gradient."""
        case = cases.make(layout, g=4, kind="half_empty")
        letter = LETTERS[layout]
        empty = np.flatnonzero(case.sizes[letter] == 0)
        assert empty.size
        uniform = (case.rhs if layout == "forward" else case.lhs).data.at[empty].set(jnp.nan)

        def product(uniform: Array) -> Array:
            if layout == "forward":
                return ragged.matmul(case.lhs, uniform).data
            return ragged.matmul(uniform, case.rhs).data

        got = case.unpack(np.asarray(product(uniform)))
        oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=2e-5)
        grad = np.asarray(jax.grad(lambda w: jnp.sum(product(w) ** 2))(uniform))
        assert np.array_equal(grad[empty], np.zeros_like(grad[empty]))
        assert np.isfinite(grad).all()

    @pytest.mark.parametrize(
        "dims", [[3, -2, 4], [5, 100, 2], [2**31 - 1, 2**31 - 1, 5], [-5, -5, -5], [0, 0, 0], [2, 30, -(2**31)]]
    )
    @pytest.mark.parametrize("layout", [name for name in NAMES if name != "batched"])
    def test_wrong_sizes_never_leave_the_buffers(self, layout: str, dims: list[int]) -> None:
        """A negative size counts as 0; what is past a buffer's capacity, or wider than it, is cut off. Of a letter
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
            starts = (begin[term, axis][i] for axis in (0, 1))
            return data[tuple(slice(at, at + held[x][i]) for at, x in zip(starts, term, strict=True))]

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

    @pytest.mark.parametrize("layout, mapped", MAPPED)
    def test_vmap_of_any_subset(self, layout: str, mapped: tuple[str, ...]) -> None:
        """Values and gradients equal those of a loop; gradients taken inside and outside of the map."""
        check_vmap(layout, mapped, "float32", 1e-5)

    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("layout", NAMES)
    def test_shard_map(self, layout: str, check_vma: bool) -> None:
        """Each device has its own lhs and dims; rhs is shared, and its cotangent is summed over devices."""
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        split, whole = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
        case = small(layout, dtype="float32")
        rng = np.random.default_rng(0)
        lhs = jnp.asarray(rng.standard_normal((4, *case.lhs.shape)), jnp.float32)
        rhs = jnp.asarray(rng.standard_normal(case.rhs.shape), jnp.float32)

        def product(a: Array, b: Array) -> Array:
            x = GroupedTensor(a[0], case.lhs.first_dims, case.lhs.last_dims)
            return jnp.sin(ragged.matmul(x, GroupedTensor(b, case.rhs.first_dims, case.rhs.last_dims)).data)[None]

        sharded = jax.shard_map(product, mesh=mesh, in_specs=(split, whole), out_specs=split, check_vma=check_vma)
        want = jnp.concatenate([product(a[None], rhs) for a in lhs])
        np.testing.assert_allclose(jax.jit(sharded)(lhs, rhs), want, atol=1e-5)
        got = jax.jit(jax.grad(lambda a, b: sharded(a, b).sum(), argnums=(0, 1)))(lhs, rhs)
        wanted = jax.grad(lambda a, b: sum(product(x[None], b).sum() for x in a), argnums=(0, 1))(lhs, rhs)
        for g, w in zip(got, wanted, strict=True):
            np.testing.assert_allclose(g, w, atol=1e-4)

    @pytest.mark.sampled(default=False)
    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("jit", [True, False])
    def test_experts_over_a_mesh(self, jit: bool, check_vma: bool) -> None:
        """Groups sharded over a mesh axis: each device's offset comes from its place; a sum puts rows together."""
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        case = cases.make("forward", g=8, kind="zipf")

        def rows(x: GroupedTensor, w: Array) -> Array:
            offset = jax.lax.axis_index("d") * len(w)
            return jax.lax.psum(ragged.matmul(x, w, group_offset=offset).data, "d")

        sharded = jax.shard_map(rows, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec(), check_vma=check_vma)
        run = jax.jit(sharded) if jit else sharded
        want = ragged.matmul(case.lhs, case.rhs).data
        np.testing.assert_allclose(run(case.lhs, case.rhs.data), want, atol=1e-5)

        def loss(fn: Callable[..., Array], x: Array, w: Array) -> Array:
            return jnp.sum(jnp.sin(fn(case.lhs.with_data(x), w)))

        got = jax.grad(lambda *args: loss(run, *args), argnums=(0, 1))(case.lhs.data, case.rhs.data)
        wanted = jax.grad(lambda *args: loss(lambda x, w: ragged.matmul(x, w).data, *args), argnums=(0, 1))(
            case.lhs.data, case.rhs.data
        )
        for g, w in zip(got, wanted, strict=True):
            np.testing.assert_allclose(g, w, atol=1e-4)
