"""Elementwise functions in Triton: the source of a `@triton.jit` function, one line per operation.

    jax.nn.silu    ->    def function(v0):
                             v1 = _sigmoid(v0)
                             v2 = v0 * v1
                             return v2

The kernel is compiled with this function.
"""

import linecache
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ragged.product.function import Function, Operation, names

_BINARY = {"add": "+", "add_any": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
_BINARY |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_MAXIMUM = "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)"
_MINIMUM = "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)"


def _power(operation: Operation, x: str) -> str:
    y = operation.params["y"]
    product = " * ".join([x] * abs(y)) or f"tl.zeros_like({x}) + 1.0"
    return product if y >= 0 else f"1.0 / ({product})"


def _converted(operation: Operation, x: str) -> str:
    dtype = np.dtype(operation.params["new_dtype"]).name
    return f"({x} != 0)" if dtype == "bool" else f"({x}).to(tl.{dtype})"


FORMULAS: dict[str, str | Callable[..., str]] = {
    **{name: f"{{}} {sign} {{}}" for name, sign in _BINARY.items()},
    **{name: f"tl.{name}({{}})" for name in names("abs ceil cos exp exp2 floor log rsqrt sin sqrt")},
    **{name: f"_{name}({{}})" for name in names("erf erfc expm1 log1p sign tanh")},
    "clamp": f"{_MINIMUM.format(_MAXIMUM.format('{1}', '{0}'), '{2}')}",
    "convert_element_type": _converted,
    "integer_pow": _power,
    "is_finite": 'tl.abs({}) < float("inf")',
    "logistic": "_sigmoid({})",
    "max": _MAXIMUM,
    "min": _MINIMUM,
    "name": "{}",
    "neg": "-{}",
    "not": "tl.where({}, False, True)",
    "select_n": "tl.where({0}, {2}, {1})",
    "square": "{0} * {0}",
    "stop_gradient": "{}",
}
"""Triton expressions for JAX's elementwise primitives. Functions whose names begin with `_` are in `kernel`."""


def source(function: Function) -> str:
    """Source of the Triton function, whose arguments are tiles."""
    lines = [f"def function({', '.join(f'v{i}' for i in range(function.arity))}):"]
    for i, operation in enumerate(function.operations, function.arity):
        formula, operands = FORMULAS[operation.primitive.name], [*map(_text, operation.operands)]
        code = formula(operation, *operands) if callable(formula) else formula.format(*operands)
        lines.append(f"v{i} = {code}")
    result = _text(function.result)
    lines.append(f"return {result}" if isinstance(function.result, int) else f"return tl.zeros_like(v0) + {result}")
    return "\n    ".join(lines) + "\n"


def _text(operand: int | np.generic) -> str:
    """The source of an operand: a variable's name if the operand is its index, an int; else a constant."""
    if isinstance(operand, int):
        return f"v{operand}"
    value = operand.item()
    is_plain = not isinstance(value, float) or np.isfinite(value)
    return (f"{value!r}" if value >= 0 else f"({value!r})") if is_plain else f'float("{value}")'


@cache
def compiled(function: Function) -> Any:
    """The `triton.JITFunction` of a function."""
    import triton

    from ragged.backends.gpu import kernel

    text, file, scope = source(function), f"<function {function.key}>", dict(vars(kernel))
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for Triton
    exec(compile(text, file, "exec"), scope)
    return triton.jit(scope["function"])
