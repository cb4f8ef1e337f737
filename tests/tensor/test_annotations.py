"""`Rows`, `Cols`, `Both`, `Uniform`: kinds told apart, the group axis bound, messages as text.

The functions are checked twice: by jaxtyping and beartype as they run, and by pyright, for which `assert_type` is.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import itertools
import pickle
from collections.abc import Callable
from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from beartype import beartype
from jax import Array
from jaxtyping import Float, Float8e4m3fn, Float32, Int, PyTree, Shaped, TypeCheckError, jaxtyped

import ragged
from ragged import Both, Cols, GroupedTensor, Rows, Uniform
from tests.cases import check_error

checked = jaxtyped(typechecker=beartype)

SIZES = jnp.array([3, 5, 0, 4], jnp.int32)
ROWS = GroupedTensor(jnp.ones((16, 8)), SIZES)
BOTH = GroupedTensor(jnp.ones((16, 6)), SIZES, SIZES)
UNIFORM = GroupedTensor(jnp.ones((4, 8, 6)))
STACK = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), ROWS)
KINDS = {"Rows": ROWS, "Cols": ROWS.mT, "Both": BOTH, "Uniform": UNIFORM}


@checked
def forward(
    x: Rows[Float[GroupedTensor, "tokens d"], "g"], w: Float[Array, "g d f"]
) -> Rows[Float[GroupedTensor, "tokens f"], "g"]:
    assert_type(x, GroupedTensor)
    return ragged.matmul(x, w)


@checked
def attention(
    q: Rows[Float[GroupedTensor, "rows d"], "g"],
    k: Cols[Float[GroupedTensor, "d rows"], "g"],
    v: Rows[Float[GroupedTensor, "rows d"], "g"],
    longest: int,
) -> tuple[Rows[Float[GroupedTensor, "rows d"], "g"], Both[Float[GroupedTensor, "rows {longest}"], "g"]]:
    weights = ragged.matmul(q, k, max_last=longest).softmax()
    return ragged.matmul(weights, v), weights


@checked
def wgrad(
    x: Rows[Float[GroupedTensor, "tokens d"], "g"], dy: Rows[Float[GroupedTensor, "tokens f"], "g"] | None = None
) -> Uniform[Float[GroupedTensor, "g d f"], "g"] | None:
    assert_type(dy, GroupedTensor | None)
    return None if dy is None else ragged.matmul(x.mT, dy)


def fits(x: Any, annotation: Any) -> bool:
    return isinstance(x, annotation)


def why(call: Callable[[], Any]) -> tuple[str, str]:
    """What a failed check says: of which argument, and why."""
    with pytest.raises(TypeCheckError) as caught:
        call()
    error = found = caught.value
    while found.__cause__ is not None:
        found = found.__cause__
    return str(error), str(found)


def test_kinds_are_told_apart() -> None:
    """Each annotation takes tensors of its kind, transposed and by their dtype, and no others."""
    for name, (kind, x) in itertools.product(KINDS, KINDS.items()):
        annotation = getattr(ragged, name)
        assert fits(x, annotation[GroupedTensor, "g"]) == (kind == name)
        assert fits(x.mT.mT, annotation[Float[GroupedTensor, "..."], 4]) == (kind == name)
        assert not fits(x, annotation[Int[GroupedTensor, "..."], "g"])
        assert not fits(x, annotation[Float[GroupedTensor, "..."], 3])
        assert not fits(x.data, annotation[Float[GroupedTensor, "..."], "g"])
    assert fits(BOTH.mT, ragged.Both[Float[GroupedTensor, "longest cols"], "g"])
    assert not fits(None, ragged.Both[GroupedTensor, "g"])


def test_axes_are_bound_across_arguments() -> None:
    """The number of groups and the buffer's axes, with those of arrays, of results and of other kinds."""
    assert jax.eval_shape(forward, ROWS, UNIFORM.data).shape == (16, 6)
    out, weights = jax.eval_shape(lambda x: attention(x, x.mT, x, 6), ROWS)
    assert (out.kind, weights.kind) == ("ragged rows", "ragged both")
    assert wgrad(ROWS) is None and jax.eval_shape(wgrad, ROWS, ROWS).kind == "uniform"

    message, reason = why(lambda: forward(ROWS, UNIFORM.data[:3]))
    assert "typechecking parameter 'w'" in message and "Parameter annotations: (x: ragged.Rows[Float[Grou" in message
    assert "g=4\ntokens=16\nd=8" in message
    assert "the size of dimension g is 3 which does not equal the existing value of 4." in reason
    three = GroupedTensor(ROWS.data, SIZES[:3])
    message, reason = why(lambda: attention(ROWS, three.mT, ROWS, 6))
    assert "typechecking parameter 'k'" in message
    assert reason.endswith(
        "violates type hint <class 'ragged.Cols[Float[GroupedTensor, 'd rows'], 'g']'>, as its groups and buffer, "
        "f32[3,8,16], don't fit 'g d rows': the size of dimension g is 3 which does not equal the existing value of 4."
    )
    _, reason = why(lambda: attention(ROWS, ROWS.mT, ROWS.map(lambda x: x[:, :7]), 6))
    assert reason.endswith("'g rows d': the size of dimension d is 7 which does not equal the existing value of 8.")
    assert "typechecking parameter 'dy'" in why(lambda: wgrad(ROWS, three))[0]


