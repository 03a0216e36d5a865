// The disk store of prefix blocks in helicore._core.kv: chains of numpy rows in, rows out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "helicore/kv/prefix_store.h"
#include "kv_casters.h"
#include "kv_values.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using namespace helicore::kv;
using Pages = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using WritablePages = nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Statuses = std::vector<BlockStatus>;
using MaybeToken = std::optional<StoreToken>;
using ScopeArg = std::variant<std::monostate, int64_t, ReuseScope>;

Digest to_digest(const nb::bytes& bytes, const char* where, const char* name) {
  Digest digest{};
  HELICORE_CHECK(bytes.size() == digest.size(), where, name, " must hold 32 bytes, got ",
                 bytes.size());
  std::memcpy(digest.data(), bytes.c_str(), digest.size());
  return digest;
}

nb::bytes to_bytes(const Digest& digest) {
  return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

WhenFull when_full(bool block) noexcept { return block ? WhenFull::kBlock : WhenFull::kRefuse; }

// The blocks of a sequence from `first` on, one row of `pages` each.
std::vector<PutBlock> blocks_of(const Digest& root, std::span<const TokenId> tokens,
                                const Pages& pages, size_t first, size_t tokens_per_block) {
  const char* where = "kv.PrefixStore.put";
  const size_t count = (tokens.size() + tokens_per_block - 1) / tokens_per_block;
  HELICORE_CHECK(first <= count && pages.shape(0) == count - first, where,
                 "pages must have a row for each block of tokens from first_block on, ",
                 count - std::min(first, count), ", got ", pages.shape(0));
  std::vector<PutBlock> blocks;
  Digest parent = root;
  for (size_t i = 0; i < count; ++i) {
    const auto block = tokens.subspan(
        i * tokens_per_block, std::min(tokens_per_block, tokens.size() - i * tokens_per_block));
    if (i >= first) {
      // A put never writes to the pages; the buffer type serves both directions.
      auto* row = const_cast<uint8_t*>(pages.data()) + (i - first) * pages.shape(1);
      blocks.push_back(
          {parent, static_cast<int32_t>(i), block, {{row, static_cast<int64_t>(pages.shape(1))}}});
    }
    parent = block_key(parent, block);
  }
  return blocks;
}

// A store, and the arrays that its open reads write to. The map belongs to the GIL.
class StoreHandle {
 public:
  explicit StoreHandle(const PrefixStoreConfig& config)
      : tokens_per_block_(static_cast<size_t>(config.tokens_per_block)) {
    const nb::gil_scoped_release release;
    store_ = PrefixStore::open(config);
  }
  ~StoreHandle() {
    const nb::gil_scoped_release release;
    store_.reset();  // ends the reads; their arrays go afterwards, under the GIL again
  }
  StoreHandle(const StoreHandle&) = delete;
  StoreHandle& operator=(const StoreHandle&) = delete;

  [[nodiscard]] PrefixStore& store() noexcept { return *store_; }

  PrefixMatch match(const nb::bytes& root, const Int32Arg& tokens) {
    const Digest digest = to_digest(root, "kv.PrefixStore.match", "root");
    const auto view = tokens.get("kv.PrefixStore.match", "tokens");
    const nb::gil_scoped_release release;
    return store_->match(digest, view);
  }

  MaybeToken put(const nb::bytes& root, const Int32Arg& tokens, const Pages& pages,
                 size_t first_block, bool block) {
    const auto blocks = blocks_of(to_digest(root, "kv.PrefixStore.put", "root"),
                                  tokens.get("kv.PrefixStore.put", "tokens"), pages, first_block,
                                  tokens_per_block_);
    const nb::gil_scoped_release release;
    return store_->put(blocks, PagePolicy::kCopy, when_full(block));
  }

  MaybeToken get(const std::vector<BlockRef>& blocks, const WritablePages& out, bool block) {
    HELICORE_CHECK(out.shape(0) == blocks.size(), "kv.PrefixStore.get",
                   "out must have a row for each of ", blocks.size(), " blocks, got ",
                   out.shape(0));
    std::vector<GetBlock> gets;
    for (size_t i = 0; i < blocks.size(); ++i) {
      gets.push_back(
          {blocks[i], {{out.data() + i * out.shape(1), static_cast<int64_t>(out.shape(1))}}});
    }
    MaybeToken token;
    {
      const nb::gil_scoped_release release;
      token = store_->get(gets, when_full(block));
    }
    if (token) reading_.emplace(*token, out);
    return token;
  }

  Statuses wait(StoreToken token) {
    Statuses statuses;
    {
      const nb::gil_scoped_release release;
      statuses = store_->wait(token);
    }
    reading_.erase(token);
    return statuses;
  }

  std::optional<Statuses> poll(StoreToken token) {
    std::optional<Statuses> statuses;
    {
      const nb::gil_scoped_release release;
      statuses = store_->poll(token);
    }
    if (statuses) reading_.erase(token);
    return statuses;
  }

 private:
  size_t tokens_per_block_;
  std::unordered_map<StoreToken, WritablePages> reading_;
  std::unique_ptr<PrefixStore> store_;
};

void bind_values(nb::module_& m) {
  nb::enum_<OnMismatch>(m, "OnMismatch", nb::is_arithmetic(),
                        "What opening does with files that do not fit.")
      .value("EMPTY", OnMismatch::kEmpty)
      .value("REFUSE", OnMismatch::kRefuse);
  nb::enum_<SyncPolicy>(m, "SyncPolicy", nb::is_arithmetic(), "When a store syncs its files.")
      .value("NEVER", SyncPolicy::kNever)
      .value("BATCH", SyncPolicy::kBatch);
  nb::enum_<IoBackend>(m, "IoBackend", nb::is_arithmetic(), "How file I/O is done.")
      .value("AUTO", IoBackend::kAuto)
      .value("URING", IoBackend::kUring)
      .value("THREADS", IoBackend::kThreads);
  nb::enum_<BlockStatus> status(m, "BlockStatus", nb::is_arithmetic(),
                                "How the put or get of one block ended.");
  for (uint8_t i = 0; i <= static_cast<uint8_t>(BlockStatus::kDisabled); ++i) {
    const auto value = static_cast<BlockStatus>(i);
    status.value(name_of(value).data(), value);
  }
  nb::class_<BlockRef> ref(m, "BlockRef", "A stored block as match() found it.");
  ref.def_ro("slot", &BlockRef::slot).def_ro("sequence", &BlockRef::sequence);
  add_value_semantics(ref, "BlockRef", {"slot", "sequence"});
  nb::class_<PrefixMatch>(m, "PrefixMatch", "The stored prefix of a token sequence.")
      .def_ro("blocks", &PrefixMatch::blocks)
      .def_ro("num_tokens", &PrefixMatch::num_tokens);
}

void bind_stats(nb::module_& m) {
  using S = PrefixStoreStats;
  nb::class_<S>(m, "PrefixStoreStats", "Counters and reasons of a PrefixStore; a copy.")
      .def_ro("num_slots", &S::num_slots)
      .def_ro("num_blocks", &S::num_blocks)
      .def_ro("slot_bytes", &S::slot_bytes)
      .def_ro("num_put", &S::num_put)
      .def_ro("num_duplicate", &S::num_duplicate)
      .def_ro("num_refused", &S::num_refused)
      .def_ro("num_evicted", &S::num_evicted)
      .def_ro("num_get", &S::num_get)
      .def_ro("num_gone", &S::num_gone)
      .def_ro("num_corrupt", &S::num_corrupt)
      .def_ro("num_io_errors", &S::num_io_errors)
      .def_ro("num_compactions", &S::num_compactions)
      .def_ro("journal_bytes", &S::journal_bytes)
      .def_ro("num_loaded", &S::num_loaded)
      .def_ro("num_dropped", &S::num_dropped)
      .def_ro("torn_bytes", &S::torn_bytes)
      .def_ro("direct_io", &S::direct_io)
      .def_ro("io_backend", &S::io_backend)
      .def_ro("emptied_reason", &S::emptied_reason, "Why opening started empty, or ''.")
      .def_ro("read_only_reason", &S::read_only_reason, "Why puts are refused, or ''.")
      .def_ro("disabled_reason", &S::disabled_reason, "Why nothing works, or ''.");
}

void bind_store_class(nb::module_& m) {
  using H = StoreHandle;
  using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<H>(m, "PrefixStore",
                "KV cache blocks on disk, found again after a restart.\n\nA failing disk degrades "
                "it, see stats(); a wrong page is never served. Any thread may call it.")
      .def(
          "__init__",
          [](H* self, std::string directory, int64_t capacity_bytes, int64_t block_bytes,
             int32_t tokens_per_block, const nb::bytes& stamp, OnMismatch on_mismatch,
             SyncPolicy sync, bool direct_io, int32_t max_queued_blocks, IoBackend io_backend) {
            PrefixStoreConfig config{.directory = std::move(directory),
                                     .capacity_bytes = capacity_bytes,
                                     .block_bytes = block_bytes,
                                     .tokens_per_block = tokens_per_block,
                                     .stamp = to_digest(stamp, "kv.PrefixStore", "stamp"),
                                     .on_mismatch = on_mismatch,
                                     .sync = sync,
                                     .direct_io = direct_io,
                                     .max_queued_blocks = max_queued_blocks};
            config.io.backend = io_backend;
            new (self) H(config);
          },
          "directory"_a, nb::kw_only(), "capacity_bytes"_a, "block_bytes"_a, "tokens_per_block"_a,
          "stamp"_a, "on_mismatch"_a = OnMismatch::kEmpty, "sync"_a = SyncPolicy::kNever,
          "direct_io"_a = true, "max_queued_blocks"_a = 0, "io_backend"_a = IoBackend::kAuto,
          "Open or make the store. `stamp` (32 bytes) says what the pages mean: SHA-256 over "
          "model, "
          "dtype and layout.\n\nRaises ValueError, ResourceBusyError when the directory is in use, "
          "NotSupportedError when io_backend can't be had. Other trouble disables the store.")
      .def("match", &H::match, "root"_a, "tokens"_a,
           "The longest stored chain over `tokens` from a scope's root key (32 bytes).")
      .def("put", &H::put, "root"_a, "tokens"_a, "pages"_a.noconvert(), nb::kw_only(),
           "first_block"_a = 0, "block"_a = true,
           "Write the blocks of a sequence from first_block on: one row of `pages`, uint8 "
           "[blocks, block_bytes], each. Copies. Returns a token, or None when the queue is full "
           "and block is False.")
      .def("get", &H::get, "blocks"_a, "out"_a.noconvert(), nb::kw_only(), "block"_a = true,
           "Read blocks into the rows of `out`, uint8 [blocks, block_bytes]. Returns a token; the "
           "rows are valid once it was collected, where the status is OK.")
      .def("wait", &H::wait, "token"_a, "One status per block. A token is collected once.")
      .def("poll", &H::poll, "token"_a, "As wait(), or None while it is not done.")
      .def(
          "cancel", [](H& self, StoreToken token) { return self.store().cancel(token); }, "token"_a,
          ReleaseGil(), "Take back the reads of a get that have not started; how many.")
      .def(
          "forget", [](H& self, StoreToken token) { self.store().forget(token); }, "token"_a,
          ReleaseGil(), "Do not ask how a put ends.")
      .def(
          "flush", [](H& self) { return self.store().flush(); }, ReleaseGil(),
          "Until everything put before is on the disk; False when the disk refused.")
      .def(
          "stats", [](H& self) { return self.store().stats(); }, ReleaseGil())
      .def(
          "close", [](H& self) { self.store().close(); }, ReleaseGil(),
          "End what was put and release the directory. Idempotent.")
      .def("__enter__", [](nb::handle_t<H> self) { return self; })
      .def(
          "__exit__",
          [](H& self, nb::handle, nb::handle, nb::handle) {
            const nb::gil_scoped_release release;
            self.store().close();
          },
          "exc_type"_a.none(), "exc_value"_a.none(), "traceback"_a.none());
}

}  // namespace

void bind_kv_store(nb::module_& m) {
  bind_values(m);
  bind_stats(m);
  bind_store_class(m);
  m.def(
      "get_root_key",
      [](const ScopeArg& arg) {
        ReuseScope scope;
        if (const auto* given = std::get_if<ReuseScope>(&arg)) scope = *given;
        if (const auto* lora_id = std::get_if<int64_t>(&arg)) scope.lora_id = *lora_id;
        scope.validate();
        return to_bytes(root_key(scope));
      },
      "reuse_scope"_a = nb::none(), "The 32-byte key that a scope's chains start from.");
}

}  // namespace helicore::bindings
