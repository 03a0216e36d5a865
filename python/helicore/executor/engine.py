"""The engine: requests in, updates out, one step at a time.

add_request -> [waiting] -> step(): schedule, run, post-process -> SequenceUpdate
"""

from __future__ import annotations

import logging
import os
import secrets
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from helicore import ops
from helicore.config import EngineConfig, FieldError
from helicore.executor.admission import ModelLimits, make_request
from helicore.executor.batch import BatchBuilder, StepInputs, absorbed_rule
from helicore.executor.counters import EngineCounters, Stopwatch
from helicore.executor.cuda_runner import CudaRunner
from helicore.executor.detokenizer import Detokenizer
from helicore.executor.device import choose_device
from helicore.executor.disk_prefix import DiskConfig
from helicore.executor.disk_stamp import checkpoint_digest, make_stamp, model_digest
from helicore.executor.interrupts import INTERRUPTS, ProcessCheck, StateChange
from helicore.executor.kv_pool import KVPool
from helicore.executor.lanes import Lanes
from helicore.executor.pool_shape import PoolShape, host_bytes
from helicore.executor.postprocess import PostProcessor
from helicore.executor.runner import Runner
from helicore.executor.sampler import Sampled, Sampler
from helicore.executor.scheduler import Scheduler
from helicore.executor.sequence import Phase, Request
from helicore.executor.sequence import Sequence as Output
from helicore.executor.steps import Step
from helicore.executor.updates import SequenceUpdate
from helicore.kv import ReuseScope
from helicore.model_path import resolve_model
from helicore.models.base import CausalLM
from helicore.models.loader import load_model
from helicore.parallel.ranks import CommError, Ranks
from helicore.parallel.shards import Shards
from helicore.sampling_params import SamplingParams

_LOGGER = logging.getLogger("helicore")
_MAX_PROMPT_LOGIT_BYTES = 256 << 20


