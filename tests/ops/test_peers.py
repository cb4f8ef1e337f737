"""What peers' own tests ask of their grouped products, asked of ours.

Each table and each test names the project and the file whose cases it tells again: their shapes, dtypes, ways to
spread the groups, and tolerances. Values are standard normal, where a peer's small ones would leave nothing to see
beside its absolute tolerance. The reference is NumPy in float64, group by group. Where a shape was meant for a chip, it
is said by how much it is smaller here. What we refuse stands at the end, each with its reason.

Peers that give float32 by default are asked with `preferred_element_type`. Running ends of the groups (`offs`) are
sizes by `np.diff(offs, prepend=0)`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ragged
from ragged import GroupedTensor, Scaling, per_group
from ragged.backends.gpu import call as triton_call
from ragged.primitive import lowering
from tests import gpu, oracle
from tests.cases import check_error
from tests.everywhere import INTERPRETED
from tests.everywhere import everywhere as same_tiles

pytestmark = pytest.mark.sampled(default=False)  # by default, others stand for these

long = pytest.mark.long
F32, BF16, F16, F64 = "float32", "bfloat16", "float16", "float64"
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One product of a peer's: `[m, k] × [g, k, n]`, or of `[m, k].T × [m, n]` for a wgrad."""

    peer: str
    m: int
    k: int
    n: int
    sizes: Sizes
    lhs: str = F32
    rhs: str = F32
    out: str | None = F32  # None: not asked for
    atol: float = 0.0
    rtol: float = 0.0
    gradient: tuple[float, float] | None = None  # atol and rtol, if not the value's
    transpose_rhs: bool = False
    unsigned: bool = False
    std: float = 1.0
    tiling: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        flags = "T" * self.transpose_rhs + "u" * self.unsigned
        return f"{self.peer}-{self.m}x{self.k}x{self.n}-g{len(self.sizes)}-{self.lhs}-{self.rhs}-{self.out}{flags}"


def ends(seed: int, m: int, g: int) -> Sizes:
    """Groups that end anywhere, the last one at `m`."""
    inner = np.sort(np.random.default_rng(seed).integers(0, m + 1, g - 1))
    return tuple(np.diff(inner, prepend=0, append=m).tolist())


