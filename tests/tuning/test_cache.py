"""The cache of configurations: keys, the file, and what it does with files and machines that it isn't meant for."""

import contextlib
import errno
import json
import os
import pwd
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import ragged
from ragged import GroupedTensor
from ragged.backends import cache
from ragged.backends.base import DEFAULT_TPU, Target
from ragged.primitive import lowering
from ragged.product.operands import Options
from ragged.tuning import Config, Found, GpuConfig, TpuConfig, XlaConfig, cache_entries, load_cache, save_cache, using
from ragged.tuning.products import BoundProduct, products_of
from tests.cases import INT8_ROWS, check_error
from tests.contract.machines import on, shapes

ROOT = Path(__file__).parent.parent.parent
X = GroupedTensor(jnp.ones((96, 16)), jnp.array([30, 0, 50, 8], jnp.int32))
W = jnp.ones((4, 16, 8))
MINE, TPU, GPU = XlaConfig(m=(48,)), TpuConfig(m=32, k=128, n=128), GpuConfig(m=32, k=32, n=64, warps=4, stages=2)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    ragged.tuning.clear_cache()
    yield
    ragged.tuning.clear_cache()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache's file, that isn't there yet, nor is its folder."""
    path = tmp_path / "place" / "tuning.json"
    monkeypatch.setenv(cache.VARIABLE, str(path))
    return path


def chosen(**options: Any) -> tuple[Any, str]:
    """The configuration of `X @ W`, and where it is from."""
    plan = ragged.explain(X, W, platform="cpu", **options).plan()
    return plan.config, plan.source


def entry(config: Config = MINE, date: str = "2026-01-01") -> Found:
    return Found(config, 1.0, 2.0, "even", date)


def known(*keys: str) -> None:
    """Puts entries into the cache, of a device that isn't this one."""
    cache.put({"cpu": {key: entry() for key in keys}})


def keys_of(x: Any = X, w: Any = W, **options: Any) -> tuple[str, str]:
    """The device's key, and that of a product."""
    (equation, _), *_ = products_of(lambda x, w: ragged.matmul(x, w, **options).data, (x, w), sizes=False)
    product = BoundProduct(equation)
    launch = product.launch()
    assert launch is not None
    device = cache.device_key(launch.target.device)
    assert device is not None
    return device, product.key(launch)


def remember(config: Config = MINE, **options: Any) -> None:
    """Puts a configuration of `X @ W` into the cache."""
    device, key = keys_of(**options)
    cache.put({device: {key: entry(config)}})


# Keys


