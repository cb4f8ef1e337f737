"""`ragged.parallel.estimate`: what programs have, and what routes send."""

import re
from collections.abc import Callable
from math import prod
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
from ragged import GroupedTensor
from ragged.parallel import Estimate, estimate
from tests import tpu
from tests.contract.meshes import DOCS, mesh_of

N, TOKENS, TOP_K, EXPERTS, D, HIDDEN = 8, 16, 2, 16, 256, 24  # tokens of a device
SHAPE: dict[str, Any] = {"tokens": TOKENS, "d": D, "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K, "devices": N}
BITS = {"ui8": 8, "u8": 8, "bf16": 16, "f32": 32, "s32": 32, "i32": 32}


def layer(part: str, mesh: Any = None, **options: Any) -> Callable[..., Array]:
    """`"dispatch"`: that alone. `"all"`: the whole layer."""

    def local(x: Array, gate: Array, up: Array, down: Array, ids: Array, weights: Array) -> Array:
        def expert(rows: GroupedTensor) -> GroupedTensor:
            return ragged.matmul(ragged.matmul(rows, gate).map(jax.nn.silu) * ragged.matmul(rows, up), down)

        ex = ragged.exchange(ragged.route(ids, EXPERTS), **options)
        return ex.dispatch(x).data if part == "dispatch" else ex.map(expert, x, weights)

    mesh = mesh or mesh_of("auto", expert=N)
    return jax.shard_map(local, mesh=mesh, in_specs=(P("expert"),) * 6, out_specs=P("expert"))


def avals(dtype: str, **options: Any) -> list[jax.ShapeDtypeStruct]:
    matrices = [(EXPERTS, D, HIDDEN), (EXPERTS, D, HIDDEN), (EXPERTS, HIDDEN, D)]
    rows = [((N * TOKENS, D), dtype), *((shape, dtype) for shape in matrices)]
    others = ((N * TOKENS, TOP_K), "int32"), ((N * TOKENS, TOP_K), "float32")
    return [jax.ShapeDtypeStruct(*x, **options) for x in (*rows, *others)]


def with_gradient(run: Callable[..., Array]) -> Callable[..., Any]:
    """By tokens, matrices and weights."""
    return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(run(*args).astype(jnp.float32))), (0, 1, 2, 3, 5))


def total(types: list[tuple[str, str]]) -> np.ndarray:
    """Bytes of arrays of these shapes and dtypes: of the integers that say what goes where, and of rows."""
    found = np.zeros(2, int)
    for shape, dtype in types:
        found[int(dtype not in ("s32", "i32"))] += prod(int(n) for n in re.split("[,x]", shape)) * BITS[dtype] // 8
    return found


def compiled(program: Any) -> list[int]:
    """Bytes of the larger sides of a compiled program's collectives, but for the sum of the loss, a scalar."""
    found = np.zeros(2, int)
    kinds = "all-gather|all-to-all|ragged-all-to-all|reduce-scatter|all-reduce|collective-permute"
    for result, name in re.findall(rf"= (\S+|\(.*?\)) ({kinds})(?:-start)?\(", program.as_text()):
        types = [(shape, dtype) for dtype, shape in re.findall(r"(\w+)\[([\d,]+)\]", result)]  # of a tuple, each
        assert types or name == "all-reduce"
        if name == "reduce-scatter":  # the operand has `N` times the result
            types *= N
        if name == "ragged-all-to-all":  # of those that start: operand and result, then offsets
            types = [max(types[:2], key=lambda each: total([each]).sum())]
        found += total(types)
    return found.tolist()


def lowered(run: Callable[..., Any], dtype: str, platform: str) -> list[int]:
    """The same of the program that XLA gets. Alike collectives are still there as often as they were asked for."""
    text = jax.jit(run).trace(*avals(dtype)).lower(lowering_platforms=(platform,)).as_text()
    types = r": \(tensor<([\dx]*)x(\w+)>[^)]*\) -> tensor<([\dx]*)x(\w+)>"
    found = re.findall(rf"(?:all_gather|all_to_all|reduce_scatter)\W.*?{types}", text, re.DOTALL)
    return sum((max(total([x[:2]]), total([x[2:]]), key=sum) for x in found), np.zeros(2, int)).tolist()


