"""What array users expect of a tensor: `map`, operators, hints for plain arrays, transformations, optimisers.

What operations compute is in `tests/contract/test_tensors.py`.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false
# Wrong calls are made on purpose.

import inspect
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
from tests.cases import check_error, normal
from tests.tensor.examples import floats, ints

DATA = np.random.default_rng(0).uniform(0.5, 2, (8, 3)).astype(np.float32)
SIZES = (3, 0, 2, 1)  # and two rows of tail
ROWS = GroupedTensor(jnp.asarray(DATA).at[6:].set(jnp.nan), ints(*SIZES))
BOTH = GroupedTensor(ROWS.data, ROWS.first_dims, ints(2, 3, 0, 1))
TENSORS = {
    "uniform": GroupedTensor(jnp.asarray(DATA.reshape(4, 2, 3))),
    "rows": ROWS,
    "columns": ROWS.mT,
    "both": BOTH,
    "both, packed columns": BOTH.mT,
}
STRUCTURES = "the tensors have different structures."


# --- map ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TENSORS)
def test_map_calls_once_with_ones_in_the_tail(kind: str) -> None:
    """And `zero_tail=False` keeps what the function makes of them."""
    x, seen = TENSORS[kind], []
    out = x.map(lambda data: seen.append(np.asarray(data)) or data + 1, zero_tail=False)
    assert len(seen) == 1
    assert np.array_equal(seen[0], np.where(x.mask, x.data, 1))
    assert np.array_equal(out.data, np.where(x.mask, x.data + 1, 2))


def test_map_changes_what_is_not_ragged() -> None:
    w = np.arange(15, dtype=np.float32).reshape(3, 5) / 8
    out = ROWS.map(lambda rows: rows @ w)
    assert np.all(np.asarray(out.data)[6:] == 0)
    np.testing.assert_allclose(out.data[:6], DATA[:6] @ w, rtol=1e-6)
    out = ROWS.mT.map(lambda x: jnp.sum(x, axis=0, keepdims=True))
    assert np.all(np.asarray(out.data)[:, 6:] == 0)
    np.testing.assert_allclose(out.data[:, :6], DATA[None, :6].sum(-1), rtol=1e-6)
    assert TENSORS["uniform"].map(lambda x: x[:, :1, :]).shape == (4, 1, 3)
    split = GroupedTensor(floats(8, 6), ints(*SIZES)).map(lambda rows: rows.reshape(-1, 2, 3))
    assert split.shape == (8, 2, 3) and split.map(lambda rows: rows.reshape(8, 6)).shape == (8, 6)


@pytest.mark.parametrize(
    "kind, fn, axes, shape",
    [
        ("uniform", lambda x: x[..., 0], [0], "[4,2]"),
        ("rows", lambda x: x.sum(-1), [0], "[8]"),
        ("columns", lambda x: x.T, [-1], "[8,3]"),
        ("both", lambda x: x[:, :2], [0, -1], "[8,2]"),
        ("both, packed columns", lambda x: x[:2], [0, -1], "[2,8]"),
    ],
)
def test_what_map_must_keep(kind: str, fn: Callable[[Array], Array], axes: list[int], shape: str) -> None:
    rank = {"uniform": "3 dims or more", "rows": "2 dims or more"}.get(kind, "the rank")
    text = f"`fn` must keep {rank} and the extent of axes {axes}.\nGot x={TENSORS[kind]!r}, fn(x.data)=f32{shape}.\n"
    check_error(lambda: TENSORS[kind].map(fn), ValueError, text)


def kept(function: Callable[[Array], Array], data: Any) -> list[tuple[str, tuple[int, ...]]]:
    """What `jax.vjp` keeps of `function`."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda data: jax.vjp(function, data)[1], data))
    return sorted((leaf.dtype.name, leaf.shape) for leaf in leaves)


def two_layers(data: Array) -> Array:
    return jnp.tanh(jax.checkpoint(lambda data: jax.nn.silu(jnp.sin(data)))(data))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("kind", TENSORS)
def test_map_keeps_no_more_than_its_function(kind: str, jitted: bool) -> None:
    """For its derivative: the arrays that the function keeps of an array, and sizes. `jax.checkpoint` works inside."""
    x, wrap = TENSORS[kind], jax.jit if jitted else (lambda function: function)
    data = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    for function in (jax.nn.silu, jax.nn.gelu, jax.checkpoint(jax.nn.silu), two_layers, jax.nn.softmax):
        of_array = kept(wrap(function), data)
        of_tensor = kept(wrap(lambda data, f=function: x.with_data(data).map(f).data), data)
        assert of_tensor == sorted(of_array + [("int32", (4,))] * sum(x.ragged))


# --- what combines --------------------------------------------------------------------------------------------------


def test_scalars() -> None:
    """Of every kind, under `jit` and outside, from both sides: the dtype doesn't change."""
    for scalar in (2, -1.5, np.float32(2.5), np.array(2.5, np.float32), jnp.float32(2.5)):
        for out in (ROWS - scalar, jax.jit(operator.sub)(ROWS, scalar), -(scalar - ROWS)):
            assert out.dtype == jnp.float32
            np.testing.assert_allclose(np.asarray(out.data)[:6], DATA[:6] - np.float32(scalar), rtol=1e-6)
    assert not np.asarray(((ROWS > 0) * np.bool_(False)).data).any()  # a bool of NumPy, which is no `np.number`


OTHERS = {
    "columns": ROWS.mT,
    "uniform": GroupedTensor(floats(4, 2, 3)),
    "both": BOTH,
    "sizes": GroupedTensor(floats(8, 3), ints(3, 0, 1, 2)),
    "fewer groups": GroupedTensor(floats(8, 3), ints(3, 0, 3)),
    "capacity": GroupedTensor(floats(9, 3), ints(*SIZES)),
    "one column, other sizes": GroupedTensor(floats(8, 1), ints(3, 0, 1, 2)),
    "one row, fewer groups": GroupedTensor(floats(3, 1, 3)),
    "one row, other columns": GroupedTensor(floats(4, 1, 2)),
    "a row of columns": GroupedTensor(floats(1, 8), None, ints(*SIZES)),
}


def test_other_structures() -> None:
    for name, other in OTHERS.items():
        shapes = "the tensors have buffers of different shapes, (8, 3) and (9, 3)."
        problem = shapes if name == "capacity" else STRUCTURES
        text = f"{problem}\nGot x={ROWS!r}, other={other!r}.\n"
        check_error(lambda other=other: ROWS / other, ValueError, f"`GroupedTensor / GroupedTensor`: {text}")
        check_error(lambda other=other: ROWS.map(jnp.add, other), ValueError, f"`GroupedTensor.map`: {text}")
    u, v = GroupedTensor(floats(2, 3, 1)), GroupedTensor(floats(2, 1, 3))
    check_error(lambda: u + v, ValueError, "buffers of different shapes, (2, 3, 1) and (2, 1, 3).")
    # Two square buffers with the same dims, packed along different axes.
    x, y = (GroupedTensor(floats(4, 4), ints(1, 2), ints(2, 1), transposed=turned) for turned in (False, True))
    check_error(lambda: x + y, ValueError, STRUCTURES)
    # Packed columns whose groups have other rows: a single row must not be taken for one that all rows share.
    both = partial(GroupedTensor, last_dims=ints(2, 2), transposed=True)
    many, one = both(jnp.ones((3, 4)), ints(2, 3)), both(jnp.ones((1, 4)), ints(1, 0))
    for call in (lambda: many + one, lambda: many.mT + one.mT):
        check_error(call, ValueError, STRUCTURES)
    check_error(lambda: ROWS.map(jnp.add, None), TypeError, "`fn` can't be called with a NoneType.")


def test_one_column() -> None:
    """A reduction of ragged-both rows of one column combines with them, though the buffers have one shape."""
    x = GroupedTensor(floats(4, 1), ints(2, 1), ints(1, 0))
    out = jax.jit(lambda x: 2 * x - x.mean(-1, keepdims=True))(x)
    assert out.kind == "ragged both" and out.data[:, 0].tolist() == [1, 1, 0, 0]


