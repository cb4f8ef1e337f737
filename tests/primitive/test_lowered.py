"""Programs as they are lowered: which kernels are called how often, how, and what XLA and its profiler are told."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.experimental import pallas as pl
from jax.extend.mlir import ir

import ragged
from ragged import GroupedTensor
from ragged.backends.tpu import pipeline
from ragged.tuning import GpuConfig, TpuConfig
from tests import gpu
from tests.backends.layers import product
from tests.cases import LETTERS, NAMES, split

TILES = TpuConfig(m=128, k=128, n=128), GpuConfig(m=128, k=128, n=128, warps=8, stages=2)

Aval = jax.ShapeDtypeStruct
ROWS, K, N, GROUPS = 256, 384, 128, 5
SIZES = Aval((GROUPS,), jnp.int32)


class Kernel(NamedTuple):
    """One call of a kernel."""

    metadata: dict[str, Any]  # what the profiler shows
    flops: int
    bytes_accessed: int
    shapes: list[tuple[int, ...]]  # of operands and result


def kernels(platform: str, function: Callable[..., Any], *avals: Any) -> list[Kernel]:
    """The kernels of `function`, lowered for an H200 or any TPU."""
    if platform == "cuda":
        lowered = gpu.lower_for("NVIDIA H200", function, *avals)
    else:
        lowered = jax.jit(function).trace(*avals).lower(lowering_platforms=("tpu",))
    calls, found = [], []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            values = (*operation.operands, *operation.results)
            shapes = [tuple(ir.RankedTensorType(x.type).shape) for x in values]
            calls.append((operation.attributes["call_target_name"].value, operation.attributes, shapes))
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    for name, given, shapes in calls:
        if name == "tpu_custom_call":
            cost = json.loads(given["backend_config"].value)["custom_call_config"]["cost_estimate"]
        elif name == "triton_kernel_call_ffi":
            cost = json.loads(given["mhlo.backend_config"]["cost_estimate_json"].value)
        else:
            continue
        # XLA's profiler looks for this key of this attribute, and finds JSON in JSON.
        shown = json.loads(given["mhlo.frontend_attributes"]["kernel_metadata"].value)["xprof_metadata"]
        found.append(Kernel(json.loads(shown), int(cost["flops"]), int(cost["bytes_accessed"]), shapes))
    return found


def expected(axes: str, transposed: tuple[bool, bool], tile: tuple[int, int, int], groups: int) -> dict[str, Any]:
    return {
        "axes": axes,
        "transpose_lhs": transposed[0],
        "transpose_rhs": transposed[1],
        "tiling": dict(zip(("tile_m", "tile_k", "tile_n"), tile, strict=True)),
        "dtypes": {"lhs": "bfloat16", "rhs": "bfloat16", "out": "bfloat16"},
        "num_actual_groups": groups,
    }


def bf16(*shape: int) -> Any:
    return Aval(shape, jnp.bfloat16)


PRODUCTS = {
    # Of 5 groups, `rhs` holds 3.
    "forward": (
        partial(ragged.grouped_matmul, tiling=(64, 128, 128)),
        (bf16(ROWS, K), bf16(3, K, N), SIZES),
        expected("mk,kn->mn", (False, False), (64, 128, 128), 3),
        2 * ROWS * K * N,
    ),
    "forward, transposed": (
        partial(ragged.grouped_matmul, tiling=(64, 128, 128), transpose_rhs=True),
        (bf16(ROWS, K), bf16(3, N, K), SIZES),
        expected("mk,nk->mn", (False, True), (64, 128, 128), 3),
        2 * ROWS * K * N,
    ),
    "wgrad": (
        lambda x, dy, sizes: ragged.transposed_grouped_matmul(
            x.T, dy, sizes, tiling=(64, 128, 128), num_actual_groups=2
        ),
        (bf16(ROWS, K), bf16(ROWS, N), SIZES),
        expected("km,kn->mn", (True, False), (128, 64, 128), 2),
        2 * ROWS * K * N,
    ),
    "batched": (
        lambda x, y: ragged.matmul(GroupedTensor(x).mT, GroupedTensor(y)).data,
        (bf16(GROUPS, K, 256), bf16(GROUPS, K, N)),
        expected("km,kn->mn", (True, False), (128, 128, 128), GROUPS),
        2 * GROUPS * 256 * K * N,
    ),
    "two ragged letters": (
        lambda x, y, sizes: ragged.matmul(GroupedTensor(x, sizes), GroupedTensor(y, sizes).mT, max_last=128).data,
        (bf16(ROWS, K), bf16(ROWS, K), SIZES),
        expected("mk,nk->mn", (False, True), (128, 128, 128), GROUPS),
        2 * ROWS * K * 128 // GROUPS,
    ),
}


@pytest.mark.parametrize(
    "platform, name",
    split([("tpu", "wgrad")], [("tpu", "two ragged letters"), *(("cuda", name) for name in PRODUCTS)]),
)
def test_what_the_profiler_shows(platform: str, name: str) -> None:
    """Each kernel's letters, transposition, tiles, dtypes and groups under the key that is read; its FLOPs;
    operands and result as bytes."""
    function, avals, metadata, flops = PRODUCTS[name]
    with ragged.tuning.using(*TILES):  # for those that have no tiling
        (kernel,) = kernels(platform, function, *avals)
    out = jax.eval_shape(function, *avals)
    assert kernel.metadata == metadata
    assert kernel.flops == flops
    operands = [x for x in avals if x.dtype == jnp.bfloat16]
    moved = sum(x.size * x.dtype.itemsize for x in (*operands, out))
    assert moved <= kernel.bytes_accessed <= moved + SIZES.size * 8


@pytest.mark.parametrize("platform", split(["tpu"], ["cuda"]))
def test_cost_of_a_summed_wgrad(platform: str) -> None:
    """A gradient that is summed over a batch axis multiplies as often as it has elements."""
    batch, avals = 6, (bf16(6, ROWS, K), bf16(3, K, N), SIZES, bf16(6, ROWS, N))

    def grad(x: Array, w: Array, sizes: Array, dy: Array) -> Array:
        _, pull = jax.vjp(lambda w: jax.vmap(lambda x: ragged.grouped_matmul(x, w, sizes))(x), w)
        return pull(dy)[0]

    (wgrad,) = kernels(platform, grad, *avals)
    assert wgrad.metadata["axes"] == "mk,mn->kn"
    assert wgrad.flops == batch * 2 * ROWS * K * N


BATCH = 3  # no other extent is


MAPPED = ("lhs",), ("rhs",), ("lhs", "rhs")


@pytest.mark.parametrize(
    "platform, layout, mapped",
    split(
        [("tpu", layout, ("sizes",)) for layout in ("outer", "wgrad")],
        [
            ("tpu", "ragged", ("lhs", "rhs")),
            *((("cuda", "tpu")[i % 2], layout, MAPPED[i % 3]) for i, layout in enumerate(NAMES[::2])),
            *(
                (("tpu", "cuda")[i % 2], layout, ("sizes",))
                for i, layout in enumerate(NAMES)
                if layout in ("forward", "wgrad", "ragged")
            ),
        ],
    ),
    ids=str,
)
def test_a_map_is_one_call(platform: str, layout: str, mapped: tuple[str, ...]) -> None:
    """Of a product and of each derivative, inside of the map and outside."""
    function, args = product(layout, (256, 64, 128, 4), jnp.bfloat16)
    axes = tuple(0 if name in mapped else None for name in ("lhs", "rhs", "sizes"))
    lhs, rhs, sizes = (
        each if axis is None else jax.tree.map(lambda x: Aval((BATCH, *x.shape), x.dtype), each)
        for each, axis in zip(args, axes, strict=True)
    )

    def outside(lhs: Array, rhs: Array, sizes: dict[str, Array]) -> Any:
        loss = lambda lhs, rhs: jax.vmap(function, axes)(lhs, rhs, sizes)[0].sum()  # noqa: E731
        return jax.grad(loss, (0, 1))(lhs, rhs)

    # TPU kernels with tiles in two ragged letters have one list of visits: XLA maps over their sizes.
    is_xla = platform == "tpu" and "sizes" in mapped and len(LETTERS[layout]) > 1
    for mapping in (jax.vmap(function, axes), outside):
        calls = kernels(platform, mapping, lhs, rhs, sizes)
        # A call in a loop over the elements would see one of them.
        assert [any(BATCH in shape for shape in call.shapes) for call in calls] == [True] * (0 if is_xla else 3)


@pytest.mark.parametrize("layout", split(["forward"], ["outer"]))
def test_an_export_for_three_platforms_holds_kernels(layout: str) -> None:
    """Forward and both derivatives are a TPU's kernels in the one program for all; a GPU's are XLA's there."""
    function, avals = product(layout, (256, 64, 128, 4), jnp.bfloat16)
    exported = jax.export.export(jax.jit(function), platforms=["cpu", "cuda", "tpu"])(*avals)
    text = exported.mlir_module()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 3
    assert "triton" not in text


