"""Predicts imports between Python's modules, with a relational graph convolutional network (RGCN).

    uv run --with optax examples/rgcn.py    about twenty seconds on two CPU cores

The graph is the standard library: nodes are modules, edges are imports. There are three kinds of imports: at the top
level, inside a function, and from the same package. Each kind is a relation, and so is its reverse: six relations, each
with its own matrix. The message of an edge is the features of its source times the matrix of its relation. Edges
grouped by relation are ragged rows.

One import in ten is held out. For each module, the model ranks all other modules by the probability of an import
(Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks", 2018). The graph is its only input.
"""

import ast
import sys
import sysconfig
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

import ragged

D, LAYERS, DROPOUT, STEPS, HELD_OUT = 32, 2, 0.2, 300, 0.1
KINDS = ("top level", "in a function", "own package")


def sources() -> dict[str, Path]:
    """Files of the standard library's modules, without tests."""
    folder, modules = Path(sysconfig.get_paths()["stdlib"]), {}
    for name in sorted(sys.stdlib_module_names):
        for path in [folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))]:
            parts = path.relative_to(folder).with_suffix("").parts
            if path.exists() and not any("test" in part for part in parts[1:]):
                modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imported(node: ast.Import | ast.ImportFrom, package: str, known: set[str]) -> set[str]:
    """The known modules that an import statement names. `package` is the package of the importing module."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & known
    ancestors = package.split(".")
    base = ancestors[: len(ancestors) - node.level + 1] if node.level else []
    module = ".".join([*base, *filter(None, [node.module])])
    return {name if (name := f"{module}.{alias.name}") in known else module for alias in node.names} & known


def import_graph(files: dict[str, Path]) -> tuple[list[str], Int[np.ndarray, "edges 3"]]:
    """`(names, edges)`: names of all modules, and a row `(importer, kind, imported)` for each import."""
    names = sorted({*files, *sys.stdlib_module_names})
    known, edges = set(names), {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        stack = [(ast.parse(path.read_bytes()), False)]
        while stack:
            node, in_function = stack.pop()
            if isinstance(node, ast.Import | ast.ImportFrom):
                for other in imported(node, package, known) - {name}:
                    own = other.partition(".")[0] == name.partition(".")[0]
                    kind = KINDS.index("own package" if own else "in a function" if in_function else "top level")
                    edges[name, other] = min(kind, edges.get((name, other), kind))
            in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            stack += [(child, in_function) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    place = {name: i for i, name in enumerate(names)}
    return names, np.array([(place[a], kind, place[b]) for (a, b), kind in sorted(edges.items())], np.int32)


class RGCNLayer(eqx.Module):
    """`out[i] = x[i] @ own + sum_r mean_j x[j] @ relations[r]`, over the edges `j -> i` of each relation `r`."""

    own: Float[Array, "d d_out"]
    relations: Float[Array, "relations d d_out"]

    def __init__(self, relations: int, d: int, d_out: int, key: PRNGKeyArray) -> None:
        keys = jax.random.split(key)
        self.own = jax.random.normal(keys[0], (d, d_out)) * d**-0.5
        self.relations = jax.random.normal(keys[1], (relations, d, d_out)) * d**-0.5

    def __call__(
        self,
        x: Float[Array, "nodes d"],
        source: Int[Array, " edges"],
        relation: Int[Array, " edges"],
        target: Int[Array, " edges"],
    ) -> Float[Array, "nodes d_out"]:
        """New features of the nodes. Edges with relation -1 are ignored."""
        nodes, relations = len(x), len(self.relations)
        route = ragged.route(relation, num_groups=relations)
        messages = ragged.matmul(route.dispatch(x[source]), self.relations)  # ragged rows [edges, d_out]
        alike = target * relations + relation  # (edges,), equal for edges with the same target and relation
        count = jnp.zeros(nodes * relations).at[alike].add(jnp.where(relation < 0, 0.0, 1.0))
        messages = route.combine(messages, 1 / jnp.maximum(count[alike], 1))  # [edges, d_out], in the edges' order
        return x @ self.own + jnp.zeros((nodes, messages.shape[1])).at[target].add(messages)


class Model(eqx.Module):
    """Logits of imports between all pairs of modules."""

    embedding: Float[Array, "nodes d"]
    layers: list[RGCNLayer]
    importer: Float[Array, "d d"]
    popularity: Float[Array, " nodes"]

    def __init__(self, nodes: int, relations: int, layers: int, key: PRNGKeyArray) -> None:
        keys = jax.random.split(key, layers + 2)
        self.embedding = jax.random.normal(keys[0], (nodes, D))
        self.layers = [RGCNLayer(relations, D, D, k) for k in keys[2:]]
        self.importer = jax.random.normal(keys[1], (D, D)) / D
        self.popularity = jnp.zeros(nodes)

    def __call__(self, edges: Int[Array, "edges 3"], key: PRNGKeyArray | None = None) -> Float[Array, "nodes nodes"]:
        """`edges` has rows `(source, relation, target)`. A key turns on dropout."""
        dropout = eqx.nn.Dropout(DROPOUT, inference=key is None)
        keys = [None] * (len(self.layers) + 1) if key is None else jax.random.split(key, len(self.layers) + 1)
        x = dropout(self.embedding, key=keys[-1])  # [nodes, d]
        for layer, layer_key in zip(self.layers, keys, strict=False):
            x = x + dropout(jax.nn.relu(layer(normalize(x), *edges.T)), key=layer_key)
        x = normalize(x)
        return (x @ self.importer) @ x.T + self.popularity  # [importers, imported]


def normalize(x: Float[Array, "nodes d"]) -> Float[Array, "nodes d"]:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def both_ways(imports: Int[Array, "imports 3"]) -> Int[Array, "edges 3"]:
    """Edges from importer to imported module, and back with a different relation. Kind -1 stays -1."""
    importer, kind, other = imports.T
    back = jnp.where(kind < 0, -1, kind + len(KINDS))
    return jnp.concatenate([imports, jnp.stack([other, back, importer], axis=1)])


def train(imports: Int[Array, "imports 3"], nodes: int, layers: int, steps: int) -> Model:
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    def objective(model: Model, key: PRNGKeyArray) -> Float[Array, ""]:
        """Loss of predicting a random 30 % of the imports from the rest."""
        keys = jax.random.split(key)
        hidden = jax.random.bernoulli(keys[0], 0.3, (len(imports),))
        seen = imports.at[:, 1].set(jnp.where(hidden, -1, imports[:, 1]))
        scores = jax.nn.log_softmax(model(both_ways(seen), keys[1]))[imports[:, 0], imports[:, 2]]  # (imports,)
        return -jnp.sum(jnp.where(hidden, scores, 0.0)) / jnp.sum(hidden)

    @eqx.filter_jit(donate="all")
    def train_step(model: Model, state: optax.OptState, step: Array) -> tuple[Model, optax.OptState]:
        grads = eqx.filter_grad(objective)(model, jax.random.fold_in(jax.random.key(1), step))
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state

    model = Model(nodes, 2 * len(KINDS), layers, jax.random.key(0))
    state = optimiser.init(eqx.filter(model, eqx.is_array))
    for step in range(steps):
        model, state = train_step(model, state, jnp.asarray(step))
    return model


def ranks(
    scores: Float[np.ndarray, "nodes nodes"], known: Int[np.ndarray, "known 3"], held_out: Int[np.ndarray, "held_out 3"]
) -> Int[np.ndarray, " held_out"]:
    """Rank of each held-out import among all modules that its importer isn't known to import. 1 is the best."""
    scores = np.array(scores)
    scores[known[:, 0], known[:, 2]] = -np.inf
    np.fill_diagonal(scores, -np.inf)
    rows, own = scores[held_out[:, 0]], scores[held_out[:, 0], held_out[:, 2]][:, None]
    return 1 + np.sum(rows > own, axis=1) + np.sum(rows == own, axis=1) // 2  # ties: the middle rank


