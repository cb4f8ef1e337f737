"""Padded arrays, lists and joined tensors hold the groups of any sizes, and nothing of a tail; so do derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ragged
from ragged import GroupedTensor
from tests.cases import compilations, split
from tests.contract.draws import size_table, values
from tests.contract.loop import Place, Term, places
from tests.tensor.examples import KINDS, assert_groups, example, floats, groups_of, ints

G, LONGEST, FILL = 5, 9, 7.0
# The buffers of two tensors that are joined: how they are packed, and the axis of padded rows.
TERMS = {
    "ragged rows": (Term("mn", "m", "m", (60, 3)), Term("mn", "m", "m", (31, 3))),
    "ragged columns": (Term("mn", "n", "n", (3, 60)), Term("mn", "n", "n", (3, 31))),
    "ragged both": (Term("mn", "mn", "m", (60, 6)), Term("mn", "mn", "m", (31, 6))),
    "ragged both, packed columns": (Term("mn", "mn", "n", (6, 60)), Term("mn", "mn", "n", (6, 31))),
}
Sizes = dict[str, np.ndarray]


def same(got: Any, want: Any) -> None:
    """The same fields, bit for bit, in arrays of JAX."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(one, Array) and one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def with_nan(data: np.ndarray, where: list[Place | None]) -> np.ndarray:
    """A buffer with NaN outside of the groups."""
    out = np.full_like(data, np.nan)
    for at in where:
        out[at] = data[at]
    return out


def padded(data: np.ndarray, where: list[Place | None], is_turned: bool, longest: int, fill: float) -> np.ndarray:
    """The groups side by side, cut off where they are longer."""
    blocks = []
    for at in where:
        group = data[at].T if is_turned else data[at]
        block = np.full((longest, data.T.shape[1] if is_turned else data.shape[1]), fill, data.dtype)
        block[: min(len(group), longest), : group.shape[1]] = group[:longest]
        blocks.append(block.T if is_turned else block)
    return np.stack(blocks)


def unpadded(blocks: np.ndarray, shape: Any, where: list[Place | None], is_turned: bool) -> np.ndarray:
    """What `padded` takes from a buffer, put back."""
    out = np.zeros(shape, blocks.dtype)
    for block, at in zip(blocks, where, strict=True):
        mine = (out[at].T if is_turned else out[at])[: block.shape[1] if is_turned else block.shape[0]]
        mine[:] = (block.T if is_turned else block)[: mine.shape[0], : mine.shape[1]]
    return out


