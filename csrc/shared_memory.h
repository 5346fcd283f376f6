// Anonymous memory shared by file descriptor: it has no name, so nothing can be left behind.
#pragma once

#include "portable.h"

namespace ring_reduce {

// Makes `bytes` of zeros, all of it allocated and its size sealed, so that no access can fail later. Returns the file
// descriptor, which the caller owns. Throws std::system_error, with what to do in its text.
int create_shared_memory(std::size_t bytes);

// A mapping of such memory, its own or a peer's.
class SharedMapping {
 public:
  // Borrows `fd`. Throws std::system_error, or std::invalid_argument if the memory is smaller than `bytes` or its size
  // could still change.
  SharedMapping(int fd, std::size_t bytes);
  ~SharedMapping();
  SharedMapping(SharedMapping&& other) noexcept;
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  std::byte* base() const { return base_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace ring_reduce
