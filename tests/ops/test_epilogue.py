"""Biases, activations and gates: what derivatives keep, recipes, and which calls no kernel has. Values are in
`tests/contract/test_epilogues.py`."""

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ragged
from ragged import Cast, GroupedTensor, Recipe
from ragged.tuning import TpuConfig
from tests import gpu, tpu
from tests.contract.epilogues import ACTIVATIONS
from tests.contract.launches import equations, launches
from tests.moe import clamped

SIZES = np.array([5, 0, 9, 1, 4])  # in buffers of 24
TPU = TpuConfig(interpret=True)
Aval = jax.ShapeDtypeStruct


def operands(k: int = 8, n: int = 16, dtype: Any = jnp.float32) -> tuple[GroupedTensor, Array, Array, Array]:
    """Rows, two weights, and a bias for each group."""
    rng = np.random.default_rng(0)
    x, gate, up, bias = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((24, k), (5, k, n), (5, k, n), (5, n))
    )
    return GroupedTensor(x, jnp.asarray(SIZES, jnp.int32)), gate, up, bias


@pytest.mark.long
@pytest.mark.parametrize("is_gathered, save", [(True, "pre"), (False, "out")])
def test_a_kernel_adds_the_cotangents_of_rows(is_gathered: bool, save: str) -> None:
    """Of both products of a gate, without a pass over memory. That of the second has a tail of zeros already."""
    x, gate, up, _ = operands()
    route = ragged.route(jnp.asarray(np.arange(24) % 5), 5)

    def loss(tokens: Array, gate: Array, up: Array) -> Array:
        rows = route.gathered(tokens) if is_gathered else x.with_data(tokens)
        return jnp.sum(ragged.gated_matmul(rows, gate, up, activation="silu", save=save).data ** 2)

    gradient = jax.grad(loss, range(3))
    program = str(jax.make_jaxpr(gradient)(x.data, gate, up))
    assert not re.search(r"f32\[24,8\] = add", program) and program.count("has_zero_tail=True") == 1
    clears_tail = "(tensor<24x8xi1>, tensor<24x8xf32>, tensor<f32>)"
    assert clears_tail not in jax.jit(gradient).lower(x.data, gate, up).as_text()


def test_a_gate_that_uses_one_product() -> None:
    """The other product's cotangent is zero, and the rows get that of the product that is used."""
    x, *matrices, _ = operands()

    @jax.jit
    def gradients(rows: Array) -> list[Array]:
        def loss(rows: Array, square: Callable[..., Array]) -> Array:
            return jnp.sum(ragged.gated_matmul(x.with_data(rows), *matrices, activation=square).data)

        return [jax.grad(loss)(rows, square) for square in (lambda g, u: g**2, lambda g, u: u**2)]

    for got, w in zip(gradients(x.data), matrices, strict=True):
        want = jax.grad(lambda rows, w=w: jnp.sum((x.with_data(rows) @ w).data ** 2))(x.data)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_kept() -> None:
    """Of the size of the hidden rows, two pre-activations in the result's dtype; or none, with each product once more
    in the derivative."""
    x, *others = operands(dtype=jnp.bfloat16)
    args = x.data, *others

    def gated(rows: Array, gate: Array, up: Array, bias: Array, **options: Any) -> Array:
        return ragged.gated_matmul(x.with_data(rows), gate, up, bias=(bias, None), **options).data

    def kept(fn: Callable[..., Array]) -> list[Any]:
        residuals = jax.eval_shape(lambda *a: jax.vjp(fn, *a)[1], *args)
        return [each.dtype for each in jax.tree.leaves(residuals) if each.shape == (24, 16)]

    def count(fn: Callable[..., Array]) -> int:
        gradient = jax.grad(lambda *a: jnp.sum(fn(*a), dtype=jnp.float32), argnums=range(4))
        return str(jax.make_jaxpr(gradient)(*args)).count("ragged_fused_matmul[")

    def named(*names: str) -> Callable[..., Array]:
        return jax.checkpoint(gated, policy=jax.checkpoint_policies.save_only_these_names(*names))

    assert kept(gated) == [jnp.bfloat16] * 2 == kept(named("ragged_gate", "ragged_up"))
    assert kept(partial(gated, save="out")) == [] == kept(named())
    assert (count(gated), count(partial(gated, save="out"))) == (1, 2)


