"""From a checkpoint to a fine-tuned one: loads gpt-oss, generates tokens greedily, trains one step, and saves.

    uv run examples/finetune_checkpoint.py    about a minute on two CPU cores

The script makes a small checkpoint with random weights itself, in the names and formats of gpt-oss. Its experts stay in
4 bits (MXFP4) in memory, in products and in the checkpoint that is written. Only the arrays of floats are trained.
"""

import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from load_checkpoint import load, save, stacks
from models import Arrays, Config, logits

import ragged
from ragged import GroupedTensor

CONFIG: Config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}, "vocab_size": 64}
CONFIG |= {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4, "head_dim": 16}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
CONFIG |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
CONFIG |= {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}


def random_checkpoint(folder: Path, rng: np.random.Generator) -> None:
    arrays = {}
    for name, stack in stacks(CONFIG).items():
        shape = stack.lead + stack.shape
        if name.endswith("_blocks"):  # [layers, experts, out, in / 32, 16]: bytes of two numbers
            w = rng.normal(size=(shape[0] * shape[1], shape[2], shape[3] * 32), scale=(shape[3] * 32) ** -0.5)
            q = ragged.quantize(jnp.asarray(w, jnp.float32), jnp.float4_e2m1fn, "mx")
            arrays[name] = q.data.view(jnp.uint8).reshape(shape)
            arrays[name.replace("_blocks", "_scales")] = jnp.asarray(q.scales).view(jnp.uint8).reshape(shape[:-1])
        elif not name.endswith("_scales"):
            values = np.ones(shape) if "norm" in name else rng.normal(size=shape, scale=shape[-1] ** -0.5)
            arrays[name] = values.astype(jnp.bfloat16)
    save(folder, CONFIG, arrays)


@eqx.filter_jit
def generate(
    config: Config, arrays: Arrays, ids: Int[Array, "sequences max_len"], lengths: Int[Array, " sequences"], n: int
) -> Int[Array, "sequences max_len"]:
    """The prompts, of at least one token each, and up to `n` more tokens of each, which end at `max_len`.

    Each step runs the whole model, without a cache of keys and values.
    """
    sequences, max_len = ids.shape

    def step(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        ids, lengths = state
        packed = GroupedTensor.from_padded(ids[:, :, None], lengths)
        scores = packed.with_data(logits(config, arrays, packed.data[:, 0], lengths, max_len))
        newest = jnp.argmax(scores.data[packed.offsets[1:] - 1], axis=1)  # of the last row of each sequence
        ids = ids.at[jnp.arange(sequences), lengths].set(newest.astype(ids.dtype), mode="drop")
        return (ids, jnp.minimum(lengths + 1, max_len)), None

    return jax.lax.scan(step, (ids, lengths), length=n)[0][0]


@eqx.filter_jit
def train_step(config: Config, arrays: Arrays, text: GroupedTensor, longest: int, rate: float) -> tuple[Arrays, Array]:
    """The arrays after a step of gradient descent, and the mean loss of the next token before it."""
    ids, lengths, group = text.data[:, 0], text.packed_dims, text.group_ids

    @eqx.filter_value_and_grad  # of the arrays of floats
    def loss_and_gradients(arrays: Arrays) -> Array:
        scores = jax.nn.log_softmax(logits(config, arrays, ids, lengths, longest).astype(jnp.float32))
        of_next = jnp.take_along_axis(scores[:-1], ids[1:, None], axis=1)[:, 0]
        has_next = (group[:-1] == group[1:]) & (group[1:] < text.num_groups)
        return -jnp.sum(jnp.where(has_next, of_next, 0.0)) / jnp.sum(has_next, dtype=jnp.float32)

    loss, gradients = loss_and_gradients(arrays)
    return eqx.apply_updates(arrays, jax.tree.map(lambda g: -rate * g, gradients)), loss


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_checkpoint(folder, np.random.default_rng(0))
        config, arrays = load(folder)
        arrays = jax.tree.map(jnp.asarray, arrays)
        prompts, lengths = (
            jnp.zeros((2, 12), jnp.int32).at[0, :5].set(jnp.arange(5)).at[1, :2].set(7),
            jnp.array([5, 2]),
        )
        texts = generate(config, arrays, prompts, lengths, 6)
        for text, length in zip(texts.tolist(), lengths.tolist(), strict=True):
            print(f"{text[:length]} goes on with {text[length : length + 6]}")
        packed = GroupedTensor.from_padded(texts[:, :, None], lengths + 6)
        for step in range(2):
            arrays, loss = train_step(config, arrays, packed, texts.shape[1], 0.1)
            print(f"loss before step {step}: {loss:.3f}")
        save(folder, config, arrays)
        same = all((arrays[name] == x).all() for name, x in load(folder)[1].items())
        print(f"what is saved is loaded bit for bit: {same}")


if __name__ == "__main__":
    main()
