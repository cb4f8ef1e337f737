"""Memory of a layer of experts on eight devices, in the forms of clients, and rows that a capacity drops.

Needs `libtpu`, but no TPU.

    python -m tests.benchmarks.clients [--only expert fsdp ring capacity] [--whose theirs ours] [--drops] [--sums]

One layer, forward and backward, in bfloat16, compiled for a slice of TPU v5e 2×4: 1024 tokens of 2048 on each device,
32 experts of 1024, four a token, gated; the gradients by tokens, matrices and weights. In MiB a device, what XLA sets
aside in HBM besides arguments and results.

- `expert`: tokens and experts are split over the eight devices, and rows are sent by `ragged_all_to_all`.
- `fsdp`: tokens are split, and matrices too, which are gathered before their products.
- `ring`: as `expert`, but all tokens are gathered, and results are summed by a reduce-scatter.
- `capacity`: as `expert`, of eight times the tokens, with buffers for 1.25 times the mean: theirs has slots by sender
  and `all_to_all`, ours is pooled.

`theirs` is what MaxText does, and with a capacity levanter, written anew with JAX's megablox. `ours` is
`ragged.exchange` and products, or without an exchange `route`.

`--drops`: the share of rows that a capacity of 1.25 times the mean drops, by slots and pooled: four experts on each of
32 and 64 devices, 512 tokens a device, eight experts a token, whose logits are normal on each device.

`--sums`: what a device's collectives hold, in MiB, if all devices of an expert or tensor axis have all tokens: 1024 on
eight devices as above, with `Explicit` axes under `jit`. `theirs` is what Qwen 3 does in `jax-llm-examples`, written
anew; `ours` is the `shard_map` of `docs/sharding.md`, with a gated layer; `products` has no `shard_map`.
"""

import argparse
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from tests import tpu
from tests.benchmarks.memory import of_tpu
from tests.contract.meshes import moved

N, D, HIDDEN, EXPERTS, TOP_K = 8, 2048, 1024, 32, 4
LOCAL, FACTOR = EXPERTS // N, 1.25
BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}


def products(rows: Array, sizes: Array, gate: Array, up: Array, down: Array) -> Array:
    multiply = partial(gmm, preferred_element_type=jnp.bfloat16, tiling=(512, 1024, 1024))
    hidden = jax.nn.silu(multiply(rows, gate, sizes)) * multiply(rows, up, sizes)
    return multiply(hidden, down, sizes)


@jax.custom_vjp
def permuted(x: Array, order: Array) -> Array:
    return x[order]


permuted.defvjp(lambda x, order: (x[order], order), lambda order, ct: (ct[jnp.argsort(order)], None))


def sorted_rows(x: Array, ids: Array) -> tuple[Array, Array, Array]:
    """Tokens once for each of their experts, sorted by expert; the order, and the experts' sizes."""
    order = jnp.argsort(ids.reshape(-1))
    return permuted(jnp.repeat(x, TOP_K, axis=0), order), order, jnp.bincount(ids.reshape(-1), length=EXPERTS)


def summed(rows: Array, order: Array, weights: Array) -> Array:
    rows = permuted(rows, jnp.argsort(order)).reshape(-1, TOP_K, D)
    return jnp.einsum("tkd,tk->td", rows.astype(jnp.float32), weights).astype(rows.dtype)


def starts(sizes: Array) -> Array:
    return jnp.cumsum(sizes) - sizes


def theirs_expert(x: Array, ids: Array, weights: Array, *matrices: Array) -> Array:
    rows, order, sizes = sorted_rows(x, ids)
    me = lax.axis_index("expert")
    counts = lax.all_gather(sizes, "expert")  # [n, experts]
    sent = counts.reshape(N, N, LOCAL).sum(2)  # [from, to]
    to, back = sent[me], sent[:, me]
    arrives = jnp.cumsum(sent, axis=0) - sent
    leaves = jnp.cumsum(sent, axis=1) - sent
    buffer = jnp.zeros((N * len(rows), D), x.dtype)
    got = lax.ragged_all_to_all(rows, buffer, starts(to), to, arrives[me], back, axis_name="expert")
    local = lax.dynamic_slice_in_dim(counts, me * LOCAL, LOCAL, 1)
    ids = jnp.repeat(jnp.tile(jnp.arange(LOCAL), N), local.reshape(-1), total_repeat_length=N * len(rows))
    inner = jnp.argsort(ids)
    y = permuted(products(permuted(got, inner), local.sum(0), *matrices), jnp.argsort(inner))
    rows = lax.ragged_all_to_all(y, jnp.zeros_like(rows), starts(back), back, leaves[:, me], to, axis_name="expert")
    return summed(rows, order, weights)


def theirs_fsdp(x: Array, ids: Array, weights: Array, *matrices: Array) -> Array:
    rows, order, sizes = sorted_rows(x, ids)
    return summed(products(rows, sizes, *matrices), order, weights)


