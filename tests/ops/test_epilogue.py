"""Biases, activations and gates: against NumPy in float64, group by group, and what derivatives keep."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from numpy import ndarray as NpArray

import ragged
from ragged import GroupedTensor
from ragged.product.function import ACTIVATIONS
from tests import oracle, ran
from tests.everywhere import INTERPRETED

FUNCTIONS: dict[str | None, Callable[[NpArray], NpArray]] = {
    None: lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z / 2 * (1 + np.vectorize(math.erf, [float])(z / np.sqrt(2))),
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "tanh": np.tanh,
}
LAYOUTS = ("forward", "batched", "inner_rows")
SIZES = np.array([5, 0, 9, 1, 4])  # in buffers of 24


def slope(fn: Callable[[NpArray], NpArray], z: NpArray) -> NpArray:
    """The derivative, by central differences in float64: 9 digits."""
    return (fn(z + 1e-5) - fn(z - 1e-5)) / 2e-5


class Problem:
    """Operands of a layout with NaN in their tails, and what they are to give, group by group."""

    def __init__(self, layout: str, dtype: str = "float32", num_weights: int = 2, n: int = 16, k: int = 8) -> None:
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> NpArray:
            return np.asarray(jnp.asarray(rng.standard_normal(shape) / 2, dtype), np.float64)

        self.layout, self.dtype, self.n, g = layout, dtype, n, len(SIZES)
        self.firsts = SIZES.tolist() if layout != "batched" else [7] * g
        self.inner = [3, 6, 0, 2, 8] if layout == "inner_rows" else [k] * g
        self.x = [normal(m, k) for m, k in zip(self.firsts, self.inner, strict=True)]
        self.ws = [[normal(k, n) for k in self.inner] for _ in range(num_weights)]
        self.bias, self.shared = normal(g, n), normal(n)
        self.dout = [normal(m, n) for m in self.firsts]

    def pack(self, groups: oracle.Groups, ragged_: tuple[bool, bool]) -> Array:
        rows, last = {(False, False): (0, 0), (True, False): (24, 0), (True, True): (24, 8)}[ragged_]
        shape = (rows, last or groups[0].shape[1])
        return jnp.asarray(oracle.pack(groups, ragged_, shape), self.dtype)

    def arrays(self) -> tuple[Array, list[Array]]:
        by_layout = {"forward": (True, False), "batched": (False, False), "inner_rows": (True, True)}
        contracted = self.layout == "inner_rows"
        return self.pack(self.x, by_layout[self.layout]), [self.pack(w, (contracted, False)) for w in self.ws]

    def tensors(self, x: Array, ws: list[Array]) -> tuple[GroupedTensor, list[Any]]:
        firsts, inner = (jnp.asarray(dims, jnp.int32) for dims in (self.firsts, self.inner))
        if self.layout == "batched":
            return GroupedTensor(x), [GroupedTensor(w) for w in ws]
        if self.layout == "forward":
            return GroupedTensor(x, firsts), [*ws]
        return GroupedTensor(x, firsts, inner), [GroupedTensor(w, inner) for w in ws]

    def cotangent(self) -> Array:
        return self.pack(self.dout, (self.layout != "batched", False))

    def groups(self, out: Array) -> oracle.Groups:
        is_ragged = (self.layout != "batched", False)
        return oracle.unpack(np.asarray(out, np.float64), is_ragged, self.firsts, [self.n] * len(self.firsts))


def close(got: Any, want: Any, dtype: str) -> None:
    """Largest error relative to the largest element; a bfloat16 result is rounded once."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    limit = 2e-6 if dtype == "float32" else 2**-8
    assert got.shape == want.shape and np.max(np.abs(got - want), initial=0) <= limit * np.max(np.abs(want), initial=1)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_bias", ["per group", "shared", "none"])
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(layout: str, activation: str | None, has_bias: str, dtype: str) -> None:
    """Against the float64 loop, with NaN in tails, empty groups, and groups of which nothing is contracted."""
    p = Problem(layout, dtype, 1)
    bias = {"per group": p.bias, "shared": p.shared, "none": None}[has_bias]
    x, (w,) = p.arrays()
    fn = FUNCTIONS[activation]

    def run(x: Array, w: Array, bias: Array | None) -> Array:
        lhs, (rhs,) = p.tensors(x, [w])
        return ragged.matmul(lhs, rhs, bias=bias, activation=activation).data

    given = None if bias is None else jnp.asarray(bias, dtype)
    out, vjp = jax.vjp(run, x, w, given)
    by_group = [0 if bias is None else bias if bias.ndim == 1 else bias[i] for i in range(5)]
    z = [a @ b + c for a, b, c in zip(p.x, p.ws[0], by_group, strict=True)]
    for got, want in zip(p.groups(out), z, strict=True):
        close(got, fn(want), dtype)
    if layout != "batched":
        assert not np.asarray(out, np.float32)[SIZES.sum() :].any()

    dx, dw, dbias = vjp(p.cotangent())
    dz = [d * slope(fn, each) for d, each in zip(p.dout, z, strict=True)]
    # Pre-activations and their cotangents are rounded to half a unit in the last place; no second derivative exceeds 1.
    unit = 2**-8 if dtype == "bfloat16" else 2**-20
    off = [unit * np.abs(d) * (np.abs(slope(fn, each)) + np.abs(each)) for d, each in zip(p.dout, z, strict=True)]
    shapes = {"forward": (True, False), "batched": (False, False), "inner_rows": (True, True)}

    def check(got: Any, want: NpArray, bound: NpArray) -> None:
        assert (np.abs(np.asarray(got, np.float64) - want) <= bound + unit * np.abs(want) + unit / 16).all()

    got = oracle.unpack(np.asarray(dx, np.float64), shapes[layout], p.firsts, p.inner)
    for each, d, e, b in zip(got, dz, off, p.ws[0], strict=True):
        check(each, d @ b.T, e @ np.abs(b.T))
    got = oracle.unpack(np.asarray(dw, np.float64), (layout == "inner_rows", False), p.inner, [p.n] * 5)
    for each, a, d, e in zip(got, p.x, dz, off, strict=True):
        check(each, a.T @ d, np.abs(a.T) @ e)
    if bias is not None:
        sums, bounds = (np.stack([d.sum(0) for d in terms]) for terms in (dz, off))
        check(dbias, *((sums, bounds) if bias.ndim == 2 else (sums.sum(0), bounds.sum(0))))


