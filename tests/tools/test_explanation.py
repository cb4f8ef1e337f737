"""What `explain` returns: counts of tiles, against interpreted kernels; figures, against definitions; and its forms."""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ragged
from ragged import Explanation, GroupedTensor, ProductPlan
from ragged.backends import base
from ragged.backends.xla import backend
from ragged.quant.recipe import PRESETS
from ragged.tuning import Configs, GpuConfig, TpuConfig, XlaConfig
from tests import cases, gpu
from tests.cases import LETTERS, NAMES, check_error
from tests.everywhere import INTERPRETED, everywhere


@pytest.fixture(scope="module")
def executed() -> Iterator[Counter[str]]:
    """What kernels and XLA's loops do in here, each time that they run: "dots", "flops" of those, and "idle": tiles of
    Triton's results without a dot, or, after `steps` of a Pallas grid, those that aren't dots."""
    counts: Counter[str] = Counter()
    dot, pallas_call = base.dot, pallas.pallas_call

    def note(out: Any, value: Any, of: Any) -> Any:
        def count(x: Any, value: Any) -> Any:
            counts.update({name: int(n) for name, n in of(int(value)).items()})
            return x

        return jax.pure_callback(count, jax.ShapeDtypeStruct(out.shape, out.dtype), out, value)

    def counted_dot(x: Any, y: Any, contract: tuple[int, int], *args: Any, batch: int = 0) -> Any:
        out = dot(x, y, contract, *args, batch=batch)
        flops = 2 * math.prod(out.shape) * x.shape[contract[0]]
        return note(out, jnp.int32(0), lambda _: {"dots": math.prod(x.shape[:batch]), "flops": flops})

    def counted_call(*args: Any, **options: Any) -> Any:
        call, grid = pallas_call(*args, **options), options["grid_spec"].grid

        def run(*operands: Any) -> Any:
            steps = math.prod(n for n in grid if isinstance(n, int)) * jnp.int32(1)
            for n in grid:
                steps = steps if isinstance(n, int) else steps * jnp.reshape(n, ())
            return note(call(*operands), steps, lambda steps: {"steps": steps})

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "dot", counted_dot)
        patch.setattr(backend, "dot", counted_dot)
        patch.setattr(pallas, "pallas_call", counted_call)
        if gpu.triton_call.missing() == "":
            _count_triton(patch, counts)
        jax.clear_caches()  # programs that were compiled before don't count
        yield counts
    jax.clear_caches()


def _count_triton(patch: pytest.MonkeyPatch, counts: Counter[str]) -> None:
    from ragged.backends.gpu import interpreter

    builder, since = interpreter._Builder, Counter[str]()
    store, dot = builder.create_masked_store, builder.create_dot

    def counted_store(*args: Any, **options: Any) -> Any:
        counts.update(idle=int(not since["dots"]))
        since.clear()
        return store(*args, **options)

    def counted_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        since.update(dots=1)
        (rows, depth), columns = a.data.shape, b.data.shape[1]
        counts.update(dots=1, flops=2 * rows * depth * columns)
        return dot(self, a, b, *args)

    patch.setattr(builder, "create_masked_store", counted_store)
    patch.setattr(builder, "create_dot", counted_dot)


def ran(counts: Counter[str], lhs: Any, rhs: Any, product: str, **options: Any) -> Counter[str]:
    """What one of the three products executes."""
    counts.clear()

    def forward(lhs: Any, rhs: Any) -> Any:
        return ragged.matmul(lhs, rhs, **options).data

    def derivative(x: Any, ct: Any) -> Any:
        if product == "by lhs":
            return jax.vjp(lambda data: forward(lhs.with_data(data), rhs), x)[1](ct)
        return jax.vjp(lambda data: forward(lhs, rhs.with_data(data) if isinstance(rhs, GroupedTensor) else data), x)[
            1
        ](ct)

    if product == "forward":
        jax.block_until_ready(jax.jit(forward)(lhs, rhs))
    else:
        out = jax.eval_shape(forward, lhs, rhs)
        ct = jnp.ones(out.shape, out.dtype)
        x = lhs if product == "by lhs" else rhs
        jax.block_until_ready(jax.jit(derivative)(x.data if isinstance(x, GroupedTensor) else x, ct))
    return counts


