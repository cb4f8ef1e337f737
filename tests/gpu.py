"""Compiling for GPUs on a machine without one: Triton's own tools do it for a kernel, JAX's plugin for a program."""

import os
import re
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.experimental import topologies
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from ragged.backends.gpu import call as triton_call

ARCHITECTURES = {"NVIDIA A100": "sm_80", "NVIDIA H200": "sm_90a", "NVIDIA B200": "sm_100a"}
SHARED_BYTES = {"NVIDIA A100": 166_912, "NVIDIA H200": 232_448, "NVIDIA B200": 232_448}  # that one block may have
FIRST_WITH_FP8 = "NVIDIA L4"  # of compute capability 8.9, and without TMA

# XLA's description of an H200: what NVIDIA publishes, in the fields of `stream_executor.GpuTargetConfigProto`.
_H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
"""


class Kernel(NamedTuple):
    """One Triton kernel of a program, as it would be loaded."""

    name: str
    ptx: str
    shared_bytes: int  # of a block, as it is launched
    threads: int  # of a block, as it is launched
    registers: int  # that each thread has
    spill_bytes: int  # stored and loaded, a thread: the sum over the code, not over its execution
    remarks: tuple[str, ...]  # of ptxas, such as wgmma that is serialised, which costs most of its speed
    sass_counts: Counter[str]  # instructions by name, without suffixes: {"HGMMA": 16, "UTMALDG": 4, …}


def needs_triton(missing: str | None = None) -> None:
    """Skips the test, or the module, that calls this without Triton. Where `REQUIRE_TRITON` is set, as in CI: fails."""
    if sentence := triton_call.missing() if missing is None else missing:
        assert not os.environ.get("REQUIRE_TRITON"), sentence
        pytest.skip(sentence, allow_module_level=True)


def is_well() -> bool:
    """Whether the device still computes: after an illegal access it doesn't, until the process ends."""
    try:
        return float(jax.jit(jnp.sum)(jnp.ones(8))) == 8
    except Exception:
        return False


def compile_for(chip: str, function: Callable[..., Any], *avals: Any) -> list[Kernel]:
    """The Triton kernels of `function`, compiled for `chip`: one for each call, in the order of the calls.

    Fails for what couldn't be launched: PTX too new for XLA, too much shared memory, another number of threads than
    the code is for; and for `ragged`'s kernel if XLA couldn't launch it twice, as a part of a CUDA graph.
    """
    return [_kernel(chip, payload) for payload in payloads(lower_for(chip, function, *avals))]


def lower_for(chip: str, function: Callable[..., Any], *avals: Any) -> Any:
    """`function` as it is lowered for `chip`: a `jax.stages.Lowered`."""
    needs_triton()
    with on(chip), _without_gpu():
        return jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",))


def compile_whole(function: Callable[..., Any], *avals: Any, donated: tuple[int, ...] = ()) -> Any:
    """`function` as XLA compiles it for one H200: a `jax.stages.Compiled`, to be read but not called."""
    needs_triton()
    sharding = SingleDeviceSharding(h200s(1)[0])
    with on("NVIDIA H200"):
        return compile_sharded(function, *avals, in_shardings=sharding, out_shardings=sharding, donate_argnums=donated)


def compile_sharded(function: Callable[..., Any], *avals: Any, **options: Any) -> Any:
    """The same for the `h200s` that `avals` are sharded over, or that the `options` of `jax.jit` say.

    Nothing else tells what is lowered which GPU it is for.
    """
    needs_triton()
    with _without_gpu(), _toolkit() as found:
        traced = jax.jit(function, **options).trace(*avals)
        return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=found)


def kernels_of(compiled: Any) -> list[tuple[str, Kernel]]:
    """The Triton kernels of a program for H200s, each with its result on one device, as in "bf16[64,32]"."""
    target = triton_call.load().CUSTOM_CALL_TARGET_NAME
    call = rf'= (\S+)\{{\S* custom-call\([^\n]* custom_call_target="{target}"[^\n]*\bopaque = "([^"]*)"'
    found = re.findall(call, compiled.as_text())
    return [(result, _kernel("NVIDIA H200", zlib.decompress(_unescaped(payload)))) for result, payload in found]


def poisoning() -> tuple[Callable[..., Array], list[str]]:
    """A `jax_triton.triton_call` that poisons every kernel's result, and a list of the kernels that it called.

    What a kernel leaves unwritten holds whatever was there before, which after a first run is often the right result.
    So the memory of every result is filled with NaN (77 for integers) inside the compiled program, right before the
    kernel writes to it: the kernel gets its result as a `Ref`, whose buffer XLA has filled. Filling and freeing memory
    before the call would be a guess at what the allocator hands out next, and would miss results inside a program.
    """
    itself: Any = triton_call.load().triton_call
    names: list[str] = []

    def poisoned(*, out_type: Any, name: str = "", **call: Any) -> Any:
        names.append(name)
        if not out_type:  # the kernel adds to what is there
            return itself(out_type=out_type, name=name, **call)
        results = out_type if isinstance(out_type, list) else [out_type]
        refs = []
        for each in results:
            poison = jnp.nan if jnp.issubdtype(each.dtype, jnp.floating) else 77
            refs.append(jax.new_ref(jnp.full(each.shape, poison, each.dtype)))
        # By name, those of the kernel's parameters that are given nowhere else.
        kernel = call["kernel"]
        missing = [param.name for param in kernel.params if not param.is_constexpr and param.name not in call]
        itself(out_type=[], name=name, **call, **dict(zip(missing, refs, strict=True)))
        made = [jax.freeze(ref) for ref in refs]
        return made if isinstance(out_type, list) else made[0]

    return poisoned, names