@pytest.mark.parametrize("count", split([1, 2], [3, 4]))
def test_buffers(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both operands of a forward and of a wgrad have as many buffers as are asked for; with more than two,
    the next other block is fetched as soon as one is free."""
    modes = []

    def recorded(call: Callable[..., Any], specs: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
        def record(*args: Any, **options: Any) -> Any:
            modes.append([getattr(spec, "pipeline_mode", None) for spec in specs(options)])
            return call(*args, **options)

        return record

    if count > 2:
        spy = recorded(pipeline.pltpu.emit_pipeline, lambda options: options["in_specs"])
        monkeypatch.setattr(pipeline.pltpu, "emit_pipeline", spy)
    else:
        spy = recorded(pipeline.pl.pallas_call, lambda options: jax.tree.leaves(options["grid_spec"].in_specs[:2]))
        monkeypatch.setattr(pipeline.pl, "pallas_call", spy)
    x, w, dy = bf16(ROWS, K), bf16(GROUPS, K, N), bf16(ROWS, N)
    kernels("tpu", partial(ragged.grouped_matmul, input_buffer_count=count), x, w, SIZES)
    kernels("tpu", partial(ragged.transposed_grouped_matmul, input_buffer_count=count), bf16(K, ROWS), dy, SIZES)
    assert len(modes) == 2
    for mode in (mode for call in modes for mode in call):
        # Two are what every block has by itself.
        assert mode is None if count == 2 else mode == pl.Buffered(count, use_lookahead=count > 2)


@pytest.mark.parametrize("precision", [None, jax.lax.Precision.HIGHEST])
@pytest.mark.parametrize("layout", ["batched", "forward", "outer"])  # with their derivatives, every kernel
def test_precision_on_a_tpu(layout: str, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dot in the kernels of a product of float32 and its derivatives has the precision that is asked for."""
    seen, bind = [], jax.lax.dot_general_p.bind

    def record(*args: Any, **options: Any) -> Any:
        seen.append(options["precision"])
        return bind(*args, **options)

    function, avals = product(layout, (256, 64, 128, 4), jnp.float32, precision=precision)
    monkeypatch.setattr(jax.lax.dot_general_p, "bind", record)
    assert len(kernels("tpu", function, *avals)) == 3
    assert len(seen) >= 3 and set(seen) == {precision and (precision, precision)}


@pytest.mark.long
def test_precision_on_a_gpu() -> None:
    """Float32 by tensor cores once, three times, or not at all, in the code itself."""

    def tensor_cores(precision: Any) -> int:
        avals = Aval((ROWS, 64), jnp.float32), Aval((GROUPS, 64, 64), jnp.float32), SIZES
        function = partial(ragged.grouped_matmul, precision=precision, tiling=(32, 32, 32))
        (kernel,) = gpu.compile_for("NVIDIA A100", function, *avals)
        return kernel.sass_counts["HMMA"]

    once = tensor_cores(None)
    assert once > 0
    assert tensor_cores("high") >= 3 * once
    assert tensor_cores("highest") == 0


def test_named_scopes() -> None:
    """The caller's are in the compiled program."""

    def run(x: Array, w: Array) -> Array:
        with jax.named_scope("outer_scope"), jax.named_scope("inner_scope"):
            return ragged.grouped_matmul(x, w, jnp.array([4, 4], jnp.int32))

    text = jax.jit(run).lower(jnp.ones((8, 8)), jnp.ones((2, 8, 8))).compile().as_text() or ""
    assert "outer_scope/inner_scope" in text
