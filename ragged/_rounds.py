"""Times of functions that take turns."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def rounds[K](
    runs: Mapping[K, Callable[[], Any]], seconds: float, rng: np.random.Generator, least: int, most: int | None
) -> dict[K, list[float]]:
    """Seconds of each in each round, in a new order each time, so that what else the machine does hits all alike.

    A short one is repeated within its turn. There are `least` rounds, and then further ones, to
    `most`, while they begin within `seconds`.
    """
    repeats = {}
    for key, run in runs.items():
        start = time.perf_counter()
        run()
        repeats[key] = int(np.clip(1e-3 / max(time.perf_counter() - start, 1e-7), 1, 100))
    taken: dict[K, list[float]] = {key: [] for key in runs}
    end, keys, number = time.perf_counter() + seconds, [*runs], 0
    while number < least or (number != most and time.perf_counter() < end):
        for place in rng.permutation(len(keys)):
            key = keys[place]
            start = time.perf_counter()
            for _ in range(repeats[key]):
                runs[key]()
            taken[key].append((time.perf_counter() - start) / repeats[key])
        number += 1
    return taken
