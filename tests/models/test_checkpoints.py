"""`examples/load_checkpoint.py` and the number formats of checkpoints: bit for bit, there and back."""

import json
import re
import struct
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ragged
from ragged import GroupedTensor, Scaling
from tests.four_bits import E2M1_VALUES
from tests.models.blocks import ROOT, example

FORMATS = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
Tensors = dict[str, tuple[str, np.ndarray]]
"""By name: the format, and the bits, uint8 `[*shape, bytes]`."""


def write(path: Path, tensors: Tensors) -> None:
    """The published format: 8 bytes with the length of a header in JSON, the header, and all tensors' bytes."""
    header, end = {}, 0
    for name, (code, x) in tensors.items():
        header[name] = {"dtype": code, "shape": x.shape[:-1], "data_offsets": [end, end := end + x.nbytes]}
    text = json.dumps({"__metadata__": {"any": "text"}} | header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(x.tobytes() for _, x in tensors.values()))


def read(path: Path) -> Tensors:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, found = json.loads(data[8 : 8 + size]), {}
    assert header.pop("__metadata__") == {"format": "pt"}  # transformers requires it
    for name, x in header.items():
        start, end = (8 + size + n for n in x["data_offsets"])
        bits = np.frombuffer(data[start:end], np.uint8)
        found[name] = x["dtype"], bits.reshape(*x["shape"], np.dtype(FORMATS[x["dtype"]]).itemsize)
    return found


# Tiny models. All extents differ, so that no transposed tensor fits.
SIZES = {"vocab_size": 11, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6}
MIXTRAL = SIZES | {"intermediate_size": 10, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 5}
GPT_OSS = MIXTRAL | {"model_type": "gpt_oss", "intermediate_size": 96}
DEEPSEEK = SIZES | {"model_type": "deepseek_v3", "intermediate_size": 130, "moe_intermediate_size": 12}
DEEPSEEK |= {"n_routed_experts": 4, "n_shared_experts": 3, "first_k_dense_replace": 1, "num_key_value_heads": 6}
DEEPSEEK |= {"q_lora_rank": 14, "kv_lora_rank": 16, "qk_nope_head_dim": 7, "qk_rope_head_dim": 2, "v_head_dim": 9}
MODELS = {
    "mixtral": MIXTRAL | {"model_type": "mixtral"},
    "gpt_oss": GPT_OSS,
    "gpt_oss mxfp4": GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}},
    "deepseek_v3": DEEPSEEK | {"quantization_config": None},
    "deepseek_v3 without dense layers": DEEPSEEK | {"first_k_dense_replace": 0, "q_lora_rank": None},
    "deepseek_v3 without experts": DEEPSEEK | {"first_k_dense_replace": 3},
    "deepseek_v3 fp8": DEEPSEEK | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
}


