"""`explain`: what a product is and what would run, without running it."""

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractDevice

from ragged._errors import Site, describe, is_concrete
from ragged._explanation import PRODUCTS, Explanation, ProductPlan
from ragged._matmul import matmul
from ragged.backends import schedule
from ragged.backends.base import DEFAULT_TPU, Launch, cost, spans
from ragged.product import lowering
from ragged.product.layout import LAYOUTS, Layout
from ragged.product.operands import Call, Operand, Operands
from ragged.product.primitive import PRIMITIVES
from ragged.quant.formats import has_derivative
from ragged.quant.recipe import Recipe
from ragged.tensor.tensor import KINDS, GroupedTensor


def explain(
    lhs: GroupedTensor | Array | Any,
    rhs: GroupedTensor | Array | Any,
    *,
    platform: str | Any = None,
    device: str | AbstractDevice | Any = None,
    **options: Any,
) -> Explanation:
    """Says what `matmul(lhs, rhs, **options)` is, and what runs it and its derivatives on each platform. Computes
    nothing.

    The operands' arrays may be `jax.ShapeDtypeStruct`s. Tiles are counted, one by one, where the groups' sizes are
    arrays, and are at most so many where they aren't.

    **Arguments:**

    - `platform`: `"cpu"`, `"cuda"` or `"tpu"`: that one alone.
    - `device`: a kind, such as `"TPU v6 lite"` or `"NVIDIA H200"`, or a `jax.sharding.AbstractDevice`: what is compiled
      for it, on its platform alone. By default that of the mesh in context, or of this machine.

    **Returns:** an `Explanation`: it prints, `.plot()` draws, `.plans` has the figures, `.to_json()` all of it.

    **Raises:** what `matmul` would, except for what only values tell; `ValueError` for a platform or device that there
    isn't.

    !!! example
        ```python
        import jax.numpy as jnp
        import ragged
        x = ragged.GroupedTensor(jnp.ones((16, 4)), first_dims=jnp.array([3, 5, 0, 4], jnp.int32))
        print(ragged.explain(x, jnp.ones((4, 4, 8))))
        ```
        prints tables of operands, configurations, tiles and bounds, and first of all
        ```text
        forward: ragged rows × uniform -> ragged rows, f32[16,8]
        derivatives: by lhs forward, by rhs wgrad
        on cpu: grouped_matmul of xla
        on cuda: grouped_matmul of triton_gpu
        on tpu: grouped_matmul of pallas_tpu
        ```
    """
    inspect.signature(matmul).bind(lhs, rhs, **options)
    platforms, on = _where(platform, device)
    jaxpr, out, _ = eqx.filter_make_jaxpr(matmul)(lhs, rhs, **options)
    (forward,) = _products(jaxpr)
    products = {"forward": forward} | _derivatives(lhs, rhs, out, options)
    call, operands = _of(forward)
    layout = LAYOUTS[call.product.ragged]
    sizes, offset = _sizes(lhs, rhs, call), options.get("group_offset")
    known = sizes is not None and (offset is None or isinstance(offset, int | np.integer) or is_concrete(offset))
    known = known and not _is_unreduced(options)  # whose product is that of a device, of sizes that only it knows
    explained = [_Product.of(name, layout, each, sizes if known else None, offset) for name, each in products.items()]
    recipe = options.get("recipe")
    kinds = [KINDS[layout.kind(term)] for term in ("mk", "kn", "mn")]
    return Explanation(
        layout=layout.name,
        kinds=(kinds[0], kinds[1], kinds[2]),
        result=describe(out.data),
        derivatives=(
            layout.derivative("lhs").name if "by lhs" in products else "none",
            layout.derivative("rhs").name if "by rhs" in products else "none",
        ),
        recipe="" if recipe is None else Recipe.of(recipe).name,
        num_groups=next(x.num_groups for x in (lhs, rhs) if isinstance(x, GroupedTensor)),
        sizes=None if sizes is None else {letter: tuple(each.tolist()) for letter, each in sizes.items()},
        capacity=_capacities(call, operands),
        plans=tuple(each.on(platform, on) for platform in platforms for each in explained),
    )


