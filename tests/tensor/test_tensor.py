"""`GroupedTensor`: what it is, its groups, conversion, its life as a pytree, `validate`, and every error as text."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, TypeCheckError, jaxtyped

import ragged
from ragged import GroupedTensor
from ragged.tensor.base import with_fields
from tests.cases import check_error
from tests.moe import moe as layer_of

pytestmark = pytest.mark.sampled

# Along the packed axis: an empty group, sizes off any tile, and room for a tail.
SIZES = (3, 0, 4, 1)
# Along the other axis of a ragged-both tensor: group 2 has rows but no columns, group 1 has columns but no rows.
OTHERS = (2, 3, 0, 1)
CAPACITY = 11
KINDS = ("uniform", "ragged rows", "ragged columns", "ragged both", "ragged both, packed columns")
RAGGED = KINDS[1:]


@dataclass
class Example:
    """A tensor whose tail holds `fill`, its groups as NumPy arrays, and where each lies in the buffer."""

    tensor: GroupedTensor
    groups: list[np.ndarray]
    places: list[tuple[Any, ...]]

    def unpack(self, buffer: Any) -> list[np.ndarray]:
        return [np.asarray(buffer)[place] for place in self.places]

    def pack(self, groups: list[np.ndarray], fill: Any = 0) -> np.ndarray:
        """A buffer of these groups, with `fill` where no group has an element."""
        buffer = np.full(self.tensor.shape, fill, groups[0].dtype)
        for place, group in zip(self.places, groups, strict=True):
            buffer[place] = group
        return buffer

    @property
    def mask(self) -> np.ndarray:
        return self.pack([np.ones(g.shape, bool) for g in self.groups], False)

    def with_data(self, data: Any) -> GroupedTensor:
        x = self.tensor
        return GroupedTensor(jnp.asarray(data), x.first_dims, x.last_dims, transposed=x.transposed)


def example(
    kind: str,
    sizes: tuple[int, ...] = SIZES,
    others: tuple[int, ...] = OTHERS,
    *,
    fill: float = np.nan,
    dtype: Any = np.float32,
    seed: int = 0,
) -> Example:
    """An example of a kind. Values are in [0.5, 1.5), integers for an integer dtype, all different."""
    o = np.cumsum([0, *sizes])
    along = [slice(a, b) for a, b in itertools.pairwise(o.tolist())]
    upto = [slice(0, n) for n in others]
    every = slice(None)
    shape, places, first, last = {
        "uniform": ((len(sizes), 3, 2), [(i,) for i in range(len(sizes))], None, None),
        "ragged rows": ((CAPACITY, 3), [(a, every) for a in along], sizes, None),
        "ragged columns": ((2, CAPACITY), [(every, a) for a in along], None, sizes),
        "ragged both": ((CAPACITY, 4), list(zip(along, upto, strict=True)), sizes, others),
        "ragged both, packed columns": ((4, CAPACITY), list(zip(upto, along, strict=True)), others, sizes),
    }[kind]
    rng = np.random.default_rng(seed)
    values = rng.permutation(np.prod(shape)).reshape(shape)
    if np.issubdtype(dtype, np.integer):
        values = (values - 20).astype(dtype)
        fill = 99 if np.isnan(fill) else fill
    else:
        values = (0.5 + values / values.size).astype(dtype)
    data = np.full(shape, fill, dtype)
    for place in places:
        data[place] = values[place]
    firsts, lasts = (None if dims is None else jnp.array(dims, jnp.int32) for dims in (first, last))
    tensor = GroupedTensor(jnp.asarray(data), firsts, lasts, transposed=kind.endswith("packed columns"))
    return Example(tensor, [data[place] for place in places], places)


def assert_groups(got: Any, want: list[np.ndarray]) -> None:
    got = list(got)
    assert [g.shape for g in got] == [w.shape for w in want]
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(np.asarray(g), w)


def ints(*values: int) -> Array:
    return jnp.array(values, jnp.int32)


def floats(*shape: int) -> Array:
    return jnp.ones(shape, jnp.float32)


# --- what it is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_is(kind: str) -> None:
    x = example(kind).tensor
    assert x.kind == kind.split(",")[0]
    assert (x.shape, x.dtype, x.ndim) == (x.data.shape, np.float32, x.data.ndim)
    assert x.num_groups == len(x) == 4
    assert x.ragged == (x.first_dims is not None, x.last_dims is not None)
    assert np.array_equal(x.mask, example(kind).mask) and x.mask.dtype == bool
    packed = {"uniform": None, "ragged rows": -2, "ragged columns": -1, "ragged both": -2, KINDS[4]: -1}[kind]
    assert x.packed_axis == packed
    if packed is None:
        for name in ("capacity", "offsets", "group_ids", "positions", "packed_dims"):
            with pytest.raises(ValueError) as error:
                getattr(x, name)
            assert str(error.value) == (
                f"`GroupedTensor.{name}`: a uniform tensor has no ragged axis.\nGot x=GroupedTensor(f32[4,3,2]).\n"
                "Its groups are `x.data`, all of the same shape."
            )
    else:
        assert x.capacity == CAPACITY
        assert x.packed_dims.tolist() == list(SIZES)
        assert x.offsets.tolist() == [0, 3, 3, 7, 8]
        assert x.group_ids.tolist() == [0, 0, 0, 2, 2, 2, 2, 3, 4, 4, 4]
        assert x.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 2]
        assert x.offsets.dtype == x.group_ids.dtype == x.positions.dtype == jnp.int32


@pytest.mark.parametrize("kind", KINDS)
def test_mT(kind: str) -> None:
    """Every group transposed, the dims swapped; twice is the tensor itself, and that needs no copy under `jit`."""
    e = example(kind)
    x, y = e.tensor, e.tensor.mT
    assert_groups(y, [g.T for g in e.groups])
    assert y.first_dims is x.last_dims and y.last_dims is x.first_dims
    assert np.array_equal(y.mask, np.swapaxes(e.mask, -1, -2))
    assert y.num_groups == 4 and y.ragged == x.ragged[::-1]
    assert jax.tree.structure(x) != jax.tree.structure(y)
    assert jax.tree.structure(x) == jax.tree.structure(y.mT)
    assert_groups(y.mT, e.groups)
    assert_groups(jax.jit(lambda t: t.mT)(x), [g.T for g in e.groups])
    # The transposes cancel: what comes back is the argument.
    text = jax.jit(lambda t: t.mT.mT).lower(x).compile().as_text()
    assert text is not None and "transpose" not in text


def test_ragged_both_remembers_which_axis_is_packed() -> None:
    """The same buffer and dims mean other groups when it is the columns that are packed."""
    data = jnp.arange(16.0).reshape(4, 4)
    rows = GroupedTensor(data, ints(2, 1), ints(1, 2))
    columns = GroupedTensor(data, ints(2, 1), ints(1, 2), transposed=True)
    assert_groups(rows, [np.array([[0.0], [4.0]]), np.array([[8.0, 9.0]])])
    assert_groups(columns, [np.array([[0.0], [4.0]]), np.array([[1.0, 2.0]])])


@pytest.mark.parametrize("convert", [lambda d: d.astype(jnp.uint32), np.asarray])
@pytest.mark.parametrize("kind", RAGGED)
def test_uint32_and_numpy_dims(kind: str, convert: Callable[[Any], Any]) -> None:
    """Dims may be int32 or uint32, of jax or NumPy: all means the same."""
    e = example(kind)
    x = e.tensor
    first, last = (None if d is None else convert(d) for d in (x.first_dims, x.last_dims))
    y = GroupedTensor(np.asarray(x.data), first, last, transposed=x.transposed)
    assert_groups(y, e.groups)
    assert np.array_equal(y.mask, e.mask)
    assert np.array_equal(y.to_padded(5), x.to_padded(5))
    assert np.array_equal((y + y).data, (x + x).data)
    assert np.array_equal(y.sum(), x.sum())
    assert np.array_equal(y.softmax().data, x.softmax().data)
    assert_groups(ragged.concat([y, x]), 2 * e.groups)
    assert y.astype(jnp.float16).dtype == jnp.float16
    assert_groups(y.validate(), e.groups)
    assert_groups(eqx.filter_jit(lambda t: t.validate())(jax.tree.map(jnp.asarray, y)), e.groups)


@pytest.mark.long
def test_under_x64() -> None:
    """Nothing mixes in int64 or float64 when they are enabled."""
    e = example(KINDS[4])
    with jax.enable_x64(True):
        x = e.tensor
        assert x.sum().dtype == x.mean(-1).dtype == x.softmax().dtype == (x + 1).dtype == jnp.float32
        assert_groups(ragged.concat([x, x]), 2 * e.groups)
        assert_groups(eqx.filter_jit(lambda t: t.validate())(x), e.groups)
        assert x.to_padded(5).dtype == jnp.float32
        assert x.offsets.dtype == x.group_ids.dtype == x.positions.dtype == jnp.int32
        wide = x.astype(jnp.float64)
        assert wide.dtype == wide.sum().dtype == wide.mean().dtype == wide.softmax().dtype == jnp.float64


# --- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_groups(kind: str) -> None:
    """Indexing from both ends, iteration, `to_list`; nothing of the tail."""
    e = example(kind)
    x = e.tensor
    assert_groups(x.to_list(), e.groups)
    assert_groups(list(x), e.groups)
    assert_groups([x[i] for i in range(len(x))], e.groups)
    assert_groups([x[i] for i in (-4, -3, -2, -1)], e.groups)
    assert_groups([x[np.int64(2)]], [e.groups[2]])
    for index in (4, -5):
        with pytest.raises(IndexError) as error:
            x[index]
        assert str(error.value) == (
            f"`GroupedTensor[{index}]`: there are 4 groups.\nGot x={e.tensor!r}.\n"
            "The first group is `x[0]`; negative indices count from the end."
        )


@pytest.mark.parametrize(
    "index, came, ends", [("a", "'a'", "0, 1"), (slice(2, 5), "a slice", "2, 5"), (True, "True", "0, 1")]
)
def test_index_must_be_an_int(index: Any, came: str, ends: str) -> None:
    x = example("ragged rows").tensor
    with pytest.raises(TypeError) as error:
        x[index]
    assert str(error.value) == (
        f"`GroupedTensor[...]`: the index must be an int, the number of a group.\nGot index={came}, x={x!r}.\n"
        f"Rows or columns of every group are `x.rows({ends})` and `x.columns({ends})`. "
        "Index the buffer itself as `x.data[...]`."
    )


@pytest.mark.parametrize("kind", RAGGED)
def test_groups_need_concrete_dims(kind: str) -> None:
    """Their shapes aren't known while tracing."""
    x = example(kind).tensor
    for f in (lambda t: t[1], lambda t: t.to_list(), list):
        with pytest.raises(ValueError) as error:
            jax.jit(f)(x)
        text = str(error.value)
        assert re.match(
            r"`GroupedTensor\[[01]\]`: the group's shape depends on sizes that are not known while tracing.\n", text
        )
        assert "_dims=i32[4]" in text and text.endswith(
            "Under `jit`, use operations on the whole tensor: `ragged.matmul`, `map`, `sum`, `to_padded`."
        )
    # Uniform groups are known; so are the groups of a tensor whose dims aren't traced.
    uniform = example("uniform")
    assert_groups(jax.jit(lambda t: t.to_list())(uniform.tensor), uniform.groups)
    e = example(kind)
    assert_groups(jax.jit(lambda data: e.with_data(data).to_list())(x.data), e.groups)


