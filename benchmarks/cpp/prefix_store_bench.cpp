// Sequential rate of the disk prefix store: puts `count` blocks, reopens, reads them all, and says
// what CRC32C costs. Compare with dd on the same file system:
//   prefix_store_bench DIR 1024 2097152
//   dd if=/dev/zero of=DIR/dd bs=2M count=1024 oflag=direct conv=fdatasync
//   dd if=DIR/dd of=/dev/null bs=2M iflag=direct
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "helicore/kv/crc32c.h"
#include "helicore/kv/prefix_store.h"

namespace helicore::kv {
namespace {

constexpr int32_t kTokensPerBlock = 64;
constexpr size_t kGroup = 32;  // blocks per put and get; two gets are in flight

void require(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

class Stopwatch {
 public:
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct Setup {
  PrefixStoreConfig config;
  size_t count = 0;
  std::vector<TokenId> tokens;
  Digest root{};
  std::byte* memory = nullptr;  // 2 * kGroup blocks, page-aligned
};

void report(const char* what, const Setup& setup, double seconds) {
  const double bytes =
      static_cast<double>(setup.count) * static_cast<double>(setup.config.block_bytes);
  std::printf("%-12s %8.1f MB/s\n", what, bytes / seconds / 1e6);
}

std::byte* block_memory(const Setup& setup, size_t index) {
  return setup.memory + static_cast<int64_t>(index % (2 * kGroup)) * setup.config.block_bytes;
}

void write_all(const Setup& setup) {
  auto store = PrefixStore::open(setup.config);
  require(store->stats().disabled_reason.empty(), store->stats().disabled_reason);
  const Stopwatch watch;
  Digest parent = setup.root;
  std::vector<StoreToken> tokens;
  for (size_t i = 0; i < setup.count; ++i) {
    const auto block = std::span(setup.tokens).subspan(i * kTokensPerBlock, kTokensPerBlock);
    const PutBlock put{parent,
                       static_cast<int32_t>(i),
                       block,
                       {{block_memory(setup, i), setup.config.block_bytes}}};
    tokens.push_back(*store->put({&put, 1}, PagePolicy::kBorrow, WhenFull::kBlock));
    parent = block_key(parent, block);
  }
  for (const StoreToken token : tokens) {
    require(store->wait(token)[0] == BlockStatus::kOk, "put");
  }
  require(store->flush(), "flush");
  report("write", setup, watch.seconds());
}

void read_all(const Setup& setup) {
  const Stopwatch opening;
  auto store = PrefixStore::open(setup.config);
  std::printf("%-12s %8.3f ms, %s, direct %d\n", "open", opening.seconds() * 1e3,
              store->stats().io_backend.c_str(), store->stats().direct_io ? 1 : 0);
  const Stopwatch matching;
  const PrefixMatch match = store->match(setup.root, setup.tokens);
  std::printf("%-12s %8.3f ms, %zu blocks\n", "match", matching.seconds() * 1e3,
              match.blocks.size());
  require(match.blocks.size() == setup.count, "match");
  const Stopwatch watch;
  std::vector<StoreToken> open_tokens;
  const auto collect = [&] {
    for (const BlockStatus status : store->wait(open_tokens.front())) {
      require(status == BlockStatus::kOk, "get");
    }
    open_tokens.erase(open_tokens.begin());
  };
  for (size_t begin = 0; begin < setup.count; begin += kGroup) {
    if (open_tokens.size() == 2) collect();
    std::vector<GetBlock> gets;
    for (size_t i = begin; i < std::min(setup.count, begin + kGroup); ++i) {
      gets.push_back({match.blocks[i], {{block_memory(setup, i), setup.config.block_bytes}}});
    }
    open_tokens.push_back(*store->get(gets, WhenFull::kBlock));
  }
  while (!open_tokens.empty()) collect();
  report("read", setup, watch.seconds());
}

void measure_crc(const Setup& setup) {
  const std::span<const std::byte> bytes(setup.memory,
                                         static_cast<size_t>(setup.config.block_bytes));
  const Stopwatch watch;
  uint32_t crc = 0;
  for (size_t i = 0; i < setup.count; ++i) crc = crc32c(bytes, crc);
  report("crc32c", setup, watch.seconds());
  if (crc == 1) std::printf("\n");  // keeps the loop
}

int main_of(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: prefix_store_bench DIR NUM_BLOCKS BLOCK_BYTES [threads] [sync]\n");
    return 2;
  }
  Setup setup;
  setup.count = std::strtoul(argv[2], nullptr, 10);
  setup.config.directory = std::string(argv[1]) + "/prefix-store-bench";
  setup.config.block_bytes = std::strtol(argv[3], nullptr, 10);
  setup.config.tokens_per_block = kTokensPerBlock;
  setup.config.capacity_bytes = static_cast<int64_t>(setup.count) * setup.config.block_bytes;
  for (int i = 4; i < argc; ++i) {
    if (std::string(argv[i]) == "threads") setup.config.io.backend = IoBackend::kThreads;
    if (std::string(argv[i]) == "sync") setup.config.sync = SyncPolicy::kBatch;
  }
  require(setup.config.block_bytes % 4096 == 0, "BLOCK_BYTES must be a multiple of 4096");
  setup.root = root_key({});
  for (size_t i = 0; i < setup.count * kTokensPerBlock; ++i) {
    setup.tokens.push_back(static_cast<TokenId>(i));
  }
  const size_t num_bytes = 2 * kGroup * static_cast<size_t>(setup.config.block_bytes);
  setup.memory = static_cast<std::byte*>(std::aligned_alloc(4096, num_bytes));
  for (size_t i = 0; i < num_bytes; ++i) setup.memory[i] = static_cast<std::byte>(i * 131 >> 8);
  std::filesystem::remove_all(setup.config.directory);
  write_all(setup);
  read_all(setup);
  measure_crc(setup);
  std::filesystem::remove_all(setup.config.directory);
  std::free(setup.memory);
  return 0;
}

}  // namespace
}  // namespace helicore::kv

int main(int argc, char** argv) { return helicore::kv::main_of(argc, argv); }
