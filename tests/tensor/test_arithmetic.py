"""Elementwise operations, `per_group`, `per_row`, reductions, softmax and their gradients: against NumPy, by group.

In every example the buffer holds NaN, infinities or garbage where no group has an element.
"""

import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor, per_column, per_group, per_row
from tests.tensor.test_tensor import CAPACITY, KINDS, RAGGED, SIZES, Example, example, floats, ints

pytestmark = pytest.mark.sampled

FILLS = (np.nan, np.inf, 0.0, -3.0)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
G = len(SIZES)


def check(e: Example, out: GroupedTensor, want: list[np.ndarray], rtol: float = 2e-6) -> None:
    """The groups are `want`, and every element of the buffer that is in no group is exactly zero."""
    assert jax.tree.structure(out) == jax.tree.structure(e.tensor)
    np.testing.assert_allclose(out.data, e.pack([np.asarray(w, np.float64) for w in want]), rtol=rtol)


def rows_of(e: Example, values: np.ndarray, group: int) -> np.ndarray:
    """One value a row of the buffer, or of each group's matrix if uniform, for the rows of a group, as a column."""
    place = e.places[group]
    return values[place[0]][: e.groups[group].shape[0], None]


# --- map ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_map(kind: str) -> None:
    """Zeros in the tail, whatever it holds and whatever the function makes of it."""
    e = example(kind)
    log = jax.jit(lambda x: x.map(jnp.log))
    for fill in FILLS:
        x = e.with_data(e.pack(e.groups, fill))
        check(e, x.map(jnp.exp), [np.exp(g) for g in e.groups])
        check(e, log(x), [np.log(g) for g in e.groups], rtol=1e-5)
        # It makes infinities of the ones in the tail.
        y = x + 2
        check(e, y.map(lambda d: 1 / (d - 1)), [1 / (g + 1) for g in e.groups], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_map_calls_once_with_ones_in_the_tail(kind: str) -> None:
    """And `zero_tail=False` keeps what the function makes of them."""
    e = example(kind)
    seen = []

    def fn(data: Array) -> Array:
        seen.append(np.asarray(data))
        return data + 1

    out = e.tensor.map(fn, zero_tail=False)
    assert len(seen) == 1
    assert np.array_equal(seen[0], e.pack(e.groups, fill=1))
    assert np.array_equal(out.data, e.pack([g + np.float32(1) for g in e.groups], fill=2))


def test_map_changes_what_is_not_ragged() -> None:
    w = np.arange(15, dtype=np.float32).reshape(3, 5) / 8
    e = example("ragged rows")
    out = e.tensor.map(lambda rows: rows @ w)
    assert out.shape == (CAPACITY, 5) and np.all(np.asarray(out.data)[8:] == 0)
    for got, group in zip(out, e.groups, strict=True):
        np.testing.assert_allclose(got, group @ w, rtol=1e-6)
    columns = example("ragged columns")
    out = columns.tensor.map(lambda x: jnp.sum(x, axis=0, keepdims=True))
    assert out.shape == (1, CAPACITY) and np.all(np.asarray(out.data)[:, 8:] == 0)
    for got, group in zip(out, columns.groups, strict=True):
        np.testing.assert_allclose(got, group.sum(0, keepdims=True), rtol=1e-6)
    uniform = example("uniform")
    assert uniform.tensor.map(lambda x: x[:, :1, :]).shape == (4, 1, 2)
    positive = e.tensor.map(lambda x: x > 1)
    assert positive.dtype == bool
    assert np.array_equal(positive.data, e.pack([g > 1 for g in e.groups]))


@pytest.mark.parametrize(
    "kind, fn, axes, shape",
    [
        ("uniform", lambda x: x[:2], [0], "[2,3,2]"),
        ("uniform", lambda x: x[..., 0], [0], "[4,3]"),
        ("ragged rows", lambda x: x[:5], [0], "[5,3]"),
        ("ragged rows", lambda x: x.sum(-1), [0], "[11]"),
        ("ragged columns", lambda x: x.T, [-1], "[11,2]"),
        ("ragged both", lambda x: x[:, :2], [0, -1], "[11,2]"),
        (KINDS[4], lambda x: x[:2], [0, -1], "[2,11]"),
    ],
)
def test_map_errors(kind: str, fn: Callable[[Array], Array], axes: list[int], shape: str) -> None:
    x = example(kind).tensor
    with pytest.raises(ValueError) as error:
        x.map(fn)
    rank = {"uniform": "3 dims or more", "ragged rows": "2 dims or more"}.get(kind, "the rank")
    assert str(error.value) == (
        f"`GroupedTensor.map`: `fn` must keep {rank} and the extent of axes {axes}.\n"
        f"Got x={x!r}, fn(x.data)=f32{shape}.\nOnly dims that aren't ragged may change."
    )


def kept(function: Callable[[Array], Array], data: Any) -> list[tuple[str, tuple[int, ...]]]:
    """What `jax.vjp` keeps of `function`."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda data: jax.vjp(function, data)[1], data))
    return sorted((leaf.dtype.name, leaf.shape) for leaf in leaves)


def two_layers(data: Array) -> Array:
    return jnp.tanh(jax.checkpoint(lambda data: jax.nn.silu(jnp.sin(data)))(data))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_map_keeps_no_more_than_its_function(kind: str, jitted: bool) -> None:
    """For its derivative: the arrays that the function keeps of an array, and sizes. `jax.checkpoint` works inside."""
    x, wrap = example(kind).tensor, jax.jit if jitted else (lambda function: function)
    data = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    sizes = ("int32", (G,))
    for function in (jax.nn.silu, jax.nn.gelu, jax.checkpoint(jax.nn.silu), two_layers, jax.nn.softmax):
        of_array = kept(wrap(function), data)
        of_tensor = kept(wrap(lambda data, f=function: x.with_data(data).map(f).data), data)
        assert of_tensor == sorted(of_array + [sizes] * sum(x.ragged))


# --- operators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scalar",
    [2, -1.5, np.float32(2.5), np.array(2.5, np.float32), jnp.float32(2.5)],
    ids=["int", "float", "np scalar", "np 0-d", "jnp 0-d"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_scalars(kind: str, scalar: Any) -> None:
    """`x op s` and `s op x` for every operator and kind of scalar, the dtype unchanged."""
    e = example(kind)
    for op in OPERATORS.values():
        assert op(e.tensor, scalar).dtype == op(scalar, e.tensor).dtype == jnp.float32
        check(e, op(e.tensor, scalar), [op(g, np.float64(scalar)) for g in e.groups])
        check(e, op(scalar, e.tensor), [op(np.float64(scalar), g) for g in e.groups])
    check(e, -e.tensor, [-g for g in e.groups])


def test_a_bool_of_numpy() -> None:
    """Which is no `np.number`."""
    e = example("ragged rows")
    positive = e.tensor.map(lambda data: data > 0)
    check(e, positive * np.bool_(False), [np.zeros(g.shape, bool) for g in e.groups])


def test_traced_scalar() -> None:
    e = example("ragged both")
    out = jax.jit(lambda x, s: s / x)(e.tensor, jnp.float32(3))
    check(e, out, [3 / g for g in e.groups])


@pytest.mark.parametrize("kind", KINDS)
def test_same_structure(kind: str) -> None:
    """Both tails are kept out."""
    a, b = example(kind, seed=1, fill=np.inf), example(kind, seed=2)
    jitted = jax.jit(lambda x, y: [op(x, y) for op in OPERATORS.values()])(a.tensor, b.tensor)
    for op, out in zip(OPERATORS.values(), jitted, strict=True):
        want = [op(p, q) for p, q in zip(a.groups, b.groups, strict=True)]
        check(a, op(a.tensor, b.tensor), want)
        check(a, out, want)


@pytest.mark.parametrize(
    "other",
    [
        example("ragged columns").tensor,
        example("uniform").tensor,
        example("ragged both").tensor,
        GroupedTensor(floats(CAPACITY, 3), ints(3, 0, 1, 4)),  # other sizes
        GroupedTensor(floats(CAPACITY, 3), ints(3, 0, 5)),  # fewer groups
        GroupedTensor(floats(CAPACITY + 1, 3), ints(*SIZES)),  # another capacity
        GroupedTensor(floats(CAPACITY, 1), ints(3, 0, 1, 4)),  # one column, and other sizes
        GroupedTensor(floats(4, 2, 3)),  # neither one row a group, nor all of them
        GroupedTensor(floats(3, 1, 3)),  # one row a group, of fewer groups
    ],
    ids=repr,
)
def test_another_structure(other: GroupedTensor) -> None:
    x = example("ragged rows").tensor
    for symbol, op in OPERATORS.items():
        with pytest.raises(ValueError) as error:
            op(x, other)
        problem = "the tensors have different structures."
        if other.shape == (CAPACITY + 1, 3):
            problem = "the tensors have buffers of different shapes, (11, 3) and (12, 3)."
        assert str(error.value) == (
            f"`GroupedTensor {symbol} GroupedTensor`: {problem}\n"
            f"Got x={x!r}, other={other!r}.\nBoth need the same kind, shape and dims."
        )


def test_another_packed_axis() -> None:
    """Two square ragged-both buffers of one shape and the same dims, packed along different axes."""
    x = GroupedTensor(floats(4, 4), ints(1, 2), ints(2, 1))
    with pytest.raises(ValueError, match="tensors have different structures"):
        x + GroupedTensor(floats(4, 4), ints(1, 2), ints(2, 1), transposed=True)
    # For one ragged dim it makes no difference whether the buffer is seen through `mT`.
    y = GroupedTensor(floats(4, 3), ints(1, 2))
    seen_through = GroupedTensor(floats(3, 4), None, ints(1, 2)).mT
    assert np.array_equal((y + seen_through).data[:3], 2 * np.ones((3, 3)))


GROUP = "One value per group is `ragged.per_group(v)`."
ROW = "One value per row is `ragged.per_row(v)`."
COLUMN = "One value per column is `ragged.per_column(v)`."


@pytest.mark.parametrize(
    "kind, shape, hint",
    [
        ("ragged rows", (4,), GROUP),
        ("ragged rows", (4, 3), "One row per group is `ragged.per_group(v)`."),
        ("ragged rows", (CAPACITY,), ROW),
        ("ragged rows", (CAPACITY, 3), "One value per element is `x.map(lambda data: data {} v)`."),
        ("ragged columns", (2,), ROW),
        ("ragged columns", (4, 2), "One column per group is `ragged.per_group(v)`."),
        ("ragged columns", (CAPACITY,), COLUMN),
        ("ragged both", (4,), f"{GROUP} {COLUMN}"),
        ("uniform", (4, 3), ROW),
        (
            "ragged rows",
            (5,),
            "Wrap it: `ragged.per_group(v)` for one value per group, `ragged.per_row(v)` for one per row, "
            "`ragged.per_column(v)` for one per column. "
            "Or pass a function that closes over it to `x.map`.",
        ),
    ],
)
def test_plain_arrays(kind: str, shape: tuple[int, ...], hint: str) -> None:
    """The hint is the one for the shape that came, and it works."""
    x = example(kind).tensor
    for symbol, op in OPERATORS.items():
        for array in (np.ones(shape, np.float32), jnp.ones(shape)):
            for a, b in ((x, array), (array, x)):
                with pytest.raises(TypeError) as error:
                    op(a, b)
                text = hint.format(symbol)
                text = text.replace(f"data {symbol} v", f"v {symbol} data") if a is array else text
                assert str(error.value) == (
                    f"`GroupedTensor {symbol} array`: a plain array has no groups to match.\n"
                    f"Got x={x!r}, v=f32[{','.join(map(str, shape))}].\n{text}"
                )
    v = jnp.ones(shape)
    with jax.numpy_rank_promotion("allow"):
        if "per_group" in hint and "Wrap" not in hint:
            assert (x + per_group(v)).shape == x.shape
        if "per_row" in hint and "Wrap" not in hint:
            assert (x + per_row(v)).shape == x.shape
        if COLUMN in hint:
            assert (x + per_column(v)).shape == x.shape
        if "for each" in hint:
            assert x.map(lambda data: data + v).shape == x.shape


def test_dtypes_are_not_promoted_silently() -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        example("ragged rows").tensor + example("ragged rows", dtype=np.int32).tensor
    x = example("ragged rows", dtype=np.int32)
    check(x, x.tensor * 2, [g * 2 for g in x.groups])


# --- per_group and per_row ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_per_group_and_per_row(kind: str) -> None:
    """One value a group, one value a row; where they meet no element they may be NaN."""
    e = example(kind)
    groups = np.where([g.size > 0 for g in e.groups], np.array([2, 3, 0.5, -4], np.float32), np.float32(np.nan))
    rows = np.linspace(1, 2, np.prod(e.tensor.shape[:-1]), dtype=np.float32).reshape(e.tensor.shape[:-1])
    rows = np.where(e.mask.any(-1), rows, np.float32(np.nan))

    @jax.jit
    def combine(x: GroupedTensor, v: Array, w: Array) -> list[tuple[GroupedTensor, GroupedTensor]]:
        return [(op(x, per_group(v)), op(x, per_row(w))) for op in OPERATORS.values()]

    outs = combine(e.tensor, groups, rows)
    for op, (by_group, by_row) in zip(OPERATORS.values(), outs, strict=True):
        check(e, by_group, [op(g, groups[i]) for i, g in enumerate(e.groups)])
        check(e, by_row, [op(g, rows_of(e, rows, i)) for i, g in enumerate(e.groups)])
    check(e, e.tensor * per_row(jnp.asarray(rows)), [g * rows_of(e, rows, i) for i, g in enumerate(e.groups)])


@pytest.mark.parametrize("kind", RAGGED)
def test_per_group_vectors(kind: str) -> None:
    """One row a group for packed rows, one column a group for packed columns; NaN beyond a group's own extent."""
    e = example(kind)
    axis = 1 if e.tensor.packed_axis == -2 else 0
    v = np.full((G, e.tensor.shape[axis]), np.nan, np.float32)
    for i, group in enumerate(e.groups):
        v[i, : group.shape[axis]] = np.arange(1, group.shape[axis] + 1) * (i + 1)
    want = []
    for i, group in enumerate(e.groups):
        own = v[i, : group.shape[axis]]
        want.append(group / (own[None, :] if axis == 1 else own[:, None]))
    check(e, e.tensor / per_group(jnp.asarray(v)), want)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
def test_sums_of_four_bits(dtype: Any) -> None:
    """In int32, like those of other small integers."""
    x = GroupedTensor(jnp.full((12, 2), 7, dtype), jnp.array([2, 9], jnp.int32))
    assert x.sum().dtype == jnp.int32 and x.sum().tolist() == [28, 126]
    assert GroupedTensor(jnp.full((2, 3, 4), 7, dtype)).sum(-1).tolist() == [[28] * 3] * 2


def test_reductions_of_uint32() -> None:
    """Its largest value is no int of JAX's."""
    x = GroupedTensor(jnp.asarray([[3], [2**32 - 1], [7]], jnp.uint32), jnp.array([2, 0], jnp.int32))
    np.testing.assert_array_equal(x.min(), np.array([3, 2**32 - 1], np.uint32))
    np.testing.assert_array_equal(x.max(), np.array([2**32 - 1, 0], np.uint32))


def test_reductions_of_rows_of_both_with_more_dims() -> None:
    """What is reduced along a dim that isn't ragged combines with the tensor: `var` does so itself."""
    data, sizes = floats(11, 3, 4), jnp.array([2, 3, 0, 4], jnp.int32)
    x = GroupedTensor(jnp.asarray(data), sizes, sizes)
    rest, var = x - x.mean(-2, keepdims=True), x.var(-2, keepdims=True)
    for i, (start, n) in enumerate(zip((0, 2, 5, 5), (2, 3, 0, 4), strict=True)):
        group = data[start : start + n, :, :n]
        np.testing.assert_allclose(rest[i], group - group.mean(1, keepdims=True), atol=1e-6)
        np.testing.assert_allclose(var[i], group.var(1, keepdims=True), atol=1e-6)


def test_keepdims_of_one_column() -> None:
    """A reduction of ragged-both rows of one column combines with them, though the buffers have one shape."""
    x = GroupedTensor(jnp.ones((4, 1)), ints(2, 1), ints(1, 0))
    out = jax.jit(lambda x: 2 * x - x.mean(-1, keepdims=True))(x)
    assert out.kind == "ragged both" and out.data[:, 0].tolist() == [1, 1, 0, 0]


def test_equality_with_wrapped_values() -> None:
    """From both sides a tensor of bools."""
    x, one = GroupedTensor(jnp.arange(4.0)[:, None], ints(2, 1)), per_row(jnp.ones(4))
    for equal, differ in ((x == one, x != one), (one == x, one != x)):
        assert isinstance(equal, GroupedTensor) and isinstance(differ, GroupedTensor)
        assert equal.data[:, 0].tolist() == [False, True, False, False]
        assert differ.data[:, 0].tolist() == [True, False, True, False]
    same = per_row(np.ones(4))
    assert same == per_row(np.ones(4)) and same != per_row(np.zeros(4)) and same != 1


def test_per_group_of_a_uniform_tensor() -> None:
    e = example("uniform")
    v = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    check(e, e.tensor * per_group(jnp.asarray(v)), [g * v[i] for i, g in enumerate(e.groups)])
    v = np.arange(1, 13, dtype=np.float32).reshape(4, 3, 1)
    check(e, e.tensor * per_group(jnp.asarray(v)), [g * v[i] for i, g in enumerate(e.groups)])


@pytest.mark.parametrize(
    "kind, wrapped, want",
    [
        ("ragged rows", per_group(floats(3)), (4,)),
        ("ragged rows", per_group(floats(1)), (4,)),
        ("ragged rows", per_group(floats(4, 2)), (4, 3)),
        ("ragged rows", per_row(floats(4)), (11,)),
        ("ragged rows", per_row(floats(11, 2)), (11, 3)),
        ("ragged columns", per_group(floats(4, 11)), (4, 2)),
        ("ragged columns", per_row(floats(11)), (2,)),
        ("ragged both", per_group(floats(4, 3)), (4, 4)),
        (KINDS[4], per_row(floats(11)), (4,)),
        ("uniform", per_row(floats(4)), (4, 3)),
        ("uniform", per_group(floats(3)), (4,)),
        ("uniform", per_group(floats(4, 5)), (4, 2)),
    ],
)
def test_wrong_shapes_of_values(kind: str, wrapped: per_group | per_row, want: tuple[int, ...]) -> None:
    x = example(kind).tensor
    with pytest.raises(ValueError) as error:
        x * wrapped
    assert str(error.value) == (
        f"`ragged.{type(wrapped).__name__}(v)`: `v` must have shape {want} here.\n"
        f"Got v=f32[{','.join(map(str, wrapped.value.shape))}], x={x!r}.\n"
        + (
            "It needs one value per row of the buffer."
            if isinstance(wrapped, per_row)
            else "It needs one value per group, or one row per group."
        )
        + " One value per column is `ragged.per_column(v)`." * (wrapped.value.shape == x.shape[-1:])
    )


# --- gradients ------------------------------------------------------------------------------------------------------

# The map, and its derivative.
MAPS = {
    "log": (lambda x: x.map(jnp.log), lambda g: 1 / g),
    "sqrt": (lambda x: x.map(jnp.sqrt), lambda g: 0.5 / np.sqrt(g)),
    "reciprocal": (lambda x: 1 / x, lambda g: -1 / g**2),
    "by itself": (lambda x: x / x, lambda g: 0 * g),
    "power": (lambda x: x**1.5, lambda g: 1.5 * np.sqrt(g)),
    "chain": (lambda x: 1 / (x + x).map(jnp.log1p), lambda g: -2 / ((1 + 2 * g) * np.log1p(2 * g) ** 2)),
    "norm": (lambda x: x / x.map(lambda d: jnp.sqrt(d * d)), lambda g: 0 * g),
}


@pytest.mark.parametrize("kind", RAGGED)
def test_map_gradients(kind: str) -> None:
    """The gradient is right in every group and exactly zero in the tail, in reverse and in forward mode."""
    e = example(kind)

    @jax.jit
    def differentiate(data: Array) -> dict[str, tuple[Array, Array]]:
        losses = {name: (lambda d, fn=fn: jnp.sum(fn(e.with_data(d)).data)) for name, (fn, _) in MAPS.items()}
        return {name: (jax.grad(f)(data), jax.jvp(f, (data,), (data,))[1]) for name, f in losses.items()}

    for fill in FILLS:
        for name, (gradient, tangent) in differentiate(e.pack(e.groups, fill)).items():
            want = [MAPS[name][1](g.astype(np.float64)) for g in e.groups]
            np.testing.assert_allclose(gradient, e.pack(want), rtol=1e-4, atol=1e-6)
            assert np.all(np.asarray(gradient)[~e.mask] == 0)
            total = sum(np.sum(w * g) for w, g in zip(want, e.groups, strict=True))
            np.testing.assert_allclose(tangent, total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", RAGGED)
def test_second_derivatives(kind: str) -> None:
    """Reverse over reverse: the tail reaches no gradient of a gradient either."""
    e = example(kind)

    def loss(data: Array) -> Array:
        return jnp.sum((1 / e.with_data(data)).data)

    second = jax.grad(lambda d: jnp.sum(jax.grad(loss)(d)))(e.tensor.data)
    np.testing.assert_allclose(second, e.pack([2 / g.astype(np.float64) ** 3 for g in e.groups]), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_wrapped_values(kind: str) -> None:
    """Of `x / v`, with NaN, infinities or zeros in `v` wherever it meets no element: exactly zero there."""
    e = example(kind)
    by_row = e.mask.any(-1)
    by_group = np.array([g.size > 0 for g in e.groups])

    @jax.jit
    def gradients(*arguments: Array) -> Any:
        def loss(data: Array, rows: Array, groups: Array) -> Array:
            return jnp.sum((e.with_data(data) / per_row(rows) / per_group(groups)).data)

        return jax.grad(loss, (0, 1, 2))(*arguments)

    for fill in map(np.float32, FILLS):
        rows, groups = np.where(by_row, np.float32(2), fill), np.where(by_group, np.float32(2), fill)
        of_data, of_rows, of_groups = gradients(e.pack(e.groups, fill), rows, groups)
        assert np.array_equal(of_data, np.where(e.mask, 0.25, 0))
        np.testing.assert_allclose(of_rows, -e.pack(e.groups).astype(np.float64).sum(-1) / 8, rtol=1e-5)
        np.testing.assert_allclose(of_groups, [-g.sum(dtype=np.float64) / 8 for g in e.groups], rtol=1e-5)


@pytest.mark.parametrize("kind", RAGGED)
def test_gradients_of_vectors_a_group(kind: str) -> None:
    """NaN beyond a group's own extent stays out of the gradient."""
    e = example(kind)
    axis = 1 if e.tensor.packed_axis == -2 else 0
    v, want = (np.full((G, e.tensor.shape[axis]), fill, np.float32) for fill in (np.nan, 0))
    for i, group in enumerate(e.groups):
        if group.size:
            v[i, : group.shape[axis]] = 2
            want[i, : group.shape[axis]] = -group.sum(1 - axis) / 4
    gradient = jax.grad(lambda u: jnp.sum((e.tensor / per_group(u)).data))(jnp.asarray(v))
    np.testing.assert_allclose(gradient, want, rtol=1e-5)


@pytest.mark.parametrize("kind", RAGGED)
def test_normalising_in_a_chain(kind: str) -> None:
    """A value a group from a reduction, divided by: 0 / 0 in an empty group reaches no weight's gradient."""
    e = example(kind)

    def loss(data: Array, scale: Array) -> Array:
        x = e.with_data(data)
        # A scale of 0 for a group without elements.
        total = x.sum() * scale
        return jnp.sum((x / per_group(total)).map(jnp.square).data)

    of_data, of_scale = jax.grad(loss, (0, 1))(e.tensor.data, jnp.ones(G))
    assert np.all(np.isfinite(of_data)) and np.all(np.asarray(of_data)[~e.mask] == 0)
    want = [-2 * np.sum(g.astype(np.float64) ** 2) / g.sum(dtype=np.float64) ** 2 if g.size else 0 for g in e.groups]
    np.testing.assert_allclose(of_scale, want, rtol=1e-4)


# --- reductions -----------------------------------------------------------------------------------------------------


def logsumexp(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    values = values.reshape(-1) if axis is None else values
    return np.logaddexp.reduce(values, 0 if axis is None else axis)


NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "var": np.var, "logsumexp": logsumexp}
# Of a group, row or column without elements.
EMPTY = {"sum": 0, "mean": 0, "var": 0, "max": -np.inf, "min": np.inf, "logsumexp": -np.inf}


def reduced(e: Example, name: str, axis: int | None, empty: float) -> np.ndarray:
    """The reduction of each group in float64, laid out as the library does; `empty` for nothing to reduce."""
    packed, values = e.tensor.packed_axis, []
    for group in e.groups:
        kept = () if axis is None else (group.shape[-3 - axis],)
        nothing = 0 in (group.shape if axis is None else (group.shape[axis],))
        values.append(np.full(kept, empty) if nothing else NUMPY[name](group.astype(np.float64), axis=axis))
    if packed is None or axis is None:
        return np.stack(values)
    if axis == packed:  # one row (or column) a group, as wide as the buffer
        out = np.full((G, e.tensor.shape[-3 - axis]), empty, np.float64)
        for row, value in zip(out, values, strict=True):
            row[: len(value)] = value
    else:  # one value a row (or column) of the buffer
        out = np.full(CAPACITY, empty, np.float64)
        for place, value in zip(e.places, values, strict=True):
            out[place[packed]] = value
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_reductions(kind: str) -> None:
    """NaN in the tail counts for nothing; groups, rows and columns without elements give `empty`."""
    e = example(kind)

    @jax.jit
    def reduce(x: GroupedTensor) -> dict[str, list[tuple[Array, Array]]]:
        fns = {name: getattr(x, name) for name in NUMPY}
        return {name: [(fn(axis), fn(axis, empty=7)) for axis in (None, -1, -2)] for name, fn in fns.items()}

    for name, results in reduce(e.tensor).items():
        default = EMPTY[name]
        for axis, (got, got_7) in zip((None, -1, -2), results, strict=True):
            assert got.dtype == got_7.dtype == jnp.float32
            np.testing.assert_allclose(got, reduced(e, name, axis, default), rtol=1e-6, atol=1e-8)
            np.testing.assert_allclose(got_7, reduced(e, name, axis, 7), rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(getattr(e.tensor, name)(), reduced(e, name, None, default), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NUMPY)
def test_reductions_of_empty_uniform_groups(name: str) -> None:
    """`empty` for groups of zero rows, along every axis that has none."""
    x = GroupedTensor(floats(2, 0, 3))
    assert np.array_equal(getattr(x, name)(empty=7), np.full(2, 7))
    assert np.array_equal(getattr(x, name)(-2, empty=7), np.full((2, 3), 7))
    assert getattr(x, name)(-1, empty=7).shape == (2, 0)


@pytest.mark.parametrize("name", NUMPY)
def test_reductions_of_a_buffer_without_columns(name: str) -> None:
    x = GroupedTensor(floats(5, 0), ints(1, 2))
    assert np.array_equal(getattr(x, name)(empty=7), np.full(2, 7))
    assert np.array_equal(getattr(x, name)(-1, empty=7), np.full(5, 7))
    assert getattr(x, name)(-2, empty=7).shape == (2, 0)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8])
@pytest.mark.parametrize("kind", ["uniform", "ragged rows", "ragged both"])
def test_reductions_of_integers(kind: str, dtype: Any) -> None:
    """Sums of small integers don't overflow: they are int32, as `jnp.sum`'s are. Means are float32."""
    e = example(kind, dtype=dtype)
    limits = np.iinfo(dtype)
    groups = [np.where(g > 0, limits.max, g).astype(dtype) for g in e.groups] if dtype != np.int32 else e.groups
    e = Example(e.with_data(e.pack(groups, fill=limits.max)), groups, e.places)
    for axis in (None, -1, -2):
        total, mean, largest, smallest, var, log = (getattr(e.tensor, name)(axis) for name in NUMPY)
        assert (mean.dtype, largest.dtype, log.dtype) == (jnp.float32, dtype, jnp.float32)
        np.testing.assert_allclose(log, reduced(e, "logsumexp", axis, -np.inf), rtol=1e-6, atol=1e-6)
        assert total.dtype == jnp.sum(jnp.zeros(1, dtype)).dtype
        assert np.array_equal(total, reduced(e, "sum", axis, 0))
        np.testing.assert_allclose(mean, reduced(e, "mean", axis, 0), rtol=1e-6)
        assert np.array_equal(largest, reduced(e, "max", axis, limits.min))
        assert np.array_equal(smallest, reduced(e, "min", axis, limits.max)) and smallest.dtype == dtype
        np.testing.assert_allclose(var, reduced(e, "var", axis, 0), rtol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_reductions_accumulate_in_float32(dtype: Any) -> None:
    """1000 ones are 1000: the sum is rounded once, at the end, and the count not at all."""
    rows = GroupedTensor(jnp.full((4200, 1), 3, dtype), ints(1000, 3000))
    tensors = [rows, rows.mT.mT, GroupedTensor(rows.data, rows.first_dims, ints(1, 1))]
    for x in tensors:
        assert x.sum().dtype == x.mean().dtype == x.max().dtype == x.min().dtype == x.var().dtype == dtype
        np.testing.assert_allclose(x.sum().astype(jnp.float32), [3000, 9000], rtol=2**-8)
        assert x.mean().tolist() == [3, 3] and x.mean(-2).tolist() == [[3], [3]]
        log = np.float32(3) + np.log(np.array([1000, 3000], np.float32))
        np.testing.assert_allclose(x.logsumexp().astype(jnp.float32), log, rtol=2**-8)
    np.testing.assert_allclose(rows.mT.sum(-1).astype(jnp.float32), [[3000], [9000]], rtol=2**-8)


def test_max_of_float8() -> None:
    """float8_e4m3fn has no infinity: the lowest value stands in for it, for the smallest element the highest."""
    x = GroupedTensor(jnp.array([[-2.0], [-3.0], [jnp.nan]]).astype(jnp.float8_e4m3fn), ints(2, 0))
    assert x.max().astype(jnp.float32).tolist() == [-2, -448]
    assert x.min().astype(jnp.float32).tolist() == [-3, 448]


def test_max_of_negatives() -> None:
    """Neither the tail nor the columns beyond `last_dims` are zeros that would win."""
    for x in (GroupedTensor(-floats(4, 2), ints(2, 1)), GroupedTensor(-floats(4, 4), ints(2, 1), ints(2, 1))):
        assert x.max().tolist() == [-1, -1]
        assert x.max(-2, empty=-1).tolist() == [[-1] * x.shape[-1]] * 2
        assert x.max(-1, empty=-1).tolist() == [-1] * 4


@pytest.mark.parametrize("kind", RAGGED)
def test_no_nan_on_the_way(kind: str) -> None:
    """Empty groups, rows without columns and the tail cost users of `jax.debug_nans` no false alarm."""
    e = example(kind, fill=0)
    with jax.debug_nans(True):
        with_sink = partial(GroupedTensor.softmax, axis=-2, sink=1)
        for fn in (GroupedTensor.softmax, with_sink, lambda x: x / per_group(x.sum()), lambda x: x.map(jnp.log)):
            jax.grad(lambda data, fn=fn: jnp.sum(fn(e.with_data(data)).data))(e.tensor.data)
        for axis in (None, -1, -2):
            jax.grad(lambda data, axis=axis: jnp.sum(e.with_data(data).mean(axis)))(e.tensor.data)
        for name in ("max", "min", "logsumexp"):
            jax.grad(lambda data, name=name: jnp.sum(getattr(e.with_data(data), name)(empty=0)))(e.tensor.data)


@pytest.mark.parametrize("axis", [0, 1, -3])
def test_reduction_axes(axis: int) -> None:
    with pytest.raises(ValueError) as error:
        example("ragged rows").tensor.sum(axis)
    assert str(error.value) == (
        f"`GroupedTensor`: `axis` of a reduction is {axis}.\n"
        "Got x=GroupedTensor(f32[11,3], first_dims=[3, 0, 4, 1] (8 of 11 rows)).\n"
        "It must be None, -2 (the groups' first dim) or -1 (the last)."
    )


@pytest.mark.parametrize("axis", [None, -1, -2])
@pytest.mark.parametrize("kind", KINDS)
def test_reductions_of_mT(kind: str, axis: int | None) -> None:
    """The axes trade places."""
    x = example(kind).tensor
    swapped = None if axis is None else -3 - axis
    np.testing.assert_allclose(x.mT.sum(axis), x.sum(swapped), rtol=1e-6)


@pytest.mark.parametrize("axis", [None, -1, -2])
@pytest.mark.parametrize("kind", RAGGED)
def test_gradients_of_reductions(kind: str, axis: int | None) -> None:
    """Of sum: one; of mean: 1 / count; of max and min: one at that element; of var: 2 (x - mean) / count; of logsumexp:
    the softmax; exactly zero in the tail."""
    e = example(kind)

    @jax.jit
    def gradients(data: Array) -> list[Array]:
        def loss(data: Array, name: str) -> Array:
            return jnp.sum(getattr(e.with_data(data), name)(axis, empty=1))

        return [jax.grad(loss)(data, name) for name in NUMPY]

    along = [g.size if axis is None else g.shape[axis] for g in e.groups]
    means = e.pack([np.full(g.shape, 1 / max(n, 1)) for g, n in zip(e.groups, along, strict=True)])
    # All values of an example differ.
    largest = e.pack([g == (np.max(g, axis=axis, keepdims=True) if g.size else g) for g in e.groups], False)
    smallest = e.pack([g == (np.min(g, axis=axis, keepdims=True) if g.size else g) for g in e.groups], False)
    spread = [g.astype(np.float64) for g in e.groups]
    spread = [
        2 * (g - g.mean(axis, keepdims=True)) / max(n, 1) if g.size else g for g, n in zip(spread, along, strict=True)
    ]
    for fill in FILLS:
        of_sum, of_mean, of_max, of_min, of_var, of_log = gradients(jnp.asarray(e.pack(e.groups, fill)))
        assert np.array_equal(of_sum, e.mask)
        np.testing.assert_allclose(of_mean, means, rtol=1e-6)
        assert np.array_equal(of_max, largest) and np.array_equal(of_min, smallest)
        np.testing.assert_allclose(of_var, e.pack(spread), atol=1e-6)
        assert np.all(np.asarray(of_var)[~e.mask] == 0)
        np.testing.assert_allclose(of_log, e.pack([softmax(g, axis) for g in e.groups]), rtol=2e-6)


# --- softmax --------------------------------------------------------------------------------------------------------


def softmax(group: np.ndarray, axis: int | None = -1, sink: Any = -np.inf) -> np.ndarray:
    """Along an axis, or of the whole group; `sink`, one more logit, broadcasts to the group's largest elements."""
    if group.size == 0:
        return group.astype(np.float64)
    largest = np.maximum(group.max(axis, keepdims=True), sink)
    weights = np.exp(group.astype(np.float64) - largest)
    return weights / (weights.sum(axis, keepdims=True) + np.exp(np.asarray(sink, np.float64) - largest))


@pytest.mark.parametrize("kind", KINDS)
def test_softmax(kind: str) -> None:
    """Along each group's own dims; zero beyond them, in rows without columns and in the tail."""
    e = example(kind)
    for axis in (-1, -2):
        want = [softmax(g, axis) for g in e.groups]
        jitted = jax.jit(lambda x, axis=axis: x.softmax(axis))
        for fill in (*FILLS, 1e30):
            x = e.with_data(e.pack(e.groups, fill))
            check(e, jitted(x), want)
            check(e, x.softmax(axis), want)


def test_softmax_of_mT() -> None:
    """Along the dim that is last now."""
    e = example("ragged rows")
    check(e, e.tensor.mT.softmax().mT, [softmax(g.T).T for g in e.groups])


@pytest.mark.parametrize("kind", KINDS)
def test_softmax_of_large_values(kind: str) -> None:
    """The largest is subtracted first."""
    e = example(kind)
    groups = [1000 * g for g in e.groups]
    big = Example(e.with_data(e.pack(groups, fill=np.nan)), groups, e.places)
    for axis in (-1, -2):
        out = big.tensor.softmax(axis)
        np.testing.assert_allclose(out.data, e.pack([softmax(g, axis) for g in groups]), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_softmax_gradient(kind: str) -> None:
    """Against central differences in float64; exactly zero in the tail."""
    with jax.enable_x64(True):
        e = example(kind, dtype=np.float64)
        weights = np.cos(np.arange(e.tensor.data.size)).reshape(e.tensor.shape)

        def loss(data: Array) -> Array:
            x = e.with_data(data)
            return jnp.sum((x.softmax().data + x.softmax(-2).data ** 2) * weights)

        data = np.asarray(e.tensor.data)
        gradient = np.asarray(jax.jit(jax.grad(loss))(data))
        assert np.all(gradient[~e.mask] == 0)
        places = np.argwhere(e.mask)
        steps = np.zeros((len(places), *data.shape))
        steps[np.arange(len(places)), *places.T] = 1e-5
        losses = jax.jit(jax.vmap(loss))
        want = np.zeros(data.shape)
        want[e.mask] = (losses(data + steps) - losses(data - steps)) / 2e-5
        np.testing.assert_allclose(gradient, want, rtol=1e-7, atol=1e-9)


def sinks_of(e: Example, axis: int, fill: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """A sink for each softmax along `axis`, in the library's shape with `fill` where there is none, and by group."""
    shape, packed = e.tensor.max(axis).shape, e.tensor.packed_axis
    values, out, by_group = np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape), None, []
    out = np.full(shape, fill, np.float32)
    for i, (place, group) in enumerate(zip(e.places, e.groups, strict=True)):
        n = 0 if group.size == 0 else group.shape[-3 - axis]
        at = (i, slice(0, n)) if packed in (None, axis) else np.arange(CAPACITY)[place[packed]][:n]
        out[at] = values[at]
        by_group.append(np.expand_dims(values[at], axis))
    return out, by_group


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("kind", KINDS)
def test_sinks(kind: str, axis: int) -> None:
    """One more logit for each softmax: values, and gradients of the tensor and of the sinks; NaN where nothing is
    reduced, in the sinks too, reaches nothing."""
    e = example(kind)
    sink, by_group = sinks_of(e, axis, np.nan)
    cotangent = np.cos(np.arange(e.tensor.data.size, dtype=np.float32)).reshape(e.tensor.shape)

    @jax.jit
    def run(data: Array, sink: Array) -> Any:
        out, pull = jax.vjp(lambda data, sink: e.with_data(data).softmax(axis, sink=sink).data, data, sink)
        return out, pull(jnp.asarray(cotangent))

    out, (of_data, of_sink) = run(e.tensor.data, jnp.asarray(sink))
    p = [softmax(g, axis, s) for g, s in zip(e.groups, by_group, strict=True)]
    mean = [np.sum(p * c, axis, keepdims=True) for p, c in zip(p, e.unpack(cotangent), strict=True)]
    np.testing.assert_allclose(out, e.pack(p), rtol=2e-6)
    want = [p * (c - m) for p, c, m in zip(p, e.unpack(cotangent), mean, strict=True)]
    np.testing.assert_allclose(of_data, e.pack(want), atol=2e-7)
    # The sink's own weight is what the others lack, and its own cotangent is zero.
    want = [-(1 - p.sum(axis, keepdims=True)) * m for p, m in zip(p, mean, strict=True)]
    got, zeros = np.asarray(of_sink), sinks_of(e, axis, 0)[0] == 0
    assert np.all(got[zeros & np.isnan(sink)] == 0)
    values = [w.reshape(-1) for w, g in zip(want, e.groups, strict=True) if g.size]
    np.testing.assert_allclose(got[np.isfinite(sink)], np.concatenate(values), atol=2e-7)


def test_sinks_that_broadcast() -> None:
    """One value per head, or a number: their gradients are sums over all softmaxes, in float32, rounded once."""
    data = np.random.default_rng(0).normal(size=(300, 2, 3)).astype(np.float32)
    x, heads = GroupedTensor(jnp.asarray(data, jnp.bfloat16), ints(100, 150)), jnp.array([1, 2], jnp.bfloat16)

    @jax.jit
    def gradient(sink: Any) -> Any:
        return jax.grad(lambda sink: jnp.sum(x.softmax(sink=sink).data.astype(jnp.float32)))(sink)

    rounded = np.asarray(x.data, np.float64)[:250]
    for sink, axes in ((heads, 0), (jnp.float32(1), (0, 1))):
        p = softmax(rounded, -1, np.asarray(sink, np.float64).reshape(-1, 1)).sum(-1)
        got = gradient(sink)
        assert got.dtype == sink.dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), -np.sum(p * (1 - p), axes), rtol=2**-8)


def test_a_low_sink_makes_masked_groups_zero() -> None:
    """A group whose elements are all -inf: NaN without a sink, as in `jax.nn.softmax`; zero with any finite sink. No
    gradient is NaN then."""
    data = jnp.array([[1.0], [2.0], [-jnp.inf], [-jnp.inf], [jnp.nan]])
    x = GroupedTensor(data, ints(2, 2, 0))
    assert np.isnan(x.softmax(-2).data[2:4]).all()

    def weights(data: Array) -> Array:
        return x.with_data(data).softmax(-2, sink=-1e30).data

    p = softmax(np.array([[1.0], [2.0]]), -2)
    np.testing.assert_allclose(weights(data), np.concatenate([p, np.zeros((3, 1))]), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda data: weights(data)[0, 0]))(data)
    want = np.zeros((5, 1))
    want[:2, 0] = p[0, 0] * (np.array([1, 0]) - p[:, 0])
    np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "sink, error, text",
    [
        (np.ones(3, np.float32), ValueError, "`sink` must broadcast to (4, 2) here, the shape of `x.max(-2)`."),
        (np.ones((1, 4, 2)), ValueError, "`sink` must broadcast to (4, 2) here, the shape of `x.max(-2)`."),
        (per_group(np.ones(4)), TypeError, "`sink` must be a number or an array."),
    ],
)
def test_wrong_sinks(sink: Any, error: type[Exception], text: str) -> None:
    x = GroupedTensor(floats(11, 2), ints(*SIZES))
    with pytest.raises(error) as raised:
        x.softmax(-2, sink=sink)
    assert str(raised.value).startswith(f"`GroupedTensor.softmax`: {text}\nGot x={x!r}, sink=")


