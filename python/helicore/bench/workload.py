"""Prompts of given lengths, the same on every run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helicore.llm import LLM

_SEED = 20260


def text_ids(llm: LLM) -> list[int]:
    """Token ids of real text (this package's own source): experts are chosen as in real use."""
    import helicore.config
    import helicore.generation
    import helicore.llm

    modules = (helicore.config, helicore.generation, helicore.llm)
    sources = []
    for module in modules:
        path = module.__file__ or ""
        with open(path, encoding="utf-8") as file:
            sources.append(file.read())
    return llm.encode("\n".join(sources), add_special_tokens=False)


def make_prompts(llm: LLM, lengths: Sequence[int], seed: int = _SEED) -> list[list[int]]:
    """One prompt per length, from another place of the text each; random without tokenizer."""
    draw = random.Random(seed)
    vocab_size = llm.model_config.vocab_size
    try:
        source = text_ids(llm)
    except ValueError:
        source = []
    prompts = []
    for length in lengths:
        if source:
            start = draw.randrange(len(source))
            long = source[start:] + source * (length // len(source) + 1)
            prompts.append(long[:length])
        else:
            prompts.append([draw.randrange(vocab_size) for _ in range(length)])
    return prompts


def ragged_lengths(count: int, low: int, high: int, seed: int = _SEED) -> list[int]:
    """`count` lengths spread over [low, high], in random order."""
    step = (high - low) / max(1, count - 1)
    lengths = [round(low + step * i) for i in range(count)]
    random.Random(seed).shuffle(lengths)
    return lengths