def check_counts(
    counts: Counter[str], backend: str, lhs: Any, rhs: Any, tiles: Any = None, **options: Any
) -> list[ProductPlan]:
    """That what `explain` counts is what runs, for the product and both derivatives."""
    options["backend"] = everywhere(backend, *tiles) if tiles else INTERPRETED[backend]
    plans = ragged.explain(lhs, rhs, platform="cpu", **options).plans
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (lhs, rhs))
    at_most = ragged.explain(*avals, platform="cpu", **options).plans
    for plan, bound in zip(plans, at_most, strict=True):
        if bound.layout == "batched":
            assert bound == plan
            continue
        assert not bound.is_exact and bound.idle is bound.multiplied is None and bound.flops is not None
        assert plan.flops is not None
        if bound.layout in ("forward", "forward_left", "wgrad"):
            assert plan.flops <= bound.flops
        if bound.visits is not None:
            assert plan.visits is not None and plan.idle is not None and plan.visits + plan.idle <= bound.visits
        assert plan.is_exact and plan.backend == backend
        got = ran(counts, lhs, rhs, plan.product, **options)
        assert (plan.product, plan.multiplied) == (plan.product, got["flops"])
        if backend == "pallas_tpu":
            assert plan.visits is not None and plan.idle is not None
            assert plan.visits + plan.idle == got["steps"], plan.product
        else:
            assert (plan.visits, plan.idle) == (got["dots"], got["idle"]), plan.product
    return list(plans)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["zipf", "half_empty", "giant"])
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("backend", INTERPRETED)
def test_counts_are_what_kernels_execute(backend: str, layout: str, kind: str, executed: Counter[str]) -> None:
    """Products of tiles, tiles that only get zeros, and FLOPs of whole tiles; by interpreted kernels."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    case = cases.make(layout, g=5, kind=kind, capacity=200, uniform=(40, 48, 80), fill=0.0)
    # Of several ragged letters, a TPU's tiles are of 128. XLA would hoist the dots of one tile as wide as its operand.
    small = 128 if len(LETTERS[layout]) > 1 and backend == "pallas_tpu" else 32
    tiles = tuple(small if letter in LETTERS[layout] else 128 for letter in "mkn")
    check_counts(executed, backend, case.lhs, case.rhs, (16, 32, 64) if backend == "triton_gpu" else tiles)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", INTERPRETED)
def test_counts_of_large_tiles(backend: str, executed: Counter[str]) -> None:
    """Tiles that groups share are multiplied in chunks on a TPU; several steps of what is contracted."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    sizes = jnp.array([300, 0, 5, 256, 20, 0], jnp.int32)
    x, w = GroupedTensor(jnp.ones((600, 40)), sizes), GroupedTensor(jnp.ones((6, 40, 24)))
    plans = check_counts(executed, backend, x, w, (256, 128, 128) if backend != "triton_gpu" else (128, 32, 16))
    assert plans[0].flops == 2 * 581 * 40 * 24


@pytest.mark.parametrize(
    "sizes, visits", [([5, 6, 7, 6, 5, 4], 6), ([3, 4, 25, 0, 2, 1], 6 + 1), ([0, 0, 0, 37, 0, 0], 3)]
)
def test_counts_of_one_dot_for_all_groups(sizes: list[int], visits: int, executed: Counter[str]) -> None:
    """XLA's dot for the first 16 rows of all groups, and tiles for what it doesn't hold; tiles alone for few."""
    x = GroupedTensor(jnp.ones((40, 16)), jnp.array(sizes, jnp.int32))
    plans = check_counts(executed, "xla", x, jnp.ones((6, 16, 32)))
    assert all(isinstance(plan.config, XlaConfig) and plan.config.batched_rows == 16 for plan in plans)
    assert plans[0].visits == visits


