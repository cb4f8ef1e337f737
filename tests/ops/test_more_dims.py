"""Groups with more than two dims: `[rows, heads, head_dim]`, `[g, k, heads, head_dim]`, or ragged in both."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from tests.cases import check_error

SIZES, WIDTHS = (3, 0, 4, 1), (2, 3, 0, 4)
STARTS = np.cumsum([0, *SIZES])
CAPACITY, KINDS = 10, ("uniform", "ragged rows", "ragged both")
MORE = {"one more": (2,), "two more": (2, 3)}
Groups = list[np.ndarray]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(0.5, 2, shape).astype(np.float32)


def ints(*sizes: int) -> Array:
    return jnp.array(sizes, jnp.int32)


def pack(groups: Groups, kind: str, fill: float = np.nan) -> np.ndarray:
    """The groups in a buffer, `fill` around them."""
    if kind == "uniform":
        return np.stack(groups)
    last = max(g.shape[-1] for g in groups) + (kind == "ragged both")
    data = np.full((CAPACITY, *groups[0].shape[1:-1], last), fill, groups[0].dtype)
    for start, group in zip(STARTS, groups, strict=False):
        data[start : start + len(group), ..., : group.shape[-1]] = group
    return data


def example(kind: str, more: tuple[int, ...] = (2,)) -> tuple[GroupedTensor, Groups]:
    """A tensor with NaN around its groups, and these as NumPy has them."""
    firsts = (3, 3, 3, 3) if kind == "uniform" else SIZES
    lasts = WIDTHS if kind == "ragged both" else (5, 5, 5, 5)
    groups = [floats(m, *more, n, seed=i) for i, (m, n) in enumerate(zip(firsts, lasts, strict=True))]
    dims = (None if kind == "uniform" else ints(*firsts), ints(*lasts) if kind == "ragged both" else None)
    return GroupedTensor(jnp.asarray(pack(groups, kind)), *dims), groups


def assert_groups(x: GroupedTensor, want: Groups, kind: str, rtol: float = 1e-6) -> None:
    """These groups, and zeros around them."""
    np.testing.assert_allclose(x.data, pack([np.asarray(g, np.float32) for g in want], kind, 0), rtol=rtol)


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
@pytest.mark.parametrize("kind", KINDS)
def test_inspection(kind: str, more: tuple[int, ...]) -> None:
    x, groups = example(kind, more)
    assert (x.kind, x.num_groups, x.ndim) == (kind, 4, len(more) + (3 if kind == "uniform" else 2))
    assert x.packed_axis == (None if kind == "uniform" else -2 - len(more))
    assert not x.is_stack and not x.is_cotangent
    for i, group in enumerate(groups):
        assert np.array_equal(x[i], group)
    inside = pack([np.ones(g.shape, bool) for g in groups], kind, 0)
    assert np.array_equal(x.mask, inside)
    if kind != "uniform":
        assert x.capacity == CAPACITY and x.group_ids.shape == (CAPACITY,)
        assert "first_dims=[3, 0, 4, 1] (8 of 10 rows)" in repr(x)
        assert x.validate().shape == jax.jit(lambda x: x.validate().data)(x).shape
        with pytest.raises(ValueError, match=r"size 4 of group 2 in `first_dims` is too large.*capacity of 6"):
            x.with_data(x.data[:6]).validate()
    assert jax.tree.structure(jax.jit(lambda x: x)(x)) == jax.tree.structure(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_arithmetic(kind: str) -> None:
    x, groups = example(kind)
    assert_groups(2 * x - x / 4 + 1, [1.75 * g + 1 for g in groups], kind)
    assert_groups(x * x, [g * g for g in groups], kind)
    assert_groups(x.map(jnp.exp), [np.exp(g) for g in groups], kind)
    values = floats(4, seed=7)
    assert_groups(x * ragged.per_group(values), [g * v for g, v in zip(groups, values, strict=True)], kind)
    if kind != "ragged both":
        each = floats(4, *groups[0].shape[1:], seed=8) if kind == "ragged rows" else floats(4, *groups[0].shape, seed=8)
        assert_groups(x + ragged.per_group(each), [g + v for g, v in zip(groups, each, strict=True)], kind)
    for dims in (1, 2):  # rows; rows and heads
        of_rows = [floats(*g.shape[:dims], seed=9) for g in groups]
        value = np.full((*x.shape[: dims + (kind == "uniform")],), np.nan, np.float32)
        if kind == "uniform":
            value = np.stack(of_rows)
        else:
            value[: STARTS[-1]] = np.concatenate(of_rows)
        want = [g * v.reshape(*v.shape, *[1] * (3 - dims)) for g, v in zip(groups, of_rows, strict=True)]
        assert_groups(x * ragged.per_row(value), want, kind)
    for axis, sink in itertools.product((-3, -2, -1), (None, 0.5)):
        of_sink = 0 if sink is None else np.exp(sink)
        want = [np.exp(g) / (np.exp(g).sum(axis, keepdims=True) + of_sink) if g.size else g for g in groups]
        assert_groups(x.softmax(axis, sink=sink), want, kind, rtol=1e-5)


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "logsumexp"])
@pytest.mark.sampled
def test_reductions(name: str, kind: str, more: tuple[int, ...]) -> None:
    """Of all of a group, of its first dim, and of each of the others; `empty` where there is nothing."""
    x, groups = example(kind, more)

    def of(values: np.ndarray, axis: Any = None) -> Any:
        if not values.size:
            return np.full(np.sum(values, axis).shape, -7.0)
        return np.log(np.sum(np.exp(values), axis)) if name == "logsumexp" else getattr(values, name)(axis)

    rank = len(more) + 2
    got = getattr(x, name)(empty=-7)
    np.testing.assert_allclose(got, [of(g) for g in groups], rtol=1e-5)
    for axis in range(-rank, 0):
        got = np.asarray(getattr(x, name)(axis, empty=-7))
        for i, g in enumerate(groups):
            if kind == "uniform":
                mine = got[i]
            elif axis == -rank:  # one row a group
                mine = got[i][..., : g.shape[-1]]
            else:
                mine = got[STARTS[i] : STARTS[i + 1]]
                mine = mine if axis == -1 else mine[..., : g.shape[-1]]
            np.testing.assert_allclose(mine, of(g, axis), rtol=1e-5)
        if kind != "uniform" and axis != -rank:
            assert np.all(got[STARTS[-1] :] == -7)
    with pytest.raises(ValueError, match=rf"It must be None, {-rank} \(the groups' first dim\), -"):
        x.sum(-rank - 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_gradients_of_arithmetic(kind: str) -> None:
    """NaN around the groups reaches none."""
    x, groups = example(kind)

    def loss(data: Array) -> Array:
        y = x.with_data(data)
        return jnp.sum((y * y / ragged.per_group(y.max(empty=1))).sum(-1))

    got = jax.jit(jax.grad(loss))(x.data)
    assert not np.isnan(np.asarray(got)).any() and np.all(np.asarray(got)[~np.asarray(x.mask)] == 0)
    i = max(range(4), key=lambda i: groups[i].size)
    small = np.unravel_index(np.argmin(groups[i]), groups[i].shape)  # the largest isn't touched
    mine = got[i] if kind == "uniform" else got[STARTS[i] :]
    np.testing.assert_allclose(mine[small], 2 * groups[i].min() / groups[i].max(), rtol=1e-5)


def test_construction() -> None:
    _, groups = example("ragged rows", (2, 3))
    x = GroupedTensor.from_list(groups, capacity=CAPACITY)
    assert_groups(x, groups, "ragged rows")
    padded = x.to_padded(4, fill_value=9)
    assert padded.shape == (4, 4, 2, 3, 5) and np.all(np.asarray(padded)[1] == 9)
    back = GroupedTensor.from_padded(padded, x.first_dims, capacity=CAPACITY)
    assert_groups(back, groups, "ragged rows")
    joined = jax.jit(lambda x: ragged.concat([x, x]))(x)
    for got, want in zip(joined.to_list(), groups * 2, strict=True):
        assert np.array_equal(got, want)
    _, wide = example("ragged both")
    both = GroupedTensor.from_list(wide, ragged="both")
    for got, want in zip(both.to_list(), wide, strict=True):
        assert np.array_equal(got, want)
    assert np.array_equal(both.to_padded(3)[3, :1, :, :4], wide[3])
    split = GroupedTensor(jnp.ones((10, 6)), ints(*SIZES)).map(lambda rows: rows.reshape(-1, 2, 3))
    assert split.shape == (10, 2, 3) and split.map(lambda rows: rows.reshape(10, 6)).shape == (10, 6)
    check_error(
        lambda: GroupedTensor.from_list([groups[0], groups[0][:, :1]]), ValueError, "the groups' inner dims differ"
    )
    check_error(lambda: GroupedTensor.from_list(groups, ragged="last"), ValueError, "along columns must be matrices.")
    check_error(lambda: x.mT, ValueError, "ragged groups with more than two dims have no transpose.")


def test_route() -> None:
    """Tokens with heads go to their groups and come back; the gradient too."""
    route, tokens = ragged.route(jnp.array([[2, 0], [1, 2], [0, 7]]), 3), floats(3, 2, 4)
    x = route.dispatch(tokens)
    assert x.shape == (6, 2, 4) and np.array_equal(x[1], tokens[1:2]) and np.array_equal(x[2], tokens[:2])
    weights = floats(3, 2, seed=1)
    want = tokens * (weights * [[1, 1], [1, 1], [1, 0]]).sum(1)[:, None, None]
    np.testing.assert_allclose(route.combine(x, weights), want, rtol=1e-6)
    np.testing.assert_allclose(route.combine(x), tokens * np.array([2, 2, 1])[:, None, None], rtol=1e-6)
    gradient = jax.grad(lambda tokens: jnp.sum(route.combine(route.dispatch(tokens), weights) ** 2) / 2)(tokens)
    np.testing.assert_allclose(gradient, want * want / tokens, rtol=1e-5)
    check_error(lambda: route.gathered(tokens), ValueError, "`x` must be [3, d], one row per token.")


@pytest.mark.parametrize("scaling", ["tensor", "group", "row", "column", (1, 3), (2, 3), "mx"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_quantize(kind: str, scaling: Any) -> None:
    """Each head has scales of its own, as a tensor of its own has them; "group" and "tensor" are for all."""
    x, groups = example(kind)
    q = ragged.quantize(x, jnp.float8_e4m3fn, scaling)
    for got, want in zip(q.dequantize().to_list(), groups, strict=True):
        np.testing.assert_allclose(got, want, rtol=0.07)
    if scaling in ("tensor", "group"):
        largest = np.array([np.abs(g).max(initial=0) for g in groups])
        largest = largest.max() if scaling == "tensor" else largest
        np.testing.assert_allclose(q.scales, np.where(largest > 0, largest / 448, 1), rtol=1e-6)
        return
    for head in range(2):
        one = ragged.quantize(x.with_data(x.data[..., head, :]), jnp.float8_e4m3fn, scaling)
        assert np.array_equal(q.scales[..., head, :], one.scales)
        assert np.array_equal(q.data[..., head, :].astype(jnp.float32), one.data.astype(jnp.float32))


# --- matmul ---------------------------------------------------------------------------------------------------------


def rows(*more: int, seed: int = 0) -> tuple[GroupedTensor, Groups]:
    groups = [floats(n, *more, seed=seed + i) for i, n in enumerate(SIZES)]
    data = np.full((CAPACITY, *more), np.nan, np.float32)
    data[: STARTS[-1]] = np.concatenate(groups)
    return GroupedTensor(jnp.asarray(data), ints(*SIZES)), groups


def columns(*more: int) -> tuple[GroupedTensor, Groups]:
    x, groups = rows(*more, seed=20)
    return x.mT, [g.T for g in groups]


def uniform(*shape: int) -> tuple[GroupedTensor, Groups]:
    data = floats(4, *shape, seed=30)
    return GroupedTensor(jnp.asarray(data)), list(data)


def values(*more: int) -> tuple[GroupedTensor, Groups]:
    """As many rows as `example("ragged both")` has columns."""
    x = GroupedTensor(jnp.asarray(floats(CAPACITY, *more)), ints(*WIDTHS))
    return x, [np.asarray(g) for g in x.to_list()]


PRODUCTS = {
    "forward, rows": (rows(2, 5), uniform(5, 3)),
    "forward, weights": (rows(5), uniform(5, 2, 3)),
    "forward, both": (rows(2, 3, 5), uniform(5, 2, 2)),
    "batched": (uniform(3, 2, 5), uniform(5, 2, 2)),
    "wgrad": (columns(5), rows(2, 3)),
    "outer": (rows(2, 5), columns(5)),
    "inner_rows": (example("ragged both"), values(3, 2)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.sampled
def test_matmul(name: str) -> None:
    """The last dim of `lhs` is contracted with the first of the groups of `rhs`. Gradients too."""
    (lhs, left), (rhs, right) = PRODUCTS[name]
    out, want = ragged.matmul(lhs, rhs), [np.tensordot(*each, 1) for each in zip(left, right, strict=True)]
    for got, group in zip(out.to_list(), want, strict=True):
        np.testing.assert_allclose(got, group, rtol=1e-5)
    assert not np.isnan(np.asarray(out.data)).any()

    def loss(lhs_data: Array, rhs_data: Array) -> Array:
        return jnp.sum(ragged.matmul(lhs.with_data(lhs_data), rhs.with_data(rhs_data)).data)

    d_lhs, d_rhs = jax.jit(jax.grad(loss, (0, 1)))(lhs.data, rhs.data)
    for i in range(4):  # of a sum: the other one's sum over what it alone has
        by_lhs = np.broadcast_to(right[i].sum(tuple(range(1, right[i].ndim))), left[i].shape)
        by_rhs = left[i].sum(tuple(range(left[i].ndim - 1))).reshape(-1, *[1] * (right[i].ndim - 1))
        np.testing.assert_allclose(lhs.with_data(d_lhs)[i], by_lhs, rtol=1e-5)
        np.testing.assert_allclose(rhs.with_data(d_rhs)[i], np.broadcast_to(by_rhs, right[i].shape), rtol=1e-5)
    for x, d in ((lhs, d_lhs), (rhs, d_rhs)):
        assert np.all(np.asarray(d)[~np.asarray(x.mask)] == 0)


@pytest.mark.long
def test_options_of_matmul() -> None:
    """Biases and `existing_out` have the result's dims; a shared matrix, and rows that a route gathers."""
    (x, groups), (w, weights) = rows(2, 5), uniform(5, 3, 2)
    want = [np.tensordot(*each, 1) for each in zip(groups, weights, strict=True)]
    bias = floats(4, 3, 2, seed=5)
    out = ragged.matmul(x, w, bias=bias, activation="relu", preferred_element_type=jnp.float32)
    for got, group, b in zip(out.to_list(), want, bias, strict=True):
        np.testing.assert_allclose(got, np.maximum(group + b, 0), rtol=1e-5)
    twice = ragged.matmul(x, w, existing_out=ragged.matmul(x, w))
    for got, group in zip(twice.to_list(), want, strict=True):
        np.testing.assert_allclose(got, 2 * group, rtol=1e-5)
    shared = ragged.matmul(x, weights[0][:, 0])
    for got, group in zip(shared.to_list(), groups, strict=True):
        np.testing.assert_allclose(got, group @ weights[0][:, 0], rtol=1e-5)
    route, tokens = ragged.route(jnp.array([2, 0, 3]), 4), floats(3, 5)
    assert np.array_equal(ragged.matmul(route.gathered(tokens), w).data, ragged.matmul(route.dispatch(tokens), w).data)
    quick = ragged.matmul(x, ragged.quantize_weights(w.with_data(w.data[..., 0]), "rowwise"), recipe="rowwise")
    slow = ragged.matmul(x, w.with_data(w.data[..., 0]), recipe="rowwise")
    assert np.array_equal(quick.data, slow.data)