def shapes_of(kind: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, formats and shapes in the published checkpoints, written out for these sizes."""
    d, out = 64, {"model.embed_tokens.weight": (11, 64), "model.norm.weight": (64,), "lm_head.weight": (11, 64)}
    formats = {}
    for i in range(3):
        layer = f"model.layers.{i}."
        out |= {f"{layer}input_layernorm.weight": (d,), f"{layer}post_attention_layernorm.weight": (d,)}
        if kind.startswith("deepseek"):
            a = f"{layer}self_attn."
            if MODELS[kind]["q_lora_rank"] is None:
                out |= {f"{a}q_proj.weight": (54, d)}
            else:
                out |= {f"{a}q_a_proj.weight": (14, d), f"{a}q_a_layernorm.weight": (14,)} | {
                    f"{a}q_b_proj.weight": (54, 14)
                }
            out |= {f"{a}kv_a_proj_with_mqa.weight": (18, d), f"{a}kv_a_layernorm.weight": (16,)}
            out |= {f"{a}kv_b_proj.weight": (96, 16), f"{a}o_proj.weight": (d, 54)}
            is_dense = i < MODELS[kind]["first_k_dense_replace"]
            widths = (
                {"mlp": 130} if is_dense else {"mlp.shared_experts": 36} | {f"mlp.experts.{e}": 12 for e in range(4)}
            )
            for name, h in widths.items():
                out |= {f"{layer}{name}.{n}_proj.weight": (h, d) for n in ("gate", "up")}
                out |= {f"{layer}{name}.down_proj.weight": (d, h)}
            if not is_dense:
                out |= {f"{layer}mlp.gate.weight": (4, d), f"{layer}mlp.gate.e_score_correction_bias": (4,)}
            continue
        shapes = {"q": (30, d), "k": (10, d), "v": (10, d), "o": (d, 30)}
        out |= {f"{layer}self_attn.{n}_proj.weight": shape for n, shape in shapes.items()}
        if kind == "mixtral":
            moe = f"{layer}block_sparse_moe."
            out |= {f"{moe}gate.weight": (4, d)}
            for e in range(4):
                out |= {f"{moe}experts.{e}.{n}.weight": (d, 10) if n == "w2" else (10, d) for n in ("w1", "w2", "w3")}
            continue
        out |= {f"{layer}self_attn.{n}_proj.bias": shape[:1] for n, shape in shapes.items()}
        out |= {f"{layer}self_attn.sinks": (6,), f"{layer}mlp.router.weight": (4, d), f"{layer}mlp.router.bias": (4,)}
        moe = f"{layer}mlp.experts."
        out |= {f"{moe}gate_up_proj_bias": (4, 192), f"{moe}down_proj_bias": (4, d)}
        if kind == "gpt_oss":
            out |= {f"{moe}gate_up_proj": (4, d, 192), f"{moe}down_proj": (4, 96, d)}
        else:
            quantised = {f"{moe}gate_up_proj_blocks": (4, 192, 2, 16), f"{moe}gate_up_proj_scales": (4, 192, 2)}
            quantised |= {f"{moe}down_proj_blocks": (4, d, 3, 16), f"{moe}down_proj_scales": (4, d, 3)}
            out, formats = out | quantised, formats | dict.fromkeys(quantised, "U8")
    if kind == "deepseek_v3 fp8":
        for name, shape in {n: s for n, s in out.items() if "_proj" in n}.items():
            formats |= {name: "F8_E4M3", f"{name}_scale_inv": "F32"}
            out[f"{name}_scale_inv"] = tuple(-(-n // 128) for n in shape)
    return {name: (formats.get(name, "BF16"), shape) for name, shape in out.items()}


def random_tensors(kind: str, rng: np.random.Generator) -> Tensors:
    """Random bits, so NaN and infinities too."""
    of = shapes_of(kind)
    sizes = {name: (*shape, np.dtype(FORMATS[code]).itemsize) for name, (code, shape) in of.items()}
    return {name: (code, rng.integers(0, 256, sizes[name], np.uint8)) for name, (code, _) in of.items()}


def put(folder: Path, config: dict[str, Any], tensors: Tensors, files: int) -> None:
    """A checkpoint of one file without an index, or of several files with one."""
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        return write(folder / "model.safetensors", tensors)
    names = [*tensors]
    parts = {f"model-{i + 1:05}-of-{files:05}.safetensors": names[i::files] for i in range(files)}
    for file, held in parts.items():
        write(folder / file, {name: tensors[name] for name in held})
    file_of = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


def bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return np.frombuffer(x.tobytes(), np.uint8).reshape(*x.shape, x.dtype.itemsize)


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    """From one file and from several; each array is the stack of its tensors; what is written has the same bits."""
    module, rng = example("load_checkpoint"), np.random.default_rng(0)
    dense = MODELS[kind].get("first_k_dense_replace", 0)
    for files in (1, 4):
        tensors, folder = random_tensors(kind, rng), tmp_path / str(files)
        folder.mkdir()
        put(folder, MODELS[kind], tensors, files)
        config, arrays = module.load(folder)
        assert config == MODELS[kind]
        for name, array in arrays.items():
            for i in range(3):  # one of each stack, by its numbers
                at = {"layer": i, "dense": i % max(dense, 1), "expert": (i + 2) % 4}
                at["sparse"] = dense + i % max(3 - dense, 1)
                index = tuple(
                    at[key] - dense * (key == "sparse")
                    for key in ("layer", "dense", "sparse", "expert")
                    if f"{{{key}}}" in name
                )
                code, want = tensors[name.format(**at)]
                assert array.dtype == FORMATS[code] and (bits(array[index]) == want).all()
        assert sum(array.nbytes for array in arrays.values()) == sum(x.nbytes for _, x in tensors.values())
        for file_bytes in (10**9, 20_000):
            back = tmp_path / f"back {files} {file_bytes}"
            back.mkdir()
            module.save(back, config, {name: jnp.asarray(x) for name, x in arrays.items()}, file_bytes)
            index = json.loads((back / "model.safetensors.index.json").read_text())
            written = {file: read(back / file) for file in {*index["weight_map"].values()}}
            assert (len(written) > 2) == (file_bytes == 20_000)
            found = {name: x for file in written.values() for name, x in file.items()}
            assert found.keys() == tensors.keys() == index["weight_map"].keys()
            assert index["metadata"]["total_size"] == sum(x.nbytes for _, x in found.values())
            for name, (code, x) in tensors.items():
                assert found[name][0] == code and (found[name][1] == x).all()
                assert name in written[index["weight_map"][name]]
            again = module.load(back)
            assert again[0] == config and all((bits(again[1][name]) == bits(x)).all() for name, x in arrays.items())


def test_one_error_lists_what_is_wrong(tmp_path: Path) -> None:
    """Missing, extra and misshapen tensors, of wrong shape or format; the same of arrays that are written."""
    module, rng = example("load_checkpoint"), np.random.default_rng(0)
    tensors, folder = random_tensors("gpt_oss mxfp4", rng), tmp_path
    layer = "model.layers.1.mlp."
    code, router = tensors[f"{layer}router.weight"]
    tensors[f"{layer}router.weight"] = code, router.swapaxes(0, 1)
    tensors[f"{layer}experts.down_proj_scales"] = "BF16", tensors[f"{layer}experts.down_proj_scales"][1].repeat(2, -1)
    del tensors["lm_head.weight"], tensors["model.layers.2.self_attn.sinks"]
    tensors["model.layers.3.self_attn.sinks"] = "BF16", rng.integers(0, 256, (6, 2), np.uint8)
    put(folder, MODELS["gpt_oss mxfp4"], tensors, 3)
    wrong = {
        "missing: lm_head.weight",
        "missing: model.layers.2.self_attn.sinks",
        "extra: model.layers.3.self_attn.sinks",
        f"misshapen: {layer}router.weight is bfloat16 [64, 4], not float32 or float16 or bfloat16 [4, 64]",
        f"misshapen: {layer}experts.down_proj_scales is bfloat16 [4, 64, 3], not uint8 [4, 64, 3]",
        "mixed: model.layers.{layer}.mlp.experts.down_proj_scales is bfloat16 and uint8",
    }
    with pytest.raises(ValueError, match=r"these tensors don't fit config\.json") as error:
        module.load(folder)
    assert {*str(error.value).splitlines()[1:]} == wrong
    with pytest.raises(ValueError, match=r"these tensors don't fit config\.json") as error:
        module.load(folder, skip=r"model\.layers\.3\.")
    assert {*str(error.value).splitlines()[1:]} == {each for each in wrong if "extra" not in each}

    whole = tmp_path / "whole"
    whole.mkdir()
    put(whole, MODELS["mixtral"], random_tensors("mixtral", rng), 1)
    config, arrays = module.load(whole)
    arrays["lm_head.weight"] = arrays["lm_head.weight"].T
    del arrays["model.norm.weight"]
    arrays["other"] = np.zeros(3)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ValueError, match=r"these tensors don't fit config\.json") as error:
        module.save(out, config, arrays)
    assert sorted(line.split()[0] for line in str(error.value).splitlines()[1:]) == ["extra:", "misshapen:", "missing:"]
    assert not [*out.iterdir()]


def test_other_files(tmp_path: Path) -> None:
    """A checkpoint of another family or of another quantisation, and files that were cut off or are missing."""
    module, rng = example("load_checkpoint"), np.random.default_rng(0)
    tensors = random_tensors("mixtral", rng)
    put(tmp_path, MODELS["mixtral"] | {"model_type": "llama"}, tensors, 1)
    with pytest.raises(ValueError, match=r"config\.json is of 'llama'\. Supported are 'mixtral', 'gpt_oss'"):
        module.load(tmp_path)
    put(tmp_path, MODELS["gpt_oss"] | {"quantization_config": {"quant_method": "awq"}}, tensors, 1)
    with pytest.raises(ValueError, match=r"config\.json is of 'gpt_oss awq'"):
        module.load(tmp_path)
    put(tmp_path, MODELS["gpt_oss"], tensors, 1)
    with pytest.raises(ValueError, match=r"extra: .*w3\.weight\n(.*\n)*missing: .*\.0\.mlp\.router\.weight"):
        module.load(tmp_path)
    put(tmp_path, MODELS["mixtral"], tensors, 2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is incomplete"):
        module.load(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        module.load(tmp_path)


def test_what_would_be_wrong_silently(tmp_path: Path) -> None:
    """Other numbers than the file has, or than are in the arrays; and errors that say nothing of the file."""
    module, rng = example("load_checkpoint"), np.random.default_rng(0)
    config, tensors = MODELS["mixtral"], random_tensors("mixtral", rng)

    def fails(message: str, config: Any = config, tensors: Tensors = tensors, files: int = 1) -> None:
        put(tmp_path, config, tensors, files)
        with pytest.raises(ValueError, match=message):
            module.load(str(tmp_path))

    expert = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    for code, dtype in {"F32": np.float32, "F16": np.float16}.items():
        other = code, bits(np.ones(tensors[expert][1].shape[:-1], dtype))
        fails(r"mixed: .*{layer}\..*{expert}\.w1\.weight is bfloat16 and float", tensors=tensors | {expert: other})
    for code, size in {"I8": 1, "I16": 2, "BOOL": 1, "F8_E8M0": 1}.items():
        extra = code, np.zeros((2, 3, size), np.uint8)
        fails("file:\nextra: more$|json:\nextra: more$", tensors=tensors | {"more": extra})
        fails("misshapen: model.norm.weight", tensors=tensors | {"model.norm.weight": extra})
    for key in ("model_type", "hidden_size", "num_local_experts", "vocab_size"):
        fails(f"config.json has no '{key}'", {name: x for name, x in config.items() if name != key})
        fails(f"config.json has no '{key}'", config | {key: None})
    fails("tie_word_embeddings", config | {"tie_word_embeddings": True})

    file = tmp_path / "model.safetensors"
    header = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
    others = [b"{}", b"[]", header, header.replace(b"[2]", b"3"), header.replace(b'"shape": [2], ', b"")]
    others += [header.replace(b"[0, 4]", b"[0]"), b"[" * 10**5]
    whole = [struct.pack("<Q", len(text)) + text + b"1234" * (b"a" in text) for text in others[1:]]
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"
    for content in (b"", b"abc", pointer, others[0], *whole):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors is incomplete, or not a safetensors file"):
            module.load(tmp_path)
    file.unlink()

    put(tmp_path, config, tensors, 3)  # a tensor in two files, and one in another file than the index says
    index = tmp_path / "model.safetensors.index.json"
    first, second = (f"model-{i:05}-of-00003.safetensors" for i in (1, 2))
    write(tmp_path / first, {name: tensors[name] for name in [*[*tensors][::3], expert]})
    file_of = json.loads(index.read_text())["weight_map"]
    assert file_of[expert] != first
    for given in (file_of, {name: file for name, file in file_of.items() if name != expert}):
        index.write_text(json.dumps({"weight_map": given}))
        with pytest.raises(ValueError, match=f"{expert} is in .* but also in another file"):
            module.load(tmp_path)
    put(tmp_path, config, tensors, 3)
    index.write_text(json.dumps({"weight_map": file_of | {expert: second if file_of[expert] != second else first}}))
    with pytest.raises(ValueError, match=f"{expert} is in "):
        module.load(tmp_path)

    put(tmp_path, config, tensors, 3)
    _, arrays = module.load(str(tmp_path))
    swapped = {name: x.astype(np.float32).astype(">f4") for name, x in arrays.items()}
    with pytest.raises(ValueError, match="file_bytes is 0"):
        module.save(tmp_path, config, swapped, 0)
    for old in tmp_path.iterdir():
        old.unlink()
    put(tmp_path, config, tensors, 1)
    module.save(str(tmp_path), config, swapped)
    assert not file.exists()  # Others would read it, not the index.
    for name, x in module.load(tmp_path)[1].items():
        np.testing.assert_array_equal(x, swapped[name])


def page(name: str) -> dict[str, Any]:
    """The functions in the block of the page on quantisation that defines `name`."""
    text = (ROOT / "docs" / "quantisation.md").read_text()
    code = next(block for block in text.split("```python\n")[1:] if f"def {name}" in block)
    code = re.split(r"\n\n\n(?=blocks|packed)", code)[0]
    names: dict[str, Any] = {"jnp": jnp, "GroupedTensor": GroupedTensor, "Scaling": Scaling}
    exec(code, names)
    return names


def halves(packed: np.ndarray) -> np.ndarray:
    """The two halves of each byte, the low one first."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_awq_and_gptq(format: str) -> None:
    """Random weights, packed as these formats say: their values, exactly."""
    rng, (g, into, out, block) = np.random.default_rng(0), (2, 64, 48, 16)
    codes, zeros = (rng.integers(0, 16, (g, n, out)) for n in (into, into // block))
    scales = rng.uniform(0.5, 2, (g, into // block, out)).astype(np.float16)
    shifts = 4 * np.arange(8)
    if format == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # the column, of eight, that is stored in each four bits
        stored = [z.reshape(g, -1, out // 8, 8)[..., order] << shifts for z in (codes, zeros)]
    else:
        along = codes.reshape(g, into // 8, 8, out) << shifts[:, None]
        stored = [np.moveaxis(along, 2, 3), (np.maximum(zeros, 1) - 1).reshape(g, -1, out // 8, 8) << shifts]
        zeros = np.maximum(zeros, 1)
    qweight, qzeros = (jnp.asarray(z.sum(-1).astype(np.uint32).view(np.int32)) for z in stored)
    w = page(format)[format](qweight, qzeros, jnp.asarray(scales))
    values = (codes - zeros.repeat(block, 1)) * scales.astype(np.float32).repeat(block, 1)
    assert w.dtype == "uint4" and w.shape == (g, into, out)
    np.testing.assert_array_equal(w.dequantize().data, values)


@pytest.mark.long
def test_number_formats() -> None:
    """Weights of random bits: their values and products, no copy of the weights, and the bits come back.

    Gate and up of one tensor too: its halves, or alternating rows.
    """
    rng, of, (g, out, into) = np.random.default_rng(0), page("mxfp4"), (3, 256, 96)
    codes = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
    blocks, packed = (rng.integers(0, 256, (g, out, *shape), np.uint8) for shape in ((3, 16), (48,)))
    powers = rng.integers(120, 130, (g, out, 3), np.uint8)
    floats, inverse = rng.uniform(size=(g, out, 3)).astype(np.float16), rng.uniform(size=(g, 2, 1)).astype(np.float32)
    eights = rng.integers(0, 256, (g, out, into), np.uint8) & 0xF7  # without NaN
    eights = eights.view(ml_dtypes.float8_e4m3fn)
    fours = halves(packed).astype(np.int64)
    ints = np.where(fours > 7, fours - 16, fours) * floats.astype(np.float64).repeat(32, 2)
    powers_of_two = np.ldexp(1.0, powers.astype(int) - 127).repeat(32, 2)
    high_first = partial(of["int4"], low_first=False)
    halved, alternating = (np.s_[:, : out // 2], np.s_[:, out // 2 :]), (np.s_[:, ::2], np.s_[:, 1::2])
    of_blocks = np.s_[:, :1], np.s_[:, 1:]  # 128 rows share a scale
    cases: list[tuple[Any, ...]] = [  # how, data, scales, values; and gate and up: rows of the values and of the scales
        (of["mxfp4"], blocks, powers, codes[halves(blocks)].reshape(g, out, into) * powers_of_two, alternating, None),
        (of["int4"], packed, floats, ints, halved, None),
        (high_first, packed << 4 | packed >> 4, floats, ints, None, None),
        (
            of["fp8"],
            eights,
            inverse,
            eights.astype(np.float64) * inverse.repeat(128, 1).repeat(into, 2),
            halved,
            of_blocks,
        ),
    ]
    x, sizes = rng.integers(-4, 5, (16, into)).astype(np.float32), (5, 0, 9)
    rows = GroupedTensor(jnp.asarray(x), jnp.array(sizes, jnp.int32))
    owner = np.repeat(np.arange(g), sizes)
    for wrap, data, scales, values, part, of_scales in cases:
        stored = jnp.asarray(data), jnp.asarray(scales)
        program = jax.jit(lambda *stored, wrap=wrap: wrap(*stored).mT).lower(*stored).compile()
        memory, w = program.memory_analysis(), program(*stored)
        widened = scales.nbytes * (scales.dtype == np.float16)  # scales of integers become float32
        assert memory.output_size_in_bytes <= memory.argument_size_in_bytes + widened + 64  # with pointers
        assert memory.temp_size_in_bytes <= (data.nbytes if wrap is high_first else 0)
        assert (np.asarray(w.dequantize().data) == values.astype(np.float32)).all()
        back = np.asarray(w.data.view(jnp.uint8))
        back = back << 4 | back >> 4 if wrap is high_first else back
        assert (bits(w.scales).size == scales.nbytes + widened) and (back.ravel() == data.view(np.uint8).ravel()).all()
        if part is None:
            continue

        def gated(*stored: Any, wrap: Any = wrap, parts: Any = (part, of_scales or part)) -> Any:
            gate, up = (wrap(stored[0][i], stored[1][j]) for i, j in zip(*parts, strict=True))
            return ragged.gated_matmul(rows, gate, up, activation=None).data

        y, total = np.asarray(jax.jit(gated)(*stored), np.float64), sum(sizes)
        terms = x[:total, None].astype(np.float64) * values[owner]  # [rows, out, in]
        want, size = terms.sum(-1), 2.0**-21 * np.abs(terms).sum(-1)  # eight roundings of float32
        (gate, up), (of_gate, of_up) = ([each[i] for i in part] for each in (want, size))
        bound = np.abs(gate) * of_up + np.abs(up) * of_gate + of_gate * of_up + 2.0**-22 * np.abs(gate * up)
        assert (np.abs(y[:total] - gate * up) <= bound).all() and not y[total:].any()
