"""A program: a product and its derivatives, compiled once, to run on many draws."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from ragged.tuning import Configs, GpuConfig, TpuConfig, XlaConfig
from tests import gpu, tpu
from tests.cases import LETTERS
from tests.contract import loop
from tests.contract.draws import Draw
from tests.contract.launches import launches
from tests.contract.loop import TERMS, Arrays, Sum, Term
from tests.contract.meshes import Over

BATCH = 3  # elements of a map, steps of a scan, devices
Results = dict[str, Array]
FP8, FP8_WIDE = "float8_e4m3fn", "float8_e5m2"
# Of lhs, rhs, and what is asked of the result.
FLOATS = [
    ("float16", "", ""),
    ("float32", "bfloat16", ""),
    ("float16", "bfloat16", ""),
    ("bfloat16", "", "float32"),
    ("bfloat16", "", "float16"),
    ("float32", "", "bfloat16"),
    (FP8, "", ""),
    (FP8_WIDE, FP8, "float32"),
    ("bfloat16", FP8, ""),
    (FP8, "float32", ""),
    ("bfloat16", "int8", ""),
    ("int8", FP8, ""),
    ("int32", "float16", ""),
    ("int16", FP8, "float32"),
    ("bfloat16", "", FP8),
    ("float64", "", ""),
]
INTEGERS = [
    ("int8", "", ""),
    ("uint8", "", ""),
    ("int8", "uint8", ""),
    ("int16", "", ""),
    ("int32", "", ""),
    ("int4", "", ""),
    ("uint2", "int4", ""),
    ("int8", "int2", ""),
    ("int8", "", "float32"),
]
SCALINGS = ["row", "group", "column", (1, 64), "mx", "tensor", (32, 1), (None, 1), (1, None), (1, 1)]
PAIRS = list(itertools.product([*SCALINGS, None], repeat=2))[:-1]
BITS = [FP8, "int8", FP8_WIDE, "int4"]
_PLAIN = ("layout", "dtype", "rhs_dtype", "out_dtype", "backend", "context")  # in a test's name without the field's


@dataclass(frozen=True)
class Program:
    """A product: which one, of what, how it is computed, and where it is called."""

    layout: str
    dtype: str = "float32"  # of the operands
    rhs_dtype: str = ""  # of `rhs`, if it is another one
    out_dtype: str = ""  # `preferred_element_type`
    lhs_cast: Any = None  # the dtype and the scaling that `lhs` is quantised with, and "zeros" with zero points
    rhs_cast: Any = None
    backend: str = "xla"
    tiles: tuple[int, int, int] | None = None  # of m, k and n, instead of the library's choice
    splits: int = 1  # parts of a contracted dim that isn't ragged, on a GPU
    interpret: Any = True
    chip: str = ""  # the GPU or TPU that a kernel is lowered for, if not the oldest GPU, or a TPU of no generation
    groups: int = 5
    capacity: int = 60  # of packed buffers
    width: int = 24  # of the other letter of buffers with two ragged letters
    m: int = 6  # extents of letters that aren't ragged
    k: int = 9
    n: int = 7
    size_dtype: str = "int32"
    packed_last: str = ""  # which of "lhs rhs" are seen through `mT`
    swapped: bool = False  # whether it is computed as `(rhs.mT @ lhs.mT).mT`
    mapped: str = ""  # which of "lhs sizes rhs existing first" have a batch axis
    held: int = 0  # the number of matrices in the uniform operand (or result), if it has only some groups
    shared: str = ""  # an operand that is one matrix
    existing: bool = False  # whether there is `existing_out`
    order: int = 1  # of derivatives
    context: str = "jit"  # where it is called: see `runner`; or "devices", each with its own element of the batch
    in_loops: bool = True  # whether XLA multiplies in loops over tiles, although the product is small

    inputs = ("lhs", "rhs", "existing")  # names of arrays that it may take
    draws = "draws"  # the function that draws them
    keeps_primal = False  # whether the result beside the cotangents is one of the results

    def __str__(self) -> str:
        shown = (value if name in _PLAIN else f"{name}={value}" for name, value in self._set())
        return "-".join(str(each).replace(" ", "+") for each in shown)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._set())})"

    def _set(self) -> list[tuple[str, Any]]:
        """The fields that aren't the default."""
        return [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]

    # What it takes.

    @property
    def ragged(self) -> str:
        return LETTERS[self.layout]

    @property
    def batch(self) -> int:
        return BATCH if self.mapped else 1

    @cached_property
    def over(self) -> Over | None:
        """The mesh over which it runs, if the context says one."""
        return Over.of(self.context)

    @cached_property
    def casts(self) -> dict[str, Any]:
        """Of the operands that are quantised."""
        return {name: cast for name, cast in (("lhs", self.lhs_cast), ("rhs", self.rhs_cast)) if cast}

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Of each array of a draw."""
        found = {"lhs": self.dtype, "rhs": self.rhs_dtype or self.dtype}
        narrow = {name: "float8_e4m3fn" if name in self.casts else dtype for name, dtype in found.items()}
        found["out"] = self.out_dtype or default_dtype(*narrow.values())
        if self.existing:
            found["existing"] = found["out"]
        if self.order == 2:
            found |= {"d lhs": found["lhs"], "d rhs": found["rhs"]}
        return found

    @cached_property
    def terms(self) -> dict[str, Term]:
        return {name: self._term(name) for name in TERMS}

    def _term(self, name: str) -> Term:
        letters = TERMS[name]
        ragged = "".join(z for z in letters if z in self.ragged)
        is_packed_last = self.swapped if name == "out" else name in self.packed_last.split()
        packed = ragged[-1:] if is_packed_last else ragged[:1]
        extents = {
            z: self.capacity if z == packed else self.width if z in ragged else getattr(self, z) for z in letters
        }
        shape = tuple(extents.values())
        return Term(
            letters, ragged, packed, shape if ragged or name == self.shared else (self.held or self.groups, *shape)
        )

    def term_of(self, name: str) -> str:
        """The term whose buffer an array of a draw is like."""
        return "out" if name == "existing" else name.removeprefix("d ")

    def has_batch(self, name: str) -> bool:
        name = name.removeprefix("d ")
        return name in self.mapped.split() or (name == "out" and bool(self.mapped))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an array of a draw."""
        shape = self.terms[self.term_of(name)].shape
        return (self.batch, *shape) if self.has_batch(name) else shape

    def places(self, sizes: Arrays, first: Any = 0, element: int = 0) -> dict[str, list[Any]]:
        """Where the groups of an element of the batch lie in each buffer."""
        its, (at,) = _element(sizes, element), _element({"first": np.asarray(first)}, element, rank=0).values()
        return loop.places(self.terms, its, self.groups, int(at))

    # What it computes.

    def operands(self, arrays: dict[str, Array], sizes: dict[str, Array]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("lhs", "rhs"):
            first, last = map(sizes.get, TERMS[name])
            found[name] = GroupedTensor(arrays[name], first, last, transposed=name in self.packed_last)
        for name, (dtype, scaling, *zeros) in self.casts.items():
            cast = partial(ragged.quantize, dtype=dtype, scaling=scaling, symmetric=not zeros)
            found[name] = _with_nan_scales(found[name], cast)
        return found

    def values(self, arrays: dict[str, Array], sizes: dict[str, Array], first: Any) -> dict[str, Array]:
        """What the quantised operands stand for."""
        arrays = arrays | ({self.shared: arrays[self.shared][None]} if self.shared else {})
        return {name: x.dequantize().data for name, x in self.operands(arrays, sizes).items() if name in self.casts}

    def sides(self, arrays: dict[str, Array], sizes: dict[str, Array]) -> tuple[Any, Any]:
        """What is passed as `lhs` and `rhs`."""
        shared = {self.shared: arrays[self.shared]} if self.shared else {}
        found = self.operands({**arrays, **{name: x[None] for name, x in shared.items()}}, sizes) | shared
        return found["lhs"], found["rhs"]

    def multiply(self, arrays: dict[str, Array], sizes: dict[str, Array], first: Any) -> Array:
        (lhs, rhs), options = self.sides(arrays, sizes), self.options("out", first) | self.result_options(arrays)
        matmul = self.over.matmul(self) if self.over else ragged.matmul
        if self.swapped:
            return matmul(rhs.mT, lhs.mT, **options).mT.data
        return matmul(lhs, rhs, **options).data

    def options(self, name: str, first: Any) -> dict[str, Any]:
        """Of the product that has this term as its result, and the two others as operands."""
        out, others = self.terms[name], [self.terms[other] for other in TERMS if other != name]
        options: dict[str, Any] = {"backend": self._config()}
        if self.held:
            options |= {"group_offset": first} | ({} if out.ragged else {"num_actual_groups": self.held})
        if len(out.ragged) == 2:
            options["max_last"] = self.width
        if out.packed and all(other.packed != out.packed for other in others):
            options["capacity"] = self.capacity  # no operand packs this letter
        return options

    def result_options(self, arrays: dict[str, Array]) -> dict[str, Any]:
        """The result's dtype, and what it is added to."""
        dtype = {"preferred_element_type": self.out_dtype} if self.out_dtype else {}
        existing = arrays.get("existing")
        return dtype | {"existing_out": existing.mT if self.swapped and existing is not None else existing}

    def _config(self) -> Any:
        if self.backend == "xla":
            m, k, n = ((tile,) for tile in self.tiles or (0, 0, 0))
            return Configs(*[XlaConfig(m=m, k=k, n=n)] * 3) if self.tiles else None
        tiles = dict(zip("mkn", self.tiles or (None,) * 3, strict=True))
        config: Any = {"pallas_tpu": TpuConfig, "triton_gpu": GpuConfig}[self.backend]
        # Of the letters that the product contracts, and the cotangents of `lhs` and `rhs`.
        splits = [{"splits": self.splits} if self.splits > 1 and z not in self.ragged else {} for z in "knm"]
        return Configs(*(config(interpret=self.interpret, **tiles, **each) for each in splits))

    def on_chip(self) -> Any:
        """Where kernels are lowered for `chip`."""
        if not self.chip:
            return nullcontext()
        # With one multiprocessor, each program of a GPU's kernel computes several tiles.
        return tpu.on(self.chip) if self.backend == "pallas_tpu" else gpu.on(self.chip, multiprocessors=1)

    def is_differentiable(self, name: str) -> bool:
        if name in self.casts:
            return False
        wide = [
            jnp.issubdtype(x, jnp.floating) and jnp.dtype(x).itemsize > 1
            for x in (self.dtypes[name], self.dtypes["out"])
        ]
        return all(wide)

    def compute(self, data: dict[str, Array], sizes: dict[str, Array], first: Array) -> Results:
        """By name: "out"; "primal", the same beside the cotangents; "… values" of quantised operands; the cotangents
        "lhs", "rhs" and "existing"; "… inside": those that are taken inside of the map; "tangent", and the cotangents
        of these cotangents, "… of cotangents"."""
        inputs = {name: data[name] for name in self.inputs if name in data}
        axes = {name: 0 if self.has_batch(name) else None for name in inputs}
        in_axes = axes, 0 if self.has_batch("sizes") else None, 0 if self.has_batch("first") else None
        given = {name: each for name, each in inputs.items() if self.is_differentiable(name)}
        one = jax.checkpoint(self.multiply) if self.context == "checkpoint" else self.multiply
        across = over_devices if self.context == "devices" else jax.vmap
        mapped = across(one, in_axes) if self.mapped else one

        def product(given: dict[str, Array]) -> Array:
            return mapped(inputs | given, sizes, first)

        def cotangents(given: dict[str, Array], ct: Array) -> dict[str, Array]:
            return jax.vjp(product, given)[1](ct)[0]

        def inside(arrays: dict[str, Array], sizes: dict[str, Array], first: Array, ct: Array) -> dict[str, Array]:
            its = {name: arrays[name] for name in given}
            return jax.vjp(lambda its: one(arrays | its, sizes, first), its)[1](ct)[0]

        values = jax.vmap(self.values, in_axes) if self.mapped else self.values
        found = {"out": product(given)}
        found |= {f"{name} values": each for name, each in values(inputs, sizes, first).items()} if self.casts else {}
        ct = self.over.like(data["out"], found["out"]) if self.over else data["out"]
        if given:
            primal, pull = jax.vjp(product, given)
            found |= pull(ct)[0] | ({"primal": primal} if self.keeps_primal else {})
        if given and self.mapped and self.context != "devices":
            each = jax.vmap(inside, (*in_axes, 0))(inputs, sizes, first, ct)
            found |= {f"{name} inside": ct for name, ct in each.items()}
        if self.order == 2:
            tangents = {name: data[f"d {name}"] for name in given}
            found["tangent"] = jax.jvp(product, (given,), (tangents,))[1]
            of_given, of_out = jax.vjp(cotangents, given, ct)[1](tangents)
            found |= {f"{name} of cotangents": ct for name, ct in (of_given | {"out": of_out}).items()}
        return found

    # What it should give.

    def wanted(self, draw: Draw, results: Mapping[str, np.ndarray]) -> dict[str, tuple[Sum, str, int]]:
        """Of each of the `results` of `compute`: its value, its dtype, and how often it is rounded. Those of quantised
        operands follow from what the operands dequantise to."""
        values = {name: results[f"{name} values"] for name in self.casts}
        data, found = draw.data | values, {}
        places = [self.places(draw.sizes, draw.first, i) for i in range(self.batch)]

        def has_batch(name: str) -> bool:
            return bool(self.mapped) if name in values else self.has_batch(name)

        def product(name: str, *of: str, is_summed: bool = True) -> Sum:
            """The term `name` as the product of two arrays; `is_summed` over the batch if it has no batch axis."""
            parts = []
            for i, where in enumerate(places):
                x, y = (data[each][i] if has_batch(each) else data[each] for each in of)
                parts.append(loop.product(name, x, y, self.terms[name].shape, where))
            if self.mapped and (self.has_batch(name) or not is_summed):
                return Sum(*map(np.stack, zip(*parts, strict=True)))
            total = parts[0]
            for part in parts[1:]:
                total = total.plus(part)
            return total

        def add(name: str, value: Sum, term: str, roundings: int = 1) -> None:
            found[name] = value, self.dtypes[term], roundings

        with np.errstate(all="ignore"):
            add("out", product("out", "lhs", "rhs"), "out")
            for name, of in (("lhs", ("out", "rhs")), ("rhs", ("lhs", "out"))):
                if self.is_differentiable(name):
                    add(name, product(name, *of), name)
                    if self.mapped:
                        add(f"{name} inside", product(name, *of, is_summed=False), name)
            if self.existing:
                masks = [self.mask(draw.sizes, i) for i in range(self.batch)]
                mask = np.stack(masks) if self.mapped else masks[0]
                old, ct = (np.where(mask, data[name].astype(np.float64), 0) for name in ("existing", "out"))
                add("out", found["out"][0].plus(Sum(old, np.abs(old))), "out")
                if self.is_differentiable("existing"):
                    sums = Sum(ct, np.abs(ct))
                    is_summed = self.mapped and not self.has_batch("existing")
                    add("existing", Sum(*(each.sum(0) for each in sums)) if is_summed else sums, "out")
                    if self.mapped:
                        add("existing inside", Sum(ct, np.abs(ct)), "out")
            if self.order == 2:
                add("tangent", product("out", "d lhs", "rhs").plus(product("out", "lhs", "d rhs")), "out", 3)
                add("out of cotangents", found["tangent"][0], "out", 3)
                add("lhs of cotangents", product("lhs", "out", "d rhs"), "lhs")
                add("rhs of cotangents", product("rhs", "d lhs", "out"), "rhs")
        return found

    def mask(self, sizes: Arrays, element: int) -> np.ndarray:
        """Where groups of the result are, also those without a product."""
        out = self.terms["out"]
        mask = loop.covered(out.shape, loop.places({"out": out}, _element(sizes, element), self.groups)["out"])
        return mask if out.ragged else np.ones(out.shape, bool)

    @property
    def most_terms(self) -> int:
        """How many products are added up, at most."""
        return self.groups * self.batch * max(self.capacity, self.m, self.k, self.n)

    def runner(self) -> tuple[Callable[[tuple[Draw, ...]], list[Results]], int]:
        """What computes the results of some draws, and of how many at a time."""
        if over := self.over:
            compiled = over.compute(self)
            return lambda draws: [compiled(*over.put(self, draw)) for draw in draws], 1
        return runner(self.context, self.compute)

    def faults(self, draw: Draw, result: Mapping[str, np.ndarray], bits: int) -> dict[str, str]:
        """Of each result of a draw: where it is wrong, or ""."""
        wanted = self.wanted(draw, result)
        assert wanted.keys() == result.keys() - {f"{name} values" for name in self.casts}
        return {
            name: loop.mismatch(result[name], want, dtype, self.most_terms, roundings, bits)
            for name, (want, dtype, roundings) in wanted.items()
        }

    def check(self, inputs: Iterable[Draw], bits: int = 24) -> list[tuple[str, str]]:
        """That each draw gives what it should, and that the backend's own kernels compute it, in sums of so many
        `bits`. Returns these kernels, as `launches` lists them."""
        if self.backend == "triton_gpu":
            gpu.needs_triton()
        with ExitStack() as stack:
            if "float64" in self.dtypes.values():
                stack.enter_context(jax.enable_x64(True))
            stack.enter_context(self.on_chip())
            if self.context == "disable_jit":
                stack.enter_context(jax.disable_jit())
            ran = stack.enter_context(launches(self.in_loops and self.over is None))
            run, at_once = self.runner()
            for number, some in enumerate(itertools.batched(inputs, at_once)):
                if len(some) < at_once:
                    break
                results = [jax.tree.map(np.asarray, each) for each in run(some)]
                for i, (draw, result) in enumerate(zip(some, results, strict=True)):
                    for name, wrong in self.faults(draw, result, bits).items():
                        assert not wrong, f"{name!r}: {wrong}\n{reproducer(self, number * at_once + i, draw)}"
            assert ran, "no product was lowered"
            expected = {"xla", "pallas_tpu"} if self.context == "export" else {self.backend}
            assert {backend for backend, _ in ran} == expected, f"these ran: {set(ran)}"
        return ran


def _with_nan_scales(x: GroupedTensor, quantize: Callable[[GroupedTensor], GroupedTensor]) -> GroupedTensor:
    """`x` quantised, with NaN as the scales of no element: those that are the same for much larger values."""
    q, larger = quantize(x), quantize(x.with_data(4096 * x.data))
    assert q.scales is not None and larger.scales is not None
    if q.tensor_scale is not None:  # it takes the whole factor
        return q
    scales: Any = jnp.where(q.scales == larger.scales, jnp.asarray(jnp.nan, q.scales.dtype), q.scales)
    more: dict[str, Any] = {"zero_points": q.zero_points, "transposed": q.transposed}
    return GroupedTensor(q.data, q.first_dims, q.last_dims, scales, q.scaling, **more)


def default_dtype(lhs: str, rhs: str) -> str:
    """Of a result: the operands' common float dtype of 16 bits or more, bfloat16 for smaller floats, or int32."""
    floats = {x for x in (lhs, rhs) if jnp.issubdtype(x, jnp.floating)}
    wide = {x for x in floats if jnp.dtype(x).itemsize > 1}
    if len(wide) == 2:
        return "float32"  # no two of them have a smaller one in common
    return wide.pop() if wide else "bfloat16" if floats else "int32"


def _element(arrays: Arrays, element: int, rank: int = 1) -> Arrays:
    """Of arrays that may have a batch axis."""
    return {name: each[element] if each.ndim > rank else each for name, each in arrays.items()}


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((BATCH,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:BATCH])


def over_devices(call: Callable[..., Array], in_axes: Any) -> Callable[..., Array]:
    """As `jax.vmap`, but each element of the batch is on its own device."""

    def is_none(axis: Any) -> bool:
        return axis is None

    def local(*args: Any) -> Array:
        its = jax.tree.map(
            lambda axis, x: x if axis is None else jax.tree.map(lambda x: x[0], x), in_axes, args, is_leaf=is_none
        )
        return call(*its)[None]

    specs = jax.tree.map(lambda axis: P() if axis is None else P("d"), in_axes, is_leaf=is_none)
    return jax.shard_map(local, mesh=_mesh(), in_specs=specs, out_specs=P("d"))


def reproducer(program: Program, number: int, draw: Draw) -> str:
    """A script that fails in the same way."""
    return f"""
from {type(program).__module__} import *
from tests.contract.draws import draws

program = {program!r}
*_, draw = {program.draws}(program, {number + 1})
print(draw.sizes)  # {draw.sizes}
results = program.compute(*draw)
print(results, program.wanted(draw, results))
program.check([draw])
"""


def runner(context: str, compute: Callable[..., Any]) -> tuple[Callable[[tuple[Any, ...]], list[Any]], int]:
    """What computes the results of some draws, and of how many at a time."""

    def one(call: Callable[..., Results]) -> tuple[Callable[[tuple[Draw, ...]], list[Results]], int]:
        return lambda draws: [call(*draw) for draw in draws], 1

    def stacked(call: Callable[[Any], Results]) -> tuple[Callable[[tuple[Draw, ...]], list[Results]], int]:
        def run(draws: tuple[Draw, ...]) -> list[Results]:
            results = call(jax.tree.map(lambda *x: np.stack(x), *draws))
            return [jax.tree.map(lambda x, i=i: x[i], results) for i in range(len(draws))]

        return run, BATCH

    if context == "vmap":
        return stacked(jax.jit(jax.vmap(lambda draw: compute(*draw))))
    if context in ("jit", "checkpoint", "devices"):
        return one(jax.jit(compute))
    if context in ("eager", "disable_jit"):
        return one(compute)
    if context == "constant sizes":
        return one(lambda data, *others: jax.jit(lambda data: compute(data, *others))(data))
    if context == "constants":
        return one(lambda *draw: jax.jit(lambda: compute(*draw))())
    if context == "scan":
        return stacked(jax.jit(lambda some: jax.lax.map(lambda draw: compute(*draw), some)))
    if context.startswith("shard_map"):

        def local(some: Draw) -> Results:
            return jax.tree.map(lambda x: x[None], compute(*jax.tree.map(lambda x: x[0], some)))

        is_checked = context == "shard_map"
        return stacked(
            jax.jit(jax.shard_map(local, mesh=_mesh(), in_specs=P("d"), out_specs=P("d"), check_vma=is_checked))
        )
    assert context == "export"
    exported: list[Any] = []

    def call(*draw: Any) -> Results:
        """Traced once for three platforms, written and read."""
        if not exported:
            found = jax.export.export(jax.jit(compute), platforms=["cpu", "cuda", "tpu"])(*draw)
            exported.append(jax.export.deserialize(found.serialize()))
        return exported[0].call(*draw)

    return one(call)


Case = tuple[int, Program]  # how many draws, of which program


def quantised(backend: str, count: int, layouts: list[str], step: int = 37, **options: Any) -> Iterator[Case]:
    """A pair of scalings for each layout, as different as they can be from the one before."""
    for i, layout in enumerate(layouts):
        lhs, rhs = PAIRS[i * step % len(PAIRS)]
        dtype = BITS[(i + i // len(LETTERS)) % len(BITS)]  # another one each time that a layout comes
        casts: dict[str, Any] = {
            "lhs_cast": lhs and (dtype, lhs),
            "rhs_cast": rhs and (FP8 if dtype == FP8_WIDE else dtype, rhs),
        }
        chip = gpu.FIRST_WITH_FP8 if backend == "triton_gpu" else ""
        extents: dict[str, Any] = {"k": 72, "n": 20}
        yield count, Program(layout, backend=backend, out_dtype="float32", chip=chip, **casts, **extents | options)
