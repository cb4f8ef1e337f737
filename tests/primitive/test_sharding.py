"""On meshes: `shard_map` over all or some axes, operands that vary over different ones, and axes of type `Explicit`."""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor, route
from tests.contract.meshes import mesh_of

GROUPS, TOKENS, D = 3, 5, 2


def two_by_two(kind: str = "auto") -> jax.sharding.Mesh:
    return mesh_of(kind, a=2, b=2)


# --- maps over some axes only, of operands that vary over some of them ------------------------------------------------


def loop(x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss of `local` below and its gradients by `x` and `weights`, token by token, in float64."""
    value, dx, dw = 0.0, np.zeros_like(x), np.zeros_like(weights)
    for t, chosen in enumerate(ids):
        held = [j for j, group in enumerate(chosen) if 0 <= group < GROUPS]
        factor = sum(weights[t, j] * (1 + chosen[j]) for j in held)
        value += np.sin(factor * x[t]).sum()
        dx[t] = factor * np.cos(factor * x[t])
        for j in held:
            dw[t, j] = np.sum((1 + chosen[j]) * x[t] * np.cos(factor * x[t]))
    return value, dx, dw


VARYING = [
    ("ab", "b", "ab", "a"),
    ("a", "a", "", ""),
    ("a", "", "a", ""),
    ("ab", "a", "b", ""),
    ("a", "", "", "a"),
    ("ab", "", "b", "a"),
]


@pytest.mark.long
@pytest.mark.parametrize("names, axes", [(names, axes) for names, *axes in VARYING])
def test_route_of_operands_over_different_axes(names: str, axes: list[str]) -> None:
    """The axes of the map, and those over which tokens, ids and weights vary. Values, and gradients taken inside and
    outside of the map, are those of a loop over devices and tokens, for any ids."""
    specs = tuple(P(tuple(over)) for over in axes)

    def local(x: Array, ids: Array, weights: Array) -> Array:
        routing = route(ids[0], GROUPS)
        y = routing.dispatch(x[0]) * ragged.per_group(jnp.arange(1.0, GROUPS + 1))
        loss = jnp.sum(jnp.sin(routing.combine(y, weights[0])))
        return jax.lax.psum(loss, tuple(sorted(jax.typeof(loss).manual_axis_type.varying)))

    def local_gradients(*args: Array) -> Any:
        return jax.value_and_grad(local, (0, 2))(*args)

    options: dict[str, Any] = {"mesh": two_by_two(), "in_specs": specs, "axis_names": set(names)}
    outside = jax.value_and_grad(jax.shard_map(local, out_specs=P(), **options), (0, 2))
    inside = jax.shard_map(local_gradients, out_specs=(P(), (specs[0], specs[2])), **options)
    run = jax.jit(lambda *args: (outside(*args), inside(*args)))

    rng, used = np.random.default_rng(0), "".join(axes)
    place = {"": lambda i, j: 0, "a": lambda i, j: i, "b": lambda i, j: j, "ab": lambda i, j: 2 * i + j}
    shapes = [(2 ** len(over), TOKENS, n) for over, n in zip(axes, (D, 2, 2), strict=True)]
    for number in range(8):
        x, weights = rng.normal(size=shapes[0]), rng.normal(size=shapes[2])
        ids = rng.integers(-1, GROUPS + 1, shapes[1]) if number else np.zeros(shapes[1], int)
        value, dx, dw = 0.0, np.zeros_like(x), np.zeros_like(weights)
        for i in range(2 if "a" in used else 1):
            for j in range(2 if "b" in used else 1):
                at = [place[over](i, j) for over in axes]
                term, by_x, by_weights = loop(x[at[0]], ids[at[1]], weights[at[2]])
                value, dx[at[0]], dw[at[2]] = value + term, dx[at[0]] + by_x, dw[at[2]] + by_weights
        for got in run(jnp.float32(x), jnp.int32(ids), jnp.float32(weights)):
            for each, want in zip(jax.tree.leaves(got), (value, dx, dw), strict=True):
                np.testing.assert_allclose(each, want, rtol=1e-5, atol=1e-5)


ROWS = np.random.default_rng(2).normal(size=(7, 2)).astype(np.float32)
W = np.random.default_rng(3).normal(size=(3, 2, 4)).astype(np.float32)


def packed(groups: list[np.ndarray], rows: int = 7) -> np.ndarray:
    whole = np.concatenate(groups)
    return np.pad(whole, ((0, rows - len(whole)), (0, 0)))


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


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


@pytest.mark.long
@pytest.mark.parametrize("names", ["a", "ab"])
def test_sizes_that_vary(names: str) -> None:
    """Each device has sizes of its own; in a map over one axis of two, and over both. The buffer doesn't vary."""

    def local(sizes: Array) -> dict[str, Array]:
        x = GroupedTensor(jnp.asarray(ROWS), sizes[0])
        return {name: run(x)[None] for name, (run, _) in OPERATIONS.items()}

    options: Any = {"in_specs": P("a"), "out_specs": P("a"), "axis_names": set(names)}
    run = jax.jit(jax.shard_map(local, mesh=two_by_two(), **options))
    for sizes in ([[3, 0, 2], [1, 4, 0]], [[0, 0, 0], [1, 2, 4]], [[4, 3, 0], [0, 0, 1]]):
        got = run(jnp.array(sizes, jnp.int32))
        for name, (_, want) in OPERATIONS.items():
            for each, its in zip(got[name], sizes, strict=True):
                groups = np.split(ROWS.astype(np.float64), np.cumsum(its))[:3]
                np.testing.assert_allclose(each, want(groups), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_gradients_in_a_partly_manual_map(recipe: str | None) -> None:
    """The buffer varies, the sizes don't. A quantised product's gradients are nearly those of the exact one."""

    def local(data: Array) -> Array:
        x = GroupedTensor(data[0], jnp.array([3, 0, 2], jnp.int32))
        return jnp.sum(ragged.matmul(x, jnp.asarray(W), recipe=recipe).data)[None]

    run = jax.shard_map(local, mesh=two_by_two(), in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    got = jax.jit(jax.grad(lambda data: run(data).sum()))(jnp.stack([jnp.asarray(ROWS), -2 * jnp.asarray(ROWS)]))
    want = packed([np.broadcast_to(w.sum(1), (size, 2)) for w, size in zip(W, (3, 0, 2), strict=True)])
    tolerance = 1e-6 if recipe is None else 2**-3  # e4m3 rounds by up to 1 / 16, both operands
    for each in got:
        np.testing.assert_allclose(each, want, atol=tolerance * np.abs(W).sum(2).max())


@pytest.mark.long
def test_products_in_turn_in_a_map_next_to_an_explicit_axis() -> None:
    """The contracted axis is sharded over an axis that the map isn't over; so is its cotangent."""
    rng, ids = np.random.default_rng(1), np.repeat(np.arange(3), (3, 0, 2))
    x, w, v = (rng.normal(size=shape).astype(np.float32) for shape in ((14, 4), (3, 4, 4), (3, 4, 3)))

    def two(x: Array, w: Array, v: Array) -> Array:
        return ragged.matmul(ragged.matmul(GroupedTensor(x, jnp.array([3, 0, 2], jnp.int32)), w), v).data

    dx, dw, dv = (np.zeros(each.shape) for each in (x, w, v))
    for row, group in zip([*range(5), *range(7, 12)], [*ids, *ids], strict=True):
        hidden = x[row] @ w[group]
        dy = 2 * hidden @ v[group]
        dv[group] += np.outer(hidden, dy)
        dw[group] += np.outer(x[row], dy @ v[group].T)
        dx[row] = dy @ v[group].T @ w[group].T
    with jax.set_mesh(two_by_two("explicit")):
        run = jax.shard_map(two, in_specs=(P("a"), P(), P()), out_specs=P("a"), axis_names={"a"})
        gradients = jax.jit(jax.grad(lambda *args: jnp.sum(run(*args) ** 2), (0, 1, 2)))
        got = gradients(jax.device_put(x, P("a", "b")), jnp.asarray(w), jnp.asarray(v))
    for each, want in zip(got, (dx, dw, dv), strict=True):
        np.testing.assert_allclose(each, want, rtol=1e-5, atol=1e-4)


# --- sums over devices are rounded once -------------------------------------------------------------------------------

PARTS = np.array([256, 1, -256, 0], np.float32)
"""Their sum is 1. Added up two by two in bfloat16, it is 0: 257 is rounded to 256."""
ONE = jnp.array([1], jnp.int32)


def gradient(function: Callable[..., Array], *shapes: tuple[int, ...], **options: Any) -> Array:
    """By the one element of a first argument that all four devices have; each has a part of the others, of ones, and
    one of `PARTS` for a cotangent."""
    args = [jnp.ones((1, 1), jnp.bfloat16), *(jnp.ones((4, *shape), jnp.bfloat16) for shape in shapes)]
    specs = P(), *(P(("a", "b")) for _ in shapes)
    run = jax.shard_map(function, mesh=two_by_two(), in_specs=specs, out_specs=P(("a", "b")), **options)
    out, pull = jax.vjp(run, *args)
    return pull(jnp.asarray(PARTS, out.dtype).reshape(out.shape))[0]


def product(x: Array, w: Array, **options: Any) -> Array:
    return ragged.matmul(GroupedTensor(x, jnp.array([len(x)], jnp.int32)), w, **options).data


def of_replicated(wrt: str, how: str, **options: Any) -> Array:
    """The gradient of the operand that all devices have, of which each has some rows or columns of the other."""
    shapes, specs = ((1, 1), (1, 1, 4), (1, 4)), (P(), P(None, None, "a"), P(None, "a"))
    if wrt == "rhs":
        shapes, specs = ((4, 1), (1, 1, 1), (4, 1)), (P("a"), P(), P("a"))
    x, w, dout = (jnp.ones(shape, jnp.bfloat16) for shape in shapes)
    dout *= jnp.asarray(PARTS, jnp.bfloat16).reshape(dout.shape)
    given: Any = {"mesh": two_by_two(), "in_specs": specs[:2], "out_specs": specs[2]}

    def sharded(x: Array, w: Array) -> Array:
        return ragged.sharded_matmul(GroupedTensor(x, jnp.array([len(x)], jnp.int32)), w, **given, **options).data

    mapped = jax.shard_map(lambda x, w: product(x, w, **options), axis_names={"a"}, **given)
    return jax.vjp(sharded if how == "sharded_matmul" else mapped, x, w)[1](dout)[wrt == "rhs"]


def varying_ids(of: Array) -> Array:
    return 0 * of.astype(jnp.int32).reshape(-1)


def rounded_once() -> dict[str, Array]:
    """Sums in bfloat16 over devices, each of them 1."""
    unit = jnp.ones((1, 1, 1), jnp.bfloat16)
    found = {
        "what existing_out adds": gradient(lambda old, x: product(x, unit, existing_out=old), (1,)),
        "dispatched rows": gradient(lambda x, of: route(varying_ids(of), 1).dispatch(x).data, (1,)),
        "rows that an index gathers": gradient(
            lambda x, of: ragged.matmul(route(varying_ids(of), 1).gathered(x), unit).data, (1,)
        ),
        "gathered rows of matrices that differ": gradient(
            lambda x, w: ragged.matmul(route(jnp.zeros(1, jnp.int32), 1).gathered(x), w[None]).data, (1,)
        ),
        "a map": gradient(lambda x, w: product(x, w[None]), (1,)),
    }
    for wrt in ("lhs", "rhs"):
        found |= {f"{wrt}, a map over one axis": of_replicated(wrt, "map")}
        found |= {f"{wrt}, a recipe": of_replicated(wrt, "map", recipe="rowwise")}
        found |= {f"{wrt}, sharded_matmul": of_replicated(wrt, "sharded_matmul")}
        found |= {f"{wrt}, unchecked": of_replicated(wrt, "sharded_matmul", check_vma=False)}

    def rows_of_one_token(x: Array, like: Array) -> Array:  # two on each of two devices: one sum
        return route(0 * like.astype(jnp.int32), 1).dispatch(x).data

    mapped = jax.shard_map(rows_of_one_token, mesh=two_by_two(), in_specs=(P(), P("a")), out_specs=P("a"))
    pull = jax.vjp(lambda x: mapped(x, jnp.ones((2, 2))), jnp.ones((1, 1), jnp.bfloat16))[1]
    return found | {"a token of many rows": pull(jnp.asarray(PARTS, jnp.bfloat16)[:, None])[0]}


@pytest.mark.long
def test_sums_over_devices_are_rounded_once() -> None:
    """They are in the dtype in which one device adds up."""
    run = jax.jit(rounded_once)
    for name, got in run().items():
        assert got.dtype == jnp.bfloat16 and np.asarray(got).item() == 1, name
    text = run.lower().as_text()
    # XLA for CPUs adds up what devices have of bfloat16 in float32; others may not.
    assert re.search(r"all_reduce.*\n *\^bb0\(%\w+: tensor<[fi]32>", text)
    assert not re.search(r"all_reduce.*\n *\^bb0\(%\w+: tensor<bf16>", text)


def test_sums_of_products_over_an_explicit_axis_are_rounded_once() -> None:
    """The contracted dim is cut over two devices; also where `existing_out` is added, and integers give a float."""

    def contracted(x: Array, w: Array, **options: Any) -> Array:
        return ragged.grouped_matmul(x, w, ONE, **options)

    with jax.set_mesh(two_by_two("explicit")):
        for dtype, parts, options in (
            ("bfloat16", [256, 1, -256, -3], {"existing_out": jnp.full((1, 1), 3, jnp.bfloat16)}),
            ("int32", [2**24, 1, -(2**24), 0], {"preferred_element_type": jnp.float32}),
        ):
            x = jax.device_put(jnp.asarray(parts, dtype)[None], P(None, "a"))
            w = jax.device_put(jnp.ones((1, 4, 1), dtype), P(None, "a"))
            run = jax.jit(lambda x, w, options=options: contracted(x, w, **options))
            assert np.asarray(run(x, w)).item() == 1
            assert re.search(r"all_reduce.*\n *\^bb0\(%\w+: tensor<[fi]32>", run.lower(x, w).as_text())


@pytest.mark.parametrize("recipe", [None, pytest.param("rowwise", marks=pytest.mark.long)])
def test_gradients_that_are_left_unreduced(recipe: str | None) -> None:
    """Where the type of what all devices have says so."""
    with jax.set_mesh(two_by_two("explicit")):
        x, w = jax.device_put(jnp.ones((4, 1)), P("a")), jax.reshard(jnp.ones((1, 1, 1)), P(reduced=frozenset("a")))
        specs: Any = {"in_specs": (P("a"), P(reduced=frozenset("a"))), "out_specs": P("a")}
        run = jax.shard_map(lambda x, w: product(x, w, recipe=recipe), **specs)
        dw = jax.jit(lambda x, w: jax.vjp(run, x, w)[1](run(x, w))[1])(x, w)
        assert jax.typeof(dw).sharding.spec.unreduced == {"a"}
        assert np.asarray(jax.reshard(dw, P())).item() == 4


def test_gradients_of_a_result_that_is_left_unreduced() -> None:
    """A recipe quantises the cotangent, whose type says that all devices have the same."""
    with jax.set_mesh(two_by_two("explicit")):
        x, w = jax.device_put(jnp.ones((4, 2)), P(None, "a")), jax.device_put(jnp.ones((1, 2, 1)), P(None, "a"))

        def loss(w: Array) -> Array:
            rows = ragged.GroupedTensor(x, jnp.array([4], jnp.int32))
            out = ragged.matmul(rows, w, recipe="rowwise", out_sharding=P(unreduced=frozenset("a")))
            return jax.reshard(out.data, P()).sum()

        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(w), np.full((1, 2, 1), 4))


def test_validate_sizes_that_vary() -> None:
    """Each device checks its own; one that finds bad sizes is enough."""

    def local(sizes: Array) -> Array:
        return GroupedTensor(jnp.asarray(ROWS), sizes[0]).validate().packed_dims[None]

    run = eqx.filter_jit(jax.shard_map(local, mesh=two_by_two(), in_specs=P("a"), out_specs=P("a")))
    sizes = jnp.array([[3, 0, 2], [1, 4, 0]], jnp.int32)
    np.testing.assert_array_equal(run(sizes), sizes)
    with pytest.raises(eqx.EquinoxRuntimeError, match="the size 4 of group 1 in `first_dims` is too large"):
        jax.block_until_ready(run(sizes.at[1, 0].set(4)))


# --- explicit axes ----------------------------------------------------------------------------------------------------

DIMS, GROUP_1 = jnp.array([3, 0, 4, 1], jnp.int32), jnp.array([0, 1, 0, 0], jnp.int32)
ROUTE = route(jnp.array([[0, 1]] * 4 + [[3, 2]] * 4, jnp.int32), 4)
MATRICES = jnp.asarray(np.random.default_rng(5).normal(size=(4, 4, 4)), jnp.float32)
BUFFER = jnp.asarray(np.random.default_rng(6).normal(size=(8, 4)), jnp.float32)


def rows_of(x: Array) -> GroupedTensor:
    return GroupedTensor(x, DIMS)


def twice(x: Array) -> GroupedTensor:
    return GroupedTensor(jnp.concatenate([x, x]), ROUTE.first_dims)


# Of an array [8, 4] that is sharded: what is called, and how its result is sharded if the array's rows are, over "a".
CALLS: dict[str, tuple[Callable[[Array], Any], P]] = {
    "matmul": (lambda x: ragged.matmul(rows_of(x), MATRICES), P("a", None)),
    "matmul, shared": (lambda x: ragged.matmul(rows_of(x), MATRICES[0]), P("a", None)),
    "matmul by a shared": (lambda x: ragged.matmul(jnp.ones((4, 4, 8)), x), P(None, None, None)),
    "mxfp8": (lambda x: ragged.matmul(rows_of(x), MATRICES, recipe="mxfp8"), P("a", None)),
    "existing_out": (lambda x: ragged.matmul(rows_of(BUFFER), MATRICES, existing_out=x), P("a", None)),
    "grouped_matmul": (lambda x: ragged.grouped_matmul(x, MATRICES, DIMS), P("a", None)),
    "transposed_grouped_matmul": (lambda x: ragged.transposed_grouped_matmul(x.T, x, DIMS), P(None, None, None)),
    "a vmap": (lambda x: jax.vmap(lambda x: ragged.grouped_matmul(x[None], MATRICES, GROUP_1))(x), P("a", None, None)),
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
    "combine": (lambda x: ROUTE.combine(twice(x)), P("a", None)),
    "weights": (lambda x: ROUTE.combine(twice(BUFFER), jnp.stack([x.sum(1)] * 2, 1)), P("a", None)),
}


def every_call(x: Array) -> dict[str, Any]:
    return {name: call(x) for name, (call, _) in CALLS.items()}


def every_gradient(x: Array) -> Array:
    """Of all that is smooth."""

    def loss(x: Array) -> Array:
        smooth = [call(x) for name, (call, _) in CALLS.items() if name not in ("quantize", "dequantize", "route")]
        floats = [leaf for leaf in jax.tree.leaves(smooth) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum((jnp.sum(jnp.sin(leaf)) for leaf in floats), jnp.float32(0))

    return jax.grad(loss)(x)


EXPLICIT = [(every_call, P("a", None)), (every_call, P("a", "b")), (every_call, P()), (every_gradient, P("a", None))]


@pytest.mark.long
@pytest.mark.parametrize("call, given", EXPLICIT, ids=range(4))
def test_explicit_axes(call: Callable[[Array], Any], given: P) -> None:
    """The numbers of one device, gradients too, and a type that follows from the operands'."""
    want = jax.jit(call)(BUFFER)
    with jax.set_mesh(two_by_two("explicit")):
        got = jax.jit(call)(jax.device_put(BUFFER, given))
    for name, (_, spec) in CALLS.items() if call is every_call and given == P("a", None) else ():
        assert jax.typeof(jax.tree.leaves(got[name])[0]).sharding.spec == spec, name
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        g, w = (np.asarray(z).astype(np.float64) for z in (g, w))
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_what_needs_sizes_or_values_refuses_explicit_axes() -> None:
    """With one text, whatever is called."""

    def sizes_of(x: Array) -> GroupedTensor:
        return GroupedTensor(jnp.ones((8, 4)), x[:, 0].astype(jnp.int32))

    calls: list[tuple[Callable[[Array], Any], str, str]] = [
        (lambda x: GroupedTensor.from_list([x]), "GroupedTensor.from_list", "groups.0"),
        (lambda x: rows_of(x)[2], "GroupedTensor[2]", "x.data"),
        (lambda x: sizes_of(x).mask, "GroupedTensor.mask", "first_dims"),
    ]
    with jax.set_mesh(mesh_of("explicit", a=2)):
        x = jax.device_put(jnp.ones((8, 4)), P("a", None))
        for call, name, operand in calls:
            for run in (call, lambda x, call=call: jax.eval_shape(call, x)):
                with pytest.raises(NotImplementedError) as error:
                    run(x)
                first, got, hint = str(error.value).split("\n")
                assert first == f"`{name}`: `{operand}` is sharded over a mesh axis of type `Explicit`."
                assert got.startswith("Got ") and "@a" in got
                assert hint == "Call it inside `jax.shard_map`, or make that mesh axis `Auto`."
