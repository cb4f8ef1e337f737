"""`explain`: a product's layout, cost and kernels on each platform, without running it."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice

from ragged.backends.base import DEFAULT_TPU, Launch, cost, spans
from ragged.core.errors import Site, describe, is_concrete
from ragged.core.formats import AnyArray, accumulator_dtype
from ragged.core.offsets import known_offsets
from ragged.ops.check import has_more_dims
from ragged.ops.einsum import einsum, read, site_of
from ragged.ops.letters import Einsum
from ragged.ops.matmul import einsum_of_matmul, matmul
from ragged.ops.request import Arguments
from ragged.primitive import fused, lowering
from ragged.primitive.primitive import is_over_devices, partitioned_matmul_p
from ragged.product.function import function_of
from ragged.product.layout import LAYOUTS, Layout
from ragged.product.operands import Call, EpilogueSpec, Operand, Operands
from ragged.quant.recipe import Recipe
from ragged.quant.weights import QuantizedWeights, unquantized
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import KINDS, GroupedTensor
from ragged.tools.explanation import PRODUCTS, Explanation, ProductPlan
from ragged.tuning.products import products, with_cotangents


def explain(
    lhs: GroupedTensor | Gathered | AnyArray | jax.ShapeDtypeStruct,
    rhs: GroupedTensor | QuantizedWeights | AnyArray | jax.ShapeDtypeStruct,
    *,
    spec: str | None = None,
    platform: str | None = None,
    device: str | AbstractDevice | None = None,
    **options: Any,
) -> Explanation:
    """Describes `matmul(lhs, rhs, **options)` and its derivatives: layout, cost, and the kernels on each platform.

    Nothing is computed. With a `spec`, it describes the single product that `einsum(spec, lhs, rhs, **options)`
    computes. Its `lhs` is the operand that has the first unmapped letter of the result.

    Arrays may be `jax.ShapeDtypeStruct`s. Tile counts are exact for concrete group sizes, else upper bounds. Operands
    that are sharded over several devices are planned as a whole, for one device. For a device's part, pass operands
    with the part's extents.

    **Arguments:**

    - `spec`: an einsum's spec; None for `matmul`.
    - `platform`: only this platform, `"cpu"`, `"cuda"` (also `"gpu"`) or `"tpu"`; None for all.
    - `device`: a device kind, such as `"TPU v6 lite"` or `"NVIDIA H200"`, or a `jax.sharding.AbstractDevice`. Kernels
      are chosen for it, and only its platform is explained. The default is the device of the mesh in context, or of
      this machine.
    - `options`: options of `matmul` or `einsum`.

    **Returns:** an `Explanation`, which prints. `.plot()` draws it, `.plans` has the figures, and `.to_json()` returns
    all of them for `json.dumps`.

    **Raises:** what `matmul` raises, except errors that depend on values; `ValueError` for an unknown platform or
    device, `TypeError` for a device that is neither a kind nor abstract.

    !!! example
        ```python
        import jax.numpy as jnp
        import ragged
        x = ragged.GroupedTensor(jnp.ones((16, 4)), first_dims=jnp.array([3, 5, 0, 4], jnp.int32))
        print(ragged.explain(x, jnp.ones((4, 4, 8))))
        ```
        prints tables of operands, configurations, tiles and bounds. The output begins with
        ```text
        forward: ragged rows × uniform -> ragged rows, f32[16,8]
        derivatives: by lhs forward, by rhs wgrad
        on cpu: grouped_matmul of xla
        on cuda: grouped_matmul of triton_gpu
        on tpu: grouped_matmul of pallas_tpu
        ```
    """
    Arguments.of(Site("ragged.explain(lhs, rhs)"), options)
    lhs, rhs = unquantized(lhs), unquantized(rhs)
    platforms, abstract_device = _platforms(platform, device)
    multiply: Any = matmul if spec is None else partial(einsum, spec)
    jaxpr, out, _ = eqx.filter_make_jaxpr(multiply)(lhs, rhs, **options)
    ((forward, _),) = products(jaxpr)
    equations = {"forward": forward} | _derivatives(multiply, lhs, rhs, options)
    call, operands = _call_and_operands(forward)
    layout = LAYOUTS[call.product.ragged]
    letters = _letters(spec, lhs, rhs, options.get("group_offset"))
    sizes, offset = _sizes(lhs, rhs, call, letters), options.get("group_offset")
    known = sizes is not None and (offset is None or isinstance(offset, int | np.integer) or is_concrete(offset))
    # Devices have parts of different groups.
    known = known and not _is_unreduced(options) and not any(map(is_over_devices, equations.values()))
    explained = [_Product.of(name, layout, each, sizes if known else None, offset) for name, each in equations.items()]
    explained[0] = explained[0].then(options.get("bias"), options.get("activation"))
    recipe = options.get("recipe")
    kinds = [KINDS[layout.kind(pair)] for pair in ("mk", "kn", "mn")]
    return Explanation(
        layout=layout.name,
        kinds=(kinds[0], kinds[1], kinds[2]),
        result=describe(out.data),
        letters="" if letters is None else _roles(letters),
        derivatives=(
            layout.derivative("lhs").name if "by lhs" in equations else "none",
            layout.derivative("rhs").name if "by rhs" in equations else "none",
        ),
        recipe="" if recipe is None else Recipe.of(recipe).name,
        num_groups=next(
            (x.num_groups for x in (lhs, rhs) if isinstance(x, GroupedTensor | Gathered)),
            max((x.shape[0] for x in (lhs, rhs) if len(x.shape) > 2), default=1),
        ),
        sizes=None if sizes is None else {letter: tuple(each.tolist()) for letter, each in sizes.items()},
        capacity=_capacities(call, operands),
        plans=tuple(each.on(platform, abstract_device) for platform in platforms for each in explained),
    )


def _platforms(platform: Any, device: Any) -> tuple[list[str], AbstractDevice | None]:
    """`(platforms, device)` to explain; `device` is None unless the caller passed one."""
    site, platforms = Site("ragged.explain"), sorted(lowering.PLATFORMS)
    platform = lowering.platform_name(platform)
    if isinstance(device, str):
        maker = "tpu" if device.startswith("TPU") else "gpu" if device.startswith("NVIDIA") else None
        if maker is None:
            hint = "Pass one such as 'TPU v6 lite' or 'NVIDIA H200', or `platform='cpu'`."
            site.fail(ValueError, f"`device` is {device!r}, neither a TPU nor an NVIDIA GPU.", hint)
        device = AbstractDevice(device, 1 if maker == "tpu" else None, maker)
    if device is not None and not isinstance(device, AbstractDevice):
        hint = "Pass its kind, as `jax.devices()[0].device_kind`, or a `jax.sharding.AbstractDevice`."
        site.fail(TypeError, f"`device` is {describe(device)}.", hint)
    if device is not None:
        device_platform = lowering.platform_name(device.platform)
        if device_platform not in platforms or platform not in (None, device_platform):
            problem = f"`device` is {device.device_kind!r}, of the platform {device_platform!r}"
            problem += "." if platform is None else f", but `platform` is {platform!r}."
            site.fail(ValueError, problem, f"Platforms are {', '.join(map(repr, platforms))}.")
        platform = device_platform
    if platform is not None and platform not in platforms:
        site.fail(ValueError, f"`platform` is {platform!r}.", f"Pass one of {', '.join(map(repr, platforms))}.")
    return platforms if platform is None else [platform], device


def _letters(spec: Any, lhs: Any, rhs: Any, offset: Any) -> Einsum | None:
    """The einsum that merges letters into a product's `m`, `k` and `n`; None for a `matmul` of groups with two dims."""
    if spec is None and not has_more_dims(lhs) and not has_more_dims(rhs):
        return None
    lhs, rhs = (_with_buffer(x.dispatch() if isinstance(x, Gathered) else x) for x in (lhs, rhs))
    if spec is None:
        return einsum_of_matmul(lhs, rhs, offset)
    return read(site_of(spec, lhs, rhs), spec, lhs, rhs, offset)


