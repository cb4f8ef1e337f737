"""The table of layouts is what the docstring of its module says."""

import itertools
import re

from ragged.product import layout as module
from ragged.product.layout import LAYOUTS, infer_layout


def test_the_module_s_table_is_the_data() -> None:
    """Eight sets of ragged letters: the kinds of the three terms, the name, and the names of both derivatives."""
    rows = [re.split(" {2,}", line.strip()) for line in str(module.__doc__).splitlines()]
    for m, k, n in itertools.product((False, True), repeat=3):
        layout = infer_layout((m, k), (k, n))
        assert layout is not None and infer_layout((m, k), (not k, n)) is None
        kinds = [layout.kind(term) for term in ("mk", "kn", "mn")]
        names = [layout.name, *(layout.derivative(wrt).name for wrt in ("lhs", "rhs"))]
        assert [" ".join(layout.ragged) or "-", *kinds, *names] in rows
    assert len(LAYOUTS) == 8
