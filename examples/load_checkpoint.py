"""Reads and writes checkpoints of Mixtral, gpt-oss and DeepSeek-V3: safetensors, in one file or many, bit for bit.

`load` returns NumPy arrays with the names, layouts and number formats of the checkpoint, listed in `checkpoints.toml`.
A name with placeholders, such as `model.layers.{layer}.mlp.gate.weight`, has the stack over layers and experts.
`docs/quantisation.md` shows how products take quantised weights without a copy.
"""

import json
import math
import re
import tomllib
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

type Config = dict[str, Any]
type Arrays = dict[str, np.ndarray]
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8"}
CODES |= {"float64": "F64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL"}
DTYPES = {code: np.dtype(jnp.dtype(name)) for name, code in CODES.items()}
INDEX = "model.safetensors.index.json"


class Entries(dict[str, Any]):
    def __missing__(self, key: str) -> None:
        raise ValueError(f"config.json has no {key!r}.")


class Stack(NamedTuple):
    names: list[str]  # of the tensors in an array
    lead: tuple[int, ...]  # numbers of layers and of experts
    shape: tuple[int, ...]  # of each tensor
    dtypes: tuple[str, ...]


def stacks(config: Config) -> dict[str, Stack]:
    """The arrays of the model with this configuration, by name."""
    tables = tomllib.loads(Path(__file__).with_name("checkpoints.toml").read_text())
    c = Entries({key: value for key, value in config.items() if value is not None})
    kind = f"{c['model_type']} {c.get('quantization_config', {}).get('quant_method', '')}".strip()
    if c.get("tie_word_embeddings"):
        raise ValueError("config.json has tie_word_embeddings: supported are models with an lm_head of their own.")
    if kind not in tables["models"]:
        raise ValueError(f"config.json is of {kind!r}. Supported are {', '.join(map(repr, tables['models']))}.")
    c.setdefault("head_dim", c["hidden_size"] // c["num_attention_heads"])
    experts, first = c.get("n_routed_experts") or c["num_local_experts"], c.get("first_k_dense_replace", 0)
    ranges = {"layer": (layers := range(c["num_hidden_layers"])), "expert": range(experts)}
    ranges |= {"dense": layers[:first], "sparse": layers[first:]}
    absent = {name for name in tables if f"no {name}" in tables and name not in c}  # such as "q_lora_rank"
    chosen = [f"no {name}" if name in absent else name for name in tables["models"][kind]]

    def extent(formula: str) -> int:  # such as "2*hidden_size", "kv_lora_rank+v_head_dim", "hidden_size/32"
        sums, _, divisor = formula.partition("/")
        terms = (term.split("*") for term in sums.split("+"))
        return sum(math.prod(int(x) if x.isdigit() else c[x] for x in term) for term in terms) // int(divisor or 1)

    out = {}
    for name, formulas in (item for table in chosen for item in tables[table].items()):
        keys, shape = re.findall(r"{(\w+)}", name), tuple(map(extent, formulas.split()))
        names = [name.format(**dict(zip(keys, each, strict=True))) for each in product(*(ranges[k] for k in keys))]
        dtypes = ("uint8",) if name.endswith(("_blocks", "_scales")) else ("float32", "float16", "bfloat16")
        stack = Stack(names, tuple(len(ranges[k]) for k in keys), shape, dtypes)
        if not names:  # There may be no dense or no sparse layers.
            continue
        if kind.endswith("fp8") and "_proj" in name:
            scales, blocks = [f"{n}_scale_inv" for n in names], tuple(-(-n // 128) for n in shape)
            out[f"{name}_scale_inv"] = stack._replace(names=scales, shape=blocks, dtypes=("float32",))
            stack = stack._replace(dtypes=("float8_e4m3fn",))
        out[name] = stack
    return out


def check(expected: dict[str, Stack], found: Arrays, skip: str = "$.") -> None:
    """Raises one error with all tensors that are missing, extra or misshapen, and all arrays of mixed dtypes."""
    known = {name: stack for stack in expected.values() for name in stack.names}
    wrong = [f"missing: {name}" for name in known if name not in found]
    wrong += [f"extra: {name}" for name in found if name not in known and not re.match(skip, name)]
    for name in known.keys() & found.keys():
        (_, _, shape, dtypes), x = known[name], found[name]
        if x.shape != shape or x.dtype.name not in dtypes:
            wrong.append(f"misshapen: {name} is {x.dtype.name} {[*x.shape]}, not {' or '.join(dtypes)} {[*shape]}")
    for key, stack in expected.items():
        if len(dtypes := {found[name].dtype.name for name in stack.names if name in found}) > 1:
            wrong.append(f"mixed: {key} is {' and '.join(sorted(dtypes))}")
    if wrong:
        raise ValueError("\n".join(["these tensors don't fit config.json:", *sorted(wrong)]))


def tensors(path: Path) -> Arrays:
    """The tensors of a file, by name. They are read when they are used."""
    try:
        data = np.memmap(path, mode="r")
        start = 8 + int(data[:8].view("<u8")[0])
        header = {name: x for name, x in json.loads(bytes(data[8:start])).items() if name != "__metadata__"}
        if len(data) != start + max((x["data_offsets"][1] for x in header.values()), default=0):
            raise ValueError("the file is shorter or longer than its header says")
        parts = {name: data[slice(*(start + n for n in x["data_offsets"]))] for name, x in header.items()}
        known = {name: DTYPES[x["dtype"]] for name, x in header.items() if x["dtype"] in DTYPES}  # else bytes
        return parts | {name: parts[name].view(dtype).reshape(header[name]["shape"]) for name, dtype in known.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is incomplete, or not a safetensors file: maybe a Git LFS pointer.") from error


def load(folder: Path | str, skip: str = "$.") -> tuple[Config, Arrays]:
    """`(config, arrays)`, after a check of all names and shapes. `skip`: a pattern for names to leave out."""
    folder, found = Path(folder), {}
    config, index = json.loads((folder / "config.json").read_text()), folder / INDEX
    file_of = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    for file in sorted({*file_of.values()}) or ["model.safetensors"]:
        for name, x in tensors(folder / file).items():
            if name in found or file_of.get(name, file) != file:
                raise ValueError(f"{name} is in {file}, but also in another file, or {INDEX} says so.")
            found[name] = x
    check(expected := stacks(config), found, skip)
    return config, {k: np.stack([found[n] for n in s.names]).reshape(s.lead + s.shape) for k, s in expected.items()}


def save(folder: Path | str, config: Config, arrays: dict[str, Any], file_bytes: int = 5 * 10**9) -> None:
    """Writes `config.json`, the tensors in files of about `file_bytes`, and their index."""
    if file_bytes < 1:
        raise ValueError(f"file_bytes is {file_bytes}: pass a positive number.")
    folder, expected, files, total = Path(folder), stacks(config), {}, 0
    found = {key: np.asarray(x) for key, x in arrays.items()}
    for key, s in expected.items():
        if key in found and found[key].shape[: len(s.lead)] == s.lead:
            found |= zip(s.names, (x := found.pop(key)).reshape(-1, *x.shape[len(s.lead) :]), strict=True)
    check(expected, found)
    for name, x in found.items():
        files.setdefault(f"model-{total // file_bytes:05}.safetensors", {})[name] = x
        total += x.nbytes
    for file, held in files.items():
        ends = [0, *accumulate(x.nbytes for x in held.values())]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for (name, x), offsets in zip(held.items(), pairwise(ends), strict=True):
            header[name] = {"dtype": CODES[x.dtype.name], "shape": x.shape, "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that data is aligned
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.writelines(x.astype(x.dtype.newbyteorder("<")).tobytes() for x in held.values())
    (folder / "model.safetensors").unlink(missing_ok=True)  # of an earlier checkpoint: other readers prefer it
    file_of = {name: file for file, held in files.items() for name in held}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2))
