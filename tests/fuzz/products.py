"""Builders of random products: in the eight layouts, with options, scales and recipes, and their gradients."""

from random import Random
from typing import Any

import numpy as np

from tests.cases import LETTERS

from .approx import Approx, Result, U
from .operands import Arrays, Data, Operand, Sizes
from .program import Spec
from .tensors import FORMATS

FLOATS = ("float32", "bfloat16")
ACTIVATIONS = {  # the function in NumPy, and its largest slope
    "relu": (lambda x: np.maximum(x, 0), 1.0),
    "silu": (lambda x: x / (1 + np.exp(-x)), 1.1),
    "tanh": (np.tanh, 1.0),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 0.25),
}
CAPACITIES = {"xla": (1, 7, 16, 40), "pallas_tpu": (1, 7, 40, 200), "triton_gpu": (1, 7, 16, 40)}
TERMS = {"lhs": "mk", "rhs": "kn"}


class Layout:
    """A random product of a layout: extents, sizes, and the order in which its operands are stored.

    `operands` describes the arguments, `lhs` and `rhs` are the operands as text, `out` is the result.
    """

    def __init__(self, name: str, r: Random, backend: str, dtypes: tuple[str, str], may_flip: bool = True) -> None:
        self.ragged, self.count = LETTERS[name], r.choice([1, 2, 3, 5, 9])
        self.extent = {z: r.choice([1, 3, 8, 16, 34]) for z in "mkn"}
        self.extent |= {z: r.choice(CAPACITIES[backend]) for z in self.ragged}
        self.width = {z: min(r.choice([1, 4, 20]), self.extent[z]) for z in self.ragged}  # if it isn't packed
        self.is_flipped = {name: may_flip and r.random() < 0.5 for name in TERMS}
        stored = {name: letters[::-1] if self.is_flipped[name] else letters for name, letters in TERMS.items()}
        unpacked = [b for a, b in stored.values() if {a, b} <= {*self.ragged}]
        self.operands: dict[str, Operand] = {
            f"sizes_{z}": Sizes(self.count, self.extent[z], self.width[z] if z in unpacked else self.extent[z])
            for z in self.ragged
        }
        self.operands |= {name: self.data(stored[name], dtype) for name, dtype in zip(TERMS, dtypes, strict=True)}
        self.lhs, self.rhs = (self._text(name) for name in TERMS)
        self.out = self._out(stored, dtypes[1])
        tile = min([8, *(self.width[z] for z in self.ragged)])
        self.backend = backend_text(r, backend, self.ragged, tile)

    def data(self, letters: str, dtype: str) -> Data:
        """A buffer of these letters, in the order of its axes."""
        first, last = (f"sizes_{z}" if z in self.ragged else None for z in letters)
        shape = [self.extent[z] for z in letters]
        if first and last:
            shape[1] = self.width[letters[1]]
        return Data((*shape,) if first or last else (self.count, *shape), dtype, first, last)

    def _text(self, name: str) -> str:
        of = self.operands[name]
        assert isinstance(of, Data)
        return f"GroupedTensor({name}, {of.first}, {of.last})" + ".mT" * self.is_flipped[name]

    def _out(self, stored: dict[str, str], dtype: str) -> Data:
        """The result. An extent that no operand packs is the largest that it can be."""
        out, shape = self.data("mn", dtype), list(self.data("mn", dtype).shape)
        for axis, (z, letters) in enumerate((("m", stored["lhs"]), ("n", stored["rhs"]))):
            if z in self.ragged:
                is_packed = letters[0] == z or letters[0] not in self.ragged
                count = 1 if axis and out.first else self.count
                shape[axis] = self.extent[z] if is_packed else count * self.width[z]
        return out._replace(shape=tuple(shape))

    def groups(self, name: str, arrays: Arrays) -> list[Approx]:
        """The groups of an operand, as `[m, k]` or `[k, n]`."""
        of = self.operands[name]
        assert isinstance(of, Data)
        is_shared = len(of.shape) == 2 and not of.first and not of.last
        found = [arrays[name].astype(np.float64)] * self.count if is_shared else of.groups(name, arrays)
        return [Approx(each.T if self.is_flipped[name] else each) for each in found]

    def parts(self, arrays: Arrays) -> list[Approx]:
        """The groups of the product."""
        return [a @ b for a, b in zip(*(self.groups(name, arrays) for name in TERMS), strict=True)]

    def spec(self, call: str, **options: Any) -> Spec:
        """The program of a call that computes the plain product."""
        return Spec(self.operands, f"return [{call}]", lambda a: [self.out.result(self.parts(a), a)], **options)


