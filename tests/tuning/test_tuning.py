"""Configurations: which there are, where the one that runs comes from, and how the fastest is found and remembered."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from ragged.backends import cache
from ragged.backends.base import DEFAULT_TPU, Launch, Target
from ragged.primitive import lowering
from ragged.product.config import CONFIG_TYPES, from_json, to_json
from ragged.tuning import (
    Config,
    Configs,
    Found,
    GpuConfig,
    TpuConfig,
    XlaConfig,
    autotune,
    candidates,
    products,
    search,
    using,
)
from ragged.tuning.products import BoundProduct, products_of
from tests import cases, gpu, ran
from tests.cases import LETTERS, NAMES, check
from tests.everywhere import INTERPRETED
from tests.primitive.test_cost import shapes
from tests.tools.test_explain import MACHINES, context, launches

ROOT = Path(__file__).parent.parent.parent
X = GroupedTensor(jnp.ones((96, 16)), jnp.array([30, 0, 50, 8], jnp.int32))
W = jnp.ones((4, 16, 8))
TPU, GPU = TpuConfig(m=32, k=128, n=128), GpuConfig(m=32, k=32, n=64, warps=4, stages=2)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    cache.clear_cache()
    yield
    cache.clear_cache()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache's file, that isn't there yet."""
    path = tmp_path / "place" / "tuning.json"
    monkeypatch.setenv(cache.VARIABLE, str(path))
    return path


def forward(x: Any, w: Any, **options: Any) -> Any:
    return ragged.matmul(x, w, **options).data


def train(x: Any, w: Any, **options: Any) -> Any:
    out, pull = jax.vjp(lambda x, w: forward(x, w, **options), x, w)
    return out, pull(out)


def launched(fn: Any, *args: Any, machine: str = "CPU") -> list[tuple[str, Any, str]]:
    """What is lowered: letters of the results, configurations, sources."""
    return [(each.call.product.out, each.config, each.source) for each in launches(machine, fn, *args)]


def entry(config: Config, date: str = "2026-01-01") -> Found:
    return Found(config, 1.0, 2.0, "even", date)


def remember(config: Config, fn: Any = forward, *args: Any, machine: str = "CPU") -> tuple[str, str]:
    """Puts a configuration into the cache, for the first product of a call, and returns its two keys."""
    args = args or (X, W)
    (equation, _), *_ = products_of(fn, args, sizes=False)
    (launch, *_) = launches(machine, fn, *args)
    on = cache.device_key(launch.target.device)
    assert on is not None
    keys = on, BoundProduct(equation).key(launch)
    cache.put({keys[0]: {keys[1]: entry(config)}})
    return keys


# Where a configuration comes from


def test_where_a_configuration_comes_from() -> None:
    """The call, then a context, then the cache, then the model."""
    heights = [XlaConfig(m=(height,)) for height in (16, 32, 48)]
    ((_, model, source),) = launched(forward, X, W)
    assert source == "model"
    remember(heights[0])
    assert launched(forward, X, W) == [("mn", heights[0], "cache")]
    with using(heights[1]):
        assert launched(forward, X, W) == [("mn", heights[1], "using")]
        assert launched(lambda x, w: forward(x, w, backend=heights[2]), X, W) == [("mn", heights[2], "backend")]
        assert launched(lambda x, w: forward(x, w, backend="xla"), X, W) == [("mn", heights[1], "using")]
        tiled = partial(ragged.grouped_matmul, group_sizes=X.first_dims, tiling=(48, 8, 8))
        ((_, _, source),) = launched(lambda x, w: tiled(x, w), X.data, W)
        assert source == "tiling"
        with using(cached=False):
            assert launched(forward, X, W) == [("mn", model, "model")]
    assert launched(forward, X, W) == [("mn", heights[0], "cache")]


