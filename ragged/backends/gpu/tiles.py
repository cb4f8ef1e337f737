"""Tiles for the GPU kernel: which are legal, how much shared memory they need, and the default choice."""

import itertools
import math
import re
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from ragged.backends.base import Refusal
from ragged.product.config import GpuConfig

SMALLEST = 16
"""The smallest extent of a tile and of a tensor core instruction."""


class Chip(NamedTuple):
    """Figures of a GPU for the choice of tiles."""

    capability: int  # compute capability: 90 is 9.0
    multiprocessors: int
    shared: int  # bytes of shared memory for a program
    flops: float  # per second, bfloat16, dense
    bandwidth: float  # bytes per second

    @property
    def has_tma(self) -> bool:
        return self.capability in range(90, 120)


_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
"""Bytes of shared memory for a program, keyed by compute capability; 99 KiB for all others."""

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
"""Chips, keyed by a part of the device kind; the longest match counts. FLOPs and bandwidth: NVIDIA's data sheets."""

_PORTABLE = Chip(80, 108, 99 << 10, 312e12, 2.0e12)
"""The chip for an unknown GPU: every later GPU runs its PTX."""


@cache
def chip(device: tuple[str, int] | None) -> Chip:
    """The chip of `Target.device`, such as `("NVIDIA H200", 132)`, or `("9.0", 132)` for compute capability 9.0.

    The number of multiprocessors may be 0: the kind's default.
    """
    if device is None:
        return _PORTABLE
    kind, multiprocessors = device
    if known := _known(kind):
        return known._replace(multiprocessors=multiprocessors or known.multiprocessors)
    capability = _capability(kind)
    similar = max(
        (c for c in _CHIPS.values() if c.capability <= capability), key=lambda c: c.capability, default=_PORTABLE
    )
    return similar._replace(
        capability=capability,
        multiprocessors=multiprocessors or similar.multiprocessors,
        shared=_SHARED.get(capability, 99 << 10),
    )


def is_known(device: tuple[str, int]) -> bool:
    """Whether `_CHIPS` has the device's kind."""
    return _known(device[0]) is not None


def _known(kind: str) -> Chip | None:
    # "A100" is not in "RTX A1000".
    names = [name for name in _CHIPS if re.search(rf"{name}(?!\d)", kind)]
    return _CHIPS[max(names, key=len)] if names else None


def _capability(kind: str) -> int:
    """The compute capability at the end of a kind, "9.0" as 90; without one, the capability of `_PORTABLE`."""
    major, dot, minor = kind.rpartition(" ")[2].partition(".")
    return 10 * int(major) + int(minor) if dot and major.isdigit() and minor.isdigit() else _PORTABLE.capability


class Problem(NamedTuple):
    """A product to choose tiles for: `[r, k] × [k, c] -> [r, c]` for each group, with the mean group's extents."""

    r: int
    c: int
    k: int
    groups: int
    itemsize: float  # bytes of an operand's element in a dot
    result: int  # bytes of an element of the result
    min_k: int  # see the function `min_k`
    step_accumulator: bool = False  # whether a step's product has an accumulator besides the total
    slow: bool = False  # float32 without tensor cores
    by_thread: bool = False  # whether an operand is loaded without TMA: addresses then need registers
    scaled: int = 0  # extent of a block of scales, if tensor cores apply them; else 0
    ragged: bool = False  # whether all three letters are ragged: offsets and sizes then need many registers
    flat: bool = False  # whether the kernel's loop is over the steps of all tiles
    letters: str = "mnk"  # the product's letters for `r`, `c` and `k`
    products: int = 1  # number of matrices that the rows are multiplied with
    results: int = 1  # number of stored arrays
    instructions: int = 0  # of the epilogue, per element of the result
    splits: bool = False  # whether `GpuConfig.splits` may be more than 1
    unpacks: bool = False  # whether few bits are converted in registers beside float32 tiles or two accumulators

    @property
    def sums(self) -> int:
        """Number of accumulators, each of the size of a tile of the result."""
        return self.products * (2 if self.step_accumulator else 1)

    @property
    def min_r(self) -> int:
        """The smallest number of rows of a tile. For 4-bit floats, Triton requires `SCALED_ROWS`."""
        return SCALED_ROWS if self.itemsize < 1 else SMALLEST

    def config(self, r: int, c: int, k: int, **others: Any) -> GpuConfig:
        return GpuConfig(**dict(zip(self.letters, (r, c, k), strict=True)), splits=1, **others)


