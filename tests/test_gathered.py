"""Products that read rows where they are, through a route's order: the numbers of `dispatch`, without its copy."""

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
from ragged._products import Bound, products_of
from ragged.backends import cache
from ragged.backends.gpu import call as triton_call
from ragged.product.primitive import ragged_matmul_p
from ragged.tuning import GpuConfig

from . import gpu, ran

G, D, N = 4, 24, 20
IDS = {  # of one shape, so that programs are compiled once
    "top 2": [[2, 0], [0, 1], [1, 2], [2, 0], [3, 1], [0, 3]],
    "an empty group": [[0, 3], [3, 0], [0, 0], [1, 3], [0, 1], [3, 3]],
    "some to no group": [[2, -1], [9, 0], [4, 4], [0, 2], [7, -5], [3, 3]],
    "all to no group": [[-1, 4], [7, 9], [4, 4], [-2, 5], [-1, -1], [8, 4]],
}
INTERPRETED = {"backend": "triton_gpu", "interpret": True}
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

        assert not by_index or static["A_SOURCE"][1] == arrays["a"].shape[-2] < arrays["a_source"].shape[-1]
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
@pytest.mark.parametrize("name", ["top 2", "an empty group", "some to no group"])
@pytest.mark.parametrize("dtype, d", [(jnp.float32, D), (jnp.bfloat16, 40), (jnp.float32, 7)])
def test_the_gpu_kernel_reads_by_index(name: str, dtype: Any, d: int, kernels: list[tuple[str, bool]]) -> None:
    """E3: the product and its derivative by the weights; the one by the rows has a copy of cotangents, as ever."""
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
    options = {"group_offset": jnp.int32(1), "existing_out": ct, "tiling": (16, 16, 16), **INTERPRETED}
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


@pytest.mark.sampled(0)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "delayed"])
@pytest.mark.parametrize("name", ["top 2", "some to no group"])
def test_recipes(recipe: str, name: str) -> None:
    """O7: the same numbers, and the same next history; whatever tokens hold that go nowhere."""
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
    moe = ragged.nn.MoE(8, 16, G, 2, activation="silu", key=jax.random.key(0))
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
        bound = Bound(equation)
        keys.add(cache.product_key(bound.call, bound.operands, "triton_gpu"))
        assert bound.capacity("m") == route.order.shape[0]
        assert sizes is not None
        arrays = bound.arrays(sizes, 0)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), arrays) == [(a.shape, a.dtype) for a in bound.avals]
        assert jnp.isfinite(ragged_matmul_p.bind(*arrays, tree=bound.tree, call=bound.call)).all()
    assert len(keys) == 2


def test_errors() -> None:
    route, x, w, _ = operands("top 2")
    with pytest.raises(ValueError, match=r"Route.gathered\(x\)`: `x` must be \[6, d\], one row a token"):
        route.gathered(x[:4])
    with pytest.raises(TypeError, match=r"Route.gathered\(x\)`: `x` is not an array"):
        route.gathered([1.0])
    with pytest.raises(ValueError, match=r"last dim of `lhs` is 24 but the (.|\n)*f32\[12,24\]"):
        ragged.matmul(route.gathered(x), w.mT)
    with pytest.raises(TypeError, match="`rhs` is not an array"):
        ragged.matmul(w.mT, route.gathered(x))
    gpu.needs_triton()
    config = GpuConfig(m=128, n=128, k=64, warps=8, stages=3, variant="overlapped")
    with (
        gpu.on("NVIDIA H200"),
        pytest.raises(ValueError, match="'overlapped' needs operands whose rows are not"),
    ):
        x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((6, 128), (G, 128, 128)))
        gpu.lower_for("NVIDIA H200", lambda x, w: ragged.matmul(route.gathered(x), w, config=config).data, x, w)


Avals = tuple[jax.ShapeDtypeStruct, ...]


def trained(way: Rows, x: Array, w: Array, ids: Array, ct: Array) -> Any:
    return both(way, ragged.route(ids, w.shape[0]), x, w, ct)


def avals(dtype: Any, tokens: int = 4096, groups: int = 8, d: int = 2048, n: int = 2048) -> Avals:
    shapes = ((tokens, d), dtype), ((groups, d, n), dtype), ((tokens, 2), jnp.int32), ((2 * tokens, n), dtype)
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("chip", list(gpu.ARCHITECTURES))
@pytest.mark.parametrize("shape", [{}, {"groups": 64, "tokens": 512}, {"d": 1000, "n": 1000}], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_compiled(chip: str, shape: dict[str, int], dtype: Any) -> None:
    """B6: no spills; rows come by `cp.async`, on Hopper beside weights by TMA, into its own tensor cores."""
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
    """E3: a product, and a training step of several layers in a loop, take less memory by the copies of their rows."""
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
