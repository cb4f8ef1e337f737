"""Code in the hints of errors runs, with the variables of the call that raised each: `tests/errors.py` has the calls.

A hint's code stands in backquotes. It is one of

- an expression, `x.dequantize()`, an assignment or the head of a statement, `with jax.set_mesh(mesh):`: it is run,
  expressions by `jax.eval_shape`, which compiles nothing;
- an argument, `recipe=None`: a function that the hint or the error names has it, and its value is an expression;
- a name, `group_offset`: a variable, an argument of such a function, or a public name of JAX or of this library.
"""

import ast
import builtins
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
from jax.core import ShapedArray, Tracer
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jaxtyping import Float

import ragged
from ragged import GroupedTensor, tuning
from ragged.core import errors as core_errors
from tests import errors
from tests.docs.context import jax_defaults

SPACES = (ragged, tuning, jax, jax.lax, AxisType, GroupedTensor, builtins)
"""Where a name may be from."""

STAND_INS: dict[str, Any] = {
    "Float": Float,
    "Route": ragged.Route,
    "Exchange": ragged.Exchange,
    "functools": functools,
    "pltpu": pltpu,
    "f": lambda w: jnp.sum(w**2),
    "fn": lambda *args: args[0],
    "first": 0,
    "max_len": 8,
    "num_groups": 3,
    "PartitionSpec": jax.P,
    "NamedSharding": jax.NamedSharding,
}
"""What a reader has, and the call that raised does not show."""

OF_CALLS: dict[str, dict[str, str]] = {
    "GroupedTensor(part, sizes) + 1": {"x": "part", "spec": "NamedSharding(explicit, P())"},
    "heads.mT": {"y": "heads"},
    "GroupedTensor(heads.data, sizes, sizes).mT": {"y": "GroupedTensor(jnp.ones((16, 2, 5)), sizes)"},
    "ragged.matmul(jnp.ones((2, 4, 8)), w)": {"group_ids": "jnp.zeros((2, 4), jnp.int32)"},
    "ragged.nn.MoE": {
        "w_gate": "jnp.ones((3, 8, 6))",
        "w_up": "jnp.ones((3, 8, 6))",
        "w_down": "jnp.ones((3, 6, 8))",
        "weights": "jnp.ones(4)",
    },
    "moe(x.data, routing": {"weights": "jnp.ones((16, 2))"},
    "router(jnp.ones((2, 4, 8))": {"x": "jnp.ones((2, 4, 8))"},
    "GroupedTensor.from_list([jax.device_put": {"groups": "[jnp.ones((2, 3)), jnp.ones((2, 3))]"},
    "ragged.route": {"x": "jnp.ones((2, 2, 8))"},
    "route.combine": {"x": "tokens"},
    "routes.dispatch": {"route": "routes", "x": "jnp.ones((2, 4, 8))"},
    "routes.gathered": {"route": "routes", "x": "tokens"},
    "routes.combine": {
        "route": "routes",
        "y": "jax.vmap(ragged.Route.dispatch, (0, None))(routes, tokens)",
        "weights": "jnp.ones((2, 4))",
    },
}
"""Variables of calls that begin like this, where the setup's are others."""

DEAR = ("jax.grad(lambda w: jnp.sum(jax.grad", "with jax.set_mesh", "over(")
"""Beginnings of calls that take seconds."""


def parts() -> Iterator[Any]:
    """Each call whose hint has code."""
    entries = re.findall(r"```text\n>>> (.*)\n((?:.*\n)+?)```", errors.PAGE.read_text())
    codes = [code for code, message in entries if "`" in message.rpartition("\nGot ")[2].partition("\n")[2]]
    assert len(codes) > 100
    dear = [code for code in codes if code.startswith(DEAR)]
    yield pytest.param([code for code in codes if code not in dear], id="most")
    yield pytest.param(dear, id="dear", marks=pytest.mark.long)


