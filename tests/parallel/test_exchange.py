"""`exchange`: a mixture of experts over devices equals the one of all tokens on one device."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from tests import constants
from tests.primitive.test_partition import collectives

N, TOKENS, TOP_K, GROUPS, D, F = 4, 12, 2, 8, 6, 5  # tokens of a device


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def inputs(seed: int = 0, skewed: bool = True) -> dict[str, Any]:
    """Tokens of all devices, some to no group; with idle groups, and groups that most want."""
    rng = np.random.default_rng(seed)
    likely = np.array([8, 4, 2, 1, 0, 0, 1, 3.0]) if skewed else np.ones(GROUPS)
    ids = rng.choice(GROUPS, (N * TOKENS, TOP_K), p=likely / likely.sum())
    ids = np.where(rng.random(ids.shape) < 0.1, rng.choice([-1, GROUPS, 1000], ids.shape), ids)
    weights = rng.normal(size=ids.shape)
    weights[(ids < 0) | (ids >= GROUPS)] = np.nan  # may be anything
    return {
        "x": rng.normal(size=(N * TOKENS, D)),
        "up": rng.normal(size=(GROUPS, D, F)),
        "down": rng.normal(size=(GROUPS, F, D)),
        "ids": ids,
        "weights": weights,
    }


def oracle(x: Any, up: Any, down: Any, ids: Any, weights: Any, keep: Any = None) -> np.ndarray:
    """Token by token, in float64."""
    out = np.zeros_like(x)
    for t, chosen in enumerate(ids):
        for j, group in enumerate(chosen):
            if 0 <= group < GROUPS and (keep is None or keep[t, j]):
                out[t] += weights[t, j] * (np.tanh(x[t] @ up[group]) @ down[group])
    return out


def dense(x: Array, up: Array, down: Array, ids: Array, weights: Array) -> Array:
    """The same for gradients: each token has copies of its experts' matrices."""
    is_group = (ids >= 0) & (ids < GROUPS)
    ids, weights = jnp.where(is_group, ids, 0), jnp.where(is_group, weights, 0)
    hidden = jnp.tanh(jnp.einsum("td,tjdf->tjf", x, up[ids]))
    return jnp.einsum("tjf,tjfd,tj->td", hidden, down[ids], weights)


def layer(transport: str, **options: Any) -> Any:
    def local(x: Array, up: Array, down: Array, ids: Array, weights: Array) -> Array:
        def experts(rows: GroupedTensor) -> GroupedTensor:
            return ragged.matmul(ragged.matmul(rows, up).map(jnp.tanh), down)

        ex = ragged.exchange(ragged.route(ids, GROUPS), transport=transport, **options)
        if ex._chunks:
            return ex.map(experts, x, weights)
        return ex.combine(experts(ex.dispatch(x)), weights)

    return local


def mapped(local: Any, mesh: Any = None, tokens: Any = "expert", **options: Any) -> Any:
    specs = P(tokens), P("expert"), P("expert"), P(tokens), P(tokens)
    return jax.shard_map(local, mesh=mesh or mesh_of(expert=N), in_specs=specs, out_specs=P(tokens), **options)


def arrays(given: dict[str, Any]) -> list[Array]:
    return [jnp.asarray(x, jnp.int32 if name == "ids" else jnp.float32) for name, x in given.items()]


def gradients(f: Any) -> Any:
    """By rows, matrices and weights."""

    def loss(x: Array, up: Array, down: Array, ids: Array, weights: Array) -> Array:
        return jnp.sum(jnp.sin(f(x, up, down, ids, weights)))

    return jax.jit(jax.grad(loss, (0, 1, 2, 4)))


def emulated(operand: Array, output: Array, *sizes: Array, axis_name: str) -> Array:
    """`lax.ragged_all_to_all`, as its documentation has it, from gathered operands."""
    operands, (inputs, sent, outputs, _) = (
        lax.all_gather(operand, axis_name),
        (lax.all_gather(s, axis_name) for s in sizes),
    )
    me, index = lax.axis_index(axis_name), jnp.arange(output.shape[0])
    for device in range(operands.shape[0]):
        place = index - outputs[device, me]
        rows = operands[device].at[inputs[device, me] + place].get(mode="fill", fill_value=0)
        output = jnp.where(((place >= 0) & (place < sent[device, me]))[:, None], rows, output)
    return output


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport "ragged" runs on the CPU too, which has no such collective."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)


