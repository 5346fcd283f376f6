#include "lane_threads.h"

namespace ring_reduce {

LaneThreads::~LaneThreads() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void LaneThreads::start(int lanes) {
  const std::scoped_lock lock(mutex_);
  for (int lane = static_cast<int>(threads_.size()) + 1; lane < lanes; ++lane) {
    threads_.emplace_back([this, lane] { work(lane); });
  }
}

void LaneThreads::run_lanes(int lanes, const std::function<void(int)>& job, bool all) {
  if (lanes < 2) return job(0);
  {
    const std::scoped_lock lock(mutex_);
    job_ = &job;
    lanes_ = lanes;
    to_come_ = lanes - 1;
    ++round_;
  }
  start_.notify_all();
  job(0);
  std::unique_lock lock(mutex_);
  if (!all) lanes_ = to_come_ = 0;
  finished_.wait(lock, [this] { return to_come_ == 0 && running_ == 0; });
  lanes_ = 0;
}

void LaneThreads::work(int lane) {
  std::uint64_t done = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [&] { return stop_ || (round_ != done && lane < lanes_); });
    if (stop_) return;
    done = round_;
    --to_come_;
    ++running_;
    lock.unlock();
    (*job_)(lane);
    lock.lock();
    --running_;
    if (to_come_ == 0 && running_ == 0) finished_.notify_all();
  }
}

}  // namespace ring_reduce
