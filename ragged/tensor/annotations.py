"""Annotations for each kind of `GroupedTensor`, which also name the group axis.

    Rows[Float[GroupedTensor, "tokens d"], "g"]     `g` groups of ragged rows, in a buffer `[tokens, d]`
    Float[Array, "g d f"]                           a matrix for each of the `g` groups

jaxtyping sees one array, `[g, tokens, d]`. It checks and binds all its axes, or none if one doesn't match.
"""

import copyreg
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import TYPE_CHECKING, Any, NoReturn, Union, get_args, get_origin, no_type_check

import jax
from jaxtyping import AbstractArray, AbstractDtype, Shaped

from ragged.core.errors import Site, describe
from ragged.tensor.tensor import GroupedTensor


class _Kind(type):
    """Metaclass of `Rows`, `Cols`, `Both`, `Uniform` and their subscripted forms."""

    kind: str
    subscripts: Any = None  # jaxtyping's annotation of the buffer, the group axis and perhaps "logical"; or None

    def __getitem__(cls, item: Any) -> Any:
        buffer, *more = item if isinstance(item, tuple) else (item,)
        if get_origin(buffer) in (Union, UnionType):
            return reduce(or_, (cls[(each, *more)] for each in get_args(buffer)))
        if buffer is GroupedTensor:
            buffer = Shaped[GroupedTensor, "..."]
        name = f"{cls.__name__}[{', '.join(map(_name, (buffer, *more)))}]"
        if cls.subscripts is not None or len(more) not in (1, 2) or more[1:] not in ([], ["logical"]):
            cls._fail(TypeError, name, 'the subscripts must be an annotation, the group axis and optionally "logical".')
        if not (isinstance(buffer, type) and issubclass(buffer, AbstractArray) and buffer.array_type is GroupedTensor):
            cls._fail(TypeError, name, f"{_name(buffer)} doesn't annotate a `GroupedTensor`.")
        groups: Any = Shaped[jax.Array, str(more[0])]
        if not isinstance(more[0], str | int) or len(groups.dims) != 1 or groups.index_variadic is not None:
            cls._fail(ValueError, name, f"{more[0]!r} isn't one axis.")
        return _Kind(name, (cls,), {"subscripts": (buffer, *more), "__module__": "ragged", "__qualname__": name})

    # `no_type_check`: jaxtyping's import hook would bind the axes for this call only.
    @no_type_check
    def __instancecheck__(cls, x: Any) -> bool:
        return not cls.__instancecheck_str__(x)

    @no_type_check
    def __instancecheck_str__(cls, x: Any) -> str:
        """The reason why `x` doesn't match, for beartype's message `x violates ..., as <reason>`; `""` if it does."""
        if cls.subscripts is None:
            cls._fail(TypeError, cls.__name__, "an annotation needs its axes.")
        if not isinstance(x, GroupedTensor):
            return f"this is {describe(x)}, not a GroupedTensor"
        if not all(hasattr(leaf, "shape") for leaf in (x.data, *jax.tree.leaves(x))):
            return "this tensor's leaves are not arrays"
        if x.is_cotangent:
            return "this is a cotangent or tangent, whose groups are unknown"
        if x.is_stack:
            return "this is a stack of tensors, with a leading axis: annotate the function that is mapped over it"
        if x.kind != cls.kind:
            return f"this tensor's kind is {x.kind}, not {cls.kind}"
        buffer, groups, *logical = cls.subscripts
        annotation = _with_groups(buffer, groups)
        array = jax.ShapeDtypeStruct((x.num_groups, *x.shape), x.logical_dtype if logical else x.dtype)
        problem = annotation.__instancecheck_str__(array)
        return problem and f"its groups and buffer, {describe(array)}, don't fit '{annotation.dim_str}': {problem}"

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls._fail(TypeError, cls.__name__, "an annotation can't be called.")

    def _fail(cls, error: type[Exception], name: str, problem: str) -> NoReturn:
        axes = "g k n" if cls.kind == "uniform" else "m k"
        hint = f'Write it as in `ragged.{cls.__name__.partition("[")[0]}[Float[GroupedTensor, "{axes}"], "g"]`.'
        Site(name).fail(error, problem, hint)


@cache
def _with_groups(buffer: Any, groups: str | int) -> Any:
    """jaxtyping's annotation of `[g, *buffer]`."""

    class OfBuffer(AbstractDtype):
        dtypes = buffer.dtypes

    axis: Any = Shaped[jax.Array, str(groups)]
    return OfBuffer[jax.ShapeDtypeStruct, f"{axis.dim_str} {buffer.dim_str}"]


def _pickled(annotation: Any) -> Any:
    if annotation.subscripts is None:
        return annotation.__qualname__
    return _Kind.__getitem__, (annotation.__base__, annotation.subscripts)


copyreg.pickle(_Kind, _pickled)


def _name(x: Any) -> str:
    return x.__name__ if isinstance(x, type) else repr(x)


if TYPE_CHECKING:
    from typing import Annotated as Both
    from typing import Annotated as Cols
    from typing import Annotated as Rows
    from typing import Annotated as Uniform
else:

    class Rows(metaclass=_Kind):
        """Annotates ragged rows: `Rows[annotation, axis]`.

        A tensor matches if it has ragged rows, its buffer matches `annotation`, and its number of groups matches
        `axis`.

        **Subscripts:**

        - `annotation`: jaxtyping's annotation of the buffer, `Float[GroupedTensor, "tokens d"]`; `GroupedTensor` for
          any buffer; a union for several alternatives. The dtype is the stored one, such as `Float8e4m3fn` for a
          quantised tensor.
        - `axis`: one axis in jaxtyping's syntax: a name such as `"g"`, which is bound with all other axes, `"2*g"`,
          `"_"` for any number, or 4.
        - `"logical"`: optional, last. The dtype is then the dtype of `dequantize()`: float32 for all quantised tensors.

        Cotangents, stacks of tensors, and tensors whose leaves aren't arrays match none of the four kinds. For static
        type checkers the annotation is `GroupedTensor`.

        **Raises:** `TypeError` or `ValueError` for other subscripts.

        !!! example
            ```python
            import jax.numpy as jnp
            import ragged
            from jax import Array
            from jaxtyping import Float
            from ragged import GroupedTensor, Rows, Uniform
            def up(x: Rows[Float[GroupedTensor, "tokens d"], "g"], w: Float[Array, "g d f"]): ...
            x = GroupedTensor(jnp.ones((16, 4)), first_dims=jnp.array([3, 5, 0, 4], jnp.int32))
            assert isinstance(x, Rows[Float[GroupedTensor, "tokens d"], 4])
            assert not isinstance(x, Uniform[Float[GroupedTensor, "g k n"], "g"])
            ```
        """

        kind = "ragged rows"

    class Cols(metaclass=_Kind):
        """Annotates ragged columns, `Cols[Float[GroupedTensor, "d tokens"], "g"]`: see `Rows`."""

        kind = "ragged columns"

    class Both(metaclass=_Kind):
        """Annotates ragged-both tensors, `Both[Float[GroupedTensor, "rows longest"], "g"]`: see `Rows`.

        The buffer of a `transposed` tensor is `[longest, cols]`.
        """

        kind = "ragged both"

    class Uniform(metaclass=_Kind):
        """Annotates uniform tensors, `Uniform[Float[GroupedTensor, "g k n"], "g"]`: see `Rows`.

        The group axis is also the buffer's first axis, so both are `g`.
        """

        kind = "uniform"
