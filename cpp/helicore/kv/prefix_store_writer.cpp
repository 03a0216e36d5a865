// The writer thread of a prefix store. One batch goes through these steps, none under the lock:
//   1. evict as many blocks as the batch needs slots; write their tombstones     [sync]
//   2. write the bytes of the new blocks into free slots                         [sync]
//   3. write their put records                                                   [sync]
//   4. publish: from here on match() finds them
#include <algorithm>
#include <cerrno>
#include <exception>
#include <unordered_set>

#include "helicore/core/error.h"
#include "helicore/kv/prefix_store_impl.h"

namespace helicore::kv {

using store::kNoSlot;

namespace {
constexpr int64_t kCompactionSlack = int64_t{64} << 10;  // bytes of journal beyond twice the live
}  // namespace

void PrefixStore::Impl::write_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] {
      return stop_ || !queue_.empty() ||
             (flush_wanted_ > flush_served_ && num_ended_ >= flush_target_);
    });
    if (flush_wanted_ > flush_served_ && num_ended_ >= flush_target_) {
      const uint64_t serving = flush_wanted_;
      lock.unlock();
      sync_for_flush();
      lock.lock();
      flush_served_ = serving;
      done_.notify_all();
    } else if (!queue_.empty()) {
      std::vector<Job> jobs;
      while (!queue_.empty() && jobs.size() < max_batch_) {
        jobs.push_back(std::move(queue_.front()));
        queue_.pop_front();
      }
      num_queued_ -= static_cast<int64_t>(jobs.size());
      room_.notify_all();
      lock.unlock();
      write_batch(jobs);
      lock.lock();
    } else if (stop_) {
      return;
    }
  }
}

void PrefixStore::Impl::write_batch(std::vector<Job>& jobs) {
  const auto give_up = [this](const std::exception& e) {  // no memory: keep serving what is there
    log_error(std::string("kv.prefix_store: writing stopped: ") + e.what());
    stop_writing(e.what(), ENOMEM);
  };
  try {
    write_jobs(jobs);
  } catch (const std::exception& e) {
    give_up(e);
    for (Job& job : jobs) {
      if (job.status == BlockStatus::kOk) job.status = BlockStatus::kIoError;
    }
  }
  publish(jobs);
  for (Job& job : jobs) {
    if (job.buffer) buffers_.give(std::move(job.buffer));
  }
  try {
    compact_if_long();
  } catch (const std::exception& e) {
    give_up(e);
  }
}

void PrefixStore::Impl::write_jobs(std::vector<Job>& jobs) {
  {
    const std::scoped_lock lock(mutex_);
    if (!stats_.read_only_reason.empty()) {
      for (Job& job : jobs) job.status = BlockStatus::kDisabled;
      return;
    }
  }
  if (const int error = make_room(jobs); error != 0) {
    stop_writing("write a tombstone", error);
    for (Job& job : jobs) job.status = BlockStatus::kIoError;
    return;
  }
  {
    const std::scoped_lock lock(mutex_);
    for (Job& job : jobs) allocate_locked(job);
  }
  write_data(jobs);
  if (const int error = write_journal(jobs); error != 0) {
    stop_writing("write a journal record", error);
    for (Job& job : jobs) {
      if (job.status == BlockStatus::kOk) job.status = BlockStatus::kIoError;
    }
  }
}

int PrefixStore::Impl::make_room(const std::vector<Job>& jobs) {
  if (const int error = bury_dead(); error != 0) return error;
  {
    const std::scoped_lock lock(mutex_);
    // Who is new, and hangs on something that is there or comes with the batch? Parents that are
    // there must not be evicted for their own children.
    std::unordered_set<std::string> coming;
    std::vector<uint32_t> parents;
    const auto name = [](const Digest& key) { return std::string(key.begin(), key.end()); };
    for (const Job& job : jobs) {
      if (index_->find(job.key) || coming.contains(name(job.key))) continue;
      if (job.record.ordinal > 0) {
        const auto parent = index_->find(job.record.parent);
        if (parent) {
          index_->pin(*parent);
          parents.push_back(*parent);
        } else if (!coming.contains(name(job.record.parent))) {
          continue;
        }
      }
      coming.insert(name(job.key));
    }
    const auto needed = static_cast<int64_t>(coming.size());
    while (index_->num_free() + static_cast<int64_t>(index_->num_dead()) < needed) {
      const auto victim = index_->victim();
      if (!victim) break;
      index_->remove(*victim);
      ++stats_.num_evicted;
    }
    for (const uint32_t parent : parents) index_->unpin(parent);
  }
  return bury_dead();
}

int PrefixStore::Impl::bury_dead() {
  std::vector<store::TombstoneRecord> dead;
  {
    const std::scoped_lock lock(mutex_);
    dead = index_->take_dead();
  }
  if (dead.empty()) return 0;
  std::vector<std::byte> bytes;
  for (const auto& record : dead) store::append_tombstone(bytes, record, journal_.header());
  const int error = journal_.append(bytes, syncs());
  if (error != 0) return error;  // the slots stay dead: nobody writes over them
  const std::scoped_lock lock(mutex_);
  for (const auto& record : dead) index_->bury(record.slot);
  return 0;
}

