"""`MoE`: a mixture of experts, on one device or many."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, PRNGKeyArray

from ragged._activated import finished, with_pre_activations
from ragged._epilogue import activated
from ragged._errors import Site, describe, is_arraylike, is_count
from ragged._gated import gated_products
from ragged._matmul import MatmulProduct, matmul, product_of
from ragged._mesh import resharded, vary_together
from ragged.backends.base import ACTIVATIONS
from ragged.nn.linear import GroupedLinear
from ragged.parallel.exchange import exchange
from ragged.quant.formats import accumulator_dtype
from ragged.quant.recipe import Cast, Recipe
from ragged.tensor.arithmetic import per_row
from ragged.tensor.route import Gathered, Route, route
from ragged.tensor.rows import tangent_of
from ragged.tensor.tensor import GroupedTensor


class Experts(eqx.Module):
    """An MLP for each group: `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate.

    `activation`: a name that `ragged.matmul` knows, or an elementwise function. `save`: see `MoE`.
    """

    gate: GroupedLinear | Any
    up: GroupedLinear
    down: GroupedLinear
    activation: str | Callable[[Array], Array] = eqx.field(static=True)
    save: str = eqx.field(static=True)

    def __init__(
        self,
        d: int,
        hidden: int,
        num_experts: int,
        gated: bool,
        activation: Any,
        save: str,
        *,
        key: PRNGKeyArray,
        **options: Any,
    ) -> None:
        keys = jax.random.split(key, 3)
        self.up, gate = (GroupedLinear(d, hidden, num_experts, False, key=k, **options) for k in keys[:2])
        self.gate = gate if gated else None
        self.down = GroupedLinear(hidden, d, num_experts, False, key=keys[2], **options)
        self.activation, self.save = activation, save

    def __call__(self, x: GroupedTensor | Gathered) -> GroupedTensor:
        """Ragged rows `[rows, d]`, as `x`."""
        run = Experts._run if self.save != "nothing" else eqx.filter_checkpoint(Experts._run)
        return run(self, x)

    def _run(self, x: GroupedTensor | Gathered) -> GroupedTensor:
        if isinstance(self.activation, str):
            return self.down(finished(self._products(x)))  # of [rows, hidden]
        hidden = (self.up if self.gate is None else self.gate)(x).map(self.activation)
        return self.down(hidden if self.gate is None else hidden * self.up(x))

    def _products(self, x: GroupedTensor | Gathered) -> tuple[MatmulProduct, ...]:
        """Those that are activated, or gated."""
        gate, up, save = self.gate, self.up, "pre" if self.save == "nothing" else self.save
        how: dict[str, Any] = {"activation": self.activation, "save": save}
        if gate is None:
            return (product_of(x, up.weight, bias=up.bias, recipe=up.recipe, **how),)
        biases, recipes = (gate.bias, up.bias), (gate.recipe, up.recipe)
        return gated_products(x, gate.weight, up.weight, bias=biases, recipe=recipes, **how)

    def combined(
        self, routed: Route, x: Float[Array, "tokens d"], weights: Float[Array, "tokens top_k"]
    ) -> Float[Array, "tokens d"]:
        """`routed.combine(self(routed.gathered(x)), weights)`, whose derivative keeps less."""
        layers = [layer for layer in (self.gate, self.up, self.down) if layer is not None]
        is_quantized = any(layer.recipe is not None for layer in layers)
        if not isinstance(self.activation, str) or is_quantized or self.down.bias is not None:
            return routed.combine(self(routed.gathered(x)), weights)
        run = Experts._combined if self.save != "nothing" else eqx.filter_checkpoint(Experts._combined)
        return run(self, routed, x, weights)

    def _combined(self, routed: Route, x: Array, weights: Array) -> Array:
        products = self._products(routed.gathered(x))
        if self.save == "out":
            hidden, activation = finished(products), None
            kept: tuple[Array, ...] = (jnp.asarray(hidden.data),)
        else:
            (hidden, kept), activation = with_pre_activations(products), self.activation
        return _summed(activation, kept, self.down.weight, weights, hidden, routed)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _summed(
    activation: str | None, kept: tuple[Array, ...], down: Array, weights: Array, hidden: GroupedTensor, routed: Route
) -> Array:
    """`routed.combine(hidden @ down, weights)`, where `hidden` is the activation of `kept`, rounded."""
    return routed.combine(matmul(hidden, down), weights)


@partial(_summed.defjvp, symbolic_zeros=True)
def _(activation: str | None, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """As if the hidden rows had been weighted, and not the result's.

    So the result isn't kept for the derivative by the weights, whose cotangents are sums over hidden rows times theirs;
    hidden rows are made of `kept` again; and all of that is elementwise, in one pass with the activation's derivative.
    """
    kept, down, weights, hidden, routed = primals
    dtype, wide = hidden.dtype, accumulator_dtype(hidden.dtype)

    def weighted_before(down: Array, weights: Array, *kept: Array) -> Array:
        rows = activated(activation, tuple(each.astype(wide) for each in kept), hidden.first_dims)
        rows = rows * per_row(routed._of_rows(weights.astype(wide)))
        return routed.combine(matmul(rows.astype(dtype), down))

    dkept, ddown, dweights, *_ = tangents
    return _summed(activation, *primals), tangent_of(weighted_before, (down, weights, *kept), (ddown, dweights, *dkept))


class MoEStats(eqx.Module):
    """What a router did with the tokens of all devices.

    - `load_balance`: `()` float32, `experts * sum_e share_e * mean_e` of the experts' shares of the rows and their mean
      probabilities: 1 where all are the same (Switch Transformer, arXiv:2101.03961, eq. 4).
    - `z`: `()` float32, the mean of `logsumexp(logits) ** 2` (ST-MoE, arXiv:2202.08906, eq. 5).
    - `rows`: `(experts,)` int32, those that wanted each expert.
    - `dropped`: `()` int32, those that had no room.

    All are 0 of no tokens.
    """

    load_balance: Float[Array, ""]
    z: Float[Array, ""]
    rows: Int[Array, " experts"]
    dropped: Int[Array, ""]


class MoE(eqx.Module):
    """Each token goes to the `top_k` experts that its router likes best; their results are summed, weighted.

    Over a mesh, each device of `axis` has some of the experts, and rows travel to them; each of `data_axes` has other
    tokens and the same experts; each of `tensor_axis` has a part of `hidden`. Tokens are cut over `data_axes` and
    `axis`. Inside a `jax.shard_map` over these axes, the module and `x` are what a device has of them; elsewhere the
    module maps itself, over the mesh in context. `specs` says who has what.

    - `router`: `[d, num_experts]`. Logits and probabilities, a softmax, are float32.
    - `choose`: what takes the place of the largest probabilities, or None.
    - `experts`: those that tokens are routed to.
    - `shared`: an expert that gets every token, `num_shared * hidden` wide, or None.
    """

    router: Float[Array, "d experts"] | Any
    choose: Callable[[Array], tuple[Array, Array]] | Any
    experts: Experts | Any
    shared: Experts | Any
    top_k: int = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    axis: str | None = eqx.field(static=True)
    data_axes: tuple[str, ...] = eqx.field(static=True)
    tensor_axis: str | None = eqx.field(static=True)
    transport: str | None = eqx.field(static=True)
    capacity: int | None = eqx.field(static=True)
    chunks: int = eqx.field(static=True)
    wire: str | Cast | None = eqx.field(static=True)

    def __init__(
        self,
        d: int | Any,
        hidden: int | Any,
        num_experts: int | Any,
        top_k: int | Any,
        *,
        num_shared: int | Any = 0,
        gated: bool = True,
        activation: str | Callable[[Array], Array] | Any = "silu",
        save: str = "pre",
        normalize: bool = True,
        choose: Callable[[Array], tuple[Array, Array]] | Any = None,
        recipe: Recipe | str | None = None,
        dtype: Any = None,
        axis: str | None = None,
        data_axes: tuple[str, ...] | Any = (),
        tensor_axis: str | None = None,
        transport: str | None = None,
        capacity: int | None = None,
        chunks: int = 1,
        wire: str | Cast | None = None,
        key: PRNGKeyArray,
    ) -> None:
        """`activation`: a name that `ragged.matmul` knows, computed in float32 before hidden rows are rounded; or an
        elementwise function of rounded ones. `save`: what the derivative keeps of each expert: `"pre"`, pre-activations
        (with a function, a recipe or an `axis` also hidden rows); `"out"`, hidden rows; or `"nothing"`, computing again
        what it needs (`"out"` takes a name). Only with a function, a recipe or an `axis`, also the experts' results.
        `normalize`: a token's weights are divided by their sum. `choose`: a function of logits `[tokens, num_experts]`,
        float32, to weights, floats, and the experts' numbers, integers, both `[tokens, top_k]`: they are taken as they
        are, in place of the largest probabilities. If it is a module, its arrays are the layer's, the same on every
        device. `recipe`, `dtype`: as for `GroupedLinear`.
        `transport`, `capacity`, `chunks`, `wire`: as for `ragged.exchange`, where there is an `axis`."""
        site = Site("ragged.nn.MoE(d, hidden, num_experts, top_k)")
        if not is_count(top_k) or not is_count(num_experts) or top_k > num_experts:
            problem = f"`top_k` is {top_k!r} and `num_experts` is {num_experts!r}."
            site.fail(ValueError, problem, "Both are positive ints, and a token goes to no expert twice.")
        if not (activation in ACTIVATIONS if isinstance(activation, str) else callable(activation)):
            mend = f"Pass one of {', '.join(map(repr, ACTIVATIONS))}, or an elementwise function."
            site.fail(ValueError, f"unknown `activation` {activation!r}.", mend)
        if save not in ("pre", "out", "nothing") or (save == "out" and not isinstance(activation, str)):
            mend = "Pass 'pre', 'nothing', or, where the activation is a name, 'out'."
            site.fail(ValueError, f"`save` is {save!r}, `activation` {activation!r}.", mend)
        axes = [name for name in (axis, *data_axes, tensor_axis) if name is not None]
        if isinstance(data_axes, str) or len({*axes}) < len(axes):
            problem = f"`axis` is {axis!r}, `data_axes` {data_axes!r} and `tensor_axis` {tensor_axis!r}."
            mend = "They are the names of different mesh axes, those of `data_axes` in a tuple."
            site.fail(ValueError, problem, mend)
        if choose is not None and not callable(choose):
            site.fail(TypeError, f"`choose` is {describe(choose)}.", "It must be a function of logits.")
        keys, how = jax.random.split(key, 3), {"recipe": recipe, "dtype": dtype}
        router = GroupedLinear(d, num_experts, 1, False, dtype=dtype, key=keys[0])
        self.router = router.weight[0]
        is_tree = choose is None or isinstance(choose, eqx.Module)
        self.choose = choose if is_tree else jax.tree_util.Partial(choose)  # which has no leaves
        self.experts = Experts(d, hidden, num_experts, gated, activation, save, key=keys[1], **how)
        self.shared = None
        if num_shared:
            self.shared = Experts(d, num_shared * hidden, 1, gated, activation, save, key=keys[2], **how)
        self.top_k, self.normalize = top_k, normalize
        self.axis, self.data_axes, self.tensor_axis = axis, data_axes, tensor_axis
        self.transport, self.capacity, self.chunks, self.wire = transport, capacity, chunks, wire

    def __call__(self, x: Float[Array, "tokens d"] | Any) -> tuple[Float[Array, "tokens d"], MoEStats]:
        """The tokens' new rows, of `x`'s dtype, and what the router did.

        **Raises:** `TypeError` if `x` is no floating array; `ValueError` without a mesh for the module's axes, where
        they don't divide the tokens, and as `Exchange.map` does.
        """
        axes, mesh = {*self._token_axes, self.tensor_axis} - {None}, jax.sharding.get_abstract_mesh()
        _check(self, x, axes, mesh)
        if axes <= {*mesh.manual_axes}:
            return self._of_device(x)
        return _over_mesh(self, x, axes=tuple(sorted(axes)))

    def _of_device(self, x: Float[Array, "tokens d"]) -> tuple[Float[Array, "tokens d"], MoEStats]:
        logits = _logits(x, self.router)
        probabilities = jax.nn.softmax(logits)
        weights, chosen = self._chosen(logits, probabilities)
        routed, dropped = route(chosen, self.router.shape[1]), jnp.zeros((), jnp.int32)
        if self.axis is None:
            y = self.experts.combined(routed, x, weights)
        else:
            ex = exchange(routed, self.axis, self.transport, self.capacity, self.chunks, self.wire)
            y, dropped = ex.map(self.experts, x, weights), ex.dropped
        if self.shared is not None:
            everyone = jnp.full(1, x.shape[0], jnp.int32)
            y = y + self.shared(GroupedTensor(x, everyone)).data
        y = _over(lax.psum, y, (self.tensor_axis,) if self.tensor_axis else ()).astype(x.dtype)
        rows, dropped = (_over(lax.psum, n, self._token_axes) for n in (routed.first_dims, dropped))
        tokens = max(x.shape[0], 1)  # of none, the statistics are zero
        mean, z = jnp.sum(probabilities, axis=0) / tokens, jnp.sum(jax.nn.logsumexp(logits, axis=1) ** 2) / tokens
        mean, z = (_over(lax.pmean, each, self._token_axes) for each in (mean, z))
        share = rows.astype(jnp.float32) / jnp.maximum(1, jnp.sum(rows, dtype=jnp.int32)).astype(jnp.float32)
        return y, MoEStats(share.size * jnp.sum(share * mean), z, rows, dropped)

    def _chosen(self, logits: Array, probabilities: Array) -> tuple[Array, Array]:
        """Each token's experts and their weights, both `[tokens, top_k]`."""
        if self.choose is None:
            weights, chosen = lax.top_k(probabilities, self.top_k)
            return (weights / jnp.sum(weights, axis=1, keepdims=True) if self.normalize else weights), chosen
        weights, chosen = self.choose(logits)
        shape = (logits.shape[0], self.top_k)
        if (weights.shape, chosen.shape) != (shape, shape):
            site = Site("ragged.nn.MoE", {"weights": weights, "chosen": chosen})
            site.fail(ValueError, "`choose` gave other shapes.", f"Both must be [tokens, top_k], {list(shape)}.")
        return weights, chosen

    def specs(self) -> "MoE":
        """The module with a `PartitionSpec` for each array: what `jax.shard_map`'s `in_specs` and shardings take."""

        def spec(path: Any, _: Any) -> P:
            names = [getattr(key, "name", None) for key in path]  # ["experts", "up", "weight"]
            if names[0] not in ("experts", "shared") or names[-1] != "weight":
                return P()
            axis = self.axis if names[0] == "experts" else None
            return P(axis, self.tensor_axis) if names[1] == "down" else P(axis, None, self.tensor_axis)

        return jax.tree_util.tree_map_with_path(spec, self)

    @property
    def _token_axes(self) -> tuple[str, ...]:
        return (*self.data_axes, *((self.axis,) if self.axis else ()))


@partial(jax.jit, static_argnames="axes")
def _over_mesh(moe: MoE, x: Array, axes: tuple[str, ...]) -> tuple[Array, MoEStats]:
    specs, mesh = (moe.specs(), P(moe._token_axes or None)), jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes:
        moe, x = jax.tree.map(lambda leaf, spec: resharded(leaf, mesh, spec), (moe, x), specs)
    out_specs = specs[1], P()
    return jax.shard_map(MoE._of_device, in_specs=specs, out_specs=out_specs, axis_names={*axes})(moe, x)


@jax.checkpoint  # what is kept is `x`, and not in float32
def _logits(x: Float[Array, "tokens d"], router: Float[Array, "d experts"]) -> Float[Array, "tokens experts"]:
    return x.astype(jnp.float32) @ router.astype(jnp.float32)


def _check(moe: MoE, x: Any, axes: set[str], mesh: Any) -> None:
    site, manual = Site("ragged.nn.MoE", {"x": x}), axes & {*mesh.manual_axes}
    if not is_arraylike(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        site.fail(TypeError, "`x` is not a floating array.", "Pass one row a token, as an array [tokens, d].")
    if x.ndim != 2 or x.shape[1] != moe.router.shape[0]:
        problem = f"`x` must be [tokens, {moe.router.shape[0]}]."
        site.fail(ValueError, problem, "Flatten its leading axes: `x.reshape(-1, x.shape[-1])`.")
    if missing := sorted(axes - {*mesh.axis_names}):
        problem = f"the mesh in context has axes {mesh.axis_names}, not {missing}."
        site.fail(ValueError, problem, "Set one that has: `with jax.set_mesh(mesh):`.")
    if manual and manual != axes:
        problem = f"the `shard_map` around it is over {sorted(manual)} only."
        site.fail(ValueError, problem, f"Map over all of {sorted(axes)}, or over none.")
    cut = 1 if manual else math.prod(mesh.shape[name] for name in moe._token_axes)
    if x.shape[0] % cut:
        problem = f"{cut} devices over {moe._token_axes} don't divide {x.shape[0]} tokens."
        site.fail(ValueError, problem, "Pad the tokens, or take fewer devices.")


def _over(collective: Callable[..., Array], x: Array, axes: tuple[str, ...]) -> Array:
    """`collective` of what each device of `axes` has, also of what is the same on all."""
    return collective(vary_together([x, *map(lax.axis_index, axes)])[0], axes) if axes else x
