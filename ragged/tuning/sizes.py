"""Group sizes by the name of a distribution, for measuring and explaining products."""

from collections.abc import Callable

import numpy as np

from ragged.core.errors import Site, is_count


def _even(rng: np.random.Generator, groups: int) -> np.ndarray:
    return np.ones(groups)


def _random(rng: np.random.Generator, groups: int) -> np.ndarray:
    return np.diff(np.concatenate([[0.0], np.sort(rng.random(groups - 1)), [1.0]]))


def _zipf(rng: np.random.Generator, groups: int) -> np.ndarray:
    return 1.0 / np.arange(1, groups + 1)


def _one(rng: np.random.Generator, groups: int) -> np.ndarray:
    return np.eye(groups)[0]


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "even": _even,
    "random": _random,
    "zipf": _zipf,
    "one": _one,
}


def sample_sizes(kind: str, groups: int, total: int, seed: int = 0) -> np.ndarray:
    """`(groups,)` int32 sizes that add up to `total`.

    **Arguments:**

    - `kind`: `"even"`; `"random"`, the total cut at random places; `"zipf"`, in proportion to 1, 1/2, 1/3, ...;
      `"one"`, all in the first group.
    - `groups`, `total`: number and sum of the sizes.
    - `seed`: random seed of `"random"`.

    **Raises:** `ValueError` for another kind, for a total beyond int32, and for numbers that aren't positive (`total`
    and `seed` may be 0).
    """
    site = Site("ragged.tuning.sample_sizes(kind, groups, total)")
    if kind not in list(KINDS):
        site.fail(ValueError, f"no distribution is called {kind!r}.", f"Pass one of {', '.join(map(repr, KINDS))}.")
    if not is_count(groups) or not is_count(total, 0) or not is_count(seed, 0) or total > np.iinfo(np.int32).max:
        problem = f"`groups` is {groups!r}, `total` {total!r} and `seed` {seed!r}."
        site.fail(ValueError, problem, "Pass ints: at least one group, and a total that int32 holds.")
    shares = KINDS[kind](np.random.default_rng(seed), groups)
    ends = np.rint(np.cumsum(shares) / np.sum(shares) * total).astype(np.int32)
    return np.diff(ends, prepend=np.int32(0))
