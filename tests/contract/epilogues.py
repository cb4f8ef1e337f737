"""Programs of products with biases, activations and gates, and of rows that are gathered by a route."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import ndtr

import ragged
from tests.contract import loop
from tests.contract.draws import LEAST, MOST, Draw, draws, values
from tests.contract.experts import sigmoid
from tests.contract.loop import ROUNDING, UNDERFLOW, Arrays, Term, covered
from tests.contract.programs import Program
from tests.moe import clamped

Numpy = Callable[..., np.ndarray]


class Near(NamedTuple):
    """Numbers, and how far from them float32 may be: one rounding for each operation."""

    value: np.ndarray
    error: np.ndarray

    def __add__(self, other: "Near") -> "Near":  # type: ignore[override]
        return Near(self.value + other.value, self.error + other.error).rounded("float32")

    def __mul__(self, other: "Near") -> "Near":  # type: ignore[override]
        error = np.abs(self.value) * other.error + self.error * (np.abs(other.value) + other.error)
        return Near(self.value * other.value, error).rounded("float32")

    def rounded(self, dtype: str) -> "Near":
        error = self.error + ROUNDING[dtype] * (np.abs(self.value) + self.error)
        return Near(self.value, error + UNDERFLOW.get(dtype, 2.0**-126) * (self.value != 0))

    def where(self, mask: Any) -> "Near":
        return Near(*(np.where(mask, each, 0) for each in self))


def exact(x: Any) -> Near:
    return Near(np.asarray(x).astype(np.float64), np.zeros(x.shape))


def total(parts: list[Near]) -> Near:
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    return found


def stacked(parts: list[Near]) -> Near:
    return Near(*map(np.stack, zip(*parts, strict=True)))


def applied(function: Numpy, *z: Near, slack: float = 0.0) -> Near:
    """A function of numbers that are known up to an error. float32 computes it to `2**-18` of its value, and to
    `slack` of its arguments, of which a derivative may be a small difference. Comparisons with NaN are exact."""
    value = function(*(each.value for each in z))
    corners = itertools.product(*([each.value - each.error, each.value + each.error] for each in z))
    error = np.max([np.abs(function(*corner) - value) for corner in corners], axis=0)
    sizes = np.nan_to_num(np.prod([1 + np.abs(each.value) for each in z], axis=0))
    return Near(value, error + 2.0**-18 * np.abs(value) + slack * sizes + 2.0**-100)  # its parts may underflow


# Activations.


class Activation(NamedTuple):
    """What is passed, what it computes, and its derivative by each of its arguments."""

    passed: Any
    value: Numpy
    slopes: tuple[Numpy, ...]

    def curve(self, i: int, j: int) -> Numpy:
        """The second derivative by the arguments `i` and `j`: differences of the fourth order."""

        def at(*z: np.ndarray) -> np.ndarray:
            def moved(steps: float) -> np.ndarray:
                return self.slopes[i](*(each + (n == j) * steps * 1e-3 for n, each in enumerate(z)))

            return (8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))) / 12e-3

        return at


def _quick(z: Any) -> Any:
    return z * sigmoid(1.702 * z)


def _of_quick(z: Any) -> Any:
    s = sigmoid(1.702 * z)
    return s + 1.702 * z * s * (1 - s)


def _of_gelu_tanh(z: Any) -> Any:
    s = sigmoid(2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))
    return s + z * s * (1 - s) * 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z**2)


ACTIVATIONS = {
    "": Activation(None, lambda z: z, (np.ones_like,)),
    "relu": Activation("relu", lambda z: np.maximum(z, 0), (lambda z: (z > 0) * 1.0,)),
    "silu": Activation("silu", lambda z: z * sigmoid(z), (lambda z: sigmoid(z) * (1 + z * (1 - sigmoid(z))),)),
    "gelu": Activation(
        "gelu",
        lambda z: z * ndtr(z),
        (lambda z: ndtr(z) + z * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi),),
    ),
    "gelu_tanh": Activation(
        "gelu_tanh", lambda z: z * sigmoid(2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)), (_of_gelu_tanh,)
    ),
    "sigmoid": Activation("sigmoid", sigmoid, (lambda z: sigmoid(z) * (1 - sigmoid(z)),)),
    "tanh": Activation("tanh", np.tanh, (lambda z: 1 - np.tanh(z) ** 2,)),
    "softplus": Activation(jax.nn.softplus, lambda z: np.logaddexp(z, 0), (sigmoid,)),
    "relu squared": Activation(
        lambda z: jnp.square(jax.nn.relu(z)), lambda z: np.maximum(z, 0) ** 2, (lambda z: 2 * np.maximum(z, 0),)
    ),
    "quick gelu": Activation(lambda z: z * jax.nn.sigmoid(1.702 * z), _quick, (_of_quick,)),
    "clamped": Activation(
        clamped,
        lambda gate, up: (np.clip(up, -7, 7) + 1) * _quick(np.minimum(gate, 7)),
        (
            lambda gate, up: (np.clip(up, -7, 7) + 1) * _of_quick(np.minimum(gate, 7)) * (gate < 7),
            lambda gate, up: _quick(np.minimum(gate, 7)) * (np.abs(up) < 7),
        ),
    ),
}
"""By name. A gate may have a function of two arguments; one of one argument is multiplied by the other product."""


def of_gate(f: Activation) -> Activation:
    """The function of two arguments."""
    if len(f.slopes) == 2:
        return f
    return Activation(f.passed, lambda g, u: f.value(g) * u, (lambda g, u: f.slopes[0](g) * u, lambda g, u: f.value(g)))


# Programs.


@dataclass(frozen=True)
class Epilogue(Program):
    """A product whose rows get a bias, an activation and a gate, or are gathered by a route."""

    activation: str = ""
    bias: str = ""  # of each product, "each": a row for each group, "one": a row for all, "no"
    bias_dtype: str = ""
    gate: bool = False
    columns: str = ""  # whether one weight holds both matrices
    save: str = "pre"
    top_k: int = 0  # how many groups each token is routed to, if its rows are gathered
    in_loops: bool = False

    keeps_primal = True
    inputs = ("lhs", "rhs", "up", "bias", "up_bias", "existing")
    draws = "epilogue_draws"

    @property
    def weights(self) -> tuple[str, ...]:
        return ("rhs", "up") if self.gate else ("rhs",)

    @property
    def biases(self) -> dict[str, str]:
        """The bias of each product that has one."""
        kinds = zip(self.weights, self.bias.split(), strict=False)
        return {name: {"rhs": "bias", "up": "up_bias"}[name] for name, kind in kinds if kind != "no"}

    @cached_property
    def terms(self) -> dict[str, Term]:
        found = {name: self._term(name) for name in loop.TERMS}
        found |= {"up": found["rhs"]} if self.gate else {}
        for name, kind in zip(("bias", "up_bias"), self.bias.split(), strict=False):
            if kind != "no":
                groups = () if kind == "one" else (self.held or self.groups,)
                found[name] = Term("1n", "", "", (*groups, 1, self.n))
        return found

    @cached_property
    def dtypes(self) -> dict[str, str]:
        found = {name: each for name, each in super().dtypes.items() if not name.startswith("d ")}
        found |= {"up": found["rhs"]} if self.gate else {}
        found |= dict.fromkeys(self.biases.values(), self.bias_dtype or found["rhs"])
        if self.order == 2:
            found |= {f"d {name}": found[name] for name in self.inputs if name in found}
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        if self.top_k and name.removeprefix("d ") == "lhs":
            return (*shape[:-2], shape[-2] // self.top_k, shape[-1])
        return shape

    # What it computes.

    def is_differentiable(self, name: str) -> bool:
        return super().is_differentiable(name) and not (name == "up" and "rhs" in self.casts)

    def values(self, arrays: dict[str, Array], sizes: dict[str, Array], first: Any) -> dict[str, Array]:
        found = super().values(arrays, sizes, first)
        if self.gate and "rhs" in self.casts:
            found["up"] = super().values(arrays | {"rhs": arrays["up"]}, sizes, first)["rhs"]
        return found

    def multiply(self, arrays: dict[str, Array], sizes: dict[str, Array], first: Any) -> Array:
        options = self.options("out", first) | self.result_options(arrays)
        options |= {"activation": ACTIVATIONS[self.activation].passed, "save": self.save}
        route = ragged.route(sizes["ids"], self.groups) if self.top_k else None
        given = arrays | ({"lhs": jnp.zeros((1, 1, 1))} if route else {})
        lhs, rhs = self.sides(given, {} if route else sizes)
        if route:
            lhs = route.gathered(arrays["lhs"])
        first_bias, second_bias = (arrays[name][..., 0, :] if name in arrays else None for name in ("bias", "up_bias"))
        if not self.gate:
            return ragged.matmul(lhs, rhs, bias=first_bias, **options).data
        del options["existing_out"]
        bias: Any = (first_bias, second_bias)
        if not self.columns:
            _, up = self.sides(given | {"rhs": arrays["up"]}, {} if route else sizes)
            return ragged.gated_matmul(lhs, rhs, up, bias=bias, **options).data
        weight = _of_columns(self.columns, arrays["rhs"], arrays["up"])
        if first_bias is not None and second_bias is not None and first_bias.ndim == second_bias.ndim:
            bias = _of_columns(self.columns, first_bias, second_bias)
        return ragged.gated_matmul(lhs, weight, columns=self.columns, bias=bias, **options).data

    def places(self, sizes: Arrays, first: Any = 0, element: int = 0) -> dict[str, list[Any]]:
        return super().places(self.sizes(sizes, element) if self.top_k else sizes, first, element)

    def sizes(self, sizes: Arrays, element: int = 0) -> Arrays:
        """Those of groups, which follow from ids."""
        if not self.top_k:
            return sizes
        ids = self._ids(sizes, element)
        return {"m": np.bincount(ids[(ids >= 0) & (ids < self.groups)], minlength=self.groups)}

    def with_matrices(self, draw: Draw, element: int) -> np.ndarray:
        """Where the result has rows of groups that have a matrix."""
        return covered(self.terms["out"].shape, self.places(draw.sizes, draw.first, element)["out"])

    def in_groups(self, draw: Draw, element: int) -> np.ndarray:
        """Where it has rows of any group."""
        return self.mask(self.sizes(draw.sizes, element), element)

    def source(self, sizes: Arrays, element: int) -> np.ndarray:
        """The token of each row, by group and then by token; rows of no group come last."""
        ids = self._ids(sizes, element)
        return np.argsort(np.where((ids >= 0) & (ids < self.groups), ids, self.groups), kind="stable") // self.top_k

    def _ids(self, sizes: Arrays, element: int) -> np.ndarray:
        return (sizes["ids"][element] if self.has_batch("sizes") else sizes["ids"]).ravel()

    # What it should give.

    def faults(self, draw: Draw, result: Any, bits: int) -> dict[str, str]:
        values = {name.removesuffix(" values"): x for name, x in result.items() if name.endswith(" values")}
        result = {name: x for name, x in result.items() if not name.endswith(" values")}
        draw = draw._replace(data=draw.data | values)
        parts = [self._wanted(draw, i) for i in range(self.batch)]
        found = {}
        for name, got in result.items():
            name_of = name.removesuffix(" inside")
            each = [part[name_of] for part in parts]
            term = name_of.removesuffix(" of cotangents")
            term = "out" if term in ("primal", "tangent", "existing") else term
            is_apart = name != name_of or self.has_batch(term)
            want = (stacked(each) if is_apart else total(each)) if self.mapped else each[0]
            value, error = want.rounded(self.dtypes[term])
            if name not in ("out", "primal"):  # Some derivatives are 0 of NaN, such as that of `relu`.
                value, error = np.where(np.isnan(value), got, value), np.where(np.isnan(value), np.inf, error)
            found[name] = loop.beyond(got, value, error, self.dtypes[term])
        return found

    def _wanted(self, draw: Draw, element: int) -> dict[str, Near]:
        """Each result of an element of the batch, as far as it is known, before its last rounding."""
        with np.errstate(all="ignore"):
            return _Wanted(self, draw, element).results()

    # Which kernels.

    def check(self, inputs: Any, bits: int = 24) -> list[tuple[str, str]]:
        ran = super().check(inputs, bits)
        kernels = [kernel for _, kernel in ran]
        if self.is_fused:
            # The result alone, and with pre-activations (without it, if these are computed again).
            has_saved = self.save == "pre" and bool(self.gate or self.activation)
            stored, inside = {"1", str(1 + self.gate + has_saved)}, {str(1 + self.gate)} if self.mapped else set()
            assert stored <= {kernel.rpartition(" -> ")[2] for kernel in kernels if "->" in kernel} <= stored | inside
        else:
            assert not any("->" in kernel for kernel in kernels), kernels
        if self.top_k and self.backend == "triton_gpu":
            assert any(kernel.startswith("grouped_matmul by index") for kernel in kernels), kernels
            assert any(kernel.startswith("transposed_grouped_matmul by index") for kernel in kernels), kernels
        return ran

    @property
    def is_fused(self) -> bool:
        """Whether one kernel computes all of it."""
        has_epilogue = self.activation or {*self.bias.split()} - {"no"} or self.gate
        is_of_rows = self.layout in ("forward", "batched") and not self.existing and not self.shared
        is_mapped = bool({*self.mapped.split()} - {"lhs", "sizes", "first"}) and self.context != "devices"
        return bool(has_epilogue) and is_of_rows and not is_mapped and self.backend != "xla"


class _Wanted:
    """The oracle of one element of the batch of a draw."""

    def __init__(self, program: Epilogue, draw: Draw, element: int) -> None:
        self.program, self.where = program, program.places(draw.sizes, draw.first, element)
        its = {name: x[element] if program.has_batch(name) else x for name, x in draw.data.items()}
        self.source: np.ndarray | None = None
        if program.top_k:
            self.source = program.source(draw.sizes, element)
            its |= {name: its[name][self.source] for name in ("lhs", "d lhs") if name in its}
        self.data = {name: exact(x) for name, x in its.items()}
        f = ACTIVATIONS[program.activation]
        self.function = of_gate(f) if program.gate else f
        self.mask = program.with_matrices(draw, element)
        self.in_groups = program.in_groups(draw, element)

    def summed(self, value: np.ndarray, error: np.ndarray, sizes: np.ndarray) -> Near:
        return Near(value, error + (self.program.most_terms + 10) * 2.0**-24 * sizes)

    def product(self, name: str, x: Near, y: Near) -> Near:
        """The term `name` of a product, from the two others."""
        shape, where = self.program.terms[name].shape, self.where
        value, sizes = loop.product(name, x.value, y.value, shape, where)
        errors = (x.error, np.abs(y.value) + y.error), (np.abs(x.value), y.error)
        first, second = (loop.product(name, *pair, shape, where).value for pair in errors)
        return self.summed(value, first + second, sizes)

    def of_rows(self, bias: Near, name: str) -> Near:
        """The bias of each row's group."""
        rows = np.zeros(self.mask.shape)
        for at, of in zip(self.where["out"], self.where[name], strict=True):
            if at is not None:
                rows[at] = bias.value[of]
        return exact(rows)

    def of_bias(self, dz: Near, name: str) -> Near:
        """The cotangent of a bias: the sum over the rows of each group."""
        found = np.zeros((3, *self.program.terms[name].shape))
        for at, of in zip(self.where["out"], self.where[name], strict=True):
            if at is not None:
                for into, each in zip(found, (*dz, np.abs(dz.value)), strict=True):
                    into[of] += each[at].sum(-2, keepdims=True)
        return self.summed(*found)

    def of_tokens(self, rows: Near) -> Near:
        """The cotangent of tokens: the sum over their rows, each of which is rounded."""
        if self.source is None:
            return rows
        found = np.zeros((2, *self.program.shape("lhs")[-2:]))
        for row in np.flatnonzero(self.mask.any(-1)):
            found[:, self.source[row]] += np.stack(rows.rounded(self.program.dtypes["lhs"]))[:, row]
        return Near(*found)

    def pre_activations(self, arrays: dict[str, Near], *, of: dict[str, Near] | None = None) -> list[Near]:
        """Of each weight; or their tangents, those of these arrays: the arrays are `of` what is differentiated."""
        found = []
        for w in self.program.weights:
            pairs = [(arrays["lhs"], arrays[w])] if of is None else [(arrays["lhs"], of[w]), (of["lhs"], arrays[w])]
            z = total([self.product("out", *pair) for pair in pairs])
            if name := self.program.biases.get(w):
                z = z + self.of_rows(arrays[name], name)
            found.append(z)
        return found

    def cotangents(self, arrays: dict[str, Near], dz: list[Near]) -> dict[str, Near]:
        """Of the operands and biases, from those of the pre-activations."""
        found, parts = {}, []
        for w, each in zip(self.program.weights, dz, strict=True):
            parts.append(self.product("lhs", each, arrays[w]))
            found[w] = self.product("rhs", arrays["lhs"], each)
            if name := self.program.biases.get(w):
                found[name] = self.of_bias(each, name)
        # Each product is rounded before they are added.
        dtype = self.program.dtypes["lhs"]
        return found | {
            "lhs": self.of_tokens(parts[0] if len(parts) == 1 else total([x.rounded(dtype) for x in parts]))
        }

    def results(self) -> dict[str, Near]:
        program, data, function, mask = self.program, self.data, self.function, self.mask
        is_linear, z = not program.activation and not program.gate, self.pre_activations(data)
        if program.existing:
            z = [each + data["existing"].where(self.in_groups) for each in z]
        kept = self.in_groups if is_linear else mask
        # For a TPU, `erfc` is `1 - erf`.
        slack = 2.0**-22 if (program.activation, program.backend) == ("gelu", "pallas_tpu") else 0.0
        out = (z[0] if is_linear else applied(function.value, *z, slack=slack)).where(kept)
        found = {"out": out, "primal": out}
        # Derivatives are those at pre-activations that are rounded to the dtype of the result.
        ct, dtype = data["out"], program.dtypes["out"]
        saved = z if is_linear else [each.rounded(dtype) for each in z]
        slopes = [applied(slope, *saved, slack=2.0**-20) for slope in function.slopes]
        dz = [ct.where(kept)] if is_linear else [(ct * slope).rounded(dtype).where(kept) for slope in slopes]
        found |= self.cotangents(data, dz) | ({"existing": dz[0]} if program.existing else {})
        if program.order == 2:
            # Of `sum(ct * tangent)`, by everything.
            tangents = {name.removeprefix("d "): x for name, x in data.items() if name.startswith("d ")}
            moved, indices = self.pre_activations(tangents, of=data), range(len(z))
            found["tangent"] = found["out of cotangents"] = total(
                [slope * each for slope, each in zip(slopes, moved, strict=True)]
            ).where(mask)
            curves = [[applied(function.curve(i, j), *saved, slack=2.0**-18) for i in indices] for j in indices]
            bent = [total([ct * c * t for c, t in zip(row, moved, strict=True)]).where(mask) for row in curves]
            first, second = self.cotangents(data, bent), self.cotangents(tangents, dz)
            for name, each in first.items():
                found[f"{name} of cotangents"] = each if "bias" in name else each + second[name]
        return found


