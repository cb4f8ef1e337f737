"""Configurations: how a backend computes a product.

A product's configuration comes from the first of these that has one:

1. the call: `matmul(..., backend=TpuConfig(...))`;
2. `with ragged.tuning.using(...)`, around the call;
3. the cache, if `ragged.tuning.autotune` measured the same product on the same kind of device;
4. the backend's model of running times.

A tile has the name of the dim that it divides: `m`, `k` or `n` of `lhs [m, k] @ rhs [k, n]`, also in the derivatives of
this product.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import jax

from ragged.core.errors import Site, is_count

CONFIG_TYPES: dict[str, type["Config"]] = {}
"""The type of each backend's configurations."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How one backend computes one product. A field that is None is the library's choice."""

    backend: ClassVar[str]

    def __init_subclass__(cls) -> None:
        CONFIG_TYPES[cls.backend] = cls

    @staticmethod
    def calls_back(interpret: Any, buffers: int) -> bool:
        """Whether a kernel is interpreted by callbacks that are effects of the program. `buffers`: see `TpuConfig`."""
        return False

    def along(self, letters: str) -> tuple[Any, ...]:
        """The tiles of `letters`, in their order."""
        return tuple(getattr(self, letter) for letter in letters)

    def completed(self, choose: Callable[[dict[str, Any] | None], Any]) -> Any:
        """This configuration, with its None fields taken from `choose(tiles)`.

        `tiles` is a dict with the tiles of `m`, `k` and `n` if all three are set, else None. `choose` returns a
        configuration without None.
        """
        missing = [f.name for f in fields(self) if getattr(self, f.name) is None]
        if not missing:
            return self
        tiles = {letter: getattr(self, letter) for letter in "mkn"}
        chosen = choose(None if None in tiles.values() else tiles)
        return replace(self, **{name: getattr(chosen, name) for name in missing})

    def __str__(self) -> str:
        """The tiles, and the fields that differ from their defaults. Dims without tiles (`()`) are left out."""
        shown = (f for f in fields(self) if f.name in "mkn" or getattr(self, f.name) != f.default)
        return ", ".join(f"{f.name}={_plain(getattr(self, f.name))}" for f in shown if getattr(self, f.name) != ())

    def _check(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            site = Site(f"ragged.tuning.{type(self).__name__}(...)")
            site.fail(ValueError, f"`{name}` is {getattr(self, name)!r}.", f"It must be {expected}.")

    def _check_counts(self, *names: str, minimum: int = 1) -> None:
        """Raises unless the fields are None or ints of at least `minimum` (0 or 1). NumPy ints become `int`, for
        JSON."""
        for name in names:
            if (value := getattr(self, name)) is not None:
                self._check(name, is_count(value, minimum), "a positive int" if minimum else "an int, 0 or more")
                object.__setattr__(self, name, int(value))


def _plain(x: Any) -> str:
    """The value of a field as text; several tile sizes as `32|128`."""
    return "|".join(map(str, x)) if isinstance(x, tuple) else str(x)


@dataclass(frozen=True, kw_only=True)
class XlaConfig(Config):
    """Tile sizes along each ragged dim for XLA's kernels.

    - `m`, `k`, `n`: tile sizes along the dim, ascending. With one ragged dim, several are possible, and each group uses
      those that cover it best. With several ragged dims, each has one. A uniform dim has none: `()`.
    - `batched_rows`: for one ragged dim: a batched dot multiplies this many rows of each group, the first ones, and
      tiles cover the rest. Without tiles, it is the capacity, and the dot multiplies all rows by the matrices of all
      groups.
    """

    backend: ClassVar[str] = "xla"
    m: tuple[int, ...] = ()
    k: tuple[int, ...] = ()
    n: tuple[int, ...] = ()
    batched_rows: int = 0

    def __post_init__(self) -> None:
        for name in "mkn":
            tile_sizes = getattr(self, name)
            is_valid = isinstance(tile_sizes, tuple | list) and all(map(is_count, tile_sizes))
            is_valid = is_valid and [*tile_sizes] == sorted({*tile_sizes})
            self._check(name, is_valid, "a tuple of positive ints, ascending: `(32, 128, 512)`")
            object.__setattr__(self, name, tuple(map(int, tile_sizes)))
        self._check("batched_rows", self.batched_rows is not None, "an int, 0 or more")
        self._check_counts("batched_rows", minimum=0)


@dataclass(frozen=True, kw_only=True)
class TpuConfig(Config):
    """Tiles of a TPU kernel, and how it runs.

    - `m`, `k`, `n`: tile sizes, multiples of 128. With one ragged dim, a tile may also be the whole extent, and the
      tile of the ragged dim is a multiple of the sublanes of the smallest dtype of the operands and the result that
      have this dim: 8 for 32 bits, 16 for 16, 32 for 8, 64 for 4.
    - `buffers`: number of buffers of each streamed operand. More than 2 hide more latency, but take more VMEM. Products
      with two or three ragged dims always have 2.
    - `interpret`: True or `pltpu.InterpretParams` runs the kernel's body on the CPU.
    """

    backend: ClassVar[str] = "pallas_tpu"
    m: int | None = None
    k: int | None = None
    n: int | None = None
    buffers: int = 2
    interpret: Any = False

    def __post_init__(self) -> None:
        self._check_counts("m", "k", "n", "buffers")
        is_valid = isinstance(self.interpret, bool) or is_interpret_params(self.interpret)
        self._check("interpret", is_valid, "a bool, or `pltpu.InterpretParams`")

    @staticmethod
    def calls_back(interpret: Any, buffers: int) -> bool:
        """Pallas uses callbacks for `InterpretParams`, and for every interpreted kernel with more than two buffers."""
        return not isinstance(interpret, bool) or (interpret and buffers > 2)


def is_interpret_params(x: Any) -> bool:
    from jax.experimental.pallas.tpu import InterpretParams  # imported here, since it imports all of Pallas

    return isinstance(x, InterpretParams)


@dataclass(frozen=True, kw_only=True)
class GpuConfig(Config):
    """Tiles of a GPU kernel, and how it is compiled and launched.

    - `m`, `k`, `n`: tile sizes, each a power of two and at least 16.
    - `warps`: number of warps (of 32 threads) of a program: 1, 2, 4, 8 or 16.
    - `stages`: number of tiles of each operand that are in flight.
    - `splits`: number of parts of the contracted dim, each multiplied by other programs. XLA then adds up their sums,
      in order.
    - `band`: programs visit bands of this many rows of tiles, each band column by column.
    - `programs`: number of programs that a multiprocessor runs at a time; 0: as many as fit.
    - `tma`: whether TMA loads tiles, if it can.
    - `interpret`: True runs the kernel's body on the CPU, planned for the GPU of the mesh in context, or else for an
      A100.
    """

    backend: ClassVar[str] = "triton_gpu"
    m: int | None = None
    k: int | None = None
    n: int | None = None
    warps: int | None = None
    stages: int | None = None
    splits: int | None = None
    band: int = 8
    programs: int = 0
    tma: bool = True
    interpret: bool = False

    def __post_init__(self) -> None:
        self._check_counts("m", "k", "n", "warps", "stages", "band", "splits")
        self._check("warps", self.warps in (None, 1, 2, 4, 8, 16), "1, 2, 4, 8 or 16")
        self._check_counts("programs", minimum=0)
        self._check("tma", isinstance(self.tma, bool), "a bool")
        self._check("interpret", isinstance(self.interpret, bool), "a bool")


def to_json(config: Config) -> dict[str, Any]:
    """The configuration as JSON values, without `interpret`: only compiled kernels are cached."""
    compiled = {name: value for name, value in asdict(config).items() if name != "interpret"}
    return {"backend": config.backend, **compiled}


def from_json(values: Any) -> Config:
    """Inverse of `to_json`.

    **Raises:** `ValueError`, `TypeError` or `KeyError` if `values` isn't a valid configuration.
    """
    given = dict(values)
    return CONFIG_TYPES[given.pop("backend")](**given)


class Configs(NamedTuple):
    """Configurations of a product, `out`, and of the products that are the cotangents of `lhs` and `rhs`.

    Each field is a configuration or None, the library's choice. For `using`, it may also be a tuple of configurations
    of several backends.
    """

    out: Any = None
    lhs: Any = None
    rhs: Any = None

    def of(self, letters: str, backend: str) -> Config | None:
        """The configuration for `backend`, or None.

        `letters`: the letters of the result; or of an operand, for the product that is its cotangent. Each field must
        be None or a tuple, as in `checked`.
        """
        configs = {"mn": self.out, "km": self.lhs, "kn": self.rhs}["".join(sorted(letters))]
        return next((each for each in configs or () if each.backend == backend), None)

    @staticmethod
    def checked(site: Site, given: Any) -> "Configs":
        """The caller's configurations, checked, with a tuple in each field."""
        given = given if isinstance(given, Configs) else Configs(given)
        return Configs(*(_checked(site, each) for each in given))


