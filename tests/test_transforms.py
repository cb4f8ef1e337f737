"""Every JAX transformation of `ragged.matmul`, in all eight layouts."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor

from . import cases, oracle, products
from .cases import LETTERS, NAMES, TOLERANCE

pytestmark = pytest.mark.sampled


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def small(layout: str, dtype: str = "float64", seed: int = 0, **kwargs: Any) -> cases.Case:
    return cases.make(layout, g=3, kind="zipf", capacity=12, uniform=(4, 3, 2), dtype=dtype, seed=seed, **kwargs)


def loss_of(case: cases.Case, **options: Any) -> Callable[[Array, Array], Array]:
    """A scalar function of the two buffers, not linear in either."""

    def loss(lhs: Array, rhs: Array) -> Array:
        out = ragged.matmul(
            GroupedTensor(lhs, case.lhs.first_dims, case.lhs.last_dims, transposed=case.lhs.transposed),
            GroupedTensor(rhs, case.rhs.first_dims, case.rhs.last_dims, transposed=case.rhs.transposed),
            **options,
        )
        weights = jnp.cos(jnp.arange(out.data.size, dtype=out.dtype)).reshape(out.shape)
        return jnp.sum(jnp.sin(out.data) * weights)

    return loss


def directions(case: cases.Case, seed: int) -> list[Array]:
    """A random direction for each operand, also in the tails, where it must not matter."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (case.lhs, case.rhs)]


def dot(xs: Any, ys: Any) -> Array:
    return sum((jnp.vdot(x, y) for x, y in zip(xs, ys, strict=True)), start=jnp.zeros((), xs[0].dtype))


@pytest.mark.parametrize("packed_last", [False, True])
@pytest.mark.parametrize("layout", NAMES)
def test_first_derivatives_equal_finite_differences(layout: str, packed_last: bool, x64: None) -> None:
    """T3, B1, B4, O16: forward and reverse mode, by each operand, with NaN in the tails."""
    case = small(layout, lhs_packed_last=packed_last, rhs_packed_last=packed_last)
    loss, args = loss_of(case), [case.lhs.data, case.rhs.data]
    grads = jax.grad(loss, argnums=(0, 1))(*args)
    h = 1e-5
    for which, operand in enumerate((case.lhs, case.rhs)):
        direction = [jnp.zeros_like(x) for x in args]
        direction[which] = directions(case, seed=1)[which]
        ahead, behind = ([a + s * d for a, d in zip(args, direction, strict=True)] for s in (h, -h))
        differences = (loss(*ahead) - loss(*behind)) / (2 * h)
        _, forward = jax.jvp(loss, args, direction)
        scale = float(jnp.linalg.norm(grads[which]) * jnp.linalg.norm(direction[which]))
        assert abs(float(forward - differences)) <= 1e-6 * scale
        assert abs(float(jnp.vdot(grads[which], direction[which]) - differences)) <= 1e-6 * scale
        assert scale > 0
        outside = ~np.asarray(operand.mask)
        assert np.array_equal(np.asarray(grads[which])[outside], np.zeros(outside.sum())), "a gradient's tail is zero"


@pytest.mark.long
@pytest.mark.parametrize("layout", NAMES)
def test_hessian_vector_products_agree(layout: str, x64: None) -> None:
    """B2: forward over reverse, reverse over reverse, reverse over forward, and differences of gradients."""
    case = small(layout)
    loss, args = loss_of(case), [case.lhs.data, case.rhs.data]
    direction = directions(case, seed=2)
    grad = jax.grad(loss, argnums=(0, 1))
    _, forward_reverse = jax.jvp(grad, args, direction)
    reverse_reverse = jax.grad(lambda *xs: dot(grad(*xs), direction), argnums=(0, 1))(*args)
    reverse_forward = jax.grad(lambda *xs: jax.jvp(loss, xs, tuple(direction))[1], argnums=(0, 1))(*args)
    h = 1e-5
    ahead, behind = (grad(*[a + s * d for a, d in zip(args, direction, strict=True)]) for s in (h, -h))
    for which in (0, 1):
        want = (ahead[which] - behind[which]) / (2 * h)
        scale = float(jnp.max(jnp.abs(want)))
        assert scale > 0
        for got in (forward_reverse, reverse_reverse, reverse_forward):
            assert float(jnp.max(jnp.abs(got[which] - want))) <= 1e-6 * scale


