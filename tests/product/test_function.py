"""Activations that are functions: how they are traced, compared and refused, and what kernels compute of them."""

import math
import re
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

import ragged
from ragged import GroupedTensor
from ragged.backends.gpu.functions import FORMULAS
from ragged.backends.tpu.launch import PRIMITIVES
from ragged.core.errors import Site
from ragged.product.function import ACTIVATIONS, Function, function_of
from ragged.tuning import GpuConfig, TpuConfig
from tests import gpu
from tests.cases import compilations
from tests.contract import epilogues as contract
from tests.contract.launches import launches

SITE = Site("test")
Pair = tuple[Callable[..., Any], Callable[[Any], Any]]  # of JAX and of NumPy, in float64
Pair3 = tuple[Any, Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]  # and its derivatives

SMALL = np.geomspace(1e-6, 1, 50)
ENDS = [np.inf, -np.inf, np.nan, 0.0, 100.0, -100.0, 1e30, -1e30]
NUMBERS = np.float32(np.concatenate([np.linspace(-9, 9, 361), SMALL, -SMALL, ENDS])).astype(float)


# By the name of the primitive that each of them has, of those that GPU kernels have a formula for.
FUNCTIONS: dict[str, Pair] = {
    "abs": (jnp.abs, np.abs),
    "add": (lambda z: z + 3, lambda z: z + 3),
    "add_any": (lambda z: jax.vjp(lambda z: z * z * z, z)[1](jnp.ones_like(z))[0], lambda z: 3 * z * z),
    "and": (lambda z: jnp.where((z > -1) & (z < 1), z, 2), lambda z: np.where((z > -1) & (z < 1), z, 2)),
    "ceil": (lax.ceil, np.ceil),
    "clamp": (lambda z: lax.clamp(-2.0, z, 3.0), lambda z: np.clip(z, -2, 3)),
    "convert_element_type": (
        lambda z: (z > 0).astype(jnp.float32) + z.astype(jnp.bfloat16).astype(jnp.float32),
        lambda z: (z > 0) + np.asarray(z.astype(jnp.bfloat16), float),
    ),
    "cos": (lax.cos, np.cos),
    "div": (lambda z: 3 / z, lambda z: 3 / z),
    "eq": (lambda z: jnp.where(z == 9, 1, z), lambda z: np.where(z == 9, 1, z)),
    "erf": (lax.erf, np.vectorize(math.erf, [float])),
    "erfc": (lax.erfc, np.vectorize(math.erfc, [float])),
    "exp": (lax.exp, np.exp),
    "exp2": (lax.exp2, np.exp2),
    "expm1": (lax.expm1, np.expm1),
    "floor": (lax.floor, np.floor),
    "ge": (lambda z: jnp.where(z >= 9, 1, z), lambda z: np.where(z >= 9, 1, z)),
    "gt": (lambda z: jnp.where(z > 2, 1, z), lambda z: np.where(z > 2, 1, z)),
    "integer_pow": (lambda z: lax.integer_pow(z, 0) + z**3 - z**-2, lambda z: 1 + z**3 - z**-2.0),
    "is_finite": (lambda z: jnp.where(jnp.isfinite(z), z, 0), lambda z: np.where(np.isfinite(z), z, 0)),
    "le": (lambda z: jnp.where(z <= -9, 1, z), lambda z: np.where(z <= -9, 1, z)),
    "log": (lax.log, np.log),
    "log1p": (lax.log1p, np.log1p),
    "logistic": (lax.logistic, contract.sigmoid),
    "lt": (lambda z: jnp.where(z < 2, 1, z), lambda z: np.where(z < 2, 1, z)),
    "max": (lambda z: jnp.maximum(z, -1), lambda z: np.maximum(z, -1)),
    "min": (lambda z: jnp.minimum(z, 1), lambda z: np.minimum(z, 1)),
    "mul": (lambda z: z * -3, lambda z: z * -3),
    "name": (lambda z: checkpoint_name(z * z, "squared"), np.square),
    "ne": (lambda z: jnp.where(z != 9, 1, z), lambda z: np.where(z != 9, 1, z)),
    "neg": (lax.neg, np.negative),
    "not": (lambda z: jnp.where(~(z > 1), z, 2), lambda z: np.where(z > 1, 2, z)),
    "or": (lambda z: jnp.where((z < -1) | (z > 1), z, 2), lambda z: np.where((z < -1) | (z > 1), z, 2)),
    "rsqrt": (lax.rsqrt, lambda z: 1 / np.sqrt(z)),
    "select_n": (lambda z: lax.select(z > 1, z, -z), lambda z: np.where(z > 1, z, -z)),
    "sign": (lax.sign, np.sign),
    "sin": (lax.sin, np.sin),
    "sqrt": (lax.sqrt, np.sqrt),
    "square": (lax.square, np.square),
    "stop_gradient": (lax.stop_gradient, lambda z: z),
    "sub": (lambda z: 3 - z, lambda z: 3 - z),
    "tanh": (lax.tanh, np.tanh),
    "xor": (lambda z: jnp.where((z < 1) ^ (z > -1), z, 2), lambda z: np.where((z < 1) ^ (z > -1), z, 2)),
}
COMPOSED: dict[str, Pair] = {
    name: (ACTIVATIONS.get(name, jax.nn.softplus), contract.ACTIVATIONS[name].value)
    for name in ("relu", "silu", "gelu", "gelu_tanh", "softplus")
} | {
    "elu": (jax.nn.elu, lambda z: np.where(z > 0, z, np.expm1(np.minimum(z, 0)))),
    "leaky relu": (partial(jax.nn.leaky_relu, negative_slope=0.1), lambda z: np.where(z >= 0, z, 0.1 * z)),
}
BACKENDS = {"xla": "xla", "pallas_tpu": TpuConfig(interpret=True), "triton_gpu": GpuConfig(interpret=True)}


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_values(backend: str) -> None:
    """Of each primitive, and of activations: within rounding, however small they are; of infinity and NaN, too.

    A program has all functions: a function of two numbers, of which the first says which function it is.
    """
    if backend == "triton_gpu":
        gpu.needs_triton()
    pairs = [*(FUNCTIONS | COMPOSED).values()]

    def chosen(which: Array, z: Array) -> Array:
        out = z
        for i, (function, _) in enumerate(pairs):
            out = jnp.where(which == i, function(z), out)
        return out

    # The pre-activations are the number of a row, and the bias of a column.
    n, rows = len(NUMBERS), jnp.zeros((len(pairs), 8)).at[:, 0].set(jnp.arange(len(pairs), dtype=jnp.float32))
    x = GroupedTensor(rows, jnp.array([len(pairs)], jnp.int32))
    gate, up = jnp.ones((1, 8, n)), jnp.zeros((1, 8, n))
    bias = None, jnp.asarray(NUMBERS, jnp.float32)
    with launches() as ran:
        got = jax.jit(partial(ragged.gated_matmul, activation=chosen, backend=BACKENDS[backend]))(
            x, gate, up, bias=bias
        )
    assert backend == "xla" or ran == [(backend, "grouped_matmul -> 1")]
    with np.errstate(all="ignore"):
        for name, (_, function), row in zip((FUNCTIONS | COMPOSED), pairs, got.data, strict=True):
            # For a TPU, `erfc` is `1 - erf`. The exponent of a large number loses bits, and so does its sine.
            is_off = name in ("erfc", "cos", "sin") or (name == "gelu" and backend == "pallas_tpu")
            most = 5 if name in COMPOSED else 9
            at = ~(np.abs(NUMBERS) > most) | ((np.abs(NUMBERS) > 99) & (name not in ("cos", "sin")))
            atol = 2.4e-7 * most if is_off else 1e-30
            want = np.asarray(function(NUMBERS)).astype(np.float32)
            np.testing.assert_allclose(row[at], want[at], rtol=4e-6, atol=atol, err_msg=name)


