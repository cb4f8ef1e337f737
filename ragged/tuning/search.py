"""`autotune`: measures configurations on this device, and caches the fastest."""

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
from jax._src.core import trace_state_clean  # no public name
from jax.core import Tracer

from ragged.backends import cache
from ragged.backends.cache import Found
from ragged.core.errors import Site, describe, is_arraylike, is_count
from ragged.core.formats import AnyArray
from ragged.ops.matmul import matmul
from ragged.ops.request import Arguments
from ragged.primitive import lowering
from ragged.primitive.primitive import is_over_devices
from ragged.product.config import Config, Configs, backend_of, to_json
from ragged.product.operands import Options
from ragged.tensor.tensor import GroupedTensor
from ragged.tuning.products import BoundProduct, Sizes, platform, products_of, with_cotangents
from ragged.tuning.rounds import rounds
from ragged.tuning.sizes import KINDS, sample_sizes


@dataclass(frozen=True)
class Tuned:
    """Result of `autotune` for one product.

    - `product`: the product's key in the cache: letters, dtypes and extents.
    - `sizes`: the measured group sizes: "own" (the call's), "given", or a distribution.
    - `default`: the backend's choice.
    - `best`: the default, unless another configuration was faster beyond noise.
    - `default_seconds`: median of rounds.
    - `best_seconds`: `default_seconds` times the median over rounds of the best's time / the default's time.
    - `tried`: keyed by configuration: its time / the default's time, median of rounds.
    - `failed`: keyed by configuration: the reason why it was not measured.
    - `from_cache`: whether nothing was measured, because the cache has the product.
    """

    product: str
    sizes: str
    default: Config
    best: Config
    default_seconds: float
    best_seconds: float
    tried: Mapping[str, float]
    failed: Mapping[str, str]
    from_cache: bool = False

    @property
    def speedup(self) -> float:
        """`default_seconds / best_seconds`."""
        return self.default_seconds / self.best_seconds

    def __str__(self) -> str:
        if self.from_cache:
            return f"{self.product}\n  {self.best}: from the cache"
        what = f"{self.best_seconds * 1e6:.1f} µs, {self.speedup:.2f} x the default's speed"
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{self.product}\n  {self.best}: {what} ({len(self.tried)} tried{failed}; sizes: {self.sizes})"


@dataclass(frozen=True)
class Tuning:
    """Result of `autotune`.

    - `device`: the device's key in the cache: its kind and the versions of its compilers.
    - `products`: a `Tuned` for each product that has several configurations.
    """

    device: str
    products: tuple[Tuned, ...]

    def __str__(self) -> str:
        return "\n".join([self.device, *(map(str, self.products) if self.products else ["nothing to choose"])])

    def to_json(self) -> dict[str, Any]:
        """All fields, for `json.dumps`."""
        return {
            "device": self.device,
            "products": [
                asdict(each) | {"default": to_json(each.default), "best": to_json(each.best), "speedup": each.speedup}
                for each in self.products
            ],
        }


def candidates(lhs: Any, rhs: Any, *, most: int = 32, **options: Any) -> list[Config]:
    """Configurations that `matmul(lhs, rhs, **options)` can run with, the default first.

    They are for the device of the mesh in context, or else for this device. The operands' arrays may be
    `jax.ShapeDtypeStruct`s. For a derivative, pass the derivative's operands.

    **Arguments:**

    - `most`: maximum number of configurations.

    **Raises:** what `matmul` raises; `ValueError` for a product over several devices, and for a `most` below 1.
    """
    site = Site("ragged.tuning.candidates(lhs, rhs)")
    _check_count(site, "most", most)
    Arguments.of(site, options)
    (equation, _), *_ = products_of(partial(matmul, **options), (lhs, rhs), sizes=False)
    if is_over_devices(equation):
        hint = "Pass operands with one device's extents; `jax.ShapeDtypeStruct`s can replace the arrays."
        site.fail(ValueError, "a product over several devices is partitioned when it is lowered.", hint)
    return BoundProduct(equation).candidates(most)


