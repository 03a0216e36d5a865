#include "helicore/kv/operation_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "helicore/core/error.h"
#include "helicore/kv/errors.h"
#include "helicore/kv/kv_cache_manager.h"
#include "helicore/kv/operation_frames.h"
#include "helicore/kv/operation_recorder.h"
#include "kv/kv_configs.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

constexpr int32_t kTokensPerBlock = 4;

Bytes recorded_bytes(RecordingOptions options = {}) {
  KVCacheManager manager(attention_config(kTokensPerBlock, 8));
  manager.start_recording(options);
  const auto tokens = iota_tokens(10, 500);
  auto cache = manager.create_kv_cache(
      {.reuse_scope = {.salt = std::string("secret")}, .input_tokens = tokens, .id = 77});
  EXPECT_TRUE(cache->resume(123456));
  EXPECT_FALSE(cache->resize(10000));
  EXPECT_TRUE(cache->resize(10, 5));
  cache->commit(tokens, true);
  EXPECT_THROW(cache->commit(tokens), LogicError);
  cache->close();
  return manager.stop_recording().bytes;
}
constexpr size_t kNumRecorded = 7;

TEST(Operation, bytes_come_back) {
  Operation operation{OperationKind::kCommit, {}};
  operation.set(OperationField::kCaches, 3);
  const std::vector<int32_t> tokens = {0, -1, INT32_MAX, INT32_MIN, 127, 128};
  operation.set_all(OperationField::kTokens, std::span<const int32_t>(tokens));
  operation.list(OperationField::kCounts) = {INT64_MIN, INT64_MAX, 0};
  operation.set_all(OperationField::kHistory, std::span<const int32_t>());
  Bytes bytes;
  encode(operation, bytes);
  EXPECT_EQ(decode_operation(bytes), operation);
  for (size_t size = 0; size < bytes.size(); ++size) {  // never more than what is there
    (void)decode_operation(std::span(bytes).first(size));
  }
  EXPECT_FALSE(decode_operation({}).has_value());
}

TEST(Operation, a_count_beyond_the_bytes_is_refused_without_memory) {
  const Bytes bytes = {std::byte{7},    std::byte{2},    std::byte{0xff}, std::byte{0xff},
                       std::byte{0xff}, std::byte{0xff}, std::byte{0x7f}, std::byte{1}};
  EXPECT_FALSE(decode_operation(bytes).has_value());
}

TEST(Operation, scopes_come_back_and_an_empty_salt_is_not_none) {
  for (const ReuseScope& scope :
       {ReuseScope{}, ReuseScope{.salt = std::string()}, ReuseScope{.salt = int64_t{-5}},
        ReuseScope{.lora_id = 4, .salt = std::string("\xff x"), .lora_generation = 2}}) {
    Operation operation{OperationKind::kCreate, {}};
    operation.set_scope(scope);
    EXPECT_EQ(operation.scope(), scope);
  }
}

TEST(Operation, is_described_in_words) {
  const auto log = OperationLog::parse(recorded_bytes());
  ASSERT_EQ(log.operations.size(), kNumRecorded);
  EXPECT_THAT(describe(log.operations[0]),
              HasSubstr("create_kv_cache(salt_text=[115, 101, 99, 114, 101, 116], tokens=[500"));
  EXPECT_THAT(describe(log.operations[0]), HasSubstr("new_cache=0, matched=0"));
  EXPECT_THAT(describe(log.operations[2]), HasSubstr("resize(cache=0, capacity=10000) -> no room"));
  EXPECT_THAT(describe(log.operations[2]), HasSubstr("reason=[0, 0, 0, 2500, 8, 0, 0]"));
  EXPECT_THAT(describe(log.operations[5]), HasSubstr("-> threw, error=LogicError"));
}

TEST(OperationLog, holds_the_config_the_slots_and_every_call) {
  const auto log = OperationLog::parse(recorded_bytes({.state_every = 2}));
  EXPECT_EQ(log.config, attention_config(kTokensPerBlock, 8));
  EXPECT_EQ(log.end, LogEnd::kComplete);
  EXPECT_EQ(log.problem, "");
  EXPECT_EQ(log.state_every, 2);
  EXPECT_EQ(log.slots, (std::vector<RecordedSlots>{{0, 0, 8}}));
  EXPECT_EQ(log.grains, (std::vector<int64_t>{4096}));
  ASSERT_EQ(log.operations.size(), kNumRecorded);
  for (size_t i = 0; i < log.operations.size(); ++i) {
    EXPECT_NE(log.operations[i].find(OperationField::kCounters), nullptr);
    EXPECT_EQ(log.operations[i].find(OperationField::kState) != nullptr, i % 2 == 1);
  }
  EXPECT_EQ(OperationLog::parse(log.serialise()).operations, log.operations);
}

