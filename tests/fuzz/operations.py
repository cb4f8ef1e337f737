"""The table of operations. To add one, write a builder: a function of a random generator and a backend's name."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import NamedTuple

from tests.cases import NAMES

from . import products, tensors
from .program import Spec


class Operation(NamedTuple):
    """The builder of random programs, and the backends that may run them."""

    build: Callable[[Random, str], Spec]
    backends: tuple[str, ...] = ("xla",)


ALL = ("xla", "pallas_tpu", "triton_gpu")
OPERATIONS: dict[str, Operation] = {
    **{f"matmul, {name}": Operation(partial(products.matmul, name), ALL) for name in NAMES},
    **{f"gradient, {name}": Operation(partial(products.gradient, name), ALL) for name in NAMES},
    "matmul, scales": Operation(products.scaled, ALL),
    "matmul, recipe": Operation(products.recipe, ALL),
    "gated_matmul": Operation(products.gated_matmul, ALL),
    "einsum": Operation(products.einsum, ALL),
    "grouped_matmul": Operation(products.grouped_matmul, ALL),
    "sharded_matmul": Operation(products.sharded_matmul),
    "arithmetic": Operation(tensors.arithmetic),
    "reduction": Operation(tensors.reduction),
    "softmax": Operation(tensors.softmax),
    "slices": Operation(tensors.slices),
    "concat": Operation(tensors.concat),
    "padded": Operation(tensors.padded),
    "indices": Operation(tensors.indices),
    "route": Operation(tensors.route),
    "quantize": Operation(tensors.quantize),
}
