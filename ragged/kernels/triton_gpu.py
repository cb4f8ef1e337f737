"""Grouped products as a Triton kernel for NVIDIA's GPUs: one kernel, `triton_kernel.grouped_product`, for all of them.

Each function of the contract says in letters what it is (`lhs` and `rhs` hold `m`, `k`, `n`, as stored) and leaves the
rest to `_product`, which turns letters into strides and extents.

Tiles are loaded by TMA on Hopper and Blackwell wherever an operand's rows begin at multiples of 16 bytes, else by
`cp.async`; the program compiled for sm_80 does the latter on any GPU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ragged.kernels import ANY_TARGET, Refused, Scales, Target, triton_call, triton_tiling
from ragged.kernels.xla import accumulator_dtype, compute_dtype

_OPERANDS = ("bfloat16", "float16", "float32", "int8", "int4", "float8_e4m3fn", "float8_e5m2")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_RESULTS = ("bfloat16", "float16", "float32", "int32", "int8", "float8_e4m3fn", "float8_e5m2")
_STORED = ("bfloat16", "float16", "float32", "int32")
"""What a kernel writes; a result of 8 bits is rounded by XLA, whose casts saturate where JAX's do, and only there."""

_PRECISIONS = {
    **dict.fromkeys(("none", "default", "fastest", "tensorfloat32", "bfloat16"), "tf32"),
    **dict.fromkeys(("high", "bfloat16_3x"), "tf32x3"),
    **dict.fromkeys(("highest", "float32"), "ieee"),
}
"""How float32 is multiplied, by the names of JAX's precisions; "tf32" is what XLA's default is on a GPU too."""

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
    if not all(isinstance(extent, int) for x in (lhs, rhs, out, *sizes) for extent in x.shape):
        return "triton_gpu has no kernels for symbolic extents"
    for name, x, known in (("lhs", lhs, _OPERANDS), ("rhs", rhs, _OPERANDS), ("the result", out, _RESULTS)):
        if jnp.dtype(x.dtype).name not in known:
            return f"triton_gpu has no kernels for {name} in {jnp.dtype(x.dtype).name}"
    capability = triton_tiling.chip(target.device).capability
    dtypes = {jnp.dtype(x.dtype).name for x in (lhs, rhs)}
    if capability < 80:
        return f"triton_gpu has no kernels for compute capability {capability / 10}, below 8.0"
    if capability < 89 and "float8_e4m3fn" in dtypes:
        return f"GPUs of compute capability {capability / 10} can't convert float8_e4m3fn; 8.9 and later can"
    if _precision(precision) is None:
        return f"triton_gpu has no kernels for precision {precision}"
    most = max((x.shape[-1] for x in sizes), default=0)
    if most > _MOST_GROUPS:
        return f"triton_gpu has no kernels for {most} groups, more than {_MOST_GROUPS}"
    return ""


