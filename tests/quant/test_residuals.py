"""What the derivatives of a product with a recipe keep: read off `jax.vjp`, without compiling a program."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from ragged import Cast, GroupedTensor, Recipe, gated_matmul, matmul, quantize_weights
from tests.cases import INT8_ROWS, normal

PRESETS = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "delayed")
SIZES = jnp.array([5, 0, 7], jnp.int32)
X = GroupedTensor(normal((14, 36), 0, jnp.bfloat16), SIZES)
W = normal((3, 36, 20), 1, jnp.bfloat16)
WHOLE, WEIGHTS = ("bfloat16", X.shape), ("bfloat16", W.shape)


def kept(function: Any, *args: Any) -> list[Any]:
    """What `jax.vjp` keeps of `function`, of all that is as large as `X` or larger."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args))
    return sorted((leaf.dtype.name, leaf.shape) for leaf in leaves if leaf.size >= X.data.size)


def of(recipe: Any) -> Any:
    return lambda x, w: matmul(X.with_data(x), w, recipe=recipe).data


@pytest.mark.parametrize("name", PRESETS)
def test_products(name: str) -> None:
    """Of `x`, in 8 or 4 bits, what the wgrad multiplies; `x` itself only where that is asked for, or isn't cast."""
    recipe = Recipe.preset(name)
    narrow = recipe.wgrad[0].dtype, X.shape
    assert kept(of(recipe), X.data, W) == [WEIGHTS, narrow]
    assert kept(of(Recipe.preset(name, save="operands")), X.data, W) == [WEIGHTS, WHOLE]
    left = kept(lambda x, w: matmul(w, X.with_data(x).mT, recipe=recipe).data, X.data, W.mT)
    assert left == [("bfloat16", W.mT.shape), narrow]
    uncast = Recipe(recipe.forward, recipe.dgrad, (Cast(None), recipe.wgrad[1]), recipe.history)
    assert kept(of(uncast), X.data, W) == [WEIGHTS, WHOLE]
    assert kept(jax.checkpoint(of(recipe)), X.data, W) == [WEIGHTS, WHOLE]
    if name != "delayed":
        made = kept(of(recipe), X.data, quantize_weights(W, recipe))
        assert made == sorted([(recipe.dgrad[1].dtype, W.shape), narrow])


def test_scales_are_saved_in_their_own_dtype() -> None:
    """Those of `x` and of weights that came quantised have 8 bits, not the 32 in which kernels take them."""
    made = quantize_weights(W, "mxfp8")
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(of("mxfp8"), *args)[1], X.data, made))
    shapes = {leaf.shape for leaf in leaves if leaf.dtype == jnp.float8_e8m0fnu}
    assert shapes == {(3, 36), (3, 36, 1)}  # 3 blocks of rows; a block of the 20 columns
    assert all(leaf.dtype != jnp.float32 for leaf in leaves)


@pytest.mark.parametrize("name", ["rowwise", "nvfp4", INT8_ROWS])
def test_gated_products(name: Any) -> None:
    """The rows of both products once; where the pre-activations are computed again, the rows themselves."""
    casts = Recipe.of(name)
    narrow = casts.wgrad[0].dtype, X.shape

    def rows(recipe: Any, save: str = "pre") -> list[Any]:
        def gated(x: Array, w: Array, v: Array) -> Array:
            return gated_matmul(X.with_data(x), w, v, recipe=recipe, save=save).data

        return [each for each in kept(gated, X.data, W, W) if each[1] == X.shape]

    assert rows(name) == rows((name, casts)) == [narrow]
    assert rows(name, "out") == [WHOLE]
    assert rows((name, "mxfp8")) == sorted([narrow, ("float8_e4m3fn", X.shape)])
    assert rows((name, None)) == sorted([narrow, WHOLE])


def test_a_loop() -> None:
    """A scan over layers stacks 8 bits of each layer's rows, and nothing in full."""

    def layers(x: Array, ws: Array) -> Array:
        return jax.lax.scan(lambda rows, w: (of("rowwise")(rows, w), None), x, ws)[0]

    ws = jnp.ones((4, 3, 36, 36), jnp.bfloat16)
    program: Any = jax.make_jaxpr(lambda x, ws: jax.vjp(layers, x, ws)[1](x))(X.data, ws).jaxpr
    forward, _ = ([v.aval for v in e.outvars] for e in program.eqns if e.primitive.name == "scan")
    stacked = [(each.dtype.name, each.shape) for each in forward if each.size > X.data.size]
    assert stacked == [("float8_e4m3fn", (4, *X.shape))]  # and of the weights, which it was given, no copy


TWICE = "a derivative of a product with `recipe` can't be differentiated: only quantised operands were saved."


@pytest.mark.parametrize(
    "recipe", [INT8_ROWS, *(pytest.param(name, marks=pytest.mark.long) for name in ("delayed", "nvfp4"))]
)
def test_a_derivative_of_what_is_kept(recipe: Any) -> None:
    """By either operand or the cotangent, in a loop, compiled, next to weights that are quantised already."""

    def loss(x: Array, w: Any) -> Array:
        return jnp.sum(of(recipe)(x, w) ** 2)

    def of_cotangent(ct: Array) -> Array:
        return jax.vjp(lambda x: of(recipe)(x, W), X.data)[1](ct)[0].sum()

    def in_a_loop(x: Array) -> Array:
        return jax.lax.scan(lambda x, _: (by_x(x, W), None), x, length=2)[0].sum()

    by_x, by_w = (jax.grad(loss, argnums=i) for i in (0, 1))
    calls = [lambda by=by, i=i: jax.jacrev(by, argnums=i)(X.data, W) for by in (by_x, by_w) for i in (0, 1)]
    calls += [
        lambda: jax.grad(lambda x: jnp.sum(jax.jit(by_x)(x, W)))(X.data),
        lambda: jax.grad(of_cotangent)(jnp.ones((14, 20), jnp.bfloat16)),
        lambda: jax.grad(in_a_loop)(X.data),
    ]
    if recipe != "delayed":
        calls.append(lambda: jax.grad(lambda w: by_x(X.data, quantize_weights(w, recipe)).sum())(W))
    for call in calls:
        with pytest.raises(TypeError) as raised:
            jax.eval_shape(call)
        assert TWICE in str(raised.value)
