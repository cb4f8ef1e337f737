"""A slice of the contract with a TPU's and a GPU's kernels, interpreted: all of it, in each backend's
`test_contract.py`, takes longer."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ragged
from ragged import GroupedTensor
from tests import oracle, ran
from tests.backends import test_scales
from tests.contract import Contract
from tests.everywhere import INTERPRETED
from tests.ops import test_epilogue


@pytest.fixture(autouse=True)
def launches(kernels: tuple[str, ran.Launches]) -> Iterator[ran.Launches]:
    """What runs in a test: this backend's kernels, and nothing else."""
    with ran.only(*kernels):
        yield kernels[1]


@pytest.fixture
def backend(kernels: tuple[str, ran.Launches]) -> str:
    return kernels[0]


# Rows of no group at the end, a group that two tiles of rows share, an empty one. n is no multiple of a tile, nor is k.
SIZES, M, K, N = [9, 0, 12, 3], 30, 24, 20
ENDS = np.cumsum(SIZES)
SPANS = [slice(end - size, end) for size, end in zip(SIZES, ENDS, strict=True)]
DIMS = jnp.array(SIZES, jnp.int32)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    """Rows of the groups, and NaN in the tail."""
    x = draw(*shape, seed=seed)
    x[..., ENDS[-1] :, :] = np.nan
    return x


def forward(x: np.ndarray, w: np.ndarray, groups: Any = range(4)) -> np.ndarray:
    """The definition: `x[group] @ w[group]` for those of `groups`, zeros in all other rows."""
    out = np.zeros((M, w.shape[-1]))
    for i in groups:
        out[SPANS[i]] = x[SPANS[i]].astype(np.float64) @ w[i]
    return out


def wgrad(x: np.ndarray, dy: np.ndarray, groups: Any = range(4)) -> np.ndarray:
    return np.stack([x[SPANS[i]].astype(np.float64).T @ dy[SPANS[i]] for i in groups])


def close(got: Any, want: np.ndarray) -> None:
    oracle.assert_close([np.asarray(got)], [want], max=2e-6)


def test_interpreted_by_name(backend: str, launches: ran.Launches) -> None:
    """`backend` and `interpret` at both public functions: one kernel each, of that backend."""
    options: dict[str, Any] = {"backend": INTERPRETED[backend]}
    x, w, dy = rows(M, K), draw(4, K, N), rows(M, N)
    close(ragged.grouped_matmul(x, w, DIMS, **options), forward(x, w))
    close(ragged.transposed_grouped_matmul(x.T, dy, DIMS, **options), wgrad(x, dy))
    assert [name.rpartition("_")[0] for _, name in launches] == ["grouped_matmul", "transposed_grouped_matmul"]


def test_a_shard_that_is_added_to() -> None:
    """`rhs` holds, or the result gets, groups 2 and 3, and a fifth that there isn't."""
    x, dy, w, old = rows(M, K), rows(M, N), draw(4, K, N), rows(M, N, seed=1)
    held = np.concatenate([w[2:], np.full((1, K, N), np.nan, np.float32)])
    out = ragged.grouped_matmul(x, held, DIMS, group_offset=jnp.int32(2), existing_out=old)
    close(out, forward(x, w, [2, 3]) + np.where(np.arange(M)[:, None] < ENDS[-1], old, 0))
    old = draw(3, K, N)
    out = ragged.transposed_grouped_matmul(
        x.T, dy, DIMS, group_offset=jnp.int32(2), num_actual_groups=3, existing_out=old
    )
    close(out[:2], wgrad(x, dy, [2, 3]) + old[:2])
    close(out[2], old[2])


def test_two_ragged_letters_that_are_added_to() -> None:
    """The tail of what is added to, in rows and in columns, comes out zero."""
    q, k, old = rows(M, K), rows(M, K, seed=1), draw(M, 14)
    queries, keys = (GroupedTensor(jnp.asarray(x), DIMS) for x in (q, k))
    want = np.zeros((M, 14))
    for span, size in zip(SPANS, SIZES, strict=True):
        want[span, :size] = q[span].astype(np.float64) @ k[span].T + old[span, :size]
        old[span, size:] = np.nan
    old[ENDS[-1] :] = np.nan
    close(ragged.matmul(queries, keys.mT, max_last=14, existing_out=jnp.asarray(old)).data, want)


def test_mapped(launches: ran.Launches) -> None:
    """Where sizes are shared a map is one call of a kernel; where they are mapped too, the result is a loop's."""
    x, w, dy = rows(2, M, K), draw(2, 4, K, N), rows(M, N)
    out = jax.vmap(ragged.grouped_matmul, (0, 0, None))(x, w, DIMS)
    close(out, np.stack([forward(*each) for each in zip(x, w, strict=True)]))
    out = jax.vmap(lambda x: ragged.transposed_grouped_matmul(x.T, dy, DIMS))(x)
    close(out, np.stack([wgrad(each, dy) for each in x]))
    assert len(launches) == 2
    none = jnp.zeros_like(DIMS)
    out = jax.vmap(ragged.grouped_matmul, (0, None, 0))(x, w[0], jnp.stack([none, DIMS]))
    close(out, np.stack([np.zeros((M, N)), forward(x[1], w[0])]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_contained(value: float) -> None:
    """What isn't finite stays in its group; the others keep their bits, also in a new program."""
    x, w, dy = rows(M, K), draw(4, K, N), rows(M, N)
    w[1] = np.nan  # nothing reads the matrix of an empty group

    def both(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out = ragged.grouped_matmul(x, w, DIMS), ragged.transposed_grouped_matmul(x.T, dy, DIMS)
        return np.asarray(out[0]), np.asarray(out[1])

    clean = both(x)
    assert np.isfinite(clean[0]).all() and np.isfinite(clean[1]).all()
    x[SPANS[0]] = value
    if np.isnan(value):
        jax.clear_caches()
    by_rows, by_group = both(x)
    assert not np.isfinite(by_rows[SPANS[0]]).any() and not np.isfinite(by_group[0]).any()
    assert np.array_equal(by_rows[9:], clean[0][9:]) and np.array_equal(by_group[1:], clean[1][1:])


CONTRACT = Contract()
REUSED: list[Any] = [
    (CONTRACT.test_int8_is_exact_over_the_full_range, ("forward",)),
    (CONTRACT.test_int8_is_exact_over_the_full_range, ("wgrad",)),
    (CONTRACT.test_wrong_sizes_never_leave_the_buffers, ("inner_columns", [2**31 - 1, 2**31 - 1, 5])),
    (CONTRACT.test_wrong_sizes_never_leave_the_buffers, ("ragged", [5, 100, 2])),
    pytest.param(test_epilogue.test_rounded_once, (), marks=pytest.mark.long),
]


@pytest.mark.parametrize("test, arguments", REUSED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_of_another_module(test: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Sums past 2**24 are exact; groups that are larger than the buffers are cut off; bias and activation
    come before rounding."""
    test(*arguments)


@pytest.mark.sampled
@pytest.mark.parametrize("test, blocks", [("test_rows", ((1, 128), (None, 1))), ("test_groups", ((1, None), None))])
def test_scaled(backend: str, test: str, blocks: tuple[Any, ...]) -> None:
    """By row, column and contracted block."""
    getattr(test_scales, test)(backend, *blocks)