@pytest.mark.sampled
@pytest.mark.parametrize("offset", [-1, 1, 4])
@pytest.mark.parametrize("backend", INTERPRETED)
def test_counts_of_a_shard(backend: str, offset: int, executed: Counter[str]) -> None:
    """Rows of groups that aren't held are as the tail."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    sizes = jnp.array([50, 0, 70, 20], jnp.int32)
    x, w = GroupedTensor(jnp.ones((200, 16)), sizes), GroupedTensor(jnp.ones((2, 16, 32)))
    tiles = (16, 16, 32) if backend == "triton_gpu" else (32, 128, 128)
    plans = check_counts(executed, backend, x, w, tiles, group_offset=jnp.int32(offset))
    held = sum(size for group, size in enumerate([50, 0, 70, 20]) if 0 <= group - offset < 2)
    assert [plan.flops for plan in plans] == [2 * held * 16 * 32] * 3


@pytest.mark.parametrize(
    "backend, tiles, counts",
    [
        # Rows 50 to 119 are the group's: 5 tiles from its first row on; of the others 4 in front of it, 5 behind it.
        ("triton_gpu", (16, 64, 64), (5 * 4 * 3, (4 + 5) * 3)),
        # They lie in 3 of the 7 tiles that the buffer is cut into.
        ("pallas_tpu", (32, 128, 128), (3 * 2 * 2, (7 - 3) * 2)),
    ],
)
def test_counts_of_a_group_in_the_middle(backend: str, tiles: tuple[int, int, int], counts: tuple[int, int]) -> None:
    """By hand, with several tiles of each letter: rows in front of the group, and behind it, get zeros once."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    x = GroupedTensor(jax.ShapeDtypeStruct((200, 256), jnp.float32), jnp.array([50, 0, 70, 20], jnp.int32))
    w = jax.ShapeDtypeStruct((1, 256, 192), jnp.float32)
    plan = ragged.explain(x, w, platform="cpu", backend=everywhere(backend, *tiles), group_offset=2).plan()
    assert (plan.visits, plan.idle) == counts


def test_counts_of_the_tail_of_two_ragged_letters() -> None:
    """By hand. One of 5 tiles of rows holds both groups, the second of which has 2 tiles of columns."""
    x = GroupedTensor(jax.ShapeDtypeStruct((600, 16), jnp.float32), jnp.array([50, 0, 50], jnp.int32))
    y = GroupedTensor(jax.ShapeDtypeStruct((300, 16), jnp.float32), jnp.array([40, 0, 200], jnp.int32))
    plan = ragged.explain(x, y.mT, platform="tpu", max_last=256, backend=TpuConfig(m=128, k=128, n=128)).plan()
    assert plan.backend == "pallas_tpu"
    assert (plan.visits, plan.idle) == (1 + 2, 1 + (5 - 1) * 2)


def test_tiles_of_groups_that_are_moved_apart() -> None:
    """Where a kernel moves groups to multiples of a block of scales, a group's tiles cover its rows in the buffer."""
    x = GroupedTensor(jax.ShapeDtypeStruct((64, 128), jnp.bfloat16), jnp.ones(40, jnp.int32))
    w = jax.ShapeDtypeStruct((40, 128, 128), jnp.bfloat16)
    plan = ragged.explain(x, w, platform="tpu", recipe="mxfp8").plan("by rhs")
    assert plan.backend == "pallas_tpu" and [group for group, _, _ in plan.tiles] == [*range(40)]
    assert all(at <= group < at + extent for group, at, extent in plan.tiles)  # each group has one row