GROUP = "One value per group is `ragged.per_group(v)`."
ROW = "One value per row is `ragged.per_row(v)`."
COLUMN = "One value per column is `ragged.per_column(v)`."


HINTS: list[tuple[str, tuple[int, ...], str]] = [
    ("rows", (4,), GROUP),
    ("rows", (8,), ROW),
    ("rows", (8, 3), "One value per element is `x.map(lambda data: v - data)`."),
    ("columns", (3,), ROW),
    ("columns", (4, 3), "One column per group is `ragged.per_group(v)`."),
    ("columns", (8,), COLUMN),
    ("both", (4,), GROUP),
    ("both", (3,), COLUMN),
    ("uniform", (4, 2), ROW),
]


def test_hints_for_plain_arrays() -> None:
    """The hint is the one for the shape that came, for arrays of NumPy and JAX."""
    for kind, shape, hint in HINTS:
        for v in (np.ones(shape, np.float32), jnp.ones(shape)):
            text = f"v=f32[{','.join(map(str, shape))}].\n{hint}"
            check_error(lambda v=v, x=TENSORS[kind]: v - x, TypeError, text)


def test_plain_vectors() -> None:
    """One value a column, from both sides, unless it could be one value a group."""
    v = np.arange(3, dtype=np.float32)
    for got, want in ((ROWS - v, DATA - v), (v - ROWS, v - DATA), (ROWS >= v, DATA >= v)):  # noqa: SIM300
        assert np.array_equal(got.data, np.where(ROWS.mask, want, 0))
    x, v = GroupedTensor(floats(8, 4), ints(2, 2, 2, 2)), jnp.arange(4.0)
    for call in (lambda: x + v, lambda: v * x, lambda: x.map(jnp.add, v)):
        check_error(call, TypeError, f"{GROUP} {COLUMN}")
    assert (x + per_column(v)).data[0].tolist() == (x + per_group(v)).data[::2, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "kind, wrapped, want",
    [
        ("rows", per_group(floats(1)), (4,)),
        ("rows", per_group(floats(4, 2)), "(4,) or (4, 3)"),
        ("rows", per_row(floats(8, 2)), (8, 3)),
        ("rows", per_column(floats(2)), (3,)),
        ("columns", per_group(floats(4, 8)), "(4,) or (4, 3)"),
        ("columns", per_row(floats(8)), (3,)),
        ("both", per_group(floats(4, 2)), "(4,) or (4, 3)"),
        ("uniform", per_row(floats(4)), (4, 2)),
        ("uniform", per_group(floats(3)), (4,)),
        ("uniform", per_group(floats(4, 5)), "(4,) or (4, 3)"),
    ],
)
def test_wrong_shapes_of_values(kind: str, wrapped: Any, want: Any) -> None:
    check_error(lambda: TENSORS[kind] * wrapped, ValueError, f"(v)`: `v` must have shape {want} here.\n")


