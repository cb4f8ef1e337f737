"""A call of `matmul`: its unchecked `Arguments`, and the checked `Request`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
from jax import Array

from ragged.core.errors import Site
from ragged.primitive.primitive import bind
from ragged.primitive.shared import Merge
from ragged.product.function import Function
from ragged.product.layout import Layout
from ragged.product.operands import Call, Operands
from ragged.quant.recipe import Recipe
from ragged.quant.training import quantized, quantized_product
from ragged.tensor.tensor import GroupedTensor

# `isinstance` would allow True, which equals 1.
_STATIC = str, int, jax.lax.Precision, jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The keyword arguments of `matmul`, unchecked."""

    preferred_element_type: Any = None
    precision: Any = None
    existing_out: Any = None
    group_offset: Any = None
    num_actual_groups: Any = None
    capacity: Any = None
    max_last: Any = None
    bias: Any = None
    activation: Any = None
    save: Any = "pre"
    name: Any = None
    backend: Any = None
    recipe: Any = None
    out_sharding: Any = None

    @property
    def is_static(self) -> bool:
        """True if each argument is None, a name, a dtype, a precision or an extent."""
        given = [value for name, value in vars(self).items() if value is not None and name != "preferred_element_type"]
        return all(type(value) in _STATIC for value in given) and type(self.group_offset) is not int

    @staticmethod
    def of(site: Site, options: Mapping[str, Any]) -> "Arguments":
        """The arguments from `**options` of another function. `TypeError` for an unknown name."""
        known = [field.name for field in fields(Arguments)]
        if unknown := [name for name in options if name not in known]:
            names = ", ".join(f"`{name}`" for name in known)
            site.fail(TypeError, f"`matmul` has no option `{unknown[0]}`.", f"Its options are {names}.")
        return Arguments(**options)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["operands", "recipe", "bias", "first_dims", "last_dims", "both"],
    meta_fields=["call", "layout", "is_swapped", "is_local", "function", "save", "name", "columns", "merge"],
)
@dataclass(frozen=True)
class Request:
    """A checked product of `matmul`. A gated product is two requests with the same rows, the gate's first."""

    operands: Operands
    recipe: Recipe | None  # with its casts in the order of `operands`
    bias: Array | None
    first_dims: Array | None  # of the result
    last_dims: Array | None  # of the result
    call: Call
    layout: Layout
    is_swapped: bool  # whether the product's buffer is the transposed result
    function: Function | None  # of the pre-activations of all requests
    save: str
    name: str  # of the saved pre-activations in policies of `jax.checkpoint`
    # The one weight of `gated_matmul(columns=...)`, or None; only in the gate's request. It gets the cotangent, and
    # the matrices in the operands of both requests get none.
    both: Array | None = None
    columns: str = ""  # the order of its columns: "halves" or "interleaved"
    is_local: bool = True  # see `is_of_one_device`
    merge: Merge | None = None  # If all groups share a matrix: `operands` and `call` have one group.

    @property
    def has_epilogue(self) -> bool:
        return self.bias is not None or self.function is not None

    def product(self) -> Array:
        """The product's buffer, before bias and activation. A recipe, if any, quantises the operands."""
        if self.recipe is None:
            out = bind(self.operands, self.call)
        else:
            out = quantized_product(self.recipe, self.operands, self.call)
        return out if self.merge is None else self.merge.undo(out)

    def quantized(self) -> tuple[Operands, Call]:
        """`(operands, call)`: the operands, quantised if there is a recipe, and the call that multiplies them."""
        return (self.operands, self.call) if self.recipe is None else quantized(self.recipe, self.operands, self.call)

    def tensor(self, out: Array) -> GroupedTensor:
        """Wraps the product's buffer `out` as the result of `matmul`."""
        return GroupedTensor(out.mT if self.is_swapped else out, self.first_dims, self.last_dims)