# --- conversion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [None, 12])
@pytest.mark.parametrize(
    "which, shapes, shape",
    [
        ("first", [(3, 2), (0, 2), (5, 2)], (8, 2)),
        ("last", [(2, 3), (2, 0), (2, 5)], (2, 8)),
        ("both", [(3, 2), (0, 4), (5, 0)], (8, 4)),
    ],
)
def test_from_list(which: str, shapes: list[tuple[int, int]], shape: tuple[int, int], capacity: int | None) -> None:
    rng = np.random.default_rng(0)
    groups = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    x = GroupedTensor.from_list(groups, ragged=which, capacity=capacity)
    assert_groups(x, groups)
    if capacity is not None:
        shape = (2, 12) if which == "last" else (12, shape[1])
    assert x.shape == shape and not x.transposed
    assert x.ragged == (which != "last", which != "first")
    assert np.all(np.asarray(x.data)[~np.asarray(x.mask)] == 0)
    # The shapes are static: it works under `jit`, too.
    y = jax.jit(lambda gs: GroupedTensor.from_list(gs, ragged=which, capacity=capacity))(groups)
    assert np.array_equal(x.data, y.data)


@pytest.mark.parametrize(
    "groups, options, text",
    [
        ([(2, 3)], {"ragged": "rows"}, "`ragged` is 'rows'.\nIt must be 'first', 'last' or 'both'."),
        ([], {}, "needs at least one matrix, all of one dtype.\nGot groups=[].\nPass a list of arrays [first, last]."),
        (
            [(2,)],
            {},
            "needs at least one matrix, all of one dtype.\nGot groups=[f32[2]].\nPass a list of arrays [first, last].",
        ),
        (
            [(2, 3), (2, 3)],
            {"capacity": 3},
            "`capacity` is 3, but the groups need 4.\nPass at least 4, or leave `capacity` out.",
        ),
        (
            [(3, 2), (3, 2)],
            {"capacity": 3, "ragged": "last"},
            "`capacity` is 3, but the groups need 4.\nPass at least 4, or leave `capacity` out.",
        ),
        (
            [(2, 3), (2, 4)],
            {},
            "the groups' last dims differ: [3, 4].\n"
            'Pass `ragged="last"` if only the last dims differ, `ragged="both"` if the first dims differ too.',
        ),
        (
            [(2, 3), (4, 3)],
            {"ragged": "last"},
            "the groups' first dims differ: [2, 4].\n"
            'Pass `ragged="first"` if only the first dims differ, `ragged="both"` if the last dims differ too.',
        ),
    ],
)
def test_from_list_errors(groups: list[tuple[int, ...]], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        GroupedTensor.from_list([floats(*shape) for shape in groups], **options)
    assert str(error.value) == f"`GroupedTensor.from_list`: {text}"


def test_from_list_mixed_dtypes() -> None:
    with pytest.raises(ValueError) as error:
        GroupedTensor.from_list([floats(2, 3), jnp.ones((2, 3), jnp.int32)])
    assert str(error.value) == (
        "`GroupedTensor.from_list`: needs at least one matrix, all of one dtype.\n"
        "Got groups=[f32[2,3], i32[2,3]].\nPass a list of arrays [first, last]."
    )


@pytest.mark.parametrize("max_len", [6, 2])
@pytest.mark.parametrize("kind", RAGGED)
def test_to_padded(kind: str, max_len: int) -> None:
    """Groups side by side, the fill value around them; a longer group is cut off."""
    e = example(kind)
    axis = 1 if e.tensor.packed_axis == -1 else 0
    extent = e.tensor.shape[1 - axis]
    want = np.full((4, max_len, extent) if axis == 0 else (4, extent, max_len), 7, np.float32)
    for block, group in zip(want, e.groups, strict=True):
        kept = group[:max_len] if axis == 0 else group[:, :max_len]
        block[: kept.shape[0], : kept.shape[1]] = kept
    assert np.array_equal(e.tensor.to_padded(max_len, fill_value=7), want)
    assert np.array_equal(jax.jit(lambda t: t.to_padded(max_len, 7))(e.tensor), want)
    assert np.array_equal(e.tensor.to_padded(max_len), np.where(want == 7, 0, want))


def test_to_padded_of_an_empty_buffer() -> None:
    assert np.array_equal(GroupedTensor(floats(0, 2), ints(0, 0)).to_padded(2, 5), np.full((2, 2, 2), 5))


def test_padded_round_trip() -> None:
    e = example("ragged rows")
    back = GroupedTensor.from_padded(e.tensor.to_padded(4, np.nan), e.tensor.first_dims, capacity=CAPACITY)
    assert_groups(back, e.groups)
    assert np.array_equal(back.data, e.pack(e.groups))  # the tail is zero
    back = jax.jit(GroupedTensor.from_padded)(e.tensor.to_padded(4, np.nan), e.tensor.first_dims)
    assert_groups(back, e.groups)
    assert back.capacity == 16


def test_from_padded_sizes() -> None:
    """Sizes are cut to what there is, from 0 to `max_first`; dims may be NumPy's, extents may be zero."""
    padded = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    x = GroupedTensor.from_padded(padded, np.array([-2, 9], np.int32))
    assert x.first_dims.tolist() == [0, 3]
    assert_groups(x, [padded[0, :0], padded[1]])
    assert GroupedTensor.from_padded(floats(2, 3, 0), ints(1, 2)).shape == (6, 0)
    assert GroupedTensor.from_padded(floats(2, 0, 3), ints(0, 0)).shape == (0, 3)


def test_from_padded_errors() -> None:
    with pytest.raises(ValueError) as error:
        GroupedTensor.from_padded(floats(2, 3), ints(1, 2))
    assert str(error.value) == (
        "`GroupedTensor.from_padded`: `padded` must be [g, max_first, *more, last], but has 2 dims.\n"
        "Got padded=f32[2,3], first_dims=i32[2].\nPass an array as `to_padded` returns it."
    )
    with pytest.raises(ValueError, match=r"`GroupedTensor.from_padded`: .*2 groups.*3"):
        GroupedTensor.from_padded(floats(2, 3, 4), ints(1, 2, 3))


def test_to_padded_of_uniform() -> None:
    with pytest.raises(ValueError, match=r"^`GroupedTensor.to_padded`: a uniform tensor has no ragged axis.\n"):
        example("uniform").tensor.to_padded(3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_concat(kind: str, transposed: bool) -> None:
    """The groups in order, packed without gaps although every tensor has a NaN tail, and a zero tail."""
    examples = [example(kind, seed=1), example(kind, (0, 1), (3, 2), seed=2), example(kind, (4, 0, 0, 7), seed=3)]
    tensors = [e.tensor.mT if transposed else e.tensor for e in examples]
    want = [g.T if transposed else g for e in examples for g in e.groups]
    joined = jax.jit(ragged.concat)(tensors)
    assert joined.kind == tensors[0].kind
    assert_groups(joined, want)
    assert np.all(np.asarray(joined.data)[~np.asarray(joined.mask)] == 0)
    if kind != "uniform":
        assert joined.capacity == 3 * CAPACITY
        assert joined.packed_dims.dtype == jnp.int32
    alone = ragged.concat(tensors[:1])
    assert_groups(alone, want[:4])


@pytest.mark.parametrize("kind", RAGGED)
def test_concat_gradient(kind: str) -> None:
    """One for every element, exactly zero in the tail."""
    a, b = example(kind, seed=1), example(kind, seed=2)

    def loss(p: Array, q: Array) -> Array:
        return jnp.sum(ragged.concat([a.with_data(p), b.with_data(q)]).data)

    for e, gradient in zip((a, b), jax.grad(loss, (0, 1))(a.tensor.data, b.tensor.data), strict=True):
        assert np.array_equal(gradient, e.mask)


@pytest.mark.parametrize(
    "other",
    [
        GroupedTensor(floats(2, 8), None, ints(3, 4)),
        GroupedTensor(floats(8, 3), ints(3, 4)),
        GroupedTensor(floats(8, 2).astype(jnp.bfloat16), ints(3, 4)),
        GroupedTensor(floats(2, 8, 2)),
    ],
    ids=repr,
)
def test_concat_errors(other: GroupedTensor) -> None:
    x = GroupedTensor(floats(8, 2), ints(3, 4))
    with pytest.raises(ValueError) as error:
        ragged.concat([x, x, other])
    assert str(error.value) == (
        f"`ragged.concat`: tensor 2 doesn't fit tensor 0.\nGot tensors[0]={x!r}, tensors[2]={other!r}.\n"
        "All must have the same kind, dtype and non-ragged extents. "
        "Ragged-both tensors must also have the same packed axis, and the same extent along the other."
    )


@pytest.mark.parametrize("kind", ["uniform", "ragged rows", "ragged columns"])
def test_concat_of_other_memory_orders(kind: str) -> None:
    """`transposed` is how a buffer lies in memory, which is no difference in kind."""
    a, b = example(kind, seed=1), example(kind, seed=2)
    turned = b.tensor
    turned = GroupedTensor(turned.data, turned.first_dims, turned.last_dims, transposed=not a.tensor.transposed)
    for tensors, examples in (([a.tensor, turned], (a, b)), ([turned, a.tensor], (b, a))):
        joined = jax.jit(ragged.concat)(tensors)
        assert_groups(joined, [g for e in examples for g in e.groups])
        assert np.all(np.asarray(joined.data)[~np.asarray(joined.mask)] == 0)


def test_concat_zeroes_columns_past_a_group() -> None:
    """Which hold NaN before, next to elements and in the tails."""
    data = np.full((3, 2), np.nan, np.float32)
    data[0, 0], data[1] = 1, (2, 3)
    x = GroupedTensor(jnp.asarray(data), ints(1, 1), ints(1, 2))
    want = np.array([[1, 0], [2, 3], [1, 0], [2, 3], [0, 0], [0, 0]])
    assert np.array_equal(jax.jit(lambda x: ragged.concat([x, x]))(x).data, want)


def test_concat_of_other_packed_axes() -> None:
    """Ragged in both dims, the flag says which axis is packed: such tensors can't be joined."""
    x, y = (GroupedTensor(floats(4, 4), ints(1, 2), ints(2, 1), transposed=t) for t in (False, True))
    with pytest.raises(ValueError, match="tensor 1 doesn't fit tensor 0"):
        ragged.concat([x, y])


def test_concat_of_nothing() -> None:
    """An empty list, arrays, one tensor that is not in a list."""
    for given, got in (([], "[]"), ([jnp.ones((2, 3))], "[f32[2,3]]"), (None, "[None]")):
        with pytest.raises(TypeError) as error:
            ragged.concat(given)
        assert str(error.value) == (
            f"`ragged.concat`: needs a sequence of tensors.\nGot tensors={got}.\n"
            "Pass at least one `GroupedTensor`, in a list."
        )


def test_tensors_without_groups_are_joined_and_packed() -> None:
    none = GroupedTensor(jnp.ones((3, 2)), first_dims=jnp.zeros((0,), jnp.int32))
    joined = ragged.concat([none, none])
    assert (joined.num_groups, joined.shape) == (0, (6, 2))
    assert not np.asarray(joined.data).any()
    some = GroupedTensor(jnp.ones((3, 2)), first_dims=jnp.array([1, 1], jnp.int32))
    assert np.array_equal(ragged.concat([none, some]).data[:, 0], [1, 1, 0, 0, 0, 0])
    empty = GroupedTensor.from_padded(jnp.ones((2, 0, 2)), jnp.zeros(2, jnp.int32), capacity=3)
    assert np.array_equal(empty.data, np.zeros((3, 2)))


def test_from_padded_cuts_its_dims_at_the_capacity() -> None:
    x = GroupedTensor.from_padded(jnp.ones((2, 2, 1)), jnp.array([2, 2], jnp.int32), capacity=3)
    assert np.array_equal(x.first_dims, [2, 1])
    x.validate()


@pytest.mark.parametrize("kind", KINDS)
def test_astype(kind: str) -> None:
    e = example(kind)
    y = e.tensor.astype(jnp.bfloat16)
    assert y.dtype == jnp.bfloat16 and jax.tree.structure(y) == jax.tree.structure(e.tensor)
    assert_groups(y, [g.astype(jnp.bfloat16) for g in e.groups])


# --- repr -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, text",
    [
        ("uniform", "f32[4,3,2]"),
        ("ragged rows", "f32[11,3], first_dims=[3, 0, 4, 1] (8 of 11 rows)"),
        ("ragged columns", "f32[2,11], last_dims=[3, 0, 4, 1] (8 of 11 columns)"),
        ("ragged both", "f32[11,4], first_dims=[3, 0, 4, 1] (8 of 11 rows), last_dims=[2, 3, 0, 1]"),
        (KINDS[4], "f32[4,11], first_dims=[2, 3, 0, 1], last_dims=[3, 0, 4, 1] (8 of 11 columns), transposed"),
    ],
)
def test_repr(kind: str, text: str) -> None:
    assert repr(example(kind).tensor) == f"GroupedTensor({text})"


def test_repr_of_mT() -> None:
    x = example("ragged rows").tensor.astype(jnp.bfloat16).mT
    assert repr(x) == "GroupedTensor(bf16[3,11], last_dims=[3, 0, 4, 1] (8 of 11 columns), transposed)"


def test_repr_of_many_groups() -> None:
    """Up to eight sizes are shown."""
    eight, nine = (GroupedTensor(floats(9, 1), jnp.ones((g,), jnp.int32)) for g in (8, 9))
    assert repr(eight) == "GroupedTensor(f32[9,1], first_dims=[1, 1, 1, 1, 1, 1, 1, 1] (8 of 9 rows))"
    assert repr(nine) == "GroupedTensor(f32[9,1], first_dims=i32[9])"


def test_repr_of_large_sizes() -> None:
    """The total is exact, however wrong the sizes."""
    x = GroupedTensor(floats(9, 1), ints(2**31 - 1, 2**31 - 1))
    assert repr(x) == "GroupedTensor(f32[9,1], first_dims=[2147483647, 2147483647] (4294967294 of 9 rows))"


def test_repr_of_tracers() -> None:
    """Never a tracer's values, nor its name."""
    texts = []

    def f(x: GroupedTensor) -> GroupedTensor:
        texts.append(repr(x))
        return x

    x = example("ragged both").tensor
    jax.jit(lambda t: f(t))(x)
    jax.eval_shape(lambda t: f(t), x)
    jax.vmap(lambda t: f(t))(jax.tree.map(lambda a: jnp.stack([a, a]), x))
    jax.grad(lambda data: f(GroupedTensor(data, ints(3, 0))).sum().sum())(floats(4, 2))
    assert texts == ["GroupedTensor(f32[11,4], first_dims=i32[4], last_dims=i32[4])"] * 3 + [
        "GroupedTensor(f32[4,2], first_dims=[3, 0] (3 of 4 rows))"
    ]


# --- pytree ---------------------------------------------------------------------------------------------------------

LEAVES = [
    None,
    object(),
    0,
    PartitionSpec("x"),
    jax.ShapeDtypeStruct((4,), jnp.float32),
    True,
    np.float32,
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: type(leaf).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_any_leaf(kind: str, leaf: Any) -> None:
    """Unflattening never validates, and constructing skips what is no array. Nothing is converted."""
    x = example(kind).tensor
    leaves, structure = jax.tree.flatten(x)
    assert len(leaves) == 1 + sum(x.ragged)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(jax.tree.unflatten(structure, leaves)), strict=True))
    y = jax.tree.unflatten(structure, [leaf] * len(leaves))
    assert y.data is leaf and y.transposed == x.transposed
    # Also next to a buffer of the wrong rank: a leaf may be anything's placeholder.
    for data in (leaf, floats(1, 2, 3, 4)):
        z = GroupedTensor(data, leaf if leaf is not None else 0, leaf, transposed=True)
        assert z.data is data and z.last_dims is leaf
        assert "GroupedTensor(" in repr(z)


