"""Products of sharded operands, over `Auto` and over `Explicit` axes: numbers, and collectives of the program."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from ragged.tensor.base import with_fields
from tests import cases, oracle

pytestmark = pytest.mark.sampled(default=False)  # by default, others stand for these

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
COLLECTIVES = "all-reduce", "all-gather", "all-to-all", "ragged-all-to-all", "reduce-scatter", "collective-permute"
DOCS = Path(__file__).parent.parent.parent / "docs" / "sharding.md"


def mesh_of(kind: str, **axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(KINDS[kind],) * len(axes))


def moved(program: Any) -> list[tuple[str, str]]:
    """The collectives of a compiled program, and the types of what each makes, or of what it takes and makes."""
    calls = rf"^ *(?:ROOT )?%\S+ = (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\("
    return [(name, types) for types, name in re.findall(calls, program.as_text(), re.M)]


def collectives(program: Any) -> str:
    """Those of a compiled program, as in "2 all-gather, all-reduce"; "" for none."""
    found = Counter(name for name, _ in moved(program))
    return ", ".join(f"{n} {name}" if n > 1 else name for name, n in sorted(found.items()))


def made(layout: str) -> cases.Case:
    """A case in which four devices divide every extent, left-aligned ones too."""
    case = cases.make(layout, g=4, kind="zipf", capacity=64, uniform=(16, 32, 48))

    def padded(x: Any) -> Any:
        free = None if x.packed_axis is None else -3 - x.packed_axis
        if free is None or not (more := -x.shape[free] % 4):
            return x
        pads = [(0, more if axis == free else 0) for axis in (-2, -1)]
        return x.with_data(jnp.pad(jnp.asarray(x.data), pads, constant_values=jnp.nan))

    case.lhs, case.rhs = padded(case.lhs), padded(case.rhs)
    return case


def specs(case: cases.Case, **axes: Any) -> tuple[P, P]:
    """Of the operands' buffers, from the mesh axes of each letter."""

    def spec(x: GroupedTensor, letters: str) -> P:
        return P(*(axes.get(z) for z in "g" * (x.ndim - 2) + letters))

    return spec(case.lhs, "mk"), spec(case.rhs, "kn")


def put(x: GroupedTensor, mesh: Any, spec: P) -> GroupedTensor:
    return x.with_data(jax.device_put(jnp.asarray(x.data), NamedSharding(mesh, spec)))


def check(case: cases.Case, out: GroupedTensor) -> None:
    got = case.unpack(np.asarray(out.data).astype(np.float64))
    oracle.assert_close(got, oracle.matmul(case.lhs_groups, case.rhs_groups), *cases.TOLERANCE["float32"])
    case.assert_tail_zero(out)


def derivatives(case: cases.Case) -> list[Callable[[Array, Array, Array], Array]]:
    """The cotangents of the operands' buffers, each as a function of these and of the result's."""

    def product(lhs: Array, rhs: Array) -> Array:
        return ragged.matmul(case.lhs.with_data(lhs), case.rhs.with_data(rhs)).data

    return [
        lambda lhs, rhs, dout: jax.vjp(lambda lhs: product(lhs, rhs), lhs)[1](dout)[0],
        lambda lhs, rhs, dout: jax.vjp(lambda rhs: product(lhs, rhs), rhs)[1](dout)[0],
    ]