@pytest.mark.sampled
@pytest.mark.parametrize("save", ["pre", "out"])
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gated(layout: str, activation: str | None, save: str) -> None:
    """Values, and gradients by everything."""
    p = Problem(layout)
    x, ws = p.arrays()
    fn = FUNCTIONS[activation]

    def run(x: Array, ws: list[Array], biases: tuple[Array, Array]) -> Array:
        lhs, rhs = p.tensors(x, ws)
        return ragged.gated_matmul(lhs, *rhs, activation=activation, bias=biases, save=save).data

    out, vjp = jax.vjp(run, x, ws, (jnp.asarray(p.bias, jnp.float32), jnp.asarray(p.shared, jnp.float32)))
    gate = [a @ b + c for a, b, c in zip(p.x, p.ws[0], p.bias, strict=True)]
    up = [a @ b + p.shared for a, b in zip(p.x, p.ws[1], strict=True)]
    for got, g, u in zip(p.groups(out), gate, up, strict=True):
        close(got, fn(g) * u, "float32")

    dx, dws, (db_gate, db_up) = vjp(p.cotangent())
    d_gate = [d * u * slope(fn, g) for d, u, g in zip(p.dout, up, gate, strict=True)]
    d_up = [d * fn(g) for d, g in zip(p.dout, gate, strict=True)]
    shape = {"forward": (True, False), "batched": (False, False), "inner_rows": (True, True)}[layout]
    got = oracle.unpack(np.asarray(dx, np.float64), shape, p.firsts, p.inner)
    for each, dg, du, a, b in zip(got, d_gate, d_up, *p.ws, strict=True):
        close(each, dg @ a.T + du @ b.T, "float32")
    for dw, dz in zip(dws, (d_gate, d_up), strict=True):
        got = oracle.unpack(np.asarray(dw, np.float64), (layout == "inner_rows", False), p.inner, [p.n] * 5)
        for each, a, d in zip(got, p.x, dz, strict=True):
            close(each, a.T @ d, "float32")
    close(db_gate, np.stack([d.sum(0) for d in d_gate]), "float32")
    close(db_up, sum(d.sum(0) for d in d_up), "float32")


