"""What tuning, `explain` and the command line do with files, calls and machines that they are not meant for."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import contextlib
import errno
import json
import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from ragged.__main__ import main
from ragged.backends import cache
from ragged.primitive import lowering
from ragged.product.operands import Options
from ragged.tuning import Config, Configs, Found, GpuConfig, TpuConfig, XlaConfig, autotune, candidates, search, using
from tests.cases import check_error
from tests.everywhere import INTERPRETED

pytestmark = pytest.mark.sampled(default=False)  # by default, others stand for these

ROOT = Path(__file__).parent.parent.parent
SIZES = jnp.array([30, 0, 50, 8], jnp.int32)
X = GroupedTensor(jnp.ones((96, 16)), SIZES)
W = jnp.ones((4, 16, 8))
TPU = TpuConfig(m=32, k=128, n=128)
quick = partial(autotune, seconds=1e-3, most=2, progress=False, again=True)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    cache.clear_cache()
    yield
    cache.clear_cache()


def forward(x: Any, w: Any, **options: Any) -> Any:
    return ragged.matmul(x, w, **options).data


def lower() -> None:
    """A product, which looks for the cache."""
    jax.jit(lambda x, w: forward(x, w)).lower(X, W)


def found(date: str = "2026-01-01") -> Found:
    return Found(XlaConfig(m=(16,)), 1.0, 1.0, "even", date)


# The cache's file


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry: there is no file, and products run."""

    def unknown(user: Any) -> Any:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", cache.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert ragged.tuning.cache_path() is None
    lower()
    cache.put({"cpu": {"a": found()}})
    assert [*ragged.tuning.cache_entries()] == ["cpu"]
    monkeypatch.setenv(cache.VARIABLE, "~nobody-of-that-name/tuning.json")
    assert ragged.tuning.cache_path() == Path("~nobody-of-that-name/tuning.json")
    lower()


RECORD = {"config": {"backend": "xla", "m": [16]}, "seconds": 1.0, "default_seconds": 1.0, "sizes": "", "date": ""}


