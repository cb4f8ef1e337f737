"""`autotune`: what is fastest on the device that is there, measured and remembered."""

import datetime
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from ragged._errors import Site, describe, is_arraylike
from ragged._matmul import matmul
from ragged._mesh import explicit_mesh
from ragged._sizes import KINDS, sample_sizes
from ragged.backends import cache
from ragged.backends.base import Launch
from ragged.backends.cache import Found
from ragged.backends.config import Config, Configs, to_json
from ragged.product import lowering
from ragged.product.operands import Call, Operand, Operands, Options
from ragged.product.primitive import PRIMITIVES, bind, partitioned_matmul_p
from ragged.quant.formats import has_derivative
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
        return {
            "device": self.device,
            "products": [
                asdict(each) | {"default": to_json(each.default), "best": to_json(each.best), "speedup": each.speedup}
                for each in self.products
            ],
        }


def candidates(lhs: Any, rhs: Any, *, most: int = 32, **options: Any) -> list[Config]:
    """Configurations that `matmul(lhs, rhs, **options)` can run with on the device that is there, or that a mesh in
    context names; the one that a model finds best first, which is the default.

    The operands' arrays may be `jax.ShapeDtypeStruct`s. Of a product's derivative, pass the derivative's operands.

    **Arguments:**

    - `most`: how many at most.

    **Raises:** what `matmul` does.
    """
    jaxpr, _ = _jaxpr(partial(matmul, **options), (lhs, rhs))
    return next(_products(jaxpr, None))[0].candidates(most)


def autotune(
    fn_or_lhs: Callable[..., Any] | GroupedTensor | Array | Any,
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
    """Measures configurations of products on the device that is there, and remembers the fastest.

    `autotune(lhs, rhs, **options)` is for `matmul(lhs, rhs, **options)` and its derivatives, `autotune(fn, *args)` for
    all products of a function's call: pass `jax.grad(loss)` for those of its derivatives. Products are measured apart,
    on random numbers.

    What is found counts wherever a product like it is lowered from now on, in this process and, by a file (see
    `cache_path`), in later ones: of the same letters, dtypes, scales and extents, of ragged dims in powers of two. What
    is compiled already stays as it is: `jax.clear_caches()` forgets it.

    Each candidate's result is compared with the default's before its time counts. Candidates take turns, in a new order
    each round, and are compared with the default by the median of the rounds' ratios. The three best meet the default
    once more, in as many rounds: one wins that is faster there by 2 % in the median, and in three rounds of four.

    **Arguments:**

    - `derivatives`: whether to tune the derivatives of `matmul(lhs, rhs)`, where its operands have any.
    - `sizes`: `(g,)` ints for all products of `g` groups; or a distribution, `"even"`, `"random"`, `"zipf"` or `"one"`
      (see `sample_sizes`), that fills buffers. By default those that the call itself has, and "random" where they
      aren't known (abstract operands; a product within a loop or a `shard_map`).
    - `seconds`: how long to measure each product, besides compiling.
    - `most`: how many candidates to try, the default's included.
    - `again`: whether to measure what is in the cache already.
    - `progress`: whether to show a bar, where there is `tqdm`.
    - `options`: those of `matmul`.

    **Raises:** `RuntimeError` while a function is traced, `ValueError` for a function without products, for sizes that
    fit none, and for interpreted kernels; what the function or `matmul` raises.
    """
    site = Site("ragged.tuning.autotune(...)")
    _check_sizes(site, sizes)
    if options.get("interpret"):
        site.fail(ValueError, "`interpret`.", "An interpreter's times say nothing of the kernel's.")
    fn, args = _function(site, fn_or_lhs, args, derivatives, options)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)) or not _is_outside():
        site.fail(RuntimeError, "a function is being traced.", "Call it outside of `jit`, `grad`, `vmap` and the like.")
    jaxpr, leaves = _jaxpr(fn, args)
    own = None if sizes is not None or not all(map(is_arraylike, leaves)) else leaves
    found: dict[Any, tuple[_Product, Any]] = {}
    for product, values in _products(jaxpr, own):
        known = found.get(product)
        if known is None or known[1] is None:
            found[product] = product, values
    if not found:
        site.fail(ValueError, "the function has no product of `ragged`.", "Pass one that calls `ragged.matmul`.")
    if sizes is not None and not isinstance(sizes, str):
        groups = {product.groups for product in found}
        if len(sizes) not in groups:
            mend = f"Pass {' or '.join(map(str, sorted(groups)))} of them, or the name of a distribution."
            site.fail(ValueError, f"`sizes` has {len(sizes)} groups, and no product has so many.", mend)
    return _tuned(list(found.values()), sizes, seconds, most, again, progress, seed)


