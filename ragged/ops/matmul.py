"""`matmul`: checks the operands, infers the layout, binds the primitive."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax._src.core import trace_state_clean  # no public name
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from ragged.core.errors import (
    Site,
    as_extent,
    check_packed,
    describe,
    is_arraylike,
    is_concrete,
    is_extent,
    known_to_differ,
)
from ragged.core.formats import AnyArray, accumulator_dtype, as_array
from ragged.core.mesh import is_of_one_device
from ragged.core.offsets import as_int32, may_be_offsets
from ragged.core.scaling import not_differentiable, not_differentiable_8_bits
from ragged.ops import check
from ragged.ops.activated import with_epilogue
from ragged.ops.epilogue import PRE_ACTIVATION, check_epilogue, check_names, check_save
from ragged.ops.letters import Einsum, EinsumOperand, einsum_of
from ragged.ops.request import Arguments, Request
from ragged.primitive.shared import merged
from ragged.product.config import Config, Configs
from ragged.product.function import function_of
from ragged.product.layout import Layout, Product, infer_layout
from ragged.product.operands import Call, Epilogue, Index, Operand, Operands
from ragged.quant.recipe import Recipe, check_history
from ragged.quant.weights import QuantizedWeights, unquantized, with_quantized_weights
from ragged.tensor import arithmetic
from ragged.tensor.base import is_read_transposed, kernel_scales, with_fields
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import KINDS, GroupedTensor


def matmul(
    lhs: GroupedTensor | Gathered | AnyArray,
    rhs: GroupedTensor | QuantizedWeights | AnyArray,
    *,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    existing_out: GroupedTensor | AnyArray | None = None,
    group_offset: Int[AnyArray, ""] | int | None = None,
    num_actual_groups: int | None = None,
    capacity: int | None = None,
    max_last: int | None = None,
    bias: Float[AnyArray, "*n"] | None = None,
    activation: str | Callable[[Array], Array] | None = None,
    save: str = "pre",
    name: str | None = None,
    backend: str | Config | Configs | None = None,
    recipe: Recipe | str | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> GroupedTensor:
    """Multiplies two sequences of matrices, group by group.

    `out[i] = lhs[i] @ rhs[i]`, accumulated in float32, or in the result's dtype if it has 64 bits. The ragged dims of
    the operands determine the layout:

    | lhs (first·last)        | rhs                     | out                         | name            |
    |-------------------------|-------------------------|-----------------------------|-----------------|
    | uniform `[g, m, k]`     | uniform `[g, k, n]`     | uniform `[g, m, n]`         | `batched`       |
    | ragged rows `[m, k]`    | uniform `[g, k, n]`     | ragged rows `[m, n]`        | `forward`       |
    | uniform `[g, m, k]`     | ragged columns `[k, n]` | ragged columns `[m, n]`     | `forward_left`  |
    | ragged columns `[m, k]` | ragged rows `[k, n]`    | uniform `[g, m, n]`         | `wgrad`         |
    | ragged rows `[m, k]`    | ragged columns `[k, n]` | ragged both `[m, max_last]` | `outer`         |
    | ragged both             | ragged rows `[k, n]`    | ragged rows `[m, n]`        | `inner_rows`    |
    | ragged columns `[m, k]` | ragged both             | ragged columns `[m, n]`     | `inner_columns` |
    | ragged both             | ragged both             | ragged both `[m, max_last]` | `ragged`        |

    **Arguments:**

    - `lhs`, `rhs`: a `GroupedTensor`, quantised or not, or a plain array: a 3-D array is uniform, and a 2-D array is
      one matrix for all groups. `lhs` may also be `route.gathered(x)`. The contracted dims are both ragged or both
      uniform. If they are ragged, `lhs.last_dims` and `rhs.first_dims` must be equal; concrete sizes are compared. In
      groups of more than two dims, `lhs[i]` is contracted along its last and `rhs[i]` along its first dim:
      `[rows, heads, d]` times `[g, d, e, f]` is `[rows, heads, e, f]`. For other contractions, use `ragged.einsum`.
    - `preferred_element_type`: the dtype of the result. The default is the dtype of `existing_out`; without it, the
      common dtype of the operands that are floats of 16 bits or more; else bfloat16 if an operand is a smaller float or
      is quantised; else the common integer dtype, or int32 if that has fewer than 32 bits.
    - `precision`: as in `jax.lax.dot_general`. With `jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM`, the
      tensor cores of a GPU add up all fp8 products, on Hopper in about 14 bits; by default the sums are float32.
    - `existing_out`: a tensor like the result, or its buffer. It is added to the product before rounding.
    - `group_offset`: `()` int array. The uniform operand (in a wgrad, the result) has only some of the ragged operand's
      groups, from the group `group_offset` on. Rows of the other groups are zero in the result, or, without an
      activation, equal to `existing_out`.
    - `num_actual_groups`: for a wgrad, a static int: the number of groups in the result. The default is all. Groups
      past the operands' last group are zero.
    - `max_last`: for a result that is ragged in both dims, a static int: the number of columns of its buffer. The
      default is the number of columns of the buffer of `rhs`. Columns beyond `max_last` are dropped, but `last_dims`
      still counts them, so `validate` reports the loss.
    - `capacity`: a static int, the extent of the result's packed axis. Pass it only if the operand with this dim is
      ragged in both dims, and packed along the contracted one. The default is then `num_groups` times the largest size
      that a group can have, which is always enough. Elements that don't fit a smaller capacity are dropped. In all
      other cases, the result has the operand's capacity.
    - `bias`: `(*n,)`, or `[groups, *n]` with a row for each group of the uniform operand. It is added in float32 to the
      rows of the groups, before the activation. The layout must be `forward`, `batched` or `inner_rows`.
    - `activation`: `"relu"`, `"silu"`, `"gelu"` (exact), `"gelu_tanh"` (its approximation), `"sigmoid"`, `"tanh"`, or
      an elementwise JAX function, such as `jax.nn.softplus`, that closes over no arrays. It is applied in float32,
      before rounding. The result must be a float, in a layout that allows a bias. `ragged.explain` shows whether a
      kernel or XLA computes it.
    - `save`: what the derivative of an activation saves, besides the operands and the result. `"pre"` saves the
      pre-activations, rounded to the result's dtype. With `"out"`, the backward pass recomputes them.
    - `name`: the name of the saved pre-activations in policies of `jax.checkpoint`, by default
      `"ragged_pre_activation"`.
    - `backend`: `"xla"`, `"pallas_tpu"`, `"triton_gpu"`, or None for the platform's own backend. Or a configuration for
      one of them, `ragged.tuning.XlaConfig`, `TpuConfig` or `GpuConfig`. Derivatives run on the same backend with their
      own tiles, which `ragged.tuning.Configs(out, lhs, rhs)` sets too. Without a configuration, tiles come from
      `ragged.tuning.using`, the cache of `ragged.tuning.autotune`, or a model of running times, in this order.
    - `recipe`: a `ragged.Recipe` or the name of a preset, for unquantised operands. It quantises the operands of the
      product and of both derivatives, each along its contracted dim. The gradient is straight-through and supports
      reverse mode only.
    - `out_sharding`: a `NamedSharding` or a `PartitionSpec` of the result's buffer, for operands that are sharded over
      `Explicit` mesh axes. By default, the result's dims are sharded as in the operands, and sums over devices are
      replicated. With `P(..., unreduced={"axis"})`, the result stays unreduced over that axis.

    A derivative of a result of 8-bit floats, or with respect to an operand that is quantised or of 8-bit floats, raises
    a `TypeError`.

    **Returns:** a `GroupedTensor` with the sizes of the operands' ragged dims and zeros in the tail, stored row-major.

    **Raises:** `TypeError` for a wrong kind or dtype, `ValueError` for shapes, raggedness and options,
    `NotImplementedError` for complex numbers.

    !!! example
        ```python
        import jax.numpy as jnp
        import ragged
        x = ragged.GroupedTensor(jnp.ones((16, 4)), first_dims=jnp.array([3, 5, 0, 4], jnp.int32))
        w = jnp.ones((4, 4, 8))
        y = ragged.matmul(x, w)
        assert y.shape == (16, 8)
        dw = ragged.matmul(x.mT, y)
        assert dw.shape == (4, 4, 8)
        ```
    """
    arguments = Arguments(**{name: value for name, value in locals().items() if name not in ("lhs", "rhs")})
    if _is_eager(lhs, rhs, arguments):
        with suppress(TypeError, ValueError, NotImplementedError):  # Raised again below, with concrete operands.
            first_dims, last_dims = _result_dims(lhs, rhs)
            return with_fields(_compiled(lhs, rhs, arguments), first_dims=first_dims, last_dims=last_dims)
    return _of_any_dims(lhs, rhs, arguments)


def _of_any_dims(lhs: Any, rhs: Any, arguments: Arguments) -> GroupedTensor:
    if check.has_more_dims(lhs) or check.has_more_dims(rhs):
        return _of_more_dims(lhs, rhs, arguments)
    return multiply(lhs, rhs, arguments)


_compiled = jax.jit(_of_any_dims, static_argnums=2)


def _is_eager(lhs: Any, rhs: Any, arguments: Arguments) -> bool:
    """True if `_compiled` can compute the product: outside of all transformations, with arrays on one device.

    `_compiled` checks the operands once for all calls with the same types. Checks take longer than a small product.
    """
    leaves = jax.tree.leaves((lhs, rhs))
    return (
        trace_state_clean()
        and arguments.is_static
        and all(isinstance(getattr(x, "sharding", None), SingleDeviceSharding) for x in leaves)
        and not known_to_differ(getattr(lhs, "last_dims", None), getattr(rhs, "first_dims", None))
    )


def multiply(lhs: Any, rhs: Any, arguments: Arguments, site: Site | None = None) -> GroupedTensor:
    """`matmul` of operands whose groups are matrices."""
    request = request_of(lhs, rhs, arguments, site)
    return with_epilogue((request,)) if request.has_epilogue else request.tensor(request.product())


arithmetic.products["@"] = matmul


def _of_more_dims(lhs: Any, rhs: Any, arguments: Arguments) -> GroupedTensor:
    e = einsum_of_matmul(lhs, rhs, arguments.group_offset)
    site, bias = Site("ragged.matmul(lhs, rhs)", {"lhs": lhs, "rhs": rhs}), arguments.bias
    if arguments.out_sharding is not None:
        problem = "`out_sharding` is given, but the result's groups have more than two dims."
        site.fail(NotImplementedError, problem, "Reshard the result: `jax.sharding.reshard`.")
    if is_arraylike(bias) and bias.ndim >= len(e.n):
        at = bias.ndim - len(e.n)
        bias = jnp.asarray(bias).reshape(*bias.shape[:at], prod(bias.shape[at:]))
    return e.product(site, multiply, replace(arguments, bias=bias))


def einsum_of_matmul(lhs: Any, rhs: Any, group_offset: Any = None) -> Einsum:
    """`matmul(lhs, rhs)` of groups with more than two dims, as an einsum."""
    given, site = (lhs, rhs), Site("ragged.matmul(lhs, rhs)", {"lhs": lhs, "rhs": rhs})
    lhs, rhs = (x.dispatch() if isinstance(x, Gathered) else unquantized(x) for x in given)
    lhs, rhs = (check.operand(site, *each, more_dims=True) for each in (("lhs", lhs), ("rhs", rhs)))
    layout = _infer(site, lhs, rhs)
    _check_extents(site, layout, lhs, rhs, group_offset)
    if "n" in layout.ragged and "m" not in layout.ragged:
        more = " ".join("abcdef"[: lhs.ndim - 2])
        code = f'ragged.einsum("t k, g {more} k -> t {more}", rhs.mT, lhs)'
        hint = f"Swap the operands, so that the result has packed rows: `{code}`."
        site.fail(ValueError, "the result would have ragged columns and groups of more than two dims.", hint)
    groups = [("g",) if _first_axis(x) else () for x in (lhs, rhs)]
    m = tuple(f"m{i}" for i in range(lhs.ndim - len(groups[0]) - 1))
    n = tuple(f"n{i}" for i in range(rhs.ndim - len(groups[1]) - 1))
    # The checks used dispatched and unquantised operands. The einsum gets the caller's.
    if isinstance(given[0], Gathered | QuantizedWeights):
        lhs = given[0]
    if isinstance(given[1], QuantizedWeights):
        rhs = given[1]
    one = EinsumOperand.of("lhs", lhs, (*groups[0], *m, "k"))._replace(group=groups[0])
    other = EinsumOperand.of("rhs", rhs, (*groups[1], "k", *n))._replace(group=groups[1])
    group = () if layout.ragged and layout.name != "wgrad" else ("g",)
    return einsum_of(one, other, (*group, *m, *n), ("g",))


def request_of(lhs: Any, rhs: Any, arguments: Arguments, site: Site | None = None, *, merges: bool = True) -> Request:
    """The checked request of a call of `matmul`. Errors name the call and the operands of `site`, if given.

    `merges`: whether groups that share a matrix become one group.
    """
    given, lhs, rhs = (lhs, rhs), unquantized(lhs), unquantized(rhs)
    arrays = jax.tree.leaves((lhs, rhs, arguments.existing_out, arguments.group_offset, arguments.bias))
    is_local = is_of_one_device([each for each in arrays if isinstance(each, Array)])
    gathered = lhs if is_local and _may_gather(lhs, rhs) else None
    if gathered is not None:  # The checks need only shapes and dtypes, so nothing is gathered.
        lhs = GroupedTensor(jax.ShapeDtypeStruct(gathered.shape, gathered.dtype), gathered.first_dims)
    elif isinstance(lhs, Gathered):
        lhs = lhs.dispatch()
    site = site or Site("ragged.matmul(lhs, rhs)")
    site = site if site.operands else site.also(lhs=lhs, rhs=rhs)
    lhs = lhs if gathered is not None else check.operand(site, "lhs", lhs)
    rhs = check.operand(site, "rhs", rhs)
    layout = _infer(site, lhs, rhs)
    _check_extents(site, layout, lhs, rhs, arguments.group_offset)
    check_save(site, arguments.save)
    check.check_num_actual_groups(site, arguments.num_actual_groups)
    if arguments.num_actual_groups is not None and layout.name != "wgrad":
        site.fail(
            ValueError, f"`num_actual_groups` is for a wgrad, but the layout is {layout.name!r}.", "Leave it out."
        )
    existing = _existing(site, layout, lhs, rhs, arguments.existing_out)
    recipe = None if arguments.recipe is None else _checked_recipe(site, lhs, rhs, arguments.recipe)
    dtype = check.result_dtype(
        site, _promoted_dtype(lhs), _promoted_dtype(rhs), arguments.preferred_element_type, existing
    )
    options = check.check_options(site, arguments.backend, arguments.precision)
    offset = check.check_offset(site, arguments.group_offset)
    shape = _result_shape(site, layout, lhs, rhs, arguments.num_actual_groups, arguments.capacity, arguments.max_last)
    if existing is not None:
        check.check_existing(site, existing, shape, dtype)

    # In buffers of the primitive, the packed axis is first. So a result with packed columns is computed transposed.
    rhs_operand, rhs_letters = _stored(rhs, "kn")
    if gathered is None:
        (lhs_operand, lhs_letters), index = _stored(lhs, "mk"), None
    else:
        data, rows = (not_differentiable_8_bits("ragged.matmul", each) for each in (gathered.data, gathered.rows))
        lhs_operand, lhs_letters = Operand(data), "mk"
        index = Index(gathered.source, gathered.places, rows)
    swapped = "n" in layout.ragged and "m" not in layout.ragged
    if swapped:
        shape = (*shape[:-2], shape[-1], shape[-2])
        existing = None if existing is None else existing.mT
    dims = {"m": _dims(lhs, 0), "k": _dims(lhs, 1), "n": _dims(rhs, 1)}
    sizes = {letter: dims[letter] for letter in layout.ragged}
    operands = Operands(lhs_operand, rhs_operand, sizes, offset, Epilogue(existing), index)
    operands = operands if recipe is not None else operands.widened(dtype)
    if out_spec := check.check_out_sharding(site, arguments.out_sharding, operands, shape[::-1] if swapped else shape):
        out_spec = PartitionSpec(*out_spec.partitions[::-1], unreduced=out_spec.unreduced) if swapped else out_spec
    einsum = Product(lhs_letters, rhs_letters, "nm" if swapped else "mn", layout.ragged)
    call = Call(einsum, shape, dtype, options, out_spec=out_spec)
    # In `forward_left`, `rhs` has the rows and `lhs` the weights.
    recipe = recipe.transposed if recipe is not None and layout.ragged == "n" else recipe
    operands = with_quantized_weights(recipe, operands, call, *given)
    bias, save, name = arguments.bias, arguments.save, arguments.name
    if name is not None:
        check_names(site, {"name": name}, save)
        if arguments.activation is None:
            hint = f"Name the result's buffer: `jax.ad_checkpoint.checkpoint_name((lhs @ rhs).data, {name!r})`."
            site.fail(ValueError, f"`name={name!r}` names pre-activations, but the call has no activation.", hint)
    name = name or PRE_ACTIVATION
    request = Request(
        operands, recipe, bias, *_result_dims(lhs, rhs), call, layout, swapped, None, save, name, is_local=is_local
    )
    check_epilogue(site, request, arguments.activation)
    operands, call, merge = merged(operands, call)
    check.check_plan(site, operands, call, (None, None) if recipe is None else recipe.forward)
    function = function_of(site, arguments.activation, 1, accumulator_dtype(dtype))
    # Over explicit axes, groups of an unreduced result can't be merged here; `sharding.mapped` merges them on each
    # device.
    is_unreduced = out_spec is not None and out_spec.unreduced
    if merges and (recipe is not None or not is_unreduced):
        request = replace(request, operands=operands, call=call, merge=merge)
    return replace(request, function=function)


def _result_dims(lhs: Any, rhs: Any) -> tuple[Array | None, Array | None]:
    """`(first_dims, last_dims)` of the result."""
    return getattr(lhs, "first_dims", None), getattr(rhs, "last_dims", None)


def _may_gather(lhs: Any, rhs: Any) -> TypeGuard[Gathered]:
    """Whether `lhs` is `Gathered` rows and `rhs` one matrix per group. A kernel can then read the rows by an index."""
    return isinstance(lhs, Gathered) and lhs.data.ndim == 2 and getattr(rhs, "ndim", 0) == 3 and not any(_ragged(rhs))


def _stored(x: GroupedTensor | Array, letters: str) -> tuple[Operand, str]:
    """`(operand, letters)`: the buffer of `x` in storage order, packed axis first, with its scales; and its letters."""
    if isinstance(x, GroupedTensor):
        data, scales = as_array(x.data), kernel_scales(x)
        if is_read_transposed(x):
            data, letters = data.mT, letters[::-1]
    else:
        data, scales = x, None
    if scales is not None:
        scales = jax.tree.map(partial(not_differentiable, "ragged.matmul"), scales)
    return Operand(not_differentiable_8_bits("ragged.matmul", data), scales), letters


def _promoted_dtype(x: GroupedTensor | Array) -> Any:
    """The operand's dtype in type promotion; an 8-bit float if it is quantised."""
    return jnp.dtype(jnp.float8_e4m3fn) if _is_quantized(x) else x.dtype


