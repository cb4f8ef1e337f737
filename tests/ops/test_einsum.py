"""`ragged.einsum` equals `np.einsum` of each group, for any sizes, however its letters are ordered and merged."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from ragged.tuning import GpuConfig, TpuConfig
from tests import gpu
from tests.cases import split
from tests.contract.draws import size_table, values
from tests.contract.einsums import G, Spec, check, random_spec
from tests.contract.loop import mismatch

SPECS = [
    Spec("tes,sed->td", ("ts", "s", "t")),
    Spec("tes,td->sed", ("ts", "t", "s")),
    Spec("ted,sfd->tefs", ("t", "s", "ts")),
    Spec("tes,ues->tu", ("ts", "us", "tu")),
    Spec("thd,gde->the", ("t", "", "t")),
    Spec("thd,gdhe->the", ("t", "", "t")),
    Spec("gde,thd->teh", ("", "t", "t")),
    Spec("thd,the->gdhe", ("t", "t", "")),
    Spec("td,the->gdeh", ("t", "t", "")),
    Spec("thd,de->the", ("t", "", "t")),
    Spec("ghab,ghbc->ghac", ("", "", "")),
    Spec("st,se->te", ("ts", "s", "t")),
]
MORE_SPECS = [
    Spec("tes,sd->ted", ("ts", "s", "t")),
    Spec("tes,ted->sd", ("ts", "t", "s")),
    Spec("tefs,sed->tfd", ("ts", "s", "t")),
    Spec("sed,tes->dt", ("s", "ts", "t")),
    Spec("tes,sfu->tefu", ("ts", "su", "tu")),
    Spec("tes,tfu->sefu", ("ts", "tu", "su")),
    Spec("set,seu->tu", ("st", "su", "tu")),
    Spec("thes,shed->thd", ("ts", "s", "t")),
    Spec("ghab,hbc->ghac", ("", "", "")),
]


@pytest.mark.parametrize("spec", split(SPECS[5::4], [spec for spec in SPECS if spec not in SPECS[5::4]]), ids=str)
def test_einsum(spec: Spec) -> None:
    """Extents that don't fit, whatever a cut letter is merged with; sizes whose products wrap around."""
    check(spec, 30)


@pytest.mark.long
@pytest.mark.parametrize("spec", [*MORE_SPECS, *map(random_spec, range(28))], ids=str)
def test_more_specs(spec: Spec) -> None:
    check(spec, 60)


@pytest.mark.long
@pytest.mark.parametrize(
    "backend, spec",
    [
        *(("pallas_tpu", SPECS[i]) for i in (0, 5, 10)),
        *(("triton_gpu", SPECS[i]) for i in (1, 7)),
    ],
    ids=str,
)
def test_on_kernels(backend: str, spec: Spec) -> None:
    is_gpu = backend == "triton_gpu"
    with gpu.on(gpu.FIRST_WITH_FP8) if is_gpu else nullcontext():
        check(spec, 3 if is_gpu else 20, (GpuConfig if is_gpu else TpuConfig)(interpret=True))


SPEC = SPECS[5]


@pytest.mark.long
def test_transformed() -> None:
    """Mapped over an operand and over sizes, on top of the batch letter's own axis; the tangent, and cotangents of
    cotangents."""
    rng = np.random.default_rng(0)
    x, y, ct = (values(rng, (2, *SPEC.shape(i)), "float32") for i in range(3))
    d_x, d_y = (values(rng, (2, *SPEC.shape(i)), "float32") for i in range(2))

    def one(x: Array, d_x: Array, y: Array, d_y: Array, ct: Array, sizes: Array) -> Any:
        def multiply(x: Array, y: Array) -> Array:
            return ragged.einsum(SPEC.text, GroupedTensor(x, sizes), y).data

        out, tangent = jax.jvp(multiply, (x, y), (d_x, d_y))
        twice = jax.vjp(lambda x, y, ct: jax.vjp(multiply, x, y)[1](ct), x, y, ct)[1]((d_x, d_y))
        return out, tangent, *twice

    run = jax.jit(jax.vmap(one, (0, 0, None, None, 0, 0)))
    table = size_table(G, 19, 4, rng)
    for first, second in zip(table[::5], table[3::5], strict=False):
        got = run(x, d_x, y[0], d_y[0], ct, np.stack([first, second]))
        for i, sizes in enumerate(({"t": first}, {"t": second})):
            a, da, c = (
                np.nan_to_num(SPEC.with_nan(index, each[i], sizes)) for index, each in ((0, x), (0, d_x), (2, ct))
            )
            tangent = SPEC.product(0, 1, 2, (da, y[0]), sizes).plus(SPEC.product(0, 1, 2, (a, d_y[0]), sizes))
            wants = [
                SPEC.product(0, 1, 2, (a, y[0]), sizes),
                tangent,
                SPEC.product(2, 1, 0, (c, d_y[0]), sizes),
                SPEC.product(0, 2, 1, (da, c), sizes),
                tangent,
            ]
            for found, want in zip(got, wants, strict=True):
                assert not (wrong := mismatch(found[i], want, "float32", 200, 3)), wrong


