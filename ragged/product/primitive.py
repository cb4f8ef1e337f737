"""The one JAX primitive under every grouped product: how it is typed, differentiated, batched and lowered.

It binds the leaves of `Operands`, with their tree and the `Call` as parameters.

    out[i] = existing[i] + lhs[i] @ rhs[i]        (bilinear in lhs and rhs, affine in existing)
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax._src.dispatch import prim_requires_devices_during_lowering  # it has no public name, nor has the next
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ragged._errors import Site
from ragged._mesh import (
    axes_beyond,
    explicit_mesh,
    explicit_spec,
    half_manual_mesh,
    resharded,
    vary_together,
    varying,
)
from ragged.backends.base import Target
from ragged.product import lowering, sharding
from ragged.product.operands import Call, Epilogue, Index, Operand, Operands
from ragged.product.shared import folded
from ragged.quant.formats import accumulator_dtype
from ragged.tensor.rows import collect_rows


def bind(x: Operands, call: Call) -> Array:
    """The product of `x`. See the module's docstring."""
    leaves, tree = jax.tree.flatten(x)
    if call.out_spec is not None and call.out_spec.unreduced:
        return _mapped(leaves, tree, call)
    x, call, restore = folded(x, call)
    leaves, tree = jax.tree.flatten(x)
    if (mesh := half_manual_mesh(leaves, call.out_spec)) is not None and not call.options.calls_back:
        # XLA would partition the product, not its kernel, and put collectives in loops whose lengths differ between
        # devices. So each has all over the other axes.
        whole = jax.shard_map(
            lambda *leaves: bind(tree.unflatten(leaves), call),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names={*mesh.axis_names} - {*mesh.manual_axes},
        )
        return restore(whole(*jax.tree.leaves(vary_but_factors(x))))
    primitive = partitioned_matmul_p if _is_partitioned(leaves, call) else ragged_matmul_p
    return restore(primitive.bind(*jax.tree.leaves(vary_but_factors(x)), tree=tree, call=call))


def vary_but_factors(x: Operands, like: Sequence[Any] = ()) -> Operands:
    """`vary_together`, but for what all devices of a `shard_map` have of the two factors: it stays so, and `cotangents`
    sums what is theirs. Not over axes for which a type says that the sum be left for later."""
    x = jax.tree.map(jnp.asarray, x)
    everything = [*jax.tree.leaves(x), *like]
    if not varying(everything):
        return x

    def factor(data: Array) -> Array:
        later = jax.typeof(data).manual_axis_type.reduced & {*axes_beyond(data, everything)}
        return lax.pcast(data, tuple(sorted(later)), to="varying") if later else data

    data, rows, index = x.lhs.data, None, x.gather
    if index is not None:  # as the rows do
        data, rows = vary_together([data], like=index[:2])[0], index.rows
        index = index._replace(rows=None)
    factors = x._replace(lhs=x.lhs._replace(data=None), rhs=x.rhs._replace(data=None), gather=index)
    leaves, tree = jax.tree.flatten(factors)
    others: Operands = tree.unflatten(vary_together(leaves, like=everything))
    lhs, rhs = others.lhs._replace(data=factor(data)), others.rhs._replace(data=factor(x.rhs.data))
    if rows is not None:
        others = others._replace(gather=others.gather._replace(rows=factor(rows)))
    return others._replace(lhs=lhs, rhs=rhs)


def _mapped(leaves: Sequence[Array], tree: Any, call: Call) -> Array:
    """The product of operands that are sharded over explicit axes, by what their types say."""
    mesh: Any = explicit_mesh(leaves, call.out_spec)
    specs = tree.unflatten([jax.typeof(leaf).sharding.spec for leaf in leaves])
    return sharding.mapped(tree.unflatten(leaves), call, bind, mesh=mesh, over=mesh.explicit_axes, specs=specs)


ragged_matmul_p = Primitive("ragged_matmul")
partitioned_matmul_p = Primitive("ragged_matmul_partitioned")
"""The same over a mesh with `Auto` axes: when XLA knows how the operands are sharded, it asks what each device does.
JAX has to know the devices of such a program when it is lowered, so it is a primitive of its own."""
PRIMITIVES = ragged_matmul_p, partitioned_matmul_p
prim_requires_devices_during_lowering.add(partitioned_matmul_p)


def _is_partitioned(leaves: Sequence[Any], call: Call) -> bool:
    """Whether the operands' types have a mesh of several devices, whose axes are all `Auto`."""
    meshes = [mesh for x in leaves if not (mesh := jax.typeof(x).sharding.mesh).empty]
    several = [mesh for mesh in meshes if mesh.size > 1 and not (mesh.manual_axes or mesh.explicit_axes)]
    # A mesh of no devices: the program can be lowered, but not be partitioned by who has only its text.
    return bool(several) and all(mesh.abstract_device for mesh in several) and not call.options.calls_back


