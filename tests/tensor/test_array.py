"""What array users expect of a tensor: `@`, comparisons, broadcasts, slices, masks. Against NumPy, by group.

In every example the buffer holds NaN where no group has an element.
"""

import inspect
import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor, per_column, per_group, per_row
from tests.cases import check_error
from tests.tensor.test_tensor import CAPACITY, KINDS, RAGGED, SIZES, Example, example, floats, ints

pytestmark = pytest.mark.sampled

BOTH = KINDS[3:]
COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def check(e: Example, out: GroupedTensor | Any, want: list[np.ndarray], rtol: float = 2e-6) -> None:
    """The groups are `want`, and every element of the buffer that is in no group is exactly zero."""
    np.testing.assert_allclose(out.data, e.pack([np.asarray(w, np.float64) for w in want]), rtol=rtol, atol=2e-7)
    assert np.all(np.asarray(out.data)[~e.mask] == 0)


def tails_are_zero(x: GroupedTensor) -> None:
    assert np.all(np.asarray(x.data)[~np.asarray(x.mask)] == 0)


# --- operators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_comparisons(kind: str) -> None:
    """With numbers and tensors, from both sides: bools, False in the tail."""
    e, f = example(kind, seed=1), example(kind, seed=2)
    g = [np.where(a > 1, a, b) for a, b in zip(e.groups, f.groups, strict=True)]
    y = f.with_data(f.pack(g, fill=np.nan))

    @jax.jit
    def compare(x: GroupedTensor, y: GroupedTensor) -> list[list[GroupedTensor]]:
        return [[op(x, y), op(1.0, x)] for op in COMPARISONS.values()]

    for op, (both, other) in zip(COMPARISONS.values(), compare(e.tensor, y), strict=True):
        assert both.dtype == bool
        assert np.array_equal(both.data, e.pack([op(a, b) for a, b in zip(e.groups, g, strict=True)], False))
        assert np.array_equal(other.data, e.pack([op(1, a) for a in e.groups], False))
    assert np.array_equal((jnp.float32(1) < e.tensor).data, (e.tensor > 1).data)
    counts = ((e.tensor > 0.7) & (e.tensor < 1.2) | ~(e.tensor == e.tensor) ^ (e.tensor >= 99)).sum()
    assert counts.tolist() == [int(np.sum((a > 0.7) & (a < 1.2))) for a in e.groups]


def test_equality_and_hashes() -> None:
    """Of arrays by element, of what isn't comparable False; of specs and shapes as Equinox has it."""
    x = example("ragged rows").tensor
    same = [x == other for other in (None, "a", object())]
    assert same == [False] * 3 and x != "a"
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)
    specs, others = (jax.tree.map(lambda _, n=n: n, x) for n in (0, 1))
    assert specs == specs and hash(specs) == hash(jax.tree.map(lambda _: 0, x))
    assert (specs == others, specs != others, specs == 0, specs != 0) == (False, True, False, True)
    assert (x == specs, x != specs, specs == x) == (False, True, False)
    check_error(lambda: bool(x == x), ValueError, "`bool(GroupedTensor)`: a tensor has many truth values.\n")