def test_filters() -> None:
    """`eqx.filter`, `partition` and `combine`, which leave None where there was an array."""
    x = example("ragged rows").tensor
    arrays, rest = eqx.partition(x, eqx.is_inexact_array)
    assert rest.data is None and arrays.first_dims is None
    assert repr(eqx.combine(arrays, rest)) == repr(x)
    specs = jax.tree.map(lambda _: PartitionSpec("x"), x)
    assert specs.data == specs.first_dims == PartitionSpec("x")


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
@pytest.mark.parametrize("kind", KINDS)
def test_jit_round_trip(kind: str, jit: Any) -> None:
    e = example(kind)
    y = jit(lambda t: t)(e.tensor)
    assert jax.tree.structure(y) == jax.tree.structure(e.tensor) and repr(y) == repr(e.tensor)
    assert_groups(y, e.groups)


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_and_scan_over_stacked_tensors(kind: str) -> None:
    """Leading batch axes survive; inside, each tensor has its own sizes."""
    examples = [example(kind, seed=1), example(kind, (1, 1, 0, 5), (0, 4, 1, 2), seed=2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[e.tensor for e in examples])
    want = [np.array([g.sum(dtype=np.float64) for g in e.groups]) for e in examples]

    doubled, sums = jax.vmap(lambda t: (t + t, t.sum()))(stacked)
    assert doubled.data.ndim == stacked.data.ndim
    assert doubled.num_groups == (2 if kind == "uniform" else 4)  # without dims, whose axis it is can't be told
    np.testing.assert_allclose(sums, want, rtol=1e-6)
    for i, e in enumerate(examples):
        y = jax.tree.map(lambda leaf, i=i: leaf[i], doubled)
        assert np.array_equal(y.data, e.pack([2 * g for g in e.groups]))

    carry, (scanned, sums) = jax.lax.scan(lambda c, t: (c + 1, (t + t, t.sum())), 0, stacked)
    assert carry == 2 and np.array_equal(scanned.data, doubled.data)
    np.testing.assert_allclose(sums, want, rtol=1e-6)


def test_in_axes_as_a_tensor() -> None:
    """A `GroupedTensor` of ints says which leaves are mapped, and along which axis."""
    e = example("ragged both, packed columns")
    x = e.tensor
    want = np.array([g.sum(dtype=np.float64) for g in e.groups])
    data = jnp.stack([x.data, 2 * x.data], axis=1)
    shared = jax.tree.unflatten(jax.tree.structure(x), [data, x.first_dims, x.last_dims])
    out = jax.vmap(lambda t: t.sum(), in_axes=(GroupedTensor(1, None, None, transposed=True),))(shared)
    np.testing.assert_allclose(out, [want, 2 * want], rtol=1e-6)

    dims = jnp.stack([x.last_dims, ints(3, 0, 4, 0)])
    shared = jax.tree.unflatten(jax.tree.structure(x), [x.data, x.first_dims, dims])
    out = jax.vmap(lambda t: t.sum(), in_axes=(GroupedTensor(None, None, 0, transposed=True),))(shared)
    np.testing.assert_allclose(out, [want, want * [1, 1, 1, 0]], rtol=1e-6)


# --- export ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_export_round_trip(kind: str) -> None:
    """A function of tensors survives serialising: their kind, `transposed`, and what it computes."""
    for x in (example(kind).tensor, example(kind).tensor.mT):
        f = jax.jit(lambda t: {"doubled": 2 * t, "sums": t.sum()})
        want = f(x)
        exported = jax.export.deserialize(jax.export.export(f)(x).serialize())
        got: Any = exported.call(x)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert jax.tree.structure(got["doubled"]) == jax.tree.structure(x)
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
        with pytest.raises(ValueError, match="tree"):
            exported.call(x.mT)


@pytest.mark.parametrize("scaling", ["tensor", "row", (2, 1), "mx"])
def test_export_of_quantised_tensors(scaling: Any) -> None:
    """The scaling survives, block and dtype; so do a route and a recipe."""
    q = ragged.quantize(example("uniform").tensor.mT, jnp.float8_e4m3fn, scaling)
    f = jax.jit(lambda q: (q.mT, q.dequantize().data))
    exported = jax.export.deserialize(jax.export.export(f)(q).serialize())
    outs: Any = exported.call(q)
    got, values = outs
    assert (got.scaling, got.transposed) == (q.scaling.mT, not q.transposed)
    assert jax.tree.structure(got) == jax.tree.structure(q.mT)
    assert np.array_equal(values, q.dequantize().data)


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
@pytest.mark.parametrize("place", [ragged, ragged.nn, ragged.parallel, ragged.tuning], ids=lambda place: place.__name__)
def test_export_of_every_module(place: Any) -> None:
    """Each public pytree goes in and out of a program that is written down, and is what it was."""
    made = modules()
    for cls in vars(place).values():
        if isinstance(cls, type) and issubclass(cls, eqx.Module):
            exported = jax.export.export(jax.jit(lambda module: module))(made[cls])
            again = jax.export.deserialize(exported.serialize())
            assert (again.in_tree, again.out_tree) == (exported.in_tree, exported.out_tree)
            assert jax.tree.structure(((made[cls],), {})) == again.in_tree


def test_export_of_a_function_in_a_module() -> None:
    """A name can be written down, a function can't."""
    moe = layer_of(3, 4, 2, 1, activation=jax.nn.relu, key=jax.random.key(0))
    exported = jax.export.export(jax.jit(lambda moe: moe.router))(moe)
    problem = "`Exported.serialize()`: a static field holds the function `relu`, which can't be serialised.\n"
    check_error(
        exported.serialize,
        TypeError,
        problem + "Pass the activation by name, as in `ragged.nn.Experts` with `activation='silu'`.",
    )


@pytest.mark.long
def test_export_of_layers() -> None:
    """What a layer computes, with a history, and what a router did."""
    x, key = jnp.ones((4, 3)), jax.random.key(0)
    layer, moe = ragged.nn.GroupedLinear(3, 2, 2, recipe="mxfp8", key=key), layer_of(3, 4, 2, 1, key=key)
    f = jax.jit(lambda layer, moe, x: (layer, moe(x)))
    got: Any = jax.export.deserialize(jax.export.export(f)(layer, moe, x).serialize()).call(layer, moe, x)
    assert jax.tree.structure(got) == jax.tree.structure((layer, moe(x)))
    np.testing.assert_array_equal(got[1][0], moe(x)[0])
    np.testing.assert_array_equal(got[1][1].rows, moe(x)[1].rows)
    recipe = ragged.Recipe.preset("delayed").unsealed()
    again: Any = jax.export.deserialize(jax.export.export(jax.jit(lambda r: r))(recipe).serialize()).call(recipe)
    assert again.wgrad == recipe.wgrad


# --- cotangents and stacks ------------------------------------------------------------------------------------------

NO_GROUPS = "`GroupedTensor`: a cotangent or tangent has no groups, so only elementwise operations are defined.\nGot g="
STACK = "`GroupedTensor`: this is a stack of tensors, with a leading batch axis.\nGot stack="
NEED_GROUPS: dict[str, Callable[[GroupedTensor], Any]] = {
    "len": len,
    "index": lambda t: t[0],
    "list": list,
    "to_list": lambda t: t.to_list(),
    "to_padded": lambda t: t.to_padded(3),
    "mask": lambda t: t.mask,
    "offsets": lambda t: t.offsets,
    "group_ids": lambda t: t.group_ids,
    "positions": lambda t: t.positions,
    "packed_dims": lambda t: t.packed_dims,
    "capacity": lambda t: t.capacity,
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(-1),
    "max": lambda t: t.max(-2),
    "softmax": lambda t: t.softmax(),
    "per_group": lambda t: t * ragged.per_group(jnp.ones(4)),
    "per_row": lambda t: t * ragged.per_row(jnp.ones(4)),
    "concat": lambda t: ragged.concat([t, t]),
}


def cotangents(e: Example) -> list[GroupedTensor]:
    """Of the sum of an example's squares: dims None, and dims float0."""

    def loss(t: GroupedTensor) -> Array:
        return jnp.sum(t.map(jnp.square).data)

    return [eqx.filter_grad(loss)(e.tensor), jax.grad(loss, allow_int=True)(e.tensor)]


@pytest.mark.parametrize("kind", RAGGED)
def test_cotangents(kind: str) -> None:
    """What is elementwise works on the buffer, and with the tensor itself gives its groups, with a zero tail."""
    e = example(kind)
    x, groups = e.tensor, [2 * g for g in e.groups]
    for g in cotangents(e):
        assert g.kind == "cotangent" and g.is_cotangent and not x.is_cotangent
        outs: list[tuple[Any, float]] = [
            (g * 2, 2),
            (0.5 * g, 0.5),
            (g + g, 2),
            (-g, -1),
            (g.map(lambda d: d * 3), 3),
            (g - g / 2, 0.5),
        ]
        for out, scale in outs:
            assert out.is_cotangent and jax.tree.structure(out) == jax.tree.structure(g)
            np.testing.assert_allclose(out.data, e.pack([scale * d for d in groups]), rtol=1e-6)
        dirty = g.with_data(jnp.where(e.mask, g.data, jnp.nan))
        for cotangent in (g, dirty):
            steps: list[tuple[Any, int]] = [(x - cotangent / 4, 1), (cotangent / 4 - x, -1)]
            for out, sign in steps:
                assert jax.tree.structure(out) == jax.tree.structure(x)
                want = [sign * (d - 0.5 * d) for d in e.groups]
                assert np.array_equal(out.data, e.pack(want).astype(np.float32))
        assert (g.astype(jnp.bfloat16) * 2).dtype == jnp.bfloat16
        assert jax.tree.structure(g.mT.mT) == jax.tree.structure(g)
        stepped = eqx.apply_updates(x, jax.tree.map(lambda d: -d / 4, eqx.filter(g, eqx.is_inexact_array)))
        assert_groups(stepped, [d / 2 for d in e.groups])

    # A tangent, made by hand, and what `jvp` returns.
    zeros = [None if d is None else np.zeros(d.shape, jax.dtypes.float0) for d in (x.first_dims, x.last_dims)]
    tangent = GroupedTensor(jnp.ones(x.shape), *zeros, transposed=x.transposed)
    out = jax.jvp(lambda t: t * t, (x,), (tangent,))[1]
    assert out.is_cotangent
    assert_groups(x - out, [-d for d in e.groups])


@pytest.mark.parametrize("kind", RAGGED)
def test_gradients_through_cotangents(kind: str) -> None:
    """NaN in a cotangent's tail reaches no gradient."""
    e = example(kind)
    g = cotangents(e)[0]

    def loss(data: Array) -> Array:
        return jnp.sum((e.tensor / g.with_data(data)).data)

    gradient = jax.grad(loss)(jnp.where(e.mask, g.data, jnp.nan))
    np.testing.assert_allclose(gradient, e.pack([-0.25 / d for d in e.groups]), rtol=1e-6)


@pytest.mark.parametrize("kind", RAGGED)
def test_what_cotangents_refuse(kind: str) -> None:
    """What needs groups, with the hint."""
    for g in cotangents(example(kind)):
        for name, use in (*NEED_GROUPS.items(), ("quantize", lambda t: ragged.quantize(t, jnp.int8, "row"))):
            if name == "len" and (g.first_dims is not None or g.last_dims is not None):
                continue  # float0 dims have a length
            with pytest.raises(TypeError) as error:
                use(g)
            assert str(error.value) == (
                f"{NO_GROUPS}{g!r}.\nUse the groups of the tensor that was differentiated: `x - g`, or "
                "`GroupedTensor(g.data, x.first_dims, x.last_dims, transposed=x.transposed)`."
            )
        with pytest.raises(ValueError, match=r"must keep the rank and the extent of axes \[0, 1\]"):
            g.map(lambda d: d[:1])
        with pytest.raises(TypeError, match="a plain array has no groups to match"):
            _ = g + jnp.ones(7)
        for other in (GroupedTensor(floats(3, 3), ints(1, 2)), g.mT, with_fields(g.mT, data=g.data)):
            with pytest.raises(ValueError, match="tensors have different structures"):
                _ = g + other
        with pytest.raises(TypeError, match="a cotangent or tangent"):
            ragged.matmul(g, jnp.ones((4, g.shape[-1], 2)))


@pytest.mark.parametrize("kind", RAGGED)
def test_what_stacks_refuse(kind: str) -> None:
    """One error, that says to map; and mapping works."""
    x = example(kind).tensor
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), x)
    assert stack.is_stack and not x.is_stack
    shared = with_fields(stack, first_dims=x.first_dims, last_dims=x.last_dims)  # only the buffer has the axis
    assert shared.is_stack == (x.packed_axis == -1)  # packed rows may have more dims
    for t in (stack, shared) if shared.is_stack else (stack,):
        for name, use in (
            *NEED_GROUPS.items(),
            ("map", lambda t: t.map(jnp.exp)),
            ("*", lambda t: t * 2),
            ("+", lambda t: t + t),
            ("x +", lambda t: x + t),
        ):
            with pytest.raises(ValueError) as error:
                use(t)
            if name != "x +":
                assert str(error.value) == (
                    f"{STACK}{t!r}.\nMap a function over it, as in `jax.vmap(lambda x: x.sum())(stack)`; "
                    "its first tensor is `jax.tree.map(lambda leaf: leaf[0], stack)`."
                )
    sums = jax.vmap(lambda t: t.sum())(stack)
    assert np.array_equal(sums[1], x.sum())
    one = jax.tree.map(lambda leaf: leaf[0], stack)
    assert repr(one) == repr(x) and len(one) == 4


