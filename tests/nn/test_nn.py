"""`ragged.nn`: layers equal a loop over tokens in NumPy, on one device and over meshes; and what they keep."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from ragged.nn import GroupedLinear, MoE, Routing
from tests import tpu
from tests.benchmarks import memory
from tests.cases import normal, split
from tests.contract.experts import mixture, sigmoid
from tests.contract.layers import EXPERTS, HIDDEN, MODELS, TOKENS, D, Layer, named
from tests.contract.meshes import DOCS, mesh_of, moved
from tests.moe import moe as layer_of


def by_default() -> Iterator[Layer]:
    yield Layer("all", "1x1x2", padding="sizes", save="nothing")


def long() -> Iterator[Layer]:
    yield Layer("mixtral", "2x4x1", transport="ring", capacity=5, dtype="bfloat16")
    yield Layer("deepseek-v3", "2x2x2", kind="explicit", chunks=2, padding="mask")
    for i, model in enumerate(MODELS):
        if i % 2:
            yield Layer(model, padding=("mask", "", "sizes")[i % 3], save=("pre", "out", "nothing")[i % 3])
        else:
            yield Layer(model, "2x2x2", transport=("ring", "dense")[i // 2 % 2], padding=("", "mask")[i // 2 % 2])
    for i, mesh in enumerate(("8x1x1", "1x8x1", "1x1x2", "1x4x2")):
        kind, transport = ("auto", "explicit", "manual")[i % 3], ("dense", "ring")[i % 2]
        padding = ("mask", "", "sizes")[i % 3] if kind != "manual" else ("mask", "")[i % 2]
        yield Layer(("mixtral", "qwen2-moe")[i % 2], mesh, kind, transport, 1 + i // 2 % 2, padding=padding)
    for mesh, transport, padding in (("1x4x1", "dense", "mask"), ("2x2x1", "ring", "sizes")):
        yield Layer("mixtral", mesh, transport=transport, chunks=2, capacity=18, padding=padding, dtype="bfloat16")
    yield Layer("no gate", save="out", dtype="bfloat16")


@pytest.mark.parametrize("program", [*by_default()], ids=str)
def test_moe(program: Layer) -> None:
    """Values, statistics, losses and gradients, for any tokens and any padding, which holds NaN."""
    program.check(range(6))


@pytest.mark.long
@pytest.mark.parametrize("program", [*long()], ids=str)
def test_more_moe(program: Layer) -> None:
    program.check(range(6))


def moe(**options: Any) -> MoE:
    return layer_of(D, HIDDEN, EXPERTS, 2, num_shared=2, key=jax.random.key(0), **options)


def tokens() -> Array:
    return normal((TOKENS, D), 1)


# --- what is kept for the derivative ----------------------------------------------------------------------------------


@pytest.mark.parametrize("save, kept", [("pre", 3), ("out", 1), ("nothing", 0)])
def test_what_experts_keep(save: str, kept: int) -> None:
    """Arrays of the size of the hidden rows: two pre-activations and the hidden rows themselves; these; none."""
    experts = eqx.filter_eval_shape(lambda: moe(activation="silu", save=save).experts)

    def run(experts: Any, x: Array) -> Array:
        return experts(GroupedTensor(x, jnp.full(EXPERTS, 2, jnp.int32))).data

    x = jax.ShapeDtypeStruct((2 * EXPERTS + 1, D), jnp.float32)
    _, vjp = jax.eval_shape(lambda *args: jax.vjp(run, *args), experts, x)
    assert [leaf.shape for leaf in jax.tree.leaves(vjp)].count((2 * EXPERTS + 1, HIDDEN)) == kept


@pytest.mark.long
def test_weights_stored_by_column() -> None:
    """Tensors that memory holds as `[experts, out, in]` are weights like arrays: numbers, gradients, what is kept."""
    layer = moe(activation="silu")
    x = normal((TOKENS, D), 1)

    def weights(layer: MoE) -> list[Any]:
        return [layer.experts.gate.weight, layer.experts.up.weight, layer.experts.down.weight]

    tensors = eqx.tree_at(weights, layer, [GroupedTensor(w.mT).mT for w in weights(layer)])

    @eqx.filter_jit
    def both(layer: MoE, x: Array) -> Any:
        def loss(given: tuple[MoE, Array]) -> Array:
            layer, x = given
            return jnp.sum(layer(x)[0] ** 2)

        value, (gradient, dx) = eqx.filter_value_and_grad(loss)((layer, x))
        return value, *(getattr(w, "data", w) for w in weights(gradient)), gradient.router.weight, dx

    for got, want in zip(both(tensors, x), both(layer, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

    def kept(layer: MoE) -> list[Any]:
        arrays, static = eqx.partition(layer, eqx.is_inexact_array)
        _, vjp = jax.eval_shape(lambda *args: jax.vjp(lambda a, x: eqx.combine(a, static)(x)[0], *args), arrays, x)
        return sorted(leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.shape[0] >= TOKENS)

    assert kept(tensors) == kept(layer)


@pytest.mark.parametrize(
    "gated, save, kept, is_padded",
    [
        (True, "pre", 2, False),
        (True, "pre", 2, True),
        (False, "pre", 1, False),
        (True, "out", 1, False),
        (True, "nothing", 0, True),
    ],
)
def test_what_a_layer_keeps(gated: bool, save: str, kept: int, is_padded: bool) -> None:
    """Of the tokens themselves one copy, of their dtype; of hidden rows what `save` says; of other rows nothing.
    With padding no more."""
    d = 12  # unlike the number of experts
    options: dict[str, Any] = {"gated": gated, "save": save, "dtype": jnp.bfloat16}
    layer = eqx.filter_eval_shape(lambda: layer_of(d, HIDDEN, EXPERTS, 2, key=jax.random.key(0), **options))

    def run(layer: MoE, x: Array) -> Array:
        return layer(x, mask=jnp.arange(TOKENS) < 5 if is_padded else None)[0]

    x = jax.ShapeDtypeStruct((TOKENS, d), jnp.bfloat16)
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(run, *args), layer, x)[1])
    rows = [(leaf.dtype.name, leaf.shape) for leaf in leaves if leaf.shape[-1:] in ((d,), (HIDDEN,)) and leaf.ndim < 3]
    assert sorted(rows) == sorted([("bfloat16", x.shape), *[("bfloat16", (TOKENS * 2, HIDDEN))] * kept])
    assert not [leaf for leaf in leaves if leaf.shape == (TOKENS, 2, d)]


def test_a_quantised_layer_gathers_its_rows_again() -> None:
    """With `save="nothing"` and a recipe, the only rows per expert that are saved are the results."""
    make = partial(layer_of, D, HIDDEN, EXPERTS, 2, save="nothing", recipe="rowwise", key=jax.random.key(0))
    layer, x = eqx.filter_eval_shape(make), jax.ShapeDtypeStruct((TOKENS, D), jnp.float32)
    _, vjp = jax.eval_shape(lambda *args: jax.vjp(lambda layer, x: layer(x)[0], *args), layer, x)
    assert [leaf.shape for leaf in jax.tree.leaves(vjp)].count((TOKENS * 2, D)) == 1


def test_tokens_of_8_bits() -> None:
    """Weights of the router and of the shared gate, in float32, multiply them."""
    layer = layer_of(D, HIDDEN, EXPERTS, 2, key=jax.random.key(0))
    shared, x = jax.tree.map(lambda leaf: leaf[:1], layer.experts), jnp.ones((TOKENS, D), jnp.float8_e4m3fn)
    layer = MoE(layer.router, layer.experts, shared, shared_gate=jnp.ones(D), weigh_inputs=True)
    assert jax.eval_shape(lambda x: layer(x)[0], x).dtype == jnp.float8_e4m3fn


@pytest.mark.long
def test_gradients_of_tokens_beside_quantised_weights() -> None:
    """Those of the numbers that the weights stand for."""
    layer = layer_of(D, HIDDEN, EXPERTS, 2, key=jax.random.key(0))

    def where(layer: MoE) -> list[Any]:
        experts = layer.experts
        return [each.weight for each in (experts.gate, experts.up, experts.down) if each is not None]

    stored = [ragged.quantize(w, "float8_e4m3fn", "tensor") for w in where(layer)]
    dense = [each.dequantize().data for each in stored]

    def gradient(weights: list[Any]) -> Array:
        with_weights = eqx.tree_at(where, layer, weights)
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(with_weights(x)[0]))))(tokens())

    got, want = map(gradient, (stored, dense))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.any(want != 0)


@pytest.mark.long
def test_a_shared_gate_of_64_bits() -> None:
    """It rounds no float64: where it is 1, the layer has the results of a layer without it."""
    with jax.enable_x64(True):
        layer = layer_of(D, HIDDEN, EXPERTS, 2, key=jax.random.key(0))
        layer = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), layer)
        shared, x = layer.experts, jnp.abs(tokens().astype(jnp.float64))
        shared = jax.tree.map(lambda leaf: leaf[:1], shared)
        y, want = (MoE(layer.router, layer.experts, shared, shared_gate=g)(x)[0] for g in (jnp.full(D, 1e3), None))
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, want, rtol=1e-14)


@pytest.mark.long
def test_memory_of_a_training_step() -> None:
    """On a TPU v5e, at most 3 % above what was measured. With pre-activations, all that is elementwise is one pass
    over hidden rows; and over rows of the model's width, none weighs or adds them: three clear tails."""
    function, *avals = memory.step_of(**memory.CASES["pre"])
    compiled = tpu.compile_for("v5e", function, *avals)
    assert compiled.kernels
    found = memory.of_tpu("v5e", compiled.memory)
    assert found["v5e hbm"] < 1.03 * 1051 and found["v5e temp"] < 1.03 * 1490
    rows = memory.TOKENS * 2
    passes = [
        re.findall(rf"%(\S+) = [^=\n]*\[(?:1,)?{rows},{width}\][^=\n]* fusion\([^\n]*kind=kLoop", compiled.text)
        for width in (memory.HIDDEN, memory.D)
    ]
    assert [len(each) for each in passes] == [1, 3], passes
    assert not [name for name in passes[1] if name.startswith("multiply")], passes


