"""A tensor of each kind, and its groups as NumPy arrays."""

import itertools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ragged import GroupedTensor

# Along the packed axis: an empty group, sizes off any tile, and room for a tail.
SIZES = (3, 0, 4, 1)
# Along the other axis of a ragged-both tensor: group 2 has rows but no columns, group 1 has columns but no rows.
OTHERS = (2, 3, 0, 1)
CAPACITY = 11
KINDS = ("uniform", "ragged rows", "ragged columns", "ragged both", "ragged both, packed columns")
RAGGED = KINDS[1:]


@dataclass
class Example:
    """A tensor whose tail holds `fill`, its groups as NumPy arrays, and where each lies in the buffer."""

    tensor: GroupedTensor
    groups: list[np.ndarray]
    places: list[tuple[Any, ...]]

    def unpack(self, buffer: Any) -> list[np.ndarray]:
        return [np.asarray(buffer)[place] for place in self.places]

    def pack(self, groups: list[np.ndarray], fill: Any = 0) -> np.ndarray:
        """A buffer of these groups, with `fill` where no group has an element."""
        buffer = np.full(self.tensor.shape, fill, groups[0].dtype)
        for place, group in zip(self.places, groups, strict=True):
            buffer[place] = group
        return buffer

    @property
    def mask(self) -> np.ndarray:
        return self.pack([np.ones(g.shape, bool) for g in self.groups], False)

    def with_data(self, data: Any) -> GroupedTensor:
        x = self.tensor
        return GroupedTensor(jnp.asarray(data), x.first_dims, x.last_dims, transposed=x.transposed)


def example(
    kind: str,
    sizes: tuple[int, ...] = SIZES,
    others: tuple[int, ...] = OTHERS,
    *,
    fill: float = np.nan,
    dtype: Any = np.float32,
    seed: int = 0,
) -> Example:
    """An example of a kind. Values are in [0.5, 1.5), integers for an integer dtype, all different."""
    o = np.cumsum([0, *sizes])
    along = [slice(a, b) for a, b in itertools.pairwise(o.tolist())]
    upto = [slice(0, n) for n in others]
    every = slice(None)
    shape, places, first, last = {
        "uniform": ((len(sizes), 3, 2), [(i,) for i in range(len(sizes))], None, None),
        "ragged rows": ((CAPACITY, 3), [(a, every) for a in along], sizes, None),
        "ragged columns": ((2, CAPACITY), [(every, a) for a in along], None, sizes),
        "ragged both": ((CAPACITY, 4), list(zip(along, upto, strict=True)), sizes, others),
        "ragged both, packed columns": ((4, CAPACITY), list(zip(upto, along, strict=True)), others, sizes),
    }[kind]
    rng = np.random.default_rng(seed)
    values = rng.permutation(np.prod(shape)).reshape(shape)
    if np.issubdtype(dtype, np.integer):
        values = (values - 20).astype(dtype)
        fill = 99 if np.isnan(fill) else fill
    else:
        values = (0.5 + values / values.size).astype(dtype)
    data = np.full(shape, fill, dtype)
    for place in places:
        data[place] = values[place]
    firsts, lasts = (None if dims is None else jnp.array(dims, jnp.int32) for dims in (first, last))
    tensor = GroupedTensor(jnp.asarray(data), firsts, lasts, transposed=kind.endswith("packed columns"))
    return Example(tensor, [data[place] for place in places], places)


def assert_groups(got: Any, want: list[np.ndarray]) -> None:
    got = list(got)
    assert [g.shape for g in got] == [w.shape for w in want]
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(np.asarray(g), w)


def ints(*values: int) -> Array:
    return jnp.array(values, jnp.int32)


def floats(*shape: int) -> Array:
    return jnp.ones(shape, jnp.float32)