def autotune(
    fn_or_lhs: Callable[..., Any] | GroupedTensor | AnyArray,
    *args: Any,
    derivatives: bool = True,
    sizes: Any = None,
    seconds: float = 10.0,
    most: int = 12,
    again: bool = False,
    progress: bool = True,
    seed: int = 0,
    **options: Any,
) -> Tuning:
    """Measures configurations of products on this device, and caches the fastest.

    `autotune(lhs, rhs, **options)` tunes `matmul(lhs, rhs, **options)` and its derivatives. `autotune(fn, *args)` tunes
    all products in the call `fn(*args)`: pass `jax.grad(loss)` to tune the derivatives. Each product is measured
    separately, on random numbers.

    Later lowerings of a product use the result if the product has the same key in the cache (`Tuned.product`): layout,
    dtypes, scales, extents, precision, epilogue and batch. Extents of ragged dims are rounded to powers of two. A file
    (see `cache_path`) keeps results for later processes. Compiled programs don't change until `jax.clear_caches()`.

    Candidates whose results agree with the default's are timed in turn, in a series of rounds; the three best ones run
    a second series. One of these wins if it is 2 % faster than the default in the median, and faster in three rounds of
    four.

    **Arguments:**

    - `derivatives`: whether to tune the derivatives of `matmul(lhs, rhs)` too, if it has any.
    - `sizes`: `(g,)` ints for all products of `g` groups; or a distribution of `sample_sizes`, which fills the buffers.
      The default is the sizes of the call itself, or `"random"` where they aren't known: for abstract operands, and in
      a loop or a `shard_map`. To find the sizes, the parts of `fn` that they depend on are computed, except parts with
      effects; nothing is donated.
    - `seconds`: time to measure each product, without compiling. It is split between the two series of rounds. A series
      has at most 50 rounds, and at least 5 even if these take longer.
    - `most`: maximum number of candidates, including the default.
    - `again`: whether to measure products that are already in the cache.
    - `progress`: whether to show a progress bar, if `tqdm` is installed.
    - `seed`: random seed of operands, sizes and the order of candidates.
    - `options`: options of `matmul`. `backend`, if passed, is a name.

    **Raises:** `RuntimeError` while a function is traced, and in a program of several processes; `ValueError` for a
    function without products, for sizes that don't fit, for interpreted kernels, and for numbers that aren't positive;
    `TypeError` for sizes that aren't ints; what the function or `matmul` raises.
    """
    site = Site("ragged.tuning.autotune(...)")
    _check_sizes(site, sizes)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < inf:
        site.fail(ValueError, f"`seconds` is {seconds!r}.", "It must be a positive number.")
    _check_count(site, "most", most)
    _check_count(site, "seed", seed, 0)
    if backend_of(site, options.get("backend"))[2] != Configs():
        hint = "Pass the backend's name: a configuration fixes the tiles, and leaves nothing to tune."
        site.fail(ValueError, f"`backend` is {options['backend']!r}.", hint)
    if jax.process_count() > 1:
        hint = f"Tune in a program of one process, and set `{cache.VARIABLE}` to its file in all processes."
        problem = "all processes of a program must lower the same kernels, but each would find different ones."
        site.fail(RuntimeError, problem, hint)
    fn, args = _function(site, fn_or_lhs, args, derivatives, options)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)) or not trace_state_clean():
        site.fail(
            RuntimeError,
            "a function is being traced.",
            "Call it outside of `jit`, `grad`, `vmap` and other transformations.",
        )
    found: dict[BoundProduct, Any] = {}
    for equation, call_sizes in products_of(fn, args, sizes=sizes is None):
        if is_over_devices(equation):
            hint = "Tune one device's part: the function inside `shard_map`, or operands with one device's extents."
            warnings.warn(f"`ragged.tuning`: a product over several devices is skipped.\n{hint}", stacklevel=2)
            continue
        product = BoundProduct(equation)
        if product.call.options.interpret:
            site.fail(
                ValueError,
                "an interpreted kernel can't be tuned.",
                "Pass no `interpret`: the times of an interpreter don't predict the times of the kernel.",
            )
        # Equal products are tuned once, with the first known sizes.
        found[product] = call_sizes if found.get(product) is None else found[product]
    if not found:
        site.fail(ValueError, "the function has no product of `ragged`.", "Pass a function that calls `ragged.matmul`.")
    if sizes is not None and not isinstance(sizes, str):
        _check_fit(site, [*found], np.asarray(sizes))
    return _tuned([*found.items()], sizes, seconds, most, again, progress, seed)


