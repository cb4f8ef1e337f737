"""Tiles for TPU kernels: which are legal, what they take of VMEM, and which are chosen when none are asked for."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from ragged.backends.base import DEFAULT_TPU, Refusal

LANES = 128


class Chip(NamedTuple):
    """What the choice of a tile depends on, for one core."""

    cores: int
    generation: int
    mxu: int  # rows and columns of a matrix unit
    vmem: int  # bytes that a kernel may use
    flops: float  # a second, bfloat16
    bandwidth: float  # bytes a second
    narrow: tuple[tuple[str, float], ...] = ()  # formats of 8 bits and fewer that it multiplies, and `flops` in them

    def rate(self, dtype: Any) -> float | None:
        """Operations a second on operands of this dtype; None if it is narrow, and the matrix units don't have it."""
        return dict(self.narrow).get(jnp.dtype(dtype).name, self.flops if jnp.dtype(dtype).itemsize > 1 else None)


@cache
def chip(device: tuple[str, int] | None) -> Chip:
    """The chip of a device kind, such as `("TPU v6 lite", 1)`. Where it isn't known, what all generations can do."""
    if device is None:
        return chip(DEFAULT_TPU)._replace(vmem=12 << 20, narrow=())
    kind = AbstractDevice(*device, "tpu")
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            info = pltpu.get_tpu_info()
    except ValueError:
        return chip(None)
    rates = dict.fromkeys(("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2"), info.fp8_ops_per_second)
    rates |= {"int8": info.int8_ops_per_second, "int4": info.int4_ops_per_second}
    # What scales need, and the compiler itself, is left to them: a kernel's limit is a fifth higher.
    return Chip(
        info.num_cores,
        info.generation,
        info.mxu_column_size,
        int(0.75 * info.vmem_capacity_bytes),
        info.bf16_ops_per_second,
        info.mem_bw_bytes_per_second,
        tuple((name, rate) for name, rate in rates.items() if rate and info.is_matmul_supported(name, name)),
    )


