"""`matmul`: check the operands, infer the layout, bind the primitive."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from ragged._activated import finished
from ragged._epilogue import check_epilogue
from ragged._errors import Site, describe, is_arraylike, is_concrete, is_count
from ragged._letters import Einsum, Factor, einsum_of
from ragged._mesh import is_of_one_device
from ragged.backends.config import Config, Configs
from ragged.backends.schedule import as_int32
from ragged.product import check as _check
from ragged.product.check import Tiling
from ragged.product.layout import Layout, Product, infer_layout
from ragged.product.operands import Call, Epilogue, Index, Operand, Operands
from ragged.product.primitive import bind
from ragged.quant.recipe import Recipe
from ragged.quant.scaling import eight_bits_fixed, not_differentiable
from ragged.quant.training import Made, casts_of, quantized_product
from ragged.quant.weights import QuantizedWeights, made_for, unquantized
from ragged.tensor import arithmetic
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import KINDS, GroupedTensor


def matmul(
    lhs: GroupedTensor | Gathered | Array | Any,
    rhs: GroupedTensor | Array | Any,
    *,
    preferred_element_type: Any = None,
    precision: Any = None,
    existing_out: GroupedTensor | Array | Any = None,
    group_offset: Int[Array, ""] | Any = None,
    num_actual_groups: int | Any = None,
    capacity: int | Any = None,
    max_last: int | Any = None,
    bias: Float[Array, "*n"] | Any = None,
    activation: str | Any = None,
    save: str | Any = "pre",
    backend: str | Any = None,
    tiling: Tiling | Any = None,
    config: Config | Configs | Any = None,
    interpret: Any = False,
    recipe: Recipe | str | Any = None,
    out_sharding: NamedSharding | PartitionSpec | Any = None,
) -> GroupedTensor:
    """Multiplies two sequences of matrices, group by group.

    `out[i] = lhs[i] @ rhs[i]`, accumulated in float32. What the product is follows from which dims are ragged:

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

    So the gradients of `y = matmul(x, w)` are `matmul(dy, w.mT)` and `matmul(x.mT, dy)`.

    **Arguments:**

    - `lhs`, `rhs`: a `GroupedTensor`, quantised (see `ragged.quantize`) or not, or a plain array: 3-D is uniform, 2-D
      is one matrix shared by all groups of the other operand. With more dims, the last of `lhs` meets the first of the
      groups of `rhs`, and the result has all others: `[rows, heads, d]` times `[g, d, e, f]` is `[rows, heads, e, f]`.
      For anything else see `ragged.einsum`. `lhs` may be `route.gathered(x)`, which is
      `route.dispatch(x)` without a copy where kernels need none. The inner dims are both ragged or both not; where they
      are ragged, `lhs.last_dims` and `rhs.first_dims` must be equal (checked where both are known; those of `lhs`
      count).
    - `preferred_element_type`: the dtype of the result. By default that of `existing_out`; else the operands' common
      dtype; int32 for integers of fewer bits; bfloat16 where both operands have 8 bits and at least one is a float. A
      quantised operand counts as a float of 8 bits, whatever stores it.
    - `precision`: as in `jax.lax.dot_general`.
    - `existing_out`: added to the product before it is rounded. A tensor like the result, or its buffer.
    - `group_offset`: `()` int array. The uniform operand (in a wgrad, the result) holds only the groups `group_offset`,
      `group_offset + 1`, ... of the ragged one's. Rows of other groups come out zero, or, without an activation, as
      `existing_out` has them.
    - `num_actual_groups`: in a wgrad, how many groups the result holds, a static int; all by default. Those past the
      last group are zero.
    - `max_last`: for a result that is ragged in both dims, the columns of its buffer, a static int. By default as many
      as one group can have at most, which for packed columns is all of them. Columns beyond it are dropped; the
      result's `last_dims` stay the operand's, so that `validate` finds it.
    - `capacity`: the extent of the result's packed axis, a static int. Needed only where an operand is ragged in both
      dims and the dim that the result packs is not packed there; by default `num_groups` times the most that a group
      can have. What doesn't fit is dropped.
    - `bias`: `(*n,)`, or `[groups, *n]`: a row for each group that the uniform operand holds. Added in float32, where a
      group has rows, before the activation. For layouts whose result has rows: `forward`, `batched`, `inner_rows`.
    - `activation`: applied in float32 before the result is rounded: `"relu"`, `"silu"`, `"gelu"` (exact), `"gelu_tanh"`
      (its approximation), `"sigmoid"`, `"tanh"`. For the same layouts, of floats.
    - `save`: what the derivative of an activation keeps besides the operands and the result: `"pre"`, pre-activations,
      rounded to the result's dtype; or `"out"`, nothing: it computes them again. `jax.checkpoint`'s policies know
      them as `"ragged_pre_activation"`.
    - `backend`: `"xla"`, `"pallas_tpu"`, `"triton_gpu"`, or None for the platform's own, chosen when lowering.
    - `tiling`: `(tile_m, tile_k, tile_n)`, a function of `(m, k, n)` that gives one, or None for the library's choice.
      Derivatives use the same tile for the same dim. XLA uses the entries of ragged dims and tiles the others itself.
      On a TPU, tiles of ragged dims are multiples of the dtypes' sublanes (8 for 4 bytes, 16 for 2, 32 for 1), others
      of 128, and one that VMEM can't hold is halved.
    - `config`: a backend's record, such as `ragged.tuning.GpuConfig`, taken as it is where that backend runs; or a
      tuple of several backends'. A `ragged.tuning.Configs` has others for the derivatives, which else choose their own.
      By default that of `ragged.tuning.using`, of `ragged.tuning.autotune`'s cache, or of a model.
    - `interpret`: run a Pallas or Triton kernel's body on the CPU; True, or `pltpu.InterpretParams` for TPU kernels.
      XLA has nothing to interpret.
    - `recipe`: a `ragged.Recipe` or the name of a preset, for operands that aren't quantised: quantises them, and those
      of both derivatives, each along what it contracts. The gradient is straight-through, and by reverse mode only.
      Weights that are quantised once for many products come from `ragged.quantize_weights`.

    - `out_sharding`: the sharding of the result's buffer, of operands that are sharded over `Explicit` mesh axes, as a
      `NamedSharding` or a `PartitionSpec`. By default its dims are sharded as the operands have them, and what is
      summed over devices is on all of them; `P(..., unreduced={"axis"})` leaves the sum over that axis for later.

    Floats of 8 bits, quantised or not, and a result of them have no gradient: asking for one is a `TypeError`.

    **Returns:** a `GroupedTensor` with the dims of the operands and zeros in the tail, stored row-major.

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
    arguments = locals()
    if _check.has_more_dims(lhs) or _check.has_more_dims(rhs):
        return _of_more_dims(**arguments)
    return multiply(**arguments)