TRANSPORTS = ("dense", "ring", "ragged")


@pytest.mark.usefixtures("emulation")
@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_values_and_gradients(transport: str, check_vma: bool) -> None:
    """Of rows, matrices and weights."""
    given = inputs()
    run = mapped(layer(transport), check_vma=check_vma)
    case = transport, check_vma  # it picks which operands are constants
    y = constants.run(case, run, *arrays(given), maps=False)
    np.testing.assert_allclose(y, oracle(**given), rtol=1e-4, atol=1e-5)

    by_exchange = constants.run(case, gradients(run), *arrays(given), maps=False)
    for g, w in zip(by_exchange, gradients(dense)(*arrays(given)), strict=True):
        assert np.isfinite(g).all() and np.abs(w).max() > 0.1
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transport", ["ring", pytest.param("dense", marks=pytest.mark.long)])
def test_a_token_is_summed_over_devices_before_it_is_rounded(transport: str) -> None:
    """256 + 1 of one device's groups and -256 + 0 of another's are 1, in bfloat16 too."""

    def local(x: Array, values: Array) -> Array:
        ex = ragged.exchange(ragged.route(jnp.array([[0, 1, 2, 3]], jnp.int32), 4), transport=transport)
        return ex.combine(ex.dispatch(x) * ragged.per_group(values))

    run = jax.shard_map(local, mesh=mesh_of(expert=2), in_specs=P("expert"), out_specs=P("expert"))
    out = jax.jit(run)(jnp.ones((2, 1), jnp.bfloat16), jnp.array([256, 1, -256, 0], jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float64), 1)


def test_chunks_come_back_in_order() -> None:
    """Each token's own row."""

    def local(x: Array) -> Array:
        ids = jnp.arange(3, dtype=jnp.int32) % 2
        return ragged.exchange(ragged.route(ids, 2), transport="dense", chunks=2).map(lambda rows: rows, x)

    x = jnp.arange(6.0).reshape(6, 1)
    run = jax.shard_map(local, mesh=mesh_of(expert=2), in_specs=P("expert"), out_specs=P("expert"))
    np.testing.assert_array_equal(jax.jit(run)(x), x)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["dense", "ring"])
def test_transformations(transport: str) -> None:
    """Forward mode, `vmap`, remat, and forward over reverse."""
    x, up, down, ids, weights = arrays(inputs(1))
    weights = jnp.nan_to_num(weights)

    def f(run: Any) -> Any:
        return lambda x, weights: run(x, up, down, ids, weights)

    run, remat, args = f(mapped(layer(transport))), f(mapped(jax.checkpoint(layer(transport)))), (x, weights)
    one, pairs = f(dense), (jnp.stack([x, -x]), jnp.stack([weights, weights]))

    def twice(g: Any) -> Any:
        return jax.jvp(jax.grad(lambda x: jnp.sin(g(x, weights)).sum()), (x,), (x,))

    def results(run: Any, remat: Any) -> Any:
        forward = jax.jvp(run, args, args)
        return forward, jax.vmap(run)(*pairs), jax.grad(lambda x: remat(x, weights).sum())(x), twice(run)

    got, want = (jax.jit(results, static_argnums=(0, 1))(*runs) for runs in ((run, remat), (one, one)))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=2e-4)


@pytest.mark.usefixtures("emulation")
@pytest.mark.long
@pytest.mark.parametrize("transport, chunks", [("dense", 5), ("ring", 3), ("ragged", 3)])
def test_chunks(transport: str, chunks: int) -> None:
    """The numbers of one chunk, from as many exchanges; also where they don't divide the tokens."""
    given = arrays(inputs(6))
    one, several = (mapped(layer(transport, chunks=n)) for n in (1, chunks))
    np.testing.assert_allclose(jax.jit(several)(*given), jax.jit(one)(*given), rtol=1e-5, atol=1e-6)
    for g, w in zip(gradients(several)(*given), gradients(one)(*given), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)
    # The emulation gathers rows; nothing else that is gathered has their width.
    sent = {"dense": "all_to_all", "ring": "reduce_scatter", "ragged": "all_gather"}[transport]
    counts = [jax.jit(run).lower(*given).as_text().count(f"stablehlo.{sent}") for run in (one, several)]
    assert counts[1] == chunks * counts[0] > 0