def test_errors_of_matmul() -> None:
    (x, _), (w, _) = rows(2, 5), uniform(5, 3, 2)
    check_error(
        lambda: ragged.matmul(x, w.data[:, 1:]),
        ValueError,
        "the last dim of `lhs` is 5 but the first dim of `rhs` is 4.",
    )
    check_error(lambda: ragged.matmul(x, w.data[:3]), ValueError, "`lhs` has 4 groups but `rhs` has 3.")
    check_error(
        lambda: ragged.matmul(w, columns(2)[0]), ValueError, "the result would have ragged columns and groups of more"
    )
    check_error(
        lambda: ragged.gated_matmul(x, w.data[..., 0], w.data[..., 0]), NotImplementedError, "more than two dims."
    )
    check_error(
        lambda: ragged.gated_matmul(rows(5)[0], w, w), NotImplementedError, "Merge the dims, or call `ragged.matmul`"
    )


# --- stacks and cotangents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.sampled
def test_stacks(kind: str) -> None:
    """A stack is what has several rows of dims, whatever the rank of its buffer."""
    x, groups = example(kind)
    stack = jax.vmap(lambda scale: x * scale)(jnp.array([1.0, 2.0]))
    assert stack.is_stack and stack.num_groups == 4 and stack.packed_axis == -3
    check_error(lambda: stack + 1, ValueError, "a stack of tensors")
    check_error(lambda: stack.mT, ValueError, "have no transpose")
    sums = jax.vmap(lambda x: x.sum())(stack)
    np.testing.assert_allclose(sums[1], [2 * g.sum() for g in groups], rtol=1e-5)
    _, scanned = jax.lax.scan(lambda c, x: (c, x.sum(-3)), 0, stack)
    assert np.array_equal(scanned[0], x.sum(-3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_cotangents(kind: str) -> None:
    """With dims None they count as uniform, but next to the tensor itself."""
    x, groups = example(kind)
    g = eqx.filter_grad(lambda x: jnp.sum((x * x).sum()) / 2)(x)
    assert_groups(x - g / 2, [d / 2 for d in groups], kind)
    assert_groups(g / 2 - x, [-d / 2 for d in groups], kind)
    np.testing.assert_allclose((g + g).data, pack([2 * d for d in groups], kind, 0), rtol=1e-6)
    if kind != "uniform":
        g = jax.grad(lambda x: jnp.sum((x * x).sum()) / 2, allow_int=True)(x)
        assert g.is_cotangent
        assert_groups(x - g, [0 * d for d in groups], kind)
        assert len(g) == len(x)
        check_error(g.sum, TypeError, "a cotangent or tangent")
        check_error(lambda: x + GroupedTensor(x.data[:4]), ValueError, "tensors have different structures.")
