"""Products that read rows where they are, through a route's order: the numbers of `dispatch`, without its copy."""

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from ragged.backends import cache
from ragged.backends.gpu import call as triton_call
from ragged.primitive.primitive import ragged_matmul_p
from ragged.tuning import GpuConfig
from ragged.tuning.products import BoundProduct, products_of
from tests import gpu, ran
from tests.everywhere import everywhere
from tests.moe import moe as layer_of

G, D, N = 4, 24, 20
IDS = {  # of one shape, so that programs are compiled once
    "top 2": [[2, 0], [0, 1], [1, 2], [2, 0], [3, 1], [0, 3]],
    "an empty group": [[0, 3], [3, 0], [0, 0], [1, 3], [0, 1], [3, 3]],
    "some to no group": [[2, -1], [9, 0], [4, 4], [0, 2], [7, -5], [3, 3]],
    "all to no group": [[-1, 4], [7, 9], [4, 4], [-2, 5], [-1, -1], [8, 4]],
}
INTERPRETED: dict[str, Any] = {"backend": GpuConfig(interpret=True)}
Rows = Callable[[ragged.Route, Array], Any]
WAYS: tuple[Rows, Rows] = (ragged.Route.gathered, ragged.Route.dispatch)


def random(shape: Any, seed: int, dtype: Any = jnp.float32) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def operands(name: str, dtype: Any = jnp.float32, d: int = D, n: int = N) -> tuple[ragged.Route, Array, Array, Array]:
    """A route; tokens `[tokens, d]`, NaN where they go nowhere; weights; and a cotangent, NaN in the tail."""
    ids = jnp.asarray(np.asarray(IDS[name], np.int32))
    route = ragged.route(ids, G)
    sound = ((ids >= 0) & (ids < G)).reshape(ids.shape[0], -1)
    x = jnp.where(sound.any(1)[:, None], random((ids.shape[0], d), 0, dtype), jnp.nan)
    ct = random((ids.size, n), 2, dtype).at[int(sound.sum()) :].set(jnp.nan)
    return route, x, random((G, d, n), 1, dtype), ct


def oracle(route: ragged.Route, x: Any, w: Any, ct: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The product of float64 and its two cotangents, row by row."""
    x, w, ct = (np.asarray(each, np.float64) for each in (x, w, ct))
    out, dx, dw = np.zeros(ct.shape), np.zeros(x.shape), np.zeros(w.shape)
    row = 0
    for group, size in enumerate(np.asarray(route.first_dims)):
        for _ in range(size):
            token = int(route.order[row]) // route.top_k
            out[row] = x[token] @ w[group]
            dx[token] += w[group] @ ct[row]
            dw[group] += np.outer(x[token], ct[row])
            row += 1
    return out, dx, dw


def both(
    way: Rows, route: ragged.Route, x: Array, w: Array, ct: Array, **options: Any
) -> tuple[Array, tuple[Array, Array]]:
    out, pull = jax.vjp(lambda x, w: ragged.matmul(way(route, x), w, **options).data, x, w)
    return out, pull(ct)


def assert_same(got: Any, want: Any) -> None:
    """Bit for bit."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(g, np.float64), np.asarray(w, np.float64))
        assert g.dtype == w.dtype


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """Which Triton kernels ran, and whether each read rows by their index, out of what isn't copied."""
    gpu.needs_triton()
    itself, found = triton_call.call, list[tuple[str, bool]]()

    def noted(arrays: dict[str, Any], out: Any, static: Any, **options: Any) -> Array:
        by_index = arrays["a_source"] is not None
        name = options["name"].rpartition("_")[0]

        def announce(result: Any) -> Any:
            found.append((name, by_index))
            return result

        assert not by_index or static["A"].source_rows == arrays["a"].shape[-2] <= arrays["a_source"].shape[-1]
        result = itself(arrays, out, static, **options)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result)
        return jax.pure_callback(announce, like, result)

    monkeypatch.setattr(triton_call, "call", noted)
    jax.clear_caches()
    yield found
    jax.clear_caches()


