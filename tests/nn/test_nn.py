"""`ragged.nn`: layers equal dense ones in float64, on one device and over meshes of any shape and type of axes."""

import math
import re
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from ragged.nn import Experts, GroupedLinear, MoE, Router, Routing
from tests import tpu
from tests.benchmarks import memory
from tests.moe import moe as layer_of

D, HIDDEN, EXPERTS, TOP_K, TOKENS = 12, 8, 16, 2, 64


def moe(**options: Any) -> MoE:
    return layer_of(D, HIDDEN, EXPERTS, TOP_K, num_shared=2, key=jax.random.key(0), **options)


def skewed(layer: MoE) -> MoE:
    """Of the experts, the last two get no token, and the first most: by the first feature, which is always 1."""
    bias = jnp.zeros(EXPERTS).at[0].set(3.0).at[-2:].set(-100.0)
    return eqx.tree_at(lambda m: m.router.weight, layer, layer.router.weight.at[0].set(bias))


def tokens() -> Array:
    return jax.random.normal(jax.random.key(1), (TOKENS, D)).at[:, 0].set(1.0)


def mlp(experts: Any, x: Array) -> Array:
    """Every token through every expert: `[experts, tokens, d]`."""
    hidden = jnp.einsum("td,edh->eth", x, experts.up.weight)
    activation = experts.activation
    activation = (lambda z: z / (1 + jnp.exp(-z))) if activation in ("silu", jax.nn.silu) else activation
    if experts.gate is None:
        hidden = activation(hidden)
    else:
        hidden = activation(jnp.einsum("td,edh->eth", x, experts.gate.weight)) * hidden
    return jnp.einsum("eth,ehd->etd", hidden, experts.down.weight)


def dense(layer: MoE, x: Array) -> tuple[Array, Array, Array]:
    """The definition, without a route: the result, the load-balance loss and the z loss."""
    logits = x @ layer.router.weight
    probabilities = jnp.exp(logits) / jnp.sum(jnp.exp(logits), axis=1, keepdims=True)
    chosen = jnp.argsort(-probabilities, axis=1)[:, :TOP_K]
    is_chosen = jnp.any(chosen[:, :, None] == jnp.arange(EXPERTS)[None, None], axis=1)  # [tokens, experts]
    weights = probabilities * is_chosen.astype(x.dtype)
    if layer.router.normalize:
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    y = jnp.einsum("etd,te->td", mlp(layer.experts, x), weights)
    if layer.shared is not None:
        y = y + mlp(layer.shared, x)[0]
    share = jnp.mean(is_chosen.astype(x.dtype), axis=0) / TOP_K
    balance = EXPERTS * jnp.sum(share * jnp.mean(probabilities, axis=0))
    return y, balance, jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), axis=1)) ** 2)


def results(call: Any) -> Any:
    """A jitted function to the values of a layer, and the gradients of a loss that depends on all of them."""

    def loss(layer: MoE, x: Array) -> tuple[Array, Any]:
        y, balance, z = call(layer, x)
        return jnp.sum(jnp.sin(y)) + 2 * balance + 0.1 * z, (y, balance, z)

    def run(layer: MoE, x: Array) -> Any:
        (_, values), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(layer, x)
        return values, grads

    return jax.jit(run)


def as_float64(run: Any, layer: MoE, x: Array) -> list[np.ndarray]:
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), (layer, x))
        found = jax.tree.map(np.asarray, jax.tree.leaves(run(*wide)))
    assert {leaf.dtype for leaf in found} == {np.dtype(np.float64)}
    return found


def check(layer: MoE, call: Any, reference: MoE) -> None:
    want = as_float64(results(dense), reference, tokens())
    got = jax.tree.leaves(results(call)(layer, tokens()))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6)


def plain(layer: MoE, x: Array) -> tuple[Array, Array, Array]:
    y, stats = layer(x)
    assert stats.load_balance is not None and stats.z is not None
    return y, stats.load_balance, stats.z


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gated": False, "normalize": False, "activation": jnp.tanh},
        {"activation": "silu"},
        {"activation": "silu", "save": "out"},
        {"activation": "silu", "save": "nothing", "gated": False},
    ],
    ids=range(5),
)
def test_moe_on_one_device(options: dict[str, Any]) -> None:
    """And what the router did with the tokens."""
    layer = skewed(moe(**options))
    check(layer, plain, layer)
    y, stats = eqx.filter_jit(layer)(tokens())
    logits = np.asarray(tokens() @ layer.router.weight)
    counts = np.bincount(np.argsort(-logits, axis=1)[:, :TOP_K].reshape(-1), minlength=EXPERTS)
    assert stats.rows.tolist() == counts.tolist() and counts[-1] == 0 and counts[0] > TOKENS // 2
    assert int(stats.dropped) == 0 and y.dtype == jnp.float32


@pytest.mark.parametrize("save, kept", [("pre", 3), ("out", 1), ("nothing", 0)])
def test_what_experts_keep(save: str, kept: int) -> None:
    """Arrays of the size of the hidden rows: two pre-activations and the hidden rows themselves; these; none."""
    experts = eqx.filter_eval_shape(lambda: moe(activation="silu", save=save).experts)
    hidden = experts.up.weight.shape[2]

    def run(experts: Any, x: Array) -> Array:
        return experts(ragged.GroupedTensor(x, jnp.full(EXPERTS, 2, jnp.int32))).data

    x = jax.ShapeDtypeStruct((2 * EXPERTS + 1, D), jnp.float32)
    _, vjp = jax.eval_shape(lambda *args: jax.vjp(run, *args), experts, x)
    assert [leaf.shape for leaf in jax.tree.leaves(vjp)].count((2 * EXPERTS + 1, hidden)) == kept