@pytest.mark.long
def test_every_transformation_of_softmax_and_logsumexp() -> None:
    """Along rows: vmap over values and over sizes, scan, forward mode, second derivatives, remat."""
    data = np.random.default_rng(0).normal(size=(2, 7, 2))
    dims = [[3, 0, 2], [1, 4, 0]]
    with jax.enable_x64(True):
        batch, sizes = jnp.asarray(data), jnp.array(dims, jnp.int32)

        def total(data: Array, dims: Array) -> Array:
            x = GroupedTensor(data, dims)
            return jnp.sum(x.logsumexp(-2, empty=0)) + jnp.sum(jnp.sin(x.softmax(-2).data))

        def groups(data: np.ndarray, dims: list[int]) -> list[np.ndarray]:
            return np.split(data, np.cumsum(dims))[: len(dims)]

        def want(data: np.ndarray, dims: list[int]) -> float:
            each = [logsumexp(g, -2).sum() + np.sin(softmax(g, -2)).sum() for g in groups(data, dims) if g.size]
            return sum(each)

        def slope(data: np.ndarray, dims: list[int]) -> np.ndarray:
            """`p + p (c - sum(p c))`, with `c = cos(p)`."""
            out = np.zeros_like(data)
            for place, g in zip(np.split(np.arange(7), np.cumsum(dims)), groups(data, dims), strict=False):
                p = softmax(g, -2)
                out[place] = p + p * (np.cos(p) - np.sum(p * np.cos(p), -2, keepdims=True))
            return out

        for args, axes in (((batch, sizes), (0, 0)), ((batch, sizes[0]), (0, None)), ((batch[0], sizes), (None, 0))):
            got = jax.jit(jax.vmap(total, axes))(*args), jax.jit(jax.vmap(jax.grad(total), axes))(*args)
            pairs = [(data[i if axes[0] == 0 else 0], dims[i if axes[1] == 0 else 0]) for i in range(2)]
            np.testing.assert_allclose(got[0], [want(*pair) for pair in pairs], rtol=1e-12)
            np.testing.assert_allclose(got[1], [slope(*pair) for pair in pairs], rtol=1e-10, atol=1e-14)
        _, scanned = jax.lax.scan(
            lambda carry, each: (carry, jax.grad(jax.checkpoint(total))(*each)), 0, (batch, sizes)
        )
        np.testing.assert_allclose(scanned, [slope(*pair) for pair in zip(data, dims, strict=True)], rtol=1e-10)
        tangent = np.cos(np.arange(14.0)).reshape(7, 2)
        forward = jax.jvp(lambda d: total(d, sizes[0]), (batch[0],), (jnp.asarray(tangent),))[1]
        np.testing.assert_allclose(forward, np.sum(slope(data[0], dims[0]) * tangent), rtol=1e-10)
        step = 1e-5
        second = (slope(data[0] + step * tangent, dims[0]) - slope(data[0] - step * tangent, dims[0])) / (2 * step)
        for hessian in (jax.jacfwd(jax.grad(total)), jax.jacrev(jax.grad(total)), jax.jacrev(jax.jacfwd(total))):
            got = jnp.tensordot(jax.jit(hessian)(batch[0], sizes[0]), jnp.asarray(tangent), 2)
            np.testing.assert_allclose(got, second, rtol=1e-7, atol=1e-9)


