"""`ragged.matmul` and its derivatives equal a loop over groups, for any sizes, whatever lies outside of the groups.

Each case is a program, which is compiled once and runs on many draws of sizes and contents.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.pallas import tpu as pltpu

import ragged
from ragged import GroupedTensor, Scaling, tuning
from ragged.tuning import XlaConfig
from tests import gpu
from tests.cases import LETTERS, named
from tests.contract.draws import draws
from tests.contract.launches import launches
from tests.contract.programs import BITS, FLOATS, FP8, FP8_WIDE, INTEGERS, Case, Program, quantised

LARGE: dict[str, Any] = {"capacity": 150, "width": 140, "m": 37, "k": 150, "n": 140}  # several tiles of each kernel
TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
SUBSETS = [" ".join(some) for n in (1, 2, 3) for some in itertools.combinations(("lhs", "sizes", "rhs"), n)]


MX, NVFP4 = Scaling((32, 1), "float8_e8m0fnu"), Scaling((16, 1), "float8_e4m3fn")


def four_bits(
    layout: str, dtype: str, scaling: Scaling, of: str = "float4_e2m1fn", *zeros: str, **options: Any
) -> Program:
    """Matrices in 4 bits, or 8, whose blocks are along the dim that the product contracts; a derivative doesn't."""
    name, turned = ("lhs", scaling.mT) if layout == "forward_left" else ("rhs", scaling)
    given: dict[str, Any] = {"m": 40, "k": 72, "n": 40, f"{name}_cast": (of, turned, *zeros)}
    return Program(layout, dtype, out_dtype="float32", **given | options)


# Few rows: a TPU's kernel scales products of small blocks. Its matrix units multiply 8-bit floats as they are.
SERVED: dict[str, Any] = {"backend": "pallas_tpu", "packed_last": "rhs", "k": 168}
BY_TMA: dict[str, Any] = {"backend": "triton_gpu", "chip": "NVIDIA H200", "tiles": (32, 32, 32)}
BY_TMA |= {"m": 48, "k": 64, "n": 48, "groups": 3, "capacity": 96}
IN_STEPS: dict[str, Any] = BY_TMA | {"width": 48, "groups": 5}
FOUR_BITS: dict[str, Any] = {"lhs_cast": ("float4_e2m1fn", "nvfp4"), "k": 40, "out_dtype": "float32"}


