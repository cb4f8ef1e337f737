"""`jax.lax`'s grouped products, by the same names."""

from ragged.ops.lax import ragged_dot as ragged_dot
from ragged.ops.lax import ragged_dot_general as ragged_dot_general
