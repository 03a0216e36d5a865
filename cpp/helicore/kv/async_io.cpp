#include "helicore/kv/async_io.h"

#include <algorithm>
#include <cstring>

#include "helicore/core/error.h"
#include "helicore/kv/io_queue.h"

namespace helicore::kv {

std::string describe(const IoStatus& status) {
  if (status.error == kErrorEof) {
    return detail::concat("end of file after ", status.num_bytes, " bytes");
  }
  if (status.error == 0) return detail::concat("ok, ", status.num_bytes, " bytes");
  return detail::concat(std::strerror(status.error), " after ", status.num_bytes, " bytes");
}

bool IoResult::ok() const noexcept { return error() == 0; }

int IoResult::error() const noexcept {
  const auto failed = std::find_if(requests.begin(), requests.end(),
                                   [](const IoStatus& status) { return status.error != 0; });
  return failed == requests.end() ? 0 : failed->error;
}

void AsyncIoConfig::validate() const {
  const char* where = "kv.async_io";
  HELICORE_CHECK(queue_capacity > 0, where, "queue_capacity must be > 0, got ", queue_capacity);
  HELICORE_CHECK(depth >= 1 && depth <= 4096, where, "depth must be in 1..4096, got ", depth);
  HELICORE_CHECK(num_threads >= 1 && num_threads <= 256, where,
                 "num_threads must be in 1..256, got ", num_threads);
  HELICORE_CHECK(max_transfer_bytes > 0, where, "max_transfer_bytes must be > 0, got ",
                 max_transfer_bytes);
}

std::unique_ptr<AsyncIo> make_async_io(const AsyncIoConfig& config) {
  config.validate();
  if (config.backend == IoBackend::kThreads) return make_thread_io(config);
  std::string why_not;
  auto io = make_uring_io(config, &why_not);
  if (io != nullptr) return io;
  if (config.backend == IoBackend::kAuto) return make_thread_io(config);
  throw NotSupported("[kv.async_io] io_uring can't be used here: " + why_not);
}

std::string why_no_io_uring() {
  std::string why_not;
  static_cast<void>(make_uring_io({.queue_capacity = 1, .depth = 1}, &why_not));
  return why_not;
}

}  // namespace helicore::kv