def test_equals_dispatch_and_the_oracle() -> None:
    """Values and gradients; a NaN of no group, and in the tail of a cotangent, reaches nothing."""
    compiled = [jax.jit(partial(both, way)) for way in WAYS]
    for name in IDS:
        case = operands(name)
        got, want = (function(*case) for function in compiled)
        assert_same(got, want)
        for g, w in zip((got[0], *got[1]), oracle(*case), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["some to no group", *(pytest.param(name, marks=pytest.mark.long) for name in ("top 2", "an empty group"))]
)
@pytest.mark.parametrize("dtype, d", [(jnp.float32, D), (jnp.bfloat16, 40), (jnp.float32, 7)])
def test_the_gpu_kernel_reads_by_index(name: str, dtype: Any, d: int, kernels: list[tuple[str, bool]]) -> None:
    """The product and its derivative by the weights; the one by the rows has a copy of cotangents, as ever.

    Rows of no group have an index past the last token, where nothing may be read, and share a tile with other rows.
    """
    case = operands(name, dtype, d)
    got = both(WAYS[0], *case, **INTERPRETED)
    ran = sorted(kernels)
    assert ran == [("grouped_matmul", True), ("grouped_matmul_transposed", False), ("transposed_grouped_matmul", True)]
    assert_same(got, both(WAYS[1], *case, **INTERPRETED))
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for g, w in zip((got[0], *got[1]), oracle(*case), strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), w, rtol=tolerance, atol=tolerance)


@pytest.mark.long
def test_the_gpu_kernel_with_options(kernels: list[tuple[str, bool]]) -> None:
    """Groups that others hold, what is added, a bias, an activation, tiles smaller than a group."""
    route, x, w, ct = operands("top 2")
    options = {"group_offset": jnp.int32(1), "existing_out": ct, "backend": everywhere("triton_gpu", 16, 16, 16)}
    options |= {"bias": w[1:3, 0], "activation": "silu"}
    got, want = (ragged.matmul(way(route, jnp.tile(x, (1, 2))), jnp.tile(w[1:3], (1, 2, 1)), **options) for way in WAYS)
    assert [by_index for _, by_index in kernels] == [True, False]
    assert_same(got, want)


@pytest.mark.long
def test_a_nan_stays_with_its_rows(kernels: list[tuple[str, bool]]) -> None:
    route, x, w, ct = operands("top 2")
    for options in ({}, INTERPRETED):
        out, (dx, dw) = both(WAYS[0], route, x.at[1].set(jnp.nan), w, ct, **options)  # of the groups 0 and 1
        rows = np.asarray(route.place[1])
        assert np.isnan(out).all(1).nonzero()[0].tolist() == sorted(rows.tolist())
        assert np.isnan(dw).any((1, 2)).tolist() == [True, True, False, False]
        assert np.isfinite(dx).all()
    assert any(by_index for _, by_index in kernels)


@pytest.mark.long
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)])
def test_vmap(axes: tuple[Any, ...]) -> None:
    """Any of tokens, weights and route."""
    ids = jnp.asarray([IDS["top 2"], IDS["top 2"][::-1]], jnp.int32)
    batches = random((2, 6, D), 0), random((2, G, D, N), 1), ids

    def gradients(way: Rows, x: Array, w: Array, ids: Array) -> Any:
        def loss(x: Array, w: Array) -> Array:
            return jnp.sum(jnp.sin(ragged.matmul(way(ragged.route(ids, G), x), w).data))

        return jax.value_and_grad(loss, (0, 1))(x, w)

    args = [b if axis == 0 else b[0] for b, axis in zip(batches, axes, strict=True)]
    got, want = (jax.vmap(partial(gradients, way), axes)(*args) for way in WAYS)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6)


def test_gradient_by_tokens_that_mapped_routes_share() -> None:
    """The derivative by shared tokens of mapped gradients by the weights is summed over all routes of the map."""
    ids = jnp.asarray([IDS["top 2"], IDS["top 2"][::-1]], jnp.int32)
    x, w, dw, ct = random((6, 3), 0), random((G, 3, 2), 1), random((2, G, 3, 2), 2), random((2, 12, 2), 3)

    def loss(x: Array) -> Array:
        def by_weights(ids: Array, ct: Array) -> Array:
            return jax.grad(lambda w: jnp.sum(ragged.matmul(ragged.route(ids, G).gathered(x), w).data * ct))(w)

        return jnp.sum(jax.vmap(by_weights)(ids, ct) * dw)

    want = sum(oracle(ragged.route(each, G), x, *others)[1] for each, *others in zip(ids, dw, ct, strict=True))
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_vmap_of_the_gpu_kernel(kernels: list[tuple[str, bool]]) -> None:
    """A batch of routes is a stride; a wgrad that is summed over the batch reads each element's own rows."""
    ids = jnp.asarray([IDS["top 2"], IDS["top 2"][::-1]], jnp.int32)
    x, w = random((2, 6, D), 0), random((G, D, N), 1)

    def gradients(way: Rows) -> Any:
        def loss(x: Array, w: Array) -> Array:
            def one(x: Array, ids: Array) -> Array:
                return ragged.matmul(way(ragged.route(ids, G), x), w, **INTERPRETED).data

            return jnp.sum(jnp.sin(jax.vmap(one)(x, ids)))

        return jax.value_and_grad(loss, (0, 1))(x, w)

    got = gradients(WAYS[0])
    assert sorted(by_index for _, by_index in kernels) == [False, True, True]
    assert_same(got, gradients(WAYS[1]))


