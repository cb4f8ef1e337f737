"""`route`, `dispatch`, `gathered` and `combine` equal a loop over tokens, for any ids; so do their derivatives."""

import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ragged
from ragged import GroupedTensor, Route
from ragged.tensor.route import _by_count, _by_sort
from tests.cases import split
from tests.contract.loop import Sum, mismatch

G, TOKENS, D = 3, 7, 4
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def id_table(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Ids of groups: each pattern of empty groups, one giant group, ids of no group, the same group twice."""
    rng, tokens = np.random.default_rng(0), int(np.prod(shape))
    few = [
        np.resize(each, tokens) for each in ([0, 1, 2], [2, 0], [1], [2, 1], [0, 0, 1], [-1], [3, 7], [LEAST, 1, MOST])
    ]
    among = [
        rng.choice([-1, 0, 1, 2, 3, LEAST, MOST][start : start + n], tokens) for start, n in ((0, 7), (1, 3), (0, 3))
    ]
    return [np.reshape(ids, shape).astype(np.int32) for ids in [*few, *among, *rng.integers(-1, G + 1, (9, tokens))]]


def rows_of(ids: np.ndarray) -> list[tuple[int, int, int]]:
    """Group, token and slot of each row that goes to a group, in the order in which they must stand."""
    slots = ids.reshape(len(ids), -1).astype(np.int64)
    return [(g, int(token), int(slot)) for g in range(G) for token, slot in np.argwhere(slots == g)]


def compute(ids: Array, data: dict[str, Array]) -> dict[str, Array]:
    """What a route gives, and derivatives: cotangents, the tangent of a combination, and cotangents of cotangents."""
    route = ragged.route(ids, G)

    def dispatch(x: Array) -> Array:
        return route.dispatch(x).data

    def combine(y: Array, weights: Array) -> Array:
        return route.combine(GroupedTensor(y, route.first_dims), weights)

    def cotangents(y: Array, weights: Array, ct: Array) -> Any:
        return jax.vjp(combine, y, weights)[1](ct)

    x, y, weights, ct, d_y, d_weights = (data[name] for name in ("x", "y", "weights", "ct", "d y", "d weights"))
    found: dict[str, Any] = {"order": route.order, "place": route.place, "first_dims": route.first_dims}
    found |= {"dispatch": dispatch(x), "gathered": route.gathered(x).dispatch().data}
    found["dispatch by x"] = jax.vjp(dispatch, x)[1](y)[0]
    found["unweighted"] = route.combine(GroupedTensor(y, route.first_dims))
    found["combine"], found["tangent"] = jax.jvp(combine, (y, weights), (d_y, d_weights))
    found["combine by y"], found["combine by weights"] = cotangents(y, weights, ct)
    twice = jax.vjp(cotangents, y, weights, ct)[1]((d_y, d_weights))
    found |= {f"cotangents by {name}": each for name, each in zip(("y", "weights", "ct"), twice, strict=True)}
    return found


def draw(ids: np.ndarray, seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Buffers with NaN in tails, in tokens of no group and in weights of no group."""
    rng, rows = np.random.default_rng(seed), rows_of(ids)
    shapes = {"x": (TOKENS, D), "ct": (TOKENS, D), "weights": ids.shape} | dict.fromkeys(("y", "d y"), (ids.size, D))
    data = {name: rng.standard_normal(shape).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}
    data["d weights"] = rng.standard_normal(ids.shape).astype(jnp.dtype(dtype))
    unused = np.setdiff1d(np.arange(TOKENS), [token for _, token, _ in rows])
    for name in ("y", "d y"):
        data[name][len(rows) :] = np.nan
    for name in ("x", "ct"):
        data[name][unused] = np.nan
    for name in ("weights", "d weights"):
        data[name][(ids < 0) | (ids >= G)] = np.nan
    return data


def wanted(ids: np.ndarray, data: dict[str, np.ndarray]) -> dict[str, Sum]:
    rows = rows_of(ids)
    wide = {name: each.astype(np.float64) for name, each in data.items()}
    weights, d_weights = (wide[name].reshape(TOKENS, -1) for name in ("weights", "d weights"))
    tokens, packed, slots = (TOKENS, D), (ids.size, D), weights.shape
    shapes = dict.fromkeys(("dispatch", "gathered", "combine by y", "cotangents by y"), packed)
    shapes |= dict.fromkeys(("dispatch by x", "unweighted", "combine", "tangent", "cotangents by ct"), tokens)
    shapes |= dict.fromkeys(("combine by weights", "cotangents by weights"), slots)
    found = {name: Sum(np.zeros(shape), np.zeros(shape)) for name, shape in shapes.items()}

    def add(name: str, at: Any, *terms: Any) -> None:
        for term in terms:
            found[name].value[at] += term
            found[name].sizes[at] += np.abs(term)

    for row, (_, token, slot) in enumerate(rows):
        x, y, d_y, ct = wide["x"][token], wide["y"][row], wide["d y"][row], wide["ct"][token]
        w, d_w = weights[token, slot], d_weights[token, slot]
        for name in ("dispatch", "gathered"):
            add(name, row, x)
        add("dispatch by x", token, y)
        add("unweighted", token, y)
        add("combine", token, w * y)
        for name in ("tangent", "cotangents by ct"):
            add(name, token, w * d_y, d_w * y)
        add("combine by y", row, w * ct)
        add("cotangents by y", row, d_w * ct)
        add("combine by weights", (token, slot), *(y * ct))
        add("cotangents by weights", (token, slot), *(d_y * ct))
    return {name: Sum(*(part.reshape(ids.shape) for part in each)) if "by weights" in name else each
            for name, each in found.items()}  # fmt: skip


def check(ids: np.ndarray, data: dict[str, np.ndarray], got: dict[str, Any]) -> None:
    dtype = data["x"].dtype.name
    got = {name: np.asarray(each) for name, each in got.items()}
    order, place, rows = got["order"], got["place"].reshape(-1), rows_of(ids)
    assert {got[name].dtype.name for name in ("order", "place", "first_dims")} == {"int32"}
    assert got["place"].shape == ids.shape
    assert got["first_dims"].tolist() == [sum(group == g for group, _, _ in rows) for g in range(G)]
    per_token = ids.size // TOKENS
    assert order[: len(rows)].tolist() == [token * per_token + slot for _, token, slot in rows]
    assert place[order].tolist() == order[place].tolist() == [*range(ids.size)]  # inverses
    for name, want in wanted(ids, data).items():
        wrong = mismatch(got[name], want, dtype, terms=8, roundings=3)
        assert not wrong, f"{name}: {wrong}\nids: {ids.tolist()}"


@pytest.mark.parametrize("shape", [(TOKENS,), (TOKENS, 2), pytest.param((TOKENS, 1), marks=pytest.mark.long)], ids=str)
def test_route(shape: tuple[int, ...]) -> None:
    """What is in a tail, in a token of no group and in its weight reaches nothing."""
    run = jax.jit(compute)
    for seed, ids in enumerate(id_table(shape)):
        data = draw(ids, seed)
        check(ids, data, run(ids, data))


def test_with_64_bits() -> None:
    """float64 in and out, where JAX's default integer is int64; the route stays of int32."""
    with jax.enable_x64(True):
        run = jax.jit(compute)
        for seed, ids in enumerate(id_table((TOKENS, 2))[::2]):
            data = draw(ids, seed, "float64")
            check(ids, data, run(ids.astype(np.int64), data))


@pytest.mark.parametrize("mapped", split(["ids data"], ["ids", "data"]))
def test_vmap(mapped: str) -> None:
    axes = tuple(0 if name in mapped.split() else None for name in ("ids", "data"))
    run, table = jax.jit(jax.vmap(compute, axes)), id_table((TOKENS, 2))
    full = np.resize(np.arange(G), (TOKENS, 2))
    for seed in range(0, 16, 3):
        some = table[seed : seed + 2] if axes[0] == 0 else [table[seed]] * 2
        # Shared data has no NaN: another element's route may need what this one's doesn't.
        both = [draw(ids, seed + i) for i, ids in enumerate(some)] if axes[1] == 0 else [draw(full, seed)] * 2
        data = {n: np.stack([each[n] for each in both]) for n in both[0]} if axes[1] == 0 else both[0]
        got = run(np.stack(some) if axes[0] == 0 else some[0], data)
        for i, ids in enumerate(some):
            check(ids, both[i], {name: each[i] for name, each in got.items()})


@pytest.mark.parametrize("sort", [_by_count, _by_sort])
def test_both_sorts(sort: Any) -> None:
    """One runs on CPUs, the other elsewhere."""
    run = jax.jit(sort, static_argnums=1)
    for ids in id_table((TOKENS, 2)):
        group_ids = np.where((ids < 0) | (ids >= G), G, ids).reshape(-1)
        order = np.argsort(group_ids, kind="stable")
        offsets = np.searchsorted(group_ids[order], np.arange(G + 1))
        for got, want in zip(run(group_ids, G), (order, np.argsort(order), offsets), strict=True):
            assert got.dtype == jnp.int32
            np.testing.assert_array_equal(got, want)


def test_a_cpu_counts() -> None:
    ids = jax.ShapeDtypeStruct((TOKENS, 2), jnp.int32)
    assert "stablehlo.sort" not in jax.jit(ragged.route, static_argnums=1).lower(ids, G).as_text()


SYMBOLIC = """
import jax, jax.numpy as jnp, numpy as np
import ragged
from jax import export
from ragged.tensor.route import _by_sort

def back(ids, x, weights):
    route = ragged.route(ids, 4)
    rows = route.dispatch(x)
    return route, rows, route.combine(rows, weights), route.combine(rows)

def sorted_by(ids):  # as they are on other platforms than this one
    return _by_sort(ids, 4)

def joined(x, y, sizes):
    return ragged.concat([ragged.GroupedTensor(x, sizes), ragged.GroupedTensor(y, sizes)]).data

def shape(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)

(t,) = export.symbolic_shape("t")
args = shape(jnp.int32, t, 2), shape(jnp.float32, t, 3), shape(jnp.float32, t, 2)
both = export.export(jax.jit(back))(*args)
export.export(jax.jit(back), platforms=("tpu", "cuda"))(*args)
by_sort = export.export(jax.jit(sorted_by))(shape(jnp.int32, t))
both_rows = shape(jnp.float32, t, 3), shape(jnp.float32, t + 1, 3), shape(jnp.int32, 2)
concat = export.export(jax.jit(joined))(*both_rows)
rng = np.random.default_rng(0)
for tokens in (1, 7, 1500):
    x, y, sizes = np.ones((tokens, 3), np.float32), np.full((tokens + 1, 3), 2, np.float32), np.array([0, 1], np.int32)
    np.testing.assert_array_equal(concat.call(x, y, sizes), [[1] * 3, [2] * 3] + [[0] * 3] * (2 * tokens - 1))
    ids = rng.integers(-1, 6, (tokens, 2)).astype(np.int32)
    x, weights = (rng.normal(size=(tokens, n)).astype(np.float32) for n in (3, 2))
    want = jax.jit(back)(ids, x, weights)
    for found, want in zip(jax.tree.leaves(both.call(ids, x, weights)), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(found, want)
    ids = np.clip(ids.reshape(-1), 0, 4)
    order = np.argsort(ids, kind="stable")
    wanted = order, np.argsort(order), np.searchsorted(ids[order], np.arange(5))
    for found, want in zip(by_sort.call(ids), wanted, strict=True):
        np.testing.assert_array_equal(found, want)
"""


@pytest.mark.long
def test_symbolic_tokens() -> None:
    """One program for any number of tokens, and of rows to `concat`.

    In a process of its own, without the import hook: a symbolic extent is no `int`.
    """
    run = subprocess.run([sys.executable, "-c", SYMBOLIC], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.long
def test_ids_of_any_integer_dtype() -> None:
    """-1 is the largest value where there is no sign; nothing wraps around into range."""
    for dtype in (np.uint8, np.int16, np.uint32, np.int64):
        ids = np.array([-1, 100, 1, -1]).astype(dtype)
        for groups in (200, 70_000):
            want = sum(0 <= int(i) < groups for i in ids)
            assert int(ragged.route(ids, groups).first_dims.sum()) == want, (dtype, groups)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            for ids in (np.array([2**32, 2**32 + 1, 1, -(2**32)]), np.array([2**64 - 1, 2**63, 1, 2**32], np.uint64)):
                assert ragged.route(ids, 2).first_dims.tolist() == [0, 1]


def test_sums_in_float32() -> None:
    """Of a token's rows, in whatever dtype they come back: in bfloat16, 256 + 1 is 256. Weights' cotangents too."""

    @jax.jit
    def run(y: Array, weights: Array) -> Any:
        route = ragged.route(jnp.zeros((1, 3), jnp.int32), 1)
        combine = lambda y, weights: route.combine(GroupedTensor(y, route.first_dims), weights)  # noqa: E731
        wide, ct = jnp.ones((3, 300), jnp.bfloat16), jnp.ones((1, 300), jnp.bfloat16)
        d_weights = jax.vjp(lambda weights: combine(wide, weights), weights)[1](ct)[0]
        back = {dtype: route.combine(route.dispatch(jnp.ones((1, 1), dtype))) for dtype in ("float16", "int32")}
        # (1 + 2⁻⁷)² - (1 + 2⁻⁶) is 2⁻¹⁴, unless its first term is rounded.
        terms = jnp.array([[1 + 2**-7], [1 + 2**-6], [0]], jnp.bfloat16)
        tangent = jax.jvp(lambda w: combine(terms, w), (weights,), (jnp.array([[1 + 2**-7, -1, 0]], jnp.float32),))[1]
        return route.combine(GroupedTensor(y, route.first_dims)), combine(y, weights), d_weights, back, tangent

    plain, weighted, d_weights, back, tangent = run(
        jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16), np.ones((1, 3), np.float32)
    )
    assert plain.tolist() == weighted.tolist() == [[258.0]] and d_weights.tolist() == [[300.0] * 3]
    assert plain.dtype == weighted.dtype == tangent.dtype == jnp.bfloat16 and tangent.tolist() == [[2**-14]]
    assert {dtype: (x.dtype.name, x.tolist()) for dtype, x in back.items()} == {z: (z, [[3]]) for z in back}


def test_what_a_weighted_combine_keeps() -> None:
    """For its derivative: its rows, as they are, in bfloat16, and once."""
    route = ragged.route(jnp.array([[2, 0], [0, 1], [1, 2]]), G)

    def run(y: Array, weights: Array) -> Array:
        return route.combine(GroupedTensor(y, route.first_dims), weights)

    y, weights = jax.ShapeDtypeStruct((6, 8), jnp.bfloat16), jax.ShapeDtypeStruct((3, 2), jnp.float32)
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(run, *args)[1], y, weights))
    wide = [(leaf.dtype.name, leaf.shape) for leaf in leaves if leaf.size >= y.size]
    assert wide == [("bfloat16", y.shape)]