@pytest.mark.parametrize(
    "gated, save, kept, num_tokens",
    [
        (True, "pre", 2, None),
        (True, "pre", 2, 5),
        (False, "pre", 1, None),
        (True, "out", 1, None),
        (True, "nothing", 0, 5),
    ],
)
def test_what_a_layer_keeps(gated: bool, save: str, kept: int, num_tokens: int | None) -> None:
    """Of the tokens themselves one copy, of their dtype; of hidden rows what `save` says; of other rows nothing.
    With padding no more."""
    options: dict[str, Any] = {"gated": gated, "save": save, "dtype": jnp.bfloat16}
    layer = eqx.filter_eval_shape(lambda: layer_of(D, HIDDEN, EXPERTS, TOP_K, key=jax.random.key(0), **options))
    x = jax.ShapeDtypeStruct((TOKENS, D), jnp.bfloat16)
    _, vjp = jax.eval_shape(
        lambda *args: jax.vjp(
            lambda layer, x: layer(x, mask=None if num_tokens is None else jnp.arange(TOKENS) < num_tokens)[0], *args
        ),
        layer,
        x,
    )
    leaves = jax.tree.leaves(vjp)
    rows = [(leaf.dtype.name, leaf.shape) for leaf in leaves if leaf.shape[-1:] in ((D,), (HIDDEN,)) and leaf.ndim < 3]
    of_tokens = ("bfloat16", x.shape)
    assert sorted(rows) == sorted([of_tokens, *[("bfloat16", (TOKENS * TOP_K, HIDDEN))] * kept])
    assert not [leaf for leaf in leaves if leaf.shape == (TOKENS, TOP_K, D)]


def test_a_quantised_layer_gathers_its_rows_again() -> None:
    """With `save="nothing"` and a recipe, the only rows per expert that are saved are the results."""
    make = partial(layer_of, D, HIDDEN, EXPERTS, TOP_K, save="nothing", recipe="rowwise", key=jax.random.key(0))
    layer, x = eqx.filter_eval_shape(make), jax.ShapeDtypeStruct((TOKENS, D), jnp.float32)
    _, vjp = jax.eval_shape(lambda *args: jax.vjp(lambda layer, x: layer(x)[0], *args), layer, x)
    assert [leaf.shape for leaf in jax.tree.leaves(vjp)].count((TOKENS * TOP_K, D)) == 1


@pytest.mark.long
@pytest.mark.parametrize("save, gated", [("pre", True), ("out", True), ("nothing", False)])
def test_gradients_in_bfloat16(save: str, gated: bool) -> None:
    """What is computed again for them is rounded no more often: within four roundings of 2 ** -9, of half a unit.

    A gradient that has seen a sum in bfloat16, or weights of bfloat16, is off by more.
    """
    layer = layer_of(128, 256, EXPERTS, TOP_K, gated=gated, save=save, dtype=jnp.bfloat16, key=jax.random.key(0))
    x, ct = (jax.random.normal(jax.random.key(i), (512, 128), jnp.bfloat16) for i in (1, 2))

    def gradients(call: Any) -> Any:
        return jax.jit(jax.grad(lambda layer, x: jnp.sum(call(layer, x) * ct.astype(x.dtype)), (0, 1)))

    want = as_float64(gradients(lambda layer, x: dense(layer, x)[0]), layer, x)
    got = jax.tree.leaves(gradients(lambda layer, x: layer(x)[0])(layer, x))
    for g, w in zip(got, want, strict=True):
        assert np.linalg.norm(np.asarray(g, np.float64) - w) < 4 * 2**-9 / np.sqrt(3) * np.linalg.norm(w)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"save": "nothing"}, {"gated": False, "save": "out"}], ids=str)
def test_other_derivatives(options: dict[str, Any]) -> None:
    """A derivative of the gradient in forward mode, and a `vmap` of it over tokens and layers."""
    layer, x = skewed(layer_of(D, HIDDEN, EXPERTS, TOP_K, key=jax.random.key(0), **options)), tokens()
    direction = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), layer)

    def run(call: Any) -> Any:
        def loss(layer: MoE, x: Array) -> Array:
            return jnp.sum(jnp.sin(call(layer, x)))

        def both(layer: MoE, x: Array) -> Any:
            return jax.jvp(lambda layer: jax.value_and_grad(loss)(layer, x), (layer,), (direction_as(layer),))

        return jax.jit(both)

    def direction_as(layer: MoE) -> MoE:
        return jax.tree.map(lambda leaf, d: d.astype(leaf.dtype), layer, direction)

    want = as_float64(run(lambda layer, x: dense(layer, x)[0]), layer, x)
    one = run(lambda layer, x: layer(x)[0])
    for g, w in zip(jax.tree.leaves(one(layer, x)), want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
    layers, xs = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.9 * leaf]), layer), jnp.stack([x, x[::-1]])
    mapped = jax.vmap(one)(layers, xs)
    for i in range(2):
        alone = one(jax.tree.map(lambda leaf, i=i: leaf[i], layers), xs[i])
        for g, w in zip(jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(g[i], w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case, hbm, temp",
    [
        pytest.param("pre", 1051, 1490, marks=pytest.mark.long),
        pytest.param("nothing", 622, 707, marks=pytest.mark.slow),
    ],
)
def test_memory_of_a_training_step(case: str, hbm: float, temp: float) -> None:
    """On a TPU v5e, at most 3 % above what was measured. With pre-activations, all that is elementwise is one pass
    over hidden rows; and over rows of the model's width, none weighs them: three clear tails, one adds two dgrads."""
    function, *avals = memory.step_of(**memory.CASES[case])
    compiled = tpu.compile_for("v5e", function, *avals)
    assert compiled.kernels
    found = memory.of_tpu("v5e", compiled.memory)
    assert found["v5e hbm"] < 1.03 * hbm and found["v5e temp"] < 1.03 * temp
    rows = memory.TOKENS * TOP_K
    passes = [
        re.findall(rf"%(\S+) = [^=\n]*\[(?:1,)?{rows},{width}\][^=\n]* fusion\([^\n]*kind=kLoop", compiled.text)
        for width in (memory.HIDDEN, memory.D)
    ]
    if case == "pre":
        assert [len(each) for each in passes] == [1, 4], passes
    assert not [name for name in passes[1] if name.startswith("multiply")], passes


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"normalize": True, "gated": False}], ids=str)
def test_no_tokens(options: dict[str, Any]) -> None:
    """No rows, and gradients and statistics of zeros."""

    def losses(layer: MoE, x: Array) -> tuple[Array, Any]:
        y, stats = layer(x)
        assert stats.load_balance is not None and stats.z is not None
        return jnp.sum(y) + stats.load_balance + stats.z, (y, stats)

    (total, (y, stats)), grads = eqx.filter_value_and_grad(losses, has_aux=True)(moe(**options), jnp.ones((0, D)))
    assert y.shape == (0, D)
    for each in jax.tree.leaves((total, stats, eqx.filter(grads, eqx.is_array))):
        np.testing.assert_array_equal(each, 0)


