"""Layers of published models, over meshes: what they give, and the reference of all of it."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from ragged import GroupedTensor
from ragged.nn import Experts, MoE, Router
from tests.contract.epilogues import ACTIVATIONS
from tests.contract.experts import Weights, chosen, kept, mixture, sigmoid, swiglu
from tests.contract.meshes import mesh_of
from tests.moe import clamped

TOKENS, D, HIDDEN, EXPERTS = 24, 8, 6, 8


FUNCTIONS: dict[Any, Callable[..., np.ndarray]] = {
    "silu": swiglu,
    clamped: ACTIVATIONS["clamped"].value,
    jnp.tanh: np.tanh,
}

# For each model: options of the router, options of the experts, width of the shared expert, whether it has a gate.
DEEPSEEK = {"score": "sigmoid", "groups": (4, 2), "use_selection_bias": True, "epsilon": 1e-20, "scale": 2.5}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int, bool]] = {
    "mixtral": ({"top_k": 2}, {}, 0, False),
    "qwen2-moe": ({"top_k": 4, "normalize": False}, {}, 10, True),
    "olmoe": ({"top_k": 3, "normalize": False}, {}, 0, False),
    "deepseek-v3": ({"top_k": 3} | DEEPSEEK, {}, 6, False),
    "gpt-oss": ({"top_k": 4, "use_bias": True}, {"use_bias": True, "activation": clamped}, 0, False),
    "llama4": ({"top_k": 1, "score": "sigmoid", "normalize": False}, {}, 6, False),
    "no gate": ({"top_k": 2}, {"gated": False, "activation": jnp.tanh}, 0, False),
    "all": ({"top_k": 2, "use_bias": True}, {"use_bias": True}, 12, True),
}
LINEAR = np.resize([-1, 0.5, 1.25], 128)
Draw = tuple[MoE, np.ndarray, np.ndarray]  # the layer, its tokens and which of them are none


@dataclass(frozen=True)
class Layer:
    """A layer of a published model, where it runs, and how; its losses and the gradients of everything."""

    model: str
    mesh: str = ""  # of its axes "data", "expert" and "model": "2x2x2"
    kind: str = "auto"  # "manual": in a `shard_map` of the caller's
    transport: str = "dense"
    chunks: int = 1
    capacity: int | None = None
    padding: str = ""  # "mask", or "sizes" of a packed tensor
    save: str = "pre"
    dtype: str = "float32"

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return "-".join(str(each) if name == "model" else f"{name}={each}" for name, each in given.items())

    @cached_property
    def axes(self) -> dict[str, int]:
        return dict(zip(("data", "expert", "model"), map(int, (self.mesh or "1x1x1").split("x")), strict=True))

    @property
    def devices(self) -> int:
        return self.axes["data"] * self.axes["expert"]

    @property
    def extents(self) -> tuple[int, int]:
        """The widths of tokens and hidden rows. In bfloat16, so many that errors of roundings are as in the mean."""
        return (D, HIDDEN) if self.dtype == "float32" else (128, 64)

    @cached_property
    def layer(self) -> MoE:
        of_router, of_experts, shared, has_gate = MODELS[self.model]
        key, dtype = jax.random.key(0), dict[str, Any](dtype=jnp.dtype(self.dtype))
        how: dict[str, Any] = {**of_experts, **dtype, "save": self.save}
        d, hidden = self.extents
        of_shared: dict[str, Any] = {**how, "activation": "silu"}
        router = Router(d, EXPERTS, key=key, **of_router, **dtype)
        if router.selection_bias is not None:
            router = router.with_selection_bias(jnp.linspace(0.5, -0.5, EXPERTS))
        over: dict[str, Any] = {}
        if self.mesh:
            axis = "expert" if self.axes["expert"] > 1 else None
            over = {"axis": axis, "data_axes": ("data",), "capacity": self.capacity}
            over |= {"tensor_axis": "model" if self.axes["model"] > 1 else None}
            over |= {"transport": self.transport, "chunks": self.chunks}
        return MoE(
            router,
            Experts(d, hidden, EXPERTS, key=key, **how),
            Experts(d, shared, key=key, **of_shared) if shared else None,
            shared_gate=jnp.zeros(d, self.dtype) if has_gate else None,
            weigh_inputs=self.model == "llama4",
            **over,
        )

    def draw(self, number: int) -> Draw:
        """Random arrays, tokens and padding. Some experts get most tokens and some none, or all tokens are the same."""
        rng = np.random.default_rng(number)
        leaves, tree = jax.tree.flatten(eqx.filter(self.layer, eqx.is_inexact_array))
        scales = [leaf.shape[-2] ** -0.5 if leaf.ndim > 1 else 0.5 for leaf in leaves]
        new = [
            jnp.asarray(rng.standard_normal(a.shape) * scale, a.dtype) for a, scale in zip(leaves, scales, strict=True)
        ]
        layer = eqx.combine(jax.tree.unflatten(tree, new), self.layer)
        x = rng.standard_normal((TOKENS, self.extents[0])).astype(self.dtype)
        if number % 3 == 1:  # by the first feature
            x[:, 0] = 1
            skewed = layer.router.weight.at[0].add(jnp.asarray([6, 0, 0, 0, 0, 0, -6, -6], self.dtype))
            layer = eqx.tree_at(lambda layer: layer.router.weight, layer, skewed)
        if number % 3 == 2:
            x[:] = x[:1]
        is_token = (np.ones(TOKENS, bool), rng.random(TOKENS) < 0.7, np.zeros(TOKENS, bool))[(1, 0, 1, 2)[number % 4]]
        if self.padding == "sizes":
            is_token = np.sort(is_token)[::-1]
        return layer, x, is_token if self.padding else np.ones(TOKENS, bool)

    def value(self, y: Array) -> Array:
        """What is differentiated. In bfloat16 it is linear: a slope that depends on `y` would enlarge its rounding."""
        if self.dtype == "float32":
            return jnp.sum(jnp.sin(y))
        return jnp.sum(y * jnp.asarray(LINEAR, y.dtype)[None]).astype(jnp.float32)

    def compute(self, layer: MoE, x: Any, is_token: Any) -> Any:
        """`((loss, (y, stats)), gradients)`."""

        def run(layer: MoE, x: Array, is_token: Array) -> Any:
            if self.padding != "sizes":
                return layer(x, mask=is_token if self.padding else None)
            count = jnp.sum(is_token, dtype=jnp.int32)
            y, stats = layer(GroupedTensor(x, jnp.stack([count // 2, jnp.int32(0), count - count // 2])))
            return y.data, stats

        names = [name for name in ("data", "expert") if name in (layer.axis, *layer.data_axes)]
        if self.kind == "manual":
            rows, more = P(tuple(names)), [layer.tensor_axis] if layer.tensor_axis else []
            specs: Any = {"in_specs": (layer.specs(), rows, rows), "out_specs": (rows, P())}
            run = jax.shard_map(run, axis_names={*names, *more}, **specs)

        def loss(both: tuple[MoE, Array]) -> Any:
            y, stats = run(*both, is_token)
            return self.value(y) + 2 * stats.load_balance + 0.1 * stats.z, (y, stats)

        return eqx.filter_value_and_grad(loss, has_aux=True)((layer, x))

    def check(self, numbers: range) -> None:
        kind = "explicit" if self.kind == "explicit" else "auto"
        used = {name: n for name, n in self.axes.items() if self.mesh and (n > 1 or name == "data")}
        with jax.set_mesh(mesh_of(kind, **used) if used else jax.sharding.get_mesh()):
            run = eqx.filter_jit(self.compute)
            for number in numbers:
                layer, x, is_token = self.draw(number)
                given = np.where(is_token[:, None], x, np.asarray(np.nan, x.dtype))
                self.compare(
                    layer, x.astype(np.float64), is_token, run(layer, jnp.asarray(given), jnp.asarray(is_token))
                )

    def compare(self, layer: MoE, x: np.ndarray, is_token: np.ndarray, got: Any) -> None:
        (_, (y, stats)), (grads, dx) = got
        want, (balance, z, rows, dropped) = self.wanted(layer, x, is_token)
        assert stats.rows.tolist() == rows.tolist() and int(stats.dropped) == dropped
        np.testing.assert_allclose([stats.load_balance, stats.z], [balance, z], rtol=2e-5)
        for name, each in (named(grads) | {"y": y, "x": dx}).items():
            self._close(name, np.asarray(each, np.float64), want[name])
            if name in "yx":
                assert not np.asarray(each)[~is_token].any()

    def wanted(self, layer: MoE, x: np.ndarray, is_token: np.ndarray) -> tuple[Weights, tuple[Any, ...]]:
        """The result and the gradients by the names of `named`; and losses, rows of experts, what is dropped."""
        router, count = layer.router, max(1, int(is_token.sum()))
        ids, weights = (np.full((TOKENS, router.top_k), fill) for fill in (EXPERTS, 0.0))
        routings = {t: chosen(router, x[t], sigmoid) for t in np.flatnonzero(is_token)}
        for t, routing in routings.items():
            ids[t], weights[t] = routing.experts, routing.weights
        keep = np.ones(ids.shape, bool)
        if self.capacity is not None:
            slots = self.transport == "dense"
            keep = kept(ids, EXPERTS, self.axes["expert"], self.capacity, self.devices, self.chunks, slots)
        experts, shared = named(layer.experts), None if layer.shared is None else named(layer.shared)
        gate = None if layer.shared_gate is None else np.asarray(layer.shared_gate, np.float64)
        options: Any = {"shared": shared, "shared_gate": gate, "weigh_inputs": layer.weigh_inputs}
        options |= {} if self.dtype == "float32" else {"slope": lambda y: LINEAR}
        function, given = FUNCTIONS[layer.experts.activation], (x[is_token], ids[is_token], weights[is_token])
        found = mixture(*given, experts, function, keep=keep[is_token], **options)
        rows = np.bincount(ids.ravel(), minlength=EXPERTS + 1)[:EXPERTS]
        share, balance, z = rows / max(1, rows.sum()), 0.0, 0.0
        router_weight = np.asarray(router.weight, np.float64)
        drouter, dbias, y, dx = np.zeros(router_weight.shape), np.zeros(EXPERTS), np.zeros(x.shape), np.zeros(x.shape)
        y[is_token], dx[is_token] = found.y, found.dx
        for i, (t, routing) in enumerate(routings.items()):
            highest = routing.logits.max()
            total = highest + np.log(np.exp(routing.logits - highest).sum())
            balance += EXPERTS * share @ routing.probabilities / count
            z += total**2 / count
            by_z = 0.1 * 2 * total / count * np.exp(routing.logits - total)
            dlogits = routing.pull(found.dweights[i], 2 * EXPERTS * share / count, by_z)
            drouter, dbias = drouter + np.outer(x[t], dlogits), dbias + dlogits
            dx[t] += router_weight @ dlogits
        names = {"y": y, "x": dx, "router": drouter, "router bias": dbias, "shared gate": found.dgate}
        for part, of in (("experts", found.dexperts), ("shared", found.dshared)):
            names |= {f"{part} {name}": each for name, each in of.items()}
        return names, (balance, z, rows, ((ids < EXPERTS) & ~keep).sum())

    def _close(self, name: str, got: np.ndarray, want: np.ndarray) -> None:
        assert got.shape == want.shape and np.isfinite(got).all(), name
        if self.dtype == "float32":
            largest = np.abs(want).max(initial=0)
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5 * max(largest, 1), err_msg=name)
        else:
            # Half a unit for each rounding on the way: what has seen a sum in bfloat16 is off by more. Tokens that are
            # alike are rounded alike, so that errors add up: of both products of an expert and its activation, forward
            # and backward, and where experts, the shared one and the router are added.
            roundings = 4 if name == "y" else 8
            # Small differences of experts' results, or of a result's elements, of which bfloat16 keeps few digits.
            if name.startswith("router") or name == "shared gate":
                return
            assert np.linalg.norm(got - want) <= roundings * 2**-9 / np.sqrt(3) * np.linalg.norm(want), name


def named(module: Any) -> Weights:
    """The arrays of experts, or of a layer (or their gradients), by name."""
    if isinstance(module, MoE):
        found = {"router": module.router.weight, "router bias": module.router.bias, "shared gate": module.shared_gate}
        for part, experts in (("experts", module.experts), ("shared", module.shared)):
            found |= {} if experts is None else {f"{part} {name}": each for name, each in named(experts).items()}
    else:
        parts = {name: getattr(module, name) for name in ("gate", "up", "down") if getattr(module, name) is not None}
        found = {name: part.weight for name, part in parts.items()}
        found |= {f"{name} bias": part.bias for name, part in parts.items()}
    return {name: np.asarray(each, np.float64) for name, each in found.items() if each is not None}
