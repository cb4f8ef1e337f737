"""`sharded_matmul`: a product whose sharding is said, with a function of each device's part of the result."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ragged._errors import Site, describe
from ragged._matmul import MatmulProduct, matmul, product_of
from ragged.product.operands import Operands
from ragged.product.primitive import bind
from ragged.product.rows import dispatched
from ragged.product.sharding import Axes, axes_of, mapped, spec_of
from ragged.tensor.tensor import GroupedTensor


def sharded_matmul(
    lhs: GroupedTensor | Array | Any,
    rhs: GroupedTensor | Array | Any,
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | Any = None,
    in_specs: tuple[PartitionSpec, PartitionSpec] | Any,
    out_specs: PartitionSpec | Any,
    check_vma: bool | Any = True,
    out_shard_callback: Callable[[GroupedTensor], GroupedTensor] | Any = None,
    **options: Any,
) -> GroupedTensor:
    """`matmul(lhs, rhs, **options)` by a `jax.shard_map`, each device multiplying what `in_specs` give it.

    What moves, and what is summed, is as in any product of sharded operands. For meshes of any types of axes; over
    `Auto` axes of TPUs this is how kernels run.

    **Arguments:**

    - `mesh`: with all its axes. None is the mesh in context, as `jax.set_mesh` sets it.
    - `in_specs`: of the buffers of `lhs` and `rhs`, as `x.data` has its axes. Extents need not divide along a packed
      dim, whose buffers get a longer tail.
    - `out_specs`: of the result's buffer.
    - `check_vma`: as in `jax.shard_map`. Without it, gradients are summed over devices in their own dtype.
    - `out_shard_callback`: is called with each device's part of the result, as a `GroupedTensor` with what the groups
      have in it, and returns a tensor like it, of any dtype: an activation before the result leaves the device. Under
      `vmap` and `grad` it is a part of the product.
    - `options`: those of `matmul`, but for `recipe`, `out_sharding`, `bias` and `activation`.

    **Returns:** what `matmul` does, sharded as `out_specs`.

    **Raises:** `TypeError` and `ValueError` for specs that don't fit the mesh and the operands, or as `matmul` does.
    """
    site = Site("ragged.sharded_matmul(lhs, rhs)", {"lhs": lhs, "rhs": rhs})
    mends = {
        "recipe": "Quantise the operands first, or `matmul` them sharded.",
        "out_sharding": "Say it in `out_specs`.",
        "bias": "Add it in `out_shard_callback`.",
        "activation": "Apply it in `out_shard_callback`.",
    }
    for name, mend in mends.items():
        if options.get(name) is not None:
            site.fail(ValueError, f"`{name}` is given, but the sharding is said.", mend)
    inspect.signature(matmul).bind(lhs, rhs, **options)
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if not hasattr(mesh, "axis_names") or mesh.empty:
        site.fail(ValueError, f"`mesh` is {mesh!r}.", "Pass a mesh, or set one: `with jax.set_mesh(mesh):`.")
    if not isinstance(in_specs, tuple | list) or len(in_specs) != 2:
        site.fail(TypeError, f"`in_specs` is {in_specs!r}.", "Pass two `PartitionSpec`s, of `lhs` and `rhs`.")
    _check_callback(site, out_shard_callback)
    product = product_of(lhs, rhs, site=site, **options)
    product = product._replace(operands=dispatched(product.operands))
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
    stored = [_turned(each, _is_turned(tensor)) for each, tensor in zip(axes, (lhs, rhs), strict=False)]
    out = _turned(axes[2], product.is_swapped)
    packed = _padded(product, stored, out, mesh.shape)
    _check_extents(site, packed, stored, out, mesh.shape)
    x, call = packed.operands, packed.call._replace(out_spec=spec_of(out))
    specs: Operands = jax.tree.map(lambda _: PartitionSpec(), x)
    lhs_spec, rhs_spec = map(spec_of, stored)
    specs = specs._replace(lhs=specs.lhs._replace(data=lhs_spec), rhs=specs.rhs._replace(data=rhs_spec))
    shape = call.shape

    def finish(part: Array, sizes: dict[str, Array]) -> Array:
        letters = "mn" if not product.is_swapped else "nm"
        dims = {z: sizes.get(z) for z in letters}
        tensor = GroupedTensor(part.mT if product.is_swapped else part, dims["m"], dims["n"])
        made = out_shard_callback(tensor)
        if not isinstance(made, GroupedTensor) or made.shape != tensor.shape or made.kind != tensor.kind:
            mend = "It takes a device's part of the result and returns a tensor of its kind and shape."
            site.also(**{"its result": made}).fail(ValueError, "`out_shard_callback` returned something else.", mend)
        data = jnp.asarray(made.data)
        return data.mT if product.is_swapped else data

    with_callback = None if out_shard_callback is None else finish
    names = tuple(mesh.axis_names)
    buffer = mapped(x, call, bind, mesh=mesh, over=names, specs=specs, check_vma=check_vma, finish=with_callback)
    if shape != product.call.shape:
        buffer = buffer[tuple(slice(n) for n in product.call.shape)]
    return product.tensor(buffer)


def _check_callback(site: Site, callback: Any) -> None:
    if callback is not None and not callable(callback):
        problem = f"`out_shard_callback` is {describe(callback)}."
        site.fail(TypeError, problem, "Pass a function of a device's part of the result.")


def _is_turned(x: Any) -> bool:
    return isinstance(x, GroupedTensor) and x._is_flipped


def _turned(axes: tuple[Axes, ...], is_turned: bool) -> tuple[Axes, ...]:
    """Those of the buffer as it is stored."""
    return (*axes[:-2], axes[-1], axes[-2]) if is_turned else axes


def _checked(site: Site, name: str, spec: Any, rank: int, mesh: Any) -> tuple[Axes, ...]:
    """The mesh axes of each axis of a buffer."""
    if not isinstance(spec, PartitionSpec):
        site.fail(TypeError, f"`{name}` is {spec!r}.", "Pass a `PartitionSpec`.")
    if PartitionSpec.UNCONSTRAINED in spec.partitions or spec.unreduced or spec.reduced:
        site.fail(ValueError, f"`{name}` is {spec}.", "Give each axis mesh axes or None; results are summed.")
    axes = axes_of(spec, rank)
    names = [each for some in axes for each in some]
    if len({*names}) < len(names):
        site.fail(ValueError, f"`{name}` is {spec}, which names a mesh axis twice.", "Name each at most once.")
    if len(axes) > rank:
        site.fail(ValueError, f"`{name}` is {spec}, of a buffer with {rank} axes.", "Give each axis at most one entry.")
    if unknown := [each for each in names if each not in mesh.axis_names]:
        problem = f"`{name}` is {spec}, but the mesh has no axis {unknown[0]!r}."
        site.fail(ValueError, problem, f"Its axes are {tuple(mesh.axis_names)}.")
    return axes


def _padded(product: MatmulProduct, axes: list[tuple[Axes, ...]], out: tuple[Axes, ...], mesh: Any) -> MatmulProduct:
    """The same with longer tails, where the devices don't divide a packed axis."""
    p, x, call = product.call.product, product.operands, product.call
    terms = {"lhs": (p.lhs, axes[0]), "rhs": (p.rhs, axes[1]), "out": (p.out, out)}
    ways: dict[str, int] = {}
    for letters, names in terms.values():
        if letters[0] in p.ragged:
            size = math.prod(mesh[name] for name in names[-2])
            ways[letters[0]] = math.lcm(ways.get(letters[0], 1), size)

    def longer(array: Array, letters: str) -> Array:
        more = -array.shape[-2] % ways.get(letters[0], 1)
        return jnp.pad(array, [(0, more), (0, 0)]) if more and array.ndim == 2 else array

    def operand(name: str, letters: str) -> Any:
        data, scales = getattr(x, name)
        if scales is not None and scales.block[0] == 1 and letters[0] in ways:
            scales = replace(scales, values=longer(scales.values, letters))
        return getattr(x, name)._replace(data=longer(data, letters), scales=scales)

    x = x._replace(lhs=operand("lhs", p.lhs), rhs=operand("rhs", p.rhs))
    x = x._replace(epilogue=jax.tree.map(lambda each: longer(each, p.out), x.epilogue))
    rows = call.shape[-2] + (-call.shape[-2] % ways.get(p.out[0], 1) if len(call.shape) == 2 else 0)
    return product._replace(operands=x, call=call._replace(shape=(*call.shape[:-2], rows, call.shape[-1])))


def _check_extents(
    site: Site, product: MatmulProduct, axes: list[tuple[Axes, ...]], out: tuple[Axes, ...], mesh: Any
) -> None:
    x, call = product.operands, product.call
    shapes = {"in_specs[0]": x.lhs.data.shape, "in_specs[1]": x.rhs.data.shape, "out_specs": call.shape}
    for (name, shape), each in zip(shapes.items(), [*axes, out], strict=True):
        for extent, names in zip(shape, each, strict=True):
            if extent % (ways := math.prod(mesh[n] for n in names)):
                problem = f"`{name}` cuts an extent of {extent} into {ways}, over {names}."
                site.fail(ValueError, problem, "The mesh axes must divide all but packed dims.")
