"""`MoE`: a mixture of experts, on one device or many."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int, PRNGKeyArray, Shaped

from ragged.core.errors import Site, describe, is_arraylike, is_concrete
from ragged.core.formats import accumulator_dtype, promote
from ragged.core.mesh import resharded, vary_together
from ragged.core.offsets import as_int32
from ragged.core.rows import tangent_of
from ragged.nn.linear import GroupedLinear
from ragged.nn.router import Router, Routing, check_rows
from ragged.ops.activated import with_epilogue, with_pre_activations
from ragged.ops.gated import gated_requests
from ragged.ops.matmul import matmul, request_of
from ragged.ops.request import Arguments, Request
from ragged.parallel.exchange import check_options, exchange
from ragged.primitive.epilogue import activated
from ragged.primitive.sharding import axes_of, spec_of
from ragged.product.function import Function, function_of
from ragged.quant.recipe import Cast, Recipe
from ragged.quant.weights import QuantizedWeights
from ragged.tensor.arithmetic import per_row
from ragged.tensor.base import check_not_quantized
from ragged.tensor.route import Gathered, Route, route, weights_of_rows
from ragged.tensor.tensor import GroupedTensor


class Experts(eqx.Module):
    """An MLP for each group: `down(activation(gate(x), up(x)))`, or `down(activation(up(x)))` without a gate.

    - `gate`, `up`: `GroupedLinear` from `d` to `hidden` features; `gate` may be None.
    - `down`: `GroupedLinear` from `hidden` to `d` features.
    - `activation`, `save`: static, see `__init__`.
    """

    gate: GroupedLinear | None
    up: GroupedLinear
    down: GroupedLinear
    activation: str | Callable[..., Array] = eqx.field(static=True)
    save: str = eqx.field(static=True)

    def __init__(
        self,
        d: int,
        hidden: int,
        num_experts: int = 1,
        *,
        gated: bool = True,
        activation: str | Callable[[Array], Array] | Callable[[Array, Array], Array] = "silu",
        use_bias: bool = False,
        save: str = "pre",
        recipe: Recipe | str | None = None,
        dtype: Any = None,
        key: PRNGKeyArray,
    ) -> None:
        """Initialises the three layers, as `GroupedLinear` does.

        **Arguments:**

        - `d`, `hidden`: numbers of features of a token and of a hidden row.
        - `num_experts`: number of groups. The shared expert of an `MoE` has one.
        - `gated`: whether there is a `gate`.
        - `activation`: as in `ragged.gated_matmul`, or without a gate as in `ragged.matmul`: a name or an elementwise
          function, computed in float32 before the hidden rows are rounded.
        - `save`: the arrays that are saved for the derivative, besides `x`. `"pre"`: pre-activations, and with a recipe
          or in an `MoE` with an `axis` also hidden rows. `"out"`: hidden rows. `"nothing"`: none, they are recomputed.
          With a recipe, a bias of `down` or an `axis`, all three also save the experts' results.
        - `use_bias`, `recipe`, `dtype`: as for `GroupedLinear`, in all three layers. By default, there are no biases.
        - `key`: a key of `jax.random`, for the weights and biases.

        **Raises:** `ValueError` or `TypeError` for an invalid activation or an unknown `save`, and as `GroupedLinear`.
        """
        site = Site("ragged.nn.Experts(d, hidden, num_experts)")
        function_of(site, activation, 2 if gated else 1, jnp.float32)
        if save not in ("pre", "out", "nothing"):
            site.fail(ValueError, f"unknown `save` {save!r}.", "Pass 'pre', 'out' or 'nothing'.")
        keys, options = jax.random.split(key, 3), {"use_bias": use_bias, "recipe": recipe, "dtype": dtype}
        self.up, gate = (GroupedLinear(d, hidden, num_experts, key=k, **options) for k in keys[:2])
        self.gate = gate if gated else None
        self.down = GroupedLinear(hidden, d, num_experts, key=keys[2], **options)
        self.activation, self.save = activation, save

    def __call__(self, x: GroupedTensor | Gathered, tensor_axis: str | None = None) -> GroupedTensor:
        """Ragged rows `[rows, d]` with the groups of `x`, in the common dtype of `x` and the weights, zeros in the
        tail. Raises as `ragged.gated_matmul` does.

        `tensor_axis`: the mesh axis over which `hidden` is sharded, inside `jax.shard_map`. The result is then this
        device's summand of a sum over the axis, in the accumulator's dtype.
        """
        return self._recomputed(Experts._run)(self, x, tensor_axis)

    def _run(self, x: GroupedTensor | Gathered, tensor_axis: str | None) -> GroupedTensor:
        hidden = with_epilogue(self._products(x))  # [rows, hidden]
        if tensor_axis is None:
            return self.down(hidden)
        down = self.down
        if down.bias is not None:  # only one of the summands has it
            is_first = lax.axis_index(tensor_axis) == 0
            down = eqx.tree_at(
                lambda layer: layer.bias, down, jnp.where(is_first, down.bias, jnp.zeros_like(down.bias))
            )
        return _unrounded(down, hidden)

    def _products(self, x: GroupedTensor | Gathered) -> tuple[Request, ...]:
        # With "nothing", this runs in a checkpoint: the arrays that "pre" saves exist only in the backward pass.
        gate, up, save = self.gate, self.up, "pre" if self.save == "nothing" else self.save
        arguments = Arguments(activation=self.activation, save=save, bias=up.bias, recipe=up.recipe)
        if gate is None:
            return (request_of(x, up.weight, arguments),)
        pairs = replace(arguments, bias=(gate.bias, up.bias), recipe=(gate.recipe, up.recipe))
        return gated_requests(x, gate.weight, up.weight, pairs)

    def combined(
        self,
        routed: Route,
        x: Float[Array, "tokens d"],
        weights: Float[Array, "tokens top_k"] | None,
        tensor_axis: str | None = None,
    ) -> Float[Array, "tokens d"]:
        """`routed.combine(self(routed.gathered(x), tensor_axis), weights)`.

        With weights, without recipes or float16, and if `down` is an array without a bias, fewer arrays are saved for
        the derivative: see `_summed`.
        """
        layers = [layer for layer in (self.gate, self.up, self.down) if layer is not None]
        has_recipe = any(layer.recipe is not None for layer in layers)
        # A quantised weight has no derivative.
        is_quantized = isinstance(self.down.weight, GroupedTensor) and self.down.weight.is_quantized
        # In float16, hidden rows times a weight may overflow where their product with `down` doesn't.
        is_half = jnp.float16 in (x.dtype, self.up.weight.dtype)
        if weights is None or has_recipe or is_quantized or is_half or self.down.bias is not None:
            return routed.combine(self._routed(routed, x, tensor_axis), weights)
        return self._recomputed(Experts._combined)(self, routed, x, weights, tensor_axis is not None)

    def _recomputed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return eqx.filter_checkpoint(run) if self.save == "nothing" else run

    def _routed(self, routed: Route, x: Array, tensor_axis: str | None) -> GroupedTensor:
        """`self(routed.gathered(x), tensor_axis)`. A checkpoint gathers the rows inside, and doesn't save them."""

        def run(self: Experts, routed: Route, x: Array) -> GroupedTensor:
            return self._run(routed.gathered(x), tensor_axis)

        return self._recomputed(run)(self, routed, x)

    def _combined(self, routed: Route, x: Array, weights: Array, is_part: bool) -> Array:
        """`combined` by `_summed`, which saves fewer arrays. `is_part`: see `_summed`."""
        products = self._products(routed.gathered(x))
        if self.save == "out":
            hidden, function = with_epilogue(products), None
            saved: tuple[Array, ...] = (jnp.asarray(hidden.data),)
        else:
            (hidden, saved), function = with_pre_activations(products), products[0].function
        return _summed(function, is_part, saved, self.down.weight, weights, hidden, routed)