@pytest.mark.parametrize("machine", MACHINES)
def test_each_backend_has_its_record(machine: str) -> None:
    """Where another backend runs, it has its own choice."""
    lhs, rhs = shapes("forward", 4, rows=1000, k=256, n=384)
    records = {"xla": XlaConfig(m=(64, 128)), "pallas_tpu": TPU, "triton_gpu": GPU}
    with using(*records.values()):
        ((_, config, source),) = launched(forward, lhs, rhs, machine=machine)
    assert source == "using" and config in records.values()
    assert config == records[lowering.PLATFORMS[MACHINES[machine][0]]]
    others = tuple(record for record in records.values() if record != config)
    with using(*others):
        ((_, own, source),) = launched(forward, lhs, rhs, machine=machine)
    assert source == "model" and type(own) is type(config)


@pytest.mark.parametrize("layout", NAMES)
def test_derivatives_have_configurations_of_their_own(layout: str) -> None:
    """By what they are of, whatever the derivative is taken of; by any rule of differentiation."""
    lhs, rhs = shapes(layout, 4, rows=1000, k=256, n=384)
    three = [GpuConfig(m=32, k=32, n=32, warps=4, stages=stages) for stages in (2, 3, 4)]
    configs = Configs(out=three[0], lhs=three[1], rhs=three[2])
    with using(configs):
        found = launched(train, lhs, rhs, machine="H200")
    own = {frozenset("mn"): three[0], frozenset("mk"): three[1], frozenset("kn"): three[2]}
    assert [{*own}] == [{frozenset(letters) for letters, _, _ in found}]
    assert all(config == own[frozenset(letters)] and source == "using" for letters, config, source in found)


def test_a_derivative_taken_outside_keeps_what_was_said_inside() -> None:
    inside, outside = Configs(rhs=XlaConfig(m=(16,))), Configs(rhs=XlaConfig(m=(32,)))
    with using(inside):
        _, pull = jax.vjp(lambda w: forward(X, w), W)
    with using(outside):
        jaxpr = jax.make_jaxpr(lambda ct: pull(ct))(jnp.ones((96, 8)))
    (equation,) = (each for each in jaxpr.eqns if each.primitive.name == "ragged_matmul")
    assert equation.params["call"].options.configs.rhs == (XlaConfig(m=(16,)),)


def test_a_context_is_part_of_what_jit_remembers() -> None:
    fn = jax.jit(forward)
    count = [fn.lower(X, W).as_text().count("stablehlo.dot_general")]
    for heights in ((32,), (16, 32, 64)):
        with using(XlaConfig(m=heights)):
            count.append(fn.lower(X, W).as_text().count("stablehlo.dot_general"))
    assert len({*count}) == 3 and count[1:] == sorted(count[1:])


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: XlaConfig(m=(64, 32)), "`ragged.tuning.XlaConfig(...)`: `m` is (64, 32)."),
        (lambda: TpuConfig(m=0, k=1, n=1), "`m` is 0."),
        (lambda: GpuConfig(m=16, k=16, n=16, warps=3, stages=2), "`warps` is 3."),
        (lambda: TpuConfig(interpret="yes"), "`interpret` is 'yes'."),
        (lambda: GpuConfig(interpret=1), "`interpret` is 1."),
        (lambda: forward(X, W, backend=(TPU, TPU)), "does not exist."),
        (lambda: forward(X, W, backend=Configs(TPU, "fast")), "`backend` has 'fast'."),
        (lambda: forward(X, W, backend=Configs(TPU, GPU)), "`backend` is Configs("),
        (
            lambda: forward(X, W, backend=Configs(TPU, TpuConfig(interpret=True))),
            "`backend` is Configs(",
        ),
        (lambda: forward(X, W, backend=Configs()), "`backend` is Configs("),
        (lambda: using("fast"), "'fast' is not a configuration."),
        (lambda: using(TPU, TPU), "two configurations are for the same backend"),
        (lambda: using(TpuConfig(interpret=True)), "`interpret` is True."),
        (lambda: forward(X, W, backend=XlaConfig(k=(16,))), "`XlaConfig.m` is () for a ragged dim"),
        (lambda: forward(X, W, backend=XlaConfig(m=(128,))), "`XlaConfig.m` is (128,) for a buffer of 96."),
        (lambda: forward(X, W, backend=TpuConfig(m=20, k=16, n=8)), "tile_m=20 must be a multiple of 8"),
        (lambda: forward(X, W, backend=GpuConfig(m=48, k=16, n=16)), "tile_m=48 must be a power of two"),
        (lambda: using(Configs(), TPU), "a `Configs` is not the only argument."),
    ],
)
def test_bad_configurations(make: Callable[[], Any], error: str) -> None:
    """At the call, with the hint."""
    cases.check_error(make, (ValueError, TypeError), error)