def expected(plan: Estimate, *phases: str) -> list[int]:
    assert set(phases) <= set(plan.program)
    return [plan.program["sizes"], sum(plan.program[phase] for phase in phases)]


FORWARD, GRADIENT = ("dispatch", "combine"), ("combine gradient", "dispatch gradient")


def programs(**options: Any) -> list[tuple[Callable[..., Any], tuple[str, ...]]]:
    """Functions, and what they have of an estimate."""
    run, dispatch = layer("all", **options), layer("dispatch", **options)
    found = [(run, FORWARD), (with_gradient(run), FORWARD + GRADIENT)]
    # Without `ex.map`, chunks are sent at once.
    return found if "chunks" in options else [*found, (with_gradient(dispatch), ("dispatch", "dispatch gradient"))]


@pytest.mark.long
@pytest.mark.parametrize(
    "transport, options",
    [("dense", {"wire": "mxfp8"}), ("ring", {"chunks": 3, "capacity": 100, "wire": "rowwise"})],
    ids=str,
)
def test_compiled_programs(transport: str, options: dict[str, Any]) -> None:
    """Over eight devices, in float32: the CPU's collectives have no narrower floats."""
    options = options | {"transport": transport}
    plan = estimate(**SHAPE, dtype="float32", **options)
    for function, phases in programs(**options):
        assert compiled(jax.jit(function).lower(*avals("float32")).compile()) == expected(plan, *phases)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["dense", "ragged", "ring"])
def test_compiled_for_tpus(transport: str) -> None:
    """In bfloat16, for a slice of eight. XLA makes all-reduces of small collectives, of as many bytes.

    It would pad rows and tokens that its tiles don't divide.
    """
    tpu.device("v5e")
    devices = np.array(topologies.get_topology_desc("v5e:2x4", platform="tpu").devices)
    mesh = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
    options = {"transport": transport, "capacity": 70}
    run, plan = layer("all", mesh, **options), estimate(**SHAPE, **options)
    for function, phases in ((run, FORWARD), (with_gradient(run), FORWARD + GRADIENT)):
        program = jax.jit(function).trace(*avals("bfloat16", sharding=NamedSharding(mesh, P("expert"))))
        got = compiled(program.lower(lowering_platforms=("tpu",)).compile())
        want = expected(plan, *phases)
        want[0] += 4 * 4 * EXPERTS if transport == "ragged" and phases[-1] in GRADIENT else 0  # offsets
        assert got == want


FEW, CHUNKS = {"capacity": 40}, {"chunks": 3, "wire": "mxfp8"}