@pytest.mark.long
def test_chunks_on_one_device() -> None:
    """The same bits, gradients too."""
    given = arrays(inputs(7))
    runs = [mapped(layer("dense", chunks=chunks), mesh_of(expert=1)) for chunks in (1, 3)]
    for one, several in zip(*((jax.jit(run)(*given), *gradients(run)(*given)) for run in runs), strict=True):
        np.testing.assert_array_equal(one, several)


def rounded(x: np.ndarray, scaling: str) -> np.ndarray:
    """Rows in float8_e4m3fn and back, in NumPy, by scales that are powers of two: of each 32 elements, or of a row."""
    out = np.zeros_like(x)
    for row, values in enumerate(x):
        block = 32 if scaling == "mx" else len(values)
        for i in range(0, len(values), block):
            part = values[i : i + block]
            scale = 2.0 ** np.ceil(np.log2(np.abs(part).max() / 448))
            out[row, i : i + block] = (part / scale).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale
    return out


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("wire, width", [("mxfp8", 80 + 3), ("rowwise", 80 + 4)])
@pytest.mark.parametrize("transport", ["dense", "ring"])
def test_wire(transport: str, wire: str, width: int, dtype: Any) -> None:
    """Rows travel in bytes, one an element and the scales'; derivatives are those of rows that don't."""
    given = inputs(8)
    x = jnp.asarray(np.random.default_rng(9).normal(size=(N * TOKENS, 80)), dtype)

    def local(x: Array, ids: Array, wire: Any) -> Array:
        return ragged.exchange(ragged.route(ids, GROUPS), transport=transport, wire=wire).dispatch(x).data

    def dispatched(wire: Any) -> Any:
        specs, run = (P("expert"), P("expert")), lambda x, ids: local(x, ids, wire)
        return lambda x: jax.shard_map(run, mesh=mesh_of(expert=N), in_specs=specs, out_specs=P("expert"))(x, ids)

    ids = arrays(given)[3]
    want = rounded(np.asarray(x, np.float32), "mx" if wire == "mxfp8" else "row")
    full, run = dispatched(None), dispatched(wire)
    np.testing.assert_array_equal(jax.jit(run)(x), jax.jit(full)(jnp.asarray(want, dtype)))
    names = {"dense": "all_to_all", "ring": "all_gather"}
    found = re.findall(rf"stablehlo.{names[transport]}.*-> tensor<\d+x(\d+)xui8>", jax.jit(run).lower(x).as_text())
    assert found == [str(width)]

    def derivatives(x: Array) -> Any:
        pull = jax.grad(lambda x: jnp.sum(run(x).astype(jnp.float32) ** 2 / 2))
        return jax.jvp(run, (x,), (x,))[1], jax.jvp(pull, (x,), (x,)), jax.vmap(run)(jnp.stack([x, -x]))

    def expected(x: Array) -> Any:
        there, transpose = jax.vjp(full, x)
        rounded = run(x)
        return there, (transpose(rounded)[0], transpose(there)[0]), jnp.stack([rounded, -rounded])

    for got, want in zip(*map(jax.tree.leaves, (jax.jit(derivatives)(x), jax.jit(expected)(x))), strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=1e-2)


