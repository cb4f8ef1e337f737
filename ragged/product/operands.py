"""One product: its arrays, `Operands`, and its static parameters, `Call`.

`Operands` is a pytree, with None for absent arrays. Arrays may have a batch axis in front, which the shapes here leave
out. Biases and the second matrix never have one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ragged.core.formats import accumulator_dtype, compute_dtype, promote
from ragged.core.mesh import explicit_spec
from ragged.core.scales import Scales
from ragged.product.config import CONFIG_TYPES, Configs
from ragged.product.function import Function
from ragged.product.layout import Product


class Operand(NamedTuple):
    """One operand of a product: `[g, p, q]`, or `[p, q]` if it is packed or one matrix for all groups."""

    data: Any  # None if a derivative needs only `quantized`
    scales: Scales | None = None
    # Only for recipes: quantised copies, keyed by the letter that they can be contracted along. In a uniform copy, this
    # letter is stored last.
    quantized: "dict[str, Operand] | None" = None


class Index(NamedTuple):
    """The index that gathers the rows of `lhs` from its buffer, and its inverse, as in `core.rows`. The scales of `lhs`
    belong to the gathered rows, not to the buffer's.

    `rows`, if given, is a copy of the gathered rows, which is differentiated in place of the buffer: so the cotangents
    of several products with the same rows are added before they are collected into the buffer. Backends that read the
    buffer ignore it.
    """

    source: Any  # (rows,) int32: row `i` is row `source[i]` of the buffer; out of range: a row without a group
    # [buffer rows, copies] int32: row `t` of the buffer becomes the rows `places[t]`; out of range: unused.
    places: Any
    rows: Any = None  # [rows, k]


class Epilogue(NamedTuple):
    """The arrays of the steps between an accumulator and the stored result, which is rounded once, at the end."""

    existing: Any = None  # added to the product; has the result's shape and dtype
    # The other fields are for calls with an `EpilogueSpec`.
    bias: Any = None  # `(n,)`, or `[h, n]`, a row for each of the `h` groups of the uniform operand
    up: Any = None  # an `Operand` like `rhs`, a second matrix for the same rows
    up_bias: Any = None  # like `bias`, for the product with `up`


class Operands(NamedTuple):
    """The arrays of one product."""

    lhs: Operand
    rhs: Operand
    sizes: dict[str, Any]  # `(g,)` of each ragged letter
    offset: Any = None  # `()`: the first group of the uniform operand or result
    epilogue: Epilogue = Epilogue()
    gather: Index | None = None  # If given, `lhs` is `[m, k]`, `m` ragged, and has a batch axis if the index has one.

    @property
    def lhs_shape(self) -> tuple[Any, ...]:
        """Shape of `lhs`, with the gathered rows instead of the buffer's."""
        shape = self.lhs.data.shape
        return shape if self.gather is None else (*shape[:-2], self.gather.source.shape[-1], shape[-1])

    @property
    def num_groups(self) -> Any:
        """Number of groups: of sizes if a letter is ragged, else of matrices."""
        return next(iter(self.sizes.values())).shape[-1] if self.sizes else self.lhs.data.shape[-3]

    def widened(self, dtype: Any) -> "Operands":
        """With `lhs` and `rhs` cast to the result's dtype if it has 64 bits, and they have no scales.

        Sums have the operands' dtype, or 32 bits if that has fewer. Operands with scales become 64-bit numbers anyway.
        """
        if jnp.dtype(dtype).itemsize < 8 or self.lhs.scales is not None or self.rhs.scales is not None:
            return self
        lhs, rhs = (Operand(each.data.astype(dtype)) for each in (self.lhs, self.rhs))
        gather = self.gather
        if gather is not None and gather.rows is not None:
            gather = gather._replace(rows=gather.rows.astype(dtype))
        return self._replace(lhs=lhs, rhs=rhs, gather=gather)


