"""Groups with more than two dims: `[rows, heads, head_dim]`, `[g, k, heads, head_dim]`, or ragged in both.

Their arithmetic is in `tests/contract/test_tensors.py`.
"""

# pyright: reportArgumentType=false
# Wrong calls are made on purpose.

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from tests.cases import check_error
from tests.contract.tensors import Kind
from tests.tensor.examples import groups_of

KINDS = [Kind(ragged, more=(2,), groups=4, capacity=10, width=5, extent=5) for ragged in ("", "m", "mn")]
SIZES = {"m": np.array([3, 0, 4, 1], np.int32), "n": np.array([2, 3, 0, 4], np.int32)}
Groups = list[np.ndarray]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(0.5, 2, shape).astype(np.float32)


def example(kind: Kind, seed: int = 0) -> tuple[GroupedTensor, Groups]:
    """A tensor with NaN around its groups, and these as NumPy has them."""
    sizes = {z: SIZES[z] for z in kind.ragged}
    places, values = kind.places(sizes), floats(*kind.shape, seed=seed)
    data = np.full(kind.shape, np.nan, np.float32)
    for at in places:
        data[at] = values[at]
    return kind.tensor(jnp.asarray(data), sizes), [values[at] for at in places]


def rows(*more: int, seed: int = 0, sizes: str = "m") -> GroupedTensor:
    data = floats(10, *more, seed=seed)
    data[SIZES[sizes].sum() :] = np.nan
    return GroupedTensor(jnp.asarray(data), jnp.asarray(SIZES[sizes]))


