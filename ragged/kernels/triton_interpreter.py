"""Runs Triton kernels on the CPU, with NumPy, in a process that also compiles them.

Triton's own interpreter is chosen for a whole process by an environment variable, wants torch's tensors, and replaces
the functions of `triton.language`. Here each `@triton.jit` function is rewritten once, as a closure in which `tl` and
other such functions stand for interpreted ones, so that nothing which the compiler reads is replaced. What remains of
Triton's interpreter is the builder, which turns each operation into NumPy's.

Pointers are not addresses: array number `i` begins at `(i + 1) * 2**40`, so that whatever is computed from a pointer
says which array it was meant for, and no access that strays can hit another array.
"""

import ast
import builtins
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
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream
from triton.runtime.jit import JITFunction

_SPACING = 40  # the logarithm of the distance between two arrays
_NARROW = {tl.bfloat16: ml_dtypes.bfloat16, tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2}
_NARROW = {ty: np.dtype(dtype) for ty, dtype in _NARROW.items()}
_TYPES: dict[np.dtype, Any] = {dtype: ty for ty, dtype in _NARROW.items()} | {
    np.dtype(name): getattr(tl, "int1" if name == "bool" else name)
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
}
_lock = threading.RLock()


def run(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], outputs: Collection[str]) -> None:
    """Runs a `@triton.jit` function on NumPy arrays, in place.

    The programs of the grid run one after another. `tl.dot` multiplies exactly what it is given and accumulates in
    float32 (int32 for integers), whatever its `input_precision`.

    **Arguments:**

    - `kernel`: a `triton.JITFunction`.
    - `grid`: one to three extents.
    - `arguments`: from each parameter's name to a contiguous array (the kernel gets a pointer to its first element),
      None, a number, or, for a `tl.constexpr`, any value. float8_e8m0fnu comes as uint8.
    - `outputs`: the names of the arrays that the kernel writes. They are filled with NaN (integers: bytes of 0x55)
      beforehand, so that elements which the kernel never writes can be told.

    **Raises:** `IndexError` if a lane that isn't masked off loads from outside of the array that its pointer was
    computed from, or stores outside of one of `outputs`, or if a tensor descriptor reaches outside of its array.
    `ValueError` if an array isn't contiguous. `AssertionError` if what `tl.assume`, `tl.static_assert` or, of a scalar,
    `tl.multiple_of` says isn't so. Whatever NumPy warns of is ignored, as a GPU does.
    """
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    if missing := set(outputs) - set(arrays):
        raise ValueError(f"`{kernel.__name__}`: no array is given for the outputs {sorted(missing)}.")
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise ValueError(f"`{kernel.__name__}`: `{name}` isn't contiguous.\nIts strides are {array.strides}.")
        if name in outputs:
            _poison(array)
    with _lock, _scope(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # `nanmax` of nothing but NaN warns without NumPy's errstate
        _interpreted.cache_clear(), _module.cache_clear()  # a device function may have been replaced in its module
        _BUILDER.name, _BUILDER.outputs = kernel.__name__, set(outputs)
        _BUILDER.arrays = list(arrays.items())
        try:
            constexprs = {param.name for param in kernel.params if param.is_constexpr}
            values = {name: v if name in constexprs else _argument(v) for name, v in arguments.items()}
            numbers = iter(range(1, len(arrays) + 1))
            for name, array in arrays.items():
                ty = tl.pointer_type(_TYPES[array.dtype])
                handle = upstream.TensorHandle(np.array([next(numbers) << _SPACING], np.uint64), ty)
                values[name] = _Tensor(handle, ty)
            extents = (*grid, 1, 1)[:3]
            _BUILDER.set_grid_dim(*extents)
            program = _interpreted(kernel)
            for index in itertools.product(*map(range, extents)):
                _BUILDER.set_grid_idx(*index)
                program(**values)
        finally:
            _BUILDER.arrays = []


def _argument(value: Any) -> Any:
    return _SEMANTIC.to_tensor(value, False)


def _poison(array: np.ndarray) -> None:
    if array.dtype.kind in "biu":
        array.reshape(-1).view(np.uint8)[:] = 1 if array.dtype.kind == "b" else 0x55
    else:
        array[...] = np.nan


@contextlib.contextmanager
def _scope() -> Iterator[None]:
    """What of Triton has to be replaced while a kernel runs. The compiler, in another thread, sees no difference."""
    np_dtype, to_ir = upstream._get_np_dtype, tl.dtype.to_ir

    # Triton 3.6.0 and 3.9.0 keep bfloat16 and float8 as unsigned integers, and compute with them as such.
    def narrow_np_dtype(ty: Any) -> np.dtype:
        return (None if ty.scalar.is_ptr() else _NARROW.get(ty.scalar)) or np_dtype(ty)

    # Both: the compiler's types have no sign.
    def signed_to_ir(self: Any, builder: Any) -> Any:
        return self if builder is _BUILDER else to_ir(self, builder)

    upstream._get_np_dtype, tl.dtype.to_ir = narrow_np_dtype, signed_to_ir
    try:
        yield
    finally:
        upstream._get_np_dtype, tl.dtype.to_ir = np_dtype, to_ir


class _Builder(upstream.InterpreterBuilder):
    """Triton's NumPy operations, mended, on memory that is checked."""

    name: str
    outputs: set[str]
    arrays: list[tuple[str, np.ndarray]]

    def __init__(self) -> None:
        super().__init__()
        # Overflow is looked for only with `debug`; without that its arithmetic would be thrown away.
        self.options = upstream.InterpreterOptions(sanitize_overflow=False)

    # Memory. The signatures differ: 3.6.0 has `cache_modifier, eviction_policy`, 3.9.0 `cache_policy`.

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any) -> Any:
        ty = ptrs.get_element_ty()
        dtype = upstream._get_np_dtype(ty)
        result = np.zeros(ptrs.data.shape, dtype) if other is None else np.array(other.data, dtype)
        for elements, lanes, indices in self._accesses(ptrs, mask, "loads"):
            result[lanes] = elements[indices]
        return upstream.TensorHandle(result, ty)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any, **__: Any) -> None:
        for elements, lanes, indices in self._accesses(ptrs, mask, "stores"):
            elements[indices] = np.broadcast_to(value.data, ptrs.data.shape)[lanes]

    def create_atomic_rmw(self, *_: Any) -> Any:
        raise NotImplementedError(f"`{self.name}`: atomics aren't interpreted.")

    create_atomic_cas = create_atomic_rmw

    def _accesses(self, ptrs: Any, mask: Any, verb: str) -> Iterator[tuple[np.ndarray, Any, np.ndarray]]:
        """For each array that is accessed: its elements, the lanes that access it, and their indices."""
        mask = np.asarray(mask.data)  # 3.6.0 gives a descriptor's mask as an array, whose `data` is a buffer
        lanes = ... if mask.all() else mask
        pointers = ptrs.data[lanes]
        if not pointers.size:
            return
        lowest, highest = int(pointers.min()), int(pointers.max())
        if _number(lowest) == _number(highest):
            yield self._elements(ptrs, verb, lowest, highest), lanes, self._indices(ptrs, pointers)
            return
        numbers = np.where(mask, _number(ptrs.data), 0)
        for number in np.unique(numbers[mask]):
            lanes = numbers == number
            pointers = ptrs.data[lanes]
            elements = self._elements(ptrs, verb, int(pointers.min()), int(pointers.max()))
            yield elements, lanes, self._indices(ptrs, pointers)

    def _indices(self, ptrs: Any, pointers: np.ndarray) -> np.ndarray:
        offsets = pointers & ((1 << _SPACING) - 1)
        return (offsets // upstream._get_np_dtype(ptrs.get_element_ty()).itemsize).astype(np.int64)

    def _elements(self, ptrs: Any, verb: str, lowest: int, highest: int) -> np.ndarray:
        """The elements of the array that both these pointers are computed from, if they lie inside."""
        dtype = upstream._get_np_dtype(ptrs.get_element_ty())
        number = min(max(_number(lowest), 1), len(self.arrays))
        name, array = self.arrays[number - 1]
        start, end = number << _SPACING, (number << _SPACING) + array.nbytes
        if lowest < start or highest + dtype.itemsize > end:
            address = lowest if lowest < start else highest
            raise IndexError(
                f"`{self.name}` {verb} element {(address - start) // dtype.itemsize} of `{name}`, "
                f"which has {array.nbytes // dtype.itemsize}.\n"
                f"This is in program {self.grid_idx}. `{name}` is {array.dtype.name}{list(array.shape)}."
            )
        if verb == "stores" and name not in self.outputs:
            raise IndexError(
                f"`{self.name}` stores element {(lowest - start) // dtype.itemsize} of `{name}`, which isn't an output."
                f"\nThis is in program {self.grid_idx}. The outputs are {sorted(self.outputs)}."
            )
        return array.reshape(-1).view(dtype)

    def create_make_tensor_descriptor(self, base: Any, shape: Any, strides: Any, *args: Any) -> Any:
        extents = [int(extent.data.item()) for extent in shape]
        if min(extents) > 0:
            steps = [int(stride.data.item()) for stride in strides]
            last = sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))
            itemsize = upstream._get_np_dtype(base.get_element_ty()).itemsize
            first = int(base.data.item())
            self._elements(base, "describes", first, first + last * itemsize)
        return super().create_make_tensor_descriptor(base, shape, strides, *args)

    # Arithmetic.

    def create_dot(self, a: Any, b: Any, d: Any, *_: Any) -> Any:
        """3.6.0 and 3.9.0 multiply the bits of bfloat16, and round the product of float16 before adding it."""
        # In float64 a product of integers is exact, and BLAS's.
        wide = np.float64 if a.dtype.is_int() or d.data.dtype == np.float64 else np.float32
        product = np.matmul(a.data.astype(wide), b.data.astype(wide)) + d.data.astype(wide)
        return upstream.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        """3.6.0 and 3.9.0 truncate to bfloat16, and don't round to float8's nearest even."""
        data, dtype = src.data, upstream._get_np_dtype(dst_type)
        if dst_type.scalar.is_fp8():  # as on NVIDIA's GPUs, which saturate
            limit = float(ml_dtypes.finfo(dtype).max)
            data = np.clip(data.astype(np.float32), -limit, limit)
        return upstream.TensorHandle(data.astype(dtype), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return self.cast_impl(src, dst_type)

    def get_bf16(self, value: float) -> Any:  # 3.6.0 has none
        return upstream.TensorHandle(np.array([value], ml_dtypes.bfloat16), tl.bfloat16)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:  # in 3.6.0 NaN wins
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)


