#include "helicore/kv/operation_log.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "helicore/core/error.h"
#include "helicore/kv/config_text.h"
#include "helicore/kv/crc32c.h"
#include "helicore/kv/operation_frames.h"

namespace helicore::kv {
namespace frames {
namespace {

constexpr const char* kWhere = "kv.operation_log";
// Lines of the header before the configuration; "slots.<level>.<pool group> = n" are among them.
constexpr std::string_view kStateEvery = "state_every";
constexpr std::string_view kAnonymised = "is_anonymised";
constexpr std::string_view kSlots = "slots";
constexpr std::string_view kGrain = "grain";  // once per level, in order
constexpr std::string_view kConfigPrefix = "config.";

void put_u32(uint32_t value, std::vector<std::byte>& out) {
  for (unsigned shift = 0; shift < 32; shift += 8) {
    out.push_back(static_cast<std::byte>(value >> shift));
  }
}

uint32_t get_u32(std::span<const std::byte> bytes) {
  uint32_t value = 0;
  for (unsigned i = 0; i < 4; ++i) value |= static_cast<uint32_t>(bytes[i]) << (8 * i);
  return value;
}

// Starts a frame; the payload follows it in `out`.
size_t begin_frame(FrameType type, std::vector<std::byte>& out) {
  const size_t at = out.size();
  out.resize(at + kFrameHeadBytes);
  out.push_back(static_cast<std::byte>(type));
  return at;
}

void end_frame(size_t at, std::vector<std::byte>& out) {
  const size_t size = out.size() - at - kFrameHeadBytes;
  std::vector<std::byte> head;
  put_u32(static_cast<uint32_t>(size), head);
  const uint32_t crc = crc32c(std::span(out).subspan(at + kFrameHeadBytes), crc32c(head));
  put_u32(crc, head);
  std::copy(head.begin(), head.end(), out.begin() + static_cast<std::ptrdiff_t>(at));
}

int64_t number_of(std::string_view text) {
  int64_t value = 0;
  const auto [ptr, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  HELICORE_CHECK(error == std::errc() && ptr == text.data() + text.size(), kWhere,
                 "the header holds '", text, "', must be a number");
  return value;
}

void parse_slots(std::string_view name, int64_t value, OperationLog& log) {
  const size_t dot = std::min(name.find('.'), name.size() - 1);
  log.slots.push_back({static_cast<int32_t>(number_of(name.substr(0, dot))),
                       static_cast<int32_t>(number_of(name.substr(dot + 1))), value});
}

}  // namespace

void put_prelude(std::vector<std::byte>& out) {
  const auto magic = std::as_bytes(std::span(kMagic));
  out.insert(out.end(), magic.begin(), magic.end());
  put_u32(kOperationLogVersion, out);
}

void put_frame(FrameType type, std::span<const std::byte> body, std::vector<std::byte>& out) {
  const size_t at = begin_frame(type, out);
  out.insert(out.end(), body.begin(), body.end());
  end_frame(at, out);
}

void put_frame(FrameType type, std::string_view text, std::vector<std::byte>& out) {
  put_frame(type, std::as_bytes(std::span(text)), out);
}

void put_frame(FrameType type, const Operation& operation, std::vector<std::byte>& out) {
  const size_t at = begin_frame(type, out);
  encode(operation, out);
  end_frame(at, out);
}

Frame take_frame(std::span<const std::byte>& bytes) {
  if (bytes.empty()) return {};
  if (bytes.size() < kFrameHeadBytes) return {.state = FrameState::kTorn};
  const uint32_t size = get_u32(bytes);
  if (size > bytes.size() - kFrameHeadBytes) return {.state = FrameState::kTorn};
  const auto payload = bytes.subspan(kFrameHeadBytes, size);
  const bool is_last = kFrameHeadBytes + size == bytes.size();
  if (size == 0 || get_u32(bytes.subspan(4)) != crc32c(payload, crc32c(bytes.first(4)))) {
    return {.state = is_last ? FrameState::kTorn : FrameState::kDamaged};
  }
  bytes = bytes.subspan(kFrameHeadBytes + size);
  return {FrameState::kSound, static_cast<FrameType>(payload[0]), payload.subspan(1)};
}

std::string header_text(const OperationLog& log) {
  std::string text = detail::concat(kStateEvery, " = ", log.state_every, "\n", kAnonymised, " = ",
                                    log.is_anonymised ? 1 : 0, "\n");
  for (const RecordedSlots& slots : log.slots) {
    text += detail::concat(kSlots, ".", slots.level, ".", slots.pool_group, " = ", slots.num_slots,
                           "\n");
  }
  for (const int64_t grain : log.grains) text += detail::concat(kGrain, " = ", grain, "\n");
  const std::string config = config_to_text(log.config);
  for (size_t begin = 0; begin < config.size();) {
    const size_t end = config.find('\n', begin) + 1;
    text += kConfigPrefix;
    text.append(config, begin, end - begin);
    begin = end;
  }
  return text;
}

void parse_header(std::string_view text, OperationLog& log) {
  std::string config;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t at = line.find(" = ");
    HELICORE_CHECK(at != std::string_view::npos, kWhere, "the header holds '", line,
                   "', must be 'name = value'");
    const std::string_view name = line.substr(0, at);
    const std::string_view value = line.substr(at + 3);
    if (name.starts_with(kConfigPrefix)) {
      config.append(line.substr(kConfigPrefix.size()));
      config += '\n';
    } else if (name == kStateEvery) {
      log.state_every = static_cast<int32_t>(number_of(value));
    } else if (name == kAnonymised) {
      log.is_anonymised = number_of(value) != 0;
    } else if (name == kGrain) {
      log.grains.push_back(number_of(value));
    } else if (name.starts_with(kSlots) && name.size() > kSlots.size() + 1) {
      parse_slots(name.substr(kSlots.size() + 1), number_of(value), log);
    }  // else: of a later writer, not needed to replay
  }
  log.config = config_from_text(config);
}

}  // namespace frames

namespace {

using frames::Frame;
using frames::FrameState;
using frames::FrameType;

// Puts frames behind each other into `log`; false at the end of what can be used.
class LogReader {
 public:
  explicit LogReader(OperationLog& log) : log_(log) {}