@pytest.mark.long
def test_quantised_weights_over_a_mesh() -> None:
    """The results and the gradients of tokens are those of the numbers that the stored weights stand for, on one
    device. Each weight has another scaling: a device has the scales of its part, or those that all parts share."""
    layer = layer_of(64, 64, 4, 2, num_shared=1, key=jax.random.key(0))
    fp4 = jnp.float4_e2m1fn
    of: Any = (fp4, "mx"), ("int8", "row"), (fp4, "nvfp4"), ("float8_e4m3fn", (16, 8)), ("int8", "group")
    of += (("int8", "tensor"),)

    def where(layer: MoE) -> list[Any]:
        parts = (layer.experts, layer.shared)
        return [each.weight for e in parts if e is not None for each in (e.gate, e.up, e.down) if each is not None]

    stored = [ragged.quantize(w.mT, *each).mT for w, each in zip(where(layer), of, strict=True)]
    of_experts = jnp.linspace(0.5, 2.0, 4) * jnp.asarray(stored[2].tensor_scale)  # in a checkpoint each has its own
    stored[2] = eqx.tree_at(lambda x: x.tensor_scale, stored[2], of_experts)
    dense = eqx.tree_at(where, layer, [each.dequantize().data for each in stored])
    x = np.random.default_rng(0).standard_normal((16, 64)).astype("f4")

    def run(layer: MoE) -> Any:
        loss = lambda x: (jnp.sum(jnp.sin(y := layer(x)[0])), y)  # noqa: E731
        return jax.jit(jax.grad(loss, has_aux=True))(x)

    want = run(dense)
    with jax.set_mesh(mesh_of("auto", expert=2, model=2)):
        sharded = MoE(layer.router, layer.experts, layer.shared, axis="expert", tensor_axis="model")
        got = run(eqx.tree_at(where, sharded, stored))
        with pytest.raises(ValueError, match="would cut blocks of scales: 64 elements in blocks of 48"):
            w = ragged.quantize(layer.experts.down.weight, "int8", (48, 1))
            eqx.tree_at(lambda layer: layer.experts.down.weight, sharded, w)(x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.long
@pytest.mark.parametrize("save", ["pre", "out", "nothing"])
def test_gradients_where_float16_nearly_overflows(save: str) -> None:
    """Where a gate of -80,000 overflows, which `silu` makes 0, and where hidden rows of 40,000 times a weight would."""
    ids = jnp.zeros((4, 1), jnp.int32)

    def gradients(gate: float, down: float, weight: float, x: float) -> Any:
        layer = layer_of(2, 2, 2, 1, dtype=jnp.float16, save=save, key=jax.random.key(0))
        of = lambda layer: [getattr(layer.experts, name).weight for name in ("gate", "up", "down")]  # noqa: E731
        layer = eqx.tree_at(of, layer, [jnp.full((2, 2, 2), each, jnp.float16) for each in (gate, 1, down)])

        def loss(layer: MoE) -> Array:
            routing = Routing(jnp.full((4, 1), float(weight)), ids)
            return jnp.sum(layer(jnp.full((4, 2), x, jnp.float16), routing=routing)[0].astype(jnp.float32)) / 128

        return [np.asarray(each[0], np.float64) for each in of(eqx.filter_grad(loss)(layer))]

    for each in gradients(-200, 1, 1, 200):
        np.testing.assert_array_equal(each, 0)
    # Four tokens; `silu` of 200 is 200, with a slope of 1. Both columns of `down` are alike.
    by_gate = 4 * 2.5 * 2 * 2**-10 * 200 * 100 / 128
    wants = by_gate, by_gate, 4 * 2.5 * 200 * 200 / 128
    for each, want in zip(gradients(1, 2**-10, 2.5, 100), wants, strict=True):
        np.testing.assert_allclose(each, want, rtol=2**-9)


@pytest.mark.long
@pytest.mark.parametrize("explicit", ["data", "expert"])
def test_axes_of_two_types(explicit: str) -> None:
    """One axis of the mesh is `Explicit` and the other one `Auto`: results and gradients of one device."""
    names = ("data", "expert")
    types = tuple(AxisType.Explicit if name == explicit else AxisType.Auto for name in names)
    loss = lambda layer, x: jnp.sum(jnp.sin(layer(x)[0]))  # noqa: E731
    want = eqx.filter_value_and_grad(loss)(moe(), tokens())
    with jax.set_mesh(jax.make_mesh((2, 2), names, axis_types=types)):
        got = eqx.filter_value_and_grad(loss)(moe(axis="expert", data_axes=("data",)), tokens())
    for each, expected in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_who_has_what() -> None:
    """No device has more than its part of the experts, nor of their gradients, when they are placed as `specs` says."""
    mesh = mesh_of("explicit", data=2, expert=2, model=2)
    with jax.set_mesh(mesh):
        layer = moe(axis="expert", data_axes=("data",), tensor_axis="model", recipe="mxfp8")
        layer = jax.device_put(layer, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), layer.specs()))
        loss = eqx.filter_grad(lambda layer, x: jnp.sum(layer(x)[0]))
        grads = eqx.filter_jit(loss)(layer, jax.device_put(tokens(), jax.NamedSharding(mesh, P(("data", "expert")))))
    for experts, parts in ((grads.experts, 4), (grads.shared, 2)):
        for each in (experts.gate, experts.up, experts.down):
            held = each.weight.addressable_shards[0].data
            assert parts * held.size == each.weight.size and jnp.any(held != 0)
    assert grads.router.weight.addressable_shards[0].data.shape == layer.router.weight.shape


