"""`sharded_matmul`: a product with explicit `in_specs` and `out_specs`, and a function of each shard of the result."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ragged.core.errors import Site, describe
from ragged.core.formats import AnyArray
from ragged.core.mesh import resharded
from ragged.ops.matmul import request_of
from ragged.ops.request import Arguments, Request
from ragged.primitive.moved_rows import dispatched
from ragged.primitive.primitive import bind
from ragged.primitive.sharding import Axes, axes_of, mapped, sizes_of_shard, spec_of
from ragged.product.operands import Operands
from ragged.tensor.base import is_read_transposed
from ragged.tensor.tensor import GroupedTensor

OPTIONS = (
    "preferred_element_type",
    "precision",
    "existing_out",
    "group_offset",
    "num_actual_groups",
    "capacity",
    "max_last",
    "backend",
)
"""The options of `matmul` that `sharded_matmul` has."""
_HINTS = {
    "recipe": "Quantise the operands first, or call `matmul` with sharded operands.",
    "out_sharding": "Pass the sharding of the result as `out_specs`.",
    "bias": "Add it in `out_shard_callback`.",
    "activation": "Apply it in `out_shard_callback`.",
}


def sharded_matmul(
    lhs: GroupedTensor | AnyArray,
    rhs: GroupedTensor | AnyArray,
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec, PartitionSpec],
    out_specs: PartitionSpec,
    check_vma: bool = True,
    out_shard_callback: Callable[[GroupedTensor], GroupedTensor] | None = None,
    **options: Any,
) -> GroupedTensor:
    """`matmul(lhs, rhs, **options)` by a `jax.shard_map`: each device multiplies its shards, as given by `in_specs`.

    Over `Auto` mesh axes, TPU kernels run only through this function or inside a `jax.shard_map`.

    **Arguments:**

    - `mesh`: the mesh, all axes of which are mapped; by default the mesh in context, which `jax.set_mesh` sets.
    - `in_specs`: two `PartitionSpec`s, of the buffers of `lhs` and `rhs`. If the number of shards doesn't divide the
      extent of a packed axis, the tail is padded.
    - `out_specs`: a `PartitionSpec` of the result's buffer.
    - `check_vma`: as in `jax.shard_map`, for `out_shard_callback` only. The product is always checked, so that
      gradients are summed over devices in the accumulator's dtype.
    - `out_shard_callback`: a function, such as an activation, that is called on each device with its shard of the
      result: a `GroupedTensor` with the groups' sizes in that shard. It returns a tensor of the same kind and shape, of
      any dtype. `vmap` and `grad` of the product include it.
    - `options`: `preferred_element_type`, `precision`, `existing_out`, `group_offset`, `num_actual_groups`, `capacity`,
      `max_last` and `backend`, as in `matmul`.

    **Returns:** the result of `matmul`, sharded as `out_specs`. Over `Explicit` axes, a packed axis of the result isn't
    sharded if the number of shards doesn't divide its extent.

    **Raises:** `TypeError` and `ValueError` for specs that don't fit the mesh and the operands, and the errors of
    `matmul`.
    """
    site = Site("ragged.sharded_matmul(lhs, rhs)", {"lhs": lhs, "rhs": rhs})
    arguments = Arguments.of(site, options)
    for name, value in options.items():
        if name not in OPTIONS and value is not None:
            problem = f"`{name}` can't be combined with `in_specs` and `out_specs`."
            site.fail(ValueError, problem, _HINTS.get(name, "Leave it out."))
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if not hasattr(mesh, "axis_names") or mesh.empty:
        site.fail(ValueError, f"`mesh` is {mesh!r}.", "Pass a mesh, or set one: `with jax.set_mesh(mesh):`.")
    if not isinstance(in_specs, tuple | list) or len(in_specs) != 2:
        site.fail(TypeError, f"`in_specs` is {in_specs!r}.", "Pass two `PartitionSpec`s, for `lhs` and `rhs`.")
    _check_callback(site, out_shard_callback)
    product = request_of(lhs, rhs, arguments, site, merges=False)  # Each device merges the groups of its shard.
    product = replace(product, operands=dispatched(product.operands))
    x, call = product.operands, product.call
    out_rank = len(call.shape)
    axes = [
        _checked(site, name, spec, rank, mesh)
        for name, spec, rank in (
            ("in_specs[0]", in_specs[0], x.lhs.data.ndim),
            ("in_specs[1]", in_specs[1], x.rhs.data.ndim),
            ("out_specs", out_specs, out_rank),
        )
    ]
    stored = [_stored(each, _is_read_transposed(tensor)) for each, tensor in zip(axes, (lhs, rhs), strict=False)]
    out = _stored(axes[2], product.is_swapped)
    padded = _padded(product, stored, out, mesh)
    _check_extents(site, padded, stored, out, mesh.shape)
    x, call = padded.operands, padded.call._replace(out_spec=spec_of(out))
    specs: Operands = jax.tree.map(lambda _: PartitionSpec(), x)
    lhs_spec, rhs_spec = map(spec_of, stored)
    specs = specs._replace(lhs=specs.lhs._replace(data=lhs_spec), rhs=specs.rhs._replace(data=rhs_spec))

    def of_shard(part: Array, sizes: dict[str, Array]) -> Array:
        dims = sizes_of_shard(sizes, call, out, part.shape)
        tensor = GroupedTensor(part.mT if product.is_swapped else part, dims.get("m"), dims.get("n"))
        assert out_shard_callback is not None
        result = out_shard_callback(tensor)
        if not isinstance(result, GroupedTensor) or result.shape != tensor.shape or result.kind != tensor.kind:
            problem = "`out_shard_callback` returned a value of another kind or shape than its argument."
            hint = "It takes a shard of the result and must return a tensor of the same kind and shape."
            site.also(returned=result).fail(ValueError, problem, hint)
        data = jnp.asarray(result.data)
        return data.mT if product.is_swapped else data

    buffer = mapped(x, call, bind, mesh=mesh, over=tuple(mesh.axis_names), specs=specs)
    if out_shard_callback is not None:
        options_of_map: dict[str, Any] = {
            "in_specs": (spec_of(out), PartitionSpec()),
            "out_specs": spec_of(out),
            "check_vma": check_vma,
        }
        buffer = jax.shard_map(of_shard, mesh=mesh, **options_of_map)(buffer, x.sizes)
    if call.shape != product.call.shape:  # without the padding
        if mesh.explicit_axes:  # which can't split rows that they don't divide
            buffer = resharded(buffer, mesh, spec_of([*out[:-2], (), out[-1]]))
        buffer = buffer[tuple(slice(n) for n in product.call.shape)]
    return product.tensor(buffer)


def _check_callback(site: Site, callback: Any) -> None:
    if callback is not None and not callable(callback):
        problem = f"`out_shard_callback` is {describe(callback)}."
        site.fail(TypeError, problem, "Pass a function of a shard of the result.")


def _is_read_transposed(x: Any) -> bool:
    return isinstance(x, GroupedTensor) and is_read_transposed(x)


def _stored(axes: tuple[Axes, ...], is_transposed: bool) -> tuple[Axes, ...]:
    return (*axes[:-2], axes[-1], axes[-2]) if is_transposed else axes


def _checked(site: Site, name: str, spec: Any, rank: int, mesh: Any) -> tuple[Axes, ...]:
    """The mesh axes of each axis of a buffer, from its spec. Raises if the spec doesn't fit the mesh or the rank."""
    if not isinstance(spec, PartitionSpec):
        site.fail(TypeError, f"`{name}` is {spec!r}.", "Pass a `PartitionSpec`.")
    if PartitionSpec.UNCONSTRAINED in spec.partitions or spec.unreduced or spec.reduced:
        hint = "Give each dim mesh axes or None. The result is always summed over devices."
        site.fail(ValueError, f"`{name}` is {spec}.", hint)
    axes = axes_of(spec, rank)
    names = [each for some in axes for each in some]
    if len({*names}) < len(names):
        hint = "Name each mesh axis at most once."
        site.fail(ValueError, f"`{name}` is {spec}, which names a mesh axis twice.", hint)
    if len(axes) > rank:
        problem = f"`{name}` is {spec}, but the buffer has {rank} axes."
        site.fail(ValueError, problem, "Give each axis at most one entry.")
    if unknown := [each for each in names if each not in mesh.axis_names]:
        problem = f"`{name}` is {spec}, but the mesh has no axis {unknown[0]!r}."
        site.fail(ValueError, problem, f"The mesh has the axes {tuple(mesh.axis_names)}.")
    return axes