def theirs_ring(x: Array, ids: Array, weights: Array, *matrices: Array) -> Array:
    x, ids, weights = (lax.all_gather(z, "expert", tiled=True) for z in (x, ids, weights))
    rows, order, sizes = sorted_rows(x, (ids - lax.axis_index("expert") * LOCAL) % EXPERTS)
    sizes = sizes[:LOCAL]
    y = products(rows, sizes, *matrices)
    y = jnp.where((jnp.arange(len(y)) < sizes.sum())[:, None], y, 0)
    return lax.psum_scatter(summed(y, order, weights), "expert", tiled=True)


def theirs_capacity(x: Array, ids: Array, weights: Array, *matrices: Array) -> Array:
    """Slots for each receiver; those that stay empty are sent too, and multiplied."""
    rows, order, sizes = sorted_rows(x, ids)
    slots = int(FACTOR * len(rows)) // N
    sent, device = sizes.reshape(N, LOCAL).sum(1), jnp.sort(ids.reshape(-1)) // LOCAL
    rank = jnp.arange(len(rows)) - starts(sent)[device]
    place = jnp.where(rank < slots, device * slots + rank, N * slots)
    buffer = jnp.zeros((N * slots, D), x.dtype).at[place].set(rows, mode="drop")
    expert = jnp.full(N * slots, LOCAL).at[place].set(jnp.sort(ids.reshape(-1)) % LOCAL, mode="drop")
    got, expert = (lax.all_to_all(z, "expert", 0, 0, tiled=True) for z in (buffer, expert))
    inner = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=LOCAL + 1)[:LOCAL]
    y = products(permuted(got, inner), sizes, *matrices)
    y = jnp.where((jnp.arange(len(y)) < sizes.sum())[:, None], y, 0)
    back = lax.all_to_all(permuted(y, jnp.argsort(inner)), "expert", 0, 0, tiled=True)
    return summed(back.at[place].get(mode="fill", fill_value=0), order, weights)


def experts(rows: Any, gate: Array, up: Array, down: Array) -> Any:
    return ragged.matmul(ragged.gated_matmul(rows, gate, up), down)


def ours(x: Array, ids: Array, weights: Array, *matrices: Array, **options: Any) -> Array:
    ex = ragged.exchange(ragged.route(ids, EXPERTS), axis="expert", **options)
    return ex.combine(experts(ex.dispatch(x), *matrices), weights)


def ours_capacity(x: Array, ids: Array, weights: Array, *matrices: Array) -> Array:
    return ours(x, ids, weights, *matrices, transport="ragged", capacity=int(FACTOR * ids.size))


def ours_fsdp(x: Array, ids: Array, weights: Array, *matrices: Array) -> Array:
    route = ragged.route(ids, EXPERTS)
    return route.combine(experts(route.gathered(x), *matrices), weights)


FORMS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "expert": (theirs_expert, partial(ours, transport="ragged")),
    "fsdp": (theirs_fsdp, ours_fsdp),
    "ring": (theirs_ring, partial(ours, transport="ring")),
    "capacity": (theirs_capacity, ours_capacity),
}


def compiled(form: str, whose: str) -> Any:
    tpu.device("v5e")
    devices = np.array(topologies.get_topology_desc("v5e:2x4", platform="tpu").devices)
    mesh = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
    run, split = FORMS[form][whose == "ours"], P("expert")
    matrix = P() if form == "fsdp" else split
    options: Any = {"in_specs": (split, split, split, *[matrix] * 3), "out_specs": split, "check_vma": whose == "ours"}

    def loss(x: Array, ids: Array, weights: Array, *matrices: Array) -> Array:
        y = jax.shard_map(run, mesh=mesh, **options)(x, ids, weights, *matrices)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    tokens, sharding = N * (8192 if form == "capacity" else 1024), NamedSharding(mesh, split)
    shapes = [((tokens, D), "bfloat16"), ((tokens, TOP_K), "int32"), ((tokens, TOP_K), "float32")]
    shapes += [((EXPERTS, *each), "bfloat16") for each in ((D, HIDDEN), (D, HIDDEN), (HIDDEN, D))]
    avals = [jax.ShapeDtypeStruct(*each, sharding=sharding) for each in shapes]
    gradients = jax.value_and_grad(loss, (0, 2, 3, 4, 5))
    out = (NamedSharding(mesh, P()), (sharding,) * 5)
    return jax.jit(gradients, out_shardings=out).trace(*avals).lower(lowering_platforms=("tpu",)).compile()


def dropped(devices: int, skew: float) -> dict[str, float]:
    """Shares of rows, by transport, on so many CPU devices."""
    tokens, top_k, groups = 512, 8, 4 * devices
    rng = np.random.default_rng(0)
    logits = skew * rng.standard_normal((devices, 1, groups)) + rng.gumbel(size=(devices, tokens, groups))
    ids = np.argsort(-logits, axis=2)[..., :top_k].reshape(devices * tokens, top_k).astype(np.int32)
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def of(transport: str) -> float:
        def local(ids: Array) -> Array:
            route, capacity = ragged.route(ids, groups), int(FACTOR * tokens * top_k)
            return ragged.exchange(route, transport=transport, capacity=capacity).dropped[None]

        run = jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
        return float(jax.jit(run)(ids).sum()) / ids.size

    return {"slots": of("dense"), "pooled": of("ring")}


