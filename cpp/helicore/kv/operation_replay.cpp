#include "helicore/kv/operation_replay.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <utility>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/operation_sink.h"
#include "helicore/kv/recorded_calls.h"
#include "helicore/kv/replay_device.h"

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
  for (const Field field :
       {Field::kOutcome,   Field::kError,      Field::kResults,  Field::kReason,   Field::kNewCache,
        Field::kMatched,   Field::kNewPlan,    Field::kNumPages, Field::kNewStep,  Field::kNewQuota,
        Field::kMinimum,   Field::kGroupSlots, Field::kPending,  Field::kNumMoved, Field::kStarted,
        Field::kNumEvents, Field::kLastEvent,  Field::kDropped,  Field::kLost,     Field::kHeldBack,
        Field::kHadMemory, Field::kGaveBack,   Field::kCounters, Field::kState,    Field::kSizes,
        Field::kSlots}) {
    const auto* a = recorded.find(field);
    const auto* b = replayed.find(field);
    const bool is_digest =
        field == Field::kCounters || field == Field::kState || field == Field::kSizes;
    if (is_digest && (a == nullptr || b == nullptr)) continue;
    if (field == Field::kSlots && a == nullptr) continue;  // of a log that names none
    if (a == nullptr ? b == nullptr : b != nullptr && *a == *b) continue;
    return detail::concat(name_of(field), ": recorded ", show(recorded, field), ", replayed ",
                          show(replayed, field));
  }
  return std::nullopt;
}

// Levels that this machine may lack need no place here: pages have no memory. What checks a
// configuration looks for the folder, though.
KVCacheManagerConfig at_home(KVCacheManagerConfig config) {
  for (CacheTierConfig& tier : config.cache_tiers) {
    if (auto* disk = std::get_if<DiskCacheTierConfig>(&tier)) {
      disk->path = std::filesystem::temp_directory_path().string();
    }
  }
  return config;
}