void PrefixStore::Impl::allocate_locked(Job& job) {
  if (index_->find(job.key)) {
    job.status = BlockStatus::kDuplicate;
    return;
  }
  if (job.record.ordinal > 0) {
    const auto parent = index_->find(job.record.parent);
    const bool fits = parent && index_->at(*parent).ordinal + 1 == job.record.ordinal &&
                      index_->at(*parent).num_tokens == config_.tokens_per_block;
    if (!fits) {
      job.status = BlockStatus::kNoParent;
      return;
    }
  }
  if (index_->num_free() == 0) {
    job.status = BlockStatus::kNoRoom;
    return;
  }
  job.slot = job.record.slot = index_->begin_write(job.record, job.key);
  job.record.sequence = index_->at(job.slot).sequence;
}

void PrefixStore::Impl::write_data(std::vector<Job>& jobs) {
  std::vector<IoRequest> batch;
  for (const Job& job : jobs) {
    if (job.slot == kNoSlot) continue;
    batch.push_back({IoOp::kWrite, data_.fd.get(), job.slot * slot_bytes_, job.pages});
  }
  if (batch.empty()) return;
  const IoResult result = io_->wait(*io_->submit(std::move(batch), WhenFull::kBlock));
  size_t i = 0;
  int error = 0;
  for (Job& job : jobs) {
    if (job.slot == kNoSlot) continue;
    const int job_error = result.requests[i++].error;
    if (job_error != 0) job.status = BlockStatus::kIoError;
    if (job_error == ENOSPC || job_error == EDQUOT) error = job_error;
  }
  if (error != 0) stop_writing("write a block", error);
  if (!syncs()) return;
  error = sync_data();
  if (error == 0) return;
  stop_writing("sync the data file", error);
  for (Job& job : jobs) {
    if (job.slot != kNoSlot) job.status = BlockStatus::kIoError;
  }
}

int PrefixStore::Impl::write_journal(const std::vector<Job>& jobs) {
  std::vector<std::byte> bytes;
  for (const Job& job : jobs) {
    if (job.slot != kNoSlot && job.status == BlockStatus::kOk) {
      store::append_put(bytes, job.record, journal_.header());
    }
  }
  return bytes.empty() ? 0 : journal_.append(bytes, syncs());
}

void PrefixStore::Impl::publish(std::vector<Job>& jobs) {
  const std::scoped_lock lock(mutex_);
  for (Job& job : jobs) {
    if (job.slot != kNoSlot) {
      if (job.status != BlockStatus::kOk) {
        index_->abort(job.slot);
      } else if (!index_->publish(job.slot, job.record.data_crc)) {
        job.status = BlockStatus::kNoParent;
      }
    }
    stats_.num_put += job.status == BlockStatus::kOk ? 1 : 0;
    stats_.num_duplicate += job.status == BlockStatus::kDuplicate ? 1 : 0;
    stats_.num_refused +=
        job.status != BlockStatus::kOk && job.status != BlockStatus::kDuplicate ? 1 : 0;
    stats_.num_io_errors += job.status == BlockStatus::kIoError ? 1 : 0;
    job.operation->statuses[job.index] = job.status;
    ++num_ended_;
    if (--job.operation->num_left == 0 && job.operation->forgotten) {
      operations_.erase(job.operation->token);
    }
  }
  stats_.journal_bytes = journal_.num_bytes();
  done_.notify_all();
}

int PrefixStore::Impl::sync_data() {
  return io_->wait(*io_->submit({{IoOp::kSync, data_.fd.get(), 0, {}}}, WhenFull::kBlock)).error();
}

void PrefixStore::Impl::sync_for_flush() {
  int error = sync_data();
  if (error == 0) error = journal_.sync();
  if (error != 0) stop_writing("flush", error);
  const std::scoped_lock lock(mutex_);
  flush_ok_ = stats_.read_only_reason.empty();
}

int PrefixStore::Impl::compact() {
  std::vector<store::PutRecord> snapshot;
  {
    const std::scoped_lock lock(mutex_);
    snapshot = index_->snapshot();
  }
  store::Header header = journal_.header();
  ++header.epoch;
  header.num_snapshot = snapshot.size();
  const int error = journal_.rewrite(header, snapshot, syncs());
  const std::scoped_lock lock(mutex_);
  stats_.journal_bytes = journal_.num_bytes();
  ++stats_.num_compactions;
  return error;
}

void PrefixStore::Impl::compact_if_long() {
  int64_t live = 0;
  {
    const std::scoped_lock lock(mutex_);
    if (!stats_.read_only_reason.empty()) return;
    live = index_->num_blocks() *
           static_cast<int64_t>(store::put_record_bytes(config_.tokens_per_block));
  }
  if (journal_.num_bytes() <= 2 * live + kCompactionSlack) return;
  if (const int error = compact(); error != 0) stop_writing("compact the journal", error);
}

void PrefixStore::Impl::stop_writing(const std::string& what, int error) {
  const std::scoped_lock lock(mutex_);
  if (stats_.read_only_reason.empty()) {
    stats_.read_only_reason = store::errno_reason(what, error);
  }
}

}  // namespace helicore::kv
