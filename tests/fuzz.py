"""`python -m tests.fuzz`: random programs of the contract for some minutes, a reproducer of each failure, and a table.

A program is compiled once, and runs on many draws of sizes and contents. The same `--seed` gives the same programs.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp

from tests import conftest, gpu, tpu
from tests.cases import LETTERS
from tests.contract import einsums, tensors
from tests.contract.draws import draws
from tests.contract.epilogues import ACTIVATIONS, Epilogue, epilogue_draws
from tests.contract.layers import MODELS, Layer
from tests.contract.meshes import KINDS
from tests.contract.programs import BITS, FLOATS, FP8, INTEGERS, PAIRS, Program
from tests.contract.recipes import PRESETS, RECIPES, Quantised
from tests.contract.tensors import Kind
from tests.everywhere import INTERPRETED

DRAWS = {"xla": 60, "pallas_tpu": 12, "triton_gpu": 2}
"""How often a program runs, by backend, unless `--draws` says more."""
COMPILED_EACH_TIME = ("constants", "constant sizes", "eager")
"""Contexts in which each draw is compiled anew. Their programs don't run more often than usual."""
Check = Callable[[int], int]
"""Checks a program on at most so many draws. Returns how many there were."""
CONTEXTS = ("constants", "constant sizes", "scan", "eager", "checkpoint", "shard_map", "shard_map unchecked")
ON_KERNELS = [
    ("float32",),
    ("bfloat16",),
    ("int8",),
    ("bfloat16", FP8),
    (FP8, "", "float32"),
    ("bfloat16", "", "float32"),
]
COMPILERS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "pallas_tpu": (tpu.compile_for, [*tpu.KINDS][1:]),
    "triton_gpu": (gpu.compile_for, [*gpu.ARCHITECTURES]),
}
"""By backend, what compiles a program for a chip, and the chips."""
Shape = Callable[[Random, str, str], dict[str, Any]]
"""Draws what a product of a layout, by a backend, is like."""
UNIFORM = {"batched": ("lhs", "rhs"), "forward": ("rhs",), "forward_left": ("lhs",), "wgrad": ()}
"""By layout, the operands that may be one matrix for all groups."""


def shape(r: Random, layout: str, backend: str) -> dict[str, Any]:
    """Of a random product: its extents, how it is tiled, and where it is called."""
    found: dict[str, Any] = {"backend": backend, "groups": r.choice([1, 2, 3, 5, 9])}
    found |= {z: r.choice([1, 3, 8, 16, 34]) for z in "mkn"}
    found["capacity"] = r.choice([1, 7, 16, 40] + [200] * (backend != "triton_gpu"))
    found["width"] = min(r.choice([1, 4, 20]), found["capacity"])
    if backend == "xla" and LETTERS[layout] and r.random() < 0.5:
        found["tiles"] = (r.choice([n for n in (1, 5, 8, 16) if n <= found["width"]]),) * 3
    found["in_loops"] = r.random() < 0.7
    if backend == "xla" and r.random() < 0.3:
        found["context"] = r.choice(CONTEXTS)
    return found


def of_layers(r: Random, layout: str, backend: str) -> dict[str, Any]:
    """The same of a product that is only compiled: the sizes of real layers, few rows and odd extents among them."""
    found: dict[str, Any] = {"backend": backend, "interpret": False, "groups": r.choice([1, 3, 8])}
    found["capacity"] = r.choice([1, 2, 3, 6, 8, 24, 64, 1000, 4096, 8192])
    found["width"] = min(found["capacity"], r.choice([100, 512]))
    found["m"] = r.choice([1, 3, 8, 64, 100, 128, 512, 704, 2048])
    return found | {z: r.choice([1, 7, 64, 100, 256, 500, 704, 1000, 1536, 2048, 2880, 4096, 7168]) for z in "kn"}


def some(r: Random, names: Iterable[str]) -> str:
    return " ".join(name for name in names if r.random() < 0.5)


