"""Printing and exit codes, the same for every command.

Machines read standard output: with --json it carries JSON lines only, the result last. Progress and
errors go to standard error. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_LOG_WIDTH = 120


def print_json(value: object) -> None:
    """One line of strict JSON on standard output; NaN and infinities become null."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str)
    # A lone surrogate or a narrow terminal encoding must not end in a traceback.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on standard output; numbers are aligned to the right."""
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        numeric = all(isinstance(row[position], (int, float, NoneType)) for row in rows)
        justify: Literal["left", "right"] = "right" if numeric else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=position == 0)
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console = Console()
    console.print(table, width=None if console.is_terminal else max(console.width, _LOG_WIDTH))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def note(text: str) -> None:
    """A line for people, on standard error."""
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; its class when it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


class HelicoreGroup(TyperGroup):
    """The root command: takes --debug anywhere, and turns errors into one line and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta["helicore.debug"] = "--debug" in args[:end]
        kept = [arg for arg in args[:end] if arg != "--debug"]
        return super().parse_args(ctx, kept + args[end:])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:
            raise typer.Exit(EXIT_FAILED) from None
        except KeyboardInterrupt:
            note("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            # Usage errors carry their exit code; the framework shows them.
            if ctx.meta["helicore.debug"] or hasattr(error, "exit_code"):
                raise
            note(f"error: {one_line(error)}")
            raise typer.Exit(_exit_code(error)) from None


def _exit_code(error: Exception) -> int:
    from helicore import NotSupportedError

    asked_wrongly = (ValueError, FileNotFoundError, IsADirectoryError, PermissionError)
    bad_input = isinstance(error, (*asked_wrongly, NotSupportedError))
    return EXIT_BAD_INPUT if bad_input else EXIT_FAILED
