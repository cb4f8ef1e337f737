"""Products with extents of 1, 2 and 3: in any letter, layout, order of storage and format; lowered, and computed."""

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ragged
from ragged import GroupedTensor
from ragged.tuning.products import with_cotangents
from tests import oracle
from tests.cases import LETTERS, NAMES, TOLERANCE, tensor
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
        lhs, rhs = jax.eval_shape(self.made)
        return lhs, rhs

    def made(self, seed: int = 0, fill: float = 0.0) -> tuple[GroupedTensor, GroupedTensor]:
        """The operands, with `fill` in their tails."""
        terms = zip(("mk", "kn"), self.turned, strict=True)
        lhs, rhs = (self._tensor(*each, seed + i, fill) for i, each in enumerate(terms))
        return FORMATS_WITH_ONES[self.format].operands(lhs, rhs)

    def sizes(self, letter: str) -> list[int]:
        """The groups' extents: of a ragged letter, all that there is in one group, or spread with an empty one."""
        g, most = self.extent[3], self._most(letter)
        if letter not in LETTERS[self.layout]:
            return [most] * g
        if g == 1 or most < 4:
            return [0] * (g - 1) + [most]
        return [0, *(most // g + (i % 2) for i in range(1, g))]

    def _tensor(self, term: str, turned: bool, seed: int, fill: float) -> GroupedTensor:
        rng, letters = np.random.default_rng(seed), term[::-1] if turned else term
        shapes = zip(*(self.sizes(letter) for letter in letters), strict=True)
        groups = [rng.integers(-4, 5, shape).astype(np.float32) for shape in shapes]
        flags = letters[0] in LETTERS[self.layout], letters[1] in LETTERS[self.layout]
        widest = self._most(letters[1])
        x = tensor(groups, flags, self._most(letters[0] if flags[0] else letters[1]), widest, fill=fill)
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


def cases(format: str, count: int, seed: int = 0) -> list[Case]:
    """As many cases of a format, of all layouts, extents and orders of storage, by chance but always the same."""
    turned = [(lhs, rhs) for lhs in (False, True) for rhs in (False, True)]
    every = list(itertools.product(NAMES, extents(), turned))
    return [Case(format, *each) for each in random.Random(f"{format} {seed}").sample(every, count)]


def check(case: Case) -> None:
    """The product and its derivatives beside a loop in float64, with NaN in the operands' tails."""
    lhs, rhs = case.made(fill=np.nan if "int8`" not in case.format else 0.0)
    letters = LETTERS[case.layout]

    def groups(term: str, data: Any, like: GroupedTensor | None = None) -> oracle.Groups:
        flags, (firsts, lasts) = (term[0] in letters, term[1] in letters), map(case.sizes, term)
        if like is not None and like.transposed and all(flags):  # packed along columns
            return [each.T for each in groups(term[::-1], np.asarray(data).T)]
        return [np.asarray(each, np.float64) for each in oracle.unpack(np.asarray(data), flags, firsts, lasts)]

    def values(term: str, x: GroupedTensor) -> oracle.Groups:
        return groups(term, (x.dequantize() if x.is_quantized else x).data, x)

    a, b = values("mk", lhs), values("kn", rhs)
    made = jax.jit(case.product)(lhs, rhs)
    out, (cotangents,) = made if isinstance(made, tuple) else (made, ({},))
    worst, product = TOLERANCE[out.dtype.name][0], groups("mn", out)
    oracle.assert_close(product, oracle.matmul(a, b), max=worst)
    wanted = {
        "lhs": ("mk", lhs, oracle.matmul(product, [x.T for x in b])),
        "rhs": ("kn", rhs, oracle.matmul([x.T for x in a], product)),
    }
    for name, data in cotangents.items():
        term, like, want = wanted[name]
        oracle.assert_close(groups(term, data, like), want, max=2 * worst)