def table() -> dict[tuple[str, str], list[str]]:
    """The documented one: collectives by layout and letter; of the product, and of its derivatives."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w)` \| (.*) \|$", DOCS.read_text(), re.M)
    return {(layout, z): [cell.strip().replace("none", "") for cell in rest.split("|")] for layout, z, rest in rows}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout, letter", table())
def test_one_letter(layout: str, letter: str, kind: str) -> None:
    """Each letter that can be sharded, and the table in the documentation."""
    case, mesh = made(layout), mesh_of(kind, a=4)
    lhs, rhs = (put(x, mesh, s) for x, s in zip((case.lhs, case.rhs), specs(case, **{letter: "a"}), strict=True))
    want = table()[layout, letter]
    product = jax.jit(ragged.matmul)
    out = product(lhs, rhs)
    check(case, out)
    assert collectives(product.lower(lhs, rhs).compile()) == want[0]
    dout = jax.device_put(jnp.cos(np.asarray(out.data)), out.data.sharding)
    plain = jnp.asarray(case.lhs.data), jnp.asarray(case.rhs.data), jnp.asarray(np.asarray(dout))
    for x, derivative, expected in zip((lhs, rhs), derivatives(case), want[1:], strict=True):
        # Over `Auto` axes a result is sharded as it is used: a gradient, as its operand is.
        options: Any = {"out_shardings": x.data.sharding} if kind == "auto" else {}
        sharded = jax.jit(derivative, **options)
        got = sharded(lhs.data, rhs.data, dout)
        assert got.sharding.is_equivalent_to(x.data.sharding, got.ndim)
        # One device's is tested against NumPy elsewhere.
        np.testing.assert_allclose(got, jax.jit(derivative)(*plain), rtol=1e-5, atol=2e-5)
        assert collectives(sharded.lower(lhs.data, rhs.data, dout).compile()) == expected


SEVERAL: list[tuple[str, dict[str, Any], str]] = [  # layout, axes of letters, collectives
    ("forward", {"m": "a", "k": "c", "n": "b"}, "all-reduce"),
    ("forward", {"m": ("a", "b"), "n": "c"}, ""),
    ("forward", {"m": "a", "g": "b", "n": "c"}, "all-reduce"),
    ("forward", {"g": ("a", "b"), "k": "c"}, "all-reduce"),
    ("forward_left", {"m": "a", "k": "b", "n": "c"}, "all-reduce"),
    ("wgrad", {"m": "b", "k": ("a", "c")}, "all-reduce"),
    ("batched", {"g": "a", "m": "b", "k": "c"}, "all-reduce"),
    ("outer", {"m": "a", "k": "b"}, "all-reduce"),
    ("inner_rows", {"m": ("a", "b"), "n": "c"}, ""),
    ("inner_columns", {"m": "a", "k": "b"}, "all-reduce"),
    ("ragged", {"m": "a", "n": "b"}, ""),
    # Both operands want "a": weights stay, rows are gathered, and each device has the sum of its rows.
    ("forward", {"m": "a", "g": "a"}, "all-gather, reduce-scatter"),
    ("forward", {"m": "a", "g": "a", "n": "b"}, "all-gather, reduce-scatter"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout, axes, expected", SEVERAL, ids=str)
def test_several_letters(layout: str, axes: dict[str, Any], expected: str, kind: str) -> None:
    """Two and three mesh axes, two of them on one letter, one of them wanted by two letters."""
    case, mesh = made(layout), mesh_of(kind, a=2, b=2, c=2)
    lhs, rhs = (put(x, mesh, s) for x, s in zip((case.lhs, case.rhs), specs(case, **axes), strict=True))
    product = jax.jit(ragged.matmul)
    check(case, product(lhs, rhs))
    assert collectives(product.lower(lhs, rhs).compile()) == expected


# --- what else a product can have -------------------------------------------------------------------------------------


def over(kind: str, function: Callable[..., Any], args: list[Any], axes: list[P], **mesh: int) -> Any:
    """`function` of sharded arrays, compiled, and of the same on one device: its results of both."""
    on = mesh_of(kind, **mesh)
    sharded = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(args, axes, strict=True)]
    return jax.jit(function)(*sharded), jax.jit(function)(*args)


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = (np.asarray(x).astype(np.float64) for x in (g, w))
        assert np.abs(w).max() > 0
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * np.abs(w).max())


rng = np.random.default_rng(0)
X, W, DOUT = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 16), (4, 16, 24), (32, 24)))
SIZES = jnp.array([5, 0, 11, 9], jnp.int32)  # of 32 rows


@pytest.mark.parametrize("kind", KINDS)
def test_existing_out_is_added_once(kind: str) -> None:
    """To a sum over devices, in the accumulator's dtype; its tail is not added."""

    def product(x: Array, w: Array, old: Array) -> Array:
        return ragged.grouped_matmul(x, w, SIZES, existing_out=old)

    args, axes = [X, W, DOUT.astype(jnp.bfloat16)], [P("a", "b"), P(None, "b", None), P("a", None)]
    got, want = over(kind, product, args, axes, a=2, b=2)
    assert got.dtype == jnp.bfloat16 and not np.asarray(got)[25:].any()
    same(got, want, 2**-8)