def _function(site: Site, first: Any, args: Any, derivatives: bool, options: Any) -> tuple[Callable[..., Any], Any]:
    """`(fn, args)` to tune, from the positional arguments of `autotune`."""
    if callable(first) and not isinstance(first, GroupedTensor) and not is_arraylike(first):
        if options:
            hint = "Pass options of `matmul` inside the function; bind other options with `functools.partial`."
            site.fail(TypeError, f"options {[*options]} can't be combined with a function.", hint)
        return first, args
    if len(args) != 1:
        site.fail(
            TypeError,
            f"it takes 2 operands, not {1 + len(args)}.",
            "Pass `lhs` and `rhs`, or a function and its arguments.",
        )
    Arguments.of(site, options)
    return partial(with_cotangents if derivatives else matmul, **options), (first, *args)


def _check_count(site: Site, name: str, value: Any, minimum: int = 1) -> None:
    if not is_count(value, minimum):
        site.fail(ValueError, f"`{name}` is {value!r}.", f"It must be an int, {minimum} or more.")


def _check_sizes(site: Site, sizes: Any) -> None:
    if isinstance(sizes, str):
        sample_sizes(sizes, 1, 1)  # raises for an unknown name
    elif sizes is not None:
        try:
            is_valid = np.ndim(sizes) == 1 and np.issubdtype(np.asarray(sizes).dtype, np.integer)
        except (TypeError, ValueError):
            is_valid = False
        if not is_valid:
            names = ", ".join(map(repr, KINDS))
            site.fail(TypeError, f"`sizes` is {describe(sizes)}.", f"Pass (g,) ints, one of {names}, or None.")


def _check_fit(site: Site, products: list[BoundProduct], sizes: np.ndarray) -> None:
    """Raises unless some product has this number of groups and the sizes fit the buffers of all such products."""
    fitting = [product for product in products if product.num_groups == len(sizes)]
    if not fitting:
        groups = " or ".join(map(str, sorted({product.num_groups for product in products})))
        hint = f"Pass {groups} sizes, or the name of a distribution."
        site.fail(ValueError, f"`sizes` has {len(sizes)} groups, but no product has {len(sizes)} groups.", hint)
    capacity = min((product.capacity(letter) for product in fitting for letter in product.operands.sizes), default=inf)
    if np.min(sizes, initial=0) < 0 or sum(sizes.tolist()) > capacity:
        problem = f"`sizes` is {describe(sizes.tolist())}, but the capacity of a buffer is {capacity}."
        site.fail(ValueError, problem, "Pass sizes that fit and aren't negative, or the name of a distribution.")