def by_default() -> Iterator[Case]:
    """A program for each way to compute a product. `more` has the other layouts, dtypes, scales and options."""
    for layout in LETTERS:
        yield 97, Program(layout, "bfloat16")
    # XLA multiplies small groups, large ones, and what fixed tiles cover, in different ways.
    yield 97, Program("forward", capacity=150)
    yield 97, Program("wgrad", "bfloat16", tiles=(16, 16, 16))
    yield 60, Program("forward", "bfloat16", backend="pallas_tpu")
    yield 9, Program("forward", "bfloat16", backend="triton_gpu")
    yield 3, Program("wgrad", FP8, FP8_WIDE, "float32", backend="triton_gpu")  # on a GPU that can't convert them

    for layout in ("batched", "forward"):
        yield 20, Program(layout, order=2)
    yield 12, Program("forward", "bfloat16", mapped="lhs sizes rhs")
    for layout in ("forward", "wgrad"):
        yield 60, Program(layout, held=3, existing=True, capacity=70)
    yield 60, Program("forward", shared="rhs", size_dtype="uint32", k=5)  # as many rows as there are groups
    yield from small()
    yield 20, Program("batched", "bfloat16", shared="lhs", existing=True, mapped="rhs")

    yield from quantised("xla", 20, ["forward"])
    yield from quantised("pallas_tpu", 20, ["forward", "wgrad", "outer"], existing=True)
    yield from quantised("triton_gpu", 3, ["wgrad"])
    yield 20, four_bits("forward_left", "float32", NVFP4, backend="pallas_tpu")
    yield 3, four_bits("forward", "bfloat16", Scaling((32, 1)), "int4", backend="triton_gpu")
    yield 20, Program("forward", rhs_cast=("float4_e2m1fn", NVFP4), **FOUR_BITS)

    yield 20, Program("forward", "bfloat16", rhs_cast=("uint4", (4, 1), "zeros"))
    yield 9, Program("batched", shared="rhs", lhs_cast=("int8", (3, 4), "zeros"))
    yield 3, four_bits("forward", "bfloat16", Scaling((24, 1)), "uint4", "zeros", backend="triton_gpu")

    yield 3, Program("forward", "bfloat16", **BY_TMA)
    yield 3, Program("wgrad", FP8, "", "float32", **BY_TMA)
    # The loop over the steps of all tiles, local groups, old values.
    yield 4, Program("wgrad", "bfloat16", held=3, existing=True, **IN_STEPS)
    yield 4, Program("forward_left", "bfloat16", held=3, **IN_STEPS)
    # Parts of one step; the third has 8 numbers, and the last two none.
    its: dict[str, Any] = {"backend": "triton_gpu", "tiles": (32, 32, 32), "k": 72, "splits": 5}
    yield 4, Program("forward", "bfloat16", held=3, existing=True, **its)

    for layout, dtypes in zip(itertools.cycle(["forward", "outer", "wgrad"]), [*FLOATS, *INTEGERS][::4], strict=False):
        yield 3, Program(layout, *dtypes)
    yield 3, Program("wgrad", *INTEGERS[0], capacity=4000, groups=2, existing=True)  # sums past 2**24
    yield 3, Program("wgrad", "int8", "", "float32", existing=True)
    yield 3, Program("forward", context="eager")
    yield 5, Program("forward", k=0)
    yield 5, Program("wgrad", groups=0)


def small() -> Iterator[Case]:
    """Small products, whose rows XLA multiplies by the matrices of all groups."""
    for layout in ("forward", "forward_left", "wgrad"):
        yield 97, Program(layout, "bfloat16", in_loops=False, held=7 if layout == "wgrad" else 3, existing=True)
        yield 20, Program(layout, in_loops=False, packed_last="lhs rhs", mapped="lhs sizes rhs")
    yield 20, four_bits("forward", "bfloat16", Scaling((24, 1)), "uint4", "zeros", in_loops=False, m=8, n=8, groups=3)
    yield 3, Program("forward_left", "bfloat16", in_loops=False, groups=1, capacity=40, m=4, k=8, n=16)


def peers() -> Iterator[Case]:
    """Shapes of the tests of other libraries, some of them smaller: JAX (megablox, Mosaic GPU), tokamax, torch."""
    shapes: list[tuple[str, Any, dict[str, Any]]] = [
        ("forward", ("float32", "bfloat16", "float32"), {"capacity": 512, "k": 512, "n": 256, "groups": 32}),
        ("forward", ("bfloat16", "float32", "bfloat16"), {"capacity": 128, "k": 8, "n": 16, "groups": 17}),
        ("forward", ("bfloat16",), {"capacity": 256, "k": 255, "n": 255, "groups": 16, "held": 4}),
        ("wgrad", ("bfloat16",), {"capacity": 1088, "m": 128, "n": 128, "groups": 2}),
    ]
    for layout, dtypes, extents in shapes:
        yield 4, Program(layout, *dtypes, **extents)


def rotated(*options: Any, layouts: Iterable[str] = LETTERS) -> Iterator[tuple[str, Any]]:
    """Each option with the next layout."""
    return zip(itertools.cycle(layouts), options, strict=False)