@pytest.mark.long
def test_forward_mode_second_order_scan_and_remat() -> None:
    route, x, w, _ = operands("some to no group")
    x = jnp.nan_to_num(x)
    dx, dw = random(x.shape, 5), random(w.shape, 6)

    def loss(way: Rows, x: Array, w: Array) -> Array:
        return jnp.sum(jnp.sin(ragged.matmul(way(route, x), w).data))

    def twice(way: Rows) -> Any:
        gradient = jax.grad(partial(loss, way), (0, 1))
        return jax.jvp(gradient, (x, w), (dx, dw)), jax.grad(lambda x: jnp.sum(gradient(x, w)[1] * dw))(x)

    def scanned(way: Rows) -> Any:
        step = jax.checkpoint(lambda total, w: (total + loss(way, x, w) * total, None))
        return jax.grad(lambda w: jax.lax.scan(step, jnp.ones(()), jnp.stack([w, w[::-1]]))[0])(w)

    def transposed(way: Rows) -> Any:
        def linear(x: Array) -> Array:
            return ragged.matmul(way(route, x), w).data

        return jax.linear_transpose(linear, x)(linear(dx))

    for function in (twice, scanned, transposed):
        got, want = (jax.jit(partial(function, way))() for way in WAYS)
        for g, w_ in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w_, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma: bool) -> None:
    """Tokens that all devices have, and each device's own routes: the gradient of the tokens is summed over them."""
    mesh = Mesh(np.array(jax.devices()[:2]), "e")
    _, x, w, _ = operands("top 2")
    ids = jnp.asarray([IDS["top 2"], IDS["top 2"][::-1]], jnp.int32)

    def gradients(way: Rows) -> Any:
        def local(x: Array, w: Array, ids: Array) -> Array:
            y = ragged.matmul(way(ragged.route(ids[0], G), x), w[0]).data
            return jax.lax.psum(jnp.sum(jnp.sin(y)), "e")

        specs = P(), P("e"), P("e")
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        return jax.jit(jax.value_and_grad(mapped, (0, 1)))(x, jnp.stack([w, -w]), ids)

    assert_same(gradients(WAYS[0]), gradients(WAYS[1]))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_sharded_operands_are_dispatched(kind: AxisType) -> None:
    """What XLA or `matmul` shares among devices is a product of rows that are there."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    route, x, w, _ = operands("top 2")
    assert _indexed(lambda w: ragged.matmul(route.gathered(x), w).data, w) == [True]
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, P(None, None, "d")))
        assert _indexed(lambda w: ragged.matmul(route.gathered(x), w).data, w) == [False]


@pytest.mark.long
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_sharded_operands(kind: AxisType) -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    route, x, w, ct = operands("top 2")
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, P(None, None, "d")))
        ct = jax.device_put(ct, NamedSharding(mesh, P(None, "d")))
        got, want = (jax.jit(partial(both, way))(route, x, w, ct) for way in WAYS)
    assert_same(got, want)


def _indexed(function: Callable[..., Array], *args: Any) -> list[bool]:
    """Which of a function's products have an index."""
    found = products_of(function, args, False)
    return [each.params["tree"].unflatten(each.invars).gather is not None for each, _ in found]


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "delayed"])
@pytest.mark.parametrize("name", ["top 2", "some to no group"])
def test_recipes(recipe: str, name: str) -> None:
    """The same numbers, and the same next history; whatever tokens hold that go nowhere."""
    route, x, w, ct = operands(name, d=64, n=32)
    x = jnp.where(jnp.isnan(x), 1e3, x)
    given = ragged.Recipe.preset(recipe).unsealed()

    def gradients(way: Rows) -> Any:
        def loss(x: Array, w: Array, recipe: ragged.Recipe) -> Array:
            return jnp.sum(ragged.matmul(way(route, x), w, recipe=recipe).data * jnp.nan_to_num(ct))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, w, given)

    assert_same(gradients(WAYS[0]), gradients(WAYS[1]))


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_a_token_is_quantised_once(recipe: str) -> None:
    """And not for each of its groups."""
    route, x, w, _ = operands("top 2", d=64, n=32)
    ((product, _),) = products_of(lambda x, w: ragged.matmul(route.gathered(x), w, recipe=recipe).data, (x, w), False)
    data = product.params["tree"].unflatten(product.invars).lhs.data.aval
    assert data.shape == x.shape and data.dtype != x.dtype


