"""Products of the sizes of real layers, for compilers of TPUs and GPUs."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ragged
from ragged import GroupedTensor
from ragged.ops.matmul import request_of
from ragged.ops.request import Arguments
from ragged.primitive.primitive import bind, derivative
from tests.cases import LETTERS

Shape = tuple[int, int, int, int]  # rows of all groups, two extents that are the same in all of them, groups
Aval = jax.ShapeDtypeStruct
DEEP = (8192, 7168, 2048, 64)
LARGE, MANY, ODD, TINY = (4096, 2048, 2048, 8), (16384, 2048, 768, 128), (1000, 500, 300, 7), (128, 64, 10, 3)


def product(layout: str, shape: Shape, dtype: Any, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """A function of two buffers and the sizes, and its arguments. Forward and backward, but for integers."""
    rows, *uniform, groups = shape
    letters = LETTERS[layout]
    uniform = iter(uniform if letters else [rows // groups, *uniform])
    extent = {letter: rows if letter in letters else next(uniform) for letter in "mkn"}
    sizes = Aval((groups,), jnp.int32)

    def aval(term: str) -> Any:
        if set(term) <= set(letters):
            return Aval((rows, min(rows, 512)), dtype)  # columns left-aligned
        lead = () if set(term) & set(letters) else (groups,)
        return Aval((*lead, *(extent[letter] for letter in term)), dtype)

    if layout in ("outer", "ragged"):
        options["max_last"] = min(512, rows)

    def operands(lhs: Array, rhs: Array, dims: dict[str, Array]) -> list[GroupedTensor]:
        return [GroupedTensor(lhs, dims.get("m"), dims.get("k")), GroupedTensor(rhs, dims.get("k"), dims.get("n"))]

    def value(lhs: Array, rhs: Array, dims: dict[str, Array]) -> Array:
        return jnp.sum(ragged.matmul(*operands(lhs, rhs, dims), **options).data.astype(jnp.float32) ** 2)

    def three(lhs: Array, rhs: Array, dims: dict[str, Array]) -> list[Array]:
        """fp8 has no gradient: the same three products, each of fp8."""
        a, b = operands(lhs, rhs, dims)
        request = request_of(a, b, Arguments(**options))
        x, call = request.operands, request.call
        out = bind(x, call)
        by = [derivative(wrt, out.astype(dtype), x, call, getattr(x, wrt).data) for wrt in ("lhs", "rhs")]
        return [out, *(bind(terms, of._replace(dtype=jnp.bfloat16)) for terms, of in by)]

    if jnp.issubdtype(dtype, jnp.integer):
        function = value
    else:
        function = three if jnp.dtype(dtype).itemsize == 1 else jax.value_and_grad(value, argnums=(0, 1))
    return function, (aval("mk"), aval("kn"), dict.fromkeys(letters, sizes))


def train(recipe: Any, x: Array, w: Array, dy: Array, sizes: Array, backend: str | None = None) -> Any:
    """A forward, a dgrad and a wgrad, all quantised."""

    def forward(x: Array, w: Array) -> Array:
        return ragged.matmul(GroupedTensor(x, sizes), w, recipe=recipe, backend=backend).data

    out, pull = jax.vjp(forward, x, w)
    return out, pull(dy)


def trained_avals(shape: Shape) -> tuple[Any, ...]:
    rows, k, n, groups = shape
    dims = (rows, k), (groups, k, n), (rows, n)
    return *(Aval(each, jnp.bfloat16) for each in dims), Aval((groups,), jnp.int32)


def with_weights(dtype: str, scaling: Any, shape: Shape, symmetric: bool = True) -> tuple[Any, tuple[Any, ...]]:
    """A forward and a dgrad of weights in few bits, stored as `[groups, out, in]`, and its arguments. With zero points
    unless `symmetric`."""
    rows, k, n, groups = shape

    def run(x: Array, w: GroupedTensor, dy: Array, sizes: Array) -> Any:
        out, pull = jax.vjp(lambda x: ragged.matmul(GroupedTensor(x, sizes), w.mT).data, x)
        return out, pull(dy)

    quantize = partial(ragged.quantize, dtype=dtype, scaling=scaling, symmetric=symmetric)
    w = jax.eval_shape(quantize, Aval((groups, n, k), jnp.float32))
    x, dy = (Aval(dims, jnp.bfloat16) for dims in ((rows, k), (rows, n)))
    return run, (x, w, dy, Aval((groups,), jnp.int32))


def dequantized(text: str, size: int) -> list[str]:
    """What a lowered program converts from 8 bits or 4 outside of kernels, in arrays as large as an operand."""
    narrow, wide = r"f8\w+|f4\w+|u?i8|u?i4", r"bf16|f16|f32"
    wide = rf"stablehlo\.convert [^\n]*: \(tensor<([\dx]+)x(?:{narrow})>\) -> tensor<[\dx]+x(?:{wide})>"
    return [dims for dims in re.findall(wide, text) if math.prod(map(int, dims.split("x"))) >= size]


def sharded_gradients(mesh: Mesh, x: P, w: P) -> tuple[Any, list[Any]]:
    """A product's gradients by rows and by matrices, which are sharded as `x` and `w`, and their avals."""
    shapes = ((8192, 2048), x, jnp.bfloat16), ((16, 2048, 1024), w, jnp.bfloat16), ((16,), P(), jnp.int32)
    avals = [Aval(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, spec, dtype in shapes]

    def loss(x: Array, w: Array, sizes: Array) -> Array:
        return jnp.sum(jnp.sin(ragged.grouped_matmul(x, w, sizes).astype(jnp.float32)))

    return jax.grad(loss, (0, 1)), avals
