"""Every error of the products, as text: the call, what disagrees, what came, and the hint."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import ragged
from ragged import GroupedTensor
from ragged.core.errors import Site, describe
from ragged.tuning import GpuConfig, TpuConfig
from tests.cases import check_error

DIMS = jnp.array([3, 5, 0, 4], jnp.int32)
THREE, REVERSED = DIMS[:3], DIMS[::-1]
ROWS = GroupedTensor(jnp.ones((16, 8)), first_dims=DIMS)
COLUMNS = GroupedTensor(jnp.ones((8, 16)), last_dims=DIMS)
UNIFORM = GroupedTensor(jnp.ones((4, 8, 6)))
HEADS = GroupedTensor(jnp.ones((16, 2, 8)), first_dims=DIMS)
STACKED = jax.tree.map(lambda x: jnp.stack([x, x]), ROWS)
BOTH = GroupedTensor(jnp.ones((16, 16)), first_dims=DIMS, last_dims=DIMS)

rows, columns = (
    "GroupedTensor(f32[16,8], first_dims=[3, 5, 0, 4] (12 of 16 rows))",
    "GroupedTensor(f32[8,16], last_dims=[3, 5, 0, 4] (12 of 16 columns))",
)

MATMUL: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "fewer matrices than groups": (
        lambda: ragged.matmul(ROWS, jnp.ones((3, 8, 6))),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: `lhs` has 4 groups but `rhs` has 3.\n"
        f"Got lhs={rows}, rhs=f32[3,8,6].\n"
        "`rhs` needs one matrix per group, including empty groups (or fewer, with `group_offset`).",
    ),
    "more matrices than groups, from the left": (
        lambda: ragged.matmul(jnp.ones((5, 6, 8)), COLUMNS),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: `lhs` has 5 groups but `rhs` has 4.\n"
        f"Got lhs=f32[5,6,8], rhs={columns}.\n"
        "`lhs` needs one matrix per group, including empty groups (or fewer, with `group_offset`).",
    ),
    "more matrices than groups, with an offset": (
        lambda: ragged.matmul(ROWS, jnp.ones((5, 8, 6)), group_offset=jnp.int32(0)),
        ValueError,
        "`lhs` has 4 groups but `rhs` has 5.",
    ),
    "groups of a wgrad": (
        lambda: ragged.matmul(COLUMNS, GroupedTensor(jnp.ones((16, 6)), first_dims=THREE)),
        ValueError,
        "`lhs` has 4 groups but `rhs` has 3.\n"
        f"Got lhs={columns}, rhs=GroupedTensor(f32[16,6], first_dims=[3, 5, 0] (8 of 16 rows)).\n"
        "`rhs` needs one matrix per group, including empty groups.",
    ),
    "contracted extents": (
        lambda: ragged.matmul(ROWS, jnp.ones((4, 7, 6))),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: the last dim of `lhs` is 8 but the first dim of `rhs` is 7.\n"
        f"Got lhs={rows}, rhs=f32[4,7,6].\n"
        "They are contracted and must be equal.",
    ),
    "contracted extents of a shared matrix": (
        lambda: ragged.matmul(jnp.ones((2, 7)), COLUMNS),
        ValueError,
        "the last dim of `lhs` is 7 but the first dim of `rhs` is 8.",
    ),
    "contracted capacities": (
        lambda: ragged.matmul(COLUMNS, GroupedTensor(jnp.ones((17, 6)), first_dims=DIMS)),
        ValueError,
        "the contracted axis has a capacity of 16 in `lhs` but 17 in `rhs`.",
    ),
    "contracted sizes": (
        lambda: ragged.matmul(COLUMNS, GroupedTensor(jnp.ones((16, 6)), first_dims=REVERSED)),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: the contracted dims have different sizes: "
        "lhs.last_dims=[3, 5, 0, 4], rhs.first_dims=[4, 0, 5, 3].",
    ),
    "inner raggedness, rhs": (
        lambda: ragged.matmul(ROWS, ROWS),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: the contracted dims must both be ragged or both not.\n"
        "`lhs`: first dim ragged, last dim not ragged. `rhs`: first dim ragged, last dim not ragged.\n"
        f"Got lhs={rows}, rhs={rows}.\n"
        "Did you mean `rhs.mT`? The last dim of `lhs` is contracted with the first dim of `rhs`.",
    ),
    "inner raggedness, lhs": (
        lambda: ragged.matmul(COLUMNS, UNIFORM),
        ValueError,
        "`lhs`: first dim not ragged, last dim ragged. `rhs`: first dim not ragged, last dim not ragged.\n"
        f"Got lhs={columns}, rhs=GroupedTensor(f32[4,8,6]).\n"
        "Did you mean `lhs.mT`?",
    ),
    "inner raggedness, a shared matrix": (
        lambda: ragged.matmul(BOTH, jnp.ones((16, 2))),
        ValueError,
        "the contracted dims must both be ragged or both not.",
    ),
    "no groups at all": (
        lambda: ragged.matmul(jnp.ones((2, 3)), jnp.ones((3, 4))),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: both operands are single matrices; there are no groups.\n"
        "Got lhs=f32[2,3], rhs=f32[3,4].\n"
        "Use `jnp.matmul`, or give one a group axis.",
    ),
    "rank of a plain array": (
        lambda: ragged.matmul(ROWS, jnp.ones((8,))),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: `rhs` is a plain array with 1 dims.\n"
        f"Got lhs={rows}, rhs=f32[8].\n"
        "A plain array has 3 dims [g, first, last], or 2 dims: one matrix that all groups share.",
    ),
    "weights as torch stores them": (
        lambda: ragged.matmul(ROWS, jnp.ones((4, 6, 8))),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: the last dim of `lhs` is 8 but the first dim of `rhs` is 6.\n"
        f"Got lhs={rows}, rhs=f32[4,6,8].\n"
        "They are contracted and must be equal. Did you mean `rhs.mT`?",
    ),
    "weights transposed, from the left": (
        lambda: ragged.matmul(UNIFORM, COLUMNS),
        ValueError,
        "They are contracted and must be equal. Did you mean `lhs.mT`?",
    ),
    "a shared matrix, transposed": (
        lambda: ragged.matmul(ROWS, jnp.ones((6, 8))),
        ValueError,
        "They are contracted and must be equal. Did you mean `rhs.mT`?",
    ),
    "either could be transposed": (
        lambda: ragged.matmul(UNIFORM, UNIFORM),
        ValueError,
        "They are contracted and must be equal. Did you mean `rhs.mT` or `lhs.mT`?",
    ),
    "weights with heads": (
        lambda: ragged.gated_matmul(ROWS, jnp.ones((4, 8, 2, 3)), jnp.ones((4, 8, 2, 3))),
        ValueError,
        "`ragged.gated_matmul(x, w_gate, w_up)`: `w_gate` is a plain array with 4 dims.\n"
        f"Got x={rows}, w_gate=f32[4,8,2,3].\n"
        "A plain array has 3 dims [g, first, last], or 2 dims: one matrix that all groups share.\n"
        "Merge the dims that aren't contracted: `w_gate.reshape(4, 8, -1)`.",
    ),
    "weights with heads, from the left": (
        lambda: ragged.matmul(jnp.ones((4, 2, 3, 8)), COLUMNS),
        ValueError,
        "the result would have ragged columns and groups of more than two dims.",
    ),
    "kind of an operand": (
        lambda: ragged.matmul([[1.0]], ROWS),
        TypeError,
        f"`ragged.matmul(lhs, rhs)`: `lhs` is not an array.\nGot lhs=[[1.0]], rhs={rows}.\n"
        "Pass a `GroupedTensor` or an array.",
    ),
    "a tensor that holds no array": (
        lambda: ragged.matmul(GroupedTensor(None, DIMS), UNIFORM),
        TypeError,
        "`lhs` is a GroupedTensor whose data is None, not an array.",
    ),
    "a tensor with a batch axis": (
        lambda: ragged.matmul(STACKED, UNIFORM),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: `lhs` has a batch axis.\n"
        "Got lhs=GroupedTensor(f32[2,16,8], first_dims=i32[2,4]), rhs=GroupedTensor(f32[4,8,6]).\n"
        "Map over it: `jax.vmap(lambda lhs: ragged.matmul(lhs, rhs))(lhs)`.",
    ),
    "max_last below zero": (
        lambda: ragged.matmul(ROWS, COLUMNS, max_last=-1),
        ValueError,
        "`max_last` is -1.",
    ),
    "bool": (
        lambda: ragged.matmul(ROWS.astype(bool), UNIFORM),
        TypeError,
        "`lhs` has dtype bool.",
    ),
    "complex": (
        lambda: ragged.matmul(ROWS, UNIFORM.astype(jnp.complex64)),
        NotImplementedError,
        "`ragged.matmul(lhs, rhs)`: `rhs` is complex.",
    ),
    "integer result of floats": (
        lambda: ragged.matmul(ROWS, UNIFORM, preferred_element_type=jnp.int32),
        TypeError,
        "`preferred_element_type` is int32, which can't hold the product.",
    ),
    "no dtype": (
        lambda: ragged.matmul(ROWS, UNIFORM, preferred_element_type="float99"),
        TypeError,
        "`preferred_element_type` is 'float99', which can't hold the product.",
    ),
    "unknown backend": (
        lambda: ragged.matmul(ROWS, UNIFORM, backend="cutlass"),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: backend 'cutlass' does not exist.\n"
        "Got lhs=GroupedTensor(f32[16,8], first_dims=[3, 5, 0, 4] (12 of 16 rows)), rhs=GroupedTensor(f32[4,8,6]).\n"
        "Available: 'xla', 'pallas_tpu', 'triton_gpu'.\n"
        "`backend=None` uses the platform's own backend.",
    ),
    "a GPU's backend on the CPU": (
        lambda: ragged.matmul(ROWS, UNIFORM, backend="triton_gpu"),
        ValueError,
        "`ragged.matmul`: backend 'triton_gpu' does not run on cpu.\n"
        "Available there: 'xla'. `backend=None` uses the platform's own backend. "
        "`backend=ragged.tuning.GpuConfig(interpret=True)` runs the bodies of kernels on any platform.",
    ),
    "a tile on a GPU": (
        lambda: ragged.matmul(ROWS, UNIFORM, backend=GpuConfig(m=8, k=48, n=128)),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: tile_m=8 must be a power of two, and 16 or more, on a GPU.",
    ),
    "the nearest tiling for a GPU": (
        lambda: ragged.matmul(ROWS, UNIFORM, backend=GpuConfig(m=8, k=48, n=128, interpret=True)),
        ValueError,
        "The nearest legal tiling is (16, 64, 128).",
    ),
    "backend of another platform": (
        lambda: ragged.matmul(ROWS, UNIFORM, backend="pallas_tpu"),
        ValueError,
        "`ragged.matmul`: backend 'pallas_tpu' does not run on cpu.\n"
        "Available there: 'xla'. `backend=None` uses the platform's own backend. "
        "`backend=ragged.tuning.TpuConfig(interpret=True)` runs the bodies of kernels on any platform.",
    ),
    "rows of a tile on a TPU": (
        lambda: ragged.matmul(ROWS, UNIFORM, backend=TpuConfig(m=3, k=128, n=128)),
        ValueError,
        "tile_m=3 must be a multiple of 8 (the sublanes of float32), or the whole extent 16, on a TPU.\n"
        f"Got lhs={rows}, rhs=GroupedTensor(f32[4,8,6]).\n"
        "The nearest legal tiling is (8, 128, 128).",
    ),
    "columns of a tile on a TPU": (
        lambda: ragged.matmul(ROWS, UNIFORM, backend=TpuConfig(m=8, k=7, n=128)),
        ValueError,
        "tile_k=7 must be a multiple of 128 (the lanes), or the whole extent 8, on a TPU.",
    ),
    "unknown precision": (
        lambda: ragged.matmul(ROWS, UNIFORM, precision="exact"),
        ValueError,
        "unknown `precision` 'exact'.",
    ),
    "interpret": (
        lambda: ragged.grouped_matmul(X, W, SIZES, interpret="yes"),
        TypeError,
        "`interpret` must be a bool, not 'yes'.",
    ),
    "tiling of two": (
        lambda: ragged.grouped_matmul(X, W, SIZES, tiling=(8, 8)),
        ValueError,
        "`tiling` is (8, 8).\n",
    ),
    "tiling of zero": (
        lambda: ragged.grouped_matmul(X, W, SIZES, tiling=(8, 0, 8)),
        ValueError,
        "It must be three positive ints (tile_m, tile_k, tile_n), a function of (m, k, n), or None.",
    ),
    "shape of group_offset": (
        lambda: ragged.matmul(ROWS, UNIFORM, group_offset=jnp.array([0], jnp.int32)),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: `group_offset` must have shape (), but has (1,).\n"
        f"Got lhs={rows}, rhs=GroupedTensor(f32[4,8,6]), group_offset=i32[1].\n"
        "It is one number, the index of the uniform operand's first group: `jnp.int32(first)`.",
    ),
    "dtype of group_offset": (
        lambda: ragged.matmul(ROWS, UNIFORM, group_offset=jnp.float32(0)),
        TypeError,
        "`group_offset` must be an integer.",
    ),
    "group_offset where nothing is a shard": (
        lambda: ragged.matmul(ROWS, COLUMNS, group_offset=jnp.int32(0)),
        ValueError,
        "`group_offset` is given, but the layout 'outer' has no uniform operand that could be a shard.",
    ),
    "group_offset of a shared matrix": (
        lambda: ragged.matmul(ROWS, jnp.ones((8, 6)), group_offset=jnp.int32(0)),
        ValueError,
        "`group_offset` is given, but all groups share one matrix.",
    ),
    "num_actual_groups outside of a wgrad": (
        lambda: ragged.matmul(ROWS, UNIFORM, num_actual_groups=2),
        ValueError,
        "`num_actual_groups` is for a wgrad, but the layout is 'forward'.",
    ),
    "num_actual_groups of zero": (
        lambda: ragged.matmul(ROWS.mT, ROWS, num_actual_groups=0),
        ValueError,
        "`num_actual_groups` is 0.",
    ),
    "shape of existing_out": (
        lambda: ragged.matmul(ROWS, UNIFORM, existing_out=jnp.ones((16, 7))),
        ValueError,
        "`ragged.matmul(lhs, rhs)`: `existing_out` has shape (16, 7) but the result has (16, 6).\n"
        f"Got lhs={rows}, rhs=GroupedTensor(f32[4,8,6]), existing_out=f32[16,7].\n"
        "It must be a tensor like the result.",
    ),
    "dtype of existing_out": (
        lambda: ragged.matmul(
            ROWS, UNIFORM, existing_out=jnp.ones((16, 6), jnp.bfloat16), preferred_element_type=jnp.float32
        ),
        TypeError,
        "`existing_out` has dtype bfloat16 but the result has float32.",
    ),
    "integers as existing_out of floats": (
        lambda: ragged.matmul(ROWS, UNIFORM, existing_out=jnp.ones((16, 6), jnp.int32)),
        TypeError,
        "`ragged.matmul(lhs, rhs)`: `existing_out` has dtype int32, which can't hold the product.\n"
        f"Got lhs={rows}, rhs=GroupedTensor(f32[4,8,6]), existing_out=i32[16,6].\n"
        "Pass a real floating dtype (for integer operands, an integer dtype will do), or None.",
    ),
    "kind of existing_out": (
        lambda: ragged.matmul(ROWS, UNIFORM, existing_out=COLUMNS),
        ValueError,
        "`existing_out` is ragged columns, but the result of the layout 'forward' is ragged rows.\n"
        f"Got lhs={rows}, rhs=GroupedTensor(f32[4,8,6]), existing_out={columns}.\n"
        "It must be a tensor like the result, or its buffer.",
    ),
    "packing of existing_out": (
        lambda: ragged.matmul(ROWS, COLUMNS, existing_out=BOTH.mT),
        ValueError,
        "`existing_out` is ragged both packed along its columns, but the result of the layout 'outer' is ragged both.",
    ),
    "no existing_out": (
        lambda: ragged.matmul(ROWS, UNIFORM, existing_out="here"),
        TypeError,
        "`existing_out` holds no array.",
    ),
    "an empty existing_out": (
        lambda: ragged.matmul(ROWS, UNIFORM, existing_out=GroupedTensor(None, DIMS)),
        TypeError,
        "`existing_out` holds no array.",
    ),
    "groups of existing_out": (
        lambda: ragged.matmul(ROWS, UNIFORM, existing_out=GroupedTensor(jnp.ones((16, 6)), THREE)),
        ValueError,
        "`existing_out` has first_dims=[3, 5, 0] but the result has [3, 5, 0, 4].",
    ),
    "dims of existing_out": (
        lambda: ragged.matmul(ROWS, UNIFORM, existing_out=GroupedTensor(jnp.ones((16, 6)), REVERSED)),
        ValueError,
        "`existing_out` has first_dims=[4, 0, 5, 3] but the result has [3, 5, 0, 4].",
    ),
    "a backend that can't be a name": (
        lambda: ragged.matmul(ROWS, UNIFORM, backend=["xla"]),
        ValueError,
        "backend ['xla'] does not exist.",
    ),
    "no number for group_offset": (
        lambda: ragged.matmul(ROWS, UNIFORM, group_offset="first"),
        TypeError,
        "`group_offset` is not a number.",
    ),
    "dims that are no arrays": (
        lambda: ragged.matmul(GroupedTensor(ROWS.data, object()), UNIFORM),
        TypeError,
        "`lhs` is a GroupedTensor whose first_dims is a object, not an array.",
    ),
    "a random key": (
        lambda: ragged.matmul(ROWS, jax.random.split(jax.random.key(0), (4, 8, 6))),
        TypeError,
        "`rhs` has dtype key<fry>.",
    ),
    "max_last": (
        lambda: ragged.matmul(ROWS, UNIFORM, max_last=4),
        ValueError,
        "`max_last` is given, but the layout is 'forward'.",
    ),
    "capacity of a uniform result": (
        lambda: ragged.matmul(UNIFORM, jnp.ones((4, 6, 2)), capacity=4),
        ValueError,
        "`capacity` is given, but the result is uniform.",
    ),
    "capacity that the operand has": (
        lambda: ragged.matmul(ROWS, UNIFORM, capacity=4),
        ValueError,
        "`capacity` is 4, but the result takes the capacity of its operand, 16.",
    ),
}

SIZES = jnp.array([3, 5, 0, 4], jnp.int32)
X, W, DY = jnp.ones((16, 8)), jnp.ones((4, 8, 6)), jnp.ones((16, 6))

ARRAYS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "K4: rank of lhs": (
        lambda: ragged.grouped_matmul(W, W, SIZES),
        ValueError,
        "`ragged.grouped_matmul(lhs, rhs, group_sizes)`: `lhs` must have 2 dims, but has 3.\n"
        "Got lhs=f32[4,8,6], rhs=f32[4,8,6], group_sizes=i32[4].\n",
    ),
    "K5: rank of rhs": (
        lambda: ragged.grouped_matmul(X, X, SIZES),
        ValueError,
        "`rhs` must have 3 dims, but has 2.",
    ),
    "K4: rank of lhs, transposed": (
        lambda: ragged.transposed_grouped_matmul(W, DY, SIZES),
        ValueError,
        "`ragged.transposed_grouped_matmul(lhs, rhs, group_sizes)`: `lhs` must have 2 dims, but has 3.",
    ),
    "K5: rank of rhs, transposed": (
        lambda: ragged.transposed_grouped_matmul(X.T, W, SIZES),
        ValueError,
        "`rhs` must have 2 dims, but has 3.",
    ),
    "K6: dtype of the sizes": (
        lambda: ragged.grouped_matmul(X, W, SIZES.astype(jnp.float32)),
        TypeError,
        "`group_sizes` must be int32 or uint32.\nGot lhs=f32[16,8], rhs=f32[4,8,6], group_sizes=f32[4].\n"
        "Cast it: `group_sizes.astype(jnp.int32)`.",
    ),
    "K6: dtype of the sizes, transposed": (
        lambda: ragged.transposed_grouped_matmul(X.T, DY, SIZES.astype(jnp.int8)),
        TypeError,
        "`group_sizes` must be int32 or uint32.",
    ),
    "rank of the sizes": (
        lambda: ragged.grouped_matmul(X, W, SIZES[None]),
        ValueError,
        "`group_sizes` must have 1 dims, but has 2.",
    ),
    "K9: no tuned tiling": (
        lambda: ragged.grouped_matmul(X, W, SIZES, tiling=lambda m, k, n: None),
        ValueError,
        "no tuned tiling for (m, k, n) = (16, 8, 6).",
    ),
    "K9: no tuned tiling, transposed": (
        lambda: ragged.transposed_grouped_matmul(X.T, DY, SIZES, tiling=lambda m, k, n: None),
        ValueError,
        "no tuned tiling for (m, k, n) = (16, 8, 6).",
    ),
    "K12: shape of group_offset": (
        lambda: ragged.grouped_matmul(X, W, SIZES, group_offset=jnp.zeros((2,), jnp.int32)),
        ValueError,
        "`group_offset` must have shape (), but has (2,).",
    ),
    "K12: shape of group_offset, transposed": (
        lambda: ragged.transposed_grouped_matmul(X.T, DY, SIZES, group_offset=jnp.zeros((2,), jnp.int32)),
        ValueError,
        "`group_offset` must have shape (), but has (2,).",
    ),
    "contracted extents": (
        lambda: ragged.grouped_matmul(X, W, SIZES, transpose_rhs=True),
        ValueError,
        "`lhs` has k=8 but `rhs` has k=6 in axis 2 (transpose_rhs=True).",
    ),
    "contracted extents, transposed": (
        lambda: ragged.transposed_grouped_matmul(X, DY, SIZES),
        ValueError,
        "`lhs` has m=8 columns but `rhs` has 16 rows.",
    ),
    "more matrices than groups": (
        lambda: ragged.grouped_matmul(X, jnp.ones((5, 8, 6)), SIZES),
        ValueError,
        "`rhs` has 5 groups but `group_sizes` has 4.",
    ),
    "a GroupedTensor": (
        lambda: ragged.grouped_matmul(ROWS, W, SIZES),
        TypeError,
        "`lhs` is not an array.",
    ),
    "existing_out": (
        lambda: ragged.grouped_matmul(X, W, SIZES, existing_out=[1]),
        TypeError,
        "`existing_out` is not an array.",
    ),
    "input_buffer_count": (
        lambda: ragged.grouped_matmul(X, W, SIZES, input_buffer_count=0),
        ValueError,
        "`input_buffer_count` is 0.",
    ),
    "integers as existing_out of floats, of plain arrays": (
        lambda: ragged.grouped_matmul(X, W, SIZES, existing_out=jnp.ones((16, 6), jnp.int32)),
        TypeError,
        "`existing_out` has dtype int32, which can't hold the product.",
    ),
    "O2: backend": (
        lambda: ragged.transposed_grouped_matmul(X.T, DY, SIZES, backend="mosaic"),
        ValueError,
        "backend 'mosaic' does not exist.",
    ),
}


@pytest.mark.parametrize("name", [*MATMUL, *ARRAYS])
def test_error(name: str) -> None:
    """At the call, as text."""
    check_error(*{**MATMUL, **ARRAYS}[name])


CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "matmul": (lambda **options: ragged.matmul(ROWS, UNIFORM, **options), "ragged.matmul(lhs, rhs)"),
    "matmul with heads": (lambda **options: ragged.matmul(HEADS, UNIFORM, **options), "ragged.matmul(lhs, rhs)"),
    "einsum": (
        lambda **options: ragged.einsum("td,gde->te", ROWS, UNIFORM, **options),
        'ragged.einsum("td,gde->te", lhs, rhs)',
    ),
    "einsum, turned": (
        lambda **options: ragged.einsum("gde,thd->the", UNIFORM, HEADS, **options),
        'ragged.einsum("gde,thd->the", lhs, rhs)',
    ),
    "gate": (
        lambda **options: ragged.gated_matmul(ROWS, UNIFORM, UNIFORM, **options),
        "ragged.gated_matmul(x, w_gate, w_up)",
    ),
    "sharded": (
        lambda **options: ragged.sharded_matmul(
            ROWS,
            UNIFORM,
            mesh=jax.make_mesh((1,), ("x",)),
            in_specs=(PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(),
            **options,
        ),
        "ragged.sharded_matmul(lhs, rhs)",
    ),
}

OPTIONS: dict[str, tuple[Any, str]] = {
    "preferred_element_type": ("bits", "`preferred_element_type` is 'bits', which can't hold the product."),
    "precision": ("most", "unknown `precision` 'most'."),
    "backend": ("mosaic", "backend 'mosaic' does not exist."),
    "group_offset": (jnp.zeros(2, jnp.int32), "`group_offset` must have shape (), but has (2,)."),
    "num_actual_groups": (2, "`num_actual_groups` is for a wgrad, but the layout is 'forward'."),
}


# A gate needs rows, and has no wgrad of which some groups could be computed.
NAMED = [each for each in itertools.product(CALLS, OPTIONS) if each != ("gate", "num_actual_groups")]


@pytest.mark.parametrize("call, option", NAMED)
def test_the_call_that_was_made_is_named(call: str, option: str) -> None:
    """And its own arguments, whatever product it makes of them."""
    (function, name), (value, text) = CALLS[call], OPTIONS[option]
    x, w = (UNIFORM, HEADS) if "turned" in call else (HEADS if "heads" in call else ROWS, UNIFORM)
    first, second = ("x", "w_gate") if call == "gate" else ("lhs", "rhs")
    came = f"Got {first}={describe(x)}, {second}={describe(w)}"
    check_error(lambda: function(**{option: value}), (TypeError, ValueError), f"`{name}`: {text}\n{came}")


def test_what_came_is_described() -> None:
    """Values that may be long are cut short, and what has no short text is named by its type."""
    operands = {
        "x": np.ones((2, 3), np.float16),
        "key": jax.random.key(0),
        "tensor": UNIFORM,
        "count": np.True_,
        "size": 1.5,
        "name": "row",
        "none": None,
        "few": [DIMS, (1, 2)],
        "many": list(range(9)),
        "module": eqx.nn.Identity(),
    }
    assert Site("call", operands).text("A problem.", "A hint.") == (
        "`call`: A problem.\n"
        "Got x=f16[2,3], key=key<fry>[], tensor=GroupedTensor(f32[4,8,6]), count=a bool, size=1.5, name='row', "
        "none=None, few=[i32[4], [1, 2]], many=[0, 1, 2, 3, 4, 5, 6, 7, ...], module=a Identity.\n"
        "A hint."
    )
    assert Site("call").text("A problem.", "A hint.") == "`call`: A problem.\nA hint."


def test_no_transposition_is_proposed_that_would_not_do() -> None:
    with pytest.raises(ValueError) as caught:
        ragged.matmul(ROWS, jnp.ones((4, 7, 16)))
    assert str(caught.value).endswith("They are contracted and must be equal.")


def test_errors_while_tracing_show_shapes_only() -> None:
    with pytest.raises(ValueError) as caught:
        jax.jit(ragged.matmul)(ROWS, jnp.ones((3, 8, 6)))
    assert str(caught.value) == (
        "`ragged.matmul(lhs, rhs)`: `lhs` has 4 groups but `rhs` has 3.\n"
        "Got lhs=GroupedTensor(f32[16,8], first_dims=i32[4]), rhs=f32[3,8,6].\n"
        "`rhs` needs one matrix per group, including empty groups (or fewer, with `group_offset`)."
    )


def test_nothing_is_allocated_by_a_failing_call() -> None:
    """Errors come from shapes alone: an operand of 4 TB that exists only as a shape is enough."""
    huge = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
    with pytest.raises(ValueError, match="contracted"):
        jax.eval_shape(lambda x: ragged.matmul(GroupedTensor(x, first_dims=DIMS), UNIFORM), huge)


def test_numpy_operands_are_taken() -> None:
    x = GroupedTensor(np.ones((16, 8), np.float32), first_dims=np.array([3, 5, 0, 4], np.int32))
    np.testing.assert_array_equal(ragged.matmul(x, np.ones((4, 8, 6), np.float32)).data[:12], np.full((12, 6), 8.0))


def test_64_bit_numpy_operands_are_what_jax_makes_of_them() -> None:
    sizes = np.array([3, 5, 0, 4], np.int32)
    for dtype, result in ((np.float64, jnp.float32), (np.int64, jnp.int32)):
        x, w = np.ones((16, 8), dtype), np.ones((4, 8, 6), dtype)
        out = ragged.grouped_matmul(x, w, sizes, existing_out=np.ones((16, 6), dtype))
        assert out.dtype == result
        np.testing.assert_array_equal(out[:12], np.full((12, 6), 9))
        assert ragged.transposed_grouped_matmul(x.T, x, sizes).dtype == result
        assert ragged.matmul(GroupedTensor(x, sizes), w).dtype == result


COUNTS: dict[str, Callable[[Any], Any]] = {
    "capacity": lambda n: ragged.matmul(BOTH.mT, ROWS, capacity=n),
    "max_last": lambda n: ragged.matmul(ROWS, COLUMNS, max_last=n),
    "num_actual_groups": lambda n: ragged.matmul(COLUMNS, ROWS, num_actual_groups=n),
    "num_actual_groups of plain arrays": lambda n: ragged.transposed_grouped_matmul(
        X.T, DY, SIZES, num_actual_groups=n
    ),
    "input_buffer_count": lambda n: ragged.grouped_matmul(X, W, SIZES, input_buffer_count=n),
    "tiling": lambda n: ragged.grouped_matmul(X, W, SIZES, tiling=(n, n, n)),
    "block of a scaling": lambda n: ragged.quantize(UNIFORM, jnp.int8, (1, n)),
    "length of a history": lambda n: ragged.Recipe.preset("delayed", length=n).history,
    "num_groups of a route": lambda n: ragged.route(jnp.array([0, 2, 1]), n).first_dims,
    "capacity of from_list": lambda n: GroupedTensor.from_list([jnp.ones((2, 3))], capacity=n),
    "capacity of from_padded": lambda n: GroupedTensor.from_padded(jnp.ones((4, 2, 3)), DIMS, capacity=n),
    "max_len of to_padded": lambda n: ROWS.to_padded(n),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    """A NumPy integer is a count; a bool isn't, wherever one is taken."""
    call = COUNTS[name]
    want = jax.eval_shape(lambda: call(5))
    for dtype in (np.int64, np.uint8):
        assert jax.eval_shape(lambda dtype=dtype: call(dtype(5))) == want
    for bad in (True, np.True_, 5.0, -1):
        with pytest.raises(ValueError, match=repr(bad) if name != "block of a scaling" else "`block` is"):
            call(bad)


