"""`ragged.nn.Router`, and the MoE blocks of published models: equal to NumPy loops over tokens, in float64."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ragged.nn import Experts, MoE, Router, Routing

TOKENS, D, HIDDEN, EXPERTS = 24, 8, 6, 8


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def softplus(z: Any) -> Any:
    return jnp.logaddexp(z, 0.0)


SCORES: dict[Any, Any] = {"softmax": softmax, "sigmoid": sigmoid, softplus: lambda z: np.log1p(np.exp(z))}


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def rows() -> Any:
    return np.random.default_rng(0).standard_normal((TOKENS, D)).astype(np.float32)


def filled(layer: Any, seed: int = 0) -> Any:
    """The module with random numbers in all arrays, biases too."""
    leaves, tree = jax.tree.flatten(eqx.filter(layer, eqx.is_inexact_array))
    random = np.random.default_rng(seed)
    new = [jnp.asarray(random.standard_normal(leaf.shape) * 0.5, leaf.dtype) for leaf in leaves]
    return eqx.combine(jax.tree.unflatten(tree, new), layer)


def routed(router: Router, x: np.ndarray) -> list[list[tuple[int, float]]]:
    """For each token, pairs of an expert and its weight, by the published equations."""
    selection = np.zeros(EXPERTS) if router.selection_bias is None else wide(router.selection_bias)
    bias = 0 if router.bias is None else wide(router.bias)
    pairs = []
    for token in wide(x):
        scores = SCORES[router.score](token @ wide(router.weight) + bias)
        ranks = scores + selection
        if router.groups is not None:
            count, kept = router.groups
            size = EXPERTS // count
            best = sorted(range(count), key=lambda i: -np.sort(ranks[i * size : (i + 1) * size])[-2:].sum())[:kept]
            ranks = np.array([rank if e // size in best else -np.inf for e, rank in enumerate(ranks)])
        experts = np.argsort(-ranks)[: router.top_k]
        total = scores[experts].sum() + router.epsilon if router.normalize else 1
        pairs.append([(int(e), router.scale * scores[e] / total) for e in experts])
    return pairs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": False, "use_bias": True},
        {"score": "sigmoid", "epsilon": 0.3, "scale": 2.5},
        {"score": "sigmoid", "use_selection_bias": True},
        {"score": "sigmoid", "use_selection_bias": True, "groups": (4, 2)},
        {"score": softplus, "groups": (2, 1), "use_bias": True},
    ],
    ids=["default", "bias", "sigmoid", "selection bias", "groups", "function"],
)
def test_router(options: dict[str, Any]) -> None:
    """Experts, weights and probabilities are those of a loop over tokens."""
    router = filled(Router(D, EXPERTS, 3, key=jax.random.key(0), **options))
    if router.selection_bias is not None:
        router = router.with_selection_bias(jnp.linspace(1.0, -1.0, EXPERTS))
    routing = eqx.filter_jit(router)(rows())
    for i, pairs in enumerate(routed(router, rows())):
        assert routing.experts[i].tolist() == [expert for expert, _ in pairs]
        np.testing.assert_allclose(routing.weights[i], [weight for _, weight in pairs], rtol=1e-5)
    np.testing.assert_allclose(routing.probabilities.sum(axis=1), 1, rtol=1e-5)


def test_a_selection_bias_only_selects() -> None:
    """It moves the choice, and not the weights. It has no gradient, and isn't among the arrays of an optimiser."""
    plain = Router(
        D, EXPERTS, EXPERTS, score="sigmoid", use_selection_bias=True, normalize=False, key=jax.random.key(0)
    )
    biased = plain.with_selection_bias(100.0 * jnp.arange(EXPERTS, dtype=jnp.float32))
    assert biased.selection_bias is not None and biased.selection_bias.tolist() == [100.0 * e for e in range(EXPERTS)]
    got, want = biased(rows()), plain(rows())
    assert (np.asarray(got.experts) == np.arange(EXPERTS)[::-1]).all() and (want.experts != got.experts).any()
    for e in range(EXPERTS):
        np.testing.assert_array_equal(got.weights[got.experts == e], want.weights[want.experts == e])
    grads = eqx.filter_grad(lambda router: jnp.sum(router(rows()).weights ** 2))(biased)
    assert [leaf.shape for leaf in jax.tree.leaves(grads)] == [(D, EXPERTS)]
    assert [leaf.shape for leaf in jax.tree.leaves(eqx.filter(biased, eqx.is_inexact_array))] == [(D, EXPERTS)]


# --- models -----------------------------------------------------------------------------------------------------------


def clamped(gate: Any, up: Any) -> Any:
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)


def clamped_by_hand(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return (up + 1) * gate * sigmoid(1.702 * gate)


DEEPSEEK = {"score": "sigmoid", "groups": (4, 2), "use_selection_bias": True, "epsilon": 1e-20, "scale": 2.5}

# For each model: options of the router, options of the experts, width of the shared expert, whether it has a gate.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int, bool]] = {
    "mixtral": ({"top_k": 2}, {}, 0, False),
    "qwen2-moe": ({"top_k": 4, "normalize": False}, {}, 10, True),
    "olmoe": ({"top_k": 3, "normalize": False}, {}, 0, False),
    "deepseek-v3": ({"top_k": 3} | DEEPSEEK, {}, 6, False),
    "gpt-oss": ({"top_k": 4, "use_bias": True}, {"use_bias": True, "activation": clamped}, 0, False),
    "llama4": ({"top_k": 1, "score": "sigmoid", "normalize": False}, {}, 6, False),
}


