"""`einsum`: parses and checks the letters, and computes the product by `matmul`."""

from collections.abc import Callable
from string import ascii_letters
from typing import Any

from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Int

from ragged.core.errors import Site, is_arraylike, known_to_differ
from ragged.core.formats import AnyArray
from ragged.ops.letters import Einsum, EinsumOperand, Names, einsum_of
from ragged.ops.matmul import multiply
from ragged.ops.request import Arguments
from ragged.product.config import Config, Configs
from ragged.quant.recipe import Recipe
from ragged.quant.weights import QuantizedWeights
from ragged.tensor.base import check_has_groups
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import GroupedTensor


def einsum(
    spec: str,
    lhs: GroupedTensor | Gathered | AnyArray,
    rhs: GroupedTensor | QuantizedWeights | AnyArray,
    *,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    existing_out: GroupedTensor | AnyArray | None = None,
    group_offset: Int[AnyArray, ""] | int | None = None,
    num_actual_groups: int | None = None,
    capacity: int | None = None,
    max_last: int | None = None,
    activation: str | Callable[[Array], Array] | None = None,
    save: str = "pre",
    name: str | None = None,
    backend: str | Config | Configs | None = None,
    recipe: Recipe | str | None = None,
) -> GroupedTensor:
    """Multiplies two tensors of any number of dims, group by group, as an einsum.

    `out[i] = jnp.einsum(spec, lhs[i], rhs[i])` for every group `i`, accumulated in float32.

    **Arguments:**

    - `spec`: a name for each axis of both buffers and of the result's buffer, as in `"t h d, g d h e -> t h e"`. Names
      separated by spaces may be words. Without spaces, each character is a name.
    - `lhs`, `rhs`: as in `ragged.matmul`; at least one is a `GroupedTensor`.
    - `capacity`, `max_last`: as in `ragged.matmul`. They count elements of the ragged letter only, even if the letter
      is merged with others.
    - The rest: as in `ragged.matmul`.

    The tensors determine which letters are ragged. Letters of both operands that aren't in the result are summed over:

    | `spec`                   | tensors                       | result                                  |
    |--------------------------|-------------------------------|-----------------------------------------|
    | `t d, g d e -> t e`      | ragged rows, uniform          | ragged rows, `forward`                  |
    | `t d, d e -> t e`        | ragged rows, array            | the same, one matrix for all groups     |
    | `g m k, g k n -> g m n`  | uniform, uniform              | uniform, `batched`                      |
    | `t d, t e -> g d e`      | ragged rows, ragged rows      | uniform, `wgrad`: `g` is a new letter   |
    | `t d, s d -> t s`        | ragged rows, ragged rows      | ragged both, `outer`                    |
    | `t s, s d -> t d`        | ragged both, ragged rows      | ragged rows, `inner_rows`               |

    The letter of the **groups** is the first letter of a uniform tensor, and of a uniform result. A plain array next to
    a ragged operand has groups if its first letter occurs nowhere else.

    **Batch letters**, such as heads, are in both operands and in the result. One kernel maps the product over them.
    Letters with the same role are merged into one axis, with a transpose if they aren't adjacent in memory. If the
    result has one ragged letter, it must come first; if the result has only two letters, it may also come last. If the
    result has two ragged letters, one must come first and the other one last.

    **Returns:** a `GroupedTensor` with zeros in the tail.

    **Raises:** `TypeError` if `spec` is not a string or an operand is not a tensor or an array; `ValueError` for
    letters, extents and sizes that don't fit; `NotImplementedError` for a ragged batch letter, and for blocks of scales
    that merged letters would split; and the errors of `matmul`.

    !!! example
        ```python
        import jax.numpy as jnp
        import ragged
        x = ragged.GroupedTensor(jnp.ones((16, 2, 4)), first_dims=jnp.array([3, 5, 0, 4], jnp.int32))
        w = jnp.ones((4, 4, 2, 8))
        y = ragged.einsum("tokens heads d, g d heads e -> tokens heads e", x, w)
        assert y.shape == (16, 2, 8)
        dw = ragged.einsum("thd, the -> gdhe", x, y)
        assert dw.shape == (4, 4, 2, 8)
        ```
    """
    options = {name: value for name, value in locals().items() if name not in ("spec", "lhs", "rhs")}
    site = site_of(spec, lhs, rhs)
    return read(site, spec, lhs, rhs, group_offset).product(site, multiply, Arguments(**options))