class Options(NamedTuple):
    """Options that decide how a call's product is computed."""

    precision: Any = None
    backend: str | None = None
    interpret: Any = False
    configs: Configs = Configs()  # each field is None or a tuple of configurations
    source: str = ""  # source of `configs`: "backend" (the call's argument), "using" (`tuning.using`) or ""
    cached: bool = True  # whether a product without a configuration takes one from the cache
    tiling: tuple[int, int, int] | None = None  # tiles of `m`, `k`, `n`, also in derivatives; a backend may shrink them
    buffers: int = 2  # buffers of each streamed operand of a TPU kernel, if no configuration sets them
    name: str = "ragged.matmul"  # the public function, for errors after the call, as in derivatives and lowering

    @property
    def calls_back(self) -> bool:
        """Whether the kernel is interpreted by callbacks, which are effects of the program."""
        if self.backend not in CONFIG_TYPES:
            return False
        configs = [each for several in self.configs for each in several or () if each.backend == self.backend]
        buffers = max([self.buffers, *(getattr(each, "buffers", 0) for each in configs)])
        return CONFIG_TYPES[self.backend].calls_back(self.interpret, buffers)

    @property
    def tiles(self) -> dict[str, int] | None:
        return None if self.tiling is None else dict(zip("mkn", self.tiling, strict=True))


def precision_name(precision: Any) -> str | None:
    """`precision`, or JAX's default for None, in lower case; None if the operands' precisions differ."""
    precision = jax.config.jax_default_matmul_precision if precision is None else precision
    both = precision if isinstance(precision, tuple) else (precision, precision)
    return str(both[0]).lower() if both[0] == both[1] else None


class EpilogueSpec(NamedTuple):
    """The static part of an epilogue.

    The result is `function(*z)`, or `z[0]` without a function. `z` are the pre-activations: products plus biases.
    """

    function: Function | None
    stored: tuple[bool, ...]  # whether the result, then each of `z`, is stored, in the result's dtype
    # "halves" or "interleaved" if `rhs` has both matrices' columns. Then it has no scales, and `up` is None.
    columns: str = ""

    @property
    def instructions(self) -> int:
        """Approximate number of vector instructions of `function` per element."""
        return 0 if self.function is None else self.function.instructions


class KernelOperand(NamedTuple):
    """An operand of a kernel, `[..., p, q]`, and the letters of `p` and `q`. If `p` is ragged, it is packed."""

    data: Any
    letters: str
    scales: Scales | None
    source: Any = None  # `(..., rows)`: the row of `data` to read for each row, see `Index`; None: rows in order
    # The numbers' dtype, if `data` has bytes that the kernel decodes. Of 4 bits, a byte holds two along the last axis.
    decodes: Any = None

    def extent(self, letter: str) -> Any:
        """The extent along a letter; with `source`, the number of gathered rows."""
        if self.source is not None and letter == self.letters[0]:
            return self.source.shape[-1]
        return self.data.shape[self.axis(letter) - 2]

    def axis(self, letter: str) -> int:
        """The index of a letter, 0 or 1."""
        return self.letters.index(letter)

    def block(self, letter: str) -> int | None:
        """The extent of a block of scales along a letter; None if it spans the axis or there are no scales."""
        return None if self.scales is None else self.scales.block[self.axis(letter)]


