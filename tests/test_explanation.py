"""What `explain` returns: its counts of tiles against interpreted kernels, its figures against definitions, its forms."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import ragged
from ragged import Explanation, GroupedTensor, ProductPlan
from ragged.backends.base import Work
from ragged.product import lowering

from . import cases, gpu
from .cases import LETTERS, NAMES, check_error

KERNELS = {"xla": {}, "pallas_tpu": {"interpret": True}, "triton_gpu": {"interpret": True}}


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """What kernels and XLA's loops do in here, each time that they run: "dots", "flops" of those, and "idle": tiles of
    Triton's results without a dot, or, after `steps` of a Pallas grid, those that aren't dots."""
    counts: Counter[str] = Counter()
    dot_general, einsum, pallas_call = jax.lax.dot_general, jnp.einsum, pallas.pallas_call

    def note(out: Any, value: Any, of: Any) -> Any:
        def count(x: Any, value: Any) -> Any:
            counts.update({name: int(n) for name, n in of(int(value)).items()})
            return x

        return jax.pure_callback(count, jax.ShapeDtypeStruct(out.shape, out.dtype), out, value)

    def counted_dot(x: Any, y: Any, dimension_numbers: Any, *args: Any, **options: Any) -> Any:
        out = dot_general(x, y, dimension_numbers, *args, **options)
        contracted = math.prod(x.shape[axis] for axis in dimension_numbers[0][0])
        batch = math.prod(x.shape[axis] for axis in dimension_numbers[1][0])
        flops = 2 * math.prod(out.shape) * contracted
        return note(out, jnp.int32(0), lambda _: {"dots": batch, "flops": flops})

    def counted_einsum(formula: str, x: Any, y: Any, **options: Any) -> Any:
        letters = formula.partition("->")[0].replace(",", "")
        extent = dict(zip(letters, (*x.shape, *y.shape), strict=True))
        out = einsum(formula, x, y, **options)
        return note(out, jnp.int32(0), lambda _: {"dots": extent["g"], "flops": 2 * math.prod(extent.values())})

    def counted_call(*args: Any, **options: Any) -> Any:
        call, grid = pallas_call(*args, **options), options["grid_spec"].grid

        def run(*operands: Any) -> Any:
            steps = math.prod(n for n in grid if isinstance(n, int)) * jnp.int32(1)
            for n in grid:
                steps = steps if isinstance(n, int) else steps * jnp.reshape(n, ())
            return note(call(*operands), steps, lambda steps: {"steps": steps})

        return run

    monkeypatch.setattr(jax.lax, "dot_general", counted_dot)
    monkeypatch.setattr(jnp, "einsum", counted_einsum)
    monkeypatch.setattr(pallas, "pallas_call", counted_call)
    if gpu.triton_call.missing() == "":
        from ragged.backends.gpu import interpreter

        builder, since = interpreter._Builder, Counter[str]()
        store, dot = builder.create_masked_store, builder.create_dot

        def counted_store(*args: Any, **options: Any) -> Any:
            counts.update(idle=int(not since["dots"]))
            since.clear()
            return store(*args, **options)

        def counted_tl_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
            since.update(dots=1)
            (rows, depth), columns = a.data.shape, b.data.shape[1]
            counts.update(dots=1, flops=2 * rows * depth * columns)
            return dot(self, a, b, *args)

        monkeypatch.setattr(builder, "create_masked_store", counted_store)
        monkeypatch.setattr(builder, "create_dot", counted_tl_dot)
    jax.clear_caches()
    yield counts
    jax.clear_caches()


def ran(counts: Counter[str], lhs: Any, rhs: Any, product: str, **options: Any) -> Counter[str]:
    """What one of the three products executes."""
    counts.clear()

    def forward(lhs: Any, rhs: Any) -> Any:
        return ragged.matmul(lhs, rhs, **options).data

    def derivative(x: Any, ct: Any) -> Any:
        if product == "by lhs":
            return jax.vjp(lambda data: forward(lhs._replace_data(data), rhs), x)[1](ct)
        return jax.vjp(lambda data: forward(lhs, rhs._replace_data(data)), x)[1](ct)

    if product == "forward":
        jax.block_until_ready(jax.jit(forward)(lhs, rhs))
    else:
        out = jax.eval_shape(forward, lhs, rhs)
        ct = jnp.ones(out.shape, out.dtype)
        jax.block_until_ready(jax.jit(derivative)((lhs if product == "by lhs" else rhs).data, ct))
    return counts


def check_counts(counts: Counter[str], backend: str, lhs: Any, rhs: Any, **options: Any) -> list[ProductPlan]:
    """That what `explain` counts is what runs, for the product and both derivatives."""
    options = {"backend": backend, **KERNELS[backend], **options}
    plans = ragged.explain(lhs, rhs, platform="cpu", **options).plans
    for plan in plans:
        assert plan.is_exact and plan.backend == backend
        got = ran(counts, lhs, rhs, plan.product, **options)
        assert (plan.product, plan.multiplied) == (plan.product, got["flops"])
        if backend == "pallas_tpu":
            assert plan.visits is not None and plan.idle is not None
            assert plan.visits + plan.idle == got["steps"], plan.product
        else:
            assert (plan.visits, plan.idle) == (got["dots"], got["idle"]), plan.product
    return list(plans)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["zipf", "half_empty", "giant"])
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("backend", KERNELS)
def test_counts_are_what_kernels_execute(backend: str, layout: str, kind: str, executed: Counter[str]) -> None:
    """T10, K25: products of tiles, tiles that only get zeros, and FLOPs of whole tiles; by interpreted kernels."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    case = cases.make(layout, g=5, kind=kind, capacity=200, uniform=(40, 48, 80), fill=0.0)
    # Of several ragged letters, a TPU's tiles are of 128. XLA would hoist the dots of one tile as wide as its operand.
    small = 128 if len(LETTERS[layout]) > 1 and backend == "pallas_tpu" else 32
    tiling = tuple(small if letter in LETTERS[layout] else 128 for letter in "mkn")
    check_counts(executed, backend, case.lhs, case.rhs, tiling=(16, 32, 64) if backend == "triton_gpu" else tiling)


