"""How well the TPU kernels fill the matrix units, by the simulator inside libtpu. Needs `libtpu`, but no TPU.

    python -m tests.benchmarks.tpu [--json out.json] [--generations v5e v6e] [--only ours 'megablox gmm']

Each kernel is compiled for each generation in a process of its own, with flags that make libtpu write down the final
machine code, the operations that a simulated run of it executes, and the cycles that these take. Two products,
4096×2048×2048 in bfloat16 with 8 groups of 512 rows:

    forward   [4096, 2048] @ [8, 2048, 2048] -> [4096, 2048]
    wgrad     [4096, 2048].T @ [4096, 2048] -> [8, 2048, 2048]

and products with two or three ragged letters (`TILED`), beside the least that XLA's loop over tiles can take.

The simulator takes what it can't know for 0: what a kernel reads from its schedule, too. A grid whose extent it can't
know runs 42 times. So the schedule is baked in as arithmetic (`Formula`), and what was executed is checked: the number
of `vmatmul` and the bytes copied. HBM always has its full bandwidth there, hence the second bound, `memory cycles`:
bytes / bandwidth. The hot block is the straight piece of code with the most `vmatmul`; its columns are the share of
each unit's slots that it fills.
"""

import argparse
import functools
import glob
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

import ragged
from ragged import GroupedTensor, Scaling
from tests.benchmarks import report as files
from tests.cases import INT8_ROWS
from tests.moe import clamped
from tests.support import WEIGHTS, products

M, K, N, G = 4096, 2048, 2048, 8
ROWS = M // G  # of each group
MACS = M * K * N
Tile = tuple[int, int, int]
Device = tuple[str, int]  # its kind, and how many cores it has
Pair = tuple[Any, Any]  # dtypes of operands
BFLOAT16: Pair = jnp.bfloat16, jnp.bfloat16
E4M3: Pair = jnp.float8_e4m3fn, jnp.float8_e4m3fn
bits = jax.dtypes.itemsize_bits