def _precision(precision: Any) -> str | None:
    precision = jax.config.jax_default_matmul_precision if precision is None else precision
    both = precision if isinstance(precision, tuple) else (precision, precision)
    return _PRECISIONS.get(str(both[0]).lower()) if both[0] == both[1] else None


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

    def extent(self, letter: str) -> int:
        return self.array.shape[self.letters.index(letter) - 2]

    def geometry(self, kept: str, sizes: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, int], str]:
        """Strides of batch, group, kept and contracted axis; extents of the last two; which of them is packed."""
        (p, q), matrix = self.array.shape[-2:], self.array.shape[-2] * self.array.shape[-1]
        ndim = self.ndim(sizes)
        group = matrix if ndim == 3 else 0
        batch = matrix * (self.array.shape[-3] if ndim == 3 else 1) if self.array.ndim > ndim else 0
        first = self.letters[0] == kept  # the kept axis comes first
        packed = self.letters[0] in sizes
        return (
            (batch, group, *((q, 1) if first else (1, q))),
            (p, q) if first else (q, p),
            ("kept" if first else "contracted") if packed else "",
        )

    def scaling(self, kept: str, sizes: Mapping[str, Any], tile_k: int, summed: int) -> tuple[Any, ...]:
        """How the kernel finds and applies the scales: see `triton_kernel._scale_row`."""
        if self.scales is None:
            return "", 0, 0, 1, 0, 1, 0
        values, blocks = self.scales.values, dict(zip(self.letters, self.scales.block, strict=True))
        counts = values.shape[-2:]
        ndim = self.ndim(sizes)
        packed = self.letters[0] in sizes
        strides = dict(zip(self.letters, (counts[1], 1), strict=True))
        by_group = packed and blocks[self.letters[0]] is None
        group = strides[self.letters[0]] if by_group else 0 if packed else -counts[0] * counts[1]
        strides = {x: 0 if blocks[x] is None else strides[x] for x in self.letters}
        batch = counts[0] * counts[1] * (values.shape[-3] if ndim == 3 else 1) if values.ndim > ndim else 0
        (contracted,) = set(self.letters) - {kept}
        along = blocks[contracted]
        # A packed axis has its blocks counted from the buffer's start, the tile's from the group's.
        whole = along is not None and along % tile_k == 0 and not (packed and self.letters[0] == contracted)
        constant = along is None and not (batch and summed > 1)
        way = "total" if constant else "step" if whole else "tile"
        return way, batch, group, blocks[kept] or 1, strides[kept], along or 1, strides[contracted]


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
    """Runs the kernel for a product of two terms, with a batch axis or without, into `out_shape` for each group."""
    r, c = out_letters
    (k,) = set("mkn") - set(out_letters)
    a, b = (lhs, rhs) if r in lhs.letters else (rhs, lhs)
    num_groups = max((x.shape[-1] for x in sizes.values()), default=held)
    batches = [x.array.shape[0] for x in (a, b) if x.array.ndim > x.ndim(sizes)]
    batches += [x.shape[0] for x in sizes.values() if x.ndim > 1] + ([] if offset is None else list(offset.shape))
    batch = batches[0] if batches else None
    summed = batch if sum_batch and batch is not None else 1
    if offset is not None and offset.ndim and summed > 1:
        raise Refused("a sum over batch elements that hold different groups")
    keeps_batch = batch is not None and not sum_batch
    if keeps_batch and batch is not None and batch > _MOST_ELEMENTS:
        raise Refused(f"{batch} batch elements, more than {_MOST_ELEMENTS}")

    # 1. Dtypes.
    chip = triton_tiling.chip(target.device)
    a, b = (x._replace(array=x.array.astype(jnp.int8)) if x.array.dtype == jnp.int4 else x for x in (a, b))
    common, cast = _common_dtype(a.array.dtype, b.array.dtype, chip)
    stored = jnp.dtype(dtype) if jnp.dtype(dtype).name in _STORED else accumulator_dtype(dtype)
    if existing is not None:
        existing = existing.astype(stored)

    # 2. The tile.
    extent = {r: out_shape[0], c: out_shape[1], k: min(a.extent(k), b.extent(k))}
    finer = [
        x.scales is not None and x.scaling(kept, sizes, triton_tiling.SMALLEST, summed)[0]
        for x, kept in ((a, r), (b, c))
    ]
    if "tile" in finer:
        common, cast = jnp.dtype(jnp.float32), True
    way = _precision(precision) or "tf32"
    if "tile" in finer:
        way = "tf32x3" if way == "tf32" else way  # scales have all of float32's bits
    slow = common == jnp.float32 and way == "ieee"
    problem = triton_tiling.Problem(
        r=_mean(r, out_shape[0], sizes, num_groups),
        c=_mean(c, out_shape[1], sizes, num_groups),
        k=_mean(k, extent[k], sizes, num_groups),
        groups=held,
        itemsize=jnp.dtype(common).itemsize,
        result=stored.itemsize,
        matrices=held if b.array.ndim >= 3 or c in sizes else 1,
        wide="step" in finer or (common.itemsize == 1 and common != jnp.int8),
        slow=slow,
        by_thread=not (chip.has_tma and _aligned(a.array) and _aligned(b.array)),
    )
    if tiling is not None:
        config = triton_tiling.fit(problem, (tiling[r], tiling[c], tiling[k]), chip)
    else:
        config = triton_tiling.choose(problem, chip)
    steps = [
        x.scales.block[x.letters.index(k)] for x, way_ in zip((a, b), finer, strict=True) if way_ == "step" and x.scales
    ]
    config = config._replace(k=min([config.k, *(extent & -extent for extent in steps if extent)]))

    # 3. The launch.
    geometry = {"A": a.geometry(r, sizes), "B": b.geometry(c, sizes)}
    static: dict[str, Any] = {}
    for side, term, kept in (("A", a, r), ("B", b, c)):
        strides, extents, packed = geometry[side]
        static |= {f"{side}_STRIDES": strides, f"{side}_EXTENTS": extents, f"{side}_PACKED": packed}
        static[f"{side}_SCALING"] = term.scaling(kept, sizes, config.k, summed)
        static[f"{side}_TMA"] = _matrices(term.array) if chip.has_tma and _aligned(term.array) else 0
    uniform_out = r not in sizes
    matrix = out_shape[0] * out_shape[1]
    arrays = {
        "a": a.array,
        "b": b.array,
        "sizes_r": sizes.get(r),
        "sizes_c": sizes.get(c),
        "sizes_k": sizes.get(k),
        "offset": offset,
        "existing": existing,
        "a_scales": None if a.scales is None else a.scales.values.astype(jnp.float32),
        "b_scales": None if b.scales is None else b.scales.values.astype(jnp.float32),
    }
    of_batch = [0 if x is None or x.ndim == 1 else num_groups for x in (sizes.get(r), sizes.get(c), sizes.get(k))]
    static |= {
        "GROUPS": num_groups,
        "HELD": held,
        "BATCH": (*of_batch, 0 if offset is None or offset.ndim == 0 else 1),
        "OUT_STRIDES": (
            (matrix * (held if uniform_out else 1)) if keeps_batch else 0,
            matrix if uniform_out else 0,
            out_shape[1],
        ),
        "OUT_EXTENTS": out_shape,
        "SUMMED": summed,
        "TILE_R": config.r,
        "TILE_C": config.c,
        "TILE_K": config.k,
        "BAND": config.band,
        "WIDTH": max(16, 1 << (num_groups - 1).bit_length()),
        "COMMON": common if cast else None,
        "ACCUMULATOR": jnp.dtype(jnp.int32 if common == jnp.int8 and "step" not in finer else jnp.float32),
        "PRECISION": way,
        "LONGEST": min(_LONGEST_FP8_SUM, config.k) if common.name in _FP8 else 0,
    }
    full = (*([batch] if keeps_batch else []), *([held] if uniform_out else []), *out_shape)
    tiles_c, elements = -(-out_shape[1] // config.c), batch if keeps_batch and batch is not None else 1
    pieces = 2 + min(held, out_shape[0]) if not uniform_out else 0
    tiles = tiles_c * (held * -(-out_shape[0] // config.r) if uniform_out else -(-out_shape[0] // config.r) + pieces)
    resident = triton_tiling.resident(problem, config, chip)
    grid = max(1, min(tiles, chip.multiprocessors * resident // elements)), elements
    flops = 2 * elements * summed * extent["m"] * extent["k"] * extent["n"] // num_groups ** max(len(sizes) - 1, 0)
    moved = [x.size * x.dtype.itemsize for x in (*arrays.values(), jax.ShapeDtypeStruct(full, stored)) if x is not None]
    with jax.named_scope(f"ragged_{name}"):
        out = triton_call.call(
            arrays,
            jax.ShapeDtypeStruct(full, stored),
            static,
            grid=grid,
            config=config,
            name=f"{name}_{'x'.join(str(dict(zip((r, c, k), config.tile, strict=True))[x]) for x in 'mkn')}",
            cost={"flops": flops * (1 if sizes else held), "bytes_accessed": sum(moved)},
            chip=chip,
            interpret=bool(target.interpret),
        )
    return out.astype(dtype)


def _mean(letter: str, extent: int, sizes: Mapping[str, Array], num_groups: int) -> int:
    """What a group has of a letter, on average, if its buffers are full."""
    return max(1, -(-extent // num_groups)) if letter in sizes else extent


def _common_dtype(a: Any, b: Any, chip: triton_tiling.Chip) -> tuple[jnp.dtype, bool]:
    """The dtype of a dot's operands, and whether any has to be cast to it."""
    a, b = jnp.dtype(a), jnp.dtype(b)
    if a.name in _FP8 and b.name in _FP8 and chip.capability >= 89:
        return a, False  # tensor cores multiply either with either
    common = jnp.dtype(compute_dtype(a, b))
    if (jnp.float16 in (a, b) and 1 in (a.itemsize, b.itemsize)) or a == b == jnp.float16:
        common = jnp.dtype(jnp.float16)  # which holds every int8 and fp8
    return common, (a, b) != (common, common)


def _matrices(x: Array) -> int:
    return int(np.prod(x.shape[:-2]))


def _aligned(x: Array) -> bool:
    """Whether each row begins at a multiple of 16 bytes, as TMA wants, and has some of them."""
    return x.shape[-1] * x.dtype.itemsize % 16 == 0
