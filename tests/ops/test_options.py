"""Options of `ragged.matmul`. `tests/contract` has those that change values."""

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
from tests import cases, oracle
from tests.cases import NAMES
from tests.everywhere import everywhere


@pytest.mark.parametrize("layout", ["outer", "ragged"])
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


def test_precision() -> None:
    """What `lax.dot_general` takes is passed on to it, by each way to multiply."""
    for layout in ("batched", "forward", "wgrad", "ragged"):
        case = cases.make(layout)

        def program(precision: Any, case: cases.Case = case) -> str:
            product = jax.jit(lambda lhs, rhs: ragged.matmul(lhs, rhs, precision=precision).data)
            return product.lower(case.lhs, case.rhs).as_text()

        assert "HIGHEST" in program(jax.lax.Precision.HIGHEST)
        assert "HIGH," in program(["high", "default"])


OFFSETS = [
    *map(jnp.asarray, (np.uint32(2**32 - 1), np.uint32(2**32 - 2), np.uint32(2**31), np.uint8(255))),
    *(np.int64(2**40), np.int64(-(2**32)), np.array(2**32 + 1), np.uint64(2**64 - 1), 2**40, -(2**70)),
]


def test_an_offset_never_wraps_around() -> None:
    """Far outside of the groups, in any dtype, NumPy's and Python's integers too, it meets none of them."""
    case = cases.make("forward", g=4, kind="even")
    for offset in OFFSETS:
        out = ragged.matmul(case.lhs, case.rhs.data[:3], group_offset=offset)
        assert not np.asarray(out.data).any(), repr(offset)


def test_num_actual_groups_is_any_integer() -> None:
    x = GroupedTensor(jnp.ones((8, 1)), jnp.array([3, 5, 0], jnp.int32))
    counts: tuple[Any, ...] = 2, np.int64(2)
    assert [ragged.matmul(x.mT, x, num_actual_groups=n).data.ravel().tolist() for n in counts] == [[3, 5]] * 2


def test_dims_of_the_result() -> None:
    """They are the operands' own arrays."""

    def check(lhs: GroupedTensor, rhs: GroupedTensor) -> None:
        out = ragged.matmul(lhs, rhs)
        assert out.first_dims is lhs.first_dims and out.last_dims is rhs.last_dims

    for layout in NAMES:
        case = cases.make(layout)
        jax.eval_shape(check, case.lhs, case.rhs)


def test_a_shape_alone_groups_nothing() -> None:
    """A matrix with as many rows as there are groups is one matrix of all groups; two have no groups at all."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 4), (4, 3)))
    out = ragged.matmul(GroupedTensor(x, jnp.ones((4,), jnp.int32)), w)
    assert out.kind == "ragged rows" and out.num_groups == 4
    oracle.assert_close([np.asarray(out.data)], [np.asarray(x, np.float64) @ w], max=2e-6)
    with pytest.raises(ValueError, match="there are no groups"):
        ragged.matmul(x, w)


@pytest.mark.long
def test_results_of_64_bits() -> None:
    """They are computed in 64 bits, and so are their derivatives, also if the operands have 32 bits or fewer."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for dtype, wide in (("int32", jnp.int64), ("float32", jnp.float64), ("bfloat16", jnp.float64)):
            x, w = (jnp.asarray(rng.integers(-(2**30), 2**30, shape), dtype) for shape in ((6, 5), (2, 5, 4)))
            route = ragged.route(jnp.array([1, 0, 1, 0, 1, 1]), 2)
            tokens, exact = np.asarray(x)[np.asarray(route.order)].astype(object), np.asarray(w).astype(object)
            want = np.concatenate([tokens[:2] @ exact[0], tokens[2:] @ exact[1]]).astype(wide)
            multiply = partial(ragged.matmul, preferred_element_type=wide)
            for rows in (route.gathered(x), route.dispatch(x)):
                out = multiply(rows, w).data
                assert out.dtype == wide
                np.testing.assert_allclose(out, want, rtol=1e-13, atol=1e3 if wide == jnp.float64 else 0)
            assert rows.first_dims is not None
            by_sizes = rows.data, w, rows.first_dims
            np.testing.assert_array_equal(ragged.lax.ragged_dot(*by_sizes, None, wide), out)
            np.testing.assert_array_equal(ragged.grouped_matmul(*by_sizes, preferred_element_type=wide), out)
            if wide == jnp.float64:

                def loss(x: Array, w: Array, multiply: Any = multiply, route: Any = route) -> Array:
                    return jnp.sum(multiply(route.gathered(x), w).data)

                got = jax.grad(loss, argnums=(0, 1))(x, w)
                dx = exact.sum(2)[[1, 0, 1, 0, 1, 1]].astype(float)
                dw = np.stack([tokens[:2].sum(0), tokens[2:].sum(0)]).astype(float)
                wanted = dx, np.broadcast_to(dw[..., None], w.shape)
                for each, value in zip(got, wanted, strict=True):
                    np.testing.assert_array_equal(each, jnp.asarray(value, dtype))


def test_buffers_of_results() -> None:
    """Their extents, where the operands don't tell how large they must be. `tests/contract` has the values."""
    outer, inner = cases.make("outer"), cases.make("inner_columns")
    for case, options, shape in (
        (outer, {}, (96, 96)),
        (outer, {"max_last": 3}, (96, 3)),
        (inner, {}, (7, 4 * inner.rhs.shape[-1])),
        (inner, {"capacity": 90}, (7, 90)),
    ):
        assert jax.eval_shape(partial(ragged.matmul, **options), case.lhs, case.rhs).data.shape == shape


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


@pytest.mark.parametrize(
    "call, own, missing",
    [
        (ragged.einsum, {"spec"}, {"bias", "out_sharding"}),
        (
            ragged.gated_matmul,
            {"x", "w_gate", "w_up", "columns", "names"},
            {"lhs", "rhs", "existing_out", "num_actual_groups", "max_last", "name"},
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
