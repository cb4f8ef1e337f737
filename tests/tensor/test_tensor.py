"""`GroupedTensor`: its fields, its groups, its life as a pytree, cotangents, stacks, and what refuses it."""

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array

import ragged
from ragged import GroupedTensor
from tests.cases import check_error, split
from tests.moe import moe as layer_of
from tests.tensor.examples import CAPACITY, KINDS, RAGGED, SIZES, Example, assert_groups, example, floats, ints

# What it is.


@pytest.mark.parametrize("kind", split(KINDS[:1], KINDS[1:]))
def test_what_it_is(kind: str) -> None:
    """Its fields and its groups, and those of `mT`, which are transposed without a copy."""
    e = example(kind)
    x, y = e.tensor, e.tensor.mT
    assert x.kind == kind.split(",")[0]
    assert (x.shape, x.dtype, x.ndim) == (x.data.shape, np.float32, x.data.ndim)
    assert x.num_groups == len(x) == 4 and not x.is_stack and not x.is_cotangent
    assert x.ragged == (x.first_dims is not None, x.last_dims is not None) == y.ragged[::-1]
    assert np.array_equal(x.mask, e.mask) and x.mask.dtype == bool
    assert np.array_equal(y.mask, np.swapaxes(e.mask, -1, -2))
    packed = {"uniform": None, "ragged rows": -2, "ragged columns": -1, "ragged both": -2, KINDS[4]: -1}[kind]
    assert x.packed_axis == packed
    if packed is None:
        for name in ("capacity", "offsets", "group_ids", "positions", "packed_dims"):
            check_error(lambda name=name: getattr(x, name), ValueError, f"`GroupedTensor.{name}`: a uniform tensor")
        check_error(lambda: x.to_padded(3), ValueError, "`GroupedTensor.to_padded`: a uniform tensor")
    else:
        assert (x.capacity, x.packed_dims.tolist()) == (CAPACITY, list(SIZES))
        assert x.offsets.tolist() == [0, 3, 3, 7, 8]
        assert x.group_ids.tolist() == [0, 0, 0, 2, 2, 2, 2, 3, 4, 4, 4]
        assert x.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 2]
        assert x.offsets.dtype == x.group_ids.dtype == x.positions.dtype == jnp.int32

    assert_groups(x.to_list(), e.groups)
    assert_groups([x[-4], x[np.int64(2)]], e.groups[::2])
    assert_groups([*y], [g.T for g in e.groups])
    assert y.first_dims is x.last_dims and y.last_dims is x.first_dims
    assert jax.tree.structure(x) != jax.tree.structure(y)
    assert jax.tree.structure(x) == jax.tree.structure(y.mT)
    text = jax.jit(lambda t: t.mT.mT).lower(x).compile().as_text()
    assert text is not None and "transpose" not in text

    half = x.astype(jnp.bfloat16)
    assert half.dtype == jnp.bfloat16 and jax.tree.structure(half) == jax.tree.structure(x)
    for wrong in (4, -5):
        with pytest.raises(IndexError, match="there are 4 groups"):
            x[wrong]
    for index in ("a", True):
        with pytest.raises(TypeError, match="the index must be an int"):
            x[index]  # pyright: ignore


@pytest.mark.parametrize("kind", RAGGED)
def test_groups_need_known_sizes(kind: str) -> None:
    """Their shapes aren't known while tracing, unless the sizes are."""
    e = example(kind)
    for f in (lambda t: t[1], lambda t: t.to_list(), list):
        with pytest.raises(ValueError, match="shape depends on sizes that are not known while tracing"):
            jax.eval_shape(f, e.tensor)
    groups = jax.eval_shape(lambda data: e.tensor.with_data(data).to_list(), e.tensor.data)
    assert [g.shape for g in groups] == [g.shape for g in e.groups]
    uniform = jax.eval_shape(lambda t: t.to_list(), example("uniform").tensor)
    assert [g.shape for g in uniform] == [(3, 2)] * 4


