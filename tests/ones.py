"""Products with extents of 1, 2 and 3: in any letter, layout, order of storage and format, to be lowered."""

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import ragged
from ragged import GroupedTensor
from ragged.tuning.products import with_cotangents
from tests.cases import LETTERS, NAMES
from tests.support import FORMATS, Format, quantised

LARGE = {"m": 40, "k": 160, "n": 136, "g": 5}
WIDEST = 200
"""The capacity, and the widest group, of a ragged letter whose extent isn't small."""


def _weights(dtype: str, scaling: Any = None) -> Format:
    """Rows of bfloat16, and `rhs` in another dtype, quantised where there is a scaling."""

    def operands(lhs: GroupedTensor, rhs: GroupedTensor) -> tuple[GroupedTensor, GroupedTensor]:
        if scaling is None:
            return lhs.astype("bfloat16"), rhs.astype(dtype)
        return lhs.astype("bfloat16"), ragged.quantize(rhs.mT, jnp.dtype(dtype), scaling).mT

    return Format(operands)


SCALINGS: tuple[Any, ...] = ("tensor", "group", "row", "column", "mx", (1, 128), (128, 128), (1, 32))
FORMATS_WITH_ONES: dict[str, Format] = {
    **{name: format for name, format in FORMATS.items() if name != "`float64`"},
    **{f"weights in {dtype}": _weights(dtype) for dtype in ("int8", "int4", "float8_e4m3fn")},
    **{f"weights in int4, {each} scales": _weights("int4", each) for each in SCALINGS if each != "mx"},
    **{f"weights in float8_e4m3fn, {each} scales": _weights("float8_e4m3fn", each) for each in SCALINGS},
    **{f"both in float8_e4m3fn, {each} scales": quantised("float8_e4m3fn", each) for each in SCALINGS},
    **{f"both in int8, {each} scales": quantised("int8", each) for each in SCALINGS if each != "mx"},
}


class Case(NamedTuple):
    format: str
    layout: str
    extent: tuple[int, int, int, int]  # m, k, n and the number of groups
    turned: tuple[bool, bool]  # which operands are the `mT` of what is stored

    @property
    def options(self) -> dict[str, Any]:
        """Of the product: a recipe, and the width of a result whose columns are ragged and don't lie side by side."""
        recipe = getattr(FORMATS_WITH_ONES[self.format].product, "keywords", {})
        return recipe | ({"max_last": self._most("n")} if self.layout in ("outer", "ragged") else {})

    def _most(self, letter: str) -> int:
        extent = self.extent["mkng".index(letter)]
        return WIDEST if letter in LETTERS[self.layout] and extent > 3 else extent

    @property
    def avals(self) -> tuple[GroupedTensor, GroupedTensor]:
        lhs, rhs = jax.eval_shape(self._made)
        return lhs, rhs

    def _made(self) -> tuple[GroupedTensor, GroupedTensor]:
        lhs, rhs = (self._tensor(*each) for each in zip(("mk", "kn"), self.turned, strict=True))
        return FORMATS_WITH_ONES[self.format].operands(lhs, rhs)

    def _tensor(self, term: str, turned: bool) -> GroupedTensor:
        letters, g = term[::-1] if turned else term, self.extent[3]
        sizes = [jnp.zeros(g, jnp.int32) if letter in LETTERS[self.layout] else None for letter in letters]
        shape = [*(() if any(size is not None for size in sizes) else (g,)), *map(self._most, letters)]
        x = GroupedTensor(jnp.zeros(shape), sizes[0], sizes[1])
        return x.mT if turned else x

    @property
    def product(self) -> Any:
        """The product and its derivatives, as `explain` has them."""
        return partial(with_cotangents, **self.options)


def extents() -> Iterator[tuple[int, int, int, int]]:
    """1 in any of the letters; and 2 and 3 in one of them, and in all."""
    large = tuple(LARGE.values())
    for ones in itertools.product((True, False), repeat=4):
        m, k, n, g = (1 if one else extent for one, extent in zip(ones, large, strict=True))
        if any(ones):
            yield m, k, n, g
    for extent in (2, 3):
        yield extent, extent, extent, extent
        for i in range(4):
            m, k, n, g = (extent if i == j else each for j, each in enumerate(large))
            yield m, k, n, g


def cases(format: str, count: int) -> list[Case]:
    """As many cases of a format, of all layouts, extents and orders of storage, by chance but always the same."""
    turned = [(lhs, rhs) for lhs in (False, True) for rhs in (False, True)]
    every = list(itertools.product(NAMES, extents(), turned))
    return [Case(format, *each) for each in random.Random(f"{format} 0").sample(every, count)]
