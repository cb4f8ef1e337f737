"""`GroupedBase`: the fields of a `GroupedTensor`, their invariants, and properties."""

import dataclasses
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from ragged.core.errors import Site, check_packed, is_arraylike
from ragged.core.formats import array_field, as_array, as_rounded, optional_array_field
from ragged.core.mesh import check_not_explicit, over_explicit_axes
from ragged.core.offsets import as_int32, element_mask, group_ids, group_offsets, take
from ragged.core.scales import Scales, spread
from ragged.core.scaling import Scaling, stored_scales

KINDS = {"U·U": "uniform", "R·U": "ragged rows", "U·R": "ragged columns", "R·R": "ragged both"}
"""Names of the kinds by the groups' first·last dims: `R` is ragged, `U` is uniform."""

Tensor = TypeVar("Tensor", bound="GroupedBase")  # `typing.Self` works with beartype only in decorated classes.


class GroupedBase(eqx.Module):
    """Base class of `ragged.GroupedTensor`: fields, kinds, sizes, offsets, masks, scales."""

    data: Array = eqx.field(converter=array_field)
    first_dims: Int[Array, " g"] | None = eqx.field(converter=optional_array_field, default=None)
    last_dims: Int[Array, " g"] | None = eqx.field(converter=optional_array_field, default=None)
    scales: Array | None = eqx.field(converter=optional_array_field, default=None)
    scaling: Scaling | None = eqx.field(static=True, default=None)
    tensor_scale: Float[Array, "*g"] | None = eqx.field(converter=optional_array_field, default=None, kw_only=True)
    zero_points: Array | None = eqx.field(converter=optional_array_field, default=None, kw_only=True)
    transposed: bool = eqx.field(static=True, default=False, kw_only=True)

    def __check_init__(self) -> None:
        for name in ("first_dims", "last_dims"):
            dims = getattr(self, name)
            if isinstance(dims, list | tuple | range):
                hint = f"Pass an array: `jnp.array({name}, jnp.int32)`."
                Site("GroupedTensor", {name: dims}).fail(TypeError, f"`{name}` is a {type(dims).__name__}.", hint)
            if not is_arraylike(dims):
                continue
            if dims.dtype not in (jnp.int32, jnp.uint32, jax.dtypes.float0):
                hint = f"Cast it: `{name}.astype(jnp.int32)`."
                if dims.dtype == bool:
                    hint = f"Pass numbers. Those of a mask [g, length] are `{name}.sum(axis=-1).astype(jnp.int32)`."
                problem = f"`{name}` must be int32 or uint32, one size per group."
                Site("GroupedTensor", {name: dims}).fail(TypeError, problem, hint)
            if dims.ndim != 1:
                problem = f"`{name}` must have shape (g,), one size per group."
                hint = "A stack of tensors is made by `jax.vmap(GroupedTensor)`."
                Site("GroupedTensor", {name: dims}).fail(ValueError, problem, hint)
        data, first, last = self.data, self.first_dims, self.last_dims
        if isinstance(data, list):
            hint = "Pass an array: `jnp.array(data)`. A list of groups is for `GroupedTensor.from_list`."
            Site("GroupedTensor", {"data": data}).fail(TypeError, "`data` is a list.", hint)
        if is_arraylike(first) and is_arraylike(last) and first.shape != last.shape:
            problem = f"`first_dims` has {first.shape[0]} groups but `last_dims` has {last.shape[0]}."
            hint = "Both need one size per group, including empty groups."
            Site("GroupedTensor", {"first_dims": first, "last_dims": last}).fail(ValueError, problem, hint)
        if not is_arraylike(data) or not all(d is None or is_arraylike(d) for d in (first, last)):
            return
        is_uniform, columns = first is None and last is None, packs_columns(self)
        min_ndim = 3 if is_uniform else 2
        if data.ndim < min_ndim or (columns and data.ndim > 2):
            Site("GroupedTensor", {"data": data, "first_dims": first, "last_dims": last}).fail(
                ValueError,
                f"`data` must have {min_ndim} dims{'' if columns else ' or more'}, but has {data.ndim}.",
                "Without `first_dims` and `last_dims` the tensor is uniform and needs a leading group axis."
                if is_uniform
                else "Groups packed along columns are matrices; groups packed along rows may have more dims."
                if columns and data.ndim > 2
                else "A ragged buffer has no group axis: its groups are packed along the ragged axis.",
            )
        if not is_uniform:
            check_packed(Site("GroupedTensor", {"data": data}), data.shape[self._packed])
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            hint = f"Pass `ragged.Scaling.of({self.scaling!r})`, or let `ragged.quantize` make the tensor."
            Site("GroupedTensor").fail(TypeError, f"`scaling` is {self.scaling!r}, not a `Scaling`.", hint)
        if any(is_arraylike(each) for each in (self.scales, self.tensor_scale, self.zero_points)):
            self._check_scales()

    def _check_scales(self) -> None:
        site = Site("GroupedTensor", {"x": self})
        if not is_arraylike(self.scales):
            name = "scaling" if self.scaling else "tensor_scale" if is_arraylike(self.tensor_scale) else "zero_points"
            site.fail(TypeError, f"`{name}` is given without an array of scales.", "Pass both, or neither.")
        if self.scaling is None:
            hint = "Pass `scaling` too: it defines which elements share a scale."
            site.fail(ValueError, "`scales` are given without `scaling`.", hint)
        want = self.scaling.shape(self.shape, self.packed_axis, self.num_groups)
        scale_bytes = self.scaling.dtype.itemsize
        if self.scales.shape != want or self.scales.dtype != self.scaling.dtype:
            problem = f"scales of a {self.kind} tensor with the scaling {self.scaling} have shape {want} and dtype "
            hint, name = "`ragged.quantize` makes them.", self.scaling.dtype.name
            if jnp.issubdtype(self.scales.dtype, jnp.integer) and self.scales.dtype.itemsize == 1 == scale_bytes:
                hint = f"If these are the bytes of {name} numbers, reinterpret them: `x.scales.view(jnp.{name})`."
            elif self.scales.shape == want:
                hint = f"Cast them: `x.scales.astype(jnp.{name})`. Code that casts all leaves of a model must leave "
                hint += "quantised tensors unchanged."
            elif (
                self.packed_axis is not None
                and self.scaling.block
                and self.scales.shape == self.scaling.shape(self.shape, self.packed_axis, 0)
            ):  # as other libraries store them, without room for another block of each group
                pads = tuple((0, n - stored) for n, stored in zip(want, self.scales.shape, strict=True))
                block = self.scaling.block[self.packed_axis]
                hint = f"If all sizes of groups are multiples of {block}, pad them: `jnp.pad(x.scales, {pads})`."
            site.fail(ValueError, f"{problem}{name}.", hint)
        if scale_bytes == 1 and jnp.issubdtype(self.data.dtype, jnp.unsignedinteger):
            problem = f"the scaling {self.scaling} has no unsigned integers, but `data` is {self.data.dtype.name}."
            hint = "If these are the bytes of floats, reinterpret them: `x.data.view(jnp.float8_e4m3fn)`, or "
            hint += "`x.data.view(jnp.float4_e2m1fn)` for two numbers per byte, the first one in the low half."
            site.fail(TypeError, problem, hint)
        scale, needed = self.tensor_scale, self.scaling.has_tensor_scale
        fits = not is_arraylike(scale) or (scale.shape in ((), (self.num_groups,)) and scale.dtype == jnp.float32)
        if (scale is not None) != needed or not fits:
            groups = f"() or {(self.num_groups,)}, one for each group"
            rule = f"needs a `tensor_scale`, float32 {groups}" if needed else "has no `tensor_scale`"
            problem = f"a tensor with the scaling {self.scaling} {rule}."
            hint = "`ragged.quantize` makes both."
            if needed and is_arraylike(scale) and scale.size in (1, self.num_groups):
                shape = () if scale.size == 1 else (self.num_groups,)
                hint = f"Convert it: `tensor_scale.reshape({shape}).astype(jnp.float32)`."
            site.also(tensor_scale=scale).fail(ValueError, problem, hint)
        if is_arraylike(self.zero_points):
            self._check_zero_points(site.also(zero_points=self.zero_points))

    def _check_zero_points(self, site: Site) -> None:
        zeros: Any = self.zero_points
        scales: Any = self.scales
        if zeros.shape != scales.shape or not jnp.issubdtype(zeros.dtype, jnp.number):
            problem = f"`zero_points` has shape {zeros.shape} and dtype {zeros.dtype.name}."
            hint = f"Each scale has a zero point, an integer or a float. Pass them in the shape {scales.shape}."
            site.fail(ValueError, problem, hint)
        if not jnp.issubdtype(self.data.dtype, jnp.integer):
            hint = "Only integers have zero points. Leave them out."
            site.fail(TypeError, f"`zero_points` is given, but `data` is {self.data.dtype.name}.", hint)

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor has scales. Its values are then those of `dequantize()`."""
        return any(each is not None for each in (self.scaling, self.scales, self.tensor_scale, self.zero_points))

    @property
    def shape(self) -> tuple[int, ...]:
        """The buffer's shape."""
        return self.data.shape

    @property
    def dtype(self) -> Any:
        """The buffer's dtype; for a quantised tensor, the stored dtype."""
        return self.data.dtype

    @property
    def logical_dtype(self) -> Any:
        """Dtype of `dequantize()`: float32 for a quantised tensor, else `dtype`."""
        return jnp.dtype(jnp.float32) if self.is_quantized else self.dtype

    @property
    def ndim(self) -> int:
        """The buffer's rank: the rank of a group, plus one if the tensor is uniform."""
        return self.data.ndim

    @property
    def ragged(self) -> tuple[bool, bool]:
        """Whether the groups' first dim and their last dim are ragged."""
        return self.first_dims is not None, self.last_dims is not None

    @property
    def is_cotangent(self) -> bool:
        """Whether this is a cotangent or tangent of a ragged tensor: its dims are float0, or they are None and `data`
        is a matrix."""
        dims = [d for d in (self.first_dims, self.last_dims) if d is not None]
        if not dims:
            return is_arraylike(self.data) and self.data.ndim == 2
        return any(is_arraylike(d) and d.dtype == jax.dtypes.float0 for d in dims)

    @property
    def is_stack(self) -> bool:
        """Whether the dims, or a buffer packed along columns, have a leading axis."""
        more = any(is_arraylike(d) and d.ndim > 1 for d in (self.first_dims, self.last_dims))
        return more or (packs_columns(self) and is_arraylike(self.data) and self.data.ndim > 2)

    @property
    def kind(self) -> str:
        """`"uniform"`, `"ragged rows"`, `"ragged columns"` or `"ragged both"`; `"cotangent"` if the groups are
        unknown."""
        if self.is_cotangent:
            return "cotangent"
        return KINDS["·".join("R" if is_ragged else "U" for is_ragged in self.ragged)]

    @property
    def packed_axis(self) -> int | None:
        """The buffer's packed axis: -1 for columns, -2 for the rows of matrices, -3 for rows with one more dim, ...;
        None for a uniform tensor. `TypeError` for a cotangent."""
        if self.is_cotangent:
            check_has_groups(self)
        if not any(self.ragged):
            return None
        return self._packed

    @property
    def _packed(self) -> int:
        return -1 if packs_columns(self) else -self._rank

    @property
    def _rank(self) -> int:
        """Rank of the buffer, without the leading axes of a stack."""
        leading = max(getattr(dims, "ndim", 1) - 1 for dims in (self.first_dims, self.last_dims))
        return getattr(self.data, "ndim", 2 + leading) - leading

    @property
    def packed_dims(self) -> Int[Array, " g"]:
        """The groups' sizes along the packed axis. `ValueError` for a uniform tensor."""
        axis = require_packed(self, "packed_dims")
        return as_int32(self.last_dims if axis == -1 else self.first_dims)

    @property
    def num_groups(self) -> int:
        """Number of groups, including empty ones; in a stack, of each tensor."""
        for dims in (self.first_dims, self.last_dims):
            if dims is not None:
                return dims.shape[-1]
        if self.is_cotangent:
            check_has_groups(self)
        return self.data.shape[0]

    @property
    def capacity(self) -> int:
        """The static extent of the packed axis. `ValueError` for a uniform tensor."""
        return self.data.shape[require_packed(self, "capacity")]

    @property
    def offsets(self) -> Int[Array, " g_plus_1"]:
        """`(g + 1,)` int32: 0, then the running sum of the sizes along the packed axis, clipped to the capacity.

        `ValueError` for a uniform tensor.
        """
        require_packed(self, "offsets")
        check_not_explicit("GroupedTensor.offsets", first_dims=self.first_dims, last_dims=self.last_dims)
        check_packed(Site("GroupedTensor.offsets", {"x": self}), self.capacity)  # Unflattening skips `__check_init__`.
        return group_offsets(self.packed_dims, self.capacity)

    @property
    def group_ids(self) -> Int[Array, " capacity"]:
        """`(capacity,)` int32: each row's (or column's) group; `num_groups` in the tail."""
        require_packed(self, "group_ids")
        return group_ids(self.offsets, self.capacity)

    @property
    def positions(self) -> Int[Array, " capacity"]:
        """`(capacity,)` int32: each row's (or column's) index within its group, or within the tail."""
        require_packed(self, "positions")
        return jnp.arange(self.capacity, dtype=jnp.int32) - self.offsets[self.group_ids]

    @property
    def mask(self) -> Bool[Array, "..."]:
        """Bools in the buffer's shape: True for elements of groups."""
        check_not_explicit("GroupedTensor.mask", first_dims=self.first_dims, last_dims=self.last_dims)
        check_has_groups(self)
        if self.packed_axis is None:
            return jnp.ones(self.shape, bool)
        if self.packed_axis == -1:
            return self.mT.mask.mT
        rows, *more, last = self.shape
        check_packed(Site("GroupedTensor.mask", {"x": self}), rows)
        widths = None if self.last_dims is None else as_int32(self.last_dims)
        mask = element_mask(self.packed_dims, widths, rows, last)
        return jnp.broadcast_to(mask.reshape(rows, *[1] * len(more), last), self.shape)

    @property
    def mT(self: Tensor) -> Tensor:
        """The tensor with every group transposed: swaps the buffer's last two axes, the dims and the axes of the
        scales.

        Under `jit`, a transpose inside the function that calls `ragged.matmul` makes no copy; outside of `jit`, every
        transpose is a copy. `ValueError` for ragged or quantised groups with more than two dims.
        """
        site, problem = Site("GroupedTensor.mT", {"x": self}), "groups with more than two dims have no transpose."
        if any(self.ragged) and not self.is_cotangent and not packs_columns(self) and self._rank > 2:
            site.fail(ValueError, f"ragged {problem}", _instead_of_mT(self))
        if self.is_quantized and not any(self.ragged) and self._rank > 3:
            site.fail(ValueError, f"quantised {problem}", "Transpose the array before it is quantised.")
        # Scales of whole groups have no axes to swap.
        by_block = self.scaling is not None and self.scaling.block not in (None, (None, None))
        return with_fields(
            self,
            scales=_mT(self.scales) if by_block else self.scales,
            zero_points=_mT(self.zero_points) if by_block and self.zero_points is not None else self.zero_points,
            scaling=self.scaling and self.scaling.mT,
            data=_mT(self.data),
            first_dims=self.last_dims,
            last_dims=self.first_dims,
            transposed=not self.transposed,
        )

    def with_data(self: Tensor, data: Array) -> Tensor:
        """The tensor with `data` as its buffer, unchecked."""
        return with_fields(self, data=data)

    def astype(self: Tensor, dtype: Any) -> Tensor:
        """The tensor with its buffer, tail included, cast to `dtype`. Also casts stacks and cotangents. `TypeError` for
        a quantised tensor."""
        check_not_quantized(self)
        return self.with_data(jnp.asarray(self.data).astype(dtype))


