"""Layers for each group: Equinox modules, short enough to be read and copied."""

from ragged.nn.linear import GroupedLinear as GroupedLinear
from ragged.nn.moe import Experts as Experts
from ragged.nn.moe import MoE as MoE
from ragged.nn.moe import MoEStats as MoEStats
