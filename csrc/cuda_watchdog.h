// A thread that looks at a ring's other ranks: nobody on the host waits for a call on a GPU, so nobody would see a death.
#pragma once

#include "cuda_control.h"

#include <thread>

namespace ring_reduce {

// Looks when a process ends, and every 20 ms: a peer may close the ring, or be needed only after its end.
class Watchdog {
 public:
  // Both outlive it. Throws std::system_error where there is no thread or descriptor to be had.
  Watchdog(IpcControl& control, const Descriptors& processes);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void run();

  IpcControl& control_;
  const std::vector<int>& processes_;
  const Descriptors wake_;  // written at the end
  std::thread thread_;
};

}  // namespace ring_reduce
