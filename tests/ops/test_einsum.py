"""`ragged.einsum`: random specs of every layout, against NumPy in float64, one group after another."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor
from ragged.product.layout import LAYOUTS
from ragged.tensor.base import with_fields
from tests import constants, oracle, ran
from tests.cases import check_error

G = 3  # groups
RANDOM = 200
FEW = 4
Groups = list[np.ndarray]


@dataclass
class Operand:
    """A tensor as groups in NumPy, and where its ragged axes are: the packed one, and the other, if there is one."""

    letters: tuple[str, ...]  # of a group
    groups: Groups
    packed: int | None = None
    other: int | None = None
    capacity: int = 0
    widest: int = 0
    is_shared: bool = False  # one array for all groups

    def buffer(self, groups: Groups) -> np.ndarray:
        """`groups` in a buffer like this one's, NaN around them."""
        if self.is_shared:
            return groups[0]
        if self.packed is None:
            return np.stack(groups)
        shape = list(groups[0].shape)
        shape[self.packed] = self.capacity
        if self.other is not None:
            shape[self.other] = self.widest
        data, start = np.full(shape, np.nan, groups[0].dtype), 0
        for group in groups:
            data[self.place(group.shape, start)] = group
            start += group.shape[self.packed]
        return data

    def place(self, shape: tuple[int, ...], start: int) -> tuple[slice, ...]:
        """Where a group of this shape lies in the buffer."""
        at = [slice(n) for n in shape]
        if self.packed is not None:
            at[self.packed] = slice(start, start + shape[self.packed])
        return tuple(at)

    def unpacked(self, data: np.ndarray, like: Groups) -> Groups:
        """The groups in a buffer like this one's, of these groups' shapes; what is around them is zero."""
        if self.is_shared:
            return [data]
        if self.packed is None:
            return list(data)
        found, start, rest = [], 0, np.array(data)
        for group in like:
            at = self.place(group.shape, start)
            found.append(np.array(data[at]))
            rest[at] = 0
            start += group.shape[self.packed]
        assert not rest.any(), "the tail must be zero"
        return found

    @property
    def tensor(self) -> GroupedTensor | Array:
        data = jnp.asarray(self.buffer(self.groups))
        if self.is_shared:
            return data
        if self.packed is None:
            return GroupedTensor(data)
        sizes = {
            a: jnp.array([g.shape[a] for g in self.groups], jnp.int32)
            for a in (self.packed, self.other)
            if a is not None
        }
        last = data.ndim - 1
        return GroupedTensor(data, sizes.get(0), sizes.get(last), transposed=self.other == 0)

    def with_data(self, data: Array) -> Any:
        tensor = self.tensor
        return tensor.with_data(data) if isinstance(tensor, GroupedTensor) else data


@dataclass
class Case:
    spec: str
    lhs: Operand
    rhs: Operand
    out: tuple[str, ...]  # of a group

    def product(self, *terms: tuple[tuple[str, ...], Groups], out: tuple[str, ...]) -> Groups:
        names = dict(zip(dict.fromkeys(z for letters, _ in terms for z in letters), "abcdefghijkl", strict=False))
        *given, result = ("".join(names[z] for z in letters) for letters in (*(letters for letters, _ in terms), out))
        return [
            np.einsum(f"{','.join(given)}->{result}", *(np.asarray(x, np.float64) for x in each))
            for each in zip(*(groups for _, groups in terms), strict=True)
        ]


