// Which process this is, without asking the kernel each time.
#pragma once

#include <sys/types.h>

namespace ring_reduce {

// getpid(), kept until a fork.
pid_t current_process();

}  // namespace ring_reduce
