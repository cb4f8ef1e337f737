"""Every JAX transformation of `ragged.matmul`, in all eight layouts; `tests/contract.py` has maps and meshes."""

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
from jax import Array, export

import ragged
from ragged import GroupedTensor
from tests import cases, oracle, products
from tests.cases import LETTERS, NAMES, TOLERANCE, small

pytestmark = pytest.mark.sampled


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


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
    """Forward and reverse mode, by each operand, with NaN in the tails."""
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
    """Forward over reverse, reverse over reverse, reverse over forward, and differences of gradients."""
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
    """The Hessian of a wgrad, all of it."""
    case = cases.make("wgrad", g=2, capacity=4, uniform=(2, 0, 2), dtype="float64")
    loss, args = loss_of(case), [case.lhs.data, case.rhs.data]
    hessian = jax.hessian(loss, argnums=(0, 1))(*args)
    blocks = [[np.asarray(hessian[i][j]).reshape(8, 8) for j in (0, 1)] for i in (0, 1)]
    full = np.block(blocks)
    assert np.abs(full).max() > 0
    np.testing.assert_allclose(full, full.T, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("layout", NAMES)
def test_nested_vmap(layout: str, x64: None) -> None:
    """Two maps, of different operands and of the same; and a gradient that sums over one of them."""
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
    """XLA's CPU backend runs no dot of bfloat16s of which one operand has two kept letters."""
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
    """What the CPU multiplies as bfloat16, and results of every kind."""
    check_batched(("mk", "kn", "mn"), (True, False), dtypes, {"b": 4, "g": 8, "m": 8, "k": 64, "n": 32})


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("mapped", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("axes", ORDERS, ids="-".join)
def test_uniform_bfloat16_of_every_extent(axes: tuple[str, str, str], mapped: tuple[bool, bool]) -> None:
    """All orders of letters, all subsets of mapped operands, extents of one, of a few and of many."""
    for extent in EXTENTS:
        check_batched(axes, mapped, ("bfloat16", "bfloat16", "float32"), extent)


def test_uniform_bfloat16_derivatives_mapped_over_lhs() -> None:
    """Gradients and a Hessian-vector product of a map over `lhs` alone equal those of a loop in float32."""
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
        stacked = jax.tree.map(lambda x: jnp.stack([x, x]), case.lhs.with_data(lhs))

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
    """A model of `GroupedTensor`s is differentiated, mapped and scanned over like any pytree."""
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
    """Traced once, exported for CPU, CUDA and TPU, forward and backward."""
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


def check_symbolic(layout: str) -> None:
    """Programs with one letter symbolic, and with all, of products and their gradients, against NumPy.

    A letter may have two extents: of a buffer that packs it, and of one that aligns it to the left. None is bounded.
    """
    case, terms = small(layout, "float32"), ("mk", "kn")
    buffers = [jnp.asarray(x.data) for x in (case.lhs, case.rhs)]
    given = [{name: getattr(x, name) for name in ("first_dims", "last_dims")} for x in (case.lhs, case.rhs)]

    def product(lhs: Array, rhs: Array, dims: Any) -> Array:
        return ragged.matmul(GroupedTensor(lhs, **dims[0]), GroupedTensor(rhs, **dims[1])).data

    def gradients(lhs: Array, rhs: Array, dims: Any) -> tuple[Array, Array]:
        return jax.grad(lambda lhs, rhs: jnp.sum(jnp.sin(product(lhs, rhs, dims))), (0, 1))(lhs, rhs)

    out = oracle.matmul(case.lhs_groups, case.rhs_groups)
    wants = [
        [np.cos(y) @ np.asarray(b, np.float64).T for y, b in zip(out, case.rhs_groups, strict=True)],
        [np.asarray(a, np.float64).T @ np.cos(y) for y, a in zip(out, case.lhs_groups, strict=True)],
    ]
    for letters in (*"gmkn", "gmkn"):
        scope = export.SymbolicScope()

        def extent(name: str, n: int, letters: str = letters, scope: Any = scope) -> Any:
            return export.symbolic_shape(name, scope=scope)[0] if name[0] in letters else n

        avals = []
        for x, term in zip((case.lhs, case.rhs), terms, strict=True):
            names = ["g"] * (x.ndim - 2) + [
                z if x.packed_axis == axis or z not in LETTERS[layout] else f"{z}_widest"
                for axis, z in zip((-2, -1), term, strict=True)
            ]
            shape = tuple(map(extent, names, x.shape))
            avals.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        sizes = jax.ShapeDtypeStruct((extent("g", 3),), jnp.int32)
        types = *avals, jax.tree.map(lambda _, sizes=sizes: sizes, given)
        got = export.export(jax.jit(product))(*types).call(*buffers, given)
        oracle.assert_close(case.unpack(np.asarray(got)), out, 1e-5)
        got = export.export(jax.jit(gradients))(*types).call(*buffers, given)
        for each, x, want, term in zip(got, buffers, wants, terms, strict=True):
            packed = oracle.pack(want, (term[0] in LETTERS[layout], term[1] in LETTERS[layout]), x.shape, 0.0)
            np.testing.assert_allclose(each, packed, rtol=1e-4, atol=1e-4)


def in_a_process(code: str) -> None:
    """Runs it without the import hook: a symbolic extent is no `int`."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.long
@pytest.mark.parametrize("layout", NAMES)
def test_symbolic_extents(layout: str) -> None:
    """Each extent, alone and with all others, of products and of gradients; none has to be bounded."""
    in_a_process(f"from tests.ops.test_transforms import check_symbolic; check_symbolic({layout!r})")


def test_a_wgrad_of_some_groups() -> None:
    """As many as `num_actual_groups` says, whatever integer that is."""
    x = GroupedTensor(jnp.arange(8.0).reshape(8, 1), jnp.array([3, 5, 0], jnp.int32))
    counts: tuple[Any, ...] = 2, np.int64(2)
    for count in counts:
        out = ragged.matmul(x.mT, x, num_actual_groups=count)
        np.testing.assert_array_equal(np.asarray(out.data)[:, 0, 0], [0 + 1 + 4, 9 + 16 + 25 + 36 + 49])


SYMBOLIC = """
import jax, jax.numpy as jnp, numpy as np
import ragged
from jax import export

def product(x, w, sizes):
    return ragged.matmul(ragged.GroupedTensor(x, sizes), w).data

w, sizes = jnp.ones((3, 4, 2)), jnp.array([7, 0, 8], jnp.int32)
x = jnp.ones((2, 16, 4))

def mapped(x, w):
    def loss(x, w):
        out = jax.vmap(lambda x: product(x, w, sizes))(x)
        return out.sum(), out
    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)

(b,) = export.symbolic_shape("b")  # elements of a map
(_, out), (dx, dw) = export.export(jax.jit(mapped))(jax.ShapeDtypeStruct((b, 16, 4), jnp.float32), w).call(x, w)

(g, held), f32 = export.symbolic_shape("g, held"), jnp.float32
rows, sizes, like = (jax.ShapeDtypeStruct(s, t) for s, t in (((8, 1), f32), ((g,), jnp.int32), ((held, 1), f32)))

def wgrads(x, sizes, like):
    every = ragged.transposed_grouped_matmul(x.T, x, sizes)
    return every, ragged.transposed_grouped_matmul(x.T, x, sizes, num_actual_groups=like.shape[0])

args = jnp.arange(8.0).reshape(8, 1), jnp.array([3, 5, 0], jnp.int32), jnp.ones((2, 1))
every, some = export.export(jax.jit(wgrads))(rows, sizes, like).call(*args)
np.testing.assert_array_equal(every[:, 0, 0], [5, 135, 0])
np.testing.assert_array_equal(some[:, 0, 0], [5, 135])

row = np.where(np.arange(16) < 15, 1.0, 0.0)[:, None]
np.testing.assert_array_equal(out, np.broadcast_to(4 * row, (2, 16, 2)))
np.testing.assert_array_equal(dx, np.broadcast_to(2 * row, (2, 16, 4)))
np.testing.assert_array_equal(dw, np.broadcast_to(2 * np.array([7, 0, 8])[:, None, None], (3, 4, 2)))
"""


@pytest.mark.long
def test_symbolic_shapes() -> None:
    """How many elements a map has, how many groups a wgrad of plain arrays has, and how many of them it holds."""
    in_a_process(SYMBOLIC)


def test_linear_in_each_operand_but_not_in_both() -> None:
    case = small("forward", dtype="float32")

    def product(x: Array, w: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, case.lhs.first_dims), w).data

    args = case.lhs.data, case.rhs.data
    with pytest.raises(NotImplementedError, match="linear in each operand, not in both"):
        jax.linear_transpose(product, *args)(product(*args))