def _instead_of_mT(x: GroupedBase) -> str:
    """Hint for groups with more than two dims: `einsum` calls that replace products of a transpose."""
    more = "hijklmnop"[: x.ndim - 2]
    # Letters: t are the rows, s ragged columns, d uniform columns, e the columns of `y`.
    x_axes, y_axes = f"t{more}{'sd'[x.last_dims is None]}", f"t{more}e"
    if x.last_dims is None:
        wgrad, outer = f"{x_axes},{y_axes}->g{x_axes[-1]}e", f"{x_axes},{'s' + x_axes[1:]}->t{more}s"
        products = f'`ragged.einsum("{wgrad}", x, y)` for x.mT @ y, `ragged.einsum("{outer}", y, x)` for y @ x.mT'
    else:
        products = f'`ragged.einsum("{x_axes},{y_axes}->s{more}e", x, y)` for x.mT @ y'
    swapped = " `x.map(lambda data: data.mT)` swaps the dims of each row." if x.last_dims is None else ""
    return f"Name the axes: {products}.{swapped}"


def _mT(x: Any) -> Any:
    return jax.eval_shape(lambda x: x.mT, x) if isinstance(x, jax.ShapeDtypeStruct) else x.mT


@jax.jit(static_argnums=1, inline=True)  # Outside of `jit`, one program instead of ten.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def _selected(x: GroupedBase, value: Any) -> Array:
    """The buffer with `value` outside of the groups.

    The derivative saves the sizes and recomputes the mask.
    """
    return jnp.where(x.mask, x.data, jax.lax.full_like(x.data, value))


