"""Calls that raise, each with the error that it prints: `docs/errors.md` is made of them.

python -m tests.errors      writes the page
"""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import equinox as eqx
import jax

from ragged.core import errors

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"

SETUP = """
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import ragged
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from ragged import GroupedTensor, tuning

sizes = jnp.array([3, 5, 0, 4], jnp.int32)
x = GroupedTensor(jnp.ones((16, 8)), first_dims=sizes)  # ragged rows
columns = x.mT
both = GroupedTensor(jnp.ones((16, 8)), first_dims=sizes, last_dims=sizes)
w = jnp.ones((4, 8, 6))
u = GroupedTensor(w)  # uniform
heads = GroupedTensor(jnp.ones((16, 2, 8)), first_dims=sizes)  # of groups with more dims
q = ragged.quantize(x, jnp.int8, "row")
gradient = eqx.filter_grad(lambda x: jnp.sum(x.data))(x)
stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), x)
route = ragged.route(jnp.array([2, 0, 2, 0]), num_groups=3)
pairs = ragged.route(jnp.array([[2, 0], [0, 1], [1, 2], [2, 0]]), num_groups=3)
tokens = jnp.ones((4, 8))
masked = np.ma.masked_equal(np.eye(2), 0)
ids, rows = jnp.zeros(4, jnp.int32), jnp.ones((2, 8))
recipe = ragged.Recipe.preset("rowwise")
delayed = ragged.Recipe.preset("delayed")
cast = ragged.Cast("int8", "row")
mx = ragged.Scaling.of("mx")
n = ragged.quantize(GroupedTensor(jnp.ones((16, 32)), sizes), "float4_e2m1fn", "nvfp4")
batched = jax.lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])
explicit = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Explicit,))
auto = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
with jax.set_mesh(explicit):
    sharded = jax.device_put(x.data, P("e"))
    xs = GroupedTensor(sharded, sizes)
    ws = jax.device_put(w, P(None, "e"))
    unreduced = jax.jit(lambda a, b: jnp.einsum("ik,kj->ij", a, b, out_sharding=P(unreduced={"e"})))
    part = unreduced(jax.device_put(x.data, P(None, "e")), jax.device_put(w[0], P("e")))
apart = GroupedTensor(jax.device_put(heads.data, NamedSharding(explicit, P(None, "e"))), sizes)
key = jax.random.key(0)
router, experts = ragged.nn.Router(8, 4, 2, key=key), ragged.nn.Experts(8, 16, 4, key=key)
moe = ragged.nn.MoE(router, experts)
moe_relu = ragged.nn.MoE(router, ragged.nn.Experts(8, 16, 4, activation=jax.nn.relu, key=key))
moe_over = ragged.nn.MoE(router, experts, axis="a")
blocks = ragged.quantize(experts.down.weight, jnp.int8, (12, 1))
moe_in_blocks = ragged.nn.MoE(router, eqx.tree_at(lambda e: e.down.weight, experts, blocks), tensor_axis="a")
moe_two = ragged.nn.MoE(router, experts, axis="a", data_axes=("b",))
two = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
three = jax.make_mesh((3,), ("a",), axis_types=(AxisType.Auto,))


def over(fn, *args, mesh=auto, **options):
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("a"), out_specs=P("a"), **options)
    return jax.eval_shape(mapped, *args)


numbers = itertools.count(1)


def with_slope(slope):
    tanh = jax.custom_jvp(jnp.tanh)
    tanh.defjvp(lambda z, dz: (jnp.tanh(*z), slope * dz[0]))
    return tanh


class Param:  # as flax's `nnx.Param`
    def __init__(self, array):
        self._array = array

    def __jax_array__(self):
        return self._array

    def __getitem__(self, index):
        return self._array[index]


class NamedArray:  # as haliax's
    def __init__(self, array, axes):
        self.array, self.axes = array, axes


param, named = Param(w), NamedArray(w, ("experts", "d", "hidden"))


def many(data):
    return ragged.matmul(GroupedTensor(data, sizes), jnp.ones((4, 1, 1), jnp.int8)).data


def deeper(data):
    return data[:, None]
"""

