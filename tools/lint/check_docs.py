"""Holds the documents together: links resolve, one version, each glossary term once."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from repo import Finding, matching, report

REQUIRED = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "docs/index.md",
    "docs/architecture.md",
    "docs/glossary.md",
    "docs/features.md",
)
# Words with one meaning in code, tests and documents; docs/glossary.md defines each once.
TERMS = (
    "block", "page", "slot", "pool", "pool group", "life cycle", "cache domain", "tier", "level",
    "radix tree", "base page index", "latent", "absorbed", "expanded", "split", "wave", "rank",
    "shard", "draft", "verify",
)  # fmt: skip
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^\*\*(.+?)\*\*", re.MULTILINE)


def anchor(heading: str) -> str:
    """The link target that a heading makes: `## Two commands` -> `two-commands`."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def _check_links(root: Path) -> Iterator[Finding]:
    for name, text in matching(root, "", ".md"):
        prose = _FENCE.sub(lambda m: "\n" * m[0].count("\n"), text)
        for match in _LINK.finditer(prose):
            target, _, fragment = match[1].partition("#")
            if re.match(r"\w+:", target):
                continue
            line = prose.count("\n", 0, match.start()) + 1
            file = (root / name).parent / target if target else root / name
            if not file.exists():
                yield Finding(name, line, f"link to {target}, which does not exist")
            elif fragment and file.suffix == ".md":
                anchors = {anchor(h) for h in _HEADING.findall(file.read_text(encoding="utf-8"))}
                if fragment not in anchors:
                    yield Finding(
                        name, line, f"link to #{fragment}: no such heading in {file.name}"
                    )


def _check_version(root: Path) -> Iterator[Finding]:
    project = root / "pyproject.toml"
    if not project.is_file():
        return
    version = str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    for name, pattern in (
        ("CMakeLists.txt", r"project\(helicore VERSION ([\d.]+)"),
        ("python/helicore/_version.py", r'__version__ = "([^"]+)"'),
        ("CHANGELOG.md", r"^## \[(\d[^\]]*)\]"),
    ):
        file = root / name
        match = file.is_file() and re.search(
            pattern, file.read_text(encoding="utf-8"), re.MULTILINE
        )
        if not match:
            yield Finding(name, 0, "no version found")
        elif match[1] != version:
            yield Finding(name, 0, f"version {match[1]}, but pyproject.toml says {version}")


def _check_glossary(root: Path) -> Iterator[Finding]:
    name = "docs/glossary.md"
    if not (root / name).is_file():
        return
    defined = Counter(
        term.lower() for term in _ENTRY.findall((root / name).read_text(encoding="utf-8"))
    )
    for term in TERMS:
        if defined[term] != 1:
            yield Finding(name, 0, f"'{term}' is defined {defined[term]} times, not once")


def check(root: Path) -> list[Finding]:
    missing = [Finding(name, 0, "missing") for name in REQUIRED if not (root / name).is_file()]
    return [*missing, *_check_links(root), *_check_version(root), *_check_glossary(root)]


if __name__ == "__main__":
    sys.exit(report(check))
