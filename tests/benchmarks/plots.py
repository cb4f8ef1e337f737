"""Draws the figures of `docs/benchmarks/*.json`, and writes them into the tables of `docs/benchmarks.md`.

    python -m tests.benchmarks.plots [--folder docs/benchmarks] [--page docs/benchmarks.md]

Files that aren't there are left out. Needs matplotlib. The same figures give the same bytes, with one matplotlib.
"""

import argparse
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent.parent.parent / "docs"
GREY = "#7a7a7a"  # can be read on white and on black
STYLE: Any = {
    "svg.hashsalt": "ragged",
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
}
MARKS = {  # colour and marker: neither alone says which
    "ragged": ("#2f81e0", "o"),
    "ours": ("#2f81e0", "o"),
    "torch": ("#e0700f", "s"),
    "torch loop": ("#e0a30f", "D"),
    "JAX loop": ("#33a06f", "^"),
    "lax.ragged_dot": ("#b45cc9", "v"),
    "megablox": ("#33a06f", "^"),
    "tokamax": ("#e0700f", "s"),
}
PRODUCTS = ("forward", "dgrad", "wgrad", "forward + backward")
TIME = "time / dense product's"


def by_row(cpu: dict[str, Any], key: str) -> dict[tuple[Any, str, str], dict[str, Any]]:
    """Rows that have this key, by its value, dtype and product, in the file's order."""
    return {(row[key], row["dtype"], row["product"]): row for row in cpu["rows"] if key in row and "figures" in row}


def distinct[T](values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))


def panel(axes: Any, points: Sequence[Any], rows: Sequence[dict[str, Any] | None], line: str, key: str) -> None:
    """Each variant's `key` at each point; a row may lack some variants, or be missing."""
    for name, (color, marker) in MARKS.items():
        found = [
            (i, row["figures"][name][key]) for i, row in enumerate(rows) if row and key in row["figures"].get(name, {})
        ]
        if found:
            axes.plot(*zip(*found, strict=True), ls=line, color=color, marker=marker, ms=4, lw=1, label=name)
    axes.set_xticks(range(len(points)), map(str, points), fontsize=7)
    axes.margins(x=0.08)


def logarithmic(axes: Any) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.minorticks_off()


def grid(height: int, width: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * width, 0.5 + 2.1 * height), layout="constrained")
    return figure, figure.subplots(height, width, squeeze=False)


def legend(figure: Any, panels: Any) -> None:
    """One for all panels."""
    handles = {
        label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles))


def cpu_products(cpu: dict[str, Any]) -> Any:
    found = by_row(cpu, "shape")
    shapes, dtypes, products = (distinct(key[i] for key in found) for i in range(3))
    figure, panels = grid(len(dtypes), len(products))
    for axes_of, dtype in zip(panels, dtypes, strict=True):
        for axes, product in zip(axes_of, products, strict=True):
            panel(axes, shapes, [found.get((shape, dtype, product)) for shape in shapes], "none", "of_dense")
            axes.set_title(f"{product}, {dtype}")
            logarithmic(axes)
        axes_of[0].set_ylabel(TIME)
    legend(figure, panels)
    return figure


def cpu_series(cpu: dict[str, Any]) -> Any:
    """A panel for each product and dtype, and for each of what varies."""
    found = {
        (f"{row['product']}, {row['dtype']}", row["series"], row["at"]): row
        for row in cpu["rows"]
        if "series" in row and "figures" in row
    }
    titles, names = (distinct(key[i] for key in found) for i in range(2))
    figure, panels = grid(len(titles), len(names))
    for axes_of, title in zip(panels, titles, strict=True):
        for axes, name in zip(axes_of, names, strict=True):
            rows = {at: row for (*where, at), row in found.items() if where == [title, name]}
            panel(axes, [*rows], [*rows.values()], "none" if name == "skew" else "-", "of_dense")
            axes.set_title(title)
            axes.set_xlabel(name)
            logarithmic(axes)
        axes_of[0].set_ylabel(TIME)
    legend(figure, panels)
    return figure