@pytest.mark.parametrize("value", [3, jnp.float32(3), jnp.ones(2), None, "a"], ids=str)
def test_membership(value: Any) -> None:
    """Whether an element is there is asked of all, and the tail has none."""
    x = GroupedTensor(jnp.array([[1.0], [2.0], [3.0]]), jnp.array([1, 1], jnp.int32))
    problem = "`v in GroupedTensor`: it is ambiguous: `v` may be an element, a row or a group.\nGot v="
    check_error(lambda: value in x, ValueError, problem)
    found: list[Any] = [x == v for v in (2, 3, 0)]
    assert [bool(each.data.any()) for each in found] == [True, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_powers_and_absolute_values(kind: str) -> None:
    e = example(kind)
    x = e.tensor
    check(e, x**2, [g**2 for g in e.groups])
    check(e, jax.jit(lambda x: 2**x)(x), [2.0**g for g in e.groups])
    check(e, x**x, [g**g for g in e.groups], rtol=1e-5)
    check(e, abs(x - 1.001), [abs(g - 1.001) for g in e.groups])
    # The tail's NaN reaches no gradient.
    gradient = jax.grad(lambda d: jnp.sum((e.with_data(d) ** 3 + abs(e.with_data(d) - 1.001)).data))(x.data)
    want = [3 * g.astype(np.float64) ** 2 + np.sign(g - 1.001) for g in e.groups]
    np.testing.assert_allclose(gradient, e.pack(want), rtol=1e-5, atol=1e-6)


def test_at_is_matmul() -> None:
    """From both sides, with plain arrays of JAX and NumPy, derivatives included."""
    e = example("ragged rows")
    x, w = e.tensor, np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    v = np.arange(8, dtype=np.float32).reshape(4, 2, 1) @ np.ones((4, 1, 3), np.float32)  # [4, 2, 3]
    for take in (np.asarray, jnp.asarray):
        check_groups(x @ take(w), [g.astype(np.float64) @ w[i] for i, g in enumerate(e.groups)])
        check_groups(take(v) @ x.mT, [v[i] @ g.T.astype(np.float64) for i, g in enumerate(e.groups)])
    shared = w[0]
    check_groups(x @ shared, [g.astype(np.float64) @ shared for g in e.groups])
    check_groups(shared.T @ x.mT, [shared.T @ g.T.astype(np.float64) for g in e.groups])
    by_at = jax.grad(lambda w: jnp.sum((x @ w).data ** 2))(jnp.asarray(w))
    by_name = jax.grad(lambda w: jnp.sum(ragged.matmul(x, w).data ** 2))(jnp.asarray(w))
    assert np.array_equal(by_at, by_name)
    with pytest.raises(TypeError, match="`rhs` is not an array"):
        _ = x @ "w"


def check_groups(out: GroupedTensor | Any, want: list[np.ndarray], rtol: float = 2e-6) -> None:
    got = out.to_list()
    assert [g.shape for g in got] == [w.shape for w in want]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7)
    tails_are_zero(out)


# --- broadcasts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_meets_every_row(kind: str) -> None:
    """`(d,)` plain where the last dim isn't ragged, or wrapped; its gradient is a float32 sum, without the tail."""
    e = example(kind)
    x = e.tensor
    v = np.arange(1, x.shape[-1] + 1, dtype=np.float32)
    if x.ragged[1] and x.packed_axis == -1:  # what meets the tail is NaN
        v = np.where(e.mask.any(0), v, np.float32(np.nan))
    full = np.broadcast_to(v, x.shape)
    at = [full[place] for place in e.places]
    check(e, x * per_column(jnp.asarray(v)), [g * a for g, a in zip(e.groups, at, strict=True)])
    if not x.ragged[1]:
        check(e, jax.jit(lambda x, v: x - v)(x, v), [g - a for g, a in zip(e.groups, at, strict=True)])
        check(e, v - x, [a - g for g, a in zip(e.groups, at, strict=True)])
        assert np.array_equal((x >= v).data, e.pack([g >= a for g, a in zip(e.groups, at, strict=True)], False))
    gradient = jax.grad(lambda v: jnp.sum((x * per_column(v)).data))(jnp.asarray(v))
    np.testing.assert_allclose(gradient, e.pack(e.groups).astype(np.float64).sum(tuple(range(x.ndim - 1))), rtol=1e-5)


def test_gradients_of_a_bias_are_summed_in_float32() -> None:
    y = GroupedTensor(jnp.zeros((16_384, 2), jnp.bfloat16), ints(16_000))
    gradient = jax.grad(lambda b: jnp.sum((y + b).data.astype(jnp.float32)))(jnp.zeros(2, jnp.bfloat16))
    assert gradient.tolist() == [16_000, 16_000]


