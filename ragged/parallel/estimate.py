"""`estimate`: communication, memory and computation of a layer of experts, computed without running it.

The cost of a collective over `n` devices follows from the bytes `B` of its larger side on each device: the operand of
an all-to-all or a reduce-scatter, the result of an all-gather. `B (n - 1) / n` bytes are sent; the rest stays on the
device.

The table has `B` for every collective of a layer. Each device has `t` tokens of `d` numbers, and a buffer of `S` rows.
There are `k` rows per token and `g` experts. A number has `s` bytes; a number of a sum, in float32, has 4.

    transport  sizes             dispatch          combine           combine gradient    dispatch gradient
    "dense"    4 n g             S d s             S d s             S d s               S d s
    "ragged"   4 n g             max(S, t k) d s   max(S, t k) d s   max(S, t k) d s     max(S, t k) d s
    "ring"     4 n (g + 2 t k)   n t d s           n t (d + k) 4     n t (d s + k 4)     n t d 4

`"ragged"` sends only the rows that the capacity admits. (Its gradients also exchange offsets, `4 g` bytes each time,
which aren't counted.) With `"ring"`, each device also gets the routes and the weights of all tokens. With chunks, the
sizes are sent once per chunk; the other bytes are totals over all chunks.
"""

from dataclasses import dataclass
from math import inf, log10, prod
from typing import Any

import numpy as np

from ragged.core.errors import Site, is_count
from ragged.core.formats import accumulator_dtype, float_dtype
from ragged.parallel.exchange import TRANSPORTS, chunk_capacities, min_capacity, wire_cast
from ragged.quant.recipe import Cast

FORWARD, GRADIENT = ("sizes", "dispatch", "combine"), ("combine gradient", "dispatch gradient")
PASSES = {"forward": FORWARD, "gradient": GRADIENT}