COTANGENT = "this is a cotangent or tangent, whose groups are unknown."
MESSAGES: list[tuple[Any, str]] = [
    (ROWS.data, "this is f32[16,8], not a GroupedTensor."),
    (None, "this is None, not a GroupedTensor."),
    (ROWS.mT, "this tensor's kind is ragged columns, not ragged rows."),
    (eqx.filter_grad(lambda x: x.data.sum())(ROWS), COTANGENT),
    (jax.grad(lambda x: x.data.sum(), allow_int=True)(ROWS), COTANGENT),
    (STACK, "this is a stack of tensors, with a leading axis: annotate the function that is mapped over it."),
    (GroupedTensor(None), "this tensor's leaves are not arrays."),
    (GroupedTensor(0, 0), "this tensor's leaves are not arrays."),
    (ROWS.astype(jnp.int32), "don't fit 'g tokens d': this array has dtype int32, not any of ("),
]


def test_messages() -> None:
    """What is no tensor of ragged rows with groups is told apart."""
    for x, text in MESSAGES:
        message, reason = why(lambda x=x: forward(x, UNIFORM.data))
        assert "typechecking parameter 'x'" in message
        assert "violates type hint <class 'ragged.Rows[Float[GroupedTensor, 'tokens d'], 'g']'>, as " in reason
        assert text in reason

    @checked
    def f(x: Rows[Float[GroupedTensor, "tokens heads d"], "g"]) -> None: ...

    assert why(lambda: f(ROWS))[1].endswith(
        "as its groups and buffer, f32[4,16,8], don't fit 'g tokens heads d': "
        "this array has 3 dimensions, not the 4 expected by the type hint."
    )


def test_what_does_not_fit_binds_nothing() -> None:
    """As in jaxtyping: a check that fails leaves no axis bound, whichever of them it fails at."""
    with jaxtyped("context"):
        assert not fits(ROWS, Rows[Float[GroupedTensor, "a 7"], "b"])
        assert not fits(ROWS, Rows[Float[GroupedTensor, "a b"], 3])
        assert fits(ROWS, Rows[Float[GroupedTensor, "b a"], "c"])
        assert not fits(jnp.ones(3), Float[Array, " c"])
        assert fits(jnp.ones((16, 8, 4)), Float[Array, "b a c"])

    @checked
    def f(
        x: Rows[Float[GroupedTensor, "a 7"], "g"] | Rows[Float[GroupedTensor, "b 8"], "h"], a: Float[Array, "a g"]
    ): ...

    f(ROWS, jnp.ones((1, 2)))


