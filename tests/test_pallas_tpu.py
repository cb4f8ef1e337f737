"""The TPU kernels' bodies, run on the CPU by both of Pallas's interpreters, against the float64 oracle.

`True` finds memory that nobody wrote; `InterpretParams` finds reads out of bounds, and races between two cores.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import ragged
from ragged import GroupedTensor

from . import cases, oracle
from .cases import NAMES, SPREADS, TOLERANCE
from .test_matmul import check

TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
MODES = {"plain": True, "two cores": TWO_CORES}


def matmul(lhs: Any, rhs: Any, interpret: Any = True, **options: Any) -> GroupedTensor:
    return jax.jit(lambda lhs, rhs: ragged.matmul(lhs, rhs, backend="pallas_tpu", interpret=interpret, **options))(
        lhs, rhs
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_and_spread(layout: str, dtype: str, mode: str) -> None:
    """K1, K3, K14, K18, K19, K20, K21, K22, K25, K26, K31, K35, B1, B4: nothing is a multiple of a tile; NaN tails."""
    spreads = list(itertools.product(SPREADS, (False, True)))
    for seed, (kind, slack) in enumerate(spreads if mode == "plain" else spreads[::3]):
        case = cases.make(
            layout, g=(1, 3, 8)[seed % 3], kind=kind, slack=slack, seed=seed, dtype=dtype, uniform=(37, 150, 140)
        )
        tiling = None if seed % 2 else tuple(32 if letter in cases.LETTERS[layout] else 128 for letter in "mkn")
        out = matmul(case.lhs, case.rhs, MODES[mode], tiling=tiling)
        check(case, out)