@pytest.mark.long
@pytest.mark.parametrize("backend", INTERPRETED)
def test_counts_of_a_shared_matrix(backend: str, executed: Counter[str]) -> None:
    """It makes the groups one."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    x = GroupedTensor(jnp.ones((100, 16)), jnp.array([30, 0, 41], jnp.int32))
    tiles = (16, 16, 32) if backend == "triton_gpu" else (32, 128, 128)
    plans = check_counts(executed, backend, x, jnp.ones((16, 32)), tiles)
    assert [plan.flops for plan in plans] == [2 * 71 * 16 * 32] * 3


def forward(m: int = 4096, k: int = 1024, n: int = 512, g: int = 8, dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    """Operands as shapes, with sizes that are known."""
    sizes = jnp.asarray(ragged.tuning.sample_sizes("zipf", g, m - 96))
    return GroupedTensor(jax.ShapeDtypeStruct((m, k), dtype), sizes), jax.ShapeDtypeStruct((g, k, n), dtype)


def test_figures() -> None:
    """FLOP, bytes, intensity and bound, of the product and its derivatives, with the chip's numbers."""
    for device, flops_per_second, bytes_per_second in (
        ("NVIDIA H200", 989e12, 4.8e12),
        ("TPU v5 lite", 197e12, 8.2e11),
    ):
        for (m, n), bound in (((4096, 1024), "compute"), ((512, 1024), "memory")):
            found = ragged.explain(*forward(m, n=n), device=device)
            assert (found.num_groups, found.empty, found.tail, found.capacity) == (8, 0, {"m": 96}, {"m": m})
            assert found.sizes is not None and sum(found.sizes["m"]) == m - 96
            assert [plan.product for plan in found.plans] == ["forward", "by lhs", "by rhs"]
            assert [plan.operands for plan in found.plans] == [("lhs", "rhs"), ("dout", "rhs"), ("lhs", "dout")]
            assert [plan.layout for plan in found.plans] == ["forward", "forward", "wgrad"]
            for plan in found.plans:
                flops, moved = 2 * (m - 96) * 1024 * n, 2 * (m * 1024 + 8 * 1024 * n + m * n) + 4 * 8
                assert (plan.flops, plan.bytes_accessed, plan.intensity) == (flops, moved, flops / moved)
                assert (plan.device, plan.chip) == (device, device)
                assert plan.seconds == {"compute": flops / flops_per_second, "memory": moved / bytes_per_second}
                assert plan.bound == (bound if device == "NVIDIA H200" else "memory" if m == 512 else plan.bound)
                assert plan.multiplied is not None and plan.full == flops / plan.multiplied
                assert flops <= plan.multiplied
    cpu = ragged.explain(*forward(), platform="cpu").plan()
    assert (cpu.bound, cpu.seconds, cpu.flops_per_second, cpu.chip) == ("", {}, None, "")
    nowhere = ragged.explain(*forward(), platform="tpu").plan()
    assert (nowhere.device, nowhere.chip) == ("", "TPU v5 lite")


def test_sources() -> None:
    """The configuration of each product, and where it comes from."""
    x, w = forward()
    gpu_config = partial(GpuConfig, k=32, n=32, warps=4, stages=3)
    given = Configs((XlaConfig(m=(64,)), gpu_config(m=64)), XlaConfig(m=(32,)), gpu_config(m=16))
    with ragged.tuning.using(given):
        found = ragged.explain(x, w)
    said = {(plan.product, plan.backend): (plan.config, plan.source) for plan in found.plans}
    assert said["forward", "xla"] == (XlaConfig(m=(64,)), "using")
    assert said["by lhs", "xla"] == (XlaConfig(m=(32,)), "using")
    assert said["forward", "triton_gpu"] == (gpu_config(m=64), "using")
    assert said["by rhs", "triton_gpu"] == (gpu_config(m=16), "using")
    assert said["by rhs", "xla"][1] == said["by lhs", "triton_gpu"][1] == said["forward", "pallas_tpu"][1] == "model"
    found = ragged.explain(x, w, backend=Configs(gpu_config(m=64), rhs=gpu_config(m=16)), platform="cuda")
    said = {plan.product: (plan.config, plan.source) for plan in found.plans}
    assert said["forward"] == (gpu_config(m=64), "backend") and said["by rhs"] == (gpu_config(m=16), "backend")
    assert said["by lhs"][1] == "model"
    with ragged.tuning.using(TpuConfig(m=128, k=512, n=512)):
        plan = ragged.explain(x, w, platform="tpu").plan()
    assert (plan.config, plan.source) == (TpuConfig(m=128, k=512, n=512), "using")


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", PRESETS)
def test_dtypes_and_scales_of_recipes(recipe: str) -> None:
    """Each of the three products has its own, along what it contracts: a wgrad's, tokens."""
    operand, bf16 = "float4_e2m1fn" if recipe == "nvfp4" else "float8_e4m3fn", "bfloat16"
    gradient = "float8_e5m2" if recipe in ("tensorwise", "delayed") else operand
    whole = "all m × all k", "all k × all n", "all m × all n"
    by_lhs_rhs = {"rowwise": "1 k × all n", "blockwise": "128 k × 128 n", "mxfp8": "1 k × 32 n", "nvfp4": "1 k × 16 n"}
    x, w, dy = {
        "rowwise": ("1 m × all k", "all k × 1 n", "1 m × all n"),
        "blockwise": ("1 m × 128 k", "128 k × 128 n", "1 m × 128 n"),
        "mxfp8": ("1 m × 32 k", "32 k × 1 n", "1 m × 32 n"),
        "nvfp4": ("1 m × 16 k", "16 k × 1 n", "1 m × 16 n"),
    }.get(recipe, whole)
    tokens = {"rowwise": "all", "blockwise": "128", "mxfp8": "32", "nvfp4": "16"}.get(recipe)  # of a feature
    found = ragged.explain(*forward(), recipe=recipe, platform="tpu")
    assert found.recipe == recipe and f"quantised by {recipe}, each product separately" in str(found)
    x_w, dy_w, x_dy = (operand, operand), (gradient, operand), (operand, gradient)
    assert [plan.dtypes for plan in found.plans] == [(*each, bf16) for each in (x_w, dy_w, x_dy)]
    scales = [plan.scales for plan in found.plans]
    assert scales[0] == (x, w)
    assert scales[1] == (dy, by_lhs_rhs.get(recipe, "all k × all n"))
    of_features = (f"{tokens} m × 1 k", f"{tokens} m × 1 n") if tokens else ("all m × all k", "all m × all n")
    assert scales[2] == of_features
    assert f"lhs {x}, rhs {w}" in str(found)
    assert ragged.explain(*forward()).plan().scales == ("", "")


