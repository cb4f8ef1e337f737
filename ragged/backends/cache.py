"""The cache of measured configurations: in memory, and in a JSON file.

    {"format": 1, "found": {"<device and versions>": {"<product>": {"config": {...}, "seconds": ..., ...}}}}

The cache is read when a product is lowered for a known device, and written by `put`. The environment variable
`RAGGED_TUNING_CACHE` names the file ("off": no file); the default is `ragged/tuning.json` in the user's cache folder.
If JAX has several processes, the default file isn't read: all processes must compile the same program, and the default
files of several machines may differ.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import IO

import jax
import jax.numpy as jnp

from ragged.core.errors import Site
from ragged.core.version import __version__
from ragged.product.config import Config, from_json, to_json
from ragged.product.operands import Call, Operand, Operands, precision_name

VARIABLE = "RAGGED_TUNING_CACHE"
FORMAT = 1


@dataclass(frozen=True)
class Found:
    """The fastest measured configuration of one product on one device."""

    config: Config
    seconds: float
    default_seconds: float  # of the model's configuration, measured in the same rounds
    sizes: str  # description of the group sizes in the measurement
    date: str  # ISO 8601, UTC

    def __post_init__(self) -> None:
        times, words = (self.seconds, self.default_seconds), (self.sizes, self.date)
        if not all(0 < x < inf for x in times) or not all(isinstance(x, str) for x in words):
            Site("ragged.tuning.Found(...)").fail(
                ValueError,
                f"`seconds` and `default_seconds` are {times}, `sizes` and `date` are {words}.",
                "The first two must be positive numbers, the last two strings.",
            )


Entries = dict[str, dict[str, Found]]  # keyed by device, then by product
_memory: Entries = {}
_memory_lock = threading.Lock()


def product_key(call: Call, x: Operands, backend: str) -> str:
    """The cache's key of a product: backend, letters, dtypes, scales, extents, precision, epilogue and batch.

    It doesn't tell who applies `call.cast`.
    """
    if call.cast is not None:
        x = jax.eval_shape(call.with_cast, x)
    p, sizes, precision = call.product, x.sizes, precision_name(call.options.precision) or call.options.precision

    def operand_key(operand: Operand, letters: str) -> str:
        s = operand.scales
        levels = "" if s is None else "/e8m0" * s.e8m0 + "/tensor" * (s.tensor is not None)
        zeros = "" if s is None or s.zeros is None else f"/zeros {s.zeros.dtype.name}"
        block = "" if s is None else f"/{s.block[0]},{s.block[1]}{levels}{zeros}"
        return f"{letters}:{jnp.dtype(operand.data.dtype).name}{block}"

    # A ragged letter's extent is taken from a buffer that packs it; other buffers only limit the width of a group.
    extents = {}
    for letters, shape in call.buffers(x):
        for place, (letter, n) in enumerate(zip(letters, shape[-2:], strict=True)):
            is_packed = letter in sizes and place == 0
            if letter not in extents or is_packed:
                extents[letter] = n
    # "~" marks numbers that are rounded up to powers of two: a ragged letter's extent and mean group, and the batch.
    mean = {letter: -(-n // max(x.num_groups, 1)) for letter, n in extents.items() if letter in sizes}
    parts = [
        backend,
        operand_key(x.lhs, p.lhs),
        operand_key(x.rhs, p.rhs),
        f"{p.out}:{jnp.dtype(call.dtype).name}",
        *(f"{z}~{_bucket(n)}/{_bucket(mean[z])}" if z in mean else f"{z}={n}" for z, n in sorted(extents.items())),
        f"held={call.num_local_groups(x)}" if len(sizes) < 2 else "",
        f"precision={precision}" if precision != "none" else "",
        "existing" if x.epilogue.existing is not None else "",
        "offset" if x.offset is not None else "",
        _epilogue_key(call, x),
        "gathered" if x.gather is not None else "",
    ]
    if batch := call.batch(x):
        mapped = "".join("01"[is_mapped] for is_mapped in jax.tree.leaves(call.batched(x)))
        parts.append(f"batch~{_bucket(batch)}/{mapped}{'' if call.out_batch else '/summed'}")
    return " ".join(filter(None, parts))


def _epilogue_key(call: Call, x: Operands) -> str:
    if call.epilogue is None:
        return ""
    function, columns = call.epilogue.function, call.epilogue.columns
    kind = f"/{columns}" if columns else ""
    biases = "".join(f"/bias {each.ndim}" for each in (x.epilogue.bias, x.epilogue.up_bias) if each is not None)
    return f"epilogue={function.key if function else None}/{call.num_products}/{call.num_stored}{kind}{biases}"


def _bucket(n: int) -> int:
    """`n`, rounded up to a power of two."""
    return 1 << max(n - 1, 0).bit_length()


def device_key(device: tuple[str, int] | None) -> str | None:
    """The cache's key of a device: its kind, number of cores, and the compilers' versions; None if it isn't known."""
    if device is None:
        return None
    kind, cores = device
    if kind == "cpu":
        return f"{_processor()} x {os.cpu_count()}; {_versions()}"
    compilers = ("libtpu",) if kind.startswith("TPU") else ("triton", "jax-cuda12-plugin", "jax-cuda13-plugin")
    return f"{kind} x {cores}; {_versions(*compilers)}"