def case(seed: int) -> Case:
    """A random spec, and tensors that fit: which letters there are, where in each term, and how they are stored."""
    rng = np.random.default_rng(seed)
    layout = list(LAYOUTS.values())[seed % len(LAYOUTS)]
    extents: dict[str, Any] = {}
    roles: dict[str, list[str]] = {}
    for role in ("m", "k", "n", "b"):
        count = int(rng.choice([0, 1, 1, 2] if role != "b" else [0, 0, 1, 1, 2]))
        count = max(count, 1) if role in layout.ragged else count
        roles[role] = [f"{role}{i}" for i in range(count)]
        extents |= {z: int(rng.integers(1, 4)) for z in roles[role]}
    sizes = {}
    for role in layout.ragged:
        sizes[f"{role}0"] = rng.permutation([0, int(rng.integers(1, 4)), int(rng.integers(1, 6))])
    group = [] if layout.name not in ("batched", "wgrad") else ["g"]
    while len(group) + len(roles["m"] + roles["n"] + roles["b"]) < (3 if group else 2):
        role = str(rng.choice(["m", "n"]))
        roles[role].append(f"{role}{len(roles[role])}")
        extents[roles[role][-1]] = int(rng.integers(1, 4))

    def placed(letters: list[str]) -> tuple[str, ...]:
        """In any order, but for ragged ones: the packed first, another last; one alone, of a matrix, also last."""
        mine = [str(z) for z in rng.permutation([z for z in letters if z in sizes])]
        rest = [str(z) for z in rng.permutation([z for z in letters if z not in sizes])]
        if len(mine) == 2:
            return (mine[0], *rest, mine[1])
        order = (*mine, *rest)
        return order[::-1] if mine and len(order) == 2 and rng.integers(2) else order

    def operand(letters: list[str], has_group: bool) -> Operand:
        order = placed(letters)
        groups = [
            rng.standard_normal([sizes[z][i] if z in sizes else extents[z] for z in order]).astype(np.float32)
            for i in range(G)
        ]
        ragged_axes = [i for i, z in enumerate(order) if z in sizes]
        if not ragged_axes:
            return Operand(order, groups if has_group else groups[:1] * G, is_shared=not has_group)
        if len(ragged_axes) == 2 and len(order) == 2 and rng.integers(2):
            ragged_axes = ragged_axes[::-1]
        total = {z: int(sum(sizes[z])) + 2 for z in sizes}
        packed, other = ragged_axes[0], ragged_axes[1] if len(ragged_axes) == 2 else None
        widest = 0 if other is None else int(max(sizes[order[other]])) + 1
        return Operand(order, groups, packed, other, total[order[packed]], widest)

    for name in ("m", "n"):
        while len(roles[name] + roles["k"] + roles["b"]) < 2:
            roles["k"].append(f"k{len(roles['k'])}")
            extents[roles["k"][-1]] = int(rng.integers(1, 4))
    is_uniform = {name: not (set(roles[name] + roles["k"]) & set(sizes)) for name in ("m", "n")}
    shared = str(rng.choice(["m", "n", "", ""])) if any(is_uniform.values()) else ""
    if layout.name == "wgrad" or (shared and not is_uniform[shared]):
        shared = ""
    lhs = operand(roles["m"] + roles["k"] + roles["b"], has_group=shared != "m")
    rhs = operand(roles["k"] + roles["n"] + roles["b"], has_group=shared != "n")
    if rng.integers(2):
        lhs, rhs = rhs, lhs
    out = placed(roles["m"] + roles["n"] + roles["b"])

    def term(x: Operand) -> str:
        return " ".join(x.letters if x.is_shared or x.packed is not None else ("g", *x.letters))

    return Case(f"{term(lhs)}, {term(rhs)} -> {' '.join((*group, *out))}", lhs, rhs, out)


def run(c: Case, **options: Any) -> Callable[..., Any]:
    """The result's buffer, and the cotangents of both operands."""

    def both(lhs: Array, rhs: Array, ct: Array | None) -> Any:
        def multiply(lhs: Array, rhs: Array) -> Array:
            return ragged.einsum(c.spec, c.lhs.with_data(lhs), c.rhs.with_data(rhs), **options).data

        if ct is None:
            return multiply(lhs, rhs)
        out, pull = jax.vjp(multiply, lhs, rhs)
        return out, *pull(ct)

    return both


def result(c: Case, out: GroupedTensor) -> Operand:
    """How the groups of the result lie in its buffer."""
    want = c.product((c.lhs.letters, c.lhs.groups), (c.rhs.letters, c.rhs.groups), out=c.out)
    if not any(out.ragged):
        return Operand(c.out, want)
    axes = [axis for axis, is_ragged in ((0, out.ragged[0]), (len(c.out) - 1, out.ragged[1])) if is_ragged]
    other = axes[1] if len(axes) == 2 else None
    return Operand(c.out, want, axes[0], other, out.shape[axes[0]], 0 if other is None else out.shape[other])


