"""Sizes and contents of buffers for a program. They are data: another draw costs a millisecond, not a compilation."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tests.contract.loop import Arrays, Place

LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
OFFSETS = (0, 1, 2, 3, -1, -2, 4, 5, -9, MOST, LEAST)


class Draw(NamedTuple):
    """One input of a program."""

    data: Arrays  # by term; also "existing", and tangents: "d lhs", "d rhs"
    sizes: Arrays  # by letter
    first: np.ndarray  # the group of the first matrix


def size_table(groups: int, capacity: int, tile: int, rng: np.random.Generator, count: int = 0) -> np.ndarray:
    """Vectors of sizes, `[n, groups]` int32: every pattern of empty groups, edges of tiles, one giant group, sums
    below, at and beyond the capacity, negative sizes, and sizes whose sum leaves int32. More random ones for a large
    `count` of draws."""

    def split(total: int, has: np.ndarray) -> np.ndarray:
        """`total` rows among the groups that `has` names, each at least one."""
        sizes, count = np.zeros(groups, np.int64), int(has.sum())
        if 0 < count <= total:
            cuts = np.sort(rng.choice(np.arange(1, total), count - 1, replace=False))
            sizes[has] = np.diff(cuts, prepend=0, append=total)
        return sizes

    def cycled(*values: int) -> np.ndarray:
        return np.resize(values, groups)

    def random() -> np.ndarray:
        total = int(rng.integers(capacity + 1))
        return rng.multinomial(total, rng.dirichlet(np.full(groups, 0.6))) if groups else cycled(0)

    few = min(groups, 5)  # of more groups, the patterns repeat
    patterns = [np.resize(has, groups) for has in itertools.product([False, True], repeat=few)]
    table = [split(capacity if i % 2 else (capacity + groups) // 2, has) for i, has in enumerate(patterns)]
    table += [n * row for row in np.eye(groups, dtype=np.int64)[:few] for n in (1, capacity - 1, capacity)]
    table += [cycled(n) for n in (1, tile // 2, tile - 1, tile, tile + 1, 2 * tile, capacity)]
    table += [np.roll(cycled(tile, 2 * tile, 1, 0, 11), i) for i in range(few)]
    table += [random() for _ in range(max(30, count // 8))]
    wrong = [(3, -2, 9, 4, 1), (5, capacity, 2, 0, 7), (MOST,), (MOST, MOST, 5, 0, 1), (-5,), (0, 0, 0, 0, 999)]
    table += [*itertools.starmap(cycled, wrong), cycled(2, 30, LEAST, 30, 3)]
    return np.stack(table).astype(np.int32)


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers. Or integers, most of them negative: in long sums, products of 8 bits add up past 2**24."""
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        low, high = max(int(info.min), -1100), min(int(info.max), 1100)  # which neither 8 bits nor bfloat16 hold
        return rng.integers(low, high, (4, *shape), endpoint=True).min(axis=0).astype(jnp.dtype(dtype))
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def draws(
    program: Any,
    count: int,
    *,
    seed: int = 0,
    is_poisoned: bool = True,
    sizes_of: Callable[[int], Arrays] | None = None,
) -> Iterator[Draw]:
    """`count` inputs of a program. Each row of the table of sizes is used once before one is used again; or the sizes
    of the n-th input are `sizes_of(n)`.

    Buffers hold NaN outside of groups and in matrices that nothing reads. If `is_poisoned`, most draws also have NaN
    or infinity all over one group, of one buffer or of all of them.
    """
    rng, batch = np.random.default_rng(seed), program.batch
    table = size_table(program.groups, program.capacity, 16, rng, count)
    times = 1 + count * batch // len(table)
    rows = {z: [i for _ in range(times) for i in rng.permutation(len(table))] for z in program.ragged}
    full = {name: values(rng, program.shape(name), dtype) for name, dtype in program.dtypes.items()}
    for name in program.casts:  # of very different magnitudes, so that each scale counts
        by_row, by_column = (np.exp2(rng.integers(-4, 5, n)) for n in full[name].shape[-2:])
        full[name] = (full[name] * by_row[:, None] * by_column).astype(full[name].dtype)
    for number in range(count):
        sizes = {z: table[order[number * batch : (number + 1) * batch]] for z, order in rows.items()}
        sizes = {z: each if program.has_batch("sizes") else each[0] for z, each in sizes.items()}
        sizes = {z: each.astype(program.size_dtype) for z, each in sizes.items()}
        sizes = sizes if sizes_of is None else sizes_of(number)
        first = np.array([OFFSETS[(number + i) % len(OFFSETS)] if program.held else 0 for i in range(batch)], np.int32)
        first = first if program.has_batch("first") else first[0]
        poisoned = ("", "lhs", "rhs", "out", "lhs rhs out")[number // 2 % 5].split() if is_poisoned else []
        poison, bad, data = np.inf if number % 2 else np.nan, number % (program.groups + 1), {}
        places = [program.places(sizes, first, element) for element in range(batch)]
        for name, each in full.items():
            if not jnp.issubdtype(each.dtype, jnp.floating):
                data[name] = each  # what lies outside of groups is as good as NaN: it would show
                continue
            data[name] = np.full_like(each, np.nan)
            for element, where in enumerate(places):
                of = (element,) if program.has_batch(name) else ()
                for group, at in enumerate(where[program.term_of(name)]):
                    if at is not None and all(map(_is_read, (its[group] for its in where.values()))):
                        data[name][of + at] = each[of + at]
                        if group == bad and name in poisoned:
                            data[name][of + at] = poison
        yield Draw(data, sizes, first)


def _is_read(place: Place) -> bool:
    return all(at.stop > at.start for at in place if isinstance(at, slice))