MESHES: dict[str, dict[str, int]] = {
    "experts": {"data": 1, "expert": 8, "tensor": 1},
    "tensor": {"data": 1, "expert": 1, "tensor": 8},
    "2x2x2": {"data": 2, "expert": 2, "tensor": 2},
}


def local_products(rows: Array, sizes: Array, gate: Array, up: Array, down: Array) -> Array:
    """Those of the first `len(gate)` groups. Other rows are zeros."""
    first = (jnp.arange(len(rows)) < sizes[: len(gate)].sum())[:, None]
    return jnp.where(first, products(rows, sizes[: len(gate)], gate, up, down), 0)


def theirs_summed(x: Array, ids: Array, weights: Array, *matrices: Array) -> Array:
    """One sum of the tokens' results, in their dtype."""
    rows, order, sizes = sorted_rows(x, (ids - lax.axis_index("expert") * len(matrices[0])) % EXPERTS)
    y = summed(local_products(rows, sizes, *matrices), order, weights)
    return lax.psum(y, ("expert", "tensor"))


def ours_summed(x: Array, ids: Array, weights: Array, *matrices: Array) -> Array:
    """One sum of the tokens' results, in float32."""
    axes = "expert", "tensor"
    ids = lax.pcast(ids, axes, to="varying")
    route, offset = ragged.route(ids, EXPERTS), lax.axis_index("expert") * len(matrices[0])
    hidden = ragged.gated_matmul(route.gathered(x), *matrices[:2], group_offset=offset)
    y = ragged.matmul(hidden, matrices[2], group_offset=offset, preferred_element_type=jnp.float32)
    return lax.psum(route.combine(y, weights), axes).astype(x.dtype)


def program_with_sums(axes: dict[str, int], whose: str) -> Any:
    """The compiled value and gradients of a layer."""
    tpu.device("v5e")
    devices = np.array(topologies.get_topology_desc("v5e:2x4", platform="tpu").devices)
    mesh = Mesh(devices.reshape(*axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * 3)
    of_tokens, into, out_of = P("data"), P("expert", None, "tensor"), P("expert", "tensor", None)
    specs = of_tokens, of_tokens, of_tokens, into, into, out_of
    shapes: Any = [((1024, D), "bfloat16"), ((1024, TOP_K), "int32"), ((1024, TOP_K), "float32")]
    shapes += [((EXPERTS, *each), "bfloat16") for each in ((D, HIDDEN), (D, HIDDEN), (HIDDEN, D))]
    avals = [
        jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    run = {"theirs": theirs_summed, "ours": ours_summed, "products": ours_fsdp}[whose]
    if whose != "products":
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=of_tokens, check_vma=whose == "ours")

    def loss(x: Array, ids: Array, weights: Array, *matrices: Array) -> Array:
        return jnp.sum(run(x, ids, weights, *matrices).astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        gradients = jax.jit(jax.value_and_grad(loss, (0, 2, 3, 4, 5)))
        return gradients.trace(*avals).lower(lowering_platforms=("tpu",)).compile()


def sent(program: Any) -> dict[str, float]:
    """MiB of the collectives' results, by kind and dtype."""
    found: dict[str, float] = {}
    for name, types in moved(program):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", types):
            elements = np.prod([int(n) for n in shape.split(",") if n])
            found[f"{name} {dtype}"] = found.get(f"{name} {dtype}", 0) + elements * BYTES[dtype] / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*FORMS], choices=[*FORMS])
    parser.add_argument("--whose", nargs="+", default=["theirs", "ours"], choices=["theirs", "ours"])
    parser.add_argument("--drops", action="store_true")
    parser.add_argument("--sums", action="store_true")
    options = parser.parse_args()
    if options.drops:
        jax.config.update("jax_num_cpu_devices", 64)
        for devices, skew in ((32, 0.5), (64, 1.0)):
            found = ", ".join(f"{name} {100 * share:.2f} %" for name, share in dropped(devices, skew).items())
            print(f"{devices} devices, skew {skew}: {found}", flush=True)
        return
    if options.sums:
        for name, axes in MESHES.items():
            for whose in ("theirs", "ours", "products"):
                found = ", ".join(
                    f"{kind} {mib:.2f}" for kind, mib in sorted(sent(program_with_sums(axes, whose)).items())
                )
                print(name, whose, found, flush=True)
        return
    for form in options.only:
        for whose in options.whose:
            program = compiled(form, whose)
            print(
                form,
                whose,
                ", ".join(f"{what} {mib:.0f}" for what, mib in of_tpu("v5e", program.memory_analysis()).items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