@pytest.mark.long
def test_each_layer_has_a_history_of_its_own() -> None:
    """So a model can be donated."""
    layer = moe(recipe=ragged.Recipe.preset("delayed", length=4))
    again = eqx.filter_jit(lambda layer: layer, donate="all")(layer)
    assert again.experts.up.recipe.history.shape == again.experts.gate.recipe.history.shape == (3, 4)


# --- parts of the hidden width are summed before they are rounded -----------------------------------------------------

PARTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dense": {"axis": "expert", "transport": "dense"},
    "ring": {"axis": "expert", "transport": "ring", "chunks": 2},
    "a function": {"activation": jax.nn.relu},
    "shared": {"num_shared": 1},
    "save": {"save": "nothing"},
}


class First(eqx.Module):
    """A router of the first expert."""

    def __call__(self, x: Array) -> tuple[Array, Array]:
        return jnp.ones((x.shape[0], 1)), jnp.zeros((x.shape[0], 1), jnp.int32)


@pytest.mark.parametrize("name", ["alone", *(pytest.param(name, marks=pytest.mark.long) for name in [*PARTS][1:])])
def test_parts_of_hidden_are_summed_before_they_are_rounded(name: str) -> None:
    """Hidden rows are ones, and a result is the sum of the rows of `down`: 256 + 1 on one device and -256 + 0 on
    another are 1, in bfloat16 too."""
    how: dict[str, Any] = {"activation": "relu", "router": First(), "tensor_axis": "model"} | PARTS[name]
    layer = layer_of(2, 4, 2, 1, gated=False, dtype=jnp.bfloat16, key=jax.random.key(0), **how)
    down = jnp.broadcast_to(jnp.asarray([256, 1, -256, 0], jnp.bfloat16)[None, :, None], (2, 4, 2))
    ones = jnp.ones((2, 2, 4), jnp.bfloat16)
    if layer.shared is None:
        layer = eqx.tree_at(lambda each: (each.experts.up.weight, each.experts.down.weight), layer, (ones, down))
    else:
        new = 0 * down, ones[:1], down[:1]
        of = lambda x: (x.experts.down.weight, x.shared.up.weight, x.shared.down.weight)  # noqa: E731
        layer = eqx.tree_at(of, layer, new)
    with jax.set_mesh(mesh_of("auto", **({"expert": 2} if "axis" in PARTS[name] else {}), model=2)):
        y = jax.jit(lambda layer: layer(jnp.full((4, 2), 0.5, jnp.bfloat16))[0])(layer)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float64), 1)


