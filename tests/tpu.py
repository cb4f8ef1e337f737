"""Compiling for TPUs on a machine without one: libtpu does it, for a topology that is only described."""

import base64
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental import topologies
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
VMEM_MIB = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "tpu7x": 64}
KINDS: dict[str, tuple[str, int] | None] = {
    "unknown": None,
    "v5e": ("TPU v5 lite", 1),
    "v5p": ("TPU v5", 2),
    "v6e": ("TPU v6 lite", 1),
    "tpu7x": ("TPU7x", 1),
}
"""The name and the number of cores of a device of each generation."""

# For libtpu to start where there is no TPU.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Compiled(NamedTuple):
    kernels: list[str]  # names of the Pallas kernels
    vmem: list[float]  # MiB that each takes
    text: str
    memory: Any  # the program's, as `jax.stages.Compiled.memory_analysis` gives it


@cache
def device(generation: str) -> Any:
    """A device of that generation. Without libtpu: an error where `REQUIRE_LIBTPU` is set, as in CI, else a skip."""
    if importlib.util.find_spec("libtpu") is None:
        assert not os.environ.get("REQUIRE_LIBTPU"), "CI must have libtpu: it is in the group `dev`"
        pytest.skip("needs libtpu")
    for name, value in {**_ENVIRONMENT, "TPU_LOG_DIR": tempfile.gettempdir()}.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(TOPOLOGIES[generation], platform="tpu").devices[0]


def compile_for(
    generation: str, function: Callable[..., Any], *avals: Any, known: bool = True, donated: tuple[int, ...] = ()
) -> Compiled:
    """What `function` compiles to for one TPU. `known`: it is lowered for that generation, else for any."""
    sharding = SingleDeviceSharding(device(generation))
    kind = AbstractDevice(device(generation).device_kind, device(generation).num_cores, "tpu")
    mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))
    with mesh if known else nullcontext():
        jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding, donate_argnums=donated)
        compiled = jitted.trace(*avals).lower(lowering_platforms=("tpu",)).compile()
    text = compiled.as_text() or ""
    names = re.findall(r"%([\w.]+) = [^=\n]*custom-call\([^\n]*custom_call_target=\"tpu_custom_call\"", text)
    size = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
    used = re.findall(f'custom_call_target="tpu_custom_call".*?{size}', text, re.S)
    return Compiled(names, [int(bytes_) / 2**20 for bytes_ in used], text, compiled.memory_analysis())


def on(generation: str) -> Any:
    """Where what is lowered is for a generation."""
    kind, cores = KINDS[generation] or ("", 0)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, cores, "tpu")))


def matmuls(generation: str, function: Any, *avals: Any) -> set[tuple[str, str]]:
    """The types of the operands of all matrix products in the kernels of `function`, as Mosaic gets them."""
    found: set[tuple[str, str]] = set()

    def in_kernel(operation: Any) -> Any:
        if operation.name.endswith(".matmul"):
            lhs, rhs, *_ = (str(ir.VectorType(x.type).element_type) for x in operation.operands)
            found.add((lhs, rhs))
        return ir.WalkResult.ADVANCE

    def visit(operation: Any) -> Any:
        target = operation.attributes["call_target_name"].value if "custom_call" in operation.name else ""
        if target == "tpu_custom_call":
            body = json.loads(operation.attributes["backend_config"].value)["custom_call_config"]["body"]
            with ir.Context() as context:
                context.allow_unregistered_dialects = True
                ir.Module.parse(base64.b64decode(body)).operation.walk(in_kernel)
        return ir.WalkResult.ADVANCE

    with on(generation):
        module: Any = jax.jit(function).trace(*avals).lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")
    module.operation.walk(visit)
    return found