# --- annotations ----------------------------------------------------------------------------------------------------


@jaxtyped(typechecker=beartype)
def annotated(
    x: Float[GroupedTensor, "tokens d"], w: Float[GroupedTensor, "g d n"], sizes: Int[Array, " g"]
) -> Float[GroupedTensor, "tokens n"]:
    return GroupedTensor(jnp.zeros((x.shape[0], w.shape[-1])), sizes)


def test_annotations() -> None:
    """`shape` and `dtype` are the buffer's, and axis names are bound across arguments, the group axis too."""
    x = GroupedTensor(floats(8, 3), ints(3, 4))
    w = GroupedTensor(floats(2, 3, 5))
    assert annotated(x, w, x.first_dims).shape == (8, 5)
    assert jax.jit(annotated)(x, w, x.first_dims).shape == (8, 5)
    wrong = [
        (GroupedTensor(floats(8, 4), x.first_dims), w, x.first_dims),  # d
        (x, GroupedTensor(floats(3, 3, 5)), x.first_dims),  # g
        (x, w, ints(3, 4, 0)),  # g
        (x.astype(jnp.int32), w, x.first_dims),  # dtype
        (x, x, x.first_dims),  # rank
        (x.data, w, x.first_dims),  # a plain array
    ]
    for arguments in wrong:
        with pytest.raises(TypeCheckError):
            annotated(*arguments)
    # The result is checked against the same names.
    with pytest.raises(TypeCheckError, match="return"):
        jaxtyped(typechecker=beartype)(_transposing)(x)


