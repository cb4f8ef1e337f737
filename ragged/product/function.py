"""Activations: elementwise functions of a product's accumulators, as values that backends can compile.

A JAX function is traced to a list of operations on numbers. `gated_matmul(activation="silu")` traces

    lambda gate, up: jax.nn.silu(gate) * up    ->    %2 = logistic %0; %3 = mul %0 %2; %4 = mul %3 %1

A kernel computes the operations on a tile. If it can't compute one of them (`Function.missing`), its backend refuses
the product. XLA computes the same operations; but if the function defines derivative rules, as with `jax.custom_jvp`,
XLA computes the function itself.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from itertools import accumulate, chain
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
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil "
    "clamp clz convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma "
    "igamma_grad_a igammac integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul name ne neg "
    "nextafter not one_minus_square optimization_barrier or polygamma polynomial population_count pow reduce_precision "
    "regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign "
    "sin sinh sqrt square stop_gradient sub tan tanh xor zeta"
)
"""JAX primitives that compute each element from the same element of each operand, if no shape changes."""
_TRANSCENDENTAL = names(
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2 "
    "expm1 igamma igamma_grad_a igammac lgamma log log1p log2 logistic polygamma pow regularized_incomplete_beta sin "
    "sinh tan tanh zeta"
)
_TRANSCENDENTAL_INSTRUCTIONS = 8
"""Approximate number of instructions of a transcendental operation."""
_SAME = names("broadcast_in_dim copy copy_p squeeze")
"""Primitives that return the values of their operand: an elementwise function broadcasts only single numbers."""
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
            out = formulas.get(primitive.name, primitive.bind)(*vary_together(arrays), **params)
            values.append(out[0] if primitive.multiple_results else out)
        result: Any = values[self.result] if isinstance(self.result, int) else self.result
        return jnp.broadcast_to(result, z[0].shape)


def _text(operand: int | np.generic) -> str:
    return f"%{operand}" if isinstance(operand, int) else f"{operand!r}"


def _takes(function: Any, count: int) -> bool:
    """Whether a function takes `count` arguments. True if its signature isn't known."""
    if hasattr(function, "nin"):  # a ufunc
        return function.nin == count
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _takes_two(function: Any) -> bool:
    """Whether a function takes two arguments, but not one."""
    return not _takes(function, 1) and _takes(function, 2)


def function_of(site: Site, activation: Any, arity: int, dtype: Any) -> Function | None:
    """An activation as a `Function` of `arity` pre-activations in `dtype`. None for one pre-activation without
    an activation.

    With two pre-activations, an activation of one argument is applied to the first, the gate; the result is multiplied
    by the second.
    """
    if activation is None:
        if arity == 1:
            return None
        activation = _without_activation
    if not callable(activation) and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        hint = f"Pass one of {', '.join(map(repr, ACTIVATIONS))}, or an elementwise function such as `jax.nn.softplus`."
        site.fail(ValueError, f"unknown `activation` {describe(activation)}.", hint)
    if arity == 1 and _takes_two(activation):
        hint = "Pass a function of one argument. A function of two needs a gate, as in `ragged.gated_matmul`."
        site.fail(TypeError, "`activation` needs two arguments, but there is one product.", hint)
    if not isinstance(activation, str) and not any(_takes(activation, count) for count in range(1, arity + 1)):
        problem, hint = "doesn't take one argument", "Pass a function of one argument."
        if arity == 2:
            problem, hint = (
                "takes neither one argument nor two",
                "Pass a function of the gate, or of the gate and the other product.",
            )
        site.fail(TypeError, f"`activation` {problem}.", hint)
    key, dtype = _read_by(activation), jnp.dtype(dtype).name
    try:
        if key is None:  # Values that the function reads may change unseen, so it isn't cached.
            return _traced.__wrapped__(_Cached((), activation), arity, dtype)
        return _traced(_Cached(key, activation), arity, dtype)
    except _Unsuitable as error:
        code = "`ragged.matmul(lhs, rhs).map(activation)`"
        if arity > 1:
            gated = "activation" if _takes_two(activation) else "lambda gate, up: activation(gate) * up"
            code = f"`ragged.matmul(x, w_gate).map({gated}, ragged.matmul(x, w_up))`"
        hints = {
            True: f"Map it over the rows of the result: {code}.",
            False: "It must return one float array of the same shape.",
        }
        site.fail(error.kind, f"`activation` {str(error).rstrip('.')}.", hints[error.maps])