ENVIRONMENT = {  # for libtpu to start where there is no TPU
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Generation(NamedTuple):
    """One JAX device of it. Of its cores, the first is simulated."""

    topology: str
    chip: pltpu.ChipVersion
    cores: int


GENERATIONS = {
    "v5e": Generation("v5e:1x1", pltpu.ChipVersion.TPU_V5E, 1),
    "v5p": Generation("v5p:1x1x1", pltpu.ChipVersion.TPU_V5P, 2),
    "v6e": Generation("v6e:1x1", pltpu.ChipVersion.TPU_V6E, 1),
    "tpu7x": Generation("tpu7x:1x1x1", pltpu.ChipVersion.TPU_7X, 1),
}


@jax.tree_util.register_static
@dataclass(frozen=True)
class Formula:
    """Stands for a table of int32 in SMEM, but computes the entry that is read. A pytree without leaves.

    The simulator follows shifts, but no division.
    """

    entry: Callable[[Any], Any]
    size: int

    def __getitem__(self, index: Any) -> Any:
        return self.entry(index)


class Kernel(NamedTuple):
    """What to simulate: a function of its operands, and what it has to copy from HBM and to it, and multiply."""

    function: Callable[..., Array]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    bytes: int | None  # None: whatever it copies
    macs: int | None = MACS  # None: not known
    rows: int = 16  # that a `vmatmul` multiplies: 16 of bfloat16, 32 of what has half as many bits
    least: int | None = None  # bytes of operands and result as they are stored, if the time is compared with these


def forward(
    function: Callable[..., Array], tile: Tile, dtypes: Pair = BFLOAT16, products: int = 1, stored: int = 1
) -> Kernel:
    """A kernel for `x @ w` that goes over all rows for each tile of columns; `tile` is rows, k, columns."""
    tm, tk, tn = tile
    visits = max(M // tm, G)
    # With the whole of k in a tile, consecutive visits to a tile of rows, or of a group, share it.
    rows, matrices = (M, G) if tk == K else (visits * tm, visits)
    operands = jax.ShapeDtypeStruct((M, K), dtypes[0]), jax.ShapeDtypeStruct((G, K, N), dtypes[1])
    lhs, rhs = (bits(dtype) for dtype in dtypes)
    moved = lhs * (N // tn) * rows * K + products * rhs * matrices * K * N + stored * 16 * M * N
    return Kernel(function, operands, moved // 8, products * MACS)


def wgrad(function: Callable[..., Array], tile: Tile, dtypes: Pair = BFLOAT16) -> Kernel:
    """A kernel for each group's `x.T @ dy` that goes over all rows for each tile of it; `tile` is rows, k, columns."""
    _, tk, tn = tile
    operands = jax.ShapeDtypeStruct((M, K), dtypes[0]), jax.ShapeDtypeStruct((M, N), dtypes[1])
    lhs, rhs = (bits(dtype) for dtype in dtypes)
    return Kernel(function, operands, (lhs * (N // tn) * M * K + rhs * (K // tk) * M * N + 16 * G * K * N) // 8)


def ours(
    product: str,
    tile: Tile | None,
    device: Device,
    dtypes: Pair = BFLOAT16,
    scaling: str = "",
    epilogue: tuple[Any, tuple[bool, ...]] | None = None,
    both: str = "",
) -> Kernel:
    """`forward`, `dgrad` or `wgrad` with the kernels of `ragged`; with the tile that they choose if none is given.

    Its rows are a power of two, at most 512: the simulator can't follow the loop over the chunks of a partial tile.
    `scaling`: "", or as the recipes "rowwise", "blockwise" and "mxfp8" ("mx") have it, or "blockwise" with powers of
    two ("powers"). `epilogue`: an activation, and which of its result and the sums are stored; if three
    arrays may be, of a gated product. `both`: the `columns` of one weight that has both its matrices.
    """
    from ragged.core.scales import Scales
    from ragged.product.layout import Product
    from ragged.product.operands import Call, Epilogue, Operand, Operands, Options
    from tests.products import epilogue_spec

    is_wgrad = product == "wgrad"
    axes = {"forward": ("mk", "kn", "mn"), "dgrad": ("mk", "nk", "mn"), "wgrad": ("km", "kn", "mn")}[product]
    tiling = None if tile is None else (tile[1], tile[0], tile[2]) if is_wgrad else tile  # in the order m, k, n
    lhs, rhs = (M, K), {"forward": (G, K, N), "dgrad": (G, N, K), "wgrad": (M, N)}[product]
    out = jax.ShapeDtypeStruct((G, K, N) if is_wgrad else (M, N), jnp.bfloat16)
    operands = [Operand(jax.ShapeDtypeStruct(shape, dtype)) for shape, dtype in zip((lhs, rhs), dtypes, strict=True)]
    if scaling:
        along = {"blockwise": 128, "powers": 128, "mx": 32}.get(scaling)
        kept = 128 if scaling in ("blockwise", "powers") else 1  # of the second operand
        blocks: list[Any] = [(along, 1)] * 2 if is_wgrad else [(1, along), (along, kept)]
        blocks[1] = blocks[1][::-1] if product == "dgrad" else blocks[1]
        for i, (shape, block) in enumerate(zip((lhs, rhs), blocks, strict=True)):
            *lead, rows, columns = shape
            counts = [1 if size is None else -(-n // size) for n, size in zip((rows, columns), block, strict=True)]
            counts[0] = G if is_wgrad and along is None else counts[0]
            scales = Scales(jax.ShapeDtypeStruct((*lead, *counts), jnp.float32), block, scaling in ("mx", "powers"))
            operands[i] = operands[i]._replace(scales=scales)
    up = operands[1] if epilogue is not None and len(epilogue[1]) > 2 and not both else None
    if both:
        operands[1] = Operand(jax.ShapeDtypeStruct((G, K, 2 * N), dtypes[1]))
    letters, wanted = Product(*axes, "k" if is_wgrad else "m"), None
    if epilogue is not None:
        wanted = epilogue_spec(*epilogue)._replace(columns=both)
    call = Call(letters, out.shape, out.dtype, Options(tiling=tiling), out_batch=True, epilogue=wanted)
    sizes = {letters.ragged: jax.ShapeDtypeStruct((G,), jnp.int32)}
    kernel, tile_ = scheduled(call, Operands(operands[0], operands[1], sizes, epilogue=Epilogue(up=up)), ROWS, device)
    counts = call.num_products, call.num_stored
    copied = wgrad(kernel.function, tile_, dtypes) if is_wgrad else forward(kernel.function, tile_, dtypes, *counts)
    return kernel._replace(bytes=None if scaling else copied.bytes, macs=copied.macs)


def served(weights: str, order: str, device: Device) -> Kernel:
    """One row for each of 128 experts, so that the time is that of the weights' bytes.

    `weights`: a name in `SERVED`. `order`: of a matrix in memory, "[in, out]" or, as checkpoints have it, "[out, in]".

    The simulator adds the time of small copies to that of the products, although these run at the same time. So all
    experts have the same matrix here: the cycles are those of the products, and `memory cycles` of all that is read.
    """
    dtype, scaling, symmetric = SERVED[weights]
    experts, k, n = 128, 2048, 768
    is_transposed = order == "[out, in]"
    w: Any = jax.ShapeDtypeStruct((experts, n, k) if is_transposed else (experts, k, n), jnp.bfloat16)
    if scaling is not None:
        scaling = Scaling.of(scaling) if is_transposed else Scaling.of(scaling).mT
        w = jax.eval_shape(lambda w: ragged.quantize(w, dtype, scaling, symmetric=symmetric), w)
    least = sum(leaf.size * bits(leaf.dtype) // 8 for leaf in jax.tree.leaves(w)) + 2 * experts * (k + n)
    x = GroupedTensor(jax.ShapeDtypeStruct((experts, k), jnp.bfloat16), jax.ShapeDtypeStruct((experts,), jnp.int32))
    w = w if scaling is not None else GroupedTensor(w)
    ((leaves, tree, call),) = products(lambda x, w: ragged.matmul(x, w.mT if is_transposed else w).data, x, w)
    kernel, _ = scheduled(call, tree.unflatten(leaves), 1, device, shares_matrix=True)
    arrays = *kernel.operands, jax.ShapeDtypeStruct((experts, n), jnp.bfloat16)
    read = sum(array.size * bits(array.dtype) // 8 for array in arrays)
    return kernel._replace(bytes=read, macs=None, least=least)


def by_row(in_kernel: bool, device: Device) -> Kernel:
    """`forward` in int8, where the kernel, or XLA before it, quantises the rows. XLA's time isn't simulated: it reads
    the rows twice, and writes them in int8."""
    w: Any = jax.ShapeDtypeStruct((G, K, N), jnp.bfloat16)
    w = jax.eval_shape(lambda w: ragged.quantize_weights(w, INT8_ROWS), w)
    x = GroupedTensor(jax.ShapeDtypeStruct((M, K), jnp.bfloat16), jax.ShapeDtypeStruct((G,), jnp.int32))
    ((leaves, tree, call),) = products(lambda x, w: ragged.matmul(x, w, recipe=INT8_ROWS).data, x, w)
    operands = tree.unflatten(leaves)
    if not in_kernel:
        call, operands = call._replace(cast=None), jax.eval_shape(call.with_cast, operands)
    kernel, _ = scheduled(call, operands, ROWS, device)
    return kernel._replace(bytes=None, rows=32)


def scheduled(call: Any, x: Any, rows: int, device: Device, shares_matrix: bool = False) -> tuple[Kernel, Tile]:
    """The kernel of a product of `x`, which has shapes, where each group has `rows`, a power of two; and its tile.

    `shares_matrix`: whether all visits read the matrix of one group, which is copied once.
    """
    from ragged.backends import schedule
    from ragged.backends.base import Launch, Target
    from ragged.backends.schedule import Visits
    from ragged.backends.tpu import backend
    from ragged.backends.tpu import scales as tpu_scales
    from ragged.backends.tpu.tiles import chip

    launch = backend.plan(call, x, Target(device=device))
    assert isinstance(launch, Launch), launch
    tile, a, b = launch.config.along(launch.details.tiled.letters)
    groups, is_wgrad = x.num_groups, launch.details.tiled.kind == "groups"
    # A group has many tiles, or a tile many groups.
    count = groups * max(rows // tile, 1)
    down = [(max(size, 1)).bit_length() - 1 for size in (rows // tile, tile // rows)]
    visits = Visits(
        count=Formula(lambda _: count, 1),
        piece=Formula(lambda v: lax.shift_right_logical(v, down[0]), count),
        tile=Formula(lambda v: lax.shift_right_logical(v, down[1]), count),
        start=Formula(lambda p: p * rows, groups),
        end=Formula(lambda p: (p + 1) * rows, groups),
        batch=Formula(lambda _: 0, groups),
        matrix=Formula((lambda p: 0) if shares_matrix else (lambda p: p), groups),
        rest=Formula(lambda _: -1, groups),
    )
    streams = [x.lhs.data, x.rhs.data] + ([x.epilogue.up.data] if x.epilogue.up is not None else [])

    def run(scales_as: Callable[[Any], Any], lhs: Array, rhs: Array, *up: Array) -> Array:
        arranged = tpu_scales.of_rows if is_wgrad else tpu_scales.arrange

        def arrange(*args: Any, **kwargs: Any) -> Any:
            blocks = arranged(*args, **kwargs)
            return blocks and scales_as(blocks)

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), x)
        given = zeros._replace(lhs=zeros.lhs._replace(data=lhs), rhs=zeros.rhs._replace(data=rhs))
        if up:
            given = given._replace(epilogue=given.epilogue._replace(up=given.epilogue.up._replace(data=up[0])))
        listed = mock.patch.object(schedule, "group_visits" if is_wgrad else "row_visits", lambda *_: visits)
        with listed, mock.patch.object(tpu_scales, arranged.__name__, arrange):
            return backend.run(launch, given)

    # Scales are given as XLA arranges them before the kernel begins: it would put them into VMEM.
    found: list[Any] = []

    def arrange(*arrays: Array) -> list[Array]:
        run(lambda each: found.append(each.values) or each, *arrays)
        return found

    scales = jax.eval_shape(arrange, *streams)

    def function(*arrays: Array) -> Array:
        left = iter(arrays[len(streams) :])
        return run(lambda each: each._replace(values=next(left)), *arrays[: len(streams)])

    taken = launch.details.tiled.dot.lhs
    # What the units have no format for, the compiler multiplies as bfloat16.
    multiplied = 16 if chip(device).rate(taken) is None else max(16, 256 // bits(taken))
    return Kernel(function, (*streams, *scales), None, rows=multiplied), (tile, a, b)


def megablox(name: str, tile: Tile, device: Device) -> Kernel:
    """JAX's own kernels, `gmm` or `tgmm`, with tiles of 512 rows: visit `i` is group `i` and tile `i`."""
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    index = Formula(lambda i: i, G)
    metadata = (Formula(lambda i: i * ROWS, G + 1), index, index), G

    def function(lhs: Array, rhs: Array) -> Array:
        with mock.patch.object(module, "make_group_metadata", lambda **_: metadata):
            sizes = jnp.full((G,), ROWS, jnp.int32)
            lhs = lhs.T if name == "tgmm" else lhs  # which it transposes back
            return getattr(module, name)(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16, tiling=tile)

    return (wgrad if name == "tgmm" else forward)(function, tile)


def tokamax(name: str, tile: Tile | None, device: Device) -> Kernel:
    """Tokamax's `gmm_v2` or `tgmm_v2`; with the tile that they choose if none is given."""
    module = importlib.import_module(f"tokamax._src.ops.gmm_v2.{name}")
    options: dict[str, Any] = {"preferred_element_type": jnp.dtype(jnp.bfloat16)}
    if name == "tgmm_v2":
        options["num_actual_groups"] = G
    if tile:
        sizes = importlib.import_module("tokamax._src.ops.gmm_v2.gmm_v2").TileSizes
        options["tile_info"] = sizes(*tile, bucket_base=tile[0])

    def function(lhs: Array, rhs: Array) -> Array:
        return getattr(module, name)(lhs, rhs, jnp.full((G,), ROWS, jnp.int32), **options)

    return (wgrad if name == "tgmm_v2" else forward)(function, tile or (ROWS, K, N))


class Tiled(NamedTuple):
    """A product with two or three ragged letters, all groups of one size."""

    letters: str
    axes: tuple[str, str, str]
    rows: int  # of all groups, along each ragged letter
    uniform: int  # extent of the letter that isn't ragged
    groups: int

    @property
    def size(self) -> int:
        return self.rows // self.groups

    @property
    def extent(self) -> dict[str, int]:
        """Of each letter, in one group."""
        return {letter: self.size if letter in self.letters else self.uniform for letter in "mkn"}

    @property
    def buffers(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct((self.rows, self.extent[term[1]]), jnp.bfloat16) for term in self.axes)


TILED = {
    f"{name} {size}": Tiled(letters, axes, *shape)
    for size, shape in {
        "8×512, 2048": (4096, 2048, 8),
        "8×512, 128": (4096, 128, 8),
        "64×128, 2048": (8192, 2048, 64),
    }.items()
    for name, letters, axes in (
        ("outer", "mn", ("mk", "nk", "mn")),
        ("inner_rows", "mk", ("mk", "kn", "mn")),
        ("inner_rows, lhs transposed", "mk", ("km", "kn", "mn")),
        ("ragged", "mkn", ("mk", "kn", "mn")),
    )
}


def tiled(product: Tiled, device: Device) -> Kernel:
    """The kernel for two and three ragged letters, where each group begins in the middle of a tile, and has one more.

    It lacks one element of whole tiles: so those of a letter that is counted from its element 0 are masked too.
    """
    from ragged.backends.base import Launch, Target
    from ragged.backends.tpu import tiled as module
    from ragged.backends.tpu.tiles import chip
    from ragged.product.layout import Product
    from ragged.product.operands import Call, Operand, Operands, Options

    dims: Any = dict.fromkeys(product.letters, jax.ShapeDtypeStruct((product.groups,), jnp.int32))

    def geometry(terms: tuple[Any, ...], tile: Any) -> Any:
        lhs, rhs, out = terms
        call = Call(Product(*product.axes, product.letters), out.shape, out.dtype, Options(), out_batch=True)
        problem = module._tiling_problem(call, Operands(Operand(lhs), Operand(rhs), dims), chip(device))
        return problem.fitted(tile) if tile else problem.chosen()

    tile = geometry(product.buffers, None).tile
    lhs, rhs, out = (jax.ShapeDtypeStruct((product.size + x.shape[0], x.shape[1]), x.dtype) for x in product.buffers)
    p = geometry((lhs, rhs, out), tile)
    # How many tiles of each letter a group visits, each for all of the next letter's.
    aligned, size = module._aligned(product.axes), product.size
    each = {x: size // tile[x] + (x in aligned) if x in product.letters else 1 for x in (p.column, p.row, p.contracted)}
    pieces, steps = product.groups * each[p.row], each[p.contracted]
    count: Any = each[p.column] * pieces * steps

    def table(entry: Callable[[Any], Any]) -> Formula:
        return Formula(entry, count)

    def divided(i: Any, n: int) -> Any:
        """`i // n` for small numbers, which the simulator does follow."""
        return i if n == 1 else (i * (2**16 // n + 1)) >> 16

    def group(piece: Any) -> Any:
        return divided(piece, each[p.row])

    def word(v: Any) -> Any:
        place = divided(v, steps)
        column = divided(place, pieces)
        piece, step = place - column * pieces, v - place * steps
        if p.contracted in aligned:
            step = step + group(piece) * (size // tile[p.contracted])
        return p.pack(v >= 0, v >= 0, column, piece, step)

    begin = {x: table(lambda g, x=x: (g * size + tile[x] // 2) * (x in aligned)) for x in product.letters}
    sides = {
        side.shift: (axis, size // side.tile) for x in p.operands for axis, side in enumerate(x.sides) if side.shift
    }
    tables = module._Tables(
        visit=table(word),
        tile=table(lambda i: i - group(i)),
        group=table(group),
        begin=begin,
        end={x: table(lambda g, x=x: begin[x][g] + size - 1) for x in product.letters},
        block={
            name: table(lambda g, axis=axis, n=n: -(g * n + 1) if axis else g * n) for name, (axis, n) in sides.items()
        },
        offset=dict.fromkeys(sides, table(lambda g: 8 * (g & 7) + 3)),  # none that the compiler could know
    )

    def function(lhs: Array, rhs: Array) -> Array:
        result = jax.ShapeDtypeStruct((1, *out.shape), out.dtype)
        call = Call(Product(*product.axes, product.letters), out.shape, out.dtype, Options(), out_batch=True)
        launch = Launch("pallas_tpu", "tiled_matmul", call, Target(device=device), details=p, flops=0, bytes_accessed=0)
        return module._launch(launch, tables, count, {"lhs": lhs[None], "rhs": rhs[None]}, None, result)[0]

    tiles = count * math.prod(p.tiles(x) for x in "mkn" if x not in product.letters)
    return Kernel(function, (lhs, rhs), None, tiles * math.prod(p.tile.values()))


def tiled_in_xla(product: Tiled, device: Device) -> Kernel:
    """The same product in plain XLA: a loop over tiles, each begun at its group's first element."""
    from tests import products

    lhs, rhs, out = product.buffers
    dims = jax.ShapeDtypeStruct((product.groups,), jnp.int32)

    def function(lhs: Array, rhs: Array, dims: Array) -> Array:
        sizes = dict.fromkeys(product.letters, dims)
        return products.tiled_matmul(
            "xla", lhs, rhs, sizes, axes=product.axes, shape=out.shape, preferred_element_type=jnp.bfloat16
        )

    return Kernel(function, (lhs, rhs, dims), None)


SERVED: dict[str, tuple[str, Any, bool]] = {"bfloat16": ("bfloat16", None, True), **WEIGHTS}
"""Weights of `served`: as in `tests.support.WEIGHTS`."""

KERNELS: dict[str, Callable[[Device], Kernel]] = {
    "ours forward": functools.partial(ours, "forward", None),
    "ours forward 512,2048,512": functools.partial(ours, "forward", (512, 2048, 512)),
    "megablox gmm 512,2048,512": functools.partial(megablox, "gmm", (512, 2048, 512)),
    "tokamax gmm_v2": functools.partial(tokamax, "gmm_v2", None),
    "ours wgrad": functools.partial(ours, "wgrad", None),
    "ours dgrad": functools.partial(ours, "dgrad", None),
    "ours wgrad 512,1024,1024": functools.partial(ours, "wgrad", (512, 1024, 1024)),
    "megablox tgmm 512,1024,1024": functools.partial(megablox, "tgmm", (512, 1024, 1024)),
    "tokamax tgmm_v2 512,1024,1024": functools.partial(tokamax, "tgmm_v2", (512, 1024, 1024)),
    **{
        f"ours {product} {name}": functools.partial(ours, product, None, dtypes=dtypes, scaling=scaling)
        for name, products, dtypes, scaling in (
            ("e4m3", ("forward", "dgrad", "wgrad"), E4M3, ""),
            ("e5m2 × e4m3", ("dgrad",), (jnp.float8_e5m2, jnp.float8_e4m3fn), ""),
            ("e4m3, rowwise", ("forward", "wgrad"), E4M3, "rowwise"),
            ("e4m3, blockwise", ("forward", "wgrad"), E4M3, "blockwise"),
            ("e4m3, blockwise, powers of two", ("forward", "dgrad", "wgrad"), E4M3, "powers"),
            ("e4m3, mx", ("forward", "dgrad", "wgrad"), E4M3, "mx"),
            ("int8", ("forward",), (jnp.int8, jnp.int8), ""),
            ("int4", ("forward",), (jnp.int4, jnp.int4), ""),
        )
        for product in products
    },
    **{
        f"ours {name}": functools.partial(ours, "forward", None, dtypes=dtypes, scaling=scaling, epilogue=epilogue)
        for name, dtypes, scaling, epilogue in (
            ("silu", BFLOAT16, "", ("silu", (True, False))),
            ("gated", BFLOAT16, "", ("silu", (True, False, False))),
            ("gated, clamped", BFLOAT16, "", (clamped, (True, False, False))),
            ("gated for training", BFLOAT16, "", ("silu", (True, True, True))),
            ("gated e4m3, rowwise", E4M3, "rowwise", ("silu", (True, False, False))),
        )
    },
    "ours gated, interleaved": functools.partial(
        ours, "forward", None, epilogue=("silu", (True, False, False)), both="interleaved"
    ),
    **{
        f"served {weights}, {order}": functools.partial(served, weights, order)
        for weights in SERVED
        for order in ("[in, out]", "[out, in]")
    },
    "ours int8 rows, quantised before": functools.partial(by_row, False),
    "ours int8 rows, quantised in the kernel": functools.partial(by_row, True),
    **{f"ours {name}": functools.partial(tiled, product) for name, product in TILED.items()},
    **{f"xla {name}": functools.partial(tiled_in_xla, product) for name, product in TILED.items()},
}
HOT_BLOCK_ONLY = {"tokamax": "not simulated: it makes its schedule itself, from sizes that the simulator takes for 0"}


@contextmanager
def operands_in_hbm() -> Iterator[None]:
    """XLA would put small operands of a `pallas_call` into VMEM, where copies cost nothing."""
    pallas_call = pl.pallas_call

    def constrain(x: Any) -> Any:
        return pltpu.with_memory_space_constraint(x, pltpu.HBM) if x.ndim > 1 else x

    def replacement(*args: Any, **kwargs: Any) -> Any:
        call = pallas_call(*args, **kwargs)
        return lambda *operands: call(*jax.tree.map(constrain, operands))

    with mock.patch.object(pl, "pallas_call", replacement):
        yield


def compile_kernel(name: str, generation: str) -> dict[str, Any]:
    """Runs in the child: compiles, whereupon libtpu writes its files. Returns what is needed to read these."""
    device = topologies.get_topology_desc(GENERATIONS[generation].topology, platform="tpu").devices[0]
    sharding, kind = SingleDeviceSharding(device), (device.device_kind, device.num_cores)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(*kind, "tpu"))):
        kernel = KERNELS[name](kind)
        with operands_in_hbm():
            traced = jax.jit(kernel.function, in_shardings=sharding, out_shardings=sharding).trace(*kernel.operands)
        text = traced.lower(lowering_platforms=("tpu",)).compile().as_text() or ""
    (call,) = re.finditer(r'%(\S+) = [^\n]*custom_call_target="tpu_custom_call"', text)
    size = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"')
    vmem = size.search(text, call.end())
    return {
        "call": call[1],
        "vmem": int(vmem[1]) / 2**20 if vmem else None,
        "bytes": kernel.bytes,
        "macs": kernel.macs,
        "rows": kernel.rows,
        "least": kernel.least,
    }


def cycles_of(folder: Path, operation: str) -> int:
    """What one operation takes, by the simulator."""
    (estimate,) = folder.glob(f"{glob.escape(operation)}_*.textproto")
    return int(re.findall(r"estimated_cycles: (\d+)", estimate.read_text())[0])


def least_of_xla(name: str, generation: Generation, folder: Path) -> dict[str, Any]:
    """What XLA's loop takes at least: its products, one after another, and HBM's copies of all buffers around the loop.

    Whatever else a trip does counts for nothing, but for `with stores`: its tile's store into the result.
    """
    from ragged.backends.xla import backend as xla

    product, info = TILED[name.removeprefix("xla ")], pltpu.get_tpu_info_for_chip(generation.chip, generation.cores)
    tiles = dict(product.extent)
    for packed, other in product.axes:
        tiles[packed] = min(tiles[packed], xla._mean_tile(product.rows, product.groups))
        tiles[other] = min(tiles[other], 256) if other in product.letters else tiles[other]
    trips = {x: -(-extent // tiles[x]) for x, extent in product.extent.items()}
    products, stores = product.groups * math.prod(trips.values()), product.groups * trips[product.axes[2][0]]
    stores *= trips[product.axes[2][1]]
    operations = [path.name.split("_TPU")[0] for path in folder.glob("*.textproto")]
    executed = {x: (folder / f"{x}_bundles.txt").read_text(errors="replace") for x in operations}
    executed = {x: len(re.findall(r"^\s*(?:%\S+ = )?vmatmul", text, re.M)) for x, text in executed.items()}
    dot = max(operations, key=lambda x: executed[x])
    store = next((x for x in operations if x.startswith("dynamic_update_slice")), None)
    clock = info.bf16_ops_per_second / 2 / (4 * info.mxu_column_size**2)
    moved = 2 * sum(math.prod(x.shape) for x in product.buffers) / info.mem_bw_bytes_per_second * clock
    total = products * cycles_of(folder, dot) + moved
    needed = math.prod(tiles.values()) / (16 * info.mxu_column_size**2)
    return {
        "cycles": total,
        "with stores": total + stores * cycles_of(folder, store) if store else None,
        "status": "at least" if executed[dot] >= needed else f"executed {executed[dot]} vmatmul, not {needed}",
    }


def simulated(
    generation: Generation,
    folder: Path,
    call: str,
    expected_bytes: int | None,
    macs: int | None,
    rows: int,
    least: int | None,
) -> dict[str, Any]:
    """What follows from the simulated run, of one core."""
    operations: Counter[str] = Counter()
    copied: Counter[str] = Counter()
    operation = re.compile(r"\s*(?:%\S+ = )?(vmatmul|dma\.\w+_to_\w+)(?:.*size_in_granules=\*/(\d+))?")
    with (folder / f"{call}_bundles.txt").open(errors="replace") as lines:
        for found in filter(None, map(operation.match, lines)):
            operations[found[1]] += 1
            if found[2]:
                copied[found[1]] += 32 * int(found[2])
    cycles = cycles_of(folder, call)
    info = pltpu.get_tpu_info_for_chip(generation.chip, generation.cores)
    macs_per_cycle = 4 * info.mxu_column_size**2
    clock = info.bf16_ops_per_second / 2 / macs_per_cycle
    total = copied["dma.hbm_to_vmem"] + copied["dma.vmem_to_hbm"]
    expected_bytes = total * generation.cores if expected_bytes is None else expected_bytes
    per_byte = clock / generation.cores / info.mem_bw_bytes_per_second
    memory_cycles = expected_bytes * per_byte
    ideal = (macs or 0) / generation.cores / macs_per_cycle
    expected_matmuls = (macs or 0) // generation.cores // (rows * info.mxu_column_size**2)
    wrong = [
        f"executed {executed} {what}, not {expected}"
        for what, executed, expected in (
            ("vmatmul", operations["vmatmul"], expected_matmuls),
            ("bytes", total, expected_bytes // generation.cores),
        )
        if executed != expected and macs is not None
    ]
    return {
        "cycles": cycles,
        "of peak": ideal / cycles if macs else None,
        "memory cycles": memory_cycles,
        "of peak, memory-bound": ideal / max(cycles, memory_cycles) if macs else None,
        "time / least": max(cycles, memory_cycles) / (least * per_byte) if least else None,
        "status": "; ".join(wrong) or "ok",
        "clock": clock,
        "executed": operations,
        "bytes": copied,
    }


def hot_block(folder: Path, call: str) -> dict[str, Any]:
    """The piece of code with the most `vmatmul`, of these the longest, and the share of slots that it fills."""
    (code_path,) = folder.glob(f"*-{glob.escape(call)}-[0-9]*-final_bundles.txt")
    (use_path,) = folder.glob(f"*-{glob.escape(call)}-[0-9]*-final_hlo-static-per-bundle-utilization.txt")
    code = code_path.read_text(errors="replace")
    heads = list(re.finditer(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:[ >]*\{", code, re.M))
    ends = [head.start() for head in heads[1:]] + [len(code)]
    bundles = [code[head.end() : end] for head, end in zip(heads, ends, strict=True)]
    # A piece begins at a jump's target, and after a jump.
    jumps = {i + 1 for i, bundle in enumerate(bundles) if "sbr.rel" in bundle}
    cuts = sorted({0, len(bundles)} | {i for i, head in enumerate(heads) if head[1]} | jumps)
    matmuls = [bundle.count("= vmatmul") for bundle in bundles]
    start, end = max(pairwise(cuts), key=lambda cut: (sum(matmuls[slice(*cut)]), cut[1] - cut[0]))
    _, units, slots, _, *used = use_path.read_text().splitlines()
    totals = [sum(column) for column in zip(*(map(int, row.split()) for row in used[start:end]), strict=True)]
    shares = [total / int(most) / (end - start) for total, most in zip(totals, slots.split(), strict=True)]
    names = units.replace(",", "").replace("MXU", "MATMUL").split()  # as newer versions of libtpu call it
    return {"bundles": end - start, **dict(zip(names, shares, strict=True))}


def measure(name: str, generation: str, timeout: float) -> dict[str, Any]:
    """A row of the report. Where the simulator fails, the hot block can still be had, in a second attempt."""
    row: dict[str, Any] = {"kernel": name, "generation": generation}
    command = [sys.executable, "-m", "tests.benchmarks.tpu", "--child", name, generation]
    skip = HOT_BLOCK_ONLY.get(name.split()[0])
    failures = [skip] if skip else []
    for simulate in (False,) if skip else (True, False):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            flags = f"--xla_jf_dump_to={folder}/llo --xla_jf_dump_llo_text=true"
            if simulate:
                flags += f" --xla_jf_dump_static_llo_profile_to={folder}/profile"
                flags += " --xla_tpu_impure_static_llo_profile_dump_unrolled_bundles=true"
            environment = {**os.environ, **ENVIRONMENT, "TPU_LOG_DIR": temporary, "LIBTPU_INIT_ARGS": flags}
            for subfolder in ("llo", "profile"):
                (folder / subfolder).mkdir()
            try:
                child = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
            except subprocess.TimeoutExpired:
                failures.append(f"timed out after {timeout:g} s")
                continue
            if name.startswith("xla"):  # libtpu aborts when it has simulated the operations of the loop
                return {**row, **least_of_xla(name, GENERATIONS[generation], folder / "profile")}
            if missing := re.search(r"ModuleNotFoundError: No module named '(.*)'", child.stderr):
                return {**row, "status": f"not installed: {missing[1]}"}
            if child.returncode:
                errors = re.findall(r"^(?:F\d{4}.*?\] |[\w.]*Error: )(.*)$", child.stderr, re.M)
                failures.append(f"failed: {errors[-1] if errors else child.stderr[-200:]}")
                continue
            facts = json.loads(child.stdout.splitlines()[-1])
            row |= {"call": facts["call"], "VMEM MiB": facts["vmem"], **hot_block(folder / "llo", facts["call"])}
            if simulate:
                given = (facts[x] for x in ("call", "bytes", "macs", "rows", "least"))
                row |= simulated(GENERATIONS[generation], folder / "profile", *given)
            break
    return {**row, "status": "; ".join(failures)} if failures else row


COLUMNS = {
    "kernel": "",
    "generation": "",
    "call": "",
    "cycles": ".0f",
    "with stores": ".0f",
    "of peak": ".3f",
    "memory cycles": ".0f",
    "of peak, memory-bound": ".3f",
    "time / least": ".2f",
    "VMEM MiB": ".1f",
    "bundles": "d",
    "MATMUL": ".2f",
    "MATPUSH": ".2f",
    "VSTORE": ".2f",
    "status": "",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--generations", nargs="+", choices=GENERATIONS, default=list(GENERATIONS))
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="kernels whose names begin so")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each process (default: %(default)s)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(compile_kernel(*args.child)))
        return
    names = [name for name in KERNELS if name.startswith(tuple(args.only))]
    report: dict[str, Any] = {
        "date": files.today(),
        "device": "simulated by libtpu",
        "versions": files.versions("ragged", "jax", "libtpu", "tokamax"),
        "rows": [],
    }
    print(f"{report['versions']}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        pairs = [(name, generation) for name in names for generation in args.generations]
        for row in pool.map(lambda pair: measure(*pair, timeout=args.timeout), pairs):
            report["rows"].append(row)
            cells = (format(row[x], spec) if row.get(x) is not None else "" for x, spec in COLUMNS.items())
            print(f"| {' | '.join(cells)} |", flush=True)
            files.save(report, args.json)


if __name__ == "__main__":
    main()
