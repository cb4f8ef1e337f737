"""What `explain` returns: figures, against definitions; where configurations come from; text, HTML, JSON and a plot."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ragged
from ragged import Explanation, GroupedTensor
from ragged.tuning import Configs, TpuConfig, XlaConfig
from tests import gpu
from tests.cases import INT8_ROWS, check_error, split


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
    for device, platform in (
        ("TPU v99", "tpu"),
        ("NVIDIA Abacus", "cuda"),
    ):  # another chip's aren't passed off as theirs
        said = ragged.explain(*forward(), device=device)
        plan = said.plan()
        assert (plan.device, plan.chip, plan.flops_per_second, plan.bound) == (device, "", None, "")
        assert f"bound on {platform}: not known" in str(said)
    for device, flops_per_second in (("NVIDIA A100", 312e12), ("NVIDIA B200", 2250e12), ("TPU v6 lite", 920e12)):
        plans = ragged.explain(*forward(), device=device).plans
        assert {(plan.device, plan.flops_per_second) for plan in plans} == {(device, flops_per_second)}
    named = jax.sharding.AbstractDevice("TPU7x", 1, "tpu")
    assert ragged.explain(*forward(), device=named, platform="tpu").plan().device == "TPU7x"
    assert {plan.platform for plan in ragged.explain(*forward()).plans} == {"cpu", "cuda", "tpu"}


def test_unknown_sizes_of_a_tpu() -> None:
    """Full buffers, and one more visit for each group that may begin within a tile."""
    x, w = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), forward(1000, 256, 384, 4, jnp.float32))
    plan = ragged.explain(x, w, device="TPU v5 lite", backend=TpuConfig(m=64, k=128, n=128)).plan()
    assert (plan.backend, plan.kernel, plan.source) == ("pallas_tpu", "grouped_matmul", "backend")
    assert (plan.flops, plan.visits, plan.is_exact) == (2 * 1000 * 256 * 384, (16 + 4 - 1) * 2 * 3, False)
    assert plan.bytes_accessed == 4 * (1000 * 256 + 4 * 256 * 384 + 4 + 1000 * 384)


def test_bytes_of_few_rows() -> None:
    """Matrices of empty groups aren't read: all but one per row, or those of the sizes. Two numbers of 4 bits take a
    byte."""
    x, w = jax.ShapeDtypeStruct((3, 256), jnp.bfloat16), jax.ShapeDtypeStruct((8, 256, 384), jnp.int4)
    for sizes, matrices in ((jax.ShapeDtypeStruct((8,), jnp.int32), 3), (jnp.asarray([0, 2, 0, 0, 1, 0, 0, 0]), 2)):
        plans = ragged.explain(GroupedTensor(x, sizes), w, platform="cuda").plans
        assert [plan.bytes_accessed for plan in plans] == [2 * 3 * (256 + 384) + matrices * 256 * 384 // 2 + 4 * 8] * 2


@pytest.mark.parametrize("recipe", split(["rowwise", "blockwise", "nvfp4"], ["tensorwise", "delayed", "mxfp8"]))
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
    of_features = (f"{tokens} m × 1 k", f"{tokens} m × 1 n") if tokens else ("all m × all k", "all m × all n")
    wanted = [(x, w), (dy, by_lhs_rhs.get(recipe, "all k × all n")), of_features]
    assert [plan.scales for plan in found.plans] == wanted
    assert f"lhs {x}, rhs {w}" in str(found)
    assert ragged.explain(*forward()).plan().scales == ("", "")


def test_rows_that_a_kernel_may_quantise() -> None:
    """They are shown as they are multiplied, whatever quantises them."""
    found = ragged.explain(*forward(), recipe=INT8_ROWS)
    for platform in ("cpu", "tpu"):
        plan = found.plan(platform=platform)
        assert plan.dtypes[:2] == ("int8", "int8") and plan.scales == ("1 m × all k", "all k × 1 n")


def test_one_group_that_is_quantised() -> None:
    """Without scales it is a dense product, which XLA computes."""
    x = jnp.ones((1, 16, 64), jnp.bfloat16)
    w = ragged.quantize(jnp.ones((1, 64, 32)), jnp.int8, "column")
    for platform, backend in (("tpu", "pallas_tpu"), ("cuda", "triton_gpu")):
        assert ragged.explain(x, w, platform=platform).plan().backend == backend
        assert ragged.explain(x, w.dequantize(), platform=platform).plan().backend == "xla"


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
    assert both.plan().flops == 2 * 4 * (3 * 3 + 5 * 4 + 4 * 4) and both.sizes == dict.fromkeys("mn", (3, 5, 0, 4))

    seen: list[Explanation] = []

    @jax.jit
    def traced(dims: Any, offset: Any) -> Any:
        seen.append(ragged.explain(GroupedTensor(x.data, dims), w))
        seen.append(ragged.explain(x, w[:2], group_offset=offset))
        seen.append(ragged.explain(x, w))
        return dims

    jax.eval_shape(traced, x.first_dims, jnp.int32(1))
    assert (seen[0].sizes, seen[0].empty, seen[0].tail) == (None, None, None)
    assert "4 groups of unknown sizes" in str(seen[0]) and "≤ 1024" in str(seen[0])
    assert seen[1].sizes == seen[2].sizes == found.sizes
    assert [plan.is_exact for plan in (each.plan() for each in seen)] == [False, False, True]
    assert str(seen[2]) == str(found)

    # A sum that is left for later: its product is one device's, the derivatives are those of the sum.
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = x.with_data(jax.device_put(x.data, P(None, "e")))
        w = jax.device_put(w, P(None, "e"))
        found = ragged.explain(x, w, out_sharding=P(unreduced=frozenset({"e"})), platform="cpu")
    assert [(plan.flops, plan.is_exact) for plan in found.plans] == [(512, False), (1024, False), (1024, False)]


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
    if gpu.triton_call.missing() == "":
        refused = ragged.explain(*forward(), backend="triton_gpu")
        assert "backend 'triton_gpu' does not run on cpu" in refused.plan(platform="cpu").error
        assert "on cpu: ValueError: backend 'triton_gpu' does not run on cpu." in str(refused)
    check_error(lambda: found.plan(platform="metal"), ValueError, "no plan for 'forward' on 'metal'.")
    problem = "`matmul` has no option `tilings`."
    check_error(lambda: ragged.explain(*forward(), tilings=(8, 8, 8)), TypeError, problem)


@pytest.mark.long
def test_plot() -> None:
    """Groups, and the tiles that cover them; what can't be drawn is said."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    x, w = GroupedTensor(jnp.ones((64, 4)), jnp.array([20, 0, 31], jnp.int32)), jnp.ones((3, 4, 8))
    found = ragged.explain(x, w, backend=Configs(*[XlaConfig(m=(16,), k=(16,), n=(16,))] * 3))
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


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = ragged.explain(*forward())
    check_error(found.plot, ImportError, "it needs matplotlib.\nInstall it: `pip install matplotlib`.")