TEST(OperationLog, a_tail_torn_anywhere_leaves_the_operations_before_it) {
  const Bytes bytes = recorded_bytes();
  const auto whole = OperationLog::parse(bytes);
  Bytes header;
  frames::put_prelude(header);
  frames::put_frame(frames::FrameType::kHeader, frames::header_text(whole), header);
  size_t last = 0;
  for (size_t size = header.size(); size < bytes.size(); ++size) {
    const auto log = OperationLog::parse(std::span(bytes).first(size));
    EXPECT_TRUE(log.end == LogEnd::kTorn || log.end == LogEnd::kOpen) << size;
    ASSERT_GE(log.operations.size(), last);
    last = log.operations.size();
    for (size_t i = 0; i < last; ++i) ASSERT_EQ(log.operations[i], whole.operations[i]);
  }
  EXPECT_EQ(last, kNumRecorded);
  for (size_t size = 0; size < header.size(); ++size) {
    EXPECT_THROW((void)OperationLog::parse(std::span(bytes).first(size)), InvalidArgument);
  }
}

TEST(OperationLog, a_flipped_bit_is_found_at_the_right_operation) {
  const Bytes bytes = recorded_bytes();
  const auto whole = OperationLog::parse(bytes);
  OperationLog shorter = whole;
  shorter.end = LogEnd::kOpen;
  for (size_t index = 0; index < kNumRecorded; ++index) {
    shorter.operations.assign(whole.operations.begin(),
                              whole.operations.begin() + static_cast<std::ptrdiff_t>(index));
    const size_t begin = shorter.serialise().size();
    Bytes damaged = bytes;
    damaged[begin + frames::kFrameHeadBytes + 2] ^= std::byte{4};
    const auto log = OperationLog::parse(damaged);
    EXPECT_EQ(log.end, LogEnd::kDamaged);
    EXPECT_EQ(log.operations.size(), index);
    EXPECT_THAT(log.problem, HasSubstr("operation " + std::to_string(index)));
  }
}

TEST(OperationLog, another_version_and_other_files_are_refused) {
  Bytes bytes = recorded_bytes();
  bytes[frames::kMagic.size()] = std::byte{2};
  try {
    (void)OperationLog::parse(bytes);
    FAIL() << "accepted";
  } catch (const NotSupported& error) {
    EXPECT_THAT(error.what(), HasSubstr("version 2"));
  }
  bytes[0] ^= std::byte{1};
  EXPECT_THROW((void)OperationLog::parse(bytes), InvalidArgument);
  EXPECT_THROW((void)OperationLog::load("/nowhere/at all"), InvalidArgument);
}

TEST(Recording, a_file_holds_what_memory_would) {
  const TempDir dir;
  const std::string path = dir.file("calls.ops");
  EXPECT_TRUE(recorded_bytes({.path = path}).empty());
  EXPECT_EQ(OperationLog::load(path).operations, OperationLog::parse(recorded_bytes()).operations);
  using std::filesystem::perms;
  EXPECT_EQ(std::filesystem::status(path).permissions() & (perms::group_all | perms::others_all),
            perms::none)
      << "prompts are for their owner alone";
}