def test_softmax_tangents_near_the_largest_float() -> None:
    """The derivative treats a row's largest value as a constant, so that large tangents of that row don't overflow."""
    data, tangent = np.array([[1.0, 0.0]], np.float32), np.array([[2e38, -2e38]], np.float32)
    packed_columns = jax.jit(lambda data: GroupedTensor(data, None, ints(2)).softmax().data)
    p = softmax(data)
    want = p * (tangent - np.sum(p * tangent, axis=-1, keepdims=True, dtype=np.float64))
    np.testing.assert_allclose(jax.jvp(packed_columns, (data,), (tangent,))[1], want, rtol=1e-5)


# --- accumulation ---------------------------------------------------------------------------------------------------

# What is differentiated, its cotangent's shape, and its gradient from the cotangent, in float64.
Way = tuple[Callable[[Array], Array], Array | float, tuple[int, ...], Callable[[np.ndarray], Any]]


def ways(sizes: list[int], rows: int, dtype: Any) -> dict[str, Way]:
    """Every place where one value reaches many elements, so that its gradient is a sum over them."""
    ends = np.cumsum([0, *sizes])
    along = [slice(a, b) for a, b in itertools.pairwise(ends.tolist())]
    dims, g, half = ints(*sizes), len(sizes), rows // 2
    packed = GroupedTensor(jnp.zeros((rows, 2), dtype), dims)
    columns = GroupedTensor(jnp.zeros((2, rows), dtype), None, dims)
    uniform = GroupedTensor(jnp.zeros((2, half, 2), dtype))
    few = GroupedTensor(jnp.zeros((3, rows), dtype), ints(2))
    route = ragged.route(jnp.arange(8 * 16, dtype=jnp.int32).reshape(16, 8) % 3, 3)
    place = np.asarray(route.place)
    return {
        "one a group": (
            lambda v: (packed + per_group(v)).data,
            jnp.zeros(g, dtype),
            (rows, 2),
            lambda c: [c[a].sum() for a in along],
        ),
        "a row a group": (
            lambda v: (packed + per_group(v)).data,
            jnp.zeros((g, 2), dtype),
            (rows, 2),
            lambda c: [c[a].sum(0) for a in along],
        ),
        "one a group of columns": (
            lambda v: (columns + per_group(v)).data,
            jnp.zeros(g, dtype),
            (2, rows),
            lambda c: [c[:, a].sum() for a in along],
        ),
        "one a uniform group": (
            lambda v: (uniform + per_group(v)).data,
            jnp.zeros(2, dtype),
            (2, half, 2),
            lambda c: c.sum((1, 2)),
        ),
        "a row a uniform group": (
            lambda v: (uniform + per_group(v)).data,
            jnp.zeros((2, 2), dtype),
            (2, half, 2),
            lambda c: c.sum(1),
        ),
        "one a row": (
            lambda v: (few + per_row(v)).data,
            jnp.zeros(3, dtype),
            (3, rows),
            lambda c: c.sum(1) * [1, 1, 0],
        ),
        "one in all": (lambda v: (packed + v).data, jnp.zeros((), dtype), (rows, 2), lambda c: c[: ends[-1]].sum()),
        "a float": (lambda v: (packed + v).data, 0.0, (rows, 2), lambda c: c[: ends[-1]].sum()),
        "the fill": (
            lambda v: few.to_padded(4, v),
            jnp.zeros((), dtype),
            (1, 4, rows),  # whose sum is no more than float16 holds
            lambda c: c[0, 2:].sum(),
        ),
        "a token of eight rows": (
            lambda v: route.dispatch(v).data,
            jnp.zeros((16, 2), dtype),
            (128, 2),
            lambda c: c[place].sum(1),
        ),
    }


