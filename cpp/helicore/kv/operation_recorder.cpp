#include "helicore/kv/operation_recorder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <shared_mutex>
#include <utility>

#include "helicore/core/error.h"
#include "helicore/kv/errors.h"
#include "helicore/kv/kv_cache_manager.h"
#include "helicore/kv/manager_state.h"
#include "helicore/kv/operation_frames.h"

namespace helicore::kv {
namespace {

using frames::FrameType;

constexpr size_t kBufferBytes = size_t{1} << 16;
constexpr int64_t kEndBytes = 256;  // kept free for the end of a log that reaches max_bytes
constexpr const char* kUnknownCall =
    "a call that operation logs do not know changed the manager: what follows would not replay";

template <typename Key>
int64_t number_of(std::unordered_map<Key, int64_t>& numbers, const Key& key) {
  return numbers.emplace(key, static_cast<int64_t>(numbers.size())).first->second;
}

OperationLog header_of(const ManagerState& state, const RecordingOptions& options) {
  OperationLog log;
  log.config = state.config;
  log.state_every = options.state_every;
  log.is_anonymised = options.anonymise;
  if (options.anonymise) {
    for (CacheTierConfig& tier : log.config.cache_tiers) {
      if (auto* disk = std::get_if<DiskCacheTierConfig>(&tier)) disk->path.clear();
    }
  }
  for (const LevelState& level : state.levels) log.grains.push_back(level.grain);
  for (int level = 0; level < state.owner->num_levels(); ++level) {
    for (const PoolGroupStatistics& group : state.owner->storage_statistics(level)) {
      log.slots.push_back({level, group.pool_group.value(), group.total});
    }
  }
  return log;
}

}  // namespace

Operation Anonymiser::apply(const Operation& operation) {
  Operation result = operation;
  const bool makes_cache =
      operation.kind == OperationKind::kCreate || operation.kind == OperationKind::kFork;
  if (makes_cache && !result.get(OperationField::kId)) {
    result.set(OperationField::kId, result.get(OperationField::kNewCache));
  }
  std::erase_if(result.entries, [](const Operation::Entry& entry) {
    // Step streams are numbers already.
    return entry.field == OperationField::kStream &&
           std::any_of(entry.values.begin(), entry.values.end(), [](int64_t s) { return s >= 0; });
  });
  for (Operation::Entry& entry : result.entries) {
    if (entry.field == OperationField::kTokens) {
      for (int64_t& token : entry.values) token = token < 0 ? -1 : number_of(tokens_, token);
    } else if (entry.field == OperationField::kId) {
      for (int64_t& id : entry.values) id = -1 - number_of(ids_, id);
    } else if (entry.field == OperationField::kSaltNumber) {
      for (int64_t& salt : entry.values) salt = number_of(salt_numbers_, salt);
    } else if (entry.field == OperationField::kSaltText) {
      const std::string text(entry.values.begin(), entry.values.end());
      const std::string shown = std::to_string(number_of(salt_texts_, text));
      entry.values.assign(shown.begin(), shown.end());
    }
  }
  return result;
}

OperationRecorder::OperationRecorder(const ManagerState& state, RecordingOptions options)
    : OperationSink(state, options.state_every), options_(std::move(options)) {
  frames::put_prelude(buffer_);
  frames::put_frame(FrameType::kHeader, frames::header_text(header_of(state, options_)), buffer_);
  summary_.num_bytes = static_cast<int64_t>(buffer_.size());
  if (options_.path.empty()) return;
  buffer_.reserve(2 * kBufferBytes);
  fd_ = ::open(options_.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  HELICORE_CHECK(fd_ >= 0, "kv.start_recording", "path must be a file that can be written, got '",
                 options_.path, "': ", std::strerror(errno));
  try {
    write_out();
  } catch (const std::exception& error) {
    ::close(fd_);
    throw InvalidArgument(detail::concat("[kv.start_recording] path '", options_.path,
                                         "' can't be written: ", error.what()));
  }
}

OperationRecorder::~OperationRecorder() { stop(); }

RecordingSummary OperationRecorder::finish() {
  stop();
  const std::lock_guard lock(mutex_);
  RecordingSummary summary = summary_;
  if (options_.path.empty()) summary.bytes = std::exchange(buffer_, {});
  return summary;
}

void OperationRecorder::begun(const Operation& operation) noexcept {
  if (options_.write_ahead) append(operation, false);
}

void OperationRecorder::finished(const Operation& operation) noexcept { append(operation, true); }

void OperationRecorder::append(const Operation& operation, bool has_results) noexcept {
  if (is_over_) return;
  if (has_unknown_call()) return give_up(kUnknownCall);
  const size_t before = buffer_.size();
  try {
    const FrameType type = !options_.write_ahead ? FrameType::kOperation
                           : has_results         ? FrameType::kFinished
                                                 : FrameType::kBegun;
    frames::put_frame(type, options_.anonymise ? anonymiser_.apply(operation) : operation, buffer_);
    const auto added = static_cast<int64_t>(buffer_.size() - before);
    if (summary_.num_bytes + added > options_.max_bytes - kEndBytes) {
      buffer_.resize(before);
      return give_up(detail::concat("max_bytes ", options_.max_bytes, " was reached"));
    }
    summary_.num_bytes += added;
    if (has_results) ++summary_.num_operations;
    if (fd_ >= 0 && (options_.write_ahead || buffer_.size() >= kBufferBytes)) write_out();
  } catch (const std::exception& error) {
    if (buffer_.size() > before) buffer_.resize(before);
    give_up(error.what());
  }
}

void OperationRecorder::write_out() {
  for (size_t done = 0; done < buffer_.size();) {
    const ssize_t count = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const int code = errno;
      buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(done));
      throw std::runtime_error(detail::concat("write failed: ", std::strerror(code)));
    }
    done += static_cast<size_t>(count);
  }
  buffer_.clear();
}

