"""What transformations of `ragged.matmul` do beyond values, which `tests/contract` has."""

import itertools
import subprocess
import sys
from collections import Counter
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, export

import ragged
from ragged import GroupedTensor
from ragged.nn import Experts, MoE, Router
from tests import oracle
from tests.cases import LETTERS, small


def test_calls_outside_of_jit() -> None:
    """The second one runs few Python functions. Its sizes are still compared, and the result has the operand's."""
    case = small("forward", dtype="float32")
    y, calls = case.lhs @ case.rhs, Counter[str]()
    sys.setprofile(lambda _frame, event, _arg: calls.update([event]))
    again = case.lhs @ case.rhs
    sys.setprofile(None)
    assert calls["call"] < 400  # 2,100 if they check everything
    assert y.first_dims is again.first_dims is case.lhs.first_dims
    np.testing.assert_array_equal(again.data, y.data)

    first, sizes = case.lhs.mT @ y, jnp.asarray(y.first_dims)
    for other in (GroupedTensor(y.data, sizes[::-1]), GroupedTensor(y.data, sizes[1:])):
        with pytest.raises(ValueError, match=r"different sizes: lhs.last_dims=\[|groups"):
            _ = case.lhs.mT @ other
    ragged.matmul(case.lhs.mT, y, num_actual_groups=y.num_groups)
    with pytest.raises(ValueError, match="num_actual_groups"):
        ragged.matmul(case.lhs.mT, y, num_actual_groups=cast("int", float(y.num_groups)))
    same = case.lhs.mT @ GroupedTensor(y.data, sizes + 0)
    np.testing.assert_array_equal(same.data, first.data)


def test_a_traced_call_is_one_primitive() -> None:
    """Also of constants."""
    case = small("forward", dtype="float32")
    programs = [
        jax.make_jaxpr(lambda: (case.lhs @ case.rhs).data)(),
        jax.make_jaxpr(lambda x: (x @ case.rhs).data)(case.lhs),
        jax.make_jaxpr(jax.vmap(lambda x: (GroupedTensor(x, case.lhs.first_dims) @ case.rhs).data))(
            case.lhs.data[None]
        ),
    ]
    for program in programs:
        assert [equation.primitive.name for equation in program.jaxpr.eqns] == ["ragged_matmul"]


def test_a_map_over_nothing() -> None:
    case = small("forward", dtype="float32")
    none = jnp.zeros((0, 3), jnp.int32)
    assert jax.vmap(lambda s: ragged.matmul(GroupedTensor(case.lhs.data, s), case.rhs).data)(none).shape == (0, 12, 2)
    outer = small("outer", dtype="float32")
    mapped = jax.vmap(lambda s: ragged.matmul(GroupedTensor(outer.lhs.data, s), outer.rhs).data)(none)
    assert mapped.shape == (0, 12, 12)


def of_nothing() -> dict[str, tuple[Any, list[str]]]:
    """Functions of plain arrays, of sizes first, whose shapes are these letters."""

    def gated(columns: Any) -> Any:
        return lambda s, x, w, b: ragged.gated_matmul(GroupedTensor(x, s), w, columns=columns, bias=b).data

    def more_dims(s: Array, x: Array, w: Array, bias: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, s), w, bias=bias, activation="gelu").data

    def routed(s: Array, x: Array) -> Array:
        return MoE(Router(4, 4, 2, groups=(2, 1), key=jax.random.key(0)), Experts(4, 2, 4, key=jax.random.key(1)))(x)[0]

    shapes = ["mk", "gkh", "gh"]
    found = {"halves": (gated("halves"), shapes), "interleaved": (gated("interleaved"), shapes)}
    return found | {"more dims": (more_dims, ["mk", "gkhn", "ghn"]), "routed": (routed, ["m4"])}


