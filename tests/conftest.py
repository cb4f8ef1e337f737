"""Every test runs with the whole of `ragged` under jaxtyping's import hook, so annotations are checked at run time."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

with install_import_hook("ragged", "beartype.beartype"):
    import ragged  # noqa: F401
