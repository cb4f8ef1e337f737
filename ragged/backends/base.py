"""The contract of a backend: a module with these four functions, listed in `primitive.lowering.BACKENDS`.

    plan(call, x, target) -> Launch | Refusal       chooses a kernel from shapes and dtypes alone, or refuses
    run(launch, x) -> Array                         computes the product; a list of arrays if there is an `EpilogueSpec`
    candidates(launch, x) -> Iterable[Config]       other configurations to measure, best first; may be empty
    work(launch, x) -> Work                         counts tiles and FLOPs of `run`, for known sizes

`x` is the product's `Operands`, with avals in `plan`. `call.product` is an einsum of letters (see `product.layout`).
Only `plan` may refuse a product; the XLA backend's `plan` refuses only illegal configurations. `work` serves
`ragged.explain`: its `x` has no batch axis; sizes and offset are NumPy arrays, the others avals.

Every backend, for the products that its `plan` accepts:

- reads group sizes on the device: nothing depends on their values at trace time;
- lets batch elements share operands without a batch axis. If any operand has a batch axis, the result has one too,
  unless it is summed over the batch (`call.out_batch` is false);
- never reads or writes outside the buffers: negative sizes count as 0, and rows past the capacity are cut off
  (`group_offsets`);
- ignores the values in the tail of its operands, and writes zeros to the tail of the result;
- keeps groups apart: no value of a group, not even NaN, reaches another group's part of the result. Masks select; they
  never multiply;
- accumulates in float32, or int32 for integers (in the operands' dtype if it has 32 or more bits), and rounds once, to
  `call.dtype`;
- returns the same bits for the same inputs.

**Operands.** The value of a quantised operand is its data times its scales (see `scale_modes`). A packed buffer packs
its first letter. Before `run`, `lowering.supported_form` copies gathered rows, and moves groups to multiples of the
blocks of scales, and applies `call.cast`, unless the backend's entry in `BACKENDS` says otherwise (`gathers`,
`whole_blocks`, `casts`).

**Local groups.** With one ragged letter, the uniform operand or result holds the groups `x.offset, x.offset + 1, ...`.
Rows of other groups are zero in the result, without existing values. So is a matrix of the result if the index of its
group is negative, or not below `x.num_groups`.

**Epilogues.** If `call.epilogue`, an `EpilogueSpec`, isn't None, the product has biases, an activation or a gate; the
arrays are in `x.epilogue`. If a backend's entry in `BACKENDS` has `has_epilogues=False`, as the XLA backend's,
its `run` never gets a spec: `primitive.fused` computes the epilogue instead.

**Existing values.** `x.epilogue.existing` is added to the accumulator before rounding. Callers of `run` have set its
tail to zero. Where there is no product, as in rows of other groups, the result is `existing`, unchanged.
"""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax._src.lax.lax import canonicalize_precision  # no public name

from ragged.backends import cache
from ragged.core.formats import Support, accumulator_dtype, promote
from ragged.core.offsets import known_offsets
from ragged.core.scales import zeros_of
from ragged.product.operands import Call, KernelOperand, Operands, precision_name


class Target(NamedTuple):
    """The target that a kernel is compiled for."""

    portable: bool = False  # whether to avoid custom calls, because the program is exported
    interpret: Any = False  # as in `pl.pallas_call`: run a kernel's body on the CPU
    automatic: bool = False  # XLA partitions the program over several devices
    device: tuple[str, int] | None = None  # kind and cores, or None if unknown; for a GPU, 0 means the kind's default


DEFAULT_TPU = ("TPU v5 lite", 1)
"""Kind and number of cores for Pallas if the TPU isn't known at lowering."""


@dataclass(frozen=True)
class Refusal:
    """The reason not to run a product. With a hint, it is raised as an error; without one, XLA runs the product."""

    reason: str
    hint: str = ""
    error: type[Exception] = ValueError


@dataclass(frozen=True)
class Launch:
    """The plan of a product on a target: backend, kernel and configuration."""

    backend: str
    kernel: str
    call: Call
    target: Target
    config: Any = None  # see `product.config`
    source: str = ""  # source of `config`: "tiling", "backend", "using", "cache" or "model"
    flops: int | None = None  # None if an extent is symbolic
    bytes_accessed: int | None = None  # likewise
    visits: int | None = None  # upper bound on `visits + idle` of `Work`; None if unknown
    details: Any = None  # private to the backend: `plan` sets it for `run`
    passed_over: tuple[tuple[str, str], ...] = ()  # (backend, reason) of each preferred backend that refused
    has_xla_epilogue: bool = False  # whether separate products and XLA operations compute the `EpilogueSpec`

    def __str__(self) -> str:
        if self.kernel == "zeros":
            return "no product (an extent is 0)"
        why = [reason for _, reason in self.passed_over]
        # `XlaConfig` has no field `interpret`.
        why += ["interpreted"] * bool(self.target.interpret and hasattr(self.config, "interpret"))
        runs = f"{self.kernel} of {self.backend}"
        if self.call.epilogue is not None:
            epilogue = self.call.epilogue.function or "bias"
            runs += f", then {epilogue}" if self.has_xla_epilogue else f" with {epilogue}"
        return runs + (f" ({why[0]})" if why else "")


