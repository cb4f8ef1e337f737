"""The blocks of `examples/models.py`, run in several ways, and their errors relative to the recorded values.

uv run --group dev python -m tests.models.blocks    writes the table of docs/models.md
"""

import importlib
import inspect
import json
import re
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import install_import_hook

from tests.models.record import LENGTHS, WHOLE

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "models.md"
NAMES = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3-MoE", "olmoe": "OLMoE", "gpt_oss": "gpt-oss"}
NAMES |= {"deepseek_v3": "DeepSeek-V3", "llama4": "Llama 4"}
# By way: bounds of `error` for results and gradients. Those of float32 allow some roundings in sums of up to 100 terms.
BOUNDS = {"jit": 1e-6, "scan": 1e-6, "vmap": 1e-6, "checkpoint": 1e-6, "mesh": 1e-6, "bfloat16": 0.02, "rowwise": 0.1}


LOW = ("bfloat16", "rowwise")


def example(name: str) -> ModuleType:
    """The example as a module, whose annotations are checked at run time."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        with install_import_hook(name, "beartype.beartype"):
            return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "examples"))


@cache
def recorded(name: str) -> dict[str, Any]:
    with np.load(ROOT / "tests" / "models" / "recorded" / f"{name}.npz") as file:
        return {key: json.loads(str(x)) if key.endswith("config") else x for key, x in file.items()}


def part(name: str, prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): x for key, x in recorded(name).items() if key.startswith(prefix)}


def error(got: Any, want: np.ndarray, way: str = "jit") -> float:
    """The largest difference relative to the largest element; in few bits, both in the mean square."""
    difference, of = np.asarray(got, np.float64) - want, np.linalg.norm if way in LOW else lambda x: np.abs(x).max()
    assert np.isfinite(difference).all()
    return float(of(difference) / of(want.astype(np.float64)))


def errors(name: str, way: str) -> dict[str, float]:
    """Of the result "y", of the tokens' gradient "x", and of the gradient of each weight."""
    dtype = jnp.bfloat16 if way == "bfloat16" else jnp.float32
    w, dw = part(name, "block/w/"), part(name, "block/g/")
    x, dy, y, dx = (recorded(name)[f"block/{each}"] for each in ("x", "dy", "y", "dx"))
    options: dict[str, Any] = {"recipe": "rowwise"} if way == "rowwise" else {}
    if way == "mesh":
        options = {"axis": "expert", "data_axes": ("data",)}
        x, dy, y, dx = (np.pad(each, ((0, 1), (0, 0))) for each in (x, dy, y, dx))  # 16 rows, for 8 devices
        x[-1] = np.nan

    def block(w: Any, x: Any) -> Any:
        mask = jnp.arange(len(x), dtype=jnp.int32) < 15
        return example("models").BLOCKS[name](recorded(name)["config"], w, **options)(x, mask=mask)[0]

    run: Any = jax.checkpoint(block) if way == "checkpoint" else block
    times = 1
    if way == "vmap":  # twice the same weights, and the tokens backwards too
        run, times = jax.vmap(block, (None, 0)), 2
        x, dy, y, dx = (np.stack([each, each[::-1]]) for each in (x, dy, y, dx))
    if way == "scan":  # two layers with the same tokens
        w, dw = ({key: np.stack([each, each]) for key, each in tree.items()} for tree in (w, dw))
        dy, y, dx = np.stack([dy, dy]), np.stack([y, y]), 2 * dx

        def over_layers(w: Any, x: Any) -> Any:
            return jax.lax.scan(lambda x, w: (x, block(w, x)), x, w)[1]

        run = over_layers

    def both(w: Any, x: Any, dy: Any) -> Any:
        y, pull = jax.vjp(run, w, x)
        return y, *pull(dy)

    cast = partial(jax.tree.map, lambda each: jnp.asarray(each, dtype))
    args = cast(w), cast(x), cast(dy)
    if way == "mesh":
        with jax.set_mesh(jax.make_mesh((4, 2), ("expert", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
            got_y, got_w, got_x = jax.jit(both)(*args)
    else:
        got_y, got_w, got_x = jax.jit(both)(*args)
    out = {"y": error(got_y, y, way), "x": error(got_x, dx, way)}
    for key, want in dw.items():
        if key.endswith("e_score_correction_bias"):  # it only selects
            assert not np.asarray(got_w[key]).any() and not want.any()
        else:
            out[key] = error(got_w[key], times * want, way)
    return out


def kernels(name: str, platform: str) -> tuple[int, int]:
    """How many kernels of this library the block is on a platform, and how many dots of XLA."""
    config, arrays = recorded(name)["config"], part(name, "block/w/")
    w = {key: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for key, x in arrays.items()}
    block = jax.jit(lambda w, x: example("models").BLOCKS[name](config, w)(x)[0])
    traced = block.trace(w, jax.ShapeDtypeStruct((512, 32), jnp.bfloat16))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    calls = {"tpu": "@tpu_custom_call", "cuda": "@triton_kernel_call"}[platform]
    return text.count(calls), text.count("stablehlo.dot_general")


def lines(name: str) -> int:
    """Lines of code of the block, without its signature and docstring."""
    source = inspect.getsource(example("models").BLOCKS[name])
    body = re.sub(r'^ *""".*?"""\n', "", source, flags=re.MULTILINE | re.DOTALL).splitlines()[1:]
    return len([line for line in body if line.strip()])


def whole(name: str) -> dict[str, float]:
    """Errors of the logits "y" of packed sequences, and of the gradient of each array of the model."""
    config, ids, want = (recorded(name)[key] for key in ("whole/config", "ids", "logits"))
    arrays, lengths = jax.tree.map(jnp.asarray, part(name, "w/")), jnp.array(LENGTHS, jnp.int32)
    padded = jnp.pad(jnp.asarray(ids, jnp.int32), (0, 3))

    def both(arrays: Any, dy: Any) -> Any:
        def run(arrays: Any) -> Any:
            return example("models").logits(config, arrays, padded, lengths, max(LENGTHS))[: len(ids)]

        y, pull = jax.vjp(run, arrays)
        return y, *pull(dy)

    y, gradients = jax.jit(both)(arrays, recorded(name)["dlogits"])
    return {"y": error(y, want)} | {key: error(gradients[key], x) for key, x in part(name, "g/").items()}


def columns(name: str) -> list[str]:
    """A row of the table on the page."""
    found = {way: errors(name, way) for way in BOUNDS}
    gradient = {way: max(e for key, e in each.items() if key != "y") for way, each in found.items()}
    worst = max(max(found[way]["y"], gradient[way]) for way in BOUNDS if way not in ("jit", *LOW))
    both = {way: f"{100 * found[way]['y']:.1g} % · {100 * gradient[way]:.1g} %" for way in LOW}
    count = [str(kernels(name, platform)[0]) for platform in ("tpu", "cuda")]
    figures = [f"{each:.0e}" for each in (found["jit"]["y"], gradient["jit"], worst)]
    return [NAMES[name], *figures, *both.values(), " · ".join(count), str(lines(name))]


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    text = PAGE.read_text()
    for name in sys.argv[1:] or NAMES:
        row = columns(name)
        print(" | ".join(row), flush=True)
        text = re.sub(rf"^\| {re.escape(row[0])} \| .*e-.*%.*$", f"| {' | '.join(row)} |", text, flags=re.MULTILINE)
    for name in WHOLE:
        found = whole(name)
        row = [NAMES[name], f"{found.pop('y'):.0e}", f"{max(found.values()):.0e}"]
        print(" | ".join(row), flush=True)
        text = re.sub(rf"^\| {row[0]} \| \S* \| \S* \|$", f"| {' | '.join(row)} |", text, flags=re.MULTILINE)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
