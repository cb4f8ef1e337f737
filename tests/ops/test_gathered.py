"""Rows that products read through a route's order: operators, maps, recipes, and which products make no copy.

Values of products are in `tests/contract/test_epilogues.py`.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from ragged.tuning import GpuConfig
from tests import gpu
from tests.contract.launches import launches
from tests.moe import moe as layer_of

G, D, N = 4, 24, 20
IDS = [[2, -1], [9, 0], [4, 4], [0, 2], [7, -5], [3, 3]]
Rows = Callable[[ragged.Route, Array], Any]
WAYS: tuple[Rows, Rows] = (ragged.Route.gathered, ragged.Route.dispatch)


def operands(d: int = D, n: int = N, ids: Any = IDS) -> tuple[ragged.Route, Array, Array]:
    """A route; tokens `[tokens, d]`, NaN where they go nowhere; weights `[G, d, n]`."""
    rng, ids = np.random.default_rng(0), np.asarray(ids, np.int32)
    is_used = ((ids >= 0) & (ids < G)).reshape(len(ids), -1).any(1)[:, None]
    x = np.where(is_used, rng.standard_normal((len(ids), d)), np.nan).astype(np.float32)
    w = rng.standard_normal((G, d, n)).astype(np.float32)
    return ragged.route(jnp.asarray(ids), G), jnp.asarray(x), jnp.asarray(w)


def rows_of(route: ragged.Route, x: Any) -> np.ndarray:
    """`x[token]` of each row, in float64, without the tail."""
    held = int(np.asarray(route.first_dims).sum())
    return np.asarray(x, np.float64)[np.asarray(route.order)[:held] // route.top_k]


def gathers(function: Callable[..., Any], *args: Any) -> list[bool]:
    """Which products of a program for a GPU read rows by an index."""
    with launches() as ran, gpu.on("NVIDIA H200"):
        jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    return [" by index" in kernel for _, kernel in ran]


def assert_same(got: Any, want: Any) -> None:
    """Bit for bit."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype and np.asarray(g).tobytes() == np.asarray(w).tobytes()


@pytest.mark.long
def test_tokens_of_no_group_do_not_count_for_a_scale() -> None:
    """One scale for all tokens is found from the tokens that a group gets, however large the others are."""
    route, x, w = operands(8, 4)
    x = jnp.where(jnp.isnan(x), 1e6, x)
    got = ragged.matmul(route.gathered(x), w, recipe="tensorwise").data
    first = int(route.first_dims[0])
    want = rows_of(route, x)[:first] @ np.asarray(w[0], np.float64)
    np.testing.assert_allclose(got[:first], want, atol=0.1 * np.abs(want).max())


@pytest.mark.long
def test_which_products_make_no_copy() -> None:
    """Those of a product and of its derivative by the weights, which a recipe copies rows for if it needs other scales;
    also of rows that are multiplied by a router's weights."""
    gpu.needs_triton()
    route, x, w = operands(64, 32)

    def loss(x: Array, w: Array, **options: Any) -> Array:
        return jnp.sum(ragged.matmul(route.gathered(x), w, **options).data.astype(jnp.float32) ** 2)

    # The product, and the derivatives by rows and by weights.
    assert sorted(gathers(jax.grad(loss, (0, 1)), x, w)) == [False, True, True]
    assert sorted(gathers(jax.grad(partial(loss, recipe="rowwise"), (0, 1)), x, w)) == [False, False, True]
    one, _, _ = operands(ids=[0, 2, 7, 1, 1, 3])
    scaled = one.gathered(x[:, :24]) * ragged.per_row(jnp.arange(6.0))
    assert gathers(lambda w: (scaled @ w).data, w[:, :24]) == [True]


def test_two_batch_axes() -> None:
    """Of tokens and of where they go; a kernel reads the rows in place."""
    gpu.needs_triton()
    rng = np.random.default_rng(0)
    ids, x = rng.integers(0, G, (2, 3, 6, 2), np.int32), rng.standard_normal((2, 3, 6, 16)).astype(np.float32)
    w = rng.standard_normal((G, 16, 16)).astype(np.float32)

    def product(ids: Array, x: Array, backend: Any) -> Array:
        return ragged.matmul(ragged.route(ids, G).gathered(x), w, backend=backend).data

    def mapped(backend: Any) -> Array:
        return jax.jit(jax.vmap(jax.vmap(partial(product, backend=backend))))(ids, x)

    with launches() as ran, gpu.on("NVIDIA H200"):
        got = mapped(GpuConfig(interpret=True))
    assert " by index" in ran[0][1]
    np.testing.assert_allclose(got, mapped("xla"), rtol=1e-5, atol=1e-5)


