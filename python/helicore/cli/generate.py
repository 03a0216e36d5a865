"""`helicore generate`: text from prompts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helicore.cli import options
from helicore.cli.console import note, print_json

if TYPE_CHECKING:
    from helicore.llm import LLM
    from helicore.outputs import RequestOutput
    from helicore.sampling_params import SamplingParams


def generate(
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="A prompt; may be given several times; '-': stdin."),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option("--prompt-file", help="A file that holds one prompt.")
    ] = None,
    token_ids: Annotated[
        list[str] | None, typer.Option("--token-ids", help="A prompt as ids, such as 0,17,5.")
    ] = None,
    model: options.Model = "tiny",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    n: Annotated[int, typer.Option("--n", "--num-sequences", help="Continuations per prompt.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Report this many best tokens (with --json).")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the sequence.")
    ] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    num_threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = None,
    kv_cache_dtype: options.KVCacheDtype = None,
    host_gb: options.HostGb = None,
    swap_host_gb: options.SwapHostGb = None,
    swap_path: options.SwapPath = None,
    swap_disk_gb: options.SwapDiskGb = None,
    disk_path: options.DiskPath = None,
    disk_gb: options.DiskGb = None,
    no_prefix_caching: options.NoPrefixCaching = False,
    deterministic: options.Deterministic = False,
    tensor_parallel_size: options.TensorParallel = 1,
    context_parallel_size: options.ContextParallel = 1,
    enable_expert_parallel: options.ExpertParallel = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Continues prompts: `helicore generate --prompt "def f(" --max-tokens 32 --json`"""
    given = dict(locals())
    if logprobs is not None and not json:
        raise ValueError("--logprobs needs --json: text has no place for log-probabilities")
    sampling = options.Sampling.of(given)
    prompts = read_prompts(prompt, prompt_file, token_ids)
    with options.load_llm(model, quiet=json, **options.engine_options(given)) as llm:
        params = sampling.over(llm.get_default_sampling_params())
        if len(prompts) == 1 and n == 1 and not json:
            _stream(llm, prompts[0], params)
        else:
            _answer_all(llm, model, prompts, params, json)


def _answer_all(
    llm: LLM, model: str, prompts: list[Any], params: SamplingParams, json: bool
) -> None:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=not json)
    seconds = time.perf_counter() - start
    if json:
        print_json({"model": model, **summary(outputs, seconds)})
    else:
        _print_outputs(outputs)
        note(speed_line(outputs, seconds))


def read_prompts(
    prompts: list[str] | None, files: list[Path] | None, token_ids: list[str] | None
) -> list[Any]:
    """Prompts in the order text, files, ids; '-' is standard input."""
    found: list[Any] = [sys.stdin.read() if text == "-" else text for text in prompts or []]
    for path in files or []:
        try:
            found.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file {path} must be UTF-8 text: {error}") from error
    for text in token_ids or []:
        try:
            ids = [int(item) for item in text.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"--token-ids must be integers such as 0,17,5, got {text!r}") from None
        found.append({"prompt_token_ids": ids})
    if not found:
        raise ValueError("--prompt, --prompt-file or --token-ids is needed")
    return found


def summary(outputs: list[RequestOutput], seconds: float) -> dict[str, Any]:
    """What --json prints: outputs, token counts, speed."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    return {
        "outputs": [output.to_dict() for output in outputs],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        },
        "seconds": seconds,
        "tokens_per_second": num_output / seconds if seconds > 0 else None,
    }


def speed_line(outputs: list[RequestOutput], seconds: float) -> str:
    totals = summary(outputs, seconds)
    usage = totals["usage"]
    first = [o.metrics.time_to_first_token for o in outputs if o.metrics is not None]
    ttft = min((t for t in first if t is not None), default=None)
    start = "" if ttft is None else f", first token after {ttft * 1e3:.1f} ms"
    return (
        f"{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} generated in "
        f"{seconds:.2f} s: {totals['tokens_per_second'] or 0:,.1f} tokens/s{start}"
    )


def _stream(llm: LLM, prompt: Any, params: SamplingParams) -> None:
    start = time.perf_counter()
    with llm.stream(prompt, params) as stream:
        sys.stdout.write(stream.output.prompt or "")
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        output = stream.output
    sys.stdout.write("\n")
    sys.stdout.flush()
    note(speed_line([output], time.perf_counter() - start))


def _print_outputs(outputs: list[RequestOutput]) -> None:
    for number, output in enumerate(outputs, start=1):
        for completion in output.outputs:
            which = f".{completion.index + 1}" if len(output.outputs) > 1 else ""
            print(f"--- {number}{which} ({completion.finish_reason})")
            print(f"{output.prompt or ''}{completion.text}")
