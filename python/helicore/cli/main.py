"""The `helicore` command: its sub-commands and global options."""

from __future__ import annotations

from typing import Annotated

import typer

from helicore._version import __version__
from helicore.cli import bench, chat, env, generate, kv, models
from helicore.cli.console import HelicoreGroup

app = typer.Typer(
    name="helicore",
    cls=HelicoreGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"helicore {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; works anywhere on the line.")
    ] = False,
) -> None:
    """Inference for latent-attention language models."""


app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.add_typer(bench.app, name="bench")
app.add_typer(kv.app, name="kv")
app.command("env")(env.env)
app.command("models")(models.models)
