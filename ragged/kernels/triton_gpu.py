"""Grouped products as a Triton kernel for NVIDIA's GPUs: one kernel, `triton_kernel.grouped_product`, for all of them.

Each function of the contract says in letters what it is (`lhs` and `rhs` hold `m`, `k`, `n`, as stored) and leaves the
rest to `_product`, which turns letters into strides and extents.

Tiles are loaded by TMA on Hopper and Blackwell wherever an operand's rows begin at multiples of 16 bytes, else by
`cp.async`; the program compiled for sm_80 does the latter on any GPU.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ragged.kernels import (
    ANY_TARGET,
    Known,
    Refused,
    Scales,
    Target,
    kernel_metadata,
    lacking,
    precision_name,
    triton_call,
    triton_tiling,
)
from ragged.kernels.triton_tiling import Chip, Problem
from ragged.kernels.xla import accumulator_dtype, batch_size, compute_dtype

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_STORED = ("bfloat16", "float16", "float32", "int32")
"""What a kernel writes; a result of 8 bits is rounded by XLA, whose casts saturate where JAX's do, and only there."""

_PRECISIONS = {
    **dict.fromkeys(("none", "default", "fastest", "tensorfloat32", "bfloat16"), "tf32"),
    **dict.fromkeys(("high", "bfloat16_3x"), "tf32x3"),
    **dict.fromkeys(("highest", "float32"), "ieee"),
}
"""How float32 is multiplied, by the names of JAX's precisions; "tf32" is what XLA's default is on a GPU too."""

_KNOWN = Known(
    operands=("bfloat16", "float16", "float32", "int8", "int4", *_FP8),
    results=("bfloat16", "float16", "float32", "int32", "int8", *_FP8),
    precisions=tuple(_PRECISIONS),
)

_MOST_GROUPS = 4096
"""Each program holds a prefix sum over the sizes in registers."""

_MOST_ELEMENTS = 65535
"""Of a batch: the second dim of a CUDA grid."""

_LONGEST_FP8_SUM = 128
"""Hopper's tensor cores add up fp8 products in about 14 bits: this many at a time, the rest in float32."""


def unavailable() -> str:
    """Why there are no Triton kernels here; "" if there are."""
    return triton_call.missing_interpreter()


def lacks(kernel: str, lhs: Any, rhs: Any, sizes: tuple[Any, ...], out: Any, precision: Any, target: Target) -> str:
    """Why this backend has no kernel for such a product; "" if it has one. `out` is an aval, the others may be."""
    if target.automatic:
        return "XLA partitions no Triton kernels over devices; inside a `jax.shard_map` over all mesh axes there is one"
    if target.portable:
        return "an export refuses Triton's custom calls, unless `backend='triton_gpu'` asks for them"
    if not target.interpret and (why := triton_call.missing()):
        return why
    if why := lacking("triton_gpu", _KNOWN, lhs, rhs, sizes, out, precision):
        return why
    capability = triton_tiling.chip(target.device).capability
    dtypes = {jnp.dtype(x.dtype).name for x in (lhs, rhs)}
    if capability < 80:
        return f"triton_gpu has no kernels for compute capability {capability / 10}, below 8.0"
    if capability < 89 and "float8_e4m3fn" in dtypes:
        unnamed = "" if target.device else " (for which code is where nothing names the GPU)"
        return f"GPUs of compute capability {capability / 10}{unnamed} can't convert float8_e4m3fn; 8.9 and later can"
    most = max((x.shape[-1] for x in sizes), default=0)
    if most > _MOST_GROUPS:
        return f"triton_gpu has no kernels for {most} groups, more than {_MOST_GROUPS}"
    return ""


def grouped_matmul(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    preferred_element_type: Any,
    precision: Any = None,
    tiling: tuple[int, int, int] | None = None,
    group_offset: Array | None = None,
    existing_out: Array | None = None,
    transpose_rhs: bool = False,
    lhs_scales: Scales | None = None,
    rhs_scales: Scales | None = None,
    target: Target = ANY_TARGET,
) -> Array:
    """`[m, k] × [h, k, n] -> [m, n]`: see the contract in `ragged.kernels`."""
    axes = "mk", "nk" if transpose_rhs else "kn", "mn"
    return _product(
        "grouped_matmul" + "_transposed" * transpose_rhs,
        _Term(lhs, axes[0], lhs_scales),
        _Term(rhs, axes[1], rhs_scales),
        {"m": group_sizes},
        axes[2],
        (lhs.shape[-2], rhs.shape[-2 if transpose_rhs else -1]),
        dtype=preferred_element_type,
        precision=precision,
        tiling=None if tiling is None else dict(zip("mkn", tiling, strict=True)),
        existing=existing_out,
        offset=group_offset,
        held=rhs.shape[-3],
        target=target,
    )