def multiply(lhs: Any, rhs: Any, **options: Any) -> GroupedTensor:
    """`matmul` of groups that are matrices. `options` are those of `product_of`."""
    product = product_of(lhs, rhs, **options)
    if product.has_epilogue:
        return finished((product,))
    if product.recipe is None:
        out = bind(product.operands, product.call)
    else:
        out = quantized_product(product.recipe, product.operands, product.call, product.made)
    return product.tensor(out)


arithmetic.products["@"] = matmul


def _of_more_dims(lhs: Any, rhs: Any, existing_out: Any, bias: Any, out_sharding: Any, **options: Any) -> GroupedTensor:
    """`matmul` of groups with more than two dims, by one of matrices."""
    e = einsum_of_matmul(lhs, rhs, options["group_offset"])
    site = Site("ragged.matmul(lhs, rhs)", {"lhs": lhs, "rhs": rhs})
    if out_sharding is not None:
        problem = "`out_sharding` of a result whose groups have more than two dims."
        site.fail(NotImplementedError, problem, "Reshard the result: `jax.sharding.reshard`.")
    if is_arraylike(bias) and bias.ndim >= len(e.n):
        bias = jnp.asarray(bias).reshape(*bias.shape[: bias.ndim - len(e.n)], -1)
    return e.product(site, multiply, options | {"bias": bias}, existing_out)


