"""Grouped products as a Triton kernel for NVIDIA's GPUs: one kernel, `kernel.grouped_product`, for all of them.

`plan` and `run` turn letters into strides, extents and tiles.

Tiles are loaded by TMA on Hopper and Blackwell wherever an operand's rows begin at multiples of 16 bytes, else by
`cp.async`; the program compiled for sm_80 does the latter on any GPU.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from ragged.backends.base import (
    KERNELS,
    Launch,
    Refusal,
    Target,
    Work,
    choice,
    cost,
    kernel_metadata,
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
from ragged.product.operands import Call, Operands, Scales, Term, precision_name
from ragged.quant.formats import FORMATS, accumulator_dtype, compute_dtype

_FP8, _FP4 = ("float8_e4m3fn", "float8_e5m2"), "float4_e2m1fn"
_STORED = ("bfloat16", "float16", "float32", "int32")
"""What a kernel writes; a result of 8 bits is rounded by XLA, whose casts saturate where JAX's do, and only there."""

_PRECISIONS = {
    **dict.fromkeys(("none", "default", "fastest", "tensorfloat32", "bfloat16"), "tf32"),
    **dict.fromkeys(("high", "bfloat16_3x"), "tf32x3"),
    **dict.fromkeys(("highest", "float32"), "ieee"),
}
"""How float32 is multiplied, by the names of JAX's precisions; "tf32" is what XLA's default is on a GPU too."""

_UNITS = {name: known.gpu for name, known in FORMATS.items()}
_TAKES = (*KERNELS, "scales", "offset", "batch", "existing", "bias", "up", "up_bias")
_TAKES += ("grouped_matmul with an ending", "batched_matmul with an ending")

_MOST_GROUPS = 4096
"""Each program holds a prefix sum over the sizes in registers."""

_MOST_ELEMENTS = 65535
"""Of a batch: the second dim of a CUDA grid."""

_LONGEST_FP8_SUM = 128
"""Hopper's tensor cores add up fp8 products in about 14 bits: this many at a time, the rest in float32."""

_SLICE = 32
"""Elements of a thread of which an ending is computed at a time: more would take the registers that hold the others."""


class _Dot(NamedTuple):
    """How two tiles are multiplied."""

    dtype: Any  # of both
    cast: bool  # whether one has to be cast to it
    precision: str  # of float32: "tf32", "tf32x3" or "ieee"
    ways: tuple[str, str]  # of the operands' scales
    each: int = 1  # numbers in an element that is loaded

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
    turns: bool  # whether operands are turned in memory: see `_turns`
    results: int = 0  # tiles of each element's result, at most


def plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    """How the kernel runs a product: see `ragged.backends.base`."""
    if refusal := _refuse(call, x, target):
        return refusal
    p, sizes, chip = call.product, x.sizes, tiles.chip(target.device)
    (r, c), k = p.out, p.contracted
    a, b = call.terms(x)
    extent = {r: call.shape[-2], c: call.shape[-1], k: min(a.extent(k), b.extent(k))}
    by_units = _by_units((a, b), call, chip)
    a, b = _loaded(a, k), _loaded(b, k)
    held = call.held(x)
    batch, sums = call.batch(x), not call.out_batch
    elements, summed = (1, batch or 1) if sums else (batch or 1, 1)

    # How tiles are multiplied, and how large they are.
    stored = call.dtype if jnp.dtype(call.dtype).name in _STORED else accumulator_dtype(call.dtype)
    least = tiles.least_k(a.data.dtype, b.data.dtype)
    ways = ("unit", "unit") if by_units else scale_ways(call, x, least)
    dot = _dot(a.data.dtype, b.data.dtype, ways, call.options.precision, chip)
    turns = _turns((a, b), dot, p, chip)
    # Of a mean group: its share of a buffer that packs the letter. One that is packed nowhere: the widest group's.
    rows = {letter: term.extent(letter) for term in (a, b) if (letter := term.letters[0]) in sizes}
    rows |= {r: call.shape[-2]} if r in sizes else {}
    mean = {z: max(1, min(n, -(-rows[z] // x.num_groups))) if z in rows else n for z, n in extent.items()}
    tiled = Problem(
        mean[r],
        mean[c],
        mean[k],
        groups=held,
        itemsize=dot.dtype.itemsize / dot.each,
        result=jnp.dtype(stored).itemsize,
        least_k=least,
        wide="step" in ways or dot.is_fp8,
        slow=dot.dtype == jnp.float32 and dot.precision == "ieee",
        by_thread=not (chip.has_tma and (turns or (_is_aligned(a) and _is_aligned(b)))),
        scaled=_UNIT_BLOCKS[call.terms(x)[0].data.dtype.name] if by_units else 0,
        ragged=len(sizes) == 3,
        letters=r + c + k,
        products=call.num_products,
        results=call.num_stored,
    )
    details = _Details(tiled, chip, dot, jnp.dtype(stored), held, elements, summed, turns)
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
    flops = 2 * visits * tile_r * tile_c * tile_k * call.num_products
    return Work(visits, idle, flops, letter, tuple(tiles))


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
    terms = call.terms(x)
    if any(_is_fp4(term) for term in terms) and not _by_units(terms, call, tiles.chip(target.device)):
        return Refusal(
            f"triton_gpu multiplies {_FP4} on GPUs of compute capability 10.0 and 10.3, both operands with scales in "
            "float8_e4m3fn of blocks of 16 along the contracted dim, which isn't ragged"
        )
    if x.sizes and x.num_groups > _MOST_GROUPS:
        return Refusal(f"triton_gpu has no kernels for {x.num_groups} groups, more than {_MOST_GROUPS}")
    if call.out_batch and (call.batch(x) or 1) > _MOST_ELEMENTS:
        return Refusal(f"{call.batch(x)} batch elements, more than {_MOST_ELEMENTS}")
    if not call.out_batch and call.batched(x).offset:
        return Refusal("a sum over batch elements that hold different groups")
    if call.ending is not None and (refusal := _refuse_ending(call, x, target)):
        return refusal
    return tiles.refuse(call.options.tiles) if call.options.tiles else None


def _refuse_ending(call: Call, x: Operands, target: Target) -> Refusal | None:
    """Why there is no kernel for what is made of the accumulators."""
    if x.epilogue.existing is not None:
        return Refusal("triton_gpu has no kernels for an ending of what is added to")
    if not call.out_batch and call.batch(x) is not None:
        return Refusal("triton_gpu has no kernels for an ending of a sum over batch elements")
    up = x.epilogue.up
    # One kernel reads both by the same strides, and multiplies both the same way.
    if up is not None and jax.tree.map(_type, up) != jax.tree.map(_type, x.rhs):
        return Refusal("triton_gpu has no kernels for two matrices of different types")
    by_units = _by_units(call.terms(x), call, tiles.chip(target.device))
    if up is not None and by_units and not target.interpret and not triton_call.shares_scales():
        return Refusal("triton before 3.9 compiles no two products of rows whose scales tensor cores take")
    return None


def _type(x: Any) -> tuple[Any, Any]:
    return x.shape, jnp.dtype(x.dtype)


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
    if tile_r < of.tiled.least_r:
        return Refusal(f"tile_{r}={tile_r} of 4-bit rows.", f"It must be a power of two, {of.tiled.least_r} or more.")
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
    multiplying = config.warps * (2 if config.variant == "specialised" else 1)  # two groups of warps share a tile
    totals = tile_r * tile_c * of.tiled.sums // (32 * multiplying)
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
        "operands whose rows are not gathered": a.source is None,
        "operands whose rows begin at multiples of 16 bytes": of.turns or (_is_aligned(a) and _is_aligned(b)),
        "a result for each batch element": of.summed == 1,
        "a contraction that is ragged, or a multiple of its tile": k in sizes
        or a.extent(k) == b.extent(k) == a.extent(k) // tile_k * tile_k,
        "a result that is stored as it is": call.ending is None,
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


_UNIT_BLOCKS = {**dict.fromkeys(_FP8, 32), _FP4: 16}
"""Elements that share one of the scales that tensor cores multiply by."""


def _is_fp4(term: Term) -> bool:
    return jnp.dtype(term.data.dtype).name == _FP4


def _loaded(term: Term, contracted: str) -> Term:
    """As the kernel loads it, an aval if it is one: int4 as int8; 4-bit floats as bytes, in pairs along the contracted
    dim, which then is the last. That is how XLA has them in a GPU's memory, the first of two in the lower bits.
    """
    turned = _is_fp4(term) and term.letters[0] == contracted

    def load(data: Array, scales: Scales | None) -> tuple[Array, Scales | None]:
        if data.dtype == jnp.int4:
            return data.astype(jnp.int8), scales
        if turned:
            data, scales = data.mT, None if scales is None else scales.mT
        data = jnp.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, data.shape[-1] % 2)])
        return lax.bitcast_convert_type(data.reshape(*data.shape[:-1], -1, 2), jnp.uint8), scales

    if term.data.dtype != jnp.int4 and not _is_fp4(term):
        return term
    is_aval = isinstance(term.data, jax.ShapeDtypeStruct)
    data, scales = (partial(jax.eval_shape, load) if is_aval else load)(term.data, term.scales)
    return term._replace(data=data, scales=scales, letters=term.letters[::-1] if turned else term.letters)


def _has_tma(term: Term) -> bool:
    """Whether a descriptor can load its tiles, where there is TMA."""
    return _is_aligned(term) and term.source is None


def _is_aligned(term: Term) -> bool:
    """Whether each row begins at a multiple of 16 bytes, as TMA wants."""
    return term.data.shape[-1] * term.data.dtype.itemsize % 16 == 0


def _turns(terms: tuple[Term, Term], dot: _Dot, product: Product, chip: Chip) -> bool:
    """Whether the operands are handed to the kernel with their last two axes exchanged in memory, which XLA does in the
    pass that makes them, as a rule.

    Hopper multiplies 8 bits along the contiguous axis alone. What packs the contracted one would be turned tile by
    tile, through registers.
    """
    packed = all(term.letters[0] == product.contracted in product.ragged for term in terms)
    aligned = all(term.data.shape[-2] % 16 == 0 and term.source is None for term in terms)
    return packed and aligned and chip.capability == 90 and dot.dtype.itemsize == 1


def _turned(term: Term) -> Term:
    """With rows that lie as they do before they are turned; else XLA turns all that they are computed from, too."""
    data = with_layout_constraint(term.data, Layout(tuple(range(term.data.ndim))))
    return Term(data.mT, term.letters[::-1], None)


def _geometry(term: Term, kept: str, product: Product, turned: bool) -> dict[str, Any]:
    """Strides of batch, group, kept and contracted axis; extents of the last two; which of them is packed."""
    (p, q), ndim = map(term.extent, term.letters), product.ndim(term.letters)
    batch = math.prod(term.data.shape[-ndim:]) if term.data.ndim > ndim else 0
    first = term.letters[0] == kept  # the kept axis comes first
    packed = term.letters[1 if turned else 0]
    return {
        "STRIDES": (batch, p * q if ndim == 3 else 0, *((q, 1) if first else (1, q))),
        "EXTENTS": (p, q) if first else (q, p),
        "PACKED": ("kept" if packed == kept else "contracted") if packed in product.ragged else "",
    }


def _by_units(terms: tuple[Term, Term], call: Call, chip: Chip) -> bool:
    """Whether tensor cores multiply by the operands' scales. Blackwell's do: fp8 in blocks of 32 along the dim that is
    contracted, by powers of two; 4-bit floats in blocks of 16, by float8_e4m3fn, where no group has an odd end."""
    k = call.product.contracted

    def takes(term: Term) -> bool:
        name, scales = jnp.dtype(term.data.dtype).name, term.scales
        if scales is None or term.block(k) != _UNIT_BLOCKS.get(name, 0):
            return False
        if name in _FP8:
            return scales.e8m0
        return scales.values.dtype == jnp.float8_e4m3fn and k not in call.product.ragged

    return chip.capability in (100, 103) and all(map(takes, terms)) and _is_fp4(terms[0]) == _is_fp4(terms[1])


def _with_scales(term: Term, way: str, contracted: str) -> Term:
    """With scales as the kernel takes them: float32; or, for tensor cores, those of four blocks along the contracted
    axis as one number, so that one asynchronous copy fetches what a step has of a row. float8_e4m3fn as it is, powers
    of two as in float8_e8m0fnu."""
    if term.scales is None:
        return term
    if way != "unit":
        return term._replace(scales=term.scales.whole)
    scales, first = term.scales, term.letters[0] == contracted
    values = scales.values.mT if first else scales.values
    if values.dtype == jnp.float32:  # of 2**-127, which is subnormal, 0; of NaN 255
        eight = (lax.bitcast_convert_type(values, jnp.uint32) >> 23).astype(jnp.uint8)
    else:
        eight = lax.bitcast_convert_type(values, jnp.uint8)
    # Of packed groups a step may begin with any block, and reads on in the next four.
    eight = jnp.pad(eight, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % 4 + 4 * first)])
    fours = lax.bitcast_convert_type(eight.reshape(*values.shape[:-1], -1, 4), jnp.uint32)
    kept, along = scales.block[term.axis(contracted) - 1], 4 * (scales.block[term.axis(contracted)] or 0)
    along //= 2 if term.data.dtype == jnp.uint8 else 1  # in bytes
    block = (along, kept) if first else (kept, along)
    return term._replace(scales=replace(scales, values=fours.mT if first else fours, block=block))


