"""Specs of `ragged.einsum`, and programs of one: compiled once, to run on many draws against `np.einsum`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Array

import ragged
from ragged import GroupedTensor
from tests.cases import LETTERS
from tests.contract.draws import size_table, values
from tests.contract.launches import launches
from tests.contract.loop import Arrays, Sum, Term, mismatch, places

G = 3  # groups


@dataclass(frozen=True)
class Spec:
    """A spec, whose letters are single. The ragged letters of each term: the packed one first."""

    text: str
    ragged: tuple[str, str, str]
    extents: Mapping[str, int] = field(default_factory=lambda: {"t": 19, "s": 17, "u": 13})  # also of packed buffers
    widths: Mapping[str, int] = field(default_factory=lambda: {"t": 3, "s": 3, "u": 4})  # where it isn't packed

    def __str__(self) -> str:
        return self.text

    @property
    def terms(self) -> list[str]:
        return re.findall(r"\w+", self.text)

    @property
    def options(self) -> dict[str, Any]:
        """The extents of the result that its operands don't have."""
        (packed, *other), operands = self.ragged[2] or " ", [*zip(self.terms, self.ragged, strict=True)][:2]
        found = {"max_last": self.widths[other[0]]} if other else {}
        holding = [letters for _, letters in operands if packed in letters]
        return found | ({"capacity": self.extents[packed]} if holding and holding[0][0] != packed else {})

    def shape(self, index: int) -> tuple[int, ...]:
        packed = self.ragged[index][:1]
        extents = {**dict.fromkeys("abcdefhAMKN", 2), "g": G, "e": 4, **self.extents}
        return tuple(
            self.widths[z] if z in self.ragged[index] and z != packed else extents[z] for z in self.terms[index]
        )

    def tensor(self, index: int, data: Any, sizes: Mapping[str, Any]) -> Any:
        term, letters = self.terms[index], self.ragged[index]
        if not letters:
            return GroupedTensor(data) if "g" in term else data
        first, last = (sizes[z] if z in letters else None for z in (term[0], term[-1]))
        return GroupedTensor(data, first, last, transposed=len(letters) == 2 and letters[0] == term[-1])

    def term(self, index: int) -> Term:
        """Without the letter of groups, which a term without ragged letters may have first."""
        letters = self.terms[index].removeprefix("g")
        return Term(letters, self.ragged[index], self.ragged[index][:1], self.shape(index))

    def with_nan(self, index: int, data: np.ndarray, sizes: Arrays) -> np.ndarray:
        """A buffer with NaN outside of the groups."""
        out = np.full_like(data, np.nan)
        for at in places({"": self.term(index)}, sizes, G)[""]:
            out[at] = data[at]
        return out

    def product(self, x: int, y: int, out: int, arrays: tuple[Any, Any], sizes: Arrays) -> Sum:
        """The term `out` as the product of two others: of the elements of each group that all three buffers hold."""
        terms = {str(i): self.term(i) for i in (x, y, out)}
        spec = "{},{}->{}".format(*(of.letters for of in terms.values()))
        total = Sum(np.zeros(self.shape(out)), np.zeros(self.shape(out)))
        for a, b, c in zip(*places(terms, sizes, G).values(), strict=True):
            given = [array[at].astype(np.float64) for array, at in zip(arrays, (a, b), strict=True)]
            total.value[c] += np.einsum(spec, *given)
            total.sizes[c] += np.einsum(spec, *map(np.abs, given))
        return total


def check(spec: Spec, count: int, backend: Any = None) -> None:
    """The result and both cotangents for draws of sizes, with NaN around all that goes in; by one kernel each."""
    rng = np.random.default_rng(0)
    letters = sorted({*"".join(spec.ragged)})
    tables = {z: size_table(G, spec.extents[z], 4, rng, count) for z in letters}
    # The last rows of a table are sizes that make no sense.
    table = [
        {z: each[-(2 * i + 7 * j + 1) % len(each)] for j, (z, each) in enumerate(tables.items())}
        for i in range(count if letters else 1)
    ]
    data = [values(rng, spec.shape(i), "float32") for i in range(3)]
    options: dict[str, Any] = spec.options | ({"backend": backend} if backend else {})

    @jax.jit
    def run(x: Array, y: Array, ct: Array, sizes: dict[str, Array]) -> Any:
        def multiply(x: Array, y: Array) -> Array:
            return ragged.einsum(spec.text, spec.tensor(0, x, sizes), spec.tensor(1, y, sizes), **options).data

        out, pull = jax.vjp(multiply, x, y)
        return out, *pull(ct)

    with launches() as ran:
        for sizes in table:
            given = [spec.with_nan(i, each, sizes) for i, each in enumerate(data)]
            got = run(*given, sizes)
            for found, (x, y, out) in zip(got, ((0, 1, 2), (2, 1, 0), (0, 2, 1)), strict=True):
                want = spec.product(x, y, out, (given[x], given[y]), sizes)
                wrong = mismatch(found, want, "float32", terms=200)
                assert not wrong, f"term {out}: {wrong}\nsizes: {sizes}"
    is_dense = not letters and not all("g" in term for term in spec.terms[:2])
    own = "xla" if is_dense or not backend else backend.backend
    assert [name for name, _ in ran] == [own] * 3, ran


def random_spec(seed: int) -> Spec:
    """Which letters there are, where in each term, and how the buffers are packed."""
    rng, layout = np.random.default_rng(seed), list(LETTERS)[seed % len(LETTERS)]
    role_letters, raggeds = {"m": "mM", "k": "kK", "n": "nN", "b": "aA"}, LETTERS[layout]
    roles = {
        role: each[: int(rng.choice([1, 1, 2] if role != "b" else [0, 0, 1, 2]))] for role, each in role_letters.items()
    }
    has_group = layout in ("batched", "wgrad")

    def placed(letters: str) -> tuple[str, str]:
        """Letters in any order, and the ragged ones, the packed one first: ragged ones are first or last."""
        mine, rest = ([str(z) for z in rng.permutation([z for z in letters if (z in raggeds) == is_ragged])]
                      for is_ragged in (True, False))  # fmt: skip
        if len(mine) == 2:
            packed = mine[::-1] if not rest and rng.integers(2) else mine
            return "".join((mine[0], *rest, mine[1])), "".join(packed)
        order = (*mine, *rest)
        return "".join(order[::-1] if mine and len(order) == 2 and rng.integers(2) else order), "".join(mine)

    (lhs, of_lhs), (rhs, of_rhs), (out, of_out) = (
        placed("".join(roles[r] for r in each)) for each in ("mkb", "knb", "mnb")
    )
    of_out = "".join(z for z in out if z in of_out)
    shared = str(rng.choice(["lhs", "rhs", ""])) if not has_group else ""
    lhs, rhs = (
        term if letters or name == shared else f"g{term}"
        for name, term, letters in (("lhs", lhs, of_lhs), ("rhs", rhs, of_rhs))
    )
    out = f"g{out}" if has_group else out
    terms, letters = ([lhs, rhs], [of_lhs, of_rhs]) if rng.integers(2) else ([rhs, lhs], [of_rhs, of_lhs])
    extents = {z: int(rng.integers(9, 20)) if z in raggeds else int(rng.integers(1, 4)) for z in "mkn"}
    return Spec(f"{','.join(terms)}->{out}", (letters[0], letters[1], of_out), extents, dict.fromkeys("mkn", 4))