class _Unsuitable(Exception):
    """Raised if a function can't be an activation. The message completes a sentence that begins with "`activation`".

    `maps`: whether `GroupedTensor.map` supports the function. `is_traced`: whether it closes over a traced value.
    """

    def __init__(self, reason: str, kind: type[Exception] = ValueError, maps: bool = True, is_traced: bool = False):
        super().__init__(reason)
        self.kind, self.maps, self.is_traced = kind, maps, is_traced


def _not_elementwise(primitive: str) -> _Unsuitable:
    return _Unsuitable(f"isn't known to be elementwise: it uses JAX's primitive `{primitive}`")


def _without_activation(gate: Array, up: Array) -> Array:
    return gate * up


def _with_gate(activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    return activation(gate) * up


_CONSTANTS = (bool, int, float, np.generic, str, type(None))


@dataclass(frozen=True)
class _Cached:
    """An activation, as a cache's key."""

    key: tuple[Any, ...]  # from `_read_by`
    activation: Any = field(compare=False)


def _read_by(activation: Any) -> tuple[Any, ...] | None:
    """All that an activation computes with: code, and what it reads from closures, globals, defaults and partial
    arguments, also in functions that it calls. None if it may read values that change unseen."""
    found: list[Any] = []
    functions: list[FunctionType] = []
    todo: list[Any] = [activation]
    while todo:
        x = todo.pop()
        if isinstance(x, _CONSTANTS):
            found.append((type(x), repr(x)))
        elif _is_fixed(x):
            found.append(x)
        elif isinstance(x, partial):
            found.append((len(x.args), *x.keywords))
            todo += [x.func, *x.args, *x.keywords.values()]
        elif not isinstance(x, FunctionType) or x.__dict__:
            return None
        elif x in functions:
            found.append(functions.index(x))
        else:
            functions.append(x)
            try:
                cells = [cell.cell_contents for cell in x.__closure__ or ()]
            except ValueError:  # A variable isn't assigned yet.
                return None
            # An import inside of a function reads a module by its name, too.
            names = sorted(name for name in _mentioned(x.__code__) if name in x.__globals__ or name in sys.modules)
            read, options = [x.__globals__.get(name, sys.modules.get(name)) for name in names], x.__kwdefaults__ or {}
            found.append((x.__name__, x.__code__, *names, *options, len(x.__defaults__ or ())))
            todo += [*cells, *read, *(x.__defaults__ or ()), *options.values()]
    return tuple(found)


def _mentioned(code: CodeType) -> set[str]:
    """All names of globals in a function's code and in its inner functions, and names of attributes."""
    inner = [_mentioned(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*inner)


def _is_fixed(x: Any) -> bool:
    """Whether values read through `x` can't change between calls: true for modules of JAX, NumPy and `math`, and for
    public functions of JAX, but not for `jax.jit` of a caller's function."""
    if isinstance(x, ModuleType):
        return x.__name__.partition(".")[0] in ("jax", "math", "numpy")
    module, name = (getattr(x, each, None) or "" for each in ("__module__", "__name__"))
    return callable(x) and module.startswith("jax.") and getattr(sys.modules.get(module), name, None) is x


def elementwise(name: str, call: Callable[..., Array], *dtypes: Any) -> Function:
    """An elementwise function of arrays in these dtypes, without derivatives."""
    operations, result, _ = _operations(call, [jax.ShapeDtypeStruct(_SHAPE, dtype) for dtype in dtypes])
    return Function(name, None, len(dtypes), operations, result, _text_of(operations, result))


@lru_cache(256)
def _traced(cached: _Cached, arity: int, dtype: str) -> Function:
    """An activation as a `Function`."""
    activation = cached.activation
    call = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    name = activation if isinstance(activation, str) else _name(activation)
    if arity > 1 and not _takes_two(call):
        call = partial(_with_gate, call)
    z, others = ([jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))] * arity for shape in (_SHAPE, _OTHER_SHAPE))
    operations, result, has_rules = _operations(call, z)
    text = _text_of(operations, result)
    if text != _text_of(*_operations(call, others)[:2]):
        if text != _text_of(*_operations(call, z)[:2]):
            raise _Unsuitable("isn't a function of its argument alone: it computes something else at each call")
        raise _Unsuitable("isn't elementwise: its operations depend on the shape of the array")
    if has_rules:
        text += _rules_of(call, z) or f" | {id(activation)}"
    return Function(name, call if has_rules else None, arity, operations, result, text)


