"""Operands that are constants of the program: products have the values that they have of arguments."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jaxlib.version import __version__ as jaxlib_version

import ragged
from ragged import GroupedTensor
from ragged.core.formats import bits

AFFECTED_UP_TO = (0, 12, 0)  # 0.11.1, 0.11.2, 0.12.0 were tried


def replicated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` on each of two devices, with the same operands."""
    mesh = jax.make_mesh((2,), ("both",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())


def test_which_jaxlib_folds_a_bitcast_wrongly() -> None:
    """XLA folds the bitcast of a transposed constant in a loop as if nothing had transposed it; not that of `bits`.

    Once no supported jaxlib does, `bits` and the barrier of `ragged.backends.xla.backend.run` are needless.
    """
    w = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    def program(bits_of: Any) -> np.ndarray:
        def summed(w: Array) -> Array:
            c, zeros = w.mT, jnp.zeros((4, 3), jnp.uint32)
            return lax.fori_loop(
                0, 2, lambda i, y: y + lax.dynamic_index_in_dim(bits_of(c, jnp.uint32), i, 0, False), zeros
            )

        return np.asarray(jax.jit(lambda: replicated(summed)(jnp.asarray(w)))())

    want = w.mT.view(np.uint32).sum(0, dtype=np.uint32)
    np.testing.assert_array_equal(program(bits), want)
    is_wrong = not np.array_equal(program(lax.bitcast_convert_type), want)
    if tuple(map(int, jaxlib_version.split(".")[:3])) <= AFFECTED_UP_TO:
        assert is_wrong
    elif is_wrong:
        pytest.skip(f"jaxlib {jaxlib_version} is affected too: raise `AFFECTED_UP_TO`")


def test_every_bitcast_is_known() -> None:
    """A new one in code that a loop may hold is `formats.bits`. All others are safe for the reason that stands here."""
    found = Counter[str]()
    root = Path(ragged.__file__).parent
    for file in root.rglob("*.py"):
        found[file.relative_to(root).as_posix()] += file.read_text().count("bitcast_convert_type(")
    assert +found == {
        "core/formats.py": 1,  # `bits`
        "backends/xla/backend.py": 2,  # `run` has the barrier, before the loops
        "core/scales.py": 1,  # of what was computed
        "backends/xla/narrow.py": 8,  # `columns` has the barrier, in the loop
        "backends/gpu/backend.py": 2,  # of what was reshaped, whose layout XLA doesn't mistake
        "backends/tpu/tiled.py": 2,  # in a kernel
        "quant/quantize.py": 2,  # of what was computed
        "backends/tpu/units.py": 5,  # in a kernel
    }


K, N = 16, 24
SIZES = np.array([5, 0, 9], np.int32)


def operands(dtype: Any) -> list[np.ndarray]:
    """Rows, weights that are stored transposed, and a cotangent."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in ((16, K), (3, N, K), (16, N))]


def product(x: Array, w: Array, recipe: Any = None) -> Array:
    rows = GroupedTensor(x, jnp.asarray(SIZES))
    tiles = ragged.tuning.Configs(*[ragged.tuning.XlaConfig(m=(8,))] * 3)  # in loops, although the product is small
    return ragged.matmul(rows, w, recipe=recipe, preferred_element_type=jnp.float32, backend=tiles).data


def oracle(x: np.ndarray, w: np.ndarray, ct: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The product with `w.mT` and its gradients, group by group, in float64."""
    x, w, ct = (np.asarray(z, np.float64) for z in (x, w, ct))
    y, dx, dw = np.zeros((16, N)), np.zeros((16, K)), np.zeros((3, N, K))
    for g, end in enumerate(np.cumsum(SIZES)):
        rows = slice(end - SIZES[g], end)
        y[rows], dx[rows], dw[g] = x[rows] @ w[g].T, ct[rows] @ w[g], ct[rows].T @ x[rows]
    return y, dx, dw


def far(got: Any, want: np.ndarray) -> float:
    """The rms error, relative."""
    return float(np.sqrt(np.mean((np.asarray(got, np.float64) - want) ** 2) / np.mean(want**2)))


# Each factor of e4m3 has an rms error of at most 3.6 %, by its 4 bits; a product of two has 5.1 %.
LARGEST = {"rowwise": 0.051, "mxfp8": 0.051, None: 1e-6}


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("recipe, dtype", [("rowwise", jnp.float32), (None, jnp.float8_e4m3fn)])
def test_weights_closed_over(recipe: Any, dtype: Any, in_loop: bool) -> None:
    """Within `shard_map`, and in a loop there: those that a recipe casts, and those of 8 bits, seen through `mT`, as
    are the rows then."""
    x, w, ct = operands(dtype)

    def run(given: Array) -> Array:
        turned = jnp.asarray(w.mT) if recipe else jnp.asarray(w).mT
        rows = given if recipe else jnp.asarray(x.T.copy()).mT
        if not in_loop:
            return product(rows, turned, recipe)
        return lax.fori_loop(0, 2, lambda i, y: y + product(rows, turned, recipe) / 2, jnp.zeros((16, N)))

    assert far(jax.jit(replicated(run))(x), oracle(x, w, ct)[0]) < LARGEST[recipe]


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_gradients_of_weights_closed_over(recipe: str) -> None:
    """Bit for bit those of arguments, and as close to float64 as the recipe's numbers are."""
    given = operands(np.float32)

    @replicated
    def run(x: Array, w: Array, ct: Array) -> Any:
        y, pull = jax.vjp(lambda x, w: product(x, w.mT, recipe), x, w)
        return y, *pull(ct)

    got = jax.jit(lambda: run(*map(jnp.asarray, given)))()
    for mine, of_arguments, want in zip(got, jax.jit(run)(*given), oracle(*given), strict=True):
        np.testing.assert_array_equal(mine, of_arguments)
        assert far(mine, want) < LARGEST[recipe]


def test_rows_closed_over() -> None:
    """Rows that are constants, moved by sizes or ids that differ between the devices of a `shard_map`."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    data, sizes = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([[2, 4], [5, 1]], np.int32)
    ids = np.array([[1, 0, 1, 0, 0, 1], [0, 0, 0, 1, 0, 1]], np.int32)
    w = np.stack([np.eye(2, dtype=np.float32)] * 2)

    def run(sizes: Array, ids: Array) -> Any:
        route = ragged.route(ids[0], 2)
        last = GroupedTensor(data, sizes[0]).rows(-1, None)
        rows = route.gathered(jnp.asarray(data))
        dw = jax.grad(lambda w: jnp.sum(ragged.matmul(rows, w, recipe="rowwise").data))(jnp.asarray(w))
        moved = (last.data, route.dispatch(data).data, ragged.matmul(rows, w).data, dw)
        return jax.tree.map(lambda out: out[None], moved)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    last, dispatched, gathered, dw = jax.jit(mapped)(sizes, ids)
    np.testing.assert_array_equal(last, np.stack([data[np.cumsum(each) - 1] for each in sizes]))
    want = np.stack([data[np.argsort(each, kind="stable")] for each in ids])
    np.testing.assert_array_equal(dispatched, want)
    np.testing.assert_array_equal(gathered, want)
    total = np.stack([sum(data[each == group].sum(0) for each in ids) for group in range(2)])  # over both devices
    np.testing.assert_allclose(dw[0], np.broadcast_to(total[:, :, None], (2, 2, 2)), rtol=2**-4)
