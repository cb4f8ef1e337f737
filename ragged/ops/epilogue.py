"""Checks of a bias, an activation and a gate."""

from typing import Any

import jax.numpy as jnp

from ragged.core.errors import Site, is_arraylike
from ragged.ops.request import Request

# Layouts that allow a bias and an activation.
ROW_LAYOUTS = ("forward", "batched", "inner_rows")
SAVES = ("pre", "out")
PRE_ACTIVATION, GATE, UP = "ragged_pre_activation", "ragged_gate", "ragged_up"
"""Default names of pre-activations in policies of `jax.checkpoint`: of `matmul`, then of the two products of
`gated_matmul`."""


def check_save(site: Site, save: Any) -> None:
    if save not in SAVES:
        hint = "Pass 'pre' to save the pre-activations for the backward pass, or 'out' to recompute them there."
        if save == "nothing":  # The operation that uses the result saves it.
            hint = "The operation that uses the result saves it: wrap both in `jax.checkpoint`, or pass 'out' to "
            hint += "recompute only the pre-activations."
        site.fail(ValueError, f"unknown `save` {save!r}.", hint)


def check_names(site: Site, names: dict[str, Any], save: str) -> None:
    """Raises unless all `names`, keyed by argument, are strings, and `save` saves what they name."""
    for argument, name in names.items():
        if not isinstance(name, str) or not name:
            site.fail(TypeError, f"`{argument}` is {name!r}.", "Pass a string that a policy of `jax.checkpoint` knows.")
        if save != "pre":
            problem = f"`{argument}` is {name!r}, but with `save={save!r}` pre-activations are recomputed."
            site.fail(ValueError, problem, "Leave the names out, or pass `save='pre'`.")


def check_epilogue(site: Site, request: Request, activation: Any) -> None:
    """Raises if the layout doesn't allow the bias or the activation, or if the bias doesn't fit the result."""
    bias, call = request.bias, request.call
    if bias is not None or activation is not None:
        check_rows(site, request, "`bias`" if activation is None else "`activation`")
    if bias is not None:
        check_bias(site, bias, call.num_local_groups(request.operands), call.shape[-1], "the result")


def check_bias(site: Site, bias: Any, num_groups: Any, n: Any, of: str) -> None:
    """Raises unless `bias` is a floating array, `[num_groups, n]` or `(n,)`. `of`: the array whose last dim is `n`."""
    site = site.also(bias=bias)
    if not is_arraylike(bias) or not jnp.issubdtype(bias.dtype, jnp.floating):
        site.fail(TypeError, "`bias` is not a floating array.", "Pass [groups, n], or (n,).")
    if bias.shape not in ((num_groups, n), (n,)):
        shapes = f"{(num_groups, n)}, a row for each group, or {(n,)}, one row for all groups"
        hint = f"The last dim of `bias` must equal the last dim of {of}."
        site.fail(ValueError, f"`bias` must have shape {shapes}.", hint)


def check_rows(site: Site, request: Request, what: str) -> None:
    """Raises unless the layout is in `ROW_LAYOUTS`, and the result is floating and not unreduced. `what`: the error's
    subject."""
    layout, dtype, spec = request.layout.name, jnp.dtype(request.call.dtype), request.call.out_spec
    if layout not in ROW_LAYOUTS:
        hint = "It requires a result with ragged rows, or two uniform operands."
        if layout in ("forward_left", "inner_columns"):
            hint += " The transposed product has ragged rows: `matmul(rhs.mT, lhs.mT)`."
        site.fail(ValueError, f"{what} is given, but the layout {layout!r} has a result without rows.", hint)
    if not jnp.issubdtype(dtype, jnp.floating):
        site.fail(
            TypeError,
            f"{what} is given, but the result is {dtype.name}.",
            "Pass a floating dtype as `preferred_element_type`.",
        )
    if spec is not None and spec.unreduced:
        hint = "Sum the result over the devices first, then apply it."
        site.fail(ValueError, f"{what} is given, but the result is unreduced.", hint)