def test_rounded_once() -> None:
    """257 - 256 is 1 in float32; the product alone, in bfloat16, would be 256."""
    x = GroupedTensor(jnp.array([[256, 1], [1, 0]], jnp.bfloat16), jnp.array([1, 1], jnp.int32))
    w, bias = jnp.ones((2, 2, 1), jnp.bfloat16), jnp.array([[-256], [0]], jnp.bfloat16)
    out = ragged.matmul(x, w, bias=bias, activation="relu")
    assert out.data.tolist() == [[1], [1]]
    assert ragged.gated_matmul(x, w, w, bias=(bias, bias), activation=None).data.tolist() == [[1], [1]]
    existing = jnp.array([[-256], [0]], jnp.bfloat16)
    assert ragged.matmul(x, w, existing_out=existing, activation="relu").data.tolist() == [[1], [1]]


def plain(x: Array, w_gate: Array, w_up: Array, bias: Array) -> Array:
    """The same in plain JAX, for `SIZES`: silu."""
    ids = jnp.repeat(jnp.arange(5), jnp.asarray(SIZES), total_repeat_length=24)
    gate = jnp.einsum("rk,rkn->rn", x, w_gate[ids]) + bias[ids]
    out = gate / (1 + jnp.exp(-gate)) * jnp.einsum("rk,rkn->rn", x, w_up[ids])
    return jnp.where((jnp.arange(24) < SIZES.sum())[:, None], out, 0)


def gated(x: Array, w_gate: Array, w_up: Array, bias: Array, **options: Any) -> Array:
    tensor = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32))
    return ragged.gated_matmul(tensor, w_gate, w_up, bias=(bias, None), **options).data


def operands(k: int = 8, n: int = 16, seed: int = 0) -> tuple[Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = (24, k), (5, k, n), (5, k, n), (5, n)
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def ungated(x: Array, w: Array, _: Array, bias: Array) -> Array:
    tensor = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32))
    return ragged.matmul(tensor, w, bias=bias, activation="tanh").data


def plain_ungated(x: Array, w: Array, _: Array, bias: Array) -> Array:
    ids = jnp.repeat(jnp.arange(5), jnp.asarray(SIZES), total_repeat_length=24)
    out = jnp.tanh(jnp.einsum("rk,rkn->rn", x, w[ids]) + bias[ids])
    return jnp.where((jnp.arange(24) < SIZES.sum())[:, None], out, 0)


