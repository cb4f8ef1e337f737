"""Configurations: which there are, which one runs, and how the fastest is found, by a clock that the tests set."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from ragged.tuning import Config, Configs, Found, GpuConfig, TpuConfig, XlaConfig, autotune, candidates, search, using
from ragged.tuning.products import products_of
from tests import gpu
from tests.cases import LETTERS, check_error
from tests.contract.draws import draws
from tests.contract.machines import MACHINES, on, options_of, shapes
from tests.contract.programs import Program

SIZES = jnp.array([30, 0, 50, 8], jnp.int32)
X, W = GroupedTensor(jnp.ones((96, 16)), SIZES), jnp.ones((4, 16, 8))
TPU, GPU = TpuConfig(m=32, k=128, n=128), GpuConfig(m=32, k=32, n=64, warps=4, stages=2, splits=1)
FAST = XlaConfig(m=(8, 16, 32, 64))
quick = partial(autotune, seconds=1e-3, most=6, progress=False, again=True)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    ragged.tuning.clear_cache()
    yield
    ragged.tuning.clear_cache()


def forward(x: Any, w: Any, **options: Any) -> Any:
    return ragged.matmul(x, w, **options).data


def chosen(lhs: Any = X, rhs: Any = W, machine: str = "CPU", **options: Any) -> dict[str, tuple[Any, str]]:
    """The configuration of each product, and where it is from."""
    with on(machine):
        plans = ragged.explain(lhs, rhs, platform=MACHINES[machine].platform, **options).plans
    return {plan.product: (plan.config, plan.source) for plan in plans}


# Which one runs. `test_cache` has those that were measured.


@pytest.mark.parametrize("machine", MACHINES)
def test_each_backend_has_its_record(machine: str) -> None:
    """Where another backend runs, it has its own choice. A derivative doesn't have that of the product."""
    lhs, rhs = shapes("forward", 4, rows=1000, k=256, n=384)
    records = {"xla": XlaConfig(m=(64, 128)), "pallas_tpu": TPU, "triton_gpu": GPU}
    own = records[MACHINES[machine].backend]
    with using(*records.values()):
        found = chosen(lhs, rhs, machine)
    assert found["forward"] == (own, "using") and found["by lhs"][1] == found["by rhs"][1] == "model"
    with using(*(record for record in records.values() if record != own)):
        config, source = chosen(lhs, rhs, machine)["forward"]
    assert source == "model" and type(config) is type(own)


@pytest.mark.parametrize("layout", LETTERS)
def test_derivatives_have_configurations_of_their_own(layout: str) -> None:
    """By what they are of, whatever the derivative is taken of."""
    lhs, rhs = shapes(layout, 4, rows=1000, k=256, n=384)
    three = [GpuConfig(m=32, k=32, n=32, warps=4, stages=stages, splits=1) for stages in (2, 3, 4)]
    with using(Configs(out=three[0], lhs=three[1], rhs=three[2])):
        found = chosen(lhs, rhs, "H200", **options_of(layout, 1000))
    assert found == {
        name: (config, "using") for name, config in zip(("forward", "by lhs", "by rhs"), three, strict=True)
    }


def test_a_derivative_taken_outside_keeps_what_was_said_inside() -> None:
    inside, outside = Configs(rhs=XlaConfig(m=(16,))), Configs(rhs=XlaConfig(m=(32,)))
    with using(inside):
        _, pull = jax.vjp(lambda w: forward(X, w), W)
    with using(outside):
        jaxpr = jax.make_jaxpr(lambda ct: pull(ct))(jnp.ones((96, 8)))
    (equation,) = (each for each in jaxpr.eqns if each.primitive.name == "ragged_matmul")
    assert equation.params["call"].options.configs.rhs == (XlaConfig(m=(16,)),)


