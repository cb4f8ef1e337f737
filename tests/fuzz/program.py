"""One random program: compiled once, run with many sizes and values, compared with NumPy.

A program is Python text. The fuzzer executes the same text that it prints as a reproducer.
"""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np

from tests import ran

from .approx import Approx, Result
from .operands import Arrays, Operand, Sizes, draw

HEADER = """\
import jax, jax.numpy as jnp, numpy as np, ragged
from jax.sharding import NamedSharding, PartitionSpec as P
from ragged import GroupedTensor
from ragged.tuning import GpuConfig, TpuConfig, XlaConfig
"""
MESH = 'mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))'
TRANSFORMATIONS = ("plain", "jit", "vmap", "scan", "shard_map", "mesh")
STACKED = ("vmap", "scan", "shard_map")
RUNS = {"xla": 200, "pallas_tpu": 25, "triton_gpu": 4}
"""How often a program runs, by backend."""


class Spec(NamedTuple):
    """The program of a builder: `body` is the body of a function of the `operands` that returns a list of arrays.

    `expected(arrays)` computes the same list in NumPy. `varying`: operands that differ between the devices of a
    `shard_map`, because gradients of an operand that devices share are summed over devices.
    """

    operands: dict[str, Operand]
    body: str
    expected: Callable[[Arrays], list[Result]]
    transformations: tuple[str, ...] = TRANSFORMATIONS
    varying: tuple[str, ...] = ()