class Engine:
    """Serves requests of one model. One thread drives it; nothing here blocks but `step`.

    A failed add_request leaves the engine as it was. An error that one request causes inside a
    step ends that request with finish_reason "abort" and an `error`; the others go on. SIGINT is
    held back while the state changes. What still breaks a change in the middle stops the engine:
    from then on all but `abort` and `close` raises RuntimeError.
    """

    counters: EngineCounters
    """Live; `counters.snapshot()` is a copy that stays."""

    def __init__(
        self, config: EngineConfig, *, model: CausalLM | None = None, ranks: Ranks | None = None
    ) -> None:
        """Loads the model (unless one is given) and takes the memory of the KV cache.

        ranks: the others that run the same model, each its part; they are to make the same calls.
        """
        device = choose_device(config, is_loaded=model is None)
        # Before a model is loaded in vain.
        host_bytes(config.kv_cache.host_gb, 1 if ranks is None else ranks.num_local)
        _set_threads(config.num_threads, ranks)
        self.config = config
        shards = Shards() if ranks is None else ranks.shards(config.kv_cache.block_size)
        is_given, model = model is not None, model or load(config, device, shards)
        shape = PoolShape.fit(config, model, device, ranks)
        disk = disk_config(config, model, shape, is_loaded=not is_given)
        self.limits = _limits_of(config, model, shape)
        self.counters = EngineCounters()
        self._lanes = Lanes(
            config.scheduler.max_num_seqs, shape.max_model_len, self.limits.vocab_size
        )
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = KVPool(
            shape, disk, None if stream is None else stream.cuda_stream, ranks is not None
        )
        self.counters.levels = self._pool.level_counters()
        _log_room(shape, self._pool)
        self._scheduler = Scheduler(
            config.scheduler,
            self._lanes,
            self._pool,
            self.counters,
            max(1, _MAX_PROMPT_LOGIT_BYTES // (4 * self.limits.vocab_size)),
        )
        self._batch = _make_builder(config, model, shape, self._lanes, self._pool, shards)
        self._runner = make_runner(config, model, shape, self._pool, stream)
        self._sampler = Sampler(self._lanes)
        self._post = PostProcessor(self._lanes, self._scheduler, self.counters)
        self._watch = Stopwatch(self.counters.times)
        self._ranks = ranks
        self._requests: dict[str, Request] = {}
        self._pending: list[SequenceUpdate] = []
        self._late_aborts: list[str] = []
        self._num_arrivals = 0
        self._is_closed = self._is_stepping = False
        self._change = StateChange("engine")
        self._process = ProcessCheck()
        self._rng = np.random.default_rng(config.seed)  # None: seeded by the system
        self._private_salt = secrets.token_hex(8)
        # A program that ends without close() still gives the memory back before the interpreter
        # takes the native module down.
        weakref.finalize(self, _close_if_alive, weakref.ref(self))

    @property
    def model(self) -> CausalLM:
        return self._runner.model

    # --- requests ----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.int32],
        params: SamplingParams,
        *,
        priority: int = 0,
        reuse_scope: ReuseScope | None = None,
        detokenizer_factory: Callable[[], Detokenizer] | None = None,
    ) -> None:
        """Queues a request; ValueError naming the field where it can never be served.

        Smaller priorities run first. `reuse_scope` separates prefix caches (tenants, adapters).
        `detokenizer_factory` is needed for stop strings and called once per sequence.
        """
        self._check_usable()
        if isinstance(request_id, str) and request_id in self._requests:
            raise FieldError("request_id", f"request_id {request_id!r} is already in use")
        request = make_request(
            request_id,
            prompt_token_ids,
            params,
            self.limits,
            priority=priority,
            arrival=self._num_arrivals,
            scope=reuse_scope,
            detokenizer_factory=detokenizer_factory,
        )
        if not self.config.kv_cache.enable_prefix_caching:
            # A scope of its own: siblings and recomputation still share, nobody else matches.
            salt = f"{self._private_salt}-{request.arrival}"
            request.scope = ReuseScope(None, salt)
        self._add_sequences(request)
        self._accept(request, reuse_scope)

    def _accept(self, request: Request, scope: ReuseScope | None) -> None:
        """Takes in a request that was checked; `scope` as the caller gave it."""
        with INTERRUPTS, self._change:
            self._num_arrivals += 1
            self._requests[request.request_id] = request
            self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; its last updates come with the next step. Unknown ids are ignored."""
        if not isinstance(request_id, str) or request_id not in self._requests:
            return
        if self._change.failed:
            return
        if self._is_stepping or self._change.is_open:
            # The garbage collector may drop a stream anywhere, in the middle of a step as well.
            self._late_aborts.append(request_id)
            return
        with INTERRUPTS, self._change:
            request = self._requests.pop(request_id)
            for sequence in request.sequences:
                if sequence.phase is not Phase.DONE:
                    self._pending.append(self._post.abort(sequence))

    def has_unfinished(self) -> bool:
        """True while `step` has something to do or to report."""
        self._change.check()
        return bool(self._requests or self._pending)

    # --- the step ----------------------------------------------------------------------------

    def step(self) -> list[SequenceUpdate]:
        """Schedules, runs and post-processes one step; what happened, in no particular order.

        Updates that an interrupt kept from being returned come with the next step.
        """
        self._check_usable()
        updates: list[SequenceUpdate] = []
        try:
            with INTERRUPTS:
                self._abort_late()
                self._is_stepping = True
                updates = self._step()
                self._is_stepping = False
            return updates
        except BaseException:
            self._is_stepping = False
            self._pending[:0] = updates
            raise

    def _abort_late(self) -> None:
        while self._late_aborts:
            self.abort(self._late_aborts.pop())

    def _step(self) -> list[SequenceUpdate]:
        self._watch.restart()
        with self._change:
            step = self._scheduler.schedule()
        self._watch.mark("schedule")
        if not step.empty:
            self._run(step)
        with self._change:
            self._pool.maintain()
            self._update_gauges()
            self._watch.mark("postprocess")
            updates, self._pending = self._pending, []
            return updates

    def _run(self, step: Step) -> None:
        """Computes outside of any state change: what goes wrong here can be tried again."""
        try:
            computed = self._compute(step)
        except CommError as error:
            self._stop_all(error)
        except Exception as error:
            if self._ranks is not None:
                self._stop_all(error)
            self._batch.forget()
            self._note_failed_step()
            self._run_one_by_one(step)
        except BaseException:
            self._batch.forget()
            raise
        else:
            self._finish(step, *computed)

    def _stop_all(self, error: BaseException) -> NoReturn:
        """Ranks are no longer in step: no part of it can be tried again."""
        assert self._ranks is not None
        self._batch.forget()
        self._ranks.abort(f"{type(error).__name__}: {error}")
        with self._change:
            raise error

    def _compute(self, step: Step) -> tuple[StepInputs, Sampled]:
        """The part of a step that can fail: it changes cache rows, but no sequence."""
        inputs = self._batch.build(step)
        self._watch.mark("prepare")
        with self._runner.active():
            logits = self._runner.run(inputs.forward)
            self._watch.mark("forward")
            sampled = self._sampler.sample(inputs, logits)
            self._watch.mark("sample")
        return inputs, sampled

    def _finish(self, step: Step, inputs: StepInputs, sampled: Sampled) -> None:
        """Sequences take in what was computed; those that ended leave."""
        with self._change:
            self._scheduler.advance(step)
            self._pending += self._post.run(inputs.sampled, sampled)
            self._forget_finished()

    def _run_one_by_one(self, step: Step) -> None:
        """After a step failed: each sequence alone, so that only those at fault are aborted."""
        for sequence, part in list(step.split(self._lanes)):
            try:
                computed = self._compute(part)
            except Exception as error:
                self._batch.forget()
                with self._change:
                    message = f"{type(error).__name__}: {error}"
                    self._pending.append(self._post.abort(sequence, message))
                    self._forget_finished()
            else:
                self._finish(part, *computed)

    def _forget_finished(self) -> None:
        for request_id in self._post.take_finished():
            self._requests.pop(request_id, None)

    def _note_failed_step(self) -> None:
        self.counters.failed_steps += 1
        if self.counters.failed_steps == 1:
            _LOGGER.warning(
                "a step failed and is repeated one sequence at a time (said once; the counter "
                "failed_steps goes on)",
                exc_info=True,
            )

    # --- the rest ----------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all requests and gives the cache memory back. The engine is not usable after."""
        if self._process.is_child:
            # The native threads are not here; the memory goes with the process.
            self._is_closed = True
            return
        if self._is_stepping:
            raise RuntimeError("the engine cannot be closed in the middle of its own step")
        with INTERRUPTS:
            for request_id in list(self._requests):
                self.abort(request_id)
            self._requests.clear()
            self._pending.clear()
            self._is_closed = True
            self._runner.close()
            self._pool.close()

    def _check_usable(self) -> None:
        self._process.check()
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        if self._is_stepping:
            raise RuntimeError("the engine is in the middle of a step; it takes one call at a time")
        self._change.check()

    def state_digest(self) -> int:
        """Of what was decided so far: equal on ranks that made the same decisions."""
        lanes = self._lanes
        digest = zlib.crc32(lanes.num_tokens.tobytes())
        digest = zlib.crc32(lanes.num_computed.tobytes(), digest)
        for lane, sequence in enumerate(lanes.sequences):
            if sequence is not None:
                tokens = lanes.tokens[lane, : lanes.num_tokens[lane]]
                digest = zlib.crc32(tokens.tobytes(), digest)
        facts = (self._scheduler.num_waiting, self._pool.available_pages(), len(self._requests))
        return zlib.crc32(repr(facts).encode(), digest)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False (and no effect) while sequences hold pages."""
        self._check_usable()
        if self._scheduler.num_running or self._pool.num_parked:
            return False
        with INTERRUPTS, self._change:
            self._pool.clear()
        return True

    def _add_sequences(self, request: Request) -> None:
        params = request.params
        base = self._rng.integers(0, 2**63) if params.seed is None else params.seed
        for index in range(params.n):
            seed = _derived_seed(int(base), index)
            sequence = Output(request, index, seed, request.prompt)
            if request.detokenizer_factory is not None:
                sequence.detokenizer = request.detokenizer_factory()
            if params.prompt_logprobs is not None and index == 0:
                sequence.prompt_logprobs = [None]
            request.sequences.append(sequence)
        request.num_unfinished = params.n

    def _update_gauges(self) -> None:
        counters = self.counters
        counters.num_steps += 1
        counters.num_requests_running = self._scheduler.num_running
        counters.num_requests_waiting = self._scheduler.num_waiting
        counters.kv_pages_total = self._pool.num_pages
        counters.kv_pages_in_use = self._pool.num_pages - self._pool.available_pages()
        self._pool.count_moves(counters.levels)
        disk = self._pool.disk
        if disk is not None:
            disk.pump()
            counters.prefix_cache_hits_disk = disk.hit_tokens
            counters.disk_bytes_read = disk.bytes_read
            counters.disk_bytes_written = disk.bytes_written


def _derived_seed(base: int, index: int) -> int:
    """The seed of one of n sequences; that of the first one is its request's."""
    if index == 0:
        return base
    return int(np.random.SeedSequence([base, index]).generate_state(1, np.uint64)[0] >> 1)


