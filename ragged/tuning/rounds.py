"""Measures functions in turn."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def rounds[K](
    runs: Mapping[K, Callable[[], Any]],
    seconds: float,
    rng: np.random.Generator,
    min_rounds: int,
    max_rounds: int | None,
) -> dict[K, list[float]]:
    """Seconds that each function takes, in each round.

    In a round, each function has one turn, in an order that changes between rounds, so that background load affects all
    functions equally. A short function is repeated within its turn, and its time is the mean. After `min_rounds`
    rounds, further rounds start until `seconds` have passed or there are `max_rounds`.
    """
    repeats = {}
    for key, run in runs.items():
        start = time.perf_counter()
        run()
        repeats[key] = int(np.clip(1e-3 / max(time.perf_counter() - start, 1e-7), 1, 100))
    times: dict[K, list[float]] = {key: [] for key in runs}
    end, keys, number = time.perf_counter() + seconds, [*runs], 0
    while number < min_rounds or (number != max_rounds and time.perf_counter() < end):
        for place in rng.permutation(len(keys)):
            key = keys[place]
            start = time.perf_counter()
            for _ in range(repeats[key]):
                runs[key]()
            times[key].append((time.perf_counter() - start) / repeats[key])
        number += 1
    return times
