#include "trace.h"

#include <chrono>

namespace ring_reduce {

namespace {

std::int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();  // CLOCK_MONOTONIC, as Python's monotonic_ns()
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

const char* activity_name(Activity activity) {
  switch (activity) {
    case Activity::wait_posted: return "wait posted";
    case Activity::wait_taken: return "wait taken";
    case Activity::wait_inputs: return "wait inputs";
    case Activity::wait_results: return "wait results";
    case Activity::reduce: return "reduce";
    case Activity::finish: return "finish";
    case Activity::gather: return "gather";
    case Activity::take: return "take";
    case Activity::post: return "post";
    case Activity::post_inputs: return "post inputs";
    case Activity::post_results: return "post results";
  }
  return "";
}

const char* activity_category(Activity activity) {
  if (is_wait(activity)) return "wait";
  return activity < Activity::take ? "pass" : "push";
}

LaneTrace::LaneTrace(std::size_t limit) : events_(limit) {}

void LaneTrace::begin_call(std::uint64_t call) {
  call_ = call;
  step_ = {};
}

void LaneTrace::set_step(const TraceStep& step) {
  step_ = step;
  for (std::size_t i = used_; i > 0; --i) {
    TraceEvent& before = events_[i - 1];
    if (!is_wait(before.activity) || before.call != call_ || before.at.step >= 0) break;
    before.at = step;
  }
}

void LaneTrace::begin(Activity activity, int peer, std::uint64_t number) {
  open_ = used_ < events_.size();
  if (!open_) {
    ++dropped_;
    return;
  }
  const TraceStep at = is_wait(activity) ? TraceStep{} : step_;
  events_[used_++] = {activity, call_, at, peer, number, now_ns(), 0};
}

void LaneTrace::end() {
  if (open_) events_[used_ - 1].end_ns = now_ns();
}

std::vector<TraceEvent> LaneTrace::events() const {
  return {events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(used_)};
}

}  // namespace ring_reduce