def everything(x: GroupedTensor) -> Any:
    """What sizes decide."""
    return x.offsets, x.mask, x.sum(), (x + x).data, x.softmax().data, x.to_padded(5)


def test_sizes_of_any_kind() -> None:
    """int32 or uint32, JAX's or NumPy's, with and without 64 bits: all means the same, and nothing gets wider."""
    x, run = example(KINDS[4]).tensor, jax.jit(everything)
    want = run(x)
    for convert in (lambda dims: dims.astype(jnp.uint32), np.asarray):
        y = GroupedTensor(np.asarray(x.data), convert(x.first_dims), convert(x.last_dims), transposed=True)
        assert repr(y) == repr(x) == repr(y.validate())
        assert all(map(np.array_equal, jax.tree.leaves(run(y)), jax.tree.leaves(want)))
    with jax.enable_x64(True):
        wide = jax.eval_shape(everything, x)
        assert jax.tree.map(lambda a: a.dtype, wide) == jax.tree.map(lambda a: a.dtype, want)
        assert {each.dtype for each in jax.eval_shape(everything, x.astype(jnp.float64))[2:]} == {np.dtype(np.float64)}


def test_further_fields_are_keywords() -> None:
    make: Any = GroupedTensor
    q = ragged.quantize(example(KINDS[1]).tensor, jnp.int8, "row", symmetric=False)
    fields = q.data, q.first_dims, q.last_dims, q.scales, q.scaling
    assert repr(make(*fields, zero_points=q.zero_points)) == repr(q)
    with pytest.raises(TypeError, match="positional arguments"):
        make(*fields, q.zero_points)


# How it is written. `test_show` has notebooks.


def test_repr() -> None:
    """Up to eight sizes, with an exact total; never a tracer's values, nor its name; a cotangent has none."""
    shown = {
        "uniform": "f32[4,3,2]",
        "ragged rows": "f32[11,3], first_dims=[3, 0, 4, 1] (8 of 11 rows)",
        "ragged columns": "f32[2,11], last_dims=[3, 0, 4, 1] (8 of 11 columns)",
        "ragged both": "f32[11,4], first_dims=[3, 0, 4, 1] (8 of 11 rows), last_dims=[2, 3, 0, 1]",
        KINDS[4]: "f32[4,11], first_dims=[2, 3, 0, 1], last_dims=[3, 0, 4, 1] (8 of 11 columns), transposed",
    }
    for kind, text in shown.items():
        assert repr(example(kind).tensor) == f"GroupedTensor({text})"
    turned = example("ragged rows").tensor.astype(jnp.bfloat16).mT
    assert repr(turned) == "GroupedTensor(bf16[3,11], last_dims=[3, 0, 4, 1] (8 of 11 columns), transposed)"
    eight, nine = (GroupedTensor(floats(9, 1), jnp.ones((g,), jnp.int32)) for g in (8, 9))
    assert repr(eight) == "GroupedTensor(f32[9,1], first_dims=[1, 1, 1, 1, 1, 1, 1, 1] (8 of 9 rows))"
    assert repr(nine) == "GroupedTensor(f32[9,1], first_dims=i32[9])"
    large = GroupedTensor(floats(9, 1), ints(2**31 - 1, 2**31 - 1))
    assert repr(large) == "GroupedTensor(f32[9,1], first_dims=[2147483647, 2147483647] (4294967294 of 9 rows))"

    texts: list[str] = []

    def f(x: GroupedTensor) -> GroupedTensor:
        texts.append(repr(x))
        return x

    x = example("ragged both").tensor
    jax.eval_shape(f, x)
    jax.eval_shape(jax.vmap(f), jax.tree.map(lambda a: np.stack([a, a]), x))
    sizes = ints(3, 0)
    jax.eval_shape(jax.grad(lambda data: f(GroupedTensor(data, sizes)).sum().sum()), floats(4, 2))
    assert texts == ["GroupedTensor(f32[11,4], first_dims=i32[4], last_dims=i32[4])"] * 2 + [
        "GroupedTensor(f32[4,2], first_dims=[3, 0] (3 of 4 rows))"
    ]
    rows = GroupedTensor(floats(6, 2), ints(1, 4))
    grad = jax.grad(lambda x: jnp.sum(x.data), allow_int=True)(rows)
    assert repr(grad) == "GroupedTensor(f32[6,2], first_dims=f0[2])"
    assert repr(eqx.filter_grad(lambda x: jnp.sum(x.data))(rows)) == "GroupedTensor(f32[6,2])"


