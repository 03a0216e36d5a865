"""The bundled model: its size, its tokenizer, and that it is a trained model transformers reads."""

import importlib
import json
import math
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "python" / "helicore" / "assets" / "tiny"
MAX_PARAMETERS = 7_800_000
MAX_WEIGHT_BYTES = 15_600_000
MAX_BITS_PER_BYTE = 1.1
MIN_ACCURACY = 0.5
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end_of_turn|>"]
SNIPPET = '''\
import json
import os


class Inventory:
    """Counts of parts, by name."""

    def __init__(self, path=None):
        self.path = path
        self.parts = {}

    def add(self, name, count=1):
        if count < 0:
            raise ValueError("count must not be negative")
        self.parts[name] = self.parts.get(name, 0) + count

    def save(self):
        with open(self.path, "w", encoding="utf-8") as f:
            json.dump(self.parts, f)

    def __len__(self):
        return len(self.parts)

    def __repr__(self):
        return f"{self.__class__.__name__}({self.path!r})"


if __name__ == "__main__":
    inventory = Inventory(os.path.join("a", "b"))
    for name in ["bolt", "nut"]:
        inventory.add(name)
    print(len(inventory))
'''


def read(name: str) -> dict[str, Any]:
    return json.loads((TINY / name).read_text())


def weights_header() -> dict[str, Any]:
    with (TINY / "model.safetensors").open("rb") as f:
        (size,) = struct.unpack("<Q", f.read(8))
        return json.loads(f.read(size))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, dict[str, Any]]:
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    dtype = importlib.import_module("torch").float32
    return auto.from_pretrained(TINY, dtype=dtype, output_loading_info=True)


@pytest.fixture
def trainer_export() -> Iterator[ModuleType]:
    """`tools/train_tiny/export.py`, whose neighbours have plain top-level names."""
    folder = ROOT / "tools" / "train_tiny"
    names = {p.stem for p in folder.glob("*.py")}
    before = {n: sys.modules.pop(n) for n in names if n in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("export")
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def snippet_figures(model: Any, tokenizer: Any) -> tuple[float, float]:
    """Bits per byte of the snippet, and the share of its tokens that are the likeliest one."""
    torch = importlib.import_module("torch")
    ids = tokenizer(SNIPPET, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].double()
    nats = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    accuracy = (logits.argmax(-1) == ids[0, 1:]).double().mean().item()
    return nats / math.log(2) / len(SNIPPET.encode()), accuracy


def test_parameters_and_bytes_fit_the_budget() -> None:
    tensors = {k: v for k, v in weights_header().items() if k != "__metadata__"}
    assert sum(math.prod(t["shape"]) for t in tensors.values()) <= MAX_PARAMETERS
    assert (TINY / "model.safetensors").stat().st_size <= MAX_WEIGHT_BYTES
    assert sorted(p.name for p in TINY.glob("*.safetensors")) == ["model.safetensors"]


def test_only_correction_biases_are_float32() -> None:
    tensors = {k: v for k, v in weights_header().items() if k != "__metadata__"}
    single = {k for k, v in tensors.items() if v["dtype"] == "F32"}
    assert single == {k for k in tensors if k.endswith("e_score_correction_bias")}
    assert {v["dtype"] for k, v in tensors.items() if k not in single} == {"BF16"}
    assert "lm_head.weight" not in tensors


def test_architecture() -> None:
    config = read("config.json")
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["num_attention_heads"] == 12
    assert config["max_position_embeddings"] == 16384
    assert config["num_nextn_predict_layers"] == 0
    assert config["first_k_dense_replace"] == 1
    assert config["n_shared_experts"] >= 1
    assert config["n_group"] > config["topk_group"] > 1
    assert config["tie_word_embeddings"] is True
    widths = [v for k, v in config.items() if k.endswith(("_size", "_rank", "_dim"))]
    assert len(widths) == 9
    assert all(w % 16 == 0 for w in widths)


def test_generation_defaults_sample_and_stop() -> None:
    config = read("generation_config.json")
    assert (config["do_sample"], config["temperature"], config["top_p"]) == (True, 0.8, 0.95)
    assert (config["bos_token_id"], config["pad_token_id"]) == (0, 2)
    assert config["eos_token_id"] == [1, 8]  # end of text, end of turn


def test_specials_are_the_first_sixteen_ids() -> None:
    added = read("tokenizer.json")["added_tokens"]
    assert [t["id"] for t in added] == list(range(16))
    assert all(t["special"] for t in added)
    names = [t["content"] for t in added]
    assert names[:9] == ["<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>", *ROLES]
    assert names[9:] == [f"<|reserved_{i}|>" for i in range(7)]
    assert (
        len(read("tokenizer.json")["model"]["vocab"]) == read("config.json")["vocab_size"] == 4096
    )


def test_round_trip_of_any_text(tokenizer: Any) -> None:
    rng = random.Random(0)
    planes = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    for length in [0, 1, 2, 3, 17, 300] * 20:
        text = "".join(chr(rng.randint(*rng.choice(planes))) for _ in range(length))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert all(16 <= i < 4096 for i in ids)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("x")[0] == 0


def test_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a = 1"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|bos|><|user|>\nHi<|end_of_turn|><|assistant|>\na = 1<|end_of_turn|>"
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|bos|><|user|>\nHi<|end_of_turn|><|assistant|>\n"
    ids = tokenizer.encode(asked, add_special_tokens=False)
    assert [i for i in ids if i < 16] == [0, 5, 8, 6]


def test_transformers_loads_every_tensor(loaded: tuple[Any, dict[str, Any]]) -> None:
    model, info = loaded
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


def test_training_code_and_transformers_agree(
    loaded: tuple[Any, dict[str, Any]], tokenizer: Any, trainer_export: ModuleType
) -> None:
    torch = importlib.import_module("torch")
    ids = tokenizer(SNIPPET, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        theirs = loaded[0](input_ids=ids).logits
    ours = trainer_export.load(TINY).logits(ids, torch.float32)
    assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-5


def test_model_is_trained(loaded: tuple[Any, dict[str, Any]], tokenizer: Any) -> None:
    bits, accuracy = snippet_figures(loaded[0], tokenizer)
    assert bits < MAX_BITS_PER_BYTE
    assert accuracy > MIN_ACCURACY


def test_shuffled_weights_fail_the_bounds(tokenizer: Any) -> None:
    torch = importlib.import_module("torch")
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    model = auto.from_pretrained(TINY, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.flatten()[torch.randperm(p.numel(), generator=generator)].view(p.shape))
    bits, accuracy = snippet_figures(model, tokenizer)
    assert bits > MAX_BITS_PER_BYTE
    assert accuracy < MIN_ACCURACY