KVCacheManagerConfig config_for(const OperationLog& log, const ReplayOptions& options) {
  HELICORE_CHECK(options.check_every >= 0, kWhere, "check_every must be >= 0, got ",
                 options.check_every);
  return at_home(options.config ? *options.config : log.config);
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

// Answers what the recorded operation was told, and keeps the one that ran last.
class Replayer::Sink final : public OperationSink {
 public:
  using OperationSink::OperationSink;
  std::optional<Operation> last;

  // For the next operation, which must outlive it.
  void prepare(const Operation& recorded) noexcept {
    last.reset();
    recorded_ = &recorded;
    num_given_.fill(0);
  }
  [[nodiscard]] std::optional<int64_t> given(Field field) noexcept override {
    const auto* values = recorded_ == nullptr ? nullptr : recorded_->find(field);
    size_t& next = num_given_[static_cast<size_t>(field)];
    if (values == nullptr || next >= values->size()) return std::nullopt;
    return (*values)[next++];
  }

 private:
  void begun(const Operation&) noexcept override {}
  void finished(const Operation& operation) noexcept override {
    try {
      last = operation;
    } catch (const std::exception&) {
      last.reset();
    }
  }

  const Operation* recorded_ = nullptr;
  std::array<size_t, 256> num_given_{};
};

Replayer::Replayer(const OperationLog& log, ReplayOptions options)
    : log_(log), options_(std::move(options)) {
  KVCacheManagerConfig config = config_for(log, options_);
  HELICORE_CHECK(!config.cache_tiers.empty(), kWhere, "config has no cache_tiers");
  const bool is_gpu = std::holds_alternative<GpuCacheTierConfig>(config.cache_tiers[0]);
  const DeviceType type = is_gpu ? DeviceType::kCuda : DeviceType::kCpu;
  auto device = std::make_unique<ReplayDevice>(type, log.grains);
  device_ = device.get();
  manager_ = std::make_unique<KVCacheManager>(std::move(config), std::move(device));
  ManagerState& state = Introspection::state(*manager_);
  state.now_ns = [this] {
    if (!times_.empty()) {
      now_ns_ = times_.front();
      times_.pop_front();
    }
    return now_ns_;
  };
  sink_ = std::make_unique<Sink>(state, log.state_every);
  device_->set_sink(sink_.get());
  state.store.set_chooser(sink_.get());
  state.sink.store(sink_.get(), std::memory_order_release);
}

Replayer::~Replayer() {
  ManagerState& state = Introspection::state(*manager_);
  state.sink.store(nullptr, std::memory_order_release);
  state.store.set_chooser(nullptr);
  device_->set_sink(nullptr);
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
  prepare(recorded);
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

void Replayer::prepare(const Operation& recorded) {
  sink_->prepare(recorded);
  const auto* lost = recorded.find(Field::kLost);
  device_->prepare(lost == nullptr ? std::vector<int64_t>() : *lost,
                   recorded.get(Field::kHeldBack).has_value());
  const auto* times = recorded.find(Field::kTimes);
  times_.clear();
  if (times != nullptr) times_.assign(times->begin(), times->end());
}

std::optional<int64_t> Replayer::stream_of(const Operation& operation) const {
  const auto stream = operation.get(Field::kStream);
  if (!stream || *stream >= 0) return stream;
  const auto known = streams_.find(*stream);
  return known == streams_.end() ? INT64_MIN : known->second;  // none has this number
}

void Replayer::call_on_streams(const Operation& operation) {
  const int64_t stream = stream_of(operation).value_or(0);
  switch (operation.kind) {
    case Kind::kMakeStepStream: {
      const StreamHandle made = manager_->make_step_stream();
      if (const auto recorded = operation.get(Field::kNewStream)) streams_[*recorded] = made;
      return;
    }
    case Kind::kSubmitStep:
      (void)manager_->submit_step(stream);
      return;
    default:
      return manager_->complete_step(stream, static_cast<uint64_t>(need(operation, Field::kStep)));
  }
}

void Replayer::call(const Operation& operation) {
  switch (operation.kind) {
    case Kind::kPin:
      caches_.push_back(manager_->pin(list32(operation, Field::kTokens), operation.scope()));
      return;
    case Kind::kDrop: {
      const int64_t plan = need(operation, Field::kPlan);
      HELICORE_CHECK(plan >= 0 && plan < std::ssize(plans_), kWhere, "plan ", plan,
                     " was never made");
      return plans_[static_cast<size_t>(plan)]->drop();
    }
    case Kind::kMakeStepStream:
    case Kind::kSubmitStep:
    case Kind::kCompleteStep:
      return call_on_streams(operation);
    case Kind::kCreate: {
      const auto tokens = list32(operation, Field::kTokens);
      const auto retention = operation.retention();
      caches_.push_back(manager_->create_kv_cache(
          {.reuse_scope = operation.scope(),
           .input_tokens = tokens,
           .id = operation.get(Field::kId),
           .priority = static_cast<int>(need(operation, Field::kPriority)),
           .expected_prompt_length = operation.get(Field::kExpectedLength),
           .retention = retention}));
      return;
    }
    case Kind::kResizeLevel:
    case Kind::kMaintain:
    case Kind::kAdjust:
    case Kind::kExcludeStats:
    case Kind::kDrainEvents:
    case Kind::kSnapshotEvents:
      return call_on_upkeep(operation);
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

// By the sink's way in: some calls pass it where they change nothing.
void Replayer::call_on_upkeep(const Operation& operation) {
  switch (operation.kind) {
    case Kind::kResizeLevel:
      return static_cast<void>(manager_->resize(static_cast<int>(need(operation, Field::kLevel)),
                                                need(operation, Field::kQuota),
                                                operation.get(Field::kBestEffort).has_value()));
    case Kind::kMaintain:
      recorded::maintain(*sink_, *manager_, need(operation, Field::kMaxPages));
      return;
    case Kind::kAdjust:
      return static_cast<void>(manager_->adjust());
    case Kind::kExcludeStats:
      return manager_->mark_stats_excluded(need(operation, Field::kId));
    case Kind::kDrainEvents:
      return static_cast<void>(recorded::drain_events(
          *sink_, *manager_, static_cast<size_t>(need(operation, Field::kMaxEvents))));
    default:
      return static_cast<void>(recorded::snapshot_events(*sink_, *manager_));
  }
}

void Replayer::call_on_cache(const Operation& operation) {
  KVCache* target = cache(need(operation, Field::kCaches));
  HELICORE_CHECK(target != nullptr, kWhere, "cache ", need(operation, Field::kCaches),
                 " was never made");
  switch (operation.kind) {
    case Kind::kResume:
      return static_cast<void>(target->resume(stream_of(operation)));
    case Kind::kSuspend:
      return target->suspend();
    case Kind::kSetScratchReuse:
      return target->scratch().set_enabled(need(operation, Field::kIsEnabled) != 0);
    case Kind::kSelectOptionalReuse: {
      const auto kept = list32(operation, Field::kGroup);
      return target->select_optional_reuse(std::vector<LifeCycleId>(kept.begin(), kept.end()));
    }
    case Kind::kSetStream:
      return target->set_stream(stream_of(operation).value_or(0));
    case Kind::kPrefetch:
      tickets_[target] = target->prefetch(static_cast<int>(need(operation, Field::kLevel)));
      return;
    case Kind::kPollPrefetch:
      return static_cast<void>(tickets_[target].is_done());
    case Kind::kCancelPrefetch:
      return tickets_[target].cancel();
    case Kind::kPlanDrop:
      if (auto plan = target->plan_committed_block_drop()) plans_.push_back(std::move(plan));
      return;
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
      return manager_->resume_many(caches, stream_of(operation), results);
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
  std::string text = helicore::detail::concat(report.num_replayed, " of ", report.num_operations,
                                              " operations replayed");
  if (report.difference) {
    text += helicore::detail::concat("\nfirst difference at operation ", report.difference->index,
                                     "\n  ", report.difference->operation, "\n  ",
                                     report.difference->what);
  } else {
    text += ", all as recorded";
  }
  if (!report.note.empty()) text += "\n" + report.note;
  return text;
}

}  // namespace helicore::kv