@pytest.mark.long
def test_hessian_is_symmetric_and_full(x64: None) -> None:
    """B2: the Hessian of a wgrad, all of it."""
    case = cases.make("wgrad", g=2, capacity=4, uniform=(2, 0, 2), dtype="float64")
    loss, args = loss_of(case), [case.lhs.data, case.rhs.data]
    hessian = jax.hessian(loss, argnums=(0, 1))(*args)
    blocks = [[np.asarray(hessian[i][j]).reshape(8, 8) for j in (0, 1)] for i in (0, 1)]
    full = np.block(blocks)
    assert np.abs(full).max() > 0
    np.testing.assert_allclose(full, full.T, atol=1e-12)


SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(("lhs", "dims", "rhs"), n)]


@pytest.mark.parametrize("mapped", SUBSETS, ids="+".join)
@pytest.mark.parametrize("layout", NAMES)
def test_vmap_of_any_subset(layout: str, mapped: tuple[str, ...], x64: None) -> None:
    """B3: values and gradients equal those of a loop; gradients taken inside and outside of the map."""
    check_vmap(layout, mapped, "float64", 1e-12)


def check_vmap(layout: str, mapped: tuple[str, ...], dtype: str, atol: float) -> None:
    batch = [small(layout, seed=seed, dtype=dtype) for seed in range(3)]
    widest = {side: [max(getattr(c, side).shape[axis] for c in batch) for axis in (-2, -1)] for side in ("lhs", "rhs")}

    def pad(x: GroupedTensor, side: str) -> Array:
        # Ragged-both operands are as wide as their own widest group: bring them to one shape.
        (rows, columns), data = widest[side], x.data
        return jnp.pad(
            data,
            [(0, 0)] * (data.ndim - 2) + [(0, rows - data.shape[-2]), (0, columns - data.shape[-1])],
            constant_values=jnp.nan,
        )

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
        out = ragged.matmul(
            GroupedTensor(lhs, of.get("m"), of.get("k")),
            GroupedTensor(rhs, of.get("k"), of.get("n")),
        )
        return jnp.sin(out.data)

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


@pytest.mark.long
@pytest.mark.parametrize("layout", NAMES)
def test_nested_vmap(layout: str, x64: None) -> None:
    """B3: two maps, of different operands and of the same; and a gradient that sums over one of them."""
    case = small(layout)
    rng = np.random.default_rng(3)
    lhs = jnp.asarray(rng.standard_normal((2, *case.lhs.shape)))
    rhs = jnp.asarray(rng.standard_normal((3, *case.rhs.shape)))

    def product(a: Array, b: Array) -> Array:
        return ragged.matmul(
            GroupedTensor(a, case.lhs.first_dims, case.lhs.last_dims),
            GroupedTensor(b, case.rhs.first_dims, case.rhs.last_dims),
        ).data

    want = jnp.stack([jnp.stack([product(a, b) for b in rhs]) for a in lhs])
    each_pair = jax.vmap(jax.vmap(product, (None, 0)), (0, None))
    np.testing.assert_allclose(each_pair(lhs, rhs), want, atol=1e-13)
    both = jax.vmap(jax.vmap(product, (0, None), out_axes=1), (None, 0), out_axes=1)(lhs, rhs)
    np.testing.assert_allclose(both, jnp.moveaxis(want, (0, 1, 2), (2, 1, 0)), atol=1e-13)

    def loss(a: Array, b: Array) -> Array:
        return jnp.sum(jnp.sin(each_pair(a, b)))

    def slow_loss(a: Array, b: Array) -> Array:
        return sum((jnp.sum(jnp.sin(product(x, y))) for x in a for y in b), start=jnp.zeros(()))

    for got, wanted in zip(jax.grad(loss, (0, 1))(lhs, rhs), jax.grad(slow_loss, (0, 1))(lhs, rhs), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-12)
    # A map over a gradient that itself sums over a map.
    summed = jax.vmap(jax.grad(lambda b, a: jnp.sum(jnp.sin(jax.vmap(product, (0, None))(a, b)))), (0, None))(rhs, lhs)
    np.testing.assert_allclose(summed, jax.grad(slow_loss, 1)(lhs, rhs), atol=1e-12)


@pytest.mark.parametrize("which", ["forward", "wgrad"])
def test_a_sum_over_a_batch_is_rounded_once(which: str) -> None:
    """256 + 1 - 256 is 1; with each batch element rounded to bfloat16 by itself, it would be 0."""
    dims = jnp.array([2], jnp.int32)
    ones = jnp.ones((2, 2), jnp.bfloat16)
    batch = jnp.array([[[256, 1], [256, 1]], [[-256, 0], [-256, 0]]], jnp.bfloat16)

    def loss(shared: Array) -> Array:
        if which == "forward":  # shared rows, batched weights: [2, 2] x [b, 1, 2, 2]
            out = jax.vmap(lambda w: ragged.matmul(GroupedTensor(shared, dims), w[None]).data)(batch)
            return jnp.sum(out)
        out = jax.vmap(lambda x: ragged.matmul(GroupedTensor(x, dims), shared[None]).data)(batch.mT)
        return jnp.sum(out)

    np.testing.assert_array_equal(np.asarray(jax.grad(loss)(ones)), np.ones((2, 2)))


