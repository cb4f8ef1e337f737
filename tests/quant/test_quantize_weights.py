"""Weights quantised once, for the forward products and dgrads of many microbatches."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

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
from ragged.quant.recipe import PRESETS
from tests import cases

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# The casts of the weights differ, and so do their blocks' extents.
MIXED = Recipe(
    (Cast(E4M3, "row"), Cast(E5M2, (2, 4))),
    (Cast(E5M2, (1, 4)), Cast(jnp.int8, "row")),
    (Cast(jnp.int8, "row", True), Cast(E4M3, "tensor")),
)
HALF = Recipe((Cast(E4M3, "row"), Cast(None)), (Cast(E4M3, "row"), Cast(E4M3, (1, 8))), (Cast(None), Cast(None)))
RECIPES = [Recipe.preset(name) for name in PRESETS if name != "delayed"] + [MIXED, HALF]
NARROW = {"float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int8", "int4"}


def value_and_gradients(x: GroupedTensor, w: Any, ct: Array, recipe: Recipe, once: bool) -> Any:
    """Of the product, by both operands; in a product from the left, `x` has ragged columns."""

    def product(data: Array, w: Any) -> Array:
        y = x.with_data(data)
        if y.kind != "ragged columns":
            return matmul(y, quantize_weights(w, recipe) if once else w, recipe=recipe).data
        return matmul(quantize_weights(w.mT, recipe).mT if once else w, y, recipe=recipe).data

    out, pull = jax.vjp(product, x.data, w)
    return out, *pull(ct)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("layout", ["forward", "forward_left", "batched", "shared"])
def test_the_same_bits(layout: str, recipe: Recipe) -> None:
    """Value and both gradients, those of the weights straight-through; one matrix for all groups; NaN tails."""
    case = cases.make("forward" if layout == "shared" else layout, g=3, capacity=20, uniform=(6, 36, 20))
    x, w = (case.rhs, case.lhs.data) if layout == "forward_left" else (case.lhs, case.rhs.data)
    w = w[0] if layout == "shared" else w
    shape = matmul(w, x).shape if layout == "forward_left" else matmul(x, w).shape
    ct = jax.random.normal(jax.random.key(0), shape)
    run = jax.jit(value_and_gradients, static_argnames=("recipe", "once"))
    for got, want in zip(*(run(x, w, ct, recipe, once) for once in (True, False)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_scales_that_only_one_product_rounds() -> None:
    """Weights are quantised twice if one product has scales that are powers of two, and the other one any scales."""
    cast, rounded = (Cast(E4M3, "tensor", power_of_two) for power_of_two in (False, True))
    q = quantize_weights(np.array([[[600.0, 1.0], [2.0, 3.0]]], np.float32), Recipe((cast, cast), (cast, rounded)))
    assert (float(q.by_first.scales), float(q.by_last.scales)) == (np.float32(600 / 448), 2)


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


SIZES = jnp.array([5, 0, 7], jnp.int32)


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


def gradients(accumulated: bool) -> Any:
    return jax.jit(of_each_batch if accumulated else jax.grad(of_batches), static_argnums=(2, 3))


W, BATCHES = jax.random.normal(jax.random.key(0), (3, 36, 20)), jax.random.normal(jax.random.key(1), (4, 14, 36))


@pytest.mark.parametrize("recipe, outside", [("nvfp4", 2), ("blockwise", 1), ("rowwise", 2)])
@pytest.mark.parametrize("accumulated", [False, True])
def test_once_for_all_microbatches(accumulated: bool, recipe: str, outside: int) -> None:
    """No loop quantises weights, forward or backward; where blocks are square, one pass makes both orientations."""
    once, anew = (gradients(accumulated).trace(W, BATCHES, recipe, once).jaxpr.jaxpr for once in (True, False))
    assert casts_in(once, W.size) == (outside, 0)
    assert casts_in(anew, W.size) == (0, 2)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("recipe", ["nvfp4", "blockwise", MIXED], ids=lambda recipe: getattr(recipe, "name", recipe))
@pytest.mark.parametrize("accumulated", [False, True])
def test_gradient_over_microbatches(accumulated: bool, recipe: Any) -> None:
    """That of the sum of the losses, and the sum of the losses' gradients."""
    once, anew = (gradients(accumulated)(W, BATCHES, recipe, once) for once in (True, False))
    np.testing.assert_allclose(once, anew, rtol=1e-6, atol=1e-6)
    assert not once[1].any() and np.linalg.norm(once) > 1


X = GroupedTensor(BATCHES[0], SIZES)


def second_derivatives(w: Array, once: bool) -> Any:
    """Of a vector product with the dgrad, by the weights and the cotangent; of one with the wgrad, by `x` and it."""
    again = Recipe(MIXED.forward, MIXED.dgrad, MIXED.wgrad, save="operands")
    weights: Any = quantize_weights(w, again) if once else w
    v, ct = BATCHES[1], BATCHES[2, :, :20]

    def dgrad(weights: Any, ct: Array) -> Array:
        pull = jax.vjp(lambda data: matmul(X.with_data(data), weights, recipe=again).data, X.data)[1]
        return jnp.vdot(v, pull(ct)[0])

    def wgrad(data: Array, ct: Array) -> Array:
        pull = jax.vjp(lambda weights: matmul(X.with_data(data), weights, recipe=again).data, weights)[1]
        return jnp.vdot(2 * w, pull(ct)[0].weights if once else pull(ct)[0])

    by_weights, *others = jax.grad(dgrad, argnums=(0, 1), allow_int=True)(weights, ct)
    return by_weights.weights if once else by_weights, *others, *jax.grad(wgrad, argnums=(0, 1))(X.data, ct)


@pytest.mark.long
def test_second_derivatives() -> None:
    """A derivative of the dgrad has the weights that were made; those of a wgrad have none, but vectors."""
    run = jax.jit(second_derivatives, static_argnums=1)
    for got, want in zip(run(W, True), run(W, False), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.long
def test_under_transformations() -> None:
    """A map over weights, a layer, a `shard_map` over groups, `explain`, export and back."""
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


@pytest.mark.long
def test_in_gated_products() -> None:
    """Under an activation and in a gate, both of whose products have weights of their own."""

    def loss(w: Array, once: bool) -> Array:
        gate, up = (quantize_weights(each, "mxfp8") if once else each for each in (w, 2 * w))
        y = ragged.gated_matmul(X, gate, up, recipe="mxfp8")
        return jnp.sum(matmul(X, gate, recipe="mxfp8", activation="silu").data * y.data)

    once, anew = (jax.jit(jax.value_and_grad(lambda w, by=by: loss(w, by)))(W) for by in (True, False))
    for got, want in zip(once, anew, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_repr_and_shape() -> None:
    made = jax.jit(lambda w: quantize_weights(w, "mxfp8"))(W)
    assert repr(made) == "QuantizedWeights(f32[3,36,20])" and (made.shape, made.dtype) == (W.shape, W.dtype)
    assert made.mT.shape == (3, 20, 36) and eqx.tree_equal(made.mT.mT, made)