def transposed_grouped_matmul(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    preferred_element_type: Any,
    precision: Any = None,
    tiling: tuple[int, int, int] | None = None,
    group_offset: Array | None = None,
    num_actual_groups: int | None = None,
    existing_out: Array | None = None,
    sum_batch: bool = False,
    lhs_scales: Scales | None = None,
    rhs_scales: Scales | None = None,
    target: Target = ANY_TARGET,
) -> Array:
    """`[a, m] × [m, b] -> [h, a, b]`: see the contract in `ragged.kernels`."""
    held = group_sizes.shape[-1] if num_actual_groups is None else num_actual_groups
    return _product(
        "transposed_grouped_matmul",
        _Term(lhs.mT, "km", lhs_scales),  # [m, a]; cancels where the caller's was an `mT`
        _Term(rhs, "kn", rhs_scales),
        {"k": group_sizes},
        "mn",
        (lhs.shape[-2], rhs.shape[-1]),
        dtype=preferred_element_type,
        precision=precision,
        tiling=None if tiling is None else dict(zip("kmn", tiling, strict=True)),
        existing=existing_out,
        offset=group_offset,
        held=held,
        sum_batch=sum_batch,
        target=target,
    )


def batched_matmul(
    lhs: Array,
    rhs: Array,
    *,
    axes: tuple[str, str, str],
    preferred_element_type: Any,
    precision: Any = None,
    tiling: dict[str, int] | None = None,
    existing_out: Array | None = None,
    lhs_scales: Scales | None = None,
    rhs_scales: Scales | None = None,
    target: Target = ANY_TARGET,
) -> Array:
    """`[g, m, k] × [g, k, n] -> [g, m, n]`, each as its axes say: see the contract in `ragged.kernels`."""
    extent = dict(zip(axes[0] + axes[1], lhs.shape[-2:] + rhs.shape[-2:], strict=True))
    return _product(
        "batched_matmul",
        _Term(lhs, axes[0], lhs_scales),
        _Term(rhs, axes[1], rhs_scales),
        {},
        axes[2],
        (extent[axes[2][0]], extent[axes[2][1]]),
        dtype=preferred_element_type,
        precision=precision,
        tiling=tiling,
        existing=existing_out,
        held=lhs.shape[-3],
        target=target,
    )


def tiled_matmul(
    lhs: Array,
    rhs: Array,
    sizes: dict[str, Array],
    *,
    axes: tuple[str, str, str],
    shape: tuple[int, ...],
    preferred_element_type: Any,
    precision: Any = None,
    tiling: dict[str, int] | None = None,
    existing_out: Array | None = None,
    lhs_scales: Scales | None = None,
    rhs_scales: Scales | None = None,
    target: Target = ANY_TARGET,
) -> Array:
    """The product where two or three letters are ragged: see the contract in `ragged.kernels`."""
    return _product(
        "tiled_matmul",
        _Term(lhs, axes[0], lhs_scales),
        _Term(rhs, axes[1], rhs_scales),
        sizes,
        axes[2],
        (shape[-2], shape[-1]),
        dtype=preferred_element_type,
        precision=precision,
        tiling=tiling,
        existing=existing_out,
        held=next(iter(sizes.values())).shape[-1],
        target=target,
    )