@pytest.mark.parametrize("kind", split([*TERMS][-1:], [*TERMS][:-1]))
def test_conversions(kind: str) -> None:
    """`to_padded`, `from_padded` and `concat` by any sizes, and their derivatives; what lies outside of groups reaches
    nothing."""
    terms, rng = TERMS[kind], np.random.default_rng(0)
    letter, is_turned = terms[0].packed, terms[0].packed == "n"

    def tensor(data: Array, sizes: dict[str, Array]) -> GroupedTensor:
        return GroupedTensor(data, sizes.get("m"), sizes.get("n"), transposed=kind.endswith("packed columns"))

    def convert(data: list[Array], sizes: list[dict[str, Array]]) -> dict[str, Any]:
        x, y = map(tensor, data, sizes)
        found = {"padded": x.to_padded(LONGEST, FILL), "joined": ragged.concat([x, y, x]).data, "cut": x.to_padded(2)}
        if kind == "ragged rows":
            back = GroupedTensor.from_padded(found["padded"], sizes[1]["m"], capacity=20)
            found |= {"packed": back.data, "packed sizes": back.first_dims}
        return found

    @jax.jit
    def run(data: list[Array], sizes: list[dict[str, Array]], cts: dict[str, Array]) -> Any:
        def both(data: list[Array]) -> Any:
            found = convert(data, sizes)
            return {name: found[name] for name in cts}, found

        _, pull, found = jax.vjp(both, data, has_aux=True)
        return found, pull(cts)[0], ragged.concat([*map(tensor, data, sizes)])

    data = [values(rng, term.shape, "float32") for term in terms]
    table = {z: size_table(G, 60, 8, rng) for z in terms[0].ragged}
    shapes = jax.eval_shape(convert, data, [{z: jnp.zeros(G, jnp.int32) for z in terms[0].ragged} for _ in terms])
    cts = {n: values(rng, x.shape, "float32") for n, x in shapes.items() if n in ("padded", "joined")}
    draws = [{z: each[order] for z, each in table.items()} for order in range(len(table[letter]))]
    for sizes in zip(draws, [*draws[3:], *draws[:3]], strict=True):
        where = [places({"x": term}, its, G)["x"] for term, its in zip(terms, sizes, strict=True)]
        given = [*map(with_nan, data, where)]
        got, (d_x, d_y), both = run(given, list(sizes), cts)
        offsets = np.asarray(both.offsets)
        got, d_x, d_y = jax.tree.map(np.asarray, (got, d_x, d_y))
        for numpy in (True, False):  # Outside of `jit`, groups are put together on the host.
            on_host: Any = given, list(sizes), got["padded"], sizes[1].get("m")
            data_, sizes_, padded_, lengths_ = on_host if numpy else jax.device_put(on_host)
            tensors = [*map(tensor, data_, sizes_)]
            with compilations() as compiled:
                same(ragged.concat(tensors), both)
                if kind == "ragged rows" and (got["packed sizes"] == sizes[1]["m"]).all():
                    back = GroupedTensor.from_padded(padded_, lengths_, capacity=20)
                    same((back.data, back.first_dims), jax.device_put((got["packed"], got["packed sizes"])))
                elif kind == "ragged rows":  # Under `jit`, they are clipped.
                    with pytest.raises(ValueError, match=r"in `first_dims` is (negative|too large)"):
                        GroupedTensor.from_padded(padded_, lengths_, capacity=20)
            assert not compiled
        for name, longest, fill in (("padded", LONGEST, FILL), ("cut", 2, 0)):
            np.testing.assert_array_equal(got[name], padded(data[0], where[0], is_turned, longest, fill))
        # Joined, the groups follow one another without the tails between them: of both, and of the first again.
        axis, joined, start = "mn".index(letter), np.zeros_like(got["joined"]), 0
        d_want = [np.zeros_like(each) for each in data]
        for which in (0, 1, 0):
            for at in where[which]:
                part = data[which][at]
                index = [slice(0, n) for n in part.shape]
                index[axis] = slice(start, start + part.shape[axis])
                joined[tuple(index)] = part
                d_want[which][at] += cts["joined"][tuple(index)]
                start += part.shape[axis]
        np.testing.assert_array_equal(got["joined"], joined)
        assert offsets[-1] == start - sum(data[0][at].shape[axis] for at in where[0])
        d_want[0] += unpadded(cts["padded"], data[0].shape, where[0], is_turned)
        np.testing.assert_allclose(d_x, d_want[0], rtol=1e-6)
        np.testing.assert_array_equal(d_y, d_want[1])
        if kind == "ragged rows":
            lengths = np.clip(sizes[1]["m"].astype(np.int64), 0, LONGEST)
            ends = np.minimum(np.cumsum(lengths), 20)
            lengths = np.diff(ends, prepend=0)
            packed = np.concatenate([*(block[:n] for block, n in zip(got["padded"], lengths, strict=True))])
            np.testing.assert_array_equal(got["packed sizes"], lengths)
            np.testing.assert_array_equal(got["packed"], np.pad(packed, [(0, 20 - len(packed)), (0, 0)]))


@pytest.mark.parametrize("kind", split(KINDS[-1:], KINDS[:-1]))
def test_concat_of_other_memory_orders(kind: str) -> None:
    """One tensor and several, seen through `mT`; `transposed` is how a buffer lies in memory, which is no difference
    in kind, unless it says which of two ragged axes is packed."""
    a, b = example(kind, seed=1), example(kind, (0, 1, 2, 5), (3, 2, 0, 1), seed=2)
    x, y, concat = a.tensor, b.tensor, jax.jit(ragged.concat)
    assert_groups(groups_of(concat([x])), a.groups)
    turned = concat([x.mT, y.mT])
    assert turned.kind == x.mT.kind
    assert_groups(groups_of(turned), [group.T for group in (*a.groups, *b.groups)])
    other = GroupedTensor(y.data, y.first_dims, y.last_dims, transposed=not y.transposed)
    if kind.startswith("ragged both"):
        with pytest.raises(ValueError, match="tensor 1 doesn't fit tensor 0"):
            ragged.concat([x, other])
    else:
        assert_groups(groups_of(concat([x, other])), [*a.groups, *b.groups])
        assert_groups(groups_of(concat([other, x])), [*b.groups, *a.groups])


def test_concat_of_more_dims() -> None:
    """On the host as in a program; the last dims are cut off, not the dims before them."""
    dims = jnp.array([3, 0, 4], jnp.int32), jnp.array([5, 1, 2], jnp.int32)
    x = GroupedTensor(jnp.ones((9, 2, 6)), *dims)
    same(ragged.concat([x, x]), jax.jit(ragged.concat)([x, x]))
    assert float(ragged.concat([x, x]).data.sum()) == 2 * 2 * (3 * 5 + 4 * 2)


def test_what_does_not_fit_is_not_joined() -> None:
    """Another kind, extent, dtype or rank; nothing; what is no tensor."""
    x = GroupedTensor(floats(8, 2), ints(3, 4))
    others = [
        GroupedTensor(floats(2, 8), None, ints(3, 4)),
        GroupedTensor(floats(8, 3), ints(3, 4)),
        x.astype(jnp.bfloat16),
        GroupedTensor(floats(2, 8, 2)),
    ]
    for other in others:
        with pytest.raises(ValueError, match="tensor 2 doesn't fit tensor 0"):
            ragged.concat([x, x, other])
    nothing: list[Any] = [[], [jnp.ones((2, 3))], None]
    for each in nothing:
        with pytest.raises(TypeError, match="needs a sequence of tensors"):
            ragged.concat(each)


