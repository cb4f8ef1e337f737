"""What computes products of quantised operands, and of recipes: on which chip, over devices, with which blocks.

Values: `tests/contract/test_products.py` and `tests/contract/test_recipes.py`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor, Scaling, matmul, quantize
from ragged.tuning import GpuConfig, TpuConfig
from tests import gpu, tpu
from tests.cases import INT8_ROWS, normal, split
from tests.contract.launches import launches

F4, E4M3 = "float4_e2m1fn", "float8_e4m3fn"
X = GroupedTensor(normal((64, 256)), jnp.array([20, 0, 30], jnp.int32))
W = normal((3, 256, 64), 1)
INTERPRETED: dict[str, Any] = {"pallas_tpu": TpuConfig(interpret=True), "triton_gpu": GpuConfig(interpret=True)}


def by_group(x: GroupedTensor | Array, seed: int) -> tuple[GroupedTensor, list[np.ndarray]]:
    """`x` in NVFP4 with a global scale for each group, as checkpoints have it, and its groups in float64."""
    q = quantize(x, F4, "nvfp4")
    each = (np.asarray(q.tensor_scale) * np.random.default_rng(seed).uniform(0.5, 2, 3)).astype(np.float32)
    values = np.asarray(q.data).astype(np.float64) * np.repeat(np.asarray(q.scales).astype(np.float64), 16, axis=-1)
    groups = np.split(values, np.cumsum([20, 0, 30]))[:3] if values.ndim == 2 else list(values)
    tensor = GroupedTensor(q.data, q.first_dims, None, q.scales, q.scaling, tensor_scale=jnp.asarray(each))
    return tensor, [group * scale for group, scale in zip(groups, each.astype(np.float64), strict=True)]


def by_expert(seed: int) -> tuple[GroupedTensor, list[np.ndarray]]:
    """`W`, in blocks along its first dim, which is contracted."""
    w, groups = by_group(W.mT, seed)
    return w.mT, [group.T for group in groups]


@pytest.mark.parametrize(
    "backend, dtype", split([("pallas_tpu", "float32")], [("xla", "bfloat16"), ("xla", "float16")])
)
def test_rows_in_int8(backend: str, dtype: str) -> None:
    """A recipe's kernel quantises rows as `quantize` does: of zeros, tiny and huge numbers, infinity and NaN."""
    rows = np.array(normal((64, 256)))
    largest, tiny = float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).smallest_subnormal)
    rows *= np.exp2(np.random.default_rng(0).integers(-9, 3, (64, 1)))
    rows[0], rows[1], rows[2, 5], rows[3, 6], rows[4, 7], rows[21, 8:] = 0, tiny, -np.nan, np.inf, largest, -largest
    x = X.with_data(jnp.asarray(rows, dtype))

    @jax.jit
    def both(x: GroupedTensor) -> list[Array]:
        apart = matmul(quantize(x, "int8", "row"), quantize(W, "int8", "column"), **options)
        return [matmul(x, W, recipe=INT8_ROWS, **options).data, apart.data]

    options: dict[str, Any] = {"preferred_element_type": jnp.float32, "backend": INTERPRETED.get(backend, backend)}
    with launches() as ran, tpu.on("v5e"):
        one, other = map(np.asarray, both(x))
    assert [name for name, _ in ran] == [backend] * 2
    np.testing.assert_array_equal(one, other)
    assert np.isnan(one[:50]).any(1).tolist() == [row in (2, 3) for row in range(50)]


