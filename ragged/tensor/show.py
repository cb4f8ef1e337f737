"""Text and HTML of a tensor, for `repr`, pretty-printers and notebooks. The buffer's values are never read."""

from html import escape
from typing import Any

import jax
import numpy as np

from ragged.core.errors import describe, is_arraylike, is_concrete
from ragged.tensor.base import GroupedBase

_COLORS = ("#4a8cf0", "#e8833a", "#35a56c", "#b45cc9")
_HATCHED = "repeating-linear-gradient(45deg, #8886 0 1px, transparent 1px 5px)"
_MAX_IN_LINE, _MAX_IN_PICTURE = 8, 64  # Sizes are shown for at most this many groups.


def parts(x: GroupedBase) -> list[str]:
    """The arguments in the tensor's `repr`: `["f32[16,8]", "first_dims=[3, 5, 0, 4] (12 of 16 rows)"]`."""
    shown = [describe(x.data)]
    for name, word in (("first_dims", "rows"), ("last_dims", "columns")):
        dims = getattr(x, name)
        if dims is None:
            continue
        if (sizes := _known(dims, _MAX_IN_LINE)) is None:
            shown.append(f"{name}={describe(dims)}")
            continue
        axis, total = x.packed_axis, ""
        if axis is not None and (axis == -1) == (word == "columns") and is_arraylike(x.data):
            total = f" ({sum(sizes)} of {x.data.shape[axis]} {word})"
        shown.append(f"{name}={sizes}{total}")
    if x.is_quantized:
        shown.append(f"scales={describe(x.scales)} by {x.scaling}")
    if x.tensor_scale is not None:
        shown.append(f"tensor_scale={describe(x.tensor_scale)}")
    if x.zero_points is not None:
        shown.append(f"zero_points={describe(x.zero_points)}")
    return shown + ["transposed"] * x.transposed


def html(x: GroupedBase) -> str:
    """A summary line, and a bar of the packed axis: each group as wide as its size, the tail hatched."""
    if x.is_cotangent or x.is_stack or not is_arraylike(x.data) or x.packed_axis is None:
        return _line(escape(repr(x)))
    by_columns, capacity = x.packed_axis == -1, x.capacity
    packed, other, word = x.first_dims, x.last_dims, "rows"
    if by_columns:
        packed, other, word = x.last_dims, x.first_dims, "columns"
    if not is_arraylike(packed):
        return _line(escape(repr(x)))
    head = f"<b>GroupedTensor</b> {escape(x.kind)}, {escape(describe(x.data))}, {packed.shape[0]} groups"
    head += f", scales {escape(str(x.scaling))}" if x.is_quantized else ""
    sizes = _known(packed, _MAX_IN_PICTURE)
    others = [None] * packed.shape[0] if other is None else _known(other, _MAX_IN_PICTURE)
    if sizes is None or others is None:
        return _line(head)
    bar, left = "", capacity
    for i, (size, across) in enumerate(zip(sizes, others, strict=True)):
        width = min(max(size, 0), left)
        left -= width
        label = str(size) if across is None else f"{across} × {size}" if by_columns else f"{size} × {across}"
        bar += _piece(width, label, f"group {i}: {label}", f"background:{_COLORS[i % len(_COLORS)]};color:#fff")
    bar += _piece(left, "", f"tail: {left} {word}", f"background:{_HATCHED}")
    return _line(f"{head}, {capacity - left} of {capacity} {word}") + (
        f'<div style="display:flex;max-width:40em;border:1px solid #8886;font-size:.8em;line-height:1.6">{bar}</div>'
    )


def _line(text: str) -> str:
    return f'<div style="font-size:.9em">{text}</div>'


def _piece(size: int, label: str, title: str, style: str) -> str:
    if not size:
        return ""
    where = f"flex:{size} 0 0;min-width:0;overflow:hidden;white-space:nowrap;text-align:center;{style}"
    return f'<span title="{title}" style="{where}">{label or "&nbsp;"}</span>'


def _known(dims: Any, limit: int) -> list[int] | None:
    """The sizes; None if there are more than `limit`, or if they are traced, donated or on other processes."""
    if not is_concrete(dims) or dims.ndim != 1 or dims.shape[0] > limit or not np.issubdtype(dims.dtype, np.integer):
        return None
    if isinstance(dims, jax.Array) and (dims.is_deleted() or not dims.is_fully_addressable):
        return None
    return np.asarray(dims).tolist()
