"""What kernels and XLA's loops do each time that they run: products of tiles, and what is written without one."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas

from ragged.backends import base
from ragged.backends.xla import backend
from ragged.primitive.lowering import BACKENDS
from tests import gpu


@contextmanager
def executed() -> Iterator[Counter[str]]:
    """Counts "dots", their "flops", and "idle": tiles of Triton's results without a dot; or "steps" of a Pallas grid,
    of which those that aren't dots are idle."""
    counts: Counter[str] = Counter()
    for each in BACKENDS.values():  # whose modules must not import what is patched below
        if each.refusal is None:
            each.load()
    dot, pallas_call = base.dot, pallas.pallas_call

    def note(out: Any, value: Any, of: Any) -> Any:
        def count(x: Any, value: Any) -> Any:
            counts.update({name: int(n) for name, n in of(int(value)).items()})
            return x

        return jax.pure_callback(count, jax.ShapeDtypeStruct(out.shape, out.dtype), out, value)

    def counted_dot(x: Any, y: Any, contract: tuple[int, int], *args: Any, batch: int = 0) -> Any:
        out = dot(x, y, contract, *args, batch=batch)
        flops = 2 * math.prod(out.shape) * x.shape[contract[0]]
        return note(out, jnp.int32(0), lambda _: {"dots": math.prod(x.shape[:batch]), "flops": flops})

    def counted_call(*args: Any, **options: Any) -> Any:
        call, grid = pallas_call(*args, **options), options["grid_spec"].grid

        def run(*operands: Any) -> Any:
            steps = math.prod(n for n in grid if isinstance(n, int)) * jnp.int32(1)
            for n in grid:
                steps = steps if isinstance(n, int) else steps * jnp.reshape(n, ())
            return note(call(*operands), steps, lambda steps: {"steps": steps})

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "dot", counted_dot)
        patch.setattr(backend, "dot", counted_dot)
        patch.setattr(pallas, "pallas_call", counted_call)
        if gpu.triton_call.missing() == "":
            _count_triton(patch, counts)
        jax.clear_caches()  # programs that were compiled before don't count
        yield counts
    jax.clear_caches()


def _count_triton(patch: pytest.MonkeyPatch, counts: Counter[str]) -> None:
    from ragged.backends.gpu import interpreter

    builder, since = interpreter._Builder, Counter[str]()
    store, dot, stores = builder.create_masked_store, builder.create_dot, itertools.count()

    def counted_store(*args: Any, **options: Any) -> Any:
        if next(stores) % 2 == 0:  # A tile is stored inside of its group, then outside.
            counts.update(idle=int(not since["dots"]))
            since.clear()
        return store(*args, **options)

    def counted_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        since.update(dots=1)
        (rows, depth), columns = a.data.shape, b.data.shape[1]
        counts.update(dots=1, flops=2 * rows * depth * columns)
        return dot(self, a, b, *args)

    patch.setattr(builder, "create_masked_store", counted_store)
    patch.setattr(builder, "create_dot", counted_dot)