def main() -> None:
    began = time.perf_counter()
    names, imports = import_graph(sources())
    kinds = ", ".join(f"{count} {kind}" for count, kind in zip(np.bincount(imports[:, 1]), KINDS, strict=True))
    print(f"{len(names)} modules, {len(imports)} imports ({kinds}), read in {time.perf_counter() - began:.1f} s")
    imports = np.random.default_rng(0).permutation(imports)
    held_out, known = np.split(imports, [round(len(imports) * HELD_OUT)])

    print(f"\n{len(held_out)} held-out imports   mean 1/rank     in the top 10")
    counts = np.bincount(known[:, 2], minlength=len(names)).astype(np.float32)
    popularity = np.broadcast_to(counts, (len(names), len(names)))  # a score: the number of modules that import it
    for name, layers in (("popularity", None), ("no messages", 0), ("RGCN", LAYERS)):
        began, scores = time.perf_counter(), popularity
        if layers is not None:
            model = train(jnp.asarray(known), len(names), layers, STEPS)
            scores = np.asarray(eqx.filter_jit(model)(both_ways(jnp.asarray(known))))
        place = ranks(scores, known, held_out)
        seconds = time.perf_counter() - began
        print(f"    {name:<18}{np.mean(1 / place):12.3f}{np.mean(place <= 10):18.0%}{seconds:12.1f} s", flush=True)


if __name__ == "__main__":
    main()
