"""What a recipe's product keeps for its derivatives, and that these are the same as of operands kept in full."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from ragged import Cast, GroupedTensor, Recipe, Scaling, gated_matmul, matmul, quantize, quantize_weights
from ragged.quant.recipe import PRESETS
from ragged.tensor.base import with_fields
from tests import cases
from tests.cases import NAMES
from tests.everywhere import everywhere

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
NARROW = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int8")
TILES: dict[str, Any] = {"backend": everywhere("xla", 4, 4, 4)}  # one height of tiles to compile


def mixed(save: str = "quantized") -> Recipe:
    """Six casts, no two alike: one in another's place changes the result."""
    return Recipe(
        (Cast(E4M3, "row"), Cast(E5M2, (2, 4))),
        (Cast(E5M2, (1, 4)), Cast(jnp.int8, "group")),
        (Cast(jnp.int8, "row", True), Cast(E4M3, "tensor")),
        save=save,
    )


def along(x: GroupedTensor, axis: int, how: Cast) -> GroupedTensor:
    """`x` quantised along the axis that is contracted, by the public `quantize`."""
    if axis == -2:
        return along(x.mT, -1, how).mT
    if how.scaling.block is None or how.dtype is None:
        return quantize(x, how.dtype, how.scaling, power_of_two=how.power_of_two)
    (kept, contracted), (is_kept, is_contracted) = how.scaling.block, x.ragged
    block = 1 if is_kept and kept is not None else kept, None if is_kept and is_contracted else contracted
    return quantize(x, how.dtype, Scaling(block, how.scaling.dtype), power_of_two=how.power_of_two)


def product(lhs: GroupedTensor, rhs: GroupedTensor, how: tuple[Cast, Cast], dtype: Any) -> Array:
    """Of operands that are quantised before."""
    options = {"preferred_element_type": dtype, **TILES}
    return matmul(along(lhs, -1, how[0]), along(rhs, -2, how[1]), **options).data


def swapped(pair: tuple[Cast, Cast]) -> tuple[Cast, Cast]:
    return pair[1], pair[0]


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", [*PRESETS, "mixed"])
@pytest.mark.parametrize("layout", NAMES)
def test_the_same_bits(layout: str, recipe: str) -> None:
    """Both derivatives are products of operands quantised for them, bit for bit. NaN tails, empty groups."""
    case = cases.make(layout, g=3, kind="half_empty", capacity=40, uniform=(6, 36, 20))
    how, x, w = mixed() if recipe == "mixed" else Recipe.preset(recipe), case.lhs, case.rhs
    left = layout == "forward_left"  # then `w` is `lhs`

    @jax.jit
    def run(x: GroupedTensor, w: GroupedTensor) -> Any:
        out, pull = jax.vjp(
            lambda *z: matmul(x.with_data(z[0]), w.with_data(z[1]), recipe=how, **TILES), x.data, w.data
        )
        dy = out.with_data(jnp.where(out.mask, jax.random.normal(jax.random.key(0), out.shape), 0))
        cotangent = jax.tree.map(lambda d: d if d.dtype == jnp.float32 else np.zeros(d.shape, jax.dtypes.float0), dy)
        by_lhs, by_rhs = (swapped(how.wgrad), swapped(how.dgrad)) if left else (how.dgrad, how.wgrad)
        dx = product(dy, w.mT, by_lhs, jnp.float32)
        dw = product(x.mT, dy, by_rhs, jnp.float32)
        return pull(cotangent), (dx, dw)

    got, want = run(x, w)
    for each, expected in zip(got, want, strict=True):
        held = tuple(map(slice, each.shape))  # the product's buffer may be larger: zeros
        np.testing.assert_array_equal(each, expected[held])
        assert np.count_nonzero(expected) == np.count_nonzero(expected[held])
        assert np.abs(each).max() > 0.1


def scaled(x: GroupedTensor, dtype: Any, scale: float) -> GroupedTensor:
    """`x` in a dtype, with one scale, a power of two. What is beyond its range saturates."""
    largest = float(jnp.finfo(dtype).max)
    data = jnp.where(x.mask, jnp.clip(x.data / scale, -largest, largest), 0)
    return with_fields(x, data=data.astype(dtype), scales=jnp.float32(scale), scaling=Scaling(None))