def test_unknown_fields() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tile_m'"):
        XlaConfig(tile_m=64)  # pyright: ignore


def test_what_does_not_fit_the_device() -> None:
    """An error where the device is known, with how much there is."""
    lhs, rhs = shapes("forward", 4, rows=4096, k=4096, n=4096)
    for machine, config, what in (
        ("H200", GpuConfig(m=256, k=256, n=256, warps=8, stages=4), "bytes of shared memory"),
        ("H200", GpuConfig(m=256, k=16, n=256, warps=4, stages=2), "registers per thread"),
        ("v5e", TpuConfig(m=4096, k=4096, n=4096), "bytes of VMEM"),
    ):
        with pytest.raises(ValueError, match=what):
            launched(partial(forward, backend=config), lhs, rhs, machine=machine)


# Which configurations there are


MACHINE = st.sampled_from([name for name in MACHINES if name != "CPU"] + ["CPU"])
EXTENT = st.sampled_from([1, 7, 16, 100, 128, 1000, 2048, 7168])


@pytest.mark.long
@pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.long)])
def test_choices_and_candidates_are_legal(examples: int) -> None:
    """The model's choice for any call on any device would be taken by name; and so is each candidate."""

    @settings(max_examples=examples)
    @given(
        machine=MACHINE,
        layout=st.sampled_from(NAMES),
        dtype=st.sampled_from(["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]),
        g=st.sampled_from([1, 3, 64]),
        rows=st.sampled_from([1, 96, 1000, 65536]),
        k=EXTENT,
        n=EXTENT,
        recipe=st.sampled_from([None, "rowwise", "blockwise"]),
    )
    # The model's tiles are larger than this buffer.
    @example(machine="v5e", layout="batched", dtype="float32", g=1, rows=1, k=1, n=1, recipe="rowwise")
    def legal(machine: str, layout: str, dtype: str, g: int, rows: int, k: int, n: int, recipe: str | None) -> None:
        lhs, rhs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype if x.ndim > 1 else x.dtype), shapes(layout, g, rows, k, n)
        )
        recipe = recipe if dtype in ("float32", "bfloat16") else None
        for launch, product in products_on(machine, partial(forward, recipe=recipe), lhs, rhs):
            found = product.candidates(5)
            assert found[0] == launch.config
            for config in found:
                taken = product.launch(config)
                assert taken is not None, (launch.config, config)
                assert (taken.backend, taken.config, taken.source) == (launch.backend, config, "backend")

    legal()