def _number(pointer: Any) -> Any:
    """Which array a pointer is computed from: the one whose first element is nearest."""
    return (pointer + (1 << _SPACING - 1)) >> _SPACING


class _Tensor(tl.tensor):
    """A tensor whose methods are interpreted."""

    def __bool__(self) -> bool:  # of a block, `tl.load` asks `if other`
        return self.handle.data.size != 1 or bool(self.handle.data.item())

    def __index__(self) -> int:  # 3.6.0's fails with numpy >= 2.4
        return int(self.handle.data.item())

    def __repr__(self) -> str:
        return f"{self.type}({self.handle.data})"

    @property
    def T(self) -> Any:
        return _SEMANTIC.permute(self, (*range(len(self.shape) - 2), -1, -2))


class _Descriptor(tl.tensor_descriptor):
    """A tensor descriptor whose methods are interpreted."""


class _Semantic(TritonSemantic):
    tensor = _Tensor

    def make_tensor_descriptor(self, *args: Any, **kwargs: Any) -> Any:
        result = super().make_tensor_descriptor(*args, **kwargs)
        result.__class__ = _Descriptor
        return result


_BUILDER = _Builder()
_SEMANTIC: Any = _Semantic(_BUILDER)


def _interpreted_builtin(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, "_semantic": _SEMANTIC})

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
        scope = {**vars(builtins), **_BUILTINS, **kernel.fn.__globals__, **inspect.getclosurevars(kernel.fn).nonlocals}
        self.fn = make(*(_convert(scope[name]) for name in names))
        self.fn.__defaults__, self.fn.__kwdefaults__ = _unwrap(kernel.fn.__defaults__), kernel.fn.__kwdefaults__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*_unwrap(args), **{name: tl.core._unwrap_if_constexpr(v) for name, v in kwargs.items()})


