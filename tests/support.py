"""Writes `docs/support.md`: which backend computes each layout, dtype and transformation, on each device; and the table
of weights in few bits in `docs/quantisation.md`.

    python -m tests.support          writes both pages, or the two files that are named

Each combination is traced, and each of its products is planned for each device, as its lowering does.
`tests/docs/test_support.py` compares the pages with new ones.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractDevice

import ragged
from ragged import GroupedTensor
from ragged.backends.base import Launch
from ragged.primitive import lowering
from ragged.product.operands import Call
from ragged.tensor.base import with_fields
from ragged.tuning.products import products_of
from tests.cases import NAMES
from tests.contract.machines import shapes

PAGE = Path(__file__).parent.parent / "docs" / "support.md"
WEIGHTS_PAGE = PAGE.with_name("quantisation.md")
SERVED = PAGE.parent / "benchmarks" / "tpu-served.json"
GROUPS, CAPACITY, EXTENT = 4, 1024, 256

PLATFORMS = {
    "pallas_tpu": ("v5e", "v5p", "v6e", "tpu7x"),
    "triton_gpu": ("A100", "L4", "H100", "H200", "B200", "B300"),
    "xla": ("CPU",),
}
ALIKE = {"L4": "H200", "H100": "H200", "B300": "B200"}
"""Devices that the page mentions only in its introduction: each has the marks of the other device."""
_TPUS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
DEVICES: dict[str, AbstractDevice | None] = {
    **{name: AbstractDevice(kind, 1, "tpu") for name, kind in _TPUS.items()},
    **{name: AbstractDevice(f"NVIDIA {name}", None, "gpu") for name in PLATFORMS["triton_gpu"]},
    "CPU": None,
}

Product = Callable[[GroupedTensor, GroupedTensor], GroupedTensor]


class Format(NamedTuple):
    """Operands of a kind, made of float ones, and what multiplies them."""

    operands: Callable[[GroupedTensor, GroupedTensor], tuple[GroupedTensor, GroupedTensor]]
    product: Product = ragged.matmul


def plain(dtype: str) -> Format:
    return Format(lambda lhs, rhs: (lhs.astype(dtype), rhs.astype(dtype)))


def quantised(dtype: str, scaling: str) -> Format:
    """Both operands, along what is contracted."""
    quantize = partial(ragged.quantize, dtype=jnp.dtype(dtype), scaling=scaling)
    return Format(lambda lhs, rhs: (quantize(lhs), quantize(rhs.mT).mT))


def weights_in(dtype: str, scaling: Any, *, symmetric: bool = True) -> Format:
    """`rhs` alone, along what is contracted."""
    quantize = partial(ragged.quantize, dtype=dtype, scaling=scaling, symmetric=symmetric)
    return Format(lambda lhs, rhs: (lhs.astype("bfloat16"), quantize(rhs.mT).mT))


def by_recipe(recipe: str) -> Format:
    return Format(plain("bfloat16").operands, partial(ragged.matmul, recipe=recipe))


DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "delayed")
FORMATS: dict[str, Format] = {
    **{f"`{name}`": plain(name) for name in DTYPES},
    "`float8_e4m3fn`, `row` scales": quantised("float8_e4m3fn", "row"),
    "`float8_e4m3fn`, `mx` scales": quantised("float8_e4m3fn", "mx"),
    "`float4_e2m1fn`, `nvfp4` scales": quantised("float4_e2m1fn", "nvfp4"),
    "`bfloat16` × `float4_e2m1fn`, `mx` scales": weights_in("float4_e2m1fn", "mx"),
    "`bfloat16` × `uint4`, zero points": weights_in("uint4", (1, 128), symmetric=False),
    "`int8`, `row` scales": quantised("int8", "row"),
    **{f"`bfloat16`, recipe `{name}`": by_recipe(name) for name in RECIPES},
}


class Like(NamedTuple):
    """Tangents of both buffers, and a cotangent of the result's."""

    lhs: Any
    rhs: Any
    out: Any