def site_of(spec: Any, lhs: Any, rhs: Any) -> Site:
    """The context of errors of `einsum(spec, lhs, rhs)`."""
    text = f'"{spec}"' if isinstance(spec, str) else repr(spec)
    return Site(f"ragged.einsum({text}, lhs, rhs)", {"lhs": lhs, "rhs": rhs})


def read(site: Site, spec: Any, lhs: Any, rhs: Any, group_offset: Any = None) -> Einsum:
    """The checked einsum of a spec and its operands. With a `group_offset`, the numbers of groups may differ."""
    names = _names(site, spec)
    operands = [_operand(site, *each) for each in zip(("lhs", "rhs"), (lhs, rhs), names, strict=False)]
    one, other = operands
    if not any(isinstance(each.x, GroupedTensor) for each in operands):
        site.fail(ValueError, "both operands are plain arrays; there are no groups.", "Use `jnp.einsum`.")
    if one.ragged or other.ragged:
        # A plain array has groups if its first letter occurs nowhere else.
        one, other = (
            a._replace(group=a.letters[:1])
            if not isinstance(a.x, GroupedTensor) and a.letters[0] not in (*b.letters, *names[2])
            else a
            for a, b in ((one, other), (other, one))
        )
    group = _group(site, one, other, names)
    _check_letters(site, one, other, names[2], group)
    _check_ragged(site, one, other, names, group)
    _check_extents(site, one, other, group, group_offset)
    e = einsum_of(one, other, names[2], group)
    for role in (e.m, e.k, e.n):
        ragged = [z for z in role if z in e.lhs.ragged + e.rhs.ragged]
        if len(ragged) > 1:
            problem = f"{ragged[0]!r} and {ragged[1]!r} are both ragged and have the same role: they can't be merged."
            site.fail(NotImplementedError, problem, "A product may have one ragged letter for each role.")
    return e


def _names(site: Site, spec: Any) -> tuple[Names, Names, Names]:
    """`(lhs, rhs, out)`: the letters of both operands and of the result."""
    hint = 'Write two operands and the result, as in "t h d, g d h e -> t h e".'
    if not isinstance(spec, str):
        site.fail(TypeError, f"the spec is {spec!r}, not a string.", hint)
    before, arrow, after = spec.partition("->")
    terms = [*before.split(","), after]
    if not arrow or len(terms) != 3:
        received = "no result" if not arrow else f"{len(terms) - 1} operand{'s'[: len(terms) != 2]}"
        site.fail(ValueError, f"the spec has {received}.", hint)
    are_words = any(len(term.split()) > 1 for term in terms)
    lhs, rhs, out = (tuple(term.split()) if are_words else tuple(term.strip()) for term in terms)
    for z in (*lhs, *rhs, *out):
        if not z.isidentifier():
            hint = "Name each axis with a letter or a word. Ellipses are not supported."
            site.fail(ValueError, f"{z!r} is not the name of an axis.", hint)
    for name, term in (("lhs", lhs), ("rhs", rhs), ("the result", out)):
        for z in term:
            if term.count(z) > 1:
                hint = "Diagonals are not supported: give each axis a different name."
                site.fail(ValueError, f"the letter {z!r} is in {name} twice.", hint)
    return lhs, rhs, out


def _operand(site: Site, name: str, x: Any, letters: Names) -> EinsumOperand:
    """An operand with its letters. Raises unless it has one letter for each dim."""
    if not is_arraylike(x) and not isinstance(x, GroupedTensor | Gathered | QuantizedWeights):
        site.fail(TypeError, f"`{name}` is not an array.", "Pass a `GroupedTensor` or an array.")
    if isinstance(x, GroupedTensor):
        if not is_arraylike(x.data):
            site.fail(TypeError, f"`{name}` holds no array.", "Pass a `GroupedTensor` of arrays.")
        check_has_groups(x)
    rank = len(x.shape)
    if len(letters) != rank:
        hint = "Name each axis of the buffer" + (", also the axis of the groups." if rank == len(letters) + 1 else ".")
        if len(letters) == 1 and len(letters[0]) == rank:
            hint += f" The spec separates names by spaces, so {letters[0]!r} is one name."
        site.fail(ValueError, f"`{name}` has {rank} dims, but {len(letters)} letters.", hint)
    return EinsumOperand.of(name, x, letters)


