"""Options of `ragged.matmul`, and operands at the limits. `tests/contract.py` has what every backend honours."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from ragged.tuning import XlaConfig
from tests import cases, oracle
from tests.cases import LETTERS, NAMES, TOLERANCE
from tests.everywhere import everywhere

pytestmark = pytest.mark.sampled


@pytest.mark.long
def test_float64_under_x64() -> None:
    with jax.enable_x64(True):
        for layout in NAMES:
            case = cases.make(layout, dtype="float64")
            out = ragged.matmul(case.lhs, case.rhs)
            assert out.dtype == jnp.float64
            got = case.unpack(np.asarray(out.data))
            oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e5m2"])
@pytest.mark.parametrize("result", ["float8_e4m3fn", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["batched", "forward", "wgrad", "outer"])
def test_narrow_results_that_are_added_to(layout: str, result: str, dtype: str) -> None:
    """A result of any float dtype can be accumulated into, 8 bits included."""
    case = cases.make(layout, dtype=dtype)
    ones = (GroupedTensor(jnp.ones_like(x.data), x.first_dims, x.last_dims) for x in (case.lhs, case.rhs))
    lhs, rhs = ones
    bare = ragged.matmul(lhs, rhs, preferred_element_type=jnp.float32)
    existing = ragged.matmul(lhs, rhs, preferred_element_type=result)
    out = ragged.matmul(lhs, rhs, preferred_element_type=result, existing_out=existing)
    want = bare.data + existing.data.astype(jnp.float32)
    assert out.dtype == jnp.dtype(result)
    assert np.array_equal(np.asarray(out.data), np.asarray(want.astype(result)))


def test_a_wgrad_of_some_groups() -> None:
    """The result holds the matrices of the groups that are asked for, and no others."""
    rng, sizes = np.random.default_rng(0), np.array([2, 3, 1], np.int32)
    x, dy = (rng.normal(size=(6, width)).astype(np.float32) for width in (3, 2))

    def wgrad(x: Array, dy: Array) -> Array:
        options: Any = {"group_offset": 1, "num_actual_groups": 2}
        return ragged.matmul(GroupedTensor(x, sizes).mT, GroupedTensor(dy, sizes), **options).data

    want = oracle.matmul([x[2:5].T, x[5:].T], [dy[2:5], dy[5:]])
    np.testing.assert_allclose(jax.jit(wgrad)(x, dy), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", ["int16", "int32"])
@pytest.mark.parametrize("narrow", ["float8_e4m3fn", "bfloat16", "float16"])
def test_wide_integers_with_narrow_floats(narrow: str, wide: str) -> None:
    """Neither fp8 nor bfloat16 holds an integer of about 1000: they meet in float32."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 5)).astype(jnp.dtype(narrow))
    w = rng.integers(900, 1100, (2, 5, 3)).astype(wide)
    dims = jnp.array([2, 4], jnp.int32)
    want = oracle.matmul(oracle.unpack(x, (True, False), [2, 4], [5, 5]), list(w))
    right = ragged.matmul(GroupedTensor(jnp.asarray(x), dims), jnp.asarray(w), preferred_element_type=jnp.float32).data
    columns = GroupedTensor(jnp.asarray(x.T), last_dims=dims)
    left = ragged.matmul(jnp.asarray(w).mT, columns, preferred_element_type=jnp.float32).data.T
    for out in (right, left):
        oracle.assert_close(oracle.unpack(np.asarray(out), (True, False), [2, 4], [3, 3]), want, max=1e-6)


