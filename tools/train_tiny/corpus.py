"""The text: Python files of a standard library, their split, and augmented copies of them."""

import ast
import hashlib
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

SPLITS = ("train", "val", "held")

# Tables and files that are wrong on purpose: little of either is Python that a person would write.
_SKIP = re.compile(
    r"^(pydoc_data/|_sysconfigdata|config-|lib2to3/tests/data"
    r"|test/.*(bad_coding|badsyntax|encoded_modules|bad_getattr)"
    r"|encodings/(cp\d|mac_|iso8859|koi8|kz1048|palmos|ptcp154|hp_roman8|tis_620|big5|gb|euc|shift"
    r"|johab|iso2022))"
)
_BLOCK_START = re.compile(r"\n\n(?=[ \t]*(?:def |class |@|import |from |if |for ))")
_AFTER_BLANKS = re.compile(r"(?<=[ \t])(?=\S)")
_MIN_BYTES = 64


@dataclass(frozen=True)
class SourceFile:
    """One file of the library; `group` is shared by a module, its package and its tests."""

    path: str
    text: str
    split: str
    group: str


def split_of(path: str) -> str:
    """4 % held out, 2 % validation, by a hash of the path below the library's root."""
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 100
    return "held" if bucket < 4 else "val" if bucket < 6 else "train"


def group_of(path: str) -> str:
    """`json/decoder.py`, `test/test_json/test_pass1.py` and `_json.py` are all of group `json`."""
    parts = [p for p in path.removesuffix(".py").split("/") if p not in ("test", "tests")]
    head = parts[0] if parts else path
    return head.removeprefix("test_").strip("_") or head


def read_library(root: Path) -> list[SourceFile]:
    """Every distinct UTF-8 Python file below `root`, site-packages excepted, sorted by path."""
    files: list[SourceFile] = []
    seen: set[bytes] = set()
    for folder, names, leaves in os.walk(root):
        skipped = ("site-packages", "dist-packages", "__pycache__")
        names[:] = sorted(n for n in names if n not in skipped)
        for leaf in sorted(leaves):
            full = Path(folder, leaf)
            path = full.relative_to(root).as_posix()
            if not leaf.endswith(".py") or _SKIP.search(path):
                continue
            raw = full.read_bytes()
            digest = hashlib.sha256(raw).digest()
            if len(raw) < _MIN_BYTES or digest in seen:
                continue
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                continue
            seen.add(digest)
            files.append(SourceFile(path, text, split_of(path), group_of(path)))
    return sorted(files, key=lambda f: f.path)


def split_blocks(text: str, rng: np.random.Generator, mean_chars: float = 5000.0) -> list[str]:
    """Cuts a file before some of its definitions, so that a document may begin anywhere."""
    starts = [m.end() for m in _BLOCK_START.finditer(text)]
    keep = rng.random(len(starts)) < len(text) / mean_chars / max(1, len(starts))
    bounds = [0, *(s for s, k in zip(starts, keep, strict=True) if k), len(text)]
    return [text[a:b] for a, b in pairwise(bounds) if b > a]


def cut_segments(text: str, rng: np.random.Generator) -> list[str]:
    """Cuts text into segments that are tokenised apart, as a prompt and its continuation are.

    Half of the cuts fall between blanks and the word after them, which is where prompts end that
    would otherwise be a token sequence never seen in training. The density of cuts differs from
    document to document, so that text without any stays the common case.
    """
    rate = float(np.exp(rng.uniform(np.log(1 / 2000), np.log(1 / 60))))
    count = int(rng.poisson(rate * len(text)))
    blanks = [m.start() for m in _AFTER_BLANKS.finditer(text)]
    cuts = {int(c) for c in rng.integers(1, max(2, len(text)), count - count // 2)}
    if blanks:
        cuts |= {blanks[int(i)] for i in rng.integers(0, len(blanks), count // 2)}
    bounds = [0, *sorted(c for c in cuts if 0 < c < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def _signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"function `{node.name}({ast.unparse(node.args)})`"
    bases = ", ".join(ast.unparse(b) for b in node.bases)
    return f"class `{node.name}({bases})`" if bases else f"class `{node.name}`"


def exchanges(file: SourceFile, max_chars: int = 2400) -> Iterator[tuple[str, str, str]]:
    """(kind, request, answer) from documented functions and classes: material for chat markers."""
    try:
        tree = ast.parse(file.text)
    except (SyntaxError, ValueError):
        return
    lines = file.text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        doc = ast.get_docstring(node)
        if not doc or node.name.startswith("test"):
            continue
        first = " ".join(doc.split("\n\n")[0].split())
        source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip() + "\n"
        if len(source) > max_chars or not 12 <= len(first) <= 300:
            continue
        yield "write", f"Write a {_signature(node)}. {first}", source
        body = node.body[1:]
        if body and len(first) > 24:
            head = lines[node.lineno - 1 : node.body[0].lineno - 1]
            bare = head + lines[body[0].lineno - 1 : node.end_lineno]
            code = textwrap.dedent("".join(bare)).rstrip() + "\n"
            yield "explain", f"What does this do?\n\n{code}", first + "\n"
