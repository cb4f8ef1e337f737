"""NVFP4 (4-bit floats, 8-bit scales of 16 each, a float32 scale of the tensor), against tables of its values."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import TypeCheckError, jaxtyped

import ragged
from ragged import Cast, Float4e2m1fn, GroupedTensor, Recipe, Scaling, error_table, matmul, quantize
from ragged.tensor.base import element_scales, with_fields
from tests import cases, gpu, oracle, tpu
from tests.cases import NAMES
from tests.everywhere import INTERPRETED, everywhere
from tests.four_bits import E2M1_VALUES, E4M3_VALUES, Block, quantized
from tests.primitive.test_partition import mesh_of
from tests.quant.test_quantize import KINDS, half_a_unit, make, unpack
from tests.quant.test_recipe import check_recipe

F4, E4M3 = jnp.float4_e2m1fn, jnp.float8_e4m3fn


def test_the_tables_are_the_formats() -> None:
    np.testing.assert_array_equal(np.arange(8, dtype=np.uint8).view(jnp.dtype(F4)).astype(np.float64), E2M1_VALUES)
    np.testing.assert_array_equal(np.arange(127, dtype=np.uint8).view(jnp.dtype(E4M3)).astype(np.float64), E4M3_VALUES)


@pytest.mark.sampled
@pytest.mark.parametrize("block", [(1, 16), (None, 4), (16, 16), (1, None)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str, block: Block) -> None:
    """Bit for bit those of the definition; within half a unit; blocks begin with each group; NaN tails."""
    groups, x = make(kind)
    q = quantize(x, F4, Scaling(block, E4M3))
    assert q.scales is not None and q.tensor_scale is not None
    assert (q.dtype, q.scales.dtype, q.tensor_scale.dtype, q.tensor_scale.shape) == (F4, E4M3, jnp.float32, ())
    tensor_scale, scales, data = quantized(groups, block)
    np.testing.assert_allclose(q.tensor_scale, tensor_scale, rtol=1e-6)
    wide = with_fields(q, data=q.data.astype(jnp.float32))
    stored = element_scales(q) / q.tensor_scale
    stored = with_fields(q, data=jnp.broadcast_to(stored, q.shape))
    for got, want in zip(unpack(kind, stored, groups), scales, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    for got, want in zip(unpack(kind, wide, groups), data, strict=True):
        np.testing.assert_array_equal(got, want)
    for got, group, scale in zip(unpack(kind, q.dequantize(), groups), groups, scales, strict=True):
        limit = half_a_unit(group / (scale * tensor_scale), "float4_e2m1fn") * scale * tensor_scale
        assert np.all(np.abs(got - group) <= limit * (1 + 1e-5))
    assert not q.dequantize().is_quantized
    for zero in (q.dequantize().data, wide.data):
        assert not np.asarray(zero)[~np.asarray(x.mask)].any()


def test_ties_go_to_even() -> None:
    """Scales of powers of two, so that the quotients are exact: 256 × 2 for amax 2688, and 2⁻⁶ × 2 for tiny blocks."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = np.zeros((1, 2, 16), np.float32)
    x[0, 0, :7], x[0, 0, 7:14], x[0, 0, 14] = 512 * ties, -512 * ties, 2688
    x[0, 1, :7] = ties / 32
    q = quantize(jnp.asarray(x), F4, "nvfp4", power_of_two=True)
    assert q.tensor_scale == 2
    np.testing.assert_array_equal(q.scales[..., 0].astype(jnp.float32), [[256, 2**-6]])
    even = np.array([0, 1, 1, 2, 2, 4, 4])
    got = np.asarray(q.data.astype(jnp.float32))[0]
    np.testing.assert_array_equal(got[0, :15], [*even, *-even, 6])  # 2688 / 512 is 5.25
    np.testing.assert_array_equal(got[1, :7], even)


