#include "helicore/kv/operation_replay.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <sstream>
#include <utility>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/operation_sink.h"
#include "helicore/kv/quota.h"

namespace helicore::kv {
namespace {

using Field = OperationField;
using Kind = OperationKind;

constexpr const char* kWhere = "kv.replay";
constexpr int64_t kMaxRow = int64_t{1} << 26;  // entries of a caller's page table row

int64_t need(const Operation& operation, Field field) {
  const auto value = operation.get(field);
  HELICORE_CHECK(value.has_value(), kWhere, "the record lacks '", name_of(field), "'");
  return *value;
}

std::vector<int32_t> list32(const Operation& operation, Field field) {
  const auto* values = operation.find(field);
  if (values == nullptr) return {};
  return {values->begin(), values->end()};
}

std::string show(const Operation& operation, Field field) {
  const auto* values = operation.find(field);
  if (values == nullptr) return "nothing";
  const Operation one{operation.kind, {{field, *values}}};
  const std::string text = describe(one);
  return text.substr(field == Field::kOutcome ? text.find('>') + 2 : text.find('=') + 1);
}

// What came out otherwise. Digests are compared where both have one.
std::optional<std::string> compare(const Operation& recorded, const Operation& replayed) {
  for (const Field field : {Field::kOutcome, Field::kError, Field::kResults, Field::kReason,
                            Field::kNewCache, Field::kMatched, Field::kCounters, Field::kState}) {
    const auto* a = recorded.find(field);
    const auto* b = replayed.find(field);
    const bool is_digest = field == Field::kCounters || field == Field::kState;
    if (is_digest && (a == nullptr || b == nullptr)) continue;
    if (a == nullptr ? b == nullptr : b != nullptr && *a == *b) continue;
    return detail::concat(name_of(field), ": recorded ", show(recorded, field), ", replayed ",
                          show(replayed, field));
  }
  return std::nullopt;
}

// Slots per pool group of every level, in the log's terms.
std::vector<RecordedSlots> slots_of(const KVCacheManagerConfig& config) {
  const LifeCycleRegistry registry(config);
  const StorageLayout layout(config, registry);
  std::vector<RecordedSlots> slots;
  GroupSlots hot(layout.groups().count(), 0);
  for (size_t level = 0; level < config.cache_tiers.size(); ++level) {
    const int64_t quota = quota_of(config.cache_tiers[level]);
    const int64_t grain = grain_of(tier_of(config.cache_tiers[level]), quota);
    const QuotaSplit split = level == 0 ? split_quota(config, registry, layout, quota, grain)
                                        : split_cold_quota(layout, hot, quota, grain);
    for (size_t g = 0; g < split.num_slots.count(); ++g) {
      const PoolGroupId group(static_cast<int32_t>(g));
      if (level == 0) hot[group] = split.num_slots[group];
      slots.push_back({static_cast<int32_t>(level), group.value(), split.num_slots[group]});
    }
  }
  return slots;
}

// The bytes of each level that hold the slots; false when they are not of this layout.
bool set_quotas(const std::vector<RecordedSlots>& slots, KVCacheManagerConfig& config) {
  const LifeCycleRegistry registry(config);
  const StorageLayout layout(config, registry);
  std::vector<int64_t> quotas(config.cache_tiers.size(), 0);
  for (const RecordedSlots& entry : slots) {
    if (entry.level < 0 || static_cast<size_t>(entry.level) >= quotas.size() ||
        entry.pool_group < 0 || static_cast<size_t>(entry.pool_group) >= layout.groups().count()) {
      return false;
    }
    const auto level = static_cast<size_t>(entry.level);
    quotas[level] +=
        bytes_for_slots(layout.groups()[PoolGroupId(entry.pool_group)], entry.num_slots,
                        grain_of(tier_of(config.cache_tiers[level]), 1));
  }
  for (size_t level = 0; level < quotas.size(); ++level) {
    std::visit([&](auto& tier) { tier.quota = quotas[level]; }, config.cache_tiers[level]);
  }
  return true;
}

// Divides every buffer's size by what they have in common, down to the grain, which keeps the
// number of slots a matter of division. The config itself when the slots come out otherwise.
KVCacheManagerConfig shrunk(const KVCacheManagerConfig& config,
                            const std::vector<RecordedSlots>& slots) {
  int64_t common = 0;
  for (const LayerConfig& layer : config.layers) {
    for (const BufferConfig& buffer : buffers_of(layer)) common = std::gcd(common, buffer.size);
  }
  if (common <= kHostGrainBytes) return config;
  KVCacheManagerConfig small = config;
  for (LayerConfig& layer : small.layers) {
    std::visit(
        [&](auto& value) {
          for (BufferConfig& buffer : value.buffers) {
            buffer.size = buffer.size / common * kHostGrainBytes;
          }
        },
        layer);
  }
  return set_quotas(slots, small) && slots_of(small) == slots ? small : config;
}

// Levels that this machine may lack: GPU memory becomes host memory, the folder of another machine
// the one for temporary files.
KVCacheManagerConfig at_home(const OperationLog& log) {
  KVCacheManagerConfig config = log.config;
  bool had_gpu = false;
  for (CacheTierConfig& tier : config.cache_tiers) {
    if (const auto* gpu = std::get_if<GpuCacheTierConfig>(&tier)) {
      tier = HostCacheTierConfig{gpu->quota};
      had_gpu = true;
    } else if (auto* disk = std::get_if<DiskCacheTierConfig>(&tier)) {
      std::error_code ignored;
      if (!std::filesystem::is_directory(disk->path, ignored)) {
        disk->path = std::filesystem::temp_directory_path().string();
      }
    }
  }
  if (had_gpu) (void)set_quotas(log.slots, config);
  return config;
}

KVCacheManagerConfig config_for(const OperationLog& log, const ReplayOptions& options) {
  HELICORE_CHECK(options.check_every >= 0, kWhere, "check_every must be >= 0, got ",
                 options.check_every);
  if (options.config) return *options.config;
  const KVCacheManagerConfig config = at_home(log);
  config.validate();
  return options.shrink_pages ? shrunk(config, log.slots) : config;
}

std::string note_of(const OperationLog& log) {
  switch (log.end) {
    case LogEnd::kComplete:
      return log.problem.empty() ? "" : "the recording ended early: " + log.problem;
    case LogEnd::kOpen:
      return "the log has no end: its writer went away";
    case LogEnd::kTorn:
      return "the log ends inside a record, which is left out";
    case LogEnd::kDamaged:
      return log.problem + "; what follows is left out";
  }
  return "";
}

}  // namespace

// Keeps the operation that ran last.
class Replayer::Sink final : public OperationSink {
 public:
  using OperationSink::OperationSink;
  std::optional<Operation> last;

