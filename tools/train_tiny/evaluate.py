"""Held-out figures of a model folder: bits per byte, and the loss by position in the context.

python tools/train_tiny/evaluate.py --model DIR --data DIR [--device cpu] [--lengths 8192]
"""

import argparse
import json
import math
from pathlib import Path

import torch
from data import TokenFile
from model import Model
from torch import Tensor

_PAD = 2


def _stream(path: Path, device: str) -> Tensor:
    return torch.from_numpy(TokenFile(path).tokens.astype("int64")).to(device)


@torch.no_grad()
def _losses(model: Model, windows: list[Tensor], dtype: torch.dtype, tokens: int) -> Tensor:
    """Nats per target, [windows, length]; about `tokens` tokens are computed at a time."""
    batch = max(1, tokens // len(windows[0]))
    rows = []
    for i in range(0, len(windows), batch):
        ids = torch.stack(windows[i : i + batch])
        _, entropy = model.loss(ids[:, :-1], ids[:, 1:], dtype, compiled=False)
        rows.append(entropy.double())
    return torch.cat(rows)


def nats_per_token(
    model: Model, path: Path, dtype: torch.dtype, length: int = 2048, tokens: int = 32768
) -> float:
    """Mean over the whole stream, in windows that lie end to end."""
    stream = _stream(path, model.device)
    padded = torch.nn.functional.pad(stream, (0, -(len(stream) - 1) % length), value=_PAD)
    starts = range(0, len(padded) - 1, length)
    entropy = _losses(model, [padded[s : s + length + 1] for s in starts], dtype, tokens)
    return float(entropy.flatten()[: len(stream) - 1].mean())


def nats_by_position(
    model: Model, path: Path, dtype: torch.dtype, length: int, bucket: int = 1024
) -> list[float]:
    """Loss of the same targets at each distance from the window's start.

    Windows begin every `bucket` tokens, and only targets that every bucket saw are counted, so the
    figures differ by the context alone.
    """
    stream = _stream(path, model.device)
    buckets = length // bucket
    starts = range(0, len(stream) - length, bucket)
    if len(starts) < buckets:
        raise ValueError(f"[evaluate] {path} is too short for windows of {length} tokens")
    entropy = _losses(model, [stream[s : s + length + 1] for s in starts], dtype, 32768)
    entropy = entropy.view(len(starts), buckets, bucket).mean(-1)
    # window w, bucket b covers chunk w + b; chunks buckets-1 .. windows-1 appear in every bucket
    chunks = range(buckets - 1, len(starts))
    return [float(torch.stack([entropy[c - b, b] for c in chunks]).mean()) for b in range(buckets)]


def bits_per_byte(nats: float, facts: dict[str, int]) -> float:
    return nats * facts["tokens"] / facts["bytes"] / math.log(2)


def report(model: Model, data: Path, dtype: torch.dtype, lengths: list[int]) -> dict[str, object]:
    """All held-out figures; `lengths` are the window lengths to look at by position."""
    meta = json.loads((data / "meta.json").read_text())
    held = meta["held"]
    nats = nats_per_token(model, data / "held.npz", dtype)
    out: dict[str, object] = {
        "val_nats": nats_per_token(model, data / "val.npz", dtype),
        "held_nats": nats,
        "held_bits_per_byte": bits_per_byte(nats, held),
        "xz_bits_per_byte": 8 * held["xz_bytes"] / held["bytes"],
    }
    out["ratio_to_xz"] = bits_per_byte(nats, held) * held["bytes"] / (8 * held["xz_bytes"])
    for length in lengths:
        values = nats_by_position(model, data / "held.npz", dtype, length)
        out[f"held_nats_by_1024_positions_of_{length}"] = [round(v, 4) for v in values]
    return out


def main() -> None:
    from export import load

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192])
    args = parser.parse_args()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    print(json.dumps(report(load(args.model, args.device), args.data, dtype, args.lengths)))


if __name__ == "__main__":
    main()