@pytest.mark.parametrize("columns", ["halves", "interleaved"])
def test_one_weight_is_one_product(columns: str) -> None:
    """The derivative keeps the weight itself, neither of its matrices, and has two products, by the rows and by it."""
    x, gate, *_ = operands()

    def gated(rows: Array, w: Array) -> Array:
        return ragged.gated_matmul(x.with_data(rows), w, columns=columns).data

    residuals = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(gated, *a)[1], x.data, gate))
    assert [each.shape for each in residuals if each.ndim == 3] == [gate.shape]
    jaxpr: Any = jax.make_jaxpr(jax.grad(lambda *a: jnp.sum(gated(*a)), argnums=(0, 1)))(x.data, gate)
    program = str(jaxpr)
    assert (program.count("ragged_fused_matmul["), program.count("ragged_matmul[")) == (1, 2)
    # XLA takes minutes to compile zeros between columns for a TPU.
    interior = [n for pad in equations(jaxpr.jaxpr, "pad") for _, _, n in pad.params["padding_config"]]
    assert not any(interior)


WHOLE_LANES = "isn't a part of 300 interleaved columns in whole lanes.\nIt must be a multiple of 128, at most 256"
WRONG_TILES = [
    ("interleaved", 300, 300, WHOLE_LANES),
    ("interleaved", 300, 384, WHOLE_LANES),
    ("halves", 384, 256, "doesn't divide a half of the weight, 384 columns"),
]


@pytest.mark.parametrize("columns, n, tile, message", WRONG_TILES)
def test_tiles_that_dont_split_one_weight(columns: str, n: int, tile: int, message: str) -> None:
    """The error says which columns a tile may have."""
    rows = GroupedTensor(jnp.ones((16, 128)), jnp.array([7, 9], jnp.int32))
    config = TpuConfig(m=16, k=128, n=tile, interpret=True)
    with pytest.raises(ValueError, match=f"tile_n={tile} {message}"):
        ragged.gated_matmul(rows, jnp.ones((2, 128, 2 * n)), columns=columns, backend=config)


NAMED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gated": ({"names": ("mlpwi_0", "mlpwi_1")}, ("mlpwi_0", "mlpwi_1")),
    "gated, by default": ({}, ("ragged_gate", "ragged_up")),
    "one weight": ({"names": ("mlpwi", "up"), "columns": "halves"}, ("mlpwi", "up")),
    "activated": ({"activation": "silu", "name": "mlpwi"}, ("mlpwi",)),
    "activated, by default": ({"activation": "silu"}, ("ragged_pre_activation",)),
}


@pytest.mark.long
@pytest.mark.parametrize("call", NAMED)
def test_names(call: str) -> None:
    """A policy saves or offloads each pre-activation by its name, the library's or the caller's, and the gradients
    stay the same. What isn't saved is multiplied again."""
    x, gate, up, _ = operands()
    (options, names), policies = NAMED[call], jax.checkpoint_policies

    def fn(rows: Array, gate: Array, up: Array) -> Array:
        if "activation" in options:
            return ragged.matmul(x.with_data(rows), gate, **options).data
        weights = (jnp.concatenate([gate, up], axis=2),) if "columns" in options else (gate, up)
        return ragged.gated_matmul(x.with_data(rows), *weights, **options).data

    def kept(policy: Any) -> tuple[Any, list[Array]]:
        def run(*args: Array) -> Any:
            out, pull = jax.vjp(jax.checkpoint(fn, policy=policy), *args)
            return pull(jnp.ones_like(out)), [each for each in jax.tree.leaves(pull) if each.shape == (24, 16)]

        return jax.jit(run)(x.data, gate, up)

    want, none = kept(policies.save_only_these_names("ragged", "mlp"))
    assert not none
    for name, w in zip(names, (gate, up), strict=False):
        got, saved = kept(policies.save_only_these_names(name))
        assert len(saved) == 1
        np.testing.assert_allclose(saved[0], ragged.matmul(x, w).data, atol=1e-5)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)
    offload: Any = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[*names],
        offload_src="device",
        offload_dst="pinned_host",
    )
    loss = jax.checkpoint(lambda *args: fn(*args).sum(), policy=offload)
    program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x.data, gate, up))
    assert program.count("<host>[24,16] = device_put") == len(names)


