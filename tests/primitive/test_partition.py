"""Products of sharded operands have the numbers of one device, whatever splits them, and the documented collectives.

The reference is the loop of `tests/contract`. Each case is a program over a mesh, which `Program.context` describes.
"""

import itertools
from collections.abc import Iterator
from functools import partial
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
from tests.cases import INT8_ROWS
from tests.contract import loop
from tests.contract.draws import LEAST, MOST, draws
from tests.contract.meshes import KINDS, collectives, mesh_of, table
from tests.contract.programs import Program

FP8 = "float8_e4m3fn"


def over(layout: str, context: str, dtype: str = "float32", **options: Any) -> Program:
    """A product of extents that two, three and four devices divide, unless `options` has others."""
    extents = {"m": 8, "k": 12, "n": 24, "groups": 4, "width": 24, "capacity": 60}
    return Program(layout, dtype, context=context, **{**extents, **options})


def by_default() -> Iterator[Program]:
    yield over("forward", "auto 2x2x2 m=a k=c n=b", "bfloat16", existing=True)
    # Three devices have four columns each: half a block of scales.
    casts: dict[str, Any] = {"lhs_cast": (FP8, (1, 8)), "rhs_cast": ("uint8", (8, 1), "zeros"), "out_dtype": "float32"}
    yield over("forward", "explicit 3x2 k=a n=b", **casts, n=8, groups=3)
    # Each device has part of a sum, or no sum is made yet.
    yield over("forward", "explicit 2x2 m=b k=a -> m=ba", "bfloat16")
    yield over("forward", "auto 2x2 b=a m=b", mapped="lhs sizes")


SEVERAL = [  # layout, what splits it, collectives of the product
    ("forward", "2x2x2 m=a k=c n=b", "all-reduce"),
    ("forward", "2x2x2 m=ab n=c", ""),
    ("forward", "2x2x2 m=a g=b n=c", "all-reduce"),
    ("forward", "2x2x2 g=ab k=c", "all-reduce"),
    ("forward_left", "2x2x2 m=a k=b n=c", "all-reduce"),
    ("wgrad", "2x2x2 m=b k=ac", "all-reduce"),
    ("batched", "2x2x2 g=a m=b k=c", "all-reduce"),
    ("outer", "2x2x2 m=a k=b", "all-reduce"),
    ("inner_rows", "2x2x2 m=ab n=c", ""),
    ("inner_columns", "2x2x2 m=a k=b", "all-reduce"),
    ("ragged", "2x2x2 m=a n=b", ""),
    # Both operands want "a": weights stay, rows are gathered, and each device has the sum of its rows.
    ("forward", "2x2x2 m=a g=a", "all-gather, reduce-scatter"),
    ("forward", "2x2x2 m=a g=a n=b", "all-gather, reduce-scatter"),
]
OUT = [  # what splits the operands and what is asked of the result; collectives
    ("k=a -> m=a", "reduce-scatter"),
    ("k=a -> n=a", "reduce-scatter"),
    ("m=b k=a -> m=ba", "reduce-scatter"),
    ("k=a -> unreduced=a", "all-reduce"),  # by the test, later
    ("g=a -> m=a", "reduce-scatter"),
    ("m=a -> m=a n=b", ""),
    ("m=a -> m=b", "collective-permute"),
    ("m=a -> m=", "all-gather"),
]


