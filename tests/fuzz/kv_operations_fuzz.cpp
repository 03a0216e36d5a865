// Fuzz target over the KV cache manager: an input is a configuration and a sequence of calls. See
// tests/cpp/kv/operation_driver.h for what is checked; one input in four is also recorded and
// replayed. Built twice: for libFuzzer, and with a main of its own for compilers without it.
//
//   kv_operations_fuzz -max_len=1024 corpus/           (clang, HELICORE_FUZZ=ON)
//   kv_operations_corpus --generate 500                runs 500 generated inputs
//   kv_operations_corpus --write-seeds FOLDER 200      writes them as files
//   kv_operations_corpus --log calls.ops INPUT         runs one and records it, written ahead
//   kv_operations_corpus INPUT|LOG.ops|FOLDER...       runs files, inputs or logs of calls
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "helicore/kv/operation_log.h"
#include "helicore/kv/operation_replay.h"
#include "kv/operation_driver.h"

namespace {

using namespace helicore::kv;
using helicore::kv::testing::ByteSource;
using helicore::kv::testing::driver_config;
using helicore::kv::testing::driver_device;
using helicore::kv::testing::DriverConfig;
using helicore::kv::testing::inject_faults;
using helicore::kv::testing::OperationDriver;

constexpr int kMaxOperations = 400;

[[noreturn]] void report(const std::string& what) {
  std::fprintf(stderr, "kv_operations_fuzz: %s\n", what.c_str());
  std::abort();
}

// Drives a manager; the log of its calls when it is to be replayed. With a path the calls are
// written there before they run.
std::optional<OperationLog> drive(ByteSource& source, bool replays, const std::string& log_path) {
  const DriverConfig config = driver_config(source);
  const bool is_recorded = replays || !log_path.empty();
  auto [device, fake] = driver_device(config);
  const auto ledger = fake == nullptr ? nullptr : fake->ledger();
  std::optional<OperationLog> log;
  {
    KVCacheManager manager(config.config, std::move(device));
    if (config.may_fail) inject_faults(*fake, !is_recorded);
    if (is_recorded) {
      manager.start_recording(
          {.path = log_path, .state_every = 1, .write_ahead = !log_path.empty()});
    }
    OperationDriver(manager, config, fake, source).run(kMaxOperations);
    if (is_recorded) {
      const auto summary = manager.stop_recording();
      if (!summary.problem.empty()) report("the recording ended: " + summary.problem);
      if (log_path.empty()) log = OperationLog::parse(summary.bytes);
    }
  }
  if (ledger != nullptr && !ledger->violations.empty()) report(ledger->violations.front());
  if (ledger != nullptr && ledger->num_pools > 0) report("pools outlive their manager");
  return log;
}

// Aborts when anything is wrong.
void run_input(std::span<const uint8_t> input, const std::string& log_path) {
  ByteSource source(input);
  try {
    const auto log = drive(source, source.one_in(4), log_path);
    if (!log) return;
    const auto result = Replayer(*log, {.check_every = 0}).run();
    if (result.difference) report("the replay differs: " + describe(result));
  } catch (const std::exception& error) {
    report(error.what());
  }
}

}  // namespace

#ifdef HELICORE_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  run_input({data, size}, "");
  return 0;
}

#else

namespace {

namespace fs = std::filesystem;

// Runs the calls of an operation log, as a regression input.
void run_log(std::span<const uint8_t> bytes) {
  try {
    const auto log = OperationLog::parse(std::as_bytes(bytes));
    Replayer replayer(log, {.check_every = 1});
    // Later builds may answer otherwise: what counts is that no call breaks anything.
    while (replayer.next() < log.operations.size()) {
      const auto difference = replayer.step();
      if (difference && difference->what.starts_with("broken invariant")) report(difference->what);
    }
  } catch (const std::exception& error) {
    report(error.what());
  }
}

// Random bytes; longer ones fill the pools.
std::vector<uint8_t> generated_input(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(32 + random() % 1000);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

std::vector<uint8_t> read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) report("can't read " + path.string());
  const std::vector<char> content{std::istreambuf_iterator<char>(file), {}};
  return {content.begin(), content.end()};
}

void run_file(const fs::path& path, const std::string& log_path) {
  if (path.extension() == ".ops") return run_log(read_file(path));
  run_input(read_file(path), log_path);
}

size_t run_path(const fs::path& path, const std::string& log_path) {
  if (!fs::is_directory(path)) {
    run_file(path, log_path);
    return 1;
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) run_file(file, log_path);
  return files.size();
}

uint64_t write_seeds(const fs::path& folder, uint64_t count) {
  fs::create_directories(folder);
  for (uint64_t seed = 1; seed <= count; ++seed) {
    const auto bytes = generated_input(seed);
    std::ofstream(folder / ("seed-" + std::to_string(seed)), std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
  return count;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  std::string log_path;
  uint64_t count = 0;
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i] == "--generate" && i + 1 < args.size()) {
      const uint64_t last = std::stoull(args[++i]);
      for (uint64_t seed = 1; seed <= last; ++seed) run_input(generated_input(seed), log_path);
      count += last;
    } else if (args[i] == "--write-seeds" && i + 2 < args.size()) {
      count += write_seeds(args[i + 1], std::stoull(args[i + 2]));
      i += 2;
    } else if (args[i] == "--log" && i + 1 < args.size()) {
      log_path = args[++i];
    } else {
      count += run_path(args[i], log_path);
    }
  }
  std::printf("%llu inputs\n", static_cast<unsigned long long>(count));
  return count > 0 ? 0 : 2;
}

#endif
