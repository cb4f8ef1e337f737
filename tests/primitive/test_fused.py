"""One kernel for products and what is made of their rows: what it computes, what it stores, and where it runs."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ragged
from ragged import GroupedTensor
from ragged.backends.tpu import tiles, units
from ragged.primitive import lowering
from ragged.tuning import TpuConfig
from tests import ran, tpu
from tests.ops.test_epilogue import FUNCTIONS, SIZES, Problem, close, gated, operands

Aval = jax.ShapeDtypeStruct


@pytest.fixture(scope="module")
def launches() -> Iterator[ran.Launches]:
    """The TPU's kernels, interpreted, in place of the CPU's own: what ran."""
    with ran.interpreted("pallas_tpu") as launches:
        yield launches


TILED = {"k in three parts": (16, 128, 128), "n in parts": (8, 384, 128), "whole": ()}


@pytest.mark.sampled
@pytest.mark.parametrize("how", TILED)
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("layout", ["forward", "batched"])
def test_on_tpus(layout: str, activation: str | None, how: str, launches: ran.Launches) -> None:
    """Values of one kernel, and of the pre-activations that it stores for a gradient; some with biases."""
    has_bias = how != "n in parts"
    p = Problem(layout, n=200, k=300)
    x, ws = p.arrays()
    bias = (jnp.asarray(p.bias, jnp.float32), jnp.asarray(p.shared, jnp.float32)) if has_bias else None
    m, *others = TILED[how] or (None, None, None)
    record = TpuConfig(m=7 if m and layout == "batched" else m, k=others[0], n=others[1], interpret=True)
    options: dict[str, Any] = {"backend": record}

    def run(x: Array, ws: list[Array]) -> Array:
        lhs, rhs = p.tensors(x, ws)
        return ragged.gated_matmul(lhs, *rhs, activation=activation, bias=bias, **options).data

    gate, up = ([a @ b for a, b in zip(p.x, w, strict=True)] for w in p.ws)
    if has_bias:
        gate, up = [z + b for z, b in zip(gate, p.bias, strict=True)], [z + p.shared for z in up]
    want = [FUNCTIONS[activation](g) * u for g, u in zip(gate, up, strict=True)]
    with ran.only("pallas_tpu", launches):
        out = jax.block_until_ready(run(x, ws))
        assert len(launches) == 1
        kept = [z for z in jax.tree.leaves(jax.vjp(run, x, ws)[1]) if z.shape == out.shape]
    for each, groups in ((out, want), (kept[0], gate), (kept[1], up)):
        for got, values in zip(p.groups(each), groups, strict=True):
            close(got, values, "float32")
        assert layout == "batched" or not np.asarray(each)[SIZES.sum() :].any()


def test_without_a_gate(launches: ran.Launches) -> None:
    """An activation that isn't 0 at 0 leaves zeros in the tail and in groups that aren't held; NaN stays in its
    group."""
    x, w, _, bias = operands()
    x = x.at[6].set(jnp.nan).at[SIZES.sum() :].set(jnp.nan)  # of group 2
    tensor = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32))
    with ran.only("pallas_tpu", launches):
        out = np.asarray(ragged.matmul(tensor, w[1:4], bias=bias[1:4], activation="sigmoid", group_offset=1).data)
        assert len(launches) == 1
    held = np.isin(np.repeat(np.arange(6), [*SIZES, 24 - SIZES.sum()]), (1, 2, 3))
    assert not out[~held].any() and np.isnan(out[6]).all()
    row = np.repeat(np.arange(5), SIZES)[8]
    want = FUNCTIONS["sigmoid"](np.asarray(x[8] @ w[row] + bias[row], np.float64))
    np.testing.assert_allclose(out[8], want, rtol=1e-5)
    assert np.isfinite(np.delete(out, 6, axis=0)).all()


def stored(fn: Callable[..., Any], *args: Any) -> list[tuple[bool, ...]]:
    """What each of a program's fused products stores, in the program that is lowered."""
    found: list[tuple[bool, ...]] = []

    def note(platform: str, x: Any, call: Any, target: Any, *composed: Any) -> Any:
        found.extend([call.epilogue.stored] if composed else [])
        return compute(platform, x, call, target, *composed)

    compute = lowering.compute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "compute", note)
        jax.clear_caches()
        jax.jit(fn).lower(*args)
    jax.clear_caches()
    return found


