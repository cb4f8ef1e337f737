"""Activations: elementwise functions of a product's accumulators, as values that backends can compile.

A JAX function is traced to a list of operations on numbers. `gated_matmul(activation="silu")` traces

    lambda gate, up: jax.nn.silu(gate) * up    ->    %2 = logistic %0; %3 = mul %0 %2; %4 = mul %3 %1

A kernel computes the operations on a tile. If it can't compute one of them (`Function.missing`), its backend refuses
the product. XLA computes the same operations; but if the function defines derivative rules, as with `jax.custom_jvp`,
XLA computes the function itself.
"""

import hashlib
import inspect
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import Literal, Primitive
from jax.sharding import AbstractMesh

from ragged.core.errors import Site, describe
from ragged.core.mesh import vary_together


@jax.custom_jvp
def _normal_cdf(z: Array) -> Array:
    """Standard normal CDF. Its derivative is defined here: in jax 0.12, the derivative of `lax.erfc` fails in a
    `shard_map` that checks `vma`."""
    return 0.5 * lax.erfc(-z * np.sqrt(0.5).astype(z.dtype))


@_normal_cdf.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (z,), (dz,) = primals, tangents
    return _normal_cdf(z), dz * jnp.exp(-0.5 * z * z) * np.sqrt(0.5 / np.pi).astype(z.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": lambda z: z * _normal_cdf(z),
    # `1 + tanh(u)` is `2 * sigmoid(2 * u)`, which is accurate for negative `u` too.
    "gelu_tanh": lambda z: z * jax.nn.sigmoid(2 * np.sqrt(2 / np.pi).astype(z.dtype) * (z + 0.044715 * z**3)),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}
"""Activations by name."""


def names(text: str) -> frozenset[str]:
    """The words of `text`."""
    return frozenset(text.split())


_ELEMENTWISE = names(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type cos cosh digamma "
    "div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min "
    "mul ne neg nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor"
)
"""JAX primitives that compute each element from the same element of each operand."""
_TRANSCENDENTAL = names(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p "
    "logistic pow sin sinh tan tanh"
)
_TRANSCENDENTAL_INSTRUCTIONS = 8
"""Approximate number of instructions of a transcendental operation."""
_SAME = names("broadcast_in_dim copy copy_p squeeze")
"""Primitives whose result has their operand's values. In an elementwise function, only single numbers are broadcast."""
_CUSTOM = names("custom_jvp_call custom_vjp_call")
_CALLS = names("jit pjit closed_call core_call checkpoint remat2") | _CUSTOM
# A function is traced for both shapes, to see whether it depends on the shape. Ranks and extents all differ.
_SHAPE, _OTHER_SHAPE = (2, 3), (5, 4, 7)


class Operation(NamedTuple):
    """One step of a function.

    An operand is a constant, as a NumPy scalar, or the index of a value, as a Python `int`. Values are the function's
    arguments, then the result of each operation.
    """

    primitive: Primitive
    params: dict[str, Any]
    operands: tuple[int | np.generic, ...]
    dtype: np.dtype[Any]  # of the result

    def __str__(self) -> str:
        params = ", ".join(f"{name}={value}" for name, value in sorted(self.params.items()) if value is not None)
        return f"{self.primitive}[{params}] {' '.join(map(_text, self.operands))}"


