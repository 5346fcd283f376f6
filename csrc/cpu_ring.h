// A rank of a ring over shared memory: checks a call, cuts it into lanes and runs them.
#pragma once

#include "direct.h"
#include "direct_schedule.h"
#include "lane_threads.h"
#include "ring.h"

#include <atomic>
#include <exception>
#include <memory>
#include <sys/types.h>

namespace ring_reduce {

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

  // Tells the others that this rank makes no more calls. No call may be running: wait for it, or abort, before.
  void close();

  // Throws the cause if the ring has failed.
  void check() const;

  Stats stats() const;

  // Records what the lanes do, from the next call on: the first `limit` events of each. False if it is on already.
  // Waits for a running call.
  bool start_trace(std::size_t limit);
  // Ends it; what was recorded, by lane. Waits for a running call.
  std::vector<LaneTrace> take_trace();

 private:
  Algorithm algorithm_of(const CallArguments& arguments) const;
  Call plan(const CallArguments& arguments) const;
  void run_lanes(const Call& call, const Interrupt* interrupt);
  void start_lanes(int lanes);
  void run_lane(const Call& call, int lane, const Interrupt* interrupt);
  void keep_stats();

  bool forked() const;
  void check_fork() const;

  Group group_;
  const pid_t process_;
  std::unique_ptr<LaneThreads> threads_;
  std::vector<LaneState> lanes_;
  std::vector<LaneTrace> traces_;
  std::uint64_t calls_ = 0;
  std::atomic<bool> closed_ = false;
  std::mutex calling_;
  mutable std::mutex stats_mutex_;
  Stats stats_;
};

}  // namespace ring_reduce