def test_scales_of_any_magnitude() -> None:
    """A block far below the tensor's largest keeps 2⁻⁶; zeros have 1; nothing overflows, however small a tensor is."""
    x = jnp.zeros((1, 5, 16)).at[0, :4, 0].set(jnp.array([2688.0, 6 * 2.0**-6, 6 * 2.0**-20, 6 * 449.0]))
    q = quantize(x, F4, "nvfp4")
    np.testing.assert_array_equal(q.scales[0, :, 0].astype(jnp.float32), [448, 2**-6, 2**-6, 448, 1])
    run = jax.jit(lambda x, dtype: quantize(x, dtype, "nvfp4").dequantize().data, static_argnums=1)
    for value, dtype in itertools.product((1e-45, 1e-38, 1e-36, 1e-33, 1.0, 3e38), ("float4_e2m1fn", "float8_e4m3fn")):
        back = np.asarray(run(jnp.zeros((1, 2, 20)).at[:, :, ::2].set(value), dtype))
        assert np.isfinite(back).all()
        if value >= 1e-32:
            np.testing.assert_allclose(back[:, :, ::2], value, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite(bad: float) -> None:
    """4 bits hold neither: their block becomes NaN. All other blocks and groups are as they were."""
    _, x = make("rows")
    place, block = (6, 20), np.s_[6, 16:32]  # the second row of group 2, the second of its three blocks
    spoiled, zero = (x.with_data(x.data.at[place].set(value)) for value in (bad, 0))
    got, want = (np.array(quantize(z, F4, "nvfp4").dequantize().data) for z in (spoiled, zero))
    assert np.isnan(got[block]).all()
    got[block] = want[block]
    np.testing.assert_array_equal(got, want)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", NAMES)
def test_products(layout: str) -> None:
    """Of both operands and of one, in float32, against the tables' values; NaN tails, empty groups."""
    case = cases.make(layout, g=3, kind="half_empty", capacity=40, uniform=(6, 40, 5))
    operands, values = {}, {}
    for name, block in (("lhs", (1, 16)), ("rhs", (16, 1))):
        x, groups = getattr(case, name), getattr(case, f"{name}_groups")
        operands[name] = quantize(x, F4, Scaling(block, E4M3))
        tensor_scale, scales, data = quantized(groups, block)
        values[name] = [tensor_scale * scale * each for scale, each in zip(scales, data, strict=True)]
    for lhs, rhs in ((True, True), (False, True)):
        out = matmul(
            operands["lhs"] if lhs else case.lhs,
            operands["rhs"] if rhs else case.rhs,
            preferred_element_type=jnp.float32,
            backend=everywhere("xla", 16, 16, 16),
        )
        want = oracle.matmul(values["lhs"] if lhs else case.lhs_groups, values["rhs"] if rhs else case.rhs_groups)
        oracle.assert_close(case.unpack(np.asarray(out.data)), want, max=1e-6)
        case.assert_tail_zero(out)


@pytest.mark.long
@pytest.mark.parametrize("layout", NAMES)
def test_recipe(layout: str) -> None:
    """Value and both gradients of all layouts, each product quantised along what it contracts."""
    case = cases.make(layout, g=3, kind="half_empty", capacity=40, uniform=(6, 18, 20))
    check_recipe(case, Recipe.of("nvfp4"))


def operands() -> tuple[GroupedTensor, jax.Array]:
    x = GroupedTensor(jax.random.normal(jax.random.key(0), (64, 256)), jnp.array([20, 0, 30], jnp.int32))
    return x, jax.random.normal(jax.random.key(1), (3, 256, 64))


@pytest.mark.long
def test_errors_of_the_recipe() -> None:
    """Gaussian operands: 17 dB along blocks of 16, 16.5 in the wgrad; not as good as 8 bits, which have 9 more."""
    table = error_table(*operands(), ["nvfp4"])
    assert (table.sqnr[0] >= [17, 17, 16.5]).all() and (table.sqnr[0] <= 19).all()


def test_gradient_of_the_recipe() -> None:
    """A straight-through gradient, off by what rounding both operands to 4 bits costs: 17 dB; not by nothing."""
    x, w = operands()
    dy = np.asarray(jax.random.normal(jax.random.key(2), (64, 64)))
    got = jax.jit(lambda x: jax.vjp(lambda x: matmul(x, w, recipe="nvfp4").data, x)[1](jnp.asarray(dy))[0].data)(x)
    rows, exact = np.split(dy[:50].astype(np.float64), [20]), np.zeros((64, 256))
    exact[:20], exact[20:50] = rows[0] @ np.asarray(w[0]).T, rows[1] @ np.asarray(w[2]).T
    assert 0.1 <= np.linalg.norm(got - exact) / np.linalg.norm(exact) <= 0.141


def test_what_runs() -> None:
    """XLA, and `explain` says why; also where another backend is asked for."""
    x, w = operands()
    asked = ragged.explain(x, w, recipe="nvfp4", backend=INTERPRETED["pallas_tpu"])
    assert {plan.backend for plan in asked.plans} == {"xla"}
    text = str(ragged.explain(x, w, recipe="nvfp4"))
    assert "on tpu: grouped_matmul of xla (pallas_tpu has no kernels for lhs in float4_e2m1fn)" in text
    assert "on cuda: grouped_matmul of xla (GPUs of compute capability 8.0 (the default if" in text
    assert "lhs f4_e2m1fn × rhs f4_e2m1fn" in text and "lhs 1 m × 16 k, rhs 16 k × 1 n" in text


UNITS = "triton_gpu multiplies float4_e2m1fn only on GPUs of compute capability 10.0 and 10.3, if both operands have"


@pytest.mark.sampled
@pytest.mark.parametrize(
    "chip, rhs, reason",
    [
        ("NVIDIA B200", (F4, "nvfp4"), ""),
        ("NVIDIA B300", (F4, "nvfp4"), ""),
        ("NVIDIA H200", (F4, "nvfp4"), "compute capability 9.0 can't convert float4_e2m1fn; 10.0 and later can"),
        ("NVIDIA GeForce RTX 5090 12.0", (F4, "nvfp4"), UNITS),
        ("NVIDIA B200", (None, None), UNITS),
        ("NVIDIA B200", (E4M3, "mx"), UNITS),
        ("NVIDIA B200", (E4M3, "nvfp4"), UNITS),
        ("NVIDIA B200", (F4, (1, 16)), UNITS),
        ("NVIDIA B200", (F4, Scaling((1, 16), jnp.float8_e8m0fnu)), UNITS),
        ("NVIDIA B200", (F4, Scaling((1, 32), E4M3)), UNITS),
        ("NVIDIA B200", "ragged", UNITS),
    ],
)
def test_what_runs_on_a_gpu(chip: str, rhs: Any, reason: str) -> None:
    """Blackwell's kernel, of two such operands contracted evenly; else XLA, and `explain` says why."""
    if rhs == "ragged":
        case = cases.make("ragged", g=3, rhs_packed_last=True)
        a, b = quantize(case.lhs, F4, "nvfp4"), quantize(case.rhs.mT, F4, "nvfp4").mT
    else:
        x, w = operands()
        a, b = quantize(x, F4, "nvfp4"), quantize(w.mT, *rhs).mT
    with gpu.on(chip):
        plan = next(plan for plan in ragged.explain(a, b).plans if plan.platform == "cuda")
    assert plan.backend == ("xla" if reason else "triton_gpu") and reason in plan.runs


@pytest.mark.long
def test_on_a_tpu() -> None:
    """XLA compiles the recipe's three products, of 4-bit floats, for a TPU."""
    x, w = operands()
    loss = jax.value_and_grad(lambda data, w: jnp.sum(matmul(x.with_data(data), w, recipe="nvfp4").data), (0, 1))
    compiled = tpu.compile_for("v5e", loss, x.data, w)
    assert "f4e2m1fn[" in compiled.text and not compiled.kernels


@pytest.mark.long
def test_under_transformations() -> None:
    """`mT`, jit, vmap, scan, partition, export and back: the tensor's scale is a leaf like others."""
    sizes = jnp.array([[3, 1], [0, 2]], jnp.int32)
    data = jax.random.normal(jax.random.key(0), (2, 5, 40)) * jnp.array([1.0, 100.0])[:, None, None]
    stacked = jax.jit(jax.vmap(lambda d, s: quantize(GroupedTensor(d, s), F4, "nvfp4")))(data, sizes)
    w = quantize(jax.random.normal(jax.random.key(1), (2, 6, 40)), F4, "nvfp4").mT
    ys = jax.vmap(lambda q: matmul(q, w).data)(stacked)
    _, scanned = jax.lax.scan(lambda c, q: (c, matmul(q, w).data), 0, stacked)
    tensors = [GroupedTensor(data[i], sizes[i]) for i in range(2)]
    for i, x in enumerate(tensors):
        one = quantize(x, F4, "nvfp4")
        assert eqx.tree_equal(jax.tree.map(lambda leaf, i=i: leaf[i], stacked), one)
        for y in (ys[i], scanned[i]):
            np.testing.assert_allclose(y.astype(jnp.float32), matmul(one, w).data.astype(jnp.float32), rtol=2**-7)
    one = quantize(tensors[0], F4, "nvfp4")
    assert len(jax.tree.leaves(one)) == 4 and eqx.tree_equal(one.validate(), one)
    assert one.mT.scaling == Scaling((16, 1), E4M3) and eqx.tree_equal(one.mT.mT, one)
    np.testing.assert_array_equal(one.mT.dequantize().data, one.dequantize().data.mT)
    assert eqx.tree_equal(quantize(tensors[0].mT, F4, Scaling((16, 1), E4M3)), one.mT)
    arrays, static = eqx.partition(one, eqx.is_array)
    assert eqx.tree_equal(eqx.combine(arrays, static), one)
    exported = jax.export.export(jax.jit(lambda q: q.dequantize().data), platforms=["cpu", "tpu", "cuda"])(one)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(one), one.dequantize().data)
    assert "scales=f8_e4m3fn[5,3] by nvfp4" in repr(one)


