"""Draws the eight layouts, and the site's icon: `python docs/site/pictures.py` writes `docs/pictures/*.svg`.

Each picture is `lhs @ rhs = out` of three groups, a colour each. A ragged dim is as long as its group's size; what a
buffer holds besides is hatched.
"""

from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "pictures"
COLORS = ("#4a8cf0", "#e8833a", "#35a56c")
GREY = "#808080"  # can be read on white and on black
UNIT, GAP, WIDTH, HEIGHT = 13, 38, 330, 168
SIZES = {"m": (3, 1, 2), "k": (2, 3, 1), "n": (1, 2, 3)}  # of the groups, where the dim is ragged
EXTENT = {"m": 4, "k": 3, "n": 4}  # of all groups, where it isn't
TAIL = 1  # rows or columns of a buffer that are in no group

# name: which of m, k and n are ragged
LAYOUTS = {
    "batched": "",
    "forward": "m",
    "forward_left": "n",
    "wgrad": "k",
    "outer": "mn",
    "inner_rows": "mk",
    "inner_columns": "kn",
    "ragged": "mkn",
}


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    edge = f'stroke="{fill}" stroke-width="1"' if fill.startswith("#") else f'stroke="{GREY}" stroke-opacity=".5"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" {edge}/>'


def text(x: float, y: float, words: str, size: int = 11, weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{GREY}">{words}</text>'


def extent(rows: str, columns: str, ragged: str) -> tuple[float, float]:
    """Width and height of a term's picture."""
    if rows in ragged and columns in ragged:
        return max(SIZES[columns]) * UNIT, (sum(SIZES[rows]) + TAIL) * UNIT
    if rows in ragged:
        return EXTENT[columns] * UNIT, (sum(SIZES[rows]) + TAIL) * UNIT
    if columns in ragged:
        return (sum(SIZES[columns]) + TAIL) * UNIT, EXTENT[rows] * UNIT
    return EXTENT[columns] * UNIT + 14, EXTENT[rows] * UNIT + 14


def term(x: float, y: float, rows: str, columns: str, ragged: str) -> Iterator[str]:
    """The buffer of one operand, or of the result."""
    width, height = extent(rows, columns, ragged)
    if rows not in ragged and columns not in ragged:  # one matrix behind the other
        for i in reversed(range(3)):
            yield rectangle(x + 7 * i, y + 14 - 7 * i, width - 14, height - 14, COLORS[i])
        return
    yield rectangle(x, y, width, height, "url(#none)")
    at = 0
    for i, color in enumerate(COLORS):
        if rows in ragged:
            wide = SIZES[columns][i] * UNIT if columns in ragged else width
            yield rectangle(x, y + at, wide, SIZES[rows][i] * UNIT, color)
            at += SIZES[rows][i] * UNIT
        else:
            yield rectangle(x + at, y, SIZES[columns][i] * UNIT, height, color)
            at += SIZES[columns][i] * UNIT


def kind(rows: str, columns: str, ragged: str) -> str:
    both = (rows in ragged, columns in ragged)
    return {(False, False): "uniform", (True, False): "rows", (False, True): "columns", (True, True): "both"}[both]


def picture(name: str) -> str:
    """`lhs @ rhs = out`, as SVG."""
    ragged = LAYOUTS[name]
    terms = [("m", "k"), ("k", "n"), ("m", "n")]
    sizes = [extent(*letters, ragged) for letters in terms]
    middle, x = 92, (WIDTH - sum(width for width, _ in sizes) - 2 * GAP) / 2
    parts = [text(WIDTH / 2, 17, name, 14, "bold")]
    for letters, (width, height), sign in zip(terms, sizes, ("@", "=", ""), strict=True):
        parts += term(x, middle - height / 2, *letters, ragged)
        parts.append(text(x + width / 2, HEIGHT - 8, kind(*letters, ragged)))
        x += width
        parts.append(text(x + GAP / 2, middle + 5, sign, 16))
        x += GAP
    said = {f"{one} {'ragged' if one in ragged else 'uniform'}" for one in "mkn"}
    return svg(WIDTH, HEIGHT, f"The layout {name}: {', '.join(sorted(said))}", parts)


def icon() -> str:
    bars = [rectangle(1, 1, 14, 4, COLORS[0]), rectangle(1, 6, 9, 3, COLORS[1])]
    return svg(16, 16, "ragged", [*bars, rectangle(1, 10, 12, 5, COLORS[2])])


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    hatch = (
        '<defs><pattern id="none" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="1.2" height="5" fill="{GREY}" fill-opacity=".5"/></pattern></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" text-anchor="middle"><title>{title}</title>\n{hatch}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def pictures() -> dict[str, str]:
    """Each file's name and content."""
    return {f"{name}.svg": picture(name) for name in LAYOUTS} | {"icon.svg": icon()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in pictures().items():
        (FOLDER / name).write_text(content)