def _source(term: Term) -> tuple[int, int] | None:
    """The batch stride of `source`, and the rows of the buffer."""
    if term.source is None:
        return None
    return term.source.shape[-1] if term.source.ndim > 1 else 0, term.data.shape[-2]


def _levels(term: Term | None) -> tuple[Any, Any]:
    """Scales of blocks, and of the whole tensor."""
    scales = None if term is None else term.scales
    return (None, None) if scales is None else (scales.values, scales.tensor)


def _scaling(term: Term, way: str, kept: str, product: Product) -> tuple[Any, ...]:
    """How the kernel finds and applies the scales: see `kernel._scale_row`."""
    if term.scales is None:
        return "", 0, 0, 1, 0, 1, 0, 0, False
    values, ndim = term.scales.values, product.ndim(term.letters)
    blocks = dict(zip(term.letters, term.scales.block, strict=True))
    strides = dict(zip(term.letters, (values.shape[-1], 1), strict=True))
    (contracted,) = set(term.letters) - {kept}
    packed = term.letters[0] if term.letters[0] in product.ragged else None
    # Scales of groups: by their number if sizes pack them in rows of `values`, by the place of their matrix else.
    group = (strides[packed] if blocks[packed] is None else 0) if packed else -math.prod(values.shape[-2:])
    batch = math.prod(values.shape[-ndim:]) if values.ndim > ndim else 0
    strides = {letter: 0 if blocks[letter] is None else stride for letter, stride in strides.items()}
    along = blocks[kept] or 1, strides[kept], blocks[contracted] or 1, strides[contracted]
    return way, batch, group, *along, int(batch > 0), contracted == packed