def model(name: str, **options: Any) -> MoE:
    of_router, of_experts, shared, has_gate = MODELS[name]
    key = jax.random.key(0)
    layer = MoE(
        Router(D, EXPERTS, key=key, **of_router),
        Experts(D, HIDDEN, EXPERTS, key=key, **of_experts),
        Experts(D, shared, key=key) if shared else None,
        shared_gate=jnp.zeros(D) if has_gate else None,
        weigh_inputs=name == "llama4",
        **options,
    )
    layer = filled(layer)
    if layer.router.selection_bias is None:
        return layer
    return eqx.tree_at(lambda m: m.router, layer, layer.router.with_selection_bias(jnp.linspace(0.5, -0.5, EXPERTS)))


def mlp(experts: Experts, e: int, x: np.ndarray) -> np.ndarray:
    """One expert of one token."""

    def linear(layer: Any, x: np.ndarray) -> np.ndarray:
        return x @ wide(layer.weight[e]) + (0 if layer.bias is None else wide(layer.bias[e]))

    gate, up = linear(experts.gate, x), linear(experts.up, x)
    hidden = clamped_by_hand(gate, up) if experts.activation is clamped else gate * sigmoid(gate) * up
    return linear(experts.down, hidden)


def by_hand(layer: MoE, x: np.ndarray) -> np.ndarray:
    """The published equations, token by token."""
    y = np.zeros(x.shape)
    for i, pairs in enumerate(routed(layer.router, x)):
        token = wide(x[i])
        for e, weight in pairs:
            y[i] += (
                mlp(layer.experts, e, weight * token) if layer.weigh_inputs else weight * mlp(layer.experts, e, token)
            )
        if layer.shared is not None:
            gate = 1 if layer.shared_gate is None else sigmoid(token @ wide(layer.shared_gate))
            y[i] += gate * mlp(layer.shared, 0, token)
    return y


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Results are those of a loop over tokens, and a directional derivative that of differences of the loop."""
    layer, x = model(name), rows()
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x)[0])(layer, x), by_hand(layer, x), rtol=1e-4, atol=1e-5)
    arrays, rest = eqx.partition(layer, eqx.is_inexact_array)
    grads = jax.jit(jax.grad(lambda arrays: jnp.sum(jnp.sin(eqx.combine(arrays, rest)(x)[0]))))(arrays)
    step = 1e-5
    for i, leaf in enumerate(jax.tree.leaves(arrays)):
        direction = np.random.default_rng(i).standard_normal(leaf.shape)
        leaves, tree = jax.tree.flatten(jax.tree.map(wide, arrays))
        ends = []
        for sign in (1, -1):
            moved = [each + sign * step * direction if j == i else each for j, each in enumerate(leaves)]
            ends.append(np.sin(by_hand(eqx.combine(jax.tree.unflatten(tree, moved), rest), x)).sum())
        want, got = (ends[0] - ends[1]) / (2 * step), np.sum(wide(jax.tree.leaves(grads)[i]) * direction)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["dense", "ring"])
@pytest.mark.parametrize("name", ["gpt-oss", "llama4", "deepseek-v3", "qwen2-moe"])
def test_models_over_a_mesh(name: str, transport: str) -> None:
    """Experts and hidden rows are sharded; values and gradients are those of one device. NaN in padding stays there."""
    one = model(name)
    layer = model(name, axis="expert", data_axes=("data",), tensor_axis="model", transport=transport)
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "model"), axis_types=(AxisType.Auto,) * 3)
    mask = np.random.default_rng(1).random(TOKENS) < 0.7
    x = np.where(mask[:, None], rows(), np.nan).astype(np.float32)

    @eqx.filter_jit
    def run(both: Any) -> Any:
        def loss(both: Any) -> Any:
            y, stats = both[0](both[1], mask=mask)
            return jnp.sum(jnp.sin(y)), (y, stats.rows)

        return eqx.filter_value_and_grad(loss, has_aux=True)(both)

    with jax.set_mesh(mesh):
        got = run((layer, x))
    np.testing.assert_allclose(got[0][1][0][mask], by_hand(one, rows())[mask], rtol=1e-4, atol=1e-5)
    assert not np.asarray(got[0][1][0])[~mask].any() and not np.asarray(got[1][1])[~mask].any()
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(run((one, x))), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2])
def test_every_router_is_trained(top_k: int) -> None:
    """The default's weights have a gradient, also with one expert a token: a weight divided by itself has none."""
    router = filled(Router(D, EXPERTS, top_k, key=jax.random.key(0)))
    assert router.normalize == (top_k > 1)
    gradient = jax.grad(
        lambda weight: jnp.sum(jnp.sin(eqx.tree_at(lambda r: r.weight, router, weight)(rows()).weights))
    )
    assert np.abs(gradient(router.weight)).max() > 1e-3


