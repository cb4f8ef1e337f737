"""Races that Pallas's interpreter finds. It sets a flag that nobody reads, and prints, or raises from jax 0.12 on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
from jax._src import dispatch
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

_INTERPRETER: Any = interpret_pallas_call
_STATE = _INTERPRETER.RaceDetectionState


@contextmanager
def no_races() -> Iterator[None]:
    """Fails if a kernel that was interpreted in here with `detect_races` has a race."""
    states = []
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:  # that an earlier test expected, and left
        dispatch.runtime_tokens.clear()

    def state(*args: Any, **kwargs: Any) -> Any:
        states.append(_STATE(*args, **kwargs))  # each kernel has its own
        return states[-1]

    with mock.patch.object(_INTERPRETER, "RaceDetectionState", state):
        try:
            yield
            if states:
                jax.effects_barrier()
        finally:
            pltpu.reset_tpu_interpret_mode_state()  # which an error in a kernel leaves as it was
    assert not any(state.races_found for state in states), "a kernel has a race: see what the interpreter printed"