@pytest.mark.long
def test_moe_dtypes() -> None:
    """Rows are of the tokens' dtype, whatever the matrices' is; what the router did is float32."""
    layer = moe()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), layer)
        for each, x in ((layer, tokens().astype(jnp.bfloat16)), (wide, tokens().astype(jnp.float64))):
            y, stats = jax.eval_shape(each, x)
            assert y.dtype == x.dtype
            assert [leaf.dtype for leaf in jax.tree.leaves(stats)] == [jnp.float32] * 2 + [jnp.int32] * 2


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "8x1": ({"data": 8, "expert": 1}, {"axis": "expert", "data_axes": ("data",)}),
    "4x2": ({"data": 4, "expert": 2}, {"axis": "expert", "data_axes": ("data",)}),
    "2x4": ({"data": 2, "expert": 4}, {"axis": "expert", "data_axes": ("data",)}),
    "1x8": ({"expert": 8}, {"axis": "expert", "data_axes": ()}),
    "2x2x2": (
        {"data": 2, "expert": 2, "model": 2},
        {"axis": "expert", "data_axes": ("data",), "tensor_axis": "model"},
    ),
    "data": ({"data": 8}, {"data_axes": ("data",)}),
}


def mesh_of(axes: dict[str, int], kind: AxisType) -> Any:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("kind", AxisType, ids=str)
@pytest.mark.parametrize("transport", ["dense", "ring"])
@pytest.mark.parametrize("name", MESHES)
def test_moe_over_meshes(name: str, transport: str, kind: AxisType) -> None:
    """Values, losses and gradients by rows and matrices are those of a dense layer; `Manual` in a `shard_map`."""
    axes, options = MESHES[name]
    layer, one = skewed(moe(transport=transport, chunks=2, **options)), skewed(moe())
    specs, rows = layer.specs(), P((*options["data_axes"], "expert") if "expert" in axes else "data")
    mesh = mesh_of(axes, AxisType.Auto if kind == AxisType.Manual else kind)
    mapped = jax.shard_map(plain, in_specs=(specs, rows), out_specs=(rows, P(), P()))
    with jax.set_mesh(mesh):
        check(layer, mapped if kind == AxisType.Manual else plain, one)


def all_filled() -> MoE:
    """A layer with every parameter that one can have, none of them zero."""
    keys, num_experts, rng = jax.random.split(jax.random.key(0), 3), 4, np.random.default_rng(0)
    layer = MoE(
        Router(D, num_experts, TOP_K, use_bias=True, use_selection_bias=True, key=keys[0]),
        Experts(D, HIDDEN, num_experts, use_bias=True, key=keys[1]),
        Experts(D, 2 * HIDDEN, use_bias=True, key=keys[2]),
        shared_gate=jnp.ones(D),
    )
    arrays, rest = eqx.partition(layer, eqx.is_inexact_array)
    arrays = jax.tree.map(lambda x: jnp.float32(rng.standard_normal(x.shape) / x.shape[-1] ** 0.5), arrays)
    layer = eqx.combine(arrays, rest)
    router = layer.router.with_selection_bias(jnp.linspace(-1, 1, num_experts))
    return eqx.tree_at(lambda layer: layer.router, layer, router)


@pytest.mark.parametrize("name", ["model", *(pytest.param(name, marks=pytest.mark.long) for name in ("1x4", "2x2x2"))])
def test_each_parameter_counts_once(name: str) -> None:
    """What is added after a sum over devices is added by one of them: biases, the shared expert and its gate."""
    small: dict[str, Any] = {
        "model": ({"model": 4}, {"tensor_axis": "model"}),
        "1x4": ({"expert": 4}, {"axis": "expert"}),
    }
    (axes, options), x = small.get(name) or MESHES[name], tokens()[:8]

    def run(layer: MoE, x: Array) -> Any:
        def loss(layer: MoE) -> tuple[Array, Array]:
            y = layer(x)[0]
            return jnp.sum(jnp.sin(y)), y

        return eqx.filter_value_and_grad(loss, has_aux=True)(layer)

    layer = all_filled()
    many = MoE(layer.router, layer.experts, layer.shared, shared_gate=layer.shared_gate, **options)
    want = eqx.filter_jit(run)(layer, x)
    with jax.set_mesh(mesh_of(axes, AxisType.Auto)):
        got = eqx.filter_jit(run)(many, x)
    for (path, w), g in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4, err_msg=jax.tree_util.keystr(path))


PARTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dense": {"axis": "expert", "transport": "dense"},
    "ring": {"axis": "expert", "transport": "ring", "chunks": 2},
    "a function": {"activation": jax.nn.relu},
    "shared": {"num_shared": 1},
    "save": {"save": "nothing"},
}


class First(eqx.Module):
    """A router of the first expert."""

    def __call__(self, x: Array) -> tuple[Array, Array]:
        return jnp.ones((x.shape[0], 1)), jnp.zeros((x.shape[0], 1), jnp.int32)


def of_parts(**options: Any) -> MoE:
    """A layer whose hidden rows are ones, and whose result the sum of the rows of `down`: of all experts, or of the
    shared one."""
    how: dict[str, Any] = {"activation": "relu", "router": First()} | options
    layer = layer_of(2, 4, 2, 1, gated=False, dtype=jnp.bfloat16, key=jax.random.key(0), **how)
    down = jnp.broadcast_to(jnp.asarray([256, 1, -256, 0], jnp.bfloat16)[None, :, None], (2, 4, 2))
    ones = jnp.ones((2, 2, 4), jnp.bfloat16)
    if layer.shared is None:
        return eqx.tree_at(lambda each: (each.experts.up.weight, each.experts.down.weight), layer, (ones, down))
    new = 0 * down, ones[:1], down[:1]
    return eqx.tree_at(lambda x: (x.experts.down.weight, x.shared.up.weight, x.shared.down.weight), layer, new)


def of_halves(layer: MoE) -> Array:
    """What it makes of tokens of halves."""
    return layer(jnp.full((4, 2), 0.5, jnp.bfloat16))[0]


@pytest.mark.parametrize("name", ["alone", *(pytest.param(name, marks=pytest.mark.long) for name in [*PARTS][1:])])
def test_parts_of_hidden_are_summed_before_they_are_rounded(name: str) -> None:
    """256 + 1 on one device and -256 + 0 on another are 1, in bfloat16 too."""
    axes = ({"expert": 2} if "axis" in PARTS[name] else {}) | {"model": 2}
    with jax.set_mesh(mesh_of(axes, AxisType.Auto)):
        y = jax.jit(of_halves)(of_parts(tensor_axis="model", **PARTS[name]))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float64), 1)


@pytest.mark.long
@pytest.mark.parametrize("name", PARTS)
def test_gradients_of_parts_of_hidden(name: str) -> None:
    """In bfloat16, they are those of one device."""
    axes = ({"expert": 2} if "axis" in PARTS[name] else {}) | {"model": 2}
    alone = {key: option for key, option in PARTS[name].items() if key not in ("axis", "transport", "chunks")}
    gradient = jax.jit(jax.grad(lambda layer: jnp.sum(of_halves(layer).astype(jnp.float32))))
    with jax.set_mesh(mesh_of(axes, AxisType.Auto)):
        got = gradient(of_parts(tensor_axis="model", **PARTS[name]))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(gradient(of_parts(**alone))), strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=2**-7, atol=2**-7)