def test_a_vector_that_could_be_one_value_a_group() -> None:
    """Of four groups with four columns, the plain vector is an error; either wrapper says which is meant."""
    x = GroupedTensor(floats(8, 4), ints(2, 2, 2, 2))
    v = jnp.arange(4.0)
    for call in (lambda: x + v, lambda: v * x, lambda: x.map(jnp.add, v)):
        hints = "One value per group is `ragged.per_group(v)`. One value per column is `ragged.per_column(v)`."
        check_error(call, TypeError, hints)
    assert (x + per_column(v)).data[0].tolist() == [1, 2, 3, 4]
    assert (x + per_group(v)).data[::2, 0].tolist() == [1, 2, 3, 4]
    check_error(lambda: x + per_column(v[:3]), ValueError, "`ragged.per_column(v)`: `v` must have shape (4,) here.")


@pytest.mark.parametrize("axis", [None, -1, -2])
@pytest.mark.parametrize("kind", KINDS)
def test_keepdims(kind: str, axis: int | None) -> None:
    """What is kept combines with the tensor, from both sides: groups of one row or column are stretched."""
    e = example(kind)

    @jax.jit
    def both(x: GroupedTensor) -> Any:
        mean = x.mean(axis, keepdims=True)
        return mean, x - mean, mean - x, x.map(lambda a, b: a * b, mean), x.max(axis, keepdims=True)

    mean, centred, minus, product, largest = both(e.tensor)
    wide = [g.astype(np.float64) for g in e.groups]
    means = [g.mean(axis, keepdims=True) if g.size else np.zeros((1, 1)) for g in wide]
    check(e, centred, [g - m for g, m in zip(wide, means, strict=True)], rtol=1e-4)
    assert np.array_equal(minus.data, -centred.data)
    check(e, product, [g * m for g, m in zip(wide, means, strict=True)])
    for t, name in ((mean, "mean"), (largest, "max")):
        plain = getattr(e.tensor, name)(axis)
        kept = np.asarray(jnp.expand_dims(plain, (-2, -1) if axis is None else axis))
        np.testing.assert_allclose(t.data, np.where(t.mask, kept, 0), rtol=1e-6)
        tails_are_zero(t)
        assert t.num_groups == 4
    normal = jax.grad(lambda d: jnp.sum((e.with_data(d) / e.with_data(d).sum(axis, keepdims=True)).data))(e.tensor.data)
    np.testing.assert_allclose(normal, np.zeros(e.tensor.shape), atol=1e-5)


def test_what_does_not_stretch() -> None:
    """Other sizes, other groups, a row a group over columns a group."""
    x = example("ragged rows").tensor
    for other in (
        GroupedTensor(floats(CAPACITY, 1), ints(3, 1, 3, 1)),
        GroupedTensor(floats(3, 1, 3)),
        GroupedTensor(floats(4, 1, 2)),
        GroupedTensor(floats(4, 2, 3)),
        GroupedTensor(floats(1, 8), None, ints(*SIZES)),
    ):
        check_error(lambda other=other: x + other, ValueError, "the tensors have different structures.")
    u = GroupedTensor(floats(2, 3, 1))
    problem = "the tensors have buffers of different shapes, (2, 3, 1) and (2, 1, 3)."
    check_error(lambda: u + GroupedTensor(floats(2, 1, 3)), ValueError, problem)


@pytest.mark.parametrize("kind", KINDS)
def test_map_of_several(kind: str) -> None:
    """Tensors, wrapped values and numbers, in the order they are given; NaN tails of all stay out."""
    e, f = example(kind, seed=1), example(kind, seed=2)
    v = jnp.arange(1.0, 5.0)
    out = jax.jit(lambda x, y: x.map(lambda a, b, c, d: a / b + c * d, y, per_group(v), 2.0))(e.tensor, f.tensor)
    check(e, out, [a / b + 2 * (i + 1) for i, (a, b) in enumerate(zip(e.groups, f.groups, strict=True))])
    gradient = jax.grad(lambda d: jnp.sum(e.tensor.map(jnp.divide, f.with_data(d)).data))(f.tensor.data)
    want = [-a / b.astype(np.float64) ** 2 for a, b in zip(e.groups, f.groups, strict=True)]
    np.testing.assert_allclose(gradient, e.pack(want), rtol=1e-5)
    assert np.all(np.asarray(gradient)[~e.mask] == 0)