class Program:
    """A compiled program of an operation on a backend. Constants are random, and so is the transformation, if None."""

    def __init__(
        self,
        builder: Callable[[Random, str], Spec],
        name: str,
        backend: str,
        seed: int,
        transformation: str | None = None,
    ) -> None:
        self.random = r = Random(f"{name} {backend} {seed}")
        self.title = f"{name}, {backend}, seed {seed}"
        self.backend, self.spec = backend, builder(r, backend)
        names = list(self.spec.operands)
        allowed = [each for each in self.spec.transformations if backend == "xla" or each != "mesh"]
        self.transformation = transformation or r.choice(allowed)
        some_are_constant = r.random() < 0.4
        varying = self.spec.varying if self.transformation == "shard_map" else ()
        constant = {each for each in names if some_are_constant and r.random() < 0.5} - {*varying}
        self.arguments = [each for each in names if each not in constant] or names
        self.mapped = {each: 2 for each in self.arguments if r.random() < 0.6 or each in varying}
        self.mapped = self.mapped or {self.arguments[0]: 2}
        if self.transformation not in STACKED:
            self.mapped = {}
        self.known: Arrays = {}
        of = {each: operand for each, operand in self.spec.operands.items() if each not in self.arguments}
        self.constants = draw(of, r, {}, self.known, set(self.arguments))
        self.function = [
            f"def program({', '.join(self.arguments)}):",
            *("    " + line for line in self.spec.body.splitlines()),
            *self._transformed(),
        ]
        self.scope: dict[str, Any] = {}
        exec("\n".join([HEADER, *self.constants, *self.function]), self.scope)

    def _transformed(self) -> list[str]:
        """Statements that define `run`, the transformed function."""
        names, is_mapped = ", ".join(self.arguments), [each in self.mapped for each in self.arguments]
        how = self.transformation
        if how == "vmap":
            axes = ", ".join("0" if each else "None" for each in is_mapped)
            return [f"run = jax.jit(jax.vmap(program, in_axes=({axes},)))"]
        if how == "scan":
            stacked = ", ".join(self.mapped)
            inner = f"lambda each: (lambda {stacked}: program({names}))(*each)"
            return [f"run = jax.jit(lambda {names}: jax.lax.map({inner}, ({stacked},)))"]
        if how == "shard_map":
            specs = ", ".join('P("x")' if each else "P()" for each in is_mapped)
            inner = ", ".join(f"{each}[0]" if each in self.mapped else each for each in self.arguments)
            inner = f"lambda {names}: [out[None] for out in program({inner})]"
            return [MESH, f'run = jax.jit(jax.shard_map({inner}, mesh=mesh, in_specs=({specs},), out_specs=P("x")))']
        if how == "mesh":
            return [MESH, "run = jax.jit(program)"]
        return ["run = program" if how == "plain" else "run = jax.jit(program)"]

    def _placed(self) -> list[str]:
        """Statements that shard the arguments over a mesh, along axes of even extent."""
        made = []
        for name in self.arguments if self.transformation == "mesh" else ():
            of = self.spec.operands[name]
            axes = [axis for axis, extent in enumerate(of.shape) if extent and extent % 2 == 0]
            axis = Random(f"{self.title} {name}").choice([None, *axes])
            if axis is not None:
                spec = ", ".join([*["None"] * axis, '"x"'])
                made.append(f"{name} = jax.device_put({name}, NamedSharding(mesh, P({spec})))")
        return made

    def run(self, launches: ran.Launches | None) -> str | None:
        """Runs with new sizes and values. Returns a reproducer if a result is wrong, else None.

        `launches`: the record of kernels. If it is given, the backend's kernel must be among them.
        """
        known = dict(self.known)
        of = {each: self.spec.operands[each] for each in self.arguments}
        data, placed = draw(of, self.random, self.mapped, known, set()), self._placed()
        lines = [*self.constants, *self.function, *data, *placed, f"got = run({', '.join(self.arguments)})"]
        if launches is not None:
            launches.clear()
        try:
            exec("\n".join(data), self.scope)
            arrays = {each: self.scope[each] for each in self.spec.operands}
            exec("\n".join([*placed, lines[-1]]), self.scope)
            got = [np.asarray(each) for each in self.scope["got"]]
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", "\n# ")
            return self._report(lines, [f"# This raises {text[:500]}"])
        if launches is not None and not self._falls_back and self.backend not in {backend for backend, _ in launches}:
            return self._report(lines, [f"# These kernels ran: {sorted(set(launches))}"])
        for i, (each, want, dtype) in enumerate(zip(got, *self._wanted(arrays), strict=True)):
            if str(each.dtype) != dtype or each.shape != want.value.shape:
                shown = f'"expected", "{dtype}{list(want.value.shape)}"'
                return self._report(lines, [f"print(got[{i}].dtype, got[{i}].shape, {shown})"])
            if (at := want.difference(each)) is not None:
                index = f"[{', '.join(map(str, at))}]" if at else "[()]"
                value, error = float(want.value[at]), float(want.error[at])
                shown = f'"got", np.asarray(got[{i}]){index}, "expected", "{value!r} within {error:.2g}"'
                return self._report(lines, [f"print({shown})  # got {each[at]}"])
        return None

    @property
    def _falls_back(self) -> bool:
        """Whether XLA computes the product: TPU kernels of several ragged dims have no `vmap` over sizes."""
        sizes = [name for name, of in self.spec.operands.items() if isinstance(of, Sizes)]
        is_mapped = self.transformation == "vmap" and any(name in self.mapped for name in sizes)
        return self.backend == "pallas_tpu" and is_mapped and len(sizes) > 1

    def _wanted(self, arrays: Arrays) -> tuple[list[Approx], list[str]]:
        """The expected results and their dtypes; stacked, if arguments are."""
        count = 2 if self.mapped else 1
        with np.errstate(all="ignore"):
            each = [
                self.spec.expected({name: a[i] if name in self.mapped else a for name, a in arrays.items()})
                for i in range(count)
            ]
            wants = [[one.want.rounded(one.dtype) for one in results] for results in zip(*each, strict=True)]
        dtypes = [one.dtype for one in each[0]]
        if not self.mapped:
            return [want for [want] in wants], dtypes
        return [Approx(np.stack([w.value for w in s]), np.stack([w.error for w in s])) for s in wants], dtypes

    def _report(self, lines: list[str], last: list[str]) -> str:
        """The program as text: imports, operands, the function, the call, and what is wrong."""
        has_mesh = any("make_mesh" in line for line in lines)
        devices = ['jax.config.update("jax_num_cpu_devices", 8)'] * has_mesh
        return "\n".join([f"# {self.title}", HEADER + "\n".join([*devices, *lines, *last])])