@pytest.mark.long
def test_what_is_lowered() -> None:
    """A context is part of what `jit` remembers. Array functions take a record as `matmul` does, or `tiling`; of a
    wgrad, by the letters of what is multiplied: `k` is ragged."""
    fn = jax.jit(forward)
    count = [fn.lower(X, W).as_text().count("stablehlo.dot_general")]
    for heights in ((16, 32), (16, 32, 64)):
        with using(XlaConfig(m=heights)):
            count.append(fn.lower(X, W).as_text().count("stablehlo.dot_general"))
    assert len({*count}) == 3 and count[1:] == sorted(count[1:])
    x, dy, m, k = X.data, jnp.ones((96, 8)), XlaConfig(m=(48,)), XlaConfig(k=(48,))
    for fn, config in (
        (partial(ragged.grouped_matmul, x, W), m),
        (partial(ragged.grouped_matmul, x, W.mT, transpose_rhs=True), m),
        (partial(ragged.transposed_grouped_matmul, x.T, dy), k),
    ):
        text = jax.jit(lambda sizes, fn=fn, config=config: fn(sizes, backend=config)).lower(SIZES).as_text()
        assert "48x" in text and "48x" not in jax.jit(lambda sizes, fn=fn: fn(sizes)).lower(SIZES).as_text()
        check_error(partial(fn, SIZES, backend=XlaConfig(n=(48,))), ValueError, "is () for a ragged dim")
    tiled, default = (jax.jit(partial(ragged.grouped_matmul, tiling=t)).lower(x, W, SIZES) for t in ((16, 8, 8), None))
    assert "<16x16xf32>" in tiled.as_text() and "<16x16xf32>" not in default.as_text()
    step = jax.grad(lambda w: ragged.grouped_matmul(x, w, SIZES, backend=Configs(rhs=m)).sum())
    assert "48x" in jax.jit(step).lower(W).as_text()


def test_bad_configurations() -> None:
    """At the call, with the hint; `docs/errors.md` has more."""
    makes: list[tuple[Callable[[], Any], str]] = [
        (lambda: XlaConfig(m=(64, 32)), "`ragged.tuning.XlaConfig(...)`: `m` is (64, 32)."),
        (lambda: GpuConfig(m=16, k=16, n=16, warps=3, stages=2), "`warps` is 3."),
        (lambda: GpuConfig(m=16, k=16, n=16, warps=4.0, stages=2), "`warps` is 4.0."),
        (lambda: GpuConfig(m=16, k=16, n=16, warps=True, stages=2), "`warps` is True."),
        (lambda: GpuConfig(interpret=1), "`interpret` is 1."),
        (lambda: forward(X, W, backend=(TPU, TPU)), "does not exist."),
        (lambda: forward(X, W, backend=Config()), "`backend` has Config()."),
        (lambda: forward(X, W, backend=Configs(TPU, TpuConfig(interpret=True))), "`backend` is Configs("),
        (lambda: forward(X, W, backend=Configs()), "`backend` is Configs("),
        (lambda: forward(X, W, backend=XlaConfig(m=(128,))), "`XlaConfig.m` is (128,) for a buffer of 96."),
        (lambda: forward(X, W, backend=TpuConfig(m=20, k=16, n=8)), "tile_m=20 must be a multiple of 8"),
        (lambda: forward(X, W, backend=GpuConfig(m=48, k=16, n=16)), "tile_m=48 must be a power of two"),
        (lambda: GpuConfig(splits=0), "`splits` is 0."),
        (lambda: forward(X, W, backend=GpuConfig(splits=70000)), "splits=70000 takes more than 65535 rows of programs"),
        (lambda: ragged.tuning.sample_sizes("even", 4, 2**31), "a total that int32 holds."),
        (lambda: ragged.tuning.sample_sizes("random", 4, 3, "a"), "`seed` 'a'."),
        (lambda: ragged.tuning.sample_sizes(["even"], 4, 3), "no distribution is called ['even']."),
    ]
    for make, text in makes:
        check_error(make, (ValueError, TypeError), text)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tile_m'"):
        XlaConfig(tile_m=64)
    # Where the device is known, with how much there is.
    lhs, rhs = shapes("forward", 4, rows=4096, k=4096, n=4096)
    for machine, config, text in (
        ("H200", GpuConfig(m=256, k=256, n=256, warps=8, stages=4), "bytes of shared memory"),
        ("H200", GpuConfig(m=256, k=16, n=256, warps=4, stages=2), "registers per thread"),
        ("v5e", TpuConfig(m=4096, k=4096, n=4096), "bytes of VMEM"),
    ):
        with on(machine):
            plan = ragged.explain(lhs, rhs, platform=MACHINES[machine].platform, backend=config).plan()
        assert text in plan.error
    in_parts, of_rhs = GpuConfig(splits=2), "splits=2 is illegal for a product whose contracted dim is ragged.\n"
    assert of_rhs in ragged.explain(lhs, rhs, platform="cuda", backend=Configs(rhs=in_parts)).plan("by rhs").error
    activated = ragged.explain(lhs, rhs, platform="cuda", backend=in_parts, activation="gelu").plan()
    assert "splits=2 is illegal for a product with an epilogue.\n" in activated.error


