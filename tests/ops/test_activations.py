"""Activations that are functions: on every backend, in the kernel, with their derivatives, against NumPy in float64."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from numpy import ndarray as NpArray

import ragged
from ragged import GroupedTensor
from ragged.backends.gpu.functions import FORMULAS
from ragged.backends.tpu import launch as tpu_launch
from ragged.core.errors import Site
from ragged.product.function import Function, function_of
from ragged.tuning import GpuConfig, TpuConfig
from tests import gpu, ran, tpu
from tests.everywhere import INTERPRETED

SITE = Site("test")
ENDS = np.array([np.inf, -np.inf, np.nan, 0.0, 100.0, -100.0, 1e30, -1e30])
SMALL = np.geomspace(1e-6, 1, 50)
MIDDLE = np.concatenate([np.linspace(-9, 9, 361), SMALL, -SMALL])


def sigmoid(z: NpArray) -> NpArray:
    return 1 / (1 + np.exp(-z))


def clamped(gate: Array, up: Array, limit: float = 7.0) -> Array:
    """The gate of gpt-oss."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def numpy_clamped(gate: NpArray, up: NpArray) -> NpArray:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return (up + 1) * gate * sigmoid(1.702 * gate)


ONE: dict[str, tuple[Callable[[Array], Array], Callable[[NpArray], NpArray]]] = {
    "softplus": (jax.nn.softplus, lambda z: np.logaddexp(z, 0)),
    "relu squared": (lambda z: jnp.square(jax.nn.relu(z)), lambda z: np.maximum(z, 0) ** 2),
    "quick gelu": (lambda z: z * jax.nn.sigmoid(1.702 * z), lambda z: z * sigmoid(1.702 * z)),
    "elu": (jax.nn.elu, lambda z: np.where(z > 0, z, np.expm1(np.minimum(z, 0)))),
    "leaky relu": (partial(jax.nn.leaky_relu, negative_slope=0.1), lambda z: np.where(z >= 0, z, 0.1 * z)),
}
TWO: dict[str, tuple[Callable[[Array, Array], Array], Callable[[NpArray, NpArray], NpArray]]] = {
    "clamped": (partial(clamped, limit=7.0), numpy_clamped),
    "softplus": (jax.nn.softplus, lambda gate, up: np.logaddexp(gate, 0) * up),  # type: ignore
}

NAMES = [pytest.param(name, marks=[] if name == "softplus" else pytest.mark.long) for name in ONE]


def run(z: NpArray, backend: str, activation: Any, up: NpArray | None = None) -> Array:
    """The activation of numbers, as the product of each of them and 1. They are in two groups, with NaN in the tail."""
    x = jnp.zeros((len(z) + 5, 8)).at[: len(z), 0].set(z).at[len(z) :].set(jnp.nan)
    w = jnp.zeros((2, 8, 4)).at[:, 0].set(1.0)
    if up is not None:
        x = x.at[: len(z), 1].set(up)
    tensor = GroupedTensor(x, jnp.array([7, len(z) - 7], jnp.int32))
    how: dict[str, Any] = {"activation": activation, "backend": INTERPRETED[backend]}
    if up is None:
        return ragged.matmul(tensor, w, **how).data
    return ragged.gated_matmul(tensor, w, jnp.zeros_like(w).at[:, 1].set(1.0), **how).data


def kernels_of(backend: str) -> set[str]:
    if backend == "triton_gpu":
        gpu.needs_triton()
    return {backend} - {"xla"}


@pytest.mark.parametrize("backend", INTERPRETED)
@pytest.mark.parametrize("name", NAMES)
def test_functions(name: str, backend: str) -> None:
    """Each number is within rounding of what it is to be, however small; and so are infinity and NaN."""
    activation, expected = ONE[name]
    kernels = kernels_of(backend)
    with ran.watch() as launches:
        got = np.asarray(run(np.concatenate([MIDDLE, ENDS]), backend, activation))
    assert {which for which, _ in launches} - {"xla"} == kernels
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got[: len(MIDDLE), 0], expected(np.float32(MIDDLE).astype(float)), rtol=4e-6)
        want = expected(np.float32(ENDS).astype(float)).astype(np.float32)
    # One number's infinity reaches other rows' products as `inf * 0`, but only its own row.
    np.testing.assert_allclose(got[len(MIDDLE) : -5, 0], want, rtol=4e-6, atol=1e-30)
    assert not got[-5:].any()


