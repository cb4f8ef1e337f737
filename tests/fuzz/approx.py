"""Values in float64 with a bound of the error that float32 may make: what a result is compared with.

With `u = 2**-24`, half a unit in the last place of float32, a sum of `n` products in any order has an error of at most
`n u Σ |a| |b|` to first order (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). Bounds here have `n + 2`
in place of `n`, for terms of higher order. A result that is rounded to a dtype adds half a unit in its last place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

U = 2.0**-24


class Approx:
    """An array of `value`s, each correct within `error`."""

    def __init__(self, value: Any, error: Any = 0.0) -> None:
        self.value = np.asarray(value, np.float64)
        self.error = np.broadcast_to(np.asarray(error, np.float64), self.value.shape)

    @property
    def T(self) -> "Approx":
        """The transpose."""
        return Approx(self.value.T, self.error.T)

    def __add__(self, other: "Approx") -> "Approx":
        value = self.value + other.value
        return Approx(value, self.error + other.error + 2 * U * np.abs(value))

    def __mul__(self, other: "Approx") -> "Approx":
        a, b, value = np.abs(self.value), np.abs(other.value), self.value * other.value
        return Approx(value, a * other.error + self.error * (b + other.error) + 2 * U * np.abs(value))

    def __matmul__(self, other: "Approx") -> "Approx":
        return self.einsum("ij,jk->ik", other, self.value.shape[-1])

    def einsum(self, spec: str, other: "Approx", terms: int) -> "Approx":
        """`einsum(spec, self, other)`, a sum of `terms` products for each element."""
        a, b = np.abs(self.value), np.abs(other.value)
        error = np.einsum(spec, a, other.error) + np.einsum(spec, self.error, b + other.error)
        return Approx(np.einsum(spec, self.value, other.value), error + (terms + 2) * U * np.einsum(spec, a, b))

    def sum(self, axis: Any) -> "Approx":
        """The sum along axes."""
        value = self.value.sum(axis)
        terms = self.value.size / max(1, value.size) + 2
        return Approx(value, self.error.sum(axis) + terms * U * np.abs(self.value).sum(axis))

    def apply(self, fn: Callable[[Any], Any], slope: float) -> "Approx":
        """`fn` of the values, which JAX computes to 16 units. `slope`: the largest derivative of `fn`."""
        value = fn(self.value).astype(np.float32).astype(np.float64)  # silu(-200) is zero, and zero × inf is NaN
        error = slope * self.error + 16 * U * (np.abs(value) + np.abs(self.value) * slope)
        return Approx(value, np.where(np.isfinite(self.value), error, 16 * U))  # tanh(inf) is 1

    def rounded(self, dtype: Any) -> "Approx":
        """The values as a result in `dtype`. Integers are exact."""
        if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return Approx(self.value)
        info = jnp.finfo(dtype)
        unit = 0.0 if dtype == "float32" else float(info.eps) / 2 * (np.abs(self.value) + self.error)
        return Approx(self.value, self.error + unit + 2 * float(info.tiny))

    def difference(self, got: np.ndarray) -> tuple[int, ...] | None:
        """The index of the element of `got` that is furthest beyond the bound; None if all are within it."""
        got = np.asarray(got).astype(np.float64)
        same = (got == self.value) | (np.isnan(got) & np.isnan(self.value))
        with np.errstate(invalid="ignore"):
            gap = np.where(np.isfinite(self.value), np.abs(got - self.value) - self.error, np.inf)
        gap = np.where(same, 0.0, np.where(np.isnan(gap), np.inf, gap))
        if not gap.size or np.max(gap) <= 0:
            return None
        return tuple(int(i) for i in np.unravel_index(np.argmax(gap), gap.shape))


class Result(NamedTuple):
    """An expected result, before it is rounded to its dtype."""

    want: Approx
    dtype: str