def _where(platform: Any, device: Any) -> tuple[list[str], AbstractDevice | None]:
    """The platforms to explain, and the device that was asked for."""
    site, platforms = Site("ragged.explain"), sorted(lowering.PLATFORMS)
    if isinstance(device, str):
        maker = "tpu" if device.startswith("TPU") else "gpu" if device.startswith("NVIDIA") else None
        if maker is None:
            mend = "Pass one such as 'TPU v6 lite' or 'NVIDIA H200', or `platform='cpu'`."
            site.fail(ValueError, f"`device` is {device!r}, of no kind that kernels are for.", mend)
        device = AbstractDevice(device, 1 if maker == "tpu" else None, maker)
    if device is not None:
        own = {"gpu": "cuda"}.get(device.platform or "", device.platform)
        if own not in platforms or platform not in (None, own):
            problem = f"`device` is {device.device_kind!r}, of the platform {own!r}"
            problem += "." if platform is None else f", but `platform` is {platform!r}."
            site.fail(ValueError, problem, f"Platforms are {', '.join(map(repr, platforms))}.")
        platform = own
    if platform is not None and platform not in platforms:
        site.fail(ValueError, f"`platform` is {platform!r}.", f"Pass one of {', '.join(map(repr, platforms))}.")
    return platforms if platform is None else [platform], device


