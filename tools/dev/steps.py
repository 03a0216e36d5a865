"""Runs named steps: progress lines, one log per step, results remembered by the inputs they had.

A step that succeeded with the same inputs is not run again (`force` runs it all the same). A failed
step says what failed, where its log is, and what to do about it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
HEARTBEAT_SECONDS = 30.0
TAIL_LINES = 40


class StepFailed(Exception):
    """A step failed and has been reported; the command ends with exit status 1."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do: commands that run one after the other, the first failure ends it."""

    title: str
    commands: Sequence[Sequence[str]]
    hint: str  # what to do when it fails
    key: str = ""  # a digest of the inputs; empty: run every time
    echo: bool = False  # show the output as it comes
    env: dict[str, str] = field(default_factory=dict)
    is_test: bool = False  # show what the test runner says at its end, also when remembered

    @property
    def slug(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower()).strip("-")


class Runner:
    """Runs steps below one folder of logs and remembered results (`build/steps`)."""

    def __init__(self, *, force: bool = False, state: Path = ROOT / "build" / "steps") -> None:
        self._force = force
        self._state = state
        self._began = time.monotonic()
        self.ran: list[tuple[str, float]] = []
        state.mkdir(parents=True, exist_ok=True)

    def run(self, step: Step) -> None:
        """Runs the step, or says that it is up to date. Raises StepFailed after reporting."""
        log = self._state / f"{step.slug}.log"
        remembered = self._remembered(step)
        if remembered is not None:
            _say(f"==> {step.title}: up to date, nothing to do")
            if step.is_test:
                _say(f"    result of {remembered['when']}, same inputs (FORCE=1 runs it again):")
                _say("\n".join(_closing_lines(log)))
            return
        _say(f"==> {step.title} ({time.monotonic() - self._began:.0f} s since the start)")
        self._stamp(step).unlink(missing_ok=True)
        began = time.monotonic()
        with log.open("wb") as out:
            for command in step.commands:
                status = self._execute(step, command, out)
                if status != 0:
                    self._fail(step, command, status, log, time.monotonic() - began)
        if step.is_test and not step.echo:
            _say("\n".join(_closing_lines(log)))
        took = time.monotonic() - began
        self.ran.append((step.title, took))
        if step.key:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            self._stamp(step).write_text(json.dumps({"key": step.key, "when": when}))
        _say(f"    done in {took:.1f} s")

    def run_all(self, steps: Iterable[Step]) -> None:
        """Runs every step, also after a failure, and sums up. Raises StepFailed if any failed."""
        failed = []
        for step in steps:
            try:
                self.run(step)
            except StepFailed:
                failed.append(step.title)
        if self.ran or failed:
            _say("==> Steps that ran")
        for title, took in self.ran:
            _say(f"    {took:7.1f} s  {title}")
        if failed:
            _say("!!! failed: " + "; ".join(failed))
            raise StepFailed(failed[0])

    def total(self) -> float:
        """Seconds since the runner was made."""
        return time.monotonic() - self._began

    def _stamp(self, step: Step) -> Path:
        return self._state / f"{step.slug}.json"

    def _remembered(self, step: Step) -> dict[str, str] | None:
        if self._force or not step.key:
            return None
        try:
            stamp: dict[str, str] = json.loads(self._stamp(step).read_text())
        except (OSError, ValueError):
            return None
        return stamp if stamp.get("key") == step.key else None

    def _execute(self, step: Step, command: Sequence[str], log: IO[bytes]) -> int:
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **step.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            log.write(f"{command[0]}: {error}\n".encode())
            return 127
        stop = threading.Event()
        newest = [b""]
        beat = threading.Thread(target=_heartbeat, args=(stop, newest), daemon=True)
        if not step.echo:
            beat.start()
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            newest[0] = line.strip() or newest[0]
            if step.echo:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
        stop.set()
        log.flush()
        return process.wait()

    def _fail(
        self, step: Step, command: Sequence[str], status: int, log: Path, took: float
    ) -> None:
        if not step.echo:
            for line in _tail(log, TAIL_LINES):
                _say(f"    {line}")
        _say("")
        _say(f"!!! failed: {step.title} (exit status {status}, {took:.1f} s)")
        _say(f"    command:    {' '.join(command)}")
        _say(f"    whole log:  {log}")
        _say(f"    what to do: {step.hint}")
        raise StepFailed(step.title)


def digest(parts: Iterable[str | Path]) -> str:
    """One hash over strings and the names and contents of files."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            total.update(str(part.relative_to(ROOT)).encode() + b"\0")
            total.update(hashlib.sha256(part.read_bytes()).digest())
        else:
            total.update(part.encode() + b"\0")
    return total.hexdigest()


def sources(*tops: str) -> Iterator[Path]:
    """Files of the project below the given files and folders ("." for all), ignored ones not."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *tops],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = sorted(set(listed.stdout.decode().split("\0")) - {""})
        yield from (ROOT / name for name in names if (ROOT / name).is_file())
        return
    for top in tops:  # an unpacked source archive
        path = ROOT / top
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (f for f in found if f.is_file() and not _is_output(f))


def _is_output(path: Path) -> bool:
    return bool({"build", ".venv", "__pycache__"} & set(path.relative_to(ROOT).parts))


def _heartbeat(stop: threading.Event, newest: list[bytes]) -> None:
    """Says every half minute that the command still runs, and what it said last."""
    began = time.monotonic()
    while not stop.wait(HEARTBEAT_SECONDS):
        last = newest[0].decode(errors="replace")[:80]
        _say(f"    {time.monotonic() - began:.0f} s: {last or 'still running'}")


def _tail(log: Path, lines: int) -> list[str]:
    text = log.read_text(errors="replace") if log.is_file() else ""
    return [line for line in text.splitlines() if line.strip()][-lines:]


def _closing_lines(log: Path) -> list[str]:
    """What pytest or ctest says at its end: how many tests passed and failed."""
    pattern = re.compile(r"\d+ (?:passed|failed)|tests (?:passed|failed)")
    return [line for line in _tail(log, TAIL_LINES) if pattern.search(line)]


def _say(text: str) -> None:
    print(text, flush=True)