def check(c: Case, seed: int) -> None:
    """The result and both cotangents, NaN around all that goes in and zeros around all that comes out.

    The seed picks which operands are constants, and whether all is within a `shard_map`.
    """
    lhs, rhs = (jnp.asarray(x.buffer(x.groups)) for x in (c.lhs, c.rhs))
    shape = jax.eval_shape(lambda: ragged.einsum(c.spec, c.lhs.with_data(lhs), c.rhs.with_data(rhs)))
    out = result(c, shape)
    rng = np.random.default_rng(1)
    ct = [rng.standard_normal(group.shape).astype(np.float32) for group in out.groups]
    got = constants.run(seed, run(c), lhs, rhs, jnp.asarray(out.buffer(ct)))
    d_lhs = c.product((out.letters, ct), (c.rhs.letters, c.rhs.groups), out=c.lhs.letters)
    d_rhs = c.product((c.lhs.letters, c.lhs.groups), (out.letters, ct), out=c.rhs.letters)
    for x, buffer, want in ((out, got[0], out.groups), (c.lhs, got[1], d_lhs), (c.rhs, got[2], d_rhs)):
        want = [np.sum(want, axis=0)] if x.is_shared else want
        for mine, theirs in zip(x.unpacked(np.asarray(buffer), want), want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5, err_msg=c.spec)


def seeds(few: int, long: int, slow: int) -> list[Any]:
    """Seeds from 0 on: so many that run by default, up to `long` that are long, and up to `slow` that are slow."""
    marks = [pytest.mark.long] * (long - few) + [pytest.mark.slow] * (slow - long)
    return [*range(few), *(pytest.param(few + i, marks=mark) for i, mark in enumerate(marks))]


@pytest.mark.parametrize("seed", seeds(FEW, 40, RANDOM))
def test_random_specs(seed: int) -> None:
    """Values and gradients by XLA."""
    check(case(seed), seed)


@pytest.mark.parametrize("seed", seeds(1, 8, RANDOM))
def test_random_specs_on_kernels(seed: int, kernels: tuple[str, ran.Launches]) -> None:
    """The same by interpreted kernels, one call of one for the result and for each cotangent."""
    (backend, launches), c = kernels, case(seed)
    launches.clear()
    check(c, seed)
    is_dense = c.lhs.packed is None and c.rhs.packed is None and (c.lhs.is_shared or c.rhs.is_shared)
    devices = 2 if constants.choice(seed, 3)[1] else 1
    assert [name for name, _ in launches] == ["xla" if is_dense else backend] * 3 * devices, launches


SIZES = np.array([4, 0, 6], np.int32)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def rows(*shape: int, seed: int = 0) -> GroupedTensor:
    """12 rows, 2 of them tail."""
    data = floats(12, *shape, seed=seed)
    data[10:] = np.nan
    return GroupedTensor(jnp.asarray(data), jnp.asarray(SIZES))


X, W = rows(2, 5), jnp.asarray(floats(3, 5, 2, 4))
SPEC = "t h d, g d h e -> t h e"


def by_group(x: Any, w: Any) -> np.ndarray:
    """`SPEC` of NumPy arrays, zero in the tail."""
    out, start = np.zeros((12, 2, 4)), 0
    for n, each in zip(SIZES, w, strict=True):
        out[start : start + n] = np.einsum("thd,dhe->the", x[start : start + n].astype(np.float64), each)
        start += n
    return out


DATA, TANGENT = jnp.asarray(X.data), jnp.asarray(floats(12, 2, 5, seed=1))


def product(data: Array, w: Array) -> Array:
    return ragged.einsum(SPEC, X.with_data(data), w).data


def test_jvp() -> None:
    out, moved = jax.jit(lambda *z: jax.jvp(product, z, (TANGENT, W)))(DATA, W)
    want = by_group(np.asarray(DATA), W)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(moved, want + by_group(np.asarray(TANGENT), W), atol=1e-5)


@pytest.mark.long
def test_vmap() -> None:
    """Over the data, as one of two factors, and over the sizes; on top of the batch letter's own axis."""
    want = by_group(np.asarray(DATA), W)
    both = jnp.stack([DATA, -2 * DATA])
    np.testing.assert_allclose(jax.jit(jax.vmap(product, (0, None)))(both, W), np.stack([want, -2 * want]), atol=1e-5)
    sizes = jnp.stack([jnp.asarray(SIZES), jnp.asarray([1, 2, 3], jnp.int32)])
    mapped = jax.jit(jax.vmap(lambda s: ragged.einsum(SPEC, GroupedTensor(DATA, s), W).data))(sizes)
    np.testing.assert_allclose(mapped[0], want, atol=1e-5)
    one = np.einsum("hd,dhe->he", np.asarray(DATA)[0], W[0])
    np.testing.assert_allclose(mapped[1, 0], one, atol=1e-5)