def _of_columns(columns: str, gate: Array, up: Array) -> Array:
    """One array with the columns of both."""
    if columns == "halves":
        return jnp.concatenate([gate, up], axis=-1)
    return jnp.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)


def epilogue_draws(program: Epilogue, count: int, *, seed: int = 0) -> Iterator[Draw]:
    """As `draws`. NaN alone is what isn't finite: an activation of infinity may be any number. Ids, in place of sizes,
    are any, or few of them, or of groups that exist; tokens of no group are NaN."""
    rng, g = np.random.default_rng(seed), program.groups

    def ids(number: int) -> Arrays:
        shape = (*([program.batch] if program.has_batch("sizes") else []), program.shape("lhs")[-2], program.top_k)
        any_ids = rng.integers(-2, g + 2, shape)
        few = rng.choice([-7, -1, *range(g), g, 99, LEAST, MOST], 1 + number % 4)
        return {"ids": (any_ids, rng.choice(few, shape), np.clip(any_ids, 0, g - 1))[number % 3].astype(np.int32)}

    for number, draw in enumerate(draws(program, count, seed=seed, sizes_of=ids if program.top_k else None)):
        data = {name: np.where(np.isinf(x), np.nan, x).astype(x.dtype) for name, x in draw.data.items()}
        if program.layout == "inner_rows":  # Of a group without contracted elements, the bias is all there is.
            data |= {name: values(rng, program.shape(name), data[name].dtype.name) for name in program.biases.values()}
        if program.existing:  # It is added to rows of groups without a matrix, too, and has their cotangents.
            for name in ("existing", "out"):
                is_read = program.in_groups(draw, 0) & ~program.with_matrices(draw, 0)
                data[name] = np.where(is_read, values(rng, program.shape(name), program.dtypes[name]), data[name])
        if program.top_k:
            of = draw.sizes["ids"]
            is_used = ((of >= 0) & (of < g)).any(-1)[..., None]
            is_used = is_used if program.has_batch("lhs") or is_used.ndim < 3 else is_used.any(0)
            is_nan = np.arange(is_used.shape[-2])[:, None] == (number if number % 4 == 1 else -1)
            for name in {"lhs", "d lhs"} & {*data}:
                tokens = values(rng, program.shape(name), data[name].dtype.name)
                data[name] = np.where(is_used & ~is_nan, tokens, np.nan).astype(tokens.dtype)
        yield Draw(data, draw.sizes, draw.first)