def check_sums(sizes: list[int], rows: int, dtype: Any, bias: float) -> None:
    """Gradients are rounded once, and their sums as exact as float32's (float64's) in blocks."""
    table = ways(sizes, rows, dtype)
    rng = np.random.default_rng(0)
    # Of one sign, nearly: a serial sum in 16 bits stops growing.
    cotangents = {
        name: jnp.asarray(rng.standard_normal(shape) + bias, dtype) for name, (_, _, shape, _) in table.items()
    }
    backward = jax.jit(lambda cs: {name: jax.vjp(f, v)[1](cs[name])[0] for name, (f, v, _, _) in table.items()})
    exact = 1e-14 if dtype == jnp.float64 else 1e-6
    for name, got in backward(cotangents).items():
        c = np.asarray(cotangents[name], np.float64)
        want, scale = (np.asarray(table[name][3](each)) for each in (c, np.abs(c)))
        error = np.abs(np.asarray(got, np.float64) - want)
        assert np.all(error <= float(jnp.finfo(got.dtype).eps) / 2 * np.abs(want) + exact * scale), name


def test_gradient_of_a_row_per_group_is_summed_in_float32() -> None:
    """256 and 127 ones are 383, or 384 in bfloat16, in which the ones would be lost one by one."""
    x, row = GroupedTensor(jnp.zeros((128, 1), jnp.bfloat16), ints(128)), jnp.zeros((1, 1), jnp.bfloat16)
    cotangent = jnp.ones((128, 1), jnp.bfloat16).at[0].set(256)
    gradient = jax.jit(lambda row: jax.vjp(lambda row: (x + per_group(row)).data, row)[1](cotangent)[0])(row)
    assert gradient.tolist() == [[384]]


