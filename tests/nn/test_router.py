"""`ragged.nn.Router`, routers of one's own and routing at the call: equal to a loop over tokens, in float64."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragged.nn import Experts, MoE, Router, Routing
from tests.cases import normal, split
from tests.contract.experts import chosen, mixture, sigmoid, swiglu

TOKENS, D, HIDDEN, EXPERTS = 24, 8, 6, 8


def softplus(z: Any) -> Any:
    return jnp.logaddexp(z, 0.0)


def by_hand(z: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(z))


def filled(layer: Any, seed: int = 0) -> Any:
    """The module with random numbers in all arrays, biases too."""
    leaves, tree = jax.tree.flatten(eqx.filter(layer, eqx.is_inexact_array))
    random = np.random.default_rng(seed)
    new = [jnp.asarray(random.standard_normal(leaf.shape) * 0.5, leaf.dtype) for leaf in leaves]
    return eqx.combine(jax.tree.unflatten(tree, new), layer)


def rows(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((TOKENS, D)).astype(np.float32)


def experts() -> Experts:
    return Experts(D, HIDDEN, EXPERTS, key=jax.random.key(0))


@pytest.mark.parametrize(
    "options",
    split(
        [
            {"normalize": False, "use_bias": True},
            {"score": softplus, "groups": (2, 1), "use_bias": True},
        ],
        [
            {"score": "sigmoid", "use_selection_bias": True, "groups": (4, 2)},
            {"dtype": jnp.bfloat16},
            {"score": "sigmoid", "epsilon": 0.3, "scale": 2.5},
        ],
    ),
    ids=["bias", "function", "groups", "default", "sigmoid"],
)
def test_router(options: dict[str, Any]) -> None:
    """Experts, weights and their derivatives, all in float32; of a router in bfloat16 too."""
    router = Router(D, EXPERTS, 3, key=jax.random.key(0), **options)
    if router.selection_bias is not None:
        router = router.with_selection_bias(jnp.linspace(1.0, -1.0, EXPERTS))

    def run(router: Router, x: Any, ct: Any) -> Any:
        routing = router(x)
        return jnp.sum(routing.weights * ct), routing

    gradient, ct = eqx.filter_jit(eqx.filter_value_and_grad(run, has_aux=True)), rows(9)[:, :3]
    for seed in range(4):
        router, x = filled(router, seed), jnp.asarray(rows(seed), options.get("dtype", jnp.float32))
        (_, routing), grads = gradient(router, x, ct)
        assert [leaf.dtype for leaf in jax.tree.leaves(routing)] == [jnp.float32, jnp.int32, jnp.float32, jnp.float32]
        dweight, dbias = np.zeros(router.weight.shape), np.zeros(EXPERTS)
        for t, token in enumerate(np.asarray(x, np.float64)):
            want = chosen(router, token, by_hand if router.score is softplus else sigmoid)
            assert routing.experts[t].tolist() == want.experts.tolist()
            np.testing.assert_allclose(routing.weights[t], want.weights, rtol=1e-5)
            np.testing.assert_allclose(routing.probabilities[t], want.probabilities, rtol=1e-4)
            np.testing.assert_allclose(routing.logits[t], want.logits, rtol=1e-5, atol=1e-5)
            dlogits = want.pull(ct[t].astype(np.float64), np.zeros(EXPERTS), np.zeros(EXPERTS))
            dweight, dbias = dweight + np.outer(token, dlogits), dbias + dlogits
        tolerance = 1e-4 if router.weight.dtype == jnp.float32 else 2**-8
        atol = tolerance * np.abs(dweight).max()
        np.testing.assert_allclose(np.asarray(grads.weight, np.float64), dweight, rtol=tolerance, atol=atol)
        if grads.bias is not None:
            np.testing.assert_allclose(grads.bias, dbias, rtol=1e-4, atol=1e-4)


def test_scores_whose_sum_is_zero() -> None:
    """Of a score that isn't positive, weights and probabilities are finite."""
    router = Router(2, 4, 2, score=jnp.tanh, key=jax.random.key(0))
    routing = router.select(jnp.array([[1.0, -1.0, 0.5, -0.5], [1.0, 2.0, 3.0, 4.0]]))
    assert routing.probabilities is not None and not np.asarray(routing.probabilities[0]).any()
    np.testing.assert_allclose(routing.probabilities[1].sum(), 1, rtol=1e-6)


