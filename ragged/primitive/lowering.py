"""Lowering of a product to a backend: `plan` decides what runs, `compute` runs it."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh

from ragged.backends.base import DEFAULT_TPU, Launch, Refusal, Target, Work
from ragged.core.errors import MAX_ROWS, Site
from ragged.core.formats import accumulator_dtype
from ragged.core.offsets import element_mask, known_offsets
from ragged.primitive import moved_rows
from ragged.product.config import CONFIG_TYPES, Configs
from ragged.product.operands import Call, Index, Operands, Options


class Backend(NamedTuple):
    """Static properties of a backend."""

    module: str  # imported when a product is first planned for it
    platform: str = ""  # the platform whose default backend it is
    package: str = ""  # the package that its kernels need besides JAX
    install: str = ""  # arguments of `pip install` for that package
    runs_anywhere: bool = False  # runs on all platforms without being interpreted
    gathers: tuple[str, ...] = ()  # kernels that gather the rows of `lhs` by an index
    has_epilogues: bool = True  # some kernel applies an `EpilogueSpec`
    whole_blocks: bool = True  # its kernels need groups that begin at multiples of the blocks of scales
    casts: bool = False  # its kernels may apply `Call.cast`; others get `lhs` quantised
    in_exports: bool = False  # its kernels can be exported if the caller names the backend

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)

    @property
    def refusal(self) -> Refusal | None:
        """`Refusal` if the package of its kernels isn't installed, else None."""
        if not self.package or find_spec(self.package):
            return None
        return Refusal(f"{self.package.capitalize()} is not installed: `pip install {self.install}`")


BACKENDS = {
    "xla": Backend("ragged.backends.xla.backend", "cpu", runs_anywhere=True, has_epilogues=False, whole_blocks=False),
    "pallas_tpu": Backend("ragged.backends.tpu.backend", "tpu", casts=True),
    "triton_gpu": Backend(
        "ragged.backends.gpu.backend",
        "cuda",
        package="triton",
        install="'jax-ragged[cuda]'",
        gathers=("grouped_matmul", "transposed_grouped_matmul"),
        in_exports=True,
    ),
}

FALLBACK = next(name for name, backend in BACKENDS.items() if backend.runs_anywhere)
"""The backend that runs every product, on every platform."""
PLATFORMS = {backend.platform: name for name, backend in BACKENDS.items() if backend.platform}
"""The default backend of each platform. If it refuses a product, XLA runs it."""


def platform_name[T](name: T) -> T | str:
    """The platform's name in lowering: `"cuda"` for `"gpu"`."""
    return "cuda" if name == "gpu" else name


def plan(platform: str, x: Operands, call: Call, target: Target) -> Launch:
    """The launch of a product on the backend that the call names, by default the platform's own; on XLA if this backend
    refuses without a hint. Operands may be avals.

    Raises if the named backend doesn't run on the platform, or if a refusal has a hint.
    """
    x = jax.tree.map(_aval, x)
    _check_batch(x, call)
    own, passed_over = PLATFORMS.get(platform, FALLBACK), ()
    name = call.options.backend or own
    found = ask(name, x, call, target)
    if isinstance(found, Launch) and name != own and not (BACKENDS[name].runs_anywhere or target.interpret):
        available = ", ".join(repr(each) for each in dict.fromkeys((own, FALLBACK)))
        hint = f"Available there: {available}. `backend=None` uses the platform's own backend."
        if name in CONFIG_TYPES:
            config = f"`backend=ragged.tuning.{CONFIG_TYPES[name].__name__}(interpret=True)`"
            hint += f" {config} runs the bodies of kernels on any platform."
        found = Refusal(f"backend {name!r} does not run on {platform}.", hint)
    if isinstance(found, Refusal) and not found.hint:
        passed_over = ((name, found.reason),)
        found = ask(FALLBACK, x, call, target)
    if isinstance(found, Refusal):
        Site(call.options.name).fail(found.error, found.reason, found.hint)
    has_xla_epilogue = call.epilogue is not None and not BACKENDS[found.backend].has_epilogues
    return replace(found, passed_over=passed_over, has_xla_epilogue=has_xla_epilogue)