def test_annotations() -> None:
    """jaxtyping has no floats of 4 bits."""

    @jaxtyped(typechecker=beartype)
    def f(x: Float4e2m1fn[GroupedTensor, "g m k"]) -> None:
        pass

    q = quantize(jnp.ones((1, 2, 3)), F4, "nvfp4")
    f(q)
    with pytest.raises(TypeCheckError):
        f(with_fields(q, data=q.data.astype(E4M3)))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["auto", "explicit", "sharded_matmul"])
def test_over_devices(kind: str) -> None:
    """Each device has the tensor's scale, whatever of the blocks' it has; also where a cut goes through a
    block, and where rows are padded for the devices."""
    rows = 32 if kind != "sharded_matmul" else 30
    x = jax.random.normal(jax.random.key(0), (rows, 192)) * 100
    x, w = GroupedTensor(x, jnp.array([9, 0, 17], jnp.int32)), jax.random.normal(jax.random.key(1), (3, 24, 192))
    q, v = quantize(x, F4, "nvfp4"), quantize(w, F4, "nvfp4").mT
    a, b, sizes = (np.asarray(each, np.float64) for each in (q.dequantize().data, v.dequantize().data, x.first_dims))
    want, ends = np.zeros((rows, 24)), np.cumsum(sizes).astype(int)
    for i, end in enumerate(ends):
        want[end - int(sizes[i]) : end] = a[end - int(sizes[i]) : end] @ b[i]
    mesh = mesh_of("explicit" if kind == "explicit" else "auto", a=4, b=2)
    for spec in (P("a"), P(None, "b"), P(None, ("a", "b"))):  # 24 of `k`, of which 16 share a scale
        in_specs = spec, P(None, spec[1] if len(spec) > 1 else None)

        def product(q: GroupedTensor, v: GroupedTensor, in_specs: Any = in_specs) -> jax.Array:
            if kind != "sharded_matmul":
                return matmul(q, v, preferred_element_type=jnp.float32).data
            options: dict[str, Any] = {"in_specs": in_specs, "out_specs": P(in_specs[0][0])}
            return ragged.sharded_matmul(q, v, mesh=mesh, preferred_element_type=jnp.float32, **options).data

        lhs, rhs = q, v
        if kind != "sharded_matmul":
            lhs = q.with_data(jax.device_put(q.data, NamedSharding(mesh, spec)))
            rhs = v.with_data(jax.device_put(v.data, NamedSharding(mesh, in_specs[1])))
        out = jax.jit(product)(lhs, rhs)
        np.testing.assert_allclose(np.asarray(out)[: ends[-1]], want[: ends[-1]], rtol=1e-5, atol=1e-3)
        assert not np.asarray(out)[ends[-1] :].any()


Q = quantize(jnp.ones((1, 2, 32)), F4, "nvfp4")
MATRIX = jnp.ones((1, 32, 2))
TWO_LEVELS = (Cast(F4, Scaling(None, E4M3)), Cast(F4, Scaling(None, E4M3)))
