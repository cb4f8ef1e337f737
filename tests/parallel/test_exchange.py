"""`exchange`: a mixture of experts over devices equals a loop over tokens, for any ids, and moves what it says."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from tests.contract.experts import kept, mixture
from tests.contract.meshes import collectives, mesh_of

TOKENS, TOP_K, GROUPS, D, F = 13, 2, 8, 6, 5  # tokens of a device
Arrays = dict[str, np.ndarray]


def emulated(operand: Array, output: Array, *sizes: Array, axis_name: str) -> Array:
    """`lax.ragged_all_to_all`, as its documentation has it, from gathered operands: the CPU has none.

    NaN if devices don't expect what they are sent, or if ranges overlap, or leave the buffers.
    """
    operands, (inputs, sent, outputs, received) = (
        lax.all_gather(operand, axis_name),
        (lax.all_gather(s, axis_name) for s in sizes),
    )
    me, n, index = lax.axis_index(axis_name), operands.shape[0], jnp.arange(output.shape[0])
    ranges = sizes[0].shape[0] // n  # for each device
    times = jnp.zeros(output.shape[0], jnp.int32)
    is_right = jnp.all(received[me] == lax.all_to_all(sizes[1], axis_name, 0, 0, tiled=True))
    for device, i in itertools.product(range(n), range(ranges)):
        begin, to, count = (x[device, me * ranges + i] for x in (inputs, outputs, sent))
        place = index - to
        is_here = (place >= 0) & (place < count)
        rows = operands[device].at[begin + place].get(mode="fill", fill_value=0)
        output, times = jnp.where(is_here[:, None], rows, output), times + is_here.astype(jnp.int32)
        is_right &= (count == 0) | ((to >= 0) & (to + count <= len(index)) & (begin >= 0))
        is_right &= begin + count <= operands.shape[1]
    return jnp.where(is_right & jnp.all(times <= 1), output, jnp.nan)


@dataclass(frozen=True)
class Layer:
    """Experts over a mesh, and how rows reach them."""

    transport: str = "dense"
    chunks: int = 1
    capacity: int | None = None
    data: int = 1  # devices that share the tokens of each group of experts
    ways: int = 4  # devices that share the experts
    dtype: str = "float32"
    check_vma: bool = True
    is_mapped: bool = False  # whether `Exchange.map` runs the experts

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return "-".join(f"{name}={value}" for name, value in given.items()) or "default"

    @property
    def devices(self) -> int:
        return self.data * self.ways

    @property
    def options(self) -> dict[str, Any]:
        return {"transport": self.transport, "chunks": self.chunks, "capacity": self.capacity}

    @property
    def buffer(self) -> int:
        """Rows of a device's buffer: those that chunks or slots can't share are too few to be used."""
        if self.capacity is None:
            return TOP_K * TOKENS * self.ways
        parts = self.chunks * (self.ways if self.transport == "dense" else 1)
        return self.capacity // parts * parts

    def draw(self, number: int) -> Arrays:
        """Tokens of all devices; ids that are even, skewed, all the same, and some of no group."""
        rng, shape = np.random.default_rng(number), (self.devices * TOKENS, TOP_K)
        likely = np.array([[1] * 8, [8, 4, 2, 1, 0, 0, 1, 3]][number % 2], np.float64)
        ids = rng.choice(GROUPS, shape, p=likely / likely.sum())
        nowhere = rng.choice([-1, GROUPS, 1000, 2**31 - 1, -(2**31)], shape)
        ids = np.where(rng.random(shape) < (0.1, 0.0, 1.0, 0.5)[number // 2 % 4], nowhere, ids)
        ids = np.full(shape, number % GROUPS) if number == 3 else ids
        weights = rng.normal(size=shape)
        weights[(ids < 0) | (ids >= GROUPS)] = np.nan  # may be anything
        shapes = {"x": (len(ids), D), "up": (GROUPS, D, F), "down": (GROUPS, F, D)}
        found = {name: rng.normal(size=shape) for name, shape in shapes.items()} | {"weights": weights}
        return {name: x.astype(self.dtype) for name, x in found.items()} | {"ids": ids}

    def compute(self, given: dict[str, Array]) -> dict[str, Array]:
        """The result, its gradients, what the devices of the first experts received, and how many rows were dropped."""
        tokens = P(("data", "expert"))

        def local(given: dict[str, Array]) -> dict[str, Array]:
            def experts(rows: GroupedTensor) -> GroupedTensor:
                return ragged.matmul(ragged.matmul(rows, given["up"]).map(jnp.tanh), given["down"])

            routing = ragged.route(given["ids"], GROUPS)
            if self.transport == "none":  # each device has its experts' rows of the tokens, and sums are made of them
                rows = routing.dispatch(given["x"])
                offset = lax.axis_index("expert") * len(given["up"])
                hidden = ragged.matmul(rows, given["up"], group_offset=offset).map(jnp.tanh)
                y = ragged.matmul(hidden, given["down"], group_offset=offset)
                return {"y": lax.psum(routing.combine(y, given["weights"]), "expert")}
            ex = ragged.exchange(routing, **self.options)
            assert ex.capacity == self.buffer
            rows = ex.dispatch(given["x"])
            run = ex.map(experts, given["x"], given["weights"]) if self.is_mapped else None
            y = ex.combine(experts(rows), given["weights"]) if run is None else run
            return {"y": y, "rows": rows.data[None], "sizes": ex.sizes[None], "dropped": ex.dropped[None]}

        specs: Any = {name: P("expert") if name in ("up", "down") else tokens for name in given}
        out_specs = dict.fromkeys(("y", "rows", "sizes", "dropped"), tokens)
        if self.transport == "none":
            specs |= {name: P("data") for name in ("x", "ids", "weights")}
            out_specs = {"y": P("data")}
        mesh = mesh_of("auto", data=self.data, expert=self.ways)
        options: Any = {"mesh": mesh, "check_vma": self.check_vma, "in_specs": (specs,), "out_specs": out_specs}
        run = jax.shard_map(local, **options)

        def loss(floats: dict[str, Array]) -> Any:
            found = run(floats | {"ids": given["ids"]})
            return jnp.sum(jnp.sin(found["y"])), found

        floats = {name: x for name, x in given.items() if name != "ids"}
        found, gradients = jax.value_and_grad(loss, has_aux=True)(floats)
        return found[1] | {f"d{name}": each for name, each in gradients.items()}

    def check(self, given: Arrays, got: Arrays) -> None:
        ids, (x, up, down, weights) = (
            given["ids"],
            (given[n].astype(np.float64) for n in ("x", "up", "down", "weights")),
        )
        is_group = (ids >= 0) & (ids < GROUPS)
        keep = is_group
        if self.capacity is not None:
            slots = self.transport == "dense"
            keep = kept(ids, GROUPS, self.ways, self.capacity, self.devices, self.chunks, slots)
        want = mixture(x, ids, weights, {"up": up, "down": down}, np.tanh, keep=keep)
        pairs = {"y": want.y, "dx": want.dx, "dweights": want.dweights}
        pairs |= {"dup": want.dexperts["up"], "ddown": want.dexperts["down"]}
        tolerance = 1e-12 if self.dtype == "float64" else 1e-5
        for name, each in pairs.items():
            assert got[name].dtype == self.dtype
            np.testing.assert_allclose(got[name], each, rtol=10 * tolerance, atol=tolerance, err_msg=name)
        if self.transport == "none":
            return
        assert got["dropped"].tolist() == (is_group & ~keep).reshape(self.devices, -1).sum(1).tolist()
        for device in range(self.devices):  # its groups, in the order of devices and tokens
            here, among = device % self.ways, device // self.ways
            order = []
            for group in range(here * GROUPS // self.ways, (here + 1) * GROUPS // self.ways):
                its = np.argwhere((ids == group) & keep)[:, 0]
                its = its[its // (self.ways * TOKENS) == among]
                assert got["sizes"][device, group % (GROUPS // self.ways)] == len(its)
                order += its.tolist()
            np.testing.assert_array_equal(got["rows"][device, : len(order)], given["x"][order])
            assert not got["rows"][device, len(order) :].any()


def layers() -> Iterator[Layer]:
    yield Layer("ragged", capacity=23)
    yield Layer("ring", chunks=3, capacity=34, is_mapped=True, data=2, ways=2)
    yield Layer("dense", chunks=2, is_mapped=True)  # which doesn't divide the tokens
    yield Layer("dense", data=2, ways=4, chunks=3, capacity=27)
    yield Layer("ring", capacity=7)
    yield Layer("ragged", chunks=3, capacity=25)
    yield Layer("ragged", data=2, ways=4)
    yield Layer("ragged", chunks=4, is_mapped=True, check_vma=False)
    yield Layer("dense", chunks=3, ways=1)
    yield Layer("ring", dtype="float64")
    yield Layer("none", data=2, ways=2)


@pytest.mark.long
@pytest.mark.parametrize("layer", [*layers()], ids=str)
def test_mixture_of_experts(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, gradients of all operands, the rows that each device gets and how many are dropped."""
    sent: list[int] = []

    def counted(operand: Array, output: Array, *sizes: Array, axis_name: str) -> Array:
        jax.debug.callback(lambda counts: sent.append(int(counts.sum())), sizes[1])
        return emulated(operand, output, *sizes, axis_name=axis_name)

    monkeypatch.setattr(lax, "ragged_all_to_all", counted)
    with jax.enable_x64(layer.dtype == "float64"):
        run = jax.jit(layer.compute)
        for number in range(10):
            given = layer.draw(number)
            got = jax.tree.map(np.asarray, run(given | {"ids": given["ids"].astype(np.int32)}))
            layer.check(given, got)
            jax.effects_barrier()
            if layer.transport == "ragged":  # what goes somewhere travels there and back, gradients too, and no more
                rows = ((given["ids"] >= 0) & (given["ids"] < GROUPS)).sum() - got["dropped"].sum()
                assert sum(sent) % max(rows, 1) == 0 and 2 * rows <= sum(sent) <= 6 * rows
                sent.clear()