ORDERS = list(itertools.product(("mk", "km"), ("kn", "nk"), ("mn", "nm")))
EXTENTS = [
    {"b": b, "g": g, **dict(zip("mkn", mkn, strict=True))}
    for b, g, mkn in itertools.product((1, 3), (1, 4), ((1, 64, 6), (5, 64, 1), (64, 64, 6), (64, 1, 6), (5, 7, 6)))
]


def check_batched(
    axes: tuple[str, str, str], mapped: tuple[bool, bool], dtypes: tuple[str, str, str], extent: dict[str, int]
) -> None:
    """XLA's product of `dtypes` (of both operands and the result), of which those `mapped` have a batch axis."""
    lhs_dtype, rhs_dtype, result = dtypes
    rng, most = np.random.default_rng(0), 1 if result == "int8" else 8
    specs = [("bg" if has else "g") + term for has, term in zip((*mapped, any(mapped)), axes, strict=True)]
    lhs, rhs = (rng.integers(-most, most, [extent[x] for x in spec], endpoint=True) for spec in specs[:2])
    product = jax.jit(partial(products.batched_matmul, "xla", axes=axes, preferred_element_type=jnp.dtype(result)))
    out = product(jnp.asarray(lhs, lhs_dtype), jnp.asarray(rhs, rhs_dtype))
    want = np.einsum(f"{specs[0]},{specs[1]}->{specs[2]}", lhs.astype(np.float64), rhs)
    assert (out.shape, out.dtype) == (want.shape, result)
    worst, rms = TOLERANCE.get(result, (0, 0))
    oracle.assert_close([np.asarray(out)], [want], max=worst, rms=rms)


@pytest.mark.parametrize("mapped", [(True, False), (False, True), (True, True)])
def test_uniform_bfloat16_in_every_order(mapped: tuple[bool, bool]) -> None:
    """B3: XLA's CPU backend runs no dot of bfloat16s of which one operand has two kept letters."""
    for axes in ORDERS:
        check_batched(axes, mapped, ("bfloat16", "bfloat16", "bfloat16"), {"b": 4, "g": 8, "m": 8, "k": 64, "n": 32})


@pytest.mark.parametrize(
    "dtypes",
    [
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "int8", "bfloat16"),
        ("float8_e4m3fn", "float8_e5m2", "bfloat16"),
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "float16"),
        ("int8", "int8", "int8"),
        ("bfloat16", "bfloat16", "int8"),
    ],
    ids="-".join,
)
def test_uniform_dtypes_mapped_over_lhs(dtypes: tuple[str, str, str]) -> None:
    """B3, O11: what the CPU multiplies as bfloat16, and results of every kind."""
    check_batched(("mk", "kn", "mn"), (True, False), dtypes, {"b": 4, "g": 8, "m": 8, "k": 64, "n": 32})


@pytest.mark.sampled(0)
@pytest.mark.parametrize("mapped", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("axes", ORDERS, ids="-".join)
def test_uniform_bfloat16_of_every_extent(axes: tuple[str, str, str], mapped: tuple[bool, bool]) -> None:
    """B3: all orders of letters, all subsets of mapped operands, extents of one, of a few and of many."""
    for extent in EXTENTS:
        check_batched(axes, mapped, ("bfloat16", "bfloat16", "float32"), extent)


def test_uniform_bfloat16_derivatives_mapped_over_lhs() -> None:
    """B2, B3: gradients and a Hessian-vector product of a map over `lhs` alone equal those of a loop in float32."""
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16) for shape in ((3, 2, 4, 16), (2, 16, 8)))

    def product(lhs: Array, rhs: Array) -> Array:
        return ragged.matmul(GroupedTensor(lhs), GroupedTensor(rhs)).data

    def mapped(lhs: Array, rhs: Array) -> Array:
        return jnp.sum(jax.vmap(product, (0, None))(lhs, rhs).astype(jnp.float32) ** 2)

    # d/dlhs = 2 (lhs @ rhs) @ rhs.T, by hand in float64, for integers that bfloat16 holds exactly.
    x, w = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    y = np.einsum("bgmk,gkn->bgmn", x, w)
    by_lhs, by_rhs = jax.grad(mapped, (0, 1))(lhs, rhs)
    worst, rms = TOLERANCE["bfloat16"]
    oracle.assert_close([np.asarray(by_lhs)], [2 * np.einsum("bgmn,gkn->bgmk", y, w)], max=worst, rms=rms)
    oracle.assert_close([np.asarray(by_rhs)], [2 * np.einsum("bgmn,bgmk->gkn", y, x)], max=worst, rms=rms)
    # The derivative of the gradient by `lhs` along `lhs` itself is the gradient: the loss is quadratic.
    _, along = jax.jvp(lambda lhs: jax.grad(mapped)(lhs, rhs), (lhs,), (lhs,))
    oracle.assert_close([np.asarray(along)], [2 * np.einsum("bgmn,gkn->bgmk", y, w)], max=worst, rms=rms)