MESHES: list[dict[str, int]] = [{"data": 2, "expert": 2, "model": 2}, {"model": 8}, {"data": 2, "expert": 4}]


@pytest.mark.long
@pytest.mark.parametrize("axes", MESHES)
def test_sums_over_devices_happen_once(axes: dict[str, int]) -> None:
    """Of results, and of the gradients of tokens: one row per token, not one for each row of each product. Under `jit`,
    with `Explicit` axes. Besides: gradients of matrices, and a few numbers per row."""
    d, hidden, num_tokens, names = 48, 48, 64, axes.keys()  # a part of `hidden` has more than 4 columns
    layer = layer_of(
        d,
        hidden,
        EXPERTS,
        2,
        num_shared=1 if names == {"model"} else 0,
        axis="expert" if "expert" in names else None,
        data_axes=tuple(names & {"data"}),
        tensor_axis="model" if "model" in names else None,
        key=jax.random.key(0),
    )
    experts, tensor = axes.get("expert", 1), axes.get("model", 1)
    shards = axes.get("data", 1) * experts
    with jax.set_mesh(mesh_of("explicit", **axes)):
        of_tokens = P(tuple(name for name in ("data", "expert") if name in names) or None)
        arrays, static = eqx.partition(layer, eqx.is_array)
        arrays, x = jax.device_put((arrays, jnp.ones((num_tokens, d))), (layer.specs(), of_tokens))
        loss = lambda arrays, x: jnp.sum(jnp.sin(eqx.combine(arrays, static)(x)[0]))  # noqa: E731
        found = moved(jax.jit(jax.grad(loss, (0, 1))).lower(arrays, x).compile())
    summed = [each for name, types in found if name == "all-reduce" for each in re.findall(r"f32\[([\d,]+)\]", types)]
    shapes = [tuple(map(int, each.split(","))) for each in summed]
    per_device = (num_tokens // shards, d)
    wanted = [per_device] * 2 if tensor > 1 else []
    wanted += [(d, EXPERTS)] if shards > 1 else []
    matrices = [(EXPERTS // experts, d, hidden // tensor)] * 2 + [(EXPERTS // experts, hidden // tensor, d)]
    wanted += matrices if "data" in names else []
    assert sorted(shape for shape in shapes if len(shape) > 1 and shape[-1] > 4) == sorted(wanted)
    assert [name for name, _ in found].count("all-to-all") == (4 if experts > 1 else 0)
    assert not {name for name, _ in found} & {"collective-permute", "reduce-scatter"}


@pytest.mark.long
def test_sums_happen_once_in_a_map() -> None:
    """In a `shard_map` in which every device has all tokens, and ids that vary over the experts' axis."""
    page = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (code,) = (block for block in page if "def expert_parallel" in block)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "P": P, "ragged": ragged, "ids": jnp.arange(32).reshape(16, 2) % 8}
    exec(code, names)
    shapes = (16, 4), (16, 2), (8, 4, 6), (8, 6, 4)
    x, weights, up, down = (np.random.default_rng(i).standard_normal(s).astype("f4") for i, s in enumerate(shapes))
    loss = lambda x, *others: jnp.sum(jnp.sin(names["parallel"](x, names["ids"], *others)))  # noqa: E731
    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, weights, up, down).compile()
    silu = lambda z: z * sigmoid(z)  # noqa: E731
    x64, weights64, up64, down64 = (np.asarray(each, np.float64) for each in (x, weights, up, down))
    want = mixture(x64, np.asarray(names["ids"]), weights64, {"up": up64, "down": down64}, silu)
    gradients = want.dx, want.dweights, want.dexperts["up"], want.dexperts["down"]
    for got, each in zip(compiled(x, weights, up, down), gradients, strict=True):
        np.testing.assert_allclose(got, each, rtol=1e-4, atol=1e-5)
    summed = [each for name, types in moved(compiled) for each in re.findall(r"f32\[([\d,]+)\]", types)]
    assert sorted(each for each in summed if not each.endswith((",1", ",2"))) == ["16,4", "16,4"]


# --- other calls ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_dtypes_and_sizes() -> None:
    """Rows are of the tokens' dtype, whatever the matrices' is; what the router did is float32. A tensor stays one."""
    layer = moe()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), layer)
        for each, x in ((layer, tokens().astype(jnp.bfloat16)), (wide, tokens().astype(jnp.float64))):
            y, stats = jax.eval_shape(each, x)
            assert y.dtype == x.dtype
            assert [leaf.dtype for leaf in jax.tree.leaves(stats)] == [jnp.float32] * 2 + [jnp.int32] * 2
    x = GroupedTensor(tokens(), jnp.array([9, 0, 7], jnp.int32))
    y = jax.eval_shape(lambda x: layer(x)[0], x)
    assert isinstance(y, GroupedTensor) and y.shape == x.shape and y.num_groups == 3