def over(local: Any, devices: int = 4) -> Any:
    """In a `shard_map` whose operands and results are all split."""
    return jax.shard_map(local, mesh=mesh_of("auto", expert=devices), in_specs=P("expert"), out_specs=P("expert"))


@pytest.mark.parametrize("transport", ["ring", pytest.param("dense", marks=pytest.mark.long)])
def test_a_token_is_summed_over_devices_before_it_is_rounded(transport: str) -> None:
    """256 + 1 of one device's groups and -256 + 0 of another's are 1, in bfloat16 too."""

    def local(x: Array, values: Array) -> Array:
        ex = ragged.exchange(ragged.route(jnp.array([[0, 1, 2, 3]], jnp.int32), 4), transport=transport)
        return ex.combine(ex.dispatch(x) * ragged.per_group(values))

    out = jax.jit(over(local, 2))(jnp.ones((2, 1), jnp.bfloat16), jnp.array([256, 1, -256, 0], jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float64), 1)


def rows_back(**options: Any) -> Any:
    """The rows of tokens, sent to their experts and back."""
    return lambda x, ids: ragged.exchange(ragged.route(ids, GROUPS), **options).map(lambda rows: rows, x)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["dense", "ring"])
def test_transformations(transport: str) -> None:
    """Forward mode, `vmap`, remat, and forward over reverse, of a sum that is linear in the rows and in the weights; an
    exchange is an argument of a program."""
    given = {name: jnp.asarray(x, jnp.float32) for name, x in Layer().draw(0).items()}
    x, ids, weights = given["x"], given["ids"].astype(jnp.int32), jnp.nan_to_num(given["weights"])

    def local(x: Array, weights: Array, ids: Array) -> Array:
        exchange = ragged.exchange(ragged.route(ids, GROUPS), transport=transport)
        return jax.jit(lambda exchange, *args: exchange.map(lambda rows: rows, *args))(exchange, x, weights)

    def run(x: Array, weights: Array) -> Array:
        return over(local)(x, weights, ids)

    def remat(x: Array) -> Array:
        return jnp.sum(over(jax.checkpoint(local))(x, weights, ids))

    def results(x: Array, weights: Array) -> Any:
        pairs = jnp.stack([x, -x]), jnp.stack([weights, 2 * weights])
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(run(x, weights))))
        return (
            jax.jvp(run, (x, weights), (x, weights))[1],
            jax.vmap(run)(*pairs),
            jax.grad(remat)(x),
            jax.jvp(gradient, (x,), (x,)),
        )

    w = np.asarray(weights, np.float64).sum(1, keepdims=True)
    y = w * np.asarray(x, np.float64)
    tangent, mapped, of_remat, (first, second) = jax.jit(results)(x, weights)
    wanted = [2 * y, np.stack([y, -2 * y]), w + 0 * y, w * np.cos(y), -w * np.sin(y) * y]
    for got, want in zip((tangent, mapped, of_remat, first, second), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


WIRES = [("mxfp8", "dense", "bfloat16"), ("rowwise", "ring", "float32"), ("mxfp8", "ring", "bfloat16")]


@pytest.mark.long
@pytest.mark.parametrize("wire, transport, dtype", WIRES)
def test_wire(wire: str, transport: str, dtype: str) -> None:
    """Rows travel in bytes, one an element and the scales'; derivatives are those of rows that don't."""
    x = jnp.asarray(np.random.default_rng(9).normal(size=(4 * TOKENS, 80)), dtype)
    ids = jnp.asarray(Layer().draw(0)["ids"], jnp.int32)
    run = lambda x: over(rows_back(transport=transport, wire=wire))(x, ids)  # noqa: E731

    def results(x: Array) -> Any:
        pull = jax.grad(lambda x: jnp.sum(run(x).astype(jnp.float32) ** 2 / 2))
        return run(x), jax.jvp(run, (x,), (x,))[1], jax.jvp(pull, (x,), (x,)), jax.vmap(run)(jnp.stack([x, -x]))

    times = ((np.asarray(ids) >= 0) & (np.asarray(ids) < GROUPS)).sum(1, keepdims=True)
    exact = np.asarray(x, np.float64)
    cast: Any = "float8_e4m3fn", "mx" if wire == "mxfp8" else "row"
    sent = np.asarray(ragged.quantize(x[None], *cast, power_of_two=True).dequantize().data[0].astype(dtype), np.float64)
    want = times * sent, times * exact, (times**2 * sent, times**2 * exact), times * np.stack([sent, -sent])
    found = jax.jit(results)(x)
    for got, each in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), each, rtol=1e-2, atol=1e-6)
    np.testing.assert_array_equal(found[0], jnp.asarray(want[0], dtype))  # exactly
    name, width = {"dense": "all_to_all", "ring": "all_gather"}[transport], 80 + (3 if wire == "mxfp8" else 4)
    found = re.findall(rf"stablehlo.{name}.*-> tensor<\d+x(\d+)xui8>", jax.jit(run).lower(x).as_text())
    assert found == [str(width)]