@pytest.mark.parametrize("backend", INTERPRETED)
@pytest.mark.sampled
@pytest.mark.parametrize("name", TWO)
def test_functions_of_two(name: str, backend: str) -> None:
    """A function of the gate and the other product."""
    activation, expected = TWO[name]
    kernels = kernels_of(backend)
    gate, up = (each.ravel() for each in np.meshgrid(np.linspace(-9, 9, 25), np.linspace(-9, 9, 25)))
    with ran.watch() as launches:
        got = np.asarray(run(gate, backend, activation, up))[: len(gate), 0]
    assert {which for which, _ in launches} - {"xla"} == kernels
    np.testing.assert_allclose(got, expected(*(np.float32(z).astype(float) for z in (gate, up))), rtol=4e-6, atol=1e-7)


def slope(fn: Callable[[NpArray], NpArray], z: NpArray, step: float = 1e-4) -> NpArray:
    """The derivative by central differences, of the fourth order."""
    near, far = fn(z + step) - fn(z - step), fn(z + 2 * step) - fn(z - 2 * step)
    return (8 * near - far) / (12 * step)


@pytest.mark.parametrize("backend", INTERPRETED)
@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name: str, backend: str) -> None:
    """Forward, reverse, and second derivatives, between the corners of what has corners."""
    activation, expected = ONE[name]
    kernels_of(backend)
    z = np.linspace(-6, 6, 40)
    first, second = slope(expected, z), slope(partial(slope, expected), z)

    def values(z: Array) -> Array:
        return run(z, backend, activation)[: len(z), 0]  # type: ignore

    def total(z: Array) -> Array:
        return jnp.sum(values(z))

    given = jnp.asarray(z, jnp.float32)
    ones = jnp.ones_like(given)
    np.testing.assert_allclose(jax.jvp(values, (given,), (ones,))[1], first, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.grad(total)(given), first, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jvp(jax.grad(total), (given,), (ones,))[1], second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", INTERPRETED)
@pytest.mark.parametrize("save", ["pre", pytest.param("out", marks=pytest.mark.long)])
def test_derivatives_of_two(save: str, backend: str) -> None:
    """By the gate and by the other product, with pre-activations that are kept or computed again."""
    kernels_of(backend)
    rng = np.random.default_rng(0)
    x, gate, up = (rng.standard_normal(s).astype(np.float32) for s in ((16, 8), (4, 8, 6), (4, 8, 6)))
    sizes = np.array([3, 5, 0, 4])

    def total(gate: Array, up: Array) -> Array:
        tensor = GroupedTensor(jnp.asarray(x), jnp.asarray(sizes, jnp.int32))
        how: dict[str, Any] = {"activation": clamped, "backend": INTERPRETED[backend], "save": save}
        return jnp.sum(ragged.gated_matmul(tensor, gate, up, **how).data)

    got = jax.jit(jax.grad(total, (0, 1)))(gate, up)
    for i in range(4):
        rows = x[sizes[:i].sum() :][: sizes[i]].astype(float)
        z = rows @ gate[i].astype(float), rows @ up[i].astype(float)
        by_gate = slope(lambda each, z=z: numpy_clamped(each, z[1]), z[0])
        by_up = slope(lambda each, z=z: numpy_clamped(z[0], each), z[1])
        for found, right in zip(got, (rows.T @ by_gate, rows.T @ by_up), strict=True):
            np.testing.assert_allclose(np.asarray(found)[i], right, rtol=1e-4, atol=1e-4)


UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "erf": np.vectorize(math.erf, [float]),
    "erfc": np.vectorize(math.erfc, [float]),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "logistic": sigmoid,
    "neg": np.negative,
    "sign": np.sign,
    "sin": np.sin,
    "square": np.square,
    "stop_gradient": lambda z: z,
    "tanh": np.tanh,
}
POSITIVE: dict[str, Callable[[Any], Any]] = {  # of positive numbers
    "log": np.log,
    "log1p": np.log1p,
    "rsqrt": lambda z: 1 / np.sqrt(z),
    "sqrt": np.sqrt,
}
OTHERS: dict[str, tuple[Callable[[Array], Array], Callable[[NpArray], NpArray]]] = {
    "add": (lambda z: z + 3, lambda z: z + 3),
    "and": (lambda z: jnp.where((z > -1) & (z < 1), z, 2), lambda z: np.where((z > -1) & (z < 1), z, 2)),
    "clamp": (lambda z: lax.clamp(-2.0, z, 3.0), lambda z: np.clip(z, -2, 3)),
    "convert_element_type": (
        lambda z: (z > 0).astype(jnp.float32) + z.astype(jnp.bfloat16).astype(jnp.float32),
        lambda z: (z > 0) + np.asarray(jnp.asarray(z, jnp.bfloat16), float),
    ),
    "div": (lambda z: 3 / z, lambda z: 3 / z),
    "eq": (lambda z: jnp.where(z == 9, 1, z), lambda z: np.where(z == 9, 1, z)),
    "ge": (lambda z: jnp.where(z >= 9, 1, z), lambda z: np.where(z >= 9, 1, z)),
    "gt": (lambda z: jnp.where(z > 2, 1, z), lambda z: np.where(z > 2, 1, z)),
    "integer_pow": (lambda z: lax.integer_pow(z, 0) + z**3 - z**-2, lambda z: 1 + z**3 - z**-2.0),
    "is_finite": (lambda z: jnp.where(jnp.isfinite(z), z, 0), lambda z: z),
    "le": (lambda z: jnp.where(z <= -9, 1, z), lambda z: np.where(z <= -9, 1, z)),
    "lt": (lambda z: jnp.where(z < 2, 1, z), lambda z: np.where(z < 2, 1, z)),
    "max": (lambda z: jnp.maximum(z, -1), lambda z: np.maximum(z, -1)),
    "min": (lambda z: jnp.minimum(z, 1), lambda z: np.minimum(z, 1)),
    "mul": (lambda z: z * -3, lambda z: z * -3),
    "ne": (lambda z: jnp.where(z != 9, 1, z), lambda z: np.where(z != 9, 1, z)),
    "not": (lambda z: jnp.where(~(z > 1), z, 2), lambda z: np.where(z > 1, 2, z)),
    "or": (lambda z: jnp.where((z < -1) | (z > 1), z, 2), lambda z: np.where((z < -1) | (z > 1), z, 2)),
    "select_n": (lambda z: lax.select(z > 1, z, -z), lambda z: np.where(z > 1, z, -z)),
    "sub": (lambda z: 3 - z, lambda z: 3 - z),
    "xor": (lambda z: jnp.where((z < 1) ^ (z > -1), z, 2), lambda z: np.where((z < 1) ^ (z > -1), z, 2)),
    "add_any": (lambda z: jax.vjp(lambda z: z * z * z, z)[1](jnp.ones_like(z))[0], lambda z: 3 * z * z),
}


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("backend", ["pallas_tpu", "triton_gpu"])
@pytest.mark.parametrize("name", sorted([*UNARY, *POSITIVE, *OTHERS]))
def test_formulas(name: str, backend: str) -> None:
    """Each of JAX's primitives that the GPU has a formula for, in both kernels, of large and of small numbers."""
    kernels = kernels_of(backend)
    fn, expected = OTHERS[name] if name in OTHERS else (getattr(lax, name), (UNARY | POSITIVE)[name])
    z = SMALL * 9 if name in POSITIVE else MIDDLE[np.abs(MIDDLE) > 1e-9]
    traced = function_of(SITE, fn, 1, jnp.float32)
    assert traced is not None and name in {each.primitive.name for each in traced.operations}
    with ran.watch() as launches:
        got = np.asarray(run(z, backend, fn))[: len(z), 0]
    assert {which for which, _ in launches} - {"xla"} == kernels
    exact = np.float32(z).astype(float)
    atol = 2.4e-7 if name in ("erfc", "cos", "sin") else 1e-30  # a unit of 1: for a TPU, `erfc` is `1 - erf`
    np.testing.assert_allclose(got, expected(exact), rtol=4e-6, atol=atol)