@pytest.mark.parametrize(
    "transport, platform, options",
    [
        ("dense", "cpu", FEW),
        pytest.param("ring", "cpu", CHUNKS, marks=pytest.mark.long),
        pytest.param("ragged", "tpu", FEW, marks=pytest.mark.long),
        pytest.param("dense", "cpu", CHUNKS, marks=pytest.mark.long),
        pytest.param("ring", "cpu", FEW, marks=pytest.mark.long),
        pytest.param("ragged", "cuda", CHUNKS, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_lowered_programs(transport: str, platform: str, options: dict[str, Any]) -> None:
    """In bfloat16, and of `"ragged"`: how large its buffers are."""
    options = options | {"transport": transport}
    plan = estimate(**SHAPE, **options)
    for function, phases in programs(**options):
        got, want = lowered(function, "bfloat16", platform), expected(plan, *phases)
        exchanges = sum(phase in GRADIENT for phase in phases) if transport == "ragged" else 0
        want[0] += exchanges * 2 * 4 * EXPERTS  # of each gradient, twice offsets
        # What the ring and chunks ask for twice is still there.
        assert got[1] == want[1] and (transport == "ring" or "chunks" in options or got == want)


def test_buffers_experts_and_capacity() -> None:
    most = N * TOKENS * TOP_K
    for transport, capacity, rows in (
        ("ragged", None, most),
        ("dense", 70, 64),
        ("ring", 70, 70),
        ("dense", 10**6, most),
    ):
        options: dict[str, Any] = {"transport": transport, "capacity": capacity}
        plan = estimate(**SHAPE, dtype="float32", **options)
        data = jax.eval_shape(layer("dispatch", **options), *avals("float32"))
        assert plan.capacity == rows == data.shape[0] // N and plan.buffer == data.size * 4 // N
    assert plan.experts == sum(x.size for x in avals("float32")[1:4]) * 4 // N
    assert estimate(**SHAPE, gated=False).experts == plan.experts // 3  # two of three, in bfloat16


def test_one_device() -> None:
    """Nothing is sent, and there is one chunk, as in `exchange`. Sizes may be NumPy's."""
    given: dict[str, Any] = {name: np.int32(size) for name, size in SHAPE.items()} | {"devices": np.int32(1)}
    given |= {"chunks": np.int32(4), "capacity": np.int32(3)}
    plan = estimate(**given)
    same: dict[str, Any] = SHAPE | {"devices": 1, "chunks": 1, "capacity": 3}
    assert plan == estimate(**same)
    assert not any(plan.sent.values()) and not any(plan.overlapped.values()) and plan.capacity == 3


@pytest.mark.parametrize("chunks", [1, 2])
def test_rows_that_leave_a_device(chunks: int) -> None:
    """Counted in many random routes, and where all devices want one."""
    rng, draws = np.random.default_rng(0), 4000
    weights = rng.random((draws, TOKENS, EXPERTS))
    to = np.argsort(weights, axis=-1)[..., :TOP_K] // (EXPERTS // N)  # of the tokens of device 0, to different experts
    left = (to != 0).sum((1, 2))
    plan = estimate(**SHAPE, chunks=chunks)
    for phase in FORWARD:
        assert plan.sent[phase] == pytest.approx(left.mean() * D * 2, rel=5 * left.std() / left.mean() / draws**0.5)
        assert left.max() * D * 2 <= plan.sent_at_most[phase]
    all_leave, all_return = TOKENS * TOP_K * D * 2, (N - 1) * TOKENS * TOP_K * D * 2
    most = [plan.sent_at_most[phase] for phase in FORWARD + GRADIENT]
    assert most == [all_leave, all_return, all_leave, all_return]
    assert plan.sent["sizes"] == (N - 1) * chunks * EXPERTS * 4  # to each other device
    # With a small buffer: a row for each device on average, all for others at most; of slots, as many in any case.
    options: dict[str, Any] = SHAPE | {"chunks": chunks, "capacity": N * chunks}
    few, slots = estimate(**options), estimate(**options, transport="dense")
    assert few.sent["combine"] == slots.sent["combine"] == slots.sent_at_most["combine"] == (N - 1) * chunks * D * 2
    assert few.sent_at_most["combine"] == N * chunks * D * 2
    options["capacity"] = 2 * chunks
    assert estimate(**options).sent_at_most["dispatch"] == (N - 1) * 2 * chunks * D * 2
    assert few.flops["forward"] == plan.flops["forward"] * N * chunks / (TOKENS * TOP_K)


@pytest.mark.parametrize("gated", [True, False])
def test_flops(gated: bool) -> None:
    """XLA's count of dense products of as many rows."""
    rows = TOKENS * TOP_K

    def products(x: Array, w: Array) -> Array:
        return x @ w

    def counted(*shapes: tuple[int, int]) -> tuple[float, float]:
        x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        out = jax.eval_shape(products, x, w)
        forward = jax.jit(products).lower(x, w).cost_analysis()
        both = jax.jit(lambda x, w, dy: jax.vjp(products, x, w)[1](dy)).lower(x, w, out).cost_analysis()
        assert forward and both
        return forward["flops"], both["flops"]

    up, down = counted((rows, D), (D, HIDDEN)), counted((rows, HIDDEN), (HIDDEN, D))
    plan = estimate(**SHAPE, gated=gated)
    for way, u, d in zip(("forward", "gradient"), up, down, strict=True):
        assert plan.flops[way] == (2 if gated else 1) * u + d


def finished(dispatch: float, products: float, combine: float, chunks: int) -> float:
    """When a link and a device are done with chunks, if each takes them in order: dispatches, then combines."""
    link = device = 0.0
    ready = []
    for _ in range(chunks):
        link += dispatch / chunks
        device = max(device, link) + products / chunks
        ready.append(device)
    for moment in ready:
        link = max(link, moment) + combine / chunks
    return link


@pytest.mark.parametrize("chunks, link", [(1, 1e5), (2, 1e9), (4, 1e3), (16, 1e5)])
def test_seconds(chunks: int, link: float) -> None:
    """Those of the best order of exchanges and products."""
    rates: Any = {"link": link, "flops": np.float32(1e9)}
    plan = estimate(**SHAPE, chunks=chunks, **rates)
    for way, phases in (("forward", ("sizes", *FORWARD)), ("gradient", GRADIENT)):
        assert plan.exchange[way] == pytest.approx(sum(plan.sent[phase] for phase in phases) / link)
        assert plan.products[way] == plan.flops[way] / 1e9
        half = plan.exchange[way] / 2
        assert plan.seconds[way] == pytest.approx(finished(half, plan.products[way], half, chunks))
        # A better order than that there is none: also where the two differ.
        assert plan.seconds[way] <= finished(1.5 * half, plan.products[way], 0.5 * half, chunks) * (1 + 1e-9)
    assert (plan.overlapped["forward"] > 0) == (chunks > 1)


@pytest.mark.parametrize(
    "wire, bytes_of_row",
    [
        ("mxfp8", 100 + 4),  # ceil(100 / 32) scales of a byte
        ("blockwise", 100 + 4),
        ("rowwise", 100 + 4),
        (ragged.Cast("float8_e5m2", (1, 16)), 100 + 7 * 4),
        (None, 200),
    ],
    ids=str,
)
def test_wire(wire: Any, bytes_of_row: int) -> None:
    """Rows are quantised on their way to the experts, and nowhere else."""
    for transport in ("dense", "ragged", "ring"):
        given: Any = SHAPE | {"d": 100, "transport": transport}
        plan, plain = estimate(**given, wire=wire), estimate(**given)
        assert plan.program["dispatch"] * 200 == plain.program["dispatch"] * bytes_of_row
        assert plan.sent["dispatch"] * 200 == pytest.approx(plain.sent["dispatch"] * bytes_of_row)
        assert all(plan.program[phase] == plain.program[phase] for phase in plan.program if phase != "dispatch")


def test_prints_a_table() -> None:
    """In powers of 1000; a column each for what the program has and what is sent."""
    text = str(estimate(tokens=4096, d=7168, hidden=2048, experts=256, top_k=8, devices=64, chunks=4))
    assert re.search(r"^dispatch +30.1 GB +462 MB +470 MB$", text, re.M)
    assert re.search(r"^forward +2.06 ms +2.92 ms +1.54 ms +3.43 ms +2.89 TFLOP$", text, re.M)
    options: dict[str, Any] = SHAPE | {"experts": 124992, "devices": 2}
    few = str(estimate(**options))
    assert re.search(r"^sizes +1 MB +500 kB +500 kB$", few, re.M)  # 999936 bytes
    assert "a buffer of 524288 rows: 7.52 GB; experts: 352 MB" in text


def test_the_documented_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The page has the output of its code, and figures of that layer."""
    page = DOCS.read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "parallel.estimate" in block)
    names: dict[str, Any] = {"ragged": ragged}
    exec(code, names)
    printed = capsys.readouterr().out.strip()
    plan, _, table = printed.partition("\n|")
    assert f"```text\n{plan}\n```" in page and f"---|\n|{table}\n" in page and table.count("\n") == 6
    dropless, ring = (
        estimate(**names["layer"] | {"devices": 64, **each})
        for each in ({"capacity": None, "chunks": 1}, {"transport": "ring"})
    )
    for sentence in ("each buffer of 64 devices takes 30.1 GB", "sends 11.1 GB, twelve times as much"):
        assert sentence in " ".join(page.split())
    assert dropless.buffer == pytest.approx(30.1e9, rel=0.01)
    assert ring.sent["dispatch"] + ring.sent["combine"] == pytest.approx(11.1e9, rel=0.01)


def test_bad_wires_and_dtypes() -> None:
    """Other wrong arguments are on the page `docs/errors.md`."""
    given: list[tuple[dict[str, Any], Any, str]] = [
        ({"dtype": None}, TypeError, "`dtype` is None.\nGot"),
        ({"wire": "pigeon"}, ValueError, "'pigeon' is not a recipe.\nGot .*\nPass a `ragged.Recipe` or one of"),
        ({"wire": "delayed"}, ValueError, "`wire` has the scaling tensor.\nGot"),
    ]
    for options, error, text in given:
        with pytest.raises(error, match=text):
            estimate(**SHAPE | options)