def _derivatives(lhs: Any, rhs: Any, out: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The products that the derivatives are, where there are any."""
    given = {"lhs": lhs, "rhs": rhs}
    if _is_unreduced(options):  # the cotangent is reduced: the derivatives are those of the sum
        options = options | {"out_sharding": None}
    wrt = [name for name, x in given.items() if has_derivative(x.dtype) and has_derivative(out.dtype)]
    if not wrt:
        return {}

    def pulled(lhs: Any, rhs: Any, **options: Any) -> Any:
        given = {"lhs": lhs, "rhs": rhs}

        def product(data: dict[str, Array]) -> Array:
            x = {name: _with_data(x, data.get(name)) for name, x in given.items()}
            return matmul(x["lhs"], x["rhs"], **options).data

        out, pull = jax.vjp(product, {name: getattr(given[name], "data", given[name]) for name in wrt})
        return pull(out)  # of the cotangent's type, whatever its sharding is

    jaxpr, _, _ = eqx.filter_make_jaxpr(pulled)(lhs, rhs, **options)
    # By the letters of the result: [m, k] is the cotangent of `lhs`.
    names = {"km": "by lhs", "kn": "by rhs"}
    found = {names.get("".join(sorted(_of(each)[0].product.out))): each for each in _products(jaxpr)}
    return {name: found[name] for name in PRODUCTS if name in found}


def _is_unreduced(options: dict[str, Any]) -> bool:
    """Whether the sum over devices is left for later."""
    sharding = options.get("out_sharding")
    return bool(getattr(getattr(sharding, "spec", sharding), "unreduced", ()))


def _with_data(x: Any, data: Any) -> Any:
    return x if data is None else x._replace_data(data) if isinstance(x, GroupedTensor) else data


def _products(jaxpr: Any) -> list[Any]:
    """The products in a jaxpr, and in those that its equations hold."""
    found = [equation for equation in jaxpr.eqns if equation.primitive in PRIMITIVES]
    for equation in jaxpr.eqns:
        parameters = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns"))
        found += [product for inner in parameters if hasattr(inner, "eqns") for product in _products(inner)]
    return found


def _of(equation: Any) -> tuple[Call, Operands]:
    """What a product's equation says, its operands as avals."""
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    return equation.params["call"], equation.params["tree"].unflatten(avals)


def _sizes(lhs: Any, rhs: Any, call: Call) -> dict[str, np.ndarray] | None:
    """The groups' sizes by letter; None where not all are known."""
    dims = {
        "m": getattr(lhs, "first_dims", None),
        "k": getattr(lhs, "last_dims", None),
        "n": getattr(rhs, "last_dims", None),
    }
    given = [dims[letter] for letter in call.product.ragged]
    if not is_concrete(*given):
        return None
    return {letter: np.asarray(sizes) for letter, sizes in zip(call.product.ragged, given, strict=True)}


def _capacities(call: Call, x: Operands) -> dict[str, Any]:
    """The least extent of the buffers that pack each ragged letter, if any does."""
    p, found = call.product, {}
    for letters, shape in ((p.lhs, x.lhs.data.shape), (p.rhs, x.rhs.data.shape), (p.out, call.shape)):
        if letters[0] in p.ragged:
            found.setdefault(letters[0], []).append(shape[-2])
    return {letter: min(extents) if len(extents) > 1 else extents[0] for letter, extents in found.items()}


class _Product(NamedTuple):
    """One of the three products, and what is the same of it on all platforms."""

    call: Call
    operands: Operands  # avals
    counted: Operands | None  # with sizes that are known, if they are
    told: dict[str, Any]  # fields of `ProductPlan`

    @staticmethod
    def of(name: str, layout: Layout, equation: Any, sizes: dict[str, np.ndarray] | None, offset: Any) -> "_Product":
        call, x = _of(equation)
        p, counted, found = call.product, _with_sizes(call, x, sizes, offset), cost(call, x)
        terms = [(_name(letters), operand, letters) for letters, operand in ((p.lhs, x.lhs), (p.rhs, x.rhs))]
        terms.sort(key=lambda term: ("lhs", "dout", "rhs").index(term[0]))
        if counted is not None:
            groups = [end - begin for begin, end in spans(call, counted).values()]
            found["flops"] = int(2 * np.sum(np.prod(groups, axis=0)))
        told = {
            "product": name,
            "layout": layout.name if name == "forward" else layout.derivative(name.removeprefix("by ")).name,
            "operands": tuple(name for name, _, _ in terms),
            "dtypes": (*(jnp.dtype(x.data.dtype).name for _, x, _ in terms), jnp.dtype(call.dtype).name),
            "scales": tuple(_scales(x, letters) for _, x, letters in terms),
            "is_exact": counted is not None,
        }
        return _Product(call, x, counted, told | found)

    def on(self, platform: str, device: AbstractDevice | None) -> ProductPlan:
        """What is lowered for a platform, or the error in its place."""
        told = ProductPlan(platform=platform, **self.told)
        try:
            with lowering.target_of(platform, self.call.options, device) as target:
                launch = lowering.launch_of(platform, self.operands, self.call, target)
        except (ValueError, NotImplementedError) as error:
            message = str(error).splitlines()[0].removeprefix("`ragged.matmul`: ")
            return replace(told, runs=f"{type(error).__name__}: {message}", error=str(error))
        told = replace(
            told,
            device="" if target.device is None else target.device[0],
            backend=launch.backend,
            kernel=launch.kernel,
            runs=str(launch),
            config=launch.config,
            source=launch.source,
            passed_over=launch.passed_over,
            visits=launch.visits,
        )
        return _on_chip(_counted(told, launch, self.counted), target.device)


def _counted(told: ProductPlan, launch: Launch, counted: Operands | None) -> ProductPlan:
    """With what a launch does for these sizes."""
    if counted is None:
        return told
    work = lowering.work_of(launch, counted)
    tiles = {"letter": work.letter, "tiles": tuple(work.tiles)}
    return replace(told, visits=work.visits, idle=work.idle, multiplied=work.flops, **tiles)


def _on_chip(told: ProductPlan, device: tuple[str, int] | None) -> ProductPlan:
    """With the chip's numbers, where there are any."""
    if told.platform == "tpu":
        from ragged.backends.tpu import tiles

        chip, kind = tiles.chip(device), DEFAULT_TPU[0]
    elif told.platform == "cuda":
        from ragged.backends.gpu import tiles

        chip, kind = tiles.chip(device), "NVIDIA A100"
    else:
        return told
    return replace(
        told, chip=told.device or kind, flops_per_second=float(chip.flops), bytes_per_second=float(chip.bandwidth)
    )


def _with_sizes(call: Call, x: Operands, sizes: dict[str, np.ndarray] | None, offset: Any) -> Operands | None:
    """The operands with sizes and offset that are known; None where they aren't, or an extent is symbolic."""
    shapes: Iterable[Any] = (call.shape, *(array.shape for array in jax.tree.leaves(x)))
    if sizes is None or not all(isinstance(n, int) for shape in shapes for n in shape):
        return None
    known = {}
    for letter, aval in x.sizes.items():
        known[letter] = sizes[letter]
        if aval.shape != sizes[letter].shape:  # a matrix that all groups share makes them one
            capacity = _capacities(call, x)[letter]
            known[letter] = schedule.known_offsets(sizes[letter], capacity)[-1:]
            if aval.shape != (1,):
                return None
    return x._replace(sizes=known, offset=None if x.offset is None else np.asarray(offset))


def _name(letters: str) -> str:
    """What has these letters: `dout` is the cotangent of the result."""
    return {"km": "lhs", "kn": "rhs", "mn": "dout"}["".join(sorted(letters))]


def _scales(operand: Operand, letters: str) -> str:
    """What shares a scale: `"1 m × 128 k"`."""
    if operand.scales is None:
        return ""
    extents = sorted(zip(letters, operand.scales.block, strict=True), key=lambda each: "mkn".index(each[0]))
    return " × ".join(f"{'all' if extent is None else extent} {letter}" for letter, extent in extents)