def abstract_eval(*avals: Any, tree: Any, call: Call) -> tuple[Any, frozenset[Any]]:
    x = tree.unflatten(avals)
    shape = (call.batch(x), *call.shape) if call.out_batch and call.batch(x) is not None else call.shape
    like = max(avals, key=lambda aval: len(aval.manual_axis_type.varying))  # constants know of no mesh
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
    """Those of the ordered callbacks by which Pallas interprets a TPU's memory and copies."""
    return frozenset(jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects)


def eagerly(primitive: Primitive) -> Callable[..., Any]:
    """The rule by which a primitive of `leaves, tree=, call=` runs outside of `jit`."""
    compiled = jax.jit(primitive.bind, static_argnames=("tree", "call"))

    def rule(*args: Array, **params: Any) -> Any:
        with jax.disable_jit(False):  # or it would come back here
            return compiled(*args, **params)

    return rule


def derivative(wrt: str, ct: Any, x: Operands, call: Call, of: Any) -> tuple[Operands, Call]:
    """The product that is the cotangent of `"lhs"` or `"rhs"`, an array like `of`: its term and `out` trade places.

    With an index, that of `lhs` is one of the rows.
    """
    index = None if wrt == "lhs" else x.gather
    return x._replace(**{wrt: Operand(ct)}, epilogue=Epilogue(), gather=index), call.derivative(wrt, of)


def cotangents(ct: Array, x: Operands, call: Call, of: Operands, product: Callable[..., Array]) -> Operands:
    """Those of the operands, where `of` has arrays or avals like them, and None elsewhere.

    `product(wrt, operands, call)` computes one of them, which is a product of the same kind. That of an operand that
    all devices of a `shard_map` have is summed over them in the accumulator's dtype, and then rounded.
    """
    cts: Operands = jax.tree.map(lambda _: None, x)
    for wrt in ("lhs", "rhs"):
        index = x.gather if wrt == "lhs" else None
        rows = None if index is None else _rows(of)
        like = getattr(of, wrt).data if rows is None else rows
        if like is not None:
            if index is not None and rows is None:
                like = rows_of(like, index)
            terms, its = derivative(wrt, ct, x, call, like)
            if axes := axes_beyond(like, [ct]):
                wide = its._replace(dtype=accumulator_dtype(its.dtype))
                data = lax.psum(product(wrt, terms, wide), axes).astype(its.dtype)
            else:
                data = product(wrt, terms, its)
            if rows is not None:
                lhs = cts.lhs._replace(data=None)  # which is linear too, but not what is differentiated
                cts = cts._replace(lhs=lhs, gather=cts.gather._replace(rows=data))
            else:
                data = data if index is None else collect_rows(data, index.source, index.places)
                cts = cts._replace(**{wrt: getattr(cts, wrt)._replace(data=data)})
    if jax.tree.leaves(of.epilogue):
        (epilogue,) = jax.linear_transpose(lambda epilogue: _sum(_added(epilogue, x, call, ct)), of.epilogue)(ct)
        cts = cts._replace(epilogue=epilogue)
    return cts


def _rows(of: Operands) -> Any:
    """What is differentiated in place of a buffer whose rows are gathered; None without."""
    return None if of.gather is None else of.gather.rows


def without_rows(x: Operands) -> Operands:
    """The same, whose derivative keeps no copy of gathered rows."""
    return x if x.gather is None else x._replace(gather=x.gather._replace(rows=None))


def rows_of(data: Any, index: Index) -> ShapedArray:
    """The type of the rows that are gathered from a buffer, an array or an aval."""
    aval = data if isinstance(data, ShapedArray) else jax.typeof(data)
    return aval.update(shape=(*aval.shape[:-2], index.source.shape[-1], aval.shape[-1]), weak_type=False)


def _added(epilogue: Epilogue, x: Operands, call: Call, out: Array) -> list[Array]:
    """What a product's epilogue adds to its result, linear in the epilogue. Sharded as `out`, where types say so."""
    existing = epilogue.existing  # the rest is of calls with an ending, which aren't differentiated
    if existing is None:
        return []
    if (spec := explicit_spec(out)) is not None:
        existing = resharded(existing, jax.typeof(out).sharding.mesh, spec)
    return [lowering.zero_tail(existing, x, call)]


def _sum(terms: list[Array]) -> Array:
    return sum(terms[1:], terms[0])