def _is_quantized(x: GroupedTensor | Array) -> bool:
    return isinstance(x, GroupedTensor) and x.is_quantized


def _checked_recipe(site: Site, lhs: GroupedTensor | Array, rhs: GroupedTensor | Array, recipe: Any) -> Recipe:
    """The recipe, or the preset of this name. Raises unless both operands are unquantised floats of 16 bits or more."""
    recipe = Recipe.of(recipe, site)
    check_history(recipe)
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if _is_quantized(x):
            hint = "Leave `recipe` out, or pass the operand unquantised."
            site.fail(TypeError, f"`recipe` is given, but `{name}` is quantised already.", hint)
        if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.dtype(x.dtype).itemsize == 1:
            site.fail(
                TypeError,
                f"`recipe` is given, but `{name}` is {jnp.dtype(x.dtype).name}.",
                "A recipe quantises floats of 16 bits or more.",
            )
    return recipe


def _dims(x: GroupedTensor | Array, which: int) -> Array | None:
    """int32 sizes of the groups along the first (0) or the last (1) dim; None if it isn't ragged."""
    dims = (x.first_dims, x.last_dims)[which] if isinstance(x, GroupedTensor) else None
    return None if dims is None else as_int32(dims)


def _ragged(x: GroupedTensor | Array) -> tuple[bool, bool]:
    return x.ragged if isinstance(x, GroupedTensor) else (False, False)