def _function(site: Site, first: Any, args: Any, derivatives: bool, options: Any) -> tuple[Callable[..., Any], Any]:
    """What to tune, and its arguments."""
    if callable(first) and not isinstance(first, GroupedTensor) and not is_arraylike(first):
        if options:
            site.fail(TypeError, f"options {[*options]} with a function.", "Have the function pass them to `matmul`.")
        return first, args
    if len(args) != 1:
        site.fail(TypeError, f"{1 + len(args)} operands.", "Pass `lhs` and `rhs`, or a function and its arguments.")

    def step(lhs: Any, rhs: Any) -> Any:
        floats, rest = eqx.partition((lhs, rhs), _has_cotangent)
        if not derivatives or not jax.tree.leaves(floats):
            return matmul(lhs, rhs, **options).data
        out, pull = jax.vjp(lambda floats: matmul(*eqx.combine(floats, rest), **options).data, floats)
        return (out, pull(out)) if _has_cotangent(out) else out

    return step, (first, *args)


def _has_cotangent(x: Any) -> bool:
    return eqx.is_array(x) and has_derivative(x.dtype)


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


def _is_outside() -> bool:
    """Whether no function is being traced."""
    return not isinstance(jnp.zeros(()), Tracer)


# Which products there are


def _jaxpr(fn: Callable[..., Any], args: Any) -> tuple[Any, list[Any]]:
    """A call's jaxpr, and the arrays, or what stands for them, that are its arguments."""
    arrays, rest = eqx.partition((fn, args), lambda x: is_arraylike(x) or isinstance(x, jax.ShapeDtypeStruct))

    def call(arrays: Any) -> Any:
        fn, args = eqx.combine(arrays, rest)
        return eqx.filter(fn(*args), eqx.is_array)

    return jax.make_jaxpr(call)(arrays), jax.tree.leaves(arrays)