@contextmanager
def noted() -> Iterator[list[tuple[core_errors.Site, str]]]:
    """Each error that is made: its site, and its hint."""
    found: list[tuple[core_errors.Site, str]] = []
    text = core_errors.Site.text

    def note(site: core_errors.Site, problem: str, hint: str) -> str:
        whole = text(site, problem, hint)
        found.append((site, whole[len(text(site, problem, "")) :]))
        return whole

    with patch.object(core_errors.Site, "text", note):
        yield found


def concrete(x: Any) -> Any:
    """`x` with ones in place of what is traced."""

    def ones(leaf: Any) -> Any:
        return jnp.ones(leaf.shape, leaf.dtype) if isinstance(leaf, Tracer | ShapedArray) else leaf

    return jax.tree.map(ones, x, is_leaf=lambda leaf: isinstance(leaf, ShapedArray))


def variables(code: str, site: core_errors.Site, setup: dict[str, Any]) -> dict[str, Any]:
    """What a hint's code may name: operands and keywords of the call, else what the setup defines."""
    found = setup | STAND_INS | {"g": setup["gradient"], "group_ids": setup["ids"]}
    for node in ast.walk(ast.parse(code)):
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            try:
                found[keyword.arg or ""] = eval(ast.unparse(keyword.value), dict(setup))
            except NameError:  # of a function's own variables
                continue
    found |= {site.names.get(name, name): concrete(value) for name, value in site.operands.items()}
    found["mesh"], x = setup["auto"], found["x"]
    is_rows = isinstance(x, ragged.Gathered) or (isinstance(x, GroupedTensor) and x.kind in ("uniform", "ragged rows"))
    if is_rows and isinstance(x.data, jax.Array) and "x" in site.operands and "w" not in site.operands:
        found["w"] = jnp.ones((x.num_groups, x.shape[-1], 2))
    for start, more in OF_CALLS.items():
        if code.startswith(start):
            found |= {name: eval(value, dict(setup)) for name, value in more.items()}
    return found


def has_argument(function: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or ("options" in parameters and name in inspect.signature(ragged.matmul).parameters)


def run(span: str, hint: str, site: core_errors.Site, names: dict[str, Any]) -> None:
    """Runs one piece of code of a hint, or looks for what it names."""

    def functions() -> Iterator[Callable[..., Any]]:
        for text in (site.call.partition("(")[0], *re.findall(r"`([\w.]+)[`(]", hint)):
            try:
                found = eval(text, dict(names))
            except (NameError, AttributeError):
                found = getattr(ragged, text, None) or (lambda: None)
            yield found
            if isinstance(found, type) and "__call__" in vars(found):  # a layer
                yield found.__call__

    if span.isidentifier():
        known = span in names or any(hasattr(space, span) for space in SPACES)
        assert known or any(has_argument(function, span) for function in functions()), "no such name"
    elif argument := re.fullmatch(r"(\w+)=([^=].*)", span):
        assert any(has_argument(function, argument[1]) for function in functions()), "no such argument"
        eval(argument[2], dict(names))
    elif span.endswith(":"):
        exec(f"{span} pass", dict(names))
    elif statement := re.fullmatch(r"(\w+) = (.*)", span):
        names[statement[1]] = eval(statement[2], dict(names))
    else:
        assert "..." not in span.replace("[...", "["), "a placeholder"
        jax.eval_shape(lambda: (eval(span, dict(names)), None)[1])


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    return errors.setup()


@pytest.mark.parametrize("codes", [*parts()])
def test_code_of_hints_runs(codes: list[str], setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(errors.ROOT)
    broken = []
    with jax_defaults():
        for code in codes:
            mesh = jax.sharding.get_mesh()
            with noted() as made:
                errors.raised(code, dict(setup))
            if jax.sharding.get_mesh() != mesh:
                jax.set_mesh(mesh)
            assert made, f"{code} raises nothing: run `python -m tests.errors`"
            site, hint = made[-1]
            names = variables(code, site, setup)
            for span in re.findall(r"`([^`]+)`", hint):
                try:
                    run(span, hint, site, names)
                except Exception as error:
                    broken.append(f"{code}\n    {hint}\n    `{span}`: {error!r}"[:600])
    assert not broken, "\n\n".join(broken)