def check_cotangent(call: Call) -> None:
    """Raises a `TypeError` if the cotangent of a product's result would have 8 bits: too few without scales."""
    if jnp.dtype(call.dtype).itemsize == 1:
        Site("ragged.matmul").fail(
            TypeError,
            f"the result is {jnp.dtype(call.dtype).name}, and so would its cotangent be.",
            "Ask for `preferred_element_type=jnp.bfloat16`, and quantise or cast what comes of it.",
        )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, tree: Any, call: Call) -> tuple[Any, Any]:
    """`d(lhs @ rhs) = dlhs @ rhs + lhs @ drhs`, and `existing`'s own tangent."""
    check_cotangent(call)
    x, dx = tree.unflatten(primals), tree.unflatten(tangents)
    terms, factors = [], ("lhs", "rhs")
    if _rows(x) is not None:
        if not isinstance(tangent := _rows(dx), ad.Zero):
            terms.append(bind(x._replace(lhs=Operand(tangent), epilogue=Epilogue(), gather=None), call))
        x, factors = without_rows(x), ("rhs",)
    out = bind(x, call)
    for wrt in factors:
        tangent = getattr(dx, wrt).data
        if not isinstance(tangent, ad.Zero):
            operand = getattr(x, wrt)._replace(data=tangent)
            terms.append(bind(x._replace(**{wrt: operand}, epilogue=Epilogue()), call))
    terms += _added(Epilogue(*(None if isinstance(each, ad.Zero) else each for each in dx.epilogue)), x, call, out)
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, _sum(terms)


def _transpose(ct: Any, *args: Any, tree: Any, call: Call) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [None] * len(args)
    x, of = tree.unflatten(args), tree.unflatten([arg.aval if ad.is_undefined_primal(arg) else None for arg in args])
    if (of.lhs.data is not None or _rows(of) is not None) and of.rhs.data is not None:
        problem = "a product is linear in each operand, not in both."
        Site("ragged.matmul").fail(NotImplementedError, problem, "Transpose it with respect to one.")
    return tree.flatten_up_to(cotangents(ct, x, call, of, lambda wrt, x, call: bind(x, call)))


def _batch(args: Sequence[Any], dims: Sequence[Any], *, tree: Any, call: Call) -> tuple[Array, int]:
    """One batch axis is the primitive's own. A second one is merged with the first, or looped over."""
    x: Operands = tree.unflatten(
        [arg if d is None else jnp.moveaxis(arg, d, 0) for arg, d in zip(args, dims, strict=True)]
    )
    mapped: Operands = tree.unflatten([d is not None for d in dims])
    # The rank of a mapped operand counts the new axis; leave it out to see the one that was there before.
    inner: Operands = jax.tree.map(
        lambda array, is_mapped, rank: array.ndim - is_mapped > rank, x, mapped, call.ranks(x)
    )
    of_both = (inner.lhs.data, inner.rhs.data) == (mapped.lhs.data, mapped.rhs.data)
    if any(jax.tree.leaves(inner)) and (not call.out_batch or not of_both):
        # Merged axes would need a copy of a matrix for each element of the axis that it lacks, or all terms of a sum.
        arrays, is_mapped = jax.tree.leaves(x), jax.tree.leaves(mapped)

        def element(slices: list[Array]) -> Array:
            rest = iter(slices)
            each = [next(rest) if use else array for array, use in zip(arrays, is_mapped, strict=True)]
            return bind(tree.unflatten(each), call)

        return lax.map(element, [array for array, use in zip(arrays, is_mapped, strict=True) if use]), 0

    outer = next(array.shape[0] for array, d in zip(jax.tree.leaves(x), dims, strict=True) if d is not None)
    sizes = jax.tree.map(lambda array, m, has: array.shape[m] if has else None, x, mapped, inner)
    batch = next(iter(jax.tree.leaves(sizes)), None)

    def lead(array: Array, is_mapped: bool, has: bool, keep: bool) -> Array:
        """`[outer * batch, ...]`; as it is where it has neither axis and need not have (`keep`)."""
        if not (is_mapped or has or keep):
            return array
        array = array if is_mapped else jnp.broadcast_to(array, (outer, *array.shape))
        if batch is None:
            return array
        array = array if has else jnp.broadcast_to(array[:, None], (outer, batch, *array.shape[1:]))
        return array.reshape(outer * batch, *array.shape[2:])

    # The epilogue has the result's axes, always; and it is never the only one that has them.
    alone = not any(jax.tree.leaves(mapped._replace(epilogue=Epilogue())))
    keep: Operands = jax.tree.map(lambda _: False, x)
    # Nor has an index rows of a buffer that hasn't.
    alone = alone or any(jax.tree.leaves((mapped.gather, inner.gather)))
    keep = keep._replace(lhs=keep.lhs._replace(data=alone), epilogue=jax.tree.map(lambda _: True, x.epilogue))
    out = bind(jax.tree.map(lead, x, mapped, inner, keep), call._replace(out_batch=True))
    return (out if batch is None else out.reshape(outer, batch, *out.shape[1:])), 0


