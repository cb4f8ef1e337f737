"""What one product is made of: its arrays, `Operands`, and all that is static about it, `Call`.

`Operands` is a pytree, with None for what is absent. Any of its arrays may have one more axis in front, a batch axis:
its rank says whether it has.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ragged._mesh import explicit_spec
from ragged.backends.config import Configs, TpuConfig
from ragged.product.layout import Product


@partial(jax.tree_util.register_dataclass, data_fields=["values", "tensor"], meta_fields=["block", "e8m0"])
@dataclass(frozen=True)
class Scales:
    """Scales of a quantised operand: value = data × scale, one scale a block; times `tensor`, if there are two levels.

    `values` (float32, of two levels float8_e4m3fn) has the operand's axes with one entry for each block. `block` is a
    block's extent along the operand's last two axes, None for all of it: of a ragged operand's rows, a group's, and
    then the first axis of `values` (but for a batch axis) is the groups'. Blocks of several packed rows begin with each
    group, the blocks of one after another's: see `schedule.in_blocks`. `e8m0`: whether float8_e8m0fnu holds all of
    them, powers of two or NaN. `tensor` (float32) has as many axes as `values`, each of 1 but for a batch axis.
    """

    values: Any
    block: tuple[int | None, int | None]
    e8m0: bool = False
    tensor: Any = None

    @property
    def mT(self) -> "Scales":
        """Those of the transposed operand."""
        return replace(self, values=self.values.mT, block=(self.block[1], self.block[0]))

    @property
    def whole(self) -> "Scales":
        """The same in one level, float32."""
        values = self.values.astype(jnp.float32)
        return replace(self, values=values if self.tensor is None else values * self.tensor, tensor=None)


class Operand(NamedTuple):
    data: Any
    scales: Scales | Any = None


class Index(NamedTuple):
    """Which rows of its buffer the rows of `lhs` are, both ways, as in `tensor.rows`. Scales are those of the rows.

    `rows`, if given, are these rows again, copied: they are what is differentiated in place of the buffer, so that
    products of the same rows add up their cotangents first. A backend that reads the buffer leaves them unread.
    """

    source: Any  # (rows,) int32: row `i` is row `source[i]` of the buffer; of no group where that is past its end
    places: Any  # [n, k] int32: row `t` of the buffer is the rows `places[t]`, but for those past the last
    rows: Any = None  # [rows, k]


class Epilogue(NamedTuple):
    """What an accumulator goes through before it is rounded, once, and stored."""

    existing: Any = None  # added; of the result's shape and dtype
    # What only a call with an `Ending` has:
    bias: Any = None  # added: `(n,)`, or `[h, n]`, a row for each group that the uniform term holds
    up: Any = None  # an `Operand` like `rhs`: with its product, the other's activation is multiplied
    up_bias: Any = None


class Operands(NamedTuple):
    """The arrays of one product."""

    lhs: Operand
    rhs: Operand
    sizes: dict[str, Any]  # `(g,)` of each ragged letter
    offset: Any = None  # `()`: the first group that the uniform term holds
    epilogue: Epilogue = Epilogue()
    gather: Index | Any = None  # of `lhs`, which then is `[m, k]`, `m` ragged, and has a batch axis if the index has

    @property
    def lhs_shape(self) -> tuple[Any, ...]:
        """That of `lhs`, all of whose rows count."""
        shape = self.lhs.data.shape
        return shape if self.gather is None else (*shape[:-2], self.gather.source.shape[-1], shape[-1])

    @property
    def num_groups(self) -> Any:
        """How many groups have sizes; without any, how many matrices there are."""
        return next(iter(self.sizes.values())).shape[-1] if self.sizes else self.lhs.data.shape[-3]


class Options(NamedTuple):
    """How a product is computed. `tiling` has one entry for each of `m`, `k`, `n`; it counts before `configs`."""

    precision: Any = None
    backend: str | None = None
    tiling: tuple[int, int, int] | None = None
    interpret: Any = False
    input_buffer_count: int = 2
    configs: Configs = Configs()  # each a tuple of records
    source: str = ""  # where they come from
    cached: bool = True  # whether what was measured counts, where there is none of them

    @property
    def calls_back(self) -> bool:
        """Whether the kernel is interpreted by callbacks: an effect of the program that it is part of."""
        records = [each for some in self.configs for each in some or () if isinstance(each, TpuConfig)]
        buffers = max(self.input_buffer_count, *(each.buffers for each in records), 2)
        deep = not isinstance(self.interpret, bool) or (self.interpret and buffers > 2)
        return self.backend == "pallas_tpu" and deep

    @property
    def tiles(self) -> dict[str, int] | None:
        """The tiling by letter."""
        return None if self.tiling is None else dict(zip("mkn", self.tiling, strict=True))


def precision_name(precision: Any) -> str | None:
    """The one precision of both operands, JAX's default if it is None, in lower case; None if there are two."""
    precision = jax.config.jax_default_matmul_precision if precision is None else precision
    both = precision if isinstance(precision, tuple) else (precision, precision)
    return str(both[0]).lower() if both[0] == both[1] else None


