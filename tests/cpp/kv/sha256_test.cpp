#include "helicore/kv/sha256.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace helicore::kv {
namespace {

std::string hex(const Digest& digest) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (uint8_t byte : digest) text += {digits[byte >> 4], digits[byte & 15]};
  return text;
}

std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Vectors of FIPS 180-4 and the NIST examples.
TEST(Sha256, published_vectors) {
  EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(bytes_of("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(bytes_of(std::string(1000000, 'a')))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, a_head_and_a_rest_give_the_digest_of_the_whole) {
  std::mt19937 random(6);
  std::vector<uint8_t> bytes(4096);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (size_t head = 0; head < 64; ++head) {
    for (size_t rest : {0u, 1u, 15u, 16u, 23u, 24u, 64u, 256u, 983u, 984u, 1024u, 2047u, 4032u}) {
      const std::span all(bytes.data(), head + rest);
      ASSERT_EQ(sha256(all.first(head), all.subspan(head)), sha256(all)) << head << " + " << rest;
    }
  }
}

TEST(Sha256, pieces_of_any_size_give_the_digest_of_the_whole) {
  std::mt19937 random(5);
  for (size_t size : {0u, 1u, 55u, 56u, 63u, 64u, 65u, 119u, 120u, 128u, 1000u}) {
    std::vector<uint8_t> bytes(size);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    const Digest whole = sha256(bytes);
    for (int round = 0; round < 20; ++round) {
      Sha256 hash;
      for (size_t at = 0; at < size;) {
        const size_t take = std::min<size_t>(size - at, random() % 70);
        hash.update(std::span(bytes).subspan(at, take));
        at += take;
      }
      ASSERT_EQ(hash.finish(), whole) << "size " << size;
    }
  }
}

TEST(Sha256, the_native_compression_agrees_with_the_portable_one) {
  if (!has_sha_instructions()) GTEST_SKIP() << "this CPU has no SHA instructions";
  std::mt19937 random(9);
  for (int round = 0; round < 200; ++round) {
    std::array<uint32_t, 8> a, b;
    for (size_t i = 0; i < 8; ++i) a[i] = b[i] = static_cast<uint32_t>(random());
    std::vector<uint8_t> blocks(64 * (1 + random() % 5));
    for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(random());
    sha256_compress_native(a.data(), blocks.data(), blocks.size() / 64);
    sha256_compress_portable(b.data(), blocks.data(), blocks.size() / 64);
    ASSERT_EQ(a, b);
  }
}

}  // namespace
}  // namespace helicore::kv
