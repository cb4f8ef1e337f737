"""The contract's tests once more, with a TPU's or a GPU's kernels in place of XLA's: the tests are other modules'."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from . import cases, ran, test_epilogue, test_options
from .cases import NAMES
from .test_grouped import (  # noqa: F401
    test_fewer_matrices_than_sizes_are_a_shard,
    test_gradients_equal_the_definition,
    test_grouped_matmul,
    test_transposed_grouped_matmul,
)
from .test_matmul import test_operands_seen_through_mT  # noqa: F401
from .test_options import (  # noqa: F401
    test_a_float_that_integers_are_added_to,
    test_an_offset_never_wraps_around,
    test_dtypes,
    test_existing_out,
    test_existing_out_is_added_in_the_accumulator,
    test_group_offset,
    test_int8_is_exact_over_the_full_range,
    test_mixed_dtypes,
    test_nan_weights_of_an_empty_group,
    test_preferred_element_type,
    test_same_bits_every_time,
    test_wrong_sizes_never_leave_the_buffers,
)
from .test_transforms import SUBSETS, check_vmap, test_experts_over_a_mesh, test_shard_map  # noqa: F401

pytestmark = pytest.mark.sampled(0)


@pytest.fixture(autouse=True)
def nothing_but_the_kernels(kernels: tuple[str, ran.Launches], request: pytest.FixtureRequest) -> Iterator[None]:
    """XLA's run only where a backend has none, as its `lacks` says; and there they do."""
    backend, launches = kernels
    arguments: dict[str, Any] = request.node.callspec.params
    lacking = {"uint8", "int2", "uint2", *({"float16"} if backend == "pallas_tpu" else {})}
    dtypes = [argument for argument in arguments.values() if isinstance(argument, str)]
    wide = arguments.get("dtype") in ("int16", "int32")  # as operands
    expected = "xla" if wide or lacking.intersection(dtypes) else backend
    several = len(cases.LETTERS.get(arguments.get("layout", ""), "")) > 1
    if backend == "pallas_tpu" and several and "dims" in arguments.get("mapped", ()):
        expected = "pallas_tpu and xla"  # a map over the sizes of several letters, and the loop that it equals
    with ran.only(expected, launches):
        yield


BOTH = [(backend, layout, f"{layout} by {backend}") for backend in ("pallas_tpu", "triton_gpu") for layout in NAMES]
"""`kernels`, `layout`, and the two in one value, each of which is then among the cases that run."""
MAPPED = [
    *itertools.product(["forward", "wgrad"], SUBSETS),
    *(("outer", mapped) for mapped in (("lhs",), ("dims",), ("lhs", "rhs"))),
    *((layout, ("lhs",)) for layout in NAMES if layout not in ("forward", "wgrad", "outer")),
]


@pytest.mark.parametrize(
    "kernels, layout, pair, mapped",
    [(*both, mapped) for both in BOTH for layout, mapped in MAPPED if layout == both[1]],
    indirect=["kernels"],
)
def test_vmap_of_any_subset(layout: str, pair: str, mapped: tuple[str, ...]) -> None:
    """B3: values and gradients equal those of a loop; gradients taken inside and outside of the map."""
    check_vmap(layout, mapped, "float32", 1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kernels, layout, pair", BOTH, indirect=["kernels"])
def test_what_is_not_finite_stays_in_its_group(layout: str, pair: str, value: float) -> None:
    """B4, K19, K20, K21: poison one group of one operand; other groups' results and gradients keep their bits."""
    test_options.test_what_is_not_finite_stays_in_its_group(layout, value)


@pytest.mark.parametrize(
    "kernels, form",
    [("pallas_tpu", "gated, out"), ("triton_gpu", "gated, pre"), ("triton_gpu", "ungated")],
    indirect=["kernels"],
)
def test_transformations_of_endings(form: str) -> None:
    """E4: forward mode, Hessian-vector products, maps, gradients of maps, remat."""
    test_epilogue.test_transformations(form)
