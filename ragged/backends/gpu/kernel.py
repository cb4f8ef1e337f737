"""The Triton kernel of all grouped products on a GPU.

    out[i][r, c] = sum_k a[i][r, k] * b[i][c, k]        after `LINEAR`

With an `EpilogueSpec`, let `z` be this sum plus a bias, and let `up_z` be the same with `up` instead of `b`. Then

    out = function(z)        or        out = function(z, up_z)

`r` and `c` are the axes of the result as it is stored, and `k` is contracted; each may be ragged. An operand has an
outer axis, `r` of `a` or `c` of `b`, and `k`. Whichever axis is stored first may pack the groups. A group of an operand
is described by its first element and two strides, so one kernel serves all eight layouts. The first tile of a group
begins at the group's first row.

Each program computes every `num_programs`-th tile of the result, and finds the tile's group by a prefix sum over the
sizes, which only the device knows. The last tiles are gaps: rows of no local group, which become zeros. With tiles of
4 rows, and sizes `[3, 5, 0, 4]` in a buffer of 16 rows:

    tile   0        1        2        3         4
    rows   0..2     3..6     7        8..11     12..15
    group  0        1        1        3         a gap

The kernel is one long function, because its parts share most variables. `x`, `y` and `u` are tiles of `a`, `b` and
`up`. Names in capitals are compile-time constants; `arguments` defines the tuples among them.
"""

# pyright takes Triton's types for values, and doesn't know that Triton resolves each `if` on a constant.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportOptionalCall=false

import inspect
from typing import Any

import triton
import triton.language as tl


def _jit(function: Any) -> Any:
    return triton.jit(inspect.unwrap(function))  # Triton reads the source of the unwrapped function


