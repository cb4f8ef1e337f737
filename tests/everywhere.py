"""What tests pass as `backend=`: interpreted kernels, and records for a product and both of its derivatives."""

from typing import Any

from ragged.tuning import Configs, GpuConfig, TpuConfig, XlaConfig

INTERPRETED: dict[str, Any] = {
    "xla": "xla",
    "pallas_tpu": TpuConfig(interpret=True),
    "triton_gpu": GpuConfig(interpret=True),
}


def everywhere(backend: str, m: int, k: int, n: int, **others: Any) -> Configs:
    """The same tiles for a product and its derivatives, of interpreted kernels. XLA's take those of ragged dims."""
    if backend == "xla":
        record: Any = XlaConfig(m=(m,), k=(k,), n=(n,))
    else:
        of: Any = {"pallas_tpu": TpuConfig, "triton_gpu": GpuConfig}[backend]
        record = of(m=m, k=k, n=n, **{"interpret": True, **others})
    return Configs(record, record, record)
