"""Meshes: where the arrays of a program lie, and what devices exchange."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from tests.contract.draws import Draw
from tests.contract.loop import TERMS

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
COLLECTIVES = "all-reduce", "all-gather", "all-to-all", "ragged-all-to-all", "reduce-scatter", "collective-permute"
DOCS = Path(__file__).parent.parent.parent / "docs" / "sharding.md"


def mesh_of(kind: str, **axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(KINDS[kind],) * len(axes))


def moved(program: Any) -> list[tuple[str, str]]:
    """The collectives of a compiled program, and the types of what each makes, or of what it takes and makes."""
    calls = rf"^ *(?:ROOT )?%\S+ = (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\("
    return [(name, types) for types, name in re.findall(calls, program.as_text(), re.M)]


def collectives(program: Any) -> str:
    """Those of a compiled program, as in "2 all-gather, all-reduce"; "" for none."""
    found = Counter(name for name, _ in moved(program))
    return ", ".join(f"{n} {name}" if n > 1 else name for name, n in sorted(found.items()))


def table() -> dict[tuple[str, str], list[str]]:
    """The documented one: collectives by layout and letter; of the product, and of its derivatives."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w)` \| (.*) \|$", DOCS.read_text(), re.M)
    return {(layout, z): [cell.strip().replace("none", "") for cell in rest.split("|")] for layout, z, rest in rows}


@dataclass(frozen=True)
class Over:
    """A mesh over which a program runs: what `Program.context` says, such as `"auto 2x2 m=a k=b"`.

    That is a mesh of two axes of two devices, `a` and `b`, of type `Auto`, which split the letters `m` and `k`: "g" are
    the groups of a uniform term, "b" the batch. With "-> m=b", the result's `out_sharding` is that; with
    "-> unreduced=a" it isn't summed over `a`. "sharded_matmul" in place of the type: by that function.
    """

    kind: str
    mesh: jax.sharding.Mesh
    letters: Mapping[str, tuple[str, ...]]  # the mesh axes of each
    out: Mapping[str, tuple[str, ...]] | None

    @staticmethod
    def of(context: str) -> "Over | None":
        kind, *rest = context.split()
        if kind not in (*KINDS, "sharded_matmul"):
            return None
        shape, *others = rest
        mesh = mesh_of(
            "auto" if kind not in KINDS else kind, **dict(zip("abc", map(int, shape.split("x")), strict=False))
        )
        at = others.index("->") if "->" in others else len(others)

        def axes(words: list[str]) -> dict[str, tuple[str, ...]]:
            return {z: tuple(names) for z, names in (word.split("=") for word in words)}

        return Over(kind, mesh, axes(others[:at]), axes(others[at + 1 :]) if at < len(others) else None)

    def spec(self, program: Any, name: str, is_batched: bool = True) -> P:
        """How an array of a draw is split."""
        term = program.term_of(name)
        letters = "g" * (len(program.terms[term].shape) - 2) + TERMS[term]
        letters = "b" + letters if is_batched and program.has_batch(name) else letters
        if name == "out" and self.out is not None:
            return self._spec(letters, self.out)
        if term == "out":  # a letter that one term packs and another one has left-aligned isn't split
            packed = {z: {each.packed == z for each in program.terms.values() if z in each.ragged} for z in letters}
            letters = "".join("." if len(packed[z]) > 1 else z for z in letters)
        return self._spec(letters, self.letters)

    def _spec(self, letters: str, axes: Mapping[str, tuple[str, ...]]) -> P:
        taken: set[str] = set()  # the first letter that wants an axis has it
        found: list[tuple[str, ...] | None] = []
        for names in (axes.get(z, ()) for z in letters):
            found.append(names if names and not taken & {*names} else None)
            taken |= {*names}
        return P(*found)

    def put(self, program: Any, draw: Draw) -> Draw:
        """The draw on the mesh; an array that can't be split evenly is split inside of the program: see `compute`."""

        def placed(x: Any, spec: P) -> Any:
            sharding = NamedSharding(self.mesh, spec)
            return jax.device_put(x, sharding if self._divides(x, spec) else NamedSharding(self.mesh, P()))

        def of_batch(name: str) -> P:
            return self._spec("b" if program.has_batch(name) else "", self.letters)

        if self.kind == "sharded_matmul":
            return draw
        data = {name: placed(x, self.spec(program, name)) for name, x in draw.data.items()}
        sizes = {z: placed(x, of_batch("sizes")) for z, x in draw.sizes.items()}
        return Draw(data, sizes, placed(draw.first, of_batch("first")))

    def like(self, ct: Array, out: Array) -> Array:
        """A cotangent of a result whose type says how it is split."""
        return jax.sharding.reshard(ct, jax.typeof(out).sharding) if self.kind == "explicit" else ct

    def _divides(self, x: Any, spec: P) -> bool:
        ways = NamedSharding(self.mesh, spec).shard_shape
        try:
            return bool(ways(x.shape))
        except ValueError:
            return False

    def compute(self, program: Any, names: tuple[str, ...] = ()) -> Any:
        """A compiled function of a draw that is `put` here: all results, or those of these names."""

        def run(data: dict[str, Array], sizes: Any, first: Any) -> Any:
            if self.kind == "auto":
                shardings = {name: NamedSharding(self.mesh, self.spec(program, name)) for name in data}
                data = {name: jax.lax.with_sharding_constraint(x, shardings[name]) for name, x in data.items()}
            found = program.compute(data, sizes, first)
            if self.kind == "explicit":  # cotangents are split as their operands are
                for name in {"lhs", "rhs", "existing"} & found.keys():
                    assert jax.typeof(found[name]).sharding.spec == jax.typeof(data[name]).sharding.spec, name
            return {name: found[name] for name in names} if names else found

        # Over `Auto` axes a result is sharded as it is used: a gradient, as its operand is.
        gradients = [name for name in names if name != "out"] if self.kind == "auto" else []
        shardings = {name: NamedSharding(self.mesh, self.spec(program, name)) for name in gradients}
        return jax.jit(run, out_shardings=shardings) if shardings else jax.jit(run)

    def matmul(self, program: Any) -> Callable[..., Any]:
        """`ragged.matmul` with what this context says."""
        if self.kind == "sharded_matmul":
            specs = {name: self.spec(program, name, is_batched=False) for name in TERMS}
            if program.swapped:
                specs = {name: P(*spec[:-2], spec[-1], spec[-2]) for name, spec in specs.items()}
            first, second = ("rhs", "lhs") if program.swapped else ("lhs", "rhs")
            in_specs = specs[first], specs[second]
            return partial(ragged.sharded_matmul, mesh=self.mesh, in_specs=in_specs, out_specs=specs["out"])
        if self.out is None:
            return ragged.matmul
        letters = "g" * (len(program.terms["out"].shape) - 2) + TERMS["out"]
        unreduced = frozenset(self.out.get("unreduced", ()))
        asked = P(*self._spec(letters, self.out), unreduced=unreduced)

        def matmul(*operands: Any, **options: Any) -> Any:
            found = ragged.matmul(*operands, out_sharding=asked, **options)
            spec = jax.typeof(found.data).sharding.spec
            assert spec.unreduced == asked.unreduced and spec.partitions == asked.partitions, (spec, asked)
            whole = NamedSharding(self.mesh, P(*[None] * found.ndim))
            return found.with_data(jax.sharding.reshard(found.data, whole)) if unreduced else found

        return matmul
