"""`python -m ragged`: what is here, what a product would run, how fast it is, and what is faster.

    python -m ragged info
    python -m ragged explain --m 4096 --k 1024 --n 1024 --groups 16 --sizes zipf --dtype bfloat16
    python -m ragged bench --layout wgrad --m 512 --k 4096 --n 512 --groups 8
    python -m ragged tune --m 4096 --k 1024 --n 1024 --groups 16 --seconds 60

Exit codes: 0; 2 for a wrong command line; 1 for what fails, with the error's text.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragged import tuning
from ragged._explain import explain
from ragged._matmul import matmul
from ragged._rounds import rounds
from ragged._sizes import KINDS, sample_sizes
from ragged._version import __version__
from ragged.backends import cache
from ragged.product.layout import NAMES
from ragged.product.lowering import BACKENDS, PLATFORMS, platform_name
from ragged.quant.formats import has_derivative
from ragged.quant.recipe import PRESETS
from ragged.tensor.tensor import GroupedTensor

LETTERS = {name: letters for letters, name in NAMES.items()}
PACKAGES = (
    "jax",
    "jaxlib",
    "equinox",
    "jaxtyping",
    "libtpu",
    "triton",
    "jax-triton",
    "jax-cuda13-plugin",
    "matplotlib",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        said, record = args.run(args)
    except _Usage as error:
        parser.error(str(error))
    except Exception as error:  # whatever the library or XLA says: here it is read by people, and by scripts
        print(f"ragged {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    try:
        print(json.dumps(record, indent=1, default=_plain) if args.json else said, flush=True)
    except BrokenPipeError:  # who reads has seen enough; or Python would say so again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"ragged {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


class _Usage(Exception):
    """A wrong command line."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ragged", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[..., Any], what: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=what, description=what)
        found.set_defaults(run=run)
        found.add_argument("--json", action="store_true", help="print JSON")
        return found

    command("info", _info, "versions, devices, backends and why not, the cache of configurations")
    said = command("explain", _explain, "what a product and its derivatives would run on each platform")
    said.add_argument("--platform", choices=sorted(PLATFORMS), help="that one alone")
    said.add_argument("--device", help="a kind of device, such as 'TPU v6 lite' or 'NVIDIA H200'")
    said.add_argument(
        "--plot", metavar="FILE", help="draw the groups and the tiles on the first platform: needs matplotlib"
    )
    timed = command("bench", _bench, "medians of a product, its derivatives, and `jax.lax.ragged_dot` beside them")
    tuned = command("tune", _tune, "find the fastest configurations here, and remember them")
    for each in (said, timed, tuned):
        _add_product(each)
    timed.add_argument(
        "--seconds", type=_positive, default=5.0, help="how long to measure, at least 3 rounds: %(default)s"
    )
    tuned.add_argument("--seconds", type=_positive, default=60.0, help="how long to measure each product: %(default)s")
    return parser


