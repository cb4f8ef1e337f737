"""Which kernels ran, as opposed to which were asked for: a product that a backend lacks runs in XLA, silently."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax import Array
from jax.experimental import pallas

from ragged.backends.base import Launch, Target
from ragged.backends.gpu import call as triton_call
from ragged.backends.xla import backend as xla
from ragged.primitive import lowering
from ragged.product.operands import Call, Operands
from tests import gpu

Launches = list[tuple[str, str]]


@contextmanager
def watch() -> Iterator[Launches]:
    """Lists what computes products that are to be interpreted, each time that it runs in here:
    `("pallas_tpu", "grouped_matmul_64x128x128")`, `("xla", "grouped_matmul")`, ….

    A result passes through a callback, which notes it: what was only traced, or whose result nobody needs, doesn't
    count; and a program counts each time that it runs, however often it was compiled.
    """
    launches: Launches = []

    def note(backend: str, name: str, out: Any) -> Any:
        def announce(x: Any) -> Any:
            launches.append((backend, name))
            return x

        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out)
        return jax.pure_callback(announce, like, out)

    def pallas_call(*args: Any, **options: Any) -> Callable[..., Any]:
        run = pallas_call_itself(*args, **options)
        if not options.get("interpret"):
            return run
        return lambda *operands: note("pallas_tpu", options.get("name", ""), run(*operands))

    def triton(*args: Any, name: str, interpret: bool, **options: Any) -> Any:
        out = triton_itself(*args, name=name, interpret=interpret, **options)
        return note("triton_gpu", name, out) if interpret else out

    def run(launch: Launch, x: Operands) -> Array:
        out = run_itself(launch, x)
        return note("xla", launch.kernel, out) if launch.target.interpret and launch.kernel != "zeros" else out

    pallas_call_itself, triton_itself, run_itself = pallas.pallas_call, triton_call.call, xla.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas, "pallas_call", pallas_call)
        patch.setattr(triton_call, "call", triton)
        patch.setattr(xla, "run", run)
        jax.clear_caches()  # programs that were compiled before don't tell
        yield launches
    jax.clear_caches()


@contextmanager
def only(backends: str, launches: Launches) -> Iterator[None]:
    """That these backends, "pallas_tpu" or "pallas_tpu and xla", and no others, compute products in here."""
    launches.clear()
    yield
    assert {backend for backend, _ in launches} == set(backends.split(" and ")), f"these ran: {sorted(set(launches))}"


@contextmanager
def interpreted(backend: str) -> Iterator[Launches]:
    """On the CPU, another platform's kernels are its own in here, and are interpreted. What ran, as `watch` has it.

    Triton's are for a GPU that has fp8: the portable program lacks it.
    """
    compute, device = lowering.compute, (gpu.FIRST_WITH_FP8, 0) if backend == "triton_gpu" else None

    def on_cpu(platform: str, operands: Operands, call: Call, target: Target, *composed: Any) -> Any:
        if platform == "cpu":
            target = target._replace(interpret=True, device=device)
        return compute(platform, operands, call, target, *composed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lowering.PLATFORMS, "cpu", backend)
        patch.setattr(lowering, "compute", on_cpu)
        with watch() as launches:
            yield launches
