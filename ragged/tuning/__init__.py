"""Configurations of products: list them, choose one, and measure which is fastest on this device.

ragged.tuning.candidates(x, w)                     # configurations to try, the default first
ragged.matmul(x, w, backend=GpuConfig(...))        # the configuration of one product
with ragged.tuning.using(GpuConfig(...)): ...      # the configuration of all products in the block
ragged.tuning.autotune(x, w)                       # measures configurations and caches the fastest
"""

from ragged.backends.cache import Found, cache_entries, cache_path, clear_cache, load_cache, save_cache
from ragged.product.config import Config, Configs, GpuConfig, TpuConfig, XlaConfig, using
from ragged.tuning.search import Tuned, Tuning, autotune, candidates
from ragged.tuning.sizes import sample_sizes

__all__ = [
    "Config",
    "Configs",
    "Found",
    "GpuConfig",
    "TpuConfig",
    "Tuned",
    "Tuning",
    "XlaConfig",
    "autotune",
    "cache_entries",
    "cache_path",
    "candidates",
    "clear_cache",
    "load_cache",
    "sample_sizes",
    "save_cache",
    "using",
]
