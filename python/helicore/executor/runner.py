"""Runs the model: owns it, knows where its cache is, and calls forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from helicore.models.base import CausalLM, ForwardBatch


class Runner:
    """A model and the per-layer cache views that it reads and writes."""

    def __init__(self, model: CausalLM, caches: Sequence[Tensor]) -> None:
        self._model: CausalLM | None = model
        self._caches = caches

    @property
    def model(self) -> CausalLM:
        if self._model is None:
            raise RuntimeError("the engine is closed")
        return self._model

    def active(self) -> AbstractContextManager[object]:
        """Inside it `run` and what reads its result are called."""
        return nullcontext()

    def run(self, batch: ForwardBatch) -> Tensor:
        """Appends the step's rows and returns fp32 logits [n, vocab_size]."""
        with torch.inference_mode():
            logits: Tensor = self.model(batch, self._caches)
        return logits

    def close(self) -> None:
        """Lets go of the model, which may hold on to the caches."""
        self._model = None
        self._caches = ()
