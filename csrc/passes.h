// The passes over memory that a CPU rank makes, and the widest vectors that this machine has for them.
#pragma once

#include "element.h"

namespace ring_reduce {

// out = (x * x_scale + y * y_scale) / divisor, element by element; y may be null. Computed in float64 for float64, in the
// integer itself for integers (no scales, no divisor), else in float32; rounded once. `out` may be x or y; else it overlaps neither.
struct Combine {
  std::byte* out;
  const std::byte* x;
  const std::byte* y;
  std::size_t elements;
  double x_scale = 1.0;
  double y_scale = 1.0;
  double divisor = 1.0;
};

// out = (inputs[0] * scales[0] + inputs[1] * scales[1] + ...) / divisor, added in this order, and computed as in
// Combine. `out` may be one of the inputs; else it overlaps none.
struct AddAll {
  std::byte* out;
  const std::byte* const* inputs;
  const double* scales;
  std::size_t count;  // of the inputs, at least 1
  std::size_t elements;
  double divisor;
};

// sum = sum + scale * x, or sum = scale * x where `fresh`: what stood in a fresh sum does not matter, NaN included. The
// sum is float64 for float64, else float32, and both operations round in its type. A scale of 0 leaves x out by choosing,
// not by multiplying, so that a NaN stays out. `x` may be the sum; else they don't overlap.
struct Accumulate {
  std::byte* sum;
  const std::byte* x;
  std::size_t elements;
  double scale;
  bool fresh;
};

// out = sum / divisor, of a sum as above: divided in the sum's type, then rounded once. A divisor of 0 gives zeros, even
// over NaN. `out` may be the sum where their types agree; else they don't overlap.
struct Divide {
  std::byte* out;
  const std::byte* sum;
  std::size_t elements;
  double divisor;
};

struct Passes {
  const char* isa;
  int vector_bits;
  void (*combine[kElementTypes])(const Combine&);
  void (*add_all[kElementTypes])(const AddAll&);
  void (*accumulate[kFloatTypes])(const Accumulate&);  // by the type of x
  void (*divide[kFloatTypes])(const Divide&);          // by the type of out
  // Like memcpy, past the caches. Its stores are fenced before it returns, so that a later publish() covers them.
  void (*stream_copy)(std::byte* out, const std::byte* in, std::size_t bytes);
};

const Passes& baseline_passes();
const Passes& avx2_passes();
const Passes& avx512_passes();

// The widest that this processor runs, chosen once.
const Passes& passes();

}  // namespace ring_reduce