@pytest.mark.long
def test_sizes_end_at_the_buffer() -> None:
    """Those of packed sequences, whatever they are; and no tokens at all give zeros, and gradients of zeros."""
    layer, run = moe(), eqx.filter_jit(lambda layer, x: layer(x))
    want, stats = run(layer, tokens())
    got, again = run(layer, GroupedTensor(tokens(), jnp.array([20, -5, 1000], jnp.int32)))
    np.testing.assert_allclose(got.data, want, rtol=1e-5, atol=1e-6)
    assert again.rows.tolist() == stats.rows.tolist()

    def losses(layer: MoE, x: Array) -> Any:
        y, stats = layer(x)
        assert stats.load_balance is not None and stats.z is not None
        return jnp.sum(y) + stats.load_balance + stats.z, (y, stats)

    (total, (y, stats)), grads = eqx.filter_value_and_grad(losses, has_aux=True)(layer, jnp.ones((0, D)))
    assert y.shape == (0, D)
    for each in jax.tree.leaves((total, stats, eqx.filter(grads, eqx.is_array))):
        np.testing.assert_array_equal(each, 0)


@pytest.mark.long
@pytest.mark.parametrize("model, save", [("mixtral", "nothing"), ("all", "pre")])
def test_other_derivatives(model: str, save: str) -> None:
    """Forward over reverse is the difference of the loop's gradients; in a `vmap`, each element has its own layer,
    tokens and padding."""
    program, step = Layer(model, save=save, padding="mask"), 1e-5
    draws = [program.draw(number) for number in (0, 2)]
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) for each in zip(*draws, strict=True)]
    found = jax.jit(jax.vmap(program.compute))(*stacked)
    for i, (layer, x, mask) in enumerate(draws):
        program.compare(layer, x.astype(np.float64), mask, jax.tree.map(lambda leaf, i=i: leaf[i], found))

    layer, x, mask = draws[0]
    direction = jax.tree.map(lambda leaf: jnp.cos(leaf * 9), layer)
    got = jax.jit(lambda *given: jax.jvp(lambda layer: program.compute(layer, x, mask)[1][0], *given))(
        (layer,), (direction,)
    )
    ends = []
    for sign in (1, -1):
        moved = jax.tree.map(
            lambda a, d, s=sign: np.asarray(a, np.float64) + s * step * np.asarray(d), layer, direction
        )
        ends.append(program.wanted(moved, x.astype(np.float64), mask)[0])
    for name, each in named(got[1]).items():
        want = (ends[0][name] - ends[1][name]) / (2 * step)
        np.testing.assert_allclose(each, want, rtol=1e-4, atol=1e-4 * np.abs(want).max(), err_msg=name)


