"""`validate` finds wrong sizes, before and while a program runs; without it, wrong sizes stay inside of the buffer."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from ragged import GroupedTensor
from tests.cases import split
from tests.tensor.examples import CAPACITY, KINDS, OTHERS, SIZES, assert_groups, example, floats, ints

# Sizes along the packed axis, sizes along the other, the first bad group, and which sizes have it.
BAD = {
    "ragged rows": [
        ((3, -1, 4, 1), OTHERS, 1, "first_dims"),
        ((3, 5, 4, -1), OTHERS, 2, "first_dims"),
        ((3, -70, 1, 0), OTHERS, 1, "first_dims"),
        ((12, 0, 0, 0), OTHERS, 0, "first_dims"),
        ((4, 4, 0, 4), OTHERS, 3, "first_dims"),
        ((3, 2**31 - 1, 2**31 - 1, 3), OTHERS, 1, "first_dims"),  # the sum wraps around to 4
        ((-(2**31), -(2**31), 1, 1), OTHERS, 0, "first_dims"),
    ],
    "ragged columns": [((3, 5, 4, 0), OTHERS, 2, "last_dims")],
    "ragged both": [
        ((3, 5, 4, 0), OTHERS, 2, "first_dims"),
        (SIZES, (2, 5, 0, 1), 1, "last_dims"),
        (SIZES, (2, 4, -3, 1), 2, "last_dims"),
    ],
    "ragged both, packed columns": [
        ((3, 5, 4, 0), OTHERS, 2, "last_dims"),
        (SIZES, (2, 4, 4, 2**31 - 1), 3, "first_dims"),
    ],
}


def with_sizes(kind: str, sizes: tuple[int, ...], others: tuple[int, ...]) -> GroupedTensor:
    x = example(kind).tensor
    packed, other = ints(*sizes), ints(*others)
    first, last = (packed, other) if x.packed_axis == -2 else (other, packed)
    return GroupedTensor(x.data, first if x.ragged[0] else None, last if x.ragged[1] else None, transposed=x.transposed)


@pytest.mark.parametrize("kind", BAD)
def test_validate(kind: str) -> None:
    """Names the first bad group, its size and the extent, for known sizes at once, for traced ones at run time, up to
    the ends of int32; sound sizes come through."""
    checked = eqx.filter_jit(lambda t: t.validate())
    for sizes, others, group, name in BAD[kind]:
        x = with_sizes(kind, sizes, others)
        packed = (name == "first_dims") == (x.packed_axis == -2)
        size, extent = (sizes if packed else others)[group], CAPACITY if packed else 4
        above = f"the sum of the sizes up to it is above the capacity of {CAPACITY}"
        above = above if packed else "it is above the buffer's extent of 4"
        problem = f"of group {group} in `{name}` " + ("is negative" if size < 0 else f"is too large: {above}")
        hint = "Correct the sizes, or make the buffer larger."
        with pytest.raises(ValueError) as error:
            x.validate()
        assert str(error.value) == f"`GroupedTensor.validate`: the size {size} {problem}.\nGot x={x!r}.\n{hint}"
        # A program tells sizes apart up to one above the extent.
        told = "size" if size < 0 else f"size {size}" if size <= extent else f"size, {extent + 1} or more,"
        with pytest.raises(eqx.EquinoxRuntimeError) as traced:
            checked(x)
        assert f"`GroupedTensor.validate`: the {told} {problem}.\n{hint}\n" in str(traced.value)
    for sizes, others in ((SIZES, OTHERS), ((0, 11, 0, 0), (4, 0, 4, 4)), ((0, 0, 0, 0), (0, 0, 0, 0))):
        sound = with_sizes(kind, sizes, others)
        assert repr(sound.validate()) == repr(sound) == repr(checked(sound))


def test_uniform_tensors_are_valid() -> None:
    e = example("uniform")
    assert_groups(e.tensor.validate(), e.groups)
    assert_groups(eqx.filter_jit(lambda t: t.validate())(e.tensor), e.groups)


@pytest.mark.long
def test_the_check_hangs_on_the_sizes() -> None:
    """Under `jit`, whatever uses the sizes of the result fails; what uses its buffer alone does not."""
    x = with_sizes("ragged rows", (3, 9, 0, 0), OTHERS)
    uses: list[Callable[[GroupedTensor], Any]] = [
        lambda t: (t + 1).data,
        lambda t: jax.grad(lambda d: GroupedTensor(d, t.first_dims).sum().sum())(t.data),
    ]
    for use in uses:
        with pytest.raises(eqx.EquinoxRuntimeError, match="group 1 in `first_dims`"):
            eqx.filter_jit(lambda t, use=use: use(t.validate()))(x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="group 1 in `first_dims`"):
        jax.block_until_ready(jax.jit(lambda t: t.validate().sum())(x))
    assert np.array_equal(jax.jit(lambda t: t.validate().data)(x), x.data, equal_nan=True)


@pytest.mark.long
def test_one_bad_tensor_of_a_batch_is_enough() -> None:
    good, bad = example("ragged rows").tensor, with_sizes("ragged rows", (3, 9, 0, 0), OTHERS)
    validate = eqx.filter_jit(jax.vmap(lambda t: t.validate().sum()))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), good, good)
    np.testing.assert_allclose(validate(stacked)[0], good.sum())
    with pytest.raises(eqx.EquinoxRuntimeError, match="group 1 in `first_dims`"):
        validate(jax.tree.map(lambda *leaves: jnp.stack(leaves), good, bad))


def test_buffers_too_large_for_one_message_a_size() -> None:
    """2³⁰ rows of 8 groups: sizes from 2²⁸ - 3 on are not told apart, but the group is."""
    rows = jax.ShapeDtypeStruct((2**30, 0), jnp.float32)
    bad = jnp.full((8,), 2**27, jnp.int32).at[5].set(2**30)

    def sizes(dims: Array, large: Array) -> Array:
        data = jnp.zeros(rows.shape, rows.dtype)
        return GroupedTensor(data, dims.at[5].add(large)).validate().packed_dims

    np.testing.assert_array_equal(eqx.filter_jit(sizes)(bad, jnp.int32(2**27 - 2**30)), jnp.full(8, 2**27))
    with pytest.raises(eqx.EquinoxRuntimeError, match=f"the size, {2**28 - 3} or more, of group 5 in `first_dims`"):
        eqx.filter_jit(sizes)(bad, jnp.int32(0))


@pytest.mark.parametrize("kind", split(KINDS[1:2], KINDS[2:]))
def test_wrong_sizes_stay_inside_of_the_buffer(kind: str) -> None:
    """Without `validate`, a negative size counts as 0, and what reaches too far is cut off."""
    for sizes, others, _, _ in BAD[kind]:
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


def test_sizes_of_another_tensor() -> None:
    """`like=` asks for the same groups: it says which group differs, in a program too."""
    x, y = (GroupedTensor(floats(16, 8), ints(*sizes)) for sizes in ((3, 5, 0, 4), (3, 5, 1, 3)))
    checked = eqx.filter_jit(lambda x, y: x.validate(like=y))
    assert repr(x.validate(like=x)) == repr(x) == repr(checked(x, x))
    with pytest.raises(ValueError, match="the size of group 2 in `first_dims` differs"):
        x.validate(like=y)
    with pytest.raises(eqx.EquinoxRuntimeError, match="the size of group 2 in `first_dims` differs"):
        checked(x, y)