def _check_batch(x: Operands, call: Call) -> None:
    """Raises if int32 can't count the packed rows of all mapped elements, which a kernel sees as one buffer."""
    p, batch = call.product, call.batch(x)
    for letters, shape in call.buffers(x):
        rows = shape[-2]
        if letters[0] in p.ragged and isinstance(batch, int) and isinstance(rows, int) and batch * rows > MAX_ROWS:
            problem = f"{batch} mapped elements of {rows} packed rows (or columns) have more than {MAX_ROWS} in total."
            hint = "Kernels count them in int32. Map with `jax.lax.map` instead of `jax.vmap`."
            Site(call.options.name).fail(ValueError, problem, hint)


def ask(name: str, x: Operands, call: Call, target: Target) -> Launch | Refusal:
    """The launch that a backend plans for a product, or its refusal."""
    return BACKENDS[name].refusal or BACKENDS[name].load().plan(
        call, jax.eval_shape(partial(supported_form, name, call), x), target
    )


def compute(platform: str, x: Operands, call: Call, target: Target, unfused: Callable[..., Any] | None = None) -> Any:
    """The result of a product, by the launch of `plan`. It is `unfused(x, call)` if no kernel applies the call's
    `EpilogueSpec`."""
    given, x, inner = x, prepared(x, call), _inner(x, call)
    launch = plan(platform, x, inner, target)
    if unfused is not None and launch.has_xla_epilogue:
        return unfused(given, with_cached_config(call, launch))
    out = BACKENDS[launch.backend].load().run(launch, supported_form(launch.backend, call, x))
    return out if inner is call else jnp.sum(out, axis=0).astype(call.dtype)


def with_cached_config(call: Call, launch: Launch) -> Call:
    """The call with the launch's configuration if it is from the cache. Separate products wouldn't find it there: its
    key has the epilogue."""
    configs = call.options.configs if launch.source != "cache" else Configs(*[(launch.config,)] * 3)
    return call._replace(options=call.options._replace(configs=configs))


def launch_of(platform: str, x: Operands, call: Call, target: Target) -> Launch:
    """The launch that `compute` runs. Operands may be avals."""
    return plan(platform, jax.eval_shape(partial(prepared, call=call), x), _inner(x, call), target)


def work_of(launch: Launch, x: Operands) -> Work:
    """The `Work` of a launch, for concrete sizes."""
    if launch.kernel == "zeros":
        return Work()
    sizes = {z: jax.ShapeDtypeStruct(size.shape, jnp.int32) for z, size in x.sizes.items()}
    given, p = jax.tree.map(_aval, x._replace(sizes=sizes, offset=None)), launch.call.product
    taken = jax.eval_shape(partial(supported_form, launch.backend, launch.call), given)
    work, z = BACKENDS[launch.backend].load().work, p.contracted
    moves_groups = BACKENDS[launch.backend].whole_blocks
    if not moves_groups or (aligned := moved_rows.known_sizes(given, p, x.sizes)) is x.sizes:
        return work(launch, taken._replace(sizes=x.sizes, offset=x.offset))
    found = work(launch, taken._replace(sizes=aligned, offset=x.offset))
    # Shift the tiles back to the positions of the groups before they were moved.
    shift = known_offsets(x.sizes[z], x.rhs.data.shape[-2])[:-1] - np.cumsum(aligned[z]) + aligned[z]
    return found._replace(tiles=tuple((group, int(at + shift[group]), extent) for group, at, extent in found.tiles))


def supported_form(backend: str, call: Call, x: Operands) -> Operands:
    """The operands in the form that a backend supports.

    Unless the backend's entry in `BACKENDS` says otherwise, groups are moved to multiples of blocks of scales, and
    gathered rows of `lhs` are copied, and `Call.cast` is applied.
    """
    p, properties = call.product, BACKENDS[backend]
    x = x if properties.casts else call.with_cast(x)
    if properties.whole_blocks:
        x = moved_rows.in_blocks(x, p)
    # Kernels gather only their first operand, which has the first letter of `out`.
    if x.gather is None or p.kernel not in properties.gathers or p.out[0] not in p.lhs:
        return moved_rows.dispatched(x)
    return x._replace(gather=Index(x.gather.source, None))


