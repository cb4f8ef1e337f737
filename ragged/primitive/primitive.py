"""The JAX primitive of all grouped products: its types, derivatives, batching and lowering.

It takes the leaves of `Operands`. Its parameters are their tree and the `Call`.

    out[i] = existing[i] + lhs[i] @ rhs[i]        (bilinear in lhs and rhs, affine in existing)
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax._src import source_info_util  # no public names for this and the next two
from jax._src.dispatch import apply_primitive, prim_requires_devices_during_lowering
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ragged.backends.base import Target
from ragged.core.errors import Site
from ragged.core.formats import accumulator_dtype, as_array, has_derivative
from ragged.core.mesh import (
    automatic_meshes,
    axes_beyond,
    explicit_mesh,
    explicit_spec,
    partially_manual_mesh,
    resharded,
    vary_over_reduced,
    vary_together,
    varying,
    with_mesh,
)
from ragged.core.rows import collect_rows
from ragged.primitive import lowering, sharding
from ragged.product.operands import Call, Epilogue, Index, Operand, Operands
from ragged.tensor.arithmetic import broadcast_accumulated


def bind(x: Operands, call: Call) -> Array:
    """The product. If an operand is one matrix for all groups, call `merged` before. If the result is unreduced,
    `sharding.mapped` calls it on each device instead."""
    if call.out_spec is not None and call.out_spec.unreduced:  # The primitive's result is never unreduced.
        return _mapped(*jax.tree.flatten(x), call)
    leaves, tree = jax.tree.flatten(x)
    if (mesh := partially_manual_mesh(leaves, call.out_spec)) is not None and not call.options.calls_back:
        # XLA would partition the product's operations, not its kernel, and put collectives into loops whose trip counts
        # differ between devices. So the operands are replicated over the mesh axes that aren't manual.
        whole = jax.shard_map(
            lambda *leaves: bind(tree.unflatten(leaves), call),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names={*mesh.axis_names} - {*mesh.manual_axes},
        )
        return whole(*jax.tree.leaves(vary_except_data(x)))
    primitive = partitioned_matmul_p if _is_partitioned(leaves, call) else ragged_matmul_p
    return primitive.bind(*jax.tree.leaves(vary_except_data(x)), tree=tree, call=call)


def vary_except_data(x: Operands, like: Sequence[Any] = ()) -> Operands:
    """`x` with all arrays varying over the mesh axes of `x` and `like`, except the data of `lhs` and `rhs`.

    Data that is replicated in a `shard_map` stays so, since `cotangents` sums its cotangent over devices. But over a
    mesh axis for which its type is `reduced`, the data varies too: there, its cotangent must stay unreduced.
    """
    x = jax.tree.map(as_array, x)
    everything = [*jax.tree.leaves(x), *like]
    if not varying(everything):
        return x

    vary, index = partial(vary_over_reduced, others=everything), x.gather
    if index is not None:  # The gathered rows vary over the mesh axes of the index.
        source, places = vary_together([index.source, index.places])
        index = Index(source, places, None if index.rows is None else vary(index.rows))
    leaves, tree = jax.tree.flatten(x._replace(lhs=x.lhs.scales, rhs=x.rhs.scales, gather=None))
    others: Operands = tree.unflatten(vary_together(leaves, like=everything))
    lhs = x.lhs._replace(data=vary(x.lhs.data), scales=others.lhs)
    rhs = x.rhs._replace(data=vary(x.rhs.data), scales=others.rhs)
    return others._replace(lhs=lhs, rhs=rhs, gather=index)


def _mapped(leaves: Sequence[Array], tree: Any, call: Call) -> Array:
    """The product of operands that are sharded over explicit axes."""
    mesh: Any = explicit_mesh(leaves, call.out_spec)
    specs = tree.unflatten([jax.typeof(leaf).sharding.spec for leaf in leaves])
    return sharding.mapped(tree.unflatten(leaves), call, bind, mesh=mesh, over=mesh.explicit_axes, specs=specs)


ragged_matmul_p = Primitive("ragged_matmul")
partitioned_matmul_p = Primitive("ragged_matmul_partitioned")
"""The same product over a mesh with `Auto` axes, which XLA partitions by calling back. It is a separate primitive,
because JAX has to know the devices of such a program when it lowers it."""
PRIMITIVES = ragged_matmul_p, partitioned_matmul_p
prim_requires_devices_during_lowering.add(partitioned_matmul_p)


def _is_partitioned(leaves: Sequence[Any], call: Call) -> bool:
    """Whether XLA partitions the product: only over a mesh of several devices, with only `Auto` axes."""
    several = automatic_meshes(leaves)
    # If the mesh has no devices, the program may run in another process, and XLA can't call back into this one.
    return bool(several) and all(mesh.abstract_device for mesh in several) and not call.options.calls_back


def is_over_devices(equation: Any) -> bool:
    """True if an equation's product is partitioned over several devices when it is lowered."""
    explicit = explicit_mesh([x.aval for x in equation.invars], None)
    return equation.primitive is partitioned_matmul_p or explicit is not None


