"""Products of the same rows with several matrices. Kernels add the cotangents of the rows.

If an array is used twice, JAX adds its cotangents in a pass over memory: it reads both and writes a third. Here, each
product passes its rows on to the next one,

    out_1, rows = passing(rows, rhs_1)
    out_2, rows = passing(rows, rhs_2)

so that in the backward pass the kernel of the first product adds the cotangent that the second one returns.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import Array
from jax._src.dispatch import apply_primitive  # no public name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ragged.core.mesh import axes_beyond
from ragged.primitive import primitive
from ragged.primitive.primitive import bind
from ragged.product.operands import Call, Epilogue, Operands

passing_p = Primitive("ragged_matmul_passing")
passing_p.multiple_results = True


def products(x: Operands, matrices: Sequence[Any], calls: Sequence[Call]) -> list[Array]:
    """The products of the rows of `x` with each of `matrices`. `x` has neither a batch axis nor an epilogue."""
    found = []
    for rhs, call in zip(matrices, calls, strict=True):
        out, rows = _bind(x._replace(rhs=rhs), call)
        found.append(out)
        x = _with_rows(x, rows)
    return found


def _bind(x: Operands, call: Call) -> tuple[Array, Array]:
    """`(out, rows)`: the product, and its rows for the next product."""
    leaves, tree = jax.tree.flatten(primitive.vary_except_data(x))
    out, rows = passing_p.bind(*leaves, tree=tree, call=call)
    return out, rows


def _rows(x: Operands) -> Any:
    """The array that is differentiated as the rows."""
    return x.lhs.data if x.gather is None else x.gather.rows


def _with_rows(x: Operands, rows: Any) -> Operands:
    if x.gather is None:
        return x._replace(lhs=x.lhs._replace(data=rows))
    return x._replace(gather=x.gather._replace(rows=rows))


def _passing(*args: Any, tree: Any, call: Call) -> list[Any]:
    x = tree.unflatten(args)
    return [bind(x, call), _rows(x)]


def _abstract_eval(*avals: Any, tree: Any, call: Call) -> tuple[list[Any], frozenset[Any]]:
    out, effects = primitive.abstract_eval(*avals, tree=tree, call=call)
    return [out, _rows(tree.unflatten(avals))], effects


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, tree: Any, call: Call) -> tuple[Any, Any]:
    x, dx = tree.unflatten(primals), tree.unflatten(tangents)
    rows, drows = _rows(x), _rows(dx)
    zero = ad.Zero(jax.typeof(rows).to_tangent_aval())
    out, dout = primitive.jvp(primals, tree.flatten_up_to(_with_rows(dx, zero)), tree=tree, call=call)
    if not isinstance(drows, ad.Zero):
        term, drows = _bind(x._replace(lhs=x.lhs._replace(data=drows), gather=None), call)
        dout = term if isinstance(dout, ad.Zero) else term + dout
    return [out, rows], [dout, drows]


def _transpose(cts: Sequence[Any], *args: Any, tree: Any, call: Call) -> list[Any]:
    """As `primitive.transpose`. The kernel that computes the cotangent of the rows also adds `passed`, the cotangent
    from the next products."""
    ct, passed = cts
    of = tree.unflatten([arg.aval if ad.is_undefined_primal(arg) else None for arg in args])
    if isinstance(passed, ad.Zero) or _rows(of) is None:
        return primitive.transpose(ct, *args, tree=tree, call=call)
    if isinstance(ct, ad.Zero):
        return tree.flatten_up_to(_with_rows(jax.tree.map(lambda _: None, of), passed))
    if axes_beyond(_rows(of), [ct]):  # The product is summed over devices before it is rounded.
        found = tree.unflatten(primitive.transpose(ct, *args, tree=tree, call=call))
        return tree.flatten_up_to(_with_rows(found, _rows(found) + passed))

    def product(_: str, x: Operands, call: Call) -> Array:
        # `passed` is the cotangent of the same rows from another product, which has a tail of zeros.
        return bind(x._replace(epilogue=Epilogue(passed)), call._replace(has_zero_tail=True))

    return tree.flatten_up_to(primitive.cotangents(ct, tree.unflatten(args), call, of, product))


def _batch(args: Sequence[Any], dims: Sequence[Any], *, tree: Any, call: Call) -> tuple[Any, Any]:
    out, dim = primitive.batch(args, dims, tree=tree, call=call)
    return [out, _rows(tree.unflatten(args))], [dim, _rows(tree.unflatten(dims))]


passing_p.def_impl(partial(apply_primitive, passing_p))
passing_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[passing_p] = _jvp
ad.primitive_transposes[passing_p] = _transpose
batching.primitive_batchers[passing_p] = _batch
mlir.register_lowering(passing_p, mlir.lower_fun(_passing, multiple_results=True))
