"""Engines in step: rank 0 is told what to do, the others repeat it.

Every rank has an engine of its own, with its part of the model and of the cache, and every decision
is a function of the calls that were made: so ranks that get the same calls in the same order do the
same. Before a step rank 0 sends what it was told since the last one. Every few steps ranks compare
a digest of their state with that of rank 0.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from typing import Any

from helicore.config import EngineConfig
from helicore.executor.detokenizer import DetokenizerFactory
from helicore.executor.engine import Engine
from helicore.executor.interrupts import INTERRUPTS
from helicore.executor.sequence import Request
from helicore.executor.updates import SequenceUpdate
from helicore.kv import ReuseScope
from helicore.parallel.ranks import CommError, Ranks
from helicore.tokenizer import Tokenizer

STEPS_BETWEEN_CHECKS = 16


@dataclass(slots=True)
class Packet:
    """What rank 0 sends before a step."""

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    digest: int | None = None
    """Of rank 0's state after the calls."""
    is_last: bool = False


class LeadingEngine(Engine):
    """Rank 0's engine. An error that one rank alone has ends the job: no rank can go on."""

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        self._packet = Packet()
        self._num_led = 0
        self._is_leading = False
        super().__init__(config, ranks=ranks)

    def _accept(self, request: Request, scope: ReuseScope | None) -> None:
        with INTERRUPTS:
            super()._accept(request, scope)
            # The first of n sequences has the seed of its request, drawn where none was given.
            params = replace(request.params, seed=request.sequences[0].seed)
            fields = None if scope is None else (scope.lora_id, scope.salt, scope.lora_generation)
            self._packet.calls.append(
                ("add", (request.request_id, request.prompt, params, request.priority, fields))
            )

    def abort(self, request_id: str) -> None:
        if self._is_leading:
            if isinstance(request_id, str):
                self._late_aborts.append(request_id)
            return
        with INTERRUPTS:
            if request_id in self._requests:
                self._packet.calls.append(("abort", (request_id,)))
            super().abort(request_id)

    def step(self) -> list[SequenceUpdate]:
        self._check_usable()
        with INTERRUPTS:
            super()._abort_late()
            self._is_leading = True
            try:
                self._send(is_last=False)
                return super().step()
            finally:
                self._is_leading = False

    def _abort_late(self) -> None:
        """Was done before the others were told to step; what came since waits for the next one."""

    def reset_prefix_cache(self) -> bool:
        with INTERRUPTS:
            is_done = super().reset_prefix_cache()
            self._packet.calls.append(("reset", ()))
        return is_done

    def close(self) -> None:
        """Ends the others' engines as well."""
        is_first = not self._is_closed
        super().close()
        ranks = self._ranks
        if not is_first or ranks is None or self._process.is_child:
            return
        try:
            if self._change.failed:
                ranks.abort("the first rank has stopped")
            else:
                self._send(is_last=True)
        except CommError:
            pass  # they are gone, or know already
        finally:
            ranks.close()

    def _send(self, is_last: bool) -> None:
        assert self._ranks is not None
        packet, self._packet = self._packet, Packet()
        packet.is_last = is_last
        if not is_last and self._num_led % STEPS_BETWEEN_CHECKS == 0:
            packet.digest = self.state_digest()
        self._num_led += 1
        data = pickle.dumps(packet, protocol=5)
        with self._change:
            self._ranks.everyone.broadcast_bytes(data, 0)


def follow(engine: Engine, ranks: Ranks, tokenizer: Tokenizer | None) -> None:
    """What another rank does until rank 0 closes its engine; CommError where it ends otherwise."""
    factory = None if tokenizer is None else DetokenizerFactory(tokenizer)
    try:
        while True:
            data = ranks.everyone.broadcast_bytes(None, 0, wait_forever=True)
            packet: Packet = pickle.loads(data)
            for name, arguments in packet.calls:
                _repeat(engine, name, arguments, factory)
            if packet.is_last:
                break
            if packet.digest is not None and packet.digest != engine.state_digest():
                raise RuntimeError(
                    f"decisions differ from those of rank 0 (step {engine.counters.num_steps})"
                )
            engine.step()
    except CommError:
        raise
    except BaseException as error:
        ranks.abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        engine.close()
        ranks.close()


def _repeat(
    engine: Engine, name: str, arguments: tuple[Any, ...], factory: DetokenizerFactory | None
) -> None:
    if name == "abort":
        engine.abort(*arguments)
        return
    if name == "reset":
        engine.reset_prefix_cache()
        return
    request_id, tokens, params, priority, scope = arguments
    engine.add_request(
        request_id,
        tokens,
        params,
        priority=priority,
        reuse_scope=None if scope is None else ReuseScope(*scope),
        detokenizer_factory=(
            None if factory is None else (lambda: factory(params, tokens.tolist()))
        ),
    )
