// A wait that is quick when the other rank is quick, leaves the core when it is not, and always ends.
#pragma once

#include "group.h"

#include <functional>

namespace ring_reduce {

// Called now and then by a wait of the calling thread; throws to interrupt it (Ctrl-C).
using Interrupt = std::function<void()>;

// What a wait is for, as its time-out tells it.
struct Awaited {
  std::string what;  // "segment 17 from rank 1"
  int neighbour;
  int stalled;  // the rank that holds it up: the neighbour, or one behind it
};

class Wait {
 public:
  // `interrupt` may be null.
  Wait(Group& group, const Fingerprint& call, const Interrupt* interrupt)
      : group_(group), call_(call), interrupt_(interrupt) {}

  // Until the counter has reached `target`; `what` returns an Awaited.
  // Throws RingFailure when the ring fails, a peer is lost or the time is up.
  template <class What>
  void until(SharedCounter& counter, std::uint64_t target, const What& what) {
    if (observed(counter) < target)
      until_slowly(counter, target, std::cref(what));  // a reference: nothing is allocated
  }

  double seconds() const { return seconds_; }

 private:
  void until_slowly(SharedCounter& counter, std::uint64_t target, const std::function<Awaited()>& what);
  bool spin(const SharedCounter& counter, std::uint64_t target) const;
  void check(double waited_s, const std::function<Awaited()>& what);
  std::string timeout_text(double waited_s, const Awaited& awaited) const;
  void check_interrupt();

  Group& group_;
  const Fingerprint& call_;
  const Interrupt* interrupt_;
  double seconds_ = 0;
};

}  // namespace ring_reduce
