"""Which kernels a program has: a product that a backend can't compute runs in XLA, without a word."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from ragged.backends.base import Target
from ragged.primitive import lowering
from ragged.primitive.lowering import BACKENDS
from ragged.product.operands import Call, Operands
from tests import gpu


@contextmanager
def launches(in_loops: bool = False) -> Iterator[list[tuple[str, str]]]:
    """Lists `(backend, kernel)` of each product that is lowered in here. With `in_loops`, XLA multiplies small products
    in loops over tiles, as it does with large ones.

    The kernel of rows that are read through an index ends with " by index", and that of an epilogue with the number of
    arrays that it stores, as in "grouped_matmul by index -> 3".
    """
    found: list[tuple[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, backend in BACKENDS.items():
            if backend.refusal is None:
                module = backend.load()

                def run(launch: Any, x: Any, name: str = name, run: Any = module.run) -> Any:
                    by_index = " by index" if x.gather is not None else ""
                    stored = f" -> {launch.call.num_stored}" if launch.call.epilogue is not None else ""
                    found.append((name, launch.kernel + by_index + stored))
                    return run(launch, x)

                patch.setattr(module, "run", run)
                if in_loops and name == "xla":
                    patch.setattr(module, "_SMALL", 0)
        yield found


@contextmanager
def only(*backends: str) -> Iterator[None]:
    """That these backends, and no others, compute the products that are lowered in here."""
    jax.clear_caches()  # programs that were compiled before aren't lowered again
    with launches() as found:
        yield
    assert {backend for backend, _ in found} == set(backends), f"these were lowered: {sorted(set(found))}"


@contextmanager
def interpreted(backend: str) -> Iterator[None]:
    """On the CPU, another platform's kernels are its own in here, are interpreted, and compute all products.

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
        with only(backend):
            yield


def equations(jaxpr: Any, primitive: str) -> list[Any]:
    """Those of a primitive, in a jaxpr and in all that it calls."""
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] if eqn.primitive.name == primitive else []
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            found += equations(getattr(value, "jaxpr", value), primitive) if hasattr(value, "eqns") else []
    return found
