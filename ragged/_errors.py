"""How errors are put: the call and what is wrong; what came; the mend.

    `ragged.matmul(lhs, rhs)`: `lhs` has 4 groups but `rhs` has 3.
    Got lhs=GroupedTensor(bf16[256,128], first_dims=i32[4]), rhs=bf16[3,128,256].
    `rhs` needs one matrix per group, including empty groups.

And the questions about values that checks ask.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import equinox as eqx
import jax
import numpy as np
from jax.core import ShapedArray, Tracer

MOST_ROWS = np.iinfo(np.int32).max
"""How many rows of a buffer can be counted."""


@dataclass(frozen=True)
class Site:
    """Where an error is seen: a public call, those of its operands that show what is wrong, and what it calls the
    arguments of the product that it makes."""

    call: str
    operands: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def fail(self, error: type[Exception], problem: str, mend: str) -> NoReturn:
        raise error(self.text(problem, mend))

    def text(self, problem: str, mend: str) -> str:
        def own(text: str) -> str:
            return re.sub(r"(?<=`)\w+", lambda name: self.names.get(name[0], name[0]), text)

        came = ", ".join(f"{self.names.get(name, name)}={describe(x)}" for name, x in self.operands.items())
        return f"`{self.call}`: {own(problem)}\n" + (f"Got {came}.\n" if came else "") + own(mend)

    def also(self, **operands: Any) -> "Site":
        return replace(self, operands=self.operands | operands)


def describe(x: Any) -> str:
    """`f32[4,8]` for an array; numbers, strings and `GroupedTensor`s as they print; of a list the first few elements;
    for anything else, the type's name."""
    if isinstance(x, ShapedArray):  # with its sharding
        return str(x)
    if is_arraylike(x) or isinstance(x, jax.ShapeDtypeStruct):
        dtype = "float0" if x.dtype == jax.dtypes.float0 else str(x.dtype)
        return f"{short_name(dtype)}[{','.join(map(str, x.shape))}]"
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(describe, x[:8]))}{', ...' if len(x) > 8 else ''}]"
    prints = isinstance(x, eqx.Module) and type(x).__repr__ is not eqx.Module.__repr__  # in a line of its own making
    if x is None or prints or isinstance(x, int | float | str):
        return repr(x)
    held = ", not the array that it holds" if hasattr(x, "__jax_array__") else ""  # flax's `nnx.Param`
    return f"a {type(x).__name__}{held}"


def short_name(dtype: str) -> str:
    """`"bf16"` for `"bfloat16"`."""
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        dtype = dtype.replace(long, short)
    return dtype


def is_arraylike(x: Any) -> bool:
    """A JAX or NumPy array, traced or not."""
    return isinstance(x, jax.Array | np.ndarray)


def is_concrete(*xs: Any) -> bool:
    """Whether all values are known: arrays, and not tracers."""
    return all(is_arraylike(x) and not isinstance(x, Tracer) for x in xs)


def is_count(x: Any, least: int = 1) -> bool:
    """Whether `x` is an integer of at least `least`, known now. A bool is none."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool) and bool(x >= least)


def check_packed(site: Site, extent: Any) -> None:
    """Raises if a buffer's packed axis is longer than int32 can count. A symbolic one may be."""
    if isinstance(extent, int) and extent > MOST_ROWS:
        problem = f"{extent} packed rows (or columns) are more than {MOST_ROWS}."
        site.fail(ValueError, problem, "They are counted in int32: split the buffer.")
