"""Error format: the call and the problem, the arguments, a hint.

    `ragged.matmul(lhs, rhs)`: `lhs` has 4 groups but `rhs` has 3.
    Got lhs=GroupedTensor(bf16[256,128], first_dims=i32[4]), rhs=bf16[3,128,256].
    `rhs` needs one matrix per group, including empty groups.

Also predicates for checks.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import ShapedArray, Tracer
from jax.export import is_symbolic_dim

MAX_ROWS = np.iinfo(np.int32).max
"""Maximum number of packed rows (or columns) of a buffer: they are counted in int32."""


@dataclass(frozen=True)
class Site:
    """Context of an error: the public call, and the operands to print, keyed by name.

    `names`: only if the public call makes another one, as `gated_matmul` calls `matmul`. It has the argument names of
    the outer call, keyed by those of the inner call. Problems and hints use the inner names; the message has the outer
    ones.
    """

    call: str
    operands: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def fail(self, error: type[Exception], problem: str, hint: str) -> NoReturn:
        """Raises `error` with the message of `text`. For a `TypeError` with operands that wrap an array, such as flax's
        `nnx.Param`, the hint is replaced: it says how to pass the arrays."""
        arrays = [array for name, x in self.operands.items() if (array := wrapped_array(name, x))]
        if error is TypeError and arrays:
            hint = f"Pass the wrapped array: {', '.join(f'`{array}`' for array in arrays)}."
        raise error(self.text(problem, hint))

    def text(self, problem: str, hint: str) -> str:
        """The error message, with the argument names in backticks replaced as in `names`."""

        def with_names(text: str) -> str:
            def renamed(code: re.Match[str]) -> str:
                # Skips attributes (after a dot), text in quotes and keywords (before `=`).
                return re.sub(r"(?<![\w.'\"])[a-z_]+\b(?!=)", lambda name: self.names.get(name[0], name[0]), code[0])

            return re.sub(r"`[^`]*`", renamed, text) if self.names else text

        received = ", ".join(f"{self.names.get(name, name)}={describe(x)}" for name, x in self.operands.items())
        return f"`{self.call}`: {with_names(problem)}\n" + (f"Got {received}.\n" if received else "") + with_names(hint)

    def also(self, **operands: Any) -> "Site":
        """A copy that prints further operands."""
        return replace(self, operands=self.operands | operands)


def describe(x: Any) -> str:
    """Short text of a value: `f32[4,8]` for an array; the `repr` of None, numbers, strings, and modules that define
    `__repr__`, such as `GroupedTensor`; the first elements of a list; else the name of the type."""
    if isinstance(x, ShapedArray):  # Its `str` includes the sharding.
        return str(x)
    if is_arraylike(x) or isinstance(x, jax.ShapeDtypeStruct):
        dtype = "float0" if x.dtype == jax.dtypes.float0 else str(x.dtype)
        return f"{short_name(dtype)}[{','.join(map(str, x.shape))}]"
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(describe, x[:8]))}{', ...' if len(x) > 8 else ''}]"
    has_short_repr = isinstance(x, eqx.Module) and type(x).__repr__ is not eqx.Module.__repr__  # our own classes
    if x is None or has_short_repr or is_number(x) or isinstance(x, str):
        return repr(x)
    wraps = ", not the array that it holds" if hasattr(x, "__jax_array__") else ""  # such as flax's `nnx.Param`
    return f"a {type(x).__name__}{wraps}"


def wrapped_array(name: str, x: Any) -> str | None:
    """Code for the array in `x`, an object of another library such as haliax's `NamedArray` or flax's `nnx.Param`; None
    for other values."""
    if is_arraylike(getattr(x, "array", None)) and hasattr(x, "axes"):
        return f"{name}.array"
    # Our tensors, modules of Equinox, have both methods too.
    is_wrapper = hasattr(x, "__jax_array__") and hasattr(x, "__getitem__") and not is_arraylike(x)
    return f"{name}[...]" if is_wrapper and not isinstance(x, eqx.Module) else None


def short_name(dtype: str) -> str:
    """`"bf16"` for `"bfloat16"`."""
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        dtype = dtype.replace(long, short)
    return dtype


def is_arraylike(x: Any) -> TypeGuard[Array]:
    """Whether `x` is a JAX array, traced or not, or a NumPy array."""
    return isinstance(x, jax.Array | np.ndarray)


def is_of_numbers(dtype: Any) -> bool:
    """True for dtypes of numbers, and for bool."""
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def is_number(x: Any) -> bool:
    """Whether `x` is a number or a bool, of Python or NumPy. Arrays aren't."""
    return isinstance(x, int | float | complex) or (isinstance(x, np.generic) and is_of_numbers(x.dtype))