def _name(function: Any) -> str:
    """The name of an activation in texts and in the names of kernels; "gate" without an activation."""
    while isinstance(function, partial):
        function = function.func
    return "gate" if function is _without_activation else getattr(function, "__name__", type(function).__name__)


def _text_of(operations: tuple[Operation, ...], result: int | np.generic) -> str:
    return "; ".join([*map(str, operations), _text(result)])


def _rules_of(call: Callable[..., Array], z: list[Any]) -> str:
    """The operations of a function's first two derivatives as text: its rules may define them. "" if one can't be
    traced to elementwise operations."""

    def jvp(of: Callable[..., Array], count: int) -> Callable[..., Array]:
        return lambda *args: jax.jvp(of, args[:count], args[count:])[1]  # primals, then tangents

    def vjp(of: Callable[..., Array], count: int) -> Callable[..., Array]:
        """A function of the primals, a weight for the cotangent of each, and the result's cotangent: a weighted sum."""
        return lambda *args: reduce(lax.add, map(lax.mul, args[count:-1], jax.vjp(of, *args[:count])[1](args[-1])))

    for derivative, more in ((jvp, 0), (vjp, 1)):  # With `jax.custom_vjp`, there is no jvp.
        text, of, count = "", call, len(z)
        try:
            for _ in range(2):
                of, count = derivative(of, count), 2 * count + more
                text += f" | {_text_of(*_operations(of, z[:1] * count)[:2])}"
            return text
        except _Unsuitable as error:
            if error.is_traced:
                raise
    return ""


def _operations(call: Callable[..., Array], z: list[Any]) -> tuple[tuple[Operation, ...], int | np.generic, bool]:
    """`(operations, result, has_rules)`: a function's operations, its result as in `Operation.operands`, and whether it
    defines derivative rules."""
    shape = z[0].shape
    try:
        closed, out = _jaxpr(call, z)
    except Exception as error:
        _check_with_one_element(call, z)
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise _Unsuitable(f"can't be traced: for arrays of shape {shape}, it raises {problem}") from error
    for constant in closed.consts:
        _number(constant)  # raises for arrays
    if closed.effects:
        raise _Unsuitable("has effects, such as printing or writing a state", TypeError)
    if (found := getattr(out, "shape", None)) != shape:
        gives = "None" if out is None else "several results" if found is None else f"a result of shape {found}"
        raise _Unsuitable(f"isn't elementwise: for arrays of shape {shape}, it returns {gives}", maps=False)
    if jnp.issubdtype(z[0].dtype, jnp.floating) and not jnp.issubdtype(out.dtype, jnp.floating):
        problem = f"returns {out.dtype.name} for {z[0].dtype.name} of shape {shape}"
        raise _Unsuitable(problem, TypeError, maps=False)
    operations: list[Operation] = []
    has_rules = False

    def value(primitive: Primitive, params: Any, operands: list[int | np.generic], dtype: Any) -> int | np.generic:
        """The result of a primitive: a number, or the index of a new operation."""
        if not any(isinstance(each, int) for each in operands):
            return _of_numbers(primitive, params, operands)
        operations.append(Operation(primitive, params, tuple(operands), dtype))
        return len(z) + len(operations) - 1

    def run(closed: Any, arguments: list[Any]) -> list[Any]:
        """The results of a jaxpr. Appends its operations to `operations`."""
        nonlocal has_rules
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = map(_number, getattr(closed, "consts", ()))
        known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

        def read(atom: Any) -> Any:
            dtype = atom.aval.dtype
            return _scalar(atom.val, dtype) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            name, params, operands = equation.primitive.name, equation.params, [*map(read, equation.invars)]
            out: Any = equation.outvars[0].aval
            if name in _CALLS:
                has_rules |= name in _CUSTOM
                results = run(params["jaxpr" if "jaxpr" in params else "call_jaxpr"], operands)
            elif name in _SAME and (out.shape in ((), shape) or isinstance(operands[0], np.generic)):
                results = operands[:1]
            elif out.shape[1:] == shape or any(isinstance(each, tuple) for each in operands):
                results = [_of_stacks(equation, operands, shape, value)]
            elif name in _ELEMENTWISE and (out.shape in ((), shape) or not any(isinstance(x, int) for x in operands)):
                # Only a barrier has several results: each is one operand.
                parts = [[each] for each in operands] if equation.primitive.multiple_results else [operands]
                pairs = zip(parts, equation.outvars, strict=True)
                results = [value(equation.primitive, params, part, var.aval.dtype) for part, var in pairs]
            else:
                raise _not_elementwise(name)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(each) for each in jaxpr.outvars]

    (result,) = run(closed, [*range(len(z))])
    return tuple(operations), result, has_rules


