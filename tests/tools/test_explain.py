"""`explain` says what is lowered: for every layout, platform and awkward call, against the lowered program."""

import json
import os
import re
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh

import ragged
from ragged import GroupedTensor
from ragged.backends.base import Launch, Refusal, Target
from ragged.primitive import lowering
from ragged.product.config import TpuConfig
from ragged.product.layout import Product
from ragged.product.operands import Call, Operand, Operands, Options
from ragged.tuning.products import products
from tests import gpu
from tests.cases import LETTERS, NAMES, check_error
from tests.everywhere import INTERPRETED
from tests.primitive.test_cost import shapes

ROOT = Path(__file__).parent.parent.parent
MACHINES: dict[str, tuple[str, AbstractDevice | None]] = {
    "CPU": ("cpu", None),
    "A100": ("cuda", AbstractDevice("NVIDIA A100", None, "gpu")),
    "H200": ("cuda", AbstractDevice("NVIDIA H200", None, "gpu")),
    "v5e": ("tpu", AbstractDevice("TPU v5 lite", 1, "tpu")),
    "tpu7x": ("tpu", AbstractDevice("TPU7x", 1, "tpu")),
}
SHARED = {
    "batched rhs": "batched",
    "batched lhs": "batched",
    "forward rhs": "forward",
    "forward_left lhs": "forward_left",
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"dtype": jnp.float16},
    "5,000 groups": {"g": 5_000},
    "20,000 groups": {"g": 20_000},
    "quantised": {"scaling": "row"},
    "recipe": {"recipe": "rowwise"},
    "blocks": {"recipe": "blockwise"},
    "existing": {"has_existing": True},
    "xla": {"backend": "xla"},
    "triton_gpu": {"backend": "triton_gpu"},
    "pallas_tpu": {"backend": "pallas_tpu"},
    "interpret": {"backend": INTERPRETED["pallas_tpu"]},
}


def context(machine: str) -> AbstractContextManager[Any]:
    """In here `machine` is what is lowered for."""
    _, device = MACHINES[machine]
    return (
        nullcontext()
        if device is None
        else jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    )


def kernels(machine: str, function: Any, *avals: Any) -> list[str]:
    """The names, or for Triton's the target, of the kernels in the program that is lowered for `machine`."""
    platform, device = MACHINES[machine]
    if platform == "cuda":
        assert device is not None
        text = gpu.lower_for(device.device_kind, function, *avals).as_text()
        return re.findall(r"custom_call @(triton_kernel_call)", text)
    with context(machine):
        text = jax.jit(function).trace(*avals).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r'custom_call @tpu_custom_call.*kernel_name = "([a-z_]+?)(?:_transposed)?_\d', text)


def check(
    machine: str,
    layout: str,
    *,
    g: int = 4,
    dtype: Any = jnp.float32,
    scaling: Any = None,
    has_existing: bool = False,
    **options: Any,
) -> str:
    """That the line of `explain` for a call is what is lowered; returns what it says."""
    layout, shared = SHARED.get(layout, layout), layout.rpartition(" ")[2]
    lhs, rhs = shapes(layout, g, rows=max(256, g), k=16, n=32)
    if layout in ("outer", "ragged"):
        options["max_last"] = 64
    if layout == "inner_columns":
        options["capacity"] = max(256, g)
    operands: list[Any] = [jax.eval_shape(lambda x: x.astype(dtype), x) for x in (lhs, rhs)]
    if scaling is not None:
        operands = [jax.eval_shape(lambda x: ragged.quantize(x, "int8", scaling), x) for x in operands]
    if shared in ("lhs", "rhs"):
        side = ("lhs", "rhs").index(shared)
        operands[side] = jax.ShapeDtypeStruct(operands[side].shape[-2:], dtype)
    if has_existing:
        out = jax.eval_shape(lambda *args: ragged.matmul(*args, **options), *operands)
        options["existing_out"] = jnp.zeros(out.shape, out.dtype)

    with context(machine):
        lines = str(ragged.explain(*operands, **options)).splitlines()
    (said,) = [line.partition(": ")[2] for line in lines if line.startswith(f"on {MACHINES[machine][0]}: ")]

    def run(*args: Any) -> GroupedTensor:
        return ragged.matmul(*args, **options)

    _, _, message = said.partition("Error: ")
    if message:
        with pytest.raises(ValueError, match=re.escape(message)):
            kernels(machine, run, *operands)
        return said
    kernel, _, rest = said.partition(" of ")
    backend = rest.partition(" ")[0]
    want = {"xla": [], "triton_gpu": ["triton_kernel_call"], "pallas_tpu": [kernel]}[backend]
    assert kernels(machine, run, *operands) == ([] if "(interpreted)" in said else want), said
    return said


