"""`ragged.matmul` in all eight layouts, against a NumPy float64 loop over groups."""

import itertools
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ragged
from ragged import GroupedTensor
from tests import cases, constants, oracle
from tests.cases import NAMES, SPREADS, check
from tests.everywhere import everywhere

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("g", [1, 3, 8, 64])
@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_and_spread(layout: str, g: int) -> None:
    """Sizes at run time, NaN in the tails."""
    for seed, (kind, slack) in enumerate(itertools.product(SPREADS, (False, True))):
        case = cases.make(layout, g=g, kind=kind, slack=slack, seed=seed)
        out = ragged.matmul(case.lhs, case.rhs)
        check(case, out)
        # The result's dims are the operands' own.
        assert out.first_dims is case.lhs.first_dims and out.last_dims is case.rhs.last_dims


@pytest.mark.long
@settings(max_examples=150)
@given(
    layout=st.sampled_from(NAMES),
    sizes=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=3, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    flip=st.booleans(),
    tile=st.sampled_from([None, 8]),
    seed=st.integers(0, 2**31),
)
def test_any_sizes(layout: str, sizes: list[list[int]], dtype: str, flip: bool, tile: int | None, seed: int) -> None:
    """Hypothesis picks layout, sizes, dtype, storage and tiles; capacity 27 holds any three groups.

    The seed also picks which operands are constants, and whether the product is within a `shard_map`.
    """
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
    options: dict[str, Any] = {} if tile is None else {"backend": everywhere("xla", tile, tile, tile)}
    if layout in ("outer", "ragged"):
        options["max_last"] = 9
    given = tensor(lhs, "m", "k"), tensor(rhs, "k", "n")
    out = constants.run(seed, partial(ragged.matmul, **options), *given)
    check(cases.Case(layout, of, lhs, rhs, out, out), out)
