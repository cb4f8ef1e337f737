"""jax-triton, mended where a pair of versions needs it, and what Triton must be told for XLA to take its PTX.

Nothing here is imported before it is asked for: `ragged` works without Triton.
"""

import json
import math
import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata
from jaxlib import gpu_triton
from jaxlib.plugin_support import import_from_plugin

from ragged.backends.config import GpuConfig
from ragged.backends.gpu.tiles import Chip


def missing() -> str:
    """What Triton kernels need and isn't installed, in a sentence that says what to do; "" if nothing is missing."""
    found = {
        "triton": find_spec("triton") is not None,
        "jax-triton": find_spec("jax_triton") is not None,
        "JAX's CUDA plugin": hasattr(gpu_triton, "TritonKernel"),
    }
    names = [name for name, here in found.items() if not here]
    if not names:
        return ""
    return f"`ragged`'s Triton kernels need {' and '.join(names)}: `pip install 'jax[cuda13]' jax-triton triton`."


@cache
def load() -> ModuleType:
    """The module `jax_triton`. Raises `ImportError` with the sentence of `missing` if there is one."""
    if sentence := missing():
        raise ImportError(sentence)
    from triton.backends.nvidia import driver

    # triton 3.6 has no such name; without it jax-triton 0.4.1 believes that there is no NVIDIA backend.
    # The value, CUDA's CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, is for descriptors that round, which `ragged` doesn't use.
    if not hasattr(driver, "TMA_TF32"):
        setattr(driver, "TMA_TF32", 11)  # noqa: B010 (pyright knows the module's names)

    import jax_triton
    from jax_triton import triton_lib

    # triton 3.6 doesn't say of a descriptor whether it is an image's, which jax-triton 0.4.1 takes for a mistake.
    described: Any = triton_lib.TensorDescMeta
    described.__required_keys__ = described.__required_keys__ - {"is_im2col"}

    # jax 0.12 tells a rule which operands live, too; that of jax-triton 0.4.1 doesn't take it.
    rules: Any = triton_lib.pe.dce_rules
    primitive = triton_lib.triton_kernel_call_p
    old = rules[primitive]
    if jax.__version_info__ >= (0, 12) and len(signature(old).parameters) == 2:
        rules[primitive] = lambda used, live, equation: old(used, equation)
    return jax_triton


@cache
def shares_scales() -> bool:
    """Whether two products may have the same scales that tensor cores multiply by: triton 3.6.0 fails to compile them,
    for their place in tensor memory has two uses; 3.9.0 doesn't."""
    major, minor = version("triton").split(".")[:2]
    return (int(major), int(minor)) >= (3, 9)


@cache
def count_warps() -> None:
    """Launches `ragged`'s kernel, from now on, with as many warps as its code is for.

    jax-triton 0.4.1 launches as many as it asked for. Code whose warps are specialised has more of them (triton 3.6.0,
    3.9.0), and only its PTX says how many.
    """
    triton_lib = load().triton_lib
    library = triton_lib.triton_kernel_call_lib

    class Mended(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def TritonKernel(self, name: str, warps: int, ctas: int, shared: int, ptx: str, *more: Any) -> Any:
            if name == "grouped_product" and (threads := re.search(r"^\.reqntid (\d+)", ptx, re.M)):
                warps = int(threads[1]) // 32
            return library.TritonKernel(name, warps, ctas, shared, ptx, *more)

    triton_lib.triton_kernel_call_lib = Mended(library.__name__)


@cache
def newest_ptx() -> int:
    """The newest PTX that XLA's ptxas surely takes: 90 is 9.0. JAX's plugin asks for a ptxas at least as new as the
    CUDA that it was built with."""
    load()
    from triton.backends.nvidia import compiler

    versions: Any = import_from_plugin("cuda", "_versions")
    build = versions.cuda_runtime_build_version()  # 13000 for CUDA 13.0
    return compiler.ptx_get_version(f"{build // 1000}.{build % 1000 // 10}")


@cache
def backend_options() -> dict[str, int | bool]:
    """What `triton_call(..., backend_options=)` must hold for every kernel.

    `enable_fp_fusion`, so that `a * b + c` is one instruction: triton 3.9 warns unless told, and 3.10 won't by default.

    `ptx_version`, where XLA's ptxas might refuse the PTX: Triton writes the newest that its own ptxas takes (9.4 from
    triton 3.9). If it would for one architecture, the cap is for all.
    """
    load()
    from triton.backends.nvidia import compiler

    default = compiler.CUDAOptions()
    written = max(compiler.get_ptx_version_from_options(default, arch) for arch in (80, 90, 100))
    return {"enable_fp_fusion": True} | ({"ptx_version": newest_ptx()} if written > newest_ptx() else {})


class Tiles(NamedTuple):
    """What the host makes a TMA descriptor of: the array's name, its shape and strides, and the shape of a tile."""

    of: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]

    @staticmethod
    def of_matrices(of: str, shape: tuple[int, ...], tile: tuple[int, int]) -> "Tiles":
        """Those of all matrices of an array, as they are stored."""
        p, q = shape[-2:]
        return Tiles(of, (math.prod(shape[:-2]), p, q), (p * q, q, 1), (1, *tile))