def check_has_groups(x: GroupedBase) -> None:
    """Raises if `x` has no groups: `TypeError` for a cotangent, `ValueError` for a stack."""
    if x.is_cotangent:
        problem = "a cotangent or tangent has no groups, so only elementwise operations are defined."
        hint = "Use the groups of the tensor that was differentiated: `x - g`, or "
        hint += "`GroupedTensor(g.data, x.first_dims, x.last_dims, transposed=x.transposed)`."
        Site("GroupedTensor", {"g": x}).fail(TypeError, problem, hint)
    if x.is_stack:
        hint = "Map a function over it, as in `jax.vmap(lambda x: x.sum())(stack)`; its first tensor is "
        hint += "`jax.tree.map(lambda leaf: leaf[0], stack)`."
        problem = "this is a stack of tensors, with a leading batch axis."
        Site("GroupedTensor", {"stack": x}).fail(ValueError, problem, hint)


def packs_columns(x: GroupedBase) -> bool:
    """Whether the groups are packed along the buffer's last axis."""
    return x.last_dims is not None and (x.first_dims is None or x.transposed)


@over_explicit_axes
def filled(x: GroupedBase, value: Any) -> Array:
    """The buffer with `value` outside of the groups. The buffer of a cotangent is returned unchanged."""
    check_not_quantized(x)
    data = as_array(x.data)
    if x.is_cotangent:
        return data
    check_has_groups(x)
    return data if x.packed_axis is None else _selected(x.with_data(data), value)


