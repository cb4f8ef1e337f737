"""The table of layouts, against what it says of itself; and `explain`."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import ragged
from ragged import GroupedTensor
from ragged.product.layout import LAYOUTS, Product, infer_layout
from tests.cases import NAMES


def test_the_table_has_every_set_of_ragged_letters() -> None:
    """Eight sets, eight layouts, and the operands' columns say the same as the letters."""
    assert len(LAYOUTS) == 8
    for flags in itertools.product((False, True), repeat=3):
        m, k, n = flags
        layout = infer_layout((m, k), (k, n))
        assert layout is not None
        mark = {False: "U", True: "R"}
        assert layout.kind("mk") == f"{mark[m]}·{mark[k]}"
        assert layout.kind("kn") == f"{mark[k]}·{mark[n]}"
        assert layout.kind("mn") == f"{mark[m]}·{mark[n]}"
        assert infer_layout((m, k), (not k, n)) is None


def test_derivatives_are_layouts() -> None:
    """Dlhs = dout @ rhs.mT and drhs = lhs.mT @ dout, inferred from the operands that those products have."""
    for layout in LAYOUTS.values():
        m, k, n = (letter in layout.ragged for letter in "mkn")
        dlhs, drhs = infer_layout((m, n), (n, k)), infer_layout((k, m), (m, n))
        assert dlhs == layout.derivative("lhs")
        assert drhs == layout.derivative("rhs")


def test_a_derivative_exchanges_a_term_with_the_result() -> None:
    forward = Product("mk", "nk", "mn", "m")
    assert forward.contracted == "k"
    by_lhs, by_rhs = forward.derivative("lhs"), forward.derivative("rhs")
    assert (by_lhs.lhs, by_lhs.rhs, by_lhs.out, by_lhs.contracted) == ("mn", "nk", "mk", "n")
    assert (by_rhs.lhs, by_rhs.rhs, by_rhs.out, by_rhs.contracted) == ("mk", "mn", "nk", "m")
    assert by_lhs.derivative("lhs") == forward


def test_the_module_s_table_is_the_data() -> None:
    """The table in the docstring lists the same eight rows."""
    from ragged.product import layout as _layout

    assert _layout.__doc__ is not None
    for layout in LAYOUTS.values():
        letters = " ".join(layout.ragged) or "-"
        kinds = [layout.kind(term) for term in ("mk", "kn", "mn")]
        row = [letters, *kinds, layout.name, *(layout.derivative(wrt).name for wrt in ("lhs", "rhs"))]
        assert any(
            "  ".join(row) == "  ".join(line.split("  ")) or [c.strip() for c in line.split("  ") if c.strip()] == row
            for line in _layout.__doc__.splitlines()
        ), row


def test_explain() -> None:
    """What would run, from shapes alone."""
    x = GroupedTensor(jnp.ones((16, 4)), first_dims=jnp.array([3, 5, 0, 4], jnp.int32))
    w = jnp.ones((4, 4, 8))
    want = (
        "forward: ragged rows × uniform -> ragged rows, f32[16,8]\n"
        "derivatives: by lhs forward, by rhs wgrad\n"
        "on cpu: grouped_matmul of xla\n"
        "on cuda: grouped_matmul of triton_gpu\n"
        "on tpu: grouped_matmul of pallas_tpu"
    )
    assert str(ragged.explain(x, w)).partition("\n\n")[0] == want
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, w))
    assert str(ragged.explain(*shapes)).partition("\n\n")[0] == want
    assert "on tpu: grouped_matmul of xla\n" in str(ragged.explain(x, w, backend="xla"))
    assert str(ragged.explain(w.mT, x.mT)).startswith(
        "forward_left: uniform × ragged columns -> ragged columns, f32[8,16]"
    )
    with pytest.raises(ValueError, match="contracted dims must both be ragged"):
        ragged.explain(x, x)
    with pytest.raises(TypeError, match="`matmul` has no option `tilings`"):
        ragged.explain(x, w, tilings=(8, 8, 8))


@pytest.mark.parametrize("layout", NAMES)
def test_explain_knows_every_layout(layout: str) -> None:
    from tests import cases

    case = cases.make(layout)
    assert str(ragged.explain(case.lhs, case.rhs)).startswith(f"{layout}: {case.lhs.kind} × {case.rhs.kind}")
