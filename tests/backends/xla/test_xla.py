"""The backend in plain XLA: how it covers groups by tiles, and how few of them it compiles."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged.backends.xla import backend


def forward(lhs: Array, rhs: Array, sizes: Array) -> Array:
    return ragged.grouped_matmul(lhs, rhs, sizes, backend="xla")


def wgrad(lhs: Array, rhs: Array, sizes: Array) -> Array:
    return ragged.transposed_grouped_matmul(lhs.T, rhs, sizes, backend="xla")


def dots(fn: Any, *shapes: tuple[int, ...], groups: int, dtype: Any = jnp.float32) -> list[str]:
    """The lines of the program, before XLA optimises it, that multiply."""
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    text = jax.jit(fn).lower(*args, jax.ShapeDtypeStruct((groups,), jnp.int32)).as_text()
    return re.findall(r".* stablehlo\.dot_general .*", text)


def test_only_small_groups_are_batched() -> None:
    """One dot for the first rows of all groups where the mean is at most 16 rows, or 64 of a wgrad: as many as it."""
    d, hidden = 32, 64
    for groups, rows in ((16, 16), (8, 16), (4, 16), (2, 32), (1, 64)):
        batched = [x for x in dots(forward, (64, d), (groups, d, hidden), groups=groups) if "batching" in x]
        assert [f"tensor<{groups}x{rows}x{d}xf32>" in x for x in batched] == [True] * (groups >= 4)
        (batched,) = [x for x in dots(wgrad, (64, d), (64, hidden), groups=groups) if "batching" in x]
        assert f"tensor<{groups}x{d}x{rows}xf32>" in batched
    assert not any("batching" in x for x in dots(wgrad, (130, d), (130, hidden), groups=2))


def test_small_products_have_few_heights() -> None:
    """Each height takes time to compile: a small product has 3, a large one 5. In a wgrad, each stands twice: in a
    group's first tile, and in a further tile, which is added. XLA compiles both once."""
    small = (1024, 256), (8, 256, 512), (1024, 512)
    assert len(dots(forward, *small[:2], groups=8)) == 3
    assert len(dots(wgrad, small[0], small[2], groups=8)) == 6
    large = (4096, 1024), (16, 1024, 1024)
    assert len(dots(forward, *large, groups=16)) == 5
    assert len(dots(wgrad, large[0], large[0], groups=16)) == 10


def tile_reads(fn: Any, *shapes: tuple[int, ...]) -> set[str]:
    """The compiled fusions that read a tile of rows from a float32 buffer, without their names."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = str(jax.jit(fn).lower(*args, jax.ShapeDtypeStruct((4,), jnp.int32)).compile().as_text())
    bodies = re.findall(r"^%fused_computation\S* \(\S+: f32.*?\n\}", text, re.DOTALL | re.MULTILINE)
    bodies = [body for body in bodies if "dynamic-slice(" in body and "dynamic-update-slice(" not in body]
    return {re.sub(r"%[\w.-]+|\S+: |, metadata=\{.*?\}", "", body) for body in bodies}


def test_products_share_compiled_reads() -> None:
    """A wgrad reads tiles of a buffer as the forward product does: XLA compiles equal fusions once."""
    x, w, dy = (1024, 64), (4, 64, 32), (1024, 32)
    of_forward, of_wgrad = tile_reads(forward, x, w), tile_reads(wgrad, x, dy)
    shared = [read for read in of_forward & of_wgrad if "f32[1024,64]" in read]
    assert len(shared) == 3 == sum("f32[1024,64]" in read for read in of_forward)


def test_constant_sizes_keep_the_loop() -> None:
    """XLA unrolls no loop over groups where the sizes, of one group, are constants of the program."""
    lhs, rhs, sizes = jnp.ones((7, 16)), jnp.ones((1, 16, 24)), jnp.array([7], jnp.int32)
    given = jax.jit(forward).lower(lhs, rhs, sizes)
    constant = jax.jit(lambda lhs, rhs: forward(lhs, rhs, sizes)).lower(lhs, rhs)
    loops = [str(program.compile().as_text()).count(" while(") for program in (given, constant)]
    assert loops[0] == loops[1] > 0


@pytest.mark.parametrize("heights", [(16, 64, 256), (16, 32, 48, 64, 96, 128, 256, 512), (7,)])
def test_tiles_cover_a_group(heights: tuple[int, ...]) -> None:
    """The chosen tiles hold all rows, at no more than what any other choice of tiles costs."""
    first = backend._cover(heights)
    least = np.zeros(heights[-1] + 1)  # by exhaustion, from few rows to many
    for rows in range(1, heights[-1] + 1):
        least[rows] = min(tile + backend._OVERHEAD + least[max(rows - tile, 0)] for tile in heights)
        rest, cost = rows, 0
        while rest > 0:
            tile = heights[first[rest]]
            rest, cost = rest - tile, cost + tile + backend._OVERHEAD
        assert cost == least[rows]


def test_mean_tile() -> None:
    """A tile of two or three ragged letters is the mean group where that is a power of two, else the next one."""
    assert [backend._mean_tile(rows, 4) for rows in (8, 64, 68, 128, 132, 256, 4096)] == [16, 16, 32, 32, 64, 64, 256]