# Which there are


def check_candidates(machine: str, layout: str, dtype: str, g: int, rows: int, k: int, n: int, most: int) -> None:
    """The choice of the model comes first, and each would be taken by name."""
    lhs, rhs, options = *shapes(layout, g, rows, k, n, dtype=dtype), options_of(layout, rows)
    model, _ = chosen(lhs, rhs, machine, **options)["forward"]
    if not isinstance(model, TpuConfig | GpuConfig | XlaConfig) or model.backend != MACHINES[machine].backend:
        return  # XLA's, for a kernel that there is not
    is_xla = isinstance(model, XlaConfig)
    with on(machine):
        # A CPU may choose another machine's kernels where they are interpreted.
        found = candidates(lhs, rhs, backend="xla" if is_xla else type(model)(interpret=True), most=most, **options)
    found = [config if is_xla else replace(config, interpret=False) for config in found]
    assert found[0] == model
    for config in found:
        assert chosen(lhs, rhs, machine, backend=config, **options)["forward"][0] == config


def candidate_cases(seed: int, count: int) -> Iterator[tuple[Any, ...]]:
    rng = np.random.default_rng(seed)
    extents = [1, 7, 16, 100, 128, 1000, 2048, 7168]
    for i in range(count):
        machine, layout = [*MACHINES][i % len(MACHINES)], [*LETTERS][i % len(LETTERS)]
        dtype = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"][int(rng.integers(5))]
        g, rows = int(rng.choice([1, 3, 64])), int(rng.choice([1, 96, 1000, 65536]))
        yield machine, layout, dtype, g, rows, int(rng.choice(extents)), int(rng.choice(extents))


def test_candidates_are_legal() -> None:
    for case in candidate_cases(0, 10):
        check_candidates(*case, most=3)


@pytest.mark.long
def test_more_candidates_are_legal() -> None:
    for case in candidate_cases(1, 60):
        check_candidates(*case, most=5)


def test_candidates_of_a_call() -> None:
    """The default comes first, and none comes twice; abstract operands will do."""
    lhs, rhs = shapes("forward", 4, rows=1000, k=64, n=32)
    found = candidates(lhs, rhs)
    assert (found[0], "model") == chosen(lhs, rhs)["forward"]
    assert len(found) == len({*found}) > 3 and len(candidates(X, W, most=2)) == 2
    assert candidates(GroupedTensor(jnp.ones((0, 16)), jnp.zeros(4, jnp.int32)), W) == []
    check_error(lambda: candidates(X, W, most="all"), ValueError, "`most` is 'all'.")


