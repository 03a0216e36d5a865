"""Small tokenizers made in the test run: a byte-level one with chat roles, and a Metaspace one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tokenizers
from helicore.llm import LLM
from helicore.sampling_params import SamplingParams
from helicore.tokenizer import Tokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "def f(self, value): return self.value + value\n",
    "the quick brown fox jumps over the lazy dog\n",
    "naïve café ☕ déjà vu — 你好 世界 🙂🙃 é̂ \u200d\n",
    "class A:\n    def __init__(self):\n        pass\n",
] * 20

SPECIAL = ["<bos>", "<eos>", "<pad>", "<user>", "<assistant>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "<{{ m.role }}>{{ m.content }}{% endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_byte_level(folder: Path, *, vocab_size: int = 400) -> Path:
    """A checkpoint folder that holds a tokenizer only."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder, chat_template=CHAT_TEMPLATE)
    return folder


def write_tokenizer_config(folder: Path, **extra: object) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True},
        "pad_token": "<pad>",
        **extra,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_metaspace(folder: Path) -> Path:
    """A SentencePiece-like tokenizer with byte fall-back: its decoder depends on the context."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_as_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<bos>", *bytes_as_tokens]
    )
    backend.train_from_iterator([line for line in CORPUS if line.isascii()], trainer)
    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        token["special"] = not token["content"].startswith("<0x")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def tokenizer(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer(byte_level_folder)


@pytest.fixture(scope="session")
def metaspace_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_metaspace(tmp_path_factory.mktemp("metaspace")))


class FakeModelConfig:
    vocab_size = 400
    generation_defaults: ClassVar[dict[str, float]] = {"temperature": 0.5}


@pytest.fixture
def make_llm(tokenizer: Tokenizer) -> Callable[..., LLM]:
    """Wraps an engine (a FakeEngine as a rule) in an LLM without loading anything."""

    def make(engine: Any, *, with_tokenizer: bool = True) -> LLM:
        llm = LLM.__new__(LLM)
        default = SamplingParams.from_generation_config(FakeModelConfig.generation_defaults)
        config: Any = FakeModelConfig()
        llm._setup(engine, tokenizer if with_tokenizer else None, config, default, "fake")
        return llm

    return make