class Ending(NamedTuple):
    """What a kernel makes of accumulators `z`: `activation(z[0])`, or `activation(z[0]) * z[1]`."""

    activation: str | None
    stored: tuple[bool, ...]  # which of the result and of each of `z`; all rounded to the result's dtype


class Term(NamedTuple):
    """An operand as a kernel sees it: `[..., p, q]` and the letters of its last two axes. A ragged `p` is packed."""

    data: Any
    letters: str
    scales: Scales | None
    source: Any = None  # `(..., rows)`: which row of `data` each is, if not as they come: see `Index`

    def extent(self, letter: str) -> Any:
        if self.source is not None and letter == self.letters[0]:
            return self.source.shape[-1]
        return self.data.shape[self.axis(letter) - 2]

    def axis(self, letter: str) -> int:
        """0 or 1: which of the last two axes a letter is."""
        return self.letters.index(letter)

    def block(self, letter: str) -> int | None:
        """The extent of a block of scales along a letter; None for all of it, or without scales."""
        return None if self.scales is None else self.scales.block[self.axis(letter)]


class Call(NamedTuple):
    """All that is static about one product."""

    product: Product
    shape: tuple[Any, ...]  # of the result, without a batch axis
    dtype: Any  # of the result
    options: Options
    out_batch: bool = False  # whether the result has the batch axis, if any operand has, or is summed over it
    out_spec: PartitionSpec | None = (
        None  # of the result without a batch axis, where operands' types have explicit axes
    )
    ending: Ending | None = None

    @property
    def num_products(self) -> int:
        """How many matrices the rows are multiplied with."""
        return 1 if self.ending is None else len(self.ending.stored) - 1

    @property
    def num_stored(self) -> int:
        """How many arrays of the result's shape are stored."""
        return 1 if self.ending is None else sum(self.ending.stored)

    def ranks(self, x: Operands) -> Operands:
        """The rank of each of the operands without a batch axis."""

        def all_of(tree: Any, rank: int) -> Any:
            return jax.tree.map(lambda _: rank, tree)

        p = self.product
        return Operands(
            all_of(x.lhs, p.ndim(p.lhs)),
            all_of(x.rhs, p.ndim(p.rhs)),
            all_of(x.sizes, 1),
            all_of(x.offset, 0),
            # What an ending takes is never mapped.
            jax.tree.map(jnp.ndim, x.epilogue)._replace(existing=all_of(x.epilogue.existing, len(self.shape))),
            None if x.gather is None else Index(*map(all_of, x.gather, (1, 2, 2))),
        )

    def batched(self, x: Operands) -> Operands:
        """Which of the operands have a batch axis."""
        return jax.tree.map(lambda array, rank: array.ndim > rank, x, self.ranks(x))

    def batch(self, x: Operands) -> Any:
        """The extent of the batch axis, which may be symbolic; None if no operand has one."""
        arrays = zip(jax.tree.leaves(x), jax.tree.leaves(self.batched(x)), strict=True)
        (size,) = {array.shape[0] for array, is_batched in arrays if is_batched} or {None}
        return size

    def held(self, x: Operands) -> Any:
        """How many groups are computed: those that the uniform term holds, operand or result; else all.

        An operand without a group axis, one matrix for all groups, holds none.
        """
        p = self.product
        if p.is_uniform(p.out):
            return self.shape[0]
        terms = (x.lhs.data, p.lhs), (x.rhs.data, p.rhs)
        return next((data.shape[-3] for data, z in terms if p.is_uniform(z) and data.ndim > 2), x.num_groups)

    def terms(self, x: Operands) -> tuple[Term, Term]:
        """The operands as kernels see them: first the one that has the result's rows."""
        p = self.product
        source = None if x.gather is None else x.gather.source
        lhs, rhs = Term(x.lhs.data, p.lhs, x.lhs.scales, source), Term(x.rhs.data, p.rhs, x.rhs.scales)
        return (lhs, rhs) if p.out[0] in p.lhs else (rhs, lhs)

    def derivative(self, wrt: str, of: Any) -> "Call":
        """That of the cotangent of `"lhs"` or `"rhs"`, an array like `of`."""
        product = self.product.derivative(wrt)
        ndim = product.ndim(product.out)
        shape, is_batched = of.shape[of.ndim - ndim :], of.ndim > ndim
        # Over explicit axes a cotangent is sharded as what it is of.
        spec = explicit_spec(of)
        spec = None if spec is None else PartitionSpec(*spec.partitions[of.ndim - ndim :])
        return self._replace(product=product, shape=shape, dtype=of.dtype, out_batch=is_batched, out_spec=spec)
