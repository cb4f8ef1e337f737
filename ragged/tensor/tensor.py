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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Int, Shaped

from ragged._mesh import refuse_explicit
from ragged.backends import schedule
from ragged.backends.schedule import as_int32
from ragged.product.operands import Scales
from ragged.quant.scales import spread
from ragged.quant.scaling import Scaling, eight_bits_fixed, is_count, not_differentiable
from ragged.tensor.arithmetic import Arithmetic, broadcast_wide


def is_arraylike(x: Any) -> bool:
    """A JAX or NumPy array, traced or not."""
    return isinstance(x, jax.Array | np.ndarray)


def is_concrete(*xs: Any) -> bool:
    """Whether all values are known: arrays, and not tracers."""
    return all(is_arraylike(x) and not isinstance(x, Tracer) for x in xs)


def describe(x: Any) -> str:
    """`f32[4,8]` for an array, a `GroupedTensor`'s repr, the type's name for anything else."""
    if isinstance(x, GroupedTensor):
        return repr(x)
    if is_arraylike(x) or isinstance(x, jax.ShapeDtypeStruct):
        dtype = "float0" if x.dtype == jax.dtypes.float0 else str(x.dtype)
        for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
            dtype = dtype.replace(long, short)
        return f"{dtype}[{','.join(map(str, x.shape))}]"
    return "None" if x is None else f"a {type(x).__name__}"


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
                raise TypeError(
                    f"`GroupedTensor`: `{name}` is a {type(dims).__name__}.\n"
                    f"Got {name}={dims}.\n"
                    f"Pass an array: `jnp.array({name}, jnp.int32)`."
                )
            if not is_arraylike(dims):
                continue
            if dims.dtype not in (jnp.int32, jnp.uint32, jax.dtypes.float0):
                raise TypeError(
                    f"`GroupedTensor`: `{name}` must be int32 or uint32, one size a group.\n"
                    f"Got {name}={describe(dims)}.\n"
                    f"Cast it: `{name}.astype(jnp.int32)`."
                )
            if dims.ndim != 1:
                raise ValueError(
                    f"`GroupedTensor`: `{name}` must have shape (g,), one size a group.\nGot {name}={describe(dims)}."
                )
        first, last = self.first_dims, self.last_dims
        if is_arraylike(first) and is_arraylike(last) and first.shape != last.shape:
            raise ValueError(
                f"`GroupedTensor`: `first_dims` has {first.shape[0]} groups but `last_dims` has {last.shape[0]}.\n"
                f"Got first_dims={describe(first)}, last_dims={describe(last)}.\n"
                "Both need one size per group, including empty groups."
            )
        if not is_arraylike(self.data) or not all(d is None or is_arraylike(d) for d in (first, last)):
            return
        ndim = 3 if first is None and last is None else 2
        if self.data.ndim != ndim:
            if ndim == 2:
                mend = "A ragged buffer has no group axis: its groups are packed along the ragged axis."
            else:
                mend = "Without `first_dims` and `last_dims` it is uniform and needs a group axis in front."
            raise ValueError(
                f"`GroupedTensor`: `data` must have {ndim} dims, but has {self.data.ndim}.\n"
                f"Got data={describe(self.data)}, first_dims={describe(first)}, last_dims={describe(last)}.\n{mend}"
            )
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise TypeError(
                f"`GroupedTensor`: `scaling` is {self.scaling!r}, not a `Scaling`.\n"
                f"Pass `ragged.Scaling.of({self.scaling!r})`, or let `ragged.quantize` make the tensor."
            )
        if is_arraylike(self.scales):
            self._check_scales()

    def _check_scales(self) -> None:
        got = f"Got scales={describe(self.scales)}, scaling={self.scaling}, data={describe(self.data)}.\n"
        if not is_arraylike(self.scales):
            raise TypeError(f"`GroupedTensor`: `scaling` without an array of scales.\n{got}Pass both, or neither.")
        if self.scaling is None:
            raise ValueError(f"`GroupedTensor`: `scales` without `scaling`.\n{got}Say which elements share a scale.")
        if problem := self.scaling.problem(self.packed_axis):
            raise ValueError(f"`GroupedTensor`: {problem}.\n{got}Along a ragged dim a block is 1 or None.")
        want = self.scaling.shape(self.shape, self.packed_axis, self.num_groups)
        if self.scales.shape != want or self.scales.dtype != self.scaling.dtype:
            raise ValueError(
                f"`GroupedTensor`: scales of a {self.kind} tensor with the scaling {self.scaling} have shape {want} "
                f"and dtype {self.scaling.dtype.name}.\n{got}`ragged.quantize` makes them."
            )

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
            raise TypeError(
                "`GroupedTensor`: a cotangent or tangent, whose groups are unknown, has elementwise operations only.\n"
                f"Got {self!r}.\n"
                "Take the groups of the tensor that was differentiated: `x - g`, or "
                "`GroupedTensor(g.data, x.first_dims, x.last_dims, transposed=x.transposed)`."
            )
        if self.is_stack:
            raise ValueError(
                "`GroupedTensor`: a stack of tensors, with a batch axis in front.\n"
                f"Got {self!r}.\n"
                "Map over it: `jax.vmap(lambda x: ...)(stack)`; one is `jax.tree.map(lambda leaf: leaf[0], stack)`."
            )

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
            raise ValueError(
                f"`GroupedTensor.{what}`: a uniform tensor has no ragged axis.\nGot {self!r}.\n"
                "Its groups are `data[i]`, all of the same shape."
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

    def dequantize(self) -> "GroupedTensor":
        """`data × scales` in float32, zeros in the tail. A tensor without scales is returned as it is."""
        if not self.is_quantized:
            return self
        refuse_explicit("GroupedTensor.dequantize", x=self)
        data = eight_bits_fixed("GroupedTensor.dequantize", self.data)
        scales = not_differentiable("GroupedTensor.dequantize", self.element_scales())
        wide = data.astype(jnp.float32) * scales
        out = self._with(data=wide, scales=None, scaling=None)
        return out._replace_data(out._filled(0))

    def require_plain(self) -> None:
        """Raises a `TypeError` if the tensor is quantised: without its scales the buffer means nothing."""
        if self.is_quantized:
            raise TypeError(
                "`GroupedTensor`: a quantised tensor has no arithmetic, indexing, casts or padding.\n"
                f"Got {self!r}.\nTake `x.dequantize()` first."
            )

    def validate(self) -> "GroupedTensor":
        """Checks the sizes: none negative, none wider than the buffer, their sum within the capacity.

        **Returns:** the tensor itself. Under `jit` the check runs only if something that is computed from the returned
        tensor's dims is used, as any product of it is; `.data` alone drops it.

        **Raises:** `ValueError` naming the first bad group where the sizes are known; where they are traced, a run-time
        error (through `equinox.error_if`) that names it too. `NotImplementedError` for traced sizes in a
        `jax.shard_map` over some of a mesh's axes only, where JAX has no run-time errors.
        """
        checked = {"first_dims": self.first_dims, "last_dims": self.last_dims}
        for name, axis in (("first_dims", -2), ("last_dims", -1)):
            dims = checked[name]
            if dims is None:
                continue
            extent = self.data.shape[axis]
            packed = axis == self.packed_axis
            if is_concrete(dims):
                sizes = np.asarray(dims).astype(np.int64)
                reach = np.cumsum(sizes) if packed else sizes
                bad = np.flatnonzero((sizes < 0) | (reach > extent))
                if bad.size:
                    raise ValueError(self._bad_group(name, int(bad[0]), sizes, extent, packed))
            elif self.num_groups:
                refuse_explicit("GroupedTensor.validate", **{name: dims})
                _check_run_time_errors()
                # Capped sizes: their sum leaves the capacity before it can wrap around.
                capped = jnp.clip(as_int32(dims), -1, extent + 1)
                left = extent - (jnp.cumsum(capped) - capped) if packed else jnp.full_like(capped, extent)
                bad = (capped < 0) | (capped > left)
                problems = _Problems(name, extent, packed, self.num_groups)
                group = jnp.argmax(bad).astype(jnp.int32)
                code = jnp.where(jnp.any(bad), problems.code(group, capped[group]), 0)
                # Added to the dims, so that it can't be dropped; not made of them, as they may vary over mesh axes.
                zero = eqx.branched_error_if(jnp.zeros((), dims.dtype), jnp.any(bad), code, problems)
                checked[name] = dims + zero
        return self._with(**checked)

    def _bad_group(self, name: str, group: int, sizes: np.ndarray, extent: int, packed: bool) -> str:
        problem = f"`GroupedTensor.validate`: {_problem(name, group, int(sizes[group]), extent, packed)}"
        return f"{problem}\nGot {name}={sizes.tolist()}.\n{_VALIDATE_MEND}"

    def __len__(self) -> int:
        self.require_groups()
        return self.num_groups

    def __getitem__(self, index: int | Any) -> Shaped[Array, "first last"]:
        """Group `index` as an array. Needs concrete dims."""
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            raise TypeError(
                f"`GroupedTensor[...]`: the index must be an int, the group. Got {describe(index)}.\n"
                "Index the buffer itself as `x.data[...]`."
            )
        self.require_groups()
        if not -self.num_groups <= index < self.num_groups:
            raise IndexError(f"`GroupedTensor[{index}]`: there are {self.num_groups} groups.")
        self.require_plain()
        refuse_explicit(f"GroupedTensor[{index}]", x=self)
        index = index % self.num_groups
        if self.packed_axis is None:
            return self.data[index]
        if not is_concrete(*(d for d in (self.first_dims, self.last_dims) if d is not None)):
            raise ValueError(
                f"`GroupedTensor[{index}]`: the group's shape depends on sizes that are not known while tracing.\n"
                f"Got {self!r}.\nUnder `jit` work on the whole tensor: `ragged.matmul`, `map`, `sum`, `to_padded`."
            )
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
        refuse_explicit("GroupedTensor.to_padded", x=self)
        axis = self._require_packed("to_padded")
        self.require_plain()
        if not is_count(max_len, 0):
            raise ValueError(f"`GroupedTensor.to_padded`: `max_len` must be an int, 0 or more. Got {max_len!r}.")
        if axis == -1:
            return self.mT.to_padded(max_len, fill_value).mT
        starts, ends = self.offsets[:-1, None], self.offsets[1:, None]
        rows = starts + jnp.arange(max_len, dtype=jnp.int32)[None, :]  # [g, max_len]
        inside = (rows < ends)[..., None]
        if self.last_dims is not None:
            columns = jnp.arange(self.shape[-1], dtype=jnp.int32)
            inside = inside & (columns[None, :] < as_int32(self.last_dims)[:, None])[:, None, :]
        if not self.capacity:
            return jnp.full((self.num_groups, max_len, self.shape[-1]), fill_value, self.dtype)
        padded = jnp.asarray(self.data).at[rows].get(mode="fill", fill_value=0)
        fill = broadcast_wide(jnp.asarray(fill_value, self.dtype), self.dtype, padded.shape)
        return jnp.where(inside, padded, fill)

    @classmethod
    def from_padded(
        cls, padded: Array | np.ndarray, first_dims: Array | np.ndarray, *, capacity: int | Any = None
    ) -> "GroupedTensor":
        """Ragged rows from `[g, max_first, last]` and each group's number of rows: the inverse of `to_padded`.

        `capacity`: rows of the buffer; all of the padded rows by default. Sizes above `max_first` count as `max_first`,
        and what is past the capacity is cut off.
        """
        refuse_explicit("GroupedTensor.from_padded", padded=padded, first_dims=first_dims)
        padded, first_dims = jnp.asarray(padded), first_dims if is_arraylike(first_dims) else jnp.asarray(first_dims)
        if padded.ndim != 3:
            raise ValueError(
                f"`GroupedTensor.from_padded`: `padded` must be [g, max_first, last].\nGot padded={describe(padded)}."
            )
        g, longest, last = padded.shape
        if not jnp.issubdtype(first_dims.dtype, jnp.integer):
            raise TypeError(
                f"`GroupedTensor.from_padded`: `first_dims` must be integers.\nGot first_dims={describe(first_dims)}.\n"
                "Cast them: `first_dims.astype(jnp.int32)`."
            )
        if capacity is not None and not is_count(capacity, 0):
            raise ValueError(f"`GroupedTensor.from_padded`: `capacity` must be an int, 0 or more. Got {capacity!r}.")
        if first_dims.shape != (g,):
            raise ValueError(
                f"`GroupedTensor.from_padded`: `padded` has {g} groups but `first_dims` has shape {first_dims.shape}.\n"
                f"Got padded={describe(padded)}, first_dims={describe(first_dims)}.\n"
                "`first_dims` needs one size per group, including empty groups."
            )
        capacity = g * longest if capacity is None else int(capacity)
        dims = jnp.clip(as_int32(first_dims), 0, longest)
        offsets = schedule.group_offsets(dims, capacity)
        ids = schedule.group_ids(offsets, capacity)
        place = jnp.arange(capacity, dtype=jnp.int32) - offsets[jnp.minimum(ids, g)]
        source = jnp.where(ids < g, ids * longest + place, g * longest)  # past the end in the tail
        rows = padded.reshape(g * longest, last)
        data = rows.at[source].get(mode="fill", fill_value=0) if rows.size else jnp.zeros((capacity, last), rows.dtype)
        return cls(data, first_dims=jnp.diff(offsets))

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
        if ragged not in ("first", "last", "both"):
            raise ValueError(f"`GroupedTensor.from_list`: `ragged` must be 'first', 'last' or 'both'. Got {ragged!r}.")
        given = list(groups) if isinstance(groups, Iterable) else [groups]
        refuse_explicit("GroupedTensor.from_list", groups=given)
        sound = bool(given) and all(is_arraylike(a) and a.ndim == 2 for a in given)
        if not sound or len({a.dtype for a in given}) > 1:
            raise ValueError(
                "`GroupedTensor.from_list`: needs at least one matrix, all of one dtype.\n"
                f"Got [{', '.join(map(describe, given))}]."
            )
        if capacity is not None and not is_count(capacity, 0):
            raise ValueError(f"`GroupedTensor.from_list`: `capacity` must be an int, 0 or more. Got {capacity!r}.")
        arrays = [jnp.asarray(a) for a in given]
        if ragged == "last":
            if len({a.shape[0] for a in arrays}) > 1:
                raise ValueError(
                    f"`GroupedTensor.from_list`: the groups' first dims differ: {[a.shape[0] for a in arrays]}.\n"
                    'Pass `ragged="first"` if only they differ, `ragged="both"` if the last dims do too.'
                )
            return cls.from_list([a.mT for a in arrays], capacity=capacity)._untransposed_mT()
        firsts, lasts = [a.shape[0] for a in arrays], [a.shape[1] for a in arrays]
        if ragged == "first" and len(set(lasts)) > 1:
            raise ValueError(
                f"`GroupedTensor.from_list`: the groups' last dims differ: {lasts}.\n"
                'Pass `ragged="last"` if only they differ, `ragged="both"` if the first dims do too.'
            )
        total = sum(firsts)
        capacity = total if capacity is None else int(capacity)
        if capacity < total:
            raise ValueError(f"`GroupedTensor.from_list`: `capacity` is {capacity}, but the groups need {total}.")
        widest = max(lasts)
        rows = [jnp.pad(a, ((0, 0), (0, widest - a.shape[1]))) for a in arrays]
        data = jnp.concatenate([*rows, jnp.zeros((capacity - total, widest), arrays[0].dtype)])
        last_dims = jnp.array(lasts, jnp.int32) if ragged == "both" else None
        return cls(data, jnp.array(firsts, jnp.int32), last_dims)

    def _untransposed_mT(self) -> "GroupedTensor":
        """`mT` as a tensor whose own buffer is row-major."""
        return GroupedTensor(self.data.mT, self.last_dims, self.first_dims)


_VALIDATE_MEND = "Correct the sizes, or make the buffer larger."


def _problem(name: str, group: int, size: int, extent: int, packed: bool, most: int | None = None) -> str:
    """What is wrong with the size of a group. A size of -1 or `most` may stand for any that is less, or more."""
    above = f"the sum of the sizes up to it is above the capacity of {extent}"
    above = above if packed else f"it is above the buffer's extent of {extent}"
    problem = "is negative" if size < 0 else f"is too large: {above}"
    said = {} if most is None else {-1: "size", most: f"size, {most} or more,"}
    return f"the {said.get(size, f'size {size}')} of group {group} in `{name}` {problem}."


@dataclass(frozen=True)
class _Problems(Sequence[str]):
    """The run-time messages of `validate`, made when asked for: one for each group and size, up to `most`."""

    name: str
    extent: int
    packed: bool
    groups: int

    @property
    def most(self) -> int:
        """The largest size that is told apart from those above: what is beyond the buffer, or int32 codes."""
        return max(min(self.extent + 1, np.iinfo(np.int32).max // self.groups - 2), 0)

    def code(self, group: Array, size: Array) -> Array:
        return group * (self.most + 2) + jnp.minimum(size, self.most) + 1

    def __len__(self) -> int:
        return self.groups * (self.most + 2)

    def __getitem__(self, code: Any) -> str:
        group, size = divmod(code, self.most + 2)
        problem = _problem(self.name, group, size - 1, self.extent, self.packed, self.most)
        return f"`GroupedTensor.validate`: {problem}\n{_VALIDATE_MEND}"


def _check_run_time_errors() -> None:
    """Raises a `NotImplementedError` where JAX has no callbacks, of which its run-time errors are made."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and set(mesh.manual_axes) != set(mesh.axis_names):
        raise NotImplementedError(
            "`GroupedTensor.validate`: JAX has no run-time errors in a `jax.shard_map` over some axes of a mesh only.\n"
            f"Got axes {tuple(mesh.manual_axes)} of {mesh.axis_names}.\n"
            "Validate outside of it, or map over all axes of the mesh."
        )