def einsum_of_matmul(lhs: Any, rhs: Any, group_offset: Any = None) -> Einsum:
    """The letters of `matmul(lhs, rhs)`: the last of `lhs` meets the first of the groups of `rhs`."""
    given, site = (lhs, rhs), Site("ragged.matmul(lhs, rhs)", {"lhs": lhs, "rhs": rhs})
    lhs, rhs = (x.dispatch() if isinstance(x, Gathered) else unquantized(x) for x in given)
    lhs, rhs = (_check.operand(site, *each, more_dims=True) for each in (("lhs", lhs), ("rhs", rhs)))
    layout = _infer(site, lhs, rhs)
    _check_extents(site, layout, lhs, rhs, group_offset)
    if "n" in layout.ragged and "m" not in layout.ragged:
        mend = "Multiply the other way round, for packed rows: `ragged.einsum` says in letters which way."
        site.fail(ValueError, "the result would be ragged columns with more than two dims.", mend)
    groups = [("g",) if _first_axis(x) else () for x in (lhs, rhs)]
    m = tuple(f"m{i}" for i in range(lhs.ndim - len(groups[0]) - 1))
    n = tuple(f"n{i}" for i in range(rhs.ndim - len(groups[1]) - 1))
    if isinstance(given[0], Gathered | QuantizedWeights):
        lhs = given[0]
    if isinstance(given[1], QuantizedWeights):
        rhs = given[1]
    one = Factor.of("lhs", lhs, (*groups[0], *m, "k"))._replace(group=groups[0])
    other = Factor.of("rhs", rhs, (*groups[1], "k", *n))._replace(group=groups[1])
    group = () if layout.ragged and layout.name != "wgrad" else ("g",)
    return einsum_of(one, other, (*group, *m, *n), ("g",))


class MatmulProduct(NamedTuple):
    """What a call of `matmul` comes down to."""

    layout: Layout
    operands: Operands
    call: Call
    is_swapped: bool  # whether the product's result has its columns first
    first_dims: Array | Any
    last_dims: Array | Any
    recipe: Recipe | None
    bias: Array | Any
    activation: str | None
    save: str
    made: Made

    @property
    def has_epilogue(self) -> bool:
        return self.bias is not None or self.activation is not None

    def tensor(self, out: Array) -> GroupedTensor:
        """`matmul`'s result, of the product's."""
        return GroupedTensor(out.mT if self.is_swapped else out, self.first_dims, self.last_dims)