def along(a: float, b: float, c: float, d: float) -> Pair3:
    """`clamped(a + b * z, c + d * z)`, and its first two derivatives by `z`."""
    f = contract.ACTIVATIONS["clamped"]
    (s0, s1), (c00, c01, c11) = f.slopes, (f.curve(i, j) for i, j in ((0, 0), (0, 1), (1, 1)))

    def at(z: Any) -> Any:
        return a + b * z, c + d * z

    return (
        lambda z: f.passed(*at(z)),
        lambda z: f.value(*at(z)),
        lambda z: (b and b * s0(*at(z))) + (d and d * s1(*at(z))),
        lambda z: (b and b * b * c00(*at(z))) + (b and d and 2 * b * d * c01(*at(z))) + (d and d * d * c11(*at(z))),
    )


CURVES: dict[str, Pair3] = {
    **{
        name: ((f := contract.ACTIVATIONS[name]).passed, f.value, f.slopes[0], f.curve(0, 0))
        for name in contract.ACTIVATIONS
        if name not in ("", "clamped")
    },
    "clamped, of the gate": along(0, 1, 1.5, 0),
    "clamped, of the other": along(1.5, 0, 0, 1),
    "clamped, of both": along(0, 1, 0.25, 0.5),
}
KINKS = np.array([0, 7, -7, 13.5, -14.5])


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives(backend: str) -> None:
    """The value, jvp, vjp and the second derivative of activations, one program for all: as in float64, far from zero
    too; at infinity, NaN and beyond 1e15 as JAX has them of the function alone."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    functions = [ACTIVATIONS[f] if isinstance(f, str) else f for f, *_ in CURVES.values()]

    def chosen(which: Array, z: Array) -> Array:
        out = z
        for i, function in enumerate(functions):
            is_this = which == i
            out = jnp.where(is_this, function(jnp.where(is_this, z, 1.5)), out)  # the others' cotangents are finite
        return out

    # A group has one row. The pre-activations are the biases: the number of the function, and the numbers.
    count, n = len(functions), len(NUMBERS)
    x = GroupedTensor(jnp.zeros((count, 8)), jnp.ones(count, jnp.int32))
    w, which = jnp.zeros((count, 8, n)), jnp.broadcast_to(jnp.arange(count, dtype=jnp.float32)[:, None], (count, n))

    def of(product: Callable[[Array], Array], z: Array) -> list[Array]:
        def slope(z: Array) -> Array:
            return jax.vjp(product, z)[1](jnp.ones_like(z))[0]

        value, tangent = jax.jvp(product, (z,), (jnp.ones_like(z),))
        curve = jax.jvp(slope, (z,), (jnp.ones_like(z),))[1]
        return [value, tangent, slope(z), curve, jax.vjp(slope, z)[1](jnp.ones_like(z))[0]]

    def product(z: Array) -> Array:
        return ragged.gated_matmul(x, w, w, bias=(which, z), activation=chosen, backend=BACKENDS[backend]).data

    rows = jnp.broadcast_to(jnp.asarray(NUMBERS, jnp.float32), (count, n))
    with launches() as ran:
        results = jax.jit(partial(of, product))(rows)
    assert backend == "xla" or {kernel.partition(" ->")[0] for _, kernel in ran} == {"grouped_matmul"}
    alone = jax.jit(lambda z: [of(each, z) for each in functions])(rows[0])
    is_near = np.abs(NUMBERS) <= 1e15
    for i, (name, (_, *wanted)) in enumerate(CURVES.items()):
        for order, got in zip((0, 1, 1, 2, 2), results, strict=True):
            is_smooth = is_near & ((np.abs(NUMBERS[:, None] - KINKS) > 1e-2).all(-1) | (order == 0))
            z, got = NUMBERS[is_smooth], np.asarray(got[i], float)[is_smooth]
            with np.errstate(all="ignore"):
                want = wanted[order](z) * np.ones(len(z))
            # A derivative is a sum of terms, each as large as the number.
            error = 1e-5 * np.abs(want) + (1e-5 if order else 2e-6) * np.abs(z) + 2e-9
            off = ~(np.abs(got - want) <= error)
            assert not off.any(), (name, order, z[off], got[off], want[off])
        for got, want in zip(results, alone[i], strict=True):
            np.testing.assert_allclose(got[i][~is_near], want[~is_near], rtol=1e-6, err_msg=name)


def traced(function: Any, arity: int = 1) -> Function:
    found = function_of(SITE, function, arity, jnp.float32)
    assert found is not None
    return found


def test_every_formula_is_tested() -> None:
    """And TPU kernels have each of these primitives, too."""
    assert {*FUNCTIONS} == {*FORMULAS} <= PRIMITIVES
    for name, (function, _) in FUNCTIONS.items():
        assert name in {each.primitive.name for each in traced(function).operations}


def test_functions_are_equal_by_their_operations() -> None:
    """A function that is made anew is traced, but not compiled anew. Another constant, or derivative, is another."""

    def scaled(slope: Any) -> Function:
        return traced(lambda z: jax.nn.softplus(z) * slope)

    def clipped(gate: Array, up: Array, limit: float = 7.0) -> Array:
        return jnp.minimum(gate, limit) * up

    assert scaled(2.0) == scaled(2.0) == scaled(jnp.float32(2)) != scaled(2.5)
    assert hash(scaled(2.0)) == hash(scaled(2.0)) and scaled(2.0).key == scaled(2.0).key
    assert traced(partial(clipped, limit=7.0), 2) == traced(clipped, 2) != traced(partial(clipped, limit=6.0), 2)
    assert traced("silu") == traced(jax.nn.silu) != traced("silu", 2)

    for made in (
        lambda by: lambda z: z * by,
        lambda by: lambda z, by=by: z * by,
        lambda by: lambda z, *, by=by: z * by,
    ):
        assert traced(made(2.0)) == traced(made(2.0)) != traced(made(3.0))
        assert traced(partial(made(2.0))) == traced(made(2.0)) != traced(partial(made(3.0)))

    straight = jax.custom_jvp(lambda z: jnp.tanh(z))
    straight.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), tangents[0]))
    assert traced(straight) != traced(jnp.tanh)

    def by(which: int) -> Any:
        """The product, with a derivative by one of its operands alone."""
        product = jax.custom_jvp(lambda gate, up: gate * up)
        product.defjvp(lambda primals, tangents: (primals[0] * primals[1], primals[1 - which] * tangents[which]))
        return product

    assert traced(by(0), 2) == traced(by(0), 2) != traced(by(1), 2)

    # Rules whose derivatives have a `tanh`, and rules of cotangents alone.
    assert traced(lambda z: jax.nn.mish(z)).key == traced(lambda z: jax.nn.mish(z)).key
    for arity in (1, 2):
        assert traced(with_slope(2.0), arity) == traced(with_slope(2.0), arity) != traced(with_slope(3.0), arity)


def with_slope(slope: float) -> Any:
    """`tanh` with another derivative, made anew."""
    function = jax.custom_vjp(lambda z: jnp.tanh(z))
    function.defvjp(lambda z: (jnp.tanh(z), z), lambda z, dz: (slope * dz * jnp.tanh(z),))
    return function


X, W = GroupedTensor(jnp.ones((8, 4)), jnp.array([3, 2], jnp.int32)), jnp.ones((2, 4, 6))


@pytest.mark.long
def test_a_function_in_a_loop_is_compiled_once() -> None:
    """Eager calls with functions that are made anew, and their gradients."""

    def step(limit: float) -> None:
        def loss(w: Array) -> Array:
            plain = ragged.matmul(X, w, activation=lambda z: jnp.minimum(jax.nn.softplus(z), limit))
            return plain.data.sum() + ragged.gated_matmul(X, w, w, activation=with_slope(limit)).data.sum()

        jax.grad(loss)(W)

    step(1.5)
    with compilations() as compiled:
        step(1.5)
        assert not compiled
        step(2.5)
    assert compiled


OFFSET, HELPER = 1.0, jnp.negative


def _helped(z: Array) -> Array:
    return HELPER(z) * (lambda y: y + OFFSET)(z)


def _power(z: Array, n: int = 3) -> Array:
    return z if n == 1 else z * _power(z, n - 1)


def _with_attribute(z: Array) -> Array:
    return z * _with_attribute.scale  # type: ignore[attr-defined]


def _with_import(z: Array) -> Array:
    import settings_of_a_test  # type: ignore[import-not-found]

    return z * settings_of_a_test.scale


CHANGING: list[Callable[[Array], Array]] = [
    lambda z: _helped(z),
    partial(lambda z, by: _helped(z) * by, by=3.0),
    partial(_helped),
    jax.tree_util.Partial(lambda z: jnp.minimum(z, OFFSET)),
    lambda z: _power(z) * OFFSET,
    lambda z: _with_attribute(z),
    _with_import,
    jax.nn.silu,
]


@pytest.mark.long
def test_numbers_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that a function reads are those of the call, not those of an earlier one."""
    limit, scale = 1.0, SimpleNamespace(of=2.0)

    def clipped(z: Array) -> Array:
        return jnp.minimum(z, limit)

    def scaled(z: Array) -> Array:
        return z * scale.of

    def shifted(z: Array) -> Array:
        return (lambda y: y + OFFSET)(z)  # a global that only an inner function reads

    def unset(z: Array) -> Array:
        return z if limit else z * not_yet  # a variable of the test that has no value yet

    found = []
    for limit, scale.of in ((1.0, 2.0), (2.0, 5.0), (1.0, 2.0)):
        monkeypatch.setitem(globals(), "OFFSET", limit)
        outs = (ragged.matmul(X, W, activation=each) for each in (clipped, scaled, shifted))
        found.append([float(out.data[0, 0]) for out in outs])
    assert found == [[1, 8, 5], [2, 20, 6], [1, 8, 5]]
    assert ragged.matmul(X, W, activation=unset).data[0, 0] == 4
    not_yet = 0.0

    for offset, helper in ((1.0, jnp.negative), (2.0, jnp.negative), (2.0, lambda z: z * scale.of), (1.0, jnp.abs)):
        monkeypatch.setitem(globals(), "OFFSET", offset)
        monkeypatch.setitem(globals(), "HELPER", helper)
        monkeypatch.setattr(_with_attribute, "scale", offset, raising=False)
        monkeypatch.setitem(sys.modules, "settings_of_a_test", SimpleNamespace(scale=offset))
        outs = jax.jit(lambda: [ragged.matmul(X, W, activation=each).data[0, 0] for each in CHANGING])()
        np.testing.assert_allclose(outs, [each(jnp.float32(4)) for each in CHANGING], rtol=1e-6)


