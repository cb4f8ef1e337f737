"""Torch's products on the CPU, in a process of its own that takes turns with the one that runs JAX (`cpu.py`).

    python -m tests.benchmarks.cpu_torch THREADS

reads one line of JSON a request and answers with one:

    {"prepare": job}                  {"made": {variant: sketch}, "skipped": {variant: why}}
    {"turn": variant, "calls": 3}     {"seconds": 0.0123}

What both processes must do alike stands here: the data of a job, a turn, and the sketch by which their results are
compared. Nothing here imports JAX: its threads would be a third party.
"""

import functools
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

Shape = tuple[int, int, int, int]  # rows, k, n, groups
PRODUCTS = ("forward", "dgrad", "wgrad", "forward + backward")


class Job(NamedTuple):
    """A product of `x [m, k]`, `w [g, k, n]` and `dy [m, n]`, in groups of the given sizes.

    forward: `x w -> [m, n]`, dgrad: `dy wᵀ -> [m, k]`, wgrad: `xᵀ dy -> [g, k, n]`, or all three.
    """

    product: str
    dtype: str
    shape: Shape
    sizes: Sequence[int]


@functools.lru_cache(1)
def data(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`x`, `w` and `dy` in float32, the same in both processes."""
    m, k, n, g = shape
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s, np.float32) for s in ((m, k), (g, k, n), (m, n)))
    return x, w, dy


def turn(run: Callable[[], Any], calls: int) -> float:
    """The median of the seconds that each of some calls takes, after one that wakes threads and fills caches."""
    taken = []
    run()
    for _ in range(calls):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def sketch(results: Sequence[np.ndarray]) -> list[list[float]]:
    """Of each result, four sums over all elements with random signs, as multiples of the size that these have.

    Two products are the same if these are: a wrong group of `g` changes them by about `g ** -0.5`.
    """
    found = []
    for result in results:
        rows = result.reshape(-1, result.shape[-1]).astype(np.float32)
        rng = np.random.default_rng(1)
        left, right = (rng.choice(np.array([-1, 1], np.float32), (4, extent)) for extent in rows.shape)
        sums = np.einsum("ir,ir->i", left @ rows, right)  # (4,)
        found.append((sums / np.linalg.norm(rows)).tolist())
    return found


def difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    """The largest between two sketches."""
    return float(np.max(np.abs(np.subtract(a, b))))


def make(job: Job) -> dict[str, Callable[[], Any]]:
    """Torch's variants of a job. Each returns a tuple of tensors."""
    torch: Any = importlib.import_module("torch")
    x, w, dy = (torch.from_numpy(a).to(getattr(torch, job.dtype)) for a in data(job.shape))
    ends = torch.tensor(np.cumsum(job.sizes), dtype=torch.int32)
    spans = list(itertools.pairwise([0, *ends.tolist()]))

    def by_group(lhs: Any, rhs: Any) -> Any:
        """What is written by hand: one product a group, into one result."""
        out = torch.empty(*lhs.shape[:-1], rhs.shape[-1], dtype=lhs.dtype)
        for i, (start, end) in enumerate(spans):
            torch.mm(lhs[start:end], rhs[i], out=out[start:end])
        return out

    def by_group_wgrad() -> Any:
        out = torch.empty_like(w)
        for i, (start, end) in enumerate(spans):
            torch.mm(x[start:end].t(), dy[start:end], out=out[i])
        return out

    def with_gradient(product: Callable[[Any, Any], Any]) -> Callable[[], Any]:
        leaves = [a.detach().requires_grad_() for a in (x, w)]

        def step() -> Any:
            out = product(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, dy)

        return step

    def grouped(lhs: Any, rhs: Any) -> Any:
        return torch._grouped_mm(lhs, rhs, offs=ends)

    class ByGroup(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            return by_group(x, w)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return by_group(gradients[0], w.mT), by_group_wgrad()

    made: dict[str, dict[str, Callable[[], Any]]] = {
        "forward": {"torch": lambda: grouped(x, w), "torch loop": lambda: by_group(x, w)},
        "dgrad": {"torch": lambda: grouped(dy, w.mT), "torch loop": lambda: by_group(dy, w.mT)},
        "wgrad": {"torch": lambda: grouped(x.t(), dy), "torch loop": by_group_wgrad},
        "forward + backward": {"torch": with_gradient(grouped), "torch loop": with_gradient(ByGroup.apply)},
    }

    def as_tuple(run: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: out if isinstance(out := run(), tuple) else (out,)

    dense = {"dense torch": lambda: (torch.mm(x, w[0]),)}
    return dense | {name: as_tuple(run) for name, run in made[job.product].items()}


def arrays(results: Sequence[Any]) -> list[np.ndarray]:
    """Torch's tensors as NumPy's, which has no bfloat16."""
    return [result.detach().float().numpy() for result in results]


def serve(requests: Iterable[str], answers: IO[str]) -> None:
    """Answers until there are no more requests. A variant that can't run is left out; its error is told."""
    runs: dict[str, Callable[[], Any]] = {}
    for line in requests:
        match json.loads(line):
            case {"prepare": job}:
                runs.clear()  # and with them, the last job's tensors
                answer: dict[str, Any] = {"made": {}, "skipped": {}}
                for name, run in make(Job(**job | {"shape": tuple(job["shape"])})).items():
                    try:
                        answer["made"][name] = sketch(arrays(run()))
                        runs[name] = run
                    except Exception as error:
                        answer["skipped"][name] = f"{type(error).__name__}: {error}"[:300]
            case {"turn": name, "calls": calls}:
                answer = {"seconds": turn(runs[name], calls)}
            case other:
                raise ValueError(f"no such request: {other}")
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    importlib.import_module("torch").set_num_threads(int(sys.argv[1]))
    serve(sys.stdin, sys.stdout)
