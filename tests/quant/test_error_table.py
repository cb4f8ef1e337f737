"""`error_table` measures what its columns say, and draws it."""

import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from ragged import ErrorTable, GroupedTensor, Recipe, error_table, quantize
from tests.cases import normal

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
NAMES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "delayed")


@pytest.mark.long
def test_definition() -> None:
    """Errors and decibels of each product and group; none for a group without a signal; what overflows and is lost."""
    x = GroupedTensor(normal((20, 64)), jnp.array([8, 0, 9], jnp.int32))
    x = x.with_data(x.data.at[8:17].multiply(jnp.exp2(-jnp.arange(9.0) * 2)[:, None]))
    w, dy = normal((3, 64, 16), 1), normal((20, 16), 2)
    past = jnp.array([[1.0], [0.0], [0.0]])  # `x` has larger values, which saturate
    delayed = Recipe(*[Recipe.preset("delayed").forward] * 3, history=past, name="past")
    table = error_table(x, w, ["tensorwise", delayed], dy=dy)
    q = quantize(x, E4M3, "tensor"), quantize(w, E4M3, "tensor")
    gradient = quantize(x.with_data(dy), E5M2, "tensor")
    rows, cotangent, wide = (np.asarray(z, np.float64)[:17] for z in (x.data, dy, q[0].dequantize().data))
    weights, quantised = (np.asarray(z, np.float64) for z in (w, q[1].dequantize().data))
    narrow = np.asarray(gradient.dequantize().data, np.float64)[:17]
    parts = [np.s_[:8], np.s_[8:8], np.s_[8:17]]
    exact = [np.concatenate([rows[s] @ m for s, m in zip(parts, weights, strict=True)])]
    got = [np.concatenate([wide[s] @ m for s, m in zip(parts, quantised, strict=True)])]
    exact.append(np.stack([rows[s].T @ cotangent[s] for s in parts]))
    got.append(np.stack([wide[s].T @ narrow[s] for s in parts]))
    for product, want, found in zip((0, 2), exact, got, strict=True):
        error = np.linalg.norm(found - want) / np.linalg.norm(want)
        np.testing.assert_allclose(table.relative_error[0, product], error, rtol=1e-4)
    np.testing.assert_allclose(table.sqnr, -20 * np.log10(table.relative_error))
    noise = got[0] - exact[0]
    by_group = [20 * np.log10(np.linalg.norm(exact[0][s]) / np.linalg.norm(noise[s])) for s in (parts[0], parts[2])]
    np.testing.assert_allclose(table.group_sqnr[0, 0, [0, 2]], by_group, rtol=1e-3)
    assert np.isnan(table.group_sqnr[0, :, 1]).all() and table.worst_group[0, 0] == (0, 2)[np.argmin(by_group)]
    lost = sum(int(np.sum(np.asarray(z.data, np.float32)[:17] == 0)) for z in q)
    np.testing.assert_allclose(table.underflow[0, 0], 100 * lost / (17 * 64 + w.size), rtol=1e-5)
    beyond = 100 * np.sum(np.abs(rows) > 1) / (17 * 64 + w.size)
    np.testing.assert_allclose(table.overflow[:, 0], [0, beyond], rtol=1e-5)
    assert all(
        name in str(table) for name in ("recipe", "forward", "dgrad", "wgrad", "tensorwise", "past", "SQNR (dB)")
    )
    assert len(str(table).splitlines()) == 7


@pytest.mark.long
def test_very_large_and_very_small_numbers() -> None:
    """A factor that is a power of two changes no error."""
    x = GroupedTensor(normal((8, 64)), jnp.array([3, 5], jnp.int32))
    w = normal((2, 64, 16), 1)
    tables = [error_table(x * factor, w, ["rowwise"]) for factor in (1.0, 2.0**66, 2.0**-70)]
    for table in tables:
        np.testing.assert_allclose(table.relative_error, tables[0].relative_error, rtol=1e-5)
    assert np.all(tables[0].relative_error > 0)