def test_a_token_is_quantised_once() -> None:
    """And not for each of its groups."""
    route, x, w = operands(64, 32)
    for recipe in ("tensorwise", "rowwise", "mxfp8"):
        program = str(jax.make_jaxpr(lambda x, r=recipe: ragged.matmul(route.gathered(x), w, recipe=r).data)(x))
        assert "f8_e4m3fn[6,64]" in program and "f8_e4m3fn[12,64]" not in program


@pytest.mark.long
def test_experts_read_rows_in_place() -> None:
    """`nn.MoE`: one product of gate and up, and both derivatives by their weights."""
    gpu.needs_triton()
    moe, x = layer_of(8, 16, G, 2, key=jax.random.key(0)), jnp.ones((6, 8))
    read = gathers(jax.grad(lambda x, moe: jnp.sum(moe(x)[0]), (0, 1), allow_int=True), x, moe)
    assert read.count(True) >= 2 and not all(read), read  # equal products of a program are lowered once


@pytest.mark.parametrize("kind", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.long)])
def test_sharded_operands_are_dispatched(kind: AxisType) -> None:
    """What XLA or `matmul` shares among devices is a product of rows that are there."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    route, x, w = operands()
    x = jnp.nan_to_num(x)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, NamedSharding(mesh, P(None, None, "d")))
        got, want = (jax.jit(lambda w, way=way: ragged.matmul(way(route, x), w).data)(sharded) for way in WAYS)
    assert_same(got, want)
    held = int(route.first_dims[0])
    np.testing.assert_allclose(
        got[:held], rows_of(route, x)[:held] @ np.asarray(w[0], np.float64), rtol=1e-4, atol=1e-5
    )


@pytest.mark.long
def test_what_is_dispatched_first() -> None:
    """A product that isn't of groups' matrices, with columns; integers; floats of 8 bits, which have no gradient."""
    route, x, w = operands()
    x, w = jnp.nan_to_num(x), w * 4
    columns = ragged.GroupedTensor(w[0, :, :9], last_dims=jnp.array([2, 0, 4, 3], jnp.int32))
    assert_same(*(ragged.matmul(way(route, x), columns).data for way in WAYS))
    assert_same(route.gathered(x).dispatch(), route.dispatch(x))
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        assert_same(*(ragged.matmul(way(route, x.astype(dtype)), w.astype(dtype)) for way in WAYS))
    with pytest.raises(TypeError, match="with respect to a quantised operand"):
        eight = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
        jax.grad(lambda x: jnp.sum(ragged.matmul(route.gathered(x), eight[1]).data.astype(jnp.float32)))(eight[0])
    got, want = (ragged.error_table(way(route, x), w, ["rowwise"]).sqnr for way in WAYS)
    np.testing.assert_array_equal(got, want)


def test_explain() -> None:
    """What runs is the same as of dispatched rows."""
    route, x, w = operands()
    gathered, dispatched = (ragged.explain(way(route, x), w) for way in WAYS)
    assert (gathered.layout, gathered.derivatives, gathered.num_groups) == ("forward", ("forward", "wgrad"), G)
    of_copies = {(p.product, p.platform): (p.runs, p.visits) for p in dispatched.plans}
    assert {(p.product, p.platform): (p.runs, p.visits) for p in gathered.plans} == of_copies


# Operators.

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


@pytest.mark.long
def test_operators_stay_gathered() -> None:
    """Of one row each: the rows of NumPy, which has them copied; zeros in the tail, and no NaN of no group. Gradients,
    by tokens and by what they are multiplied with, are those of dispatched rows."""

    def wrapped() -> tuple[Any, Any, Array]:
        return ragged.per_row(jnp.asarray(PER_ROW)), ragged.per_group(jnp.asarray(PER_GROUP)), jnp.asarray(PER_COLUMN)

    @jax.jit
    def run(ids: Array, x: Array) -> Any:
        rows = ragged.route(ids, G).gathered(x)
        return {name: function(rows, *wrapped()) for name, function in OPERATORS.items()}

    def loss(way: Rows, ids: Array, x: Array, row: Array, group: Array) -> Array:
        y = (way(ragged.route(ids, G), x) * ragged.per_row(row) + ragged.per_group(group)).map(jnp.sqrt)
        return jnp.sum(jnp.sin(ragged.matmul(y, jnp.ones((G, 3, 2))).data))

    gradients = [jax.jit(jax.grad(partial(loss, way), (1, 2, 3))) for way in WAYS]
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(-1, G + 1, 7).astype(np.int32)
        is_sound = (ids >= 0) & (ids < G)
        x = np.where(is_sound[:, None], rng.uniform(1, 2, (7, 3)), np.nan).astype(np.float32)
        sound = np.sort(ids[is_sound])
        rows = x.astype(np.float64)[np.argsort(np.where(is_sound, ids, G), kind="stable")][: sound.size]
        values = (v.astype(np.float64) for v in (PER_ROW[: sound.size, None], PER_GROUP[sound][:, None], PER_COLUMN))
        values = [*values]
        for name, got in run(ids, x).items():
            assert isinstance(got, ragged.Gathered)
            want, out = OPERATORS[name](rows, *values), got.dispatch()
            assert (out.dtype == bool) == (want.dtype == bool)
            np.testing.assert_allclose(out.data[: sound.size], want, rtol=1e-6)
            assert not out.data[sound.size :].any()
        got, want = (gradient(ids, x, PER_ROW, PER_GROUP) for gradient in gradients)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6)


@pytest.mark.long
def test_maps_of_tokens() -> None:
    """Of two rows a token: another width and dtype, rowwise functions, what else they are called with."""
    route, x, w = operands()
    gathered = route.gathered(x)
    got = gathered.map(lambda rows, column, two: two * jax.nn.softmax((rows * column) @ w[0]), jnp.full(D, 0.5), 2)
    z = np.exp(np.asarray(x, np.float64) / 2 @ np.asarray(w[0], np.float64))
    want = rows_of(route, 2 * z / z.sum(1, keepdims=True))
    assert got.shape == (12, N)
    np.testing.assert_allclose(got.dispatch().data[: len(want)], want, rtol=1e-5)
    assert gathered.astype(jnp.bfloat16).dispatch().dtype == jnp.bfloat16
    np.testing.assert_array_equal((gathered @ w).data, (route.dispatch(x) @ w).data)


def test_errors() -> None:
    """`docs/errors.md` has more."""
    route, x, _ = operands()
    gathered = route.gathered(x)
    with pytest.raises(ValueError, match=r"must have shape \(12,\)"):
        operator.mul(gathered, ragged.per_row(jnp.ones(11)))
    with pytest.raises(AttributeError, match="no attribute 'place'"):
        operator.attrgetter("place")(gathered)


# For chips that aren't here.


def trained(way: Rows, x: Array, w: Array, ids: Array, ct: Array) -> Any:
    out, pull = jax.vjp(lambda x, w: ragged.matmul(way(ragged.route(ids, w.shape[0]), x), w).data, x, w)
    return out, pull(ct)


@pytest.mark.long
@pytest.mark.parametrize(
    "chip, dtype, tokens, g, d",
    [
        ("NVIDIA A100", jnp.float32, 512, 64, 2048),
        ("NVIDIA H200", jnp.bfloat16, 4096, 8, 2048),
        ("NVIDIA B200", jnp.bfloat16, 4096, 8, 1000),
    ],
)
def test_compiled(chip: str, dtype: Any, tokens: int, g: int, d: int) -> None:
    """No spills; rows come by `cp.async`, on Hopper beside weights by TMA, into its own tensor cores."""
    shapes = ((tokens, d), dtype), ((g, d, d), dtype), ((tokens, 2), jnp.int32), ((2 * tokens, d), dtype)
    found = gpu.compile_for(chip, partial(trained, WAYS[0]), *(jax.ShapeDtypeStruct(*each) for each in shapes))
    assert len(found) == 3
    for kernel in found:
        assert kernel.spill_bytes == 0
    for kernel in found[:2] if chip != "NVIDIA B200" else ():
        assert kernel.sass_counts["LDGSTS"]
        assert chip == "NVIDIA A100" or kernel.sass_counts["UTMALDG"]
    if chip == "NVIDIA H200" and dtype == jnp.bfloat16:
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