def _tuned(
    products: list[tuple[BoundProduct, Any]],
    sizes: Any,
    seconds: float,
    most: int,
    again: bool,
    progress: bool,
    seed: int,
) -> Tuning:
    """Tunes each product, paired with its call's sizes. Skips products with only one configuration."""
    with lowering.target_of(platform(), Options()) as target:
        device = cache.device_key(target.device) or platform()
    known, tuned = cache.cache_entries().get(device, {}), []
    for number, (product, call_sizes) in enumerate(_bar(products, progress)):
        launch = product.launch()
        if launch is None or not isinstance(launch.config, Config):
            continue
        key = product.key(launch)
        found = None if again else known.get(key)
        if found is not None and product.fitted(found.config, launch.backend) is not None:
            times = found.default_seconds, found.seconds
            tuned.append(Tuned(key, found.sizes, launch.config, found.config, *times, {}, {}, from_cache=True))
            continue
        configs = product.candidates(most)
        if len(configs) > 1:
            name, dims = _sizes_of(product, sizes, call_sizes, seed + number)
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


def _sizes_of(product: BoundProduct, requested: Any, call_sizes: Sizes | None, seed: int) -> tuple[str, Sizes]:
    """`(name, sizes)`: the group sizes that the product is measured with, and their name in `Tuned.sizes`."""
    letters = [*product.operands.sizes]
    if requested is not None and not isinstance(requested, str) and len(requested) == product.num_groups:
        return "given", {letter: np.asarray(requested) for letter in letters}
    if call_sizes is not None:
        return "own", call_sizes
    kind = requested if isinstance(requested, str) else "random"
    totals = {letter: product.capacity(letter) for letter in letters}
    return kind, {z: sample_sizes(kind, product.num_groups, totals[z], seed + i) for i, z in enumerate(letters)}


Run = Callable[[], Any]
_ROUNDS = 5, 50  # minimum and maximum
_GAIN = 0.98
"""A configuration wins only if its time is below this fraction of the default's."""


def _measured(
    product: BoundProduct, key: str, sizes: str, arrays: list[Array], configs: list[Config], seconds: float, seed: int
) -> Tuned:
    """Times the configurations, of which the first is the default, and picks the fastest."""
    rng, default = np.random.default_rng(seed), configs[0]
    runs: dict[Config, Run] = {}
    failed: dict[str, str] = {}
    expected = None
    for config in configs:
        try:
            run = _compiled(product, config, arrays)
            got = np.asarray(run()).astype(np.float64)
        except Exception as error:
            if config is default:
                raise
            failed[str(config)] = f"{type(error).__name__}: {str(error).partition('\n')[0]}"
            continue
        expected = got if expected is None else expected
        if _agree(got, expected, product.call.dtype):
            runs[config] = run
        else:
            failed[str(config)] = "its result differs from the default's"
    first = rounds(runs, 0.6 * seconds, rng, *_ROUNDS)
    ratios = {config: float(np.median(np.divide(first[config], first[default]))) for config in runs}
    best, best_ratio = default, 1.0
    others = sorted((config for config in runs if config is not default), key=lambda config: ratios[config])[:3]
    last = rounds({config: runs[config] for config in (default, *others)}, 0.4 * seconds, rng, *_ROUNDS)
    for config in others:
        each = np.divide(last[config], last[default])
        ratio = float(np.median(each))
        if ratio < min(_GAIN, best_ratio) and float(np.mean(each < 1.0)) >= 0.75:
            best, best_ratio = config, ratio
    default_seconds = float(np.median(last[default]))
    tried = {str(config): ratios[config] for config in runs}
    return Tuned(key, sizes, default, best, default_seconds, best_ratio * default_seconds, tried, failed)


def _compiled(product: BoundProduct, config: Config, arrays: list[Array]) -> Run:
    run = jax.jit(lambda *leaves: product.compute(config, leaves)).lower(*arrays).compile()
    return lambda: jax.block_until_ready(run(*arrays))


def _agree(got: np.ndarray, expected: np.ndarray, dtype: Any) -> bool:
    """Whether two results differ at most by rounding and the order of summation."""
    exact = not jnp.issubdtype(dtype, jnp.inexact)
    eps = 0.0 if exact else 4 * float(jnp.finfo(dtype).eps) + 1e-5
    largest = float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected)))
    return bool(np.allclose(got, expected, rtol=eps, atol=eps * largest, equal_nan=True))