@pytest.mark.parametrize(
    "which, shapes, shape",
    [
        ("first", [(3, 2), (0, 2), (5, 2)], (8, 2)),
        ("last", [(2, 3), (2, 0), (2, 5)], (2, 8)),
        ("both", [(3, 2), (0, 4), (5, 0)], (8, 4)),
    ],
)
def test_from_list(which: str, shapes: list[tuple[int, int]], shape: tuple[int, int]) -> None:
    """The groups, packed, with zeros around them; under `jit` too, as the shapes are static."""
    groups = [values(np.random.default_rng(0), s, "float32") for s in shapes]
    along, data = int(which == "last"), np.zeros((2, 12) if which == "last" else (12, shape[1]), np.float32)
    for group, end in zip(groups, np.cumsum([s[along] for s in shapes]), strict=True):
        (data.T if along else data)[end - group.shape[along] : end, : group.shape[1 - along]] = (
            group.T if along else group
        )
    make = jax.jit(lambda gs: [GroupedTensor.from_list(gs, ragged=which, capacity=c) for c in (None, 12)])
    for x, capacity in zip(make(groups), (8, 12), strict=True):
        assert not x.transposed and x.ragged == (which != "last", which != "first")
        assert np.array_equal(x.data, data[:, :capacity] if along else data[:capacity])
        for dims, axis in ((x.first_dims, 0), (x.last_dims, 1)):
            assert dims is None or dims.tolist() == [s[axis] for s in shapes]
    assert make(groups)[0].shape == shape
    for each in (groups, jax.device_put(groups), [group.astype(np.float64) for group in groups]):
        with compilations() as compiled:
            found = [GroupedTensor.from_list(each, ragged=which, capacity=c) for c in (None, 12)]
        assert not compiled
        same(found, make(groups))


def test_arrays_on_devices() -> None:
    """What is put together stays on the arrays' device, or is sharded as they are."""
    device, mesh = jax.devices()[3], jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    groups = [floats(3, 2), floats(5, 2)]
    x = GroupedTensor.from_list(jax.device_put(groups, device))
    padded = GroupedTensor.from_padded(jax.device_put(floats(2, 4, 2), device), np.array([3, 1]))
    for each in (x, padded, ragged.concat([x, padded])):
        assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(each))
    shards = jax.device_put(GroupedTensor.from_list(groups), NamedSharding(mesh, PartitionSpec()))
    same(ragged.concat([shards, shards]), ragged.concat([GroupedTensor.from_list(groups)] * 2))
    rows = jax.device_put(floats(4, 4, 2), NamedSharding(mesh, PartitionSpec("a")))
    lengths = np.array([3, 0, 4, 1])
    same(GroupedTensor.from_padded(rows, lengths), GroupedTensor.from_padded(floats(4, 4, 2), lengths))
    assert GroupedTensor.from_padded(rows, lengths).offsets.tolist() == [0, 3, 3, 7, 8]


def test_lists_that_make_no_tensor() -> None:
    for groups in ([floats(2)], [floats(2, 3), jnp.ones((2, 3), jnp.int32)]):
        with pytest.raises(ValueError, match="needs at least one matrix, all of one dtype"):
            GroupedTensor.from_list(groups)


def test_extents_of_zero() -> None:
    """No groups, no rows, no columns."""

    @jax.jit
    def run() -> Any:
        none, some = GroupedTensor(floats(3, 2), ints()), GroupedTensor(floats(3, 2), ints(1, 1))
        padded = GroupedTensor(floats(0, 2), ints(0, 0)).to_padded(2, 5)
        packed = GroupedTensor.from_padded(floats(2, 0, 2), ints(0, 0), capacity=3)
        return ragged.concat([none, none]), ragged.concat([none, some]).data, padded, packed.data

    none, some, padded, packed = run()
    assert (none.num_groups, none.shape) == (0, (6, 2))
    assert some[:, 0].tolist() == [1, 1, 0, 0, 0, 0]
    assert padded.tolist() == [[[5.0] * 2] * 2] * 2 and packed.tolist() == [[0.0] * 2] * 3
    assert jax.eval_shape(lambda: GroupedTensor.from_padded(floats(2, 3, 0), ints(1, 2)).data).shape == (6, 0)
    for sizes in ([-2, 1], [0, 4], [2**40, 1]):  # 2**40: more than int32 can hold
        with pytest.raises(ValueError, match=f"the size {max(sizes, key=abs)} of group"):
            GroupedTensor.from_padded(floats(2, 3, 2), np.array(sizes))