def _transposing(x: Float[GroupedTensor, "tokens d"]) -> Float[GroupedTensor, "tokens d"]:
    return x.mT


# --- errors at construction -----------------------------------------------------------------------------------------

RANK2 = "A ragged buffer has no group axis: its groups are packed along the ragged axis."
RANK3 = "Without `first_dims` and `last_dims` the tensor is uniform and needs a leading group axis."
MAPPED = "A stack of tensors is made by `jax.vmap(GroupedTensor)`."


# --- misuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "misuse",
    [
        jnp.exp,
        jnp.sum,
        jnp.asarray,
        jax.nn.relu,
        np.asarray,
        np.array,
        np.exp,
        np.sum,
        np.mean,
        np.linalg.norm,
        float,
        bool,
        jnp.zeros_like,
        np.ones_like,
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
    ],
)
@pytest.mark.parametrize(
    "tensor",
    [
        GroupedTensor(
            floats(8, 2), ints(2, 2)
        ),  # of one size: NumPy would take the groups for an array, and drop the tail
        GroupedTensor(floats(8, 2), ints(2, 3)),
        GroupedTensor(floats(2, 8, 2)),
    ],
    ids=repr,
)
def test_misuse_fails_loudly(tensor: GroupedTensor, misuse: Callable[[Any], Any]) -> None:
    """Nothing takes it for an array and drops its groups."""
    with pytest.raises(TypeError if misuse is not bool else ValueError):
        misuse(tensor)