def long() -> Iterator[Program]:
    kinds = itertools.cycle(KINDS)
    for i, (layout, context, _) in enumerate(SEVERAL[::2]):
        if i % 3:
            yield over(layout, f"{next(kinds)} {context}", "bfloat16", existing=i % 3 == 1)
        else:
            yield over(layout, f"{next(kinds)} {context}", order=2, packed_last="lhs")
    for i, (context, _) in enumerate(OUT[::2]):
        yield over("forward", f"explicit 2x2 {context}", "float32" if "unreduced" in context or i % 2 else "bfloat16")
    yield over("forward", f"{next(kinds)} 2x2 m=a k=b", "bfloat16", existing=True)
    yield over("ragged", "auto 2x2 m=b k=a")
    yield over("forward", f"{next(kinds)} 2 g=a", groups=5, held=2)
    yield over("forward_left", f"{next(kinds)} 2x2 g=a k=b", groups=6, held=4, existing=True)
    yield over("wgrad", f"{next(kinds)} 2x2 g=a m=b", groups=6, held=4, existing=True)
    yield over("forward", f"{next(kinds)} 2x2 m=a n=b", shared="rhs")
    yield over("batched", f"{next(kinds)} 2x2 g=a n=b", shared="rhs")
    yield over("forward", f"{next(kinds)} 4 k=a", "int8", out_dtype="float32", k=4000, groups=2)
    for context, mapped in (("b=a k=b", "lhs sizes"), ("m=a n=b", "lhs"), ("b=a n=b", "lhs rhs sizes")):
        yield over("forward", f"{next(kinds)} 3x2 {context}", "bfloat16", mapped=mapped)
    pairs = ((1, 8), (8, 1)), ("group", (16, 1)), ("row", "column"), ("mx", "mx"), (None, (8, 8))
    for i, (lhs, rhs) in enumerate(pairs):
        casts: dict[str, Any] = {"lhs_cast": lhs and (FP8, lhs), "rhs_cast": (FP8, rhs), "out_dtype": "float32"}
        yield over("forward", f"{next(kinds)} 2x2 m=a k=b", k=48, **casts)
        if i % 2 == 0:
            yield over("wgrad", f"{next(kinds)} 2x2 k=a n=b", **casts)
    # Blocks of rows begin with each group.
    yield over("inner_columns", "explicit 2x2 m=a k=b", lhs_cast=(FP8, (1, 8)), rhs_cast=(FP8, (4, 1)))
    # Rows that devices don't divide: they stay whole, or are padded together with their scales.
    yield over("forward", "auto 8 m=a")
    yield over(
        "forward", "sharded_matmul 4x2 m=a n=b", capacity=61, lhs_cast=("int8", "row", "zeros"), out_dtype="float32"
    )
    # The matrices are those from an offset on, of which each device has some. No offset leaves int32.
    yield over("forward", "explicit 2x2 m=a g=b", groups=6, held=4, existing=True)
    for layout, context in (("wgrad", "8 k=a"), ("forward", "8 n=a"), ("wgrad", "3x2 m=b g=a"), ("forward", "8 k=a")):
        yield over(layout, f"auto {context}")
    for layout, letters in (("batched", "m=a n=b"), ("outer", "m=a k=b"), ("inner_rows", "m=a n=b"), ("wgrad", "k=a")):
        yield over(layout, f"sharded_matmul 2x2 {letters}", capacity=61 if layout == "wgrad" else 60)
    yield over("inner_rows", "sharded_matmul 2x2 m=a n=b", swapped=True)
    yield over("forward", "sharded_matmul 4x2 m=a n=b", capacity=3)


def _check(program: Program) -> None:
    """On some draws, and on sizes far beyond all shards."""
    program.check(draws(program, 12))
    if program.ragged and not program.mapped:
        sizes = np.resize(np.array([5, LEAST, 30, MOST, LEAST + 1, 2], np.int32), program.groups)
        program.check(
            draws(program, 2, sizes_of=lambda n: {z: np.roll(sizes, "mkn".index(z) + n) for z in program.ragged})
        )


@pytest.mark.parametrize("program", [*by_default()], ids=str)
def test_products_over_meshes(program: Program) -> None:
    _check(program)


@pytest.mark.long
@pytest.mark.parametrize("program", [*long()], ids=str)
def test_more_products_over_meshes(program: Program) -> None:
    _check(program)


def with_collectives() -> Iterator[Any]:
    """Programs; and the collectives of the product, or of it and of its two derivatives."""
    extents: dict[str, Any] = {"m": 16, "k": 32, "n": 48, "capacity": 64, "width": 48}
    for number, kind in enumerate(KINDS):
        for i, ((layout, letter), expected) in enumerate(table().items()):
            if (i + number) % 2:
                yield over(layout, f"{kind} 4 {letter}=a", **extents), expected
        for layout, context, expected in SEVERAL[number::2]:
            yield over(layout, f"{kind} {context}", **extents), [expected]
    for context, expected in OUT:
        yield over("forward", f"explicit 2x2 {context}", k=16, capacity=32), [expected]
    yield over("forward", "sharded_matmul 2x2 k=a"), ["all-reduce"]