def _with_buffer(x: Any) -> Any:
    """`x` with each `ShapeDtypeStruct` replaced by a broadcast zero."""
    return jax.tree.map(
        lambda leaf: (
            np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        ),
        x,
    )


def _roles(e: Einsum) -> str:
    """The letters of each role as text, `"m = t h, k = d, n = e; mapped: b"`, and the name of the operand `lhs`."""
    parts = [f"{name} = {' '.join(letters) or '1'}" for name, letters in e.roles.items()]
    batch = "" if not e.batch else f"; {'mapped' if e.is_mapped else 'more groups'}: {' '.join(e.batch)}"
    return f"{', '.join(parts)}{batch}; lhs is `{e.lhs.name}`"


def _derivatives(multiply: Any, lhs: Any, rhs: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The equations of the derivatives' products, keyed by name."""
    if _is_unreduced(options):  # The cotangent is reduced, so the derivatives are as for the reduced product.
        options = options | {"out_sharding": None}
    jaxpr, _, _ = eqx.filter_make_jaxpr(with_cotangents)(lhs, rhs, multiply=multiply, **options)
    # A derivative's letters tell which one it is: [m, k] is the cotangent of `lhs`.
    names = {"km": "by lhs", "kn": "by rhs"}
    found = {names.get("".join(sorted(_call_and_operands(each)[0].product.out))): each for each, _ in products(jaxpr)}
    return {name: found[name] for name in PRODUCTS if name in found}


def _is_unreduced(options: dict[str, Any]) -> bool:
    sharding = options.get("out_sharding")
    return bool(getattr(getattr(sharding, "spec", sharding), "unreduced", ()))


def _call_and_operands(equation: Any) -> tuple[Call, Operands]:
    """`(call, operands)` of a product's equation, with `ShapeDtypeStruct`s for arrays."""
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    return equation.params["call"], equation.params["tree"].unflatten(avals)


def _sizes(lhs: Any, rhs: Any, call: Call, letters: Einsum | None) -> dict[str, np.ndarray] | None:
    """The group sizes, keyed by letter; None unless all are known."""
    dims = {
        "m": getattr(lhs, "first_dims", None),
        "k": getattr(lhs, "last_dims", None),
        "n": getattr(rhs, "last_dims", None),
    }
    if letters is not None:
        all_dims = [getattr(x, name, None) for x in (lhs, rhs) for name in ("first_dims", "last_dims")]
        known = is_concrete(*(each for each in all_dims if each is not None))
        dims = {z: letters.sizes(role) if known else None for z, role in letters.roles.items()}
    ragged_dims = [dims[letter] for letter in call.product.ragged]
    if not is_concrete(*ragged_dims):
        return None
    return {letter: np.asarray(sizes) for letter, sizes in zip(call.product.ragged, ragged_dims, strict=True)}


def _capacities(call: Call, x: Operands) -> dict[str, Any]:
    """The smallest extent of the buffers that pack each ragged letter. Letters that no buffer packs are left out."""
    p, found = call.product, {}
    for letters, shape in call.buffers(x):
        if letters[0] in p.ragged:
            found.setdefault(letters[0], []).append(shape[-2])
    return {letter: min(extents) for letter, extents in found.items()}


class _Product(NamedTuple):
    """The forward product or a derivative, with the fields of its `ProductPlan` that don't depend on the platform."""

    call: Call
    operands: Operands  # `ShapeDtypeStruct`s for arrays
    operands_with_sizes: Operands | None  # with concrete sizes; None if these are unknown
    fields: dict[str, Any]  # fields of `ProductPlan`
    is_partitioned: bool = False  # over `Auto` mesh axes
    epilogue: EpilogueSpec | None = None  # what XLA computes after the product, if its primitive has no epilogue

    @staticmethod
    def of(name: str, layout: Layout, equation: Any, sizes: dict[str, np.ndarray] | None, offset: Any) -> "_Product":
        """The product `name`, from its equation in the jaxpr."""
        call, x = _call_and_operands(equation)
        p, with_sizes, cast = call.product, _with_sizes(call, x, sizes, offset), jax.eval_shape(call.with_cast, x)
        operands = [(_name(letters), operand, letters) for letters, operand in ((p.lhs, cast.lhs), (p.rhs, cast.rhs))]
        operands.sort(key=lambda operand: ("lhs", "dout", "rhs").index(operand[0]))
        if with_sizes is None:
            costs = cost(call, cast)
        else:
            extents = {letter: end - begin for letter, (begin, end) in spans(call, with_sizes).items()}
            costs = cost(call, cast, int(np.count_nonzero(extents[p.ragged[:1] or p.out[0]])))
            costs["flops"] = int(2 * np.sum(np.prod([*extents.values()], axis=0))) * (call.batch(x) or 1)
        fields = {
            "product": name,
            "layout": layout.name if name == "forward" else layout.derivative(name.removeprefix("by ")).name,
            "operands": tuple(name for name, _, _ in operands),
            "dtypes": (*(jnp.dtype(x.data.dtype).name for _, x, _ in operands), jnp.dtype(call.dtype).name),
            "scales": tuple(_scales(x, letters) for _, x, letters in operands),
            "is_exact": with_sizes is not None,
        }
        return _Product(call, x, with_sizes, fields | costs, equation.primitive is partitioned_matmul_p)

    def then(self, bias: Any, activation: Any) -> "_Product":
        """The product, followed by the activation or bias of the call unless the product's primitive applies it."""
        if self.call.epilogue is not None or (bias is None and activation is None):
            return self
        function = function_of(Site("ragged.explain"), activation, 1, accumulator_dtype(self.call.dtype))
        return self._replace(epilogue=EpilogueSpec(function, (True,)))

    def on(self, platform: str, device: AbstractDevice | None) -> ProductPlan:
        """The plan for a platform, with the error's text if lowering raises."""
        plan = ProductPlan(platform=platform, **self.fields)
        try:
            automatic = self.is_partitioned and platform == "tpu"  # as `primitive` lowers it
            with lowering.target_of(platform, self.call.options, device, automatic=automatic) as target:
                launch = lowering.launch_of(platform, self.operands, self.call, target)
                runs = replace(launch, has_xla_epilogue=launch.has_xla_epilogue or self.epilogue is not None)
                if launch.has_xla_epilogue:  # The product has its own plan, as in the lowered program.
                    separate = fused.separate(self.operands, lowering.with_cached_config(self.call, launch))
                    launch = lowering.launch_of(platform, *separate, target)
                call = launch.call._replace(epilogue=runs.call.epilogue or self.epilogue)
                runs = replace(runs, backend=launch.backend, kernel=launch.kernel, call=call)
        except (ValueError, NotImplementedError) as error:
            message = str(error).partition("\n")[0].removeprefix("`ragged.matmul`: ")
            return replace(plan, runs=f"{type(error).__name__}: {message}", error=str(error))
        plan = replace(
            plan,
            device="" if target.device is None else target.device[0],
            backend=launch.backend,
            kernel=launch.kernel,
            runs=str(runs),
            config=launch.config,
            source=launch.source or runs.source,
            passed_over=runs.passed_over,
            visits=launch.visits,
        )
        return _with_chip(_with_work(plan, launch, self.operands_with_sizes), target.device)


def _with_work(plan: ProductPlan, launch: Launch, operands: Operands | None) -> ProductPlan:
    """`plan` with the launch's tiles for the sizes of `operands`; unchanged without operands."""
    if operands is None:
        return plan
    work = lowering.work_of(launch, operands)
    tiles = {"letter": work.letter, "tiles": tuple(work.tiles)}
    return replace(plan, visits=work.visits, idle=work.idle, multiplied=work.flops, **tiles)


def _with_chip(plan: ProductPlan, device: tuple[str, int] | None) -> ProductPlan:
    """`plan` with the chip's figures, if there are any."""
    if plan.platform == "tpu":
        from ragged.backends.tpu import tiles

        chip, kind = tiles.chip(device), DEFAULT_TPU[0]
    elif plan.platform == "cuda":
        from ragged.backends.gpu import tiles

        chip, kind = tiles.chip(device), "NVIDIA A100"
    else:
        return plan
    if device is not None and not tiles.is_known(device):
        return plan
    return replace(
        plan, chip=plan.device or kind, flops_per_second=float(chip.flops), bytes_per_second=float(chip.bandwidth)
    )


def _with_sizes(call: Call, x: Operands, sizes: dict[str, np.ndarray] | None, offset: Any) -> Operands | None:
    """The operands with concrete sizes and offset; None if they are unknown or an extent is symbolic."""
    shapes: Iterable[Any] = (call.shape, *(array.shape for array in jax.tree.leaves(x)))
    if sizes is None or not all(isinstance(n, int) for shape in shapes for n in shape):
        return None
    known = {}
    for letter, aval in x.sizes.items():
        if aval.shape == sizes[letter].shape:
            known[letter] = sizes[letter]
        elif aval.shape == (1,):  # Groups that share one matrix count as one group.
            known[letter] = known_offsets(sizes[letter], _capacities(call, x)[letter])[-1:]
        else:
            return None
    return x._replace(sizes=known, offset=None if x.offset is None else np.asarray(offset))


def _name(letters: str) -> str:
    """Name of the operand with these letters. `dout` is the cotangent of the result."""
    return {"km": "lhs", "kn": "rhs", "mn": "dout"}["".join(sorted(letters))]


def _scales(operand: Operand, letters: str) -> str:
    """The elements that share a scale, such as `"1 m × 128 k"`, or `"1 m × 128 k, with zero points"`; `""` without
    scales."""
    if operand.scales is None:
        return ""
    extents = sorted(zip(letters, operand.scales.block, strict=True), key=lambda each: "mkn".index(each[0]))
    zeros = "" if operand.scales.zeros is None else ", with zero points"
    return " × ".join(f"{'all' if extent is None else extent} {letter}" for letter, extent in extents) + zeros