def test_every_formula_is_tested() -> None:
    """What `test_formulas` covers is what the GPU's table has, "min" and "max" of NaN, which they keep, besides."""
    assert {*UNARY, *POSITIVE, *OTHERS} == {*FORMULAS}
    assert {*FORMULAS} <= tpu_launch.PRIMITIVES


def test_functions_are_equal_by_their_operations() -> None:
    """A function that is made anew is traced, but not compiled anew. Another constant, or derivative, is another."""

    def traced(fn: Any, arity: int = 1) -> Function:
        found = function_of(SITE, fn, arity, jnp.float32)
        assert found is not None
        return found

    def scaled(slope: Any) -> Function:
        return traced(lambda z: jax.nn.softplus(z) * slope)

    assert scaled(2.0) == scaled(2.0) == scaled(jnp.float32(2)) != scaled(2.5)
    assert hash(scaled(2.0)) == hash(scaled(2.0)) and scaled(2.0).key == scaled(2.0).key
    assert traced(partial(clamped, limit=7.0), 2) == traced(clamped, 2) != traced(partial(clamped, limit=6.0), 2)
    assert traced("silu") == traced(jax.nn.silu) != traced("silu", 2)

    @jax.custom_jvp
    def straight(z: Array) -> Array:
        return jnp.tanh(z)

    straight.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), tangents[0]))
    assert traced(straight) != traced(jnp.tanh)

    def by(which: int) -> Any:
        """The product, with a derivative by one of its operands alone."""
        product = jax.custom_jvp(lambda gate, up: gate * up)
        product.defjvp(lambda primals, tangents: (primals[0] * primals[1], primals[1 - which] * tangents[which]))
        return product

    assert traced(by(0), 2) == traced(by(0), 2) != traced(by(1), 2)


