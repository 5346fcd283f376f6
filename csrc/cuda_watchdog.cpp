#include "cuda_watchdog.h"

#include <cerrno>
#include <poll.h>
#include <sys/eventfd.h>
#include <system_error>

namespace ring_reduce {

namespace {

constexpr int kLookMilliseconds = 20;

int make_eventfd() {
  const int descriptor = eventfd(0, EFD_CLOEXEC);
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "eventfd for the ring's watchdog");
  return descriptor;
}

}  // namespace

Watchdog::Watchdog(IpcControl& control, const Descriptors& processes)
    : control_(control), processes_(processes.all()), wake_({make_eventfd()}), thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  eventfd_write(wake_.all()[0], 1);
  thread_.join();
}

void Watchdog::run() {
  std::vector<pollfd> entries{{wake_.all()[0], POLLIN, 0}};
  for (const int process : processes_) entries.push_back({process, POLLIN, 0});  // poll() passes over those of -1
  while (entries[0].revents == 0) {
    poll(entries.data(), entries.size(), kLookMilliseconds);
    for (std::size_t i = 1; i < entries.size(); ++i) {
      if (entries[i].revents != 0) entries[i].fd = -1;  // it has ended, and would be told of at once for ever
    }
    control_.look();
  }
}

}  // namespace ring_reduce
