"""`History`: the state of delayed scaling, whose cotangents are combined by their maximum instead of added.

The next history is the cotangent of a history. If several products use one history, as in a loop over microbatches, JAX
adds the cotangents of all uses. Plain sums would multiply each entry by the number of uses. But an extended dtype
defines how JAX adds cotangents. So within a function that JAX traces, a history has the extended dtype `LARGEST`:
float32 numbers whose sum is the larger one:

    f32 leaf  --flatten--  History  --unflatten-->  History in `LARGEST`  --floats-->  f32, once for each use

Each conversion is a primitive that only reshapes. Flattening converts back, so users, `jit` and `jax.grad` only see
float32 leaves; each leaf enters a traced function once, however often the function uses the history.

Flax has the same rule for its 8-bit histories (`fp8_ops.fp32_max_grad`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src import ad_util, core, dtypes  # no public names for extended dtypes
from jax._src.interpreters import mlir, pxla
from jax._src.sharding_impls import logical_sharding, physical_sharding
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from ragged.core.errors import Site
from ragged.core.sealed import sealed, unsealed

FLOAT32 = jnp.dtype(jnp.float32)


@jax.tree_util.register_pytree_node_class
class History:
    """A pytree node whose only leaf is a history: `(3, length)` float32 numbers, sealed or not."""

    def __init__(self, array: Any) -> None:
        self._array = array  # sealed; float32; or in `LARGEST`, if traced and unsealed

    def __repr__(self) -> str:
        return f"History(shape={getattr(self._array, 'shape', None)})"

    @property
    def leaf(self) -> Any:
        """The array that functions of JAX get: sealed or float32."""
        return from_largest_p.bind(self._array) if getattr(self._array, "dtype", None) == LARGEST else self._array

    @property
    def floats(self) -> Any:
        """The numbers in float32."""
        return unsealed(self.leaf)

    def sealed(self) -> "History":
        leaf = self.leaf
        return History(sealed(_not_differentiable(leaf) if isinstance(leaf, Tracer) else leaf))

    def unsealed(self) -> "History":
        return History(_in_largest(self.floats))

    def rows(self, order: tuple[int, int, int]) -> "History":
        """A history whose row `i` is row `order[i]` of this one."""
        leaf = self.leaf
        return History(jnp.stack([leaf[row] for row in order]))

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.leaf,), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Sequence[Any]) -> "History":
        return cls(_in_largest(leaves[0]))


@jax.custom_jvp
def _not_differentiable(leaf: Array) -> Array:
    """`leaf`. Differentiating with respect to it raises: a sealed array has no cotangent, the next history."""
    return leaf


@_not_differentiable.defjvp
def _no_derivative(primals: Any, tangents: Any) -> Any:
    hint = "Pass the unsealed recipe to `matmul`, and seal the next one, which `jax.grad` returns: `recipe.sealed()`."
    Site("ragged.Recipe").fail(TypeError, "a history is sealed in a function that is differentiated by it.", hint)


def _in_largest(x: Any) -> Any:
    """A traced float32 `x` in the dtype `LARGEST`; any other `x` unchanged."""
    return to_largest_p.bind(x) if isinstance(x, Tracer) and x.dtype == FLOAT32 else x


class _Rules:
    """The rules that JAX requires of an extended dtype."""

    allow_conversion = False

    @staticmethod
    def physical_element_aval(dtype: Any) -> ShapedArray:
        return ShapedArray((1,), FLOAT32)  # JAX divides by the rank of an element: 0 fails over several devices.

    @staticmethod
    def tangent_dtype(dtype: Any) -> Any:
        return dtype

    @staticmethod
    def add(dtype: Any, x: Any, y: Any) -> Any:
        return to_largest_p.bind(jnp.maximum(from_largest_p.bind(x), from_largest_p.bind(y)))

    @staticmethod
    def zero(dtype: Any) -> Any:
        return to_largest_p.bind(jnp.zeros((), FLOAT32))  # The neutral element: absolute values are at least 0.

    @staticmethod
    def global_sharded_result_handler(aval: Any, sharding: Any, is_committed: bool) -> Any:
        of_floats = pxla.global_result_handlers[ShapedArray]
        make = of_floats(core.physical_aval(aval), physical_sharding(aval, sharding), is_committed)
        return make.wrap(_LargestArray)

    @staticmethod
    def make_sharded_array(aval: Any, sharding: Any, arrays: Sequence[Any], is_committed: bool) -> Any:
        of_floats = pxla.global_result_handlers[ShapedArray]
        make = of_floats(core.physical_aval(aval), physical_sharding(aval, sharding), is_committed)
        return _LargestArray(make([x.floats for x in arrays]))


class _LargestScalar(dtypes.extended):
    pass


class _Largest(dtypes.ExtendedDType):
    """Float32 numbers whose sum is the larger one."""

    name = "float32_largest"
    itemsize = 4
    type: Any = _LargestScalar  # pyright: ignore[reportIncompatibleMethodOverride]
    _rules = _Rules

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return type(other) is _Largest

    def __hash__(self) -> int:
        return hash(_Largest)


LARGEST = _Largest()


class _LargestArray:
    """A concrete array of the dtype `LARGEST`, as derivatives outside of `jit` compute it."""

    def __init__(self, floats: Array) -> None:
        self.floats = floats  # [*shape, 1]

    @property
    def aval(self) -> Any:
        floats = core.typeof(self.floats)
        return ShapedArray(self.shape, LARGEST, sharding=floats.sharding.update(spec=floats.sharding.spec[:-1]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.floats.shape[:-1]

    @property
    def ndim(self) -> int:
        return self.floats.ndim - 1

    @property
    def dtype(self) -> Any:
        return LARGEST

    @property
    def sharding(self) -> Any:
        return logical_sharding(self.shape, LARGEST, self.floats.sharding)

    def __getattr__(self, name: str) -> Any:  # committed, device, ...
        return getattr(self.floats, name)


def _add(x: _LargestArray, y: _LargestArray) -> _LargestArray:
    return _LargestArray(jnp.maximum(x.floats, y.floats))


def _shard_args(xs: Sequence[_LargestArray], shardings: Sequence[Any], *args: Any) -> Any:
    of_floats = [physical_sharding(x.aval, sharding) for x, sharding in zip(xs, shardings, strict=True)]
    return pxla.shard_args(of_floats, *args, [x.floats for x in xs])


def _constant(x: Any, aval: Any) -> Any:
    return mlir.get_constant_handler(type(x.floats))(x.floats, core.typeof(x.floats))


core.pytype_aval_mappings[_LargestArray] = lambda x: x.aval
dtypes.register_canonicalize_value_handler(_LargestArray, None)
pxla.shard_arg_handlers[_LargestArray] = _shard_args
mlir.register_constant_handler(_LargestArray, _constant)  # pyright: ignore[reportArgumentType]
ad_util.raw_jaxval_adders[_LargestArray] = _add


def _reshaped(ctx: Any, x: Any) -> list[Any]:
    """The lowering of both conversions."""
    return [mlir.reshape(ctx, x, core.physical_aval(ctx.avals_out[0]))]


to_largest_p, from_largest_p = Primitive("ragged_to_largest"), Primitive("ragged_from_largest")
to_largest_p.def_impl(lambda x: _LargestArray(jnp.asarray(x)[..., None]))
from_largest_p.def_impl(lambda x: x.floats[..., 0])
for _primitive, _inverse, _dtype in ((to_largest_p, from_largest_p, LARGEST), (from_largest_p, to_largest_p, FLOAT32)):
    _primitive.def_abstract_eval(partial(lambda dtype, x: x.update(dtype=dtype, weak_type=False), _dtype))
    mlir.register_lowering(_primitive, _reshaped)
    ad.deflinear2(_primitive, partial(lambda inverse, ct, x: [inverse.bind(ct)], _inverse))
    batching.defvectorized(_primitive)
