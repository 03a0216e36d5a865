#include "helicore/kv/file_copies.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>
#include <tuple>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr int kRequestsPerWindow = FileCopies::kRequestsPerLane / 2;  // two windows at once
constexpr int64_t kBounceBytes = int64_t{1} << 20;
constexpr int kBounceBuffers = 4;

bool is_file(const MemoryPool* pool) noexcept { return pool->fd() >= 0; }

}  // namespace

FileCopies::FileCopies(AsyncIo& io, StagingPort* staging, int num_lanes)
    : io_(&io), staging_(staging), bounce_(static_cast<size_t>(num_lanes)) {}

std::vector<uint64_t> FileCopies::run(int lane, std::span<const CopyTask> tasks) {
  Failed failed(tasks.size(), 0);
  std::vector<Piece> direct;
  std::vector<Piece> staged;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const CopyTask& task = tasks[i];
    if (task.num_bytes == 0) continue;
    if (is_file(task.dst) && is_file(task.src)) {
      run_between_files(lane, task, i, failed);
    } else if (!is_file(task.dst) && !is_file(task.src)) {
      std::memmove(task.dst->data() + task.dst_offset, task.src->data() + task.src_offset,
                   static_cast<size_t>(task.num_bytes));
    } else if (staging_ != nullptr && staging_->owns(is_file(task.dst) ? *task.src : *task.dst)) {
      add_pieces(task, i, staging_->slot_bytes(), staged);
    } else {
      add_pieces(task, i, kMaxRequestBytes, direct);
    }
  }
  if (!direct.empty()) run_direct(direct, failed);
  if (!staged.empty()) run_staged(lane, staged, failed);
  std::vector<uint64_t> tags;
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (failed[i] != 0) tags.push_back(tasks[i].tag);
  }
  return tags;
}

void FileCopies::add_pieces(const CopyTask& task, size_t index, int64_t max_bytes,
                            std::vector<Piece>& out) {
  const bool reads = is_file(task.src);
  const MemoryPool* file = reads ? task.src : task.dst;
  const MemoryPool* memory = reads ? task.dst : task.src;
  const int64_t file_offset = reads ? task.src_offset : task.dst_offset;
  const int64_t memory_offset = reads ? task.dst_offset : task.src_offset;
  for (int64_t at = 0; at < task.num_bytes; at += max_bytes) {
    out.push_back({index, reads, file->fd(), file_offset + at, memory->data() + memory_offset + at,
                   std::min(max_bytes, task.num_bytes - at)});
  }
}

std::vector<FileCopies::Run> FileCopies::group(std::vector<Piece>& pieces, int64_t max_bytes) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::tie(a.reads, a.fd, a.offset) < std::tie(b.reads, b.fd, b.offset);
  });
  std::vector<Run> runs;
  size_t first = 0;
  int64_t num_bytes = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    num_bytes += pieces[i].num_bytes;
    const bool goes_on = i + 1 < pieces.size() && pieces[i + 1].reads == pieces[i].reads &&
                         pieces[i + 1].fd == pieces[i].fd &&
                         pieces[i + 1].offset == pieces[i].offset + pieces[i].num_bytes &&
                         num_bytes + pieces[i + 1].num_bytes <= max_bytes;
    if (goes_on) continue;
    runs.push_back({std::span(pieces).subspan(first, i + 1 - first), num_bytes});
    first = i + 1;
    num_bytes = 0;
  }
  return runs;
}

void FileCopies::judge(const Run& run, const IoStatus& status, Failed& failed) {
  if (status.error == 0) return;
  int64_t end = 0;
  for (const Piece& piece : run.pieces) {
    end += piece.num_bytes;
    if (end > status.num_bytes) failed[piece.task] = 1;
  }
}

void FileCopies::run_direct(std::vector<Piece>& pieces, Failed& failed) {
  const std::vector<Run> runs = group(pieces, kMaxRequestBytes);
  std::deque<std::pair<size_t, IoToken>> windows;  // first run, token
  const auto collect = [&] {
    const auto [first, token] = windows.front();
    windows.pop_front();
    const IoResult result = io_->wait(token);
    for (size_t i = 0; i < result.requests.size(); ++i) {
      judge(runs[first + i], result.requests[i], failed);
    }
  };
  for (size_t first = 0; first < runs.size(); first += kRequestsPerWindow) {
    std::vector<IoRequest> requests;
    const size_t end = std::min(runs.size(), first + kRequestsPerWindow);
    for (size_t i = first; i < end; ++i) {
      const Piece& head = runs[i].pieces.front();
      IoRequest request{head.reads ? IoOp::kRead : IoOp::kWrite, head.fd, head.offset, {}};
      for (const Piece& piece : runs[i].pieces) {
        request.buffers.push_back({piece.memory, piece.num_bytes});
      }
      requests.push_back(std::move(request));
    }
    if (windows.size() == 2) collect();
    windows.emplace_back(first, io_->submit(std::move(requests), WhenFull::kBlock).value());
  }
  while (!windows.empty()) collect();
}

