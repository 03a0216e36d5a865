"""What the lint scripts share: the files of the tree, findings, and the command line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SKIPPED_FOLDERS = {"build", "dist", ".git", "__pycache__", ".venv", ".cache", ".mypy_cache"}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One fault: where it is and what is wrong. `line` 0 means the whole file."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.message}"
            if self.line
            else f"{self.path}: {self.message}"
        )


def files(root: Path) -> list[str]:
    """Every file of the project, relative to `root`: tracked, or new and not ignored by git."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0 and (root / ".git").exists():
        names = sorted(set(listed.stdout.decode().split("\0")) - {""})
        return [name for name in names if (root / name).is_file()]
    return sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and not _SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    )


def matching(root: Path, top: str, *suffixes: str) -> Iterator[tuple[str, str]]:
    """(relative name, text) of the files below `top` ("" for all) with one of the suffixes."""
    for name in files(root):
        if (not top or name.startswith(top + "/")) and name.endswith(suffixes):
            yield name, (root / name).read_text(encoding="utf-8")


def report(check: Callable[[Path], Iterable[Finding]], argv: list[str] | None = None) -> int:
    """Command line of one lint script: prints the findings, returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=sys.modules[check.__module__].__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to look at")
    args = parser.parse_args(argv)
    found = sorted(check(args.root))
    for finding in found:
        print(finding)
    return 1 if found else 0
