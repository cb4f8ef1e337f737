"""`python -m ragged`: versions and devices, and the kernels, times and tuning of a product.

    python -m ragged info
    python -m ragged explain --m 4096 --k 1024 --n 1024 --groups 16 --sizes zipf --dtype bfloat16
    python -m ragged bench --layout wgrad --m 512 --k 4096 --n 512 --groups 8
    python -m ragged tune --m 4096 --k 1024 --n 1024 --groups 16 --seconds 60

Exit codes: 0 if the command succeeds; 1 if it fails, with the error's text; 2 for a wrong command line.
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
from ragged.backends import cache
from ragged.core.formats import has_derivative
from ragged.core.version import __version__
from ragged.ops.matmul import matmul
from ragged.primitive.lowering import BACKENDS, PLATFORMS, platform_name
from ragged.product.layout import NAMES
from ragged.quant.recipe import PRESETS
from ragged.tensor.tensor import GroupedTensor
from ragged.tools.explain import explain
from ragged.tuning.rounds import rounds
from ragged.tuning.sizes import KINDS, sample_sizes

RAGGED_LETTERS = {name: letters for letters, name in NAMES.items()}
"""The ragged letters of each layout, keyed by its name."""
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
        text, record = args.run(args)
    except _Usage as error:
        parser.error(str(error))
    except Exception as error:  # The error's text is clearer here than its traceback.
        print(f"ragged {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    try:
        print(json.dumps(record, indent=1, default=_plain) if args.json else text, flush=True)
    except BrokenPipeError:  # The reader closed the pipe. Redirect stdout, or Python reports it again at exit.
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

    def command(name: str, run: Callable[..., Any], description: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=description, description=description)
        subparser.set_defaults(run=run)
        subparser.add_argument("--json", action="store_true", help="print JSON")
        return subparser

    command("info", _info, "print versions, devices, available backends and the tuning cache")
    explain_parser = command("explain", _explain, "print which kernels run a product and its derivatives")
    explain_parser.add_argument("--platform", choices=sorted(PLATFORMS), help="only this platform (default: all)")
    explain_parser.add_argument("--device", help="a device kind, such as 'TPU v6 lite' or 'NVIDIA H200'")
    explain_parser.add_argument(
        "--plot", metavar="FILE", help="draw the groups and the tiles on the first platform; needs matplotlib"
    )
    bench_parser = command(
        "bench", _bench, "measure a product and its derivatives, next to `jax.lax.ragged_dot` if it computes the same"
    )
    tune_parser = command("tune", _tune, "find the fastest configurations on this device, and cache them")
    for each in (explain_parser, bench_parser, tune_parser):
        _add_product(each)
    bench_parser.add_argument(
        "--seconds",
        type=_positive,
        default=5.0,
        help="seconds of measuring, but at least 3 rounds (default: %(default)s)",
    )
    tune_parser.add_argument(
        "--seconds", type=_positive, default=60.0, help="seconds of measuring per product (default: %(default)s)"
    )
    return parser


def _add_product(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the product, [m, k] × [k, n] in each group").add_argument
    add("--layout", choices=[*RAGGED_LETTERS], default="forward", help="which dims are ragged (default: %(default)s)")
    for letter in "mkn":
        add(f"--{letter}", type=_count, required=True, help="extent of the dim; of all groups together if it is ragged")
    add("--groups", type=_count, required=True, help="number of groups")
    kinds = ", ".join(KINDS)
    add("--sizes", default="even", help=f"sizes of ragged dims: {kinds}; or a list, 3,5,0,4 (default: %(default)s)")
    seed_help = "random seed of sizes and operands (default: %(default)s)"
    add("--seed", type=partial(_count, minimum=0), default=0, help=seed_help)
    add("--dtype", default="bfloat16", help="dtype of the operands (default: %(default)s)")
    add("--recipe", choices=[*PRESETS], help="recipe that quantises the operands (default: none)")
    add("--backend", choices=[*BACKENDS], help="backend that runs the product (default: the platform's own)")


def _count(text: str, minimum: int = 1) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not an int of at least {minimum}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _plain(x: Any) -> Any:
    """For `json.dumps`: NumPy's numbers as Python's, anything else as text."""
    return x.item() if isinstance(x, np.generic) else str(x)


def _sizes(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Group sizes, keyed by ragged letter."""
    sizes_of = {}
    for letter in RAGGED_LETTERS[args.layout]:
        total = getattr(args, letter)
        if args.sizes in KINDS:
            sizes_of[letter] = sample_sizes(args.sizes, args.groups, total, args.seed)
            continue
        try:
            sizes_of[letter] = np.array([int(size) for size in args.sizes.split(",")], np.int32)
        except (ValueError, OverflowError):
            raise _Usage(f"--sizes {args.sizes!r} is not a list of ints or one of {', '.join(KINDS)}") from None
        sizes = sizes_of[letter]
        if len(sizes) != args.groups or min(sizes) < 0 or sum(sizes.tolist()) > total:
            raise _Usage(f"--sizes must list {args.groups} sizes, at most {total} in total, for --{letter}")
    return sizes_of


