"""`grouped_matmul` and `transposed_grouped_matmul`: the forward and the wgrad of plain arrays and group sizes."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Int

from ragged.core.errors import Site, as_extent, is_arraylike
from ragged.core.formats import AnyArray
from ragged.core.offsets import as_int32
from ragged.core.scaling import not_differentiable_8_bits
from ragged.ops import check
from ragged.ops.check import Tiling
from ragged.primitive.primitive import bind
from ragged.product.config import Config, Configs
from ragged.product.layout import Product
from ragged.product.operands import Call, Epilogue, Operand, Operands, Options


def grouped_matmul(
    lhs: AnyArray,
    rhs: AnyArray,
    group_sizes: Int[AnyArray, " g"],
    *,
    preferred_element_type: DTypeLike | None = None,
    tiling: Tiling | None = None,
    input_buffer_count: int = 2,
    group_offset: Int[AnyArray, ""] | int | None = None,
    existing_out: AnyArray | None = None,
    transpose_rhs: bool = False,
    precision: PrecisionLike = None,
    backend: str | Config | Configs | None = None,
    interpret: Any = False,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Multiplies the rows of each group of `lhs` with one matrix of `rhs`: `out[rows i] = lhs[rows i] @ rhs[i]`.

    **Arguments:**

    - `lhs`: `[m, k]`, the rows of the groups, one group after another. The tail may hold anything.
    - `rhs`: `[g, k, n]`, or with `transpose_rhs` `[g, n, k]`, which is read in place. It may have fewer matrices, for
      the groups from `group_offset` (default 0) on. Rows of other groups are zero in the result, or equal to
      `existing_out`. If only one is missing, of three or more, `group_offset` is required: the sizes may be offsets.
    - `group_sizes`: `(g,)` integers, the number of rows in each group. Sizes of 64 bits become int32. A size that
      doesn't fit raises an error, or is clipped if it is traced.
    - `tiling`: `(tile_m, tile_k, tile_n)`, a function of `(m, k, n)` that returns one, or None for the library's
      choice. Derivatives use the same tile for the same dim. XLA uses only the tile of the ragged dim. Legal tiles:
      see `ragged.tuning.TpuConfig` and `GpuConfig`. TPU tiles are halved if they don't fit into VMEM.
    - `input_buffer_count`: the number of buffers for each streamed input of a TPU kernel, if no configuration sets it.
    - `interpret`: True, or `pltpu.InterpretParams` for TPU kernels, runs the kernel's body on the CPU. XLA ignores it.
    - The rest: as in `ragged.matmul`.

    **Returns:** `[m, n]`, with zeros in the tail.

    **Raises:** `ValueError` for shapes, sizes and options, `TypeError` for dtypes.
    """
    arguments = {**locals()}
    site = Site("ragged.grouped_matmul(lhs, rhs, group_sizes)", {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes})
    _check_arrays(site, lhs, rhs, 3, group_sizes)
    k_axis, n_axis = (2, 1) if transpose_rhs else (1, 2)
    m, k, n = lhs.shape[0], lhs.shape[1], rhs.shape[n_axis]
    if rhs.shape[k_axis] != k:
        site.fail(
            ValueError,
            f"`lhs` has k={k} but `rhs` has k={rhs.shape[k_axis]} in axis {k_axis} (transpose_rhs={transpose_rhs}).",
            "They are contracted and must be equal. With `transpose_rhs=True`, `rhs` is [g, n, k].",
        )
    if rhs.shape[0] > group_sizes.shape[0]:
        site.fail(
            ValueError,
            f"`rhs` has {rhs.shape[0]} groups but `group_sizes` has {group_sizes.shape[0]}.",
            "Give one size per matrix, including empty groups.",
        )
    if group_offset is None and group_sizes.shape[0] - 1 == rhs.shape[0] > 1:
        site.fail(
            ValueError,
            f"`group_sizes` has {group_sizes.shape[0]} groups but `rhs` has {rhs.shape[0]}.",
            "If these are offsets, pass `jnp.diff(group_sizes)`; if the last group has no matrix, `group_offset=0`.",
        )
    product = Product("mk", "nk" if transpose_rhs else "kn", "mn", "m")
    options = check.check_options(site, backend, precision)
    options = check.check_tiling(site, options, tiling, input_buffer_count, interpret, (m, k, n))
    return _bind(site, lhs, rhs, product, (m, n), options, arguments)