def test_map_of_several_refuses() -> None:
    x, y = example("ragged rows").tensor, example("ragged columns").tensor
    check_error(lambda: x.map(jnp.add, y), ValueError, "`GroupedTensor.map`: the tensors have different structures.")
    check_error(lambda: x.map(jnp.add, None), TypeError, "`GroupedTensor.map`: `fn` can't be called with a NoneType.")
    check_error(
        lambda: x.map(jnp.add, jnp.ones(x.shape)),
        TypeError,
        "One value per element is `x.map(lambda data: fn(data, v))`.",
    )


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RAGGED)
def test_sizes_of_two_tensors(kind: str) -> None:
    """Compared where they are known; where they are traced, by `validate(like=...)`, at run time."""
    x = example(kind).tensor
    y = example(kind, (3, 1, 3, 1)).tensor
    name = "first_dims" if x.packed_axis == -2 else "last_dims"
    problem = f"`GroupedTensor.validate`: the size of group 1 in `{name}` differs from the size in `like`.\n"
    with pytest.raises(ValueError, match="tensors have different structures"):
        _ = x + y
    check_error(lambda: x.validate(like=y), ValueError, problem)
    check_error(lambda: x.validate(like=example("uniform").tensor), ValueError, "`like` has another structure.")
    checked = eqx.filter_jit(lambda x, y: (x.validate(like=y) + y).sum())
    np.testing.assert_allclose(checked(x, x), (2 * x).sum())
    with pytest.raises(eqx.EquinoxRuntimeError) as error:
        checked(x, y)
    assert problem in str(error.value)
    # Without it, nothing is compared while tracing, and nothing leaves the groups of the left one.
    tails_are_zero(jax.jit(operator.add)(x, y))


# --- slices ---------------------------------------------------------------------------------------------------------

ENDS = [(0, 2), (None, -1), (-2, None), (1, -1), (None, None), (2, 1), (-1, 2), (9, None)]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_slices(kind: str) -> None:
    """Every way to say one, along both dims: the groups are NumPy's slices."""
    e = example(kind)

    @jax.jit
    def cut(x: GroupedTensor) -> Any:
        return [(x.rows(a, b), x.columns(a, b)) for a, b in ENDS]

    for (a, b), (rows, columns) in zip(ENDS, cut(e.tensor), strict=True):
        check_groups(rows, [g[a:b] for g in e.groups], rtol=0)
        check_groups(columns, [g[:, a:b] for g in e.groups], rtol=0)
        assert rows.kind == columns.kind == e.tensor.kind
    if e.tensor.kind != "uniform":
        packed = e.tensor.rows if e.tensor.packed_axis == -2 else e.tensor.columns
        assert [packed(*ends).capacity for ends in ENDS] == [8, 11, 8, 11, 11, 0, 11, 11]


@pytest.mark.parametrize("kind", RAGGED)
def test_slices_by_arrays(kind: str) -> None:
    """Ends that are traced, one for all or one a group, along a ragged dim."""
    e = example(kind)
    starts, n = np.array([1, 0, -2, -1], np.int32), np.int32(3)
    packed = (lambda x: x.rows) if e.tensor.packed_axis == -2 else (lambda x: x.columns)
    axis = 0 if e.tensor.packed_axis == -2 else 1
    out = jax.jit(lambda x, a, b: packed(x)(a, b))(e.tensor, starts, jnp.asarray(n))
    cut = [slice(None if a == 0 else int(a), 3) for a in starts]
    check_groups(out, [g[c] if axis == 0 else g[:, c] for g, c in zip(e.groups, cut, strict=True)], rtol=0)
    assert out.capacity == CAPACITY