def products_on(machine: str, fn: Any, *args: Any) -> Iterator[tuple[Launch, Any]]:
    """The products of a call, and what runs on a machine that isn't here."""
    platform, _ = MACHINES[machine]
    with context(machine), pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "platform", lambda: platform)
        if platform == "cuda":  # which no CPU compiles for without being told that it may
            patch.setattr("ragged.backends.gpu.call.missing", lambda: "")
        for equation, _ in products_of(fn, args, sizes=False):
            product = BoundProduct(equation)
            launch = product.launch()
            if launch is not None:
                yield launch, product


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["xla", "pallas_tpu", "triton_gpu"])
@pytest.mark.parametrize("layout", NAMES)
def test_candidates_compute_the_same(backend: str, layout: str) -> None:
    """Every one of a sample gives the product, by the kernels themselves; and it is the one that ran."""
    case = cases.make(layout, g=3, kind="half_empty", seed=3, dtype="float32", capacity=272, uniform=(144, 96, 80))
    with (
        gpu.on("NVIDIA H200")
        if backend == "triton_gpu"
        else context("v5e")
        if backend == "pallas_tpu"
        else context("CPU")
    ):
        found = candidates(case.lhs, case.rhs, backend=INTERPRETED[backend], most=40)
        assert len(found) > 1 or (backend == "xla" and layout == "batched")
        for config in (found[0], *found[1 :: len(found) // 3 or 1]):
            record = config if backend == "xla" else replace(config, interpret=True)
            fn = eqx.filter_jit(lambda lhs, rhs, record=record: ragged.matmul(lhs, rhs, backend=record))
            with ran.watch() as launches:
                out = fn(case.lhs, case.rhs)
                check(case, out)
            if backend != "xla":
                assert {name for name, _ in launches} == {backend}


def test_candidates_of_a_call() -> None:
    """The default comes first; abstract operands will do."""
    found = candidates(*shapes("forward", 4, rows=1000, k=64, n=32))
    assert found[0] == launched(forward, *shapes("forward", 4, rows=1000, k=64, n=32))[0][1]
    assert len(found) == len({*found}) > 3 and len(candidates(X, W, most=2)) == 2
    assert candidates(GroupedTensor(jnp.ones((0, 16)), jnp.zeros(4, jnp.int32)), W) == []


# The cache


def test_records_as_json() -> None:
    for config in (XlaConfig(m=(16, 32)), TPU, GPU):
        assert from_json(json.loads(json.dumps(to_json(config)))) == config
        assert CONFIG_TYPES[config.backend] is type(config)


def test_the_cache_survives_the_process(file: Path) -> None:
    """By the file that the environment names."""
    remember(XlaConfig(m=(48,)))
    code = """
import jax, jax.numpy as jnp, ragged
x = ragged.GroupedTensor(jnp.ones((96, 16)), jnp.array([30, 0, 50, 8], jnp.int32))
print(jax.jit(lambda x, w: ragged.matmul(x, w).data).lower(x, jnp.ones((4, 16, 8))).as_text().count("48x16xf32"))
print(len(ragged.tuning.cache_entries()), ragged.tuning.cache_path())
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    count, known = run.stdout.splitlines()
    assert int(count) > 0 and known == f"1 {file}", run.stderr


def test_what_a_key_tells_apart() -> None:
    """Letters, dtypes, scales, extents, options; not by a few rows more or less."""

    def key(*operands: Any, **options: Any) -> str:
        return remember(XlaConfig(m=(16,)), partial(forward, **options), *operands)[1]

    def of(rows: int = 96, k: int = 16, groups: int = 4, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        return GroupedTensor(jnp.ones((rows, k), dtype), jnp.ones(groups, jnp.int32)), jnp.ones((groups, k, 8), dtype)

    base = key(*of())
    assert key(*of(rows=100)) == base
    others = [
        key(*of(rows=300)),
        key(*of(k=24)),
        key(*of(groups=9)),
        key(*of(dtype=jnp.bfloat16)),
        key(*of(), preferred_element_type=jnp.bfloat16),
        key(*of(), precision="highest"),
        key(*of(), group_offset=jnp.int32(0)),
        key(*of(), existing_out=jnp.ones((96, 8))),
        key(ragged.quantize(of()[0], jnp.float8_e4m3fn, "row"), of()[1]),
        key(ragged.quantize(of()[0], jnp.float8_e4m3fn, "group"), of()[1]),
        key(ragged.quantize(of()[0], jnp.float8_e4m3fn, (1, 32)), of()[1]),
        key(ragged.quantize(of()[0], jnp.float8_e4m3fn, "mx"), of()[1]),
    ]
    assert len({base, *others}) == 1 + len(others)
    with jax.default_matmul_precision("highest"):
        assert key(*of()) == key(*of(), precision=jax.lax.Precision.HIGHEST) == others[5]


@pytest.mark.parametrize("what", ["gathered rows", "blocks of tokens"])
def test_what_is_measured_is_what_is_looked_up(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is of the operands as the backend takes them: rows dispatched, groups moved apart to whole blocks."""
    asked: list[str] = []
    lookup = cache.lookup

    def noted(call: Any, x: Any, device: Any, backend: str) -> Any:
        asked.append(cache.product_key(call, x, backend))
        return lookup(call, x, device, backend)

    monkeypatch.setattr(cache, "lookup", noted)
    if what == "gathered rows":
        rows = ragged.route(jnp.zeros((48, 2), jnp.int32), 4).gathered(jnp.ones((48, 16)))
        found, platform = products_of(forward, (rows, W), sizes=False), "cpu"
    else:
        x = GroupedTensor(jnp.ones((96, 64)), jnp.array([3, 0, 61], jnp.int32))
        loss = jax.grad(lambda w: jnp.sum(ragged.matmul(x, w, recipe="mxfp8").data))
        found, platform = products_of(loss, (jnp.ones((3, 64, 32)),), sizes=False), "tpu"
    for equation, _ in found:
        bound, call = BoundProduct(equation), equation.params["call"]
        asked.clear()
        launch = lowering.launch_of(platform, bound.operands, call, Target(device=DEFAULT_TPU))
        assert bound.key(launch) in asked


def test_what_is_illegal_now_is_not_taken() -> None:
    """Nor an error: it was measured on a buffer of a few rows more."""
    remember(XlaConfig(m=(100,)))
    ((_, _, source),) = launched(forward, X, W)
    assert source == "model"


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "it is not a tuning cache."),
        ('{"shopping": ["eggs"]}', "it is not a tuning cache."),
        ('{"format": 0, "found": {}}', "it has format 0, this version reads 1."),
        (
            '{"format": 1, "found": {"cpu": {"product": {"config": {"backend": "xla", "z": 1}}}}}',
            "configuration for 'product' is not valid",
        ),
    ],
)
def test_a_file_that_is_no_cache(file: Path, text: str, why: str) -> None:
    """It is reported once, ignored, and never written over; what is found stays in memory."""
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match=re.escape(why)) as warned:
        assert launched(forward, X, W)[0][2] == launched(forward, X, W)[0][2] == "model"
    assert len(warned) == 1
    with pytest.warns(UserWarning, match="is not written"):
        remember(XlaConfig(m=(48,)))
    assert file.read_text() == text
    assert launched(forward, X, W) == [("mn", XlaConfig(m=(48,)), "cache")]