def _infer(site: Site, lhs: GroupedTensor | Array, rhs: GroupedTensor | Array) -> Layout:
    if not isinstance(lhs, GroupedTensor) and not isinstance(rhs, GroupedTensor):
        site.fail(
            ValueError,
            "both operands are single matrices; there are no groups.",
            "Use `jnp.matmul`, or give one a group axis.",
        )
    layout = infer_layout(_ragged(lhs), _ragged(rhs))
    if layout is None:
        words = {True: "ragged", False: "not ragged"}
        (m, k), (k_rhs, n) = _ragged(lhs), _ragged(rhs)
        site.fail(
            ValueError,
            "the contracted dims must both be ragged or both not.\n"
            f"`lhs`: first dim {words[m]}, last dim {words[k]}. `rhs`: first dim {words[k_rhs]}, last dim {words[n]}.",
            "The last dim of `lhs` is contracted with the first dim of `rhs`. Make both ragged, with the same sizes, "
            "or neither." + _did_you_mean([*_transposed(site, lhs, rhs), *_with_sizes(lhs, rhs)]),
        )
    return layout


def _did_you_mean(codes: list[str]) -> str:
    return f" Did you mean {' or '.join(f'`{code}`' for code in codes)}?" if codes else ""


def _transposed(site: Site, lhs: GroupedTensor | Array, rhs: GroupedTensor | Array) -> list[str]:
    """Code that transposes an operand, if it then fits the other operand."""

    def transposed(name: str) -> str:
        # A product reads a transposed tensor in place. The transpose of an array is a copy.
        given = site.operands.get(name)
        return f"GroupedTensor({name}).mT" if is_arraylike(given) and given.ndim == 3 else f"{name}.mT"

    def ends(x: GroupedTensor | Array) -> list[tuple[bool, int]]:  # of the first and of the last dim
        return list(zip(_ragged(x), (x.shape[_first_axis(x)], x.shape[-1]), strict=True))

    def fits(lhs: list[tuple[bool, int]], rhs: list[tuple[bool, int]]) -> bool:
        (m, _), (k, extent), (k_rhs, extent_rhs), (n, _) = *lhs, *rhs
        return infer_layout((m, k), (k_rhs, n)) is not None and (k or extent == extent_rhs)

    found = {"rhs": (rhs, ends(lhs), ends(rhs)[::-1]), "lhs": (lhs, ends(lhs)[::-1], ends(rhs))}
    return [transposed(name) for name, (x, *both) in found.items() if not check.has_more_dims(x) and fits(*both)]


