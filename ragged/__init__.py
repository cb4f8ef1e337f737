"""Grouped arrays and grouped matrix products for JAX."""

from ragged import _export as _export
from ragged import nn as nn
from ragged import parallel as parallel
from ragged import tuning as tuning
from ragged._explain import explain as explain
from ragged._grouped import grouped_matmul as grouped_matmul
from ragged._grouped import transposed_grouped_matmul as transposed_grouped_matmul
from ragged._matmul import matmul as matmul
from ragged._sharded import sharded_matmul as sharded_matmul
from ragged._version import __version__ as __version__
from ragged.parallel.exchange import Exchange as Exchange
from ragged.parallel.exchange import exchange as exchange
from ragged.quant.error_table import ErrorTable as ErrorTable
from ragged.quant.error_table import error_table as error_table
from ragged.quant.quantize import quantize as quantize
from ragged.quant.recipe import Cast as Cast
from ragged.quant.recipe import Recipe as Recipe
from ragged.quant.scaling import Float8e8m0fnu as Float8e8m0fnu
from ragged.quant.scaling import Scaling as Scaling
from ragged.tensor.arithmetic import per_group as per_group
from ragged.tensor.arithmetic import per_row as per_row
from ragged.tensor.concat import concat as concat
from ragged.tensor.route import Route as Route
from ragged.tensor.route import route as route
from ragged.tensor.tensor import GroupedTensor as GroupedTensor
