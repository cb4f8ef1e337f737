"""Tiles for the GPU kernel: which are legal, what they take of shared memory, and which are chosen when none are asked
for."""

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp

from ragged.backends.base import Refusal
from ragged.backends.config import GpuConfig

SMALLEST = 16
"""A tile's least extent: what a tensor core multiplies at once."""


class Chip(NamedTuple):
    """What the choice of a tile depends on."""

    capability: int  # 90 is 9.0
    multiprocessors: int
    shared: int  # bytes of shared memory that a program may take
    flops: float  # a second, bfloat16, dense
    bandwidth: float  # bytes a second

    @property
    def has_tma(self) -> bool:
        return self.capability in range(90, 120)


_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
"""Bytes, by capability; 99 KiB on the others."""

_CHIPS = {
    "A100": Chip(80, 108, _SHARED[80], 312e12, 2.0e12),
    "A10": Chip(86, 72, 99 << 10, 125e12, 0.6e12),
    "L40": Chip(89, 142, 99 << 10, 181e12, 0.86e12),
    "L4": Chip(89, 58, 99 << 10, 121e12, 0.3e12),
    "RTX 4090": Chip(89, 128, 99 << 10, 165e12, 1.0e12),
    "H100": Chip(90, 132, _SHARED[90], 989e12, 3.35e12),
    "H200": Chip(90, 132, _SHARED[90], 989e12, 4.8e12),
    "B200": Chip(100, 148, _SHARED[100], 2250e12, 8.0e12),
    "B300": Chip(103, 148, _SHARED[103], 2500e12, 8.0e12),
}
"""By a part of the device kind; a longer one counts. Dense bfloat16 and memory from NVIDIA's data sheets."""

_PORTABLE = Chip(80, 108, 99 << 10, 312e12, 2.0e12)
"""Where nothing says which GPU is lowered for: every later one runs its PTX."""


@cache
def chip(device: tuple[str, int] | None) -> Chip:
    """The chip of a device: kind or compute capability, and number of multiprocessors, as in `Target.device`.

    `("NVIDIA H200", 132)`, or `("9.0", 132)` of a kind that isn't known.
    """
    if device is None:
        return _PORTABLE
    kind, multiprocessors = device
    names = [name for name in _CHIPS if name in kind]
    if names:
        known = _CHIPS[max(names, key=len)]
        return known._replace(multiprocessors=multiprocessors or known.multiprocessors)
    capability = _capability(kind)
    like = max(
        (c for c in _CHIPS.values() if c.capability <= capability), key=lambda c: c.capability, default=_PORTABLE
    )
    return like._replace(
        capability=capability,
        multiprocessors=multiprocessors or like.multiprocessors,
        shared=_SHARED.get(capability, 99 << 10),
    )


def is_known(device: tuple[str, int]) -> bool:
    """Whether there are figures of a device kind."""
    return any(name in device[0] for name in _CHIPS)


def _capability(kind: str) -> int:
    """The compute capability that a kind ends with, "9.0" as 90; what every GPU can do, if it ends with none."""
    major, dot, minor = kind.rpartition(" ")[2].partition(".")
    return 10 * int(major) + int(minor) if dot and major.isdigit() and minor.isdigit() else _PORTABLE.capability


class Problem(NamedTuple):
    """One product to be tiled: `[r, k] × [k, c]` for each of `groups`, with the extents that a group has on average.

    `r` and `c` are the rows and columns of the result as it is stored.
    """

    r: int
    c: int
    k: int
    groups: int
    itemsize: float  # of an operand in a dot, in bytes
    result: int  # bytes of an element of the result
    least_k: int
    wide: bool = False  # whether a tile's product has an accumulator of its own, besides the total
    slow: bool = False  # float32 without tensor cores
    by_thread: bool = False  # an operand is loaded element by element, each thread holding its addresses
    scaled: int = 0  # elements in a block of the scales that tensor cores multiply by, if they do
    ragged: bool = False  # in all three letters, each with its place and its end
    letters: str = "mnk"  # the product's, of `r`, `c` and `k`
    products: int = 1  # matrices that the rows are multiplied with
    results: int = 1  # arrays that are stored

    @property
    def sums(self) -> int:
        """How many accumulators, of the extent of a tile of the result, a program holds."""
        return self.products * (2 if self.wide else 1)

    @property
    def least_r(self) -> int:
        """The least rows of a tile. Triton has no other way to multiply 4 bits, as it has for fp8."""
        return SCALED_ROWS if self.itemsize < 1 else SMALLEST

    def config(self, r: int, c: int, k: int, **others: Any) -> GpuConfig:
        """One with such a tile."""
        return GpuConfig(**dict(zip(self.letters, (r, c, k), strict=True)), **others)