def abstract_eval(*avals: Any, tree: Any, call: Call) -> tuple[Any, frozenset[Any]]:
    """`(aval, effects)` of a product."""
    x = tree.unflatten(avals)
    assert x.lhs.quantized is None and x.rhs.quantized is None, "only `quant.training.quantized` reads this field"
    shape = (call.batch(x), *call.shape) if call.out_batch and call.batch(x) is not None else call.shape
    like = max(avals, key=lambda aval: len(aval.manual_axis_type.varying))  # Constants may have no mesh.
    mesh, spec = like.sharding.mesh, PartitionSpec(*[None] * len(shape))
    if explicit := explicit_mesh(avals, call.out_spec):
        specs = tree.unflatten([aval.sharding.spec for aval in avals])
        mesh, spec = explicit, sharding.type_of(x, call, specs, explicit)
        spec = PartitionSpec(*spec.partitions, *[None] * (len(shape) - len(spec.partitions)))
    out = like.update(
        shape=shape,
        dtype=jnp.dtype(call.dtype),
        weak_type=False,
        sharding=NamedSharding(mesh, spec),
        manual_axis_type=like.manual_axis_type.update(varying=varying(avals)),
    )
    return out, _interpreter_effects() if call.options.calls_back else frozenset()


@cache
def _interpreter_effects() -> frozenset[Any]:
    """The effects of ordered callbacks, which interpret a TPU's memory and copies."""
    return frozenset(jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects)


def derivative(wrt: str, ct: Any, x: Operands, call: Call, of: Any) -> tuple[Operands, Call]:
    """`(operands, call)` of the product that is the cotangent of `"lhs"` or `"rhs"`, an array like `of`.

    In its einsum, the terms `wrt` and `out` are exchanged. With an index, the cotangent of `lhs` has the gathered rows.
    """
    index = None if wrt == "lhs" else x.gather
    return x._replace(**{wrt: Operand(ct)}, epilogue=Epilogue(), gather=index), call.derivative(wrt, of)


def cotangents(ct: Array, x: Operands, call: Call, of: Operands, product: Callable[..., Array]) -> Operands:
    """Cotangents of the operands that have an array or aval in `of`; None for the others.

    `product(wrt, operands, call)` computes the cotangent of `"lhs"` or `"rhs"`, which is again a product. If an operand
    is replicated in a `shard_map`, its cotangent is summed over devices in the accumulator's dtype, then rounded.
    """
    cts: Operands = jax.tree.map(lambda _: None, x)
    # A recipe may save only a quantised operand. Then its data is None in `x`, and `of` has its type.
    types = x._replace(**{name: getattr(of, name) for name in ("lhs", "rhs") if getattr(x, name).data is None})
    for wrt in ("lhs", "rhs"):
        index = x.gather if wrt == "lhs" else None
        # `like`: the type of the cotangent that the product computes; with an index, it has the gathered rows.
        rows = None if index is None else _gathered_rows(of)
        like = getattr(of, wrt).data if rows is None else rows
        if like is not None:
            if index is not None and rows is None:
                like = rows_of(like, index)
            operands, ct_call = derivative(wrt, ct, x, call, like)
            if axes := axes_beyond(like, [ct]):
                sum_call = ct_call._replace(dtype=ct_call.sum_dtype(types._replace(**{wrt: Operand(ct)})))
                data = lax.psum(product(wrt, operands, sum_call), axes).astype(ct_call.dtype)
            else:
                data = product(wrt, operands, ct_call)
            if rows is not None and cts.gather is not None:
                lhs = cts.lhs._replace(data=None)
                cts = cts._replace(lhs=lhs, gather=cts.gather._replace(rows=data))
            else:
                data = data if index is None else _collected(data, index, getattr(of, wrt).data)
                cts = cts._replace(**{wrt: getattr(cts, wrt)._replace(data=data)})
    if jax.tree.leaves(of.epilogue):
        (epilogue,) = jax.linear_transpose(lambda epilogue: _sum(_added(epilogue, x, call, ct)), of.epilogue)(ct)
        cts = cts._replace(epilogue=epilogue)
    return cts


