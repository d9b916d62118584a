"""Where a fault is planted: in a function, found by its name, the tokens of a pattern.

Line breaks, indentation, comments, and the rest of the file do not count.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

__all__ = ["functions", "plant"]

STRING = r'"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*"|' + r"'(?:[^'\\\n]|\\.)*'"
PYTHON = re.compile(rf"(?P<comment>#[^\n]*)|{STRING}|\w+|\S", re.DOTALL)
CXX = re.compile(rf"(?P<comment>//[^\n]*|/\*.*?\*/)|{STRING}|\w+|\S", re.DOTALL)
DIRECTIVE = re.compile(r"^#(?:define (\w+))?(?:[^\n]*\\\n)*[^\n]*\n", re.MULTILINE)
NO_FUNCTIONS = {"if", "for", "while", "switch", "catch", "constexpr", "return"}

Token = tuple[str, int, int]  # its text, start and end
Range = tuple[str, int, int]  # a function's name, start and end


def plant(source: str, file: str, function: str, pattern: str, replacement: str) -> str:
    """Return a file's source with a pattern in one of its functions replaced.

    Args:
        source: the text of the file.
        file: its name, which tells the language.
        function: the name of a function, class or macro, in Python with those around it
            (``Class.method``); empty for the whole file.
        pattern: text whose tokens stand there once.
        replacement: what stands in their place.

    Raises:
        ValueError: the file has no such function, or the function has the pattern never or twice.
    """
    syntax = PYTHON if file.endswith(".py") else CXX
    ranges = [(start, end) for name, start, end in functions(source, file) if name == function]
    if not function:
        ranges = [(0, len(source))]
    if not ranges:
        raise ValueError(f"{file} has no {function}")
    wanted = [text for text, *_ in tokens(pattern, syntax)]
    found = set()
    for start, end in ranges:
        here = tokens(source, syntax, start, end)
        for i in range(len(here) - len(wanted) + 1):
            if [text for text, *_ in here[i : i + len(wanted)]] == wanted:
                found.add((here[i][1], here[i + len(wanted) - 1][2]))
    if len(found) != 1:
        raise ValueError(f"{function or file} has {pattern!r} {len(found)} times")
    [(start, end)] = found
    return source[:start] + replacement + source[end:]


def tokens(
    text: str, syntax: re.Pattern[str], start: int = 0, end: int | None = None
) -> list[Token]:
    """Return the tokens of a text, without comments."""
    matches = syntax.finditer(text, start, len(text) if end is None else end)
    return [(m[0], m.start(), m.end()) for m in matches if m["comment"] is None]


@functools.cache
def functions(source: str, file: str) -> list[Range]:
    """Return the functions and classes of a file, in C++ its macros too."""
    found = _python_functions if file.endswith(".py") else _cxx_functions
    return list(found(source))


def _python_functions(source: str) -> Iterator[Range]:
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def below(node: ast.AST, path: str) -> Iterator[Range]:
        for child in ast.iter_child_nodes(node):
            name = path
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{path}.{child.name}".lstrip(".")
                first = min([child.lineno, *(x.lineno for x in child.decorator_list)])
                yield name, lines[first - 1], lines[child.end_lineno or 0]
            yield from below(child, name)

    return below(ast.parse(source), "")


def _cxx_functions(source: str) -> Iterator[Range]:
    """Yield a name for each block whose head has one: the word before the first parenthesis."""
    for directive in DIRECTIVE.finditer(source):
        if directive[1]:
            yield directive[1], directive.start(), directive.end()
    source = DIRECTIVE.sub(lambda x: " " * len(x[0]), source)
    opened: list[tuple[str, int]] = []
    head: list[Token] = []
    depth = 0  # of parentheses, in which a block is a lambda or an initialiser
    for token in tokens(source, CXX):
        text, start, end = token
        depth += (text == "(") - (text == ")")
        if depth or text not in "{};":
            head.append(token)
            continue
        if text == "{":
            opened.append((_name_of([x for x, *_ in head]), head[0][1] if head else start))
        elif text == "}" and opened:
            name, start = opened.pop()
            if name:
                yield name, start, end
        head = []


def _name_of(head: list[str]) -> str:
    """Return the name of what a block belongs to, or nothing for a loop or a namespace."""
    while "__attribute__" in head:  # and its two pairs of parentheses
        at = head.index("__attribute__")
        head = head[:at] + head[head.index(")", at) + 2 :]
    before = head[: head.index("(")] if "(" in head else []
    if before and before[-1].isidentifier() and before[-1] not in NO_FUNCTIONS:
        return before[-1]
    kinds = [i for i, word in enumerate(head) if word in ("struct", "class", "union", "enum")]
    names = [x for x in head[kinds[-1] + 1 :] if x.isidentifier()] if kinds and not before else []
    return names[0] if names else ""
