"""Runs Triton kernels on the CPU, with NumPy, in a process that also compiles them.

Triton's interpreter is selected for a whole process, requires torch tensors, and replaces functions of
`triton.language`. This module instead rewrites a `@triton.jit` function to a closure, in which names such as `tl` and
`range` are interpreted versions, based on the patched operations of Triton's interpreter.

Pointers are not addresses: pointers into array number `i` start from `(i + 1) * 2**40`. So a pointer identifies its
array, and an access outside of this array can't reach another one.
"""

import ast
import builtins
import collections
import contextlib
import functools
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import triton.language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from ragged.backends.gpu.arguments import LAST

# `Any`, because the types are for kernels, and differ between versions.
tl: Any = triton.language
upstream: Any = interpreter

_SPACING = 1 << 40
_TYPES: dict[np.dtype, Any] = {
    **{np.dtype(f"{kind}{bits}"): getattr(tl, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{np.dtype(f"float{bits}"): getattr(tl, f"float{bits}") for bits in (16, 32, 64)},
    np.dtype(bool): tl.int1,
    np.dtype(ml_dtypes.bfloat16): tl.bfloat16,
    np.dtype(ml_dtypes.float8_e4m3fn): tl.float8e4nv,
    np.dtype(ml_dtypes.float8_e5m2): tl.float8e5,
}
_DTYPES = {ty: dtype for dtype, ty in _TYPES.items()}
_lock = threading.RLock()


def run(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    outputs: Collection[str],
    updated: Collection[str] = (),
) -> None:
    """Runs a `@triton.jit` function on NumPy arrays, in place.

    The programs of the grid run one after another. `tl.dot` ignores `input_precision`: it doesn't round operands, and
    accumulates in float32 (int32 for integers). `tl.dot_scaled` doesn't round operands either. It supports operands of
    8 bits, and bytes of two 4-bit floats. Values that are undefined on a GPU are NaN (integers: bytes of 0x55):
    `outputs` before the kernel runs, and masked lanes of a load without `other`.

    **Arguments:**

    - `grid`: one to three extents.
    - `arguments`: the kernel's arguments, keyed by parameter. An argument is a contiguous array (the kernel gets a
      pointer to its first element); a TMA descriptor `(of, shape, strides, tile)` of the array named `of`; None; a
      number; or, for a `tl.constexpr`, any value. float8_e8m0fnu is passed as uint8.
    - `outputs`: names of the arrays that the kernel only writes.
    - `updated`: names of the arrays that the kernel reads and writes.

    **Raises:** `IndexError` if an unmasked lane loads or stores outside of the array that its pointer was computed
    from, or stores to an array that isn't an output, or if a tensor descriptor reaches outside of its array.
    `ValueError` if an array isn't contiguous, or an output has no array.
    """
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    written = {*outputs, *updated}
    if missing := written - set(arrays):
        raise ValueError(f"`{kernel.__name__}`: no array is given for the outputs {sorted(missing)}.")
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise ValueError(f"`{kernel.__name__}`: `{name}` isn't contiguous.\nIts strides are {array.strides}.")
    constexprs = {param.name for param in kernel.params if param.is_constexpr}
    extents = (*grid, 1, 1)[:3]
    with _scope():
        for name in outputs:
            arrays[name][...] = _undefined((), arrays[name].dtype)
        values = {
            name: _convert(v) if name in constexprs or isinstance(v, tuple) else _assigned(v)
            for name, v in arguments.items()
        }
        for i, (name, array) in enumerate(arrays.items()):
            ty = tl.pointer_type(_TYPES[array.dtype])
            values[name] = _Tensor(upstream.TensorHandle(np.array([(i + 1) * _SPACING], np.uint64), ty), ty)
        _BUILDER.name, _BUILDER.arrays, _BUILDER.outputs = kernel.__name__, list(arrays.items()), written
        _BUILDER.set_grid_dim(*extents)
        _BUILDER.grid_idx = None  # the host makes the descriptors below
        for name, value in arguments.items():
            if name not in constexprs and isinstance(value, tuple):
                of, *shapes = value
                values[name] = _SEMANTIC.make_tensor_descriptor(values[of], *map(list, shapes))
        program = _interpreted(kernel)
        for index in itertools.product(*map(range, extents)):
            _BUILDER.set_grid_idx(*index)
            program(**values)


@contextlib.contextmanager
def _scope() -> Iterator[None]:
    """Patches Triton while a kernel runs, without effect on a compiler in another thread."""
    with _lock, np.errstate(all="ignore"), warnings.catch_warnings():
        np_dtype, to_ir = upstream._get_np_dtype, tl.dtype.to_ir

        # In triton 3.6.0 and 3.9.0, `to_ir` drops the sign of integer types, which the interpreter needs.
        def signed_to_ir(self: Any, builder: Any) -> Any:
            return self if builder is _BUILDER else to_ir(self, builder)

        warnings.simplefilter("ignore", RuntimeWarning)  # of `np.nanmax`, despite `errstate`
        # triton 3.6.0 and 3.9.0 store bfloat16 and float8 as unsigned integers, and compute with these integers.
        upstream._get_np_dtype, tl.dtype.to_ir = _dtype, signed_to_ir
        try:
            yield
        finally:
            upstream._get_np_dtype, tl.dtype.to_ir = np_dtype, to_ir
            _interpreted.cache_clear()  # a module's functions may be replaced before the next run
            _module.cache_clear()
            _BUILDER.arrays = []


def _dtype(ty: Any) -> np.dtype:
    """The NumPy dtype of Triton's type `ty`."""
    return np.dtype(np.uint64) if ty.scalar.is_ptr() else _DTYPES[ty.scalar]


def _undefined(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Values of undefined memory: NaN, bytes of 0x55, or True."""
    if dtype.kind in "biu":
        return np.full((*shape, dtype.itemsize), 1 if dtype.kind == "b" else 0x55, np.uint8).view(dtype)[..., 0]
    return np.full(shape, np.nan, dtype)


class _Builder(upstream.InterpreterBuilder):
    """Triton's interpreted operations, with checks of accesses, and patches for the triton versions in comments."""

    name: str
    arrays: list[tuple[str, np.ndarray]]
    outputs: set[str]
    grid_idx: tuple[int, int, int] | None

    def __init__(self) -> None:
        super().__init__()
        # Triton discards the results of overflow checks, except for debugging.
        self.options = upstream.InterpreterOptions(sanitize_overflow=False)

    # 3.6.0 has two parameters where 3.9.0 has `cache_policy`.
    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any) -> Any:
        ty = ptrs.get_element_ty()
        result = _undefined(ptrs.data.shape, _dtype(ty)) if other is None else np.array(other.data)
        if (lanes := _lanes(mask)) is not None:
            elements, indices = self._accessed(ptrs, lanes, "loads")
            result[lanes] = elements[indices]
        return upstream.TensorHandle(result, ty)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any, **__: Any) -> None:
        if (lanes := _lanes(mask)) is not None:
            elements, indices = self._accessed(ptrs, lanes, "stores")
            elements[indices] = np.broadcast_to(value.data, ptrs.data.shape)[lanes]

    def _accessed(self, ptrs: Any, lanes: Any, verb: str) -> tuple[np.ndarray, np.ndarray]:
        """`(elements, indices)`: the `lanes` access `elements[indices]`."""
        pointers = ptrs.data[lanes]
        lowest, highest = int(pointers.min()), int(pointers.max())
        elements = self._elements(ptrs, lowest, highest, verb)
        return elements, ((pointers - _number(lowest) * _SPACING) // elements.itemsize).astype(np.int64)

    def _elements(self, ptrs: Any, lowest: int, highest: int, verb: str) -> np.ndarray:
        """The flat array that these pointers are computed from.

        **Raises:** `IndexError` if a pointer is outside of it, or `verb` is "stores" and it isn't an output.
        """
        number = min(max(_number(lowest), 1), len(self.arrays))
        name, array = self.arrays[number - 1]
        elements = array.reshape(-1).view(_dtype(ptrs.get_element_ty()))
        first, last = (int((pointer - number * _SPACING) // elements.itemsize) for pointer in (lowest, highest))
        place = "on the host" if self.grid_idx is None else f"in program {self.grid_idx}"
        where = f"{place}. `{name}` is {array.dtype.name}{list(array.shape)}."
        if first < 0 or last >= elements.size:
            raise IndexError(
                f"`{self.name}` {verb} element {first if first < 0 else last} of `{name}`, which has {elements.size}.\n"
                f"This is {where}"
            )
        if verb == "stores" and name not in self.outputs:
            raise IndexError(
                f"`{self.name}` stores element {first} of `{name}`, which isn't an output.\nThis is {where}"
            )
        return elements

    def create_make_tensor_descriptor(self, base: Any, shape: Any, strides: Any, *args: Any) -> Any:
        extents, steps = ([int(handle.data.item()) for handle in handles] for handles in (shape, strides))
        # Descriptors of `Tiles.of_rows` are larger than the array. What they load is checked like any other load.
        if min(extents) > 0 and extents[0] <= LAST:
            last = sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))
            first = int(base.data.item())
            self._elements(base, first, first + last * _dtype(base.get_element_ty()).itemsize, "describes")
        return super().create_make_tensor_descriptor(base, shape, strides, *args)

    # 3.6.0 and 3.9.0 multiply the bits of bfloat16, and round a product of float16 before they add it.
    def create_dot(self, a: Any, b: Any, d: Any, *_: Any) -> Any:
        # NumPy's product is slow for integers. float64 is exact for them, too.
        dtype = np.float64 if a.dtype.is_int() or d.data.dtype == np.float64 else np.float32
        result = np.matmul(a.data.astype(dtype), b.data.astype(dtype)) + d.data.astype(dtype)
        return upstream.TensorHandle(result.astype(d.data.dtype), d.dtype.scalar)

    # 3.6.0 and 3.9.0 multiply in bfloat16, which can't represent every number times its scale.
    def create_dot_scaled(self, a: Any, a_scales: Any, a_format: Any, b: Any, b_scales: Any, *more: Any) -> Any:
        def dequantized(x: Any, scales: Any) -> Any:  # [rows, k] float32
            if x.dtype == np.uint8:  # two 4-bit floats, the first in the lower bits
                x = np.stack([x & 15, x >> 4], -1).reshape(len(x), -1).view(ml_dtypes.float4_e2m1fn)
            scales = scales.view(ml_dtypes.float8_e8m0fnu) if scales.dtype == np.uint8 else scales
            return x.astype(np.float32) * np.repeat(scales.astype(np.float32), x.shape[-1] // scales.shape[-1], -1)

        x, y, d = dequantized(a.data, a_scales.data), dequantized(b.data.T, b_scales.data), more[-1]
        return upstream.TensorHandle(x @ y.T + d.data, tl.float32)

    # 3.6.0 and 3.9.0 truncate to bfloat16, and round halves up in float8.
    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        data, dtype = src.data, _dtype(dst_type)
        if dst_type.scalar.is_fp8():  # saturate, like Triton's instruction `cvt.satfinite`
            limit = float(ml_dtypes.finfo(dtype).max)
            data = np.clip(data.astype(np.float32), -limit, limit)
        return upstream.TensorHandle(data.astype(dtype), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return self.cast_impl(src, dst_type)

    def get_bf16(self, value: Any) -> Any:  # 3.6.0 doesn't have this method
        return upstream.TensorHandle(np.array([value], ml_dtypes.bfloat16), tl.bfloat16)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:  # 3.6.0 returns NaN if one operand is NaN
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:  # likewise
        return self.binary_op(lhs, rhs, np.fmax)

    def _not_interpreted(self, *_: Any) -> Any:
        raise NotImplementedError(f"`{self.name}`: atomics aren't interpreted.")

    create_atomic_rmw = create_atomic_cas = _not_interpreted


def _lanes(mask: Any) -> Any:
    """Index of the lanes of a mask; None if it has none."""
    lanes = np.asarray(mask.data)  # triton 3.6 passes an array in place of a handle, whose `data` is a `memoryview`
    return None if not lanes.any() else ... if lanes.all() else lanes


def _number(pointer: int) -> int:
    """Number, from 1, of the array whose start is nearest to a pointer. A wrong pointer may be before this start."""
    return (pointer + _SPACING // 2) // _SPACING


class _Tensor(tl.tensor):
    """A tensor whose methods are interpreted."""

    def __init__(self, handle: Any, type: Any):  # Triton's `__init__` also computes a shape, which is slow
        self.handle, self.type, self.dtype = handle, type, type.scalar

    @property
    def shape(self) -> Any:
        return tl.tuple([tl.constexpr(size) for size in self.type.shape] if self.type.is_block() else [])

    @property
    def numel(self) -> Any:
        return tl.constexpr(self.handle.data.size)

    @property
    def T(self) -> Any:
        return _SEMANTIC.permute(self, (1, 0))

    def __bool__(self) -> bool:  # `tl.load` evaluates `if other`, even for a block
        return self.handle.data.size != 1 or bool(self.handle.data.item())

    def __index__(self) -> int:  # the method of 3.6.0 fails with NumPy 2.4
        return int(self.handle.data.item())

    def __repr__(self) -> str:
        return repr(self.handle.data)


class _Descriptor(tl.tensor_descriptor):
    """A tensor descriptor whose methods are interpreted."""


class _Semantic(TritonSemantic):
    """Triton's type rules, with interpreted tensors."""

    tensor = _Tensor

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        # 3.6.0 and 3.9.0 broadcast tensors of the same shape, too, which is slow.
        same = lhs.type.is_block() == rhs.type.is_block() and lhs.handle.data.shape == rhs.handle.data.shape
        return (lhs, rhs) if same else super().broadcast_impl_value(lhs, rhs)

    def make_tensor_descriptor(self, *args: Any, **kwargs: Any) -> Any:
        result: Any = super().make_tensor_descriptor(*args, **kwargs)
        result.__class__ = _Descriptor
        return result


_BUILDER = _Builder()
_SEMANTIC: Any = _Semantic(_BUILDER)


def _convert(value: Any) -> Any:
    """The interpreted version of a function, module or constant; other values unchanged."""
    if isinstance(value, JITFunction):
        return _interpreted(value)
    if isinstance(value, tl.constexpr):
        return value.value
    if inspect.ismodule(value):
        return _module(value)
    return _builtin(value) if tl.core.is_builtin(value) else value


def _builtin(function: Callable[..., Any]) -> Callable[..., Any]:
    """A built-in function of Triton, with the interpreter's semantics."""

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        result = function(*args, _semantic=_SEMANTIC, **kwargs)
        if type(result) is tl.tensor:  # `tl.exp` and others don't use `_Semantic.tensor`
            result.__class__ = _Tensor
        return result

    return call


class _Module:
    """A module whose functions are interpreted."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = _OVERRIDES.get(name) if self._module in (tl, tl.core) else None
        value = _convert(getattr(self._module, name)) if value is None else value
        setattr(self, name, value)
        return value


class _Function:
    """A `@triton.jit` function that is interpreted."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        make, names = _rewritten(kernel)
        cells = dict(zip(kernel.fn.__code__.co_freevars, kernel.fn.__closure__ or (), strict=True))
        nonlocals = {name: cell.cell_contents for name, cell in cells.items()}
        scope = collections.ChainMap(nonlocals, kernel.fn.__globals__, _BUILTINS)
        self.fn = make(*(self if scope[name] is kernel else _convert(scope[name]) for name in names))
        self.fn.__defaults__ = tuple(map(_unwrap, kernel.fn.__defaults__ or ()))
        self.fn.__kwdefaults__ = {name: _unwrap(value) for name, value in (kernel.fn.__kwdefaults__ or {}).items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*map(_unwrap, args), **{name: _unwrap(value) for name, value in kwargs.items()})


_module = functools.cache(_Module)
_interpreted = functools.cache(_Function)


@functools.cache
def _rewritten(kernel: Any) -> tuple[Callable[..., Any], list[str]]:
    """`(make, names)`: `make` builds the function from the interpreted versions of `names`, in this order."""
    fn, tree = kernel.fn, kernel.parse()
    definition = tree.body[0]
    definition.decorator_list = []
    # `_Function` sets the values of the defaults.
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    definition.args.kw_defaults = [default and ast.Constant(None) for default in definition.args.kw_defaults]
    _Rewriter().visit(tree)
    known = {*_BUILTINS, *fn.__globals__, *fn.__code__.co_freevars}
    names = sorted({node.id for node in ast.walk(definition) if isinstance(node, ast.Name)} & known)
    maker = ast.parse(f"def make({', '.join(names)}):\n    return {definition.name}")
    maker.body[0].body.insert(0, definition)  # pyright: ignore[reportAttributeAccessIssue]
    # The right lines for tracebacks: `src` begins with `def`, `raw_src` with the decorators.
    decorators = len(kernel.raw_src) - len(kernel.src.splitlines())
    ast.increment_lineno(maker, fn.__code__.co_firstlineno + decorators - 1)
    namespace: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(maker), fn.__code__.co_filename, "exec"), fn.__globals__, namespace)
    return namespace["make"], names


class _Rewriter(ast.NodeTransformer):
    """Replaces assignments, conditions, `and`, `or` and `not` by calls with Triton's meaning."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call("__assigned__", node.value)
        return node

    def visit_If(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = _call("__truth__", node.test)
        return node

    visit_IfExp = visit_While = visit_If

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        name = "__and__" if isinstance(node.op, ast.And) else "__or__"
        return _call(name, *(ast.Lambda(none, value) for value in node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call("__not__", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) > 1:  # 3.6.0 doesn't compile them either
            raise NotImplementedError(f"`{ast.unparse(node)}`: chained comparisons aren't interpreted.")
        return self.generic_visit(node)


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _unwrap(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _assigned(value: Any) -> Any:
    """A variable's value: numbers become tensors, as in the compiler."""
    return _SEMANTIC.to_tensor(value, False)


def _truth(value: Any) -> bool:
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise ValueError(f"A tensor of shape {value.handle.data.shape} has no truth value.")
    return bool(value)


def _and_or(deciding: bool, method: str, *operands: Callable[[], Any]) -> Any:
    """`and` or `or`. Only a compile-time operand that equals `deciding` ends the evaluation."""
    tensors, value = [], None
    for operand in operands:
        value = operand()
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) is deciding:
            return value
    return functools.reduce(getattr(_SEMANTIC, method), tensors) if tensors else value


def _not(value: Any) -> Any:
    return _SEMANTIC.not_(value) if isinstance(value, tl.tensor) else not value


def _extreme(method: str, *args: Any) -> Any:
    """`min` or `max`: elementwise if an argument is a tensor."""
    if any(isinstance(arg, tl.tensor) for arg in args):
        return functools.reduce(getattr(_module(tl), f"{method}imum"), args)
    return getattr(builtins, method)(*args)


def _range(*args: Any, step: Any = 1, **_: Any) -> Iterator[Any]:
    args = (0, *args) if len(args) == 1 else args
    bounds = [_SEMANTIC.to_tensor(arg) for arg in (*args, step)[:3]]
    dtype = np.result_type(*(bound.handle.data for bound in bounds))
    for i in range(*(bound.__index__() for bound in bounds)):
        # As in the compiler, the index is a tensor: it overflows, and has methods.
        yield _Tensor(upstream.TensorHandle(np.array([i], dtype), _TYPES[dtype]), _TYPES[dtype])


def _static_range(*args: Any, step: Any = 1) -> range:
    args = (0, *args) if len(args) == 1 else args
    return range(*map(_unwrap, (*args, step)[:3]))


class _Results(upstream.ReduceScanOpInterface):
    """Reductions and scans whose functions and results are interpreted."""

    def to_tensor(self, ret: Any, dtype: Any) -> Any:
        ret = np.asarray(ret).astype(_dtype(dtype))
        ty = tl.block_type(dtype, list(ret.shape)) if ret.ndim else dtype
        return _Tensor(upstream.TensorHandle(np.atleast_1d(ret), dtype.scalar), ty)

    def generic_reduce(self, input: Any) -> Any:
        self.combine_fn = _interpreted(self.combine_fn)
        return super().generic_reduce(input)

    def generic_scan(self, input: Any) -> Any:
        self.combine_fn = _interpreted(self.combine_fn)
        return super().generic_scan(input)


class _ReduceOps(_Results, upstream.ReduceOps): ...


class _ScanOps(_Results, upstream.ScanOps): ...


def _dot_scaled(*args: Any, **options: Any) -> Any:
    # 3.6.0 accepts a format only as a `tl.constexpr`.
    args = tuple(tl.constexpr(arg) if isinstance(arg, str) else arg for arg in args)
    return tl.core.dot_scaled(*args, **options, _semantic=_SEMANTIC)


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    return _ReduceOps(_unwrap(axis), combine_fn.kernel, keep_dims).apply(input)


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: bool = False, **_: Any) -> Any:
    return _ScanOps(_unwrap(axis), combine_fn.kernel, reverse).apply(input)


_BUILTINS: dict[str, Any] = {
    "range": _range,
    "min": functools.partial(_extreme, "min"),
    "max": functools.partial(_extreme, "max"),
    "__assigned__": _assigned,
    "__truth__": _truth,
    "__and__": functools.partial(_and_or, False, "logical_and"),
    "__or__": functools.partial(_and_or, True, "logical_or"),
    "__not__": _not,
}
_OVERRIDES: dict[str, Any] = {
    "range": _range,
    "static_range": _static_range,
    "dot_scaled": _dot_scaled,
    "reduce": _reduce,
    "associative_scan": _scan,
}


def _method(name: str) -> Callable[..., Any]:
    """A method that calls the interpreted function of the same name."""
    return lambda *args, **kwargs: getattr(_module(tl), name)(*args, **kwargs)


for _cls in (_Tensor, _Descriptor):
    for _name, _member in inspect.getmembers(_cls):
        if _name in _OVERRIDES or isinstance(_member, JITFunction):  # such as `sum`
            setattr(_cls, _name, _method(_name))
        elif tl.core.is_builtin(_member):
            setattr(_cls, _name, _builtin(_member))
