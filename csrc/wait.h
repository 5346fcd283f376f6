// A wait that is quick when the other rank is quick, leaves the core when it is not, and always ends.
#pragma once

#include "group.h"

#include <functional>

namespace ring_reduce {

// Called now and then by a wait of the calling thread; throws to interrupt it (Ctrl-C).
using Interrupt = std::function<void()>;

class Wait {
 public:
  // `interrupt` may be null.
  Wait(Group& group, std::uint64_t call, const Interrupt* interrupt)
      : group_(group), call_(call), interrupt_(interrupt) {}

  // Until the counter has reached `target`. `what` says what is waited for: "segment 17 from rank 1".
  // Throws RingFailure when the ring fails, a peer is lost or the time is up.
  template <class What>
  void until(SharedCounter& counter, std::uint64_t target, const What& what) {
    if (observed(counter) < target) until_slowly(counter, target, what);
  }

  double seconds() const { return seconds_; }

 private:
  void until_slowly(SharedCounter& counter, std::uint64_t target, const std::function<std::string()>& what);
  bool spin(const SharedCounter& counter, std::uint64_t target) const;
  void check(double waited_s, const std::function<std::string()>& what);
  void check_interrupt();

  Group& group_;
  std::uint64_t call_;
  const Interrupt* interrupt_;
  double seconds_ = 0;
};

}  // namespace ring_reduce