@pytest.mark.parametrize("name", of_nothing())
def test_extents_of_zero(name: str) -> None:
    """Values and gradients where a letter's extent is 0, as the rows of a device without tokens, or two are."""
    function, shapes = of_nothing()[name]

    def run(sizes: Array, *args: Array) -> Any:
        out, pull = jax.vjp(partial(function, sizes), *args)
        return out, pull(out)

    letters = sorted({*"".join(shapes)} - {"4"})
    for empty in (*letters, *map("".join, itertools.combinations(letters, 2))):
        extents = {"g": 3, "m": 6, "k": 4, "h": 2, "n": 5, "4": 4} | dict.fromkeys(empty, 0)
        args = [jnp.ones([extents[z] for z in shape]) for shape in shapes]
        out, gradients = jax.jit(run)(jnp.full(extents["g"], 2, jnp.int32), *args)
        assert [each.shape for each in gradients] == [x.shape for x in args]
        assert all(bool(jnp.all(jnp.isfinite(each))) for each in (out, *gradients))


def check_symbolic(layout: str) -> None:
    """Programs with one letter symbolic, and with all, of products and their gradients, against NumPy.

    A letter may have two extents: of a buffer that packs it, and of one that aligns it to the left. None is bounded.
    """
    case, terms = small(layout, "float32"), ("mk", "kn")
    buffers = [jnp.asarray(x.data) for x in (case.lhs, case.rhs)]
    given = [{name: getattr(x, name) for name in ("first_dims", "last_dims")} for x in (case.lhs, case.rhs)]

    def product(lhs: Array, rhs: Array, dims: Any) -> Array:
        return ragged.matmul(GroupedTensor(lhs, **dims[0]), GroupedTensor(rhs, **dims[1])).data

    def gradients(lhs: Array, rhs: Array, dims: Any) -> tuple[Array, Array]:
        return jax.grad(lambda lhs, rhs: jnp.sum(jnp.sin(product(lhs, rhs, dims))), (0, 1))(lhs, rhs)

    out = oracle.matmul(case.lhs_groups, case.rhs_groups)
    wants = [
        [np.cos(y) @ np.asarray(b, np.float64).T for y, b in zip(out, case.rhs_groups, strict=True)],
        [np.asarray(a, np.float64).T @ np.cos(y) for y, a in zip(out, case.lhs_groups, strict=True)],
    ]
    for letters in (*"gmkn", "gmkn"):
        scope = export.SymbolicScope()

        def extent(name: str, n: int, letters: str = letters, scope: Any = scope) -> Any:
            return export.symbolic_shape(name, scope=scope)[0] if name[0] in letters else n

        avals = []
        for x, term in zip((case.lhs, case.rhs), terms, strict=True):
            names = ["g"] * (x.ndim - 2) + [
                z if x.packed_axis == axis or z not in LETTERS[layout] else f"{z}_widest"
                for axis, z in zip((-2, -1), term, strict=True)
            ]
            shape = tuple(map(extent, names, x.shape))
            avals.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        sizes = jax.ShapeDtypeStruct((extent("g", 3),), jnp.int32)
        types = *avals, jax.tree.map(lambda _, sizes=sizes: sizes, given)
        got = export.export(jax.jit(product))(*types).call(*buffers, given)
        oracle.assert_close(case.unpack(np.asarray(got)), out, 1e-5)
        got = export.export(jax.jit(gradients))(*types).call(*buffers, given)
        for each, x, want, term in zip(got, buffers, wants, terms, strict=True):
            packed = oracle.pack(want, (term[0] in LETTERS[layout], term[1] in LETTERS[layout]), x.shape, 0.0)
            np.testing.assert_allclose(each, packed, rtol=1e-4, atol=1e-4)


