"""NVFP4 by tables of its values, in NumPy and float64."""

import numpy as np

from tests import oracle

# All values that aren't negative, by their codes: an even code has an even mantissa.
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3_VALUES = np.array([np.ldexp(m / 8 + (e > -7), max(e, -6)) for e in range(-7, 9) for m in range(8)])[:-1]  # NaN

Block = tuple[int | None, int | None]


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The nearest of `values` to each element, the one with the even code of two; the largest beyond it."""
    size = np.minimum(np.abs(x), values[-1])
    above = np.searchsorted(values, size)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.copysign(values[code], x)


def quantized(groups: oracle.Groups, block: Block) -> tuple[float, oracle.Groups, oracle.Groups]:
    """The tensor's scale, and each group's scales and data, element by element, in float64."""
    tensor_scale = max(np.max(np.abs(g.astype(np.float64)), initial=0) for g in groups) / (448 * 6)
    scales, data = [], []
    for group in groups:
        scale = np.ones(group.shape)
        rows, columns = (n if b is None else b for n, b in zip(group.shape, block, strict=True))
        for i in range(0, group.shape[0], rows or 1):
            for j in range(0, group.shape[1], columns or 1):
                own = np.s_[i : i + rows, j : j + columns]
                amax = np.max(np.abs(group[own].astype(np.float64)), initial=0)
                scale[own] = nearest(np.clip(amax / 6 / tensor_scale, 2.0**-6, 448), E4M3_VALUES) if amax else 1
        scales.append(scale)
        data.append(nearest(group / (scale * tensor_scale), E2M1_VALUES))
    return tensor_scale, scales, data
