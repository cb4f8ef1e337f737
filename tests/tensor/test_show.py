"""How a `GroupedTensor` is shown: by `repr`, inside of a module, in a notebook."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Wrong calls are made on purpose.

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import ragged
from ragged import GroupedTensor

SIZES = jnp.array([3, 5, 0, 4], jnp.int32)
X = GroupedTensor(jnp.ones((16, 8)), SIZES)


class Holder(eqx.Module):
    x: Any
    n: int = 2


def bars(html: str) -> list[tuple[str, str, int]]:
    """Title, text and width of each piece of the bar."""
    found = re.findall(r'<span title="([^"]*)" style="flex:(\d+)[^>]*>([^<]*)</span>', html)
    return [(title, text, int(width)) for title, width, text in found]


def test_it_prints_inside_of_a_module_as_alone() -> None:
    line = "GroupedTensor(f32[16,8], first_dims=[3, 5, 0, 4] (12 of 16 rows))"
    assert repr(X) == line
    assert repr(Holder(X)) == f"Holder(x={line})"
    wide = eqx.tree_pformat([X, X])
    assert wide == f"[\n  {line},\n  {line}\n]"
    assert eqx.tree_pformat(X, width=40) == (
        "GroupedTensor(\n  f32[16,8],\n  first_dims=[3, 5, 0, 4] (12 of 16 rows)\n)"
    )


def test_it_prints_the_scale_of_a_tensor() -> None:
    q = ragged.quantize(GroupedTensor(jnp.ones((16, 32)), SIZES), "float4_e2m1fn", "nvfp4")
    assert repr(q).endswith("scales=f8_e4m3fn[16,2] by nvfp4, tensor_scale=f32[])")


def test_a_notebook_shows_groups_as_wide_as_they_are() -> None:
    html = X._repr_html_()
    assert "<b>GroupedTensor</b> ragged rows, f32[16,8], 4 groups, 12 of 16 rows" in html
    groups = [("group 0: 3", "3", 3), ("group 1: 5", "5", 5), ("group 3: 4", "4", 4)]
    assert bars(html) == [*groups, ("tail: 4 rows", "&nbsp;", 4)]
    assert bars(X.mT._repr_html_())[-1] == ("tail: 4 columns", "&nbsp;", 4)
    both = GroupedTensor(jnp.ones((8, 4)), jnp.array([3, 5], jnp.int32), jnp.array([2, 4], jnp.int32))
    assert bars(both._repr_html_()) == [("group 0: 3 × 2", "3 × 2", 3), ("group 1: 5 × 4", "5 × 4", 5)]
    assert [text for _, text, _ in bars(both.mT._repr_html_())] == ["2 × 3", "4 × 5"]


def test_sizes_that_make_no_sense_are_shown_as_they_act() -> None:
    html = GroupedTensor(jnp.ones((16, 8)), jnp.array([-3, 50, 4], jnp.int32))._repr_html_()
    assert bars(html) == [("group 1: 50", "50", 16)] and "16 of 16 rows" in html


@pytest.mark.parametrize(
    "x",
    [
        GroupedTensor(jnp.ones((2, 3, 4))),
        jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), X),
        jax.tree.map(lambda leaf: None, X),
        jax.tree.map(lambda leaf: 0, X),
        eqx.filter(X, eqx.is_inexact_array),
        GroupedTensor(jax.ShapeDtypeStruct((4, 2), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)),
        GroupedTensor(jnp.ones((4, 2)), 0),
    ],
    ids=["uniform", "stack", "nones", "in_axes", "cotangent", "shapes", "axes of sizes"],
)
def test_what_has_no_sizes_is_a_line(x: GroupedTensor) -> None:
    html = x._repr_html_()
    assert "GroupedTensor" in html and not bars(html)
    assert repr(Holder(x)).startswith("Holder(")


def test_text_is_escaped() -> None:
    html = jax.tree.map(lambda leaf: "<script>", X)._repr_html_()
    assert "&lt;script&gt;" in html and "<script>" not in html


def test_no_values_are_looked_at() -> None:
    """Neither a tracer's, nor those of donated sizes, nor of many."""
    seen = []
    jax.jit(lambda x: seen.append((repr(x), x._repr_html_(), repr(Holder(x)))))(X)
    sizes = jnp.array([1, 2], jnp.int32)
    gone = GroupedTensor(jnp.ones((4, 2)), sizes)
    sizes.delete()
    many = GroupedTensor(jnp.ones((4, 2)), jnp.zeros(65, jnp.int32))
    seen += [(repr(each), each._repr_html_(), repr(Holder(each))) for each in (gone, many)]
    for line, html, holder in seen:
        assert re.search(r"first_dims=i32\[\d+\]", line) and line in holder
        assert "ragged rows" in html and not bars(html)


def test_a_quantised_tensor_says_by_what() -> None:
    q = ragged.quantize(X, jnp.float8_e4m3fn, "row")
    assert f"scales {q.scaling}" in q._repr_html_().replace("&#x27;", "'")
    assert len(bars(q._repr_html_())) == 4
