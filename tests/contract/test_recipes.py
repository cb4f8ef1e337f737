"""A `recipe` is `quantize` of each operand along what its product contracts, then `matmul`: the same bits.

A program has a product with a recipe and its derivatives, and the same from public calls without one. It is compiled
once, and runs on many draws of sizes, contents and histories.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import Cast, GroupedTensor, Recipe, Scaling, quantize, quantize_weights
from tests import gpu
from tests.cases import LETTERS
from tests.contract.draws import draws, values
from tests.contract.launches import launches
from tests.contract.loop import TERMS, Arrays, places
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
RECIPES = {
    "mixed": MIXED,
    "half": HALF,
    "rounded": ROUNDED,
    "integers": INTEGERS,
    "powers": POWERS,
    "rows": Recipe((ROW, ROW), (ROW, ROW), (ROW, ROW)),
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
        found = RECIPES.get(self.name) or Recipe.preset(self.name, length=4)
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
                    outside = np.ones(shape, bool)
                    for at in places({"": term}, draw.sizes, program.groups)[""]:
                        outside[at] = False
                    data[name][outside] = (np.nan, 1e4)[number % 2]
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
        with ExitStack() as stack:
            if self.program.chip:
                stack.enter_context(gpu.on(self.program.chip))
            ran, alive, all_names = stack.enter_context(launches()), set[str](), set[str]()
            run, at_once = runner(self.program.context, self.compute)
            for some in itertools.batched(self.inputs(count), at_once):
                for args, found in zip(some, run(some), strict=True):
                    got, want, once, history = jax.tree.map(np.asarray, found)
                    told = f"{self}, {args[1:]}"
                    for name, each in [*want.items(), *once.items()]:
                        assert each.dtype == got[name].dtype, told
                        _same(got[name], each, f"{name}: {told}")
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
    if past is None:
        return q
    largest, wide = LARGEST[cast.dtype], jnp.asarray(x.data, jnp.float32)
    data = jnp.where(jnp.isfinite(wide), jnp.clip(wide / past, -largest, largest), wide)
    data = jnp.where(x.mask, jnp.round(data) if cast.dtype == "int8" else data, 0).astype(cast.dtype)
    lost = jnp.any(x.mask & ~jnp.isfinite(wide)) & (cast.dtype == "int8")
    scale = jnp.where(lost, jnp.nan, past).astype(scaling.dtype)
    data = jnp.where(past > 0, data, jnp.asarray(q.data))
    assert q.scales is not None
    return GroupedTensor(
        data, x.first_dims, x.last_dims, jnp.where(past > 0, scale, q.scales), scaling, transposed=q.transposed
    )


SMALL: dict[str, Any] = {"tiles": (16, 16, 16), "k": 36, "n": 20}  # one height of tiles: compiled faster
KERNEL: dict[str, Any] = {"backend": "pallas_tpu", "k": 36, "n": 20}
Case = tuple[int, Quantised]


def by_default() -> Iterator[Case]:
    yield 30, Quantised("mixed", Program("forward", **SMALL))
    yield 30, Quantised("blockwise", Program("wgrad", **SMALL))
    yield 30, Quantised("delayed", Program("forward_left", **SMALL))
    yield 20, Quantised("rounded", Program("batched", shared="rhs", **SMALL))
    yield 4, Quantised("mxfp8", Program("forward", held=3, existing=True, **KERNEL))


def long() -> Iterator[Case]:
    names = itertools.cycle([*PRESETS, *RECIPES])
    for layout in [*LETTERS] * 3:
        yield 40, Quantised(next(names), Program(layout, **SMALL))
    for layout in ("batched", "forward", "forward_left", "wgrad", "inner_rows"):
        yield 10, Quantised("mixed", Program(layout, order=2, **SMALL))
        yield 10, Quantised("delayed", Program(layout, order=2, **SMALL))
    for layout, last in (("inner_rows", "lhs"), ("inner_columns", "rhs"), ("ragged", "lhs"), ("ragged", "rhs")):
        yield 20, Quantised("mixed", Program(layout, packed_last=last, **SMALL))
    for name, context in itertools.product(("mxfp8", "delayed"), ("vmap", "scan", "eager", "checkpoint")):
        yield 9, Quantised(name, Program("forward", context=context, **SMALL))
    for name in ("blockwise", "delayed", "mixed"):
        for layout, shared in (("forward", "rhs"), ("forward_left", "lhs"), ("batched", "rhs")):
            yield 20, Quantised(name, Program(layout, shared=shared, **SMALL))
        yield 20, Quantised(name, Program("forward", "bfloat16", **SMALL))
        yield 20, Quantised(name, Program("wgrad", held=3, existing=True, **SMALL))
        yield 5, Quantised(name, Program("forward", capacity=0, **SMALL))
    for name, layout in (("powers of two", "forward"), ("blockwise", "wgrad"), ("mxfp8", "wgrad"), ("mixed", "outer")):
        wide: dict[str, Any] = {"capacity": 150, "k": 160, "n": 140}  # blocks of 128, the last one partial
        yield 5, Quantised(name, Program(layout, backend="pallas_tpu", **wide))
        yield 2, Quantised(name, Program(layout, backend="triton_gpu", chip=gpu.FIRST_WITH_FP8, **wide))


def _cases(cases: Iterator[Case]) -> list[Any]:
    return [pytest.param(*case, id=str(case[1])) for case in cases]


@pytest.mark.parametrize("count, product", _cases(by_default()))
def test_recipes(count: int, product: Quantised) -> None:
    product.check(count)


@pytest.mark.long
@pytest.mark.parametrize("count, product", _cases(long()))
def test_more_recipes(count: int, product: Quantised) -> None:
    product.check(count)


def _same(got: Any, want: Any, told: str) -> None:
    for (path, each), expected in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        wide = (np.asarray(x, np.float64) for x in (each, expected))
        np.testing.assert_array_equal(*wide, err_msg=f"{told}: {jax.tree_util.keystr(path)}")


@pytest.mark.parametrize(
    "names",
    [
        ["rowwise", "delayed"],
        pytest.param(["tensorwise", "blockwise"], marks=pytest.mark.long),
        pytest.param(["mxfp8", "nvfp4", "mixed"], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_gathered_rows(names: list[str]) -> None:
    """The bits of dispatched rows, and the same next history, for any ids. Tokens of no group count for no scale."""
    groups, tokens = 4, 20
    recipes = [Quantised(name, Program("forward")).recipe for name in names]

    def run(ids: Array, x: Array, w: Array, ct: Array) -> Any:
        route, found = ragged.route(ids, groups), []
        for rows, recipe in itertools.product((route.gathered, route.dispatch), recipes):

            def product(x: Array, w: Array, recipe: Recipe, rows: Any = rows) -> Array:
                return ragged.matmul(rows(x), w, recipe=recipe).data

            out, pull = jax.vjp(product, x, w, recipe.unsealed())
            found.append((out, pull(ct)))
        return found[: len(recipes)], found[len(recipes) :]

    rng, compiled = np.random.default_rng(0), jax.jit(run)
    for number in range(20):
        ids = rng.integers(-1 - number % 3, groups + number % 4, (tokens, 2)).astype(np.int32)
        x, w, ct = (
            values(rng, shape, "float32") * np.exp2(rng.integers(-4, 5, (shape[-2], 1))).astype(np.float32)
            for shape in ((tokens, 36), (groups, 36, 20), (2 * tokens, 20))
        )
        is_used = ((ids >= 0) & (ids < groups)).any(1)
        x[~is_used], ct[((ids >= 0) & (ids < groups)).sum() :] = (1e6, np.nan)[number % 2], np.nan
        got, want = compiled(ids, x, w, ct)
        _same(got, want, f"draw {number}, {ids.tolist()}")


@pytest.mark.parametrize(
    "gate, up, backend",
    [
        ("delayed", "delayed", "pallas_tpu"),
        pytest.param("mixed", "rowwise", "xla", marks=pytest.mark.long),
        pytest.param("rowwise", "rows", "pallas_tpu", marks=pytest.mark.long),
        pytest.param("blockwise", "blockwise", "pallas_tpu", marks=pytest.mark.long),
        pytest.param("mxfp8", "mxfp8", "xla", marks=pytest.mark.long),
        pytest.param("delayed", "delayed", "xla", marks=pytest.mark.long),
    ],
)
def test_gated_products(gate: str, up: str, backend: str) -> None:
    """The products of a gate are those of its recipes, bit for bit, with any histories."""
    program = Program("forward", backend=backend, k=36, n=20)
    both = [Quantised(name, program) for name in (gate, up)]
    options = program.options("out", None)

    def run(data: dict[str, Array], sizes: dict[str, Array], past: Any) -> Any:
        recipes = [
            Recipe(of.forward, of.dgrad, of.wgrad, None if each is None else each[0]).unsealed()
            for of, each in zip((each.recipe for each in both), past, strict=True)
        ]

        def gated(x: Array, gate: Array, up: Array, recipes: Any) -> Array:
            rows, pair = GroupedTensor(x, sizes["m"]), tuple(recipes)
            return ragged.gated_matmul(rows, gate, up, recipe=pair, activation=jnp.multiply, **options).data

        def apart(x: Array, gate: Array, up: Array, recipes: Any) -> Array:
            rows = GroupedTensor(x, sizes["m"])
            pair = zip((gate, up), recipes, strict=True)
            first, second = (ragged.matmul(rows, w, recipe=recipe, **options).data for w, recipe in pair)
            return first * second

        weights = data["rhs"], data["rhs"][::-1] * 3
        return [
            (out, pull(data["out"]))
            for out, pull in (jax.vjp(each, data["lhs"], *weights, recipes) for each in (gated, apart))
        ]

    with launches() as ran:
        compiled, rng = jax.jit(run), np.random.default_rng(1)
        for number, (data, sizes, _, past) in enumerate(both[0].inputs(4 if backend == "pallas_tpu" else 12)):
            got, want = compiled(data, sizes, (past, both[1]._past(rng)))
            _same(got, want, f"draw {number}, {sizes}")
    assert {name for name, _ in ran} == {backend}
