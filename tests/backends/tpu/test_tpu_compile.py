"""Every product lowered for TPUs, and compiled for real ones by libtpu, without a TPU."""

import math
import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor, Recipe, Scaling, gated_matmul, matmul, quantize, quantize_weights
from ragged.backends.base import Target
from ragged.backends.tpu import tiles as tpu_tiling
from ragged.backends.tpu import units
from ragged.backends.tpu.tiles import Problem
from ragged.core.scales import Scales
from ragged.nn import MoE
from ragged.tuning import TpuConfig
from tests import ones, products, tpu
from tests.backends.layers import (
    DEEP,
    LARGE,
    MANY,
    ODD,
    TINY,
    Aval,
    Shape,
    dequantized,
    product,
    sharded_gradients,
    train,
    trained_avals,
    with_weights,
)
from tests.cases import INT8_ROWS, split, thinned
from tests.contract.meshes import moved
from tests.moe import moe as layer_of

SPREAD = [  # every generation, layout, shape and dtype; each takes seconds
    ("v6e", "inner_columns", ODD, "bfloat16"),
    ("v6e", "ragged", ODD, "bfloat16"),
    ("v5p", "forward_left", TINY, "bfloat16"),
    ("tpu7x", "outer", TINY, "bfloat16"),
    ("v4", "batched", TINY, "bfloat16"),
    ("tpu7x", "wgrad", MANY, "bfloat16"),
    ("v5e", "wgrad", ODD, "int8"),
    ("v6e", "inner_rows", ODD, "float8_e4m3fn"),
    ("tpu7x", "forward", ODD, "float8_e5m2"),
    ("v5p", "forward", ODD, "float32"),
    ("v6e", "wgrad", ODD, "int4"),
    ("v6e", "forward", (3, 704, 2880, 4), "bfloat16"),  # fewer rows than a register has, in partial tiles
]


@pytest.mark.parametrize("generation, layout, shape, dtype", split([("tpu7x", "forward", LARGE, "bfloat16")], SPREAD))
def test_compiles(generation: str, layout: str, shape: Shape, dtype: str) -> None:
    """Forward and backward, with the default tiles, within the chip's VMEM."""
    function, avals = product(layout, shape, jnp.dtype(dtype))
    compiled = tpu.compile_for(generation, function, *avals)
    assert len(compiled.kernels) == (3 if dtype.startswith(("bfloat", "float")) else 1)
    assert len(compiled.vmem) == len(compiled.kernels)
    assert max(compiled.vmem) <= 0.75 * tpu.VMEM_MIB[generation]
    if layout == "forward" and shape == LARGE:
        # K3, T5: nothing as large as an operand is transposed or copied.
        copied = re.findall(r"= bf16\[([\d,]+)\]\S* (?:copy|transpose)\(", compiled.text)
        assert not [dims for dims in copied if math.prod(map(int, dims.split(","))) >= shape[0] * min(shape[1:3])]


@pytest.mark.long
@pytest.mark.parametrize("generation", ["v5e", "tpu7x"])
def test_compiles_for_a_generation_that_nothing_names(generation: str) -> None:
    """Tiles that fit any chip."""
    function, avals = product("forward", LARGE, jnp.bfloat16)
    compiled = tpu.compile_for(generation, function, *avals, known=False)
    assert max(compiled.vmem) <= 12


@pytest.mark.long
def test_tiles_of_two_ragged_letters() -> None:
    """As much of the uniform letter as fits; half the mean group where two letters' tiles are shared."""
    function, avals = product("outer", LARGE, jnp.bfloat16)
    compiled = tpu.compile_for("v4", function, *avals)
    tiles = {name.removeprefix("tiled_matmul_").split(".")[0] for name in compiled.kernels}
    assert tiles == {"512x1024x512", "512x512x512", "256x2048x256"}
    assert max(compiled.vmem) <= 14  # of 16


