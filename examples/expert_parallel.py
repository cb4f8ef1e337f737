"""Expert parallelism: the layer of `moe_layer.py` on eight devices, in one process or several, with five more lines.

    uv run --with optax examples/expert_parallel.py                  about twenty seconds on two CPU cores
    uv run --with optax examples/expert_parallel.py --processes 2    two processes with four devices each

Each device has two of the 16 experts and an eighth of the tokens. The row of a token is sent to the devices that have
its experts, and the results are sent back. Matrices are never sent. The eight devices are simulated on this CPU. The
script checks that they train the same model as one device.
"""

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree
from moe_layer import EXPERTS, HIDDEN, TOP_K, D, MoE, batch, swiglu

import ragged

DEVICES, STEPS = 8, 30
CUT = P("expert")


class ParallelMoE(MoE):
    """The layer on one device: `x` has its tokens, `up` and `down` the matrices of its experts."""

    def __call__(self, x: Float[Array, "tokens d"]) -> tuple[Array, Array, Int[Array, " experts"]]:
        """The result, `[tokens, d]`; the load-balance loss and the number of rows per expert, over all devices."""
        probabilities = jax.nn.softmax(x @ self.router)  # [tokens, experts]
        weights, chosen = jax.lax.top_k(probabilities, self.top_k)  # both [tokens, top_k]
        route = ragged.route(chosen, num_groups=self.router.shape[1])
        exchange = ragged.exchange(route, axis="expert")
        hidden = ragged.matmul(exchange.dispatch(x), self.up).map(swiglu)  # ragged rows of this device's experts
        y = exchange.combine(ragged.matmul(hidden, self.down), weights / jnp.sum(weights, axis=-1, keepdims=True))
        rows, mean = lax.psum(route.first_dims, "expert"), lax.pmean(jnp.mean(probabilities, axis=0), "expert")
        return y, rows.size * jnp.sum(rows / jnp.sum(rows) * mean), rows


def specs(model: PyTree) -> Any:  # the experts' matrices are sharded, everything else is replicated
    return jax.tree.map(lambda leaf: CUT if leaf.ndim == 3 else P(), model)


def over_devices(model: PyTree, x: Float[Array, "tokens d"]) -> tuple[Array, Array, Array]:
    return jax.shard_map(ParallelMoE.__call__, in_specs=(specs(model), CUT), out_specs=(CUT, P(), P()))(model, x)


def train(mesh: Mesh, layer: Callable[..., Any]) -> tuple[Float[Array, " steps"], Float[Array, "tokens d"], Array]:
    """`(losses, y, rows)`: losses of the steps, results for new points, rows per expert."""
    optimiser, losses = optax.adam(1e-2), []

    def made(function: Callable[..., Any], specs: Any, *args: Any) -> Any:
        """`function(*args)` with the shardings `specs`: the same values on any mesh."""
        return jax.jit(function, out_shardings=jax.tree.map(partial(NamedSharding, mesh), specs))(*args)

    def objective(model: MoE, x: Array, target: Array) -> Float[Array, ""]:
        y, balance, _ = layer(model, x)
        return jnp.mean((y - target) ** 2) / jnp.var(target) + 0.01 * balance

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(model: MoE, state: PyTree, x: Array, target: Array) -> tuple[MoE, PyTree, Array]:
        loss, grads = jax.value_and_grad(objective)(model, x, target)
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    def new() -> tuple[MoE, PyTree]:
        model: PyTree = ParallelMoE(D, HIDDEN, EXPERTS, TOP_K, jax.random.key(0))  # pyright: ignore[reportCallIssue]: Equinox inherits `__init__`
        return model, optimiser.init(model)

    with jax.set_mesh(mesh):
        model, state = made(new, specs(jax.eval_shape(new)))
        for step in range(STEPS):
            points = made(batch, (CUT, CUT), jax.random.key(step))
            model, state, loss = train_step(model, state, *points)
            losses.append(loss)
        x, _ = made(batch, (CUT, CUT), jax.random.key(STEPS))
        y, _, rows = jax.jit(layer)(model, x)
        return jnp.stack(losses), y, rows


def compare() -> None:
    """Trains on all devices and on one device of this process, and prints the differences."""
    all_of_them, one = (Mesh(devices, ("expert",)) for devices in (jax.devices(), jax.local_devices()[:1]))
    began = time.perf_counter()
    losses, y, rows = (process_allgather(each, tiled=True) for each in train(all_of_them, over_devices))
    took = time.perf_counter() - began
    losses_of_one, y_of_one, rows_of_one = map(np.asarray, train(one, MoE.__call__))
    if jax.process_index() == 0:
        print(f"{jax.device_count()} devices in {jax.process_count()} processes: {took:.1f} s, including compilation")
        print(f"loss after {STEPS} steps: {losses[-1]:.4f}; on one device: {losses_of_one[-1]:.4f}")
        print(f"largest difference of losses: {np.max(np.abs(losses - losses_of_one)):.1e}")
        print(f"largest difference of results: {np.max(np.abs(y - y_of_one)):.1e}; largest: {np.max(np.abs(y)):.2f}")
        print(f"rows per expert: {rows.tolist()}, {np.sum(rows != rows_of_one)} different from one device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 4, 8))
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)  # index of this process
    parser.add_argument("--address", help=argparse.SUPPRESS)  # address of the first process
    given = parser.parse_args()
    if given.processes > 1 and given.process is None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        command = [sys.executable, *sys.argv, f"--address={address}"]
        running = [subprocess.Popen([*command, f"--process={i}"]) for i in range(given.processes)]
        sys.exit(max(abs(process.wait()) for process in running))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // given.processes)
    if given.process is not None:
        jax.distributed.initialize(given.address, given.processes, given.process)
    compare()


if __name__ == "__main__":
    main()
