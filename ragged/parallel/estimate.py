"""`estimate`: what a layer of experts over devices sends, keeps and computes, on paper.

A collective over `n` devices has a larger side, `B` bytes on each: the operand of an all-to-all or reduce-scatter, the
result of an all-gather. An `n`th of it stays on the device, `B (n - 1) / n` bytes are sent. These are all the `B`s of a
layer with `t` tokens of `d` numbers on each device, `k` rows of each, `g` experts, and `S` slots: `n` times what a
device may send to another one. A number has `s` bytes, the float32 that it is summed in has 4.

    transport  sizes                 dispatch  combine      combine gradient  dispatch gradient
    "dense"    4 n g                 S d s     S d s        S d s             S d s
    "ragged"   4 n g                 S d s     S d s        S d s             S d s
    "ring"     4 (n g + n t k + S)   n t d s   n t (d+k) 4  n t (d+k) 4       n t d 4

`"ragged"` has such buffers, of which only the rows that are there travel. (Its gradients exchange offsets too, `4 n`
bytes at a time, which aren't counted.) For `"ring"` each device must know the slots of all tokens, and their weights.
Each chunk has sizes of its own; the other bytes are those of all chunks.
"""

from dataclasses import dataclass
from math import inf, log10, prod
from typing import Any

import jax.numpy as jnp

from ragged._errors import Site, is_count
from ragged.parallel.exchange import TRANSPORTS, wire_cast
from ragged.quant.formats import accumulator_dtype
from ragged.quant.recipe import Cast

FORWARD, GRADIENT = ("sizes", "dispatch", "combine"), ("combine gradient", "dispatch gradient")
WAYS = {"forward": FORWARD, "gradient": GRADIENT}


@dataclass(frozen=True)
class Estimate:
    """What `ragged.parallel.estimate` finds, for one device and one layer, all chunks together. Prints as a table.

    **Fields:** the first three by `"sizes"`, `"dispatch"`, `"combine"`, `"combine gradient"`, `"dispatch gradient"`:

    - `program`: bytes of the collectives' larger sides, from the program's shapes: with what a device keeps for itself.
    - `sent`: bytes that a device sends to others, if all experts are as likely. Those of `"dense"` and `"ring"` don't
      depend on that. Rows that go to two experts of one device are sent twice.
    - `sent_at_most`: if none of a device's rows stay; and back, if all of its slots are full. What a device receives is
      at most that of the opposite: in dispatch, what is sent in combine.

    Of a chunk:

    - `capacity`: the rows that a device has room for.
    - `buffer`: bytes of as many rows of `d` numbers. There are several: rows as they are sent, as they come, by group.

    Of the layer:

    - `experts`: bytes of the device's matrices.

    By `"forward"`, `"gradient"`:

    - `flops`: FLOP of the products, of as many rows as come if all experts are as likely.
    - `exchange`, `products`: seconds that each takes alone.
    - `overlapped`: seconds of `exchange` during which products run, at best.
    """

    of: str
    program: dict[str, int]
    sent: dict[str, float]
    sent_at_most: dict[str, float]
    capacity: int
    buffer: int
    experts: int
    flops: dict[str, float]
    exchange: dict[str, float]
    products: dict[str, float]
    overlapped: dict[str, float]

    @property
    def seconds(self) -> dict[str, float]:
        """Of exchange and products together: `exchange + products - overlapped`."""
        return {way: self.exchange[way] + self.products[way] - self.overlapped[way] for way in self.exchange}

    def __str__(self) -> str:
        def line(name: str, *cells: str) -> str:
            return f"{name:<18}" + "".join(f"{cell:>13}" for cell in cells)

        sent = [[_si(x[phase], "B") for x in (self.program, self.sent, self.sent_at_most)] for phase in self.program]
        columns = self.exchange, self.products, self.overlapped, self.seconds
        seconds = [[_si(x[way], "s") for x in columns] + [_si(self.flops[way], "FLOP")] for way in self.flops]
        return "\n".join(
            [
                self.of,
                line("", "program", "sent", "sent at most"),
                *(line(phase, *cells) for phase, cells in zip(self.program, sent, strict=True)),
                line("", "exchange", "products", "overlapped", "in all", "FLOP"),
                *(line(way, *cells) for way, cells in zip(self.flops, seconds, strict=True)),
                f"a buffer of {self.capacity} rows: {_si(self.buffer, 'B')}; experts: {_si(self.experts, 'B')}",
            ]
        )