def product_of(
    lhs: Any,
    rhs: Any,
    *,
    preferred_element_type: Any = None,
    precision: Any = None,
    existing_out: Any = None,
    group_offset: Any = None,
    num_actual_groups: Any = None,
    capacity: Any = None,
    max_last: Any = None,
    bias: Any = None,
    activation: Any = None,
    save: Any = "pre",
    backend: Any = None,
    tiling: Any = None,
    config: Any = None,
    interpret: Any = False,
    recipe: Any = None,
    out_sharding: Any = None,
    site: Site | None = None,
) -> MatmulProduct:
    """Checks a call of `matmul`, and says what to bind. Arguments and errors are its, or those of `site`."""
    given, lhs, rhs = (lhs, rhs), unquantized(lhs), unquantized(rhs)
    gathered = lhs if _is_in_place(lhs, rhs) else None
    if gathered is not None:  # what is checked needs no values
        lhs = GroupedTensor(jax.ShapeDtypeStruct(gathered.shape, gathered.dtype), gathered.first_dims)
    elif isinstance(lhs, Gathered):
        lhs = lhs.dispatch()
    site = site or Site("ragged.matmul(lhs, rhs)")
    site = site if site.operands else site.also(lhs=lhs, rhs=rhs)
    lhs = lhs if gathered is not None else _check.operand(site, "lhs", lhs)
    rhs = _check.operand(site, "rhs", rhs)
    layout = _infer(site, lhs, rhs)
    _check_extents(site, layout, lhs, rhs, group_offset)
    _check.check_num_actual_groups(site, num_actual_groups)
    if num_actual_groups is not None and layout.name != "wgrad":
        site.fail(
            ValueError, f"`num_actual_groups` is for a wgrad; this is the layout {layout.name!r}.", "Leave it out."
        )
    existing = _existing(site, layout, lhs, rhs, existing_out)
    recipe = None if recipe is None else _checked_recipe(site, lhs, rhs, recipe)
    dtype = _check.result_dtype(site, _kind_of_dtype(lhs), _kind_of_dtype(rhs), preferred_element_type, existing)
    extents = (lhs.shape[-2], lhs.shape[-1], rhs.shape[-1])
    options = _check.check_options(site, backend, precision, tiling, interpret, extents, config)
    offset = _check.check_offset(site, group_offset)
    shape = _result_shape(site, layout, lhs, rhs, num_actual_groups, capacity, max_last)
    if existing is not None:
        _check.check_existing(site, existing, shape, dtype)

    # Terms as the primitive wants them: the packed axis first.
    rhs_operand, rhs_letters = _stored(rhs, "kn")
    if gathered is None:
        (lhs_operand, lhs_letters), index = _stored(lhs, "mk"), None
    else:
        data, rows = (eight_bits_fixed("ragged.matmul", each) for each in (gathered.data, gathered.rows))
        lhs_operand, lhs_letters = Operand(data), "mk"
        index = Index(gathered.source, gathered.places, rows)
    swapped = "n" in layout.ragged and "m" not in layout.ragged
    if swapped:
        shape = (*shape[:-2], shape[-1], shape[-2])
        existing = None if existing is None else existing.mT
    dims = {"m": _dims(lhs, 0), "k": _dims(lhs, 1), "n": _dims(rhs, 1)}
    sizes = {letter: dims[letter] for letter in layout.ragged}
    operands = Operands(lhs_operand, rhs_operand, sizes, offset, Epilogue(existing), index)
    if out_spec := _check.check_out_sharding(site, out_sharding, operands, shape[::-1] if swapped else shape):
        out_spec = PartitionSpec(*out_spec.partitions[::-1], unreduced=out_spec.unreduced) if swapped else out_spec
    einsum = Product(lhs_letters, rhs_letters, "nm" if swapped else "mn", layout.ragged)
    call = Call(einsum, shape, dtype, options, out_spec=out_spec)
    _check.check_plan(site, operands, call, (None, None) if recipe is None else casts_of(recipe, call)[0].forward)
    first_dims, last_dims = getattr(lhs, "first_dims", None), getattr(rhs, "last_dims", None)
    more = first_dims, last_dims, recipe, bias, activation, save, made_for(recipe, operands, call, *given)
    product = MatmulProduct(layout, operands, call, swapped, *more)
    check_epilogue(site, product)
    return product


def _is_in_place(lhs: Any, rhs: Any) -> bool:
    """Whether a product reads the rows of `lhs` through an index: into matrices of groups, and all on one device."""
    if not isinstance(lhs, Gathered) or lhs.data.ndim != 2 or getattr(rhs, "ndim", 0) != 3 or any(_ragged(rhs)):
        return False
    return is_of_one_device([leaf for leaf in jax.tree.leaves((lhs, rhs)) if isinstance(leaf, jax.Array)])


