"""The blocks and models of `examples/models.py` agree with the published implementations, whose values are recorded."""

import re
from pathlib import Path

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
    """A window without kinds of layers is in all layers, as in Mixtral. What the example doesn't have raises, and what
    gpt-oss's own implementation has other defaults for."""
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
    angles = models.rotary(config | {"rope_parameters": yarn}, jnp.arange(9))[0]
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0}  # the defaults
    np.testing.assert_array_equal(models.rotary(config | {"rope_parameters": yarn}, jnp.arange(9))[0], angles)
    assert jnp.all(jnp.isfinite(angles))
    linear = {"rope_type": "linear", "rope_theta": 1e4}
    for rope in (linear, yarn | {"mscale": 1.0}, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}):
        with pytest.raises(NotImplementedError):
            models.rotary(config | {"rope_parameters": rope}, jnp.arange(9))
    with pytest.raises(NotImplementedError):
        models.logits(config | {"rope_parameters": linear}, arrays, ids, lengths, 9)
    gpt_oss = blocks.recorded("gpt_oss")["whole/config"]
    for name in ("layer_types", "sliding_window", "rope_parameters"):
        without = {key: value for key, value in gpt_oss.items() if key != name}
        with pytest.raises(ValueError, match=f"config.json has no '{name}'"):
            models.logits(without, arrays, ids, lengths, 9)


@pytest.mark.parametrize("name", blocks.NAMES)
def test_options_of_blocks(name: str) -> None:
    """The activation of the configuration, except in gpt-oss; of one expert a token, a weight of 1 where it is divided
    by the sum."""
    config, weights = blocks.recorded(name)["config"], blocks.part(name, "block/w/")
    config = config | {"hidden_act": "gelu_pytorch_tanh", "num_experts_per_tok": 1}
    block = blocks.example("models").BLOCKS[name](config, jax.tree.map(jnp.asarray, weights))
    found = {each.activation for each in (block.experts, block.shared) if each is not None}
    assert found == {"gelu_tanh"} or name == "gpt_oss"
    assert block.router.top_k == 1 and block.router.normalize == (name not in ("olmoe", "llama4"))


@pytest.mark.long
def test_text_that_ends_at_the_longest(tmp_path: Path) -> None:
    """The tokens of a sequence are the same beside one that has no room for more."""
    module = blocks.example("finetune_checkpoint")
    module.random_checkpoint(tmp_path, np.random.default_rng(3))
    config, arrays = module.load(tmp_path)
    arrays = jax.tree.map(jnp.asarray, arrays)
    ids = jnp.zeros((2, 8), jnp.int32).at[0, :6].set(jnp.arange(6)).at[1, :2].set(7)
    both, alone = (module.generate(config, arrays, ids, jnp.array(lengths), 5) for lengths in ([6, 2], [1, 2]))
    np.testing.assert_array_equal(both[1], alone[1])
    assert both[0, :6].tolist() == [*range(6)] and not both[1, 7] and alone[0, 1:6].tolist() != ids[0, 1:6].tolist()


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