@pytest.mark.parametrize("kind", RAGGED)
def test_gradients_of_slices(kind: str) -> None:
    """One where an element is kept, exactly zero elsewhere; of a map over tensors, and of the gradient."""
    e = example(kind)

    def loss(data: Array) -> Array:
        x = e.with_data(data)
        return jnp.sum(x.rows(-2, None).data ** 2) + jnp.sum(x.columns(1, 3).data ** 3)

    def want(g: np.ndarray) -> np.ndarray:
        out = np.zeros(g.shape)
        out[-2:] += 2 * g[-2:].astype(np.float64)
        out[:, 1:3] += 3 * g[:, 1:3].astype(np.float64) ** 2
        return out

    data = jnp.stack([e.tensor.data, 2 * e.tensor.data])
    for each, gradient in zip((1, 2), jax.jit(jax.vmap(jax.grad(loss)))(data), strict=True):
        np.testing.assert_allclose(gradient, e.pack([want(each * g) for g in e.groups]), rtol=1e-5)
        assert np.all(np.asarray(gradient)[~e.mask] == 0)
    clean = jnp.where(e.mask, e.tensor.data, 0)
    tangent = jax.jvp(jax.grad(loss), (e.tensor.data,), (clean,))[1]
    assert np.all(np.isfinite(tangent)) and np.any(tangent != 0)


def test_gradient_of_slices_that_end_early() -> None:
    """The row after a slice has none, whichever group is next."""
    x = GroupedTensor(jnp.ones((6, 1)), jnp.array([3, 2], jnp.int32))
    weights = jnp.array([[5.0], [7.0]])
    gradient = jax.jit(jax.grad(lambda data: jnp.sum(x.with_data(data).rows(0, 1).data * weights)))(x.data)
    assert gradient[:, 0].tolist() == [5, 0, 0, 7, 0, 0]


def test_what_can_not_be_sliced() -> None:
    x = example("ragged rows").tensor
    check_error(lambda: x.rows(0.5, None), TypeError, "`GroupedTensor.rows`: `start` and `stop` must be ints, None, or")
    check_error(lambda: x.rows(True, None), TypeError, "integer arrays of shape () or (4,).\n")
    check_error(lambda: x.rows(jnp.ones(3, jnp.int32), None), TypeError, "start=i32[3], stop=None.")
    check_error(lambda: x.columns(jnp.int32(1), None), ValueError, "arrays are given for a dim that isn't ragged.")
    gradient = eqx.filter_grad(lambda x: jnp.sum(x.data))(x)
    check_error(lambda: gradient.rows(0, 1), TypeError, "a cotangent or tangent")
    assert x.rows(np.int64(0), np.int32(1)).capacity == 4


# --- softmax --------------------------------------------------------------------------------------------------------

MASKS = [
    {"causal": True},
    {"window": 0},
    {"window": (1, 0)},
    {"window": (None, 1)},
    {"window": (1, None), "causal": True},
    {"window": (0, 2)},
    {"window": (None, None)},
]


def attended(group: np.ndarray, causal: bool = False, window: Any = None) -> np.ndarray:
    """The softmax of what each row of a group sees, zeros where it sees nothing; in float64, row by row."""
    left, right = window if isinstance(window, tuple) else (window, window)
    n, m = group.shape
    out = np.zeros((n, m))
    for i in range(n):
        stands = i + m - n
        last = min(m - 1, stands if causal else m - 1, m - 1 if right is None else stands + right)
        first = max(0, 0 if left is None else stands - left)
        if first <= last:
            weights = np.exp(group[i, first : last + 1].astype(np.float64) - group[i, first : last + 1].max())
            out[i, first : last + 1] = weights / weights.sum()
    return out


