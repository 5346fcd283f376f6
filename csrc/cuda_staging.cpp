#include "cuda_staging.h"

#include "cuda_device.h"
#include "cuda_error.h"

#include <array>
#include <cuda_runtime.h>
#include <stdexcept>
#include <vector>

namespace ring_reduce {

namespace {

// cudaMalloc cuts small allocations from blocks of this size, and a handle shares the block: it shall be ours alone.
constexpr std::size_t kBlockBytes = std::size_t{2} << 20;

std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

using Pattern = std::array<std::uint64_t, kLineBytes / sizeof(std::uint64_t)>;

Pattern pattern_of(const Proof& proof, std::size_t place) {
  Pattern pattern{};
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const std::uint64_t x = proof.token + static_cast<std::uint64_t>(proof.writer) * 8191 + place * 131 + i;
    pattern[i] = (x ^ x >> 29) * 0x9e3779b97f4a7c15;
  }
  return pattern;
}

// Where the writer on the other side of `side` writes in calls: the ends of what it reaches.
std::array<std::byte*, 2> places(std::byte* slots, const StagingShape& shape, Side side) {
  const LaneLink first(slots, shape, 0), last(slots, shape, shape.lanes - 1);
  if (side == Side::left) {
    return {reinterpret_cast<std::byte*>(first.taken()), reinterpret_cast<std::byte*>(last.taken())};
  }
  std::byte* end = last.slot(static_cast<std::uint64_t>(shape.depth) - 1) + shape.slot_bytes();
  return {first.slot(0), end - kLineBytes};
}

bool holds(const std::byte* place, const Pattern& pattern, const std::string& what) {
  Pattern found{};
  check_cuda(cudaMemcpy(&found, place, sizeof found, cudaMemcpyDeviceToHost), "reading " + what);
  return found == pattern;
}

}  // namespace

void check_shape(const StagingShape& shape, int window) {
  if (window < 1 || window >= shape.depth) {
    throw std::invalid_argument("window=" + std::to_string(window) + " and depth=" + std::to_string(shape.depth) +
                                ": 1 <= window < depth has to hold");
  }
  if (shape.segment_bytes == 0 || shape.segment_bytes % kLineBytes != 0 || shape.segment_bytes > (1u << 30)) {
    throw std::invalid_argument("segment_bytes=" + std::to_string(shape.segment_bytes) +
                                ": it has to be a multiple of " + std::to_string(kLineBytes) + " up to 2**30");
  }
}

Staging::Staging(const StagingShape& shape, int device) : shape_(shape), device_(device) {
  const std::size_t bytes = rounded_up(slots_offset() + shape.bytes(), kBlockBytes);
  check_cuda(cudaMalloc(&allocation_, bytes), "allocating " + std::to_string(bytes) + " bytes for the ring's slots");
}

Staging::~Staging() {
  cudaFree(allocation_);
  static_cast<void>(cudaGetLastError());
}

std::size_t Staging::slots_offset() const {
  return kLineBytes + rounded_up(static_cast<std::size_t>(shape_.lanes) * sizeof(LaneCounters), kLineBytes);
}

std::byte* Staging::slots() const { return allocation_ + slots_offset(); }

StagingPart Staging::part() const {
  cudaIpcMemHandle_t handle{};
  check_cuda(cudaIpcGetMemHandle(&handle, allocation_), "exporting the ring's slots by CUDA IPC");
  return {std::string(reinterpret_cast<const char*>(&handle), sizeof handle), slots_offset(), device_uuid(device_)};
}

void Staging::start(std::uint64_t first_segment) {
  const auto copy = [](void* to, const void* from, std::size_t bytes) {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "starting the ring's counters");
  };
  check_cuda(cudaMemset(slots(), 0xff, shape_.bytes()), "clearing the ring's slots");  // a header of ones fits no call
  check_cuda(cudaMemset(state(), 0, sizeof(RankState)), "clearing the ring's state");
  const std::vector<LaneCounters> start(static_cast<std::size_t>(shape_.lanes), {first_segment, first_segment});
  copy(counters(), start.data(), start.size() * sizeof(LaneCounters));
  for (int lane = 0; lane < shape_.lanes; ++lane) {
    const LaneLink link(slots(), shape_, lane);
    copy(link.posted(), &first_segment, sizeof first_segment);
    copy(link.taken(), &first_segment, sizeof first_segment);
  }
  check_cuda(cudaDeviceSynchronize(), "starting the ring");
}

PeerStaging::PeerStaging(const StagingPart& part, const std::string& what) : offset_(part.offset) {
  cudaIpcMemHandle_t handle{};
  if (part.handle.size() != sizeof handle) {
    throw CudaError(what + ": its handle has " + std::to_string(part.handle.size()) + " bytes and not " +
                    std::to_string(sizeof handle) + "; every rank has to run the same version of ring_reduce");
  }
  part.handle.copy(reinterpret_cast<char*>(&handle), sizeof handle);
  void* base = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess),
             "opening " + what + " by CUDA IPC (in a container: is --ipc=host or --pid=host missing?)");
  allocation_ = static_cast<std::byte*>(base);
}

PeerStaging::~PeerStaging() {
  cudaIpcCloseMemHandle(allocation_);
  static_cast<void>(cudaGetLastError());
}

std::byte* PeerStaging::slots() const { return allocation_ + offset_; }

void write_proof(std::byte* slots, const StagingShape& shape, Side side, const Proof& proof, const std::string& what) {
  const auto all = places(slots, shape, side);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Pattern pattern = pattern_of(proof, i);
    check_cuda(cudaMemcpy(all[i], &pattern, sizeof pattern, cudaMemcpyHostToDevice), "writing " + what);
    if (!holds(all[i], pattern, what)) {
      throw CudaError("a pattern written into " + what + " was not read back: peer access does not work here");
    }
    if (all[0] == all[1]) break;  // one lane has one line of a counter
  }
}

void check_proof(std::byte* slots, const StagingShape& shape, Side side, const Proof& proof, const std::string& what) {
  const auto all = places(slots, shape, side);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!holds(all[i], pattern_of(proof, i), what)) {
      throw CudaError("the pattern that rank " + std::to_string(proof.writer) + " wrote into " + what +
                      " did not arrive: peer access does not work here");
    }
    if (all[0] == all[1]) break;
  }
}

}  // namespace ring_reduce