@pytest.mark.parametrize("layout", NAMES)
def test_jit_scan_and_remat(layout: str) -> None:
    case = small(layout, dtype="float32")
    loss, args = loss_of(case), (case.lhs.data, case.rhs.data)
    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(*args)

    jitted = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*args)
    remat = jax.value_and_grad(jax.checkpoint(loss), argnums=(0, 1))(*args)

    def scanned(lhs: Array, rhs: Array) -> Array:
        # The same product twice, dims and all scanned over; the second one's rhs is reached by a carry.
        stacked = jax.tree.map(lambda x: jnp.stack([x, x]), case.lhs._replace_data(lhs))

        def step(carry: tuple[Array, Array], x: GroupedTensor) -> tuple[tuple[Array, Array], None]:
            total, rhs = carry
            y = GroupedTensor(rhs, case.rhs.first_dims, case.rhs.last_dims)
            out = ragged.matmul(x, y)
            weights = jnp.cos(jnp.arange(out.data.size, dtype=out.dtype)).reshape(out.shape)
            return (total + jnp.sum(jnp.sin(out.data) * weights), rhs), None

        return jax.lax.scan(step, (jnp.zeros(()), rhs), stacked)[0][0] / 2

    scan = jax.value_and_grad(scanned, argnums=(0, 1))(*args)
    for other in (jitted, remat, scan):
        np.testing.assert_allclose(other[0], value, rtol=1e-5)
        for got, want in zip(other[1], grads, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_grouped_tensors_cross_transformations_as_pytrees() -> None:
    """T1: a model of `GroupedTensor`s is differentiated, mapped and scanned over like any pytree."""
    case = small("forward", dtype="float32")

    @eqx.filter_jit
    def step(w: GroupedTensor, x: GroupedTensor) -> GroupedTensor:
        grad = eqx.filter_grad(lambda w: jnp.sum(ragged.matmul(x, w).data ** 2))(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grad)

    new = step(case.rhs, case.lhs)
    assert jax.tree.structure(new) == jax.tree.structure(case.rhs)
    transposed = eqx.filter_grad(lambda w: jnp.sum(ragged.matmul(case.lhs, w.mT).data ** 2))(case.rhs.mT)
    assert jax.tree.structure(transposed) == jax.tree.structure(case.rhs.mT)
    np.testing.assert_allclose(case.rhs.data - 0.1 * transposed.data.mT, new.data, rtol=1e-5)


@pytest.mark.parametrize("layout", NAMES)
def test_export_for_three_platforms_from_one_machine(layout: str) -> None:
    """B5: traced once, exported for CPU, CUDA and TPU, forward and backward."""
    case = small(layout, dtype="float32")
    fn = jax.jit(jax.value_and_grad(loss_of(case), argnums=(0, 1)))
    args = (case.lhs.data, case.rhs.data)
    exported = jax.export.export(fn, platforms=["cpu", "cuda", "tpu"])(*args)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    value, grads = exported.call(*args)
    want_value, want_grads = fn(*args)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    for got, want in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layout", NAMES)
def test_shard_map(layout: str, check_vma: bool) -> None:
    """D3: each device has its own lhs and dims; rhs is shared, and its cotangent is summed over devices."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    case = small(layout, dtype="float32")
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((4, *case.lhs.shape)), jnp.float32)
    rhs = jnp.asarray(rng.standard_normal(case.rhs.shape), jnp.float32)

    def product(a: Array, b: Array) -> Array:
        out = ragged.matmul(
            GroupedTensor(a[0], case.lhs.first_dims, case.lhs.last_dims),
            GroupedTensor(b, case.rhs.first_dims, case.rhs.last_dims),
        )
        return jnp.sin(out.data)[None]

    sharded = jax.shard_map(product, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d"), check_vma=check_vma)
    want = jnp.concatenate([product(a[None], rhs) for a in lhs])
    np.testing.assert_allclose(jax.jit(sharded)(lhs, rhs), want, atol=1e-5)
    got = jax.jit(jax.grad(lambda a, b: sharded(a, b).sum(), argnums=(0, 1)))(lhs, rhs)
    wanted = jax.grad(lambda a, b: sum(product(x[None], b).sum() for x in a), argnums=(0, 1))(lhs, rhs)
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-4)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_experts_over_a_mesh(jit: bool, check_vma: bool) -> None:
    """Groups sharded over a mesh axis: each device's offset comes from its place; a sum puts rows together. O8, K14."""
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
        return jnp.sum(jnp.sin(fn(case.lhs._replace_data(x), w)))

    got = jax.grad(lambda *args: loss(run, *args), argnums=(0, 1))(case.lhs.data, case.rhs.data)
    wanted = jax.grad(lambda *args: loss(lambda x, w: ragged.matmul(x, w).data, *args), argnums=(0, 1))(
        case.lhs.data, case.rhs.data
    )
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-4)