def long() -> Iterator[Case]:
    """Programs have several options at a time. Each option is in programs of different layouts."""
    few: dict[str, Any] = {"groups": 3, "capacity": 8, "m": 1, "n": 1}
    many: dict[str, Any] = {"groups": 64, "capacity": 200}
    for i, layout in enumerate(LETTERS):
        dtype, orders = ("float32", "bfloat16")[i % 2], [("lhs", "rhs", "lhs rhs")[(i + j) % 3] for j in range(3)]
        yield 16, Program(layout, dtype, existing=i % 4 < 2, **LARGE)
        its: dict[str, Any] = few if i % 3 else many
        yield 40, Program(layout, dtype, packed_last=orders[0], swapped=i % 2 == 0, existing=i % 4 > 1, **its)
        mapped = "lhs sizes rhs" if LETTERS[layout] else "lhs rhs"
        yield 12, Program(layout, order=2, packed_last=orders[1], mapped=mapped)
        if i % 2:  # of one group, XLA folds transposes into the dot
            yield 20, Program(layout, "bfloat16", groups=1, capacity=40, m=4, k=8, n=16, packed_last=orders[2])
    for layout, tiles in rotated((8, 8, 8), (1, 1, 1), (7, 13, 5), layouts=("forward", "outer", "wgrad")):
        yield 60, Program(layout, tiles=tiles)
    for layout in ("forward_left", "ragged"):
        yield 60, Program(layout, "bfloat16", tiles=(16, 16, 16))
    for layout, mapped in rotated(*SUBSETS, layouts=[*LETTERS][1:]):
        yield 12, Program(layout, "bfloat16", mapped=mapped)
    for layout, mapped in rotated(*SUBSETS[::2], layouts=("forward", "forward_left", "wgrad")):
        yield 12, Program(layout, in_loops=False, mapped=mapped, existing="sizes" in mapped)
    for layout, context in rotated(
        "eager", "constant sizes", "constants", "scan", "checkpoint", "shard_map", "shard_map unchecked"
    ):
        yield 3, Program(layout, "bfloat16", context=context)
    for layout, context in rotated("export", "disable_jit"):
        yield 2, Program(layout, context=context)
    for layout, extents in rotated(
        {"m": 0}, {"k": 0}, {"n": 0}, {"capacity": 0}, {"groups": 0}, {"m": 0, "k": 0, "n": 0}
    ):
        if LETTERS[layout] or "capacity" not in extents:
            yield 5, Program(layout, **extents)
    for i, (layout, dtypes) in enumerate(rotated(*FLOATS, *INTEGERS)):
        yield 3, Program(layout, *dtypes) if i % 2 else Program("forward_left", *dtypes, in_loops=False)
    for layout in ("forward", "forward_left", "wgrad"):
        held = 7 if layout == "wgrad" else 1
        yield 20, Program(layout, "bfloat16", held=held, mapped="lhs sizes first", existing=True)
    for layout, shared in (("batched", "rhs"), ("forward_left", "lhs"), ("forward", "rhs")):
        yield 12, Program(layout, "bfloat16", shared=shared, mapped=shared, existing=True)
    yield from peers()
    yield 12, Program("outer", existing=True, mapped="existing")
    yield 3, Program("forward", mapped="lhs", context="scan")
    # XLA's CPU backend can't run each dot of bfloat16s; which one it gets depends on orders and on extents of 1.
    extents_of_one = itertools.cycle(((1, 64, 6), (64, 64, 1), (5, 1, 6)))
    for packed_last, mapped in itertools.product(("", "lhs", "rhs", "lhs rhs"), ("", "lhs rhs")):
        its: dict[str, Any] = dict(zip("mkn", next(extents_of_one), strict=True))
        yield 1, Program("batched", "bfloat16", "", "float32", packed_last=packed_last, mapped=mapped, **its)