@pytest.mark.long
@pytest.mark.parametrize("generation", ["v5e", "tpu7x"])
def test_compiles_tiled_with_scales(generation: str) -> None:
    """Scales of rows and columns that are contracted, or kept, or cut out of two blocks."""
    kind = tpu.device(generation)
    target = Target(device=(kind.device_kind, kind.num_cores))
    x, sizes = Aval((4096, 512), jnp.float8_e4m3fn), Aval((8,), jnp.int32)
    by_group, by_row, by_block = (Aval(shape, jnp.float32) for shape in ((8, 512), (4096, 1), (4096, 4)))

    def both(x: Array, y: Array, sizes: Array, by_group: Array, by_row: Array, by_block: Array) -> Any:
        options: dict[str, Any] = {"preferred_element_type": jnp.bfloat16, "target": target, "shape": (4096, 512)}
        letters = dict.fromkeys("mkn", sizes)
        fine = {"lhs_scales": Scales(by_block, (1, 128)), "rhs_scales": Scales(by_row, (1, None))}
        coarse = {"lhs_scales": Scales(by_group, (None, 1)), "rhs_scales": Scales(by_row, (1, None))}
        first = products.tiled_matmul("pallas_tpu", x, y, letters, axes=("km", "kn", "mn"), **fine, **options)
        return first, products.tiled_matmul("pallas_tpu", x, y, letters, axes=("km", "nk", "mn"), **coarse, **options)

    compiled = tpu.compile_for(generation, both, x, x, sizes, by_group, by_row, by_block)
    assert len(compiled.kernels) == 2
    assert max(compiled.vmem) <= 12


@pytest.mark.long
def test_compiles_tiled_with_many_scales() -> None:
    """1792 scales a row: each tile repeats its own by a product with a matrix of zeros and ones."""
    sizes = Aval((8,), jnp.int32)

    def inner_columns(x: Array, y: Array, sizes: Array) -> Array:
        columns = quantize(GroupedTensor(x, last_dims=sizes), jnp.int8, Scaling((4, 1)))
        return matmul(columns, GroupedTensor(y, sizes, sizes)).data

    compiled = tpu.compile_for(
        "v5e", inner_columns, Aval((7168, 1000), jnp.bfloat16), Aval((1000, 512), jnp.bfloat16), sizes
    )
    assert len(compiled.kernels) == 1 and max(compiled.vmem) <= 12


@pytest.mark.long
@pytest.mark.parametrize(
    "generation, recipe, shape",
    [
        ("v5e", "rowwise", (2048, 1024, 512, 8)),
        ("v6e", "mxfp8", (1024, 2048, 512, 2)),  # contracted in several tiles
        ("tpu7x", "blockwise", (2048, 1024, 512, 8)),
    ],
    ids=str,
)
def test_recipes(generation: str, recipe: str, shape: Shape) -> None:
    """Three kernels of 8-bit operands, none of them dequantised in memory."""
    step, avals = partial(train, Recipe.preset(recipe)), trained_avals(shape)
    assert len(tpu.compile_for(generation, step, *avals).kernels) == 3
    assert not dequantized(lowered(step, *avals), 512 * 1024)
    # XLA dequantises operands that are ragged; matrices in parts.
    assert len(dequantized(lowered(partial(step, backend="xla"), *avals), 512 * 1024)) == 4


IN_KERNEL = [  # generation, columns of the result, whether the kernel quantises the rows
    ("v5e", 768, True),  # two matrices
    ("v5e", 4096, False),  # four tiles of columns
    ("v6e", 4096, True),
    ("v5p", 2048, False),
    ("tpu7x", 2048, False),  # has no matrix units for int8
]


@pytest.mark.parametrize("generation, columns, inside", split([("v5e", 2048, True)], IN_KERNEL))
def test_rows_quantised_in_the_kernel(generation: str, columns: int, inside: bool) -> None:
    """Then the program has no array of quantised rows. The kernel multiplies 8 bits either way."""
    w = jax.eval_shape(lambda w: quantize_weights(w, INT8_ROWS), Aval((8, 2048, columns), jnp.bfloat16))
    x = GroupedTensor(Aval((4096, 2048), jnp.bfloat16), Aval((8,), jnp.int32))
    function, weights = (gated_matmul, (w, w)) if columns == 768 else (matmul, (w,))

    def run(x: GroupedTensor, *weights: Any) -> Array:
        return function(x, *weights, recipe=INT8_ROWS).data

    compiled = tpu.compile_for(generation, run, x, *weights)
    assert len(compiled.kernels) == 1 and ("s8[4096,2048]" in compiled.text) != inside
    assert tpu.matmuls(generation, run, x, *weights) == {("i8", "i8")}


