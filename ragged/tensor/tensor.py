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
from jaxtyping import Bool, Int, Shaped

from ragged._errors import Site, describe, is_arraylike, is_concrete
from ragged._mesh import over_explicit_axes, refuse_explicit
from ragged.backends import schedule
from ragged.backends.schedule import as_int32
from ragged.product.operands import Scales
from ragged.quant.scales import spread
from ragged.quant.scaling import Scaling, eight_bits_fixed, not_differentiable
from ragged.tensor import convert
from ragged.tensor.arithmetic import Arithmetic
from ragged.tensor.validate import validated

KINDS = {"U·U": "uniform", "R·U": "ragged rows", "U·R": "ragged columns", "R·R": "ragged both"}
"""The kinds by their first·last dims, ragged or uniform."""


class GroupedTensor(Arithmetic):
    """A sequence of `g` matrices in one buffer, whose first dim, last dim, both or neither differ from group to group.

    | kind           | `first_dims` | `last_dims` | `data`             | group `i`                          |
    |----------------|--------------|-------------|--------------------|------------------------------------|
    | uniform        | None         | None        | `[g, first, last]` | `data[i]`                          |
    | ragged rows    | `[g]`        | None        | `[rows, last]`     | `data[o[i]:o[i+1]]`                |
    | ragged columns | None         | `[g]`       | `[first, cols]`    | `data[:, o[i]:o[i+1]]`             |
    | ragged both    | `[g]`        | `[g]`       | `[rows, max_last]` | `data[o[i]:o[i+1], :last_dims[i]]` |

    `o` are the offsets: the running sum of the dims. What lies past the last group is the *tail*. Its content is
    undefined on input, NaN included, and never affects a result or a gradient; every result has zeros there. The same
    holds for the columns of a ragged-both tensor beyond `last_dims`.

    **Fields:**

    - `data`: the buffer.
    - `first_dims`, `last_dims`: `(g,)` int32 (or uint32), the size of each group's first / last dim; None: not ragged.
      float0 in a tangent.
    - `scales`, `scaling`: of a quantised tensor, whose values are `data × scales`: one scale a block, float32 or
      float8_e8m0fnu, and the static `Scaling` that says which elements make a block. `ragged.quantize` makes them.
    - `transposed`: static. Whether the buffer is seen through `mT`, that is, whether `data.mT` is what lies in memory.
      `mT` flips it. For a ragged-both tensor it says which axis is packed: with `transposed`, `data` is
      `[max_first, cols]` and group `i` is `data[:first_dims[i], o[i]:o[i+1]]`, where `o` are the offsets of
      `last_dims`.

    **Cotangents and tangents** of a ragged tensor have a buffer, and no groups: JAX gives integers none, so their dims
    are None (`equinox.filter_grad`) or float0 (`allow_int=True`, `jax.jvp`). `g * 2`, `g + g` and `g.map` work on the
    buffer, `x - g` has the groups of `x`; what needs groups raises a `TypeError`. A **stack** of tensors, with an axis
    in front of the buffer or the dims, can be cast, transposed, mapped and scanned over; all else raises a
    `ValueError`.

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
        ndim = 3 if first is None and last is None else 2
        if data.ndim != ndim:
            Site("GroupedTensor", {"data": data, "first_dims": first, "last_dims": last}).fail(
                ValueError,
                f"`data` must have {ndim} dims, but has {data.ndim}.",
                "A ragged buffer has no group axis: its groups are packed along the ragged axis."
                if ndim == 2
                else "Without `first_dims` and `last_dims` it is uniform and needs a group axis in front.",
            )
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            mend = f"Pass `ragged.Scaling.of({self.scaling!r})`, or let `ragged.quantize` make the tensor."
            Site("GroupedTensor").fail(TypeError, f"`scaling` is {self.scaling!r}, not a `Scaling`.", mend)
        if is_arraylike(self.scales):
            self._check_scales()

    def _check_scales(self) -> None:
        site = Site("GroupedTensor", {"x": self})
        if not is_arraylike(self.scales):
            site.fail(TypeError, "`scaling` without an array of scales.", "Pass both, or neither.")
        if self.scaling is None:
            site.fail(ValueError, "`scales` without `scaling`.", "Say which elements share a scale.")
        if problem := self.scaling.problem(self.packed_axis):
            site.fail(ValueError, f"{problem}.", "Along a ragged dim a block is 1 or None.")
        want = self.scaling.shape(self.shape, self.packed_axis, self.num_groups)
        if self.scales.shape != want or self.scales.dtype != self.scaling.dtype:
            problem = f"scales of a {self.kind} tensor with the scaling {self.scaling} have shape {want} and dtype "
            site.fail(ValueError, f"{problem}{self.scaling.dtype.name}.", "`ragged.quantize` makes them.")

    @property
    def is_quantized(self) -> bool:
        """Whether its values are `data × scales`."""
        return self.scaling is not None or self.scales is not None

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
        """The buffer's rank: 3 for a uniform tensor, 2 for a ragged one."""
        return self.data.ndim

    @property
    def ragged(self) -> tuple[bool, bool]:
        """Whether the first and the last dim of the groups are ragged."""
        return self.first_dims is not None, self.last_dims is not None

    @property
    def is_cotangent(self) -> bool:
        """Whether it is a cotangent or tangent of a ragged tensor: its dims are float0, or None next to a matrix."""
        dims = [d for d in (self.first_dims, self.last_dims) if d is not None]
        if not dims:
            return is_arraylike(self.data) and self.data.ndim == 2
        return any(is_arraylike(d) and d.dtype == jax.dtypes.float0 for d in dims)

    @property
    def is_stack(self) -> bool:
        """Whether there are axes in front of the buffer, or of the dims."""
        dims = [d for d in (self.first_dims, self.last_dims) if d is not None]
        ndim = 2 if dims else 3
        return (is_arraylike(self.data) and self.data.ndim > ndim) or any(is_arraylike(d) and d.ndim > 1 for d in dims)

    def require_groups(self) -> None:
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
        """The buffer's axis along which the groups are packed: -2 (rows), -1 (columns), or None if uniform."""
        if self.kind == "cotangent":
            self.require_groups()
        if self.kind == "ragged both":
            return -1 if self.transposed else -2
        return {"uniform": None, "ragged rows": -2, "ragged columns": -1}[self.kind]

    @property
    def packed_dims(self) -> Int[Array, " g"]:
        """The groups' sizes along the packed axis."""
        axis = self._require_packed("packed_dims")
        return as_int32(self.first_dims if axis == -2 else self.last_dims)

    @property
    def num_groups(self) -> int:
        """How many matrices it holds, empty ones included; of a stack, how many each of its tensors holds."""
        if self.is_cotangent:
            self.require_groups()
        for dims in (self.first_dims, self.last_dims):
            if dims is not None:
                return dims.shape[-1]
        return self.data.shape[-3]

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
        self.require_groups()
        if self.packed_axis is None:
            return jnp.ones(self.shape, bool)
        if self.packed_axis == -1:
            return self.mT.mask.mT
        return schedule.element_mask(
            self.packed_dims, None if self.last_dims is None else as_int32(self.last_dims), *self.shape
        )

    @property
    def mT(self) -> "GroupedTensor":
        """Every group transposed. The dims trade places, and so do the buffer's last two axes.

        Under `jit` no copy is made where the result goes into `ragged.matmul`. `x.mT.mT` is `x`. Scales move along.
        """
        by_block = self.is_quantized and self.scaling.block not in (None, (None, None))
        return self._with(
            scales=self.scales.mT if by_block else self.scales,
            scaling=self.scaling and self.scaling.mT,
            data=self.data.mT,
            first_dims=self.last_dims,
            last_dims=self.first_dims,
            transposed=not self.transposed,
        )

    def __repr__(self) -> str:
        parts = [describe(self.data)]
        for name in ("first_dims", "last_dims"):
            dims = getattr(self, name)
            if dims is None:
                continue
            axis = -2 if name == "first_dims" else -1
            countable = is_concrete(dims) and dims.ndim == 1 and np.issubdtype(dims.dtype, np.integer)
            if not countable or dims.shape[0] > 8:
                parts.append(f"{name}={describe(dims)}")
            elif axis == self.packed_axis and is_arraylike(self.data):
                word = "rows" if axis == -2 else "columns"
                total = f"{np.sum(np.asarray(dims))} of {self.data.shape[axis]} {word}"
                parts.append(f"{name}={np.asarray(dims).tolist()} ({total})")
            else:
                parts.append(f"{name}={np.asarray(dims).tolist()}")
        if self.is_quantized:
            parts.append(f"scales={describe(self.scales)} by {self.scaling}")
        if self.transposed:
            parts.append("transposed")
        return f"GroupedTensor({', '.join(parts)})"

    def _require_packed(self, what: str) -> int:
        self.require_groups()
        if self.packed_axis is None:
            Site(f"GroupedTensor.{what}", {"x": self}).fail(
                ValueError, "a uniform tensor has no ragged axis.", "Its groups are `data[i]`, all of the same shape."
            )
        return self.packed_axis

    def _with(self, **fields: Any) -> "GroupedTensor":
        """A copy with other fields. Like unflattening, it checks nothing: stacked tensors have axes in front."""
        new = object.__new__(GroupedTensor)
        for name in ("data", "first_dims", "last_dims", "scales", "scaling", "transposed"):
            object.__setattr__(new, name, fields.get(name, getattr(self, name)))
        return new

    def _replace_data(self, data: Array) -> "GroupedTensor":
        return self._with(data=data)

    @property
    def is_flipped(self) -> bool:
        """Whether it is `data.mT` that lies in memory, its packed axis first."""
        return self.transposed if self.packed_axis is None else self.packed_axis == -1

    def kernel_scales(self) -> Scales | None:
        """The scales as kernels take them, those of the buffer as it lies in memory; None if there are none."""
        if not self.is_quantized:
            return None
        self._check_scales()  # what `tree_map`, `tree_at` or `partition` made was never checked
        return self.scaling.for_kernels(self.scales, self.packed_axis, self.num_groups, self.is_flipped)

    def element_scales(self) -> Array:
        """Each element's scale, or what broadcasts to the buffer."""
        scales = self.kernel_scales()
        assert scales is not None
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.is_flipped else self.shape
        values = spread(scales, shape, None if self.packed_axis is None else self.packed_dims)
        return values.mT if self.is_flipped else values

    @over_explicit_axes
    def dequantize(self) -> "GroupedTensor":
        """`data × scales` in float32, zeros in the tail. A tensor without scales is returned as it is."""
        if not self.is_quantized:
            return self
        data = eight_bits_fixed("GroupedTensor.dequantize", self.data)
        scales = not_differentiable("GroupedTensor.dequantize", self.element_scales())
        wide = data.astype(jnp.float32) * scales
        out = self._with(data=wide, scales=None, scaling=None)
        return out._replace_data(out._filled(0))

    def require_plain(self) -> None:
        """Raises a `TypeError` if the tensor is quantised: without its scales the buffer means nothing."""
        if self.is_quantized:
            problem = "a quantised tensor has no arithmetic, indexing, casts or padding."
            Site("GroupedTensor", {"x": self}).fail(TypeError, problem, "Take `x.dequantize()` first.")

    def validate(self) -> "GroupedTensor":
        """Checks the sizes: none negative, none wider than the buffer, their sum within the capacity.

        **Returns:** the tensor itself. Under `jit` the check runs only if something that is computed from the returned
        tensor's dims is used, as any product of it is; `.data` alone drops it.

        **Raises:** `ValueError` naming the first bad group where the sizes are known; where they are traced, a run-time
        error (through `equinox.error_if`) that names it too. `NotImplementedError` for traced sizes in a
        `jax.shard_map` over some of a mesh's axes only, where JAX has no run-time errors.
        """
        return validated(self)

    def __len__(self) -> int:
        self.require_groups()
        return self.num_groups

    def __getitem__(self, index: int | Any) -> Shaped[Array, "first last"]:
        """Group `index` as an array. Needs concrete dims."""
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            problem = "the index must be an int, the group."
            mend = "Index the buffer itself as `x.data[...]`."
            Site("GroupedTensor[...]", {"index": index}).fail(TypeError, problem, mend)
        self.require_groups()
        if not -self.num_groups <= index < self.num_groups:
            mend = "The first is `x[0]`; negative ones count from the end."
            Site(f"GroupedTensor[{index}]", {"x": self}).fail(IndexError, f"there are {self.num_groups} groups.", mend)
        self.require_plain()
        refuse_explicit(f"GroupedTensor[{index}]", x=self)
        index = index % self.num_groups
        if self.packed_axis is None:
            return self.data[index]
        if not is_concrete(*(d for d in (self.first_dims, self.last_dims) if d is not None)):
            problem = "the group's shape depends on sizes that are not known while tracing."
            mend = "Under `jit` work on the whole tensor: `ragged.matmul`, `map`, `sum`, `to_padded`."
            Site(f"GroupedTensor[{index}]", {"x": self}).fail(ValueError, problem, mend)
        with jax.ensure_compile_time_eval():  # the dims are known, also where the buffer is traced
            start, end = np.asarray(self.offsets)[index : index + 2]
        first = slice(start, end) if self.packed_axis == -2 else slice(None)
        last = slice(start, end) if self.packed_axis == -1 else slice(None)
        if self.kind == "ragged both":
            if self.packed_axis == -2:
                last = slice(0, max(0, int(np.asarray(self.last_dims)[index])))
            else:
                first = slice(0, max(0, int(np.asarray(self.first_dims)[index])))
        return jnp.asarray(self.data)[first, last]

    def __iter__(self) -> Iterator[Array]:
        return iter(self.to_list())

    def to_list(self) -> list[Array]:
        """The groups as arrays. Needs concrete dims."""
        self.require_groups()
        return [self[i] for i in range(self.num_groups)]

    def astype(self, dtype: Any) -> "GroupedTensor":
        """The same tensor with its buffer cast to `dtype`. A stack of tensors or a cotangent too."""
        self.require_plain()
        return self._replace_data(jnp.asarray(self.data).astype(dtype))

    def to_padded(self, max_len: int | Any, fill_value: Any = 0) -> Shaped[Array, "g first last"]:
        """The groups side by side in `[g, max_len, last]` (ragged rows or both) or `[g, first, max_len]` (ragged
        columns).

        A group longer than `max_len` is cut off there. Where there is no element: `fill_value`.
        """
        return convert.to_padded(self, max_len, fill_value)

    @classmethod
    def from_padded(
        cls, padded: Array | np.ndarray, first_dims: Array | np.ndarray, *, capacity: int | Any = None
    ) -> "GroupedTensor":
        """Ragged rows from `[g, max_first, last]` and each group's number of rows: the inverse of `to_padded`.

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

        - `groups`: arrays `[first, last]` of one dtype. Those dims that aren't ragged must agree.
        - `ragged`: `"first"` (ragged rows), `"last"` (ragged columns) or `"both"`.
        - `capacity`: the extent of the packed axis; the sum of the sizes by default. The tail is zero.
        """
        return cls(*convert.from_list(groups, ragged, capacity))

    def _untransposed_mT(self) -> "GroupedTensor":
        """`mT` as a tensor whose own buffer is row-major."""
        return GroupedTensor(self.data.mT, self.last_dims, self.first_dims)