def on_buffers(product: Product, lhs: GroupedTensor, rhs: GroupedTensor) -> Callable[[Array, Array], Array]:
    return lambda a, b: product(lhs.with_data(a), rhs.with_data(b)).data


def value(product: Product, lhs: GroupedTensor, rhs: GroupedTensor, like: Like) -> Any:
    return product(lhs, rhs).data


def jvp(product: Product, lhs: GroupedTensor, rhs: GroupedTensor, like: Like) -> Any:
    return jax.jvp(on_buffers(product, lhs, rhs), (lhs.data, rhs.data), (like.lhs, like.rhs))[1]


def grad(product: Product, lhs: GroupedTensor, rhs: GroupedTensor, like: Like) -> Any:
    return jax.vjp(on_buffers(product, lhs, rhs), lhs.data, rhs.data)[1](like.out)


def grad_of_grad(product: Product, lhs: GroupedTensor, rhs: GroupedTensor, like: Like) -> Any:
    """The cotangents of both buffers, where those of the gradients are `like.lhs` and `like.rhs`."""

    def gradients(a: Array, b: Array) -> Any:
        return jax.vjp(on_buffers(product, lhs, rhs), a, b)[1](like.out)

    return jax.vjp(gradients, lhs.data, rhs.data)[1]((like.lhs, like.rhs))


def vmap(product: Product, lhs: GroupedTensor, rhs: GroupedTensor, like: Like, *, of_sizes: int | None = None) -> Any:
    """Of two elements that are the same, with sizes of their own if `of_sizes` is 0."""

    def with_sizes(x: GroupedTensor, leaves: GroupedTensor, sizes: Callable[[Any], Any]) -> GroupedTensor:
        names = [name for name in ("first_dims", "last_dims") if getattr(x, name) is not None]
        return with_fields(leaves, **{name: sizes(getattr(x, name)) for name in names})

    axes = [with_sizes(x, jax.tree.map(lambda _: 0, x), lambda _: of_sizes) for x in (lhs, rhs)]
    stacked = [jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), x) for x in (lhs, rhs)]
    if of_sizes is None:
        stacked = [with_sizes(x, leaves, lambda sizes: sizes) for x, leaves in zip((lhs, rhs), stacked, strict=True)]
    return jax.vmap(lambda a, b: product(a, b).data, tuple(axes))(*stacked)


TRANSFORMATIONS: dict[str, Callable[[Product, GroupedTensor, GroupedTensor, Like], Any]] = {
    "value": value,
    "`jvp`": jvp,
    "`grad`": grad,
    "`grad` of `grad`": grad_of_grad,
    "`vmap`": vmap,
    "`vmap`, sizes too": partial(vmap, of_sizes=0),
}
DIFFERENTIATES = ("`jvp`", "`grad`", "`grad` of `grad`")


def like(format: Format, lhs: GroupedTensor, rhs: GroupedTensor) -> Like:
    return Like(lhs.data, rhs.data, jax.eval_shape(format.product, lhs, rhs).data)


@cache
def launch_on(avals: tuple[Any, ...], tree: Any, call: Call, device: str) -> Launch:
    """How a product is computed on a device."""
    on = DEVICES[device]
    platform = "cpu" if on is None else lowering.platform_name(on.platform)
    with lowering.target_of(platform, call.options, on) as target:
        return lowering.launch_of(platform, tree.unflatten(avals), call, target)


def products(fn: Callable[..., Any], *args: Any) -> set[tuple[tuple[Any, ...], Any, Call]]:
    """The products of `fn(*args)`: for each, shapes of the operands' arrays, their tree, and the call."""
    found = [equation for equation, _ in products_of(fn, args, sizes=False)]
    if not found:  # The tangent of a product with a recipe raises when it is lowered.
        jax.jit(fn).lower(*args)
    assert found
    avals = [tuple(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in each.invars) for each in found]
    return {(leaves, each.params["tree"], each.params["call"]) for leaves, each in zip(avals, found, strict=True)}


