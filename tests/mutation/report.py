"""The report: scores, and every survivor with its verdict."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutation.mutants import CORE
from tests.mutation.verdicts import VERDICTS

MARK = "<!-- The rest is written by `python -m tests.mutation`. -->\n"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replaces what follows the mark."""
    path.write_text(path.read_text().partition(MARK)[0] + MARK + "\n".join(_lines(rows)) + "\n")


def status(row: dict[str, Any]) -> str:
    """ "killed" by the tests as they were, "new" by a test that was written since, "equivalent", or "open"."""
    word = VERDICTS.get(row["name"], "open").partition(" ")[0].rstrip(":")
    return "killed" if row["killed"] else "new" if word == "killed" else word


def interval(killed: int, of: int) -> tuple[float, float]:
    """Wilson's interval, which holds the true share in 95 % of samples."""
    z, share = 1.96, killed / of
    middle, spread = share + z * z / (2 * of), z * (share * (1 - share) / of + z * z / (4 * of * of)) ** 0.5
    return (middle - spread) / (1 + z * z / of), (middle + spread) / (1 + z * z / of)


def _lines(rows: list[dict[str, Any]]) -> Sequence[str]:
    lines = [
        "## Scores",
        "",
        "| mutants of | number | killed by the tests as they were | of these, by long tests alone "
        "| killed since | equivalent | open | score before | score now |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    folders = {**{folder: [folder] for folder in CORE}, "the core": list(CORE), "TPU": ["TPU"], "GPU": ["GPU"]}
    for name, which in folders.items():
        lines += _scores(name, [row for row in rows if row["folder"] in which])
    lines += ["", "## Survivors", "", "| place | before | after | verdict |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["file"], row["row"])):
        if not row["killed"]:
            place = f"`{row['file'].removeprefix('ragged/')}:{row['row']}`"
            verdict = VERDICTS.get(row["name"], f"open: {sum(row['ran'].values())} tests ran")
            cells = (_code(row["before"]), _code(row["after"]), verdict.replace("|", "\\|"))
            lines.append(f"| {place} | {' | '.join(cells)} |")
    return lines


def _scores(name: str, rows: list[dict[str, Any]]) -> list[str]:
    found = [status(row) for row in rows]
    killed, new, equivalent, still = map(found.count, ("killed", "new", "equivalent", "open"))
    of = killed + new + still
    if not of:
        return []
    long = sum(row["killed"] == "long" for row in rows)
    numbers = (len(rows), killed, long, new, equivalent, still, _percent(killed, of), _percent(killed + new, of))
    return [f"| {name} | {' | '.join(map(str, numbers))} |"]


def _percent(killed: int, of: int) -> str:
    low, high = interval(killed, of)
    return f"{killed / of:.0%} ({low:.0%} to {high:.0%})"


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"
