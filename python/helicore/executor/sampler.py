"""From logits to tokens and log-probabilities, doing only what the lanes of the step ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helicore.executor.batch import StepInputs
from helicore.executor.lanes import Ints, Lanes
from helicore.executor.sampling_rows import has_penalties
from helicore.executor.scheduler import Chunk
from helicore.executor.sequence import Sequence
from helicore.executor.updates import TokenLogprobs

Floats = NDArray[np.float32]


@dataclass(slots=True)
class Sampled:
    """What one step chose."""

    tokens: NDArray[np.int32]
    """One per sampled lane."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position in `tokens`, where wanted."""
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs | None]]] = field(default_factory=list)
    """New entries of sequences whose prompt's log-probabilities are wanted."""


class Sampler:
    """Stateless between steps: all it knows is in the lanes, so preemption needs no care here.

    Order of effects: log-probabilities are of the logits as the model made them; then logit_bias,
    the mask of stop ids before min_tokens, penalties; then temperature, top-k, top-p and min-p.
    The draw depends on the sequence's seed and the token's position alone.
    """

    def __init__(self, lanes: Lanes, vocab_size: int) -> None:
        self._lanes = lanes
        self._vocab_size = vocab_size

    def sample(self, inputs: StepInputs, logits: Tensor) -> Sampled:
        """logits fp32 [rows, vocab]: sampled lanes first, then rows of prompts; may be changed."""
        lanes, rows = inputs.sampled, self._lanes.sampling
        num_sampled = len(lanes)
        head = logits[:num_sampled]
        wanted = np.flatnonzero(rows.num_logprobs[lanes] >= 0)
        table = torch.log_softmax(head[torch.from_numpy(wanted)], -1) if len(wanted) else None
        edited = rows.is_edited[lanes]
        if edited.any():
            values = head.numpy()
            for position in np.flatnonzero(edited).tolist():
                self._edit(values[position], int(lanes[position]))
        result = Sampled(self._choose(head, lanes))
        if table is not None:
            for row, position in enumerate(wanted.tolist()):
                count = int(rows.num_logprobs[lanes[position]])
                token = int(result.tokens[position])
                result.logprobs[position] = describe_row(table[row], token, count)
        if inputs.prompt_chunks:
            result.prompt_logprobs = self._prompt_entries(inputs.prompt_chunks, logits[num_sampled:])
        return result

    # --- choosing ----------------------------------------------------------------------------

    def _choose(self, logits: Tensor, lanes: Ints) -> NDArray[np.int32]:
        tokens: NDArray[np.int32] = logits.argmax(-1).numpy().astype(np.int32)
        rows = self._lanes.sampling
        for position in np.flatnonzero(rows.is_random[lanes]).tolist():
            tokens[position] = self._draw(logits[position], int(lanes[position]))
        return tokens

    def _draw(self, logits: Tensor, lane: int) -> int:
        rows = self._lanes.sampling
        values = logits.numpy().astype(np.float64) / rows.temperature[lane]
        p = np.exp(values - values.max())
        order = np.argsort(-p, kind="stable")
        sorted_p = p[order] / p.sum()
        keep = np.ones(len(p), np.bool_)
        if rows.top_k[lane] > 0:
            keep[rows.top_k[lane] :] = False
        total = (sorted_p * keep).sum()
        keep &= (np.cumsum(sorted_p * keep) - sorted_p * keep) / total < rows.top_p[lane]
        keep &= sorted_p >= rows.min_p[lane] * sorted_p[0]
        sorted_p = np.where(keep, sorted_p, 0)
        key = [int(rows.seed[lane]), int(self._lanes.num_tokens[lane])]
        u = np.random.default_rng(key).random()
        return int(order[np.searchsorted(np.cumsum(sorted_p) / sorted_p.sum(), u, "right")])

    # --- edits -------------------------------------------------------------------------------

    def _edit(self, row: Floats, lane: int) -> None:
        """logit_bias, the min_tokens mask and penalties, in place."""
        request = self._lanes.sequence(lane).request
        params = request.params
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, np.int64)
            row[ids] += np.fromiter(params.logit_bias.values(), np.float32)
        if self._lanes.num_tokens[lane] < self._lanes.min_total[lane]:
            row[list(request.stop_ids)] = -np.inf
        if has_penalties(params):
            self._penalise(row, lane)

    def _penalise(self, row: Floats, lane: int) -> None:
        params = self._lanes.sequence(lane).request.params
        tokens = self._lanes.tokens[lane, : self._lanes.num_tokens[lane]]
        if params.repetition_penalty != 1:
            seen = np.unique(tokens)
            values = row[seen]
            factor = np.float32(params.repetition_penalty)
            row[seen] = np.where(values > 0, values / factor, values * factor)
        output, counts = np.unique(tokens[self._lanes.prompt_len[lane] :], return_counts=True)
        row[output] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        row[output] -= np.float32(params.presence_penalty)

    # --- log-probabilities of prompts --------------------------------------------------------

    def _prompt_entries(
        self, chunks: list[Chunk], logits: Tensor
    ) -> list[tuple[Sequence, list[TokenLogprobs | None]]]:
        """The row of position p tells of the prompt's token p + 1."""
        result: list[tuple[Sequence, list[TokenLogprobs | None]]] = []
        begin = 0
        for chunk in chunks:
            sequence, prompt = chunk.sequence, chunk.sequence.request.prompt
            assert sequence.prompt_logprobs is not None
            count = sequence.request.params.prompt_logprobs
            top = self._vocab_size if count == -1 else int(count or 0)
            first = max(len(sequence.prompt_logprobs), chunk.start + 1)
            last = min(len(prompt), chunk.start + chunk.length + 1)
            offset = begin - chunk.start - 1
            table = torch.log_softmax(logits[first + offset : last + offset], -1)
            entries: list[TokenLogprobs | None] = [
                describe_row(table[p - first], int(prompt[p]), top) for p in range(first, last)
            ]
            result.append((sequence, entries))
            begin += chunk.length
        return result


def describe_row(logprobs: Tensor, token: int, top: int) -> TokenLogprobs:
    """logprobs fp32 [vocab]; ties rank by id, as the greedy choice does."""
    value = logprobs[token]
    rank = int((logprobs > value).sum()) + int((logprobs[:token] == value).sum()) + 1
    best = torch.topk(logprobs, top) if top else None
    ids, values = (best.indices.tolist(), best.values.tolist()) if best else ([], [])
    return TokenLogprobs(token, float(value), rank, ids, values)