class Cosine(eqx.Module):
    """A router that divides by the norm of each token, which has no derivative where it is zero."""

    weight: Array

    def __call__(self, x: Array) -> Routing:
        logits = x / jnp.linalg.norm(x, axis=1, keepdims=True) @ self.weight
        probabilities = jax.nn.softmax(logits)
        weights, experts = jax.lax.top_k(probabilities, 2)
        return Routing(weights, experts.astype(jnp.uint8), probabilities, logits)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["Cosine", "tensorwise", "blockwise", "delayed"])
def test_padding_and_a_recipe(recipe: str) -> None:
    """A padded call is the call without its padding: scales are those of tokens, and so are the largest values of a
    history. Another router has finite derivatives in padding, also those of its own arrays."""
    layer = moe(router=Cosine(normal((D, EXPERTS), 2))) if recipe == "Cosine" else moe(recipe=recipe)
    program, count = Layer("mixtral", padding="mask"), 17
    x, mask = tokens().at[count:].set(jnp.nan), jnp.arange(TOKENS) < count
    got = eqx.filter_jit(program.compute)(layer, x, mask)
    want = eqx.filter_jit(Layer("mixtral").compute)(layer, x[:count], mask[:count])
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        w = np.pad(w, [(0, TOKENS - count), (0, 0)]) if g.shape == (TOKENS, D) else w
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["dense", "ring"])
def test_wire(transport: str) -> None:
    """A payload of 8 bits costs a few percent, and NaN in padding reaches nothing."""
    mask = jnp.arange(TOKENS) < 17
    x = tokens().at[17:].set(jnp.nan)
    run = eqx.filter_jit(lambda layer: layer(x, mask=mask)[0])
    exact = run(moe())
    with jax.set_mesh(mesh_of("auto", expert=4)):
        rough = run(moe(axis="expert", wire="mxfp8", transport=transport))
    error = jnp.linalg.norm(rough - exact) / jnp.linalg.norm(exact)
    assert 1e-3 < error < 0.05 and not np.asarray(rough)[17:].any()