@pytest.mark.long
def test_gradients_are_summed_in_float32() -> None:
    """Over 16,384 rows in bfloat16, whatever is broadcast and however: the case of a bias of each expert."""
    y = GroupedTensor(jnp.zeros((16_384, 2), jnp.bfloat16), ints(16_384))
    gradient = jax.grad(lambda b: 2 * jnp.mean((y + per_group(b)).data))(jnp.zeros((1, 2), jnp.bfloat16))
    assert gradient.tolist() == [[1, 1]]
    check_sums([1, 0, 127, 128, 129, 1000, 14_000], 16_384, jnp.bfloat16, 1.0)


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
@pytest.mark.parametrize("sizes", [[100_000], [1, 2, 0, 40_000, 59_997], [10] * 10_000, [99_000]], ids=str)
def test_gradients_of_many_rows(sizes: list[int], dtype: Any) -> None:
    """From groups of one row to one group of all, with a tail and without."""
    with jax.enable_x64(dtype == jnp.float64):
        check_sums(sizes, 100_000, dtype, 0.25)


def test_sums_do_not_drift() -> None:
    """A serial float32 sum of as many tenths is off by 1e-4."""
    rows = 2**17
    x = GroupedTensor(jnp.full((rows, 1), 0.1), ints(rows - 1, 1))
    for tensor in (x, x.mT):
        np.testing.assert_allclose(tensor.mean(), np.full(2, np.float32(0.1)), rtol=3e-6)
        np.testing.assert_allclose(
            tensor.sum(tensor.packed_axis).reshape(-1)[0], (rows - 1) * np.float32(0.1), rtol=3e-6
        )


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("sizes", [[2_000_000], [1, 1_500_000, 3, 0, 499_000]], ids=str)
def test_sums_of_many_rows(sizes: list[int], dtype: Any) -> None:
    """Two million rows of 0.1, along every axis."""
    x = GroupedTensor(jnp.full((2_000_000, 1), 0.1, dtype), ints(*sizes))
    rounded = float(jnp.finfo(dtype).eps)
    one, count = float(x.data[0, 0]), np.array(sizes)
    for axis in (None, -2):
        np.testing.assert_allclose(x.mean(axis).astype(jnp.float32).reshape(-1), one * (count > 0), rtol=rounded + 5e-6)
        if dtype != jnp.float16:  # whose largest is 65504
            np.testing.assert_allclose(x.sum(axis).astype(jnp.float32).reshape(-1), one * count, rtol=rounded + 5e-6)


