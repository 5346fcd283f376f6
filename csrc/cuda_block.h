// The team of a GPU lane: a thread block.
#pragma once

#include "cuda_chunk.h"

namespace ring_reduce {

// What the threads of a block tell each other about the move in hand. Written between the barrier at the end of a move
// and the one in the middle of the next, read between that and its end. Kept here and not in registers, of which the
// passes need all.
struct BlockShared {
  Combination pass;
  double partial_count;  // of the segment in hand, this rank included
  double total_count;    // of the call, once it is known
  int failed;            // the call can't go on; never set back
};

#if defined(__CUDACC__)
class CudaBlock {
 public:
  __device__ explicit CudaBlock(BlockShared& shared) : shared_(shared) {}
  __device__ unsigned thread() const { return threadIdx.x; }
  __device__ unsigned threads() const { return blockDim.x; }
  __device__ void barrier() const { __syncthreads(); }
  __device__ BlockShared& shared() const { return shared_; }

 private:
  BlockShared& shared_;
};
#endif

}  // namespace ring_reduce
