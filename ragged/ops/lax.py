"""`ragged_dot` and `ragged_dot_general`: the signatures and results of `jax.lax`, computed by grouped products.

    lhs [b, m, k], rhs [g, b, k, n], group_sizes (g,)     ->  "m b k, g b k n -> m b n", an einsum with batch letters
    lhs [b, m, k], rhs [g, b, k, n], group_sizes [b, g]   ->  "m k, g k n -> m n", mapped over `b`

Each axis gets a letter. The product is mapped over all axes of `group_sizes` but the last. An einsum
multiplies the rest.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike, RaggedDotDimensionNumbers
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Int, Integer

from ragged.core.errors import Site, describe, is_arraylike
from ragged.core.formats import AnyArray, accumulator_dtype
from ragged.core.mesh import explicit_mesh, explicit_spec
from ragged.core.offsets import as_int32
from ragged.ops import check
from ragged.ops.letters import EinsumOperand, Names, einsum_of, transposed
from ragged.ops.matmul import multiply
from ragged.ops.request import Arguments
from ragged.tensor.tensor import GroupedTensor

_OF_RAGGED_DOT = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def ragged_dot(
    lhs: AnyArray,
    rhs: AnyArray,
    group_sizes: Integer[AnyArray, " g"],
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Int[AnyArray, ""] | int | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Multiplies the rows of each group of `lhs` with one matrix of `rhs`, as `jax.lax.ragged_dot` does.

    **Arguments:**

    - `lhs`: `[m, k]`, the rows of the groups, one group after another. The tail may hold anything.
    - `rhs`: `[g, k, n]`. With `group_offset`, it may have fewer matrices.
    - `group_sizes`: `(g,)`, of any integer dtype. A negative size counts as 0.
    - The rest: as in `ragged.lax.ragged_dot_general`.

    **Returns:** `[m, n]`, with zeros in the tail.

    **Raises:** `TypeError` for shapes and dtypes, `ValueError` for options.

    !!! example
        ```python
        import jax.numpy as jnp
        import ragged
        sizes = jnp.array([3, 0, 4], jnp.uint8)
        y = ragged.lax.ragged_dot(jnp.ones((8, 4)), jnp.ones((3, 4, 6)), sizes)
        assert y.shape == (8, 6) and y.sum() == 7 * 4 * 6
        ```
    """
    site = Site("ragged.lax.ragged_dot(lhs, rhs, group_sizes)")
    options = precision, preferred_element_type, group_offset, out_sharding
    return _ragged_dot(site, lhs, rhs, group_sizes, _OF_RAGGED_DOT, *options)