class _Product:
    """A product to tune: what it is bound with, on arrays like these."""

    def __init__(self, avals: Any, tree: Any, call: Call) -> None:
        options = call.options._replace(configs=Configs(), source="", cached=False, tiling=None)
        self.avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)
        self.tree, self.call = tree, call._replace(options=options, out_spec=None)

    @property
    def _key(self) -> Any:
        return tuple((x.shape, str(x.dtype)) for x in self.avals), self.tree, self.call

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Product) and self._key == other._key

    @property
    def operands(self) -> Operands:
        return self.tree.unflatten(self.avals)

    @property
    def groups(self) -> int:
        return self.operands.num_groups

    def launch(self, config: Config | None = None) -> Launch | None:
        """What runs on the device that is there with this configuration, or the model's own.

        None where there is nothing to multiply, or the configuration is not legal.
        """
        call = self.with_config(config)
        try:
            with lowering.target_of(_platform(), call.options) as target:
                launch = lowering.launch_of(_platform(), self.operands, call, target)
        except ValueError:
            if config is None:
                raise
            return None
        return None if launch.kernel == "zeros" else launch

    def with_config(self, config: Config | None) -> Call:
        if config is None:
            return self.call
        configs = Configs((config,), (config,), (config,))
        return self.call._replace(options=self.call.options._replace(configs=configs, source="config"))

    def candidates(self, most: int) -> list[Config]:
        """The model's own first, then others that are legal."""
        launch, found = self.launch(), []
        if launch is None:
            return []
        backend = lowering.BACKENDS[launch.backend].load()
        for config in (launch.config, *backend.candidates(launch, self.operands)):
            other = self.launch(config)
            if config not in found and other is not None and other.backend == launch.backend:
                found.append(config)
            if len(found) >= most:
                break
        return found

    def key(self, launch: Launch) -> str:
        return cache.product_key(launch.call, jax.eval_shape(partial(lowering.prepared, call=self.call), self.operands))

    def arrays(self, sizes: dict[str, np.ndarray], seed: int) -> list[Array]:
        """Random operands; scales about 1; the first groups, where a shard of them is held."""
        rng = np.random.default_rng(seed)

        def values(aval: Any) -> Array:
            if jnp.issubdtype(aval.dtype, jnp.integer):
                return jnp.asarray(rng.integers(-4, 4, aval.shape), aval.dtype)
            return jnp.asarray(rng.standard_normal(aval.shape, np.float32)).astype(aval.dtype)

        def operand(x: Operand) -> Operand:
            scales = jax.tree.map(lambda aval: jnp.asarray(rng.uniform(0.5, 2.0, aval.shape), aval.dtype), x.scales)
            return Operand(values(x.data), scales)

        x = self.operands
        dims = {z: jnp.broadcast_to(jnp.asarray(sizes[z], jnp.int32), aval.shape) for z, aval in x.sizes.items()}
        offset = None if x.offset is None else jnp.zeros(x.offset.shape, x.offset.dtype)
        epilogue = jax.tree.map(values, x.epilogue)
        return jax.tree.leaves(Operands(operand(x.lhs), operand(x.rhs), dims, offset, epilogue))

    def capacity(self, letter: str) -> int:
        """The extent of a ragged dim's buffer: where it is packed, if it is."""
        p, x = self.call.product, self.operands
        terms = ((p.lhs, x.lhs.data.shape), (p.rhs, x.rhs.data.shape), (p.out, self.call.shape))
        packed = [shape[-2] for letters, shape in terms if letters[0] == letter]
        most = min(shape[-1] for letters, shape in terms if letters[1] == letter) if not packed else 0
        return min(packed) if packed else most * self.groups


def _platform() -> str:
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
"""Primitives that call a function once, with their operands."""


def _products(closed: Any, args: list[Any] | None) -> Iterator[tuple[_Product, dict[str, np.ndarray] | None]]:
    """The products in a jaxpr, and in those that it calls, with the sizes that they have for these arguments.

    None for sizes where there are no arguments, or where a product is within a loop or a map.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    values: dict[Any, Any] = {}
    if args is not None:
        values = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        operands = [x.val if hasattr(x, "val") else values.get(x) for x in equation.invars]
        known = args is not None and all(x is not None for x in operands)
        inner = [x for x in jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr) if _is_jaxpr(x)]
        if _is_sharded(equation):
            mend = "Tune one device's part: the function inside `shard_map`, or operands of its extents."
            warnings.warn(f"`ragged.tuning`: a product over several devices is left out.\n{mend}", stacklevel=3)
        elif equation.primitive in PRIMITIVES:
            product = _Product([x.aval for x in equation.invars], equation.params["tree"], equation.params["call"])
            own = product.tree.unflatten(operands).sizes if known else None
            yield product, own and {letter: np.asarray(size) for letter, size in own.items()}
        else:
            own = operands if known and equation.primitive.name in _CALLS else None
            for each in inner:
                yield from _products(each, own)
        if known:
            out = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
            outs = out if equation.primitive.multiple_results else [out]
            values |= dict(zip(equation.outvars, outs, strict=True))


def _is_sharded(equation: Any) -> bool:
    """Whether it is a product that is cut up only when it is lowered."""
    if equation.primitive is partitioned_matmul_p:
        return True
    return equation.primitive in PRIMITIVES and explicit_mesh([x.aval for x in equation.invars], None) is not None


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


# Measuring


def _tuned(
    products: list[tuple[_Product, Any]],
    sizes: Any,
    seconds: float,
    most: int,
    again: bool,
    progress: bool,
    seed: int,
) -> Tuning:
    with lowering.target_of(_platform(), Options()) as target:
        device = cache.device_key(target.device) or _platform()
    known, tuned = cache.cache_entries().get(device, {}), []
    for number, (product, own) in enumerate(_bar(products, progress)):
        launch = product.launch()
        if launch is None or not isinstance(launch.config, Config):
            continue
        key = product.key(launch)
        if (found := known.get(key)) is not None and not again:
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


def _sizes_of(product: _Product, asked: Any, own: Any, seed: int) -> tuple[str, dict[str, np.ndarray]]:
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
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 50
_GAIN = 0.98
"""A configuration has to take less than this much of the default's time."""


