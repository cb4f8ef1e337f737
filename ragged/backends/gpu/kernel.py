"""The one Triton kernel under every grouped product on a GPU.

    out[i][r, c] = sum_k a[i][r, k] * b[i][c, k]        plus what it holds already, if it `ADDS`

or with an ending (see `product.operands.Ending`), of that sum plus a bias, `z`, and of another one, with `up` for `b`,

    out = activation(z)        or        out = activation(z) * up_z

`r` and `c` are the axes of the result as it is stored, `k` is contracted; each may be ragged. A group of an operand is
a place in its buffer and two strides, so the eight layouts are one: an operand is stored with its kept axis first or
with its contracted axis first, and the first may be packed. A tile begins where its group begins, in whatever row that
is, for on a GPU this is but the address that it is loaded from.

Programs take the tiles of the result in turn. Which group a tile is of follows from a prefix sum over the sizes, which
only the device knows; tiles past those of the groups are gaps: rows of no group, which become zeros. With tiles of 4
rows, and the sizes `[3, 5, 0, 4]` in a buffer of 16 rows:

    tile   0        1        2        3         4
    rows   0..2     3..6     7        8..11     12..15
    group  0        1        1        3         a gap

It is one long function: what a tile needs to know of its group would be most of what is handed to parts of it.
An operand's `kept` axis is `r` for `a` and `c` for `b`. Names in capitals are known when compiling.
"""

# Triton's annotations are of what its language has once it is compiled; and what `if` chooses is known by then.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import inspect
from typing import Any

import triton
import triton.language as tl


def _jit(function: Any) -> Any:
    return triton.jit(inspect.unwrap(function))  # it reads the source, for which no type checker's wrapper can stand in


