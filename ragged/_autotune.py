"""`autotune`: what is fastest on the device that is there, measured and remembered."""

import datetime
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax._src.core import trace_state_clean  # it has no public name
from jax.core import Tracer

from ragged._errors import Site, describe, is_arraylike, is_count
from ragged._matmul import matmul
from ragged._mesh import explicit_mesh
from ragged._products import Bound, platform, products_of, trained
from ragged._rounds import rounds
from ragged._sizes import KINDS, sample_sizes
from ragged.backends import cache
from ragged.backends.cache import Found
from ragged.backends.config import Config, to_json
from ragged.product import lowering
from ragged.product.operands import Options
from ragged.product.primitive import partitioned_matmul_p
from ragged.tensor.tensor import GroupedTensor


@dataclass(frozen=True)
class Tuned:
    """What was found for one product."""

    product: str  # its letters, dtypes and extents, as the cache has them
    sizes: str  # of the groups that it was measured on: "own", "given", or the name of a distribution
    default: Config  # the backend's own choice
    best: Config  # the default, unless another was faster beyond noise
    default_seconds: float
    best_seconds: float
    tried: Mapping[str, float]  # by configuration: median seconds over the default's in the same rounds
    failed: Mapping[str, str]  # why a configuration was not measured
    from_cache: bool = False

    @property
    def speedup(self) -> float:
        """The default's seconds over the best one's."""
        return self.default_seconds / self.best_seconds

    def __str__(self) -> str:
        if self.from_cache:
            return f"{self.product}\n  known already: {self.best}"
        what = f"{self.best_seconds * 1e6:.1f} µs, {self.speedup:.2f} x the default's speed"
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{self.product}\n  {self.best}: {what} ({len(self.tried)} tried{failed}; sizes: {self.sizes})"


@dataclass(frozen=True)
class Tuning:
    """What `autotune` found: a `Tuned` for each product that there is a choice for."""

    device: str  # with the versions of what its kernels are compiled by
    products: tuple[Tuned, ...]

    def __str__(self) -> str:
        return "\n".join([self.device, *(map(str, self.products) if self.products else ["nothing to choose"])])

    def to_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
        return {
            "device": self.device,
            "products": [
                asdict(each) | {"default": to_json(each.default), "best": to_json(each.best), "speedup": each.speedup}
                for each in self.products
            ],
        }


def candidates(lhs: Any, rhs: Any, *, most: int | Any = 32, **options: Any) -> list[Config]:
    """Configurations that `matmul(lhs, rhs, **options)` can run with on the device that is there, or that a mesh in
    context names; the one that a model finds best first, which is the default.

    The operands' arrays may be `jax.ShapeDtypeStruct`s. Of a product's derivative, pass the derivative's operands.

    **Arguments:**

    - `most`: how many at most.

    **Raises:** what `matmul` does; `ValueError` for a product over several devices, and for a `most` below 1.
    """
    site = Site("ragged.tuning.candidates(lhs, rhs)")
    _check_count(site, "most", most)
    (equation, _), *_ = products_of(partial(matmul, **options), (lhs, rhs), sizes=False)
    if _is_sharded(equation):
        mend = "Pass operands of one device's extents: with `jax.ShapeDtypeStruct`s for arrays."
        site.fail(ValueError, "a product over several devices is cut up when it is lowered.", mend)
    return Bound(equation).candidates(most)