@pytest.mark.long
def test_in_an_eager_shard_map() -> None:
    """A function with constants to fold, traced while a `shard_map` runs."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def product(x: Array) -> Array:
        return ragged.matmul(X.with_data(x), W, activation=lambda z: jnp.clip(z, -1, jnp.sqrt(9.0))).data

    got = jax.shard_map(product, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))(jnp.ones((16, 4)))
    np.testing.assert_array_equal(got[:, 0], np.tile([3] * 5 + [0] * 3, 2))


@pytest.mark.long
def test_what_is_elementwise_in_jax() -> None:
    """Functions of primitives without a formula in kernels, and their gradients: XLA computes them."""
    functions: list[Pair] = [
        (jnp.log2, np.log2),
        (jnp.sinc, np.sinc),
        (lambda z: jnp.copysign(z, -2.0), lambda z: -z),
        (lambda z: jnp.where(jnp.signbit(-z), z, 0), lambda z: z),
        (lambda z: lax.optimization_barrier((z, 2 * z))[1], lambda z: 2 * z),
    ]
    # A column has a number.
    z, x = np.linspace(0.3, 2.7, 6, dtype=np.float32), X.with_data(jnp.ones_like(X.data))

    def values(z: Array) -> list[Array]:
        w = jnp.broadcast_to(z / 4, W.shape)
        return [ragged.matmul(x, w, activation=function).data[0] for function, _ in functions]

    def slopes(z: Array) -> list[Array]:
        return [jax.grad(lambda z, i=i: values(z)[i].sum())(z) for i in range(len(functions))]

    for (_, function), value, slope in zip(functions, *jax.jit(lambda z: (values(z), slopes(z)))(z), strict=False):
        wide, step = z.astype(float), 1e-4
        np.testing.assert_allclose(value, function(wide), rtol=1e-5)
        want = (function(wide + step) - function(wide - step)) / (2 * step)
        np.testing.assert_allclose(slope, want, rtol=1e-4, atol=1e-4)


def test_what_no_kernel_has() -> None:
    """A function without formulas in a kernel is composed of the product and XLA."""
    gpu.needs_triton()

    def choice(z: Array) -> Array:  # of three, by an integer
        return lax.select_n(jnp.full(z.shape, 2, jnp.int32), z, z + 10, z + 20)

    def piecewise(z: Array) -> Array:
        return jnp.piecewise(z, [z > 2, z < -2], [lambda z: z * z, -1.5, lambda z: -z])

    def select(z: Array) -> Array:  # The first condition that holds decides.
        return jnp.select([z > 2, z > 1, z < -2], [z * z, 2 * z, -z], 0.25)

    wants: dict[Any, Any] = {
        choice: lambda z: z + 20,
        piecewise: lambda z: np.piecewise(z, [z > 2, z < -2], [lambda z: z * z, -1.5, lambda z: -z]),
        select: lambda z: np.select([z > 2, z > 1, z < -2], [z * z, 2 * z, -z], 0.25),
    }
    z = np.array([-3, -2, 0, 1.5, 2.5, np.nan], np.float32)
    for function, want in wants.items():
        with launches() as ran:
            out = ragged.matmul(X, W, bias=z - 4, activation=function, backend=BACKENDS["triton_gpu"]).data
        assert ran == [("triton_gpu", "grouped_matmul")]
        np.testing.assert_array_equal(out, [*[want(z)] * 5, *np.zeros((3, 6))])


BAD: list[tuple[str, Any]] = [
    ("primitive `rev`", lambda z: z[:, ::-1]),
    ("depend on the shape", lambda z: z * z.shape[0]),
    ("can't be traced", np.tanh),
    ("primitive `iota`", lambda z: z * jnp.arange(3.0)[None]),
    ("can't be traced", lambda z: z * jnp.ones(3)[None]),
    ("primitive `argmax`", lambda z: jnp.argmax(jnp.stack([z, -z]), axis=0).astype(z.dtype)),  # NaN is largest
    ("primitive `slice`", lambda z: jnp.concatenate([z[:1], z[1:]])),
    ("primitive `broadcast_in_dim`", lambda z: jnp.broadcast_to(z[:, None], (len(z), *z.shape))[0]),
    ("closes over an array, f32[1,3]", lambda z: z * np.ones((1, 3), np.float32)),
    ("closes over an array, f32[5,1,1]", lambda z: z[None] * np.ones((5, 1, 1), np.float32)),
]


def test_bad_functions() -> None:
    """They are no elementwise functions of numbers, and raise at the call. `docs/errors.md` has more of them."""
    for text, function in BAD:
        error = TypeError if text.startswith("closes") else ValueError
        with pytest.raises(error, match=re.escape(text)):
            ragged.matmul(X, W, activation=function)
