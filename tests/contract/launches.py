"""Which kernels a program has: a product that a backend can't compute runs in XLA, without a word."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from ragged.primitive.lowering import BACKENDS


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


def equations(jaxpr: Any, primitive: str) -> list[Any]:
    """Those of a primitive, in a jaxpr and in all that it calls."""
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] if eqn.primitive.name == primitive else []
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            found += equations(getattr(value, "jaxpr", value), primitive) if hasattr(value, "eqns") else []
    return found
