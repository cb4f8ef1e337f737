"""Biases, activations and gates inside a TPU's and a GPU's kernels, interpreted, against NumPy in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy import ndarray as NpArray

from ragged.backends import cache
from ragged.backends.base import Launch, Refusal, Target
from ragged.backends.gpu import backend as gpu_backend
from ragged.core.scales import Scales
from ragged.product.layout import Product
from ragged.product.operands import Call, Epilogue, Operand, Operands, Options
from tests import products, ran
from tests.ops.test_epilogue import FUNCTIONS

SIZES = (5, 0, 9, 1, 4)  # in buffers of 24
H200 = Target(interpret=True, device=("NVIDIA H200", 132))
TARGETS = {"pallas_tpu": Target(interpret=True), "triton_gpu": H200}

GATED = [(True, False, False), (True, True, True), (False, True, True), (True, False, True)]
STORED = [*GATED, (True, False), (True, True), (False, True)]  # of the result, of z, and of the other z


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    return jnp.asarray(rng.standard_normal(shape) / 2, dtype)


def exact(x: Any) -> NpArray:
    return np.asarray(x).astype(np.float64)


def wanted(z: list[NpArray], activation: str | None, stored: tuple[bool, ...]) -> list[NpArray]:
    """What is stored of pre-activations."""
    result = FUNCTIONS[activation](z[0]) * (z[1] if len(z) > 1 else 1)
    return [each for each, is_stored in zip([result, *z], stored, strict=True) if is_stored]


def close(got: Any, want: list[NpArray], dtype: Any = jnp.float32) -> None:
    """Largest error relative to the largest element; what is stored in bfloat16 is rounded once."""
    limit = {"float32": 2e-6, "bfloat16": 2**-8}[jnp.dtype(dtype).name]
    assert len(got) == len(want)
    for each, right in zip(got, want, strict=True):
        assert each.dtype == dtype and each.shape == right.shape
        assert np.max(np.abs(exact(each) - right)) <= limit * max(1, np.max(np.abs(right)))


def biases_of(rng: np.random.Generator, kind: str, g: int, n: int) -> list[Array | None]:
    """Of both products: a row for each group, one for all, or none."""
    shapes = {"each": ((g, n), (g, n)), "mixed": ((n,), (g, n)), "one": ((g, n), None), "none": (None, None)}[kind]
    return [None if shape is None else random(rng, shape) for shape in shapes]


def check(
    backend: str,
    activation: str | None,
    stored: tuple[bool, ...],
    *,
    layout: str = "forward",
    sizes: tuple[int, ...] = SIZES,
    rows: int = 24,
    k: int = 37,
    n: int = 50,
    dtype: Any = jnp.float32,
    out: Any = None,
    kind: str = "each",
    held: tuple[int, int] | None = None,
    target: Target | None = None,
    **options: Any,
) -> None:
    """A product with an epilogue equals the definition: NaN in the tail, zeros there and where no group is held."""
    rng, gated = np.random.default_rng(0), len(stored) > 2
    first, count = held or (0, len(sizes))
    out, target = out or dtype, target or TARGETS[backend]
    w, up = (random(rng, (count, k, n), dtype) for _ in range(2))
    biases = biases_of(rng, kind, count, n)
    options |= {"epilogue": products.epilogue_spec(activation, stored), "bias": biases[0], "target": target}
    options |= {"up": Operand(up), "up_bias": biases[1]} if gated else {}
    options |= {"preferred_element_type": out}
    matrices = [(exact(w), biases[0]), (exact(up), biases[1])][: 1 + gated]

    def z_of(x: NpArray, i: int) -> list[NpArray]:
        rows_of = (0 if b is None else exact(b) if b.ndim == 1 else exact(b)[i] for _, b in matrices)
        return [x @ each[i] + b for (each, _), b in zip(matrices, rows_of, strict=True)]

    if layout == "batched":
        x = random(rng, (count, 7, k), dtype)
        run = jax.jit(lambda x, w: products.batched_matmul(backend, x, w, axes=("mk", "kn", "mn"), **options))
        got, want = run(x, w), [wanted(z_of(exact(x)[i], i), activation, stored) for i in range(count)]
        close(got, [np.stack(each) for each in zip(*want, strict=True)], out)
        return
    x = random(rng, (rows, k), dtype).at[sum(sizes) :].set(jnp.nan)
    options |= {} if held is None else {"group_offset": jnp.int32(first)}
    run = jax.jit(lambda x, w, sizes: products.grouped_matmul(backend, x, w, sizes, **options))
    got, want = run(x, w, jnp.asarray(sizes, jnp.int32)), [np.zeros((rows, n)) for each in stored if each]
    for i in range(count):
        start = sum(sizes[: first + i])
        those = slice(start, start + sizes[first + i])
        for each, part in zip(want, wanted(z_of(exact(x)[those], i), activation, stored), strict=True):
            each[those] = part
    close(got, want, out)
    outside = np.ones(rows, bool)
    outside[sum(sizes[:first]) : sum(sizes[: first + count])] = False
    assert not any(exact(each)[outside].any() for each in got)


@pytest.mark.sampled
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("layout", ["forward", "batched"])
def test_every_ending(
    layout: str, activation: str | None, stored: tuple[bool, ...], kernels: tuple[str, ran.Launches]
) -> None:
    """Every activation, kind of bias, and set of what is stored; extents that are multiples of nothing."""
    backend, launches = kernels
    launches.clear()
    kind = ("each", "mixed", "one", "none")[STORED.index(stored) % 4]
    check(backend, activation, stored, layout=layout, kind=kind)
    assert [name for name, _ in launches] == [backend]


@pytest.mark.sampled
@pytest.mark.parametrize("held", [(1, 2), (-1, 3), (4, 3)])
@pytest.mark.parametrize("stored", [(True, True, True), (True, True)], ids=str)
def test_rows_of_groups_that_are_not_held(
    stored: tuple[bool, ...], held: tuple[int, int], kernels: tuple[str, ran.Launches]
) -> None:
    """They are zero by an activation that isn't 0 at 0, and with a bias; pre-activations too."""
    first, count = held
    sizes = (*SIZES, 0, 0) if first >= 0 else (0, *SIZES)
    held = (first, count) if first >= 0 else (0, count)
    check(kernels[0], "sigmoid", stored, sizes=sizes, held=held)