def test_a_function_in_a_loop_is_compiled_once() -> None:
    """Eager calls with a lambda that is made anew, and its gradients."""
    x = GroupedTensor(jnp.ones((8, 4)), jnp.array([3, 2], jnp.int32))
    w, compiled = jnp.ones((2, 4, 6)), []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        compiled.append(event)

    def step(limit: float) -> None:
        def loss(w: Array) -> Array:
            return ragged.matmul(x, w, activation=lambda z: jnp.minimum(jax.nn.softplus(z), limit)).data.sum()

        jax.grad(loss)(w)

    step(1.5)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        step(1.5)
        assert not [each for each in compiled if "backend_compile" in each]
        step(2.5)
        assert [each for each in compiled if "backend_compile" in each]
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


X, W = GroupedTensor(jnp.ones((8, 4)), jnp.array([3, 2], jnp.int32)), jnp.ones((2, 4, 6))


OFFSET = 1.0


def test_numbers_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that a function reads are those of the call, not those of an earlier one."""
    limit, scale = 1.0, SimpleNamespace(of=2.0)

    def clipped(z: Array) -> Array:
        return jnp.minimum(z, limit)

    def scaled(z: Array) -> Array:
        return z * scale.of

    def shifted(z: Array) -> Array:
        return (lambda y: y + OFFSET)(z)  # a global that only an inner function reads

    found = []
    for limit, scale.of in ((1.0, 2.0), (2.0, 5.0), (1.0, 2.0)):
        monkeypatch.setitem(globals(), "OFFSET", limit)
        outs = (ragged.matmul(X, W, activation=each) for each in (clipped, scaled, shifted))
        found.append([float(out.data[0, 0]) for out in outs])
    assert found == [[1, 8, 5], [2, 20, 6], [1, 8, 5]]


def test_in_an_eager_shard_map() -> None:
    """A function with constants to fold, traced while a `shard_map` runs."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def product(x: Array) -> Array:
        return ragged.matmul(X.with_data(x), W, activation=lambda z: jnp.clip(z, -1, jnp.sqrt(9.0))).data

    got = jax.shard_map(product, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))(jnp.ones((16, 4)))
    np.testing.assert_array_equal(got[:, 0], np.tile([3] * 5 + [0] * 3, 2))


@pytest.mark.long
def test_a_choice_of_three() -> None:
    """The GPU's kernel has no formula for it: XLA chooses."""
    gpu.needs_triton()

    def choice(z: Array) -> Array:
        return lax.select_n(jnp.full(z.shape, 2, jnp.int32), z, z + 10, z + 20)

    assert float(ragged.matmul(X, W, activation=choice, backend=INTERPRETED["triton_gpu"]).data[0, 0]) == 24


