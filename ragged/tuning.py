"""How products are computed: see it, choose it, measure what is fastest here.

ragged.tuning.candidates(x, w)                     # configurations to try, best by the model first
ragged.matmul(x, w, config=GpuConfig(...))         # one product's
with ragged.tuning.using(GpuConfig(...)): ...      # all products'
ragged.tuning.autotune(x, w)                       # measures, and remembers what was fastest
"""

from ragged.backends.config import Config as Config
from ragged.backends.config import Configs as Configs
from ragged.backends.config import GpuConfig as GpuConfig
from ragged.backends.config import TpuConfig as TpuConfig
from ragged.backends.config import XlaConfig as XlaConfig
from ragged.backends.config import using as using
