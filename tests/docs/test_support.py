"""`docs/support.md` says what is planned; and that is what runs, and right: some of each layout and transformation."""

import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragged import GroupedTensor
from tests import cases, gpu, ones, oracle, ran, support
from tests.cases import LETTERS, NAMES

pytestmark = pytest.mark.long

ON = {"pallas_tpu": "v5e", "triton_gpu": "L4", "xla": "CPU"}  # whose kernels `ran.interpreted` takes
# Largest error relative to the largest element: a result's rounding, four times where it is a sum; of recipes, that of
# 8 and 4 bits.
TOLERANCE = {"value": 1, "`vmap`": 1, "`vmap`, sizes too": 1}
RECIPES = dict.fromkeys(support.RECIPES, 0.1) | {"nvfp4": 0.4}


def test_the_page_is_what_is_planned(tmp_path: Path) -> None:
    """What runs on which device; written anew and compared. Mend it with `python -m tests.support`."""
    pages = support.PAGE, support.WEIGHTS_PAGE
    written = [tmp_path / page.name for page in pages]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-m", "tests.support", *map(str, written)], env=environment, check=True)
    assert [each.read_text() for each in written] == [page.read_text() for page in pages]


def formats(what: str, backend: str) -> list[str]:
    """Those that a backend's kernels have in a transformation, by the page; of GPUs, since they have fp8."""
    section = support.PAGE.read_text().partition(f": `{backend}`")[2].partition("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    column = 2 + [*support.TRANSFORMATIONS].index(what)
    return [row[0] for row in rows if len(row) > 1 and row[1] in ("all", "H200, B200") and row[column][0] in "●◐"]


@pytest.mark.parametrize("number, layout", [*enumerate(NAMES)])
def test_what_is_planned_runs(number: int, layout: str) -> None:
    """A backend, a transformation and a format for each layout; over all layouts, each backend and transformation."""
    backend = [*ON][number % 3]
    if backend == "triton_gpu":
        gpu.needs_triton()
    i, j = NAMES.index(layout), [*ON].index(backend)
    what = [*support.TRANSFORMATIONS][(i + j) % len(support.TRANSFORMATIONS)]
    choice = formats(what, backend)
    name = choice[(4 * i + 5 * j) % len(choice)]
    with (
        nullcontext() if backend == "xla" else ran.interpreted(backend) as launches,
        jax.enable_x64(name == "`float64`"),
    ):
        check(layout, backend, what, name, launches)


def check(layout: str, backend: str, what: str, name: str, launches: ran.Launches | None) -> None:
    case = cases.make(layout, g=3, capacity=24, uniform=(8, 16, 8))
    format, letters, rng = support.FORMATS[name], LETTERS[layout], np.random.default_rng(1)
    scaled = 4 if "int" in name else 1
    lhs, rhs = format.operands(case.lhs * scaled, case.rhs * scaled)
    out = jax.eval_shape(format.product, lhs, rhs).data

    def groups(term: str, buffer: Any) -> oracle.Groups:
        is_ragged = (term[0] in letters, term[1] in letters)
        sizes = [case.sizes[letter].tolist() for letter in term]
        return [np.asarray(g, np.float64) for g in oracle.unpack(np.asarray(buffer), is_ragged, sizes[0], sizes[1])]

    def tangent(term: str, like: Any) -> tuple[Any, oracle.Groups]:
        is_ragged = (term[0] in letters, term[1] in letters)
        sizes = zip(*(case.sizes[letter].tolist() for letter in term), strict=True)
        values = [rng.standard_normal(shape).astype(jnp.bfloat16).astype(np.float32) for shape in sizes]
        buffer = jnp.asarray(oracle.pack(values, is_ragged, like.shape)).astype(like.dtype)
        return buffer, groups(term, buffer)

    def values(term: str, x: GroupedTensor) -> oracle.Groups:
        return groups(term, (x.dequantize() if x.is_quantized else x).data)

    a, b = values("mk", lhs), values("kn", rhs)
    (va, ga), (vb, gb), (dy, gy) = tangent("mk", lhs.data), tangent("kn", rhs.data), tangent("mn", out)
    turned_a, turned_b, turned_ga, turned_gb = ([x.T for x in each] for each in (a, b, ga, gb))
    product = oracle.matmul(a, b)
    wanted: dict[str, list[tuple[str, oracle.Groups]]] = {
        "value": [("mn", product)],
        "`jvp`": [("mn", [x + y for x, y in zip(oracle.matmul(ga, b), oracle.matmul(a, gb), strict=True)])],
        "`grad`": [("mk", oracle.matmul(gy, turned_b)), ("kn", oracle.matmul(turned_a, gy))],
        "`grad` of `grad`": [("mk", oracle.matmul(gy, turned_gb)), ("kn", oracle.matmul(turned_ga, gy))],
        "`vmap`": [("mn", product), ("mn", product)],
        "`vmap`, sizes too": [("mn", product), ("mn", product)],
    }
    args = lhs, rhs, support.Like(va, vb, dy)
    fn = partial(support.TRANSFORMATIONS[what], format.product)
    expected = support.planned(fn, args, [ON[backend]])[ON[backend]]
    program = jax.jit(fn).lower(*args).compile({"xla_backend_optimization_level": 0})
    if launches is None:
        assert expected == "xla"
        got = program(*args)
    else:
        with ran.only(expected, launches):
            got = jax.block_until_ready(program(*args))
    recipe = name.partition("recipe `")[2].rstrip("`")
    buffers = got if isinstance(got, tuple | list) else [*got] if "vmap" in what else [got]
    for (term, want), buffer in zip(wanted[what], buffers, strict=True):
        worst = RECIPES.get(recipe) or TOLERANCE.get(what, 4) * cases.TOLERANCE[buffer.dtype.name][0]
        oracle.assert_close(groups(term, buffer), want, max=worst)


@pytest.mark.parametrize(
    "number, format", [*enumerate([name for name in ones.FORMATS_WITH_ONES if "recipe" not in name][::2])]
)
def test_extents_of_one_are_computed(number: int, format: str) -> None:
    """1, 2 and 3 in any letter, by kernels where they are planned; a backend, a layout and an order of storage each."""
    backend = ("pallas_tpu", "triton_gpu")[number % 2]
    if backend == "triton_gpu":
        gpu.needs_triton()
    (case,) = ones.cases(format, 1, seed=[*ON].index(backend))
    plans = support.planned(case.product, case.avals, [ON[backend]])[ON[backend]]
    with ran.interpreted(backend) as launches, ran.only(plans, launches):
        ones.check(case)
