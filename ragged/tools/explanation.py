"""Results of `explain`, which can be printed, drawn and written as JSON."""

from dataclasses import asdict, dataclass, field
from html import escape
from math import inf
from typing import Any

from ragged.core.errors import Site, short_name
from ragged.core.tables import html_table, text_table
from ragged.product.config import Config, to_json

PRODUCTS = ("forward", "by lhs", "by rhs")

_ONE_RAGGED = ("forward", "forward_left", "wgrad")
"""Layouts with one ragged dim: for unknown sizes, the FLOP of full buffers are an upper bound."""

_Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


@dataclass(frozen=True, kw_only=True)
class ProductPlan:
    """Plan of one product on one platform: its operands, its cost, and the kernel that runs it.

    - `product`: `"forward"`, or a derivative, `"by lhs"` or `"by rhs"`.
    - `layout`: name of the layout.
    - `operands`: names of the two operands: `"lhs"`, `"rhs"`, or `"dout"`, the result's cotangent.
    - `dtypes`: dtypes of the operands and the result in the kernel.
    - `scales`: for each operand, the elements that share a scale, such as `"1 m × all k"`; `""` without scales.
    - `flops`: FLOP on the elements of groups. For unknown sizes, FLOP of full buffers with groups of equal size: an
      upper bound with one ragged dim. None if an extent is symbolic.
    - `bytes_accessed`: bytes of all buffers, each counted once, without the matrices of empty groups. (For unknown
      sizes, at most one group for each row isn't empty.) None if an extent is symbolic.
    - `platform`: `"cpu"`, `"cuda"` or `"tpu"`.
    - `device`: the device kind that kernels are compiled for; `""` if unknown.
    - `backend`, `kernel`: names of the backend and kernel that run; `""` if lowering raises.
    - `runs`: what runs, as text: `backend` and `kernel`, with the reason if the platform's own backend doesn't run.
    - `config`: the backend's configuration.
    - `source`: origin of `config`: the call's `"tiling"` or `"backend"`, `"using"`, the `"cache"` or the `"model"`.
    - `passed_over`: `(backend, reason)` of each backend that would be preferred but can't run, or can't apply the
      activation.
    - `error`: text of the error that lowering raises, else `""`.
    - `visits`: number of products of a tile of one operand and a tile of the other.
    - `idle`: number of result tiles in the tail and in empty groups, where a kernel only writes zeros. (XLA writes all
      zeros at once.)
    - `multiplied`: FLOP of all visits, masked elements included.
    - `is_exact`: whether sizes are known. If not, `visits` is an upper bound that includes idle tiles, or None, and
      `idle` and `multiplied` are None.
    - `letter`, `tiles`: a ragged letter, and the visits along it: (group, first element, extent).
    - `chip`: the device kind of the next two figures, a common one if `device` is unknown; `""` without figures, as for
      CPUs.
    - `flops_per_second`, `bytes_per_second`: dense bfloat16 FLOP/s and memory bandwidth of `chip`, or None.
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
        """Fraction of `multiplied` spent on elements of groups; None if unknown or nothing is multiplied."""
        return self.flops / self.multiplied if self.multiplied and self.flops is not None else None

    @property
    def intensity(self) -> float | None:
        """FLOP per byte accessed."""
        if self.flops is None or self.bytes_accessed is None:
            return None
        return self.flops / self.bytes_accessed if self.bytes_accessed else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """The least seconds that `"compute"` (`flops`, at the chip's bfloat16 rate) and `"memory"` (`bytes_accessed`)
        take; empty if one is unknown."""
        if self.flops is None or self.bytes_accessed is None:
            return {}
        if self.flops_per_second is None or self.bytes_per_second is None:
            return {}
        return {"compute": self.flops / self.flops_per_second, "memory": self.bytes_accessed / self.bytes_per_second}

    @property
    def bound(self) -> str:
        """The larger of `seconds`: `"compute"` or `"memory"`; `""` if `seconds` is empty."""
        return max(self.seconds, key=self.seconds.__getitem__) if self.seconds else ""

    def to_json(self) -> dict[str, Any]:
        """All fields except `tiles`, which may be many, and all properties, for `json.dumps`."""
        fields = {name: value for name, value in asdict(self).items() if name != "tiles"}
        fields["config"] = None if self.config is None else to_json(self.config)
        names = ("full", "intensity", "bound", "seconds")
        return fields | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Result of `ragged.explain`. Prints as tables, and as HTML in a notebook.

    - `layout`: name of the layout.
    - `kinds`: kinds of `lhs`, `rhs` and the result, such as `"ragged rows"`.
    - `result`: dtype and shape of the result's buffer, such as `"f32[16,8]"`.
    - `letters`: for an einsum, and for groups with more than two dims, the letters that form `m`, `k` and `n`; else
      `""`.
    - `derivatives`: layouts of the derivatives by `lhs` and by `rhs`; `"none"` without a derivative.
    - `recipe`: the recipe's name; `""` without one.
    - `num_groups`: number of groups.
    - `sizes`: group sizes, keyed by ragged letter; None if unknown.
    - `capacity`: the smallest capacity of the buffers that pack a ragged letter, keyed by letter. Letters that no
      buffer packs are left out.
    - `plans`: a `ProductPlan` for each platform and product, platform by platform.
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
        """Number of groups without elements; None if sizes are unknown."""
        if self.sizes is None:
            return None
        return sum(min(of_group) <= 0 for of_group in zip(*self.sizes.values(), strict=True))

    @property
    def tail(self) -> dict[str, int] | None:
        """Unused elements of each capacity, keyed by ragged letter; None if sizes or capacities are unknown."""
        if self.sizes is None or not all(isinstance(capacity, int) for capacity in self.capacity.values()):
            return None
        used = {letter: sum(max(size, 0) for size in sizes) for letter, sizes in self.sizes.items()}
        return {letter: max(capacity - used[letter], 0) for letter, capacity in self.capacity.items()}

    def plan(self, product: str = "forward", platform: str | None = None) -> ProductPlan:
        """The `ProductPlan` of `"forward"`, `"by lhs"` or `"by rhs"` on a platform, by default the first one.

        **Raises:** `ValueError` without such a plan.
        """
        for each in self.plans:
            if each.product == product and platform in (None, each.platform):
                return each
        plans = ", ".join(f"({each.product!r}, {each.platform!r})" for each in self.plans)
        problem = f"no plan for {product!r}" + (f" on {platform!r}." if platform else ".")
        Site("Explanation.plan").fail(ValueError, problem, f"There are plans for {plans}.")

    def to_json(self) -> dict[str, Any]:
        """All fields and properties, for `json.dumps`, with symbolic extents as text."""
        texts = {
            name: getattr(self, name) for name in ("layout", "kinds", "result", "letters", "derivatives", "recipe")
        }
        counts = {name: getattr(self, name) for name in ("num_groups", "sizes", "empty", "tail")}
        capacity = {letter: n if isinstance(n, int) else str(n) for letter, n in self.capacity.items()}
        return texts | counts | {"capacity": capacity, "plans": [each.to_json() for each in self.plans]}

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
            lines.append(f"quantised by {self.recipe}, each product separately")
        return lines + [f"on {each.platform}: {each.runs}" for each in self.plans if each.product == "forward"]

    def _groups(self) -> str:
        text = f"{self.num_groups} groups"
        if self.sizes is None:
            return f"{text} of unknown sizes: figures are for full buffers"
        if not self.sizes:
            return f"{text} of equal size"
        letters = []
        for letter, sizes in self.sizes.items():
            of = f" of {self.capacity[letter]}" if letter in self.capacity else ""
            letters.append(f"{letter} {min(sizes, default=0)} to {max(sizes, default=0)}, {sum(sizes)}{of} in all")
        return f"{text}, {self.empty} empty: {'; '.join(letters)}"

    def _tables(self) -> list[_Table]:
        """`(title, header, rows)` of each table."""
        first = [each for each in self.plans if each.platform == self.plans[0].platform] if self.plans else []
        products = [
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
        columns = 6 if any(row[-1] for row in products) else 5
        header = ("product", "operands", "FLOP", "bytes", "FLOP/byte", "one scale per")
        runs = [
            (each.platform, each.product, f"{each.kernel} of {each.backend}", *_configuration(each), *_tiles(each))
            for each in self.plans
            if each.kernel and each.kernel != "zeros"
        ]
        tables: list[_Table] = [(self._groups(), header[:columns], [row[:columns] for row in products])]
        if runs:
            header = ("on", "product", "kernel", "configuration", "from", "tiles", "idle", "full", "bound")
            tables.append(("", header, runs))
        return tables

    def _notes(self) -> list[str]:
        notes, seen = [], set()
        for each in self.plans:  # The head lists the forward product's reasons. Here, different ones are added.
            forward = self.plan("forward", each.platform)
            if (each.error, each.passed_over) != (forward.error, forward.passed_over):
                notes.append(f"{each.product} on {each.platform}: {each.runs}")
        for each in self.plans:
            if each.platform in seen:
                continue
            seen.add(each.platform)
            if each.flops_per_second is None or each.bytes_per_second is None:
                notes.append(f"bound on {each.platform}: not known (no figures for its speed)")
                continue
            tera, giga = each.flops_per_second / 1e12, each.bytes_per_second / 1e9
            ridge = each.flops_per_second / each.bytes_per_second
            chip = f" ({each.chip})" if each.device else f", assuming {each.chip}"
            notes.append(
                f"bound on {each.platform}{chip}: {tera:.0f} TFLOP/s in bfloat16 and {giga:.0f} GB/s, "
                f"compute-bound from {ridge:.0f} FLOP/byte"
            )
        return notes

    def plot(self, product: str = "forward", platform: str | None = None, ax: Any = None) -> Any:
        """Draws each group's elements along a ragged dim, and the tiles that cover them; returns the matplotlib axes.

        `product`, `platform`: as in `plan`. `ax`: where to draw; new axes by default.

        **Raises:** `ImportError` without matplotlib; `ValueError` if sizes are unknown, or no kernel has tiles along a
        ragged dim.
        """
        site, plan = Site("Explanation.plot"), self.plan(product, platform)
        if self.sizes is None:
            site.fail(ValueError, "the sizes of the groups aren't known.", "Explain operands with concrete sizes.")
        if not plan.letter:
            problem = f"no kernel has tiles along a ragged dim in {product!r} on {plan.platform!r}."
            site.fail(ValueError, problem, "Choose another product or platform, or another layout.")
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


# Numbers below 10⁴ are printed in full.
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def _number(x: int | None, sign: str = "") -> str:
    """`x` with 3 digits and a unit, after `sign`; `"?"` for None."""
    if x is None:
        return "?"
    for unit, name in _UNITS:
        if x >= unit:
            unit = 1e3 if name == "k" else unit
            return f"{sign}{x / unit:.3g} {name}"
    return f"{sign}{x}"


def _configuration(plan: ProductPlan) -> tuple[str, str]:
    """`(configuration, source)` as text. Of five or more tile sizes, only the first two and the last are listed."""
    parts = []
    for part in str(plan.config or "").split(", "):
        name, equals, value = part.partition("=")
        several = value.split("|")
        parts.append(part if len(several) < 5 else f"{name}{equals}{several[0]}|{several[1]}|…|{several[-1]}")
    return ", ".join(parts), plan.source


def _full(plan: ProductPlan) -> str:
    return "" if plan.full is None else f"{100 * plan.full:.0f} %"


def _tiles(plan: ProductPlan) -> tuple[str, str, str, str]:
    """`(tiles, idle, full, bound)` as text."""
    visits = "?" if plan.visits is None else f"{'' if plan.is_exact else '≤ '}{plan.visits}"
    idle = "" if plan.idle is None else str(plan.idle)
    seconds = max(plan.seconds.values(), default=inf)
    return visits, idle, _full(plan), f"{plan.bound}, {_seconds(seconds)}" if plan.bound else "?"


def _seconds(x: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if x >= unit:
            return f"{x / unit:.3g} {name}"
    return f"{x / 1e-9:.3g} ns"