def test_pre_activations_beyond_float16() -> None:
    """The activation of -90,000 is zero, and so is its derivative, though float16 rounds it to infinity."""
    x = GroupedTensor(jnp.array([[300.0], [1.0], [300.0]], jnp.float16), jnp.array([1, 2], jnp.int32))

    @jax.jit
    def run(w: Array) -> Any:
        def loss(w: Array, **options: Any) -> Array:
            return jnp.sum(ragged.matmul(x, w, **options).data.astype(jnp.float32))

        every = itertools.product(("silu", "gelu", "gelu_tanh"), ("pre", "out"))
        return [jax.value_and_grad(partial(loss, activation=f, save=save))(w) for f, save in every]

    for value, grad in run(jnp.array([[[-300.0]], [[30.0]]], jnp.float16)):
        np.testing.assert_array_equal(value, 0 + 30 + 9000)
        np.testing.assert_array_equal(grad.ravel(), [0, 301])


def test_what_is_added_to_rows_of_other_shards() -> None:
    """Their derivatives are zero, whatever the activation's derivative is there."""
    x, gate, _, _ = operands()
    is_local = np.repeat(np.arange(5), SIZES) == 2

    def total(existing: Array) -> Array:
        options: dict[str, Any] = {"group_offset": 2, "existing_out": existing}
        return ragged.matmul(x, gate[2:3], activation=lambda z: jnp.sqrt(jnp.abs(z)), **options).data.sum()

    gradient = np.asarray(jax.grad(total)(jnp.zeros((24, 16)).at[:19].set(is_local[:, None] * 1.0)))
    assert np.isfinite(gradient).all() and not gradient[~np.resize(is_local, 24)].any()
    assert (gradient[:19][is_local] != 0).all()


def test_no_group_is_held() -> None:
    """All rows are zero, although the activation of 0 isn't."""
    x, w, _, bias = operands()
    out = ragged.matmul(x, w[:0], bias=bias[:0], group_offset=0, activation="sigmoid").data
    np.testing.assert_array_equal(out, np.zeros((24, 16)))


