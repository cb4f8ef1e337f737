"""How products are computed: see it, choose it, measure what is fastest here.

ragged.tuning.candidates(x, w)                     # configurations to try, best by the model first
ragged.matmul(x, w, config=GpuConfig(...))         # one product's
with ragged.tuning.using(GpuConfig(...)): ...      # all products'
ragged.tuning.autotune(x, w)                       # measures, and remembers what was fastest
"""

from ragged._autotune import Tuned, Tuning, autotune, candidates
from ragged._sizes import sample_sizes
from ragged.backends.cache import Found, cache_entries, cache_path, clear_cache, load_cache, save_cache
from ragged.backends.config import Config, Configs, GpuConfig, TpuConfig, XlaConfig, using

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