@dataclass(frozen=True)
class Estimate:
    """The result of `ragged.parallel.estimate`, for one device and one layer with all its chunks.

    **Fields:** dicts keyed by `"sizes"`, `"dispatch"`, `"combine"`, `"combine gradient"`, `"dispatch gradient"`:

    - `program`: bytes of the larger side of each collective, including bytes that stay on the device.
    - `sent`: bytes that a device sends to others if all experts are equally likely. For `"dense"` and `"ring"` it
      doesn't depend on the routing. With `"ragged"`, a token's row is sent twice if two of its experts are on one
      device.
    - `sent_at_most`: the maximum of `sent` over all routings. In dispatch, all rows of the device go to other devices;
      in combine, its buffer is full. With `"ragged"` and no `wire`, a device receives at most
      what this dict has for the other direction: in dispatch, the entry of `"combine"`. With the other transports, it
      receives as many bytes as it sends.

    For each chunk:

    - `capacity`: the number of rows in a device's buffer.
    - `buffer`: bytes of this many rows of `d` numbers. A device has several such buffers: rows to send, received rows,
      and rows sorted by group.

    For the layer:

    - `experts`: bytes of the experts' matrices on a device.

    Dicts keyed by `"forward"`, `"gradient"`:

    - `flops`: FLOP of the products, if all experts are equally likely.
    - `exchange`, `products`: seconds of the exchanges alone and of the products alone.
    - `overlapped`: seconds of `exchange` during which products run, at best.

    `of` describes the layer, as text.
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
        """Seconds in total, keyed by `"forward"` and `"gradient"`: `exchange + products - overlapped`."""
        return {key: self.exchange[key] + self.products[key] - self.overlapped[key] for key in self.exchange}

    def __str__(self) -> str:
        def line(name: str, *cells: str) -> str:
            return f"{name:<18}" + "".join(f"{cell:>13}" for cell in cells)

        sent = [[_si(x[phase], "B") for x in (self.program, self.sent, self.sent_at_most)] for phase in self.program]
        columns = self.exchange, self.products, self.overlapped, self.seconds
        seconds = [[_si(x[key], "s") for x in columns] + [_si(self.flops[key], "FLOP")] for key in self.flops]
        return "\n".join(
            [
                self.of,
                line("", "program", "sent", "sent at most"),
                *(line(phase, *cells) for phase, cells in zip(self.program, sent, strict=True)),
                line("", "exchange", "products", "overlapped", "in all", "FLOP"),
                *(line(key, *cells) for key, cells in zip(self.flops, seconds, strict=True)),
                f"a buffer of {self.capacity} rows: {_si(self.buffer, 'B')}; experts: {_si(self.experts, 'B')}",
            ]
        )


def _si(x: int | float, unit: str) -> str:
    """`x` with an SI prefix and three digits: `"1.23 GB"`."""
    power = min(max(int(log10(float(f"{x:.3g}")) // 3), -3), 5) if x else 0
    return f"{x / 1000.0**power:.3g} {' kMGTPnµm'[power].strip()}{unit}"


def estimate(
    *,
    tokens: int,
    d: int,
    hidden: int,
    experts: int,
    top_k: int,
    devices: int,
    transport: str = "ragged",
    dtype: Any = "bfloat16",
    capacity: int | None = None,
    chunks: int = 1,
    wire: str | Cast | None = None,
    gated: bool = True,
    link: float = 450e9,
    flops: float = 989e12,
) -> Estimate:
    """Estimates what a layer of experts sends, stores and computes on each device.

    The layer is `ragged.exchange(route, ...)`, `dispatch`, products with each expert's matrices, and `combine` with
    weights, along one mesh axis. The gradient is with respect to tokens, weights and all matrices, without
    recomputation. Sums of the matrices' gradients over other mesh axes, `Estimate.experts` bytes each, aren't counted.

    **Arguments:**

    - `tokens`: number of tokens on one device. Each has `d` numbers of `dtype`, and goes to `top_k` of `experts`
      experts. `devices` must divide `experts`.
    - `hidden`: the hidden dim of an expert, whose matrices are `[d, hidden]` (two if `gated`) and `[hidden, d]`.
    - `transport`, `capacity`, `chunks`, `wire`: as for `ragged.exchange`, except that there is no `transport=None`.
    - `link`: bytes per second that one device sends while it receives as many. The default is an H200's NVLink.
    - `flops`: FLOP per second of one device's products. The default is an H200's published peak in bfloat16.

    Seconds are bytes over `link` and FLOP over `flops`. Latencies, congestion, other operations on rows, and uneven
    routing add to them. The first chunk's dispatch and the last chunk's combine can't overlap with products.

    **Raises:** `ValueError` for invalid sizes and names, `TypeError` for invalid dtypes and values of `wire`.

    !!! example
        ```python
        import ragged
        print(ragged.parallel.estimate(tokens=4096, d=7168, hidden=2048, experts=256, top_k=8, devices=64, chunks=4))
        ```
    """
    sizes = {"tokens": tokens, "d": d, "hidden": hidden, "experts": experts, "top_k": top_k, "devices": devices}
    site = Site("ragged.parallel.estimate", sizes | {"transport": transport, "capacity": capacity, "chunks": chunks})
    link, flops = _checked_rates(site, {"link": link, "flops": flops})
    tokens, d, hidden, experts, top_k, n, chunks = _checked_counts(site, sizes | {"chunks": chunks})
    if transport not in TRANSPORTS:
        site.fail(ValueError, f"`transport` is {transport!r}.", f"Pass one of {', '.join(TRANSPORTS)}.")
    if capacity is not None and not is_count(capacity, least := min_capacity(n, transport, chunks)):
        each = "one row per chunk from each device" if transport == "dense" else "one row per chunk"
        site.fail(ValueError, f"`capacity` is {capacity!r}.", f"Pass at least {least}, {each}, or None.")
    dtype = float_dtype(site, dtype)
    itemsize, sum_itemsize = int(dtype.itemsize), int(accumulator_dtype(dtype).itemsize)
    row = d * itemsize  # bytes
    if wire is not None:
        scaling = wire_cast(site, wire).scaling
        row = d + prod(scaling.shape((1, d), -2, 1)) * scaling.dtype.itemsize
    # For each chunk: the number of rows of a device's tokens, and of rows in its buffer.
    rows = [(tokens * (i + 1) // chunks - tokens * i // chunks) * top_k for i in range(chunks)]
    buffers, all_tokens = chunk_capacities(n, transport, rows, capacity), n * tokens
    # Bytes that don't depend on the routing, and bytes of each row that is sent.
    fixed = {"sizes": 4 * chunks * n * experts} | dict.fromkeys((*FORWARD[1:], *GRADIENT), 0)
    by_row = dict.fromkeys(fixed, d * itemsize) | {"sizes": 0, "dispatch": row}
    if transport == "ring":
        by_row = dict.fromkeys(fixed, 0)
        fixed["sizes"] += 4 * 2 * all_tokens * top_k
        fixed["dispatch"], fixed["dispatch gradient"] = all_tokens * row, all_tokens * d * sum_itemsize
        fixed["combine"] = all_tokens * (d + top_k) * sum_itemsize
        fixed["combine gradient"] = all_tokens * (d * itemsize + top_k * sum_itemsize)

    def sent(to_experts: int | float, back: int | float) -> dict[str, float]:
        """Bytes that a device sends in each phase: `to_experts` rows to the experts of other devices, and `back` rows
        from its own experts."""
        leaving = dict.fromkeys(fixed, back) | dict.fromkeys(("dispatch", "combine gradient"), to_experts)
        return {phase: fixed[phase] * (n - 1) / n + leaving[phase] * by_row[phase] for phase in fixed}

    even = sum(min(x, buffer) / n for x, buffer in zip(rows, buffers, strict=True))  # rows to each device
    products = {"forward": n * even * 2 * d * hidden * (3 if gated else 2)}
    products["gradient"] = 2 * products["forward"]
    # Number of rows that leave a device: expected in each phase, at most in dispatch, at most in combine. `"dense"`
    # always sends all slots.
    leaving = max_leaving = max_returning = sum(buffers) // n * (n - 1)
    larger = buffers
    if transport == "ragged":
        pairs = [*zip(rows, buffers, strict=True)]
        leaving, larger = (n - 1) * even, [max(pair) for pair in pairs]
        max_leaving = sum(min(x, (n - 1) * buffer) for x, buffer in pairs)
        max_returning = sum(min((n - 1) * x, buffer) for x, buffer in pairs)
    expected = sent(leaving, leaving)
    exchange = {key: sum(expected[phase] for phase in phases) / link for key, phases in PASSES.items()}
    seconds = {key: work / flops for key, work in products.items()}
    return Estimate(
        of=f"{transport} over {n} devices, each {tokens} tokens of {d} {dtype.name}"
        f" to {top_k} of {experts} experts, chunks={chunks}",
        program={phase: fixed[phase] + sum(larger) * by_row[phase] for phase in fixed},
        sent=expected,
        sent_at_most=sent(max_leaving, max_returning),
        capacity=max(buffers),
        buffer=max(buffers) * d * itemsize,
        experts=experts // n * d * hidden * (3 if gated else 2) * itemsize,
        flops=products,
        exchange=exchange,
        products=seconds,
        overlapped={key: min(seconds[key], exchange[key] * (chunks - 1) / chunks) for key in PASSES},
    )


def _checked_counts(site: Site, counts: dict[str, Any]) -> tuple[int, ...]:
    """The sizes as ints, in the order of `counts`. With one device, there is one chunk."""
    for name, value in counts.items():
        if not is_count(value):
            site.fail(ValueError, f"`{name}` is {value!r}.", "It must be a positive int.")
    tokens, d, hidden, experts, top_k, n, chunks = map(int, counts.values())
    if top_k > experts:
        site.fail(ValueError, f"`top_k` is {top_k} of {experts} experts.", f"Pass at most {experts}.")
    if experts % n:
        problem = f"{experts} experts can't be divided among {n} devices."
        site.fail(ValueError, problem, "Each device has the same number of experts.")
    if chunks > tokens:
        site.fail(ValueError, f"`chunks` is {chunks}.", f"Pass at most the {tokens} tokens of a device.")
    return tokens, d, hidden, experts, top_k, n, 1 if n == 1 else chunks


def _checked_rates(site: Site, rates: dict[str, Any]) -> list[float]:
    for name, value in rates.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < inf:
            site.fail(ValueError, f"`{name}` is {value!r}.", "It must be a positive number per second.")
    return [float(value) for value in rates.values()]