def test_tokens_of_no_group_do_not_count_for_a_scale() -> None:
    """One scale for all tokens is found from the tokens that a group gets, however large the others are."""
    route, x, w, ct = operands("some to no group", d=8, n=4)
    x = jnp.where(jnp.isnan(x), 1e6, x)
    out = jax.jit(lambda x, w: ragged.matmul(route.gathered(x), w, recipe="tensorwise").data)(x, w)
    want = oracle(route, x, w, ct)[0]
    np.testing.assert_allclose(out, want, atol=0.1 * np.abs(want).max())


def test_gathered_rows_with_a_scale_each_are_dispatched_for_a_derivative() -> None:
    """The derivative by the weights sums over rows, along which it needs scales of its own: it reads copied rows."""
    route, x, w, _ = operands("top 2", d=8, n=4)

    def loss(w: Array) -> Array:
        return jnp.sum(ragged.matmul(route.gathered(x), w, recipe="rowwise").data)

    assert _indexed(jax.grad(loss), w) == [True, False, False]  # the product, and the derivatives by rows and weights


@pytest.mark.long
def test_recipe_on_the_gpu_kernel(kernels: list[tuple[str, bool]]) -> None:
    route, x, w, ct = operands("some to no group", d=64, n=32)
    with ran.interpreted("triton_gpu"):  # on a GPU that has fp8
        got, want = (both(way, route, x, w, ct, recipe="blockwise") for way in WAYS)
    # Scales of a wgrad are those of a group's rows, for which they are copied.
    assert [name for name, by_index in kernels if by_index] == ["grouped_matmul_transposed"]
    assert_same(got, want)


@pytest.mark.long
@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_gated(recipe: str | None, kernels: list[tuple[str, bool]]) -> None:
    """One kernel reads the rows for both products; their cotangents are added before a token's are summed."""
    route, x, w, ct = operands("some to no group", jnp.bfloat16, d=64, n=32)

    def gradients(way: Rows) -> Any:
        def hidden(x: Array, gate: Array, up: Array) -> Array:
            return ragged.gated_matmul(way(route, x), gate, up, recipe=recipe).data

        out, pull = jax.vjp(hidden, x, w, w[:, ::-1])
        return out, pull(ct)

    with ran.interpreted("triton_gpu"):
        got, want = (gradients(way) for way in WAYS)
    assert sum(by_index for _, by_index in kernels) == (3 if recipe is None else 1)
    assert_same(got, want)
    assert_same(*(jax.jit(partial(gradients, way))() for way in WAYS))


def test_experts_read_rows_in_place() -> None:
    """`nn.MoE`: every product of tokens has an index, and one in the derivative by each of their weights."""
    moe = layer_of(8, 16, G, 2, key=jax.random.key(0))
    x = random((6, 8), 0)
    # Forward, one product of both, and by the weights of both; not the second layer's three, and two by the rows.
    read = _indexed(jax.grad(lambda x, moe: jnp.sum(moe(x)[0]), (0, 1), allow_int=True), x, moe)
    assert read.count(True) == 3, read


@pytest.mark.long
def test_what_is_dispatched_first() -> None:
    """A matrix that all groups share; and columns: a product that isn't of groups' matrices."""
    route, x, w, _ = operands("top 2")
    for rhs in (w[0], ragged.GroupedTensor(random((D, 9), 3), last_dims=jnp.array([2, 0, 4, 3], jnp.int32))):
        got, want = (ragged.matmul(way(route, x), rhs) for way in WAYS)
        assert_same(got.data, want.data)
    assert_same(route.gathered(x).dispatch(), route.dispatch(x))
    assert ragged.error_table(route.gathered(x), w, ["rowwise"]).sqnr.shape == (1, 3)