def call(
    arrays: dict[str, Array | None],
    outs: dict[str, jax.ShapeDtypeStruct | None],
    static: dict[str, Any],
    *,
    tiles: dict[str, Tiles | None],
    existing: Array | None,
    grid: tuple[int, int],
    config: GpuConfig,
    name: str,
    metadata: dict[str, str],
    cost: dict[str, Any],
    chip: Chip,
    interpret: bool,
) -> list[Array]:
    """The kernel's results. `arrays`, `tiles`, `outs` and `static` are its parameters by name.

    `existing` is what the one result holds before, if anything: the kernel adds to it, in place.
    """
    import triton.language as tl

    from ragged.backends.gpu.kernel import grouped_product

    types = {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5}
    static = {
        key: types.get(x.name) or getattr(tl, x.name) if isinstance(x, np.dtype) else x for key, x in static.items()
    }
    present = {key: x for key, x in arrays.items() if x is not None}
    results = {key: x for key, x in outs.items() if x is not None}
    described = {key: x for key, x in tiles.items() if x is not None}
    absent = {key: None for key in (*arrays, *tiles, *outs) if key not in {*present, *described, *results}}
    if interpret:
        from ragged.backends.gpu import interpreter as triton_interpreter

        def run(existing: Any, *values: Any) -> list[np.ndarray]:
            made = {
                key: np.empty(x.shape, x.dtype) if existing is None else np.array(existing)
                for key, x in results.items()
            }
            operands = {key: np.ascontiguousarray(x) for key, x in zip(present, values, strict=True)}
            outputs, updated = ([*made], []) if existing is None else ([], [*made])
            given = operands | described | absent | made | static
            triton_interpreter.run(grouped_product, grid, given, outputs, updated)
            return [*made.values()]

        return jax.pure_callback(run, [*results.values()], existing, *present.values(), vmap_method="sequential")
    # A ref is what jax-triton writes in place. XLA copies the array first if anything else needs it.
    ref = None if existing is None else jax.new_ref(existing)
    if config.variant:
        count_warps()
    # The host describes the tiles. What a kernel describes for itself needs memory that is allocated at each launch,
    # which CUDA graphs don't take.
    descriptor = load().TensorDescriptor
    with set_xla_metadata(kernel_metadata=json.dumps(metadata)):
        made = load().triton_call(
            **present,
            **{key: descriptor(present[of], *shapes) for key, (of, *shapes) in described.items()},
            **absent,
            **static,
            **({} if ref is None else dict.fromkeys(results, ref)),
            kernel=grouped_product,
            out_type=[*results.values()] if ref is None else [],
            grid=grid,
            name=name,
            num_warps=config.warps,
            num_stages=config.stages,
            compute_capability=chip.capability,
            backend_options=backend_options(),
            serialized_metadata=metadata["xprof_metadata"].encode(),
            cost_estimate=cost,
        )
    return made if ref is None else [jax.freeze(ref)]
