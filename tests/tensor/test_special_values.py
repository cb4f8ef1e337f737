"""NaN, infinities and empty groups in softmax and in every reduction: as JAX and NumPy have them, in each group alone.

The oracle of a value is NumPy, in float64, group by group; of a reduction's gradient, JAX's own of the group as an
array. The buffer holds NaN where no group has an element.
"""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from ragged import GroupedTensor
from ragged.tensor import arithmetic
from tests.tensor.test_arithmetic import EMPTY, NUMPY, reduced, softmax
from tests.tensor.test_tensor import KINDS, Example, example

pytestmark = pytest.mark.sampled

# Which values of a row are replaced, in one group of the example that has rows and columns.
SPECIAL = {
    "NaN": [np.nan],
    "inf": [np.inf],
    "-inf": [-np.inf],
    "both infinities": [np.inf, -np.inf],
    "NaN and inf": [np.inf, np.nan],
    "all -inf": [-np.inf] * 4,
    "all NaN": [np.nan] * 4,
}


def with_special(e: Example, values: list[float], axis: int = -1) -> Example:
    """An example, where a row (with `axis=-2` a column) of the first group begins with `values`."""
    groups = [g.copy() for g in e.groups]
    first = np.moveaxis(groups[0], axis, -1)
    n = min(len(values), first.shape[1])
    first[1, :n] = values[:n]
    return Example(e.with_data(e.pack(groups, np.nan)), groups, e.places)