def _checked(site: Site, given: Any) -> tuple[Config, ...]:
    """The configurations in `given`: None, one or several. Raises unless they are of different backends and not
    interpreted: only a call's argument `backend` may be interpreted."""
    configs = () if given is None else tuple(given) if isinstance(given, tuple | list) else (given,)
    for each in configs:
        if not isinstance(each, tuple(CONFIG_TYPES.values())):
            hint = f"Pass {_names_of_types()}, or `ragged.tuning.Configs` of them."
            site.fail(TypeError, f"{each!r} is not a configuration.", hint)
        if interpret := getattr(each, "interpret", False):
            site.fail(
                ValueError,
                f"`interpret` is {interpret!r}.",
                "Pass an interpreted configuration to a single call, as its backend.",
            )
    if len({each.backend for each in configs}) < len(configs):
        problem = f"two configurations are for the same backend: {configs}."
        site.fail(ValueError, problem, "Pass one for each backend.")
    return configs


def _names_of_types() -> str:
    return ", ".join(f"`{config.__name__}`" for config in CONFIG_TYPES.values())


def backend_of(site: Site, given: Any) -> tuple[Any, Any, Configs]:
    """`(name, interpret, configs)` of a call's argument `backend`: None, a name, a configuration or `Configs`.

    If all fields of a configuration except `interpret` are defaults, it only names its backend, and isn't in `configs`:
    `using` and the cache still apply.
    """
    if not isinstance(given, Config | Configs):
        return given, False, Configs()
    by_product = given if isinstance(given, Configs) else Configs(given)
    configs = [config for config in by_product if config is not None]
    if wrong := [config for config in configs if not isinstance(config, tuple(CONFIG_TYPES.values()))]:
        site.fail(TypeError, f"`backend` has {wrong[0]!r}.", f"Pass one of {_names_of_types()}.")
    found = {(config.backend, getattr(config, "interpret", False)) for config in configs}
    if len(found) != 1:
        hint = "Pass configurations of one backend, all of them interpreted or none. `ragged.tuning.using` takes "
        hint += "configurations of several backends."
        site.fail(ValueError, f"`backend` is {given}, not configurations of one backend.", hint)
    name, interpret = found.pop()
    compiled = [replace(x, interpret=False) if x is not None and interpret else x for x in by_product]
    return name, interpret, Configs(*(None if x in (None, CONFIG_TYPES[name]()) else (x,) for x in compiled))