# A pytree.


@pytest.mark.parametrize("kind", KINDS)
def test_any_leaf(kind: str) -> None:
    """Unflattening never validates, and constructing skips what is no array. Nothing is converted."""
    x = example(kind).tensor
    leaves, structure = jax.tree.flatten(x)
    assert len(leaves) == 1 + sum(x.ragged)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(jax.tree.unflatten(structure, leaves)), strict=True))
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    for leaf in (None, object(), 0, PartitionSpec("x"), shape, True, np.float32):
        y: Any = jax.tree.unflatten(structure, [leaf] * len(leaves))
        assert y.data is leaf and y.transposed == x.transposed
        # Also next to a buffer of the wrong rank: a leaf may be anything's placeholder.
        for data in (leaf, floats(1, 2, 3, 4)):
            z: Any = GroupedTensor(data, leaf if leaf is not None else 0, leaf, transposed=True)  # pyright: ignore
            assert z.data is data and z.last_dims is leaf
            assert "GroupedTensor(" in repr(z)
    assert jax.tree.unflatten(structure, [0] * len(leaves)).packed_axis == x.packed_axis  # as `in_axes`
    arrays, rest = eqx.partition(x, eqx.is_inexact_array)
    assert rest.data is None and arrays.first_dims is arrays.last_dims is None
    assert repr(eqx.combine(arrays, rest)) == repr(x) == repr(eqx.filter_jit(lambda t: t)(x))


