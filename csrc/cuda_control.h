// Host memory that all ranks of a CUDA IPC ring share, and that their GPUs write: how far each has come, and how the ring
// failed. A word in it ends every wait of every rank's kernel.
#pragma once

#include "cuda_descriptors.h"
#include "cuda_failure.h"
#include "shared_memory.h"

#include <array>
#include <atomic>
#include <mutex>

namespace ring_reduce {

struct ControlRank;  // what one rank writes; see the source
struct ControlWords;

class IpcControl {
 public:
  static std::size_t bytes(int world);

  // Borrows `memory_fd`, of bytes(world), the same memory on all ranks. `processes`, which outlive this: pidfds by rank,
  // -1 where there is none. Throws std::system_error.
  IpcControl(int rank, int world, double timeout_s, int memory_fd, const Descriptors& processes);
  ~IpcControl();
  IpcControl(const IpcControl&) = delete;
  IpcControl& operator=(const IpcControl&) = delete;

  // Lets the current device reach it, until unregister(). Throws CudaError.
  void register_memory();
  void unregister();

  // This rank's words as the device reaches them.
  CallProgress* device_progress() const;
  DeviceFailure* device_failure() const;
  std::uint64_t* device_stop() const;

  CallProgress progress() const { return progress_of(rank_); }

  // Fails the ring on every rank; the first cause wins, and its text is that of all.
  void fail(FailureKind kind, const std::string& text);

  // Throws the cause, if the ring has failed on any rank.
  void check();

  // Before a call is enqueued, which needs every other rank: throws too if one has closed the ring or ended.
  void check_peers_are_there();

  // What the watchdog does: fails the ring where a device has, and where a call that runs needs a rank that is gone.
  void look();

  // This rank makes no more calls, and kernels of others that begin one fail.
  void close();

  // This rank reaches no memory of others any more.
  void release();

  // Until the rank has released, or its process has ended; at most `seconds`.
  void wait_released(int rank, double seconds) const;

 private:
  ControlRank& of(int rank) const;
  CallProgress progress_of(int rank) const;
  bool ended(int rank) const;
  [[noreturn]] void raise() const;
  template <class T>
  T* on_device(T* word) const;
  void adopt_device_failures();
  void fail_for_missing(int rank, bool closed, std::uint64_t completed, std::uint64_t call);

  const int rank_;
  const int world_;
  const double timeout_s_;
  const std::vector<int>& processes_;
  const SharedMapping mapping_;
  ControlWords* words_;
  std::byte* device_base_ = nullptr;
  bool registered_ = false;
  std::mutex failing_;
};

}  // namespace ring_reduce