def tpu(report: dict[str, Any]) -> Any:
    """Of each library the kernel in its own tiles, or in its best."""
    kernels = {
        "forward": {"ours": "ours forward", "megablox": "megablox gmm", "tokamax": "tokamax gmm_v2"},
        "wgrad": {"ours": "ours wgrad", "megablox": "megablox tgmm", "tokamax": "tokamax tgmm_v2"},
    }
    keys = {"of peak, memory-bound": "share of peak, simulated", "MATMUL": "hot block: bundles that multiply"}
    generations = distinct(row["generation"] for row in report["rows"])
    figure, panels = grid(len(keys), len(kernels))
    for axes_of, (key, label) in zip(panels, keys.items(), strict=True):
        for axes, (product, names) in zip(axes_of, kernels.items(), strict=True):
            rows = [
                {
                    "figures": {
                        library: row
                        for row in reversed(report["rows"])  # of several tiles, the library's own comes first
                        for library, name in names.items()
                        if row["kernel"].startswith(name) and row["generation"] == generation
                    }
                }
                for generation in generations
            ]
            panel(axes, generations, rows, "none", key)
            axes.set_title(product)
            axes.set_ylim(0, 1)
        axes_of[0].set_ylabel(label)
    legend(figure, panels)
    return figure


class Plot(NamedTuple):
    file: str  # whose figures it draws
    draw: Callable[[dict[str, Any]], Any]
    key: str  # that a row has, if it is drawn


