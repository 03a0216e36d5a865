"""`helicore bench`: every benchmark has one command here and one function in helicore.bench."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from helicore.cli import options
from helicore.cli.console import EXIT_FAILED, note, print_json, print_table

if TYPE_CHECKING:
    from helicore.bench.report import Report
    from helicore.bench.throughput import Row

app = typer.Typer(no_args_is_help=True, help="Measures speed; --json prints results last.")

Out: TypeAlias = Annotated[
    Path | None, typer.Option("--out", help="Also write the results as a file into this folder.")
]
Rows: TypeAlias = Annotated[
    list[str] | None, typer.Option("--row", help="Only this row; may be given several times.")
]
Rounds: TypeAlias = Annotated[int, typer.Option("--rounds", min=1, help="Repetitions; medians.")]


@app.command("throughput")
def throughput(
    model: options.Model = "tiny",
    vs: Annotated[
        str, typer.Option("--vs", help="The peer in the same run: transformers or none.")
    ] = "none",
    rows: Rows = None,
    rounds: Rounds = 3,
    refcheck: Annotated[
        bool, typer.Option("--refcheck", help="Also compare greedy tokens with the peer.")
    ] = False,
    dtype: options.Dtype = "auto",
    num_threads: options.Threads = None,
    json: options.Json = False,
    out: Out = None,
) -> None:
    """Decode tokens/s and time to first token, ours and a peer's."""
    from helicore.bench import throughput as bench

    if vs not in ("none", "transformers"):
        raise ValueError(f"--vs must be transformers or none, got {vs!r}")
    if refcheck and vs == "none":
        raise ValueError("--refcheck needs a peer: --vs transformers")
    chosen = _choose_rows(rows, {row.name: row for row in bench.ROWS})
    with (
        options.load_llm(
            model, quiet=json, no_prefix_caching=True, dtype=dtype, num_threads=num_threads
        ) as llm,
        _progress(json) as progress,
    ):
        peer = None
        if vs == "transformers":
            from helicore.bench.transformers_peer import TransformersPeer
            from helicore.model_path import resolve_model

            peer = TransformersPeer(resolve_model(model), bench.dtype_name(llm))
        report = bench.run(llm, peer=peer, rounds=rounds, rows=chosen, progress=progress)
        if refcheck and peer is not None:
            progress("refcheck")
            results, failures = bench.refcheck(llm, peer, rows=chosen)
            report.results += results
            report.failures += failures
    _finish(report, json, out)


@app.command("latency")
def latency(
    model: options.Model = "tiny",
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="New tokens.")] = 128,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Requests at once.")] = 1,
    rounds: Rounds = 5,
    dtype: options.Dtype = "auto",
    num_threads: options.Threads = None,
    json: options.Json = False,
    out: Out = None,
) -> None:
    """First token, time between tokens, and the executor's work per step."""
    from helicore.bench import latency as bench

    config = bench.LatencyConfig(input_len, output_len, batch_size, rounds)
    with (
        options.load_llm(
            model, quiet=json, no_prefix_caching=True, dtype=dtype, num_threads=num_threads
        ) as llm,
        _progress(json) as progress,
    ):
        report = bench.run(llm, config, progress)
    _finish(report, json, out)


@app.command("mla")
def mla(
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    rounds: Rounds = 5,
    num_threads: options.Threads = None,
    json: options.Json = False,
    out: Out = None,
) -> None:
    """Absorbed decode over paged latents, beside the same attention in torch."""
    from helicore import ops
    from helicore.bench import mla as bench

    if num_threads is not None:
        ops.set_num_threads(num_threads)
    with _progress(json) as progress:
        report = bench.run(device, rounds, progress)
    _finish(report, json, out)


@app.command("allreduce")
def allreduce(
    ranks: Annotated[
        list[int] | None,
        typer.Option("--ranks", min=2, max=64, help="Processes [default: 2 and 4]; several times."),
    ] = None,
    calls: Annotated[int, typer.Option("--calls", min=1, help="Calls of each; medians.")] = 200,
    device: Annotated[
        str, typer.Option("--device", help="cpu: processes. cuda: streams of one GPU.")
    ] = "cpu",
    json: options.Json = False,
    out: Out = None,
) -> None:
    """Calls between ranks: processes beside gloo, or streams of a GPU, fused beside one by one."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"must be cpu or cuda, got {device!r}", param_hint="--device")
    if device == "cuda":
        from helicore.bench import allreduce_cuda

        report = allreduce_cuda.run(tuple(ranks or (2, 4, 8)))
    else:
        from helicore.bench import allreduce as bench

        report = bench.run(tuple(ranks or (2, 4)), calls)
    _finish(report, json, out)


@app.command("kv")
def kv(
    peers: Annotated[
        Path | None,
        typer.Option("--peers", help="Folder that benchmarks/peers/install.py filled."),
    ] = None,
    cpp_bench: Annotated[
        Path | None, typer.Option("--cpp-bench", help="The binary kv_bench, for the C++ rows.")
    ] = None,
    disk: Annotated[
        Path | None, typer.Option("--disk", help="Folder on the disk to measure, for its rows.")
    ] = None,
    rows: Rows = None,
    rounds: Rounds = 5,
    check: Annotated[
        bool, typer.Option("--check", help="Fail when a row misses its required bound.")
    ] = False,
    json: options.Json = False,
    out: Out = None,
) -> None:
    """Host cost of the KV cache manager beside other managers, memory, disk."""
    from helicore.bench import kv as bench

    config = bench.KVBenchConfig(
        rounds=rounds, peers=peers, cpp_bench=cpp_bench, disk=disk, rows=tuple(rows or ())
    )
    with _progress(json) as progress:
        report = bench.run(config, progress)
    if check:
        report.failures += bench.missed(report)
    _finish(report, json, out)


def _choose_rows(names: list[str] | None, known: dict[str, Row]) -> list[Row]:
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise ValueError(f"--row must be one of {', '.join(known)}, got {unknown[0]!r}")
    return [row for name, row in known.items() if not names or name in names]


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Says on standard error what is being measured: a status line, or lines in a log."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield (lambda text: None) if quiet else note
        return
    with console.status("starting") as status:
        yield status.update


def _finish(report: Report, json: bool, out: Path | None) -> None:
    from helicore.bench.report import COLUMNS

    if out is not None:
        path = report.write(out)
        note(f"wrote {path}")
    for failure in report.failures:
        note(f"check failed: {failure}")
    if json:
        print_json(report.to_dict())
    else:
        print_table(f"bench {report.bench}", COLUMNS, report.rows())
        env = report.env
        note(f"{env['cpu']}, {env['threads']} threads, {env['isa']}, commit {env['commit']}")
    load, cores = report.env.get("load_average"), report.env.get("cores")
    if load is not None and cores is not None and load > cores:
        note(
            f"warning: {load} processes on {cores} cores: the machine is busy, figures are not fair"
        )
    if report.failures:
        raise typer.Exit(EXIT_FAILED)
