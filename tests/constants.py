"""Programs whose operands are arguments or constants, on one device or within a `shard_map` on two."""

from collections.abc import Callable
from typing import Any
from zlib import crc32

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def replicated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` on each of two devices, with the same operands."""
    mesh = jax.make_mesh((2,), ("both",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P())


def closed_over(fn: Callable[..., Any], args: tuple[Any, ...], are_constants: tuple[bool, ...]) -> Any:
    """`fn(*args)`, as one program of which some of the operands are constants."""

    def program(*arguments: Any) -> Any:
        rest = iter(arguments)
        return fn(*(arg if fixed else next(rest) for arg, fixed in zip(args, are_constants, strict=True)))

    return jax.jit(program)(*(arg for arg, fixed in zip(args, are_constants, strict=True) if not fixed))


def run(case: Any, fn: Callable[..., Any], *args: Any, maps: bool = True) -> Any:
    """`fn(*args)`, as one program. `case`, a seed or a name, chooses which operands are constants of it, and whether it
    is within a `shard_map`, unless `maps` is false."""
    are_constants, is_mapped = choice(case, len(args))
    return closed_over(replicated(fn) if maps and is_mapped else fn, args, are_constants)


def choice(case: Any, count: int) -> tuple[tuple[bool, ...], bool]:
    """`(are_constants, is_mapped)`: which of `count` operands are constants, and whether there is a `shard_map`."""
    rng = np.random.default_rng(crc32(repr(case).encode()))
    return tuple(bool(fixed) for fixed in rng.integers(2, size=count)), bool(rng.integers(2))