@pytest.mark.sampled
@pytest.mark.parametrize("gated", [True, False])
def test_a_group_keeps_its_nan(gated: bool, kernels: tuple[str, ran.Launches]) -> None:
    """Of rows, of an empty group's matrices, and of its biases."""
    backend, rng = kernels[0], np.random.default_rng(0)
    x = random(rng, (24, 32)).at[6].set(jnp.nan).at[19:].set(jnp.nan)  # row 6 is of group 2
    w, up, bias, up_bias = (random(rng, s) for s in ((5, 32, 24), (5, 32, 24), (5, 24), (5, 24)))
    w, up, bias = w.at[1].set(jnp.nan), up.at[1].set(jnp.nan), bias.at[1].set(jnp.nan)
    options: dict[str, Any] = {"up": Operand(up), "up_bias": up_bias} if gated else {}
    options |= {
        "epilogue": products.epilogue_spec("sigmoid", (True,) * (2 + gated)),
        "bias": bias,
        "target": TARGETS[backend],
    }
    options |= {"preferred_element_type": jnp.float32}
    for out in products.grouped_matmul(backend, x, w, jnp.asarray(SIZES, jnp.int32), **options):
        is_nan = np.isnan(np.asarray(out))
        assert is_nan[6].all() and not is_nan[np.arange(24) != 6].any() and not np.asarray(out)[19:].any()


QUANTISED = {  # scales' extents and blocks, of `x [24, k]` and of `w [5, n, k]`; k is 256 and n 136
    "rowwise": (((24, 1), (1, None)), ((5, 136, 1), (1, None))),
    "tensorwise": (((5, 1), (None, None)), ((5, 1, 1), (None, None))),
    "blockwise": (((24, 2), (1, 128)), ((5, 2, 2), (128, 128))),
    "mx": (((24, 8), (1, 32)), ((5, 136, 8), (1, 32))),
}


