"""A `recipe` is `quantize` of each operand along what its product contracts, then `matmul`: the same bits.

A program has a product with a recipe and its derivatives, and the same from public calls without one. It is compiled
once, and runs on many draws of sizes, contents and histories.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor, Recipe
from tests import gpu, tpu
from tests.cases import LETTERS, named
from tests.contract.draws import values
from tests.contract.launches import launches
from tests.contract.programs import Program
from tests.contract.recipes import PRESETS, RECIPES, Quantised, same

SMALL: dict[str, Any] = {"tiles": (16, 16, 16), "k": 36, "n": 20}  # one height of tiles: compiled faster
KERNEL: dict[str, Any] = {"backend": "pallas_tpu", "k": 36, "n": 20}
Case = tuple[int, Quantised]


def by_default() -> Iterator[Case]:
    yield 30, Quantised("mixed", Program("forward", held=3, existing=True, **SMALL))


def long() -> Iterator[Case]:
    yield 4, Quantised("mxfp8", Program("forward", held=3, existing=True, **KERNEL))
    yield 6, Quantised("int8 rows", Program("forward", held=3, chip="v5e", existing=True, **KERNEL))  # in the kernel
    yield 3, Quantised("int8 rows", Program("forward", "bfloat16", chip="v6e", context="vmap", **KERNEL))
    # Several tiles of the contracted dim, in which no row is whole; blocks of the matrices' scales.
    deep: dict[str, Any] = {"backend": "pallas_tpu", "chip": "v5e", "k": 300, "n": 20}
    yield 3, Quantised("int8 rows", Program("forward", tiles=(128, 128, 128), **deep))
    yield 3, Quantised("int8 rows and blocks", Program("forward", **deep))
    yield 30, Quantised("blockwise", Program("wgrad", **SMALL))
    yield 30, Quantised("delayed", Program("forward_left", **SMALL))
    yield 20, Quantised("rounded", Program("batched", shared="rhs", **SMALL))
    of_kernels = "int8 rows", "int8 rows and blocks", "powers of two"
    names = [name for name in (*PRESETS, *RECIPES) if name not in of_kernels]
    for name, layout in zip(names, itertools.cycle(LETTERS), strict=False):
        yield 20, Quantised(name, Program(layout, **SMALL))
    for layout in ("forward", "wgrad"):
        yield 10, Quantised("delayed" if layout == "wgrad" else "mixed", Program(layout, order=2, **SMALL))
    for layout, last in (("inner_rows", "lhs"), ("ragged", "rhs")):
        yield 20, Quantised("mixed", Program(layout, packed_last=last, **SMALL))
    for i, context in enumerate(("vmap", "scan", "eager", "checkpoint")):
        name = ("mxfp8", "delayed", "fixed")[i % 3]
        yield 9, Quantised(name, Program("forward", context=context, **SMALL))
    shared = itertools.cycle((("forward", "rhs"), ("forward_left", "lhs"), ("batched", "rhs")))
    for name in ("blockwise", "delayed", "mixed"):
        layout, operand = next(shared)
        yield 20, Quantised(name, Program(layout, "bfloat16", shared=operand, **SMALL))
    yield 20, Quantised("fixed", Program("forward", "bfloat16", **SMALL))
    yield 20, Quantised("mixed", Program("wgrad", held=3, existing=True, **SMALL))
    yield 5, Quantised("delayed", Program("forward", capacity=0, **SMALL))
    wide: dict[str, Any] = {"capacity": 150, "k": 160, "n": 140}  # blocks of 128, the last one partial
    for name, layout in (("powers of two", "forward"), ("blockwise", "wgrad")):
        yield 5, Quantised(name, Program(layout, backend="pallas_tpu", **wide))
    for name, layout in (("mxfp8", "wgrad"), ("mixed", "outer")):
        yield 2, Quantised(name, Program(layout, backend="triton_gpu", chip=gpu.FIRST_WITH_FP8, **wide))


@pytest.mark.parametrize("count, product", named(by_default()))
def test_recipes(count: int, product: Quantised) -> None:
    product.check(count)


@pytest.mark.long
@pytest.mark.parametrize("count, product", named(long()))
def test_more_recipes(count: int, product: Quantised) -> None:
    product.check(count)


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [["int8 rows", "rowwise", "delayed"], ["tensorwise", "blockwise"], ["mxfp8", "nvfp4", "mixed"]],
    ids=" ".join,
)
def test_gathered_rows(names: list[str]) -> None:
    """The bits of dispatched rows, and the same next history, for any ids. Tokens of no group count for no scale."""
    groups, tokens = 4, 20
    recipes = [Quantised(name, Program("forward")).recipe for name in names]

    def run(ids: Array, x: Array, w: Array, ct: Array) -> Any:
        route, found = ragged.route(ids, groups), []
        for rows, recipe in itertools.product((route.gathered, route.dispatch), recipes):

            def product(x: Array, w: Array, recipe: Recipe, rows: Any = rows) -> list[Array]:
                its = rows(x)
                out = [ragged.matmul(its, w, recipe=recipe)]
                if recipe.history is None:  # which belongs to one product
                    out.append(ragged.gated_matmul(its, w, w[:, ::-1], recipe=recipe))
                return [each.data for each in out]

            out, pull = jax.vjp(product, x, w, recipe.unsealed())
            found.append((out, pull([ct] * len(out))))
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
        same(got, want, f"draw {number}, {ids.tolist()}")


@pytest.mark.long
@pytest.mark.parametrize(
    "gate, up, backend",
    [
        ("mixed", "rowwise", "xla"),
        ("rowwise", "rows", "pallas_tpu"),
        ("blockwise", "blockwise", "pallas_tpu"),
        ("delayed", "delayed", "xla"),
        ("int8 rows", "int8 rows", "pallas_tpu"),
    ],
)
def test_gated_products(gate: str, up: str, backend: str) -> None:
    """The products of a gate are those of its recipes, bit for bit, with any histories."""
    k, n = (256, 128) if gate == "blockwise" else (36, 20)
    program = Program("forward", backend=backend, k=k, n=n)
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

    with launches() as ran, tpu.on("v5e"):
        compiled, rng = jax.jit(run), np.random.default_rng(1)
        for number, (data, sizes, _, past) in enumerate(both[0].inputs(4 if backend == "pallas_tpu" else 12)):
            got, want = compiled(data, sizes, (past, both[1]._past(rng)))
            same(got, want, f"draw {number}, {sizes}")
    assert {name for name, _ in ran} == {backend}