# --- validate -------------------------------------------------------------------------------------------------------

# (kind, sizes along the packed axis, sizes along the other, the first bad group, where, which)
BAD = [
    ("ragged rows", (3, -1, 4, 1), OTHERS, 1, "first_dims"),
    ("ragged rows", (3, 5, 4, -1), OTHERS, 2, "first_dims"),
    ("ragged rows", (12, 0, 0, 0), OTHERS, 0, "first_dims"),
    ("ragged rows", (4, 4, 0, 4), OTHERS, 3, "first_dims"),
    ("ragged rows", (3, 2**31 - 1, 2**31 - 1, 3), OTHERS, 1, "first_dims"),  # the sum wraps around to 4
    ("ragged rows", (-(2**31), -(2**31), 1, 1), OTHERS, 0, "first_dims"),
    ("ragged columns", (3, 5, 4, 0), OTHERS, 2, "last_dims"),
    ("ragged both", (3, 5, 4, 0), OTHERS, 2, "first_dims"),
    ("ragged both", SIZES, (2, 5, 0, 1), 1, "last_dims"),
    ("ragged both", SIZES, (2, 4, -3, 1), 2, "last_dims"),
    ("ragged both, packed columns", (3, 5, 4, 0), OTHERS, 2, "last_dims"),
    ("ragged both, packed columns", SIZES, (2, 4, 4, 2**31 - 1), 3, "first_dims"),
]


