"""The GPU kernel's body, run on the CPU by Triton's interpreter, against the float64 oracle.

The interpreter's memory is checked: results begin as NaN, and whatever lies outside of an array can't be loaded.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor

from . import cases, gpu, oracle
from .cases import NAMES, SPREADS, TOLERANCE
from .test_matmul import check
from .test_pallas_tpu import check_gradients

gpu.needs_triton()


def matmul(lhs: Any, rhs: Any, **options: Any) -> GroupedTensor:
    return jax.jit(lambda lhs, rhs: ragged.matmul(lhs, rhs, backend="triton_gpu", interpret=True, **options))(lhs, rhs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_and_spread(layout: str, dtype: str) -> None:
    """K1, K3, K14, K18, K19, K20, K21, K22, K25, K26, K31, K35, B1, B4: nothing is a multiple of a tile; NaN tails."""
    for seed, (kind, slack) in enumerate(itertools.product(SPREADS, (False, True))):
        case = cases.make(
            layout, g=(1, 3, 8)[seed % 3], kind=kind, slack=slack, seed=seed, dtype=dtype, uniform=(37, 150, 140)
        )
        wide = jnp.float32 if dtype.startswith("float8") else None
        check(case, matmul(case.lhs, case.rhs, tiling=None if seed % 2 else (32, 16, 64), preferred_element_type=wide))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", NAMES)
def test_gradients(layout: str, dtype: str) -> None:
    """O16: by each operand, `dout @ rhs.T` and `lhs.T @ dout` of each group; zeros where an operand has its tail."""
    check_gradients(cases.make(layout, g=3, dtype=dtype, uniform=(37, 150, 140), seed=3), dtype, matmul)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("g", [1, 3, 8, 64])
@pytest.mark.parametrize("layout", NAMES)
def test_the_whole_case_table(layout: str, g: int, dtype: str) -> None:
    """B4, O16: every spread, with slack and without: values and gradients."""
    for seed, (kind, slack) in enumerate(itertools.product(SPREADS, (False, True))):
        case = cases.make(layout, g=g, kind=kind, slack=slack, seed=seed, dtype=dtype, uniform=(37, 150, 140))
        check_gradients(case, dtype, matmul)