def backend_text(r: Random, backend: str, ragged: str, tile: int) -> str:
    """A `backend=` with the default tiles, or with small ones."""
    if backend == "xla":
        return r.choice(['"xla"', "None", f"XlaConfig(m=({tile},), k=({tile},), n=({tile},))"])
    if backend == "triton_gpu":
        return f"GpuConfig({r.choice(['', 'm=16, k=32, n=16, '])}interpret=True)"
    # A tile of the only ragged dim may have 32 rows, other tiles have 128.
    tiles = "".join(f"{z}={32 if z == ragged else 128}, " for z in "mkn") if len(ragged) == 1 else ""
    return f"TpuConfig({r.choice(['', tiles])}interpret=True)"


def matmul(layout: str, r: Random, backend: str) -> Spec:
    """`ragged.matmul` with random options."""
    dtypes = r.choice([("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("int8", "int8")])
    x, is_int = Layout(layout, r, backend, dtypes), dtypes[0] == "int8"
    out, operands, options = (
        x.out._replace(dtype="int32" if is_int else dtypes[1]),
        x.operands,
        [f"backend={x.backend}"],
    )
    if not is_int and r.random() < 0.3:
        out = out._replace(dtype=r.choice(FLOATS))
        options.append(f"preferred_element_type=jnp.{out.dtype}")
    if out.first and out.last and (max_last := r.choice([None, 8, 50])):
        out = out._replace(shape=(out.shape[0], max_last))
        options.append(f"max_last={max_last}")
    weight, is_shared = operands["rhs"], layout in ("forward", "batched") and r.random() < 0.2
    if is_shared and isinstance(weight, Data):
        operands["rhs"] = weight._replace(shape=weight.shape[1:])
        x.rhs = "rhs.T" if x.is_flipped["rhs"] else "rhs"
    has_rows = layout in ("forward", "batched", "inner_rows") and not is_int
    n, ending = out.shape[-1], r.choice(["", "existing_out", *["bias", "activation", "both"] * has_rows])
    activation = r.choice(list(ACTIVATIONS))
    if ending == "existing_out":
        operands["existing"] = out._replace(special=False)
        options.append("existing_out=existing")
    if ending in ("bias", "both"):
        rows = [] if layout == "inner_rows" or is_shared else r.choice([[], [x.count]])
        operands["bias"] = Data((*rows, n), r.choice(FLOATS), special=False)
        options.append("bias=bias")
    if ending in ("activation", "both"):
        options.append(f'activation="{activation}"')

    def expected(arrays: Arrays) -> list[Result]:
        parts = x.parts(arrays)
        if "bias" in arrays:
            bias = np.broadcast_to(arrays["bias"], (x.count, n))
            parts = [part + Approx(np.zeros(part.value.shape) + row) for part, row in zip(parts, bias, strict=True)]
        if ending in ("activation", "both"):
            parts = [part.apply(*ACTIVATIONS[activation]) for part in parts]
        result = out.result(parts, arrays)
        if "existing" in arrays:
            more = out.result([Approx(each) for each in out.groups("existing", arrays)], arrays)
            result = Result(result.want + more.want, out.dtype)
        return [result]

    return Spec(operands, f"return [ragged.matmul({x.lhs}, {x.rhs}, {', '.join(options)}).data]", expected)


def gradient(layout: str, r: Random, backend: str) -> Spec:
    """A product and the gradients of both operands, whose tails get zeros."""
    dtype = r.choice(FLOATS)
    x = Layout(layout, r, backend, (dtype, dtype))
    operands = {**x.operands, "cotangent": x.out}
    body = f"""\
fn = lambda lhs, rhs: ragged.matmul({x.lhs}, {x.rhs}, backend={x.backend}).data
loss = lambda lhs, rhs: jnp.sum(fn(lhs, rhs) * cotangent)
return [fn(lhs, rhs), *jax.grad(loss, argnums=(0, 1))(lhs, rhs)]"""

    def expected(arrays: Arrays) -> list[Result]:
        lhs, rhs = (x.groups(name, arrays) for name in TERMS)
        dy = [Approx(each) for each in x.out.groups("cotangent", arrays)]
        found = {
            "lhs": [d @ b.T for d, b in zip(dy, rhs, strict=True)],
            "rhs": [a.T @ d for a, d in zip(lhs, dy, strict=True)],
        }
        results = [x.out.result(x.parts(arrays), arrays)]
        for name, parts in found.items():
            of: Any = x.operands[name]
            results.append(of.result([part.T if x.is_flipped[name] else part for part in parts], arrays))
        return results

    return Spec(operands, body, expected, varying=("lhs", "rhs", "cotangent"))


def grouped_matmul(r: Random, backend: str) -> Spec:
    """`grouped_matmul` or `transposed_grouped_matmul`: the forward product or the wgrad of plain arrays."""
    layout, dtype = r.choice(["forward", "wgrad"]), r.choice(FLOATS)
    x = Layout(layout, r, backend, (dtype, dtype), may_flip=False)
    call = "ragged.transposed_grouped_matmul" if layout == "wgrad" else "ragged.grouped_matmul"
    return x.spec(f"{call}(lhs, rhs, sizes_{x.ragged}, backend={x.backend})")


def sharded_matmul(r: Random, backend: str) -> Spec:
    """`sharded_matmul` over two devices, of any layout."""
    x, specs = Layout(r.choice(list(LETTERS)), r, backend, ("float32", "float32"), may_flip=False), []
    for of in (x.operands["lhs"], x.operands["rhs"], x.out):
        assert isinstance(of, Data)
        axis = r.choice([None, *(a for a, extent in enumerate(of.shape) if extent % 2 == 0)])
        specs.append("P()" if axis is None else f"P({', '.join([*['None'] * axis, repr('x')])})")
    mesh = 'jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))'
    where = f"mesh={mesh}, in_specs=({specs[0]}, {specs[1]}), out_specs={specs[2]}"
    return x.spec(f"ragged.sharded_matmul({x.lhs}, {x.rhs}, {where}).data", transformations=("jit",))


def gated_matmul(r: Random, backend: str) -> Spec:
    """`gated_matmul` with two weights, or with one that holds the columns of both."""
    dtype, activation, columns = (
        r.choice(FLOATS),
        r.choice(list(ACTIVATIONS)),
        r.choice([None, "halves", "interleaved"]),
    )
    x = Layout("forward", r, backend, (dtype, dtype), may_flip=False)
    weight, n = x.operands["rhs"], x.extent["n"]
    assert isinstance(weight, Data)
    # Infinite weights would meet a gate that float32 rounds to zero, and float64 doesn't.
    weight = weight._replace(special=False)
    both = weight._replace(shape=(*weight.shape[:-1], 2 * n))
    operands = {name: of for name, of in x.operands.items() if name != "rhs"}
    operands |= {"w": both} if columns else {"gate": weight, "up": weight}
    weights = f'w, columns="{columns}"' if columns else "gate, up"
    call = f'ragged.gated_matmul({x.lhs}, {weights}, activation="{activation}", backend={x.backend})'

    def expected(arrays: Arrays) -> list[Result]:
        if columns:
            w, halves = arrays["w"], columns == "halves"
            arrays = {
                **arrays,
                "gate": w[..., :n] if halves else w[..., ::2],
                "up": w[..., n:] if halves else w[..., 1::2],
            }
        gate, up = (x.parts({**arrays, "rhs": arrays[name]}) for name in ("gate", "up"))
        return [x.out.result([a.apply(*ACTIVATIONS[activation]) * b for a, b in zip(gate, up, strict=True)], arrays)]

    return Spec(operands, f"return [{call}.data]", expected)


EINSUMS = {  # the ragged letters of `lhs`, `rhs` and the result
    "t d, g d e -> t e": ("t", "", "t"),
    "t h d, g d e -> t h e": ("t", "", "t"),
    "t h d, g h d e -> t h e": ("t", "", "t"),
    "t h d, g e h d -> t e": ("t", "", "t"),
    "t d, t e -> g d e": ("t", "t", ""),
    "t h d, t h e -> g h d e": ("t", "t", ""),
    "t h d, t e -> g e h d": ("t", "t", ""),
    "t h d, s h d -> t h s": ("t", "s", "ts"),
    "t h s, s h d -> t h d": ("ts", "s", "t"),
    "t s, s h d -> t h d": ("ts", "s", "t"),
    "g a b, g b c d -> g d a c": ("", "", ""),
}


def einsum(r: Random, backend: str) -> Spec:
    """`ragged.einsum`, with heads and other dims between the first and the last."""
    spec, dtype = r.choice(list(EINSUMS)), r.choice(FLOATS)
    extent = {z: r.choice([1, 2, 3, 8]) for z in "abcdegh"} | {"t": r.choice([1, 5, 16]), "s": r.choice([1, 5, 16])}
    width = min(extent["s"], r.choice([2, 6]))
    operands: dict[str, Operand] = {
        f"sizes_{z}": Sizes(extent["g"], extent[z], width if z == "s" else extent[z])
        for z in sorted({*"".join(EINSUMS[spec])})
    }
    terms, buffers = [term.split() for term in spec.replace("->", ",").split(",")], []
    for letters, ragged in zip(terms, EINSUMS[spec], strict=True):
        first, last = (f"sizes_{z}" if z != " " else None for z in ragged.ljust(2))
        shape = [width if z == "s" and len(ragged) == 2 else extent[z] for z in letters]
        buffers.append(Data(tuple(shape), dtype, first, last))
    lhs, rhs, out = buffers
    operands |= {"lhs": lhs, "rhs": rhs}
    texts = [f"GroupedTensor({name}, {of.first}, {of.last})" for name, of in (("lhs", lhs), ("rhs", rhs))]
    options = f"backend={backend_text(r, backend, 'none', 1)}" + (f", max_last={width}" if out.last else "")
    letters = ["".join(z for z in term if z != "g") for term in terms]
    summed = [z for z in letters[0] if z in letters[1] and z not in letters[2]]

    def expected(arrays: Arrays) -> list[Result]:
        parts = []
        for a, b in zip(lhs.groups("lhs", arrays), rhs.groups("rhs", arrays), strict=True):
            count = int(np.prod([a.shape[letters[0].index(z)] for z in summed]))
            parts.append(Approx(a).einsum(f"{letters[0]},{letters[1]}->{letters[2]}", Approx(b), count))
        return [out.result(parts, arrays)]

    return Spec(operands, f'return [ragged.einsum("{spec}", {", ".join(texts)}, {options}).data]', expected)


def scaled(r: Random, backend: str) -> Spec:
    """A forward product or a wgrad of given 8-bit numbers with given scales, which float32 multiplies."""
    layout, stored = (
        r.choice(["forward", "wgrad"]),
        r.choice(["int8", "float8_e4m3fn"][: 1 + (backend != "triton_gpu")]),
    )
    x = Layout(layout, r, backend, (stored, "float32"), may_flip=False)
    x.is_flipped["lhs"] = layout == "wgrad"
    codes = x.data("km" if layout == "wgrad" else "mk", stored)._replace(special=False)
    (rows, columns), block = codes.shape, r.choice([None, (None, None), (1, None), (None, 1), (1, 4), (4, 4)])
    shapes = {None: (), (None, None): (x.count,), (1, None): (rows, 1), (None, 1): (x.count, columns)}
    shapes |= {(1, 4): (rows, -(-columns // 4)), (4, 4): ((rows + 3 * x.count) // 4, -(-columns // 4))}
    x.operands |= {"lhs": codes, "scales": Data(shapes[block], "float32", special=False)}
    lhs = f"GroupedTensor(lhs, {codes.first}, scales=scales, scaling=ragged.Scaling({block}))" + ".mT" * (
        layout == "wgrad"
    )
    call = f"ragged.matmul({lhs}, {x.rhs}, preferred_element_type=jnp.float32, backend={x.backend}).data"

    def expected(arrays: Arrays) -> list[Result]:
        table, parts, blocks, start = arrays["scales"].astype(np.float64), [], 0, 0
        table = table.reshape(table.shape + (1,) * (2 - table.ndim))
        down, across = block or (None, None)
        for i, (a, b) in enumerate(zip(codes.groups("lhs", arrays), x.groups("rhs", arrays), strict=True)):
            row = np.arange(len(a))
            at = {None: 0 * row + (i if block else 0), 1: start + row, 4: blocks + row // 4}[down]
            column = np.arange(columns)
            values = a * table[np.ix_(at, {None: 0 * column, 1: column, 4: column // 4}[across])]
            start, blocks = start + len(a), blocks + -(-len(a) // 4)  # The blocks of a group follow the last group's.
            values = Approx(values, 4 * U * np.abs(values))
            parts.append((values.T if layout == "wgrad" else values) @ b)
        return [x.out.result(parts, arrays)]

    return Spec(x.operands, f"return [{call}]", expected)


def recipe(r: Random, backend: str) -> Spec:
    """A forward product with a recipe. Each operand is within half a unit in the last place of its 8 bits.

    The scale of a block is at most the scale of the largest element, and a power of two is at most twice as large.
    """
    stored, text = "float8_e4m3fn", repr(r.choice(["tensorwise", "rowwise", "blockwise", "mxfp8"]))
    if backend == "triton_gpu" or r.random() < 0.3:  # The interpreted kernel is for a GPU without 8-bit floats.
        stored, scaling = "int8", r.choice(["'row'", "'tensor'", "(128, 128)"])
        text = f"ragged.Recipe(forward=(ragged.Cast(jnp.int8, {scaling}),) * 2)"
    x = Layout("forward", r, backend, ("float32", "float32"), may_flip=False)
    x.operands |= {name: of._replace(special=False) for name, of in x.operands.items() if isinstance(of, Data)}
    largest, relative, absolute = FORMATS[stored]

    def within(found: list[Approx]) -> list[Approx]:
        amax = max(np.max(np.abs(each.value), initial=0) for each in found)
        unit = 2 * absolute / largest * amax
        return [Approx(e.value, np.maximum(relative * np.abs(e.value), unit) * (1 + 1e-5)) for e in found]

    def expected(arrays: Arrays) -> list[Result]:
        pairs = zip(*(within(x.groups(name, arrays)) for name in TERMS), strict=True)
        return [x.out.result([a @ b for a, b in pairs], arrays)]

    return Spec(
        x.operands, f"return [ragged.matmul({x.lhs}, {x.rhs}, recipe={text}, backend={x.backend}).data]", expected
    )