_interpreted = functools.cache(_Function)
_module = functools.cache(_Module)


def _unwrap(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return values and tuple(map(tl.core._unwrap_if_constexpr, values))


def _convert(value: Any) -> Any:
    """What stands for `value` in an interpreted function."""
    if isinstance(value, JITFunction):
        return _interpreted(value)
    if isinstance(value, tl.constexpr):
        return value.value
    if inspect.ismodule(value):
        return _module(value)
    return _interpreted_builtin(value) if tl.core.is_builtin(value) else value


class _Rewriter(ast.NodeTransformer):
    """Spells out what Triton's compiler means by an assignment, a condition, and by `and`, `or`, `not`."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call("_assigned", node.value)
        return node

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> ast.AST:
        self.generic_visit(node)
        node.test = _call("_truth", node.test)
        return node

    visit_IfExp = visit_While = visit_If

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) > 1:  # 3.6.0 doesn't compile them
            raise NotImplementedError(f"`{ast.unparse(node)}`: chained comparisons aren't interpreted.")
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        return _call(
            "_both" if isinstance(node.op, ast.And) else "_either", *(ast.Lambda(none, v) for v in node.values)
        )

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call("_negated", node.operand) if isinstance(node.op, ast.Not) else node


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


@functools.cache
def _rewritten(kernel: Any) -> tuple[Callable[..., Any], list[str]]:
    """A function of the values of some global names, and these names. It makes the function to run."""
    fn, tree = kernel.fn, kernel.parse()
    definition = tree.body[0]
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    for argument in (*arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]  # they are set afterwards
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    _Rewriter().visit(tree)
    known = {*_BUILTINS, *fn.__globals__, *fn.__code__.co_freevars}
    names = sorted({node.id for node in ast.walk(definition) if isinstance(node, ast.Name)} & known)
    outer: Any = ast.parse(f"def make({', '.join(names)}):\n    return {definition.name}")
    outer.body[0].body.insert(0, definition)
    ast.increment_lineno(outer, fn.__code__.co_firstlineno + len(kernel.raw_src) - kernel.src.count("\n") - 1)
    namespace: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(outer), fn.__code__.co_filename, "exec"), fn.__globals__, namespace)
    return namespace["make"], names


# What the names of a kernel, and of `triton.language`, stand for.


def _both(*operands: Callable[[], Any]) -> Any:
    return _combined(operands, False, "logical_and")


def _either(*operands: Callable[[], Any]) -> Any:
    return _combined(operands, True, "logical_or")


def _combined(operands: tuple[Callable[[], Any], ...], deciding: bool, method: str) -> Any:
    # Only what is known at compile time short-circuits: each tensor is computed.
    tensors, value = [], None
    for operand in operands:
        value = operand()
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) is deciding:
            return value
    return functools.reduce(getattr(_SEMANTIC, method), tensors) if tensors else value


def _truth(value: Any) -> bool:
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise ValueError(f"A tensor of shape {value.handle.data.shape} has no truth value.")
    return bool(value)


def _negated(value: Any) -> Any:
    return _SEMANTIC.not_(value) if isinstance(value, tl.tensor) else not value


def _range(*args: Any, step: Any = 1, **_: Any) -> Iterator[Any]:
    """`range` and `tl.range`, whose indices are tensors."""
    bounds = [_SEMANTIC.to_tensor(arg) for arg in args]
    bounds = [_SEMANTIC.to_tensor(0), *bounds] if len(bounds) == 1 else bounds
    bounds = [*bounds, _SEMANTIC.to_tensor(step)] if len(bounds) == 2 else bounds
    dtype = np.result_type(*(bound.handle.data for bound in bounds))
    ty = _TYPES[dtype]
    for i in range(*map(int, map(_Tensor.__index__, bounds))):
        yield _Tensor(upstream.TensorHandle(np.array([i], dtype), ty), ty)


def _static_range(*args: Any, step: Any = 1) -> range:
    args = _unwrap(args) or ()
    return range(*args) if len(args) == 3 else range(*(args if len(args) == 2 else (0, *args)), _unwrap((step,))[0])


def _static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


def _multiple_of(x: Any, values: Any) -> Any:
    # Of a block this says something of its runs; of a scalar it is plain, and a lie would become a wrong address.
    value = tl.core._unwrap_if_constexpr(values)
    assert x.type.is_block() or x.handle.data.item() % value == 0, f"{x} isn't a multiple of {value}."
    return x


def _hint(x: Any, values: Any) -> Any:
    return x


class _Reduction:
    """The results are of the right class, and a function of one's own is interpreted."""

    def to_tensor(self: Any, result: Any, dtype: Any) -> Any:
        result = np.asarray(result).astype(upstream._get_np_dtype(dtype))
        ty = tl.block_type(dtype, list(result.shape)) if result.ndim else dtype
        return _Tensor(upstream.TensorHandle(result.reshape(result.shape or 1), dtype.scalar), ty)


class _ReduceOps(_Reduction, upstream.ReduceOps):
    def generic_reduce(self, input: Any) -> Any:
        self.combine_fn = _interpreted(self.combine_fn)
        return super().generic_reduce(input)


class _ScanOps(_Reduction, upstream.ScanOps):
    def generic_scan(self, input: Any) -> Any:
        self.combine_fn = _interpreted(self.combine_fn)
        return super().generic_scan(input)


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    return _ReduceOps(axis, combine_fn.kernel, keep_dims).apply(input)


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: bool = False, **_: Any) -> Any:
    return _ScanOps(axis, combine_fn.kernel, reverse).apply(input)