@pytest.mark.parametrize("kind", KINDS)
def test_group_offset_of_sharded_groups(kind: str) -> None:
    """The matrices are those from an offset on, and each device has some; also where none exist."""
    for offset in (-3, 1, 2, 2**31 - 1, -(2**31)):
        got, want = over(
            kind,
            lambda x, w, offset=offset: ragged.grouped_matmul(x, w, SIZES, group_offset=jnp.int32(offset)),
            [X, W[:2]],
            [P(), P("a")],
            a=2,
        )
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_devices_are_rounded_once(kind: str) -> None:
    """1 + 2**-9 - 1 over three devices of four is not lost in bfloat16."""
    x = jnp.tile(jnp.array([[1, 2**-9, -1, 0]], jnp.bfloat16), (4, 1))
    got, _ = over(
        kind,
        lambda x, w: ragged.grouped_matmul(x, w, jnp.array([4], jnp.int32)),
        [x, jnp.ones((1, 4, 2), jnp.bfloat16)],
        [P(None, "a"), P(None, "a")],
        a=4,
    )
    assert (np.asarray(got).astype(np.float64) == 2**-9).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_recipes(recipe: str, kind: str) -> None:
    """Value and gradients; a cut through a block of scales makes the blocks smaller."""
    x, w, dout = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 192), (4, 192, 64), (32, 64)))

    def step(x: Array, w: Array, dout: Array) -> Any:
        out, pull = jax.vjp(lambda x, w: ragged.matmul(GroupedTensor(x, SIZES), w, recipe=recipe).data, x, w)
        return out, *pull(dout)

    axes = [P("a", "b"), P(None, "b", None), P("a", None)]
    same(*over(kind, step, [x, w, dout], axes, a=2, b=2), tolerance=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_blocks_that_are_cut(kind: str) -> None:
    """Blocks of 128 along 192 of which a device has 96; scales of groups that are packed."""
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 192), (4, 192, 24)))
    w *= jnp.repeat(jnp.array([1.0, 100.0]), 96)[None, :, None]
    qx, qw = ragged.quantize(GroupedTensor(x, SIZES), jnp.int8, "group"), ragged.quantize(w, jnp.int8, (128, 1))

    def product(x: Array, x_scales: Array, w: Array, w_scales: Array) -> Array:
        lhs, rhs = (
            with_fields(q.with_data(data), scales=scales) for q, data, scales in ((qx, x, x_scales), (qw, w, w_scales))
        )
        return ragged.matmul(lhs, rhs, preferred_element_type=jnp.float32).data

    args = [qx.data, qx.scales, qw.data, qw.scales]
    same(*over(kind, product, args, [P("a", "b"), P(), P(None, "b"), P()], a=2, b=2))


@pytest.mark.parametrize("kind", KINDS)
def test_maps(kind: str) -> None:
    """A `vmap` whose axis is sharded, or whose elements are; sizes of their own; gradients of what they share."""
    x = jnp.stack([X, -X, 2 * X, X + 1])
    sizes = jnp.stack([SIZES, SIZES[::-1], jnp.zeros(4, jnp.int32), SIZES])

    def step(x: Array, w: Array, sizes: Array) -> Any:
        out, pull = jax.vjp(lambda x, w: jax.vmap(ragged.grouped_matmul, (0, None, 0))(x, w, sizes), x, w)
        return out, *pull(jnp.cos(out))

    both = [P("a", None, "b"), P(None, "b", None)]
    for axes in ([P("a"), P()], [P(None, "a", None), P(None, None, "b")], both):
        mapped = P(axes[0][0])  # JAX wants one sharding of the mapped axis
        same(*over(kind, step, [x, W, sizes], [*axes, mapped], a=2, b=2), tolerance=3e-5)


@pytest.mark.long
def test_derivatives_of_second_order() -> None:
    """Forward over reverse, of operands that are sharded."""

    def loss(x: Array, w: Array) -> Array:
        return jnp.sum(jnp.sin(ragged.grouped_matmul(x, w, SIZES)))

    def second(x: Array, w: Array) -> Any:
        return jax.jvp(jax.grad(loss, (0, 1)), (x, w), (jnp.cos(x), jnp.sin(w)))

    for kind in KINDS:
        same(*over(kind, second, [X, W], [P("a"), P(None, None, "b")], a=2, b=2), tolerance=1e-4)


OUT: list[tuple[P, P, Any, str]] = [  # of x and w; asked of the result; collectives
    (P(None, "a"), P(None, "a"), P("a", None), "reduce-scatter"),
    (P(None, "a"), P(None, "a"), P(None, "a"), "reduce-scatter"),
    (P("b", "a"), P(None, "a"), P(("b", "a"), None), "reduce-scatter"),
    (P(None, "a"), P(None, "a"), P(None, None, unreduced=frozenset("a")), ""),
    (P(), P("a"), P("a", None), "reduce-scatter"),
    (P("a"), P(), P("a", "b"), ""),
    (P("a"), P(), P("b", None), "collective-permute"),
    (P("a"), P(), P(None, None), "all-gather"),
]


