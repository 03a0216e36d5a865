"""Makes the tokenizer and the token files that `train.py` reads. Runs on a CPU in about a minute.

python tools/train_tiny/prepare.py --out DIR [--stdlib DIR]
"""

import argparse
import json
import lzma
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from corpus import SPLITS, SourceFile, cut_segments, exchanges, read_library, split_blocks
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
SPECIALS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|mask|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end_of_turn|>",
    *(f"<|reserved_{i}|>" for i in range(7)),
)
BOS, EOS, SYSTEM, USER, ASSISTANT, END_OF_TURN = 0, 1, 4, 5, 6, 8
MAX_CONTEXT = 16384
VARIANTS = 3  # train_0 is the text as it is, the others are augmented
_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end_of_turn|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

Document = list[int]


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE whose split keeps `.join`, `(self` and `):\\n` as candidates for one token."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=16,
    )
    tok.train_from_iterator(texts, trainer)
    return tok


def save_tokenizer(tok: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tok.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    tok.save(str(out / "tokenizer.json"))
    names = {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "mask_token": "<|mask|>",
    }
    config = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n")


def encode_all(tok: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [e.ids for e in tok.encode_batch(texts, add_special_tokens=False)]


def plain_documents(tok: Tokenizer, files: list[SourceFile]) -> tuple[list[Document], list[str]]:
    ids = encode_all(tok, [f.text for f in files])
    return [[BOS, *i, EOS] for i in ids], [f.group for f in files]


def augmented_documents(
    tok: Tokenizer, files: list[SourceFile], seed: int
) -> tuple[list[Document], list[str]]:
    """Files cut into blocks, blocks cut into segments that are tokenised apart."""
    rng = np.random.default_rng(seed)
    segments: list[str] = []
    spans: list[tuple[int, bool, str]] = []
    for file in files:
        blocks = split_blocks(file.text, rng)
        for i, block in enumerate(blocks):
            cut = cut_segments(block, rng)
            segments += cut
            spans.append((len(cut), i + 1 == len(blocks), file.group))
    pieces = iter(encode_all(tok, segments))
    docs = []
    for count, last, _ in spans:
        doc = [BOS]
        for _ in range(count):
            doc += next(pieces)
        docs.append(doc + [EOS] * last)
    return docs, [group for _, _, group in spans]


def chat_documents(
    tok: Tokenizer, files: list[SourceFile], seed: int, most: int
) -> tuple[list[Document], list[str]]:
    """Requests and answers between role markers, one or a few exchanges to a document."""
    rng = np.random.default_rng(seed)
    found = [(kind, q, a, f.group) for f in files for kind, q, a in exchanges(f)]
    order = rng.permutation(len(found))[:most]
    asked = encode_all(tok, ["\n" + found[i][1] for i in order])
    given = encode_all(tok, ["\n" + found[i][2] for i in order])
    system = encode_all(tok, ["\nYou are a helpful assistant that writes Python."])[0]
    docs, groups, at = [], [], 0
    while at < len(order):
        doc = [BOS] + ([SYSTEM, *system, END_OF_TURN] if rng.random() < 0.3 else [])
        groups.append(found[order[at]][3])
        for _ in range(int(rng.integers(1, 4))):
            if at == len(order):
                break
            doc += [USER, *asked[at], END_OF_TURN, ASSISTANT, *given[at], END_OF_TURN]
            at += 1
        docs.append([*doc, EOS])
    return docs, groups


def write_tokens(path: Path, docs: list[Document], groups: list[str]) -> int:
    """Tokens of all documents, where each document starts, and which group it belongs to."""
    lengths = np.array([len(d) for d in docs])
    names = {g: i for i, g in enumerate(sorted(set(groups)))}
    np.savez_compressed(
        path,
        tokens=np.concatenate([np.array(d, np.uint16) for d in docs]),
        starts=np.concatenate([[0], lengths.cumsum()]).astype(np.int64),
        groups=np.array([names[g] for g in groups], np.int32),
    )
    return int(lengths.sum())


def write_split(tok: Tokenizer, files: list[SourceFile], split: str, out: Path) -> dict[str, int]:
    chosen = [f for f in files if f.split == split]
    docs, groups = plain_documents(tok, chosen)
    name = "train_0.npz" if split == "train" else f"{split}.npz"
    tokens = write_tokens(out / name, docs, groups)
    raw = "".join(f.text for f in chosen).encode()
    facts = {"files": len(chosen), "bytes": len(raw), "tokens": tokens}
    if split == "held":
        facts["xz_bytes"] = len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
    if split == "train":
        library = [f for f in chosen if "test" not in f.path]
        for v in range(1, VARIANTS):
            docs, groups = augmented_documents(tok, chosen, seed=v)
            more = chat_documents(tok, library, seed=v, most=6000)
            facts[f"tokens_{v}"] = write_tokens(
                out / f"train_{v}.npz", docs + more[0], groups + more[1]
            )
            facts[f"chat_documents_{v}"] = len(more[0])
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    args = parser.parse_args()
    start = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    files = read_library(args.stdlib)
    tok = train_tokenizer([f.text for f in files if f.split == "train"])
    save_tokenizer(tok, args.out / "tokenizer")
    meta: dict[str, object] = {"python": sys.version.split()[0], "vocab_size": tok.get_vocab_size()}
    meta |= {split: write_split(tok, files, split, args.out) for split in SPLITS}
    (args.out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    print(json.dumps(meta, indent=2), f"\n{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