def is_concrete(*xs: Any) -> bool:
    """Whether all values are arrays, and none is a tracer."""
    return all(is_arraylike(x) and not isinstance(x, Tracer) for x in xs)


def known_to_differ(one: Any, other: Any) -> bool:
    """True if the shapes of two arrays differ, or if both arrays are concrete and their values differ."""
    return np.shape(one) != np.shape(other) or (is_concrete(one, other) and not np.array_equal(one, other))


def is_count(x: Any, minimum: int = 1) -> bool:
    """Whether `x` is a static integer of at least `minimum`, and not a bool."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool) and bool(x >= minimum)


def is_extent(x: Any, minimum: int = 1) -> bool:
    """Whether `x` can be an extent of a buffer: a count of at least `minimum`, or a symbol of `jax.export`."""
    return is_symbolic_dim(x) or is_count(x, minimum)


def as_extent(x: Any) -> Any:
    """`x`, an extent, as an entry of a shape: an int or a symbol."""
    return x if is_symbolic_dim(x) else int(x)


def broadcasts(shape: tuple[Any, ...], to: tuple[Any, ...]) -> bool:
    """True if NumPy can broadcast an array of this shape to the shape `to`."""
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1], strict=False))


def check_flag(site: Site, name: str, value: Any) -> None:
    """Raises `TypeError` unless `value`, the argument `name`, is a static bool."""
    if not isinstance(value, bool | np.bool_):
        hint = "Pass True or False." + " Under `jax.jit`, list the argument in `static_argnames`." * is_arraylike(value)
        site.fail(TypeError, f"`{name}` is {describe(value)}.", hint)


def check_fill(site: Site, name: str, value: Any, dtype: Any, shape: tuple[Any, ...] | None = ()) -> None:
    """Raises unless `value`, the argument `name`, is a number, or an array of numbers that broadcasts to `shape` (to
    any, for None).

    Unless it is traced, `dtype` must hold its numbers. Floats may be rounded, numbers beyond the largest one only to
    infinity.
    """
    site, dtype = site.also(**{name: value}), jnp.dtype(dtype)
    if not (is_number(value) or (is_arraylike(value) and is_of_numbers(value.dtype))):
        site.fail(TypeError, f"`{name}` is {describe(value)}.", "Pass a number.")
    if shape is not None and not broadcasts(np.shape(value), shape):
        hint = f"An array must broadcast to {shape} here." if shape else "Pass a number."
        site.fail(ValueError, f"`{name}` has shape {np.shape(value)}.", hint)
    is_elsewhere = isinstance(value, jax.Array) and (isinstance(value, Tracer) or not value.is_fully_addressable)
    # float8_e8m0fnu lacks the default, 0.
    if is_elsewhere or dtype == jnp.float8_e8m0fnu or jnp.issubdtype(dtype, jnp.complexfloating):
        return
    if np.iscomplexobj(value):
        site.fail(ValueError, f"`{name}` is complex, but the dtype here is {dtype.name}.", "Pass a real number.")
    if not np.all(_holds(dtype, value)):
        hint = "Pass another number, or cast the tensor first, as in `x.astype(jnp.float32)`."
        site.fail(ValueError, f"{dtype.name} can't hold `{name}`.", hint)


def _holds(dtype: Any, value: Any) -> Any:
    """For each real number in `value`: True if `dtype` can represent it, see `check_fill`."""
    try:
        given = np.asarray(value)
        if given.dtype.kind in "OV":  # O: an int of more than 64 bits. V: a dtype that NumPy doesn't have.
            given = given.astype(np.float64)
    except OverflowError:  # an int that float64 doesn't hold
        return False
    if jnp.issubdtype(dtype, jnp.inexact):
        with np.errstate(over="ignore", invalid="ignore"):
            cast = given.astype(dtype).astype(np.float64)
        is_in_range = (np.abs(given) <= float(jnp.finfo(dtype).max)) | np.isinf(cast)
        return np.where(np.isnan(given), np.isnan(cast), is_in_range)
    is_bool = jnp.issubdtype(dtype, jnp.bool_)
    first, last = (0, 1) if is_bool else (int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max))
    return (given >= first) & (given < last + 1) & (given == np.floor(given))


def check_packed(site: Site, extent: Any, name: str = "") -> None:
    """Raises `ValueError` if the packed axis of a buffer, or the argument `name`, is longer than `MAX_ROWS`. Symbolic
    extents aren't checked."""
    if is_count(extent, MAX_ROWS + 1):
        what = f"`{name}` is {extent}, which is" if name else f"{extent} packed rows (or columns) are"
        hint = "Rows and columns are counted in int32." if name else "They are counted in int32: split the buffer."
        site.fail(ValueError, f"{what} more than {MAX_ROWS}.", hint)