@pytest.mark.parametrize(
    "program, expected",
    [
        pytest.param(*case, id=str(case[0]), marks=pytest.mark.long if i != 3 else ())
        for i, case in enumerate(with_collectives())
    ],
)
def test_collectives(program: Program, expected: list[str]) -> None:
    """Each letter that can be split, as the page `docs/sharding.md` says, and several of them. The numbers are right
    in these programs too, which compute nothing else."""
    for name, found in zip(("out", "lhs", "rhs"), expected, strict=False):
        assert program.over is not None
        run, some = program.over.compute(program, (name,)), list(draws(program, 3))
        assert collectives(run.lower(*program.over.put(program, some[0])).compile()) == found, name
        for draw in some:
            want, dtype, roundings = program.wanted(draw, {})[name]
            got = run(*program.over.put(program, draw))[name]
            assert not loop.mismatch(got, want, dtype, 4 * 64, roundings), name


SIZES = jnp.array([5, 0, 11, 9], jnp.int32)  # of 32 rows


def arrays(*shapes: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe, kind",
    [
        ("blockwise", "auto"),
        *((each, "explicit") for each in ("tensorwise", "mxfp8", INT8_ROWS)),
    ],
)
def test_recipes(recipe: Any, kind: str) -> None:
    """Values and gradients are those of one device, also where a cut makes blocks of scales smaller."""

    def step(x: Array, w: Array, dout: Array) -> Any:
        out, pull = jax.vjp(lambda x, w: ragged.matmul(GroupedTensor(x, SIZES), w, recipe=recipe).data, x, w)
        return out, *pull(dout)

    args, mesh, specs = (
        arrays((32, 192), (4, 192, 64), (32, 64)),
        mesh_of(kind, a=2, b=2),
        (P("a", "b"), P(None, "b"), P("a")),
    )
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
    got, want = jax.jit(step)(*sharded), jax.jit(step)(*args)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5 * np.abs(w).max())
    if kind == "explicit":
        for g, x in zip(got[1:], sharded, strict=False):
            assert g.sharding.is_equivalent_to(x.sharding, g.ndim)


# --- where else products are called -----------------------------------------------------------------------------------


