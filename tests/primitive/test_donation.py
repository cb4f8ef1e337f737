"""What a product is added to is updated in place where it is donated: no second buffer of its size, no copy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from tests import gpu, tpu

Aval = jax.ShapeDtypeStruct
ROWS, GROUPS = 4096, 8
LAYOUTS = ("batched", "forward", "wgrad", "outer", "inner_rows")
"""The four kernels of a backend; the tiled one with each letter ragged."""


def accumulation(layout: str, dtype: Any, adds: bool = True) -> tuple[Callable[..., Array], list[Any]]:
    """`existing + lhs @ rhs`, a function of the buffers `lhs`, `rhs`, `existing` and the sizes; and its arguments."""
    ragged_rows = layout != "batched"
    shapes = {
        "batched": ((GROUPS, 512, 256), (GROUPS, 256, 512), (GROUPS, 512, 512)),
        "forward": ((ROWS, 256), (GROUPS, 256, 512), (ROWS, 512)),
        "wgrad": ((ROWS, 512), (ROWS, 512), (GROUPS, 512, 512)),
        "outer": ((ROWS, 256), (ROWS, 256), (ROWS, 1024)),
        "inner_rows": ((ROWS, 1024), (ROWS, 512), (ROWS, 512)),
    }[layout]

    def function(lhs: Array, rhs: Array, existing: Array, sizes: Array) -> Array:
        x = GroupedTensor(lhs, sizes if ragged_rows else None, sizes if layout == "inner_rows" else None)
        y = GroupedTensor(rhs, sizes if layout in ("wgrad", "outer", "inner_rows") else None)
        x, y = (x.mT if layout == "wgrad" else x), (y.mT if layout == "outer" else y)
        options: dict[str, Any] = {"max_last": 1024} if layout == "outer" else {}
        return ragged.matmul(x, y, existing_out=existing if adds else None, **options).data

    return function, [*(Aval(shape, dtype) for shape in shapes), Aval((GROUPS,), jnp.int32)]


def size(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_xla(layout: str) -> None:
    """Nothing of the result's size beyond what the bare product needs; a uniform product is one dot, and its
    result is there before it is added."""
    memory = []
    for adds in (True, False):
        function, avals = accumulation(layout, jnp.float32, adds)
        memory.append(jax.jit(function, donate_argnums=2 if adds else ()).lower(*avals).compile().memory_analysis())
    existing = size(accumulation(layout, jnp.float32)[1][2])
    assert memory[0].alias_size_in_bytes == existing
    extra = memory[0].temp_size_in_bytes - memory[1].temp_size_in_bytes
    assert extra <= (existing if layout == "batched" else existing // 3)


ALIAS = "output_operand_alias<output_tuple_indices = [], operand_index = "


def test_what_is_donated_is_gone() -> None:
    """JAX's own error, naming the buffer, for a product or arithmetic of a donated tensor; its text stays."""
    x, w = GroupedTensor(jnp.ones((8, 4)), jnp.array([3, 2], jnp.int32)), jnp.ones((2, 4, 4))
    jax.jit(lambda x: x * 2, donate_argnums=0)(x)
    assert repr(x) == "GroupedTensor(f32[8,4], first_dims=i32[2])"
    for use in (lambda: x.data + 1, lambda: x + 1, lambda: x @ w, lambda: ragged.matmul(x, w)):
        with pytest.raises(RuntimeError, match=r"Array has been deleted with shape=(float32\[8,4\]|int32\[2\])"):
            use()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tpu(layout: str) -> None:
    """The kernel's result is its operand `existing`, as lowered."""
    function, avals = accumulation(layout, jnp.bfloat16)
    text = jax.jit(function, donate_argnums=2).trace(*avals).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == text.count(ALIAS) == 1


def check_compiled(text: str, memory: Any, existing: Any) -> None:
    assert text.count("output_to_operand_aliasing") == 1
    assert memory.alias_size_in_bytes == size(existing)
    assert memory.temp_size_in_bytes < size(existing) // 4


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_for_a_tpu(layout: str) -> None:
    """In place, as libtpu compiles the whole program."""
    function, avals = accumulation(layout, jnp.bfloat16)
    compiled = tpu.compile_for("v5e", function, *avals, donated=(2,))
    check_compiled(compiled.text, compiled.memory, avals[2])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_for_a_gpu(layout: str) -> None:
    """In place, as XLA compiles the whole program for an H200."""
    function, avals = accumulation(layout, jnp.bfloat16)
    compiled = gpu.compile_whole(function, *avals, donated=(2,))
    check_compiled(compiled.as_text(), compiled.memory_analysis(), avals[2])