class Work(NamedTuple):
    """Tiles and FLOPs of a kernel, for known sizes."""

    visits: int = 0  # products of two tiles
    idle: int = 0  # tiles of the result that a kernel only writes zeros to
    flops: int = 0  # of all visits, including masked elements
    letter: str = ""  # the letter that `tiles` divide: the ragged one; if there are several, the result's packed one
    tiles: tuple[tuple[int, int, int], ...] = ()  # (group, first element, extent) of each multiplied tile


def spans(
    call: Call, x: Operands, buffers: Sequence[tuple[str, tuple[Any, ...]]] = ()
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """`(first, end)` of each local group, keyed by letter, for known sizes, clipped to `buffers`, or else to all.

    They are positions in the buffers that pack the letter; if no buffer does, groups begin at 0.
    """
    p, extents = call.product, {}  # keyed by letter: extents of the buffers that don't pack it, and of those that do
    for letters, shape in buffers or call.buffers(x):
        for place, letter in enumerate(letters):
            is_packed = letter in p.ragged and place == 0
            extents.setdefault(letter, ([], []))[is_packed].append(shape[place - 2])
    num_local, first = call.num_local_groups(x), int(x.offset or 0)
    groups = {}
    for letter, (others, packed) in extents.items():
        if letter not in p.ragged:
            groups[letter] = np.zeros(num_local, np.int64), np.full(num_local, min(others), np.int64)
            continue
        # Clipping makes local groups that don't exist empty.
        group = np.clip(first + np.arange(num_local + 1), 0, x.num_groups)
        if packed:
            offsets = known_offsets(x.sizes[letter], min(packed))
            begin, size = offsets[group[:-1]], np.diff(offsets[group])
        else:  # only with several ragged letters, so all groups are local
            begin, size = np.zeros(num_local, np.int64), np.clip(x.sizes[letter], 0, None)
        groups[letter] = begin, begin + np.minimum(size, min(others, default=np.iinfo(np.int64).max))
    return groups


KERNELS = ("batched_matmul", "grouped_matmul", "transposed_grouped_matmul", "tiled_matmul")


def is_empty(call: Call, x: Operands) -> bool:
    """Whether the result or an array in `x` has an extent of 0."""
    return any(0 in shape for shape in (call.shape, *(array.shape for array in jax.tree.leaves(x))))


def choice(
    call: Call,
    x: Operands,
    target: Target,
    backend: str,
    illegal: Callable[[Any], Refusal | None],
    tiled: Callable[[dict[str, int]], Any],
    model: Callable[[], Any],
) -> tuple[Any, str] | Refusal:
    """`(configuration, source)` of a product on a backend: from the call, `tuning.using`, the cache or the model.

    `Refusal` if the call or `tuning.using` requests an illegal configuration. An illegal one in the cache is ignored.

    - `illegal(config)`: `Refusal` if the backend can't use the configuration, else None.
    - `tiled(tiles)`: the configuration with these tiles, keyed by letter.
    - `model()`: the fastest configuration by the backend's model.
    """
    options = call.options

    def complete(tiles: dict[str, int] | None) -> Any:
        return tiled(tiles) if tiles else model()

    if options.tiles is not None:
        return tiled(options.tiles), "tiling"
    if requested := options.configs.of(call.product.out, backend):
        requested = requested.completed(complete)
        return illegal(requested) or (requested, options.source)
    if options.cached and not target.interpret:
        cached = cache.lookup(call, x, target.device, backend)
        cached = cached and cached.completed(complete)
        if cached is not None and illegal(cached) is None:
            return cached, "cache"
    return model(), "model"


def refuse(
    backend: str,
    formats: dict[str, Support],
    takes: Container[str],
    precisions: Container[str | None],
    call: Call,
    x: Operands,
    target: Target,
    primitives: Container[str] = (),
) -> Refusal | None:
    """`Refusal` if a backend must leave the product to XLA, else None.

    - `formats`: support for each dtype, keyed by its name.
    - `takes`: supported features: kernels, "... with an epilogue" for kernels that apply an `EpilogueSpec`, "scales",
      "offset", "batch", and fields of `Epilogue`.
    - `precisions`: names of supported precisions.
    - `primitives`: names of JAX primitives that an activation may use.
    """
    arrays = {"lhs": x.lhs.data, "rhs": x.rhs.data, "the result": jax.ShapeDtypeStruct(call.shape, call.dtype)}
    (a, b), scaled = call.kernel_operands(x), x.lhs.scales is not None or x.rhs.scales is not None
    if not all(isinstance(n, int) for array in (*jax.tree.leaves(x), *arrays.values()) for n in array.shape):
        return Refusal(f"{backend} has no kernels for symbolic extents")
    if is_empty(call, x):
        return Refusal("an extent is 0")
    if not x.sizes and call.shape[0] == 1 and not scaled and call.options.backend is None:
        return Refusal("one group: a dense product")
    # The product needs the features that aren't None.
    features = {call.product.kernel: True, "scales": scaled or None, "offset": x.offset, "batch": call.batch(x)}
    features |= {f"{call.product.kernel} with an epilogue": call.epilogue}
    for name, value in (features | x.epilogue._asdict()).items():
        if value is not None and name not in takes:
            return Refusal(f"{backend} has no kernels for {name}")
    function = call.epilogue and call.epilogue.function
    if function and (missing := function.missing(primitives)):
        return Refusal(f"{backend} has no formula for {missing}, in the activation {function.name}")
    if target.automatic:
        return Refusal(
            f"XLA can't partition {backend} kernels over devices; inside a `jax.shard_map` over all mesh axes they run"
        )
    for name, array in arrays.items():
        dtype = jnp.dtype(array.dtype).name
        support = formats.get(dtype, Support(None, False))
        has_operand = support.operand is not None and (zeros_of(b) is not None or not support.needs_zeros)
        is_supported = support.result if name == "the result" else has_operand
        if not is_supported:
            return Refusal(f"{backend} has no kernels for {name} in {dtype}")
    if reason := _unsupported_zeros(a, b, x):
        return Refusal(f"{backend} has no kernels for zero points {reason}")
    precision = call.options.precision
    if precision_name(precision) not in precisions:
        precision = jax.config.jax_default_matmul_precision if precision is None else precision
        return Refusal(f"{backend} has no kernels for precision {precision}")
    return None


def _unsupported_zeros(a: KernelOperand, b: KernelOperand, x: Operands) -> str:
    """Which zero points of a kernel's operands it can't subtract: text, or "" if there are none."""
    if zeros_of(a) is not None or (zeros_of(b) is not None and b.letters[0] in x.sizes):
        return "of a ragged operand" if x.sizes else "of the first operand"
    for operand in (b, *([] if x.epilogue.up is None else [x.epilogue.up])):
        if operand.scales is None or (zeros := operand.scales.zeros) is None:
            continue
        if not jnp.issubdtype(zeros.dtype, jnp.integer):
            return f"in {zeros.dtype.name}"
        if not operand.scales.has_exact_differences(operand.data.dtype):
            return f"in {zeros.dtype.name} of {operand.data.dtype.name}: bfloat16 can't hold the differences"
    return ""


def too_old(formats: dict[str, Support], x: Operands, generation: int) -> str:
    """Name of the first operand dtype that a device of this generation can't multiply, or ""."""
    names = [jnp.dtype(operand.data.dtype).name for operand in (x.lhs, x.rhs)]
    return next((name for name in names if generation < (formats[name].operand or 0)), "")


def dot(x: Array, y: Array, contract: tuple[int, int], precision: Any, dtype: Any, batch: int = 0) -> Array:
    """`lax.dot_general` by its primitive, over `batch` leading axes.

    Libraries such as qwix replace the function `lax.dot_general` while they call a model. JAX caches products that are
    compiled in the meantime, so later calls would get the replacement too.
    """
    axes = tuple(range(batch))
    return lax.dot_general_p.bind(
        x,
        y,
        dimension_numbers=(((contract[0],), (contract[1],)), (axes, axes)),
        precision=canonicalize_precision(precision),
        preferred_element_type=np.dtype(dtype),
        out_sharding=None,
    )


def scale_modes(call: Call, x: Operands, step: int | None) -> tuple[str, str]:
    """Scale modes of both kernel operands: where the kernel multiplies by an operand's scales.

    - `""`: the operand has no scales;
    - `"total"`: the accumulator is multiplied, because the scales are constant along the contracted letter;
    - `"step"`: the product of each step along this letter is multiplied. Scales are constant within a step: blocks are
      multiples of `step`, the kernel's smallest step, and packed groups begin at multiples of a block. Scales that are
      constant along the letter have this mode if they, or the groups, differ between batch elements that are summed;
    - `"tile"`: the operand's tile is multiplied. With `step=None`, all scales that change along the contracted
      letter have this mode.
    """
    p, batched = call.product, call.batched(x)
    groups_differ = any(batched.sizes.values()) or batched.offset

    def mode(operand: KernelOperand) -> str:
        if operand.scales is None:
            return ""
        block = operand.block(p.contracted)
        if block is None:
            differs = operand.data.ndim > p.ndim(operand.letters) or groups_differ
            return "step" if differs and not call.out_batch else "total"
        return "step" if step and block % step == 0 else "tile"

    a, b = call.kernel_operands(x)
    return mode(a), mode(b)


def cost(call: Call, x: Operands, not_empty: int | None = None) -> dict[str, Any]:
    """`flops` and `bytes_accessed` of a product, as in `Launch`.

    If several letters are ragged, the FLOPs assume that all groups have equal shares of each letter.

    `not_empty`: number of local groups with rows, which are those whose matrices are read. If unknown, there is at most
    one for each row.
    """
    a, b = call.kernel_operands(x)
    p, batch = call.product, call.batch(x) or 1
    groups = x.num_groups if x.sizes else call.shape[0]
    out = jax.ShapeDtypeStruct((batch if call.out_batch else 1, *call.shape), call.dtype)
    # Kernels read only this field of an index.
    read = x._replace(gather=None if x.gather is None else x.gather.source)
    arrays = [*jax.tree.leaves(read), *[out] * call.num_stored]
    if not all(isinstance(n, int) for array in arrays for n in array.shape):
        return {"flops": None, "bytes_accessed": None}
    contracted = min(a.extent(p.contracted), b.extent(p.contracted))
    # All groups together have the whole extent of the first ragged letter. Each group has an equal share of any further
    # ragged letter.
    products = batch * call.shape[-2] * call.shape[-1] * contracted * (1 if x.sizes else groups) * call.num_products
    bits = sum(array.size * jax.dtypes.itemsize_bits(array.dtype) for array in arrays)
    if x.sizes and p.kernel == "grouped_matmul":
        matrices = call.num_local_groups(x)
        skipped = matrices - (min(matrices, batch * a.extent(p.ragged)) if not_empty is None else not_empty)
        for array in jax.tree.leaves((x.rhs if p.is_uniform(p.rhs) else x.lhs, x.epilogue.up)):
            if matrices and array.ndim > 2 and array.shape[-3] == matrices:
                bits -= array.size // matrices * skipped * jax.dtypes.itemsize_bits(array.dtype)
    return {"flops": 2 * products // max(groups, 1) ** max(len(p.ragged) - 1, 0), "bytes_accessed": -(-bits // 8)}


def apply_epilogue(call: Call, total: Array, existing: Array | None) -> Array:
    """The linear part of the epilogue: an accumulator plus `existing`, unrounded.

    It is elementwise, and linear in `total` and `existing`. If it changes nothing, it returns `total` itself. XLA's and
    the TPU's kernels call it. The GPU's kernel calls a Triton function that is generated from it.
    """
    return total if existing is None else plus_existing(total, existing)


def changes_sums(call: Call, existing: Array | None) -> bool:
    """Whether `apply_epilogue` changes a sum. If not, a dot may round its sums to the result's dtype itself."""
    total: Any = np.zeros((), jnp.float32)
    return existing is not None or apply_epilogue(call, total, None) is not total


def plus_existing(total: Array, existing: Array) -> Array:
    """`total + existing`, unrounded."""
    # `existing` may be a float although the accumulator is an integer, or have 64 bits.
    dtype = promote(total.dtype, accumulator_dtype(existing.dtype))
    return total.astype(dtype) + existing.astype(dtype)


def kernel_metadata(
    axes: tuple[str, str, str], tile: Mapping[str, int], dtypes: tuple[Any, Any, Any], num_actual_groups: int
) -> dict[str, str]:
    """Metadata that XLA's profiler shows for a kernel: one key, whose value is a string of JSON.

    - `axes`: the stored letters of the operand with the result's rows, of the other operand, and of the result.
    - `tile`: the tile size of each letter.
    - `dtypes`: the dtypes of the arrays in `axes`.
    - `num_actual_groups`: the number of local groups.
    """
    lhs, rhs, out = axes
    (contracted,) = {*lhs, *rhs} - {*out}
    shown = {
        "axes": f"{lhs},{rhs}->{out}",
        "transpose_lhs": lhs[0] == contracted,
        "transpose_rhs": rhs[1] == contracted,
        "tiling": {f"tile_{letter}": tile[letter] for letter in "mkn"},
        "dtypes": dict(zip(("lhs", "rhs", "out"), (jnp.dtype(dtype).name for dtype in dtypes), strict=True)),
        "num_actual_groups": num_actual_groups,
    }
    return {"xprof_metadata": json.dumps(shown)}
