"""What one step runs, and how its token budget is shared between prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from helicore.executor.lanes import Ints, Lanes
from helicore.executor.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """Tokens start .. start + length of a sequence's prompt, to be computed in one step."""

    sequence: Sequence
    start: int
    length: int


@dataclass(slots=True)
class Step:
    """What runs: one token of each decode lane, then the chunks."""

    decode: Ints
    chunks: list[Chunk]

    @property
    def empty(self) -> bool:
        return not len(self.decode) and not self.chunks

    def split(self, lanes: Lanes) -> Iterator[tuple[Sequence, Step]]:
        """The same work, one sequence at a time."""
        for position, lane in enumerate(self.decode.tolist()):
            yield lanes.sequence(lane), Step(self.decode[position : position + 1], [])
        for chunk in self.chunks:
            yield chunk.sequence, Step(self.decode[:0], [chunk])


def plan_chunks(
    prefilling: list[Sequence], lanes: Lanes, budget: int, max_logit_rows: int
) -> list[Chunk]:
    """Half of the budget by order, the rest to the shortest remainder.

    Rows of prompts whose logits are wanted are bounded over all of them: logits are large.
    """
    by_order = sorted(prefilling, key=lambda sequence: sequence.order)
    by_size = sorted(by_order, key=lambda s: (s.request.priority, lanes.num_remaining(s.lane)))
    lengths: dict[int, int] = dict.fromkeys((s.lane for s in by_order), 0)
    rows_left = max_logit_rows
    for queue, share in ((by_order, budget - budget // 2), (by_size, budget)):
        left = min(share, budget - sum(lengths.values()))
        for sequence in queue:
            extra = min(left, lanes.num_remaining(sequence.lane) - lengths[sequence.lane])
            if sequence.needs_prompt_logprobs:
                extra = min(extra, rows_left)
                rows_left -= extra
            lengths[sequence.lane] += extra
            left -= extra
    return [
        Chunk(sequence, int(lanes.num_computed[sequence.lane]), lengths[sequence.lane])
        for sequence in by_order
        if lengths[sequence.lane]
    ]
