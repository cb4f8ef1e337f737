"""What kernels with an epilogue cost: arithmetic, traffic, and memory. What they compute is in `tests/contract`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragged.backends import cache
from ragged.backends.base import Launch, Target
from ragged.backends.gpu import backend
from ragged.backends.tpu import tiles, units
from ragged.product.layout import Product
from ragged.product.operands import Call, Epilogue, Operand, Operands, Options
from tests.products import epilogue_spec

BF16 = jnp.dtype(jnp.bfloat16)


def test_costs_on_a_gpu() -> None:
    """A gated product multiplies twice, reads both matrices, and stores three results."""
    aval = jax.ShapeDtypeStruct
    w, bias = Operand(aval((4, 32, 48), BF16)), aval((4, 48), BF16)
    rows, sizes = Operand(aval((64, 32), BF16)), {"m": aval((4,), jnp.int32)}
    both = Operands(rows, w, sizes, None, Epilogue(None, bias, w, bias))
    call = Call(Product("mk", "kn", "mn", "m"), (64, 48), BF16, Options(), out_batch=True)
    launches: list[Any] = [
        backend.plan(call._replace(epilogue=spec), x, Target(interpret=True, device=("NVIDIA H200", 132)))
        for spec, x in ((None, both._replace(epilogue=Epilogue())), (epilogue_spec("silu", (True,) * 3), both))
    ]
    assert all(isinstance(each, Launch) for each in launches)
    plain, gated = launches
    assert gated.flops == 2 * plain.flops
    result, matrix, row = 64 * 48 * 2, 4 * 32 * 48 * 2, 4 * 48 * 2
    assert gated.bytes_accessed - plain.bytes_accessed == 2 * result + matrix + 2 * row
    # What is tuned for one isn't for the other.
    assert len({cache.product_key(each.call, both, "triton_gpu") for each in launches}) == 2
    for each, products in ((plain, 1), (gated, 2)):
        work = backend.work(each, both._replace(sizes={"m": np.array([30, 0, 20, 5])}))
        config = each.config
        assert work.flops == products * work.visits * 2 * config.m * config.n * config.k


def test_a_second_matrix_takes_memory_of_a_tpu() -> None:
    """Buffers of it, and an accumulator of its product; each array that is stored has buffers too."""
    dot = units.dot(jnp.bfloat16, jnp.bfloat16, tiles.chip(None))
    one = tiles.Problem("rows", 4096, 2048, 1024, groups=8, dtypes=(BF16, BF16, BF16), dot=dot, buffers=2)
    tile = (512, 256, 128)
    gated, trained = one._replace(products=2), one._replace(products=2, results=3)
    assert tiles.vmem(gated, tile) - tiles.vmem(one, tile) == 2 * 256 * 128 * 2 + 2 * 512 * 128 * 4
    assert tiles.vmem(trained, tile) - tiles.vmem(gated, tile) == 2 * 2 * 512 * 128 * 2


def test_blocks_of_one_weight_are_inside_of_it() -> None:
    """Of the gate and of the other matrix, for each block of the result. A TPU would copy from past the end."""
    dot = units.dot(jnp.bfloat16, jnp.bfloat16, tiles.chip(None))
    one = tiles.Problem("rows", 64, 128, 300, groups=2, dtypes=(BF16, BF16, BF16), dot=dot, buffers=2, products=2)
    blocks = {
        columns: [
            [int(tiles.column_block(one._replace(columns=columns, b=b), tile, which, j)) for which in (0, 1)]
            for j in range(-(-b // tile))
        ]
        for columns, b, tile in (("", 300, 256), ("halves", 384, 128), ("interleaved", 300, 256))
    }
    assert blocks == {"": [[0, 0], [1, 1]], "halves": [[0, 3], [1, 4], [2, 5]], "interleaved": [[0, 1], [2, 2]]}