def load(config: EngineConfig, device: torch.device, shards: Shards | None = None) -> CausalLM:
    """The model that `config` names, or a rank's part of it."""
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    return load_model(
        resolve_model(config.model),
        dtype=dtype,
        device=device,
        max_model_len=config.max_model_len,
        shards=shards,
    )


def _limits_of(config: EngineConfig, model: CausalLM, shape: PoolShape) -> ModelLimits:
    return ModelLimits(
        vocab_size=model.config.vocab_size,
        max_model_len=shape.max_model_len,
        max_model_len_source=shape.max_model_len_source,
        max_num_seqs=config.scheduler.max_num_seqs,
        eos_token_ids=model.config.eos_token_ids,
    )


def _make_builder(
    config: EngineConfig,
    model: CausalLM,
    shape: PoolShape,
    lanes: Lanes,
    pool: KVPool,
    shards: Shards,
) -> BatchBuilder:
    rule = absorbed_rule(
        model.config,
        shards,
        row_bytes=shape.token_bytes // len(shape.row_widths),
        deterministic=config.deterministic,
    )
    return BatchBuilder(
        lanes,
        pool.block_table,
        pool.page_size,
        config.scheduler.max_num_batched_tokens,
        rule,
        cache_format=shape.cache_format,
        shards=shards,
    )


