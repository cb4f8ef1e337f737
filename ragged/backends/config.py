"""How a product is computed: a record a backend, and where the one that is taken comes from.

In this order:

1. the call's: `matmul(..., config=...)` or `tiling=...`;
2. `with ragged.tuning.using(...)`, around the call;
3. what `ragged.tuning.autotune` found on such a device for such a product (`backends.cache`);
4. the backend's own model of what takes how long.

Tiles are by the letter of the dim that they divide: `m`, `k`, `n` of `lhs [m, k] @ rhs [k, n]`, in its derivatives too.
"""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

import jax

from ragged._errors import Site, is_count


@dataclass(frozen=True, kw_only=True)
class Config:
    """How one backend computes one product."""

    backend: ClassVar[str]

    def along(self, letters: str) -> tuple[Any, ...]:
        """The tiles of some letters, in their order."""
        return tuple(getattr(self, letter) for letter in letters)

    def __str__(self) -> str:
        """The fields that aren't as usual."""
        shown = (f for f in fields(self) if f.name in "mkn" or getattr(self, f.name) != f.default)
        return ", ".join(f"{f.name}={_plain(getattr(self, f.name))}" for f in shown if getattr(self, f.name) != ())

    def _check(self, name: str, is_sound: bool, what: str) -> None:
        if not is_sound:
            site = Site(f"ragged.tuning.{type(self).__name__}(...)")
            site.fail(ValueError, f"`{name}` is {getattr(self, name)!r}.", f"It must be {what}.")

    def _check_counts(self, *names: str, least: int = 1) -> None:
        """Also makes plain ints of NumPy's, which JSON doesn't know."""
        for name in names:
            self._check(name, is_count(getattr(self, name), least), "a positive int" if least else "an int, 0 or more")
            object.__setattr__(self, name, int(getattr(self, name)))


def _plain(x: Any) -> str:
    return "|".join(map(str, x)) if isinstance(x, tuple) else str(x)


@dataclass(frozen=True, kw_only=True)
class XlaConfig(Config):
    """Heights of the tiles that XLA's kernels take of each ragged dim, ascending.

    Of products with one ragged dim several, of which each group takes those that cover it best. Else one for each
    ragged dim. Dims that aren't ragged have none: `()`.
    """

    backend: ClassVar[str] = "xla"
    m: tuple[int, ...] | Any = ()
    k: tuple[int, ...] | Any = ()
    n: tuple[int, ...] | Any = ()
    batched_rows: int | Any = 0  # of one ragged dim: so many first rows of each group are multiplied by one dot for all

    def __post_init__(self) -> None:
        for name in "mkn":
            heights = getattr(self, name)
            is_sound = isinstance(heights, tuple | list) and all(map(is_count, heights))
            is_sound = is_sound and [*heights] == sorted({*heights})
            self._check(name, is_sound, "a tuple of positive ints, ascending: `(32, 128, 512)`")
            object.__setattr__(self, name, tuple(map(int, heights)))
        self._check_counts("batched_rows", least=0)


@dataclass(frozen=True, kw_only=True)
class TpuConfig(Config):
    """Tiles of a TPU's kernel, and how many buffers each streamed operand has."""

    backend: ClassVar[str] = "pallas_tpu"
    m: int | Any
    k: int | Any
    n: int | Any
    buffers: int | Any = 2  # 3 or 4 hide more latency, and take more VMEM

    def __post_init__(self) -> None:
        self._check_counts("m", "k", "n", "buffers")


@dataclass(frozen=True, kw_only=True)
class GpuConfig(Config):
    """Tiles of a GPU's kernel, powers of two, and how it is compiled and launched."""

    backend: ClassVar[str] = "triton_gpu"
    m: int | Any
    k: int | Any
    n: int | Any
    warps: int | Any  # of a program: 32 threads each
    stages: int | Any  # tiles of each operand in flight
    band: int | Any = 8  # rows of tiles that programs go through column by column
    programs: int | Any = 0  # that a multiprocessor runs at a time; 0 for as many as fit
    tma: bool | Any = True  # whether TMA loads tiles, where it can
    variant: str | Any = ""  # or "overlapped" or "specialised": see docs/gpu.md

    def __post_init__(self) -> None:
        self._check_counts("m", "k", "n", "warps", "stages", "band")
        self._check("warps", self.warps in (1, 2, 4, 8, 16), "1, 2, 4, 8 or 16")
        self._check_counts("programs", least=0)
        self._check("tma", isinstance(self.tma, bool), "a bool")
        self._check("variant", self.variant in ("", *VARIANTS), f"one of {('', *VARIANTS)}")