@dataclass(frozen=True, eq=False)
class Function:
    """An elementwise function of `arity` arrays. Functions with the same operations and derivatives are equal."""

    name: str
    custom: Callable[..., Array] | None  # the JAX function if it defines derivative rules, else None
    arity: int
    operations: tuple[Operation, ...]
    result: int | np.generic  # as in `Operation.operands`
    text: str  # all operations as text; also the operations of the derivatives if the function defines rules for them

    def call(self, *z: Array) -> Array:
        """The function applied to arrays of one shape; differentiable."""
        return self.compute(*z, formulas={}) if self.custom is None else self.custom(*z)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def key(self) -> str:
        """The name and a digest of the operations, the same in every process."""
        return f"{self.name}#{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"

    @property
    def transcendentals(self) -> int:
        """Number of transcendental operations per element, such as exponentials."""
        return sum(each.primitive.name in _TRANSCENDENTAL for each in self.operations)

    @property
    def instructions(self) -> int:
        """Approximate number of vector instructions per element."""
        return len(self.operations) + (_TRANSCENDENTAL_INSTRUCTIONS - 1) * self.transcendentals

    def __str__(self) -> str:
        count = len(self.operations)
        return f"{self.name} ({count} operation{'s' * (count != 1)} an element, {self.transcendentals} transcendental)"

    def missing(self, known: Container[str]) -> str:
        """The first operation that a kernel can't compute, such as "`lgamma` of float32"; "" without one.

        Kernels compute the primitives in `known` in float32, and convert to bfloat16 and back.
        """
        dtypes = ["float32"] * self.arity
        for primitive, _, operands, dtype in self.operations:
            name = primitive.name
            allowed = {"float32", "bool"} | ({"bfloat16"} if name == "convert_element_type" else set())
            used = {dtype.name, *(dtypes[each] for each in operands if isinstance(each, int))}
            # Kernels select one of two values by a bool, not by int32. Mosaic can't select bools.
            if name == "select_n":
                which = operands[0].dtype.name if isinstance(operands[0], np.generic) else dtypes[operands[0]]
                allowed, used = {"float32"}, {dtype.name, *({"int32"} if which != "bool" else ())}
            if name not in known or not used <= allowed:
                return f"`{name}` of {min(used - allowed, default=dtype.name)}"
            dtypes.append(dtype.name)
        return ""

    def compute(self, *z: Any, formulas: Mapping[str, Callable[..., Any]]) -> Any:
        """The function applied to arrays of one shape.

        `formulas`: functions that compute primitives, keyed by name. JAX computes the other primitives.
        """
        values = [*z]
        for primitive, params, operands, _ in self.operations:
            arrays: list[Any] = [values[each] if isinstance(each, int) else each for each in operands]
            if shape := max((each.shape for each in arrays), key=len):  # the others are single numbers
                arrays = [jnp.broadcast_to(each, shape) for each in arrays]
            values.append(formulas.get(primitive.name, primitive.bind)(*vary_together(arrays), **params))
        result: Any = values[self.result] if isinstance(self.result, int) else self.result
        return jnp.broadcast_to(result, z[0].shape)


def _text(operand: int | np.generic) -> str:
    return f"%{operand}" if isinstance(operand, int) else f"{operand!r}"


def takes_two(function: Any) -> bool:
    """Whether a function takes two arguments, but not one."""
    if hasattr(function, "nin"):  # a ufunc
        return function.nin == 2
    try:
        signature = inspect.signature(function)
        signature.bind(None, None)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(None)
    except TypeError:
        return True
    return False


def check_activation(site: Site, activation: Any) -> None:
    """Raises `ValueError` unless `activation` is None, a known name, or a function."""
    if activation is None or callable(activation) or (isinstance(activation, str) and activation in ACTIVATIONS):
        return
    hint = f"Pass one of {', '.join(map(repr, ACTIVATIONS))}, or an elementwise function such as `jax.nn.softplus`."
    site.fail(ValueError, f"unknown `activation` {describe(activation)}.", hint)


def function_of(site: Site, activation: Any, arity: int, dtype: Any) -> Function | None:
    """An activation as a `Function` of `arity` pre-activations in `dtype`. None for one pre-activation without
    an activation.

    With two pre-activations, an activation of one argument is applied to the first, the gate; the result is multiplied
    by the second.
    """
    check_activation(site, activation)
    if activation is None:
        if arity == 1:
            return None
        activation = _without_activation
    if arity == 1 and takes_two(activation):
        hint = "Pass a function of one argument. `ragged.gated_matmul` takes a function of two."
        site.fail(TypeError, "`activation` needs two arguments, but there is one product.", hint)
    numbers, dtype = _numbers_read(activation), jnp.dtype(dtype).name
    try:
        if numbers is None:  # The function may change while the cache's key doesn't.
            return _traced.__wrapped__(activation, arity, dtype, None)
        return _traced(activation, arity, dtype, numbers)
    except _Unsuitable as error:
        code = "`ragged.matmul(lhs, rhs).map(activation)`"
        if arity > 1:
            gated = "activation" if takes_two(activation) else "lambda gate, up: activation(gate) * up"
            code = f"`ragged.matmul(x, w_gate).map({gated}, ragged.matmul(x, w_up))`"
        hints = {
            True: f"Map it over the rows of the result: {code}.",
            False: "It must return one float array of the same shape.",
        }
        site.fail(error.kind, f"`activation` {str(error).rstrip('.')}.", hints[error.maps])


