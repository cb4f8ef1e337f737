"""What every benchmark's file has: where and with what it was measured, and a whole file at any time."""

import importlib.metadata
import json
import os
import platform
import re
from datetime import date
from pathlib import Path
from typing import Any


def versions(*packages: str) -> dict[str, str | None]:
    """Those that are installed; None for the others. `ragged`, whose distribution has another name, always is."""

    def version(name: str) -> str | None:
        if name == "ragged":
            # Not imported at the top: benchmarks set what JAX reads when it is imported.
            from ragged.core.version import __version__

            return __version__
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in packages}


def processor() -> str:
    """The processor's name and the cores that this process may use."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.*)$", info.read_text() if info.exists() else "", re.M)
    return f"{name[1] if name else platform.processor() or platform.machine()}, {threads()} cores"


def threads() -> int:
    """As many as XLA takes: one a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float | None:
    """How many processes wanted a core, on average over the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def today() -> str:
    return date.today().isoformat()


def save(results: dict[str, Any], path: str | os.PathLike[str] | None) -> None:
    """Writes the file anew, a line for each row; whatever happens meanwhile, there is a whole one."""

    def text(value: Any) -> str:
        rows = isinstance(value, list) and ",\n  ".join(map(json.dumps, value))
        return f"[\n  {rows}\n ]" if rows else json.dumps(value)

    if path:
        lines = (f" {json.dumps(name)}: {text(value)}" for name, value in results.items())
        Path(f"{path}.new").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        os.replace(f"{path}.new", path)
