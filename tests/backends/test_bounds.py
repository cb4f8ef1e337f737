"""Sizes that no buffer has room for, on kernels whose interpreters check each address: nothing is read or written that
lies outside of an array, and what doesn't fit is dropped.

Every einsum that a layout or a derivative of it comes to, in each order in which its terms may be stored. Extents are
multiples of the tiles, for which kernels leave masks out.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from ragged.backends.base import Target
from ragged.core.scales import Scales
from ragged.product.layout import NAMES
from tests import gpu, products
from tests.cases import split
from tests.contract import loop
from tests.contract.loop import Arrays, Term

GROUPS = 3
INTERPRETERS = {"triton_gpu": True, "pallas_tpu": pltpu.InterpretParams()}  # the TPU's `True` checks no addresses
TILES = {"triton_gpu": 16, "pallas_tpu": 128}

SIZES: dict[str, Callable[[int], list[int]]] = {  # of a letter, for tiles of `t` and buffers of a few tiles
    "too large": lambda t: [2 * t, t + 3, 5 * t],
    "negative": lambda t: [-t - 1, 3 * t, -(2**31)],
    "wrapping around": lambda t: [2**31 - 1, 2**31 - t, 5],
    "wrapping around later": lambda t: [t + 1, 2**30, 2**30 + 2**29],
}


Axes = tuple[str, str, str]


def orders(term: str, ragged: str) -> list[str]:
    """In which orders a term may be stored: a ragged letter first."""
    return [each for each in (term, term[::-1]) if each[0] in ragged or not set(term) & set(ragged)]


EINSUMS: list[tuple[str, Axes]] = [
    (ragged, (lhs, rhs, out))
    for ragged in filter(None, NAMES)
    for lhs in orders("mk", ragged)
    for rhs in orders("kn", ragged)
    for out in orders("mn", ragged)
]
PACK_K = [  # an operand packs the contracted letter, and has another ragged one
    (ragged, axes) for ragged, axes in EINSUMS if any(z[0] == "k" and {*z} <= {*ragged} for z in axes)
]


def term(letters: str, ragged: str, widths: dict[str, int], tile: int) -> Term:
    """It packs 3 tiles; `widths` are tiles of the letters that it doesn't pack."""
    mine = "".join(z for z in letters if z in ragged)
    shape = [3 * tile if z in mine[:1] else widths[z] * tile for z in letters]
    return Term(letters, mine, mine[:1], tuple(shape if mine else [GROUPS, *shape]))


def with_nan(of: Term, data: np.ndarray, sizes: Arrays) -> np.ndarray:
    """The buffer with NaN around the groups."""
    out = np.full_like(data, np.nan)
    for at in loop.places({"": of}, sizes, GROUPS)[""]:
        out[at] = data[at]
    return out


def scales(of: Term, sizes: Arrays) -> Scales:
    """2 for each element along the axis that isn't contracted; NaN for a group with nothing along `k`, which is."""
    if of.letters[0] != "k":
        return Scales(jnp.full((of.shape[0], 1), 2.0), (1, None))
    values = np.full((GROUPS, of.shape[1]), 2.0, np.float32)
    along = [at[0] for at in loop.places({"": of}, sizes, GROUPS)[""] if at]
    values[[at.start == at.stop for at in along]] = np.nan
    return Scales(jnp.asarray(values), (None, 1))


def check(backend: str, ragged: str, axes: Axes, is_scaled: bool = False) -> None:
    """The product of one program, for each kind of sizes: of the elements of each group that all buffers hold."""
    tile, rng = TILES[backend], np.random.default_rng(0)
    narrow = {z: 1 if z in ragged else 2 for z in "mn"} | {"k": 3}  # of operands; the result has room for more
    widths = (narrow, narrow, {"m": 2, "n": 2})
    each = (term(letters, ragged, of, tile) for letters, of in zip(axes, widths, strict=True))
    terms: dict[str, Term] = dict(zip(("lhs", "rhs", "out"), each, strict=True))
    x, y = (rng.integers(-4, 5, terms[name].shape).astype(np.float32) for name in ("lhs", "rhs"))
    target = Target(interpret=INTERPRETERS[backend])
    options: dict[str, Any] = {"tiling": (tile,) * 3, "preferred_element_type": np.float32, "target": target}

    @jax.jit
    def run(x: Array, y: Array, sizes: dict[str, Array], scales: dict[str, Any]) -> Array:
        return products.product(backend, x, y, sizes, axes, terms["out"].shape, **options, **scales)

    for kind in SIZES.values():
        sizes = {z: np.roll(np.array(kind(tile), np.int32), i) for i, z in enumerate("mkn") if z in ragged}
        own = {f"{name}_scales": scales(terms[name], sizes) for name in ("lhs", "rhs")} if is_scaled else {}
        got = run(with_nan(terms["lhs"], x, sizes), with_nan(terms["rhs"], y, sizes), sizes, own)
        where, want = loop.places(terms, sizes, GROUPS), np.zeros(terms["out"].shape)
        for a, b, c in zip(*where.values(), strict=True):
            want[c] = np.einsum(f"{axes[0]},{axes[1]}->{axes[2]}", x[a].astype(np.float64), y[b])
        np.testing.assert_array_equal(got, 4 * want if is_scaled else want)


@pytest.mark.parametrize("ragged, axes", split(EINSUMS[::3], EINSUMS[1::3]), ids=str)
def test_on_a_gpu(ragged: str, axes: Axes) -> None:
    """One kernel for all, with masks where a letter isn't packed."""
    gpu.needs_triton()
    check("triton_gpu", ragged, axes)


@pytest.mark.parametrize("ragged, axes", split(PACK_K[:1], PACK_K[1:]), ids=str)
def test_scales_on_a_gpu(ragged: str, axes: Axes) -> None:
    """Scales are read for each tile of the result; where there is nothing to multiply, they may be NaN."""
    gpu.needs_triton()
    check("triton_gpu", ragged, axes, is_scaled=True)


@pytest.mark.long
@pytest.mark.parametrize("ragged, axes", EINSUMS[::3], ids=str)
def test_on_a_tpu(ragged: str, axes: Axes) -> None:
    check("pallas_tpu", ragged, axes)


@pytest.mark.long
def test_scales_on_a_tpu() -> None:
    """In a wgrad, the scales of a group without rows may be NaN."""
    check("pallas_tpu", "k", ("km", "kn", "mn"), is_scaled=True)