def long_of_kernels() -> Iterator[Case]:
    for backend, count in (("pallas_tpu", 60), ("triton_gpu", 6)):
        is_gpu = backend == "triton_gpu"
        for i, (layout, letters) in enumerate(LETTERS.items()):
            tiles: Any = (32, 32, 64) if is_gpu else tuple(32 if letters == z else 128 for z in "mkn")
            yield 2 if is_gpu else 12, Program(layout, "bfloat16", backend=backend, tiles=tiles, **LARGE)
            if i % 2:
                yield count // 3, Program(layout, backend=backend, groups=8, capacity=200, existing=True)
            if i % 4 == 1:
                yield count // 3, Program(layout, backend=backend, order=2, packed_last="lhs rhs")
            elif i % 4 == 2 and not is_gpu:
                yield 3, Program(layout, backend=backend, interpret=TWO_CORES, existing=True, **LARGE)
        if not is_gpu:
            yield 12, Program("wgrad", groups=1, mapped="sizes", backend=backend)
            yield 3, Program("forward", "int4", backend=backend, chip="v6e")  # interpreted as int8
            # Tiles of four chunks of rows, in which groups begin and end anywhere.
            yield 12, Program("forward", backend=backend, tiles=(512, 128, 128), capacity=1024, k=128, n=128)
        if is_gpu:  # loads by TMA, which takes rows of whole 16 bytes; 8 bits with the contracted axis last
            extents: dict[str, Any] = {"m": 48, "k": 64, "n": 48, "width": 48, "capacity": 96, "chip": "NVIDIA H200"}
            for layout, dtypes in rotated(("float32", "", ""), (FP8, "", "float32"), ("int8", "", "")):
                yield 6, Program(layout, *dtypes, backend=backend, tiles=(32, 32, 32), **extents)
            yield 3, Program("wgrad", backend=backend, mapped="sizes")
            for layout in ("outer", "inner_rows", "batched"):
                yield 4, Program(layout, "bfloat16", **IN_STEPS)
            yield 4, Program("forward", "bfloat16", held=3, mapped="lhs sizes", **IN_STEPS)  # sums over the batch
            yield 4, Program("ragged", "bfloat16", mapped="sizes", **IN_STEPS)
            yield 4, Program("forward", backend=backend, held=3, mapped="lhs sizes rhs first")
            for layout in ("batched", "forward", "inner_rows", "wgrad"):
                yield 4, Program(layout, ("bfloat16", "int8")[layout == "batched"], splits=2, **IN_STEPS, existing=True)
            # Of an odd number in pairs, the last step has one number less than whole bytes.
            odd: dict[str, Any] = {"lhs_cast": ("int4", "row"), "k": 63, "tiles": (32, 32, 32)}
            yield 4, Program("forward", "bfloat16", "", "float32", backend=backend, **odd)
            yield 4, Program("forward", backend=backend, k=72, splits=3, held=3, mapped="lhs sizes rhs first")
            yield 2, Program("batched", "bfloat16", backend=backend, k=72, splits=4, mapped="lhs", existing=True)
        for layout, context in rotated("scan", "shard_map unchecked"):
            yield 3, Program(layout, backend=backend, context=context)
        for layout, dtypes in rotated(INTEGERS[0], ("bfloat16", FP8, ""), (FP8, "", ""), FLOATS[3]):
            yield 3, Program(layout, *dtypes, backend=backend, chip=gpu.FIRST_WITH_FP8 if is_gpu else "")
        for layout in ("forward", "forward_left", "wgrad"):
            yield count // 2, Program(layout, "bfloat16", backend=backend, held=3, existing=True)
        for layout, mapped in rotated(*SUBSETS[is_gpu::2], "lhs", layouts=("forward", "wgrad", "batched")):
            yield count // 6, Program(layout, backend=backend, mapped=mapped)
        yield count, Program("forward", held=3, backend=backend, size_dtype="uint32")
        yield 3, Program("forward", *INTEGERS[0], backend=backend, k=4000, groups=2)
        yield 3, Program("wgrad", *INTEGERS[0], backend=backend, capacity=4000, groups=2)
        yield 3, Program("wgrad", "int8", "", "float32", backend=backend, existing=True)
        ones = itertools.cycle(((1, 40, 24), (24, 1, 40), (40, 24, 1), (1, 1, 1), (2, 3, 2)))
        for i, (layout, (m, k, n)) in enumerate(zip([*LETTERS][is_gpu::2], ones, strict=False)):
            its: dict[str, Any] = {"groups": (5, 1)[i % 2], "packed_last": ("", "lhs", "rhs", "lhs rhs")[i % 4]}
            yield 3, Program(layout, "bfloat16", backend=backend, m=m, k=k, n=n, **its)
        yield from quantised(backend, 3, [*LETTERS][1 - is_gpu :: 2], step=29, m=1, k=1, n=1)