@pytest.mark.parametrize("layout", ["outer", "inner_rows", "inner_columns", "ragged"])
def test_tiles_of_ragged_dims_are_honoured(layout: str) -> None:
    """With a tile of 8 along each ragged dim, no dot in the program is larger than that along it."""
    case = cases.make(layout, uniform=(7, 5, 6))

    def largest(backend: Any) -> int:
        text = jax.jit(lambda a, b: ragged.matmul(a, b, backend=backend).data).lower(case.lhs, case.rhs).as_text()
        dots = re.findall(r"stablehlo\.dot_general.*: \(tensor<(\d+)x(\d+)xf32>, tensor<(\d+)x(\d+)xf32>\)", text)
        assert dots
        return max(int(extent) for dot in dots for extent in dot)

    assert largest(everywhere("xla", 8, 8, 8)) == 8
    assert largest(None) > 8


@pytest.mark.parametrize("layout", NAMES)
def test_precision(layout: str) -> None:
    """What `lax.dot_general` takes is passed on to it."""
    case = cases.make(layout)

    def fn(lhs: Array) -> Array:
        x = GroupedTensor(lhs, case.lhs.first_dims, case.lhs.last_dims)
        return ragged.matmul(x, case.rhs, precision=jax.lax.Precision.HIGHEST).data

    assert "HIGHEST" in jax.jit(fn).lower(case.lhs.data).as_text()
    got = case.unpack(np.asarray(fn(case.lhs.data)))
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=2e-5)
    precision: Any = ["high", "default"]
    assert ragged.matmul(case.lhs, case.rhs, precision=precision).dtype == jnp.float32


@pytest.mark.parametrize("tiles", [(8, 8, 8), (1, 1, 1), (7, 13, 5)], ids=str)
@pytest.mark.parametrize("layout", NAMES)
def test_tiles(layout: str, tiles: Any) -> None:
    """Any tiles give the same product, and so do those of its derivatives."""
    case, how = cases.make(layout), everywhere("xla", *tiles)
    out = ragged.matmul(case.lhs, case.rhs, backend=how)
    got = case.unpack(np.asarray(out.data))
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), max=2e-5)

    def loss(lhs: Array, backend: Any) -> Array:
        x = GroupedTensor(lhs, case.lhs.first_dims, case.lhs.last_dims)
        return jnp.sum(jnp.sin(ragged.matmul(x, case.rhs, backend=backend).data))

    np.testing.assert_allclose(jax.grad(loss)(case.lhs.data, how), jax.grad(loss)(case.lhs.data, None), atol=1e-4)


@pytest.mark.parametrize("layout", NAMES)
def test_backend_xla(layout: str) -> None:
    """Naming it, or passing its empty record, changes nothing on the CPU."""
    case = cases.make(layout)
    want = ragged.matmul(case.lhs, case.rhs).data
    for backend in ("xla", XlaConfig()):
        assert np.array_equal(ragged.matmul(case.lhs, case.rhs, backend=backend).data, want)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
@pytest.mark.parametrize("kind", ["uniform", "ragged"])
def test_a_matrix_shared_by_all_groups(side: str, kind: str) -> None:
    """A 2-D array multiplies every group; its gradient is the sum over groups."""
    layout = {("rhs", "uniform"): "batched", ("lhs", "uniform"): "batched", ("rhs", "ragged"): "forward"}.get(
        (side, kind), "forward_left"
    )
    case = cases.make(layout, g=4)
    shared = (case.lhs_groups if side == "lhs" else case.rhs_groups)[0]
    tensor = case.rhs if side == "lhs" else case.lhs
    groups = case.rhs_groups if side == "lhs" else case.lhs_groups

    def product(matrix: Array, data: Array, **options: Any) -> GroupedTensor:
        x = GroupedTensor(data, tensor.first_dims, tensor.last_dims)
        return ragged.matmul(*((matrix, x) if side == "lhs" else (x, matrix)), **options)

    matrix = jnp.asarray(shared)
    out = product(matrix, tensor.data)
    want = [shared.astype(np.float64) @ b if side == "lhs" else b @ shared.astype(np.float64) for b in groups]
    oracle.assert_close(case.unpack(np.asarray(out.data)), want, max=2e-5)
    case.assert_tail_zero(out)
    twice = product(matrix, tensor.data, existing_out=out)
    oracle.assert_close(case.unpack(np.asarray(twice.data)), [2 * w for w in want], max=2e-5)
    grad = np.asarray(jax.grad(lambda m: jnp.sum(product(m, tensor.data).data))(matrix), np.float64)
    ones = [np.ones_like(w) for w in want]
    sums = [o @ b.T if side == "lhs" else b.T @ o for b, o in zip(groups, ones, strict=True)]
    oracle.assert_close([grad], [np.sum(sums, axis=0)], max=2e-5)
    assert np.isfinite(jax.grad(lambda d: jnp.sum(product(matrix, d).data))(tensor.data)).all()
    # A result of 8 bits has no gradient, with respect to the matrix and to the groups.
    eight_bits = partial(product, preferred_element_type=jnp.float8_e4m3fn)
    for which in (0, 1):
        with pytest.raises(TypeError, match="the result is float8_e4m3fn, so its cotangent would have 8 bits too"):
            jax.grad(lambda *args: jnp.sum(eight_bits(*args).data.astype(jnp.float32)), which)(matrix, tensor.data)