def test_a_cache_that_can_not_be_written(file: Path) -> None:
    file.parent.write_text("in the way")
    with pytest.warns(UserWarning, match="is not written"):
        remember(XlaConfig(m=(48,)))
    assert launched(forward, X, W) == [("mn", XlaConfig(m=(48,)), "cache")]


WRITER = """
import sys
from ragged.backends import cache
from ragged.product.config import XlaConfig
from tests.everywhere import INTERPRETED
for i in range(20):
    found = cache.Found(XlaConfig(m=(16,)), 1.0, 1.0, "even", "2026-01-01")
    cache.put({"cpu": {f"{sys.argv[1]} {i}": found}})
"""


@pytest.mark.long
def test_writers_at_once_lose_nothing(file: Path) -> None:
    """Eight processes, twenty entries each."""
    started = [subprocess.Popen([sys.executable, "-c", WRITER, str(i)], cwd=ROOT) for i in range(8)]
    assert [each.wait() for each in started] == [0] * 8
    assert len(cache.cache_entries()["cpu"]) == 160
    assert sorted(each.name for each in file.parent.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_merging(file: Path, tmp_path: Path) -> None:
    """What one machine found is another's; of two, the later."""
    other = tmp_path / "other.json"
    cache.put({"cpu": {"a": entry(TPU, "2026-01-02"), "b": entry(TPU, "2026-01-02")}})
    ragged.tuning.save_cache(other)
    cache.clear_cache()
    file.unlink()
    cache.put({"cpu": {"a": entry(GPU, "2026-01-03"), "b": entry(GPU, "2026-01-01"), "c": entry(GPU)}})
    assert ragged.tuning.load_cache(other) == 2
    for _ in range(2):
        known = ragged.tuning.cache_entries()["cpu"]
        assert {key: each.config for key, each in known.items()} == {"a": GPU, "b": TPU, "c": GPU}
        cache.clear_cache()
    other.write_text("{}")
    cases.check_error(lambda: ragged.tuning.load_cache(other), ValueError, "it is not a tuning cache.")


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, "off")
    assert cache.cache_path() is None
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_path() == tmp_path / "ragged" / "tuning.json"
    remember(XlaConfig(m=(48,)))
    cache.clear_cache()
    assert launched(forward, X, W) == [("mn", XlaConfig(m=(48,)), "cache")]
    # Each process of several would read a file of its own.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert launched(forward, X, W)[0][2] == "model"


