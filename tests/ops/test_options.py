"""Options of `ragged.matmul`. `tests/contract` has those that change values."""

import inspect
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from tests import cases
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


def test_dims_of_the_result() -> None:
    """They are the operands' own arrays; its buffer has room for the largest groups that the operands may have."""

    def check(layout: str, lhs: GroupedTensor, rhs: GroupedTensor) -> None:
        out = ragged.matmul(lhs, rhs)
        assert out.first_dims is lhs.first_dims and out.last_dims is rhs.last_dims
        buffers = {"outer": (96, 96), "inner_columns": (7, 4 * rhs.shape[-1])}
        assert out.shape == buffers.get(layout, out.shape)

    for layout in NAMES:
        case = cases.make(layout)
        jax.eval_shape(partial(check, layout), case.lhs, case.rhs)


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