def check_softmax(sizes: list[int], columns: int, dtype: Any, tolerance: float) -> None:
    """Values and gradients of the softmax and of `logsumexp` of packed columns, and of packed rows along them, against
    float64, relative to a group's largest."""
    rng = np.random.default_rng(0)
    data, ct = (jnp.asarray(rng.standard_normal((2, columns)) + shift, dtype) for shift in (0, 3))
    dims = ints(*sizes)

    @jax.jit
    def run(data: Array, ct: Array) -> tuple[list[Array], list[Array], Array]:
        functions = (
            lambda d: GroupedTensor(d, None, dims).softmax().data,
            lambda d: GroupedTensor(d.T, dims).softmax(-2).data.T,
        )
        of_log = jax.grad(lambda d: jnp.sum(GroupedTensor(d.T, dims).logsumexp(-2, empty=0)).astype(jnp.float32))
        logs = GroupedTensor(data.T, dims).logsumexp(-2)
        results = [(out, backward(ct)[0]) for out, backward in (jax.vjp(f, data) for f in functions)]
        return [*(out for out, _ in results), of_log(data)], [gradient for _, gradient in results], logs

    outs, gradients, logs = run(data, ct)
    start, rounding = 0, float(jnp.finfo(dtype).eps) / 2
    for log, size in zip(logs, sizes, strict=True):
        group = slice(start, start + size)
        start += size
        p = softmax(np.asarray(data, np.float64)[:, group])
        c = np.asarray(ct, np.float64)[:, group]
        if size:  # rounded once
            want = logsumexp(np.asarray(data, np.float64)[:, group], -1)
            np.testing.assert_allclose(np.asarray(log, np.float64), want, rtol=rounding + 1e-6)
        want = p * (c - (p * c).sum(-1, keepdims=True))
        for got, wanted in [*((out, p) for out in outs), *((gradient, want) for gradient in gradients)]:
            error = np.abs(np.asarray(got, np.float64)[:, group] - wanted)
            assert np.max(error, initial=0) <= tolerance * np.max(p, initial=0)
    assert not any(np.asarray(each)[:, start:].any() for each in (*outs, *gradients))


