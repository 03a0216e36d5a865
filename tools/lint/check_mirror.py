"""Holds the layout: tests lie where their sources lie, and every source is listed in CMake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from repo import Finding, files, report

# Test files that cover a whole area or a behaviour across units; a stem of `tests/cpp/<area>`.
_WHOLE_AREA = ("property", "fuzz", "parity", "fake_engine")


def _units(names: list[str]) -> dict[str, set[str]]:
    """Area -> stems of its sources and headers, sub-folders included."""
    units: dict[str, set[str]] = {}
    for name in names:
        path = PurePosixPath(name)
        in_area = name.startswith("cpp/helicore/") and len(path.parts) > 3
        if in_area and path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            units.setdefault(path.parts[2], set()).add(path.name.split(".")[0])
    return units


def _check_tests(names: list[str], units: dict[str, set[str]]) -> Iterator[Finding]:
    for name in names:
        path = PurePosixPath(name)
        if not name.startswith("tests/cpp/") or not name.endswith("_test.cpp"):
            continue
        area = path.parts[2]
        unit = path.name.removesuffix("_test.cpp")
        known = units.get(area, set())
        if area not in units:
            yield Finding(name, 0, f"there is no area cpp/helicore/{area}")
        elif not any(word in unit for word in _WHOLE_AREA) and not any(
            unit.startswith(stem) or stem.startswith(unit) for stem in known
        ):
            yield Finding(name, 0, f"no unit of cpp/helicore/{area} is called '{unit}'")


def _check_listed(root: Path, names: list[str]) -> Iterator[Finding]:
    for name in names:
        path = PurePosixPath(name)
        is_source = name.startswith("cpp/helicore/") and path.suffix in (".cpp", ".cu")
        is_test = name.startswith("tests/cpp/") and name.endswith("_test.cpp")
        if not (is_source or is_test) or len(path.parts) <= 3:
            continue
        lists = PurePosixPath(*path.parts[:3]) / "CMakeLists.txt"
        inside = path.relative_to(lists.parent).as_posix()
        listed = (root / lists).read_text(encoding="utf-8") if (root / lists).is_file() else ""
        if inside not in listed:
            yield Finding(name, 0, f"not listed in {lists}")


def _check_areas(names: list[str], units: dict[str, set[str]]) -> Iterator[Finding]:
    present = set(names)
    for area in sorted(units):
        if f"cpp/helicore/{area}/README.md" not in present:
            yield Finding(f"cpp/helicore/{area}", 0, "the area has no README.md")
        tests = [n for n in names if n.startswith(f"tests/cpp/{area}/") and n.endswith("_test.cpp")]
        if not tests:
            yield Finding(f"cpp/helicore/{area}", 0, f"the area has no test in tests/cpp/{area}")


def check(root: Path) -> list[Finding]:
    names = files(root)
    units = _units(names)
    return [
        *_check_tests(names, units),
        *_check_listed(root, names),
        *_check_areas(names, units),
    ]


if __name__ == "__main__":
    sys.exit(report(check))
