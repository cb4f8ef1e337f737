"""The history of delayed scaling is state: sealed or not, shared by any products, ignored by optimisers."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ragged import Cast, GroupedTensor, Recipe, matmul
from tests.cases import normal

X = GroupedTensor(normal((8, 64)), jnp.array([3, 5], jnp.int32))
W = normal((2, 64, 16), 1)
ONE = (Cast("float8_e4m3fn"), Cast("float8_e4m3fn"))


def test_a_replaced_recipe_keeps_the_rest() -> None:
    """`dataclasses.replace` changes one field, and keeps a history sealed or unsealed."""
    recipe = Recipe(ONE, ONE, ONE, jnp.arange(6.0).reshape(3, 2), name="mine")
    for each in (recipe, recipe.unsealed()):
        replaced = dataclasses.replace(each, save="operands")
        assert replaced.save == "operands" and eqx.tree_equal(dataclasses.replace(replaced, save=each.save), each)
    np.testing.assert_array_equal(dataclasses.replace(recipe, history=jnp.ones((3, 1))).history, jnp.ones((3, 1)))


@pytest.mark.long
def test_no_optimiser_takes_a_history_for_a_parameter() -> None:
    """It, a norm or a sum refuses a recipe among the parameters, or leaves it alone; so does `jax.grad`."""
    params = {"w": W, "recipe": Recipe.preset("delayed", length=2)}

    def loss(params: Any) -> Array:
        return jnp.mean(matmul(W.mT, params["w"], recipe=params["recipe"]).data ** 2)

    with pytest.raises(TypeError, match=r"key<sealed>"):
        jax.grad(loss)(params)
    # As with Equinox: what is left out of the gradient is left out of the norm, the sum and the step.
    grads = eqx.filter_jit(eqx.filter_grad(loss))(params)
    assert grads["recipe"].state.leaf is None
    assert jax.tree.map(jnp.add, grads, grads)["recipe"].state.leaf is None
    with jax.numpy_dtype_promotion("standard"):  # as optax needs
        norm = optax.tree.norm(grads)
        np.testing.assert_allclose(norm, np.linalg.norm(np.asarray(grads["w"], np.float64)), rtol=1e-6)
        for optimiser in (optax.adamw(1e-2), optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-2))):
            kept = eqx.filter(params, eqx.is_inexact_array)
            updates, _ = optimiser.update(grads, optimiser.init(kept), kept)
            stepped = eqx.apply_updates(params, updates)
            assert not np.array_equal(stepped["w"], W)
            np.testing.assert_array_equal(stepped["recipe"].history, np.zeros((3, 2)))
            with pytest.raises((TypeError, NotImplementedError)):  # without a filter
                optimiser.update(params, optimiser.init(params), params)
        for careless in (
            optax.tree.norm,
            lambda tree: jax.tree.map(jnp.add, tree, tree),
            lambda tree: jax.tree.map(lambda x: 0.9 * x, tree),
            lambda tree: optax.apply_updates(tree, tree),
            lambda tree: optax.incremental_update(tree, tree, 0.1),
            lambda tree: jax.random.split(tree["recipe"].state.leaf[0, 0]),
        ):
            with pytest.raises((TypeError, NotImplementedError)):
                careless(params)


def test_a_history_is_sealed_and_unsealed(tmp_path: Path) -> None:
    """Values, `jit`, stacking and the next step are the same; a checkpoint takes what is unsealed."""
    largest = jnp.arange(6.0).reshape(3, 2)
    recipe = Recipe(ONE, ONE, ONE, largest)
    for each in (recipe, recipe.unsealed(), recipe.unsealed().sealed(), recipe.sealed(), jax.jit(lambda r: r)(recipe)):
        np.testing.assert_array_equal(each.history, largest)
    assert [x.dtype for x in jax.tree.leaves(recipe.unsealed())] == [jnp.float32]
    assert not eqx.is_inexact_array(*jax.tree.leaves(recipe))
    assert Recipe.preset("rowwise").unsealed().history is None
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), recipe)
    np.testing.assert_array_equal(stacked.history, jnp.stack([largest, largest]))

    def loss(w: Array, recipe: Recipe) -> Array:
        return matmul(W.mT, w, recipe=recipe).data.sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    dw, following = step(W, recipe.unsealed())
    np.testing.assert_array_equal(dw, jax.jit(jax.grad(loss))(W, recipe))
    np.testing.assert_array_equal(following.sealed().history[:, 1], largest[:, 0])
    eqx.tree_serialise_leaves(tmp_path / "recipe.eqx", (W, following))
    _, back = eqx.tree_deserialise_leaves(tmp_path / "recipe.eqx", (W, recipe.unsealed()))
    np.testing.assert_array_equal(back.sealed().history, following.history)


@pytest.mark.long
def test_a_history_that_is_sealed_where_it_is_differentiated() -> None:
    """Its next history would be lost, and zero. Other derivatives of the same function don't need it."""

    def loss(recipe: Recipe, w: Array) -> Array:
        return matmul(W.mT, w, recipe=recipe).data.sum()

    def of_array(history: Array, w: Array) -> Array:
        return loss(Recipe(ONE, ONE, ONE, history), w)

    recipe = Recipe(ONE, ONE, ONE, jnp.ones((3, 2))).unsealed()
    for function, given in ((of_array, recipe.history), (lambda recipe, w: loss(recipe.sealed(), w), recipe)):
        for context in (lambda f: f, jax.jit, jax.checkpoint):
            with pytest.raises(TypeError, match="sealed in a function that is differentiated by it"):
                jax.grad(context(function))(given, W)
        want = jax.grad(loss, argnums=1)(recipe, W)
        np.testing.assert_array_equal(jax.jit(jax.grad(jax.checkpoint(function), argnums=1))(given, W), want)