def _of_stacks(equation: Any, operands: list[Any], shape: tuple[int, ...], value: Callable[..., Any]) -> Any:
    """The result of a primitive that makes or takes a stack `[k, *shape]`, as in `jnp.select`. A tuple of `k` values
    stands for it. `value(primitive, params, operands, dtype)`: the result of an elementwise primitive."""
    primitive, params, stack = equation.primitive, equation.params, operands[0]
    source, out = equation.invars[0].aval, equation.outvars[0].aval
    is_stack, is_along = out.shape[1:] == shape, 0 in (params.get("axis"), params.get("dimension"))
    match primitive.name:
        case "slice" | "squeeze" | "convert_element_type" | "cumsum" | "argmax" if not isinstance(stack, tuple):
            pass  # a stack of equal numbers
        case "broadcast_in_dim" if params["broadcast_dimensions"] == (*range(1, len(out.shape)),):
            return (stack,) * out.shape[0]
        case "stack" if is_along and is_stack:
            return tuple(operands)
        case "concatenate" if is_along and is_stack:
            pairs = zip(operands, equation.invars, strict=True)
            parts = (x if isinstance(x, tuple) else (x,) * var.aval.shape[0] for x, var in pairs)
            return tuple(chain.from_iterable(parts))
        case "slice" if is_stack and params["strides"] is None:
            return stack[params["start_indices"][0] : params["limit_indices"][0]]
        case "squeeze" if out.shape == shape:
            return stack[0]
        case "convert_element_type":
            return tuple(value(primitive, params, [each], out.dtype) for each in stack)
        case "cumsum" if is_along and not params["reverse"]:
            return tuple(accumulate(stack, lambda x, y: value(lax.add_p, {}, [x, y], out.dtype)))
        case "argmax" if params["axes"] == (0,) and not jnp.issubdtype(source.dtype, jnp.inexact):
            best, index = stack[0], np.zeros((), out.dtype)[()]
            for i, each in enumerate(stack[1:], 1):
                is_more = value(lax.gt_p, {}, [each, best], np.dtype(bool))
                best = value(lax.max_p, {}, [each, best], source.dtype)
                index = value(lax.select_n_p, {}, [is_more, index, out.dtype.type(i)], out.dtype)
            return index
    raise _not_elementwise(primitive.name)


def _jaxpr(call: Callable[..., Array], z: list[Any]) -> tuple[Any, Any]:
    """`(jaxpr, result)`: what a function computes, and the shape and dtype of its result."""
    # The traced operations must not depend on the mesh in context.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        # JAX caches a function's trace, although values that it reads may change. So each trace has a new lambda.
        return jax.make_jaxpr(lambda *z: call(*z), return_shape=True)(*z)


def _check_with_one_element(call: Callable[..., Array], z: list[Any]) -> None:
    """Raises if a function that can't be traced for `z` can be traced for arrays of one element, and then closes over
    an array or changes the shape."""
    one = (1,) * len(z[0].shape)
    try:
        closed, out = _jaxpr(call, [jax.ShapeDtypeStruct(one, each.dtype) for each in z])
    except Exception:
        return
    for each in closed.consts:
        _number(each)
    gives: Any = getattr(out, "shape", one)
    if gives != one:
        raise _Unsuitable(f"isn't elementwise: for arrays of shape {one}, it returns a result of shape {gives}")


def _of_numbers(primitive: Primitive, params: dict[str, Any], operands: list[Any]) -> np.generic:
    """The value of a primitive of numbers, computed at once even while JAX is tracing."""
    if primitive.name == "convert_element_type":
        return _scalar(operands[0], params["new_dtype"])
    with ThreadPoolExecutor(1) as thread:  # JAX's tracing state is local to a thread.
        return thread.submit(lambda: _scalar(jax.tree.leaves(primitive.bind(*operands, **params))[0])).result()


def _number(constant: Any) -> np.generic:
    """A constant that a function closes over. Raises unless it is one number."""
    if isinstance(constant, Tracer):
        raise _Unsuitable(f"closes over a traced value, {describe(constant)}", TypeError, is_traced=True)
    if np.shape(constant) != () or jnp.issubdtype(constant.dtype, jax.dtypes.extended):
        raise _Unsuitable(f"closes over an array, {describe(constant)}", TypeError)
    return _scalar(constant)


def _scalar(x: Any, dtype: Any = None) -> np.generic:
    found: Any = np.asarray(x, dtype)[()]
    return found