@pytest.mark.long
def test_grad_of_grad() -> None:
    """Of half the squares of the gradient of half the squares, which are of the data times `w wᵀ` of each head."""

    def penalty(data: Array) -> Array:
        inner = jax.grad(lambda data: jnp.sum(product(data, W) ** 2) / 2)
        return jnp.sum(inner(data) ** 2) / 2

    got, start, want = jax.jit(jax.grad(penalty))(DATA), 0, np.zeros(DATA.shape)
    for n, w in zip(SIZES, np.asarray(W, np.float64), strict=True):
        gram = np.einsum("dhe,che->hdc", w, w)
        mine = np.asarray(DATA[start : start + n], np.float64)
        want[start : start + n] = np.einsum("thd,hdc,hcb->thb", mine, gram, gram)
        start += n
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_a_nan_of_one_group_stays_there() -> None:
    w = W.at[1].set(jnp.nan)  # of the empty group
    np.testing.assert_allclose(ragged.einsum(SPEC, X, w).data, by_group(np.asarray(X.data), W), atol=1e-5)
    x = X.with_data(X.data.at[0].set(jnp.nan))
    bad = np.isnan(np.asarray(ragged.einsum(SPEC, x, W).data)).any((1, 2))
    assert bad.tolist() == [True] + [False] * 11


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
        ("t d, g d h e -> t h e", (8,), (3, 8, 2, 4), ((12, 8), (3, 8, 8)), 0),
        ("t h d, g h d e -> t e", (2, 4), (3, 2, 4, 4), ((12, 8), (3, 8, 4)), 0),
        # Each of these forces what it says: weights, whose letters are the other way round; and a batch letter, which
        # is in front of all three terms in a product.
        ("t h d, g d h e -> t e", (2, 4), (3, 4, 2, 4), ((12, 8), (3, 8, 4)), 1),
        ("t h d, g d h e -> t h e", (2, 8), (3, 8, 2, 4), ((12, 8), (3, 8, 4)), 3),
    ],
)
def test_no_more_is_moved_than_the_order_of_letters_forces(
    spec: str, lhs: tuple[int, ...], rhs: tuple[int, ...], flat: Any, transposed: int
) -> None:
    """As traced, and as XLA compiles it."""
    got = moves(lambda x, w: ragged.einsum(spec, x, w), rows(*lhs), jnp.asarray(floats(*rhs)))
    sizes = jnp.asarray(SIZES) * (flat[0][0] // 12)
    one = GroupedTensor(jnp.asarray(floats(*flat[0])), sizes)
    merged = moves(ragged.matmul, one, jnp.asarray(floats(*flat[1])))
    assert got["transpose"] == merged["transpose"] + transposed
    assert got["copies"] == merged["copies"] + transposed


@pytest.mark.parametrize("e, moved", [(8, (12, 2, 4)), (2, (3, 4, 2, 2))])
def test_the_smaller_operand_is_transposed(e: int, moved: tuple[int, ...]) -> None:
    """Where the two hold the contracted letters in different orders."""
    x, w = rows(2, 4), jnp.asarray(floats(3, 4, 2, e))
    traced: Any = jax.make_jaxpr(lambda w: ragged.einsum("t h d, g d h e -> t e", x, w).data)(w)
    shapes = [each.invars[0].aval.shape for each in traced.jaxpr.eqns if each.primitive.name == "transpose"]
    assert shapes == [moved]


# --- what it comes to -----------------------------------------------------------------------------------------------


def spied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that are bound."""
    from ragged.ops import request

    calls, bind = [], request.bind
    monkeypatch.setattr(request, "bind", lambda x, call: calls.append((x, call)) or bind(x, call))
    return calls


@pytest.mark.parametrize(
    "spec, lhs, rhs, shape",
    [
        ("t h d, g d e -> t h e", rows(2, 5), floats(3, 5, 4), (24, 4)),
        ("thd,gde->teh", rows(2, 5), floats(3, 5, 4), (24, 4)),
        ("t h d, d e -> t h e", rows(2, 5), floats(5, 4), (24, 4)),
        ("t d, g d h e -> t h e", rows(5), floats(3, 5, 2, 4), (12, 8)),
        ("t h d, g h d e -> t e", rows(2, 5), floats(3, 2, 5, 4), (12, 4)),
        ("t h d, g d h e -> t h e", rows(2, 5), floats(3, 5, 2, 4), (12, 4)),
        ("t h d, t h e -> g d e", rows(2, 5), rows(2, 4), (3, 5, 4)),
        ("t h d, t h e -> g h d e", rows(2, 5), rows(2, 4), (3, 5, 4)),
        ("g h m k, g h k n -> g h m n", GroupedTensor(jnp.ones((3, 2, 5, 4))), jnp.ones((3, 2, 4, 6)), (6, 5, 6)),
    ],
)
def test_one_product(spec: str, lhs: Any, rhs: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of letters merged to `m`, `k`, `n`, and for all batch letters at once."""
    calls = spied(monkeypatch)
    jax.eval_shape(lambda: ragged.einsum(spec, lhs, jnp.asarray(rhs) if isinstance(rhs, np.ndarray) else rhs).data)
    ((_, call),) = calls
    assert call.shape == shape


def test_explain() -> None:
    """The product, of the sizes that it has; and as often as it is mapped."""
    told = ragged.explain(X, W, spec=SPEC, platform="cpu")
    assert told.letters == "m = t, k = d, n = e; mapped: h; lhs is `lhs`"
    assert (told.layout, told.result, told.sizes) == ("forward", "f32[12,2,4]", {"m": (4, 0, 6)})
    assert told.plan().flops == 2 * 2 * 10 * 5 * 4
    assert f"letters: {told.letters}\n" in str(told)
    told = ragged.explain(jnp.ones((3, 4, 5)), X, spec="g e d, t h d -> t e h", platform="cpu")
    assert told.letters == "m = t h, k = d, n = e; lhs is `rhs`"
    assert told.sizes == {"m": (8, 0, 12)}
    avals = with_fields(
        X, data=jax.ShapeDtypeStruct(X.shape, X.dtype), first_dims=jax.ShapeDtypeStruct((3,), jnp.int32)
    )
    assert ragged.explain(avals, W, spec=SPEC, platform="cpu").sizes is None
    assert ragged.explain(X, floats(3, 5, 2, 4), platform="cpu").letters == "m = m0 m1, k = k, n = n0 n1; lhs is `lhs`"
    assert ragged.explain(X, floats(5, 4), platform="cpu").sizes == {"m": (8, 0, 12)}
    assert ragged.explain(rows(5), floats(3, 5, 4), platform="cpu").letters == ""


# --- buffers that have no room for all of a group ---------------------------------------------------------------------

# The ragged letters of each term, the packed one first, and options. Each axis is one letter.
CUT: dict[str, tuple[tuple[str, str, str], dict[str, int]]] = {
    "tes,sed->td": (("ts", "s", "t"), {}),
    "tes,td->sed": (("ts", "t", "s"), {"capacity": 10}),
    "ted,sfd->tefs": (("t", "s", "ts"), {"max_last": 2}),
    "tes,ues->tu": (("ts", "us", "tu"), {"max_last": 4}),
    "tes,sd->ted": (("ts", "s", "t"), {}),
    "tes,ted->sd": (("ts", "t", "s"), {"capacity": 7}),
    "tefs,sed->tfd": (("ts", "s", "t"), {}),
    "sed,tes->dt": (("s", "ts", "t"), {}),
    "tes,sfu->tefu": (("ts", "su", "tu"), {"max_last": 3}),
    "tes,tfu->sefu": (("ts", "tu", "su"), {"capacity": 9}),
    "set,seu->tu": (("st", "su", "tu"), {"capacity": 9, "max_last": 5}),
    "thes,shed->thd": (("ts", "s", "t"), {}),
}
CUT_EXTENTS = {"t": 9, "s": 8, "u": 7, "d": 2, "e": 4, "f": 2, "h": 2}
CUT_WIDTHS = {"t": 2, "s": 2, "u": 3}  # of operands that don't pack the letter
CUT_SIZES: list[dict[str, list[int]]] = [
    {"t": [3, 2, 4], "s": [3, 1, 4], "u": [4, 0, 2]},
    {"t": [4, 9, 2], "s": [1, 3, 9], "u": [2, 8, 8]},  # more than any buffer has
    {"t": [-2, 3, 4], "s": [5, -1, 3], "u": [3, 3, -4]},
    {"t": [2**31 - 1, 2, 4], "s": [2**30, 2**30, 3], "u": [-(2**31), 2**30 + 1, 2]},  # times 4, they wrap around
]


@pytest.mark.parametrize("spec", [pytest.param(spec, marks=[pytest.mark.long] * (i > 2)) for i, spec in enumerate(CUT)])
def test_what_does_not_fit_is_dropped(spec: str) -> None:
    """As in `matmul`, whatever a cut letter is merged with; the result and both cotangents."""
    ragged_letters, options = CUT[spec]
    terms = re.findall(r"\w+", spec)

    def multiply(x: Any, y: Any, sizes: dict[str, Any]) -> Any:
        tensors = (
            GroupedTensor(data, *(sizes[z] for z in letters))
            for data, letters in zip((x, y), ragged_letters, strict=False)
        )
        return ragged.einsum(spec, *tensors, **options).data

    @jax.jit
    def run(x: Array, y: Array, ct: Array, sizes: dict[str, Array]) -> Any:
        value, pull = jax.vjp(lambda x, y: multiply(x, y, sizes), x, y)
        return value, *pull(ct)

    def shape(term: str, letters: str) -> tuple[int, ...]:
        return tuple(CUT_WIDTHS[z] if z in letters[1:] else CUT_EXTENTS[z] for z in term)

    known = {z: np.array(n, np.int32) for z, n in CUT_SIZES[0].items()}
    x, y = (floats(*shape(*each)) for each in zip(terms[:2], ragged_letters, strict=False))
    result = jax.eval_shape(lambda: multiply(x, y, known))
    a, b, c = (
        oracle.KernelOperand(*each) for each in zip(terms, ragged_letters, (x, y, floats(*result.shape)), strict=True)
    )
    if spec == next(iter(CUT)):  # not traced, sizes are compared
        np.testing.assert_allclose(multiply(x, y, known), oracle.product_of_what_fits(a, b, c, CUT_SIZES[0]), atol=1e-4)
    for sizes in CUT_SIZES:
        arrays = {z: np.array(n, np.int32) for z, n in sizes.items()}
        got = run(*(term.with_nan(sizes) for term in (a, b, c)), arrays)
        for mine, theirs in zip(got, ((a, b, c), (c, b, a), (a, c, b)), strict=True):
            np.testing.assert_allclose(mine, oracle.product_of_what_fits(*theirs, sizes), atol=1e-4)


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_options() -> None:
    """Those of `matmul`; extents of ragged letters count without what they are merged with."""
    want = by_group(np.asarray(X.data), W)
    out = ragged.einsum(SPEC, X, W, preferred_element_type=jnp.bfloat16, precision="highest", backend="xla")
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.data.astype(jnp.float32), want, atol=0.05)
    existing = jnp.asarray(floats(12, 2, 4, seed=3))
    inside = (np.arange(12) < 10)[:, None, None]
    for given in (GroupedTensor(existing, X.first_dims), np.asarray(existing)):
        out = ragged.einsum(SPEC, X, W, existing_out=given)
        np.testing.assert_allclose(out.data, want + np.where(inside, existing, 0), atol=1e-5)
    out = ragged.einsum(SPEC, X, W[1:], group_offset=1, activation="relu")
    np.testing.assert_allclose(out.data, np.where(np.arange(12)[:, None, None] >= 4, np.maximum(want, 0), 0), atol=1e-5)
    keys = GroupedTensor(jnp.asarray(floats(8, 2, 5)), jnp.array([3, 2, 3], jnp.int32))
    scores = ragged.einsum("t h d, s h d -> t h s", X, keys, max_last=3)
    assert scores.shape == (12, 2, 3)
    shared = ragged.einsum("t h d, s d -> t h s", X, keys.with_data(keys.data[:, 0]), max_last=3)
    assert shared.shape == (12, 2, 3)
    values = ragged.einsum("t h s, t h d -> s d", scores, X, capacity=8)
    assert values.shape == (8, 5) and values.first_dims is keys.first_dims


