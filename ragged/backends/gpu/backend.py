"""The backend for NVIDIA's GPUs: all grouped products by one Triton kernel, `kernel.grouped_product`.

On Hopper and Blackwell, TMA loads the tiles of operands whose rows begin at multiples of 16 bytes. `cp.async` loads
other tiles, partial ones and gathered rows, and all tiles on other GPUs.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from ragged.backends import base
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
    scale_modes,
    spans,
)
from ragged.backends.gpu import call as triton_call
from ragged.backends.gpu import tiles
from ragged.backends.gpu.arguments import Dot, Sizes, Tiles, buffer, result, scaling
from ragged.backends.gpu.functions import FORMULAS
from ragged.backends.gpu.tiles import Chip, Problem
from ragged.core.formats import FORMATS, accumulator_dtype, bits, compute_dtype
from ragged.core.scales import Scales, zeros_of
from ragged.product.config import GpuConfig
from ragged.product.function import Function, elementwise
from ragged.product.layout import Product
from ragged.product.operands import Call, KernelOperand, Operands, precision_name

_FP8, _FP4 = ("float8_e4m3fn", "float8_e5m2"), "float4_e2m1fn"
_STORED = ("bfloat16", "float16", "float32", "int32")
"""Result dtypes that the kernel writes. XLA rounds results of 8 bits, so that they saturate as JAX's casts do."""

_FAST_FP8 = "any_f8_any_f8_f32_fast_accum"
"""The precision with which tensor cores add up all fp8 products of a result, in about 14 bits on Hopper."""

_PRECISIONS = {
    **dict.fromkeys(("none", "default", "fastest", "tensorfloat32", "bfloat16"), "tf32"),
    **dict.fromkeys(("high", "bfloat16_3x"), "tf32x3"),
    **dict.fromkeys(("highest", "float32"), "ieee"),
    _FAST_FP8: "tf32",
}
"""Triton's precision for float32, keyed by JAX's. "tf32" is XLA's default on a GPU, too."""

_UNITS = {name: known.gpu for name, known in FORMATS.items()}
_TAKES = (*KERNELS, "scales", "offset", "batch", "existing", "bias", "up", "up_bias")
_TAKES += ("grouped_matmul with an epilogue", "batched_matmul with an epilogue")

_MAX_GROUPS = 4096
"""Largest number of groups: each program has a prefix sum over the sizes in registers."""

_MAX_EXTENT = 2**30
"""Largest extent: the kernel adds two positions along a dim, or a tile to one, in int32. See also `Tiles.of_rows`."""

_MAX_ELEMENTS = 65535
"""Largest batch: the limit of a CUDA grid's second dim."""

_LONGEST_FP8_SUM = 128
"""Number of fp8 products that tensor cores add up (on Hopper in about 14 bits) before a float32 accumulator does."""


class _Dot(NamedTuple):
    """How two tiles are multiplied. The kernel gets a part of this, `arguments.Dot`."""

    dtype: Any  # of both tiles; if both are fp8, of `a`
    cast: bool  # whether a tile must be cast to `dtype`
    precision: str  # for float32: "tf32", "tf32x3" or "ieee"
    modes: tuple[str, str]  # scale modes of both operands
    per_element: int = 1  # numbers in a loaded element: 2 for 4-bit floats, loaded as bytes
    fast: bool = False  # whether tensor cores add up all fp8 products

    @property
    def is_fp8(self) -> bool:
        return self.dtype.name in _FP8

    @property
    def accumulator(self) -> Any:
        return jnp.dtype(jnp.int32 if self.dtype == jnp.int8 and "step" not in self.modes else jnp.float32)


class _Details(NamedTuple):
    """`Launch.details` of this backend."""

    tiled: Problem
    chip: Chip
    dot: _Dot
    stored: Any  # the dtype that the kernel writes
    matrices: int  # number of local groups
    elements: int  # batch elements of the result
    summed: int  # batch elements that are summed into one result
    transposes: bool  # see `_transposes`
    result_tiles: int = 0  # upper bound on the tiles of one element's result