def test_routing_at_the_call() -> None:
    """It replaces the router's. A router may be a function of tokens and further arguments."""
    layer = model("mixtral")
    routing = layer.router(rows())
    want, stats = layer(rows())
    got, again = layer(rows(), routing=(routing.weights, routing.experts))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert again.load_balance is None and again.z is None and again.rows.tolist() == stats.rows.tolist()
    by_argument = MoE(lambda x, weights, experts: (weights, experts), layer.experts)
    np.testing.assert_allclose(by_argument(rows(), routing.weights, routing.experts)[0], want, rtol=1e-5, atol=1e-6)


class Last(Router):
    """A router with a call of its own: of tokens and ids."""

    def __call__(self, x: Any, ids: Any) -> Routing:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Routing(jnp.ones((len(x), 1)), jnp.where(ids[:, None] == 0, EXPERTS - 1, 0).astype(jnp.uint8))


def test_a_subclass_of_the_router() -> None:
    """Its own call is used, with the arguments of the layer's call."""
    layer, ids = model("mixtral"), np.arange(TOKENS) % 2
    last: Any = Last(D, EXPERTS, 1, key=jax.random.key(0))  # pyright: ignore[reportCallIssue]: Equinox inherits `__init__`
    y, stats = MoE(last, layer.experts)(rows(), ids)
    want = [mlp(layer.experts, 0 if i else EXPERTS - 1, wide(row)) for i, row in zip(ids, rows(), strict=True)]
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    assert stats.rows.tolist() == [TOKENS // 2, 0, 0, 0, 0, 0, 0, TOKENS // 2]


def test_a_router_in_bfloat16() -> None:
    """Logits, scores and weights are float32. A routing can leave `jit`."""
    router = Router(D, EXPERTS, 2, use_bias=True, dtype=jnp.bfloat16, key=jax.random.key(0))
    routing = jax.jit(lambda router, x: router(x))(router, jnp.asarray(rows(), jnp.bfloat16))
    assert [leaf.dtype for leaf in jax.tree.leaves(routing)] == [jnp.float32, jnp.int32, jnp.float32, jnp.float32]


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: Router(D, 4, 5, key=jax.random.key(0)), ValueError, "`top_k` at most `num_experts`"),
        (lambda: Router(D, 4, 2, score="relu", key=jax.random.key(0)), ValueError, "unknown `score` 'relu'"),
        (lambda: Router(D, 8, 5, groups=(4, 2), key=jax.random.key(0)), ValueError, r"`groups` is \(4, 2\)"),
        (lambda: Router(D, 4, 1, normalize=True, key=jax.random.key(0)), ValueError, "the router has no gradient"),
        (lambda: model("mixtral").router.with_selection_bias(jnp.zeros(3)), ValueError, "there are 8 experts"),
        (lambda: MoE(model("mixtral").router, Experts(D, 4, 3, key=jax.random.key(0))), ValueError, "`router` is for"),
        (
            lambda: model("mixtral")(rows(), routing=(jnp.ones((TOKENS, 1)), jnp.full((TOKENS, 1), 8))),
            ValueError,
            "from 8 to 8, but there are 8",
        ),
        (
            lambda: model("mixtral")(rows(), routing=(jnp.ones((TOKENS, 1)), jnp.ones((TOKENS, 1)))),
            TypeError,
            "`routing` has wrong dtypes",
        ),
        (lambda: model("mixtral")(rows(), jnp.zeros(TOKENS)), TypeError, "a `Router` takes only the tokens"),
        (lambda: MoE(3, model("mixtral").experts), TypeError, "`router` is 3."),  # pyright: ignore[reportArgumentType]
        (lambda: MoE(one := model("mixtral").router, one), TypeError, "`experts` is a Router"),  # pyright: ignore[reportArgumentType]
        (lambda: MoE((one := model("mixtral")).router, one.experts, one.experts), ValueError, "`shared` has 8 experts"),
        (
            lambda: MoE((one := model("mixtral")).router, one.experts, shared_gate=jnp.ones(D)),
            ValueError,
            r"`shared_gate` is f32\[8\].",
        ),
        (
            lambda: MoE(lambda x, ids: x, model("mixtral").experts)(rows(), np.ones(3)),
            ValueError,
            "doesn't have one entry per token",
        ),
        (
            lambda: model("mixtral")(rows(), routing=(1, 2, 3)),  # pyright: ignore
            TypeError,
            r"`routing` is \[1, 2, 3\].\nPass `\(weights,",
        ),
        (lambda: MoE(lambda x: x, model("mixtral").experts)(rows()), TypeError, r"`router` returned f32\[24,8\]."),
        (
            lambda: MoE(lambda x: (x, jnp.full(x.shape, -1)), model("mixtral").experts)(rows()),
            ValueError,
            "`router` returned experts from -1 to -1, but there are 8",
        ),
    ],
    ids=range(17),
)
def test_wrong_routing(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
