"""`explain`: what a product is and what would run, without running it."""

import inspect
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractDevice

from ragged._einsum import einsum, read, site_of
from ragged._errors import Site, describe, is_concrete
from ragged._explanation import PRODUCTS, Explanation, ProductPlan
from ragged._letters import Einsum
from ragged._matmul import einsum_of_matmul, matmul
from ragged._products import products, trained
from ragged.backends import schedule
from ragged.backends.base import DEFAULT_TPU, Launch, cost, spans
from ragged.product import lowering
from ragged.product.check import has_more_dims
from ragged.product.layout import LAYOUTS, Layout
from ragged.product.operands import Call, Operand, Operands
from ragged.quant.recipe import Recipe
from ragged.quant.weights import unquantized
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import KINDS, GroupedTensor


def explain(
    lhs: GroupedTensor | Array | Any,
    rhs: GroupedTensor | Array | Any,
    *,
    spec: str | Any = None,
    platform: str | Any = None,
    device: str | AbstractDevice | Any = None,
    **options: Any,
) -> Explanation:
    """Says what `matmul(lhs, rhs, **options)` is, and what runs it and its derivatives on each platform. Computes
    nothing.

    With a `spec`, what `einsum(spec, lhs, rhs, **options)` is: the product that it comes to, of letters that are merged
    and mapped. Its `lhs` is the operand that has the result's first letter which isn't mapped.

    The operands' arrays may be `jax.ShapeDtypeStruct`s. Tiles are counted, one by one, where the groups' sizes are
    arrays, and are at most so many where they aren't.

    **Arguments:**

    - `platform`: `"cpu"`, `"cuda"` or `"tpu"`: that one alone.
    - `device`: a kind, such as `"TPU v6 lite"` or `"NVIDIA H200"`, or a `jax.sharding.AbstractDevice`: what is compiled
      for it, on its platform alone. By default that of the mesh in context, or of this machine.

    **Returns:** an `Explanation`: it prints, `.plot()` draws, `.plans` has the figures, `.to_json()` all of it.

    **Raises:** what `matmul` would, except for what only values tell; `ValueError` for a platform or device that there
    isn't, `TypeError` for a device that is neither a kind nor abstract.

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
    lhs, rhs = unquantized(lhs), unquantized(rhs)
    platforms, on = _where(platform, device)
    multiply = matmul if spec is None else partial(einsum, spec)
    jaxpr, out, _ = eqx.filter_make_jaxpr(multiply)(lhs, rhs, **options)
    ((forward, _),) = products(jaxpr)
    each_of = {"forward": forward} | _derivatives(multiply, lhs, rhs, options)
    call, operands = _of(forward)
    layout = LAYOUTS[call.product.ragged]
    letters = _letters(spec, lhs, rhs, options.get("group_offset"))
    sizes, offset = _sizes(lhs, rhs, call, letters), options.get("group_offset")
    known = sizes is not None and (offset is None or isinstance(offset, int | np.integer) or is_concrete(offset))
    known = known and not _is_unreduced(options)  # whose product is that of a device, of sizes that only it knows
    explained = [_Product.of(name, layout, each, sizes if known else None, offset) for name, each in each_of.items()]
    recipe = options.get("recipe")
    kinds = [KINDS[layout.kind(term)] for term in ("mk", "kn", "mn")]
    return Explanation(
        layout=layout.name,
        kinds=(kinds[0], kinds[1], kinds[2]),
        result=describe(out.data),
        letters="" if letters is None else _said(letters),
        derivatives=(
            layout.derivative("lhs").name if "by lhs" in each_of else "none",
            layout.derivative("rhs").name if "by rhs" in each_of else "none",
        ),
        recipe="" if recipe is None else Recipe.of(recipe).name,
        num_groups=next(
            (x.num_groups for x in (lhs, rhs) if isinstance(x, GroupedTensor | Gathered)),
            max((x.shape[0] for x in (lhs, rhs) if len(x.shape) > 2), default=1),
        ),
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
    if device is not None and not isinstance(device, AbstractDevice):
        mend = "Pass its kind, as `device.device_kind`, or a `jax.sharding.AbstractDevice`."
        site.fail(TypeError, f"`device` is {describe(device)}.", mend)
    if device is not None:
        own = lowering.platform_name(device.platform)
        if own not in platforms or platform not in (None, own):
            problem = f"`device` is {device.device_kind!r}, of the platform {own!r}"
            problem += "." if platform is None else f", but `platform` is {platform!r}."
            site.fail(ValueError, problem, f"Platforms are {', '.join(map(repr, platforms))}.")
        platform = own
    if platform is not None and platform not in platforms:
        site.fail(ValueError, f"`platform` is {platform!r}.", f"Pass one of {', '.join(map(repr, platforms))}.")
    return platforms if platform is None else [platform], device


def _letters(spec: Any, lhs: Any, rhs: Any, offset: Any) -> Einsum | None:
    """The letters that an einsum merges to a product's, and `matmul` of more than two dims; None without any."""
    if spec is None and not has_more_dims(lhs) and not has_more_dims(rhs):
        return None
    lhs, rhs = (_with_buffer(x.dispatch() if isinstance(x, Gathered) else x) for x in (lhs, rhs))
    if spec is None:
        return einsum_of_matmul(lhs, rhs, offset)
    return read(site_of(spec, lhs, rhs), spec, lhs, rhs, offset)


