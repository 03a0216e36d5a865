// The sink that writes an operation log. Internal: users call KVCacheManager::start_recording().
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "helicore/kv/operation_log.h"
#include "helicore/kv/operation_sink.h"

namespace helicore::kv {

// Replaces what could be read by numbers in the order of appearance, the same number for the same
// value. Negative tokens, which only misuse has, become -1. Ids become negative numbers, those that
// the manager gave too: -1 for the first.
class Anonymiser {
 public:
  [[nodiscard]] Operation apply(const Operation& operation);

 private:
  std::unordered_map<int64_t, int64_t> tokens_;
  std::unordered_map<int64_t, int64_t> salt_numbers_;
  std::unordered_map<std::string, int64_t> salt_texts_;
  std::unordered_map<int64_t, int64_t> ids_;
};

// Appends to a buffer that goes to the file when it is full; in memory the buffer is the log. When
// writing fails or max_bytes is reached the recording ends; the manager goes on.
class OperationRecorder final : public OperationSink {
 public:
  // Throws InvalidArgument when the file can't be made.
  OperationRecorder(const ManagerState& state, RecordingOptions options);
  ~OperationRecorder() override;

  // Ends the recording if it has not ended; the bytes can be had once.
  [[nodiscard]] RecordingSummary finish();

 private:
  void begun(const Operation& operation) noexcept override;
  void finished(const Operation& operation) noexcept override;
  void stopped() noexcept override;

  void append(const Operation& operation, bool has_results) noexcept;
  void write_out();
  void give_up(const std::string& problem) noexcept;

  RecordingOptions options_;
  RecordingSummary summary_;
  Anonymiser anonymiser_;
  std::vector<std::byte> buffer_;
  int fd_ = -1;
  bool is_over_ = false;
};

}  // namespace helicore::kv