def with_sizes(kind: str, sizes: tuple[int, ...], others: tuple[int, ...]) -> GroupedTensor:
    x = example(kind).tensor
    packed, other = ints(*sizes), ints(*others)
    first, last = (packed, other) if x.packed_axis == -2 else (other, packed)
    return GroupedTensor(x.data, first if x.ragged[0] else None, last if x.ragged[1] else None, transposed=x.transposed)


@pytest.mark.parametrize("kind, sizes, others, group, name", BAD)
def test_validate(kind: str, sizes: tuple[int, ...], others: tuple[int, ...], group: int, name: str) -> None:
    """Names the first bad group, its size and the extent; for traced sizes too, at run time."""
    x = with_sizes(kind, sizes, others)
    packed = (name == "first_dims") == (x.packed_axis == -2)
    above = f"the sum of the sizes up to it is above the capacity of {CAPACITY}"
    above = above if packed else "it is above the buffer's extent of 4"
    values = sizes if packed else others
    problem = "is negative" if values[group] < 0 else f"is too large: {above}"
    with pytest.raises(ValueError) as error:
        x.validate()
    assert str(error.value) == (
        f"`GroupedTensor.validate`: the size {values[group]} of group {group} in `{name}` {problem}.\n"
        f"Got x={x!r}.\n"
        "Correct the sizes, or make the buffer larger."
    )
    extent = CAPACITY if packed else 4
    size = f"size {values[group]}" if values[group] <= extent else f"size, {extent + 1} or more,"
    size = "size" if values[group] < 0 else size
    with pytest.raises(eqx.EquinoxRuntimeError) as traced:
        eqx.filter_jit(lambda t: t.validate())(x)
    assert (
        f"`GroupedTensor.validate`: the {size} of group {group} in `{name}` {problem}.\n"
        "Correct the sizes, or make the buffer larger.\n"
    ) in str(traced.value)