@pytest.mark.long
def test_a_global_scale_for_each_group() -> None:
    """NVFP4 of experts, as published: of either operand or both, in each kind; in products, a gate, an einsum, `mT`,
    `vmap`, and of groups that share a matrix."""
    (w, w_groups), (u, u_groups), (x, x_groups) = by_expert(0), by_expert(1), by_group(X, 2)
    plain = [np.asarray(g, np.float64) for g in X.to_list()]

    def same(got: Array, want: list[np.ndarray]) -> None:
        np.testing.assert_allclose(np.asarray(got)[:50], np.concatenate(want), rtol=1e-4, atol=1e-3)

    def product(xs: list[np.ndarray], ws: list[np.ndarray]) -> list[np.ndarray]:
        return [a @ b for a, b in zip(xs, ws, strict=True)]

    @jax.jit
    def run(x: GroupedTensor, w: GroupedTensor, u: GroupedTensor) -> Any:
        options: dict[str, Any] = {"preferred_element_type": jnp.float32}
        scale: Any = w.tensor_scale
        more = jax.vmap(
            lambda s: (
                matmul(
                    X,
                    GroupedTensor(w.data, None, None, w.scales, w.scaling, tensor_scale=s, transposed=w.transposed),
                    **options,
                ).data
            )
        )
        return (
            [each.dequantize().data for each in (x, w, x.mT, w.mT)],
            [matmul(lhs, w, **options).data for lhs in (X, x)],
            matmul(x, W, **options).data,
            matmul(w.mT, X.mT, **options).data.T,
            matmul(w, jnp.ones((64, 8)), **options).data,
            ragged.gated_matmul(x, w, u, activation=None, **options).data,
            ragged.einsum("t k, g k n -> t n", x, w, **options).data,
            more(jnp.stack([scale, 2 * scale])),
        )

    values, (of_w, of_both), of_x, left, shared, gated, einsum, many = run(x, w, u)
    same(values[0], x_groups)
    same(values[2].mT, x_groups)
    for got in (values[1], values[3].mT):
        np.testing.assert_allclose(got, np.stack(w_groups), rtol=1e-6)
    same(of_w, product(plain, w_groups))
    same(of_both, product(x_groups, w_groups))
    same(of_x, product(x_groups, list(np.asarray(W, np.float64))))
    same(left, product(plain, w_groups))
    np.testing.assert_allclose(shared, np.stack(w_groups) @ np.ones((64, 8)), rtol=1e-4, atol=1e-3)
    same(gated, [a * b for a, b in zip(product(x_groups, w_groups), product(x_groups, u_groups), strict=True)])
    same(einsum, product(x_groups, w_groups))
    same(many[0], product(plain, w_groups))
    same(many[1], product(plain, [2 * g for g in w_groups]))


@pytest.mark.long
@pytest.mark.parametrize("is_shard", [False, True])
def test_a_global_scale_for_each_group_on_a_gpu(is_shard: bool) -> None:
    """Tensor cores apply scales of blocks; the kernel reads the scale of its expert, of gate and up, or of a shard."""
    (w, w_groups), (u, u_groups) = by_expert(0), by_expert(1)
    rows = quantize(X, F4, "nvfp4")
    x_groups = [np.asarray(g, np.float64) for g in rows.dequantize().to_list()]
    options: dict[str, Any] = {"backend": INTERPRETED["triton_gpu"], "preferred_element_type": jnp.float32}
    with gpu.on("NVIDIA B200"), launches() as ran:
        if is_shard:
            shard = jax.tree.map(lambda leaf: leaf[1:], w)
            out = jax.jit(lambda x, w: matmul(x, w, group_offset=1, **options).data)(rows, shard)
            want = [x @ a * (i > 0) for i, (x, a) in enumerate(zip(x_groups, w_groups, strict=True))]
        else:
            gated = partial(ragged.gated_matmul, activation=None, **options)
            out = jax.jit(lambda *args: gated(*args).data)(rows, w, u)
            want = [(x @ a) * (x @ b) for x, a, b in zip(x_groups, w_groups, u_groups, strict=True)]
    assert [backend for backend, _ in ran] == ["triton_gpu"]
    np.testing.assert_allclose(out[:50], np.concatenate(want), rtol=1e-3, atol=1e-2)


