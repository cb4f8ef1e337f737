"""The array level: the forward and the wgrad of plain arrays, for those who hold no `GroupedTensor`."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int

from ragged._errors import Site, is_arraylike, is_count
from ragged.backends.config import Config, Configs
from ragged.backends.schedule import as_int32
from ragged.product import check as _check
from ragged.product.check import Tiling
from ragged.product.layout import Product
from ragged.product.operands import Call, Epilogue, Operand, Operands
from ragged.product.primitive import bind
from ragged.quant.scaling import eight_bits_fixed


def grouped_matmul(
    lhs: Array | Any,
    rhs: Array | Any,
    group_sizes: Int[Array, " g"] | Any,
    *,
    preferred_element_type: Any = None,
    tiling: Tiling | Any = None,
    input_buffer_count: int | Any = 2,
    group_offset: Int[Array, ""] | Any = None,
    existing_out: Array | Any = None,
    transpose_rhs: bool | Any = False,
    precision: Any = None,
    backend: str | Any = None,
    config: Config | Configs | Any = None,
    interpret: Any = False,
    out_sharding: NamedSharding | PartitionSpec | Any = None,
) -> Array:
    """Multiplies each group of rows of `lhs` with its own matrix: `out[rows i] = lhs[rows i] @ rhs[i]`.

    **Arguments:**

    - `lhs`: `[m, k]`, the groups' rows one after another. Rows past `sum(group_sizes)` (the tail) may hold anything.
    - `rhs`: `[g, k, n]`, or `[g, n, k]` with `transpose_rhs`, read in place. May hold fewer matrices than there are
      groups: then it is the shard of groups `group_offset, group_offset + 1, ...`, and rows of other groups come out
      zero.
    - `group_sizes`: `(g,)` int32 or uint32, rows of each group.
    - `input_buffer_count`: buffers for each streamed input of a TPU kernel, where no configuration says. Other backends
      have none.
    - The rest: as in `ragged.matmul`.

    **Returns:** `[m, n]`, zeros in the tail.

    **Raises:** `ValueError` for shapes and options, `TypeError` for dtypes.
    """
    site = Site("ragged.grouped_matmul(lhs, rhs, group_sizes)", {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes})
    _check_arrays(site, lhs, 2, rhs, 3, group_sizes, input_buffer_count)
    k_axis, n_axis = (2, 1) if transpose_rhs else (1, 2)
    m, k, n = lhs.shape[0], lhs.shape[1], rhs.shape[n_axis]
    if rhs.shape[k_axis] != k:
        site.fail(
            ValueError,
            f"`lhs` has k={k} but `rhs` has k={rhs.shape[k_axis]} in axis {k_axis} (transpose_rhs={transpose_rhs}).",
            "They are contracted and must be equal. `transpose_rhs=True` takes `rhs` as [g, n, k].",
        )
    if rhs.shape[0] > group_sizes.shape[0]:
        site.fail(
            ValueError,
            f"`rhs` has {rhs.shape[0]} groups but `group_sizes` has {group_sizes.shape[0]}.",
            "Give one size per matrix, including empty groups.",
        )
    product = Product("mk", "nk" if transpose_rhs else "kn", "mn", "m")
    options = _check.check_options(site, backend, precision, tiling, interpret, (m, k, n), config)
    options = options._replace(input_buffer_count=int(input_buffer_count))
    more = group_sizes, group_offset, existing_out, preferred_element_type, out_sharding
    return _bind(site, lhs, rhs, product, (m, n), options, *more)


def transposed_grouped_matmul(
    lhs: Array | Any,
    rhs: Array | Any,
    group_sizes: Int[Array, " g"] | Any,
    *,
    preferred_element_type: Any = None,
    tiling: Tiling | Any = None,
    input_buffer_count: int | Any = 2,
    group_offset: Int[Array, ""] | Any = None,
    num_actual_groups: int | Any = None,
    existing_out: Array | Any = None,
    precision: Any = None,
    backend: str | Any = None,
    config: Config | Configs | Any = None,
    interpret: Any = False,
    out_sharding: NamedSharding | PartitionSpec | Any = None,
) -> Array:
    """Multiplies each group's columns of `lhs` with its rows of `rhs`: `out[i] = lhs[:, rows i] @ rhs[rows i]`.

    **Arguments:**

    - `lhs`: `[k, m]`. If it is `x.T`, no transposed copy is made under `jit`.
    - `rhs`: `[m, n]`.
    - `group_sizes`: `(g,)` int32 or uint32: how much of `m` each group has. What lies past their sum may hold anything.
    - `tiling`: `(tile_m, tile_k, tile_n)`, or a function of `(m, k, n)`, in this function's letters.
    - `group_offset`, `num_actual_groups`: compute only the `num_actual_groups` groups from `group_offset` on.
      Those past the last group are zero.
    - `input_buffer_count`: buffers for each streamed input of a TPU kernel, where no configuration says. Other backends
      have none.
    - `config`: as in `ragged.matmul(lhs, rhs)`, in its letters, which `ragged.tuning` and the cache have too: `k` is
      what is contracted, and ragged.
    - The rest: as in `ragged.matmul`.

    **Returns:** `[num_actual_groups or g, k, n]`. An empty group gives zeros.

    **Raises:** `ValueError` for shapes and options, `TypeError` for dtypes.
    """
    site = Site(
        "ragged.transposed_grouped_matmul(lhs, rhs, group_sizes)", {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes}
    )
    _check_arrays(site, lhs, 2, rhs, 2, group_sizes, input_buffer_count)
    (k, m), n = lhs.shape, rhs.shape[1]
    if rhs.shape[0] != m:
        site.fail(
            ValueError,
            f"`lhs` has m={m} columns but `rhs` has {rhs.shape[0]} rows.",
            "`lhs` is [k, m] and `rhs` is [m, n]. For `x` of [m, k] pass `x.T`.",
        )
    _check.check_num_actual_groups(site, num_actual_groups)
    options = _check.check_options(site, backend, precision, tiling, interpret, (m, k, n), config)
    options = options._replace(input_buffer_count=int(input_buffer_count))
    if options.tiling is not None:
        # This function's (m, k) are the product's (k, m).
        tile_m, tile_k, tile_n = options.tiling
        options = options._replace(tiling=(tile_k, tile_m, tile_n))
    shape = (int(num_actual_groups or group_sizes.shape[0]), k, n)
    product = Product("km", "kn", "mn", "k")
    more = group_sizes, group_offset, existing_out, preferred_element_type, out_sharding
    return _bind(site, lhs.T, rhs, product, shape, options, *more)


def _check_arrays(
    site: Site, lhs: Any, lhs_rank: int, rhs: Any, rhs_rank: int, group_sizes: Any, input_buffer_count: Any
) -> None:
    for name, x, rank in (("lhs", lhs, lhs_rank), ("rhs", rhs, rhs_rank), ("group_sizes", group_sizes, 1)):
        if not is_arraylike(x):
            mend = "Pass int32 sizes." if name == "group_sizes" else "`ragged.matmul` takes a `GroupedTensor`."
            site.fail(TypeError, f"`{name}` is not an array.", mend)
        if x.ndim != rank:
            site.fail(
                ValueError,
                f"`{name}` must have {rank} dims, but has {x.ndim}.",
                "This function takes one product at a time; `jax.vmap` it.",
            )
    if group_sizes.dtype not in (jnp.int32, jnp.uint32):
        site.fail(TypeError, "`group_sizes` must be int32 or uint32.", "Cast it: `group_sizes.astype(jnp.int32)`.")
    if not is_count(input_buffer_count):
        site.fail(ValueError, f"`input_buffer_count` is {input_buffer_count!r}.", "It must be a positive int.")


def _bind(
    site: Site,
    lhs: Any,
    rhs: Any,
    product: Product,
    shape: tuple[int, ...],
    options: Any,
    group_sizes: Any,
    group_offset: Any,
    existing_out: Any,
    preferred_element_type: Any,
    out_sharding: Any,
) -> Array:
    if existing_out is not None and not is_arraylike(existing_out):
        site.fail(TypeError, "`existing_out` is not an array.", "Pass an array like the result.")
    dtype = _check.result_dtype(site, lhs.dtype, rhs.dtype, preferred_element_type, existing_out)
    if existing_out is not None:
        _check.check_existing(site, existing_out, shape, dtype)
    offset = _check.check_offset(site, group_offset)
    lhs, rhs = (Operand(eight_bits_fixed(site.call, x)) for x in (lhs, rhs))
    x = Operands(lhs, rhs, {product.ragged: as_int32(group_sizes)}, offset, Epilogue(existing_out))
    out_spec = _check.check_out_sharding(site, out_sharding, x, shape)
    call = Call(product, shape, dtype, options, out_spec=out_spec)
    _check.check_plan(site, x, call)
    return bind(x, call)