MAX_SUM_REGISTERS = 128
"""Largest number of a thread's 255 registers that may hold sums."""


SCALED_ROWS = 128
"""Smallest number of rows of a tile for which Blackwell's tensor cores apply scales."""


def min_k(bits: int) -> int:
    """The smallest tile of the contracted letter. `bits`: of a number, of the operand whose numbers have most.

    Along this letter, a tensor core instruction multiplies 32 numbers of 8 bits, or 64 of 4 bits.
    """
    return max(256 // bits, SMALLEST)


def shared(problem: Problem, config: GpuConfig, on: Chip) -> int:
    """Upper bound on the bytes of shared memory: tiles in flight, and what is stored at a time of the result."""
    # Blackwell's tensor cores require one order of float32 operands, so Triton transposes tiles in shared memory.
    transposed = 2 if on.capability >= 100 and problem.itemsize == 4 else 0
    r, c, k = config.along(problem.letters)
    assert config.stages is not None
    loaded = int((config.stages + transposed) * (r + problem.products * c) * k * problem.itemsize)
    if problem.scaled:
        loaded += config.stages * (r + problem.products * c) * max(4, k // problem.scaled)
    if problem.scaled and r < SCALED_ROWS:  # Triton then applies the scales to tiles in bfloat16
        loaded += (r + problem.products * c) * k * 2
    if problem.flat:  # the next tile's loads have begun
        return loaded + r * slice_of(problem, config) * problem.result + 1024
    return max(loaded, r * c * 4 // (1 if problem.slow else 2)) + 1024


def slice_of(problem: Problem, config: GpuConfig) -> int:
    """How many columns of a tile of the result go through an epilogue, and are stored, at a time."""
    r, c, _ = config.along(problem.letters)
    assert config.warps is not None
    per_thread = _SLICE // 4 if problem.scaled and problem.instructions else _SLICE
    # All threads, 32 in a warp, share the tile's rows.
    return min(c, max(SMALLEST, per_thread * 32 * config.warps // (problem.products * r)))


_SLICE = 32
"""Elements of a thread that go through the epilogue at a time. More would need registers that hold the other sums.

If tensor cores apply the scales, an epilogue has a quarter of this: `gelu` spills 96 bytes with 32 elements, and 8
bytes with 16.
"""


def refuse(tile: dict[str, int]) -> Refusal | None:
    """`Refusal` if a tile size is illegal, with the nearest legal tiling as hint; else None."""
    near = {x: max(SMALLEST, 1 << (t - 1).bit_length()) for x, t in tile.items()}
    wrong = next((letter for letter in tile if near[letter] != tile[letter]), None)
    if wrong is None:
        return None
    return Refusal(
        f"tile_{wrong}={tile[wrong]} must be a power of two, and {SMALLEST} or more, on a GPU.",
        f"The nearest legal tiling is {tuple(near[letter] for letter in 'mkn')}.",
    )


def fit(problem: Problem, tile: tuple[int, int, int], on: Chip) -> GpuConfig:
    """The configuration with the tile `(r, c, k)`, halved along its longest side until it fits."""
    r, c, k = tile
    config = _config(problem, r, c, k, on)
    while config is None:
        longest = max(r, c, k)
        r, c, k = (r // 2, c, k) if r == longest else (r, c // 2, k) if c == longest else (r, c, k // 2)
        config = _config(problem, r, c, k, on)
    return config


@cache
def choose(problem: Problem, on: Chip) -> GpuConfig:
    """The configuration with the least time by the model `seconds`."""
    columns = (SMALLEST, 32) if problem.slow else (32, 64, 128, 256)
    rows = (SMALLEST, 32) if problem.slow else (SCALED_ROWS,) if problem.scaled else (16, 32, 64, 128)
    # 128 bytes along `k`, or 64 if addresses need registers.
    depth = SMALLEST if problem.slow else int((64 if problem.by_thread else 128) / problem.itemsize)
    depth = min(depth, 1 << (problem.k - 1).bit_length())
    # Where loads run ahead of a tile's end, three stages suffice, and more programs fit a multiprocessor.
    most_stages = (4, 3) if problem.flat else (4,)
    whole = [_config(problem, r, c, depth, on, s) for r, c, s in itertools.product(rows, columns, most_stages)]
    splits = [n for n in _SPLITS if problem.splits or n == 1]
    configs = (replace(config, splits=n) for config in whole if config is not None for n in splits)
    return min(configs, key=lambda config: seconds(problem, config, on))


_SPLITS = (1, 2, 4, 8, 16)
"""Numbers of parts of the contracted dim that the model compares. It knows one batch element: more of them have enough
tiles."""


def ranked(problem: Problem, on: Chip) -> list[GpuConfig]:
    """Configurations to measure: the choice of `choose`, then others that fit, the fastest by the model first.

    After the fastest eight come variants of the first one, whose times the model can't compare.
    """
    first = choose(problem, on)
    depths = {*first.along(problem.letters[2]), int(128 / problem.itemsize), int(64 / problem.itemsize)}
    tried = itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), sorted(depths), (4, 8), (3, 4, 2))
    rest = []
    for r, c, k, warps, stages in tried:
        config = problem.config(r, c, max(k, problem.min_k), warps=warps, stages=stages)
        registers = r * c * problem.sums // (32 * warps)
        largest = 32 * 32 if problem.slow else 256 * 256
        fits = (
            r >= problem.min_r
            and 8 <= registers <= MAX_SUM_REGISTERS
            and r * c <= largest
            and shared(problem, config, on) <= on.shared
        )
        if fits and r <= max(SMALLEST, 2 * problem.r) and config != first and config not in rest:
            rest.append(config)
    rest.sort(key=lambda config: seconds(problem, config, on))
    others = [replace(first, band=4), replace(first, band=16), replace(first, programs=1)]
    others += [replace(first, tma=False)] * on.has_tma
    others += [replace(first, splits=n) for n in (1, 2, 4) if problem.splits and n != first.splits]
    return [first, *rest[:8], *others, *rest[8:]]


def _config(p: Problem, r: int, c: int, k: int, on: Chip, most_stages: int = 4) -> GpuConfig | None:
    """The configuration with this tile, and warps and stages that fit; None if none do."""
    r, k = max(r, p.min_r), max(k, p.min_k)
    # Hopper's and Blackwell's tensor cores read operands from shared memory, which leaves half of the registers for
    # sums. A quarter is left if registers also hold operands (before Hopper, and to transpose float32), addresses, or
    # offsets of three ragged letters.
    is_crowded = not on.has_tma or p.by_thread or p.ragged or p.itemsize >= 4
    sums, per_thread = r * c * p.sums, MAX_SUM_REGISTERS // (1 + is_crowded) // (1 + p.unpacks)
    warps = 8 if sums > per_thread * 128 or (p.slow and sums > 32 * 32) else 4
    # Blackwell's tensor cores have memory of their own. Beside float32 operands, it has too little for wider sums.
    is_too_wide = on.capability >= 100 and p.itemsize >= 4 and p.products * c > 128
    if is_too_wide or sums > per_thread * 32 * warps:
        return None
    for stages in range(most_stages, 1, -1):
        config = p.config(r, c, k, warps=warps, stages=stages)
        if shared(p, config, on) <= on.shared:
            return config
    return None


def resident(problem: Problem, config: GpuConfig, on: Chip) -> int:
    """Number of programs that a multiprocessor runs at a time: `config.programs`, or as many as fit."""
    assert config.warps is not None
    r, c, _ = config.along(problem.letters)
    threads = 32 * config.warps
    registers = min(255, r * c * problem.sums // threads + _OTHER_REGISTERS)
    return config.programs or max(1, min(_REGISTERS // (threads * registers), on.shared // shared(problem, config, on)))


_REGISTERS = 65536
"""Registers of a multiprocessor."""

_OTHER_REGISTERS = 80
"""Registers of a thread, besides its sums."""

_RATE = 0.7
"""Share of the data sheet's FLOPs per second that an H200 reaches. This and the next three constants were chosen so
that the model's estimates are near measured times of whole products, and its choice is near the fastest tile."""

_L2 = 13e12
"""Bytes per second of an H200's L2 cache. The model scales it with the number of multiprocessors."""

_LATENCY, _FLAT_LATENCY = 2e-6, 0.5e-6
"""Seconds from a tile's last product to the next tile's first one, besides the store. Other programs on the
multiprocessor multiply meanwhile. The second is for kernels whose loads run ahead of a tile's end."""


_ADDING = 4e-6
"""Seconds to launch the kernel that adds up the sums of `GpuConfig.splits` parts, besides moving them."""

_LANES = 2.2e11
"""Instructions per second of all lanes of an H100's multiprocessor. Epilogues don't overlap with other work."""


def seconds(p: Problem, config: GpuConfig, on: Chip) -> tuple[float, float]:
    """`(seconds, tie)` of a configuration by the model.

    In a round, the chip computes as many tiles as it can at a time. `seconds` is the time of all rounds, or of moving
    all bytes and ending each round, whichever is longer. `tie` decides between equal ones: the seconds of all rounds
    without sharing a multiprocessor.
    """
    # The model adds three quarters of a tile to the mean group, because sizes are rarely equal.
    r, c, _ = config.along(p.letters)
    rows = max(1.0, p.r / r + 0.75)
    assert config.splits is not None
    k, tiles = -(-p.k // config.splits), p.groups * rows * -(-p.c // c) * config.splits
    at_a_time = min(2, resident(p, config, on))
    # Tensor cores are partly idle with few rows, with few columns, which makes them wait for shared memory, and while a
    # step's sums are added to the total. On Hopper, another program on the multiprocessor occupies them meanwhile. A
    # gated product has the columns of two matrices.
    columns, together = p.products * c, at_a_time if on.capability == 90 else 1
    rate = min(1.0, 0.4 + together * r / 200) * min(1.0, (0.4 if together == 2 else 0.35) + columns / 256)
    rate *= (0.85 if p.step_accumulator and together == 1 else 1.0) * _RATE * on.flops / on.multiprocessors
    compute = 2 * r * columns * k / rate * min(1, p.itemsize / 2)
    cached = (r + columns) * k * p.itemsize / (_L2 / 132)
    latency = _FLAT_LATENCY if p.flat and config.splits == 1 else _LATENCY
    ending = (latency + 0.75 * r * c * p.results * p.result / (on.bandwidth / on.multiprocessors)) / at_a_time
    tile = max(compute, cached) + ending + r * c * p.instructions / _LANES
    per_chip = on.multiprocessors * at_a_time
    rounds = math.ceil(tiles / per_chip)
    # Programs on one multiprocessor share it, so a round takes as long as all of their tiles.
    busy = rounds * tile * at_a_time if tiles > on.multiprocessors else tile
    moved = p.groups * ((p.r + p.products * p.c) * p.k * p.itemsize + p.results * p.r * p.c * p.result)
    # The sums of all parts, in 32 bits, are written and read again.
    adding = 0 if config.splits == 1 else _ADDING + 8 * config.splits * p.groups * p.r * p.c / on.bandwidth
    return max(busy, moved / on.bandwidth + rounds * ending) + adding, rounds * tile