def uniform(*shape: int) -> GroupedTensor:
    return GroupedTensor(jnp.asarray(floats(4, *shape, seed=30)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_inspection(kind: Kind) -> None:
    x, groups = example(kind)
    assert x.num_groups == 4 and x.ndim == (4 if kind == KINDS[0] else 3) and x.packed_axis == kind.packed
    assert not x.is_stack and not x.is_cotangent
    assert all(np.array_equal(x[i], group) for i, group in enumerate(groups))
    assert np.array_equal(x.mask, np.isfinite(x.data))
    assert jax.tree.structure(jax.jit(lambda x: x)(x)) == jax.tree.structure(x)
    if kind.ragged:
        assert x.capacity == 10 and x.group_ids.tolist() == [0] * 3 + [2] * 4 + [3] + [4] * 2
        assert "first_dims=[3, 0, 4, 1] (8 of 10 rows)" in repr(x)
        assert x.validate().shape == jax.jit(lambda x: x.validate().data)(x).shape
        with pytest.raises(ValueError, match=r"size 4 of group 2 in `first_dims` is too large.*capacity of 6"):
            x.with_data(x.data[:6]).validate()


def test_construction() -> None:
    x, groups = example(KINDS[1])
    packed = GroupedTensor.from_list(groups, capacity=10)
    assert np.array_equal(packed.data, np.where(x.mask, x.data, 0))
    padded = x.to_padded(4, fill_value=9)
    assert padded.shape == (4, 4, 2, 5) and np.all(np.asarray(padded)[1] == 9)
    back = GroupedTensor.from_padded(padded, x.first_dims, capacity=10)
    assert np.array_equal(back.data, packed.data)
    joined = jax.jit(lambda x: ragged.concat([x, x]))(x)
    assert all(np.array_equal(a, b) for a, b in zip(groups_of(joined), groups * 2, strict=True))
    _, wide = example(KINDS[2])
    both = GroupedTensor.from_list(wide, ragged="both")
    assert all(np.array_equal(a, b) for a, b in zip(groups_of(both), wide, strict=True))
    assert np.array_equal(both.to_padded(3)[3, :1, :, :4], wide[3])


def test_route() -> None:
    """Tokens with heads go to their groups and come back; the gradient too."""
    route, tokens = ragged.route(jnp.array([[2, 0], [1, 2], [0, 7]]), 3), floats(3, 2, 4)
    weights = floats(3, 2, seed=1)

    @jax.jit
    def run(tokens: Array) -> Any:
        x = route.dispatch(tokens)
        back, pull = jax.vjp(lambda tokens: route.combine(route.dispatch(tokens), weights), tokens)
        return x.data, back, pull(back)[0], route.combine(x)

    x, back, gradient, plain = run(tokens)
    assert np.array_equal(x[:5], tokens[[0, 2, 1, 0, 1]])
    share = (weights * [[1, 1], [1, 1], [1, 0]]).sum(1)[:, None, None]
    np.testing.assert_allclose(back, tokens * share, rtol=1e-6)
    np.testing.assert_allclose(gradient, tokens * share**2, rtol=1e-5)
    np.testing.assert_allclose(plain, tokens * np.array([2, 2, 1])[:, None, None], rtol=1e-6)


SCALINGS = ("tensor", "group", "row", "column", (1, 3), (2, 3), "mx")


@pytest.mark.parametrize(
    "kind, scalings",
    [
        (KINDS[2], ("group", "column")),
        *(pytest.param(kind, SCALINGS, marks=pytest.mark.long) for kind in KINDS),
    ],
)
def test_quantize(kind: Kind, scalings: tuple[Any, ...]) -> None:
    """Each head has scales of its own, as a tensor of its own has them; "group" and "tensor" are for all."""
    x, groups = example(kind)

    @jax.jit
    def run(x: GroupedTensor) -> Any:
        heads = [x.with_data(x.data[..., head, :]) for head in range(2)]
        every = [[ragged.quantize(each, jnp.float8_e4m3fn, s) for s in scalings] for each in (x, *heads)]
        return every, [q.dequantize() for q in every[0]]

    (whole, *heads), values = run(x)
    for i, scaling in enumerate(scalings):
        for got, want in zip(groups_of(values[i]), groups, strict=True):
            np.testing.assert_allclose(got, want, rtol=0.07)
        if scaling in ("tensor", "group"):
            largest = np.array([np.abs(g).max(initial=0) for g in groups])
            largest = largest.max() if scaling == "tensor" else largest
            np.testing.assert_allclose(whole[i].scales, np.where(largest > 0, largest / 448, 1), rtol=1e-6)
            continue
        for head, one in enumerate(heads):
            assert np.array_equal(whole[i].scales[..., head, :], one[i].scales)
            assert np.array_equal(whole[i].data[..., head, :].astype(np.float32), one[i].data.astype(np.float32))


PRODUCTS = {
    "forward, rows": (rows(2, 5), uniform(5, 3)),
    "forward, weights": (rows(5), uniform(5, 2, 3)),
    "forward, both": (rows(2, 3, 5), uniform(5, 2, 2)),
    "batched": (uniform(3, 2, 5), uniform(5, 2, 2)),
    "wgrad": (rows(5, seed=20).mT, rows(2, 3)),
    "outer": (rows(2, 5), rows(5, seed=20).mT),
    "inner_rows": (example(KINDS[2])[0], rows(3, 2, sizes="n")),
}


@pytest.mark.long
def test_matmul() -> None:
    """The last dim of `lhs` is contracted with the first of the groups of `rhs`. Gradients too."""

    @jax.jit
    def run(products: dict[str, tuple[GroupedTensor, GroupedTensor]]) -> dict[str, Any]:
        def one(lhs: GroupedTensor, rhs: GroupedTensor) -> Any:
            def total(lhs_data: Array, rhs_data: Array) -> tuple[Array, GroupedTensor]:
                out = ragged.matmul(lhs.with_data(lhs_data), rhs.with_data(rhs_data))
                return jnp.sum(out.data), out

            return jax.grad(total, (0, 1), has_aux=True)(lhs.data, rhs.data)

        return {name: one(*operands) for name, operands in products.items()}

    for name, (gradients, out) in run(PRODUCTS).items():
        lhs, rhs = PRODUCTS[name]
        cotangents = [groups_of(x.with_data(d)) for x, d in zip((lhs, rhs), gradients, strict=True)]
        found = zip(groups_of(lhs), groups_of(rhs), groups_of(out), *cotangents, strict=True)
        for a, b, product, of_lhs, of_rhs in found:
            np.testing.assert_allclose(product, np.tensordot(a, b, 1), rtol=1e-5, err_msg=name)
            # Of a sum: the other one's sum over what it alone has.
            by_lhs = np.broadcast_to(b.sum(tuple(range(1, b.ndim))), a.shape)
            by_rhs = np.broadcast_to(a.sum(tuple(range(a.ndim - 1))).reshape(-1, *[1] * (b.ndim - 1)), b.shape)
            np.testing.assert_allclose(of_lhs, by_lhs, rtol=1e-5, err_msg=name)
            np.testing.assert_allclose(of_rhs, by_rhs, rtol=1e-5, err_msg=name)
        assert np.all(np.asarray(out.data)[~np.asarray(out.mask)] == 0)
        for x, d in zip((lhs, rhs), gradients, strict=True):
            assert np.all(np.asarray(d)[~np.asarray(x.mask)] == 0)


@pytest.mark.long
def test_options_of_matmul() -> None:
    """Biases and `existing_out` have the result's dims; a shared matrix, and rows that a route gathers."""
    x, w, bias = rows(2, 5), uniform(5, 3, 2), floats(4, 3, 2, seed=5)
    out = ragged.matmul(x, w, bias=bias, activation="relu", preferred_element_type=jnp.float32)
    twice = ragged.matmul(x, w, existing_out=ragged.matmul(x, w))
    shared = ragged.matmul(x, w.data[0, :, 0])
    for i, (a, b) in enumerate(zip(x, w, strict=True)):
        want = np.tensordot(a, b, 1)
        np.testing.assert_allclose(out[i], np.maximum(want + bias[i], 0), rtol=1e-5)
        np.testing.assert_allclose(twice[i], 2 * want, rtol=1e-5)
        np.testing.assert_allclose(shared[i], np.asarray(a) @ np.asarray(w.data[0, :, 0]), rtol=1e-5)
    route, tokens = ragged.route(jnp.array([2, 0, 3]), 4), floats(3, 5)
    assert np.array_equal(ragged.matmul(route.gathered(tokens), w).data, ragged.matmul(route.dispatch(tokens), w).data)
    matrices = w.with_data(w.data[..., 0])
    quick = ragged.matmul(x, ragged.quantize_weights(matrices, "rowwise"), recipe="rowwise")
    assert np.array_equal(quick.data, ragged.matmul(x, matrices, recipe="rowwise").data)


def test_errors() -> None:
    x, w = rows(2, 5), uniform(5, 3, 2)
    problem = "the last dim of `lhs` is 5 but the first dim of `rhs` is 4."
    check_error(lambda: ragged.matmul(x, w.data[:, 1:]), ValueError, problem)
    check_error(lambda: ragged.matmul(x, w.data[:3]), ValueError, "`lhs` has 4 groups but `rhs` has 3.")
    check_error(lambda: ragged.gated_matmul(rows(5), w, w), NotImplementedError, "or call `ragged.matmul`")
    with pytest.raises(ValueError, match=r"It must be None, -3 \(the groups' first dim\), -"):
        x.sum(-4)


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_stacks_and_cotangents(kind: Kind) -> None:
    """A stack is what has several rows of dims, whatever the rank of its buffer. A cotangent with dims None counts as
    uniform, but next to the tensor itself."""
    x, _ = example(kind)
    stack = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), x)  # as `jax.vmap` returns it
    assert stack.is_stack and stack.num_groups == 4 and stack.packed_axis == -3
    check_error(lambda: stack + 1, ValueError, "a stack of tensors")
    check_error(lambda: stack.mT, ValueError, "have no transpose")
    inside = np.where(x.mask, x.data, 0)
    unknown, known = (GroupedTensor(jnp.asarray(inside), *dims) for dims in ((None, None), (x.first_dims, x.last_dims)))
    known = jax.tree.map(lambda d: np.zeros(d.shape, jax.dtypes.float0) if d.ndim == 1 else d, known)
    for g in (unknown, known):
        np.testing.assert_allclose((x - g / 2).data, inside / 2)
        np.testing.assert_allclose((g / 2 - x).data, -inside / 2)
    assert known.is_cotangent and len(known) == len(x)
    check_error(known.sum, TypeError, "a cotangent or tangent")
    check_error(lambda: x + GroupedTensor(x.data[:4]), ValueError, "tensors have different structures.")