# Measuring


def fake(monkeypatch: pytest.MonkeyPatch, taken: Callable[[Config, int], float]) -> list[list[Config]]:
    """Times as `taken` says, by configuration and round; returns what was measured."""
    measured: list[list[Config]] = []

    def rounds(
        runs: dict[Config, Any], seconds: float, rng: Any, min_rounds: int, max_rounds: int
    ) -> dict[Config, list[float]]:
        measured.append([*runs])
        return {config: [taken(config, number) for number in range(8)] for config in runs}

    monkeypatch.setattr(search, "rounds", rounds)
    return measured


FAST = XlaConfig(m=(8, 16, 32, 64))


@pytest.mark.long
def test_the_fastest_is_found_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, and three others, meet again; who wins there is what is lowered from now on."""
    measured = fake(monkeypatch, lambda config, number: 1.0 if config == FAST else 2.0)
    tuning = autotune(X, W, derivatives=False, most=6, progress=False)
    (found,) = tuning.products
    assert found.best == FAST and found.speedup == 2.0 and found.sizes == "own"
    assert len(measured[0]) > 4 == len(measured[1]) and FAST in measured[1]
    assert launched(forward, X, W) == [("mn", FAST, "cache")]
    assert "2.00 x the default's speed" in str(tuning) and json.dumps(tuning.to_json())
    # Known products are not measured again, unless that is asked for.
    (known,) = autotune(X, W, derivatives=False, most=6, progress=False).products
    assert known.from_cache and known.best == FAST and len(measured) == 2
    assert not autotune(X, W, derivatives=False, progress=False, again=True).products[0].from_cache


@pytest.mark.parametrize(
    "taken",
    [
        lambda config, number: 0.99 if config == FAST else 1.0,  # too little
        lambda config, number: (0.5 if number % 2 else 1.1) if config == FAST else 1.0,  # not often enough
    ],
)
def test_noise_wins_nothing(monkeypatch: pytest.MonkeyPatch, taken: Callable[[Config, int], float]) -> None:
    """2 % in the median, and three rounds of four."""
    fake(monkeypatch, taken)
    (found,) = autotune(X, W, derivatives=False, most=6, progress=False).products
    assert found.best == found.default


def test_the_speedup_is_the_ratio_that_won(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are the median of the ratios of rounds; the ratio of the medians says here that the best one is slower."""
    default = [1, 1, 1, 1, 1, 4, 4, 4]
    fast = [0.9, 0.9, 0.9, 1.5, 1.5, 3.6, 3.6, 3.6]
    fake(monkeypatch, lambda config, number: (fast if config == FAST else default)[number])
    (found,) = autotune(X, W, derivatives=False, most=6, progress=False).products
    assert found.best == FAST and found.default_seconds == 1
    assert found.speedup == pytest.approx(1 / 0.9)