def is_known(device: tuple[str, int]) -> bool:
    """Whether there are figures of a device kind."""
    return chip(device) != chip(None)


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def sublanes(*dtypes: Any) -> int:
    """Rows of the smallest tile of memory that suits all of `dtypes`: 8 of 32 bits, 16 of 16, 32 of 8, 64 of 4."""
    return max(8 * 32 // jax.dtypes.itemsize_bits(dtype) for dtype in dtypes)


def block_bytes(rows: int, columns: int, dtype: Any) -> int:
    """What a block takes of VMEM."""
    return round_up(rows, sublanes(dtype)) * round_up(columns, LANES) * jax.dtypes.itemsize_bits(dtype) // 8


def refuse(tile: dict[str, int], extents: dict[str, int], ragged: str, dtypes: tuple[Any, ...]) -> Refusal | None:
    """Which rule a tiling breaks, and the nearest that breaks none.

    A tile of rows (of a ragged letter) must be a multiple of the dtypes' sublanes, any other of 128 lanes, unless it
    holds the whole extent.
    """
    unit = {letter: sublanes(*dtypes) if letter in ragged else LANES for letter in tile}
    near = {x: t if t >= extents[x] or t % unit[x] == 0 else round_up(t, unit[x]) for x, t in tile.items()}
    wrong = next((letter for letter in tile if near[letter] != tile[letter]), None)
    if wrong is None:
        return None
    names = ", ".join(jnp.dtype(d).name for d in dict.fromkeys(dtypes))
    what = f"the sublanes of {names}" if wrong in ragged else "the lanes"
    return Refusal(
        f"tile_{wrong}={tile[wrong]} must be a multiple of {unit[wrong]} ({what}), or the whole extent "
        f"{extents[wrong]}, on a TPU.",
        f"The nearest legal tiling is {tuple(near[letter] for letter in 'mkn')}.",
    )


class Problem(NamedTuple):
    """One product to be tiled. Extents and tiles are in the order rows, first, second, whatever a kernel calls them."""

    kind: str  # "rows": [r, a] x [g, a, b] -> [r, b]; "groups": [r, a] x [r, b] -> [g, a, b]; "batched": as "rows",
    rows: int  # where each group has all the rows
    a: int
    b: int
    groups: int
    dtypes: tuple[Any, Any, Any]  # of the operands and the result
    dot: Any  # how two tiles are multiplied: see `units.Dot`
    buffers: int  # of each operand
    has_existing: bool = False
    elements: int = 1  # batch elements that the table of visits lists
    letters: str = "mkn"  # the product's, of `rows`, `a` and `b`
    products: int = 1  # matrices that the rows are multiplied with
    results: int = 1  # arrays that are stored

    @property
    def units(self) -> tuple[int, int, int]:
        """What a tile must be a multiple of along each extent, unless it holds all of it."""
        # Where nothing is ragged, an operand may have the rows along its lanes.
        return LANES if self.kind == "batched" else sublanes(*self.dtypes), LANES, LANES


def vmem(problem: Problem, tile: tuple[int, int, int]) -> int:
    """Bytes of VMEM that a kernel takes: buffers, casts, the accumulator, and the result before it is cast."""
    (r, a, b), p = tile, problem
    blocks = ((r, a), (r, b), (a, b)) if p.kind == "groups" else ((r, a), (a, b), (r, b))
    total = (2 * p.results + 2 * p.has_existing) * block_bytes(*blocks[2], p.dtypes[2])
    total += 2 * p.products * block_bytes(*blocks[2], jnp.float32)
    streams = zip(blocks[:2], p.dtypes[:2], (p.dot.lhs, p.dot.rhs), (1, p.products), strict=True)
    for block, dtype, taken, count in streams:
        total += p.buffers * count * block_bytes(*block, dtype)
        total += block_bytes(*block, taken) * (jnp.dtype(dtype) != taken)
    return total


SMEM = 3 << 18
"""Bytes of tables that fit the scalar memory of every generation, 1 MiB."""


def smem(problem: Problem, tile: tuple[int, int, int]) -> int:
    """Bytes of scalar memory that the table of visits takes: see `schedule.Visits`."""
    p = problem
    if p.kind == "batched":
        return 0
    pieces = p.elements * (2 * p.groups + 1 if p.kind == "rows" else p.groups)
    return 4 * (2 * p.elements * (-(-p.rows // tile[0]) + p.groups) + 5 * pieces)


@cache
def choose(problem: Problem, on: Chip) -> tuple[int, int, int]:
    """The tile `(rows, a, b)` with the least time by a model: FLOPs or bytes, a price for each step, and the pipeline's
    first and last blocks, which nothing hides. It always fits into VMEM."""
    return next(iter(ranked(problem, on)), problem.units)


def ranked(problem: Problem, on: Chip) -> list[tuple[int, int, int]]:
    """All tiles that fit, best by the model first."""
    fitting = [t for t in _candidates(problem) if fits(problem, t, on)]
    listable = [t for t in fitting if smem(problem, t) <= SMEM] or fitting
    return sorted(listable, key=lambda tile: _seconds(problem, tile, on))


def fits(problem: Problem, tile: tuple[int, int, int], on: Chip) -> bool:
    """Whether a tile fits into VMEM, and its products, which are unrolled, compile in a few seconds."""
    return problem.products * math.prod(tile) <= 2**30 * on.mxu // 128 and vmem(problem, tile) <= on.vmem


def fit(problem: Problem, tile: tuple[int, int, int], on: Chip) -> tuple[int, int, int]:
    """`tile`, no larger than the extents, halved along its longest side until it fits into VMEM."""
    unit = problem.units
    r, a, b = (min(t, extent) for t, extent in zip(tile, (problem.rows, problem.a, problem.b), strict=True))
    while vmem(problem, (r, a, b)) > on.vmem and (r > unit[0] or a > unit[1] or b > unit[2]):
        sides = [r / unit[0], a / unit[1], b / unit[2]]
        longest = sides.index(max(sides))
        r, a, b = (round_up(-(-t // 2), unit[i]) if i == longest else t for i, t in enumerate((r, a, b)))
    return r, a, b


def _candidates(p: Problem) -> Iterator[tuple[int, int, int]]:
    unit = p.units[0]
    tallest = min(512, round_up(p.rows, unit))
    heights = [t for t in (16, 32, 64, 128, 256, 512) if t % unit == 0 and t < tallest] + [tallest]
    for a in _parts(p.a):
        for b in _parts(p.b):
            for rows in heights:
                yield rows, a, b


def _parts(extent: int) -> list[int]:
    """The whole extent, and equal parts of it in whole lanes, down to one lane tile."""
    parts = [round_up(-(-extent // count), LANES) for count in (*range(2, 9), 12, 16, 24, 32, 48, 64, 128, 256)]
    return list(dict.fromkeys([extent, *(t for t in [*parts, LANES] if t < extent)]))


_VMEM = 6e12
"""Bytes a second that the vector unit stores: a register of 4 KiB each cycle."""

_STEP = {"rows": 0.12e-6, "batched": 0.12e-6, "groups": 0.35e-6}
"""Seconds that a step of the grid takes besides its product, by the simulator: to fill and drain the matrix units, and
in a wgrad to begin the transpose."""


def _seconds(p: Problem, tile: tuple[int, int, int], on: Chip) -> float:
    """What the model says a tile takes. Each step computes while the blocks of the next one arrive."""
    rows, a, b = tile
    size = [jax.dtypes.itemsize_bits(dtype) / 8 for dtype in p.dtypes]
    tiles_a, tiles_b = -(-p.a // a), -(-p.b // b)
    per_group = p.rows if p.kind == "batched" else -(-p.rows // p.groups)
    # Visits of a group: to whole tiles, and now and then to one more that it shares with a neighbour. There, what is
    # computed is rounded to chunks.
    visits = max(per_group / rows, 1.0) if p.kind == "batched" else per_group / rows + 0.25
    computed = min(rows * math.ceil(per_group / rows), per_group + chunk(rows) / 2)
    # A matrix unit is loaded with as many rows as it has before it multiplies; fewer take as long.
    busy = computed * max(1.0, on.mxu / min(rows, per_group))
    # Integers count as bfloat16: at their own rate smaller tiles look as good, and by the simulator are slower.
    rate = None if jnp.issubdtype(p.dot.lhs, jnp.integer) else on.rate(p.dot.lhs)
    compute = 2 * p.products * busy * round_up(a, LANES) * round_up(b, LANES) / (rate or on.flops) / visits
    compute += _STEP[p.kind]
    if p.kind == "groups":
        # A visit reads rows of both operands; after a group's last one, its matrix is written.
        each, once = rows * (a * size[0] + b * size[1]), a * b * size[2]
    else:
        # A visit reads rows and writes rows; before a group's first one, its matrix is read; or before each, if the
        # matrix is read in parts.
        each, once = rows * (a * size[0] + p.results * b * size[2] / tiles_a), p.products * a * b * size[1]
        if tiles_a > 1:
            each, once = each + once, 0.0
            compute += p.products * rows * round_up(b, LANES) * 4 / _VMEM  # accumulators are stored at each step
    first = max(compute, (each + once) / on.bandwidth)
    others = max(visits - 1.0, 0.0) * max(compute, each / on.bandwidth)
    total = p.groups * tiles_a * tiles_b * (first + others)
    # Cores share the tiles of the letter that the grid goes over first. Nothing hides the first and the last blocks.
    outer = tiles_a if p.kind == "groups" else p.groups if p.kind == "batched" else tiles_b
    return -(-outer // on.cores) / outer * total + (each + once) / on.bandwidth


def chunk(rows: int) -> int:
    """Rows that a kernel computes at a time in a tile that a group does not fill."""
    return 128 if rows % 128 == 0 else rows