@pytest.mark.long
def test_scales_of_past_steps() -> None:
    """Delayed scaling: what is kept of `x` has the scale of its own history, as have `w` and the cotangent."""
    x, w = (
        GroupedTensor(jax.random.normal(jax.random.key(i), shape)) for i, shape in enumerate([(2, 6, 9), (2, 9, 5)])
    )
    largest = jnp.array([[0.5, 448 / 512], [448 / 256, 0.0], [57344 / 2**16, 0.25]], jnp.float32)
    recipe = Recipe.preset("delayed", length=2)
    recipe = Recipe(recipe.forward, recipe.dgrad, recipe.wgrad, largest)
    dy = GroupedTensor(jax.random.normal(jax.random.key(2), (2, 6, 5)))

    def value(data: Array, w: Array) -> Array:
        return matmul(x.with_data(data), w, recipe=recipe, **TILES).data

    dx, dw = jax.jit(lambda x, w: jax.vjp(value, x, w)[1](dy.data))(x.data, w.data)
    rows, weights, ct = scaled(x, E4M3, 1 / 512), scaled(w, E4M3, 1 / 256), scaled(dy, E5M2, 1 / 2**16)
    options: Any = {"preferred_element_type": jnp.float32, **TILES}
    np.testing.assert_array_equal(dx, matmul(ct, weights.mT, **options).data)
    np.testing.assert_array_equal(dw, matmul(rows.mT, ct, **options).data)


SIZES = jnp.array([5, 0, 7], jnp.int32)
X = GroupedTensor(jax.random.normal(jax.random.key(0), (14, 36), jnp.bfloat16), SIZES)
W = jax.random.normal(jax.random.key(1), (3, 36, 20), jnp.bfloat16)


def kept(function: Any, *args: Any) -> list[Any]:
    """What `jax.vjp` keeps of `function`, of all that is as large as `X` or larger."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args))
    return sorted((leaf.dtype.name, leaf.shape) for leaf in leaves if leaf.size >= X.data.size)


WHOLE, WEIGHTS = ("bfloat16", X.shape), ("bfloat16", W.shape)


@pytest.mark.sampled
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_kept(name: str) -> None:
    """Of `x`, in 8 or 4 bits, what the wgrad multiplies; `x` itself only where that is asked for, or isn't cast."""
    recipe = Recipe.preset(name)
    narrow = recipe.wgrad[0].dtype, X.shape

    def of(recipe: Recipe) -> Any:
        return lambda x, w: matmul(X.with_data(x), w, recipe=recipe).data

    assert kept(of(recipe), X.data, W) == [WEIGHTS, narrow]
    assert kept(of(Recipe.preset(name, save="operands")), X.data, W) == [WEIGHTS, WHOLE]
    left = kept(lambda x, w: matmul(w, X.with_data(x).mT, recipe=recipe).data, X.data, W.mT)
    assert left == [("bfloat16", W.mT.shape), narrow]
    uncast = Recipe(recipe.forward, recipe.dgrad, (Cast(None), recipe.wgrad[1]), recipe.history)
    assert kept(of(uncast), X.data, W) == [WEIGHTS, WHOLE]
    if name == "delayed":
        return
    made = quantize_weights(W, recipe)
    assert kept(lambda x, w: of(recipe)(x, w), X.data, made) == sorted([(recipe.dgrad[1].dtype, W.shape), narrow])


def test_scales_are_saved_in_their_own_dtype() -> None:
    """Those of `x` and of weights that came quantised have 8 bits, not the 32 in which kernels take them."""
    made = quantize_weights(W, "mxfp8")
    pull = jax.eval_shape(
        lambda x, w: jax.vjp(lambda x, w: matmul(X.with_data(x), w, recipe="mxfp8").data, x, w)[1], X.data, made
    )
    shapes = {leaf.shape for leaf in jax.tree.leaves(pull) if leaf.dtype == jnp.float8_e8m0fnu}
    assert shapes == {(3, 36), (3, 36, 1)}  # 3 blocks of rows; a block of the 20 columns
    assert all(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(pull))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["rowwise", "nvfp4"])