def check_softmax(e: Example, axis: int, out: Any, gradient: Any, cotangent: np.ndarray) -> None:
    """Of each group `p = softmax(x)`, and `p (c - sum(p c))`; zeros elsewhere."""
    with np.errstate(invalid="ignore"):
        want = [softmax(g, axis) for g in e.groups]
    np.testing.assert_allclose(out, e.pack(want), rtol=2e-6)
    want = [p * (c - (p * c).sum(axis, keepdims=True)) for p, c in zip(want, e.unpack(cotangent), strict=True)]
    np.testing.assert_allclose(gradient, e.pack(want), atol=2e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_softmax(kind: str) -> None:
    """NaN or infinity in a row makes that row NaN, as a row of -inf alone does: values and gradients; no other row.
    The same for columns."""
    e = example(kind)
    cotangent = np.cos(np.arange(e.tensor.data.size, dtype=np.float32)).reshape(e.tensor.shape)

    @partial(jax.jit, static_argnums=1)
    def run(data: Array, axis: int) -> tuple[Array, Array]:
        out, pull = jax.vjp(lambda data: e.with_data(data).softmax(axis).data, data)
        return out, pull(jnp.asarray(cotangent))[0]

    for axis, (name, values) in itertools.product((-1, -2), SPECIAL.items()):
        clean, special = run(e.tensor.data, axis), with_special(e, values, axis)
        got = run(special.tensor.data, axis)
        check_softmax(special, axis, got[0], got[1], cotangent)
        row = np.zeros(e.tensor.shape, bool)
        np.moveaxis(row[e.places[0]], axis, -1)[1] = True
        assert np.all(np.isnan(np.asarray(got[0])[row])) == (name != "-inf")
        for a, b in zip(got, clean, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[~row], np.asarray(b)[~row])


def test_causal_softmax() -> None:
    """NaN where a row sees NaN, or only -inf; zero where it doesn't see, in rows of NaN too."""
    data = np.array([[1, 2, 3], [np.nan, 2, 3], [-np.inf, -np.inf, np.inf]], np.float32)
    want = np.array([[1, 0, 0], [np.nan, np.nan, 0], [np.nan] * 3], np.float32)
    size = jnp.array([3], jnp.int32)
    kinds = {"rows": (size, None), "columns": (None, size), "both": (size, size)}

    @jax.jit
    def run(data: Array) -> dict[str, Array]:
        return {kind: GroupedTensor(data, *dims).softmax(causal=True).data for kind, dims in kinds.items()}

    for kind, out in run(jnp.asarray(data)).items():
        np.testing.assert_array_equal(out, want, err_msg=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_reductions(kind: str) -> None:
    """As NumPy's of each group: NaN wherever there is one, infinities as sums and comparisons have them. A group, row
    or column without elements gives the default that the docstrings state."""
    e = example(kind)

    @jax.jit
    def run(x: GroupedTensor) -> Any:
        return {name: [getattr(x, name)(axis) for axis in (None, -1, -2)] for name in NUMPY}

    for values in SPECIAL.values():
        special = with_special(e, values)
        for name, results in run(special.tensor).items():
            for axis, got in zip((None, -1, -2), results, strict=True):
                with np.errstate(invalid="ignore"):
                    want = reduced(special, name, axis, EMPTY[name])
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8, err_msg=f"{name} {axis} {values}")


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_reductions(kind: str) -> None:
    """JAX's own, where a group holds NaN or infinities, and in the others. One difference: where all elements are -inf,
    the gradient of `logsumexp` is zero."""
    e = example(kind)
    axes = (None, -1, -2)
    # One operation after another: in one program, XLA takes 0 × NaN in JAX's derivative of a NaN maximum for 0.
    own = {name: getattr(jnp, name, jax.nn.logsumexp) for name in NUMPY}
    of_group = {name: lambda g, name=name: [derivative(own[name], g, a) for a in axes] for name in NUMPY}

    @jax.jit
    def run(data: Array) -> Any:
        return {
            name: [derivative(lambda d, a, name=name: getattr(e.with_data(d), name)(a), data, a) for a in axes]
            for name in NUMPY
        }

    for values in SPECIAL.values():
        special = with_special(e, values)
        for name, results in run(special.tensor.data).items():
            want = [of_group[name](g) if g.size else [g] * 3 for g in special.groups]
            if name == "logsumexp":
                want = [
                    [np.where(np.all(g == -np.inf, a, keepdims=True), 0, w) for a, w in zip(axes, each, strict=True)]
                    for each, g in zip(want, special.groups, strict=True)
                ]
            for got, groups in zip(results, zip(*want, strict=True), strict=True):
                np.testing.assert_allclose(got, e.pack([np.asarray(g) for g in groups]), atol=1e-6, err_msg=name)


def derivative(reduce: Any, data: Array, axis: int | None) -> Array:
    return jax.grad(lambda data: jnp.sum(reduce(data, axis)))(data)


def test_gradients_of_largest_values() -> None:
    """NaN in all of a group that holds NaN; a tie is shared by all that are the largest, and by nothing masked."""
    columns = jnp.array([2, 1, 2], jnp.int32)
    data = np.array([[1, np.nan, 9], [-np.inf, 9, 9], [5, 5, 9], [2, 5, 9]], np.float32)
    x = GroupedTensor(jnp.asarray(data), jnp.array([1, 1, 2], jnp.int32), columns)
    nan = np.nan
    want = np.array([[nan, nan, 0], [1, 0, 0], [1 / 3, 1 / 3, 0], [0, 1 / 3, 0]], np.float32)
    gradient = jax.jit(lambda data: jax.grad(lambda data: jnp.sum(x.with_data(data).max()))(data))
    np.testing.assert_allclose(gradient(x.data), want, rtol=1e-6)


def test_the_largest_is_no_part_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the softmax of packed columns: what is subtracted from all of a row changes nothing."""

    @partial(jax.custom_jvp, nondiff_argnums=(1, 2))
    def extreme(x: GroupedTensor, name: str, axis: int | None) -> Array:
        return arithmetic._extreme_value(x, name, axis)

    @extreme.defjvp
    def _(*_: Any) -> Any:
        raise AssertionError("differentiated")

    monkeypatch.setattr(arithmetic, "_extreme", extreme)
    x = GroupedTensor(jnp.ones((2, 4)), None, jnp.array([3], jnp.int32))
    with pytest.raises(AssertionError, match="differentiated"):
        jax.eval_shape(jax.grad(lambda data: jnp.sum(x.with_data(data).max())), x.data)
    jax.eval_shape(jax.grad(lambda data: jnp.sum(x.with_data(data).softmax().data)), x.data)
