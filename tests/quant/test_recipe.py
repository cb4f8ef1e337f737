"""Recipes: each product quantised on its own, straight-through gradients, delayed scaling, and the table of errors."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

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
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ragged
from ragged import Cast, ErrorTable, GroupedTensor, Recipe, Scaling, error_table, matmul, quantize
from ragged.quant.recipe import PRESETS
from ragged.tensor.base import with_fields
from ragged.tools import error_table as table_module
from ragged.tuning import TpuConfig
from tests import cases, constants, oracle
from tests.cases import NAMES
from tests.everywhere import INTERPRETED, everywhere

pytestmark = pytest.mark.sampled

F32: dict[str, Any] = {"preferred_element_type": jnp.float32}
BACKENDS: dict[str, dict[str, Any]] = {
    "xla": {"backend": everywhere("xla", 16, 16, 16)},  # one height of tiles: compiled faster
    "pallas_tpu": {"backend": INTERPRETED["pallas_tpu"]},
    "triton_gpu": {"backend": INTERPRETED["triton_gpu"]},
}


def groups_of(x: GroupedTensor, firsts: Any, lasts: Any) -> oracle.Groups:
    """What the groups of a tensor dequantise to, in float64."""
    data = np.asarray(x.dequantize().data).astype(np.float64)
    if x.kind == "ragged both" and x.packed_axis == -1:
        ends = np.cumsum(lasts)
        return [data[:m, e - n : e] for m, n, e in zip(firsts, lasts, ends, strict=True)]
    return oracle.unpack(data, x.ragged, list(firsts), list(lasts))


E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# Six casts, no two alike: one in another's place changes the result.
MIXED = Recipe(
    (Cast(E4M3, "row"), Cast(E5M2, (2, 4))),
    (Cast(E5M2, (1, 4)), Cast(jnp.int8, "group")),
    (Cast(jnp.int8, "row", True), Cast(E4M3, "tensor")),
)


def through(x: GroupedTensor, firsts: Any, lasts: Any, how: Cast, contracted: int) -> oracle.Groups:
    """The groups of `x`, quantised along its contracted axis, in float64."""
    if how.dtype is None:
        return groups_of(x, firsts, lasts)
    block = how.scaling.block
    if block is not None:
        kept, along = block
        is_ragged = x.ragged if contracted == -1 else x.ragged[::-1]
        kept = 1 if is_ragged[0] and kept is not None else kept
        block = (kept, None if all(is_ragged) else along)
        block = block if contracted == -1 else block[::-1]
    q = quantize(x, how.dtype, Scaling(block, how.scaling.dtype), power_of_two=how.power_of_two)
    return groups_of(q, firsts, lasts)


def transposed(groups: oracle.Groups) -> oracle.Groups:
    return [g.T for g in groups]


def check_recipe(case: cases.Case, recipe: Recipe, **options: Any) -> None:
    """Value and both gradients, against products of what each operand of each becomes.

    The layout picks which operands are constants, and whether XLA's product is within a `shard_map`.
    """
    maps, options = not options, options or BACKENDS["xla"]
    m, k, n = (case.sizes[letter] for letter in "mkn")
    x, w = case.lhs, case.rhs
    left = case.layout == "forward_left"
    (xf, wf), (yd, wd), (xw, yw) = recipe.forward, recipe.dgrad, recipe.wgrad

    def multiply(x_: Array, w_: Array) -> GroupedTensor:
        return matmul(x.with_data(x_), w.with_data(w_), recipe=recipe, **F32, **options)

    def pull(x_: Array, w_: Array, ct: Array) -> Any:
        return jax.vjp(lambda x_, w_: multiply(x_, w_).data, x_, w_)[1](ct)

    out = constants.run(case.layout, multiply, x.data, w.data, maps=maps)
    dy = out.with_data(jnp.where(out.mask, jax.random.normal(jax.random.key(0), out.shape), 0))
    dx, dw = constants.run(case.layout, pull, x.data, w.data, dy.data, maps=maps)

    lhs, rhs = (wf, xf) if left else (xf, wf)
    want = oracle.matmul(through(x, m, k, lhs, -1), through(w, k, n, rhs, -2))
    oracle.assert_close(case.unpack(np.asarray(out.data)), want, max=1e-5)
    case.assert_tail_zero(out)

    ct, rhs = (yw, xw) if left else (yd, wd)
    want = oracle.matmul(through(dy, m, n, ct, -1), transposed(through(w, k, n, rhs, -1)))
    oracle.assert_close(groups_of(x.with_data(dx), m, k), want, max=1e-5)
    lhs, ct = (wd, yd) if left else (xw, yw)
    want = oracle.matmul(transposed(through(x, m, k, lhs, -2)), through(dy, m, n, ct, -2))
    oracle.assert_close(groups_of(w.with_data(dw), k, n), want, max=1e-5)
    for gradient, like in ((dx, x), (dw, w)):
        tail = np.asarray(gradient)[~np.asarray(like.mask)]
        assert np.array_equal(tail, np.zeros_like(tail))


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize(
    "recipe",
    [pytest.param("tensorwise", marks=pytest.mark.long), "blockwise", MIXED],
    ids=lambda x: getattr(x, "name", x),
)
@pytest.mark.parametrize("layout", NAMES)
def test_each_product_is_quantised_on_its_own(layout: str, recipe: Any) -> None:
    """Along what it contracts; straight-through; NaN tails; empty groups."""
    check_recipe(cases.make(layout, g=3, kind="half_empty", capacity=40, uniform=(6, 9, 5)), Recipe.of(recipe))


@pytest.mark.parametrize("packed", [(True, False), (False, True)])
@pytest.mark.parametrize("layout", ["inner_rows", "inner_columns", "ragged"])
def test_packed_along_the_other_axis(layout: str, packed: tuple[bool, bool]) -> None:
    if (layout == "inner_rows" and packed[1]) or (layout == "inner_columns" and packed[0]):
        pytest.skip("that operand is ragged in one dim")
    case = cases.make(layout, g=3, capacity=40, lhs_packed_last=packed[0], rhs_packed_last=packed[1])
    out = matmul(case.lhs, case.rhs, recipe=MIXED, **F32)
    m, k, n = (case.sizes[letter] for letter in "mkn")
    want = oracle.matmul(through(case.lhs, m, k, MIXED.forward[0], -1), through(case.rhs, k, n, MIXED.forward[1], -2))
    oracle.assert_close(case.unpack(np.asarray(out.data)), want, max=1e-5)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("backend", ["pallas_tpu", "triton_gpu"], indirect=True)
@pytest.mark.parametrize("scales", ["float32", "float8_e8m0fnu"])
@pytest.mark.parametrize("preset", ["blockwise", "mxfp8"])
def test_by_kernels(preset: str, scales: str, backend: str) -> None:
    """Blocks of 128 and of 32, the last one partial; with scales of float32 and of powers of two."""
    case = cases.make("forward", g=3, kind="half_empty", capacity=100, uniform=(0, 160, 140))
    recipe = Recipe.preset(preset, scales=scales)
    assert {each.scaling.dtype.name for each in recipe.wgrad} == {scales}
    check_recipe(case, recipe, **BACKENDS[backend])


@pytest.mark.parametrize("one_side", [0, 1])
@pytest.mark.long
def test_one_side_only(one_side: int) -> None:
    """A cast without a dtype leaves its operand as it is."""
    none, e4m3 = Cast(None), Cast(E4M3, "row")
    pair = (none, e4m3) if one_side else (e4m3, none)
    check_recipe(cases.make("forward", capacity=40), Recipe(pair, pair, pair))
    check_recipe(cases.make("forward", capacity=40), Recipe((none, none), (none, none), (none, none)))


def gaussian(outliers: bool) -> tuple[GroupedTensor, Array]:
    """Outliers: in one row of 8, one feature of 512 is 300 000 times as large."""
    x, w = jax.random.normal(jax.random.key(0), (256, 4096)), jax.random.normal(jax.random.key(1), (2, 4096, 32))
    if outliers:
        x = x.at[::8, ::512].multiply(3e5)
        w = w.at[:, ::512].multiply(1 / 3e5)
    return GroupedTensor(x, jnp.array([100, 156], jnp.int32)), w


@pytest.mark.long
def test_sqnr_of_gaussian_operands() -> None:
    """e4m3 on both sides: 27 dB; with e5m2 gradients 24 dB; e2m1 17 dB."""
    x, w = gaussian(False)
    names = [name for name in PRESETS if name != "nvfp4"]
    four_bits = error_table(x, w, ["nvfp4"]).sqnr[0]
    assert (four_bits >= 17).all() and (four_bits <= 19).all()
    table = error_table(x, w, [*names, Recipe.preset("blockwise", gradients=E5M2)])
    e5m2 = np.array([*(PRESETS[name][-1] == "float8_e5m2" for name in names), True])
    assert table.sqnr[:, 0].min() >= 27
    assert table.sqnr[~e5m2].min() >= 27
    assert table.sqnr[e5m2, 1:].min() >= 24 and table.sqnr[e5m2, 1:].max() <= 26
    assert table.overflow.max() == 0


@pytest.mark.long
def test_outliers() -> None:
    """One scale for all loses what is small beside an outlier; one a row, or a block, does not."""
    table = error_table(*gaussian(True), ["tensorwise", "rowwise", "blockwise", "mxfp8"])
    tensorwise, rowwise, blockwise, mxfp8 = table.sqnr[:, 0]
    assert tensorwise + 1 < rowwise < blockwise < mxfp8
    assert table.underflow[0, 0] > 10 * table.underflow[2, 0]


def training(recipe: Any, x: GroupedTensor, w: Array) -> Array:
    return jnp.mean(jnp.tanh(matmul(x, w, recipe=recipe).data) ** 2)


@pytest.mark.long
@pytest.mark.parametrize("preset", [pytest.param("rowwise", marks=pytest.mark.long), "delayed"])
def test_under_transformations(preset: str) -> None:
    """Jit, vmap, scan, remat: all the same as a loop of plain calls."""
    case = cases.make("forward", g=3, capacity=20, uniform=(0, 9, 5), fill=0.0)
    recipe, (x, w) = Recipe.preset(preset).unsealed(), (case.lhs, case.rhs.data)
    grad = jax.grad(lambda x, w, r: training(r, x.with_data(x.data), w), argnums=(1, 2))
    want = grad(x, w, recipe)

    def same(got: Any, want: Any) -> None:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    same(jax.jit(grad)(x, w, recipe), want)
    remat = jax.grad(lambda w, r: jax.checkpoint(training, static_argnums=())(r, x, w), argnums=(0, 1))
    same(remat(w, recipe), want)
    # A scan over layers, each with weights and a recipe of its own.
    square = jax.random.normal(jax.random.key(2), (2, 3, 9, 9)) / 3
    recipes = jax.tree.map(lambda z: jnp.stack([z, z]), recipe)

    def layers(square: Array, recipes: Recipe) -> Array:
        def layer(x: GroupedTensor, each: Any) -> Any:
            return matmul(x, each[0], recipe=each[1]).map(jnp.tanh), None

        return jnp.mean(jax.lax.scan(layer, x, (square, recipes))[0].data ** 2)

    def unrolled(square: Array, recipes: list[Recipe]) -> Array:
        y = x
        for i, each in enumerate(recipes):
            y = matmul(y, square[i], recipe=each).map(jnp.tanh)
        return jnp.mean(y.data**2)

    got = jax.grad(layers, argnums=(0, 1))(square, recipes)
    one, both = jax.grad(unrolled, argnums=(0, 1))(square, [recipe, recipe])
    same(got, (one, jax.tree.map(lambda *z: jnp.stack(z), *both)))
    # Elements of a map, each with its own recipe.
    xs = with_fields(x, data=jnp.stack([x.data, 3 * x.data]), first_dims=jnp.stack([x.first_dims] * 2))
    got = jax.vmap(grad, in_axes=(0, None, 0))(xs, w, recipes)
    for i in range(2):
        element = jax.tree.map(lambda leaf, i=i: leaf[i], xs)
        same(jax.tree.map(lambda leaf, i=i: leaf[i], got), grad(element, w, recipe))


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("recipe", [MIXED, "delayed"], ids=lambda x: getattr(x, "name", x))
@pytest.mark.parametrize("layout", ["batched", "forward", "forward_left", "wgrad", "inner_rows"])
def test_second_derivatives(layout: str, recipe: Any) -> None:
    """Reverse over reverse: the dgrad and the wgrad are products too, whose derivatives are again the three."""
    case = cases.make(layout, g=2, capacity=16, uniform=(5, 6, 4), fill=0.0)
    how = Recipe.of(recipe)
    recipe = Recipe(how.forward, how.dgrad, how.wgrad, how.history, save="operands")

    def pull(lhs: Array, rhs: Array, ct: Array) -> tuple[Array, Array]:
        def value(lhs: Array, rhs: Array) -> Array:
            pair = case.lhs.with_data(lhs), case.rhs.with_data(rhs)
            return matmul(*pair, recipe=recipe, backend=everywhere("xla", 4, 4, 4)).data

        return jax.vjp(value, lhs, rhs)[1](ct)

    x, w = case.lhs.data, case.rhs.data
    out = matmul(case.lhs, case.rhs)
    ct = jnp.where(out.mask, jax.random.normal(jax.random.key(0), out.shape), 0)
    v = jnp.where(case.lhs.mask, jax.random.normal(jax.random.key(1), x.shape), 0)
    by_rhs = jax.grad(lambda w: jnp.vdot(v, pull(x, w, ct)[0]))(w)
    np.testing.assert_allclose(by_rhs, pull(v, w, ct)[1], rtol=1e-5, atol=1e-5)
    by_ct = jax.grad(lambda ct: jnp.vdot(v, pull(x, w, ct)[0]))(ct)
    forward = matmul(case.lhs.with_data(v), case.rhs, recipe=recipe)
    np.testing.assert_allclose(by_ct, forward.data, rtol=1e-5, atol=1e-5)
    u = jnp.where(case.rhs.mask, jax.random.normal(jax.random.key(2), w.shape), 0)
    by_lhs = jax.grad(lambda x: jnp.vdot(u, pull(x, w, ct)[1]))(x)
    np.testing.assert_allclose(by_lhs, pull(x, u, ct)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_over_a_mesh() -> None:
    """Experts sharded over devices, each device scaling its own shard; they share a history."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("experts",))
    case = cases.make("forward", g=8, kind="even", capacity=64, uniform=(0, 9, 5), fill=0.0)
    x, w = case.lhs, case.rhs.data

    def local(x: GroupedTensor, w: Array, recipe: Recipe) -> Array:
        first = jax.lax.axis_index("experts").astype(jnp.int32) * 2
        y = matmul(x, w, group_offset=first, recipe=recipe)
        return jax.lax.psum(jnp.sum(y.data**2), "experts")

    specs = (jax.tree.map(lambda _: P(), x), P("experts"), P())
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())

    def whole(x: GroupedTensor, w: Array, recipe: Recipe) -> Array:
        return jnp.sum(matmul(x, w, recipe=recipe).data ** 2)

    for preset in ("rowwise", "delayed"):
        recipe = Recipe.preset(preset).unsealed()
        arguments = (x.data, w, recipe)
        got, want = (
            jax.jit(jax.grad(lambda d, w, r, f=f: f(x.with_data(d), w, r), argnums=(0, 1, 2)))(*arguments)
            for f in (sharded, whole)
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_derivative_by_weights_has_the_scales_of_its_own_operands() -> None:
    """Those of past rows and of past cotangents; with the scale of past weights, the cotangent would saturate."""
    cast, of_cotangent = Cast(E4M3, "tensor"), Cast(E5M2, "tensor")
    largest = jnp.array([[448.0], [448.0 / 2**20], [57344.0]], jnp.float32)
    recipe = Recipe((cast, cast), (of_cotangent, cast), (cast, of_cotangent), largest)
    x, ct = np.array([[1, 2], [3, 4], [5, -6]], np.float32), np.array([[1], [-2], [4]], np.float32)

    def loss(w: Array) -> Array:
        return jnp.sum(matmul(GroupedTensor(x, np.array([1, 2], np.int32)), w, recipe=recipe).data * ct)

    dw = jax.jit(jax.grad(loss))(np.ones((2, 2, 1), np.float32))
    np.testing.assert_array_equal(dw, [x[:1].T @ ct[:1], x[1:].T @ ct[1:]])


@pytest.mark.long
def test_delayed_scaling() -> None:
    """The history moves by a step; scales are those of its largest value; what is above it saturates."""
    case = cases.make("forward", g=2, kind="even", capacity=16, slack=False, uniform=(0, 6, 4))
    x, w = case.lhs, case.rhs.data
    recipe = Recipe.preset("delayed", length=3).unsealed()

    def step(recipe: Recipe, factor: float) -> tuple[Array, Recipe]:
        def loss(recipe: Recipe) -> tuple[Array, Array]:
            y = matmul(x * factor, w, recipe=recipe)
            return 7.0 * jnp.sum(y.data), y.data

        grads, y = jax.grad(loss, has_aux=True)(recipe)
        return y, grads

    largest = np.array([np.abs(x.data).max(), np.abs(w).max(), 7.0])
    y, first = step(recipe, 1.0)
    np.testing.assert_array_equal(y, matmul(x, w, recipe="tensorwise").data)
    np.testing.assert_allclose(first.history[:, 0], largest, rtol=1e-6)
    np.testing.assert_array_equal(first.history[:, 1:], np.zeros((3, 2)))
    y, second = step(first, 3.0)
    np.testing.assert_allclose(second.history[:, :2], np.stack([largest * [3, 1, 1], largest], axis=1), rtol=1e-6)
    # Scaled for the past's largest value: three times as large saturates there.
    scale = largest[0] / 448
    held = np.clip(np.asarray(x.data, np.float64) * 3 / scale, -448, 448).astype(np.float32).astype(E4M3)
    weights = quantize(w, E4M3, "tensor").dequantize().data
    exact = matmul(x.with_data(jnp.asarray(held.astype(np.float32) * np.float32(scale))), weights)
    np.testing.assert_allclose(y, exact.data, rtol=1e-5, atol=1e-5)
    past, third = step(second, 1.0)
    np.testing.assert_allclose(third.history[0], largest[0] * np.array([1, 3, 1]), rtol=1e-6)
    y, fourth = step(third, 1.0)
    np.testing.assert_array_equal(y, past)  # both scaled for the second step's values
    np.testing.assert_allclose(fourth.history[0], largest[0] * np.array([1, 1, 3]), rtol=1e-6)
    assert error_table(x * 3, w, [first]).overflow[0, 0] > 0


@pytest.mark.long
def test_a_history_that_a_map_shares() -> None:
    """Under `vmap` one history gets the largest value of all elements; it is not added up."""
    case = cases.make("forward", g=2, kind="even", capacity=16, slack=False, uniform=(0, 6, 4))
    factors = jnp.array([1.0, 5.0, 2.0])

    def loss(recipe: Recipe) -> Array:
        return jnp.sum(jax.vmap(lambda f: matmul(case.lhs * f, case.rhs.data, recipe=recipe).data)(factors))

    history = jax.grad(loss)(Recipe.preset("delayed", length=2).unsealed()).history
    largest = [5 * np.abs(case.lhs.data).max(), np.abs(case.rhs.data).max(), 1.0]
    np.testing.assert_allclose(history[:, 0], largest, rtol=1e-6)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("recipe", [MIXED, "blockwise", "delayed"], ids=lambda x: getattr(x, "name", x))
@pytest.mark.parametrize("layout", ["batched", "forward", "forward_left"])
def test_with_one_matrix_for_all_groups(layout: str, recipe: Any) -> None:
    """All groups are one for scales too, as the sum over them in a wgrad needs."""
    case = cases.make(layout, g=3, capacity=24, uniform=(6, 8, 5), fill=0.0)
    x = case.lhs if layout != "forward_left" else case.rhs.mT
    total = jnp.sum(x.first_dims)[None] if layout != "batched" else None
    one = GroupedTensor(x.data.reshape(-1, 8)[None] if total is None else x.data, total)
    shared = jax.random.normal(jax.random.key(0), (8, 5))

    def of_groups(d: Array, w: Array) -> Array:
        y = x.with_data(d)
        return matmul(y, w, recipe=recipe).data if layout != "forward_left" else matmul(w.T, y.mT, recipe=recipe).data.T

    def of_one(d: Array, w: Array) -> Array:
        return matmul(one.with_data(d.reshape(one.shape)), w[None], recipe=recipe).data

    out, pull = jax.vjp(of_groups, x.data, shared)
    want, pull_one = jax.vjp(of_one, x.data, shared)
    np.testing.assert_allclose(out, want.reshape(out.shape), rtol=1e-6, atol=1e-6)
    ct = jax.random.normal(jax.random.key(1), out.shape) * jnp.where(x.mask[..., :1], 1, 0)
    for got, expected in zip(pull(ct), pull_one(ct.reshape(want.shape)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    if layout == "forward":
        assert error_table(x, shared, [recipe]).group_sqnr.shape == (1, 3, 1)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("recipe", PRESETS)
def test_gradients_without_rows(recipe: str) -> None:
    """A device that got no tokens: zeros."""
    x = GroupedTensor(jnp.ones((0, 64)), jnp.zeros(3, jnp.int32))
    run = jax.grad(lambda x, w: jnp.sum(matmul(x, w, recipe=recipe).data), (0, 1), allow_int=True)
    dx, dw = run(x, jnp.ones((3, 64, 32)))
    assert dx.data.shape == (0, 64)
    np.testing.assert_array_equal(dw, np.zeros((3, 64, 32)))


def test_options_reach_the_quantised_products() -> None:
    """Existing_out has its gradient; dtype, tiles and offset are what they are without a recipe."""
    case = cases.make("forward", g=4, kind="even", capacity=40, uniform=(0, 9, 5), fill=0.0)
    bare = matmul(case.lhs, case.rhs.data[1:3], group_offset=jnp.int32(1), recipe="rowwise")
    existing = jax.random.normal(jax.random.key(0), bare.shape)

    def loss(existing: Array, w: Array) -> Array:
        return jnp.sum(
            matmul(
                case.lhs,
                w,
                group_offset=jnp.int32(1),
                recipe="rowwise",
                existing_out=existing,
                backend=everywhere("xla", 16, 8, 8),
            ).data
        )

    by_existing, by_w = jax.grad(loss, argnums=(0, 1))(existing, case.rhs.data[1:3])
    np.testing.assert_array_equal(by_existing, np.where(np.asarray(case.lhs.mask)[:, :5], 1.0, 0.0))
    assert by_w.shape == (2, 9, 5)
    inside = np.asarray(bare.mask)
    total = matmul(case.lhs, case.rhs.data[1:3], group_offset=jnp.int32(1), recipe="rowwise", existing_out=existing)
    np.testing.assert_allclose(total.data[inside], (bare.data + existing)[inside], rtol=1e-5, atol=1e-6)
    half = matmul(case.lhs.astype(jnp.bfloat16), case.rhs.astype(jnp.bfloat16), recipe="mxfp8")
    assert half.dtype == jnp.bfloat16
    text = str(ragged.explain(case.lhs.astype(jnp.float16), case.rhs, recipe="rowwise"))
    assert "quantised by rowwise" in text and "on tpu: grouped_matmul of pallas_tpu" in text  # of fp8, not of float16
    shared = ragged.explain(case.lhs, case.rhs.data[0], recipe="rowwise")
    assert "on tpu: grouped_matmul of pallas_tpu" in str(shared)


@pytest.mark.long
def test_error_table() -> None:
    """Its figures are those of the definition; it prints, and a group without a signal has none."""
    x = GroupedTensor(jax.random.normal(jax.random.key(0), (20, 64)), jnp.array([8, 0, 9], jnp.int32))
    x = x.with_data(x.data.at[8:17].multiply(jnp.exp2(-jnp.arange(9.0) * 2)[:, None]))
    w = jax.random.normal(jax.random.key(1), (3, 64, 16))
    dy = matmul(x, w)
    table = error_table(x, w, ["tensorwise", MIXED], dy=dy)
    exact, got = (
        np.asarray(matmul(x, w, precision="highest", recipe=r).data, np.float64) for r in (None, "tensorwise")
    )
    noise = got - exact
    np.testing.assert_allclose(table.relative_error[0, 0], np.linalg.norm(noise) / np.linalg.norm(exact), rtol=1e-4)
    np.testing.assert_allclose(table.sqnr, -20 * np.log10(table.relative_error))
    by_group = [20 * np.log10(np.linalg.norm(exact[s]) / np.linalg.norm(noise[s])) for s in (np.s_[:8], np.s_[8:17])]
    np.testing.assert_allclose(table.group_sqnr[0, 0, [0, 2]], by_group, rtol=1e-3)
    assert np.isnan(table.group_sqnr[0, :, 1]).all()
    assert table.worst_group[0, 0] == 2
    q = quantize(x, E4M3, "tensor").data[:17], quantize(w, E4M3, "tensor").data
    lost = sum(int(jnp.sum(z.astype(jnp.float32) == 0)) for z in q)
    np.testing.assert_allclose(table.underflow[0, 0], 100 * lost / (17 * 64 + w.size), rtol=1e-5)
    wgrad = matmul(x.mT, dy, precision="highest").data
    quantised = matmul(quantize(x.mT, E4M3, "tensor"), quantize(dy, E5M2, "tensor"), **F32).data
    np.testing.assert_allclose(
        table.relative_error[0, 2], jnp.linalg.norm(quantised - wgrad) / jnp.linalg.norm(wgrad), rtol=1e-4
    )
    text = str(table)
    assert len(text.splitlines()) == 7
    assert all(name in text for name in ("recipe", "forward", "dgrad", "wgrad", "tensorwise", "custom", "SQNR (dB)"))
    left = error_table(w.mT, x.mT, ["tensorwise", MIXED], dy=dy.mT)
    np.testing.assert_allclose(left.sqnr, table.sqnr, rtol=1e-4)
    rounded = quantize(dy, E4M3, "row")
    same = [error_table(x, w, "tensorwise", dy=d).sqnr for d in (rounded, rounded.dequantize())]
    np.testing.assert_array_equal(same[0], same[1])
    zero = error_table(x * 0, w, ["rowwise"], dy=dy)
    assert zero.worst_group[0, 0] == -1 and "none" in str(zero)


@pytest.mark.long
def test_error_table_of_what_is_not_finite() -> None:
    """Its group is the worst one and is named; so say the totals."""
    x = GroupedTensor(X.data.at[4, 3].set(jnp.nan), X.first_dims)
    table = error_table(x, W, ["rowwise"], dy=jnp.ones((8, 16)))
    np.testing.assert_array_equal(table.worst_group[0, [0, 2]], [1, 1])  # a dgrad doesn't read `x`
    np.testing.assert_array_equal(table.group_sqnr[0, [0, 2], 1], [-np.inf] * 2)
    np.testing.assert_array_equal(table.relative_error[0, [0, 2]], [np.inf] * 2)
    np.testing.assert_array_equal(table.sqnr[0, [0, 2]], [-np.inf] * 2)
    assert np.isfinite(table.sqnr[0, 1]) and np.isfinite(table.group_sqnr[0, :, 0]).all()
    assert "1 (-inf)" in str(table)


@pytest.mark.long
def test_error_table_computes_the_exact_products_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all products of a kind by one program, whatever the recipe."""
    product, bind = table_module._product, table_module.bind
    computed, traced = [], []
    monkeypatch.setattr(table_module, "_product", lambda *args: computed.append(args) or product(*args))
    monkeypatch.setattr(table_module, "bind", lambda *args: traced.append(args) or bind(*args))
    error_table(X, W[:, :, :7], ["rowwise", "blockwise", MIXED], dy=jnp.ones((8, 7)))
    assert len(computed) == 3 * (1 + 3) and len(traced) == 3


@pytest.fixture
def agg() -> None:
    pytest.importorskip("matplotlib").use("Agg")


def table_of(group_sqnr: Any) -> ErrorTable:
    """A table of these groups' decibels, `[recipes, groups]`, for each of the three products."""
    group = np.repeat(np.asarray(group_sqnr, np.float64)[:, None], 3, axis=1)
    total = np.ones(group.shape[:2])
    return ErrorTable(tuple(PRESETS)[: len(group)], total, total, total, total, np.zeros(total.shape, int), group)


def test_colours_and_labels_of_a_heat_map(agg: None) -> None:
    """A group of one row, which is all but exact, leaves the others their colours; no label leaves the picture."""
    rng = np.random.default_rng(0)
    decibels = rng.uniform(24, 29, (5, 6))
    decibels[:, 2], decibels[1, 4], decibels[2, 5] = 141.0, -np.inf, np.nan
    ax = table_of(decibels).plot("dgrad")
    low, high = ax.images[0].get_clim()
    assert 20 < low <= 24.5 and 28.5 <= high < 40
    shown = np.asarray(ax.images[0].get_array().filled(np.nan))
    assert (shown[:, 2] > high).all() and shown[1, 4] < low and np.isnan(shown[2, 5])
    np.testing.assert_array_equal(shown[:, :2], decibels[:, :2])
    ax.figure.canvas.draw()
    page = ax.figure.bbox
    for label in (*ax.get_yticklabels(), *ax.get_xticklabels(), ax.title, ax.xaxis.label):
        box = label.get_window_extent()
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, label


@pytest.mark.long
def test_a_heat_map(agg: None) -> None:
    x, w = GroupedTensor(jnp.ones((8, 16)), jnp.array([3, 5], jnp.int32)), jnp.ones((2, 16, 4)) / 3
    table = error_table(x, w, ["tensorwise", "rowwise"])
    ax = table.plot("wgrad")
    assert [t.get_text() for t in ax.get_yticklabels()] == ["tensorwise", "rowwise"]
    np.testing.assert_array_equal(ax.images[0].get_array(), table.group_sqnr[:, 2])
    assert table.plot(ax=ax) is ax
    with pytest.raises(ValueError, match="'fgrad' is not a product"):
        table.plot("fgrad")


@pytest.mark.long
def test_a_heat_map_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    x, w = GroupedTensor(jnp.ones((8, 16)), jnp.array([3, 5], jnp.int32)), jnp.ones((2, 16, 4))
    with pytest.raises(ImportError, match="pip install matplotlib"):
        error_table(x, w, "rowwise").plot()


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
    with jax.numpy_dtype_promotion("standard"):  # as optax needs
        norm = optax.tree.norm(grads)
        np.testing.assert_allclose(norm, np.linalg.norm(np.asarray(grads["w"], np.float64)), rtol=1e-6)
        for make in (
            optax.adamw,
            optax.sgd,
            lambda rate: optax.chain(optax.clip_by_global_norm(0.1), optax.lion(rate)),
        ):
            optimiser = make(1e-2)
            kept = eqx.filter(params, eqx.is_inexact_array)
            updates, _ = optimiser.update(grads, optimiser.init(kept), kept)
            stepped = eqx.apply_updates(params, updates)
            assert not np.array_equal(stepped["w"], W)
            np.testing.assert_array_equal(stepped["recipe"].history, np.zeros((3, 2)))
            # Without a filter it fails.
            with pytest.raises((TypeError, NotImplementedError)):
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
    nothing = jax.tree.map(jnp.add, grads, grads)
    assert nothing["recipe"].state.leaf is None


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


X = GroupedTensor(jax.random.normal(jax.random.key(0), (8, 64)), jnp.array([3, 5], jnp.int32))
W = jax.random.normal(jax.random.key(1), (2, 64, 16))
ROW = (Cast(E4M3, "row"), Cast(E4M3, "row"))
ONE = (Cast(E4M3), Cast(E4M3))
TILES = TpuConfig(m=8, k=64, n=128, interpret=True)  # too low for 8 bits


def product(w: Array) -> Array:
    return matmul(X, w, recipe=Recipe.preset("rowwise", save="operands")).data


def over_two_devices(check_vma: bool, by_device: bool = False) -> Any:
    """A loss of a recipe whose product is sharded over two devices, and whose history is shared or not."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    def local(recipe: Recipe) -> Array:
        if by_device:
            recipe = jax.tree.map(lambda h: h[0], recipe)
            return jax.lax.psum(matmul(X, W, recipe=recipe).data.sum(), "d")
        factor = 1 + jax.lax.axis_index("d").astype(jnp.float32)
        return jax.lax.psum(matmul(X * factor, W, recipe=recipe).data.sum(), "d")

    return jax.shard_map(local, mesh=mesh, in_specs=P("d") if by_device else P(), out_specs=P(), check_vma=check_vma)


def test_histories_on_several_devices() -> None:
    """The largest value of all devices where they share the history; each its own where they don't."""
    largest = np.array([np.abs(X.data).max(), np.abs(W).max(), 1.0])
    step = jax.jit(jax.grad(over_two_devices(True)))
    shared = step(Recipe.preset("delayed", length=2).unsealed())
    np.testing.assert_allclose(shared.history[:, 0], largest * [2, 1, 1], rtol=1e-6)
    again = step(shared)
    np.testing.assert_allclose(again.history[:, 1], shared.history[:, 0])
    own = jax.tree.map(lambda h: jnp.stack([h, h]), Recipe.preset("delayed", length=2))
    own = jax.jit(jax.grad(over_two_devices(True, True)))(own.unsealed())
    np.testing.assert_allclose(own.history[:, :, 0], [largest] * 2, rtol=1e-6)


Use = tuple[float, float]  # of a product: the factor of its rows, and its result's cotangent
Loss = Callable[[Recipe, Any], Array]


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


KINDS = ["twice", "jit", "checkpoint", "checkpoint of a closure", "cond", "carry", "scan", "devices", "map", "vmap"]


def test_one_history_of_many_products() -> None:
    """Its next values are the largest of all products, not their sum, with and without `jit`."""
    check_program(0, ["twice", "scan"], jit=False)
    check_program(1, ["twice", "devices", "carry"])


@pytest.mark.long
def test_one_history_of_any_products() -> None:
    """The same for random nestings of loops, maps, branches, devices and rematerialised calls."""
    for seed in range(16):
        check_program(seed, np.random.default_rng(seed).permutation(KINDS)[:3].tolist())


def check_program(seed: int, kinds: Sequence[str], jit: bool = True) -> None:
    rng = np.random.default_rng(seed)
    loss, uses = program(rng, kinds)
    past = rng.uniform(1, 2, (3, 3)).astype(np.float32)
    recipe = Recipe.preset("delayed", length=3)
    recipe = Recipe(recipe.forward, recipe.dgrad, recipe.wgrad, jnp.asarray(past))
    gradient = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
    following = gradient(recipe.unsealed(), jnp.float32(1)).history
    (a, c), w = np.max(uses, axis=0), np.abs(W).max()
    np.testing.assert_allclose(following[:, 0], [np.abs(X.data).max() * a, w, c], rtol=1e-5, err_msg=str(kinds))
    np.testing.assert_array_equal(following[:, 1:], past[:, :-1])


@pytest.mark.long
def test_a_history_over_microbatches() -> None:
    """Sixteen steps of four microbatches end with the largest values, and with about the unquantised gradient."""
    x, sizes = jax.random.normal(jax.random.key(0), (4, 32, 64)), jnp.array([10, 0, 22], jnp.int32)
    w, recipe = jax.random.normal(jax.random.key(1), (3, 64, 16)) / 8, Recipe.preset("delayed")

    def loss(w: Array, recipe: Recipe | None) -> Array:
        def add(total: Array, x: Array) -> tuple[Array, None]:
            return total + jnp.mean(matmul(GroupedTensor(x, sizes), w, recipe=recipe).data ** 2), None

        return jax.lax.scan(add, jnp.zeros(()), x)[0]

    step, dw = jax.jit(jax.grad(loss, argnums=(0, 1))), w
    for _ in range(16):
        dw, recipe = step(w, recipe.unsealed())
        recipe = recipe.sealed()
    np.testing.assert_allclose(recipe.history[0], np.abs(x).max(), rtol=1e-6)
    want = jax.jit(jax.grad(loss))(w, None)
    assert np.linalg.norm(dw - want) < 0.1 * np.linalg.norm(want)


@pytest.mark.long
def test_integers_and_delayed_scaling() -> None:
    """What isn't finite is lost in integers, and says so; it never enters the history."""
    recipe = Recipe((Cast(jnp.int8),) * 2, (Cast(jnp.int8),) * 2, (Cast(jnp.int8),) * 2, jnp.zeros((3, 2)))
    for bad in (jnp.nan, jnp.inf):
        x = X.with_data(X.data.at[0, 0].set(bad))
        assert np.isnan(matmul(x, W, recipe=recipe).data).all()
        step = jax.grad(lambda r, x=x: matmul(x, W, recipe=r).data.sum())(recipe.unsealed())
        assert np.isfinite(step.history).all()
        dw = jax.grad(lambda w, bad=bad: bad * matmul(X, w, recipe=recipe).data.sum())(W)
        assert np.isnan(dw).all()


def test_power_of_two_scales_of_delayed_scaling() -> None:
    """float8_e8m0fnu scales are rounded up with a history as without: nothing saturates."""
    how = (Cast(E4M3, Scaling(None, jnp.float8_e8m0fnu)),) * 2
    x, w = GroupedTensor(jnp.full((8, 6), 448 * 1.2), X.first_dims), jnp.ones((2, 6, 5))
    for history in (None, jnp.zeros((3, 4))):
        assert float(matmul(x, w, recipe=Recipe(how, how, how, history)).data[0, 0]) == 512 * 6


def test_second_derivatives_by_the_recipe() -> None:
    """Only the product that the loss was made of moves the history on, not the products of its derivatives."""

    def penalty(recipe: Recipe) -> Array:
        return jnp.sum(jax.grad(lambda d: jnp.sum(matmul(X.with_data(d), W, recipe=recipe).data ** 2))(X.data) ** 2)

    history = jax.jit(jax.grad(penalty))(Recipe.preset("delayed", length=2, save="operands").unsealed()).history
    np.testing.assert_allclose(history[:2, 0], [np.abs(X.data).max(), np.abs(W).max()], rtol=1e-6)


def example() -> Any:
    folder = str(Path(__file__).parent.parent.parent / "examples")
    sys.path.insert(0, folder)
    try:
        import fp8_recipes  # pyright: ignore[reportMissingImports]

        return fp8_recipes
    finally:
        sys.path.remove(folder)


def trained(names: tuple[str, ...], steps: int) -> dict[str, float]:
    fp8_recipes = example()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        text, held_out, vocabulary = fp8_recipes.read_text()
        models = {name: fp8_recipes.train(name, steps, jnp.asarray(text, jnp.int32), vocabulary) for name in names}
        return {name: fp8_recipes.held_out_loss(model, held_out)[0] for name, model in models.items()}


@pytest.mark.long
def test_the_example_trains() -> None:
    """The recipes' history moves on, and the loss falls as it does in bfloat16."""
    losses = trained(("bfloat16", "delayed"), 20)
    assert losses["bfloat16"] < 4.4
    assert losses["delayed"] == pytest.approx(losses["bfloat16"], rel=0.02)


@pytest.mark.slow
def test_held_out_losses() -> None:
    """Every recipe's loss is within 2 % of bfloat16's."""
    losses = trained(("bfloat16", *PRESETS), 400)
    assert losses["bfloat16"] < 2.2
    for name in PRESETS:
        assert losses[name] == pytest.approx(losses["bfloat16"], rel=0.02)


def test_recipes_are_pytrees() -> None:
    """Presets have no leaves but delayed scaling's history; static parts compare and hash."""
    for name in PRESETS:
        recipe = Recipe.preset(name)
        assert len(jax.tree.leaves(recipe)) == (name == "delayed")
        assert jax.tree.structure(recipe) == jax.tree.structure(Recipe.preset(name))
        assert eqx.tree_equal(Recipe.of(recipe), recipe)
        hash(recipe.forward)
