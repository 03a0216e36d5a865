"""Options that several commands share, and what they build."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from helicore.cli.console import note

if TYPE_CHECKING:
    from helicore.llm import LLM
    from helicore.sampling_params import SamplingParams

_ENGINE = "Engine"
_SAMPLING = "Sampling"


def _engine(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_ENGINE, show_default=False)


def _sampling(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_SAMPLING, show_default=False)


Model: TypeAlias = Annotated[
    str,
    typer.Option("--model", "-m", help="'tiny' (bundled), a checkpoint folder, or a hub name."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Dtype: TypeAlias = Annotated[
    str, _engine("--dtype", help="auto, float32 or bfloat16 [default: auto]")
]
Device: TypeAlias = Annotated[str, _engine("--device", help="auto, cpu or cuda [default: auto]")]
Threads: TypeAlias = Annotated[
    int | None, _engine("--num-threads", "--threads", help="CPU threads [default: all cores]")
]
MaxModelLen: TypeAlias = Annotated[
    int | None, _engine("--max-model-len", help="Longest prompt and output together.")
]
BlockSize: TypeAlias = Annotated[
    int | None, _engine("--block-size", help="Tokens per cache page [default: 64]")
]
KVCacheDtype: TypeAlias = Annotated[
    str | None,
    _engine(
        "--kv-cache-dtype",
        help="auto, float32, bfloat16, fp8, fp8_ds_mla or nvfp4 [default: auto]",
    ),
]
HostGb: TypeAlias = Annotated[
    float | None, _engine("--host-gb", help="Host memory for the KV cache in GiB.")
]
SwapHostGb: TypeAlias = Annotated[
    float | None,
    _engine(
        "--swap-host-gb", help="Host memory in GiB for pages that the hot level has no room for."
    ),
]
SwapPath: TypeAlias = Annotated[
    str | None, _engine("--swap-path", help="Folder of swap files; with --swap-disk-gb.")
]
SwapDiskGb: TypeAlias = Annotated[
    float | None, _engine("--swap-disk-gb", help="Disk space in GiB below the levels in memory.")
]
DiskPath: TypeAlias = Annotated[
    str | None, _engine("--disk-path", help="Folder that keeps cached prefixes; with --disk-gb.")
]
DiskGb: TypeAlias = Annotated[
    float | None, _engine("--disk-gb", help="Disk space for cached prefixes in GiB.")
]
NoPrefixCaching: TypeAlias = Annotated[
    bool, _engine("--no-prefix-caching", help="Do not reuse cached prefixes between requests.")
]
Deterministic: TypeAlias = Annotated[
    bool, _engine("--deterministic", help="Tokens do not depend on the batch.")
]
TensorParallel: TypeAlias = Annotated[
    int,
    _engine(
        "--tensor-parallel-size",
        "--tp",
        help="Groups of ranks (processes) that split the heads [default: 1]",
    ),
]
ContextParallel: TypeAlias = Annotated[
    int,
    _engine(
        "--context-parallel-size",
        "--cp",
        help="Ranks of a group, which split the cached context [default: 1]",
    ),
]
ExpertParallel: TypeAlias = Annotated[
    bool,
    _engine("--expert-parallel", "--ep", help="Give each rank whole experts, not parts of each."),
]
TrustRemoteCode: TypeAlias = Annotated[
    bool, _engine("--trust-remote-code", help="Allow a tokenizer that is code of the checkpoint.")
]

MaxTokens: TypeAlias = Annotated[
    int | None, _sampling("--max-tokens", "-n", help="Tokens to generate at most [default: 128]")
]
Temperature: TypeAlias = Annotated[
    float | None, _sampling("--temperature", "-t", help="0 is greedy [default: the model's]")
]
TopP: TypeAlias = Annotated[float | None, _sampling("--top-p", help="[default: the model's]")]
TopK: TypeAlias = Annotated[
    int | None, _sampling("--top-k", help="0 is off [default: the model's]")
]
MinP: TypeAlias = Annotated[float | None, _sampling("--min-p", help="0 is off.")]
Seed: TypeAlias = Annotated[int | None, _sampling("--seed", help="Makes sampling reproducible.")]
Stop: TypeAlias = Annotated[
    list[str] | None, _sampling("--stop", help="End before this text; may be given several times.")
]


_SAMPLING_OPTIONS = (
    *("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop", "logprobs", "ignore_eos"),
)
_CACHE_OPTIONS = (
    *("block_size", "host_gb", "swap_host_gb", "swap_path", "swap_disk_gb"),
    *("disk_path", "disk_gb", "kv_cache_dtype"),
)
_ENGINE_OPTIONS = (
    *("dtype", "device", "num_threads", "max_model_len", "deterministic", "trust_remote_code"),
    *("tensor_parallel_size", "context_parallel_size", "enable_expert_parallel"),
    *_CACHE_OPTIONS,
    "no_prefix_caching",
)


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a command's arguments that `load_llm` takes."""
    return {name: given[name] for name in _ENGINE_OPTIONS if name in given}


class Sampling:
    """The sampling options of a command, checked before a model is loaded. None: not given."""

    def __init__(self, **given: Any) -> None:
        from helicore.sampling_params import SamplingParams

        self._given = {name: value for name, value in given.items() if value is not None}
        self._given.setdefault("max_tokens", 128)
        SamplingParams(**self._given)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Sampling:
        """From a command's arguments; an empty list or a flag that is off is not given."""
        values = {name: given[name] for name in _SAMPLING_OPTIONS if name in given}
        return cls(**{k: None if v is False or v == [] else v for k, v in values.items()})

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with the given options in their place."""
        from dataclasses import replace

        return replace(defaults, **self._given)


def load_llm(
    model: str, *, no_prefix_caching: bool = False, quiet: bool = False, **arguments: Any
) -> LLM:
    """Loads a model, with a line about it on standard error.

    `arguments`: of `LLM`, and fields of `KVCacheConfig`, of which None is not given. The dtype of
    the cache is `kv_cache_dtype` among them.
    """
    from helicore.config import KVCacheConfig

    given = {name: arguments.pop(name, None) for name in _CACHE_OPTIONS}
    given["dtype"] = given.pop("kv_cache_dtype")
    cache: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    cache["enable_prefix_caching"] = not no_prefix_caching
    with _status(f"loading {model}", quiet), plain_warnings():
        from helicore.llm import LLM

        return LLM(model, kv_cache=KVCacheConfig(**cache), **arguments)


@contextlib.contextmanager
def _status(text: str, quiet: bool) -> Iterator[None]:
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows warnings as one line without source code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest: note(f"warning: {message}")
        yield