def test_axes_as_jaxtyping_has_them() -> None:
    """Variadic, broadcastable, anonymous, symbolic ones; numbers; several dtypes; nested annotations."""

    @checked
    def f(x: Rows[Float[GroupedTensor, "tokens *rest"], "g"], y: Cols[Float[GroupedTensor, "*rest tokens"], "2*g"]): ...

    twice = GroupedTensor(jnp.ones((8, 16)), None, jnp.ones(8, jnp.int32))
    f(ROWS, twice)
    assert "don't fit '2*g *rest tokens': the dimension size 4 does not" in why(lambda: f(ROWS, ROWS.mT))[1]
    assert fits(ROWS, Rows[Int[GroupedTensor, "..."] | Float[GroupedTensor, " tokens _"], " _"])
    assert not fits(ROWS, Rows[Int[GroupedTensor, "..."] | Float[GroupedTensor, "tokens 7"], "g"])
    narrowed = Rows[Shaped[Float32[GroupedTensor, "d"], "tokens"], "g"]
    assert fits(ROWS, narrowed) and not fits(ROWS.astype(jnp.bfloat16), narrowed)


def test_quantised_tensors() -> None:
    """By what is stored, as jaxtyping does without a kind, or by what `dequantize` returns."""
    q, q8 = jax.eval_shape(
        lambda x: (ragged.quantize(x, jnp.float8_e4m3fn, "row"), ragged.quantize(x, jnp.int8, "mx")), ROWS
    )

    @checked
    def stored(x: Rows[Float8e4m3fn[GroupedTensor, "tokens d"], "g"]) -> None: ...

    @checked
    def logical(x: Rows[Float32[GroupedTensor, "tokens d"], "g", "logical"]) -> None:
        assert_type(x, GroupedTensor)

    stored(q)
    for x in (q, ROWS, q8):
        logical(x)
    assert "f32[4,16,8], don't fit 'g tokens d': this array has dtype float32, not f" in why(lambda: stored(ROWS))[1]
    assert "this array has dtype bfloat16, not float32 as" in why(lambda: logical(ROWS.astype(jnp.bfloat16)))[1]
    assert not fits(q, Rows[Float32[GroupedTensor, "tokens d"], "g"])


def test_traced_tensors() -> None:
    """Under every transformation, sizes traced too; what is wrong is seen while tracing."""
    w = UNIFORM.data

    def total(x: GroupedTensor, w: Array) -> Array:
        return forward(x, w).data.sum()

    def both_ways(x: GroupedTensor, w: Array) -> Any:
        summed, _ = jax.lax.scan(lambda carried, x: (carried + total(x, w), None), 0.0, STACK)
        mapped = jax.vmap(forward, (0, None))(STACK, w)
        tangent = jax.jvp(lambda data: forward(GroupedTensor(data, SIZES), w).data, (x.data,), (x.data,))[1]
        return forward(x, w), summed, mapped, tangent, eqx.filter_grad(total)(x, w)

    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(both_ways, ROWS, w))]
    assert shapes == [(16, 6), (4,), (), (2, 16, 6), (2, 4), (16, 6), (16, 8)]
    assert "dimension g is 3" in why(lambda: jax.jit(forward)(ROWS, w[:3]))[1]
    assert "kind is ragged columns" in why(lambda: jax.vmap(forward, (0, None))(STACK.mT, w))[1]
    assert fits(jax.eval_shape(lambda: ROWS), Rows[Float32[GroupedTensor, "16 8"], 4])


