"""`explain` says what is lowered: for every layout, machine and awkward call, by the lowered program itself."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ragged
from ragged import GroupedTensor
from ragged.primitive import lowering
from ragged.tuning import TpuConfig
from tests import gpu
from tests.cases import LETTERS, check_error
from tests.contract.machines import MACHINES, lowered, on, options_of, shapes, train

ROOT = Path(__file__).parent.parent.parent
# Layouts, and those of one matrix for all groups.
LAYOUTS = [*LETTERS, "batched rhs", "batched lhs", "forward rhs", "forward_left lhs"]
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"dtype": "float16"},
    "5,000 groups": {"g": 5_000},
    "20,000 groups": {"g": 20_000},
    "quantised": {"scaling": "row"},
    "recipe": {"recipe": "rowwise"},
    "blocks": {"recipe": "blockwise"},
    "existing": {"has_existing": True},
    "silu": {"activation": "silu"},
    "lgamma": {"activation": jax.lax.lgamma},
    "existing and silu": {"has_existing": True, "activation": "silu"},
    "xla": {"backend": "xla"},
    "triton_gpu": {"backend": "triton_gpu"},
    "pallas_tpu": {"backend": "pallas_tpu"},
    "interpret": {"backend": TpuConfig(interpret=True)},
}


SILU = "silu (2 operations an element, 1 transcendental)"
LGAMMA = (
    "grouped_matmul of {0}, then lgamma (1 operation an element, 1 transcendental) "
    "({0} has no formula for `lgamma` of float32, in the activation lgamma)"
)


def check(
    machine: str,
    layout: str,
    *,
    g: int = 4,
    dtype: str = "float32",
    scaling: Any = None,
    has_existing: bool = False,
    **options: Any,
) -> str:
    """That the plans of `explain` for a call and its derivatives are what is lowered; returns what it says of the
    call."""
    layout, _, shared = layout.partition(" ")
    platform, rows = MACHINES[machine].platform, max(256, g)
    options |= options_of(layout, rows)
    if "activation" in options and layout not in ("batched", "forward", "inner_rows"):
        del options["activation"]
    operands: list[Any] = [*shapes(layout, g, rows, dtype=dtype)]
    if scaling is not None:
        operands = [jax.eval_shape(lambda x: ragged.quantize(x, "int8", scaling), x) for x in operands]
    if shared:
        side = ("lhs", "rhs").index(shared)
        operands[side] = jax.ShapeDtypeStruct(operands[side].shape[-2:], dtype)
    if has_existing:
        out = jax.eval_shape(lambda *args: ragged.matmul(*args, **options), *operands)
        options["existing_out"] = jnp.zeros(out.shape, out.dtype)

    with on(machine):
        found = ragged.explain(*operands, platform=platform, **options)
    plan = found.plan()
    (said,) = [line.partition(": ")[2] for line in str(found).splitlines() if line.startswith(f"on {platform}: ")]
    if plan.error:
        with pytest.raises(ValueError) as caught:
            lowered(machine, lambda *args: ragged.matmul(*args, **options).data, *operands)
        assert str(caught.value).startswith(plan.error.partition("\n")[0])
        return said

    def run(*args: Any) -> Any:
        has_derivatives = found.derivatives != ("none", "none")
        return train(*args, **options) if has_derivatives else ragged.matmul(*args, **options).data

    kernels, text = lowered(machine, run, *operands)
    kernels = [(backend, kernel.partition(" -> ")[0]) for backend, kernel in kernels]
    first, *others = [(plan.backend, plan.kernel) for plan in found.plans]
    assert kernels[0] == first and sorted(kernels[1:]) == sorted(others), said
    calls = {"pallas_tpu": "custom_call @tpu_custom_call", "triton_gpu": "custom_call @triton_kernel_call"}
    for backend, call in calls.items():
        count = sum(name == backend for name, _ in kernels)
        assert text.count(call) == (0 if "interpret" in str(options.get("backend")) else count), said
    return said


def _pass(machine: str, layout: str, call: str) -> Any:
    return pytest.param(machine, layout, call, None, marks=pytest.mark.long, id=f"{machine}-{layout}-{call}")


@pytest.mark.parametrize(
    "machine, layout, call, said",
    [
        ("CPU", "forward", "plain", "grouped_matmul of xla"),
        ("CPU", "batched rhs", "triton_gpu", "ValueError: backend 'triton_gpu' does not run on cpu."),
        pytest.param("CPU", "outer", "interpret", "tiled_matmul of pallas_tpu (interpreted)", marks=pytest.mark.long),
        pytest.param("H200", "wgrad", "plain", "transposed_grouped_matmul of triton_gpu", marks=pytest.mark.long),
        ("H200", "batched rhs", "plain", "batched_matmul of xla (one group: a dense product)"),
        ("H200", "forward", "pallas_tpu", "ValueError: backend 'pallas_tpu' does not run on cuda."),
        (
            "H200",
            "forward",
            "5,000 groups",
            "grouped_matmul of xla (triton_gpu has no kernels for 5000 groups, more than 4096)",
        ),
        pytest.param("A100", "forward", "recipe", "grouped_matmul of triton_gpu", marks=pytest.mark.long),
        pytest.param("v5e", "forward rhs", "plain", "grouped_matmul of pallas_tpu", marks=pytest.mark.long),
        ("v5e", "forward", "silu", f"grouped_matmul of pallas_tpu with {SILU}"),
        ("v5e", "forward rhs", "silu", f"grouped_matmul of pallas_tpu, then {SILU}"),
        pytest.param("v5e", "forward", "lgamma", LGAMMA.format("pallas_tpu"), marks=pytest.mark.long),
        pytest.param(
            "H200",
            "batched",
            "lgamma",
            LGAMMA.format("triton_gpu").replace("grouped", "batched"),
            marks=pytest.mark.long,
        ),
        ("CPU", "forward", "existing and silu", f"grouped_matmul of xla, then {SILU}"),
        (
            "v5e",
            "forward",
            "20,000 groups",
            "grouped_matmul of xla (20000 groups in 20000 rows: more than a TPU's scalar memory can list)",
        ),
        (
            "v5e",
            "ragged",
            "20,000 groups",
            "tiled_matmul of xla (up to 20039 visits: more than a TPU's scalar memory can list)",
        ),
        ("v5e", "forward", "float16", "grouped_matmul of xla (pallas_tpu has no kernels for lhs in float16)"),
        ("tpu7x", "batched", "quantised", "batched_matmul of pallas_tpu"),
        ("tpu7x", "forward_left lhs", "recipe", "grouped_matmul of pallas_tpu"),
        *(
            _pass(machine, layout, [*CALLS][(5 * i + j) % len(CALLS)])
            for i, machine in enumerate(MACHINES)
            for j, layout in enumerate(LAYOUTS)
            if (i + j) % 2
        ),
    ],
)
def test_what_is_lowered(machine: str, layout: str, call: str, said: str | None) -> None:
    """Of the product and of both derivatives, with the reason where another backend runs than the platform's own."""
    if MACHINES[machine].platform == "cuda":
        gpu.needs_triton()
    found = check(machine, layout, **CALLS[call])
    assert said is None or found == said


