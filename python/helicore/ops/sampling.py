"""Choosing the next token. logits are float32 [B, V]; rows do not influence each other.

Ragged per-row lists are given as row_ptr int32 [B + 1] (ascending from 0) and flat arrays.
"""

import torch
from torch import Tensor

from helicore._core import nn as _nn
from helicore.ops._registry import register_op


def _sample_fake(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    logprobs: bool = False,
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty((rows,), dtype=torch.int32),
        logits.new_empty((rows if logprobs else 0,), dtype=torch.float32),
    )


@register_op("sample", fake=_sample_fake)
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    logprobs: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: temperature, then min_p, top_k, top_p, then the draw.

    The draw uses a counter-based generator keyed by (seed, position), so a request with a seed gets
    the same tokens in any batch.

    Args:
        logits: [B, V] float32, not changed.
        temperature: float32 [B], >= 0; 0 is greedy (the lowest id among equals).
        top_k: int32 [B]; below 1 is off. Exactly k tokens stay (equal logits: lower ids).
        top_p: float32 [B] in (0, 1]; the shortest prefix by probability that reaches p stays.
        min_p: float32 [B] in [0, 1]; tokens with min_p times the best probability or more stay.
        seed: int64 [B], any 64 bits.
        position: int64 [B], the number of the draw within the request.
        logprobs: also return log-softmax(logits)[id], before temperature and filters.

    Returns:
        ids int32 [B] and logprobs float32 [B] ([0] unless asked for). A row that has a NaN, or
        nothing but -inf, gets id -1 and logprob NaN.
    """
    rows = logits.shape[0]
    ids = torch.empty((rows,), dtype=torch.int32)
    values = torch.empty((rows if logprobs else 0,), dtype=torch.float32)
    _nn.sample(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        position,
        ids,
        values if logprobs else None,
    )
    return ids, values


def _top_logprobs_fake(
    logits: Tensor, ids: Tensor, n: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty((rows,), dtype=torch.float32),
        logits.new_empty((rows,), dtype=torch.int32),
        logits.new_empty((rows, n), dtype=torch.int32),
        logits.new_empty((rows, n), dtype=torch.float32),
    )


@register_op("top_logprobs", fake=_top_logprobs_fake)
def top_logprobs(logits: Tensor, ids: Tensor, n: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of given tokens and of the n best.

    Args:
        logits: [B, V] float32.
        ids: int32 [B] in [0, V), or -1 for rows without one.
        n: best tokens per row, 0..V.

    Returns:
        logprobs float32 [B] and ranks int32 [B] (1 + tokens with a greater logit) of ids;
        ids int32 [B, n] and logprobs float32 [B, n] of the best, descending.
    """
    rows = logits.shape[0]
    logprobs = torch.empty((rows,), dtype=torch.float32)
    ranks = torch.empty((rows,), dtype=torch.int32)
    best_ids = torch.empty((rows, n), dtype=torch.int32)
    best = torch.empty((rows, n), dtype=torch.float32)
    _nn.top_logprobs(logits, ids, logprobs, ranks, best_ids, best)
    return logprobs, ranks, best_ids, best


def log_softmax_gather(logits: Tensor, ids: Tensor) -> Tensor:
    """log-softmax(logits)[row, ids[row]] as float32 [B]."""
    return top_logprobs(logits, ids, 0)[0]


def _apply_penalties_fake(
    logits: Tensor,
    prompt_row_ptr: Tensor,
    prompt_ids: Tensor,
    output_row_ptr: Tensor,
    output_ids: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    return None


@register_op("apply_penalties", fake=_apply_penalties_fake, mutates=("logits",))
def apply_penalties(
    logits: Tensor,
    prompt_row_ptr: Tensor,
    prompt_ids: Tensor,
    output_row_ptr: Tensor,
    output_ids: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalise tokens in place.

    Tokens of prompt and output: logit / repetition when positive, else logit * repetition. Tokens
    of the output: then minus frequency times their number there, and minus presence. A row with
    1, 0, 0 is left alone. repetition (> 0), presence, frequency: float32 [B]; lists int32.
    """
    _nn.apply_penalties(
        logits,
        prompt_row_ptr,
        prompt_ids,
        output_row_ptr,
        output_ids,
        repetition,
        presence,
        frequency,
    )


def _apply_logit_bias_fake(logits: Tensor, row_ptr: Tensor, ids: Tensor, values: Tensor) -> None:
    return None


@register_op("apply_logit_bias", fake=_apply_logit_bias_fake, mutates=("logits",))
def apply_logit_bias(logits: Tensor, row_ptr: Tensor, ids: Tensor, values: Tensor) -> None:
    """logits[row, id] += value in place; row_ptr, ids int32, values float32."""
    _nn.apply_logit_bias(logits, row_ptr, ids, values)


def _mask_tokens_fake(logits: Tensor, row_ptr: Tensor, ids: Tensor) -> None:
    return None


@register_op("mask_tokens", fake=_mask_tokens_fake, mutates=("logits",))
def mask_tokens(logits: Tensor, row_ptr: Tensor, ids: Tensor) -> None:
    """logits[row, id] = -inf in place; row_ptr, ids int32."""
    _nn.mask_tokens(logits, row_ptr, ids)