def test_what_gated_products_keep(name: str) -> None:
    """The rows of both products once; where the pre-activations are computed again, the rows themselves."""
    casts = Recipe.preset(name)
    narrow = casts.wgrad[0].dtype, X.shape

    def of(recipe: Any, save: str = "pre") -> list[Any]:
        def gated(x: Array, w: Array, v: Array) -> Array:
            return gated_matmul(X.with_data(x), w, v, recipe=recipe, save=save).data

        return [each for each in kept(gated, X.data, W, W) if each[1] == X.shape]

    assert of(name) == of((name, casts)) == [narrow]
    assert of(name, "out") == [WHOLE]
    assert of((name, "mxfp8")) == sorted([narrow, ("float8_e4m3fn", X.shape)])
    assert of((name, None)) == sorted([narrow, WHOLE])


def test_what_loops_and_remat_keep() -> None:
    """A scan over layers stacks 8 bits of each layer's rows, and nothing in full; remat keeps its operands."""

    def layers(x: Array, ws: Array) -> Array:
        def layer(rows: Array, w: Array) -> tuple[Array, None]:
            return matmul(X.with_data(rows), w, recipe="rowwise").data, None

        return jax.lax.scan(layer, x, ws)[0]

    ws = jnp.ones((4, 3, 36, 36), jnp.bfloat16)
    program: Any = jax.make_jaxpr(lambda x, ws: jax.vjp(layers, x, ws)[1](x))(X.data, ws).jaxpr
    forward, backward = ([v.aval for v in e.outvars] for e in program.eqns if e.primitive.name == "scan")
    stacked = [(each.dtype.name, each.shape) for each in forward if each.size > X.data.size]
    assert stacked == [("float8_e4m3fn", (4, *X.shape))]  # and of the weights, which it was given, no copy
    assert any(each.shape == ws.shape for each in backward)
    remat = jax.checkpoint(lambda x, w: matmul(X.with_data(x), w, recipe="rowwise").data)
    assert kept(remat, X.data, W) == [WEIGHTS, WHOLE]


def sum_of_squares(recipe: Any, x: Array, w: Array) -> Array:
    return jnp.sum(matmul(X.with_data(x), w, recipe=recipe, **TILES).data ** 2)


TWICE = "a derivative of a product with `recipe` can't be differentiated: only quantised operands were saved."


@pytest.mark.parametrize(
    "recipe", ["int8", *(pytest.param(name, marks=pytest.mark.long) for name in ("delayed", "nvfp4"))]
)
def test_a_derivative_of_what_is_kept(recipe: Any) -> None:
    """By either operand or the cotangent, in a loop, compiled, next to weights that are quantised already."""
    one = Cast(jnp.int8, "row"), Cast(jnp.int8, "row")
    recipe = Recipe(one, one, one) if recipe == "int8" else recipe

    def of_cotangent(ct: Array) -> Array:
        return jax.vjp(lambda x: matmul(X.with_data(x), W, recipe=recipe).data, X.data)[1](ct)[0].sum()

    def in_a_loop(x: Array) -> Array:
        grad = jax.grad(sum_of_squares, argnums=1)
        return jax.lax.scan(lambda x, _: (grad(recipe, x, W), None), x, length=2)[0].sum()

    def of_made(w: Array) -> Array:
        made = quantize_weights(w, recipe)
        return jax.grad(lambda x: matmul(X.with_data(x), made, recipe=recipe).data.sum())(X.data).sum()

    by_x, by_w = (jax.grad(sum_of_squares, argnums=i) for i in (1, 2))
    calls = [
        lambda: jax.jacrev(by_x, argnums=1)(recipe, X.data, W),
        lambda: jax.jacrev(by_x, argnums=2)(recipe, X.data, W),
        lambda: jax.jacrev(by_w, argnums=1)(recipe, X.data, W),
        lambda: jax.jacrev(by_w, argnums=2)(recipe, X.data, W),
        lambda: jax.grad(lambda x: jnp.sum(jax.jit(by_x, static_argnums=0)(recipe, x, W)))(X.data),
        lambda: jax.grad(of_cotangent)(jnp.ones((14, 20), jnp.bfloat16)),
        lambda: jax.grad(in_a_loop)(X.data),
    ]
    if recipe != "delayed":
        calls.append(lambda: jax.grad(of_made)(W))
    for call in calls:
        cases.check_error(lambda call=call: jax.eval_shape(call), TypeError, TWICE)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["mixed", "delayed"])
