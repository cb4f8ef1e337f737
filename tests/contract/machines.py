"""Machines that products are lowered for, none of which is needed, and operands as shapes."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

import ragged
from ragged import GroupedTensor
from tests import gpu
from tests.cases import LETTERS
from tests.contract.launches import launches


class Machine(NamedTuple):
    """A platform, its own backend, and a kind of device: "" for a CPU."""

    platform: str
    backend: str
    device: str = ""


MACHINES = {
    "CPU": Machine("cpu", "xla"),
    "A100": Machine("cuda", "triton_gpu", "NVIDIA A100"),
    "H200": Machine("cuda", "triton_gpu", "NVIDIA H200"),
    "v5e": Machine("tpu", "pallas_tpu", "TPU v5 lite"),
    "tpu7x": Machine("tpu", "pallas_tpu", "TPU7x"),
}


def on(machine: str) -> Any:
    """A context in which products are for this machine."""
    its = MACHINES[machine]
    if not its.device:
        return nullcontext()
    device = AbstractDevice(its.device, 1 if its.platform == "tpu" else None, "tpu" if its.platform == "tpu" else "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lowered(machine: str, function: Any, *args: Any) -> tuple[list[tuple[str, str]], str]:
    """`(backend, kernel)` of each product of a function that is lowered for a machine, and the program's text."""
    its = MACHINES[machine]
    with launches() as found, on(machine):
        if its.platform == "cuda":
            text = gpu.lower_for(its.device, function, *args).as_text()
        else:
            text = jax.jit(function).trace(*args).lower(lowering_platforms=(its.platform,)).as_text()
    return found, text


def shapes(
    layout: str, g: int = 4, rows: int = 256, k: int = 16, n: int = 32, m: int = 64, width: int = 64, dtype: Any = None
) -> tuple[GroupedTensor, GroupedTensor]:
    """Operands as shapes: `rows` along packed axes, and `width` along the other axis of those with two ragged dims."""
    extent, dims = {"m": m, "k": k, "n": n}, jax.ShapeDtypeStruct((g,), jnp.int32)

    def tensor(first: str, last: str) -> GroupedTensor:
        flags = first in LETTERS[layout], last in LETTERS[layout]
        shape = {
            (False, False): (g, extent[first], extent[last]),
            (True, False): (rows, extent[last]),
            (False, True): (extent[first], rows),
            (True, True): (rows, width),
        }[flags]
        data = jax.ShapeDtypeStruct(shape, dtype or jnp.float32)
        return GroupedTensor(data, dims if flags[0] else None, dims if flags[1] else None)

    return tensor("m", "k"), tensor("k", "n")


def options_of(layout: str, rows: int = 256, width: int = 64) -> dict[str, Any]:
    """The extents of a result that its operands don't have."""
    return {"outer": {"max_last": width}, "ragged": {"max_last": width}, "inner_columns": {"capacity": rows}}.get(
        layout, {}
    )


def train(lhs: Any, rhs: Any, **options: Any) -> Any:
    """The product of two operands, and its cotangents by their buffers."""

    def multiply(lhs_data: Any, rhs_data: Any) -> Any:
        return ragged.matmul(_with(lhs, lhs_data), _with(rhs, rhs_data), **options).data

    out, pull = jax.vjp(multiply, _data(lhs), _data(rhs))
    return out, pull(out)


def _data(x: Any) -> Any:
    return x.data if isinstance(x, GroupedTensor) else x


def _with(x: Any, data: Any) -> Any:
    return x.with_data(data) if isinstance(x, GroupedTensor) else data