@pytest.mark.parametrize("x, w, asked, expected", OUT, ids=str)
def test_out_sharding(x: P, w: P, asked: P, expected: str) -> None:
    """What is summed is summed in parts, or not yet."""
    mesh = mesh_of("explicit", a=2, b=2)

    def product(x: Array, w: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, SIZES), w, out_sharding=asked).data

    with jax.set_mesh(mesh):
        args = jax.device_put(X, x), jax.device_put(W, w)
        got = jax.jit(product)(*args)
        spec = jax.typeof(got).sharding.spec
        assert spec.partitions == asked.partitions and spec.unreduced == asked.unreduced
        assert collectives(jax.jit(product).lower(*args).compile()) == expected
        whole = jax.jit(lambda y: jax.sharding.reshard(y, P(None, None)))(got)
        dx, dw = jax.jit(
            jax.grad(lambda x, w: jnp.sum(jax.sharding.reshard(product(x, w), P(None, None)) * DOUT), (0, 1))
        )(*args)
    want, pull = jax.vjp(lambda x, w: ragged.grouped_matmul(x, w, SIZES), X, W)
    same((whole, dx, dw), (want, *pull(DOUT)))


@pytest.mark.parametrize(
    "asked, error, text",
    [
        ("a", TypeError, "`out_sharding` is 'a'.\nGot lhs=.*\nPass a `PartitionSpec` or a `NamedSharding`."),
        (P("z"), ValueError, r"has no explicit axis 'z'.\nGot .*\nIts explicit axes are \('a', 'b'\)."),
        (P(None, None, "a"), ValueError, r"for a result of shape \(32, 24\).\nGot .*\nGive each axis"),
        (P(None, ("a", "b", "c")), ValueError, "has no explicit axis 'c'"),
        (P("a", ("b", "a")), ValueError, "which names a mesh axis twice.\nGot .*\nName each mesh axis at most once."),
        (P(P.UNCONSTRAINED, "a"), ValueError, "`out_sharding` is .*\nGot .*\nGive each dim mesh axes or None"),
        (
            P(None, None, unreduced=frozenset("b")),
            ValueError,
            "is unreduced over 'b', but the product isn't summed over it.\n",
        ),
        (NamedSharding(mesh_of("explicit", a=4, b=2), P("a")), ValueError, "has the mesh {'a': 4, 'b': 2}"),
    ],
    ids=str,
)
def test_bad_out_shardings(asked: Any, error: Any, text: str) -> None:
    with jax.set_mesh(mesh_of("explicit", a=2, b=2)), pytest.raises(error, match=text):
        ragged.matmul(GroupedTensor(jax.device_put(X, P("a")), SIZES), W, out_sharding=asked)


def test_out_sharding_that_does_not_divide() -> None:
    text = r"which splits an axis of extent 24 into 16 shards.\nGot .*\nThe number of shards must divide the extent."
    mesh = jax.sharding.AbstractMesh((16,), ("a",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("a")))
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(lambda x: ragged.matmul(GroupedTensor(x, SIZES), W, out_sharding=P(None, "a")), x)


def test_out_sharding_without_explicit_axes() -> None:
    with pytest.raises(ValueError, match=r"no operand is sharded over an `Explicit` axis"):
        ragged.grouped_matmul(X, W, SIZES, out_sharding=P("a"))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_summed_over_devices_in_float32(kind: str) -> None:
    """257 on one device and -256 on another are 1, in bfloat16 too."""
    dout = jnp.array([256, 1, -256] + [0] * 13, jnp.bfloat16)[:, None]

    def gradient(x: Array, w: Array, dout: Array) -> Array:
        return jax.vjp(lambda w: ragged.grouped_matmul(x, w, jnp.array([16], jnp.int32)), w)[1](dout)[0]

    ones = jnp.ones((16, 1), jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16)
    got, want = over(kind, gradient, [*ones, dout], [P("a"), P(), P("a")], a=8)
    assert np.asarray(got).item() == np.asarray(want).item() == 1


WHERE = [(P("a"), P("a")), (P(None, "b"), P()), (P(), P(None, "b")), (P("a"), P(None, None, "a"))]


