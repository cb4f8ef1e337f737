"""The reference: NumPy, float64, one group after another. Nothing here knows the library's kernels."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

Groups = list[np.ndarray]


def matmul(lhs: Groups, rhs: Groups) -> Groups:
    return [np.asarray(a, np.float64) @ np.asarray(b, np.float64) for a, b in zip(lhs, rhs, strict=True)]


def clipped(sizes: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Where each group begins in a buffer that packs it, and how much of it lies in there, whatever the sizes are."""
    spans, start = [], 0
    for size in sizes:
        held = min(max(size, 0), capacity - start)
        spans.append((start, held))
        start += held
    return spans


def pack(groups: Groups, ragged: tuple[bool, bool], shape: Sequence[int], fill: float = np.nan) -> np.ndarray:
    """The buffer of a `GroupedTensor`, with `fill` wherever no group has an element."""
    dtype = groups[0].dtype
    data = np.full(shape, fill if jnp.issubdtype(dtype, jnp.floating) else 77, dtype)
    if ragged == (False, False):
        return np.stack(groups)
    start = 0
    for group in groups:
        first, last = group.shape
        if ragged == (False, True):
            data[:first, start : start + last] = group
            start += last
        else:
            data[start : start + first, :last] = group
            start += first
    return data


def unpack(data: np.ndarray, ragged: tuple[bool, bool], firsts: Sequence[int], lasts: Sequence[int]) -> Groups:
    """The groups in a buffer (packed along rows, if both dims are ragged)."""
    if ragged == (False, False):
        return list(data)
    groups, start = [], 0
    for first, last in zip(firsts, lasts, strict=True):
        if ragged == (False, True):
            groups.append(data[:, start : start + last])
            start += last
        else:
            groups.append(data[start : start + first, :last])
            start += first
    return groups


def assert_close(got: Groups, want: Groups, max: float, rms: float | None = None) -> None:
    """Largest and root-mean-square error, relative to the largest element of `want` over all groups."""
    scale = np.max([np.max(np.abs(w), initial=0.0) for w in want], initial=0.0) or 1.0
    errors = [np.asarray(g, np.float64) - w for g, w in zip(got, want, strict=True)]
    worst = np.max([np.max(np.abs(e), initial=0.0) for e in errors], initial=0.0) / scale
    assert worst <= max, f"largest error {worst:.3g} > {max:.3g} of the largest element"
    if rms is not None:
        flat = np.concatenate([e.ravel() for e in errors])
        got_rms = float(np.sqrt(np.mean(flat**2))) / scale if flat.size else 0.0
        assert got_rms <= rms, f"rms error {got_rms:.3g} > {rms:.3g} of the largest element"