@pytest.mark.parametrize("options", [{}, {"transport": "ring"}, {"wire": "mxfp8"}, {"capacity": 4}], ids=str)
def test_no_tokens(options: dict[str, Any]) -> None:
    run = jax.jit(over(rows_back(**{"transport": "dense", **options})))
    assert run(jnp.ones((0, D)), jnp.zeros((0, TOP_K), jnp.int32)).shape == (0, D)


@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("platform", ["tpu", pytest.param("cuda", marks=pytest.mark.long)])
def test_ragged_is_lowered(platform: str, is_mapped: bool) -> None:
    """Two exchanges forward, and two backward, of all elements of a map in one. They send from the route's rows into
    the buffer, whose rows no gather sorts."""

    def loss(x: Array, ids: Array) -> Array:
        local = rows_back(transport="ragged")
        spec = P(None, "expert") if is_mapped else P("expert")
        options: Any = {"mesh": mesh_of("auto", expert=4), "in_specs": spec, "out_specs": spec}
        return jnp.sum(jnp.sin(jax.shard_map(jax.vmap(local) if is_mapped else local, **options)(x, ids)))

    shape = ((2,) if is_mapped else ()) + (4 * TOKENS,)
    avals = jax.ShapeDtypeStruct((*shape, D), jnp.float32), jax.ShapeDtypeStruct((*shape, TOP_K), jnp.int32)
    text = jax.jit(jax.value_and_grad(loss)).trace(*avals).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("ragged_all_to_all") == 4
    times = 2 if is_mapped else 1
    rows, buffer = (f"tensor<{times * n * TOKENS * TOP_K}x{D}xf32>" for n in (1, 4))
    types = re.findall(r"@ragged_all_to_all\((?:%\S+ ?){6}\).*: \((\S+), (\S+), .*", text)
    assert sorted(types) == sorted([(rows, buffer), (buffer, rows)] * 2)
    assert not re.findall(rf"stablehlo.gather.*-> tensor<{4 * TOKENS * TOP_K}x{D}xf32>", text)
    # JAX's transpose exchanges offsets, one int32 for each group.
    found = [line for line in text.splitlines() if '"stablehlo.all_to_all"' in line]
    assert is_mapped or all(re.search(r"-> tensor<(8|4x2)xi32>", line) for line in found)