def on(chip: str, multiprocessors: int | None = None) -> Any:
    """What is lowered in here is for a chip, of which there may be none. It has as many multiprocessors as its kind, if
    no number is given."""
    device = AbstractDevice(chip, multiprocessors, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def _without_gpu() -> Any:
    """A GPU that the machine has is not what is lowered for in here, though jax-triton asks it first."""
    library = triton_call.load().triton_lib.triton_kernel_call_lib
    return mock.patch.object(library, "get_compute_capability", side_effect=RuntimeError("no GPU"))


def payloads(lowered: Any) -> list[bytes]:
    """The protos of the custom calls by which a lowered program launches kernels."""
    target = triton_call.load().CUSTOM_CALL_TARGET_NAME
    found = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == target:
            found.append(zlib.decompress(operation.attributes["mhlo.backend_config"]["opaque"].value_bytes))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def _unescaped(text: str) -> bytes:
    r"""The bytes of a string in a program's text: `\\` and `\0A` are one each."""
    escape = rb"\\(\\|[0-9A-F]{2})"
    return re.sub(escape, lambda e: e[1] if e[1] == b"\\" else bytes.fromhex(e[1].decode()), text.encode())


def _kernel(chip: str, payload: bytes) -> Kernel:
    # TritonAnyKernelCall.kernel_call.kernel of jaxlib/gpu/triton.proto. Of a kernel: 1 is the name, 2 the warps, 3 the
    # bytes of shared memory, 4 the PTX, 12 those that each launch allocates of the GPU's memory for a program. A field
    # that is zero isn't written.
    kernel = _fields(_fields(_fields(payload)[1])[1])
    name, ptx = kernel[1].decode(), kernel[4].decode()
    threads = 32 * kernel[2]
    [version], [architecture], [required] = (
        re.findall(pattern, ptx, re.M) for pattern in (r"^\.version (\S+)", r"^\.target (\w+)", r"^\.reqntid (\d+)")
    )
    assert architecture == ARCHITECTURES[chip], f"`{name}` is for {architecture}, asked for {chip}"
    assert int(required) == threads, f"`{name}` needs {required} threads and jax-triton launches {threads}"
    cap = triton_call.newest_ptx()
    assert int(version.replace(".", "")) <= cap, f"`{name}` is PTX {version}: pass `triton_call.backend_options()`"
    shared = kernel.get(3, 0)
    assert shared <= SHARED_BYTES[chip], f"`{name}` takes {shared} bytes of shared memory: too many for {chip}"
    scratch = kernel.get(12, 0)
    assert name != "grouped_product" or not scratch, f"`{name}` takes scratch: no CUDA graph can have it"
    return Kernel(name, ptx, shared, threads, *_assemble(ptx, architecture))


def _fields(message: bytes) -> dict[int, Any]:
    """A proto's fields by number: `int` or `bytes`; the last of those that are repeated."""
    fields, position = {}, 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            value, shift, position = value | (byte & 127) << shift, shift + 7, position + 1
            if byte < 128:
                return value

    while position < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            fields[number] = varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()  # kind 2 is a string, bytes or message: its size comes first
            fields[number], position = message[position : position + size], position + size
    return fields


@cache
def _assemble(ptx: str, architecture: str) -> tuple[int, int, tuple[str, ...], Counter[str]]:
    # Of the two that Triton has, ptxas-blackwell is the newer, and takes every architecture.
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        said = _run("ptxas-blackwell", "-v", f"--gpu-name={architecture}", source, "-o", binary)
        code = _run("nvdisasm", "-c", binary)
    registers = re.findall(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    # "/*0a10*/  @!P0 HGMMA.64x256x16.F32.BF16 R24, …": the place, perhaps a predicate, the name.
    names = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)", code, re.M)
    remarks = re.findall(r"^ptxas\S* (?:info\s*: (?=\(C)|warning\s*: )(.*)$", said, re.M)
    assert len(registers) == 1 and len(spills) == 2 and names, said
    return int(registers[0]), sum(map(int, spills)), tuple(remarks), Counter(names)


def tools() -> Path:
    """Triton's folder for NVIDIA, with `bin` and `lib`."""
    triton_call.load()
    import triton.backends.nvidia

    return Path(triton.backends.nvidia.__path__[0])


def _run(tool: str, *arguments: Any) -> str:
    done = subprocess.run([tools() / "bin" / tool, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout + done.stderr


@cache
def h200s(count: int) -> Any:
    """The devices of one machine."""
    try:
        # Slices, machines of each, GPUs of each.
        topology = f"1x1x{count}"
        return topologies.get_topology_desc(platform="cuda", target_config=_H200, topology=topology).devices
    except NotImplementedError as error:
        needs_triton(f"needs `jax-cuda13-pjrt`, and where there is no GPU JAX_PLATFORMS=cpu: {error}")


@contextmanager
def _toolkit() -> Iterator[dict[str, str]]:
    """XLA's options with which it finds libdevice in Triton, and, if there is none in the PATH, ptxas.

    XLA looks for the ptxas of a custom call in the PATH and in CUDA's usual places only.
    """
    with tempfile.TemporaryDirectory() as folder:
        binaries, libdevice = Path(folder, "bin"), Path(folder, "nvvm", "libdevice")
        binaries.mkdir()
        libdevice.mkdir(parents=True)
        (binaries / "ptxas").symlink_to(tools() / "bin" / "ptxas-blackwell")
        (libdevice / "libdevice.10.bc").symlink_to(tools() / "lib" / "libdevice.10.bc")
        with mock.patch.dict(os.environ, PATH=f"{os.environ.get('PATH', '')}{os.pathsep}{binaries}"):
            yield {"xla_gpu_cuda_data_dir": folder}
