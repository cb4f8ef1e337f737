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
    """A tensor whose tail holds NaN, its groups as NumPy arrays, and where each lies in the buffer."""

    tensor: GroupedTensor
    groups: list[np.ndarray]
    places: list[tuple[Any, ...]]

    def pack(self, groups: list[np.ndarray]) -> np.ndarray:
        """A buffer of these groups, with zeros where no group has an element."""
        buffer = np.zeros(self.tensor.shape, groups[0].dtype)
        for place, group in zip(self.places, groups, strict=True):
            buffer[place] = group
        return buffer

    @property
    def mask(self) -> np.ndarray:
        return self.pack([np.ones(g.shape, bool) for g in self.groups])


def example(kind: str, sizes: tuple[int, ...] = SIZES, others: tuple[int, ...] = OTHERS, *, seed: int = 0) -> Example:
    """An example of a kind. Values are in [0.5, 1.5), all different."""
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
    values = 0.5 + np.random.default_rng(seed).permutation(np.prod(shape)).reshape(shape) / np.prod(shape)
    data = np.full(shape, np.nan, np.float32)
    for place in places:
        data[place] = values[place]
    firsts, lasts = (None if dims is None else jnp.array(dims, jnp.int32) for dims in (first, last))
    tensor = GroupedTensor(jnp.asarray(data), firsts, lasts, transposed=kind.endswith("packed columns"))
    return Example(tensor, [data[place] for place in places], places)


def groups_of(x: GroupedTensor) -> list[np.ndarray]:
    """In NumPy: slices of arrays of JAX would be compiled, each shape anew."""
    data = np.asarray(x.data)
    if x.packed_axis is None:
        return list(data)
    if x.packed_axis == -1:
        return [group.T for group in groups_of(x.mT)]
    along = [slice(*ends) for ends in itertools.pairwise(np.cumsum([0, *np.asarray(x.packed_dims)]))]
    widths = [None] * x.num_groups if x.last_dims is None else np.asarray(x.last_dims)
    return [data[at, ..., :width] for at, width in zip(along, widths, strict=True)]


def assert_groups(got: Any, want: list[np.ndarray]) -> None:
    got = list(got)
    assert [g.shape for g in got] == [w.shape for w in want]
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(np.asarray(g), w)


def ints(*values: int) -> Array:
    return jnp.array(values, jnp.int32)


def floats(*shape: int) -> Array:
    return jnp.asarray(np.ones(shape, np.float32))
