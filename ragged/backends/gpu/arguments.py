"""The kernel's static arguments: tuples that describe the operands, their scales and the result.

`r`, `c` and `k` are the rows and columns of the result as it is stored, and the contracted axis. Strides are in
elements. With a stride of 0, all elements along an axis share a value.
"""

import math
from typing import Any, NamedTuple

from ragged.product.layout import Product
from ragged.product.operands import Call, KernelOperand, Operands


class Sizes(NamedTuple):
    """The groups' sizes, and the local matrices."""

    groups: int  # number of sizes
    width: int  # `groups`, rounded up to a power of two of at least 16
    matrices: int  # number of local groups
    r_stride: int  # batch stride of the sizes of `r`
    c_stride: int  # batch stride of the sizes of `c`
    k_stride: int  # batch stride of the sizes of `k`
    offset_stride: int  # batch stride of the offset


class Buffer(NamedTuple):
    """How an operand is stored, and its tiles. The outer axis isn't contracted."""

    batch_stride: int
    matrix_stride: int
    outer_stride: int
    k_stride: int
    outer: int  # extent
    k: int  # extent
    packs: str  # the axis that packs groups: "outer", "k" or ""
    tile: int  # along the outer axis
    edge: bool  # whether tiles may pass the end of the outer axis, which isn't packed
    tile_k: int
    tma: bool  # whether TMA loads whole tiles
    ends: bool = False  # whether TMA's tiles end with their group along `k`
    k_first: bool = False  # whether tiles are loaded as `[tile_k, tile]`, and then transposed
    converts_to: Any = None  # if `k_first`, the dtype to which tiles are cast as they are loaded
    numbers: int = 1  # per element: 2 if an element is a byte of two 4-bit numbers along `k`, which the kernel decodes
    decodes: str = ""  # the dtype of the numbers, if elements are bytes that the kernel decodes
    source_stride: int = 0  # batch stride of the index of gathered rows
    source_rows: int = 0  # rows of the buffer that the index refers to


class Scaling(NamedTuple):
    """How an operand's scales are stored and applied."""

    # See `base.scale_modes`; or "unit": tensor cores apply the scales, which are stored as uint32, four in each.
    applied_to: str = ""
    batch_stride: int = 0
    group_stride: int = 0  # if groups are packed and each has one scale along the packed axis; else 0
    matrix_stride: int = 0  # if groups aren't packed; else 0
    outer_block: int = 1  # extent of a block along the outer axis
    outer_stride: int = 0  # stride of the blocks along the outer axis
    k_block: int = 1
    k_blocks: int = 1  # number of blocks along `k`
    k_stride: int = 0
    tensor_stride: int = 0  # batch stride of the second level of scales
    tensor_matrix_stride: int = 0  # 1 if each matrix has its own, else 0
    packs_k: bool = False  # whether groups are packed along `k`
    has_zeros: bool = False  # whether each block has a zero point, stored like its scale
    decodes: str = ""  # "float8_e8m0fnu" or "float8_e4m3fn", if the scales are uint8 with its bits
    # In the mode "tile": elements of a tile along both axes for which one scale is loaded.
    outer_each: int = 1
    k_each: int = 1


class Dot(NamedTuple):
    """How two tiles are multiplied."""

    cast_to: Any  # dtype that both tiles are cast to, or None
    accumulator: Any  # dtype
    precision: str  # for float32
    # After this many fp8 products, their sum is added to a float32 accumulator. None if a step has no more, and for
    # other dtypes.
    longest_sum: int | None
    # If true, each step has its own sum of fp8 products, which is added to the total in float32.
    adds_steps: bool
    flat: bool  # whether the kernel's loop is over the steps of all tiles


class Result(NamedTuple):
    """How the result is stored, as `[rows, columns]` matrices, and its epilogue."""

    batch_stride: int
    matrix_stride: int
    rows: int
    columns: int
    adds: bool  # whether the sums are added to the old values of the array
    fuses: bool  # whether there is an `EpilogueSpec`
    slice: int  # columns of a tile that go through the epilogue at a time
    bias_stride: int  # from a matrix's bias to the next one's
    up_bias_stride: int
    up_column: int  # column of `b` where `up` begins, if both are halves of one array
    interleaved: bool  # whether columns of two matrices alternate in `b`, and so in the sums


LAST = 2**30
"""See `Tiles.of_rows`."""