# Fewer rows than columns, more, as many; no columns, no rows.
ROWS, COLUMNS = (1, 0, 3, 4, 2), (3, 2, 0, 2, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_softmax(kind: str) -> None:
    """Aligned at the last row and column of each group; what is not seen may be NaN and touches nothing."""
    packed_columns = kind in ("ragged columns", KINDS[4])
    e = example(kind, *((COLUMNS, ROWS) if packed_columns else (ROWS, COLUMNS)))
    hidden = []  # NaN where no row of a causal mask sees
    for g in e.groups:
        n, m = g.shape
        hidden.append(np.where(np.arange(m) <= np.arange(n)[:, None] + m - n, g, np.nan).astype(np.float32))

    @jax.jit
    def run(x: GroupedTensor, y: GroupedTensor) -> list[GroupedTensor]:
        return [x.softmax(**mask) for mask in MASKS] + [y.softmax(causal=True)]

    outs = run(e.tensor, e.with_data(e.pack(hidden, fill=np.nan)))
    for out, mask in zip(outs, [*MASKS, {"causal": True}], strict=True):
        np.testing.assert_allclose(out.data, e.pack([attended(g, **mask) for g in e.groups]), rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("kind", BOTH)
def test_gradients_of_a_masked_softmax(kind: str) -> None:
    """Against differences in float64, with NaN in the tail and where no row sees; a traced window is the same."""
    with jax.enable_x64(True):
        e = example(kind, *((COLUMNS, ROWS) if kind == KINDS[4] else (ROWS, COLUMNS)), dtype=np.float64)
        weights = np.cos(np.arange(e.tensor.data.size)).reshape(e.tensor.shape)
        data = e.pack([np.where(attended(g, True, (1, 0)) > 0, g, np.nan) for g in e.groups], fill=np.nan)

        def loss(data: Array, width: Array) -> Array:
            return jnp.sum(e.with_data(data).softmax(causal=True, window=(width, None)).data * weights)

        gradient = np.asarray(jax.jit(jax.grad(loss))(data, jnp.int32(1)))
        want, steps = np.zeros(data.shape), 1e-5
        for place in np.argwhere(np.isfinite(data)):
            for sign in (1, -1):
                moved = data.copy()
                moved[tuple(place)] += sign * steps
                outs = [attended(moved[at], True, (1, 0)) for at in e.places]
                want[tuple(place)] += sign * sum(np.sum(o * weights[at]) for o, at in zip(outs, e.places, strict=True))
        np.testing.assert_allclose(gradient, want / (2 * steps), rtol=1e-6, atol=1e-9)


@pytest.mark.long
def test_attention_of_new_queries() -> None:
    """Scores of the last queries of each sequence are those of all queries, cut: the alignment is the field's."""
    keys = ints(4, 0, 3)
    k = GroupedTensor(jax.random.normal(jax.random.key(0), (9, 8)), first_dims=keys)

    @jax.jit
    def scores(k: GroupedTensor) -> list[GroupedTensor]:
        some = (k, k.rows(-2, None))
        return [ragged.matmul(q, k.mT, max_last=4).softmax(causal=True, window=(2, None)) for q in some]

    whole, new = scores(k)
    for a, b in zip(whole, new, strict=True):
        np.testing.assert_allclose(a[-2:], b, rtol=1e-5, atol=1e-7)
    # A query of each sequence's own, as jax.nn has it for one sequence.
    q = k.data[None, :4, None]
    want = jax.nn.dot_product_attention(q, q, q, scale=1.0, is_causal=True, local_window_size=(2, 0))[0, :, 0]
    np.testing.assert_allclose(ragged.matmul(whole, k)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [-1, True, (1,), (1, 2, 3), 1.5, (0, -2), "all", (jnp.ones(2, jnp.int32), 0)])
def test_windows_that_are_none(window: Any) -> None:
    x = GroupedTensor(floats(4, 4), ints(2), ints(2))
    check_error(lambda: x.softmax(window=window), ValueError, "`GroupedTensor.softmax`: `window` is ")


@pytest.mark.parametrize("kind", ["ragged rows", "ragged columns", "uniform"])
def test_quantised_tensors_refuse(kind: str) -> None:
    """Nothing looks at what is stored without its scales."""
    q = ragged.quantize(example(kind, fill=0).tensor, jnp.int8, "row")
    for use in (
        lambda: q.softmax(causal=True),
        lambda: q == q,
        lambda: q.rows(0, 1),
        lambda: q.var(),
        lambda: q.min(keepdims=True),
        lambda: q.dequantize().map(jnp.add, q),
    ):
        check_error(use, TypeError, "a quantised tensor has no arithmetic")


# --- what JAX and NumPy are told ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", [jnp.exp, jnp.sum, jax.nn.silu, jnp.asarray, jnp.zeros_like, np.asarray, np.sum, np.sort]
)
def test_functions_of_arrays_name_the_method(call: Callable[[Any], Any]) -> None:
    """The hint is in the error, under `jit` too."""
    x = example("ragged rows").tensor
    for use in (call, jax.jit(lambda x: call(x))):
        check_error(
            lambda use=use: use(x), TypeError, ".\n`x.map(jax.nn.silu)` applies an elementwise or rowwise function"
        )
    with pytest.raises(TypeError) as error:
        call(x)
    problem = "`jnp.f(GroupedTensor)`: functions of NumPy and JAX take arrays, which have no groups.\n"
    assert str(error.value).startswith(problem + "Got x=GroupedTensor(f32[11,3], first_dims=")


@pytest.mark.long
def test_no_function_of_arrays_drops_the_groups() -> None:
    """All of `jnp`, `jnp.linalg` and `jax.nn`, called with a tensor, alone or with another argument."""
    told = {"tril_indices_from", "triu_indices_from"}  # which ask for the shape alone
    told |= {"choose", "concat", "concatenate", "stack", "vstack", "hstack", "dstack"}  # of a sequence, here of groups
    found, x = [], GroupedTensor(floats(4, 4), ints(2, 1))
    for module in (jnp, jnp.linalg, jax.nn):
        for name in set(dir(module)) - told:
            fn = getattr(module, name)
            if name.startswith("_") or inspect.isclass(fn) or not callable(fn):
                continue
            for arguments in ((x,), (x, x), (x, 1), ([x, x],)):
                try:
                    out = fn(*arguments)
                except Exception:
                    continue
                is_array = any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(out))
                if is_array and not isinstance(out, GroupedTensor):
                    found.append(f"{module.__name__}.{name}{arguments}")
    assert found == []


