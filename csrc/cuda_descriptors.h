// File descriptors that an object owns.
#pragma once

#include <unistd.h>
#include <utility>
#include <vector>

namespace ring_reduce {

// Closes them at the end; -1 stands for one that is missing.
class Descriptors {
 public:
  explicit Descriptors(std::vector<int> owned) : all_(std::move(owned)) {}
  ~Descriptors() {
    for (const int descriptor : all_) {
      if (descriptor >= 0) ::close(descriptor);
    }
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  const std::vector<int>& all() const { return all_; }

 private:
  std::vector<int> all_;
};

}  // namespace ring_reduce