def test_fields_and_trees() -> None:
    """Fields of modules are checked where they are made; leaves of trees are tensors, not their arrays."""

    @checked
    class Layer(eqx.Module):
        x: Rows[Float[GroupedTensor, "tokens d"], "g"]
        w: Uniform[Float[GroupedTensor, "g d f"], "g"] | None = None

    layer = Layer(ROWS, UNIFORM)
    jax.tree.map(lambda leaf: None, layer)
    assert eqx.filter_vmap(lambda x: Layer(x))(STACK).x.is_stack
    assert "typechecking parameter 'w'" in why(lambda: Layer(ROWS, GroupedTensor(UNIFORM.data[:3])))[0]
    assert "kind is uniform" in why(lambda: Layer(UNIFORM))[1]

    @checked
    def f(
        tree: PyTree[Rows[Float[GroupedTensor, "tokens ?d"], "g"], "T"],  # pyright: ignore
        w: PyTree[Float[Array, "g ?d"], "T"],  # pyright: ignore
    ) -> None:
        assert_type(tree, Any)

    narrow = ROWS.map(lambda x: x[:, :3])
    f({"a": ROWS, "b": [narrow]}, {"a": jnp.ones((4, 8)), "b": [jnp.ones((4, 3))]})
    for bad in (ROWS.data, {"a": ROWS.mT}, {"a": ROWS, "b": jnp.ones(3)}, [ROWS, GroupedTensor(ROWS.data, SIZES[:3])]):
        assert "parameter 'tree'" in why(lambda bad=bad: f(bad, jnp.ones((4, 8))))[0]
    assert "parameter 'w'" in why(lambda: f([ROWS], [jnp.ones((4, 7))]))[0]


def test_without_jaxtyping_s_decorator() -> None:
    """A checker alone, and annotations as strings: kinds are told apart, axes are not bound across arguments."""

    @beartype
    def f(x: "Rows[Float[GroupedTensor, 'tokens d'], 'g']", w: "Float[Array, 'g d f'] | None" = None) -> None: ...

    f(ROWS, UNIFORM.data[:3])
    with pytest.raises(Exception, match="as this tensor's kind is uniform, not ragged rows"):
        f(UNIFORM)


rows: Any = Rows
AXES: tuple[Any, ...] = ("g h", "", None, "...")


def test_annotations_are_pickled() -> None:
    """As functions that are sent to another process have them."""
    assert pickle.loads(pickle.dumps(Both)) is Both
    for annotation in (Rows[Float[GroupedTensor, "tokens 8"], 4], Rows[Float32[GroupedTensor, "..."], "g", "logical"]):
        copy: Any = pickle.loads(pickle.dumps(annotation))
        assert str(copy) == str(annotation) and isinstance(ROWS, copy)
        assert not isinstance(ROWS.mT, copy) and not isinstance(ROWS.astype(jnp.int32), copy)


def test_subscripts() -> None:
    """Errors of annotations, where they are written."""
    subscripts = 'the subscripts must be an annotation, the group axis and optionally "logical".\n'
    not_a_tensor = "doesn't annotate a `GroupedTensor`."
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: rows[Float[GroupedTensor, "m k"]], TypeError, f"`Rows[Float[GroupedTensor, 'm k']]`: {subscripts}"),
        (lambda: Uniform[Float[GroupedTensor, "g m k"], "g", "stored"], TypeError, subscripts),
        (lambda: rows[GroupedTensor, "g"][GroupedTensor, "g"], TypeError, "the subscripts must be an annotation"),
        (lambda: Rows[Float[Array, "m k"], "g"], TypeError, f"Float[Array, 'm k'] {not_a_tensor}"),
        (lambda: Rows[Float[Array, "m"] | Float[GroupedTensor, "m"], "g"], TypeError, not_a_tensor),
        (lambda: rows["m k", "g"], TypeError, f"'m k' {not_a_tensor}"),
        *((lambda axis=axis: rows[GroupedTensor, axis], ValueError, f"{axis!r} isn't one axis.") for axis in AXES),
        (lambda: rows(ROWS.data, SIZES), TypeError, "`Rows`: an annotation can't be called."),
        (lambda: isinstance(ROWS, rows), TypeError, "`Rows`: an annotation needs its axes."),
    ]
    for call, error, text in wrong:
        check_error(call, error, text)