@pytest.mark.parametrize("layout", NAMES)
def test_without_jit(layout: str) -> None:
    case = small(layout, dtype="float32")
    want = ragged.matmul(case.lhs, case.rhs).data
    with jax.disable_jit():
        assert np.array_equal(ragged.matmul(case.lhs, case.rhs).data, want)


def test_a_map_over_nothing() -> None:
    case = small("forward", dtype="float32")
    none = jnp.zeros((0, 3), jnp.int32)
    assert jax.vmap(lambda s: ragged.matmul(GroupedTensor(case.lhs.data, s), case.rhs).data)(none).shape == (0, 12, 2)
    outer = small("outer", dtype="float32")
    mapped = jax.vmap(lambda s: ragged.matmul(GroupedTensor(outer.lhs.data, s), outer.rhs).data)(none)
    assert mapped.shape == (0, 12, 12)


SYMBOLIC = """
import jax, jax.numpy as jnp, numpy as np
import ragged
from jax import export

def product(x, w, sizes):
    return ragged.matmul(ragged.GroupedTensor(x, sizes), w).data

def exported(m, *constraints):
    scope = export.SymbolicScope(constraints)
    (m,), (k,), (n,), (g,) = (export.symbolic_shape(s, scope=scope) for s in (m, "k", "n", "g"))
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((m, k), (g, k, n)))
    return export.export(jax.jit(product))(x, w, jax.ShapeDtypeStruct((g,), jnp.int32))

args = jnp.ones((600, 4)), jnp.ones((3, 4, 2)), jnp.array([500, 0, 90], jnp.int32)
for program in (exported("600"), exported("m", "m >= 513")):
    np.testing.assert_array_equal(program.call(*args), product(*args))
try:
    exported("m")
except NotImplementedError as error:
    assert "the extent of a ragged dim is symbolic" in str(error)
else:
    raise AssertionError("an unbounded extent must be refused")

w, sizes = jnp.ones((3, 4, 2)), jnp.array([7, 0, 8], jnp.int32)
x = jnp.ones((2, 16, 4))

def mapped(x, w):
    def loss(x, w):
        out = jax.vmap(lambda x: product(x, w, sizes))(x)
        return out.sum(), out
    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)

(b,) = export.symbolic_shape("b")  # elements of a map
(_, out), (dx, dw) = export.export(jax.jit(mapped))(jax.ShapeDtypeStruct((b, 16, 4), jnp.float32), w).call(x, w)
row = np.where(np.arange(16) < 15, 1.0, 0.0)[:, None]
np.testing.assert_array_equal(out, np.broadcast_to(4 * row, (2, 16, 2)))
np.testing.assert_array_equal(dx, np.broadcast_to(2 * row, (2, 16, 4)))
np.testing.assert_array_equal(dw, np.broadcast_to(2 * np.array([7, 0, 8])[:, None, None], (3, 4, 2)))
"""


@pytest.mark.long
def test_symbolic_shapes() -> None:
    """B5: k, n and the number of groups may be symbolic; the ragged extent too, if bounded; else the error says so.

    In a process of its own, without the import hook: a symbolic extent is no `int`.
    """
    run = subprocess.run([sys.executable, "-c", SYMBOLIC], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_linear_in_each_operand_but_not_in_both() -> None:
    case = small("forward", dtype="float32")

    def product(x: Array, w: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, case.lhs.first_dims), w).data

    args = case.lhs.data, case.rhs.data
    with pytest.raises(NotImplementedError, match="linear in each operand, not in both"):
        jax.linear_transpose(product, *args)(product(*args))