@cache
def _versions(*compilers: str) -> str:
    versions = {"ragged": __version__, "jax": jax.__version__}
    for name in ("jaxlib", *compilers):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return " ".join(f"{name} {version}" for name, version in versions.items())


@cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def lookup(call: Call, x: Operands, device: tuple[str, int] | None, backend: str) -> Config | None:
    """The cached configuration of a product on a device and backend, or None."""
    device_name = device_key(device)
    if device_name is None or not all(isinstance(n, int) for array in jax.tree.leaves(x) for n in array.shape):
        return None
    key, file = product_key(call, x, backend), cache_path() if _reads_file() else None
    for entries in (_memory, {} if file is None else _read(file)):
        found = entries.get(device_name, {}).get(key)
        if found is not None and found.config.backend == backend:  # they differ only if the file was edited
            return found.config
    return None


def cache_path() -> Path | None:
    """Path of the cache's file; None if the file is switched off, or there is no home directory."""
    variable = os.environ.get(VARIABLE)
    if variable is not None:
        return None if variable.lower() in ("", "off", "0") else Path(os.path.expanduser(variable))
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return None if folder.startswith("~") else Path(folder) / "ragged" / "tuning.json"


def _reads_file() -> bool:
    """Whether lookups read the file: see the module."""
    return VARIABLE in os.environ or jax.process_count() == 1