def _compute(platform: str, *args: Array, tree: Any, call: Call, target: Target) -> Array:
    return lowering.compute(platform, tree.unflatten(args), call, target)


def lowering_rule(platform: str, compute: Any = _compute, multiple_results: bool = False) -> Callable[..., Any]:
    """The rule by which `compute(platform, *leaves, tree=, call=, target=)` is lowered."""
    lower = mlir.lower_fun(partial(compute, platform), multiple_results=multiple_results)

    def rule(ctx: Any, *args: Any, tree: Any, call: Call) -> Any:
        if mesh := explicit_mesh(ctx.avals_in, call.out_spec):
            with jax.sharding.use_abstract_mesh(mesh):
                by_map = mlir.lower_fun(lambda *leaves: _mapped(leaves, tree, call), multiple_results=False)
                return by_map(ctx, *args)
        # Over which mesh axes a value varies has been checked by now; a kernel's loops need not carry it along.
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
    """Whether XLA partitions the program over several devices: not one device's, nor that of a full `shard_map`."""
    mesh = getattr(axis_context, "mesh", None)
    if mesh is None:
        return getattr(axis_context, "num_devices", 1) != 1
    manual = frozenset(axis_context.manual_axes) | frozenset(mesh.manual_axes)
    return bool(axis_context.manual_axes) and manual != frozenset(mesh.axis_names)


def _partitioned_rule(platform: str) -> Callable[..., Any]:
    unpartitioned = lowering_rule(platform)

    def rule(ctx: Any, *args: Any, tree: Any, call: Call) -> Any:
        is_export = ctx.module_context.lowering_parameters.for_export  # which can't call back
        if platform == "tpu" and not is_export:
            warnings.warn(_NOT_ON_TPUS, stacklevel=2)
        if platform == "tpu" or is_export:
            return unpartitioned(ctx, *args, tree=tree, call=call)
        return mlir.lower_fun(_partitioned(tree, call), multiple_results=False)(ctx, *args)

    return rule


_NOT_ON_TPUS = (
    "`ragged.matmul`: over `Auto` mesh axes, XLA for TPUs asks no product what each device does: it partitions its "
    "own, which is slow and gathers its operands.\nMake the mesh's axes `Explicit`, or call `ragged.sharded_matmul`."
)


def _partitioned(tree: Any, call: Call) -> Callable[..., Array]:
    """A function of the operands' leaves that XLA partitions as `sharding.resolve` says."""

    def product(x: Operands, call: Call) -> Array:
        leaves, tree = jax.tree.flatten(x)
        return ragged_matmul_p.bind(*leaves, tree=tree, call=call)

    @custom_partitioning
    def partitioned(*leaves: Array) -> Array:
        return product(tree.unflatten(leaves), call)

    def spec(mesh: Any, array: Any) -> PartitionSpec:
        """Nowhere, where no axes of the mesh say it: XLA may have split one in two."""
        try:
            return PartitionSpec(*parse_flatten_op_sharding(array.sharding._hlo_sharding, mesh)[0])
        except (AssertionError, ValueError, IndexError, KeyError):
            return PartitionSpec()

    def partition(mesh: Any, arrays: Any, result: Any) -> Any:
        x = tree.unflatten(arrays)
        found = sharding.resolve(x, call, jax.tree.map(partial(spec, mesh), x), spec(mesh, result), mesh.shape)
        operands, out = sharding.specs_of(x, found, mesh.shape)

        def of_device(*leaves: Array) -> Array:
            return sharding.local(tree.unflatten(leaves), call, found, product)

        given = tuple(NamedSharding(mesh, each) for each in jax.tree.leaves(operands))
        return mesh, of_device, NamedSharding(mesh, out), given

    def rule(mesh: Any, operands: Any, results: Any) -> Any:
        x = tree.unflatten(
            [jax.ShapeDtypeStruct(x.type.shape if hasattr(x, "type") else x.shape, jnp.float32) for x in operands]
        )
        return sharding.rule(x, call)

    partitioned.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return partitioned


for _primitive in PRIMITIVES:
    _primitive.def_effectful_abstract_eval(abstract_eval)
    _primitive.def_impl(eagerly(_primitive))
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = _batch
for _platform in (None, *lowering.PLATFORMS):
    mlir.register_lowering(ragged_matmul_p, lowering_rule(_platform or "any"), platform=_platform)
    mlir.register_lowering(partitioned_matmul_p, _partitioned_rule(_platform or "any"), platform=_platform)