MANY = jax.ShapeDtypeStruct((2**31, 8), jnp.float32)
SHAPES = GroupedTensor(MANY, jax.ShapeDtypeStruct((4,), jnp.int32))  # of which a tracer is made unchecked
MERGED = GroupedTensor(jax.ShapeDtypeStruct((2**30, 2, 8), jnp.float32), SHAPES.first_dims)


@pytest.mark.parametrize(
    "call, function, args",
    [
        ("GroupedTensor", lambda data: GroupedTensor(data, DIMS), (MANY,)),
        ("ragged.matmul(lhs, rhs)", ragged.matmul, (SHAPES, jax.ShapeDtypeStruct((4, 8, 6), jnp.float32))),
        ("ragged.matmul(lhs, rhs)", ragged.matmul, (MERGED, jax.ShapeDtypeStruct((4, 8, 6), jnp.float32))),
        (
            "ragged.grouped_matmul(lhs, rhs, group_sizes)",
            ragged.grouped_matmul,
            (MANY, jax.ShapeDtypeStruct((4, 8, 6), jnp.float32), SHAPES.first_dims),
        ),
        ("GroupedTensor.mask", lambda x: x.mean(-2), (SHAPES,)),
        ("GroupedTensor.offsets", lambda x: x.mT.offsets, (SHAPES,)),
        (
            "ragged.route(group_ids, num_groups)",
            lambda ids: ragged.route(ids, 4).order,
            (jax.ShapeDtypeStruct((2**30, 2), jnp.int32),),
        ),
    ],
)
def test_more_rows_than_int32_can_count(call: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """An error when traced, at the call."""
    problem = f"`{call}`: 2147483648 packed rows (or columns) are more than 2147483647.\n"
    check_error(lambda: jax.eval_shape(function, *args), ValueError, problem)


def test_as_many_rows_as_int32_can_count() -> None:
    x, w = jax.ShapeDtypeStruct((2**31 - 1, 8), jnp.float32), jnp.ones((4, 8, 6))
    assert jax.eval_shape(lambda x: (GroupedTensor(x, DIMS) @ w).mean(-2), x).shape == (4, 6)