WEIGHTS = [  # with zero points, but for the floats
    *thinned(4, ("v5e", "v5p", "v6e", "tpu7x"), ["float4_e2m1fn"], ("mx", "nvfp4", "column")),
    *thinned(8, ("v5e", "v6e", "tpu7x"), ("uint4", "int8"), ((1, 128), "row", (1, 32), (8, 8))),
]


@pytest.mark.long
@pytest.mark.parametrize("generation, dtype, scaling", WEIGHTS)
def test_weights_of_few_bits(generation: str, dtype: str, scaling: Any) -> None:
    """Forward and dgrad; nothing is dequantised in memory, and scales of 4-bit floats stay as small as they are."""
    is_float = dtype == "float4_e2m1fn"
    run, avals = with_weights(dtype, scaling, (2048, 1024, 2048, 8), symmetric=is_float)
    compiled = tpu.compile_for(generation, run, *avals)
    assert len(compiled.kernels) == 2 and not dequantized(lowered(run, *avals), 8 * 1024 * 2048)
    assert not is_float or compiled.memory.temp_size_in_bytes < 2 * 8 * 1024 * 2048  # the weights in bfloat16


@pytest.mark.long
def test_quantised_operands() -> None:
    """By every layout's kernel, the mixed operands with scales on either side or on one."""
    sizes = Aval((8,), jnp.int32)

    def all_layouts(x: Array, w: Array, sizes: Array) -> list[Array]:
        rows, whole = GroupedTensor(x, sizes), GroupedTensor(w)
        by_row, by_block = quantize(rows, jnp.float8_e4m3fn, "row"), quantize(rows, jnp.int8, (1, 128))
        weights = quantize(whole, jnp.float8_e4m3fn, (128, 128))
        pairs = [
            (by_row, weights),
            (by_block.mT, by_row),
            (quantize(whole.mT, jnp.float8_e4m3fn, "mx"), weights),
            (by_row, whole),
            (by_row, by_block.mT),
        ]
        return [ragged.matmul(*pair, max_last=512 if i == 4 else None).data for i, pair in enumerate(pairs)]

    avals = Aval((1024, 512), jnp.bfloat16), Aval((8, 512, 256), jnp.bfloat16), sizes
    assert len(tpu.compile_for("v5e", all_layouts, *avals).kernels) == 5
    assert not dequantized(lowered(all_layouts, *avals), 512 * 1024)


@pytest.mark.long
@pytest.mark.parametrize("buffers, k", [(3, 512), (1, 500), (3, 500)])
def test_compiles_with_other_numbers_of_buffers(buffers: int, k: int) -> None:
    """One buffer, or more than the compiler's own pipeline has."""
    avals = Aval((1024, k), jnp.bfloat16), Aval((7, k, 384), jnp.bfloat16), Aval((7,), jnp.int32)
    compiled = tpu.compile_for("v6e", lambda *x: ragged.grouped_matmul(*x, input_buffer_count=buffers), *avals)
    assert len(compiled.kernels) == 1


GENERATIONS = ("v5e", "v5p", "v6e", "tpu7x")
ONE_COLUMN = [  # stored as one row: of `rhs`, or of what a derivative contracts
    ones.Case("`int8`", "forward", (40, 160, 1, 5), (False, True)),
    ones.Case("`float8_e4m3fn`", "batched", (2, 2, 1, 7), (False, True)),
    ones.Case("`float8_e5m2`", "forward_left", (1, 160, 136, 5), (False, True)),
    ones.Case("`bfloat16`", "forward", (40, 1, 136, 5), (False, False)),
    ones.Case("both in float8_e4m3fn, row scales", "forward", (40, 160, 1, 5), (False, True)),
    ones.Case("weights in int4, (1, 128) scales", "batched", (40, 160, 1, 5), (False, True)),
]


def check_ones(case: ones.Case, generation: str, compiles: bool = False) -> None:
    """That a product and its derivatives are lowered to kernels where `explain` says that they run."""
    avals = case.avals
    with tpu.on(generation):
        plans = ragged.explain(*avals, platform="tpu", **case.options).plans
        text = lowered(case.product, *avals)
    expected = sum(plan.backend == "pallas_tpu" for plan in plans)
    # Two products of the same shapes are one kernel, which the program calls twice.
    assert min(expected, 1) <= text.count(CALL) <= expected
    if compiles and expected:
        assert tpu.compile_for(generation, case.product, *avals).kernels