@_jit
def grouped_product(
    a,
    b,
    a_tiles,  # TMA descriptor for whole tiles of `a`, made by the host; or None
    b_tiles,
    up_tiles,
    sizes_r,  # (g,) int32, or None if `r` is not ragged
    sizes_c,
    sizes_k,
    offset,  # () int32, or None: the first local group
    a_scales,  # float32; 8 bits; uint32 of four, if tensor cores apply them; or None
    b_scales,
    b_zeros,  # int16, stored like `b_scales`: zero points; or None
    a_tensor,  # float32, one for each batch element, or None: scale of the whole operand
    b_tensor,
    a_source,  # int32, or None: for each packed row of `a`, its row in the buffer
    up,  # stored like `b`, or None
    up_scales,
    up_zeros,
    up_tensor,
    bias,  # float32: `(columns,)`, or `[matrices, columns]`; or None
    up_bias,
    out,  # with an `EpilogueSpec`, `out`, `z` and `up_z` may be None
    z,
    up_z,
    SIZES: tl.constexpr,  # `arguments.Sizes`
    A: tl.constexpr,  # `arguments.Buffer`
    B: tl.constexpr,  # of `b` and `up`
    A_SCALES: tl.constexpr,  # `arguments.Scaling`
    B_SCALES: tl.constexpr,  # of `b` and `up`
    OUT: tl.constexpr,  # `arguments.Result`
    DOT: tl.constexpr,  # `arguments.Dot`
    SUMMED: tl.constexpr,  # number of summed batch elements
    SPLITS: tl.constexpr,  # number of parts of `k`, each with its own result: see `_part`
    LINEAR: tl.constexpr,  # a `@triton.jit` function of a sum and, if `OUT.adds`, an old value of `out`; or None
    FUNCTION: tl.constexpr,  # a `@triton.jit` function, or None: the identity
    BAND: tl.constexpr,  # rows of tiles that are visited column by column, for the L2 cache
):
    """Computes a grouped product.

    1. Count the tiles of groups and gaps.
    2. For each tile: find its group, matrix, and first row and column in every buffer.
    3. Add up the products of the operands' tiles along `k`, step by step.
    4. Apply scales and epilogue, round, and store the tile, with zeros outside of the group.

    If `FLAT`, one loop is over the steps of all tiles: 2 is a part of a tile's first step, and 4 of its last one. Loads
    are some steps ahead, so the next tile's begin before this one is stored.
    """
    R: tl.constexpr = OUT.rows
    C: tl.constexpr = OUT.columns
    GROUPS: tl.constexpr = SIZES.groups
    MATRICES: tl.constexpr = SIZES.matrices
    TILE_R: tl.constexpr = A.tile
    BOTH: tl.constexpr = 2 if OUT.interleaved else 1  # columns of `b` for each column of the result
    TILE_B: tl.constexpr = B.tile
    TILE_C: tl.constexpr = TILE_B // BOTH
    TILE_K: tl.constexpr = A.tile_k * A.numbers  # numbers, as all positions along `k` below
    TILES_R: tl.constexpr = (R + TILE_R - 1) // TILE_R
    TILES_C: tl.constexpr = (C + TILE_C - 1) // TILE_C
    SCATTERED: tl.constexpr = a_source is not None and A.packs == "k"  # each `k` has its own row
    TRANSPOSED: tl.constexpr = A.tma and A.packs == "k" and A.k_stride == 1  # then `b` is stored transposed too
    GATED: tl.constexpr = up is not None
    FLAT: tl.constexpr = DOT.flat
    element, part_of_k = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    index = tl.arange(0, SIZES.width)
    r_sizes = None if sizes_r is None else _all_sizes(sizes_r + element * SIZES.r_stride, index, GROUPS)
    c_sizes = None if sizes_c is None else _all_sizes(sizes_c + element * SIZES.c_stride, index, GROUPS)

    # 1. The number of tiles.
    first = 0
    if offset is not None:  # clipped, so that `first + MATRICES` can't wrap around
        first = tl.minimum(tl.maximum(tl.load(offset + element * SIZES.offset_stride), -MATRICES), GROUPS)
    is_local = (index >= first) & (index < first + MATRICES)
    if sizes_r is not None:
        _, rows = _fit(_starts(r_sizes), r_sizes, R)
        tiles = tl.where(is_local, (rows + TILE_R - 1) // TILE_R, 0)
        tile_ends = tl.cumsum(tiles, 0)
        group_tiles = tl.sum(tiles, 0)
        # The rows [0, low) and [high, R) belong to no local group.
        low = tl.sum(tl.where(index < first, rows, 0), 0)
        high = tl.sum(tl.where(index < first + MATRICES, rows, 0), 0)
        low_tiles = tl.cdiv(low, TILE_R)
        count = (group_tiles + low_tiles + tl.cdiv(R - high, TILE_R)) * TILES_C
    else:
        count = MATRICES * TILES_R * TILES_C

    iterations = _share(count)  # of the loop below, which is over tiles
    tile = tl.program_id(0) - tl.num_programs(0)  # the one before this program's first
    if FLAT:  # the loop is over the steps of all tiles, of which each has one already
        k_sizes = None
        if sizes_k is not None:
            k_sizes = _all_sizes(sizes_k + element * SIZES.k_stride, index, GROUPS)
            _, _, depths = _along_k(_starts(k_sizes), k_sizes, A, B)
            if sizes_r is None:
                tiles, tile_ends = TILES_R, (index - first + 1) * TILES_R
            mine = _share(tile_ends * TILES_C) - _share((tile_ends - tiles) * TILES_C)
            more = mine * (_steps(depths, TILE_K) - 1)
            iterations += tl.sum(tl.where(is_local & (index < GROUPS), more, 0), 0)
        elif sizes_r is not None:  # gaps have one step
            iterations += _share(group_tiles * TILES_C) * (_steps(A.k, TILE_K) - 1)
        else:  # without sizes there is no offset
            iterations *= _steps(A.k, TILE_K)
        step, steps, depth, a_k, b_k, a_first, b_first, c, size_c = -1, 0, 0, 0, 0, 0, 0, 0, 0
        group, matrix, rows_in, rows_out, corner = 0, 0, 0, 0, tl.full((), 0, tl.int64)
        total = tl.zeros((TILE_R, TILE_B), DOT.accumulator)
    for _ in tl.range(iterations):
        if FLAT:
            step += 1
        if not FLAT or step == steps:
            # 2. The tile. `local` counts the tiles of the group or the gap. `r` and `c`: the tile's first row and
            # column, counted from the start of the group or the gap.
            tile += tl.num_programs(0)
            if sizes_r is not None:
                is_before = tile_ends <= tile // TILES_C
                is_gap = tile >= group_tiles * TILES_C
                group = tl.minimum(tl.sum(is_before.to(tl.int32), 0), GROUPS - 1)
                local = tile - tl.max(tl.where(is_before, tile_ends, 0), 0) * TILES_C
                start_r, size_r = _span(r_sizes, index, group)
                out_row, out_rows = _fit(start_r, size_r, R)
                # A gap is before all local groups, or after them.
                is_low = is_gap & (local // TILES_C < low_tiles)
                local -= tl.where(is_gap & (local // TILES_C >= low_tiles), low_tiles * TILES_C, 0)
                out_row = tl.where(is_gap, tl.where(is_low, 0, high), out_row)
                out_rows = tl.where(is_gap, tl.where(is_low, low, R - high), out_rows)
                tile_r, tile_c = _in_bands(local, tl.cdiv(out_rows, TILE_R), TILES_C, BAND)
                matrix = tl.minimum(tl.maximum(group - first, 0), MATRICES - 1)
            else:
                matrix = tile // (TILES_R * TILES_C)
                group = tl.minimum(tl.maximum(first + matrix, 0), GROUPS - 1)
                is_gap = group != first + matrix
                start_r, size_r = tl.full((), 0, tl.int64), A.outer
                out_row, out_rows = 0, R
                tile_r, tile_c = _in_bands(tile % (TILES_R * TILES_C), TILES_R, TILES_C, BAND)
            r, c = tile_r * TILE_R, tile_c * TILE_C
            start_c, size_c = tl.full((), 0, tl.int64), B.outer
            if sizes_c is not None:
                start_c, size_c = _span(c_sizes, index, group)
            a_first, size_r = _locate(start_r, size_r, A.outer, A.packs == "outer")
            b_first, size_c = _locate(start_c, size_c, B.outer, B.packs == "outer")
            # Along `r` or `c`, a group may be larger than a buffer that has this axis but doesn't pack it. Past the end
            # of this buffer, load the first tile: the result is masked there.
            if sizes_r is not None and A.packs == "k":
                a_first += tl.where(r < size_r, r, 0)
            else:
                a_first += r
            if sizes_c is not None and B.packs == "k":
                b_first += tl.where(c < size_c, c, 0)
            else:
                b_first += c * BOTH
            # From the tile's first row on: rows of the group, and rows of the result to write. `corner`: its place.
            rows_in, rows_out = tl.where(is_gap, 0, size_r - r), out_rows - r
            corner = tl.program_id(1).to(tl.int64) * OUT.batch_stride + matrix.to(tl.int64) * OUT.matrix_stride
            corner += (out_row + r).to(tl.int64) * C
            if FLAT:
                a_k, b_k, depth = 0, 0, A.k
                if sizes_k is not None:
                    start_k, size_k = _span(k_sizes, index, group)
                    a_k, b_k, depth = _along_k(start_k, size_k, A, B)
                depth = tl.where(is_gap, 0, depth)
                step, steps = 0, _steps(depth, TILE_K)

        # 3. The product. `depth`: elements along `k`, of all summands.
        if FLAT:
            x_k, y_k = a_k + step * TILE_K, b_k + step * TILE_K
            x = _fetch(a_tiles, element, matrix, a_first, x_k, a_k + depth, A)
            y = _fetch(b_tiles, element, matrix, b_first, y_k, b_k + depth, B)
            total = _add(total, x, y, (0, x_k), (0, y_k), None, A_SCALES, B_SCALES, DOT)
        else:
            total, depth = tl.zeros((TILE_R, TILE_B), DOT.accumulator), 0
            if GATED:
                up_total = tl.zeros((TILE_R, TILE_C), DOT.accumulator)
            for summand in range(SUMMED):
                e = element if SUMMED == 1 else summand
                start_k, size_k = tl.full((), 0, tl.int64), A.k * A.numbers
                if sizes_k is not None:
                    start_k, size_k = _span(_all_sizes(sizes_k + e * SIZES.k_stride, index, GROUPS), index, group)
                a_k, b_k, size_k = _along_k(start_k, size_k, A, B)
                if SPLITS > 1:
                    skipped, size_k = _part(part_of_k, size_k, SPLITS, TILE_K)
                    a_k, b_k = a_k + skipped, b_k + skipped
                size_k = tl.where(is_gap, 0, size_k)
                depth += size_k
                x_at, x_inside = _pointers(a, a_source, e, matrix, a_first, a_k, A)
                y_at, y_inside = _pointers(b, None, e, matrix, b_first, b_k, B)
                x_scales = _scale_pointers(a_scales, e, group, matrix, a_first, A_SCALES, A)
                y_scales = _scale_pointers(b_scales, e, group, matrix, b_first, B_SCALES, B)
                y_zeros = _zero_pointers(b_zeros, e, group, matrix, b_first, B_SCALES, B)
                if GATED:
                    u_at, u_inside = _pointers(up, None, e, matrix, b_first + OUT.up_column, b_k, B)
                    u_scales = _scale_pointers(up_scales, e, group, matrix, b_first, B_SCALES, B)
                    u_zeros = _zero_pointers(up_zeros, e, group, matrix, b_first, B_SCALES, B)
                begin, ahead = 0, 0
                # TMA requires tiles that begin at multiples of 16 bytes. Elements are bytes here, so the first tile has
                # up to 15 elements ahead of the group, which are masked below.
                if TRANSPOSED:
                    ahead = tl.where(size_k > 0, a_k % 16, 0)
                    a_k, b_k, size_k = a_k - ahead, b_k - ahead, size_k + ahead
                    begin = tl.where(ahead > 0, 1, 0)
                if SCATTERED:
                    rows = _rows(a_source, e, a_k, 0, TILE_K, A.k, A)
                for step in tl.range(begin, size_k // TILE_K):
                    x_k, y_k = a_k + step * TILE_K, b_k + step * TILE_K
                    if SCATTERED:
                        x = _load(x_at + rows[None, :] * A.k_stride, x_inside, None, A)
                        rows = _rows(a_source, e, a_k, step * TILE_K + TILE_K, TILE_K, A.k, A)
                    else:
                        x, x_at = _next(a_tiles, x_at, x_inside, e, matrix, a_first, x_k, A)
                    y, y_at = _next(b_tiles, y_at, y_inside, e, matrix, b_first, y_k, B)
                    x = _scaled(x, x_scales, 0, x_k, None, A_SCALES, A, DOT)
                    y = _scaled(y, y_scales, y_zeros, y_k, None, B_SCALES, B, DOT)
                    total = _add(total, x, y, (x_scales, x_k), (y_scales, y_k), None, A_SCALES, B_SCALES, DOT)
                    if GATED:
                        u, u_at = _next(up_tiles, u_at, u_inside, e, matrix, b_first + OUT.up_column, y_k, B)
                        u = _scaled(u, u_scales, u_zeros, y_k, None, B_SCALES, B, DOT)
                        up_total = _add(up_total, x, u, (x_scales, x_k), (u_scales, y_k), None, A_SCALES, B_SCALES, DOT)
                if TRANSPOSED:
                    # The first and the last tile, if they have elements outside of the group.
                    last = tl.where(size_k % TILE_K > 0, size_k // TILE_K, -1)
                    for edge in tl.range(begin + tl.where(last >= begin, 1, 0), num_stages=1):
                        k = tl.where(edge < begin, 0, last) * TILE_K
                        x_k, y_k = a_k + k, b_k + k
                        x = _fetch(a_tiles, e, matrix, a_first, x_k, 0, A)
                        y = _fetch(b_tiles, e, matrix, b_first, y_k, 0, B)  # both loads start before the masks
                        x, y = _between(x, ahead - k, size_k - k), _between(y, ahead - k, size_k - k)
                        total = _add(total, x, y, (x_scales, x_k), (y_scales, y_k), None, A_SCALES, B_SCALES, DOT)
                elif sizes_k is not None or (A.k * A.numbers) % TILE_K != 0 or (B.k * B.numbers) % TILE_K != 0:
                    # The rest, less than a tile of `k`. Another group, or the end of the buffer, follows.
                    rest = size_k % TILE_K
                    if rest > 0:
                        k = size_k - rest
                        x_k, y_k = a_k + k, b_k + k
                        if SCATTERED:
                            x_at += rows[None, :] * A.k_stride
                        x = _scaled(_load_rest(x_at, x_inside, k, rest, A), x_scales, 0, x_k, rest, A_SCALES, A, DOT)
                        y = _scaled(
                            _load_rest(y_at, y_inside, k, rest, B), y_scales, y_zeros, y_k, rest, B_SCALES, B, DOT
                        )
                        total = _add(total, x, y, (x_scales, x_k), (y_scales, y_k), rest, A_SCALES, B_SCALES, DOT)
                        if GATED:
                            u = _scaled(
                                _load_rest(u_at, u_inside, k, rest, B), u_scales, u_zeros, y_k, rest, B_SCALES, B, DOT
                            )
                            up_total = _add(
                                up_total, x, u, (x_scales, x_k), (u_scales, y_k), rest, A_SCALES, B_SCALES, DOT
                            )

        if not FLAT or step == steps - 1:
            # 4. The result.
            left, right = total, total
            if OUT.interleaved:
                left, right = tl.split(total.reshape(TILE_R, TILE_C, 2))
            elif GATED:
                right = up_total
            if A_SCALES.applied_to == "total":
                x_scale = tl.load(_scale_pointers(a_scales, element, group, matrix, a_first, A_SCALES, A))[:, None]
                left = left.to(tl.float32) * x_scale
                if GATED:
                    right = right.to(tl.float32) * x_scale
            if B_SCALES.applied_to == "total":
                y_scale = tl.load(_scale_pointers(b_scales, element, group, matrix, b_first, B_SCALES, B))[None, :]
                left = left.to(tl.float32) * y_scale
                if GATED:
                    u_scale = tl.load(_scale_pointers(up_scales, element, group, matrix, b_first, B_SCALES, B))[None, :]
                    right = right.to(tl.float32) * u_scale
            if a_tensor is not None:
                tensor_scale = tl.load(a_tensor + _tensor_scale(element, matrix, A_SCALES))
                left *= tensor_scale
                if GATED:
                    right *= tensor_scale
            if b_tensor is not None:
                left *= tl.load(b_tensor + _tensor_scale(element, matrix, B_SCALES))
                if GATED:
                    right *= tl.load(up_tensor + _tensor_scale(element, matrix, B_SCALES))
            inside = rows_in
            if not OUT.fuses:  # a group that is empty along `k` is zero: its scales are undefined
                inside = tl.where(depth > 0, rows_in, 0)
            in_r = tl.arange(0, TILE_R)[:, None]
            # Slice by slice: there are too few registers for the epilogue of all columns at once.
            for i in tl.static_range(TILE_C // OUT.slice):
                in_c = c + i * OUT.slice + tl.arange(0, OUT.slice)
                place = corner + (_apart(in_r, C, TILE_R) + in_c[None, :])
                mask = (in_r < rows_out) & (in_c < C)[None, :]
                # Outside of the group, the result is zero.
                in_group = in_r < inside
                if sizes_c is not None:
                    in_group = in_group & (in_c < size_c)[None, :]
                part = _columns(left, i, OUT.slice)
                if OUT.adds:  # outside of the group, the old values stay
                    part = LINEAR(part, tl.load(out + place, mask=mask & in_group, other=0.0))
                    tl.store(out + place, part.to(out.dtype.element_ty), mask=mask & in_group)
                elif LINEAR is not None:
                    part = LINEAR(part)
                if OUT.fuses:
                    part = _biased(part, bias, matrix, in_c, OUT.bias_stride, C)
                    _store(z, place, in_group, mask, part)
                    if GATED or OUT.interleaved:
                        up_part = _columns(right, i, OUT.slice)
                        if LINEAR is not None:
                            up_part = LINEAR(up_part)
                        up_part = _biased(up_part, up_bias, matrix, in_c, OUT.up_bias_stride, C)
                        _store(up_z, place, in_group, mask, up_part)
                        part = FUNCTION(part, up_part)
                    elif FUNCTION is not None:
                        part = FUNCTION(part)
                if not OUT.adds:
                    _store(out, place, in_group, mask, part)
            if FLAT:
                total = tl.zeros((TILE_R, TILE_B), DOT.accumulator)


@_jit
def _all_sizes(sizes, index, GROUPS: tl.constexpr):
    """`(SIZES.width,)` int32: the sizes, negative ones as 0, padded with zeros."""
    return tl.maximum(tl.load(sizes + index, mask=index < GROUPS, other=0), 0).to(tl.int32)


@_jit
def _starts(sizes):
    """`(SIZES.width,)` int64: the number of elements of the groups before each."""
    sizes = sizes.to(tl.int64)
    return tl.cumsum(sizes, 0) - sizes


@_jit
def _span(sizes, index, group):
    """`(start, size)` of a group, not clipped to a buffer. `start`: number of elements of the groups before."""
    start = tl.sum(tl.where(index < group, sizes, 0).to(tl.int64), 0)
    return start, tl.sum(tl.where(index == group, sizes, 0), 0)


@_jit
def _fit(start, size, CAPACITY: tl.constexpr):
    """`(start, size)` of a group in a buffer that packs it, clipped to the capacity."""
    start = tl.minimum(start, CAPACITY).to(tl.int32)
    return start, tl.minimum(size, CAPACITY - start)


@_jit
def _locate(start, size, EXTENT: tl.constexpr, PACKED: tl.constexpr):
    """`(start, size)` of a group in any buffer. If the buffer doesn't pack the axis, the group starts at 0."""
    if PACKED:
        return _fit(start, size, EXTENT)
    else:
        return tl.full((), 0, tl.int32), tl.minimum(size, EXTENT).to(tl.int32)


@_jit
def _along_k(start, size, A: tl.constexpr, B: tl.constexpr):
    """`(a_k, b_k, size)` of a group, or of all groups: where it starts along `k` in both operands, and its extent."""
    a_k, size = _locate(start, size, A.k * A.numbers, A.packs == "k")
    b_k, size = _locate(start, size, B.k * B.numbers, B.packs == "k")
    return a_k, b_k, size


@_jit
def _steps(depth, TILE_K: tl.constexpr):
    """Number of steps along `k`, of which a tile has at least one: it writes the result."""
    return tl.maximum((depth + TILE_K - 1) // TILE_K, 1)


@_jit
def _part(part, size, SPLITS: tl.constexpr, TILE_K: tl.constexpr):
    """`(start, size)` of a part of `k`. All have the same number of steps, but the last ones may have fewer, or none: a
    size of 0 or less."""
    steps = tl.cdiv(tl.cdiv(size, TILE_K), SPLITS)
    start = part * steps * TILE_K
    return start, tl.minimum(steps * TILE_K, size - start)


@_jit
def _share(tiles):
    """How many of the first `tiles` tiles are this program's: every `num_programs`-th."""
    programs = tl.num_programs(0)
    return (tiles + (programs - 1 - tl.program_id(0))) // programs


@_jit
def _in_bands(tile, tiles_r, TILES_C: tl.constexpr, BAND: tl.constexpr):
    """`(row, column)` of a tile. Each band of `BAND` rows of tiles is visited column by column."""
    band = tile // (BAND * TILES_C)
    height = tl.minimum(tiles_r - band * BAND, BAND)
    local = tile % (BAND * TILES_C)
    column = local // height
    return band * BAND + (local - column * height), column


@_jit
def _pointers(operand, source, e, matrix, first, k, A: tl.constexpr):
    """`(pointers, inside)`: `[tile, tile_k]` pointers from element `[first, k]` on, or `[tile_k, tile]` if `A.k_first`;
    whether each row is in the buffer.

    Rows are elements along the outer axis. If it is packed, pointers past the buffer's end are to its last row: the
    result is masked there. With a `source`, pointers are to the gathered rows; or, if `k` is packed, to row 0, and the
    caller adds the rows' offsets.
    """
    TILE_K: tl.constexpr = A.tile_k
    outer, inner = tl.arange(0, A.tile), tl.arange(0, TILE_K)
    inside = first + outer < A.outer
    operand += e.to(tl.int64) * A.batch_stride + matrix.to(tl.int64) * A.matrix_stride
    if source is not None and A.packs == "outer":
        rows = _rows(source, e, first, 0, A.tile, A.outer, A)
        return operand + (k // A.numbers + rows[:, None] * A.outer_stride + inner[None, :]), inside
    elif source is not None:
        return operand + first + outer[:, None] + tl.zeros((1, TILE_K), tl.int64), inside
    else:
        if A.packs == "outer":
            first = tl.minimum(first, A.outer - 1)
            outer = tl.minimum(outer, A.outer - 1 - first)
        operand += first.to(tl.int64) * A.outer_stride + (k // A.numbers).to(tl.int64) * A.k_stride
        rows, columns = _apart(outer, A.outer_stride, A.tile), _apart(inner, A.k_stride, TILE_K)
        if A.k_first:
            return operand + (columns[:, None] + rows[None, :]), inside
        else:
            return operand + (rows[:, None] + columns[None, :]), inside


@_jit
def _apart(index, STRIDE: tl.constexpr, TILE: tl.constexpr):
    """`index * STRIDE` for an index below `TILE`: in int64, which takes more registers, only if int32 can overflow."""
    if TILE * STRIDE >= 2**31:
        return index.to(tl.int64) * STRIDE
    else:
        return index * STRIDE


@_jit
def _rows(source, e, first, k, TILE: tl.constexpr, EXTENT: tl.constexpr, A: tl.constexpr):
    """`(tile,)` int64: for each packed row from `first + k` on, its row in the buffer, clipped."""
    index = tl.minimum(first + k + tl.arange(0, TILE), EXTENT - 1)
    rows = tl.load(source + e.to(tl.int64) * A.source_stride + index)
    return tl.minimum(tl.maximum(rows, 0), A.source_rows - 1).to(tl.int64)


@_jit
def _load(pointers, inside, rest, A: tl.constexpr):
    """A tile `[tile, tile_k]`, with zeros outside of the buffer and, unless `rest` is None, from `k = rest` on."""
    inside = inside[None, :] if A.k_first else inside[:, None]
    if rest is not None:
        k = tl.arange(0, A.tile_k) * A.numbers
        k = k[:, None] if A.k_first else k[None, :]
        x = tl.load(pointers, mask=inside & (k < rest) if A.edge else k < rest, other=0.0)
    elif A.edge:
        x = tl.load(pointers, mask=inside, other=0.0)
    else:
        x = tl.load(pointers)
    if A.k_first:
        # In this order: Triton would load the tile into registers if it was transposed before it is converted.
        if A.converts_to is not None:
            x = _cast(_float8_e4m3fn(x) if A.decodes != "" else x, A.converts_to)
        return tl.trans(x)
    else:
        return x


@_jit
def _load_rest(pointers, inside, k, rest, A: tl.constexpr):
    """The partial tile, with zeros after its first `rest` elements along `k`."""
    if A.tma:  # then the pointers still point to the first tile
        pointers += (k // A.numbers).to(tl.int64) * A.k_stride
    return _load(pointers, inside, rest, A)


@_jit
def _next(tiles, pointers, inside, e, matrix, first, k, A: tl.constexpr):
    """`(tile, pointers)`: a whole tile `[tile, tile_k]`, and, without TMA, pointers to the next one."""
    if A.tma:
        return _fetch(tiles, e, matrix, first, k, 0, A), pointers
    else:
        return _load(pointers, inside, None, A), pointers + A.tile_k * A.k_stride


@_jit
def _fetch(tiles, e, matrix, first, k, end, A: tl.constexpr):
    """Loads a tile `[tile, tile_k]` by TMA, with zeros past the buffer's end and, if `A.ends`, past `end` along `k`."""
    # The descriptor is `[matrices, p, q]` unless `A.ends`; `place` is the index of the matrix.
    place = e * (A.batch_stride // (A.outer * A.k)) + matrix * (A.matrix_stride // (A.outer * A.k))
    if A.ends:  # see `arguments.Tiles.of_rows`
        last = 2**30
        box = tiles.load([last, place * A.k + end, last - (end - k), first])
        return tl.trans(box.reshape(A.tile_k, A.tile))
    elif A.k_stride == 1:
        return tiles.load([place, first, k // A.numbers]).reshape(A.tile, A.tile_k)
    else:
        return tl.trans(tiles.load([place, k, first]).reshape(A.tile_k, A.tile))


@_jit
def _tensor_scale(element, matrix, S: tl.constexpr):
    """Index of the second level of scales."""
    return element * S.tensor_stride + matrix * S.tensor_matrix_stride


@_jit
def _scale_pointers(scales, e, group, matrix, first, S: tl.constexpr, A: tl.constexpr):
    """`(tile,)` pointers to the scales along a tile's outer axis, in the first block along `k`; 0 without scales.

    `(1,)` if all rows of the tile share a scale; in the mode "tile", one for each `S.outer_each` rows.
    """
    if S.applied_to != "":
        ONE: tl.constexpr = S.applied_to != "unit" and (S.outer_stride == 0 or S.outer_block % A.tile == 0)
        EACH: tl.constexpr = S.outer_each if S.applied_to == "tile" else A.tile if ONE else 1
        outer = first + tl.arange(0, A.tile // EACH) * EACH
        # Clip only if necessary: without clipping, the compiler knows that the pointers are consecutive.
        if A.packs == "outer" or A.edge:
            outer = tl.minimum(outer, A.outer - 1)
        outer = outer // S.outer_block
        scales += e.to(tl.int64) * S.batch_stride
        scales += group.to(tl.int64) * S.group_stride + matrix.to(tl.int64) * S.matrix_stride
        return scales + outer.to(tl.int64) * S.outer_stride
    else:
        return 0


@_jit
def _zero_pointers(zeros, e, group, matrix, first, S: tl.constexpr, A: tl.constexpr):
    """`_scale_pointers` of the zero points; 0 without zero points."""
    if S.has_zeros:
        return _scale_pointers(zeros, e, group, matrix, first, S, A)
    else:
        return 0


@_jit
def _scaled(x, scales, zeros, k, rest, S: tl.constexpr, A: tl.constexpr, DOT: tl.constexpr):
    """`x`, unpacked if it has 4 bits, minus its zero points, and multiplied by its scales in float32 if their mode is
    "tile".

    With zero points, the result isn't zero past `rest`, but finite: the other operand is zero there. Scales past `rest`
    are undefined, so scaled numbers are zero there.
    """
    if A.decodes != "" and A.converts_to is None:
        x = _decoded(x, A, S.has_zeros, DOT)
    if S.has_zeros:
        x = _minus_zeros(x, _of_tile(zeros, k, S, A), A, DOT)
    if S.applied_to == "tile":
        x = x.to(tl.float32) * _of_tile(scales, k, S, A)
        return x if rest is None else tl.where((tl.arange(0, x.shape[1]) < rest)[None, :], x, 0.0)
    else:
        return x


@_jit
def _load_floats(pointers, S: tl.constexpr):
    """Scales in float32 if they have 8 bits; others, and zero points, as they are."""
    x = tl.load(pointers)
    if x.dtype != tl.uint8:
        return x.to(tl.float32) if x.dtype.is_fp8() else x
    elif S.decodes == "float8_e4m3fn":
        return _float8_e4m3fn(x)
    else:
        exponent = tl.maximum(x.to(tl.int32) << 23, 1 << 22)  # the smallest number is 2**-127
        return tl.where(x == 255, 0x7FC00000, exponent).to(tl.float32, bitcast=True)


@_jit
def _of_tile(pointers, k, S: tl.constexpr, A: tl.constexpr):
    """The scales, or zero points, of a tile's elements: `[tile, k]`; an extent is 1 if all along it share one."""
    if S.applied_to == "tile":
        TILE_K: tl.constexpr = A.tile_k * A.numbers
        EACH: tl.constexpr = S.outer_each
        K_EACH: tl.constexpr = S.k_each
        BLOCKS: tl.constexpr = TILE_K // K_EACH
        block = tl.minimum((k + tl.arange(0, BLOCKS) * K_EACH) // S.k_block, S.k_blocks - 1)
        each = _load_floats(pointers[:, None] + block[None, :] * S.k_stride, S)
        if K_EACH > 1:
            each = tl.broadcast_to(each[:, :, None], (A.tile // EACH, BLOCKS, K_EACH)).reshape(A.tile // EACH, TILE_K)
        if EACH > 1:
            each = tl.broadcast_to(each[:, None, :], (A.tile // EACH, EACH, TILE_K)).reshape(A.tile, TILE_K)
        return each
    else:
        return _load_floats(pointers + k // S.k_block * S.k_stride, S)[:, None]


@_jit
def _decoded(x, A: tl.constexpr, HAS_ZEROS: tl.constexpr, DOT: tl.constexpr):
    """The numbers in the bytes `[tile, bytes]`. Of 4 bits, two in each byte, the lower bits first: int4 in int8, or, if
    the dot casts it, in a float of 16 bits; uint4 in uint8; float4_e2m1fn in float32. Of 8 bits: float8_e4m3fn in
    float32.

    A float's sign, exponent and mantissa are moved to their places in a float16. Its exponent has a larger bias, so the
    float16 is the value divided by 2**14, or for float8_e4m3fn by 2**8.
    """
    if A.decodes == "int4" and (DOT.cast_to == tl.bfloat16 or DOT.cast_to == tl.float16) and not HAS_ZEROS:
        both = tl.join(x & 15, x >> 4).reshape(x.shape[0], 2 * x.shape[1]) ^ 8
        if DOT.cast_to == tl.bfloat16:
            return _plus_128(both) - 136.0
        else:
            return _plus_1024(both) - 1032.0
    elif A.decodes == "int4":
        both = tl.join(x << 4, x).reshape(x.shape[0], 2 * x.shape[1]).to(tl.int8, bitcast=True)
        return both >> 4  # keeps the sign
    elif A.decodes == "uint4":
        return tl.join(x & 15, x >> 4).reshape(x.shape[0], 2 * x.shape[1])
    elif A.decodes == "float8_e4m3fn":
        return _float8_e4m3fn(x)
    else:
        both = tl.join(x & 15, x >> 4).reshape(x.shape[0], 2 * x.shape[1]).to(tl.uint16)
        return (((both & 8) << 12) | ((both & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@_jit
def _minus_zeros(x, zeros, A: tl.constexpr, DOT: tl.constexpr):
    """`x - zeros` of integers, exactly: in a float of 16 bits if the dot casts it to one, otherwise in int16."""
    if A.decodes == "uint4" and DOT.cast_to == tl.bfloat16:
        return _plus_128(x) - 128.0 - zeros.to(tl.bfloat16)
    elif x.dtype == tl.uint8 and DOT.cast_to != tl.float32:
        return _plus_1024(x) - (zeros + 1024).to(tl.float16)
    else:
        return x.to(tl.int16) - zeros


@_jit
def _plus_128(x):
    """`x + 128` in bfloat16, of uint8 below 128. See `_plus_1024`."""
    return (x.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)


@_jit
def _plus_1024(x):
    """`x + 1024` in float16, of uint8. This is faster than a cast, of which the GPU does few at a time."""
    return (x.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)


@_jit
def _float8_e4m3fn(x):
    """The numbers in float32 whose bits are the bytes `x`."""
    bits = x.to(tl.uint16)
    values = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 127) == 127, float("nan"), values)


@_jit
def _tensor_core_scales(scales, k, rest, S: tl.constexpr, TILE_K: tl.constexpr):
    """`[tile, blocks]` uint8: a step's scales for `tl.dot_scaled`. After `rest` elements, the byte 0 (finite)."""
    BLOCK: tl.constexpr = S.k_block // 4  # `k_block` is four blocks
    BLOCKS: tl.constexpr = TILE_K // BLOCK
    FOURS: tl.constexpr = (BLOCKS + 3) // 4
    EACH: tl.constexpr = BLOCKS // FOURS
    four = tl.arange(0, FOURS)
    pointers = scales[:, None] + (k // S.k_block + four)[None, :] * S.k_stride
    inside = None if rest is None else (four * S.k_block < rest)[None, :]
    fours = tl.load(pointers, mask=inside, other=None if rest is None else 0)[:, :, None]
    place = (k % S.k_block // BLOCK + tl.arange(0, EACH))[None, None, :]
    if S.packs_k:  # a group may begin with any of the four, so the next four follow
        following = tl.load(pointers + S.k_stride, mask=inside, other=None if rest is None else 0)[:, :, None]
        fours = tl.where(place < 4, fours, following)
    unpacked = (fours >> (place % 4 * 8)).to(tl.uint8).reshape(scales.shape[0], BLOCKS)
    if rest is None:
        return unpacked
    else:
        return tl.where((tl.arange(0, BLOCKS) * BLOCK < rest)[None, :], unpacked, 0).to(tl.uint8)


@_jit
def _between(x, first, end):
    """`x` with zeros outside of `[first, end)` along `k`."""
    k = tl.arange(0, x.shape[1])[None, :]
    return tl.where((k >= first) & (k < end), x, tl.zeros_like(x))


@_jit
def _add(total, x, y, x_scales, y_scales, rest, X: tl.constexpr, Y: tl.constexpr, DOT: tl.constexpr):
    """`total + x @ y.T`, with the product multiplied by the scales in the modes "step" and "unit".

    `x_scales`, `y_scales`: pairs of pointers to the scales of the first block along `k`, and the step's position there.

    Hopper's tensor cores add up fp8 products in few bits, so with `adds_steps`, each step's sum is added to the total
    in float32. This is done here, outside of `tl.dot`: inside, the tensor cores' registers would be read so early that
    ptxas serialises their instructions.
    """
    if DOT.cast_to is not None:
        x, y = _cast(x, DOT.cast_to), _cast(y, DOT.cast_to)
    if X.applied_to == "unit":
        x_scale = _tensor_core_scales(x_scales[0], x_scales[1], rest, X, x.shape[1])
        y_scale = _tensor_core_scales(y_scales[0], y_scales[1], rest, Y, x.shape[1])
        if x.dtype == tl.uint8:  # pairs of 4-bit floats
            x_scale, y_scale = x_scale.to(tl.float8e4nv, bitcast=True), y_scale.to(tl.float8e4nv, bitcast=True)
            return tl.dot_scaled(x, x_scale, "e2m1", tl.trans(y), y_scale, "e2m1", total)
        else:
            X_NAME: tl.constexpr = "e4m3" if x.dtype == tl.float8e4nv else "e5m2"
            Y_NAME: tl.constexpr = "e4m3" if y.dtype == tl.float8e4nv else "e5m2"
            return tl.dot_scaled(x, x_scale, X_NAME, tl.trans(y), y_scale, Y_NAME, total)
    elif X.applied_to == "step" or Y.applied_to == "step":
        OUT_DTYPE: tl.constexpr = tl.int32 if x.dtype == tl.int8 else tl.float32
        part = tl.dot(
            x, tl.trans(y), input_precision=DOT.precision, max_num_imprecise_acc=DOT.longest_sum, out_dtype=OUT_DTYPE
        ).to(tl.float32)
        if X.applied_to == "step":
            part *= _load_floats(x_scales[0] + x_scales[1] // X.k_block * X.k_stride, X)[:, None]
        if Y.applied_to == "step":
            part *= _load_floats(y_scales[0] + y_scales[1] // Y.k_block * Y.k_stride, Y)[None, :]
        return total + part
    elif DOT.adds_steps:
        return total + tl.dot(x, tl.trans(y), max_num_imprecise_acc=DOT.longest_sum)
    else:
        return tl.dot(x, tl.trans(y), total, input_precision=DOT.precision, out_dtype=total.dtype)


@_jit
def _cast(x, DTYPE: tl.constexpr):
    """`x.to(DTYPE)`. From fp8 or float16 to bfloat16 by way of float32: Triton casts fp8 to float16 first, and the GPU
    casts float16 to bfloat16 at an eighth of the rate of other instructions (`F2F`)."""
    IS_SLOW: tl.constexpr = (x.dtype.is_fp8() or x.dtype == tl.float16) and tl.bfloat16 == DTYPE
    if IS_SLOW:
        x = x.to(tl.float32)
    return x.to(DTYPE)


@_jit
def _columns(x, i: tl.constexpr, COLUMNS: tl.constexpr):
    """Slice `i` of `x`: `[rows, COLUMNS]`."""
    HALF: tl.constexpr = x.shape[1] // 2
    if COLUMNS > HALF:
        return x
    else:
        left, right = tl.split(tl.permute(x.reshape(x.shape[0], 2, HALF), (0, 2, 1)))
        if i < HALF // COLUMNS:
            return _columns(left, i, COLUMNS)
        else:
            return _columns(right, i - HALF // COLUMNS, COLUMNS)


@_jit
def _biased(total, bias, matrix, columns, STRIDE: tl.constexpr, C: tl.constexpr):
    """`total` in float32, plus the bias if there is one."""
    total = total.to(tl.float32)
    if bias is not None:
        total += tl.load(bias + matrix.to(tl.int64) * STRIDE + columns, mask=columns < C, other=0.0)[None, :]
    return total


@_jit
def _store(out, place, in_group, mask, x):
    """Unless `out` is None, rounds and stores a tile, with zeros in elements that aren't `in_group`.

    In two stores: if the tile was masked by `tl.where`, ptxas would serialise the tensor cores' instructions where
    columns are ragged.
    """
    if out is not None:
        x = x.to(out.dtype.element_ty)
        tl.store(out + place, x, mask=mask & in_group)
        tl.store(out + place, tl.zeros_like(x), mask=mask & ~in_group)


# Functions for activations, in float32: see `functions`. They return NaN for NaN, have no branches, and need few
# registers.


@_jit
def _sigmoid(z):
    return 1 / (1 + tl.exp(-z))


@_jit
def _erfc(x):
    """For positive numbers, `exp(-x**2)` times a polynomial in `u`, with a relative error of 2e-7."""
    t = tl.abs(x)
    u = 1 / (1 + 0.42426407 * t)
    p = 0.12856111 + u * (-0.053682726 + u * (0.20635258 + u * (-0.15720259 + u * 0.035674665)))
    p = 2 * u * (0.1196293 + u * (0.12075393 + u * (0.09991366 + u * p)))
    above = p * tl.exp(-t * t)
    return tl.where(x < 0, 2 - above, above)


@_jit
def _tanh(z):
    """For small numbers, a polynomial of odd powers, with a relative error of 1e-7."""
    t, s = tl.abs(z), z * z
    small = z + z * s * (-0.33333144 + s * (0.13325878 + s * (-0.05304555 + s * 0.01724163)))
    large = 1 - 2 / (1 + tl.exp(2 * t))
    return tl.where(t < 0.5, small, tl.where(z < 0, -large, large))


@_jit
def _erf(x):
    """For small numbers, a polynomial of odd powers."""
    s = x * x
    small = 0.11283792 + s * (-0.02686617 + s * (0.00522398 - s * 0.00085483))
    small = x * (1.12837917 + s * (-0.37612639 + s * small))
    return tl.where(tl.abs(x) < 0.5, small, 1 - _erfc(x))


@_jit
def _expm1(x):
    return _tanh(0.5 * x) * (tl.exp(x) + 1)


@_jit
def _log1p(x):
    """For small numbers, the series of `2 * atanh(x / (2 + x))`."""
    s = x / (2 + x)
    t = s * s
    small = 2 * s + 2 * s * t * (0.33333333 + t * (0.2 + t * (0.14285714 + t * 0.11111111)))
    return tl.where(tl.abs(x) < 0.25, small, tl.log(1 + x))


@_jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
