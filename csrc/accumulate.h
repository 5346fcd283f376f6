// An accumulator's passes over many tensors in one call: scaled sums, and their one division.
#pragma once

#include "element.h"

#include <vector>

namespace ring_reduce {

// Where the tensors of one pass lie. The vectors have one entry for each tensor.
struct TensorList {
  std::vector<std::uintptr_t> sums;    // float64 for float64, else float32
  std::vector<std::uintptr_t> others;  // what is added to the sums, or what gets their quotient
  std::vector<std::uint64_t> elements;
  std::vector<int> types;  // ElementType of the others
};

// sums = (fresh ? nothing : sums) + scale * inputs; see Accumulate. Throws std::invalid_argument.
void accumulate(const TensorList& tensors, const std::vector<bool>& fresh, double scale, int threads);

// outputs = sums / divisor; see Divide. Throws std::invalid_argument.
void divide_into(const TensorList& tensors, double divisor, int threads);

}  // namespace ring_reduce