@pytest.mark.parametrize(
    "machine, layout, call, said",
    [
        ("CPU", "forward", "plain", "grouped_matmul of xla"),
        ("CPU", "batched rhs", "triton_gpu", "ValueError: backend 'triton_gpu' does not run on cpu."),
        ("CPU", "outer", "interpret", "tiled_matmul of pallas_tpu (interpreted)"),
        ("H200", "wgrad", "plain", "transposed_grouped_matmul of triton_gpu"),
        ("H200", "batched rhs", "plain", "batched_matmul of xla (one group: a dense product)"),
        ("H200", "batched lhs", "triton_gpu", "batched_matmul of triton_gpu"),
        ("H200", "forward", "pallas_tpu", "ValueError: backend 'pallas_tpu' does not run on cuda."),
        (
            "H200",
            "forward",
            "5,000 groups",
            "grouped_matmul of xla (triton_gpu has no kernels for 5000 groups, more than 4096)",
        ),
        (
            "A100",
            "forward",
            "recipe",
            "grouped_matmul of xla (GPUs of compute capability 8.0 can't convert float8_e4m3fn; 8.9 and later can)",
        ),
        ("v5e", "forward rhs", "plain", "grouped_matmul of pallas_tpu"),
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
        ("tpu7x", "batched rhs", "pallas_tpu", "batched_matmul of pallas_tpu"),
        ("tpu7x", "batched", "quantised", "batched_matmul of pallas_tpu"),
        ("tpu7x", "forward_left lhs", "recipe", "grouped_matmul of pallas_tpu"),
    ],
)
def test_explain_says_what_is_lowered(machine: str, layout: str, call: str, said: str) -> None:
    """A row of each kind; all of them are among the long tests."""
    if MACHINES[machine][0] == "cuda":
        gpu.needs_triton()
    assert check(machine, layout, **CALLS[call]) == said


@pytest.mark.sampled(default=False)
@pytest.mark.parametrize("layout", [*NAMES, *SHARED])
@pytest.mark.parametrize("machine", MACHINES)
def test_explain_says_what_is_lowered_everywhere(machine: str, layout: str) -> None:
    """Every layout, and matrices that all groups share, on every platform, in awkward calls."""
    if MACHINES[machine][0] == "cuda":
        gpu.needs_triton()
    said = {name: check(machine, layout, **call) for name, call in CALLS.items()}
    own = {"cpu": "xla", "cuda": "triton_gpu", "tpu": "pallas_tpu"}[MACHINES[machine][0]]
    assert f" of {'xla' if layout.startswith('batched ') else own}" in said["plain"]
    assert " of xla" in said["xla"]


def launches(machine: str, function: Any, *avals: Any) -> list[Launch]:
    """What is planned for each product of a function."""
    platform, found = MACHINES[machine][0], []
    for equation, _ in products(jax.make_jaxpr(function)(*avals)):
        call, shapes = equation.params["call"], [x.aval for x in equation.invars]
        with context(machine), lowering.target_of(platform, call.options) as target:
            found.append(lowering.launch_of(platform, equation.params["tree"].unflatten(shapes), call, target))
    return found


def check_mapped(machine: str, layout: str, mapped: str) -> list[Launch]:
    """That a map over the sizes or over `lhs`, and its derivatives, lower to the kernels of their launches."""
    lhs, rhs = shapes(layout, 4, rows=256, k=16, n=32)
    options: dict[str, Any] = {"max_last": 64} if layout in ("outer", "ragged") else {}
    options |= {"capacity": 256} if layout == "inner_columns" else {}
    dims = {"m": lhs.first_dims, "k": lhs.last_dims, "n": rhs.last_dims}
    arrays = {"lhs": lhs.data, "rhs": rhs.data} | {name: x for name, x in dims.items() if x is not None}
    chosen = {"lhs"} if mapped == "lhs" else set(arrays) - {"lhs", "rhs"}
    avals = {name: jax.ShapeDtypeStruct((3, *x.shape), x.dtype) if name in chosen else x for name, x in arrays.items()}

    def element(x: dict[str, Any]) -> Array:
        left = GroupedTensor(x["lhs"], x.get("m"), x.get("k"))
        return ragged.matmul(left, GroupedTensor(x["rhs"], x.get("k"), x.get("n")), **options).data

    def train(x: dict[str, Any]) -> Any:
        product = jax.vmap(element, ({name: 0 if name in chosen else None for name in x},))
        out, pull = jax.vjp(lambda lhs, rhs: product(x | {"lhs": lhs, "rhs": rhs}), x["lhs"], x["rhs"])
        return out, pull(out)

    planned = launches(machine, train, avals)
    names = {"xla": [], "triton_gpu": ["triton_kernel_call"]}
    want = [kernel for launch in planned for kernel in names.get(launch.backend, [launch.kernel])]
    assert sorted(kernels(machine, train, avals)) == sorted(want), list(map(str, planned))
    return planned