class Sigmoid(eqx.Module):
    """A router whose arrays are named as those of experts are."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> tuple[Array, Array]:
        scores = jax.nn.sigmoid(x @ self.weight)
        chosen = jax.lax.top_k(scores + self.bias[None], TOP_K)[1]
        return 2.5 * jnp.take_along_axis(scores, chosen, axis=1), chosen


@pytest.mark.parametrize("name", ["one", pytest.param("2x2x2", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["a module", pytest.param("a function", marks=pytest.mark.long)])
def test_another_router(name: str, kind: str) -> None:
    """The experts and weights that it returns, on one device and many; gradients reach its arrays by the weights."""
    axes, options = MESHES.get(name, ({"data": 1}, {}))
    keys = jax.random.split(jax.random.key(2))
    router = Sigmoid(jax.random.normal(keys[0], (D, EXPERTS)), jax.random.normal(keys[1], (EXPERTS,)))
    layer, x = moe(router=router if kind == "a module" else lambda x: router(x), **options), tokens()

    def by_hand(layer: MoE) -> Array:
        used = layer.router if kind == "a module" else router
        scores = 1 / (1 + jnp.exp(-x @ used.weight))
        chosen = jnp.argsort(-(scores + used.bias[None]), axis=1)[:, :TOP_K]
        is_chosen = jnp.any(chosen[:, :, None] == jnp.arange(EXPERTS)[None, None], axis=1)
        y = jnp.einsum("etd,te->td", mlp(layer.experts, x), 2.5 * scores * is_chosen.astype(x.dtype))
        return y + mlp(layer.shared, x)[0]

    with jax.set_mesh(mesh_of(axes, AxisType.Auto)):
        got = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: jnp.sum(jnp.sin(m(x)[0]))))(layer)
    want = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: jnp.sum(jnp.sin(by_hand(m)))))(layer)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


def test_each_layer_has_a_history_of_its_own() -> None:
    """So a model can be donated."""
    layer = moe(recipe=ragged.Recipe.preset("delayed", length=4))
    again = eqx.filter_jit(lambda layer: layer, donate="all")(layer)
    assert again.experts.up.recipe.history.shape == again.experts.gate.recipe.history.shape == (3, 4)


@pytest.mark.long
def test_who_has_what() -> None:
    """No device has more than its part of the experts, nor of their gradients, when they are placed as `specs` says."""
    mesh = mesh_of(MESHES["2x2x2"][0], AxisType.Explicit)
    with jax.set_mesh(mesh):
        layer = moe(**MESHES["2x2x2"][1], recipe="mxfp8")
        layer = jax.device_put(layer, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), layer.specs()))
        loss = eqx.filter_grad(lambda layer, x: jnp.sum(plain(layer, x)[0]))
        grads = eqx.filter_jit(loss)(layer, jax.device_put(tokens(), jax.NamedSharding(mesh, P(("data", "expert")))))
    for experts, parts in ((grads.experts, 4), (grads.shared, 2)):
        for each in (experts.gate, experts.up, experts.down):
            held = each.weight.addressable_shards[0].data
            assert parts * held.size == each.weight.size == math.prod(each.weight.shape) and jnp.any(held != 0)
    assert grads.router.weight.addressable_shards[0].data.shape == layer.router.weight.shape


@pytest.mark.long
def test_capacity_and_wire() -> None:
    """What has no room is counted over all devices; a payload of 8 bits costs a few percent."""
    exact, _ = eqx.filter_jit(skewed(moe()))(tokens())
    with jax.set_mesh(mesh_of({"expert": 4}, AxisType.Auto)):
        y, stats = eqx.filter_jit(skewed(moe(axis="expert", capacity=16)))(tokens())
        # Each device sends 4 rows of its 32 to each other one.
        assert int(stats.rows.sum()) == TOKENS * TOP_K and int(stats.dropped) >= TOKENS * TOP_K - 4 * 16
        assert np.abs(np.asarray(y - exact)).max() > 0.1
        rough, _ = eqx.filter_jit(skewed(moe(axis="expert", wire="mxfp8")))(tokens())
    error = jnp.linalg.norm(rough - exact) / jnp.linalg.norm(exact)
    assert 1e-3 < error < 0.05


# --- padding ----------------------------------------------------------------------------------------------------------


def by_hand(layer: MoE, x: Any, choose: Any = None) -> tuple[Any, Any, Any]:
    """The values `(y, balance, z, rows)` of a loop over tokens in NumPy's float64, and the gradients of
    `sum(sin(y)) + 2 * balance + 0.1 * z`: of the router, of the arrays of each expert (a shared one last), of `x`.

    `choose`: experts and constant weights of a token, of its logits; by default, the normalised largest probabilities.
    """
    router, x = np.asarray(layer.router.weight, np.float64), np.asarray(x, np.float64)
    parts = [layer.experts] + ([] if layer.shared is None else [layer.shared])
    weights = [[np.asarray(m.weight, np.float64) for m in (p.gate, p.up, p.down) if m is not None] for p in parts]
    experts: list[list[np.ndarray]] = [[each[e] for each in part] for part in weights for e in range(len(part[0]))]
    dweights = [[np.zeros_like(each) for each in expert] for expert in experts]
    rows, y, dx, drouter = np.zeros(EXPERTS, int), np.zeros_like(x), np.zeros_like(x), np.zeros_like(router)
    logits = x @ router
    highest = logits.max(axis=1, keepdims=True, initial=-np.inf)
    p = np.exp(logits - highest)
    lse = highest[:, 0] + np.log(p.sum(axis=1))
    p /= p.sum(axis=1, keepdims=True)
    chosen = [np.argsort(-each, kind="stable")[:TOP_K] if choose is None else choose(each)[1] for each in logits]
    for experts_of_token in chosen:
        rows[experts_of_token] += 1
    share, count = rows / max(1, rows.sum()), max(1, len(x))
    balance, z = EXPERTS * np.sum(share * p.sum(axis=0)) / count, np.sum(lse**2) / count
    for t, row in enumerate(x):
        picked, scale = p[t, chosen[t]], p[t, chosen[t]].sum()
        w = picked / scale if choose is None else choose(logits[t])[0]
        used = [(e, w[j]) for j, e in enumerate(chosen[t])] + [(e, 1.0) for e in range(EXPERTS, len(experts))]
        hidden = []
        for e, weight in used:
            *ups, down = experts[e]
            pre = [row @ up for up in ups]
            sigmoid = 1 / (1 + np.exp(-pre[0]))
            rest = pre[1] if len(pre) == 2 else 1.0
            hidden.append((pre, sigmoid, rest, pre[0] * sigmoid * rest))
            y[t] += weight * (hidden[-1][3] @ down)
        dy, dw = np.cos(y[t]), []
        for (e, weight), (pre, sigmoid, rest, h) in zip(used, hidden, strict=True):
            *ups, down = experts[e]
            dw.append(dy @ (h @ down))
            dweights[e][-1] += weight * np.outer(h, dy)
            dh = weight * (down @ dy)
            dpre = [dh * rest * sigmoid * (1 + pre[0] * (1 - sigmoid)), dh * pre[0] * sigmoid][: len(ups)]
            for i, d in enumerate(dpre):
                dweights[e][i] += np.outer(row, d)
                dx[t] += ups[i] @ d
        dp = 2 * EXPERTS * share / count
        if choose is None:
            dw = np.array(dw[:TOP_K])
            dp[chosen[t]] += (dw - dw @ w) / scale
        dlogits = p[t] * (dp - dp @ p[t]) + 0.1 * 2 * lse[t] / count * p[t]
        drouter += np.outer(row, dlogits)
        dx[t] += router @ dlogits
    return (y, balance, z, rows), (drouter, dweights), dx


def padded(count: int, value: float = np.nan) -> Array:
    """`tokens()`, the first `count` of them, and then NaN."""
    return tokens().at[count:].set(value)


def check_padded(layer: MoE, count: int, got: Any, choose: Any = None, rtol: float = 2e-5) -> None:
    """Values, statistics and gradients of a padded call are those of its first `count` rows; the others are zero."""
    (_, (y, stats)), (grads, dx) = jax.tree.map(np.asarray, got)
    dx = dx.data if isinstance(dx, GroupedTensor) else dx
    (want, balance, z, rows), (drouter, dweights), want_dx = by_hand(layer, tokens()[:count], choose)
    assert stats.rows.tolist() == rows.tolist() and int(stats.dropped) == 0
    parts = [grads.experts] + ([] if grads.shared is None else [grads.shared])
    found = [
        [m.weight[e] for m in (p.gate, p.up, p.down) if m is not None] for p in parts for e in range(len(p.up.weight))
    ]
    pairs = [(y[:count], want), (dx[:count], want_dx), (stats.load_balance, balance), (stats.z, z)]
    pairs += [(grads.router.weight, drouter)]
    pairs += [(g, w) for one, other in zip(found, dweights, strict=True) for g, w in zip(one, other, strict=True)]
    for g, w in pairs:
        np.testing.assert_allclose(np.asarray(g, np.float64), w, rtol=rtol, atol=rtol)
    for each in (y[count:], dx[count:]):
        np.testing.assert_array_equal(each, 0)


@eqx.filter_jit
def both_gradients(layer: MoE, x: Any, num_tokens: Any) -> Any:
    """Of a loss by layer and tokens: `((value, (y, stats)), (grads, dx))`."""

    def loss(both: tuple[MoE, Any]) -> tuple[Array, Any]:
        mask = None if num_tokens is None else jnp.arange(both[1].shape[0]) < num_tokens
        y, stats = both[0](both[1], mask=mask)
        data = y.data if isinstance(y, GroupedTensor) else y
        assert stats.load_balance is not None and stats.z is not None
        return jnp.sum(jnp.sin(data)) + 2 * stats.load_balance + 0.1 * stats.z, (data, stats)

    return eqx.filter_value_and_grad(loss, has_aux=True)((layer, x))


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.long)
            for options in [
                {"save": "out", "gated": False},
                {"save": "nothing"},
                {"activation": jax.nn.silu},
                {"tensor_axis": "model"},
            ]
        ),
    ],
    ids=["default", "saves out", "saves nothing", "a function", "a tensor axis"],
)
def test_padding(options: dict[str, Any]) -> None:
    """Rows where `mask` is False go to no expert, aren't counted, and NaN in them reaches nothing."""
    layer = moe(**options)
    with jax.set_mesh(mesh_of({"model": 2}, AxisType.Auto)):
        for count in (TOKENS - 7, 1, 0, TOKENS):
            check_padded(layer, count, both_gradients(layer, padded(count), jnp.int32(count)))