@pytest.mark.long
@pytest.mark.parametrize(
    "transport, expected", [("dense", "all-gather, 2 all-to-all"), ("ring", "3 all-gather, reduce-scatter")]
)
def test_collectives(transport: str, expected: str) -> None:
    """Sizes are one small collective; and each chunk has exchanges of its own."""
    avals = jax.ShapeDtypeStruct((4 * TOKENS, D), jnp.float32), jax.ShapeDtypeStruct((4 * TOKENS, TOP_K), jnp.int32)
    runs = [jax.jit(over(rows_back(transport=transport, chunks=chunks))) for chunks in (1, 3)]
    assert collectives(runs[0].lower(*avals).compile()) == expected
    name = {"dense": "all_to_all", "ring": "reduce_scatter"}[transport]
    counts = [run.lower(*avals).as_text().count(f"stablehlo.{name}") for run in runs]
    assert counts[1] == 3 * counts[0] > 0


def test_explicit_axes_of_others() -> None:
    """Tokens that are cut, inside the map, over an `Explicit` axis that it isn't over; `d` may be."""
    mesh = mesh_of("explicit", data=2, expert=4)

    def typed(x: Any, ids: Any) -> Any:
        local = jax.shard_map(rows_back(), in_specs=P("expert"), out_specs=P("expert"), axis_names={"expert"})
        with jax.set_mesh(mesh):
            rows = jax.device_put(jnp.ones((48, D)), P(*x))
            return jax.eval_shape(local, rows, jax.device_put(jnp.zeros((48, TOP_K), jnp.int32), P(*ids)))

    both, hint = ("expert", "data"), "is sharded over a mesh axis of type `Explicit`.\nGot .*\nCall it inside"
    with pytest.raises(NotImplementedError, match=rf"exchange\(route, axis\)`: `route.* {hint}"):
        typed(("expert",), (both,))
    with pytest.raises(NotImplementedError, match=rf"Exchange.dispatch\(x\)`: `x` {hint}"):
        typed((both,), ("expert",))
    assert typed(("expert", "data"), ("expert",)).shape == (48, D)