def ragged_dot_general(
    lhs: AnyArray,
    rhs: AnyArray,
    group_sizes: Integer[AnyArray, "..."],
    ragged_dot_dimension_numbers: RaggedDotDimensionNumbers,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Int[AnyArray, ""] | int | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Multiplies two arrays along any dims, as `jax.lax.ragged_dot_general` does.

    The ragged dim of `lhs` determines the mode. `b`, `m`, `k` and `n` may each be several dims, in any order:

    | ragged dim | `lhs`       | `rhs`          | `group_sizes`          | result         | computed as |
    |------------|-------------|----------------|------------------------|----------------|-------------|
    | kept       | `[b, m, k]` | `[g, b, k, n]` | `(g,)` or `[b, x, g]`  | `[b, m, n]`    | `forward`   |
    | contracted | `[b, m, k]` | `[b, k, n]`    | `(g,)` or `[b, x, g]`  | `[g, b, m, n]` | `wgrad`     |
    | batch      | `[b, m, k]` | `[b, k, n]`    | `(g,)` or `[x, g]`     | `[b, m, n]`    | `lax.dot_general` |

    `x` are the dims before the ragged dim that have its role: kept, contracted or batch. In the last mode, sizes
    change nothing, as in JAX.

    **Arguments:**

    - `group_sizes`: of any integer dtype. A negative size counts as 0. The tails of the operands may hold anything.
    - `ragged_dot_dimension_numbers`: a `jax.lax.RaggedDotDimensionNumbers`.
    - `precision`: as in `jax.lax.dot_general`.
    - `preferred_element_type`: the dtype of the result. The default is JAX's: int8 for int8 operands.
    - `group_offset`: `()` int array; `jax.lax` doesn't support it. `rhs` has only some of the groups, from the
      group `group_offset` on; rows of the other groups are zero. If the ragged dim is contracted, the result has the
      groups from `group_offset` on, and then zeros.
    - `out_sharding`: as in `ragged.matmul`. It may be left out.

    **Returns:** an array, with zeros in the tail and for empty groups.

    **Raises:** `TypeError` for shapes and dtypes, `ValueError` for options. A derivative of a result of 8-bit floats,
    or with respect to an operand of 8-bit floats, raises a `TypeError`.

    !!! example
        ```python
        import jax
        import jax.numpy as jnp
        import ragged
        numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        x, dy, sizes = jnp.ones((8, 4)), jnp.ones((8, 6)), jnp.array([3, 0, 4], jnp.int32)
        dw = ragged.lax.ragged_dot_general(x, dy, sizes, numbers)
        assert dw.shape == (3, 4, 6) and dw[0, 0, 0] == 3
        ```
    """
    site = Site("ragged.lax.ragged_dot_general(lhs, rhs, group_sizes, ragged_dot_dimension_numbers)")
    options = precision, preferred_element_type, group_offset, out_sharding
    return _ragged_dot(site, lhs, rhs, group_sizes, ragged_dot_dimension_numbers, *options)


def _ragged_dot(
    site: Site,
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    group_offset: Any,
    out_sharding: Any,
) -> Array:
    """Checks the arguments. Complex operands become products of their real and imaginary parts."""
    site = site.also(lhs=lhs, rhs=rhs)
    arguments = Arguments(
        precision=precision,
        preferred_element_type=preferred_element_type,
        group_offset=group_offset,
        out_sharding=out_sharding,
    )
    out = _checked(site.also(group_sizes=group_sizes), lhs, rhs, group_sizes, numbers, arguments)
    lhs, rhs, sizes = jnp.asarray(lhs), jnp.asarray(rhs), as_int32(group_sizes)
    if _is_batch(numbers):
        dims, options = numbers.dot_dimension_numbers, (arguments.precision, out.dtype)
        return jax.lax.dot_general(lhs, rhs, dims, *options, out_sharding=arguments.out_sharding)
    complex_dtypes = [x.dtype for x in (out, lhs, rhs) if jnp.issubdtype(x.dtype, jnp.complexfloating)]
    dtype = jnp.finfo(complex_dtypes[0]).dtype if complex_dtypes else out.dtype

    def times(lhs: Array, rhs: Array) -> Array:
        lhs, rhs = (x.astype(jnp.int8) if x.dtype == jnp.bool_ else x for x in (lhs, rhs))
        floats = [x.dtype for x in (lhs, rhs) if jnp.issubdtype(x.dtype, jnp.floating)]
        preferred = dtype
        # `matmul` has no bool results, and no integer results of floats. So these are converted from another dtype.
        if dtype == jnp.bool_ or (floats and jnp.issubdtype(dtype, jnp.integer)):
            preferred = accumulator_dtype(max(floats or [lhs.dtype, rhs.dtype], key=lambda each: each.itemsize))
        product = _product(site, lhs, rhs, sizes, numbers, replace(arguments, preferred_element_type=preferred))
        return product.reshape(out.shape).astype(dtype)

    (a, *b), (c, *d) = ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,) for x in (lhs, rhs))
    real = times(a, c) - times(b[0], d[0]) if b and d else times(a, c)
    if not jnp.issubdtype(out.dtype, jnp.complexfloating):
        return real.astype(out.dtype)
    mixed = [*((a, y) for y in d), *((x, c) for x in b)]
    return jax.lax.complex(real, sum((times(*pair) for pair in mixed), jnp.zeros_like(real)))


def _checked(
    site: Site, lhs: Any, rhs: Any, group_sizes: Any, numbers: Any, arguments: Arguments
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the result, by JAX's own rules. Raises for arguments that JAX raises for."""
    for name, x in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes)):
        if not is_arraylike(x):
            use = f"Pass `{name}.data` and its sizes, or use `ragged.matmul`."
            hint = use if isinstance(x, GroupedTensor) else f"Pass `jnp.asarray({name})`."
            site.fail(TypeError, f"`{name}` is not an array.", hint)
    if not isinstance(numbers, RaggedDotDimensionNumbers):
        hint = "Pass a `jax.lax.RaggedDotDimensionNumbers`."
        site.fail(TypeError, f"`ragged_dot_dimension_numbers` is {describe(numbers)}.", hint)
    check.check_offset(site, arguments.group_offset)
    check.check_options(site, None, arguments.precision)
    shapes = [list(x.shape) for x in (lhs, rhs, group_sizes)]
    if arguments.group_offset is not None and group_sizes.ndim:
        for axis in numbers.rhs_group_dimensions:
            shapes[1][axis : axis + 1] = group_sizes.shape[-1:]  # JAX requires a matrix for each group.
    dtypes = [jax.dtypes.canonicalize_dtype(x.dtype) for x in (lhs, rhs, group_sizes)]
    rule = partial(
        jax.lax.ragged_dot_general,
        ragged_dot_dimension_numbers=numbers,
        precision=arguments.precision,
        preferred_element_type=arguments.preferred_element_type,
    )
    try:
        # JAX's rule for shardings needs `out_sharding`, so it is left out.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            out = jax.eval_shape(rule, *map(jax.ShapeDtypeStruct, shapes, dtypes))
    except (TypeError, ValueError) as error:
        hint = "Dims and dtypes must be as in `jax.lax.ragged_dot_general`."
        if numbers is _OF_RAGGED_DOT:
            hint = "`lhs` is [m, k], `rhs` [g, k, n], `group_sizes` (g,); dtypes are as in `jax.lax.ragged_dot`."
        site.fail(TypeError, f"{str(error).splitlines()[0].rstrip('.')}.", hint)
    check.check_size_range(site, group_sizes, lhs)
    if _is_batch(numbers) and arguments.group_offset is not None:
        site.fail(ValueError, "`group_offset` is given, but the ragged dim is a batch dim.", "Leave it out.")
    return out


