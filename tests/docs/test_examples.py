"""The examples: their layers against references that know nothing of `ragged`, and each script from end to end."""

import inspect
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ragged
from tests import oracle
from tests.models.blocks import ROOT, example

FOLDER = ROOT / "examples"
# Sums of at most some hundred products, in float32: a few roundings of 2⁻²⁴ of the largest element.
CLOSE = {"max": 1e-6, "rms": 2e-7}


def quick(fn: Callable, *args: Any) -> Any:
    """`fn(*args)` as one program; to optimise it takes longer than to run it."""
    program = jax.jit(fn).lower(*args).compile({"xla_backend_optimization_level": 0})
    return jax.tree.map(np.asarray, program(*args))


def float64(fn: Callable, *args: Any) -> Any:
    """`fn(*args)` in double precision."""

    def widened(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        return quick(fn, *jax.tree.map(widened, args))


def assert_close(got: Any, want: Any) -> None:
    """Leaf by leaf, each relative to its own largest element."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape
        oracle.assert_close([g], [w], **CLOSE)


def with_gradients(fn: Callable) -> Callable:
    """`(dy, *args) -> y, gradients by args`, of `y = fn(*args)`; `dy` is a tree like `y`."""

    def both(dy: Any, *args: Any) -> Any:
        y, pullback = jax.vjp(fn, *args)
        return y, pullback(dy)

    return both


def lines_of_code(*objects: Any) -> int:
    """Lines that hold more than white space and comments; docstrings count."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    count = 0
    for thing in objects:
        tokens = tokenize.generate_tokens(StringIO(inspect.getsource(thing)).readline)
        count += len({row for t in tokens if t.type not in skipped for row in range(t.start[0], t.end[0] + 1)})
    return count


@pytest.mark.long
def test_moe_layer() -> None:
    """Results and all gradients as of each token alone, with skewed routing and idle experts."""
    moe = example("moe_layer")
    experts, top_k, d, hidden, tokens = 6, 2, 8, 16, 64
    layer = moe.MoE(d, hidden, experts, top_k, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (tokens, d)).at[:, 0].set(1)
    router = layer.router.at[0].set(jnp.array([0, 2, -20, 0, 0, -20.0]))
    dy = (jax.random.normal(jax.random.key(2), x.shape), jnp.array(10.0))

    def layer_of(router: Any, up: Any, down: Any, x: Any) -> Any:
        y, balance, _ = eqx.tree_at(lambda m: (m.router, m.up, m.down), layer, (router, up, down))(x)
        return y, balance

    def reference(router: Any, up: Any, down: Any, x: Any) -> Any:
        """Each token multiplies the matrices of its experts itself."""
        odds = jnp.exp(x @ router)  # [tokens, experts]
        chosen = jnp.argsort(-odds, axis=1)[:, :top_k]
        picked = jnp.take_along_axis(odds, chosen, axis=1)
        y = jnp.zeros_like(x)
        for j in range(top_k):
            rows = jnp.einsum("td,tdh->th", x, up[chosen[:, j]])
            gate, value = rows[:, :hidden], rows[:, hidden:]
            out = jnp.einsum("th,thd->td", gate / (1 + jnp.exp(-gate)) * value, down[chosen[:, j]])
            y += (picked[:, j] / jnp.sum(picked, axis=1))[:, None] * out
        share = jnp.mean(chosen.reshape(-1, 1) == jnp.arange(experts)[None], axis=0, dtype=x.dtype)
        mean = jnp.mean(odds / jnp.sum(odds, axis=1, keepdims=True), axis=0)
        return y, experts * jnp.sum(jax.lax.stop_gradient(share) * mean)

    args = (router, layer.up, layer.down, x)
    got = quick(with_gradients(layer_of), dy, *args)
    assert_close(got, float64(with_gradients(reference), dy, *args))
    used = np.array([expert.any() for expert in got[1][1]])
    assert used.tolist() == [True, True, False, True, True, False] and not got[1][2][~used].any()
    rows = np.bincount(np.argsort(-np.asarray(x @ router), axis=1)[:, :top_k].ravel(), minlength=experts)
    assert rows[1] > 0.4 * rows.sum() and rows[2] == rows[5] == 0


def test_the_moe_layer_is_short() -> None:
    moe = example("moe_layer")
    assert 10 < lines_of_code(moe.MoE, moe.swiglu) <= 25
    parallel = example("expert_parallel")
    over_devices = lines_of_code(parallel.ParallelMoE.__call__, parallel.specs, parallel.over_devices)
    assert 0 < over_devices - lines_of_code(moe.MoE.__call__) <= 5


@pytest.mark.long
def test_first_steps() -> None:
    """Results and all gradients as of each token alone, with biases; in fewer than 40 lines, docstring and all."""
    first = example("first_steps")
    tokens, keys = 24, jax.random.split(jax.random.key(0), 4)
    p = first.parameters(keys[0])
    p |= {name: jax.random.normal(keys[1], b.shape) for name, b in p.items() if "bias" in name}
    x, dy = (jax.random.normal(key, (tokens, first.D)) for key in keys[2:])

    def reference(p: Any, x: Any) -> Any:
        odds = jnp.exp(x @ p["router"])
        chosen = jnp.argsort(-odds, axis=1)[:, :2]
        odds = odds / jnp.sum(odds, axis=1, keepdims=True)
        y = jnp.zeros_like(x)
        for expert in (chosen[:, 0], chosen[:, 1]):
            gate, up = (
                jnp.einsum("td,tdh->th", x, p[name][expert]) + p[f"{name}_bias"][expert] for name in ("gate", "up")
            )
            out = jnp.einsum("th,thd->td", gate / (1 + jnp.exp(-gate)) * up, p["down"][expert]) + p["down_bias"][expert]
            y += jnp.take_along_axis(odds, expert[:, None], axis=1) * out
        return y

    got = quick(with_gradients(partial(first.layer, recipe=None)), dy, p, x)
    assert_close(got, float64(with_gradients(reference), dy, p, x))
    assert len([line for line in (FOLDER / "first_steps.py").read_text().splitlines() if line]) < 40


@pytest.mark.long
def test_lora_adapters() -> None:
    """Ragged and padded ranks, against each token's own product; one adapter has rank 0, one has no token."""
    lora = example("lora_serving")
    ranks, d, d_out, room, tokens = (3, 0, 5, 1, 2), 8, 6, 16, 20
    rng = np.random.default_rng(0)
    packed = lora.random_adapters(ranks, d, d_out, room, rng)
    padded = lora.padded(packed, max(ranks))
    x = rng.normal(size=(tokens, d)).astype(np.float32)
    adapter = rng.choice([-1, 0, 1, 2, 4], size=tokens).astype(np.int32)
    want = np.zeros((tokens, d_out))
    offsets = np.cumsum([0, *ranks])
    for token, i in enumerate(adapter):
        if i >= 0:
            at, b = (np.asarray(w.data, np.float64)[offsets[i] : offsets[i + 1]] for w in (packed.at, packed.b))
            want[token] = x[token].astype(np.float64) @ at.T @ b
    left = jnp.full((room, 1), jnp.nan).at[: sum(ranks)].set(0)  # of adapters that were here before
    packed = lora.Adapters(*(ragged.GroupedTensor(w.data + left, w.first_dims) for w in (packed.at, packed.b)))
    got = quick(lambda p, q, x, ids: (p(x, ids, max_rank=max(ranks)), q(x, ids)), packed, padded, x, adapter)
    assert (adapter < 0).any() and (adapter == 1).any()
    assert_close(got, (want, want))


@pytest.mark.long
def test_lora_of_experts() -> None:
    """Results and all gradients as of each token's own matrices: mixed adapters of different ranks, one of rank 0.

    What lies in the buffers behind the last rank is NaN.
    """
    lora, (experts, adapters, d, hidden, tokens) = example("lora_experts"), (3, 4, 6, 5, 24)
    rng, max_rank, room = np.random.default_rng(0), 5, 32
    ranks = rng.integers(0, max_rank + 1, (3, experts, adapters))
    ranks[:, :, 1], ranks[0, 0, 0] = 0, max_rank
    layers, shapes = [], ((d, hidden), (d, hidden), (hidden, d))
    for of, shape in zip(ranks.reshape(3, -1), shapes, strict=True):
        of = np.minimum(of, [*np.diff(np.minimum(np.cumsum(of), room - 2), prepend=0)])  # leaves a tail
        matrices = [rng.normal(size=(room, n)).astype(np.float32) for n in shape]
        for x in matrices:
            x[of.sum() :] = np.nan
        at, b = (ragged.GroupedTensor(jnp.asarray(x), jnp.asarray(of, jnp.int32)) for x in matrices)
        layers.append(lora.Lora(jnp.asarray(rng.normal(size=(experts, *shape)), jnp.float32), at, b, max_rank))
    x, dy = rng.normal(size=(2, tokens, d)).astype(np.float32)
    adapter = rng.integers(adapters, size=tokens).astype(np.int32)
    chosen = np.stack([rng.permutation(experts)[:2] for _ in range(tokens)]).astype(np.int32)
    weights = rng.uniform(size=(tokens, 2)).astype(np.float32)
    offsets = [np.concatenate([[0], np.cumsum(np.asarray(layer.b.first_dims))]) for layer in layers]

    def of_layers(arrays: Any, x: Any, weights: Any) -> Any:
        def replaced(layer: Any, new: Any) -> Any:
            return eqx.tree_at(lambda m: (m.w, m.at.data, m.b.data), layer, new)

        return lora.moe(tuple(map(replaced, layers, arrays)), x, jnp.asarray(adapter), jnp.asarray(chosen), weights)

    def reference(arrays: Any, x: Any, weights: Any) -> Any:
        """Each pair's matrices are added up, and each token multiplies its own."""
        gate, up, down = (
            jnp.stack([w[p // adapters] + at[o[p] : o[p + 1]].T @ b[o[p] : o[p + 1]] for p in range(len(o) - 1)])
            for (w, at, b), o in zip(arrays, offsets, strict=True)
        )
        pairs, y = chosen * adapters + adapter[:, None], jnp.zeros_like(x)
        for j in range(2):
            z, other = (jnp.einsum("td,tdh->th", x, each[pairs[:, j]]) for each in (gate, up))
            y += weights[:, j, None] * jnp.einsum("th,thd->td", z / (1 + jnp.exp(-z)) * other, down[pairs[:, j]])
        return y

    arrays = [(layer.w, layer.at.data, layer.b.data) for layer in layers]
    got = quick(with_gradients(of_layers), dy, arrays, x, weights)
    assert {0, 1} <= {*adapter.tolist()}  # of rank 0 and of another
    zeroed = [(w, *(np.nan_to_num(np.asarray(each)) for each in low)) for w, *low in arrays]
    assert_close(got, float64(with_gradients(reference), dy, zeroed, x, weights))
    assert len([line for line in (FOLDER / "lora_experts.py").read_text().splitlines() if line]) <= 40


@pytest.mark.long
def test_rgcn_layer() -> None:
    """Forward and gradients as edge by edge; some edges are none, a relation has none, and a node is no target."""
    rgcn = example("rgcn")
    nodes, relations, edges, d, d_out = 7, 4, 30, 5, 3
    rng = np.random.default_rng(0)
    layer = rgcn.RGCNLayer(relations, d, d_out, jax.random.key(0))
    x, dy = (rng.normal(size=(nodes, width)).astype(np.float32) for width in (d, d_out))
    source, target = rng.integers(nodes, size=edges), rng.integers(nodes - 1, size=edges)
    relation = rng.choice([-1, 0, 1, 3], size=edges)

    def reference(own: Any, matrices: Any, x: Any) -> Any:
        out = list(x @ own)
        for s, r, t in zip(source, relation, target, strict=True):
            if r >= 0:
                alike = int(np.sum((relation == r) & (target == t)))
                out[t] += x[s] @ matrices[r] / alike
        return jnp.stack(out)

    def layer_of(own: Any, matrices: Any, x: Any) -> Any:
        ids = (i.astype(np.int32) for i in (source, relation, target))
        return eqx.tree_at(lambda m: (m.own, m.relations), layer, (own, matrices))(x, *map(jnp.asarray, ids))

    args = (layer.own, layer.relations, x)
    got = quick(with_gradients(layer_of), dy, *args)
    assert (relation < 0).any() and not got[1][1][2].any()
    assert_close(got, float64(with_gradients(reference), dy, *args))


def test_import_graph(tmp_path: Path) -> None:
    """Each kind of import; of two of one module the stronger, and none of what is unknown."""
    rgcn = example("rgcn")
    sources = {
        "a": "def f():\n    if x:\n        import sys, os\nimport os, missing\nif x:\n    import b.c",
        "b.__init__": "from . import c\nfrom .c import name\nimport b",
        "b.c": "from b import d\nclass C:\n    def f(self):\n        from os import path",
        "b.d": "from .c import C",
        "b.e.f": "from ..d import C",
    }
    files = {}
    for name, code in sources.items():
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        files[name.removesuffix(".__init__")] = path
    names, imports = rgcn.import_graph(files)
    assert {(names[a], rgcn.KINDS[kind], names[b]) for a, kind, b in imports} == {
        ("a", "top level", "os"),
        ("a", "top level", "b.c"),
        ("a", "in a function", "sys"),
        ("b", "own package", "b.c"),
        ("b.c", "own package", "b.d"),
        ("b.c", "in a function", "os"),
        ("b.d", "own package", "b.c"),
        ("b.e.f", "own package", "b.d"),
    }


def test_ranks_of_held_out_imports() -> None:
    """Known imports and the module itself don't count; of equal scores a place is in the middle."""
    rgcn = example("rgcn")
    scores = np.array([[9, 8, 1, 2, 1, 1], [0, 5, 0, 4, 3, 0]] + [[0] * 6] * 4, np.float32)
    known, held_out = (np.array(rows, np.int32) for rows in ([[0, 0, 1], [1, 0, 3]], [[0, 0, 4], [1, 1, 4]]))
    assert rgcn.ranks(scores, known, held_out).tolist() == [3, 1]


def figures(printed: str, label: str) -> list[float]:
    """The numbers in the line that begins with `label`."""
    (line,) = (line for line in printed.splitlines() if line.strip().startswith(label))
    return [float(x) for x in re.findall(r"[\d.]+(?:e[-+]\d+)?", line.replace(",", ""))]


# What each script's output must show.
SHOWN: dict[str, Callable[[str], bool]] = {
    "first_steps": lambda out: all(learnt(figures(out, f"recipe {recipe}")) for recipe in ("None", "blockwise")),
    "moe_layer": lambda out: figures(out, "MoE")[0] < 0.25 * figures(out, "Dense")[0],
    "lora_serving": lambda out: figures(out, "largest difference")[0] < 1e-4,
    "rgcn": lambda out: all(figures(out, "RGCN")[0] > 1.2 * figures(out, x)[0] for x in ("popularity", "no messages")),
    "varlen_attention": lambda out: figures(out, "largest difference")[0] < 1e-4,
    "finetune_checkpoint": lambda out: (
        "bit for bit: True" in out and out.count(" goes on with ") == 2 and is_falling(out, "loss before step")
    ),
    "expert_parallel --processes 2": lambda out: same_on_all_devices(out),
}


def is_falling(out: str, label: str) -> bool:
    first, *_, last = (float(line.rpartition(" ")[2]) for line in out.splitlines() if line.startswith(label))
    return last < first


def learnt(losses: list[float]) -> bool:
    before, _, after = losses
    return after < 0.05 * before


def same_on_all_devices(out: str) -> bool:
    differences = [figures(out, f"largest difference of {of}")[0] for of in ("losses", "results")]
    return figures(out, "8 devices")[:2] == [8, 2] and max(differences) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", SHOWN)
def test_the_script_runs(name: str) -> None:
    """From end to end; `expert_parallel` with eight devices in two processes."""
    script, *options = name.split()
    run = [sys.executable, str(FOLDER / f"{script}.py"), *options]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}  # optimised, as they run for seconds
    printed = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert SHOWN[name](printed), printed