@pytest.mark.sampled
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("way", QUANTISED)
def test_quantised(way: str, gated: bool, kernels: tuple[str, ran.Launches]) -> None:
    """Both products have their own scales, and get them before bias and activation. Scales of rows of no group
    are NaN."""
    backend, rng, fp8 = kernels[0], np.random.default_rng(0), jnp.float8_e4m3fn
    (x_shape, x_block), (w_shape, w_block) = QUANTISED[way]
    x, w, up = (random(rng, s, fp8) for s in ((24, 256), (5, 136, 256), (5, 136, 256)))
    x_scales, w_scales, up_scales = (jnp.asarray(2.0 ** rng.integers(-3, 2, s)) for s in (x_shape, w_shape, w_shape))
    if x_shape[0] == 24:
        x_scales = x_scales.at[19:].set(jnp.nan)
    x_scales, w_scales, up_scales = (each.astype(jnp.float32) for each in (x_scales, w_scales, up_scales))
    biases = biases_of(rng, "each", 5, 136)
    options: dict[str, Any] = {"bias": biases[0], "epilogue": products.epilogue_spec("gelu", (True,) * (2 + gated))}
    options |= {"up": Operand(up, Scales(up_scales, w_block)), "up_bias": biases[1]} if gated else {}
    run = partial(products.grouped_matmul, backend, target=TARGETS[backend], transpose_rhs=True, **options)
    got = run(
        x,
        w,
        jnp.asarray(SIZES, jnp.int32),
        lhs_scales=Scales(x_scales, x_block),
        rhs_scales=Scales(w_scales, w_block),
        preferred_element_type=jnp.float32,
    )

    def spread(values: Array, block: tuple[int | None, int | None], shape: tuple[int, int]) -> NpArray:
        """Scales of one matrix, each for its block."""
        rows, columns = (np.arange(n) // (b or n) for b, n in zip(block, shape, strict=True))
        return exact(values)[rows][:, columns]

    want = [np.zeros((24, 136)) for _ in got]
    for i, size in enumerate(SIZES):
        those = slice(sum(SIZES[:i]), sum(SIZES[:i]) + size)
        of_x = spread(x_scales[those] if x_block[0] else x_scales[i : i + 1], x_block, (size, 256))
        a, z = exact(x)[those] * of_x, []
        for matrix, scales, bias in ((w, w_scales, biases[0]), (up, up_scales, biases[1]))[: 1 + gated]:
            z.append(a @ (exact(matrix[i]) * spread(scales[i], w_block, (136, 256))).T + exact(bias)[i])
        for each, part in zip(want, wanted(z, "gelu", (True,) * (2 + gated)), strict=True):
            each[those] = part
    close(got, want)


# --- the GPU's alone --------------------------------------------------------------------------------------------------

only_gpu = pytest.mark.parametrize("kernels", ["triton_gpu"], indirect=True)


@pytest.mark.sampled
@only_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("stored", [(True, True, True), (True, True)], ids=str)
@pytest.mark.parametrize("k, n", [(64, 72), (37, 72), (37, 70)])
def test_slices(k: int, n: int, stored: tuple[bool, ...], dtype: Any, kernels: tuple[str, ran.Launches]) -> None:
    """Tiles of which registers hold a quarter besides the sums; loaded by TMA, and by pointers."""
    sizes = (130, 0, 7)
    check(
        "triton_gpu",
        "silu",
        stored,
        sizes=sizes,
        rows=150,
        k=k,
        n=n,
        dtype=dtype,
        out=jnp.float32,
        tiling=(128, 32, 64),
    )


@only_gpu
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activations(activation: str | None, kernels: tuple[str, ran.Launches]) -> None:
    """Each number is within rounding of what it is to be, however small; and so are infinity and NaN."""
    ends = [np.inf, -np.inf, np.nan, 0.0, 100.0, -100.0, 1e30]
    small = np.geomspace(1e-6, 1, 50)
    z = np.concatenate([np.linspace(-5, 5, 401), small, -small, ends]).astype(np.float32)
    x = jnp.zeros((len(z), 16)).at[:, 0].set(z)
    w = jnp.zeros((1, 16, 16)).at[:, 0].set(1.0)
    options: dict[str, Any] = {"epilogue": products.epilogue_spec(activation, (True, False)), "target": H200}
    options |= {"preferred_element_type": jnp.float32}
    (out,) = products.grouped_matmul("triton_gpu", x, w, jnp.array([len(z)], jnp.int32), **options)
    got = np.asarray(out)[:, 0]
    with np.errstate(all="ignore"):
        want = FUNCTIONS[activation](z.astype(np.float64))
    middle = slice(0, -len(ends))
    np.testing.assert_allclose(got[middle], want[middle], rtol=2e-6)
    np.testing.assert_allclose(got[-len(ends) :], want[-len(ends) :], rtol=2e-6, atol=1e-30)


def planned(call: Call, x: Operands, target: Target = H200) -> Launch | Refusal:
    return gpu_backend.plan(call, x, target)


def shapes(gated: bool = True, **changed: Any) -> tuple[Call, Operands]:
    """A product `[64, 32] × [4, 32, 48]` with an epilogue, and its operands."""
    aval = jax.ShapeDtypeStruct
    w, bias = Operand(aval((4, 32, 48), jnp.bfloat16)), aval((4, 48), jnp.bfloat16)
    epilogue = Epilogue(None, bias, *((w, bias) if gated else ()))
    x = Operands(Operand(aval((64, 32), jnp.bfloat16)), w, {"m": aval((4,), jnp.int32)}, None, epilogue)
    call = Call(Product("mk", "kn", "mn", "m"), (64, 48), jnp.dtype(jnp.bfloat16), Options(), out_batch=True)
    return call._replace(epilogue=products.epilogue_spec("silu", (True,) * (3 if gated else 2)), **changed), x


def test_what_has_no_kernel() -> None:
    """It is composed of products then."""
    call, x = shapes()
    assert isinstance(planned(call, x), Launch)
    aval = jax.ShapeDtypeStruct
    others: list[Any] = [
        Operand(aval((4, 32, 48), jnp.float32)),
        Operand(aval((4, 32, 40), jnp.bfloat16)),
        Operand(aval((4, 32, 48), jnp.bfloat16), Scales(aval((4, 32, 1), jnp.float32), (1, None))),
    ]
    for up in others:
        found = planned(call, x._replace(epilogue=x.epilogue._replace(up=up)))
        assert isinstance(found, Refusal) and "of different shapes or dtypes" in found.reason and not found.hint
    existing = x._replace(epilogue=x.epilogue._replace(existing=aval((64, 48), jnp.bfloat16)))
    found = planned(call, existing)
    assert isinstance(found, Refusal) and "an epilogue together with `existing_out`" in found.reason
    summed = x._replace(lhs=Operand(aval((2, 64, 32), jnp.bfloat16)))
    found = planned(call._replace(out_batch=False), summed)
    assert isinstance(found, Refusal) and "an epilogue of a sum over batch elements" in found.reason


def test_what_it_costs() -> None:
    """A gated product multiplies twice, reads both matrices, and stores three results."""
    (one, x), (gated, both) = shapes(False), shapes()
    one = one._replace(epilogue=None)
    plain = planned(one, x._replace(epilogue=Epilogue()))
    found = planned(gated, both)
    assert isinstance(plain, Launch) and isinstance(found, Launch)
    assert found.flops == 2 * (plain.flops or 0)
    result, matrix, bias = 64 * 48 * 2, 4 * 32 * 48 * 2, 4 * 48 * 2
    assert (found.bytes_accessed or 0) - (plain.bytes_accessed or 0) == 2 * result + matrix + 2 * bias
    keys = {cache.product_key(each.call, both, "triton_gpu") for each in (found, plain)}
    assert len(keys) == 2  # what is tuned for one isn't for the other
    sizes = {"m": np.array([30, 0, 20, 5])}
    work, alone = (gpu_backend.work(each, both._replace(sizes=sizes)) for each in (found, plain))
    tile = 2 * found.config.m * found.config.n * found.config.k
    assert (
        work.flops == 2 * work.visits * tile
        and alone.flops == alone.visits * 2 * plain.config.m * plain.config.n * plain.config.k
    )