def planned(
    fn: Callable[..., Any],
    args: Any,
    devices: Iterable[str],
    told: Callable[[Launch], str] = lambda launch: launch.backend,
) -> dict[str, str]:
    """What is `told` of the products of `fn(*args)` on each device, by default the backends that compute them; or the
    error, of which it says the first line."""
    try:
        found = products(fn, *args)
    except (TypeError, ValueError, NotImplementedError) as error:
        return dict.fromkeys(devices, f"{type(error).__name__}: {str(error).partition('\n')[0]}")
    return {
        device: " and ".join(sorted({told(launch_on(*product, device)) for product in found})) for device in devices
    }


Cell = dict[str, dict[str, str]]  # by layout and device


def found() -> dict[tuple[str, str], Cell]:
    """By format and transformation. Integers, which JAX doesn't differentiate, have no derivatives."""
    cells: dict[tuple[str, str], Cell] = {}
    devices = [*itertools.chain(*PLATFORMS.values())]
    for (name, format), layout in itertools.product(FORMATS.items(), NAMES):
        with jax.enable_x64(name == "`float64`"):
            lhs, rhs = jax.eval_shape(format.operands, *shapes(layout, GROUPS, CAPACITY, *[EXTENT] * 4))
            args = lhs, rhs, like(format, lhs, rhs)
            for what, transform in TRANSFORMATIONS.items():
                if what not in DIFFERENTIATES or all(jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs)):
                    cell = cells.setdefault((name, what), {})
                    cell[layout] = planned(partial(transform, format.product), args, devices)
    return cells