def test_numbers_and_flags_of_reductions() -> None:
    """NumPy's scalars are as good as Python's. What isn't a number, an axis or a flag raises at the call."""
    x, uniform = TENSORS["both"], TENSORS["uniform"]
    np.testing.assert_array_equal(
        x.softmax(np.int64(-1), causal=np.True_).data, x.softmax(axis=x.ndim - 1, causal=True).data
    )
    assert x.sum(np.int8(-1), keepdims=np.True_).shape == (8, 1)
    assert GroupedTensor(floats(2, 0, 3)).sum(-2, empty=np.arange(3)).tolist() == [[0, 1, 2]] * 2
    text = "a"
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: x.sum(-1.0), "`axis` of a reduction is -1.0"),
        (lambda: x.softmax(-1.0), "`axis` is -1.0"),
        (lambda: x.softmax(True), "`axis` is True"),
        (lambda: x.sum(np.array(-1)), r"`axis` of a reduction is i64\[\]"),
        (lambda: x.sum(keepdims=1), "`keepdims` is 1"),
        (lambda: x.softmax(causal=text), "`causal` is 'a'"),
        (lambda: x.sum(empty=text), "`empty` is 'a'"),
        (lambda: x.sum(empty=np.array(text)), "`empty` is <U1"),
        (lambda: x.sum(empty=jax.random.key(0)), "`empty` is key<fry>"),
        (lambda: x.mean(empty=np.ones(3)), r"must broadcast to \(4,\)"),
        (lambda: uniform.sum(empty=np.ones(3)), r"must broadcast to \(4,\)"),
        (lambda: x.astype(jnp.float8_e4m3fn).var(empty=1e10), "can't hold `empty`"),
        (lambda: x.to_padded(2**31), "`max_len` is 2147483648"),
        (lambda: x.to_padded(np.int64(2**31)), "`max_len` is (np.int64.)?2147483648"),
        (lambda: GroupedTensor(x.data, range(4)), "`first_dims` is a range"),
        (lambda: GroupedTensor([[1.0]], x.first_dims), "`data` is a list"),
        (lambda: GroupedTensor.from_padded([[1.0], [2.0, 3.0]], [1, 2]), "`padded` is not an array"),
        (lambda: GroupedTensor.from_padded(floats(2, 1, 1), [1, 2**70]), "`first_dims` is not an array"),
    ]
    for call, problem in calls:
        with pytest.raises((TypeError, ValueError), match=f"(?s)^`GroupedTensor.*{problem}"):
            call()


def test_per_group_of_a_uniform_tensor() -> None:
    """Any shape whose axes after the groups broadcast."""
    x = TENSORS["uniform"]
    for shape in ((4, 3), (4, 2, 1), (4, 1, 3), (4, 2, 3)):
        v = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        want = np.asarray(x.data) * (v[:, None] if v.ndim == 2 else v)
        np.testing.assert_array_equal((x * per_group(jnp.asarray(v))).data, want)


def test_equality_and_hashes() -> None:
    """Of arrays by element, of wrapped values too; of what isn't comparable False; of specs as Equinox has it."""
    assert [ROWS == other for other in (None, "a", object())] == [False] * 3 and ROWS != "a"  # noqa: SIM300
    with pytest.raises(TypeError, match="unhashable"):
        hash(ROWS)
    specs, others = (jax.tree.map(lambda _, n=n: n, ROWS) for n in (0, 1))
    assert specs == specs and hash(specs) == hash(jax.tree.map(lambda _: 0, ROWS))
    assert (specs == others, specs != others, specs == 0, specs != 0) == (False, True, False, True)
    assert (ROWS == specs, ROWS != specs, specs == ROWS) == (False, True, False)  # noqa: SIM300
    x, one = GroupedTensor(jnp.arange(4.0)[:, None], ints(2, 1)), per_row(jnp.ones(4))
    for equal, differ in ((x == one, x != one), (one == x, one != x)):
        assert isinstance(equal, GroupedTensor) and isinstance(differ, GroupedTensor)
        assert equal.data[:, 0].tolist() == [False, True, False, False]
        assert differ.data[:, 0].tolist() == [True, False, True, False]
    same = per_row(np.ones(4))
    assert same == per_row(np.ones(4)) and same != per_row(np.zeros(4)) and same != 1


def test_at_is_matmul() -> None:
    """From both sides, with plain arrays of JAX and NumPy: the same program."""
    w, v = np.ones((4, 3, 2), np.float32), np.ones((4, 2, 3), np.float32)
    for lhs, rhs in ((ROWS, w), (ROWS, jnp.asarray(w)), (v, ROWS.mT), (jnp.asarray(v[0]), ROWS.mT)):
        by_at, by_name = (jax.make_jaxpr(f)(lhs, rhs) for f in (operator.matmul, ragged.matmul))
        assert str(by_at) == str(by_name)
    with pytest.raises(TypeError, match="`rhs` is not an array"):
        _ = ROWS @ "w"


