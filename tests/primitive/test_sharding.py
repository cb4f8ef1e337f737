"""On meshes: operands that vary over different axes of a `shard_map`, maps over some axes only, explicit axes."""

import math
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor, route
from ragged.ops.matmul import request_of
from ragged.ops.request import Arguments
from ragged.primitive.sharding import resolve

pytestmark = pytest.mark.sampled(default=False)  # by default, others stand for these

AUTO, EXPLICIT = (AxisType.Auto, AxisType.Auto), (AxisType.Explicit, AxisType.Explicit)
GROUPS, TOKENS, D = 3, 5, 2


def mesh_of(types: tuple[AxisType, AxisType] = AUTO) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=types)


def varies_over(x: Array) -> tuple[str, ...]:
    return tuple(sorted(jax.typeof(x).manual_axis_type.varying))


# --- route ------------------------------------------------------------------------------------------------------------


def routed_loss(x: Array, ids: Array, weights: Array) -> Array:
    """Of one device: rows times their group's number, summed for each token with weights, and the sum of sines."""
    routing = route(ids, GROUPS)
    y = routing.dispatch(x) * ragged.per_group(jnp.arange(1.0, GROUPS + 1))
    return jnp.sum(jnp.sin(routing.combine(y, weights)))


def oracle(x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss and its gradients by `x` and `weights`, token by token, in float64."""
    value, dx, dw = 0.0, np.zeros_like(x), np.zeros_like(weights)
    for t, chosen in enumerate(ids):
        held = [j for j, group in enumerate(chosen) if 0 <= group < GROUPS]
        factor = sum(weights[t, j] * (1 + chosen[j]) for j in held)
        value += np.sin(factor * x[t]).sum()
        dx[t] = factor * np.cos(factor * x[t])
        for j in held:
            dw[t, j] = np.sum((1 + chosen[j]) * x[t] * np.cos(factor * x[t]))
    return value, dx, dw


# The axes of the map, and those over which `x`, `ids` and `weights` vary.
VARYING = [
    ("a", "a", "", ""),
    ("a", "", "a", ""),
    ("ab", "a", "b", ""),
    ("ab", "b", "ab", "a"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in [
            ("a", "", "", "a"),
            ("a", "a", "", "a"),
            ("a", "a", "a", "a"),
            ("ab", "a", "", ""),
            ("ab", "", "a", ""),
            ("ab", "", "", "a"),
            ("ab", "", "b", "a"),
            ("ab", "ab", "", "b"),
        ]
    ),
]


@pytest.mark.parametrize("names, x_axes, ids_axes, weights_axes", VARYING)
def test_route_of_operands_over_different_axes(names: str, x_axes: str, ids_axes: str, weights_axes: str) -> None:
    """Values, and gradients taken inside and outside of the map, against a loop over devices and tokens."""
    axes = x_axes, ids_axes, weights_axes
    rng = np.random.default_rng(0)
    shapes = [(2 ** len(over), TOKENS, n) for over, n in zip(axes, (D, 2, 2), strict=True)]
    x, weights = rng.normal(size=shapes[0]), rng.normal(size=shapes[2])
    ids = rng.integers(-1, GROUPS + 1, shapes[1])
    value, dx, dw = 0.0, np.zeros_like(x), np.zeros_like(weights)
    place = {"": lambda i, j: 0, "a": lambda i, j: i, "b": lambda i, j: j, "ab": lambda i, j: 2 * i + j}
    used = "".join(axes)
    for i in range(2 if "a" in used else 1):
        for j in range(2 if "b" in used else 1):
            at = [place[over](i, j) for over in axes]
            term, by_x, by_weights = oracle(x[at[0]], ids[at[1]], weights[at[2]])
            value, dx[at[0]], dw[at[2]] = value + term, dx[at[0]] + by_x, dw[at[2]] + by_weights

    def local(x: Array, ids: Array, weights: Array) -> Array:
        loss = routed_loss(x[0], ids[0], weights[0])
        return jax.lax.psum(loss, varies_over(loss))

    def local_gradients(*args: Array) -> tuple[Array, tuple[Array, Array]]:
        return jax.value_and_grad(local, (0, 2))(*args)

    specs = tuple(P(tuple(over)) for over in axes)
    options: dict[str, Any] = {"mesh": mesh_of(), "in_specs": specs, "axis_names": set(names)}
    outside = jax.value_and_grad(jax.shard_map(local, out_specs=P(), **options), (0, 2))
    inside = jax.shard_map(local_gradients, out_specs=(P(), (specs[0], specs[2])), **options)
    args = jnp.asarray(x, jnp.float32), jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32)
    for run in (outside, inside):
        got, (got_dx, got_dw) = jax.jit(run)(*args)
        np.testing.assert_allclose(got, value, rtol=1e-5)
        np.testing.assert_allclose(got_dx, dx, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got_dw, dw, rtol=1e-5, atol=1e-5)


def moe(x: Array, up: Array, down: Array, ids: Array, weights: Array) -> Array:
    """A mixture of experts without groups: each token has copies of its experts' matrices."""
    hidden = jnp.tanh(jnp.einsum("td,tjdh->tjh", x, up[ids]))
    return jnp.einsum("tjh,tjhd,tj->td", hidden, down[ids], weights)


def test_a_mixture_of_experts_over_two_axes() -> None:
    """Tokens over one axis, experts over the other; the gradients of everything, of one step."""
    rng = np.random.default_rng(1)
    x, up, down, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((6, 4), (4, 4, 5), (4, 5, 4), (6, 2))
    )
    ids = jnp.asarray(rng.integers(0, 4, (6, 2)), jnp.int32)

    def local(x: Array, up: Array, down: Array, ids: Array, weights: Array) -> Array:
        routing, offset = route(ids, 4), jax.lax.axis_index("b") * len(up)
        hidden = ragged.matmul(routing.dispatch(x), up, group_offset=offset).map(jnp.tanh)
        return jax.lax.psum(routing.combine(ragged.matmul(hidden, down, group_offset=offset), weights), "b")

    specs = P("a"), P("b"), P("b"), P("a"), P("a")
    sharded = jax.shard_map(local, mesh=mesh_of(), in_specs=specs, out_specs=P("a"))
    got, want = (
        jax.jit(jax.value_and_grad(lambda *args, f=f: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 4)))(
            x, up, down, ids, weights
        )
        for f in (sharded, moe)
    )
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


