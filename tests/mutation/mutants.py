"""Writes every mutant of some modules: one JSON object a line, with the whole mutated source.

    python tests/mutation/mutants.py ROOT MODULE_FILE…

Runs in an environment of its own, which has cosmic-ray and none of our packages. Operators are cosmic-ray's, and three
of ours for what decides here without an operator in it: an element of a table, a case of a `match`, and an argument of
`replace(…)` are each left out once. Annotations, decorators and message texts decide nothing and are not mutated.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

Span = tuple[tuple[int, int], tuple[int, int]]
"""From (line, column) to before (line, column)."""

_EMPTY: Final = {"VariableReplacer", "VariableInserter"}
"""They take arguments that nobody gives here."""
_SIDEWAYS: Final = {"Add", "Sub", "Mul", "Div"}
"""Binary operators that are put in another's place: the rest of them are type errors here, or wilder than these."""


def main(arguments: list[str]) -> int:
    """Write the mutants of the files named."""
    root = Path(arguments[0])
    for name in arguments[1:]:
        source = (root / name).read_text("utf-8")
        seen = {source}
        for operator, line, mutated in (*_cosmic(source), *_ours(source)):
            if mutated not in seen:
                seen.add(mutated)
                sys.stdout.write(json.dumps({"module": name, "operator": operator, "line": line, "source": mutated}))
                sys.stdout.write("\n")
    return 0


def _cosmic(source: str) -> Iterator[tuple[str, int, str]]:
    tree, skipped = get_ast(source), list(_undecided(ast.parse(source)))
    lines = source.splitlines()  # a bare star among parameters is no multiplication
    for full_name in operator_names():
        name = full_name.partition("/")[2]
        if name in _EMPTY or not _is_near(name):
            continue
        operator = get_operator(full_name)()
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(list(places)):
            if lines[start[0] - 1][start[1] :].startswith("*,") or any(
                begin <= tuple(start) < end for begin, end in skipped
            ):
                continue
            mutated = mutate_code(source, operator, occurrence)
            if mutated is not None and _is_whole(mutated):
                yield name, start[0], mutated


def _is_near(name: str) -> bool:
    """Leave out what is a type error here, or a mutant twice: `is` is for members of enumerations and None."""
    kind, *pair = name.split("_")
    if kind == "ReplaceComparisonOperator":
        return set(pair) == {"Is", "IsNot"} or not set(pair) & {"Is", "IsNot"}
    if kind == "ReplaceBinaryOperator":
        return set(pair) <= _SIDEWAYS or pair[0] not in _SIDEWAYS
    return True


def _is_whole(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _undecided(tree: ast.Module) -> Iterator[Span]:
    """Yield the places that decide nothing."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                arguments = node.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                hints = [node.returns, *(each.annotation for each in every)]
                yield from (_span(hint) for hint in hints if hint is not None)
                yield from (_span(each) for each in node.decorator_list if isinstance(each, ast.Call))
            case ast.ClassDef():
                yield from (_span(each) for each in node.decorator_list if isinstance(each, ast.Call))
            case ast.AnnAssign():
                yield _span(node.annotation)
            case ast.JoinedStr():
                yield _span(node)


def _span(node: ast.expr) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _ours(source: str) -> Iterator[tuple[str, int, str]]:
    """Leave out, one by one, elements of tables at module level, cases, and arguments of `replace`."""
    tree = ast.parse(source)
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if value is not None and not isinstance(value, ast.Subscript):  # that is a type's other name
            for node in ast.walk(value):
                for first, last in _elements(node):
                    yield _without(source, "DropElement", first, last)
    for node in ast.walk(tree):
        if isinstance(node, ast.Match):
            for case in node.cases:
                end = (case.body[-1].end_lineno or 0, case.body[-1].end_col_offset or 0)
                yield _cut(source, "DropCase", (case.pattern.lineno, 0), end)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "replace":
            for keyword in node.keywords:
                yield _without(source, "DropArgument", keyword, keyword.value)


def _elements(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    match node:
        case ast.Dict():
            yield from ((key or value, value) for key, value in zip(node.keys, node.values, strict=True))
        case ast.Set() | ast.List() | ast.Tuple():
            yield from ((element, element) for element in node.elts)


def _without(source: str, name: str, first: ast.expr | ast.keyword, last: ast.expr) -> tuple[str, int, str]:
    """Cut from one node to the end of another, with the stars before and the comma behind it."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    before = lines[first.lineno - 1][: first.col_offset]
    begin = len(before.rstrip(b"*")) if before.endswith(b"*") else first.col_offset
    line, end = last.end_lineno or 0, last.end_col_offset or 0
    behind = lines[line - 1][end:]
    if behind.lstrip().startswith(b","):
        end += len(behind) - len(behind.lstrip()) + 1
    return _cut(source, name, (first.lineno, begin), (line, end))


def _cut(source: str, name: str, begin: tuple[int, int], end: tuple[int, int]) -> tuple[str, int, str]:
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    head = b"".join(lines[: begin[0] - 1]) + lines[begin[0] - 1][: begin[1]]
    tail = lines[end[0] - 1][end[1] :] + b"".join(lines[end[0] :])
    mutated = (head + tail).decode()
    return name, begin[0], mutated if _is_whole(mutated) else source


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
