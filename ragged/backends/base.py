"""What a backend is: a module with four functions, found by its line in `product.lowering.BACKENDS`.

    plan(call, x, target) -> Launch | Refusal       decides, from shapes and dtypes alone, what runs
    run(launch, x) -> Array                         runs it; if the call has an `Ending`, all that this stores
    candidates(launch, x) -> Iterable[Config]       configurations to try in place of the launch's, the best first
    work(launch, x) -> Work                         counts what `run` multiplies, where sizes are known

`x` are a product's `Operands`, for `plan` as avals; the product is `call.product`, an einsum of letters. After `plan`
nothing refuses any more. XLA plans every product there is. `work` is for people, not for `run`: its `x` are avals, but
for sizes and offset, NumPy's, and there is no batch axis.

**The contract.** All backends:

- take any extents, any group sizes, and a batch axis in front of any operand (an operand without one is the same for
  all batch elements; the result has one if any operand has, or with `call.out_batch` false is the sum over it);
- read sizes on the device: nothing depends on their values at trace time;
- never read or write outside the buffers, whatever the sizes are: a negative one counts as 0, and what would reach past
  the capacity is cut off (`schedule.group_offsets`);
- neither read the tail in any way that matters, nor leave anything but zeros in it;
- let no group's values, NaN and infinity included, reach another group's part of the result: masks select, they never
  multiply;
- accumulate in float32 (int32 for integers, exactly; float64 for float64) and round once, to `call.dtype`;
- give the same bits for the same inputs.

With one ragged letter, the uniform term, operand or result, holds the groups `x.offset, x.offset + 1, ...` of those
that have sizes: rows of other groups come out zero, and a matrix of no group is zero.

XLA's backend knows no endings: they are composed of its products, in `ragged._epilogue`.

`x.epilogue.existing` is added to in the accumulator, before rounding. Its tail is zero already; its other elements that
no product reaches stay as they are.
"""

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ragged.backends import cache, schedule
from ragged.product.operands import Call, Operands, Term, precision_name
from ragged.quant.formats import Units, accumulator_dtype


class Target(NamedTuple):
    """What a kernel is compiled for, and how. Backends ignore what means nothing to them."""

    portable: bool = False  # it goes into an export, which refuses most custom calls
    interpret: Any = False  # as in `pl.pallas_call`: run a Pallas or Triton kernel's body on the CPU
    automatic: bool = False  # the program is for several devices, over which XLA partitions it
    device: tuple[str, int] | None = None  # kind and number of cores (a GPU's: 0 for its kind's own), if known


DEFAULT_TPU = ("TPU v5 lite", 1)
"""Kind and number of cores to tell Pallas where nothing says which TPU is lowered for."""


@dataclass(frozen=True)
class Refusal:
    """Why a backend doesn't run a product. With a `mend`, it is for the caller to mend: an error. Without, XLA runs."""

    reason: str
    mend: str = ""
    error: type[Exception] = ValueError


@dataclass(frozen=True)
class Launch:
    """What runs for a product on a target."""

    backend: str
    kernel: str
    call: Call
    target: Target
    config: Any = None  # the backend's record: see `backends.config`
    source: str = ""  # of the configuration: "tiling", "config", "using", "cache" or "model"
    flops: int | None = None  # None where an extent is symbolic
    bytes_accessed: int | None = None
    visits: int | None = None  # products of two tiles, or tiles that get zeros, at most; None where nothing says
    details: Any = None  # what else `run` has to know, as the backend puts it
    passed_over: tuple[tuple[str, str], ...] = ()  # backends that would have come first, and why they don't run

    def __str__(self) -> str:
        if self.kernel == "zeros":
            return "no product (an extent is 0)"
        why = [reason for _, reason in self.passed_over]
        why += ["interpreted"] * bool(self.target.interpret and self.backend != "xla")
        runs = f"{self.kernel} of {self.backend}"
        if self.call.ending is not None:
            what = self.call.ending.activation or "bias"
            runs += f", then {what}" if self.backend == "xla" else f" with {what}"
        return runs + (f" ({why[0]})" if why else "")