@pytest.mark.long
@pytest.mark.parametrize(
    "backend, machine, layout",
    [("pallas_tpu", "v5e", "forward"), ("pallas_tpu", "v5e", "outer"), ("triton_gpu", "H200", "wgrad")],
)
def test_candidates_compute_the_same(backend: str, machine: str, layout: str) -> None:
    """The first and the last, by the kernels themselves; derivatives with the same tiles."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    own: Any = {"pallas_tpu": TpuConfig, "triton_gpu": GpuConfig}[backend](interpret=True)
    extents: dict[str, Any] = {"groups": 3, "capacity": 272, "m": 144, "k": 96, "n": 80, "width": 128}
    with on(machine):
        found: Any = candidates(*shapes(layout, 3, 272, 96, 80, 144, 128), backend=own, **options_of(layout, 272, 128))
        assert len(found) > 1
        for config in (found[0], found[-1]):
            program = Program(layout, backend=backend, tiles=(config.m, config.k, config.n), **extents)
            program.check(draws(program, 2))


def test_distributions() -> None:
    for kind in ("even", "random", "zipf", "one"):
        for groups, total in ((1, 0), (7, 100), (512, 3)):
            sizes = ragged.tuning.sample_sizes(kind, groups, total)
            assert sizes.dtype == np.int32 and sizes.shape == (groups,)
            assert sizes.sum() == total and (sizes >= 0).all()
    assert ragged.tuning.sample_sizes("zipf", 3, 110).tolist() == [60, 30, 20]
    assert ragged.tuning.sample_sizes("one", 3, 110).tolist() == [110, 0, 0]


# Measuring


def fake(
    monkeypatch: pytest.MonkeyPatch,
    cost: Callable[[Config, int], float],
    result: Callable[[Config], float] = lambda _: 1.0,
) -> Counter[Config]:
    """Each run takes as long as `cost` says, by configuration and number of the run, on a clock of its own.
    Nothing is compiled. Counts the runs.

    The first run is for the result. Then there are two series, of a run to warm up and, as `quick` has it, 5 rounds.
    """
    now, runs = [0.0], Counter[Config]()

    def compiled(product: Any, config: Config, arrays: Any) -> Callable[[], Any]:
        def run() -> Any:
            now[0] += cost(config, runs[config])
            runs[config] += 1
            return np.full(3, result(config), np.float32)

        return run

    monkeypatch.setattr(search, "_compiled", compiled)
    monkeypatch.setattr(import_module("ragged.tuning.rounds"), "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return runs


def test_the_fastest_is_found_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, and the three best, meet again; who wins there is what is lowered from now on."""
    runs = fake(monkeypatch, lambda config, number: 1.0 if config == FAST else 2.0)
    once = partial(autotune, X, W, derivatives=False, most=6, seconds=1e-3, progress=False)
    tuning = once()
    (found,) = tuning.products
    assert (found.best, found.speedup, found.sizes) == (FAST, 2.0, "own")
    default = found.default
    assert len(runs) > 4 and sorted(runs.values()) == [7] * (len(runs) - 4) + [13] * 4
    assert runs[FAST] == runs[default] == 13
    assert chosen()["forward"] == (FAST, "cache")
    assert "2.00 x the default's speed" in str(tuning) and json.dumps(tuning.to_json())
    # Known products are not measured again, unless that is asked for.
    (again,) = once().products
    assert again.from_cache and again.best == FAST and runs[FAST] == 13
    assert not once(again=True).products[0].from_cache and runs[FAST] > 13
    # What a file has of another backend, or of other extents, is measured anew.
    ((device, _),) = ragged.tuning.cache_entries().items()
    assert found.product.startswith("xla ")
    for wrong in (TPU, XlaConfig(m=(100,))):
        monkeypatch.setattr(search.cache, "cache_entries", lambda wrong=wrong: {
            device: {found.product: Found(wrong, 1.0, 1.0, "even", "9999")}
        })  # fmt: skip
        assert not once().products[0].from_cache