CALLS = {
    "Making a tensor": """
GroupedTensor(jnp.ones((16, 8)), first_dims=[3, 5, 0, 4])
GroupedTensor(jnp.ones((16, 8)), first_dims=jnp.ones(4))
GroupedTensor(jnp.ones((16, 8)), first_dims=sizes[None])
GroupedTensor(jnp.ones((16, 8)), sizes, sizes[:3])
GroupedTensor(jnp.ones(16), sizes)
GroupedTensor(jnp.ones((2, 16, 8)), None, sizes)
jax.eval_shape(lambda data: GroupedTensor(data, sizes), jax.ShapeDtypeStruct((2**31, 8), jnp.float32))
GroupedTensor(jnp.ones((16, 8)), sizes, scales=jnp.ones((16, 1)), scaling="row")
GroupedTensor(w, scales=jnp.ones((4, 1, 6), jnp.bfloat16), scaling=ragged.Scaling.of("column"))
GroupedTensor(jnp.ones((4, 32, 6), jnp.float8_e4m3fn), scales=jnp.ones((4, 32, 1), jnp.uint8), scaling=mx)
GroupedTensor(jnp.ones((4, 32, 6), jnp.uint8), scales=jnp.ones((4, 32, 1), jnp.float8_e8m0fnu), scaling=mx)
GroupedTensor(jnp.ones((16, 8)), sizes, scaling=ragged.Scaling.of("row"), tensor_scale=jnp.float32(1))
GroupedTensor(jnp.ones((16, 8)), sizes, scales=jnp.ones((16, 1)))
GroupedTensor(jnp.ones((16, 8), jnp.int8), sizes, scales=jnp.ones(4), scaling=ragged.Scaling.of("row"))
GroupedTensor(jnp.ones((16, 8), jnp.int8), sizes, scales=jnp.ones((4, 8)), scaling=ragged.Scaling((4, 1)))
GroupedTensor(q.data, sizes, scales=q.scales, scaling=q.scaling, tensor_scale=jnp.float32(1))
GroupedTensor(n.data, sizes, scales=n.scales, scaling=n.scaling, tensor_scale=jnp.ones(3))
GroupedTensor(n.data, sizes, scales=n.scales, scaling=n.scaling, tensor_scale=jnp.ones((4, 1)))
GroupedTensor(q.data, sizes, scales=q.scales, scaling=q.scaling, zero_points=jnp.ones(16, jnp.int8))
GroupedTensor(q.data.astype(jnp.float8_e4m3fn), sizes, scales=q.scales, scaling=q.scaling, zero_points=q.scales)
GroupedTensor(q.data, sizes, zero_points=jnp.ones((16, 1), jnp.int8))
GroupedTensor.from_list([jnp.ones((2, 3))], ragged="rows")
GroupedTensor.from_list([])
GroupedTensor.from_list([jnp.ones((2, 3)), jnp.ones((4, 3))], ragged="last")
GroupedTensor.from_list([jnp.ones((2, 3)), jnp.ones((2, 4))])
GroupedTensor.from_list([jnp.ones((2, 3))], capacity=1)
GroupedTensor.from_list([masked])
GroupedTensor.from_list([np.array([[1, None]])])
GroupedTensor.from_list([jax.device_put(jnp.ones((2, 3)), device) for device in jax.devices()[:2]])
GroupedTensor.from_list([jnp.ones((2, 3, 4))], ragged="last")
GroupedTensor.from_list([jnp.ones((2, 3, 4)), jnp.ones((2, 5, 4))])
heads.mT
GroupedTensor(heads.data, sizes, sizes).mT
ragged.quantize(jnp.ones((2, 3, 4, 5)), jnp.int8, "row").mT
ragged.Rows["tokens d", "g"]
GroupedTensor.from_padded(jnp.ones((2, 3)), jnp.array([2, 1]))
GroupedTensor.from_padded(np.array([[["a"]]]), jnp.array([1]))
GroupedTensor.from_padded(jnp.ones((2, 4, 3)), jnp.array([2.0, 1.0]))
GroupedTensor.from_padded(jnp.ones((2, 4, 3)), jnp.array([2, 1, 1]))
GroupedTensor.from_padded(jnp.ones((2, 4, 3)), jnp.array([2, 1]), capacity=-1)
ragged.concat(3)
ragged.concat([x, columns])
""",
    "Its groups": """
u.offsets
x[4]
x[1:3]
jax.jit(lambda x: x[0])(x)
x.to_padded(-1)
gradient.num_groups
stack.offsets
x.rows("first", None)
x.columns(jnp.int32(2), None)
GroupedTensor(jnp.ones((16, 8)), first_dims=jnp.array([3, 50, 0, 4])).validate()
eqx.filter_jit(lambda x: x.validate().sum())(GroupedTensor(jnp.ones((16, 8)), jnp.array([3, 50, 0, 4])))
over(lambda n: GroupedTensor(jnp.ones((16, 8)), n).validate().first_dims, sizes, mesh=two, axis_names={"a"})
x.validate(like=u)
stack.validate()
jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), x).validate()
x.map(jnp.add, GroupedTensor(jnp.ones((16, 6)), sizes))
jnp.exp(u)
jax.nn.softmax(heads)
x.validate(like=GroupedTensor(jnp.ones((16, 8)), sizes[::-1]))
eqx.filter_jit(lambda x, y: (x.validate(like=y) + y).sum())(x, GroupedTensor(jnp.ones((16, 8)), sizes[::-1]))
""",
    "Arithmetic": """
3 in x
jnp.exp(x)
x + jnp.ones(4)
x + jnp.ones((4, 8))
x + jnp.ones((4, 8))[:, None]
x - jnp.ones(16)[:, None]
x + Param(jnp.ones(8))
x * jnp.ones((16, 8))
jnp.ones(4) - x
x.map(jnp.add, jnp.ones((4, 8)))
x * jnp.ones((2, 2))
x + columns
x + GroupedTensor(jnp.ones((16, 8)), sizes[::-1])
x * ragged.per_row(jnp.ones(4))
x.map(lambda rows: rows[:3])
x.map(jnp.add, "1")
x.map(jnp.modf)
x.map(jnp.add, jnp.ones(8))
bool(x > 0)
bool(x)
route.dispatch(tokens).map(jnp.add, route.gathered(tokens))
x.sum(0)
both.softmax(window=-1)
both.softmax(axis=0)
heads.softmax(sink=jnp.zeros(3))
x.softmax(-2, sink=ragged.per_group(jnp.zeros(4)))
q + 1
""",
    "Products": """
ragged.matmul(x, jnp.ones((3, 8, 6)))
ragged.matmul(jnp.ones((2, 4, 8)), w)
ragged.matmul(x, route.gathered(tokens))
ragged.matmul(x, jnp.ones((4, 6, 8)))
ragged.matmul(x, x)
ragged.matmul(columns, u)
ragged.matmul(u, columns)
jnp.ones((4, 6)) @ x
jnp.ones((4, 8)) @ x
jnp.ones((4, 16)) @ x
columns @ jnp.ones((16, 3))
both @ jnp.ones((8, 3))
ragged.matmul(x, jnp.ones((4, 7, 6)))
ragged.matmul(columns, GroupedTensor(jnp.ones((16, 6)), sizes[:3]))
ragged.matmul(jnp.ones((2, 8)), jnp.ones((8, 2)))
ragged.matmul(columns, GroupedTensor(jnp.ones((17, 6)), sizes))
ragged.matmul(columns, GroupedTensor(jnp.ones((16, 6)), sizes[::-1]))
ragged.matmul(x, "w")
ragged.matmul(x, param)
x @ named
ragged.gated_matmul(x, param, param)
ragged.gated_matmul(x, param, columns="halves")
ragged.matmul(GroupedTensor(Param(x.data), sizes), w)
ragged.grouped_matmul(x.data, named, sizes)
ragged.grouped_matmul(x.data, w, sizes, existing_out=Param(jnp.ones((16, 6))))
ragged.matmul(x, w, bias=Param(jnp.ones((4, 6))))
ragged.matmul(x, jnp.ones(8))
ragged.matmul(jnp.ones((4, 2, 3, 8)), columns)
ragged.matmul(heads, w, out_sharding=P())
ragged.matmul(stack, w)
ragged.matmul(GroupedTensor(None, sizes), w)
ragged.matmul(x, w.astype(jnp.complex64))
ragged.matmul(x.astype(bool), w)
ragged.matmul(x, w, preferred_element_type=jnp.int32)
ragged.matmul(x, w.astype(jnp.float8_e8m0fnu))
jax.jit(jax.vmap(many)).lower(jax.ShapeDtypeStruct((3, 2**30, 1), jnp.int8))
ragged.matmul(x, w, preferred_element_type=jnp.float8_e8m0fnu)
ragged.matmul(x, w, precision="exact")
ragged.matmul(x, w, backend="cutlass")
ragged.matmul(x, w, backend="pallas_tpu")
ragged.matmul(x, w, backend=tuning.TpuConfig(m=3, k=128, n=128))
ragged.matmul(x, w, group_offset="first")
ragged.matmul(x, w, group_offset=jnp.zeros(1, jnp.int32))
ragged.matmul(x, w, group_offset=jnp.float32(0))
ragged.matmul(x, jnp.ones((8, 6)), group_offset=0)
ragged.matmul(x, columns, group_offset=0)
ragged.matmul(x, w, num_actual_groups=2)
ragged.matmul(columns, x, num_actual_groups=0)
ragged.matmul(x, w, existing_out=jnp.ones((16, 7)))
ragged.matmul(x, w, existing_out=jnp.ones((16, 6), jnp.bfloat16), preferred_element_type=jnp.float32)
ragged.matmul(x, w, existing_out="here")
ragged.matmul(x, w, existing_out=q)
ragged.matmul(x, w, existing_out=columns)
ragged.matmul(x, w, existing_out=GroupedTensor(jnp.ones((16, 6)), sizes[::-1]))
ragged.matmul(x, columns, max_last=-1)
ragged.matmul(x, w, max_last=4)
ragged.matmul(u, jnp.ones((4, 6, 2)), capacity=4)
ragged.matmul(x, w, capacity=4)
jax.grad(lambda w: jnp.sum(ragged.matmul(x, w, preferred_element_type=jnp.float8_e5m2).data.astype(jnp.float32)))(w)
jax.linear_transpose(lambda x, w: ragged.grouped_matmul(x, w, sizes), x.data, w)(jnp.ones((16, 6)))
""",
    "Letters": """
ragged.einsum("a b, b c -> a c", x.data, w[0])
ragged.einsum(3, x, w)
ragged.einsum("t d, g d e", x, w)
ragged.einsum("... d, g d e -> ... e", x, w)
ragged.einsum("t t, g d e -> t e", x, w)
ragged.einsum("t d, g d e -> t e", x, "w")
ragged.einsum("t d, g d e -> t e", GroupedTensor(None, sizes), w)
ragged.einsum("t d, d e -> t e", x, w)
ragged.einsum("g m k, h k n -> g m n", u, u.mT)
ragged.einsum("t d, g d e -> t g e", x, u)
ragged.einsum("t d, g d e -> g t e", x, u)
ragged.einsum("t g d, g d e -> t e", GroupedTensor(jnp.ones((16, 4, 8)), sizes), u)
ragged.einsum("g m k, g k n -> m g n", u, u.mT)
ragged.einsum("g m k, g k n -> m n", u, u.mT)
ragged.einsum("t d, g d e -> t f", x, w)
ragged.einsum("t d, g d e -> t d", x, w)
ragged.einsum("t h d, g d e -> t e", heads, w)
ragged.einsum("t d, g t e -> t d e", x, jnp.ones((4, 16, 6)))
ragged.einsum("t d, t e -> g d e", x, jnp.ones((16, 6)))
ragged.einsum("t d, t e -> t d e", x, x)
ragged.einsum("t d, t e -> g d e", x, GroupedTensor(x.data, sizes[::-1]))
ragged.einsum("t h d, s h d -> h t s", heads, heads)
ragged.einsum("t h d, g d e -> h t e", heads, w)
ragged.einsum("t d, t e -> d e", x, x)
ragged.einsum("t h d, t d -> g h", heads, x)
ragged.einsum("t h s, h e -> t e s", GroupedTensor(heads.data, sizes, sizes), w[0, :2])
ragged.einsum("t d, g d e -> t e", x, w.mT)
ragged.einsum("t d, g d e -> t e", x, w[:3])
ragged.einsum("t h d, g d e -> t h e", heads, w, existing_out="y")
ragged.einsum("t h d, g d e -> t h e", heads, w, existing_out=x)
ragged.einsum("t h d, g d e -> t h e", heads, w, existing_out=heads)
ragged.einsum("t h d, g d e -> t h e", heads, w, existing_out=GroupedTensor(jnp.ones((16, 2, 6)), sizes[::-1]))
ragged.einsum("t d, s d -> t s", x, x, max_last=8, existing_out=ragged.matmul(x, x.mT, max_last=8).mT)
ragged.einsum("t h d, g h d -> t h", heads, ragged.quantize_weights(jnp.ones((4, 2, 8)), "rowwise"))
ragged.einsum("t h d, g d e -> t h e", ragged.quantize(heads, "float8_e4m3fn", "column"), w)
ragged.einsum("t h d, g h d e -> t h e", heads, ragged.quantize(jnp.ones((4, 2, 8, 4)), "float8_e4m3fn", (2, 4)))
ragged.explain(x, w, spec="t d, g d e -> t f")
""",
    "Epilogues and gates": """
ragged.gated_matmul(heads, w, w)
ragged.gated_matmul(x, w)
ragged.gated_matmul(x, u)
ragged.gated_matmul(x, w, w, activation="swish")
ragged.gated_matmul(x, w, w, names="mlpwi")
ragged.gated_matmul(x, w, w, names=("mlpwi_0", 1))
ragged.gated_matmul(x, w, w, names=("mlpwi_0", "mlpwi_1"), save="out")
ragged.matmul(x, w, activation="silu", name=b"mlpwi")
ragged.matmul(x, w, name="mlpwi")
ragged.gated_matmul(x, w, columns="thirds")
ragged.gated_matmul(x, w, w, columns="halves")
ragged.gated_matmul(x, w[..., :5], columns="halves")
ragged.gated_matmul(x, w, columns="halves", bias=jnp.ones(5))
ragged.gated_matmul(x, w, columns="interleaved", bias=np.float32(1))
ragged.gated_matmul(x, w, columns="interleaved", bias=(jnp.ones(5), None))
ragged.gated_matmul(x, w[0], columns="halves", bias=jnp.ones((3, 6)))
ragged.gated_matmul(x, w, w, activation=lambda gate, up: gate * jax.nn.softmax(up))
ragged.gated_matmul(x, w, w, activation=jax.nn.softmax)
ragged.matmul(x, w, activation=jax.nn.softmax)
ragged.matmul(x, w, activation=lambda z: z.T)
ragged.matmul(x, w, activation=lambda z: (z, z))
ragged.matmul(x, w, activation=lambda z: z > 0)
ragged.matmul(x, w, activation=lambda z: z * jnp.ones(6))
ragged.matmul(x, w, activation=lambda z: z * w[0, 0])
ragged.matmul(x, w, activation=lambda z: z * jnp.arange(6.0))
ragged.matmul(x, w, activation=lambda z: None)
ragged.matmul(x, w, activation=lambda z: next(numbers) * z)
ragged.matmul(x, w, activation=lambda gate, up, more: gate * up)
ragged.gated_matmul(x, w, w, activation=lambda gate, up, more: gate * up)
jax.grad(lambda w: ragged.matmul(x, w, activation=lambda z: z * w[0, 0, 0]).data.sum())(w)
jax.grad(lambda w: ragged.matmul(x, w, activation=with_slope(w[0, 0, 0])).data.sum())(w)
ragged.matmul(x, w, activation=lambda z: [z, jax.debug.print("z")][0])
ragged.matmul(x, w, activation=jnp.add)
ragged.matmul(x, w, activation="swish")
ragged.matmul(x, w, activation="silu", save="nothing")
ragged.matmul(x, w, bias=jnp.ones((4, 6), jnp.int32))
ragged.matmul(x, w, bias=jnp.ones((3, 6)))
ragged.matmul(columns, x, activation="silu")
ragged.matmul(x.astype(jnp.int8), w.astype(jnp.int8), activation="relu")
ragged.gated_matmul(x, w, w[:, :, :2])
ragged.gated_matmul(x, w, w, recipe=delayed)
ragged.gated_matmul(x, w, w, bias=jnp.ones((4, 6)))
""",
    "Plain arrays": """
ragged.grouped_matmul(x, w, sizes)
ragged.grouped_matmul(w, w, sizes)
ragged.grouped_matmul(x.data, w[0], sizes)
ragged.grouped_matmul(x.data, w, sizes.astype(jnp.float32))
ragged.grouped_matmul(x.data, w, np.array([3, 5, 0, 2**40]))
ragged.grouped_matmul(x.data, w, sizes, transpose_rhs=True)
ragged.grouped_matmul(x.data, jnp.ones((5, 8, 6)), sizes)
ragged.grouped_matmul(x.data, w, sizes, input_buffer_count=0)
ragged.grouped_matmul(x.data, w, sizes, interpret="yes")
ragged.grouped_matmul(x.data, w, sizes, tiling=lambda m, k, n: None)
ragged.grouped_matmul(x.data, w, sizes, tiling=(8, 8))
ragged.grouped_matmul(x.data, w, sizes, tiling=(8, 8, 8), backend=tuning.XlaConfig(m=(8,)))
ragged.grouped_matmul(x.data, w, sizes, existing_out="here")
ragged.transposed_grouped_matmul(x.data, x.data, sizes)
ragged.lax.ragged_dot(x, w, sizes)
ragged.lax.ragged_dot(x.data, w, [3, 5, 0, 4])
ragged.lax.ragged_dot(x.data, w[:3], sizes)
ragged.lax.ragged_dot(x.data, w, sizes, "most")
ragged.lax.ragged_dot_general(x.data, w, sizes, (((1,), (1,)), ((), ())))
ragged.lax.ragged_dot_general(x.data, w, sizes, jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], []))
ragged.lax.ragged_dot_general(w, w.mT, sizes, batched, group_offset=1)
""",
    "Routes": """
ragged.route(jnp.array([0.0, 1.0]), 2)
ragged.route(jnp.zeros((2, 2, 2), jnp.int32), 2)
ragged.route(jnp.int32(0), 2)
ragged.route(jnp.array([0, 1]), 0)
route.dispatch([1.0, 2.0])
route.dispatch(jnp.ones((3, 8)))
route.dispatch(jnp.ones(4))
route.dispatch(jnp.ones((2, 2, 8)))
route.gathered(jnp.ones((4, 2, 8)))
pairs.gathered(tokens) * ragged.per_row(jnp.ones(8))
1 / route.gathered(tokens) + route.dispatch(tokens)
jnp.ones((4, 8)) - route.gathered(tokens)
route.gathered(tokens).map(jnp.add, route.gathered(tokens))
route.gathered(tokens).map(deeper)
route.gathered(tokens).sum(-1)
route.gathered(tokens)[0]
len(route.gathered(tokens))
list(route.gathered(tokens))
1.0 in route.gathered(tokens)
bool(route.gathered(tokens) > 0)
jnp.exp(route.gathered(tokens))
route.combine(jnp.ones((4, 8)))
route.combine(x)
route.combine(GroupedTensor(jnp.ones((4, 8)), jnp.array([1, 1, 2], jnp.int32)))
route.combine(GroupedTensor(jnp.ones((4, 8), jnp.int32), route.first_dims), jnp.ones(4))
route.combine(route.dispatch(jnp.ones((4, 8))), jnp.ones(4, jnp.int32))
route.combine(route.dispatch(jnp.ones((4, 8))), jnp.ones((4, 2)))
pairs.combine(pairs.dispatch(tokens), jnp.ones((2, 2, 2)))
""",
    "Quantised numbers": """
ragged.quantize(x, jnp.float16, "row")
ragged.quantize(x, jnp.int8, "rows")
ragged.quantize(x, jnp.int8, (0, 128))
ragged.Scaling((1, 128), dtype=jnp.int8)
ragged.quantize(q, jnp.int8, "row")
ragged.quantize(x.astype(jnp.int32), jnp.int8, "row")
ragged.quantize(x, jnp.int8, "row", power_of_two=1)
ragged.quantize(GroupedTensor(None, sizes), jnp.int8, "row")
ragged.quantize(stack, jnp.int8, "row")
ragged.quantize("x", jnp.int8, "row")
ragged.quantize(x.data, jnp.int8, "row")
ragged.quantize_weights("w", recipe)
jax.grad(lambda data: ragged.quantize(GroupedTensor(data, sizes), jnp.int8, "row").scales.sum())(x.data)
jax.grad(lambda scale: ragged.quantize(x, jnp.int8, "row", scale=scale).scales.sum())(0.5)
ragged.quantize(x, "uint4", "row")
ragged.quantize(x, "float8_e4m3fn", "row", symmetric=False)
ragged.quantize(x, "uint4", "row", symmetric=False, scale=0.5)
ragged.quantize(x, "uint4", "nvfp4", symmetric=False)
ragged.quantize(x, "uint4", "row", symmetric="no")
ragged.quantize(x, "int8", "row", scale="auto")
ragged.quantize(x, "int8", "row", scale=jnp.ones((3, 1)))
ragged.quantize(x, "int8", "row", scale=sizes)
ragged.quantize(x, "int8", "row", scale=0.0)
ragged.Cast("int8", (None, 1))
ragged.Cast("int8", "row", power_of_two=1)
ragged.Cast("int8", "row", scale=0.5, amax=1.0)
ragged.Cast(None, scale=0.5)
ragged.Cast("int8", "row", scale="auto")
ragged.Cast("int8", "row", amax=-1.0)
ragged.Cast("int8", scale=1e-40)
ragged.Cast("int8", scale=1e60)
ragged.Cast("int8", scale=[])
jax.jit(lambda s: ragged.Cast("int8", "row", scale=s).scale)(0.5)
ragged.matmul(x, w, recipe=ragged.Recipe((ragged.Cast("int8", "row", scale=jnp.ones(3)), cast)))
ragged.Recipe(*[(ragged.Cast("int8", scale=0.5),) * 2] * 3, jnp.zeros((3, 16)))
ragged.Recipe((cast, cast), (cast, cast), (cast, cast), save="all")
ragged.Recipe((cast, cast), (cast, cast), "int8")
ragged.Recipe((cast, cast), (cast, cast), (cast, cast), jnp.zeros((3, 16)))
ragged.Recipe(*[(ragged.Cast("int8", "tensor"),) * 2] * 3, jnp.zeros((3, 16), jnp.int32))
ragged.Recipe(*[(ragged.Cast("int8", "tensor"),) * 2] * 3, jnp.zeros((2, 16)))
ragged.Recipe.preset("delayed", length=0)
ragged.Recipe.preset("fp8")
ragged.matmul(x, w, recipe=8)
ragged.matmul(q, w, recipe=recipe)
ragged.matmul(x.astype(jnp.int32), w, recipe=recipe)
jax.random.bits(delayed.state.leaf[0, 0])
jax.jvp(lambda w: ragged.matmul(x, w, recipe=recipe).data, (w,), (w,))
jax.hessian(lambda w: jnp.sum(ragged.matmul(x, w, recipe=recipe).data ** 2))(w)
jax.grad(lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(ragged.matmul(x, w, recipe=recipe).data ** 2))(w)))(w)
over(lambda d: ragged.matmul(GroupedTensor(d, sizes), w, recipe=delayed.unsealed()).data, x.data, check_vma=False)
jax.grad(lambda recipe: ragged.matmul(x, w, recipe=recipe.sealed()).data.sum())(delayed.unsealed())
ragged.quantize_weights(w, delayed)
ragged.quantize_weights(x, recipe)
ragged.quantize_weights(ragged.quantize(w, jnp.int8, "row"), recipe)
ragged.quantize_weights(w[None], recipe)
ragged.matmul(x, ragged.quantize_weights(w, recipe))
ragged.matmul(x, ragged.quantize_weights(w, recipe), recipe=delayed)
ragged.matmul(x, ragged.quantize_weights(w, recipe), recipe="blockwise")
ragged.matmul(jnp.ones((2, 8)), ragged.quantize_weights(w, recipe), recipe=recipe)
ragged.error_table(x, w, recipes=[])
jax.jit(lambda w: ragged.error_table(x, w))(w)
ragged.error_table(x, w, ["rowwise"]).plot("backward")
""",
    "Configurations and tuning": """
tuning.XlaConfig(m=0)
tuning.TpuConfig(interpret="yes")
ragged.matmul(x, w, backend=tuning.Configs(tuning.XlaConfig(m=(8,)), tuning.TpuConfig(m=8, k=128, n=128)))
ragged.matmul(x, w, backend=tuning.Configs("fast"))
tuning.using("fast")
tuning.using(tuning.XlaConfig(m=(8,)), tuning.XlaConfig(m=(16,)))
tuning.using(tuning.TpuConfig(interpret=True))
tuning.using(tuning.Configs(tuning.XlaConfig(m=(8,))), tuning.XlaConfig(m=(8,)))
tuning.using(cached="no")
tuning.sample_sizes("skewed", 4, 16)
tuning.sample_sizes("even", 0, 16)
tuning.candidates(x, w, most=0)
tuning.candidates(xs, ws)
tuning.autotune(x, w, seconds=0)
tuning.autotune(x, w, backend=tuning.XlaConfig(m=(8,)))
tuning.autotune(x, w, backend=tuning.TpuConfig(interpret=True))
tuning.autotune(lambda x: x.sum(), x)
tuning.autotune(lambda x: x @ w, x, backend="xla")
tuning.autotune(x, w, w)
jax.jit(lambda x: tuning.autotune(x, w))(x)
tuning.autotune(x, w, sizes=[0.5, 0.5])
tuning.autotune(x, w, sizes=[8, 8])
tuning.autotune(x, w, sizes=[8, 8, 8, 8])
tuning.Found(tuning.XlaConfig(m=(8,)), 0.0, 1.0, "even", "today")
tuning.load_cache("README.md")
tuning.save_cache("README.md")
ragged.explain(x, w, device="H200")
ragged.explain(x, w, device=8)
ragged.explain(x, w, device="NVIDIA H200", platform="tpu")
ragged.explain(x, w, platform="metal")
ragged.explain(x, w).plan("backward")
jax.jit(lambda x: ragged.explain(x, w).plot() and x)(x)
ragged.explain(u, jnp.ones((4, 6, 2))).plot()
""",
    "Many devices": """
GroupedTensor(x.data, jax.device_put(sizes, NamedSharding(explicit, P("e")))).offsets
GroupedTensor(part, sizes) + 1
ragged.matmul(x, w, out_sharding="e")
ragged.matmul(x, w, out_sharding=P("e"))
ragged.matmul(xs, ws, out_sharding=P(P.UNCONSTRAINED))
ragged.matmul(xs, ws, out_sharding=NamedSharding(auto, P("a")))
ragged.matmul(xs, ws, out_sharding=P("e", "e"))
ragged.matmul(xs, ws, out_sharding=P("b"))
ragged.matmul(xs, ws, out_sharding=P(None, None, "e"))
ragged.matmul(xs, jnp.ones((4, 8, 5)), out_sharding=P(None, "e"))
ragged.matmul(xs, ws, out_sharding=P(unreduced={"e"}), existing_out=jnp.ones((16, 6)))
ragged.matmul(xs, ws, out_sharding=P(unreduced={"e"}), activation="silu")
ragged.matmul(xs, w, out_sharding=P(unreduced={"e"}))
ragged.sharded_matmul(x, w, mesh=auto, in_specs=(P("a"), P()), out_specs=P("a"), recipe=recipe)
ragged.sharded_matmul(x, w, mesh=auto, in_specs=(P("a"), P()), out_specs=P("a"), save="out")
ragged.sharded_matmul(x, w, mesh="auto", in_specs=(P("a"), P()), out_specs=P("a"))
ragged.sharded_matmul(x, w, mesh=auto, in_specs=P("a"), out_specs=P("a"))
ragged.sharded_matmul(x, w, mesh=auto, in_specs=(P("a"), P()), out_specs=P("a"), alpha=2.0)
ragged.sharded_matmul(x, w, mesh=auto, in_specs=("a", P()), out_specs=P("a"))
ragged.sharded_matmul(x, w, mesh=auto, in_specs=(P("a"), P()), out_specs=P(unreduced={"a"}))
ragged.sharded_matmul(x, w, mesh=auto, in_specs=(P("a", "a"), P()), out_specs=P("a"))
ragged.sharded_matmul(x, w, mesh=auto, in_specs=(P("a"), P()), out_specs=P("a"), out_shard_callback=3)
ragged.sharded_matmul(x, w, mesh=auto, in_specs=(P(None, None, "a"), P()), out_specs=P("a"))
ragged.sharded_matmul(x, w, mesh=auto, in_specs=(P("b"), P()), out_specs=P("a"))
ragged.sharded_matmul(x, w[..., :5], mesh=auto, in_specs=(P(), P(None, None, "a")), out_specs=P(None, "a"))
ragged.sharded_matmul(x, w, mesh=auto, in_specs=(P(), P()), out_specs=P(), out_shard_callback=lambda y: y.mT)
ragged.exchange("route", "a")
ragged.exchange(route, "a")
over(lambda ids: ragged.exchange(ragged.route(ids, 3), "a").dropped[None], ids)
over(lambda ids: ragged.exchange(ragged.route(ids, 4), "a", "mpi").dropped[None], ids)
over(lambda ids: ragged.exchange(ragged.route(ids, 4), "a", capacity=1).dropped[None], ids)
over(lambda ids: ragged.exchange(ragged.route(ids, 4), "a", chunks=9).dropped[None], ids)
over(lambda ids: ragged.exchange(ragged.route(ids, 4), "a", None, 3, 2).dropped[None], ids)
over(lambda ids: ragged.exchange(ragged.route(ids, 4), "a", "ring", 1, 2).dropped[None], ids)
over(lambda ids: ragged.exchange(ragged.route(ids, 4), "a", wire=ragged.Cast(None)).dropped[None], ids)
over(lambda ids: ragged.exchange(ragged.route(ids, 4), "a", wire="tensorwise").dropped[None], ids)
over(lambda ids: (ex := ragged.exchange(ragged.route(ids, 4), "a")).combine(ex.dispatch(rows).map(deeper)), ids)
ragged.einsum("t h d, g d e -> t h e", apart, w)
ragged.parallel.estimate(tokens=0, d=8, hidden=8, experts=4, top_k=2, devices=2)
ragged.parallel.estimate(tokens=8, d=8, hidden=8, experts=4, top_k=2, devices=2, link=0)
ragged.parallel.estimate(tokens=8, d=8, hidden=8, experts=4, top_k=2, devices=3)
ragged.parallel.estimate(tokens=8, d=8, hidden=8, experts=4, top_k=5, devices=2)
ragged.parallel.estimate(tokens=8, d=8, hidden=8, experts=4, top_k=2, devices=2, chunks=9)
ragged.parallel.estimate(tokens=8, d=8, hidden=8, experts=4, top_k=2, devices=2, transport="mpi")
ragged.parallel.estimate(tokens=8, d=8, hidden=8, experts=4, top_k=2, devices=2, capacity=1, transport="dense")
ragged.parallel.estimate(tokens=8, d=8, hidden=8, experts=4, top_k=2, devices=2, dtype="int8")
""",
    "Layers": """
ragged.nn.GroupedLinear(0, 8, 4, key=jax.random.key(0))
ragged.nn.Router(8, 4, top_k=5, key=key)
ragged.nn.Router(8, 4, 2, score="relu", key=key)
ragged.nn.Router(8, 4, top_k=1, normalize=True, key=key)
ragged.nn.Router(8, 4, 2, groups=(3, 1), key=key)
ragged.nn.Router(8, 4, 2, epsilon=-1, key=key)
ragged.nn.Router(8, 4, 2, scale=jnp.float32(2.5), key=key)
ragged.nn.Router(8, 4, 2, normalize="yes", key=key)
ragged.nn.Router(8, 4, 2, dtype="int8", key=key)
ragged.nn.Router(8, 4, 2, score=lambda logits: logits[:, :3], key=key)(tokens)
router(jnp.ones((2, 4, 8)))
router(jnp.ones((4, 8), jnp.int32))
router.select(tokens)
router.with_selection_bias(jnp.zeros(3))
router.with_selection_bias(jnp.zeros((2, 4)))
ragged.nn.Experts(8, 16, 4, activation="swish", key=key)
ragged.nn.Experts(8, 16, 4, gated=False, activation=lambda gate, up: gate * up, key=key)
ragged.nn.Experts(8, 16, 4, save="all", key=key)
ragged.nn.Experts(8, 16, 4, dtype="foo", key=key)
ragged.nn.MoE(2, experts)
ragged.nn.MoE(ragged.nn.Router, experts)
ragged.nn.MoE(router, 4)
ragged.nn.MoE(router, ragged.nn.Experts(8, 16, 3, key=key))
ragged.nn.MoE(router, experts, experts)
ragged.nn.MoE(router, experts, shared_gate=jnp.zeros(8))
ragged.nn.MoE(router, experts, ragged.nn.Experts(8, 16, key=key), shared_gate=[0.0] * 8)
ragged.nn.MoE(lambda x: jax.lax.top_k(x[1:], 3), experts)(x.data)
ragged.nn.MoE(lambda x: jax.lax.top_k(x, 2)[::-1], experts)(x.data)
ragged.nn.MoE(lambda x: x, experts)(x.data)
ragged.nn.MoE(lambda x: (x, jnp.full(x.shape, 4)), experts)(x.data)
ragged.nn.MoE(router, experts, axis="a", tensor_axis="a")
ragged.nn.MoE(router, experts, axis=3)
ragged.nn.MoE(router, experts, transport="mpi")
ragged.nn.MoE(router, experts, capacity="x")
ragged.nn.MoE(router, experts, chunks=-1)
ragged.nn.MoE(router, experts, wire="foo")
jax.export.export(jax.jit(lambda m: m.router))(moe_relu).serialize()
moe(jnp.ones((4, 8), jnp.int32))
moe(jnp.ones((2, 4, 8)))
moe(heads)
moe(x, mask=jnp.arange(16) < 12)
moe(x.data, mask=jnp.arange(12) < 12)
moe(x.data, jnp.arange(16))
ragged.nn.MoE(lambda x, ids: jax.lax.top_k(x, 2), experts)(x.data, jnp.arange(15))
moe(x.data, routing=(jnp.ones((15, 2)), jnp.zeros((15, 2), jnp.int32)))
moe(x.data, routing=(jnp.ones((16, 2)), jnp.full((16, 2), 4)))
moe(x.data, routing="ab")
moe(x.data, routing=ragged.nn.Routing(jnp.ones((16, 2)), [[0, 1]] * 16))
moe(x.data, routing=ragged.nn.Routing(jnp.ones((16, 2)), jnp.zeros((16, 2), jnp.int32), jnp.ones((15, 4))))
moe_over(jnp.ones((4, 8)))
with jax.set_mesh(auto): moe_over(jnp.ones((5, 8)))
with jax.set_mesh(auto): moe_in_blocks(jnp.ones((4, 8)))
with jax.set_mesh(three): moe_over(jnp.ones((6, 8)))
with jax.set_mesh(two): over(lambda t: moe_two(t)[0], jnp.ones((4, 8)), axis_names={"a"}, mesh=two)
""",
}