@pytest.mark.long
def test_packed_sequences() -> None:
    """A tensor of any groups is its rows; the result has its sizes. Wrong sizes end at the buffer."""
    layer = moe()
    for sizes, count in (([20, 0, 13], 33), ([0, 0, 0], 0), ([60, -5, 1000], TOKENS)):
        x = GroupedTensor(padded(count), jnp.array(sizes, jnp.int32))
        check_padded(layer, count, both_gradients(layer, x, None))


def test_the_result_of_packed_sequences() -> None:
    """It has the sizes of `x`, and zeros in its tail: the result of an array with so many tokens."""
    layer, x = moe(), GroupedTensor(padded(33), jnp.array([20, 0, 13], jnp.int32))
    run = eqx.filter_jit(lambda layer, x: layer(x))
    y, stats = run(layer, x)
    (want, balance, z, rows), *_ = by_hand(layer, tokens()[:33])
    assert isinstance(y, GroupedTensor) and y.first_dims.tolist() == [20, 0, 13]
    np.testing.assert_allclose(y.data, np.pad(want, [(0, TOKENS - 33), (0, 0)]), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose([stats.load_balance, stats.z], [balance, z], rtol=1e-5)
    assert stats.rows.tolist() == rows.tolist()


@pytest.mark.parametrize("is_padded", [False, True])
def test_statistics_over_devices(is_padded: bool) -> None:
    """The losses are means over the tokens of all devices, of float32 logits, and zero of no tokens."""
    layer, x = moe(data_axes=("data",), dtype=jnp.bfloat16), tokens().astype(jnp.bfloat16)
    run = jax.jit(lambda layer, x, n: layer(x, mask=None if n is None else jnp.arange(TOKENS) < n)[1])
    with jax.set_mesh(mesh_of({"data": 8}, AxisType.Auto)):
        for count in (37, 0) if is_padded else (TOKENS,):
            stats = run(layer, x.at[count:].set(jnp.nan), jnp.int32(count) if is_padded else None)
            (_, balance, z, rows), *_ = by_hand(layer, x[:count])
            np.testing.assert_allclose([stats.load_balance, stats.z], [balance, z], rtol=1e-5)
            assert stats.rows.tolist() == rows.tolist()


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("kind", AxisType, ids=str)
@pytest.mark.parametrize("transport", ["dense", "ring"])
@pytest.mark.parametrize("name", MESHES)
def test_padding_over_meshes(name: str, transport: str, kind: AxisType) -> None:
    """The mask is sharded like the tokens. A tensor's sizes count rows of all devices; within a `shard_map`, of one."""
    axes, options = MESHES[name]
    layer = moe(transport=transport, chunks=2, **options)
    names = (*options["data_axes"], *(["expert"] if "expert" in axes else []))
    mesh = mesh_of(axes, AxisType.Auto if kind == AxisType.Manual else kind)
    ways = math.prod(axes[each] for each in names)
    with jax.set_mesh(mesh):
        if kind != AxisType.Manual:
            for count in (TOKENS - 13, 0):
                check_padded(layer, count, both_gradients(layer, padded(count), jnp.int32(count)))
            x = GroupedTensor(padded(21), jnp.array([20, 0, 1], jnp.int32))
            check_padded(layer, 21, both_gradients(layer, x, None))
            return
        specs, rows = (layer.specs(), P(names), P(names)), P(names)
        mapped: Any = jax.shard_map(
            lambda layer, x, n: layer(x, mask=jnp.arange(len(x)) < n[0]), in_specs=specs, out_specs=(rows, P())
        )

        def loss(both: Any, counts: Array) -> tuple[Array, Any]:
            y, stats = mapped(*both, counts)
            return jnp.sum(jnp.sin(y)) + 2 * stats.load_balance + 0.1 * stats.z, (y, stats)

        # As many tokens on each device as its number, and three; the last has none.
        counts = np.append(np.minimum(np.arange(ways - 1) + 3, TOKENS // ways), 0)
        is_token = (np.arange(TOKENS // ways)[None] < counts[:, None]).reshape(-1)
        at = np.argsort(~is_token, kind="stable")  # tokens first
        x = jnp.full((TOKENS, D), jnp.nan).at[at[: counts.sum()]].set(tokens()[: counts.sum()])
        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, (y, stats)), (grads, dx) = run((layer, x), jnp.asarray(counts, jnp.int32))
        check_padded(layer, int(counts.sum()), ((value, (y[at], stats)), (grads, dx[at])))


class Cosine(eqx.Module):
    """A router that divides by the norm of each token, which has no derivative where it is zero."""

    weight: Array

    def __call__(self, x: Array) -> Routing:
        logits = x / jnp.linalg.norm(x, axis=1, keepdims=True) @ self.weight
        probabilities = jax.nn.softmax(logits)
        weights, chosen = jax.lax.top_k(probabilities, TOP_K)
        return Routing(weights, chosen.astype(jnp.uint8), probabilities, logits)


def check_unpadded(layer: MoE, count: int, rtol: float) -> None:
    """A padded call is the call without its padding."""
    unpadded = both_gradients(layer, tokens()[:count], None)
    got = both_gradients(layer, padded(count), jnp.int32(count))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(unpadded), strict=True):
        w = np.pad(w, [(0, TOKENS - count), (0, 0)]) if g.shape == (TOKENS, D) else w
        np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol)


@pytest.mark.long
@pytest.mark.parametrize("save", ["pre", "nothing"])
def test_padding_and_another_router(save: str) -> None:
    """It has finite derivatives in padding, also those of its own arrays; experts may be counted in any dtype."""
    router = Cosine(jax.random.normal(jax.random.key(2), (D, EXPERTS)))
    check_unpadded(moe(router=router, save=save), 41, 2e-5)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8", "blockwise", "delayed"])
def test_padding_and_a_recipe(recipe: str) -> None:
    """Scales are those of tokens, and so are the largest values of a history."""
    check_unpadded(moe(recipe=recipe), 41, 2e-5)


@pytest.mark.long
@pytest.mark.parametrize("wire", [None, "mxfp8"])
@pytest.mark.parametrize("transport", ["dense", "ring"])
def test_padding_and_a_capacity(transport: str, wire: Any) -> None:
    """Padding takes no token's slot and isn't among the dropped rows; NaN in it reaches nothing on the wire."""
    layer, count = skewed(moe(axis="expert", capacity=16, transport=transport, wire=wire)), 41
    with jax.set_mesh(mesh_of({"expert": 4}, AxisType.Auto)):
        got, again = (both_gradients(layer, padded(count, fill), jnp.int32(count)) for fill in (np.nan, 5.0))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(g, w)
        assert np.isfinite(g).all()
    chosen = np.argsort(-np.asarray(tokens()[:count] @ layer.router.weight), axis=1)[:, :TOP_K]
    sent = np.zeros((4, 4), int)
    np.add.at(sent, (np.arange(count)[:, None] // (TOKENS // 4), chosen // (EXPERTS // 4)), 1)
    (_, (y, stats)), (_, dx) = got
    assert int(stats.dropped) == np.maximum(sent - 16 // 4, 0).sum() > 0
    assert int(stats.rows.sum()) == count * TOP_K
    np.testing.assert_array_equal(np.asarray(y)[count:], 0)
    np.testing.assert_array_equal(np.asarray(dx)[count:], 0)


@pytest.mark.long
def test_padding_under_vmap() -> None:
    """Each element of a batch has its own padding."""
    layer, counts = moe(), jnp.array([50, 0, 13], jnp.int32)
    mapped = jax.jit(jax.vmap(lambda x, n: layer(x, mask=jnp.arange(TOKENS) < n)))
    y, stats = mapped(jnp.stack([padded(int(n)) for n in counts]), counts)
    for i, n in enumerate(counts.tolist()):
        (want, balance, z, rows), *_ = by_hand(layer, tokens()[:n])
        np.testing.assert_allclose(y[i], np.pad(want, [(0, TOKENS - n), (0, 0)]), rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose([stats.load_balance[i], stats.z[i]], [balance, z], rtol=1e-5)
        assert stats.rows[i].tolist() == rows.tolist()


@pytest.mark.parametrize(
    "x, mask, error, text",
    [
        (
            jnp.ones((4, D)),
            np.ones(5, bool),
            TypeError,
            r"`mask` must be a boolean array \(tokens,\).\nGot .*mask=bool\[5\]",
        ),
        (jnp.ones((4, D)), np.ones(4), TypeError, "`mask` must be a boolean"),
        (jnp.ones((4, D)), [True] * 4, TypeError, "`mask` must be a boolean"),
        (
            GroupedTensor(jnp.ones((4, D)), jnp.array([2], jnp.int32)),
            np.ones(4, bool),
            ValueError,
            "`mask` is given, but the sizes of `x` determine it.\nGot .*\nLeave it out.",
        ),
        (
            GroupedTensor(jnp.ones((4, D + 1)), jnp.array([2], jnp.int32)),
            None,
            ValueError,
            r"`x` must have ragged rows, \[tokens, 12\].\nGot .*\nPass packed rows: `ragged.GroupedTensor\(",
        ),
        (GroupedTensor(jnp.ones((2, 4, D))), None, ValueError, "`x` must have ragged rows"),
        (
            GroupedTensor(jnp.ones((4, D), jnp.int32), jnp.array([2], jnp.int32)),
            None,
            TypeError,
            "not a floating array",
        ),
        (
            ragged.quantize(GroupedTensor(jnp.ones((4, D)), jnp.array([2], jnp.int32)), "float8_e4m3fn", "row"),
            None,
            TypeError,
            "Call `x.dequantize\\(\\)` first.",
        ),
    ],
    ids=range(8),
)
def test_wrong_padding(x: Any, mask: Any, error: type[Exception], text: str) -> None:
    layer = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), eqx.filter_eval_shape(moe))
    with pytest.raises(error, match=text):
        layer(x, mask=mask)


# --- one layer a group ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_grouped_linear(use_bias: bool, dtype: Any) -> None:
    """Rows through their group's matrix and bias; zeros in the tail, NaN there or not."""
    layer = GroupedLinear(D, HIDDEN, 4, use_bias, dtype=dtype, key=jax.random.key(0))
    assert layer.weight.dtype == dtype and (layer.bias is not None) == use_bias
    sizes = [5, 0, 3, 8]
    data = jnp.full((20, D), jnp.nan, dtype).at[:16].set(tokens()[:16].astype(dtype))
    y = layer(GroupedTensor(data, jnp.array(sizes, jnp.int32)))
    assert y.dtype == dtype
    want = np.zeros((20, HIDDEN))
    for row, group in enumerate(np.repeat(np.arange(4), sizes)):
        want[row] = np.asarray(data[row], np.float64) @ np.asarray(layer.weight[group], np.float64)
        want[row] += np.asarray(layer.bias[group], np.float64) if use_bias else 0
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(np.asarray(y.data, np.float64), want, rtol=tolerance, atol=tolerance)
    assert np.abs(np.asarray(layer.weight, np.float32)).max() <= 1.01 * D**-0.5


def test_grouped_linear_adds_its_bias_in_the_product() -> None:
    """Before the result is rounded, and to groups with more dims."""
    layer = GroupedLinear(D, HIDDEN, 2, dtype=jnp.bfloat16, key=jax.random.key(0))
    x = GroupedTensor(tokens().astype(jnp.bfloat16), jnp.array([40, 20], jnp.int32))
    want = ragged.matmul(x, layer.weight, bias=layer.bias)
    np.testing.assert_array_equal(layer(x).data, want.data)
    heads = GroupedTensor(x.data.reshape(TOKENS // 2, 2, D), jnp.array([20, 10], jnp.int32))
    np.testing.assert_array_equal(layer(heads).data.reshape(TOKENS, HIDDEN), want.data)


@pytest.mark.long
def test_grouped_linear_with_a_recipe() -> None:
    """The product is the recipe's."""
    layer = GroupedLinear(D, HIDDEN, 2, recipe="rowwise", key=jax.random.key(0))
    x = GroupedTensor(tokens(), jnp.array([40, 24], jnp.int32))
    assert layer.bias is not None
    want = ragged.matmul(x, layer.weight, recipe="rowwise") + ragged.per_group(layer.bias)
    np.testing.assert_array_equal(layer(x).data, want.data)
    exact = ragged.matmul(x, layer.weight) + ragged.per_group(layer.bias)
    assert jnp.max(jnp.abs(exact.data - want.data)) > 1e-3


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: GroupedLinear(D, 0, 4, key=jax.random.key(0)), "`out_features` is 0.\nIt must be a positive int."),
        (lambda: moe()(tokens()[None]), r"`x` must be \[tokens, 12\].\nGot x=f32\[1,64,12\].\nFlatten"),
        (lambda: moe(axis="expert")(tokens()), r"has axes \('a', 'b'\), not \['expert'\].\nGot .*\nSet a mesh with"),
        (
            lambda: moe(axis="a")(tokens()[:3]),
            r"3 tokens can't be divided among 8 devices over \('a',\).\nGot .*\n"
            r"Pad `x` to 8 rows and pass `mask=jnp.arange\(8\) < 3`, or",
        ),
        (
            lambda: jax.shard_map(moe(axis="a", tensor_axis="b"), in_specs=P(), out_specs=(P(), P()), axis_names={"a"})(
                tokens()
            ),
            r"the enclosing `shard_map` is only over \['a'\].",
        ),
        (
            lambda: moe(tensor_axis="a", data_axes=("a",)),
            r"`data_axes` is \('a',\) and `tensor_axis` is 'a'.\nThey must",
        ),
        (lambda: moe(data_axes="ab"), "`data_axes` is 'ab' and `tensor_axis` is None.\n.* be a tuple"),
        (
            lambda: moe(router=lambda x: jax.lax.top_k(x[:-1], 3))(tokens()),
            r"`router` returned wrong shapes.\nGot weights=f32\[63,3\], experts=i32\[63,3\].\n.* \[64, top_k\].",
        ),
    ],
    ids=range(8),
)
def test_bad_input(call: Any, error: str) -> None:
    mesh = jax.make_mesh((8, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=error):
        call()


@pytest.mark.parametrize("x", [[[1.0] * D], jnp.ones((4, D), jnp.int32)], ids=["list", "int"])
def test_not_floating(x: Any) -> None:
    with pytest.raises(TypeError, match=r"`x` is not a floating array.\nGot x="):
        moe()(x)