def test_what_takes_pytrees_takes_tensors() -> None:
    """The hooks that refuse leave transformations, tree functions, devices and annotations alone."""
    e = example("ragged rows")
    x = e.tensor
    assert repr(jax.device_put(x)) == repr(jax.block_until_ready(x)) == repr(x)
    assert jax.tree.leaves(jax.eval_shape(lambda t: t, x))[0].shape == x.shape
    assert (
        not isinstance(x, jax.Array)
        and not eqx.is_array(x)
        and eqx.tree_equal(x, x.map(lambda d: d) * 1) in (True, False)
    )
    assert eqx.filter(x, eqx.is_array).shape == x.shape
    assert jax.jit(lambda t, n: t * n, static_argnums=1)(x, 2).shape == x.shape
    assert jax.lax.cond(True, lambda t: t, lambda t: t * 2, x).shape == x.shape


# --- cotangents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RAGGED)
def test_cotangents_are_usable(kind: str) -> None:
    """`len` where it is known, arithmetic and maps of several, which take the groups of a tensor among them."""
    e = example(kind)
    x = e.tensor

    def loss(t: GroupedTensor) -> Array:
        return jnp.sum((t * t).data)

    unknown, known = eqx.filter_grad(loss)(x), jax.grad(loss, allow_int=True)(x)
    assert len(known) == known.num_groups == 4
    with pytest.raises(TypeError, match="has no groups"):
        len(unknown)
    for g in (unknown, known):
        assert (g > 1).is_cotangent and (g**2).is_cotangent and abs(g).is_cotangent
        check(e, x.map(lambda a, b: a - 0.5 * b, g), [0 * v for v in e.groups])
        check(e, g.map(lambda a, b: a + b, x), [3 * v for v in e.groups])
        assert g.map(jnp.add, g).is_cotangent
    tangent = jax.jvp(lambda d: (e.with_data(d) * 2).data, (x.data,), (x.data,))[1]
    assert tangent.shape == x.shape


def test_optimisers_step_over_tensors() -> None:
    """A model whose parameters are tensors, ragged and uniform, by optax."""
    rows = GroupedTensor(jax.random.normal(jax.random.key(0), (8, 3)).at[6:].set(jnp.nan), first_dims=ints(2, 4))
    model = {"rows": rows, "w": GroupedTensor(jnp.ones((2, 3, 2)))}

    def loss(model: Any) -> Array:
        return jnp.sum((model["rows"] @ model["w"]).data ** 2)

    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any) -> Any:
        value, gradient = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimiser.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    values = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):
            model, state, value = step(model, state)
            values.append(float(value))
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    assert model["rows"].first_dims.tolist() == [2, 4] and np.all(np.isfinite(model["rows"].data[:6]))