@pytest.mark.parametrize("number, case", [*enumerate(ONE_COLUMN)], ids=str)
def test_one_column(number: int, case: ones.Case) -> None:
    """Of 8 bits, and of bfloat16 where a derivative contracts one column."""
    check_ones(case, GENERATIONS[number % 4])


@pytest.mark.long
@pytest.mark.parametrize("number, case", [*enumerate(ONE_COLUMN)][::2], ids=str)
def test_one_column_compiles(number: int, case: ones.Case) -> None:
    """The same by libtpu."""
    check_ones(case, GENERATIONS[(number + 1) % 4], compiles=True)


@pytest.mark.long
@pytest.mark.parametrize("format", [*ones.FORMATS_WITH_ONES][::4])
def test_extents_of_one(format: str) -> None:
    """1, 2 and 3 in any letter: layouts, orders of storage and generations by chance."""
    for i, case in enumerate(ones.cases(format, 2)):
        check_ones(case, GENERATIONS[i % 4])


DEVICES = [
    None,
    ("TPU v4", 1),
    ("TPU v5 lite", 1),
    ("TPU v5", 2),
    ("TPU v6 lite", 1),
    ("TPU7x", 1),
    ("TPU of the future", 1),
]


@pytest.mark.parametrize("device", split(DEVICES[:1], [(each,) for each in DEVICES[1:]]), ids=str)
def test_default_tiles_are_legal_and_fit(device: tuple[str, int] | None) -> None:
    """For any shape and dtype, also where only the smallest tile fits."""
    chip = tpu_tiling.chip(device)
    for shape in (LARGE, MANY, ODD, TINY, (1, 1, 1, 1), DEEP, (7, 200_000, 100_000, 3)):
        for names in (("bfloat16",) * 3, ("float32",) * 3, ("int8", "int8", "int32"), ("bfloat16", "int4", "float32")):
            first, second, out = (jnp.dtype(name) for name in names)
            dtypes = (first, second, out)
            rows, a, b, groups = shape
            for kind in ("rows", "groups", "batched"):
                problem = Problem(kind, rows, a, b, groups, dtypes, units.dot(first, first, chip), 2)
                tile = tpu_tiling.choose(problem, chip)
                assert tpu_tiling.vmem(problem, tile) <= chip.vmem
                extents = dict(zip("mkn", (rows, a, b), strict=True))
                packed = {"rows": {"m": (first, out)}, "groups": {"m": (first, second)}}.get(kind, {})
                tiles = dict(zip("mkn", tpu_tiling.fit(problem, tile, chip), strict=True))
                assert tpu_tiling.refuse(tiles, extents, packed) is None


def test_a_tile_too_large_for_vmem_is_halved() -> None:
    """A tiling that no VMEM can hold is not an error."""
    tiling = (16384, 16384, 16384)
    avals = Aval((16384, 16384), jnp.bfloat16), Aval((2, 16384, 16384), jnp.bfloat16), Aval((2,), jnp.int32)

    def trained(x: Array, w: Array, sizes: Array) -> Any:
        out, pull = jax.vjp(lambda x, w: ragged.grouped_matmul(x, w, sizes, tiling=tiling), x, w)
        return out, pull(out)

    assert lowered(trained, *avals).count(CALL) == 3
    chip = tpu_tiling.chip(None)
    dtype = jnp.dtype(jnp.bfloat16)
    problem = Problem("rows", *tiling, 2, (dtype, dtype, dtype), units.dot(dtype, dtype, chip), 2)
    assert tpu_tiling.vmem(problem, tpu_tiling.fit(problem, tiling, chip)) <= chip.vmem


def lowered(function: Any, *avals: Any) -> str:
    return jax.jit(function).trace(*avals).lower(lowering_platforms=("tpu",)).as_text()


CALL = "stablehlo.custom_call @tpu_custom_call"


@pytest.mark.parametrize("backend", split([None], [TpuConfig(m=512, k=2048, n=64)]))
def test_rows_in_lanes(backend: Any) -> None:
    """Where an operand of a uniform product has the rows along its lanes, their tile is whole lanes."""
    a, b = Aval((32, 2048, 1000), jnp.float32), Aval((32, 2048, 64), jnp.float32)

    def product(a: Array, b: Array) -> Array:
        return ragged.matmul(GroupedTensor(a).mT, GroupedTensor(b), backend=backend).data

    assert lowered(product, a, b).count(CALL) == 1