def test_a_wrong_result_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its time is; nor is what doesn't compile."""
    fake(monkeypatch, lambda config, number: 1.0 if config in (FAST, XlaConfig(m=(32,))) else 2.0)
    compiled = search._compiled

    def broken(product: Any, config: Config, arrays: Any) -> Any:
        run = compiled(product, config, arrays)
        if config == XlaConfig(m=(32,)):
            raise RuntimeError("no such thing\nin detail")
        return (lambda: run() * 1.01) if config == FAST else run

    monkeypatch.setattr(search, "_compiled", broken)
    monkeypatch.setattr("ragged.backends.xla.backend.candidates", lambda *_: [FAST, XlaConfig(m=(32,))])
    (found,) = autotune(X, W, derivatives=False, most=6, progress=False).products
    assert found.best == found.default
    assert found.failed == {
        str(FAST): "its result differs from the default's",
        str(XlaConfig(m=(32,))): "RuntimeError: no such thing",
    }


@pytest.mark.long
def test_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of a function, derivatives included, each once; on its own sizes, where they are known."""
    fake(monkeypatch, lambda config, number: 1.0)

    @jax.jit
    def loss(x: Any, w: Any, scale: float) -> Any:
        hidden = ragged.matmul(x, w)
        again = ragged.matmul(x, w)  # the same product
        return scale * jnp.sum(jax.nn.relu(hidden.data)) + jnp.sum(again.data)

    def gradient(x: Any, w: Any) -> Any:
        return jax.grad(lambda data, w: loss(x.with_data(data), w, 2.0), argnums=(0, 1))(x.data, w)

    tuning = autotune(gradient, X, W, most=2, progress=False)
    keys = [each.product for each in tuning.products]
    assert len(keys) == len({*keys}) == 3 and {each.sizes for each in tuning.products} == {"own"}
    sources = [source for _, _, source in launched(gradient, X, W)]
    assert {*sources} == {"cache"}

    def in_a_loop(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda total, w: (total + forward(x, w).sum(), None), 0.0, jnp.stack([w, w]))[0]

    def first_outside(x: Any, w: Any) -> Any:
        return forward(x, w).sum() + in_a_loop(x, w)

    for fn, sizes in ((in_a_loop, "random"), (first_outside, "own")):
        (found,) = autotune(fn, X, W, progress=False, again=True, most=2).products
        assert found.sizes == sizes
    (zipf,) = autotune(X, W, derivatives=False, sizes="zipf", again=True, most=2, progress=False).products
    assert zipf.sizes == "zipf"
    (given,) = autotune(X, W, derivatives=False, sizes=[1, 2, 3, 4], again=True, most=2, progress=False).products
    assert given.sizes == "given"


def test_products_over_several_devices_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cut up when they are lowered; a device's part, inside a map, is tuned."""
    fake(monkeypatch, lambda config, number: 1.0)
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Explicit,))
    rows = jax.sharding.NamedSharding(mesh, P("d"))
    x = GroupedTensor(jax.device_put(X.data, rows), X.first_dims)
    w = jax.device_put(W, jax.sharding.NamedSharding(mesh, P()))
    with pytest.warns(UserWarning, match="a product over several devices is skipped"), pytest.raises(ValueError):
        autotune(lambda x, w: forward(x, w, out_sharding=P("d")), x, w, progress=False)

    def part(data: Any, w: Any) -> Any:
        return forward(GroupedTensor(data, jnp.array([20, 0, 20, 8], jnp.int32)), w)

    mapped = jax.shard_map(part, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    (found,) = autotune(mapped, x.data, w, most=2, progress=False).products
    assert found.product == "xla mk:float32 kn:float32 mn:float32 k=16 m~64/16 n=8 held=4"


@pytest.mark.long
def test_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the three products, in the dtypes and with the scales that it has."""
    fake(monkeypatch, lambda config, number: 1.0)
    keys = [each.product for each in autotune(X, W, recipe="rowwise", most=2, progress=False).products]
    assert len(keys) == 3 and all(key.count("float8_e4m3fn/") == 2 for key in keys)
    eight_bits = X.with_data(X.data.astype(jnp.int8)), W.astype(jnp.int8)  # which have no derivatives
    assert len(autotune(*eight_bits, most=2, progress=False).products) == 1


def test_own_sizes_are_the_call_s() -> None:
    """Those that the product has, not those of the function's arguments."""

    def fn(x: Any, w: Any) -> Any:
        return jax.jit(lambda x: forward(GroupedTensor(x.data, x.first_dims[::-1] + 1), w))(x)

    ((_, sizes),) = products_of(fn, (X, W))
    assert sizes is not None and sizes["m"].tolist() == [9, 51, 1, 31]


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: jax.jit(lambda x: autotune(x, W))(X), "a function is being traced."),
        (lambda: jax.jit(lambda x: (autotune(X, W), x))(1.0), "a function is being traced."),
        (lambda: autotune(lambda x: x + 1, jnp.ones(3)), "the function has no product of `ragged`."),
        (lambda: autotune(X, W, sizes=[1, 2]), "`sizes` has 2 groups, but no product has 2 groups."),
        (lambda: autotune(X, W, sizes=1.5), "`sizes` is 1.5."),
        (lambda: autotune(X, W, sizes="bell"), "no distribution is called 'bell'."),
        (lambda: autotune(X, W, backend=INTERPRETED["pallas_tpu"]), "an interpreted kernel can't be tuned."),
        (lambda: autotune(X, W, W), "it takes 2 operands, not 3."),
        (lambda: autotune(forward, X, W, backend="xla"), "options ['backend'] can't be combined with a function."),
        (lambda: ragged.tuning.sample_sizes("even", 0, 3), "`groups` is 0, `total` 3 and `seed` 0."),
    ],
)
def test_bad_input(call: Callable[[], Any], error: str, file: Path) -> None:
    """An error with the hint; nothing is measured or written."""
    cases.check_error(call, (ValueError, TypeError, RuntimeError), error)
    assert not file.exists() and not cache.cache_entries()


def test_distributions() -> None:
    for kind in ("even", "random", "zipf", "one"):
        for groups, total in ((1, 0), (7, 100), (512, 3)):
            sizes = ragged.tuning.sample_sizes(kind, groups, total)
            assert sizes.dtype == np.int32 and sizes.shape == (groups,)
            assert sizes.sum() == total and (sizes >= 0).all()
    assert ragged.tuning.sample_sizes("zipf", 3, 110).tolist() == [60, 30, 20]
    assert ragged.tuning.sample_sizes("one", 3, 110).tolist() == [110, 0, 0]


@pytest.mark.long
@pytest.mark.parametrize("layout", NAMES)
def test_tuning_for_real(layout: str, file: Path) -> None:
    """Measured on this machine, for all layouts with their derivatives; the results stay the oracle's."""
    case = cases.make(layout, g=3, kind="zipf", seed=1, dtype="float32")
    tuning = autotune(case.lhs, case.rhs, seconds=0.2, most=4)
    assert all(not each.failed for each in tuning.products)
    assert len(LETTERS[layout]) == 0 or (tuning.products and file.exists())
    jax.clear_caches()
    check(case, ragged.matmul(case.lhs, case.rhs))
