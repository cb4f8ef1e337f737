"""Mutants: small errors in the core, by Cosmic Ray's operators, and hand-picked ones in the kernels' bodies."""

import ast
import importlib
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tests.mutation import kernels

CORE = {
    **{folder: [folder] for folder in ("product", "primitive", "quant", "tensor", "ops", "parallel")},
    "backends": ["backends/base.py", "backends/schedule.py", "backends/xla"],
}
# Realistic mistakes. Operators that hardly ever make a program that runs, such as `**` for `+`, are left out.
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Add_Mul|Sub_Add|Sub_Mul|Mul_Add|Mul_FloorDiv|Div_Mul|FloorDiv_Mul|FloorDiv_Add"
    r"|Mod_FloorDiv|Mod_Mul|Pow_Mul|BitOr_BitAnd|BitAnd_BitOr|BitXor_BitOr|LShift_RShift|RShift_LShift)"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE|GtE_Gt|GtE_Lt|Is_IsNot"
    r"|IsNot_Is)|ReplaceUnaryOperator_(USub_UAdd|Delete_Invert|Delete_Not)|AddNot|ReplaceTrueWithFalse"
    r"|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceBreakWithContinue|ReplaceContinueWithBreak"
    r"|ExceptionReplacer|NumberReplacer|ZeroIterationForLoop)"
)
Reach = dict[str, dict[int, list[str]]]  # keyed by file and line: the tests that reach the line
Place = tuple[str, tuple[int, ...], list[Any]]  # a file, the rows that tell which tests reach it, and its mutations


@dataclass(frozen=True)
class Mutant:
    """`source` is the text of the whole file with the error in it. `before` and `after` are the text that differs."""

    folder: str
    file: str
    row: int
    rows: tuple[int, ...]  # that tell which tests reach it
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.before} -> {self.after}"


def sample(count: int, seed: int, reach: Reach) -> list[Mutant]:
    """A sample in proportion to the places in each folder. A larger one of the same seed contains a smaller one."""
    places = {folder: list(_places(folder, reach)) for folder in CORE}
    chosen: list[tuple[float, Mutant]] = []
    for folder, found in places.items():
        rng, number = random.Random(f"{folder}{seed}"), round(count * len(found) / sum(map(len, places.values())))
        rng.shuffle(found)
        mutants = filter(None, (_mutant(folder, place, rng) for place in found))
        chosen += [((i + 0.5) / number, mutant) for i, mutant in enumerate(islice(mutants, number))]
    return [mutant for _, mutant in sorted(chosen, key=lambda each: each[0])]


def hand_picked() -> Iterator[Mutant]:
    """The mutants of the kernels' bodies."""
    for folder, table in (("TPU", kernels.TPU), ("GPU", kernels.GPU)):
        for name, old, new in table:
            file = f"ragged/backends/{folder.lower()}/{name}.py"
            source = Path(file).read_text()
            row = source.partition(old)[0].count("\n") + 1
            rows = tuple(range(row, row + old.count("\n") + 1))
            yield Mutant(folder, file, row, rows, _short(old), _short(new), source.replace(old, new))


def _places(folder: str, reach: Reach) -> Iterator[Place]:
    """The places that a test runs."""
    plugins, trees = (importlib.import_module(f"cosmic_ray.{name}") for name in ("plugins", "ast"))
    operators = [plugins.get_operator(name)() for name in plugins.operator_names() if OPERATORS.fullmatch(name)]
    paths = [Path("ragged") / path for path in CORE[folder]]
    for path in sorted(file for each in paths for file in ([each] if each.is_file() else each.rglob("*.py"))):
        tree, nodes, ways = ast.parse(path.read_text()), list(trees.ast_nodes(trees.get_ast(path.read_text()))), {}
        for operator in operators:
            places = (place for node in nodes for place in operator.mutation_positions(node))
            for occurrence, place in enumerate(places):
                ways.setdefault(place, []).append((operator, occurrence))
        reached, skipped, rows = reach.get(str(path), {}), list(_skipped(tree)), defaultdict(tuple)
        rows |= {row: _rows(tree, row, reached) for row in {start[0] for start, _ in ways}}
        for (start, end), found in sorted(ways.items(), key=lambda way: way[0]):
            is_skipped = any(first <= start and end <= last for first, last in skipped)
            if not is_skipped and any(row in reached for row in rows[start[0]]):
                yield str(path), rows[start[0]], found


def _skipped(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Annotations, texts, decorators, and statements that raise."""
    for node in ast.walk(tree):
        parts = [getattr(node, name, None) for name in ("annotation", "returns")] + getattr(node, "decorator_list", [])
        is_text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and type(node.value) is str)
        for part in [*parts, node if is_text or isinstance(node, ast.Raise) else None]:
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def _rows(tree: ast.Module, row: int, reached: dict[int, Any]) -> tuple[int, ...]:
    """The row itself, or the rows of its statement; all of the file if the statement runs at import."""
    statements: list[Any] = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= row <= node.end_lineno]
    if not around:
        return ()  # a decorator
    inner = max(around, key=lambda node: (node.lineno, -node.end_lineno))
    if isinstance(inner, ast.FunctionDef) or not any(isinstance(node, ast.FunctionDef) for node in around):
        return tuple(reached)
    end = inner.body[0].lineno - 1 if hasattr(inner, "body") else inner.end_lineno
    return (row,) if row in reached else tuple(range(inner.lineno, end + 1))


def _mutant(folder: str, place: Place, rng: random.Random) -> Mutant | None:
    """One of the mutations of a place, if it compiles to another program."""
    mutate, (file, rows, ways) = importlib.import_module("cosmic_ray.mutating").mutate_code, place
    text = Path(file).read_text()
    for operator, occurrence in rng.sample(ways, len(ways)):
        source = mutate(text, operator, occurrence)
        try:
            is_same = _program(source) == _program(text)
        except SyntaxError:
            continue
        if not is_same:
            pairs = enumerate(zip(text.splitlines(), source.splitlines(), strict=True), 1)
            row, (before, after) = next((row, pair) for row, pair in pairs if pair[0] != pair[1])
            return Mutant(folder, file, row, rows, _short(before), _short(after), source)
    return None


def _program(text: str) -> str:
    """Equal for equal programs. `strict` of `zip` is left out: it only checks lengths that are always equal."""
    return ast.dump(ast.parse(re.sub(r"strict=(True|False)", "", text)))


def _short(text: str) -> str:
    return " ".join(text.split())