void FileCopies::run_staged(int lane, std::vector<Piece>& pieces, Failed& failed) {
  const std::vector<Run> runs = group(pieces, staging_->slot_bytes());
  const auto first_read = std::find_if(runs.begin(), runs.end(),
                                       [](const Run& run) { return run.pieces.front().reads; });
  write_staged(lane, {runs.begin(), first_read}, failed);
  read_staged(lane, {first_read, runs.end()}, failed);
}

// File -> slot -> memory: reads into one half of the slots while the other half is on its way to
// memory. A chunk goes on as soon as it has been read.
void FileCopies::read_staged(int lane, std::span<const Run> runs, Failed& failed) {
  const auto num_slots = static_cast<size_t>(staging_->num_slots());
  std::vector<std::optional<size_t>> leaving(num_slots);  // run whose bytes leave the slot
  std::deque<IoToken> tokens;                             // of reads, oldest first
  const auto fail = [&](const Run& run) { judge(run, {EIO, 0}, failed); };
  const auto leave = [&](size_t slot) {
    if (leaving[slot] && !staging_->wait(lane, static_cast<int>(slot))) fail(runs[*leaving[slot]]);
    leaving[slot].reset();
  };
  size_t next = 0;  // to be read
  for (size_t i = 0; i < runs.size(); ++i) {
    for (; next < runs.size() && next < i + num_slots / 2; ++next) {
      leave(next % num_slots);
      tokens.push_back(submit_staged(lane, next % num_slots, runs[next]));
    }
    const auto slot = static_cast<int>(i % num_slots);
    judge(runs[i], io_->wait(tokens.front()).requests.front(), failed);
    tokens.pop_front();
    const std::byte* from = staging_->slot(lane, slot);
    bool ok = true;
    for (const Piece& piece : runs[i].pieces) {
      if (failed[piece.task] == 0) ok &= staging_->copy(lane, piece.memory, from, piece.num_bytes);
      from += piece.num_bytes;
    }
    if (!staging_->mark(lane, slot) || !ok) fail(runs[i]);
    leaving[i % num_slots] = i;
  }
  for (size_t slot = 0; slot < num_slots; ++slot) leave(slot);
}

// Memory -> slot -> file, the same way.
void FileCopies::write_staged(int lane, std::span<const Run> runs, Failed& failed) {
  const auto num_slots = static_cast<size_t>(staging_->num_slots());
  std::deque<std::pair<size_t, IoToken>> writing;  // run, token; oldest first
  const auto collect = [&] {
    const auto [run, token] = writing.front();
    writing.pop_front();
    judge(runs[run], io_->wait(token).requests.front(), failed);
  };
  size_t next = 0;  // to be fetched
  for (size_t i = 0; i < runs.size(); ++i) {
    for (; next < runs.size() && next < i + num_slots / 2; ++next) {
      while (!writing.empty() && writing.front().first + num_slots <= next) collect();
      const auto slot = static_cast<int>(next % num_slots);
      std::byte* to = staging_->slot(lane, slot);
      bool ok = true;
      for (const Piece& piece : runs[next].pieces) {
        ok &= staging_->copy(lane, to, piece.memory, piece.num_bytes);
        to += piece.num_bytes;
      }
      if (!staging_->mark(lane, slot) || !ok) judge(runs[next], {EIO, 0}, failed);
    }
    if (staging_->wait(lane, static_cast<int>(i % num_slots))) {
      writing.emplace_back(i, submit_staged(lane, i % num_slots, runs[i]));
    } else {
      judge(runs[i], {EIO, 0}, failed);
    }
  }
  while (!writing.empty()) collect();
}

IoToken FileCopies::submit_staged(int lane, size_t slot, const Run& run) {
  const Piece& head = run.pieces.front();
  std::byte* buffer = staging_->slot(lane, static_cast<int>(slot));
  return io_
      ->submit({{head.reads ? IoOp::kRead : IoOp::kWrite,
                 head.fd,
                 head.offset,
                 {{buffer, run.num_bytes}}}},
               WhenFull::kBlock)
      .value();
}

void FileCopies::run_between_files(int lane, const CopyTask& task, size_t index, Failed& failed) {
  std::vector<std::byte>& buffer = bounce_[static_cast<size_t>(lane)];
  if (buffer.empty()) buffer.resize(kBounceBytes * kBounceBuffers);
  for (int64_t at = 0; at < task.num_bytes && failed[index] == 0;) {
    std::vector<IoRequest> requests;
    for (int i = 0; i < kBounceBuffers && at < task.num_bytes; ++i) {
      const int64_t bytes = std::min(kBounceBytes, task.num_bytes - at);
      requests.push_back({IoOp::kRead,
                          task.src->fd(),
                          task.src_offset + at,
                          {{buffer.data() + i * kBounceBytes, bytes}}});
      at += bytes;
    }
    std::vector<IoRequest> writes = requests;
    for (IoRequest& write : writes) {
      write.op = IoOp::kWrite;
      write.fd = task.dst->fd();
      write.offset += task.dst_offset - task.src_offset;
    }
    for (auto& batch : {&requests, &writes}) {
      const IoToken token = io_->submit(std::move(*batch), WhenFull::kBlock).value();
      if (io_->wait(token).ok()) continue;
      failed[index] = 1;
      break;
    }
  }
}

}  // namespace helicore::kv
