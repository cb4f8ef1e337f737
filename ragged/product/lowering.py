"""From a product to what computes it: `plan` decides, `compute` runs."""

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

from ragged._errors import MOST_ROWS, Site
from ragged.backends import schedule
from ragged.backends.base import DEFAULT_TPU, Launch, Refusal, Target, Work
from ragged.backends.config import Configs
from ragged.product import rows
from ragged.product.operands import Call, Index, Operands, Options, Scales
from ragged.quant.formats import accumulator_dtype


class Backend(NamedTuple):
    module: str  # imported when a product is first planned for it
    platform: str = ""  # whose own backend it is, if any's
    package: str = ""  # what its kernels are written in, besides JAX, and what to install for it
    install: str = ""
    runs_anywhere: bool = False  # and not only, or interpreted, on its platform
    gathers: tuple[str, ...] = ()  # kernels that read the rows of `lhs` by an index
    two_levels: bool = False  # whether it takes the tensor's scale apart from those of blocks

    def load(self) -> ModuleType:
        """The module, with its `plan`, `run`, `candidates` and `work`."""
        return importlib.import_module(self.module)

    @property
    def refusal(self) -> Refusal | None:
        """Why its kernels can't even be interpreted here, if so."""
        if not self.package or find_spec(self.package):
            return None
        return Refusal(f"there is no {self.package.capitalize()} here: `pip install {self.install}`")


BACKENDS = {
    "xla": Backend("ragged.backends.xla.backend", "cpu", runs_anywhere=True),
    "pallas_tpu": Backend("ragged.backends.tpu.backend", "tpu"),
    "triton_gpu": Backend(
        "ragged.backends.gpu.backend",
        "cuda",
        package="triton",
        install="'jax[cuda13]' jax-triton triton",
        gathers=("grouped_matmul", "transposed_grouped_matmul"),
        two_levels=True,
    ),
}

PLATFORMS = {backend.platform: name for name, backend in BACKENDS.items() if backend.platform}
"""Each platform's own backend. Where it refuses, XLA's is used."""


def platform_name(name: str) -> str:
    """A platform as lowering calls it, which has `"cuda"` for the `"gpu"` of devices."""
    return "cuda" if name == "gpu" else name


def plan(platform: str, x: Operands, call: Call, target: Target) -> Launch:
    """What runs for a product on a platform, or on the backend that was asked for. The operands may be avals.

    **Raises:** an error where the caller asked for what can't be.
    """
    x = jax.tree.map(_aval, x)
    _check_batch(x, call)
    own, passed_over = PLATFORMS.get(platform, "xla"), ()
    name = call.options.backend or own
    found = ask(name, x, call, target)
    if isinstance(found, Launch) and name != own and not (BACKENDS[name].runs_anywhere or target.interpret):
        there = ", ".join(repr(each) for each in dict.fromkeys((own, "xla")))
        mend = f"Available there: {there}. `backend=None` takes the platform's own, "
        mend += "`interpret=True` runs the bodies of kernels anywhere."
        found = Refusal(f"backend {name!r} does not run on {platform}.", mend)
    if isinstance(found, Refusal) and not found.mend:
        passed_over = ((name, found.reason),)
        found = ask("xla", x, call, target)
    if isinstance(found, Refusal):
        Site("ragged.matmul").fail(found.error, found.reason, found.mend)
    return replace(found, passed_over=passed_over)


def _check_batch(x: Operands, call: Call) -> None:
    """Raises if the packed rows of all mapped elements, one buffer to a kernel, are more than int32 counts."""
    p, batch = call.product, call.batch(x)
    for letters, shape in ((p.lhs, x.lhs_shape), (p.rhs, x.rhs.data.shape), (p.out, call.shape)):
        rows = shape[-2]
        if letters[0] in p.ragged and isinstance(batch, int) and isinstance(rows, int) and batch * rows > MOST_ROWS:
            problem = f"{batch} elements of {rows} packed rows (or columns) are more than {MOST_ROWS}."
            Site("ragged.matmul").fail(ValueError, problem, "They are counted in int32: map with `jax.lax.map`.")


def ask(name: str, x: Operands, call: Call, target: Target) -> Launch | Refusal:
    """What one backend plans for a product."""
    return BACKENDS[name].refusal or BACKENDS[name].load().plan(
        call, jax.eval_shape(partial(taken_by, name, call), x), target
    )


def compute(platform: str, x: Operands, call: Call, target: Target, composed: Callable[..., Any] | None = None) -> Any:
    """The product on one platform, or on the backend that was asked for.

    One with an `Ending` is `composed(x, call)` where no kernel has it.
    """
    given, x, inner = x, prepared(x, call), _inner(x, call)
    launch = plan(platform, x, inner, target)
    if composed is not None and launch.backend == "xla":
        configs = call.options.configs if launch.source != "cache" else Configs(*[(launch.config,)] * 3)
        return composed(given, call._replace(options=call.options._replace(configs=configs)))
    out = BACKENDS[launch.backend].load().run(launch, taken_by(launch.backend, call, x))
    return out if inner is call else jnp.sum(out, axis=0).astype(call.dtype)