def _with_sizes(lhs: GroupedTensor | Array, rhs: GroupedTensor | Array) -> list[str]:
    """Code that makes a matrix ragged, if it then fits the other operand, whose contracted dim is ragged."""
    if isinstance(lhs, GroupedTensor) and not isinstance(rhs, GroupedTensor):
        code, fits = "GroupedTensor(rhs, first_dims=lhs.last_dims)", rhs.shape[0] == lhs.shape[-1] or all(lhs.ragged)
    elif isinstance(rhs, GroupedTensor) and not isinstance(lhs, GroupedTensor):
        code, fits = "GroupedTensor(lhs, last_dims=rhs.first_dims)", lhs.shape[1] == rhs.shape[0]
    else:
        return []
    return [code] if fits else []


def _first_axis(x: GroupedTensor | Array) -> int:
    """The axis of the groups' first dim: 1 in a uniform tensor, else 0."""
    return int(isinstance(x, GroupedTensor) and x.packed_axis is None)


def _check_extents(
    site: Site, layout: Layout, lhs: GroupedTensor | Array, rhs: GroupedTensor | Array, group_offset: Any
) -> None:
    """Raises unless the operands have the same number of groups and equal contracted dims."""
    k_lhs, k_rhs = lhs.shape[-1], rhs.shape[_first_axis(rhs)]
    if "k" not in layout.ragged and k_lhs != k_rhs:
        site.fail(
            ValueError,
            f"the last dim of `lhs` is {k_lhs} but the first dim of `rhs` is {k_rhs}.",
            "They are contracted and must be equal." + _did_you_mean(_transposed(site, lhs, rhs)),
        )
    if not isinstance(lhs, GroupedTensor) or not isinstance(rhs, GroupedTensor):
        if group_offset is not None:
            site.fail(
                ValueError, "`group_offset` is given, but all groups share one matrix.", "Give the matrix a group axis."
            )
        return
    uniform = {"forward": "rhs", "forward_left": "lhs", "wgrad": "the result"}.get(layout.name)
    if group_offset is not None and uniform is None:
        site.fail(
            ValueError,
            f"`group_offset` is given, but the layout {layout.name!r} has no uniform operand that could be a shard.",
            "It is for one uniform and one ragged operand, or for a wgrad.",
        )
    matrices, groups = (rhs, lhs) if uniform == "rhs" else (lhs, rhs)
    is_shard = group_offset is not None and uniform in ("lhs", "rhs") and matrices.num_groups <= groups.num_groups
    if lhs.num_groups != rhs.num_groups and not is_shard:
        name = uniform if uniform in ("lhs", "rhs") else "rhs"
        more, sizes = "", lhs.first_dims if lhs.num_groups == rhs.num_groups + 1 else None
        if layout.name == "batched" and is_arraylike(site.operands.get("lhs")):
            route = f"ragged.route(group_ids.reshape(-1), {rhs.num_groups})"
            more = " If `lhs` holds tokens, [batch, sequence, d], each of one group, flatten and route them: "
            more += f"`{route}.dispatch(lhs.reshape(-1, lhs.shape[-1]))`."
        elif sizes is not None and is_concrete(sizes) and may_be_offsets(sizes, lhs.shape[0]):
            more = " If `lhs` has offsets, pass sizes: `jnp.diff(lhs.first_dims)`."
        site.fail(
            ValueError,
            f"`lhs` has {lhs.num_groups} groups but `rhs` has {rhs.num_groups}.",
            f"`{name}` needs one matrix per group, including empty groups"
            + (" (or fewer, with `group_offset`)." if uniform in ("lhs", "rhs") else ".")
            + more,
        )
    if "k" not in layout.ragged:
        return
    if lhs.packed_axis == -1 and rhs.packed_axis != -1 and k_lhs != k_rhs:
        site.fail(
            ValueError,
            f"the contracted axis has a capacity of {k_lhs} in `lhs` but {k_rhs} in `rhs`.",
            "Both operands pack the same groups along this axis, so they must have the same capacity.",
        )
    left, right = lhs.last_dims, rhs.first_dims
    if known_to_differ(left, right):
        site.fail(
            ValueError,
            "the contracted dims have different sizes: "
            f"lhs.last_dims={np.asarray(lhs.last_dims).tolist()}, "
            f"rhs.first_dims={np.asarray(rhs.first_dims).tolist()}.",
            "They are contracted group by group and must be equal.",
        )