@pytest.mark.long
def test_explain() -> None:
    """`explain` says what runs, and that XLA multiplies 4 bits also where another backend is asked for."""
    text = str(ragged.explain(quantize(X, E4M3, "row"), quantize(W, E4M3, "column")))
    assert "derivatives: by lhs none, by rhs none" in text and "on tpu: grouped_matmul of pallas_tpu" in text
    for w in (W, W[0]):  # a kernel of fp8, not of float16
        assert "on tpu: grouped_matmul of pallas_tpu" in str(ragged.explain(X.astype(jnp.float16), w, recipe="rowwise"))
    text = str(ragged.explain(X, W, recipe="nvfp4"))
    for platform, backend in (("tpu", "pallas_tpu"), ("cuda", "triton_gpu")):
        assert f"on {platform}: grouped_matmul of {backend}" in text
    asked = ragged.explain(X.astype(jnp.float16), quantize(W, F4, "mx"), backend=INTERPRETED["pallas_tpu"])
    assert {plan.backend for plan in asked.plans} == {"xla"}


@pytest.mark.long
def test_four_bits_on_gpus() -> None:
    """All chips have kernels of 4-bit floats, with any scales; only the contracted dim must not be ragged."""

    def check(chip: str, a: GroupedTensor, b: Any, reason: str) -> None:
        with gpu.on(chip):
            plan = next(plan for plan in ragged.explain(a, b).plans if plan.platform == "cuda")
        assert plan.backend == ("xla" if reason else "triton_gpu") and reason in plan.runs, (chip, b)

    def made(x: Any, *cast: Any) -> GroupedTensor:
        return jax.eval_shape(lambda x: quantize(x, *cast), x)

    x = made(X, F4, "nvfp4")
    scalings = ("nvfp4", "mx", (1, 16), Scaling((1, 32), E4M3), "row", "group")
    for chip in ("NVIDIA A100", "NVIDIA H200", "NVIDIA B200", "NVIDIA GeForce RTX 5090 12.0"):
        for lhs in (X, X.astype(jnp.bfloat16), x):
            for scaling in scalings:
                check(chip, lhs, made(W.mT, F4, scaling).mT, "")
        check(chip, x, W, "")
    ragged_k = GroupedTensor(X.data[:, :64], X.first_dims, jnp.array([9, 20, 30], jnp.int32))
    both = made(ragged_k, F4, "nvfp4")
    check("NVIDIA B200", both, both.mT, "only if the contracted dim isn't ragged: two share a byte")


def test_a_fixed_operand_may_be_quantised_inside() -> None:
    """The hint that the error of a differentiated `quantize` names."""

    def loss(w: Array) -> Array:
        return jnp.sum(matmul(X, quantize(jax.lax.stop_gradient(w), E4M3, "row")).data) + w.sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(W), np.ones(W.shape))


SIZES = (37, 0, 5, 64, 33, 1, 70)  # no group but the first two begins at a multiple of 32


def tokens(seed: int) -> GroupedTensor:
    """250 rows of very different magnitudes, with one scale for 32 of them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((250, 48)) * np.exp(2 * rng.standard_normal((250, 1)))
    return quantize(GroupedTensor(x.astype(np.float32), np.array(SIZES, np.int32)), E4M3, (32, 1))


def test_tiles_of_groups_that_are_moved_apart_on_a_gpu() -> None:
    """`explain` counts the tiles of groups that a kernel reads moved apart: each begins with a block of scales."""
    with gpu.on("NVIDIA H200"):
        plans = ragged.explain(tokens(0).mT, tokens(1), backend=INTERPRETED["triton_gpu"]).plans
    (plan,) = [plan for plan in plans if plan.product == "forward" and plan.platform == "cpu"]
    assert plan.backend == "triton_gpu" and plan.is_exact and plan.visits
    assert list(plan.tiles) == [
        (group, int(first + at), 32)
        for group, (first, size) in enumerate(zip(np.cumsum(SIZES) - SIZES, SIZES, strict=True))
        for at in range(0, size, 32)
    ]


@pytest.mark.long
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_over_devices(kind: AxisType) -> None:
    """A device has its part of the blocks, scaled as the whole, and the tensor's scale, whatever it has of them."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
    lhs, rhs = quantize(X.with_data(X.data[:, :192]), F4, "nvfp4"), quantize(W[:, :192].mT, F4, "nvfp4").mT
    specs = (P("a"), P()), (P(None, "b"), P(None, "b")), (P(None, ("a", "b")), P(None, ("a", "b")))

    def product(x: Array, y: Array) -> Array:
        return matmul(lhs.with_data(x), rhs.with_data(y), preferred_element_type=jnp.float32).data

    want = matmul(lhs.dequantize(), rhs.dequantize(), precision="highest").data
    for of_lhs, of_rhs in specs:
        with jax.set_mesh(mesh):
            data = [jax.device_put(x.data, NamedSharding(mesh, spec)) for x, spec in ((lhs, of_lhs), (rhs, of_rhs))]
            got = jax.jit(product)(*data)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("backend", split(["pallas_tpu"], ["triton_gpu"]))