SIZES = np.array([4, 0, 6], np.int32)


def rows(*shape: int) -> GroupedTensor:
    """12 rows, 2 of them tail."""
    data = np.random.default_rng(len(shape)).standard_normal((12, *shape)).astype(np.float32)
    data[10:] = np.nan
    return GroupedTensor(jnp.asarray(data), jnp.asarray(SIZES))


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng([*shape]).standard_normal(shape).astype(np.float32)


def moves(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """How many transposes a function traces, and how many copies the program makes that XLA compiles for a CPU, of
    more than a few elements."""
    arrays, static = eqx.partition(args, eqx.is_array)
    call = lambda arrays: function(*eqx.combine(arrays, static)).data  # noqa: E731
    found = {"transpose": 0}

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name in found and equation.invars[0].aval.size > 16:
                found[name] += 1
            if name in ("jit", "pjit"):
                visit(equation.params["jaxpr"].jaxpr)

    visit(jax.make_jaxpr(call)(arrays).jaxpr)
    text = str(jax.jit(call).lower(arrays).compile().as_text())
    for what in ("transpose", "copy"):  # each transposition is a bitcast and a copy, or one alone
        shapes = re.findall(rf"= \w+\[([\d,]+)\]\S* {what}\(", text)
        count = sum(np.prod([int(n) for n in shape.split(",")]) > 16 for shape in shapes)
        found["copies"] = max(found.get("copies", 0), int(count))
    return found


@pytest.mark.parametrize(
    "spec, lhs, rhs, flat, transposed",
    [
        # Letters side by side: no more than the same product of operands that were merged before.
        ("t h d, g d e -> t h e", (2, 8), (3, 8, 4), ((24, 8), (3, 8, 4)), 0),
        pytest.param("t d, g d h e -> t h e", (8,), (3, 8, 2, 4), ((12, 8), (3, 8, 8)), 0, marks=pytest.mark.long),
        pytest.param("t h d, g h d e -> t e", (2, 4), (3, 2, 4, 4), ((12, 8), (3, 8, 4)), 0, marks=pytest.mark.long),
        # Each of these forces what it says: weights, whose letters are the other way round; and a batch letter, which
        # is in front of all three terms in a product.
        pytest.param("t h d, g d h e -> t e", (2, 4), (3, 4, 2, 4), ((12, 8), (3, 8, 4)), 1, marks=pytest.mark.long),
        ("t h d, g d h e -> t h e", (2, 8), (3, 8, 2, 4), ((12, 8), (3, 8, 4)), 3),
    ],
)
def test_no_more_is_moved_than_the_order_of_letters_forces(
    spec: str, lhs: tuple[int, ...], rhs: tuple[int, ...], flat: Any, transposed: int
) -> None:
    """As traced, and as XLA compiles it."""
    got = moves(lambda x, w: ragged.einsum(spec, x, w), rows(*lhs), jnp.asarray(floats(*rhs)))
    one = GroupedTensor(jnp.asarray(floats(*flat[0])), jnp.asarray(SIZES) * (flat[0][0] // 12))
    merged = moves(ragged.matmul, one, jnp.asarray(floats(*flat[1])))
    assert got["transpose"] == merged["transpose"] + transposed
    assert got["copies"] <= merged["copies"] + transposed


@pytest.mark.parametrize("e, moved", [(8, (12, 2, 4)), (2, (3, 4, 2, 2))])
def test_the_smaller_operand_is_transposed(e: int, moved: tuple[int, ...]) -> None:
    """Where the two hold the contracted letters in different orders."""
    x, w = rows(2, 4), floats(3, 4, 2, e)
    traced: Any = jax.make_jaxpr(lambda w: ragged.einsum("t h d, g d h e -> t e", x, w).data)(w)
    shapes = [each.invars[0].aval.shape for each in traced.jaxpr.eqns if each.primitive.name == "transpose"]
    assert shapes == [moved]


def test_one_product() -> None:
    """Of letters merged to `m`, `k`, `n`, and for all batch letters at once: `explain` says which, of what sizes."""
    uniform = GroupedTensor(floats(3, 2, 5, 4))
    for spec, lhs, rhs, letters, m in (
        ("t h d, g d e -> t h e", rows(2, 5), floats(3, 5, 4), "m = t h, k = d, n = e; lhs is `lhs`", 2),
        ("t h d, d e -> t h e", rows(2, 5), floats(5, 4), "m = t h, k = d, n = e; lhs is `lhs`", 2),
        ("t d, g d h e -> t h e", rows(5), floats(3, 5, 2, 4), "m = t, k = d, n = h e; lhs is `lhs`", 1),
        ("t h d, g h d e -> t e", rows(2, 5), floats(3, 2, 5, 4), "m = t, k = h d, n = e; lhs is `lhs`", 1),
        ("thd,gdhe->the", rows(2, 5), floats(3, 5, 2, 4), "m = t, k = d, n = e; mapped: h; lhs is `lhs`", 1),
        ("g e d, t h d -> t e h", floats(3, 4, 5), rows(2, 5), "m = t h, k = d, n = e; lhs is `rhs`", 2),
        ("g h m k, g h k n -> g h m n", uniform, floats(3, 2, 4, 6), None, 0),
        ("t h d, t h e -> g d e", rows(2, 5), rows(2, 4), None, 0),
    ):
        traced: Any = jax.make_jaxpr(lambda lhs, rhs, spec=spec: ragged.einsum(spec, lhs, rhs).data)(lhs, rhs)
        assert str(traced).count("ragged_matmul[") == 1, spec
        told = ragged.explain(lhs, rhs, spec=spec, platform="cpu")
        if letters:
            assert told.letters == letters and f"letters: {letters}\n" in str(told)
            assert told.sizes == {"m": (4 * m, 0, 6 * m)}
    told = ragged.explain(rows(2, 5), floats(3, 5, 2, 4), spec=SPEC.text, platform="cpu")
    assert (told.layout, told.result, told.plan().flops) == ("forward", "f32[12,2,4]", 2 * 2 * 10 * 5 * 4)
    unknown = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows(2, 5))
    assert ragged.explain(unknown, floats(3, 5, 2, 4), spec=SPEC.text, platform="cpu").sizes is None
    # Of `matmul`, only operands of more dims have letters to tell.
    of_matmul = "m = m0 m1, k = k, n = n0 n1; lhs is `lhs`"
    assert ragged.explain(rows(2, 5), floats(3, 5, 2, 4), platform="cpu").letters == of_matmul
    assert ragged.explain(rows(5), floats(3, 5, 4), platform="cpu").letters == ""


def by_group(x: Any, w: Any) -> np.ndarray:
    """`SPEC` of NumPy arrays, zero in the tail."""
    out, ends = np.zeros((12, 2, 4)), np.cumsum(SIZES)
    for start, end, each in zip(ends - SIZES, ends, np.asarray(w, np.float64), strict=True):
        out[start:end] = np.einsum("thd,dhe->the", np.asarray(x)[start:end].astype(np.float64), each)
    return out


def test_existing_out_of_other_groups() -> None:
    """Also if their sizes are traced."""
    x, w = rows(2, 5), jnp.asarray(floats(3, 5, 2, 4))

    def run(sizes: Array) -> Any:
        return ragged.einsum(SPEC.text, x, w, existing_out=GroupedTensor(jnp.zeros((12, 2, 4)), sizes))

    for sizes in (jnp.array([5, 5], jnp.int32), jnp.array([4, 3, 3, 0], jnp.int32)):
        with pytest.raises(ValueError, match="groups of other sizes"):
            jax.jit(run)(sizes)


def test_options() -> None:
    """Those of `matmul`; extents of ragged letters count without what they are merged with."""
    x, w, spec = rows(2, 5), jnp.asarray(floats(3, 5, 2, 4)), SPEC.text
    want, existing = by_group(x.data, w), jnp.asarray(floats(12, 2, 4))
    mask = (np.arange(12) < 10)[:, None, None]

    @jax.jit
    def run(x: GroupedTensor, w: Array) -> list[Array]:
        return [
            ragged.einsum(spec, x, w, preferred_element_type=jnp.bfloat16, precision="highest", backend="xla").data,
            ragged.einsum(spec, x, w, existing_out=GroupedTensor(existing, x.first_dims)).data,
            ragged.einsum(spec, x, w, existing_out=existing).data,
            ragged.einsum(spec, x, w[1:], group_offset=1, activation="relu").data,
        ]

    narrow, added, plain, offset = run(x, w)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), want, atol=0.05)
    for out in (added, plain):
        np.testing.assert_allclose(out, want + np.where(mask, existing, 0), atol=1e-5)
    np.testing.assert_allclose(offset, np.where(np.arange(12)[:, None, None] >= 4, np.maximum(want, 0), 0), atol=1e-5)

    def shapes(x: GroupedTensor, keys: GroupedTensor) -> Any:
        scores = ragged.einsum("t h d, s h d -> t h s", x, keys, max_last=3)
        shared = ragged.einsum("t h d, s d -> t h s", x, keys.with_data(keys.data[:, 0]), max_last=3)
        return scores, shared, ragged.einsum("t h s, t h d -> s d", scores, x, capacity=8)

    keys = GroupedTensor(jnp.ones((8, 2, 5)), jnp.array([3, 2, 3], jnp.int32))
    assert [each.shape for each in jax.eval_shape(shapes, x, keys)] == [(12, 2, 3), (12, 2, 3), (8, 5)]