def counted(check: Callable[[int], Any], most: int | None = None, share: int = 1) -> Check:
    """Checks one in `share` of the draws, and `most` at most."""

    def run(count: int) -> int:
        count = min(count // share, most or count)
        check(count)
        return count

    return run


def checked(r: Random, program: Program, inputs: Callable[..., Any], share: int = 1) -> Check:
    most = DRAWS[program.backend] if program.context in COMPILED_EACH_TIME else None
    return counted(lambda count: program.check(inputs(program, count, seed=r.randrange(10**6))), most, share)


def product(r: Random, backend: str, shape: Shape = shape) -> tuple[Any, Check]:
    """Of any layout, dtypes, scales and options."""
    layout = r.choice([*LETTERS])
    its, letters, kind = shape(r, layout, backend), LETTERS[layout], r.choice(["plain", "plain", "scaled", "second"])
    its |= {"packed_last": some(r, ("lhs", "rhs")), "swapped": r.random() < 0.3}
    its["size_dtype"] = r.choice(["int32", "int32", "uint32"])
    if kind == "second":
        its["order"] = 2
    elif kind == "scaled":
        (lhs, rhs), dtype = r.choice(PAIRS), r.choice(BITS)
        its |= {"lhs_cast": lhs and (dtype, lhs), "rhs_cast": rhs and (FP8 if dtype == "float8_e5m2" else dtype, rhs)}
        its |= {"out_dtype": "float32", "chip": gpu.FIRST_WITH_FP8 if backend == "triton_gpu" else ""}
    else:
        dtypes = r.choice([*FLOATS, *INTEGERS, *ON_KERNELS[:2] * 9] if backend == "xla" else ON_KERNELS)
        its |= dict(zip(("dtype", "rhs_dtype", "out_dtype"), dtypes, strict=False))
        its |= {"chip": gpu.FIRST_WITH_FP8} if backend == "triton_gpu" and FP8 in dtypes else {}
    if kind != "second":
        its["existing"] = r.random() < 0.3
        option = r.choice(["", "held", "shared"])
        if option == "held" and layout in ("forward", "forward_left", "wgrad"):
            its["held"] = r.randint(1, its["groups"] + 2 * (layout == "wgrad"))
        elif option == "shared" and (names := [x for x in UNIFORM.get(layout, ()) if not its.get(f"{x}_cast")]):
            its["shared"] = r.choice(names)
    if "context" not in its and r.random() < 0.3:
        has_kernel = backend != "pallas_tpu" or len(letters) < 2  # for a map over sizes
        its["mapped"] = some(
            r, ["lhs", "rhs"] + ["sizes"] * bool(letters and has_kernel) + ["existing"] * its.get("existing", False)
        )
    program = Program(layout, **its)
    return program, checked(r, program, draws)


def over_a_mesh(r: Random, _: str) -> tuple[Any, Check]:
    """Each letter split over some mesh axes, or none."""
    layout, kind = r.choice([*LETTERS]), r.choice([*KINDS])
    axes = r.choice([{"a": 2, "b": 2}, {"a": 4, "b": 2}, {"a": 3, "b": 2}, {"a": 8}])
    free, split = [*axes], []
    for letter in r.sample("mkng", 4):
        if free and r.random() < 0.6:
            split.append(f"{letter}={free.pop()}")
    extents: dict[str, Any] = {
        "m": 24,
        "k": 24,
        "n": 48,
        "groups": 24 if r.random() < 0.2 else 6,
        "capacity": 72,
        "width": 24,
    }
    context = " ".join([kind, "x".join(map(str, axes.values())), *split])
    dtype = r.choice(["float32", "bfloat16"])
    program = Program(layout, dtype, context=context, existing=r.random() < 0.3, **extents)
    return program, checked(r, program, draws, share=4)


def epilogue(r: Random, backend: str, shape: Shape = shape) -> tuple[Any, Check]:
    """A bias, an activation, a gate, gathered rows."""
    layout = r.choice(["forward", "forward", "batched"] + ["inner_rows"] * (backend == "xla"))
    its = shape(r, layout, backend)
    its |= {"dtype": r.choice(["float32", "bfloat16"]), "save": r.choice(["pre", "out"])}
    its["gate"] = r.random() < 0.5
    names = [name for name in ACTIVATIONS if its["gate"] or name != "clamped"]
    its |= {
        "activation": r.choice(names),
        "bias": " ".join(r.choice(["no", "one", "each"]) for _ in range(1 + its["gate"])),
    }
    if its["gate"] and layout != "inner_rows":
        its["columns"] = r.choice(["", "halves", "interleaved"])
    if layout == "forward" and r.random() < 0.4:
        its["top_k"] = r.choice([1, 2, 3])
        its["capacity"] *= its["top_k"]
    program = Epilogue(layout, **its)
    return program, checked(r, program, epilogue_draws)


def recipe(r: Random, backend: str) -> tuple[Any, Check]:
    """The bits of `quantize`, then `matmul`."""
    layout = r.choice([*LETTERS])
    its = {name: each for name, each in shape(r, layout, backend).items() if name not in ("groups", "context")}
    its |= {"chip": gpu.FIRST_WITH_FP8} if backend == "triton_gpu" else {}
    names = [name for name in (*PRESETS, *RECIPES) if backend == "xla" or name != "nvfp4"]  # which few kernels have
    quantised = Quantised(r.choice(names), Program(layout, **its))
    # In buffers of one row, only few draws have a result that isn't zero.
    times = 8 if its["capacity"] == 1 else 1
    return quantised, lambda count: counted(quantised.check)(times * count)


def einsum(r: Random, backend: str) -> tuple[Any, Check]:
    spec = einsums.random_spec(r.randrange(10**6))
    config, most = None if backend == "xla" else INTERPRETED[backend], None if any(spec.ragged) else 1
    return spec, counted(lambda count: einsums.check(spec, count, config), most)


def operations(r: Random, _: str) -> tuple[Any, Check]:
    """Some operations of a kind of tensor, and their derivatives."""
    letters = r.choice(["", "m", "n", "mn"])
    its: dict[str, Any] = {
        "mapped": r.choice(["", "", "data", "sizes" if letters else ""]),
        "groups": r.choice([1, 3, 5]),
    }
    its |= {"capacity": r.choice([1, 9, 20, 40]), "width": r.choice([1, 5]), "extent": r.choice([1, 3, 6])}
    its |= {"packed_last": letters == "mn" and r.random() < 0.5, "turned": r.random() < 0.3}
    its |= (
        {"more": (2,)} if letters != "n" and not its["turned"] and not its["packed_last"] and r.random() < 0.3 else {}
    )
    kind = Kind(letters, **its)
    names = r.sample([*kind.operations], 12)
    differentiated = [name for name in names[:6] if name in kind.differentiable]
    return (kind, names), counted(lambda count: tensors.check(kind, count, names, differentiated), share=10)


def layer(r: Random, _: str) -> tuple[Any, Check]:
    """A mixture of experts of a published model, on one device or over a mesh."""
    its: dict[str, Any] = {"save": r.choice(["pre", "out", "nothing"]), "padding": r.choice(["", "mask", "sizes"])}
    its["dtype"] = r.choice(["float32", "float32", "bfloat16"])
    if r.random() < 0.7:
        its["mesh"] = r.choice(["8x1x1", "4x2x1", "2x4x1", "1x8x1", "2x2x2", "1x1x2", "1x4x2", "1x4x1", "2x2x1"])
        its["kind"] = r.choice([*KINDS] + ["manual"] * (its["padding"] != "sizes"))
        its |= {"transport": r.choice(["dense", "ring"]), "chunks": r.choice([1, 1, 2])}
        if its["mesh"].split("x")[1] != "1" and r.random() < 0.4:
            its["capacity"] = r.choice([16, 18, 24, 40])
    program, first = Layer(r.choice([*MODELS]), **its), r.randrange(10**6)
    return program, counted(lambda count: program.check(range(first, first + count)), share=4)


def compiled(r: Random, backend: str) -> tuple[Any, Check]:
    """Products and epilogues, compiled for a chip, which isn't there."""
    program, _ = r.choice((product, epilogue))(r, backend, of_layers)
    compile_for, chips = COMPILERS[backend]
    program, chip = replace(program, chip=""), r.choice(chips)

    def aval(shape: tuple[int, ...], dtype: str, name: str = "") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((program.batch, *shape) if program.has_batch(name) else shape, jnp.dtype(dtype))

    data = {name: aval(program.shape(name), dtype) for name, dtype in program.dtypes.items()}
    sizes = {z: aval((program.groups,), program.size_dtype, "sizes") for z in program.ragged}
    if top_k := getattr(program, "top_k", 0):
        sizes = {"ids": aval((program.capacity // top_k, top_k), "int32", "sizes")}

    def check(_: int) -> int:
        compile_for(chip, program.compute, data, sizes, aval((), "int32", "first"))
        return 1

    return (program, chip), check


ALL = tuple(DRAWS)
OPERATIONS: dict[str, tuple[Callable[[Random, str], tuple[Any, Check]], tuple[str, ...]]] = {
    "product": (product, ALL),
    "product over a mesh": (over_a_mesh, ("xla",)),
    "epilogue": (epilogue, ALL),
    "recipe": (recipe, ALL),
    "einsum": (einsum, ALL),
    "operations": (operations, ("xla",)),
    "layer": (layer, ("xla",)),
    "compiled": (compiled, ("pallas_tpu", "triton_gpu")),
}


def fuzz(name: str, backend: str, seed: int, times: int = 1) -> Counter[str]:
    """Makes a program and runs it; prints it, and what is wrong, if it fails. Returns counts."""
    began, count = time.monotonic(), times * DRAWS[backend]
    build, _ = OPERATIONS[name]
    program, check = build(Random(f"{name} {backend} {seed}"), backend)
    found = Counter(programs=1)
    try:
        found["draws"] = check(count)
    except Exception as error:
        found["failures"] = 1
        print(f"\n# {name} on {backend}, seed {seed}: {program!r}\n{type(error).__name__}: {error}\n", flush=True)
    found["milliseconds"] = round(1000 * (time.monotonic() - began))
    return found


def main() -> int:
    """Runs programs of each operation and backend in turn. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first program of each operation")
    parser.add_argument("--draws", type=int, default=1, help="so many times the usual number of draws a program")
    parser.add_argument("--only", default="", help="operations whose names contain this text")
    parser.add_argument("--backend", choices=[*DRAWS])
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    chosen = [
        (name, backend)
        for name, (_, backends) in OPERATIONS.items()
        for backend in backends
        if arguments.only in name and arguments.backend in (None, backend)
    ]
    end, seed = time.monotonic() + 60 * arguments.minutes, arguments.seed
    totals: dict[tuple[str, str], Counter[str]] = {each: Counter() for each in chosen}
    while chosen and time.monotonic() < end:
        for each in chosen:
            if time.monotonic() < end:
                totals[each] += fuzz(*each, seed, arguments.draws)
                conftest.drop_programs_if_many()
        seed += 1
    print(f"{'operation':22}{'backend':12}{'programs':>9}{'draws':>9}{'failures':>10}{'seconds':>9}")
    for (name, backend), count in totals.items():
        row = f"{name:22}{backend:12}{count['programs']:9}{count['draws']:9}{count['failures']:10}"
        print(f"{row}{count['milliseconds'] / 1000:9.1f}")
    return int(any(count["failures"] for count in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
