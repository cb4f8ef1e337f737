"""What `explain` returns: a value that prints, draws and can be written down."""

from dataclasses import asdict, dataclass, field
from html import escape
from math import inf
from typing import Any

from ragged._errors import Site, short_name
from ragged._tables import html_table, text_table
from ragged.backends.config import Config, to_json

PRODUCTS = ("forward", "by lhs", "by rhs")

_ONE_RAGGED = ("forward", "forward_left", "wgrad")
_Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


@dataclass(frozen=True, kw_only=True)
class ProductPlan:
    """What one product is, and what runs it on one platform.

    - `product`: `"forward"`; or `"by lhs"`, `"by rhs"`: the derivatives.
    - `layout`: which of the eight it is.
    - `operands`: what is multiplied, `("lhs", "rhs")`, where `"dout"` is the result's cotangent.
    - `dtypes`: of the operands and the result, as kernels get them.
    - `scales`: what of each operand shares a scale, as `"1 m × all k"`; `""` without scales.
    - `flops`: of what the groups hold; where sizes aren't known, of full buffers, which groups share evenly: with one
      ragged dim the most that it can be. None where an extent is symbolic.
    - `bytes_accessed`: each buffer once. None where an extent is symbolic.
    - `platform`: `"cpu"`, `"cuda"` or `"tpu"`.
    - `device`: the kind that kernels are for; `""` where nothing says.
    - `backend`, `kernel`: what runs; `""` where nothing does: see `error`.
    - `runs`: the same in words, with the reason why the platform's own backend doesn't.
    - `config`, `source`: the backend's configuration, and whether it is from the call's `"tiling"` or `"config"`,
      `"using"`, the `"cache"` or the `"model"`.
    - `passed_over`: backends that would have come first, and why they don't run.
    - `error`: what lowering raises; `""` if it doesn't.
    - `visits`: products of a tile of one operand with a tile of the other.
    - `idle`: tiles of the result that the kernel only writes zeros to, of the tail and of empty groups. (XLA writes all
      zeros at once.)
    - `multiplied`: FLOP of all visits: those of whole tiles, with what is masked in them.
    - `is_exact`: whether sizes are known. Else `visits` are all that there can be, idle ones too, or None, and `idle`
      and `multiplied` are None.
    - `letter`, `tiles`: of the visits along one ragged letter: (group, first element, extent).
    - `chip`: whose numbers these are: `flops_per_second`, dense, in bfloat16, and `bytes_per_second`. Where
      nothing says which device it is, some common one. `""` and None for CPUs and other kinds of which nothing is
      known.
    """

    product: str
    layout: str
    operands: tuple[str, str]
    dtypes: tuple[str, str, str]
    scales: tuple[str, str]
    flops: int | None
    bytes_accessed: int | None
    platform: str
    device: str = ""
    backend: str = ""
    kernel: str = ""
    runs: str = ""
    config: Config | None = None
    source: str = ""
    passed_over: tuple[tuple[str, str], ...] = ()
    error: str = ""
    visits: int | None = None
    idle: int | None = None
    multiplied: int | None = None
    is_exact: bool = False
    letter: str = ""
    tiles: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    chip: str = ""
    flops_per_second: float | None = None
    bytes_per_second: float | None = None

    @property
    def full(self) -> float | None:
        """How much of what is multiplied are elements of groups, 0 to 1; None if nothing is, or sizes aren't known."""
        return self.flops / self.multiplied if self.multiplied and self.flops is not None else None

    @property
    def intensity(self) -> float | None:
        """FLOP a byte."""
        if self.flops is None or self.bytes_accessed is None:
            return None
        return self.flops / self.bytes_accessed if self.bytes_accessed else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """What the chip takes at least to `"compute"`, and for its `"memory"`; empty where either isn't known."""
        if self.flops is None or self.bytes_accessed is None:
            return {}
        if self.flops_per_second is None or self.bytes_per_second is None:
            return {}
        return {"compute": self.flops / self.flops_per_second, "memory": self.bytes_accessed / self.bytes_per_second}

    @property
    def bound(self) -> str:
        """Which of the two takes longer, by the chip's numbers: `"compute"`, `"memory"` or `""`."""
        return max(self.seconds, key=self.seconds.__getitem__) if self.seconds else ""

    def to_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`; without `tiles`, which may be many."""
        fields = {name: value for name, value in asdict(self).items() if name != "tiles"}
        fields["config"] = None if self.config is None else to_json(self.config)
        names = ("full", "intensity", "bound", "seconds")
        return fields | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `ragged.explain` says. Prints as tables, and as HTML in a notebook.

    - `layout`: which of the eight products it is.
    - `kinds`: of `lhs`, `rhs` and the result.
    - `result`: the result's buffer, `"f32[16,8]"`.
    - `letters`: of an einsum, or groups with more than two dims, what the product's letters are; else `""`.
    - `derivatives`: the layouts of the derivatives by `lhs` and `rhs`; `"none"` where there is none.
    - `recipe`: the name of the recipe that quantises; `""` without one.
    - `num_groups`: how many groups there are.
    - `sizes`: of the groups, by ragged letter of `[m, k] × [k, n]`; None where they aren't known.
    - `capacity`: of the buffers that pack them, by ragged letter; without those that no buffer packs.
    - `plans`: a `ProductPlan` for each product on each platform, platform by platform.
    """

    layout: str
    kinds: tuple[str, str, str]
    result: str
    derivatives: tuple[str, str]
    recipe: str
    num_groups: int
    sizes: dict[str, tuple[int, ...]] | None
    capacity: dict[str, Any]
    plans: tuple[ProductPlan, ...]
    letters: str = ""

    @property
    def empty(self) -> int | None:
        """How many groups have no elements; None where sizes aren't known."""
        if self.sizes is None:
            return None
        return sum(min(of_group) <= 0 for of_group in zip(*self.sizes.values(), strict=True))

    @property
    def tail(self) -> dict[str, int] | None:
        """How much of each capacity no group has, by ragged letter; None where sizes or capacities aren't known."""
        if self.sizes is None or not all(isinstance(capacity, int) for capacity in self.capacity.values()):
            return None
        held = {letter: sum(max(size, 0) for size in sizes) for letter, sizes in self.sizes.items()}
        return {letter: max(capacity - held[letter], 0) for letter, capacity in self.capacity.items()}

    def plan(self, product: str = "forward", platform: str | None = None) -> ProductPlan:
        """That of `"forward"`, `"by lhs"` or `"by rhs"` on a platform: on the first, if none is named.

        **Raises:** `ValueError` if there is none.
        """
        for each in self.plans:
            if each.product == product and platform in (None, each.platform):
                return each
        there = ", ".join(f"({each.product!r}, {each.platform!r})" for each in self.plans)
        problem = f"no plan for {product!r}" + (f" on {platform!r}." if platform else ".")
        Site("Explanation.plan").fail(ValueError, problem, f"There are {there}.")

    def to_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`; symbolic extents as text."""
        own = {name: getattr(self, name) for name in ("layout", "kinds", "result", "letters", "derivatives", "recipe")}
        counts = {name: getattr(self, name) for name in ("num_groups", "sizes", "empty", "tail")}
        capacity = {letter: n if isinstance(n, int) else str(n) for letter, n in self.capacity.items()}
        return own | counts | {"capacity": capacity, "plans": [each.to_json() for each in self.plans]}

    def __str__(self) -> str:
        parts = ["\n".join(self._head())]
        for title, header, rows in self._tables():
            parts.append("\n".join([*([title] if title else []), text_table(header, rows)]))
        return "\n\n".join([*parts, *(["\n".join(notes)] if (notes := self._notes()) else [])])

    def _repr_html_(self) -> str:
        parts = [f"<p>{'<br>'.join(map(escape, self._head()))}</p>"]
        parts += [html_table(*table) for table in self._tables()]
        return "".join([*parts, *(f"<p>{escape(note)}</p>" for note in self._notes())])

    def _head(self) -> list[str]:
        lhs, rhs, out = self.kinds
        by_lhs, by_rhs = self.derivatives
        lines = [
            f"{self.layout}: {lhs} × {rhs} -> {out}, {self.result}",
            *([f"letters: {self.letters}"] if self.letters else []),
            f"derivatives: by lhs {by_lhs}, by rhs {by_rhs}",
        ]
        if self.recipe:
            lines.append(f"quantised by {self.recipe}, each product on its own")
        return lines + [f"on {each.platform}: {each.runs}" for each in self.plans if each.product == "forward"]

    def _groups(self) -> str:
        text = f"{self.num_groups} groups"
        if self.sizes is None:
            return f"{text}, of sizes that aren't known here: figures are of full buffers"
        if not self.sizes:
            return f"{text}, all alike"
        letters = []
        for letter, sizes in self.sizes.items():
            of = f" of {self.capacity[letter]}" if letter in self.capacity else ""
            letters.append(f"{letter} {min(sizes, default=0)} to {max(sizes, default=0)}, {sum(sizes)}{of} in all")
        return f"{text}, {self.empty} empty: {'; '.join(letters)}"

    def _tables(self) -> list[_Table]:
        """A title, a header and rows of each."""
        first = [each for each in self.plans if each.platform == self.plans[0].platform] if self.plans else []
        what = [
            (
                each.product,
                " × ".join(map(_operand, each.operands, each.dtypes)) + f" -> {short_name(each.dtypes[2])}",
                _number(each.flops, "" if each.is_exact else "≤ " if each.layout in _ONE_RAGGED else "~ "),
                _number(each.bytes_accessed),
                "?" if each.intensity is None else f"{each.intensity:.3g}",
                ", ".join(
                    f"{name} {scales}" for name, scales in zip(each.operands, each.scales, strict=True) if scales
                ),
            )
            for each in first
        ]
        columns = 6 if any(row[-1] for row in what) else 5
        what_header = ("product", "of", "FLOP", "bytes", "FLOP/byte", "a scale for")
        runs = [
            (each.platform, each.product, f"{each.kernel} of {each.backend}", *_configuration(each), *_tiles(each))
            for each in self.plans
            if each.kernel and each.kernel != "zeros"
        ]
        tables: list[_Table] = [(self._groups(), what_header[:columns], [row[:columns] for row in what])]
        if runs:
            header = ("on", "product", "kernel", "configuration", "from", "tiles", "idle", "full", "bound")
            tables.append(("", header, runs))
        return tables

    def _notes(self) -> list[str]:
        notes, seen = [], set()
        for each in self.plans:  # where a derivative's reasons are others than the product's, which the head has
            forward = self.plan("forward", each.platform)
            if (each.error, each.passed_over) != (forward.error, forward.passed_over):
                notes.append(f"{each.product} on {each.platform}: {each.runs}")
        for each in self.plans:
            if each.platform in seen:
                continue
            seen.add(each.platform)
            if each.flops_per_second is None or each.bytes_per_second is None:
                notes.append(f"bound on {each.platform}: not known; there are no figures of its speed")
                continue
            tera, giga = each.flops_per_second / 1e12, each.bytes_per_second / 1e9
            least = each.flops_per_second / each.bytes_per_second
            which = f" ({each.chip})" if each.device else f", as if {each.chip}"
            notes.append(
                f"bound on {each.platform}{which}: {tera:.0f} TFLOP/s in bfloat16 and {giga:.0f} GB/s, compute from "
                f"{least:.0f} FLOP/byte on"
            )
        return notes

    def plot(self, product: str = "forward", platform: str | None = None, ax: Any = None) -> Any:
        """Draws each group's elements along a ragged dim, and the tiles that cover them; returns the matplotlib axes.

        `product`, `platform`: as in `plan`. `ax`: where to draw; new axes by default. Needs matplotlib.

        **Raises:** `ImportError` without matplotlib; `ValueError` where sizes aren't known, or no kernel has tiles of a
        ragged dim.
        """
        site, plan = Site("Explanation.plot"), self.plan(product, platform)
        if self.sizes is None:
            site.fail(ValueError, "the sizes of the groups aren't known.", "Explain operands whose sizes are arrays.")
        if not plan.letter:
            problem = f"nothing tiles a ragged dim in {product!r} on {plan.platform!r}."
            site.fail(ValueError, problem, "Choose another `product` or `platform`, or another layout.")
        try:
            from matplotlib import pyplot
            from matplotlib.collections import PolyCollection
        except ImportError:
            site.fail(ImportError, "it needs matplotlib.", "Install it: `pip install matplotlib`.")
        sizes = self.sizes[plan.letter]
        capacity = self.capacity.get(plan.letter, sum(sizes))

        def boxes(spans: Any, half: float) -> list[Any]:
            return [
                [(x, g - half), (x + extent, g - half), (x + extent, g + half), (x, g + half)] for g, x, extent in spans
            ]

        groups, end = [], 0
        for group, size in enumerate(max(size, 0) for size in sizes):
            groups.append((group, end, min(size, capacity - end)))
            end = min(end + size, capacity)
        if ax is None:
            ax = pyplot.subplots(figsize=(8, min(1.6 + 0.22 * len(sizes), 12)), layout="constrained")[1]
        ax.add_collection(PolyCollection(boxes(groups, 0.4), facecolor="tab:blue", alpha=0.5, label="groups"))
        ax.add_collection(
            PolyCollection(boxes(plan.tiles, 0.45), facecolor="none", edgecolor="black", linewidth=0.8, label="tiles")
        )
        if end < capacity:
            ax.axvspan(end, capacity, color="tab:grey", alpha=0.25, label="tail")
        ax.set(
            xlim=(0, max([capacity, *(x + extent for _, x, extent in plan.tiles)])),
            ylim=(len(sizes) - 0.5, -0.5),
            xlabel=f"{plan.letter} ({plan.visits} products of tiles, {_full(plan)} full)",
            ylabel="group",
            title=f"{product} on {plan.platform}: {plan.kernel} of {plan.backend}",
        )
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.legend(loc="upper right")
        return ax


def _operand(name: str, dtype: str) -> str:
    return f"{name} {short_name(dtype)}"


_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def _number(x: int | None, sign: str = "") -> str:
    """To 3 digits."""
    if x is None:
        return "?"
    for unit, name in _UNITS:
        if x >= unit:
            unit = 1e3 if name == "k" else unit
            return f"{sign}{x / unit:.3g} {name}"
    return f"{sign}{x}"


def _configuration(plan: ProductPlan) -> tuple[str, str]:
    """Of many heights, the first and the last."""
    parts = []
    for part in str(plan.config or "").split(", "):
        name, equals, value = part.partition("=")
        several = value.split("|")
        parts.append(part if len(several) < 5 else f"{name}{equals}{several[0]}|{several[1]}|…|{several[-1]}")
    return ", ".join(parts), plan.source


def _full(plan: ProductPlan) -> str:
    return "" if plan.full is None else f"{100 * plan.full:.0f} %"


def _tiles(plan: ProductPlan) -> tuple[str, str, str, str]:
    visits = "?" if plan.visits is None else f"{'' if plan.is_exact else '≤ '}{plan.visits}"
    idle = "" if plan.idle is None else str(plan.idle)
    took = max(plan.seconds.values(), default=inf)
    return visits, idle, _full(plan), f"{plan.bound}, {_seconds(took)}" if plan.bound else "?"


def _seconds(x: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if x >= unit:
            return f"{x / unit:.3g} {name}"
    return f"{x / 1e-9:.3g} ns"
