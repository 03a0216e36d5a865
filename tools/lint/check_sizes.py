"""Holds the size budgets: lines per file, lines and parameters per function.

In Python only the body counts, in C++ the head too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from repo import Finding, files, report

MAX_FUNCTION_LINES = 60
# Bind functions are lists of definitions, and a class's factory takes its fields; inner functions
# of kernel files pass tiles and strides in registers.
MAX_KERNEL_OR_BINDING_LINES = 100
MAX_PARAMETERS = 6
# (folder, suffix, lines); the first row that fits counts.
FILE_BUDGETS = (
    ("cpp/", ".inc.cpp", 900),
    ("cpp/", ".inc.h", 900),
    ("cpp/", ".cuh", 900),
    ("cpp/", ".cu", 900),
    ("cpp/", ".h", 300),
    ("cpp/", ".cpp", 600),
    ("bindings/", ".cpp", 400),
    ("bindings/", ".h", 300),
    ("tests/", ".cpp", 700),
    ("tests/", ".h", 700),
    ("tests/", ".py", 700),
    ("python/", ".py", 500),
    ("tools/", ".py", 500),
    ("examples/", ".py", 500),
    ("benchmarks/", ".py", 500),
)
_CPP = (".cpp", ".h", ".cu", ".cuh")
_NOT_FUNCTIONS = {
    "if",
    "for",
    "while",
    "switch",
    "catch",
    "return",
    "sizeof",
    "alignas",
    "decltype",
}
# Text before a `{` that ends a function head: parameters, then qualifiers or an initialiser list.
_HEAD = re.compile(
    r"([~\w:<>]+|operator\s*[^\s\w(]{1,3}|operator\s*\(\))\s*"
    r"(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))\s*"
    r"(?:const|noexcept(?:\([^)]*\))?|override|final|mutable|&&?|->\s*[\w:<>,*&\s]+|\s)*"
    r"(?::(?!:)[^;{}]*(?:\{[^{}]*\}[^;{}]*)*)?$"
)


def strip_cpp(text: str) -> str:
    """The text with comments, strings and preprocessor lines blanked; line breaks stay."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    pattern = r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    text = re.sub(pattern, blank, text, flags=re.DOTALL)
    return re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", blank, text, flags=re.MULTILINE)


def count_parameters(parameters: str) -> int:
    """Parameters of a C++ list written with its parentheses."""
    inner = parameters[1:-1].strip()
    if inner in ("", "void"):
        return 0
    depth = 0
    count = 1
    for character in inner:
        if character in "(<[{":
            depth += 1
        elif character in ")>]}":
            depth -= 1
        elif character == "," and depth == 0:
            count += 1
    return count


def cpp_functions(text: str) -> Iterator[tuple[str, int, int, int, bool]]:
    """(name, first line, lines, parameters, is device code) of each function body in C++ text."""
    code = strip_cpp(text)
    stack: list[tuple[str, int, int, bool] | None] = []
    inside = 0  # function bodies around the cursor: lambdas and local types are not counted apart
    statement = 0
    for position, character in enumerate(code):
        if character == ";" or (character == ":" and _is_label(code, statement, position)):
            statement = position + 1
        elif character == "{":
            head = code[statement:position]
            entry = None if inside else _function_head(head)
            if entry is None:
                stack.append(None)
            else:
                start = statement + len(head) - len(head.lstrip())
                stack.append((entry[0], start, entry[1], entry[2]))
                inside += 1
            if not _opens_initialiser(head):
                statement = position + 1
        elif character == "}" and stack:
            opened = stack.pop()
            if opened is not None:
                inside -= 1
                first = code.count("\n", 0, opened[1]) + 1
                last = code.count("\n", 0, position) + 1
                yield opened[0], first, last - first + 1, opened[2], opened[3]
            if not _continues_head(code[statement:position]):
                statement = position + 1


def _is_label(code: str, start: int, position: int) -> bool:
    return code[start:position].strip() in ("public", "private", "protected")


def _opens_initialiser(head: str) -> bool:
    """Whether `{` belongs to `: member_{...}` in a constructor's head and not to a body."""
    return bool(re.search(r"\)\s*(?:noexcept\s*)?:(?!:)", head)) and bool(re.search(r"\w$", head))


def _continues_head(text: str) -> bool:
    return bool(re.search(r"\)\s*(?:noexcept\s*)?:(?!:)", text))


def _function_head(head: str) -> tuple[str, int, bool] | None:
    if _opens_initialiser(head):
        return None
    match = _HEAD.search(head.rstrip())
    if match is None or "=" in re.sub(r"operator\s*\S+|[=!<>]=|\([^)]*\)", "", head):
        return None
    name = match[1].split("::")[-1].strip()
    if name in _NOT_FUNCTIONS or re.match(r"\s*(namespace|class|struct|enum|union)\b", head):
        return None
    return name, count_parameters(match[2]), "__global__" in head or "__device__" in head


def _check_cpp(name: str, text: str) -> Iterator[Finding]:
    wide = name.startswith("bindings/") or ".inc." in name
    allowed = MAX_KERNEL_OR_BINDING_LINES if wide else MAX_FUNCTION_LINES
    for function, line, lines, parameters, on_device in cpp_functions(text):
        if lines > allowed and not on_device:
            yield Finding(name, line, f"{function}() has {lines} lines, allowed {allowed}")
        if parameters > MAX_PARAMETERS and not wide and not on_device:
            yield Finding(
                name, line, f"{function}() has {parameters} parameters, allowed {MAX_PARAMETERS}"
            )


def _check_python(name: str, text: str) -> Iterator[Finding]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            lines = (node.end_lineno or node.lineno) - body[0].lineno + 1
            if lines > MAX_FUNCTION_LINES:
                message = f"{node.name}() has {lines} lines, allowed {MAX_FUNCTION_LINES}"
                yield Finding(name, node.lineno, message)


def check(root: Path) -> list[Finding]:
    found: list[Finding] = []
    for name in files(root):
        if not name.endswith((*_CPP, ".py")):
            continue
        text = (root / name).read_text(encoding="utf-8")
        lines = text.splitlines()
        budget = next(
            (n for top, end, n in FILE_BUDGETS if name.startswith(top) and name.endswith(end)), 0
        )
        if budget and len(lines) > budget:
            found.append(Finding(name, 0, f"{len(lines)} lines, allowed {budget}: split it"))
        if name.endswith(".py"):
            found.extend(_check_python(name, text))
        elif not name.startswith("tests/"):
            found.extend(_check_cpp(name, text))
    return found


if __name__ == "__main__":
    sys.exit(report(check))
