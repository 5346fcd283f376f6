// Which process this is, without asking the kernel each time.
#pragma once

#include <sys/types.h>

namespace ring_reduce {

// getpid(), kept until a fork. A child of the bare system call, which runs no handlers, takes itself for its parent.
pid_t current_process();

}  // namespace ring_reduce
