"""Serialisation of the library's types for `jax.export`.

`Exported.serialize` writes the pytree structure of a function's arguments and results, without arrays, but with static
fields. These are written as JSON, with tags for types that JSON lacks.
"""

import dataclasses
import json
from typing import Any

import jax.export
import jax.numpy as jnp
import numpy as np
from jax.tree_util import default_registry

from ragged.core.errors import Site
from ragged.core.scaling import Scaling
from ragged.nn.linear import GroupedLinear
from ragged.nn.moe import Experts, MoE, MoEStats
from ragged.nn.router import Router, Routing
from ragged.parallel.exchange import Exchange
from ragged.quant.history import History
from ragged.quant.recipe import Cast, Recipe
from ragged.quant.weights import QuantizedWeights
from ragged.tensor.arithmetic import per_column, per_group, per_row
from ragged.tensor.route import Gathered, Route
from ragged.tensor.tensor import GroupedTensor

STATIC: dict[str, Any] = {"Scaling": Scaling, "Cast": Cast}
"""Types of static fields, besides JSON's types, tuples and dtypes."""


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"tuple": [_to_json(each) for each in value]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if type(value) in STATIC.values():
        fields = {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    if callable(value):
        problem = f"a static field holds the function `{getattr(value, '__name__', value)}`, which can't be serialised."
        hint = "Pass the activation by name, as in `ragged.nn.Experts` with `activation='silu'`."
        Site("Exported.serialize()").fail(TypeError, problem, hint)
    return value


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tuple":
        return tuple(map(_from_json, content))
    if tag == "dtype":
        return jnp.dtype(content)
    return STATIC[tag](**{name: _from_json(each) for name, each in content.items()})


def _register(cls: Any) -> None:
    """Registers the serialisation of an Equinox module: its static fields, keyed by name, as JSON."""
    fields = dataclasses.fields(cls)
    leaves = [field.name for field in fields if not field.metadata.get("static", False)]
    static = [field.name for field in fields if field.metadata.get("static", False)]

    def build(aux_data: Any, children: Any) -> Any:
        instance = object.__new__(cls)
        for name, value in (*zip(leaves, children, strict=True), *aux_data.items()):
            object.__setattr__(instance, name, value)
        return instance

    # Find the position of each static field in Equinox's `auxdata`: flatten an instance whose fields hold their names.
    flat = default_registry.flatten_one_level(build({name: name for name in static}, leaves))
    assert flat is not None
    positions = {name: flat[1].index(name) for name in static}

    def serialize(auxdata: Any) -> bytes:
        return json.dumps({name: _to_json(auxdata[i]) for name, i in positions.items()}).encode()

    def deserialize(data: bytes | bytearray) -> dict[str, Any]:
        return {name: _from_json(value) for name, value in json.loads(data).items()}

    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"ragged.{cls.__name__}",
        serialize_auxdata=serialize,
        deserialize_auxdata=deserialize,
        from_children=build,
    )


TENSORS = (GroupedTensor, QuantizedWeights, per_group, per_row, per_column)
ROUTES = (Route, Gathered, Exchange)
LAYERS = (GroupedLinear, Experts, MoE, MoEStats, Recipe, Router, Routing)

for _cls in (*TENSORS, *ROUTES, *LAYERS):
    _register(_cls)
jax.export.register_pytree_node_serialization(
    History,
    serialized_name="ragged.History",
    serialize_auxdata=lambda auxdata: b"",
    deserialize_auxdata=lambda data: None,
)
