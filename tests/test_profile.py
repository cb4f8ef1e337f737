"""What XLA and its profiler are told of each kernel, read from the program as it is lowered."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.extend.mlir import ir

import ragged
from ragged import GroupedTensor

from . import gpu

Aval = jax.ShapeDtypeStruct
ROWS, K, N, GROUPS = 256, 384, 128, 5
SIZES = Aval((GROUPS,), jnp.int32)


class Told(NamedTuple):
    """Of one kernel."""

    metadata: dict[str, Any]  # what the profiler shows
    flops: int
    bytes_accessed: int


def told(platform: str, function: Callable[..., Any], *avals: Any) -> list[Told]:
    """By each kernel of `function`, lowered for an H200 or any TPU."""
    if platform == "cuda":
        lowered = gpu.lower_for("NVIDIA H200", function, *avals)
    else:
        lowered = jax.jit(function).trace(*avals).lower(lowering_platforms=("tpu",))
    calls, found = [], []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            calls.append((operation.attributes["call_target_name"].value, operation.attributes))
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    for name, given in calls:
        if name == "tpu_custom_call":
            cost = json.loads(given["backend_config"].value)["custom_call_config"]["cost_estimate"]
        elif name == "triton_kernel_call_ffi":
            cost = json.loads(given["mhlo.backend_config"]["cost_estimate_json"].value)
        else:
            continue
        # XLA's profiler looks for this key of this attribute, and finds JSON in JSON.
        shown = json.loads(given["mhlo.frontend_attributes"]["kernel_metadata"].value)["xprof_metadata"]
        found.append(Told(json.loads(shown), int(cost["flops"]), int(cost["bytes_accessed"])))
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
        lambda x, y: ragged.matmul(GroupedTensor(x).mT, GroupedTensor(y), tiling=(128, 128, 128)).data,
        (bf16(GROUPS, K, 256), bf16(GROUPS, K, N)),
        expected("km,kn->mn", (True, False), (128, 128, 128), GROUPS),
        2 * GROUPS * 256 * K * N,
    ),
    "two ragged letters": (
        lambda x, y, sizes: (
            ragged.matmul(
                GroupedTensor(x, sizes), GroupedTensor(y, sizes).mT, max_last=128, tiling=(128, 128, 128)
            ).data
        ),
        (bf16(ROWS, K), bf16(ROWS, K), SIZES),
        expected("mk,nk->mn", (False, True), (128, 128, 128), GROUPS),
        2 * ROWS * K * 128 // GROUPS,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_what_the_profiler_shows(platform: str, name: str) -> None:
    """K27, K30: each kernel's letters, transposition, tiles, dtypes and groups under the key that is read; its FLOPs;
    operands and result as bytes."""
    function, avals, metadata, flops = PRODUCTS[name]
    (kernel,) = told(platform, function, *avals)
    out = jax.eval_shape(function, *avals)
    assert kernel.metadata == metadata
    assert kernel.flops == flops
    operands = [x for x in avals if x.dtype == jnp.bfloat16]
    moved = sum(x.size * x.dtype.itemsize for x in (*operands, out))
    assert moved <= kernel.bytes_accessed <= moved + SIZES.size * 8


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_cost_of_a_summed_wgrad(platform: str) -> None:
    """K27: a gradient that is summed over a batch axis multiplies as often as it has elements."""
    batch, avals = 6, (bf16(6, ROWS, K), bf16(3, K, N), SIZES, bf16(6, ROWS, N))

    def grad(x: Array, w: Array, sizes: Array, dy: Array) -> Array:
        _, pull = jax.vjp(lambda w: jax.vmap(lambda x: ragged.grouped_matmul(x, w, sizes))(x), w)
        return pull(dy)[0]

    (wgrad,) = told(platform, grad, *avals)
    assert wgrad.metadata["axes"] == "km,kn->mn"
    assert wgrad.flops == batch * 2 * ROWS * K * N