def _read(file: Path) -> Entries:
    """The entries of a file; empty if it doesn't exist, or, with a warning, if it isn't a tuning cache."""
    try:
        status = file.stat()
    except OSError:
        return {}
    return _parsed(file, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(8)
def _parsed(file: Path, *version: int) -> Entries:
    """The entries of a file. `version` changes with the file, so that a changed file is read again."""
    try:
        return parse(_content(file))
    except (OSError, ValueError) as error:
        _warn(f"the tuning cache {file} is ignored: {error}", "Move it away, or set another in")
        return {}


def _content(file: Path) -> bytes:
    """The bytes of a file.

    **Raises:** `OSError` if it can't be read, or isn't a regular file: reading a pipe might never end.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError("it is not a regular file.")
    return file.read_bytes()


def parse(text: str | bytes) -> Entries:
    """The entries of a cache file's text.

    **Raises:** `ValueError` if the text isn't a tuning cache, has another format, or has an invalid configuration.
    """
    try:
        whole = json.loads(text)
        file_format, found = whole["format"], whole["found"]
        tables = {device: dict(products) for device, products in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("it is not a tuning cache.") from None
    if file_format != FORMAT:
        raise ValueError(f"it has format {file_format!r}, this version reads {FORMAT}.")
    entries: Entries = {}
    for device, products in tables.items():
        for key, record in products.items():
            try:
                entries.setdefault(device, {})[key] = Found(**record | {"config": from_json(record["config"])})
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"its configuration for {key!r} is not valid.") from None
    return entries


def text_of(entries: Entries) -> str:
    """The text of a cache file."""
    found = {
        device: {key: asdict(each) | {"config": to_json(each.config)} for key, each in sorted(products.items())}
        for device, products in sorted(entries.items())
    }
    return json.dumps({"format": FORMAT, "found": found}, indent=1) + "\n"


def _warn(problem: str, hint: str) -> None:
    """Warns about the cache's file. The name of the environment variable completes `hint`."""
    warnings.warn(f"`ragged.tuning`: {problem}\n{hint} `{VARIABLE}`.", stacklevel=2)


def merged(*several: Entries) -> Entries:
    """All entries; of two with the same device and product, the one with the later date."""
    out: Entries = {}
    for entries in several:
        for device, products in entries.items():
            for key, entry in products.items():
                earlier = out.setdefault(device, {}).get(key)
                out[device][key] = entry if earlier is None or earlier.date <= entry.date else earlier
    return out


def cache_entries() -> Entries:
    """All entries of this process and of the file."""
    file = cache_path()
    return merged({} if file is None else _read(file), _memory)


def put(new: Entries) -> None:
    """Adds entries to memory and to the file. Warns if the file can't be written."""
    global _memory
    with _memory_lock:
        _memory = merged(_memory, new)
    if (file := cache_path()) is None:
        return
    try:
        write(file, new)
    except (OSError, ValueError) as error:
        problem = f"the tuning cache {file} is not written: {error}"
        _warn(problem, "The new entries stay in this process's memory. Set another path in")


def write(file: Path, new: Entries) -> None:
    """Merges entries into a file, or into the target of a symbolic link.

    Concurrent writers wait; readers see the old or the new file.

    **Raises:** `OSError` if it can't be written, `ValueError` if the existing file isn't a tuning cache.
    """
    file = Path(os.path.realpath(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        parse(_content(file))  # raises before a lock file is created
    with _locked(file.with_name(file.name + ".lock")) as lock:
        existing = parse(_content(file)) if file.exists() else {}
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(handle, "w") as out:
                out.write(text_of(merged(existing, new)))
            # `mkstemp` makes the file private. Give it the old file's mode, or the default mode, which the lock has.
            os.chmod(name, stat.S_IMODE(os.stat(file if file.exists() else lock.name).st_mode))
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[IO[str]]:
    """Holds an exclusive lock on a file."""
    with open(file, "a") as lock:
        try:
            import fcntl
        except ImportError:  # Windows: the file stays whole, but one of two concurrent writes may be lost
            yield lock
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def save_cache(file: str | os.PathLike[str]) -> None:
    """Merges all entries, of this process and of the cache's file, into another file.

    Load it with `load_cache` on another machine of the same kind.

    **Raises:** `OSError` if it can't be written, `ValueError` if the existing file isn't a tuning cache.
    """
    try:
        write(Path(file), cache_entries())
    except ValueError as error:
        site = Site(f"ragged.tuning.save_cache({os.fspath(file)!r})")
        site.fail(ValueError, f"{error}", "Pass the path of a new file, or of one that `save_cache` wrote.")


def load_cache(file: str | os.PathLike[str]) -> int:
    """Adds the entries of a file to memory and to the cache's file. Returns the number of entries in the file.

    Memory and the file each keep the later of two entries with the same device and product. Products use memory first.

    **Raises:** `OSError` if it can't be read, `ValueError` if it isn't a tuning cache.
    """
    try:
        new = parse(_content(Path(file)))
    except ValueError as error:
        site = Site(f"ragged.tuning.load_cache({os.fspath(file)!r})")
        site.fail(ValueError, f"{error}", "Pass a file that `save_cache` wrote.")
    put(new)
    return sum(map(len, new.values()))


def clear_cache() -> None:
    """Deletes the entries in this process's memory. The file isn't changed."""
    global _memory
    _memory = {}
