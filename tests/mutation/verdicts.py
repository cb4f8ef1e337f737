"""Verdicts on survivors: "equivalent" or "open", with a reason, or "killed" with the test that was written since."""

# ruff: noqa: E501

VERDICTS: dict[str, str] = {
    "ragged/backends/tpu/scales.py: (lane == first // blocks[0].extent) -> (lane == at // blocks[0].extent)": "killed by `test_scales_of_a_group_that_begins_in_a_tile`",
    "ragged/backends/tpu/scales.py: pl.ds(first // blocks[1].extent, 1) -> pl.ds(at // blocks[1].extent, 1)": "killed by `test_scales_of_a_group_that_begins_in_a_tile`",
    "ragged/backends/tpu/tiled.py: side.tile - first -> side.tile": "killed by `test_more_products`, a long test",
    "ragged/backends/gpu/kernel.py: tl.load(offset + element * SIZES.offset_stride) -> tl.load(offset)": "killed by `test_more_products`, a long test",
    "ragged/backends/gpu/kernel.py: depth += size_k -> depth = size_k": "killed by `test_more_products`, a long test",
    "ragged/backends/gpu/kernel.py: _rows(a_source, e, a_k, step * TILE_K + TILE_K, -> _rows(a_source, e, a_k, step * TILE_K,": "killed by `test_epilogues`",
    "ragged/backends/gpu/kernel.py: tl.load(up_tensor + _tensor_scale( -> tl.load(b_tensor + _tensor_scale(": "killed by `test_a_global_scale_for_each_group_on_a_gpu`",
    'ragged/ops/gated.py: if len(shape := getattr(w, "shape", ())) < 2 or shape[-1] % 2: -> if len(shape := getattr(w, "shape", ())) < 2 and shape[-1] % 2:': "killed by `test_the_page_is_what_calls_print`, a long test",
    'ragged/primitive/sharding.py: Operand(of.lhs, jax.tree.map(lambda array: "." * array.ndim, x.lhs.scales)), -> Operand(of.lhs, jax.tree.map(lambda array: "." // array.ndim, x.lhs.scales)),': "killed by `test_recipes` in `test_partition.py`, a long test that the time limit left out",
    "ragged/tensor/arithmetic.py: is_scalar = all(n == 1 for n in value.shape[1:]) -> is_scalar = all(n == 1 for n in value.shape[ 0:])": "equivalent: the same values, broadcast earlier",
}