 private:
  void begun(const Operation&) noexcept override {}
  void finished(const Operation& operation) noexcept override {
    try {
      last = operation;
    } catch (const std::exception&) {
      last.reset();
    }
  }
};

Replayer::Replayer(const OperationLog& log, ReplayOptions options)
    : log_(log),
      options_(std::move(options)),
      manager_(std::make_unique<KVCacheManager>(config_for(log, options_))) {
  ManagerState& state = Introspection::state(*manager_);
  sink_ = std::make_unique<Sink>(state, log.state_every);
  state.sink.store(sink_.get(), std::memory_order_release);
}

Replayer::~Replayer() {
  Introspection::state(*manager_).sink.store(nullptr, std::memory_order_release);
}

KVCache* Replayer::cache(int64_t serial) const noexcept {
  if (serial < 0 || static_cast<size_t>(serial) >= caches_.size()) return nullptr;
  return caches_[static_cast<size_t>(serial)].get();
}

std::optional<std::string> Replayer::compare_slots() const {
  for (const RecordedSlots& entry : log_.slots) {
    int64_t total = 0;
    if (entry.level >= 0 && entry.level < manager_->num_levels()) {
      for (const PoolGroupStatistics& group : manager_->storage_statistics(entry.level)) {
        if (group.pool_group.value() == entry.pool_group) total = group.total;
      }
    }
    if (entry.num_slots == total) continue;
    return detail::concat("pool group ", entry.pool_group, " of level ", entry.level, " had ",
                          entry.num_slots, " slots, here it has ", total);
  }
  return std::nullopt;
}

ReplayReport Replayer::run() {
  ReplayReport report{.num_operations = log_.operations.size(), .end = log_.end};
  report.note = note_of(log_);
  if (const auto slots = next_ == 0 ? compare_slots() : std::nullopt) {
    report.difference = ReplayDifference{0, "KVCacheManager(config)", *slots};
  }
  while (!report.difference && next_ < log_.operations.size()) report.difference = step();
  report.num_replayed = next_;
  return report;
}

std::optional<ReplayDifference> Replayer::step() {
  const size_t index = next_++;
  const Operation& recorded = log_.operations.at(index);
  const auto differ = [&](std::string what) {
    return ReplayDifference{index, describe(recorded), std::move(what)};
  };
  sink_->last.reset();
  std::string message;
  try {
    call(recorded);
  } catch (const std::exception& error) {
    message = error.what();
  }
  if (!sink_->last) {
    return differ("the call could not be made" + (message.empty() ? "" : ": " + message));
  }
  if (recorded.find(Field::kOutcome) != nullptr) {  // else the process ended inside the call
    if (auto what = compare(recorded, *sink_->last)) {
      if (!message.empty()) *what += " (" + message + ")";
      return differ(*std::move(what));
    }
  }
  if (options_.check_every > 0 && next_ % static_cast<size_t>(options_.check_every) == 0) {
    try {
      Introspection::check(*manager_);
    } catch (const std::exception& error) {
      return differ(detail::concat("broken invariant: ", error.what()));
    }
  }
  return std::nullopt;
}

void Replayer::call(const Operation& operation) {
  switch (operation.kind) {
    case Kind::kCreate: {
      const auto tokens = list32(operation, Field::kTokens);
      caches_.push_back(manager_->create_kv_cache(
          {.reuse_scope = operation.scope(),
           .input_tokens = tokens,
           .id = operation.get(Field::kId),
           .priority = static_cast<int>(need(operation, Field::kPriority)),
           .expected_prompt_length = operation.get(Field::kExpectedLength)}));
      return;
    }
    case Kind::kClearReusableBlocks:
      return manager_->clear_reusable_blocks();
    case Kind::kShutdown:
      return manager_->shutdown();
    case Kind::kResumeMany:
    case Kind::kResizeMany:
    case Kind::kTruncateMany:
    case Kind::kCommitMany:
      return call_on_many(operation);
    default:
      return call_on_cache(operation);
  }
}

void Replayer::call_on_cache(const Operation& operation) {
  KVCache* target = cache(need(operation, Field::kCaches));
  HELICORE_CHECK(target != nullptr, kWhere, "cache ", need(operation, Field::kCaches),
                 " was never made");
  switch (operation.kind) {
    case Kind::kResume:
      return static_cast<void>(target->resume(operation.get(Field::kStream)));
    case Kind::kSuspend:
      return target->suspend();
    case Kind::kResize:
      return static_cast<void>(
          target->resize(operation.get(Field::kCapacity), operation.get(Field::kHistory)));
    case Kind::kTruncate:
      return target->truncate(need(operation, Field::kNumTokens));
    case Kind::kFork:
      caches_.push_back(target->fork(operation.get(Field::kId)));
      return;
    case Kind::kCommit:
      return target->commit(list32(operation, Field::kTokens),
                            operation.get(Field::kIsEnd).value_or(0) != 0);
    case Kind::kStopCommitting:
      return target->stop_committing();
    case Kind::kClose:
      return target->close();
    case Kind::kSetIndexRow: {
      std::optional<std::span<int32_t>> row;
      if (const auto size = operation.get(Field::kRowSize)) {
        HELICORE_CHECK(*size >= 0 && *size <= kMaxRow, kWhere, "row_size must be in [0, ", kMaxRow,
                       "], got ", *size);
        row =
            *rows_.emplace_back(std::make_unique<std::vector<int32_t>>(static_cast<size_t>(*size)));
      }
      return target->set_base_page_index_buf(
          static_cast<int>(need(operation, Field::kBeam)),
          LifeCycleId(static_cast<int32_t>(need(operation, Field::kGroup))), row);
    }
    default:
      throw NotSupported(detail::concat("[", kWhere, "] operation ",
                                        static_cast<int>(operation.kind), " is not of this build"));
  }
}

void Replayer::call_on_many(const Operation& operation) {
  const auto* serials = operation.find(Field::kCaches);
  HELICORE_CHECK(serials != nullptr, kWhere, "the record lacks 'cache'");
  std::vector<KVCache*> caches;  // null for one of another manager too: it is refused as well
  for (int64_t serial : *serials) caches.push_back(cache(serial));
  const auto num_results =
      operation.get(Field::kNumResults).value_or(static_cast<int64_t>(caches.size()));
  HELICORE_CHECK(num_results >= 0 && num_results <= kMaxRow, kWhere, "num_results must be in [0, ",
                 kMaxRow, "], got ", num_results);
  std::vector<uint8_t> results(static_cast<size_t>(num_results));
  switch (operation.kind) {
    case Kind::kResumeMany:
      return manager_->resume_many(caches, operation.get(Field::kStream), results);
    case Kind::kResizeMany:
      return manager_->resize_many(caches, list32(operation, Field::kCapacity),
                                   list32(operation, Field::kHistory), results);
    case Kind::kTruncateMany:
      return manager_->truncate_many(caches, list32(operation, Field::kNumTokens));
    default:
      return manager_->commit_many(caches, list32(operation, Field::kTokens),
                                   list32(operation, Field::kCounts));
  }
}

std::string describe(const ReplayReport& report) {
  std::ostringstream out;
  out << report.num_replayed << " of " << report.num_operations << " operations replayed";
  if (report.difference) {
    out << "\nfirst difference at operation " << report.difference->index << "\n  "
        << report.difference->operation << "\n  " << report.difference->what;
  } else {
    out << ", all as recorded";
  }
  if (!report.note.empty()) out << "\n" << report.note;
  return out.str();
}

}  // namespace helicore::kv
