"""`route`, `dispatch` and `combine` against a NumPy loop over tokens."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh, PartitionSpec

import ragged
from ragged import GroupedTensor, Route, route
from ragged.tensor.route import _by_count, _by_sort

pytestmark = pytest.mark.sampled

NUM_GROUPS = 3
IDS = {
    "one group a token": [2, 0, 2, 0, 1],
    "an empty group": [2, 0, 2, 0],
    "one giant group": [1, 1, 1, 1],
    "to no group": [2, -1, 0, 3, 2, 2**31 - 1, -(2**31)],
    "all to no group": [-1, 3, 7],
    "one token": [1],
    "no tokens": [],
    "top 2": [[2, 0], [0, 1], [1, 2], [2, 1]],
    "top 2, the same group twice": [[1, 1], [0, 0]],
    "top 2, some to no group": [[2, -1], [9, 0], [3, 3], [0, 2]],
    "top 1 with an axis": [[2], [0], [4]],
}
cases = pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())


def assignments(ids):
    """(group, token, slot) of every row that goes to a group, in the order in which they must stand."""
    ids = np.asarray(ids, np.int64)
    pairs = [(t, j) for t in range(len(ids)) for j in range(1 if ids.ndim == 1 else ids.shape[1])]
    flat = ids.reshape(-1)
    return [(g, *pair) for g in range(NUM_GROUPS) for pair, i in zip(pairs, flat, strict=True) if i == g]


def as_ids(ids):
    return jnp.asarray(np.asarray(ids, np.int32))


def random(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def operands(ids, d=3):
    """`x` [tokens, d], `weights` as `ids`, and `y` [rows, d] with NaN in the tail; NaN too where an id is no group."""
    ids = as_ids(ids)
    sound = (ids >= 0) & (ids < NUM_GROUPS)
    weights = jnp.where(sound, random(ids.shape, 1), jnp.nan)
    x = random((ids.shape[0], d))
    x = jnp.where(sound.reshape(*ids.shape[:1], int(np.prod(ids.shape[1:]))).any(1)[:, None], x, jnp.nan)
    y = random((ids.size, d), 2).at[int(sound.sum()) :].set(jnp.nan)
    return ids, x, weights, y


@cases
def test_dispatch(ids):
    group_ids, x, _, _ = operands(ids)
    rows = assignments(ids)
    out = route(group_ids, NUM_GROUPS).dispatch(x)
    want = np.zeros((group_ids.size, 3), np.float32)
    for i, (_, token, _) in enumerate(rows):
        want[i] = x[token]
    assert out.first_dims.dtype == jnp.int32
    assert out.first_dims.tolist() == [sum(group == g for group, _, _ in rows) for g in range(NUM_GROUPS)]
    np.testing.assert_array_equal(out.data, want)


@cases
@pytest.mark.parametrize("weighted", [False, True])
def test_combine(ids, weighted):
    group_ids, _, weights, y = operands(ids)
    want = np.zeros((len(ids), 3))
    for i, (_, token, slot) in enumerate(assignments(ids)):
        weight = np.asarray(weights).reshape(len(ids), -1)[token, slot] if weighted else 1
        want[token] += weight * np.asarray(y[i], np.float64)
    routing = route(group_ids, NUM_GROUPS)
    out = routing.combine(ragged.GroupedTensor(y, routing.first_dims), weights if weighted else None)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)


@cases
def test_order_and_place_are_inverses(ids):
    routing = route(as_ids(ids), NUM_GROUPS)
    rows = np.arange(routing.order.size)
    assert routing.place.shape == as_ids(ids).shape
    np.testing.assert_array_equal(routing.place.reshape(-1)[routing.order], rows)
    np.testing.assert_array_equal(routing.order[routing.place.reshape(-1)], rows)


@cases
@pytest.mark.parametrize("sort", [_by_count, _by_sort])
def test_both_sorts(ids, sort):
    """One runs on CPUs, the other elsewhere."""
    group_ids = np.asarray(ids, np.int64).reshape(-1)
    group_ids = np.where((group_ids < 0) | (group_ids >= NUM_GROUPS), NUM_GROUPS, group_ids)
    order = np.argsort(group_ids, kind="stable")
    offsets = np.searchsorted(group_ids[order], np.arange(NUM_GROUPS + 1))
    for got, want in zip(sort(as_ids(group_ids), NUM_GROUPS), (order, np.argsort(order), offsets), strict=True):
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, want)


SYMBOLIC = """
import jax, jax.numpy as jnp, numpy as np
import ragged
from jax import export
from ragged.tensor.route import _by_sort

