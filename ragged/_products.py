"""Which products a function has, the three of `matmul`'s among them, and what can be asked of one."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ragged._errors import is_arraylike
from ragged._fused import fused_p
from ragged._matmul import matmul
from ragged.backends import cache
from ragged.backends.base import Launch
from ragged.backends.config import Config, Configs
from ragged.product import lowering
from ragged.product.operands import Call, Index, Operand, Operands
from ragged.product.primitive import PRIMITIVES, bind
from ragged.quant.formats import has_derivative
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import GroupedTensor


def trained(lhs: Any, rhs: Any, multiply: Callable[..., GroupedTensor] = matmul, **options: Any) -> Any:
    """The buffer of `matmul`'s result, and its cotangents by the data of the operands that have any."""
    given = {"lhs": lhs, "rhs": rhs}

    def product(data: dict[str, Array]) -> Array:
        x = {name: _with_data(x, data.get(name)) for name, x in given.items()}
        return multiply(x["lhs"], x["rhs"], **options).data

    out = jax.eval_shape(product, {})
    data = {name: getattr(x, "data", x) for name, x in given.items() if has_derivative(x.dtype)}
    if not data or not has_derivative(out.dtype):
        return product({})
    out, pull = jax.vjp(product, data)
    return out, pull(out)  # of the cotangent's type, whatever its sharding is


def _with_data(x: Any, data: Any) -> Any:
    return x if data is None else x._replace_data(data) if isinstance(x, GroupedTensor | Gathered) else data


def jaxpr_of(fn: Callable[..., Any], args: Any) -> tuple[Any, list[Any]]:
    """A call's jaxpr, and the arrays, or what stands for them, that are its arguments."""
    arrays, rest = eqx.partition((fn, args), lambda x: is_arraylike(x) or isinstance(x, jax.ShapeDtypeStruct))

    def call(arrays: Any) -> Any:
        fn, args = eqx.combine(arrays, rest)
        return eqx.filter(fn(*args), eqx.is_array)

    return jax.make_jaxpr(call)(arrays), jax.tree.leaves(arrays)


_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
"""Primitives that call a function once, with their operands."""


def products(closed: Any, args: list[Any] | None = None) -> Generator[tuple[Any, list[Any] | None], None, list[Any]]:
    """The equations of the products in a jaxpr, and in those that it holds, in their order; with their operands.

    None for operands where there are no arguments, where a product is within a loop or a map, and where they come of
    such an equation as has effects: those are not repeated. To be traced, so that XLA computes what is needed alone.
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


Sizes = dict[str, np.ndarray]  # by letter


def products_of(fn: Callable[..., Any], args: Any, sizes: bool = True) -> list[tuple[Any, Sizes | None]]:
    """The equations of a call's products, each with the groups' sizes that the arguments give it, if these are arrays
    and `sizes` are asked for. Only what sizes depend on is computed."""
    closed, leaves = jaxpr_of(fn, args)
    if not sizes or not all(map(is_arraylike, leaves)):
        return [(equation, None) for equation, _ in products(closed)]
    found: list[Any] = []

    def own(leaves: list[Any]) -> list[Any]:
        its = [*products(closed, leaves)]
        found.extend(equation for equation, _ in its)
        return [operands and equation.params["tree"].unflatten(operands).sizes for equation, operands in its]

    known = jax.tree.map(np.asarray, jax.jit(own)(leaves))
    return list(zip(found, known, strict=True))


def platform() -> str:
    """That of the device that is there."""
    return lowering.platform_name(jax.default_backend())


class Bound:
    """A product as it is bound, on arrays like these; without a configuration of its own."""

    def __init__(self, equation: Any) -> None:
        call = equation.params["call"]
        options = call.options._replace(configs=Configs(), source="", cached=False, tiling=None)
        self.avals = tuple(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars)
        self.tree, self.call = equation.params["tree"], call._replace(options=options, out_spec=None)

    @property
    def _key(self) -> Any:
        return tuple((x.shape, str(x.dtype)) for x in self.avals), self.tree, self.call

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bound) and self._key == other._key

    @property
    def operands(self) -> Operands:
        return self.tree.unflatten(self.avals)

    @property
    def groups(self) -> int:
        return self.operands.num_groups

    def launch(self, config: Config | None = None) -> Launch | None:
        """What runs on the device that is there with this configuration, or the model's own.

        None where there is nothing to multiply, or the configuration is not legal.
        """
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
        """The product with this configuration, or the model's own."""
        call = self.with_config(config)
        if call.ending is not None:
            return fused_p.bind(*leaves, tree=self.tree, call=call)
        return bind(self.tree.unflatten(leaves), call)

    def with_config(self, config: Config | None) -> Call:
        if config is None:
            return self.call
        configs = Configs((config,), (config,), (config,))
        return self.call._replace(options=self.call.options._replace(configs=configs, source="config"))

    def takes(self, config: Config, backend: str) -> bool:
        """Whether a configuration is for a backend, and legal."""
        return config.backend == backend and self.launch(config) is not None

    def candidates(self, most: int) -> list[Config]:
        """The model's own first, then others that are legal."""
        launch, found = self.launch(), []
        if launch is None:
            return []
        backend = lowering.BACKENDS[launch.backend].load()
        for config in (launch.config, *backend.candidates(launch, self.operands)):
            if config not in found and self.takes(config, launch.backend):
                found.append(config)
            if len(found) >= most:
                break
        return found

    def key(self, launch: Launch) -> str:
        x = jax.eval_shape(partial(lowering.prepared, call=self.call), self.operands)
        x = jax.eval_shape(partial(lowering.taken_by, launch.backend, launch.call), x)
        return cache.product_key(launch.call, x, launch.backend)

    def arrays(self, sizes: dict[str, np.ndarray], seed: int) -> list[Array]:
        """Random operands; scales about 1; the first groups, where a shard of them is held."""
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
        """The extent of a ragged dim's buffer: where it is packed, if it is."""
        p, x = self.call.product, self.operands
        terms = ((p.lhs, x.lhs_shape), (p.rhs, x.rhs.data.shape), (p.out, self.call.shape))
        packed = [shape[-2] for letters, shape in terms if letters[0] == letter]
        most = min(shape[-1] for letters, shape in terms if letters[1] == letter) if not packed else 0
        return min(packed) if packed else most * self.groups