def _operands(args: argparse.Namespace, make: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, Any, dict[str, Any]]:
    """`(lhs, rhs, options)` of `matmul`, with arrays built by `make(shape, dtype)`.

    If both dims of an operand are ragged, its buffer is as wide as its widest group.
    """
    try:
        dtype = jnp.dtype(args.dtype)
    except TypeError:
        raise _Usage(f"--dtype {args.dtype!r} is not a dtype") from None
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise _Usage(f"--dtype {args.dtype!r} needs `JAX_ENABLE_X64=1`")
    ragged, sizes, dims = RAGGED_LETTERS[args.layout], _sizes(args), {}
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
    """A function that makes standard normal arrays, rounded to integers for integer dtypes."""
    rng = np.random.default_rng(args.seed)

    def make(shape: tuple[int, ...], dtype: Any) -> Any:
        values = rng.standard_normal(shape, np.float32)
        whole = jnp.issubdtype(dtype, jnp.integer)
        return jnp.asarray(np.round(values) if whole else values).astype(dtype)

    return make


# The commands: each returns its output as text and as a JSON object.


def _info(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    versions: dict[str, str | None] = {"ragged": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    try:
        devices = [f"{device.platform}: {device.device_kind}" for device in jax.devices()]
    except RuntimeError as error:  # a requested platform isn't available
        devices = [f"none: {error}"]
    here = {platform_name(device.partition(":")[0]) for device in devices}
    backends = {}
    for name, backend in BACKENDS.items():
        if refusal := backend.refusal:
            backends[name] = f"not available: {refusal.reason}"
        elif backend.platform in here:
            backends[name] = "runs here"
        elif backend.runs_anywhere:
            backends[name] = "runs here, if the platform's own backend doesn't"
        else:
            backends[name] = (
                f"lowers for {backend.platform}, which isn't here; runs interpreted, with `interpret=True` in its "
                "configuration"
            )
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
    why = "disables it" if cache.VARIABLE in os.environ else "is not set, and there is no home directory"
    where = path or f"none: `{cache.VARIABLE}` {why}"
    lines += ["", f"{'tuning cache':<18}{where}", f"{'':<18}{tuned['entries']} configurations", *tuned["problems"]]
    return "\n".join(lines), {"versions": versions, "devices": devices, "backends": backends, "tuning_cache": tuned}


def _explain(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    lhs, rhs, options = _operands(args, jax.ShapeDtypeStruct)
    explanation = explain(lhs, rhs, platform=args.platform, device=args.device, **options)
    if args.plot is not None:
        explanation.plot().figure.savefig(args.plot)
    return str(explanation), explanation.to_json()


def _bench(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    lhs, rhs, options = _operands(args, _random(args))
    a, b = lhs.data, rhs.data

    def ours(a: Any, b: Any) -> Any:
        return matmul(lhs.with_data(a), rhs.with_data(b), **options).data

    out, variants = jax.eval_shape(ours, a, b), {"ragged": ours}
    if args.layout == "forward" and args.recipe is None and jnp.issubdtype(a.dtype, jnp.floating):
        variants["ragged_dot"] = lambda a, b: jax.lax.ragged_dot(a, b, lhs.first_dims, preferred_element_type=out.dtype)
    ct = _random(args)(out.shape, out.dtype)
    runs = {}
    for variant, product in variants.items():
        runs["forward", variant] = jax.jit(product), (a, b)
        if has_derivative(a.dtype):
            by_lhs = jax.jit(lambda a, b, ct, product=product: jax.vjp(lambda a: product(a, b), a)[1](ct))
            by_rhs = jax.jit(lambda a, b, ct, product=product: jax.vjp(lambda b: product(a, b), b)[1](ct))
            runs["by lhs", variant], runs["by rhs", variant] = (by_lhs, (a, b, ct)), (by_rhs, (a, b, ct))
    ready = {key: partial(_ready, function, operands) for key, (function, operands) in runs.items()}
    for run in ready.values():
        run()  # Compiles before the measurement.
    times = rounds(ready, args.seconds, np.random.default_rng(args.seed), 3, None)
    count = len(times["forward", "ragged"])
    medians = {key: float(np.median(each)) for key, each in times.items()}
    flops = {each.product: each.flops for each in explain(lhs, rhs, **options).plans}
    device = jax.devices()[0]
    products = list(dict.fromkeys(product for product, _ in medians))
    lines = [
        f"{_description(args)} on {device.platform} ({device.device_kind}), median of {count} rounds",
        f"{'':<10}" + "".join(f"{variant:>12}" for variant in variants) + f"{'GFLOP/s':>12}",
    ]
    for product in products:
        rate = (flops[product] or 0) / medians[product, "ragged"] / 1e9
        columns = "".join(f"{medians[product, variant] * 1e3:>9.3f} ms" for variant in variants)
        lines.append(f"{product:<10}{columns}{rate:>12.1f}")
    record = {
        "product": _description(args),
        "device": {"platform": device.platform, "kind": device.device_kind},
        "versions": {"ragged": __version__, "jax": jax.__version__},
        "rounds": count,
        "seconds": {product: {variant: medians[product, variant] for variant in variants} for product in products},
        "flops": {product: flops[product] for product in products},
    }
    return "\n".join(lines), record


def _ready(function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    return jax.block_until_ready(function(*operands))


def _description(args: argparse.Namespace) -> str:
    extents = " ".join(f"{letter}={getattr(args, letter)}" for letter in "mkn")
    recipe = f", {args.recipe}" if args.recipe else ""
    return f"{args.layout} {extents}, {args.groups} groups, sizes {args.sizes}, {args.dtype}{recipe}"


def _tune(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    lhs, rhs, options = _operands(args, _random(args))
    result = tuning.autotune(
        lhs,
        rhs,
        sizes=args.sizes if args.sizes in KINDS else None,  # sizes that are listed are in the operands already
        seconds=args.seconds,
        progress=sys.stderr.isatty() and not args.json,
        **options,
    )
    return str(result), result.to_json()


if __name__ == "__main__":
    sys.exit(main())