void OperationRecorder::give_up(const std::string& problem) noexcept {
  is_over_ = true;
  log_error(detail::concat("kv.recording: ended early: ", problem));
  try {
    summary_.problem = problem;
  } catch (const std::exception&) {
    // The log then ends without a reason.
  }
}

void OperationRecorder::stopped() noexcept {
  if (!is_over_ && has_unknown_call()) give_up(kUnknownCall);
  is_over_ = true;
  try {
    const size_t before = buffer_.size();
    frames::put_frame(FrameType::kEnd, std::string_view(summary_.problem).substr(0, 200), buffer_);
    summary_.num_bytes += static_cast<int64_t>(buffer_.size() - before);
    if (fd_ >= 0) write_out();
  } catch (const std::exception& error) {
    if (summary_.problem.empty()) give_up(error.what());
  }
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void KVCacheManager::start_recording(const RecordingOptions& options) {
  options.validate();
  const auto check = [this] {  // with the lock
    constexpr const char* kWhere = "kv.start_recording";
    check_open(kWhere);
    HELICORE_KV_STATE(state_->recorder == nullptr, kWhere, "a recording is running");
    HELICORE_KV_STATE(state_->next_id == 0, kWhere,
                      "a recording begins before the first cache; this manager has made ",
                      state_->next_id);
    for (int level = 0; level < num_levels(); ++level) {
      HELICORE_KV_STATE(state_->sizer.serial(level) == 0, kWhere,
                        "a recording begins before the first resize of a level; level ", level,
                        " was resized");
    }
  };
  {
    const std::shared_lock lock(state_->mutex);
    check();  // before the file is touched
  }
  auto recorder = std::make_unique<OperationRecorder>(*state_, options);
  std::vector<int64_t> excluded;  // before: the log begins with them
  {
    const std::unique_lock lock(state_->mutex);
    check();
    excluded.assign(state_->sizer.excluded().begin(), state_->sizer.excluded().end());
    state_->recorder = recorder.get();
    state_->store.set_chooser(recorder.get());
    state_->sinks.push_back(std::move(recorder));
    state_->sink.store(state_->recorder, std::memory_order_release);
  }
  std::sort(excluded.begin(), excluded.end());
  for (const int64_t id : excluded) mark_stats_excluded(id);
}

RecordingSummary KVCacheManager::stop_recording() {
  OperationRecorder* recorder = nullptr;
  {
    const std::unique_lock lock(state_->mutex);
    HELICORE_KV_STATE(state_->recorder != nullptr, "kv.stop_recording", "no recording is running");
    recorder = std::exchange(state_->recorder, nullptr);
  }
  // Before the sink is taken away: a call that nobody sees may not come before one that is noted.
  RecordingSummary summary = recorder->finish();
  OperationSink* own = recorder;
  state_->sink.compare_exchange_strong(own, nullptr, std::memory_order_acq_rel);
  const std::unique_lock lock(state_->mutex);
  if (state_->recorder == nullptr) state_->store.set_chooser(nullptr);
  return summary;
}

bool KVCacheManager::is_recording() const {
  const std::shared_lock lock(state_->mutex);
  return state_->recorder != nullptr;
}

}  // namespace helicore::kv
