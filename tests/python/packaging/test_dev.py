"""The driver behind the Makefile: remembered steps, clear failures, system packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import steps
import system
from steps import Runner, Step, StepFailed


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def counting(path: Path) -> list[str]:
    """A command that appends one line to a file each time it runs."""
    return python(f"open({str(path)!r}, 'a').write('ran\\n'); print('1 passed')")


def times(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_step_with_the_same_inputs_is_not_run_again(tmp_path: Path) -> None:
    step = Step("Count", [counting(tmp_path / "n")], "", key="a")
    for _ in range(3):
        Runner(state=tmp_path / "state").run(step)
    assert times(tmp_path / "n") == 1


def test_changed_inputs_and_force_run_it_again(tmp_path: Path) -> None:
    command = counting(tmp_path / "n")
    Runner(state=tmp_path / "state").run(Step("Count", [command], "", key="a"))
    Runner(state=tmp_path / "state").run(Step("Count", [command], "", key="b"))
    Runner(state=tmp_path / "state", force=True).run(Step("Count", [command], "", key="b"))
    assert times(tmp_path / "n") == 3


def test_a_step_without_a_key_runs_every_time(tmp_path: Path) -> None:
    for _ in range(2):
        Runner(state=tmp_path / "state").run(Step("Count", [counting(tmp_path / "n")], ""))
    assert times(tmp_path / "n") == 2


def test_a_failure_names_the_step_the_log_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = python("print('the reason'); raise SystemExit(3)")
    with pytest.raises(StepFailed):
        Runner(state=tmp_path).run(Step("Build it", [command], "read the manual", key="k"))
    out = capsys.readouterr().out
    assert "failed: Build it (exit status 3" in out
    assert "\n    the reason\n" in out
    assert "what to do: read the manual" in out
    assert str(tmp_path / "build-it.log") in out


def test_a_failure_forgets_an_earlier_success(tmp_path: Path) -> None:
    good = Step("Count", [counting(tmp_path / "n")], "", key="a")
    Runner(state=tmp_path / "state").run(good)
    with pytest.raises(StepFailed):
        bad = Step("Count", [python("raise SystemExit(1)")], "", key="b")
        Runner(state=tmp_path / "state").run(bad)
    Runner(state=tmp_path / "state").run(good)
    assert times(tmp_path / "n") == 2


def test_the_first_failing_command_ends_the_step(tmp_path: Path) -> None:
    commands = [python("raise SystemExit(1)"), counting(tmp_path / "n")]
    with pytest.raises(StepFailed):
        Runner(state=tmp_path / "state").run(Step("Two", commands, ""))
    assert times(tmp_path / "n") == 0


def test_run_all_goes_on_after_a_failure_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps_ = [
        Step("Bad", [python("raise SystemExit(1)")], ""),
        Step("Good", [counting(tmp_path / "n")], ""),
    ]
    with pytest.raises(StepFailed):
        Runner(state=tmp_path / "state").run_all(steps_)
    assert times(tmp_path / "n") == 1
    assert "!!! failed: Bad" in capsys.readouterr().out.splitlines()[-1]


def test_a_missing_program_is_a_failure_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StepFailed):
        Runner(state=tmp_path).run(Step("Gone", [["no-such-program-here"]], "install it"))
    assert "no-such-program-here" in capsys.readouterr().out


def test_a_remembered_test_step_shows_its_closing_line_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Step("T", [counting(tmp_path / "n")], "", key="a", is_test=True)
    Runner(state=tmp_path / "state").run(step)
    capsys.readouterr()
    Runner(state=tmp_path / "state").run(step)
    out = capsys.readouterr().out
    assert "1 passed" in out
    assert "FORCE=1" in out


def test_digest_depends_on_names_and_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    one, two = steps.digest([tmp_path / "a"]), steps.digest([tmp_path / "b"])
    (tmp_path / "a").write_text("2")
    assert len({one, two, steps.digest([tmp_path / "a"])}) == 3


MISSING = [
    system.Need("a compiler", False, ("g++",)),
    system.Need("git", True, ("git",)),
    system.Need("GoogleTest", False, ("libgtest-dev", "libgmock-dev")),
]


class RecordingRunner:
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def run(self, step: Step) -> None:
        self.steps.append(step)


def test_without_root_the_exact_line_is_printed_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system, "needs", lambda *, tests: MISSING)
    monkeypatch.setattr(system.os, "geteuid", lambda: 1000)
    runner = RecordingRunner()
    with pytest.raises(StepFailed):
        system.ensure(runner, tests=True)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "lacks: a compiler, GoogleTest" in out
    assert (
        "sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends "
        "g++ libgmock-dev libgtest-dev'" in out
    )
    assert runner.steps == []


def test_root_installs_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [MISSING, [system.Need("a compiler", True, ("g++",))]]
    monkeypatch.setattr(system, "needs", lambda *, tests: answers.pop(0))
    monkeypatch.setattr(system.os, "geteuid", lambda: 0)
    monkeypatch.setattr(system.shutil, "which", lambda name: f"/usr/bin/{name}")
    runner = RecordingRunner()
    system.ensure(runner, tests=True)  # type: ignore[arg-type]
    assert len(runner.steps) == 1
    assert runner.steps[0].commands[0][2].endswith("g++ libgmock-dev libgtest-dev")


def test_an_old_python_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system, "MINIMUM_PYTHON", (99, 0))
    with pytest.raises(StepFailed):
        system.ensure(RecordingRunner(), tests=False)  # type: ignore[arg-type]
    assert "make demo PYTHON=" in capsys.readouterr().out