def _gathered_rows(of: Operands) -> Any:
    """The gathered rows if they are differentiated in place of the buffer, else None."""
    return None if of.gather is None else of.gather.rows


def without_rows(x: Operands) -> Operands:
    """`x` without the copy of the gathered rows, so that the backward pass doesn't save it."""
    return x if x.gather is None else x._replace(gather=x.gather._replace(rows=None))


def rows_of(data: Any, index: Index) -> ShapedArray:
    """The aval of the rows gathered from `data`, an array or an aval."""
    aval = data if isinstance(data, ShapedArray) else jax.typeof(data)
    aval = with_mesh(aval, map(jax.typeof, index[:2]))
    manual = aval.manual_axis_type.update(varying=varying([aval, *index[:2]]))
    shape = (*aval.shape[:-2], index.source.shape[-1], aval.shape[-1])
    return aval.update(shape=shape, weak_type=False, manual_axis_type=manual)


def _collected(rows: Array, index: Index, like: Any) -> Array:
    """The cotangent of a buffer like `like`, an array or an aval, from the cotangent of its gathered rows: summed and
    rounded as in `cotangents`."""
    if axes := axes_beyond(like, [rows, *index[:2]]):
        local_sum = collect_rows(rows, index.source, index.places, accumulator_dtype(like.dtype))
        return lax.psum(local_sum, axes).astype(like.dtype)
    return collect_rows(rows, index.source, index.places)


def _added(epilogue: Epilogue, x: Operands, call: Call, out: Array) -> list[Array]:
    """The arrays that an epilogue adds to a product's result `out`, sharded like it over explicit mesh axes."""
    existing = epilogue.existing  # The other fields are for `fused_p`, which isn't differentiated.
    if existing is None:
        return []
    if (spec := explicit_spec(out)) is not None:
        existing = resharded(existing, jax.typeof(out).sharding.mesh, spec)
    return [lowering.zero_tail(existing, x, call)]


def _sum(terms: list[Array]) -> Array:
    return sum(terms[1:], terms[0])


def check_cotangent(call: Call) -> None:
    """Raises `TypeError` if the cotangent of a product's result would have 8 bits: too few without scales."""
    if jnp.dtype(call.dtype).itemsize == 1:
        Site(call.options.name).fail(
            TypeError,
            f"the result is {jnp.dtype(call.dtype).name}, so its cotangent would have 8 bits too.",
            "Pass `preferred_element_type=jnp.bfloat16`, and quantise or cast the result.",
        )


def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, tree: Any, call: Call) -> tuple[Any, Any]:
    """`d(lhs @ rhs) = dlhs @ rhs + lhs @ drhs`, plus the tangent of `existing`."""
    check_cotangent(call)
    x, dx = tree.unflatten(primals), tree.unflatten(tangents)
    terms, operands = [], ("lhs", "rhs")
    if _gathered_rows(x) is not None:  # These rows are differentiated in place of the buffer.
        if not isinstance(tangent := _gathered_rows(dx), ad.Zero):
            terms.append(bind(x._replace(lhs=Operand(tangent), epilogue=Epilogue(), gather=None), call))
        x, operands = without_rows(x), ("rhs",)
    out = bind(x, call)
    for wrt in operands:
        tangent = getattr(dx, wrt).data
        if not isinstance(tangent, ad.Zero):
            operand = getattr(x, wrt)._replace(data=tangent)
            terms.append(bind(x._replace(**{wrt: operand}, epilogue=Epilogue()), call))
    terms += _added(Epilogue(*(None if isinstance(each, ad.Zero) else each for each in dx.epilogue)), x, call, out)
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, _sum(terms)


def transpose(ct: Any, *args: Any, tree: Any, call: Call) -> list[Any]:
    """The cotangents of undefined primals; None for the others. Only one of `lhs` and `rhs` may be undefined."""
    if isinstance(ct, ad.Zero):
        return [None] * len(args)
    x, of = tree.unflatten(args), tree.unflatten([arg.aval if ad.is_undefined_primal(arg) else None for arg in args])
    if (of.lhs.data is not None or _gathered_rows(of) is not None) and of.rhs.data is not None:
        problem = "a product is linear in each operand, not in both."
        Site(call.options.name).fail(NotImplementedError, problem, "Transpose it with respect to one operand.")
    return tree.flatten_up_to(cotangents(ct, x, call, of, lambda wrt, x, call: bind(x, call)))


