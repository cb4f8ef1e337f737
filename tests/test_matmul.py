"""`ragged.matmul` in all eight layouts, against a NumPy float64 loop over groups."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ragged
from ragged import GroupedTensor

from . import cases, oracle
from .cases import NAMES, SPREADS, TOLERANCE

pytestmark = pytest.mark.sampled


def check(case: cases.Case, out: GroupedTensor) -> None:
    assert out.ragged == case.out_ragged
    worst, rms = TOLERANCE[out.dtype.name]
    got = case.unpack(np.asarray(out.data).astype(np.float64))
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=worst, rms=rms)
    case.assert_tail_zero(out)


@pytest.mark.parametrize("g", [1, 3, 8, 64])
@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_and_spread(layout: str, g: int) -> None:
    """K1, K3, K18, K19, K21, T3, T4, T9, T11, T13, B1, B4: sizes at run time, NaN in the tails."""
    for seed, (kind, slack) in enumerate(itertools.product(SPREADS, (False, True))):
        case = cases.make(layout, g=g, kind=kind, slack=slack, seed=seed)
        out = ragged.matmul(case.lhs, case.rhs)
        check(case, out)
        # The result's dims are the operands' own.
        assert out.first_dims is case.lhs.first_dims and out.last_dims is case.rhs.last_dims


@pytest.mark.parametrize("lhs_last, rhs_last", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layout", NAMES)
def test_operands_seen_through_mT(layout: str, lhs_last: bool, rhs_last: bool) -> None:
    """T5: the transpose of an operand is part of its type; a ragged-both operand may be packed along either axis."""
    case = cases.make(layout, g=5, lhs_packed_last=lhs_last, rhs_packed_last=rhs_last)
    out = ragged.matmul(case.lhs, case.rhs)
    check(case, out)
    # (a b).mT = b.mT a.mT
    swapped = ragged.matmul(case.rhs.mT, case.lhs.mT).mT
    got = [np.asarray(group) for group in swapped.to_list()]
    worst, rms = TOLERANCE["float32"]
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=worst, rms=rms)


@pytest.mark.long
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    layout=st.sampled_from(NAMES),
    sizes=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=3, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    flip=st.booleans(),
    tiling=st.sampled_from([None, (8, 8, 8)]),
    seed=st.integers(0, 2**31),
)
def test_any_sizes(layout: str, sizes: list[list[int]], dtype: str, flip: bool, tiling: Any, seed: int) -> None:
    """K18, T9, B4: hypothesis picks layout, sizes, dtype, storage and tiling; capacity 27 holds any three groups."""
    rng = np.random.default_rng(seed)
    letters = cases.LETTERS[layout]
    of = {
        letter: np.array(chosen if letter in letters else [5] * 3) for letter, chosen in zip("mkn", sizes, strict=True)
    }

    def groups(first: str, last: str) -> oracle.Groups:
        shapes = zip(of[first], of[last], strict=True)
        if dtype == "int8":
            return [rng.integers(-128, 128, shape).astype(np.int8) for shape in shapes]
        return [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]

    def tensor(values: oracle.Groups, first: str, last: str) -> GroupedTensor:
        return cases.tensor(values, (first in letters, last in letters), 27, 10, packed_last=flip)

    lhs, rhs = groups("m", "k"), groups("k", "n")
    options = {"tiling": tiling}
    if layout in ("outer", "ragged"):
        options["max_last"] = 9
    out = ragged.matmul(tensor(lhs, "m", "k"), tensor(rhs, "k", "n"), **options)
    check(cases.Case(layout, of, lhs, rhs, out, out), out)