def _si(x: int | float, unit: str) -> str:
    power = min(max(int(log10(float(f"{x:.3g}")) // 3), -3), 5) if x else 0
    return f"{x / 1000.0**power:.3g} {' kMGTPnµm'[power].strip()}{unit}"


def estimate(
    *,
    tokens: int | Any,
    d: int | Any,
    hidden: int | Any,
    experts: int | Any,
    top_k: int | Any,
    devices: int | Any,
    transport: str | Any = "ragged",
    dtype: Any = "bfloat16",
    capacity: int | Any = None,
    chunks: int | Any = 1,
    wire: str | Cast | Any = None,
    gated: bool | Any = True,
    link: float | Any = 450e9,
    flops: float | Any = 989e12,
) -> Estimate:
    """What a layer of experts sends, keeps and computes on each of `devices`, before there is any.

    The layer is `ragged.exchange(route, ...)`, `dispatch`, products with each expert's matrices, and `combine` with
    weights, along one mesh axis. The gradient is that by tokens, weights and all matrices, with what the forward pass
    kept; other axes' sums of the matrices' gradients, `experts` bytes each, aren't counted.

    **Arguments:**

    - `tokens`: of one device, with `d` numbers of `dtype` each, and `top_k` experts out of `experts`, which `devices`
      divide.
    - `hidden`: what an expert's matrices widen to: `[d, hidden]`, twice if `gated`, and `[hidden, d]`.
    - `transport`, `capacity`, `chunks`, `wire`: as for `ragged.exchange`.
    - `link`: bytes a second that one device sends while it receives as many. By default those of an H200's NVLink.
    - `flops`: FLOP a second of one device's products. By default an H200's published peak in bfloat16.

    Seconds are bytes over `link` and FLOP over `flops`, where all experts are as likely: latencies, congestion, work
    on rows between the two, and uneven routing come on top. The first chunk's dispatch and the last one's combine
    overlap with nothing.

    **Raises:** `ValueError` for sizes and names, `TypeError` for dtypes and what is no `wire`.

    !!! example
        ```python
        import ragged
        print(ragged.parallel.estimate(tokens=4096, d=7168, hidden=2048, experts=256, top_k=8, devices=64, chunks=4))
        ```
    """
    asked = {"tokens": tokens, "d": d, "hidden": hidden, "experts": experts, "top_k": top_k, "devices": devices}
    site = Site("ragged.parallel.estimate", asked | {"transport": transport, "capacity": capacity, "chunks": chunks})
    for name, value in (asked | {"chunks": chunks}).items():
        if not is_count(value):
            site.fail(ValueError, f"`{name}` is {value!r}.", "It must be a positive int.")
    for name, value in (("link", link), ("flops", flops)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            site.fail(ValueError, f"`{name}` is {value!r}.", "It must be a positive number, a second.")
    tokens, d, hidden, experts, top_k, n, chunks = map(int, (*asked.values(), chunks))
    if top_k > experts:
        site.fail(ValueError, f"`top_k` is {top_k} of {experts} experts.", "A token goes to no expert twice.")
    if experts % n:
        site.fail(ValueError, f"{n} devices don't divide {experts} experts.", "Each device holds as many.")
    if chunks > tokens:
        site.fail(ValueError, f"`chunks` is {chunks}.", f"Pass at most the {tokens} tokens of a device.")
    chunks = 1 if n == 1 else chunks
    if transport not in TRANSPORTS:
        site.fail(ValueError, f"`transport` is {transport!r}.", f"Pass one of {', '.join(TRANSPORTS)}.")
    if capacity is not None and not is_count(capacity, n * chunks):
        mend = f"Pass at least {n * chunks}, one row a chunk from each device, or None for the worst case."
        site.fail(ValueError, f"`capacity` is {capacity!r}.", mend)
    try:
        itemsize, wide = jnp.dtype(dtype).itemsize, accumulator_dtype(dtype).itemsize
    except TypeError:
        itemsize = wide = 0
    if dtype is None or not itemsize or not jnp.issubdtype(dtype, jnp.floating):
        site.fail(TypeError, f"`dtype` is {dtype!r}.", "Rows are floats: 'bfloat16', 'float32'.")

    row = d * itemsize  # bytes
    if wire is not None:
        scaling = wire_cast(site, wire).scaling
        row = d + prod(scaling.shape((1, d), -2, 1)) * scaling.dtype.itemsize
    rows = [(tokens * (i + 1) // chunks - tokens * i // chunks) * top_k for i in range(chunks)]  # of a device, by chunk
    each = [x if capacity is None else min(x, int(capacity) // n // chunks) for x in rows]  # slots for another device
    slots, everyone = n * sum(each), n * tokens
    whole = {"sizes": 4 * chunks * n * experts} | dict.fromkeys((*FORWARD[1:], *GRADIENT), 0)  # whatever the routing
    by_row = dict.fromkeys(whole, d * itemsize) | {"sizes": 0, "dispatch": row}  # bytes of each
    if transport == "ring":
        by_row = dict.fromkeys(whole, 0)
        whole["sizes"] += 4 * (everyone * top_k + slots)
        whole["dispatch"], whole["dispatch gradient"] = everyone * row, everyone * d * wide
        whole["combine"] = whole["combine gradient"] = everyone * (d + top_k) * wide

    def sent(there: int | float, back: int | float) -> dict[str, float]:
        """If a device sends so many rows to experts, and back from its own."""
        leave = dict.fromkeys(whole, back) | dict.fromkeys(("dispatch", "combine gradient"), there)
        return {phase: whole[phase] * (n - 1) / n + leave[phase] * by_row[phase] for phase in whole}

    even = sum(map(float, map(min, [x / n for x in rows], each)))  # rows to each device
    full = [(n - 1) * x for x in each]  # slots for all others
    products = {"forward": n * even * 2 * d * hidden * (3 if gated else 2)}
    products["gradient"] = 2 * products["forward"]
    leave, most = ((n - 1) * even, sum(map(min, rows, full))) if transport == "ragged" else (sum(full), sum(full))
    expected = sent(leave, leave)
    exchange = {way: sum(expected[phase] for phase in phases) / link for way, phases in WAYS.items()}
    seconds = {way: work / flops for way, work in products.items()}
    return Estimate(
        of=f"{transport} over {n} devices, each {tokens} tokens of {d} {jnp.dtype(dtype).name}"
        f" to {top_k} of {experts} experts, chunks={chunks}",
        program={phase: whole[phase] + slots * by_row[phase] for phase in whole},
        sent=expected,
        sent_at_most=sent(most, sum(full)),
        capacity=n * max(each),
        buffer=n * max(each) * d * itemsize,
        experts=experts // n * d * hidden * (3 if gated else 2) * itemsize,
        flops=products,
        exchange=exchange,
        products=seconds,
        overlapped={way: min(seconds[way], exchange[way] * (chunks - 1) / chunks) for way in WAYS},
    )
