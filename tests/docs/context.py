"""Examples are for users, who have JAX's default promotion."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def jax_defaults() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