def holding(**fields: Any) -> Callable[[Path], Any]:
    text = json.dumps({"format": 1, "found": {"cpu": {"a": RECORD | fields}}})
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda path: path.mkdir(), "it is not a regular file."),
        (lambda path: os.mkfifo(path), "it is not a regular file."),
        (lambda path: path.write_bytes(b"\xff\xfe{"), "it is not a tuning cache."),
        (lambda path: path.write_text("[" * 200_000), "it is not a tuning cache."),
        (holding(date=5), "its configuration for 'a' is not valid."),
        (holding(sizes=None), "its configuration for 'a' is not valid."),
        (holding(seconds="fast"), "its configuration for 'a' is not valid."),
        (holding(default_seconds=float("nan")), "its configuration for 'a' is not valid."),
        (holding(seconds=0), "its configuration for 'a' is not valid."),
    ],
)
def test_what_is_no_cache(make: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once; products run; what is found is kept."""
    file = tmp_path / "tuning.json"
    make(file)
    monkeypatch.setenv(cache.VARIABLE, str(file))
    with pytest.warns(UserWarning) as warned:
        lower()
        lower()
    assert len(warned) == 1 and f"the tuning cache {file} is ignored: {why}" in str(warned[0].message)
    with pytest.warns(UserWarning, match="is not written"):
        cache.put({"cpu": {"b": found()}})
    assert "b" in ragged.tuning.cache_entries()["cpu"]


def test_a_file_that_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the permissions that files have, or that it had; a link to it stays one."""
    file, link = tmp_path / "日本" / "tuning.json", tmp_path / "link.json"
    link.symlink_to(file)
    monkeypatch.setenv(cache.VARIABLE, str(link))
    usual = tmp_path / "usual"
    usual.touch()
    cache.put({"cpu": {"a": found()}})
    assert link.is_symlink() and file.stat().st_mode == usual.stat().st_mode
    file.chmod(0o664)
    cache.put({"cpu": {"b": found()}})
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o664
    cache.clear_cache()
    assert {*ragged.tuning.cache_entries()["cpu"]} == {"a", "b"}


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays, and nothing beside it; what is found is kept."""

    def full(entries: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "tuning.json"
    monkeypatch.setenv(cache.VARIABLE, str(file))
    cache.put({"cpu": {"a": found()}})
    monkeypatch.setattr(cache, "text_of", full)
    with pytest.warns(UserWarning, match="is not written: .* No space left on device"):
        cache.put({"cpu": {"b": found()}})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["tuning.json", "tuning.json.lock"]
    assert {*ragged.tuning.cache_entries()["cpu"]} == {"a", "b"}
    cache.clear_cache()
    assert {*ragged.tuning.cache_entries()["cpu"]} == {"a"}


def test_a_file_that_was_replaced_within_a_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same length and time, by another process."""
    file, other = tmp_path / "tuning.json", tmp_path / "other.json"
    monkeypatch.setenv(cache.VARIABLE, str(file))
    for path, key in ((file, "a"), (other, "b")):
        cache.write(path, {"cpu": {key: found()}})
        os.utime(path, ns=(0, 0))
    assert [*ragged.tuning.cache_entries()["cpu"]] == ["a"]
    os.replace(other, file)
    assert [*ragged.tuning.cache_entries()["cpu"]] == ["b"]


def test_threads_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file too."""
    monkeypatch.setenv(cache.VARIABLE, "off")
    ready, merged = threading.Barrier(2), cache.merged

    def slowly(*entries: Any) -> Any:
        out = merged(*entries)
        with contextlib.suppress(threading.BrokenBarrierError):
            ready.wait(0.2)  # until both have read what there is, unless one waits for the other
        return out

    monkeypatch.setattr(cache, "merged", slowly)
    threads = [threading.Thread(target=cache.put, args=({"cpu": {key: found()}},)) for key in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {*ragged.tuning.cache_entries()["cpu"]} == {"a", "b"}


KILLED = """
import os, signal, sys
from ragged.backends import cache
from ragged.product.config import XlaConfig
from tests.everywhere import INTERPRETED
def put(key):
    cache.put({"cpu": {key: cache.Found(XlaConfig(m=(16,)), 1.0, 1.0, "even", "2026-01-01")}})
put("a")
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
put("b")
"""


@pytest.mark.long
def test_a_writer_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the old one, and nobody waits for its lock."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "tuning.json"))
    assert subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT).returncode == -9
    assert [*ragged.tuning.cache_entries()["cpu"]] == ["a"]
    cache.put({"cpu": {"c": found()}})
    cache.clear_cache()
    assert [*ragged.tuning.cache_entries()["cpu"]] == ["a", "c"]


def test_saving_over_something_else(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    check_error(
        partial(ragged.tuning.save_cache, other), ValueError, f"save_cache({str(other)!r})`: it is not a tuning"
    )
    assert other.read_text() == "mine" and [*tmp_path.iterdir()] == [other]


# Tuning


def test_a_call_is_not_carried_out() -> None:
    """What is donated stays, and nothing is called back or printed: only what sizes depend on is computed."""
    called: list[int] = []

    @partial(jax.jit, donate_argnums=0)
    def step(data: Any, w: Any, dims: Any) -> Any:
        io_callback(lambda: called.append(1), None, ordered=True)
        dims = jax.lax.while_loop(lambda x: x[0] < 20, lambda x: x + 1, dims)
        return forward(GroupedTensor(data, dims), w).sum(), data * 2

    data = jnp.ones((96, 16))
    (tuned,) = quick(step, data, W, jnp.array([10, 0, 30, 8], jnp.int32)).products
    assert tuned.sizes == "own"
    jax.effects_barrier()
    assert not called and not data.is_deleted()


def test_sizes_that_come_of_a_callback() -> None:
    """It is not called, so they aren't known; but what else is, is."""

    def fn(x: Any, w: Any) -> Any:
        io_callback(lambda: None, None)
        dims = io_callback(lambda: np.array([1, 2, 3, 4], np.int32), jax.ShapeDtypeStruct((4,), jnp.int32))
        return forward(x, w), forward(GroupedTensor(x.data[:64], dims), w)

    assert [each.sizes for each in quick(fn, X, W).products] == ["own", "random"]


def test_operands_without_derivatives() -> None:
    """A quantised operand, or a result of 8 bits, has none: the others are tuned."""
    x = ragged.quantize(X, jnp.float8_e4m3fn, "row")
    assert [each.product.split()[1][:2] for each in quick(x, W).products] == ["mk", "mk"]  # forward, wgrad
    assert len(quick(X, W, preferred_element_type=jnp.float8_e4m3fn).products) == 1


def test_what_is_known_is_for_the_backend_and_legal() -> None:
    """A backend's key is its own; where a file holds another's, or what no longer fits, it is measured anew."""
    (tuned,) = quick(X, W, derivatives=False).products
    assert tuned.product.startswith("xla ")
    ((device, _),) = ragged.tuning.cache_entries().items()
    for wrong in (TPU, XlaConfig(m=(100,))):
        cache.put({device: {tuned.product: Found(wrong, 1.0, 1.0, "even", "9999")}})
        (again,) = quick(X, W, derivatives=False, again=False).products
        assert not again.from_cache and isinstance(again.best, XlaConfig)
        cache.clear_cache()


def test_a_candidate_that_fails_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = search._compiled

    def broken(product: Any, config: Config, arrays: Any) -> Any:
        if config == XlaConfig(m=(32,)):
            raise NotImplementedError
        return compiled(product, config, arrays)

    monkeypatch.setattr(search, "_compiled", broken)
    monkeypatch.setattr("ragged.backends.xla.backend.candidates", lambda *_: [XlaConfig(m=(32,))])
    (tuned,) = quick(X, W, derivatives=False).products
    assert tuned.failed == {"m=32": "NotImplementedError: "}


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: jax.vmap(lambda x: (quick(X, W), x)[1])(jnp.ones(2)), "a function is being traced."),
        (lambda: jax.grad(lambda x: (quick(X, W), x)[1])(1.0), "a function is being traced."),
        (lambda: autotune(X, W, seconds="3"), "`seconds` is '3'."),
        (lambda: autotune(X, W, seconds=float("nan")), "`seconds` is nan."),
        (lambda: autotune(X, W, seconds=-1), "`seconds` is -1."),
        (lambda: autotune(X, W, most=0), "`most` is 0."),
        (lambda: candidates(X, W, most="all"), "`most` is 'all'."),
        (lambda: autotune(X, W, seed=-1), "`seed` is -1."),
        (lambda: autotune(X, W, sizes=[-5, 3, 2, 1]), "`sizes` is [-5, 3, 2, 1], but the capacity of a buffer is 96."),
        (
            lambda: autotune(X, W, sizes=[50, 50, 0, 0]),
            "`sizes` is [50, 50, 0, 0], but the capacity of a buffer is 96.",
        ),
        (lambda: autotune(X, W, backend=TPU), "`backend` is TpuConfig("),
        (
            lambda: autotune(lambda x, w: forward(x, w, backend=INTERPRETED["pallas_tpu"]), X, W),
            "an interpreted kernel can't be tuned.",
        ),
        (lambda: forward(X, W, backend=Config()), "`backend` has Config()."),
        (lambda: using(cached="off"), "`cached` is 'off'."),
        (lambda: GpuConfig(m=16, k=16, n=16, warps=4.0, stages=2), "`warps` is 4.0."),
        (lambda: GpuConfig(m=16, k=16, n=16, warps=True, stages=2), "`warps` is True."),
        (lambda: ragged.tuning.sample_sizes("even", 4, 2**31), "a total that int32 holds."),
        (lambda: ragged.tuning.sample_sizes("random", 4, 3, "a"), "`seed` 'a'."),
        (lambda: ragged.tuning.sample_sizes(["even"], 4, 3), "no distribution is called ['even']."),  # pyright: ignore
        (lambda: ragged.explain(X, W, device=jax.devices()[0]), "Pass its kind, as `jax.devices()[0].device_kind`"),
    ],
)
def test_bad_input(call: Callable[[], Any], error: str) -> None:
    """At the call, with the hint; nothing is remembered."""
    check_error(call, (ValueError, TypeError, RuntimeError), error)
    assert not cache.cache_entries()