FORMS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "gated, pre": (partial(gated, save="pre"), plain),
    "gated, out": (partial(gated, save="out"), plain),
    "ungated": (ungated, plain_ungated),
}
"""A function of `operands()`, and the same in plain JAX."""


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_transformations(form: str) -> None:
    """Forward mode, Hessian-vector products, maps, gradients of maps, remat."""
    args, tangents = operands(), operands(seed=1)
    stacked = tuple(jnp.stack([each, each / 2]) for each in args)

    def agree(transform: Callable[[Callable[..., Array]], Any]) -> None:
        results = (jax.jit(partial(transform, fn))() for fn in FORMS[form])
        for got, want in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)

    def loss(fn: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *a: jnp.sum(jnp.sin(fn(*a)))

    def of_a_map(fn: Callable[..., Array], w: Array) -> Array:
        return jnp.sum(jax.vmap(loss(fn), in_axes=(0, None, None, None))(stacked[0], w, *args[2:]))

    agree(lambda fn: jax.jvp(fn, args, tangents)[1])
    agree(lambda fn: jax.jvp(jax.grad(loss(fn), argnums=(0, 1, 2, 3)), args, tangents)[1])
    agree(lambda fn: jax.vmap(fn, in_axes=(0, None, 0, None))(stacked[0], args[1], stacked[2], args[3]))
    agree(lambda fn: jax.vmap(jax.grad(loss(fn), argnums=(0, 1, 3)))(*stacked))
    agree(lambda fn: jax.grad(partial(of_a_map, fn))(args[1]))
    agree(lambda fn: jax.grad(loss(jax.checkpoint(fn)), argnums=(0, 1, 2, 3))(*args))


@pytest.mark.long
def test_what_is_kept() -> None:
    """Of the size of the hidden rows, two pre-activations in the result's dtype, or none; each product once more
    where there are none."""
    args = tuple(each.astype(jnp.bfloat16) for each in operands())

    def kept(fn: Callable[..., Array]) -> list[Any]:
        _, vjp = jax.vjp(fn, *args)
        return [x.dtype for x in jax.tree.leaves(vjp) if hasattr(x, "shape") and x.shape == (24, 16)]

    def products(fn: Callable[..., Array]) -> int:
        gradient = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(fn(*a), dtype=jnp.float32), argnums=range(4)))
        return gradient.trace(*args).lower().as_text().count("stablehlo.while")

    def named(*names: str) -> Callable[..., Array]:
        return jax.checkpoint(gated, policy=jax.checkpoint_policies.save_only_these_names(*names))

    assert kept(gated) == [jnp.bfloat16] * 2 == kept(named("ragged_pre_activation"))
    assert kept(lambda *a: gated(*a, save="out")) == [] == kept(named())
    assert products(lambda *a: gated(*a, save="out")) > products(gated)


@pytest.mark.parametrize("shape", [(2, 1), (1,)])
def test_gradients_of_biases_are_summed_in_float32(shape: tuple[int, ...]) -> None:
    """Bfloat16 can't count beyond 256."""
    x, w = GroupedTensor(jnp.ones((2000, 1), jnp.bfloat16), jnp.array([1000, 1000], jnp.int32)), jnp.ones((2, 1, 1))

    def loss(bias: Array) -> Array:
        return jnp.sum(ragged.matmul(x, w.astype(jnp.bfloat16), bias=bias).data.astype(jnp.float32))

    grad = jax.grad(loss)(jnp.zeros(shape, jnp.bfloat16))
    assert (
        grad.dtype == jnp.bfloat16 and grad.reshape(-1).tolist() == [1000.0 if len(shape) == 2 else 2000.0] * shape[0]
    )


@pytest.mark.parametrize("shape", [(2, 1), (1,)])
def test_derivatives_of_float32_biases(shape: tuple[int, ...]) -> None:
    """Next to bfloat16 operands they have float32's bits: 999 rows of 129/128 in each group, of which one is 0."""
    x = GroupedTensor(jnp.zeros((2000, 1), jnp.bfloat16), jnp.array([1000, 1000], jnp.int32))
    w = jnp.zeros((2, 1, 1), jnp.bfloat16)

    def run(bias: Array) -> Array:
        return ragged.matmul(x, w, bias=bias, activation="relu").data

    out, vjp = jax.vjp(run, jnp.ones(shape))
    (grad,) = vjp(jnp.full(out.shape, 129 / 128, out.dtype).at[jnp.array([0, 1000])].set(0))
    want = 999 * 129 / 128
    assert grad.reshape(-1).tolist() == ([want, want] if len(shape) == 2 else [2 * want])