@pytest.mark.parametrize("backend", KERNELS)
def test_counts_of_large_tiles(backend: str, executed: Counter[str]) -> None:
    """T10, K25: tiles that groups share are multiplied in chunks on a TPU; several steps of what is contracted."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    sizes = jnp.array([300, 0, 5, 140, 60], jnp.int32)
    x, w = GroupedTensor(jnp.ones((600, 40)), sizes), GroupedTensor(jnp.ones((5, 40, 24)))
    plans = check_counts(executed, backend, x, w, tiling=(256, 128, 128) if backend != "triton_gpu" else (128, 32, 16))
    assert plans[0].flops == 2 * 505 * 40 * 24


@pytest.mark.parametrize("offset", [-1, 1, 4])
@pytest.mark.parametrize("backend", KERNELS)
def test_counts_of_a_shard(backend: str, offset: int, executed: Counter[str]) -> None:
    """T10, K11, K14: rows of groups that aren't held are as the tail."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    sizes = jnp.array([50, 0, 70, 20], jnp.int32)
    x, w = GroupedTensor(jnp.ones((200, 16)), sizes), GroupedTensor(jnp.ones((2, 16, 32)))
    tiling = (16, 16, 32) if backend == "triton_gpu" else (32, 128, 128)
    plans = check_counts(executed, backend, x, w, tiling=tiling, group_offset=jnp.int32(offset))
    held = sum(size for group, size in enumerate([50, 0, 70, 20]) if 0 <= group - offset < 2)
    assert [plan.flops for plan in plans] == [2 * held * 16 * 32] * 3