@pytest.mark.sampled
def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning raises in a program of several processes, because each process would find its own configuration."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    check_error(partial(quick, X, W), RuntimeError, "all processes of a program must lower the same kernels")


def test_candidates_over_several_devices() -> None:
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Explicit,))
    x = GroupedTensor(jax.device_put(X.data, jax.sharding.NamedSharding(mesh, P("d"))), X.first_dims)
    check_error(partial(candidates, x, W), ValueError, "a product over several devices is partitioned")


def test_numbers_of_numpy() -> None:
    """Are plain ints in a record, which JSON knows."""
    sixteen = np.int64(16)
    for config in (
        XlaConfig(m=(sixteen,), batched_rows=np.int32(0)),
        TpuConfig(m=sixteen, k=sixteen, n=sixteen),
        GpuConfig(m=16, k=16, n=16, warps=np.int64(4), stages=2, programs=sixteen),
    ):
        assert json.dumps(cache.to_json(config))


def test_array_functions_take_a_record() -> None:
    """As `matmul` does; of a wgrad, by the letters of what is multiplied: `k` is ragged."""
    x, dy = X.data, jnp.ones((96, 8))
    for fn, config in (
        (partial(ragged.grouped_matmul, x, W), XlaConfig(m=(48,))),
        (partial(ragged.grouped_matmul, x, W.mT, transpose_rhs=True), XlaConfig(m=(48,))),
        (partial(ragged.transposed_grouped_matmul, x.T, dy), XlaConfig(k=(48,))),
    ):
        text = jax.jit(lambda sizes, fn=fn, config=config: fn(sizes, backend=config)).lower(SIZES).as_text()
        assert "48x" in text and "48x" not in jax.jit(lambda sizes, fn=fn: fn(sizes)).lower(SIZES).as_text()
        wrong = XlaConfig(n=(48,))
        check_error(partial(fn, SIZES, backend=wrong), ValueError, "is () for a ragged dim")
        check_error(
            partial(fn, SIZES, backend=config, tiling=(8, 8, 8)),
            ValueError,
            "`tiling` is given, but `backend` is a configuration.",
        )
    both = Configs(rhs=XlaConfig(m=(48,)))
    step = jax.grad(lambda w: ragged.grouped_matmul(x, w, SIZES, backend=both).sum())
    assert "48x" in jax.jit(step).lower(W).as_text()