def test_gradient_of_softmax_in_bfloat16() -> None:
    check_softmax([1, 0, 3000, 13_000], 16_384, jnp.bfloat16, 2**-6)


@pytest.mark.long
@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 2**-6), (jnp.float16, 2**-9), (jnp.float32, 1e-5)])
def test_gradient_of_softmax_of_many_columns(dtype: Any, tolerance: float) -> None:
    check_softmax([1, 0, 59_000, 40_000], 100_000, dtype, tolerance)
    check_softmax([100_000], 100_000, dtype, tolerance)


@pytest.mark.long
def test_every_transformation_of_per_group() -> None:
    """Forward over reverse, reverse over reverse, vmap over values and over sizes, more than one block."""
    rows = 300
    data = jnp.linspace(0.5, 1.5, 2 * rows).reshape(rows, 2)
    dims = jnp.array([[130, 0, 160], [0, 299, 1]], jnp.int32)
    value = jnp.array([[2.0, 3.0, 4.0], [1.0, 2.0, 3.0]])

    def loss(v: Array, dims: Array) -> Array:
        return jnp.sum((GroupedTensor(data, dims) * per_group(v)).map(jnp.square).data)

    # sum of x² over each group, of which the loss is v² times
    squares = np.array([[np.sum(np.square(g, dtype=np.float64)) for g in GroupedTensor(data, d)] for d in dims])
    both = jax.jit(jax.vmap(loss))(value, dims)
    np.testing.assert_allclose(both, np.sum(squares * np.square(value), -1), rtol=1e-5)
    gradients = jax.jit(jax.vmap(jax.grad(loss)))(value, dims)
    np.testing.assert_allclose(gradients, 2 * squares * value, rtol=1e-5)
    shared = jax.vmap(jax.grad(loss), (0, None))(value, dims[0])
    np.testing.assert_allclose(shared, 2 * squares[:1] * value, rtol=1e-5)
    by_sizes = jax.vmap(jax.grad(loss), (None, 0))(value[0], dims)
    np.testing.assert_allclose(by_sizes, 2 * squares * value[:1], rtol=1e-5)
    want = [np.diag(2 * s) for s in squares]
    for hessian in (jax.jacfwd(jax.grad(loss)), jax.jacrev(jax.grad(loss)), jax.jacrev(jax.jacfwd(loss))):
        np.testing.assert_allclose(jax.jit(hessian)(value[0], dims[0]), want[0], rtol=1e-5)
    tangent = jax.jvp(lambda v: loss(v, dims[1]), (value[1],), (jnp.ones(3),))[1]
    np.testing.assert_allclose(tangent, np.sum(2 * squares[1] * value[1]), rtol=1e-5)
    integers = jnp.array([1, 2, 3], jnp.int32)
    x = GroupedTensor(jnp.ones((rows, 2), jnp.int32), dims[0])
    zero = np.zeros(3, jax.dtypes.float0)
    assert jax.jvp(lambda v: (x * per_group(v)).data, (integers,), (zero,))[1].dtype == jax.dtypes.float0