def _product(site: Site, lhs: Array, rhs: Array, sizes: Array, numbers: Any, arguments: Arguments) -> Array:
    """The product of real operands, whose ragged dim isn't a batch dim. Its result may have more axes, of extent 1, at
    the end."""
    lhs_letters, rhs_letters, out_letters = _letters(numbers, lhs.ndim, rhs.ndim)
    ragged = lhs_letters[numbers.lhs_ragged_dimensions[0]]
    is_contracted = ragged in rhs_letters
    contracted, batch = (
        [f"{role}{i}" for i in range(len(axes[0]))]
        for role, axes in zip("kb", numbers.dot_dimension_numbers, strict=True)
    )
    role = contracted if is_contracted else [z for z in lhs_letters if z[0] == "m"]
    # `b` and `x` in the table of `ragged_dot_general`
    mapped = (*batch, *role[: role.index(ragged)]) if sizes.ndim > 1 else ()
    shared = tuple(z for z in mapped if z in rhs_letters)

    def rest(first: str, letters: Names) -> Names:
        return (first, *(z for z in letters if z not in mapped and z != first))

    of_lhs, of_rhs = rest(ragged, lhs_letters), rest(ragged if is_contracted else "g", rhs_letters)
    of_out = rest("g" if is_contracted else ragged, out_letters)
    lhs, rhs = transposed(lhs, lhs_letters, mapped + of_lhs), transposed(rhs, rhs_letters, shared + of_rhs)
    # Groups are matrices, so an operand without a kept axis gets one.
    if len(of_lhs) == 1 or not any(z[0] == "m" for z in of_lhs):
        lhs, of_lhs, of_out = lhs[..., None], (*of_lhs, "m"), (*of_out, "m")
    if not any(z[0] == "n" for z in of_rhs):
        rhs, of_rhs, of_out = rhs[..., None], (*of_rhs, "n"), (*of_out, "n")
    out_sharding, dtype = arguments.out_sharding, arguments.preferred_element_type
    summed = [axis for axis, z in enumerate(mapped) if z not in out_letters]
    if summed:
        arguments = replace(arguments, preferred_element_type=accumulator_dtype(dtype))

    is_one_product = not mapped and of_out == out_letters and (len(of_lhs), len(of_rhs)) == (2, 3 - is_contracted)
    is_one_product = is_one_product and explicit_mesh([lhs, rhs, sizes]) is not None
    arguments = arguments if is_one_product else replace(arguments, out_sharding=None)

    if mapped and (spec := explicit_spec(lhs)) is not None:
        sizes = jax.sharding.reshard(sizes, PartitionSpec(*spec[: len(mapped)], None))

    def one(lhs: Array, rhs: Array, sizes: Array) -> Array:
        x = EinsumOperand.of("lhs", GroupedTensor(lhs, sizes), of_lhs)
        w = EinsumOperand.of("rhs", GroupedTensor(rhs, sizes) if is_contracted else rhs, of_rhs)
        e = einsum_of(x, w if is_contracted else w._replace(group=("g",)), of_out, ("g",))
        return e.product(site, multiply, arguments).data

    for z in reversed(mapped):
        one = jax.vmap(one, (0, 0 if z in rhs_letters else None, 0))
    out = one(lhs, rhs, sizes)
    out = out.sum(summed).astype(dtype) if summed else out
    order = (*(z for z in mapped if z in out_letters), *of_out)
    out = transposed(out, order, (*out_letters, *(z for z in of_out if z not in out_letters)))
    return out if out_sharding is None or is_one_product else jax.sharding.reshard(out, out_sharding)


def _is_batch(numbers: RaggedDotDimensionNumbers) -> bool:
    """Whether the ragged dim is a batch dim."""
    return numbers.lhs_ragged_dimensions[0] in numbers.dot_dimension_numbers[1][0]


def _letters(numbers: RaggedDotDimensionNumbers, lhs_rank: int, rhs_rank: int) -> tuple[Names, Names, Names]:
    """The letters of `lhs`, `rhs` and the result: batch `b0 b1 ...`, contracted `k0 k1 ...`, each in the order of
    `numbers`; kept `m0 ...` and `n0 ...`, by axis; groups `g`."""
    contracted, batch = numbers.dot_dimension_numbers
    lhs, rhs = (
        {axis: f"{role}{i}" for role, axes in (("k", contracted), ("b", batch)) for i, axis in enumerate(axes[side])}
        for side in (0, 1)
    )
    rhs |= dict.fromkeys(numbers.rhs_group_dimensions, "g")
    of_lhs = tuple(lhs.get(axis, f"m{axis}") for axis in range(lhs_rank))
    of_rhs = tuple(rhs.get(axis, f"n{axis}") for axis in range(rhs_rank))
    groups = () if numbers.rhs_group_dimensions else ("g",)
    b = tuple(f"b{i}" for i in range(len(batch[0])))
    return of_lhs, of_rhs, (*groups, *b, *(z for z in of_lhs if z[0] == "m"), *(z for z in of_rhs if z[0] == "n"))