def test_scores_near_the_largest_number() -> None:
    """They aren't rounded to infinity. Narrow logits are float32 from the beginning."""
    router = Router(2, 2, 2, score=lambda z: z, key=jax.random.key(0))
    for dtype in (jnp.float32, jnp.bfloat16):
        for largest in (jnp.finfo(dtype).max, jnp.finfo(dtype).max / 2):
            routing = router.select(jnp.array([[largest, 0.0]], dtype))
            np.testing.assert_array_equal(routing.weights, [[1, 0]])
            assert routing.weights.dtype == routing.logits.dtype == jnp.float32


@pytest.mark.long
def test_narrow_weights_and_probabilities() -> None:
    """They round no tokens that they multiply, and are summed in float32."""
    x = normal((TOKENS, D), 1) * 1e5
    experts_of = jnp.zeros((TOKENS, 1), jnp.int32)
    router = Router(D, EXPERTS, 1, key=jax.random.key(0))
    moe = MoE(router, experts(), weigh_inputs=True)
    run = jax.jit(lambda weights: moe(x, routing=Routing(weights, experts_of))[0])
    wide, narrow = (run(jnp.ones((TOKENS, 1), dtype)) for dtype in ("float32", "float16"))
    np.testing.assert_array_equal(narrow, wide)
    many = jnp.zeros((16_004, 1), jnp.int32)  # no float16 is 16004 / 4
    plain, ones = MoE(router, experts()), jnp.ones((16_004, 1), jnp.float16)
    third = jnp.full((16_004, EXPERTS), 1 / 4, jnp.float16)
    stats = jax.jit(lambda x: plain(x, routing=Routing(ones, many, third, third))[1])(jnp.zeros((16_004, D)))
    np.testing.assert_allclose(stats.load_balance, EXPERTS / 4, rtol=1e-6)


def test_a_selection_bias_only_selects() -> None:
    """It moves the choice, and not the weights. It has no gradient, and isn't among the arrays of an optimiser."""
    options: Any = {"score": "sigmoid", "use_selection_bias": True, "normalize": False}
    plain = Router(D, EXPERTS, EXPERTS, key=jax.random.key(0), **options)
    biased = plain.with_selection_bias(100.0 * jnp.arange(EXPERTS, dtype=jnp.float32))
    assert biased.selection_bias is not None and biased.selection_bias.tolist() == [100.0 * e for e in range(EXPERTS)]
    assert [leaf.shape for leaf in jax.tree.leaves(eqx.filter(biased, eqx.is_inexact_array))] == [(D, EXPERTS)]
    run = eqx.filter_jit(lambda router: router(rows()))
    got, want = run(biased), run(plain)
    assert (np.asarray(got.experts) == np.arange(EXPERTS)[::-1]).all() and (want.experts != got.experts).any()
    for e in range(EXPERTS):
        np.testing.assert_array_equal(got.weights[got.experts == e], want.weights[want.experts == e])


@pytest.mark.long
def test_a_selection_bias_is_saved(tmp_path: Path) -> None:
    """Unsealed, in a layer and in a stack too. It routes in the same way, and has a gradient of zeros."""
    router = Router(D, EXPERTS, 2, use_selection_bias=True, key=jax.random.key(0))
    router = router.with_selection_bias(jnp.linspace(1.0, -1.0, EXPERTS))
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), router)
    for each in (router, stack):
        for same in (each.sealed(), each.unsealed(), each.unsealed().sealed(), each.unsealed().unsealed()):
            np.testing.assert_array_equal(same.selection_bias, each.selection_bias)
        assert [leaf.dtype for leaf in jax.tree.leaves(each.unsealed())] == [jnp.float32] * 2
        assert not all(map(eqx.is_inexact_array, jax.tree.leaves(each.unsealed().sealed())))
        eqx.tree_serialise_leaves(tmp_path / "router.eqx", each.unsealed())
        empty = jax.tree.map(jnp.zeros_like, each.unsealed())
        back = eqx.tree_deserialise_leaves(tmp_path / "router.eqx", empty).sealed()
        for got, want in zip(jax.tree.leaves(back.unsealed()), jax.tree.leaves(each.unsealed()), strict=True):
            np.testing.assert_array_equal(got, want)
    layer = MoE(router, experts())
    eqx.tree_serialise_leaves(tmp_path / "layer.eqx", eqx.tree_at(lambda layer: layer.router, layer, router.unsealed()))
    run = eqx.filter_jit(eqx.filter_value_and_grad(lambda router: jnp.sum(jnp.sin(router(rows()).weights))))
    (value, grads), (want, of_sealed) = run(router.unsealed()), run(router)
    assert value == want and (grads.weight == of_sealed.weight).all() and not np.any(grads.selection_bias)
    plain = Router(D, EXPERTS, 2, key=jax.random.key(0))
    assert plain.unsealed().selection_bias is None and plain.sealed().selection_bias is None


