"""Grouped arrays and grouped matrix products for JAX."""

from ragged import _export as _export
from ragged._arithmetic import per_group as per_group
from ragged._arithmetic import per_row as per_row
from ragged._concat import concat as concat
from ragged._error_table import ErrorTable as ErrorTable
from ragged._error_table import error_table as error_table
from ragged._explain import explain as explain
from ragged._grouped import grouped_matmul as grouped_matmul
from ragged._grouped import transposed_grouped_matmul as transposed_grouped_matmul
from ragged._matmul import matmul as matmul
from ragged._quantize import quantize as quantize
from ragged._recipe import Cast as Cast
from ragged._recipe import Recipe as Recipe
from ragged._route import Route as Route
from ragged._route import route as route
from ragged._scaling import Float8e8m0fnu as Float8e8m0fnu
from ragged._scaling import Scaling as Scaling
from ragged._tensor import GroupedTensor as GroupedTensor

__version__ = "0.1.0"
