"""The cache of configurations that were measured: in memory, and in a file of JSON.

    {"format": 1, "found": {"<device and versions>": {"<product>": {"config": {...}, "seconds": ..., ...}}}}

It is read when a product is lowered for a device that is known, and written only by `put`. The file is that of the
environment variable `RAGGED_TUNING_CACHE` ("off": none), by default `ragged/tuning.json` in the user's cache. Programs
of several processes have to be the same in each, so they read no file but one that the variable names.
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
from typing import IO, Any

import jax
import jax.numpy as jnp

from ragged._errors import Site
from ragged._version import __version__
from ragged.backends.config import Config, from_json, to_json
from ragged.product.operands import Call, Operands, precision_name

VARIABLE = "RAGGED_TUNING_CACHE"
FORMAT = 1


@dataclass(frozen=True)
class Found:
    """What was measured of one product on one device."""

    config: Config
    seconds: float
    default_seconds: float  # the model's own choice, in the same rounds
    sizes: str  # of the groups that it was measured on
    date: str  # ISO 8601, UTC

    def __post_init__(self) -> None:
        times, words = (self.seconds, self.default_seconds), (self.sizes, self.date)
        if not all(0 < x < inf for x in times) or not all(isinstance(x, str) for x in words):
            Site("ragged.tuning.Found(...)").fail(
                ValueError,
                f"times are {times}, sizes and date {words}.",
                "They must be positive numbers, and strings.",
            )


Entries = dict[str, dict[str, Found]]  # by device, by product
_memory: Entries = {}
_adding = threading.Lock()  # to it


# Keys


def product_key(call: Call, x: Operands, backend: str) -> str:
    """What a configuration is chosen by: backend, letters, dtypes, scales, extents; ragged ones in powers of two."""
    p, sizes, precision = call.product, x.sizes, precision_name(call.options.precision) or call.options.precision

    def operand(term: Any, letters: str) -> str:
        s = term.scales
        levels = "" if s is None else "/e8m0" * s.e8m0 + "/tensor" * (s.tensor is not None)
        block = "" if s is None else f"/{s.block[0]},{s.block[1]}{levels}"
        return f"{letters}:{jnp.dtype(term.data.dtype).name}{block}"

    extents = {}
    for letters, shape in ((p.lhs, x.lhs_shape), (p.rhs, x.rhs.data.shape), (p.out, call.shape)):
        for place, (letter, n) in enumerate(zip(letters, shape[-2:], strict=True)):
            is_packed = letter in sizes and place == 0
            if letter not in extents or is_packed:
                extents[letter] = n
    mean = {letter: -(-n // max(x.num_groups, 1)) for letter, n in extents.items() if letter in sizes}
    parts = [
        backend,
        operand(x.lhs, p.lhs),
        operand(x.rhs, p.rhs),
        f"{p.out}:{jnp.dtype(call.dtype).name}",
        *(f"{z}~{_bucket(n)}/{_bucket(mean[z])}" if z in mean else f"{z}={n}" for z, n in sorted(extents.items())),
        f"held={call.held(x)}" if len(sizes) < 2 else "",
        f"precision={precision}" if precision != "none" else "",
        "existing" if x.epilogue.existing is not None else "",
        "offset" if x.offset is not None else "",
        f"ending={call.ending.activation}/{call.num_products}/{call.num_stored}" if call.ending is not None else "",
        "gathered" if x.gather is not None else "",
    ]
    if batch := call.batch(x):
        mapped = "".join("01"[is_mapped] for is_mapped in jax.tree.leaves(call.batched(x)))
        parts.append(f"batch~{_bucket(batch)}/{mapped}{'' if call.out_batch else '/summed'}")
    return " ".join(filter(None, parts))


def _bucket(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def device_key(device: tuple[str, int] | None) -> str | None:
    """The device, with what its kernels are compiled by; None where it isn't known."""
    if device is None:
        return None
    kind, cores = device
    if kind == "cpu":
        return f"{_processor()} x {os.cpu_count()}; {_versions()}"
    compilers = ("libtpu",) if kind.startswith("TPU") else ("triton", "jax-cuda12-plugin", "jax-cuda13-plugin")
    return f"{kind} x {cores}; {_versions(*compilers)}"


@cache
def _versions(*compilers: str) -> str:
    found = {"ragged": __version__, "jax": jax.__version__}
    for name in ("jaxlib", *compilers):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return " ".join(f"{name} {version}" for name, version in found.items())


@cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# Reading


def lookup(call: Call, x: Operands, device: tuple[str, int] | None, backend: str) -> Config | None:
    """The configuration that was found for such a product, on such a device, for this backend."""
    on = device_key(device)
    if on is None or not all(isinstance(n, int) for array in jax.tree.leaves(x) for n in array.shape):
        return None
    key, file = product_key(call, x, backend), cache_path() if _reads_file() else None
    for entries in (_memory, {} if file is None else _read(file)):
        found = entries.get(on, {}).get(key)
        if found is not None and found.config.backend == backend:
            return found.config
    return None


