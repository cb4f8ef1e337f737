"""Weights quantised once, for the products of many microbatches. Values: `tests/contract/test_recipes.py`."""

from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

import ragged
from ragged import Cast, GroupedTensor, Recipe, matmul, quantize_weights
from tests.cases import INT8_ROWS, normal

NARROW = {"float8_e4m3fn", "float4_e2m1fn"}
SIZES = jnp.array([5, 0, 7], jnp.int32)
W, BATCHES = normal((3, 36, 20)), normal((4, 14, 36), 1)
X = GroupedTensor(BATCHES[0], SIZES)


def test_scales_that_only_one_product_rounds() -> None:
    """Weights are quantised twice if one product has scales that are powers of two, and the other one any scales."""
    cast, rounded = (Cast("float8_e4m3fn", "tensor", power_of_two) for power_of_two in (False, True))
    q = quantize_weights(np.array([[[600.0, 1.0], [2.0, 3.0]]], np.float32), Recipe((cast, cast), (cast, rounded)))
    scales: Any = [each.scales for each in (q.by_first, q.by_last) if each is not None]
    assert scales == [np.float32(600 / 448), 2]
    made = jax.jit(lambda w: quantize_weights(w, "mxfp8"))(W)
    assert repr(made) == "QuantizedWeights(f32[3,36,20])" and (made.shape, made.dtype) == (W.shape, W.dtype)
    assert made.mT.shape == (3, 20, 36) and eqx.tree_equal(made.mT.mT, made)


def casts_in(jaxpr: Any, size: int, inside: bool = False) -> tuple[int, int]:
    """How often something of `size` elements becomes 8 or 4 bits: outside of all loops, and in them."""
    counts = np.zeros(2, int)
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type":
            out = equation.outvars[0].aval
            counts[int(inside)] += out.size == size and out.dtype.name in NARROW
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                counts += casts_in(inner, size, inside or equation.primitive.name in ("scan", "while"))
    return tuple(counts)


def of_batches(w: Array, batches: Array, recipe: Any, once: bool) -> Array:
    """The sum of the microbatches' losses."""
    weights = quantize_weights(w, recipe) if once else w

    def add(total: Array, rows: Array) -> tuple[Array, None]:
        y = matmul(GroupedTensor(rows, SIZES), weights, recipe=recipe)
        return total + jnp.sum(y.map(jnp.tanh).data), None

    return jax.lax.scan(add, jnp.zeros(()), batches)[0]


def of_each_batch(w: Array, batches: Array, recipe: Any, once: bool) -> Array:
    """The gradient, accumulated over the microbatches' own."""
    weights = quantize_weights(w, recipe) if once else w

    def loss(weights: Any, rows: Array) -> Array:
        return jnp.sum(matmul(GroupedTensor(rows, SIZES), weights, recipe=recipe).map(jnp.tanh).data)

    def add(total: Array, rows: Array) -> tuple[Array, None]:
        gradient = eqx.filter_grad(loss)(weights, rows)
        return total + (gradient.weights if once else gradient), None

    return jax.lax.scan(add, jnp.zeros(w.shape), batches)[0]


@pytest.mark.parametrize("recipe, outside", [("nvfp4", 2), ("blockwise", 1), ("rowwise", 2)])
@pytest.mark.parametrize("function", [jax.grad(of_batches), of_each_batch], ids=["sum of losses", "sum of gradients"])
def test_once_for_all_microbatches(function: Any, recipe: str, outside: int) -> None:
    """No loop quantises weights, forward or backward; where blocks are square, one pass makes both orientations."""
    run = jax.jit(function, static_argnums=(2, 3))
    once, anew = (run.trace(W, BATCHES, recipe, once).jaxpr.jaxpr for once in (True, False))
    assert casts_in(once, W.size) == (outside, 0)
    assert casts_in(anew, W.size) == (0, 2)


def test_once_of_uniform_rows() -> None:
    """Rows that `quantize_weights` has quantised in int8 aren't quantised again, neither by XLA nor by a kernel."""
    w, x = normal((3, 6, 36)), GroupedTensor(W)
    made = quantize_weights(w, INT8_ROWS)

    def lowered(w: Any) -> str:
        return jax.jit(lambda w, x: matmul(w, x, recipe=INT8_ROWS).data).lower(w, x).as_text()

    for operand, is_made in ((w, False), (made, True)):
        assert ("-> tensor<3x6x36xi8>" in lowered(operand)) != is_made


@pytest.mark.long
def test_under_transformations() -> None:
    """A map over weights, a layer, `explain`, an export, a `shard_map` over groups."""
    ws = jnp.stack([W, 2 * W])
    made = jax.jit(jax.vmap(lambda w: quantize_weights(w, "mxfp8")))(ws)
    got = jax.vmap(lambda w: matmul(X, w, recipe="mxfp8").data)(made)
    for i in range(2):
        np.testing.assert_array_equal(got[i], matmul(X, ws[i], recipe="mxfp8").data)
    layer = ragged.nn.GroupedLinear(36, 20, 3, recipe="mxfp8", key=jax.random.key(0))
    quantised = eqx.tree_at(lambda layer: layer.weight, layer, quantize_weights(layer.weight, "mxfp8"))
    np.testing.assert_array_equal(quantised(X).data, layer(X).data)
    grads = [eqx.filter_grad(lambda layer: jnp.sum(layer(X).data ** 2))(each).weight for each in (quantised, layer)]
    np.testing.assert_array_equal(grads[0].weights, grads[1])
    one = quantize_weights(W, "mxfp8")
    table, same = (ragged.error_table(X, w, "rowwise") for w in (one, W))
    np.testing.assert_array_equal(table.sqnr, same.sqnr)
    assert str(ragged.explain(X, one, recipe="mxfp8")) == str(ragged.explain(X, W, recipe="mxfp8"))
    exported = jax.export.export(jax.jit(lambda w: matmul(X, w, recipe="mxfp8").data))(one)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(one), matmul(X, W, recipe="mxfp8").data)
    mesh = jax.make_mesh((3,), ("g",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])

    def loss(w: Array, once: bool) -> Array:
        def local(w: Array) -> Array:
            first = jax.lax.axis_index("g").astype(jnp.int32)
            weights = quantize_weights(w, "mxfp8") if once else w
            y = matmul(X, weights, group_offset=first, recipe="mxfp8")
            return jax.lax.psum(jnp.sum(y.data**2), "g")

        return jax.shard_map(local, mesh=mesh, in_specs=P("g"), out_specs=P())(w)

    once, anew = (jax.jit(jax.value_and_grad(lambda w, by=by: loss(w, by)))(W) for by in (True, False))
    assert eqx.tree_equal(once, anew)
