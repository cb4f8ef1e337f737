"""`matmul` of quantised operands, beyond values, which `tests/contract` has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor, matmul, quantize
from tests import cases

F32: dict[str, Any] = {"preferred_element_type": jnp.float32}
E4M3 = jnp.float8_e4m3fn


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


X = GroupedTensor(jax.random.normal(jax.random.key(0), (8, 64)), jnp.array([3, 5], jnp.int32))
W = jax.random.normal(jax.random.key(1), (2, 64, 16))
QX, QW = quantize(X, E4M3, "row"), quantize(W, E4M3, "column")


def test_a_fixed_operand_may_be_quantised_inside() -> None:
    """The hint that the error names."""
    fixed = jax.grad(lambda w: jnp.sum(matmul(X, quantize(jax.lax.stop_gradient(w), E4M3, "row")).data) + w.sum())(W)
    np.testing.assert_array_equal(fixed, np.ones(W.shape))


def test_explain() -> None:
    text = str(ragged.explain(QX, QW))
    assert "derivatives: by lhs none, by rhs none" in text
    assert "forward: ragged rows × uniform -> ragged rows, bf16[8,16]" in text
    assert "on tpu: grouped_matmul of pallas_tpu" in text