def transposed_grouped_matmul(
    lhs: AnyArray,
    rhs: AnyArray,
    group_sizes: Int[AnyArray, " g"],
    *,
    preferred_element_type: DTypeLike | None = None,
    tiling: Tiling | None = None,
    input_buffer_count: int = 2,
    group_offset: Int[AnyArray, ""] | int | None = None,
    num_actual_groups: int | None = None,
    existing_out: AnyArray | None = None,
    precision: PrecisionLike = None,
    backend: str | Config | Configs | None = None,
    interpret: Any = False,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Multiplies the columns of each group of `lhs` with its rows of `rhs`: `out[i] = lhs[:, rows i] @ rhs[rows i]`.

    **Arguments:**

    - `lhs`: `[k, m]`. If it is `x.T`, `jit` makes no transposed copy.
    - `rhs`: `[m, n]`.
    - `group_sizes`: `(g,)` integers, the extent of each group along `m`, as in `ragged.grouped_matmul`. The tails of
      `lhs` and `rhs` may hold anything.
    - `tiling`, `input_buffer_count`, `interpret`: as in `ragged.grouped_matmul`, in the letters `m`, `k`, `n` of this
      function.
    - `group_offset`, `num_actual_groups`: the result has `num_actual_groups` groups, from `group_offset` on. Groups
      past the last one of `group_sizes` are zero.
    - The rest: as in `ragged.matmul`. A configuration for `backend` uses the letters of `matmul(lhs, rhs)`, where the
      contracted, ragged letter is `k`.

    **Returns:** `[num_actual_groups or g, k, n]`, with zeros for an empty group.

    **Raises:** `ValueError` for shapes, sizes and options, `TypeError` for dtypes.
    """
    arguments = {**locals()}
    site = Site(
        "ragged.transposed_grouped_matmul(lhs, rhs, group_sizes)", {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes}
    )
    _check_arrays(site, lhs, rhs, 2, group_sizes)
    (k, m), n = lhs.shape, rhs.shape[1]
    if rhs.shape[0] != m:
        site.fail(
            ValueError,
            f"`lhs` has m={m} columns but `rhs` has {rhs.shape[0]} rows.",
            "`lhs` must be [k, m] and `rhs` [m, n]. If your `lhs` is [m, k], pass `lhs.T`.",
        )
    check.check_num_actual_groups(site, num_actual_groups)
    options = check.check_options(site, backend, precision)
    options = check.check_tiling(site, options, tiling, input_buffer_count, interpret, (m, k, n))
    if options.tiling is not None:
        # This function's (m, k) are the product's (k, m).
        tile_m, tile_k, tile_n = options.tiling
        options = options._replace(tiling=(tile_k, tile_m, tile_n))
    shape = (as_extent(group_sizes.shape[0] if num_actual_groups is None else num_actual_groups), k, n)
    product = Product("km", "kn", "mn", "k")
    return _bind(site, lhs.T, rhs, product, shape, options, arguments)


def _check_arrays(site: Site, lhs: Any, rhs: Any, rhs_rank: int, group_sizes: Any) -> None:
    for name, x, rank in (("lhs", lhs, 2), ("rhs", rhs, rhs_rank), ("group_sizes", group_sizes, 1)):
        if not is_arraylike(x):
            hint = "Pass an array of integers." if name == "group_sizes" else "`ragged.matmul` takes a `GroupedTensor`."
            site.fail(TypeError, f"`{name}` is not an array.", hint)
        if x.ndim != rank:
            hint = "This function computes one product. For several products, use `jax.vmap`."
            if name == "lhs" and x.ndim == 3:
                hint = (
                    "Flatten axes of tokens into one: `lhs.reshape(-1, lhs.shape[-1])`. For several products, map over "
                )
                hint += "the first axis with `jax.vmap`."
            site.fail(
                ValueError,
                f"`{name}` must have {rank} dims, but has {x.ndim}.",
                hint,
            )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        site.fail(TypeError, "`group_sizes` must be integers.", "Cast them: `group_sizes.astype(jnp.int32)`.")
    check.check_size_range(site, group_sizes, lhs)


def _bind(
    site: Site,
    lhs: Any,
    rhs: Any,
    product: Product,
    shape: tuple[Any, ...],
    options: Options,
    arguments: Mapping[str, Any],
) -> Array:
    """The product of `lhs` and `rhs`, packed axis first. `arguments`: all arguments of the public function."""
    existing_out = arguments["existing_out"]
    if existing_out is not None and not is_arraylike(existing_out):
        site.also(existing_out=existing_out).fail(
            TypeError, "`existing_out` is not an array.", "Pass an array like the result."
        )
    dtype = check.result_dtype(site, lhs.dtype, rhs.dtype, arguments["preferred_element_type"], existing_out)
    if existing_out is not None:
        check.check_existing(site, existing_out, shape, dtype)
    offset = check.check_offset(site, arguments["group_offset"])
    lhs, rhs = (Operand(not_differentiable_8_bits(site.call, x)) for x in (lhs, rhs))
    sizes = {product.ragged: as_int32(arguments["group_sizes"])}
    x = Operands(lhs, rhs, sizes, offset, Epilogue(existing_out)).widened(dtype)
    out_spec = check.check_out_sharding(site, arguments["out_sharding"], x, shape)
    call = Call(product, shape, dtype, options, out_spec=out_spec)
    check.check_plan(site, x, call)
    return bind(x, call)