def test_a_shape_alone_groups_nothing() -> None:
    """A matrix with as many rows as there are groups is one matrix of all groups; two have no groups at all."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 4), (4, 3)))
    out = ragged.matmul(GroupedTensor(x, jnp.ones((4,), jnp.int32)), w)
    assert out.kind == "ragged rows" and out.num_groups == 4
    oracle.assert_close([np.asarray(out.data)], [np.asarray(x, np.float64) @ w], max=2e-6)
    with pytest.raises(ValueError, match="there are no groups"):
        ragged.matmul(x, w)


@pytest.mark.parametrize("layout", NAMES)
def test_no_rows_no_columns_nothing_to_contract(layout: str) -> None:
    """Extents of zero give zeros, forward and backward."""
    for uniform in [(0, 3, 2), (4, 0, 2), (4, 3, 0)]:
        for capacity in (0, 12):
            if capacity and set(LETTERS[layout]) == set("mkn"):
                continue
            case = cases.make(layout, g=3, capacity=capacity, uniform=uniform, slack=False)
            out = ragged.matmul(case.lhs, case.rhs)
            want = oracle.matmul(case.lhs_groups, case.rhs_groups)
            oracle.assert_close(case.unpack(np.asarray(out.data)), want, max=2e-5)
            grad = jax.grad(lambda d, case=case: jnp.sum(ragged.matmul(case.lhs.with_data(d), case.rhs).data))
            assert grad(case.lhs.data).shape == case.lhs.shape


@pytest.mark.parametrize("layout", NAMES)
def test_no_groups(layout: str) -> None:
    letters = LETTERS[layout]
    none = jnp.zeros((0,), jnp.int32)
    of = {letter: none if letter in letters else None for letter in "mkn"}
    lhs = GroupedTensor(jnp.ones((0, 4, 4) if not set("mk") & set(letters) else (4, 4)), of["m"], of["k"])
    rhs = GroupedTensor(jnp.ones((0, 4, 4) if not set("kn") & set(letters) else (4, 4)), of["k"], of["n"])
    out = ragged.matmul(lhs, rhs)
    assert out.num_groups == 0
    assert np.array_equal(np.asarray(out.data), np.zeros(out.shape))


def test_capacity_and_max_last() -> None:
    """The result's buffer where the operands don't tell how large it must be."""
    outer = cases.make("outer", g=4, kind="even")
    widest = int(outer.sizes["n"].max())
    assert ragged.matmul(outer.lhs, outer.rhs).shape == (96, 96)
    out = ragged.matmul(outer.lhs, outer.rhs, max_last=widest)
    assert out.shape == (96, widest)
    want = oracle.matmul(outer.lhs_groups, outer.rhs_groups)
    oracle.assert_close(outer.unpack(np.asarray(out.data)), want, max=2e-5)
    cut = ragged.matmul(outer.lhs, outer.rhs, max_last=3)
    for got, w in zip(cut.to_list(), want, strict=True):
        oracle.assert_close([np.asarray(got)], [w[:, :3]], max=2e-5)

    inner = cases.make("inner_columns", g=4, kind="even")
    assert ragged.matmul(inner.lhs, inner.rhs).shape == (7, 4 * inner.rhs.shape[-1])
    out = ragged.matmul(inner.lhs, inner.rhs, capacity=90)
    assert out.shape == (7, 90)
    oracle.assert_close(inner.unpack(np.asarray(out.data)), oracle.matmul(inner.lhs_groups, inner.rhs_groups), max=2e-5)


@pytest.mark.long
def test_attention_forward_and_backward() -> None:
    """The layouts at work together: softmax(q kᵀ) v for sequences of different lengths, against a loop."""
    rng = np.random.default_rng(0)
    dims = jnp.array([5, 0, 9, 2], jnp.int32)
    q, k, v = (jnp.asarray(rng.standard_normal((20, 4)), jnp.float32).at[16:].set(jnp.nan) for _ in range(3))

    def attention(q: Array, k: Array, v: Array) -> Array:
        queries, keys, values = (GroupedTensor(x, first_dims=dims) for x in (q, k, v))
        weights = ragged.matmul(queries, keys.mT, max_last=9).softmax()
        return ragged.matmul(weights, values).data

    def loop(q: Array, k: Array, v: Array) -> Array:
        rows, start = [], 0
        for size in (5, 0, 9, 2):
            a, b, c = (x[start : start + size] for x in (q, k, v))
            rows.append(jax.nn.softmax(a @ b.T, axis=-1) @ c)
            start += size
        return jnp.concatenate([*rows, jnp.zeros((4, 4))])

    np.testing.assert_allclose(attention(q, k, v), loop(q, k, v), atol=1e-5)

    def grads(fn: Callable[..., Array]) -> Any:
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(fn(*xs))), argnums=(0, 1, 2))(q, k, v)

    for got, want in zip(grads(attention), grads(loop), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("g", [1, 3])
@pytest.mark.parametrize("layout", NAMES)
def test_sizes_that_are_constants_of_the_program(layout: str, g: int) -> None:
    """XLA folds what it knows; its CPU backend can't run every bfloat16 dot that is left then."""
    case = cases.make(layout, g=g, dtype="bfloat16", uniform=(100, 7, 130))

    @jax.jit
    def product(lhs: Array, rhs: Array) -> Array:
        sides = (
            GroupedTensor(data, x.first_dims, x.last_dims, transposed=x.transposed)
            for data, x in ((lhs, case.lhs), (rhs, case.rhs))
        )
        return ragged.matmul(*sides).data

    out = product(case.lhs.data, case.rhs.data)
    want = oracle.matmul(case.lhs_groups, case.rhs_groups)
    worst, rms = TOLERANCE["bfloat16"]
    oracle.assert_close(case.unpack(np.asarray(out).astype(np.float64)), want, max=worst, rms=rms)


@pytest.mark.parametrize(
    "call, own, missing",
    [
        (ragged.einsum, {"spec"}, {"bias", "out_sharding"}),
        (
            ragged.gated_matmul,
            {"x", "w_gate", "w_up", "columns"},
            {"lhs", "rhs", "existing_out", "num_actual_groups", "max_last"},
        ),
    ],
)
def test_options_are_stated(call: Any, own: set[str], missing: set[str]) -> None:
    """A new option of `matmul` reaches no other call unasked; those that are there have its defaults."""
    of_matmul, stated = (inspect.signature(each).parameters for each in (ragged.matmul, call))
    assert {*of_matmul} - {*stated} == missing and {*stated} - {*of_matmul} == own
    assert not [each for each in stated.values() if each.kind == each.VAR_KEYWORD]
    for name in {*stated} & {*of_matmul} - {"activation"}:
        assert stated[name].default == of_matmul[name].default, name
