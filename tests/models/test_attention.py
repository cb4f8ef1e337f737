"""Attention over packed sequences: three products of the library, and JAX's own kernels with a tensor's segment ids."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention as splash

import ragged
from ragged import GroupedTensor
from tests.models.blocks import ROOT, example

LENGTHS = (17, 0, 1, 30, 40)
ROWS, TOTAL = 128, sum(LENGTHS)


def page(name: str) -> Any:
    """A function of the page on products, of arrays."""
    text = (ROOT / "docs" / "layouts.md").read_text()
    code = next(block for block in text.split("```python\n")[1:] if f"def {name}" in block).split("\n\n\npacked")[0]
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "ragged": ragged}
    exec(code, names)

    def of_arrays(q: Any, k: Any, v: Any, **options: Any) -> Any:
        tensors = (GroupedTensor(x, jnp.array(LENGTHS, jnp.int32)) for x in (q, k, v))
        return names[name](*tensors, **options).data

    return of_arrays


def loop(q: np.ndarray, k: np.ndarray, v: np.ndarray, dy: np.ndarray, window: int, sinks: np.ndarray) -> Any:
    """Sequence by sequence, head by head, in float64: `(y, dq, dk, dv, dsinks)`."""
    y, dq, dk, dv, dsinks = (np.zeros(x.shape) for x in (q, q, k, v, sinks))
    heads, scale, start = q.shape[1], q.shape[2] ** -0.5, 0
    for n in LENGTHS:
        own, i = slice(start, start + n), np.arange(n)
        hidden = (i[:, None] < i) | (i[:, None] - i >= window)
        for head in range(heads):
            at, shared = np.s_[own, head], np.s_[own, head * k.shape[1] // heads]
            e = np.where(hidden, 0, np.exp(q[at] @ k[shared].T * scale))
            sink = np.exp(sinks[head])
            total = e.sum(1, keepdims=True) + sink
            p = e / total
            y[at] = p @ v[shared]
            dp = dy[at] @ v[shared].T
            inner = (p * dp).sum(1, keepdims=True)
            ds = p * (dp - inner) * scale
            dq[at] += ds @ k[shared]
            dk[shared] += ds.T @ q[at]
            dv[shared] += p.T @ dy[at]
            dsinks[head] -= (sink / total * inner).sum()
        start += n
    return y, dq, dk, dv, dsinks


def check(
    attend: Any, heads: int, kv_heads: int, size: int, tail: float, window: int = ROWS, sinks: Any = None
) -> None:
    """The result and all gradients. `tail`: what lies behind the last sequence. If NaN, results are zero there."""
    rng = np.random.default_rng(0)
    q, dy = rng.normal(size=(2, ROWS, heads, size)).astype(np.float32)
    k, v = rng.normal(size=(2, ROWS, kv_heads, size)).astype(np.float32)
    for x in (q, k, v, dy):
        x[TOTAL:] = tail
    more = () if sinks is None else (sinks.astype(np.float32),)

    def both(dy: Any, *args: Any) -> Any:
        y, pull = jax.vjp(attend, *args)
        return y, *pull(dy)

    wide = [np.nan_to_num(x).astype(np.float64) for x in (q, k, v, dy)]
    want = loop(wide[0], wide[1], wide[2], wide[3], window, np.full(heads, -np.inf) if sinks is None else sinks)
    for got, expected in zip(jax.jit(both)(dy, q, k, v, *more), want, strict=False):
        error = np.abs(np.asarray(got, np.float64) - expected)[:TOTAL].max()
        assert got.shape == expected.shape and error < 2e-6 * np.abs(expected).max()
        assert np.isfinite(tail) or not np.asarray(got)[TOTAL:].any()


@pytest.mark.long
def test_three_products() -> None:
    """With a window, sinks, and query heads that share heads of keys and values."""
    sinks = np.array([0.5, -2.0, 3.0, 0.0, -0.5, 1.0])

    def attend(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        lengths = jnp.array(LENGTHS, jnp.int32)
        return example("varlen_attention").attention(q, k, v, lengths, max(LENGTHS), window=jnp.int32(7), sinks=sinks)

    check(attend, 6, 2, 8, np.nan, window=7, sinks=sinks)


@pytest.mark.long
def test_padded_attention() -> None:
    lengths = jnp.array(LENGTHS, jnp.int32)
    check(partial(example("varlen_attention").padded_attention, lengths=lengths, longest=max(LENGTHS)), 2, 2, 4, np.nan)


def test_dot_product_attention() -> None:
    """Segment ids from a tensor's groups. Query heads share heads of keys and values."""
    check(page("dot_product_attention"), 6, 2, 8, 1.0)


@pytest.mark.long
def test_splash_attention() -> None:
    """Interpreted, forward and backward."""
    blocks = dict.fromkeys(("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv"), 128)
    sizes = splash.BlockSizes(**blocks, block_kv_dkv_compute=128, use_fused_bwd_kernel=True)
    check(partial(page("splash_attention"), block_sizes=sizes, interpret=True), 2, 2, 128, 1.0)