class _Unsuitable(Exception):
    """Raised if a function can't be an activation. The message completes a sentence that begins with "`activation`".

    `maps`: whether `GroupedTensor.map` supports the function.
    """

    def __init__(self, reason: str, kind: type[Exception] = ValueError, maps: bool = True):
        super().__init__(reason)
        self.kind, self.maps = kind, maps


def _without_activation(gate: Array, up: Array) -> Array:
    return gate * up


def _with_gate(activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    return activation(gate) * up


def _numbers_read(activation: Any) -> str | None:
    """The text of all numbers that an activation reads from its closure, globals and defaults, for a cache's key: they
    may change between calls. None if it may read other values that change."""
    if isinstance(activation, str) or _is_of_jax(activation):
        return ""
    if not isinstance(activation, FunctionType):
        return None
    cells = [cell.cell_contents for cell in activation.__closure__ or ()]
    global_names = activation.__globals__.keys() & {*activation.__code__.co_names}
    read = [*cells, *(activation.__globals__[name] for name in sorted(global_names)), *(activation.__defaults__ or ())]
    others = [each for each in read if not isinstance(each, _NUMBERS)]
    calls_inner = any(isinstance(each, CodeType) for each in activation.__code__.co_consts)
    if calls_inner or activation.__kwdefaults__ or not all(_is_fixed(each) for each in others):
        return None
    return repr([each for each in read if isinstance(each, _NUMBERS)])


_NUMBERS = (bool, int, float, np.generic)


def _is_fixed(x: Any) -> bool:
    """Whether values read through `x` can't change between calls: true for modules of JAX, NumPy and `math`, and for
    functions of JAX."""
    return x.__name__.partition(".")[0] in ("jax", "math", "numpy") if isinstance(x, ModuleType) else _is_of_jax(x)


def _is_of_jax(x: Any) -> bool:
    return callable(x) and (getattr(x, "__module__", None) or "").startswith("jax.")


def elementwise(name: str, call: Callable[..., Array], *dtypes: Any) -> Function:
    """An elementwise function of arrays in these dtypes, without derivatives."""
    operations, result, _ = _operations(call, [jax.ShapeDtypeStruct(_SHAPE, dtype) for dtype in dtypes])
    return Function(name, None, len(dtypes), operations, result, _text_of(operations, result))


@lru_cache(256)
def _traced(activation: Any, arity: int, dtype: str, numbers: str | None) -> Function:
    """An activation as a `Function`. `numbers`, from `_numbers_read`, is only a part of the cache's key."""
    call = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    name = activation if isinstance(activation, str) else _name(activation)
    if arity > 1 and not takes_two(call):
        call = partial(_with_gate, call)
    z = [jax.ShapeDtypeStruct(_SHAPE, jnp.dtype(dtype))] * arity
    operations, result, has_rules = _operations(call, z)
    text = _text_of(operations, result)
    others = [jax.ShapeDtypeStruct(_OTHER_SHAPE, jnp.dtype(dtype))] * arity
    if text != _text_of(*_operations(call, others)[:2]):
        raise _Unsuitable("isn't elementwise: its operations depend on the shape of the array")
    if has_rules:
        text += _rules_of(call, z)
    return Function(name, call if has_rules else None, arity, operations, result, text)


def _name(function: Any) -> str:
    """The name of an activation in texts and in the names of kernels; "gate" without an activation."""
    while isinstance(function, partial):
        function = function.func
    return "gate" if function is _without_activation else getattr(function, "__name__", type(function).__name__)


def _text_of(operations: tuple[Operation, ...], result: int | np.generic) -> str:
    return "; ".join([*map(str, operations), _text(result)])


def _rules_of(call: Callable[..., Array], z: list[Any]) -> str:
    """The text of the operations of a function's first two derivatives, which rules may define. If a function has no
    forward mode, the text is unique to it."""

    def derivative(of: Callable[..., Array], count: int) -> Callable[..., Array]:
        return lambda *args: jax.jvp(of, args[:count], args[count:])[1]  # primals, then tangents

    first = derivative(call, len(z))
    second = derivative(first, 2 * len(z))
    try:
        return f" | {_text_of(*_operations(first, z * 2)[:2])} | {_text_of(*_operations(second, z * 4)[:2])}"
    except (TypeError, _Unsuitable):
        return f" | {id(call)}"


def _operations(call: Callable[..., Array], z: list[Any]) -> tuple[tuple[Operation, ...], int | np.generic, bool]:
    """`(operations, result, has_rules)`: a function's operations, its result as in `Operation.operands`, and whether it
    defines derivative rules."""
    shape = z[0].shape
    # The traced operations must not depend on the mesh in context.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        try:
            # JAX caches a function's trace, although values that it reads may change. So each trace has a new lambda.
            closed, out = jax.make_jaxpr(lambda *z: call(*z), return_shape=True)(*z)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise _Unsuitable(f"can't be traced: for arrays of shape {shape}, it raises {problem}") from error
    if closed.effects:
        raise _Unsuitable("has effects, such as printing or writing a state", TypeError)
    if getattr(out, "shape", None) != shape:
        gives = "several results" if getattr(out, "shape", None) is None else f"a result of shape {out.shape}"
        raise _Unsuitable(f"isn't elementwise: for arrays of shape {shape}, it returns {gives}", maps=False)
    if jnp.issubdtype(z[0].dtype, jnp.floating) and not jnp.issubdtype(out.dtype, jnp.floating):
        problem = f"returns {out.dtype.name} for {z[0].dtype.name} of shape {shape}"
        raise _Unsuitable(problem, TypeError, maps=False)
    operations: list[Operation] = []
    has_rules = False

    def run(closed: Any, arguments: list[int | np.generic]) -> list[int | np.generic]:
        """The results of a jaxpr. Appends its operations to `operations`."""
        nonlocal has_rules
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = map(_number, getattr(closed, "consts", ()))
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

        def read(atom: Any) -> int | np.generic:
            dtype = atom.aval.dtype
            return _scalar(atom.val, dtype) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            name, params, operands = equation.primitive.name, equation.params, [*map(read, equation.invars)]
            out: Any = equation.outvars[0].aval
            if name in _CALLS:
                has_rules |= name in _CUSTOM
                results = run(params["jaxpr" if "jaxpr" in params else "call_jaxpr"], operands)
            elif name in _SAME and out.shape in ((), shape):
                results = operands[:1]
            elif name in _ELEMENTWISE and not any(isinstance(each, int) for each in operands):
                results = [_of_numbers(equation.primitive, params, operands)]
            elif name in _ELEMENTWISE:
                results = [len(z) + len(operations)]
                operations.append(Operation(equation.primitive, params, tuple(operands), out.dtype))
            else:
                raise _Unsuitable(f"isn't known to be elementwise: it uses JAX's primitive `{name}`")
            known.update(zip(equation.outvars, results, strict=True))
        return [read(each) for each in jaxpr.outvars]

    (result,) = run(closed, [*range(len(z))])
    return tuple(operations), result, has_rules


def _of_numbers(primitive: Primitive, params: dict[str, Any], operands: list[Any]) -> np.generic:
    """The value of a primitive of numbers, computed at once even while JAX is tracing."""
    if primitive.name == "convert_element_type":
        return _scalar(operands[0], params["new_dtype"])
    with ThreadPoolExecutor(1) as thread:  # JAX's tracing state is local to a thread.
        return thread.submit(lambda: _scalar(primitive.bind(*operands, **params))).result()


def _number(constant: Any) -> np.generic:
    """A constant that a function closes over. Raises unless it is one number."""
    if isinstance(constant, Tracer):
        raise _Unsuitable(f"closes over a traced value, {describe(constant)}", TypeError)
    if np.shape(constant) != () or jnp.issubdtype(constant.dtype, jax.dtypes.extended):
        raise _Unsuitable(f"closes over an array, {describe(constant)}", TypeError)
    return _scalar(constant)


def _scalar(x: Any, dtype: Any = None) -> np.generic:
    found: Any = np.asarray(x, dtype)[()]
    return found