def autotune(
    fn_or_lhs: Callable[..., Any] | GroupedTensor | Array | Any,
    *args: Any,
    derivatives: bool = True,
    sizes: Any = None,
    seconds: float | Any = 10.0,
    most: int | Any = 12,
    again: bool = False,
    progress: bool = True,
    seed: int | Any = 0,
    **options: Any,
) -> Tuning:
    """Measures configurations of products on the device that is there, and remembers the fastest.

    `autotune(lhs, rhs, **options)` is for `matmul(lhs, rhs, **options)` and its derivatives, `autotune(fn, *args)` for
    all products of a function's call: pass `jax.grad(loss)` for those of its derivatives. Products are measured apart,
    on random numbers.

    What is found counts wherever a product like it is lowered from now on, in this process and, by a file (see
    `cache_path`), in later ones: of the same letters, dtypes, scales and extents, of ragged dims in powers of two. What
    is compiled already stays as it is: `jax.clear_caches()` forgets it.

    Each candidate's result is compared with the default's before its time counts. Candidates take turns, in a new order
    each round, and are compared with the default by the median of the rounds' ratios. The three best meet the default
    in further rounds: one wins that is faster there by 2 % in the median, and in three rounds of four.

    **Arguments:**

    - `derivatives`: whether to tune the derivatives of `matmul(lhs, rhs)`, where its operands have any.
    - `sizes`: `(g,)` ints for all products of `g` groups; or a distribution, `"even"`, `"random"`, `"zipf"` or `"one"`
      (see `sample_sizes`), that fills buffers. By default those that the call itself has, and "random" where they
      aren't known (abstract operands; a product within a loop or a `shard_map`). Of a function, what sizes depend on
      is computed for that, but for what has effects; nothing is donated.
    - `seconds`: how long to measure each product, besides compiling: twice in 5 to 50 rounds, however long 5 take.
    - `most`: how many candidates to try, the default's included.
    - `again`: whether to measure what is in the cache already.
    - `progress`: whether to show a bar, where there is `tqdm`.
    - `seed`: of random operands, sizes and turns.
    - `options`: those of `matmul`, but for `tiling` and `config`.

    **Raises:** `RuntimeError` while a function is traced, and in a program of several processes; `ValueError` for a
    function without products, for sizes that don't fit its products, for interpreted kernels, and for numbers that
    aren't positive; `TypeError` for sizes that aren't ints; what the function or `matmul` raises.
    """
    site = Site("ragged.tuning.autotune(...)")
    _check_sizes(site, sizes)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < inf:
        site.fail(ValueError, f"`seconds` is {seconds!r}.", "It must be a positive number.")
    _check_count(site, "most", most)
    _check_count(site, "seed", seed, 0)
    if given := [name for name in ("tiling", "config") if options.get(name) is not None]:
        mend = "Leave it out: it would count before what is found."
        site.fail(ValueError, f"`{given[0]}` says what to compute with.", mend)
    if jax.process_count() > 1:
        mend = f"Tune in a program of one process, and name its file in `{cache.VARIABLE}` for those of several."
        site.fail(RuntimeError, "processes of one program must lower the same, and each would measure its own.", mend)
    fn, args = _function(site, fn_or_lhs, args, derivatives, options)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)) or not trace_state_clean():
        site.fail(RuntimeError, "a function is being traced.", "Call it outside of `jit`, `grad`, `vmap` and the like.")
    found: dict[Bound, Any] = {}
    for equation, own in products_of(fn, args, sizes=sizes is None):
        if _is_sharded(equation):
            mend = "Tune one device's part: the function inside `shard_map`, or operands of its extents."
            warnings.warn(f"`ragged.tuning`: a product over several devices is left out.\n{mend}", stacklevel=2)
            continue
        product = Bound(equation)
        if product.call.options.interpret:
            site.fail(
                ValueError,
                "`interpret=True` can't be tuned.",
                "Leave it out: an interpreter's times say nothing of the kernel's.",
            )
        found[product] = own if found.get(product) is None else found[product]
    if not found:
        site.fail(ValueError, "the function has no product of `ragged`.", "Pass one that calls `ragged.matmul`.")
    if sizes is not None and not isinstance(sizes, str):
        _check_fit(site, [*found], np.asarray(sizes))
    return _tuned([*found.items()], sizes, seconds, most, again, progress, seed)


def _function(site: Site, first: Any, args: Any, derivatives: bool, options: Any) -> tuple[Callable[..., Any], Any]:
    """What to tune, and its arguments."""
    if callable(first) and not isinstance(first, GroupedTensor) and not is_arraylike(first):
        if options:
            mend = "Have the function pass them to `matmul`; its own are given by `functools.partial`."
            site.fail(TypeError, f"options {[*options]} are given with a function.", mend)
        return first, args
    if len(args) != 1:
        site.fail(
            TypeError,
            f"it takes 2 operands, not {1 + len(args)}.",
            "Pass `lhs` and `rhs`, or a function and its arguments.",
        )
    return partial(trained if derivatives else matmul, **options), (first, *args)


def _is_sharded(equation: Any) -> bool:
    """Whether it is a product that is cut up only when it is lowered."""
    explicit = explicit_mesh([x.aval for x in equation.invars], None)
    return equation.primitive is partitioned_matmul_p or explicit is not None


def _check_count(site: Site, name: str, value: Any, least: int = 1) -> None:
    if not is_count(value, least):
        site.fail(ValueError, f"`{name}` is {value!r}.", f"It must be an int, {least} or more.")


def _check_sizes(site: Site, sizes: Any) -> None:
    if isinstance(sizes, str):
        sample_sizes(sizes, 1, 1)  # or an error that names those that there are
    elif sizes is not None:
        try:
            is_sound = np.ndim(sizes) == 1 and np.issubdtype(np.asarray(sizes).dtype, np.integer)
        except (TypeError, ValueError):
            is_sound = False
        if not is_sound:
            names = ", ".join(map(repr, KINDS))
            site.fail(TypeError, f"`sizes` is {describe(sizes)}.", f"Pass (g,) ints, one of {names}, or None.")


def _check_fit(site: Site, products: list[Bound], sizes: np.ndarray) -> None:
    """Whether some products have so many groups, and all of those room for them."""
    fitting = [product for product in products if product.groups == len(sizes)]
    if not fitting:
        groups = " or ".join(map(str, sorted({product.groups for product in products})))
        mend = f"Pass {groups} of them, or the name of a distribution."
        site.fail(ValueError, f"`sizes` has {len(sizes)} groups, and no product has so many.", mend)
    room = min((product.capacity(letter) for product in fitting for letter in product.operands.sizes), default=inf)
    if np.min(sizes, initial=0) < 0 or sum(sizes.tolist()) > room:
        problem = f"`sizes` is {describe(sizes.tolist())}, and a buffer has room for {room}."
        site.fail(ValueError, problem, "Pass sizes that fit, none of them negative, or the name of a distribution.")


