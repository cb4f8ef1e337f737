"""Kernels: grouped products of plain arrays. Nothing in here knows of `GroupedTensor`.

**The contract.** Each backend is a module of this package with some of the functions below.
All of them, on every backend:

- take any extents, 0 excepted (the caller returns zeros then), any group sizes, and a batch axis in front of any
  operand (an operand without one is the same for all batch elements; the result has one if any operand has);
- read sizes on the device: nothing depends on their values at trace time;
- never read or write outside the buffers, whatever the sizes are: a negative one counts as 0, and what would reach past
  the capacity is cut off (`schedule.group_offsets`);
- neither read the tail in any way that matters, nor leave anything but zeros in it;
- let no group's values, NaN and infinity included, reach another group's part of the result: masks select, they never
  multiply;
- accumulate in float32 (int32 for integers, exactly; float64 for float64) and round once, to `preferred_element_type`;
- give the same bits for the same inputs.

`grouped_matmul(lhs, rhs, group_sizes, *, preferred_element_type, precision, tiling, group_offset, existing_out,
transpose_rhs, target)`: `[m, k] × [h, k, n] -> [m, n]`, or `rhs [h, n, k]`, read in place, with `transpose_rhs`.
`rhs` holds the groups `group_offset, ..., group_offset + h - 1` of the `g` in `group_sizes`; rows of other groups come
out zero.

`transposed_grouped_matmul(lhs, rhs, group_sizes, *, preferred_element_type, precision, tiling, group_offset,
num_actual_groups, existing_out, sum_batch, target)`: `[a, m] × [m, b] -> [h, a, b]` for the `h = num_actual_groups`
groups from `group_offset` on. An empty group gives zeros. With `sum_batch`, batch elements are summed, in the
accumulator.

`batched_matmul(lhs, rhs, *, axes, preferred_element_type, precision, tiling, existing_out, target)`: no letter ragged.

`tiled_matmul(lhs, rhs, sizes, *, axes, shape, preferred_element_type, precision, tiling, existing_out, target)`: two
or three of the letters ragged.

A backend but XLA's has one more function, `lacks(kernel, lhs, rhs, sizes, out, precision, target)`, which says why it
has no kernel for a product (or ""). Then XLA's runs; and where a kernel raises `Refused`, for what only its tiles tell.

All but XLA's take `lhs_scales` and `rhs_scales` too, see `Scales`. For XLA operands are dequantised before.

`existing_out` is added to in the accumulator, before rounding. Its tail is zero already; its other elements that no
product reaches stay as they are. `tiling` is `(tile_m, tile_k, tile_n)` of the function's own product (by letter for
`batched_matmul` and `tiled_matmul`), or None for the backend's choice. `target` says what is compiled for.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Target(NamedTuple):
    """What a kernel is compiled for, and how. Backends ignore what means nothing to them."""

    portable: bool = False  # it goes into an export, which refuses most custom calls
    interpret: Any = False  # as in `pl.pallas_call`: run a Pallas or Triton kernel's body on the CPU
    input_buffer_count: int = 2  # buffers for each streamed operand of a TPU kernel
    automatic: bool = False  # the program is for several devices, over which XLA partitions it
    device: tuple[str, int] | None = None  # kind and number of cores (a GPU's: 0 for its kind's own), if known


ANY_TARGET = Target()


class Refused(NotImplementedError):
    """A kernel can't do this product after all."""


class Scales(NamedTuple):
    """Scales of a quantised operand: value = data × scale, one scale a block.

    `values` has the operand's axes with one entry for each block. `block` is a block's extent along the operand's last
    two axes, None for all of it. A ragged operand's rows have blocks of 1, or None: a group's rows, and then the first
    axis of `values` (but for a batch axis) is the groups'. No block straddles two groups.
    """

    values: Array
    block: tuple[int | None, int | None]

    @property
    def mT(self) -> "Scales":
        """Those of the transposed operand."""
        return Scales(self.values.mT, (self.block[1], self.block[0]))


class Known(NamedTuple):
    """Names of what a backend's kernels take."""

    operands: tuple[str, ...]  # dtypes
    results: tuple[str, ...]  # dtypes
    precisions: tuple[str, ...]  # as `precision_name` gives them


def lacking(backend: str, known: Known, lhs: Any, rhs: Any, sizes: tuple[Any, ...], out: Any, precision: Any) -> str:
    """What a backend's `lacks` says of extents, dtypes and precision, if its kernels take those that are `known`."""
    if not all(isinstance(extent, int) for x in (lhs, rhs, out, *sizes) for extent in x.shape):
        return f"{backend} has no kernels for symbolic extents"
    operands, results, precisions = known
    for name, x, dtypes in (("lhs", lhs, operands), ("rhs", rhs, operands), ("the result", out, results)):
        if jnp.dtype(x.dtype).name not in dtypes:
            return f"{backend} has no kernels for {name} in {jnp.dtype(x.dtype).name}"
    precision = jax.config.jax_default_matmul_precision if precision is None else precision
    if precision_name(precision) not in precisions:
        return f"{backend} has no kernels for precision {precision}"
    return ""


def kernel_metadata(
    axes: tuple[str, str, str], tile: Mapping[str, int], dtypes: tuple[Any, Any, Any], num_actual_groups: int
) -> dict[str, str]:
    """What XLA's profiler shows beside a kernel: it reads this one key, a string of JSON.

    `axes` are the letters as they are stored, of the operand that has the result's rows, of the other one, and of the
    result; `tile` is by letter.
    """
    lhs, rhs, out = axes
    (contracted,) = {*lhs, *rhs} - {*out}
    shown = {
        "axes": f"{lhs},{rhs}->{out}",
        "transpose_lhs": lhs[0] == contracted,
        "transpose_rhs": rhs[1] == contracted,
        "tiling": {f"tile_{letter}": tile[letter] for letter in "mkn"},
        "dtypes": dict(zip(("lhs", "rhs", "out"), (jnp.dtype(dtype).name for dtype in dtypes), strict=True)),
        "num_actual_groups": num_actual_groups,
    }
    return {"xprof_metadata": json.dumps(shown)}


def precision_name(precision: Any) -> str | None:
    """The one precision of both operands, JAX's default if it is None, in lower case; None if there are two."""
    precision = jax.config.jax_default_matmul_precision if precision is None else precision
    both = precision if isinstance(precision, tuple) else (precision, precision)
    return str(both[0]).lower() if both[0] == both[1] else None