def test_a_group_keeps_its_nan() -> None:
    """In values and gradients, with the tail's; an activation that isn't 0 at 0 leaves zeros in the tail."""
    x, w_gate, w_up, bias = operands()
    x = x.at[6].set(jnp.nan).at[SIZES.sum() :].set(jnp.nan)  # of group 2
    w_up = w_up.at[1].set(jnp.nan)  # empty

    def run(*a: Array) -> Array:
        return gated(*a, activation="sigmoid")

    out, vjp = jax.vjp(run, x, w_gate, w_up, bias)
    dx, dw_gate, dw_up, dbias = vjp(jnp.ones((24, 16)).at[SIZES.sum() :].set(jnp.nan))
    for rows in (out, dx):
        assert np.isnan(np.asarray(rows)[6]).all() and np.isfinite(np.asarray(rows)[np.arange(24) != 6]).all()
        assert not np.asarray(rows)[SIZES.sum() :].any()
    for matrices in (dw_gate, dw_up, dbias):
        assert [bool(np.isfinite(each).all()) for each in np.asarray(matrices)] == [i != 2 for i in range(5)]


def test_what_is_added_to_is_kept_next_to_a_bias() -> None:
    """Rows of groups that aren't held are those of `existing_out`, with a bias as without."""
    x, w, _, bias = operands()
    tensor = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32))
    existing = GroupedTensor(jnp.full((24, w.shape[-1]), 5.0), tensor.first_dims)
    group = np.repeat(np.arange(6), [*SIZES, 24 - SIZES.sum()])
    for each in (bias[1:4], bias[0]):
        options = {"group_offset": 1, "existing_out": existing}
        got = ragged.matmul(tensor, w[1:4], bias=each, **options).data
        rows = bias[np.clip(group, 0, 4)] if each.ndim == 2 else bias[np.zeros(24, int)]
        added = np.where(np.isin(group, (1, 2, 3))[:, None], rows, 0)
        np.testing.assert_allclose(got, ragged.matmul(tensor, w[1:4], **options).data + added, rtol=1e-6, atol=1e-6)


SPECS = {"x": (24, 8), "gate": (5, 8, 16), "up": (5, 8, 16), "bias": (5, 16)}


def with_numbers(gate: Array, up: Array) -> Array:
    """Each operation takes another mix: of a number, `gate` and `up`."""
    return (jnp.clip(up, -7, 7) + 1) * gate * jax.nn.sigmoid(1.702 * gate)


@pytest.mark.sampled
@pytest.mark.parametrize("varies", SPECS)
@pytest.mark.parametrize(
    "activation", [with_numbers, *(pytest.param(name, marks=pytest.mark.long) for name in ACTIVATIONS)]
)
def test_derivatives_in_a_map_over_one_operand(activation: Any, varies: str) -> None:
    """Each device has another of one operand, and the same of the others."""
    keys = jax.random.split(jax.random.key(0), len(SPECS))
    whole = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SPECS.items(), strict=True)}
    whole[varies] = jnp.stack([whole[varies], -whole[varies]])
    sizes = jnp.array([4, 0, 9, 3, 5], jnp.int32)

    def of_one(x: Array, gate: Array, up: Array, bias: Array) -> Array:
        rows = GroupedTensor(x, sizes)
        return ragged.gated_matmul(rows, gate, up, activation=activation, bias=(bias, None)).data

    def of_device(args: dict[str, Array]) -> Array:
        return of_one(**{name: x[0] if name == varies else x for name, x in args.items()})[None]

    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    in_specs = {name: P("d") if name == varies else P() for name in SPECS}
    mapped = jax.shard_map(of_device, mesh=mesh, in_specs=(in_specs,), out_specs=P("d"))
    got = jax.jit(jax.grad(lambda args: jnp.sum(jnp.sin(mapped(args)))))(whole)

    def one_by_one(args: dict[str, Array]) -> Array:
        each = (of_one(**(args | {varies: args[varies][i]})) for i in (0, 1))
        return sum((jnp.sum(jnp.sin(y)) for y in each), jnp.zeros(()))

    want = jax.jit(jax.grad(one_by_one))(whole)
    for name in SPECS:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=2e-5)


