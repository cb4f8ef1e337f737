"""`matmul` of quantised operands, against NumPy on what they dequantise to."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor, Scaling, matmul, quantize
from ragged.tensor.base import with_fields
from tests import cases, constants, oracle
from tests.cases import LETTERS, NAMES
from tests.everywhere import INTERPRETED, everywhere

pytestmark = pytest.mark.sampled

BACKENDS: dict[str, dict[str, Any]] = {
    "xla": {"backend": everywhere("xla", 16, 16, 16)},  # one height of tiles: compiled faster
    "pallas_tpu": {"backend": INTERPRETED["pallas_tpu"]},
    "triton_gpu": {"backend": INTERPRETED["triton_gpu"]},
}
KERNELS = ("pallas_tpu", "triton_gpu")
ALL = ["xla", *(pytest.param(name, marks=pytest.mark.long) for name in KERNELS)]
F32: dict[str, Any] = {"preferred_element_type": jnp.float32}
SCALINGS = (None, "tensor", "group", "row", "column", (1, 64), "mx")
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def groups_of(x: GroupedTensor, firsts: Any, lasts: Any) -> oracle.Groups:
    """What the groups of a tensor dequantise to, in float64."""
    data = np.asarray(x.dequantize().data).astype(np.float64)
    if x.kind == "ragged both" and x.packed_axis == -1:
        ends = np.cumsum(lasts)
        return [data[:m, e - n : e] for m, n, e in zip(firsts, lasts, ends, strict=True)]
    return oracle.unpack(data, x.ragged, list(firsts), list(lasts))


def expected(case: cases.Case, lhs: GroupedTensor, rhs: GroupedTensor) -> oracle.Groups:
    m, k, n = (case.sizes[letter] for letter in "mkn")
    return oracle.matmul(groups_of(lhs, m, k), groups_of(rhs, k, n))


def along(x: GroupedTensor, scaling: Any, dtype: Any) -> GroupedTensor:
    """`x` quantised, or as it is."""
    return x if scaling is None else quantize(x, dtype, scaling)


def check(case: cases.Case, lhs: GroupedTensor, rhs: GroupedTensor, seed: int | None = None, **options: Any) -> None:
    """Of arguments, or of operands that are constants as the seed picks."""
    multiply = partial(matmul, **F32, **(options or BACKENDS["xla"]))
    out = multiply(lhs, rhs) if seed is None else constants.run(seed, multiply, lhs, rhs)
    oracle.assert_close(case.unpack(np.asarray(out.data)), expected(case, lhs, rhs), max=1e-5)
    case.assert_tail_zero(out)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("layout", ["forward", "wgrad"])
@pytest.mark.parametrize("backend", ALL, indirect=True)
def test_any_pair_of_scalings(backend: str, layout: str, scaling: Any) -> None:
    """Each scaling of `lhs` with each of `rhs`, one of them plain included."""
    # Contracted blocks of 64 and 32, one of them partial.
    case = cases.make(
        layout, g=3, capacity=120, uniform=(40, 136, 72), dtype="float32" if backend == "xla" else "bfloat16"
    )
    lhs = along(case.lhs, scaling, E4M3)
    for other in SCALINGS:
        check(case, lhs, along(case.rhs, other, E5M2 if other == "row" else E4M3), **BACKENDS[backend])


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("backend", KERNELS, indirect=True)
def test_every_layout_by_kernels(backend: str, layout: str) -> None:
    """Int8 and fp8, both sides and one; the derivative by a plain operand is scaled too."""
    case = cases.make(layout, g=3, kind="half_empty", capacity=90, uniform=(20, 72, 24))
    for dtype, left, right in ((E4M3, "row", (1, 16)), (jnp.int8, (1, 16), None)):
        check(case, along(case.lhs, left, dtype), along(case.rhs, right, dtype), **BACKENDS[backend])
    check_gradient(case, "rhs", along(case.lhs, "row", E4M3), case.rhs, **BACKENDS[backend])


@pytest.mark.long
@settings(max_examples=25)
@given(st.data())
def test_every_layout(data: Any) -> None:
    """Any layout, dtypes, blocks, sizes, and either way of seeing the operands, which may be constants."""
    layout = data.draw(st.sampled_from(NAMES))
    seed = data.draw(st.integers(0, 1000))
    flips = [data.draw(st.booleans()) for _ in range(2)]
    case = cases.make(
        layout,
        g=data.draw(st.sampled_from([1, 2, 5])),
        kind=data.draw(st.sampled_from(cases.SPREADS)),
        capacity=24,
        uniform=(6, 9, 5),
        seed=seed,
        lhs_packed_last=flips[0] and LETTERS[layout] in ("mk", "mkn"),
        rhs_packed_last=flips[1] and LETTERS[layout] in ("kn", "mkn"),
    )
    operands = []
    for x in (case.lhs, case.rhs):
        dtype = data.draw(st.sampled_from([None, E4M3, E5M2, jnp.int8, jnp.int4]))
        extents = [
            data.draw(st.sampled_from([1, None] if axis == x.packed_axis else [1, 2, 4, None])) for axis in (-2, -1)
        ]
        scaling = data.draw(st.sampled_from([Scaling(None), Scaling((extents[0], extents[1]))]))
        operands.append(x if dtype is None else quantize(x, dtype, scaling, power_of_two=data.draw(st.booleans())))
    check(case, *operands, seed=seed, backend="xla")


@pytest.mark.parametrize("backend", ALL, indirect=True)
@pytest.mark.parametrize("layout", NAMES)
def test_every_scale_counts(layout: str, backend: str) -> None:
    """Twice the scales of either operand is exactly twice the result, of each scale that it has, on each side."""
    case = cases.make(layout, g=2, kind="even", slack=False, capacity=32, uniform=(8, 16, 8))
    run = partial(matmul, **F32, **BACKENDS[backend])
    for scaling in ("tensor", "group", "column", (1, 8)) if backend == "xla" else ("row",):
        lhs, rhs = along(case.lhs, scaling, E4M3), along(case.rhs, scaling, E4M3)
        once = np.asarray(run(lhs, rhs).data)
        assert np.any(once)
        np.testing.assert_array_equal(run(with_fields(lhs, scales=lhs.scales * 2), rhs).data, once * 2)
        np.testing.assert_array_equal(run(lhs, with_fields(rhs, scales=rhs.scales * 2)).data, once * 2)


RESULTS = [
    (E4M3, E4M3, "bfloat16"),
    (jnp.int8, jnp.int8, "bfloat16"),
    (E4M3, "float32", "float32"),
    ("bfloat16", E4M3, "bfloat16"),
    ("float16", jnp.int4, "float16"),
]


@pytest.mark.parametrize("left, right, result", RESULTS, ids=str)
def test_default_dtype(left: Any, right: Any, result: str) -> None:
    """A quantised operand counts as a float of 8 bits."""
    case = cases.make("forward")
    lhs, rhs = (
        x.astype(dtype) if isinstance(dtype, str) else quantize(x, dtype, "row")
        for x, dtype in ((case.lhs, left), (case.rhs, right))
    )
    assert matmul(lhs, rhs).dtype == jnp.dtype(result)
    exact = matmul(lhs, rhs, **F32)
    np.testing.assert_array_equal(matmul(lhs, rhs).data, exact.data.astype(result))
    assert matmul(lhs, rhs, existing_out=exact).dtype == jnp.float32


@pytest.mark.parametrize("backend", ALL, indirect=True)
@pytest.mark.parametrize("layout", ["batched", "forward", "wgrad", "inner_rows"])
def test_existing_out(layout: str, backend: str) -> None:
    """What is added to has no scales."""
    case = cases.make(layout, g=2, capacity=32, uniform=(8, 40, 8))
    lhs, rhs = along(case.lhs, "row", E4M3), along(case.rhs, (1, 32), E4M3)
    bare = matmul(lhs, rhs, **F32)
    existing = jax.random.normal(jax.random.key(0), bare.shape)
    out = matmul(lhs, rhs, existing_out=existing, **BACKENDS[backend])
    got, want = (case.unpack(np.asarray(z)) for z in (out.data, bare.data + existing))
    oracle.assert_close(got, [w.astype(np.float64) for w in want], max=1e-5)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("backend", ALL, indirect=True)
@pytest.mark.parametrize("scaling", ["tensor", "group", "row", "column", "mx"], ids=str)
def test_shards_of_groups(scaling: Any, backend: str) -> None:
    """`rhs` holds some groups with their scales; a wgrad computes some."""
    case = cases.make("forward", g=4, kind="even", capacity=64, uniform=(0, 40, 24))
    lhs, rhs = quantize(case.lhs, E4M3, scaling), quantize(case.rhs, E4M3, scaling)
    whole = np.asarray(matmul(lhs, rhs, **F32).data)
    some = with_fields(rhs, data=rhs.data[1:3], scales=rhs.scales if rhs.scales.ndim == 0 else rhs.scales[1:3])
    out = np.asarray(matmul(lhs, some, group_offset=jnp.int32(1), **F32, **BACKENDS[backend]).data)
    ends = np.cumsum(case.sizes["m"])
    want = np.zeros_like(whole)
    want[ends[0] : ends[2]] = whole[ends[0] : ends[2]]
    oracle.assert_close([out], [want], max=1e-5)
    both = cases.make("wgrad", g=4, kind="even", capacity=64, uniform=(40, 0, 24))
    left, right = quantize(both.rhs, E4M3, scaling).mT, quantize(both.rhs, E5M2, "column")
    dw = matmul(left, right, **F32).data[1:3]
    shard = matmul(left, right, group_offset=jnp.int32(1), num_actual_groups=2, **F32, **BACKENDS[backend])
    oracle.assert_close([np.asarray(shard.data)], [np.asarray(dw).astype(np.float64)], max=1e-5)


def check_gradient(case: cases.Case, wrt: str, lhs: GroupedTensor, rhs: GroupedTensor, **options: Any) -> None:
    """By the plain operand: that of the product with what the other dequantises to."""

    options = options or BACKENDS["xla"]

    def loss(x: Array, dequantized: bool) -> Array:
        plain = {"lhs": lhs, "rhs": rhs}
        plain[wrt] = plain[wrt].with_data(x)
        other = "rhs" if wrt == "lhs" else "lhs"
        plain[other] = plain[other].dequantize() if dequantized else plain[other]
        out = matmul(plain["lhs"], plain["rhs"], **F32, **(BACKENDS["xla"] if dequantized else options))
        return jnp.sum(jnp.sin(jnp.where(out.mask, out.data, 0)))

    x = {"lhs": lhs, "rhs": rhs}[wrt].data
    got, want = jax.grad(partial(loss, dequantized=False))(x), jax.grad(partial(loss, dequantized=True))(x)
    assert got.dtype == x.dtype
    oracle.assert_close([np.asarray(got)], [np.asarray(want).astype(np.float64)], max=1e-5)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("wrt", [pytest.param("lhs", marks=pytest.mark.long), "rhs"])
@pytest.mark.parametrize("layout", NAMES)
def test_gradient_by_the_plain_operand(layout: str, wrt: str) -> None:
    """Scales take part in the derivative by the other operand."""
    case = cases.make(layout, capacity=40, uniform=(6, 9, 5))
    for scaling in ("group", "row", (1, 4)):
        operands = {"lhs": case.lhs, "rhs": case.rhs}
        other = "rhs" if wrt == "lhs" else "lhs"
        operands[other] = along(operands[other], scaling, E4M3)
        check_gradient(case, wrt, operands["lhs"], operands["rhs"])


@pytest.mark.long
@pytest.mark.parametrize(
    "backend, scaling",
    [
        *(("xla", scaling) for scaling in ("tensor", "group", (1, 4))),
        *(pytest.param(name, scaling, marks=pytest.mark.long) for name in KERNELS for scaling in ("group", "row")),
    ],
    ids=str,
    indirect=["backend"],
)
@pytest.mark.parametrize("layout", ["batched", "forward", "wgrad", "outer", "ragged"])
def test_vmap(layout: str, backend: str, scaling: Any) -> None:
    """Over quantised operands, over one of them, over scales alone; equal to a loop."""
    made = [cases.make(layout, g=2, capacity=20, uniform=(6, 9, 5), seed=0, fill=0.5) for _ in range(2)]
    scaled = [x.with_data(x.data * factor) for x, factor in ((made[0].lhs, 1), (made[1].lhs, 3))]
    lhs = jax.tree.map(lambda *z: jnp.stack(z), *(along(x, scaling, E4M3) for x in scaled))
    rhs = along(made[0].rhs, scaling, E4M3)
    run = partial(matmul, **F32, **BACKENDS[backend])

    def element(x: GroupedTensor, i: int) -> GroupedTensor:
        return jax.tree.map(lambda leaf: leaf[i], x)

    both = jax.vmap(run)(lhs, jax.tree.map(lambda z: jnp.stack([z, z]), rhs))
    one = jax.vmap(run, in_axes=(0, None))(lhs, rhs)
    only_scales = jax.vmap(lambda s: run(with_fields(element(lhs, 0), scales=s), rhs))(lhs.scales)
    for i in range(2):
        want = np.asarray(run(element(lhs, i), rhs).data)
        for got in (both, one):
            oracle.assert_close([np.asarray(got.data[i])], [want.astype(np.float64)], max=1e-6)
        want = np.asarray(run(with_fields(element(lhs, 0), scales=lhs.scales[i]), rhs).data)
        oracle.assert_close([np.asarray(only_scales.data[i])], [want.astype(np.float64)], max=1e-6)


@pytest.mark.parametrize("backend", ALL, indirect=True)
def test_a_sum_over_a_batch(backend: str) -> None:
    """The gradient of weights that a `vmap` shares sums over its elements, each with scales of its own."""
    case = cases.make("forward", g=2, capacity=24, uniform=(0, 9, 5), fill=0.0)
    stacked = jnp.stack([case.lhs.data, 5 * case.lhs.data[::-1]])
    xs = jax.vmap(lambda d: quantize(case.lhs.with_data(d), E4M3, "row"))(stacked)

    def loss(w: Array, xs: Any, run: Any) -> Array:
        return jnp.sum(jnp.sin(jax.vmap(lambda x: run(x, w, **F32).data)(xs)))

    got = jax.grad(loss)(case.rhs.data, xs, partial(matmul, **BACKENDS[backend]))
    want = jax.grad(loss)(case.rhs.data, jax.vmap(GroupedTensor.dequantize)(xs), matmul)
    oracle.assert_close([np.asarray(got)], [np.asarray(want).astype(np.float64)], max=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["batched", "forward_left", "wgrad", "ragged"])
def test_jit_scan_remat_and_jvp(layout: str) -> None:
    """The scales go where the data goes; forward mode, by the plain operand, is scaled too."""
    case = cases.make(layout, capacity=40, uniform=(6, 9, 5))
    lhs = along(case.lhs, "row", E4M3)

    def value(x: GroupedTensor, rhs: Array) -> Array:
        return matmul(x, case.rhs.with_data(rhs), **F32).data

    want = value(lhs, case.rhs.data)
    np.testing.assert_allclose(jax.jit(value)(lhs, case.rhs.data), want, rtol=1e-6, atol=1e-6)
    stacked = jax.tree.map(lambda z: jnp.stack([z, z]), lhs)
    _, scanned = jax.lax.scan(lambda c, x: (c, value(x, case.rhs.data)), 0, stacked)
    np.testing.assert_allclose(scanned[1], want, rtol=1e-6, atol=1e-6)
    direction = jnp.where(case.rhs.mask, 1.0, 0.0)
    _, tangent = jax.jvp(partial(value, lhs), (case.rhs.data,), (direction,))
    np.testing.assert_allclose(tangent, value(lhs, direction), rtol=1e-5, atol=1e-5)
    total = lambda rhs: jnp.sum(jnp.sin(value(lhs, rhs)))  # noqa: E731
    plain, remat = (jax.grad(f)(case.rhs.data) for f in (total, jax.checkpoint(total)))
    np.testing.assert_allclose(plain, remat, rtol=1e-6, atol=1e-6)


def test_experts_over_a_mesh() -> None:
    """Quantised weights sharded by group, with their scales."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("experts",))
    case = cases.make("forward", g=8, capacity=64, uniform=(0, 40, 24))
    x, w = quantize(case.lhs, E4M3, "row"), quantize(case.rhs, E4M3, (8, 8))
    spec: Any = P("experts")
    specs = GroupedTensor(spec, scales=spec, scaling=w.scaling)

    def local(x: GroupedTensor, w: GroupedTensor) -> Array:
        first = jax.lax.axis_index("experts").astype(jnp.int32) * w.num_groups
        return jax.lax.psum(matmul(x, w, group_offset=first, **F32).data, "experts")

    whole = jax.tree.map(lambda _: P(), x)
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(whole, specs), out_specs=P()))(x, w)
    want = matmul(x, w, **F32).data
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaling", ["tensor", "group", "row", "column", (1, 4)], ids=str)
@pytest.mark.parametrize("side", ["lhs", "rhs"])
@pytest.mark.parametrize("layout", ["batched", "forward", "forward_left"])
def test_with_one_matrix_for_all_groups(layout: str, side: str, scaling: Any) -> None:
    """The quantised operand's groups are those of a single matrix; scales by group stay by group."""
    case = cases.make(layout, capacity=30, uniform=(6, 8, 5))
    if layout != "batched" and side == {"forward": "rhs", "forward_left": "lhs"}[layout]:
        side = {"lhs": "rhs", "rhs": "lhs"}[side]
    shared = jax.random.normal(jax.random.key(0), (8, 5) if side == "lhs" else (6, 8))
    g = case.lhs.num_groups
    for turned in (False, True) if layout == "batched" else (False,):
        x = along(getattr(case, side), scaling, E4M3)
        if turned:
            x = with_fields(x, data=x.data.mT.copy(), scales=x.mT.scales, scaling=x.scaling.mT).mT
        if side == "lhs":
            out, full = matmul(x, shared, **F32), matmul(x, jnp.broadcast_to(shared, (g, *shared.shape)), **F32)
        else:
            out, full = matmul(shared, x, **F32), matmul(jnp.broadcast_to(shared, (g, *shared.shape)), x, **F32)
        np.testing.assert_allclose(out.data, full.data, rtol=1e-5, atol=1e-5)
        existing = jax.random.normal(jax.random.key(1), out.shape)
        pair = (x, shared) if side == "lhs" else (shared, x)
        added = matmul(*pair, existing_out=existing)
        inside = np.asarray(out.mask)
        np.testing.assert_allclose(np.asarray(added.data)[inside], np.asarray(out.data + existing)[inside],
                                   rtol=1e-5, atol=1e-5)  # fmt: skip


