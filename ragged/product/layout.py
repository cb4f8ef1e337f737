"""The eight layouts of a grouped product, and the layouts of its derivatives.

A product contracts `lhs[i]` of shape `[m, k]` with `rhs[i]` of shape `[k, n]` for every group `i`. Each of the three
extents is uniform (the same in all groups) or ragged. A layout is the set of its ragged letters: 2³ = 8 layouts.

    letters   lhs   rhs   out      name             derivative by lhs   derivative by rhs
                                                    dout @ rhs.mT       lhs.mT @ dout
    -         U·U   U·U   U·U      batched          batched             batched
    m         R·U   U·U   R·U      forward          forward             wgrad
    n         U·U   U·R   U·R      forward_left     wgrad               forward_left
    k         U·R   R·U   U·U      wgrad            forward_left        forward
    m n       R·U   U·R   R·R      outer            inner_rows          inner_columns
    m k       R·R   R·U   R·U      inner_rows       outer               inner_rows
    k n       U·R   R·R   U·R      inner_columns    inner_columns       outer
    m k n     R·R   R·R   R·R      ragged           ragged              ragged

(R: ragged, U: uniform; first·last dim.) Compared to the product, the derivative by `lhs` has `n` and `k` swapped, the
derivative by `rhs` has `m` and `k` swapped. So every derivative has one of the eight layouts, and one gradient rule
serves all of them.
"""

from typing import NamedTuple

NAMES = {
    "": "batched",
    "m": "forward",
    "n": "forward_left",
    "k": "wgrad",
    "mn": "outer",
    "mk": "inner_rows",
    "kn": "inner_columns",
    "mkn": "ragged",
}
"""The name of each layout, keyed by its ragged letters in the order `m`, `k`, `n`."""


class Layout(NamedTuple):
    """A layout: its ragged letters, in the order `m`, `k`, `n`."""

    ragged: str

    @property
    def name(self) -> str:
        return NAMES[self.ragged]

    def kind(self, term: str) -> str:
        """The kind of a term such as `"mk"`: `"R·U"` if its first dim is ragged and its last dim uniform."""
        return "·".join("R" if letter in self.ragged else "U" for letter in term)

    def derivative(self, wrt: str) -> "Layout":
        """The layout of the product that is the cotangent of `"lhs"` or `"rhs"`.

        Its letters are renamed, so that its result is `mn` again. `Product.derivative` keeps them.
        """
        swapped = {"lhs": {"k": "n", "n": "k"}, "rhs": {"k": "m", "m": "k"}}[wrt]
        letters = {swapped.get(letter, letter) for letter in self.ragged}
        return Layout("".join(letter for letter in "mkn" if letter in letters))


LAYOUTS = {letters: Layout(letters) for letters in NAMES}


def infer_layout(lhs: tuple[bool, bool], rhs: tuple[bool, bool]) -> Layout | None:
    """The layout of a product. `lhs` and `rhs`: whether the operand's first and last dim are ragged.

    None if only one of the contracted dims is ragged: such operands have no product.
    """
    (m, k), (k_rhs, n) = lhs, rhs
    if k != k_rhs:
        return None
    return LAYOUTS["".join(letter for letter, is_ragged in zip("mkn", (m, k, n), strict=True) if is_ragged)]


class Product(NamedTuple):
    """A grouped product as an einsum of the letters `m`, `k`, `n`, for the primitive and the kernels.

    `lhs`, `rhs` and `out`, the terms of the einsum, have two letters each, in storage order:

    - a term without ragged letters has a buffer `[groups, a, b]`, which may be stored transposed: `"kn"` or `"nk"`;
    - a term with ragged letters has a buffer `[a, b]`, where `a` is ragged and packed. If `b` is ragged too, each
      group's columns are left-aligned.

    Any of the three letters may be contracted: the one that isn't in `out`. So the derivative by a term is the same
    einsum with this term and `out` exchanged, and `lhs` and `rhs` may be swapped.
    """

    lhs: str
    rhs: str
    out: str
    ragged: str

    def derivative(self, wrt: str) -> "Product":
        """The product that is the cotangent of `"lhs"` or `"rhs"`.

        The cotangent of `out` takes this operand's place. Letters keep their meaning.
        """
        if wrt == "lhs":
            return self._replace(lhs=self.out, out=self.lhs)
        return self._replace(rhs=self.out, out=self.rhs)

    @property
    def contracted(self) -> str:
        return next(letter for letter in "mkn" if letter not in self.out)

    def is_uniform(self, term: str) -> bool:
        return not set(term) & set(self.ragged)

    def ndim(self, term: str) -> int:
        """The rank of a term's buffer, without a batch axis."""
        return 3 if self.is_uniform(term) else 2

    @property
    def kernel(self) -> str:
        """Name of the product's kernel."""
        if not self.ragged:
            return "batched_matmul"
        if len(self.ragged) > 1:
            return "tiled_matmul"
        return "grouped_matmul" if self.ragged in self.out else "transposed_grouped_matmul"