# --- maps over some axes only -----------------------------------------------------------------------------------------

SIZES = np.array([[3, 0, 2], [1, 4, 0]], np.int32)
ROWS = np.random.default_rng(2).normal(size=(7, 2)).astype(np.float32)


def groups_of(sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(ROWS.astype(np.float64), np.cumsum(sizes))[: len(sizes)]


def packed(groups: list[np.ndarray], rows: int = 7) -> np.ndarray:
    whole = np.concatenate(groups)
    return np.pad(whole, ((0, rows - len(whole)), (0, 0)))


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


W = np.random.default_rng(3).normal(size=(3, 2, 4)).astype(np.float32)
Operation = tuple[Callable[[GroupedTensor], Array], Callable[[list[np.ndarray]], np.ndarray]]
OPERATIONS: dict[str, Operation] = {
    "sum": (lambda x: x.sum(-2), lambda groups: np.stack([g.sum(0) for g in groups])),
    "mean": (lambda x: x.mean(), lambda groups: np.array([g.mean() if g.size else 0 for g in groups])),
    "max": (lambda x: x.max(empty=0), lambda groups: np.array([g.max() if g.size else 0 for g in groups])),
    "per_group": (
        lambda x: (x * ragged.per_group(jnp.arange(3.0))).data,
        lambda groups: packed([i * g for i, g in enumerate(groups)]),
    ),
    "columns": (lambda x: x.mT.sum(-1), lambda groups: np.stack([g.sum(0) for g in groups])),
    "concat": (lambda x: ragged.concat([x, x]).data, lambda groups: packed([*groups, *groups], 14)),
    "softmax": (lambda x: x.softmax().data, lambda groups: packed([softmax(g) for g in groups])),
    "softmax of rows": (
        lambda x: x.softmax(-2, sink=-jnp.inf).data,
        lambda groups: packed([softmax(g.T).T for g in groups]),
    ),
    "logsumexp": (
        lambda x: x.logsumexp(-2, empty=0),
        lambda groups: np.stack([np.log(np.exp(g).sum(0)) if g.size else np.zeros(2) for g in groups]),
    ),
    "to_padded": (lambda x: x.to_padded(4), lambda groups: np.stack([packed([g], 4) for g in groups])),
    "matmul": (
        lambda x: ragged.matmul(x, jnp.asarray(W)).data,
        lambda groups: packed([g @ w for g, w in zip(groups, W, strict=True)]),
    ),
}


@pytest.mark.parametrize("names", ["a", pytest.param("ab", marks=pytest.mark.long)])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_sizes_that_vary(operation: Operation, names: str) -> None:
    """Each device has sizes of its own; in a map over one axis of two, and over both. The buffer doesn't vary."""
    run, want = operation

    def local(sizes: Array) -> Array:
        return run(GroupedTensor(jnp.asarray(ROWS), sizes[0]))[None]

    sharded = jax.shard_map(local, mesh=mesh_of(), in_specs=P("a"), out_specs=P("a"), axis_names=set(names))
    got = jax.jit(sharded)(jnp.asarray(SIZES))
    for each, sizes in zip(got, SIZES, strict=True):
        np.testing.assert_allclose(each, want(groups_of(sizes)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_gradients_in_a_partly_manual_map(recipe: str | None) -> None:
    """The buffer varies, the sizes don't. A quantised product's gradients are nearly those of the exact one."""
    buffers = np.stack([ROWS, -2 * ROWS])

    def local(data: Array) -> Array:
        out = ragged.matmul(GroupedTensor(data[0], jnp.asarray(SIZES[0])), jnp.asarray(W), recipe=recipe)
        return jnp.sum(out.data)[None]

    sharded = jax.shard_map(local, mesh=mesh_of(), in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    got = jax.jit(jax.grad(lambda data: sharded(data).sum()))(jnp.asarray(buffers))
    want = packed([np.broadcast_to(w.sum(1), g.shape) for w, g in zip(W, groups_of(SIZES[0]), strict=True)])
    tolerance = 1e-6 if recipe is None else 2**-3  # e4m3 rounds by up to 1 / 16, both operands
    for each in got:
        np.testing.assert_allclose(each, want, atol=tolerance * np.abs(W).sum(2).max())


def test_products_in_turn_in_a_map_next_to_an_explicit_axis() -> None:
    """The contracted axis is sharded over an axis that the map isn't over; so is its cotangent."""

    def two(x: Array, w: Array, v: Array) -> Array:
        hidden = ragged.matmul(GroupedTensor(x, jnp.asarray(SIZES[0])), w)
        return ragged.matmul(hidden, v).data

    def apart(x: Array, w: Array, v: Array) -> Array:
        return jnp.concatenate([two(part, w, v) for part in jnp.split(x, 2)])

    def gradients(run: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
        return jax.jit(jax.grad(lambda *args: jnp.sum(run(*args) ** 2), (0, 1, 2)))

    rows = jnp.concatenate([jnp.asarray(ROWS), -2 * jnp.asarray(ROWS)])
    rows = jnp.concatenate([rows, rows[:, ::-1]], axis=1)
    w = jnp.concatenate([jnp.asarray(W), jnp.asarray(W) / 2], axis=1)
    args = rows, w, jnp.asarray(W).mT[:, :, :3]
    want = gradients(apart)(*args)
    with jax.set_mesh(mesh_of(EXPLICIT)):
        run = jax.shard_map(two, in_specs=(P("a"), P(), P()), out_specs=P("a"), axis_names={"a"})
        x = jax.device_put(rows, NamedSharding(jax.sharding.get_mesh(), P("a", "b")))
        got = gradients(run)(x, *args[1:])
        for each, other in zip(got, want, strict=True):
            np.testing.assert_allclose(each, other, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("wrt", ["lhs", "rhs"])
@pytest.mark.parametrize("how", ["a map", "a map over one axis", "a recipe", "sharded_matmul", "check_vma=False"])
def test_gradients_of_what_all_devices_have(how: str, wrt: str) -> None:
    """They are summed over devices in float32: 257 on one and -256 on another are 1, in bfloat16 too."""
    shapes, specs = ((1, 1), (1, 1, 4), (1, 4)), (P(), P(None, None, "a"), P(None, "a"))
    if wrt == "rhs":
        shapes, specs = ((4, 1), (1, 1, 1), (4, 1)), (P("a"), P(), P("a"))
    x, w, dout = (jnp.ones(shape, jnp.bfloat16) for shape in shapes)
    dout *= jnp.array([256, 1, -256, 0], jnp.bfloat16).reshape(dout.shape)
    options: dict[str, Any] = {"mesh": mesh_of(), "in_specs": specs[:2], "out_specs": specs[2]}

    def product(x: Array, w: Array) -> Array:
        tensor = GroupedTensor(x, jnp.array([len(x)], jnp.int32))
        if how in ("sharded_matmul", "check_vma=False"):
            return ragged.sharded_matmul(tensor, w, check_vma=how == "sharded_matmul", **options).data
        return ragged.matmul(tensor, w, recipe="rowwise" if how == "a recipe" else None).data

    names = {"a"} if how == "a map over one axis" else {"a", "b"}
    run = (
        product if how in ("sharded_matmul", "check_vma=False") else jax.shard_map(product, axis_names=names, **options)
    )
    got = jax.jit(lambda x, w: jax.vjp(run, x, w)[1](dout))(x, w)[wrt == "rhs"]
    assert got.dtype == jnp.bfloat16 and np.asarray(got).item() == 1


# --- sums are rounded once --------------------------------------------------------------------------------------------

PARTS = np.array([256, 1, -256, 0], np.float32)
"""Their sum is 1. Added up two by two in bfloat16, it is 0: 257 is rounded to 256."""
ONE = jnp.array([1], jnp.int32)


def explicitly(*shards: tuple[Any, P]) -> list[Array]:
    return [jax.device_put(x, spec) for x, spec in shards]


def contracted(dtype: Any = jnp.bfloat16, parts: Any = PARTS, **options: Any) -> Array:
    """The sum as a product whose contracted dim is cut over two devices."""
    x, w = explicitly((jnp.asarray(parts, dtype)[None], P(None, "a")), (jnp.ones((1, 4, 1), dtype), P(None, "a")))
    return ragged.grouped_matmul(x, w, ONE, **options)


def gradient_in_a_map(function: Callable[..., Array], *shapes: tuple[int, ...]) -> Array:
    """By the one element of a first argument that all four devices have; each has a part of the others, of ones, and
    one of `PARTS` for a cotangent."""

    def local(x: Array, *rest: Array) -> Array:
        return function(x, *rest)

    args = [jnp.ones((1, 1), jnp.bfloat16), *(jnp.ones((4, *shape), jnp.bfloat16) for shape in shapes)]
    specs = P(), *(P(("a", "b")) for _ in shapes)
    run = jax.shard_map(local, in_specs=specs, out_specs=P(("a", "b")))
    out, pull = jax.vjp(run, *args)
    return pull(jnp.asarray(PARTS, out.dtype).reshape(out.shape))[0]


def varying_ids(of: Array) -> Array:
    return 0 * of.astype(jnp.int32).reshape(-1)


ROUNDED_ONCE: dict[str, tuple[AxisType, Callable[[], Array]]] = {
    "a product": (AxisType.Explicit, contracted),
    "existing_out": (
        AxisType.Explicit,
        lambda: contracted(parts=[256, 1, -256, -3], existing_out=jnp.full((1, 1), 3, jnp.bfloat16)),
    ),
    "integers, of a float": (
        AxisType.Explicit,
        lambda: contracted(jnp.int32, [2**24, 1, -(2**24), 0], preferred_element_type=jnp.float32),
    ),
    "what existing_out adds": (
        AxisType.Auto,
        lambda: gradient_in_a_map(
            lambda old, x: ragged.matmul(GroupedTensor(x, ONE), jnp.ones((1, 1, 1), x.dtype), existing_out=old).data,
            (1,),
        ),
    ),
    "dispatched rows": (
        AxisType.Auto,
        lambda: gradient_in_a_map(lambda x, of: route(varying_ids(of), 1).dispatch(x).data, (1,)),
    ),
    "rows that an index gathers": (
        AxisType.Auto,
        lambda: gradient_in_a_map(
            lambda x, of: ragged.matmul(route(varying_ids(of), 1).gathered(x), jnp.ones((1, 1, 1), x.dtype)).data, (1,)
        ),
    ),
    "gathered rows of matrices that differ": (
        AxisType.Auto,
        lambda: gradient_in_a_map(
            lambda x, w: ragged.matmul(route(jnp.zeros(1, jnp.int32), 1).gathered(x), w[None]).data, (1,)
        ),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROUNDED_ONCE)
def test_sums_over_devices_are_rounded_once(name: str) -> None:
    """They are in the dtype in which one device adds up."""
    kind, run = ROUNDED_ONCE[name]
    with jax.set_mesh(mesh_of((kind, kind))):
        np.testing.assert_array_equal(np.asarray(jax.jit(run)(), np.float64), 1)
        text = jax.jit(run).lower().as_text()
    # XLA for CPUs adds up what devices have of bfloat16 in float32; others may not.
    assert re.search(r"all_reduce.*\n *\^bb0\(%\w+: tensor<[fi]32>", text)
    assert not re.search(r"all_reduce.*\n *\^bb0\(%\w+: tensor<bf16>", text)


@pytest.mark.sampled
def test_a_token_of_many_rows_on_many_devices() -> None:
    """The gradient of a token is one sum, of 256 + 1 on one device and -256 + 0 on another."""

    def local(x: Array, like: Array) -> Array:
        ids = 0 * like.astype(jnp.int32)  # [tokens, top 2]
        return route(ids, 1).dispatch(x).data

    mapped = jax.shard_map(local, mesh=mesh_of(), in_specs=(P(), P("a")), out_specs=P("a"))
    x, like = jnp.ones((1, 1), jnp.bfloat16), jnp.ones((2, 2))
    dx = jax.jit(lambda x: jax.vjp(lambda x: mapped(x, like), x)[1](jnp.asarray(PARTS, x.dtype)[:, None])[0])(x)
    np.testing.assert_array_equal(np.asarray(dx, np.float64), 1)


@pytest.mark.sampled
def test_an_offset_that_wraps_around() -> None:
    """Of groups that are sharded: the offset plus a device's first group is no group of any row."""
    with jax.set_mesh(mesh_of(EXPLICIT)):
        (w,) = explicitly((jnp.ones((2, 1, 1)), P("a")))
        product = jax.jit(lambda at: ragged.grouped_matmul(jnp.ones((3, 1)), w, jnp.full(3, 1), group_offset=at))
        for at, want in ((1, [0, 1, 1]), (-1, [1, 0, 0]), (2**31 - 1, [0, 0, 0]), (-(2**31), [0, 0, 0])):
            np.testing.assert_array_equal(np.asarray(product(jnp.int32(at)))[:, 0], want)


@pytest.mark.sampled
def test_a_cut_through_a_block_of_scales() -> None:
    """Blocks of 4 along 6, of which each of two devices has 3."""
    w = jnp.asarray([1, 1, 1, 1, 127, 127], jnp.float32).reshape(1, 6, 1)
    q = ragged.quantize(w, jnp.int8, (4, 1))
    with jax.set_mesh(mesh_of(EXPLICIT)):
        x, data = explicitly((jnp.ones((1, 6)), P(None, "a")), (q.data, P(None, "a")))
        out = jax.jit(lambda x, data: ragged.matmul(GroupedTensor(x, ONE), q.with_data(data)).data)(x, data)
    np.testing.assert_allclose(np.asarray(out, np.float64), w.sum(), rtol=2**-7)


@pytest.mark.sampled
def test_uneven_cuts_are_not_taken() -> None:
    """Of an axis that doesn't divide an extent, as XLA may have cut it."""
    product = request_of(
        GroupedTensor(jnp.ones((6, 4)), jnp.array([2, 4], jnp.int32)), jnp.ones((2, 4, 2)), Arguments()
    )
    specs = jax.tree.map(lambda _: P(), product.operands)
    for axis, mesh, want in ((P("a"), {"a": 4}, {}), (P("a"), {"a": 3}, {"m": ("a",)}), (P(None, "a"), {"a": 3}, {})):
        given = specs._replace(lhs=specs.lhs._replace(data=axis))
        assert resolve(product.operands, product.call, given, P(), mesh).letters == want


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_gradients_that_are_left_unreduced(recipe: str | None) -> None:
    """Where the type of what all devices have says so."""

    def local(x: Array, w: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, jnp.array([2], jnp.int32)), w, recipe=recipe).data

    with jax.set_mesh(mesh_of(EXPLICIT)):
        x, w = jax.device_put(jnp.ones((4, 1)), P("a")), jax.reshard(jnp.ones((1, 1, 1)), P(reduced=frozenset("a")))
        run = jax.shard_map(local, in_specs=(P("a"), P(reduced=frozenset("a"))), out_specs=P("a"))
        dw = jax.jit(lambda x, w: jax.vjp(run, x, w)[1](run(x, w))[1])(x, w)
        assert jax.typeof(dw).sharding.spec.unreduced == {"a"}
        assert np.asarray(jax.reshard(dw, P())).item() == 4


def validated(names: str) -> Callable[[Array], Array]:
    def local(sizes: Array) -> Array:
        return GroupedTensor(jnp.asarray(ROWS), sizes[0]).validate().packed_dims[None]

    return jax.shard_map(local, mesh=mesh_of(), in_specs=P("a"), out_specs=P("a"), axis_names=set(names))


def test_validate_sizes_that_vary() -> None:
    """Each device checks its own; one that finds bad sizes is enough."""
    sound = jnp.asarray(SIZES)
    np.testing.assert_array_equal(eqx.filter_jit(validated("ab"))(sound), SIZES)
    text = (
        "the size 4 of group 1 in `first_dims` is too large: the sum of the sizes up to it is above the capacity of 7"
    )
    with pytest.raises(eqx.EquinoxRuntimeError, match=text):
        jax.block_until_ready(eqx.filter_jit(validated("ab"))(sound.at[1, 0].set(4)))


def test_validate_in_a_partly_manual_map_is_refused() -> None:
    with pytest.raises(NotImplementedError) as error:
        jax.jit(validated("a"))(jnp.asarray(SIZES))
    assert str(error.value) == (
        "`GroupedTensor.validate`: JAX has no run-time errors in a `jax.shard_map` over only some axes of a mesh, "
        "('a',) of ('a', 'b').\nValidate outside of the `jax.shard_map`, or map over all axes of the mesh."
    )


# --- explicit axes ----------------------------------------------------------------------------------------------------

DIMS = jnp.array([3, 0, 4, 1], jnp.int32)
IDS = jnp.array([[0, 1]] * 4 + [[3, 2]] * 4, jnp.int32)
ROUTE = route(IDS, 4)
MATRICES = jnp.asarray(np.random.default_rng(5).normal(size=(4, 4, 4)), jnp.float32)
BUFFER = jnp.asarray(np.random.default_rng(6).normal(size=(8, 4)), jnp.float32)


def rows_of(x: Array) -> GroupedTensor:
    return GroupedTensor(x, DIMS)


# Of an array [8, 4] that is sharded: what is called, and how its result is sharded if the array's rows are, over "a".
CALLS: dict[str, tuple[Callable[[Array], Any], P]] = {
    "matmul": (lambda x: ragged.matmul(rows_of(x), MATRICES), P("a", None)),
    "matmul, shared": (lambda x: ragged.matmul(rows_of(x), MATRICES[0]), P("a", None)),
    "matmul by a shared": (lambda x: ragged.matmul(jnp.ones((4, 4, 8)), x), P(None, None, None)),
    "recipe": (lambda x: ragged.matmul(rows_of(x), MATRICES, recipe="rowwise"), P("a", None)),
    "mxfp8": (lambda x: ragged.matmul(rows_of(x), MATRICES, recipe="mxfp8"), P("a", None)),
    "existing_out": (
        lambda x: ragged.matmul(rows_of(BUFFER), MATRICES, existing_out=x),
        P("a", None),
    ),
    "grouped_matmul": (lambda x: ragged.grouped_matmul(x, MATRICES, DIMS), P("a", None)),
    "transposed_grouped_matmul": (lambda x: ragged.transposed_grouped_matmul(x.T, x, DIMS), P(None, None, None)),
    "quantize": (lambda x: ragged.quantize(rows_of(x), jnp.int8, "row"), P("a", None)),
    "dequantize": (lambda x: ragged.quantize(rows_of(x), jnp.int8, "row").dequantize(), P("a", None)),
    "map": (lambda x: rows_of(x).map(jnp.sin), P("a", None)),
    "neg": (lambda x: -rows_of(x), P("a", None)),
    "add": (lambda x: rows_of(x) + 1, P("a", None)),
    "subtract": (lambda x: rows_of(BUFFER) - rows_of(x), P("a", None)),
    "per_row": (lambda x: rows_of(BUFFER) * ragged.per_row(x.sum(1)), P(None, None)),
    "per_group": (lambda x: rows_of(x) * ragged.per_group(jnp.arange(4.0)), P("a", None)),
    "sum": (lambda x: rows_of(x).sum(), P(None)),
    "mean": (lambda x: rows_of(x).mT.mean(-1), P(None, None)),
    "max": (lambda x: rows_of(x).max(-1), P("a")),
    "logsumexp": (lambda x: rows_of(x).logsumexp(-1), P("a")),
    "softmax": (lambda x: rows_of(x).mT.softmax(), P(None, "a")),
    "softmax of rows": (lambda x: rows_of(x).softmax(-2, sink=1), P("a", None)),
    "to_padded": (lambda x: rows_of(x).to_padded(4), P(None, None, None)),
    "from_padded": (lambda x: GroupedTensor.from_padded(x[:, None], jnp.ones(8, jnp.int32)), P(None, None)),
    "concat": (lambda x: ragged.concat([rows_of(x), rows_of(x)]), P("a", None)),
    "route": (lambda x: route((4 * x).astype(jnp.int32), 4).place, P("a", None)),
    "dispatch": (lambda x: ROUTE.dispatch(x), P("a", None)),
    "combine": (lambda x: ROUTE.combine(GroupedTensor(jnp.concatenate([x, x]), ROUTE.first_dims)), P("a", None)),
    "weights": (
        lambda x: ROUTE.combine(
            GroupedTensor(jnp.concatenate([BUFFER, BUFFER]), ROUTE.first_dims), jnp.stack([x.sum(1)] * 2, 1)
        ),
        P("a", None),
    ),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_explicit_axes(case: tuple[Callable[[Array], Any], P], jit: bool) -> None:
    """The numbers of one device, and a type that follows from the operands'."""
    call, spec = case
    mesh = mesh_of(EXPLICIT)
    want = call(BUFFER)
    with jax.set_mesh(mesh):
        for given, expected in ((P("a", None), spec), (P("a", "b"), None)):
            got = (jax.jit(call) if jit else call)(jax.device_put(BUFFER, NamedSharding(mesh, given)))
            first = jax.tree.leaves(got)[0]
            assert expected is None or jax.typeof(first).sharding.spec == expected
            for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(*(np.asarray(z).astype(np.float64) for z in (g, w)), rtol=1e-5, atol=1e-6)


REFUSED: dict[str, tuple[Callable[[Array], Any], str, str]] = {
    "from_list": (lambda x: GroupedTensor.from_list([x]), "GroupedTensor.from_list", "groups.0"),
    "index": (lambda x: rows_of(x)[2], "GroupedTensor[2]", "x.data"),
    "sizes": (
        lambda x: GroupedTensor(jnp.ones((8, 4)), x[:, 0].astype(jnp.int32)).offsets,
        "GroupedTensor.offsets",
        "first_dims",
    ),
    "mask": (
        lambda x: GroupedTensor(jnp.ones((8, 4)), x[:, 0].astype(jnp.int32)).mask,
        "GroupedTensor.mask",
        "first_dims",
    ),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_explicit_axes_are_refused_clearly(case: tuple[Callable[[Array], Any], str, str], jit: bool) -> None:
    """One text, whatever is called that must know values, or sizes on every device."""
    call, name, operand = case
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("a", None)))
        with pytest.raises(NotImplementedError) as error:
            jax.eval_shape(call, x) if jit else call(x)
    lines = str(error.value).split("\n")
    assert lines[0] == f"`{name}`: `{operand}` is sharded over a mesh axis of type `Explicit`."
    assert lines[1].startswith("Got ") and "@a" in lines[1]
    assert lines[2:] == ["Call it inside `jax.shard_map`, or make that mesh axis `Auto`."]


def test_a_map_over_an_explicit_axis() -> None:
    """A `vmap` whose axis is sharded: each device multiplies its elements."""
    mesh = mesh_of(EXPLICIT)
    product = jax.vmap(lambda x: ragged.matmul(rows_of(x), MATRICES).data)
    stacked = jnp.stack([BUFFER, 2 * BUFFER])
    with jax.set_mesh(mesh):
        x = jax.device_put(stacked, NamedSharding(mesh, P("a", None, None)))
        got = product(x)
        assert jax.typeof(got).sharding.spec == P("a", None, None)
        np.testing.assert_allclose(got, product(stacked), rtol=1e-5)


def layer(x: Array, w: Array, weights: Array) -> Array:
    hidden = ragged.matmul(ROUTE.dispatch(x), w) * ragged.per_group(jnp.arange(1.0, 5.0))
    hidden = ragged.concat([hidden.map(jnp.tanh), hidden])
    hidden = GroupedTensor(hidden.data[:16], ROUTE.first_dims)
    return jnp.sum(jnp.sin(ROUTE.combine(hidden, weights))) + jnp.sum(hidden.mean(-2))


@pytest.mark.parametrize("where", ["replicated", pytest.param("in a shard_map", marks=pytest.mark.long)])
def test_explicit_meshes_with_replicated_operands(where: str) -> None:
    """What is on every device works, forward and backward: equal to the same without a mesh."""
    rng = np.random.default_rng(4)
    args = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 4), (4, 4, 4), (8, 2))]
    step = jax.value_and_grad(layer, (0, 1, 2))
    want = jax.jit(step)(*args)
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        if where == "replicated":
            got = jax.jit(step)(*jax.device_put(args, NamedSharding(mesh, P())))
        else:  # every device takes its own of four steps
            stacked = [jnp.stack([x] * 4) for x in args]
            local = jax.shard_map(
                lambda *args: jax.tree.map(lambda x: x[None], step(*(x[0] for x in args))),
                in_specs=P(("a", "b")),
                out_specs=P(("a", "b")),
            )
            sharded = jax.device_put(stacked, NamedSharding(mesh, P(("a", "b"))))
            got = jax.tree.map(lambda x: np.asarray(x)[3], jax.jit(local)(*sharded))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert math.isfinite(float(np.sum(w))) and np.abs(w).max() > 0
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)