class Using(NamedTuple):
    """The settings of a context of `using`."""

    configs: Configs = Configs()
    cached: bool = True


_using = jax.make_user_context(Using())  # The value is a part of the keys of `jit`'s caches.


def using(*configs: Config | Configs, cached: bool = True) -> AbstractContextManager[None]:
    """A context in which products have these configurations.

    Pass one or more configurations, or one `Configs`; `using()` restores the defaults. A configuration doesn't apply to
    derivatives: for these, pass `Configs` with the fields `lhs` and `rhs`. Products that are traced in the context keep
    their configurations, also for derivatives that are taken later. Functions that `jit` compiled outside are compiled
    again inside.

    **Arguments:**

    - `cached`: whether products without a configuration use the results of `autotune` in the cache.

    **Raises:** `TypeError` for values that aren't configurations, or if `cached` isn't a bool; `ValueError` for two
    configurations of one backend, or for an interpreted one.

    !!! example
        ```python
        import ragged
        with ragged.tuning.using(ragged.tuning.XlaConfig(m=(16, 64, 256))):
            ...
        ```
    """
    site = Site("ragged.tuning.using(...)")
    if len(configs) > 1 and any(isinstance(each, Configs) for each in configs):
        site.fail(TypeError, "a `Configs` is not the only argument.", "Pass it alone, or pass configurations.")
    if not isinstance(cached, bool):
        site.fail(TypeError, f"`cached` is {cached!r}.", "It must be a bool.")
    one = configs[0] if len(configs) == 1 and isinstance(configs[0], Configs) else Configs(configs)
    return _using(Using(Configs.checked(site, one), cached))


def in_context() -> Using:
    """The settings of the innermost context of `using`."""
    return _using.value
