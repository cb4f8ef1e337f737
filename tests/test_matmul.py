"""`ragged.matmul` in all eight layouts, against a NumPy float64 loop over groups."""

import itertools

import numpy as np
import pytest

import ragged
from ragged import GroupedTensor

from . import cases, oracle
from .cases import NAMES, SPREADS, TOLERANCE


def check(case: cases.Case, out: GroupedTensor) -> None:
    assert out.ragged == case.out_ragged
    worst, rms = TOLERANCE[out.dtype.name]
    got = case.unpack(np.asarray(out.data).astype(np.float64))
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=worst, rms=rms)
    case.assert_tail_zero(out)


@pytest.mark.parametrize("g", [1, 3, 8, 64])
@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_and_spread(layout: str, g: int) -> None:
    """K1, K3, K14, K18, K19, K21, T3, T4, T9, T11, T13, B1, B4: sizes at run time, NaN in the tails."""
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
