"""Starts the ranks of a model and gives the caller its engine."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import distributed

from helicore._core import NotSupportedError
from helicore._version import __version__
from helicore.config import (
    EngineConfig,
    FieldError,
    KVCacheConfig,
    ParallelConfig,
    SchedulerConfig,
)
from helicore.executor.engine import Engine
from helicore.executor.leading import LeadingEngine, follow
from helicore.models.loader import why_no_cuda
from helicore.parallel.ranks import Meeting, Ranks
from helicore.tokenizer import Tokenizer

_HOST = "127.0.0.1"
_SECONDS_TO_END = 10.0
_NOT_COMMON = frozenset({"num_threads"})


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """Where ranks find the tokenizer: stop strings are looked for on each."""

    folder: str | None
    trust_remote_code: bool = False

    def load(self) -> Tokenizer | None:
        if self.folder is None:
            return None
        return Tokenizer(Path(self.folder), trust_remote_code=self.trust_remote_code)


def make_engine(config: EngineConfig, tokenizer: TokenizerSpec) -> Engine:
    """An engine for the caller: alone, or the first of several ranks.

    Under `torchrun` the ranks are its processes: the first one returns, the others serve it within
    this call and raise SystemExit when it closes its engine. Else the others are started here.
    """
    if config.parallel.num_ranks == 1:
        return Engine(config)
    if config.device == "auto" and why_no_cuda() is None:
        raise NotSupportedError(
            "device='auto' is a GPU here, and this version runs ranks on CPUs; use device='cpu'"
        )
    config = dataclasses.replace(config, device="cpu")
    if distributed.is_torchelastic_launched():
        return _join_torchrun(config, tokenizer)
    workers = Workers(config, tokenizer)
    try:
        return _lead(config, workers.meeting, tokenizer, workers)
    except BaseException:
        workers.kill()
        raise


def _join_torchrun(config: EngineConfig, tokenizer: TokenizerSpec) -> Engine:
    store, rank, size = next(distributed.rendezvous("env://"))
    if size != config.parallel.num_ranks:
        raise FieldError(
            "tensor_parallel_size",
            f"tensor_parallel_size * context_parallel_size must be the {size} processes of "
            f"torchrun, got {config.parallel.tensor_parallel_size} * "
            f"{config.parallel.context_parallel_size}",
        )
    meeting = Meeting(
        distributed.PrefixStore("helicore", store), rank, size, config.parallel.start_timeout_s
    )
    if rank == 0:
        return _lead(config, meeting, tokenizer, None)
    serve_rank(config, meeting, tokenizer)
    raise SystemExit(0)


def _lead(
    config: EngineConfig, meeting: Meeting, tokenizer: TokenizerSpec, workers: Workers | None
) -> Engine:
    ranks = _meet(config, meeting, tokenizer)
    if workers is not None:
        ranks.at_close(workers.join)
    try:
        return LeadingEngine(config, ranks)
    except BaseException as error:
        ranks.abort(f"{type(error).__name__}: {error}")
        ranks.close()
        raise


def serve_rank(config: EngineConfig, meeting: Meeting, tokenizer: TokenizerSpec) -> None:
    """The life of a rank other than the first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first one
    ranks = _meet(config, meeting, tokenizer)
    try:
        engine = Engine(config, ranks=ranks)
    except BaseException as error:
        ranks.abort(f"{type(error).__name__}: {error}")
        ranks.close()
        raise
    follow(engine, ranks, tokenizer.load())


def _meet(config: EngineConfig, meeting: Meeting, tokenizer: TokenizerSpec) -> Ranks:
    facts = {k: v for k, v in flat_settings(config).items() if k not in _NOT_COMMON}
    meeting.agree({"version": __version__, "has_tokenizer": tokenizer.folder is not None} | facts)
    return Ranks.meet(meeting, config.parallel)


def flat_settings(config: EngineConfig) -> dict[str, Any]:
    """Every setting by its name, as JSON has it; the folder of a model is where a rank has it."""
    found: dict[str, Any] = {}
    for name, value in json.loads(to_json(config)).items():
        found |= value if isinstance(value, dict) else {name: value}
    found["model"] = Path(found["model"]).name
    return found


def to_json(config: EngineConfig) -> str:
    return json.dumps(dataclasses.asdict(config), default=str)


def from_json(text: str | bytes) -> EngineConfig:
    values = json.loads(text)
    parts = {"kv_cache": KVCacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}
    for name, part in parts.items():
        values[name] = part(**values[name])
    return EngineConfig(**values)


class Workers:
    """The processes of all ranks but the first, started through torch's elastic multiprocessing.

    They end by themselves: when the first rank closes its engine, or when they see that it died.
    """

    def __init__(self, config: EngineConfig, tokenizer: TokenizerSpec) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

        size = config.parallel.num_ranks
        timeout = datetime.timedelta(seconds=config.parallel.start_timeout_s)
        self._store = distributed.TCPStore(
            _HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        self._store.set("config", to_json(config))
        self._store.set("tokenizer", json.dumps(dataclasses.asdict(tokenizer)))
        self.meeting = Meeting(
            self._store, 0, size, config.parallel.start_timeout_s, self._check_alive
        )
        module, port = "helicore.executor.rank_process", str(self._store.port)
        arguments = {i: ("-m", module, port, str(i + 1), str(size)) for i in range(size - 1)}
        # Nothing is redirected into the folder for logs that the start asks for.
        with _signal_handlers_kept(), tempfile.TemporaryDirectory() as folder:
            self._processes = start_processes(
                name="helicore",
                entrypoint=sys.executable,
                args=arguments,
                envs={i: {"HELICORE_RANK": str(i + 1)} for i in range(size - 1)},
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
        self.pids = [int(pid) for pid in self._processes.pids().values()]

    def _check_alive(self) -> None:
        """RuntimeError naming a rank that has ended."""
        result = self._processes.wait(0)
        if result is None:
            return
        failed = sorted(result.failures)
        rank = failed[0] + 1 if failed else 1
        code = result.failures[failed[0]].exitcode if failed else 0
        raise RuntimeError(f"rank {rank} ended at its start with exit code {code}; see its output")

    def join(self) -> None:
        """After the engines are closed: waits for the processes, kills those that do not end."""
        self._processes.wait(_SECONDS_TO_END, 0.01)
        self.kill()

    def kill(self) -> None:
        self._processes.close(signal.SIGKILL, 5)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """torch puts its own handlers in place when it starts processes; the caller's stay here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    saved = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in saved.items():
            if handler is not None:
                signal.signal(number, handler)


def worker_main(port: int, rank: int, size: int) -> None:
    """The process of a rank that `Workers` started."""
    parent = os.getppid()

    def check_parent() -> None:
        if os.getppid() != parent:
            raise SystemExit(f"rank {rank}: the first rank has died")

    store = distributed.TCPStore(
        _HOST, port, is_master=False, timeout=datetime.timedelta(seconds=60)
    )
    config = from_json(store.get("config"))
    tokenizer = TokenizerSpec(**json.loads(store.get("tokenizer")))
    meeting = Meeting(store, rank, size, config.parallel.start_timeout_s, check_parent)
    serve_rank(config, meeting, tokenizer)