def test_gelu_is_that_of_jax() -> None:
    """With both derivatives; ours has a rule of its own."""
    z = jnp.linspace(-12, 12, 2001)
    for own, theirs in zip(*(derivatives(each) for each in (ACTIVATIONS["gelu"], jax.nn.gelu)), strict=True):
        np.testing.assert_allclose(own(z), theirs(z), rtol=1e-5, atol=1e-6)


def derivatives(function: Callable[..., Any]) -> list[Callable[[Array], Array]]:
    exact = partial(function, approximate=False) if function is jax.nn.gelu else function
    return [jax.vmap(each) for each in (exact, jax.grad(exact), jax.grad(jax.grad(exact)))]


@pytest.mark.long
def test_shards_of_groups() -> None:
    """Groups 1 to 3, their weights and biases; rows of others are zero, by an activation that isn't 0 at 0 too."""
    x, w, _, bias = operands()
    tensor, options = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32)), {"activation": "sigmoid"}
    held = np.isin(np.repeat(np.arange(6), [*SIZES, 24 - SIZES.sum()]), (1, 2, 3))

    def whole(bias: Array) -> Array:
        return jnp.where(held[:, None], ragged.matmul(tensor, w, bias=bias, **options).data, 0)

    def shard(bias: Array) -> Array:
        return ragged.matmul(tensor, w[1:4], bias=bias[1:4], group_offset=1, **options).data

    np.testing.assert_allclose(shard(bias), whole(bias), rtol=1e-6)
    nothing = ragged.matmul(tensor, w[:0], bias=bias[:0], group_offset=0, **options)
    np.testing.assert_array_equal(nothing.data, jnp.zeros_like(shard(bias)))
    got, want = (jax.grad(lambda bias, fn=fn: jnp.sum(fn(bias) ** 2))(bias) for fn in (shard, whole))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("save", ["pre", "out"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_pre_activations_beyond_float16(activation: str, save: str) -> None:
    """The activation of -90,000 is zero, and so is its derivative, though float16 rounds it to infinity."""
    x = GroupedTensor(jnp.array([[300.0], [1.0], [300.0]], jnp.float16), jnp.array([1, 2], jnp.int32))
    w = jnp.array([[[-300.0]], [[30.0]]], jnp.float16)

    def loss(w: Array) -> Array:
        return jnp.sum(ragged.matmul(x, w, activation=activation, save=save).data.astype(jnp.float32))

    value, grad = jax.value_and_grad(loss)(w)
    np.testing.assert_array_equal(value, 0 + 30 + 9000)
    np.testing.assert_array_equal(grad.ravel(), [0, 301])


def test_shards_keep_to_themselves() -> None:
    """An empty group's NaN in its bias, and cotangents of rows of groups that aren't held, reach nothing."""
    x, w, _, bias = operands()
    tensor, held = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32)), slice(5, 14)  # the rows of groups 1 and 2
    for given in (bias[1:3].at[0].set(jnp.nan), bias[0]):

        def shard(bias: Array) -> Array:
            return ragged.matmul(tensor, w[1:3], bias=bias, activation="sigmoid", group_offset=1).data

        out, vjp = jax.vjp(shard, given)
        assert np.isfinite(out).all() and not np.delete(out, np.r_[held], 0).any()
        dout = jnp.full((24, 16), jnp.nan).at[held].set(1)
        want = np.sum(np.asarray(out[held] * (1 - out[held]), np.float64), 0)
        want = np.stack([np.zeros(16), want]) if given.ndim == 2 else want
        np.testing.assert_allclose(vjp(dout)[0], want, rtol=1e-5)


def test_dtypes_of_gate_and_up() -> None:
    """The result has the common dtype, whichever of the two has more bits."""
    x, w, up, _ = operands()
    tensor = GroupedTensor(x.astype(jnp.bfloat16), jnp.asarray(SIZES, jnp.int32))
    narrow = ragged.gated_matmul(tensor, w.astype(jnp.bfloat16), up, activation="sigmoid")
    wide = ragged.gated_matmul(tensor, w.astype(jnp.bfloat16).astype(jnp.float32), up, activation="sigmoid")
    assert narrow.dtype == wide.dtype == jnp.float32
    np.testing.assert_allclose(narrow.data, wide.data, rtol=1e-6)


