"""Runs engines to the end."""

from __future__ import annotations

from collections.abc import Sequence

from helicore.executor.engine import Engine
from helicore.executor.updates import SequenceUpdate
from helicore.sampling_params import SamplingParams

Updates = list[SequenceUpdate]


def drain(engine: Engine, max_steps: int = 3000) -> dict[tuple[str, int], Updates]:
    """Steps until nothing is left; updates by (request id, index), in the order of their ends."""
    result: dict[tuple[str, int], Updates] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            return result
        for update in engine.step():
            result.setdefault((update.request_id, update.index), []).append(update)
    raise AssertionError(f"work is left after {max_steps} steps: {engine.counters}")


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Updates]:
    """Updates of each prompt (of its first sequence), all submitted at once."""
    for i, prompt in enumerate(prompts):
        engine.add_request(f"prompt {i}", prompt, params)
    results = drain(engine)
    return [results[f"prompt {i}", 0] for i in range(len(prompts))]


def tokens_of(updates: Updates) -> list[int]:
    return [token for update in updates for token in update.new_token_ids]
