"""From a product to the kernel that computes it. The eight layouts come down to four kernels:

    ragged letters            kernel
    none                      `batched_matmul`
    one, kept                 `grouped_matmul` (forward, dgrad, and both from the left)
    the contracted one        `transposed_grouped_matmul` (wgrad)
    two or three              `tiled_matmul`

since swapping and transposing operands costs nothing but a name.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.tpu import InterpretParams
from jax.extend.core import InconclusiveDimensionOperation
from jax.sharding import AbstractDevice, AbstractMesh

from ragged._layout import Product
from ragged.kernels import Refused, Scales, Target, pallas_tpu, schedule, tpu_tiling, triton_gpu, triton_tiling, xla


class Options(NamedTuple):
    """How a product is computed. `tiling` has one entry for each of `m`, `k`, `n`."""

    precision: Any = None
    backend: str | None = None
    tiling: tuple[int, int, int] | None = None
    interpret: Any = False
    input_buffer_count: int = 2

    @property
    def calls_back(self) -> bool:
        """Whether the kernel is interpreted by callbacks: an effect of the program that it is part of."""
        deep = isinstance(self.interpret, InterpretParams) or (self.interpret and self.input_buffer_count > 2)
        return self.backend == "pallas_tpu" and bool(deep)


Block = tuple[int | None, int | None]


class Call(NamedTuple):
    """All that is static about one product."""

    product: Product
    shape: tuple[int, ...]  # of the result, without a batch axis
    dtype: Any  # of the result
    options: Options
    out_batch: bool = False
    has_offset: bool = False
    has_existing: bool = False
    lhs_block: Block | None = None  # of the operand's scales, along its buffer's last two axes, if it has any
    rhs_block: Block | None = None


class Operands(NamedTuple):
    """The arrays of one product. Any may have a batch axis in front; its rank says whether it has."""

    lhs: Any
    rhs: Any
    sizes: tuple[Any, ...]  # `(g,)` for each ragged letter, in the order m, k, n
    offset: Any = None
    existing: Any = None
    lhs_scales: Any = None  # as `kernels.Scales.values`, float32
    rhs_scales: Any = None

    def flat(self) -> list[Any]:
        rest = (self.lhs_scales, self.rhs_scales, self.offset, self.existing)
        return [self.lhs, self.rhs, *self.sizes, *(x for x in rest if x is not None)]

    def has_batch_axis(self, call: Call) -> list[bool]:
        """Which of the flat operands have a batch axis."""
        p = call.product
        ndims = [p.ndim(p.lhs), p.ndim(p.rhs)] + [1] * len(self.sizes)
        ndims += [ndims[0]] * (call.lhs_block is not None) + [ndims[1]] * (call.rhs_block is not None)
        ndims += [0] * call.has_offset + [len(call.shape)] * call.has_existing
        return [x.ndim > ndim for x, ndim in zip(self.flat(), ndims, strict=True)]

    def batch_size(self, call: Call) -> Any:
        """The extent of the batch axis, which may be symbolic; None if no operand has one."""
        sizes = {x.shape[0] for x, has in zip(self.flat(), self.has_batch_axis(call), strict=True) if has}
        (size,) = sizes or {None}
        return size

    def scales(self, call: Call) -> dict[str, Scales]:
        """Those of the operands that have any, by name of the argument."""
        given = (("lhs", self.lhs_scales, call.lhs_block), ("rhs", self.rhs_scales, call.rhs_block))
        return {f"{name}_scales": Scales(values, block) for name, values, block in given if block is not None}


BACKENDS: dict[str, ModuleType | str] = {
    "xla": xla,
    "pallas_tpu": pallas_tpu,
    "triton_gpu": triton_gpu.unavailable() or triton_gpu,
}
"""Each backend's module, or why there is none."""

PLATFORMS = {"cpu": "xla", "cuda": "triton_gpu", "tpu": "pallas_tpu"}
"""Each platform's own backend. Where it is missing, or lacks a kernel, XLA's is used."""


class Choice(NamedTuple):
    """What computes a product on a platform."""

    backend: str  # "" if nothing has to be multiplied
    why: str = ""  # it isn't the one asked for, or the platform's own