@pytest.mark.parametrize("dtype", split(["int8"], ["bfloat16", "float32"]))
def test_default_precision(dtype: str) -> None:
    """JAX's default precision is for float32; a named algorithm is left to XLA."""
    avals = Aval((256, 512), dtype), Aval((4, 512, 256), dtype), Aval((4,), jnp.int32)
    with jax.default_matmul_precision("highest"):
        assert len(tpu.compile_for("v5e", lambda *x: ragged.grouped_matmul(*x), *avals).kernels) == 1
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        assert lowered(lambda *x: ragged.grouped_matmul(*x), *avals).count(CALL) == 0


@pytest.mark.long
def test_programs_for_several_devices() -> None:
    """A kernel inside a full `shard_map`, also with `check_vma`; XLA's product where XLA does the partitioning."""
    tpu.device("v5e")
    mesh = Mesh(topologies.get_topology_desc("v5e:2x2", platform="tpu").devices, ("x",))
    avals = Aval((1024, 512), jnp.bfloat16), Aval((8, 512, 256), jnp.bfloat16), Aval((8,), jnp.int32)
    specs = P(), P(None, None, "x"), P()
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    inside = jax.shard_map(ragged.grouped_matmul, mesh=mesh, in_specs=specs, out_specs=P(None, "x"))
    for function, kernels in ((inside, 1), (ragged.grouped_matmul, 0)):
        program = jax.jit(function, in_shardings=shardings).trace(*avals).lower(lowering_platforms=("tpu",))
        assert program.as_text().count(CALL) == kernels
        program.compile()


@pytest.mark.parametrize("axes, kind", split([((4, 1), AxisType.Explicit)], [((2, 2), AxisType.Auto)]), ids=str)
def test_a_map_over_some_axes(axes: tuple[int, int], kind: AxisType) -> None:
    """Kernels, whatever the other axis of the mesh is."""
    tpu.device("v5e")
    devices = np.array(topologies.get_topology_desc("v5e:2x2", platform="tpu").devices).reshape(axes)
    mesh, specs = Mesh(devices, ("a", "b"), axis_types=(kind,) * 2), (P("a"), P("a"), P("a"))
    shapes = ((1024, 512), jnp.bfloat16), ((8, 512, 256), jnp.bfloat16), ((8,), jnp.int32)
    avals = [Aval(*shape, sharding=NamedSharding(mesh, P("a"))) for shape in shapes]
    run = jax.shard_map(ragged.grouped_matmul, mesh=mesh, in_specs=specs, out_specs=P("a"), axis_names={"a"})
    program = jax.jit(jax.grad(lambda *x: jnp.sum(run(*x)), (0, 1))).trace(*avals).lower(lowering_platforms=("tpu",))
    assert program.as_text().count(CALL) == 2  # the product itself isn't needed


def expert_layer(mesh: Mesh, tokens: int, **options: Any) -> tuple[MoE, Aval]:
    """Of avals, in bfloat16, each where the layer has it."""

    def over(aval: Any, spec: P) -> Aval:
        return Aval(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec))

    options |= {"axis": "expert", "data_axes": ("data",), "transport": "ragged", "dtype": jnp.bfloat16}
    layer = jax.eval_shape(lambda: layer_of(1024, 2048, 16, 2, key=jax.random.key(0), **options))
    x = over(Aval((tokens, 1024), jnp.bfloat16), P(("data", "expert")))
    return jax.tree.map(over, layer, layer.specs()), x


def loss_of_layer(layer: MoE, x: Array) -> Array:
    y, stats = layer(x)
    assert stats.load_balance is not None and stats.z is not None
    return jnp.sum(jnp.sin(y.astype(jnp.float32))) + stats.load_balance + stats.z


@pytest.mark.long
def test_an_expert_layer_over_a_slice() -> None:
    """Routed and shared, two kernels forward and six of gradients each; rows travel, matrices don't."""
    tpu.device("v5e")
    devices = np.array(topologies.get_topology_desc("v5e:2x4", platform="tpu").devices).reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "expert", "model"), axis_types=(AxisType.Explicit,) * 3)
    layer, x = expert_layer(mesh, 8192, num_shared=1, tensor_axis="model")
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss_of_layer, (0, 1))).trace(layer, x).lower(lowering_platforms=("tpu",))
    program = lowered.compile()
    assert (program.as_text() or "").count('custom_call_target="tpu_custom_call"') == 16
    found = moved(program)
    assert Counter(name for name, _ in found)["ragged-all-to-all"] == 4
    assert {name for name, _ in found} <= {"all-gather", "all-reduce", "all-to-all", "ragged-all-to-all"}
    small = [types for name, types in found if name in ("all-gather", "all-to-all")]  # sizes and offsets
    assert all(re.match(r"\(?s32\[", types) for types in small), small
    memory: Any = program.memory_analysis()
    assert memory.argument_size_in_bytes < 64 << 20 and memory.temp_size_in_bytes < 180 << 20


