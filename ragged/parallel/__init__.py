"""Expert parallelism: exchanging rows between devices, and estimating the costs of a layer of experts."""

from ragged.parallel.estimate import Estimate as Estimate
from ragged.parallel.estimate import estimate as estimate