PLOTS = {
    "cpu-products": Plot("cpu", cpu_products, "shape"),
    "cpu-series": Plot("cpu", cpu_series, "series"),
    "tpu": Plot("tpu", tpu, "generation"),
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(x: float | None) -> str:
    """Two digits or three, as a reader compares them."""
    return "–" if x is None else f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def layer(row: dict[str, Any]) -> str:
    tokens, d, hidden, experts, top_k = row["tokens, d, hidden, experts, top_k"]
    return f"{tokens} tokens, d {d}, hidden {hidden}, {experts} experts, top-{top_k}, float32"


class Products:
    """The products of a report about a CPU, by shape and dtype."""

    def __init__(self, cpu: dict[str, Any]) -> None:
        self.cpu, self.found = cpu, by_row(cpu, "shape")
        self.pairs: list[tuple[str, str]] = distinct((shape, dtype) for shape, dtype, _ in self.found)

    def head(self, shape: str, dtype: str) -> str:
        m, k, n, g = next(row["m, k, n, g"] for (s, _, _), row in self.found.items() if s == shape)
        return f"{shape} {m}×{k}×{n} g{g} · {dtype}"

    def figure(self, shape: str, dtype: str, product: str, name: str, key: str = "of_dense") -> float | None:
        return self.found.get((shape, dtype, product), {"figures": {}})["figures"].get(name, {}).get(key)

    def dense(self, shape: str, dtype: str) -> str:
        row = self.found.get((shape, dtype, "forward"))
        return "–" if row is None else f"{row['figures'][row['dense']]['seconds'] * 1e3:.2f} ms, {row['dense'][6:]}"

    def cells(self, shape: str, dtype: str, products: Sequence[str], names: Sequence[str]) -> list[str]:
        """For each product, the figures of some variants."""
        return [" · ".join(number(self.figure(shape, dtype, product, name)) for name in names) for product in products]

    def machine(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.cpu["versions"].items() if version)
        busy = "" if self.cpu["load"] is None else f"; load before it began: {self.cpu['load']:.1f}"
        threads = f"{self.cpu['threads']} threads on both sides"
        return f"{self.cpu['device']}, {self.cpu['date']}; {versions}; {threads}{busy}."

    def beside_torch(self) -> str:
        """The table of all products."""
        rows = (
            [self.head(*pair), self.dense(*pair), *self.cells(*pair, PRODUCTS, ("ragged", "torch"))]
            for pair in self.pairs
        )
        return table(["ragged · torch's grouped product", "dense", *PRODUCTS], rows)


def tables(cpu: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What stands between `<!-- NAME -->` and `<!-- /NAME -->` in the page."""
    its = Products(cpu)
    yield "cpu", its.machine()
    yield "cpu-products", its.beside_torch()
    others = ("ragged", "torch loop", "JAX loop", "even", "lax.ragged_dot")
    yield (
        "cpu-others",
        table(
            ["forward · wgrad", *others],
            (
                [its.head(*pair), *(" · ".join(its.cells(*pair, ("forward", "wgrad"), [name])) for name in others)]
                for pair in its.pairs
            ),
        ),
    )

    def cost(shape: str, dtype: str, product: str, key: str, unit: str) -> str:
        x = its.figure(shape, dtype, product, "ragged", key)
        return "–" if x is None else f"{x:.2f} {unit}" if unit == "s" else f"{x:.1f} {unit}"

    both = "forward + backward"
    yield (
        "cpu-cost",
        table(
            ["", f"trace and lower, {both}", f"compile, {both}", "temporary memory: forward", "wgrad", both],
            (
                [its.head(*pair), cost(*pair, both, "trace_s", "s"), cost(*pair, both, "compile_s", "s")]
                + [cost(*pair, product, "temporary_mib", "MiB") for product in ("forward", "wgrad", both)]
                for pair in its.pairs
            ),
        ),
    )
    named = {row["name"]: row for row in cpu["rows"] if "error" not in row}
    cells_of_layers, lines = [], []
    if row := named.get("compile gated layer"):
        pair = [row["figures"][name] for name in ("ragged", "lax.ragged_dot")]
        what = f"`nn.MoE`, gated ({layer(row)}), forward and backward: CPU time to trace, lower and compile"
        cells_of_layers += [
            [what, *(f"{each['compile_cpu_s']:.2f} s" for each in pair)],
            ["the same: lines of StableHLO", *(f"{each['stablehlo_lines']:,}" for each in pair)],
            ["the same: time to run", *(f"{each['seconds'] * 1e3:.1f} ms" for each in pair)],
        ]
    if row := named.get("vmap"):
        what = "`vmap` over 4 elements, each with its own rows and sizes, L in float32"
        lines.append(f"- {what}, takes {number(row['single_calls'])} times as long as one.")
    for name in (name for name in named if name.startswith("gated product")):
        of_both = ("forward", "gradients")
        row, shape = named[name], "{}×{}×{} g{}".format(*named[name]["m, k, n, g"])
        seconds = {name: each["seconds"] for name, each in row["figures"].items()}
        dots, maps = (
            [number(seconds[f"{other}, clamped, {of}"] / seconds[f"ragged, clamped, {of}"]) for of in of_both]
            for other in ("lax.ragged_dot", "two products and a map")
        )
        lines.append(
            f"- `gated_matmul` with the clamped gate of gpt-oss, {shape} in {row['dtype']}: plain JAX, with "
            f"`lax.ragged_dot`, takes {dots[0]} times as long forward, and {dots[1]} times for the gradients. Two "
            f"`matmul` and a `map` take {maps[0]} and {maps[1]} times as long."
            + (f" (The machine was busy: load {row['load']:.0f}.)" if "load" in row else "")
        )
    layers = [table(["", "ragged", "lax.ragged_dot"], cells_of_layers)] * bool(cells_of_layers)
    yield "cpu-layers", "\n\n".join([*layers, *["\n".join(lines)] * bool(lines)])
    reasons: dict[str, list[str]] = {}
    for row in cpu["rows"]:
        for variant, why in row.get("skipped", {}).items():
            reasons.setdefault(f"{variant}: {why}", []).append(row["name"])
    skipped = (f"- {reason} ({', '.join(names)})" for reason, names in reasons.items())
    yield "cpu-skipped", "\n".join(skipped) or "Nothing was left out."


def other_tables(cpu: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The same of another machine, products alone."""
    yield "cpu-epyc", Products(cpu).machine()
    yield "cpu-epyc-products", Products(cpu).beside_torch()


TABLES = {"cpu": tables, "cpu-epyc": other_tables}
"""By file, what it adds to the page."""


def fill(page: str, texts: Iterable[tuple[str, str]]) -> str:
    """The page with these texts between their marks, of which it must have one pair each."""
    for name, text in texts:
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page, count = between.subn(lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}", page)
        if count != 1:
            raise ValueError(f"the page has {count} places `<!-- {name} -->`, not one")
    return page


def draw(reports: dict[str, dict[str, Any]], folder: Path) -> list[Path]:
    """Writes an SVG for each plot that there are figures for."""
    import matplotlib

    written = []
    for name, plot in PLOTS.items():
        if any(plot.key in row and "error" not in row for row in reports.get(plot.file, {"rows": []})["rows"]):
            with matplotlib.rc_context(matplotlib.rcParamsDefault | STYLE):
                figure = plot.draw(reports[plot.file])
                path = folder / f"{name}.svg"
                figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
            written.append(path)
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DOCS / "benchmarks", help="of the figures and plots")
    parser.add_argument("--page", type=Path, default=DOCS / "benchmarks.md", help="whose tables are filled")
    args = parser.parse_args(arguments)
    files = distinct([*TABLES, *(plot.file for plot in PLOTS.values())])
    paths = {name: args.folder / f"{name}.json" for name in files}
    reports = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    if not reports:
        parser.error(f"{args.folder} has none of {', '.join(path.name for path in paths.values())}")
    for file, texts in TABLES.items():
        if file in reports:
            args.page.write_text(fill(args.page.read_text(), texts(reports[file])))
            print(args.page)
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("matplotlib isn't installed: `uv sync --group dev`. No plots were drawn.")
    for path in draw(reports, args.folder):
        print(path)


if __name__ == "__main__":
    main()
