"""`sharded_matmul`: the specs are said, and a function sees each device's part."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from tests import cases, oracle
from tests.cases import NAMES
from tests.primitive.test_partition import DOUT, KINDS, SIZES, W, X, collectives, made, mesh_of, specs


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("layout", NAMES)
def test_every_layout(layout: str, check_vma: bool, kind: str) -> None:
    """Operands that are anywhere, and specs of two letters; flipped ones too."""
    case, mesh = made(layout), mesh_of(kind, a=2, b=2)
    letters = {"batched": "mn", "inner_rows": "mn", "ragged": "mn", "outer": "mk"}.get(layout, "mk")
    in_specs = specs(case, **dict(zip(letters, "ab", strict=True)))
    out_specs = P(*[None] * (case.lhs.ndim + case.rhs.ndim == 4 and layout == "wgrad"), *(None, None))
    if layout == "batched":
        out_specs = P(None, None, None)
    for lhs, rhs, turned in ((case.lhs, case.rhs, False), (case.rhs.mT, case.lhs.mT, True)):
        if turned and layout in ("outer", "ragged"):  # whose result would pack its columns
            continue
        options: Any = {"mesh": mesh, "check_vma": check_vma, "out_specs": out_specs}
        given = in_specs
        if turned:
            given = tuple(P(*s[:-2], s[-1], s[-2]) for s in in_specs[::-1])
        product = partial(ragged.sharded_matmul, in_specs=given, **options)
        out = jax.jit(product)(lhs, rhs)
        out = out.mT if turned else out
        got = case.unpack(np.asarray(out.data).astype(np.float64))
        oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), *cases.TOLERANCE["float32"])
        case.assert_tail_zero(out)


@pytest.mark.long
@pytest.mark.parametrize("rows", [32, 29, 3])
def test_rows_that_devices_do_not_divide(rows: int) -> None:
    """Forward and gradients; the result has the rows of its operand."""
    sizes = jnp.minimum(SIZES, rows // 3)
    x, dout = X[:rows], DOUT[:rows]

    def product(x: Array, w: Array) -> Array:
        tensor, given = GroupedTensor(x, sizes), {"in_specs": (P("a"), P(None, None, "b")), "out_specs": P("a", "b")}
        return ragged.sharded_matmul(tensor, w, mesh=mesh_of("auto", a=4, b=2), **given).data

    out, pull = jax.vjp(product, x, W)
    want, want_pull = jax.vjp(lambda x, w: ragged.grouped_matmul(x, w, sizes), x, W)
    assert out.shape == want.shape
    for got, expected in zip((out, *pull(dout)), (want, *want_pull(dout)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_scales_of_rows_that_devices_do_not_divide() -> None:
    """Rows with a scale each are padded together with their scales: 5 rows over 2 devices."""
    x, sizes = np.array([[1, 2], [30, 40], [-5, 6], [700, 800], [9, 9]], np.float32), np.array([2, 3])
    w = np.array([[[1], [2]], [[3], [-4]]], np.float32)
    q = ragged.quantize(GroupedTensor(jnp.asarray(x), jnp.asarray(sizes, jnp.int32)), jnp.int8, "row")
    given: Any = {"in_specs": (P("a"), P()), "out_specs": P("a")}
    out = jax.jit(partial(ragged.sharded_matmul, mesh=mesh_of("auto", a=2), **given))(q, w)
    want = np.concatenate(oracle.matmul(np.split(x, [2]), [*w]))
    np.testing.assert_allclose(out.data, want, atol=0.02 * np.abs(want).max())
    assert out.data.shape == (5, 1)


def test_the_callback_sees_each_part() -> None:
    """With what the groups have in it; it may change the dtype, and has gradients."""
    mesh, seen = mesh_of("auto", a=4), []

    def callback(part: GroupedTensor) -> GroupedTensor:
        seen.append((part.shape, part.kind))
        scaled = part * ragged.per_group(jnp.arange(1.0, 5.0))
        return scaled.map(jnp.tanh).astype(jnp.bfloat16)

    def loss(x: Array, w: Array, sharded: bool) -> Array:
        tensor = GroupedTensor(x, SIZES)
        if sharded:
            options: Any = {"in_specs": (P("a"), P()), "out_specs": P("a"), "out_shard_callback": callback}
            out = ragged.sharded_matmul(tensor, w, mesh=mesh, **options)
        else:
            out = callback(ragged.matmul(tensor, w))
        assert out.dtype == jnp.bfloat16
        return jnp.sum(out.data.astype(jnp.float32) * DOUT)

    got = jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, True), (0, 1)))(X, W)
    assert seen == [((8, 24), "ragged rows")]
    want = jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, False), (0, 1)))(X, W)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2**-6, atol=2**-6)


@pytest.mark.long
def test_the_result_is_where_it_is_asked_to_be() -> None:
    """Also where neither the operands nor the sum put it."""
    mesh = mesh_of("auto", a=2, b=2)
    for out_specs, expected in ((P("b"), None), (P(None, "a"), "reduce-scatter"), (P(), "all-reduce")):
        product = jax.jit(
            lambda x, w, out_specs=out_specs: (
                ragged.sharded_matmul(
                    GroupedTensor(x, SIZES), w, mesh=mesh, in_specs=(P(None, "a"), P(None, "a")), out_specs=out_specs
                ).data
            )
        )
        out = product(X, W)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, out_specs), 2)
        np.testing.assert_allclose(out, ragged.grouped_matmul(X, W, SIZES), rtol=1e-4, atol=1e-5)
        if expected:
            assert expected in collectives(product.lower(X, W).compile())


RIGHT: dict[str, Any] = {"in_specs": (P("a"), P()), "out_specs": P("a")}


@pytest.mark.parametrize(
    "changed, error, text",
    [
        ({"mesh": None}, ValueError, "`mesh` is .*\nGot .*\nPass a mesh, or set one"),
        ({"in_specs": P("a")}, TypeError, "`in_specs` is .*\nGot .*\nPass two `PartitionSpec`s"),
        ({"in_specs": (P("a"), "b")}, TypeError, r"`in_specs\[1\]` is 'b'.\nGot .*\nPass a `PartitionSpec`."),
        ({"in_specs": (P("z"), P())}, ValueError, r"the mesh has no axis 'z'.\nGot .*\nThe mesh has the axes"),
        ({"out_specs": P(None, None, "a")}, ValueError, "the buffer has 2 axes.\nGot .*\nGive each axis at most one"),
        ({"in_specs": (P(), P(None, None, "a"))}, ValueError, r"extent 21 into 4 shards, over \('a',\).\nGot"),
        (
            {"activation": "relu"},
            ValueError,
            "`activation` can't be combined with `in_specs` and .*\nGot .*\nApply it in",
        ),
        ({"recipe": "rowwise"}, ValueError, "`recipe` can't be combined with `in_specs` and .*\nGot .*\nQuantise"),
        (
            {"out_shard_callback": lambda part: part.data},
            ValueError,
            "`out_shard_callback` returned a value of another",
        ),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input(changed: dict[str, Any], error: Any, text: str) -> None:
    options: dict[str, Any] = {"mesh": mesh_of("auto", a=4)} | RIGHT | changed
    with pytest.raises(error, match=text):
        ragged.sharded_matmul(GroupedTensor(X, SIZES), W[:, :, :21], **options)