Use = tuple[float, float]  # of a product: the factor of its rows, and its result's cotangent
Loss = Callable[[Recipe, Any], Array]
KINDS = ["twice", "jit", "checkpoint", "checkpoint of a closure", "cond", "carry", "scan", "devices", "map", "vmap"]


def program(rng: np.random.Generator, kinds: Sequence[str]) -> tuple[Loss, list[Use]]:
    """`(loss, uses)`: a loss of a recipe and a factor, nested as `kinds` say, and all products that it computes."""
    if not kinds:
        a, c = rng.uniform(0.5, 2, 2).tolist()
        return lambda recipe, s: c * matmul(X * (a * s), W, recipe=recipe).data.sum(), [(a, c)]
    kind, inner = kinds[0], program(rng, kinds[1:])
    f, uses = inner
    if kind == "twice":
        g, more = program(rng, rng.permutation(kinds[1:]).tolist())
        return lambda recipe, s: f(recipe, s) + g(recipe, s), uses + more
    if kind in ("jit", "checkpoint"):
        return getattr(jax, kind)(f), uses
    if kind == "checkpoint of a closure":
        return lambda recipe, s: jax.checkpoint(lambda s: f(recipe, s))(s), uses
    if kind == "cond":
        return lambda recipe, s: jax.lax.cond(s > 0, lambda: f(recipe, s), lambda: 0 * s), uses
    factors = jnp.asarray(rng.uniform(0.5, 2, 2), jnp.float32)

    def loss(recipe: Recipe, s: Any) -> Array:
        if kind == "carry":
            carry = jax.lax.scan(lambda c, k: ((c[0] + f(c[1], s * k), c[1]), None), (0 * s, recipe), factors)
            return carry[0][0]
        if kind == "scan":
            return jax.lax.scan(lambda total, k: (total + f(recipe, s * k), None), 0 * s, factors)[0]
        if kind == "devices":

            def local(k: Array, s: Array) -> Array:
                return jax.lax.psum(f(recipe, s * k[0]), "d")

            mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
            return jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P()), out_specs=P())(factors, s)
        return {"map": jax.lax.map, "vmap": lambda f, x: jax.vmap(f)(x)}[kind](
            lambda k: f(recipe, s * k), factors
        ).sum()

    return loss, [(a * float(k), c) for a, c in uses for k in factors]