def test_one_matrix_for_all_groups() -> None:
    """Of ragged rows and of uniform groups, with a bias for each."""
    x, w, _, bias = operands()
    tensor = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32))
    every = jnp.broadcast_to(w[0], w.shape)
    got = ragged.matmul(tensor, w[0], bias=bias, activation="tanh").data
    np.testing.assert_allclose(got, ragged.matmul(tensor, every, bias=bias, activation="tanh").data, rtol=1e-6)
    groups = x[:20].reshape(5, 4, 8)
    got = ragged.matmul(GroupedTensor(groups), w[0], bias=bias, activation="tanh").data
    np.testing.assert_allclose(got, jnp.tanh(groups @ w[0] + bias[:, None]), rtol=1e-5, atol=1e-5)


def test_on_kernels(kernels: tuple[str, ran.Launches]) -> None:
    """The backend has one kernel for all of a gated product, and one for each product of its gradient."""
    backend, launches = kernels
    x, w_gate, w_up, bias = operands(16, 32)
    options = {"backend": INTERPRETED[backend]}
    got, want = (
        jax.jit(jax.value_and_grad(lambda *a, fn=fn: jnp.sum(fn(*a) ** 2), 1))(x, w_gate, w_up, bias)
        for fn in (partial(gated, **options), plain)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)
    count = 2
    assert len(launches) == count and {name for name, _ in launches} == {backend}


@pytest.mark.long
@pytest.mark.parametrize("form", ["gated, pre", "gated, out", "ungated"])
def test_transformations_on_kernels(form: str, kernels: tuple[str, ran.Launches]) -> None:
    with ran.only(*kernels):
        test_transformations(form)


@pytest.mark.long
def test_rounded_once_on_kernels(kernels: tuple[str, ran.Launches]) -> None:
    with ran.only(*kernels):
        test_rounded_once()


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_recipes(recipe: str) -> None:
    """The activation gets the quantised product's float32 sums."""
    x, w_gate, w_up, bias = (each.astype(jnp.bfloat16) for each in operands(32, 32))
    tensor = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32))
    got = ragged.gated_matmul(tensor, w_gate, w_up, bias=(bias, None), recipe=recipe)
    gate, up = (
        np.asarray(ragged.matmul(tensor, w, recipe=recipe, preferred_element_type=jnp.float32).data, np.float64)
        for w in (w_gate, w_up)
    )
    rows = np.asarray(bias, np.float64)[np.repeat(np.arange(5), SIZES)]
    gate = gate[: SIZES.sum()] + rows
    close(got.data[: SIZES.sum()], gate / (1 + np.exp(-gate)) * up[: SIZES.sum()], "bfloat16")

    def loss(w: Array, **options: Any) -> Array:
        out = ragged.gated_matmul(tensor, w, w_up, bias=(bias, None), **options)
        return jnp.sum(out.data.astype(jnp.float32) ** 2)

    quantised, exact = (np.asarray(jax.grad(loss)(w_gate, **o), np.float64) for o in ({"recipe": recipe}, {}))
    assert 0 < np.linalg.norm(quantised - exact) < 0.1 * np.linalg.norm(exact)