def launch_of(platform: str, x: Operands, call: Call, target: Target) -> Launch:
    """What `compute` runs. Operands may be avals."""
    return plan(platform, jax.eval_shape(partial(prepared, call=call), x), _inner(x, call), target)


def work_of(launch: Launch, x: Operands) -> Work:
    """What a launch does for sizes that are known: see `backends.base`."""
    if launch.kernel == "zeros":
        return Work()
    sizes = {z: jax.ShapeDtypeStruct(size.shape, jnp.int32) for z, size in x.sizes.items()}
    given, p = jax.tree.map(_aval, x._replace(sizes=sizes, offset=None)), launch.call.product
    taken = jax.eval_shape(partial(taken_by, launch.backend, launch.call), given)
    work, z = BACKENDS[launch.backend].load().work, p.contracted
    if launch.backend == "xla" or (apart := rows.known_sizes(given, p, x.sizes)) is x.sizes:
        return work(launch, taken._replace(sizes=x.sizes, offset=x.offset))
    found = work(launch, taken._replace(sizes=apart, offset=x.offset))
    # Tiles of groups that were moved apart, as they lie in the buffer.
    shift = schedule.known_offsets(x.sizes[z], x.rhs.data.shape[-2])[:-1] - np.cumsum(apart[z]) + apart[z]
    return found._replace(tiles=tuple((group, int(at + shift[group]), extent) for group, at, extent in found.tiles))


def taken_by(backend: str, call: Call, x: Operands) -> Operands:
    """The operands as a backend takes them: with groups that begin at multiples of blocks of scales, and scales of one
    level, if it doesn't take two; with the rows of `lhs` copied, if its kernel doesn't read them by index."""
    p, own = call.product, BACKENDS[backend]
    if backend != "xla":  # which multiplies by the scales first
        x = rows.in_blocks(x, p)
    if not own.two_levels:
        x = jax.tree.map(lambda each: each.whole if _is_scales(each) else each, x, is_leaf=_is_scales)
    if x.gather is None or p.kernel not in own.gathers or p.out[0] not in p.lhs:
        return rows.dispatched(x)
    return x._replace(gather=Index(x.gather.source, None))


def _is_scales(x: Any) -> bool:
    return isinstance(x, Scales)


def _aval(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _inner(x: Operands, call: Call) -> Call:
    """What a backend computes: only a wgrad is summed over the batch as it goes."""
    if call.out_batch or call.product.kernel == "transposed_grouped_matmul" or call.batch(x) is None:
        return call
    return call._replace(dtype=accumulator_dtype(call.dtype), out_batch=True)


def prepared(x: Operands, call: Call) -> Operands:
    """The operands as backends take them: zeros in the tail of `existing`, batch axes of both operands and scales."""
    if x.epilogue.existing is not None:
        x = x._replace(epilogue=x.epilogue._replace(existing=zero_tail(x.epilogue.existing, x, call)))
    return x._replace(lhs=rows.same_batch(x.lhs), rhs=rows.same_batch(x.rhs))


def zero_tail(out: Array, x: Operands, call: Call) -> Array:
    """`out`, a buffer of the product's result, with zeros wherever no group has an element."""
    sizes, (packed, other) = x.sizes, call.product.out
    if packed not in sizes:
        return out
    mask = partial(schedule.element_mask, rows=out.shape[-2], columns=out.shape[-1])
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
    """What a product is compiled for on a platform, and the context in which its kernel is traced and lowered.

    `device`: that of the program's mesh, if it has one. `portable`: the program is exported, `automatic`: partitioned
    by XLA.
    """
    # An interpreted kernel is the one for the device of its own platform.
    asked = BACKENDS[options.backend or "xla"]
    own = platform if asked.runs_anywhere else asked.platform
    target = Target(
        portable=portable and options.backend != "triton_gpu",
        interpret=options.interpret,
        automatic=automatic and platform in ("tpu", "cuda"),
        device=_device(own, portable, device),
    )
    # Pallas asks which TPU it lowers for; the machine may have none.
    tpu = AbstractDevice(*(target.device or DEFAULT_TPU), "tpu")
    mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=tpu))
    with mesh if own == "tpu" else nullcontext():
        yield target


def _device(platform: str, portable: bool, device: AbstractDevice | None) -> tuple[str, int] | None:
    """Kind and number of cores of the device that is lowered for, if anything says so: that of the program's mesh, the
    abstract device of a mesh in context, or the machine's own, unless the program is for another machine."""
    device = device or jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and platform_name(device.platform or platform) != platform:
        return None
    # Of a GPU that is here, more is known than its mesh says: the compute capability.
    if device is not None and (platform != "cuda" or device.device_kind != jax.devices()[0].device_kind):
        return device.device_kind, device.num_cores or int(platform != "cuda")  # a GPU's 0: as many as the kind has
    own = jax.devices()[0]
    if (portable and device is None) or platform_name(own.platform) != platform:
        return None
    if platform == "cuda":
        return f"{own.device_kind} {own.compute_capability}", own.core_count
    return own.device_kind, getattr(own, "num_cores", 1)