def require_packed(x: GroupedBase, attribute: str) -> int:
    """The packed axis. Raises a `ValueError` that names the attribute if there is none."""
    check_has_groups(x)
    if x.packed_axis is None:
        Site(f"GroupedTensor.{attribute}", {"x": x}).fail(
            ValueError, "a uniform tensor has no ragged axis.", "Its groups are `x.data`, all of the same shape."
        )
    return x.packed_axis


def with_fields[T: GroupedBase](x: T, **fields: Any) -> T:
    """A copy of `x` with some fields replaced, unchecked, so that it works for stacks too."""
    new = object.__new__(type(x))
    for field in dataclasses.fields(x):
        object.__setattr__(new, field.name, fields.get(field.name, getattr(x, field.name)))
    return new


def is_read_transposed(x: GroupedBase) -> bool:
    """Whether kernels get `data.mT` as their operand.

    Kernels get a uniform buffer in its memory order, and any other buffer with its packed axis first.
    """
    return x.transposed if x.packed_axis is None else x.packed_axis == -1


def float_scales(x: GroupedBase) -> Array:
    """The scales in float32, multiplied by the tensor scale if there is one."""
    scales = as_rounded(jnp.asarray(x.scales)).astype(jnp.float32)
    if x.tensor_scale is None:
        return scales
    tensor_scale = jnp.asarray(x.tensor_scale)
    assert x.scaling is not None
    if tensor_scale.ndim and scales.ndim > 1:  # Each block gets the tensor scale of its group.
        axis = x.packed_axis
        block = None if axis is None else (x.scaling.block or (None, None))[0 if axis != -1 else -1]
        if axis is not None and block is not None:
            offsets = group_offsets(-(-jnp.diff(x.offsets) // block), count := scales.shape[axis])
            tensor_scale = take(tensor_scale, group_ids(offsets, count), 1)
        tensor_scale = tensor_scale.reshape(-1, *[1] * (scales.ndim - 1))
        tensor_scale = jnp.moveaxis(tensor_scale, 0, axis or 0)
    return scales * tensor_scale


def kernel_scales(x: GroupedBase) -> Scales | None:
    """The scales of the stored buffer, in the form that kernels take; None for an unquantised tensor."""
    if not x.is_quantized:
        return None
    return buffer_scales(x) if x.packed_axis is None else buffer_scales(x).for_packed


def buffer_scales(x: GroupedBase) -> Scales:
    """The scales of the stored buffer of a quantised tensor, in their own dtype."""
    x._check_scales()  # Tensors from `tree_map` and `tree_at` skip `__check_init__`.
    assert x.scaling is not None
    scaling, scales = x.scaling, jnp.asarray(x.scales)
    tensor_scale = None if x.tensor_scale is None else jnp.asarray(x.tensor_scale)
    if tensor_scale is not None and tensor_scale.ndim and (x.packed_axis is not None or scales.ndim < 2):
        # Kernels support a tensor scale for each group only in a uniform operand that also has scales of blocks.
        block = scaling.block or (None, None)
        scaling, scales, tensor_scale = Scaling(block), float_scales(x), None
    zeros = None if x.zero_points is None else jnp.asarray(x.zero_points)
    return stored_scales(scaling, scales, tensor_scale, zeros, x.packed_axis, x.num_groups, is_read_transposed(x))


def element_zeros(x: GroupedBase) -> Array:
    """Each element's zero point in float32, in a shape that broadcasts to the buffer."""
    assert x.scaling is not None
    zeros = jnp.asarray(x.zero_points).astype(jnp.float32)
    return element_scales(with_fields(x, scales=zeros, scaling=Scaling(x.scaling.block), tensor_scale=None))


def element_scales(x: GroupedBase) -> Array:
    """Each element's scale, in a shape that broadcasts to the buffer."""
    x = with_fields(x, zero_points=None)
    inner = 2 if x.packed_axis is None else 1  # the first axis between a group's first and last dim, if any
    if x.ndim > inner + 1:  # Blocks have extent 1 along axis `inner`, so map over it.
        is_whole = x.scaling is None or x.scaling.block in (None, (None, None))
        axes = inner, None if is_whole else inner  # Scales of whole groups lack this axis.
        mapped = jax.vmap(lambda data, scales: element_scales(with_fields(x, data=data, scales=scales)), axes, inner)
        return mapped(jnp.asarray(x.data), jnp.asarray(x.scales))
    scales = kernel_scales(x)
    assert scales is not None
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2]) if is_read_transposed(x) else x.shape
    values = spread(scales.whole.values, scales.block, shape, None if x.packed_axis is None else x.packed_dims)
    return values.mT if is_read_transposed(x) else values


def check_not_quantized(x: GroupedBase) -> None:
    """Raises a `TypeError` if the tensor is quantised: the buffer means nothing without its scales."""
    if x.is_quantized:
        problem = "a quantised tensor has no arithmetic, indexing, casts or padding."
        Site("GroupedTensor", {"x": x}).fail(TypeError, problem, "Call `x.dequantize()` first.")