UNREACHED = {
    "tuning/search.py:autotune": "one needs a program of several processes",
    "tools/explanation.py:plot": "one needs a machine without matplotlib",
    "tools/error_table.py:plot": "one needs a machine without matplotlib",
}
"""Where `fail` is called and the page shows no call, and why."""


type Place = tuple[str, int]  # file, first line of a call of `fail`


def places() -> dict[Place, str]:
    """Every call of `Site.fail` in the package, with `file:function`. The command lines' own have pages of theirs."""
    found: dict[Place, str] = {}
    for path in sorted((ROOT / "ragged").rglob("*.py")):
        file = str(path.relative_to(ROOT / "ragged"))
        if file in ("core/errors.py", "__main__.py", "conformance/__init__.py"):
            continue

        def visit(node: ast.AST, function: str, file: str = file) -> None:
            if isinstance(node, ast.FunctionDef):
                function = node.name
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in ("fail", "text"):
                found[file, called.lineno] = f"{file}:{function}"
            for child in ast.iter_child_nodes(node):
                visit(child, function)

        visit(ast.parse(path.read_text()), "")
    return found


@contextmanager
def seen() -> Iterator[set[tuple[str, int]]]:
    """The lines from which errors were made."""
    lines: set[tuple[str, int]] = set()
    text = errors.Site.text

    def noted(self: Any, problem: str, hint: str) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # past `fail`, and what checks annotations
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(ROOT / "ragged") and file.name != "errors.py":
                lines.add((str(file.relative_to(ROOT / "ragged")), frame.f_lineno))
                break
            frame = frame.f_back
        return text(self, problem, hint)

    with patch.object(errors.Site, "text", noted):
        yield lines