def _least(*args: Any) -> Any:
    return _extreme(min, "minimum", args)


def _greatest(*args: Any) -> Any:
    return _extreme(max, "maximum", args)


def _extreme(function: Any, method: str, args: Any) -> Any:
    if not any(isinstance(arg, tl.tensor) for arg in args):
        return function(*args)
    return functools.reduce(getattr(_module(tl), method), args)


def _assigned(value: Any) -> Any:
    return _SEMANTIC.to_tensor(value, False)


_BUILTINS: dict[str, Any] = {
    "_assigned": _assigned,
    "_both": _both,
    "_either": _either,
    "_negated": _negated,
    "_truth": _truth,
    "range": _range,
    "min": _least,
    "max": _greatest,
}
_OVERRIDES: dict[str, Any] = {
    "range": _range,
    "static_range": _static_range,
    "static_assert": _static_assert,
    "multiple_of": _multiple_of,
    "max_contiguous": _hint,
    "max_constancy": _hint,
    "reduce": _reduce,
    "associative_scan": _scan,
}


def _add_methods(cls: Any, base: Any) -> None:
    for name, member in inspect.getmembers(base):
        if name in vars(cls):
            continue
        if name in _OVERRIDES or isinstance(member, JITFunction):
            setattr(cls, name, lambda self, *args, _name=name, **kw: getattr(_module(tl), _name)(self, *args, **kw))
        elif tl.core.is_builtin(member):
            setattr(cls, name, functools.partialmethod(member, _semantic=_SEMANTIC))


_add_methods(_Tensor, tl.tensor)
_add_methods(_Descriptor, tl.tensor_descriptor)
