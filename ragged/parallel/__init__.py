"""Many devices: what a product alone can't say."""

from ragged.parallel.estimate import Estimate as Estimate
from ragged.parallel.estimate import estimate as estimate
