"""Products with biases, activations and gates, and of gathered rows, equal a loop over groups; so do derivatives.

Each case is a program, which is compiled once and runs on many draws of sizes and contents.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests import gpu
from tests.cases import named
from tests.contract.epilogues import ACTIVATIONS, Epilogue, epilogue_draws

FP8 = "float8_e4m3fn"
Case = tuple[int, Epilogue]  # how many draws, of which program


def by_default() -> Iterator[Case]:
    both: dict[str, Any] = {"gate": True, "bias": "each one"}
    yield 30, Epilogue("forward", "bfloat16", activation="silu", **both)
    yield 30, Epilogue("batched", "bfloat16", activation="relu", bias="one", save="out")
    yield 30, Epilogue("forward", "bfloat16", bias="each", held=3, existing=True)
    yield 30, Epilogue("batched", "bfloat16", bias="one", shared="rhs", bias_dtype="float32")
    yield 20, Epilogue("forward", order=2, activation="tanh", **both)
    yield 12, Epilogue("forward", "bfloat16", mapped="lhs sizes up bias", activation="sigmoid", **both)
    yield 12, Epilogue("forward", mapped="rhs", context="devices", activation="silu", gate=True)
    yield 30, Epilogue("forward", "bfloat16", top_k=2, activation="silu", gate=True)
    # The last tile of columns is partial, and the last tile of the second part would be past the end.
    yield 9, Epilogue("forward", backend="pallas_tpu", tiles=(16, 128, 256), columns="interleaved", n=300, **both)
    casts: dict[str, Any] = {"lhs_cast": (FP8, "row"), "rhs_cast": (FP8, "mx"), "k": 72, "chip": gpu.FIRST_WITH_FP8}
    yield 3, Epilogue("forward", backend="triton_gpu", activation="gelu", out_dtype="float32", **casts, **both)


def rotated(*options: Any) -> Iterator[tuple[str, str, Any]]:
    """Each option with a layout and a dtype."""
    layouts, dtypes = itertools.cycle(("forward", "batched", "inner_rows")), itertools.cycle(("bfloat16", "float32"))
    return zip(layouts, dtypes, options, strict=False)


SMOOTH = [name for name in ACTIVATIONS if name not in ("relu", "relu squared", "clamped")]
UNGATED = [name for name in ACTIVATIONS if name != "clamped"]


def long() -> Iterator[Case]:
    biases, saves = itertools.cycle(("each", "one", "no")), itertools.cycle(("pre", "out", "out"))
    pairs = itertools.cycle(" ".join(pair) for pair in itertools.product(("each", "one", "no"), repeat=2))
    columns = itertools.cycle(("halves", "interleaved", "", "", ""))
    for layout, dtype, activation in rotated(*UNGATED[::2]):
        yield 30, Epilogue(layout, dtype, activation=activation, bias=next(biases), save=next(saves))
    for layout, dtype, activation in rotated(*ACTIVATIONS):
        its: dict[str, Any] = {"bias": next(pairs), "save": next(saves)}
        its |= {"columns": next(columns)} if layout != "inner_rows" else {}  # one weight's groups are matrices
        yield 30, Epilogue(layout, dtype, activation=activation, gate=True, **its)
    for layout, _, activation in rotated(*SMOOTH[::3]):
        one = next(columns)
        its = {"gate": True, "bias": "each one"} if one else {"bias": "each"}
        its |= {"columns": one} if layout != "inner_rows" else {}
        yield 20, Epilogue(layout, order=2, activation=activation, save=next(saves), **its)
    operands = ("lhs", "up", "up_bias", "lhs sizes", "sizes", "lhs rhs up bias up_bias")
    for mapped, context in zip(operands, itertools.cycle(("jit", "devices")), strict=False):
        one = next(columns)
        its = {"activation": "clamped" if one else "silu", "columns": one, "held": 3 * (next(saves) == "out")}
        yield 12, Epilogue("forward", mapped=mapped, context=context, gate=True, bias="each one", **its)
    yield 30, Epilogue("forward", "float16", activation="tanh", bias="each", existing=True, held=3)
    yield 30, Epilogue("forward", "bfloat16", activation="silu", bias="one", shared="rhs", bias_dtype="float32")
    yield 30, Epilogue("batched", "bfloat16", "", "float32", bias="one", existing=True)
    contexts = "eager", "constants", "checkpoint", "scan", "shard_map", "shard_map unchecked", "disable_jit"
    for i, context in enumerate(contexts):
        if i % 2:
            yield 3, Epilogue("forward", "bfloat16", context=context, activation="gelu", gate=True, bias="each one")
        else:
            yield 3, Epilogue("forward", context=context, top_k=2, activation="tanh", bias="each", save="out")
    yield 30, Epilogue("forward", activation="sigmoid", bias="each", held=3)
    yield 12, Epilogue("forward", mapped="rhs", context="devices", activation="softplus", bias="each")
    for mapped, context in (("lhs", "jit"), ("rhs", "devices"), ("lhs sizes rhs", "jit"), ("sizes", "devices")):
        yield 12, Epilogue("forward", top_k=2, mapped=mapped, context=context)
    yield 20, Epilogue("forward", top_k=2, order=2, mapped="sizes")
    yield 20, Epilogue("forward", top_k=1, order=2)
    yield 20, Epilogue("forward", top_k=3, order=2, activation="silu", gate=True, bias="each one")
    yield 30, Epilogue("forward", "bfloat16", top_k=2, held=3, activation="tanh", bias="each", save="out")
    yield 30, Epilogue("forward", "bfloat16", top_k=2, existing=True, shared="rhs")


def long_of_kernels() -> Iterator[Case]:
    saves = itertools.cycle(("pre", "out", "out"))
    pairs = itertools.cycle(" ".join(pair) for pair in itertools.product(("each", "one", "no"), repeat=2))
    scalings: list[Any] = [("row", "column"), ("tensor", "group"), ((1, 64), (64, 64)), ("mx", "row")]
    for backend, count in (("pallas_tpu", 30), ("triton_gpu", 3)):
        is_gpu = backend == "triton_gpu"
        tiles: dict[str, Any] = {"forward": (32, 32, 64), "batched": (32, 32, 64)}
        tiles = tiles if is_gpu else {"forward": (32, 128, 128), "batched": (128, 128, 128)}
        k, n = (80, 70) if is_gpu else (300, 200)
        large: dict[str, Any] = {"m": 37, "k": k, "n": n, "capacity": 100}
        for i, activation in enumerate([*ACTIVATIONS][is_gpu::2]):
            its: dict[str, Any] = {"backend": backend, "activation": activation, "save": next(saves)}
            layouts = ("forward", "batched") if i % 2 else ("batched", "forward")
            if i % 3 == 0:
                yield count, Epilogue(layouts[0], "bfloat16", gate=True, bias=next(pairs), **its)
            elif i % 3 == 1 and activation != "clamped":
                yield count, Epilogue(layouts[0], bias="each", held=2 * (layouts[0] == "forward"), **its)
            else:
                of_tiles: dict[str, Any] = {"tiles": tiles[layouts[1]], "bias": next(pairs)}
                yield max(count // 3, 2), Epilogue(layouts[1], gate=True, **of_tiles, **large, **its)
        its = {"backend": backend, "activation": "silu", "gate": True, "bias": "one each"}
        yield count, Epilogue("forward", columns="halves", n=128, **its)
        yield count, Epilogue("batched", columns="interleaved", n=64, **its)
        yield count, Epilogue("batched", columns="halves", n=10, **its)
        yield count, Epilogue("forward", columns="interleaved", shared="rhs", **its)
        for mapped, context in ((("lhs rhs", "lhs sizes")[is_gpu], "jit"), ("bias", "devices")):
            yield max(count // 3, 2), Epilogue("forward", mapped=mapped, context=context, **its)
        yield count, Epilogue("forward", order=2, backend=backend, activation="gelu", bias="each")
        yield count, Epilogue("forward", backend=backend, existing=True, activation="tanh", bias="each")
        of_shards: dict[str, Any] = {"bias": "each", "held": 3, "save": "out"}
        yield count, Epilogue("forward", "bfloat16", backend=backend, activation="sigmoid", **of_shards)
        its = {"gate": True, "activation": "silu", "bias": "each one", "k": 64, "n": 40, "out_dtype": "float32"}
        yield count, Epilogue("forward", "bfloat16", backend=backend, rhs_cast=("uint4", (32, 1), "zeros"), **its)
        for i, (lhs, rhs) in enumerate(scalings[is_gpu::2]):
            casts: dict[str, Any] = {"lhs_cast": (FP8, lhs), "rhs_cast": (FP8, rhs), "k": 256, "n": 136}
            casts |= {"out_dtype": "float32", "activation": "gelu", "chip": gpu.FIRST_WITH_FP8 if is_gpu else ""}
            its = {"gate": True, "bias": "each one"} if i else {"bias": "each"}
            yield count, Epilogue(("batched", "forward")[i], backend=backend, **its, **casts)
        yield count, Epilogue("forward", backend=backend, top_k=2, activation="silu", bias="each one", gate=True)
        if is_gpu:
            yield count, Epilogue("forward", backend=backend, top_k=2, mapped="lhs sizes")
        else:
            yield count, Epilogue("forward", "bfloat16", backend=backend, top_k=2)
            yield count, Epilogue("forward", backend=backend, top_k=1, order=2)
    its = {"backend": "triton_gpu", "gate": True}
    yield 4, Epilogue("forward", "bfloat16", activation="clamped", held=3, bias="each one", **its)
    # The tile of the second half begins in the middle of the matrices, and ends past the last one.
    yield 3, Epilogue("forward", tiles=(16, 32, 16), columns="halves", k=8, n=8, **its)
    # Tiles of which registers hold a quarter beside the sums; loaded by TMA, or by pointers.
    its = {"backend": "triton_gpu", "chip": "NVIDIA H200", "tiles": (128, 32, 64), "groups": 3, "capacity": 150}
    its |= {"out_dtype": "float32", "activation": "silu", "bias": "each one"}
    for k, n, dtype, gate in ((64, 72, "bfloat16", True), (37, 72, "float16", False), (37, 70, "float16", True)):
        yield 2, Epilogue("forward", dtype, gate=gate, k=k, n=n, **its)


@pytest.mark.parametrize("count, program", named(by_default()))
def test_epilogues(count: int, program: Epilogue) -> None:
    program.check(epilogue_draws(program, count))


@pytest.mark.long
@pytest.mark.parametrize("count, program", named(itertools.chain(long(), long_of_kernels())))
def test_more_epilogues(count: int, program: Epilogue) -> None:
    program.check(epilogue_draws(program, count))