def _stored(x: GroupedTensor | Array, letters: str) -> tuple[Operand, str]:
    """The buffer of `x` as it lies in memory, packed axis first, with its scales, and the order of its letters."""
    if isinstance(x, GroupedTensor):
        data, scales = jnp.asarray(x.data), x._kernel_scales()
        if x._is_flipped:
            data, letters = data.mT, letters[::-1]
    else:
        data, scales = x, None
    if scales is not None:
        scales = jax.tree.map(partial(not_differentiable, "ragged.matmul"), scales)
    return Operand(eight_bits_fixed("ragged.matmul", data), scales), letters


def _kind_of_dtype(x: GroupedTensor | Array) -> Any:
    """The dtype that decides on the result's: whatever stores it, a quantised operand counts as a float of 8 bits."""
    return jnp.dtype(jnp.float8_e4m3fn) if _is_quantized(x) else x.dtype


def _is_quantized(x: GroupedTensor | Array) -> bool:
    return isinstance(x, GroupedTensor) and x.is_quantized


def _checked_recipe(site: Site, lhs: GroupedTensor | Array, rhs: GroupedTensor | Array, recipe: Any) -> Recipe:
    recipe = Recipe.of(recipe, site)
    recipe._check_history()
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if _is_quantized(x):
            site.fail(TypeError, f"`recipe` is given, but `{name}` is quantised already.", "Pass one or the other.")
        if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.dtype(x.dtype).itemsize == 1:
            site.fail(
                TypeError,
                f"`recipe` is given, but `{name}` is {jnp.dtype(x.dtype).name}.",
                "It quantises floats of 16 bits or more.",
            )
    return recipe


def _dims(x: GroupedTensor | Array, which: int) -> Array | None:
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
            f"Did you mean `{'lhs.mT' if k and not k_rhs else 'rhs.mT'}`? "
            "The last dim of `lhs` meets the first of `rhs`.",
        )
    return layout


def _first_axis(x: GroupedTensor | Array) -> int:
    """That of the groups' first dim."""
    return int(isinstance(x, GroupedTensor) and x.packed_axis is None)


def _fits_turned(name: str, x: GroupedTensor | Array, contracted: int) -> bool:
    """Whether the operand, which isn't ragged, would have the contracted extent if it were transposed."""
    is_matrix = not any(_ragged(x)) and not _check.has_more_dims(x)
    return is_matrix and x.shape[-1 if name == "rhs" else -2] == contracted