def test_every_router_is_trained() -> None:
    """The default's weights have a gradient with one expert a token too: a weight divided by itself has none."""
    router = filled(Router(D, EXPERTS, 1, key=jax.random.key(0)))
    assert not router.normalize and Router(D, EXPERTS, 2, key=jax.random.key(0)).normalize
    one = Router(D, EXPERTS, 1, normalize=True, scale=0.5, key=jax.random.key(0))  # as Mixtral with one expert
    np.testing.assert_array_equal(one(jnp.asarray(rows())).weights, np.full((TOKENS, 1), 0.5))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda router: jnp.sum(jnp.sin(router(rows()).weights))))
    assert np.abs(gradient(router).weight).max() > 1e-3


@pytest.mark.parametrize(
    "score, epsilon", split([("softmax", 0.0)], [("sigmoid", 1e-20), ("softmax", 1e-20), ("sigmoid", 0.0)])
)
def test_scores_that_vanish(score: str, epsilon: float) -> None:
    """A bias may choose experts whose scores are tiny in float32, or 0: weights and all gradients are finite."""
    router = Router(4, 4, 2, score=score, epsilon=epsilon, use_selection_bias=True, key=jax.random.key(0))
    router = router.with_selection_bias(jnp.asarray([0.0, 0.0, 20.0, 9.0]))

    def value(logits: Any) -> Any:
        routing: Any = router.select(logits)
        value = jnp.sum(routing.weights * jnp.asarray([[1.0, -2.0]]))
        return value + 0.5 * routing.probabilities[0, 2], routing.weights

    router_of_logits: Any = eqx.tree_at(lambda router: router.weight, router, jnp.eye(4))
    run = jax.jit(jax.value_and_grad(value, has_aux=True))
    second = jax.jit(jax.grad(lambda logits: jnp.sum(jnp.sin(jax.grad(lambda z: value(z)[0])(logits)))))
    for size in (0, 1, 20, 40, 44, 50, 60, 80, 87, 88, 100, 104, 200, 1e30):  # e⁻⁴⁴ is the root of float32's smallest
        logits = np.array(
            [[size, 0, -1, 0]] if score == "softmax" else [[-size, -size - 2, -size - 1, -size]], np.float32
        )
        (_, weights), gradient = run(logits)
        assert np.isfinite(gradient).all() and np.isfinite(second(logits)).all() and (weights >= 0).all()
        if size <= 80:
            want = chosen(router_of_logits, logits[0].astype(float), sigmoid)
            np.testing.assert_allclose(weights[0], want.weights, rtol=1e-4)
            dlogits = want.pull(np.array([1.0, -2.0]), np.array([0, 0, 0.5, 0]), np.zeros(4))
            np.testing.assert_allclose(gradient[0], dlogits, rtol=1e-4, atol=1e-6)
        if size >= 200:
            assert not weights.any()


class Last(Router):
    """A router with a call of its own: of tokens and ids."""

    def __call__(self, x: Any, ids: Any) -> Routing:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Routing(jnp.ones((len(x), 1)), jnp.where(ids[:, None] == 0, EXPERTS - 1, 0).astype(jnp.uint8))


