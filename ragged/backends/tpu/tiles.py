"""Tiles for TPU kernels: which are legal, how much VMEM they need, and the default choice."""

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
    """Figures of a TPU, per core, for the choice of tiles."""

    cores: int
    generation: int
    mxu: int  # rows and columns of a matrix unit
    vmem: int  # bytes that a kernel may use
    flops: float  # per second, bfloat16
    bandwidth: float  # bytes per second
    narrow: tuple[tuple[str, float], ...] = ()  # (dtype, operations per second) of 8-bit and narrower formats
    mixed: tuple[tuple[str, str], ...] = ()  # dtypes of operands, bfloat16 and an 8-bit float, that need no cast

    def rate(self, dtype: Any) -> float | None:
        """Operations per second on operands of this dtype; None if the matrix units don't support it."""
        return dict(self.narrow).get(jnp.dtype(dtype).name, self.flops if jnp.dtype(dtype).itemsize > 1 else None)


@cache
def chip(device: tuple[str, int] | None) -> Chip:
    """The chip of `Target.device`, such as `("TPU v6 lite", 1)`; if unknown, one that suits all generations."""
    if device is None:
        return chip(DEFAULT_TPU)._replace(vmem=12 << 20, narrow=(), mixed=())
    kind = AbstractDevice(*device, "tpu")
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            info = pltpu.get_tpu_info()
    except ValueError:
        return chip(None)
    floats = "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2"
    pairs = [pair for name in floats for pair in (("bfloat16", name), (name, "bfloat16"))]
    rates = dict.fromkeys(floats, info.fp8_ops_per_second)
    rates |= {"int8": info.int8_ops_per_second, "int4": info.int4_ops_per_second}
    # A quarter of VMEM is left for the compiler.
    return Chip(
        info.num_cores,
        info.generation,
        info.mxu_column_size,
        int(0.75 * info.vmem_capacity_bytes),
        info.bf16_ops_per_second,
        info.mem_bw_bytes_per_second,
        tuple((name, rate) for name, rate in rates.items() if rate and info.is_matmul_supported(name, name)),
        tuple(pair for pair in pairs if info.is_matmul_supported(*pair)),
    )