def kernels_meanwhile(program: str) -> list[int]:
    """How many kernels a scheduled program runs between the start of each exchange of rows and its end."""
    found, begun = dict[str, int](), dict[str, int]()
    for line in program.splitlines():
        if start := re.match(r" *(%\S+) = .* ragged-all-to-all-start\(", line):
            begun[start[1]] = 0
        if 'custom_call_target="tpu_custom_call"' in line:
            begun = {name: count + 1 for name, count in begun.items()}
        if done := re.search(r" ragged-all-to-all-done\((%[^,) ]+)", line):
            found[done[1]] = begun.pop(done[1])
    assert not begun
    return list(found.values())


@pytest.mark.long
def test_chunks_overlap() -> None:
    """Of the eight exchanges of four chunks, as XLA schedules them, rows travel in four while kernels run."""
    tpu.device("v5e")
    devices = np.array(topologies.get_topology_desc("v5e:2x4", platform="tpu").devices).reshape(1, 8)
    mesh = Mesh(devices, ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    overlapped = {}
    for chunks in (1, 4):
        layer, x = expert_layer(mesh, 8 * 4096, chunks=chunks)
        with jax.set_mesh(mesh):
            lowered = jax.jit(lambda layer, x: layer(x)[0]).trace(layer, x).lower(lowering_platforms=("tpu",))
        overlapped[chunks] = kernels_meanwhile(lowered.compile().as_text() or "")
    assert overlapped[1] == [0, 0]
    assert len(overlapped[4]) == 8 and sum(count > 0 for count in overlapped[4]) >= 4


@pytest.mark.long
@pytest.mark.parametrize(
    "topology, axes, x, w, expected",
    [
        ("v5p:2x2x2", (2, 4), P("a"), P(None, None, "b"), "all-reduce"),
        ("v5e:2x4", (2, 4), P("b"), P("b"), "all-gather all-reduce collective-permute reduce-scatter"),
    ],
    ids=str,
)
def test_gradients_over_a_slice(topology: str, axes: tuple[int, int], x: P, w: P, expected: str) -> None:
    """Three kernels over `Explicit` axes of eight TPUs; no whole matrix is gathered."""
    tpu.device("v5e")
    devices = np.array(topologies.get_topology_desc(topology, platform="tpu").devices).reshape(axes)
    mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    gradients, avals = sharded_gradients(mesh, x, w)
    program = jax.jit(gradients).trace(*avals).lower(lowering_platforms=("tpu",)).compile()
    text = program.as_text() or ""
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', text)) == 3
    pattern = r"= [^=\n]*? (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
    assert {*re.findall(pattern, text)} <= {*expected.split()}
    assert not re.search(r"\[16,2048,1024\]\S* all-gather", text)
    memory: Any = program.memory_analysis()
    assert memory.temp_size_in_bytes < 256 << 20


def test_symbolic_sizes() -> None:
    """XLA's product where the number of batch elements is symbolic."""
    (batch,) = jax.export.symbolic_shape("b")
    mapped = jax.jit(jax.vmap(ragged.grouped_matmul, (None, None, 0)))
    avals = Aval((1024, 512), jnp.bfloat16), Aval((8, 512, 256), jnp.bfloat16), Aval((batch, 8), jnp.int32)
    assert CALL not in jax.export.export(mapped, platforms=["tpu"])(*avals).mlir_module()


def test_more_buffers_than_vmem_holds() -> None:
    """An error that names the option."""
    avals = Aval((1024, 512), jnp.bfloat16), Aval((8, 512, 256), jnp.bfloat16), Aval((8,), jnp.int32)
    with pytest.raises(ValueError) as caught:
        lowered(lambda *x: ragged.grouped_matmul(*x, input_buffer_count=1000), *avals)
    assert "1000 buffers of each streamed operand don't fit into a TPU's VMEM." in str(caught.value)