def _unrounded(down: GroupedLinear, x: GroupedTensor) -> GroupedTensor:
    """`down(x)` in the accumulator's dtype. Its derivative is the derivative of the rounded `down(x)`."""
    return GroupedTensor(_unrounded_rows(down, x), x.first_dims)


@jax.custom_jvp
def _unrounded_rows(down: GroupedLinear, x: GroupedTensor) -> Array:
    options: dict[str, Any] = {"bias": down.bias, "recipe": down.recipe}
    return jnp.asarray(matmul(x, down.weight, preferred_element_type=_part_dtype(x, down.weight), **options).data)


@partial(_unrounded_rows.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    out, (leaves, tree) = _unrounded_rows(*primals), jax.tree.flatten(primals)
    nonzero = {i: d for i, d in enumerate(tree.flatten_up_to(tangents)) if not isinstance(d, SymbolicZero)}

    def rounded(replaced: dict[int, Array]) -> Array:
        down, x = tree.unflatten([replaced.get(i, leaf) for i, leaf in enumerate(leaves)])
        return jnp.asarray(down(x).data)

    tangent = jax.jvp(rounded, ({i: leaves[i] for i in nonzero},), (nonzero,))[1]
    return out, tangent.astype(out.dtype)


def _part_dtype(x: Any, weight: Any) -> Any:
    """Dtype of an unrounded summand: the accumulator's dtype for these operands."""
    is_narrow = jnp.dtype(weight.dtype).itemsize == 1  # a quantised weight's result has the dtype of the rows
    return accumulator_dtype(x.dtype if is_narrow else promote(x.dtype, weight.dtype))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _summed(
    function: Function | None,
    is_part: bool,
    saved: tuple[Array, ...],
    down: Array,
    weights: Array,
    hidden: GroupedTensor,
    routed: Route,
) -> Array:
    """`routed.combine(hidden @ down, weights)`. `hidden` is the rounded `function(*saved)`; without a function, `saved`
    has only its buffer.

    With `is_part`, the result is a summand of a sum over devices and isn't rounded; its derivative is computed as if it
    were.
    """
    return routed.combine(
        matmul(hidden, down, preferred_element_type=_part_dtype(hidden, down) if is_part else None), weights
    )


@partial(_summed.defjvp, symbolic_zeros=True)
def _(function: Function | None, is_part: bool, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The derivative of the same sum with the weights applied to the hidden rows, before the down product.

    The weights' gradient then needs only the hidden rows, recomputed from `saved`, and their cotangents. So the result
    of the down product isn't saved, and XLA fuses the added elementwise operations and row sums with the activation's
    derivative.
    """
    saved, down, weights, hidden, routed = primals
    dtype, accumulator = hidden.dtype, accumulator_dtype(hidden.dtype)

    def weighted_before(down: Array, weights: Array, *saved: Array) -> Array:
        z, first_dims = tuple(each.astype(accumulator) for each in saved), hidden.first_dims
        rows = GroupedTensor(z[0], first_dims) if function is None else activated(function, z, first_dims)
        # The transpose of this sums cotangents of weights over devices: one number per row, instead of one per element.
        of_rows, *_ = vary_together([weights_of_rows(routed, weights.astype(accumulator)), *z])
        rows = rows * per_row(of_rows)
        return routed.combine(matmul(rows.astype(dtype), down))

    dsaved, ddown, dweights, *_ = tangents
    out = _summed(function, is_part, *primals)
    tangent = tangent_of(weighted_before, (down, weights, *saved), (ddown, dweights, *dsaved))
    return out, tangent.astype(out.dtype)


class MoEStats(eqx.Module):
    """Statistics of a router over the tokens of all devices, without padding. Without tokens, all are 0.

    - `load_balance`: `()` float32, `experts * sum_e share_e * mean_e`, where `share_e` is the share of the rows that go
      to expert `e`, and `mean_e` its mean probability. It is 1 if the experts are used equally (Switch Transformer,
      arXiv:2101.03961, eq. 4). None if the routing has no probabilities.
    - `z`: `()` float32, the mean of `logsumexp(logits) ** 2` (ST-MoE, arXiv:2202.08906, eq. 5). None if the routing has
      no logits.
    - `rows`: `(experts,)` int32, the number of rows routed to each expert, including dropped rows.
    - `dropped`: `()` int32, the number of rows that exceeded the capacity.
    """

    load_balance: Float[Array, ""] | None
    z: Float[Array, ""] | None
    rows: Int[Array, " experts"]
    dropped: Int[Array, ""]


class MoE(eqx.Module):
    """A mixture of experts: each token goes to the experts that a router chooses, and gets the weighted sum of their
    results.

    On a mesh, the layer is sharded over three kinds of axes:

    - `axis`: each device has some of the experts, and rows are exchanged between devices.
    - `data_axes`: devices have different tokens and the same experts.
    - `tensor_axis`: each device has a part of `hidden`. Results are summed over the devices in float32 and then
      rounded. (Tangents in forward mode are rounded before the sum.)

    Tokens are sharded over `data_axes` and `axis`. Inside a `jax.shard_map` over all of these axes, the module and its
    arguments are this device's shards. Elsewhere the module calls `jax.shard_map` itself, over the mesh in context.
    `specs` returns the sharding of each array.

    !!! example
        ```python
        import jax
        from ragged.nn import Experts, MoE, Router
        keys = jax.random.split(jax.random.key(0), 3)
        moe = MoE(Router(16, 8, top_k=2, key=keys[0]), Experts(16, 32, 8, key=keys[1]))
        y, stats = moe(jax.random.normal(keys[2], (64, 16)))
        assert y.shape == (64, 16) and stats.rows.sum() == 64 * 2
        ```
    """

    router: Any
    experts: Experts
    shared: Experts | None
    shared_gate: Float[Array, " d"] | None
    weigh_inputs: bool = eqx.field(static=True)
    axis: str | None = eqx.field(static=True)
    data_axes: tuple[str, ...] = eqx.field(static=True)
    tensor_axis: str | None = eqx.field(static=True)
    transport: str | None = eqx.field(static=True)
    capacity: int | None = eqx.field(static=True)
    chunks: int = eqx.field(static=True)
    wire: str | Cast | None = eqx.field(static=True)

    def __init__(
        self,
        router: Callable[..., Any],
        experts: Experts,
        shared: Experts | None = None,
        *,
        shared_gate: Float[Array, " d"] | None = None,
        weigh_inputs: bool = False,
        axis: str | None = None,
        data_axes: tuple[str, ...] = (),
        tensor_axis: str | None = None,
        transport: str | None = None,
        capacity: int | None = None,
        chunks: int = 1,
        wire: str | Cast | None = None,
    ) -> None:
        """Combines a router and experts.

        **Arguments:**

        - `router`: a `Router`; or any function of the tokens `[tokens, d]`, and of the further arguments of a call,
          that returns a `Routing` or `(weights, experts)`, both `[tokens, top_k]`. The arrays of an Equinox module are
          parameters of the layer, replicated over all devices. Padding is replaced by placeholder rows.
        - `experts`: the experts that tokens are routed to.
        - `shared`: an expert that gets every token: `Experts` with one expert, of any width.
        - `shared_gate`: the result of `shared` is multiplied by `sigmoid(x @ shared_gate)`.
        - `weigh_inputs`: the weights multiply the rows that the experts get, instead of their results.
        - `transport`, `capacity`, `chunks`, `wire`: as for `ragged.exchange`. Without an `axis`, they have no effect:
          no row is sent, and none is dropped.

        **Raises:** `TypeError` or `ValueError` if the parts don't fit together, or the axes are invalid.
        """
        site = Site("ragged.nn.MoE(router, experts)")
        if not callable(router) or isinstance(router, type):
            hint = "Pass a `ragged.nn.Router`, not its class, or a function of tokens."
            site.fail(TypeError, f"`router` is {describe(router)}.", hint)
        if not isinstance(experts, Experts) or not isinstance(shared, Experts | None):
            problem = f"`experts` is {describe(experts)}, and `shared` is {describe(shared)}."
            site.fail(TypeError, problem, "Pass `ragged.nn.Experts`. `shared` may be None.")
        num_experts, d = experts.up.weight.shape[:2]
        if isinstance(router, Router) and router.weight.shape != (d, num_experts):
            problem = f"`router` is for {router.weight.shape[1]} experts and {router.weight.shape[0]} features, "
            site.fail(ValueError, problem + f"but `experts` for {num_experts} and {d}.", "Give both the same numbers.")
        if shared is not None and shared.up.weight.shape[:2] != (1, d):
            problem = f"`shared` has {shared.up.weight.shape[0]} experts for {shared.up.weight.shape[1]} features."
            site.fail(ValueError, problem, f"Pass one, for {d} features. It may have any width.")
        fits = is_arraylike(shared_gate) and shared_gate.shape == (d,)
        if shared_gate is not None and not (fits and shared is not None):
            hint = f"Pass `shared`, and an array ({d},)."
            site.fail(ValueError, f"`shared_gate` is {describe(shared_gate)}.", hint)
        others = [name for name in (axis, tensor_axis) if name is not None]
        axes = [*data_axes, *others] if isinstance(data_axes, tuple) else [None]
        if not all(isinstance(name, str) for name in axes) or len({*axes}) < len(axes):
            problem = f"`axis` is {axis!r}, `data_axes` is {data_axes!r} and `tensor_axis` is {tensor_axis!r}."
            hint = "They must be names of different mesh axes, and `data_axes` must be a tuple."
            site.fail(ValueError, problem, hint)
        check_options(site, transport, capacity, chunks, wire)
        # A plain function isn't a valid leaf under `jit`. As a `Partial` it is a pytree without leaves.
        self.router = cast(Any, router if isinstance(router, eqx.Module) else jax.tree_util.Partial(router))
        self.experts, self.shared, self.shared_gate, self.weigh_inputs = experts, shared, shared_gate, weigh_inputs
        self.axis, self.data_axes, self.tensor_axis = axis, data_axes, tensor_axis
        self.transport, self.capacity, self.chunks, self.wire = transport, capacity, chunks, wire

    @overload
    def __call__(
        self, x: GroupedTensor, *args: Any, routing: Routing | tuple[Any, Any] | None = None
    ) -> tuple[GroupedTensor, MoEStats]: ...

    @overload
    def __call__(
        self,
        x: Float[Array | np.ndarray, "tokens d"],
        *args: Any,
        mask: Bool[Array | np.ndarray, " tokens"] | None = None,
        routing: Routing | tuple[Any, Any] | None = None,
    ) -> tuple[Float[Array, "tokens d"], MoEStats]: ...

    def __call__(self, x: Any, *args: Any, mask: Any = None, routing: Any = None) -> tuple[Any, MoEStats]:
        """`(y, stats)`: the results of all tokens, in the shape and dtype of `x`, and the router's statistics.

        Padding goes to no expert, its results are zero, the statistics don't count it, and NaN in it affects no result
        and no gradient.

        **Arguments:**

        - `x`: tokens `[tokens, d]`, or a `GroupedTensor` with ragged rows, such as packed sequences. The layer ignores
          the groups of a tensor and treats its tail as padding. It returns a `GroupedTensor` with the same sizes.
        - `args`: arrays with one entry per token, such as ids, for the router: it is called as `router(x, *args)`.
        - `mask`: `(tokens,)` booleans, False for padding. By default, an array `x` has no padding.
        - `routing`: a `Routing` or `(weights, experts)` that replaces the router's.

        All arrays are sharded like `x`.

        **Raises:** `TypeError` or `ValueError` for wrong dtypes and shapes, and for experts that are out of range (if
        `routing` is known when the program is traced); `ValueError` if the mesh in context lacks an axis of the module,
        if the axes don't divide the rows, and as `Exchange.map` does.
        """
        axes, mesh = {*self._token_axes, self.tensor_axis} - {None}, jax.sharding.get_abstract_mesh()
        _check(self, x, args, mask, axes, mesh)
        if routing is not None:
            # Inside a `shard_map` over `axis`, `experts` has only this device's experts.
            shards = mesh.shape[self.axis] if self.axis in mesh.manual_axes else 1
            routing = _checked_routing("`routing`", routing, x.shape[0], self.experts.up.weight.shape[0] * shards)
        data, is_packed = jnp.asarray(x.data if isinstance(x, GroupedTensor) else x), isinstance(x, GroupedTensor)
        if is_packed:
            mask = jnp.arange(x.shape[0], dtype=jnp.int32) < x.offsets[-1]
        inputs = data, tuple(map(jnp.asarray, args)), None if mask is None else jnp.asarray(mask), routing
        if axes <= {*mesh.manual_axes}:
            y, stats = self._of_device(*inputs, is_packed)
        else:
            y, stats = _over_mesh(self, *inputs, is_packed, axes=tuple(sorted(axes)))
        return (x.with_data(y) if isinstance(x, GroupedTensor) else y), stats

    def _of_device(
        self,
        x: Float[Array, "tokens d"],
        args: tuple[Array, ...],
        mask: Bool[Array, " tokens"] | None,
        routing: Routing | None,
        is_packed: bool,
    ) -> tuple[Float[Array, "tokens d"], MoEStats]:
        """`(y, stats)` for this device's tokens. `is_packed`: padding is at the end."""
        is_token = None if mask is None else mask[:, None]
        num_experts = self.experts.up.weight.shape[0] * (1 if self.axis is None else lax.axis_size(self.axis))
        routing = self._routing(x, args, is_token, num_experts) if routing is None else routing
        weights, chosen = routing.weights, as_int32(routing.experts)
        top_k, chosen = chosen.shape[1], _with_padding(chosen, is_token, num_experts)  # Padding goes to no expert.
        if is_token is not None:
            weights = jnp.where(is_token, weights, jnp.zeros((), weights.dtype))
        # The transpose of this sums the tokens' cotangents over the tensor axis: once, instead of for each product.
        varying = x if self.tensor_axis is None else vary_together([x, lax.axis_index(self.tensor_axis)])[0]
        tokens = varying
        if self.weigh_inputs:  # Each of a token's rows is a token of its own, with one expert.
            wide = promote(accumulator_dtype(x.dtype), accumulator_dtype(weights.dtype))
            weighted = _with_padding(varying, is_token, 0).astype(wide)[:, None] * weights.astype(wide)[:, :, None]
            tokens, chosen, weights = weighted.astype(x.dtype).reshape(-1, x.shape[1]), chosen.reshape(-1, 1), None
        routed, dropped = route(chosen, num_experts), jnp.zeros((), jnp.int32)
        if self.axis is None:
            y = self.experts.combined(routed, tokens, weights, self.tensor_axis)
        else:
            ex = exchange(routed, self.axis, self.transport, self.capacity, self.chunks, self.wire)
            run = partial(Experts.__call__, tensor_axis=self.tensor_axis)
            y, dropped = ex.map(jax.tree_util.Partial(run, self.experts), tokens, weights), ex.dropped
        if self.weigh_inputs and top_k > 1:
            y = jnp.sum(y.reshape(-1, top_k, x.shape[1]).astype(accumulator_dtype(y.dtype)), axis=1)
        if self.shared is not None:
            y = y + self._of_shared(varying, is_token, is_packed)
        y = _over(lax.psum, y, (self.tensor_axis,) if self.tensor_axis else ()).astype(x.dtype)
        return y, self._stats(routing, routed.first_dims, dropped, is_token)

    def _routing(
        self, x: Array, args: tuple[Array, ...], is_token: Bool[Array, "tokens 1"] | None, num_experts: int
    ) -> Routing:
        """The router's choice."""
        if type(self.router) is Router:  # A subclass may have a call of its own.
            return self.router.select(_logits(self.router, x, is_token))
        # Padding gets distinct positive numbers, so that a router that divides by a norm has finite derivatives.
        padding = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None] / jnp.asarray(x.shape[1], x.dtype)
        routing = self.router(_with_padding(x, is_token, padding), *args)
        has_padding = is_token is not None
        return _checked_routing("the router's result", routing, x.shape[0], num_experts, has_padding)

    def _of_shared(self, x: Array, is_token: Bool[Array, "tokens 1"] | None, is_packed: bool) -> Array:
        """The shared expert's results, zero for padding."""
        assert self.shared is not None
        clean = _with_padding(x, is_token, 0)
        count = x.shape[0] if is_token is None or not is_packed else jnp.sum(is_token, dtype=jnp.int32)
        rows = GroupedTensor(x if is_packed else clean, jnp.full(1, count, jnp.int32))
        y = self.shared(rows, self.tensor_axis).data
        if self.shared_gate is not None:
            dtype = promote(accumulator_dtype(x.dtype), accumulator_dtype(self.shared_gate.dtype))
            gate = jax.nn.sigmoid(jnp.matmul(clean.astype(dtype), self.shared_gate.astype(dtype), precision="highest"))
            wide = promote(dtype, accumulator_dtype(y.dtype))
            y = (y.astype(wide) * gate[:, None].astype(wide)).astype(y.dtype)
        return y if is_packed else _with_padding(y, is_token, 0)

    def _stats(
        self, routing: Routing, rows: Array, dropped: Array, is_token: Bool[Array, "tokens 1"] | None
    ) -> MoEStats:
        """Statistics over all devices."""
        count = jnp.int32(routing.weights.shape[0]) if is_token is None else jnp.sum(is_token, dtype=jnp.int32)
        rows, dropped, count = (_over(lax.psum, each, self._token_axes) for each in (rows, dropped, count))

        def mean(x: Array) -> Array:
            x = _with_padding(x.astype(jnp.float32), is_token, 0)
            total = _over(lax.psum, jnp.sum(x, axis=0), self._token_axes)
            return total / jnp.maximum(1, count).astype(jnp.float32)  # 0 without tokens

        balance, z = None, None
        if routing.probabilities is not None:
            # `(experts,)`: the share of all rows that go to each expert
            share = rows.astype(jnp.float32) / jnp.maximum(1, jnp.sum(rows, dtype=jnp.int32)).astype(jnp.float32)
            balance = share.size * jnp.sum(share * mean(routing.probabilities))
        if routing.logits is not None:
            logits = routing.logits.astype(jnp.float32)
            z = mean(jax.nn.logsumexp(logits, axis=1, keepdims=True) ** 2)[0]
        return MoEStats(balance, z, rows, dropped)

    def specs(self) -> "MoE":
        """The module with a `PartitionSpec` in place of each array, for `in_specs` of `jax.shard_map` and shardings.

        Scales of quantised weights are sharded with their blocks. **Raises:** `ValueError` if the mesh in context would
        cut a block.
        """

        def spec(path: Any, leaf: Any) -> Any:
            name, *_ = (getattr(key, "name", None) for key in path)  # such as "experts"
            specs = jax.tree.map(lambda _: P(), leaf)
            if not isinstance(leaf, GroupedLinear) or name not in ("experts", "shared"):
                return specs
            axis, is_down = self.axis if name == "experts" else None, path[1].name == "down"
            axes = (axis, self.tensor_axis, None) if is_down else (axis, None, self.tensor_axis)
            both = _weight_specs(leaf.weight, axes), None if leaf.bias is None else P(axes[0], axes[2])
            return eqx.tree_at(lambda layer: (layer.weight, layer.bias), specs, both, is_leaf=lambda x: x is None)

        return jax.tree_util.tree_map_with_path(spec, self, is_leaf=lambda x: isinstance(x, GroupedLinear))

    @property
    def _token_axes(self) -> tuple[str, ...]:
        return (*self.data_axes, *((self.axis,) if self.axis else ()))


def _weight_specs(weight: Any, axes: tuple[str | None, ...]) -> Any:
    """`weight` with a `PartitionSpec` in place of each array, where `axes` shard its dims `[experts, first, last]`."""
    if isinstance(weight, QuantizedWeights):
        experts, first, last = axes
        given = (weight.weights, axes), (weight.by_first, (experts, last, first)), (weight.by_last, axes)
        parts = [None if each is None else _weight_specs(each, of) for each, of in given]
        fields = lambda x: (x.weights, x.by_first, x.by_last)  # noqa: E731
        return eqx.tree_at(fields, weight, parts, is_leaf=lambda x: x is None)
    if not isinstance(weight, GroupedTensor) or weight.scaling is None:
        return jax.tree.map(lambda _: P(*axes), weight)
    block, mesh = (1, *(weight.scaling.block or (None, None))), jax.sharding.get_abstract_mesh()
    for n, extent, name in zip(weight.shape, block, axes, strict=True):
        devices = mesh.shape.get(name, 1)
        if extent not in (None, 1) and devices > 1 and n % (extent * devices):
            problem = f"{devices} devices over {name!r} would cut blocks of scales: {n} elements in blocks of {extent}."
            hint = "Use fewer devices there, or a scaling with smaller blocks."
            Site("ragged.nn.MoE", {"weight": weight}).fail(ValueError, problem, hint)
    # One scale for a whole dim is replicated over all devices.
    of_scales = tuple(name if extent else None for name, extent in zip(axes, block, strict=True))
    of = {"scales": of_scales, "zero_points": of_scales, "tensor_scale": axes}
    return jax.tree_util.tree_map_with_path(lambda path, leaf: P(*of.get(path[-1].name, axes)[: leaf.ndim]), weight)


@partial(jax.jit, static_argnames=("is_packed", "axes"))
def _over_mesh(
    moe: MoE,
    x: Array,
    args: tuple[Array, ...],
    mask: Array | None,
    routing: Routing | None,
    is_packed: bool,
    axes: tuple[str, ...],
) -> tuple[Array, MoEStats]:
    """`(y, stats)` of a call outside of `shard_map`: maps `_of_device` over these axes of the mesh in context."""
    of_tokens, mesh = P(moe._token_axes or None), jax.sharding.get_abstract_mesh()
    operands = moe, x, args, mask, routing
    specs = moe.specs(), *jax.tree.map(lambda _: of_tokens, operands[1:])
    if mesh.explicit_axes:  # `shard_map` itself splits over `Auto` axes
        operands = jax.tree.map(lambda x, spec: resharded(x, mesh, _only(spec, mesh.explicit_axes)), operands, specs)
    options: Any = {"in_specs": specs, "out_specs": (of_tokens, P()), "axis_names": {*axes}}
    return jax.shard_map(lambda moe, *inputs: moe._of_device(*inputs, is_packed), **options)(*operands)


def _only(spec: P, names: tuple[str, ...]) -> P:
    """The spec without other mesh axes than these."""
    return spec_of(tuple(name for name in each if name in names) for each in axes_of(spec, 0))


@jax.checkpoint  # The derivative saves `x` in its own dtype, instead of a float32 copy.
def _logits(
    router: Router, x: Float[Array, "tokens d"], is_token: Bool[Array, "tokens 1"] | None
) -> Float[Array, "tokens experts"]:
    logits = router.logits(_with_padding(x, is_token, 0))
    # Padding gets distinct positive logits, so that a score that is divided by a sum has finite derivatives.
    padding = jnp.arange(1, logits.shape[1] + 1, dtype=jnp.float32)[None] / logits.shape[1]
    return _with_padding(logits, is_token, padding)


def _with_padding(x: Shaped[Array, "tokens n"], is_token: Bool[Array, "tokens 1"] | None, fill: Any) -> Array:
    """`x` with `fill` in the rows of padding. Without padding, `is_token` is None."""
    return x if is_token is None else jnp.where(is_token, x, fill)


def _check(moe: MoE, x: Any, args: tuple[Any, ...], mask: Any, axes: set[str], mesh: Any) -> None:
    """Raises unless the arguments and the mesh in context fit the module, which needs the mesh axes `axes`."""
    site, manual, d = Site("ragged.nn.MoE", {"x": x}), axes & {*mesh.manual_axes}, moe.experts.up.weight.shape[1]
    is_tensor = isinstance(x, GroupedTensor)
    if is_tensor:
        check_not_quantized(x)
        if x.kind != "ragged rows" or x.ndim != 2 or x.shape[1] != d:
            hint = "Pass packed rows: `ragged.GroupedTensor(rows, first_dims=sizes)`."
            site.fail(ValueError, f"`x` must have ragged rows, [tokens, {d}].", hint)
        if mask is not None:
            site.also(mask=mask).fail(
                ValueError, "`mask` is given, but the sizes of `x` determine it.", "Leave it out."
            )
    check_rows(site, "x", x.data if is_tensor else x, d)
    if mask is not None and (not is_arraylike(mask) or mask.dtype != bool or mask.shape != (x.shape[0],)):
        hint = "Pass one boolean per token, such as `jnp.ones(x.shape[0], bool)`."
        site.also(mask=mask).fail(TypeError, "`mask` must be a boolean array (tokens,).", hint)
    if args and type(moe.router) is Router:
        site.fail(TypeError, "a `Router` takes only the tokens.", "Leave the further arguments out.")
    if wrong := [each for each in args if not is_arraylike(each) or each.shape[:1] != (x.shape[0],)]:
        hint = "Pass arrays with one entry per token."
        site.also(argument=wrong[0]).fail(ValueError, "an argument doesn't have one entry per token.", hint)
    shards = 1 if manual else math.prod(mesh.shape.get(name, 1) for name in moe._token_axes)
    _check_mesh(site, moe, axes, mesh, manual)
    if x.shape[0] % shards:
        problem = f"{x.shape[0]} tokens can't be divided among {shards} devices over {moe._token_axes}."
        padded = -(-x.shape[0] // shards) * shards
        mask_hint = "" if is_tensor or mask is not None else f" and pass `mask=jnp.arange({padded}) < {x.shape[0]}`"
        site.fail(ValueError, problem, f"Pad `x` to {padded} rows{mask_hint}, or use fewer devices.")


def _check_mesh(site: Site, moe: MoE, axes: set[str], mesh: Any, manual: set[str]) -> None:
    """Raises if the mesh in context lacks some of `axes`, or an enclosing `shard_map` is only over some of them."""
    if missing := sorted(axes - {*mesh.axis_names}):
        problem = f"the mesh in context has axes {mesh.axis_names}, not {missing}."
        site.fail(ValueError, problem, "Set a mesh with these axes: `with jax.set_mesh(mesh):`.")
    if manual and manual != axes:
        problem = f"the enclosing `shard_map` is only over {sorted(manual)}."
        site.fail(ValueError, problem, f"Map over all of {sorted(axes)}, or over none of them.")
    layers = [layers.up.weight.shape for layers in (moe.experts, moe.shared) if layers is not None]
    widths = [(shape[2], "hidden features", moe.tensor_axis) for shape in layers]
    for n, what, name in [(layers[0][0], "experts", moe.axis), *widths]:
        if name is not None and not manual and n % mesh.shape[name]:
            problem = f"{n} {what} can't be divided among {mesh.shape[name]} devices over {name!r}."
            site.fail(ValueError, problem, "Each device has the same number of them: use fewer devices over this axis.")


def _checked_routing(name: str, routing: Any, tokens: int, num_experts: int, has_padding: bool = False) -> Routing:
    """`routing`, a `Routing` or a pair of weights and experts, as a `Routing` of JAX's arrays.

    Raises if a field has a wrong kind, shape or dtype. Also raises if an expert is out of range, unless the experts are
    traced, or `has_padding`: then any expert may be padding's. `name`: what an error calls the routing.
    """
    site = Site("ragged.nn.MoE")
    if isinstance(routing, tuple | list) and len(routing) == 2:
        routing = Routing(*routing)
    if not isinstance(routing, Routing):
        hint = "Pass `(weights, experts)`, or a `ragged.nn.Routing`."
        site.fail(TypeError, f"{name} is {describe(routing)}.", hint)
    given: dict[str, Any] = {
        key: x for key, x in vars(routing).items() if x is not None or key in ("weights", "experts")
    }
    site = site.also(**given)
    if not all(map(is_arraylike, given.values())):
        site.fail(TypeError, f"{name} has fields that aren't arrays.", "Only probabilities and logits may be None.")
    top_k = jnp.shape(routing.weights)[-1:]
    shapes = {key: (tokens, *(top_k if key in ("weights", "experts") else [num_experts])) for key in given}
    if any(x.shape != shapes[key] for key, x in given.items()):
        hint = f"Weights and experts must both be [{tokens}, top_k], and probabilities and logits, if any, "
        site.fail(ValueError, f"{name} has wrong shapes.", hint + f"[{tokens}, {num_experts}].")
    kinds = {key: jnp.integer if key == "experts" else jnp.floating for key in given}
    if not all(jnp.issubdtype(x.dtype, kinds[key]) for key, x in given.items()):
        hint = "Pass weights, floats, and then experts, integers. Probabilities and logits are floats."
        site.fail(TypeError, f"{name} has wrong dtypes.", hint)
    experts = np.asarray(routing.experts) if is_concrete(routing.experts) else np.zeros(0, int)
    if experts.size and not has_padding and not 0 <= experts.min() <= experts.max() < num_experts:
        problem = f"{name} has experts from {experts.min()} to {experts.max()}, but there are {num_experts}."
        site.fail(ValueError, problem, f"Pass 0 to {num_experts - 1}. Padding can have any of them.")
    return jax.tree.map(jnp.asarray, routing)


def _over(collective: Callable[..., Array], x: Array, axes: tuple[str, ...]) -> Array:
    """`collective(x, axes)`, where `x` may be replicated over some of the axes; `x` if there are no axes."""
    return collective(vary_together([x, *map(lax.axis_index, axes)])[0], axes) if axes else x