def _measured(
    product: _Product, key: str, sizes: str, arrays: list[Array], configs: list[Config], seconds: float, seed: int
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
            failed[str(config)] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        want = got if want is None else want
        if _agree(got, want, product.call.dtype):
            runs[config] = run
        else:
            failed[str(config)] = "its result is not the default's"
    first = _rounds(runs, 0.6 * seconds, rng)
    ratios = {config: float(np.median(np.divide(first[config], first[default]))) for config in runs}
    best = default
    others = sorted((config for config in runs if config is not default), key=lambda config: ratios[config])[:3]
    last = _rounds({config: runs[config] for config in (default, *others)}, 0.4 * seconds, rng)
    for config in others:
        each = np.divide(last[config], last[default])
        ratio = float(np.median(each))
        wins = ratio < _GAIN and float(np.mean(each < 1.0)) >= 0.75
        if wins and (best is default or ratio < float(np.median(np.divide(last[best], last[default])))):
            best = config
    times = {config: float(np.median(last[config])) for config in (default, best)}
    tried = {str(config): ratios[config] for config in runs}
    return Tuned(key, sizes, default, best, times[default], times[best], tried, failed)


def _compiled(product: _Product, config: Config, arrays: list[Array]) -> Run:
    call = product.with_config(config)
    run = jax.jit(lambda *leaves: bind(product.tree.unflatten(leaves), call)).lower(*arrays).compile()
    return lambda: jax.block_until_ready(run(*arrays))


def _agree(got: np.ndarray, want: np.ndarray, dtype: Any) -> bool:
    """Whether two results differ by no more than the order of a sum explains: of random terms, and a rounding."""
    exact = not jnp.issubdtype(dtype, jnp.inexact)
    eps = 0.0 if exact else 4 * float(jnp.finfo(dtype).eps) + 1e-5
    most = float(np.max(np.abs(want), initial=0.0))
    return bool(np.allclose(got, want, rtol=eps, atol=eps * most))


def _rounds(runs: dict[Config, Run], seconds: float, rng: np.random.Generator) -> dict[Config, list[float]]:
    """Seconds of each in each round, in a new order each time. A short one is repeated within its turn."""
    repeats = {}
    for config, run in runs.items():
        start = time.perf_counter()
        run()
        repeats[config] = int(np.clip(1e-3 / max(time.perf_counter() - start, 1e-7), 1, 100))
    taken: dict[Config, list[float]] = {config: [] for config in runs}
    end = time.perf_counter() + seconds
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
        for place in rng.permutation(len(runs)):
            config = [*runs][place]
            start = time.perf_counter()
            for _ in range(repeats[config]):
                runs[config]()
            taken[config].append((time.perf_counter() - start) / repeats[config])
    return taken