def is_known(device: tuple[str, int]) -> bool:
    """Whether the kind's figures are known."""
    return chip(device) != chip(None)


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def sublanes(*dtypes: Any) -> int:
    """Rows of the smallest tile of memory for all of `dtypes`: 8 for 32 bits, 16 for 16, 32 for 8, 64 for 4."""
    return max(8 * 32 // jax.dtypes.itemsize_bits(dtype) for dtype in dtypes)


def block_bytes(rows: int, columns: int, dtype: Any) -> int:
    """Bytes of a block in VMEM."""
    return round_up(rows, sublanes(dtype)) * round_up(columns, LANES) * jax.dtypes.itemsize_bits(dtype) // 8


def refuse(tile: dict[str, int], extents: dict[str, int], dtypes: dict[str, tuple[Any, ...]]) -> Refusal | None:
    """`Refusal` if a tile size is illegal, with the nearest legal tiling as hint; else None.

    `dtypes`: for each ragged letter, the dtypes of the arrays that have it. A tile must be a multiple of their sublanes
    along a ragged letter, of 128 along others, or the whole extent.
    """
    unit = {letter: sublanes(*dtypes[letter]) if letter in dtypes else LANES for letter in tile}
    near = {x: t if t >= extents[x] or t % unit[x] == 0 else round_up(t, unit[x]) for x, t in tile.items()}
    wrong = next((letter for letter in tile if near[letter] != tile[letter]), None)
    if wrong is None:
        return None
    names = ", ".join(jnp.dtype(d).name for d in dict.fromkeys(dtypes.get(wrong, ())))
    what = f"the sublanes of {names}" if wrong in dtypes else "the lanes"
    return Refusal(
        f"tile_{wrong}={tile[wrong]} must be a multiple of {unit[wrong]} ({what}), or the whole extent "
        f"{extents[wrong]}, on a TPU.",
        f"The nearest legal tiling is {tuple(near[letter] for letter in 'mkn')}.",
    )


class ScaleBlocks(NamedTuple):
    """Float32 scales, or zero points, that a kernel fetches for a tile.

    - `shape`: the extents of all scales of a matrix.
    - `along`: for each axis, which of the product's extents has its tiles, 0 to 2; None if a block has the whole axis.
    - `rows`: number of rows that share a scale. Then `shape` counts the rows.
    """

    shape: tuple[int, int]
    along: tuple[int | None, int | None]
    rows: int = 1

    def bytes(self, tile: tuple[int, int, int]) -> int:
        """Bytes in VMEM of both buffers."""
        rows, columns = (n if i is None else min(n, tile[i]) for n, i in zip(self.shape, self.along, strict=True))
        return 2 * block_bytes(-(-rows // self.rows), columns, jnp.float32)


class Problem(NamedTuple):
    """A product to choose tiles for. Extents and tiles have the order `rows`, `a`, `b`. By `kind`, the product is:

    - "rows": `[r, a] × [g, a, b] -> [r, b]`;
    - "groups": `[r, a] × [r, b] -> [g, a, b]`;
    - "batched": `[g, r, a] × [g, a, b] -> [g, r, b]`.
    """

    kind: str
    rows: int
    a: int
    b: int
    groups: int
    dtypes: tuple[Any, Any, Any]  # of the operands and the result
    dot: Any  # a `units.Dot`
    buffers: int  # of each operand
    has_existing: bool = False
    elements: int = 1  # batch elements in the table of visits
    letters: str = "mkn"  # the product's letters for `rows`, `a` and `b`
    products: int = 1  # number of matrices that the rows are multiplied with
    results: int = 1  # number of stored arrays
    instructions: int = 0  # of the epilogue, per element of the result
    columns: str = ""  # as in `EpilogueSpec`
    scales: tuple[ScaleBlocks, ...] = ()

    @property
    def units(self) -> tuple[int, int, int]:
        """The unit of tiles along each extent: a tile is a multiple of it, or the whole extent."""
        # Without a ragged letter, an operand may have the rows along its lanes.
        first, second, result = self.dtypes
        packed = {"rows": (first, result), "groups": (first, second)}  # dtypes of the arrays that have rows
        return sublanes(*packed[self.kind]) if self.kind in packed else LANES, LANES, LANES


def vmem(problem: Problem, tile: tuple[int, int, int]) -> int:
    """Bytes of VMEM that a kernel needs: buffers, casts, the accumulator, the unrounded result, and scales."""
    (r, a, b), p = tile, problem
    blocks = ((r, a), (r, b), (a, b)) if p.kind == "groups" else ((r, a), (a, b), (r, b))
    total = (2 * p.results + 2 * p.has_existing) * block_bytes(*blocks[2], p.dtypes[2])
    total += 2 * p.products * block_bytes(*blocks[2], jnp.float32)
    streams = zip(blocks[:2], p.dtypes[:2], (p.dot.lhs, p.dot.rhs), (1, p.products), strict=True)
    for block, dtype, dot_dtype, count in streams:
        total += p.buffers * count * block_bytes(*block, dtype)
        total += block_bytes(*block, dot_dtype) * (jnp.dtype(dtype) != dot_dtype)
    return total + sum(scales.bytes(tile) for scales in p.scales)


SMEM = 3 << 18
"""Limit of the tables' bytes: three quarters of scalar memory, which is 1 MiB in every generation."""


def smem(problem: Problem, tile: tuple[int, int, int]) -> int:
    """Bytes of scalar memory for `schedule.Visits`."""
    p = problem
    if p.kind == "batched":
        return 0
    pieces = p.elements * (2 * p.groups + 1 if p.kind == "rows" else p.groups)
    return 4 * (2 * p.elements * (-(-p.rows // tile[0]) + p.groups) + 5 * pieces)


@cache
def choose(problem: Problem, on: Chip) -> tuple[int, int, int]:
    """The tile `(rows, a, b)` with the least time by the model `_seconds`."""
    return next(iter(ranked(problem, on)), problem.units)


def ranked(problem: Problem, on: Chip) -> list[tuple[int, int, int]]:
    """All tiles that fit, the fastest by the model first.

    Tiles with more than `SMEM` bytes of tables are left out, unless all have more.
    """
    fitting = [t for t in _candidates(problem) if fits(problem, t, on)]
    listable = [t for t in fitting if smem(problem, t) <= SMEM] or fitting
    return sorted(listable, key=lambda tile: _seconds(problem, tile, on))


def fits(problem: Problem, tile: tuple[int, int, int], on: Chip) -> bool:
    """Whether a tile fits into VMEM, and the compiler can unroll its products in a few seconds."""
    if not splits(problem, tile[2]):
        return False
    return problem.products * math.prod(tile) <= 2**30 * on.mxu // 128 and vmem(problem, tile) <= on.vmem


def splits(problem: Problem, columns: int) -> bool:
    """Whether blocks with this number of columns split one array into the parts of both matrices."""
    if problem.columns == "halves":  # the second half must begin at a block
        return problem.b % columns == 0
    return problem.columns == "" or columns % LANES == 0


def column_block(problem: Problem, columns: int, which: int, j: Any) -> Any:
    """Index of the block of a matrix's columns, the first or the second matrix, for the result's block `j`.

    If one array has both matrices, their interleaved columns are in two neighbouring blocks of it.
    """
    if problem.columns == "halves":
        return which * (problem.b // columns) + j
    if problem.columns == "interleaved":  # The last block may be past the end: its products aren't stored.
        return jnp.minimum(2 * j + which, -(-2 * problem.b // columns) - 1)
    return j


def fit(problem: Problem, tile: tuple[int, int, int], on: Chip) -> tuple[int, int, int]:
    """`tile`, cut to the extents, then halved along its longest side until it fits into VMEM."""
    unit = problem.units
    r, a, b = (min(t, extent) for t, extent in zip(tile, (problem.rows, problem.a, problem.b), strict=True))
    while vmem(problem, (r, a, b)) > on.vmem and (r > unit[0] or a > unit[1] or b > unit[2]):
        sides = [r / unit[0], a / unit[1], b / unit[2]]
        longest = sides.index(max(sides))
        r, a, b = (round_up(-(-t // 2), unit[i]) if i == longest else t for i, t in enumerate((r, a, b)))
    return r, a, b


def _candidates(p: Problem) -> Iterator[tuple[int, int, int]]:
    unit = p.units[0]
    largest = min(512, round_up(p.rows, unit))
    row_tiles = [t for t in (16, 32, 64, 128, 256, 512) if t % unit == 0 and t < largest] + [largest]
    for a in _parts(p.a):
        for b in _parts(p.b):
            for rows in row_tiles:
                yield rows, a, b


def _parts(extent: int) -> list[int]:
    """The whole extent, and equal parts of it in whole lanes."""
    parts = [round_up(-(-extent // count), LANES) for count in (*range(2, 9), 12, 16, 24, 32, 48, 64, 128, 256)]
    return list(dict.fromkeys([extent, *(t for t in [*parts, LANES] if t < extent)]))


_STORES = 6e12
"""Bytes per second that the vector unit stores: a register of 4 KiB in each cycle."""

_VECTOR = 3e12
"""Operations per second of the vector unit: about three registers of 1024 elements in each cycle."""

_STEP = {"rows": 0.12e-6, "batched": 0.12e-6, "groups": 0.35e-6}
"""Seconds of a step of the grid besides its product, measured with libtpu's simulator.

In this time, the matrix units are filled and drained, and in a wgrad the transpose starts.
"""


def _seconds(p: Problem, tile: tuple[int, int, int], on: Chip) -> float:
    """Seconds of a product with this tile, by the model.

    A step computes while the next blocks are copied. So it takes as long as its FLOPs plus a fixed overhead, or as its
    bytes, whichever is longer. Nothing overlaps with the first and the last copy.
    """
    rows, a, b = tile
    size = [jax.dtypes.itemsize_bits(dtype) / 8 for dtype in p.dtypes]
    tiles_a, tiles_b = -(-p.a // a), -(-p.b // b)
    per_group = p.rows if p.kind == "batched" else -(-p.rows // p.groups)
    # A group visits whole tiles, and often a tile that it shares. There, computed rows are rounded up to chunks.
    visits = max(per_group / rows, 1.0) if p.kind == "batched" else per_group / rows + 0.25
    computed = min(rows * math.ceil(per_group / rows), per_group + chunk(rows) / 2)
    # Loading weights into a matrix unit takes as long as multiplying `mxu` rows, so fewer rows save no time.
    busy = computed * max(1.0, on.mxu / min(rows, per_group))
    # Integers have the rate of bfloat16 here. With their own, higher rate, smaller tiles would seem as fast; in the
    # simulator, they are slower.
    rates = [on.rate(dtype) or on.flops for dtype in (p.dot.lhs, p.dot.rhs) if jnp.issubdtype(dtype, jnp.floating)]
    compute = 2 * p.products * busy * round_up(a, LANES) * round_up(b, LANES) / min(rates or [on.flops]) / visits
    # An activation's instructions run in parallel with the matrix units.
    compute = max(compute, computed * round_up(b, LANES) * p.instructions / _VECTOR / tiles_a / visits)
    compute += _STEP[p.kind]
    if p.kind == "groups":
        # Each visit reads rows of both operands. A group's last visit writes its matrix.
        each, once = rows * (a * size[0] + b * size[1]), a * b * size[2]
    else:
        # Each visit reads and writes rows. A group's matrix is read once; or at each visit, if it is read in parts.
        each, once = rows * (a * size[0] + p.results * b * size[2] / tiles_a), p.products * a * b * size[1]
        if tiles_a > 1:
            each, once = each + once, 0.0
            compute += p.products * rows * round_up(b, LANES) * 4 / _STORES  # each step stores the accumulators
    first = max(compute, (each + once) / on.bandwidth)
    others = max(visits - 1.0, 0.0) * max(compute, each / on.bandwidth)
    total = p.groups * tiles_a * tiles_b * (first + others)
    # Cores share the tiles of the grid's first dim.
    outer = tiles_a if p.kind == "groups" else p.groups if p.kind == "batched" else tiles_b
    return -(-outer // on.cores) / outer * total + (each + once) / on.bandwidth


def chunk(rows: int) -> int:
    """Rows that a kernel multiplies at a time in a partial tile."""
    return 128 if rows % 128 == 0 else rows