def test_derivatives_of_derivatives(recipe: Any) -> None:
    """`jax.jacrev(jax.grad(f))`: the derivative of a dgrad by the weights is a wgrad, quantised as one."""
    recipe = mixed("operands") if recipe == "mixed" else Recipe.preset(recipe, save="operands")
    x = GroupedTensor(jax.random.normal(jax.random.key(0), (5, 4)), jnp.array([2, 0, 3], jnp.int32))
    w, ct = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(3, 4, 2), (5, 2)]))

    def loss(data: Array, w: Array) -> Array:
        return jnp.vdot(ct, matmul(x.with_data(data), w, recipe=recipe).data)

    got = jax.jit(jax.jacrev(jax.grad(loss), argnums=1))(x.data, w)  # of each of `dx`, by `w`
    basis = jnp.eye(x.data.size).reshape(-1, *x.shape)
    (of_x, of_ct), dy = recipe.wgrad, x.with_data(ct)
    want = jax.vmap(lambda v: product(x.with_data(v).mT, dy, (of_x, of_ct), jnp.float32))(basis)
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-6, atol=1e-6)
    assert np.linalg.norm(want) > 1


def gradients(recipe: Recipe, x: GroupedTensor, w: Array) -> Any:
    """Of both operands, and of the recipe, if it has a history."""

    def loss(data: Array, w: Array, recipe: Recipe) -> Array:
        return jnp.sum(matmul(x.with_data(data), w, recipe=recipe, **TILES).map(jnp.tanh).data)

    return jax.grad(loss, argnums=(0, 1, 2))(x.data, w, recipe)


@pytest.mark.long
@pytest.mark.parametrize("name", [*PRESETS, "mixed"])
def test_under_transformations(name: str) -> None:
    """Remat, a scan over microbatches, `vmap` of each operand and of both, `jit`: the bits of plain calls."""
    how = mixed() if name == "mixed" else Recipe.preset(name)
    if name == "delayed":
        history = jnp.array([[3.0, 9.0], [2.0, 8.0], [1.5, 1.0]])  # of which the largest counts
        how = Recipe(how.forward, how.dgrad, how.wgrad, history)
    recipe = how.unsealed()
    xs = jax.random.normal(jax.random.key(0), (3, 14, 36)).at[:, 12:].set(jnp.nan)
    ws = jax.random.normal(jax.random.key(1), (3, 3, 36, 20))

    def of(data: Array, w: Array) -> Any:
        return gradients(recipe, GroupedTensor(data, SIZES), w)

    def same(got: Any, want: Any) -> None:
        for each, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(each, expected)

    want = [of(xs[i], ws[i]) for i in range(3)]
    same(jax.jit(of)(xs[0], ws[0]), want[0])
    same(of_remat(recipe, xs[0], ws[0]), want[0])
    same(jax.lax.map(lambda each: of(*each), (xs, ws)), jax.tree.map(lambda *each: jnp.stack(each), *want))
    for axes in ((0, 0), (0, None), (None, 0)):
        rows, weights = (z if axis == 0 else z[0] for z, axis in zip((xs, ws), axes, strict=True))
        got = jax.jit(jax.vmap(of, in_axes=axes))(rows, weights)
        for i in range(3):
            one = want[i] if axes == (0, 0) else of(xs[i if axes[0] == 0 else 0], ws[i if axes[1] == 0 else 0])
            same(jax.tree.map(lambda leaf, i=i: leaf[i], got[:2]), one[:2])


def of_remat(recipe: Recipe, data: Array, w: Array) -> Any:
    @jax.checkpoint
    def loss(data: Array, w: Array, recipe: Recipe) -> Array:
        return jnp.sum(matmul(GroupedTensor(data, SIZES), w, recipe=recipe, **TILES).map(jnp.tanh).data)

    return jax.grad(loss, argnums=(0, 1, 2))(data, w, recipe)


@pytest.mark.parametrize("save", ["everything", None, ["quantized"]])
def test_what_to_save(save: Any) -> None:
    """An unknown name is refused, with those that there are."""
    text = f"`save` is {save!r}.\nPass 'quantized' to use less memory, or 'operands' to differentiate a derivative."
    cases.check_error(lambda: Recipe.preset("rowwise", save=save), ValueError, text)