def _add_product(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the product, [m, k] × [k, n] in each group").add_argument
    add("--layout", choices=[*LETTERS], default="forward", help="which dims are ragged: %(default)s")
    for letter in "mkn":
        add(f"--{letter}", type=_count, required=True, help="extent; of a ragged dim, of all groups together")
    add("--groups", type=_count, required=True, help="how many there are")
    kinds = ", ".join(KINDS)
    add("--sizes", default="even", help=f"of ragged dims: {kinds}; or a list such as 3,5,0,4: %(default)s")
    add("--seed", type=partial(_count, least=0), default=0, help="of random sizes and operands: %(default)s")
    add("--dtype", default="bfloat16", help="of the operands: %(default)s")
    add("--recipe", choices=[*PRESETS], help="quantises")
    add("--backend", choices=[*BACKENDS], help="the platform's own by default")


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no int, {least} or more")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def _plain(x: Any) -> Any:
    """Of what JSON doesn't know: symbolic extents, NumPy's numbers."""
    return x.item() if isinstance(x, np.generic) else str(x)


# The product


def _sizes(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """By ragged letter."""
    found = {}
    for letter in LETTERS[args.layout]:
        total = getattr(args, letter)
        if args.sizes in KINDS:
            found[letter] = sample_sizes(args.sizes, args.groups, total, args.seed)
            continue
        try:
            found[letter] = np.array([int(size) for size in args.sizes.split(",")], np.int32)
        except (ValueError, OverflowError):
            raise _Usage(f"--sizes {args.sizes!r} is neither of {', '.join(KINDS)} nor a list of ints") from None
        sizes = found[letter]
        if len(sizes) != args.groups or min(sizes) < 0 or sum(sizes.tolist()) > total:
            raise _Usage(f"--sizes must be {args.groups} sizes, of {total} in all at most, for --{letter}")
    return found


def _operands(args: argparse.Namespace, make: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The operands and options of `matmul`. A ragged-both operand is as wide as its widest group."""
    try:
        dtype = jnp.dtype(args.dtype)
    except TypeError:
        raise _Usage(f"--dtype {args.dtype!r} is no dtype") from None
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise _Usage(f"--dtype {args.dtype!r} is one that JAX has with `JAX_ENABLE_X64=1` alone")
    ragged, sizes, dims = LETTERS[args.layout], _sizes(args), {}
    for letter, each in sizes.items():
        dims[letter] = jnp.asarray(each)

    def operand(first: str, last: str) -> GroupedTensor:
        p, q = getattr(args, first), getattr(args, last)
        if first in ragged and last in ragged:
            q = max(int(max(sizes[last])), 1)
        shape = (p, q) if {first, last} & {*ragged} else (args.groups, p, q)
        return GroupedTensor(make(shape, dtype), dims.get(first), dims.get(last))

    options = {name: value for name in ("recipe", "backend") if (value := getattr(args, name)) is not None}
    if {"m", "n"} <= {*ragged}:
        options["max_last"] = max(int(max(sizes["n"])), 1)
    if args.layout == "inner_columns":
        options["capacity"] = args.n
    return operand("m", "k"), operand("k", "n"), options


def _random(args: argparse.Namespace) -> Callable[[tuple[int, ...], Any], Any]:
    """Standard normal, of integers the nearest."""
    rng = np.random.default_rng(args.seed)

    def make(shape: tuple[int, ...], dtype: Any) -> Any:
        values = rng.standard_normal(shape, np.float32)
        whole = jnp.issubdtype(dtype, jnp.integer)
        return jnp.asarray(np.round(values) if whole else values).astype(dtype)

    return make


# The commands: each returns what to print, and the same for JSON.


def _info(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    versions: dict[str, str | None] = {"ragged": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    try:
        devices = [f"{device.platform}: {device.device_kind}" for device in jax.devices()]
    except RuntimeError as error:  # a platform that was asked for and can't be had
        devices = [f"none: {error}"]
    here = {platform_name(device.partition(":")[0]) for device in devices}
    backends = {}
    for name, backend in BACKENDS.items():
        if refusal := backend.refusal:
            backends[name] = f"not available: {refusal.reason}"
        elif backend.platform in here:
            backends[name] = "runs here"
        elif backend.runs_anywhere:
            backends[name] = "runs here, where another platform's own doesn't"
        else:
            backends[name] = f"lowers for {backend.platform}, which isn't here; runs interpreted, with `interpret=True`"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        entries = tuning.cache_entries()
    path = tuning.cache_path()
    tuned = {
        "path": None if path is None else str(path),
        "entries": sum(map(len, entries.values())),
        "devices": sorted(entries),
        "problems": [str(each.message) for each in caught],
    }
    lines = [f"{name:<18}{version or 'not installed'}" for name, version in versions.items()]
    lines += ["", *(f"{'device':<18}{each} × {devices.count(each)}" for each in dict.fromkeys(devices))]
    lines += ["", *(f"{name:<18}{each}" for name, each in backends.items())]
    why = "says so" if cache.VARIABLE in os.environ else "names none, and there is no home directory"
    where = path or f"none: `{cache.VARIABLE}` {why}"
    lines += ["", f"{'tuning cache':<18}{where}", f"{'':<18}{tuned['entries']} configurations", *tuned["problems"]]
    return "\n".join(lines), {"versions": versions, "devices": devices, "backends": backends, "tuning_cache": tuned}


def _explain(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    lhs, rhs, options = _operands(args, jax.ShapeDtypeStruct)
    found = explain(lhs, rhs, platform=args.platform, device=args.device, **options)
    if args.plot is not None:
        found.plot().figure.savefig(args.plot)
    return str(found), found.to_json()


def _bench(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    lhs, rhs, options = _operands(args, _random(args))
    a, b = lhs.data, rhs.data

    def ours(a: Any, b: Any) -> Any:
        return matmul(lhs._replace_data(a), rhs._replace_data(b), **options).data

    ways = {"ragged": ours}
    if args.layout == "forward" and args.recipe is None and jnp.issubdtype(a.dtype, jnp.floating):
        ways["ragged_dot"] = lambda a, b: jax.lax.ragged_dot(a, b, lhs.first_dims)
    out = jax.eval_shape(ours, a, b)
    ct = _random(args)(out.shape, out.dtype)
    runs = {}
    for way, product in ways.items():
        runs["forward", way] = jax.jit(product), (a, b)
        if has_derivative(a.dtype):
            by_lhs = jax.jit(lambda a, b, ct, product=product: jax.vjp(lambda a: product(a, b), a)[1](ct))
            by_rhs = jax.jit(lambda a, b, ct, product=product: jax.vjp(lambda b: product(a, b), b)[1](ct))
            runs["by lhs", way], runs["by rhs", way] = (by_lhs, (a, b, ct)), (by_rhs, (a, b, ct))
    ready = {key: partial(_ready, function, operands) for key, (function, operands) in runs.items()}
    for run in ready.values():
        run()  # compiles
    taken = rounds(ready, args.seconds, np.random.default_rng(args.seed), 3, None)
    count = len(taken["forward", "ragged"])
    medians = {key: float(np.median(each)) for key, each in taken.items()}
    flops = {each.product: each.flops for each in explain(lhs, rhs, **options).plans}
    own = jax.devices()[0]
    products = list(dict.fromkeys(product for product, _ in medians))
    lines = [
        f"{_what(args)} on {own.platform} ({own.device_kind}), median of {count} rounds",
        f"{'':<10}" + "".join(f"{way:>12}" for way in ways) + f"{'GFLOP/s':>12}",
    ]
    for product in products:
        rate = (flops[product] or 0) / medians[product, "ragged"] / 1e9
        times = "".join(f"{medians[product, way] * 1e3:>9.3f} ms" for way in ways)
        lines.append(f"{product:<10}{times}{rate:>12.1f}")
    record = {
        "product": _what(args),
        "device": {"platform": own.platform, "kind": own.device_kind},
        "versions": {"ragged": __version__, "jax": jax.__version__},
        "rounds": count,
        "seconds": {product: {way: medians[product, way] for way in ways} for product in products},
        "flops": {product: flops[product] for product in products},
    }
    return "\n".join(lines), record


def _ready(function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    return jax.block_until_ready(function(*operands))


def _what(args: argparse.Namespace) -> str:
    extents = " ".join(f"{letter}={getattr(args, letter)}" for letter in "mkn")
    recipe = f", {args.recipe}" if args.recipe else ""
    return f"{args.layout} {extents}, {args.groups} groups, sizes {args.sizes}, {args.dtype}{recipe}"


def _tune(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    lhs, rhs, options = _operands(args, _random(args))
    found = tuning.autotune(
        lhs,
        rhs,
        sizes=args.sizes if args.sizes in KINDS else None,  # a list: the operands' own
        seconds=args.seconds,
        progress=sys.stderr.isatty() and not args.json,
        **options,
    )
    return str(found), found.to_json()


if __name__ == "__main__":
    sys.exit(main())
