#include "helicore/kv/replay_device.h"

#include <algorithm>
#include <utility>

namespace helicore::kv {
namespace {

// A size and nothing behind it.
class EmptyPool final : public MemoryPool {
 public:
  explicit EmptyPool(int64_t num_bytes) : num_bytes_(num_bytes) {}
  [[nodiscard]] int64_t num_bytes() const noexcept override { return num_bytes_; }
  void resize(int64_t num_bytes) override { num_bytes_ = num_bytes; }
  [[nodiscard]] std::byte* data() const noexcept override { return nullptr; }

 private:
  int64_t num_bytes_;
};

// Work on the stream of a GPU is done when a call returns.
StreamHandle here(StreamHandle stream) { return std::min<StreamHandle>(stream, 0); }

}  // namespace

ReplayDevice::ReplayDevice(DeviceType type, std::vector<int64_t> grains)
    : type_(type), order_(make_cache_device({})), grains_(std::move(grains)) {}

void ReplayDevice::prepare(std::vector<int64_t> lost, bool is_held_back) noexcept {
  lost_ = std::move(lost);
  is_held_back_ = is_held_back;
}

int64_t ReplayDevice::grain(CacheTier tier, int64_t quota) const noexcept {
  const size_t level = num_grains_++;
  return level < grains_.size() ? grains_[level] : default_grain(tier, quota);
}

std::unique_ptr<MemoryPool> ReplayDevice::make_pool(const PoolSpec& spec) {
  return std::make_unique<EmptyPool>(spec.num_bytes);
}

TimePoint ReplayDevice::record(StreamHandle stream) { return order_->record(here(stream)); }

void ReplayDevice::wait(StreamHandle stream, std::span<const TimePoint> points) {
  order_->wait(here(stream), points);
}

bool ReplayDevice::reached(TimePoint point) const noexcept {
  if (order_->reached(point)) return true;
  if (!order_->is_waitable(point)) return false;
  order_->synchronize(point);
  return true;
}

bool ReplayDevice::is_waitable(TimePoint point) const noexcept {
  return order_->is_waitable(point);
}

void ReplayDevice::synchronize(TimePoint point) { order_->synchronize(point); }

TimePoint ReplayDevice::join(TimePoint a, TimePoint b) { return order_->join(a, b); }

TimePoint ReplayDevice::copy(std::span<const CopyTask>, std::span<const TimePoint> after) {
  return order_->copy({}, after);
}

void ReplayDevice::copy_on(StreamHandle, std::span<const CopyTask>) {}

uint64_t ReplayDevice::num_failures() const noexcept { return num_taken_ + (is_due() ? 1 : 0); }

std::vector<uint64_t> ReplayDevice::take_failures() {
  if (!is_due()) return {};
  ++num_taken_;
  const auto end =
      lost_.begin() + 2 + std::clamp<std::ptrdiff_t>(lost_[1], 0, std::ssize(lost_) - 2);
  const std::vector<uint64_t> tags(lost_.begin() + 2, end);
  lost_.erase(lost_.begin(), end);
  return tags;
}

bool ReplayDevice::is_due() const noexcept {
  return lost_.size() >= 2 && sink_ != nullptr && sink_->is_inside() && sink_->stage() == lost_[0];
}

StreamHandle ReplayDevice::make_step_stream() { return order_->make_step_stream(); }

uint64_t ReplayDevice::submit_step(StreamHandle stream) { return order_->submit_step(stream); }

void ReplayDevice::complete_step(StreamHandle stream, uint64_t step) {
  order_->complete_step(stream, step);
}

}  // namespace helicore::kv