def test_noise_wins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 % in the median, and three rounds of four. The speedup is the median of the ratios of rounds, also where the
    ratio of the medians says that the best one is slower."""
    in_round = [1.0, 1.0, 1.0, 1.0, 4.0, 4.0]
    faster = [0.9, 0.9, 0.9, 1.5, 3.6, 3.6]

    def of_round(times: list[float], number: int) -> float:
        return times[(number - 1) % 6]  # the first of each series warms up

    for cost, wins in (
        (lambda config, number: 0.99 if config == FAST else 1.0, False),
        (lambda config, number: (0.5, 1.1)[number % 2] if config == FAST else 1.0, False),
        (lambda config, number: of_round(faster if config == FAST else in_round, number), True),
    ):
        with monkeypatch.context() as patch:
            fake(patch, cost)
            (found,) = quick(X, W, derivatives=False).products
        assert found.best == (FAST if wins else found.default)
    assert found.default_seconds == 1 and found.speedup == pytest.approx(1 / 0.9)


def test_what_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its time is: a wrong result, and what doesn't compile, with or without a word."""
    told, silent = XlaConfig(m=(32,)), XlaConfig(m=(64,))
    fake(
        monkeypatch, lambda config, number: 1.0 if config == FAST else 2.0, lambda config: 1.01 if config == FAST else 1
    )
    compiled = search._compiled

    def broken(product: Any, config: Config, arrays: Any) -> Any:
        if config == told:
            raise RuntimeError("no such thing\nin detail")
        if config == silent:
            raise NotImplementedError
        return compiled(product, config, arrays)

    monkeypatch.setattr(search, "_compiled", broken)
    monkeypatch.setattr("ragged.backends.xla.backend.candidates", lambda *_: [FAST, told, silent])
    (found,) = quick(X, W, derivatives=False).products
    assert found.best == found.default
    assert found.failed == {
        str(FAST): "its result differs from the default's",
        str(told): "RuntimeError: no such thing",
        str(silent): "NotImplementedError: ",
    }


@pytest.mark.long
def test_which_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a function, derivatives included, each once; on its own sizes, where they are known."""
    fake(monkeypatch, lambda config, number: 1.0)

    @jax.jit
    def loss(x: Any, w: Any, scale: float) -> Any:
        again = ragged.matmul(x, w)  # the same product
        return scale * jnp.sum(jax.nn.relu(ragged.matmul(x, w).data)) + jnp.sum(again.data)

    def gradient(x: Any, w: Any) -> Any:
        return jax.grad(lambda data, w: loss(x.with_data(data), w, 2.0), argnums=(0, 1))(x.data, w)

    keys = [each.product for each in quick(gradient, X, W).products]
    assert len(keys) == len({*keys}) == 3
    assert {source for _, source in chosen().values()} == {"cache"}

    def in_a_loop(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda total, w: (total + forward(x, w).sum(), None), 0.0, jnp.stack([w, w]))[0]

    def of_a_callback(x: Any, w: Any) -> Any:
        dims = io_callback(lambda: np.array([1, 2, 3, 4], np.int32), jax.ShapeDtypeStruct((4,), jnp.int32))
        return forward(x, w), forward(GroupedTensor(x.data[:64], dims), w)

    def sizes(*args: Any, **options: Any) -> list[str]:
        return [each.sizes for each in quick(*args, **options).products]

    assert sizes(in_a_loop, X, W) == ["random"]
    assert sizes(lambda x, w: forward(x, w).sum() + in_a_loop(x, w), X, W) == ["own"]
    assert sizes(of_a_callback, X, W) == ["own", "random"]
    assert sizes(X, W, derivatives=False, sizes="zipf") == ["zipf"]
    assert sizes(X, W, derivatives=False, sizes=[1, 2, 3, 4]) == ["given"]
    # Those that the product has, not those of the function's arguments.
    other = jax.jit(lambda x: forward(GroupedTensor(x.data, x.first_dims[::-1] + 1), W))
    ((_, known),) = products_of(other, (X,))
    assert known is not None and known["m"].tolist() == [9, 51, 1, 31]

    # Each of the three products of a recipe, in the dtypes and with the scales that it has.
    keys = [each.product for each in quick(X, W, recipe="rowwise").products]
    assert len(keys) == 3 and all(key.count("float8_e4m3fn/") == 2 for key in keys)
    # Integers, results of 8 bits and quantised operands have no derivatives.
    assert len(quick(X.with_data(X.data.astype(jnp.int8)), W.astype(jnp.int8)).products) == 1
    assert len(quick(X, W, preferred_element_type=jnp.float8_e4m3fn).products) == 1
    x = ragged.quantize(X, jnp.float8_e4m3fn, "row")
    assert [each.product.split()[1][:2] for each in quick(x, W).products] == ["mk", "mk"]  # forward, wgrad


def test_a_call_is_not_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is donated stays, and nothing is called back: only what sizes depend on is computed."""
    fake(monkeypatch, lambda config, number: 1.0)
    called: list[int] = []

    @partial(jax.jit, donate_argnums=0)
    def step(data: Any, w: Any, dims: Any) -> Any:
        io_callback(lambda: called.append(1), None, ordered=True)
        dims = jax.lax.while_loop(lambda x: x[0] < 20, lambda x: x + 1, dims)
        return forward(GroupedTensor(data, dims), w).sum(), data * 2

    data = jnp.ones((96, 16))
    (tuned,) = quick(step, data, W, jnp.array([10, 0, 30, 8], jnp.int32)).products
    assert tuned.sizes == "own"
    jax.effects_barrier()
    assert not called and not data.is_deleted()