def kept(ids: np.ndarray, each: int, chunks: int = 1) -> np.ndarray:
    """The rule: of a device's rows to another one, in each chunk, its first tokens'."""
    keep = np.zeros(ids.shape, bool)
    for first in range(0, len(ids), TOKENS // chunks):  # of a chunk
        seen = dict.fromkeys(range(N), 0)
        for t in range(first, first + TOKENS // chunks):
            for j, group in enumerate(ids[t]):
                if 0 <= group < GROUPS:
                    to = group // (GROUPS // N)
                    keep[t, j] = seen[to] < each
                    seen[to] += 1
    return keep


@pytest.mark.usefixtures("emulation")
@pytest.mark.sampled
@pytest.mark.parametrize("chunks, each", [(1, 5), (3, 2)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_capacity(transport: str, chunks: int, each: int) -> None:
    """What has no room is counted and is zero; the first tokens have it."""
    given = inputs(2)
    keep, options = kept(given["ids"], each, chunks), {"capacity": N * chunks * each + 3, "chunks": chunks}

    def local(*args: Array) -> tuple[Array, Array]:
        ex = ragged.exchange(ragged.route(args[3], GROUPS), transport=transport, **options)
        assert ex.capacity == N * chunks * each
        whole, experts = layer(transport, **options)(*args), args[1:3]
        at_once = ex.combine(
            ragged.matmul(ragged.matmul(ex.dispatch(args[0]), experts[0]).map(jnp.tanh), experts[1]), args[4]
        )
        return jnp.stack([whole, at_once], 1), ex.dropped[None]

    specs = P("expert"), P("expert"), P("expert"), P("expert"), P("expert")
    run = jax.shard_map(local, mesh=mesh_of(expert=N), in_specs=specs, out_specs=(P("expert"), P("expert")))
    out, dropped = jax.jit(run)(*arrays(given))
    for each_way in (out[:, 0], out[:, 1]):
        np.testing.assert_allclose(each_way, oracle(**given, keep=keep), rtol=1e-4, atol=1e-5)
    real = (given["ids"] >= 0) & (given["ids"] < GROUPS)
    lost = (real & ~keep).reshape(N, -1).sum(1)
    assert dropped.tolist() == lost.tolist() and lost.max() > 0


def test_what_each_device_gets() -> None:
    """Its groups, in the order of devices and tokens; zeros in the tail."""
    given = inputs(3)

    def local(x: Array, ids: Array) -> tuple[Array, Array]:
        ex = ragged.exchange(ragged.route(ids, GROUPS), transport="dense")
        return ex.dispatch(x).data[None], ex.sizes[None]

    run = jax.shard_map(local, mesh=mesh_of(expert=N), in_specs=(P("expert"),) * 2, out_specs=(P("expert"),) * 2)
    x, ids = arrays(given)[0], arrays(given)[3]
    data, sizes = jax.jit(run)(x, ids)
    for device in range(N):
        want = []
        for group in range(device * GROUPS // N, (device + 1) * GROUPS // N):
            tokens = [t for t, chosen in enumerate(given["ids"]) for g in chosen if g == group]
            assert sizes[device, group % (GROUPS // N)] == len(tokens)
            want += tokens
        np.testing.assert_array_equal(data[device, : len(want)], np.asarray(x)[want])
        assert not data[device, len(want) :].any()


@pytest.mark.parametrize("options", [{}, {"transport": "ring"}, {"wire": "mxfp8"}, {"capacity": N}], ids=str)
def test_no_tokens(options: dict[str, Any]) -> None:
    given = arrays(inputs())

    def run(x: Array, up: Array, down: Array, ids: Array, weights: Array) -> Array:
        return mapped(layer(**{"transport": "dense", **options}))(x[:0], up, down, ids[:0], weights[:0])

    assert jax.jit(run)(*given).shape == (0, D)


def test_float64() -> None:
    """Where sums of integers are int64 unless told otherwise."""
    given = inputs(10)
    with jax.enable_x64(True):
        args = [jnp.asarray(x, jnp.int64 if name == "ids" else jnp.float64) for name, x in given.items()]
        out = jax.jit(mapped(layer("ring")))(*args)
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, oracle(**given), rtol=1e-12)


def test_ragged(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an emulation, for the CPU has none: the same bits as "dense"."""
    given = arrays(inputs(4))
    want = jax.jit(mapped(layer("dense")))(*given)
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    np.testing.assert_array_equal(jax.jit(mapped(layer("ragged")))(*given), want)


def test_ragged_is_mapped() -> None:
    """Tokens and their groups: the exchanges of all elements in one, forward and backward."""
    x, up, down, ids, weights = arrays(inputs())

    def loss(x: Array, up: Array, down: Array, ids: Array, weights: Array) -> Array:
        local = jax.vmap(layer("ragged"), (0, None, None, 0, 0))
        rows, matrices = P(None, "expert"), P("expert")
        specs = rows, matrices, matrices, rows, rows
        run = jax.shard_map(local, mesh=mesh_of(expert=N), in_specs=specs, out_specs=rows)
        return jnp.sum(run(x, up, down, ids, weights))

    args = *(jnp.stack([each] * 2) for each in (x, ids, weights)), up, down
    grads = jax.jit(lambda x, ids, weights, up, down: jax.value_and_grad(loss, (0, 1, 2))(x, up, down, ids, weights))
    text = grads.trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("ragged_all_to_all") == 4


def test_explicit_axes_of_others() -> None:
    """Tokens that are cut, inside the map, over an `Explicit` axis that it isn't over; `d` may be."""
    mesh = jax.make_mesh((2, N), ("data", "expert"))

    def typed(x: Any, ids: Any) -> Any:
        given = arrays(inputs())
        local = jax.shard_map(
            lambda x, ids: ragged.exchange(ragged.route(ids, GROUPS)).map(lambda rows: rows, x),
            in_specs=P("expert"),
            out_specs=P("expert"),
            axis_names={"expert"},
        )
        with jax.set_mesh(mesh):
            put = [jax.device_put(z, jax.NamedSharding(mesh, P(*spec))) for z, spec in ((given[0], x), (given[3], ids))]
            return jax.eval_shape(local, *put)

    both, hint = ("expert", "data"), "is sharded over a mesh axis of type `Explicit`.\nGot .*\nCall it inside"
    with pytest.raises(NotImplementedError, match=rf"exchange\(route, axis\)`: `route.* {hint}"):
        typed(("expert",), (both,))
    with pytest.raises(NotImplementedError, match=rf"Exchange.dispatch\(x\)`: `x` {hint}"):
        typed((both,), ("expert",))
    assert typed(("expert", "data"), ("expert",)).shape == (N * TOKENS, D)


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [P("expert"), P("expert", "data")], ids=str)
def test_ring_next_to_an_explicit_axis(spec: P) -> None:
    """In a map over some axes of the mesh, values and gradients are right, and sums are made in parts."""
    x, _, _, ids, weights = arrays(given := inputs())
    mesh = jax.make_mesh((2, N), ("data", "expert"))

    def local(x: Array, ids: Array, weights: Array) -> Array:
        return ragged.exchange(ragged.route(ids, GROUPS), transport="ring").map(lambda rows: rows, x, weights)

    def pulled(x: Array, weights: Array, ids: Array) -> Any:
        run = jax.shard_map(local, in_specs=P("expert"), out_specs=P("expert"), axis_names={"expert"})
        out, pull = jax.vjp(lambda x, weights: run(x, ids, weights), x, weights)
        return out, pull(out)

    with jax.set_mesh(mesh):
        x, ids, weights = (
            jax.device_put(z, jax.NamedSharding(mesh, to))
            for z, to in ((x, spec), (ids, P("expert")), (weights, P("expert")))
        )
        run = jax.jit(pulled)
        out, (dx, dweights) = run(x, weights, ids)
        text = run.lower(x, weights, ids).as_text()
    is_group = (given["ids"] >= 0) & (given["ids"] < GROUPS)
    total = np.where(is_group, given["weights"], 0).sum(1, keepdims=True)  # [tokens, 1]
    want = total * given["x"]
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx, total * want, rtol=1e-4, atol=1e-5)
    of_weights = np.where(is_group, (want * given["x"]).sum(1, keepdims=True), 0)
    np.testing.assert_allclose(dweights, of_weights, rtol=1e-4, atol=1e-5)
    assert text.count("stablehlo.reduce_scatter") == 3  # of the result, and of both gradients


def test_ragged_sends_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `slots`, those of rows that go somewhere, and no other byte; back, the same."""
    given, sent = arrays(inputs(4)), []

    def counted(operand: Array, output: Array, *sizes: Array, axis_name: str) -> Array:
        jax.debug.callback(lambda counts: sent.append(int(counts.sum())), sizes[1])
        return emulated(operand, output, *sizes, axis_name=axis_name)

    monkeypatch.setattr(lax, "ragged_all_to_all", counted)
    jax.block_until_ready(jax.jit(mapped(layer("ragged")))(*given))
    jax.effects_barrier()
    ids = np.asarray(given[3])
    real = (ids >= 0) & (ids < GROUPS)
    of_device = real.reshape(N, -1).sum(1).tolist()
    to_device = np.bincount(ids[real] // (GROUPS // N), minlength=N).tolist()
    assert sorted(sent) == sorted(of_device + to_device)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_ragged_is_lowered(platform: str) -> None:
    """Two exchanges forward, and two backward."""
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(inputs())]

    def loss(*args: Array) -> Array:
        return jnp.sum(mapped(layer("ragged"))(*args))

    text = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(*avals).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("ragged_all_to_all") == 4
    # JAX's transpose exchanges offsets, `(n,)` int32; rows never travel in full slots.
    assert all("-> tensor<4xi32>" in line for line in text.splitlines() if '"stablehlo.all_to_all"' in line)


@pytest.mark.long
def test_collectives() -> None:
    """No matrix is gathered, and sizes are one small collective."""
    given = arrays(inputs())
    expected = {"dense": "all-gather, 2 all-to-all", "ring": "4 all-gather, all-to-all, reduce-scatter"}
    for transport, want in expected.items():
        assert collectives(jax.jit(mapped(layer(transport))).lower(*given).compile()) == want


@pytest.mark.long
def test_data_and_expert_axes() -> None:
    """Tokens over both axes, experts over one."""
    given = inputs(5)
    run = mapped(layer("dense"), mesh_of(data=2, expert=2), ("data", "expert"))
    np.testing.assert_allclose(jax.jit(run)(*arrays(given)), oracle(**given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda r: ragged.exchange(r, "model"),
            ValueError,
            "it isn't called inside a `shard_map` over a mesh axis 'model'.",
        ),
        (lambda r: ragged.exchange(r.order), TypeError, "`route` is not a `Route`.\nGot"),
        (
            lambda r: ragged.exchange(r, transport="pigeon"),
            ValueError,
            "`transport` is 'pigeon'.\nGot .*\nPass one of",
        ),
        (lambda r: ragged.exchange(r, capacity=3), ValueError, "`capacity` is 3.\nGot .*\nPass at least 4, one row"),
        (
            lambda r: ragged.exchange(ragged.route(r.place, 6)),
            ValueError,
            "6 groups can't be divided among 4 devices over 'expert'",
        ),
        (
            lambda r: ragged.exchange(r).dispatch(jnp.ones((3, 2))),
            ValueError,
            r"`x` must be \[12, d\], one row per token.\nGot",
        ),
        (lambda r: ragged.exchange(r, chunks=2).map(abs, jnp.ones((13, 2))), ValueError, r"`x` must be \[12, d\]"),
        (
            lambda r: ragged.exchange(r, chunks=2).map(lambda x: x, jnp.ones((12, 2)), jnp.ones((13, 2))),
            ValueError,
            r"`weights` must have shape \(12, 2\), but has \(13, 2\)",
        ),
        (
            lambda r: ragged.exchange(r).combine(r.dispatch(jnp.ones((12, 2)))),
            ValueError,
            "`y` must have 96 ragged rows in 2 groups.",
        ),
        (
            lambda r: ragged.exchange(r, chunks=0),
            ValueError,
            "`chunks` is 0.\nGot .*\nPass a static int, at most the 12",
        ),
        (lambda r: ragged.exchange(r, chunks=13), ValueError, "`chunks` is 13."),
        (
            lambda r: ragged.exchange(r, chunks=4, capacity=15),
            ValueError,
            "15, with 4 chunks.\nGot .*\nPass at least 16",
        ),
        (lambda r: ragged.exchange(r, wire="tensorwise"), ValueError, "Each row must have its own scales"),
        (lambda r: ragged.exchange(r, wire=ragged.Cast(None)), ValueError, "`wire` has no 8-bit dtype"),
        (lambda r: ragged.exchange(r, wire="nvfp4"), ValueError, "`wire` has no 8-bit dtype"),
        (lambda r: ragged.exchange(r, wire=ragged.Cast("int8", "nvfp4")), ValueError, "`wire` has the scaling nvfp4"),
        (lambda r: ragged.exchange(r, wire="mxfp4"), ValueError, r"`ragged.exchange\(.*`: 'mxfp4' is not a recipe"),
        (lambda r: ragged.exchange(r).combine(3), TypeError, "`y` is not a `GroupedTensor`"),
        (
            lambda r: ragged.exchange(r).combine(ragged.exchange(r).dispatch(jnp.ones((12, 2))), jnp.ones(24)),
            ValueError,
            r"`weights` must have shape \(12, 2\), but has \(24,\)",
        ),
    ],
    ids=range(19),
)
def test_bad_input(call: Any, error: Any, text: str) -> None:

    def local(ids: Array) -> Array:
        call(ragged.route(ids, GROUPS))
        return ids

    with pytest.raises(error, match=text):
        run = jax.shard_map(local, mesh=mesh_of(expert=N), in_specs=P("expert"), out_specs=P("expert"))
        jax.eval_shape(run, arrays(inputs())[3])


def test_outside_of_a_map() -> None:
    with pytest.raises(ValueError, match="it isn't called inside a `shard_map` over a mesh axis 'expert'"):
        ragged.exchange(ragged.route(jnp.array([0, 1]), 2))