@pytest.mark.long
def test_dtypes_of_gate_and_up() -> None:
    """The result has the common dtype, whichever of the two has more bits; a kernel multiplies one of them."""
    x, gate, up, _ = operands()
    x, gate = x.astype(jnp.bfloat16), gate.astype(jnp.bfloat16)
    want = [np.asarray(x.data, np.float64)[:5] @ np.asarray(w[0], np.float64) for w in (gate, up)]
    for weights, (first, second) in (((gate, up), want), ((up, gate), want[::-1])):
        with launches() as ran:
            got = ragged.gated_matmul(x, *weights, activation="sigmoid", backend=TPU)
        assert ran == [("pallas_tpu", "grouped_matmul")] * 2 and got.dtype == jnp.float32
        np.testing.assert_allclose(got.data[:5], second / (1 + np.exp(-first)), rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_which_recipes_are_one_product() -> None:
    """Gate and up are one product, and a TPU's kernel, if both recipes quantise the rows alike, without a history."""
    x, w, _, _ = operands(256, 128)
    row, tensor = (Cast(jnp.float8_e4m3fn, scaling) for scaling in ("row", "tensor"))
    by_row, by_tensor = (Recipe(*[(cast, row)] * 3) for cast in (row, tensor))
    of_one: list[Any] = [by_row, "blockwise", "mxfp8"]
    for number, recipe in enumerate([*of_one, (by_row, by_tensor), ("delayed", "delayed")]):

        def gated(x: GroupedTensor, recipe: Any = recipe) -> Array:
            return ragged.gated_matmul(x, w, w, recipe=recipe, backend=TPU).data

        program = str(jax.make_jaxpr(gated)(x))
        counts = program.count("ragged_fused_matmul["), program.count("ragged_matmul[")
        if number >= len(of_one):
            assert counts == (0, 2)
            continue
        with launches() as ran:
            jax.jit(gated).lower(x)
        assert counts == (1, 0) and ran == [("pallas_tpu", "grouped_matmul -> 1")]


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_operands_are_composed(kind: AxisType | None) -> None:
    """The epilogue is fused only without a mesh."""

    def product(x: Array) -> Array:
        tensor = GroupedTensor(x, jnp.array([7, 9], jnp.int32))
        return ragged.matmul(tensor, jnp.ones((2, 4, 4)), activation="silu").data

    x = jnp.ones((16, 4))
    if kind is not None:
        x = jax.device_put(x, NamedSharding(jax.make_mesh((8,), ("d",), axis_types=(kind,)), PartitionSpec("d")))
    assert ("ragged_fused_matmul" in str(jax.make_jaxpr(product)(x))) == (kind is None)


# For chips that aren't here.

X, WEIGHT, SHORT = Aval((4096, 2048), jnp.bfloat16), Aval((8, 2048, 1024), jnp.bfloat16), Aval((8,), jnp.int32)
BOTH = Aval((8, 2048, 2048), jnp.bfloat16)


def of_chip(activation: Any, x: Array, gate: Array, up: Array, sizes: Array) -> Array:
    rows = GroupedTensor(x, sizes)
    return ragged.gated_matmul(rows, gate, up, activation=activation, bias=(gate[:, 0], None)).data


def of_one_weight(columns: str, x: Array, w: Array, sizes: Array) -> Array:
    return ragged.gated_matmul(GroupedTensor(x, sizes), w, columns=columns, activation=clamped).data


FUSED = ("silu", "gelu", "softplus", "relu squared", "quick gelu", "clamped")


def of_all(x: Array, gate: Array, up: Array, sizes: Array) -> list[Array]:
    return [of_chip(ACTIVATIONS[name].passed, x, gate, up, sizes) for name in FUSED]


@pytest.mark.long
def test_compiled_for_a_tpu() -> None:
    """One kernel for each function, which leaves a fifth of the chip's VMEM."""
    compiled = tpu.compile_for("tpu7x", of_all, X, WEIGHT, WEIGHT, SHORT)
    assert len(compiled.kernels) == len(FUSED) and max(compiled.vmem) <= 0.8 * tpu.VMEM_MIB["tpu7x"]


@pytest.mark.long
def test_gradients_compiled_for_a_tpu() -> None:
    """Two kernels for the gradients by the rows, and two for those by the weights."""

    def step(x: Array, gate: Array, up: Array, sizes: Array) -> Any:
        def loss(x: Array, gate: Array, up: Array) -> Array:
            return jnp.sum(of_chip("silu", x, gate, up, sizes).astype(jnp.float32))

        return jax.value_and_grad(loss, range(3))(x, gate, up)

    assert len(tpu.compile_for("v5e", step, X, WEIGHT, WEIGHT, SHORT).kernels) == 5


@pytest.mark.long
def test_compiled_for_a_gpu() -> None:
    """One kernel for each function, without spills."""
    kernels = gpu.compile_for("NVIDIA H200", of_all, X, WEIGHT, WEIGHT, SHORT)
    assert [kernel.spill_bytes for kernel in kernels] == [0] * len(FUSED)


@pytest.mark.long
@pytest.mark.parametrize(
    "generation, columns, rows",
    [("tpu7x", "halves", X.shape[0]), ("v5e", "interleaved", X.shape[0]), ("v6e", "interleaved", 1)],
)
def test_tpus_read_one_weight_in_place(generation: str, columns: str, rows: int) -> None:
    """One kernel takes the weight, whether its columns are halves or alternate, and no other operation splits it."""
    n = 1024 if columns == "halves" else 2880  # gpt-oss's, no multiple of 128
    x, both = Aval((rows, 2048), jnp.bfloat16), Aval((8, 2048, 2 * n), jnp.bfloat16)
    compiled = tpu.compile_for(generation, partial(of_one_weight, columns), x, both, SHORT)
    assert len(compiled.kernels) == 1 and f"bf16[8,2048,{n}]" not in compiled.text
    assert max(compiled.vmem) <= 0.75 * tpu.VMEM_MIB[generation]


@pytest.mark.long
@pytest.mark.parametrize(
    "chip, columns",
    [("NVIDIA A100", "halves"), *((chip, "interleaved") for chip in gpu.ARCHITECTURES)],
)
def test_gpus_read_one_weight_in_place(chip: str, columns: str) -> None:
    """One kernel, without spills, takes the weight, whether its columns are halves or alternate."""
    args = partial(of_one_weight, columns), X, BOTH, SHORT
    (kernel,) = gpu.compile_for(chip, *args)
    (call,) = (line for line in gpu.lower_for(chip, *args).as_text().splitlines() if "custom_call" in line)
    assert kernel.spill_bytes == 0 and "8x2048x1024" not in call  # XLA drops what it doesn't take