# --- one layer a group ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, use_bias", split([("bfloat16", True)], [("float32", False)]))
def test_grouped_linear(dtype: str, use_bias: bool) -> None:
    """Rows through their group's matrix and bias, rounded once; zeros in the tail, NaN there or not; groups with more
    dims too."""
    layer, sizes = GroupedLinear(D, HIDDEN, 4, use_bias, dtype=jnp.dtype(dtype), key=jax.random.key(0)), [5, 0, 3, 8]
    assert layer.weight.dtype == dtype and (layer.bias is not None) == use_bias
    assert np.abs(np.asarray(layer.weight, np.float32)).max() <= 1.01 * D**-0.5
    data = jnp.full((20, D), jnp.nan, dtype).at[:16].set(tokens()[:16].astype(dtype))
    bias = np.zeros((4, HIDDEN)) if layer.bias is None else np.asarray(layer.bias, np.float64)
    ids = np.repeat(np.arange(4), sizes)
    want = np.zeros((20, HIDDEN))
    for row, group in enumerate(ids):
        want[row] = np.asarray(data[row], np.float64) @ np.asarray(layer.weight[group], np.float64) + bias[group]
    y = layer(GroupedTensor(data, jnp.array(sizes, jnp.int32)))
    assert y.dtype == dtype
    tolerance = 1e-6 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(y.data, np.float64), want, rtol=tolerance, atol=1e-6)
    heads = GroupedTensor(jnp.stack([data, data], 1), jnp.array(sizes, jnp.int32))
    np.testing.assert_array_equal(layer(heads).data, jnp.stack([y.data, y.data], 1))