def long_of_scales() -> Iterator[Case]:
    layouts = [*LETTERS]
    yield from quantised("xla", 20, layouts, step=7)
    yield from quantised("xla", 12, layouts[::2], step=23, mapped="lhs")
    for backend, count in (("pallas_tpu", 20), ("triton_gpu", 3)):
        yield from quantised(backend, count, layouts, step=11)
        yield from quantised(backend, count, ["forward", "wgrad", "forward_left"], step=13, held=3, existing=True)
        yield from quantised(backend, count // 2, ["forward", "wgrad"], step=17, mapped="lhs")
    yield from quantised("pallas_tpu", 3, ["wgrad"], step=19, interpret=TWO_CORES)
    # Blocks along the contracted rows begin with each group: of two extents, and of scales that are no powers of two.
    yield 20, Program("wgrad", backend="pallas_tpu", lhs_cast=(FP8, (1, 8)), rhs_cast=(FP8, (32, 1)))
    # Later tiles along the contracted dim: scales of their numbers, and of their steps.
    for block, tile in ((32, 128), (128, 256)):
        tiles = (32, tile, 128)
        yield 9, Program("forward", backend="pallas_tpu", lhs_cast=(FP8, (1, block)), tiles=tiles, k=300, n=128)
    # Several blocks along a ragged dim that isn't packed; the next one's scales may be NaN.
    yield 20, Program("inner_rows", backend="pallas_tpu", lhs_cast=(FP8, (1, 8)), width=40)
    # Tiles with more rows than the buffer has, and more columns.
    of_tiles: dict[str, Any] = {"tiles": (64, 128, 256), "capacity": 40, "n": 200}
    yield 9, Program("forward", backend="pallas_tpu", lhs_cast=("int8", "row"), rhs_cast=("int8", "column"), **of_tiles)
    # A tile begins in the middle of a block.
    blocks: dict[str, Any] = {"tiles": (16, 256, 128), "m": 8, "k": 288, "n": 16}
    yield 9, Program("forward", backend="pallas_tpu", rhs_cast=("int8", (144, 1)), **blocks)
    casts: dict[str, Any] = {"lhs_cast": (FP8, (1, 32)), "rhs_cast": (FP8, (32, 1))}
    yield 3, Program("wgrad", backend="triton_gpu", chip="NVIDIA B200", tiles=(32, 32, 64), **casts)
    # Sums over a batch of what one scale for each group multiplies.
    its = {"backend": "pallas_tpu", "lhs_cast": ("int8", "group")}
    yield 20, Program("forward", mapped="first", held=3, **its)
    yield 20, Program("forward", mapped="lhs", groups=3, capacity=256, tiles=(256, 128, 128), **its)
    # Tensor cores scale blocks of 32 themselves, in both formats of fp8.
    extents = itertools.cycle(((64, None), (150, (32, 32, 32)), (150, (16, 64, 32))))
    for layout, dtype in zip(("batched", "forward", "forward_left", "outer", "ragged"), BITS[::2] * 3, strict=False):
        its: dict[str, Any] = {"backend": "triton_gpu", "chip": "NVIDIA B200", "m": 40, "n": 48}
        its |= {"lhs_cast": (dtype, "mx"), "rhs_cast": (FP8, Scaling((32, 1), "float8_e8m0fnu"))}
        its |= {"packed_last": "rhs"} if layout == "ragged" else {}
        its |= dict(zip(("k", "tiles"), next(extents), strict=True))
        yield 3, Program(layout, **its)
    yield from quantised("triton_gpu", 3, ["forward", "forward_left", "batched"], step=31, splits=2)
    for chip, block in (("NVIDIA B200", 32), ("NVIDIA H200", 128)):  # by the tensor cores' own scales, by the kernel's
        casts: dict[str, Any] = {"lhs_cast": (FP8, (1, block)), "rhs_cast": (FP8, (block, 1))}
        yield 3, Program("wgrad", backend="triton_gpu", chip=chip, out_dtype="float32", tiles=(32, 32, 64), **casts)


WIDE: dict[str, Any] = {"capacity": 150, "m": 130, "k": 300, "n": 280}
# Of "batched", each group has as many rows.
WIDE_OF: dict[str, dict[str, Any]] = dict.fromkeys(LETTERS, WIDE) | {"batched": WIDE | {"m": 40, "groups": 3}}


def long_of_weights() -> Iterator[Case]:
    """Matrices of few bits, as models are served with."""
    for i, layout in enumerate([*LETTERS][::2]):
        yield 20, Program(layout, rhs_cast=("float4_e2m1fn", NVFP4) if i % 2 == 0 else None, **FOUR_BITS)
    dtypes = itertools.cycle(("bfloat16", "float32", "float16"))
    for layout, scaling in itertools.product(("forward", "forward_left", "batched"), (MX, NVFP4)):
        its: dict[str, Any] = {"chip": "NVIDIA H200", "tiles": (32, 64, 64), **WIDE_OF[layout], "k": 150, "n": 150}
        yield 3, four_bits(layout, next(dtypes), scaling, backend="triton_gpu", **its)
    for layout, dtype in (("forward", "bfloat16"), ("forward_left", "float32"), ("batched", "bfloat16")):
        its = {"tiles": (128, 128, 128), **WIDE_OF[layout], "k": 160}
        yield 5, four_bits(layout, dtype, MX, backend="pallas_tpu", **its)
    yield 5, four_bits("forward_left", "bfloat16", MX, backend="pallas_tpu", mapped="lhs")
    for backend, count in (("pallas_tpu", 20), ("triton_gpu", 3)):
        yield count, four_bits("forward", "bfloat16", MX, backend=backend)
        yield count, four_bits("forward_left", "float32", NVFP4, backend=backend)
    yield 20, four_bits("forward", "bfloat16", MX, chip="v5e", **SERVED)
    yield 20, four_bits("forward", "bfloat16", Scaling((32, 1)), "int4", chip="tpu7x", **SERVED)
    # More columns than XLA decodes at a time. Numbers that share a byte are neighbours along either dim.
    yield 20, four_bits("forward", "bfloat16", MX, n=1540)
    yield 20, four_bits("forward", "bfloat16", NVFP4, packed_last="rhs", n=1540, held=3)
    yield 20, four_bits("forward", "bfloat16", Scaling.of("column"), FP8, n=775)
    several = [(MX, "float4_e2m1fn"), (NVFP4, "float4_e2m1fn"), (Scaling((32, 1)), FP8), (Scaling((128, 1)), "int4")]
    for i, (scaling, of) in enumerate(several):
        its = {"backend": "pallas_tpu", "k": 168, "chip": ("v5e", "v6e", "tpu7x")[i % 3]}
        yield 12, four_bits("forward", "bfloat16", scaling, of, packed_last=("", "rhs")[i % 2], **its)
        if i % 2:
            yield 3, four_bits("forward", "float32", scaling, of, lhs_cast=(FP8, "row"), **its)
    # XLA decodes them, some columns at a time.
    several += [(Scaling((128, 128)), FP8), (Scaling((3, 5)), "int4"), (Scaling.of("column"), "int8")]
    for i, (scaling, of) in enumerate(several):
        order = ("", "rhs")[i % 2]
        if i % 3 == 0:
            yield 12, four_bits("forward", "bfloat16", scaling, of, packed_last=order, n=901 + (order == ""))
        elif i % 3 == 1:
            yield 5, four_bits("forward", "float16", scaling, of, packed_last=order, mapped="lhs rhs")
        else:
            yield 5, four_bits("forward_left", "float32", scaling, of, packed_last=order and "lhs", m=901)
    yield 12, four_bits("forward", "int8", MX, "int8", rhs_dtype="float32")
    yield 12, four_bits("forward_left", "float32", NVFP4, "int4", rhs_dtype="int32")
    for backend, count in (("pallas_tpu", 5), ("triton_gpu", 3)):
        yield count, four_bits("forward", "bfloat16", MX.mT, backend=backend, held=3, existing=True)
    # Loads by TMA; and without, in parts.
    given: dict[str, Any] = WIDE | {"backend": "triton_gpu", "k": 320, "n": 150}
    for scaling, of, tile in ((MX, "float4_e2m1fn", 128), (Scaling((64, 1)), "int4", 64)):
        tiles = (32, 64, tile)
        yield 3, four_bits("forward", "bfloat16", scaling, of, chip="NVIDIA H200", tiles=tiles, **given)
    given |= {"splits": 3, "held": 3}
    yield 2, four_bits("forward", "bfloat16", NVFP4, tiles=(32, 64, 128), **given)
    yield 2, four_bits("forward", "bfloat16", Scaling((64, 1)), "int4", "zeros", tiles=(32, 64, 64), **given)


def long_of_zero_points() -> Iterator[Case]:
    """Where scales multiply the sum, a step's product and the tile."""
    scalings: list[tuple[str, Any]] = [
        ("uint4", (128, 1)),
        ("int8", (None, None)),
        ("uint8", (8, 8)),
        ("int4", (40, 1)),
    ]
    dtypes = itertools.cycle(("bfloat16", "int8", "float32"))
    for i, (layout, (of, block)) in enumerate(itertools.product(("forward", "batched", "forward_left"), scalings)):
        dtype, more = next(dtypes), WIDE_OF[layout] | {"k": 256, "backend": "pallas_tpu", "tiles": (128, 128, 128)}
        if (i + i // 4) % 2:
            more |= {"n": 150, "backend": "triton_gpu", "tiles": (32, 64, 64), "chip": "NVIDIA H200"}
        if dtype == "int8":
            dtype, more["rhs_dtype"] = ("float32", "int8") if layout == "forward_left" else ("int8", "float32")
        yield 3, four_bits(layout, dtype, Scaling(block), of, "zeros", **more)
    yield 20, Program("forward_left", lhs_cast=("int8", "row", "zeros"), rhs_cast=("uint8", (4, 1), "zeros"))
    yield 9, Program("wgrad", lhs_cast=("int8", (4, 2), "zeros"), rhs_cast=("int4", "tensor", "zeros"))
    yield 20, four_bits("forward", "bfloat16", Scaling((24, 1)), "uint4", "zeros", backend="pallas_tpu")
    turned = Scaling((1, 16))
    for backend, count in (("pallas_tpu", 5), ("triton_gpu", 2)):
        yield count, four_bits("forward", "bfloat16", turned, "uint4", "zeros", backend=backend, held=3, existing=True)
        yield count, four_bits("forward", "bfloat16", turned, "uint8", "zeros", backend=backend, mapped="lhs rhs")
        for scaling, of in ((turned.mT, "uint4"), (Scaling.of("column"), "uint8")):
            yield count, four_bits("forward", "float32", scaling, of, "zeros", backend=backend, packed_last="rhs")
        yield count, four_bits("forward_left", "float32", Scaling.of("row"), "uint8", "zeros", backend=backend)
    yield 2, four_bits("forward", "float16", turned.mT, "uint4", "zeros", backend="triton_gpu", packed_last="rhs")


@pytest.mark.parametrize("count, program", named(by_default()))
def test_products(count: int, program: Program) -> None:
    program.check(draws(program, count))


def more() -> Iterator[Case]:
    """Those that the default tests don't have."""
    tested = [program for _, program in by_default()]
    for cases in (long(), long_of_kernels(), long_of_scales(), long_of_weights(), long_of_zero_points()):
        yield from (case for case in cases if case[1] not in tested)


@pytest.mark.long
@pytest.mark.parametrize("count, program", named(more()))
def test_more_products(count: int, program: Program) -> None:
    program.check(draws(program, count))


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [
        Program("wgrad", capacity=150),
        Program("wgrad", "bfloat16", backend="pallas_tpu"),
        Program("forward", "bfloat16", backend="triton_gpu"),
        *(Program(layout, "bfloat16") for layout in LETTERS),
    ],
    ids=str,
)
def test_same_bits(program: Program) -> None:
    """Of a second call, of a second compilation, and beside what isn't finite in another group."""
    clean, poisoned = (list(draws(program, 8, is_poisoned=is_poisoned)) for is_poisoned in (False, True))
    run = jax.jit(program.compute)
    with launches(program.in_loops) as ran:
        first = [jax.tree.map(np.asarray, run(*draw)) for draw in clean]
        lowered = len(ran)
        again = [jax.tree.map(np.asarray, run(*draw)) for draw in clean]
        beside = [jax.tree.map(np.asarray, run(*draw)) for draw in poisoned]
        jax.clear_caches()
        compiled = [jax.tree.map(np.asarray, run(*draw)) for draw in clean]
    assert len(ran) == 2 * lowered > 0
    for result, *others, other in zip(first, again, compiled, beside, strict=True):
        for name, value in result.items():
            bits = value.view(np.uint8)
            assert all(np.array_equal(bits, each[name].view(np.uint8)) for each in others), name
            assert np.array_equal(value[np.isfinite(other[name])], other[name][np.isfinite(other[name])]), name


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_in_any_batch(dtype: str) -> None:
    """With one tile size, rows and their gradients have the same bits in buffers and groups of any size, wherever the
    rows lie in these. (Without, groups of 33 rows or more differ in float32.)"""
    rng, k, n = np.random.default_rng(0), 512, 384
    gate, up, row, ct = (rng.standard_normal(shape) for shape in ((4, k, n), (4, k, n), k, n))

    @jax.jit
    def run(rows: Array, cts: Array, sizes: Array) -> Any:
        weights = [jnp.asarray(w, dtype) for w in (gate, up)]
        x = GroupedTensor(rows, sizes)
        product = jax.vjp(lambda rows: ragged.matmul(x.with_data(rows), weights[0]).data, rows)
        gated = jax.vjp(lambda rows: ragged.gated_matmul(x.with_data(rows), *weights).data, rows)
        return [(out, *pull(cts)) for out, pull in (product, gated)]

    found = set()
    one = XlaConfig(m=(16,))
    with tuning.using(tuning.Configs(out=one, lhs=one)):
        for number in range(45):
            capacity = (24, 100, 700)[number % 3]
            sizes = rng.multinomial(rng.integers(4, capacity), [0.1, 0.2, 0.6, 0.1])
            sizes[2] = max(sizes[2], 1)
            at = sizes[:2].sum() + rng.integers(sizes[2])
            rows, cts = (jnp.asarray(rng.standard_normal((capacity, m)), dtype) for m in (k, n))
            out = run(
                rows.at[at].set(row.astype(dtype)), cts.at[at].set(ct.astype(dtype)), jnp.asarray(sizes, jnp.int32)
            )
            found.add(b"".join(np.asarray(each)[at].tobytes() for each in jax.tree.leaves(out)))
    assert len(found) == 1
