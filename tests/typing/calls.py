"""Calls of every public function, as a type checker sees them. Pyright reads this file, and a test runs `right`.

A line of `wrong` must be an error: a comment that ignores an error where there is none is an error itself.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedExpression=false, reportUnusedCallResult=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnusedFunction=false, reportMissingParameterType=false

from typing import assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

import ragged
from ragged import Cast, Cols, GroupedTensor, Recipe, Rows, Scaling, Uniform
from ragged.nn import Experts, GroupedLinear, MoE, MoEStats, Router, Routing
from ragged.parallel import Estimate, estimate
from ragged.tuning import Configs, GpuConfig, TpuConfig, XlaConfig

SIZES = jnp.array([3, 5, 0, 4], jnp.int32)
X = GroupedTensor(jnp.ones((16, 32)), SIZES)
W = jnp.ones((4, 32, 32))
KEY = jax.random.key(0)


def experts(
    x: Rows[Float[GroupedTensor, "rows k"], "g"], w: Float[Array, "g k n"]
) -> Rows[Float[GroupedTensor, "rows n"], "g"]:
    return ragged.matmul(x, w)


def right() -> None:
    """Calls that a type checker accepts, and that run."""
    # Tensors: of JAX and NumPy.
    assert_type(GroupedTensor(np.ones((16, 32), np.float32), first_dims=np.array([3, 13], np.int32)).data, Array)
    assert_type(X.first_dims, Array | None)
    assert_type(X + 2 * X, GroupedTensor)
    assert_type(X.sum(axis=-1), Array)
    assert_type(X.logsumexp(axis=-2, empty=0), Array)
    assert_type(X.softmax(-2, sink=np.zeros(32, np.float32)).softmax(causal=True, window=(2, None)), GroupedTensor)
    assert_type(X * ragged.per_row(np.ones(16, np.float32)), GroupedTensor)
    assert_type(X * ragged.per_group(jnp.ones(4)) + ragged.per_column(jnp.ones(32)), GroupedTensor)
    assert_type(-X @ W, GroupedTensor)
    assert_type(X.map(jax.nn.silu).rows(1, 3).columns(0, 8), GroupedTensor)
    assert_type(GroupedTensor.from_list([jnp.ones((2, 3)), np.ones((1, 3), np.float32)]).to_list(), list[Array])
    assert_type(GroupedTensor.from_padded(X.to_padded(5), SIZES), GroupedTensor)
    assert_type(ragged.concat([X, X]), GroupedTensor)

    # Products.
    assert_type(ragged.matmul(X, W, bias=jnp.ones((4, 32)), activation=jax.nn.softplus), GroupedTensor)
    assert_type(ragged.matmul(X, W, backend=XlaConfig(m=(8,)), preferred_element_type="bfloat16"), GroupedTensor)
    assert_type(ragged.matmul(X, W[:2], group_offset=1, backend=Configs(XlaConfig())), GroupedTensor)
    assert_type(ragged.matmul(X.mT, X, num_actual_groups=4, precision="highest"), GroupedTensor)
    assert_type(ragged.gated_matmul(X, W, W, activation=None, recipe=("rowwise", None)), GroupedTensor)
    assert_type(ragged.gated_matmul(X, W, columns="halves", bias=jnp.ones((4, 32))), GroupedTensor)
    assert_type(ragged.einsum("t d, g d e -> t e", X, W), GroupedTensor)
    assert_type(ragged.grouped_matmul(jnp.ones((16, 32)), W, SIZES, tiling=(8, 32, 32)), Array)
    assert_type(ragged.transposed_grouped_matmul(jnp.ones((32, 16)), np.ones((16, 8), np.float32), SIZES), Array)
    assert_type(ragged.lax.ragged_dot(jnp.ones((16, 32)), W, SIZES, "highest", jnp.float32), Array)
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    assert_type(ragged.lax.ragged_dot_general(jnp.ones((16, 32)), W, SIZES, numbers, group_offset=0), Array)
    assert_type(experts(X, W), Rows[Float[GroupedTensor, "rows n"], "g"])

    # Routes and layers.
    route = ragged.route(jnp.array([[0, 2], [1, 3]]), num_groups=4)
    assert_type(route.combine(ragged.matmul(route.gathered(jnp.ones((2, 32))), W), jnp.ones((2, 2))), Array)
    router = Router(32, 4, 2, score="sigmoid", groups=(2, 1), key=KEY)
    assert_type(router(jnp.ones((8, 32))), Routing)
    assert_type(router.with_selection_bias(jnp.zeros(4)), Router)
    moe = MoE(router, Experts(32, 16, 4, use_bias=True, key=KEY), Experts(32, 8, key=KEY))
    y, stats = moe(jnp.ones((8, 32)), mask=np.ones(8, bool))
    assert_type(y, Array)
    assert_type(moe(X)[0], GroupedTensor)
    assert_type(stats, MoEStats)
    assert_type(GroupedLinear(32, 8, 4, recipe="rowwise", key=KEY)(X), GroupedTensor)
    plan = estimate(tokens=64, d=32, hidden=16, experts=4, top_k=2, devices=2)
    assert_type(plan, Estimate)

    # Quantisation.
    q = ragged.quantize(X, "float8_e4m3fn", "row")
    assert_type(q.dequantize(), GroupedTensor)
    assert_type(ragged.quantize(W, jnp.int8, (1, 16)), GroupedTensor)
    one = Cast("int8", Scaling((1, None)))
    recipe = Recipe((one, one), (one, one), (one, one))
    assert_type(ragged.matmul(X, ragged.quantize_weights(W, recipe), recipe=recipe), GroupedTensor)
    assert_type(Recipe.preset("delayed", length=4).history, Array | None)
    ragged.error_table(X, W, ["rowwise"])

    # What runs, and tuning.
    ragged.explain(X, jax.ShapeDtypeStruct((4, 32, 8), jnp.float32), platform="cpu")
    with ragged.tuning.using(XlaConfig(m=(8, 16)), GpuConfig(m=64), TpuConfig(buffers=3)):
        eqx.filter_jit(ragged.matmul)(X, W)
    assert_type(ragged.tuning.sample_sizes("random", 4, 16), np.ndarray)
    ragged.tuning.candidates(X, W, most=2)


def wrong(x: Cols[Float[GroupedTensor, "k rows"], "g"], w: Uniform[Float[GroupedTensor, "g k n"], "g"]) -> None:
    """Calls that a type checker refuses."""
    GroupedTensor("data")  # pyright: ignore[reportArgumentType]
    GroupedTensor(W, first_dims=[1, 2])  # pyright: ignore[reportArgumentType]
    GroupedTensor(W, scaling="row")  # pyright: ignore[reportArgumentType]
    X.first_dims.sum()  # pyright: ignore[reportOptionalMemberAccess]
    ragged.per_row([1.0])  # pyright: ignore[reportArgumentType]
    ragged.per_group("a")  # pyright: ignore[reportArgumentType]
    ragged.per_column(None)  # pyright: ignore[reportArgumentType]
    X.softmax(axis=None)  # pyright: ignore[reportArgumentType]
    X.softmax(sink=[1.0])  # pyright: ignore[reportArgumentType]
    X.logsumexp(sink=1.0)  # pyright: ignore[reportCallIssue]
    X.rows(1)  # pyright: ignore[reportCallIssue]
    X.to_padded("5")  # pyright: ignore[reportArgumentType]
    GroupedTensor.from_list(3)  # pyright: ignore[reportArgumentType]
    ragged.concat(3)  # pyright: ignore[reportArgumentType]
    ragged.matmul(X)  # pyright: ignore[reportCallIssue]
    ragged.matmul([[1.0]], W)  # pyright: ignore[reportArgumentType]
    ragged.matmul(X, W, activation=3)  # pyright: ignore[reportArgumentType]
    ragged.matmul(X, W, bias=1.0)  # pyright: ignore[reportArgumentType]
    ragged.matmul(X, W, backend=["xla"])  # pyright: ignore[reportArgumentType]
    ragged.matmul(X, W, recipe=8)  # pyright: ignore[reportArgumentType]
    ragged.matmul(X, W, max_columns=3)  # pyright: ignore[reportCallIssue]
    ragged.gated_matmul(X, W, "up")  # pyright: ignore[reportArgumentType]
    ragged.gated_matmul(X, W, columns=2)  # pyright: ignore[reportArgumentType]
    ragged.einsum(X, W, "t d, g d e -> t e")  # pyright: ignore[reportArgumentType]
    ragged.grouped_matmul(X, W, SIZES)  # pyright: ignore[reportArgumentType]
    ragged.grouped_matmul(W[0], W, SIZES, tiling=(8, 8))  # pyright: ignore[reportArgumentType]
    ragged.transposed_grouped_matmul(W[0], W[0], [3, 5])  # pyright: ignore[reportArgumentType]
    ragged.lax.ragged_dot(X, W, SIZES)  # pyright: ignore[reportArgumentType]
    ragged.lax.ragged_dot_general(W, W, SIZES)  # pyright: ignore[reportCallIssue]
    ragged.sharded_matmul(X, W, in_specs=P(), out_specs=P())  # pyright: ignore[reportArgumentType]
    ragged.route([0, 1], 2)  # pyright: ignore[reportArgumentType]
    ragged.route(SIZES)  # pyright: ignore[reportCallIssue]
    ragged.route(SIZES, 4).dispatch(X)  # pyright: ignore[reportArgumentType]
    ragged.route(SIZES, 4).combine(W)  # pyright: ignore[reportArgumentType]
    ragged.exchange(SIZES)  # pyright: ignore[reportArgumentType]
    ragged.quantize("x", "int8", "row")  # pyright: ignore[reportArgumentType]
    ragged.quantize(X, "int8", "row", power_of_two="no")  # pyright: ignore[reportArgumentType]
    ragged.quantize_weights(W, 8)  # pyright: ignore[reportArgumentType]
    ragged.Scaling("row")  # pyright: ignore[reportArgumentType]
    ragged.Scaling.of(3)  # pyright: ignore[reportArgumentType]
    ragged.Cast("int8", power_of_two=2)  # pyright: ignore[reportArgumentType]
    ragged.Recipe("row")  # pyright: ignore[reportArgumentType]
    ragged.Recipe.preset(8)  # pyright: ignore[reportArgumentType]
    ragged.explain(X, W, platform=3)  # pyright: ignore[reportArgumentType]
    ragged.error_table(X, W, 5)  # pyright: ignore[reportArgumentType]
    ragged.nn.Router("32", 4, 2, key=KEY)  # pyright: ignore[reportArgumentType]
    ragged.nn.Router(32, 4, 2)  # pyright: ignore[reportCallIssue]
    ragged.nn.MoE(ragged.route, 4)  # pyright: ignore[reportArgumentType]
    ragged.nn.GroupedLinear(32, 8, key=KEY)  # pyright: ignore[reportCallIssue]
    ragged.nn.Experts(32, 16, 4, True, "silu")  # pyright: ignore[reportCallIssue]
    ragged.parallel.estimate(tokens="64")  # pyright: ignore[reportCallIssue]
    ragged.tuning.XlaConfig(m=8)  # pyright: ignore[reportArgumentType]
    ragged.tuning.GpuConfig(m="64")  # pyright: ignore[reportArgumentType]
    ragged.tuning.TpuConfig(buffers=None)  # pyright: ignore[reportArgumentType]
    ragged.tuning.using(cached="off")  # pyright: ignore[reportArgumentType]
    ragged.tuning.autotune(X, W, seconds="3")  # pyright: ignore[reportArgumentType]
    ragged.tuning.candidates(X, W, most="all")  # pyright: ignore[reportArgumentType]
    ragged.tuning.sample_sizes("random", 4)  # pyright: ignore[reportCallIssue]
    ragged.tuning.load_cache(3)  # pyright: ignore[reportArgumentType]
    ragged.tuning.save_cache(3)  # pyright: ignore[reportArgumentType]
    ragged.tuning.clear_cache(3)  # pyright: ignore[reportCallIssue]