def _choice(platform: str, operands: Operands, call: Call, target: Target) -> Choice:
    """The backend for a product, as far as is known before its kernel is built. Operands may be avals."""
    x, kernel = operands, kernel_name(call.product)
    name = call.options.backend or PLATFORMS.get(platform, "xla")
    module = BACKENDS[name]
    if name == "xla" or isinstance(module, str):
        return Choice("xla", module if isinstance(module, str) else "")
    scaled = call.lhs_block or call.rhs_block
    if kernel == "batched_matmul" and call.shape[0] == 1 and not scaled and call.options.backend is None:
        return Choice("xla", "one group: a dense product")
    out = jax.ShapeDtypeStruct(call.shape, call.dtype)
    why = module.lacks(kernel, x.lhs, x.rhs, x.sizes, out, call.options.precision, target)
    return Choice("xla", why) if why else Choice(name)


def kernel_name(product: Product) -> str:
    """The kernel that computes a product."""
    if not product.ragged:
        return "batched_matmul"
    if len(product.ragged) > 1:
        return "tiled_matmul"
    return "grouped_matmul" if product.ragged in product.out else "transposed_grouped_matmul"


def illegal_tiling(backend: str | None, call: Call, lhs: Any, rhs: Any) -> tuple[str, str]:
    """Which of a backend's rules a product's tiling breaks, and the nearest that breaks none; two "" if it breaks none.

    XLA has no rules, and what a platform's own backend demands is found when lowering for it.
    """
    p, tiling = call.product, call.options.tiling
    if tiling is None or backend not in ("pallas_tpu", "triton_gpu"):
        return "", ""
    if backend == "triton_gpu":
        return triton_tiling.illegal(dict(zip("mkn", tiling, strict=True)))
    letters = p.lhs + p.rhs + p.out
    shapes = (*lhs.shape[-2:], *rhs.shape[-2:], *call.shape[-2:])
    extents = {letter: max(n for x, n in zip(letters, shapes, strict=True) if x == letter) for letter in "mkn"}
    dtypes = (jnp.dtype(lhs.dtype), jnp.dtype(rhs.dtype), jnp.dtype(call.dtype))
    return tpu_tiling.illegal(dict(zip("mkn", tiling, strict=True)), extents, p.ragged, dtypes)


@contextmanager
def target_of(platform: str, options: Options, *, portable: bool = False, automatic: bool = False) -> Iterator[Target]:
    """What a product is compiled for on a platform, and the context in which its kernel is traced and lowered.

    `portable`: the program is exported, `automatic`: partitioned by XLA.
    """
    # An interpreted kernel is the one for the device of its own platform.
    own = {"triton_gpu": "cuda", "pallas_tpu": "tpu"}.get(options.backend or "", platform)
    target = Target(
        portable=portable and options.backend != "triton_gpu",
        interpret=options.interpret,
        input_buffer_count=options.input_buffer_count,
        automatic=automatic and platform in ("tpu", "cuda"),
        device=_device({"cuda": "gpu"}.get(own, own), portable),
    )
    # Pallas asks which TPU it lowers for; the machine may have none.
    device = AbstractDevice(*(target.device or tpu_tiling.DEFAULT_DEVICE), "tpu")
    mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with mesh if own == "tpu" else nullcontext():
        yield target