@pytest.mark.parametrize(
    "activation, error, text",
    [
        (jax.nn.softmax, ValueError, "it uses JAX's primitive `reduce_max`"),
        (lambda z: z.T, ValueError, r"for arrays of shape \(2, 3\), it returns a result of shape \(3, 2\)"),
        (lambda z: z[:, ::-1], ValueError, "primitive `rev`"),
        (lambda z: z * z.shape[0], ValueError, "depend on the shape"),
        (np.tanh, ValueError, "can't be traced"),
        (lambda z: z * jnp.arange(3.0)[None], ValueError, "primitive `iota`"),
        (lambda z: z * jnp.ones(3)[None], ValueError, "primitive `broadcast_in_dim`"),
        (lambda z: z * jnp.ones((1, 6)), ValueError, r"for arrays of shape \(2, 3\), it raises"),
        (lambda z: (z, z), ValueError, "returns several results"),
        (
            lambda z: z > 0,
            TypeError,
            r"returns bool for float32 of shape \(2, 3\)\.\n.*\nIt must return one float",
        ),
        (lambda z: z * np.ones((1, 3), np.float32), TypeError, r"closes over an array, f32\[1,3\]"),
        (lambda z: [z, jax.debug.print("z")][0], TypeError, "has effects"),
        (jnp.multiply, TypeError, "needs two arguments"),
        ("swish", ValueError, "or an elementwise function"),
    ],
)
def test_bad_functions(activation: Any, error: type[Exception], text: str) -> None:
    """What is no elementwise function of numbers, at the call."""
    with pytest.raises(error, match=text):
        ragged.matmul(X, W, activation=activation)


def test_traced_values() -> None:
    """A function may not close over what is differentiated or traced; mapped over rows it may."""

    def loss(slope: Array) -> Array:
        return ragged.matmul(X, W, activation=lambda z: z * slope).data.sum()

    with pytest.raises(TypeError, match=r"closes over a traced value, f32\[\]\.\n.*\nMap it over"):
        jax.grad(loss)(0.1)


def test_what_no_kernel_has() -> None:
    """A function without formulas in a kernel is composed of the product and XLA, and `explain` says so."""
    gpu.needs_triton()
    x, w = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((4, 32, 48), jnp.bfloat16)
    tensor = GroupedTensor(x, jax.ShapeDtypeStruct((4,), jnp.int32))  # type: ignore
    for device in ("TPU v5 lite", "NVIDIA H200"):
        text = str(ragged.explain(tensor, w, activation=lax.lgamma, device=device))
        assert "has no formula for `lgamma` of float32, in the activation lgamma" in text
        text = str(ragged.explain(tensor, w, activation=jax.nn.softplus, device=device))
        assert "with softplus" in text and "no formula" not in text


def of_chip(activation: Any, arity: int) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    """A product with an activation, of a size that fills a kernel's tiles, and its avals."""

    def product(x: Array, w: Array, up: Array, sizes: Array) -> Array:
        tensor = GroupedTensor(x, sizes)
        if arity == 1:
            return ragged.matmul(tensor, w, activation=activation).data
        return ragged.gated_matmul(tensor, w, up, activation=activation).data

    aval, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    w = aval((8, 2048, 1024), bf16)
    return product, (aval((4096, 2048), bf16), w, w, aval((8,), jnp.int32))


CASES = [*((name, 1) for name in ONE), *((name, 2) for name in TWO)]


@pytest.mark.sampled
@pytest.mark.parametrize("name, arity", CASES)
@pytest.mark.parametrize("generation", ["v4", "v5e", "v6e", "tpu7x"])
def test_compiles_for_tpus(generation: str, name: str, arity: int) -> None:
    """One kernel, which leaves a quarter of the chip's VMEM."""
    product, avals = of_chip((ONE if arity == 1 else TWO)[name][0], arity)
    compiled = tpu.compile_for(generation, product, *avals)
    assert len(compiled.kernels) == 1 and max(compiled.vmem) <= 0.75 * tpu.VMEM_MIB[generation]


