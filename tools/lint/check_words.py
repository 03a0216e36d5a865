"""Keeps the tree free of host paths, tracker numbers, history talk and left-over markers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from repo import Finding, matching, report

_TEXT = (
    ".py",
    ".pyi",
    ".h",
    ".cpp",
    ".cu",
    ".cuh",
    ".md",
    ".txt",
    ".cmake",
    ".toml",
    ".sh",
    ".yaml",
)
_NAMES = ("Makefile", "CMakePresets.json", ".ci/run", ".clang-tidy", ".clang-format")
# (pattern, what is wrong). Classes of one letter keep the table from finding itself.
FORBIDDEN = (
    (re.compile(r"(?<![\w.])/(?:wor[k]|hom[e]|roo[t])/[\w.]"), "a path of one machine"),
    (re.compile(r"/tm[p]/h[c]\b"), "a path of one machine"),
    (re.compile(r"\b[i]ssues? #?\d+", re.IGNORECASE), "a tracker number"),
    (re.compile(r"(?<!\w)#[1-9]\d{2,4}\b(?!\w)"), "a tracker number"),
    (
        re.compile(r"\bshare[d]/(?:design|spec|cases|toolchain|tiny|hooks)"),
        "a path outside the tree",
    ),
    (
        re.compile(r"\b(?:spec/(?:kv-cache|mla-helix|moe-hybrid)|toolchai[n]\.md)"),
        "a path outside the tree",
    ),
    (
        re.compile(r"\b[m]irrors\s+(?:the\s+)?(?:vllm|sglang|tensorrt|hugging)", re.IGNORECASE),
        "history talk",
    ),
    (re.compile(r"\b[p]orted from\b", re.IGNORECASE), "history talk"),
    (re.compile(r"\b(?:[w]as|[h]as been) (?:changed|renamed|moved) (?:to|from)\b"), "history talk"),
    (re.compile(r"\b(?:[F]IXME|[X]XX|[H]ACK)\b"), "a left-over marker"),
    (
        re.compile(r"\b[T]ODO\b(?!\([\w ]+\): \w)"),
        "a to-do without the reason why it is safe today, in brackets",
    ),
)
# A tracker's case number, in prose only: C++ and Python have a `case 3:` of their own.
_PROSE = re.compile(r"\b[c]ases? \d+\b(?!\s*[:*+)])")
_COMMENT = re.compile(r"(//|#|\"\"\"|/\*)(.*)")


def _prose(name: str, line: str) -> str:
    if name.endswith(".md"):
        return line
    match = _COMMENT.search(line)
    return match[2] if match else ""


def _scan(name: str, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, what in FORBIDDEN:
            match = pattern.search(line)
            if match:
                yield Finding(name, number, f"{what}: '{match[0]}'")
        match = _PROSE.search(_prose(name, line))
        if match:
            yield Finding(name, number, f"a tracker number: '{match[0]}'")


def check(root: Path) -> list[Finding]:
    found: list[Finding] = []
    for name, text in matching(root, "", *_TEXT, *_NAMES):
        if name != "LICENSE":
            found.extend(_scan(name, text))
    return found


if __name__ == "__main__":
    sys.exit(report(check))