def test_derivatives_are_gathers() -> None:
    ids = jnp.array([[2, 0], [0, 1], [1, 2]])
    route = ragged.route(ids, G)
    x, y, weights = jnp.ones((3, D)), jnp.ones((6, D)), jnp.ones((3, 2))

    def combine(y: Array) -> Array:
        return route.combine(GroupedTensor(y, route.first_dims), weights)

    for function, at, ct in ((lambda x: route.dispatch(x).data, x, y), (combine, y, x)):
        text = jax.jit(lambda ct, function=function, at=at: jax.vjp(function, at)[1](ct)).lower(ct).as_text()
        assert "stablehlo.gather" in text and "stablehlo.scatter" not in text


@pytest.mark.long
def test_a_route_is_a_pytree() -> None:
    """It goes into and out of programs and maps; operands may be NumPy's."""
    ids = np.array([[2, 0, 2, 0], [1, 1, -1, 0]], np.int32)
    routes = jax.vmap(lambda ids: ragged.route(ids, G))(ids)
    assert isinstance(routes, Route) and routes.first_dims.shape == (2, G)
    x = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    back = eqx.filter_jit(jax.vmap(lambda route, x: route.combine(route.dispatch(x))))(routes, x)
    np.testing.assert_array_equal(back, np.where((ids >= 0)[..., None], x, 0.0))
    route = ragged.route(ids[0], G)
    y = GroupedTensor(np.array([[1.0], [2.0], [3.0], [4.0]], np.float32), np.array([2, 0, 2], np.int32))
    assert route.combine(y, np.ones(4, np.float32)).tolist() == [[3.0], [1.0], [4.0], [2.0]]
    assert route.dispatch(np.ones((4, 1), np.float32)).data.tolist() == [[1.0]] * 4


def test_no_tokens_and_no_columns() -> None:
    """Maps over tokens without rows, or without columns; without `jit`."""
    route = ragged.route(jnp.zeros((0, 2), jnp.int32), G)
    assert jax.eval_shape(jax.vmap(lambda x: route.dispatch(x).data), jnp.ones((2, 0, 4))).shape == (2, 0, 4)

    def there_and_back(ids: Array, x: Array) -> Array:
        route = ragged.route(ids, G)
        return route.combine(route.dispatch(x))

    ids = np.zeros((2, 5, 1), np.int32)
    assert jax.eval_shape(jax.vmap(there_and_back), ids, jnp.ones((2, 5, 0))).shape == (2, 5, 0)
    with jax.disable_jit():
        assert ragged.route(jnp.zeros(0, jnp.int32), 2).first_dims.tolist() == [0, 0]