@pytest.mark.sampled
@pytest.mark.parametrize("name, arity", CASES)
@pytest.mark.parametrize("chip", gpu.ARCHITECTURES)
def test_compiles_for_gpus(chip: str, name: str, arity: int) -> None:
    """One kernel without spills."""
    product, avals = of_chip((ONE if arity == 1 else TWO)[name][0], arity)
    (kernel,) = gpu.compile_for(chip, product, *avals)
    assert kernel.spill_bytes == 0


def of_columns(columns: str, gate: Array, up: Array) -> Array:
    """One array with the columns of both."""
    if columns == "halves":
        return jnp.concatenate([gate, up], axis=-1)
    return jnp.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)


def assert_same(got: Any, want: Any) -> None:
    """Equal up to the order of sums: in the interpreter, NumPy chooses it by the shape of a tile."""
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * float(np.abs(want).max()))


@pytest.mark.parametrize("backend", INTERPRETED)
@pytest.mark.parametrize("columns", ["halves", "interleaved"])
def test_one_weight_of_both(columns: str, backend: str) -> None:
    """Values and gradients equal those of two weights, with biases; in the kernel, two tiles of columns wide."""
    kernels = kernels_of(backend)
    rng = np.random.default_rng(0)
    x, gate, up = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((40, 16), (3, 16, 256), (3, 16, 256)))
    biases = [jnp.asarray(rng.standard_normal((3, 256)), jnp.float32) for _ in range(2)]
    tensor = GroupedTensor(x.at[30:].set(jnp.nan), jnp.array([13, 0, 17], jnp.int32))
    how: Any = {"pallas_tpu": TpuConfig(n=128, interpret=True), "triton_gpu": GpuConfig(n=32, interpret=True)}
    options: dict[str, Any] = {"activation": clamped, "backend": how.get(backend, backend)}

    def one(w: Array) -> Array:
        return ragged.gated_matmul(tensor, w, columns=columns, bias=of_columns(columns, *biases), **options).data

    def two(w: Array) -> Array:
        parts = jnp.split(w, 2, axis=-1) if columns == "halves" else (w[..., ::2], w[..., 1::2])
        return ragged.gated_matmul(tensor, *parts, bias=(biases[0], biases[1]), **options).data

    w = of_columns(columns, gate, up)
    with ran.watch() as launches:
        got = np.asarray(jax.jit(one)(w))
    assert [which for which, _ in launches] == [*kernels]
    assert_same(got, jax.jit(two)(w))
    assert got[:30].any() and not got[30:].any()
    slopes = (jax.jit(jax.grad(lambda w, fn=fn: jnp.sum(fn(w) ** 2)))(w) for fn in (one, two))
    assert_same(*slopes)


@pytest.mark.parametrize("k", [8, 32])
def test_tiles_are_wider_than_half_of_one_weight(k: int) -> None:
    """A GPU's tile of the second half begins in the middle, and doesn't read past the last matrix."""
    kernels_of("triton_gpu")
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, k)), rng.standard_normal((2, k, 16))
    tensor = GroupedTensor(jnp.asarray(x, jnp.float32), jnp.array([3, 5], jnp.int32))
    tiles = GpuConfig(m=16, k=32, n=16, interpret=True)
    with ran.watch() as launches:
        got = ragged.gated_matmul(tensor, jnp.asarray(w, jnp.float32), columns="halves", backend=tiles).data
    assert [which for which, _ in launches] == ["triton_gpu"]
    z = np.concatenate([x[:3] @ w[0], x[3:] @ w[1]])
    gate, up = z[:, :8], z[:, 8:]
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-5)


def of_one_weight(columns: str) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    """A gated product of one weight with the columns of both matrices, and its avals."""

    def product(x: Array, w: Array, sizes: Array) -> Array:
        return ragged.gated_matmul(GroupedTensor(x, sizes), w, columns=columns, activation=clamped).data

    aval, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    return product, (aval((4096, 2048), bf16), aval((8, 2048, 2048), bf16), aval((8,), jnp.int32))


@pytest.mark.parametrize("generation", ["v5e", pytest.param("tpu7x", marks=pytest.mark.long)])
def test_tpus_read_halves_in_place(generation: str) -> None:
    """One kernel takes the weight, and no other operation makes one of its halves."""
    product, avals = of_one_weight("halves")
    compiled = tpu.compile_for(generation, product, *avals)
    assert len(compiled.kernels) == 1 and "bf16[8,2048,1024]" not in compiled.text