def back(ids, x, weights):
    route = ragged.route(ids, 4)
    rows = route.dispatch(x)
    return route, rows, route.combine(rows, weights), route.combine(rows)

def sorted_by(ids):  # as they are on other platforms than this one
    return _by_sort(ids, 4)

def shape(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)

(t,) = export.symbolic_shape("t")
both = export.export(jax.jit(back))(shape(jnp.int32, t, 2), shape(jnp.float32, t, 3), shape(jnp.float32, t, 2))
by_sort = export.export(jax.jit(sorted_by))(shape(jnp.int32, t))
export.export(jax.jit(back), platforms=("tpu", "cuda"))(
    shape(jnp.int32, t, 2), shape(jnp.float32, t, 3), shape(jnp.float32, t, 2)
)
def joined(x, y, sizes):
    return ragged.concat([ragged.GroupedTensor(x, sizes), ragged.GroupedTensor(y, sizes)]).data

both_rows = shape(jnp.float32, t, 3), shape(jnp.float32, t + 1, 3), shape(jnp.int32, 2)
concat = export.export(jax.jit(joined))(*both_rows)
rng = np.random.default_rng(0)
for tokens in (1, 7, 1500):
    x, y, sizes = np.ones((tokens, 3), np.float32), np.full((tokens + 1, 3), 2, np.float32), np.array([0, 1], np.int32)
    np.testing.assert_array_equal(concat.call(x, y, sizes), [[1] * 3, [2] * 3] + [[0] * 3] * (2 * tokens - 1))
    ids = rng.integers(-1, 6, (tokens, 2)).astype(np.int32)
    x, weights = (rng.normal(size=(tokens, n)).astype(np.float32) for n in (3, 2))
    want = jax.jit(back)(ids, x, weights)
    for found, want in zip(jax.tree.leaves(both.call(ids, x, weights)), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(found, want)
    ids = np.clip(ids.reshape(-1), 0, 4)
    order = np.argsort(ids, kind="stable")
    wanted = order, np.argsort(order), np.searchsorted(ids[order], np.arange(5))
    for found, want in zip(by_sort.call(ids), wanted, strict=True):
        np.testing.assert_array_equal(found, want)
"""


@pytest.mark.long
def test_symbolic_tokens() -> None:
    """One program for any number of tokens, and of rows to `concat`.

    In a process of its own, without the import hook: a symbolic extent is no `int`.
    """
    run = subprocess.run([sys.executable, "-c", SYMBOLIC], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32, np.int64])
@pytest.mark.parametrize("num_groups", [200, 70_000])
def test_ids_of_any_integer_dtype(dtype, num_groups):
    ids = np.array([-1, 100, 1, -1]).astype(dtype)  # -1 is the largest value where there is no sign
    want = sum(0 <= int(i) < num_groups for i in ids)
    assert int(route(ids, num_groups).first_dims.sum()) == want


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_dtypes_come_back(dtype):
    routing = route(jnp.zeros((2, 8), jnp.int32), 1)
    x = jnp.full((2, 1), 1, dtype)
    y = routing.dispatch(x)
    assert y.dtype == dtype and routing.combine(y).dtype == dtype
    np.testing.assert_array_equal(routing.combine(y).astype(jnp.float32), 8.0)


@pytest.mark.parametrize("x64", [False, True])
def test_ids_beyond_int32_are_no_group(x64):
    """NumPy's int64 and uint64 don't wrap around into range, with or without JAX's."""
    with jax.enable_x64(x64):
        for ids in (np.array([2**32, 2**32 + 1, 1, -(2**32)]), np.array([2**64 - 1, 2**63, 1, 2**32], np.uint64)):
            assert route(ids, 2).first_dims.tolist() == [0, 1]


@cases
def test_with_64_bits(ids):
    """Weighted and not, float64 in and out, gradients too, where JAX's default integer is int64."""
    with jax.enable_x64(True):
        for dtype in (np.int32, np.int64):
            group_ids = jnp.asarray(np.asarray(ids, dtype))
            rng = np.random.default_rng(0)
            x, weights = jnp.asarray(rng.normal(size=(len(ids), 3))), jnp.asarray(rng.normal(size=group_ids.shape))
            flat = np.asarray(weights).reshape(len(ids), -1) if len(ids) else np.zeros((0, 1))
            want, total = np.zeros((len(ids), 3)), np.zeros((len(ids), 1))
            for _, token, slot in assignments(ids):
                want[token] += flat[token, slot] * np.asarray(x)[token]
                total[token] += flat[token, slot]
            routing = route(group_ids, NUM_GROUPS)
            assert {leaf.dtype for leaf in jax.tree.leaves(routing)} == {np.dtype(np.int32)}
            np.testing.assert_allclose(routing.combine(routing.dispatch(x), weights), want, rtol=1e-13, atol=1e-14)
            dx = jax.grad(lambda x, r=routing, w=weights: r.combine(r.dispatch(x), w).sum())(x)
            assert dx.dtype == jnp.float64
            np.testing.assert_allclose(dx, np.broadcast_to(total, dx.shape), rtol=1e-13, atol=1e-14)


def test_numpy_operands():
    routing = route(np.array([1, 0], np.int32), NUM_GROUPS)
    out = routing.combine(ragged.GroupedTensor(np.array([[1.0], [2.0]]), np.array([1, 1, 0], np.int32)), np.ones(2))
    np.testing.assert_array_equal(out, [[2.0], [1.0]])
    np.testing.assert_array_equal(routing.dispatch(np.array([[1.0], [2.0]])).data, [[2.0], [1.0]])


def test_combine_sums_in_float32():
    # In bfloat16, 256 + 1 is 256.
    routing = route(jnp.zeros((1, 3), jnp.int32), 1)
    y = ragged.GroupedTensor(jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16), routing.first_dims)
    assert float(routing.combine(y)[0, 0]) == 258.0
    assert float(routing.combine(y, jnp.ones((1, 3), jnp.float32))[0, 0]) == 258.0


