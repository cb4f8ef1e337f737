"""What is made of a product's rows before they are rounded: a bias, an activation, a gate."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ragged._errors import Site, describe, is_arraylike
from ragged.backends import schedule
from ragged.backends.base import ACTIVATIONS
from ragged.product.operands import Call, Operands
from ragged.product.primitive import bind
from ragged.quant.formats import accumulator_dtype
from ragged.quant.recipe import Recipe
from ragged.quant.training import Made, quantized_product
from ragged.tensor.arithmetic import per_group
from ragged.tensor.tensor import GroupedTensor

if TYPE_CHECKING:
    from ragged._matmul import MatmulProduct

LAYOUTS = ("forward", "batched", "inner_rows")
SAVES = ("pre", "out")


class How(NamedTuple):
    """All that is static about it. With two products, the first one's is the gate."""

    calls: tuple[Call, ...]
    activation: str | None


class Inputs(NamedTuple):
    """By product, its operands, its recipe and its bias; the groups of the result's rows, if they are ragged."""

    operands: tuple[Operands, ...]
    recipes: tuple[Recipe | None, ...]
    made: tuple[Made, ...]  # what of the operands is quantised already
    biases: tuple[Array | None, ...]
    first_dims: Array | Any


def composed(how: How, x: Inputs) -> tuple[Array, tuple[Array, ...]]:
    """The result, rounded once; and the pre-activations, rounded too. Of products in float32, in memory."""
    dtype = how.calls[0].dtype
    z = with_biases(x, products(how, x, accumulator_dtype(dtype)))
    return combined(how, x, z).astype(dtype), tuple(each.astype(dtype) for each in z)


def products(how: How, x: Inputs, dtype: Any) -> tuple[Array, ...]:
    """Each product plus what it is added to, `[rows, n]` or `[g, m, n]`, in `dtype`."""
    found = []
    for call, operands, recipe, made in zip(how.calls, x.operands, x.recipes, x.made, strict=True):
        existing = operands.epilogue.existing
        if existing is not None:
            operands = operands._replace(epilogue=operands.epilogue._replace(existing=existing.astype(dtype)))
        call = call._replace(dtype=jnp.dtype(dtype))
        found.append(bind(operands, call) if recipe is None else quantized_product(recipe, operands, call, made))
    return tuple(found)


def with_biases(x: Inputs, products: tuple[Array, ...]) -> tuple[Array, ...]:
    """Each product plus its bias: `(n,)`, or a row for each group that its operands hold, `[h, n]`."""
    found = []
    for out, bias, operands in zip(products, x.biases, x.operands, strict=True):
        if bias is not None:
            wide = accumulator_dtype(out.dtype)  # in which the gradient of the bias is summed, too
            z, rows = GroupedTensor(out.astype(wide), x.first_dims), bias.astype(wide)
            if rows.ndim == 1 and operands.offset is None:
                z = z.map(lambda data, rows=rows: data + jnp.broadcast_to(rows, data.shape))
            elif operands.offset is None:
                z = z + per_group(rows)
            else:
                index, is_held = _index_of_held(z, operands)
                if rows.ndim == 1:
                    rows = jnp.where(is_held[:, None], rows[None], 0)
                else:
                    rows = schedule.of_groups(rows, jnp.where(is_held, index, rows.shape[0]), 0)
                z = z + per_group(rows)
            out = z.data.astype(out.dtype)
        found.append(out)
    return tuple(found)


def _index_of_held(z: GroupedTensor, x: Operands) -> tuple[Array, Array]:
    """Of each group, which of the held ones it is, or out of range; and whether it is one. Both `(g,)`."""
    index, count = jnp.arange(z.num_groups, dtype=jnp.int32) - x.offset, x.rhs.data.shape[-3]
    return index, (index >= 0) & (index < count)


def combined(how: How, x: Inputs, z: tuple[Array, ...]) -> Array:
    """The result, of pre-activations in float32."""
    out, operands = activated(how.activation, z, x.first_dims), x.operands[0]
    # Rows of groups that aren't held. Without a function of them they are zero, or `existing_out`'s, already.
    if operands.offset is not None and (how.activation is not None or len(z) > 1):
        is_held = per_group(_index_of_held(out, operands)[1].astype(jnp.int32))
        out = out._combine(is_held, lambda data, held: jnp.where(held == 1, data, 0), "where")
    return jnp.asarray(out.data)


def activated(activation: str | None, z: tuple[Array, ...], first_dims: Array | Any) -> GroupedTensor:
    """`activation(z[0])`, or `activation(z[0]) * z[1]`, of rows `[rows, n]` in these groups."""
    function = ACTIVATIONS.get(activation or "", lambda z: z)
    return GroupedTensor(z[0], first_dims).map(lambda gate: math.prod(z[1:], start=function(gate)))


def check_names(site: Site, activation: Any, save: Any, is_gated: bool = False) -> None:
    """Whether an activation and what to keep are among those that there are."""
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        known = ", ".join(repr(name) for name in ACTIVATIONS)
        own = "to the gate: `matmul(x, w_gate).map(lambda gate, up: fn(gate) * up, matmul(x, w_up))`"
        own = own if is_gated else "to the result, by `.map(fn)`"
        mend = f"Pass one of {known}; or apply your own {own}."
        site.fail(ValueError, f"unknown `activation` {describe(activation)}.", mend)
    if save not in SAVES:
        mend = "Pass 'pre', to keep the pre-activations for the derivative, or 'out', to compute them again."
        if save == "nothing":
            mend = "A result is kept by what takes it: wrap both in `jax.checkpoint`, or pass 'out' to compute the "
            mend += "pre-activations again."
        site.fail(ValueError, f"unknown `save` {save!r}.", mend)


def check_epilogue(site: Site, product: "MatmulProduct") -> None:
    """Whether the result has rows for a bias and an activation."""
    activation, bias, call = product.activation, product.bias, product.call
    check_names(site, activation, product.save)
    if product.has_epilogue:
        check_rows(site, product, "`bias`" if activation is None else "`activation`")
    if bias is None:
        return
    site = site.also(bias=bias)
    if not is_arraylike(bias) or not jnp.issubdtype(bias.dtype, jnp.floating):
        site.fail(TypeError, "`bias` is not a floating array.", "Pass [groups, n], or (n,).")
    rows, n = (call.held(product.operands), call.shape[-1]), call.shape[-1]
    if bias.shape not in (rows, (n,)):
        problem = f"`bias` must have shape {rows}, a row for each group, or {(n,)}, one for all."
        site.fail(ValueError, problem, "Its last dim is the result's.")


def check_rows(site: Site, product: "MatmulProduct", what: str) -> None:
    """Whether the result has rows of floats."""
    layout, dtype, spec = product.layout.name, jnp.dtype(product.call.dtype), product.call.out_spec
    if layout not in LAYOUTS:
        mend = "It is for ragged rows, or for matrices of uniform groups."
        if layout in ("forward_left", "inner_columns"):
            mend += " The transposed product has rows: `matmul(rhs.mT, lhs.mT)`."
        site.fail(ValueError, f"{what} is given, but the layout {layout!r} has a result without rows.", mend)
    if not jnp.issubdtype(dtype, jnp.floating):
        site.fail(
            TypeError,
            f"{what} is given, but the result is {dtype.name}.",
            "Ask for a float by `preferred_element_type`.",
        )
    if spec is not None and spec.unreduced:
        site.fail(ValueError, f"{what} is given, but the result is unreduced.", "Apply it once the result is summed.")
