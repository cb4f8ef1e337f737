"""Tables as text and as HTML."""

from collections.abc import Sequence
from html import escape

Rows = Sequence[tuple[str, ...]]


def text_table(header: tuple[str, ...], rows: Rows) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))
    return "\n".join(line.rstrip() for line in lines)


def html_table(title: str, header: tuple[str, ...], rows: Rows) -> str:

    def row(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(each, "td") for each in rows)
    return f"<table><caption>{escape(title)}</caption>{row(header, 'th')}{body}</table>"