@pytest.mark.sampled
@pytest.mark.parametrize("mapped", ["sizes", "lhs"])
@pytest.mark.parametrize("layout", [name for name in NAMES if name != "batched"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_map_lowers_to_its_launches(machine: str, layout: str, mapped: str) -> None:
    """Values and both derivatives."""
    if MACHINES[machine][0] == "cuda":
        gpu.needs_triton()
    planned = check_mapped(machine, layout, mapped)
    assert len(planned) == 3
    own = {"cpu": "xla", "cuda": "triton_gpu", "tpu": "pallas_tpu"}[MACHINES[machine][0]]
    several = len(LETTERS[layout]) > 1 and mapped == "sizes" and own == "pallas_tpu"
    for launch in planned:
        assert launch.backend == ("xla" if several else own)
        assert launch.passed_over == (
            (("pallas_tpu", "pallas_tpu has no kernels for tiled_matmul if sizes differ between batch elements"),)
            if several
            else ()
        )


def check_symbolic(machine: str, product: Any) -> None:
    """That a launch of symbolic extents is XLA's, says why, and that no kernel is lowered."""
    (rows,), f32 = jax.export.symbolic_shape("rows", constraints=["rows >= 513"]), jnp.float32
    is_forward = product is ragged.grouped_matmul
    operands = [(rows, 64), (4, 64, 32)] if is_forward else [(64, rows), (rows, 32)]
    avals = [*(jax.ShapeDtypeStruct(shape, f32) for shape in operands), jax.ShapeDtypeStruct((4,), jnp.int32)]
    (launch,) = launches(machine, product, *avals)
    platform = MACHINES[machine][0]
    own = {"cpu": "xla", "cuda": "triton_gpu", "tpu": "pallas_tpu"}[platform]
    why = () if own == "xla" else ((own, f"{own} has no kernels for symbolic extents"),)
    assert (launch.backend, launch.flops, launch.passed_over) == ("xla", None, why)
    with context(machine):
        module = jax.export.export(jax.jit(product), platforms=[platform])(*avals).mlir_module()
    assert not re.findall(r"custom_call @(tpu_custom_call|triton_kernel_call)", module)


def check_symbolic_explanation() -> None:
    """What `explain` says of symbolic extents, with sizes that are known and without."""
    (rows,), f32 = jax.export.symbolic_shape("rows", constraints=["rows >= 513"]), jnp.float32
    sizes = jnp.array([3, 5, 0, 4], jnp.int32)
    for dims in (sizes, jax.ShapeDtypeStruct(sizes.shape, sizes.dtype)):
        x = GroupedTensor(jax.ShapeDtypeStruct((rows, 64), f32), dims)
        found = ragged.explain(x, jax.ShapeDtypeStruct((4, 64, 32), f32))
        assert "f32[rows,32]" in str(found) and len(found.plans) == 9
        for plan in found.plans:
            assert (plan.flops, plan.intensity, plan.bound, plan.is_exact, plan.multiplied) == (
                None,
                None,
                "",
                False,
                None,
            )
        record = json.loads(json.dumps(found.to_json()))
        assert (record["capacity"], record["tail"]) == ({"m": "rows"}, None)


@pytest.mark.long
def test_symbolic_extents_lower_to_their_launch() -> None:
    """Kernels are for extents that are known; XLA's loops take any.

    In a process of its own, without the import hook: a symbolic extent is no `int`.
    """
    code = """
import itertools
import ragged
from tests.tools.test_explain import check_symbolic, check_symbolic_explanation
for each in itertools.product(("CPU", "H200", "v5e"), (ragged.grouped_matmul, ragged.transposed_grouped_matmul)):
    check_symbolic(*each)
check_symbolic_explanation()
print("checked")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.stdout == "checked\n", run.stderr


def test_a_launch_says_what_it_costs() -> None:
    """FLOPs, bytes, visits and tiles, and where these came from."""
    lhs, rhs = shapes("forward", 4, rows=1000, k=256, n=384)

    def product(backend: Any) -> Any:
        return lambda lhs, rhs: ragged.matmul(lhs, rhs, backend=backend).data

    for backend, source in ((None, "model"), (TpuConfig(m=64, k=128, n=128), "backend")):
        (launch,) = launches("v5e", product(backend), lhs, rhs)
        assert (launch.backend, launch.kernel, launch.source) == ("pallas_tpu", "grouped_matmul", source)
        assert launch.flops == 2 * 1000 * 256 * 384
        assert launch.bytes_accessed == 4 * (1000 * 256 + 4 * 256 * 384 + 4 + 1000 * 384)
    assert launch.config == TpuConfig(m=64, k=128, n=128)
    assert launch.visits == (16 + 4 - 1) * 2 * 3


class _WithRange(NamedTuple):
    existing: Any = None
    bias: Any = None
    up: Any = None
    up_bias: Any = None
    range: Any = None


@pytest.mark.parametrize("backend", ["pallas_tpu", "triton_gpu"])
def test_a_kernel_refuses_an_epilogue_that_it_does_not_know(backend: str) -> None:
    """What is added to `Epilogue` is XLA's until a backend has it, never dropped."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    f32 = jnp.float32
    x, w, sizes = (jax.ShapeDtypeStruct(*each) for each in (((64, 16), f32), ((4, 16, 32), f32), ((4,), jnp.int32)))
    call = Call(Product("mk", "kn", "mn", "m"), (64, 32), jnp.dtype(f32), Options(backend=backend), out_batch=True)
    operands = Operands(Operand(x), Operand(w), {"m": sizes})
    assert isinstance(lowering.ask(backend, operands, call, Target(interpret=True)), Launch)
    epilogue: Any = _WithRange(range=jax.ShapeDtypeStruct((64, 32), f32))
    refusal = lowering.ask(backend, operands._replace(epilogue=epilogue), call, Target(interpret=True))
    assert refusal == Refusal(f"{backend} has no kernels for range")


def test_explain_leaks_no_tracer_and_takes_arrays_of_numpy() -> None:
    """Under `jax.check_tracer_leaks`, with a recipe and with NumPy's arrays among the options."""
    x = GroupedTensor(jnp.ones((16, 4)), jnp.array([3, 5, 0, 4], jnp.int32))
    with jax.check_tracer_leaks():
        every: tuple[dict[str, Any], ...] = ({}, {"recipe": "delayed"}, {"existing_out": np.ones((16, 8), np.float32)})
        for options in every:
            text = str(ragged.explain(x, np.ones((4, 4, 8), np.float32), **options))
            assert "on tpu: grouped_matmul of pallas_tpu" in text


def test_explain_of_arrays_and_of_shapes() -> None:
    """Of two plain arrays; of a tensor that is transposed, and of which only shapes are known."""
    assert ragged.explain(jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))).num_groups == 3
    x = GroupedTensor(jax.ShapeDtypeStruct((16, 4), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32))
    assert str(ragged.explain(x.mT, x)).startswith("wgrad: ragged columns × ragged rows -> uniform, f32[4,4,4]")


def test_explain_of_nothing() -> None:
    """Where an extent is 0 there is no kernel at all; a result of 8 bits has no derivative."""
    x = GroupedTensor(jnp.ones((0, 4)), jnp.zeros(4, jnp.int32))
    text = str(ragged.explain(x, jnp.ones((4, 4, 8)), preferred_element_type=jnp.float8_e4m3fn))
    assert "derivatives: by lhs none, by rhs none\non cpu: no product (an extent is 0)" in text


def test_a_backend_is_a_module_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a record, for forwards alone: a wgrad is XLA's; it can be explained, and has nothing to tune."""
    line = lowering.Backend("tests.plain_backend", runs_anywhere=True, has_epilogues=False)
    monkeypatch.setitem(lowering.BACKENDS, "plain", line)
    x = GroupedTensor(jax.random.normal(jax.random.key(0), (16, 8)), jnp.array([3, 5, 0, 4], jnp.int32))
    w, existing = jax.random.normal(jax.random.key(1), (4, 8, 6)), jnp.ones((16, 6))

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