def make_runner(
    config: EngineConfig,
    model: CausalLM,
    shape: PoolShape,
    pool: KVPool,
    stream: torch.cuda.Stream | None,
) -> Runner:
    """What runs the model: on a GPU where there is a stream to run on."""
    if stream is None:
        return Runner(model, pool.caches)
    return CudaRunner(
        model,
        pool.caches,
        max_tokens=config.scheduler.max_num_batched_tokens,
        max_sequences=config.scheduler.max_num_seqs,
        max_pages=shape.max_pages,
        stream=stream,
    )


def _log_room(shape: PoolShape, pool: KVPool) -> None:
    _LOGGER.info(
        "KV cache in %s: %d bytes a token, %d tokens fit in %d pages of %d",
        shape.format_name,
        shape.token_bytes,
        pool.num_pages * shape.page_size,
        pool.num_pages,
        shape.page_size,
    )


def disk_config(
    config: EngineConfig, model: CausalLM, shape: PoolShape, *, is_loaded: bool
) -> DiskConfig | None:
    """Where prefixes are kept; None when they are not, or not reused at all.

    is_loaded: the model is the checkpoint that `config` names.
    """
    settings = config.kv_cache
    if settings.disk_path is None or not settings.enable_prefix_caching:
        return None
    weights = checkpoint_digest(resolve_model(config.model)) if is_loaded else model_digest(model)
    return DiskConfig(
        path=Path(settings.disk_path).expanduser(),
        num_bytes=int(settings.disk_gb * (1 << 30)),
        stamp=make_stamp(config, model.config, shape, weights),
    )


def _set_threads(num_threads: int | None, ranks: Ranks | None) -> None:
    """As set; else ranks of one machine share its cores, and a lone one leaves them as they are."""
    if num_threads is None and ranks is not None:
        num_threads = max(1, len(os.sched_getaffinity(0)) // ranks.num_local)
    if num_threads is not None:
        ops.set_num_threads(num_threads)


def _close_if_alive(engine: weakref.ref[Engine]) -> None:
    target = engine()
    if target is not None:
        target.close()