@pytest.mark.long
def test_delayed_scaling() -> None:
    """Each product has a history of its own; it moves on by a gradient, once."""
    x, w_gate, w_up, bias = operands()
    tensor = GroupedTensor(x, jnp.asarray(SIZES, jnp.int32))
    recipes = tuple(ragged.Recipe.preset("delayed", length=4).unsealed() for _ in range(2))

    def loss(recipes: Any) -> Array:
        return jnp.sum(ragged.gated_matmul(tensor, w_gate, w_up, bias=(bias, None), recipe=recipes).data ** 2)

    after = jax.grad(loss)(recipes)
    for recipe, w in zip(after, (w_gate, w_up), strict=True):
        held = x[: SIZES.sum()]
        np.testing.assert_allclose(recipe.history[:2, 0], [jnp.max(jnp.abs(held)), jnp.max(jnp.abs(w))], rtol=1e-6)
        assert recipe.history[2, 0] > 0 and not recipe.history[:, 1:].any()
    with pytest.raises(ValueError, match="which belongs to one product"):
        ragged.gated_matmul(tensor, w_gate, w_up, recipe=recipes[0])


X, W = GroupedTensor(jnp.ones((8, 4)), jnp.array([3, 2], jnp.int32)), jnp.ones((2, 4, 6))


@pytest.mark.parametrize(
    "fn, error, text",
    [
        (lambda: ragged.matmul(X, W, activation="swish"), ValueError, "unknown `activation` 'swish'"),
        (lambda: ragged.matmul(X, W, activation=3), ValueError, "unknown `activation` 3"),
        (lambda: ragged.matmul(X, W, bias=jnp.ones((3, 6))), ValueError, r"must have shape \(2, 6\)"),
        (lambda: ragged.matmul(X, W, bias=jnp.ones(4)), ValueError, r"or \(6,\), one row for all"),
        (lambda: ragged.matmul(X, W, bias=1.0), TypeError, "`bias` is not a floating array"),
        (lambda: ragged.matmul(X, W, bias=jnp.ones(6, jnp.int32)), TypeError, "`bias` is not a floating array"),
        (lambda: ragged.matmul(X.mT, X, activation="relu"), ValueError, "the layout 'wgrad' has a result without rows"),
        (lambda: ragged.matmul(X, X.mT, activation="relu"), ValueError, "the layout 'outer' has a result without rows"),
        (lambda: ragged.matmul(W.mT, X.mT, bias=jnp.ones(8)), ValueError, r"`matmul\(rhs.mT, lhs.mT\)`"),
        (lambda: ragged.matmul(X, W, activation="relu", save="all"), ValueError, "unknown `save` 'all'"),
        (lambda: ragged.matmul(X, W, activation="relu", save="nothing"), ValueError, "wrap both in `jax.checkpoint`"),
        (
            lambda: ragged.matmul(X.astype(jnp.int8), W.astype(jnp.int8), activation="relu"),
            TypeError,
            "`activation` is given, but the result is int32",
        ),
        (lambda: ragged.gated_matmul(X, W, W[:, :, :3]), ValueError, "have different shapes"),
        (lambda: ragged.gated_matmul(X, W, W, bias=jnp.ones(6)), TypeError, "`bias` is not a pair"),
        (lambda: ragged.gated_matmul(X.mT, X, X, activation=None), ValueError, "has a result without rows"),
        (  # of the same shape, but one of them ragged
            lambda: ragged.gated_matmul(X, jnp.ones(X.mT.shape), X.mT, activation=None),
            ValueError,
            "a gate is given, but the layout 'outer' has a result without rows",
        ),
        (
            lambda: ragged.nn.Experts(4, 8, 2, activation="swish", key=jax.random.key(0)),
            ValueError,
            "`activation` 'swish'",
        ),
        (lambda: ragged.nn.Experts(4, 8, 2, activation=3, key=jax.random.key(0)), ValueError, "unknown `activation` 3"),
        (lambda: ragged.nn.Experts(4, 8, 2, save="all", key=jax.random.key(0)), ValueError, "unknown `save` 'all'"),
        (
            lambda: ragged.nn.Experts(4, 8, 2, gated=False, activation=jnp.multiply, key=jax.random.key(0)),
            TypeError,
            "but there is no gate",
        ),
    ],
    ids=range(20),
)
def test_bad_input(fn: Callable[[], Any], error: type[Exception], text: str) -> None:
    """An error at the call, with the hint."""
    with pytest.raises(error, match=text):
        fn()