def _padded(product: Request, axes: list[tuple[Axes, ...]], out: tuple[Axes, ...], mesh: Any) -> Request:
    """`product` with longer tails, so that the number of shards divides each packed axis."""
    p, x, call = product.call.product, product.operands, product.call
    shards: dict[str, int] = {}
    for letters, names in ((p.lhs, axes[0]), (p.rhs, axes[1]), (p.out, out)):
        if letters[0] in p.ragged:
            size = math.prod(mesh.shape[name] for name in names[-2])
            shards[letters[0]] = math.lcm(shards.get(letters[0], 1), size)

    def longer(array: Array, letters: str) -> Array:
        more = -array.shape[-2] % shards.get(letters[0], 1)
        if not more or array.ndim > 2:
            return array
        array = jnp.pad(array, [(0, more), (0, 0)])
        # A cotangent loses these rows again, which `Explicit` axes then can't split.
        return resharded(array, mesh, PartitionSpec()) if mesh.explicit_axes else array

    def operand(name: str, letters: str) -> Any:
        data, scales, _ = getattr(x, name)
        if scales is not None and scales.block[0] == 1 and letters[0] in shards:
            scales = scales.map(lambda each: longer(each, letters))
        return getattr(x, name)._replace(data=longer(data, letters), scales=scales)

    x = x._replace(lhs=operand("lhs", p.lhs), rhs=operand("rhs", p.rhs))
    x = x._replace(epilogue=jax.tree.map(lambda each: longer(each, p.out), x.epilogue))
    rows = call.shape[-2] + (-call.shape[-2] % shards.get(p.out[0], 1) if len(call.shape) == 2 else 0)
    return replace(product, operands=x, call=call._replace(shape=(*call.shape[:-2], rows, call.shape[-1])))


def _check_extents(
    site: Site, product: Request, axes: list[tuple[Axes, ...]], out: tuple[Axes, ...], mesh: Any
) -> None:
    x, call = product.operands, product.call
    shapes = {"in_specs[0]": x.lhs.data.shape, "in_specs[1]": x.rhs.data.shape, "out_specs": call.shape}
    for (name, shape), each in zip(shapes.items(), [*axes, out], strict=True):
        for extent, names in zip(shape, each, strict=True):
            if extent % (shards := math.prod(mesh[n] for n in names)):
                problem = f"`{name}` splits an axis of extent {extent} into {shards} shards, over {names}."
                site.fail(ValueError, problem, "The number of shards must divide the extent, unless the dim is packed.")
