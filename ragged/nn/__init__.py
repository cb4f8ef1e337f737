"""Layers with parameters for each group, as Equinox modules."""

from ragged.nn.linear import GroupedLinear as GroupedLinear
from ragged.nn.moe import Experts as Experts
from ragged.nn.moe import MoE as MoE
from ragged.nn.moe import MoEStats as MoEStats
from ragged.nn.router import Router as Router
from ragged.nn.router import Routing as Routing