def plan(call: Call, x: Operands, target: Target) -> Launch | Refusal:
    """Chooses the configuration."""
    if refusal := _refuse(call, x, target):
        return refusal
    p, sizes, chip = call.product, x.sizes, tiles.chip(target.device)
    (r, c), k = p.out, p.contracted
    a, b = call.kernel_operands(x)
    extent = {r: call.shape[-2], c: call.shape[-1], k: min(a.extent(k), b.extent(k))}
    by_tensor_cores = _scaled_by_tensor_cores((a, b), call, chip)
    a, b = (_loaded(operand, k, k in sizes, chip) for operand in (a, b))
    matrices = call.num_local_groups(x)
    batch, sums = call.batch(x), not call.out_batch
    elements, summed = (1, batch or 1) if sums else (batch or 1, 1)

    stored = call.dtype if jnp.dtype(call.dtype).name in _STORED else accumulator_dtype(call.dtype)
    modes, min_k = _modes((a, b), call, x, by_tensor_cores)
    dot = _dot((a, b), modes, call.options.precision, chip)
    transposes = _transposes((a, b), dot, p, chip)
    # Extents of the mean group: its share of the packed rows, and the whole extent of other letters.
    rows = {letter: operand.extent(letter) for operand in (a, b) if (letter := operand.letters[0]) in sizes}
    rows |= {r: call.shape[-2]} if r in sizes else {}
    mean = {z: max(1, min(n, -(-rows[z] // x.num_groups))) if z in rows else n for z, n in extent.items()}
    tiled = Problem(
        mean[r],
        mean[c],
        mean[k],
        groups=min(matrices, call.shape[-2]) if r in sizes else matrices,  # no more than that have rows
        itemsize=dot.dtype.itemsize / dot.per_element,
        result=jnp.dtype(stored).itemsize,
        min_k=min_k,
        step_accumulator="step" in modes or (dot.is_fp8 and not dot.fast),
        slow=dot.dtype == jnp.float32 and dot.precision == "ieee",
        by_thread=not (chip.has_tma and (transposes or (_is_aligned(a) and _is_aligned(b)))),
        scaled=_TENSOR_CORE_BLOCKS[call.kernel_operands(x)[0].data.dtype.name] if by_tensor_cores else 0,
        ragged=len(sizes) == 3,
        letters=r + c + k,
        flat=summed == 1 and _is_flat((a, b), dot, call, chip),
        products=call.num_products,
        results=call.num_stored,
        instructions=call.epilogue.instructions if call.epilogue else 0,
        splits=k not in sizes and call.epilogue is None,
        unpacks=(any(each.decodes for each in (a, b)) and dot.dtype.itemsize == 4) or ("step" in modes and dot.cast),
    )
    details = _Details(tiled, chip, dot, jnp.dtype(stored), matrices, elements, summed, transposes)
    # In the mode "step", a step must not cross the end of a block of scales. In other modes, `block` is 0.
    block = math.gcd(*(operand.block(k) or 0 for operand, mode in zip((a, b), modes, strict=True) if mode == "step"))

    def in_blocks(config: GpuConfig) -> GpuConfig:
        return replace(config, **{k: math.gcd(config.along(k)[0], block)})  # `gcd(tile, 0)` is the tile

    chosen = choice(
        call,
        x,
        target,
        "triton_gpu",
        illegal=lambda config: _illegal(config, details, block, call, target),
        tiled=lambda tile: in_blocks(tiles.fit(tiled, (tile[r], tile[c], tile[k]), chip)),
        model=lambda: in_blocks(tiles.choose(tiled._replace(splits=tiled.splits and elements == 1), chip)),
    )
    if isinstance(chosen, Refusal):
        return chosen
    config, source = chosen
    tile_r, tile_c = config.along(r + c)
    rows_of_tiles = -(-call.shape[-2] // tile_r)
    # Packed rows of a result are the groups and two gaps. All of these except one may add a partial tile.
    count = rows_of_tiles + min(matrices, call.shape[-2]) + 1 if r in sizes else rows_of_tiles * matrices
    result_tiles = count * -(-call.shape[-1] // tile_c)
    steps = int(sum(_parts(-(-extent[k] // config.along(k)[0]), config.splits)))
    # In a wgrad, groups share the contracted rows.
    visits = result_tiles // matrices * (steps + matrices) if p.ragged == k else result_tiles * steps
    return Launch(
        "triton_gpu",
        p.kernel,
        call,
        target,
        config=config,
        source=source,
        visits=elements * summed * visits,
        details=details._replace(result_tiles=result_tiles),
        **cost(call, x),
    )


def _modes(
    loaded: tuple[KernelOperand, KernelOperand], call: Call, x: Operands, by_tensor_cores: bool
) -> tuple[tuple[str, str], int]:
    """`(modes, min_k)`: scale modes, and the smallest tile of the contracted letter."""
    min_k = tiles.min_k(max(8 * each.data.dtype.itemsize // _per_byte(each) for each in loaded))
    if by_tensor_cores:
        return ("unit", "unit"), min_k
    min_k = max(min_k, 32) if any(_per_byte(each) > 1 for each in loaded) else min_k  # TMA loads at least 16 bytes
    # 4-bit floats times their scales are exact in few bits, so tiles are multiplied by them.
    return scale_modes(call, x, None if _FP4 in [each.decodes for each in loaded] else min_k), min_k


def candidates(launch: Launch, x: Operands) -> list[GpuConfig]:
    """Other configurations to measure, in order."""
    return tiles.ranked(launch.details.tiled, launch.details.chip)


def work(launch: Launch, x: Operands) -> Work:
    """Counts the tiles of the result, and their steps."""
    call, p, config = launch.call, launch.call.product, launch.config
    (r, c), k = p.out, p.contracted
    # The result's tiles cover all rows of a group, even if an operand that doesn't pack them has fewer.
    groups = spans(call, x) | spans(call, x, call.buffers(x)[-1:])
    tile_r, tile_c, tile_k = config.along(r + c + k)
    size = {letter: end - first for letter, (first, end) in groups.items()}
    rows, columns, steps = -(-size[r] // tile_r), -(-call.shape[-1] // tile_c), -(-size[k] // tile_k)
    visits, idle = (int(sum(rows * each)) for each in _parts(steps, config.splits))
    if r in p.ragged:  # rows around the local groups become zeros
        gaps = -(-groups[r][0][0] // tile_r) + -(-(call.shape[-2] - groups[r][1][-1]) // tile_r)
        idle += int(gaps) * config.splits
    letter = r if r in p.ragged else k if k in p.ragged else ""
    tile = tile_r if letter == r else tile_k
    tiles = [
        (group, int(at), tile)
        for group, (first, end) in enumerate(zip(*groups[letter or r], strict=True), int(x.offset or 0))
        for at in range(first, end, tile)
        if letter
    ]
    visits, idle = visits * columns, idle * columns
    flops = 2 * visits * tile_r * tile_c * tile_k * call.num_products
    return Work(visits, idle, flops, letter, tuple(tiles))


def _parts(steps: Any, splits: int) -> tuple[Any, Any]:
    """`steps`, and how many parts of the contracted dim have none: these write zeros. Ints, or arrays of them."""
    return steps, splits + -steps // np.maximum(-(-steps // splits), 1)


def _refuse(call: Call, x: Operands, target: Target) -> Refusal | None:
    """`Refusal` if the kernel doesn't support the product or its tiling, else None."""
    if target.portable:
        return Refusal("an export rejects Triton's custom calls, unless `backend='triton_gpu'` requests them")
    if not target.interpret and (missing := triton_call.missing()):
        return Refusal(missing)
    if refusal := refuse("triton_gpu", _UNITS, _TAKES, _PRECISIONS, call, x, target, FORMULAS):
        return refusal
    dtypes = [each.data.dtype.name for each in call.kernel_operands(x)]
    if precision_name(call.options.precision) == _FAST_FP8 and not {*dtypes} <= {*_FP8}:
        return Refusal(f"triton_gpu has precision {_FAST_FP8.upper()} only for fp8 × fp8, not {' × '.join(dtypes)}")
    capability = tiles.chip(target.device).capability
    if capability < 80:
        return Refusal(f"triton_gpu has no kernels for compute capability {capability / 10}, below 8.0")
    if any(map(_is_fp4, call.kernel_operands(x))) and call.product.contracted in call.product.ragged:
        return Refusal(f"triton_gpu multiplies {_FP4} only if the contracted dim isn't ragged: two share a byte")
    if x.sizes and x.num_groups > _MAX_GROUPS:
        return Refusal(f"triton_gpu has no kernels for {x.num_groups} groups, more than {_MAX_GROUPS}")
    extents = [*call.shape, *(n for each in call.kernel_operands(x) for n in map(each.extent, each.letters))]
    if max(extents) > _MAX_EXTENT:
        return Refusal(f"triton_gpu has no kernels for a dim of {max(extents)}, more than {_MAX_EXTENT}")
    if call.out_batch and (call.batch(x) or 1) > _MAX_ELEMENTS:
        return Refusal(f"{call.batch(x)} batch elements, more than {_MAX_ELEMENTS}")
    if not call.out_batch and call.batched(x).offset:
        return Refusal("triton_gpu has no kernels for a sum over batch elements with different group offsets")
    if call.epilogue is not None and (refusal := _refuse_epilogue(call, x, target)):
        return refusal
    return tiles.refuse(call.options.tiles) if call.options.tiles else None


def _refuse_epilogue(call: Call, x: Operands, target: Target) -> Refusal | None:
    """`Refusal` if the kernel doesn't support the product's `EpilogueSpec`, else None."""
    if x.epilogue.existing is not None:
        return Refusal("triton_gpu has no kernels for an epilogue together with `existing_out`")
    if not call.out_batch and call.batch(x) is not None:
        return Refusal("triton_gpu has no kernels for an epilogue of a sum over batch elements")
    columns = call.columns
    if columns == "halves" and call.shape[-1] * x.rhs.data.dtype.itemsize % 16:
        return Refusal("triton_gpu reads halves of an array's columns only if they begin at multiples of 16 bytes")
    up = x.epilogue.up
    # The kernel has one set of strides, scales and dtypes for `rhs` and `up`.
    if up is not None and jax.tree.map(_type, up) != jax.tree.map(_type, x.rhs):
        return Refusal("triton_gpu has no kernels for two matrices of different shapes or dtypes")
    by_tensor_cores = _scaled_by_tensor_cores(call.kernel_operands(x), call, tiles.chip(target.device))
    if up is not None and by_tensor_cores and not target.interpret and not triton_call.shares_scales():
        return Refusal("triton before 3.9 can't compile a gated product whose scales are applied by tensor cores")
    return None


def _type(x: Any) -> tuple[Any, Any]:
    return x.shape, jnp.dtype(x.dtype)


def _illegal(config: GpuConfig, details: _Details, block: int, call: Call, target: Target) -> Refusal | None:
    """`Refusal` if the kernel can't have this configuration, else None."""
    (r, c), k = call.product.out, call.product.contracted
    if refusal := tiles.refuse(dict(zip("mkn", config.along("mkn"), strict=True))):
        return refusal
    tile_r, tile_c, tile_k = config.along(r + c + k)
    tiled = details.tiled
    if tile_r < tiled.min_r:
        reason = f"tile_{r}={tile_r} is too small for 4-bit operands."
        return Refusal(reason, f"It must be a power of two, {tiled.min_r} or more.")
    if tile_k < tiled.min_k or (block and block % tile_k):
        divides = f", and divide {block}, the extent of a block of scales" if block else ""
        return Refusal(
            f"tile_{k}={tile_k} is illegal for the contracted dim.",
            f"It must be a power of two, {tiled.min_k} or more{divides}.",
        )
    assert config.warps is not None and config.splits is not None
    if config.splits > 1 and not tiled.splits:
        what = "whose contracted dim is ragged" if k in call.product.ragged else "with an epilogue"
        return Refusal(f"splits={config.splits} is illegal for a product {what}.", "It must be 1.")
    if details.elements * config.splits > _MAX_ELEMENTS:
        reason = f"splits={config.splits} takes more than {_MAX_ELEMENTS} rows of programs: {details.elements} each."
        return Refusal(reason, f"It must be {_MAX_ELEMENTS // details.elements} or less.")
    # An error if the GPU is known: if XLA ran the product, the caller would measure another program.
    is_known = target.device is not None
    registers = tile_r * tile_c * tiled.sums // (32 * config.warps)
    shared = tiles.shared(tiled, config, details.chip)
    for what, needed, available in (
        ("bytes of shared memory", shared, details.chip.shared),
        ("registers per thread for sums", registers, tiles.MAX_SUM_REGISTERS),
    ):
        if needed > available:
            hint = "Take smaller tiles, fewer stages or more warps." if is_known else ""
            return Refusal(f"{config} takes {needed} {what}, of {available}.", hint)
    return None


_TENSOR_CORE_BLOCKS = {**dict.fromkeys(_FP8, 32), _FP4: 16}
"""Extents of the blocks of scales that tensor cores apply, keyed by the operand's dtype."""


def _is_fp4(operand: KernelOperand) -> bool:
    return jnp.dtype(operand.data.dtype).name == _FP4


def _loaded(operand: KernelOperand, contracted: str, is_ragged: bool, chip: Chip) -> KernelOperand:
    """The operand, arrays or avals, in the dtype that the kernel loads.

    4-bit numbers become bytes: pairs along the contracted dim, which comes last, with the first of two in the lower
    bits. This is XLA's layout of 4-bit numbers in a GPU's memory. If the contracted dim is ragged, int4 becomes int8.
    Before Ada and Hopper, GPUs can't convert float8_e4m3fn: its bits become bytes.
    """
    name = jnp.dtype(operand.data.dtype).name
    if name == "float8_e4m3fn" and chip.capability < 89:
        return _mapped(operand._replace(decodes=name), lambda data, scales: (bits(data, jnp.uint8), scales))
    if name not in (_FP4, "int4", "uint4"):
        return operand
    if is_ragged:
        return _mapped(operand, lambda data, scales: (data.astype(jnp.int8), scales))
    transposed = operand.letters[0] == contracted

    def load(data: Array, scales: Scales | None) -> tuple[Array, Scales | None]:
        if transposed:
            data, scales = data.mT, None if scales is None else scales.mT
        data = jnp.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, data.shape[-1] % 2)])
        return lax.bitcast_convert_type(data.reshape(*data.shape[:-1], -1, 2), jnp.uint8), scales

    letters = operand.letters[::-1] if transposed else operand.letters
    return _mapped(operand._replace(letters=letters, decodes=name), load)


def _mapped(operand: KernelOperand, function: Callable[..., tuple[Array, Scales | None]]) -> KernelOperand:
    """The operand with `function(data, scales)`, of arrays or avals."""
    is_aval = isinstance(operand.data, jax.ShapeDtypeStruct)
    data, scales = (partial(jax.eval_shape, function) if is_aval else function)(operand.data, operand.scales)
    return operand._replace(data=data, scales=scales)


def _per_byte(operand: KernelOperand) -> int:
    """How many numbers an element of the operand holds, as it is loaded."""
    return 2 if operand.decodes in (_FP4, "int4", "uint4") else 1


def _has_tma(operand: KernelOperand) -> bool:
    """Whether TMA can load the operand's tiles, if the GPU has it."""
    return _is_aligned(operand) and operand.source is None


def _is_aligned(operand: KernelOperand) -> bool:
    """Whether each row begins at a multiple of 16 bytes."""
    return operand.data.shape[-1] * operand.data.dtype.itemsize % 16 == 0


def _is_flat(operands: tuple[KernelOperand, KernelOperand], dot: _Dot, call: Call, chip: Chip) -> bool:
    """True if one loop of the kernel can run over the steps of all tiles. Its loads then run ahead of a tile's end.

    TMA must load every tile, also the last one of a group, and Hopper's tensor cores must read both tiles as they are.
    Scales must multiply nothing but the sum. If there were two sums, ptxas would serialise the tensor cores'
    instructions.
    """
    k = call.product.contracted
    first = [operand.letters[0] == k for operand in operands]
    # Rows of a tile, not columns, can end with a group: see `Tiles.of_rows`.
    ends = all(first) or k not in call.product.ragged
    as_stored = not dot.cast and (dot.dtype.itemsize == 2 or (dot.is_fp8 and dot.fast and not any(first)))
    scales_sum = {*dot.modes} <= {"", "total"} and call.num_products == 1
    return chip.capability == 90 and ends and as_stored and scales_sum and all(map(_has_tma, operands))


def _transposes(operands: tuple[KernelOperand, KernelOperand], dot: _Dot, product: Product, chip: Chip) -> bool:
    """Whether both operands are transposed in memory before the kernel.

    For Hopper's tensor cores, the contracted axis of 8-bit operands must be contiguous. If it isn't, the kernel would
    transpose each tile, through registers. XLA usually fuses a transpose in memory with the operation before it.
    """
    packed = all(operand.letters[0] == product.contracted in product.ragged for operand in operands)
    # Rows of the transposed arrays must begin at multiples of 16 bytes, for TMA.
    aligned = all(operand.data.shape[-2] % 16 == 0 and operand.source is None for operand in operands)
    return packed and aligned and chip.capability == 90 and dot.dtype.itemsize == 1


def _transposed(operand: KernelOperand) -> KernelOperand:
    """The operand without scales, transposed in memory.

    Without the constraint, XLA might instead transpose arrays from which it computes the operand.
    """
    data = with_layout_constraint(operand.data, Layout(tuple(range(operand.data.ndim))))
    return KernelOperand(data.mT, operand.letters[::-1], None)


def _scaled_by_tensor_cores(operands: tuple[KernelOperand, KernelOperand], call: Call, chip: Chip) -> bool:
    """Whether tensor cores apply the operands' scales.

    Blackwell's do for two formats: fp8 in blocks of 32 along the contracted dim, scaled by powers of two; and 4-bit
    floats in blocks of 16, scaled by float8_e4m3fn. With 4-bit floats, the contracted dim can't be ragged, because a
    group must not end inside a byte.
    """
    k = call.product.contracted

    def is_supported(operand: KernelOperand) -> bool:
        name, scales = jnp.dtype(operand.data.dtype).name, operand.scales
        if scales is None or operand.block(k) != _TENSOR_CORE_BLOCKS.get(name, 0):
            return False
        if name in _FP8:
            return scales.e8m0
        return scales.values.dtype == jnp.float8_e4m3fn and k not in call.product.ragged

    return (
        chip.capability in (100, 103)
        and all(map(is_supported, operands))
        and _is_fp4(operands[0]) == _is_fp4(operands[1])
    )


def _with_scales(operand: KernelOperand, mode: str, contracted: str, chip: Chip) -> KernelOperand:
    """The operand with scales as the kernel loads them.

    - Scales that multiply the sum are float32.
    - Other scales of 8 bits keep their bits, as uint8 if the GPU can't convert them.
    - In the mode "unit", a uint32 has the 8-bit scales of four blocks: one asynchronous copy fetches a row's scales for
      a step.
    """
    if operand.scales is None:
        return operand
    if mode != "unit":
        scales = operand.scales
        # The second level then multiplies the sum.
        by_levels = scales.tensor is not None and mode == "tile" and operand.decodes == _FP4
        if mode != "total" and (by_levels or scales.values.dtype == jnp.float8_e8m0fnu):
            is_converted = scales.values.dtype == jnp.float8_e4m3fn and chip.capability >= 89
            scales = scales if is_converted else replace(scales, values=bits(scales.values, jnp.uint8))
        else:
            scales = scales.whole
        zeros = None if scales.zeros is None else scales.zeros.astype(jnp.int16)
        return operand._replace(scales=replace(scales, zeros=zeros))
    scales, first = operand.scales, operand.letters[0] == contracted
    values = scales.values.mT if first else scales.values
    if values.dtype == jnp.float32:  # the exponent: 0 for the subnormal 2**-127, 255 for NaN
        eight_bits = (bits(values, jnp.uint32) >> 23).astype(jnp.uint8)
    else:
        eight_bits = bits(values, jnp.uint8)
    # A step of a packed group may begin with any of four blocks, so the kernel also reads the next four.
    eight_bits = jnp.pad(eight_bits, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % 4 + 4 * first)])
    fours = lax.bitcast_convert_type(eight_bits.reshape(*values.shape[:-1], -1, 4), jnp.uint32)
    outer, along = scales.block[operand.axis(contracted) - 1], 4 * (scales.block[operand.axis(contracted)] or 0)
    along //= _per_byte(operand)  # in bytes
    block = (along, outer) if first else (outer, along)
    return operand._replace(scales=replace(scales, values=fours.mT if first else fours, block=block))


def _dot(operands: tuple[KernelOperand, KernelOperand], modes: tuple[str, str], precision: Any, chip: Chip) -> _Dot:
    """The dot of tiles of both operands, as they are loaded."""
    decodes, stored = [each.decodes for each in operands], [each.data.dtype for each in operands]
    triton_precision = _PRECISIONS.get(precision_name(precision) or "", "tf32")
    if decodes == [_FP4] * 2 and "unit" in modes:
        return _Dot(jnp.dtype(jnp.uint8), False, triton_precision, modes, per_element=2)
    is_decoded = _FP4 in decodes
    few_bits = jnp.float16 if jnp.float16 in stored and "tile" not in modes else jnp.bfloat16
    tile_dtypes = {_FP4: few_bits, "int4": jnp.int8, "uint4": jnp.int8, "float8_e4m3fn": jnp.float8_e4m3fn}
    a, b = (jnp.dtype(tile_dtypes.get(name, dtype)) for name, dtype in zip(decodes, stored, strict=True))
    # Integers of 8 bits minus zero points of 8 bits are exact in it.
    b, subtracts = (jnp.dtype(few_bits), True) if zeros_of(operands[1]) is not None else (b, False)
    if "tile" in modes and not (is_decoded and all(map(_is_exact, operands, modes))):
        # Scaled tiles are float32, and "tf32" would lose bits of them.
        return _Dot(jnp.dtype(jnp.float32), True, "tf32x3" if triton_precision == "tf32" else triton_precision, modes)
    if a.name in _FP8 and b.name in _FP8 and chip.capability >= 89:
        # Tensor cores multiply any pair of fp8 formats.
        return _Dot(a, False, triton_precision, modes, fast=precision_name(precision) == _FAST_FP8)
    common = jnp.dtype(compute_dtype(a, b))
    if jnp.float16 in (a, b) and (a == b or 1 in (a.itemsize, b.itemsize)):
        common = jnp.dtype(jnp.float16)  # float16 has all values of int8 and fp8
    return _Dot(common, is_decoded or subtracts or (a, b) != (common, common), triton_precision, modes)


def _is_exact(operand: KernelOperand, mode: str) -> bool:
    """Whether the operand's values are exact in bfloat16 and TF32. In the mode "tile", they include the scales."""
    scales, is_narrow = operand.scales, operand.data.dtype.itemsize == 1
    if mode != "tile" or scales is None:
        return is_narrow or operand.data.dtype in (jnp.bfloat16, jnp.float16)
    # A 4-bit float has two significant bits and a float8_e4m3fn four, so their product has at most six.
    is_fp4 = operand.decodes == _FP4
    return is_narrow and (scales.e8m0 or (is_fp4 and scales.values.dtype == jnp.float8_e4m3fn))


def run(launch: Launch, x: Operands) -> Any:
    """Computes the product."""
    call, p, config, details = launch.call, launch.call.product, launch.config, launch.details
    tiled, chip, stored, elements = details.tiled, details.chip, details.stored, details.elements
    operands, (lhs, rhs) = _operands(launch, x), call.kernel_operands(x)
    existing, splits, parts, dtype = x.epilogue.existing, config.splits, (), stored
    if splits > 1:  # The kernel stores the sums of the parts. XLA adds them up, and the existing values.
        parts, dtype = (splits,), _sum_dtype(details.dot)
        x = x._replace(epilogue=x.epilogue._replace(existing=None))
    static = _static(launch, x, operands)
    batch = (elements,) if call.out_batch and call.batch(x) is not None else ()
    out: Any = jax.ShapeDtypeStruct((*batch, *parts, *call.shape), dtype)
    if x.epilogue.existing is not None:
        out = x.epilogue.existing.astype(dtype).reshape(out.shape)
    is_stored = (True,) if call.epilogue is None else call.epilogue.stored
    outs = {name: out if it else None for name, it in zip_longest(("out", "z", "up_z"), is_stored)}

    # As many programs as the chip runs at a time, or fewer.
    resident = max(1, chip.multiprocessors * tiles.resident(tiled, config, chip) // (elements * splits))
    is_transposed = launch.kernel == "grouped_matmul" and rhs.letters[1] == p.contracted
    name = launch.kernel + "_transposed" * is_transposed
    tile = {letter: config.along(letter)[0] for letter in "mkn"}
    axes, dtypes = (lhs.letters, rhs.letters, p.out), (lhs.data.dtype, rhs.data.dtype, stored)
    with jax.named_scope(f"ragged_{name}"):
        results = triton_call.call(
            _arrays(x, p, operands, static),
            outs,
            static,
            grid=(min(details.result_tiles, resident), elements * splits),
            config=config,
            name=f"{name}_{'x'.join(str(tile[letter]) for letter in (p.out[0], p.contracted, p.out[1]))}",
            metadata=kernel_metadata(axes, tile, dtypes, details.matrices),
            cost={"flops": launch.flops, "bytes_accessed": launch.bytes_accessed},
            chip=chip,
            interpret=bool(launch.target.interpret),
        )
    if splits > 1:
        # One addition after another: XLA's own sums may be in any order.
        first, *rest = (lax.index_in_dim(results[0], i, len(batch), keepdims=False) for i in range(splits))
        results = [base.apply_epilogue(call, sum(rest, first), existing)]
    results = [each.astype(call.dtype) for each in results]
    return results[0] if call.epilogue is None else results


class _Operand(NamedTuple):
    """One of the kernel's operands `a`, `b` and `up`."""

    stored: KernelOperand  # as the kernel reads it; if it is transposed in memory, without scales
    given: KernelOperand  # before it is transposed, with scales


def _operands(launch: Launch, x: Operands) -> list[_Operand]:
    """`a`, `b` and, if there is one, `up`."""
    call, details, k, up = launch.call, launch.details, launch.call.product.contracted, x.epilogue.up
    a, b = call.kernel_operands(x)
    operands = [a, b] if up is None else [a, b, KernelOperand(up.data, b.letters, up.scales)]
    # `up` is the other half of the same array.
    operands += [b] * (call.columns == "halves")
    a_mode, b_mode = details.dot.modes
    operands = [
        _with_scales(_loaded(operand, k, k in x.sizes, details.chip), mode, k, details.chip)
        for operand, mode in zip(operands, (a_mode, b_mode, b_mode), strict=False)
    ]
    # Without TMA, a transposed operand would be loaded byte by byte, as its groups begin at any byte.
    transposed = details.transposes and details.chip.has_tma and launch.config.tma
    return [_Operand(_transposed(operand) if transposed else operand, operand) for operand in operands]


def _static(launch: Launch, x: Operands, operands: list[_Operand]) -> dict[str, Any]:
    """The kernel's static arguments, keyed by parameter."""
    call, p, config, details = launch.call, launch.call.product, launch.config, launch.details
    dot = details.dot
    tile_r, tile_c, tile_k = config.along(p.out + p.contracted)
    r_stride, c_stride, k_stride = (
        x.num_groups if z in x.sizes and x.sizes[z].ndim > 1 else 0 for z in (*p.out, p.contracted)
    )
    flat = details.tiled.flat and bool(config.tma) and config.splits == 1
    # Slices of a tile are stored one after another: a whole one needs more shared memory than the next tile's loads
    # leave, and more registers than an epilogue or the scales leave.
    in_slices = flat or details.tiled.scaled or call.epilogue is not None
    columns = tiles.slice_of(details.tiled, config) if in_slices else tile_c
    static: dict[str, Any] = {
        "SIZES": Sizes(
            groups=x.num_groups,
            width=max(16, 1 << (x.num_groups - 1).bit_length()) if x.sizes else 16,
            matrices=details.matrices,
            r_stride=r_stride,
            c_stride=c_stride,
            k_stride=k_stride,
            offset_stride=0 if x.offset is None else x.offset.ndim,  # 1 with a batch axis
        ),
        "OUT": result(call, x, details.matrices, columns),
        "DOT": Dot(
            cast_to=dot.dtype if dot.cast else None,
            accumulator=dot.accumulator,
            precision=dot.precision,
            longest_sum=_LONGEST_FP8_SUM if dot.is_fp8 and not dot.fast and tile_k > _LONGEST_FP8_SUM else None,
            adds_steps=dot.is_fp8 and not dot.fast,
            flat=flat,
        ),
        "SUMMED": details.summed,
        "SPLITS": config.splits,
        "LINEAR": _linear(launch, x),
        "FUNCTION": call.epilogue and call.epilogue.function,
        "BAND": min(config.band, max(1, -(-call.shape[-2] // tile_r))),  # higher bands might overflow int32
    }
    for name, outer, mode, (stored, given) in zip("AB", p.out, dot.modes, operands, strict=False):
        tma = details.chip.has_tma and config.tma and _has_tma(stored)
        both = call.columns if name == "B" else ""
        tile = {"tile": config.along(outer)[0] * (2 if both == "interleaved" else 1), "halves": both == "halves"}
        tile |= {"tile_k": tile_k // _per_byte(given)}
        if mode != "unit":  # else tensor cores decode
            tile |= {"numbers": _per_byte(given), "decodes": given.decodes or ""}
        k_first = name == "B" and not tma and stored.letters[0] != outer
        is_as_loaded = mode == "tile" or zeros_of(given) is not None
        loads = {
            "tma": tma,
            "ends": flat and p.contracted in x.sizes,
            # Triton copies a tile of `b` to shared memory asynchronously only in the order in which it is stored.
            "k_first": k_first,
            "converts_to": dot.dtype if k_first and dot.cast and not is_as_loaded else None,
        }
        static[name] = buffer(stored, outer, p, given.letters[0], **tile, **loads)
        static[f"{name}_SCALES"] = scaling(given, mode, outer, p, (tile["tile"], tile_k))
    return static


def _linear(launch: Launch, x: Operands) -> Function | None:
    """`apply_epilogue` as a function of a sum and, if any, an existing value; None if it changes nothing."""
    call, details, has_existing = launch.call, launch.details, x.epilogue.existing is not None
    total = _sum_dtype(details.dot)
    dtypes = (total, details.stored) if has_existing else (total,)

    def linear(total: Array, existing: Array | None = None) -> Array:
        return base.apply_epilogue(call, total, existing)

    function = elementwise("linear", linear, *dtypes)
    return function if function.operations else None


def _sum_dtype(dot: _Dot) -> Any:
    """The dtype of a sum that scales have multiplied."""
    return jnp.dtype(jnp.float32) if any(dot.modes) else dot.accumulator


def _arrays(x: Operands, p: Product, operands: list[_Operand], static: dict[str, Any]) -> dict[str, Any]:
    """The kernel's arrays and TMA descriptors, keyed by parameter."""
    r, c, k = (*p.out, p.contracted)
    bias, up_bias = (
        None if each is None else each.astype(jnp.float32) for each in (x.epilogue.bias, x.epilogue.up_bias)
    )
    arrays: dict[str, Any] = {
        "sizes_r": x.sizes.get(r),
        "sizes_c": x.sizes.get(c),
        "sizes_k": x.sizes.get(k),
        "offset": x.offset,
        "a_source": operands[0].given.source,
        "bias": bias,
        "up_bias": up_bias,
        "b_zeros": zeros_of(operands[1].given),
        "up_zeros": zeros_of(operands[-1].given),
        **dict.fromkeys(("up", "up_scales", "up_tensor", "up_tiles")),
    }
    for name, side, (stored, given) in zip(("a", "b", "up"), "ABB", operands, strict=False):
        buffer, scales = static[side], given.scales
        arrays[name] = stored.data
        arrays[f"{name}_scales"], arrays[f"{name}_tensor"] = (scales.values, scales.tensor) if scales else (None, None)
        tile = (buffer.tile, buffer.tile_k) if buffer.k_stride == 1 else (buffer.tile_k, buffer.tile)
        described = Tiles.of_rows if buffer.ends else Tiles.of_matrices
        arrays[f"{name}_tiles"] = described(name, stored.data.shape, tile) if buffer.tma else None
    return arrays