def test_what_is_stored() -> None:
    """No pre-activation where nothing needs it; and no result where only they are computed again."""
    args = operands()
    gradient = lambda save: jax.grad(lambda *a: jnp.sum(gated(*a, save=save) ** 2), (0, 1, 2))  # noqa: E731
    assert stored(gated, *args) == [(True, False, False)]
    assert stored(lambda *a: ragged.matmul(GroupedTensor(a[0], jnp.asarray(SIZES)), a[1], bias=a[3]).data, *args) == [
        (True, False)
    ]
    assert stored(gradient("pre"), *args) == [(True, True, True)]
    assert stored(gradient("out"), *args) == [(True, False, False), (False, True, True)]


@pytest.mark.long
def test_a_map_of_rows_is_one_kernel(launches: ran.Launches) -> None:
    """Rows and sizes may be mapped; of mapped matrices there are two products and a map."""
    x, w_gate, w_up, bias = operands()
    xs, sizes = jnp.stack([x, 2 * x]), jnp.stack([jnp.asarray(SIZES), jnp.asarray(SIZES[::-1])]).astype(jnp.int32)

    def run(x: Array, s: Array, w_gate: Array) -> Array:
        return ragged.gated_matmul(GroupedTensor(x, s), w_gate, w_up, bias=(bias, None)).data

    with ran.only("pallas_tpu", launches):
        got = jax.block_until_ready(jax.vmap(run, (0, 0, None))(xs, sizes, w_gate))
        assert len(launches) == 1
    want = jnp.stack([run(*each, w_gate) for each in zip(xs, sizes, strict=True)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    launches.clear()
    got = jax.block_until_ready(jax.vmap(run, (0, 0, 0))(xs, sizes, jnp.stack([w_gate, w_up])))
    assert [name for name, _ in launches] == ["pallas_tpu"] * 2
    np.testing.assert_allclose(got[1], run(xs[1], sizes[1], w_up), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_recipe_is_one_kernel(recipe: str, launches: ran.Launches) -> None:
    """The rows are quantised once, and scales are applied to each product before its bias."""
    x, w_gate, w_up, bias = (each.astype(jnp.bfloat16) for each in operands(256, 128))
    tensor = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32))
    with ran.only("pallas_tpu", launches):
        got = ragged.gated_matmul(tensor, w_gate, w_up, bias=(bias, None), recipe=recipe)
        jax.block_until_ready(got)
        assert len(launches) == 1
    gate, up = (
        np.asarray(ragged.matmul(tensor, w, recipe=recipe, preferred_element_type=jnp.float32).data, np.float64)
        for w in (w_gate, w_up)
    )
    gate[: SIZES.sum()] += np.asarray(bias, np.float64)[np.repeat(np.arange(5), SIZES)]
    held = SIZES.sum()
    close(got.data[:held], (FUNCTIONS["silu"](gate) * up)[:held], "bfloat16")


@pytest.mark.long
def test_what_is_composed(launches: ran.Launches) -> None:
    """What no kernel ends: a sum with what is there, one matrix for all groups, rows quantised in two ways."""
    x, w_gate, w_up, _ = operands(256, 128)
    tensor, rows = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32)), jnp.ones((24, 128))
    delayed = (ragged.Recipe.preset("delayed"), ragged.Recipe.preset("delayed"))

    def count(fn: Callable[[], GroupedTensor]) -> int:
        launches.clear()
        jax.block_until_ready(fn())
        assert {name for name, _ in launches} == {"pallas_tpu"}
        return len(launches)

    there = ragged.matmul(tensor, w_gate, existing_out=rows, activation="silu")
    want = FUNCTIONS["silu"](np.asarray(ragged.matmul(tensor, w_gate).data, np.float64) + 1)
    close(there.data[: SIZES.sum()], want[: SIZES.sum()], "float32")
    assert count(lambda: ragged.matmul(tensor, w_gate, existing_out=rows, activation="silu")) == 1
    assert count(lambda: ragged.gated_matmul(tensor, w_gate[0], w_up[0])) == 2
    assert count(lambda: ragged.gated_matmul(tensor, w_gate, w_up, recipe=delayed)) == 2
    assert count(lambda: ragged.gated_matmul(tensor, w_gate, w_up, recipe=("rowwise", "tensorwise"))) == 2
    assert count(lambda: ragged.gated_matmul(tensor, w_gate, w_up, recipe=("rowwise", "rowwise"))) == 1
    halves: dict[str, Any] = {"preferred_element_type": jnp.float32}
    assert count(lambda: ragged.gated_matmul(tensor, w_gate.astype(jnp.bfloat16), w_up, **halves)) == 2