@pytest.mark.long
def test_integers_and_eight_bits() -> None:
    route, x, w, _ = operands("some to no group")
    x, w = jnp.nan_to_num(x), w * 4
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        got, want = (ragged.matmul(way(route, x.astype(dtype)), w.astype(dtype)) for way in WAYS)
        assert_same(got, want)
    with pytest.raises(TypeError, match="with respect to a quantised operand"):
        eight = w.astype(jnp.float8_e4m3fn)
        jax.grad(lambda x: jnp.sum(ragged.matmul(route.gathered(x), eight).data.astype(jnp.float32)))(
            x.astype(jnp.float8_e4m3fn)
        )


def test_explain_and_tuning_know_gathered_rows() -> None:
    """What runs, with what configuration: a key of its own, and arrays to measure it with."""
    route, x, w, _ = operands("top 2")
    gathered, dispatched = (ragged.explain(way(route, x), w) for way in WAYS)
    assert (gathered.layout, gathered.derivatives, gathered.num_groups) == ("forward", ("forward", "wgrad"), G)
    of_copies = {(p.product, p.platform): (p.runs, p.visits) for p in dispatched.plans}
    assert {(p.product, p.platform): (p.runs, p.visits) for p in gathered.plans} == of_copies
    keys = set[str]()
    for way in WAYS:
        ((equation, sizes),) = products_of(lambda x, way=way: ragged.matmul(way(route, x), w).data, (x,))
        bound = BoundProduct(equation)
        keys.add(cache.product_key(bound.call, bound.operands, "triton_gpu"))
        assert bound.capacity("m") == route.order.shape[0]
        assert sizes is not None
        arrays = bound.arrays(sizes, 0)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), arrays) == [(a.shape, a.dtype) for a in bound.avals]
        assert jnp.isfinite(ragged_matmul_p.bind(*arrays, tree=bound.tree, call=bound.call)).all()
    assert len(keys) == 2