def check_symbolic_maps() -> None:
    """How many elements a map has, how many groups a wgrad of plain arrays has, and how many of them it holds."""
    w, sizes, x, f32 = jnp.ones((3, 4, 2)), jnp.array([7, 0, 8], jnp.int32), jnp.ones((2, 16, 4)), jnp.float32

    def mapped(x: Array, w: Array) -> Any:
        def loss(x: Array, w: Array) -> Any:
            out = jax.vmap(lambda x: ragged.matmul(GroupedTensor(x, sizes), w).data)(x)
            return out.sum(), out

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)

    def wgrads(x: Array, sizes: Array, like: Array) -> Any:
        every = ragged.transposed_grouped_matmul(x.T, x, sizes)
        return every, ragged.transposed_grouped_matmul(x.T, x, sizes, num_actual_groups=like.shape[0])

    (b,), (g, held) = export.symbolic_shape("b"), export.symbolic_shape("g, held")
    (_, out), (dx, dw) = export.export(jax.jit(mapped))(jax.ShapeDtypeStruct((b, 16, 4), f32), w).call(x, w)
    row = np.where(np.arange(16) < 15, 1.0, 0.0)[:, None]
    np.testing.assert_array_equal(out, np.broadcast_to(4 * row, (2, 16, 2)))
    np.testing.assert_array_equal(dx, np.broadcast_to(2 * row, (2, 16, 4)))
    np.testing.assert_array_equal(dw, np.broadcast_to(2 * np.array([7, 0, 8])[:, None, None], (3, 4, 2)))
    types = [jax.ShapeDtypeStruct(s, t) for s, t in (((8, 1), f32), ((g,), jnp.int32), ((held, 1), f32))]
    args = jnp.arange(8.0).reshape(8, 1), jnp.array([3, 5, 0], jnp.int32), jnp.ones((2, 1))
    every, some = export.export(jax.jit(wgrads))(*types).call(*args)
    np.testing.assert_array_equal(every[:, 0, 0], [5, 135, 0])
    np.testing.assert_array_equal(some[:, 0, 0], [5, 135])


def check_symbolic_rows() -> None:
    """With activations, a program of any number of rows and columns equals the program of one shape."""

    def loss(x: Array, w: Array) -> Any:
        rows = GroupedTensor(x, jnp.array([7, 0, 8], jnp.int32))
        outs = [ragged.matmul(rows, w, activation=lambda z: jnp.clip(jax.nn.silu(z), -1, 1), bias=w[0, 0]).data]
        outs += [ragged.gated_matmul(rows, w, columns=columns).data for columns in ("halves", "interleaved")]
        return sum(out.sum() for out in outs), outs

    scope = export.SymbolicScope()
    types = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), jnp.float32) for s in ("m,4", "3,4,2*n")]
    args = jnp.cos(jnp.arange(64.0)).reshape(16, 4), jnp.sin(jnp.arange(48.0)).reshape(3, 4, 4)
    program = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    got = export.export(program)(*types).call(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, program(*args))


def check_symbolic_scales() -> None:
    """Recipes with scales of blocks along extents that are symbolic equal the programs of one shape."""
    scope = export.SymbolicScope()
    types = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), jnp.float32) for s in ("16,k", "3,k,n")]
    args = jnp.cos(jnp.arange(640.0)).reshape(16, 40), jnp.sin(jnp.arange(8040.0)).reshape(3, 40, 67)
    for recipe in ("blockwise", "mxfp8", "nvfp4"):

        def loss(x: Array, w: Array, recipe: str = recipe) -> Any:
            out = ragged.matmul(GroupedTensor(x, jnp.array([7, 0, 8], jnp.int32)), w, recipe=recipe).data
            return jnp.sum(jnp.sin(out)), out

        program = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        got = export.export(program)(*types).call(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, program(*args))


def check_all_symbolic() -> None:
    for layout in ("batched", "wgrad", "outer", "ragged"):
        check_symbolic(layout)
    check_symbolic_maps()
    check_symbolic_rows()
    check_symbolic_scales()


@pytest.mark.long
def test_symbolic_extents() -> None:
    """Each extent, alone and with all others, of products and of gradients; none has to be bounded.

    In a process without the import hook: a symbolic extent is no `int`.
    """
    code = "from tests.ops import test_transforms; test_transforms.check_all_symbolic()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