def _aval(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _inner(x: Operands, call: Call) -> Call:
    """The call for a backend. If the result is summed over the batch, only a wgrad's kernel computes this sum. Other
    kernels return the batch axis, in the accumulator's dtype, and `compute` sums over it."""
    if call.out_batch or call.product.kernel == "transposed_grouped_matmul" or call.batch(x) is None:
        return call
    return call._replace(dtype=accumulator_dtype(call.dtype), out_batch=True)


def prepared(x: Operands, call: Call) -> Operands:
    """The operands for all backends: the tail of `existing` is zero, and an operand and its scales both have the batch
    axis, or neither has it."""
    if x.epilogue.existing is not None and not call.has_zero_tail:
        x = x._replace(epilogue=x.epilogue._replace(existing=zero_tail(x.epilogue.existing, x, call)))
    return x._replace(lhs=moved_rows.same_batch(x.lhs), rhs=moved_rows.same_batch(x.rhs))


def zero_tail(out: Array, x: Operands, call: Call) -> Array:
    """`out`, a buffer like the product's result, with zeros where no group has an element."""
    sizes, (packed, other) = x.sizes, call.product.out
    if packed not in sizes:
        return out
    mask = partial(element_mask, rows=out.shape[-2], columns=out.shape[-1])
    if any(s.ndim > 1 for s in sizes.values()):
        batch = max(s.shape[0] for s in sizes.values() if s.ndim > 1)
        sizes = {letter: jnp.broadcast_to(s, (batch, s.shape[-1])) for letter, s in sizes.items()}
        mask = jax.vmap(mask)
    return jnp.where(jnp.broadcast_to(mask(sizes[packed], sizes.get(other)), out.shape), out, jnp.zeros((), out.dtype))


@contextmanager
def target_of(
    platform: str,
    options: Options,
    device: AbstractDevice | None = None,
    *,
    portable: bool = False,
    automatic: bool = False,
) -> Iterator[Target]:
    """A context in which a product's kernel is traced and lowered for a platform; yields the target.

    `device`: the abstract device of the program's mesh. `portable`: whether the program is exported. `automatic`:
    whether XLA partitions the program over several devices.
    """
    # An interpreted kernel is for a device of its backend's platform, whatever `platform` is.
    requested = BACKENDS[options.backend or FALLBACK]
    kernel_platform = platform if requested.runs_anywhere else requested.platform
    target = Target(
        portable=portable and not (options.backend and requested.in_exports),
        interpret=options.interpret,
        automatic=automatic and platform in ("tpu", "cuda"),
        device=_device(kernel_platform, portable, device),
    )
    # Pallas must know which TPU it lowers for, also on a machine without one.
    tpu = AbstractDevice(*(target.device or DEFAULT_TPU), "tpu")
    mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=tpu))
    with mesh if kernel_platform == "tpu" else nullcontext():
        yield target


def _device(platform: str, portable: bool, device: AbstractDevice | None) -> tuple[str, int] | None:
    """`(kind, cores)` of the device that the program is lowered for; None if it is unknown. The first known one of:

    1. `device`;
    2. the abstract device of the mesh in context;
    3. this machine's device, unless the program is for another platform or is exported for other machines.
    """
    device = device or jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and platform_name(device.platform or platform) != platform:
        return None
    # A mesh doesn't know the compute capability of its GPUs. The code below reads it from a local GPU of this kind.
    if device is not None and (platform != "cuda" or device.device_kind != jax.devices()[0].device_kind):
        return device.device_kind, device.num_cores or int(platform != "cuda")  # For a GPU, 0 means the kind's default.
    local = jax.devices()[0]
    if (portable and device is None) or platform_name(local.platform) != platform:
        return None
    if platform == "cuda":
        return f"{local.device_kind} {local.compute_capability}", local.core_count
    return local.device_kind, getattr(local, "num_cores", 1)