def test_an_axis_that_xla_splits() -> None:
    """Rows over four devices, then seen as two times two."""
    x, w = arrays((32, 16), (4, 16, 24))

    def product(x: Array) -> Array:
        return jax.vmap(lambda x: ragged.grouped_matmul(x, w, SIZES // 2))(x.reshape(2, 16, 16))

    got = jax.jit(product)(jax.device_put(x, NamedSharding(mesh_of("auto", a=4), P("a"))))
    ids = np.repeat(np.arange(4), np.asarray(SIZES) // 2)
    for i in range(2):
        rows = np.asarray(x, np.float64)[16 * i : 16 * i + len(ids)]
        want = np.einsum("mk,mkn->mn", rows, np.asarray(w, np.float64)[ids])
        np.testing.assert_allclose(got[i][: len(ids)], want, rtol=1e-5, atol=1e-5)
        assert not np.asarray(got[i][len(ids) :]).any()


def test_eager_over_an_explicit_axis() -> None:
    """Without `jit` and without a mesh in context, beside operands that are nowhere in particular."""
    data, w = arrays((32, 4), (4, 4, 6))
    x = GroupedTensor(jax.device_put(data, NamedSharding(mesh_of("explicit", a=2), P("a"))), SIZES)
    y = ragged.matmul(x, w)
    assert jax.typeof(y.data).sharding.spec == P("a", None)
    ids = np.repeat(np.arange(4), SIZES)
    want = np.einsum("mk,mkn->mn", np.asarray(data)[: len(ids)], np.asarray(w)[ids])
    np.testing.assert_allclose(y.data, np.pad(want, ((0, 32 - len(ids)), (0, 0))), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_lowered_over_an_abstract_mesh(platform: str) -> None:
    """Whoever has only a program's text can't partition it: XLA does."""
    mesh = jax.sharding.AbstractMesh((2,), ("a",), axis_types=(AxisType.Auto,))
    shapes = [((32, 16), jnp.float32), ((4, 16, 24), jnp.float32), ((4,), jnp.int32)]
    avals = [jax.ShapeDtypeStruct(*each, sharding=NamedSharding(mesh, P("a"))) for each in shapes]
    text = jax.jit(ragged.grouped_matmul).trace(*avals).lower(lowering_platforms=(platform,)).as_text()
    assert "CustomSPMDPartitioning" not in text


def test_a_warning_for_tpus_over_auto_axes() -> None:
    """Nothing is slow in silence."""
    sharding = NamedSharding(mesh_of("auto", a=2), P("a"))
    args = [jax.device_put(x, sharding) for x in arrays((32, 16), (4, 16, 24))]
    traced = jax.jit(lambda x, w: ragged.grouped_matmul(x, w, SIZES)).trace(*args)
    with pytest.warns(UserWarning, match="over `Auto` mesh axes, XLA for TPUs .*\nMake the mesh's axes `Explicit`, or"):
        traced.lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("kind", ["manual and auto", pytest.param("explicit and auto", marks=pytest.mark.long)])
def test_loops_of_different_lengths(kind: str) -> None:
    """Devices whose loops differ in length don't wait for each other inside of them: matrices are gathered before."""
    first = AxisType.Explicit if kind[0] == "e" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("b", "c"), axis_types=(first, AxisType.Auto))
    sizes = jnp.array([[12, 0, 0, 0], [0, 0, 0, 0]], jnp.int32)
    x, w = arrays((24, 16), (4, 16, 24))

    def local(x: Array, w: Array, sizes: Array) -> Array:
        return ragged.grouped_matmul(x, w, sizes[0], backend=ragged.tuning.XlaConfig(m=(8,)))

    specs: Any = {"in_specs": (P("b"), P(), P("b")), "out_specs": P("b"), "axis_names": {"b"}}
    run = jax.shard_map(local, mesh=mesh, **specs) if kind[0] == "m" else local
    rows, matrices = (jax.device_put(z, NamedSharding(mesh, spec)) for z, spec in ((x, P("b")), (w, P(None, "c"))))
    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(rows, matrices, sizes).compile()
        got = program(rows, matrices, sizes)
    assert collectives(program) == "all-gather"
    want = np.asarray(x[:12], np.float64) @ np.asarray(w[0], np.float64)
    np.testing.assert_allclose(got, np.pad(want, ((0, 12), (0, 0))), rtol=1e-5, atol=1e-5)


def test_the_callback_sees_each_part() -> None:
    """`sharded_matmul` calls it with the groups of a part of the result; it may change the dtype, and has gradients."""
    seen: list[Any] = []

    def callback(part: GroupedTensor) -> GroupedTensor:
        seen.append((part.shape, part.kind))
        return (part * ragged.per_group(jnp.arange(1.0, 5.0))).map(jnp.tanh).astype(jnp.bfloat16)

    def step(x: Array, w: Array, dout: Array) -> Any:
        mesh = mesh_of("auto", a=4)
        product = partial(ragged.sharded_matmul, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
        out, pull = jax.vjp(lambda x, w: product(GroupedTensor(x, SIZES), w, out_shard_callback=callback).data, x, w)
        return out, *pull(dout.astype(out.dtype))

    x, w, dout = arrays((32, 16), (4, 16, 24), (32, 24))
    out, dx, dw = jax.jit(step)(x, w, dout)
    assert seen == [((8, 24), "ragged rows")] and out.dtype == jnp.bfloat16
    ids = np.repeat(np.arange(4), SIZES)
    rows, matrices = np.asarray(x, np.float64)[: len(ids)], np.asarray(w, np.float64)[ids]
    want = np.tanh((1 + ids)[:, None] * np.einsum("mk,mkn->mn", rows, matrices))
    by_pre = np.asarray(dout.astype(jnp.bfloat16), np.float64)[: len(ids)] * (1 - want**2) * (1 + ids)[:, None]
    by_row = np.einsum("mk,mn->mkn", rows, by_pre)
    sums = np.stack([by_row[ids == group].sum(0) for group in range(4)])
    pairs = (out[: len(ids)], want), (dx[: len(ids)], np.einsum("mn,mkn->mk", by_pre, matrices)), (dw, sums)
    for (got, expected), tolerance in zip(pairs, (2**-8, 2**-6, 2**-6), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)
    for each in (out, dx):
        assert not np.asarray(each[len(ids) :]).any()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_rows_that_devices_do_not_divide(kind: str) -> None:
    """`sharded_matmul` over the mesh in context, outside of `jit`, and its gradients. JAX can't split 15 rows over
    `Explicit` axes: there, all devices have them."""
    sizes, (x, w) = np.array([3, 5, 0, 6], np.int32), arrays((15, 16), (4, 16, 24))

    def product(x: Array, w: Array) -> Array:
        tensor, in_specs = GroupedTensor(x, jnp.asarray(sizes)), (P(("a", "b")), P(None, None, "c"))
        return ragged.sharded_matmul(tensor, w, in_specs=in_specs, out_specs=P(("a", "b"), "c")).data

    with jax.set_mesh(mesh_of(kind, a=2, b=2, c=2)):
        got = product(x, w), *jax.grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), (0, 1))(x, w)
    if kind == "explicit":
        assert jax.typeof(got[0]).sharding.spec == P(None, "c")
    ids = np.repeat(np.arange(4), sizes)
    rows, matrices = np.asarray(x, np.float64)[: len(ids)], np.asarray(w, np.float64)
    out = np.einsum("mk,mkn->mn", rows, matrices[ids])
    dw = np.zeros(w.shape)
    np.add.at(dw, ids, np.einsum("mk,mn->mkn", rows, np.cos(out)))
    for each, want in zip(got, (out, np.einsum("mn,mkn->mk", np.cos(out), matrices[ids]), dw), strict=True):
        want = want if want.ndim > 2 else np.pad(want, ((0, 1), (0, 0)))
        np.testing.assert_allclose(each, want, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "of_x, of_w", [("b..", "..b."), (".b.", "...."), ("...", ".c.."), (".b.", ".c.b"), ("..b", "bc.."), (".b.", "b...")]
)
def test_batch_letters_that_are_split_differently(of_x: str, of_w: str) -> None:
    """Over `Explicit` axes, an einsum of operands with a batch letter `h`, and its gradients; also of scales by group,
    which all elements of the batch share."""
    sizes, (x, w) = jnp.array([3, 5, 0, 8], jnp.int32), arrays((24, 2, 8), (4, 2, 8, 16))

    def run(x: Array, w: Array) -> Any:
        rows = GroupedTensor(x, sizes)
        product = lambda x, w: ragged.einsum("t h d, g h d e -> t h e", rows.with_data(x), w).data  # noqa: E731
        few_bits = product(x, ragged.quantize(w, "int8", "group"))
        return product(x, w), few_bits, *jax.grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), (0, 1))(x, w)

    want = run(x, w)
    with jax.set_mesh(mesh_of("explicit", b=2, c=2)):
        placed = [jax.device_put(z, P(*(None if c == "." else c for c in of))) for z, of in ((x, of_x), (w, of_w))]
        got = jax.jit(run)(*placed)
    for each, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_the_result_is_where_it_is_asked_to_be() -> None:
    """`sharded_matmul` puts it there, also where neither the operands nor the sum put it."""
    mesh, (x, w) = mesh_of("auto", a=2, b=2), arrays((32, 16), (4, 16, 24))
    for out_specs, expected in ((P("b"), ""), (P(None, "a"), "reduce-scatter"), (P(), "all-reduce")):
        options: Any = {"mesh": mesh, "in_specs": (P(None, "a"), P(None, "a")), "out_specs": out_specs}
        product = jax.jit(
            lambda x, w, options=options: ragged.sharded_matmul(GroupedTensor(x, SIZES), w, **options).data
        )
        assert product(x, w).sharding.is_equivalent_to(NamedSharding(mesh, out_specs), 2)
        assert expected in collectives(product.lower(x, w).compile())
        with jax.set_mesh(mesh):  # by default, the mesh in context
            of_context = jax.jit(
                lambda x, w, o=options: ragged.sharded_matmul(GroupedTensor(x, SIZES), w, **o | {"mesh": None}).data
            )
            assert of_context(x, w).sharding.is_equivalent_to(NamedSharding(mesh, out_specs), 2)


def test_out_sharding_beside_a_shared_matrix() -> None:
    """The groups' rows are multiplied as those of one; the result is where it is asked to be all the same."""
    data, shared = arrays((4, 16, 24), (24, 24))
    with jax.set_mesh(mesh_of("explicit", a=2, b=2)):
        w = jax.device_put(data, P("a"))
        asked = P("b", None, None), P(None, "a", None), P(None, None, "b")
        run = jax.jit(lambda w: [ragged.matmul(w, shared, out_sharding=each).data for each in asked])
        for got, spec in zip(run(w), asked, strict=True):
            assert jax.typeof(got).sharding.spec == spec
            np.testing.assert_allclose(got, np.asarray(data) @ np.asarray(shared), rtol=1e-4, atol=1e-4)