def _group(site: Site, lhs: EinsumOperand, rhs: EinsumOperand, names: tuple[Names, Names, Names]) -> Names:
    """The letter of the group axis of an operand or of the result, in a tuple; `()` if no array has a group axis."""
    out = names[2]
    found = {operand.name: operand.group[0] for operand in (lhs, rhs) if operand.group}
    if len({*found.values()}) > 1:
        problem = f"the letter of the groups is {lhs.group[0]!r} in `lhs` but {rhs.group[0]!r} in `rhs`."
        site.fail(ValueError, problem, "The first letter of a uniform tensor names its groups. Use one letter in both.")
    ragged, group = lhs.ragged + rhs.ragged, next(iter(found.values()), None)
    if group is None:  # A sum over a ragged letter has a uniform result, which alone names the groups.
        is_summed = {*lhs.ragged} & {*rhs.ragged} - {*out}
        return out[:1] if is_summed and out[:1] and out[0] not in lhs.letters + rhs.letters else ()
    holder, other = (lhs, rhs) if lhs.group else (rhs, lhs)
    if ragged and (group in other.letters or group in out):
        where = f"in `{other.name}`" if group in other.letters else "in the result"
        problem = f"{group!r} names the groups of `{holder.name}`, so it can't be {where} too. "
        problem += f"There, the groups are along the ragged letter {ragged[0]!r}."
        first = [z for z in out if z in ragged] if group in out else []
        code = _code(names, (*first, *(z for z in out if z not in first)), array=holder.name)
        site.fail(ValueError, problem, f"If {group!r} doesn't name groups, pass the plain array: `{code}`.")
    if not ragged and out[:1] != (group,):
        problem = f"{group!r} names the groups, so it must be the result's first letter."
        code, order = _code(names, (group, *(z for z in out if z != group))), sorted(out, key=lambda z: z != group)
        order = tuple(map(order.index, out))
        hint = f"Transpose the result's buffer, as a plain array: `{code}.data.transpose({order})`."
        hint = hint if group in out else f"To sum over them, sum the result's buffer: `{code}.data.sum(0)`."
        site.fail(ValueError, problem, hint)
    return (group,)


def _code(names: tuple[Names, Names, Names], out: Names, array: str = "") -> str:
    """Code of the call with the result `out`. `array`: the name of an operand to pass as a plain array."""
    spec = "{}, {} -> {}".format(*map(" ".join, (*names[:2], out)))
    lhs, rhs = (f"{name}.data" if name == array else name for name in ("lhs", "rhs"))
    return f'ragged.einsum("{spec}", {lhs}, {rhs})'


def _check_letters(site: Site, lhs: EinsumOperand, rhs: EinsumOperand, out: Names, group: Names) -> None:
    """Raises unless each letter is in at least two of the three terms, or names the groups."""
    for z in out:
        if z not in (*lhs.letters, *rhs.letters, *group):
            hint = "Each letter of the result must be in an operand. Only in a sum over a ragged letter, the "
            hint += "result's first letter is new: it names the groups."
            site.fail(ValueError, f"the result's letter {z!r} is in no operand.", hint)
    for operand, other in ((lhs, rhs), (rhs, lhs)):
        name = operand.name
        for i, z in enumerate(operand.letters):
            if z in (*other.letters, *out, *operand.group):
                continue
            axis, is_tensor = i - len(operand.letters), isinstance(operand.x, GroupedTensor)
            code = f"`{name}.map(lambda data: data.sum({axis}))`" if is_tensor else f"`{name}.sum({axis})`"
            if z in operand.ragged:
                hint = f"Sum over it in each group first, `{name}.sum({axis})`, or keep it in the result."
            elif len(operand.letters) > 2 + len(operand.group):
                hint = f"Sum over it first, {code}, or keep it in the result."
            else:
                hint = "Keep it in the result, and sum the result over it."
            if other.ragged and not is_tensor and operand.extents[z] == other.x.num_groups:
                hint += f" If {z!r} names groups, make it the first axis."
            site.fail(ValueError, f"the letter {z!r} is in `{name}` alone.", hint)