def cache_path() -> Path | None:
    """Where the file is; None if there is to be none, or no home directory to have it in."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return None if given.lower() in ("", "off", "0") else Path(os.path.expanduser(given))
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return None if folder.startswith("~") else Path(folder) / "ragged" / "tuning.json"


def _reads_file() -> bool:
    return VARIABLE in os.environ or jax.process_count() == 1


def _read(file: Path) -> Entries:
    """What a file holds; nothing, if there is none or, said once, if it is no cache."""
    try:
        found = file.stat()
    except OSError:
        return {}
    return _parsed(file, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(8)
def _parsed(file: Path, *version: int) -> Entries:
    """What one version of a file holds."""
    try:
        return parse(_content(file))
    except (OSError, ValueError) as error:
        _warn(f"the tuning cache {file} is ignored: {error}", "Move it away, or set another in")
        return {}


def _content(file: Path) -> bytes:
    """**Raises:** `OSError` if it can't be read; a device or a pipe might never end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError("it is no regular file.")
    return file.read_bytes()


def parse(text: str | bytes) -> Entries:
    """The entries of a cache's text.

    **Raises:** `ValueError` if it is none, or of another format, or an entry is no configuration.
    """
    try:
        whole = json.loads(text)
        form, found = whole["format"], whole["found"]
        tables = {on: dict(products) for on, products in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("it is not a tuning cache.") from None
    if form != FORMAT:
        raise ValueError(f"it has format {form!r}, this version reads {FORMAT}.")
    entries: Entries = {}
    for on, products in tables.items():
        for key, record in products.items():
            try:
                entries.setdefault(on, {})[key] = Found(**record | {"config": from_json(record["config"])})
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"it holds no configuration for {key!r}.") from None
    return entries


def text_of(entries: Entries) -> str:
    found = {
        on: {key: asdict(each) | {"config": to_json(each.config)} for key, each in sorted(products.items())}
        for on, products in sorted(entries.items())
    }
    return json.dumps({"format": FORMAT, "found": found}, indent=1) + "\n"


def _warn(problem: str, mend: str) -> None:
    warnings.warn(f"`ragged.tuning`: {problem}\n{mend} `{VARIABLE}`.", stacklevel=2)


# Writing


def merged(*several: Entries) -> Entries:
    """All entries; of two for the same, the later one."""
    out: Entries = {}
    for entries in several:
        for on, products in entries.items():
            for key, each in products.items():
                there = out.setdefault(on, {}).get(key)
                out[on][key] = each if there is None or there.date <= each.date else there
    return out


def cache_entries() -> Entries:
    """All that is known: of this process, and of the file."""
    file = cache_path()
    return merged({} if file is None else _read(file), _memory)


def put(new: Entries) -> None:
    """Adds entries, in memory and in the file. Where that can't be written, says so, and keeps them in memory."""
    global _memory
    with _adding:
        _memory = merged(_memory, new)
    if (file := cache_path()) is None:
        return
    try:
        write(file, new)
    except (OSError, ValueError) as error:
        problem = f"the tuning cache {file} is not written: {error}"
        _warn(problem, "What was found is kept in this process. Set another place in")


def write(file: Path, new: Entries) -> None:
    """Merges entries into a file, or the one that it links to. Whoever else does so at the same time waits; who reads
    sees the old file or the new.

    **Raises:** `OSError` if it can't be written, `ValueError` if it holds something else.
    """
    file = Path(os.path.realpath(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        parse(_content(file))  # beside what isn't ours, no lock is left either
    with _locked(file.with_name(file.name + ".lock")) as lock:
        there = parse(_content(file)) if file.exists() else {}
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(handle, "w") as out:
                out.write(text_of(merged(there, new)))
            # Whoever may read a file of this user's may read this one.
            os.chmod(name, stat.S_IMODE(os.stat(file if file.exists() else lock.name).st_mode))
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[IO[str]]:
    """One process at a time."""
    with open(file, "a") as lock:
        try:
            import fcntl
        except ImportError:  # Windows: the file stays whole, but of two who write at once one may be lost
            yield lock
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def save_cache(file: str | os.PathLike[str]) -> None:
    """Merges all that is known into another file, for another machine of the same kind.

    **Raises:** `OSError` if it can't be written, `ValueError` if it holds something else.
    """
    try:
        write(Path(file), cache_entries())
    except ValueError as error:
        site = Site(f"ragged.tuning.save_cache({os.fspath(file)!r})")
        site.fail(ValueError, f"{error}", "Pass a file that isn't there yet, or that `save_cache` wrote.")


def load_cache(file: str | os.PathLike[str]) -> int:
    """Adds what a file holds to what is known, in memory and in the cache's file. Returns how many entries it has.

    Of two for the same product the later one counts.

    **Raises:** `OSError` if it can't be read, `ValueError` if it is no tuning cache.
    """
    try:
        new = parse(_content(Path(file)))
    except ValueError as error:
        site = Site(f"ragged.tuning.load_cache({os.fspath(file)!r})")
        site.fail(ValueError, f"{error}", "Pass what `save_cache` wrote.")
    put(new)
    return sum(map(len, new.values()))


def clear_cache() -> None:
    """Forgets what this process holds in memory. The file stays."""
    global _memory
    _memory = {}