@pytest.mark.parametrize("scaling", ["row", "group", "tensor", (1, 5)])
@pytest.mark.parametrize(
    "spec, shape", [("t h d, g d e h -> t h e", (3, 5, 4, 2)), ("t h d, g d e -> t e h", (3, 5, 4))]
)
@pytest.mark.sampled
def test_quantised(scaling: Any, spec: str, shape: tuple[int, ...]) -> None:
    """As of the values that the operands stand for."""
    x = ragged.quantize(X, jnp.float8_e4m3fn, scaling)
    w = ragged.quantize(floats(*shape), jnp.float8_e4m3fn, scaling if scaling in ("group", "tensor") else (None, 1))
    if scaling == "row" and len(shape) == 4:
        w = ragged.quantize(floats(*shape), jnp.float8_e4m3fn, "row")
    got = ragged.einsum(spec, x, w, preferred_element_type=jnp.float32)
    want = ragged.einsum(spec, x.dequantize(), w.dequantize())
    np.testing.assert_allclose(got.data, want.data, rtol=1e-4, atol=1e-4)


def test_scales_of_more_groups() -> None:
    """Where batch letters are more groups, each has its group's scale."""
    lhs, rhs = (ragged.quantize(floats(3, 2, *shape), jnp.float8_e4m3fn, "group") for shape in ((5, 4), (4, 6)))
    got = ragged.einsum("g h m k, g h k n -> g h m n", lhs, rhs, preferred_element_type=jnp.float32)
    want = np.einsum("ghmk,ghkn->ghmn", lhs.dequantize().data, rhs.dequantize().data)
    np.testing.assert_allclose(got.data, want, rtol=1e-4, atol=1e-4)


