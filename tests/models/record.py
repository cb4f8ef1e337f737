"""Reference values of published models, with random weights: from transformers, in float32, on the CPU.

    uv run --group dev --group models python -m tests.models.record [MODEL ...]    compares with the committed files
    uv run --group dev --group models python -m tests.models.record [MODEL ...] --write    writes the files anew

Each file `recorded/MODEL.npz` has the configuration, inputs, results and cotangents; weights "w/NAME" and gradients
"g/NAME", with the names of `examples/load_checkpoint.py`. Mixtral and gpt-oss are whole models on sequences of
different lengths, one after another without padding. Of the others, and of these two, there is a block of experts.
"""

import importlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "recorded"
LENGTHS = (5, 1, 9)
TOKENS = sum(LENGTHS)
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
COMMON = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, **ATTENTION}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
# Classes of transformers, options of the configuration, and where the block of a layer is.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("Mixtral", {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}, "mlp"),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True},
        "mlp",
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False}, "mlp"),
    "gpt_oss": (
        "GptOss",
        {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
        "mlp",
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 0, "num_key_value_heads": 4, **MLA},
        "mlp",
    ),
    "llama4": (
        "Llama4",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 16},
        "feed_forward",
    ),
}
WHOLE = ("mixtral", "gpt_oss")
LIMIT = 0.75


def random_weights(model: Any, rng: np.random.Generator) -> None:
    """Weights that bfloat16 holds exactly, so that no rounding changes a router's choice."""
    torch: Any = importlib.import_module("torch")
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        scale = 1.0 if x.ndim < 2 else x.shape[-1] ** -0.5
        values = 1 + 0.2 * rng.normal(size=x.shape) if "norm" in name else rng.normal(size=x.shape) * scale
        x.data = torch.tensor(values, dtype=torch.float32).bfloat16().to(torch.float32)


def stacked(model: Any) -> dict[str, np.ndarray]:
    """The model's tensors as in a checkpoint, stacked over layers and experts."""
    loader = importlib.import_module("load_checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = {
            name: np.array(x) for file in Path(folder).glob("*.safetensors") for name, x in loader.tensors(file).items()
        }
    found: dict[str, dict[tuple[int, ...], np.ndarray]] = {}
    for name, x in tensors.items():
        numbers = tuple(map(int, re.findall(r"\.(\d+)\.", name)))
        key = re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", re.sub(r"\.layers\.\d+\.", ".layers.{layer}.", name))
        found.setdefault(key, {})[numbers] = x
    out = {}
    for key, parts in found.items():
        lead = tuple(1 + max(numbers[i] for numbers in parts) for i in range(len(next(iter(parts)))))
        out[key] = np.stack([parts[at] for at in np.ndindex(*lead)]).reshape(*lead, *next(iter(parts.values())).shape)
    return out


def with_gradients(model: Any) -> dict[str, np.ndarray]:
    """Weights "w/NAME" and their gradients "g/NAME", which have the names of a checkpoint too."""
    torch: Any = importlib.import_module("torch")
    out = {f"w/{name}": x for name, x in stacked(model).items()}
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            x.data = torch.zeros_like(x) if x.grad is None else x.grad
    return out | {f"g/{name}": x for name, x in stacked(model).items()}


def recorded(name: str) -> dict[str, np.ndarray]:
    """What a file holds, from transformers."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    rng, (cls, options, block) = np.random.default_rng(0), MODELS[name]
    text = "TextConfig" if name == "llama4" else "Config"
    config = getattr(transformers, cls + text)(**COMMON | options, attn_implementation="eager")
    model = getattr(transformers, f"{cls}ForCausalLM")(config).float().eval()
    random_weights(model, rng)
    out: dict[str, Any] = {"config": np.array(json.dumps(json.loads(config.to_json_string(use_diff=False))))}

    x = torch.tensor(rng.normal(size=(1, TOKENS, 32)), dtype=torch.float32).bfloat16().float().requires_grad_()
    dy = torch.tensor(rng.normal(size=(1, TOKENS, 32)), dtype=torch.float32)
    y = getattr(model.model.layers[0], block)(x)
    y = (y[0] if isinstance(y, tuple) else y).reshape(dy.shape)
    y.backward(dy)
    out |= {"block/x": x.detach()[0], "block/y": y.detach()[0], "block/dy": dy[0], "block/dx": x.grad[0]}
    of_block = with_gradients(model)
    layer = "model.layers.{layer}."
    for key, value in of_block.items():
        if re.search(r"layers\.\{layer\}\.(mlp|block_sparse_moe|feed_forward)\.", key):
            out["block/" + key.replace(layer, "")] = value[0]
    if name in WHOLE:
        random_weights(model, rng)
        model.zero_grad()
        if name == "gpt_oss":  # A limit that many gates exceed. Rounding would move some of the block's across it.
            config.swiglu_limit = LIMIT
            for layer_of_model in model.model.layers:
                layer_of_model.mlp.experts.limit = LIMIT
        out["whole/config"] = np.array(json.dumps(json.loads(config.to_json_string(use_diff=False))))
        ids = rng.integers(0, 32, TOKENS)
        dlogits = rng.normal(size=(TOKENS, 32)).astype(np.float32)
        logits, start = [], 0
        for n in LENGTHS:
            own = slice(start, start + n)
            each = model(torch.tensor(ids[None, own])).logits[0]
            each.backward(torch.tensor(dlogits[own]))
            logits.append(each.detach())
            start += n
        out |= {"ids": ids, "logits": torch.cat(logits), "dlogits": dlogits} | with_gradients(model)
    return {key: np.asarray(value) for key, value in out.items()}


def main() -> None:
    sys.path.insert(0, str(FOLDER.parent.parent.parent / "examples"))
    for name in [each for each in MODELS if each in sys.argv] or MODELS:
        found, path = recorded(name), FOLDER / f"{name}.npz"
        if "--write" in sys.argv:
            np.savez_compressed(path, allow_pickle=False, **found)  # pyright: ignore[reportArgumentType]
            print(name, path.stat().st_size, "bytes")
            continue
        with np.load(path) as committed:
            assert {*committed} == {*found}, {*committed} ^ {*found}
            for key in found:
                want = committed[key]
                if want.dtype.kind == "f":
                    error = np.abs(found[key] - want).max() / max(np.abs(want).max(), 1e-30)
                    assert found[key].shape == want.shape and error < 1e-6, (name, key, error)
                elif not key.endswith("config"):
                    assert (found[key] == want).all(), (name, key)
        print(name, "is the same")


if __name__ == "__main__":
    main()