def _with_buffer(x: Any) -> Any:
    """With arrays where there are shapes: of one element, seen as many."""
    return jax.tree.map(
        lambda leaf: (
            np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        ),
        x,
    )


def _said(e: Einsum) -> str:
    """`"m = t h, k = d, n = e; mapped: b"`."""
    parts = [f"{name} = {' '.join(letters) or '1'}" for name, letters in e.roles.items()]
    of_batch = "" if not e.batch else f"; {'mapped' if e.is_mapped else 'more groups'}: {' '.join(e.batch)}"
    return f"{', '.join(parts)}{of_batch}; lhs is `{e.lhs.name}`"


def _derivatives(multiply: Any, lhs: Any, rhs: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The products that the derivatives are, where there are any."""
    if _is_unreduced(options):  # the cotangent is reduced: the derivatives are those of the sum
        options = options | {"out_sharding": None}
    jaxpr, _, _ = eqx.filter_make_jaxpr(trained)(lhs, rhs, multiply=multiply, **options)
    # By the letters of the result: [m, k] is the cotangent of `lhs`.
    names = {"km": "by lhs", "kn": "by rhs"}
    found = {names.get("".join(sorted(_of(each)[0].product.out))): each for each, _ in products(jaxpr)}
    return {name: found[name] for name in PRODUCTS if name in found}


def _is_unreduced(options: dict[str, Any]) -> bool:
    """Whether the sum over devices is left for later."""
    sharding = options.get("out_sharding")
    return bool(getattr(getattr(sharding, "spec", sharding), "unreduced", ()))


def _of(equation: Any) -> tuple[Call, Operands]:
    """What a product's equation says, its operands as avals."""
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    return equation.params["call"], equation.params["tree"].unflatten(avals)


def _sizes(lhs: Any, rhs: Any, call: Call, letters: Einsum | None) -> dict[str, np.ndarray] | None:
    """The groups' sizes by letter; None where not all are known."""
    dims = {
        "m": getattr(lhs, "first_dims", None),
        "k": getattr(lhs, "last_dims", None),
        "n": getattr(rhs, "last_dims", None),
    }
    if letters is not None:
        given = [getattr(x, name, None) for x in (lhs, rhs) for name in ("first_dims", "last_dims")]
        known = is_concrete(*(each for each in given if each is not None))
        dims = {z: letters.sizes(role) if known else None for z, role in letters.roles.items()}
    given = [dims[letter] for letter in call.product.ragged]
    if not is_concrete(*given):
        return None
    return {letter: np.asarray(sizes) for letter, sizes in zip(call.product.ragged, given, strict=True)}


def _capacities(call: Call, x: Operands) -> dict[str, Any]:
    """The least extent of the buffers that pack each ragged letter, if any does."""
    p, found = call.product, {}
    for letters, shape in ((p.lhs, x.lhs_shape), (p.rhs, x.rhs.data.shape), (p.out, call.shape)):
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
            found["flops"] = int(2 * np.sum(np.prod(groups, axis=0))) * (call.batch(x) or 1)
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
            message = str(error).partition("\n")[0].removeprefix("`ragged.matmul`: ")
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
    if device is not None and not tiles.is_known(device):
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