class Work(NamedTuple):
    """What a kernel does for known sizes."""

    visits: int = 0  # products of a tile of one operand with a tile of the other
    idle: int = 0  # tiles of the result that a kernel only writes zeros to
    flops: int = 0  # of all visits: whole tiles, with what is masked in them
    letter: str = ""  # along which `tiles` lie: the ragged one, the result's packed one if there are several
    tiles: Any = ()  # (group, first element, extent) of those that are multiplied, each once


def spans(call: Call, x: Operands) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The first and the end element of each group that a product computes, along each of its letters; known sizes.

    Counted in the buffers that pack the letter, else from 0. What any buffer cuts off isn't counted.
    """
    p, shapes = call.product, {}
    for letters, shape in ((p.lhs, x.lhs_shape), (p.rhs, x.rhs.data.shape), (p.out, call.shape)):
        for place, letter in enumerate(letters):
            is_packed = letter in p.ragged and place == 0
            shapes.setdefault(letter, ([], []))[is_packed].append(shape[place - 2])
    held, first = call.held(x), int(x.offset or 0)
    found = {}
    for letter, (others, packed) in shapes.items():
        if letter not in p.ragged:
            found[letter] = np.zeros(held, np.int64), np.full(held, min(others), np.int64)
            continue
        group = np.clip(first + np.arange(held + 1), 0, x.num_groups)
        if packed:
            offsets = schedule.known_offsets(x.sizes[letter], min(packed))
            begin, size = offsets[group[:-1]], np.diff(offsets[group])
        else:
            begin, size = np.zeros(held, np.int64), np.clip(x.sizes[letter], 0, None)
        found[letter] = begin, begin + np.minimum(size, min(others, default=np.iinfo(np.int64).max))
    return found


@jax.custom_jvp
def _normal_cdf(z: Array) -> Array:
    """With a derivative of its own: in jax 0.12, that of `lax.erfc` fails in a `shard_map` that checks `vma`."""
    return 0.5 * lax.erfc(-z * np.sqrt(0.5).astype(z.dtype))


@_normal_cdf.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (z,), (dz,) = primals, tangents
    return _normal_cdf(z), dz * jnp.exp(-0.5 * z * z) * np.sqrt(0.5 / np.pi).astype(z.dtype)


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": lambda z: z * _normal_cdf(z),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}

KERNELS = ("batched_matmul", "grouped_matmul", "transposed_grouped_matmul", "tiled_matmul")


def is_empty(call: Call, x: Operands) -> bool:
    """Whether there is nothing to multiply, or no result."""
    return any(0 in shape for shape in (call.shape, *(array.shape for array in jax.tree.leaves(x))))


def choice(
    call: Call,
    x: Operands,
    target: Target,
    backend: str,
    legal: Callable[[Any], Refusal | None],
    tiled: Callable[[dict[str, int]], Any],
    model: Callable[[], Any],
) -> tuple[Any, str] | Refusal:
    """A backend's configuration of a product and its source, in the order of `backends.config`.

    `legal` says why there can't be such a one, `tiled` makes one of a tiling, and `model` chooses.
    """
    options = call.options
    if options.tiles is not None:
        return tiled(options.tiles), "tiling"
    if asked := options.configs.of(call.product.out, backend):
        return legal(asked) or (asked, options.source)
    if options.cached and not target.interpret:
        found = cache.lookup(call, x, target.device, backend)
        if found is not None and legal(found) is None:
            return found, "cache"
    return model(), "model"


def refuse(
    backend: str,
    units: dict[str, Units],
    takes: Container[str],
    precisions: Container[str | None],
    call: Call,
    x: Operands,
    target: Target,
) -> Refusal | None:
    """What any backend but XLA's leaves to it.

    By its units, the names of what it `takes` (kernels; "scales", "offset", "batch", and parts of the epilogue), and of
    the precisions.
    """
    arrays = {"lhs": x.lhs.data, "rhs": x.rhs.data, "the result": jax.ShapeDtypeStruct(call.shape, call.dtype)}
    scaled = x.lhs.scales is not None or x.rhs.scales is not None
    if not all(isinstance(n, int) for array in (*jax.tree.leaves(x), *arrays.values()) for n in array.shape):
        return Refusal(f"{backend} has no kernels for symbolic extents")
    if is_empty(call, x):
        return Refusal("an extent is 0")
    if not x.sizes and call.shape[0] == 1 and not scaled and call.options.backend is None:
        return Refusal("one group: a dense product")
    given = {call.product.kernel: True, "scales": scaled or None, "offset": x.offset, "batch": call.batch(x)}
    given |= {f"{call.product.kernel} with an ending": call.ending}
    for name, value in (given | x.epilogue._asdict()).items():
        if value is not None and name not in takes:
            return Refusal(f"{backend} has no kernels for {name}")
    if target.automatic:
        return Refusal(
            f"XLA partitions no {backend} kernels over devices; inside a `jax.shard_map` over all mesh axes there are"
        )
    for name, array in arrays.items():
        dtype = jnp.dtype(array.dtype).name
        unit = units.get(dtype, Units(None, False))
        if not unit.result if name == "the result" else unit.operand is None:
            return Refusal(f"{backend} has no kernels for {name} in {dtype}")
    precision = call.options.precision
    if precision_name(precision) not in precisions:
        precision = jax.config.jax_default_matmul_precision if precision is None else precision
        return Refusal(f"{backend} has no kernels for precision {precision}")
    return None


def too_old(units: dict[str, Units], x: Operands, generation: int) -> str:
    """The dtype of the first operand that a device of this generation can't multiply; "" if it can all."""
    names = [jnp.dtype(operand.data.dtype).name for operand in (x.lhs, x.rhs)]
    return next((name for name in names if generation < (units[name].operand or 0)), "")


