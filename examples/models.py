"""The MoE blocks of six model families as `ragged.nn.MoE`, and Mixtral and gpt-oss as a whole, on packed sequences.

A block is made of the configuration of a checkpoint and the arrays of one layer, with the names, layouts and number
formats of the checkpoint. `load_checkpoint.py` reads them. Nothing is copied under `jit`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from varlen_attention import attention

from ragged import GroupedTensor, Scaling
from ragged.nn import Experts, MoE, Router

type Config = dict[str, Any]
type Arrays = dict[str, Any]
LAYER = "model.layers.{layer}."


def mixtral(c: Config, w: Arrays, recipe: Any = None, **over: Any) -> MoE:
    """`recipe` is for the products, and `over` are options of `MoE`, such as mesh axes."""
    names = (f"block_sparse_moe.experts.{{expert}}.{name}.weight" for name in ("w1", "w3", "w2"))
    gate, up, down = (GroupedTensor(w[name]).mT for name in names)  # [in, out] of [out, in], read in place
    router = router_of(w["block_sparse_moe.gate.weight"], top_k=c["num_experts_per_tok"], normalize=True)
    return MoE(router, experts_of(gate, up, down, activation=activation(c), recipe=recipe), **over)


def qwen3_moe(c: Config, w: Arrays, recipe: Any = None, **over: Any) -> MoE:
    """OLMoE is the same."""
    router = router_of(w["mlp.gate.weight"], top_k=c["num_experts_per_tok"], normalize=c["norm_topk_prob"])
    experts = experts_of(*projections(w, "mlp.experts.{expert}."), activation=activation(c), recipe=recipe)
    return MoE(router, experts, **over)


def gpt_oss(c: Config, w: Arrays, recipe: Any = None, **over: Any) -> MoE:
    both, down = (w.get(f"mlp.experts.{name}_proj") for name in ("gate_up", "down"))
    if both is not None:  # [in, out], and columns alternate
        gate, up = both[..., ::2], both[..., 1::2]
    else:
        blocks, scales = (w[f"mlp.experts.gate_up_proj_{name}"] for name in ("blocks", "scales"))
        gate, up = (mxfp4(blocks[:, i::2], scales[:, i::2]) for i in (0, 1))
        down = mxfp4(w["mlp.experts.down_proj_blocks"], w["mlp.experts.down_proj_scales"])
    bias = w["mlp.experts.gate_up_proj_bias"]
    biases = bias[:, ::2], bias[:, 1::2], w["mlp.experts.down_proj_bias"]
    swiglu = partial(clamped, alpha=c.get("swiglu_alpha", 1.702), limit=c.get("swiglu_limit", 7.0))
    router = router_of(w["mlp.router.weight"], w["mlp.router.bias"], top_k=c["num_experts_per_tok"], normalize=True)
    return MoE(router, experts_of(gate, up, down, biases, activation=swiglu, recipe=recipe), **over)


def deepseek_v3(c: Config, w: Arrays, recipe: Any = None, **over: Any) -> MoE:
    options = {
        "score": "sigmoid",
        "normalize": c["norm_topk_prob"],
        "epsilon": 1e-20,
        "scale": c["routed_scaling_factor"],
    }
    options |= {"top_k": c["num_experts_per_tok"], "groups": (c["n_group"], c["topk_group"])}
    bias = w["mlp.gate.e_score_correction_bias"]
    router = router_of(w["mlp.gate.weight"], **options, use_selection_bias=True).with_selection_bias(bias)
    names, options = ("experts.{expert}", "shared_experts"), {"activation": activation(c), "recipe": recipe}
    experts, shared = (experts_of(*projections(w, f"mlp.{name}."), **options) for name in names)
    return MoE(router, experts, shared, **over)


def llama4(c: Config, w: Arrays, recipe: Any = None, **over: Any) -> MoE:
    gate, up = jnp.split(w["feed_forward.experts.gate_up_proj"], 2, axis=-1)  # [in, out]
    down, options = w["feed_forward.experts.down_proj"], {"activation": activation(c), "recipe": recipe}
    experts = experts_of(gate, up, down, **options)
    shared = experts_of(*projections(w, "feed_forward.shared_expert."), **options)
    options = {"top_k": c["num_experts_per_tok"], "score": "sigmoid", "normalize": False}
    return MoE(router_of(w["feed_forward.router.weight"], **options), experts, shared, weigh_inputs=True, **over)


def activation(c: Config) -> str:
    name = c.get("hidden_act") or "silu"
    return {"gelu_pytorch_tanh": "gelu_tanh"}.get(name, name)


def clamped(gate: Array, up: Array, alpha: float, limit: float) -> Array:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1.0) * gate * jax.nn.sigmoid(alpha * gate)


BLOCKS: dict[str, Callable[..., MoE]] = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "olmoe": qwen3_moe}
BLOCKS |= {"gpt_oss": gpt_oss, "deepseek_v3": deepseek_v3, "llama4": llama4}


def router_of(weight: Array, bias: Array | None = None, **options: Any) -> Router:
    """The router with a weight `[experts, d]`."""
    (num_experts, d), use_bias = weight.shape, bias is not None
    router = eqx.filter_eval_shape(Router, d, num_experts, use_bias=use_bias, key=jax.random.key(0), **options)
    return eqx.tree_at(
        lambda r: [r.weight, r.bias] if use_bias else [r.weight], router, [weight.T, bias][: 1 + use_bias]
    )


def experts_of(gate: Any, up: Any, down: Any, biases: tuple[Array, ...] = (), **options: Any) -> Experts:
    """Experts with weights `[experts, d, hidden]`, twice, and `[experts, hidden, d]`: arrays or uniform tensors."""
    num_experts, d, hidden = up.shape
    options |= {"use_bias": bool(biases), "key": jax.random.key(0)}
    experts = eqx.filter_eval_shape(Experts, d, hidden, num_experts, **options)  # no numbers yet

    def arrays(e: Experts) -> list[Any]:
        layers = [layer for layer in (e.gate, e.up, e.down) if layer is not None]
        return [layer.weight for layer in layers] + [layer.bias for layer in layers if biases]

    return eqx.tree_at(arrays, experts, [gate, up, down, *biases])


def projections(w: Arrays, prefix: str) -> list[Any]:
    """Gate, up and down, `[experts, in, out]`, of weights `[out, in]` or `[experts, out, in]`, maybe in 8 bits."""
    out = []
    for name in (f"{prefix}{each}_proj.weight" for each in ("gate", "up", "down")):
        arrays = [x if x.ndim == 3 else x[None] for x in (w.get(name), w.get(f"{name}_scale_inv")) if x is not None]
        out.append(fp8(*arrays) if len(arrays) == 2 else GroupedTensor(arrays[0]).mT)
    return out


def fp8(weight: Any, scale_inv: Any) -> GroupedTensor:
    return GroupedTensor(weight, scales=scale_inv, scaling=Scaling((128, 128))).mT


def mxfp4(blocks: Any, scales: Any) -> GroupedTensor:
    data = jnp.asarray(blocks).view(jnp.float4_e2m1fn).reshape(*blocks.shape[:2], -1)  # NumPy's `view` doesn't unpack
    return GroupedTensor(data, scales=jnp.asarray(scales).view(jnp.float8_e8m0fnu), scaling=Scaling.of("mx")).mT


def logits(
    c: Config, p: Arrays, ids: Int[Array, " rows"], lengths: Int[Array, " sequences"], longest: int, **options: Any
) -> Float[Array, "rows vocab"]:
    """The logits of the next token, for packed sequences, of Mixtral or gpt-oss. `options` are those of the blocks.

    Sequence `i` has `lengths[i]` tokens, at most `longest`. Rows of the tail are undefined.
    """
    # Without these, the published implementation of gpt-oss has defaults of its own.
    required = {"layer_types", "sliding_window", "rope_parameters"} if c["model_type"] == "gpt_oss" else set()
    if missing := sorted(required - {*c, *(["rope_parameters"] if c.get("rope_scaling") else [])}):
        raise ValueError(f"config.json has no {missing[0]!r}.")
    c = c | {"head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]}
    kinds = c.get("layer_types") or c["num_hidden_layers"] * ["sliding_attention"]
    is_sliding = [kind == "sliding_attention" for kind in kinds]
    windows = np.where(is_sliding, c.get("sliding_window") or longest, longest).astype(np.int32)
    x = p["model.embed_tokens.weight"][ids]
    angles = rotary(c, GroupedTensor(x, lengths).positions)

    def layer(x: Array, given: tuple[Arrays, Array]) -> tuple[Array, None]:
        w, window = given
        rows = norm(c, x, w["input_layernorm.weight"])
        q, k, v = (linear(w, f"self_attn.{name}_proj", rows).reshape(len(x), -1, c["head_dim"]) for name in "qkv")
        y = attention(rotated(q, *angles), rotated(k, *angles), v, lengths, longest, window, w.get("self_attn.sinks"))
        x = x + linear(w, "self_attn.o_proj", y.reshape(len(x), -1))
        rows = GroupedTensor(norm(c, x, w["post_attention_layernorm.weight"]), lengths)
        return x + BLOCKS[c["model_type"]](c, w, **options)(rows)[0].data, None

    layers = {name.removeprefix(LAYER): w for name, w in p.items() if name.startswith(LAYER)}
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, (layers, windows))
    return norm(c, x, p["model.norm.weight"]) @ p["lm_head.weight"].T


def norm(c: Config, x: Array, weight: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=1, keepdims=True) + c["rms_norm_eps"])
    return (weight.astype(jnp.float32)[None] * wide).astype(x.dtype)


def linear(w: Arrays, name: str, x: Array) -> Array:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"][None] if f"{name}.bias" in w else y


def rotary(c: Config, positions: Int[Array, " rows"]) -> tuple[Array, Array]:
    """`(cos, sin)` of the positions' angles, `[rows, 1, head_dim / 2]`: RoPE, or YaRN (arXiv:2309.00071)."""
    rope = c.get("rope_parameters") or {**(c.get("rope_scaling") or {}), "rope_theta": c["rope_theta"]}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) not in ("default", "yarn"):
        raise NotImplementedError(f"rope_type {kind!r}: this example has RoPE and YaRN.")
    for option in ("attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor"):
        if rope.get(option) is not None:
            raise NotImplementedError(f"{option}={rope[option]!r}: this example doesn't have this option of {kind!r}.")
    size, theta, factor = c["head_dim"], rope["rope_theta"], 1.0
    frequencies = theta ** -(np.arange(0, size, 2) / size)
    if kind == "yarn":

        def dim(rotations: float) -> float:  # the dim that turns this often within the original context
            turns = rope["original_max_position_embeddings"] / (2 * math.pi * rotations)
            return size * math.log(turns) / (2 * math.log(theta))

        fast, slow = (rope.get("beta_fast") or 32.0), (rope.get("beta_slow") or 1.0)
        low, high = max(dim(fast), 0), min(dim(slow), size - 1)
        low, high = (math.floor(low), math.ceil(high)) if rope.get("truncate", True) else (low, high)
        slow = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
        frequencies = frequencies * (slow / rope["factor"] + 1 - slow)
        factor = 0.1 * math.log(rope["factor"]) + 1.0
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies.astype(np.float32)[None, None]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotated(x: Float[Array, "rows heads size"], cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
