"""`GroupedTensor`: a sequence of matrices in one buffer.

With `first_dims=[3, 0, 2]` and a buffer of 6 rows and 2 columns:

    data     group              x[0]  rows 0..2 of the buffer
    a a      0                  x[1]  no rows
    b b      0                  x[2]  rows 3..4
    c c      0
    d d      2                  offsets   [0, 3, 3, 5]
    e e      2                  capacity  6
    ? ?      tail               the tail may hold anything, and never matters
"""

from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from ragged._errors import Site, check_packed, is_arraylike, is_concrete
from ragged._mesh import over_explicit_axes, refuse_explicit
from ragged.backends import schedule
from ragged.backends.schedule import as_int32
from ragged.product.operands import Scales
from ragged.quant.scales import spread
from ragged.quant.scaling import Scaling, eight_bits_fixed, not_differentiable
from ragged.tensor import convert, show, slices
from ragged.tensor.arithmetic import Arithmetic
from ragged.tensor.validate import validated

KINDS = {"U·U": "uniform", "R·U": "ragged rows", "U·R": "ragged columns", "R·R": "ragged both"}
"""The kinds by their first·last dims, ragged or uniform."""


class GroupedTensor(Arithmetic):
    """A sequence of `g` matrices in one buffer, whose first dim, last dim, both or neither differ from group to group.

    | kind           | `first_dims` | `last_dims` | `data`                 | group `i`                               |
    |----------------|--------------|-------------|------------------------|-----------------------------------------|
    | uniform        | None         | None        | `[g, first, *d, last]` | `data[i]`                               |
    | ragged rows    | `[g]`        | None        | `[rows, *d, last]`     | `data[o[i]:o[i+1]]`                     |
    | ragged columns | None         | `[g]`       | `[first, cols]`        | `data[:, o[i]:o[i+1]]`                  |
    | ragged both    | `[g]`        | `[g]`       | `[rows, *d, max_last]` | `data[o[i]:o[i+1], ..., :last_dims[i]]` |

    `o` are the offsets: the running sum of the dims. What lies past the last group is the *tail*. Its content is
    undefined on input, NaN included, and never affects a result or a gradient; every result has zeros there. The same
    holds for the columns of a ragged-both tensor beyond `last_dims`.

    A group is a matrix, or has **more dims** between its first and its last, such as the heads of `[rows, heads,
    head_dim]`. Those are the same in all groups. What is packed along columns is a matrix.

    **Fields:**

    - `data`: the buffer.
    - `first_dims`, `last_dims`: `(g,)` int32 (or uint32), the size of each group's first / last dim; None: not ragged.
      float0 in a tangent.
    - `scales`, `scaling`: of a quantised tensor, whose values are `data × scales`: one scale a block, float32 or of 8
      bits, and the static `Scaling` that says which elements make a block. `ragged.quantize` makes them.
    - `tensor_scale`: `()` float32, of a quantised tensor with scales in float8_e4m3fn, whose values are
      `data × scales × tensor_scale`; else None.
    - `transposed`: static. Whether the buffer is seen through `mT`, that is, whether `data.mT` is what lies in memory.
      `mT` flips it. For a ragged-both tensor it says which axis is packed: with `transposed`, `data` is
      `[max_first, cols]` and group `i` is `data[:first_dims[i], o[i]:o[i+1]]`, where `o` are the offsets of
      `last_dims`.

    **Operators**, comparisons and `==` among them, are elementwise: with numbers, with tensors of the same structure
    (sizes are compared where they are known; `validate(like=...)` compares traced ones), with tensors whose groups have
    1 row or column where this one's have more, with `per_group`, `per_row` and `per_column`, and with a `(last,)` array
    for every row. Results have zeros, or False, in the tail. `x @ w` is `ragged.matmul(x, w)`.

    **Cotangents and tangents** of a ragged tensor have a buffer, and no groups: JAX gives integers none, so their dims
    are None (`equinox.filter_grad`) or float0 (`allow_int=True`, `jax.jvp`). `g * 2`, `g + g` and `g.map` work on the
    buffer, `x - g` has the groups of `x`; what needs groups raises a `TypeError`. Of a tensor with more than two dims,
    one whose dims are None can't be told from a uniform tensor, and counts as one, except in `x - g` and its like.

    A **stack** of ragged tensors has an axis in front of the buffer and the dims. It can be cast, transposed, mapped
    and scanned over; all else raises a `ValueError`. With an axis in front of the buffer alone, `[batch, rows, last]`
    next to `(g,)`, rows that are ragged count as ragged along that axis, and so does a stack of uniform tensors,
    `[batch, g, first, last]`, as a uniform tensor of `batch` groups.

    **Raises:** `TypeError` or `ValueError` for what can be seen without looking at values: ranks, numbers of groups,
    dtypes of dims, shape and dtype of scales. `validate` checks the values. Leaves that are no arrays (None, specs,
    shapes, in_axes) are not checked.

    !!! example
        ```python
        import jax.numpy as jnp
        from ragged import GroupedTensor
        x = GroupedTensor(jnp.ones((16, 4)), first_dims=jnp.array([3, 5, 0, 4], jnp.int32))
        assert x.num_groups == 4 and x.capacity == 16
        assert x[1].shape == (5, 4)
        ```
    """

    data: Array | Any
    first_dims: Int[Array, " g"] | Any = None
    last_dims: Int[Array, " g"] | Any = None
    scales: Array | Any = None
    scaling: Scaling | Any = eqx.field(static=True, default=None)
    tensor_scale: Float[Array, ""] | Any = eqx.field(default=None, kw_only=True)
    transposed: bool = eqx.field(static=True, default=False, kw_only=True)

    def __check_init__(self) -> None:
        for name in ("first_dims", "last_dims"):
            dims = getattr(self, name)
            if isinstance(dims, list | tuple):
                mend = f"Pass an array: `jnp.array({name}, jnp.int32)`."
                Site("GroupedTensor", {name: dims}).fail(TypeError, f"`{name}` is a {type(dims).__name__}.", mend)
            if not is_arraylike(dims):
                continue
            if dims.dtype not in (jnp.int32, jnp.uint32, jax.dtypes.float0):
                problem = f"`{name}` must be int32 or uint32, one size a group."
                Site("GroupedTensor", {name: dims}).fail(TypeError, problem, f"Cast it: `{name}.astype(jnp.int32)`.")
            if dims.ndim != 1:
                problem = f"`{name}` must have shape (g,), one size a group."
                mend = "A stack of tensors is made by `jax.vmap(GroupedTensor)`."
                Site("GroupedTensor", {name: dims}).fail(ValueError, problem, mend)
        data, first, last = self.data, self.first_dims, self.last_dims
        if is_arraylike(first) and is_arraylike(last) and first.shape != last.shape:
            problem = f"`first_dims` has {first.shape[0]} groups but `last_dims` has {last.shape[0]}."
            mend = "Both need one size per group, including empty groups."
            Site("GroupedTensor", {"first_dims": first, "last_dims": last}).fail(ValueError, problem, mend)
        if not is_arraylike(data) or not all(d is None or is_arraylike(d) for d in (first, last)):
            return
        is_uniform, columns = first is None and last is None, self._packs_columns
        least = 3 if is_uniform else 2
        if data.ndim < least or (columns and data.ndim > 2):
            Site("GroupedTensor", {"data": data, "first_dims": first, "last_dims": last}).fail(
                ValueError,
                f"`data` must have {least} dims{'' if columns else ' or more'}, but has {data.ndim}.",
                "Without `first_dims` and `last_dims` it is uniform and needs a group axis in front."
                if is_uniform
                else "What is packed along columns is a matrix; what is packed along rows may have more dims."
                if columns and data.ndim > 2
                else "A ragged buffer has no group axis: its groups are packed along the ragged axis.",
            )
        if not is_uniform:
            check_packed(Site("GroupedTensor", {"data": data}), data.shape[self._packed])
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            mend = f"Pass `ragged.Scaling.of({self.scaling!r})`, or let `ragged.quantize` make the tensor."
            Site("GroupedTensor").fail(TypeError, f"`scaling` is {self.scaling!r}, not a `Scaling`.", mend)
        if is_arraylike(self.scales) or is_arraylike(self.tensor_scale):
            self._check_scales()

    def _check_scales(self) -> None:
        site = Site("GroupedTensor", {"x": self})
        if not is_arraylike(self.scales):
            name = "tensor_scale" if self.scaling is None else "scaling"
            site.fail(TypeError, f"`{name}` is given without an array of scales.", "Pass both, or neither.")
        if self.scaling is None:
            site.fail(ValueError, "`scales` are given without `scaling`.", "Say which elements share a scale.")
        want = self.scaling.shape(self.shape, self.packed_axis, self.num_groups)
        if self.scales.shape != want or self.scales.dtype != self.scaling.dtype:
            problem = f"scales of a {self.kind} tensor with the scaling {self.scaling} have shape {want} and dtype "
            mend = "`ragged.quantize` makes them."
            if self.scales.shape == want:
                mend = f"Cast them: `scales.astype(jnp.{self.scaling.dtype.name})`. A cast of all of a model's leaves "
                mend += "must leave those of quantised tensors as they are."
            site.fail(ValueError, f"{problem}{self.scaling.dtype.name}.", mend)
        level = self.tensor_scale
        of_two = self.scaling._has_tensor_scale
        if (level is not None) != of_two or (is_arraylike(level) and (level.shape, level.dtype) != ((), jnp.float32)):
            asks = "needs a `tensor_scale`, () float32" if of_two else "has no `tensor_scale`"
            problem = f"a tensor with the scaling {self.scaling} {asks}."
            site.also(tensor_scale=level).fail(ValueError, problem, "`ragged.quantize` makes both.")

    @property
    def is_quantized(self) -> bool:
        """Whether its values are `data × scales`."""
        return any(each is not None for each in (self.scaling, self.scales, self.tensor_scale))

    @property
    def shape(self) -> tuple[int, ...]:
        """The buffer's shape."""
        return self.data.shape

    @property
    def dtype(self) -> Any:
        """The buffer's dtype: of a quantised tensor, that of what is stored."""
        return self.data.dtype

    @property
    def logical_dtype(self) -> Any:
        """The dtype of `dequantize()`: float32 for a quantised tensor, else `dtype`."""
        return jnp.dtype(jnp.float32) if self.is_quantized else self.dtype

    @property
    def ndim(self) -> int:
        """The buffer's rank: that of a group, and one more for a uniform tensor."""
        return self.data.ndim

    @property
    def ragged(self) -> tuple[bool, bool]:
        """Whether the first and the last dim of the groups are ragged."""
        return self.first_dims is not None, self.last_dims is not None

    @property
    def is_cotangent(self) -> bool:
        """Whether it is a cotangent or tangent of a ragged tensor: its dims are float0, or None next to a matrix.

        With more dims and None, it can't be told from a uniform tensor.
        """
        dims = [d for d in (self.first_dims, self.last_dims) if d is not None]
        if not dims:
            return is_arraylike(self.data) and self.data.ndim == 2
        return any(is_arraylike(d) and d.dtype == jax.dtypes.float0 for d in dims)

    @property
    def is_stack(self) -> bool:
        """Whether there are axes in front of the dims, or of a buffer that packs columns."""
        more = any(is_arraylike(d) and d.ndim > 1 for d in (self.first_dims, self.last_dims))
        return more or (self._packs_columns and is_arraylike(self.data) and self.data.ndim > 2)

    def _require_groups(self) -> None:
        """Raises if it has no groups: a `TypeError` if it is a cotangent, a `ValueError` if it is a stack."""
        if self.is_cotangent:
            problem = "a cotangent or tangent, whose groups are unknown, has elementwise operations only."
            mend = "Take the groups of the tensor that was differentiated: `x - g`, or "
            mend += "`GroupedTensor(g.data, x.first_dims, x.last_dims, transposed=x.transposed)`."
            Site("GroupedTensor", {"x": self}).fail(TypeError, problem, mend)
        if self.is_stack:
            mend = "Map over it: `jax.vmap(lambda x: ...)(stack)`; one is `jax.tree.map(lambda leaf: leaf[0], stack)`."
            problem = "a stack of tensors, with a batch axis in front."
            Site("GroupedTensor", {"x": self}).fail(ValueError, problem, mend)

    @property
    def kind(self) -> str:
        """`"uniform"`, `"ragged rows"`, `"ragged columns"`, `"ragged both"`; or `"cotangent"`, without groups."""
        if self.is_cotangent:
            return "cotangent"
        return KINDS["·".join("R" if is_ragged else "U" for is_ragged in self.ragged)]

    @property
    def packed_axis(self) -> int | None:
        """The buffer's axis along which the groups are packed, counted from its last: -1 for columns, -2 for the rows
        of matrices, -3 for rows with one more dim, ...; None if uniform."""
        if self.is_cotangent:
            self._require_groups()
        if not any(self.ragged):
            return None
        return self._packed

    @property
    def _packed(self) -> int:
        return -1 if self._packs_columns else -self._rank

    @property
    def _packs_columns(self) -> bool:
        return self.last_dims is not None and (self.first_dims is None or self.transposed)

    @property
    def _rank(self) -> int:
        """How many dims the buffer has, without those in front of a stack."""
        in_front = max(getattr(dims, "ndim", 1) - 1 for dims in (self.first_dims, self.last_dims))
        return getattr(self.data, "ndim", 2 + in_front) - in_front

    @property
    def packed_dims(self) -> Int[Array, " g"]:
        """The groups' sizes along the packed axis."""
        axis = self._require_packed("packed_dims")
        return as_int32(self.last_dims if axis == -1 else self.first_dims)

    @property
    def num_groups(self) -> int:
        """How many matrices it holds, empty ones included; of a stack, how many each of its tensors holds."""
        for dims in (self.first_dims, self.last_dims):
            if dims is not None:
                return dims.shape[-1]
        if self.is_cotangent:
            self._require_groups()
        return self.data.shape[0]

    @property
    def capacity(self) -> int:
        """The static extent of the packed axis. `ValueError` for a uniform tensor."""
        return self.data.shape[self._require_packed("capacity")]

    @property
    def offsets(self) -> Int[Array, " g_plus_1"]:
        """Where each group begins and ends along the packed axis: a leading 0, then the running sum of the sizes.

        Never past the capacity, whatever the sizes are. `ValueError` for a uniform tensor.
        """
        self._require_packed("offsets")
        refuse_explicit("GroupedTensor.offsets", first_dims=self.first_dims, last_dims=self.last_dims)
        check_packed(Site("GroupedTensor.offsets", {"x": self}), self.capacity)  # unflattening checks nothing
        return schedule.group_offsets(self.packed_dims, self.capacity)

    @property
    def group_ids(self) -> Int[Array, " capacity"]:
        """`(capacity,)` int32: the group of each row (or column) of the buffer; `num_groups` in the tail."""
        self._require_packed("group_ids")
        return schedule.group_ids(self.offsets, self.capacity)

    @property
    def positions(self) -> Int[Array, " capacity"]:
        """`(capacity,)` int32: the place of each row (or column) within its group, from 0; within the tail too."""
        self._require_packed("positions")
        return jnp.arange(self.capacity, dtype=jnp.int32) - self.offsets[self.group_ids]

    @property
    def mask(self) -> Bool[Array, "..."]:
        """True where the buffer holds an element of a group. The buffer's shape."""
        refuse_explicit("GroupedTensor.mask", first_dims=self.first_dims, last_dims=self.last_dims)
        self._require_groups()
        if self.packed_axis is None:
            return jnp.ones(self.shape, bool)
        if self.packed_axis == -1:
            return self.mT.mask.mT
        rows, *more, last = self.shape
        check_packed(Site("GroupedTensor.mask", {"x": self}), rows)
        widths = None if self.last_dims is None else as_int32(self.last_dims)
        mask = schedule.element_mask(self.packed_dims, widths, rows, last)
        return jnp.broadcast_to(mask.reshape(rows, *[1] * len(more), last), self.shape)

    @property
    def mT(self) -> "GroupedTensor":
        """Every group transposed. The dims trade places, and so do the buffer's last two axes.

        Under `jit` no copy is made where the result goes into `ragged.matmul`: transpose in the function that
        multiplies. Outside of it this is a copy, and so is what turns it back. `x.mT.mT` is `x`. Scales move along.
        `ValueError` for ragged groups with more than two dims.
        """
        if any(self.ragged) and not self.is_cotangent and not self._packs_columns and self._rank > 2:
            mend = "Say what is contracted in letters: `ragged.einsum`."
            problem = "ragged groups with more than two dims have no transpose."
            Site("GroupedTensor.mT", {"x": self}).fail(ValueError, problem, mend)
        by_block = self.is_quantized and self.scaling.block not in (None, (None, None))
        return self._with(
            scales=_mT(self.scales) if by_block else self.scales,
            scaling=self.scaling and self.scaling.mT,
            data=_mT(self.data),
            first_dims=self.last_dims,
            last_dims=self.first_dims,
            transposed=not self.transposed,
        )

    def __repr__(self) -> str:
        return f"GroupedTensor({', '.join(show.parts(self))})"

    def __pdoc__(self, *, indent: int, **_: Any) -> Any:
        """As it prints inside of what holds it, an Equinox module for one: the protocol of `wadler_lindig`."""
        import wadler_lindig as wl  # which is there if it asks

        fields = [wl.TextDoc(part) for part in show.parts(self)]
        return wl.bracketed(wl.TextDoc("GroupedTensor("), fields, wl.comma, wl.TextDoc(")"), indent)

    def _repr_html_(self) -> str:
        return show.html(self)

    def _require_packed(self, what: str) -> int:
        self._require_groups()
        if self.packed_axis is None:
            Site(f"GroupedTensor.{what}", {"x": self}).fail(
                ValueError, "a uniform tensor has no ragged axis.", "Its groups are `data[i]`, all of the same shape."
            )
        return self.packed_axis

    def _with(self, **fields: Any) -> "GroupedTensor":
        """A copy with other fields. Like unflattening, it checks nothing: stacked tensors have axes in front."""
        new = object.__new__(GroupedTensor)
        for name in ("data", "first_dims", "last_dims", "scales", "scaling", "tensor_scale", "transposed"):
            object.__setattr__(new, name, fields.get(name, getattr(self, name)))
        return new

    def _replace_data(self, data: Array) -> "GroupedTensor":
        return self._with(data=data)

    @property
    def _is_flipped(self) -> bool:
        """Whether it is `data.mT` that lies in memory, its packed axis first."""
        return self.transposed if self.packed_axis is None else self.packed_axis == -1

    @property
    def _float_scales(self) -> Array:
        """The scales in float32, of two levels their product."""
        scales = jnp.asarray(self.scales).astype(jnp.float32)
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    def _kernel_scales(self) -> Scales | None:
        """The scales as kernels take them, those of the buffer as it lies in memory; None if there are none."""
        if not self.is_quantized:
            return None
        self._check_scales()  # what `tree_map`, `tree_at` or `partition` made was never checked
        level = None if self.tensor_scale is None else jnp.asarray(self.tensor_scale)
        place = self.packed_axis, self.num_groups, self._is_flipped
        return self.scaling._for_kernels(jnp.asarray(self.scales), level, *place)

    def _element_scales(self) -> Array:
        """Each element's scale, or what broadcasts to the buffer."""
        inner = 2 if self.packed_axis is None else 1
        if self.ndim > inner + 1:  # which have blocks of their own
            axes = inner, None if self.scaling.block in (None, (None, None)) else inner
            each = jax.vmap(lambda data, scales: self._with(data=data, scales=scales)._element_scales(), axes, inner)
            return each(jnp.asarray(self.data), jnp.asarray(self.scales))
        scales = self._kernel_scales()
        assert scales is not None
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self._is_flipped else self.shape
        values = spread(scales.whole, shape, None if self.packed_axis is None else self.packed_dims)
        return values.mT if self._is_flipped else values

    @over_explicit_axes
    def dequantize(self) -> "GroupedTensor":
        """`data × scales` in float32, zeros in the tail. A tensor without scales is returned as it is."""
        if not self.is_quantized:
            return self
        return _dequantized(self._replace_data(eight_bits_fixed("GroupedTensor.dequantize", self.data)))

    def _require_plain(self) -> None:
        """Raises a `TypeError` if the tensor is quantised: without its scales the buffer means nothing."""
        if self.is_quantized:
            problem = "a quantised tensor has no arithmetic, indexing, casts or padding."
            Site("GroupedTensor", {"x": self}).fail(TypeError, problem, "Take `x.dequantize()` first.")

    def validate(self, *, like: "GroupedTensor | Any" = None) -> "GroupedTensor":
        """Checks the sizes: none negative, none wider than the buffer, their sum within the capacity.

        **Arguments:** `like`: another tensor, whose sizes must be the same: `x.validate(like=y) + y` where they are
        traced, for `x + y` alone compares only sizes that are known, and costs nothing under `jit`.

        **Returns:** the tensor itself. Under `jit` the check runs only if something that is computed from the returned
        tensor's dims is used, as any product of it is; `.data` alone drops it.

        **Raises:** `ValueError` naming the first bad group where the sizes are known; where they are traced, a run-time
        error (through `equinox.error_if`) that names it too. `NotImplementedError` for traced sizes in a
        `jax.shard_map` over some of a mesh's axes only, where JAX has no run-time errors.
        """
        return validated(self, like)

    def rows(self, start: Any, stop: Any) -> "GroupedTensor":
        """Of every group the rows from `start` to `stop`: `out[i] = x[i][start:stop]`.

        As in Python's slices, negative ones count from each group's own end, None is its start or end, and what a group
        doesn't have is left out. `x.rows(-1, None)` is the last row of each.

        **Arguments:** `start`, `stop`: ints or None; along a ragged dim integer arrays too, `()` or one a group `(g,)`.

        **Returns:** along a ragged dim a tensor with other `first_dims` and zeros in the tail, whose buffer is as long
        as this one's; or shorter, `num_groups` times what ints allow a group. Else all groups have the rows of the
        slice.

        **Raises:** `TypeError` for other ends, `ValueError` for arrays along a dim that isn't ragged.

        !!! example
            ```python
            import jax.numpy as jnp
            from ragged import GroupedTensor
            x = GroupedTensor(jnp.arange(6.0)[:, None], first_dims=jnp.array([3, 1, 2], jnp.int32))
            last = x.rows(-1, None)
            assert last.data[:, 0].tolist() == [2.0, 3.0, 5.0]
            ```
        """
        return slices.sliced(self, -2, start, stop)

    def columns(self, start: Any, stop: Any) -> "GroupedTensor":
        """Of every group the columns from `start` to `stop`: `out[i] = x[i][:, start:stop]`. Otherwise as `rows`."""
        return slices.sliced(self, -1, start, stop)

    def __len__(self) -> int:
        if self.is_stack:
            self._require_groups()
        return self.num_groups

    def __getitem__(self, index: int | Any) -> Shaped[Array, "first *more last"]:
        """Group `index` as an array. Needs concrete dims."""
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            problem = "the index must be an int, the group."
            mend = "Rows or columns of every group are `x.rows(start, stop)` and `x.columns(start, stop)`. "
            mend += "Index the buffer itself as `x.data[...]`."
            Site("GroupedTensor[...]", {"index": index}).fail(TypeError, problem, mend)
        self._require_groups()
        if not -self.num_groups <= index < self.num_groups:
            mend = "The first is `x[0]`; negative ones count from the end."
            Site(f"GroupedTensor[{index}]", {"x": self}).fail(IndexError, f"there are {self.num_groups} groups.", mend)
        self._require_plain()
        refuse_explicit(f"GroupedTensor[{index}]", x=self)
        index = index % self.num_groups
        if self.packed_axis is None:
            return self.data[index]
        if not is_concrete(*(d for d in (self.first_dims, self.last_dims) if d is not None)):
            problem = "the group's shape depends on sizes that are not known while tracing."
            mend = "Under `jit` work on the whole tensor: `ragged.matmul`, `map`, `sum`, `to_padded`."
            Site(f"GroupedTensor[{index}]", {"x": self}).fail(ValueError, problem, mend)
        dims = self.last_dims if self.packed_axis == -1 else self.first_dims
        schedule.check_integers(dims)
        start, end = map(int, schedule.known_offsets(dims, self.capacity)[index : index + 2])
        first, last = slice(start, end), slice(None)
        if self.kind == "ragged both":
            last = slice(0, max(0, int(np.asarray(self.first_dims if self.transposed else self.last_dims)[index])))
        if self._packs_columns:
            first, last = last, first
        return jnp.asarray(self.data)[first, ..., last]

    def __iter__(self) -> Iterator[Array]:
        return iter(self.to_list())

    def to_list(self) -> list[Array]:
        """The groups as arrays. Needs concrete dims."""
        self._require_groups()
        return [self[i] for i in range(self.num_groups)]

    def astype(self, dtype: Any) -> "GroupedTensor":
        """The same tensor with its buffer cast to `dtype`, the tail as it is. A stack of tensors or a cotangent too."""
        self._require_plain()
        return self._replace_data(jnp.asarray(self.data).astype(dtype))

    def to_padded(self, max_len: int | Any, fill_value: Any = 0) -> Shaped[Array, "g first *more last"]:
        """The groups side by side in `[g, max_len, *more, last]` (ragged rows or both) or `[g, first, max_len]` (ragged
        columns).

        A group longer than `max_len` is cut off there. Where there is no element: `fill_value`.
        """
        return convert.to_padded(self, max_len, fill_value)

    @classmethod
    def from_padded(
        cls, padded: Array | np.ndarray, first_dims: Array | np.ndarray, *, capacity: int | Any = None
    ) -> "GroupedTensor":
        """Ragged rows from `[g, max_first, *more, last]` and each group's number of rows: the inverse of `to_padded`.

        `capacity`: rows of the buffer; all of the padded rows by default. Sizes above `max_first` count as `max_first`,
        and what is past the capacity is cut off.
        """
        return cls(*convert.from_padded(padded, first_dims, capacity))

    @classmethod
    def from_list(
        cls, groups: Iterable[Array | np.ndarray] | Any, *, ragged: str = "first", capacity: int | Any = None
    ) -> "GroupedTensor":
        """Packs matrices into one buffer.

        **Arguments:**

        - `groups`: arrays `[first, last]` of one dtype, or with more dims in between, unless columns are packed.
          Those dims that aren't ragged must agree.
        - `ragged`: `"first"` (ragged rows), `"last"` (ragged columns) or `"both"`.
        - `capacity`: the extent of the packed axis; the sum of the sizes by default. The tail is zero.
        """
        return cls(*convert.from_list(groups, ragged, capacity))

    def _untransposed_mT(self) -> "GroupedTensor":
        """`mT` as a tensor whose own buffer is row-major."""
        return GroupedTensor(self.data.mT, self.last_dims, self.first_dims)


@jax.jit(inline=True)
def _dequantized(x: GroupedTensor) -> GroupedTensor:
    scales = not_differentiable("GroupedTensor.dequantize", x._element_scales())
    wide = jnp.asarray(x.data).astype(jnp.float32) * scales
    out = x._with(data=wide, scales=None, scaling=None, tensor_scale=None)
    return out._replace_data(out._filled(0))


def _mT(x: Any) -> Any:
    """Of an array, or of the shape of one."""
    return jax.eval_shape(lambda x: x.mT, x) if isinstance(x, jax.ShapeDtypeStruct) else x.mT