def with_one_row_each(seed: int) -> tuple[ragged.Route, np.ndarray, Array]:
    """A route of one row for each of 7 tokens, its ids, and tokens, NaN where they go nowhere."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, G + 1, 7).astype(np.int32)
    x = np.where(((ids >= 0) & (ids < G))[:, None], rng.uniform(1, 2, (7, 3)), np.nan)
    return ragged.route(jnp.asarray(ids), G), ids, jnp.asarray(x, jnp.float32)


def rows_of(route: ragged.Route, x: Any) -> np.ndarray:
    """`x[token]` of each row, in float64, without the tail."""
    held = int(np.asarray(route.first_dims).sum())
    return np.asarray(x, np.float64)[np.asarray(route.order)[:held] // route.top_k]


PER_ROW, PER_GROUP, PER_COLUMN = (np.arange(1, n + 1, dtype=np.float32) / 4 for n in (7, G, 3))
OPERATORS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {  # of rows, and of values a row, a group and a column
    "numbers": lambda x, *_: 2 * x - 1.5,
    "reflected": lambda x, *_: 3 / (1 - x) ** 2,
    "itself": lambda x, *_: x * x,
    "a comparison": lambda x, *_: x > 1.5,
    "equality": lambda x, *_: x == x,
    "unary": lambda x, *_: abs(-x),
    "each row": lambda x, row, group, column: x * row,
    "each row, reflected": lambda x, row, group, column: row / x,
    "each group": lambda x, row, group, column: group - x,
    "each column": lambda x, row, group, column: x * column + column,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_stay_gathered(name: str) -> None:
    """Of one row each: the rows of NumPy, which has them copied; zeros in the tail, and no NaN of no group."""

    @jax.jit
    def run(route: ragged.Route, x: Array) -> Any:
        wrapped = (ragged.per_row(jnp.asarray(PER_ROW)), ragged.per_group(jnp.asarray(PER_GROUP)))
        return OPERATORS[name](route.gathered(x), *wrapped, jnp.asarray(PER_COLUMN))

    for seed in range(20):
        route, ids, x = with_one_row_each(seed)
        got = run(route, x)
        assert isinstance(got, ragged.Gathered)
        sound = np.sort(ids[(ids >= 0) & (ids < G)])
        values = (v.astype(np.float64) for v in (PER_ROW[: sound.size, None], PER_GROUP[sound][:, None], PER_COLUMN))
        want = OPERATORS[name](rows_of(route, x), *values)
        out = got.dispatch()
        assert (out.dtype == bool) == (want.dtype == bool)
        np.testing.assert_allclose(out.data[: sound.size], want, rtol=1e-6)
        assert not out.data[sound.size :].any()


def test_gradients_of_operators() -> None:
    """By tokens and by what they are multiplied with, as of dispatched rows; nothing of a token of no group."""

    def loss(way: Rows, route: ragged.Route, x: Array, row: Array, group: Array) -> Array:
        y = (way(route, x) * ragged.per_row(row) + ragged.per_group(group)).map(jnp.sqrt)
        return jnp.sum(jnp.sin(ragged.matmul(y, jnp.ones((G, 3, 2))).data))

    gradients = [jax.jit(jax.grad(partial(loss, way), (1, 2, 3))) for way in WAYS]
    for seed in range(20):
        route, _, x = with_one_row_each(seed)
        got, want = (gradient(route, x, jnp.asarray(PER_ROW), jnp.asarray(PER_GROUP)) for gradient in gradients)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6)


def test_maps_of_tokens() -> None:
    """Of two rows a token: another width and dtype, rowwise functions, what else they are called with."""
    route, x, w, _ = operands("some to no group")
    gathered = route.gathered(x)
    got = gathered.map(lambda rows, column, two: two * jax.nn.softmax((rows * column) @ w[0]), jnp.full(D, 0.5), 2)
    z = np.exp(np.asarray(x, np.float64) / 2 @ np.asarray(w[0], np.float64))
    want = rows_of(route, 2 * z / z.sum(1, keepdims=True))
    assert got.shape == (12, N)
    np.testing.assert_allclose(got.dispatch().data[: len(want)], want, rtol=1e-5)
    assert gathered.astype(jnp.bfloat16).dispatch().dtype == jnp.bfloat16
    np.testing.assert_array_equal((gathered @ w).data, (route.dispatch(x) @ w).data)


def test_what_is_no_gather_names_dispatch() -> None:
    """Each error's code runs, and does what was meant."""
    route, x, w, _ = operands("top 2")
    gathered, copy = route.gathered(x), route.dispatch(x)
    v = ragged.per_row(jnp.arange(12.0))
    names = {"x": gathered, "fn": jnp.add, "jax": jax, "w": w}
    calls: list[tuple[Callable[[Any], Any], Any]] = [
        (lambda x: x * v, v),
        (lambda x: v * x, v),
        (lambda x: x.map(jnp.add, v), v),
        (lambda x: x + ragged.per_group(jnp.arange(4.0)), ragged.per_group(jnp.arange(4.0))),
        (lambda x: x - copy, copy),
        (lambda x: copy / x, copy),
    ]
    for call, other in calls:
        with pytest.raises(TypeError, match=r"Copy the rows first: `.*x\.dispatch\(\).*`") as caught:
            call(gathered)
        code = str(caught.value).split("`")[-2]
        np.testing.assert_array_equal(eval(code, names | {"other": other}).data, call(copy).data)
    whole = jnp.arange(12.0 * D).reshape(12, D)
    with pytest.raises(TypeError, match=r"`x\.dispatch\(\)\.map\(lambda data: other / data\)`"):
        operator.truediv(whole, gathered)
    with pytest.raises(TypeError, match=r"`x\.dispatch\(\) \* other\.dispatch\(\)`"):
        operator.mul(gathered, route.gathered(x))
    with pytest.raises(TypeError, match=r"`x\.map\(fn, other\.dispatch\(\)\)`"):
        copy.map(jnp.add, gathered)
    with pytest.raises(ValueError, match=r"must have shape \(12,\)"):
        operator.mul(gathered, ragged.per_row(jnp.ones(11)))
    refused = (
        *(partial(f, gathered) for f in (jnp.exp, jax.nn.softmax, jnp.sum, bool, len, list, np.asarray)),
        lambda: gathered[0],
        lambda: 3 in gathered,
    )
    for call in refused:
        with pytest.raises(TypeError, match=r"`x\.dispatch\(\)`"):
            call()
    for name in ("sum", "mT", "softmax", "to_list", "offsets"):
        assert not hasattr(gathered, name)
        with pytest.raises(AttributeError, match=r"`x\.dispatch\(\)`"):
            getattr(gathered, name)
    with pytest.raises(AttributeError, match="no attribute 'place'"):
        operator.attrgetter("place")(gathered)
    with pytest.raises(TypeError, match=r"`rhs\.dispatch\(\)`"):
        ragged.matmul(w.mT, gathered)  # pyright: ignore[reportArgumentType]