def test_what_a_key_tells_apart() -> None:
    """Letters, dtypes, scales, extents, options; not by a few rows more or less."""

    def of(rows: int = 96, k: int = 16, groups: int = 4, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        return GroupedTensor(jnp.ones((rows, k), dtype), jnp.ones(groups, jnp.int32)), jnp.ones((groups, k, 8), dtype)

    (_, base), (_, highest) = keys_of(*of()), keys_of(*of(), precision="highest")
    assert keys_of(*of(rows=100))[1] == base
    options: tuple[dict[str, Any], ...] = (
        {"preferred_element_type": jnp.bfloat16},
        {"group_offset": jnp.int32(0)},
        {"existing_out": jnp.ones((96, 8))},
        {"activation": "silu"},
        {"activation": "silu", "bias": jnp.ones(8)},
        {"activation": "silu", "bias": jnp.ones((4, 8))},
    )
    others = [keys_of(*each)[1] for each in (of(rows=300), of(k=24), of(groups=9), of(dtype=jnp.bfloat16))]
    others += [highest, *(keys_of(*of(), **each)[1] for each in options)]
    for scaling in ("row", "group", (1, 32), "mx"):
        others.append(keys_of(ragged.quantize(X, jnp.float8_e4m3fn, scaling), W)[1])
    signed, unsigned = ragged.quantize(W, "int8", "row"), ragged.quantize(W, "int8", "row", symmetric=False)
    assert unsigned.zero_points is not None
    zeros = GroupedTensor(
        unsigned.data, scales=unsigned.scales, scaling=ragged.Scaling((1, None)), zero_points=jnp.ones((4, 16, 1))
    )
    others += [keys_of(X, each)[1] for each in (signed, unsigned, zeros)]
    assert len({base, *others}) == 1 + len(others)
    with jax.default_matmul_precision("highest"):
        assert keys_of(*of()) == keys_of(*of(), precision=jax.lax.Precision.HIGHEST)
        assert keys_of(*of())[1] == highest


@pytest.mark.parametrize("what", ["gathered rows", "blocks of tokens", "rows in int8", "many columns in int8"])
def test_what_is_measured_is_what_is_looked_up(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is of the operands as the backend takes them: rows dispatched, groups moved apart to whole blocks, rows
    quantised by the kernel or before it."""
    asked: list[str] = []
    lookup = cache.lookup

    def noted(call: Any, x: Any, device: Any, backend: str) -> Any:
        asked.append(cache.product_key(call, x, backend))
        return lookup(call, x, device, backend)

    monkeypatch.setattr(cache, "lookup", noted)
    if what == "gathered rows":
        rows = ragged.route(jnp.zeros((48, 2), jnp.int32), 4).gathered(jnp.ones((48, 16)))
        found, platform = products_of(lambda x, w: ragged.matmul(x, w).data, (rows, W), sizes=False), "cpu"
    elif "int8" in what:
        w = jnp.ones((4, 16, 2**17 if "many" in what else 8))
        product = partial(ragged.matmul, recipe=INT8_ROWS)
        found, platform = products_of(lambda x, w: product(x, w).data, (X, w), sizes=False), "tpu"
    else:
        x = GroupedTensor(jnp.ones((96, 64)), jnp.array([3, 0, 61], jnp.int32))
        loss = jax.grad(lambda w: jnp.sum(ragged.matmul(x, w, recipe="mxfp8").data))
        found, platform = products_of(loss, (jnp.ones((3, 64, 32)),), sizes=False), "tpu"
    for equation, _ in found:
        bound, call = BoundProduct(equation), equation.params["call"]
        asked.clear()
        launch = lowering.launch_of(platform, bound.operands, call, Target(device=DEFAULT_TPU))
        assert bound.key(launch) in asked
        assert "int8" not in what or (launch.details.cast is None) == ("many" in what)


def test_a_gpu_is_the_same_in_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured on it counts in maps over it too. A mesh doesn't say its compute capability."""
    own = SimpleNamespace(platform="gpu", device_kind="NVIDIA Thing", compute_capability="9.0", core_count=78)
    monkeypatch.setattr(jax, "devices", lambda: [own])
    seen = []
    for kind in (None, "NVIDIA Thing", "NVIDIA Other"):
        named = None if kind is None else AbstractDevice(kind, 78, "gpu")
        mesh = AbstractMesh((), (), abstract_device=named)
        with jax.sharding.use_abstract_mesh(mesh), lowering.target_of("cuda", Options()) as target:
            seen.append(target.device)
    assert seen == [("NVIDIA Thing 9.0", 78)] * 2 + [("NVIDIA Other", 78)]


# What is used


def test_fields_that_an_older_file_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the library's choice."""
    monkeypatch.setattr(cache, "lookup", lambda *_: GPU)
    with on("H200"):
        plan = ragged.explain(*shapes("forward", 4, rows=1000, k=256, n=384), platform="cuda").plan()
    assert (plan.config, plan.source) == (replace(GPU, splits=1), "cache")


def test_where_a_configuration_comes_from() -> None:
    """The call, then a context, then the cache, then the model; what no longer fits the buffer is no error."""
    other, another = XlaConfig(m=(16,)), XlaConfig(m=(32,))
    model, source = chosen()
    assert source == "model"
    remember()
    assert chosen() == (MINE, "cache")
    with using(other):
        assert chosen() == chosen(backend="xla") == (other, "using")
        assert chosen(backend=another) == (another, "backend")
        with using(cached=False):
            assert chosen() == (model, "model")
    assert chosen() == (MINE, "cache")
    ragged.tuning.clear_cache()
    remember(XlaConfig(m=(100,)))
    assert chosen() == (model, "model")


def test_a_product_whose_epilogue_is_computed_apart() -> None:
    """It is multiplied by the configuration that is known of the product with its epilogue."""
    remember(activation="silu")
    run = jax.jit(lambda x, w: ragged.matmul(x, w, activation="silu").data)
    assert "48x16xf32" in run.lower(X, W).as_text()


@pytest.mark.long
def test_the_file_survives_the_process(file: Path) -> None:
    """What is lowered in another one is by its configuration."""
    remember()
    code = """
import jax, jax.numpy as jnp, ragged
x = ragged.GroupedTensor(jnp.ones((96, 16)), jnp.array([30, 0, 50, 8], jnp.int32))
print(jax.jit(lambda x, w: ragged.matmul(x, w).data).lower(x, jnp.ones((4, 16, 8))).as_text().count("48x16xf32"))
print(len(ragged.tuning.cache_entries()), ragged.tuning.cache_path())
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    count, found = run.stdout.splitlines()
    assert int(count) > 0 and found == f"1 {file}", run.stderr


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, "off")
    assert ragged.tuning.cache_path() is None
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ragged.tuning.cache_path() == tmp_path / "ragged" / "tuning.json"
    remember()
    ragged.tuning.clear_cache()
    assert chosen() == (MINE, "cache")
    # Each process of several would read a file of its own.
    with monkeypatch.context() as several:
        several.setattr(jax, "process_count", lambda: 2)
        assert chosen()[1] == "model"

    # A container's user may have no entry: there is no file, and products run.
    def unknown(user: Any) -> Any:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert ragged.tuning.cache_path() is None
    known("a")
    assert [*cache_entries()] == ["cpu"] and chosen()[1] == "model"
    monkeypatch.setenv(cache.VARIABLE, "~nobody-of-that-name/tuning.json")
    assert ragged.tuning.cache_path() == Path("~nobody-of-that-name/tuning.json")
    assert chosen()[1] == "model"


# The file


RECORD = {"config": {"backend": "xla", "m": [16]}, "seconds": 1.0, "default_seconds": 1.0, "sizes": "", "date": ""}


def holding(**fields: Any) -> str:
    return json.dumps({"format": 1, "found": {"cpu": {"a": RECORD | fields}}})


NO_CACHE = "it is not a tuning cache."
INVALID = "its configuration for 'a' is not valid."


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda path: path.mkdir(), "it is not a regular file."),
        (os.mkfifo, "it is not a regular file."),
        (lambda path: path.write_bytes(b"\xff\xfe{"), NO_CACHE),
        *((lambda path, text=text: path.write_text(text), why) for text, why in (
            ("{", NO_CACHE),
            ("[" * 200_000, NO_CACHE),
            ('{"shopping": ["eggs"]}', NO_CACHE),
            ('{"format": 0, "found": {}}', "it has format 0, this version reads 1."),
            (holding(config={"backend": "xla", "z": 1}), INVALID),
            (holding(date=5), INVALID),
            (holding(sizes=None), INVALID),
            (holding(seconds="fast"), INVALID),
            (holding(default_seconds=float("nan")), INVALID),
            (holding(seconds=0), INVALID),
        )),
    ],
)  # fmt: skip
def test_a_file_that_is_no_cache(file: Path, make: Callable[[Path], Any], why: str) -> None:
    """It is reported once, ignored, and never written over; what is found stays in memory."""
    file.parent.mkdir()
    make(file)
    before = file.read_bytes() if file.is_file() else b""
    with pytest.warns(UserWarning) as warned:
        assert chosen()[1] == chosen()[1] == "model"
    assert len(warned) == 1 and f"the tuning cache {file} is ignored: {why}" in str(warned[0].message)
    with pytest.warns(UserWarning, match="is not written"):
        remember()
    assert chosen() == (MINE, "cache")
    assert not file.is_file() or file.read_bytes() == before


def test_a_file_that_can_not_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is something in its folder's place; or the disk is full: then the file stays, and nothing beside it."""
    file.parent.write_text("in the way")
    with pytest.warns(UserWarning, match="is not written"):
        remember()
    assert chosen() == (MINE, "cache")
    file.parent.unlink()
    known("a")

    def full(entries: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "text_of", full)
        with pytest.warns(UserWarning, match="is not written: .* No space left on device"):
            known("b")
    assert sorted(each.name for each in file.parent.iterdir()) == ["tuning.json", "tuning.json.lock"]
    assert {"a", "b"} <= {*cache_entries()["cpu"]}
    ragged.tuning.clear_cache()
    assert {*cache_entries()["cpu"]} == {"a"}


def test_a_file_that_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the permissions that files have, or that it had; a link to it stays one; another version of the same
    length and time is read anew."""
    file, link, other = tmp_path / "日本" / "tuning.json", tmp_path / "link.json", tmp_path / "other.json"
    link.symlink_to(file)
    monkeypatch.setenv(cache.VARIABLE, str(link))
    usual = tmp_path / "usual"
    usual.touch()
    known("a")
    assert link.is_symlink() and file.stat().st_mode == usual.stat().st_mode
    file.chmod(0o664)
    known("b")
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o664
    ragged.tuning.clear_cache()
    assert {*cache_entries()["cpu"]} == {"a", "b"}
    monkeypatch.setenv(cache.VARIABLE, str(usual))
    usual.unlink()
    for path, key in ((usual, "c"), (other, "d")):
        cache.write(path, {"cpu": {key: entry()}})
        os.utime(path, ns=(0, 0))
    assert [*cache_entries()["cpu"]] == ["c"]
    os.replace(other, usual)
    assert [*cache_entries()["cpu"]] == ["d"]


def test_merging(file: Path, tmp_path: Path) -> None:
    """What one machine found is another's; of two, the later. Nothing else is written over or read."""
    other, notes = tmp_path / "other.json", tmp_path / "notes.txt"
    cache.put({"cpu": {"a": entry(TPU, "2026-01-02"), "b": entry(TPU, "2026-01-02")}})
    save_cache(other)
    ragged.tuning.clear_cache()
    file.unlink()
    cache.put({"cpu": {"a": entry(GPU, "2026-01-03"), "b": entry(GPU, "2026-01-01"), "c": entry(GPU)}})
    assert load_cache(other) == 2
    for _ in range(2):  # in memory, and in the file
        assert {key: each.config for key, each in cache_entries()["cpu"].items()} == {"a": GPU, "b": TPU, "c": GPU}
        ragged.tuning.clear_cache()
    notes.write_text("mine")
    for call in (load_cache, save_cache):
        check_error(partial(call, notes), ValueError, NO_CACHE)
    assert notes.read_text() == "mine" and not notes.with_name("notes.txt.lock").exists()


def test_threads_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file too."""
    ready, merged = threading.Barrier(2), cache.merged

    def slowly(*entries: Any) -> Any:
        out = merged(*entries)
        with contextlib.suppress(threading.BrokenBarrierError):
            ready.wait(0.2)  # until both have read what there is, unless one waits for the other
        return out

    monkeypatch.setattr(cache, "merged", slowly)
    threads = [threading.Thread(target=known, args=(key,)) for key in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {*cache_entries()["cpu"]} == {"a", "b"}


WRITER = """
import os, signal, sys
from ragged.backends import cache
from ragged.tuning import Found, XlaConfig
if sys.argv[2:]:
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
for i in range(20):
    cache.put({"cpu": {f"{sys.argv[1]} {i}": Found(XlaConfig(m=(16,)), 1.0, 1.0, "even", "2026-01-01")}})
"""


@pytest.mark.long
def test_writers_at_once_lose_nothing(file: Path) -> None:
    """Processes that write many entries each; of one that is killed, the file is the old one, and nobody waits for its
    lock."""

    def start(*args: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", WRITER, *args], cwd=ROOT)

    started = [start(str(i)) for i in range(4)]
    assert [each.wait() for each in started] == [0] * 4
    assert len(cache_entries()["cpu"]) == 80
    assert sorted(each.name for each in file.parent.iterdir()) == ["tuning.json", "tuning.json.lock"]
    assert start("killed", "at once").wait() == -9
    known("c")
    ragged.tuning.clear_cache()
    assert len(cache_entries()["cpu"]) == 81


def test_records_as_json() -> None:
    """Through a file; numbers of NumPy are plain ints in a record."""
    sixteen: Any = np.int64(16)
    for config in (
        XlaConfig(m=(16, 32)),
        XlaConfig(m=(sixteen,), batched_rows=sixteen * 0),
        TPU,
        TpuConfig(m=sixteen, k=sixteen, n=sixteen),
        GPU,
        GpuConfig(m=16, k=16, n=16, warps=sixteen // 4, stages=2, programs=sixteen),
    ):
        text = cache.text_of({"cpu": {"a": entry(config)}})
        assert cache.parse(text)["cpu"]["a"].config == config
        assert not re.search(r"int\d|array", text)