  bool take(const Frame& frame) {
    switch (frame.state) {
      case FrameState::kNone:
        return false;
      case FrameState::kTorn:
        log_.end = LogEnd::kTorn;
        return false;
      case FrameState::kDamaged:
        return damaged("does not fit its checksum");
      case FrameState::kSound:
        break;
    }
    switch (frame.type) {
      case FrameType::kOperation:
      case FrameType::kBegun:
        if (has_begun_) return damaged("follows one without results");
        has_begun_ = frame.type == FrameType::kBegun;
        return take_operation(frame, true);
      case FrameType::kFinished:
        if (!has_begun_) return damaged("has results but no arguments");
        has_begun_ = false;
        return take_operation(frame, false);
      case FrameType::kEnd:
        log_.end = LogEnd::kComplete;
        log_.problem.assign(reinterpret_cast<const char*>(frame.body.data()), frame.body.size());
        return false;
      case FrameType::kHeader:
        break;
    }
    return damaged("is of an unknown type");
  }

 private:
  bool take_operation(const Frame& frame, bool is_new) {
    auto operation = decode_operation(frame.body);
    if (!operation) return damaged("can't be decoded");
    if (!is_new) log_.operations.pop_back();
    log_.operations.push_back(std::move(*operation));
    return true;
  }
  bool damaged(const char* how) {
    log_.end = LogEnd::kDamaged;
    log_.problem = detail::concat("the record of operation ", log_.operations.size(), " ", how);
    return false;
  }

  OperationLog& log_;
  bool has_begun_ = false;
};

}  // namespace

std::string_view name_of(LogEnd end) noexcept {
  constexpr std::array<std::string_view, 4> kNames = {"COMPLETE", "OPEN", "TORN", "DAMAGED"};
  return kNames[std::min(static_cast<size_t>(end), kNames.size() - 1)];
}

void RecordingOptions::validate() const {
  constexpr const char* kWhere = "kv.start_recording";
  HELICORE_CHECK(max_bytes > 0, kWhere, "max_bytes must be > 0, got ", max_bytes);
  HELICORE_CHECK(state_every >= 0, kWhere, "state_every must be >= 0, got ", state_every);
  HELICORE_CHECK(!write_ahead || !path.empty(), kWhere, "write_ahead needs a path");
}

OperationLog OperationLog::parse(std::span<const std::byte> bytes) {
  using frames::kMagic;
  HELICORE_CHECK(bytes.size() >= frames::kPreludeBytes &&
                     std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0,
                 frames::kWhere, "the bytes are no operation log");
  const uint32_t version = frames::get_u32(bytes.subspan(kMagic.size()));
  if (version != kOperationLogVersion) {
    throw NotSupported(detail::concat("[", frames::kWhere, "] the log is of version ", version,
                                      "; this build reads version ", kOperationLogVersion));
  }
  bytes = bytes.subspan(frames::kPreludeBytes);
  const Frame header = frames::take_frame(bytes);
  HELICORE_CHECK(header.state == FrameState::kSound && header.type == FrameType::kHeader,
                 frames::kWhere, "the header of the log is damaged");
  OperationLog log;
  frames::parse_header({reinterpret_cast<const char*>(header.body.data()), header.body.size()},
                       log);
  LogReader reader(log);
  while (reader.take(frames::take_frame(bytes))) {
  }
  return log;
}

OperationLog OperationLog::load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  HELICORE_CHECK(file.is_open(), frames::kWhere, "path must be a file that can be read, got '",
                 path, "'");
  const std::vector<char> content{std::istreambuf_iterator<char>(file), {}};
  return parse(std::as_bytes(std::span(content)));
}

std::vector<std::byte> OperationLog::serialise() const {
  std::vector<std::byte> bytes;
  frames::put_prelude(bytes);
  frames::put_frame(FrameType::kHeader, frames::header_text(*this), bytes);
  for (const Operation& operation : operations) {
    frames::put_frame(FrameType::kOperation, operation, bytes);
  }
  if (end == LogEnd::kComplete) frames::put_frame(FrameType::kEnd, problem, bytes);
  return bytes;
}

}  // namespace helicore::kv
