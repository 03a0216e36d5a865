"""`helicore kv`: looks into operation logs of the KV cache manager and runs them again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helicore.cli import options
from helicore.cli.console import EXIT_FAILED, note, print_json

if TYPE_CHECKING:
    from helicore.kv import OperationLog, ReplayReport

app = typer.Typer(no_args_is_help=True, help="Operation logs of the KV cache manager.")

LogFile = Annotated[
    Path, typer.Argument(help="What manager.start_recording(path) wrote.", show_default=False)
]


@app.command()
def show(
    file: LogFile,
    first: Annotated[int, typer.Option(help="First operation.", min=0)] = 0,
    count: Annotated[
        int | None, typer.Option(help="How many [default: all]", min=0, show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not cut long lists.")] = False,
    json: options.Json = False,
) -> None:
    """Prints the operations of a log with their results, one a line."""
    log = _load(file)
    last = len(log) if count is None else min(len(log), first + count)
    max_list = 1 << 40 if full else 12
    for index in range(first, last):
        text = log.describe(index, max_list)
        if json:
            print_json({"index": index, "operation": text})
        else:
            print(f"{index:6d}  {text}")
    summary = _summary(log)
    if json:
        print_json(summary)
    else:
        note(", ".join(f"{name}: {value}" for name, value in summary.items() if value != ""))


@app.command()
def replay(
    file: LogFile,
    check_every: Annotated[
        int, typer.Option(help="Check all invariants after every n-th operation; 0: never.", min=0)
    ] = 64,
    json: options.Json = False,
) -> None:
    """Runs a log again and tells the first difference; exit code 1 when there is one."""
    from helicore.kv import replay_operations

    log = _load(file)
    report = replay_operations(log, check_every=check_every)
    if json:
        print_json(_report(log, report))
    else:
        print(report)
    if report.difference is not None:
        raise typer.Exit(EXIT_FAILED)


def _load(file: Path) -> OperationLog:
    from helicore.kv import OperationLog

    if not file.is_file():
        raise FileNotFoundError(f"there is no file '{file}'")
    return OperationLog.load(str(file))


def _summary(log: OperationLog) -> dict[str, Any]:
    return {
        "num_operations": len(log),
        "end": log.end.name,
        "problem": log.problem,
        "is_anonymised": log.is_anonymised,
        "state_every": log.state_every,
        "tokens_per_block": log.config.tokens_per_block,
        "num_layers": len(log.config.layers),
    }


def _report(log: OperationLog, report: ReplayReport) -> dict[str, Any]:
    difference = report.difference
    return {
        "num_replayed": report.num_replayed,
        "difference": None
        if difference is None
        else {
            "index": difference.index,
            "operation": difference.operation,
            "what": difference.what,
        },
        "note": report.note,
        "log": _summary(log),
    }