@pytest.mark.sampled
@pytest.mark.parametrize("columns", ["halves", "interleaved"])
@pytest.mark.parametrize("chip", gpu.ARCHITECTURES)
def test_gpus_read_one_weight_in_place(chip: str, columns: str) -> None:
    """One kernel, without spills, takes the weight, whether its columns are halves or alternate."""
    product, avals = of_one_weight(columns)
    (kernel,) = gpu.compile_for(chip, product, *avals)
    (call,) = (line for line in gpu.lower_for(chip, product, *avals).as_text().splitlines() if "custom_call" in line)
    assert kernel.spill_bytes == 0 and "8x2048x1024" not in call  # XLA drops what it doesn't take


@pytest.mark.long
@pytest.mark.parametrize("backend", ["pallas_tpu", "triton_gpu"])
@pytest.mark.parametrize("layout", ["forward", "batched", "mapped"])
@pytest.mark.parametrize("columns", ["halves", "interleaved"])
def test_one_weight_of_few_columns(columns: str, layout: str, backend: str) -> None:
    """Of 10 columns, which kernels can't read in place, in any layout and mapped: one kernel, if not mapped."""
    kernels_of(backend)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((24, 16), (3, 16, 20)))
    is_batched = layout == "batched"
    tensor = GroupedTensor(x.reshape(3, 8, 16)) if is_batched else GroupedTensor(x, jnp.array([9, 0, 11], jnp.int32))
    options: dict[str, Any] = {"activation": clamped, "backend": INTERPRETED[backend]}

    def one(w: Array) -> Array:
        return ragged.gated_matmul(tensor, w, columns=columns, **options).data

    def two(w: Array) -> Array:
        parts = jnp.split(w, 2, axis=-1) if columns == "halves" else (w[..., ::2], w[..., 1::2])
        return ragged.gated_matmul(tensor, *parts, **options).data

    if layout == "mapped":
        one, two, w = jax.vmap(one), jax.vmap(two), jnp.stack([w, 2 * w])
    with ran.watch() as launches:
        got = np.asarray(jax.jit(one)(w))
    assert {which for which, _ in launches} == {backend} and (layout == "mapped" or len(launches) == 1)
    assert_same(got, jax.jit(two)(w))


@pytest.mark.parametrize("backend", INTERPRETED)
@pytest.mark.parametrize("columns", [pytest.param("halves", marks=pytest.mark.long), "interleaved"])
def test_one_weight_that_all_groups_share(columns: str, backend: str) -> None:
    """A matrix `[k, 2 * n]`: equal to the definition."""
    kernels_of(backend)
    rng = np.random.default_rng(0)
    x, gate, up = (rng.standard_normal(shape) for shape in ((10, 8), (8, 128), (8, 128)))
    w = of_columns(columns, jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    tensor = GroupedTensor(jnp.asarray(x, jnp.float32), jnp.array([3, 0, 7], jnp.int32))
    got = ragged.gated_matmul(tensor, w, columns=columns, backend=INTERPRETED[backend]).data
    z = x @ gate
    np.testing.assert_allclose(got, z / (1 + np.exp(-z)) * (x @ up), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "w, hint",
    [
        (jnp.ones((2, 4, 5)), "Pass two weights of the same shape"),
        (jnp.ones(4), "Pass two weights of the same shape"),
        (jnp.ones((2, 4, 6)), "columns='halves'"),
    ],
)
def test_hints_without_a_second_weight(w: Array, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        ragged.gated_matmul(X, w)


@pytest.mark.parametrize(
    "w, options, error, text",
    [
        (jnp.ones((2, 4, 6)), {"columns": "thirds"}, ValueError, "unknown `columns` 'thirds'"),
        (jnp.ones((2, 4, 5)), {"columns": "halves"}, ValueError, "doesn't have the columns of two matrices"),
        (jnp.ones((2, 4, 6)), {"columns": "halves", "w_up": jnp.ones((2, 4, 6))}, TypeError, "but there are two"),
        (
            ragged.quantize(W, jnp.int8, "column"),
            {"columns": "halves"},
            ValueError,
            "isn't quantised",
        ),
    ],
)
def test_bad_columns(w: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    """What is no weight of both."""
    with pytest.raises(error, match=text):
        ragged.gated_matmul(X, w, **options)