def page(cells: dict[tuple[str, str], Cell]) -> str:
    notes: list[str] = []

    def mark(cell: Cell | None, device: str, backend: str) -> str:
        if cell is None:
            return "–"
        others = {layout: each[device] for layout, each in cell.items() if each[device] != backend}
        errors = {text for text in others.values() if "Error: " in text}
        assert not errors or (len(errors) == 1 and len(others) == len(NAMES))
        if not others:
            return "●"
        if not errors and len(others) == len(NAMES) and set(others.values()) == {"xla"}:
            return "○"
        shared = f"For {{}}, `{backend}` computes one of the gradient's two products and XLA computes the other."
        words = {"xla": "XLA computes {}.", f"{backend} and xla": shared}
        said = (
            words[text].format(", ".join(f"`{layout}`" for layout in others if others[layout] == text))
            for text in sorted(set(others.values()) - errors)
        )
        text = " ".join(errors or said)
        if text not in notes:
            notes.append(text)
        return f"{'–' if errors else '◐'} ({notes.index(text) + 1})"

    lines = [PAGE.read_text().partition("\n## ")[0]]  # what is written by hand
    for backend, devices in PLATFORMS.items():
        title = {"pallas_tpu": "TPUs", "triton_gpu": "NVIDIA's GPUs", "xla": "CPUs, and any other platform"}[backend]
        lines += [f"## {title}: `{backend}`", "", f"| operands | on | {' | '.join(TRANSFORMATIONS)} |"]
        lines += ["|---" * (len(TRANSFORMATIONS) + 2) + "|"]
        for name in FORMATS:
            rows: dict[tuple[str, ...], list[str]] = {}
            for device in devices:
                row = tuple(mark(cells.get((name, what)), device, backend) for what in TRANSFORMATIONS)
                rows.setdefault(row, []).append(device)
            for row, on in rows.items():
                assert all((device in on) == (other in on) for device, other in ALIKE.items())
                named = ", ".join(device for device in on if device not in ALIKE)
                lines += [f"| {name} | {'all' if len(on) == len(devices) else named} | {' | '.join(row)} |"]
        lines += [""]
    lines += ["## Notes", "", *(f"{i}. {text}" for i, text in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


WEIGHTS: dict[str, tuple[str, Any, bool]] = {  # stored as `[g, out, in]`: the dtype, the scaling, whether symmetric
    "`float8_e4m3fn`, blocks of 128 × 128": ("float8_e4m3fn", (128, 128), True),
    "`int8`, a scale per output": ("int8", "row", True),
    "`uint8`, a scale and a zero point per output": ("uint8", "row", False),
    "`int4`, blocks of 128": ("int4", (1, 128), True),
    "`uint4`, blocks of 128 with zero points": ("uint4", (1, 128), False),
    "`float4_e2m1fn`, `mx`": ("float4_e2m1fn", "mx", True),
    "`float4_e2m1fn`, `nvfp4`": ("float4_e2m1fn", "nvfp4", True),
}


def weights() -> str:
    """A table of weights in few bits, multiplied by bfloat16 in a forward product: their size, what kernels do, and
    their simulated time on TPUs, for weights stored as `[in, out]` and `[out, in]`, divided by the time of the bytes.
    """

    def told(launch: Launch) -> str:
        details: Any = launch.details
        if launch.backend == "xla":
            return "XLA"
        is_tpu = launch.backend == "pallas_tpu"
        mode = (details.modes if is_tpu else details.dot.modes)[1]
        dtype = jnp.dtype(details.tiled.dot.lhs if is_tpu else details.dot.dtype).name
        return f"{dtype}, {({'total': 'sum', 'step': 'product', 'tile': 'weight'})[mode]}"

    rows = {(row["kernel"], row["generation"]): row for row in json.loads(SERVED.read_text())["rows"]}

    def time(name: str, order: str, chip: str) -> str:
        row = rows[f"served {name}, {order}", chip]
        return f"{row['time / least']:.2f}" if row["status"] == "ok" else "–"

    times = {
        name: [f"{time(name, '[in, out]', chip)}, {time(name, '[out, in]', chip)}" for chip in _TPUS]
        for name in ("bfloat16", *WEIGHTS)
    }
    lines = [f"| weights | bits | TPUs | GPUs | {' | '.join(_TPUS)} |", "|---|---|---|---" + "|---" * len(_TPUS) + "|"]
    lines += [f"| `bfloat16` | 16 | bfloat16 | bfloat16 | {' | '.join(times['bfloat16'])} |"]
    x = GroupedTensor(jax.ShapeDtypeStruct((CAPACITY, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32))
    for name, (dtype, scaling, symmetric) in WEIGHTS.items():
        quantize = partial(ragged.quantize, dtype=dtype, scaling=scaling, symmetric=symmetric)
        w = jax.eval_shape(quantize, jax.ShapeDtypeStruct((8, 2048, 2048), jnp.float32))
        total = sum(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) for leaf in jax.tree.leaves(w))
        on = planned(lambda x, w: ragged.matmul(x, w.mT).data, (x, w), DEVICES, told)
        cells = [{on[device] for device in devices} for devices in (_TPUS, PLATFORMS["triton_gpu"])]
        assert all(len(cell) == 1 for cell in cells), (name, on)
        row = [name, f"{total / w.data.size:.2f}", *(cell for (cell,) in cells), *times[name]]
        lines += [f"| {' | '.join(row)} |"]
    return "\n".join(lines)


def with_weights(text: str) -> str:
    """The page on quantisation with a new table of weights."""
    before, _, rest = text.partition("<!-- weights -->\n")
    return f"{before}<!-- weights -->\n\n{weights()}\n\n<!-- /weights -->{rest.partition('<!-- /weights -->')[2]}"


if __name__ == "__main__":
    support, quantisation = map(Path, sys.argv[1:] or [PAGE, WEIGHTS_PAGE])
    support.write_text(page(found()))
    quantisation.write_text(with_weights(WEIGHTS_PAGE.read_text()))