# --- what refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "window", [True, (1,), (1, 2, 3), 1.5, (0, -2), "all", (jnp.ones(2, jnp.int32), 0), jnp.int32(-1)]
)
def test_windows_that_are_none(window: Any) -> None:
    check_error(lambda: BOTH.softmax(window=window), ValueError, "`GroupedTensor.softmax`: `window` is ")


def test_traced_windows_are_clipped() -> None:
    got = jax.jit(lambda left: BOTH.softmax(window=(left, jnp.int32(1))))(jnp.int32(-2))
    assert np.array_equal(got.data, BOTH.softmax(window=(0, 1)).data)


def test_axes_and_slices() -> None:
    for axis in (0, 1, -3):
        check_error(partial(ROWS.sum, axis), ValueError, f"`axis` of a reduction is {axis}.\n")
    assert str(jax.make_jaxpr(lambda x: x.softmax(1))(ROWS)) == str(jax.make_jaxpr(lambda x: x.softmax())(ROWS))
    check_error(partial(ROWS.softmax, 2), ValueError, "`axis` is 2.\n")
    causal = jax.jit(lambda x: x.softmax(causal=True))(GroupedTensor(floats(1, 2, 4)))  # The last row sees all columns.
    np.testing.assert_allclose(causal.data, [[[1 / 3] * 3 + [0], [1 / 4] * 4]], rtol=1e-6)
    for end in (0.5, True, jnp.ones(3, jnp.int32)):
        check_error(
            partial(ROWS.rows, end, None), TypeError, "`start` and `stop` must be ints, None, or integer arrays"
        )
    capacities = [ROWS.rows(*ends).capacity for ends in ((0, 1), (-1, None), (1, None), (2, 1))]
    assert capacities == [4, 4, 8, 0] and ROWS.rows(np.int64(0), np.int32(1)).capacity == 4
    assert ROWS.rows(jnp.int32(0), jnp.int32(1)).capacity == 8


def test_quantised_tensors_refuse() -> None:
    """Nothing looks at what is stored without its scales."""
    q = ragged.quantize(ROWS, jnp.int8, "row")
    for use in (
        lambda: q.softmax(causal=True),
        lambda: q == q,
        lambda: q.rows(0, 1),
        lambda: q.var(),
        lambda: q.min(keepdims=True),
        lambda: q.dequantize().map(jnp.add, q),
    ):
        check_error(use, TypeError, "a quantised tensor has no arithmetic")


@pytest.mark.parametrize(
    "call", [jnp.exp, jnp.sum, jax.nn.silu, jnp.asarray, jnp.zeros_like, np.asarray, np.sum, np.sort]
)
def test_functions_of_arrays_name_the_method(call: Callable[[Any], Any]) -> None:
    """The hint is in the error, under `jit` too."""
    for use in (call, jax.jit(lambda x: call(x))):
        check_error(
            lambda use=use: use(ROWS), TypeError, ".\n`x.map(jax.nn.silu)` applies an elementwise or rowwise function"
        )


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


def test_hints_for_what_newcomers_pass() -> None:
    """Offsets in place of sizes, an array in place of an int, and pairs that are lists."""
    x = GroupedTensor(jnp.ones((8, 2)), ints(0, 3, 8))
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


# --- transformations ------------------------------------------------------------------------------------------------


def test_optimisers_step_over_tensors() -> None:
    """A model whose parameters are tensors, ragged and uniform, by optax."""
    rows = GroupedTensor(normal((8, 3)).at[6:].set(jnp.nan), first_dims=ints(2, 4))
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


@pytest.mark.long
def test_infinite_derivatives_by_a_number() -> None:
    """The tail, and groups that have no elements, don't make them NaN."""

    @jax.jit
    def slopes(s: Array, sizes: Array) -> list[Array]:
        both = GroupedTensor(jnp.ones((4, 2)), sizes), GroupedTensor(jnp.ones((2, 4)), None, sizes)
        return [jax.grad(lambda s, x=x: (x / s).sum().sum())(s) for x in both]

    for sizes, want in (((1, 1), -np.inf), ((0, 0), 0)):
        assert slopes(jnp.float32(0), ints(*sizes)) == [want, want]