def _check_extents(
    site: Site, layout: Layout, lhs: GroupedTensor | Array, rhs: GroupedTensor | Array, group_offset: Any
) -> None:
    """Numbers of groups, and the contracted extent."""
    k_lhs, k_rhs = lhs.shape[-1], rhs.shape[_first_axis(rhs)]
    if "k" not in layout.ragged and k_lhs != k_rhs:
        # Transposing what isn't ragged keeps the layout.
        turned = [
            f"`{name}.mT`" for name, x, k in (("rhs", rhs, k_lhs), ("lhs", lhs, k_rhs)) if _fits_turned(name, x, k)
        ]
        hint = f" Did you mean {' or '.join(turned)}?" if turned else ""
        site.fail(
            ValueError,
            f"the last dim of `lhs` is {k_lhs} but the first dim of `rhs` is {k_rhs}.",
            "They are contracted and must be equal." + hint,
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
            f"`group_offset` is given, but the layout {layout.name!r} has no uniform operand to be a shard.",
            "It is for one uniform and one ragged operand, or for a wgrad.",
        )
    held, groups = (rhs, lhs) if uniform == "rhs" else (lhs, rhs)
    shard = group_offset is not None and uniform in ("lhs", "rhs") and held.num_groups <= groups.num_groups
    if lhs.num_groups != rhs.num_groups and not shard:
        name = uniform if uniform in ("lhs", "rhs") else "rhs"
        site.fail(
            ValueError,
            f"`lhs` has {lhs.num_groups} groups but `rhs` has {rhs.num_groups}.",
            f"`{name}` needs one matrix per group, including empty groups"
            + (" (or fewer, with `group_offset`)." if uniform in ("lhs", "rhs") else "."),
        )
    if "k" not in layout.ragged:
        return
    if lhs.packed_axis == -1 and rhs.packed_axis != -1 and k_lhs != k_rhs:
        site.fail(
            ValueError,
            f"the contracted axis has a capacity of {k_lhs} in `lhs` but {k_rhs} in `rhs`.",
            "Both hold the same groups side by side, and must have the same capacity.",
        )
    if is_concrete(lhs.last_dims, rhs.first_dims) and not np.array_equal(lhs.last_dims, rhs.first_dims):
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
    """The buffer of `existing_out`."""
    if existing_out is None or is_arraylike(existing_out):
        return existing_out
    site, mend = site.also(existing_out=existing_out), "It must be a tensor like the result, or its buffer."
    if not isinstance(existing_out, GroupedTensor) or not is_arraylike(existing_out.data):
        site.fail(TypeError, "`existing_out` holds no array.", mend)
    if existing_out.is_quantized:
        site.fail(TypeError, "`existing_out` is quantised.", "Pass `existing_out.dequantize()`.")
    packed_last = existing_out.kind == "ragged both" and existing_out.packed_axis == -1
    want = KINDS[layout.kind("mn")]
    if existing_out.kind != want or packed_last:
        kind = existing_out.kind + (" packed along its columns" if packed_last else "")
        problem = f"`existing_out` is {kind}, but the result of the layout {layout.name!r} is {want}."
        site.fail(ValueError, problem, mend)
    for name, source in (("first_dims", lhs), ("last_dims", rhs)):
        mine, theirs = getattr(existing_out, name), getattr(source, name, None)
        if mine is None or theirs is None:
            continue
        known = is_concrete(mine, theirs)
        if mine.shape != theirs.shape or (known and not np.array_equal(mine, theirs)):
            got, want = (np.asarray(d).tolist() if known else describe(d) for d in (mine, theirs))
            site.fail(ValueError, f"`existing_out` has {name}={got} but the result has {want}.", mend)
    return existing_out.data


def _result_shape(
    site: Site,
    layout: Layout,
    lhs: GroupedTensor | Array,
    rhs: GroupedTensor | Array,
    num_actual_groups: Any,
    capacity: Any,
    max_last: Any,
) -> tuple[int, ...]:
    """The shape of the result's buffer, rows first."""
    m, n = lhs.shape[-2], rhs.shape[-1]
    out = [letter for letter in "mn" if letter in layout.ragged]
    tensor = lhs if isinstance(lhs, GroupedTensor) else rhs
    assert isinstance(tensor, GroupedTensor)
    num_groups = tensor.num_groups
    for name, value in (("capacity", capacity), ("max_last", max_last)):
        if value is not None and not is_count(value, 0):
            site.fail(
                ValueError,
                f"`{name}` is {value!r}.",
                "It must be a static int, 0 or more: under `jit`, see `static_argnames`.",
            )
    if max_last is not None and len(out) < 2:
        site.fail(
            ValueError,
            f"`max_last` is given, but the layout is {layout.name!r}.",
            "It is for results that are ragged in both dims.",
        )
    if not out:
        if capacity is not None:
            site.fail(ValueError, "`capacity` is given, but the result is uniform.", "Leave it out.")
        return (int(num_actual_groups or num_groups), m, n)
    source, axis, extent = (lhs, -2, m) if out[0] == "m" else (rhs, -1, n)
    if isinstance(source, GroupedTensor) and source.packed_axis == axis:
        if capacity is not None:
            site.fail(
                ValueError,
                f"`capacity` is {capacity}, but the result takes the capacity of its operand, {extent}.",
                "Leave it out.",
            )
    else:
        extent = num_groups * extent if capacity is None else int(capacity)
    if len(out) == 2:
        return extent, n if max_last is None else int(max_last)
    return (extent, n) if out[0] == "m" else (m, extent)
