// Chain keys: what names a block outside the process. The root key hashes the reuse scope; a
// block's key hashes its parent's key and its tokens. Finding a cached prompt inside the process
// compares tokens and needs no key.
#pragma once

#include <span>
#include <string>

#include "helicore/kv/sha256.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

// The scope as bytes, equal exactly when the scopes are: magic "HCKV", version, then for each
// source that is present a tag byte, a 4-byte little-endian length and the payload. Tags: 1 adapter
// (id, generation), 2 text salt, 3 number.
[[nodiscard]] std::string encode_scope(const ReuseScope& scope);

[[nodiscard]] Digest root_key(const ReuseScope& scope);

// SHA-256 over an 8-byte header ("KB", version, kind, token count), the parent key and the tokens
// as little-endian 4-byte ids: with a power-of-two block the header fits into the padding of the
// last compression.
[[nodiscard]] Digest block_key(const Digest& parent, std::span<const TokenId> tokens) noexcept;

}  // namespace helicore::kv
