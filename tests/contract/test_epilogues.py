"""Products with biases, activations and gates, and of gathered rows, equal a loop over groups; so do derivatives.

Each case is a program, which is compiled once and runs on many draws of sizes and contents.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests import gpu
from tests.contract.epilogues import Epilogue, epilogue_draws

Case = tuple[int, Epilogue]  # how many draws, of which program


def by_default() -> Iterator[Case]:
    yield 30, Epilogue("forward", "bfloat16", activation="silu", gate=True, bias="each one")
    yield 30, Epilogue("forward", activation="gelu", bias="each", held=3)
    yield 30, Epilogue("batched", "bfloat16", activation="relu", bias="one", save="out")
    yield 30, Epilogue("inner_rows", activation="clamped", gate=True, bias="no each")
    yield 30, Epilogue("forward", "bfloat16", bias="each", held=3, existing=True)
    yield 20, Epilogue("forward", order=2, activation="tanh", gate=True, bias="each one")
    yield 12, Epilogue("forward", "bfloat16", mapped="lhs sizes up bias", activation="sigmoid", gate=True, bias="each one")
    yield 12, Epilogue("forward", mapped="rhs", context="devices", activation="softplus", bias="each")
    yield 30, Epilogue("forward", "bfloat16", top_k=2)
    yield 30, Epilogue("forward", top_k=2, mapped="sizes")
    yield 30, Epilogue("forward", "bfloat16", activation="gelu_tanh", gate=True, bias="each one", backend="pallas_tpu")
    yield 30, Epilogue("forward", "bfloat16", activation="sigmoid", bias="each", held=3, backend="pallas_tpu")
    yield 4, Epilogue("forward", "bfloat16", activation="clamped", gate=True, bias="each one", backend="triton_gpu")
    yield 10, Epilogue("forward", "bfloat16", top_k=2, backend="triton_gpu")


def _cases(cases: Iterator[Case]) -> list[Any]:
    return [pytest.param(*case, id=str(case[1])) for case in cases]


def _check(count: int, program: Epilogue) -> None:
    if program.backend == "triton_gpu":
        gpu.needs_triton()
    program.check(epilogue_draws(program, count))


@pytest.mark.parametrize("count, program", _cases(by_default()))
def test_epilogues(count: int, program: Epilogue) -> None:
    _check(count, program)
