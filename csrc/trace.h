// What a lane did when, for `ring-reduce trace`: recorded only while somebody asks, into memory that is there before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ring_reduce {

// What a lane is at, of whatever algorithm. Waits come first: they get their step from what follows them.
enum class Activity : std::uint8_t {
  wait_posted,
  wait_taken,
  wait_inputs,
  wait_results,
  reduce,
  finish,
  gather,
  take,
  post,
  post_inputs,
  post_results,
};

constexpr bool is_wait(Activity activity) { return activity < Activity::reduce; }

const char* activity_name(Activity activity);      // "wait posted"
const char* activity_category(Activity activity);  // "wait", "pass" or "push"

// The part of a call that a lane works on.
struct TraceStep {
  int step = -1;   // k of a ring's move; -1: the call failed before
  int chunk = -1;  // -1: several
  std::uint64_t segment = 0;
  std::uint64_t bytes = 0;  // of the segment's payload
};

inline constexpr std::uint64_t kNothing = ~std::uint64_t{0};

struct TraceEvent {
  Activity activity;
  std::uint64_t call;
  TraceStep at;
  int peer;               // the rank that a wait is for, or that a push tells; -1: none, or all
  std::uint64_t number;   // of what is awaited, on its link, the same for a wait and the push that ends it
  std::int64_t start_ns;  // on CLOCK_MONOTONIC, which the ranks of a host share
  std::int64_t end_ns;
};

// The events of one lane. One thread at a time; an event ends before the next begins.
class LaneTrace {
 public:
  // Keeps the first `limit` events and counts the others.
  explicit LaneTrace(std::size_t limit);

  void begin_call(std::uint64_t call);
  // Where the lane is from here on; also where the waits before, which could not know it, were.
  void set_step(const TraceStep& step);
  void begin(Activity activity, int peer, std::uint64_t number);
  void end();

  std::vector<TraceEvent> events() const;
  std::uint64_t dropped() const { return dropped_; }

 private:
  std::vector<TraceEvent> events_;  // as long as the limit, so that recording touches no new page
  std::size_t used_ = 0;
  std::uint64_t dropped_ = 0;
  std::uint64_t call_ = 0;
  TraceStep step_;
  bool open_ = false;
};

// Records the scope that it lives in. Without a trace it costs one branch.
class TraceScope {
 public:
  TraceScope(LaneTrace* trace, Activity activity, int peer = -1, std::uint64_t number = kNothing) : trace_(trace) {
    if (trace_ != nullptr) trace_->begin(activity, peer, number);
  }
  ~TraceScope() {
    if (trace_ != nullptr) trace_->end();
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  LaneTrace* trace_;
};

}  // namespace ring_reduce