class Call(NamedTuple):
    """Static parameters of one product."""

    product: Product
    shape: tuple[Any, ...]  # of the result, without a batch axis
    dtype: Any  # of the result
    options: Options
    out_batch: bool = False  # If an operand has a batch axis: whether the result has it too, or is summed over it.
    out_spec: PartitionSpec | None = None  # sharding of the result, without a batch axis, over explicit mesh axes
    epilogue: EpilogueSpec | None = None
    has_zero_tail: bool = False  # whether the tail of `existing` is zero already
    # If given, `lhs` is multiplied as the data and scales that `cast(lhs)` returns, `[..., m, k]` and `[..., m, 1]`.
    cast: Callable[[Any], tuple[Any, Any]] | None = None

    @property
    def columns(self) -> str:
        """`EpilogueSpec.columns`; "" without an epilogue."""
        return "" if self.epilogue is None else self.epilogue.columns

    @property
    def num_products(self) -> int:
        """Number of matrices that the rows are multiplied with."""
        return 1 if self.epilogue is None else len(self.epilogue.stored) - 1

    @property
    def num_stored(self) -> int:
        return 1 if self.epilogue is None else sum(self.epilogue.stored)

    def buffers(self, x: Operands) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """`(letters, shape)` of `lhs`, with the gathered rows, of `rhs`, and of the result."""
        p = self.product
        return (p.lhs, x.lhs_shape), (p.rhs, x.rhs.data.shape), (p.out, self.shape)

    def accumulator(self, x: Operands) -> Any:
        lhs, rhs = x.lhs.data.dtype, x.rhs.data.dtype
        if x.lhs.scales is None and x.rhs.scales is None:
            return accumulator_dtype(compute_dtype(lhs, rhs))
        # Operands with scales are dequantised to this dtype.
        return jnp.float64 if jnp.float64 in (lhs, rhs, self.dtype) else jnp.float32

    def sum_dtype(self, x: Operands) -> Any:
        """The dtype in which partial results are summed over devices, before rounding."""
        accumulator, of_result = jnp.dtype(self.accumulator(x)), accumulator_dtype(self.dtype)
        # Sums of integers stay exact, also for a float result.
        is_exact = jnp.issubdtype(accumulator, jnp.integer) and jnp.issubdtype(of_result, jnp.floating)
        return accumulator if is_exact else promote(accumulator, of_result)

    def ranks(self, x: Operands) -> Operands:
        """The rank of each array in `x` without a batch axis."""

        def all_of(tree: Any, rank: int) -> Any:
            return jax.tree.map(lambda _: rank, tree)

        p = self.product
        return Operands(
            all_of(x.lhs, p.ndim(p.lhs)),
            all_of(x.rhs, p.ndim(p.rhs)),
            all_of(x.sizes, 1),
            all_of(x.offset, 0),
            # An epilogue's biases and second matrix never have a batch axis.
            jax.tree.map(jnp.ndim, x.epilogue)._replace(existing=all_of(x.epilogue.existing, len(self.shape))),
            None if x.gather is None else Index(*map(all_of, x.gather, (1, 2, 2))),
        )

    def batched(self, x: Operands) -> Operands:
        """Whether each array in `x` has a batch axis."""
        return jax.tree.map(lambda array, rank: array.ndim > rank, x, self.ranks(x))

    def batch(self, x: Operands) -> Any:
        """The batch axis's extent, which may be symbolic; None if no array has a batch axis."""
        arrays = zip(jax.tree.leaves(x), jax.tree.leaves(self.batched(x)), strict=True)
        (size,) = {array.shape[0] for array, is_batched in arrays if is_batched} or {None}
        return size

    def num_local_groups(self, x: Operands) -> Any:
        """Number of groups that are computed: the groups of the uniform operand or result, if any; else all. One matrix
        that all groups share doesn't count as uniform here."""
        p = self.product
        if p.is_uniform(p.out):
            return self.shape[0]
        operands = (x.lhs.data, p.lhs), (x.rhs.data, p.rhs)
        return next((data.shape[-3] for data, z in operands if p.is_uniform(z) and data.ndim > 2), x.num_groups)

    def kernel_operands(self, x: Operands) -> tuple[KernelOperand, KernelOperand]:
        """The two operands of a kernel, first the one with the letter of the result's rows."""
        p = self.product
        source = None if x.gather is None else x.gather.source
        lhs, rhs = (
            KernelOperand(x.lhs.data, p.lhs, x.lhs.scales, source),
            KernelOperand(x.rhs.data, p.rhs, x.rhs.scales),
        )
        return (lhs, rhs) if p.out[0] in p.lhs else (rhs, lhs)

    def with_cast(self, x: Operands) -> Operands:
        """`x` with `lhs` as `cast` quantises it, if it isn't quantised already."""
        if self.cast is None or x.lhs.scales is not None:
            return x
        data, scales = self.cast(x.lhs.data)
        return x._replace(lhs=Operand(data, Scales(scales, (1, None))))

    def derivative(self, wrt: str, of: Any) -> "Call":
        """The call of the product that is the cotangent of `"lhs"` or `"rhs"`, an array like `of`."""
        product = self.product.derivative(wrt)
        ndim = product.ndim(product.out)
        shape, is_batched = of.shape[of.ndim - ndim :], of.ndim > ndim
        # Over explicit axes, a cotangent has the sharding of its primal.
        spec = explicit_spec(of)
        spec = None if spec is None else PartitionSpec(*spec.partitions[of.ndim - ndim :])
        return self._replace(product=product, shape=shape, dtype=of.dtype, out_batch=is_batched, out_spec=spec)