MOST_TOTALS = 128
"""Registers of a thread that may hold sums; it has 255."""


SCALED_ROWS = 128
"""Rows of the tiles that Blackwell's tensor cores multiply by scales."""


def least_k(*operands: Any) -> int:
    """The least tile of the contracted letter: tensor cores take 32 numbers of 8 bits at once, or 64 of 4, which come
    as uint8."""
    if all(dtype == jnp.uint8 for dtype in operands):
        return 64
    return 32 if all(jnp.dtype(dtype).itemsize == 1 for dtype in operands) else SMALLEST


def shared(problem: Problem, config: GpuConfig, on: Chip) -> int:
    """Bytes of shared memory that a kernel takes, at most: tiles in flight, or the result on its way to memory."""
    # Blackwell's tensor cores want float32 in one order; Triton turns tiles in shared memory.
    turned = 2 if on.capability >= 100 and problem.itemsize == 4 else 0
    r, c, k = config.along(problem.letters)
    loaded = int((config.stages + turned) * (r + problem.products * c) * k * problem.itemsize)
    if problem.scaled:
        loaded += config.stages * (r + problem.products * c) * max(4, k // problem.scaled)
    if problem.scaled and r < SCALED_ROWS:  # else Triton scales tiles in bfloat16
        loaded += (r + problem.products * c) * k * 2
    if config.variant:  # the next tile's operands come while a half of the result is on its way
        return loaded + r * c * problem.result // 2 + 1024
    return max(loaded, r * c * 4 // (1 if problem.slow else 2)) + 1024


def refuse(tile: dict[str, int]) -> Refusal | None:
    """Which rule a tiling breaks, and the nearest that breaks none."""
    near = {x: max(SMALLEST, 1 << (t - 1).bit_length()) for x, t in tile.items()}
    wrong = next((letter for letter in tile if near[letter] != tile[letter]), None)
    if wrong is None:
        return None
    return Refusal(
        f"tile_{wrong}={tile[wrong]} must be a power of two, and {SMALLEST} or more, on a GPU.",
        f"The nearest legal tiling is {tuple(near[letter] for letter in 'mkn')}.",
    )


def fit(problem: Problem, tile: tuple[int, int, int], on: Chip) -> GpuConfig:
    """A configuration for a tile that was asked for, halved along its longest side until it fits."""
    r, c, k = tile
    config = _config(problem, r, c, k, on)
    while config is None:
        longest = max(r, c, k)
        r, c, k = (r // 2, c, k) if r == longest else (r, c // 2, k) if c == longest else (r, c, k // 2)
        config = _config(problem, r, c, k, on)
    return config


@cache
def choose(problem: Problem, on: Chip) -> GpuConfig:
    """The configuration with the least time by a model: see `_seconds`."""
    widths = (SMALLEST, 32) if problem.slow else (32, 64, 128, 256)
    heights = (SMALLEST, 32) if problem.slow else (SCALED_ROWS,) if problem.scaled else (16, 32, 64, 128)
    depth = SMALLEST if problem.slow else int((64 if problem.by_thread else 128) / problem.itemsize)
    depth = min(depth, 1 << (problem.k - 1).bit_length())
    configs = (_config(problem, r, c, depth, on) for r, c in itertools.product(heights, widths))
    return min((c for c in configs if c is not None), key=lambda config: _seconds(problem, config, on))


def ranked(problem: Problem, on: Chip) -> list[GpuConfig]:
    """Configurations to try: what `choose` takes, and then other tiles, warps and stages that fit, best by the model
    first; behind the best of them, what the model knows nothing of."""
    first = choose(problem, on)
    depths = {*first.along(problem.letters[2]), int(128 / problem.itemsize), int(64 / problem.itemsize)}
    tried = itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), sorted(depths), (4, 8), (3, 4, 2))
    rest = []
    for r, c, k, warps, stages in tried:
        config = problem.config(r, c, max(k, problem.least_k), warps=warps, stages=stages)
        totals = r * c * problem.sums // (32 * warps)
        small = 32 * 32 if problem.slow else 256 * 256
        fits = (
            r >= problem.least_r
            and 8 <= totals <= MOST_TOTALS
            and r * c <= small
            and shared(problem, config, on) <= on.shared
        )
        if fits and r <= max(SMALLEST, 2 * problem.r) and config != first and config not in rest:
            rest.append(config)
    rest.sort(key=lambda config: _seconds(problem, config, on))
    others = [replace(first, band=4), replace(first, band=16), replace(first, programs=1)]
    others += [replace(first, tma=False)] * on.has_tma
    return [first, *rest[:8], *others, *rest[8:]]


def _config(p: Problem, r: int, c: int, k: int, on: Chip) -> GpuConfig | None:
    """Warps and stages for a tile; None if it fits neither registers nor shared memory."""
    r, k = max(r, p.least_r), max(k, p.least_k)
    # Hopper's and Blackwell's tensor cores read operands from shared memory, which leaves half of a thread's registers
    # for the total, or for it and a tile's own product. Where fragments of operands are held too (before Hopper,
    # and of float32, which is turned on the way), or their addresses, or where all three
    # letters are ragged, half of that.
    crowded = not on.has_tma or p.by_thread or p.ragged or p.itemsize >= 4
    totals, each = r * c * p.sums, MOST_TOTALS // 2 if crowded else MOST_TOTALS
    warps = 8 if totals > each * 128 or (p.slow and totals > 32 * 32) else 4
    if totals > each * 32 * warps:
        return None
    for stages in (4, 3, 2):
        config = p.config(r, c, k, warps=warps, stages=stages)
        if shared(p, config, on) <= on.shared:
            return config
    return None


def resident(problem: Problem, config: GpuConfig, on: Chip) -> int:
    """How many programs a multiprocessor runs at a time: as many as its shared memory and its registers hold."""
    warps = 3 * config.warps if config.variant == "specialised" else config.warps
    return config.programs or min(16 // warps, max(1, on.shared // shared(problem, config, on)))


_LATENCY = 1.5e-6
"""Seconds until a tile's first operands have come, and until its result is gone, where nothing hides them."""

_L2 = 5.5e12
"""Bytes a second that an H100's second-level cache serves; other chips' in proportion to their multiprocessors."""


def _seconds(p: Problem, config: GpuConfig, on: Chip) -> tuple[float, float]:
    """What the model says a configuration takes: rounds of tiles, of which each has a price, or the bytes of memory.

    Where the bytes take longer than many of them, the second number decides: when the last whole round is over.
    """
    # Sizes are even by the model; they rarely are, so half a tile more.
    r, c, _ = config.along(p.letters)
    rows = max(1.0, p.r / r + (0.5 if p.r > r else 0.0))
    tiles = p.groups * rows * -(-p.c // c)
    # Tensor cores are fed from shared memory: narrow tiles starve them. Below 64 rows, Hopper's are not used in full.
    # Of a gated product, columns of two matrices meet the same rows.
    wide = p.products * c
    rate = min(1.0, 0.4 + r / 200) * min(1.0, 0.35 + wide / 256) * on.flops / on.multiprocessors
    compute = 2 * r * wide * p.k / rate * min(1, p.itemsize / 2)
    cached = (r + wide) * p.k * p.itemsize / (_L2 / 132)
    tile = max(compute, cached) + _LATENCY + r * c * p.results * p.result / (on.bandwidth / on.multiprocessors) / 2
    per_chip = on.multiprocessors * min(2, resident(p, config, on))
    rounds = max(1.0, tiles / per_chip)
    busy = rounds * tile * per_chip / on.multiprocessors if tiles > on.multiprocessors else tile
    moved = p.groups * ((p.r + p.products * p.c) * p.k * p.itemsize + p.results * p.r * p.c * p.result)
    return max(busy, moved / on.bandwidth), math.ceil(rounds) * tile
