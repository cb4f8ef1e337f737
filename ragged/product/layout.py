"""The eight layouts of a grouped product, and what each one's derivatives are.

A product contracts `lhs[i]` of shape `[m, k]` with `rhs[i]` of shape `[k, n]` for every group `i`.
Each of the three extents is either the same in all groups or differs from group to group ("ragged").
That is the whole of it: a layout *is* the set of its ragged letters, and there are 2³ = 8 of them.

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

(R: ragged, U: uniform; first·last dim.) The derivative by `lhs` is `dout @ rhs.mT`: it contracts `n` and its columns
are `k`, so the two letters trade places. The derivative by `rhs` is `lhs.mT @ dout`: `m` and `k` trade places. So the
set is closed, and the gradient rules need no case of their own.
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
"""The layouts by their ragged letters, in the order `m`, `k`, `n`. Everything else about them follows."""


class Layout(NamedTuple):
    """Which of the letters `m`, `k`, `n` are ragged, in this order."""

    ragged: str

    @property
    def name(self) -> str:
        return NAMES[self.ragged]

    def kind(self, term: str) -> str:
        """`"R·U"` and so on: first·last dim of a term such as `"mk"`."""
        return "·".join("R" if letter in self.ragged else "U" for letter in term)

    def derivative(self, wrt: str) -> "Layout":
        """The layout of the product that gives the cotangent of `"lhs"` or `"rhs"`."""
        other = {"lhs": {"k": "n", "n": "k"}, "rhs": {"k": "m", "m": "k"}}[wrt]
        letters = {other.get(letter, letter) for letter in self.ragged}
        return Layout("".join(letter for letter in "mkn" if letter in letters))


LAYOUTS = {letters: Layout(letters) for letters in NAMES}


def infer_layout(lhs: tuple[bool, bool], rhs: tuple[bool, bool]) -> Layout | None:
    """The layout of a product, from which (first, last) dims of each operand are ragged.

    None where there is no product: the inner dims must both be ragged or both not.
    """
    (m, k), (k_rhs, n) = lhs, rhs
    if k != k_rhs:
        return None
    return LAYOUTS["".join(letter for letter, is_ragged in zip("mkn", (m, k, n), strict=True) if is_ragged)]


class Product(NamedTuple):
    """A grouped product as an einsum of the letters `m`, `k`, `n`: what the primitive and the kernels are told.

    `lhs`, `rhs` and `out` each name the two letters of a term in the order in which its buffer holds them:

    - a term without ragged letters is `[groups, a, b]`, and may be stored either way round;
    - a term with ragged letters is `[a, b]` where `a` is ragged and packed; if `b` is ragged too, then each group's
      columns are left-aligned.

    The letters mean nothing but which axes belong together: `out` says which one is contracted. So the derivative by a
    term is the same einsum with that term and `out` exchanged, and swapping `lhs` and `rhs` changes nothing.
    """

    lhs: str
    rhs: str
    out: str
    ragged: str

    def derivative(self, wrt: str) -> "Product":
        """The product of the cotangent (in place of `wrt`) with the other operand that gives `wrt`'s cotangent."""
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
        """What kind of kernel computes it."""
        if not self.ragged:
            return "batched_matmul"
        if len(self.ragged) > 1:
            return "tiled_matmul"
        return "grouped_matmul" if self.ragged in self.out else "transposed_grouped_matmul"
