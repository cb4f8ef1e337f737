"""Tiles for GPUs: what fits, and what the model prefers. What the compiler says of them is in `test_triton_compile`."""

# pyright: reportOptionalOperand=false, reportOperatorIssue=false
# Tiles and warps that were chosen aren't None.

import itertools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

import ragged
from ragged import GroupedTensor
from ragged.backends.gpu import tiles as triton_tiling
from ragged.backends.gpu.tiles import Problem, chip, choose, fit, ranked, refuse, resident, shared
from ragged.tuning import GpuConfig

H200, A100, L4 = (chip((kind, 0)) for kind in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4"))


def problem(r: int, c: int, k: int, groups: int = 8, itemsize: int = 2, wide: bool = False) -> Problem:
    return Problem(
        r, c, k, groups, itemsize=itemsize, result=2, min_k=32 if itemsize == 1 else 16, step_accumulator=wide
    )


def test_chips() -> None:
    """By the longest name that fits, else by the compute capability that JAX gives."""
    assert (H200.capability, H200.multiprocessors, H200.has_tma) == (90, 132, True)
    assert (A100.capability, A100.multiprocessors, A100.has_tma) == (80, 108, False)
    assert L4.capability == 89 and L4.multiprocessors == 58
    assert chip(("NVIDIA A10G 8.6", 80)).multiprocessors == 80 and chip(("NVIDIA A10G 8.6", 80)).capability == 86
    assert chip(("NVIDIA GH200 480GB 9.0", 132)) == H200 and chip(("NVIDIA L40S", 0)).capability == 89
    laptop = chip(("NVIDIA RTX A1000 Laptop GPU 8.6", 16))
    assert (laptop.capability, laptop.multiprocessors, laptop.shared) == (86, 16, 99 << 10)
    unknown = chip(("NVIDIA Something 12.0", 70))
    assert (unknown.capability, unknown.multiprocessors, unknown.has_tma) == (120, 70, False)
    assert unknown.shared == 99 << 10
    assert chip(None).capability == chip(("no number", 0)).capability == 80


@pytest.mark.parametrize("on", [H200, A100, L4, chip(None)])
def test_every_choice_fits(on: triton_tiling.Chip) -> None:
    """Shared memory, and 255 registers a thread, of which the totals take at most half."""
    extents = (1, 16, 1000, 14336)
    for r, c, k, itemsize in itertools.product(extents, extents, extents, (1, 2, 4)):
        for wide in (False, True):
            p = problem(r, c, k, itemsize=itemsize, wide=wide)
            config = choose(p, on)
            assert shared(p, config, on) <= on.shared
            assert config.m * config.n * (1 + wide) <= 128 * 32 * config.warps
            assert config.k >= p.min_k and refuse(dict(zip("mkn", config.along("mkn"), strict=True))) is None


def test_few_rows_get_flat_tiles_and_many_get_square_ones() -> None:
    """A group of 8 rows isn't multiplied as 128; one of thousands is, with as many columns as registers hold. With two
    accumulators, two programs at a time are faster than one of twice the rows."""
    assert choose(problem(8, 14336, 4096), H200).m <= 32
    assert choose(problem(1024, 14336, 4096), H200).along("mn") == (128, 256)
    assert choose(problem(1024, 14336, 4096, wide=True), H200).along("mn") == (64, 128)


def test_two_products_share_registers_and_shared_memory() -> None:
    """A gated product's tile has half the columns, of each of two matrices."""
    one = problem(1024, 14336, 4096)
    two = one._replace(products=2, results=3)
    assert choose(two, H200).along("mn") == (128, 128)
    assert choose(two._replace(itemsize=1, step_accumulator=True), H200).along("mn") == (64, 64)
    config = choose(two, H200)
    assert shared(two, config, H200) - shared(one, config, H200) == config.stages * config.n * config.k * 2
    every = ranked(two, H200)
    assert len(every) > 8
    assert all(c.m * c.n * 2 <= 128 * 32 * c.warps and shared(two, c, H200) <= H200.shared for c in every)


def test_what_memory_bounds_is_not_cut_small() -> None:
    """Where every tile waits for the weights, those that are done in fewer and fuller rounds."""
    for extents in ((8, 14336, 4096), (8, 4096, 14336)):
        assert choose(problem(*extents)._replace(by_thread=True), A100).n >= 64


def test_one_token_occupies_most_of_the_chip() -> None:
    """Four rows are in at most four of 32 groups, so the matrices' columns are cut into more tiles."""
    rows = GroupedTensor(ShapeDtypeStruct((4, 2880), jnp.bfloat16), ShapeDtypeStruct((32,), jnp.int32))
    found = ragged.explain(rows, ShapeDtypeStruct((32, 2880, 2880), jnp.bfloat16), device="NVIDIA H200")
    forward, dgrad = found.plan().config, found.plan("by lhs").config
    assert isinstance(forward, GpuConfig) and isinstance(dgrad, GpuConfig)
    assert 4 * -(-2880 // forward.n) > H200.multiprocessors / 2
    assert 4 * -(-2880 // dgrad.k) > H200.multiprocessors / 2


def test_few_rows_and_columns_split_the_contracted_dim() -> None:
    """Not if there are enough tiles, or few steps; nor by a letter that is ragged, or before an epilogue."""
    router = problem(64, 128, 7168, groups=1)._replace(splits=True)
    config = choose(router, H200)
    assert 64 // config.m * 128 // config.n * config.splits > H200.multiprocessors / 4
    assert choose(router._replace(splits=False), H200).splits == 1
    for r, c, k in ((1, 4096, 14336), (4096, 128, 7168), (64, 128, 256)):
        assert choose(problem(r, c, k)._replace(splits=True), H200).splits == 1
    assert {each.splits for each in ranked(router, H200)[:16]} == {config.splits, 1, 2, 4}
    assert {each.splits for each in ranked(router._replace(splits=False), H200)} == {1}


def test_parts_that_are_asked_for() -> None:
    """None leaves their number to the library, whatever else is asked for; but of given tiles, none is split."""
    rows = GroupedTensor(ShapeDtypeStruct((64, 7168), jnp.bfloat16), ShapeDtypeStruct((1,), jnp.int32))
    w, tiles = ShapeDtypeStruct((1, 7168, 128), jnp.bfloat16), {"m": 32, "k": 64, "n": 32}

    def splits(**fields: Any) -> int | None:
        found = ragged.explain(rows, w, device="NVIDIA H200", backend=GpuConfig(**fields)).plan().config
        assert isinstance(found, GpuConfig)
        return found.splits

    assert splits() > 1 and splits(band=4) == splits()
    assert (splits(splits=1), splits(**tiles), splits(**tiles, splits=2)) == (1, 1, 2)


@pytest.mark.parametrize("band", [3, 2**31])
def test_bands_of_any_height(band: int) -> None:
    """Higher than the tiles of all rows: one band."""
    x = GroupedTensor(jnp.ones((160, 32)), jnp.array([70, 0, 90], jnp.int32))
    config = GpuConfig(m=16, k=16, n=16, warps=4, stages=2, band=band, interpret=True)
    y = ragged.matmul(x, jnp.arange(1.0, 4.0)[:, None, None] * jnp.ones((3, 32, 48)), backend=config)
    np.testing.assert_array_equal(y.data, 32 * np.repeat([1, 3], [70, 90])[:, None] * np.ones((1, 48)))


def test_positions_fit_int32() -> None:
    """The kernel adds a tile to a position along a dim, and two positions."""
    rows, w = (ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2**30 + 16, 16), (4, 16, 16)))
    found = ragged.explain(GroupedTensor(rows, ShapeDtypeStruct((4,), jnp.int32)), w, device="NVIDIA H200")
    assert found.plan().backend == "xla" and "a dim of 1073741840" in str(found)


def test_a_tile_that_is_asked_for_is_halved_until_it_fits() -> None:
    """Along its longest side; the contracted one of 8-bit operands is never below what tensor cores take."""
    assert fit(problem(512, 512, 512), (128, 64, 64), H200).along("mnk") == (128, 64, 64)
    large = fit(problem(4096, 4096, 4096), (1024, 1024, 256), L4)
    assert large.along("mnk") < (1024, 1024, 256) and shared(problem(4096, 4096, 4096), large, L4) <= L4.shared
    assert fit(problem(64, 64, 64, itemsize=1), (16, 16, 16), H200).k == 32


def test_min_k() -> None:
    assert [triton_tiling.min_k(bits) for bits in (4, 8, 16, 32)] == [64, 32, 16, 16]


def test_programs_at_a_time() -> None:
    """As many as fit, unless the configuration says how many."""
    p = problem(64, 64, 1024)
    config = choose(p, H200)
    assert resident(p, config, H200) > 1
    assert [resident(p, replace(config, programs=n), H200) for n in (1, 2)] == [1, 2]
