#include "wait.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <sched.h>

namespace ring_reduce {

namespace {

using Clock = std::chrono::steady_clock;

// Between two looks at the peers, the clock and the interrupt while yielding.
constexpr double kCheckEvery_s = 0.01;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

bool Wait::spin(const SharedCounter& counter, std::uint64_t target) const {
  for (int i = 0; i < group_.settings.spins; ++i) {
    pause_core();
    if (observed(counter) >= target) return true;
  }
  return false;
}

void Wait::until_slowly(SharedCounter& counter, std::uint64_t target, const std::function<Awaited()>& what) {
  const Clock::time_point start = Clock::now();
  double waited_s = 0, checked_s = 0;
  bool arrived = spin(counter, target);
  for (int round = 0; !arrived; ++round) {
    if (round < group_.settings.yields) {
      sched_yield();
    } else {
      sleep_until(counter, target);
    }
    const bool failed = group_.failed(call_.call);  // looked at first: what arrived before a failure counts
    arrived = observed(counter) >= target;
    if (!arrived && failed) throw group_.failure();
    waited_s = seconds_since(start);
    if (!arrived && waited_s - checked_s >= kCheckEvery_s) {
      checked_s = waited_s;
      check(waited_s, what);
      arrived = observed(counter) >= target;
    }
  }
  seconds_ += seconds_since(start);
}

void Wait::check(double waited_s, const std::function<Awaited()>& what) {
  check_interrupt();
  group_.check_announced(call_);
  group_.check_peers(call_.call);
  if (waited_s < group_.settings.timeout_s) return;
  throw group_.fail(FailureKind::timeout, call_.call, timeout_text(waited_s, what()));
}

std::string Wait::timeout_text(double waited_s, const Awaited& awaited) const {
  std::array<char, 32> time{};
  std::snprintf(time.data(), time.size(), "%.1f s", waited_s);
  std::string cause = group_.late_ranks(call_.call);
  if (cause.empty() && awaited.stalled != awaited.neighbour) {
    cause = "; rank " + std::to_string(awaited.neighbour) + " waits as well, and rank " +
            std::to_string(awaited.stalled) + " does not go on";
  }
  return "rank " + std::to_string(group_.settings.rank) + ": no " + awaited.what + " in " + time.data() + cause +
         "; is that process alive, and does it make the same calls?";
}

void Wait::check_interrupt() {
  if (interrupt_ == nullptr) return;
  try {
    (*interrupt_)();
  } catch (...) {
    group_.fail(
        FailureKind::aborted, call_.call,
        "rank " + std::to_string(group_.settings.rank) + " was interrupted in call " + std::to_string(call_.call));
    throw;
  }
}

}  // namespace ring_reduce
