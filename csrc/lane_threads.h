// Threads that are kept between calls, for work that is cut into lanes.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ring_reduce {

// Threads that run a call's lanes beside the calling one.
class LaneThreads {
 public:
  ~LaneThreads();

  // Starts the threads that `lanes` lanes need beside the calling one. Throws std::system_error.
  void start(int lanes);

  // Runs job(0) here and job(1) .. job(lanes - 1) on the threads; returns when all have. A job does not throw.
  void run(int lanes, const std::function<void(int)>& job) { run_lanes(lanes, job, /*all=*/true); }

  // The same, but lanes whose threads have not woken when job(0) returns are left out: for jobs that share their work.
  void share(int lanes, const std::function<void(int)>& job) { run_lanes(lanes, job, /*all=*/false); }

 private:
  void run_lanes(int lanes, const std::function<void(int)>& job, bool all);
  void work(int lane);

  std::mutex mutex_;
  std::condition_variable start_, finished_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  std::uint64_t round_ = 0;
  int lanes_ = 0;    // of this round, which threads may still enter; else 0
  int to_come_ = 0;  // threads that have to enter
  int running_ = 0;  // threads that have entered and not left
  bool stop_ = false;
};

}  // namespace ring_reduce
