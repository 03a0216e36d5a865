"""Tokens: ints, 32-byte digests and MmItemContexts.

The native manager knows int tokens alone. A digest gets an id of the process from the top of the
31-bit range the first time it is seen, so equal digests match and others do not; chain keys that
cover digests hold these ids and mean something inside this process only.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from helicore import kv
from numpy.typing import NDArray

from .values import MmItemContext, ReuseScope

DIGEST_BYTES = 32
FIRST_DIGEST_ID = (1 << 31) - (1 << 22)  # ordinary tokens lie below

TokenIdExt = int | bytes | MmItemContext
Tokens = Sequence[TokenIdExt] | NDArray[np.int32]

_lock = threading.Lock()
_ids: dict[bytes, int] = {}
_digests: list[bytes] = []


def _intern(digest: bytes) -> int:
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest token must have {DIGEST_BYTES} bytes, got {len(digest)}")
    with _lock:
        found = _ids.setdefault(digest, FIRST_DIGEST_ID + len(_digests))
        if found == FIRST_DIGEST_ID + len(_digests):
            _digests.append(digest)
        return found


def _encode_one(token: TokenIdExt) -> int:
    if isinstance(token, MmItemContext):
        return _intern(token.digest)
    if isinstance(token, (bytes, bytearray, memoryview)):
        return _intern(bytes(token))
    if token >= FIRST_DIGEST_ID:
        raise ValueError(f"token ids must be below {FIRST_DIGEST_ID}, got {token}")
    return int(token)


def encode(tokens: Tokens | None, text_only: bool = False) -> Any:
    """What the native manager takes; int32 arrays pass through."""
    if tokens is None:
        return []
    if isinstance(tokens, np.ndarray):
        if tokens.dtype != np.int32:
            raise TypeError(f"a token array must be int32, got {tokens.dtype}")
        return tokens
    encoded = [_encode_one(token) for token in tokens]
    if text_only and any(token >= FIRST_DIGEST_ID for token in encoded):
        raise ValueError("text_only: digest tokens are not allowed")
    return encoded


def decode(tokens: Sequence[int]) -> list[int | bytes]:
    """Ids back to what they stand for."""
    return [_digests[t - FIRST_DIGEST_ID] if t >= FIRST_DIGEST_ID else t for t in tokens]


def to_scope(scope: object) -> kv.ReuseScope:
    """From None, an adapter id, a ReuseScope or anything with these fields."""
    if scope is None:
        return kv.ReuseScope()
    if isinstance(scope, int):
        return kv.ReuseScope(scope)
    fields = ReuseScope(getattr(scope, "lora_id", None), getattr(scope, "salt", None))
    return kv.ReuseScope(fields.lora_id, fields.salt)


def sequence_to_blockchain_keys(
    tokens_per_block: int, reuse_scope: object, tokens: Tokens
) -> Iterator[tuple[list[TokenIdExt], bytes]]:
    """(tokens, key) of the root and of every block, hashed when it is asked for."""
    key = kv.get_root_key(to_scope(reuse_scope))
    yield [], key
    for begin in range(0, len(tokens), tokens_per_block):
        block = tokens[begin : begin + tokens_per_block]
        ids = np.asarray(encode(block), "<i4")
        head = b"KB\x01\x01" + len(ids).to_bytes(4, "little")
        key = hashlib.sha256(head + key + ids.tobytes()).digest()
        yield list(block), key


def gen_multimodal_cache_key_tokens(
    id_offset: int,
    multi_modal_data_digest: bytes,
    num_tokens: int,
    token_offset: int = 0,
    uuid: str | None = None,
) -> list[TokenIdExt]:
    """Tokens [token_offset, token_offset + num_tokens) of a media item: the first one of the item
    is its digest, the others are placeholders from id_offset on."""
    if num_tokens <= 0:
        raise ValueError(f"num_tokens must be > 0, got {num_tokens}")
    if token_offset < 0:
        raise ValueError(f"token_offset must be >= 0, got {token_offset}")
    if len(multi_modal_data_digest) != DIGEST_BYTES:
        raise ValueError(
            f"multi_modal_data_digest must have {DIGEST_BYTES} bytes, "
            f"got {len(multi_modal_data_digest)}"
        )
    tokens: list[TokenIdExt] = [id_offset + token_offset + i for i in range(num_tokens)]
    if token_offset == 0:
        tokens[0] = MmItemContext(multi_modal_data_digest, uuid)
    return tokens
