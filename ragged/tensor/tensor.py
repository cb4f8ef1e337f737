"""`GroupedTensor`: a sequence of matrices in one buffer.

With `first_dims=[3, 0, 2]` and a buffer of 6 rows and 2 columns:

    data     group              x[0]  rows 0..2 of the buffer
    a a      0                  x[1]  no rows
    b b      0                  x[2]  rows 3..4
    c c      0
    d d      2                  offsets   [0, 3, 3, 5]
    e e      2                  capacity  6
    ? ?      tail               may hold anything; no result depends on it
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Shaped

from ragged.core.errors import Site, is_concrete
from ragged.core.formats import AnyArray, as_rounded
from ragged.core.mesh import check_not_explicit, over_explicit_axes
from ragged.core.offsets import check_integers, known_offsets
from ragged.core.scaling import not_differentiable, not_differentiable_8_bits
from ragged.tensor import convert, show, slices
from ragged.tensor.arithmetic import Arithmetic
from ragged.tensor.base import KINDS as KINDS
from ragged.tensor.base import (
    check_has_groups,
    check_not_quantized,
    element_scales,
    element_zeros,
    filled,
    packs_columns,
    with_fields,
)
from ragged.tensor.validate import validated


class GroupedTensor(Arithmetic):
    """A sequence of `g` matrices in one buffer. Their first dim, last dim, both or neither may differ between groups.

    | kind           | `first_dims` | `last_dims` | `data`                 | group `i`                               |
    |----------------|--------------|-------------|------------------------|-----------------------------------------|
    | uniform        | None         | None        | `[g, first, *d, last]` | `data[i]`                               |
    | ragged rows    | `[g]`        | None        | `[rows, *d, last]`     | `data[o[i]:o[i+1]]`                     |
    | ragged columns | None         | `[g]`       | `[first, cols]`        | `data[:, o[i]:o[i+1]]`                  |
    | ragged both    | `[g]`        | `[g]`       | `[rows, *d, max_last]` | `data[o[i]:o[i+1], ..., :last_dims[i]]` |

    `o` are the offsets: 0, then the running sum of the sizes along the packed axis. The rows (or columns) after the
    last group are the *tail*. On input, the tail may hold anything, even NaN: it affects no result and no gradient.
    Results have zeros there. The same holds for the columns of a ragged-both tensor beyond `last_dims`.

    Groups may have **more dims** between their first and their last dim, such as the heads of
    `[rows, heads, head_dim]`. These dims are equal in all groups. Groups that are packed along columns are matrices.

    **Fields:**

    - `data`: the buffer.
    - `first_dims`, `last_dims`: `(g,)` int32 or uint32, the size of each group's first / last dim; None if that dim
      isn't ragged; float0 in a tangent.
    - `scales`, `scaling`: only for a quantised tensor, whose values are `data × scales`. `scales` has one scale per
      block, in float32 or 8 bits; `scaling` is the static `Scaling` that defines the blocks.
    - `tensor_scale`: float32, `()` or `(g,)`, one for each group; only with scales in float8_e4m3fn: the values are
      `data × scales × tensor_scale`.
    - `zero_points`: only for integers: an integer or a float for each scale, in the shape of `scales`. The values are
      `(data - zero_points) × scales`.
    - `transposed`: static. Whether memory holds `data.mT`. `mT` flips it. In a ragged-both tensor it also sets the
      packed axis: if True, `data` is `[max_first, cols]`, and group `i` is `data[:first_dims[i], o[i]:o[i+1]]`.

    **Operators**, comparisons included, are elementwise. The other operand may be

    - a number or a zero-dimensional array;
    - a tensor with the same kind, shape and sizes. Concrete sizes are compared. Traced sizes aren't, and the result has
      the left operand's: `validate(like=...)` compares them at run time;
    - a tensor whose groups have 1 row or column where this tensor's groups have more: `x - x.mean(-2, keepdims=True)`;
    - `per_group`, `per_row` or `per_column`, or a `(last,)` array, which is combined with every row.

    The result has zeros (or False) in the tail, and the dtype that `jnp` gives for arrays of these dtypes. `x @ w` is
    `ragged.matmul(x, w)`.

    **Cotangents and tangents** of a ragged tensor have a buffer but no groups: the dims are None
    (`equinox.filter_grad`) or float0 (`allow_int=True`, `jax.jvp`). `g * 2`, `g + g` and `g.map` work on the buffer,
    and `x - g` has the groups of `x`. Operations that need groups raise a `TypeError`. With more than two dims, a
    cotangent whose dims are None counts as a uniform tensor, except in operations with its tensor, such as `x - g`.

    A **stack** of ragged tensors, as `vmap` returns it, has a leading axis on the buffer and on the dims. It can be
    cast, transposed, mapped and scanned over; everything else raises a `ValueError`. A leading axis on the buffer alone
    isn't recognised: `[batch, rows, last]` with `first_dims` of `(g,)` counts as ragged along `batch`, and
    `[batch, g, first, last]` as a uniform tensor of `batch` groups.

    **Raises:** `TypeError` or `ValueError` for errors in ranks, numbers of groups, dtypes of dims, and shape and dtype
    of scales. `validate` checks the values. Leaves that aren't arrays (None, specs, shapes) are not checked.

    !!! example
        ```python
        import jax.numpy as jnp
        from ragged import GroupedTensor
        x = GroupedTensor(jnp.ones((16, 4)), first_dims=jnp.array([3, 5, 0, 4], jnp.int32))
        assert x.num_groups == 4 and x.capacity == 16
        assert x[1].shape == (5, 4)
        ```
    """

    def __repr__(self) -> str:
        return f"GroupedTensor({', '.join(show.parts(self))})"

    def __pdoc__(self, *, indent: int, **_: Any) -> Any:
        import wadler_lindig as wl  # Only `wadler_lindig` calls this method.

        fields = [wl.TextDoc(part) for part in show.parts(self)]
        return wl.bracketed(wl.TextDoc("GroupedTensor("), fields, wl.comma, wl.TextDoc(")"), indent)

    def _repr_html_(self) -> str:
        return show.html(self)

    def __matmul__(self, other: Any) -> "GroupedTensor":
        return super().__matmul__(other)

    def __rmatmul__(self, other: Any) -> "GroupedTensor":
        return super().__rmatmul__(other)

    @over_explicit_axes
    def dequantize(self) -> "GroupedTensor":
        """The values, `data × scales` or `(data - zero_points) × scales`, in float32, with zeros in the tail. An
        unquantised tensor is returned unchanged."""
        if not self.is_quantized:
            return self
        check_has_groups(self)
        return _dequantized(self.with_data(not_differentiable_8_bits("GroupedTensor.dequantize", self.data)))

    def validate(self, *, like: "GroupedTensor | None" = None) -> "GroupedTensor":
        """Checks that no size is negative or larger than the buffer, and that the sum along the packed axis fits the
        capacity.

        **Arguments:** `like`: a tensor that must have the same sizes.

        **Returns:** the tensor itself. Under `jit`, use the returned tensor: the check runs only if a used result
        depends on its dims, as products do. `.data` alone doesn't.

        **Raises:** `ValueError` that names the first bad group. For traced sizes, a run-time error that names it; in a
        `jax.shard_map` over only some axes of a mesh, where JAX has no run-time errors, `NotImplementedError`.
        """
        return validated(self, like)

    def rows(self, start: Any, stop: Any) -> "GroupedTensor":
        """Rows `start` to `stop` of every group: `out[i] = x[i][start:stop]`.

        As in Python's slices, negative values count from the end of each group, None is its start or end, and missing
        rows are left out.

        **Arguments:** `start`, `stop`: ints or None. Along a ragged dim also integer arrays: `()`, or `(g,)` with one
        value per group.

        **Returns:** along a ragged dim, a tensor with new `first_dims` and zeros in the tail. Its capacity is this
        tensor's; or `g * n`, if ints limit slices to `n` rows and that is less. Along a dim that isn't ragged, a tensor
        of the same kind.

        **Raises:** `TypeError` for other types of `start` and `stop`, `ValueError` for arrays along a dim that isn't
        ragged.

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
        """Columns `start` to `stop` of every group: `out[i] = x[i][:, start:stop]`. Arguments and errors as for
        `rows`."""
        return slices.sliced(self, -1, start, stop)

    def __len__(self) -> int:
        if self.is_stack:
            check_has_groups(self)
        return self.num_groups

    def __getitem__(self, index: int | np.integer) -> Shaped[Array, "first *more last"]:
        """Group `index` as an array. Needs concrete dims."""
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            problem = "the index must be an int, the number of a group."
            bounds = "0, 1"
            if isinstance(index, slice) and index.step is None:
                bounds = f"{index.start or 0!r}, {index.stop!r}"
            hint = f"Rows or columns of every group are `x.rows({bounds})` and `x.columns({bounds})`. "
            hint += "Index the buffer itself as `x.data[...]`."
            Site("GroupedTensor[...]", {"index": index, "x": self}).fail(TypeError, problem, hint)
        check_has_groups(self)
        if not -self.num_groups <= index < self.num_groups:
            hint = "The first group is `x[0]`; negative indices count from the end."
            Site(f"GroupedTensor[{index}]", {"x": self}).fail(IndexError, f"there are {self.num_groups} groups.", hint)
        check_not_quantized(self)
        check_not_explicit(f"GroupedTensor[{index}]", x=self)
        index = index % self.num_groups
        if self.packed_axis is None:
            return self.data[index]
        if not is_concrete(*(d for d in (self.first_dims, self.last_dims) if d is not None)):
            problem = "the group's shape depends on sizes that are not known while tracing."
            hint = "Under `jit`, use operations on the whole tensor: `ragged.matmul`, `map`, `sum`, `to_padded`."
            Site(f"GroupedTensor[{index}]", {"x": self}).fail(ValueError, problem, hint)
        dims = self.last_dims if self.packed_axis == -1 else self.first_dims
        check_integers(dims)
        start, end = map(int, known_offsets(dims, self.capacity)[index : index + 2])
        first, last = slice(start, end), slice(None)
        if self.kind == "ragged both":
            last = slice(0, max(0, int(np.asarray(self.first_dims if self.transposed else self.last_dims)[index])))
        if packs_columns(self):
            first, last = last, first
        return jnp.asarray(self.data)[first, ..., last]

    def __iter__(self) -> Iterator[Array]:
        return iter(self.to_list())

    def to_list(self) -> list[Array]:
        """The groups as arrays. Needs concrete dims."""
        check_has_groups(self)
        return [self[i] for i in range(self.num_groups)]

    def to_padded(self, max_len: int, fill_value: Any = 0) -> Shaped[Array, "g first *more last"]:
        """The groups, padded or truncated to one size: `[g, max_len, *more, last]`, or for ragged columns
        `[g, first, max_len]`.

        The padding is `fill_value`, a number. `ValueError` for a uniform tensor, and for a number that the dtype can't
        hold (a traced one becomes another number).
        """
        return convert.to_padded(self, max_len, fill_value)

    @classmethod
    def from_padded(cls, padded: AnyArray, first_dims: AnyArray, *, capacity: int | None = None) -> "GroupedTensor":
        """Ragged rows from `[g, max_first, *more, last]` and each group's number of rows: the inverse of `to_padded`.

        `capacity`: number of rows of the buffer, by default `g * max_first`. Sizes are clipped to `0 .. max_first`, and
        rows beyond the capacity are dropped. Outside of `jit`, arrays of NumPy and on the CPU are packed on the host,
        without a compiled program.
        """
        return cls(*convert.from_padded(padded, first_dims, capacity))

    @classmethod
    def from_list(
        cls, groups: Iterable[AnyArray], *, ragged: str = "first", capacity: int | None = None
    ) -> "GroupedTensor":
        """Packs matrices into one buffer.

        **Arguments:**

        - `groups`: arrays of one dtype, `[first, last]`; or `[first, *more, last]`, unless columns are packed. Dims
          that aren't ragged must be equal.
        - `ragged`: `"first"` (ragged rows), `"last"` (ragged columns) or `"both"`.
        - `capacity`: the extent of the packed axis; by default the sum of the sizes. The tail is zero.

        Outside of `jit`, groups are packed on the host, without a compiled program. Groups on an accelerator are copied
        to the host and back.
        """
        return cls(*convert.from_list(groups, ragged, capacity))


@jax.jit(inline=True)
def _dequantized(x: GroupedTensor) -> GroupedTensor:
    scales = not_differentiable("GroupedTensor.dequantize", element_scales(x))
    values = as_rounded(jnp.asarray(x.data)).astype(jnp.float32)
    if x.zero_points is not None:
        values -= not_differentiable("GroupedTensor.dequantize", element_zeros(x))
    values *= scales
    out = with_fields(x, data=values, scales=None, scaling=None, tensor_scale=None, zero_points=None)
    return out.with_data(filled(out, 0))
