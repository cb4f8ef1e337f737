"""Every error of the products, as text: the call, what disagrees, what came, and the hint."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import itertools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec

import ragged
from ragged import GroupedTensor
from ragged.core.errors import Site, describe
from tests.cases import check_error

DIMS = jnp.array([3, 5, 0, 4], jnp.int32)
ROWS = GroupedTensor(jnp.ones((16, 8)), first_dims=DIMS)
COLUMNS = GroupedTensor(jnp.ones((8, 16)), last_dims=DIMS)
UNIFORM = GroupedTensor(jnp.ones((4, 8, 6)))
HEADS = GroupedTensor(jnp.ones((16, 2, 8)), first_dims=DIMS)
BOTH = GroupedTensor(jnp.ones((16, 16)), first_dims=DIMS, last_dims=DIMS)
X, W, DY = jnp.ones((16, 8)), jnp.ones((4, 8, 6)), jnp.ones((16, 6))

CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "matmul": (lambda **options: ragged.matmul(ROWS, UNIFORM, **options), "ragged.matmul(lhs, rhs)"),
    "matmul with heads": (lambda **options: ragged.matmul(HEADS, UNIFORM, **options), "ragged.matmul(lhs, rhs)"),
    "einsum": (
        lambda **options: ragged.einsum("td,gde->te", ROWS, UNIFORM, **options),
        'ragged.einsum("td,gde->te", lhs, rhs)',
    ),
    "einsum, turned": (
        lambda **options: ragged.einsum("gde,thd->the", UNIFORM, HEADS, **options),
        'ragged.einsum("gde,thd->the", lhs, rhs)',
    ),
    "gate": (
        lambda **options: ragged.gated_matmul(ROWS, UNIFORM, UNIFORM, **options),
        "ragged.gated_matmul(x, w_gate, w_up)",
    ),
    "sharded": (
        lambda **options: ragged.sharded_matmul(
            ROWS,
            UNIFORM,
            mesh=jax.make_mesh((1,), ("x",)),
            in_specs=(PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(),
            **options,
        ),
        "ragged.sharded_matmul(lhs, rhs)",
    ),
}

OPTIONS: dict[str, tuple[Any, str]] = {
    "preferred_element_type": ("bits", "`preferred_element_type` is 'bits', which isn't a dtype."),
    "precision": ("most", "unknown `precision` 'most'."),
    "backend": ("mosaic", "backend 'mosaic' does not exist."),
    "group_offset": (jnp.zeros(2, jnp.int32), "`group_offset` must have shape (), but has (2,)."),
    "num_actual_groups": (2, "`num_actual_groups` is for a wgrad, but the layout is 'forward'."),
}


def test_the_call_that_was_made_is_named() -> None:
    """And its own arguments, whatever product it makes of them."""
    for (call, (function, name)), (option, (value, text)) in itertools.product(CALLS.items(), OPTIONS.items()):
        if (call, option) == ("gate", "num_actual_groups"):
            continue  # it needs rows, and has no wgrad of which some groups could be computed
        x, w = (UNIFORM, HEADS) if "turned" in call else (HEADS if "heads" in call else ROWS, UNIFORM)
        first, second = ("x", "w_gate") if call == "gate" else ("lhs", "rhs")
        came = f"Got {first}={describe(x)}, {second}={describe(w)}"
        check_error(
            lambda function=function, option=option, value=value: function(**{option: value}),
            (TypeError, ValueError),
            f"`{name}`: {text}\n{came}",
        )


def test_what_came_is_described() -> None:
    """Values that may be long are cut short, and what has no short text is named by its type."""
    operands = {
        "x": np.ones((2, 3), np.float16),
        "key": jax.random.key(0),
        "tensor": UNIFORM,
        "count": np.True_,
        "size": 1.5,
        "name": "row",
        "none": None,
        "few": [DIMS, (1, 2)],
        "many": list(range(9)),
        "module": eqx.nn.Identity(),
    }
    assert Site("call", operands).text("A problem.", "A hint.") == (
        "`call`: A problem.\n"
        "Got x=f16[2,3], key=key<fry>[], tensor=GroupedTensor(f32[4,8,6]), count=np.True_, size=1.5, name='row', "
        "none=None, few=[i32[4], [1, 2]], many=[0, 1, 2, 3, 4, 5, 6, 7, ...], module=a Identity.\n"
        "A hint."
    )
    assert Site("call").text("A problem.", "A hint.") == "`call`: A problem.\nA hint."


@pytest.mark.long
def test_proposed_operands_fit() -> None:
    """Of all pairs of operands, those that don't fit get proposals that do."""
    matrices = [jnp.ones(shape) for shape in itertools.product((6, 8, 16), repeat=2)]
    of_kinds = [ROWS, COLUMNS, UNIFORM, HEADS, BOTH, GroupedTensor(jnp.ones((16, 8)), DIMS, DIMS), jnp.ones((4, 8, 16))]
    proposed: set[str] = set()
    for lhs, rhs in itertools.product([*of_kinds, *matrices], repeat=2):
        try:
            jax.eval_shape(ragged.matmul, lhs, rhs)
        except (ValueError, TypeError) as error:
            hint = str(error).rpartition("Did you mean ")[2] if "Did you mean " in str(error) else ""
            for code in re.findall("`(.*?)`", hint):
                names = {"lhs": lhs, "rhs": rhs, "GroupedTensor": GroupedTensor}
                names["rhs" if code.startswith(("rhs", "GroupedTensor(rhs")) else "lhs"] = eval(code, dict(names))
                jax.eval_shape(ragged.matmul, names["lhs"], names["rhs"])
                proposed.add(code)
    made = {"GroupedTensor(lhs, last_dims=rhs.first_dims)", "GroupedTensor(rhs, first_dims=lhs.last_dims)"}
    in_place = {"GroupedTensor(lhs).mT", "GroupedTensor(rhs).mT"}
    assert proposed == {"lhs.mT", "rhs.mT"} | made | in_place