def batch(args: Sequence[Any], dims: Sequence[Any], *, tree: Any, call: Call) -> tuple[Array, int]:
    """The primitive takes one batch axis. A second one is merged with the first, or looped over."""
    x: Operands = tree.unflatten(
        [arg if d is None else jnp.moveaxis(arg, d, 0) for arg, d in zip(args, dims, strict=True)]
    )
    mapped: Operands = tree.unflatten([d is not None for d in dims])
    # For each array, whether it has an earlier batch axis: its rank without the new axis exceeds that in `call.ranks`.
    inner: Operands = jax.tree.map(
        lambda array, is_mapped, rank: array.ndim - is_mapped > rank, x, mapped, call.ranks(x)
    )
    same_operands = (inner.lhs.data, inner.rhs.data) == (mapped.lhs.data, mapped.rhs.data)
    if any(jax.tree.leaves(inner)) and (not call.out_batch or not same_operands):
        # Merging would copy an operand that lacks one of the axes, or store all terms of a sum over the batch.
        arrays, is_mapped = jax.tree.leaves(x), jax.tree.leaves(mapped)

        def element(slices: list[Array]) -> Array:
            rest = iter(slices)
            each = [next(rest) if use else array for array, use in zip(arrays, is_mapped, strict=True)]
            return bind(tree.unflatten(each), call)

        return lax.map(element, [array for array, use in zip(arrays, is_mapped, strict=True) if use]), 0

    outer = next(array.shape[0] for array, d in zip(jax.tree.leaves(x), dims, strict=True) if d is not None)
    # The earlier batch axis is axis 1 after a new axis, else axis 0.
    extents = jax.tree.map(
        lambda array, is_mapped, had_batch: array.shape[int(is_mapped)] if had_batch else None, x, mapped, inner
    )
    batch = next(iter(jax.tree.leaves(extents)), None)

    def broadcast(array: Array, *shape: int) -> Array:
        is_summed = has_derivative(array.dtype)  # its cotangent, over the batch
        return broadcast_accumulated(array, array.dtype, shape) if is_summed else jnp.broadcast_to(array, shape)

    def merge(array: Array, is_mapped: bool, had_batch: bool, is_required: bool) -> Array:
        """`array` as `[outer * batch, ...]`; unchanged if it has neither axis and `is_required` is false."""
        if not (is_mapped or had_batch or is_required):
            return array
        array = array if is_mapped else broadcast(array, outer, *array.shape)
        if batch is None:
            return array
        array = array if had_batch else broadcast(array[:, None], outer, batch, *array.shape[1:])
        return array.reshape(outer * batch, *array.shape[2:])

    # The epilogue must have the batch axis, like the result. So must `lhs` if no other operand has it, or if the index
    # has it.
    lhs_required = not any(jax.tree.leaves(mapped._replace(epilogue=Epilogue())))
    lhs_required = lhs_required or any(jax.tree.leaves((mapped.gather, inner.gather)))
    required: Operands = jax.tree.map(lambda _: False, x)
    required = required._replace(
        lhs=required.lhs._replace(data=lhs_required), epilogue=jax.tree.map(lambda _: True, x.epilogue)
    )
    out = bind(jax.tree.map(merge, x, mapped, inner, required), call._replace(out_batch=True))
    return (out if batch is None else out.reshape(outer, batch, *out.shape[1:])), 0


def _compute(platform: str, *args: Array, tree: Any, call: Call, target: Target) -> Array:
    return lowering.compute(platform, tree.unflatten(args), call, target)


def lowering_rule(platform: str, compute: Any = _compute, multiple_results: bool = False) -> Callable[..., Any]:
    """The lowering rule of a primitive. `compute(platform, *leaves, tree=, call=, target=)` computes its results."""
    lower = mlir.lower_fun(partial(compute, platform), multiple_results=multiple_results)

    def rule(ctx: Any, *args: Any, tree: Any, call: Call) -> Any:
        if mesh := explicit_mesh(ctx.avals_in, call.out_spec):
            with jax.sharding.use_abstract_mesh(mesh):
                by_map = mlir.lower_fun(lambda *leaves: _mapped(leaves, tree, call), multiple_results=False)
                return by_map(ctx, *args)
        # JAX has already checked over which mesh axes values vary. Avals here lack these axes, so that a kernel may mix
        # values that vary over different axes, as in its loops.
        plain = [[ShapedArray(aval.shape, aval.dtype) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)]
        inner, program = ctx.replace(avals_in=plain[0], avals_out=plain[1]), ctx.module_context
        portable, automatic = program.lowering_parameters.for_export, _is_automatic(program.axis_context)
        device = getattr(getattr(program.axis_context, "mesh", None), "abstract_mesh", None)
        device = getattr(device, "abstract_device", None)
        with lowering.target_of(platform, call.options, device, portable=portable, automatic=automatic) as target:
            out = lower(inner, *args, tree=tree, call=call, target=target)
        if call.options.calls_back:
            ctx.set_tokens_out(inner.tokens_out)
        return out

    return rule