def scale_ways(call: Call, x: Operands, step: int | None) -> tuple[str, str]:
    """How the scales of each term are applied:

    - `""`: there are none;
    - `"total"`: to the accumulator, as they are the same all along the contracted letter;
    - `"step"`: to the product of each step along it, as they change in multiples of `step` elements of the group (None:
      a kernel can't), or with each of the batch elements that are summed; where a buffer packs it, its groups begin at
      such multiples too;
    - `"tile"`: to the operand's tile, which becomes float32.
    """
    p = call.product

    def way(term: Term) -> str:
        if term.scales is None:
            return ""
        along = term.block(p.contracted)
        if along is None:
            return "step" if not call.out_batch and term.data.ndim > p.ndim(term.letters) else "total"
        return "step" if step and along % step == 0 else "tile"

    a, b = call.terms(x)
    return way(a), way(b)


def cost(call: Call, x: Operands) -> dict[str, Any]:
    """FLOPs and bytes of a product, by the names that `Launch` has for them. None where an extent is symbolic.

    Of several ragged letters, groups have their share of each.
    """
    a, b = call.terms(x)
    p, batch = call.product, call.batch(x) or 1
    groups = x.num_groups if x.sizes else call.shape[0]
    out = jax.ShapeDtypeStruct((batch if call.out_batch else 1, *call.shape), call.dtype)
    read = x._replace(gather=None if x.gather is None else x.gather.source)
    arrays = [*jax.tree.leaves(read), *[out] * call.num_stored]
    if not all(isinstance(n, int) for array in arrays for n in array.shape):
        return {"flops": None, "bytes_accessed": None}
    contracted = min(a.extent(p.contracted), b.extent(p.contracted))
    products = batch * call.shape[-2] * call.shape[-1] * contracted * (1 if x.sizes else groups) * call.num_products
    return {
        "flops": 2 * products // max(groups, 1) ** max(len(p.ragged) - 1, 0),
        "bytes_accessed": sum(array.size * array.dtype.itemsize for array in arrays),
    }


def finish(total: Array, existing: Any, call: Call) -> Array:
    """What becomes of an accumulator before it is rounded to `call.dtype`: see `product.operands.Epilogue`."""
    if existing is None:
        return total
    # It may be a float where the accumulator is an integer.
    floats = jnp.issubdtype(existing.dtype, jnp.floating) and jnp.issubdtype(total.dtype, jnp.integer)
    wide = accumulator_dtype(existing.dtype) if floats else total.dtype
    return total.astype(wide) + existing.astype(wide)


def kernel_metadata(
    axes: tuple[str, str, str], tile: Mapping[str, int], dtypes: tuple[Any, Any, Any], num_actual_groups: int
) -> dict[str, str]:
    """What XLA's profiler shows beside a kernel: it reads this one key, a string of JSON.

    `axes` are the letters as they are stored, of the operand that has the result's rows, of the other one, and of the
    result; `tile` is by letter.
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