@pytest.mark.long
def test_scaled_rows_are_read_by_index(kernels: list[tuple[str, bool]]) -> None:
    """A router's weight on the expert's input makes no copy."""
    route, _, x = with_one_row_each(0)
    scaled = route.gathered(x[:, :2]) * ragged.per_row(jnp.asarray(PER_ROW))
    ragged.matmul(scaled, jnp.ones((G, 2, 2)), **INTERPRETED)
    assert [by_index for _, by_index in kernels] == [True]


def test_errors() -> None:
    route, x, w, _ = operands("top 2")
    with pytest.raises(ValueError, match=r"Route.gathered\(x\)`: `x` must be \[6, d\], one row per token"):
        route.gathered(x[:4])
    with pytest.raises(TypeError, match=r"Route.gathered\(x\)`: `x` is not an array"):
        route.gathered([1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"last dim of `lhs` is 24 but the (.|\n)*f32\[12,24\]"):
        ragged.matmul(route.gathered(x), w.mT)
    with pytest.raises(TypeError, match="`rhs` is not an array"):
        ragged.matmul(w.mT, route.gathered(x))  # pyright: ignore[reportArgumentType]


Avals = tuple[jax.ShapeDtypeStruct, ...]


def trained(way: Rows, x: Array, w: Array, ids: Array, ct: Array) -> Any:
    return both(way, ragged.route(ids, w.shape[0]), x, w, ct)


def avals(dtype: Any, tokens: int = 4096, groups: int = 8, d: int = 2048, n: int = 2048) -> Avals:
    shapes = ((tokens, d), dtype), ((groups, d, n), dtype), ((tokens, 2), jnp.int32), ((2 * tokens, n), dtype)
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("chip", list(gpu.ARCHITECTURES))
@pytest.mark.parametrize("shape", [{}, {"groups": 64, "tokens": 512}, {"d": 1000, "n": 1000}], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_compiled(chip: str, shape: dict[str, int], dtype: Any) -> None:
    """No spills; rows come by `cp.async`, on Hopper beside weights by TMA, into its own tensor cores."""
    found = gpu.compile_for(chip, partial(trained, WAYS[0]), *avals(dtype, **shape))
    assert len(found) == 3
    for kernel in found:
        assert kernel.spill_bytes == 0
    for kernel in found[:2] if chip != "NVIDIA B200" else ():
        assert kernel.sass_counts["LDGSTS"]
        assert chip == "NVIDIA A100" or kernel.sass_counts["UTMALDG"]
    if chip == "NVIDIA H200" and not shape:
        assert all(kernel.sass_counts["HGMMA"] for kernel in found)


@pytest.mark.long
@pytest.mark.parametrize("scanned", [False, True])
def test_no_copy_in_memory_on_a_gpu(scanned: bool) -> None:
    """A product, and a training step of several layers in a loop, take less memory by the copies of their rows."""
    tokens, d, n, top_k, layers = 1024, 512, 128, 4, 3

    def step(way: Rows, x: Array, up: Array, down: Array, ids: Array) -> Any:
        route = ragged.route(ids, up.shape[1])

        def layer(x: Array, w: tuple[Array, Array]) -> tuple[Array, None]:
            hidden = ragged.matmul(way(route, x), w[0], activation="relu")
            return x + route.combine(ragged.matmul(hidden, w[1]), jnp.ones((tokens, top_k))), None

        def loss(x: Array, up: Array, down: Array) -> Array:
            return jnp.sum(jax.lax.scan(layer, x, (up, down))[0].astype(jnp.float32) ** 2)

        if not scanned:
            return ragged.matmul(way(route, x), up[0], activation="relu").data
        return jax.value_and_grad(loss, (0, 1, 2))(x, up, down)

    shapes = (tokens, d), (layers, 8, d, n), (layers, 8, n, d)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    given.append(jax.ShapeDtypeStruct((tokens, top_k), jnp.int32))
    compiled = [gpu.compile_whole(partial(step, way), *given) for way in WAYS]
    before, after = (c.memory_analysis().temp_size_in_bytes for c in compiled[::-1])
    assert before - after >= 0.9 * 2 * tokens * top_k * d, (before, after)