@pytest.mark.parametrize("kind", split(KINDS[:2], KINDS[2:]))
def test_stacks(kind: str) -> None:
    """Tensors of several sizes in `vmap` and `scan`; a tensor of ints as `in_axes`; a stack is cast and transposed
    whole."""
    examples = [example(kind, seed=1), example(kind, (1, 1, 0, 5), (0, 4, 1, 2), seed=2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[e.tensor for e in examples])
    want = [np.array([g.sum(dtype=np.float64) for g in e.groups]) for e in examples]
    axes = jax.tree.unflatten(jax.tree.structure(stacked), [0] * len(jax.tree.leaves(stacked)))

    @jax.jit
    def run(stacked: GroupedTensor) -> Any:
        mapped = jax.vmap(lambda t: (t + t, t.sum()), in_axes=(axes,))(stacked)
        return mapped, jax.lax.scan(lambda c, t: (c + 1, (t + t, t.sum())), 0, stacked)[1]

    for doubled, sums in run(stacked):
        assert doubled.num_groups == (2 if kind == "uniform" else 4)  # without dims, whose axis it is can't be told
        np.testing.assert_allclose(sums, want, rtol=1e-6)
        for data, e in zip(doubled.data, examples, strict=True):
            assert np.array_equal(data, e.pack([2 * g for g in e.groups]))
    assert stacked.mT.shape == (*stacked.shape[:-2], *stacked.shape[:-3:-1])
    assert stacked.astype(jnp.bfloat16).shape == stacked.shape and stacked.mT.first_dims is stacked.last_dims


def test_axes_to_map_over() -> None:
    """A `GroupedTensor` of ints says which leaves are mapped, and along which axis."""
    e = example(KINDS[4])
    x, axes = e.tensor, lambda *leaves: (GroupedTensor(*leaves, transposed=True),)
    want = np.array([g.sum(dtype=np.float64) for g in e.groups])
    data, dims = jnp.stack([x.data, 2 * x.data], axis=1), jnp.stack([x.packed_dims, ints(3, 0, 4, 0)])
    of_data, of_dims = (
        jax.tree.unflatten(jax.tree.structure(x), [*leaves])
        for leaves in ((data, x.first_dims, x.last_dims), (x.data, x.first_dims, dims))
    )
    out = jax.jit(jax.vmap(lambda t: t.sum(), in_axes=axes(1, None, None)))(of_data)
    np.testing.assert_allclose(out, [want, 2 * want], rtol=1e-6)
    out = jax.jit(jax.vmap(lambda t: t.sum(), in_axes=axes(None, None, 0)))(of_dims)
    np.testing.assert_allclose(out, [want, want * [1, 1, 1, 0]], rtol=1e-6)


# Export.


def exported(function: Callable[..., Any], *args: Any) -> Any:
    """The function, written and read."""
    return jax.export.deserialize(jax.export.export(jax.jit(function))(*args).serialize())


def test_export() -> None:
    """A function of tensors survives serialising: their kind, `transposed`, and what it computes."""
    x = example(KINDS[4]).tensor.mT
    run = exported(lambda t: {"doubled": 2 * t, "sums": t.sum()}, x)
    got, want = run.call(x), {"doubled": 2 * x, "sums": x.sum()}
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    with pytest.raises(ValueError, match="tree"):
        run.call(x.mT)


def modules() -> dict[type, Any]:
    """One of each public class. Recipes unsealed: JAX writes no dtypes of others."""
    x, route, key = floats(4, 3), ragged.route(ints(1, 0, 1, 1), 2), jax.random.key(0)
    moe = layer_of(3, 4, 2, 1, recipe=ragged.Recipe.preset("mxfp8"), wire="rowwise", key=key)
    alone = jax.shard_map(
        lambda route: ragged.exchange(route, "e", wire="rowwise"),
        mesh=jax.make_mesh((1,), ("e",)),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    exchange = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(alone, route))
    made = [
        GroupedTensor(x, ints(1, 2)).mT,
        ragged.quantize_weights(floats(2, 4, 3), "rowwise"),
        ragged.per_group(floats(2)),
        ragged.per_row(floats(3)),
        ragged.per_column(floats(4)),
        route,
        route.gathered(x),
        exchange,
        ragged.Recipe.preset("delayed").unsealed(),
        ragged.nn.GroupedLinear(3, 2, 2, recipe="mxfp8", key=key),
        moe,
        moe.router,
        moe.router(x),
        moe.experts,
        moe(x)[1],
    ]
    return {type(each): each for each in made}


@pytest.mark.long
def test_export_of_every_module() -> None:
    """Each public pytree goes in and out of a program that is written down, and is what it was; scalings too."""
    made = modules()
    classes = itertools.chain(*(vars(place).values() for place in (ragged, ragged.nn, ragged.parallel, ragged.tuning)))
    of_each = {cls for cls in classes if isinstance(cls, type) and issubclass(cls, eqx.Module)}
    quantised = [ragged.quantize(example("uniform").tensor.mT, jnp.float8_e4m3fn, s) for s in ("tensor", (2, 1), "mx")]
    for module in [*(made[cls] for cls in of_each), *quantised]:
        again = exported(lambda module: module, module)
        assert jax.tree.structure(((module,), {})) == again.in_tree
        assert jax.tree.structure(again.call(module)) == jax.tree.structure(module)


# Cotangents, and what needs groups.

NEED_GROUPS: list[Callable[[GroupedTensor], Any]] = [
    lambda t: t[0],
    list,
    lambda t: t.to_list(),
    lambda t: t.to_padded(3),
    lambda t: t.mask,
    lambda t: t.offsets,
    lambda t: t.group_ids,
    lambda t: t.positions,
    lambda t: t.packed_dims,
    lambda t: t.capacity,
    lambda t: t.sum(),
    lambda t: t.mean(-1),
    lambda t: t.max(-2),
    lambda t: t.softmax(),
    lambda t: t.rows(0, 1),
    lambda t: t * ragged.per_group(jnp.ones(4)),
    lambda t: t * ragged.per_row(jnp.ones(4)),
    lambda t: ragged.concat([t, t]),
]


def cotangents(e: Example) -> list[GroupedTensor]:
    """Of the sum of an example's squares: dims None, and dims float0."""

    def loss(t: GroupedTensor) -> Array:
        return jnp.sum(t.map(jnp.square).data)

    found = eqx.filter_jit(eqx.filter_grad(loss))(e.tensor)
    shapes: Any = jax.eval_shape(jax.grad(loss, allow_int=True), e.tensor)
    zeros: Any = [None if d is None else np.zeros(d.shape, d.dtype) for d in (shapes.first_dims, shapes.last_dims)]
    return [found, GroupedTensor(found.data, *zeros, transposed=found.transposed)]


@pytest.mark.parametrize("kind", split(RAGGED[:1], RAGGED[1:]))
def test_cotangents(kind: str) -> None:
    """What is elementwise works on the buffer, and with the tensor itself gives its groups, with a zero tail."""
    e = example(kind)
    x = e.tensor

    @jax.jit
    def compute(g: GroupedTensor, dirty: GroupedTensor) -> Any:
        def quotient(data: Array) -> Array:
            return jnp.sum((x / dirty.with_data(data)).data)

        def steps(g: GroupedTensor) -> list[GroupedTensor]:
            mapped = x.map(lambda a, b: a - b / 4, g), g.map(lambda a, b: a / 4 - b, x)
            return [x - g / 4, g / 4 - x, *mapped]

        apart = [g * 2, 0.5 * g, g + g, -g, g.map(lambda d: d * 3), g - g / 2, g.map(jnp.add, g)]
        return apart, [*steps(g), *steps(dirty)], jax.grad(quotient)(dirty.data)

    for g in cotangents(e):
        assert g.kind == "cotangent" and g.is_cotangent
        if g.first_dims is None and g.last_dims is None:  # `jit` takes no float0
            apart, steps, by_dirty = compute(g, g.with_data(jnp.where(e.mask, g.data, jnp.nan)))
            for out, scale in zip(apart, (2, 0.5, 2, -1, 3, 0.5, 2), strict=True):
                assert out.is_cotangent and jax.tree.structure(out) == jax.tree.structure(g)
                np.testing.assert_allclose(out.data, e.pack([2 * scale * d for d in e.groups]), rtol=1e-6)
            for out, sign in zip(steps, (1, -1) * 4, strict=True):
                assert jax.tree.structure(out) == jax.tree.structure(x)
                assert np.array_equal(out.data, e.pack([sign * (d - 0.5 * d) for d in e.groups]))
            # NaN in its tail reaches no gradient.
            np.testing.assert_allclose(by_dirty, e.pack([-0.25 / d for d in e.groups]), rtol=1e-6)
        else:
            assert (g * 2 + g).is_cotangent and not (x - g).is_cotangent
        assert (g.astype(jnp.bfloat16) * 2).dtype == jnp.bfloat16
        assert jax.tree.structure(g.mT.mT) == jax.tree.structure(g)
        stepped = eqx.apply_updates(x, jax.tree.map(lambda d: -d / 4, eqx.filter(g, eqx.is_inexact_array)))
        assert repr(stepped) == repr(x)

    # A tangent, made by hand, and what `jvp` returns.
    zeros: list[Any] = [
        None if d is None else np.zeros(d.shape, jax.dtypes.float0) for d in (x.first_dims, x.last_dims)
    ]
    tangent = GroupedTensor(jnp.ones(x.shape), *zeros, transposed=x.transposed)
    out = jax.jvp(lambda t: t * t, (x,), (tangent,))[1]
    assert out.is_cotangent
    np.testing.assert_allclose((x - out).data, e.pack([-d for d in e.groups]), rtol=1e-6)


@pytest.mark.parametrize("kind", split(KINDS[2:3], [KINDS[1], *KINDS[3:]]))
def test_what_has_no_groups_refuses_what_needs_them(kind: str) -> None:
    """Cotangents and stacks, with one hint."""
    e = example(kind)
    x = e.tensor
    hint = "Use the groups of the tensor that was differentiated: `x - g`, or "
    for g in cotangents(e):
        quantised = [lambda t: ragged.quantize(t, jnp.int8, "row"), lambda t: ragged.matmul(t, jnp.ones((4, 3, 2)))]
        for use in (*NEED_GROUPS, *quantised):
            check_error(lambda use=use, g=g: use(g), TypeError, hint)
        check_error(lambda g=g: g.map(lambda d: d[:1]), ValueError, "must keep the rank and the extent of axes [0, 1]")
        check_error(lambda g=g: g + jnp.ones(7), TypeError, "a plain array has no groups to match")
        for other in (GroupedTensor(floats(3, 3), ints(1, 2)), g.mT):
            check_error(lambda g=g, other=other: g + other, ValueError, "tensors have different structures")

    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), x)
    leaves = [stack.data, *(each for each in (x.first_dims, x.last_dims) if each is not None)]
    shared = jax.tree.unflatten(jax.tree.structure(x), leaves)  # only the buffer has the axis
    assert shared.is_stack == (x.packed_axis == -1)  # packed rows may have more dims
    more: list[Callable[[GroupedTensor], Any]] = [lambda t: t.map(jnp.exp), lambda t: t * 2, lambda t: t + t, len]
    for t in (stack, shared) if shared.is_stack else (stack,):
        for use in (*NEED_GROUPS, *more):
            check_error(
                lambda use=use, t=t: use(t), ValueError, "this is a stack of tensors, with a leading batch axis."
            )
        with pytest.raises(ValueError):
            _ = x + t