def test_nothing_leaks_between_groups() -> None:
    """A group's NaN and infinities, in data or scales, stay its own; so does what the tail holds."""
    case = cases.make("forward", g=4, kind="even", capacity=64, uniform=(0, 40, 24))
    ends = np.cumsum(case.sizes["m"])
    for scaling in ("group", "row", "column", (1, 8)):
        x, w = quantize(case.lhs, E4M3, scaling), quantize(case.rhs, E4M3, scaling)
        clean = np.asarray(matmul(x, w, **F32).data)
        bad = x.data.at[ends[0] : ends[1]].set(jnp.nan).at[ends[3] :].set(jnp.nan)
        scales = x.scales
        if scales.ndim == 2 and scales.shape[0] == 64:
            scales = scales.at[ends[0] : ends[1]].set(jnp.inf).at[ends[3] :].set(jnp.nan)
        else:
            scales = scales.at[1].set(jnp.nan)
        out = np.asarray(matmul(with_fields(x, data=bad, scales=scales), w, **F32).data)
        assert np.isnan(out[ends[0] : ends[1]]).all()
        rest = np.r_[0 : ends[0], ends[1] : 64]
        np.testing.assert_array_equal(out[rest], clean[rest])


X = GroupedTensor(jax.random.normal(jax.random.key(0), (8, 64)), jnp.array([3, 5], jnp.int32))
W = jax.random.normal(jax.random.key(1), (2, 64, 16))
QX, QW = quantize(X, E4M3, "row"), quantize(W, E4M3, "column")
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "by quantised data": (
        lambda: jax.grad(lambda d: matmul(with_fields(QX, data=d), W).data.sum())(QX.data),
        TypeError,
        "`ragged.matmul`: it is differentiated with respect to a quantised operand.\nGot operand=f8_e4m3fn[8,64].\n",
    ),
    "by scales": (
        lambda: jax.grad(lambda s: matmul(X, with_fields(QW, scales=s)).data.sum())(QW.scales),
        TypeError,
        "differentiated with respect to a quantised operand",
    ),
    "by an equinox module": (
        lambda: eqx.filter_grad(lambda w: matmul(X, w).data.sum())(QW),
        TypeError,
        "pass the operand unquantised to `ragged.matmul` with a `recipe`",
    ),
    "through quantize": (
        lambda: jax.grad(lambda w: matmul(X, quantize(w, E4M3, "row")).data.sum())(W),
        TypeError,
        "`ragged.quantize`: it is differentiated with respect to a quantised operand",
    ),
    "by plain fp8": (
        lambda: jax.grad(lambda w: matmul(X, w).data.sum())(W.astype(E4M3)),
        TypeError,
        "differentiated with respect to a quantised operand",
    ),
    "by fp8 at the array level": (
        lambda: jax.grad(lambda w: ragged.grouped_matmul(X.data, w, X.packed_dims).sum())(W.astype(E4M3)),
        TypeError,
        "`ragged.grouped_matmul(lhs, rhs, group_sizes)`: it is differentiated with respect to a quantised operand",
    ),
    "fp8 cotangent": (
        lambda: jax.vjp(lambda w: matmul(X, w, preferred_element_type=E5M2).data, W),
        TypeError,
        "the result is float8_e5m2, so its cotangent would have 8 bits too",
    ),
    "quantised existing_out": (
        lambda: matmul(X, W, existing_out=quantize(matmul(X, W), E4M3, "row")),
        TypeError,
        "`existing_out` is quantised",
    ),
    "integer result": (
        lambda: matmul(QX, QW, preferred_element_type=jnp.int32),
        TypeError,
        "`preferred_element_type`",
    ),
    "scales of another shape": (
        lambda: matmul(eqx.tree_at(lambda q: q.scales, QX, jnp.ones((1, 1))), W),
        ValueError,
        "have shape (8, 1) and dtype float32",
    ),
    "no scales": (
        lambda: matmul(eqx.partition(quantize(X, jnp.int8, "row"), eqx.is_inexact_array)[1], W),
        TypeError,
        "`scaling` is given without an array of scales",
    ),
    "batch axis": (
        lambda: matmul(jax.tree.map(lambda z: jnp.stack([z, z]), QX), W),
        ValueError,
        "`lhs` has a batch axis",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str) -> None:
    """At the call, as text."""
    cases.check_error(*ERRORS[name])


def test_a_fixed_operand_may_be_quantised_inside() -> None:
    """The hint that the error names."""
    fixed = jax.grad(lambda w: jnp.sum(matmul(X, quantize(jax.lax.stop_gradient(w), E4M3, "row")).data) + w.sum())(W)
    np.testing.assert_array_equal(fixed, np.ones(W.shape))


def test_explain() -> None:
    text = str(ragged.explain(QX, QW))
    assert "derivatives: by lhs none, by rhs none" in text
    assert "forward: ragged rows × uniform -> ragged rows, bf16[8,16]" in text
    assert "on tpu: grouped_matmul of pallas_tpu" in text