# Devices


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


def test_explain_has_no_figures_of_unknown_devices() -> None:
    """It doesn't pass another chip's off as theirs."""
    for device, platform in (("TPU v99", "tpu"), ("NVIDIA Abacus", "cuda")):
        said = ragged.explain(X, W, device=device)
        plan = said.plan()
        assert (plan.device, plan.chip, plan.flops_per_second, plan.bound) == (device, "", None, "")
        assert f"bound on {platform}: not known" in str(said)


# The command line


SMALL = ["--m", "96", "--k", "64", "--n", "48", "--groups", "4"]


def test_a_pipe_that_is_closed() -> None:
    """As by `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ragged", "info"]
    run = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writing)
    assert run.returncode == 0 and "BrokenPipeError" not in run.stderr


def test_dtypes_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Float64 isn't measured as float32."""
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *SMALL, "--dtype", "float64"])
    assert stopped.value.code == 2 and "--dtype 'float64' needs `JAX_ENABLE_X64=1`" in capsys.readouterr().err


def test_extents_beyond_int32(capsys: pytest.CaptureFixture[str]) -> None:
    """No sizes that wrapped around."""
    assert main(["explain", *SMALL, "--m", str(2**33)]) == 1
    assert "a total that int32 holds" in capsys.readouterr().err


def test_info_without_a_home(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there is no file."""
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setattr(cache, "cache_path", lambda: None)
    monkeypatch.setattr(ragged.tuning, "cache_path", lambda: None)
    assert main(["info"]) == 0
    assert f"none: `{cache.VARIABLE}` is not set, and there is no home directory" in capsys.readouterr().out