def test_products_over_several_devices_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cut up when they are lowered; a device's part, inside a map, is tuned."""
    fake(monkeypatch, lambda config, number: 1.0)
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Explicit,))
    x = X.with_data(jax.device_put(X.data, jax.sharding.NamedSharding(mesh, P("d"))))
    w = jax.device_put(W, jax.sharding.NamedSharding(mesh, P()))
    with pytest.warns(UserWarning, match="a product over several devices is skipped"), pytest.raises(ValueError):
        autotune(lambda x, w: forward(x, w, out_sharding=P("d")), x, w, progress=False)

    def part(data: Any, w: Any) -> Any:
        return forward(GroupedTensor(data, jnp.array([20, 0, 20, 8], jnp.int32)), w)

    mapped = jax.shard_map(part, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    (found,) = quick(mapped, x.data, w).products
    assert found.product == "xla mk:float32 kn:float32 mn:float32 k=16 m~64/16 n=8 held=4"


def test_bad_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error with the hint; nothing is measured or remembered. `docs/errors.md` has more."""
    runs = fake(monkeypatch, lambda config, number: 1.0)
    interpreted = TpuConfig(interpret=True)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: jax.jit(lambda x: (autotune(X, W), x))(1.0), "a function is being traced."),
        (lambda: jax.vmap(lambda x: (autotune(X, W), x)[1])(jnp.ones(2)), "a function is being traced."),
        (lambda: jax.grad(lambda x: (autotune(X, W), x)[1])(1.0), "a function is being traced."),
        (lambda: autotune(X, W, sizes=1.5), "`sizes` is 1.5."),
        (lambda: autotune(X, W, sizes="bell"), "no distribution is called 'bell'."),
        (lambda: autotune(X, W, seconds="3"), "`seconds` is '3'."),
        (lambda: autotune(X, W, seconds=float("nan")), "`seconds` is nan."),
        (lambda: autotune(X, W, most=0), "`most` is 0."),
        (lambda: autotune(X, W, seed=-1), "`seed` is -1."),
        (lambda: autotune(X, W, sizes=[-5, 3, 2, 1]), "`sizes` is [-5, 3, 2, 1], but the capacity of a buffer is 96."),
        (
            lambda: autotune(lambda x, w: forward(x, w, backend=interpreted), X, W),
            "an interpreted kernel can't be tuned.",
        ),
    ]
    for call, text in calls:
        check_error(call, (ValueError, TypeError, RuntimeError), text)
    # In a program of several processes, each would find its own configuration.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    check_error(partial(quick, X, W), RuntimeError, "all processes of a program must lower the same kernels")
    assert not runs and not ragged.tuning.cache_entries()


@pytest.mark.long
@pytest.mark.parametrize("layout", ["forward", "ragged"])
def test_tuning_for_real(layout: str) -> None:
    """Measured on this machine, with the derivatives: whatever wins, the results stay those of the loop."""
    program = Program(layout)
    draw = next(draws(program, 1, is_poisoned=False))
    lhs, rhs = program.operands(draw.data, draw.sizes).values()
    tuning = autotune(lhs, rhs, seconds=0.05, most=3, progress=False, **options_of(layout, 60, program.width))
    assert tuning.products and not any(each.failed for each in tuning.products)
    program.check(draws(program, 5))