def _device(platform: str, portable: bool) -> tuple[str, int] | None:
    """Kind and number of cores of the device that is lowered for, if anything says so: the abstract device of a mesh in
    context, or the machine's own device, unless the program is for another machine."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        cores = device.num_cores or (0 if platform == "gpu" else 1)  # 0: as many as the kind has
        return (device.device_kind, cores) if device.platform in (None, platform) else None
    device = jax.devices()[0]
    if portable or device.platform != platform:
        return None
    if platform == "gpu":
        return f"{device.device_kind} {device.compute_capability}", device.core_count
    return device.device_kind, getattr(device, "num_cores", 1)


def check_backend(name: Any, call: str) -> None:
    """Raises a `ValueError` unless `name` is None or an available backend."""
    if name is None or (isinstance(name, str) and isinstance(BACKENDS.get(name), ModuleType)):
        return
    available = [repr(n) for n, module in BACKENDS.items() if isinstance(module, ModuleType)]
    missing = [f" Not available: {n!r} ({why})." for n, why in BACKENDS.items() if isinstance(why, str)]
    problem = "is not available here" if name in list(BACKENDS) else "does not exist"
    raise ValueError(
        f"`{call}`: backend {name!r} {problem}.\n"
        f"Available: {', '.join(available)}.{''.join(missing)}\n"
        "`backend=None` takes the platform's own."
    )


def compute(platform: str, operands: Operands, call: Call, target: Target) -> Array:
    """The product on one platform, or on the backend that was asked for. Operands and result as in `_primitive`."""
    return _computed(platform, operands, call, target)[0]


def choice(platform: str, operands: Operands, call: Call, target: Target) -> Choice:
    """What `compute` runs: found by tracing it, so that it is what is lowered. Operands may be avals.

    **Raises:** what `compute` does.
    """
    found: list[Choice] = []

    def trace(operands: Operands) -> Array:
        out, by = _computed(platform, operands, call, target)
        found.append(by)
        return out

    jax.eval_shape(trace, operands)
    return found[0]


def _computed(platform: str, operands: Operands, call: Call, target: Target) -> tuple[Array, Choice]:
    """The product, and what computes it."""
    x, p, kernel = operands, call.product, kernel_name(call.product)
    batch = x.batch_size(call)
    if batch is not None and not call.out_batch and kernel != "transposed_grouped_matmul":
        # Only a wgrad sums over the batch as it goes.
        wide = call._replace(dtype=xla.accumulator_dtype(call.dtype), out_batch=True)
        out, by = _computed(platform, operands, wide, target)
        return jnp.sum(out, axis=0).astype(call.dtype), by
    existing = None if x.existing is None else zero_tail(x.existing, x.sizes, p)
    if batch == 0 or 0 in (*x.lhs.shape, *x.rhs.shape, *call.shape, *(s.shape[-1] for s in x.sizes)):
        shape = (batch, *call.shape) if batch is not None and call.out_batch else call.shape
        return jnp.zeros(shape, call.dtype) if existing is None else existing, Choice("", "an extent is 0")
    by = _choice(platform, x, call, target)
    if by.backend != "xla" and PLATFORMS.get(platform) != by.backend and not call.options.interpret:
        raise ValueError(
            f"`ragged.matmul`: backend {by.backend!r} does not run on {platform}.\n"
            "Pass `interpret=True` to run its kernels' bodies there, or `backend=None` for the platform's own."
        )
    problem, mend = illegal_tiling(by.backend, call, x.lhs, x.rhs)
    if problem:
        raise ValueError(f"`ragged.matmul`: {problem}\n{mend}")
    x = _same_batch(x._replace(existing=existing), call)
    try:
        try:
            return _run(by.backend, x, call, target), by
        except Refused as refusal:
            by = Choice("xla", str(refusal).splitlines()[0].rstrip("."))
            return _run("xla", x, call, target), by
    except InconclusiveDimensionOperation as error:
        raise NotImplementedError(
            "`ragged.matmul`: the extent of a ragged dim is symbolic, and may be smaller than a tile.\n"
            f"Got lhs={x.lhs.shape}, rhs={x.rhs.shape}.\n"
            "Bound it, as in `jax.export.symbolic_shape('m', constraints=['m >= 513'])`, or leave the buffer's extent "
            "static: the sizes of the groups vary in any case."
        ) from error


def _same_batch(x: Operands, call: Call) -> Operands:
    """Both of an operand and its scales have the batch axis, or neither has it."""
    for name, scales in x.scales(call).items():
        operand, values = getattr(x, name[:3]), scales.values
        if operand.ndim > values.ndim:
            values = jnp.broadcast_to(values, (operand.shape[0], *values.shape))
        if values.ndim > operand.ndim:
            operand = jnp.broadcast_to(operand, (values.shape[0], *operand.shape))
        x = x._replace(**{name[:3]: operand, name: values})
    return x


def _dequantized(x: Operands, call: Call) -> tuple[Operands, Call]:
    """The same product without scales, for XLA: operands times theirs."""
    scales, p = x.scales(call), call.product
    if not scales:
        return x, call
    # A float32 operand's bits all count, whatever the platform's default precision is.
    precision = call.options.precision or jax.lax.Precision.HIGHEST
    call = call._replace(options=call.options._replace(precision=precision), lhs_block=None, rhs_block=None)
    wide = jnp.float64 if jnp.float64 in (x.lhs.dtype, x.rhs.dtype, call.dtype) else jnp.float32
    of = dict(zip(p.ragged, x.sizes, strict=True))
    for name, of_operand in scales.items():
        operand, letters = getattr(x, name[:3]), getattr(p, name[:3])
        x = x._replace(**{name[:3]: xla.dequantized(operand, of_operand, of.get(letters[0]), wide), name: None})
    return x, call


def _run(name: str, x: Operands, call: Call, target: Target) -> Array:
    """The product by the kernels of the backend `name`."""
    x, call = _dequantized(x, call) if name == "xla" else (x, call)
    kernel, scales = kernel_name(call.product), x.scales(call)
    run = partial(
        getattr(BACKENDS[name], kernel),
        preferred_element_type=call.dtype,
        precision=call.options.precision,
        existing_out=x.existing,
        target=target,
    )
    p, contracted = call.product, call.product.contracted
    tiles = None if call.options.tiling is None else dict(zip("mkn", call.options.tiling, strict=True))

    def tiling(*letters: str) -> tuple[int, ...] | None:
        return None if tiles is None else tuple(tiles[letter] for letter in letters)

    match kernel:
        case "batched_matmul":
            return run(x.lhs, x.rhs, axes=(p.lhs, p.rhs, p.out), tiling=tiles, **scales)
        case "tiled_matmul":
            sizes = dict(zip(p.ragged, x.sizes, strict=True))
            return run(x.lhs, x.rhs, sizes, axes=(p.lhs, p.rhs, p.out), shape=call.shape, tiling=tiles, **scales)
        case "grouped_matmul":
            # a [m, k] ragged, b [g, k, n] or [g, n, k] -> [m, n]
            swap = p.ragged not in p.lhs
            a, b, b_letters = (x.rhs, x.lhs, p.lhs) if swap else (x.lhs, x.rhs, p.rhs)
            return run(
                a,
                b,
                x.sizes[0],
                group_offset=x.offset,
                transpose_rhs=b_letters[0] != contracted,
                tiling=tiling(p.ragged, contracted, b_letters.replace(contracted, "")),
                **_renamed(scales, swap),
            )
        case _:
            # lhs [k, a], rhs [k, b] -> [g, a, b]
            swap = p.out[0] not in p.lhs
            a, b = (x.rhs, x.lhs) if swap else (x.lhs, x.rhs)
            return run(
                a.mT,
                b,
                x.sizes[0],
                group_offset=x.offset,
                num_actual_groups=call.shape[0],
                sum_batch=not call.out_batch,
                tiling=tiling(contracted, *p.out),
                **_renamed(scales, swap),
            )


def _renamed(scales: dict[str, Scales], swap: bool) -> dict[str, Scales]:
    """The scales' names where the operands trade places."""
    other = {"lhs_scales": "rhs_scales", "rhs_scales": "lhs_scales"}
    return {other[name] if swap else name: each for name, each in scales.items()}


def zero_tail(x: Array, sizes: tuple[Array, ...], product: Product) -> Array:
    """`x`, a buffer of the product's result, with zeros wherever no group has an element."""
    of = dict(zip(product.ragged, sizes, strict=True))
    packed, other = product.out
    if packed not in of:
        return x
    mask = partial(schedule.element_mask, rows=x.shape[-2], columns=x.shape[-1])
    if any(s.ndim > 1 for s in sizes):
        batch = max(s.shape[0] for s in sizes if s.ndim > 1)
        of = {letter: jnp.broadcast_to(s, (batch, s.shape[-1])) for letter, s in of.items()}
        mask = jax.vmap(mask)
    return jnp.where(jnp.broadcast_to(mask(of[packed], of.get(other)), x.shape), x, jnp.zeros((), x.dtype))