@pytest.mark.long
def test_routing_from_elsewhere() -> None:
    """At the call, it replaces the router's. A router may be a function, or a subclass with its own call, of tokens and
    further arguments. Without probabilities and logits there are no losses."""
    ids, x = np.arange(TOKENS) % 2, rows()
    layer = MoE(Router(D, EXPERTS, 1, key=jax.random.key(0)), experts())
    chosen_experts = np.where(ids == 0, EXPERTS - 1, 0)[:, None]
    matrices = {name: np.asarray(getattr(layer.experts, name).weight, np.float64) for name in ("gate", "up", "down")}
    want = mixture(x.astype(np.float64), chosen_experts, np.ones((TOKENS, 1)), matrices, swiglu).y
    last: Any = Last(D, EXPERTS, 1, key=jax.random.key(0))  # pyright: ignore[reportCallIssue]: Equinox's `__init__`
    by_argument = MoE(lambda x, weights, experts: (weights, experts), layer.experts)
    given = jnp.ones((TOKENS, 1)), jnp.asarray(chosen_experts)

    @jax.jit
    def run() -> Any:
        return layer(x, routing=given), MoE(last, layer.experts)(x, ids), by_argument(x, *given)

    for y, stats in run():
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-6)
        assert stats.rows.tolist() == [TOKENS // 2, 0, 0, 0, 0, 0, 0, TOKENS // 2]
        assert stats.load_balance is None and stats.z is None


@pytest.mark.long
@pytest.mark.parametrize("name", ["one", "2x2x2"])
def test_a_router_of_ones_own(name: str) -> None:
    """A module whose arrays are named as those of experts are: gradients reach them by the weights, on a mesh too."""

    class Own(eqx.Module):
        weight: jax.Array
        bias: jax.Array

        def __call__(self, x: Any) -> Any:
            scores = jax.nn.sigmoid(x @ self.weight)
            picked = jax.lax.top_k(scores + self.bias[None], 2)[1]
            return 2.5 * jnp.take_along_axis(scores, picked, axis=1), picked

    own, x = filled(Own(jnp.zeros((D, EXPERTS)), jnp.zeros(EXPERTS))), rows()
    over: Any = {"axis": "expert", "data_axes": ("data",), "tensor_axis": "model"} if name != "one" else {}
    layer = MoE(own, experts(), **over)
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "model")) if over else jax.sharding.get_mesh()
    with jax.set_mesh(mesh):
        grads = eqx.filter_jit(eqx.filter_grad(lambda layer: jnp.sum(jnp.sin(layer(x)[0]))))(layer)
    scores = sigmoid(x.astype(np.float64) @ np.asarray(own.weight, np.float64))
    ids = np.argsort(-(scores + np.asarray(own.bias)), axis=1)[:, :2]
    weights = 2.5 * np.take_along_axis(scores, ids, 1)
    matrices = {name: np.asarray(getattr(layer.experts, name).weight, np.float64) for name in ("gate", "up", "down")}
    found = mixture(x.astype(np.float64), ids, weights, matrices, swiglu)
    dscores = np.zeros(scores.shape)
    np.put_along_axis(dscores, ids, 2.5 * found.dweights, 1)
    want = x.T.astype(np.float64) @ (dscores * scores * (1 - scores))
    np.testing.assert_allclose(grads.router.weight, want, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(grads.router.bias, 0)
    np.testing.assert_allclose(grads.experts.down.weight, found.dexperts["down"], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_wrong_routing() -> None:
    """At the call and from a router, in pairs and in a `Routing`; with padding, experts of no token are free."""
    layer, w = MoE(Router(D, EXPERTS, 2, key=jax.random.key(0)), experts()), np.ones((TOKENS, 1))
    routing_of: Any = Routing
    e, p = np.zeros((TOKENS, 1), int), np.full((TOKENS, EXPERTS), 1 / EXPERTS, np.float32)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "experts from 8 to 8, but there are 8", (w, e + 8)),
        (ValueError, "experts from -1 to -1, but there are 8", routing_of(w, e - 1, p, p)),
        (ValueError, "wrong shapes", (w[1:], e[1:])),
        (ValueError, "wrong shapes", (w, e.T)),
        (ValueError, "wrong shapes", (w[:, 0], e[:, 0])),
        (ValueError, "wrong shapes", (jnp.ones(()), jnp.zeros((), int))),
        (ValueError, "wrong shapes", routing_of(w, e, p, p[:5])),
        (ValueError, "wrong shapes", routing_of(w, e, p[:, 1:], p)),
        (ValueError, "wrong shapes", routing_of(w, e, None, p[:, :1])),
        (TypeError, "wrong dtypes", (w, w)),
        (TypeError, "wrong dtypes", (e, e)),
        (TypeError, "wrong dtypes", routing_of(w, e, p.astype(int), p)),
        (TypeError, "aren't arrays", routing_of(w.tolist(), e)),
        (TypeError, "aren't arrays", (None, e)),
        (TypeError, "aren't arrays", routing_of(w, e, "p", p)),
    ]
    for error, text, given in wrong:
        routed = MoE(lambda x, given=given: given, layer.experts)
        for call in (lambda given=given: layer(rows(), routing=given), lambda routed=routed: routed(rows())):
            with pytest.raises(error, match=text):
                call()
    mask = np.arange(TOKENS) < TOKENS - 1
    padded = MoE(lambda x: (w, np.where(mask[:, None], e, -1)), layer.experts)
    assert padded(rows(), mask=mask)[1].rows.tolist() == [TOKENS - 1, *[0] * (EXPERTS - 1)]
    stats: Any = layer(rows(), routing=routing_of(w, e, p, np.log(p)))[1]
    np.testing.assert_allclose([stats.load_balance, stats.z], [1.0, 0.0], atol=1e-5)
