"""`exchange`: a mixture of experts over devices equals the one of all tokens on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ragged

from .test_partition import collectives

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
        ex = ragged.exchange(ragged.route(ids, GROUPS), transport=transport, **options)
        hidden = ragged.matmul(ex.dispatch(x), up).map(jnp.tanh)
        return ex.combine(ragged.matmul(hidden, down), weights)

    return local


def mapped(local: Any, mesh: Any = None, tokens: Any = "expert", **options: Any) -> Any:
    specs = P(tokens), P("expert"), P("expert"), P(tokens), P(tokens)
    return jax.shard_map(local, mesh=mesh or mesh_of(expert=N), in_specs=specs, out_specs=P(tokens), **options)


def arrays(given: dict[str, Any]) -> list[Array]:
    return [jnp.asarray(x, jnp.int32 if name == "ids" else jnp.float32) for name, x in given.items()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("transport", ["dense", "ring"])
def test_values_and_gradients(transport: str, check_vma: bool) -> None:
    """D4: of rows, matrices and weights."""
    given = inputs()
    run = mapped(layer(transport), check_vma=check_vma)
    np.testing.assert_allclose(jax.jit(run)(*arrays(given)), oracle(**given), rtol=1e-4, atol=1e-5)

    def loss(f: Any) -> Any:
        return jax.jit(
            jax.grad(lambda x, up, down, ids, weights: jnp.sum(jnp.sin(f(x, up, down, ids, weights))), (0, 1, 2, 4))
        )

    for g, w in zip(loss(run)(*arrays(given)), loss(dense)(*arrays(given)), strict=True):
        assert np.isfinite(g).all() and np.abs(w).max() > 0.1
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["dense", "ring"])
def test_transformations(transport: str) -> None:
    """D4: forward mode, `vmap`, remat, and forward over reverse."""
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


def kept(ids: np.ndarray, each: int) -> np.ndarray:
    """The rule: of a device's rows to another one, its first tokens'."""
    keep = np.zeros(ids.shape, bool)
    for device in range(N):
        seen = dict.fromkeys(range(N), 0)
        for t in range(device * TOKENS, (device + 1) * TOKENS):
            for j, group in enumerate(ids[t]):
                if 0 <= group < GROUPS:
                    to = group // (GROUPS // N)
                    keep[t, j] = seen[to] < each
                    seen[to] += 1
    return keep


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", ["dense", "ring"])
def test_capacity(transport: str) -> None:
    """D4: what has no room is counted and is zero; the first tokens have it."""
    given, each = inputs(2), 5
    keep = kept(given["ids"], each)

    def local(*args: Array) -> tuple[Array, Array]:
        ex = ragged.exchange(ragged.route(args[3], GROUPS), transport=transport, capacity=N * each + 3)
        assert ex.capacity == N * each
        return layer(transport, capacity=N * each + 3)(*args), ex.dropped[None]

    specs = P("expert"), P("expert"), P("expert"), P("expert"), P("expert")
    run = jax.shard_map(local, mesh=mesh_of(expert=N), in_specs=specs, out_specs=(P("expert"), P("expert")))
    out, dropped = jax.jit(run)(*arrays(given))
    np.testing.assert_allclose(out, oracle(**given, keep=keep), rtol=1e-4, atol=1e-5)
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


def test_ragged(monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: by an emulation, for the CPU has none: the same bits as "dense"."""
    given = arrays(inputs(4))
    want = jax.jit(mapped(layer("dense")))(*given)
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    np.testing.assert_array_equal(jax.jit(mapped(layer("ragged")))(*given), want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_ragged_is_lowered(platform: str) -> None:
    """D4: two exchanges forward, and two backward."""
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
    """D6: tokens over both axes, experts over one."""
    given = inputs(5)
    run = mapped(layer("dense"), mesh_of(data=2, expert=2), ("data", "expert"))
    np.testing.assert_allclose(jax.jit(run)(*arrays(given)), oracle(**given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda r: ragged.exchange(r, "model"),
            ValueError,
            "there is no mesh axis 'model' here to exchange over.",
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
            "4 devices over 'expert' don't divide 6",
        ),
        (lambda r: ragged.exchange(r).dispatch(jnp.ones((3, 2))), ValueError, r"`x` must be \[12, d\].\nGot"),
        (
            lambda r: ragged.exchange(r).combine(r.dispatch(jnp.ones((12, 2)))),
            ValueError,
            "96 of them in 2 groups.",
        ),
    ],
    ids=range(7),
)
def test_bad_input(call: Any, error: Any, text: str) -> None:
    """B9."""

    def local(ids: Array) -> Array:
        call(ragged.route(ids, GROUPS))
        return ids

    with pytest.raises(error, match=text):
        run = jax.shard_map(local, mesh=mesh_of(expert=N), in_specs=P("expert"), out_specs=P("expert"))
        jax.eval_shape(run, arrays(inputs())[3])


def test_outside_of_a_map() -> None:
    with pytest.raises(ValueError, match="there is no mesh axis 'expert' here"):
        ragged.exchange(ragged.route(jnp.array([0, 1]), 2))
