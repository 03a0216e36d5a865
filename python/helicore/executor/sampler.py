"""From logits to tokens and log-probabilities, doing only what the lanes of the step ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helicore import ops
from helicore.executor.batch import StepInputs
from helicore.executor.lanes import BAD_TOKEN, Ints, Lanes
from helicore.executor.sequence import Request, Sequence
from helicore.executor.steps import Chunk
from helicore.executor.updates import TokenLogprobs


@dataclass(slots=True)
class Sampled:
    """What one step chose."""

    tokens: NDArray[np.int32]
    """One per sampled lane, BAD_TOKEN where none could be chosen."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position in `tokens`, where wanted."""
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs]]] = field(default_factory=list)
    """New entries of sequences whose prompt's log-probabilities are wanted."""


@dataclass(slots=True)
class _Gathered:
    """Parameters of the sampled lanes, in the order of the rows of logits."""

    lanes: Ints
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    is_edited: bool
    is_greedy: bool
    """No row is edited, and none is drawn."""
    logprob_positions: Ints


class Sampler:
    """All it knows of a sequence is in its lane, so preemption needs no care here.

    Order of effects: log-probabilities are of the logits as the model made them; then logit_bias,
    the mask of stop ids before min_tokens, penalties; then temperature, min-p, top-k and top-p.
    A draw depends on the sequence's seed and the token's position alone.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._gathered: _Gathered | None = None

    def sample(self, inputs: StepInputs, logits: Tensor) -> Sampled:
        """logits fp32 [rows, vocab]: sampled lanes first, then rows of prompts; may be changed."""
        lanes = inputs.sampled
        rows = self._gather(lanes)
        if logits.is_cuda:
            is_plain = rows.is_greedy and not len(rows.logprob_positions)
            if is_plain and not inputs.prompt_chunks:
                return Sampled(greedy(logits).cpu().numpy())
            logits = logits.cpu()
        head = logits[: len(lanes)]
        wanted = rows.logprob_positions
        raw = head
        if rows.is_edited:
            raw = head.clone() if len(wanted) else head
            self._edit(head, lanes)
        position = torch.from_numpy(self._lanes.num_tokens[lanes])
        tokens, _ = ops.sample(
            head, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, position
        )
        result = Sampled(tokens.numpy())
        if len(wanted):
            counts = self._lanes.sampling.num_logprobs[lanes[wanted]]
            at = torch.from_numpy(wanted)
            described = describe(raw[at], tokens[at], counts)
            result.logprobs = dict(zip(wanted.tolist(), described, strict=True))
        if inputs.prompt_chunks:
            result.prompt_logprobs = _prompt_entries(inputs.prompt_chunks, logits[len(lanes) :])
        return result

    def _gather(self, lanes: Ints) -> _Gathered:
        """Kept while the scheduler hands out the same array: then no lane has changed hands."""
        if self._gathered is not None and self._gathered.lanes is lanes:
            return self._gathered
        rows = self._lanes.sampling
        self._gathered = _Gathered(
            lanes=lanes,
            temperature=torch.from_numpy(rows.temperature[lanes]),
            top_k=torch.from_numpy(rows.top_k[lanes]),
            top_p=torch.from_numpy(rows.top_p[lanes]),
            min_p=torch.from_numpy(rows.min_p[lanes]),
            seed=torch.from_numpy(rows.seed[lanes]),
            is_edited=bool(rows.is_edited[lanes].any()),
            is_greedy=not (rows.is_edited[lanes].any() or rows.temperature[lanes].any()),
            logprob_positions=np.flatnonzero(rows.num_logprobs[lanes] >= 0),
        )
        return self._gathered

    # --- edits -------------------------------------------------------------------------------

    def _edit(self, logits: Tensor, lanes: Ints) -> None:
        """logit_bias, the min_tokens mask and penalties, in place."""
        state, numbers = self._lanes, lanes.tolist()
        requests = [state.sequence(lane).request for lane in numbers]
        if any(request.params.logit_bias for request in requests):
            _bias(logits, requests)
        is_short = state.num_tokens[lanes] < state.min_total[lanes]
        if is_short.any():
            masked = [
                np.array(request.stop_ids if short else (), np.int32)
                for request, short in zip(requests, is_short.tolist(), strict=True)
            ]
            ops.mask_tokens(logits, *_csr(masked))
        penalised = state.sampling.is_penalised[lanes]
        if penalised.any():
            self._penalise(logits, lanes, penalised)

    def _penalise(self, logits: Tensor, lanes: Ints, penalised: NDArray[np.bool_]) -> None:
        state = self._lanes
        prompts, outputs = [], []
        for lane, is_penalised in zip(lanes.tolist(), penalised.tolist(), strict=True):
            middle, end = int(state.prompt_len[lane]), int(state.num_tokens[lane])
            prompts.append(state.tokens[lane, : middle if is_penalised else 0])
            outputs.append(state.tokens[lane, middle : end if is_penalised else middle])
        ops.apply_penalties(
            logits,
            *_csr(prompts),
            *_csr(outputs),
            torch.from_numpy(state.sampling.repetition[lanes]),
            torch.from_numpy(state.sampling.presence[lanes]),
            torch.from_numpy(state.sampling.frequency[lanes]),
        )


def greedy(logits: Tensor) -> Tensor:
    """int32 [rows]: the best token of each, BAD_TOKEN where there is a NaN or nothing but -inf."""
    best, tokens = logits.max(dim=-1)
    is_bad = best.isnan() | (best == -torch.inf)
    return tokens.masked_fill(is_bad, BAD_TOKEN).to(torch.int32)


def _csr(lists: list[NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
    """row_ptr int32 [rows + 1] and the lists end to end."""
    row_ptr = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(part) for part in lists], out=row_ptr[1:])
    return torch.from_numpy(row_ptr), torch.from_numpy(np.concatenate(lists))


def _bias(logits: Tensor, requests: list[Request]) -> None:
    biases = [request.params.logit_bias or {} for request in requests]
    values = np.array([value for bias in biases for value in bias.values()], np.float32)
    ids = [np.array(list(bias), np.int32) for bias in biases]
    ops.apply_logit_bias(logits, *_csr(ids), torch.from_numpy(values))


# --- log-probabilities -----------------------------------------------------------------------


def describe(logits: Tensor, ids: Tensor, counts: Iterable[int]) -> list[TokenLogprobs]:
    """One entry per row of logits fp32 [n, vocab]: ids int32 [n] and the counts[i] best tokens."""
    wanted = [int(count) for count in counts]
    tables = ops.top_logprobs(logits, ids, max(wanted, default=0))
    logprobs, ranks, best_ids, best = (table.tolist() for table in tables)
    return [
        TokenLogprobs(token, logprobs[i], ranks[i], best_ids[i][:count], best[i][:count])
        for i, (token, count) in enumerate(zip(ids.tolist(), wanted, strict=True))
    ]


def _prompt_entries(
    chunks: list[Chunk], logits: Tensor
) -> list[tuple[Sequence, list[TokenLogprobs]]]:
    """The row of position p tells of the prompt's token p + 1."""
    result: list[tuple[Sequence, list[TokenLogprobs]]] = []
    begin = 0
    for chunk in chunks:
        sequence, prompt = chunk.sequence, chunk.sequence.request.prompt
        assert sequence.prompt_logprobs is not None
        count = sequence.request.params.prompt_logprobs or 0
        # After preemption the rows of a prompt come again; those known are passed over.
        first = max(len(sequence.prompt_logprobs), chunk.start + 1)
        last = max(first, min(len(prompt), chunk.start + chunk.length + 1))
        offset = begin - chunk.start - 1
        counts = [logits.shape[1] if count == -1 else count] * (last - first)
        ids = torch.from_numpy(prompt[first:last].copy())
        entries = describe(logits[first + offset : last + offset], ids, counts)
        result.append((sequence, entries))
        begin += chunk.length
    return result