@pytest.mark.long
@pytest.mark.parametrize(
    "scaling",
    [("group", "group"), ("row", "column"), ("tensor", "tensor"), ((1, 5), (None, 1)), ("row", "zeros")],
    ids=str,
)
def test_quantised(scaling: Any) -> None:
    """As of the values that the operands stand for; of batch letters that are more groups, each has a scale."""
    x = ragged.quantize(rows(2, 5), jnp.float8_e4m3fn, scaling[0])
    for spec, shape in (("t h d, g d e h -> t h e", (3, 5, 4, 2)), ("t h d, g d e -> t h e", (3, 5, 4))):
        by = "row" if len(shape) == 4 and scaling[0] == "row" else scaling[1]
        if scaling[1] == "zeros":
            w = ragged.quantize(1 + floats(*shape), "uint8", "row", symmetric=False)
        else:
            w = ragged.quantize(floats(*shape), jnp.float8_e4m3fn, by)
        got = ragged.einsum(spec, x, w, preferred_element_type=jnp.float32).data
        stands_for = np.asarray(w.dequantize().data)
        heads = np.swapaxes(stands_for, -1, -2) if len(shape) == 4 else np.repeat(stands_for[:, :, None], 2, axis=2)
        np.testing.assert_allclose(got, by_group(x.dequantize().data, heads), rtol=1e-4, atol=1e-4)
    if scaling[0] == "group":
        lhs, rhs = (ragged.quantize(floats(3, 2, *shape), jnp.float8_e4m3fn, "group") for shape in ((5, 4), (4, 6)))
        got = ragged.einsum("g h m k, g h k n -> g h m n", lhs, rhs, preferred_element_type=jnp.float32)
        want = np.einsum("ghmk,ghkn->ghmn", lhs.dequantize().data, rhs.dequantize().data)
        np.testing.assert_allclose(got.data, want, rtol=1e-4, atol=1e-4)


def test_explicit_axes() -> None:
    """A letter that is mapped may be sharded. (One that is merged into another may not: see the page of errors.)"""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    x, w = rows(2, 5), floats(3, 5, 2, 4)
    with jax.set_mesh(mesh):
        data = jax.device_put(x.data, jax.NamedSharding(mesh, jax.P(None, "x")))
        sharded = jax.device_put(w, jax.NamedSharding(mesh, jax.P(None, None, "x")))
        out = jax.jit(lambda data, w: ragged.einsum(SPEC.text, x.with_data(data), w).data)(data, sharded)
        assert jax.typeof(out).sharding.spec == jax.P(None, "x", None)
    np.testing.assert_allclose(out, by_group(x.data, w), atol=1e-5)