# --- errors ---------------------------------------------------------------------------------------------------------

U = GroupedTensor(jnp.asarray(floats(3, 5, 4)))
R, M, A = rows(5), rows(2, 5), U.data
OTHER = GroupedTensor(jnp.ones((12, 3)), jnp.array([3, 1, 6], jnp.int32))
LONGER = GroupedTensor(jnp.ones((13, 3)), R.first_dims)
BOTH = GroupedTensor(jnp.ones((12, 2, 6)), R.first_dims, jnp.array([1, 2, 6], jnp.int32))


def test_explicit_axes() -> None:
    """A letter that is mapped may be sharded; one that is merged into another may not, and that is said."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        data = jax.device_put(DATA, jax.NamedSharding(mesh, jax.P(None, "x")))
        w = jax.device_put(W, jax.NamedSharding(mesh, jax.P(None, None, "x")))
        out = jax.jit(product)(data, w)
        assert jax.typeof(out).sharding.spec == jax.P(None, "x", None)
        text = "the letters 't h' of `lhs` have to be merged into one axis, but 'h' is sharded over an `Explicit` mesh"
        x = X.with_data(data)
        with pytest.raises(NotImplementedError, match=re.escape(text)):
            ragged.einsum("t h d, g d e -> t h e", x, A)
    np.testing.assert_allclose(out, by_group(np.asarray(DATA), W), atol=1e-5)


def test_errors_of_options() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        ragged.einsum(SPEC, X, W, bias=W)  # pyright: ignore[reportCallIssue]
    check_error(lambda: ragged.einsum(SPEC, X, W, existing_out=W[0, 0]), ValueError, "`existing_out` has 2 dims")
    text = "`existing_out` has the extent 5 along 'e', but the result has 4."
    check_error(lambda: ragged.einsum(SPEC, X, W, existing_out=X), ValueError, text)
    other = GroupedTensor(jnp.ones((12, 2, 4)), jnp.array([3, 1, 6], jnp.int32))
    text = "`existing_out` has groups of other sizes than the result."
    check_error(lambda: ragged.einsum(SPEC, X, W, existing_out=other), ValueError, text)
    x = ragged.quantize(X, jnp.float8_e4m3fn, "column")
    text = "the letters 't h' of `lhs` have to be merged into one axis, but blocks of its scaling, column, don't tile"
    check_error(lambda: ragged.einsum("t h d, g d e -> t h e", x, A), NotImplementedError, text)
    w = ragged.quantize(jnp.ones((3, 2, 8, 4)), jnp.float8_e4m3fn, (2, 4))
    text = "the scaling (2, 4), whose blocks span several elements of the batch letters 'h'."
    check_error(lambda: ragged.einsum("t h d, g h d e -> t h e", rows(2, 8), w), NotImplementedError, text)