def raised(code: str, names: dict[str, Any]) -> Exception | None:
    try:
        exec(compile(code, "<error>", "exec"), names)
    except Exception as error:
        return error
    return None


def told(error: Exception) -> str:
    """The error as a page shows it; of a run-time error only the message, which Equinox prints after a stack."""
    text = str(error)
    name = type(error).__name__
    if isinstance(error, eqx.EquinoxRuntimeError):
        text = text.split("equinox.EquinoxRuntimeError: ")[-1].split("\n\n")[0].split("\n---")[0]
    return f"{name}: {text}".strip()


def page() -> tuple[str, set[tuple[str, int]]]:
    """The page, and the lines that its errors come from."""
    names: dict[str, Any] = {}
    exec(compile(SETUP, "<setup>", "exec"), names)
    parts = [HEAD.format(setup=SETUP.strip())]
    with seen() as lines:
        for title, calls in CALLS.items():
            parts.append(f"## {title}\n")
            for code in calls.strip().splitlines():
                before = jax.sharding.get_mesh()
                error = raised(code, names)
                if jax.sharding.get_mesh() != before:
                    jax.set_mesh(before)
                shown = "nothing" if error is None else told(error)
                parts.append(f"```text\n>>> {code}\n{shown}\n```\n")
    return "\n".join(parts), lines


HEAD = """# Errors

This page lists the errors of the library, with calls that raise them. To find the cause of an error, search the page
for a part of its text.

Every error names the call and the problem, shows the arguments that it received, unless the problem names them already,
and ends with a hint. A `TypeError` means a wrong kind or dtype. A `ValueError` means wrong shapes, sizes or options. A
`NotImplementedError` means a valid request that the library doesn't support.

`python -m tests.errors` writes this page. A test checks that each call raises the error shown, and that the page covers
every place in the package that raises such an error, except those that `tests/errors.py` lists with a reason. All calls
run after

```text
{setup}
```
"""

if __name__ == "__main__":
    import os

    os.environ.setdefault("RAGGED_TUNING_CACHE", "off")
    jax.config.update("jax_num_cpu_devices", 8)
    text, lines = page()
    PAGE.write_text(text)
    unreached = {at: where for at, where in places().items() if at not in lines}
    sys.stdout.write("\n".join(f"{at} {where}" for at, where in unreached.items()) + "\n")