@pytest.mark.parametrize("recipe", [None, "rowwise"])
@pytest.mark.parametrize("x, w", WHERE, ids=str)
def test_cotangents_are_sharded_as_their_operands(x: P, w: P, recipe: str | None) -> None:
    """Whatever the product that they come from has; those of `existing_out` too."""

    def step(x: Array, w: Array, old: Array) -> Any:
        product = partial(ragged.matmul, recipe=recipe)
        out, pull = jax.vjp(lambda x, w, old: product(GroupedTensor(x, SIZES), w, existing_out=old).data, x, w, old)
        return out, *pull(jnp.cos(out))

    for old in (P("a"), P(None, "b"), P()):
        got, want = over("explicit", step, [X, W, DOUT], [x, w, old], a=2, b=2)
        same(got, want, 1e-4)
        for each, spec in zip(got[1:], (x, w, old), strict=True):
            expected = [*spec] + [None] * (each.ndim - len(spec))
            assert [*jax.typeof(each).sharding.spec] == expected


def test_an_axis_that_xla_splits() -> None:
    """Rows over four devices, then seen as two times two."""
    x = jnp.ones((32, 16))

    def product(x: Array) -> Array:
        return jax.vmap(lambda x: ragged.grouped_matmul(x, W, SIZES // 2))(x.reshape(2, 16, 16))

    same(*over("auto", product, [x], [P("a")], a=4))


def test_eager_over_explicit_axes() -> None:
    """Without `jit` and without a mesh in context, beside operands that are nowhere in particular."""
    x = GroupedTensor(jax.device_put(X, NamedSharding(mesh_of("explicit", a=2), P("a"))), SIZES)
    for call in (lambda x: ragged.matmul(x, W), lambda x: x + 1, lambda x: x.softmax()):
        got, want = call(x), call(GroupedTensor(X, SIZES))
        assert jax.typeof(got.data).sharding.spec == P("a", None)
        np.testing.assert_allclose(got.data, want.data, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_lowered_over_an_abstract_mesh(platform: str) -> None:
    """Whoever has only a program's text can't partition it: XLA does."""
    mesh = jax.sharding.AbstractMesh((2,), ("a",), axis_types=(AxisType.Auto,))
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("a"))) for x in (X, W, SIZES)]
    text = jax.jit(ragged.grouped_matmul).trace(*avals).lower(lowering_platforms=(platform,)).as_text()
    assert "CustomSPMDPartitioning" not in text


@pytest.mark.parametrize("kinds", ["manual and auto", "explicit and auto"])
def test_loops_of_different_lengths(kinds: str) -> None:
    """Devices whose loops differ in length don't wait for each other inside of them."""
    types = tuple(KINDS[kind] for kind in (("auto", "auto") if kinds[0] == "m" else ("explicit", "auto")))
    mesh = jax.make_mesh((2, 2), ("b", "c"), axis_types=types)
    sizes = jnp.array([[12, 0, 0, 0], [0, 0, 0, 0]], jnp.int32)
    x, w = X[:24], jax.device_put(W, NamedSharding(mesh, P(None, None, "c")))

    def local(x: Array, w: Array, sizes: Array) -> Array:
        return ragged.grouped_matmul(x, w, sizes[0])

    if kinds[0] == "m":
        specs: Any = {"in_specs": (P("b"), P(), P("b")), "out_specs": P("b"), "axis_names": {"b"}}
        got = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(x, w, sizes)
        want = jnp.concatenate([local(part, W, each[None]) for part, each in zip((x[:12], x[12:]), sizes, strict=True)])
    else:
        with jax.set_mesh(mesh):
            got = jax.jit(local)(jax.device_put(x, P("b")), w, sizes)
        want = local(x, W, sizes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_warning_for_tpus_over_auto_axes() -> None:
    """Nothing is slow in silence."""
    args = [jax.device_put(x, NamedSharding(mesh_of("auto", a=2), P("a"))) for x in (X, W)]
    traced = jax.jit(lambda x, w: ragged.grouped_matmul(x, w, SIZES)).trace(*args)
    with pytest.warns(UserWarning, match="over `Auto` mesh axes, XLA for TPUs .*\nMake the mesh's axes `Explicit`, or"):
        traced.lower(lowering_platforms=("tpu",))


def test_out_sharding_beside_a_shared_matrix() -> None:
    """The groups' rows are multiplied as those of one; the result is where it is asked to be all the same."""
    mesh = mesh_of("explicit", a=2, b=2)
    with jax.set_mesh(mesh):
        w = jax.device_put(W, P("a"))
        for asked in (P("b", None, None), P(None, "a", None), P(None, None, "b")):
            got = jax.jit(lambda w, asked=asked: ragged.matmul(w, DOUT[:24], out_sharding=asked).data)(w)
            assert jax.typeof(got).sharding.spec == asked
            np.testing.assert_allclose(got, ragged.matmul(W, DOUT[:24]).data, rtol=1e-4, atol=1e-4)