def test_what_is_known_of_sizes() -> None:
    """Sizes, empty groups and tails; of tracers nothing; of an offset that is traced, no counts."""
    x, w = GroupedTensor(jnp.ones((16, 4)), jnp.array([3, 5, 0, 4], jnp.int32)), jnp.ones((4, 4, 8))
    found = ragged.explain(x, w)
    assert (found.sizes, found.empty, found.tail) == ({"m": (3, 5, 0, 4)}, 1, {"m": 4})
    assert "4 groups, 1 empty: m 0 to 5, 12 of 16 in all" in str(found)
    for sizes in ([-2, 3, 20, 4], [2**31 - 1] * 4):  # cut off where the buffer ends
        wrong = ragged.explain(GroupedTensor(x.data, jnp.array(sizes, jnp.int32)), w)
        assert wrong.plan().flops == 2 * 16 * 4 * 8 and wrong.tail == {"m": 0}
    both = ragged.explain(x, x.mT, max_last=4)  # the result has fewer columns than a group
    assert both.plan().flops == 2 * 4 * (3 * 3 + 5 * 4 + 4 * 4) and both.sizes == {"m": x_dims(x), "n": x_dims(x)}

    seen: list[Explanation] = []

    @jax.jit
    def traced(dims: Any, offset: Any) -> Any:
        seen.append(ragged.explain(GroupedTensor(x.data, dims), w))
        seen.append(ragged.explain(x, w[:2], group_offset=offset))
        seen.append(ragged.explain(x, w))
        return dims

    traced(x.first_dims, jnp.int32(1))
    assert (seen[0].sizes, seen[0].empty, seen[0].tail) == (None, None, None)
    assert "4 groups of unknown sizes" in str(seen[0]) and "≤ 1024" in str(seen[0])
    assert seen[1].sizes == seen[2].sizes == found.sizes
    assert [plan.is_exact for plan in (each.plan() for each in seen)] == [False, False, True]
    assert str(seen[2]) == str(found)


def x_dims(x: GroupedTensor) -> tuple[int, ...]:
    assert x.first_dims is not None
    return tuple(x.first_dims.tolist())


def test_a_sum_that_is_left_for_later() -> None:
    """Its product is one device's, of sizes that aren't known; the derivatives are those of the sum."""
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = GroupedTensor(jax.device_put(jnp.ones((16, 4)), P(None, "e")), jnp.array([3, 5, 0, 4], jnp.int32))
        w = jax.device_put(jnp.ones((4, 4, 8)), P(None, "e"))
        found = ragged.explain(x, w, out_sharding=P(unreduced=frozenset({"e"})), platform="cpu")
    assert [(plan.flops, plan.is_exact) for plan in found.plans] == [(512, False), (1024, False), (1024, False)]


