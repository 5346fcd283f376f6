// A rank of a ring over shared memory: checks a call, cuts it into lanes and runs them.
#pragma once

#include "ring.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <sys/types.h>
#include <thread>

namespace ring_reduce {

// Threads that run a call's lanes beside the calling one.
class LaneThreads {
 public:
  ~LaneThreads();

  // Starts the threads that `lanes` lanes need beside the calling one. Throws std::system_error.
  void start(int lanes);

  // Runs job(0) here and job(1) .. job(lanes - 1) on the threads; returns when all have. A job does not throw.
  void run(int lanes, const std::function<void(int)>& job);

 private:
  void work(int lane);

  std::mutex mutex_;
  std::condition_variable start_, finished_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  std::uint64_t round_ = 0;
  int lanes_ = 0;  // of this round
  int running_ = 0;
  bool stop_ = false;
};

struct CallArguments {
  Operation operation;
  ElementType type;
  Normalization normalization;
  double divisor;  // of divide_by; 1 otherwise
  double count;
  const std::byte* input;
  std::byte* output;
  std::uint64_t elements;  // of the whole tensor
};

struct Stats {
  std::uint64_t calls = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t header_bytes_sent = 0;
  double seconds_waiting = 0;  // sum over lanes
};

class CpuRing {
 public:
  // See Group. The regions outlive the ring.
  CpuRing(const RingSettings& settings, const std::vector<std::byte*>& regions, std::vector<int> process_fds);
  ~CpuRing();
  CpuRing(const CpuRing&) = delete;
  CpuRing& operator=(const CpuRing&) = delete;

  // Runs a collective call; returns the total count where the normalization uses it, else 0. One call at a time.
  // Throws RingFailure, and whatever `interrupt` throws.
  double run(const CallArguments& arguments, const Interrupt* interrupt);

  // Fails the ring on all ranks, unless it has failed or is closed. From any thread.
  void abort(const std::string& reason);

  // Whether a call is running or waits for its turn.
  bool busy() const { return running_ != 0; }

  // Tells the others that this rank makes no more calls. No call may be running: wait for it, or abort, before.
  void close();

  // Throws the cause if the ring has failed.
  void check() const;

  Stats stats() const;

 private:
  Call plan(const CallArguments& arguments) const;
  void start_lanes(int lanes);
  void run_lane(const Call& call, int lane, const Interrupt* interrupt);

  bool forked() const;
  void check_fork() const;

  Group group_;
  const pid_t process_;
  std::unique_ptr<LaneThreads> threads_;
  std::vector<LaneState> lanes_;
  std::uint64_t calls_ = 0;
  std::atomic<bool> closed_ = false;
  std::atomic<int> running_ = 0;
  std::mutex calling_;
  mutable std::mutex stats_mutex_;
  Stats stats_;
};

}  // namespace ring_reduce