def test_blocks_keep_groups_apart() -> None:
    """NaN or infinity in one group and in the tail, next to others in one block: sums, gradients, to the bit."""
    dims = ints(130, 20, 0, 100)
    good = np.linspace(0.5, 1.5, 600, dtype=np.float32).reshape(300, 2)

    @jax.jit
    def compute(data: Array) -> tuple[Array, Array]:
        x = GroupedTensor(data, dims)
        gradient = jax.grad(lambda v: jnp.sum((x * per_group(v)).data))(jnp.ones((4, 2)))
        return x.sum(-2), gradient

    want = compute(jnp.asarray(good))
    for poison in (np.nan, np.inf):
        bad = good.copy()
        bad[130:150] = bad[250:] = poison
        for got, wanted in zip(compute(jnp.asarray(bad)), want, strict=True):
            assert not np.any(np.isfinite(got[1]))
            assert np.array_equal(np.delete(got, 1, 0), np.delete(wanted, 1, 0))


def test_without_groups() -> None:
    """All of the buffer is tail."""
    for x in (GroupedTensor(floats(5, 2), ints()), GroupedTensor(floats(5, 2), None, ints()).mT.mT):
        assert not np.asarray((x + per_group(jnp.zeros(0))).data).any()
        assert x.sum().shape == x.mean().shape == (0,)
        for axis in (-1, -2):
            assert not np.asarray(x.softmax(axis).data).any() and not np.asarray(x.softmax(axis, sink=1).data).any()
        assert x.logsumexp().shape == (0,)


# --- containment ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_one_bad_group(kind: str) -> None:
    """NaN or infinity in one group never touches another, nor the tail: values and gradients, to the bit."""
    e = example(kind)

    @jax.jit
    def compute(data: Array) -> tuple[Array, Array, list[Array]]:
        def chain(data: Array) -> Array:
            x = e.with_data(data)
            return (x / per_group(x.sum(empty=1))).map(jnp.exp).softmax().data

        sums = [getattr(e.with_data(data), name)() for name in NUMPY]
        return chain(data), jax.grad(lambda d: jnp.sum(chain(d) ** 2))(data), sums

    for poison in (np.nan, np.inf):
        groups = [np.full_like(e.groups[0], poison), *e.groups[1:]]
        bad, good = compute(e.pack(groups, np.nan)), compute(e.pack(e.groups, np.nan))
        for a, b in zip(bad[:2], good[:2], strict=True):
            assert not np.any(np.isfinite(e.unpack(a)[0]))
            assert all(np.array_equal(p, q) for p, q in zip(e.unpack(a)[1:], e.unpack(b)[1:], strict=True))
            assert np.all(np.asarray(a)[~e.mask] == 0)
        for a, b in zip(bad[2], good[2], strict=True):
            assert not np.isfinite(a[0]) and np.array_equal(a[1:], b[1:])
