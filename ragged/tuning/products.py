"""Finds the products in a function's jaxpr, and lowers, runs and describes each of them."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.interpreters import partial_eval as pe

from ragged.backends import cache
from ragged.backends.base import Launch
from ragged.core.errors import is_arraylike
from ragged.core.formats import has_derivative
from ragged.ops.matmul import matmul
from ragged.primitive import lowering
from ragged.primitive.fused import fused_p
from ragged.primitive.primitive import PRIMITIVES, bind
from ragged.product.config import Config, Configs
from ragged.product.operands import Call, Index, Operand, Operands
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import GroupedTensor


def with_cotangents(lhs: Any, rhs: Any, multiply: Callable[..., GroupedTensor] = matmul, **options: Any) -> Any:
    """`(result, (cotangents,))`: the product's buffer, and the cotangents of the differentiable operands by name.

    Returns only the buffer if there are no derivatives.
    """
    operands = {"lhs": lhs, "rhs": rhs}

    def product(data: dict[str, Array]) -> Array:
        x = {name: _with_data(x, data.get(name)) for name, x in operands.items()}
        return multiply(x["lhs"], x["rhs"], **options).data

    out = jax.eval_shape(product, {})
    data = {name: getattr(x, "data", x) for name, x in operands.items() if has_derivative(x.dtype)}
    if not data or not has_derivative(out.dtype):
        return product({})
    out, pull = jax.vjp(product, data)
    return out, pull(out)  # The result serves as the cotangent: its type and sharding are right.


def _with_data(x: Any, data: Array | None) -> Any:
    """`x` with this buffer; `x` itself for None."""
    return x if data is None else x.with_data(data) if isinstance(x, GroupedTensor | Gathered) else data


def jaxpr_of(fn: Callable[..., Any], args: Any) -> tuple[Any, list[Any]]:
    """`(jaxpr, arrays)`: the jaxpr of `fn(*args)`, without what nothing uses, and the arrays or `ShapeDtypeStruct`s in
    `fn` and `args`."""
    arrays, rest = eqx.partition((fn, args), lambda x: is_arraylike(x) or isinstance(x, jax.ShapeDtypeStruct))

    def call(arrays: Any) -> Any:
        fn, args = eqx.combine(arrays, rest)
        return eqx.filter(fn(*args), eqx.is_array)

    closed = jax.make_jaxpr(call)(arrays)
    # `jit` drops the pre-activation of a product without a derivative: it isn't stored, so it's another product.
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
    return closed.replace(jaxpr=jaxpr), jax.tree.leaves(arrays)


_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
"""Primitives that call a function once, with their own operands."""


def products(closed: Any, args: list[Any] | None = None) -> Generator[tuple[Any, list[Any] | None], None, list[Any]]:
    """Yields `(equation, operands)` of each product in a jaxpr and its inner jaxprs, in order.

    The generator returns the jaxpr's results, None for unknown ones.

    With `args`, equations are evaluated to find the operands. Then call this inside `jit`, so that XLA computes only
    what is needed. `operands` is None without `args`, in a loop or a map, and if the product depends on an equation
    with effects, which isn't evaluated.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    values: dict[Any, Any] = {}
    if args is not None:
        values = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atoms: Any) -> list[Any]:
        return [x.val if hasattr(x, "val") else values.get(x) for x in atoms]

    for equation in jaxpr.eqns:
        operands, outs = read(equation.invars), None
        known = args is not None and all(x is not None for x in operands)
        if equation.primitive in (*PRIMITIVES, fused_p):
            yield equation, operands if known else None
        inner = [x for x in jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr) if _is_jaxpr(x)]
        is_call = args is not None and equation.primitive.name in _CALLS and len(inner) == 1
        for each in inner:
            outs = yield from products(each, operands if is_call else None)
        if not is_call:
            if not known or equation.effects:
                continue
            outs = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
            outs = outs if equation.primitive.multiple_results else [outs]
        values |= dict(zip(equation.outvars, outs or (), strict=True))
    return read(jaxpr.outvars)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


Sizes = dict[str, np.ndarray]
"""Group sizes, keyed by ragged letter."""


def products_of(fn: Callable[..., Any], args: Any, sizes: bool = True) -> list[tuple[Any, Sizes | None]]:
    """`(equation, sizes)` of each product of the call `fn(*args)`. Only what the group sizes depend on is computed.

    Sizes are None if `sizes` is False, if the arguments aren't all arrays, or if the operands are unknown (see
    `products`).
    """
    closed, leaves = jaxpr_of(fn, args)
    if not sizes or not all(map(is_arraylike, leaves)):
        return [(equation, None) for equation, _ in products(closed)]
    equations: list[Any] = []

    def sizes_of_products(leaves: list[Any]) -> list[Any]:  # `jit` traces it once: no equation is added twice.
        pairs = [*products(closed, leaves)]
        equations.extend(equation for equation, _ in pairs)
        return [operands and equation.params["tree"].unflatten(operands).sizes for equation, operands in pairs]

    known = jax.tree.map(np.asarray, jax.jit(sizes_of_products)(leaves))
    return list(zip(equations, known, strict=True))