def test_platforms_and_devices() -> None:
    """One platform, or one kind of device; and what is no such thing."""
    x, w = forward()
    assert {plan.platform for plan in ragged.explain(x, w).plans} == {"cpu", "cuda", "tpu"}
    assert {plan.platform for plan in ragged.explain(x, w, platform="tpu").plans} == {"tpu"}
    for device, config in (("NVIDIA A100", 312e12), ("NVIDIA B200", 2250e12), ("TPU v6 lite", 920e12)):
        plans = ragged.explain(x, w, device=device).plans
        assert {(plan.device, plan.flops_per_second) for plan in plans} == {(device, config)}
    named = jax.sharding.AbstractDevice("TPU7x", 1, "tpu")
    assert ragged.explain(x, w, device=named, platform="tpu").plan().device == "TPU7x"
    for options, text in (
        ({"platform": "metal"}, "`platform` is 'metal'."),
        ({"device": "abacus"}, "`device` is 'abacus', neither a TPU nor an NVIDIA GPU."),
        ({"device": "TPU v5 lite", "platform": "cuda"}, "of the platform 'tpu', but `platform` is 'cuda'."),
    ):
        check_error(lambda options=options: ragged.explain(x, w, **options), ValueError, text)
    check_error(lambda: ragged.explain(x, w).plan("by x"), ValueError, "no plan for 'by x'.")
    check_error(lambda: ragged.explain(x, w).plan(platform="metal"), ValueError, "no plan for 'forward' on 'metal'.")


def test_forms() -> None:
    """Text, HTML and JSON say the same; what a platform can't do, or its own backend, is said for each product."""
    found = ragged.explain(*forward(dtype=jnp.float16), existing_out=None)
    text, html = str(found), found._repr_html_()
    assert text.splitlines()[:2] == [
        "forward: ragged rows × uniform -> ragged rows, f16[4096,512]",
        "derivatives: by lhs forward, by rhs wgrad",
    ]
    why = "(pallas_tpu has no kernels for lhs in float16)"
    assert f"on tpu: grouped_matmul of xla {why}" in text and text.count(why) == 1  # the same for all three
    assert html.count("<table>") == 2 and html.count("<tr>") == 1 + 3 + 1 + 9 and "ragged rows × uniform -&gt;" in html
    record = json.loads(json.dumps(found.to_json()))
    assert found.sizes is not None
    assert (record["layout"], record["sizes"]["m"], record["tail"]) == ("forward", list(found.sizes["m"]), {"m": 96})
    for plan, each in zip(found.plans, record["plans"], strict=True):
        assert (each["product"], each["visits"], each["bound"]) == (plan.product, plan.visits, plan.bound)
        assert each["config"]["backend"] == plan.backend and "tiles" not in each
    refused = ragged.explain(*forward(), backend="triton_gpu")
    if gpu.triton_call.missing() == "":
        assert refused.plan(platform="cpu").error.startswith(
            "`ragged.matmul`: backend 'triton_gpu' does not run on cpu"
        )
        assert "on cpu: ValueError: backend 'triton_gpu' does not run on cpu." in str(refused)


@pytest.mark.long
def test_plot() -> None:
    """Groups, and the tiles that cover them; what can't be drawn is said."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    x, w = GroupedTensor(jnp.ones((64, 4)), jnp.array([20, 0, 31], jnp.int32)), jnp.ones((3, 4, 8))
    found = ragged.explain(x, w, backend=everywhere("xla", 16, 16, 16))
    for product, platform in (("forward", "cpu"), ("by rhs", "tpu"), ("by lhs", None)):
        ax = found.plot(product, platform)
        groups, tiles = (collection.get_paths() for collection in ax.collections)
        plan = found.plan(product, platform)
        assert len(groups) == 3 and len(tiles) == len(plan.tiles)
        boxes = sorted(path.get_extents().intervalx.tolist() for path in groups)
        assert boxes == [[0, 20], [20, 20], [20, 51]]
        covered = {(g, i) for g, at, extent in plan.tiles for i in range(at, at + extent)}
        assert covered >= {(0, i) for i in range(20)} | {(2, i) for i in range(20, 51)}
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["groups", "tiles", "tail"]
        pyplot.close(ax.figure)
    _, own = pyplot.subplots()
    assert found.plot(ax=own) is own
    pyplot.close(own.figure)
    unknown = ragged.explain(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (x, w)))
    check_error(unknown.plot, ValueError, "the sizes of the groups aren't known.")
    uniform = ragged.explain(GroupedTensor(jnp.ones((3, 4, 8))), GroupedTensor(jnp.ones((3, 8, 4))))
    check_error(uniform.plot, ValueError, "no kernel has tiles along a ragged dim in 'forward' on 'cpu'.")


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = ragged.explain(*forward())
    check_error(found.plot, ImportError, "it needs matplotlib.\nInstall it: `pip install matplotlib`.")