# --- variance -------------------------------------------------------------------------------------------------------


def test_variance_of_large_means() -> None:
    """Two passes: `mean(x²) - mean(x)²` would have no digit right. And bfloat16's is rounded once."""
    rng = np.random.default_rng(0)
    values = (4096 + rng.standard_normal((4000, 2))).astype(np.float32)
    x = GroupedTensor(jnp.asarray(values), ints(1000, 0, 2900))
    want = [values[:1000].astype(np.float64).var(0), np.zeros(2), values[1000:3900].astype(np.float64).var(0)]
    np.testing.assert_allclose(x.var(-2), want, rtol=1e-4)
    y = (x - 4096).astype(jnp.bfloat16)
    small, var = np.asarray(y.data, np.float64), y.var(-2, empty=5)
    np.testing.assert_allclose(var.astype(jnp.float32)[0], small[:1000].var(0), rtol=2**-8)
    assert var[1].tolist() == [5, 5] and var.dtype == jnp.bfloat16


def test_values_a_row_of_kept_dims() -> None:
    """`per_row` is what `keepdims` of the other axis comes to."""
    e = example("ragged both")
    x = e.tensor
    assert np.array_equal((x - x.max(-1, keepdims=True)).data, (x - per_row(x.max(-1))).data)


@pytest.mark.long
def test_softmax_of_sizes_past_the_capacity() -> None:
    """Rows that don't exist, as queries and as keys, move none of those that do."""
    data, sizes = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)), jnp.float32), [3, 5, 0, 2]
    wrong = GroupedTensor(data, jnp.array([3, 5, 0, 4], jnp.int32))
    for turned in (False, True):
        s = wrong @ wrong.mT
        p = (s.mT.softmax(window=(None, 0)).mT if turned else s.softmax(causal=True)).data
        ends = np.cumsum([0, *sizes])
        for first, end in itertools.pairwise(ends):
            group = np.asarray(data[first:end], np.float64)
            want = attended(group @ group.T, causal=True)
            np.testing.assert_allclose(
                p[first:end, : end - first].T if turned else p[first:end, : end - first], want, rtol=1e-5
            )


def test_softmax_along_an_axis() -> None:
    """Axes are counted from the last one. As in `jax.nn.softmax`, the last may be counted from the first, too."""
    x = GroupedTensor(jnp.arange(8.0).reshape(4, 2), jnp.array([1, 3], jnp.int32))
    np.testing.assert_array_equal(x.softmax(-1).data, x.softmax().data)
    np.testing.assert_array_equal(x.softmax(axis=1).data, x.softmax().data)
    for axis in (0, -3, 2):
        check_error(partial(x.softmax, axis), ValueError, f"`axis` is {axis}.\n")


def test_hints_for_what_newcomers_pass() -> None:
    """Offsets in place of sizes, an array in place of an int, and pairs that are lists."""
    x = GroupedTensor(jnp.ones((8, 2)), jnp.array([0, 3, 8], jnp.int32))
    check_error(x.validate, ValueError, "If these are offsets, pass sizes: `jnp.diff(x.first_dims)`.")
    sizes = GroupedTensor(x.data, jnp.diff(x.packed_dims)).validate()
    five: Any = jnp.int32(5)
    check_error(lambda: ragged.matmul(sizes, sizes.mT, max_last=five), ValueError, "`int(max_last)`.")
    w, b = jnp.ones((2, 2, 3)), jnp.ones((2, 3))
    pair: Any = [b, 2 * b]
    got = ragged.gated_matmul(sizes, w, w, bias=pair)
    np.testing.assert_array_equal(got.data, ragged.gated_matmul(sizes, w, w, bias=(b, 2 * b)).data)
    stacked: Any = jnp.stack([b, b, b])
    check_error(lambda: ragged.gated_matmul(sizes, w, w, bias=stacked), TypeError, "Pass a pair, first the gate's")