class _Term(NamedTuple):
    """An operand, `[..., p, q]`, and the letters of its last two axes. A ragged `p` is packed."""

    array: Array
    letters: str
    scales: Scales | None

    def ndim(self, sizes: Mapping[str, Any]) -> int:
        """Axes without a batch axis."""
        return 2 if set(self.letters) & set(sizes) else 3

    @property
    def is_aligned(self) -> bool:
        """Whether each row begins at a multiple of 16 bytes, as TMA wants."""
        return self.array.shape[-1] * self.array.dtype.itemsize % 16 == 0

    def geometry(self, kept: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Strides of batch, group, kept and contracted axis; extents of the last two; which of them is packed."""
        (p, q), ndim = self.array.shape[-2:], self.ndim(sizes)
        batch = math.prod(self.array.shape[-ndim:]) if self.array.ndim > ndim else 0
        first = self.letters[0] == kept  # the kept axis comes first
        return {
            "STRIDES": (batch, p * q if ndim == 3 else 0, *((q, 1) if first else (1, q))),
            "EXTENTS": (p, q) if first else (q, p),
            "PACKED": ("kept" if first else "contracted") if self.letters[0] in sizes else "",
        }

    def scaling(self, kept: str, sizes: Mapping[str, Any], tile_k: int, summed: int) -> tuple[Any, ...]:
        """How the kernel finds and applies the scales: see `triton_kernel._scale_row`."""
        if self.scales is None:
            return "", 0, 0, 1, 0, 1, 0
        values, ndim = self.scales.values, self.ndim(sizes)
        blocks = dict(zip(self.letters, self.scales.block, strict=True))
        strides = dict(zip(self.letters, (values.shape[-1], 1), strict=True))
        (contracted,) = set(self.letters) - {kept}
        packed, along = self.letters[0] if self.letters[0] in sizes else None, blocks[contracted]
        # Scales of groups: by their number if sizes pack them in rows of `values`, by the place of their matrix else.
        group = (strides[packed] if blocks[packed] is None else 0) if packed else -math.prod(values.shape[-2:])
        batch = math.prod(values.shape[-ndim:]) if values.ndim > ndim else 0
        strides = {letter: 0 if blocks[letter] is None else stride for letter, stride in strides.items()}
        if along is None and not (batch and summed > 1):
            way = "total"
        else:
            # Blocks of a packed axis are counted from the buffer's first row, steps from the group's.
            way = "step" if along and along % tile_k == 0 and packed != contracted else "tile"
        return way, batch, group, blocks[kept] or 1, strides[kept], along or 1, strides[contracted]


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


def _product(
    name: str,
    lhs: _Term,
    rhs: _Term,
    sizes: Mapping[str, Array],
    out_letters: str,
    out_shape: tuple[int, int],
    *,
    dtype: Any,
    precision: Any,
    tiling: Mapping[str, int] | None,
    existing: Array | None,
    held: int,
    target: Target,
    offset: Array | None = None,
    sum_batch: bool = False,
) -> Array:
    """Runs the kernel: `lhs × rhs -> [..., *out_shape]`; for each group held, unless the result packs them.

    `sizes` are those of the ragged letters, `(g,)` or `[e, g]`.
    """
    r, c = out_letters
    (k,) = set("mkn") - {r, c}
    a, b = (lhs, rhs) if r in lhs.letters else (rhs, lhs)
    a, b = (x._replace(array=x.array.astype(jnp.int8)) if x.array.dtype == jnp.int4 else x for x in (a, b))
    num_groups = max((x.shape[-1] for x in sizes.values()), default=held)
    has_batch = [(x.array, x.ndim(sizes)) for x in (a, b)] + [(x, 1) for x in sizes.values()]
    batch = batch_size(*has_batch, *([] if offset is None else [(offset, 0)]))
    elements, summed = (1, batch or 1) if sum_batch else (batch or 1, 1)
    if summed > 1 and offset is not None and offset.ndim:
        raise Refused("a sum over batch elements that hold different groups")
    if elements > _MOST_ELEMENTS:
        raise Refused(f"{elements} batch elements, more than {_MOST_ELEMENTS}")

    # 1. How tiles are multiplied, and how large they are.
    chip = triton_tiling.chip(target.device)
    stored = jnp.dtype(dtype) if jnp.dtype(dtype).name in _STORED else accumulator_dtype(dtype)
    least = triton_tiling.least_k(a.array.dtype, b.array.dtype)
    ways = a.scaling(r, sizes, least, summed)[0], b.scaling(c, sizes, least, summed)[0]
    dot = _dot(a.array.dtype, b.array.dtype, ways, precision, chip)
    a_geometry, b_geometry = a.geometry(r, sizes), b.geometry(c, sizes)
    extent = {r: out_shape[0], c: out_shape[1], k: min(x["EXTENTS"][1] for x in (a_geometry, b_geometry))}
    # Of a mean group: its share of a buffer that packs the letter. One that is packed nowhere: the widest group's.
    rows = {letter: x.array.shape[-2] for x in (a, b) if (letter := x.letters[0]) in sizes}
    rows |= {r: out_shape[0]} if r in sizes else {}
    mean = {x: max(1, min(n, -(-rows[x] // num_groups))) if x in rows else n for x, n in extent.items()}
    problem = Problem(
        mean[r],
        mean[c],
        mean[k],
        groups=held,
        itemsize=dot.dtype.itemsize,
        result=stored.itemsize,
        least_k=least,
        wide="step" in ways or dot.is_fp8,
        slow=dot.dtype == jnp.float32 and dot.precision == "ieee",
        by_thread=not (chip.has_tma and a.is_aligned and b.is_aligned),
        ragged=len(sizes) == 3,
    )
    asked = None if tiling is None else (tiling[r], tiling[c], tiling[k])
    config = triton_tiling.fit(problem, asked, chip) if asked else triton_tiling.choose(problem, chip)
    for x, way in zip((a, b), ways, strict=True):
        if way == "step" and x.scales is not None:  # a step lies in one block
            config = config._replace(k=math.gcd(config.k, x.scales.block[x.letters.index(k)] or 0))

    # 2. The kernel's parameters.
    packed = r in sizes
    matrix = math.prod(out_shape)
    out = jax.ShapeDtypeStruct(
        (*([batch] if batch is not None and not sum_batch else []), *([] if packed else [held]), *out_shape), stored
    )
    arrays = {
        "a": a.array,
        "b": b.array,
        **{f"sizes_{name}": sizes.get(letter) for name, letter in (("r", r), ("c", c), ("k", k))},
        "offset": offset,
        "a_scales": None if a.scales is None else a.scales.values.astype(jnp.float32),
        "b_scales": None if b.scales is None else b.scales.values.astype(jnp.float32),
    }
    strides = [0 if x not in sizes or sizes[x].ndim == 1 else num_groups for x in (r, c, k)]
    static = {
        "GROUPS": num_groups,
        "HELD": held,
        "BATCH": (*strides, 0 if offset is None else offset.ndim),
        **{f"A_{key}": value for key, value in a_geometry.items()},
        **{f"B_{key}": value for key, value in b_geometry.items()},
        "A_SCALING": a.scaling(r, sizes, config.k, summed),
        "B_SCALING": b.scaling(c, sizes, config.k, summed),
        "A_TMA": math.prod(a.array.shape[:-2]) if chip.has_tma and a.is_aligned else 0,
        "B_TMA": math.prod(b.array.shape[:-2]) if chip.has_tma and b.is_aligned else 0,
        "OUT_STRIDES": (matrix * (1 if packed else held), 0 if packed else matrix, out_shape[1]),
        "OUT_EXTENTS": out_shape,
        "SUMMED": summed,
        "TILE_R": config.r,
        "TILE_C": config.c,
        "TILE_K": config.k,
        "BAND": config.band,
        "WIDTH": max(16, 1 << (num_groups - 1).bit_length()),
        "COMMON": dot.dtype if dot.cast else None,
        "ACCUMULATOR": dot.accumulator,
        "PRECISION": dot.precision,
        "ADDS": existing is not None,
        "LONGEST": min(_LONGEST_FP8_SUM, config.k) if dot.is_fp8 else 0,
    }

    # 3. The launch: as many programs as the chip runs at a time, or as there can be tiles.
    rows = -(-out_shape[0] // config.r)
    tiles = (rows + min(held, out_shape[0]) + 1 if packed else rows * held) * -(-out_shape[1] // config.c)
    programs = max(1, chip.multiprocessors * triton_tiling.resident(problem, config, chip) // elements)
    tile = dict(zip((r, c, k), config.tile, strict=True))
    products = elements * summed * (1 if sizes else held) * math.prod(extent.values())
    existing = None if existing is None else existing.astype(stored).reshape(out.shape)
    dtypes = (a.array.dtype, b.array.dtype, stored)
    moved = [x.size * x.dtype.itemsize for x in (*arrays.values(), existing, out) if x is not None]
    with jax.named_scope(f"ragged_{name}"):
        return triton_call.call(
            arrays,
            out,
            static,
            existing=existing,
            grid=(min(tiles, programs), elements),
            config=config,
            name=f"{name}_{tile['m']}x{tile['k']}x{tile['n']}",
            metadata=kernel_metadata((a.letters, b.letters, out_letters), tile, dtypes, held),
            cost={"flops": 2 * products // num_groups ** max(len(sizes) - 1, 0), "bytes_accessed": sum(moved)},
            chip=chip,
            interpret=bool(target.interpret),
        ).astype(dtype)
