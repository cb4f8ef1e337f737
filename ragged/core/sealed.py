"""Sealed arrays: float32 numbers in a pytree that neither an optimiser nor arithmetic can change by accident.

They are stored as random keys, JAX's only arrays that reject arithmetic and pass through every transformation. So
`eqx.is_inexact_array` doesn't select them, and they have no gradient. Two alternatives fail: arrays of
`jax.experimental.primal_tangent_dtype` can't leave `jit`, and integers don't reject arithmetic.
"""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import define_prng_impl

from ragged.core.errors import Site, is_arraylike
from ragged.core.formats import bits


def _no_key(*args: Any) -> NoReturn:
    hint = "Read it as `recipe.history` or `router.selection_bias`."
    Site("jax.random").fail(TypeError, "a sealed array is not a random key.", hint)


_SEAL = define_prng_impl(
    key_shape=(1,),
    seed=_no_key,
    split=_no_key,
    random_bits=_no_key,
    fold_in=_no_key,
    name="ragged_sealed",
    tag="sealed",
)


def sealed(x: Any) -> Any:
    """`x`, if it is a float32 array, as an array of keys; anything else unchanged."""
    if not is_arraylike(x) or x.dtype != jnp.float32:
        return x
    return jax.random.wrap_key_data(bits(jnp.asarray(x), jnp.uint32)[..., None], impl=_SEAL)


def unsealed(x: Array) -> Array:
    """Inverse of `sealed`. Anything but an array of keys is returned unchanged."""
    if not is_arraylike(x) or not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return bits(jax.random.key_data(x)[..., 0], jnp.float32)
