"""Products whose rows go through an activation, differentiable: what derivatives keep, and what they compute again."""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from ragged import _fused
from ragged._epilogue import How, Inputs, combined, composed, products, with_biases
from ragged._mesh import vary_together
from ragged.quant.formats import accumulator_dtype
from ragged.quant.training import made_of_lhs
from ragged.tensor.rows import spread_rows
from ragged.tensor.tensor import GroupedTensor

if TYPE_CHECKING:
    from ragged._matmul import MatmulProduct

PRE_ACTIVATION = "ragged_pre_activation"
"""The name that `jax.checkpoint`'s policies know pre-activations by."""
_FLOAT16 = float(jnp.finfo(jnp.float16).min), float(jnp.finfo(jnp.float16).max)


def finished(products: "tuple[MatmulProduct, ...]") -> GroupedTensor:
    """`activation(z)`, or `activation(z[0]) * z[1]`, of products `z` with their biases."""
    how, x = _inputs(products)
    if products[0].save == "pre":
        return products[0].tensor(_compiled(how, x))
    index = x.operands[0].gather

    # What index and buffer say isn't kept, but gathered again.
    def again(x: Inputs) -> Array:
        if index is None:
            return _compiled(how, x)
        return _compiled(how, _with_rows(x, spread_rows(x.operands[0].lhs.data, index.source, index.places)))

    return products[0].tensor(jax.checkpoint(again)(x if index is None else _with_rows(x, None)))


def with_pre_activations(products: "tuple[MatmulProduct, ...]") -> tuple[GroupedTensor, tuple[Array, ...]]:
    """`finished`, and `z`, rounded, which is all that its derivative needs besides operands."""
    out, z = _both(*_inputs(products))
    return products[0].tensor(out), z


def _inputs(products: "tuple[MatmulProduct, ...]") -> tuple[How, Inputs]:
    how = How(tuple(product.call for product in products), products[0].activation)
    inputs = zip(*((product.operands, product.recipe, product.made, product.bias) for product in products), strict=True)
    return how, Inputs(*inputs, first_dims=products[0].first_dims)


def _with_rows(x: Inputs, rows: Array | None) -> Inputs:
    """With these copies of the rows that an index gathers."""
    operands = (each._replace(gather=each.gather._replace(rows=rows)) for each in x.operands)
    return x._replace(operands=tuple(operands))


# Both are compiled so that what a derivative doesn't need isn't computed eagerly.
@partial(jax.jit, static_argnums=0, inline=True)
def _compiled(how: How, x: Inputs) -> Array:
    return _both(how, x)[0]


@partial(jax.jit, static_argnums=0, inline=True)
def _both(how: How, x: Inputs) -> tuple[Array, tuple[Array, ...]]:
    if len(how.calls) > 1:  # of the same rows: quantised and kept once
        of_rows = made_of_lhs(x.recipes, x.operands[0], how.calls[0])
        x = x._replace(made=tuple(of_rows | made for made in x.made))
    return _activated(how, x)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _activated(how: How, x: Inputs) -> tuple[Array, tuple[Array, ...]]:
    """The result, rounded once; and the pre-activations, rounded too, which are all that its derivative needs.

    By one kernel where there may be one.
    """
    fused = _fused.bind(how, x)
    return composed(how, x) if fused is None else (fused[0], tuple(fused[1:]))


def _derivative(how: How, primals: tuple[Inputs], tangents: tuple[Inputs]) -> tuple[Any, Any]:
    (x,), dtype = primals, how.calls[0].dtype
    out, z = _activated(how, x)
    z = tuple(checkpoint_name(each, PRE_ACTIVATION) for each in z)
    leaves, tree = jax.tree.flatten(x)
    moving = {i: d for i, d in enumerate(tree.flatten_up_to(tangents[0])) if not isinstance(d, SymbolicZero)}

    def its_products(moved: dict[int, Array]) -> tuple[Array, ...]:
        return products(how, tree.unflatten([moved.get(i, leaf) for i, leaf in enumerate(leaves)]), dtype)

    def biased(found: tuple[Array, ...], moved: dict[int, Array]) -> tuple[Array, ...]:
        biases = tuple(moved.get(i, bias) for i, bias in enumerate(x.biases))
        return with_biases(x._replace(biases=biases), found)

    def result(z: tuple[Array, ...]) -> Array:
        return combined(how, x, tuple(each.astype(accumulator_dtype(dtype)) for each in z)).astype(dtype)

    # What is elementwise is computed again from the pre-activations, not kept. None of it is in the forward pass; and
    # without a barrier it reads them where a loop has stacked them.
    @partial(jax.checkpoint, prevent_cse=False)
    def elementwise(z: tuple[Array, ...], dproducts: Any, dbiases: dict[int, Array]) -> tuple[Array, tuple[Array, ...]]:
        # Linear, so that `z` may stand for the products; and by its rule, which sums over rows in float32.
        _, dz = jax.jvp(biased, (z, {i: x.biases[i] for i in dbiases}), (dproducts, dbiases))
        if dtype == jnp.float16:  # beyond its range activations are finite, and at infinity their derivatives NaN
            z = tuple(jnp.clip(each, *_FLOAT16) for each in z)
        return jax.jvp(result, (z,), (dz,))[1], dz

    _, dproducts = jax.jvp(its_products, ({i: leaves[i] for i in moving},), (moving,))
    dbiases = {i: each for i, each in enumerate(tangents[0].biases) if not isinstance(each, (type(None), SymbolicZero))}
    # One kernel's results vary over all mesh axes that any operand varies over; so must their tangents.
    dproducts = tuple(vary_together(dproducts, like=z))
    dout, dz = elementwise(z, dproducts, dbiases)
    dout, *dz = vary_together([dout, *dz], like=[out, *z])
    return (out, z), (dout, tuple(dz))


_activated.defjvp(_derivative, symbolic_zeros=True)
