"""Strict type checkers over programs that use the installed wheel."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONSUMER = Path(__file__).resolve().parents[2] / "consumer"


def marked_lines(program: Path) -> set[int]:
    """Numbers of the lines that end in `# error`."""
    lines = program.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# error")}


@pytest.fixture(scope="session")
def mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all runs: reading torch takes most of the first one."""
    return tmp_path_factory.mktemp("mypy")


def mypy(program: Path, python: Path, folder: Path, cache: Path) -> tuple[set[int], str]:
    """Lines that mypy reports, and all it says."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    options = [
        "--python-executable",
        python,
        "--cache-dir",
        cache,
        "--show-absolute-path",
    ]
    result = subprocess.run(
        [*command, *options, program], capture_output=True, text=True, check=False, cwd=folder
    )
    text = result.stdout + result.stderr
    assert result.returncode in (0, 1), text
    found = re.findall(rf"^{re.escape(str(program))}:(\d+): error:", text, re.MULTILINE)
    return {int(line) for line in found}, text


def pyright(program: Path, python: Path, folder: Path, cache: Path) -> tuple[set[int], str]:
    """Lines that pyright reports, and all it says."""
    del cache
    copy = shutil.copy(program, folder / program.name)
    settings = {"include": [program.name], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    # An expression statement is how misuse.py names an attribute that is not there.
    (folder / "pyrightconfig.json").write_text(
        json.dumps({**settings, "reportUnusedExpression": False})
    )
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        python,
        "-p",
        folder,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    report = json.loads(result.stdout[result.stdout.index("{") :])
    faults = [d for d in report["generalDiagnostics"] if d["severity"] == "error"]
    faults = [d for d in faults if Path(d["file"]) == Path(copy)]
    text = "\n".join(f"{d['range']['start']['line'] + 1}: {d['message']}" for d in faults)
    return {d["range"]["start"]["line"] + 1 for d in faults}, text


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_correct_program_is_accepted(
    checker, installed: Path, tmp_path: Path, mypy_cache: Path
) -> None:  # type: ignore[no-untyped-def]
    found, text = checker(CONSUMER / "uses_helicore.py", installed, tmp_path, mypy_cache)
    assert found == set(), text


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_every_planted_mistake_is_found_and_nothing_else(  # type: ignore[no-untyped-def]
    checker, installed: Path, tmp_path: Path, mypy_cache: Path
) -> None:
    program = CONSUMER / "misuse.py"
    found, text = checker(program, installed, tmp_path, mypy_cache)
    expected = marked_lines(program)
    assert len(expected) >= 25
    assert found == expected, f"missed {expected - found}, unexpected {found - expected}\n{text}"


def test_the_stubs_themselves_are_accepted_by_mypy(
    installed: Path, tmp_path: Path, mypy_cache: Path
) -> None:
    stubs = installed.parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    folder = stubs / "helicore" / "_core"
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
    ]
    result = subprocess.run(
        [*command, "--cache-dir", mypy_cache, *sorted(folder.glob("*.pyi"))],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout
