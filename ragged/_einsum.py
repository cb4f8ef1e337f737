"""`einsum`: reads the letters, checks them, and multiplies by `matmul`."""

from inspect import signature
from typing import Any

from jax import Array

from ragged._errors import Site, is_arraylike
from ragged._letters import Einsum, Factor, Names, einsum_of, known_to_differ
from ragged._matmul import matmul, multiply
from ragged.quant.weights import QuantizedWeights
from ragged.tensor.route import Gathered
from ragged.tensor.tensor import GroupedTensor

OPTIONS = tuple(name for name in signature(matmul).parameters if name not in ("lhs", "rhs", "bias", "out_sharding"))


def einsum(
    spec: str | Any,
    lhs: GroupedTensor | Gathered | Array | Any,
    rhs: GroupedTensor | Array | Any,
    **options: Any,
) -> GroupedTensor:
    """Multiplies two tensors of any number of dims, group by group, as letters say.

    `out[i] = jnp.einsum(spec, lhs[i], rhs[i])` for every group `i`, accumulated in float32, by one product of
    `ragged.matmul`.

    **Arguments:**

    - `spec`: `"t h d, g d h e -> t h e"`: a name for each axis of the two buffers and of the result's. With spaces
      between names, they may be words; without, each character is one, as in `jnp.einsum`.
    - `lhs`, `rhs`: tensors, quantised or not, at least one of them with groups; or a plain array. `lhs` may be
      `route.gathered(x)`.
    - `options`: those of `ragged.matmul`, but for `bias` and `out_sharding`. `capacity` and `max_last` are extents of a
      ragged letter, whatever it is merged with.

    Which letters are ragged is known from the tensors. What is summed over is in both operands, and not in the result:

    | `spec`                   | tensors                       | result                                  |
    |--------------------------|-------------------------------|-----------------------------------------|
    | `t d, g d e -> t e`      | ragged rows, uniform          | ragged rows, `forward`                  |
    | `t d, d e -> t e`        | ragged rows, array            | the same, of one matrix for all groups  |
    | `g m k, g k n -> g m n`  | uniform, uniform              | uniform, `batched`                      |
    | `t d, t e -> g d e`      | ragged rows, ragged rows      | uniform, `wgrad`: `g` is named here     |
    | `t d, s d -> t s`        | ragged rows, ragged rows      | ragged both, `outer`                    |
    | `t s, s d -> t d`        | ragged both, ragged rows      | ragged rows, `inner_rows`               |

    The letter of the **groups** is the first of a uniform tensor, and the first of a uniform result. Next to a ragged
    tensor, a plain array has groups if its first letter is nowhere else.

    **Batch letters** are in both operands and in the result, such as heads: over these the product is mapped, in one
    kernel. Letters that play the same part and lie side by side are one; others are transposed. A ragged letter comes
    first in a result, or, of one that is ragged in both dims, first and last; last alone too, of a matrix.

    `ragged.explain(lhs, rhs, spec=spec)` shows the product.

    **Returns:** a `GroupedTensor` with zeros in the tail.

    **Raises:** `TypeError` for what is no text, tensor or option, `ValueError` for letters, extents and sizes that
    don't fit, `NotImplementedError` for a ragged letter that would be a batch letter, and for scales that aren't by
    blocks once letters are merged. What `matmul` raises for its options.

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
    if unknown := sorted(options.keys() - OPTIONS):
        mend = f"Options are {', '.join(OPTIONS)}."
        Site("ragged.einsum").fail(TypeError, f"there is no option {unknown[0]!r}.", mend)
    site = site_of(spec, lhs, rhs)
    existing = options.pop("existing_out", None)
    return read(site, spec, lhs, rhs, options.get("group_offset")).product(site, multiply, options, existing)


def site_of(spec: Any, lhs: Any, rhs: Any) -> Site:
    text = f'"{spec}"' if isinstance(spec, str) else repr(spec)
    return Site(f"ragged.einsum({text}, lhs, rhs)", {"lhs": lhs, "rhs": rhs})


def read(site: Site, spec: Any, lhs: Any, rhs: Any, group_offset: Any = None) -> Einsum:
    """The product that a spec says, checked."""
    names = _names(site, spec)
    factors = [_factor(site, *each) for each in zip(("lhs", "rhs"), (lhs, rhs), names, strict=False)]
    one, other = factors
    if not any(isinstance(f.x, GroupedTensor) for f in factors):
        site.fail(ValueError, "both operands are plain arrays; there are no groups.", "Use `jnp.einsum`.")
    if one.ragged or other.ragged:
        # Next to a ragged tensor, a plain array has groups if its first letter is nowhere else.
        one, other = (
            f._replace(group=f.letters[:1])
            if not isinstance(f.x, GroupedTensor) and f.letters[0] not in (*g.letters, *names[2])
            else f
            for f, g in ((one, other), (other, one))
        )
    group = _group(site, one, other, names[2])
    _check_letters(site, one, other, names[2], group)
    _check_ragged(site, one, other, names[2], group)
    _check_extents(site, one, other, group, group_offset)
    e = einsum_of(one, other, names[2], group)
    for role in (e.m, e.k, e.n):
        ragged = [z for z in role if z in e.lhs.ragged + e.rhs.ragged]
        if len(ragged) > 1:
            problem = f"{ragged[0]!r} and {ragged[1]!r} are both ragged, and play one part: they would be one letter."
            site.fail(NotImplementedError, problem, "A product has one ragged letter for each part.")
    return e


def _names(site: Site, spec: Any) -> tuple[Names, Names, Names]:
    """The letters of both operands and of the result."""
    mend = 'Write two operands and the result, as in "t h d, g d h e -> t h e".'
    if not isinstance(spec, str):
        site.fail(TypeError, f"the spec is {spec!r}, not text.", mend)
    before, arrow, after = spec.partition("->")
    terms = [*before.split(","), after]
    if not arrow or len(terms) != 3:
        came = "no result" if not arrow else f"{len(terms) - 1} operand{'s'[: len(terms) != 2]}"
        site.fail(ValueError, f"the spec has {came}.", mend)
    are_words = any(len(term.split()) > 1 for term in terms)
    lhs, rhs, out = (tuple(term.split()) if are_words else tuple(term.strip()) for term in terms)
    for z in (*lhs, *rhs, *out):
        if not z.isidentifier():
            mend = "Name each axis with a letter or a word; there is no ellipsis."
            site.fail(ValueError, f"{z!r} names no axis.", mend)
    for name, term in (("lhs", lhs), ("rhs", rhs), ("the result", out)):
        for z in term:
            if term.count(z) > 1:
                mend = "Diagonals are not taken: name each axis apart."
                site.fail(ValueError, f"the letter {z!r} is in {name} twice.", mend)
    return lhs, rhs, out


def _factor(site: Site, name: str, x: Any, letters: Names) -> Factor:
    """An operand with its letters, one for each of its dims."""
    if not is_arraylike(x) and not isinstance(x, GroupedTensor | Gathered | QuantizedWeights):
        site.fail(TypeError, f"`{name}` is not an array.", "Pass a `GroupedTensor` or an array.")
    if isinstance(x, GroupedTensor):
        if not is_arraylike(x.data):
            site.fail(TypeError, f"`{name}` holds no array.", "Pass a `GroupedTensor` of arrays.")
        x._require_groups()
    rank = len(x.shape)
    if len(letters) != rank:
        mend = "Name each axis of the buffer" + (", that of the groups too." if rank == len(letters) + 1 else ".")
        if len(letters) == 1 and len(letters[0]) == rank:
            mend += f" Next to names with spaces, {letters[0]!r} is one."
        site.fail(ValueError, f"`{name}` has {rank} dims, but {len(letters)} letters.", mend)
    return Factor.of(name, x, letters)


def _group(site: Site, lhs: Factor, rhs: Factor, out: Names) -> Names:
    """The letter of the groups, of an operand or of the result."""
    found = {f.name: f.group[0] for f in (lhs, rhs) if f.group}
    if len({*found.values()}) > 1:
        problem = f"the groups of `lhs` are {lhs.group[0]!r}, those of `rhs` {rhs.group[0]!r}."
        site.fail(ValueError, problem, "The first letter of a uniform tensor is that of its groups, which both share.")
    ragged, group = lhs.ragged + rhs.ragged, next(iter(found.values()), None)
    if group is None:  # what is summed over a ragged letter is uniform, with groups that the result alone names
        is_summed = {*lhs.ragged} & {*rhs.ragged} - {*out}
        return out[:1] if is_summed and out[:1] and out[0] not in lhs.letters + rhs.letters else ()
    holder, other = (lhs, rhs) if lhs.group else (rhs, lhs)
    if ragged and (group in other.letters or group in out):
        where = f"in `{other.name}`" if group in other.letters else "in the result"
        problem = (
            f"{group!r} are the groups of `{holder.name}`, and can't be {where} too, where {ragged[0]!r} says them."
        )
        site.fail(ValueError, problem, f"If {group!r} are no groups, pass the array: `{holder.name}.data`.")
    if not ragged and out[:1] != (group,):
        problem = f"{group!r} are the groups, and must be the result's first letter."
        mend = "Transpose the result's buffer, which then is no tensor of groups."
        mend = mend if group in out else "To sum over them, sum the result's buffer: `einsum(...).data.sum(0)`."
        site.fail(ValueError, problem, mend)
    return (group,)


def _check_letters(site: Site, lhs: Factor, rhs: Factor, out: Names, group: Names) -> None:
    """Each letter is in two of the three terms, or in all."""
    for z in out:
        if z not in (*lhs.letters, *rhs.letters, *group):
            mend = "It is one of theirs; or, of a sum over a ragged letter, the first, which names the groups."
            site.fail(ValueError, f"the result's letter {z!r} is in no operand.", mend)
    for f, other in ((lhs, rhs), (rhs, lhs)):
        for i, z in enumerate(f.letters):
            if z in (*other.letters, *out, *f.group):
                continue
            axis, is_tensor = i - len(f.letters), isinstance(f.x, GroupedTensor)
            first = f"`{f.name}.map(lambda data: data.sum({axis}))`" if is_tensor else f"`{f.name}.sum({axis})`"
            if z in f.ragged:
                mend = f"Sum each group first, `{f.name}.sum({axis})`, or keep it in the result."
            elif len(f.letters) > 2 + len(f.group):
                mend = f"Sum it first, {first}, or keep it in the result."
            else:
                mend = "Keep it in the result, and sum that."
            if other.ragged and not is_tensor and f.extents[z] == other.x.num_groups:
                mend += f" If {z!r} are groups, make it the first axis."
            site.fail(ValueError, f"the letter {z!r} is in `{f.name}` alone.", mend)


def _check_ragged(site: Site, lhs: Factor, rhs: Factor, out: Names, group: Names) -> None:
    """Ragged letters: where they are in both operands, and where in the result."""
    for f, other in ((lhs, rhs), (rhs, lhs)):
        for z in f.ragged:
            if z in other.letters and z not in other.ragged:
                mend = f"Pass `{other.name}` with its sizes, as a `GroupedTensor`, or give its axis another letter."
                site.fail(ValueError, f"the letter {z!r} is ragged in `{f.name}`, but not in `{other.name}`.", mend)
            if z in other.letters and z in out:
                mend = "Multiply the buffers, which have no groups for this: `jnp.einsum(spec, lhs.data, rhs.data)`."
                site.fail(NotImplementedError, f"the ragged letter {z!r} is in both operands and in the result.", mend)
            if z in other.ragged and known_to_differ(f.dims(z), other.dims(z)):
                problem = f"the ragged letter {z!r} has other sizes in `lhs` than in `rhs`."
                site.fail(ValueError, problem, "It is contracted group by group: they must be equal.")
    ragged = [z for z in out if z in lhs.ragged + rhs.ragged]
    if len(ragged) == 2 and {out[0], out[-1]} != set(ragged):
        problem = f"the result's ragged letters {ragged[0]!r} and {ragged[1]!r} are not its first and its last."
        site.fail(ValueError, problem, "Put one first and one last.")
    if len(ragged) == 1 and out[0] != ragged[0] and len(out) > 2:
        problem = f"the result's ragged letter {ragged[0]!r} is not its first."
        site.fail(ValueError, problem, "Rows are packed along the first axis; of a matrix, columns along the last.")
    if not ragged and out[:1] != group:
        shared = next((z for z in lhs.ragged if z in rhs.ragged), "")
        problem = f"the result has no letter for the groups, over which {shared!r} is summed one by one."
        site.fail(ValueError, problem, 'Put one first that is no operand\'s: "t d, t e -> g d e".')
    least = 2 if ragged else 3
    if len(out) < least:
        problem = f"the result has {len(out)} dims, and a tensor {least} or more."
        site.fail(ValueError, problem, "Keep another axis in it, if of extent 1.")


def _check_extents(site: Site, lhs: Factor, rhs: Factor, group: Names, group_offset: Any) -> None:
    for z in lhs.letters:
        if z not in rhs.letters or z in group:
            continue
        packed = all(f.ragged[:1] == (z,) for f in (lhs, rhs))
        if lhs.extents[z] != rhs.extents[z] and (packed or z not in lhs.ragged):
            what = "has a capacity of" if packed else "is"
            problem = f"the letter {z!r} {what} {lhs.extents[z]} in `lhs` but {rhs.extents[z]} in `rhs`."
            site.fail(ValueError, problem, "A letter has one extent.")
    counts = [f.x.num_groups if f.ragged else f.extents[f.group[0]] if f.group else None for f in (lhs, rhs)]
    if None not in counts and counts[0] != counts[1] and group_offset is None:
        problem = f"`lhs` has {counts[0]} groups but `rhs` has {counts[1]}."
        site.fail(
            ValueError, problem, "Both need the same groups, empty ones included (or, with `group_offset`, some)."
        )
