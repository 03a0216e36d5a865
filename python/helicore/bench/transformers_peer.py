"""The peer of the throughput benchmark: the same checkpoint in Hugging Face transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXPERTS = ("eager", "grouped_mm", "batched_mm")


class TransformersPeer:
    """Greedy generation with `AutoModelForCausalLM.generate`.

    Args:
      path: the checkpoint folder.
      dtype: "bfloat16" or "float32", as ours computes.
    Raises RuntimeError when transformers is not installed.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        try:
            import torch
            import transformers as library
        except ImportError as error:
            raise RuntimeError("--vs transformers needs `pip install transformers`") from error
        transformers: Any = library
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._torch = torch
        self.name = f"transformers {transformers.__version__}"
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype)
        ).eval()
        # The checkpoint's sampling defaults would only cause warnings beside do_sample=False.
        self.model.generation_config = transformers.GenerationConfig(
            pad_token_id=self.model.config.pad_token_id or 0
        )
        self._criteria = transformers.StoppingCriteriaList

    def experts_choices(self) -> tuple[str, ...]:
        """Experts implementations that this model can switch between."""
        if hasattr(self.model, "set_experts_implementation"):
            return EXPERTS
        return ("default",)

    def set_experts(self, name: str) -> None:
        if name != "default":
            self.model.set_experts_implementation(name)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[list[list[int]], list[float]]:
        """Greedy continuations of exactly `num_tokens`, and the time after each step (seconds)."""
        torch = self._torch
        width = max(len(prompt) for prompt in prompts)
        pad = self.model.generation_config.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        marks: list[float] = []
        start = time.perf_counter()

        def mark(*_: Any, **__: Any) -> Any:
            marks.append(time.perf_counter() - start)
            return torch.zeros(len(prompts), dtype=torch.bool)

        with torch.inference_mode():
            rows = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                stopping_criteria=self._criteria([mark]),
            )
        return rows[:, width:].tolist(), marks

    def next_logits(self, ids: Sequence[int]) -> Any:
        """fp32 logits [vocab] after `ids`."""
        with self._torch.inference_mode():
            return self.model(self._torch.tensor([list(ids)])).logits[0, -1].float()