@pytest.mark.parametrize("spec", [P("expert", "data"), pytest.param(P("expert"), marks=pytest.mark.long)], ids=str)
def test_ring_next_to_an_explicit_axis(spec: P) -> None:
    """In a map over some axes of the mesh, values and gradients are right, and sums are made in parts."""
    given = Layer().draw(0)

    def local(x: Array, ids: Array, weights: Array) -> Array:
        return ragged.exchange(ragged.route(ids, GROUPS), transport="ring").map(lambda rows: rows, x, weights)

    def pulled(x: Array, weights: Array, ids: Array) -> Any:
        run = jax.shard_map(local, in_specs=P("expert"), out_specs=P("expert"), axis_names={"expert"})
        out, pull = jax.vjp(lambda x, weights: run(x, ids, weights), x, weights)
        return out, pull(out)

    with jax.set_mesh(mesh_of("explicit", data=2, expert=4)):
        x, weights, ids = (
            jax.device_put(each, to)
            for each, to in (
                (given["x"], spec),
                (given["weights"], P("expert")),
                (given["ids"].astype(np.int32), P("expert")),
            )
        )
        lowered = jax.jit(pulled).lower(x, weights, ids)
        out, (dx, dweights) = lowered.compile()(x, weights, ids)
    is_group = (given["ids"] >= 0) & (given["ids"] < GROUPS)
    total = np.where(is_group, given["weights"], 0).sum(1, keepdims=True)  # [tokens, 1]
    want = total * given["x"]
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx, total * want, rtol=1e-4, atol=1e-5)
    of_weights = np.where(is_group, (want * given["x"]).sum(1, keepdims=True), 0)
    np.testing.assert_allclose(dweights, of_weights, rtol=1e-4, atol=1e-5)
    assert lowered.as_text().count("stablehlo.reduce_scatter") == 3  # of the result, and of both gradients


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda r: ragged.exchange(r).dispatch(jnp.ones((3, 2))), ValueError, r"`x` must be \[13, d\], one row per"),
        (lambda r: ragged.exchange(r, chunks=2).map(abs, jnp.ones((14, 2))), ValueError, r"`x` must be \[13, d\]"),
        (
            lambda r: ragged.exchange(r, chunks=2).map(lambda x: x, jnp.ones((13, 2)), jnp.ones((14, 2))),
            ValueError,
            r"`weights` must have shape \(13, 2\), but has \(14, 2\)",
        ),
        (
            lambda r: ragged.exchange(r).combine(r.dispatch(jnp.ones((13, 2)))),
            ValueError,
            "`y` must have 104 ragged rows in 2 groups.",
        ),
        (lambda r: ragged.exchange(r, wire="nvfp4"), ValueError, "`wire` has no 8-bit dtype"),
        (lambda r: ragged.exchange(r, wire=ragged.Cast("int8", "nvfp4")), ValueError, "`wire` has the scaling nvfp4"),
        (lambda r: ragged.exchange(r).combine(3), TypeError, "`y` is not a `GroupedTensor`"),  # pyright: ignore
    ],
    ids=range(7),
)
def test_bad_input(call: Any, error: Any, text: str) -> None:
    """What `docs/errors.md` shows of `Route` alone, or of other arguments."""

    def local(ids: Array) -> Array:
        call(ragged.route(ids, GROUPS))
        return ids

    with pytest.raises(error, match=text):
        jax.eval_shape(over(local), jnp.zeros((4 * TOKENS, TOP_K), jnp.int32))