def test_recipes_that_quantise_rows_in_two_ways_are_two_products() -> None:
    """Gate and up are one product only if both recipes quantise the rows alike, and neither scales by past steps."""
    by_row, by_tensor = (ragged.Cast(jnp.float8_e4m3fn, scaling) for scaling in ("row", "tensor"))
    rows, tensor = (ragged.Recipe((x, by_row), (x, by_row), (x, by_row)) for x in (by_row, by_tensor))
    x, w = Aval((24, 16), jnp.float32), Aval((len(SIZES), 16, 8), jnp.float32)
    for recipe, fused, apart in ((rows, 1, 0), ((rows, tensor), 0, 2), ("delayed", 0, 2)):

        def product(x: Array, gate: Array, up: Array, recipe: Any = recipe) -> Array:
            return ragged.gated_matmul(GroupedTensor(x, SIZES.astype(np.int32)), gate, up, recipe=recipe).data

        program = str(jax.make_jaxpr(product)(x, w, w))
        assert (program.count("ragged_fused_matmul["), program.count("ragged_matmul[")) == (fused, apart)


def test_a_second_matrix_takes_memory() -> None:
    """Buffers of it, and an accumulator of its product; each array that is stored has buffers too."""
    wide = jnp.dtype(jnp.bfloat16)
    dtypes = wide, wide, wide
    dot = units.dot(jnp.bfloat16, jnp.bfloat16, tiles.chip(None))
    one = tiles.Problem("rows", 4096, 2048, 1024, groups=8, dtypes=dtypes, dot=dot, buffers=2)
    tile = (512, 256, 128)
    gated, trained = one._replace(products=2), one._replace(products=2, results=3)
    assert tiles.vmem(gated, tile) - tiles.vmem(one, tile) == 2 * 256 * 128 * 2 + 2 * 512 * 128 * 4
    assert tiles.vmem(trained, tile) - tiles.vmem(gated, tile) == 2 * 2 * 512 * 128 * 2


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize(
    "activation, generation",
    [
        *(("silu", each) for each in ("v4", "v5e", "v6e", "tpu7x")),
        *((each, "v5e") for each in FUNCTIONS if each != "silu"),
    ],
)
def test_compiled(activation: str | None, generation: str) -> None:
    """For real TPUs, forward and backward: a fused kernel, and two for each of the gradient's products."""
    wide = jnp.bfloat16
    avals = Aval((512, 256), wide), *[Aval((4, 256, 384), wide)] * 2, Aval((4, 384), wide), Aval((4,), jnp.int32)

    def run(*args: Array) -> Array:
        x, w_gate, w_up, bias, s = args
        return ragged.gated_matmul(GroupedTensor(x, s), w_gate, w_up, activation=activation, bias=(bias, None)).data

    def step(*args: Array) -> Any:
        return jax.value_and_grad(lambda *a: jnp.sum(run(*a, args[-1]).astype(jnp.float32)), range(4))(*args[:-1])

    assert len(tpu.compile_for(generation, run, *avals).kernels) == 1
    if activation == "silu":
        assert len(tpu.compile_for(generation, step, *avals).kernels) == 5


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