# Measuring


def _tuned(
    products: list[tuple[Bound, Any]],
    sizes: Any,
    seconds: float,
    most: int,
    again: bool,
    progress: bool,
    seed: int,
) -> Tuning:
    with lowering.target_of(platform(), Options()) as target:
        device = cache.device_key(target.device) or platform()
    known, tuned = cache.cache_entries().get(device, {}), []
    for number, (product, own) in enumerate(_bar(products, progress)):
        launch = product.launch()
        if launch is None or not isinstance(launch.config, Config):
            continue
        key = product.key(launch)
        if not again and (found := known.get(key)) is not None and product.takes(found.config, launch.backend):
            times = found.default_seconds, found.seconds
            tuned.append(Tuned(key, found.sizes, launch.config, found.config, *times, {}, {}, from_cache=True))
            continue
        configs = product.candidates(most)
        if len(configs) > 1:
            name, dims = _sizes_of(product, sizes, own, seed + number)
            each = _measured(product, key, name, product.arrays(dims, seed), configs, seconds, seed)
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
            cache.put({device: {key: Found(each.best, each.best_seconds, each.default_seconds, name, date)}})
            tuned.append(each)
    return Tuning(device, tuple(tuned))


def _bar(products: list[Any], progress: bool) -> Iterator[Any]:
    try:
        from tqdm.auto import tqdm  # pyright: ignore[reportMissingModuleSource]
    except ImportError:
        return iter(products)
    return iter(tqdm(products, desc="autotune", unit="product", disable=not progress))


def _sizes_of(product: Bound, asked: Any, own: Any, seed: int) -> tuple[str, dict[str, np.ndarray]]:
    """What the product is measured on: sizes by letter, and their name."""
    letters = [*product.operands.sizes]
    if asked is not None and not isinstance(asked, str) and len(asked) == product.groups:
        return "given", {letter: np.asarray(asked) for letter in letters}
    if own is not None:
        return "own", own
    kind = asked if isinstance(asked, str) else "random"
    totals = {letter: product.capacity(letter) for letter in letters}
    return kind, {z: sample_sizes(kind, product.groups, totals[z], seed + i) for i, z in enumerate(letters)}


Run = Callable[[], Any]
_ROUNDS = 5, 50  # at least, and at most
_GAIN = 0.98
"""A configuration has to take less than this much of the default's time."""


def _measured(
    product: Bound, key: str, sizes: str, arrays: list[Array], configs: list[Config], seconds: float, seed: int
) -> Tuned:
    """The fastest of the configurations; the first one is the default."""
    rng, default = np.random.default_rng(seed), configs[0]
    runs: dict[Config, Run] = {}
    failed: dict[str, str] = {}
    want = None
    for config in configs:
        try:
            run = _compiled(product, config, arrays)
            got = np.asarray(run()).astype(np.float64)
        except Exception as error:
            if config is default:
                raise
            failed[str(config)] = f"{type(error).__name__}: {str(error).partition('\n')[0]}"
            continue
        want = got if want is None else want
        if _agree(got, want, product.call.dtype):
            runs[config] = run
        else:
            failed[str(config)] = "its result is not the default's"
    first = rounds(runs, 0.6 * seconds, rng, *_ROUNDS)
    ratios = {config: float(np.median(np.divide(first[config], first[default]))) for config in runs}
    best = default
    others = sorted((config for config in runs if config is not default), key=lambda config: ratios[config])[:3]
    last = rounds({config: runs[config] for config in (default, *others)}, 0.4 * seconds, rng, *_ROUNDS)
    for config in others:
        each = np.divide(last[config], last[default])
        ratio = float(np.median(each))
        wins = ratio < _GAIN and float(np.mean(each < 1.0)) >= 0.75
        if wins and (best is default or ratio < float(np.median(np.divide(last[best], last[default])))):
            best = config
    times = {config: float(np.median(last[config])) for config in (default, best)}
    tried = {str(config): ratios[config] for config in runs}
    return Tuned(key, sizes, default, best, times[default], times[best], tried, failed)


def _compiled(product: Bound, config: Config, arrays: list[Array]) -> Run:
    run = jax.jit(lambda *leaves: product.compute(config, leaves)).lower(*arrays).compile()
    return lambda: jax.block_until_ready(run(*arrays))


def _agree(got: np.ndarray, want: np.ndarray, dtype: Any) -> bool:
    """Whether two results differ by no more than the order of a sum explains: of random terms, and a rounding."""
    exact = not jnp.issubdtype(dtype, jnp.inexact)
    eps = 0.0 if exact else 4 * float(jnp.finfo(dtype).eps) + 1e-5
    most = float(np.max(np.abs(want), initial=0.0, where=np.isfinite(want)))
    return bool(np.allclose(got, want, rtol=eps, atol=eps * most, equal_nan=True))
