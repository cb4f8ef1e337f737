"""Verdicts on survivors: "equivalent" or "open", with a reason, or "killed" with the test that was written since."""

# ruff: noqa: E501

VERDICTS: dict[str, str] = {
    "ragged/backends/tpu/launch.py: base.apply_epilogue(self.launch.call, self.rescale(total, x_scales, scales.values), existing) -> self.rescale(base.apply_epilogue(self.launch.call, total, existing), x_scales, scales.values)": "killed by `test_existing_values_are_not_scaled`",
    "ragged/backends/tpu/launch.py: each.extent, begin, width, axis, dtype -> each.extent, 0, width, axis, dtype": "killed by `test_scales_of_later_blocks`",
    "ragged/backends/tpu/scales.py: _pick(ref, (start + at) // scales.extent, axis) -> _pick(ref, start // scales.extent, axis)": "killed by `test_scales_of_later_blocks`",
    "ragged/backends/tpu/scales.py: (lane == first // blocks[0].extent) -> (lane == at // blocks[0].extent)": "killed by `test_scales_of_a_group_that_begins_in_a_tile`",
    "ragged/backends/tpu/scales.py: pl.ds(first // blocks[1].extent, 1) -> pl.ds(at // blocks[1].extent, 1)": "killed by `test_scales_of_a_group_that_begins_in_a_tile`",
    "ragged/backends/tpu/tiled.py: column * scales.extent < end - first -> column * scales.extent <= end - first": "killed by `test_a_group_ends_with_a_block`",
    "ragged/backends/gpu/kernel.py: tl.load(offset + element * SIZES.offset_stride) -> tl.load(offset)": "killed by `test_each_batch_element_has_its_groups`",
    "ragged/backends/gpu/kernel.py: depth += size_k -> depth = size_k": "killed by `test_a_sum_whose_last_element_has_an_empty_group`",
    "ragged/backends/gpu/kernel.py: _rows(a_source, e, a_k, step * TILE_K + TILE_K, -> _rows(a_source, e, a_k, step * TILE_K,": "killed by `test_a_wgrad_of_several_steps_of_gathered_rows`",
    "ragged/backends/gpu/kernel.py: tl.load(up_tensor + _tensor_scale( -> tl.load(b_tensor + _tensor_scale(": "killed by `test_four_bits_of_a_gate`, a long test that the time limit left out",
    "ragged/backends/gpu/kernel.py: block = tl.minimum(k + inner, A.k - 1) -> block = tl.minimum(inner, A.k - 1)": "killed by `test_scales_of_rows_that_are_summed`",
    "ragged/backends/gpu/kernel.py: return x if rest is None else tl.where((inner < rest)[None, :], x, 0.0) -> return x": "killed by `test_scales_of_rows_that_are_summed`",
    "ragged/backends/xla/backend.py: (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512), -> (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 511),": "equivalent: any tile sizes give the same result",
    "ragged/ops/gated.py: if both is None or recipes != (None, None) or gate.operands.rhs.data.ndim < 3: -> if both is None or recipes != (None, None) or gate.operands.rhs.data.ndim < 2:": "equivalent: only an unused argument was left out; this part of the condition is gone",
    'ragged/ops/gated.py: if len(shape := getattr(w, "shape", ())) < 2 or shape[-1] % 2: -> if len(shape := getattr(w, "shape", ())) < 2 and shape[-1] % 2:': "killed by `test_hints_without_a_second_weight`",
    "ragged/primitive/fused.py: if explicit_mesh(leaves, call.out_spec) is not None or not is_of_one_device(leaves): -> if explicit_mesh(leaves, call.out_spec) is not None and not is_of_one_device(leaves):": "killed by `test_sharded_operands_are_composed`",
    'ragged/primitive/sharding.py: Operand(of.lhs, jax.tree.map(lambda array: "." * array.ndim, x.lhs.scales)), -> Operand(of.lhs, jax.tree.map(lambda array: "." // array.ndim, x.lhs.scales)),': "killed by `test_recipes` in `test_partition.py`, a long test that the time limit left out",
    "ragged/tensor/arithmetic.py: is_scalar = all(n == 1 for n in value.shape[1:]) -> is_scalar = all(n == 1 for n in value.shape[ 0:])": "equivalent: the same values, broadcast earlier",
}
