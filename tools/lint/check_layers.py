"""Holds the direction of includes and imports: never upwards, never to a neighbour."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from repo import Finding, matching, report

# C++ areas; an area may include itself and areas of a lower rank.
AREA_RANK = {
    "core": 0,
    "quant": 1,
    "nn": 2,
    "comm": 2,
    "attention": 3,
    "moe": 3,
    "kv": 3,
    "transfer": 4,
}
# Python modules below `helicore`; the same rule.
MODULE_RANK = {
    "_version": 0,
    "_core": 0,
    "_requirements": 0,
    "checking": 0,
    "kv": 1,
    "ops": 1,
    "comm": 1,
    "transfer": 1,
    "config": 2,
    "sampling_params": 2,
    "outputs": 2,
    "chat_template": 3,
    "model_path": 3,
    "parallel": 3,
    "models": 4,
    "tokenizer": 4,
    "prompts": 5,
    "executor": 6,
    "generation": 7,
    "llm": 8,
    "serving": 9,
    "bench": 9,
    "cli": 10,
}
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
_NO_PYTHON = re.compile(r"^(nanobind/|pybind11/|Python\.h|torch/|ATen/|c10/)")
_DEVICE_ONLY = re.compile(r"^(cute/|cutlass/|cub/|thrust/)")


def _check_cpp(root: Path) -> Iterator[Finding]:
    for name, text in matching(root, "cpp/helicore", ".h", ".cpp", ".cu", ".cuh"):
        parts = name.split("/")
        area = parts[2] if len(parts) > 3 else ""
        if area and area not in AREA_RANK:
            yield Finding(name, 0, f"area '{area}' has no rank; add it to check_layers.AREA_RANK")
            continue
        for number, line in enumerate(text.splitlines(), 1):
            match = _INCLUDE.match(line)
            if match is None:
                continue
            target = match[1]
            if _NO_PYTHON.match(target):
                yield Finding(name, number, f"the core must not include {target}")
            if _DEVICE_ONLY.match(target) and "cuda" not in parts:
                yield Finding(name, number, f"{target} belongs below a cuda/ folder only")
            if target.startswith("helicore/") and area:
                yield from _check_area(name, number, area, target)


def _check_area(name: str, number: int, area: str, target: str) -> Iterator[Finding]:
    parts = target.split("/")
    other = parts[1] if len(parts) > 2 else "the umbrella header"
    if other == area:
        return
    if other not in AREA_RANK:
        yield Finding(name, number, f"includes {target}: {other} is no area below {area}")
    elif AREA_RANK[other] >= AREA_RANK[area]:
        yield Finding(name, number, f"{area} must not include {other} ({target})")


def _imports(tree: ast.Module, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import that runs, type-checking blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def _check_python(root: Path) -> Iterator[Finding]:
    for name, text in matching(root, "python/helicore", ".py"):
        parts = Path(name).with_suffix("").parts[1:]
        if len(parts) == 2 and parts[1] in ("__init__", "__main__"):
            continue  # the package itself re-exports from everywhere
        own = parts[1]
        if own not in MODULE_RANK:
            yield Finding(
                name, 0, f"module '{own}' has no rank; add it to check_layers.MODULE_RANK"
            )
            continue
        for number, target in _imports(ast.parse(text), list(parts[:-1])):
            other = target.split(".")[1] if target.startswith("helicore.") else own
            if other == own or other not in MODULE_RANK:
                continue
            if MODULE_RANK[other] >= MODULE_RANK[own]:
                yield Finding(name, number, f"helicore.{own} must not import helicore.{other}")


def check(root: Path) -> list[Finding]:
    return [*_check_cpp(root), *_check_python(root)]


if __name__ == "__main__":
    sys.exit(report(check))
