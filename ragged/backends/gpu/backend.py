"""Grouped products as a Triton kernel for NVIDIA's GPUs: one kernel, `kernel.grouped_product`, for all of them.

`plan` and `run` turn letters into strides, extents and tiles.

Tiles are loaded by TMA on Hopper and Blackwell wherever an operand's rows begin at multiples of 16 bytes, else by
`cp.async`; the program compiled for sm_80 does the latter on any GPU.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ragged.backends.base import (
    KERNELS,
    Launch,
    Refusal,
    Target,
    Work,
    choice,
    cost,
    kernel_metadata,
    precision_name,
    refuse,
    scale_ways,
    spans,
    too_old,
)
from ragged.backends.config import GpuConfig
from ragged.backends.gpu import call as triton_call
from ragged.backends.gpu import tiles
from ragged.backends.gpu.tiles import Chip, Problem
from ragged.product.layout import Product
from ragged.product.operands import Call, Operands, Term
from ragged.quant.formats import FORMATS, accumulator_dtype, compute_dtype

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_STORED = ("bfloat16", "float16", "float32", "int32")
"""What a kernel writes; a result of 8 bits is rounded by XLA, whose casts saturate where JAX's do, and only there."""

_PRECISIONS = {
    **dict.fromkeys(("none", "default", "fastest", "tensorfloat32", "bfloat16"), "tf32"),
    **dict.fromkeys(("high", "bfloat16_3x"), "tf32x3"),
    **dict.fromkeys(("highest", "float32"), "ieee"),
}
"""How float32 is multiplied, by the names of JAX's precisions; "tf32" is what XLA's default is on a GPU too."""

_UNITS = {name: known.gpu for name, known in FORMATS.items()}
_TAKES = (*KERNELS, "scales", "offset", "batch", "existing")

_MOST_GROUPS = 4096
"""Each program holds a prefix sum over the sizes in registers."""

_MOST_ELEMENTS = 65535
"""Of a batch: the second dim of a CUDA grid."""

_LONGEST_FP8_SUM = 128
"""Hopper's tensor cores add up fp8 products in about 14 bits: this many at a time, the rest in float32."""


class _Dot(NamedTuple):
    """How two tiles are multiplied."""

    dtype: Any  # of both
    cast: bool  # whether one has to be cast to it
    precision: str  # of float32: "tf32", "tf32x3" or "ieee"
    ways: tuple[str, str]  # of the operands' scales

    @property
    def is_fp8(self) -> bool:
        return self.dtype.name in _FP8

    @property
    def accumulator(self) -> Any:
        return jnp.dtype(jnp.int32 if self.dtype == jnp.int8 and "step" not in self.ways else jnp.float32)


class _Details(NamedTuple):
    """What `run` has to know besides the call."""

    tiled: Problem
    chip: Chip
    dot: _Dot
    stored: Any  # the dtype that the kernel writes
    held: int  # matrices of the uniform term
    elements: int  # of a batch, each with a result of its own
    summed: int  # of a batch, which make one result
    results: int = 0  # tiles of each element's result, at most


def plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    """How the kernel runs a product: see `ragged.backends.base`."""
    if refusal := _refuse(call, x, target):
        return refusal
    p, sizes, (a, b), chip = call.product, x.sizes, _terms(call, x), tiles.chip(target.device)
    (r, c), k = p.out, p.contracted
    held = call.held(x)
    batch, sums = call.batch(x), not call.out_batch
    elements, summed = (1, batch or 1) if sums else (batch or 1, 1)

    # How tiles are multiplied, and how large they are.
    stored = call.dtype if jnp.dtype(call.dtype).name in _STORED else accumulator_dtype(call.dtype)
    least = tiles.least_k(a.data.dtype, b.data.dtype)
    ways = scale_ways(call, x, least)
    dot = _dot(a.data.dtype, b.data.dtype, ways, call.options.precision, chip)
    extent = {r: call.shape[-2], c: call.shape[-1], k: min(a.extent(k), b.extent(k))}
    # Of a mean group: its share of a buffer that packs the letter. One that is packed nowhere: the widest group's.
    rows = {letter: term.data.shape[-2] for term in (a, b) if (letter := term.letters[0]) in sizes}
    rows |= {r: call.shape[-2]} if r in sizes else {}
    mean = {z: max(1, min(n, -(-rows[z] // x.num_groups))) if z in rows else n for z, n in extent.items()}
    tiled = Problem(
        mean[r],
        mean[c],
        mean[k],
        groups=held,
        itemsize=dot.dtype.itemsize,
        result=jnp.dtype(stored).itemsize,
        least_k=least,
        wide="step" in ways or dot.is_fp8,
        slow=dot.dtype == jnp.float32 and dot.precision == "ieee",
        by_thread=not (chip.has_tma and _is_aligned(a) and _is_aligned(b)),
        ragged=len(sizes) == 3,
        letters=r + c + k,
    )
    details = _Details(tiled, chip, dot, jnp.dtype(stored), held, elements, summed)
    # A step lies in one block of the scales that change with it.
    block = math.gcd(*(term.block(k) or 0 for term, way in zip((a, b), ways, strict=True) if way == "step"))

    def in_blocks(config: GpuConfig) -> GpuConfig:
        return replace(config, **{k: math.gcd(config.along(k)[0], block)})

    found = choice(
        call,
        x,
        target,
        "triton_gpu",
        legal=lambda config: _illegal(config, details, block, call, sizes, (a, b), target),
        tiled=lambda asked: in_blocks(tiles.fit(tiled, (asked[r], asked[c], asked[k]), chip)),
        model=lambda: in_blocks(tiles.choose(tiled, chip)),
    )
    if isinstance(found, Refusal):
        return found
    config, source = found
    tile_r, tile_c = config.along(r + c)
    rows_of_tiles = -(-call.shape[-2] // tile_r)
    # A result that packs its rows has a tile more for each group that doesn't fill its last.
    count = rows_of_tiles + min(held, call.shape[-2]) + 1 if r in sizes else rows_of_tiles * held
    results = count * -(-call.shape[-1] // tile_c)
    steps = -(-extent[k] // config.along(k)[0])
    # Groups share what is contracted in a wgrad.
    visits = results // held * (steps + held) if p.ragged == k else results * steps
    return Launch(
        "triton_gpu",
        p.kernel,
        call,
        target,
        config=config,
        source=source,
        visits=elements * summed * visits,
        details=details._replace(results=results),
        **cost(call, x),
    )


def candidates(launch: Launch, x: Operands) -> list[GpuConfig]:
    """Configurations to try in place of the launch's, best by the model first."""
    return tiles.ranked(launch.details.tiled, launch.details.chip)


def work(launch: Launch, x: Operands) -> Work:
    """The kernel's tiles of results, and their steps: see `ragged.backends.base`."""
    call, p, config, found = launch.call, launch.call.product, launch.config, spans(launch.call, x)
    (r, c), k = p.out, p.contracted
    tile_r, tile_c, tile_k = config.along(r + c + k)
    size = {letter: end - first for letter, (first, end) in found.items()}
    rows, columns, steps = -(-size[r] // tile_r), -(-call.shape[-1] // tile_c), -(-size[k] // tile_k)
    visits, idle = int(sum(rows * steps)), int(sum(rows[steps == 0]))
    if r in p.ragged:  # rows in front of all groups that are held, and behind them, get zeros
        gaps = -(-found[r][0][0] // tile_r) + -(-(call.shape[-2] - found[r][1][-1]) // tile_r)
        if config.variant == "overlapped" and k not in p.ragged:  # which are multiplied too
            visits += int(gaps * steps[0])
        else:
            idle += int(gaps)
    letter = r if r in p.ragged else k if k in p.ragged else ""
    tile = tile_r if letter == r else tile_k
    tiles = [
        (group, int(at), tile)
        for group, (first, end) in enumerate(zip(*found[letter or r], strict=True), int(x.offset or 0))
        for at in range(first, end, tile)
        if letter
    ]
    visits, idle = visits * columns, idle * columns
    return Work(visits, idle, 2 * visits * tile_r * tile_c * tile_k, letter, tuple(tiles))


def _refuse(call: Call, x: Operands, target: Target) -> Refusal | None:
    """Why there is no kernel for such a product, or not with such tiles."""
    if target.portable:
        return Refusal("an export refuses Triton's custom calls, unless `backend='triton_gpu'` asks for them")
    if not target.interpret and (missing := triton_call.missing()):
        return Refusal(missing)
    if refusal := refuse("triton_gpu", _UNITS, _TAKES, _PRECISIONS, call, x, target):
        return refusal
    capability = tiles.chip(target.device).capability
    if capability < 80:
        return Refusal(f"triton_gpu has no kernels for compute capability {capability / 10}, below 8.0")
    if name := too_old(_UNITS, x, capability):
        unnamed = "" if target.device else " (for which code is where nothing names the GPU)"
        least = (_UNITS[name].operand or 0) / 10
        return Refusal(
            f"GPUs of compute capability {capability / 10}{unnamed} can't convert {name}; {least} and later can"
        )
    if x.sizes and x.num_groups > _MOST_GROUPS:
        return Refusal(f"triton_gpu has no kernels for {x.num_groups} groups, more than {_MOST_GROUPS}")
    if call.out_batch and (call.batch(x) or 1) > _MOST_ELEMENTS:
        return Refusal(f"{call.batch(x)} batch elements, more than {_MOST_ELEMENTS}")
    if not call.out_batch and call.batched(x).offset:
        return Refusal("a sum over batch elements that hold different groups")
    return tiles.refuse(call.options.tiles) if call.options.tiles else None


def _illegal(
    config: GpuConfig,
    of: _Details,
    block: int,
    call: Call,
    sizes: Any,
    terms: tuple[Term, Term],
    target: Target,
) -> Refusal | None:
    """Why the kernel can't have this configuration."""
    (r, c), k = call.product.out, call.product.contracted
    if refusal := tiles.refuse(dict(zip("mkn", config.along("mkn"), strict=True))):
        return refusal
    tile_r, tile_c, tile_k = config.along(r + c + k)
    if tile_k < of.tiled.least_k or (block and block % tile_k):
        most = f", and divide {block}, the extent of a block of scales" if block else ""
        return Refusal(
            f"tile_{k}={tile_k} of the contracted dim.", f"It must be a power of two, {of.tiled.least_k} or more{most}."
        )
    # An error, lest another program be measured; but not before it is known which GPU it is for.
    known = target.device is not None
    if config.variant and (needs := _variant_needs(config, of, call, sizes, terms)):
        mend = "The kernel without a variant doesn't." if known else ""
        return Refusal(f"the kernel's variant {config.variant!r} needs {needs}.", mend)
    totals = tile_r * tile_c * (2 if of.tiled.wide else 1) // (32 * config.warps)
    taken = tiles.shared(of.tiled, config, of.chip)
    for what, needed, most in (
        ("bytes of shared memory", taken, of.chip.shared),
        ("registers a thread for sums", totals, tiles.MOST_TOTALS),
    ):
        if needed > most:
            mend = "Take smaller tiles, fewer stages or more warps." if known else ""
            return Refusal(f"{config} takes {needed} {what}, of {most}.", mend)
    return None


def _variant_needs(config: GpuConfig, of: _Details, call: Call, sizes: Any, terms: tuple[Term, Term]) -> str:
    """What a variant of the kernel lacks here; "" if nothing."""
    (r, _), k, (a, b) = call.product.out, call.product.contracted, terms
    tile_r, tile_k = config.along(r + k)
    needs = {
        "compute capability 9.0": of.chip.capability == 90,
        "TMA": config.tma,
        "operands whose rows begin at multiples of 16 bytes": _is_aligned(a) and _is_aligned(b),
        "a result for each batch element": of.summed == 1,
        "a contraction that is ragged, or a multiple of its tile": k in sizes
        or a.extent(k) == b.extent(k) == a.extent(k) // tile_k * tile_k,
        "less shared memory": tiles.shared(of.tiled, config, of.chip) <= of.chip.shared,
    }
    if config.variant == "overlapped":
        needs["a result whose rows begin at multiples of 16 bytes"] = call.shape[-1] * of.stored.itemsize % 16 == 0
        needs["at most 2**30 rows of results"] = of.elements * math.prod(call.shape[:-1]) <= 1 << 30
    else:
        needs["rows that alone are ragged, if any are"] = set(sizes) <= {r}
        needs["4 warps, and a tile of 128 rows"] = (config.warps, tile_r) == (4, 128)
        needs["operands of the same 8 or 16 bits, and no scales but of rows"] = (
            of.dot.dtype.itemsize <= 2 and not of.dot.cast and not {"tile", "step"} & {*of.dot.ways}
        )
    return next((need for need, met in needs.items() if not met), "")


def _terms(call: Call, x: Operands) -> tuple[Term, Term]:
    """Those of the product, int4 as int8."""
    a, b = (
        term._replace(data=jax.ShapeDtypeStruct(term.data.shape, jnp.int8)) if term.data.dtype == jnp.int4 else term
        for term in call.terms(x)
    )
    return a, b


def _is_aligned(term: Term) -> bool:
    """Whether each row begins at a multiple of 16 bytes, as TMA wants."""
    return term.data.shape[-1] * term.data.dtype.itemsize % 16 == 0


def _geometry(term: Term, kept: str, product: Product) -> dict[str, Any]:
    """Strides of batch, group, kept and contracted axis; extents of the last two; which of them is packed."""
    (p, q), ndim = term.data.shape[-2:], product.ndim(term.letters)
    batch = math.prod(term.data.shape[-ndim:]) if term.data.ndim > ndim else 0
    first = term.letters[0] == kept  # the kept axis comes first
    return {
        "STRIDES": (batch, p * q if ndim == 3 else 0, *((q, 1) if first else (1, q))),
        "EXTENTS": (p, q) if first else (q, p),
        "PACKED": ("kept" if first else "contracted") if term.letters[0] in product.ragged else "",
    }


def _scaling(term: Term, way: str, kept: str, product: Product) -> tuple[Any, ...]:
    """How the kernel finds and applies the scales: see `kernel._scale_row`."""
    if term.scales is None:
        return "", 0, 0, 1, 0, 1, 0
    values, ndim = term.scales.values, product.ndim(term.letters)
    blocks = dict(zip(term.letters, term.scales.block, strict=True))
    strides = dict(zip(term.letters, (values.shape[-1], 1), strict=True))
    (contracted,) = set(term.letters) - {kept}
    packed = term.letters[0] if term.letters[0] in product.ragged else None
    # Scales of groups: by their number if sizes pack them in rows of `values`, by the place of their matrix else.
    group = (strides[packed] if blocks[packed] is None else 0) if packed else -math.prod(values.shape[-2:])
    batch = math.prod(values.shape[-ndim:]) if values.ndim > ndim else 0
    strides = {letter: 0 if blocks[letter] is None else stride for letter, stride in strides.items()}
    return way, batch, group, blocks[kept] or 1, strides[kept], blocks[contracted] or 1, strides[contracted]


def _dot(a: Any, b: Any, ways: tuple[str, str], precision: Any, chip: Chip) -> _Dot:
    a, b, how = jnp.dtype(a), jnp.dtype(b), _PRECISIONS.get(precision_name(precision) or "", "tf32")
    if "tile" in ways:  # which scales, of float32, have been multiplied into
        return _Dot(jnp.dtype(jnp.float32), True, "tf32x3" if how == "tf32" else how, ways)
    if a.name in _FP8 and b.name in _FP8 and chip.capability >= 89:
        return _Dot(a, False, how, ways)  # tensor cores multiply either with either
    common = jnp.dtype(compute_dtype(a, b))
    if jnp.float16 in (a, b) and (a == b or 1 in (a.itemsize, b.itemsize)):
        common = jnp.dtype(jnp.float16)  # holds every int8 and fp8
    return _Dot(common, (a, b) != (common, common), how, ways)


def run(launch: Launch, x: Operands) -> Array:
    """Runs the kernel."""
    call, p, sizes, config = launch.call, launch.call.product, x.sizes, launch.config
    tiled, chip, dot, stored, held, elements, summed, results = launch.details
    (r, c), k = p.out, p.contracted
    a, b = (
        term._replace(data=term.data.astype(jnp.int8)) if term.data.dtype == jnp.int4 else term
        for term in call.terms(x)
    )
    packed, num_groups, (rows, columns) = r in sizes, x.num_groups, call.shape[-2:]
    has_tma, (tile_r, tile_c, tile_k) = chip.has_tma and config.tma, config.along(r + c + k)

    # 1. The kernel's parameters.
    batch = (elements,) if call.out_batch and call.batch(x) is not None else ()
    out = jax.ShapeDtypeStruct((*batch, *call.shape), stored)
    arrays = {
        "a": a.data,
        "b": b.data,
        **{f"sizes_{name}": sizes.get(letter) for name, letter in (("r", r), ("c", c), ("k", k))},
        "offset": x.offset,
        "a_scales": None if a.scales is None else a.scales.values.astype(jnp.float32),
        "b_scales": None if b.scales is None else b.scales.values.astype(jnp.float32),
    }
    strides = [0 if letter not in sizes or sizes[letter].ndim == 1 else num_groups for letter in (r, c, k)]
    static = {
        "GROUPS": num_groups,
        "HELD": held,
        "BATCH": (*strides, 0 if x.offset is None else x.offset.ndim),
        **{f"A_{key}": value for key, value in _geometry(a, r, p).items()},
        **{f"B_{key}": value for key, value in _geometry(b, c, p).items()},
        "A_SCALING": _scaling(a, dot.ways[0], r, p),
        "B_SCALING": _scaling(b, dot.ways[1], c, p),
        "A_TMA": math.prod(a.data.shape[:-2]) if has_tma and _is_aligned(a) else 0,
        "B_TMA": math.prod(b.data.shape[:-2]) if has_tma and _is_aligned(b) else 0,
        "OUT_STRIDES": (rows * columns * (1 if packed else held), 0 if packed else rows * columns, columns),
        "OUT_EXTENTS": (rows, columns),
        "SUMMED": summed,
        "TILE_R": tile_r,
        "TILE_C": tile_c,
        "TILE_K": tile_k,
        "BAND": config.band,
        "WIDTH": max(16, 1 << (num_groups - 1).bit_length()),
        "COMMON": dot.dtype if dot.cast else None,
        "ACCUMULATOR": dot.accumulator,
        "PRECISION": dot.precision,
        "ADDS": x.epilogue.existing is not None,
        "LONGEST": min(_LONGEST_FP8_SUM, tile_k) if dot.is_fp8 else 0,
        "VARIANT": config.variant,
    }

    # 2. The launch: as many programs as the chip runs at a time, or as there can be tiles.
    programs = max(1, chip.multiprocessors * tiles.resident(tiled, config, chip) // elements)
    existing = x.epilogue.existing
    existing = None if existing is None else existing.astype(stored).reshape(out.shape)
    is_transposed = launch.kernel == "grouped_matmul" and b.letters[1] == k
    name, tile = launch.kernel + "_transposed" * is_transposed, {r: tile_r, c: tile_c, k: tile_k}
    dtypes = (a.data.dtype, b.data.dtype, stored)
    with jax.named_scope(f"ragged_{name}"):
        return triton_call.call(
            arrays,
            out,
            static,
            existing=existing,
            grid=(min(results, programs), elements),
            config=config,
            name=f"{name}_{tile_r}x{tile_k}x{tile_c}",
            metadata=kernel_metadata((a.letters, b.letters, p.out), tile, dtypes, held),
            cost={"flops": launch.flops, "bytes_accessed": launch.bytes_accessed},
            chip=chip,
            interpret=bool(launch.target.interpret),
        ).astype(call.dtype)