def _check_ragged(
    site: Site, lhs: EinsumOperand, rhs: EinsumOperand, names: tuple[Names, Names, Names], group: Names
) -> None:
    """Raises unless ragged letters have one set of sizes and a valid position in the result."""
    out = names[2]
    for operand, other in ((lhs, rhs), (rhs, lhs)):
        name = operand.name
        for z in operand.ragged:
            if z in other.letters and z not in other.ragged:
                hint = f"Pass `{other.name}` with its sizes, as a `GroupedTensor`, or give its axis another letter."
                is_alike = (other.letters[0], operand.letters[0]) == (z, z)
                is_alike = is_alike and operand.extents[z] == other.extents[z]
                if is_alike and not isinstance(other.x, GroupedTensor):
                    given = names[0] if name == "lhs" else names[1]  # `operand.letters` may be swapped
                    sizes = "first_dims" if given[0] == z else "last_dims"
                    hint = f"Pass it with its sizes, `GroupedTensor({other.name}, {name}.{sizes})`, "
                    hint += "or give its axis another letter."
                site.fail(ValueError, f"the letter {z!r} is ragged in `{name}`, but not in `{other.name}`.", hint)
            if z in other.letters and z in out:
                letter_of = dict(zip(dict.fromkeys(sum(names, ())), ascii_letters, strict=False))
                terms = ("".join(map(letter_of.__getitem__, term)) for term in names)
                code = 'jnp.einsum("{},{}->{}", lhs.data, rhs.data)'.format(*terms)
                hint = f"The groups don't matter here. Multiply the buffers: `{code}`."
                site.fail(NotImplementedError, f"the ragged letter {z!r} is in both operands and in the result.", hint)
            if z in other.ragged and known_to_differ(operand.dims(z), other.dims(z)):
                problem = f"the ragged letter {z!r} has other sizes in `lhs` than in `rhs`."
                site.fail(ValueError, problem, "It is contracted group by group, so the sizes must be equal.")
    ragged = [z for z in out if z in lhs.ragged + rhs.ragged]
    if len(ragged) == 2 and {out[0], out[-1]} != set(ragged):
        problem = f"the result's ragged letters {ragged[0]!r} and {ragged[1]!r} are not its first and its last letter."
        site.fail(ValueError, problem, "Put one of them first and the other one last.")
    if len(ragged) == 1 and out[0] != ragged[0] and len(out) > 2:
        problem = f"the result's ragged letter {ragged[0]!r} is not its first letter."
        hint = "Put it first. It may be the last letter only if the result has two letters."
        site.fail(ValueError, problem, hint)
    if not ragged and out[:1] != group:
        shared = next((z for z in lhs.ragged if z in rhs.ragged), "")
        problem = f"{shared!r} is summed over in each group, but the result has no letter for the groups."
        hint = 'Put a letter first that no operand has, as in "t d, t e -> g d e".'
        site.fail(ValueError, problem, hint)
    min_rank = 2 if ragged else 3
    if len(out) < min_rank:
        problem = f"the result has {len(out)} dims, but a tensor like it has at least {min_rank}."
        site.fail(ValueError, problem, "Keep another axis in the result, for example one of extent 1.")


def _check_extents(site: Site, lhs: EinsumOperand, rhs: EinsumOperand, group: Names, group_offset: Any) -> None:
    """Raises unless each letter has one extent, and both operands have the same number of groups."""
    for z in lhs.letters:
        if z not in rhs.letters or z in group:
            continue
        packed = all(operand.ragged[:1] == (z,) for operand in (lhs, rhs))
        if lhs.extents[z] != rhs.extents[z] and (packed or z not in lhs.ragged):
            what = "has a capacity of" if packed else "is"
            problem = f"the letter {z!r} {what} {lhs.extents[z]} in `lhs` but {rhs.extents[z]} in `rhs`."
            site.fail(ValueError, problem, "A letter must have the same extent in both operands.")
    counts = [
        operand.x.num_groups if operand.ragged else operand.extents[operand.group[0]] if operand.group else None
        for operand in (lhs, rhs)
    ]
    if None not in counts and counts[0] != counts[1] and group_offset is None:
        problem = f"`lhs` has {counts[0]} groups but `rhs` has {counts[1]}."
        hint = "Both need the same groups, including empty groups. With `group_offset`, an operand may have fewer."
        site.fail(ValueError, problem, hint)
