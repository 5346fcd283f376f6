// How a ring fails: one cause, the same text on every rank.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ring_reduce {

// The numbers are part of the shared memory layout and of the binding, which maps them to Python classes.
enum class FailureKind : std::uint32_t { mismatch = 1, timeout = 2, peer_lost = 3, aborted = 4, closed = 5 };

class RingFailure : public std::runtime_error {
 public:
  RingFailure(FailureKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  FailureKind kind() const { return kind_; }

 private:
  FailureKind kind_;
};

}  // namespace ring_reduce