@pytest.mark.parametrize("kind", KINDS)
def test_validate_passes(kind: str) -> None:
    """Sound sizes come through, the largest that fit among them."""
    e = example(kind)
    assert_groups(e.tensor.validate(), e.groups)
    assert_groups(eqx.filter_jit(lambda t: t.validate())(e.tensor), e.groups)
    full = with_sizes(kind, (0, 11, 0, 0), (4, 0, 4, 4))
    assert repr(full.validate()) == repr(full) == repr(eqx.filter_jit(lambda t: t.validate())(full))


@pytest.mark.long
def test_validate_hangs_on_the_dims() -> None:
    """What is promised under `jit`: whatever uses the result's dims fails; what uses its buffer alone does not."""
    x = with_sizes("ragged rows", (3, 9, 0, 0), OTHERS)
    uses = [
        lambda t: t.first_dims,
        lambda t: t.offsets,
        lambda t: t.mask,
        lambda t: t.sum(),
        lambda t: (t + 1).data,
        lambda t: t.softmax().mT.data,
        lambda t: ragged.concat([t, t]).data,
        lambda t: t.to_padded(3),
        lambda t: jax.grad(lambda d: GroupedTensor(d, t.first_dims).sum().sum())(t.data),
    ]
    for use in uses:
        with pytest.raises(eqx.EquinoxRuntimeError, match="group 1 in `first_dims`"):
            eqx.filter_jit(lambda t, use=use: use(t.validate()))(x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="group 1 in `first_dims`"):
        jax.block_until_ready(jax.jit(lambda t: t.validate().sum())(x))
    assert np.array_equal(jax.jit(lambda t: t.validate().data)(x), x.data, equal_nan=True)
    assert jax.jit(lambda t: (t.validate(), 1)[1])(x) == 1


def test_validate_in_buffers_too_large_for_the_codes_of_its_messages() -> None:
    """2³⁰ rows of 8 groups: sizes from 2²⁸ - 3 on are not told apart, but the group is."""
    rows = jax.ShapeDtypeStruct((2**30, 0), jnp.float32)
    bad = jnp.full((8,), 2**27, jnp.int32).at[5].set(2**30)

    def sizes(dims: Array, large: Array) -> Array:
        data = jnp.zeros(rows.shape, rows.dtype)
        return GroupedTensor(data, dims.at[5].add(large)).validate().packed_dims

    np.testing.assert_array_equal(eqx.filter_jit(sizes)(bad, jnp.int32(2**27 - 2**30)), jnp.full(8, 2**27))
    with pytest.raises(eqx.EquinoxRuntimeError, match=f"the size, {2**28 - 3} or more, of group 5 in `first_dims`"):
        eqx.filter_jit(sizes)(bad, jnp.int32(0))


def test_validate_of_sizes_far_out_of_range() -> None:
    """Traced ones: the first bad group is named, however negative it is, and where sums wrap around."""

    @eqx.filter_jit
    def sizes(dims: Array) -> Array:
        return GroupedTensor(jnp.ones((8, 1)), dims).validate().packed_dims

    with pytest.raises(eqx.EquinoxRuntimeError, match="the size of group 1 in `first_dims` is negative"):
        sizes(ints(3, -70, 1))
    with pytest.raises(eqx.EquinoxRuntimeError, match="of group 1 in `first_dims` is too large"):
        sizes(ints(3, 2**31 - 1, 2**31 - 1))


def test_validate_under_vmap() -> None:
    """One bad tensor of a batch is enough."""
    good, bad = example("ragged rows").tensor, with_sizes("ragged rows", (3, 9, 0, 0), OTHERS)
    validate = eqx.filter_jit(jax.vmap(lambda t: t.validate().sum()))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), good, good)
    np.testing.assert_allclose(validate(stacked)[0], good.sum())
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), good, bad)
    with pytest.raises(eqx.EquinoxRuntimeError, match="group 1 in `first_dims`"):
        validate(stacked)


@pytest.mark.parametrize("kind, sizes, others, group, name", BAD)
def test_wrong_sizes_stay_inside_the_buffer(
    kind: str, sizes: tuple[int, ...], others: tuple[int, ...], group: int, name: str
) -> None:
    """Without `validate`, a negative size counts as 0, and what reaches too far is cut off."""
    x = with_sizes(kind, sizes, others)
    ends = [0]
    for size in sizes:
        ends.append(min(CAPACITY, ends[-1] + max(0, size)))
    assert x.packed_axis is not None
    width = x.shape[-3 - x.packed_axis]
    widths = [min(max(0, n), width) for n in others] if x.kind == "ragged both" else [width] * 4
    assert x.offsets.tolist() == ends
    shapes = [(n, w) for n, w in zip(np.diff(ends).tolist(), widths, strict=True)]
    shapes = shapes if x.packed_axis == -2 else [shape[::-1] for shape in shapes]
    assert [g.shape for g in x] == shapes
    assert int(x.mask.sum()) == sum(a * b for a, b in shapes)
    ones = GroupedTensor(jnp.ones(x.shape), x.first_dims, x.last_dims, transposed=x.transposed)
    assert ones.sum().tolist() == [a * b for a, b in shapes]
    assert float(ones.to_padded(5).sum()) == sum(min(n, 5) * w for n, w in zip(np.diff(ends), widths, strict=True))


def test_a_stack_of_tensors_is_cast_and_transposed_whole() -> None:
    """Layers' weights and batches, stacked for `scan` and `vmap`, keep their axes in front."""
    rows = GroupedTensor(jnp.ones((6, 2)), first_dims=jnp.array([1, 4], jnp.int32))
    stack = jax.tree.map(lambda x: jnp.stack([x, x, x]), rows)
    assert stack.astype(jnp.bfloat16).shape == (3, 6, 2)
    assert stack.mT.shape == (3, 2, 6)
    assert stack.mT.num_groups == 2
    assert stack.mT.last_dims is stack.first_dims


def test_the_repr_of_a_gradient() -> None:
    """Whose dims have no values to show: dtype float0, or None."""
    x = GroupedTensor(jnp.ones((6, 2)), first_dims=jnp.array([1, 4], jnp.int32))
    grad = jax.grad(lambda x: jnp.sum(x.data), allow_int=True)(x)
    assert repr(grad) == "GroupedTensor(f32[6,2], first_dims=f0[2])"
    assert repr(eqx.filter_grad(lambda x: jnp.sum(x.data))(x)) == "GroupedTensor(f32[6,2])"
