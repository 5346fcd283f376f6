// One rank of a ring of GPUs on one host, whose ranks reach each other's staging memory by CUDA IPC.
#pragma once

#include "cuda_staging.h"
#include "error.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <sys/types.h>
#include <vector>

namespace ring_reduce {

struct IpcSettings {
  int rank;
  int world;
  int device;
  StagingShape shape;
  int window;
  double timeout_s;
  std::uint64_t first_segment;  // where the counters start
};

// What the ranks handed to each other: all that is needed to open the ring.
struct IpcPeers {
  int control_fd;              // of the host memory that all share; borrowed
  std::vector<int> processes;  // pidfds by rank, owned; -1: none
  StagingPart left;
  StagingPart right;
  std::uint64_t token;  // of this ring
};

struct IpcCall {
  Operation operation;
  ElementType type;
  Normalization normalization;
  double divisor;
  std::uint64_t elements;       // of the whole tensor
  std::uintptr_t input;         // device memory
  std::uintptr_t output;        // the same
  double count;                 // 1 where the normalization does not use it
  std::uintptr_t device_count;  // a float64 on the device, read when the call runs; 0: `count` holds
};

struct IpcStats {
  std::uint64_t calls;       // that the GPU has completed, replays of graphs among them
  std::uint64_t bytes_sent;  // elements, of calls that this host enqueued or captured: it knows of no replay
  std::uint64_t bytes_received;
  std::uint64_t header_bytes_sent;
};

// Made in three steps, after each of which all ranks agree that it went well: the constructor, open() and prove().
// Methods may be called from any thread. In a fork of the process that made it each throws, and its end does nothing.
class IpcRing {
 public:
  // This rank's memory. Throws CudaError, std::invalid_argument.
  explicit IpcRing(const IpcSettings& settings);
  ~IpcRing();
  IpcRing(const IpcRing&) = delete;
  IpcRing& operator=(const IpcRing&) = delete;

  StagingPart part() const;

  // Maps the memory of the neighbours and writes a pattern into it. Throws CudaError, std::system_error.
  void open(IpcPeers peers);

  // Looks whether the neighbours' patterns arrived, then makes the memory ready for calls. Throws CudaError.
  void prove();

  // Enqueues the call on `stream`, a cudaStream_t, behind the last one; does not wait. Throws what check() throws.
  void run(const IpcCall& call, std::uintptr_t stream);

  // Ends the ring on every rank: waits of kernels that run, too.
  void abort(const std::string& reason);

  // Throws RingFailure once a call has failed on any rank, or after close(). A call that still runs has not.
  void check();

  // Of the last call that has ended and had counts.
  double total_count() const;
  IpcStats stats() const;

  // Waits for this rank's calls, then leaves the ring: the memory goes once the neighbours have let go of it, or after 5
  // s. Also takes back a ring that could not be made.
  void close();

 private:
  struct Resources;

  bool forked() const;
  void check_fork() const;
  std::vector<int> neighbours() const;
  void check_peer_access(int rank, const StagingPart& peer) const;
  void open_neighbours(const IpcPeers& peers);
  Links links() const;
  Launch plan(const IpcCall& call) const;
  void count(const Launch& launch);
  void watch();
  void leave();

  int left() const { return (settings_.rank + settings_.world - 1) % settings_.world; }
  int right() const { return (settings_.rank + 1) % settings_.world; }

  const IpcSettings settings_;
  const pid_t process_;
  std::unique_ptr<Resources> resources_;
  std::mutex calling_;
  std::atomic<bool> closed_ = false;
  mutable std::mutex stats_mutex_;
  IpcStats stats_{};
};

}  // namespace ring_reduce
