"""The blocks and models of `examples/models.py` agree with the published implementations, whose values are recorded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import thinned
from tests.models import blocks


@pytest.mark.long
@pytest.mark.parametrize(("name", "way"), [("gpt_oss", "jit"), *thinned(4, blocks.NAMES, blocks.BOUNDS)])
def test_blocks(name: str, way: str) -> None:
    """Results, and gradients of tokens, router and experts. On a mesh, a padded token is NaN."""
    found = blocks.errors(name, way)
    assert len(found) >= 6 and max(found.values()) < blocks.BOUNDS[way], found


@pytest.mark.long
@pytest.mark.parametrize("name", blocks.WHOLE)
def test_whole_models(name: str) -> None:
    """Logits of packed sequences of different lengths, and gradients of all arrays."""
    found = blocks.whole(name)
    assert len(found) >= 13 and max(found.values()) < 5e-6, found


@pytest.mark.long
def test_configurations() -> None:
    """A window without kinds of layers is in all layers, as in Mixtral. What the example doesn't have raises."""
    models, recorded = blocks.example("models"), blocks.recorded("mixtral")
    config, arrays = recorded["whole/config"], jax.tree.map(jnp.asarray, blocks.part("mixtral", "w/"))
    kinds = {"layer_types": ["sliding_attention"] * config["num_hidden_layers"]}
    ids, lengths = jnp.arange(9) % config["vocab_size"], jnp.array([9], jnp.int32)
    every, want, full = (
        models.logits(config | more, arrays, ids, lengths, 9)
        for more in ({"sliding_window": 2}, kinds | {"sliding_window": 2}, {"sliding_window": None})
    )
    np.testing.assert_array_equal(every, want)
    assert np.max(np.abs(every - full)) > 1e-3
    without = {key: value for key, value in config.items() if key != "head_dim"} | {"sliding_window": 2}
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    np.testing.assert_array_equal(models.logits(without, arrays, ids, lengths, 9), every)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0}
    assert jnp.all(jnp.isfinite(models.rotary(config | {"rope_parameters": yarn}, jnp.arange(9))[0]))
    linear = {"rope_type": "linear", "rope_theta": 1e4}
    for rope in (linear, yarn | {"mscale": 1.0}, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}):
        with pytest.raises(NotImplementedError):
            models.rotary(config | {"rope_parameters": rope}, jnp.arange(9))
    for wrong in ({"rope_parameters": linear}, {"hidden_act": "gelu"}):
        with pytest.raises(NotImplementedError):
            models.logits(config | wrong, arrays, ids, lengths, 9)


@pytest.mark.long
@pytest.mark.parametrize("name", blocks.NAMES)
def test_kernels(name: str) -> None:
    """On TPU and GPU: gate, up, biases and activation are one kernel, down another; only the router's dot is XLA's."""
    expected = 4 if any("shared" in key for key in blocks.part(name, "block/w/")) else 2
    for platform in ("tpu", "cuda"):
        assert blocks.kernels(name, platform) == (expected, 1)


def test_the_page() -> None:
    """The table has the lines of code and kernels of each block, and errors within the tests' bounds."""
    text = blocks.PAGE.read_text()
    for name, shown in blocks.NAMES.items():
        (row,) = re.findall(rf"^\| {re.escape(shown)} \| (.*%.*) \|$", text, re.MULTILINE)
        y, gradient, other, bfloat16, rowwise, kernels, lines = row.split(" | ")
        assert 0 < max(map(float, (y, gradient, other))) <= blocks.BOUNDS["jit"]
        for way, cell in (("bfloat16", bfloat16), ("rowwise", rowwise)):
            assert 0 < max(float(x) for x in re.findall(r"[\d.]+", cell)) <= 100 * blocks.BOUNDS[way]
        expected = 4 if any("shared" in key for key in blocks.part(name, "block/w/")) else 2
        assert kernels == f"{expected} · {expected}" and int(lines) == blocks.lines(name)
    for name in blocks.WHOLE:
        (row,) = re.findall(rf"^\| {blocks.NAMES[name]} \| (\S* \| \S*) \|$", text, re.MULTILINE)
        assert 0 < max(map(float, row.split(" | "))) <= 5e-6


@pytest.mark.long
def test_four_bits_of_a_model() -> None:
    """gpt-oss with experts in MXFP4 is gpt-oss with the numbers that they stand for; floats have the same gradients."""
    models, config = blocks.example("models"), blocks.recorded("gpt_oss")["config"]
    rng, dense, packed = np.random.default_rng(0), {}, {}
    for name, x in blocks.part("gpt_oss", "w/").items():
        if not re.search("experts.*_proj$", name):
            dense[name] = packed[name] = jnp.asarray(x)
    config = config | {"intermediate_size": 32}
    layers, g, d, h = 2, 4, 32, 32
    for name, rows, columns in (("gate_up_proj", 2 * h, d), ("down_proj", d, h)):
        stored = rng.integers(0, 256, (layers, g, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(123, 126, stored.shape[:-1], np.uint8)
        key = f"model.layers.{{layer}}.mlp.experts.{name}"
        packed |= {f"{key}_blocks": jnp.asarray(stored), f"{key}_scales": jnp.asarray(scales)}
        values = [models.mxfp4(*map(jnp.asarray, each)).dequantize().data for each in zip(stored, scales, strict=True)]
        dense[key] = jnp.stack(values)  # [layers, g, in, out]
        bias = jnp.asarray(rng.normal(size=(layers, g, rows)), jnp.float32)
        dense[f"{key}_bias"] = packed[f"{key}_bias"] = bias
    ids, lengths = jnp.asarray(rng.integers(0, 32, 16), jnp.int32), jnp.array([7, 0, 6], jnp.int32)

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        floats = {name: x for name, x in arrays.items() if x.dtype == jnp.float32 and not name.endswith("_proj")}

        def of_floats(floats: dict[str, jax.Array]) -> jax.Array:
            return models.logits(config, arrays | floats, ids, lengths, 7)[:13]

        y, pull = jax.vjp(of_floats, floats)
        return y, pull(y)[0]

    (y, gradients), (want, expected) = jax.jit(run)(packed), jax.jit(run)(dense)
    assert blocks.error(y, np.asarray(want)) < 1e-5 and gradients.keys() == expected.keys() and len(gradients) > 15
    assert max(blocks.error(gradients[name], np.asarray(x)) for name, x in expected.items()) < 1e-5