class Tiles(NamedTuple):
    """Fields of a TMA descriptor."""

    of: str  # the array's name
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    tile: tuple[int, ...]

    @staticmethod
    def of_matrices(of: str, shape: tuple[int, ...], tile: tuple[int, int]) -> "Tiles":
        """Tiles of an array `[..., p, q]`, described as `[matrices, p, q]`."""
        p, q = shape[-2:]
        return Tiles(of, (math.prod(shape[:-2]), p, q), (p * q, q, 1), (1, *tile))

    @staticmethod
    def of_rows(of: str, shape: tuple[int, ...], tile: tuple[int, int]) -> "Tiles":
        """Tiles of the rows of an array `[..., p, q]`, each with zeros from any given row on.

        The tile from row `i` to before row `j` has the coordinates `(last, j, last - (j - i), column)`, where `last`
        is 2**30. The third one is out of bounds from row `j` on. Its stride `q`, the second's `q` and the first's
        `2**34 - q` add up to `2**64 + i * q` elements. Addresses are counted modulo `2**64` bytes, so `i * q` is left,
        whatever an element's size.
        """
        q = shape[-1]
        return Tiles(of, (LAST + 1, 2**31 - 1, LAST, q), (2**34 - q, q, q, 1), (1, 1, *tile))


def result(call: Call, x: Operands, matrices: int, columns_at_a_time: int) -> Result:
    """Describes the result. `matrices`: their number, if it isn't packed. `columns_at_a_time`: see `Result.slice`."""
    (rows, columns), by_matrix = call.shape[-2:], call.product.out[0] not in x.sizes
    strides = [columns if each is not None and each.ndim > 1 else 0 for each in (x.epilogue.bias, x.epilogue.up_bias)]
    return Result(
        batch_stride=rows * columns * (matrices if by_matrix else 1),
        matrix_stride=rows * columns if by_matrix else 0,
        rows=rows,
        columns=columns,
        adds=x.epilogue.existing is not None,
        fuses=call.epilogue is not None,
        slice=columns_at_a_time,
        bias_stride=strides[0],
        up_bias_stride=strides[1],
        up_column=columns if call.columns == "halves" else 0,
        interleaved=call.columns == "interleaved",
    )


def buffer(
    operand: KernelOperand, outer: str, product: Product, packed: str, *, tile: int, halves: bool, **others: Any
) -> Buffer:
    """Describes an operand.

    `packed`: the operand's first letter, before it is transposed in memory. If ragged, it packs the groups.
    `halves`: whether the outer axis has two matrices, one after the other. The tiles of the second begin in the middle.
    `others`: other fields of `Buffer`.
    """
    (p, q), ndim = map(operand.extent, operand.letters), product.ndim(operand.letters)
    outer_first = operand.letters[0] == outer
    source, extent = operand.source, p if outer_first else q
    packs = ("outer" if packed == outer else "k") if packed in product.ragged else ""
    return Buffer(
        batch_stride=math.prod(operand.data.shape[-ndim:]) if operand.data.ndim > ndim else 0,
        matrix_stride=p * q if ndim == 3 else 0,
        outer_stride=q if outer_first else 1,
        k_stride=1 if outer_first else q,
        outer=extent,
        k=q if outer_first else p,
        packs=packs,
        tile=tile,
        edge=packs != "outer" and (extent // 2 if halves else extent) % tile != 0,
        source_stride=source.shape[-1] if source is not None and source.ndim > 1 else 0,
        source_rows=0 if source is None else operand.data.shape[-2],
        **others,
    )


def scaling(operand: KernelOperand, applied_to: str, outer: str, product: Product, tile: tuple[int, int]) -> Scaling:
    """Describes an operand's scales. `tile`: its extents along the outer axis and along `k`."""
    if operand.scales is None:
        return Scaling()
    values, letters, ndim = operand.scales.values, operand.letters, product.ndim(operand.letters)
    block = dict(zip(letters, operand.scales.block, strict=True))
    row_strides = dict(zip(letters, (values.shape[-1], 1), strict=True))
    stride = {letter: 0 if block[letter] is None else row_strides[letter] for letter in letters}
    (k,) = {*letters} - {outer}
    packed = letters[0] if letters[0] in product.ragged else None
    batch_stride = math.prod(values.shape[-ndim:]) if values.ndim > ndim else 0
    by_matrix = ndim == 3 and operand.scales.is_by_group
    return Scaling(
        applied_to,
        batch_stride=batch_stride,
        # With one scale for each group along the packed axis, `values` has a row for each group.
        group_stride=row_strides[packed] if packed and block[packed] is None else 0,
        matrix_stride=0 if packed else math.prod(values.shape[-2:]),
        outer_block=block[outer] or 1,
        outer_stride=stride[outer],
        k_block=block[k] or 1,
        k_blocks=values.shape[letters.index(k) - 2],
        k_stride=stride[k],
        tensor_stride=(values.shape[-3] if by_matrix else 1) if batch_stride else 0,
        tensor_matrix_stride=int(by_matrix),
        packs_k=k == packed,
        has_zeros=operand.scales.zeros is not None,
        decodes="" if values.dtype.name != "uint8" else "float8_e8m0fnu" if operand.scales.e8m0 else "float8_e4m3fn",
        # Tiles along an axis that isn't packed begin at multiples of their extent.
        outer_each=1 if outer == packed else math.gcd(block[outer] or tile[0], tile[0]),
        k_each=1 if k == packed else math.gcd(block[k] or tile[1], tile[1]),
    )