def _dot(a: Any, b: Any, ways: tuple[str, str], precision: Any, chip: Chip) -> _Dot:
    a, b, how = jnp.dtype(a), jnp.dtype(b), _PRECISIONS.get(precision_name(precision) or "", "tf32")
    if "tile" in ways:  # which scales, of float32, have been multiplied into
        return _Dot(jnp.dtype(jnp.float32), True, "tf32x3" if how == "tf32" else how, ways)
    if a == b == jnp.uint8:
        return _Dot(a, False, how, ways, each=2)
    if a.name in _FP8 and b.name in _FP8 and chip.capability >= 89:
        return _Dot(a, False, how, ways)  # tensor cores multiply either with either
    common = jnp.dtype(compute_dtype(a, b))
    if jnp.float16 in (a, b) and (a == b or 1 in (a.itemsize, b.itemsize)):
        common = jnp.dtype(jnp.float16)  # holds every int8 and fp8
    return _Dot(common, (a, b) != (common, common), how, ways)


def run(launch: Launch, x: Operands) -> Any:
    """Runs the kernel: see `ragged.backends.base`."""
    call, p, sizes, config = launch.call, launch.call.product, x.sizes, launch.config
    tiled, chip, dot, stored, held, elements, summed, turns, results = launch.details
    (r, c), k = p.out, p.contracted
    up, ending, given = x.epilogue.up, call.ending, call.terms(x)
    a, b = (_with_scales(_loaded(term, k), way, k) for term, way in zip(given, dot.ways, strict=True))
    up_term = None if up is None else Term(up.data, given[1].letters, up.scales)
    up_term = None if up_term is None else _with_scales(_loaded(up_term, k), dot.ways[1], k)
    packed, num_groups, (rows, columns) = r in sizes, x.num_groups, call.shape[-2:]
    has_tma, (tile_r, tile_c, tile_k) = chip.has_tma and config.tma, config.along(r + c + k)
    turned = turns and has_tma  # pointers to what begins at any byte would be to single ones
    x_term, y_term = (_turned(a), _turned(b)) if turned else (a, b)

    # 1. The kernel's parameters.
    biases = {"bias": x.epilogue.bias, "up_bias": x.epilogue.up_bias}
    batch = (elements,) if call.out_batch and call.batch(x) is not None else ()
    out = jax.ShapeDtypeStruct((*batch, *call.shape), stored)
    arrays = {
        "a": x_term.data,
        "b": y_term.data,
        **{f"sizes_{name}": sizes.get(letter) for name, letter in (("r", r), ("c", c), ("k", k))},
        "offset": x.offset,
        **dict(zip(("a_scales", "a_tensor"), _levels(a), strict=True)),
        **dict(zip(("b_scales", "b_tensor"), _levels(b), strict=True)),
        "a_source": a.source,
        "up": None if up_term is None else up_term.data,
        **dict(zip(("up_scales", "up_tensor"), _levels(up_term), strict=True)),
        **{name: None if bias is None else bias.astype(jnp.float32) for name, bias in biases.items()},
    }
    stores = dict.fromkeys(("out", "z", "up_z"), False)
    stores |= zip(stores, (True,) if ending is None else ending.stored, strict=False)
    strides = [0 if letter not in sizes or sizes[letter].ndim == 1 else num_groups for letter in (r, c, k)]
    static = {
        "GROUPS": num_groups,
        "HELD": held,
        "BATCH": (*strides, 0 if x.offset is None else x.offset.ndim),
        **{f"A_{key}": value for key, value in _geometry(x_term, r, p, turned).items()},
        **{f"B_{key}": value for key, value in _geometry(y_term, c, p, turned).items()},
        "A_SCALING": _scaling(a, dot.ways[0], r, p),
        "A_SOURCE": _source(a),
        "B_SCALING": _scaling(b, dot.ways[1], c, p),
        "A_TMA": math.prod(a.data.shape[:-2]) if has_tma and _has_tma(x_term) else 0,
        "B_TMA": math.prod(b.data.shape[:-2]) if has_tma and _has_tma(y_term) else 0,
        "OUT_STRIDES": (rows * columns * (1 if packed else held), 0 if packed else rows * columns, columns),
        "OUT_EXTENTS": (rows, columns),
        "SUMMED": summed,
        "TILE_R": tile_r,
        "TILE_C": tile_c,
        "TILE_K": tile_k // dot.each,
        "BAND": config.band,
        "WIDTH": max(16, 1 << (num_groups - 1).bit_length()),
        "COMMON": dot.dtype if dot.cast else None,
        "ACCUMULATOR": dot.accumulator,
        "PRECISION": dot.precision,
        "ADDS": x.epilogue.existing is not None,
        "ACTIVATION": None if ending is None else ending.activation or "",
        "BIAS_STRIDES": tuple(columns if bias is not None and bias.ndim > 1 else 0 for bias in biases.values()),
        "LONGEST": _LONGEST_FP8_SUM if dot.is_fp8 and tile_k > _LONGEST_FP8_SUM else None,
        "SLICE": max(16, _SLICE * 32 * config.warps // (call.num_products * tile_r)),
        "VARIANT": config.variant,
    }

    # 2. What TMA loads, if the host describes it: whole tiles.
    def described(name: str, term: Term | None, side: str, tile: int) -> triton_call.Tiles | None:
        if term is None or not static[f"{side}_TMA"] or config.variant == "specialised":
            return None
        shape = (tile, static["TILE_K"]) if static[f"{side}_STRIDES"][3] == 1 else (static["TILE_K"], tile)
        return triton_call.Tiles.of_matrices(name, term.data.shape, shape)

    by_host = {
        "a_tiles": described("a", x_term, "A", tile_r),
        "b_tiles": described("b", y_term, "B", tile_c),
        "up_tiles": described("up", up_term, "B", tile_c),
    }

    # 3. The launch: as many programs as the chip runs at a time, or as there can be tiles.
    programs = max(1, chip.multiprocessors * tiles.resident(tiled, config, chip) // elements)
    existing = x.epilogue.existing
    existing = None if existing is None else existing.astype(stored).reshape(out.shape)
    is_transposed = launch.kernel == "grouped_matmul" and given[1].letters[1] == k
    name, tile = launch.kernel + "_transposed" * is_transposed, {r: tile_r, c: tile_c, k: tile_k}
    dtypes = (given[0].data.dtype, given[1].data.dtype, stored)
    with jax.named_scope(f"ragged_{name}"):
        made = triton_call.call(
            arrays,
            {key: out if is_stored else None for key, is_stored in stores.items()},
            static,
            tiles=by_host,
            existing=existing,
            grid=(min(results, programs), elements),
            config=config,
            name=f"{name}_{tile_r}x{tile_k}x{tile_c}",
            metadata=kernel_metadata((given[0].letters, given[1].letters, p.out), tile, dtypes, held),
            cost={"flops": launch.flops, "bytes_accessed": launch.bytes_accessed},
            chip=chip,
            interpret=bool(launch.target.interpret),
        )
    results = [each.astype(call.dtype) for each in made]
    return results[0] if ending is None else results
