"""Figures of the house: how long its functions are, how often a call is written out.

``python bench/architecture.py [FOLDER]`` prints the rows of the table in docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: Arguments of ``attention``, today and before; nine in one list are the call written out.
NAMES = {
    "query", "key", "value", "weight", "bias", "mask", "lengths", "span", "columns", "prepared",
    "exponentials", "scale", "score", "relu", "need_statistics", "need_weights",
}  # fmt: skip
MANY = 9
TOKEN = re.compile(
    r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|#[^\n]*|\w+|[^\s\w]'
)


def sources(root: Path) -> dict[str, list[Path]]:
    """Return the files of each language that are installed or compiled."""
    python = [*(root / "attnfast").rglob("*.py"), *(root / "kernels").glob("*.py")]
    cpp = [x for x in (root / "csrc").rglob("*") if x.suffix in (".h", ".cpp", ".cu", ".cuh")]
    return {"Python": sorted(python), "C++": sorted(cpp)}


def groups(text: str) -> Iterator[set[str]]:
    """Yield the names that stand in each pair of parentheses, but not in a pair within it."""
    open_ones: list[set[str]] = []
    for token in TOKEN.findall(text):
        if token == "(":
            open_ones.append(set())
        elif token == ")" and open_ones:
            yield open_ones.pop()
        elif open_ones and token in NAMES:
            open_ones[-1].add(token)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (x for x in ast.walk(tree) if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef)))


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(x) for x in function.decorator_list)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring."""
    doc = ast.get_docstring(function, clean=False)
    return (function.end_lineno or 0) - function.lineno + 1 - (doc.count("\n") + 1 if doc else 0)


def cpp_functions(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of each function and its first line, as clang-format lays them out."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        indent = line[: len(line) - len(line.lstrip())]
        if not line.rstrip().endswith("{") or len(indent) > 4 or ")" not in line:
            continue
        if re.match(r"\s*(if|for|while|switch|else|do|}|namespace|return)\b", line):
            continue
        start = i
        while (
            start
            and lines[start - 1].strip()
            and not re.search(r"[;{}]\s*(//.*)?$|^#|^\s*//", lines[start - 1])
        ):
            start -= 1
        indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
        for j in range(i + 1, len(lines)):
            if lines[j].startswith(indent + "}"):
                calls = re.findall(r"(\w+)\(", " ".join(lines[start : i + 1]))
                yield j - start + 1, next((x for x in calls if x != "__launch_bounds__"), "?")
                break


def main(root: Path) -> None:
    files = sources(root)
    places = [
        str(file.relative_to(root))
        for language in files.values()
        for file in language
        for names in groups(file.read_text())
        if len(names) >= MANY
    ]
    trees = {file: ast.parse(file.read_text()) for file in files["Python"]}
    plain = [(f, file) for file, tree in trees.items() for f in functions(tree) if not is_kernel(f)]
    ours = [pair for pair in plain if pair[1].parent.name not in ("hosts", "integrations")]
    kernels = [(f, file) for file, tree in trees.items() for f in functions(tree) if is_kernel(f)]

    def positional(f: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        return len(f.args.posonlyargs) + len(f.args.args)

    def said(pairs, measure) -> str:
        f, file = max(pairs, key=lambda pair: measure(pair[0]))
        return f"{measure(f)} (`{f.name}` in {file.relative_to(root)})"

    longest = max(
        (*found, file) for file in files["C++"] for found in cpp_functions(file.read_text())
    )
    over = [
        f"{name} {n}"
        for file in files["C++"]
        for n, name in cpp_functions(file.read_text())
        if n > 60
    ]
    total = {k: sum(len(x.read_text().splitlines()) for x in v) for k, v in files.items()}
    print(f"lists of {MANY} arguments or more: {len(places)} in {len(set(places))} files")
    print("  " + ", ".join(sorted(set(places))))
    print(f"most positional parameters: {said(ours, positional)}")
    print(f"longest Python function: {said(plain, body_lines)}")
    print(f"longest Triton kernel: {said(kernels, body_lines)}")
    print(f"longest C++ function: {longest[0]} (`{longest[1]}` in {longest[2].relative_to(root)})")
    print(f"C++ functions over 60 lines: {len(over)} ({', '.join(over)})")
    print(f"lines: {', '.join(f'{v:,} of {k}' for k, v in total.items())}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