def _is_automatic(axis_context: Any) -> bool:
    """Whether XLA partitions the program over several devices: it is neither for one device nor in a `shard_map` over
    all mesh axes."""
    mesh = getattr(axis_context, "mesh", None)
    if mesh is None:
        return getattr(axis_context, "num_devices", 1) != 1
    manual = frozenset(axis_context.manual_axes) | frozenset(mesh.manual_axes)
    return bool(axis_context.manual_axes) and manual != frozenset(mesh.axis_names)


def _partitioned_rule(platform: str) -> Callable[..., Any]:
    """The lowering rule of `partitioned_matmul_p`. For TPUs and exports, the product isn't partitioned."""
    unpartitioned = lowering_rule(platform)

    def rule(ctx: Any, *args: Any, tree: Any, call: Call) -> Any:
        is_export = ctx.module_context.lowering_parameters.for_export  # An exported program can't call back.
        if platform == "tpu" and not is_export:
            warnings.warn(_NOT_ON_TPUS, stacklevel=2)
        if platform == "tpu" or is_export:
            return unpartitioned(ctx, *args, tree=tree, call=call)
        return mlir.lower_fun(_partitioned(tree, call), multiple_results=False)(ctx, *args)

    return rule


_NOT_ON_TPUS = (
    "`ragged.matmul`: over `Auto` mesh axes, XLA for TPUs can't partition a kernel. It partitions its own product "
    "instead, which is slow and gathers the operands.\nMake the mesh's axes `Explicit`, or call "
    "`ragged.sharded_matmul`."
)


# XLA (jaxlib 0.12, on CPUs) doesn't finish compiling if operations traced during compilation share stack frames with
# the compiled program: it links each frame to its caller, in a circle. So these operations get the frames of this
# module's import.
_IMPORTED_AT = source_info_util.current().traceback


def _partitioned(tree: Any, call: Call) -> Callable[..., Array]:
    """The product as a function of the operands' leaves, which XLA partitions by `sharding.resolve`."""

    def product(x: Operands, call: Call) -> Array:
        leaves, tree = jax.tree.flatten(x)
        return ragged_matmul_p.bind(*leaves, tree=tree, call=call)

    @custom_partitioning
    def partitioned(*leaves: Array) -> Array:
        return product(tree.unflatten(leaves), call)

    def spec(mesh: Any, array: Any) -> PartitionSpec:
        """The spec of an array; replicated if its sharding splits a mesh axis, which a spec can't express."""
        try:
            return PartitionSpec(*parse_flatten_op_sharding(array.sharding._hlo_sharding, mesh)[0])
        except (AssertionError, ValueError, IndexError, KeyError):
            return PartitionSpec()

    def partition(mesh: Any, arrays: Any, result: Any) -> Any:
        x = tree.unflatten(arrays)
        found = sharding.resolve(x, call, jax.tree.map(partial(spec, mesh), x), spec(mesh, result), mesh.shape)
        operands, out = sharding.specs_of(x, found, mesh.shape)

        def of_device(*leaves: Array) -> Array:
            with source_info_util.user_context(_IMPORTED_AT):
                return sharding.local(tree.unflatten(leaves), call, found, product)

        given = tuple(NamedSharding(mesh, each) for each in jax.tree.leaves(operands))
        return mesh, of_device, NamedSharding(mesh, out), given

    def rule(mesh: Any, operands: Any, results: Any) -> Any:
        # MLIR types or avals. Only their shapes are read, so any dtype will do.
        x = tree.unflatten(
            [jax.ShapeDtypeStruct(x.type.shape if hasattr(x, "type") else x.shape, jnp.float32) for x in operands]
        )
        return sharding.rule(x, call)

    partitioned.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return partitioned


for _primitive in PRIMITIVES:
    _primitive.def_effectful_abstract_eval(abstract_eval)
    _primitive.def_impl(partial(apply_primitive, _primitive))
    ad.primitive_jvps[_primitive] = jvp
    ad.primitive_transposes[_primitive] = transpose
    batching.primitive_batchers[_primitive] = batch
for _platform in (None, *lowering.PLATFORMS):
    mlir.register_lowering(ragged_matmul_p, lowering_rule(_platform or "any"), platform=_platform)
    mlir.register_lowering(partitioned_matmul_p, _partitioned_rule(_platform or "any"), platform=_platform)