TEST(Recording, written_ahead_the_call_that_is_running_is_in_the_file) {
  const TempDir dir;
  const std::string path = dir.file("calls.ops");
  KVCacheManager manager(attention_config(kTokensPerBlock, 8));
  manager.start_recording({.path = path, .write_ahead = true});
  auto cache = manager.create_kv_cache();
  EXPECT_TRUE(cache->resume());
  auto log = OperationLog::load(path);
  EXPECT_EQ(log.end, LogEnd::kOpen) << "nothing waits in a buffer";
  EXPECT_EQ(log.operations.size(), 2u);

  Bytes bytes;
  frames::put_frame(frames::FrameType::kBegun, log.operations[1], bytes);
  std::ofstream(path, std::ios::app | std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  log = OperationLog::load(path);
  EXPECT_EQ(log.operations.size(), 3u);
}

TEST(Recording, begins_before_the_first_cache_and_once) {
  const TempDir dir;
  KVCacheManager manager(attention_config(kTokensPerBlock, 8));
  EXPECT_THROW((void)manager.stop_recording(), LogicError);
  EXPECT_THROW(manager.start_recording({.max_bytes = 0}), InvalidArgument);
  EXPECT_THROW(manager.start_recording({.state_every = -1}), InvalidArgument);
  EXPECT_THROW(manager.start_recording({.write_ahead = true}), InvalidArgument);
  EXPECT_THROW(manager.start_recording({.path = "/nowhere/calls.ops"}), InvalidArgument);
  EXPECT_FALSE(manager.is_recording());
  const std::string path = dir.file("calls.ops");
  manager.start_recording({.path = path});
  EXPECT_TRUE(manager.is_recording());
  EXPECT_THROW(manager.start_recording({.path = path}), LogicError);
  (void)manager.create_kv_cache();
  EXPECT_EQ(manager.stop_recording().num_operations, 2u);
  EXPECT_FALSE(manager.is_recording());
  EXPECT_THROW(manager.start_recording({}), LogicError);
  KVCacheManager resized(attention_config(kTokensPerBlock, 8));
  (void)resized.resize(kHotLevel, 2 * resized.quota(kHotLevel));
  EXPECT_THROW(resized.start_recording({}), LogicError);
  EXPECT_EQ(OperationLog::load(path).operations.size(), 2u)
      << "a refused start left the file alone";
}

TEST(Recording, that_reaches_its_limit_ends_and_says_so) {
  KVCacheManager manager(attention_config(kTokensPerBlock, 8));
  manager.start_recording({.max_bytes = 2000});
  for (int i = 0; i < 500; ++i) (void)manager.create_kv_cache();
  const auto summary = manager.stop_recording();
  EXPECT_THAT(summary.problem, HasSubstr("max_bytes 2000"));
  EXPECT_LE(summary.num_bytes, 2000);
  EXPECT_EQ(summary.num_bytes, static_cast<int64_t>(summary.bytes.size()));
  const auto log = OperationLog::parse(summary.bytes);
  EXPECT_EQ(log.operations.size(), summary.num_operations);
  EXPECT_GT(summary.num_operations, 5u);
  EXPECT_EQ(log.problem, summary.problem);
}

TEST(Recording, a_disk_that_is_full_ends_the_recording_and_not_the_work) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "needs /dev/full";
  KVCacheManager manager(attention_config(kTokensPerBlock, 8));
  EXPECT_THROW(manager.start_recording({.path = "/dev/full"}), InvalidArgument);
  auto cache = manager.create_kv_cache();
  EXPECT_TRUE(cache->resume());
}

TEST(Recording, ends_with_its_manager) {
  const TempDir dir;
  const std::string path = dir.file("calls.ops");
  {
    KVCacheManager manager(attention_config(kTokensPerBlock, 8));
    manager.start_recording({.path = path});
    (void)manager.create_kv_cache();
  }
  EXPECT_EQ(OperationLog::load(path).end, LogEnd::kComplete);
}

TEST(Anonymiser, equal_stays_equal_and_nothing_can_be_read) {
  const auto log = OperationLog::parse(recorded_bytes({.anonymise = true}));
  EXPECT_TRUE(log.is_anonymised);
  const auto* prompt = log.operations[0].find(OperationField::kTokens);
  EXPECT_THAT(*prompt, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_EQ(*log.operations[4].find(OperationField::kTokens), *prompt);
  EXPECT_EQ(std::get<std::string>(log.operations[0].scope().salt), "0");
  for (const Operation& operation : log.operations) {
    EXPECT_LT(operation.get(OperationField::kId).value_or(-1), 0);
    EXPECT_EQ(operation.find(OperationField::kStream), nullptr);
  }
  Anonymiser anonymiser;
  Operation operation{OperationKind::kCommit, {}};
  operation.list(OperationField::kTokens) = {9, -7, 9, 4};
  EXPECT_THAT(*anonymiser.apply(operation).find(OperationField::kTokens), ElementsAre(0, -1, 0, 1));
}

}  // namespace
}  // namespace helicore::kv::testing