# --- derivatives ------------------------------------------------------------------------------------------------------


def layer(x, weights, ids):
    """A loss on what comes back from a nonlinear function of the rows, another one in each group."""
    routing = route(ids, NUM_GROUPS)
    scale = ragged.per_group(jnp.arange(1.0, NUM_GROUPS + 1, dtype=x.dtype))
    return jnp.sum(jnp.sin(routing.combine((routing.dispatch(x) * scale).map(jnp.tanh), weights)))


def dense_layer(x, weights, ids):
    """The same, token by token."""
    ids, total = np.asarray(ids), 0.0
    for token, chosen in enumerate(ids.reshape(len(ids), -1)):
        row = jnp.zeros(x.shape[1], x.dtype)
        for slot, group in enumerate(chosen):
            if 0 <= group < NUM_GROUPS:
                weight = weights.reshape(ids.shape[0], -1)[token, slot]
                row = row + weight * jnp.tanh(x[token] * (1.0 + int(group)))
        total = total + jnp.sum(jnp.sin(row))
    return total


with_rows = pytest.mark.parametrize("ids", [v for v in IDS.values() if v], ids=[k for k, v in IDS.items() if v])


@with_rows
@pytest.mark.parametrize("jit", [False, True])
def test_gradients(ids, jit):
    ids, x, weights, _ = operands(ids)
    grad = jax.grad(layer, (0, 1))
    got = (jax.jit(grad) if jit else grad)(x, weights, ids)
    clean = jnp.nan_to_num(x), jnp.nan_to_num(weights)
    for g, w in zip(got, jax.grad(dense_layer, (0, 1))(*clean, ids), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


@with_rows
def test_nan_around_never_reaches_a_gradient(ids):
    """A NaN cotangent of a tail row, and of a token that went nowhere, changes nothing."""
    ids, x, weights, y = operands(ids)
    routing = route(ids, NUM_GROUPS)
    held = jnp.isfinite(y)
    _, pull = jax.vjp(lambda x: routing.dispatch(x).data, x)
    np.testing.assert_array_equal(pull(y)[0], pull(jnp.where(held, y, 0.0))[0])
    _, pull = jax.vjp(lambda y, w: routing.combine(ragged.GroupedTensor(y, routing.first_dims), w), y, weights)
    dy, dw = pull(jnp.where(jnp.isnan(x), jnp.nan, 1.0))
    assert bool(jnp.all(jnp.isfinite(dy))) and bool(jnp.all(jnp.isfinite(dw)))
    assert bool(jnp.all(jnp.where(held, 0.0, dy) == 0)) and bool(jnp.all(jnp.where(jnp.isnan(weights), dw, 0.0) == 0))


def test_gradients_are_gathers():
    ids, x, weights, y = operands(IDS["top 2"])
    routing = route(ids, NUM_GROUPS)
    forward_only = [
        lambda c: jax.vjp(lambda x: routing.dispatch(x).data, x)[1](c),
        lambda c: jax.vjp(lambda y: routing.combine(ragged.GroupedTensor(y, routing.first_dims), weights), y)[1](c),
    ]
    for pull, cotangent in zip(forward_only, (y, x), strict=True):
        text = jax.jit(pull).lower(cotangent).as_text()
        assert "stablehlo.gather" in text and "stablehlo.scatter" not in text


@pytest.mark.long
def test_what_a_weighted_combine_keeps():
    """Its rows, as they are: in bfloat16, and once. The weights' gradient is a float32 sum all the same."""
    ids, x, weights, y = operands(IDS["top 2"])
    routing, y = ragged.route(ids, NUM_GROUPS), y.astype(jnp.bfloat16)

    def run(y, weights):
        return routing.combine(ragged.GroupedTensor(y, routing.first_dims), weights)

    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(run, *args)[1], y, weights))
    wide = [(leaf.dtype.name, leaf.shape) for leaf in leaves if leaf.size >= y.size]
    assert wide == [("bfloat16", y.shape)]
    ct = jax.random.normal(jax.random.key(3), x.shape, jnp.bfloat16)
    dy, dw = jax.vjp(run, y, weights)[1](ct)
    y, ct, flat = (np.asarray(z, np.float64) for z in (y, ct, weights))
    for (token, slot), place in np.ndenumerate(routing.place):
        if 0 <= ids[token, slot] < NUM_GROUPS:
            np.testing.assert_allclose(dw[token, slot], y[place] @ ct[token], rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(np.float64(dy[place]), flat[token, slot] * ct[token], rtol=2**-8)


@pytest.mark.sampled(default=False)
def test_forward_mode_and_second_order():
    ids, x, weights, _ = operands(IDS["top 2"])
    tangent = random(x.shape, 5)
    got = jax.jvp(lambda x: layer(x, weights, ids), (x,), (tangent,))
    want = jax.jvp(lambda x: dense_layer(x, weights, ids), (x,), (tangent,))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for twice in (jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        got = twice(lambda x: layer(x, weights, ids))(x)
        want = twice(lambda x: dense_layer(x, weights, ids))(x)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# --- other transformations --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)])
def test_vmap(axes):
    batches = random((2, 4, 3)), random((2, 4, 2), 1), as_ids([IDS["top 2"], IDS["top 2, some to no group"]])
    args = [b if axis == 0 else b[0] for b, axis in zip(batches, axes, strict=True)]
    grad = jax.grad(layer, (0, 1))
    got = jax.vmap(grad, axes)(*args)
    for i in range(2):
        want = grad(*(b[i] if axis == 0 else b[0] for b, axis in zip(batches, axes, strict=True)))
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g[i], w, rtol=1e-6, atol=1e-7)


def test_a_route_is_a_pytree_that_batches():
    ids = as_ids([[2, 0, 2, 0], [1, 1, -1, 0]])
    routes = jax.vmap(lambda ids: route(ids, NUM_GROUPS))(ids)
    assert isinstance(routes, Route) and routes.first_dims.shape == (2, NUM_GROUPS)
    x = random((2, 4, 3))
    back = jax.vmap(lambda routing, x: routing.combine(routing.dispatch(x)))(routes, x)
    np.testing.assert_array_equal(back, jnp.where((ids >= 0)[..., None], x, 0.0))


def test_scan_and_remat():
    ids, x, weights, _ = operands(IDS["top 2"])

    def scanned(x, weights):
        step = jax.checkpoint(lambda total, ids: (total + layer(x, weights, ids), None))
        return jax.lax.scan(step, jnp.zeros(()), jnp.stack([ids, ids[::-1]]))[0]

    def plain(x, weights):
        return layer(x, weights, ids) + layer(x, weights, ids[::-1])

    for got, want in zip(*(jax.jit(jax.grad(f, (0, 1)))(x, weights) for f in (scanned, plain)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_shard_map():
    """Tokens sharded: each device routes its own."""
    ids, x, weights, _ = operands(IDS["top 2"])
    tokens = PartitionSpec("tokens")
    mesh = Mesh(np.array(jax.devices()[:2]), "tokens")

    def local(x, weights, ids):
        return jax.lax.psum(layer(x, weights, ids), "tokens")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 3, out_specs=PartitionSpec())
    got = jax.jit(jax.value_and_grad(sharded, (0, 1)))(x, weights, ids)
    want = jax.value_and_grad(layer, (0, 1))(x, weights, ids)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_experts_in_between():
    """The whole: route, dispatch, a product, combine, with gradients, against a loop over tokens."""
    ids, x, weights, _ = operands(IDS["top 2, some to no group"])
    x, weights = jnp.nan_to_num(x), jnp.nan_to_num(weights)
    matrices = random((NUM_GROUPS, 3, 5), 4)

    def grouped(x, matrices):
        routing = route(ids, NUM_GROUPS)
        return jnp.sum(routing.combine(ragged.matmul(routing.dispatch(x), matrices), weights) ** 2)

    def loop(x, matrices):
        out = [jnp.zeros(5)] * len(ids)
        for group, token, slot in assignments(ids):
            out[token] = out[token] + weights[token, slot] * (x[token] @ matrices[group])
        return jnp.sum(jnp.stack(out) ** 2)

    got, want = (jax.value_and_grad(f, (0, 1))(x, matrices) for f in (grouped, loop))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_filter_jit_takes_a_route():
    routing = route(as_ids(IDS["top 2"]), NUM_GROUPS)
    x = random((4, 3))
    np.testing.assert_allclose(eqx.filter_jit(lambda r, x: r.combine(r.dispatch(x)))(routing, x), 2 * x, rtol=1e-6)


# --- errors -----------------------------------------------------------------------------------------------------------


ROUTE = route(as_ids(IDS["top 2"]), NUM_GROUPS)
Y = ROUTE.dispatch(jnp.ones((4, 3)))
HAVE = "GroupedTensor(f32[8,3], first_dims=[2, 3, 3] (8 of 8 rows))"


def test_no_rows_and_no_columns() -> None:
    """Maps over tokens without rows, or without columns; without `jit`; derivatives of a slice without rows."""
    route = ragged.route(jnp.zeros((0, 2), jnp.int32), 3)
    assert jax.vmap(lambda x: route.dispatch(x).data)(jnp.ones((2, 0, 4))).shape == (2, 0, 4)

    def there_and_back(ids: Array, x: Array) -> Array:
        route = ragged.route(ids, 3)
        return route.combine(route.dispatch(x))

    assert jax.vmap(there_and_back)(jnp.zeros((2, 5, 1), jnp.int32), jnp.ones((2, 5, 0))).shape == (2, 5, 0)
    with jax.disable_jit():
        assert ragged.route(jnp.zeros(0, jnp.int32), 2).first_dims.tolist() == [0, 0]
    nothing = jax.grad(lambda data: jnp.sum(GroupedTensor(data, jnp.zeros(2, jnp.int32)).rows(1, 0).data))
    np.testing.assert_array_equal(nothing(jnp.ones((3, 2))), np.zeros((3, 2)))
