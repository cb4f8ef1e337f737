"""What products cost, apart from time: memory, and work that must not grow with the number of groups."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from tests.benchmarks.cpu import on_ragged_dot, trained
from tests.cases import NAMES, split
from tests.contract.machines import options_of, shapes, train
from tests.moe import moe as layer_of


def product(layout: str) -> Callable[[GroupedTensor, GroupedTensor], GroupedTensor]:
    options = options_of(layout, 2048)
    return lambda lhs, rhs: ragged.matmul(lhs, rhs, **options)


def with_gradient(layout: str) -> Callable[[GroupedTensor, GroupedTensor], Any]:
    return partial(train, **options_of(layout, 2048))


def size(tree: Any) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def temporary(program: jax.stages.Lowered) -> int:
    """Bytes that the compiled program needs besides operands and results."""
    memory = program.compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("layout", split(["forward"], [name for name in NAMES if name != "forward"]))
def test_temporary_memory(layout: str) -> None:
    """At 64 groups, forward and backward need at most twice the size of operands and results besides."""
    lhs, rhs = shapes(layout, 64, 2048, 128, 96)
    out = jax.eval_shape(product(layout), lhs, rhs)
    assert temporary(jax.jit(product(layout)).lower(lhs, rhs)) <= 2 * size((lhs, rhs, out))
    assert temporary(jax.jit(with_gradient(layout)).lower(lhs, rhs)) <= 2 * size((lhs, rhs, out, lhs, rhs))


@pytest.mark.long
@pytest.mark.parametrize("layout", [name for name in NAMES if name != "batched"])
def test_the_program_does_not_grow_with_the_groups(layout: str) -> None:
    """With 8 times the groups: as many instructions, and temporary memory that grows by the list of groups alone.

    Groups of few rows have a program of their own, whose memory grows as its operands do: `test_temporary_memory`.
    """

    def lowered(g: int, rows: int) -> jax.stages.Lowered:
        return jax.jit(product(layout)).lower(*shapes(layout, g, rows, 128, 96))

    def instructions(program: jax.stages.Lowered) -> int:
        return len(re.findall(r"stablehlo\.dot_general", program.as_text()))

    for rows, sparse, dense in ((8192, 8, 64), (2048, 128, 1024)):
        assert instructions(lowered(sparse, rows)) >= instructions(lowered(dense, rows)) > 0
    assert temporary(lowered(64, 8192)) <= temporary(lowered(8, 8192)) + 2**14


@pytest.mark.parametrize(
    "scaling, dtype, mapped",
    split(
        [("column", "int8", True)],
        [
            ("tensor", "float8_e4m3fn", True),
            ("group", "float8_e4m3fn", True),
            ("row", "float8_e4m3fn", False),
            ((32, 1), "int8", False),
            ((64, 32), "float8_e4m3fn", False),
        ],
    ),
    ids=str,
)
def test_weights_are_dequantised_where_they_are_visited(scaling: Any, dtype: Any, mapped: bool) -> None:
    """Besides operands and results, a few matrices in float32, and the bytes of 8-bit floats; not all of them."""
    k, n = 128, 96

    def of(x: Array, s: Array, w: GroupedTensor) -> Array:
        return ragged.matmul(GroupedTensor(x, s), w).data

    extents, dtypes = ((16, k), (64,), (64, k, n)), (jnp.float32, jnp.int32, jnp.float32)
    lead, each = ((2,), jax.vmap) if mapped else ((), lambda function: function)
    x, s, w = (jax.ShapeDtypeStruct((*lead, *shape), kind) for shape, kind in zip(extents, dtypes, strict=True))
    quantized = jax.eval_shape(each(lambda w: ragged.quantize(w, dtype, scaling)), w)
    program = jax.jit(each(of)).lower(x, s, quantized)
    copied = size(quantized.data) if dtype != "int8" else 0  # XLA's CPU backend slices no 8-bit floats
    assert temporary(program) <= copied + 4 * k * n * 4


IN_PLACE: dict[str, tuple[Callable[..., GroupedTensor], tuple[int, ...], tuple[int, ...]]] = {
    "forward": (lambda x, w, s: ragged.matmul(GroupedTensor(x, s), w), (1024, 256), (4, 256, 8)),
    "wgrad": (lambda x, y, s: ragged.matmul(GroupedTensor(x, s).mT, GroupedTensor(y, s)), (1024, 256), (1024, 8)),
    "wgrad of a map over lhs": (
        lambda x, y, s: ragged.matmul(GroupedTensor(y, s).mT, GroupedTensor(x, s)),
        (1024, 256),
        (1024, 8),
    ),
}
"""A product of what is large, what is small and the sizes; shapes of the first two."""


@pytest.mark.parametrize(
    "name, mapped", split([("wgrad of a map over lhs", "small")], [("forward", "sizes"), ("wgrad", "small")])
)
def test_a_map_reads_in_place_what_is_not_mapped(name: str, mapped: str) -> None:
    """A map over 64 elements needs at most twice the size of operands and results besides: no copy for each."""
    run, large, small = IN_PLACE[name]
    axes = (None, 0, None) if mapped == "small" else (None, None, 0)
    args = [
        jax.ShapeDtypeStruct(shape if axis is None else (64, *shape), dtype)
        for shape, axis, dtype in zip((large, small, (4,)), axes, (jnp.float32, jnp.float32, jnp.int32), strict=True)
    ]
    product = jax.vmap(lambda *args: run(*args).data, axes)
    assert temporary(jax.jit(product).lower(*args)) <= 2 * size((args, jax.eval_shape(product, *args)))


def test_a_map_in_a_map_copies_no_weights() -> None:
    """Weights mapped over one axis, rows over another: neither is copied for each pair, nor its gradient."""
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    rows = jax.ShapeDtypeStruct((16, 64, 128), jnp.float32)  # inner axis of 16
    weights = jax.ShapeDtypeStruct((2, 4, 128, 128), jnp.float32)  # outer axis of 2

    def grad(w: Array, x: Array, s: Array) -> Array:
        def loss(w: Array) -> Array:
            return jnp.sum(jnp.sin(jax.vmap(lambda x: ragged.matmul(GroupedTensor(x, s), w).data)(x)))

        return jax.grad(loss)(w)

    program = jax.jit(jax.vmap(grad, (0, None, None))).lower(weights, rows, sizes)
    assert temporary(program) <= 2 * (2 * size(weights) + 4 * size(rows))


@pytest.mark.long
def test_the_program_of_a_layer() -> None:
    """Of `nn.MoE`, forward and backward, at most 8 times the lines of the same layer on `lax.ragged_dot`. How long
    they take to trace and compile is in `docs/benchmarks.md`."""
    moe = layer_of(256, 512, 16, 2, key=jax.random.key(0))
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32)

    def lines(layer: Callable[..., Array]) -> int:
        return jax.jit(trained(layer)).lower(moe, x, x).as_text().count("\n")

    assert lines(lambda moe, x: moe(x)[0]) <= 8 * lines(on_ragged_dot)


def test_the_program_is_small() -> None:
    """One product and its gradient, at the benchmark's shapes: what is traced, lowered and compiled. The benchmark says
    how long that takes."""
    for rows, k, n, g in ((4096, 1024, 1024, 16), (4096, 256, 512, 64)):
        program = jax.jit(with_gradient("forward")).lower(*shapes("forward", g, rows, k, n))
        assert len(program.as_text().splitlines()) < 2700
