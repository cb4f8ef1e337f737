"""Sizes of groups for whoever has none at hand: to explain, to measure, to tune."""

from typing import Any

import numpy as np

from ragged._errors import Site, is_count

KINDS = ("even", "random", "zipf", "one")


def sample_sizes(kind: str | Any, groups: int | Any, total: int | Any, seed: int | Any = 0) -> np.ndarray:
    """Sizes of `groups` groups, `(groups,)` int32, that sum to `total`.

    - `"even"`: all the same, or one more.
    - `"random"`: between `groups - 1` cuts, each as likely anywhere.
    - `"zipf"`: shares of `1 / i` for group `i = 1, 2, ...`.
    - `"one"`: all in the first group.

    `seed`: of what is random, an int, 0 or more.

    **Raises:** `ValueError` for another kind, or what is no such count.

    !!! example
        ```python
        import ragged
        print(ragged.tuning.sample_sizes("zipf", 4, 100))  # [48 24 16 12]
        ```
    """
    site = Site("ragged.tuning.sample_sizes")
    if not isinstance(kind, str) or kind not in KINDS:
        site.fail(ValueError, f"{kind!r} is no distribution of sizes.", f"Pass one of {', '.join(map(repr, KINDS))}.")
    for name, value, least in (("groups", groups, 1), ("total", total, 0), ("seed", seed, 0)):
        if not is_count(value, least):
            site.fail(ValueError, f"`{name}` is {value!r}.", f"It must be an int, {least} or more.")
    if kind == "random":
        ends = np.sort(np.random.default_rng(seed).integers(0, total, groups, endpoint=True))
        ends[-1] = total
    else:
        group = np.arange(groups)
        shares = {"even": np.ones(groups), "zipf": 1 / (1 + group), "one": group == 0}[kind]
        ends = np.round(total * np.cumsum(shares) / np.sum(shares)).astype(np.int64)
    return np.diff(ends, prepend=0).astype(np.int32)