def even(m: int, g: int) -> Sizes:
    return (m // g,) * g


def up_to_mean(seed: int, m: int, g: int) -> Sizes:
    """Sizes below the mean one: what they leave is the tail."""
    return tuple(np.random.default_rng(seed).integers(0, m // g, g).tolist())


def shares(seed: int, m: int, g: int) -> Sizes:
    """Random shares of `m`, rounded down; the last group takes the rest."""
    weights = np.random.default_rng(seed).random(g - 1)
    sizes = np.floor(weights / weights.sum() * m).astype(int)
    return (*sizes.tolist(), m - int(sizes.sum()))


def random(rng: np.random.Generator, shape: Sequence[int], dtype: str, std: float = 1.0) -> np.ndarray:
    return (std * rng.standard_normal(tuple(shape))).astype(jnp.dtype(dtype))


def split(x: Any, sizes: Sequence[int]) -> oracle.Groups:
    """The groups' rows, float64."""
    return np.split(np.asarray(x).astype(np.float64), np.cumsum(sizes))[: len(sizes)]


def assert_close(got: Any, want: Any, atol: float, rtol: float) -> None:
    want = np.asarray(want)
    assert got.shape == want.shape and want.any(), "there must be something to compare"
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, atol=atol, rtol=rtol)


def assert_rows(got: Any, want: oracle.Groups, atol: float, rtol: float) -> None:
    """That the rows are those of the groups, and zero behind them."""
    rows = np.concatenate(want)
    assert_close(got[: len(rows)], rows, atol, rtol)
    assert not np.asarray(got[len(rows) :]).astype(np.float64).any(), "the tail must be zero"


KERNELS = ("pallas_tpu", "triton_gpu")


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that products were lowered for, and each Pallas and Triton kernel."""
    names: list[str] = []

    def noting(name: str | None, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            names.append(name or out.backend)
            return out

        return noted

    monkeypatch.setattr(lowering, "plan", noting(None, lowering.plan))
    monkeypatch.setattr(pl, "pallas_call", noting("pallas_tpu kernel", pl.pallas_call))
    monkeypatch.setattr(triton_call, "call", noting("triton_gpu kernel", triton_call.call))
    return names


def assert_ran(ran: list[str], backend: str | None, products: int) -> None:
    """That all that was lowered is at least `products` products of the backend, each one its kernel; None is the CPU's
    XLA. JAX lowers equal products of a program once."""
    name = backend or "xla"
    count = ran.count(name)
    assert count >= products, f"{ran} for {products} products"
    assert sorted(x for x in ran if x != name) == [f"{backend} kernel"] * (count if backend else 0)


def on(backend: str | None) -> AbstractContextManager[Any]:
    """Where nothing says which GPU it is for, a product of fp8 is XLA's."""
    if backend == "triton_gpu":
        gpu.needs_triton()
    chip = AbstractDevice("NVIDIA H200", None, "gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=chip)) if backend == "triton_gpu" else nullcontext()


def options(backend: str | None) -> dict[str, Any]:
    return {} if backend is None else {"backend": INTERPRETED[backend]}


def tiled(backend: str | None, tiles: tuple[int, int, int] | None) -> Any:
    return same_tiles(backend or "xla", *tiles) if tiles else backend and INTERPRETED[backend]


def everywhere(cases: Sequence[Any], short: Sequence[str] = (), few: int = 1, most: int = 2**21) -> list[Any]:
    """Every case on XLA, and each `few`-th that is small on the interpreted kernels, of which none takes float64, and
    TPUs' not float16. All are long but the first of the peers and of the kernels named in `short`."""
    small = [case for case in cases if case.m * case.k * case.n <= most and not {case.lhs, case.rhs} & {F16, F64}]
    todo, params = set(short), []
    for backend, case in [*((None, case) for case in cases), *product(KERNELS, small[::few])]:
        which = backend or case.peer
        params.append(pytest.param(case, backend, id=f"{backend or 'xla'}-{case}", marks=[long] * (which not in todo)))
        todo.discard(which)
    assert not todo, f"no case of {todo}"
    return params


# ---------------------------------------------------------------------------------------------------------------------
# `[m, k] × [g, k, n]` and both its gradients
# ---------------------------------------------------------------------------------------------------------------------


def megablox() -> Iterator[Case]:
    """JAX, tests/pallas/tpu_gmm_test.py: `test_gmm`. Every mix of float32 and bfloat16, either orientation, 1 to 32
    groups that end anywhere."""
    shapes = [(128, 128, 128), (512, 2048, 256), (128, 8, 16)]
    groups = cycle((1, 32, 3, 8, 17))
    for seed, ((m, k, n), dtypes) in enumerate(product(shapes, product((F32, BF16), repeat=3))):
        rtol = 1e-2 if BF16 in dtypes else 1e-5
        sizes = ends(seed, m, next(groups))
        yield Case("megablox", m, k, n, sizes, *dtypes, atol=1e-3, rtol=rtol, transpose_rhs=bool(seed % 2))


def ragged_dot() -> Iterator[Case]:
    """JAX, tests/lax_test.py: `test_ragged_dot`, every float (the peer leaves float16 out), and
    `test_ragged_dot_small_m`, groups of one row in a buffer of more. tests/export_test.py and
    tests/pallas/lax_lowerings/gpu/ragged_dot_test.py have the same shapes."""
    tolerance = {F64: 1e-14, F32: 1e-5, BF16: 1e-2, F16: 1e-3}
    for (m, k, n, g), dtype in product([(64, 4, 3, 1), (64, 9, 8, 2), (16, 4, 3, 2)], tolerance):
        tol = tolerance[dtype]
        yield Case("lax.ragged_dot", m, k, n, ends(m, m, g), dtype, dtype, None, atol=tol, rtol=tol)
    for m, k, n, g in [(5, 4, 3, 1), (5, 4, 3, 2), (9, 4, 3, 1), (10, 9, 8, 2)]:
        yield Case("lax.ragged_dot", m, k, n, (1,) * g, out=None, atol=1e-5, rtol=1e-5)


def mosaic_gpu() -> Iterator[Case]:
    """JAX, tests/pallas/mgpu_ragged_dot_test.py: `test_ragged_dot` on Hopper and Blackwell, float16. 32 times smaller
    in `m` and `n`, 8 times in `k`."""
    for seed, (g, transpose) in enumerate(product((1, 3, 16), (False, True))):
        tiling = ((64, 128)[seed % 2], (128, 64)[seed // 2 % 2], (64, 128, 192)[seed % 3])
        case = Case("mosaic_gpu", 512, 256, 512, ends(seed, 512, g), F16, F16, None, atol=1e-3, rtol=1e-3)
        yield replace(case, transpose_rhs=transpose, tiling=tiling)


def tokamax() -> Iterator[Case]:
    """tokamax, _src/ops/ragged_dot/test_base.py: `test_simple`, `test_padded`, `test_preferred_element_type`,
    `test_vjp`; arg_specs.py's compute-bound and memory-bound calls, 8 times smaller. Values of deviation 0.1."""
    small = {"std": 0.1, "gradient": (0.02, 0.005)}
    for m, k, n in product((128, 1024), (64, 128), (128, 256)):
        yield Case("tokamax", m, k, n, even(m, 8), BF16, BF16, atol=1e-5, rtol=1e-6, unsigned=True, **small)
    for dtype in (BF16, F32):
        yield Case("tokamax", 1024, 128, 256, even(1024, 8), dtype, dtype, atol=1e-6, rtol=1e-6, **small)
    yield Case("tokamax", 1024, 128, 256, up_to_mean(0, 1024, 8), BF16, BF16, atol=1e-6, rtol=1e-6, **small)
    for out in (None, BF16):
        yield Case("tokamax", 1024, 128, 256, even(1024, 8), BF16, BF16, out, atol=0.01, rtol=0.005, **small)
    for m, sizes in ((512, (512, *[0] * 7)), (8, (1,) * 8)):
        yield Case("tokamax", m, 512, 512, sizes, BF16, BF16, None, atol=0.01, rtol=0.005, **small)


def gmm_v2() -> Iterator[Case]:
    """tokamax, _src/ops/experimental/gmm_v2/gmm_v2_test.py: `test_gmm_basic`, `test_gmm_transpose_rhs`,
    `test_gmm_implicit_padding`."""
    shapes = [(128, 512, 512, 16, False), (128, 512, 512, 32, False), (128, 512, 512, 16, True)]
    for m, k, n, g, transpose in [*shapes, (128, 255, 255, 16, False), (256, 255, 255, 16, False)]:
        sizes = shares(g, m, g)
        yield Case("gmm_v2", m, k, n, sizes, BF16, BF16, None, atol=1e-1, rtol=1e-1, transpose_rhs=transpose)


FORWARD = [*megablox(), *ragged_dot(), *mosaic_gpu(), *tokamax(), *gmm_v2()]


@pytest.mark.parametrize(
    "case, backend", everywhere(FORWARD, ["megablox", "lax.ragged_dot", "tokamax", *KERNELS], few=6)
)
def test_forward_and_gradients(case: Case, backend: str | None, ran: list[str]) -> None:
    """Values and both gradients within the peer's tolerance."""
    rng = np.random.default_rng(len(str(case)))
    x, w = random(rng, (case.m, case.k), case.lhs, case.std), random(rng, (len(case.sizes), case.k, case.n), case.rhs)
    w = (case.std * w.astype(np.float64)).astype(w.dtype)

    @jax.jit
    def run(x: Array, w: Array, sizes: Array, dy: Array) -> tuple[Array, ...]:
        def forward(x: Array, w: Array) -> Array:
            return ragged.grouped_matmul(
                x,
                w.mT if case.transpose_rhs else w,
                sizes,
                transpose_rhs=case.transpose_rhs,
                preferred_element_type=case.out,
                tiling=case.tiling if backend != "pallas_tpu" else None,
                **options(backend),
            )

        y, pull = jax.vjp(forward, x, w)
        return y, *pull(dy)

    with jax.enable_x64(case.lhs == F64), on(backend):
        out_dtype = case.out or case.lhs
        dy = random(rng, (case.m, case.n), out_dtype)
        sizes = jnp.asarray(case.sizes, jnp.uint32 if case.unsigned else jnp.int32)
        y, dx, dw = run(x, w, sizes, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.dtype(out_dtype), x.dtype, w.dtype)
    assert_ran(ran, backend, products=3)
    xs, dys, ws = split(x, case.sizes), split(dy, case.sizes), list(w.astype(np.float64))
    assert_rows(y, oracle.matmul(xs, ws), case.atol, case.rtol)
    atol, rtol = case.gradient or (case.atol, case.rtol)
    assert_rows(dx, oracle.matmul(dys, [b.T for b in ws]), atol, rtol)
    assert_close(dw, oracle.matmul([a.T for a in xs], dys), atol, rtol)


# ---------------------------------------------------------------------------------------------------------------------
# `[m, k].T × [m, n]`, group by group
# ---------------------------------------------------------------------------------------------------------------------


def tgmm_v2() -> Iterator[Case]:
    """tokamax, _src/ops/experimental/gmm_v2/gmm_v2_test.py: `test_tgmm_basic`, `test_tgmm_implicit_padding`,
    `test_tgmm_with_tile_info` (4 times smaller), `test_tgmm_empty_group`, `test_tgmm_explicitly_exercises_all_branches`
    (a group of several tiles beside one of less than a tile)."""
    case = partial(Case, "tgmm_v2", lhs=BF16, rhs=BF16, out=BF16, atol=1e-1, rtol=1e-1)
    for m, k, n, g in [(128, 512, 512, 5), (128, 512, 512, 16), (128, 255, 255, 16), (256, 255, 255, 16)]:
        yield case(m=m, k=k, n=n, sizes=shares(g, m, g))
    for tile_k, tile_n in [(128, 256), (256, 128)]:
        yield case(m=256, k=256, n=256, sizes=shares(0, 256, 16), tiling=(256, tile_k, tile_n))
    for empty in (0, 1):
        sizes = list(shares(4, 128, 4))
        sizes[-1], sizes[empty] = sizes[-1] + sizes[empty], 0
        yield case(m=128, k=512, n=512, sizes=tuple(sizes))
    yield case(m=1088, k=128, n=128, sizes=(1024, 64), tiling=(256, 128, 128))


def mosaic_gpu_transposed() -> Iterator[Case]:
    """JAX, tests/pallas/mgpu_ragged_dot_test.py: `test_ragged_dot_transposed`, float16, 16 groups. 32 times smaller in
    `m`, 16 times in `k` and `n`."""
    for seed, (tile_m, tile_k, tile_n) in enumerate([(64, 64, 128), (64, 128, 64), (128, 64, 64), (128, 128, 128)]):
        case = Case("mosaic_gpu", 512, 128, 128, ends(seed, 512, 16), F16, F16, F16, atol=1e-3, rtol=1e-3)
        yield replace(case, tiling=(tile_m, tile_k, tile_n))


WGRAD = [*tgmm_v2(), *mosaic_gpu_transposed()]


@pytest.mark.parametrize("case, backend", everywhere(WGRAD, ["tgmm_v2"], few=3, most=2**24))
def test_wgrad(case: Case, backend: str | None, ran: list[str]) -> None:
    """An empty group gives zeros."""
    rng = np.random.default_rng(len(str(case)))
    x, dy = random(rng, (case.m, case.k), case.lhs), random(rng, (case.m, case.n), case.rhs)

    @jax.jit
    def run(x: Array, dy: Array, sizes: Array) -> Array:
        return ragged.transposed_grouped_matmul(
            x.T, dy, sizes, preferred_element_type=case.out, tiling=case.tiling, **options(backend)
        )

    with on(backend):
        out = run(x, dy, jnp.asarray(case.sizes, jnp.int32))
    assert_ran(ran, backend, products=1)
    want = oracle.matmul([a.T for a in split(x, case.sizes)], split(dy, case.sizes))
    assert_close(out, want, case.atol, case.rtol)
    assert not np.asarray(out)[np.array(case.sizes) == 0].any()


# ---------------------------------------------------------------------------------------------------------------------
# Shards, empty groups, biases, activations
# ---------------------------------------------------------------------------------------------------------------------

SHARDED = [
    Case("megablox sharded", 128, 8, 16, ends(0, 128, 4), atol=1e-3, rtol=1e-5),
    Case("megablox sharded", 128, 8, 16, ends(1, 128, 12), BF16, F32, BF16, atol=1e-3, rtol=1e-2),
    Case("megablox sharded", 128, 128, 128, ends(2, 128, 6), BF16, BF16, F32, atol=1e-3, rtol=1e-2),
]


@pytest.mark.parametrize("case, backend", everywhere(SHARDED, ["megablox sharded"], few=2))
def test_megablox_sharded_groups(case: Case, backend: str | None, ran: list[str]) -> None:
    """JAX, tests/pallas/tpu_gmm_test.py: `test_gmm_sharded_groups`. Each shard of two groups adds to what the one
    before it gave."""
    rng, stride = np.random.default_rng(0), 2
    x, w = random(rng, (case.m, case.k), case.lhs), random(rng, (len(case.sizes), case.k, case.n), case.rhs)
    dy = random(rng, (case.m, case.n), case.out or case.lhs)

    @jax.jit
    def run(x: Array, w: Array, sizes: Array, dy: Array) -> tuple[Array, ...]:
        def forward(x: Array, w: Array) -> Array:
            call = partial(ragged.grouped_matmul, preferred_element_type=case.out, **options(backend))
            out = call(x, w[:stride], sizes)
            for first in range(stride, len(w), stride):
                out = call(x, w[first : first + stride], sizes, group_offset=jnp.int32(first), existing_out=out)
            return out

        y, pull = jax.vjp(forward, x, w)
        return y, *pull(dy)

    with on(backend):
        y, dx, dw = run(x, w, jnp.asarray(case.sizes, jnp.int32), dy)
    assert_ran(ran, backend, products=4)  # the first shard's, those that add to it, and both gradients'
    xs, dys, ws = split(x, case.sizes), split(dy, case.sizes), list(w.astype(np.float64))
    assert_rows(y, oracle.matmul(xs, ws), case.atol, case.rtol)
    assert_rows(dx, oracle.matmul(dys, [b.T for b in ws]), case.atol, case.rtol)
    assert_close(dw, oracle.matmul([a.T for a in xs], dys), case.atol, case.rtol)


@pytest.mark.parametrize(
    "m, k, n, g, offset, held, backend",
    [
        (256, 256, 256, 4, 1, 3, None),
        *(pytest.param(128, 512, 512, *shard, None, marks=long) for shard in ((16, 2, 4), (16, 0, 8), (32, 4, 4))),
        *(pytest.param(128, 128, 128, 16, 2, 4, backend, marks=long) for backend in KERNELS),
    ],
)
def test_gmm_v2_bias_and_absent_groups(
    m: int, k: int, n: int, g: int, offset: int, held: int, backend: str | None, ran: list[str]
) -> None:
    """Tokamax, gmm_v2_test.py: `test_gmm_basic`, `test_gmm_nonlocal_groups_produce_zeros`. Rows of groups that the
    shard lacks come out zero, without a bias. A bias has a row for every group here."""
    rng = np.random.default_rng(g)
    x, w, bias = (random(rng, shape, BF16) for shape in ((m, k), (held, k, n), (held, n)))
    sizes = shares(g, m, g)

    @jax.jit
    def run(x: Array, w: Array, bias: Array, sizes: Array) -> GroupedTensor:
        y = ragged.matmul(GroupedTensor(x, sizes), w, group_offset=jnp.int32(offset), **options(backend))
        return y + per_group(jnp.zeros((g, n), bias.dtype).at[offset : offset + held].set(bias))

    with on(backend):
        out = run(x, w, bias, jnp.asarray(sizes, jnp.int32))
    assert_ran(ran, backend, products=1)
    own = {offset + i: (w[i].astype(np.float64), bias[i].astype(np.float64)) for i in range(held)}
    nothing = np.zeros((k, n)), np.zeros(n)
    want = [a @ own.get(i, nothing)[0] + own.get(i, nothing)[1] for i, a in enumerate(split(x, sizes))]
    assert_rows(out.data, want, 1e-1, 1e-1)
    for i, rows in enumerate(split(out.data, sizes)):
        assert i in own or not rows.any()


@pytest.mark.parametrize("backend, step", [(None, 1), *((backend, 85) for backend in KERNELS)])
@long
def test_tokamax_every_pattern_of_empty_groups(backend: str | None, step: int, ran: list[str]) -> None:
    """Tokamax, _src/ops/ragged_dot/test_base.py: `test_zero_group_sizes`. 4 times smaller."""
    rng, g, m, k, n = np.random.default_rng(0), 8, 256, 32, 64
    x, w = random(rng, (m, k), BF16), random(rng, (g, k, n), BF16)
    full = np.array(up_to_mean(3, m, g))

    @jax.jit
    def run(sizes: Array) -> Array:
        return ragged.grouped_matmul(x, w, sizes, preferred_element_type=F32, **options(backend))

    with on(backend):
        for pattern in range(1, 2**g, step):
            sizes = np.where(np.unpackbits(np.uint8(pattern)), full, 0)
            want = oracle.matmul(split(x, sizes.tolist()), list(w.astype(np.float64)))
            assert_rows(run(jnp.asarray(sizes, jnp.int32)), want, 1e-6 * k, 1e-6)
    assert_ran(ran, backend, products=1)


@pytest.mark.parametrize("backend", [None, *KERNELS])
@long
def test_gmm_v2_isolation(backend: str | None, ran: list[str]) -> None:
    """Tokamax, gmm_v2_test.py: `test_gmm_security_isolation`. NaN weights of the groups that share a tile with it don't
    change a bit of the first group's rows. 4 times smaller."""
    rng = np.random.default_rng(42)
    x, w = random(rng, (128, 128), BF16), random(rng, (4, 128, 128), BF16)

    @jax.jit
    def run(w: Array) -> Array:
        return ragged.grouped_matmul(x, w, jnp.array([4, 4, 4, 116], jnp.int32), **options(backend))

    spoilt = w.copy()
    spoilt[1:] = np.nan
    with on(backend):
        clean, rows = np.asarray(run(jnp.asarray(w))), np.asarray(run(jnp.asarray(spoilt)))
    assert_ran(ran, backend, products=1)
    assert clean[:4].astype(np.float64).any() and np.array_equal(clean[:4], rows[:4])
    assert np.isnan(rows[4:].astype(np.float64)).all()


def relu(x: Any) -> Any:
    return jnp.maximum(x, 0)


SLOPES: dict[Callable[..., Any], Callable[[np.ndarray], np.ndarray]] = {
    relu: lambda y: (y > 0) * 1.0,
    jnp.tanh: lambda y: 1 - np.tanh(y) ** 2,
}


@pytest.mark.parametrize("activation", [relu, jnp.tanh])
@long
def test_tokamax_activation(activation: Callable[..., Any]) -> None:
    """Tokamax, _src/ops/ragged_dot/test_base.py: `test_vjp`, and api_test.py: `test_basic_api`, with an activation."""
    rng, g, m, k, n = np.random.default_rng(0), 8, 128, 64, 128
    x, w, dy = random(rng, (m, k), BF16, 0.1), random(rng, (g, k, n), BF16, 0.1), random(rng, (m, n), BF16)
    sizes = even(m, g)

    @jax.jit
    def run(x: Array, w: Array, dy: Array) -> tuple[Array, ...]:
        def forward(x: Array, w: Array) -> Array:
            tensor = GroupedTensor(x, jnp.asarray(sizes, jnp.uint32))
            return ragged.matmul(tensor, w, preferred_element_type=F32).map(activation).data

        y, pull = jax.vjp(forward, x, w)
        return y, *pull(dy.astype(F32))

    y, dx, dw = run(x, w, dy)
    xs, dys, ws = split(x, sizes), split(dy, sizes), list(w.astype(np.float64))
    products = oracle.matmul(xs, ws)
    assert_rows(y, [np.asarray(activation(p)) for p in products], 1e-5, 1e-6)
    dys = [d * SLOPES[activation](p) for d, p in zip(dys, products, strict=True)]
    assert_rows(dx, oracle.matmul(dys, [b.T for b in ws]), 0.02, 0.005)
    assert_close(dw, oracle.matmul([a.T for a in xs], dys), 0.02, 0.005)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def swigluoai(gate: Any, up: Any) -> Any:
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


GATES: dict[str, tuple[Callable[..., Any], Callable[..., np.ndarray]]] = {
    "silu": (lambda a, b: jax.nn.silu(a) * b, lambda a, b: a * sigmoid(a) * b),
    "gelu": (lambda a, b: jax.nn.gelu(a) * b, lambda a, b: a * sigmoid(1.5957691216 * (a + 0.044715 * a**3)) * b),
    "swigluoai": (swigluoai, lambda a, b: np.minimum(a, 7) * sigmoid(1.702 * np.minimum(a, 7)) * (b.clip(-7, 7) + 1)),
}


@pytest.mark.parametrize("gate", GATES)
@long
def test_gmm_v2_gated_activation(gate: str) -> None:
    """Tokamax, gmm_v2_test.py: `test_gmm_fused_activation` without scales: the result's halves, gate and up, become
    one. 4 times smaller."""
    rng, g, m, k, n = np.random.default_rng(0), 16, 128, 128, 256
    x, w = (rng.uniform(-1, 1, shape).astype(jnp.bfloat16) for shape in ((m, k), (g, k, n)))
    bias, sizes = random(rng, (g, n), BF16), shares(0, m, g)
    ours, theirs = GATES[gate]

    @jax.jit
    def run(x: Array, w: Array, bias: Array) -> Array:
        y = ragged.matmul(GroupedTensor(x, jnp.asarray(sizes, jnp.int32)), w, preferred_element_type=F32)
        y = y + per_group(bias.astype(F32))
        return y.map(lambda y: ours(*jnp.split(y, 2, axis=-1))).astype(BF16).data

    pairs = zip(split(x, sizes), w.astype(np.float64), bias.astype(np.float64), strict=True)
    want = [theirs(*np.split(a @ b + c, 2, axis=-1)) for a, b, c in pairs]
    assert_rows(run(x, w, bias), want, 5e-2, 5e-2)


@pytest.mark.parametrize("sizes", [(2, 3, -1, 4), (1022, 1, 1, 1)])
@pytest.mark.parametrize("jit", [False, True])
def test_tokamax_invalid_sizes(sizes: Sizes, jit: bool) -> None:
    """Tokamax, _src/ops/ragged_dot/test_base.py: `test_invalid_group_sizes`. Found where one asks for it."""

    def run(sizes: Array) -> Array:
        x = GroupedTensor(jnp.ones((1024, 8), BF16), sizes).validate()
        return ragged.matmul(x, jnp.ones((4, 8, 8), BF16)).data

    with pytest.raises(Exception, match=r"`GroupedTensor\.validate`: the size"):
        jax.block_until_ready((jax.jit(run) if jit else run)(jnp.array(sizes, jnp.int32)))


# ---------------------------------------------------------------------------------------------------------------------
# Scales: the reference multiplies what is stored, times its scales, in float64
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled:
    """A product of quantised operands: for each the dtype and the block along `[k]` of `lhs`, `[k, n]` of `rhs`."""

    peer: str
    m: int
    k: int
    n: int
    sizes: Sizes
    lhs: tuple[str, tuple[int, int]] | None
    rhs: tuple[str, tuple[int, int]]
    atol: float
    rtol: float
    activation: Callable[..., Any] | None = None
    tiling: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        name = "" if self.activation is None else f"-{self.activation.__name__}"
        return f"{self.peer}-{self.lhs or BF16}-{self.rhs}{name}".replace(" ", "")


def tokamax_scaled() -> Iterator[Scaled]:
    """tokamax, _src/ops/ragged_dot/test_base.py: `test_quantized`, and `test_wi4_ai8_quantized` of
    pallas_mosaic_gpu_kernel_sm100_i8_quant_test.py. 2 times smaller. Then the groups of
    pallas_mosaic_gpu_kernel_sm100_fp8_quant_test.py: rows that share tiles, single rows, empty ones."""
    case = partial(Scaled, "tokamax", 256, 256, 256, up_to_mean(1, 256, 8), atol=0.01, rtol=0.005)
    activations = cycle((None, relu, jnp.tanh))
    blocks = product((None, (1, 128), (1, 16)), ((1, 16), (1, 128), (256, 1), (16, 1)))
    for dtype, (lhs, rhs) in zip(cycle(("int8", "int4")), blocks, strict=False):
        yield case(lhs=lhs and (dtype, lhs), rhs=(dtype, rhs), activation=next(activations))
    yield case(lhs=("int8", (1, 256)), rhs=("int4", (256, 1)))
    for sizes in (
        (33, 67, 50, 80, 70, 60, 90, 62),
        (1, 7, 199, 1, 100, 50, 151, 3),
        (0, 130, 0, 200, 0, 98, 84, 0),
    ):
        fp8 = ("float8_e4m3fn", (1, 128))
        yield Scaled("tokamax fp8", 512, 256, 128, sizes, fp8, ("int4", (256, 1)), 0.01, 0.005, activation=relu)


def gmm_v2_scaled() -> Iterator[Scaled]:
    """tokamax, _src/ops/experimental/gmm_v2/gmm_v2_test.py: `test_gmm_weight_quantized` (blocks of 64),
    `test_gmm_weight_quantized_padding` (`n` off the tile), `test_gmm_weight_quantized_block_larger_than_tile_k`,
    `test_gmm_activation_weight_quantized`. 2 times smaller in `k` and `n`."""
    case = partial(Scaled, "gmm_v2", 128)
    for dtype in ("int8", "float8_e4m3fn"):
        yield case(256, 256, shares(16, 128, 16), None, (dtype, (64, 1)), 3e-1, 3e-1)
    yield case(256, 250, shares(16, 128, 16), None, ("int8", (256, 1)), 3e-1, 3e-1)
    yield case(512, 256, shares(16, 128, 16), None, ("int8", (512, 1)), 3e-1, 3e-1, tiling=(128, 128, 256))
    for dtype in ("int4", "int8"):
        yield case(512, 256, shares(16, 128, 16), ("int8", (1, 512)), (dtype, (512, 1)), 3e-1, 3e-1)


SCALED = [*tokamax_scaled(), *gmm_v2_scaled()]


quantize = jax.jit(ragged.quantize, static_argnums=(1, 2))


def widened(q: GroupedTensor) -> np.ndarray:
    """What is stored times its scales; blocks are whole but for the last."""
    data = np.asarray(q.data).astype(np.float64)
    if q.scales is None:
        return data
    scales = np.asarray(q.scales).astype(np.float64)
    assert q.scaling is not None and q.scaling.block is not None
    for axis, block in zip((-2, -1), q.scaling.block, strict=True):
        scales = np.repeat(scales, block or data.shape[axis], axis).take(range(data.shape[axis]), axis)
    return data * scales


@pytest.mark.parametrize("case, backend", everywhere(SCALED, ["gmm_v2"], few=4, most=2**24))
def test_scaled(case: Scaled, backend: str | None, ran: list[str]) -> None:
    """By row, column and block along what is contracted, on one side or both."""
    rng = np.random.default_rng(0)
    x, w = random(rng, (case.m, case.k), BF16), random(rng, (len(case.sizes), case.k, case.n), BF16)
    lhs = GroupedTensor(jnp.asarray(x), jnp.asarray(case.sizes, jnp.int32))
    lhs = quantize(lhs, *case.lhs) if case.lhs else lhs
    rhs = quantize(jnp.asarray(w), *case.rhs)

    @jax.jit
    def run(lhs: GroupedTensor, rhs: GroupedTensor) -> GroupedTensor:
        y = ragged.matmul(lhs, rhs, backend=tiled(backend, case.tiling))
        return y if case.activation is None else y.map(case.activation)

    ran.clear()
    with on(backend):
        out = run(lhs, rhs)
    assert out.dtype == BF16
    assert_ran(ran, backend, products=1)
    want = oracle.matmul(split(widened(lhs), case.sizes), list(widened(rhs)))
    want = want if case.activation is None else [np.asarray(case.activation(y)) for y in want]
    assert_rows(out.data, want, case.atol, case.rtol)


@pytest.mark.parametrize(
    "m, k, n, g, dtype, tiling",
    [
        (128, 256, 256, 16, "float8_e5m2", None),
        (128, 256, 256, 16, "float8_e4m3fn", None),
        (128, 256, 300, 4, "float8_e5m2", (128, 128, 128)),
    ],
)
@long
def test_tgmm_v2_scaled(m: int, k: int, n: int, g: int, dtype: str, tiling: Any) -> None:
    """Tokamax, gmm_v2_test.py: `test_tgmm_with_rhs_scale`, `test_tgmm_with_rhs_scale_n_padding`. A scale for each
    column that all groups share is broadcast to the groups."""
    rng = np.random.default_rng(0)
    x, dy, sizes = random(rng, (m, k), "float8_e4m3fn"), random(rng, (m, n), F32), shares(g, m, g)
    scales = np.abs(dy).max(0) / np.float32(jnp.finfo(dtype).max)
    narrow = (dy / scales).astype(jnp.dtype(dtype))
    dims = jnp.asarray(sizes, jnp.int32)

    @jax.jit
    def run(x: Array, dy: Array, scales: Array) -> Array:
        by_column = GroupedTensor(dy, dims, scales=jnp.broadcast_to(scales, (g, n)), scaling=Scaling((None, 1)))
        return ragged.matmul(
            GroupedTensor(x, dims).mT, by_column, preferred_element_type=BF16, backend=tiled(None, tiling)
        ).data

    wide = narrow.astype(np.float64) * scales.astype(np.float64)
    assert_close(run(x, narrow, scales), oracle.matmul([a.T for a in split(x, sizes)], split(wide, sizes)), 4e-1, 1e-2)


@long
def test_gmm_v2_given_scale() -> None:
    """Tokamax, gmm_v2_test.py: `test_gmm_quantize_lhs_with_lhs_scale`. Calibration fixed beforehand: the caller rounds,
    and says what the scale is. 4 times smaller."""
    rng, g, m, k, n = np.random.default_rng(0), 16, 128, 256, 256
    x, w = (rng.uniform(-1, 1, shape).astype(jnp.bfloat16) for shape in ((m, k), (g, k, n)))
    sizes, scale = shares(g, m, g), 224 / 448
    rounded = (x.astype(np.float32) / scale).astype(jnp.float8_e4m3fn)
    weights = quantize(jnp.asarray(w), jnp.float8_e4m3fn, (k, 1))
    given = GroupedTensor(rounded, jnp.asarray(sizes, jnp.int32), scales=jnp.float32(scale), scaling=Scaling(None))
    out = jax.jit(ragged.matmul)(given, weights)
    assert out.dtype == BF16
    wide = rounded.astype(np.float64) * scale
    assert_rows(out.data, oracle.matmul(split(wide, sizes), list(widened(weights))), 3e-2, 3e-2)


# ---------------------------------------------------------------------------------------------------------------------
# torch: four layouts, each operand in either order in memory, with or without gaps between its rows
# ---------------------------------------------------------------------------------------------------------------------

TORCH = {  # which dims are ragged: lhs's first, lhs's last, rhs's last
    "2d_2d": (False, True, False),
    "2d_3d": (True, False, False),
    "3d_3d": (False, False, False),
    "3d_2d": (False, False, True),
}
TORCH_CASES = [
    pytest.param(*case, marks=[] if case == ("2d_3d", True, False, True) else long)
    for case in product(TORCH, (False, True), (False, True), (False, True))
]


def packed(groups: Sequence[np.ndarray], first: bool, last: bool) -> np.ndarray:
    """The groups in a buffer: one after another along the ragged dim, or stacked."""
    return np.concatenate(groups, axis=0 if first else 1) if first or last else np.stack(groups)


def in_memory(x: np.ndarray, row_major: bool, gaps: bool) -> np.ndarray:
    """`x`, or its transpose, as a view of memory with NaN between its rows."""
    x = x if row_major else x.swapaxes(-1, -2)
    if not gaps:
        return np.ascontiguousarray(x)
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@pytest.mark.parametrize("layout, lhs_row_major, rhs_row_major, gaps", TORCH_CASES)
def test_torch_grouped_mm(layout: str, lhs_row_major: bool, rhs_row_major: bool, gaps: bool) -> None:
    """PyTorch, test/test_matmul_cuda.py: `test_grouped_gemm_2d_2d`, `2d_3d`, `3d_3d`, `3d_2d`: values and gradients in
    bfloat16, to its tolerance of bfloat16. The sizes come from running ends."""
    rng, g, m, k = np.random.default_rng(0), 4, 16, 16
    n = 16 if layout == "2d_2d" else 32
    m_ragged, k_ragged, n_ragged = TORCH[layout]
    lhs, rhs, dout = ([random(rng, shape, BF16) for _ in range(g)] for shape in ((m, k), (k, n), (m, n)))
    offs = np.arange(1, g + 1, dtype=np.int32) * (m if m_ragged else k if k_ragged else n)
    sizes = jnp.asarray(np.diff(offs, prepend=np.int32(0)))

    def tensor(data: Any, first: bool, last: bool, row_major: bool) -> GroupedTensor:
        dims = [sizes if is_ragged else None for is_ragged in (first, last)]
        return GroupedTensor(data, dims[0], dims[1]) if row_major else GroupedTensor(data, dims[1], dims[0]).mT

    a = in_memory(packed(lhs, m_ragged, k_ragged), lhs_row_major, gaps)
    b = in_memory(packed(rhs, k_ragged, n_ragged), rhs_row_major, gaps)
    assert a.flags.c_contiguous is not gaps

    def value(a: Any, b: Any) -> Array:
        x, y = tensor(a, m_ragged, k_ragged, lhs_row_major), tensor(b, k_ragged, n_ragged, rhs_row_major)
        return ragged.matmul(x, y).data

    @jax.jit
    def run(a: Array, b: Array, dout: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(value, a, b)
        return out, *pull(dout)

    out, da, db = run(a, b, packed(dout, m_ragged, n_ragged))
    tolerance = 1e-5, 1.6e-2
    assert_close(out, packed(oracle.matmul(lhs, rhs), m_ragged, n_ragged), *tolerance)
    d_lhs = packed(oracle.matmul(dout, [y.T for y in rhs]), m_ragged, k_ragged)
    d_rhs = packed(oracle.matmul([x.T for x in lhs], dout), k_ragged, n_ragged)
    assert_close(da, d_lhs if lhs_row_major else d_lhs.swapaxes(-1, -2), *tolerance)
    assert_close(db, d_rhs if rhs_row_major else d_rhs.swapaxes(-1, -2), *tolerance)


@pytest.mark.parametrize(
    "layout, empty, backend",
    [
        *(
            pytest.param(*case, None, marks=long)
            for case in (
                ("2d_3d", True),
                ("2d_2d", False),
                ("2d_3d", False),
                ("3d_3d", False),
                ("3d_2d", True),
                ("3d_2d", False),
            )
        ),
        *(pytest.param("2d_3d", True, backend, marks=[long] if backend == "pallas_tpu" else []) for backend in KERNELS),
        *(pytest.param("2d_2d", False, backend, marks=long) for backend in KERNELS),
    ],
)
def test_torch_scaled_grouped_mm(layout: str, empty: bool, backend: str | None, ran: list[str]) -> None:
    """PyTorch, test/test_scaled_matmul_cuda.py: `test_scaled_grouped_gemm_2d_2d`, `2d_3d`, `3d_3d`, `3d_2d`:
    float8_e4m3fn with a scale for each row of each group's `lhs` and each column of its `rhs`; with an empty group."""
    rng, g, m, n, k = np.random.default_rng(0), 4, 16, 32, 64
    m_ragged, k_ragged, n_ragged = TORCH[layout]
    extents = {"m": [m] * g, "k": [k] * g, "n": [n] * g}
    for letter, is_ragged in zip("mkn", TORCH[layout], strict=True):
        if is_ragged and empty:
            extents[letter] = [2 * extents[letter][0], 0, *extents[letter][2:]]
    shapes = [(extents["m"][i], extents["k"][i], extents["n"][i]) for i in range(g)]
    lhs = [random(rng, (m, k), "float8_e4m3fn") for m, k, _ in shapes]
    rhs = [random(rng, (k, n), "float8_e4m3fn") for _, k, n in shapes]
    row = [rng.random((m, 1), np.float32) for m, _, _ in shapes]
    column = [rng.random((1, n), np.float32) for _, _, n in shapes]

    def quantised(
        groups: list[np.ndarray], scales: list[np.ndarray], first: bool, last: bool, by: Any
    ) -> GroupedTensor:
        dims = [
            jnp.array([x.shape[axis] for x in groups], jnp.int32) if is_ragged else None
            for axis, is_ragged in enumerate((first, last))
        ]
        # Scales are packed as their groups are; along a ragged dim that shares a scale there is one a group.
        values = packed(scales, first, last)
        return GroupedTensor(jnp.asarray(packed(groups, first, last)), *dims, scales=jnp.asarray(values), scaling=by)

    a = quantised(lhs, row, m_ragged, k_ragged, Scaling((1, None)))
    b = quantised(rhs, column, k_ragged, n_ragged, Scaling((None, 1)))
    with on(backend):
        out = jax.jit(partial(ragged.matmul, preferred_element_type=BF16, **options(backend)))(a, b)
    assert_ran(ran, backend, products=1)
    pairs = zip(lhs, row, rhs, column, strict=True)
    want = [np.float64(r) * (x.astype(np.float64) @ y.astype(np.float64)) * c for x, r, y, c in pairs]
    assert_close(out.data, packed(want, m_ragged, n_ragged), 5e-2, 5e-4)


@pytest.mark.parametrize("g", [1, 4, 16])
@long
def test_torch_mxfp8(g: int) -> None:
    """PyTorch, test/test_scaled_matmul_cuda.py: `test_mxfp8_scaled_grouped_mm_2d_3d`: blocks of 32 along what is
    contracted, groups of multiples of 32 rows. 32 times smaller."""
    rng, m, k, n = np.random.default_rng(g), 544, 128, 256
    x, w = random(rng, (m, k), BF16), random(rng, (g, n, k), BF16)
    sizes = tuple(32 * size for size in ends(g, m // 32, g))
    lhs = quantize(GroupedTensor(jnp.asarray(x), jnp.asarray(sizes, jnp.int32)), jnp.float8_e4m3fn, "mx")
    rhs = quantize(jnp.asarray(w), jnp.float8_e4m3fn, "mx").mT
    out = jax.jit(ragged.matmul)(lhs, rhs)
    assert_rows(out.data, oracle.matmul(split(widened(lhs), sizes), list(widened(rhs))), 8e-2, 8e-2)


# ---------------------------------------------------------------------------------------------------------------------
# `ragged_dot_general`, transformations, programs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, m, k, n, g",
    [(3, 128, 128, 128, 2), (5, 128, 256, 128, 4)],
)
@long
def test_ragged_dot_vmap(batch: int, m: int, k: int, n: int, g: int) -> None:
    """JAX, tests/lax_test.py: `test_ragged_dot_general_vmap`: every operand and the sizes are mapped."""
    rng = np.random.default_rng(0)
    x, w = random(rng, (batch, m, k), F32), random(rng, (batch, g, k, n), F32)
    sizes = np.array([ends(i, m, g) for i in range(batch)], np.int32)
    call = partial(ragged.grouped_matmul, preferred_element_type=F32, precision=jax.lax.Precision.HIGHEST)
    out = jax.jit(jax.vmap(call))(x, w, sizes)
    for i in range(batch):
        want = oracle.matmul(split(x[i], sizes[i].tolist()), list(w[i]))
        assert_rows(out[i], want, 1e-5 * np.sqrt(k), 1e-5)


@long
def test_ragged_dot_general_modes() -> None:
    """JAX, tests/lax_test.py: `test_ragged_dot_general_shape_inference_success`, and tests/shape_poly_test.py's modes:
    a ragged dim that is kept, one that is contracted, the same in a batch, and a ragged batch, which is no grouping."""
    rng = np.random.default_rng(0)
    x, w = random(rng, (11, 5), F32), random(rng, (3, 5, 7), F32)
    sizes = np.array([4, 4, 3], np.int32)
    out = ragged.grouped_matmul(x, w, sizes)
    assert_rows(out, oracle.matmul(split(x, sizes.tolist()), list(w)), 1e-5, 1e-5)

    x, w = random(rng, (2, 11, 5), F32), random(rng, (2, 5, 7), F32)
    sizes = np.array([[2, 0, 3], [1, 1, 3]], np.int32)

    def contracted(x: np.ndarray, w: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
        return oracle.matmul([a.T for a in split(x.T, sizes.tolist())], split(w, sizes.tolist()))

    want = [contracted(*each) for each in zip(x, w, sizes, strict=True)]
    assert_close(ragged.transposed_grouped_matmul(x[0], w[0], sizes[0]), want[0], 1e-5, 1e-5)  # [3, 11, 7]
    out = jax.vmap(ragged.transposed_grouped_matmul, out_axes=1)(x, w, sizes)
    assert_close(out, np.stack(want, 1), 1e-5, 1e-5)  # [3, 2, 11, 7]

    x, w = random(rng, (5, 11, 6), F32), random(rng, (5, 6, 7), F32)
    out = ragged.matmul(GroupedTensor(jnp.asarray(x)), jnp.asarray(w))
    assert_close(out.data, oracle.matmul(list(x), list(w)), 1e-5, 1e-5)


@pytest.mark.parametrize(
    "lhs, rhs, sizes, text",
    [
        ((11, 5), (3, 5, 7), (2, 3), "`group_sizes` must have 1 dims, but has 2."),
        ((11, 5), (3, 5, 7), (2,), "`rhs` has 3 groups but `group_sizes` has 2."),
        ((11, 5), (5, 7), (3,), "`rhs` must have 3 dims, but has 2."),
        ((2, 11, 5), (3, 2, 5, 7), (3,), "`lhs` must have 2 dims, but has 3."),
        ((11, 3), (3, 5, 7), (3,), "`lhs` has k=3 but `rhs` has k=5"),
    ],
)
def test_ragged_dot_general_failures(lhs: Sizes, rhs: Sizes, sizes: Sizes, text: str) -> None:
    """JAX, tests/lax_test.py: `test_ragged_dot_general_shape_inference_failure`, those that can be said here."""
    operands = jnp.ones(lhs), jnp.ones(rhs), jnp.ones(sizes, jnp.int32)
    check_error(lambda: ragged.grouped_matmul(*operands), ValueError, text)


def test_ragged_dot_named_scopes() -> None:
    """JAX, tests/lax_test.py: `test_ragged_dot_general_preserves_named_scope`: both are in the compiled program."""

    def run(x: Array, w: Array) -> Array:
        with jax.named_scope("outer_scope"), jax.named_scope("inner_scope"):
            return ragged.grouped_matmul(x, w, jnp.array([4, 4], jnp.int32))

    text = jax.jit(run).lower(jnp.ones((8, 8)), jnp.ones((2, 8, 8))).compile().as_text() or ""
    assert "outer_scope/inner_scope" in text


@pytest.mark.parametrize("k, n, sizes", [(4, 3, (64,)), pytest.param(9, 8, (30, 34), marks=long)])
def test_ragged_dot_export(k: int, n: int, sizes: Sizes) -> None:
    """JAX, tests/export_test.py: `test_ragged_dot`: whole numbers, exactly."""
    m, g = 64, len(sizes)
    x, w = np.arange(m * k, dtype=F32).reshape(m, k), np.arange(g * k * n, dtype=F32).reshape(g, k, n)
    args = x, w, np.array(sizes, np.int32)
    out = jax.export.export(jax.jit(ragged.grouped_matmul))(*args).call(*args)
    assert_rows(out, oracle.matmul(split(x, sizes), list(w)), 0, 0)


def test_mosaic_gpu_in_shard_map(ran: list[str]) -> None:
    """JAX, tests/pallas/mgpu_ragged_dot_test.py: `test_ragged_dot_shard_map_check_vma`: for a mesh of two GPUs that
    aren't there, each gets the kernel."""
    gpu.needs_triton()
    spec = jax.sharding.PartitionSpec()
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    call = jax.shard_map(ragged.grouped_matmul, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=True)
    args = [jax.ShapeDtypeStruct(shape, F16) for shape in ((1024, 512), (3, 512, 512))]
    jax.jit(call).trace(*args, jax.ShapeDtypeStruct((3,), jnp.int32)).lower(lowering_platforms=("cuda",))
    assert_ran(ran, "triton_gpu", products=1)


@long
def test_tokamax_in_shard_map() -> None:
    """Tokamax, _src/ops/ragged_dot/pallas_mosaic_tpu_test.py: `test_shard_map_manual_axis_type_varying`: rows over one
    mesh axis, columns over another; one group, as large as all shards together."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng, (m, k, n) = np.random.default_rng(0), (256, 128, 128)
    x, w, dy = random(rng, (m, k), F32), random(rng, (1, k, n), F32), random(rng, (m, n), F32)
    specs = spec("x", None), spec(None, None, "y"), spec(None)
    call = jax.shard_map(ragged.grouped_matmul, mesh=mesh, in_specs=specs, out_specs=spec("x", "y"), check_vma=True)
    sizes = jnp.array([m], jnp.uint32)

    @jax.jit
    def run(x: Array, w: Array, dy: Array) -> tuple[Array, ...]:
        y, pull = jax.vjp(lambda x, w: call(x, w, sizes), x, w)
        return y, *pull(dy)

    wide = [z.astype(np.float64) for z in (x, w[0], dy)]
    want = wide[0] @ wide[1], wide[2] @ wide[1].T, (wide[0].T @ wide[2])[None]
    for got, each in zip(run(x, w, dy), want, strict=True):
        assert_close(got, each, 1e-4, 1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# What peers take and we refuse
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(256, 1), (16, 1)])
@long
def test_refused_blocks_of_several_rows(block: tuple[int, int]) -> None:
    """tokamax, _src/ops/ragged_dot/test_base.py: `test_quantized` with scales for blocks of rows, and PyTorch's MXFP8
    2-D × 2-D. There blocks are the buffer's, here each group's; repeated, their scales are those of single elements."""
    x = GroupedTensor(jnp.ones((512, 8), BF16), jnp.array([300, 100], jnp.int32))
    rng = np.random.default_rng(0)
    data, scales = rng.integers(-9, 9, (512, 8)).astype(np.int8), rng.random((512 // block[0], 8), np.float32)
    made = [jnp.asarray(data), x.first_dims, None, jnp.asarray(scales), Scaling((block[0], 1))]
    check_error(lambda: GroupedTensor(*made), ValueError, f"have shape ({512 // block[0] + 1}, 8)")
    each = np.repeat(scales, block[0], 0)
    x = GroupedTensor(jnp.asarray(data), x.first_dims, scales=jnp.asarray(each), scaling=Scaling((1, 1)))
    w = random(rng, (2, 8, 8), F32)
    want = oracle.matmul(split(data * each.astype(np.float64), (300, 100)), list(w))
    assert_rows(ragged.matmul(x, jnp.asarray(w)).data, want, 1e-4, 1e-5)