@_jit
def grouped_product(
    a,
    b,
    a_tiles,  # the host's TMA descriptor that loads whole tiles of `a`, or None; and so the next two
    b_tiles,
    up_tiles,
    sizes_r,  # (g,) int32, or None where the letter is not ragged; and so the next two
    sizes_c,
    sizes_k,
    offset,  # () int32, or None: the first of the groups that the uniform term holds
    a_scales,  # float32, or None; where tensor cores multiply by them, uint32 of four
    b_scales,
    a_tensor,  # float32, of each batch element, or None: what all products are multiplied by
    b_tensor,
    a_source,  # int32, or None: which row of its buffer each of the rows is that `a` packs
    up,  # stored like `b`, or None
    up_scales,
    up_tensor,
    bias,  # float32, of each column, or None
    up_bias,
    out,  # with an ending, any of the three may be None
    z,
    up_z,
    GROUPS: tl.constexpr,  # how many have sizes
    HELD: tl.constexpr,  # how many matrices the uniform term has
    BATCH: tl.constexpr,  # strides of the batch axis: of the sizes r, c, k and of the offset
    A_STRIDES: tl.constexpr,  # in elements: batch axis, group axis, kept axis, contracted axis
    A_EXTENTS: tl.constexpr,  # of the buffer: kept axis, contracted axis
    A_PACKED: tl.constexpr,  # "kept", "contracted" or ""
    A_SCALING: tl.constexpr,  # see `_scale_row`
    A_SOURCE: tl.constexpr,  # batch stride of `a_source`, and the rows of the buffer
    B_STRIDES: tl.constexpr,
    B_EXTENTS: tl.constexpr,
    B_PACKED: tl.constexpr,
    B_SCALING: tl.constexpr,
    OUT_STRIDES: tl.constexpr,  # batch axis, group axis, r
    OUT_EXTENTS: tl.constexpr,  # r, c
    SUMMED: tl.constexpr,  # how many batch elements are summed
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_K: tl.constexpr,
    BAND: tl.constexpr,  # rows of tiles that are visited column by column, so that L2 has what they share
    WIDTH: tl.constexpr,  # of vectors over all groups: a power of two
    COMMON: tl.constexpr,  # both operands of a dot are cast to it; None for no cast
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,  # of a float32 dot
    LONGEST: tl.constexpr,  # how long a sum fp8 tensor cores may keep in their few bits, if a step's is longer
    A_TMA: tl.constexpr,  # how many matrices `a` has, if a descriptor loads its whole tiles; else 0
    B_TMA: tl.constexpr,
    ADDS: tl.constexpr,  # whether `out` holds what the product is added to
    ACTIVATION: tl.constexpr,  # its name, "" for none; None without an ending
    BIAS_STRIDES: tl.constexpr,  # group axis of `bias` and `up_bias`
    SLICE: tl.constexpr,  # columns of a tile that the ending is computed of at a time
    VARIANT: tl.constexpr,  # of `GpuConfig`
):
    R: tl.constexpr = OUT_EXTENTS[0]
    C: tl.constexpr = OUT_EXTENTS[1]
    TILES_R: tl.constexpr = (R + TILE_R - 1) // TILE_R
    TILES_C: tl.constexpr = (C + TILE_C - 1) // TILE_C
    A_EDGE: tl.constexpr = A_PACKED != "kept" and A_EXTENTS[0] % TILE_R != 0  # a tile may reach past the buffer's end
    B_EDGE: tl.constexpr = B_PACKED != "kept" and B_EXTENTS[0] % TILE_C != 0
    K_EDGE: tl.constexpr = A_EXTENTS[1] % TILE_K != 0
    SCATTERED: tl.constexpr = a_source is not None and A_PACKED == "contracted"  # a place of its own for each `k`
    OVERLAPPED: tl.constexpr = VARIANT == "overlapped"
    SPECIALISED: tl.constexpr = VARIANT == "specialised"
    FLAT: tl.constexpr = OVERLAPPED and sizes_k is None  # one loop over all steps of all tiles
    TURNED: tl.constexpr = A_TMA > 0 and A_PACKED == "contracted" and A_STRIDES[3] == 1  # and `b` too
    GATED: tl.constexpr = up is not None
    element = tl.program_id(1)
    index = tl.arange(0, WIDTH)

    # 1. How many tiles there are.
    first = 0
    if offset is not None:
        first = tl.minimum(tl.maximum(tl.load(offset + element * BATCH[3]), -HELD), GROUPS)
    if sizes_r is not None and SPECIALISED:
        group_tiles, low, high, _, _, _, _ = _walk(sizes_r + element * BATCH[0], -1, first, HELD, GROUPS, R, TILE_R)
    elif sizes_r is not None:
        sizes = _all_sizes(sizes_r + element * BATCH[0], index, GROUPS)
        ends = tl.cumsum(sizes, 0)
        rows = (tl.minimum(ends, R) - tl.minimum(ends - sizes, R)).to(tl.int32)
        tiles = tl.where((index >= first) & (index < first + HELD), (rows + TILE_R - 1) // TILE_R, 0)
        tile_ends = tl.cumsum(tiles, 0)
        group_tiles = tl.sum(tiles, 0)
        # No group that is held has any of the rows [0, low) and [high, R).
        low = tl.sum(tl.where(index < first, rows, 0), 0)
        high = tl.sum(tl.where(index < first + HELD, rows, 0), 0)
    if sizes_r is not None:
        low_tiles = tl.cdiv(low, TILE_R)
        count = (group_tiles + low_tiles + tl.cdiv(R - high, TILE_R)) * TILES_C
    else:
        count = HELD * TILES_R * TILES_C

    if SPECIALISED:  # Triton halves the tiles of two groups of warps, but can't where the host describes them
        a_tiles = _described(a, A_TMA, A_STRIDES, A_EXTENTS, TILE_R, TILE_K)
        b_tiles = _described(b, B_TMA, B_STRIDES, B_EXTENTS, TILE_C, TILE_K)
    if OVERLAPPED:
        # Element [2**30, end, 2**30 - n, c] is [end - n, c] of the rows, for addresses wrap around at 2**64 bytes; and
        # where the third index is 2**30, at the end, the hardware stops. So stores no tile past its own rows.
        out_tiles = tl.make_tensor_descriptor(
            out, [0x7FFF0000, 0x7FFF0000, 1 << 30, C], [(1 << 34) - C, C, C, 1], [1, 1, TILE_R, TILE_C // 2]
        )

    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=FLAT):
        # 2. The group that the tile is of, and the first of its rows and columns, counted from the group's own.
        if sizes_r is not None:
            if SPECIALISED:
                is_gap = tile >= group_tiles * TILES_C
                _, _, _, group, before, start_r, size_r = _walk(
                    sizes_r + element * BATCH[0], tile // TILES_C, first, HELD, GROUPS, R, TILE_R
                )
                local = tile - tl.where(is_gap, group_tiles, before) * TILES_C
            else:
                is_before = tile_ends <= tile // TILES_C
                is_gap = tile >= group_tiles * TILES_C
                group = tl.minimum(tl.sum(is_before.to(tl.int32), 0), GROUPS - 1)
                local = tile - tl.where(is_gap, group_tiles, tl.sum(tl.where(is_before, tiles, 0), 0)) * TILES_C
                start_r, size_r = _span(sizes_r + element * BATCH[0], index, group, GROUPS)
            out_row, out_rows = _fit(start_r, size_r, R)
            # A gap's rows lie in front of all groups that are held, or behind them.
            is_low = is_gap & (local // TILES_C < low_tiles)
            local -= tl.where(is_gap & (local // TILES_C >= low_tiles), low_tiles * TILES_C, 0)
            out_row = tl.where(is_gap, tl.where(is_low, 0, high), out_row)
            out_rows = tl.where(is_gap, tl.where(is_low, low, R - high), out_rows)
            tile_r, tile_c = _in_bands(local, tl.cdiv(out_rows, TILE_R), TILES_C, BAND)
            held = tl.minimum(tl.maximum(group - first, 0), HELD - 1)
        else:
            held = tile // (TILES_R * TILES_C)
            group = tl.minimum(tl.maximum(first + held, 0), GROUPS - 1)
            is_gap = group != first + held
            start_r, size_r = tl.full((), 0, tl.int64), A_EXTENTS[0]
            out_row, out_rows = 0, R
            tile_r, tile_c = _in_bands(tile % (TILES_R * TILES_C), TILES_R, TILES_C, BAND)
        r, c = tile_r * TILE_R, tile_c * TILE_C
        start_c, size_c = tl.full((), 0, tl.int64), B_EXTENTS[0]
        if sizes_c is not None:
            start_c, size_c = _span(sizes_c + element * BATCH[1], index, group, GROUPS)
        a_first, size_r = _locate(start_r, size_r, A_EXTENTS[0], A_PACKED == "kept")
        b_first, size_c = _locate(start_c, size_c, B_EXTENTS[0], B_PACKED == "kept")
        a_first, b_first = a_first + r, b_first + c
        if FLAT:  # a gap has steps too: over zeros, which lie past the operands' ends
            a_first = tl.where(is_gap, A_EXTENTS[0], a_first)
            b_first = tl.where(is_gap, B_EXTENTS[0], b_first)

        # 3. The product.
        total, depth = tl.zeros((TILE_R, TILE_C), ACCUMULATOR), 0
        if GATED:
            up_total = tl.zeros((TILE_R, TILE_C), ACCUMULATOR)
        for summand in range(SUMMED):
            e = element if SUMMED == 1 else summand
            start_k, size_k = tl.full((), 0, tl.int64), A_EXTENTS[1]
            if sizes_k is not None:
                start_k, size_k = _span(sizes_k + e * BATCH[2], index, group, GROUPS)
            a_k, size_k = _locate(start_k, size_k, A_EXTENTS[1], A_PACKED == "contracted")
            b_k, size_k = _locate(start_k, size_k, B_EXTENTS[1], B_PACKED == "contracted")
            size_k = tl.where(is_gap, 0, size_k)
            depth += size_k
            x_tile, x_inside = _pointers(
                a, e, held, a_first, a_k, A_STRIDES, A_EXTENTS, A_PACKED, TILE_R, TILE_K, a_source, A_SOURCE
            )
            y_tile, y_inside = _pointers(
                b, e, held, b_first, b_k, B_STRIDES, B_EXTENTS, B_PACKED, TILE_C, TILE_K, None, None
            )
            x_scales = _scale_row(a_scales, A_SCALING, e, group, held, a_first, A_EXTENTS[0], TILE_R, A_PACKED)
            y_scales = _scale_row(b_scales, B_SCALING, e, group, held, b_first, B_EXTENTS[0], TILE_C, B_PACKED)
            if GATED:
                u_tile, _ = _pointers(
                    up, e, held, b_first, b_k, B_STRIDES, B_EXTENTS, B_PACKED, TILE_C, TILE_K, None, None
                )
                u_scales = _scale_row(up_scales, B_SCALING, e, group, held, b_first, B_EXTENTS[0], TILE_C, B_PACKED)
            begin, ahead = 0, 0
            if TURNED:  # TMA wants a tile to begin at a multiple of 16 bytes: what is ahead of the group is cut off
                ahead = tl.where(size_k > 0, a_k % 16, 0)
                a_k, b_k, size_k = a_k - ahead, b_k - ahead, size_k + ahead
                begin = tl.where(ahead > 0, 1, 0)
            steps = A_EXTENTS[1] // TILE_K if FLAT else size_k // TILE_K
            if SCATTERED:
                rows = _rows(a_source, A_SOURCE, A_EXTENTS[1], e, a_k, 0, TILE_K)
            for step in tl.range(begin, steps, warp_specialize=SPECIALISED):
                k = step * TILE_K
                x_k, y_k = a_k + k, b_k + k
                if A_TMA:
                    x = _fetch(a_tiles, e, held, a_first, x_k, A_STRIDES, A_EXTENTS, TILE_R, TILE_K, SPECIALISED)
                elif SCATTERED:
                    x = _load(x_tile + rows[None, :] * A_STRIDES[3], x_inside, None, A_EDGE)
                    rows = _rows(a_source, A_SOURCE, A_EXTENTS[1], e, a_k, k + TILE_K, TILE_K)
                else:
                    x = _load(x_tile, x_inside, None, A_EDGE)
                    x_tile += TILE_K * A_STRIDES[3]
                if B_TMA:
                    y = _fetch(b_tiles, e, held, b_first, y_k, B_STRIDES, B_EXTENTS, TILE_C, TILE_K, SPECIALISED)
                else:
                    y = _load(y_tile, y_inside, None, B_EDGE)
                    y_tile += TILE_K * B_STRIDES[3]
                x = _scaled(x, x_scales, x_k, A_SCALING, A_EXTENTS[1])
                y = _scaled(y, y_scales, y_k, B_SCALING, B_EXTENTS[1])
                total = _add(
                    total, x, y, x_scales, y_scales, x_k, y_k, A_SCALING, B_SCALING, COMMON, PRECISION, LONGEST
                )
                if GATED:
                    if B_TMA:
                        u = _fetch(up_tiles, e, held, b_first, y_k, B_STRIDES, B_EXTENTS, TILE_C, TILE_K, SPECIALISED)
                    else:
                        u = _load(u_tile, y_inside, None, B_EDGE)
                        u_tile += TILE_K * B_STRIDES[3]
                    u = _scaled(u, u_scales, y_k, B_SCALING, B_EXTENTS[1])
                    up_total = _add(
                        up_total, x, u, x_scales, u_scales, x_k, y_k, A_SCALING, B_SCALING, COMMON, PRECISION, LONGEST
                    )
            if TURNED:
                # The first tile, if something is ahead of the group in it, and the last, if something is behind.
                last = tl.where(size_k % TILE_K > 0, size_k // TILE_K, -1)
                for edge in tl.range(begin + tl.where(last >= begin, 1, 0), num_stages=1):
                    k = tl.where(edge < begin, 0, last) * TILE_K
                    x_k, y_k = a_k + k, b_k + k
                    x = _fetch(a_tiles, e, held, a_first, x_k, A_STRIDES, A_EXTENTS, TILE_R, TILE_K, SPECIALISED)
                    y = _fetch(b_tiles, e, held, b_first, y_k, B_STRIDES, B_EXTENTS, TILE_C, TILE_K, SPECIALISED)
                    x, y = _between(x, ahead - k, size_k - k), _between(y, ahead - k, size_k - k)
                    total = _add(
                        total, x, y, x_scales, y_scales, x_k, y_k, A_SCALING, B_SCALING, COMMON, PRECISION, LONGEST
                    )
            elif sizes_k is not None or K_EDGE:
                # What is left, less than a tile of `k`. Behind it are a neighbour's elements, or the buffer's end.
                rest = size_k % TILE_K
                if rest > 0:
                    k = size_k - rest
                    x_k, y_k = a_k + k, b_k + k
                    if A_TMA:
                        x_tile += k.to(tl.int64) * A_STRIDES[3]
                    if SCATTERED:
                        x_tile += rows[None, :] * A_STRIDES[3]
                    if B_TMA:
                        y_tile += k.to(tl.int64) * B_STRIDES[3]
                    x = _scaled(_load(x_tile, x_inside, rest, A_EDGE), x_scales, x_k, A_SCALING, A_EXTENTS[1])
                    y = _scaled(_load(y_tile, y_inside, rest, B_EDGE), y_scales, y_k, B_SCALING, B_EXTENTS[1])
                    # Past the rest both are zero, or were before they were scaled by what may be anything.
                    x = _first(x, rest, A_SCALING)
                    y = _first(y, rest, B_SCALING)
                    total = _add(
                        total,
                        x,
                        y,
                        x_scales,
                        y_scales,
                        x_k,
                        y_k,
                        A_SCALING,
                        B_SCALING,
                        COMMON,
                        PRECISION,
                        LONGEST,
                        rest,
                    )
                    if GATED:
                        if B_TMA:
                            u_tile += k.to(tl.int64) * B_STRIDES[3]
                        u = _scaled(_load(u_tile, y_inside, rest, B_EDGE), u_scales, y_k, B_SCALING, B_EXTENTS[1])
                        u = _first(u, rest, B_SCALING)
                        up_total = _add(
                            up_total,
                            x,
                            u,
                            x_scales,
                            u_scales,
                            x_k,
                            y_k,
                            A_SCALING,
                            B_SCALING,
                            COMMON,
                            PRECISION,
                            LONGEST,
                            rest,
                        )

        # 4. The result.
        if A_SCALING[0] == "total":
            x_scales = _scale_row(a_scales, A_SCALING, element, group, held, a_first, A_EXTENTS[0], TILE_R, A_PACKED)
            total = total.to(tl.float32) * tl.load(x_scales)[:, None]
            if GATED:
                up_total = up_total.to(tl.float32) * tl.load(x_scales)[:, None]
        if B_SCALING[0] == "total":
            y_scales = _scale_row(b_scales, B_SCALING, element, group, held, b_first, B_EXTENTS[0], TILE_C, B_PACKED)
            total = total.to(tl.float32) * tl.load(y_scales)[None, :]
            if GATED:
                u_scales = _scale_row(
                    up_scales, B_SCALING, element, group, held, b_first, B_EXTENTS[0], TILE_C, B_PACKED
                )
                up_total = up_total.to(tl.float32) * tl.load(u_scales)[None, :]
        if a_tensor is not None:
            level = tl.load(a_tensor + element * A_SCALING[7])
            total *= level
            if GATED:
                up_total *= level
        if b_tensor is not None:
            total *= tl.load(b_tensor + element * B_SCALING[7])
            if GATED:
                up_total *= tl.load(up_tensor + element * B_SCALING[7])
        in_r, in_c = r + tl.arange(0, TILE_R), c + tl.arange(0, TILE_C)
        SCALED: tl.constexpr = A_SCALING[0] == "total" or B_SCALING[0] == "total"
        MASKED: tl.constexpr = (
            sizes_c is not None or sizes_k is not None or (sizes_r is not None and (SCALED or not FLAT))
        )
        if MASKED and ACTIVATION is None:
            # A neighbour's elements were multiplied too; and where there was nothing to multiply, scales are undefined.
            mine = (in_r < tl.where(depth > 0, size_r, 0))[:, None] & (in_c < size_c)[None, :]
            total = tl.where(mine, total, tl.zeros_like(total))
        corner = element.to(tl.int64) * OUT_STRIDES[0] + held.to(tl.int64) * OUT_STRIDES[1]
        corner += (out_row + r).to(tl.int64) * OUT_STRIDES[2]
        place = corner + (tl.arange(0, TILE_R)[:, None] * OUT_STRIDES[2] + in_c[None, :])
        mask = (in_r < out_rows)[:, None] & (in_c < C)[None, :]
        if ADDS:
            old = tl.load(out + place, mask=mask, other=0.0)
            total = total.to(tl.float32) + old if old.dtype.is_floating() else total + old.to(total.dtype)
        if OVERLAPPED:  # in halves, which take half the shared memory
            halves = total.to(out.dtype.element_ty).reshape(1, 1, TILE_R, 2, TILE_C // 2)
            left, right = tl.split(tl.permute(halves, (0, 1, 2, 4, 3)))
            end = element * (OUT_STRIDES[0] // C) + held * (OUT_STRIDES[1] // C) + out_row + out_rows
            out_tiles.store([1 << 30, end, (1 << 30) - out_rows + r, c], left)
            out_tiles.store([1 << 30, end, (1 << 30) - out_rows + r, c + TILE_C // 2], right)
        elif ACTIVATION is not None:
            mine, inside = in_r < tl.where(is_gap, 0, size_r), in_r < out_rows
            other = up_total if GATED else None
            _end(
                total,
                other,
                bias,
                up_bias,
                held,
                c,
                corner,
                mine,
                inside,
                out,
                z,
                up_z,
                C,
                BIAS_STRIDES,
                ACTIVATION,
                SLICE,
            )
        else:
            tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@_jit
def _all_sizes(sizes, index, GROUPS: tl.constexpr):
    """`(w,)` int64: the sizes, of which none is negative, and zeros past the last."""
    return tl.maximum(tl.load(sizes + index, mask=index < GROUPS, other=0), 0).to(tl.int64)


@_jit
def _walk(
    sizes,
    row_of_tiles,
    first,
    HELD: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """What vectors over all groups tell, group by group: Triton's warp specialisation takes no reductions.

    All tiles of rows, the ends of the rows in front of the held groups and of theirs; and of the group with a row of
    tiles: which it is, the tiles before it, its first row and its size.
    """
    end, low, high, tiles, group, before, start, size = 0, 0, 0, 0, 0, 0, 0, 0
    for g in tl.range(GROUPS):
        s = tl.maximum(tl.load(sizes + g), 0)
        rows = tl.minimum(s, CAPACITY - end)
        mine = tl.where((g >= first) & (g < first + HELD), (rows + TILE - 1) // TILE, 0)
        is_here = (row_of_tiles >= tiles) & (row_of_tiles < tiles + mine)
        group, before = tl.where(is_here, g, group), tl.where(is_here, tiles, before)
        start, size = tl.where(is_here, end, start), tl.where(is_here, s, size)
        low += tl.where(g < first, rows, 0)
        high += tl.where(g < first + HELD, rows, 0)
        end, tiles = end + rows, tiles + mine
    return tiles, low, high, group, before, start, size


@_jit
def _span(sizes, index, group, GROUPS: tl.constexpr):
    """How many elements all groups before `group` have, and it itself."""
    before = tl.sum(tl.where(index < group, _all_sizes(sizes, index, GROUPS), 0), 0)
    return before, tl.maximum(tl.load(sizes + group), 0)


@_jit
def _fit(start, size, CAPACITY: tl.constexpr):
    """First element and size of a group in a buffer that packs it: what doesn't fit is cut off."""
    start = tl.minimum(start, CAPACITY).to(tl.int32)
    return start, tl.minimum(size, CAPACITY - start)


@_jit
def _locate(start, size, EXTENT: tl.constexpr, PACKED: tl.constexpr):
    """The same for any buffer; one that doesn't pack the axis has the group at 0."""
    if PACKED:
        return _fit(start, size, EXTENT)
    else:
        return tl.full((), 0, tl.int32), tl.minimum(size, EXTENT).to(tl.int32)


@_jit
def _in_bands(tile, tiles_r, TILES_C: tl.constexpr, BAND: tl.constexpr):
    """Row and column of a tile: bands of `BAND` rows one after the other, each column by column."""
    band = tile // (BAND * TILES_C)
    height = tl.minimum(tiles_r - band * BAND, BAND)
    local = tile % (BAND * TILES_C)
    return band * BAND + local % height, local // height


@_jit
def _pointers(
    operand,
    e,
    held,
    first,
    k,
    STRIDES: tl.constexpr,
    EXTENTS: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
    source,
    SOURCE: tl.constexpr,
):
    """`[tile, tile_k]` pointers from element `[first, k]` on, and which of the kept elements are in the buffer.

    Along a packed axis all are: past the buffer's end, its last row stands in for what the result leaves out. With a
    `source`, they are to the rows that it names; if `k` is packed, to the row of all of them that is 0.
    """
    kept = tl.arange(0, TILE)
    inside = first + kept < EXTENTS[0]
    operand += e.to(tl.int64) * STRIDES[0] + held.to(tl.int64) * STRIDES[1]
    if source is not None and PACKED == "kept":
        rows = _rows(source, SOURCE, EXTENTS[0], e, first, 0, TILE)
        return operand + (k + rows[:, None] * STRIDES[2] + tl.arange(0, TILE_K)[None, :]), inside
    elif source is not None:
        return operand + first + kept[:, None] + tl.zeros((1, TILE_K), tl.int64), inside
    else:
        if PACKED == "kept":
            first = tl.minimum(first, EXTENTS[0] - 1)
            kept = tl.minimum(kept, EXTENTS[0] - 1 - first)
        operand += first.to(tl.int64) * STRIDES[2] + k.to(tl.int64) * STRIDES[3]
        return operand + (kept[:, None] * STRIDES[2] + tl.arange(0, TILE_K)[None, :] * STRIDES[3]), inside


@_jit
def _rows(source, SOURCE: tl.constexpr, EXTENT: tl.constexpr, e, first, k, TILE: tl.constexpr):
    """`(tile,)` int64: the rows of the buffer that those from `first + k` on are; always some."""
    index = tl.minimum(first + k + tl.arange(0, TILE), EXTENT - 1)
    rows = tl.load(source + e.to(tl.int64) * SOURCE[0] + index)
    return tl.minimum(tl.maximum(rows, 0), SOURCE[1] - 1).to(tl.int64)


@_jit
def _load(pointers, inside, rest, EDGE: tl.constexpr):
    """A tile `[tile, tile_k]`; zeros outside of the buffer, and past the first `rest` of `k`."""
    if rest is not None:
        k = tl.arange(0, pointers.shape[1])[None, :]
        return tl.load(pointers, mask=inside[:, None] & (k < rest) if EDGE else k < rest, other=0.0)
    elif EDGE:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        return tl.load(pointers)


@_jit
def _described(
    operand,
    COUNT: tl.constexpr,
    STRIDES: tl.constexpr,
    EXTENTS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """All `COUNT` matrices of an operand as one, each below the other, as they are stored: the contiguous axis last.

    With another axis for the matrices, that is the one along which Triton would split a tile.
    """
    if STRIDES[3] == 1:
        return tl.make_tensor_descriptor(operand, [COUNT * EXTENTS[0], EXTENTS[1]], [EXTENTS[1], 1], [TILE, TILE_K])
    else:
        return tl.make_tensor_descriptor(operand, [COUNT * EXTENTS[1], EXTENTS[0]], [EXTENTS[0], 1], [TILE_K, TILE])


@_jit
def _fetch(
    tiles,
    e,
    held,
    first,
    k,
    STRIDES: tl.constexpr,
    EXTENTS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
    STACKED: tl.constexpr,
):
    """A tile `[tile, tile_k]` by TMA. Past the buffer's end it has zeros, or what is stacked there."""
    matrix = e * (STRIDES[0] // (EXTENTS[0] * EXTENTS[1])) + held * (STRIDES[1] // (EXTENTS[0] * EXTENTS[1]))
    if STACKED and STRIDES[3] == 1:
        return tiles.load([matrix * EXTENTS[0] + first, k])
    elif STACKED:
        return tl.trans(tiles.load([matrix * EXTENTS[1] + k, first]))
    elif STRIDES[3] == 1:
        return tiles.load([matrix, first, k]).reshape(TILE, TILE_K)
    else:
        return tl.trans(tiles.load([matrix, k, first]).reshape(TILE_K, TILE))


@_jit
def _scale_row(
    scales,
    SCALING: tl.constexpr,
    e,
    group,
    held,
    first,
    EXTENT: tl.constexpr,
    TILE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """`(tile,)` pointers to the scales of a tile's kept elements, in the first block along `k`.

    `SCALING` is `(way, batch stride, group stride, extent and stride of blocks along the kept axis, and along k, batch
    stride of the tensor's, whether k is packed)`. The ways: "" without scales; "total" where they don't change along
    `k`; "step" where each step over it has one; "tile" where they are multiplied into the tile; "unit" where tensor
    cores take them, in 8 bits. A group's are those of `group`, or with `-stride` those of `held`. One pointer, if the
    tile has one scale.
    """
    if SCALING[0] != "":
        ONE: tl.constexpr = SCALING[0] != "unit" and (SCALING[4] == 0 or SCALING[3] % TILE == 0)
        kept = first + tl.arange(0, 1 if ONE else TILE)
        if PACKED == "kept" or EXTENT % TILE != 0:  # else they are known to be neighbours: one address for all
            kept = tl.minimum(kept, EXTENT - 1)
        kept = kept // SCALING[3]
        which = group * SCALING[2] if SCALING[2] > 0 else held * -SCALING[2]
        return scales + e.to(tl.int64) * SCALING[1] + which + kept.to(tl.int64) * SCALING[4]
    else:
        return 0


@_jit
def _scaled(x, scales, k, SCALING: tl.constexpr, EXTENT: tl.constexpr):
    """A tile times its scales, where that is the way."""
    if SCALING[0] == "tile":
        block = tl.minimum(k + tl.arange(0, x.shape[1]), EXTENT - 1) // SCALING[5]
        return x.to(tl.float32) * tl.load(scales[:, None] + block[None, :] * SCALING[6])
    else:
        return x


@_jit
def _first(x, rest, SCALING: tl.constexpr):
    """Zeros past the first `rest` of `k`, again: there the scales may be anything."""
    if SCALING[0] == "tile":
        return tl.where((tl.arange(0, x.shape[1]) < rest)[None, :], x, 0.0)
    else:
        return x


@_jit
def _of_units(scales, k, rest, SCALING: tl.constexpr, TILE_K: tl.constexpr):
    """`[tile, blocks]` uint8: a step's scales, four of which come as one number. 0, which in either format is finite,
    past the first `rest` of `k`."""
    BLOCK: tl.constexpr = SCALING[5] // 4
    BLOCKS: tl.constexpr = TILE_K // BLOCK
    FOURS: tl.constexpr = (BLOCKS + 3) // 4
    EACH: tl.constexpr = BLOCKS // FOURS
    four = tl.arange(0, FOURS)
    pointers = scales[:, None] + (k // SCALING[5] + four)[None, :] * SCALING[6]
    inside = None if rest is None else (four * SCALING[5] < rest)[None, :]
    fours = tl.load(pointers, mask=inside, other=None if rest is None else 0)[:, :, None]
    place = (k % SCALING[5] // BLOCK + tl.arange(0, EACH))[None, None, :]
    if SCALING[8]:  # a packed group begins with any of four
        following = tl.load(pointers + SCALING[6], mask=inside, other=None if rest is None else 0)[:, :, None]
        fours = tl.where(place < 4, fours, following)
    found = (fours >> (place % 4 * 8)).to(tl.uint8).reshape(scales.shape[0], BLOCKS)
    if rest is None:
        return found
    else:
        return tl.where((tl.arange(0, BLOCKS) * BLOCK < rest)[None, :], found, 0).to(tl.uint8)


@_jit
def _between(x, first, end):
    """A tile with zeros but from `first` to `end` along `k`."""
    k = tl.arange(0, x.shape[1])[None, :]
    return tl.where((k >= first) & (k < end), x, tl.zeros_like(x))


@_jit
def _add(
    total,
    x,
    y,
    x_scales,
    y_scales,
    x_k,
    y_k,
    X_SCALING: tl.constexpr,
    Y_SCALING: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    LONGEST: tl.constexpr,
    rest=None,
):
    """`total + x @ y.T`, the product times what scales it has from `x_k` and `y_k` on.

    Hopper's tensor cores add up fp8 in too few bits, so each step's sum is added to the total here. Where they are told
    to promote it, Triton reads their registers too early, and ptxas makes them wait for each other.
    """
    if COMMON is not None:
        x, y = x.to(COMMON), y.to(COMMON)
    if X_SCALING[0] == "unit":
        of_x = _of_units(x_scales, x_k, rest, X_SCALING, x.shape[1])
        of_y = _of_units(y_scales, y_k, rest, Y_SCALING, x.shape[1])
        if x.dtype == tl.uint8:  # two numbers of 4 bits, whose scales are no powers of two
            of_x, of_y = of_x.to(tl.float8e4nv, bitcast=True), of_y.to(tl.float8e4nv, bitcast=True)
            return tl.dot_scaled(x, of_x, "e2m1", tl.trans(y), of_y, "e2m1", total)
        else:
            X_NAME: tl.constexpr = "e4m3" if x.dtype == tl.float8e4nv else "e5m2"
            Y_NAME: tl.constexpr = "e4m3" if y.dtype == tl.float8e4nv else "e5m2"
            return tl.dot_scaled(x, of_x, X_NAME, tl.trans(y), of_y, Y_NAME, total)
    elif X_SCALING[0] == "step" or Y_SCALING[0] == "step":
        wide: tl.constexpr = tl.int32 if x.dtype == tl.int8 else tl.float32
        part = tl.dot(x, tl.trans(y), input_precision=PRECISION, max_num_imprecise_acc=LONGEST, out_dtype=wide).to(
            tl.float32
        )
        if X_SCALING[0] == "step":
            part *= tl.load(x_scales + x_k // X_SCALING[5] * X_SCALING[6])[:, None]
        if Y_SCALING[0] == "step":
            part *= tl.load(y_scales + y_k // Y_SCALING[5] * Y_SCALING[6])[None, :]
        return total + part
    elif x.dtype.is_fp8():
        return total + tl.dot(x, tl.trans(y), max_num_imprecise_acc=LONGEST)
    else:
        return tl.dot(x, tl.trans(y), total, input_precision=PRECISION, out_dtype=total.dtype)


@_jit
def _end(
    total,
    up_total,
    bias,
    up_bias,
    held,
    c,
    corner,
    mine,
    inside,
    out,
    z,
    up_z,
    C: tl.constexpr,
    BIAS_STRIDES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Stores what is made of a tile of sums, from column `c` on: in the rows that are `inside`, zeros but in `mine`.

    `SLICE` columns at a time, one half after the other: the sums leave no registers for more.
    """
    COLUMNS: tl.constexpr = total.shape[1]
    if COLUMNS > SLICE:
        left, right = _halves(total)
        up_left, up_right = (None, None) if up_total is None else _halves(up_total)
        _end(
            left,
            up_left,
            bias,
            up_bias,
            held,
            c,
            corner,
            mine,
            inside,
            out,
            z,
            up_z,
            C,
            BIAS_STRIDES,
            ACTIVATION,
            SLICE,
        )
        c += COLUMNS // 2
        _end(
            right,
            up_right,
            bias,
            up_bias,
            held,
            c,
            corner,
            mine,
            inside,
            out,
            z,
            up_z,
            C,
            BIAS_STRIDES,
            ACTIVATION,
            SLICE,
        )
    else:
        in_c = c + tl.arange(0, COLUMNS)
        place = corner + (tl.arange(0, total.shape[0])[:, None] * C + in_c[None, :])
        mine, mask = mine[:, None], inside[:, None] & (in_c < C)[None, :]
        total = _biased(total, bias, held, in_c, BIAS_STRIDES[0], C)
        _store(z, place, mine, mask, total)
        result = _activated(total, ACTIVATION)
        if up_total is not None:
            up_total = _biased(up_total, up_bias, held, in_c, BIAS_STRIDES[1], C)
            _store(up_z, place, mine, mask, up_total)
            result *= up_total
        _store(out, place, mine, mask, result)


@_jit
def _halves(x):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(x.reshape(x.shape[0], 2, x.shape[1] // 2), (0, 2, 1)))


@_jit
def _biased(total, bias, held, columns, STRIDE: tl.constexpr, C: tl.constexpr):
    """A sum in float32, plus the bias of each column, if there is one."""
    total = total.to(tl.float32)
    if bias is not None:
        total += tl.load(bias + held.to(tl.int64) * STRIDE + columns, mask=columns < C, other=0.0)[None, :]
    return total


@_jit
def _store(out, place, mine, mask, x):
    """Rounds and stores a tile, zeros where it isn't `mine`, if its array is asked for."""
    if out is not None:
        tl.store(out + place, tl.where(mine, x, 0.0).to(out.dtype.element_ty), mask=mask)


@_jit
def _activated(z, ACTIVATION: tl.constexpr):
    """What `jax.nn` has by these names, in float32; of NaN it is NaN. Without branches, in few registers."""
    if ACTIVATION == "relu":
        return tl.where(z <= 0, 0.0, z)
    elif ACTIVATION == "silu":
        return z * _sigmoid(z)
    elif ACTIVATION == "gelu":
        return z * _normal(z)
    elif ACTIVATION == "gelu_tanh":  # by tanh(u) = 2 sigmoid(2 u) - 1
        return z * _sigmoid(1.5957691216 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "sigmoid":
        return _sigmoid(z)
    elif ACTIVATION == "tanh":
        return _tanh(z)
    else:
        tl.static_assert(ACTIVATION == "", "unknown activation")
        return z


@_jit
def _sigmoid(z):
    return 1 / (1 + tl.exp(-z))


@_jit
def _normal(z):
    """How much of a normal distribution is below `z`.

    Above `t` it is `exp(-t**2 / 2)` times what a polynomial in `u` fits to 2e-7 of itself.
    """
    t = tl.abs(z)
    u = 1 / (1 + 0.3 * t)
    p = 0.12856111 + u * (-0.053682726 + u * (0.20635258 + u * (-0.15720259 + u * 0.035674665)))
    p = u * (0.1196293 + u * (0.12075393 + u * (0.09991366 + u * p)))
    above = p * tl.exp(-0.5 * t * t)
    return tl.where(z < 0, above, 1 - above)


@_jit
def _tanh(z):
    """Of small numbers by their odd powers, which fit to 1e-7 of the result."""
    t, s = tl.abs(z), z * z
    small = z + z * s * (-0.33333144 + s * (0.13325878 + s * (-0.05304555 + s * 0.01724163)))
    large = 1 - 2 / (1 + tl.exp(2 * t))
    return tl.where(t < 0.5, small, tl.where(z < 0, -large, large))
