"""The table of hand-picked mutants is up to date."""

from pathlib import Path

from tests.mutation.kernels import GPU, TPU

BACKENDS = Path(__file__).parents[2] / "ragged" / "backends"


def test_each_mutation_has_one_place() -> None:
    """So that a change of a kernel changes the table, too."""
    assert len(TPU) == len(GPU) == 30
    for backend, table in (("tpu", TPU), ("gpu", GPU)):
        texts = {name: (BACKENDS / backend / f"{name}.py").read_text() for name, _, _ in table}
        for name, old, new in table:
            assert texts[name].count(old) == 1 and old != new, (backend, name, old)
