// Copies between cache tiers against what the machine can do in the same run. One JSON object a
// line: the route, bytes of a page, GB/s (median) and the share of its yardstick.
//   kv_copy_bench cpu DIR [MIB]     host <-> host, host <-> file in DIR
//   kv_copy_bench cuda DIR [MIB]    also GPU <-> host and GPU <-> file, for the first GPU
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/kv/cache_device.h"

#ifdef HELICORE_WITH_CUDA
#include <cuda_runtime_api.h>

#include "helicore/core/cuda/check.h"
#include "helicore/kv/cuda/page_copy.h"
#endif

namespace helicore::kv {
namespace {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int kRounds = 9;

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Median of GB/s; `prepare` is not timed.
double rate(
    int64_t num_bytes, int rounds, const std::function<void()>& work,
    const std::function<void()>& prepare = [] {}) {
  std::vector<double> times;
  for (int i = 0; i <= rounds; ++i) {  // the first one warms up
    prepare();
    const double seconds = seconds_of(work);
    if (i > 0) times.push_back(seconds);
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return static_cast<double>(num_bytes) / times[static_cast<size_t>(rounds / 2)] / 1e9;
}

void print(const std::string& route, int64_t page_bytes, double gb_per_s, double yardstick) {
  std::printf(
      "{\"bench\": \"kv_copy\", \"route\": \"%s\", \"page_bytes\": %lld, \"gb_per_s\": %.2f, "
      "\"share\": %.3f}\n",
      route.c_str(), static_cast<long long>(page_bytes), gb_per_s,
      yardstick > 0 ? gb_per_s / yardstick : 1.0);
  std::fflush(stdout);
}

// Pages in a random order on both sides, no two alike.
std::vector<CopyTask> scattered(const MemoryPool& dst, const MemoryPool& src, int64_t page_bytes) {
  std::mt19937_64 random(7);
  std::vector<int64_t> from(static_cast<size_t>(src.num_bytes() / page_bytes));
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<int64_t>(i) * page_bytes;
  std::vector<int64_t> to = from;
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  std::vector<CopyTask> tasks;
  for (size_t i = 0; i < from.size(); ++i) {
    tasks.push_back({&dst, &src, to[i], from[i], page_bytes, i});
  }
  return tasks;
}

class Bench {
 public:
  Bench(DeviceType type, std::string directory, int64_t num_bytes)
      : device_(make_cache_device({.type = type})),
        directory_(std::move(directory)),
        num_bytes_(num_bytes) {}

  void host() {
    const auto a = pool(CacheTier::kHostMem), b = pool(CacheTier::kHostMem);
    std::memset(a->data(), 1, static_cast<size_t>(num_bytes_));
    std::memset(b->data(), 2, static_cast<size_t>(num_bytes_));
    const double yardstick = rate(num_bytes_, kRounds, [&] {
      std::memcpy(b->data(), a->data(), static_cast<size_t>(num_bytes_));
    });
    print("host: one memcpy", num_bytes_, yardstick, 0);
    for (const int64_t page : {16 * kKiB, 64 * kKiB, kMiB}) {
      print("host to host", page, copy_rate(*b, *a, page), yardstick);
    }
  }

  // Writes are timed until they are on the disk, reads start from the disk.
  void disk(CacheTier tier) {
    const char* name = tier == CacheTier::kGpuMem ? "gpu" : "host";
    const auto memory = pool(tier), file = pool(CacheTier::kDisk);
    const auto [write_yardstick, read_yardstick] = sequential();
    for (const int64_t page : {64 * kKiB, kMiB}) {
      const auto down = scattered(*file, *memory, page), up = scattered(*memory, *file, page);
      const auto flush = [&] { expect(::fdatasync(file->fd()) == 0, "fdatasync"); };
      const auto drop = [&] {
        flush();
        expect(::posix_fadvise(file->fd(), 0, 0, POSIX_FADV_DONTNEED) == 0, "fadvise");
      };
      print(std::string(name) + " to disk", page,
            rate(num_bytes_, 3,
                 [&] {
                   device_->synchronize(device_->copy(down, {}));
                   flush();
                 }),
            write_yardstick);
      print(std::string("disk to ") + name, page,
            rate(
                num_bytes_, 3, [&] { device_->synchronize(device_->copy(up, {})); }, drop),
            read_yardstick);
      print(std::string("cached file to ") + name, page,
            rate(num_bytes_, 3, [&] { device_->synchronize(device_->copy(up, {})); }), 0);
    }
    expect(device_->num_failures() == 0, "copies to and from the disk");
  }

#ifdef HELICORE_WITH_CUDA
  void gpu() {
    const auto gpu = pool(CacheTier::kGpuMem), host = pool(CacheTier::kHostMem);
    std::memset(host->data(), 1, static_cast<size_t>(num_bytes_));
    cudaStream_t stream = nullptr;
    cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    const auto finish = [&] { cuda::check(cudaStreamSynchronize(stream), "synchronize"); };
    for (const auto direction : {CopyDirection::kToGpu, CopyDirection::kFromGpu}) {
      const bool up = direction == CopyDirection::kToGpu;
      const MemoryPool &dst = up ? *gpu : *host, &src = up ? *host : *gpu;
      const std::string name = up ? "host to gpu" : "gpu to host";
      const double yardstick = rate(num_bytes_, kRounds, [&] {
        cuda::check(cudaMemcpyAsync(dst.data(), src.data(), static_cast<size_t>(num_bytes_),
                                    cudaMemcpyDefault, stream),
                    "copy");
        finish();
      });
      print(name + ": one cudaMemcpyAsync", num_bytes_, yardstick, 0);
      for (const int64_t page :
           {4 * kKiB, 16 * kKiB, 64 * kKiB, 128 * kKiB, 256 * kKiB, 512 * kKiB, kMiB, 4 * kMiB}) {
        print(name, page, copy_rate(dst, src, page), yardstick);
        std::vector<PageCopyTask> raw;
        for (const CopyTask& task : scattered(dst, src, page)) {
          raw.push_back({dst.data() + task.dst_offset, src.data() + task.src_offset, page});
        }
        print(name + ", kernel", page,
              rate(num_bytes_, kRounds,
                   [&] {
                     cuda::check(launch_page_copy(raw, direction, stream), "launch");
                     finish();
                   }),
              yardstick);
        batch_rate(name, raw, yardstick, stream);
        print(name + ", copy engine", page,
              rate(num_bytes_, kRounds,
                   [&] {
                     for (const PageCopyTask& task : raw) {
                       cuda::check(cudaMemcpyAsync(task.dst, task.src, static_cast<size_t>(page),
                                                   cudaMemcpyDefault, stream),
                                   "copy");
                     }
                     finish();
                   }),
              yardstick);
      }
      latency(name, dst, src);
    }
    within_gpu(*gpu, stream);
    cuda::check(cudaStreamDestroy(stream), "stream");
  }

 private:
  void batch_rate(const std::string& name, const std::vector<PageCopyTask>& tasks, double yardstick,
                  cudaStream_t stream) {
    std::vector<void*> dsts;
    std::vector<const void*> srcs;
    std::vector<size_t> sizes;
    for (const PageCopyTask& task : tasks) {
      dsts.push_back(task.dst);
      srcs.push_back(task.src);
      sizes.push_back(static_cast<size_t>(task.num_bytes));
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    print(name + ", batched copy engine", tasks.front().num_bytes,
          rate(num_bytes_, kRounds,
               [&] {
                 cuda::check(cudaMemcpyBatchAsync(dsts.data(), srcs.data(), sizes.data(),
                                                  sizes.size(), &attributes, &first, 1, stream),
                             "batch");
                 cuda::check(cudaStreamSynchronize(stream), "synchronize");
               }),
          yardstick);
  }

  void latency(const std::string& name, const MemoryPool& dst, const MemoryPool& src) {
    for (const int64_t page : {4 * kKiB, 64 * kKiB}) {
      std::vector<double> times;
      for (int i = 0; i < 200; ++i) {
        times.push_back(seconds_of([&] {
          const TimePoint done = device_->copy({{{&dst, &src, 0, 0, page, 0}}}, {});
          while (!device_->reached(done)) {
          }
        }));
      }
      std::nth_element(times.begin(), times.begin() + 100, times.end());
      std::printf(
          "{\"bench\": \"kv_copy\", \"route\": \"%s, one page\", \"page_bytes\": %lld, "
          "\"microseconds\": %.1f}\n",
          name.c_str(), static_cast<long long>(page), times[100] * 1e6);
    }
  }

  void within_gpu(const MemoryPool& gpu, cudaStream_t stream) {
    const auto other = pool(CacheTier::kGpuMem);
    const auto finish = [&] { cuda::check(cudaStreamSynchronize(stream), "synchronize"); };
    const double yardstick = rate(num_bytes_, kRounds, [&] {
      cuda::check(cudaMemcpyAsync(other->data(), gpu.data(), static_cast<size_t>(num_bytes_),
                                  cudaMemcpyDefault, stream),
                  "copy");
      finish();
    });
    print("gpu to gpu: one cudaMemcpyAsync", num_bytes_, yardstick, 0);
    for (const int64_t page : {16 * kKiB, 64 * kKiB, kMiB}) {
      const auto tasks = scattered(*other, gpu, page);
      print("gpu to gpu", page,
            rate(num_bytes_, kRounds,
                 [&] {
                   device_->copy_on(reinterpret_cast<StreamHandle>(stream), tasks);
                   finish();
                 }),
            yardstick);
    }
  }
#endif

 private:
  static void expect(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "kv_copy_bench: %s failed\n", what);
    std::exit(1);
  }
  std::unique_ptr<MemoryPool> pool(CacheTier tier) {
    return device_->make_pool({tier, num_bytes_, num_bytes_, directory_});
  }
  double copy_rate(const MemoryPool& dst, const MemoryPool& src, int64_t page_bytes) {
    const auto tasks = scattered(dst, src, page_bytes);
    return rate(num_bytes_, kRounds, [&] { device_->synchronize(device_->copy(tasks, {})); });
  }
  // GB/s of one thread that writes and reads a file from end to end past the page cache, or
  // through it where the file system knows no other way.
  std::pair<double, double> sequential() {
    std::string path = directory_ + "/kv-copy-XXXXXX";
    int fd = ::mkstemp(path.data());
    expect(fd >= 0, "mkstemp");
    const int direct = ::open(path.c_str(), O_RDWR | O_DIRECT);
    if (direct >= 0) {
      ::close(fd);
      fd = direct;
    }
    ::unlink(path.c_str());
    const int64_t block = 4 * kMiB;
    const std::unique_ptr<void, void (*)(void*)> buffer(
        std::aligned_alloc(4096, static_cast<size_t>(block)), std::free);
    std::memset(buffer.get(), 3, static_cast<size_t>(block));
    const double write = rate(num_bytes_, 3, [&] {
      for (int64_t at = 0; at < num_bytes_; at += block) {
        expect(::pwrite(fd, buffer.get(), static_cast<size_t>(block), at) == block, "pwrite");
      }
      expect(::fdatasync(fd) == 0, "fdatasync");
    });
    print(direct >= 0 ? "disk: direct writes" : "disk: writes", block, write, 0);
    const double read = rate(num_bytes_, 3, [&] {
      for (int64_t at = 0; at < num_bytes_; at += block) {
        expect(::pread(fd, buffer.get(), static_cast<size_t>(block), at) == block, "pread");
      }
    });
    print(direct >= 0 ? "disk: direct reads" : "disk: reads", block, read, 0);
    ::close(fd);
    return {write, read};
  }

  std::unique_ptr<CacheDevice> device_;
  std::string directory_;
  int64_t num_bytes_;
};

int run(int argc, char** argv) {
  const bool cuda = argc > 1 && std::strcmp(argv[1], "cuda") == 0;
  if (argc < 3 || (!cuda && std::strcmp(argv[1], "cpu") != 0)) {
    std::fprintf(stderr, "usage: kv_copy_bench cpu|cuda DIR [MIB]\n");
    return 2;
  }
  const int64_t num_bytes = std::max<int64_t>(argc > 3 ? std::atoi(argv[3]) : 256, 16) * kMiB;
  Bench bench(cuda ? DeviceType::kCuda : DeviceType::kCpu, argv[2], num_bytes);
#ifdef HELICORE_WITH_CUDA
  if (cuda) {
    bench.gpu();
    bench.disk(CacheTier::kGpuMem);
  }
#endif
  bench.host();
  bench.disk(CacheTier::kHostMem);
  return 0;
}

}  // namespace
}  // namespace helicore::kv

int main(int argc, char** argv) {
  try {
    return helicore::kv::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kv_copy_bench: %s\n", error.what());
    return 1;
  }
}
