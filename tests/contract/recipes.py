"""A product with a recipe, and the same from public calls without one: compiled once, to run on many draws."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ragged
from ragged import Cast, GroupedTensor, Recipe, Scaling, quantize, quantize_weights
from tests import gpu
from tests.cases import INT8_ROWS
from tests.contract.draws import draws, values
from tests.contract.launches import launches
from tests.contract.loop import TERMS, Arrays, covered, places
from tests.contract.programs import Program, runner

E4M3, E5M2, E8M0 = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
LARGEST = {E4M3: 448.0, E5M2: 57344.0, "int8": 127.0}
PRESETS = ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "delayed"]
NONE, ROW, ONE = Cast(None), Cast(E4M3, "row"), Cast(E4M3)
# No two casts are alike: one in another's place changes the result.
MIXED = Recipe(
    (ROW, Cast(E5M2, (2, 4))),
    (Cast(E5M2, (1, 4)), Cast("int8", "group")),
    (Cast("int8", "row", True), Cast(E4M3, "tensor")),
)
HALF = Recipe((ROW, NONE), (ROW, Cast(E4M3, (1, 8))), (NONE, ROW))
# The casts of the weights differ in one thing only, whether scales are powers of two.
ROUNDED = Recipe((ROW, ONE), (ROW, Cast(E4M3, "tensor", True)), (ROW, ROW))
EMPTY = jnp.zeros((3, 4))
INTEGERS = Recipe(*[(Cast("int8"), Cast("int8"))] * 3, history=EMPTY)
POWERS = Recipe(*[(Cast(E4M3, Scaling(None, E8M0)), Cast(E4M3, Scaling(None, E8M0)))] * 3, history=EMPTY)
# Given scales, and largest values of 448 × 2⁻⁵ and of 127 × .25; an element beyond saturates.
FIXED = Recipe(
    (Cast(E4M3, "row", scale=0.5), Cast(E4M3, (2, 4), amax=14)),
    (Cast(E5M2, "group", scale=2.0**-10), Cast("int8", "tensor", amax=127 / 4)),
    (Cast(E5M2, "row", scale=2.0**-12), Cast(E4M3, "tensor", True, scale=0.3)),
)
RECIPES = {
    "fixed": FIXED,
    "mixed": MIXED,
    "half": HALF,
    "rounded": ROUNDED,
    "integers": INTEGERS,
    "powers": POWERS,
    "rows": Recipe((ROW, ROW), (ROW, ROW), (ROW, ROW)),
    "int8 rows and blocks": Recipe((Cast("int8", "row"), Cast("int8", (1, 32)))),
    "int8 rows": INT8_ROWS,
    "powers of two": Recipe.preset("blockwise", scales=E8M0),
}


@dataclass(frozen=True)
class Quantised:
    """A product with a recipe."""

    name: str  # of the recipe
    program: Program

    def __str__(self) -> str:
        return f"{self.name}-{self.program}"

    @cached_property
    def recipe(self) -> Recipe:
        found = RECIPES.get(self.name) or Recipe.preset(self.name, length=4 if self.name == "delayed" else None)
        save = "operands" if self.program.order == 2 else "quantized"
        return Recipe(found.forward, found.dgrad, found.wgrad, found.history, save=save)

    @property
    def x(self) -> str:
        """The operand that the recipe calls `x`; the other one is `w`."""
        return "rhs" if self.program.layout == "forward_left" else "lhs"

    @property
    def w(self) -> str:
        return "lhs" if self.x == "rhs" else "rhs"

    @cached_property
    def casts(self) -> dict[str, dict[str, Cast]]:
        """Of both operands of the product that gives each term."""
        (x, w), (of_lhs, by_w), (by_x, of_rhs) = self.recipe.forward, self.recipe.dgrad, self.recipe.wgrad
        return {
            "out": {self.x: x, self.w: w},
            self.x: {"out": of_lhs, self.w: by_w},
            self.w: {self.x: by_x, "out": of_rhs},
        }

    @property
    def roles(self) -> tuple[str, str, str]:
        """The terms of the history's rows."""
        return self.x, self.w, "out"

    def tensors(self, data: dict[str, Array], sizes: dict[str, Array]) -> dict[str, GroupedTensor]:
        """The terms. With one matrix for all groups, these are one group."""
        found = {}
        for name, letters in TERMS.items():
            first, last = map(sizes.get, letters)
            turned = self.program.terms[name].packed == letters[1] and name in self.program.packed_last
            whole = data[name][None] if name == self.program.shared else data[name]
            found[name] = GroupedTensor(whole, first, last, transposed=turned)
        if not self.program.shared:
            return found
        for name, x in found.items():
            if x.kind == "uniform":
                found[name] = GroupedTensor(x.data.reshape(1, -1, x.shape[-1]))
            else:
                axis = 0 if x.kind == "ragged rows" else 1
                total = jnp.sum(jnp.any(x.mask, axis=1 - axis), keepdims=True).astype(jnp.int32)
                found[name] = GroupedTensor(x.data, *((total, None) if axis == 0 else (None, total)))
        return found

    def expected(
        self, name: str, terms: dict[str, GroupedTensor], scales: Array | None, first: Any, existing: Any = None
    ) -> Array:
        """A term as the product of the two others, quantised by public calls."""
        contracted = next(z for z in "mkn" if z not in TERMS[name])
        of = {}
        for operand, cast in self.casts[name].items():
            scale = None if scales is None else scales[self.roles.index(operand)]
            axis = TERMS[operand].index(contracted) - 2
            of[operand] = along(terms[operand], axis, cast, scale)
        options: Any = self.program.options(name, first) | {
            "preferred_element_type": self.program.dtypes[name],
            "existing_out": existing,
        }
        lhs, rhs = {
            "out": lambda: (of["lhs"], of["rhs"]),
            "lhs": lambda: (of["out"], of["rhs"].mT),
            "rhs": lambda: (of["lhs"].mT, of["out"]),
        }[name]()
        term = self.program.terms[name]
        if len(term.ragged) == 2 and term.packed == term.letters[1]:
            return jnp.asarray(ragged.matmul(rhs.mT, lhs.mT, **options).mT.data)
        return jnp.asarray(ragged.matmul(lhs, rhs, **options).data).reshape(term.shape)

    def compute(self, data: dict[str, Array], sizes: dict[str, Array], first: Array, past: Any) -> Any:
        """`(got, want, once, history)`: results by name of the recipe and of public calls, of the recipe with weights
        that are quantised once, and the next history."""
        recipe, program = self.recipe, self.program
        given, scales = (None, None) if recipe.history is None else past
        recipe = Recipe(recipe.forward, recipe.dgrad, recipe.wgrad, given, save=recipe.save).unsealed()
        inputs = {name: data[name] for name in ("lhs", "rhs", "existing") if name in data}

        def product(inputs: dict[str, Array], recipe: Recipe, once: bool) -> Array:
            whole = {program.shared: inputs[program.shared]} if program.shared else {}
            operands = program.operands(inputs | {name: x[None] for name, x in whole.items()}, sizes) | whole
            if once:
                w = operands[self.w]
                left = self.w == "lhs"
                operands[self.w] = quantize_weights(w.mT, recipe).mT if left else quantize_weights(w, recipe)
            options = program.options("out", first) | {"existing_out": inputs.get("existing"), "recipe": recipe}
            return ragged.matmul(operands["lhs"], operands["rhs"], **options).data

        product = jax.checkpoint(product, static_argnums=2) if program.context == "checkpoint" else product

        def pull(inputs: dict[str, Array], ct: Array, once: bool = False) -> tuple[dict[str, Array], Recipe]:
            return jax.vjp(lambda inputs, recipe: product(inputs, recipe, once), inputs, recipe)[1](ct)

        by_inputs, following = pull(inputs, data["out"])
        got, terms, once = {"out": product(inputs, recipe, False), **by_inputs}, self.tensors(data, sizes), {}
        want = {"out": self.expected("out", terms, scales, first, data.get("existing"))}
        want |= {name: self.expected(name, terms, scales, first) for name in ("lhs", "rhs")}
        if "existing" in data:
            want["existing"] = jnp.where(terms["out"].mask, data["out"], 0)
        if recipe.history is None and not program.terms[self.w].ragged and program.backend == "xla":
            once = {"out": product(inputs, recipe, True), **pull(inputs, data["out"], True)[0]}
        if program.order == 2:
            vectors = {name: data[f"d {name}"] for name in inputs}
            by_terms, by_ct = jax.vjp(lambda *args: pull(*args)[0], inputs, data["out"])[1](vectors)
            got |= {f"{name} again": each for name, each in (by_terms | {"out": by_ct}).items()}
            along_terms = self.tensors(data | vectors, sizes)
            one = {name: terms | {name: along_terms[name]} for name in vectors}
            want["lhs again"] = self.expected("lhs", one["rhs"], scales, first)
            want["rhs again"] = self.expected("rhs", one["lhs"], scales, first)
            by_lhs, by_rhs = (self.expected("out", each, scales, first) for each in one.values())
            want["out again"] = by_lhs + by_rhs
        return got, want, once, following.history

    def inputs(self, count: int) -> Iterator[tuple[dict[str, np.ndarray], Arrays, np.ndarray, Any]]:
        """Magnitudes differ by row and column; tails are NaN or large, and some draws have an element that isn't
        finite. Histories have powers of two as scales, or any numbers if the recipe rounds scales to them."""
        rng, program = np.random.default_rng(0), self.program
        for number, draw in enumerate(draws(program, count)):
            data = {}
            for name in draw.data:
                shape, term = program.shape(name), program.terms[program.term_of(name)]
                rows, columns = (np.exp2(rng.integers(-4, 5, n)) for n in shape[-2:])
                data[name] = (values(rng, shape, "float32") * rows[:, None] * columns).astype(draw.data[name].dtype)
                if term.ragged:
                    at = places({"": term}, draw.sizes, program.groups)[""]
                    data[name][~covered(shape, at)] = (np.nan, 1e4)[number % 2]
            if number % 4 == 2 and min(data["lhs"].shape, default=0):
                name = self.roles[number // 4 % 3]
                data[name][tuple(int(n // 3) for n in data[name].shape)] = (np.inf, np.nan)[number // 4 % 2]
            yield data, draw.sizes, draw.first, self._past(rng)

    def _past(self, rng: np.random.Generator) -> Any:
        """`(history, scales)`; scales are 0 where there are no past steps."""
        if self.recipe.history is None:
            return None
        of = dict(zip(self.roles, (*self.recipe.forward, self.recipe.dgrad[0]), strict=True))
        largest = np.array([LARGEST[cast.dtype] for cast in of.values()])
        scales = np.exp2(rng.integers(-8, 3, 3)) * (rng.random(3) > 0.2)
        loose = rng.uniform(0.51, 1, 3) if self.name == "powers" else 1
        history = rng.random((3, 4)) * (scales * largest * 0.5)[:, None]
        history[np.arange(3), rng.integers(0, 4, 3)] = scales * largest * loose
        return history.astype(np.float32), scales.astype(np.float32)

    def check(self, count: int) -> None:
        if self.program.backend == "triton_gpu":
            gpu.needs_triton()
        with self.program.on_chip(), launches() as ran:
            alive, all_names = set[str](), set[str]()
            run, at_once = runner(self.program.context, self.compute)
            for some in itertools.batched(self.inputs(count), at_once):
                for args, found in zip(some, run(some), strict=True):
                    got, want, once, history = jax.tree.map(np.asarray, found)
                    told = f"{self}, {args[1:]}"
                    for name, each in [*want.items(), *once.items()]:
                        assert each.dtype == got[name].dtype, told
                        same(got[name], each, f"{name}: {told}")
                    all_names |= got.keys()
                    alive |= {name for name, each in got.items() if each.any()}
                    if history is not None:
                        self._check_history(history, *args)
            assert alive == all_names or self.program.capacity == 0
            assert {backend for backend, _ in ran} == {self.program.backend}, f"these ran: {set(ran)}"

    def _check_history(self, got: Array, data: Arrays, sizes: Arrays, first: Any, past: Any) -> None:
        """The largest finite values of the groups come first; the others move by a step."""
        np.testing.assert_array_equal(got[:, 1:], past[0][:, :-1])
        for row, name in enumerate(self.roles):
            term, top = self.program.terms[name], 0.0
            for at in places({"": term}, sizes, self.program.groups)[""]:
                x = data[name][at].astype(np.float64)
                top = max(top, np.abs(x[np.isfinite(x)]).max(initial=0))
            assert got[row, 0] == top, (name, got, top)


def along(x: GroupedTensor, axis: int, cast: Cast, past: Array | None) -> GroupedTensor:
    """`x` quantised along an axis as a cast says, with the scale of past steps, if there is one."""
    if axis == -2:  # matrices are stored with the contracted axis last
        turned = GroupedTensor(jnp.asarray(x.data).mT) if x.kind == "uniform" else x.mT
        return along(turned, -1, cast, past).mT
    if cast.dtype is None:
        return x
    scaling = cast.scaling
    if scaling.block is not None:
        (kept, contracted), (is_kept, is_contracted) = scaling.block, x.ragged
        kept = 1 if is_kept and kept is not None else kept
        scaling = Scaling((kept, None if is_kept and is_contracted else contracted), scaling.dtype)
    q = quantize(x, cast.dtype, scaling, power_of_two=cast.power_of_two)
    if past is None and cast.scale is None:
        return q
    if past is None:
        past = jnp.float32(2.0 ** np.ceil(np.log2(cast.scale)) if cast.power_of_two else cast.scale)
        assert q.scales is not None
        if cast.dtype == "int8":  # a tensor that isn't finite is NaN, as it is with its own scale
            past = jnp.where(jnp.isnan(q.scales), jnp.nan, past)
    largest, wide = LARGEST[cast.dtype], jnp.asarray(x.data, jnp.float32)
    data = jnp.where(jnp.isfinite(wide), jnp.clip(wide / past, -largest, largest), wide)
    data = jnp.where(x.mask, jnp.round(data) if cast.dtype == "int8" else data, 0).astype(cast.dtype)
    lost = jnp.any(x.mask & ~jnp.isfinite(wide)) & (cast.dtype == "int8" and cast.scale is None)
    scale = jnp.where(lost, jnp.nan, past).astype(scaling.dtype)
    data = jnp.where(past > 0, data, jnp.asarray(q.data))
    assert q.scales is not None
    return GroupedTensor(
        data, x.first_dims, x.last_dims, jnp.where(past > 0, scale, q.scales), scaling, transposed=q.transposed
    )


def same(got: Any, want: Any, told: str) -> None:
    """That two trees of results have the same numbers."""
    for (path, each), expected in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        wide = (np.asarray(x, np.float64) for x in (each, expected))
        np.testing.assert_array_equal(*wide, err_msg=f"{told}: {jax.tree_util.keystr(path)}")
