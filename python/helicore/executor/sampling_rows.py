"""Sampling parameters of the running sequences as arrays, one row per lane."""

from __future__ import annotations

import numpy as np

from helicore.sampling_params import SamplingParams


class SamplingRows:
    """Parameters that the sampler gathers for the lanes of a step, and flags of what they need."""

    def __init__(self, num_lanes: int) -> None:
        self.temperature = np.zeros(num_lanes, np.float32)
        self.top_p = np.ones(num_lanes, np.float32)
        self.top_k = np.zeros(num_lanes, np.int32)
        self.min_p = np.zeros(num_lanes, np.float32)
        self.seed = np.zeros(num_lanes, np.int64)
        self.presence = np.zeros(num_lanes, np.float32)
        self.frequency = np.zeros(num_lanes, np.float32)
        self.repetition = np.ones(num_lanes, np.float32)
        self.is_penalised = np.zeros(num_lanes, np.bool_)
        self.is_edited = np.zeros(num_lanes, np.bool_)
        """Penalties, logit_bias or min_tokens change the logits."""
        self.num_logprobs = np.full(num_lanes, -1, np.int64)
        """How many best tokens to report beside the chosen one; -1: no log-probabilities."""

    def set(self, lane: int, params: SamplingParams, seed: int, vocab_size: int) -> None:
        """Takes over the parameters of the sequence that now has `lane`."""
        self.temperature[lane] = params.temperature
        self.top_p[lane] = params.top_p
        self.top_k[lane] = params.top_k
        self.min_p[lane] = params.min_p
        self.seed[lane] = seed
        self.presence[lane] = params.presence_penalty
        self.frequency[lane] = params.frequency_penalty
        self.repetition[lane] = params.repetition_penalty
        self.is_penalised[lane] = has_penalties(params)
        self.is_edited[lane] = bool(has_penalties(params) or params.logit_bias or params.min_tokens)
        wanted = -1 if params.logprobs is None else params.logprobs
        self.num_logprobs[lane] = vocab_size if params.logprobs == -1 else wanted


def has_penalties(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    )