VARIANTS = ("overlapped", "specialised")
"""Other ways for the GPU's kernel to do the same: see docs/gpu.md. None is chosen before they have been measured."""

RECORDS: dict[str, type[Config]] = {record.backend: record for record in (XlaConfig, TpuConfig, GpuConfig)}


def to_json(config: Config) -> dict[str, Any]:
    return {"backend": config.backend, **asdict(config)}


def from_json(record: Any) -> Config:
    """**Raises:** `ValueError`, `TypeError` or `KeyError` for what is no record."""
    given = dict(record)
    return RECORDS[given.pop("backend")](**given)


class Configs(NamedTuple):
    """Configurations of a product and of its derivatives, each a record, a tuple of records of several backends, or
    None. Where a backend runs that none of them is for, it has its own choice.

    Those of the derivatives are by what these are of: `lhs` is for the product that is the cotangent of `lhs`.
    """

    out: Any = None
    lhs: Any = None
    rhs: Any = None

    def of(self, letters: str, backend: str) -> Config | None:
        """That of the product whose result has these letters."""
        records = {"mn": self.out, "km": self.lhs, "kn": self.rhs}["".join(sorted(letters))]
        return next((each for each in records or () if each.backend == backend), None)

    @staticmethod
    def checked(site: Site, given: Any) -> "Configs":
        """What a caller gave, with a tuple for each of the three."""
        given = given if isinstance(given, Configs) else Configs(given)
        return Configs(*(_records(site, each) for each in given))


def _records(site: Site, given: Any) -> tuple[Config, ...]:
    records = () if given is None else tuple(given) if isinstance(given, tuple | list) else (given,)
    for each in records:
        if not isinstance(each, tuple(RECORDS.values())):
            names = ", ".join(f"`{record.__name__}`" for record in RECORDS.values())
            mend = f"Pass one of {names}, a tuple of them, or `ragged.tuning.Configs(out, lhs, rhs)`."
            site.fail(TypeError, f"`config` is {each!r}.", mend)
    if len({each.backend for each in records}) < len(records):
        site.fail(ValueError, f"`config` has two records of one backend: {records}.", "Pass one for each.")
    return records


class Using(NamedTuple):
    """What a context says."""

    configs: Configs = Configs()
    cached: bool = True


_using = jax.make_user_context(Using())  # a part of the keys of `jit`'s caches


def using(*configs: Config | Configs | Any, cached: bool | Any = True) -> AbstractContextManager[None]:
    """In its context, products have these configurations. A record or some, or one `Configs`; nothing: as outside none.

    Products that are traced in the context keep theirs, derivatives included. What `jit` compiled outside is compiled
    again inside. A record is for products, not for their derivatives: those are the other entries of `Configs`.

    **Arguments:**

    - `cached`: whether what `autotune` found counts, where no record does.

    **Raises:** `TypeError` for what is no record or no bool, `ValueError` for two records of one backend.

    !!! example
        ```python
        import ragged
        with ragged.tuning.using(ragged.tuning.XlaConfig(m=(16, 64, 256))):
            ...
        ```
    """
    site = Site("ragged.tuning.using(...)")
    if len(configs) > 1 and any(isinstance(each, Configs) for each in configs):
        site.fail(TypeError, "a `Configs` is not the only argument.", "Pass it alone, or records.")
    if not isinstance(cached, bool):
        site.fail(TypeError, f"`cached` is {cached!r}.", "It must be a bool.")
    one = configs[0] if len(configs) == 1 and isinstance(configs[0], Configs) else Configs(configs)
    return _using(Using(Configs.checked(site, one), cached))


def in_context() -> Using:
    return _using.value