def check_program(seed: int, kinds: Sequence[str], jit: bool = True) -> None:
    rng = np.random.default_rng(seed)
    loss, uses = program(rng, kinds)
    past = rng.uniform(1, 2, (3, 3)).astype(np.float32)
    gradient = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
    following = gradient(Recipe(ONE, ONE, ONE, jnp.asarray(past)).unsealed(), jnp.float32(1)).history
    (a, c), w = np.max(uses, axis=0), np.abs(W).max()
    np.testing.assert_allclose(following[:, 0], [np.abs(X.data).max() * a, w, c], rtol=1e-5, err_msg=str(kinds))
    np.testing.assert_array_equal(following[:, 1:], past[:, :-1])


@pytest.mark.long
def test_one_history_of_many_products() -> None:
    """Its next values are the largest of all products, not their sum."""
    check_program(1, ["devices", "carry"])


@pytest.mark.long
def test_one_history_of_any_products() -> None:
    """The same for random nestings of loops, maps, branches, devices and rematerialised calls, and without `jit`."""
    check_program(0, ["twice"], jit=False)
    check_program(16, ["devices", "scan"], jit=False)
    for seed in range(12):
        check_program(seed, np.random.default_rng(seed).permutation(KINDS)[:3].tolist())


def test_a_history_on_each_device() -> None:
    """Devices that don't share a history have their own largest values."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    def local(recipe: Recipe) -> Array:
        own = jax.tree.map(lambda h: h[0], recipe)
        factor = 1 + jax.lax.axis_index("d").astype(jnp.float32)
        return jax.lax.psum(matmul(X * factor, W, recipe=own).data.sum(), "d")

    step = jax.jit(jax.grad(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P())))
    recipe = jax.tree.map(lambda h: jnp.stack([h, h]), Recipe.preset("delayed", length=2))
    history = step(recipe.unsealed()).history
    largest = np.array([np.abs(X.data).max(), np.abs(W).max(), 1.0])
    np.testing.assert_allclose(history[:, :, 0], [largest, largest * [2, 1, 1]], rtol=1e-6)


def test_histories_that_an_explicit_axis_splits() -> None:
    """Outside of `jit`, the next histories are split as the given ones."""
    mesh = jax.make_mesh((2,), ("layer",), axis_types=(AxisType.Explicit,))

    def loss(recipe: Recipe, x: Array, w: Array) -> Array:
        return jax.vmap(lambda recipe, x, w: matmul(X.with_data(x), w, recipe=recipe).data.sum())(recipe, x, w).sum()

    with jax.set_mesh(mesh):
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (Recipe.preset("delayed", length=2), X.data, W))
        recipe, x, w = jax.tree.map(lambda leaf: jax.device_put(leaf, P("layer")), stacked)
        history = jax.grad(loss)(recipe.unsealed(), x, w).history
    assert jax.typeof(history).sharding.spec[0] == "layer"
    np.testing.assert_allclose(history[:, :2, 0], [[np.abs(X.data).max(), np.abs(W).max()]] * 2, rtol=1e-6)


@pytest.mark.long
def test_second_derivatives_by_the_recipe() -> None:
    """Only the product that the loss was made of moves the history on, not the products of its derivatives."""

    def penalty(recipe: Recipe) -> Array:
        return jnp.sum(jax.grad(lambda d: jnp.sum(matmul(X.with_data(d), W, recipe=recipe).data ** 2))(X.data) ** 2)

    history = jax.jit(jax.grad(penalty))(Recipe.preset("delayed", length=2, save="operands").unsealed()).history
    np.testing.assert_allclose(history[:2, 0], [np.abs(X.data).max(), np.abs(W).max()], rtol=1e-6)


@pytest.mark.long
def test_the_example_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes' history moves on, and the loss falls as it does in bfloat16."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import fp8_recipes  # pyright: ignore[reportMissingImports]

    monkeypatch.delitem(sys.modules, "fp8_recipes")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        text, held_out, vocabulary = fp8_recipes.read_text()
        data, losses = jnp.asarray(text, jnp.int32), {}
        for name in ("bfloat16", "delayed"):
            model = fp8_recipes.train(name, 20, data, vocabulary)
            losses[name] = fp8_recipes.held_out_loss(model, held_out)[0]
    assert losses["bfloat16"] < 4.4
    assert losses["delayed"] == pytest.approx(losses["bfloat16"], rel=0.02)