SYMBOLIC = """
import itertools, json
import jax, jax.numpy as jnp
import ragged
from tests.contract.launches import launches
from tests.contract.machines import MACHINES, on

(rows,), f32 = jax.export.symbolic_shape("rows", constraints=["rows >= 513"]), jnp.float32
sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
w = jax.ShapeDtypeStruct((4, 64, 32), f32)
both = ragged.grouped_matmul, ragged.transposed_grouped_matmul
for machine, product in itertools.product(("CPU", "H200", "v5e"), both):
    is_forward = product is ragged.grouped_matmul
    avals = [jax.ShapeDtypeStruct(s, f32) for s in ([(rows, 64), w.shape] if is_forward else [(64, rows), (rows, 32)])]
    with launches() as found, on(machine):
        text = jax.export.export(jax.jit(product), platforms=[MACHINES[machine].platform])(*avals, sizes).mlir_module()
    assert [backend for backend, _ in found] == ["xla"] and "custom_call @t" not in text, (machine, found)
for dims in (jnp.array([3, 5, 0, 4], jnp.int32), sizes):
    found = ragged.explain(ragged.GroupedTensor(jax.ShapeDtypeStruct((rows, 64), f32), dims), w)
    assert "f32[rows,32]" in str(found) and len(found.plans) == 9
    for plan in found.plans:
        assert plan.flops is plan.intensity is plan.multiplied is None and not plan.bound and not plan.is_exact
        own = {"cpu": "xla", "cuda": "triton_gpu", "tpu": "pallas_tpu"}[plan.platform]
        why = () if own == "xla" else ((own, f"{own} has no kernels for symbolic extents"),)
        assert (plan.backend, plan.passed_over) == ("xla", why)
    record = json.loads(json.dumps(found.to_json()))
    assert (record["capacity"], record["tail"]) == ({"m": "rows"}, None)
print("checked")
"""