def test_one_scale_for_each_group_of_all_elements(backend: str) -> None:
    """A wgrad is summed over elements of a map in which a group may be empty."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    q = quantize(GroupedTensor(X.data[:24], jnp.array([12, 12], jnp.int32)), jnp.int8, "group")
    sizes = np.array([[10, 12], [12, 0], [0, 3], [5, 0]], np.int32)

    def total(w: Array) -> Array:
        def one(sizes: Array) -> Array:
            x = GroupedTensor(q.data, sizes, scales=q.scales, scaling=q.scaling)
            return matmul(x, w, backend=INTERPRETED[backend]).data.sum()

        return jax.vmap(one)(jnp.asarray(sizes)).sum()

    with launches() as ran:
        got = jax.jit(jax.grad(total))(jnp.ones((2, X.data.shape[1], 16)))
    assert {name for name, _ in ran} == {backend}
    want = np.zeros((X.data.shape[1], 2))
    for first, second in sizes:
        for group, rows in enumerate((slice(0, first), slice(first, first + second))):
            want[:, group] += np.asarray(q.data[rows], np.float64).sum(0) * np.asarray(q.scales)[group]
    np.testing.assert_allclose(got, np.broadcast_to(want.T[:, :, None], got.shape), rtol=1e-5, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["triton_gpu", "pallas_tpu"])
def test_zero_points_without_a_kernel(backend: Any) -> None:
    """Those of rows, of the first of two uniform operands, and those that bfloat16 can't hold: XLA subtracts them."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    rows, w = quantize(X, jnp.int8, (4, 2), symmetric=False), quantize(1 + W, jnp.uint8, "column", symmetric=False)
    assert w.zero_points is not None

    def with_zeros(zeros: Array) -> GroupedTensor:
        return GroupedTensor(w.data, scales=w.scales, scaling=w.scaling, zero_points=zeros)

    def ran_in(lhs: Any, rhs: Any) -> Any:
        with launches() as ran:
            jax.jit(partial(matmul, backend=INTERPRETED[backend])).lower(lhs, rhs)
        return ran

    fractions = w.zero_points.astype(jnp.float32) + 0.3
    pairs: list[tuple[Any, Any]] = [
        (X.mT, rows),
        (rows.mT, X),
        (rows, W),
        (w.mT, W),
        (X, with_zeros(fractions)),
        (X, with_zeros(w.zero_points.astype(jnp.int32))),
        (X, with_zeros(-w.zero_points.astype(jnp.int8))),
    ]
    for lhs, rhs in pairs:
        assert {name for name, _ in ran_in(lhs, rhs)} == {"xla"}, (lhs, rhs)
        got = matmul(lhs, rhs, preferred_element_type=jnp.float32, backend=INTERPRETED[backend]).data
        values = [x.dequantize() if isinstance(x, GroupedTensor) else x for x in (lhs, rhs)]
        np.testing.assert_allclose(got, matmul(*values, precision="highest").data, rtol=1e-4, atol=1e-2)
    assert {name for name, _ in ran_in(X, w)} == {backend}
    few = quantize(1 + W, jnp.uint4, "column", symmetric=False)
    for dtype in ("uint4", "int4", "int8", "uint8"):
        zeros: Any = few.zero_points
        few = GroupedTensor(few.data, scales=few.scales, scaling=few.scaling, zero_points=zeros.astype(dtype))
        assert {name for name, _ in ran_in(X, few)} == {backend}