def _existing(
    site: Site, layout: Layout, lhs: GroupedTensor | Array, rhs: GroupedTensor | Array, existing_out: Any
) -> Any:
    """The buffer of `existing_out`, checked for kind and sizes."""
    if existing_out is None or is_arraylike(existing_out):
        return existing_out
    site, hint = site.also(existing_out=existing_out), "It must be a tensor like the result, or its buffer."
    if not isinstance(existing_out, GroupedTensor) or not is_arraylike(existing_out.data):
        site.fail(TypeError, "`existing_out` holds no array.", hint)
    if existing_out.is_quantized:
        site.fail(TypeError, "`existing_out` is quantised.", "Pass `existing_out.dequantize()`.")
    packed_last = existing_out.kind == "ragged both" and existing_out.packed_axis == -1
    want = KINDS[layout.kind("mn")]
    if existing_out.kind != want or packed_last:
        kind = existing_out.kind + (" packed along its columns" if packed_last else "")
        problem = f"`existing_out` is {kind}, but the result of the layout {layout.name!r} is {want}."
        site.fail(ValueError, problem, hint)
    for name, source in (("first_dims", lhs), ("last_dims", rhs)):
        dims, expected = getattr(existing_out, name), getattr(source, name, None)
        if dims is None or expected is None:
            continue
        if known_to_differ(dims, expected):
            known = is_concrete(dims, expected)
            got, want = (np.asarray(d).tolist() if known else describe(d) for d in (dims, expected))
            site.fail(ValueError, f"`existing_out` has {name}={got} but the result has {want}.", hint)
    return existing_out.data


