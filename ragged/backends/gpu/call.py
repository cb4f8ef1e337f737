"""Calls the kernel by jax-triton, with patches for some versions, and options with which XLA accepts Triton's PTX.

Triton is imported only if a kernel is called.
"""

import json
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata
from jaxlib import gpu_triton
from jaxlib.plugin_support import import_from_plugin

from ragged.backends.gpu import functions
from ragged.backends.gpu.arguments import Tiles
from ragged.backends.gpu.tiles import Chip
from ragged.product.config import GpuConfig
from ragged.product.function import Function


def missing() -> str:
    """Error text with the missing packages and how to install them; "" if all are installed."""
    installed = {
        "triton": find_spec("triton") is not None,
        "jax-triton": find_spec("jax_triton") is not None,
        "JAX's CUDA plugin": hasattr(gpu_triton, "TritonKernel"),
    }
    names = [name for name, is_installed in installed.items() if not is_installed]
    if not names:
        return ""
    return f"`ragged`'s Triton kernels need {' and '.join(names)}: `pip install 'jax-ragged[cuda]'`."


@cache
def load() -> ModuleType:
    """The module `jax_triton`, patched.

    **Raises:** `ImportError` if a package is missing.
    """
    if text := missing():
        raise ImportError(text)
    from triton.backends.nvidia import driver

    # triton 3.6 lacks this name, and jax-triton 0.4.1 then assumes that Triton has no NVIDIA backend. The value, CUDA's
    # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, is never used.
    if not hasattr(driver, "TMA_TF32"):
        setattr(driver, "TMA_TF32", 11)  # noqa: B010 (pyright knows the module's names)

    import jax_triton
    from jax_triton import triton_lib

    # jax-triton 0.4.1 requires the key `is_im2col` in a descriptor's metadata, which triton 3.6 lacks.
    metadata: Any = triton_lib.TensorDescMeta
    metadata.__required_keys__ = metadata.__required_keys__ - {"is_im2col"}

    # jax 0.12 passes one more argument to rules of dead-code elimination than jax-triton 0.4.1 expects.
    rules: Any = triton_lib.pe.dce_rules
    primitive = triton_lib.triton_kernel_call_p
    rule = rules[primitive]
    if jax.__version_info__ >= (0, 12) and len(signature(rule).parameters) == 2:
        rules[primitive] = lambda used, live, equation: rule(used, equation)
    return jax_triton


@cache
def shares_scales() -> bool:
    """Whether tensor cores can apply the same scales in two products.

    triton 3.6.0 can't compile two uses of the scales' tensor memory; 3.9.0 can.
    """
    major, minor = version("triton").split(".")[:2]
    return (int(major), int(minor)) >= (3, 9)


@cache
def newest_ptx() -> int:
    """The newest PTX version that XLA's ptxas surely accepts; 90 means 9.0.

    The ptxas is at least as new as the CUDA version that JAX's plugin was built with.
    """
    load()
    from triton.backends.nvidia import compiler

    versions: Any = import_from_plugin("cuda", "_versions")
    build = versions.cuda_runtime_build_version()  # 13000 for CUDA 13.0
    return compiler.ptx_get_version(f"{build // 1000}.{build % 1000 // 10}")


@cache
def backend_options() -> dict[str, int | bool]:
    """`backend_options` of `triton_call` for every kernel.

    - `enable_fp_fusion`: `a * b + c` is one instruction. triton 3.9 warns if the option isn't set.
    - `ptx_version`, only if XLA's ptxas might reject the PTX: Triton writes the newest version that its own ptxas
      accepts (9.4 from triton 3.9 on). If this is too new for one architecture, the limit is set for all.
    """
    load()
    from triton.backends.nvidia import compiler

    default = compiler.CUDAOptions()
    written = max(compiler.get_ptx_version_from_options(default, arch) for arch in (80, 90, 100))
    return {"enable_fp_fusion": True} | ({"ptx_version": newest_ptx()} if written > newest_ptx() else {})


def call(
    arrays: dict[str, Array | Tiles | None],
    outs: dict[str, jax.ShapeDtypeStruct | Array | None],
    static: dict[str, Any],
    *,
    grid: tuple[int, int],
    config: GpuConfig,
    name: str,
    metadata: dict[str, str],
    cost: dict[str, Any],
    chip: Chip,
    interpret: bool,
) -> list[Array]:
    """Runs the kernel and returns its results. `arrays`, `outs` and `static`: its arguments, keyed by parameter.

    `outs` has the shape of each result, an array that the kernel adds to in place, or None.
    """
    from ragged.backends.gpu.kernel import grouped_product

    static = jax.tree.map(_triton_value, static)
    tiles = {key: x for key, x in arrays.items() if isinstance(x, Tiles)}
    present = {key: x for key, x in arrays.items() if x is not None and key not in tiles}
    results = {key: x for key, x in outs.items() if x is not None}
    absent = {key: None for key, x in {**arrays, **outs}.items() if x is None}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results.values()]
    existing = {key: x for key, x in results.items() if not isinstance(x, jax.ShapeDtypeStruct)}
    if interpret:
        from ragged.backends.gpu import interpreter as triton_interpreter

        def run(present: Any, existing: Any) -> list[np.ndarray]:
            operands = {key: np.ascontiguousarray(x) for key, x in present.items()}
            outputs = {key: np.empty(x.shape, x.dtype) for key, x in results.items() if key not in existing}
            updated = {key: np.array(x) for key, x in existing.items()}
            arguments = operands | tiles | absent | outputs | updated | static
            triton_interpreter.run(grouped_product, grid, arguments, [*outputs], [*updated])
            return [(outputs | updated)[key] for key in results]

        return jax.pure_callback(run, shapes, present, existing, vmap_method="sequential")
    # jax-triton updates refs in place. XLA copies an array first if another operation reads it.
    refs = {key: jax.new_ref(x) for key, x in existing.items()}
    # If the kernel made the TMA descriptors, each launch would allocate memory, which CUDA graphs don't support.
    descriptor = load().TensorDescriptor
    with set_xla_metadata(kernel_metadata=json.dumps(metadata)):
        outputs = load().triton_call(
            **present,
            **{key: descriptor(present[of], *fields) for key, (of, *fields) in tiles.items()},
            **absent,
            **static,
            **refs,
            kernel=grouped_product,
            out_type=[] if refs else shapes,  # an array updated in place is the only result
            grid=grid,
            name=name,
            num_warps=config.warps,
            num_stages=config.stages,
            compute_capability=chip.capability,
            backend_options=backend_options(),
            serialized_metadata=metadata["xprof_metadata"].encode(),
            cost_estimate=cost,
        )
    return [jax.freeze(ref) for ref in refs.values()] if refs else outputs


def _triton_value(x: Any) -> Any:
    """`x`; for a NumPy dtype or a `Function`, Triton's dtype or function."""
    import triton.language as tl

    if isinstance(x, Function):
        return functions.compiled(x)
    if not isinstance(x, np.dtype):
        return x
    return {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5}.get(x.name) or getattr(tl, x.name)