def platform() -> str:
    """Lowering platform of the default device."""
    return lowering.platform_name(jax.default_backend())


class BoundProduct:
    """A product's primitive with its parameters and the shapes of its operands, without a configuration.

    Equal products have equal hashes. In its methods, a `config` of None is the default.
    """

    def __init__(self, equation: Any) -> None:
        call = equation.params["call"]
        # The caller's configuration and its source are dropped: tuning replaces them.
        options = call.options._replace(configs=Configs(), source="", cached=False, tiling=None)
        self.avals = tuple(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars)
        self.tree, self.call = equation.params["tree"], call._replace(options=options, out_spec=None)

    @property
    def _key(self) -> Any:
        return tuple((x.shape, str(x.dtype)) for x in self.avals), self.tree, self.call

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundProduct) and self._key == other._key

    @property
    def operands(self) -> Operands:
        """The operands as `ShapeDtypeStruct`s."""
        return self.tree.unflatten(self.avals)

    @property
    def num_groups(self) -> int:
        return self.operands.num_groups

    def launch(self, config: Config | None = None) -> Launch | None:
        """The launch on this device. None if the product has no elements to multiply or the configuration is
        illegal."""
        call = self.with_config(config)
        try:
            with lowering.target_of(platform(), call.options) as target:
                launch = lowering.launch_of(platform(), self.operands, call, target)
        except ValueError:
            if config is None:
                raise
            return None
        return None if launch.kernel == "zeros" else launch

    def compute(self, config: Config | None, leaves: Sequence[Array]) -> Any:
        """The product's result."""
        call = self.with_config(config)
        if call.epilogue is not None:
            return fused_p.bind(*leaves, tree=self.tree, call=call)
        return bind(self.tree.unflatten(leaves), call)

    def with_config(self, config: Config | None) -> Call:
        """The call with `config` for the product and its derivatives."""
        if config is None:
            return self.call
        configs = Configs((config,), (config,), (config,))
        return self.call._replace(options=self.call.options._replace(configs=configs, source="backend"))

    def fitted(self, config: Config | None, backend: str) -> Config | None:
        """`config` with tiles that are at most as large as the extents; None if it isn't a legal one of `backend`."""
        launch = self.launch(config) if config is not None and config.backend == backend else None
        return None if launch is None else launch.config

    def candidates(self, limit: int) -> list[Config]:
        """At most `limit` legal configurations, the default first."""
        launch, configs = self.launch(), []
        if launch is None:
            return []
        backend = lowering.BACKENDS[launch.backend].load()
        for config in (launch.config, *backend.candidates(launch, self.operands)):
            config = self.fitted(config, launch.backend)
            if config is not None and config not in configs:
                configs.append(config)
            if len(configs) >= limit:
                break
        return configs

    def key(self, launch: Launch) -> str:
        """The product's key in the cache."""
        x = jax.eval_shape(partial(lowering.prepared, call=self.call), self.operands)
        x = jax.eval_shape(partial(lowering.supported_form, launch.backend, launch.call), x)
        return cache.product_key(launch.call, x, launch.backend)

    def arrays(self, sizes: dict[str, np.ndarray], seed: int) -> list[Array]:
        """Random operands with these sizes, and scales of 0.5 to 2. A `group_offset` is 0."""
        rng = np.random.default_rng(seed)

        def values(aval: Any) -> Array:
            if jnp.issubdtype(aval.dtype, jnp.integer):
                return jnp.asarray(rng.integers(-4, 4, aval.shape), aval.dtype)
            return jnp.asarray(rng.standard_normal(aval.shape, np.float32)).astype(aval.dtype)

        def operand(x: Operand) -> Operand:
            scales = jax.tree.map(lambda aval: jnp.asarray(rng.uniform(0.5, 2.0, aval.shape), aval.dtype), x.scales)
            return Operand(values(x.data), scales)

        x = self.operands
        dims = {z: jnp.broadcast_to(jnp.asarray(sizes[z], jnp.int32), aval.shape) for z, aval in x.sizes.items()}
        offset = None if x.offset is None else jnp.zeros(x.offset.shape, x.offset.dtype)
        epilogue = jax.tree.map(values, x.epilogue)
        index = None
        if x.gather is not None:
            source, places, copies = x.gather
            rows = jnp.asarray(rng.integers(0, x.lhs.data.shape[-2], source.shape), source.dtype)
            index = Index(rows, jnp.zeros(places.shape, places.dtype), jax.tree.map(values, copies))
        return jax.tree.leaves(Operands(operand(x.lhs), operand(x.rhs), dims, offset, epilogue, index))

    def capacity(self, letter: str) -> int:
        """Upper bound of the sum of a ragged dim's sizes: the smallest extent of the buffers that pack the dim; if none
        does, the dim's smallest extent times the number of groups."""
        buffers = self.call.buffers(self.operands)
        packed = [shape[-2] for letters, shape in buffers if letters[0] == letter]
        if packed:
            return min(packed)
        return min(shape[-1] for letters, shape in buffers if letters[1] == letter) * self.num_groups