@pytest.mark.parametrize(
    "tensor",
    [
        # Of groups of one size NumPy would make an array, and drop the tail.
        GroupedTensor(floats(8, 2), ints(2, 2)),
        GroupedTensor(floats(8, 2), ints(2, 3)),
        GroupedTensor(floats(2, 8, 2)),
    ],
    ids=repr,
)
def test_misuse_fails_loudly(tensor: GroupedTensor) -> None:
    """Nothing takes it for an array and drops its groups."""
    misuses: list[Callable[[Any], Any]] = [
        *(jnp.exp, jnp.sum, jnp.asarray, jax.nn.relu, jnp.zeros_like, float, bool),
        *(np.asarray, np.array, np.exp, np.sum, np.mean, np.linalg.norm, np.ones_like),
        lambda x: jnp.add(x, 1),
        lambda x: np.add(x, 1),
        lambda x: np.multiply(np.ones(4), x),
        lambda x: jnp.where(True, x, 0),
        lambda x: jnp.matmul(x, x),
        lambda x: x + jnp.ones(4),
        lambda x: jnp.ones(4) + x,
        lambda x: x / np.ones(4),
        lambda x: x == np.ones(4),
        lambda x: np.ones((8, 2)) - x,
        lambda x: [1, 2] * x,
        lambda x: x + "1",
        lambda x: x + None,
        lambda x: x @ None,
        lambda x: x < None,
        lambda x: x.map(jnp.add, "1"),
        lambda x: x.map(jnp.add, jnp.ones(4)),
    ]
    for misuse in misuses:
        with pytest.raises(ValueError if misuse is bool else TypeError):
            misuse(tensor)