@pytest.mark.long
def test_symbolic_extents_are_xla_s() -> None:
    """Kernels are for extents that are known; XLA's loops take any.

    In a process of its own, without the import hook: a symbolic extent is no `int`.
    """
    gpu.needs_triton()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", SYMBOLIC], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.stdout == "checked\n", run.stderr


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_operands_over_several_devices(axis_type: AxisType) -> None:
    """Counts aren't exact: each device has a part. XLA partitions its own product for TPUs over `Auto` axes."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    sizes, w = jnp.full(4, 1024, jnp.int32), jnp.ones((4, 256, 512))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4096, 256)), NamedSharding(mesh, PartitionSpec("d")))
        tensor, platforms = GroupedTensor(x, sizes), ("cpu", "cuda", "tpu")
        plans = {platform: ragged.explain(tensor, w, platform=platform).plan() for platform in platforms}
    assert not any(each.is_exact for each in plans.values())
    assert plans["tpu"].backend == ("xla" if axis_type == AxisType.Auto else "pallas_tpu")
    assert plans["cuda"].backend == "triton_gpu"


@pytest.mark.long
def test_operands_of_any_kind() -> None:
    """Plain arrays, shapes, NumPy's arrays among the options; a transposed tensor; no rows. No tracer is leaked."""
    x, w = GroupedTensor(jnp.ones((16, 4)), jnp.array([3, 5, 0, 4], jnp.int32)), np.ones((4, 4, 8), np.float32)
    with jax.check_tracer_leaks():
        every: tuple[dict[str, Any], ...] = ({}, {"recipe": "delayed"}, {"existing_out": np.ones((16, 8), np.float32)})
        for options in every:
            assert "on tpu: grouped_matmul of pallas_tpu" in str(ragged.explain(x, w, **options))
    assert ragged.explain(jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))).num_groups == 3
    assert str(ragged.explain(x, w, platform="gpu")) == str(ragged.explain(x, w, platform="cuda"))
    unknown = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
    found = ragged.explain(unknown.mT, unknown)
    assert str(found).startswith("wgrad: ragged columns × ragged rows -> uniform, f32[4,4,4]")
    nothing = GroupedTensor(jnp.ones((0, 4)), jnp.zeros(4, jnp.int32))
    text = str(ragged.explain(nothing, w, preferred_element_type=jnp.float8_e4m3fn))
    assert "derivatives: by lhs none, by rhs none\non cpu: no product (an extent is 0)" in text


@pytest.mark.long
def test_a_backend_is_a_module_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a record, for forwards alone: a wgrad is XLA's; it can be explained, and has nothing to tune."""
    line = lowering.Backend("tests.plain_backend", runs_anywhere=True, has_epilogues=False)
    monkeypatch.setitem(lowering.BACKENDS, "plain", line)
    rng = np.random.default_rng(0)
    x = GroupedTensor(rng.standard_normal((16, 8)).astype(np.float32), jnp.array([3, 5, 0, 4], jnp.int32))
    w, existing = rng.standard_normal((4, 8, 6)).astype(np.float32), jnp.ones((16, 6))

    def product(data: jax.Array, w: jax.Array, backend: str) -> jax.Array:
        out = ragged.matmul(x.with_data(data), w, backend=backend, existing_out=existing, activation="silu")
        return jnp.sum(out.data**2)

    got, want = (jax.value_and_grad(product, (0, 1))(x.data, w, backend) for backend in ("plain", "xla"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
    found = ragged.explain(x, w, backend="plain", platform="cpu")
    kernels = {plan.product: (plan.backend, plan.kernel) for plan in found.plans}
    assert kernels["forward"] == kernels["by lhs"] == ("plain", "grouped_matmul")
    assert kernels["by rhs"] == ("xla", "transposed_grouped_matmul")
    assert ragged.tuning.candidates(x, w, backend="plain") == []
    monkeypatch.setitem(lowering.BACKENDS, "plain", line._replace(runs_anywhere=False))
    check_error(lambda: ragged.matmul(x, w, backend="plain"), ValueError, "backend 'plain' does not run on cpu.")