@pytest.mark.long
def test_operands() -> None:
    """A product from the left, a quantised cotangent, one matrix for all groups, zeros, NaN in a group."""
    x = GroupedTensor(normal((8, 64)), jnp.array([3, 5], jnp.int32))
    w, dy = normal((2, 64, 16), 1), x.with_data(jnp.ones((8, 16)))
    left, right = error_table(w.mT, x.mT, "tensorwise", dy=dy.mT), error_table(x, w, "tensorwise", dy=dy)
    np.testing.assert_allclose(left.sqnr, right.sqnr, rtol=1e-4)
    rounded = quantize(dy, E4M3, "row")
    same = [error_table(x, w, "tensorwise", dy=each).sqnr for each in (rounded, rounded.dequantize())]
    np.testing.assert_array_equal(same[0], same[1])
    assert error_table(x, w[0], "rowwise").group_sqnr.shape == (1, 3, 1)
    zero = error_table(x * 0, w, ["rowwise"], dy=dy)
    assert zero.worst_group[0, 0] == -1 and "none" in str(zero)
    table = error_table(x.with_data(x.data.at[4, 3].set(jnp.nan)), w, ["rowwise"], dy=dy.data)
    np.testing.assert_array_equal(table.worst_group[0, [0, 2]], [1, 1])  # a dgrad doesn't read `x`
    np.testing.assert_array_equal(table.group_sqnr[0, [0, 2], 1], [-np.inf] * 2)
    np.testing.assert_array_equal(table.relative_error[0, [0, 2]], [np.inf] * 2)
    np.testing.assert_array_equal(table.sqnr[0, [0, 2]], [-np.inf] * 2)
    assert np.isfinite(table.sqnr[0, 1]) and np.isfinite(table.group_sqnr[0, :, 0]).all()
    assert "1 (-inf)" in str(table)


def gaussian(outliers: bool) -> tuple[GroupedTensor, Array]:
    """Outliers: in one row of 8, one feature of 512 is 300 000 times as large."""
    x, w = normal((256, 4096)), normal((2, 4096, 32), 1)
    if outliers:
        x = x.at[::8, ::512].multiply(3e5)
        w = w.at[:, ::512].multiply(1 / 3e5)
    return GroupedTensor(x, jnp.array([100, 156], jnp.int32)), w


@pytest.mark.long
def test_gaussian_operands() -> None:
    """Decibels as in `docs/training.md`. With outliers, one scale for all loses what is small beside them."""
    x, w = gaussian(False)
    four_bits = error_table(x, w, ["nvfp4"]).sqnr[0]
    assert (four_bits >= 17).all() and (four_bits <= 19).all()
    names = [name for name in NAMES if name != "nvfp4"]
    table = error_table(x, w, [*names, Recipe.preset("blockwise", gradients=E5M2)])
    e5m2 = np.array([*(name in ("tensorwise", "delayed") for name in names), True])
    assert table.sqnr[:, 0].min() >= 27 and table.sqnr[~e5m2].min() >= 27
    assert table.sqnr[e5m2, 1:].min() >= 24 and table.sqnr[e5m2, 1:].max() <= 26
    assert table.overflow.max() == 0
    table = error_table(*gaussian(True), ["tensorwise", "rowwise", "blockwise", "mxfp8"])
    tensorwise, rowwise, blockwise, mxfp8 = table.sqnr[:, 0]
    assert tensorwise + 1 < rowwise < blockwise < mxfp8
    assert table.underflow[0, 0] > 10 * table.underflow[2, 0]


def table_of(group_sqnr: Any) -> ErrorTable:
    """A table of these groups' decibels, `[recipes, groups]`, for each of the three products."""
    group = np.repeat(np.asarray(group_sqnr, np.float64)[:, None], 3, axis=1)
    total = np.ones(group.shape[:2])
    return ErrorTable(NAMES[: len(group)], total, total, total, total, np.zeros(total.shape, int), group)


@pytest.mark.long
def test_a_heat_map() -> None:
    """A group of one row, which is all but exact, leaves the others their colours; no label leaves the picture."""
    pytest.importorskip("matplotlib").use("Agg")
    decibels = np.random.default_rng(0).uniform(24, 29, (5, 6))
    decibels[:, 2], decibels[1, 4], decibels[2, 5] = 141.0, -np.inf, np.nan
    ax = table_of(decibels).plot("dgrad")
    low, high = ax.images[0].get_clim()
    assert 20 < low <= 24.5 and 28.5 <= high < 40
    shown = np.asarray(ax.images[0].get_array().filled(np.nan))
    assert (shown[:, 2] > high).all() and shown[1, 4] < low and np.isnan(shown[2, 5])
    np.testing.assert_array_equal(shown[:, :2], decibels[:, :2])
    assert [t.get_text() for t in ax.get_yticklabels()] == list(NAMES[:5])
    ax.figure.canvas.draw()
    page = ax.figure.bbox
    for label in (*ax.get_yticklabels(), *ax.get_xticklabels(), ax.title, ax.xaxis.label):
        box = label.get_window_extent()
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, label
    assert table_of(decibels).plot(ax=ax) is ax
    with pytest.raises(ValueError, match="'fgrad' is not a product"):
        table_of(decibels).plot("fgrad")


def test_a_heat_map_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        table_of(np.ones((1, 2))).plot()
