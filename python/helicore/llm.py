"""LLM: the offline entry point. Loads a model, generates, chats, closes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from helicore.checking import describe
from helicore.config import (
    EngineConfig,
    KVCacheConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from helicore.executor.interrupts import ProcessCheck
from helicore.generation import CompletionStream, EngineLike, RequestRunner, RequestState
from helicore.model_path import resolve_model
from helicore.outputs import RequestOutput
from helicore.prompts import PreparedRequest, Prompt, as_list, expand_params, prepare
from helicore.sampling_params import SamplingParams
from helicore.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from helicore.chat_template import Message
    from helicore.executor.counters import EngineCounters
    from helicore.executor.engine import Engine
    from helicore.models.config import ModelConfig


LEVEL_METRICS = (
    "hit_tokens",
    "offloaded_pages",
    "offloaded_bytes",
    "unwritten_pages",
    "onboarded_pages",
    "onboarded_bytes",
    "dropped_pages",
)
"""Counters of each level of the KV cache in LLM.metrics()."""


class LLM:
    """A loaded model that generates text. A context manager; `close()` frees everything.

    Args:
      model: "tiny" (bundled), a checkpoint folder, or a hub name found in the local cache.
      tokenizer: a folder or name to take the tokenizer from, when it is not the model's.
      dtype: of weights and activations: "auto" (the checkpoint's), "float32", "bfloat16".
      device: "auto", "cpu", "cuda".
      tensor_parallel_size, context_parallel_size: ranks that share the model.
      enable_expert_parallel: ranks have whole experts, not parts of each.
      max_model_len: tokens of prompt and output together; None: what model and cache allow.
      skip_tokenizer_init: load no tokenizer; prompts are token ids and `text` stays empty.
      trust_remote_code: allow a tokenizer that is code of the checkpoint.
      num_threads: CPU threads of the kernels and of torch; None: as they are.
      deterministic: a request's tokens do not depend on its batch.
      seed: makes requests without their own seed reproducible.
      kv_cache, scheduler, speculative: see their classes.

    Raises FileNotFoundError or ValueError that name the argument, file or field.
    Thread-safe: calls from several threads share the engine.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        max_model_len: int | None = None,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        num_threads: int | None = None,
        deterministic: bool = False,
        seed: int | None = None,
        kv_cache: KVCacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        path = resolve_model(model)
        config = EngineConfig(
            model=path,
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            max_model_len=max_model_len,
            num_threads=num_threads,
            deterministic=deterministic,
            seed=seed,
            kv_cache=_instance("kv_cache", kv_cache, KVCacheConfig),
            scheduler=_instance("scheduler", scheduler, SchedulerConfig),
            parallel=ParallelConfig(
                tensor_parallel_size=tensor_parallel_size,
                context_parallel_size=context_parallel_size,
                enable_expert_parallel=enable_expert_parallel,
            ),
            speculative=speculative,
        )
        for name, flag in (
            ("skip_tokenizer_init", skip_tokenizer_init),
            ("trust_remote_code", trust_remote_code),
        ):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be True or False, got {describe(flag)}")
        # torch and the native module are loaded from here on.
        from helicore.models.config import ModelConfig

        model_config = ModelConfig.from_dir(path)
        loaded, folder = None, None
        if not skip_tokenizer_init:
            folder = path if tokenizer is None else resolve_tokenizer(tokenizer)
            loaded = Tokenizer(folder, trust_remote_code=trust_remote_code)
        default = SamplingParams.from_generation_config(model_config.generation_defaults)
        from helicore.executor.launch import TokenizerSpec, make_engine

        spec = TokenizerSpec(None if folder is None else str(folder), trust_remote_code)
        self._setup(make_engine(config, spec), loaded, model_config, default, str(model))

    def _setup(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer | None,
        model_config: ModelConfig,
        default: SamplingParams,
        name: str,
    ) -> None:
        self._process = ProcessCheck()
        self.model = name
        self._engine: Any = engine
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._default = default
        self._runner: RequestRunner | None = RequestRunner(engine, tokenizer)

    # Life

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model and its cache. Safe to call again; any later use raises RuntimeError.

        While another thread generates, its step ends first; then its call raises RuntimeError.
        """
        runner, self._engine, self._runner = self._runner, None, None
        if runner is not None:
            runner.close()

    def __repr__(self) -> str:
        return f"LLM({self.model!r}{', closed' if self._runner is None else ''})"

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates from each prompt; outputs come in the order of the prompts.

        prompts: a string, {"prompt": str}, {"prompt_token_ids": [...]}, or a list of these. A dict
          may have "cache_salt": only prompts of equal salt share cached pages.
        sampling_params: one for all, one per prompt, or None for the model's own defaults.
        use_tqdm: show progress and tokens/s on standard error.
        priority: an integer for all, or one per prompt; smaller runs first.
        Raises ValueError naming prompt and field; nothing has run then.
        """
        runner = self._open_runner()
        requests = self._prepare(prompts, sampling_params, priority)
        return _run(runner, requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of conversations.

        messages: [{"role": "user", "content": "..."}, ...], or a list of such lists.
        chat_template: Jinja text, or the name of one of the checkpoint's templates.
        """
        runner = self._open_runner()
        _check_template_kwargs(chat_template_kwargs)
        prompts = self._render(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        return _run(runner, self._prepare(prompts, sampling_params, None), use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> CompletionStream:
        """Iterates over the text of one prompt's continuation as it appears (n must be 1).

        The iterator has `output`, the RequestOutput so far; dropping or closing it cancels.
        """
        runner = self._open_runner()
        return runner.stream(self._prepare([prompt], sampling_params, None)[0])

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
    ) -> CompletionStream:
        """Like `stream`, for the answer to one conversation."""
        (prompt,) = self._render(messages, chat_template=chat_template)
        return self.stream(prompt, sampling_params)

    def get_default_sampling_params(self) -> SamplingParams:
        """What generate() uses for sampling_params=None: the model's generation_config.json."""
        return self._default

    # Tokens and state

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, as generate() makes them."""
        return self.get_tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self.get_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; ValueError when skip_tokenizer_init left it out."""
        if self._tokenizer is None:
            raise ValueError("there is no tokenizer: skip_tokenizer_init=True left it out")
        return self._tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self._model_config

    @property
    def engine(self) -> Engine:
        """The engine itself, for counters and white-box tests."""
        self._open_runner()
        engine: Engine = self._engine
        return engine

    @property
    def counters(self) -> EngineCounters:
        """Totals and step times since the model was loaded, as a copy."""
        return self.engine.counters.snapshot()

    def metrics(self) -> dict[str, float]:
        """Counters and gauges under the names that servers of language models export."""
        counters = self.counters
        times = counters.times
        by_level = {
            f"kv_{field}_level{number}": float(getattr(level, field))
            for number, level in enumerate(counters.levels)
            for field in LEVEL_METRICS
        }
        return by_level | {
            "num_requests_running": counters.num_requests_running,
            "num_requests_waiting": counters.num_requests_waiting,
            "kv_cache_usage_perc": counters.kv_cache_usage,
            "prefix_cache_queries": counters.prefix_cache_queries,
            "prefix_cache_hits": counters.prefix_cache_hits,
            "prefix_cache_hits_disk": counters.prefix_cache_hits_disk,
            "disk_bytes_read": counters.disk_bytes_read,
            "disk_bytes_written": counters.disk_bytes_written,
            "prompt_tokens_total": counters.prompt_tokens,
            "generation_tokens_total": counters.generation_tokens,
            "num_preemptions_total": counters.preemptions,
            "num_suspends_total": counters.suspends,
            "num_resumes_total": counters.resumes,
            "num_lost_total": counters.lost,
            "num_forks_total": counters.forks,
            "request_success_total_stop": counters.finished_stop,
            "request_success_total_length": counters.finished_length,
            "request_abort_total": counters.finished_abort,
            "num_steps_total": counters.num_steps,
            "step_seconds_executor": times.executor,
            "step_seconds_forward": times.forward,
            "step_seconds_sample": times.sample,
            "step_seconds_detokenize": times.detokenize,
        }

    # Helpers

    def _open_runner(self) -> RequestRunner:
        if self._runner is None:
            raise RuntimeError(f"this LLM ({self.model}) is closed; make a new one")
        self._process.check()
        return self._runner

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
    ) -> list[PreparedRequest]:
        count = len(as_list(prompts)[0])
        return prepare(
            prompts,
            expand_params(sampling_params, self._default, count),
            tokenizer=self._tokenizer,
            priority=priority,
        )

    def _render(self, messages: Any, **options: Any) -> list[Prompt]:
        tokenizer = self.get_tokenizer()
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise ValueError(f"messages must be a list of messages, got {describe(messages)}")
        nested = bool(messages) and not isinstance(messages[0], (Mapping, str))
        prompts: list[Prompt] = []
        for position, conversation in enumerate(messages if nested else [messages]):
            try:
                text = tokenizer.apply_chat_template(conversation, **options)
            except ValueError as error:
                place = f"messages[{position}]: " if nested else ""
                raise ValueError(f"{place}{error}") from error
            try:
                ids = tokenizer.encode(text, add_special_tokens=False)
            except ValueError as error:
                place = f"messages[{position}]" if nested else "messages"
                raise ValueError(f"{place}: {error}") from error
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return prompts


def resolve_tokenizer(name: str | os.PathLike[str]) -> Path:
    """The folder of a tokenizer: any folder, or what `resolve_model` finds."""
    text = os.fspath(name) if isinstance(name, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise ValueError(f"tokenizer must be a folder or a name, got {describe(name)}")
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        return resolve_model(name)
    except (OSError, RuntimeError, ValueError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"tokenizer: {error!s:.400}") from error


_RESERVED = frozenset(
    {
        *("self", "messages", "conversation", "chat_template", "tools"),
        *("add_generation_prompt", "continue_final_message"),
    }
)


def _check_template_kwargs(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"chat_template_kwargs must be a mapping with names as keys, got {describe(value)}"
        )
    if reserved := sorted(_RESERVED & value.keys()):
        raise ValueError(
            f"chat_template_kwargs must not have {', '.join(reserved)}: chat() sets these itself"
        )


def _instance(field: str, value: Any, kind: type[Any]) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ValueError(f"{field} must be a {kind.__name__}, got {describe(value)}")
    return value


def _run(
    runner: RequestRunner, requests: list[PreparedRequest], use_tqdm: bool
) -> list[RequestOutput]:
    if not use_tqdm or not requests:
        return runner.run(requests, lambda states: None)
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    with tqdm(total=len(requests), desc="generate", unit="prompt", dynamic_ncols=True) as bar:
        outputs = runner.run(requests, _Progress(bar))
        bar.update(len(requests) - bar.n)
    return outputs


class _Progress:
    """Updates a tqdm bar at most ten times a second: looking at every request costs time."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._start = self._shown = time.monotonic()

    def __call__(self, states: Sequence[RequestState]) -> None:
        now = time.monotonic()
        if now - self._shown < 0.1 and not all(state.finished for state in states):
            return
        self._shown = now
        elapsed = max(now - self._start, 1e-9)
        num_in = sum(len(s.request.token_ids) for s in states if s.num_output_tokens)
        num_out = sum(state.num_output_tokens for state in states)
        self._bar.set_postfix_str(
            f"in {num_in / elapsed:,.0f} tok/s, out {num_out / elapsed:,.0f} tok/s", refresh=False
        )
        done = sum(state.finished for state in states)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()