def test_numpy_operands_are_what_jax_makes_of_them() -> None:
    """Also those of 64 bits."""
    sizes = np.array([3, 5, 0, 4], np.int32)
    for dtype, result in ((np.float32, jnp.float32), (np.float64, jnp.float32), (np.int64, jnp.int32)):
        x, w = np.ones((16, 8), dtype), np.ones((4, 8, 6), dtype)
        out = ragged.grouped_matmul(x, w, sizes, existing_out=np.ones((16, 6), dtype))
        assert out.dtype == result
        np.testing.assert_array_equal(out[:12], np.full((12, 6), 9))
        assert ragged.transposed_grouped_matmul(x.T, x, sizes).dtype == result
        np.testing.assert_array_equal(ragged.matmul(GroupedTensor(x, sizes), w).data[:12], np.full((12, 6), 8))


COUNTS: dict[str, Callable[[Any], Any]] = {
    "capacity": lambda n: ragged.matmul(BOTH.mT, ROWS, capacity=n),
    "max_last": lambda n: ragged.matmul(ROWS, COLUMNS, max_last=n),
    "num_actual_groups": lambda n: ragged.matmul(COLUMNS, ROWS, num_actual_groups=n),
    "num_actual_groups of plain arrays": lambda n: ragged.transposed_grouped_matmul(X.T, DY, DIMS, num_actual_groups=n),
    "input_buffer_count": lambda n: ragged.grouped_matmul(X, W, DIMS, input_buffer_count=n),
    "tiling": lambda n: ragged.grouped_matmul(X, W, DIMS, tiling=(n, n, n)),
    "block of a scaling": lambda n: ragged.quantize(UNIFORM, jnp.int8, (1, n)),
    "length of a history": lambda n: ragged.Recipe.preset("delayed", length=n).history,
    "num_groups of a route": lambda n: ragged.route(jnp.array([0, 2, 1]), n).first_dims,
    "capacity of from_list": lambda n: GroupedTensor.from_list([jnp.ones((2, 3))], capacity=n),
    "capacity of from_padded": lambda n: GroupedTensor.from_padded(jnp.ones((4, 2, 3)), DIMS, capacity=n),
    "max_len of to_padded": lambda n: ROWS.to_padded(n),
}


def test_counts() -> None:
    """A NumPy integer is a count; a bool isn't, wherever one is taken."""
    for name, call in COUNTS.items():
        want = jax.eval_shape(lambda call=call: call(5))
        for dtype in (np.int64, np.uint8):
            assert jax.eval_shape(lambda call=call, dtype=dtype: call(dtype(5))) == want
        for bad in (True, np.True_, 5.0, -1):
            with pytest.raises(ValueError, match=repr(bad) if name != "block of a scaling" else "`block` is"):
                call(bad)


MANY = jax.ShapeDtypeStruct((2**31, 8), jnp.float32)
SHAPES = GroupedTensor(MANY, jax.ShapeDtypeStruct((4,), jnp.int32))  # of which a tracer is made unchecked
MERGED = GroupedTensor(jax.ShapeDtypeStruct((2**30, 2, 8), jnp.float32), SHAPES.first_dims)


def test_more_rows_than_int32_can_count() -> None:
    """An error when traced, at the call. As many as it can count are taken."""
    f32, w = jnp.float32, jax.ShapeDtypeStruct((4, 8, 6), jnp.float32)
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("GroupedTensor", lambda data: GroupedTensor(data, DIMS), (MANY,)),
        ("ragged.matmul(lhs, rhs)", ragged.matmul, (SHAPES, w)),
        ("ragged.matmul(lhs, rhs)", ragged.matmul, (MERGED, w)),
        ("ragged.grouped_matmul(lhs, rhs, group_sizes)", ragged.grouped_matmul, (MANY, w, SHAPES.first_dims)),
        ("GroupedTensor.mask", lambda x: x.mean(-2), (SHAPES,)),
        ("GroupedTensor.offsets", lambda x: x.mT.offsets, (SHAPES,)),
        (
            "ragged.route(group_ids, num_groups)",
            lambda ids: ragged.route(ids, 4).order,
            (jax.ShapeDtypeStruct((2**30, 2), jnp.int32),),
        ),
    ]
    for call, function, args in calls:
        problem = f"`{call}`: 2147483648 packed rows (or columns) are more than 2147483647.\n"
        check_error(lambda function=function, args=args: jax.eval_shape(function, *args), ValueError, problem)
    most = jax.ShapeDtypeStruct((2**31 - 1, 8), f32)
    problem = "`groups aligned to blocks`: 2147483650 packed rows (or columns) are more than 2147483647.\n"

    def in_blocks(x: Array) -> GroupedTensor:
        return ragged.quantize(GroupedTensor(x, DIMS), jnp.int8, (2, None))

    check_error(lambda: jax.eval_shape(in_blocks, most), ValueError, problem)
    assert jax.eval_shape(lambda x: (GroupedTensor(x, DIMS) @ jnp.ones(w.shape)).mean(-2), most).shape == (4, 6)