def _result_shape(
    site: Site,
    layout: Layout,
    lhs: GroupedTensor | Array,
    rhs: GroupedTensor | Array,
    num_actual_groups: Any,
    capacity: Any,
    max_last: Any,
) -> tuple[Any, ...]:
    """The shape of the result's buffer, rows first."""
    m, n = lhs.shape[-2], rhs.shape[-1]
    out = [letter for letter in "mn" if letter in layout.ragged]
    tensor = lhs if isinstance(lhs, GroupedTensor) else rhs
    assert isinstance(tensor, GroupedTensor)
    num_groups = tensor.num_groups
    for name, value in (("capacity", capacity), ("max_last", max_last)):
        if value is not None and not is_extent(value, 0):
            hint = "It must be an int, 0 or more. Under `jax.jit`, list the argument in `static_argnames`."
            if is_arraylike(value) and is_concrete(value) and value.ndim == 0:
                hint = f"It must be an int, 0 or more: `int({name})`."
            site.fail(ValueError, f"`{name}` is {describe(value) if is_arraylike(value) else repr(value)}.", hint)
        check_packed(site, value, name)
    if max_last is not None and len(out) < 2:
        site.fail(
            ValueError,
            f"`max_last` is given, but the layout is {layout.name!r}.",
            "It is for results that are ragged in both dims.",
        )
    if not out:
        if capacity is not None:
            site.fail(ValueError, "`capacity` is given, but the result is uniform.", "Leave it out.")
        return (as_extent(num_groups if num_actual_groups is None else num_actual_groups), m, n)
    source, axis, extent = (lhs, -2, m) if out[0] == "m" else (rhs, -1, n)
    if isinstance(source, GroupedTensor) and source.packed_axis == axis:
        if capacity is not None:
            site.fail(
                ValueError,
                f"`capacity` is {capacity}, but the result takes the capacity of its operand, {extent}.",
                "Leave it out.",
            )
    else:
        extent = num_groups * extent if capacity is None else as_extent(capacity)
    if len(out) == 2:
        return extent, n if max_last is None else as_extent(max_last)
    return (extent, n) if out[0] == "m" else (m, extent)
